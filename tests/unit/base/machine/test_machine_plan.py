"""Plans for machines: assumed ones, those with GPUs, and models no hub can be asked about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import fabricated
from tests.unit.conftest import MACHINE, Refused, make_cell, make_toolchain
from trtllm_pipeline.base.domain import Cell, Resources
from trtllm_pipeline.base.errors import DownloadError, FailureClass, PlanError, UsageError
from trtllm_pipeline.base.machine.model import Gpu, Machine
from trtllm_pipeline.models.files.quantization import QuantizedWeights
from trtllm_pipeline.models.hub import peek
from trtllm_pipeline.models.hub import sources as hub
from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.plan import Plan, make_plan
from trtllm_pipeline.orchestrate.plan.planner import Request, read_request
from trtllm_pipeline.orchestrate.run.forecast import forecast
from trtllm_pipeline.orchestrate.run.order import capacity, simulate
from trtllm_pipeline.orchestrate.run.scheduler import Capacity
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli import app
from trtllm_pipeline.tensorrt.stage.base import Stage

GPUS = tuple(Gpu(index, f"GPU-{index:x}", "test", 80 << 30, 90) for index in range(4))
LINE = "tensorrt_llm==0.16.0,sm=90,gpus=2,gpu_memory_gib=80"
MATRIX = """\
name: machines
axes:
  model: [qwen2-7b-instruct]
  precision: [fp16]
  parallel: [tp1, tp4]
  max_batch_size: [4]
  lengths: ["128,64"]
"""


def plan_with(*cells: Cell, stages: tuple[Stage, ...], machine: Machine = MACHINE) -> Plan:
    toolchain = replace(make_toolchain(), stages=stages)
    return make_plan(cells, {"toy": toolchain}, machine, digest=lambda name, _cell: (name, "d"))


def source_of(plan: Plan) -> dict[str, object]:
    (download,) = (run for run in plan.stage_runs.values() if run.stage.name == "download")
    return download.params.source


def inputs_of(plan: Plan, cell: Cell) -> dict[str, list[str]]:
    """Stage -> stages that its inputs come from."""
    runs = [plan.stage_runs[run] for run in plan.by_cell[cell.id]]
    return {run.stage.name: [plan.stage_runs[up].stage.name for up in run.inputs.values()] for run in runs}


# ----------------------------------------------------------------------------------------------------------- the table


@pytest.fixture
def optional() -> tuple[Stage, ...]:
    """get -> (press, for fp8 alone and on machines with a GPU) -> make -> ..."""
    get, make, serve, look = make_toolchain().stages
    press = replace(
        make,
        name="press",
        inputs={"model": "get"},
        applies=lambda cell, machine: cell.precision == "fp8" and bool(machine.gpus),
        section="make",
    )
    return get, press, replace(make, inputs={"model": ("press", "get")}), serve, look


def test_an_input_comes_from_the_first_of_its_stages_that_the_cell_has(optional: tuple[Stage, ...]) -> None:
    pressed, plain = make_cell("fp8"), make_cell("fp16")
    plan = plan_with(pressed, plain, stages=optional, machine=replace(MACHINE, gpus=GPUS))
    assert inputs_of(plan, pressed)["make"] == ["press"]
    assert inputs_of(plan, plain)["make"] == ["get"]
    assert "press" not in inputs_of(plan, plain)


def test_which_stages_a_cell_has_depends_on_the_machine(optional: tuple[Stage, ...]) -> None:
    cell = make_cell("fp8")
    plan = plan_with(cell, stages=optional)
    assert list(inputs_of(plan, cell)) == ["get", "make", "serve", "look"]
    assert inputs_of(plan, cell)["make"] == ["get"]
    assert plan.machine is MACHINE


def test_until_keeps_all_that_an_input_can_come_from(optional: tuple[Stage, ...]) -> None:
    toolchain = replace(make_toolchain(), stages=optional)
    on = replace(MACHINE, gpus=GPUS)
    plan = make_plan([make_cell("fp8")], {"toy": toolchain}, on, digest=lambda name, _cell: (name, "d"), until="make")
    assert [run.stage.name for run in plan.stage_runs.values()] == ["get", "press", "make"]


# ----------------------------------------------------------------------------------------------------------- capacity


def test_gpus_are_handed_out_by_the_names_that_cuda_takes() -> None:
    assert capacity(MACHINE) == Capacity(cpus=2)
    named = capacity(replace(MACHINE, gpus=GPUS))
    assert named.gpus == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


@pytest.mark.parametrize(("gpus", "rounds"), [(1, 4), (2, 2), (4, 1)])
def test_the_forecast_waits_for_gpus(gpus: int, rounds: int) -> None:
    get, make, *_ = make_toolchain().stages
    on = replace(MACHINE, cpus=16, gpus=GPUS[:gpus])
    make = replace(make, resources=lambda _cell, machine: Resources(gpus=min(1, len(machine.gpus))))
    plan = plan_with(*(make_cell(batch=batch) for batch in range(1, 5)), stages=(get, make), machine=on)
    takes = fabricated.expected(plan, {"get": 1.0, "make": 10.0})
    assert simulate(plan, takes, [capacity(plan.machine)], plan.stage_runs) == pytest.approx(1 + 10 * rounds)


# --------------------------------------------------------------------------------------------------- assumed machines


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A matrix of one model, and a hub that does not answer."""
    monkeypatch.chdir(tmp_path)

    def unreached(*_args: object, **_options: object) -> dict[str, object]:
        raise DownloadError("no source is reached", failure=FailureClass.TRANSIENT)

    monkeypatch.setattr(hub, "resolve", unreached)
    path = tmp_path / "matrix.yaml"
    path.write_text(MATRIX)
    return path


def test_cells_are_judged_by_the_assumed_machine(matrix: Path) -> None:
    plan = planner.plan_of(Request(matrix, assume=LINE), None, guess=True)
    assert plan.machine.assumed
    assert {cell.toolchain for cell in plan.cells} == {"tensorrt_llm"}
    (fits, too_wide) = plan.cells
    assert fits.reason is None
    assert too_wide.reason == "tp4pp1 needs 4 GPUs, this machine has 2; use another tp and pp"
    assert forecast(plan, None).total_s > 0


def test_a_model_that_is_quantized_already_is_refused_before_it_is_fetched(
    matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = {"hugging_face": "some/model", "revision": "a" * 40}
    asked = []

    def quantized(source: object, **_options: object) -> QuantizedWeights:
        asked.append(source)
        return QuantizedWeights("fp8", "FP8 by its hf_quant_config.json")

    monkeypatch.setattr(hub, "resolve", lambda *_args, **_options: pinned)
    monkeypatch.setattr(hub, "content_of", lambda *_args, **_options: None)
    monkeypatch.setattr(peek, "quantized", quantized)
    store = Store(tmp_path / "w")
    for _ in range(2):
        plan = planner.plan_of(Request(matrix, assume=LINE), store)
        assert not plan.stage_runs
        assert "are already quantized (FP8 by its hf_quant_config.json)" in str(plan.cells[0].reason)
        assert "Use precision as_is" in str(plan.cells[0].reason)
    assert asked == [pinned], "what a commit says is remembered"


@pytest.mark.parametrize("argv", [["plan"], ["run", "--dry-run"]])
def test_a_plan_without_a_cell_that_can_work_is_shown_with_its_reasons(
    matrix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    argv += ["-m", str(matrix), "--cells", "*/*/tp4*", "--assume", LINE, "-w", str(tmp_path / "none")]
    assert app.main([*argv, "--format", "json"]) == 3
    shown, said = capsys.readouterr()
    (cell,) = json.loads(shown)["cells"]
    assert not cell["feasible"]
    assert cell["reason"].startswith("tp4pp1 needs 4 GPUs, this machine has 2")
    assert "no cell can work" in said
    assert app.main(argv) == 3
    shown = capsys.readouterr().out
    assert shown.startswith("1 cell, none of them feasible\n")
    assert "tp4pp1 needs 4 GPUs, this machine has 2" in shown
    assert "nothing to do" not in shown


def test_a_plan_without_a_hub_stands_on_what_the_recipe_lists(
    matrix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "w")
    plan = planner.plan_of(Request(matrix, assume=LINE), store, guess=True)
    assert source_of(plan)["hugging_face"] == "Qwen/Qwen2-7B-Instruct"
    assert "no hub can be reached, models are planned as in their recipes" in caplog.text
    caplog.clear()
    planner.plan_of(Request(matrix, assume=LINE), store, guess=True)
    assert "no hub can be reached" in caplog.text, "a guess is not remembered"


def test_a_plan_without_a_hub_shows_the_code_that_it_trusts(matrix: Path) -> None:
    digest = "0" * 64
    for trusted in ("qwen2-7b-instruct", "another"):
        value = f"{{{trusted}: {{modeling.py: '{digest}'}}}}"
        request = Request(matrix, sets=(f"settings.download.trust_remote_code={value}",), assume=LINE)
        plan = planner.plan_of(request, None, guess=True)
        assert source_of(plan).get("code") == ({"modeling.py": digest} if trusted == "qwen2-7b-instruct" else None)


def test_nothing_is_guessed_for_a_run_or_where_the_user_has_something_to_do(
    matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match="no source is reached"):
        planner.plan_of(Request(matrix, assume=LINE), None)

    def gated(*_args: object, **_options: object) -> dict[str, object]:
        raise DownloadError("accept the licence first", failure=FailureClass.USER)

    monkeypatch.setattr(hub, "resolve", gated)
    with pytest.raises(DownloadError, match="accept the licence first"):
        planner.plan_of(Request(matrix, assume=LINE), None, guess=True)


def test_only_the_kind_of_source_that_was_asked_for_is_guessed(matrix: Path) -> None:
    request = Request(matrix, sets=("settings.download.source=modelscope",), assume=LINE)
    assert "modelscope" in source_of(planner.plan_of(request, None, guess=True))


def test_nothing_can_run_on_an_assumed_machine(
    matrix: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "resolve", lambda *_args, **_options: pytest.fail("no hub is asked"))
    with pytest.raises(UsageError, match="--assume is for planning only, nothing can run on such a machine"):
        flow.bring_up_to_date(Request(matrix, assume=LINE), Store(tmp_path / "w"), observer=None)  # type: ignore[arg-type]
    words = ["run", "--matrix", str(matrix), "--workspace", str(tmp_path / "w"), "--assume", LINE]
    assert "pipeline plan, or run --dry-run" in refused(*words)


def test_a_dry_run_on_an_assumed_machine_is_its_plan(
    matrix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", "--matrix", str(matrix), "--workspace", str(tmp_path / "w"), "--assume", LINE, "--dry-run"]
    assert app.main(line) == 0
    out = capsys.readouterr().out
    assert "on the assumed machine" in out
    assert "this machine has 2" in out
    assert not (tmp_path / "w").exists()


def test_a_machine_without_the_toolchain_can_be_planned_for_but_runs_nothing(matrix: Path, tmp_path: Path) -> None:
    request = Request(matrix, toolchain="tensorrt_llm", assume="gpus=0")
    plan = planner.plan_of(request, Store(tmp_path / "w"), guess=True)
    assert plan.cells
    with pytest.raises(PlanError, match="TensorRT-LLM is not installed") as refused:
        planner.check_feasible(plan, None)
    assert "--fit" not in str(refused.value.hint), "memory is not the reason"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ("axes.parallel=[tp3]", "change the matrix, or override it with --set KEY=VALUE"),
        ("axes.lengths=['65536,1']", "change the matrix, or override it with --set KEY=VALUE"),
        ("settings.build.options=gemm_plugn=auto", "change the matrix, or override it with --set KEY=VALUE"),
        ("axes.parallel=[tp4]", "--assume MACHINE plans for another machine"),
        ("axes.precision=[fp8]", "--assume MACHINE plans for another machine"),
    ],
)
def test_another_machine_is_pointed_to_where_the_machine_is_the_reason(matrix: Path, change: str, hint: str) -> None:
    machine = "tensorrt_llm==0.16.0,sm=80,gpus=2,gpu_memory_gib=80"
    request = Request(matrix, ("axes.parallel=[tp1]", change), toolchain="tensorrt_llm", assume=machine)
    plan = planner.plan_of(request, None, guess=True)
    with pytest.raises(PlanError) as refused:
        planner.check_feasible(plan, None)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("sets", "gpus", "said"),
    [
        ((), "gpus=8,gpu_memory_gib=0.1", "GiB on each GPU"),
        (("axes.max_batch_size=[512]", "axes.lengths=['16384,16384']"), "gpus=1,gpu_memory_gib=18", "needs about"),
    ],
    ids=["weights", "an estimate"],
)
def test_what_would_fit_is_pointed_to_where_memory_is_the_reason(
    matrix: Path, tmp_path: Path, sets: tuple[str, ...], gpus: str, said: str
) -> None:
    machine = f"tensorrt_llm==1.0.0,sm=90,{gpus}"
    request = Request(matrix, ("axes.parallel=[tp1]", *sets), toolchain="tensorrt_llm", assume=machine)
    store = Store(tmp_path / "w")
    with pytest.raises(PlanError, match=said) as refused:
        planner.check_feasible(planner.plan_of(request, store, guess=True), store)
    assert str(refused.value.hint).endswith("pipeline plan --fit looks for changes that fit into its memory")


def test_a_request_survives_its_file_with_the_machine_it_was_for(tmp_path: Path) -> None:
    asked = Request(tmp_path / "m.yaml", ("a=1",), ("x/*",), "build", "tensorrt_llm", LINE)
    path = tmp_path / planner.REQUEST_FILE
    path.write_text(json.dumps(asked.to_json()))
    assert read_request(path) == asked
    known = asked.to_json()
    del known["assume"]
    path.write_text(json.dumps(known))
    assert read_request(path) == replace(asked, assume=None), "files of earlier releases say nothing of it"
