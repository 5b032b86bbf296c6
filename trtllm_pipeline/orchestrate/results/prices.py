"""Prices of a GPU for an hour, and what tokens cost at them.

A price is one number for all GPUs, or a number by type: `2.50`, or `H100=2.50,L40S=1.10` and `{H100: 2.50, L40S: 1.10}`. A type is
a part of the GPU's name, or of the cluster's name for it. A cell without a GPU has the price of its host.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from trtllm_pipeline.base import Json, UsageError
from trtllm_pipeline.measure import Conditions

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.results.report_file import CellResult

C = TypeVar("C", bound="CellResult")
Prices = float | Mapping[str, float]
_EXAMPLE: Final = "such as --gpu-hour 2.50, or --gpu-hour H100=2.50,L40S=1.10"


def parse_prices(text: str) -> Prices:
    """The prices on a command line. Raises UsageError."""
    by_type = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf or (bool(equals) != bool(name.strip())):
            raise UsageError(f"--gpu-hour: {part.strip()!r} is not a price", hint=_EXAMPLE)
        by_type[name.strip()] = price
    if "" in by_type and len(by_type) > 1:
        raise UsageError("--gpu-hour: give one price, or a price for each type of GPU", hint=_EXAMPLE)
    return by_type.get("", by_type)


def price_of(prices: Json | Prices, axes: Mapping[str, Json], conditions: Conditions) -> float | None:
    """The price of one GPU of a cell for an hour. None if its type has none."""
    if isinstance(prices, Mapping):
        names = [name.casefold() for name in _names(axes, conditions)]
        known = (price for kind, price in prices.items() if any(kind.casefold() in name for name in names))
        prices = next(known, None)
    return float(prices) if isinstance(prices, (int, float)) and not isinstance(prices, bool) else None


def with_price(cell: C, prices: Prices | None) -> C:
    """A cell at other prices. Without any, its own stays."""
    return cell if prices is None else replace(cell, gpu_hour=price_of(prices, cell.axes, cell.conditions))


def _names(axes: Mapping[str, Json], conditions: Conditions) -> Collection[str]:
    """Names of a cell's GPUs: measured, and as the matrix has it."""
    measured = (conditions.system or {}).get("gpus")
    return [str(name) for name in (axes.get("gpu"), *(measured if isinstance(measured, list) else ())) if name]


def per_million_tokens(gpu_hour: float, gpus: int, output_tokens_per_s: float) -> float:
    """The price of a million output tokens at a rate."""
    return gpu_hour * gpus / 3600 / output_tokens_per_s * 1e6
