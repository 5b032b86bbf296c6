"""The short form of `benchmarks/kill_resume.py`: whole runs killed at random instants, several at once, the power cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


@pytest.mark.parametrize(
    ("words", "kills"),
    [
        (("--how", "group,pipeline,child", "--at-once", "2", "--longest", "1.5"), 3),
        pytest.param(("--how", "group,pipeline,child", "--at-once", "5", "--longest", "4"), 10, marks=pytest.mark.slow),
        pytest.param(("--how", "power", "--longest", "2"), 8, marks=pytest.mark.slow),
    ],
    ids=["two at once", "five at once", "power cut"],
)
def test_nothing_is_torn_made_twice_or_left_behind(tmp_path: Path, words: tuple[str, ...], kills: int) -> None:
    if "power" in words and (os.geteuid() != 0 or shutil.which("mkfs.ext4") is None):
        pytest.skip("a file system whose power can be cut needs root and mkfs.ext4")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--toy", "64", "--kills", str(kills), *words],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "'mount'" in done.stderr:
        pytest.skip("mounting is not allowed here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills, 0 redone, 0 torn, 0 left behind, 0 hung, 0 failed" in done.stdout
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_removal_that_is_killed_leaves_nothing_half(tmp_path: Path) -> None:
    words = [sys.executable, SCRIPT.with_name("toy.py")]
    matrix = toy_matrix(tmp_path)
    subprocess.run([*words, "fill", "--matrix", matrix, "--workspace", tmp_path / "w"], check=True, capture_output=True)
    store = [*words, "store"]
    there = 205
    for number in range(12):
        process = subprocess.Popen(
            [*store, "gc", "--unused-days", "0", "-w", tmp_path / "w"], stdout=subprocess.DEVNULL
        )
        time.sleep(0.15 + 0.03 * number)
        process.kill()
        process.wait()
        told = subprocess.run([*store, "verify", "-w", tmp_path / "w"], check=False, capture_output=True, text=True)
        checked, damaged = (int(each.split()[0]) for each in told.stdout.split(", ")[:2])
        assert (checked <= there, damaged) == (True, 0), told.stdout
        there = checked
    subprocess.run([*store, "gc", "--unused-days", "0", "-w", tmp_path / "w"], check=True)
    assert not any((tmp_path / "w" / "store").glob("*/*"))
    assert [path.name for path in (tmp_path / "w" / "work").iterdir()] == ["users.lock"]


def toy_matrix(folder: Path) -> Path:
    """A matrix of 64 cells of the toy toolchain."""
    code = f"import sys, pathlib; sys.path.insert(0, {str(SCRIPT.parent)!r}); import toy; toy.write_matrix(64, pathlib.Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder / "matrix.yaml"
