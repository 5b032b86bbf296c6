"""The load of a matrix that names no load, on stand-ins of every kind of server: the cell's lengths up to its batch size."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_runs import Lane
from trtllm_pipeline.measure import Objectives, analyze
from trtllm_pipeline.models import read_tokenizer

STAND_IN = Path(__file__).parents[1] / "standins" / "openai_server.py"
MATRIX = """\
name: load
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [4]
  lengths: ["64,40"]
settings: { perf: { exclusive: none } }
"""
BUSY = {"client_cpu", "client_lag"}
"""Checks that a busy machine fails, because stand-ins answer at once."""


LOADS = [(1, 32, 0), (4, 32, 0)]


def lane_of(folder: Path, release: str, **axes: list[str]) -> Lane:
    lane = Lane(folder / "lane", release, gpus=1)
    rows = "".join(f"  {name.replace('__', '.')}: [{', '.join(values)}]\n" for name, values in axes.items())
    lane.matrix.write_text(MATRIX.replace("settings:", f"{rows}settings:"), encoding="utf-8")
    return lane


def measured(lane: Lane) -> list[dict[str, Any]]:
    """The last measurement of each cell, also if the machine was too busy to accept it."""
    _, said = lane.start(*lane.words("--until", "perf")).communicate(timeout=500)
    tokenizer = read_tokenizer(lane.outputs("download")[0])
    files = {}
    for path in sorted(lane.workspace.glob("*/**/events.jsonl"), key=os.path.getmtime):
        assert path.parent.parent.parent.name in {"perf", "work"}, said
        files[json.loads((path.parent.parent / "job.json").read_text())["fingerprint"]] = path
    found = [analyze(path, tokenizer, Objectives({})) for path in files.values()]
    assert [each for result in found for each in result.invalid if each.check not in BUSY] == []
    return [result.to_json() for result in found]


def check_load(result: Mapping[str, Any], loads: Sequence[tuple[int, int, int]] = LOADS) -> None:
    levels = result["levels"]
    assert [(level["concurrency"], level["requests"], level["failures"]) for level in levels] == [*loads]
    for level in levels:
        asked, made = level["input_tokens_per_request"], level["output_tokens_per_request"]
        assert (asked["min"], asked["max"]) == (64, 64)
        assert made["max"] <= 40
        assert made["min"] == 40 or not result["settings"]["exact_length"]


@pytest.mark.parametrize(
    "release",
    ["0.10.0", *(pytest.param(release, marks=pytest.mark.nightly) for release in ("0.12.0", "1.0.0")), "1.2.0"],
)
def test_engines_in_triton(tmp_path: Path, release: str) -> None:
    (result,) = measured(lane_of(tmp_path, release))
    assert result["settings"]["exact_length"] is True
    check_load(result)


def test_the_llm_api_in_triton_cannot_set_an_exact_length(tmp_path: Path) -> None:
    lane = lane_of(tmp_path, "1.2.0", toolchain=["tensorrt_llm_pytorch"])
    lane.matrix.write_text(lane.matrix.read_text().replace("max_batch_size: [4]", "max_batch_size: [16]"))
    assert "64 in, up to 40 out, 1/4/16 in flight, 32 to 128 requests" in lane.pipeline("plan", str(lane.matrix))
    (result,) = measured(lane)
    assert result["settings"]["exact_length"] is False
    check_load(result, [*LOADS, (16, 128, 0)])


def test_other_openai_servers(tmp_path: Path) -> None:
    names = ["vllm", "sglang", "transformers"]
    lane = lane_of(tmp_path, "1.2.0", toolchain=names)
    for name in names:
        program = lane.installed.bin / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {name} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    results = measured(lane)
    assert sorted(result["settings"]["exact_length"] for result in results) == [False, True, True]
    for result in results:
        check_load(result)
