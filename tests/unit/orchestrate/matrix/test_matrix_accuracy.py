"""Metrics that a matrix names, a user's own functions among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trtllm_pipeline.base.errors import MatrixError
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.run.run_folder import write_lock

AXES = {"model": ["tiny"], "precision": ["fp16"], "max_batch_size": [4], "lengths": ["64,16"]}


def write(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump({"name": "m", "axes": AXES, **more}))
    return path


def metrics(*names: str, **more: Any) -> dict[str, Any]:
    return {"accuracy": {"metrics": list(names), **more}}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["chrff"], "\"chrff\" is not allowed; did you mean 'chrf'?"),
        (["a b:c"], "'a b:c' is not a function: write MODULE:FUNCTION"),
        (["a:b:c"], "is not a function"),
        (["a:b", "c.d:b"], "functions must be from one module, not from a and c.d"),
        (["exact", "exact"], "'exact' is given twice"),
    ],
)
def test_names_are_checked(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(MatrixError) as error:
        planner.load(Request(write(tmp_path, settings=metrics(*names))))
    assert message in error.value.message
    assert "matrix.yaml:" in error.value.message


def planned(path: Path) -> Any:
    request = Request(path, toolchain="embedded")
    loaded = planner.load(request)
    return request, loaded, planner.plan_of(request, None)


def scoring_of(path: Path) -> Any:
    return next(run for run in planned(path)[2].stage_runs.values() if run.stage.name == "accuracy")


def test_a_module_lies_beside_the_matrix_or_where_it_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "code" / "my").mkdir(parents=True)
    path = write(tmp_path / "here", settings=metrics("exact", "my.own:f", python_path="../code"))
    with pytest.raises(MatrixError, match=r"code/my/own\.py: there is no such file"):
        planned(path)
    (tmp_path / "code" / "my" / "own.py").write_text("def f(answer, row): return 1")
    first = scoring_of(path)
    assert Path(first.files["metric_module"]).samefile(tmp_path / "code" / "my" / "own.py")
    (tmp_path / "code" / "my" / "own.py").write_text("def f(answer, row): return 0")
    assert scoring_of(path).fingerprint != first.fingerprint


@pytest.mark.parametrize("place", ["settings", "override", "axis"])
def test_a_lock_file_finds_the_module_from_anywhere(tmp_path: Path, place: str) -> None:
    (tmp_path / "own.py").write_text("def f(answer, row): return 1")
    more: dict[str, Any] = {
        "settings": {"settings": metrics("own:f")},
        "override": {"override": [{"where": {}, "settings": metrics("own:f")}]},
        "axis": {"axes": {**AXES, "settings.accuracy.metrics": [["exact"], ["own:f"]]}},
    }[place]
    path = write(tmp_path, **more)
    request, loaded, plan = planned(path)
    write_lock(request, loaded, plan, tmp_path / "lock", default_toolchain="embedded")
    (tmp_path / "own.py").unlink()
    again = planned(tmp_path / "lock" / "matrix.yaml")[2]
    assert {run.fingerprint for run in again.stage_runs.values()} == {
        run.fingerprint for run in plan.stage_runs.values()
    }
