"""What another process knows of the time that a run takes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.waiting import eventually
from tests.integration.test_pipeline import TINY, pipeline, start, wait_until_gone
from trtllm_pipeline.show.progress.left import read


def test_status_says_what_a_run_expects_and_what_became_of_that(tmp_path: Path) -> None:
    process = start("run", "--matrix", TINY, "--until", "convert", "--progress", "json", cwd=tmp_path)
    _, err = process.communicate(timeout=300)
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    report = json.loads(pipeline("report", "--format", "json", cwd=tmp_path))
    forecast = {name: value for name, value in lines[-1].items() if name not in ("event", "time_s")}
    assert (lines[-1]["event"], forecast) == ("forecast", report["run"]["forecast"])
    done = json.loads(pipeline("status", "--format", "json", cwd=tmp_path))
    assert (done["left_s"], done["forecast"]) == (None, forecast)
    said_at_the_end = pipeline("status", cwd=tmp_path).splitlines()[-1]
    assert said_at_the_end.startswith("Took ")
    assert said_at_the_end in pipeline("report", cwd=tmp_path)

    process = start("run", "--matrix", TINY, "--progress", "quiet", cwd=tmp_path)
    assert eventually(lambda: any(read(plan.parent) for plan in tmp_path.glob(".pipeline/runs/*/plan.json")))
    said = json.loads(pipeline("status", "--format", "json", cwd=tmp_path))
    assert said["left_s"] > 0
    assert (said["left_complete"], said["forecast"]) == (False, None)
    process.kill()
    process.communicate()
    wait_until_gone(tmp_path)
    killed = json.loads(pipeline("status", "--format", "json", cwd=tmp_path))
    assert (killed["left_s"], killed["left_complete"], killed["forecast"]) == (None, None, None)
