"""A server that speaks S3, on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.waiting import eventually
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports

S3 = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except OSError:
        return False
    return True


@contextmanager
def server(*words: str, port: int, folder: Path) -> Iterator[str]:
    process = subprocess.Popen(
        (sys.executable, "-m", *words),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | S3,
    )
    try:
        assert eventually(lambda: process.poll() is not None or listens(port))
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """One with the bucket "engines"; gives the variables by which clients find it."""
    port = unused_ports(1)[0]
    with server("moto.server", "-H", "127.0.0.1", "-p", str(port), port=port, folder=folder) as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/engines", method="PUT"), timeout=60).close()
        yield {**S3, "AWS_ENDPOINT_URL": url}
