"""Our own files are only read where they are files: nothing waits for a pipe that nobody writes."""

from __future__ import annotations

import ast
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import trtllm_pipeline
from tests.helpers.signed import publish
from trtllm_pipeline.base.errors import StateError
from trtllm_pipeline.base.files import reading
from trtllm_pipeline.base.files.digest import digest_file, sha256_of_file
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main

READERS = (reading.read_bytes, reading.read_text, digest_file, sha256_of_file)


@pytest.mark.parametrize("read", READERS)
def test_what_is_not_a_file_is_named(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, kind in {"pipe": "pipe", "directory": "directory", "link": "pipe", "socket": "socket"}.items():
            with pytest.raises(reading.NotAFileError, match=f"{kind}, expected a file"):
                read(tmp_path / name)
    with pytest.raises(reading.NotAFileError, match="a device"):
        read(Path("/dev/zero"))
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


def test_a_file_to_be_written_is_no_pipe_either(tmp_path: Path, make: Callable[[Path, str], None]) -> None:
    for kind in ("pipe", "directory"):
        make(tmp_path / kind, kind)
        with pytest.raises(reading.NotAFileError, match=kind):
            reading.open_fd(tmp_path / kind, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.close(reading.open_fd(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "new").read_bytes() == b""


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_workspace_tells_it_or_mends_it(tmp_path: Path, make: Callable[[Path, str], None], kind: str) -> None:
    store = Store(tmp_path / "w")
    artifact = publish(store)
    make(artifact.folder / manifest.NAME, kind)
    assert store.get(artifact.stage, artifact.fingerprint) is None
    assert list((tmp_path / "w/damaged").glob("*/*")), "set aside, so that it is made again"
    store.close()
    make(tmp_path / "w/history.jsonl", kind)
    with pytest.raises(StateError, match=f"history.jsonl is a .*{kind}, expected a file"):
        Store(tmp_path / "w")


def test_the_lock_of_the_index_is_named(tmp_path: Path, make: Callable[[Path, str], None]) -> None:
    Store(tmp_path / "w").close()
    make(tmp_path / "w/state.lock", "directory")
    with pytest.raises(StateError, match=r"state.lock is a directory, expected a file"):
        Store(tmp_path / "w")


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_run_whose_request_is_not_a_file_is_told(
    tmp_path: Path, make: Callable[[Path, str], None], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "w")
    store.index.begin_run("first", "m.yaml", ("run",))
    store.index.end_run("first", 0)
    store.close()
    run = tmp_path / "w/runs/first"
    run.mkdir()
    for name in ("plan.json", "request.json", "report.json"):
        make(run / name, kind)
    for words in (["status"], ["report"], ["resume"], ["store", "prune", "--unused-for", "1d", "--dry-run"]):
        assert main([*words, "--workspace", str(tmp_path / "w")]) in {0, 2}
    assert "Traceback" not in capsys.readouterr().err


def test_nobody_opens_files_of_a_workspace_in_another_way() -> None:
    """In these packages, `open` of a path reads what others may have put there."""
    package = Path(trtllm_pipeline.__file__).parent
    allowed = {"writing.py", "user_files.py", "reading.py"}
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for room in ("orchestrate/store", "orchestrate/plan", "orchestrate/provenance", "show/report")
        for path in (package / room).rglob("*.py")
        if path.name not in allowed
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"read_bytes", "read_text"}
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "reading")
        and not re.search("_ASSETS|__file__|/proc/", ast.unparse(node))
    ]
    assert found == []
