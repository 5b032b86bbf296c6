"""What people mistype, and what is missing or broken around them: words and an exit code, never a traceback."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import jobs
from tests.unit.conftest import Refused
from trtllm_pipeline.base.errors import FailureClass, ServerError, StageError, StateError, UsageError
from trtllm_pipeline.orchestrate.run import by_hand
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli import app, options
from trtllm_pipeline.show.cli.output import write_output
from trtllm_pipeline.tensorrt.stage.base import StageContext


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / ".pipeline")
    store.index.begin_run("20260101-000000-aa", "m.yaml", ("pipeline",))
    (store.runs_dir / "20260101-000000-aa").mkdir()
    (store.runs_dir / "20260101-000000-aa/plan.json").write_text('{"schema": 1, "cells": [], "stage_runs": []}')
    store.close()
    return store.workspace


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that says two words, one on each stream."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "import sys; print('said'); print('complained', file=sys.stderr)"]
    path = tmp_path / "job.json"
    jobs.job(tmp_path, "build", command=tuple(command)).write(path)
    return path


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["status", "--workspace", ""], "--workspace is empty"),
        (["stage", "download", "tiny", "--output-dir", "/proc/q"], "--output-dir /proc/q: cannot be written"),
        (["stage", "download", "tiny", "--output-dir", "file"], "not an empty directory"),
        (["stage", "download", "--output-dir", "new"], "no model given"),
        (["stage", "download", "tiny"], "--output-dir is required"),
        (["stage", "download", "no-such-model", "--output-dir", "o"], "neither a recipe nor a directory"),
        (
            ["stage", "download", "tiny", "--max-workers", "0", "--output-dir", "o"],
            "--max-workers should be greater than",
        ),
        (["stage", "download", "tiny", "--max-workers", "many", "--output-dir", "o"], "'many' is not a whole number"),
        (["stage", "build", "--cells", "x"], "--cells need a matrix"),
        (["stage", "perf", "--matrix", "tiny", "--max-tokens", "8"], "--set settings.perf.max_tokens=VALUE"),
        (["report", "-o", "/nonexist/x"], "--output /nonexist/x: cannot be written"),
        (["report", "-o", "."], "--output .: cannot be written: Is a directory"),
        (["stage", "replay", "job.json", "--output-dir", "file"], "not an empty directory"),
        (["stage", "replay", "job.json", "--output-dir", ""], "--output-dir is empty"),
        (["stage", "replay", "nothing.json"], "nothing.json: cannot be read"),
        (["run", "--matrix", "tiny", "--set", "a=b", "--workspace", "new"], "unknown key 'a'"),
    ],
)
def test_mistakes_are_answered_in_words(
    workspace: Path, job: Path, refused: Refused, argv: list[str], words: str
) -> None:
    Path("file").write_text("mine")
    assert words in refused(*argv)
    assert Path("file").read_text() == "mine"
    assert not any(Path(made).exists() for made in ("new", "replay"))


def test_an_empty_folder_that_nobody_may_write_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UsageError, match=r"--output-dir .*: cannot be written: Permission denied"):
        options.empty_folder(str(tmp_path))


def test_a_damaged_index_is_an_error_until_store_repair(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (workspace / "state.db").open("r+b") as file:
        file.write(b"\xff" * 200)
    assert app.main(["status"]) == 2
    error = capsys.readouterr().err
    assert "state.db: the index is damaged" in error
    assert "pipeline store repair" in error
    gc.collect()  # the end of a process closes its index
    assert app.main(["store", "repair"]) == 0
    assert "nothing is lost" in capsys.readouterr().err
    assert (workspace / "state.db.damaged").exists()
    assert app.main(["status"]) == 0


def test_exec_leaves_stdout_to_the_result(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert app.main(["stage", "replay", str(job), "--output-dir", "text"]) == 0
    out, err = capfd.readouterr()
    assert out == f"{Path('text/out').absolute()}\n"
    assert "said" in err
    assert "complained" in err
    assert app.main(["stage", "replay", str(job), "--output-dir", "json", "--format", "json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"schema": 1, "output_dir": str(Path("json/out").absolute())}


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_what_is_started_from_here_sends_no_telemetry_unless_told(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.setenv(app.NO_TELEMETRY, "")  # so that it is put back as it was
    monkeypatch.delenv(app.NO_TELEMETRY) if before is None else monkeypatch.setenv(app.NO_TELEMETRY, before)
    app.main(["models", "list"])
    assert os.environ[app.NO_TELEMETRY] == after


def test_matrix_init_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["matrix", "init", "m.yaml", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "file": "m.yaml"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StageError("x", failure=FailureClass.USER), 2),
        (StageError("x", failure=FailureClass.TRANSIENT), 1),
        (StateError("x"), 2),
    ],
)
def test_what_the_user_has_to_do_first_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(_program: str, _stage: str, _work: StageContext[Any]) -> None:
        raise error

    monkeypatch.setattr(by_hand, "run_program", fail)
    argv = ["stage", "download", "tiny", "--output-dir", str(tmp_path / "o")]
    assert app.main(argv) == code


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A launch by hand whose scratch directory lies in `tmp_path/temp`."""
    (tmp_path / "temp").mkdir()
    (tmp_path / "repository").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    return ["stage", "launch", "--repository", str(tmp_path / "repository")]


def test_the_log_of_a_server_that_failed_is_kept_and_no_timer_goes_on(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_program: str, _stage: str, work: StageContext[Any]) -> None:
        log = work.attempt / "server.log"
        log.write_text("why")
        raise ServerError("it died", log=log)

    monkeypatch.setattr(by_hand, "run_program", fail)
    before = signal.getsignal(signal.SIGALRM)
    assert app.main(launch) == 1
    (log,) = (tmp_path / "temp").glob("*/server.log")
    assert str(log) in capsys.readouterr().err
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.parametrize("error", [None, ServerError("no Triton", failure=FailureClass.USER)])
def test_a_scratch_folder_that_nothing_names_goes_away(
    tmp_path: Path, launch: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def end(_program: str, _stage: str, _work: StageContext[Any]) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(by_hand, "run_program", end)
    app.main(launch)
    assert list((tmp_path / "temp").iterdir()) == []


def test_sigterm_interrupts_in_words(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait(*_args: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(by_hand, "replay", wait)
    assert app.main(["stage", "replay", str(job)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_hint_to_resume_can_be_typed() -> None:
    assert options.typed_again("my results") == " -w 'my results'"


def test_output_is_replaced_whole_and_links_and_devices_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, link, gone = (tmp_path / name for name in ("file", "link", "gone"))
    file.write_text("old")
    inode = file.stat().st_ino
    write_output(str(file), "new\r\n")
    assert file.read_bytes() == b"new\r\n"
    assert file.stat().st_ino != inode, "whoever had opened the old one still reads all of it"
    link.symlink_to(file)
    write_output(str(link), "through the link")
    assert link.is_symlink()
    assert file.read_text() == "through the link"
    write_output("/dev/null", "nowhere")
    assert Path("/dev/null").is_char_device()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write_output(str(file), "too much")
    with pytest.raises(UsageError, match="cannot be written"):
        write_output(str(gone), "too much")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    assert file.read_text() == "through the link"
