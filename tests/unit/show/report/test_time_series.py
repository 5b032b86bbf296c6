"""Samples over the time of a level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_pipeline.show.report.time_series import of_measurement

START_NS = 5_000_000_000


def write(folder: Path, *events: dict[str, Any]) -> Path:
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return folder


def of_level(kind: str, concurrency: int | None = 4, rate: float | None = None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "concurrency": concurrency, "request_rate": rate, "repeat": 0, **more}


def test_each_level_has_its_series(tmp_path: Path) -> None:
    gauges = [[START_NS + second * 10**9, 3.0, None if second else 1.0, 0.25] for second in range(3)]
    gpus = [[[START_NS, 300.0, 1, 2, 3, 4], [START_NS + 10**9, 320.0, 1, 2, 3, 4]], [[START_NS, 100.0, 1, 2, 3, 4]]]
    devices = [{"name": "GPU", "uuid": str(number), "samples": samples} for number, samples in enumerate(gpus)]
    write(
        tmp_path,
        of_level("gauges", samples=gauges),
        of_level("request", text='{"type": "gauges"'),
        of_level("gpu", devices=devices),
        of_level("gauges", None, 2.5, samples=gauges[:1]),
    )
    found = of_measurement(tmp_path)
    assert found["4"] == {
        "requests in flight": [(0.0, 3.0), (1.0, 3.0), (2.0, 3.0)],
        "requests waiting": [(0.0, 1.0)],
        "KV cache %": [(0.0, 25.0), (1.0, 25.0), (2.0, 25.0)],
        "GPU power W": [(0.0, 400.0)],
    }
    assert list(found) == ["4", "2.5/s"]


def test_long_series_are_means_of_neighbors(tmp_path: Path) -> None:
    samples = [[START_NS + place * 10**8, float(place), None, None] for place in range(600)]
    write(tmp_path, of_level("gauges", samples=samples))
    (series,) = of_measurement(tmp_path)["4"].values()
    assert len(series) == 60
    assert series[0][1] == 4.5


def test_a_file_that_is_missing_or_damaged_has_none(tmp_path: Path) -> None:
    assert of_measurement(tmp_path) == {}
    write(tmp_path, of_level("gauges", samples=[["x"]]))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"type": "gauges", "conc')
    assert of_measurement(tmp_path) == {}
