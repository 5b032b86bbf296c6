"""`python -m trtllm_pipeline.serve.kept.keeper FOLDER [FD]`: the process that manages one server. FD is its lock,
already held.

It runs the launch stage of the server's toolchain, and its gateway, below a guardian: if this process is killed, the
guardian ends them. If restarts are requested, a program that dies or does not respond for some time is started again
after 1, 2, 4 and up to 60 seconds, unless it was never ready. SIGTERM, SIGINT and SIGHUP end it gracefully: the gateway
finishes its responses, then the server ends.

Exit status 0 after a stop, 1 if the server cannot be kept running, as systemd's Restart=on-failure expects.
"""

from __future__ import annotations

import math
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import (
    FailureClass,
    PipelineError,
    ServerError,
    StateError,
    count,
    disk,
    process,
    read_object,
    terminal,
    write_json,
)
from trtllm_pipeline.orchestrate import LOG, Job, claims, failure_of, read_job
from trtllm_pipeline.serve.gateway.gateway_config import GATEWAY_FILE
from trtllm_pipeline.serve.kept import servers, signed
from trtllm_pipeline.serve.kept.health import Health, gateway_health, server_health
from trtllm_pipeline.serve.kept.prometheus_setup import write_targets
from trtllm_pipeline.serve.kept.servers import GATEWAY_CONFIG, GATEWAY_LOG, LOCK, Keeper, State
from trtllm_pipeline.tensorrt import (
    FAILURE_FILE,
    JOB,
    REPAIR_FILE,
    SERVICE_FILE,
    causes,
    launch,
    out_of_memory,
    triton_server,
)

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
STEADY_S: Final = 60.0
"""A program that was ready this long gets a short pause when it dies."""
MOST_LOG_BYTES: Final = 64 << 20
"""A log larger than this is emptied. Its content is kept as LOG.1."""
_POLL_S: Final = 0.2
_LOOK_AT_LOGS_S: Final = 10.0
_FORCED_GRACE_S: Final = 2.0
_LEASE_S: Final = 0.5
"""A process that waits for more GPUs than are free holds some of them briefly, ten times a second. That does not fail a start."""
_LEASE_POLL_S: Final = 0.02
_OWN_LINE: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d keeper: ")
_PORT: Final = re.compile(r":(\d+)/?$")


def next_pause(pause_s: float, ready_for_s: float | None) -> tuple[float, float]:
    """The pause before a dead program is started again, and the pause after that."""
    if ready_for_s is not None and ready_for_s >= STEADY_S:
        pause_s = FIRST_PAUSE_S
    return pause_s, min(2 * pause_s, LONGEST_PAUSE_S)


@dataclass(slots=True)
class _Program:
    """The server, or the gateway in front of it."""

    name: str
    argv: Sequence[str]
    log: Path
    output: Path
    """Its own log, separate from that of the stage that starts the server."""
    ready_file: Path
    grace_s: float
    health_of: Callable[[Path], tuple[str, str] | None]
    """Address of the health check, by the server's directory."""
    after: _Program | None = None
    """The program that must be ready before the first start of this one."""
    runs: bool = False
    due_s: float = 0.0
    """Monotonic time at which to start it, if it does not run."""
    ready_s: float | None = None
    """Monotonic time at which it became ready."""
    health: Health | None = None
    """Set while it is ready."""
    hung: ServerError | None = None
    """The reason why it is being ended: it did not respond."""
    force_s: float = 0.0
    """Monotonic time at which it is killed, while it is being ended for that reason."""
    worked: bool = False
    pause_s: float = FIRST_PAUSE_S
    before: out_of_memory.Counts = field(default_factory=out_of_memory.counts)
    log_bytes: int = 0
    """Length of its log at its start. Earlier content is from earlier starts."""

    def not_ready(self) -> None:
        self.ready_s = None
        if self.health is not None:
            self.health.close()
            self.health = None

    def printed(self) -> causes.LogText:
        """Its output since its start. The keeper writes to the same log."""
        grown = self.log.exists() and self.log.stat().st_size >= self.log_bytes  # else it was rotated
        return causes.LogText(self.log, since=self.log_bytes if grown else 0, but=_OWN_LINE)


class _Kept:
    """A managed server."""

    def __init__(self, folder: Path, lock: claims.Claim, *, checked: bool) -> None:
        """`checked`: the caller has just checked the signatures."""
        self.folder = folder
        self.lock = lock
        self.checked = checked
        self.check: signed.SignedCheck | None = None
        self.record = replace(
            servers.read_record(folder),
            keeper=Keeper.here(),
            state=State.STARTING,
            reason=None,
            hint=None,
            since_s=time.time(),
            started_s=time.time(),
            restarts=0,
        )
        self.job = _here(read_job(folder / JOB), folder)
        self.fds = [lock.fd]
        self.guardian: process.Guardian | None = None
        self.unwritten = False
        self.look_at_logs_s = 0.0
        stop_s = float(str(self.job.params.get("stop_timeout_s", 3.0)))
        server = _Program(
            "server",
            self.job.commands[0],
            folder / LOG,
            folder / launch.LOG_FILE,
            folder / SERVICE_FILE,
            stop_s + 5.0,
            server_health,
        )
        self.programs = [server]
        if self.record.gateway:
            params = (read_object(folder / GATEWAY_CONFIG) or {}).get("params") or {}
            self.programs.append(
                _Program(
                    "gateway",
                    _ending_with_parent(
                        (sys.executable, "-m", "trtllm_pipeline.serve.gateway", str(folder / GATEWAY_CONFIG))
                    ),
                    folder / GATEWAY_LOG,
                    folder / GATEWAY_LOG,
                    folder / GATEWAY_FILE,
                    float(params.get("stop_timeout_s", 10.0)) + 2.0,
                    gateway_health,
                    after=server,
                )
            )

    # Reporting.

    def say(self, text: str) -> None:
        """Write a line to the log, and to stdout for a manual start."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} keeper: {text}\n"
        with suppress(OSError):
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(line)
            sys.stdout.write(line)
            sys.stdout.flush()

    def tell(self, state: State, reason: str | None = None, hint: str | None = None) -> None:
        """Record its state. A full disk must not end a server: the state is then recorded later."""
        self.record = servers.changed(self.record, state, reason, hint, time.time())
        self.write()
        if self.unwritten and not state.alive:
            leave_last_word(self.lock, state, reason or state.value)

    def write(self) -> None:
        """Write the record. Retried if it fails."""
        self.unwritten = True
        with suppress(OSError):
            self.record.write(self.folder)
            write_targets(self.folder.parent.parent)
            self.unwritten = False

    # Running.

    def keep(self, ended: threading.Event) -> int:
        """Keep it running until `ended`, or until that is impossible. Returns the exit status."""
        servers.identify(self.lock.fd, Keeper.here())
        self.record.write(self.folder)  # without it, the server could not be found
        try:
            held, gpus = lease(self.record.gpus_needed)
            self.fds += [claim.fd for claim in held]
            self.record = replace(self.record, gpus=gpus)
            self.say(f"process {os.getpid()} starts {self.record.cell or self.record.served_folder}")
            while not ended.is_set():
                self._step()
        except PipelineError as error:
            self.say(f"error: {error.message}")
            self._end(error.message)
            self.tell(State.FAILED, error.message, error.hint)
            return 1
        self.tell(State.STOPPING)
        self._end(None)
        self.tell(State.STOPPED, servers.STOPPED_REASON)
        self.say("stopped")
        return 0

    def _step(self) -> None:
        if self.guardian is None:
            self.guardian = process.Guardian(claim_fds=(self.lock.fd,))
        now = time.monotonic()
        for program in self.programs:
            first = program.after is None or program.after.worked
            if not program.runs and now >= program.due_s and first:
                try:
                    if program.after is not None or self._in_order():
                        self._spawn(program)
                except OSError as error:
                    why = disk.no_room(error, self.folder) or error.strerror or str(error)
                    self._died(program, ServerError(f"the {program.name} cannot be started: {why}"))
            if program.hung is not None and now > program.force_s:
                program.force_s = math.inf
                self.guardian.end(program.name, _FORCED_GRACE_S)
        self._look()
        select.select([self.guardian], [], [], _POLL_S)
        try:
            events = self.guardian.read_events()
        except PipelineError:
            killed = ServerError(
                f"process {self.guardian.pid} above the server was killed, and the server with it",
                hint=f"{process.FIND_REASON}, then pipeline serve restart {self.folder.name}",
            )
            self.guardian = None
            for program in self.programs:
                if program.runs:
                    self._died(program, killed)
            return
        for event in events:
            if isinstance(event, (process.Exited, process.Refused)):
                program = next(each for each in self.programs if each.name == event.id)
                self._died(program, self._why(program, event))

    def _in_order(self) -> bool:
        """True if the signatures have been checked for this start. Raises as `signed.check`."""
        if not self.checked and (self.record.require_signed or self.record.trusted_keys):
            self.check = self.check or signed.SignedCheck(self.record)
            if self.check.is_alive():
                return False
            check, self.check = self.check, None
            if check.error is not None:
                raise check.error
        self.checked = False
        return True

    def _spawn(self, program: _Program) -> None:
        program.runs, program.ready_s, program.before = True, None, out_of_memory.counts()
        program.log_bytes = program.log.stat().st_size if program.log.exists() else 0
        for stale in (program.ready_file, self.folder / FAILURE_FILE):
            stale.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # an earlier failure did not cause this end
            program.output.replace(program.output.with_name(f"{program.output.name}.1"))
        if program.after is None:
            (self.folder / REPAIR_FILE).unlink(missing_ok=True)
            self._write_job()
        else:
            path = self.folder / GATEWAY_CONFIG
            config = read_object(path) or {}
            write_json(path, {**config, "port": self._port("openai", str(config.get("host")))})
        assert self.guardian is not None
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.record.gpus)} if self.record.gpus else {}
        self.guardian.spawn(
            program.name,
            program.argv,
            env={**os.environ, **self.job.environment, **visible},
            cwd=self.folder,
            log=program.log,
            claim_fds=self.fds,
        )

    def _write_job(self) -> None:
        """The launch stage's job, on the ports that clients know, if they are free."""
        params = dict(self.job.params)
        for name in ("http", "grpc", "metrics"):
            if f"{name}_port" in params:
                params[f"{name}_port"] = self._port(name, str(params["host"]))
        replace(self.job, params=params, gpus=self.record.gpus).write(self.folder / JOB)

    def _port(self, name: str, host: str) -> int:
        """The requested port, or else the last one, which clients know, if it is free. 0 is any."""
        if port := self.record.asked_ports.get(name):
            return port
        known = self.record.ports.get(name, 0)
        return 0 if known and triton_server.busy_ports([known], host) else known

    def _look(self) -> None:
        """Check which programs have become ready, and the size of the logs."""
        now = time.monotonic()
        for program in self.programs:
            if program.runs and not program.hung:
                self._look_at(program, now)
        if all(program.ready_s is not None for program in self.programs):
            self._check_responses(now)
        if now >= self.look_at_logs_s:
            self.look_at_logs_s = now + _LOOK_AT_LOGS_S
            if self.unwritten:
                self.write()
            if not os.fstat(self.lock.fd).st_nlink:
                raise StateError("its directory was removed, so the server could not be found")
            for name in (launch.LOG_FILE, GATEWAY_LOG, LOG):
                with suppress(OSError):
                    begin_anew(self.folder / name, MOST_LOG_BYTES)

    def _look_at(self, program: _Program, now: float) -> None:
        """Notice when a program becomes ready, or when a launch stage restarts its server."""
        repair = self.folder / REPAIR_FILE
        repairs = program.after is None and repair.exists()
        if program.ready_s is None and program.ready_file.exists() and not repairs:
            program.ready_s, program.worked = now, True
            where = program.health_of(self.folder)
            program.health = None if where is None else Health(*where)
            self.record = replace(self.record, ports={**self.record.ports, **_ports(self.folder)})
            self.say(f"the {program.name} is ready")
        elif program.ready_s is not None and repairs:
            program.not_ready()
            reason = (read_object(repair) or {}).get("reason")
            self.record = replace(self.record, restarts=self.record.restarts + 1)
            self.tell(State.RESTARTING, str(reason or "its server died"))

    def _check_responses(self, now: float) -> None:
        """Record that all programs are ready, or restart one that does not respond, if requested."""
        for program in self.programs:
            if program.health is None or (unresponsive := program.health.unresponsive()) is None:
                continue
            since_s, why = unresponsive
            if self.record.state is not State.UNRESPONSIVE:
                began = time.time() - (now - since_s)
                at = time.strftime("%H:%M:%S", time.localtime(began))
                reason = f"the {program.name} has not responded since {at}: {why}"
                hint = None if self.record.restart else f"pipeline serve restart {self.folder.name}"
                self.record = servers.changed(self.record, State.UNRESPONSIVE, reason, hint, began)
                self.write()
                self.say(reason)
            limit_s = self.record.unresponsive_timeout_s
            if self.record.restart and program.hung is None and now - since_s >= limit_s:
                program.hung = ServerError(f"the {program.name} did not respond for {limit_s:g} s: {why}")
                program.force_s = now + program.grace_s
                self.say(f"{program.hung.message}; it is being ended")
                assert self.guardian is not None
                self.guardian.signal(program.name, signal.SIGTERM)
            return
        if self.record.state is State.UNRESPONSIVE:
            self.say("it responds again")
        if self.record.state is not State.READY:
            self.tell(State.READY)

    def _died(self, program: _Program, error: PipelineError) -> None:
        """Schedule its next start. Raises `error` if there is none."""
        now = time.monotonic()
        ready_for_s = None if program.ready_s is None else now - program.ready_s
        error, program.hung = program.hung or error, None
        program.runs = False
        program.not_ready()
        program.ready_file.unlink(missing_ok=True)  # a killed program could not remove it
        if not (self.record.restart and program.worked):
            raise error
        pause_s, program.pause_s = next_pause(program.pause_s, ready_for_s)
        program.due_s = now + pause_s
        self.record = replace(self.record, restarts=self.record.restarts + 1)
        self.tell(State.RESTARTING, error.message, error.hint)
        self.say(f"{error.message}; restarting in {pause_s:g} s")

    def _why(self, program: _Program, event: process.Exited | process.Refused) -> PipelineError:
        if isinstance(event, process.Refused):
            return ServerError(f"the {program.name} cannot be started: {event.message}", failure=FailureClass.USER)
        if program.name == "server":
            if event.returncode == 0:
                return ServerError("the server was ended by a signal, not by `pipeline serve stop`")
            return failure_of(
                self.job, event.returncode, timed_out=False, before=program.before, output=program.printed()
            )
        lines = [line for line in program.printed().lines if line.strip()]
        errors = [at for at, line in enumerate(lines) if line.startswith("error: ")]
        if event.returncode > 0 and errors:  # its configuration is wrong
            reason, _, hint = "\n".join(lines[errors[-1] :]).removeprefix("error: ").partition("\nhint: ")
            return ServerError(f"the gateway: {reason}", hint=hint or None, log=program.log)
        last = lines[-1:]
        how = f"signal {-event.returncode}" if event.returncode < 0 else f"exit code {event.returncode}"
        last_line = f"; its last line: {last[0]}" if last else ""
        return ServerError(f"the gateway ended with {how}{last_line}", log=program.log)

    def _end(self, reason: str | None) -> None:
        """End the programs, the gateway first: it finishes its responses."""
        guardian = self.guardian
        if reason is not None:
            self.tell(State.STOPPING, reason)
        try:
            for program in reversed(self.programs):
                if program.runs and guardian is not None:
                    self._end_one(guardian, program)
        except PipelineError as error:
            self.say(f"error: {error.message}")
        finally:
            for program in self.programs:
                program.not_ready()
            if guardian is not None:
                guardian.close()
            for program in self.programs:
                program.ready_file.unlink(missing_ok=True)
            shutil.rmtree(self.folder / "links", ignore_errors=True)

    def _end_one(self, guardian: process.Guardian, program: _Program) -> None:
        guardian.signal(program.name, signal.SIGTERM)
        deadline = time.monotonic() + program.grace_s
        forced = False
        while program.runs:
            if not forced and time.monotonic() > deadline:
                forced = True
                guardian.end(program.name, _FORCED_GRACE_S)
            select.select([guardian], [], [], _POLL_S)
            for event in guardian.read_events():
                if isinstance(event, (process.Exited, process.Refused)):
                    next(each for each in self.programs if each.name == event.id).runs = False


def lease(gpus: int) -> tuple[list[claims.Claim], tuple[str, ...]]:
    """Claims on this machine and on `gpus` GPUs, with their names; see `claims.lease_machine`. Raises StateError."""
    known: list[str] = []
    if gpus:
        from trtllm_pipeline.base import probe

        known = [gpu.uuid for gpu in probe.this_machine().gpus]
        if len(known) < gpus:
            raise StateError(
                f"the server needs {count(gpus, 'GPU')}, this machine has {len(known)}", hint="pipeline doctor"
            )
    deadline = time.monotonic() + _LEASE_S
    while True:
        lease_held = claims.lease_machine(tuple(known[:gpus]), others=known, enter=claims.enter_standing)
        if lease_held is not None:
            return lease_held
        if time.monotonic() > deadline:
            break
        time.sleep(_LEASE_POLL_S)
    folder = claims.machine_leases()
    held = sum(claims.is_held(folder / f"gpu-{gpu}") for gpu in known)
    if len(known) - held < gpus:
        raise StateError(
            f"the server needs {count(gpus, 'GPU')}; of {len(known)} on this machine, other servers and runs hold {held}",
            hint="pipeline serve ps shows the GPUs of servers; stop one, or wait for the run",
        )
    who = " and ".join(claims.machine_users(())) or "`pipeline status` in its workspace"
    raise StateError(
        "a run is measuring on this machine now, which excludes other work", hint=f"wait for its end: {who}"
    )


def leave_last_word(lock: claims.Claim, state: State, reason: str) -> None:
    """Record the final state in the lock if server.json cannot be written: the lock has space for it."""
    with suppress(OSError):
        servers.identify(lock.fd, Keeper.here(), (state, reason))


def begin_anew(log: Path, most_bytes: int) -> None:
    """Empty a log larger than `most_bytes`. Its content is copied to a second file. Writers continue to append."""
    if log.exists() and log.stat().st_size > most_bytes:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def _here(job: Job, folder: Path) -> Job:
    """The job with current paths and interpreter: the workspace may have been moved."""
    command = (sys.executable, "-m", "trtllm_pipeline.tensorrt.worker", str(folder / JOB))
    return replace(job, commands=(command,), attempt=str(folder), out=str(folder / "out"))


def _ending_with_parent(argv: Sequence[str]) -> tuple[str, ...]:
    """`argv`, signaled when its guardian is killed, if the system supports it."""
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "TERM", *argv) if setpriv else tuple(argv)


def _ports(folder: Path) -> dict[str, int]:
    service, gateway = read_object(folder / SERVICE_FILE) or {}, read_object(folder / GATEWAY_FILE) or {}
    urls: dict[str, Any] = {name: service.get(name) for name in ("http", "grpc", "metrics")}
    urls["openai"] = gateway.get("url")
    matches = {name: _PORT.search(value) for name, value in urls.items() if isinstance(value, str)}
    return {name: int(match[1]) for name, match in matches.items() if match}


def main(argv: Sequence[str]) -> int:
    """Run a managed server. Returns the exit status."""
    folder = Path(argv[0]).absolute()
    if len(argv) > 1:
        lock: claims.Claim | None = claims.Claim(int(argv[1]), folder / LOCK, remove=False)
        os.set_inheritable(int(argv[1]), False)
    else:
        lock = servers.take(folder)
    if lock is None:
        print(f"error: the server {folder.name} is already running", file=sys.stderr)  # noqa: T201
        return 1
    try:
        with launch.stop_requested() as ended:
            return _Kept(folder, lock, checked=len(argv) > 1).keep(ended)
    except (PipelineError, OSError, ValueError, KeyError, TypeError) as error:
        if not isinstance(error, (PipelineError, OSError)):
            traceback.print_exc()
        leave_last_word(lock, State.FAILED, str(error))
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    terminal.start()
    sys.exit(main(sys.argv[1:]))
