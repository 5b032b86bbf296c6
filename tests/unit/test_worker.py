"""The worker: a program on a job file, and why it failed, in words that the run reads."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from trtllm_pipeline.base.errors import FailureClass, StageError, UsageError
from trtllm_pipeline.tensorrt import worker
from trtllm_pipeline.tensorrt.stage.base import FAILURE_FILE, StageContext
from trtllm_pipeline.tensorrt.stage.params import DownloadParams, Param

HERE = __name__


@dataclass(frozen=True, kw_only=True)
class Said:
    word: Annotated[str, Param("to write")] = ""
    how: Annotated[str, Param("to fail")] = ""


def writes(work: StageContext[Any]) -> None:
    (work.out / "said").write_text(f"{work.params.word} {work.inputs['model'].name} {work.files['rows'].name}")


def starts(work: StageContext[Any]) -> None:
    says = "import os, sys; open(sys.argv[1], 'w').write(str(os.sched_getaffinity(0)))"
    subprocess.run([sys.executable, "-c", says, str(work.out / "cpus")], check=True)


def fails(work: StageContext[Any]) -> None:
    raise {
        "stage": StageError("it is down", failure=FailureClass.TRANSIENT, hint="wait"),
        "rows": UsageError("row 3 is no JSON"),
        "memory": MemoryError(),
        "disk": OSError(errno.ENOSPC, "No space left on device"),
        "other": PermissionError(errno.EACCES, "Permission denied"),
    }[work.params.how]


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path


def work(attempt: Path, **params: str) -> StageContext[Any]:
    return StageContext(Said(**params), {"model": attempt / "m"}, {"rows": attempt / "r"}, attempt / "out", attempt)


def test_a_program_gets_all_that_the_job_file_says(attempt: Path) -> None:
    path = worker.write_job("build", f"{HERE}:writes", work(attempt, word="hello"))
    assert worker.main([str(path)]) == 0
    assert (attempt / "out/said").read_text() == "hello m r"
    assert not (attempt / FAILURE_FILE).exists()


def test_a_program_and_all_that_it_starts_run_on_the_cpus_of_the_job(attempt: Path) -> None:
    path = worker.write_job("build", f"{HERE}:starts", work(attempt))
    cpu = max(os.sched_getaffinity(0))
    path.write_text(json.dumps({**json.loads(path.read_text()), "cpus": [cpu]}))
    subprocess.run([sys.executable, "-m", "trtllm_pipeline.tensorrt.worker", str(path)], check=True)
    assert (attempt / "out/cpus").read_text() == str({cpu})


def test_another_program_can_be_named(attempt: Path) -> None:
    path = worker.write_job("build", f"{HERE}:fails", work(attempt, word="hello"))
    assert worker.main([str(path), f"{HERE}:writes"]) == 0


@pytest.mark.parametrize(
    ("how", "failure", "message"),
    [
        ("stage", "transient", "it is down"),
        ("rows", "user", "row 3 is no JSON"),
        ("memory", "out_of_memory", "build: ran out of memory"),
        ("disk", "user", "build: no space is left on the file system at"),
    ],
)
def test_why_it_failed_is_left_in_the_attempt(
    attempt: Path, capsys: pytest.CaptureFixture[str], how: str, failure: str, message: str
) -> None:
    assert worker.main([str(worker.write_job("build", f"{HERE}:fails", work(attempt, how=how)))]) == 1
    told = json.loads((attempt / FAILURE_FILE).read_text())
    assert (told["failure"], told["message"].startswith(message)) == (failure, True)
    assert f"error: {message}" in capsys.readouterr().err


def test_what_nobody_foresaw_keeps_its_traceback(attempt: Path) -> None:
    with pytest.raises(PermissionError):
        worker.main([str(worker.write_job("build", f"{HERE}:fails", work(attempt, how="other")))])


def test_a_worker_imports_neither_the_command_line_nor_pydantic(attempt: Path) -> None:
    asked = StageContext(DownloadParams(source={}), {}, {}, attempt / "out", attempt)
    path = worker.write_job("download", "builtins:print", asked)
    command = [sys.executable, "-X", "importtime", "-m", "trtllm_pipeline.tensorrt.worker", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "trtllm_pipeline.tensorrt.stage.base" in imported
    assert not {name for name in imported if name.split(".")[0] in {"argparse", "typer", "pydantic", "rich", "yaml"}}
    assert not {name for name in imported if f"{name}.".startswith("trtllm_pipeline.show.cli.")}
