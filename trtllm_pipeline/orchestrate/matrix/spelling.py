"""Names of axes, and the one spelling of their values that can be written in several ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from trtllm_pipeline.base import Json, layout_name

SETTINGS_PREFIX: Final = "settings."
"""Start of the name of an axis that varies a setting: `settings.perf.concurrency`."""
PARALLEL: Final = re.compile(r"tp([1-9]\d{0,3})(?:pp([1-9]\d{0,3}))?(?:ep([1-9]\d{0,3}))?")
_LENGTHS: Final = re.compile(r"([1-9]\d{0,8}), ?([1-9]\d{0,8})")


class Parallelism(NamedTuple):
    """A layout over GPUs."""

    tp: int
    """GPUs that share each layer."""
    pp: int = 1
    """Groups of layers, one after another."""
    ep: int = 1
    """Groups of the `tp` GPUs that hold whole experts; 1 splits each expert over all of them."""


def parse_parallel(text: str) -> Parallelism:
    """Tensor, pipeline and expert parallel sizes of `tp4pp2ep4`; `tp4` is `tp4pp1ep1`. Raises ValueError for anything else."""
    match = PARALLEL.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a layout over GPUs: write tp4, tp4pp2 with pipeline stages, tp4ep4 or tp4pp2ep4 with expert "
            "parallelism"
        )
    found = Parallelism(*(int(size or 1) for size in match.groups()))
    if found.tp % found.ep:
        raise ValueError(
            f"{text!r}: experts are dealt among the GPUs of tp{found.tp}, which ep{found.ep} does not divide"
        )
    return found


def parse_lengths(text: str) -> tuple[int, int]:
    """Input and output tokens of `2048,1024`. Raises ValueError for anything else."""
    match = _LENGTHS.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a pair of lengths: write "ISL,OSL" in tokens, such as "2048,1024"')
    return int(match[1]), int(match[2])


def canonical_parallel(text: str) -> str:
    """`tp4pp1` for `tp4`, `tp4pp1ep4` for `tp4ep4`: the one spelling used in ids and comparisons."""
    tp, pp, ep = parse_parallel(text)
    return layout_name(tp, pp, ep if ep > 1 else None)


def canonical_lengths(text: str) -> str:
    """`2048,1024` for `2048, 1024`."""
    isl, osl = parse_lengths(text)
    return f"{isl},{osl}"


def setting_axes(axes: Mapping[str, object]) -> list[str]:
    """Names of the axes that vary a setting, in the order they were written."""
    return [name for name in axes if name.startswith(SETTINGS_PREFIX)]


def nested(name: str, value: Json) -> dict[str, Json]:
    """`{"perf": {"concurrency": value}}` for the axis `settings.perf.concurrency`."""
    first, *rest = name.removeprefix(SETTINGS_PREFIX).split(".")
    for key in reversed(rest):
        value = {key: value}
    return {first: value}
