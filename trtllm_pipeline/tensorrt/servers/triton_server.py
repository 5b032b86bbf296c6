"""Starts a Triton Inference Server, diagnoses its failures, and stops it."""

from __future__ import annotations

import contextlib
import ctypes.util
import errno
import functools
import json
import os
import re
import shlex
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import FailureClass, ServerError, guardian, triton_installation, version_of, without_secrets
from trtllm_pipeline.tensorrt.diagnosis import out_of_memory
from trtllm_pipeline.tensorrt.diagnosis.causes import LogText
from trtllm_pipeline.tensorrt.diagnosis.killed import STUB, model_run_by
from trtllm_pipeline.tensorrt.servers import links
from trtllm_pipeline.tensorrt.servers.command_lines import LOOPBACK, Ports, address_options, shared_memory_option
from trtllm_pipeline.tensorrt.servers.pasted import PastedCommand
from trtllm_pipeline.tensorrt.servers.server_process import Server
from trtllm_pipeline.tensorrt.servers.server_process import diagnose as explained

WILDCARDS: Final = frozenset(("0.0.0.0", "::"))  # noqa: S104  compared with, not bound to
_GIVEN_AWAY: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The first and the last port that the kernel assigns to connections."""
_LEAST_PORT: Final = 20_000
"""Above the ports of well-known programs."""
_TRIED_PORTS: Final = 64
_CHOSEN: Final[deque[socket.socket]] = deque(maxlen=128)
"""Markers of the ports that this process chose last."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the system's, not a temporary directory
TEMPORARY: Final = Path("/tmp")  # noqa: S108  Triton's Python backend knows no other
_MARK: Final = "trtllm-pipeline"
_TICK_S: Final = 0.05
"""Maximum lag of a file system's clock."""
SHARED_MEMORY_BYTES: Final = 2 << 20
"""Required for each Python model. Measurements show about half of it."""
EXIT_TIMEOUT_S: Final = 1
"""Time that Triton waits for requests in flight when it is told to exit."""
_HELP_S: Final = 30.0
_KILLED_S: Final = 5.0
_VARIABLES: Final = {"TOKENIZERS_PARALLELISM": "false"}
STOP_TIMEOUT_S: Final = 3.0
"""An open gRPC stream can keep Triton 2.51 from exiting, so it is killed after this time."""
CLOSED: Final = ("shared-memory", "model-repository", "trace", "logging")
"""Interfaces of Triton that no client needs. They would give clients access to files and memory of this user."""


def check(triton: triton_installation.TritonInstallation, python_models: int) -> None:
    """Raise ServerError for an environment in which Python models would fail, partly without an error."""
    # The wheel's stubs run under this interpreter; those of another Triton under its own, with its own numpy.
    if triton.stubs is not None:
        _check_wheel(triton.stubs, triton.source)
    for variable, folder, separators in _searched(triton):
        if separator := next((each for each in separators if each in str(folder)), None):
            raise _unusable(
                f"{folder} contains {separator!r}, which separates directories in {variable}: Triton's Python models would not find "
                f"their libraries there",
                "create the Python environment in a directory without it",
            )
    needed = (python_models + 1) * SHARED_MEMORY_BYTES
    shared = os.statvfs(SHARED_MEMORY)
    if (free := shared.f_bavail * shared.f_frsize) < needed:
        raise _unusable(
            f"{SHARED_MEMORY} has {free >> 20} MiB free; {python_models} Python models need {needed >> 20}",
            "start the container with --shm-size=2g or more",
        )


def _check_wheel(stubs: Path, source: str) -> None:
    numpy = version_of("numpy")
    if numpy is not None and int(numpy.split(".")[0]) >= 2:
        raise _unusable(
            f"numpy {numpy} is installed; with numpy 2, Triton's Python stub silently passes zeros instead of tensors",
            "pip install 'numpy<2'",
        )
    if not stub_binary(stubs).is_file():
        known = ", ".join(sorted(folder.name for folder in stubs.iterdir()))
        raise _unusable(
            f"{source} has no Python stub for Python {_python()}, only for {known}", "use Python 3.10, 3.11 or 3.12"
        )
    if python_library() is None:
        raise _unusable(
            f"libpython{_python()}.so.1.0 is missing: Triton's Python stub loads it, but {sys.base_prefix} was built "
            f"without a shared library",
            f"install it (Debian, Ubuntu: apt install libpython{_python()}), or use a Python with one",
        )


def _unusable(reason: str, hint: str) -> ServerError:
    return ServerError(reason, failure=FailureClass.USER, hint=hint)


def _searched(triton: triton_installation.TritonInstallation) -> Iterator[tuple[str, Path, str]]:
    """The search path variables of a server's Python, a directory in each, and the separators that it must not contain."""
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
    """The libpython that the stub would load: this Python's, or the system's. None if there is neither."""
    name = f"libpython{_python()}.so.1.0"
    own = Path(str(sysconfig.get_config_var("LIBDIR"))) / name
    if own.is_file():
        return own
    library = ctypes.util.find_library(f"python{_python()}")
    return None if library is None else Path(library)


def environment(triton: triton_installation.TritonInstallation) -> dict[str, str]:
    """The server's environment, in which its Python stubs find this interpreter, its packages and this project."""
    variables = {"PATH": os.defpath, **without_secrets(os.environ)}
    for name, folders in _search_paths(triton).items():
        variables[name] = os.pathsep.join(filter(None, (*folders, variables.get(name))))
    return {**variables, **_VARIABLES}


def _search_paths(triton: triton_installation.TritonInstallation) -> dict[str, list[str]]:
    """Search path variable -> directories that a server needs first."""
    searched = {"PATH": [str(Path(sys.executable).parent)]}
    if triton.stubs is not None:
        searched["LD_LIBRARY_PATH"] = [str(triton.libraries), str(sysconfig.get_config_var("LIBDIR"))]
    root = PACKAGE.parent
    if root.name not in {"site-packages", "dist-packages"}:  # a checkout that is not installed
        searched["PYTHONPATH"] = [str(root)]
    return searched


def pasted(
    triton: triton_installation.TritonInstallation,
    words: Sequence[str],
    variables: Mapping[str, str],
    before: Mapping[str, str],
) -> PastedCommand:
    return PastedCommand(words, {**_VARIABLES, **variables}, _search_paths(triton), before)


def pasted_folders(
    triton: triton_installation.TritonInstallation, repository: Path
) -> tuple[Path, str, dict[str, str]]:
    """The model repository and the backend directory in a pasted command, and the shell commands that make them.

    Both consist of links: compiled Python must not change the repository, which is an artifact.
    """
    models = Path("$models")
    made = {"models": f'$(mktemp -d) && cp -rs {shlex.quote(str(repository))}/. "$models"'}
    if triton.stubs is None:
        return models, str(triton.backends), made
    python, stub = (shlex.quote(str(path)) for path in (triton.backends / "python", stub_binary(triton.stubs)))
    linked = f'ln -s {python}/* "$backends/python" && ln -sf {stub} "$backends/python"'
    made["backends"] = f'$(mktemp -d) && mkdir "$backends/python" && {linked}'
    return models, "$backends", made


def pasted_command(
    triton: triton_installation.TritonInstallation,
    repository: Path,
    *,
    ports: Ports,
    host: str,
    variables: Mapping[str, str],
) -> PastedCommand:
    models, backends, before = pasted_folders(triton, repository)
    return pasted(triton, _command(triton, models, backends, ports, host), variables, before)


def _command(
    triton: triton_installation.TritonInstallation, repository: Path, backends: object, ports: Ports, host: str
) -> list[str]:
    return [
        str(triton.binary),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *closing_options(triton)[0],
        *address_options(host, ports),
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
    ]


def link(triton: triton_installation.TritonInstallation, repository: Path, folder: Path) -> tuple[Path, Path]:
    """The model repository and the backend directory for a server, made of links in `folder`; see `links`."""
    folder.mkdir(parents=True, exist_ok=True)
    named = links.plain(folder)
    links.link_repository(repository, folder / "models")
    return named / "models", _link_backends(triton, named / "backends")


def _link_backends(triton: triton_installation.TritonInstallation, folder: Path) -> Path:
    """The backend directory. For the wheel, links in `folder` with the right stub."""
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
    return Ports(*unused_ports(len(Ports._fields), host))


def unused_ports(wanted: int, host: str = LOOPBACK) -> list[int]:
    """This many free ports. Raises OSError if `host` is not an address of this machine.

    A server binds them once it has loaded its models, which may be minutes later. So ports that the kernel assigns to
    connections are avoided if possible, as are ports that another living process of ours has chosen.
    """
    with contextlib.ExitStack() as stack:
        chosen: list[int] = []
        for port in (*_not_given_away(), *[0] * _TRIED_PORTS):
            each = stack.enter_context(socket.socket())
            try:
                each.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            if _choose(number := each.getsockname()[1]):
                chosen.append(number)
            if len(chosen) == wanted:
                break
        return chosen


def _choose(port: int) -> bool:
    """Mark a port as chosen while this process lives. False if it is marked already.

    The mark is an abstract socket name, which the kernel removes with the process.
    """
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0trtllm-pipeline port {port}")
    except OSError as error:
        mark.close()
        return error.errno != errno.EADDRINUSE  # or abstract names are not supported
    _CHOSEN.append(mark)
    return True


def _not_given_away() -> list[int]:
    """Some ports below those that the kernel assigns to connections, in random order. Empty if that range is unknown."""
    import random

    try:
        first = int(_GIVEN_AWAY.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return []
    below = range(_LEAST_PORT, first)
    return random.sample(below, min(_TRIED_PORTS, len(below)))


def busy_ports(ports: Iterable[int], host: str = LOOPBACK) -> list[int]:
    busy = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                busy.append(port)
    return busy


@dataclass(kw_only=True)
class RunningTriton(Server):
    """One Triton or several that load one engine, with the processes of their Python models."""

    prefix: str
    """Name prefix of all its files in shared memory."""
    models: tuple[str, ...]
    """Models for clients. The first is the default."""
    loaded: tuple[str, ...]
    """Models that must be ready."""
    started: float = field(default_factory=time.time)
    stubs: dict[int, str] = field(default_factory=dict)
    """Process id -> model of the processes that run Python models of the Triton that clients reach."""

    @property
    def pids(self) -> list[int]:
        """The Triton that clients reach."""
        return [self.process.pid]

    def ready_paths(self) -> list[str]:
        """Paths of the readiness checks of the server and its models."""
        return ["/v2/health/ready", *(f"/v2/models/{model}/ready" for model in self.loaded)]

    def ready(self) -> bool:
        """True if it reports that it is ready. Marks the directories that it has created until now."""
        self._mark_folders()
        return super().ready()

    def wait_ready(self, timeout_s: float, ended: threading.Event | None = None) -> None:
        """As for every server. Also finds the processes of its models."""
        super().wait_ready(timeout_s, ended)
        self.stubs = self._live_stubs()

    def died(self) -> ServerError:
        return diagnose(self.process.poll(), self.log, before=self.before)

    def dead_models(self) -> set[str]:
        """Models whose Python process has died since the last call. Triton still reports them as ready."""
        dead = dead_stubs(self.stubs, self.pids[0]) if self.stubs else {}
        for pid in dead:
            del self.stubs[pid]
        return set(dead.values())

    def service(self) -> dict[str, object]:
        """Endpoints, models and version. Raises OSError or HttpError if it does not respond, ServerError if another
        program does.
        """
        try:
            answer = json.loads(self.request("GET", "/v2")[1])
            server = {"name": str(answer["name"]), "version": str(answer["version"])}
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(
                f"port {self.ports.http} of {self.host} does not belong to Triton: another program uses the port",
                failure=FailureClass.TRANSIENT,
                log=self.log,
            ) from error
        return {
            "kind": "triton",
            "pid": self.pids[0],
            **{name: f"{self.host}:{port}" for name, port in self.ports._asdict().items()},
            "model": self.models[0],
            "bls_model": self.models[1] if len(self.models) > 1 else None,
            "server": server,
        }

    def _mark_folders(self) -> None:
        mark_folders(self.prefix, self.started, self.pids)

    def _live_stubs(self) -> dict[int, str]:
        stubs = (each for parent in self.pids[:1] for each in stub_processes(parent))
        return {pid: model for pid, model in stubs if _is_stub(pid, self.prefix)}


@dataclass(kw_only=True)
class TritonProcess(RunningTriton):
    """One Triton server."""

    process: subprocess.Popen[bytes]

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Terminate the server, wait, kill it, and clean up. Returns its exit status.

        A terminated server finishes its requests and ends its Python models. Once these have ended it is killed,
        because it would take another second to notice.
        """
        deadline = time.monotonic() + timeout_s
        self._mark_folders()
        if self.process.poll() is None:
            self.process.terminate()
            while self.process.poll() is None and time.monotonic() < deadline and self._live_stubs():
                time.sleep(0.02)
            self.process.kill()
            self.process.wait()
        _kill_all(self.prefix)
        remove_leftovers(self.prefix)
        return self.process.returncode


def closing_options(triton: triton_installation.TritonInstallation) -> tuple[list[str], list[str]]:
    """Options that close interfaces that no client needs, and the names of those that this Triton release lacks.

    Without --model-control-mode, models can be neither loaded nor unloaded by requests. A restricted interface opens for
    requests with a configured header. Any user can read a command line, so this header cannot be sent: its name contains
    a colon, which ends a name in HTTP/1.1 and which gRPC rejects.
    """
    header = f"no:{uuid.uuid4().hex}={uuid.uuid4().hex}"
    closing = {
        "--http-restricted-api": f"{','.join(CLOSED)}:{header}",
        "--grpc-restricted-protocol": f"{','.join(CLOSED)}:{header}",
        "--allow-vertex-ai": "false",  # otherwise AIP_MODE in the environment opens another port on all addresses
    }
    known = _help(triton)
    missing = [name for name in closing if known and f"{name} " not in known]
    return [f"{name}={value}" for name, value in closing.items() if name not in missing], missing


@functools.cache
def _help(triton: triton_installation.TritonInstallation) -> str:
    """The server's --help output; "" if it has none, which counts as having all options."""
    try:
        completed = subprocess.run(
            [triton.binary, "--help"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=environment(triton),
            timeout=_HELP_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (completed.stdout + completed.stderr).decode(errors="replace")


def new_prefix() -> str:
    """A unique name prefix for the shared memory of a new server, which also identifies the process that starts it."""
    return f"{_prefix(os.getpid())}{uuid.uuid4().hex[:8]}-"


def start(
    triton: triton_installation.TritonInstallation,
    repository: Path,
    models: Sequence[str],
    *,
    folder: Path,
    log: Path,
    ports: Ports,
    host: str = LOOPBACK,
    variables: Mapping[str, str] | None = None,
) -> TritonProcess:
    """Start `triton` on `repository` in this process's session and group. `models` are those in the repository.

    The server works on links in `folder`. `variables` are added to its environment. Its output is appended to `log`.
    """
    remove_stale_leftovers()
    prefix = new_prefix()
    models_folder, backends = link(triton, repository, folder)
    command = private([*_command(triton, models_folder, backends, ports, host), shared_memory_option(prefix)])
    if setpriv := shutil.which("setpriv"):
        # If this process is killed, the kernel ends the server, in addition to the watcher of the process group.
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
    return TritonProcess(
        process=process,
        ports=ports,
        output=log,
        host=reached_at(host),
        prefix=prefix,
        models=tuple(models),
        loaded=tuple(models),
        started=started,
    )


def reached_at(host: str) -> str:
    """The address for clients of a server that listens on `host`."""
    return LOOPBACK if host in WILDCARDS else host


def private(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` with files that only its user can read; see private.py.

    Raises ServerError if the program does not exist.
    """
    if shutil.which(command[0]) is None:
        raise ServerError(f"cannot start the server: {command[0]} is not a program", failure=FailureClass.USER)
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("private.py")), *command]


def diagnose(
    status: int | None,
    log: Path,
    who: str = "Triton",
    *,
    before: out_of_memory.Counts | None = None,
    beside: Sequence[Path] = (),
) -> ServerError:
    """The error for the end of a server, with the first cause in its log and in the logs `beside`."""
    match = re.search(
        r"failed to load '(\w+)' version \d+: (?:\w+: )?(.+?)\s*(?:\\n|\"?$)",
        "\n".join(LogText(log).lines),
        re.MULTILINE,
    )
    cause = f"could not load the model {match[1]}: {match[2]}" if match else None
    return explained(who, status, log, cause, before=before, beside=beside)


def stub_processes(parent: int) -> Iterator[tuple[int, str]]:
    """Process id and model name of the living Python model processes of a server."""
    for pid, process in guardian.process_table().items():
        if process.parent == parent and (model := model_run_by(pid)):
            yield pid, model


def dead_stubs(stubs: Mapping[int, str], parent: int) -> dict[int, str]:
    """The `stubs` that have ended. Each is checked on its own, because a listing of a busy system may miss one."""
    return {pid: model for pid, model in stubs.items() if not _lives(pid, parent)}


def _lives(pid: int, parent: int) -> bool:
    process = guardian.look_up(pid)
    return process is not None and not process.zombie and process.parent == parent


def _is_stub(pid: int, prefix: str) -> bool:
    """True if `pid` is still a stub of the server with this prefix: process ids are reused."""
    return prefix.encode() in guardian.proc_file(pid, "cmdline")


def _kill_all(prefix: str) -> None:
    """Kill the remaining processes of a server with this prefix. Parents in a listing of a busy system are not reliable."""
    deadline = time.monotonic() + _KILLED_S
    while (left := [pid for pid in guardian.process_table() if _is_stub(pid, prefix)]) and time.monotonic() < deadline:
        for pid in left:
            guardian.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _prefix(pid: int) -> str:
    """Name prefix for shared memory of servers started by `pid`, unique even if containers share /dev/shm."""
    return f"trtllm-pipeline-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-"


def mark_folders(prefix: str, since: float, servers: Iterable[int]) -> None:
    """Mark directories of the Python backends of `servers`, started at `since`, as belonging to `prefix`.

    Each creates /tmp/python_env_XXXXXX, which remains if Triton is killed or does not wait for its models. The name
    does not show the owner, so the first unmarked directory of this user since then is used.
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
    """Directories of this user's Python backends, with their modification times."""
    for folder in TEMPORARY.glob("python_env_*"):
        with contextlib.suppress(FileNotFoundError):
            about = folder.lstat()
            if about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode):
                yield folder, about.st_mtime


def _mark(folder: Path) -> str | None:
    """The prefix of the server that a directory is marked for. None for an unmarked directory."""
    try:
        return (folder / _MARK).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _remove(over: Callable[[str], bool]) -> None:
    """Delete the leftovers of servers for whose prefix, or file name that starts with it, `over` is true."""
    for path in SHARED_MEMORY.iterdir():
        if over(path.name):
            with contextlib.suppress(OSError):  # gone, or another user's: any user may create a file of this name
                about = path.lstat()
                if about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode):
                    path.unlink()
    for folder, _ in _own_folders():
        if over(_mark(folder) or ""):
            (folder / _MARK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or gone
                folder.rmdir()


def remove_leftovers(prefix: str) -> None:
    """Delete the shared memory files and directories of the server with this prefix."""
    _remove(lambda name: name.startswith(prefix))


def remove_stale_leftovers() -> None:
    """Delete the leftovers of servers whose starting process was killed."""
    own = _prefix(0).removesuffix("0-")

    def over(name: str) -> bool:
        pid = name.removeprefix(own).split("-")[0]
        return name.startswith(own) and pid.isdigit() and not Path(f"/proc/{pid}").exists()

    _remove(over)
