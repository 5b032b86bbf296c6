"""Names of axes, and the canonical spelling of values that can be written in several ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from trtllm_pipeline.base import Json, layout_name

SETTINGS_PREFIX: Final = "settings."
"""Prefix of an axis that varies a setting: `settings.perf.concurrency`."""
PARALLEL: Final = re.compile(r"tp([1-9]\d{0,3})(?:pp([1-9]\d{0,3}))?(?:ep([1-9]\d{0,3}))?")
_LENGTHS: Final = re.compile(r"([1-9]\d{0,8}), ?([1-9]\d{0,8})")


class Parallelism(NamedTuple):
    """Tensor, pipeline and expert parallelism."""

    tp: int
    """GPUs that share each layer."""
    pp: int = 1
    """Pipeline stages, groups of consecutive layers."""
    ep: int = 1
    """Groups of the `tp` GPUs that hold whole experts. 1 splits each expert over all GPUs."""


def parse_parallel(text: str) -> Parallelism:
    """The sizes in `tp4pp2ep4`. `tp4` means `tp4pp1ep1`. Raises ValueError for other text."""
    match = PARALLEL.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a valid parallelism: write tp4, tp4pp2 with pipeline stages, tp4ep4 or tp4pp2ep4 with expert "
            "parallelism"
        )
    sizes = Parallelism(*(int(size or 1) for size in match.groups()))
    if sizes.tp % sizes.ep:
        raise ValueError(
            f"{text!r}: ep{sizes.ep} must divide tp{sizes.tp}, whose GPUs the experts are distributed over"
        )
    return sizes


def parse_lengths(text: str) -> tuple[int, int]:
    """Input and output tokens of `2048,1024`. Raises ValueError for other text."""
    match = _LENGTHS.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a pair of lengths: write "ISL,OSL" in tokens, such as "2048,1024"')
    return int(match[1]), int(match[2])


def canonical_parallel(text: str) -> str:
    """`tp4pp1` for `tp4`, `tp4pp1ep4` for `tp4ep4`: the spelling in ids and comparisons."""
    tp, pp, ep = parse_parallel(text)
    return layout_name(tp, pp, ep if ep > 1 else None)


def canonical_lengths(text: str) -> str:
    """`2048,1024` for `2048, 1024`."""
    isl, osl = parse_lengths(text)
    return f"{isl},{osl}"


def setting_axes(axes: Mapping[str, object]) -> list[str]:
    """Names of the axes that vary a setting, in the order of the file."""
    return [name for name in axes if name.startswith(SETTINGS_PREFIX)]


def nested(name: str, value: Json) -> dict[str, Json]:
    """`{"perf": {"concurrency": value}}` for the axis `settings.perf.concurrency`."""
    first, *rest = name.removeprefix(SETTINGS_PREFIX).split(".")
    for key in reversed(rest):
        value = {key: value}
    return {first: value}
