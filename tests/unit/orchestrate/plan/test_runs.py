"""Which run, and which cells of which runs: a run of part of a matrix does not hide the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import fabricated
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.errors import StageError, UsageError
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.plan.planner import REQUEST_FILE, Request
from trtllm_pipeline.orchestrate.plan.runs import check_name, find_cell, find_run, newest_cells, run_folders
from trtllm_pipeline.orchestrate.results.report_file import CellStatus, report_json, rows
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.show.report.results import read_results

FP16, INT8, INT4 = (fabricated.cell(precision) for precision in ("fp16", "int8_wo", "int4_wo"))
WHOLE = fabricated.plan(FP16, INT8, INT4)
Left = Callable[..., Path]


@pytest.fixture
def left(store: Store) -> Left:
    """What a run leaves in its directory, and whether with its report."""
    count = 0

    def leave(
        plan: Plan, *, matrix: str = "/m/quick.yaml", ended: bool = True, name: str = "aa", **part: object
    ) -> Path:
        nonlocal count
        count += 1
        folder = store.runs_dir / f"2026010{count}-000000-{name}"
        store.index.begin_run(folder.name, matrix, ("pipeline", "run"))
        folder.mkdir()
        (folder / REQUEST_FILE).write_text(json.dumps(Request(Path(matrix), **part).to_json()))  # type: ignore[arg-type]
        lines = plan_lines(
            plan,
            present=(),
            to_run=(),
            reasons={},
            times=lambda _run: None,
            commands=lambda _run: [],
            run_id=folder.name,
        )
        (folder / "plan.json").write_text("\n".join(lines))
        if ended:
            (folder / "report.json").write_text("\n".join(report_json(rows(plan, store), folder.name, matrix)))
            store.index.end_run(folder.name, 0)
        return folder

    return leave


def only(cell: Cell, *, until: str | None = None) -> Plan:
    return fabricated.plan(cell, until=until)


def test_a_run_has_the_name_that_it_was_given(store: Store, left: Left) -> None:
    first, other, second = (left(WHOLE, name=name) for name in ("night", "x-1", "night"))
    found = {"night": second, "night~1": first, "x-1": other, second.name: second, first.name[:15]: first}
    assert {wanted: find_run(store, wanted) for wanted in found} == found
    with pytest.raises(UsageError, match="night~2: there are 2 runs called night"):
        find_run(store, "night~2")
    with pytest.raises(UsageError, match="there is no run 'nights'"):
        find_run(store, "nights")


def test_runs_that_the_index_lost_come_last_the_newest_first(store: Store, left: Left) -> None:
    known = [left(WHOLE) for _ in range(2)]
    lost = [each.rename(each.with_name(f"{each.name}-lost")) for each in (left(WHOLE), left(WHOLE))]
    assert run_folders(store) == (*reversed(known), *reversed(lost))


@pytest.mark.parametrize("name", ["latest", "2026", "a/b", "a b", "", "a~1", "-x", "a" * 101])
def test_a_name_that_means_something_else_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="invalid name of a run"):
        check_name(name)


def test_a_run_is_named_in_one_way(store: Store, left: Left) -> None:
    first, second = left(WHOLE), left(WHOLE)
    for wanted, folder in {
        None: second,
        "latest": second,
        "latest~1": first,
        first.name: first,
        "20260101": first,
    }.items():
        assert find_run(store, wanted) == folder
    for wanted, words in {
        "latest~2": "there are 2 runs",
        "2026": "is the prefix of 2 run ids",
        "x": "there is no run",
    }.items():
        with pytest.raises(UsageError, match=words):
            find_run(store, wanted)


def test_a_run_of_some_cells_does_not_hide_the_others(store: Store, left: Left) -> None:
    fabricated.publish_all(store, WHOLE, FP16)
    whole = left(WHOLE)
    fabricated.fail(store, fabricated.stage_run(WHOLE, INT8, "convert"), StageError("no such tensor"))
    part = left(only(INT8), cells=("*/int8_wo",))
    found = newest_cells(store)
    assert (found.newest, found.folders) == (part, (part, whole))
    assert [cell.id for cell in found.outline.cells] == [FP16.id, INT8.id, INT4.id]
    assert found.origins == {FP16.id: whole, INT8.id: part, INT4.id: whole}
    shared = fabricated.stage_run(WHOLE, FP16, "download").id
    assert found.outline.stage_runs[shared].cells == (FP16.id, INT8.id, INT4.id)
    assert [cell.id for cell in newest_cells(store, "latest").outline.cells] == [INT8.id]
    results = read_results(store)
    assert [row.status for row in results.rows] == [CellStatus.UP_TO_DATE, CellStatus.FAILED, CellStatus.NOT_RUN]
    assert main(["report", "-w", str(store.workspace), "--format", "html", "-o", "-"]) == 0
    assert main(["report", "-w", str(store.workspace), "--format", "junit"]) == 0


def test_a_run_up_to_a_stage_does_not_hide_the_results_after_it(store: Store, left: Left) -> None:
    """They are of the very same engine. What it did is as the store has it now, not as the earlier run's report says."""
    fabricated.fail(store, fabricated.stage_run(WHOLE, INT4, "build"), StageError("no room"))
    left(WHOLE)
    fabricated.publish_all(store, WHOLE, INT4)
    left(fabricated.plan(FP16, INT8, INT4, until="build"), until="build")
    results = read_results(store)
    assert [bool(row.levels) for row in results.rows] == [False, False, True]
    assert results.rows[2].status is CellStatus.UP_TO_DATE, "not as failed as it was"
    assert "perf" in newest_cells(store).outline.stages
    assert "perf" not in newest_cells(store, "latest").outline.stages


def test_only_runs_of_the_same_matrix_since_the_last_whole_one_count(store: Store, left: Left) -> None:
    left(fabricated.plan(fabricated.cell("fp8")))
    whole = left(WHOLE)
    left(only(fabricated.cell("int4_awq")), matrix="/m/other.yaml")
    part = left(only(FP16), cells=("fp16",))
    assert newest_cells(store).folders == (part, whole)
    again = left(WHOLE)
    assert newest_cells(store).folders == (again,)


def test_a_stage_that_cells_share_may_be_named_by_any_part_of_their_ids(store: Store, left: Left) -> None:
    left(fabricated.plan(FP16, fabricated.cell("fp16", 8)))
    outline = newest_cells(store).outline
    assert find_cell(outline, "fp16", "convert") is outline.cells[0]
    for stage in ("build", None):
        with pytest.raises(UsageError, match="'fp16' matches 2 cells"):
            find_cell(outline, "fp16", stage)


def test_runs_are_listed(store: Store, left: Left, capsys: pytest.CaptureFixture[str]) -> None:
    fabricated.publish_all(store, WHOLE, FP16)
    left(WHOLE)
    left(only(FP16), ended=False, cells=("fp16",))
    assert main(["status", "--runs", "-w", str(store.workspace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "20260102-000000-aa", "20260101-000000-aa"]
    assert lines[1].split()[3:] == ["quick.yaml", "1", "1", "0", "-"]
    assert lines[2].split()[3:7] == ["quick.yaml", "3", "1", "0"]
    assert main(["status", "--runs", "-w", str(store.workspace), "--format", "json"]) == 0
    running, ended = json.loads(capsys.readouterr().out)["runs"]
    assert (running["duration_s"], running["exit_code"], running["counts"]) == (None, None, {"up_to_date": 1})
    assert (ended["matrix"], ended["cells"], ended["exit_code"]) == ("/m/quick.yaml", 3, 0)
