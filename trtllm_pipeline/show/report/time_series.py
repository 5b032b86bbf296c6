"""Queue, KV cache and power over a level's time, from the samples in a measurement's event file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.measure import EVENTS_FILE, result

_POINTS: Final = 60
_GAUGES: Final = (("requests in flight", 1), ("requests waiting", 1), ("KV cache %", 100))
"""Name and factor of each gauge, in the order of a sample."""
_POWER: Final = "GPU power W"
Series = Mapping[str, Sequence[tuple[float, float]]]
"""Name -> (seconds since the level's first sample, value)."""


def of_measurement(folder: Path) -> dict[str, Series]:
    """The series of each level by its key. Empty if the file is missing or has no samples."""
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for event in _sampled(folder / EVENTS_FILE):
        with suppress(KeyError, TypeError, ValueError, IndexError):  # written by another release
            key = result.load_key(event["concurrency"], event["request_rate"])
            for name, at_ns, value in _values(event):
                points.setdefault(key, {}).setdefault(name, []).append((at_ns, value))
    starts_ns = {key: min(at_ns for found in series.values() for at_ns, *_ in found) for key, series in points.items()}
    return {
        key: {name: _short(found, starts_ns[key]) for name, found in series.items()} for key, series in points.items()
    }


def _sampled(path: Path) -> Iterator[Any]:
    """The events with samples. Requests, which are nearly all lines, are skipped unread."""
    with suppress(OSError, ValueError), path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(('{"type": "gauges"', '{"type": "gpu"')):
                yield json.loads(line)


def _values(event: Any) -> Iterator[tuple[str, int, float]]:
    if event["type"] == "gauges":
        for at_ns, *values in event["samples"]:
            for (name, factor), value in zip(_GAUGES, values, strict=False):
                if value is not None:
                    yield name, at_ns, value * factor
        return
    devices = [device["samples"] for device in event["devices"]]
    for samples in zip(*devices, strict=False):  # the devices are read one after another
        if all(sample[1] is not None for sample in samples):
            yield _POWER, samples[0][0], sum(sample[1] for sample in samples)


def _short(found: Sequence[tuple[int, float]], start_ns: int) -> list[tuple[float, float]]:
    """At most `_POINTS` means of neighboring points."""
    ordered = sorted(found)
    each = -(-len(ordered) // _POINTS)
    parts = [ordered[place : place + each] for place in range(0, len(ordered), each)]
    return [
        (
            round((sum(at_ns for at_ns, _ in part) / len(part) - start_ns) / 1e9, 1),
            float(f"{sum(value for _, value in part) / len(part):.4g}"),
        )
        for part in parts
    ]
