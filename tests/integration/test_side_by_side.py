"""Measuring side by side: real Tritons and real loads on GPUs of stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.helpers.trtllm_runs import PLAIN, Lane
from trtllm_pipeline.orchestrate.store.index import AttemptRow
from trtllm_pipeline.orchestrate.store.store import Store


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
    one, two = (job for job in jobs if job["params"]["exclusive"] == "gpu")
    (alone,) = (job for job in jobs if job["params"]["exclusive"] == "control")
    store = Store(lane.workspace)
    (run,) = store.index.runs()
    attempts = store.index.attempts_of(run.id)
    store.close()

    def server(job: dict[str, Any]) -> AttemptRow:
        (found,) = (row for row in attempts if job["inputs"]["service"].startswith(f"{row.folder}/"))
        return found

    def overlap(job: dict[str, Any], other: dict[str, Any]) -> bool:
        mine, theirs = server(job), server(other)
        return mine.started_s < (theirs.ended_s or 0) and theirs.started_s < (mine.ended_s or 0)

    assert overlap(one, two), "both at the same time"
    assert not overlap(alone, one)
    assert not overlap(alone, two)
    assert not set(one["gpus"]) & set(two["gpus"])
    assert one["cpus"]
    assert two["cpus"]
    if len(os.sched_getaffinity(0)) >= 4:  # a core for each of the four GPUs
        assert not set(one["cpus"]) & set(two["cpus"])
    (beside,) = (job for job in (one, two) if job["inputs"]["engine"] == alone["inputs"]["engine"])
    assert len(alone["cpus"]) == len(beside["cpus"]), "what differs is the neighbour alone"

    assert any("settings.perf.exclusive is gpu" in each for each in found[PLAIN]["findings"])
    report = lane.pipeline("report", "--workspace", str(lane.workspace), "--format", "markdown")
    # On a busy machine one server may be ready when the other has been measured, or half of it. The report says so.
    begin = {cell: found[cell]["conditions"]["measured_s"] for cell in (PLAIN, other)}
    end = {cell: begin[cell] + found[cell]["seconds"]["perf"] for cell in begin}
    share = (min(end.values()) - max(begin.values())) / found[PLAIN]["seconds"]["perf"]
    assert ("alongside 1 other vs. alone, concurrency" if share >= 0.5 else "too little to show an effect") in report
