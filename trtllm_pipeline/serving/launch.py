"""The program of the launch stage, a service: a Triton server around one model repository, until told to end.

Ready is said by `service.json` in the attempt folder. SIGTERM and SIGINT end it in order, as does the end of the
process that started it; a server that dies ends it with the cause and the tail of the log; a Python model process
that dies is brought back.

Ports are no property of a result, so they are no parameters: the environment variables PIPELINE_HTTP_PORT,
PIPELINE_GRPC_PORT and PIPELINE_METRICS_PORT fix them, and free ones are taken otherwise.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from trtllm_pipeline.errors import FailureClass, ServerError, UsageError
from trtllm_pipeline.serving import triton
from trtllm_pipeline.stages.base import SERVICE_FILE, Option, Work, write_json

MODEL: Final = "ensemble"
BLS_MODEL: Final = "tensorrt_llm_bls"
LOG_FILE: Final = "server.log"
STARTS: Final = 3
"""Tries to find free ports: another program may take one between the test and the server's start."""
REPAIRS: Final = 3
"""Deaths of Python model processes after which the server is given up."""
LOOK_EVERY_S: Final = 0.5

OPTIONS: Final = (
    Option("ready_timeout_s", "float", "how long the server may take to load its models", 300.0),
    Option("log_verbose", "int", "Triton's verbose log level", 0),
)
"""Parameters of the stage and their defaults."""


def run(work: Work) -> None:
    """Serve `work.inputs["repository"]`. Returns when told to end; raises ServerError when the server cannot go on."""
    settings = {option.name: work.params.get(option.name, option.default) for option in OPTIONS}
    repository = work.inputs["repository"]
    python_models = sum(1 for _ in repository.glob("*/1/model.py"))
    if not (repository / MODEL / "config.pbtxt").is_file():
        raise ServerError(f"{repository} has no model {MODEL}", hint="write it with `pipeline repository`")
    installed = triton.find()
    triton.check(installed, python_models)
    ports = chosen_ports()
    with told_to_end() as ended:
        server = start(installed, work, ports, float(str(settings["ready_timeout_s"])), int(str(settings["log_verbose"])), ended)
        try:
            if not ended.is_set():
                write_json(work.attempt / SERVICE_FILE, service(server))
                print(f"ready: http {triton.HOST}:{server.ports.http}, grpc {triton.HOST}:{server.ports.grpc}")  # noqa: T201
                watch(server, ended)
        finally:
            (work.attempt / SERVICE_FILE).unlink(missing_ok=True)
            server.stop()


def start(
    installed: triton.Triton,
    work: Work,
    ports: triton.Ports | None,
    timeout_s: float,
    verbose: int,
    ended: threading.Event,
) -> triton.Server:
    """A server that is ready, or one that is still loading when `ended` was set. Raises ServerError otherwise."""
    for attempt in range(1, STARTS + 1):
        server = triton.start(
            installed,
            work.inputs["repository"],
            (MODEL, BLS_MODEL),
            folder=work.attempt / "backends",
            log=work.attempt / LOG_FILE,
            ports=ports or triton.free_ports(),
            verbose=verbose,
        )
        try:
            server.wait_ready(timeout_s, ended)
        except ServerError as error:
            server.stop()
            if ports is not None or error.failure is not FailureClass.TRANSIENT or attempt == STARTS:
                raise
        except BaseException:
            server.stop()
            raise
        else:
            return server
    raise AssertionError("the last try returns or raises")


def watch(server: triton.Server, ended: threading.Event) -> None:
    """Stay until `ended` is set or the parent has gone. Raises ServerError when the server is beyond repair."""
    parent = os.getppid()
    repairs = 0
    while not ended.wait(LOOK_EVERY_S) and os.getppid() == parent:
        if server.process.poll() is not None:
            raise server.died()
        dead = server.dead_models()
        if not dead:
            continue
        names = ", ".join(sorted(dead))
        repairs += 1
        if repairs > REPAIRS:
            raise ServerError(
                f"the process of model {names} died; it is the {repairs}th such death, so the server is given up",
                hint=f"{server.log} may say why; a kernel short of memory kills without a word",
                log=server.log,
            )
        print(f"the process of model {names} died; loading the models again")  # noqa: T201
        server.reload()
        print("the models are ready again")  # noqa: T201


def service(server: triton.Server) -> dict[str, object]:
    """What clients need to know about a server that is ready."""
    return {
        "schema": 1,
        "pid": server.process.pid,
        **{name: f"{triton.HOST}:{port}" for name, port in server.ports._asdict().items()},
        "model": MODEL,
        "bls_model": BLS_MODEL,
        "server": server.description(),
        "log": LOG_FILE,
    }


def chosen_ports() -> triton.Ports | None:
    """The ports the environment asks for, or None; those it leaves out are free ones.

    Raises UsageError for something that is no port, ServerError for a port that is taken.
    """
    wanted: dict[str, int] = {}
    for name in triton.Ports._fields:
        value = os.environ.get(f"PIPELINE_{name.upper()}_PORT")
        if not value:
            continue
        if not value.isdigit() or not 0 < int(value) < 65536:
            raise UsageError(f"PIPELINE_{name.upper()}_PORT is {value!r}; a port is a number from 1 to 65535")
        wanted[name] = int(value)
    if not wanted:
        return None
    ports = triton.free_ports()._replace(**wanted)
    if busy := triton.busy_ports(ports):
        raise ServerError(
            f"port {', '.join(map(str, busy))} of {triton.HOST} is taken by another program",
            failure=FailureClass.TRANSIENT,
            hint="choose another, or leave the variable out to get a free one",
        )
    return ports


@contextmanager
def told_to_end() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; the old handlers come back afterwards."""
    event = threading.Event()
    old = {number: signal.signal(number, lambda *_: event.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
