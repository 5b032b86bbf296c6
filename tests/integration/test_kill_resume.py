"""The short form of `benchmarks/kill_resume.py`: whole runs killed at random instants, several at once, the power cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import needed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


@pytest.mark.parametrize(
    ("words", "kills"),
    [
        pytest.param(
            ("--how", "group,pipeline,child", "--at-once", "2", "--longest", "1.5"), 3, marks=pytest.mark.seam
        ),
        (("--how", "group,pipeline,child", "--at-once", "5", "--longest", "4"), 2),
        (("--how", "power", "--longest", "2"), 3),
        pytest.param(
            ("--how", "group,pipeline,child", "--at-once", "5", "--longest", "4"), 10, marks=pytest.mark.nightly
        ),
        pytest.param(("--how", "power", "--longest", "2"), 8, marks=pytest.mark.nightly),
    ],
    ids=["two at once", "five at once", "power cut", "five at once, often", "power cut, often"],
)
def test_nothing_is_torn_made_twice_or_left_behind(tmp_path: Path, words: tuple[str, ...], kills: int) -> None:
    if "power" in words:
        needed.program("mkfs.ext4")
        if os.geteuid() != 0:
            pytest.skip("a file system whose power can be cut needs root")
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


@pytest.mark.parametrize("moment", ["artifacts go", "what has gone is removed"])
def test_a_removal_that_is_killed_leaves_nothing_half(tmp_path: Path, moment: str) -> None:
    words, workspace = [sys.executable, SCRIPT.with_name("toy.py")], tmp_path / "w"
    fill = [*words, "fill", "--matrix", toy_matrix(tmp_path), "--workspace", workspace]
    gc = [*words, "store", "prune", "--unused-for", "0d", "-w", workspace]

    def there() -> int:
        return sum(len(os.listdir(stage)) for stage in (workspace / "store").iterdir())

    def aside() -> int:
        return sum(name.endswith(".0") for name in os.listdir(workspace / "work"))

    def killed_within() -> bool:
        """Whether gc was killed at that moment: of 205 artifacts it moves 200 aside, removes these, and continues."""
        process, most = subprocess.Popen(gc, stdout=subprocess.DEVNULL), 0
        while process.poll() is None:
            most = max(most, aside())
            if there() < 205 and (moment == "artifacts go" or aside() < most):
                break
        process.kill()
        process.wait()
        return 0 < there() < 205 and (moment == "artifacts go" or 0 < aside() < most)

    for _ in range(5):  # on a busy machine it may end before this process looks
        subprocess.run(fill, check=True, capture_output=True)
        assert there() == 205
        if killed_within():
            break
    else:
        raise AssertionError("gc was never killed while it removed")
    left = there()
    told = subprocess.run([*words, "store", "verify", "-w", workspace], check=False, capture_output=True, text=True)
    assert [int(each.split()[0]) for each in told.stdout.split(", ")[:2]] == [left, 0], told.stdout
    subprocess.run(gc, check=True)
    assert there() == 0
    assert [path.name for path in (workspace / "work").iterdir()] == ["users.lock"]


def toy_matrix(folder: Path) -> Path:
    """A matrix of 64 cells of the toy toolchain."""
    code = f"import sys, pathlib; sys.path.insert(0, {str(SCRIPT.parent)!r}); import toy; toy.write_matrix(64, pathlib.Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)
    return folder / "matrix.yaml"
