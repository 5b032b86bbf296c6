from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import fabricated
from trtllm_pipeline.base.domain import CellId, StageRunId, StageStatus
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.measure.load.result import Goodput, levels_of
from trtllm_pipeline.orchestrate.memory.estimates import Estimate
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.plan_file import outline, plan_lines, read_plan
from trtllm_pipeline.orchestrate.plan.stage_status import stage_states
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus, rows, rows_of
from trtllm_pipeline.orchestrate.run.loop import Outcome
from trtllm_pipeline.orchestrate.store.store import Store

FP16 = fabricated.cell("fp16")
INT8 = fabricated.cell("int8_wo")
NEVER = fabricated.cell("fp8", reason="precision fp8: not here")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "ws")
    yield store
    store.close()


def ended(store: Store, plan: Plan, statuses: dict[StageRunId, StageStatus], **how: Any) -> Outcome:
    """The outcome of a run that left what is in the store."""
    present = store.present({run.fingerprint: run.stage.name for run in plan.stage_runs.values()})
    return Outcome(statuses, present, **how)


def test_a_row_holds_what_the_stages_left(store: Store) -> None:
    plan = fabricated.plan(FP16)
    fabricated.publish_all(store, plan, FP16)
    statuses = dict.fromkeys(plan.stage_runs, StageStatus.SUCCEEDED)
    (row,) = rows(plan, store, ended(store, plan, statuses))
    assert row.status is CellStatus.DONE
    assert row.seconds == dict.fromkeys(
        ("download", "convert", "build", "repository", "smoke", "perf", "accuracy"), 1.5
    )
    assert row.build_s == 1.5
    assert row.engine_size_bytes == 1000
    assert [level.concurrency for level in row.levels] == [1, 4]
    assert row.levels[0].latency("ttft_ms", "p50") == 30.0
    assert row.levels[0].latency("tpot_ms", "p50") is None
    assert row.levels[1].output_tokens_per_s == 250.0
    assert row.accuracy == {"exact": 0.5, "contains": 0.75}
    assert row.accuracy_total == 50
    assert row.findings == ("warning: the client was busy (concurrency 4)", "info: prompts repeat")
    assert row.axes["isl"] == 128


def test_request_rates_and_goodput() -> None:
    goodput = {"objectives_ms": {"ttft": 300}, "share": 0.75, "requests_per_s": 1.9}
    perf = [
        {"concurrency": None, "request_rate": 2.5, "requests": 8, "goodput": goodput},
        {"concurrency": 4, "request_rate": None},
        {"concurrency": None, "request_rate": None},
        {"concurrency": None, "request_rate": "2"},
        {"concurrency": 1},
    ]
    levels = levels_of(perf)
    assert [level.key for level in levels] == ["1", "4", "2.5/s"]
    assert levels[2].goodput == Goodput({"ttft": 300}, share=0.75, requests_per_s=1.9)
    row = CellResult(CellId("a"), {}, CellStatus.DONE, levels=levels)
    assert CellResult.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_nothing_done_means_none_and_not_zero(store: Store) -> None:
    plan = fabricated.plan(FP16)
    (row,) = rows(plan, store)
    assert row.status is CellStatus.NOT_RUN
    assert (row.build_s, row.engine_size_bytes, row.accuracy_total, row.smoke) == (None, None, None, None)
    assert row.levels == ()
    assert row.accuracy == {}


def test_a_shared_failure_fails_every_cell_and_keeps_earlier_results(store: Store) -> None:
    plan = fabricated.plan(FP16, fabricated.cell("fp16", 8), INT8)
    convert = fabricated.stage_run(plan, FP16, "convert")
    fabricated.publish(store, fabricated.stage_run(plan, FP16, "download"), {"a": b"1"}, seconds=3.0)
    error = StageError("convert: out of memory", failure=FailureClass.OUT_OF_MEMORY, hint="use a bigger machine")
    log = fabricated.fail(store, convert, error)
    statuses = {run.id: StageStatus.SUCCEEDED for run in plan.stage_runs.values()}
    statuses[convert.id] = StageStatus.FAILED
    for run in plan.stage_runs.values():
        if FP16.id in run.cells and run.stage.name not in {"download", "convert"}:
            statuses[run.id] = StageStatus.BLOCKED
    first, second, third = rows(plan, store, ended(store, plan, statuses, errors={convert.id: error}))
    assert [first.status, second.status, third.status] == [CellStatus.FAILED, CellStatus.FAILED, CellStatus.DONE]
    for row in (first, second):
        assert row.failed_stage == "convert"
        assert row.failure == "out_of_memory"
        assert row.reason == "convert: out of memory"
        assert row.hint == "use a bigger machine"
        assert row.log is not None
        assert store.workspace / row.log == log
        assert row.seconds == {"download": 3.0}


def test_infeasible_cells_say_why(store: Store) -> None:
    plan = fabricated.plan(FP16, NEVER)
    assert rows(plan, store)[1] == CellResult(
        NEVER.id, rows(plan, store)[1].axes, CellStatus.INFEASIBLE, reason="precision fp8: not here"
    )


@pytest.mark.parametrize(("interrupted", "status"), [(True, CellStatus.INTERRUPTED), (False, CellStatus.NOT_RUN)])
def test_what_was_cancelled(store: Store, interrupted: bool, status: CellStatus) -> None:
    plan = fabricated.plan(FP16)
    outcome = ended(store, plan, dict.fromkeys(plan.stage_runs, StageStatus.CANCELLED), interrupted=interrupted)
    assert rows(plan, store, outcome)[0].status is status


def test_nothing_to_do_is_up_to_date(store: Store) -> None:
    plan = fabricated.plan(FP16)
    fabricated.publish_all(store, plan, FP16)
    statuses = {
        run.id: StageStatus.SKIPPED if run.stage.name == "launch" else StageStatus.UP_TO_DATE
        for run in plan.stage_runs.values()
    }
    assert rows(plan, store, ended(store, plan, statuses))[0].status is CellStatus.UP_TO_DATE
    assert rows(plan, store)[0].status is CellStatus.UP_TO_DATE


def test_the_store_alone_knows_how_far_each_cell_is(store: Store) -> None:
    cells = [fabricated.cell(precision) for precision in ("fp16", "int8_wo", "int4_wo", "fp32")]
    done, failed, running, killed = cells
    plan = fabricated.plan(*cells)
    fabricated.publish_all(store, plan, done)
    fabricated.fail(store, fabricated.stage_run(plan, failed, "convert"), StageError("convert: bad", hint="mend it"))
    run = fabricated.stage_run(plan, running, "convert")
    claim = store.claim(run.fingerprint)
    attempt = fabricated.begin(store, run)
    (attempt.folder / "progress.json").write_text('{"done": 1, "total": 4, "unit": "bytes"}')
    fabricated.begin(store, fabricated.stage_run(plan, killed, "convert"))
    found = rows_of(outline(plan), store)
    assert [row.status for row in found] == [
        CellStatus.UP_TO_DATE,
        CellStatus.FAILED,
        CellStatus.RUNNING,
        CellStatus.INTERRUPTED,
    ]
    assert (found[1].failed_stage, found[1].reason, found[1].hint) == ("convert", "convert: bad", "mend it")
    seen = stage_states(outline(plan), store)
    assert seen[run.id].progress == {"done": 1, "total": 4, "unit": "bytes"}
    assert seen[fabricated.stage_run(plan, failed, "build").id].status is StageStatus.BLOCKED
    assert seen[fabricated.stage_run(plan, done, "launch").id].status is StageStatus.SKIPPED
    claim.release()
    assert rows_of(outline(plan), store)[2].status is CellStatus.INTERRUPTED


def test_what_is_claimed_for_a_moment_only_is_not_running(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot have the machine tries it five times a second, with the claim on what it would run."""
    plan = fabricated.plan(FP16)
    run = fabricated.stage_run(plan, FP16, "download")

    def status_when(*claimed: bool) -> StageStatus:
        looks = iter(claimed)
        monkeypatch.setattr(store, "claimed", lambda: frozenset({run.fingerprint} if next(looks) else ()))
        return stage_states(outline(plan), store)[run.id].status

    assert status_when(True, False) is StageStatus.PENDING
    assert status_when(False, True) is StageStatus.PENDING
    assert status_when(True, True) is StageStatus.RUNNING, "it is being pulled"
    fabricated.begin(store, run)
    assert status_when(True, False) is StageStatus.RUNNING
    assert status_when(False, False) is StageStatus.CANCELLED


def test_intermediates_that_are_gone_are_not_needed(store: Store) -> None:
    plan = fabricated.plan(FP16)
    for stage in ("smoke", "perf", "accuracy"):
        fabricated.publish(store, fabricated.stage_run(plan, FP16, stage), {"x": b"1"})
    seen = stage_states(outline(plan), store)
    assert seen[fabricated.stage_run(plan, FP16, "build").id].status is StageStatus.SKIPPED
    assert rows(plan, store)[0].status is CellStatus.UP_TO_DATE


def test_what_was_found_never_to_work(store: Store) -> None:
    plan = fabricated.plan(FP16)
    store.index.add_infeasible(fabricated.stage_run(plan, FP16, "download").fingerprint, "the repository is empty")
    (row,) = rows(plan, store)
    assert (row.status, row.failure, row.reason) == (CellStatus.FAILED, "infeasible", "the repository is empty")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"levels": 3}', b'{"levels": [null, {"concurrency": true}]}'])
def test_results_that_cannot_be_read_count_as_missing(store: Store, content: bytes) -> None:
    plan = fabricated.plan(FP16)
    for stage, name in (("perf", "perf.json"), ("accuracy", "accuracy.json"), ("smoke", "smoke.json")):
        fabricated.publish(store, fabricated.stage_run(plan, FP16, stage), {name: content or b" "})
    (row,) = rows(plan, store)
    assert row.levels == ()
    assert row.accuracy == {}


def test_rows_survive_json(store: Store) -> None:
    plan = fabricated.plan(FP16, NEVER)
    fabricated.publish_all(store, plan, FP16)
    for row in rows(plan, store):
        assert CellResult.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_the_plan_file_is_as_documented_and_reads_back(tmp_path: Path) -> None:
    plan = fabricated.plan(FP16, INT8, NEVER)
    download = fabricated.stage_run(plan, FP16, "download")
    lines = plan_lines(
        plan,
        present={download.id},
        to_run=plan.stage_runs.keys() - {download.id, fabricated.stage_run(plan, FP16, "smoke").id},
        reasons={fabricated.stage_run(plan, FP16, "build").id: "not made yet"},
        times=lambda _run: Estimate(2000, 0.3),
        commands=lambda run: [["pipeline", run.stage.name]],
        run_id="r1",
    )
    text = "\n".join(lines)
    data = json.loads(text)
    assert set(data) == {"schema", "run", "cells", "stage_runs"}
    assert isinstance(data["cells"], list)
    assert data["cells"][2] == {
        "changes": [],
        "id": NEVER.id,
        "axes": data["cells"][2]["axes"],
        "feasible": False,
        "reason": "precision fp8: not here",
        "stage_runs": [],
        "about": {"gpu_hour": None, "numerics": None},
    }
    by_id = {run["id"]: run for run in data["stage_runs"]}
    assert by_id[download.id]["action"] == "up_to_date"
    assert by_id[download.id]["cells"] == [FP16.id, INT8.id]
    assert (by_id[download.id]["argv"], by_id[download.id]["expected_s"]) == ([], None), "a run's plan: not to run"
    assert by_id[download.id]["resources"]["downloads"] == 1
    assert by_id[fabricated.stage_run(plan, FP16, "smoke").id]["action"] == "skip"
    build = by_id[fabricated.stage_run(plan, FP16, "build").id]
    assert (build["action"], build["reason"]) == ("run", "not made yet")
    assert build["argv"] == [["pipeline", "build"]]
    assert build["inputs"] == {"checkpoint": fabricated.stage_run(plan, FP16, "convert").id}
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert read_plan(path) == outline(plan)
