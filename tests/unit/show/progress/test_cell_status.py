"""`pipeline status` of matrices of any size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import fabricated
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.orchestrate.plan.plan_file import outline
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.progress import cell_status
from trtllm_pipeline.show.progress.cell_status import status_of, to_text


def test_of_very_many_cells_those_are_listed_that_are_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_status, "_MAX_CELLS", 2)
    cells = [fabricated.cell("fp16", batch) for batch in (1, 2, 3, 4)]
    plan = fabricated.plan(*cells, until="build")
    store = Store(tmp_path)

    def make(cell: Cell) -> None:
        fabricated.publish(store, fabricated.stage_run(plan, cell, "build"), {"model": b"x"})

    make(cells[0])
    for stage in ("download", "convert"):
        fabricated.publish(store, fabricated.stage_run(plan, cells[0], stage), {"model": b"x"})

    def said() -> list[str]:
        return to_text(status_of(store, outline(plan), "run")).splitlines()

    assert [line.split()[0] for line in said()[2:4]] == ["bs2", "bs3"]
    assert (
        said()[-1]
        == "and 1 cell done, 1 cell more unfinished or failed (show them with --cells PATTERN or --format json)"
    )
    fabricated.fail(store, fabricated.stage_run(plan, cells[3], "build"), StageError("no such tensor"))
    assert any("no such tensor" in line for line in said()), "whatever failed is told"
    for cell in cells[1:]:
        make(cell)
    assert said()[1:] == ["and 4 cells done (show them with --cells PATTERN or --format json)"]
    store.close()


def test_a_picture_has_groups_of_cells_and_all_stages_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    plan = fabricated.plan(
        *(fabricated.cell(precision, batch) for precision in ("fp16", "int8_wo") for batch in range(200))
    )
    store = Store(tmp_path)
    for cell in plan.cells[:100]:
        for stage in ("download", "convert", "build"):
            if store.get(stage, fabricated.stage_run(plan, cell, stage).fingerprint) is None:
                fabricated.publish(store, fabricated.stage_run(plan, cell, stage), {"model": b"x"})
    lines = to_text(status_of(store, outline(plan), "run"), height=23).splitlines()
    stages = ["download", "convert", "build", "repository", "launch", "smoke", "perf", "accuracy"]
    assert [line.split()[0] for line in lines[1:9]] == stages
    assert lines[9].split() == ["group", "(cells)", *stages]
    assert [line.split() for line in lines[10:12]] == [
        ["fp16", "(200)", "=", "=", "·50%", *"·····"],
        ["int8_wo", "(200)", "=", *"·······"],
    ]
    store.close()
