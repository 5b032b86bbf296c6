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


TASKS = {"tasks": ["pipeline_arithmetic:20", "gsm8k"]}


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that looks as if it had lm_eval. Returns the record of its release."""
    record = tmp_path / "environment" / "lib" / "python3.11" / "site-packages" / "lm_eval-0.4.13.dist-info"
    record.mkdir(parents=True)
    monkeypatch.setenv("LM_EVAL_PYTHON", str(tmp_path / "environment" / "bin" / "python"))
    return record


@pytest.mark.parametrize(
    ("accuracy", "message"),
    [
        ({"tasks": ["mmlu:0"]}, "'mmlu:0' is not a task: write NAME, or NAME:LIMIT"),
        ({"tasks": ["../gsm8k"]}, "is not a task"),
        ({"tasks": ["mmlu", "mmlu:5"]}, "task mmlu is given twice"),
        ({**TASKS, "answers": "perf"}, "tasks bring their own questions: remove answers"),
        ({**TASKS, "input_data": "own.jsonl"}, "tasks bring their own questions: remove input_data"),
        ({"num_fewshot": 3}, "num_fewshot needs tasks"),
        ({"include_path": "own"}, "include_path needs tasks"),
    ],
)
@pytest.mark.usefixtures("lm_eval")
def test_tasks_are_checked(tmp_path: Path, accuracy: dict[str, Any], message: str) -> None:
    with pytest.raises(MatrixError) as error:
        planned(write(tmp_path, settings={"accuracy": accuracy}))
    assert message in error.value.message


@pytest.mark.usefixtures("lm_eval")
def test_tasks_replace_questions(tmp_path: Path) -> None:
    plan = planned(write(tmp_path, settings={"accuracy": {**TASKS, "num_fewshot": 2}}))[2]
    stages = {run.stage.name: run for run in plan.stage_runs.values()}
    assert "accuracy" not in stages
    run = stages["tasks"]
    assert run.params.tasks == ("pipeline_arithmetic:20", "gsm8k")
    assert (run.params.num_fewshot, run.params.version, run.params.max_length) == (2, "0.4.13", 80)
    assert run.files.keys() == {"questions of pipeline_arithmetic"}


def test_tasks_depend_on_the_users_files_and_on_the_release(tmp_path: Path, lm_eval: Path) -> None:
    own = tmp_path / "here" / "own" / "deep"
    own.mkdir(parents=True)
    (own / "task.yaml").write_text("task: mine")
    path = write(tmp_path / "here", settings={"accuracy": {"tasks": ["mine"], "include_path": "own"}})

    def fingerprint() -> str:
        (run,) = (each for each in planned(path)[2].stage_runs.values() if each.stage.name == "tasks")
        assert run.files.keys() == {"task deep/task.yaml"}
        return str(run.fingerprint)

    first = fingerprint()
    (own / "task.yaml").write_text("task: mine, changed")
    second = fingerprint()
    lm_eval.rename(lm_eval.with_name("lm_eval-0.4.12.dist-info"))
    assert len({first, second, fingerprint()}) == 3
    request, loaded, plan = planned(path)
    write_lock(request, loaded, plan, tmp_path / "lock", default_toolchain="embedded")
    (own / "task.yaml").unlink()
    again = planned(tmp_path / "lock" / "matrix.yaml")[2]
    assert again.stage_runs.keys() == plan.stage_runs.keys()
    with pytest.raises(MatrixError, match="own"):
        planned(path)


def test_a_plan_names_what_tasks_lack(tmp_path: Path, lm_eval: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, settings={"accuracy": TASKS})

    def reason() -> str | None:
        (cell,) = planner.plan_of(Request(path, toolchain="embedded"), None).cells
        return cell.reason

    assert reason() is None
    lm_eval.rename(lm_eval.with_name("lm_eval-0.3.0.dist-info"))
    assert "lm_eval 0.3.0 is installed, but 0.4.9 or a later 0.4 is needed" in str(reason())
    monkeypatch.setenv("LM_EVAL_PYTHON", "/nowhere/bin/python")
    assert "has no lm_eval: pip install 'trtllm-pipeline[lm-eval]'" in str(reason())
