"""What a run was expected to take beside what it took."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from tests.helpers import fabricated
from tests.unit.orchestrate.run.test_forecast import cell
from tests.unit.show.report.test_writers import row
from trtllm_pipeline.base.errors import StateError
from trtllm_pipeline.orchestrate.memory.estimates import GPU, HOST, TIME
from trtllm_pipeline.orchestrate.results.report_file import read_report, report_json
from trtllm_pipeline.orchestrate.run.forecast import ForecastCheck, StageForecast, checked, forecast
from trtllm_pipeline.orchestrate.store.index import Peak
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.report.report_formats import Report
from trtllm_pipeline.show.report.writers import to_markdown, write_table

PLAN = fabricated.plan(cell(), cell(precision="int8_wo"))
SEEN = forecast(PLAN, None)
CHECK = ForecastCheck(
    121.0,
    100.0,
    (
        StageForecast("convert", TIME, 2, 30_000, 60_000),
        StageForecast("convert", HOST, 2, 1_100_000_000, 1_000_000_000),
        StageForecast("build", TIME, 2, 50_000, 10_000),
        StageForecast("build", GPU, 2, 970_000_000, 1_000_000_000),
    ),
)


def test_time_is_added_up_and_memory_is_that_of_the_largest() -> None:
    first, second = (fabricated.stage_run(PLAN, each, "convert") for each in PLAN.cells)
    taken = {
        first.fingerprint: {"ms": 1000, "host": 400_000_000, "gpu": 0},
        second.fingerprint: {"ms": 3000, "host": 300_000_000, "gpu": 0},
    }
    found = checked(PLAN, SEEN, taken, 5.0, comparable=True)
    assert (found.expected_s, found.took_s) == (SEEN.total_s, 5.0)
    time, host = found.stages
    assert (time.resource, time.stage_runs, time.taken) == (TIME, 2, 4000)
    assert time.expected == SEEN.times[first.id].value + SEEN.times[second.id].value
    (needed,) = (
        need for need in SEEN.needs if (need.stage, need.cell, need.resource) == ("convert", PLAN.cells[0].id, HOST)
    )
    assert (host.resource, host.taken, host.expected) == (HOST, 400_000_000, needed.estimate.value)


def test_a_run_that_did_nothing_or_not_all_is_not_compared_as_a_whole() -> None:
    assert checked(PLAN, SEEN, {}, 0.1, comparable=True) is None
    run = fabricated.stage_run(PLAN, PLAN.cells[0], "build")
    failed = checked(PLAN, SEEN, {run.fingerprint: {"ms": 1}}, 5.0, comparable=False)
    assert failed.expected_s is None
    assert failed.line() == "Took 5.0 s"


def test_the_whole_and_every_stage_have_a_line() -> None:
    assert CHECK.line() == "Took 1:40 (estimate 2:01)"
    assert CHECK.lines() == [
        "convert: took 1:00 (estimate 30 s); 1.0 GB of host memory (estimate 1.1 GB)",
        "build: took 10 s (estimate 50 s); 1.0 GB of GPU memory (estimate 970 MB)",
    ]


def test_a_report_has_it_in_every_format_and_reads_it_back(tmp_path: Path) -> None:
    rows = [row("fp16")]
    (tmp_path / "report.json").write_text(
        "\n".join(report_json(rows, "run-1", "m.yaml", forecast=CHECK)), encoding="utf-8"
    )
    assert read_report(tmp_path / "report.json")[1]["forecast"] == CHECK
    short, full = io.StringIO(), io.StringIO()
    write_table(Report(rows=rows, stream=short, forecast=CHECK))
    write_table(Report(rows=rows, stream=full, forecast=CHECK, verbose=True))
    assert CHECK.line() in " ".join(short.getvalue().split())
    assert CHECK.lines()[0] not in short.getvalue()
    assert all(line in " ".join(full.getvalue().split()) for line in CHECK.lines())
    assert CHECK.lines()[1] in to_markdown(Report(rows=rows, forecast=CHECK))


@pytest.mark.parametrize("stages", [[{"stage": "build"}], [{**dataclasses.asdict(CHECK.stages[0]), "taken": 0}], 3])
def test_a_damaged_forecast_is_a_damaged_report(stages: object, tmp_path: Path) -> None:
    told = json.loads("\n".join(report_json([row("fp16")], "run-1", "m.yaml", forecast=CHECK)))
    told["run"]["forecast"]["stages"] = stages
    (tmp_path / "report.json").write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(StateError, match="not a report"):
        read_report(tmp_path / "report.json")


def test_the_index_knows_what_stage_runs_of_a_run_took(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for run, stage_run, taken in zip(("run-1", "run-2"), PLAN.stage_runs.values(), (5, 7), strict=False):
        attempt = store.begin(run, stage_run.stage.name, stage_run.fingerprint)
        store.index.add_peak(attempt.id, Peak(stage_run.label, "x", {}, {"ms": taken}))
    first = next(iter(PLAN.stage_runs.values()))
    assert store.index.taken("run-1") == {first.fingerprint: {"ms": 5}}
    assert store.index.taken("run-3") == {}
    store.close()
