"""A workspace that cannot be written, such as a colleague's or an archive: all of it can be looked at, nothing is changed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import command_line
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.orchestrate.store.store import Store

TINY = str(matrices_folder() / "tiny.yaml")
# Root may write anywhere; without its capabilities it is held to the modes of its files like anybody else.
POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.getuid() == 0 else ()
LATER = "20260101-000000-later"
FORK = multiprocessing.get_context("fork")


def pipeline(folder: Path, *words: str, looking: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. Who only looks is a process without our powers."""
    place = str(folder / ("scratch" if looking else "ours"))
    variables = {"XDG_RUNTIME_DIR": place, "TMPDIR": place, "COLUMNS": "140"}
    words, root = (*words, "--workspace", str(folder / "ws")), Path(__file__).parents[2]
    if not looking:
        ours = command_line.pipeline(*words, cwd=root, code=None, **variables)
        return ours.returncode, ours.stdout, ours.stderr
    done = subprocess.run(
        [*POWERLESS, sys.executable, "-m", "trtllm_pipeline", *words],
        cwd=root,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def everything(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {str(path): ((stat := path.lstat()).st_size, stat.st_mtime_ns, stat.st_mode) for path in folder.rglob("*")}


def let_look(workspace: Path) -> None:
    for path in (workspace, *workspace.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~0o222)


def let_write(workspace: Path) -> None:
    for path in (workspace, *workspace.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)


def begin_a_run_and_die(workspace: Path) -> None:
    """A run that the index knows from its write-ahead log alone, as after kill -9."""
    store = Store(workspace)
    store.index.begin_run(LATER, "m.yaml", ("pipeline", "run"))
    os.kill(os.getpid(), 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a finished workspace `ws`, made up to the checkpoints, and a later run that was killed at its beginning."""
    folder = tmp_path_factory.mktemp("read-only")
    for name in ("scratch", "ours"):
        (folder / name).mkdir()
    assert pipeline(folder, "run", "--matrix", TINY, "--until", "convert")[0] == 0
    (first,) = (folder / "ws/runs").iterdir()
    shutil.copytree(first, folder / "ws/runs" / LATER)
    process = FORK.Process(target=begin_a_run_and_die, args=(folder / "ws",))
    process.start()
    process.join()
    assert (folder / "ws/state.db-wal").stat().st_size > 0
    yield folder
    let_write(folder / "ws")


LOOKS = (
    ("status", "--format", "json"),
    ("status",),
    ("status", "--matrix", TINY),
    ("report", "--format", "csv"),
    ("report", "--format", "junit"),
    ("logs", "tiny/fp16", "convert"),
    ("logs", "tiny/fp16", "--format", "json"),
    ("explain", "*/fp16*"),
    ("plan", "--matrix", TINY),
    ("compare", "latest", "latest~1"),
    ("recommend",),
    ("store", "list"),
    ("store", "verify"),
)
WRITES = (
    ("run", "--matrix", TINY),
    ("resume",),
    ("stage", "convert", "--matrix", TINY, "--cells", "tiny/fp16"),
    ("store", "repair"),
    ("store", "prune"),
)


def test_all_of_it_can_be_looked_at_and_nothing_changes(folder: Path) -> None:
    shutil.copytree(folder / "ws", folder / "kept", symlinks=True)
    expected = [pipeline(folder, *words)[:2] for words in LOOKS]
    shutil.rmtree(folder / "ws")
    (folder / "kept").rename(folder / "ws")  # with what the write-ahead log alone knows
    let_look(folder / "ws")
    before = everything(folder / "ws")
    for words, (code, out) in zip(LOOKS, expected, strict=True):
        found = pipeline(folder, *words, looking=True)
        assert found[:2] == (code, out), (words, found)
    assert pipeline(folder, "report", "--format", "html", "--output", "-", looking=True)[1].endswith("</html>\n")
    assert LATER in pipeline(folder, "status", looking=True)[1], "the latest run is only in the write-ahead log"
    for words in WRITES:
        code, _, err = pipeline(folder, *words, looking=True)
        assert code == 2, words
        assert "is read-only" in err
        assert "in a copy (cp -r) without its store/repository" in err
    code, _, err = pipeline(folder, "report", "--format", "html", looking=True)
    assert (code, "--output FILE" in err) == (2, True), err
    assert everything(folder / "ws") == before
    assert list((folder / "scratch").iterdir()) == []


@pytest.mark.parametrize("harm", ["flipped", "gone"])
def test_a_damaged_index_that_cannot_be_mended_is_read_from_what_it_was_made_of(folder: Path, harm: str) -> None:
    let_write(folder / "ws")
    sound = (folder / "ws/state.db").read_bytes()
    (folder / "ws/state.db").unlink()
    if harm == "flipped":
        (folder / "ws/state.db").write_bytes(b"\xff" + sound[1:])
    let_look(folder / "ws")
    before = everything(folder / "ws")
    code, out, err = pipeline(folder, "status", looking=True)
    assert (code, LATER in out) == (0, True)
    assert "read from the manifests and the history, nothing is lost" in err
    assert everything(folder / "ws") == before
    let_write(folder / "ws")
    (folder / "ws/state.db").write_bytes(sound)


LOOK = """
import sys
from pathlib import Path
from trtllm_pipeline.orchestrate.store.store import Store
seen = 0
for _ in range(40):
    store = Store(Path(sys.argv[1]))
    assert store.unwritable is not None
    found = {run.id for run in store.index.runs()}
    assert found == {str(number) for number in range(len(found))}
    assert len(found) >= seen
    seen = len(found)
    store.close()
"""


@pytest.mark.seam
def test_looking_beside_one_that_writes(tmp_path: Path) -> None:
    """Each look is at one moment, never at half of a change, and never takes what is going on for damage."""
    if os.getuid() != 0:
        pytest.skip("writing where another may not needs root")
    store = Store(tmp_path / "ws")
    (tmp_path / "ws").chmod(0o555)
    command = [*POWERLESS, sys.executable, "-c", LOOK, str(tmp_path / "ws")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    number = 0
    while process.poll() is None or number < 50:
        store.index.begin_run(str(number), "m.yaml " * 500, ())
        number += 1
        if number % 50 == 0:
            store.close()
            store = Store(tmp_path / "ws")
        time.sleep(0.001)
    store.close()
    assert (process.returncode, process.communicate()[1]) == (0, "")
