"""The managed servers of a workspace, by their files: their names, states and addresses.

    WORKSPACE/serve/NAME/
      server.json       options and state; written by `start`, then only by the keeper
      job.json          the launch stage, input of its program
      service.json      endpoints of the server; exists while it is ready
      gateway-config.json, gateway.json    its OpenAI endpoint: configuration and address
      log               of the keeper and the launch stage; server.log: of the server; gateway.log: of the endpoint
      lock              a flock that the keeper and its descendants hold while they live; contains the keeper's identity,
                        and its last state if server.json could not be written
      stop              exists while a command stops it

A keeper is identified by its process id, start time and boot, so a reused id or a reboot cannot be mistaken for it.
server.json has its last record. This module determines the current state.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import ServerError, read_object, running_since, write_json
from trtllm_pipeline.measure import Service
from trtllm_pipeline.orchestrate import claims
from trtllm_pipeline.serve.gateway.gateway_config import CONFIG_FILE, GATEWAY_FILE
from trtllm_pipeline.tensorrt import SERVICE_FILE, command_lines

SCHEMA: Final = 1
FOLDER: Final = claims.SERVERS
SERVER_FILE: Final = "server.json"
GATEWAY_CONFIG: Final = CONFIG_FILE
GATEWAY_LOG: Final = "gateway.log"
LOCK: Final = claims.LOCK
STOP: Final = "stop"
TRTLLM_SERVE: Final = "trtllm-serve"
_TRTLLM_SERVE_PATH: Final = "/prometheus/metrics"
"""Its /metrics are JSON. Source: TensorRT-LLM, tensorrt_llm/serve/openai_server.py."""
_LATEST_S: Final = 1e11
"""Year 5138."""
_IDENTITY_BYTES: Final = 4096
_MOST_REASON_BYTES: Final = 600
"""Fits even with every character escaped."""
_POLL_S: Final = 0.1
_LAST_S: Final = 5.0
STOPPED_REASON: Final = "it was stopped"
UNRESPONSIVE_S: Final = 60.0


class State(str, Enum):
    """State of a managed server."""

    STARTING = "starting"
    """Its processes are being started, or it is loading its models."""
    READY = "ready"
    """It responds."""
    UNRESPONSIVE = "unresponsive"
    """Its processes live, but it does not respond. `reason` gives the start time."""
    RESTARTING = "restarting"
    """It died and is being started again. `reason` says why it died."""
    STOPPING = "stopping"
    """It was stopped, or its keeper is gone and its processes are being ended."""
    STOPPED = "stopped"
    """It was stopped, or ended with the machine. `reason` says which."""
    FAILED = "failed"
    """It did not start, or died and is not started again. `reason` says why."""

    @property
    def alive(self) -> bool:
        """True if it may have processes."""
        return self not in {State.STOPPED, State.FAILED}


@dataclass(frozen=True, slots=True)
class Keeper:
    """The process that manages a server, identified by start time and boot."""

    pid: int
    start_time: int
    """Clock ticks since boot."""
    boot_id: str

    @classmethod
    def here(cls) -> Keeper:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Keeper:
        return cls(pid, running_since(pid) or 0, boot_id())

    def lives(self) -> bool:
        return self.boot_id == boot_id() and running_since(self.pid) == self.start_time


def boot_id() -> str:
    """The kernel's id of this boot. Empty if it is unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptOptions:
    """The options of a server, which a restart keeps."""

    gateway: bool = False
    restart: bool = False
    """True if it is restarted when it dies, or does not respond for `unresponsive_timeout_s`."""
    unresponsive_timeout_s: float = UNRESPONSIVE_S
    require_signed: bool = False
    """True if its inputs must be signed by a trusted key, also at a restart."""
    trusted_keys: str | None = None
    """Directory of those keys."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRecord(KeptOptions):
    """The content of server.json: the options, the target, and the last state recorded by its keeper."""

    toolchain: str
    cell: str | None = None
    """Id of the cell that is served; None for a directory."""
    served_folder: str | None = None
    """The engine or repository directory that is served; None for a cell."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Stage -> fingerprint of the artifact that it is served from."""
    model: str
    """Model name for OpenAI clients."""
    model_folder: str | None = None
    """Directory with tokenizer and chat template."""
    served_from: tuple[str, ...] = ()
    """The directories that it is served from. Their signed statements are checked."""
    gpus_needed: int = 0
    state: State = State.STARTING
    reason: str | None = None
    hint: str | None = None
    since_s: float
    """Unix time at which it entered this state."""
    started_s: float
    """Unix time of its start."""
    restarts: int = 0
    keeper: Keeper | None = None
    gpus: tuple[str, ...] = ()
    """Its GPUs, in the format of CUDA_VISIBLE_DEVICES."""
    asked_ports: Mapping[str, int] = field(default_factory=dict)
    """Requested ports, by http, grpc, metrics and openai. Others may change."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Current or last ports, by http, grpc, metrics and openai."""

    def write(self, folder: Path) -> None:
        write_json(folder / SERVER_FILE, {"schema": SCHEMA, **asdict(self), "state": self.state.value})

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> KeptRecord:
        """The record that `write` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, this release reads {SCHEMA}")
        known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
        keeper = known.get("keeper")
        numbers = {name: float(known[name]) for name in ("since_s", "started_s")}
        limit_s = float(known.get("unresponsive_timeout_s", UNRESPONSIVE_S))
        if not all(0 <= number < _LATEST_S for number in numbers.values()):
            raise ValueError("an impossible time")
        lists = {name: tuple(known.get(name) or ()) for name in ("command", "gpus", "served_from")}
        maps = {name: dict(known.get(name) or {}) for name in ("fingerprints", "asked_ports", "ports")}
        keepers = None if keeper is None else Keeper(**keeper)
        typed = {"keeper": keepers, "state": State(known["state"]), "unresponsive_timeout_s": limit_s}
        return cls(**{**known, **numbers, **lists, **maps, **typed})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a ready server."""

    service: Service
    openai: str | None
    """Base URL of an OpenAI endpoint, such as http://127.0.0.1:8000/v1: the gateway, or the server itself."""
    models: tuple[str, ...]
    """Model names for OpenAI clients: the model, then the model with each of its adapters."""
    model_folder: Path | None
    """Directory with tokenizer and chat template."""
    metrics: tuple[str, ...]
    """URLs of Prometheus metrics: the gateway's, then the server's."""

    @property
    def model(self) -> str:
        return self.models[0]


@dataclass(frozen=True, slots=True)
class KeptServer:
    """A snapshot of one managed server."""

    folder: Path
    state: State
    reason: str | None
    """Why it ended, or is not ready."""
    record: KeptRecord | None
    """None if server.json is damaged."""
    keeper: Keeper | None
    """The process that manages it, while it lives."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def cell(self) -> str | None:
        """The cell that it serves; None for a directory."""
        return None if self.record is None else self.record.cell

    def endpoint(self) -> Endpoint | None:
        """Its address. None unless it is ready."""
        if self.state is not State.READY or self.record is None:
            return None
        try:
            service = Service.read(self.folder / SERVICE_FILE)
        except ServerError:
            return None  # it has just ended
        base = gateway_url(self.folder) or (service.http if service.kind == "openai" else None)
        offered = (read_object(self.folder / GATEWAY_FILE) or {}).get("models") if self.record.gateway else None
        folder = self.record.model_folder
        return Endpoint(
            service,
            None if base is None else f"{base}/v1",
            tuple(offered or [self.record.model if self.record.gateway else service.model]),
            None if folder is None else Path(folder),
            tuple(metrics_urls(self.folder).values()),
        )


def metrics_urls(folder: Path) -> dict[str, str]:
    """Current URLs of metrics by part, `gateway` before the server itself."""
    gateway = gateway_url(folder)
    urls = {} if gateway is None else {"gateway": f"{gateway}/metrics"}
    try:
        service = Service.read(folder / SERVICE_FILE)
    except ServerError:
        return urls
    if service.metrics is not None:
        urls["triton"] = f"http://{service.metrics}/metrics"
    elif service.kind == "openai":
        urls[TRTLLM_SERVE] = f"{service.http.rstrip('/')}{_TRTLLM_SERVE_PATH}"
    return urls


def gateway_url(folder: Path) -> str | None:
    """URL of a server's gateway from this machine, even if it listens on all addresses."""
    url = (read_object(folder / GATEWAY_FILE) or {}).get("url")
    if not isinstance(url, str):
        return None
    return (
        url.rstrip("/")
        .replace("//0.0.0.0:", f"//{command_lines.LOOPBACK}:")
        .replace("//[::]:", f"//{command_lines.LOOPBACK}:")
    )


def api_keys_file(folder: Path) -> Path | None:
    """The file of a gateway's API keys. None if it needs none."""
    path = (read_object(folder / GATEWAY_CONFIG) or {}).get("api_keys_file")
    return Path(path) if isinstance(path, str) else None


def folder_of(workspace: Path, name: str) -> Path:
    return workspace.absolute() / FOLDER / name


def find(workspace: Path) -> list[KeptServer]:
    """All managed servers of a workspace, by name. Damaged ones count as failed. Those being removed are left out."""
    try:
        names = sorted(
            each.name
            for each in (workspace / FOLDER).iterdir()
            if not each.name.startswith(".") and (each / SERVER_FILE).exists()
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    servers = [look(folder_of(workspace, name)) for name in names]
    return [server for server in servers if server.record is not None or (server.folder / SERVER_FILE).exists()]


def look(folder: Path) -> KeptServer:
    """The current state of the managed server in `folder`. Read-only."""
    data = read_object(folder / SERVER_FILE) or {}
    while True:
        server = _look_at(folder, data)
        before, data = data, read_object(folder / SERVER_FILE) or {}
        if data == before:  # the observations belong to one version of server.json
            return server


def _look_at(folder: Path, data: Mapping[str, Any]) -> KeptServer:
    held, stopping = is_held(folder), (folder / STOP).exists()
    named, last = _log_of(folder / LOCK)
    named = named if held else None
    living = named if named is not None and named.lives() else None
    try:
        record = KeptRecord.of(data)
        living = living or (record.keeper if record.keeper is not None and record.keeper.lives() else None)
    except (ValueError, KeyError, TypeError) as error:
        why = f"server.json is damaged: {type(error).__name__}: {error}" if data else "server.json is damaged"
        state = State.FAILED if not held else State.STOPPING if living is None else State.READY
        return KeptServer(folder, state, why, None, living)
    if stopping:
        last = State.STOPPED, STOPPED_REASON
    state, reason = standing(record, held=held, lives=living is not None, boot=boot_id(), last=last)
    return KeptServer(folder, state, reason, record, living)


def standing(
    record: KeptRecord, *, held: bool, lives: bool, boot: str, last: tuple[State, str] | None = None
) -> tuple[State, str | None]:
    """The state of a server and its reason, from its keeper's last record and current observations.

    `held`: one of its processes holds the lock. `lives`: its keeper is alive. `boot`: the current boot. `last`:
    information about its end outside server.json, a stop request or the keeper's entry in the lock.
    """
    keeper, reason = record.keeper, record.reason
    if lives:
        return record.state, reason
    if held and keeper is None:
        return State.STARTING, reason  # `start` is about to start the keeper
    if not record.state.alive:  # even if a command that starts or removes it has the lock
        return record.state, reason
    if held:
        return State.STOPPING, "its keeper was killed; its processes are being ended"
    if last is not None:
        return last
    if keeper is None:
        return State.FAILED, "it was interrupted before it was started"
    if keeper.boot_id != boot:
        return State.STOPPED, "the machine was rebooted"
    if record.state is State.STOPPING:
        return State.STOPPED, reason
    return State.FAILED, f"its keeper (process {keeper.pid}) was killed"


def read_record(folder: Path) -> KeptRecord:
    """The record in server.json. Raises ValueError, KeyError or TypeError if it is damaged."""
    return KeptRecord.of(read_object(folder / SERVER_FILE) or {})


def changed(record: KeptRecord, state: State, reason: str | None, hint: str | None, now_s: float) -> KeptRecord:
    """`record` with another state. Its time only changes with the state."""
    since_s = record.since_s if state is record.state else now_s
    return replace(record, state=state, reason=reason, hint=hint, since_s=since_s)


def identify(lock_fd: int, keeper: Keeper, last: tuple[State, str] | None = None) -> None:
    """Write the owner into a held lock, and its final state. It overwrites reserved space: the disk may be full."""
    record = {}
    if last is not None:
        reason = last[1].encode(errors="replace")[:_MOST_REASON_BYTES].decode(errors="ignore")
        record = {"state": last[0].value, "reason": reason}
    text = json.dumps({**asdict(keeper), **record}).encode()
    os.pwrite(lock_fd, text.ljust(_IDENTITY_BYTES), 0)  # in one write, over the previous text


def _log_of(lock: Path) -> tuple[Keeper | None, tuple[State, str] | None]:
    """The keeper named in its lock, and its final state."""
    try:
        data = read_object(lock) or {}
        last = (State(data.pop("state")), str(data.pop("reason"))) if "state" in data else None
        return Keeper(**data), last
    except (TypeError, ValueError, KeyError):
        return None, None


def take(folder: Path) -> claims.Claim | None:
    """The lock of the server in `folder`. None while it is running or being started. Raises OSError.

    Waits for a keeper that has recorded its final state, for the remains of a killed one, and for a command that
    records an end.
    """
    deadline = time.monotonic() + _LAST_S
    while True:
        lock = claims.take(folder / LOCK, remove=False)
        if lock is not None or time.monotonic() > deadline:
            return lock
        server = look(folder)
        if server.state is State.STARTING or (server.state.alive and server.keeper is not None):
            return None
        time.sleep(_POLL_S)


def is_held(folder: Path) -> bool:
    try:
        return claims.is_held(folder / LOCK)
    except OSError:
        return False


def holders(folder: Path) -> set[int]:
    """The other processes, as far as this user sees them, that have the lock of the server in `folder` open."""
    lock = str(folder / LOCK)
    keepers = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            fds = os.listdir(f"/proc/{pid}/fd")
            if pid != os.getpid() and any(_is_file(f"/proc/{pid}/fd/{fd}", lock) for fd in fds):
                keepers.add(pid)
    return keepers


def _is_file(link: str, path: str) -> bool:
    with suppress(OSError):
        return os.readlink(link).endswith(f"/{LOCK}") and os.path.samefile(link, path)  # noqa: PTH115, PTH121
    return False
