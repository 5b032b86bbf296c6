"""Bundles that `pipeline export` wrote: started as their users start them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.launched import responds
from tests.helpers.waiting import eventually
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports


@contextmanager
def started(folder: Path, environment: dict[str, str]) -> Iterator[int]:
    """A bundle's `start` on free ports, ready; ended in order afterwards. Gives the port of HTTP."""
    ports = unused_ports(3)
    names = ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")
    (folder.parent / "ports.json").write_text(json.dumps(dict(zip(names, ports, strict=True))))
    with (folder.parent / "start.log").open("w") as log:
        process = subprocess.Popen(
            [str(folder / "start")],
            cwd=folder,
            env={**environment, **{name: str(port) for name, port in zip(names, ports, strict=True)}},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        health = f"http://127.0.0.1:{ports[0]}/v2/health/ready"
        assert eventually(lambda: process.poll() is not None or responds(health))
        assert process.poll() is None, (folder.parent / "start.log").read_text()
        yield ports[0]
        process.terminate()
        assert process.wait(60) == 0, (folder.parent / "start.log").read_text()
    finally:
        process.kill()
        process.wait()
