"""Health checks of a ready program, repeated in a thread because a response may take long."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import ServerError
from trtllm_pipeline.measure import Service, http
from trtllm_pipeline.serve.kept.servers import gateway_url

EVERY_S: Final = 2.0
LIMIT_S: Final = 3.0
MISSED: Final = 2
"""Missed checks in a row after which it counts as unresponsive: a machine may be busy for a moment."""
_PATHS: Final = {"triton": "/v2/health/ready", "openai": "/health"}


def server_health(folder: Path) -> tuple[str, str] | None:
    """Address and path of a managed server's health check. None if service.json lacks them."""
    try:
        service = Service.read(folder / "service.json")
    except ServerError:
        return None
    address = service.http.rstrip("/")
    if "://" not in address and address.count(":") > 1 and "[" not in address:  # IPv6
        host, _, port = address.rpartition(":")
        address = f"[{host}]:{port}"
    return address, _PATHS.get(service.kind, _PATHS["triton"])


def gateway_health(folder: Path) -> tuple[str, str] | None:
    """The same for its gateway: checks the gateway alone."""
    url = gateway_url(folder)
    return None if url is None else (url, "/health/live")


class Health:
    """Health of one program, from when it is ready until `close`."""

    def __init__(self, address: str, path: str, *, every_s: float = EVERY_S) -> None:
        self._address, self._path, self._every_s = address, path, every_s
        self._missed = 0
        self._since_s = 0.0
        self._why = ""
        self._ended = threading.Event()
        threading.Thread(target=self._repeat, daemon=True, name="health").start()

    def unresponsive(self) -> tuple[float, str] | None:
        """Since when (monotonic time) it has not responded, and why. None while it responds."""
        return (self._since_s, self._why) if self._missed >= MISSED else None

    def close(self) -> None:
        """Stop checking; does not wait for a response."""
        self._ended.set()

    def _repeat(self) -> None:
        while not self._ended.wait(self._every_s):
            why = self._ask()
            if why is None:
                self._missed = 0
                continue
            if not self._missed:
                self._since_s = time.monotonic()
            self._why = why
            self._missed += 1  # last, so that readers see the other values

    def _ask(self) -> str | None:
        """The reason for a failed health check. None for a passed one."""
        try:
            status, _ = asyncio.run(http.fetch(self._address, self._path, timeout_s=LIMIT_S))
        except ValueError:
            return None  # an invalid address is not evidence against its server
        except (OSError, http.HttpError) as error:
            return f"GET {self._path}: {error}"
        return None if status == 200 else f"GET {self._path} returned HTTP status {status}"
