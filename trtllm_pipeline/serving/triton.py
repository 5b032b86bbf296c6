"""Starts a Triton Inference Server, diagnoses its failures, and stops it."""

from __future__ import annotations

import contextlib
import ctypes.util
import functools
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trtllm_pipeline.errors import FailureClass, ServerError
from trtllm_pipeline.machine.triton_installation import Triton
from trtllm_pipeline.processes import out_of_memory
from trtllm_pipeline.processes.guardian import look_up, process_table
from trtllm_pipeline.processes.killed import STUB, model_run_by
from trtllm_pipeline.serving import links
from trtllm_pipeline.serving.command_lines import LOOPBACK, Ports, address_options, shared_memory_option
from trtllm_pipeline.serving.server import all_ok, ask, telling, until_ready
from trtllm_pipeline.serving.server import diagnose as explained

WILDCARDS: Final = frozenset(("0.0.0.0", "::"))  # noqa: S104  compared with, not bound to
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the system's, not a temporary folder
TEMPORARY: Final = Path("/tmp")  # noqa: S108  Triton's Python backend knows no other
_MARK: Final = "trtllm-pipeline"
_TICK_S: Final = 0.05
"""How far a file system's clock may lag."""
SHARED_MEMORY_BYTES: Final = 2 << 20
"""Required for each Python model; measurements show about half of it."""
EXIT_TIMEOUT_S: Final = 1
"""How long Triton waits for requests in flight when it is told to exit."""
_HELP_S: Final = 30.0
STOP_TIMEOUT_S: Final = 3.0
"""An open gRPC stream can keep Triton 2.51 from exiting, so it is killed after this time."""
CLOSED: Final = ("shared-memory", "model-repository", "trace", "logging")
"""Interfaces of Triton that no client needs; they would give clients access to files and memory of this user."""


def check(triton: Triton, python_models: int) -> None:
    """Raise ServerError for an environment in which Python models would fail, partly silently."""
    # The wheel's stubs run under this interpreter; those of another Triton under its own, with its own numpy.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        numpy = importlib.metadata.version("numpy")
        if triton.stubs is not None and int(numpy.split(".")[0]) >= 2:
            raise ServerError(
                f"numpy {numpy} is installed; with numpy 2, Triton's Python stub silently passes zeros instead of tensors",
                failure=FailureClass.USER,
                hint="pip install 'numpy<2'",
            )
    if triton.stubs is not None and not stub_binary(triton.stubs).is_file():
        known = ", ".join(sorted(folder.name for folder in triton.stubs.iterdir()))
        raise ServerError(
            f"{triton.source} has no Python stub for Python {_python()}, only for {known}",
            failure=FailureClass.USER,
            hint="use Python 3.10, 3.11 or 3.12",
        )
    if triton.stubs is not None and python_library() is None:
        raise ServerError(
            f"libpython{_python()}.so.1.0 is missing: Triton's Python stub loads it, but {sys.base_prefix} was built "
            f"without a shared library",
            failure=FailureClass.USER,
            hint=f"install it (Debian, Ubuntu: apt install libpython{_python()}), or use a Python with one",
        )
    for variable, folder, separators in _searched(triton):
        if found := next((each for each in separators if each in str(folder)), None):
            raise ServerError(
                f"{folder} contains {found!r}, which separates folders in {variable}: Triton's Python models would not find "
                f"their libraries there",
                failure=FailureClass.USER,
                hint="create the Python environment in a folder without it",
            )
    needed = (python_models + 1) * SHARED_MEMORY_BYTES
    shared = os.statvfs(SHARED_MEMORY)
    if shared.f_bavail * shared.f_frsize < needed:
        raise ServerError(
            f"{SHARED_MEMORY} has {shared.f_bavail * shared.f_frsize >> 20} MiB free; {python_models} Python models "
            f"need {needed >> 20}",
            failure=FailureClass.USER,
            hint="start the container with --shm-size=2g or more",
        )


def _searched(triton: Triton) -> Iterator[tuple[str, Path, str]]:
    """The search path variables of a server's Python, a folder in each, and the separators that the folder must not contain."""
    yield "PATH", Path(sys.executable).parent, ":"
    if triton.libraries is not None:
        yield "LD_LIBRARY_PATH", triton.libraries, ":;"
        yield "LD_LIBRARY_PATH", Path(str(sysconfig.get_config_var("LIBDIR"))), ":;"


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def stub_binary(stubs: Path) -> Path:
    """The stub for the running Python."""
    return stubs / _python() / STUB


def python_library() -> Path | None:
    """The libpython that the stub would load: the one of this Python, or the system's. None if there is neither."""
    name = f"libpython{_python()}.so.1.0"
    own = Path(str(sysconfig.get_config_var("LIBDIR"))) / name
    if own.is_file():
        return own
    found = ctypes.util.find_library(f"python{_python()}")
    return None if found is None else Path(found)


def environment(triton: Triton) -> dict[str, str]:
    """The server's environment, in which its Python stubs find this interpreter, its packages and this project."""
    variables = dict(os.environ)
    variables["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), variables.get("PATH", os.defpath)))
    if triton.stubs is not None:
        folders = [str(triton.libraries), str(sysconfig.get_config_var("LIBDIR")), variables.get("LD_LIBRARY_PATH", "")]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(folder for folder in folders if folder)
    root = Path(__file__).resolve().parents[2]
    if root.name not in {"site-packages", "dist-packages"}:  # a checkout that is not installed
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), variables.get("PYTHONPATH"))))
    variables["TOKENIZERS_PARALLELISM"] = "false"
    return variables


def link(triton: Triton, repository: Path, folder: Path) -> tuple[Path, Path]:
    """The model repository and the backend directory for a server, made of links in `folder`; see `links`."""
    folder.mkdir(parents=True, exist_ok=True)
    named = links.plain(folder)
    links.link_repository(repository, folder / "models")
    return named / "models", _link_backends(triton, named / "backends")


def _link_backends(triton: Triton, folder: Path) -> Path:
    """The backend directory; for the wheel, links in `folder` with the right stub."""
    if triton.stubs is None:
        return triton.backends
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    sources = [path for path in (triton.backends / "python").iterdir() if path.is_file()]
    for source in (*sources, stub_binary(triton.stubs)):
        link = python / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return folder


def free_ports(host: str = LOOPBACK) -> Ports:
    """Three free ports. Raises OSError if `host` is not an address of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in Ports._fields]
        for each in sockets:
            each.bind((host, 0))
        return Ports(*(each.getsockname()[1] for each in sockets))


def busy_ports(ports: Ports, host: str = LOOPBACK) -> list[int]:
    """Those of `ports` that are in use."""
    busy = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                busy.append(port)
    return busy


@dataclass(slots=True)
class TritonProcess:
    """A running Triton server."""

    process: subprocess.Popen[bytes]
    ports: Ports
    log: Path
    prefix: str
    """Name prefix of its files in shared memory."""
    models: tuple[str, ...]
    host: str = LOOPBACK
    """Address to reach it at."""
    started: float = field(default_factory=time.time)
    stubs: dict[int, str] = field(default_factory=dict)
    """Process id -> model of the processes that run Python models."""
    before: out_of_memory.Counts = field(default_factory=out_of_memory.counts)

    def request(self, method: str, path: str, body: object = None, *, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Status and body of one HTTP request. Raises OSError or HttpError if there is no answer."""
        return ask(self.host, self.ports.http, method, path, body, timeout_s=timeout_s)

    def ready(self) -> bool:
        """Whether the server and every model report that they are ready."""
        mark_folders(self.prefix, self.started, [self.process.pid])
        return all_ok(self.host, self.ports.http, ready_paths(self.models))

    def wait_ready(self, timeout_s: float, ended: threading.Event | None = None) -> None:
        """Wait until it is ready or `ended` is set. Raises ServerError when it ends by itself or takes too long."""
        until_ready(self, "Triton", timeout_s, ended)
        self.stubs = self._live_stubs()

    def service(self) -> dict[str, object]:
        """What clients need to know. Raises OSError or HttpError when the server does not answer."""
        return described(self.process.pid, self.host, self.ports, self.models)

    def died(self) -> ServerError:
        """Why the server has ended, from its exit status and its log."""
        return diagnose(self.process.returncode, self.log, before=self.before)

    def dead_models(self) -> set[str]:
        """Models whose Python process has died since the last call; Triton still reports them as ready."""
        dead = dead_stubs(self.stubs, self.process.pid)
        for pid in dead:
            del self.stubs[pid]
        return set(dead.values())

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Terminate the server, wait, kill it, and clean up. Returns its exit status.

        A terminated server finishes its requests and ends its Python models. Once these have ended it is killed, because it
        would take another second to notice.
        """
        deadline = time.monotonic() + timeout_s
        mark_folders(self.prefix, self.started, [self.process.pid])
        stubs = {**self.stubs, **self._live_stubs()}
        if self.process.poll() is None:
            self.process.terminate()
            while self.process.poll() is None and time.monotonic() < deadline and self._live_stubs():
                time.sleep(0.02)
            self.process.kill()
            self.process.wait()
        for pid in stubs:
            if _is_stub(pid, self.prefix):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        remove_leftovers(self.prefix)
        return self.process.returncode

    def _live_stubs(self) -> dict[int, str]:
        return live_stubs(self.process.pid, self.prefix)


def described(pid: int, host: str, ports: Ports, models: Sequence[str]) -> dict[str, object]:
    """Endpoints, models and version of a ready server, for service.json."""
    answer = json.loads(ask(host, ports.http, "GET", "/v2")[1])
    return {
        "kind": "triton",
        "pid": pid,
        **{name: f"{host}:{port}" for name, port in ports._asdict().items()},
        "model": models[0],
        "bls_model": models[1] if len(models) > 1 else None,
        "server": {"name": str(answer["name"]), "version": str(answer["version"])},
    }


def ready_paths(models: Sequence[str]) -> tuple[str, ...]:
    """The paths that return status 200 when the server and `models` are ready."""
    return ("/v2/health/ready", *(f"/v2/models/{model}/ready" for model in models))


def closing_options(triton: Triton) -> tuple[list[str], list[str]]:
    """Options that close interfaces that no client needs, and the names of those that this Triton release lacks.

    Without --model-control-mode, models can be neither loaded nor unloaded by requests. A restricted interface opens for
    requests with a configured header. Any user can read a command line, so this header cannot be sent: its name contains
    a colon, which ends a name in HTTP/1.1 and which gRPC rejects.
    """
    header = f"no:{uuid.uuid4().hex}={uuid.uuid4().hex}"
    closing = {
        "--http-restricted-api": f"{','.join(CLOSED)}:{header}",
        "--grpc-restricted-protocol": f"{','.join(CLOSED)}:{header}",
        "--allow-vertex-ai": "false",  # else AIP_MODE in the environment opens one more port, to everyone
    }
    known = _help(triton)
    missing = [name for name in closing if known and f"{name} " not in known]
    return [f"{name}={value}" for name, value in closing.items() if name not in missing], missing


@functools.cache
def _help(triton: Triton) -> str:
    """The server's --help output; "" if it has none, which counts as having all options."""
    try:
        asked = subprocess.run(
            [triton.binary, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=environment(triton),
            timeout=_HELP_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (asked.stdout + asked.stderr).decode(errors="replace")


def new_prefix() -> str:
    """A unique name prefix for the shared memory of a new server, which also identifies the process that starts it."""
    return f"{_prefix(os.getpid())}{uuid.uuid4().hex[:8]}-"


def start(
    triton: Triton,
    repository: Path,
    models: Sequence[str],
    *,
    folder: Path,
    log: Path,
    ports: Ports,
    host: str = LOOPBACK,
    variables: Mapping[str, str] | None = None,
) -> TritonProcess:
    """Start `triton` on `repository` in this process's session and group; `models` are those in the repository.

    The server works on links in `folder`. `variables` are added to its environment. Its output is appended to `log`.
    """
    remove_stale_leftovers()
    prefix = new_prefix()
    models_folder, backends = link(triton, repository, folder)
    command = [
        str(triton.binary),
        f"--model-repository={models_folder}",
        f"--backend-directory={backends}",
        *closing_options(triton)[0],
        *address_options(host, ports),
        shared_memory_option(prefix),
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
    ]
    command = private(command)
    if setpriv := shutil.which("setpriv"):
        # Should this process be killed, the kernel ends the server: a second line behind whoever watches the group.
        command = [setpriv, "--pdeathsig", "KILL", *command]
    started = time.time()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment(triton), **(variables or {})},
        )
    return TritonProcess(process, ports, log, prefix, tuple(models), LOOPBACK if host in WILDCARDS else host, started)


def private(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` with files that only its user can read; see private.py.

    Raises ServerError if the program does not exist.
    """
    if shutil.which(command[0]) is None:
        raise ServerError(f"cannot start the server: {command[0]} is not a program", failure=FailureClass.USER)
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("private.py")), *command]


def diagnose(
    status: int | None, log: Path, who: str = "Triton", *, before: out_of_memory.Counts | None = None
) -> ServerError:
    """The error for the end of a server, with the end of its log."""
    found = re.search(
        r"failed to load '(\w+)' version \d+: (?:\w+: )?(.+?)\s*(?:\\n|\"?$)", "\n".join(telling(log)), re.MULTILINE
    )
    cause = f"could not load the model {found[1]}: {found[2]}" if found else None
    return explained(who, status, log, cause, before=before)


def stub_processes(parent: int) -> Iterator[tuple[int, str]]:
    """Process id and model name of the living Python model processes of a server."""
    for pid, process in process_table().items():
        if process.parent == parent and (model := model_run_by(pid)):
            yield pid, model


def live_stubs(parent: int, prefix: str) -> dict[int, str]:
    """Process id -> model name of the Python model processes of the server with this prefix."""
    return {pid: model for pid, model in stub_processes(parent) if _is_stub(pid, prefix)}


def dead_stubs(stubs: Mapping[int, str], parent: int) -> dict[int, str]:
    """Those of `stubs` that have ended. Each is checked on its own, because a listing of a busy system may miss one."""
    return {pid: model for pid, model in stubs.items() if not _lives(pid, parent)}


def _lives(pid: int, parent: int) -> bool:
    process = look_up(pid)
    return process is not None and not process.zombie and process.parent == parent


def _is_stub(pid: int, prefix: str) -> bool:
    """Whether `pid` is still a stub of the server with this prefix: process ids are reused."""
    try:
        return prefix.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _prefix(pid: int) -> str:
    """Name prefix for shared memory of servers started by `pid`, unique even if containers share /dev/shm."""
    return f"trtllm-pipeline-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-"


def mark_folders(prefix: str, since: float, servers: Iterable[int]) -> None:
    """Mark the folders that the Python backends of `servers`, started at `since`, have created as belonging to `prefix`.

    Each creates /tmp/python_env_XXXXXX, which remains when Triton is killed or does not wait for its models. Nothing tells
    whose it is, so the first unmarked folder of this user since then is taken.
    """
    marks = {folder: _mark(folder) for folder, made in _own_folders() if made > since - _TICK_S}
    unknown = [folder for folder, mark in marks.items() if mark is None]
    if not unknown:
        return
    missing = sum(any(stub_processes(pid)) for pid in servers) - list(marks.values()).count(prefix)
    for folder in unknown[: max(0, missing)]:
        with contextlib.suppress(OSError), (folder / _MARK).open("x", encoding="utf-8") as file:  # another was first
            file.write(prefix)


def _own_folders() -> Iterator[tuple[Path, float]]:
    """Folders of this user's Python backends, with their modification times."""
    for folder in TEMPORARY.glob("python_env_*"):
        with contextlib.suppress(FileNotFoundError):
            about = folder.lstat()
            if about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode):
                yield folder, about.st_mtime


def _mark(folder: Path) -> str | None:
    """The prefix of the server that a folder is marked for; None for an unmarked folder."""
    try:
        return (folder / _MARK).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _remove(over: Callable[[str], bool]) -> None:
    """Delete the leftovers of servers for whose prefix, or file name that begins with it, `over` is true."""
    for path in SHARED_MEMORY.iterdir():
        if over(path.name):
            with contextlib.suppress(OSError):  # gone, or another user's: anybody may give a file such a name
                about = path.lstat()
                if about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode):
                    path.unlink()
    for folder, _ in _own_folders():
        if over(_mark(folder) or ""):
            (folder / _MARK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty, or gone
                folder.rmdir()


def remove_leftovers(prefix: str) -> None:
    """Delete the shared memory files and folders of the server with this prefix."""
    _remove(lambda name: name.startswith(prefix))


def remove_stale_leftovers() -> None:
    """Delete what servers left behind whose starting process was killed."""
    own = _prefix(0).removesuffix("0-")

    def over(name: str) -> bool:
        pid = name.removeprefix(own).split("-")[0]
        return name.startswith(own) and pid.isdigit() and not Path(f"/proc/{pid}").exists()

    _remove(over)
