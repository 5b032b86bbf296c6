"""The table of commands: help without importing, groups, suggestions, options from the environment."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.main import get_command

from tests.unit.conftest import Refused
from trtllm_pipeline import __main__
from trtllm_pipeline.orchestrate import served_cell
from trtllm_pipeline.orchestrate.plan import plan_file, planner
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.plan.runs import run_id
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli import app, options
from trtllm_pipeline.show.cli.app import main


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "Usage: pipeline [OPTIONS] COMMAND"),
        (["--help"], "Usage: pipeline [OPTIONS] COMMAND"),
        (["matrix"], "Usage: pipeline matrix [OPTIONS] COMMAND"),
        (["run", "--help"], "[env var: PIPELINE_TOOLCHAIN]"),
        (["--version"], "trtllm-pipeline "),
    ],
)
def test_help_ends_with_0(capsys: pytest.CaptureFixture[str], words: list[str], shown: str) -> None:
    assert app.main(words) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["stage", "perf", "-u", "localhost:8001"], "pipeline bench load -u HOST:PORT --model MODEL"),
        (["stage", "accuracy", "--url", "localhost:8001"], "pipeline eval answers -u HOST:PORT --model MODEL"),
    ],
)
def test_a_stage_that_is_given_a_server_names_the_command_for_any(
    refused: Refused, words: list[str], command: str
) -> None:
    assert f"try: {command}" in refused(*words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plann"], "no such command 'plann'. Did you mean 'plan', 'explain'?"),
        (["store", "verfy"], "no such command 'verfy'. Did you mean 'verify'?"),
        (["run", "--matrx", "x"], "no such option: --matrx; did you mean --matrix"),
        (["run"], "pipeline run: no matrix given"),
        (["status", "--format", "yaml"], "'yaml' is not one of 'text', 'json'"),
        (["help"], "no such command 'help'"),
    ],
)
def test_what_is_mistyped_gets_one_line_and_a_hint(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert app.main(words) == 2
    out, err = capsys.readouterr()
    error, hint = err.splitlines()
    assert (out, error.startswith("error: "), said in error) == ("", True, True)
    assert hint.startswith("  try: pipeline")


def test_the_help_of_every_option_is_a_sentence_as_typer_s_own() -> None:
    for row in app.commands():
        if not row.target:
            continue
        command: Any = get_command(app.build(row.path.split()))
        for word in row.path.split():
            command = command.commands[word]
        wrong = [each.help for each in command.params if each.help[0].islower() or not each.help.endswith(".")]
        assert wrong == [], row.path


def test_options_that_are_set_once_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(tmp_path / "mine").close()
    monkeypatch.setenv("PIPELINE_WORKSPACE", str(tmp_path / "mine"))
    assert app.main(["status", "--runs"]) == 0
    assert "no runs in this workspace yet" in capsys.readouterr().out
    assert app.main(["status", "--runs", "--workspace", str(tmp_path / "other")]) == 2


def test_help_on_a_terminal_stands_in_panels_and_leaves_rich_whole() -> None:
    program = (
        "from trtllm_pipeline.show.cli.app import main\nmain(['run', '--help'])\n"
        "from rich.markdown import Markdown\nfrom rich.traceback import Traceback\nprint(Markdown.__name__)"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        try:
            while more := os.read(master, 65536):
                shown += more
        except OSError:
            pass  # how a terminal ends
    os.close(master)
    text = shown.decode()
    assert process.returncode == 0
    assert "╭─" in text
    assert "settings.perf.concurrency=[1,8]" in text.replace("\x1b[0m", ""), "brackets are no markup"
    assert text.rstrip().endswith("Markdown")


@pytest.mark.parametrize(
    "words", [("store", "prune"), ("store", "verify"), ("store", "repair"), ("status",)], ids=" ".join
)
@pytest.mark.parametrize("workspace", ["", "."])
def test_a_folder_that_is_no_workspace_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], workspace: str
) -> None:
    (tmp_path / "work" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--workspace", workspace]) == 2
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["work", "work/mine"]


def test_the_environment_s_toolchain_does_not_replace_that_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Request(Path("m.yaml"), toolchain="tensorrt_llm")
    monkeypatch.setattr(served_cell, "latest_request", lambda _store: asked)
    found: list[str | None] = []

    def command(ctx: typer.Context, toolchain: options.Toolchain = None) -> None:
        store = cast("Store", object())
        found.append(options.request_or_latest(ctx, store, None, toolchain=toolchain).toolchain)

    app = typer.Typer()
    app.command()(command)
    monkeypatch.setenv("PIPELINE_TOOLCHAIN", "embedded")
    for words in ([], ["--toolchain", "embedded"]):
        get_command(app).main(words, standalone_mode=False)
    assert found == ["tensorrt_llm", "embedded"]


def test_the_latest_run_goes_on_from_its_lock_where_its_matrix_is_gone(tmp_path: Path) -> None:
    store = Store(tmp_path / "w")
    folder = store.runs_dir / run_id(0, "a")
    locked = folder / "lock" / "matrix.yaml"
    locked.parent.mkdir(parents=True)
    (folder / plan_file.NAME).touch()
    locked.write_text("models: [m]\n")
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text("models: [m]\n")
    asked = Request(matrix, ("settings.perf.requests=3",), ("*/fp16",), until="build", toolchain="embedded")
    (folder / planner.REQUEST_FILE).write_text(json.dumps(asked.to_json()))
    found: list[Request] = []

    def command(ctx: typer.Context) -> None:
        found.append(options.request_or_latest(ctx, store, None, sets=["a=1"]))
        found.append(options.request_or_latest(ctx, store, None, ["cell"], ["a=1"]))

    app = typer.Typer()
    app.command()(command)
    get_command(app).main([], standalone_mode=False)
    matrix.unlink()
    get_command(app).main([], standalone_mode=False)
    there, served, gone, served_gone = found
    assert there == replace(asked, sets=(*asked.sets, "a=1"))
    # What was set then is in the lock; which cells, and how far, is not.
    assert gone == replace(there, matrix=locked, sets=("a=1",))
    assert served == replace(there, cells=("cell",))
    assert served_gone == replace(gone, cells=("cell",))


def test_an_interrupt_while_it_is_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == app.__name__:
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, app.__name__)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert __main__.main() == 130
    assert capsys.readouterr() == ("", "interrupted\n")
