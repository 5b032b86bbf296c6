"""Prices of a GPU per hour, as on a command line.

A price is one number for all GPUs, or a number by type: `2.50`, or `H100=2.50,L40S=1.10` and
`{H100: 2.50, L40S: 1.10}`. A type is a part of the GPU's name, or of the cluster's name for it. A cell without a GPU
has the price of its host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.orchestrate import report_file

C = TypeVar("C", bound=report_file.CellResult)
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


def with_price(cell: C, prices: Prices | None) -> C:
    """A cell at other prices. Without any, it keeps its own."""
    return cell if prices is None else replace(cell, gpu_hour=report_file.price_of(prices, cell.axes, cell.conditions))
