"""What the system refuses: full disks, names that are too long, too few open files. Words, and what to do."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest

from tests.unit.conftest import Refused
from trtllm_pipeline.base.errors import StateError
from trtllm_pipeline.base.files import disk
from trtllm_pipeline.base.processes import process
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli import app
from trtllm_pipeline.show.cli.output import explain_error

TINY = Path(__file__).parents[2] / "matrices/tiny.yaml"


def failing(number: int, path: Path | str | None = None) -> OSError:
    return OSError(number, os.strerror(number), None if path is None else str(path))


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = os.statvfs_result((4096, 4096, 256, 0, 0, 64, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: room)
    told = disk.no_room(failing(errno.ENOSPC), tmp_path / "not" / "there")
    assert told.startswith("no space is left on the file system at /")
    assert told.endswith(": 0 B of 1.05 MB are free")
    room = os.statvfs_result((4096, 4096, 256, 9, 9, 64, 0, 0, 0, 255))
    assert "all 64 are in use" in (disk.no_room(failing(errno.ENOSPC), tmp_path) or "")
    assert "quota" in (disk.no_room(failing(errno.EDQUOT), tmp_path) or "")
    assert "(ulimit -f)" in (disk.no_room(failing(errno.EFBIG), tmp_path) or "")
    assert disk.no_room(failing(errno.EACCES), tmp_path) is None


def test_a_full_disk_never_asks_whether_the_folder_is_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_self: Path, **_options: object) -> None:
        raise failing(errno.ENOSPC)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StateError, match=r"no space is left on the file system at .* are free"):
        Store(tmp_path / "ws")
    assert explain_error(failing(errno.ENOSPC, tmp_path / "state.db")) == 1
    said = capsys.readouterr().err
    assert "no space is left on the file system at" in said
    assert "free some space" in said
    assert "writable" not in said


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.EMFILE])
def test_what_the_system_refuses_is_no_bug_of_ours(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_error(failing(number, "/a/b")) == 2
    assert capsys.readouterr().err == f"error: /a/b: {os.strerror(number).lower()}\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "-m", str(TINY), "-w", "n" * 300],
        ["status", "-w", "n" * 300],
        ["store", "list", "-w", "n" * 300],
        ["report", "n" * 5000],
        ["recommend", "n" * 5000],
        ["logs", "n" * 5000],
        ["stage", "download", "tiny", "--output-dir", "n" * 300],
        ["stage", "smoke", "--service", "n" * 300, "--engine", "n" * 5000, "--output-dir", "o"],
        ["models", "lint", "n" * 300],
        ["bench", "analyze", "n" * 300],
        ["eval", "drift", "n" * 300, "n" * 300],
        ["matrix", "init", "n" * 300],
        ["models", "show", "n" * 300],
        ["stage", "replay", "n" * 300],
        ["status", "-w", "self"],
        ["run", "-m", str(TINY), "-w", "self"],
    ],
)
def test_long_names_and_links_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, argv: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("self").symlink_to("self")
    if argv[0] in {"report", "recommend", "logs"}:
        Store(tmp_path / ".pipeline").close()
    assert refused(*argv).startswith("error: ")


def test_open_files_are_allowed_or_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [64, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, new: limits.__setitem__(slice(None), new))
    process.allow_open_files(100)
    assert limits == [process.OPEN_FILES + 100, 4096]
    process.allow_open_files()
    assert limits == [process.OPEN_FILES + 100, 4096], "nothing is lowered"
    with pytest.raises(StateError, match=f"may open 4096 files here, but {process.OPEN_FILES + 5000} are needed"):
        process.allow_open_files(5000)
    limits[:] = [64, resource.RLIM_INFINITY]
    process.allow_open_files(5000)
    assert limits[0] == process.OPEN_FILES + 5000


def test_a_plan_of_a_load_needs_its_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp", reason="part of the extra [embedded], which is there up to Python 3.12")
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 1024))
    argv = ["run", "-m", str(TINY), "-w", str(tmp_path / "ws"), "--set", "settings.perf.concurrency=[2000]"]
    assert app.main(argv) == 2
    assert "a process may open 1024 files here, but 2256 are needed" in capsys.readouterr().err
    assert app.main(["plan", *argv[1:], "--format", "json"]) == 0, "a plan needs none"
    assert json.loads(capsys.readouterr().out)["cells"]


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EFBIG, "ulimit -f unlimited"), (errno.ENOSPC, "free some space"), (errno.ENOENT, "")]
)
def test_the_hint_goes_with_what_there_is_no_room_for(number: int, said: str) -> None:
    told = disk.hint(OSError(number, "x"))
    assert said in (told or "")
    assert bool(told) == bool(said)


@pytest.mark.parametrize("words", [["bench", "analyze", "/dev/full"], ["eval", "drift", "/dev/full", "/dev/full"]])
def test_a_device_is_no_file_of_results(words: list[str], refused: Refused) -> None:
    assert "/dev/full: is a device, expected a file" in refused(*words)
