"""Who holds the machine and its GPUs, as the kernel tells it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_pipeline.store import claims

HOLD = """
import fcntl, sys
files = [open(path, "w") for path in sys.argv[2:]]
for file in files: fcntl.flock(file, {"shared": fcntl.LOCK_SH, "alone": fcntl.LOCK_EX}[sys.argv[1]])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return claims.machine_leases()


@pytest.fixture
def holder(leases: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that shares the machine and has the GPU a."""
    command = [sys.executable, "-c", HOLD, "shared", str(leases / "machine"), str(leases / "gpu-a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_is_waited_for_is_told(holder: subprocess.Popen[str]) -> None:
    assert claims.lease_machine(("a",), exclusive=False) is None
    (said,) = claims.machine_users(("a",), exclusive=False)
    assert said.startswith(f"process {holder.pid} (")
    assert claims.lease_machine((), exclusive=True) is None
    assert claims.machine_users((), exclusive=True) == (said,)


def test_who_is_in_nobodys_way_is_not_told(holder: subprocess.Popen[str]) -> None:
    assert claims.machine_users(("b",), exclusive=False) == ()
    held, names = claims.lease_machine(("a",), exclusive=False, others=("b",)) or ([], ())
    assert names == ("b",)
    assert claims.machine_users(("b",), exclusive=False) == ()  # that is this process
    for claim in held:
        claim.release()
    assert holder.poll() is None
