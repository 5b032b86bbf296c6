"""Why an attempt failed: from what it said itself, the words in its log, the signal that ended it, in this order."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.jobs import job
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.orchestrate.run.executor import failure_of
from trtllm_pipeline.tensorrt.diagnosis import out_of_memory
from trtllm_pipeline.tensorrt.stage.base import FAILURE_FILE

OUT_OF_GPU_MEMORY = "[TensorRT-LLM][ERROR] CUDA out of memory. Tried to allocate 2.00 GiB"


def failed(
    attempt: Path,
    code: int,
    *log: str,
    told: object = None,
    timed_out: bool = False,
    before: out_of_memory.Counts | None = None,
) -> StageError:
    of = replace(job(attempt, "build"), attempt=str(attempt), timeout_s=90.0)
    (attempt / "log").write_text("".join(f"{line}\n" for line in log))
    if told is not None:
        (attempt / FAILURE_FILE).write_text(told if isinstance(told, str) else json.dumps(told))
    error = failure_of(of, code, timed_out=timed_out, before=before)
    assert error.log == attempt / "log"
    assert error.message.startswith("build: ") or told is not None
    return error


def test_what_the_stage_said_itself_comes_first(tmp_path: Path) -> None:
    told = {"failure": "infeasible", "message": "the engine's max_seq_len is 8", "hint": "build it again"}
    error = failed(tmp_path, 1, OUT_OF_GPU_MEMORY, told=told)
    assert (error.failure, error.message, error.hint) == (FailureClass.INFEASIBLE, told["message"], told["hint"])


@pytest.mark.parametrize("told", ["{", "{}", {"failure": "unheard of", "message": "x", "hint": None}])
def test_what_was_said_badly_counts_as_nothing(tmp_path: Path, told: object) -> None:
    assert failed(tmp_path, 1, OUT_OF_GPU_MEMORY, told=told).failure is FailureClass.OUT_OF_MEMORY


@pytest.mark.parametrize("code", [1, 134, -signal.SIGABRT])
def test_other_programs_words_give_the_class_and_a_hint(tmp_path: Path, code: int) -> None:
    error = failed(tmp_path, code, "loading", OUT_OF_GPU_MEMORY, "Traceback of something", "terminating")
    assert error.failure is FailureClass.OUT_OF_MEMORY
    assert error.hint
    assert ("SIGABRT" if code < 0 else f"exit code {code}") in error.message


def test_the_first_cause_is_found_however_much_follows_it(tmp_path: Path) -> None:
    early = failed(tmp_path, 1, "loading", OUT_OF_GPU_MEMORY, *(f"line {number}" for number in range(30_000)))
    assert (early.failure, early.line) == (FailureClass.OUT_OF_MEMORY, 2)
    assert early.setting == "settings.build.max_num_tokens=4096"


def test_what_nobody_knows_is_shown_by_the_lines_that_say_most(tmp_path: Path) -> None:
    noise = [f"[TRT-LLM] [I] layer {number} done" for number in range(3000)]
    log = [*noise, "RuntimeError: the moon is full", *noise, "ValueError: so is the sea", *noise]
    error = failed(tmp_path, 1, *log)
    assert (error.failure, error.line, error.setting) == (FailureClass.BUG, 3001, None)
    assert error.message == "build: ended with exit code 1; the first error in its log: RuntimeError: the moon is full"
    assert error.telling == ("log:3001: RuntimeError: the moon is full", "log:6002: ValueError: so is the sea")


@pytest.mark.parametrize(
    ("code", "log"),
    [
        (-signal.SIGKILL, "loading weights"),
        (1, "convert.sh: line 2:  71 Killed  python3"),
        (1, "the health check failed\nconvert.sh: line 2:  71 Killed  python3"),
    ],
)
def test_a_kill_is_for_memory_only_where_the_kernel_counted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, log: str
) -> None:
    monkeypatch.setattr(out_of_memory, "counts", lambda: out_of_memory.Counts(group={"memory.events": 3}))
    other = failed(tmp_path, code, log, before=out_of_memory.Counts(group={"memory.events": 3}))
    assert other.failure is FailureClass.BUG
    assert "the kernel did not kill it for lack of memory (oom_kill in memory.events stayed at 3)" in other.message
    error = failed(tmp_path, code, log, before=out_of_memory.Counts(group={"memory.events": 2}))
    assert error.failure is FailureClass.OUT_OF_MEMORY
    assert "the kernel killed it for lack of memory (oom_kill in memory.events went from 2 to 3" in error.message
    for each in (other, error):
        assert log.rpartition("\n")[2] in each.message
        assert each.hint == out_of_memory.HINTS[each.failure]


def test_what_killed_a_process_comes_before_that_it_was_killed(tmp_path: Path) -> None:
    watchdog = "[2026-03-01 10:00:00 TP0] Watchdog timeout (self.watchdog_timeout=300)"
    error = failed(tmp_path, 1, "loading", watchdog, "Received sigquit from a child process.", "Killed")
    assert (error.failure, error.line) == (FailureClass.BUG, 2)
    assert "watchdog" in (error.hint or "")


def test_a_log_may_know_better_than_a_kill(tmp_path: Path) -> None:
    known = failed(tmp_path, -signal.SIGKILL, "OSError: [Errno 28] No space left on device")
    assert known.failure is FailureClass.USER


def test_the_limit_is_named_with_the_setting_that_raises_it(tmp_path: Path) -> None:
    error = failed(tmp_path, -signal.SIGKILL, OUT_OF_GPU_MEMORY, timed_out=True)
    assert (error.failure, error.message) == (FailureClass.TIMEOUT, "build: took longer than its limit of 90 s")
    assert error.hint == "raise it with --set settings.build.timeout_s=SECONDS"


def test_without_a_log_there_is_still_the_exit_code(tmp_path: Path) -> None:
    assert failed(tmp_path, 7).message == "build: ended with exit code 7"
