"""Ranks on GPUs of their own: stand-in ranks that allocate on them, under a real mpirun. Needs two GPUs and pytest."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.mpi_worlds import Stage, seen_over
from tests.helpers.waiting import eventually

pytestmark = [
    pytest.mark.gpu,
]
ALLOCATED_MIB = 1024
"""What a stand-in allocates; its CUDA context comes on top."""


def smi(field: str) -> list[str]:
    """One field of each GPU, in the order of nvidia-smi; nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def used_mib() -> list[int]:
    return [int(number) for number in smi("memory.used")]


@pytest.fixture
def gpus() -> list[str]:
    """The UUIDs of two GPUs."""
    found = smi("uuid")
    if len(found) < 2:
        pytest.skip(f"needs two GPUs, here are {len(found)}")
    return found[:2]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(tmp_path, monkeypatch)
    stage.order("cuda")
    return stage


@pytest.mark.parametrize("order", [1, -1], ids=["as they are", "the other way round"])
def test_each_rank_has_its_own_gpu(stage: Stage, gpus: list[str], monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    given = gpus[::order]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(given))
    before = used_mib()
    with stage.world(2):
        assert [stage.report(rank)["gpu"] for rank in range(2)] == given
        during = used_mib()
        assert all(during[gpu] >= before[gpu] + ALLOCATED_MIB for gpu in range(2)), (before, during)
    assert eventually(lambda: all(used_mib()[gpu] < before[gpu] + ALLOCATED_MIB // 2 for gpu in range(2))), used_mib()


def test_two_worlds_on_a_gpu_each(
    stage: Stage, gpus: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[0])
    with stage.world(1) as one:
        assert stage.report(0)["gpu"] == gpus[0]
        beside = Stage(tmp_path_factory.mktemp("beside"), monkeypatch)
        beside.order("cuda")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
        with beside.world(1) as other:
            assert beside.report(0)["gpu"] == gpus[1]
            assert (one.ready(), other.ready()) == (True, True)
        assert one.ready()


def test_a_killed_rank_is_seen_at_once_and_its_memory_is_free(
    stage: Stage, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    before = used_mib()
    with stage.world(2) as world:
        os.kill(stage.report(1)["pid"], signal.SIGKILL)
        error = seen_over(world)
    assert "rank 1 of 2" in error.message
    assert eventually(lambda: all(used_mib()[gpu] < before[gpu] + ALLOCATED_MIB // 2 for gpu in range(2))), used_mib()
