"""The programs of the launch stages, which are services: a server of one of these kinds, until it is told to stop.

    starter   one Triton around a model repository
    ranks     a TensorRT-LLM engine, as a world of Tritons under mpirun (`tensorrt/servers/mpi_server.py`)
    llmapi    Triton's `llmapi` model, which starts the workers of its other GPUs itself
    openai    `trtllm-serve`, which does the same, or Triton's own OpenAI front end (`tensorrt/servers/trtllm_serve.py`)
    disaggregated   several `trtllm-serve`, for prompts and for generation, and their router

`service.json` in the attempt directory marks the server as ready. SIGTERM, SIGINT, SIGHUP and the end of the parent
process stop it gracefully. The server is restarted, on the same ports, if one of its Python model processes dies, up to
three times, and if it dies itself, up to `restarts` times. Then it fails with the cause and the tail of the log.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from trtllm_pipeline.base import FailureClass, Machine, ServerError, gpus, triton_installation, write_json
from trtllm_pipeline.models import model_names, referenced_paths
from trtllm_pipeline.tensorrt.diagnosis import out_of_memory
from trtllm_pipeline.tensorrt.servers import disaggregated as disaggregated_servers
from trtllm_pipeline.tensorrt.servers import engine_requirements, mpi_server, triton_server, trtllm_serve
from trtllm_pipeline.tensorrt.servers.command_lines import (
    THREADS_VARIABLE,
    TRTLLM_SERVE,
    OpenAiWays,
    Ports,
    launcher,
    openai_argv,
    reachable,
)
from trtllm_pipeline.tensorrt.servers.disaggregated import Servers
from trtllm_pipeline.tensorrt.servers.pasted import USUAL_PORTS, PastedCommand
from trtllm_pipeline.tensorrt.servers.server_process import Server, quoted
from trtllm_pipeline.tensorrt.stage.base import REPAIR_FILE, SERVICE_FILE, StageContext
from trtllm_pipeline.tensorrt.stage.params import LaunchEmbedded, LaunchParams

LOG_FILE: Final = "server.log"
COMMAND_FILE: Final = "server.sh"
"""Next to it: the command that starts the same server in a shell, at the usual ports."""
STARTS: Final = 3
"""Attempts to find free ports: another program may use one between the test and the server's start."""
REPAIRS: Final = 3
"""Deaths of Python model processes after which the stage fails."""
LOOK_EVERY_S: Final = 0.5


def ports(params: LaunchParams) -> Ports:
    """The requested ports, with free ones for the rest. Raises ServerError for a port or host that cannot be used."""
    host = params.host
    fixed = {name: port for name in Ports._fields if (port := getattr(params, f"{name}_port"))}
    if len(set(fixed.values())) < len(fixed):
        listing = ", ".join(f"{name}_port {port}" for name, port in fixed.items())
        raise ServerError(f"the ports must differ: {listing}", failure=FailureClass.USER)
    try:
        chosen = triton_server.free_ports(host)
        while set(chosen) & set(fixed.values()):
            chosen = triton_server.free_ports(host)
    except OSError as error:
        raise ServerError(
            f"host {host!r} cannot be listened on: {error.strerror or error}",
            failure=FailureClass.USER,
            hint="127.0.0.1 for this machine alone, 0.0.0.0 for every machine that can reach it",
        ) from error
    chosen = chosen._replace(**fixed)
    if busy := sorted(set(triton_server.busy_ports(chosen, host)) & set(fixed.values())):
        raise ServerError(
            f"port {', '.join(map(str, busy))} of {host} is used by another program",
            failure=FailureClass.TRANSIENT,
            hint="choose another, or 0 for a free one",
        )
    return chosen


class Starter(NamedTuple):
    """The ways to start a server: as our child process, or by the user."""

    begin: Callable[[LaunchParams], Server]
    """Starts it and does not wait for it."""
    pasted: Callable[[str, Ports], PastedCommand]
    """The command that starts it in a shell, at an address."""


def run(context: StageContext[LaunchEmbedded]) -> None:
    """Serve `context.inputs["repository"]` until told to stop. Raises ServerError if the server cannot continue."""
    serve(context, starter(context))


def starter(context: StageContext[LaunchEmbedded]) -> Starter:
    """A Triton for `context.inputs["repository"]`. Raises ServerError if it cannot be served."""
    repository = context.inputs["repository"]
    if not (repository / model_names.ENSEMBLE / "config.pbtxt").is_file():
        raise ServerError(
            f"{repository} has no model {model_names.ENSEMBLE}", hint="write it with `pipeline stage repository`"
        )
    referenced_paths.check(repository)
    installed = _triton(repository)
    threads = str(context.params.threads)
    variables = {THREADS_VARIABLE: threads, **({} if threads == "0" else {"OMP_NUM_THREADS": threads})}

    def begin(params: LaunchParams) -> Server:
        return triton_server.start(
            installed,
            repository,
            (model_names.ENSEMBLE, model_names.BLS_MODEL),
            folder=context.attempt / "links",
            log=context.attempt / LOG_FILE,
            ports=ports(params),
            host=params.host,
            variables=variables,
        )

    def pasted(host: str, at: Ports) -> PastedCommand:
        return triton_server.pasted_command(installed, repository, ports=at, host=host, variables=variables)

    return Starter(begin, pasted)


def ranks(context: StageContext[Any], machine: Machine) -> Starter:
    """Tritons for `context.inputs`' repository and its TensorRT-LLM engine, `engine`: one for each rank of the engine.

    Raises ServerError if the engine was not built for `machine`.
    """
    referenced_paths.check(context.inputs["repository"])
    engine = engine_requirements.check(context.inputs["engine"], machine)
    if "drafter" in context.inputs:
        engine_requirements.check(context.inputs["drafter"], machine)
    assert engine.release is not None
    mpirun = launcher(engine.world_size, engine.release, machine.mpirun)
    return _world(context, engine.world_size, mpirun)


def llmapi(context: StageContext[Any]) -> Starter:
    """A Triton for `context.inputs["repository"]`, whose only model is TensorRT-LLM's Python API."""
    referenced_paths.check(context.inputs["repository"])
    return _world(context, 1, None)


def _world(context: StageContext[Any], world_size: int, mpirun: str | None) -> Starter:
    repository, log = context.inputs["repository"], context.attempt / LOG_FILE
    world = (_triton(repository), repository, world_size)
    return Starter(
        lambda asked: mpi_server.start(*world, mpirun=mpirun, log=log, ports=ports(asked), host=asked.host),
        lambda host, at: mpi_server.pasted_command(*world, mpirun=mpirun, ports=at, host=host),
    )


def openai(context: StageContext[Any], command: Sequence[str], ways: OpenAiWays = TRTLLM_SERVE) -> Starter:
    """`command`, an OpenAI server's command line without host and port, for `context.inputs["repository"]`."""
    referenced_paths.check(context.inputs["repository"], command)
    log = context.attempt / LOG_FILE
    return Starter(
        lambda asked: trtllm_serve.start(command, log=log, ports=ports(asked), host=asked.host, ways=ways),
        lambda host, at: PastedCommand(openai_argv(command, host, at, ways)),
    )


def disaggregated(context: StageContext[Any], servers: Servers) -> Starter:
    """Servers that read prompts, servers that generate, and their router, for `context.inputs["repository"]`."""
    referenced_paths.check(context.inputs["repository"], [*servers.context, *servers.generation])
    log, timeout_s = context.attempt / LOG_FILE, context.params.ready_timeout_s
    return Starter(
        lambda asked: disaggregated_servers.start(
            servers, log=log, ports=ports(asked), host=asked.host, timeout_s=timeout_s
        ),
        lambda host, at: disaggregated_servers.pasted_command(servers, ports=at, host=host, timeout_s=timeout_s),
    )


def _triton(repository: Path) -> triton_installation.TritonInstallation:
    """The installed server, in an environment that supports the repository's Python models."""
    installed = triton_installation.find()
    triton_server.check(installed, python_models=sum(1 for _ in repository.glob("*/1/model.py")))
    if missing := triton_server.closing_options(installed)[1]:
        print(  # noqa: T201
            f"warning: {installed.source} has no {', '.join(missing)}: anyone who can reach its ports can make it read and "
            "write files of this user; see docs/security.md",
            file=sys.stderr,
            flush=True,
        )
    return installed


def serve(context: StageContext[Any], starter: Starter) -> None:
    """Supervise a server; see the module's docstring. If it fails, its log's end is copied to ours."""
    mask = os.environ.get(gpus.MASK_VARIABLE)
    command = starter.pasted(context.params.host, USUAL_PORTS).to_shell(
        {} if mask is None else {gpus.MASK_VARIABLE: mask}
    )
    (context.attempt / COMMAND_FILE).write_text(f"{command}\n", encoding="utf-8")
    try:
        _keep(context, starter)
    except ServerError as error:
        if error.log is not None and (end := quoted(error.log)):
            print(end, flush=True)  # noqa: T201
        raise


def _keep(context: StageContext[Any], starter: Starter) -> None:
    settings = context.params
    parent = os.getppid()
    deaths = repairs = 0
    if warning := reachable(settings.host):
        print(f"warning: {warning}", file=sys.stderr, flush=True)  # noqa: T201
    repair = context.attempt / REPAIR_FILE
    with stop_requested() as ended, removed_after(repair), removed_after(context.attempt / SERVICE_FILE):
        while True:
            server = start(starter.begin, settings, ended)
            try:
                if ended.is_set():
                    return
                service = {"schema": 1, "log": LOG_FILE, **server.service()}
                write_json(context.attempt / SERVICE_FILE, service)
                repair.unlink(missing_ok=True)
                where = (f"{name} {service[name]}" for name in Ports._fields if service[name])
                print("ready:", ", ".join(where), flush=True)  # noqa: T201
                dead = watch(server, ended, parent)
                if not dead:
                    return
                repairs += 1
                lines = _repaired(server, dead, repairs)
                with suppress(OSError):  # service.json stays: a stage that reads it waits for the server
                    write_json(repair, {"schema": 1, "reason": lines[0]})
                print(*lines, sep="\n", flush=True)  # noqa: T201
            except ServerError as error:
                deaths += 1
                if server.process.poll() is None or deaths > settings.restarts:
                    raise
                again = f"starting it again ({deaths} of {settings.restarts} times)"
                print(*filter(None, (error, quoted(server.log), again)), sep="\n", flush=True)  # noqa: T201
            finally:
                server.stop(settings.stop_timeout_s)
            # Clients know the ports of the first start.
            settings = replace(settings, **{f"{name}_port": port for name, port in server.ports._asdict().items()})


@contextmanager
def removed_after(path: Path) -> Iterator[None]:
    """Remove a file at the end of the context."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _repaired(server: Server, dead: set[str], times: int) -> list[str]:
    """The message before a restart for dead models. Raises ServerError after too many deaths."""
    names = ", ".join(sorted(dead))
    failure, words, _ = out_of_memory.verdict(server.before)
    reason = f"; {words}" if failure is FailureClass.OUT_OF_MEMORY else ""
    if times > REPAIRS:
        raise ServerError(
            f"the process of model {names} died, death number {times}; no more restarts{reason}",
            failure=failure,
            hint=f"see {server.log} for the cause",
            log=server.log,
        )
    lines = (f"the process of model {names} died{reason}", quoted(server.log), "starting the server again")
    return list(filter(None, lines))


def start(begin: Callable[[LaunchParams], Server], settings: LaunchParams, ended: threading.Event) -> Server:
    """A server that is ready, or one that was still loading when `ended` was set. Raises ServerError otherwise."""
    starts = 0
    while True:
        starts += 1
        server = begin(settings)
        try:
            server.wait_ready(settings.ready_timeout_s, ended)
            return server
        except BaseException as error:
            server.stop(settings.stop_timeout_s)
            passing = isinstance(error, ServerError) and error.failure is FailureClass.TRANSIENT
            if not passing or starts == STARTS:
                raise


def watch(server: Server, ended: threading.Event, parent: int) -> set[str]:
    """Models whose process has died. None once `ended` is set or process `parent` has exited.

    Raises ServerError if the server itself has exited.
    """
    while not ended.wait(LOOK_EVERY_S) and os.getppid() == parent:
        if server.process.poll() is not None:
            raise server.died()
        if dead := server.dead_models():
            return dead
        server.before = out_of_memory.counts()  # only out-of-memory kills from now on explain a death
    return set()


@contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """An event that SIGTERM, SIGINT and a hangup that is not ignored set. The old handlers are restored afterwards."""
    event = threading.Event()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        numbers.append(signal.SIGHUP)
    old = {number: signal.signal(number, lambda *_: event.set()) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
