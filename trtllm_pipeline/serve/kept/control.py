"""Starts, stops and restarts managed servers, from a command that ends before they do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import (
    Scope,
    ServerError,
    StageRunId,
    StateError,
    UsageError,
    disk,
    guardian,
    read_object,
    without_secrets,
)
from trtllm_pipeline.orchestrate import LOG, GatewayParams, Job, Store, claims, read_job
from trtllm_pipeline.serve.gateway import require_packages
from trtllm_pipeline.serve.gateway.gateway_config import AUTO, GATEWAY_FILE, GatewayConfig, OfferedModel
from trtllm_pipeline.serve.gateway.keys import read_keys
from trtllm_pipeline.serve.kept import servers, signed
from trtllm_pipeline.serve.kept.prometheus_setup import write_targets
from trtllm_pipeline.serve.kept.serve_target import ServeTarget, require_text, write_repository
from trtllm_pipeline.serve.kept.servers import Keeper, KeptOptions, KeptRecord, KeptServer, State
from trtllm_pipeline.tensorrt import FAILURE_FILE, JOB, OUT, SERVICE_FILE, triton_server
from trtllm_pipeline.tensorrt import params as stage_params

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HANDED_ON: Final = -1
"""Replaces the file descriptor of a lock that a keeper has taken over."""
_POLL_S: Final = 0.1
_STOP_S: Final = 30.0
"""Time that a stop may take beyond the server's own timeouts. Then its keeper is killed."""
_KILLED_S: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class Wish(KeptOptions):
    """The options of a managed server."""

    name: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the launch stage from the command line."""
    host: str = "127.0.0.1"
    """Host for clients, of the gateway if there is one, otherwise of the server."""
    port: int = 0
    """Options of the gateway."""
    model: str | None = None
    dialect: str = AUTO
    api_keys_file: Path | None = None
    limits: GatewayParams = field(default_factory=GatewayParams)


def check_name(name: str) -> str:
    """`name`, if it is a valid server name. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid server name",
            hint="up to 64 ASCII letters, digits and . _ -, starting with a letter or digit",
        )
    return name


def find(workspace: Path, name: str) -> KeptServer:
    """The managed server called `name`. Raises UsageError."""
    known = servers.find(workspace)
    for server in known:
        if server.name == name:
            return server
    names = ", ".join(server.name for server in known)
    raise UsageError(
        f"{workspace} does not have a server {name!r}",
        hint=f"the servers are {names}" if names else "pipeline serve start CELL starts one",
    )


def start(target: ServeTarget, wish: Wish, workspace: Path) -> KeptServer:
    """Start a server and its keeper; does not wait until it is ready.

    Raises UsageError for a name that is invalid or in use, for a gateway without its packages or with invalid keys, or
    for a gateway before a server that accepts images; MatrixError for keys that cannot be read; StateError if the
    workspace cannot be written, or `store prune` has removed its inputs or removes them now; StageError if its
    repository cannot be written.
    """
    if wish.gateway:
        require_packages()
        require_text(target.inputs)
        if wish.api_keys_file is not None:
            read_keys(wish.api_keys_file)  # the gateway would only find a fault after the server has started
    name = check_name(wish.name or target.name)
    folder = servers.folder_of(workspace, name)
    try:
        lock = _own(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if lock is None:
        raise UsageError(
            f"server {name} already exists: {servers.look(folder).state.value}",
            hint=f"pipeline serve restart {name} or stop {name}; --name sets another name for the new one",
        )
    fresh = not (folder / servers.SERVER_FILE).exists()
    try:
        os.truncate(lock.fd, 0)
        _record(target, wish, _ports_before(folder)).write(folder)  # first, so that others see it starting
        # And for `store prune`, which keeps the directories named in a record. A prune already in progress has not seen
        # it.
        with nullcontext() if target.cell is None else Store(workspace).in_use():
            _check_inputs_exist(name, map(str, target.inputs.values()), shlex.join(wish.command))
        triton_server.remove_stale_leftovers()
        for each in (SERVICE_FILE, GATEWAY_FILE, servers.GATEWAY_CONFIG, FAILURE_FILE, servers.STOP):
            (folder / each).unlink(missing_ok=True)
        shutil.rmtree(folder / OUT, ignore_errors=True)
        (folder / OUT).mkdir()
        repository = folder / "repository"
        shutil.rmtree(repository, ignore_errors=True)
        if "repository" not in target.inputs:
            repository.mkdir()
        _job(target, wish, write_repository(target, repository), folder).write(folder / JOB)
        if wish.gateway:
            _gateway(target, wish, folder).write(folder / servers.GATEWAY_CONFIG)
        _spawn(folder, lock)
        return servers.look(folder)
    except BaseException as error:
        if lock.fd == _HANDED_ON:
            stop(servers.look(folder))
            raise
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()
        if isinstance(error, OSError):
            raise _unwritable(folder, error) from error
        raise


def _own(folder: Path) -> claims.Claim | None:
    """The lock of a server that may not exist yet. None if it is running. Raises OSError."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # an ended server of this name was just removed
            return servers.take(folder)


def _unwritable(folder: Path, error: OSError) -> StateError:
    return StateError(
        f"{folder} cannot be written: {disk.no_room(error, folder) or error.strerror or error}",
        hint="pipeline serve start --workspace DIR uses another workspace",
    )


def _record(target: ServeTarget, wish: Wish, ports: Mapping[str, int]) -> KeptRecord:
    now = time.time()
    entries = {
        name: wish.params.get(f"{name}_port", getattr(target.params, f"{name}_port", 0))
        for name in ("http", "grpc", "metrics")
    }
    return KeptRecord(
        toolchain=target.toolchain,
        cell=target.cell,
        served_folder=None if target.folder is None else str(target.folder),
        fingerprints={stage: artifact.fingerprint for stage, artifact in target.artifacts.items()},
        model=wish.model or target.model,
        model_folder=None if target.model_folder is None else str(target.model_folder),
        served_from=tuple(map(str, target.folders)),
        gpus_needed=target.gpus,
        since_s=now,
        started_s=now,
        asked_ports={name: port for name, port in {**entries, "openai": wish.port}.items() if port},
        ports=ports,
        **{each.name: getattr(wish, each.name) for each in fields(KeptOptions)},
    )


def _ports_before(folder: Path) -> Mapping[str, int]:
    """The previous ports of a server of this name, which clients know."""
    try:
        return servers.read_record(folder).ports
    except (ValueError, KeyError, TypeError):
        return {}


def _job(target: ServeTarget, wish: Wish, repository: Path, folder: Path) -> Job:
    """The launch stage: on loopback behind a gateway, otherwise on the clients' host. Its keeper restarts it.

    The keeper writes its command and directories: the workspace may be moved before the next start.
    """
    host = "127.0.0.1" if wish.gateway else wish.host
    params = replace(target.params, **{**wish.params, "host": host, "restarts": 0})
    wanted = [name for name in target.launch.inputs if name in target.inputs or name not in target.launch.optional]
    inputs = {name: target.inputs.get(name, repository) for name in wanted}
    return Job(
        id=StageRunId(f"serve-{folder.name}"),
        stage=target.launch.name,
        toolchain=target.toolchain,
        fingerprint="",
        scope=Scope.SERVICE,
        commands=(),
        environment={"PYTHONUNBUFFERED": "1"},
        program=target.launch.program,
        params_class=stage_params.class_name(params),
        params=stage_params.to_json(params),
        inputs={name: str(path) for name, path in inputs.items()},
        files={},
        out="",
        attempt="",
        timeout_s=target.launch.timeout_s,
        section="serve",
    )


def _gateway(target: ServeTarget, wish: Wish, folder: Path) -> GatewayConfig:
    model = OfferedModel(
        name=wish.model or target.model,
        service=folder / SERVICE_FILE,
        model_folder=target.model_folder,
        dialect=wish.dialect,
        max_seq_len=target.max_seq_len,
        max_input_len=target.max_input_len,
        adapters=target.adapters,
    )
    return GatewayConfig(
        models=(model,), host=wish.host, port=wish.port, api_keys_file=wish.api_keys_file, params=wish.limits
    )


def _spawn(folder: Path, lock: claims.Claim) -> None:
    """Start the keeper in a new session. It takes over the lock and outlives this terminal. Interrupts wait."""
    with _uninterrupted(), (folder / LOG).open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "trtllm_pipeline.serve.kept.keeper", str(folder), str(lock.fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(lock.fd,),
            start_new_session=True,
            cwd=folder,
            env=without_secrets(os.environ),
        )
        servers.identify(lock.fd, Keeper.of(keeper.pid))  # so that it can be stopped before it has written this itself
        os.close(lock.fd)  # not released: the keeper owns it now
        lock.fd = _HANDED_ON


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block, not within it. Only the main thread is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def wait_ready(server: KeptServer) -> KeptServer:
    """The server, once it is ready. Raises ServerError if it fails."""
    while True:
        server = servers.look(server.folder)
        if server.state is State.READY:
            return server
        if not server.state.alive:
            hint = None if server.record is None else server.record.hint
            raise ServerError(f"server {server.name}: {server.reason}", hint=hint, log=server.folder / LOG)
        time.sleep(_POLL_S)


def stop(server: KeptServer) -> KeptServer:
    """End a server, or the remains of a killed one, and wait for it. Returns its final state. Raises StateError if its keeper stays."""
    folder = server.folder
    patience_s = _STOP_S + sum(_stop_timeout_s(folder / name) for name in (JOB, servers.GATEWAY_CONFIG))
    try:
        _end(server, patience_s)
        server = _recorded(servers.look(folder))
    finally:
        (folder / servers.STOP).unlink(missing_ok=True)
    triton_server.remove_stale_leftovers()
    for each in (SERVICE_FILE, GATEWAY_FILE):
        (folder / each).unlink(missing_ok=True)
    shutil.rmtree(folder / "links", ignore_errors=True)
    with suppress(OSError):
        write_targets(folder.parent.parent)
    return server


def _stop_timeout_s(file: Path) -> float:
    """The graceful shutdown timeout in a file with parameters. 0 if it has none."""
    data = ((read_object(file) or {}).get("params") or {}).get("stop_timeout_s")
    return data if isinstance(data, (int, float)) else 0.0


def _end(server: KeptServer, patience_s: float) -> None:
    """End all processes of a server, also those that another command starts meanwhile. Raises StateError."""
    folder, signaled, forced = server.folder, set[tuple[Keeper, signal.Signals]](), False
    deadline = time.monotonic() + patience_s
    _mark(folder)
    while True:
        server = servers.look(folder)
        if not server.state.alive and not servers.is_held(folder):
            return
        late, keeper = time.monotonic() > deadline, server.keeper
        if keeper is not None and (keeper, signal.SIGTERM) not in signaled:
            _mark(folder)
            _tell(keeper, signal.SIGTERM, server)
            signaled.add((keeper, signal.SIGTERM))
            deadline = time.monotonic() + patience_s
        elif late and keeper is not None and (keeper, signal.SIGKILL) not in signaled:
            _tell(keeper, signal.SIGKILL, server)  # its guardian ends the rest
            signaled.add((keeper, signal.SIGKILL))
            deadline += _KILLED_S
        elif late and not forced:
            forced = True
            deadline += _KILLED_S
            _kill_all(folder)
        elif late:
            raise StateError(
                f"server {server.name} does not end: a process still holds {folder / servers.LOCK}",
                hint=f"fuser {shlex.quote(str(folder / servers.LOCK))} shows which",
            )
        time.sleep(_POLL_S)


def _mark(folder: Path) -> None:
    """Record that a server is being stopped, in case its keeper cannot yet or can no longer."""
    with suppress(OSError):
        (folder / servers.STOP).touch()


def _kill_all(folder: Path) -> None:
    """Kill all processes that hold the lock of a server, and all of their descendants."""
    holders = servers.holders(folder)
    time.sleep(_POLL_S)
    holders &= servers.holders(folder)  # a process that only checks the lock has closed it again
    for pid in guardian.with_descendants(holders, guardian.process_table()) - {os.getpid()}:
        guardian.kill(pid, signal.SIGKILL)


def _recorded(server: KeptServer) -> KeptServer:
    """A stopped server whose keeper could not record it: it was signaled too early, or killed."""
    record = server.record
    if record is not None and record.state.alive and (lock := servers.take(server.folder)):
        with lock, suppress(OSError):  # a full disk does not prevent a stop
            servers.changed(record, State.STOPPED, servers.STOPPED_REASON, None, time.time()).write(server.folder)
    return servers.look(server.folder)


def _tell(keeper: Keeper, signo: int, server: KeptServer) -> None:
    try:
        os.kill(keeper.pid, signo)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise StateError(
            f"server {server.name} belongs to another user; its keeper is process {keeper.pid}",
            hint="stop it as that user",
        ) from error


def restart(server: KeptServer, *, require_signed: bool = False, trusted_keys: Path | None = None) -> KeptServer:
    """Start a server with its recorded options, after stopping it if it runs. Does not wait until it is ready.

    Its inputs are checked as at its first start, by the same policy or a stricter one. If it cannot be started, the old
    one keeps running. Raises UsageError, StateError.
    """
    if server.record is None and server.state.alive:
        server = stop(server)  # its keeper rewrites the record
    record = _startable(server)
    keys = record.trusted_keys if trusted_keys is None else str(trusted_keys.absolute())
    record = replace(record, require_signed=require_signed or record.require_signed, trusted_keys=keys)
    signed.check(record)
    if server.state.alive:
        server = stop(server)
    folder = server.folder
    try:
        lock = servers.take(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if lock is None:
        raise UsageError(f"server {server.name} is {servers.look(folder).state.value}", hint="pipeline serve ps")
    try:
        (folder / servers.STOP).unlink(missing_ok=True)
        os.truncate(lock.fd, 0)
        replace(record, state=State.STARTING, reason=None, keeper=None).write(folder)
        _spawn(folder, lock)
    except OSError as error:
        lock.release()
        raise _unwritable(folder, error) from error
    return servers.look(folder)


def _startable(server: KeptServer) -> KeptRecord:
    """The options of a server whose inputs still exist. Raises StateError, UsageError."""
    if server.record is None:
        raise StateError(
            f"server {server.name}: {server.reason}",
            hint=f"pipeline serve stop {server.name} --remove, then start it again",
        )
    if server.record.gateway:
        require_packages()
        if (keys := servers.api_keys_file(server.folder)) is not None:
            read_keys(keys)
    _check_inputs_exist(server.name, read_job(server.folder / JOB).inputs.values(), shlex.join(server.record.command))
    return server.record


def _check_inputs_exist(name: str, inputs: Iterable[str], command: str) -> None:
    """Raises StateError if one of a server's input directories is gone."""
    if gone := [path for path in inputs if path.startswith("/") and not os.path.exists(path)]:
        raise StateError(
            f"server {name}: {gone[0]} is missing: removed, or the workspace was moved",
            hint=f"start it again: {command or 'pipeline serve start CELL'}",
        )


def remove(server: KeptServer) -> None:
    """Remove an ended server: its directory with all logs. Raises UsageError for one that is being started."""
    folder, parent = server.folder, server.folder.parent
    try:
        lock = servers.take(folder)
    except FileNotFoundError:
        return  # another command has removed it
    if lock is None:
        raise UsageError(f"server {server.name} is being restarted, and was not removed", hint="pipeline serve ps")
    removed = parent / f".{server.name}-{os.getpid()}"  # so that a partly removed one is never visible under its name
    try:
        with lock:
            folder.rename(removed)
            shutil.rmtree(removed)
    except OSError as error:
        raise StateError(f"{folder} cannot be removed: {error.strerror or error}") from error
    with suppress(OSError):
        write_targets(parent.parent)
    with suppress(OSError):
        parent.rmdir()  # if it was the last
