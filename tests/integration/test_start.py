"""A program started with closed streams, a full stdout, or in a locale that is not UTF-8."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import StateError
from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.progress.lines import QuietObserver

TINY = Path(__file__).parents[2] / "matrices/tiny.yaml"
PIPELINE = f"{shlex.quote(sys.executable)} -m trtllm_pipeline"
NOT_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", command],
        check=False,
        capture_output=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_neither_fail_nor_end_in_a_file(tmp_path: Path, closed: str) -> None:
    done = shell(f"{PIPELINE} run -m {TINY} --until download --progress plain {closed}", tmp_path)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    listed = shell(f"{PIPELINE} store list --format json", tmp_path)
    assert [each["stage"] for each in json.loads(listed.stdout)["artifacts"]] == ["download"]


@pytest.mark.seam
def test_a_stdout_that_is_full_is_said_once(tmp_path: Path) -> None:
    done = shell(f"{PIPELINE} plan -m {TINY} > /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: stdout cannot be written: No space left on device\n")
    assert done.stderr.count(b"\n") == 2


def test_a_stderr_that_is_full_stops_no_run(tmp_path: Path) -> None:
    done = shell(f"{PIPELINE} run -m {TINY} --until download --progress plain 2> /dev/full", tmp_path)
    assert done.returncode == 0


@pytest.mark.seam
def test_names_beyond_ascii_in_the_c_locale(tmp_path: Path) -> None:
    folder = tmp_path / "ünï"
    folder.mkdir()
    (folder / "ä.yaml").write_bytes(TINY.read_bytes())
    done = shell(f"{PIPELINE} run -m ünï/ä.yaml -w ünï/ws --until download --format json", tmp_path, **NOT_UTF8)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode("ascii"))["run"]["matrix"] == "ünï/ä.yaml"
    wrong = shell(f"{PIPELINE} plan -m ünï/b.yaml", tmp_path, **NOT_UTF8)
    assert wrong.stderr.startswith(rb"error: \u00fcn\u00ef/b.yaml: there is no such file")


def test_a_name_that_is_no_text_is_refused_in_words(tmp_path: Path) -> None:
    done = shell(rf"{PIPELINE} plan -m $'\xe9.yaml'", tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, rb"error: \udce9.yaml: is not UTF-8 text")


def test_too_few_open_files_are_said_at_once(tmp_path: Path) -> None:
    done = shell(f"ulimit -n 64; {PIPELINE} run -m {TINY} --progress plain", tmp_path)
    assert done.returncode == 2
    assert b"a process may open 64 files here, but 260 are needed" in done.stderr
    raised = shell(f"ulimit -Sn 64; {PIPELINE} run -m {TINY} --until download", tmp_path)
    assert raised.returncode == 0, "a soft limit is raised"


def test_a_file_that_may_not_grow_is_said(tmp_path: Path) -> None:
    done = shell(f"ulimit -f 200; {PIPELINE} run -m {TINY} --until download --progress plain", tmp_path)
    assert done.returncode in {1, 2}
    assert b"here (ulimit -f)" in done.stderr
    assert b"Traceback" not in done.stderr


class Removing(QuietObserver):
    """Removes the workspace as soon as a run has started."""

    def __init__(self, workspace: Path) -> None:
        super().__init__(io.StringIO())
        self.workspace = workspace

    def begin(self, *about: Any) -> None:
        super().begin(*about)
        shutil.rmtree(self.workspace)


def test_a_workspace_that_is_removed_under_a_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "ws")
    with pytest.raises(StateError, match="the workspace was moved or removed while it was in use"):
        flow.run(planner.Request(TINY, until="download"), store, Removing(store.workspace))
