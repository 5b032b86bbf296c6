"""Servers that are kept in a workspace, as their files say: which there are, how each stands, and where it is reached.

    WORKSPACE/serve/NAME/
      server.json       what was asked, and how it stands; written by `start`, then by the keeper alone
      job.json          the launch stage, as its program reads it
      service.json      endpoints of the server; there while it is ready
      gateway-config.json, gateway.json    the OpenAI endpoint in front of it: what it is told, and where it listens
      log               of the launch stage;  server.log: of the server;  gateway.log: of the endpoint
      lock              a flock that the keeper and all below it hold while they live

A keeper is recognised by its process id, start time and boot, so neither a reused id nor a restarted machine is taken for
it. What it has said last stands in server.json; what has become of it since is found here, by looking.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.client.service import Service
from trtllm_pipeline.errors import ServerError
from trtllm_pipeline.files.writing import read_object
from trtllm_pipeline.processes.process import running_since
from trtllm_pipeline.stages.base import SERVICE_FILE
from trtllm_pipeline.store import claims

SCHEMA: Final = 1
FOLDER: Final = "serve"
SERVER_FILE: Final = "server.json"
GATEWAY_FILE: Final = "gateway.json"
LOCK: Final = "lock"


class State(str, Enum):
    """How a kept server stands."""

    STARTING = "starting"
    """Its processes are being started, or it loads its models."""
    READY = "ready"
    """It answers."""
    RESTARTING = "restarting"
    """It has died and will be started again; `reason` says why it died."""
    STOPPING = "stopping"
    """It was told to end, or its keeper is gone and what it left is being ended."""
    STOPPED = "stopped"
    """It was stopped, or ended with the machine; `reason` says which."""
    FAILED = "failed"
    """It did not start, or has died and is not started again; `reason` says why."""

    @property
    def alive(self) -> bool:
        """Whether processes of it may be there."""
        return self not in {State.STOPPED, State.FAILED}


@dataclass(frozen=True, slots=True)
class Keeper:
    """A process that keeps a server, told from any other by start time and boot."""

    pid: int
    start_time: int
    """Clock ticks since boot."""
    boot_id: str

    @classmethod
    def here(cls) -> Keeper:
        """This process."""
        pid = os.getpid()
        return cls(pid, running_since(pid) or 0, boot_id())

    def lives(self) -> bool:
        """Whether it is the process that has its id now."""
        return self.boot_id == boot_id() and running_since(self.pid) == self.start_time


def boot_id() -> str:
    """What the kernel calls the time since it was started; "" where it does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server that is ready is reached."""

    service: Service
    """Of the server itself."""
    openai: str | None
    """Base URL of an OpenAI endpoint, such as http://127.0.0.1:8000/v1: the gateway, or the server itself."""
    model: str
    """What OpenAI clients call the model."""
    model_folder: Path | None
    """Folder with tokenizer and chat template."""


@dataclass(frozen=True, slots=True)
class HostedServer:
    """One kept server, as it stood when it was looked at."""

    folder: Path
    state: State
    reason: str | None
    """Why it ended, or is not ready."""
    data: Mapping[str, Any]
    """server.json."""
    keeper: Keeper | None

    @property
    def name(self) -> str:
        """Its name in the workspace."""
        return self.folder.name

    @property
    def cell(self) -> str | None:
        """The cell that it serves; None for a folder."""
        return self.data.get("cell")

    def endpoint(self) -> Endpoint | None:
        """Where it is reached; None unless it is ready."""
        if self.state is not State.READY:
            return None
        try:
            service = Service.read(self.folder / SERVICE_FILE)
        except ServerError:
            return None  # it has ended just now
        gateway = read_object(self.folder / GATEWAY_FILE) or {}
        openai = f"{gateway['url'].rstrip('/')}/v1" if isinstance(gateway.get("url"), str) else None
        if openai is None and service.kind == "openai":
            openai = f"{service.http}/v1"
        folder = self.data.get("model_folder")
        model = self.data.get("model") if gateway else service.model
        return Endpoint(service, openai, str(model), None if folder is None else Path(folder))


def folder_of(workspace: Path, name: str) -> Path:
    """The folder of the kept server `name`."""
    return workspace / FOLDER / name


def find(workspace: Path) -> list[HostedServer]:
    """All kept servers of a workspace, by name. Damaged ones are among them, as failed."""
    try:
        names = sorted(each.name for each in (workspace / FOLDER).iterdir() if (each / SERVER_FILE).exists())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [look(folder_of(workspace, name)) for name in names]


def look(folder: Path) -> HostedServer:
    """How the kept server in `folder` stands now."""
    data = read_object(folder / SERVER_FILE)
    if data is None or data.get("schema") != SCHEMA:
        why = "server.json is damaged" if data is None else f"server.json has schema {data.get('schema')}"
        return HostedServer(folder, State.STOPPING if _held(folder) else State.FAILED, why, data or {}, None)
    try:
        told, reason = State(data["state"]), data.get("reason")
        keeper = Keeper(**data["keeper"]) if data.get("keeper") else None
    except (ValueError, KeyError, TypeError) as error:
        return HostedServer(folder, State.FAILED, f"server.json is damaged: {error}", data, None)
    if not told.alive or (keeper is not None and keeper.lives()):
        return HostedServer(folder, told, reason, data, keeper)
    state, reason = _ended(told, reason, keeper, held=_held(folder), boot=boot_id())
    return HostedServer(folder, state, reason, data, keeper)


def _held(folder: Path) -> bool:
    try:
        return claims.is_held(folder / LOCK)
    except OSError:
        return False


def _ended(
    told: State, reason: str | None, keeper: Keeper | None, *, held: bool, boot: str
) -> tuple[State, str | None]:
    """How a server stands whose keeper is gone but had not said that it ends."""
    if keeper is None:  # `start` is between writing server.json and starting the keeper, or was killed there
        return (State.STARTING, reason) if held else (State.FAILED, "it was interrupted before it was started")
    if keeper.boot_id != boot:
        return State.STOPPED, "the machine was restarted"
    if held:
        return State.STOPPING, f"its keeper (process {keeper.pid}) was killed; its processes are being ended"
    if told is State.STOPPING:
        return State.STOPPED, reason
    return State.FAILED, f"its keeper (process {keeper.pid}) was killed"
