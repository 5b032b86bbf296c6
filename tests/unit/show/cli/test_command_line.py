"""The command line as people scan it: its commands, and options that look the same everywhere."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from tests.unit.conftest import Refused
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.show.cli import app, options
from trtllm_pipeline.show.cli.app import main

EIGHTEEN = (
    *("run", "plan", "status", "logs", "explain", "report", "compare", "recommend", "search", "bench", "eval"),
    *("serve", "chat", "export", "doctor", "matrix", "models", "store"),
)
STAGES = (
    *("download", "adapter", "draft", "quantize", "convert", "build", "visual", "check", "repository", "launch"),
    *("smoke", "perf", "accuracy", "score", "replay"),
)
LEAVES = [row.path for row in app.commands() if row.target]
METAVARS = {
    "--adapter": "a gateway has adapters of several models",
    "--concurrency": "perf and bench load measure several levels, eval sends with one",
    "--dialect": "a gateway has several models",
    "--endpoint-type": "a list of choices",
    "--family": "doctor takes several",
    "--format": "each command has its own formats",
    "--max-seq-len": "a gateway has several models",
    "--model": "a server has a name, a stage reads a directory",
    "--model-folder": "a gateway has several models",
    "--precision": "doctor takes several",
    "--repository": "export names one on a hub",
    "--server": "of logs it is a switch",
    "--system": "of serve install it is a switch",
    "--tokenizer": "lm_eval also takes the name of one on a hub",
}
"""Options whose value is called differently by some commands, with the reason."""
DEFAULTS = {
    "--endpoint-type": "a load is a chat, scores are those of a run",
    "--format": "a table if the result is one",
}
"""Options with another default in some commands, with the reason."""


@lru_cache(1)
def tree() -> dict[str, Any]:
    """Every command by its path."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        below = getattr(command, "commands", {})
        for name, each in below.items():
            yield from walk(each, (*path, name))
        if not below:
            yield " ".join(path), command

    return dict(walk(get_command(app.build(None)), ()))


def each_option() -> Iterator[tuple[str, str, Any]]:
    for path, command in tree().items():
        for param in command.params:
            if param.param_type_name == "option":
                yield max(param.opts, key=len), path, param


def test_eighteen_commands_are_listed_and_stages_and_resume_work_beside_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z]+)  ", out[out.index("Commands:") :], re.MULTILINE)
    assert tuple(listed) == EIGHTEEN
    assert "pipeline stage --help" in out
    assert main(["stage"]) == 0
    out = capsys.readouterr().out
    assert set(re.findall(r"^  ([a-z_]+)  ", out[out.index("Commands:") :], re.MULTILINE)) >= set(STAGES)
    assert set(app.GROUPS) == {"bench", "eval", "serve", "matrix", "models", "store", "stage"}
    assert main(["resume", "--help"]) == 0


def test_a_shell_completes_what_is_not_listed_too() -> None:
    complete: Any = get_command(app.build([], complete=True))
    assert not any(each.hidden for each in complete.commands.values())


@pytest.mark.parametrize("columns", [80, 140])
def test_every_help_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = 0
    for path in LEAVES + sorted(app.GROUPS):
        assert main([*path.split(), "--help"]) == 0, path
        out = capsys.readouterr().out
        assert out.startswith(f"Usage: pipeline {path} "), path
        described, _, _ = out.partition("\n  Examples:\n")  # command lines are not wrapped
        widest = max(widest, *map(len, described.splitlines()))
        assert widest <= columns, path
    assert widest > columns - 20, "the width is used"


def test_a_stage_typed_as_a_command_is_named(refused: Refused) -> None:
    assert "no such command 'convert'" in (error := refused("convert"))
    assert "try: pipeline stage convert --help" in error


def test_an_option_looks_the_same_in_every_command() -> None:
    metavars: dict[str, set[str]] = defaultdict(set)
    defaults: dict[str, set[str]] = defaultdict(set)
    for name, _path, param in each_option():
        metavars[name].add(param.metavar or str(param.type_descriptor.annotation))
        if param.default is not None and not param.is_flag:
            defaults[name].add(str(param.default))
    assert {name for name, found in metavars.items() if len(found) > 1} <= set(METAVARS)
    assert {name for name, found in defaults.items() if len(found) > 1} <= set(DEFAULTS)


def test_every_option_in_seconds_is_a_duration() -> None:
    found = {(path, name) for name, path, param in each_option() if name.endswith("-s") and param.metavar != "DURATION"}
    assert found == set()


def test_a_switch_is_listed_once() -> None:
    for name, path, param in each_option():
        if param.secondary_opts:
            assert param.default is not False or param.envvar, f"{path} {name}"
            assert param.default is not False or not param.show_default, f"{path} {name}"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300ms", 0.3), ("5s", 5.0), ("2m", 120.0), ("1h", 3600.0), ("30d", 2_592_000.0), ("1.5s", 1.5), ("7", 7.0)],
)
def test_durations_are_typed_as_people_type_them(text: str, seconds: float) -> None:
    assert options.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "5 weeks", "1m30s", "nan"])
def test_other_durations_are_refused(text: str, refused: Refused) -> None:
    assert "is not a duration such as 300ms, 5s, 2m or 1h" in refused(
        "serve", "monitoring", "--output-dir", "o", f"--ttft-p99-s={text}"
    )


MATRIX = str(matrices_folder() / "tiny.yaml")


@pytest.mark.parametrize(
    "words",
    [
        ("matrix", "show"),
        ("plan", "--toolchain", "embedded"),
        ("run", "--dry-run", "--toolchain", "embedded"),
        ("search", "--dry-run", "--toolchain", "embedded"),
    ],
    ids=" ".join,
)
def test_the_matrix_may_be_the_first_word(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp", reason="part of the extra [embedded]")
    monkeypatch.chdir(tmp_path)
    shown = []
    for matrix in ([MATRIX], ["--matrix", MATRIX], ["-m", MATRIX]):
        assert main([*words, *matrix]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2] != ""
    assert main([*words, MATRIX, "-m", "other.yaml"]) == 2
    assert "are two matrices" in capsys.readouterr().err
    assert main(list(words)) == 2
    assert "no matrix given" in capsys.readouterr().err


def test_commands_that_take_other_words_take_the_matrix_as_an_option_alone() -> None:
    takes = {path for path, command in tree().items() if any(each.name == "matrix" for each in command.params)}
    word = {path for path, command in tree().items() if any(each.name == "matrix_word" for each in command.params)}
    assert word < takes
    assert takes - word == {
        *("explain", "export", "serve start", "store push", "store pull"),
        *("stage download", "stage adapter", "stage draft"),
    }


@pytest.mark.parametrize(
    ("change", "near"),
    [
        ("setings.perf.requests=1", "'settings.perf.requests'"),
        ("perf.requests=1", "'settings.perf.requests'"),
        ("concurrency=[1]", "'settings.perf.concurrency' or 'settings.accuracy.concurrency'"),
        ("precision=[fp16]", "'axes.precision'"),
        ("settings.perf.max_token=1", "'max_tokens'"),
        ("axes.precison=[fp16]", "'precision'"),
    ],
)
def test_a_wrong_key_gets_a_suggestion(change: str, near: str, refused: Refused) -> None:
    assert f"did you mean {near}?" in refused("matrix", "show", MATRIX, "--set", change)


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_command_that_continues_measures_again_too(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain `pipeline resume` would show the old results as up to date."""
    outcome = SimpleNamespace(interrupted=interrupted, exit_code=1)
    result = SimpleNamespace(rows=(), run_id="r", forecast=None, untried=0, outcome=outcome)
    monkeypatch.setattr("trtllm_pipeline.show.cli.run.flow.run", lambda *_args, **_more: result)
    matrix, workspace = str(matrices_folder() / "tiny.yaml"), str(tmp_path / "ws")
    words = ("run", matrix, "--workspace", workspace, "--format", "json")
    for again, end in (((), ""), (("--rerun", "perf, accuracy"), " --rerun perf,accuracy")):
        assert main([*words, *again]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.endswith(f"pipeline resume -w {workspace}{end}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--resume"), "no such workspace"),
        (("resume",), "no such workspace"),
        (("run",), "pipeline run FILE, or pipeline run --resume"),
        (("status", "--runs"), "no such workspace"),
        (("status", "--runs", "--watch"), "--runs lists all runs of the workspace and cannot be combined with --watch"),
        (("models", "show", "no-such"), "no-such"),
        (("eval", "drift", "a", "b"), "a"),
        (("store", "rm", "build"), "no such workspace"),
        (("store", "rm"), "nothing selected"),
        (("stage", "convert"), "--precision"),
    ],
    ids=" ".join,
)
def test_moved_commands_answer_at_their_new_place(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(*words)
    assert not list(tmp_path.iterdir())
