"""Single stages: whose they are, what other programs do of them, and serving a cell of a matrix by hand."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import trtllm_cells
from tests.unit.conftest import MACHINE, Make, Refused, make_toolchain
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.models.hub import sources as hub
from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.matrix.models import Settings
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.run import by_hand
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli import app, stage
from trtllm_pipeline.tensorrt.stage.base import Stage, StageContext
from trtllm_pipeline.tensorrt.stage.params import PerfParams, Selection
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains


def here(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Let this machine be another."""
    monkeypatch.setattr(probe, "this_machine", lambda: machine)


@pytest.mark.parametrize("name", ["counted", "silent"])
def test_a_row_with_an_example_has_a_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded = toolchains.load("embedded")
    row = replace(embedded.stages[0], name=name, summary="count (the [tokens])")
    row = replace(row, examples=("--text FILE",) if name == "counted" else ())
    monkeypatch.setattr(toolchains, "load", lambda _asked: replace(embedded, stages=(row,)))
    toolchains.with_command.cache_clear()
    try:
        code = app.main(["stage", name, "--help"])
        out = capsys.readouterr().out
        assert app.main(["stage"]) == 0
    finally:
        toolchains.with_command.cache_clear()
    assert ("Count (the [tokens])." in capsys.readouterr().out) is (name == "counted")
    assert (code, f"pipeline stage {name} --text FILE\n" in out) == ((0, True) if name == "counted" else (2, False))


@pytest.mark.parametrize("toolchain", toolchains.every_name())
def test_settings_have_a_section_for_every_stage(toolchain: str) -> None:
    sections = {each.section or each.name for each in toolchains.load(toolchain).stages}
    assert sections <= set(Settings.model_fields)


# ------------------------------------------------------------------------------------------------------ whose stage


@pytest.mark.parametrize(
    ("release", "name", "program"),
    [
        ("1.0.0", "repository", "frontends:run_engine"),
        ("1.3.0", "repository", "frontends:run_pytorch"),
        ("1.3.0", "build", "embedded.build:run"),  # of those that have it the one that can be used
    ],
)
def test_a_stage_is_that_of_the_toolchain_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, release: str, name: str, program: str
) -> None:
    here(monkeypatch, trtllm_cells.machine(release))
    embedded = replace(toolchains.load("embedded"), missing=lambda _machine: None)
    load = toolchains.load
    monkeypatch.setattr(toolchains, "load", lambda asked: embedded if asked == "embedded" else load(asked))
    assert str(stage._stage(name, None).program).endswith(program)


def test_a_stage_of_a_toolchain_that_is_not_here_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, MACHINE)
    assert "tensorrt.trtllm" in str(stage._stage("check", None).program), "no other has one"
    assert stage._stage("repository", "tensorrt_llm").program != stage._stage("repository", "embedded").program


@pytest.mark.parametrize(
    "words",
    [
        ["stage", "convert", "--model", "d", "--precision", "fp16", "--family", "llama"],
        ["stage", "check", "--model", "d", "--engine", "d"],
        ["stage", "repository", "--model", "d", "--engine", "d", "--max-batch-size", "4"],
    ],
)
def test_work_by_hand_where_nothing_is_installed_ends_in_words(
    inputs: Path, refused: Refused, words: list[str]
) -> None:
    said = refused(*words, "--toolchain", "tensorrt_llm", "--output-dir", "o")
    assert "TensorRT-LLM is not installed here" in said
    assert "pipeline doctor" in said


# -------------------------------------------------------------------------------------------------- other programs


def with_commands(*commands: list[str]) -> Stage:
    return replace(make_toolchain().stages[1], program=None, commands=lambda _work, _machine: commands)


@pytest.fixture
def work(tmp_path: Path) -> StageContext[Any]:
    return StageContext(Make(precision="fp16"), {}, {}, tmp_path, tmp_path)


def writing(path: Path, text: str) -> list[str]:
    return [sys.executable, "-c", f"print('said {text}'); open({str(path)!r}, 'a').write({text!r})"]


def test_other_programs_run_in_order_and_are_shown(
    work: StageContext[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here(monkeypatch, MACHINE)
    commands = writing(work.out / "file", "1"), writing(work.out / "file", "2")
    by_hand.run(with_commands(*commands), work, lambda command: print(shlex.join(command), file=sys.stderr))
    assert (work.out / "file").read_text() == "12"
    out, err = capfd.readouterr()
    assert out == "", "that is for the result"
    assert "said 1" in err
    assert all(shlex.join(command) in err for command in commands)


def test_the_first_that_fails_ends_it(work: StageContext[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, MACHINE)
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(StageError, match=f"make: {sys.executable} ended with exit code 3"):
        by_hand.run(with_commands(fails, writing(work.out / "file", "x")), work, print)
    assert not (work.out / "file").exists()


# ------------------------------------------------------------------------------------------------------- services


def test_the_example_asks_the_server_that_is_there() -> None:
    triton = shlex.split(stage._example({"kind": "triton", "http": "localhost:1", "model": "tensorrt_llm"}))
    assert triton[:3] == ["curl", "-s", "http://localhost:1/v2/models/tensorrt_llm/generate"]
    assert json.loads(triton[-1])["text_input"]
    openai = shlex.split(stage._example({"kind": "openai", "url": "http://localhost:2", "model": "it's"}))
    assert openai[2] == "http://localhost:2/v1/completions"
    asked = json.loads(openai[-1])
    assert asked["model"] == "it's"
    assert asked["prompt"]


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "resolve", lambda sources, **_options: {**sources[0], "revision": "1"})
    monkeypatch.setattr(hub, "content_of", lambda _source, **_options: None)
    path = tmp_path / "matrix.yaml"
    path.write_text(
        "name: m\naxes:\n  model: [qwen2-7b-instruct]\n  precision: [fp16]\n  max_batch_size: [4]\n"
        '  lengths: ["128,64"]\nsettings:\n  serve: { frontend: trtllm_serve, http_port: 8123 }\n'
    )
    return path


@pytest.mark.parametrize(
    ("axis", "inputs"),
    [
        (None, {"repository": "repository", "engine": "build"}),
        ("tensorrt_llm", {"repository": "repository", "engine": "build"}),
        ("tensorrt_llm_pytorch", {"repository": "repository", "model": "download"}),
    ],
)
def test_a_cell_is_served_by_its_own_toolchain_from_all_that_it_reads(
    matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str | None, inputs: dict[str, str]
) -> None:
    here(monkeypatch, replace(trtllm_cells.machine(), assumed=False))
    if axis is not None:
        matrix.write_text(matrix.read_text().replace("axes:\n", f"axes:\n  toolchain: [{axis}]\n"))
    served: list[tuple[Stage, dict[str, Any], Any]] = []

    def made(request: Any, store: Store, _observer: object) -> tuple[object, object]:
        assert request.until == "repository"
        plan = planner.plan_of(request, store)
        for run in plan.stage_runs.values():
            (store.folder(run.stage.name, run.fingerprint) / "out").mkdir(parents=True)
        return plan, SimpleNamespace(exit_code=0)

    def by_hand(*asked: Any) -> int:
        served.append(asked)
        return 0

    monkeypatch.setattr(flow, "bring_up_to_date", made)
    monkeypatch.setattr(stage, "_by_hand", by_hand)
    words = ["stage", "launch", "--matrix", str(matrix), "--workspace", str(tmp_path / "w"), "--stop-timeout-s", "9"]
    assert app.main(words) == 0
    ((launch, typed, asked),) = served
    assert str(launch.program).endswith("launch_pytorch" if axis == "tensorrt_llm_pytorch" else "launch_engine")
    given = {name: Path(typed[f"in_{name}"]) for name in launch.inputs if name not in launch.optional}
    assert {name: path.parent.parent.name for name, path in given.items()} == inputs
    assert all(path.is_dir() for path in given.values())
    assert (asked.frontend, asked.http_port, asked.stop_timeout_s, asked.restarts) == ("trtllm_serve", 8123, 9.0, 3)


@pytest.fixture
def unbuilt(matrix: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A matrix of which nothing may be built, for a machine that could."""
    here(monkeypatch, replace(trtllm_cells.machine(), assumed=False))

    def build(*_arguments: object) -> None:
        raise AssertionError("a build was about to start")

    monkeypatch.setattr(flow, "bring_up_to_date", build)
    return matrix


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--http-port", "70000"), "--http-port should be less than or equal to 65535, not 70000"),
        (("--http-port", "abc"), "--http-port: 'abc' is not a whole number"),
        (("--frontend", "foo"), '--frontend "foo" is not allowed'),
        (("--ready-timeout-s", "nan"), "--ready-timeout-s: 'nan' is not a duration such as 300ms, 5s, 2m or 1h"),
        (("--restarts", "-1"), "--restarts should be greater than or equal to 0, not -1"),
        (("--threads", "2"), "--threads: this toolchain does not have this option"),
        (("--repository", "d"), "--repository cannot be combined with --matrix"),
    ],
)
def test_what_is_typed_beside_a_matrix_is_checked_before_anything_is_built(
    unbuilt: Path, refused: Refused, words: tuple[str, str], said: str
) -> None:
    assert said in refused("stage", "launch", "--matrix", str(unbuilt), *words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("build --max-num-tokens 64", "--set settings.build.max_num_tokens=VALUE"),
        ("build --max-batch-size 4", "--set axes.max_batch_size=[VALUE]"),
        ("build --checkpoint d", "leave it out"),
        ("convert --model d", "leave it out"),
        ("build --output-dir d", "leave it out"),
        ("quantize --calibration-samples 8", "--set settings.quantize.calibration.samples=VALUE"),
        ("quantize --calibration-data d", "--set settings.quantize.calibration.data=VALUE"),
        ("check --prompt Hi", "--set settings.check.prompt=VALUE"),
        ("check --world-size 2", "leave it out"),
        ("score --input-data d", "--set settings.perf.input_data=VALUE"),
        ("score --min-score 0.5", "--set settings.accuracy.min_score=VALUE"),
    ],
)
def test_what_a_matrix_says_itself_is_refused_with_what_works(
    unbuilt: Path, refused: Refused, words: str, hint: str
) -> None:
    said = refused("stage", *words.split(), "--matrix", str(unbuilt))
    assert f"{words.split()[1]} cannot be combined with --matrix\n  try: {hint}" in said


# ------------------------------------------------------------------------------------------------------- parameters


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The parameters that a stage by hand is given for a command line."""
    found: list[Any] = []
    monkeypatch.setattr(stage, "_by_hand", lambda _stage, _typed, params: found.append(params) or 0)
    assert app.main([*words, "--output-dir", "o"]) == 0
    (params,) = found
    return params


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here(monkeypatch, MACHINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "s.json").write_text("{}")
    return tmp_path


PERF = ("stage", "perf", "--service", "s.json", "--repository", "d", "--engine", "d", "--max-tokens", "8")
PYTORCH = ("stage", "repository", "--toolchain", "tensorrt_llm_pytorch", "--model", "d", "--max-batch-size", "4")


def test_lists_and_objectives_are_typed_as_people_write_them(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--concurrency", "1,8", "--request-rate", "2.5", "--slo", "ttft=0.3s,tpot=40ms", "--protocol", "http")
    assert asked(monkeypatch, *PERF, *words) == PerfParams(
        max_tokens=8,
        concurrency=(1, 8),
        request_rate=(2.5,),
        slo={"ttft_ms": 300.0, "tpot_ms": 40.0},
        protocol="http",
    )
    assert asked(monkeypatch, *PERF) == PerfParams(max_tokens=8), "everything else as in a matrix"
    assert asked(monkeypatch, *PERF[:-2]) == PerfParams(), "answers as long as the engine was built for"


def test_options_of_other_programs_are_pairs(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ("--max-seq-len", "64")
    found = asked(
        monkeypatch, *PYTORCH, *limits, "--llm-args", "kv_cache_config.dtype=fp8", "--llm-args", "x=1", "--no-decoupled"
    )
    assert found.llm_args == {"kv_cache_config": {"dtype": "fp8"}, "x": 1}
    assert found.decoupled is False
    assert (found.enable_chunked_context, found.max_num_tokens) == (None, None), "what a matrix leaves to the toolchain"


def test_rows_to_calibrate_on_have_options_of_their_own(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(
        monkeypatch, "stage", "quantize", "--toolchain", "tensorrt_llm_pytorch", "--model", "d", "--precision", "int4_awq", "--family", "llama",
        "--calibration-samples", "8", "--calibration-chat-template",
    )  # fmt: skip
    assert found.calibration == Selection(samples=8, chat_template=True)


@pytest.mark.parametrize(
    ("model", "source"),
    [
        ("org/name@v1", {"hugging_face": "org/name", "revision": "v1"}),
        ("org/name", {"hugging_face": "org/name", "revision": "main"}),
        ("tiny", {"generated": "llama", "seed": 0}),
        ("./d", {"local": "/d"}),
        ("./d@v2", {"local": "/d@v2"}),
        ("d@v2", {"local": "/d@v2"}),
    ],
)
def test_a_model_is_what_people_call_it(
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    source: dict[str, Any],
) -> None:
    listed: list[Any] = []

    def resolve(sources: Any, **_options: object) -> dict[str, Any]:
        listed.extend(sources)
        return {**sources[0], "revision": "0123abc"} if "hugging_face" in sources[0] else sources[0]

    monkeypatch.setattr(hub, "resolve", resolve)
    (inputs / "d@v2").mkdir()
    if "local" in source:
        source = {"local": f"{inputs}{source['local']}"}
    found = asked(monkeypatch, "stage", "download", model)
    assert listed == [source]
    if "hugging_face" in source:
        assert found.source == {**source, "revision": "0123abc"}
        assert "hugging_face: org/name, revision 0123abc" in capsys.readouterr().err
    assert found.folder == source.get("local")


@pytest.mark.parametrize(
    ("model", "said"),
    [("tiny@deadbeef", "tiny is a recipe, which has its own source"), ("d@v2", "neither a recipe nor a directory")],
)
def test_a_revision_of_what_has_none_is_refused(inputs: Path, refused: Refused, model: str, said: str) -> None:
    assert f"{model}: {said}" in refused("stage", "download", model, "--output-dir", "o")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--llm-args", "a=1", "--llm-args", "a.b=2"), "'a.b=2': a.b, or its parent, already has a value"),
        (("--llm-args", "a.b=2", "--llm-args", "a=1"), "'a=1': a, or its parent, already has a value"),
        (("--llm-args", "x=2024-01-01"), "'x=2024-01-01': 2024-01-01 is not a JSON value"),
        (("--llm-args", "x=.nan"), "'x=.nan': .nan is not a JSON value"),
    ],
)
def test_pairs_that_say_nothing_sensible_are_refused_in_words(
    inputs: Path, refused: Refused, words: tuple[str, ...], said: str
) -> None:
    assert f"--llm-args: {said}" in refused(*PYTORCH, *words, "--output-dir", "o")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("repository --engine d --model d --max-batch-size 4 --draft /nowhere", "--draft"),
        ("convert --model d --kv-cache-precision fp8", "--kv-cache-precision"),
        ("build --checkpoint d --family llama", "--family"),
    ],
)
def test_what_only_another_toolchain_has_is_refused(inputs: Path, refused: Refused, words: str, option: str) -> None:
    assert f"error: {option}: this toolchain does not have this option" in refused(
        "stage", *words.split(), "--toolchain", "embedded", "--output-dir", "o"
    )


def test_by_hand_nobody_guesses_which_prompts_perf_timed(inputs: Path, refused: Refused) -> None:
    assert "--input-data is required: the same file or builtin:NAME as for perf" in refused(
        "stage", "score", "--perf", "d", "--engine", "d", "--output-dir", "o"
    )


@pytest.mark.parametrize("verb", ["convert", "quantize", "build"])
def test_a_family_that_has_no_engines_is_refused(inputs: Path, refused: Refused, verb: str) -> None:
    words = ("--toolchain", "tensorrt_llm", "--precision", "fp16", "--family", "qwem2")
    read = ("--checkpoint" if verb == "build" else "--model", "d")
    assert "--family \"qwem2\" is not allowed; did you mean 'qwen2'?" in refused(
        "stage", verb, *words, *read, "--output-dir", "o"
    )


def test_parameters_of_every_toolchain_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["stage", "convert", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "int4_awq" in said
    assert "nvfp4" in said
    assert "--kv-cache-precision" in said
    assert "pipeline stage convert --model model --precision int8_wo --output-dir checkpoint" in said
