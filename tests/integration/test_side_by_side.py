"""Measuring side by side: real Tritons and real loads on GPUs of stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_runs import PLAIN, Lane
from trtllm_pipeline.store.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_two_cells_are_measured_at_the_same_time_and_one_of_them_alone_as_well(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.0.0")
    text = lane.matrix.read_text().replace("  - { precision: fp16, max_batch_size: 4 }\n", "")
    lane.matrix.write_text(text.replace("exclusive: none", "exclusive: gpu, input_data: prompts.jsonl"))
    prompts = (json.dumps({"id": str(number), "input": f"Count to {number}."}) for number in range(1, 17))
    (lane.folder / "prompts.jsonl").write_text("\n".join(prompts))
    found = lane.run("--cells", "fp16", "--cells", "alone:*")
    other = PLAIN.replace("bs2", "bs4")
    assert set(found) == {PLAIN, other, f"alone:{PLAIN}"}

    jobs = [json.loads(path.read_text()) for path in lane.workspace.glob("store/perf/*/job.json")]
    one, two = (job for job in jobs if job["params"].get("exclusive") == "gpu")
    (alone,) = (job for job in jobs if "exclusive" not in job["params"])
    store = Store(lane.workspace)
    (run,) = store.index.runs()
    attempts = store.index.attempts_of(run.id)
    store.close()

    def overlap(job: dict[str, Any], other: dict[str, Any]) -> bool:
        """Whether any attempts do: one that a busy machine spoilt is made again, when the other may be through."""
        mine, theirs = ([row for row in attempts if row.fingerprint == each["fingerprint"]] for each in (job, other))
        assert mine
        assert theirs
        return any(a.started_s < (b.ended_s or 0) and b.started_s < (a.ended_s or 0) for a in mine for b in theirs)

    assert overlap(one, two), "both at the same time"
    assert not overlap(alone, one)
    assert not overlap(alone, two)
    assert not set(one["gpus"]) & set(two["gpus"])
    assert one["cpus"]
    assert two["cpus"]
    if len(os.sched_getaffinity(0)) >= 4:  # a core for each of the four GPUs
        assert not set(one["cpus"]) & set(two["cpus"])
    assert alone["cpus"] == []

    assert any("settings.perf.exclusive is gpu" in each for each in found[PLAIN]["findings"])
    report = lane.pipeline("report", "--workspace", str(lane.workspace), "--format", "markdown")
    assert "beside 1 other over alone, concurrency" in report
