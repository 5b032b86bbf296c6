"""The short form of `benchmarks/kill_resume.py`: whole runs killed at random instants, several at once, the power cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
