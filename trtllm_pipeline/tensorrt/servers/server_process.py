"""Shared by all kinds of servers, with the messages for their ends."""

from __future__ import annotations

import json
import resource
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Protocol

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.measure import ProtocolError
from trtllm_pipeline.tensorrt.diagnosis import killed, out_of_memory
from trtllm_pipeline.tensorrt.diagnosis.causes import LogText, first_cause, first_error, telling_lines
from trtllm_pipeline.tensorrt.servers.command_lines import LOOPBACK, Ports

_LOOK_S: Final = 2.0
"""Timeout of one readiness request: another program may hold the port and never respond."""
_LONGEST: Final = 300
_QUOTED: Final = 15
"""Lines."""


class ServerProcess(Protocol):
    """The process or process group of a server."""

    @property
    def pid(self) -> int:
        """Process id of the first process."""

    def poll(self) -> int | None:
        """Its exit status after the server has failed or ended, else None."""


class StoppableProcess(ServerProcess, Protocol):
    """A server process whose `stop` also ends everything that it started."""

    def stop(self, timeout_s: float) -> int | None:
        """Interrupt it, then terminate and kill all its processes. Returns the exit status."""


@dataclass(kw_only=True)
class Server(ABC):
    """A server that was started. Its starter must stop it, whatever its state."""

    process: ServerProcess
    ports: Ports
    """Its ports. A server that only speaks HTTP uses the first."""
    output: Path
    """The file that its process writes to."""
    host: str = LOOPBACK
    """Address to reach it at."""
    name: str = "Triton"
    """Name in messages."""
    before: out_of_memory.Counts = field(default_factory=out_of_memory.counts)
    """The kernel's out-of-memory counts when the server was started."""
    has_repository: ClassVar[bool] = True
    """True if the settings of TensorRT-LLM's repository apply to it, so that a message may name one of them."""

    @property
    def log(self) -> Path:
        """The file with its error messages."""
        return self.output

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 10.0, port: int | None = None
    ) -> tuple[int, bytes]:
        """Status and body of one HTTP request, `body` as JSON, all within `timeout_s`. `port` is that of the server by
        default.

        Raises OSError or HttpError if there is no response.
        """
        # Imported late: these imports take as long as the rest of the start.
        import asyncio

        from trtllm_pipeline.measure import http

        data = b"" if body is None else json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"{host}:{port or self.ports.http}"
        return asyncio.run(http.fetch(address, path, method=method, body=data, timeout_s=timeout_s))

    @abstractmethod
    def ready_paths(self) -> Sequence[str]:
        """The paths that return status 200 when the server and all its models are ready."""

    def ready(self) -> bool:
        """True if the server and all its models report that they are ready."""
        try:
            return all(self.request("GET", path, timeout_s=_LOOK_S)[0] == 200 for path in self.ready_paths())
        except (OSError, ProtocolError):
            return False

    def wait_ready(self, timeout_s: float, ended: threading.Event | None = None) -> None:
        """Wait until it is ready or `ended` is set. Raises ServerError if it ends or takes too long.

        A killed process of the server counts as its end, because the server would wait for it until the timeout.
        """
        deadline = time.monotonic() + timeout_s
        watch = killed.Watch(self.process.pid, self.before)
        while not (ended and ended.is_set()) and not self.ready():
            if self.process.poll() is not None:
                raise self.died()
            if death := watch.look():
                who, signo = death
                raise diagnose(f"{self.name} was loading when {who}", -signo, self.log, before=self.before)
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} was not ready after {timeout_s:.0f} s{_last_words([LogText(self.log)])}",
                    failure=FailureClass.TIMEOUT,
                    hint="a large engine takes minutes to load; raise the timeout with --set settings.serve.ready_timeout_s=SECONDS",
                    log=self.log,
                )
            time.sleep(0.05)

    def died(self) -> ServerError:
        """The reason for its end, from its exit status and its log."""
        error = diagnose(self.name, self.process.poll(), self.log, before=self.before)
        error.setting = error.setting if self.has_repository else None
        return error

    def dead_models(self) -> set[str]:
        """Models whose process has died since the last call while the server keeps running."""
        return set()

    @abstractmethod
    def service(self) -> dict[str, object]:
        """The information for clients: the part of service.json that depends on the kind of server.

        Raises OSError, HttpError or ServerError if the server does not respond.
        """

    @abstractmethod
    def stop(self, timeout_s: float) -> int | None:
        """End all its processes within about `timeout_s`. Returns the exit status."""


def diagnose(
    who: str,
    status: int | None,
    log: Path,
    cause: str | None = None,
    *,
    before: out_of_memory.Counts | None = None,
    beside: Sequence[Path] = (),
) -> ServerError:
    """The reason for the end of `who`, as an error of one line. `cause` is the server's own message. Without it, the
    log is quoted.

    `status` is negative for a signal, None if not known. `before` are the kernel's counts at the start, which show whether
    the kernel killed it. `beside` are logs of processes that ended with it, such as other ranks.
    """
    logs = [LogText(each) for each in (log, *beside)]
    known = first_cause(logs)
    ended = "ended" if status is None else f"ended with exit status {status}"
    how = cause or (f"was ended by signal {_signal_name(-status)}" if status is not None and status < 0 else ended)
    if (known and known.killed) or (status == -signal.SIGKILL and not (known and known.certain)):
        failure, words_, hint = out_of_memory.verdict(before)
        return ServerError(f"{who} {how}; {words_}{_last_words(logs)}", failure=failure, hint=hint, log=log)
    if known is None:
        limited = _address_space() if status in {-signal.SIGSEGV, -signal.SIGABRT} else None
        error = first_error(logs[:1]) or first_error(logs)
        return ServerError(
            f"{who} {how}{'' if cause else _last_words(logs)}",
            hint=limited,
            log=log if error is None else error.path,
            line=None if error is None else error.number,
            telling=tuple(map(str, telling_lines(logs))),
        )
    whose = "its log" if known.line.path == log else f"{known.line.path.parent.name}'s log"
    same = cause is not None and cause.rpartition(": ")[2] in known.line.message
    quote = "" if same else f"; {known.quoted(whose)}"
    return ServerError(
        f"{who} {how}{quote}",
        failure=known.failure,
        hint=known.hint,
        log=known.line.path,
        line=known.line.number,
        setting=known.setting("launch", {}),
        telling=() if known.certain else tuple(map(str, telling_lines(logs))),
    )


def _address_space() -> str | None:
    """A hint for a program that crashed with a limited address space: few programs check for failed allocations."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return f"its address space is limited to {limit >> 20} MiB here, which may be too little: ulimit -v unlimited"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def quoted(log: Path) -> str:
    """The end of a log, indented, under the log's name. Empty without lines."""
    tail = LogText(log).last(_QUOTED)
    return "\n".join([f"the end of {log}:", *(f"    {line.text[:_LONGEST]}" for line in tail)]) if tail else ""


def _last_words(logs: Sequence[LogText]) -> str:
    """The error in the first log, or its last line, or else the error of the other logs. For the end of a message."""
    cause = first_cause(logs[:1])
    if cause is not None:
        return f"; {cause.quote}"
    last = logs[0].last(1)
    error = first_error(logs[:1]) or (None if last else first_error(logs))
    if error is not None:
        return f"; its log says: {error.message}"
    return f"; its last line: {last[0].message}" if last else ""
