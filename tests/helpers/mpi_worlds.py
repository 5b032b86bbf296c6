"""Worlds of stand-in ranks, for tests: what starts them, gives them orders, and looks for what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import needed
from tests.helpers.launched import still_running
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.errors import ServerError
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.tensorrt.servers import mpi_server, triton_server
from trtllm_pipeline.tensorrt.servers.command_lines import launcher

STAND_IN = Path(__file__).resolve().parents[1] / "standins" / "rank.py"
MODELS = ("ensemble", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")


class Stage:
    """Stand-in ranks: the program, the models that it would serve, and the directory that it gets its orders from."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.orders = folder / "orders"
        self.orders.mkdir()
        self.marker = f"TEST_MARKER_{uuid.uuid4().hex}"
        binary = folder / "bin" / "tritonserver"
        binary.parent.mkdir()
        binary.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
        binary.chmod(0o755)
        self.repository = folder / "repository"
        for model in MODELS:
            (self.repository / model).mkdir(parents=True)
            (self.repository / model / "config.pbtxt").write_text(f'name: "{model}"\n')
        self.installed = triton_installation.TritonInstallation(binary, "stand-in", folder / "backends")
        monkeypatch.setenv("STAND_IN", str(self.orders))
        monkeypatch.setenv(self.marker, "1")
        monkeypatch.setenv("PATH", str(binary.parent), prepend=os.pathsep)

    def order(self, name: str, value: int = 0) -> None:
        new = self.folder / "new"
        new.write_text(str(value))
        new.replace(self.orders / name)

    def report(self, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.orders / f"rank.{rank}.json").read_text()))

    def start(
        self,
        world_size: int,
        *,
        release: str = "0.16.0",
        mpirun: str | None = None,
        name: str = "a",
        **options: Any,
    ) -> mpi_server.World:
        """Start a world by `mpirun`, by default that of this machine. Skips the test if several ranks lack it."""
        if mpirun is None:
            mpirun = needed.program("mpirun") if world_size > 1 else shutil.which("mpirun")
        attempt = self.folder / name
        attempt.mkdir(exist_ok=True)
        ports = options.pop("ports", None) or triton_server.free_ports()
        return mpi_server.start(
            self.installed,
            self.repository,
            world_size,
            mpirun=launcher(world_size, release, mpirun),
            log=attempt / "server.log",
            ports=ports,
            **options,
        )

    @contextmanager
    def world(self, world_size: int, **options: Any) -> Iterator[mpi_server.World]:
        """A world that is ready; nothing of it is left afterwards."""
        world = self.start(world_size, **options)
        try:
            world.wait_ready(180)
            yield world
        finally:
            world.stop(3.0)
            assert self.left(world.prefix) == []

    def left(self, prefix: str = "") -> list[str]:
        """Processes that were started from here and still run, and files in shared memory that start with `prefix`."""
        files = [path.name for path in triton_server.SHARED_MEMORY.glob(f"{prefix}*")] if prefix else []
        return [*files, *still_running(self.marker)]


def seen_over(world: mpi_server.World) -> ServerError:
    """How the world ended."""
    assert eventually(lambda: world.process.poll() is not None)
    return world.died()
