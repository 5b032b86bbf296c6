"""Finding a server, refusing environments it would fail in, and saying what ended it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.tensorrt.embedded import toolchain as embedded
from trtllm_pipeline.tensorrt.servers import triton_server
from trtllm_pipeline.tensorrt.servers.command_lines import reachable
from trtllm_pipeline.tensorrt.servers.server_process import quoted

WHEEL = triton_installation.TritonInstallation(
    Path("/t/bin/tritonserver"), "nvidia-pytriton 0.7.0", Path("/t/backends"), Path("/t/stubs")
)


@pytest.fixture
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> triton_installation.TritonInstallation:
    """A wheel's server whose environment has nothing wrong with it."""
    stub = triton_server.stub_binary(tmp_path / "stubs")
    stub.parent.mkdir(parents=True)
    stub.touch()
    backend = tmp_path / "backends" / "python"
    backend.mkdir(parents=True)
    (backend / "libtriton_python.so").touch()
    monkeypatch.setattr(triton_server, "version_of", lambda _package: "1.26.4")
    monkeypatch.setattr(triton_server, "python_library", lambda: Path("/lib/libpython3.so"))
    return triton_installation.TritonInstallation(
        Path("/t/bin/tritonserver"), "wheel", tmp_path / "backends", tmp_path / "stubs", tmp_path
    )


def test_a_server_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "home" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(binary.parent))
    monkeypatch.setenv("TRITON_SERVER_VERSION", "2.60.0")
    found = triton_installation.find()
    assert (found.binary, found.source, found.stubs) == (binary, "tritonserver 2.60.0", None)
    assert found.backends == tmp_path / "home" / "backends"


def test_no_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(triton_installation, "CONTAINER_BINARY", Path("/nowhere/tritonserver"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ServerError, match="no Triton Inference Server found") as error:
        triton_installation.find()
    assert error.value.failure is FailureClass.USER
    assert "pip install" in str(error.value.hint)


def test_the_wheel_is_found_without_importing_it() -> None:
    pytest.importorskip("tritonclient")
    if importlib.util.find_spec("pytriton") is None:
        pytest.skip("nvidia-pytriton is not installed")
    code = "import sys; from trtllm_pipeline.base.machine import triton_installation; triton_installation.find(); print('pytriton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout == "False\n"


def test_a_healthy_environment_passes(healthy: triton_installation.TritonInstallation) -> None:
    triton_server.check(healthy, 4)


@pytest.mark.parametrize("version", ["2.0.0", "2.4.1", "3.0.0rc1"])
def test_numpy_2_is_refused(
    healthy: triton_installation.TritonInstallation, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(triton_server, "version_of", lambda _package: version)
    with pytest.raises(ServerError, match=f"numpy {version} is installed") as error:
        triton_server.check(healthy, 4)
    assert error.value.hint == "pip install 'numpy<2'"


def test_numpy_of_this_python_matters_to_the_wheels_stubs_alone(
    healthy: triton_installation.TritonInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's stubs run under the container's Python, whatever this environment has."""
    monkeypatch.setattr(triton_server, "version_of", lambda _package: "2.4.1")
    triton_server.check(dataclasses.replace(healthy, stubs=None, libraries=None), 4)


def test_a_python_without_stub_is_refused(healthy: triton_installation.TritonInstallation) -> None:
    assert healthy.stubs is not None
    folder = triton_server.stub_binary(healthy.stubs).parent
    folder.rename(folder.with_name("2.7"))
    with pytest.raises(ServerError, match=r"no Python stub for Python 3\.\d+, only for 2.7"):
        triton_server.check(healthy, 4)


def test_a_missing_libpython_is_named(
    healthy: triton_installation.TritonInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_server, "python_library", lambda: None)
    with pytest.raises(ServerError, match=r"libpython3\.\d+\.so\.1\.0 is missing"):
        triton_server.check(healthy, 4)


@pytest.mark.parametrize(
    ("folder", "named"),
    [("a:b", "contains ':', which separates directories in LD_LIBRARY_PATH"), ("a;b", "contains ';'")],
)
def test_an_environment_in_a_folder_that_no_list_can_hold_is_refused(
    healthy: triton_installation.TritonInstallation, folder: str, named: str
) -> None:
    with pytest.raises(ServerError, match=named) as error:
        triton_server.check(dataclasses.replace(healthy, libraries=Path("/home") / folder), 4)
    assert error.value.failure is FailureClass.USER
    triton_server.check(dataclasses.replace(healthy, libraries=Path("/home/it's a (new) ünï")), 4)


def test_small_shared_memory_is_named(
    healthy: triton_installation.TritonInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=1024, f_frsize=4096))
    triton_server.check(healthy, 1)
    with pytest.raises(ServerError, match="has 4 MiB free; 4 Python models need 10") as error:
        triton_server.check(healthy, 4)
    assert "--shm-size" in str(error.value.hint)


def test_backends_are_links_that_can_be_made_twice(
    healthy: triton_installation.TritonInstallation, tmp_path: Path
) -> None:
    (tmp_path / "repository").mkdir()
    for _ in range(2):
        models, folder = triton_server.link(healthy, tmp_path / "repository", tmp_path / "links")
    assert models.is_dir()
    links = {path.name: path.is_symlink() for path in (folder / "python").iterdir()}
    assert links == {"libtriton_python.so": True, triton_server.STUB: True}


def test_the_server_s_environment_puts_this_python_first(
    healthy: triton_installation.TritonInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own/lib")
    variables = triton_server.environment(healthy)
    assert variables["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert variables["LD_LIBRARY_PATH"].startswith(f"{healthy.libraries}:")
    assert variables["LD_LIBRARY_PATH"].endswith(":/own/lib")


@pytest.mark.parametrize(
    ("log", "status", "failure", "words"),
    [
        (
            "E1 model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' version 1: Internal: ServerError: no such engine\"",
            1,
            FailureClass.BUG,
            "could not load the model tensorrt_llm: ServerError: no such engine",
        ),
        (
            "E1 main.cc:1] Error binding 127.0.0.1:8000: Address already in use",
            1,
            FailureClass.TRANSIENT,
            "exit status 1",
        ),
        (
            "failed to load 'x' version 1: Internal: std::bad_alloc",
            1,
            FailureClass.OUT_OF_MEMORY,
            "model x: std::bad_alloc",
        ),
        ("Unable to create shared memory region 'y': No space left on device", 1, FailureClass.USER, "exit status 1"),
        ("all is well", -signal.SIGKILL, FailureClass.BUG, "was ended by signal SIGKILL"),
        ("all is well", -signal.SIGSEGV, FailureClass.BUG, "was ended by signal SIGSEGV"),
    ],
)
def test_a_dead_server_is_explained(tmp_path: Path, log: str, status: int, failure: FailureClass, words: str) -> None:
    path = tmp_path / "server.log"
    table = "+-------+---------+\n| Model | Status  |\n+-------+---------+\n| x     | READY   |\n+-------+---------+\n"
    path.write_text(f"{log}\nW1 CudaDriverHelper has not been initialized.\n\n{table}the last line\n")
    error = triton_server.diagnose(status, path)
    assert error.failure is failure
    assert words in error.message
    assert "\n" not in error.message
    assert error.log == path
    assert quoted(path).splitlines() == [f"the end of {path}:", f"    {log}", "    the last line"]


def test_a_crash_under_a_limit_of_the_address_space_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.log"
    path.write_text("all is well\n")
    assert triton_server.diagnose(-signal.SIGSEGV, path).hint is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2_000_000 << 10, resource.RLIM_INFINITY))
    hint = triton_server.diagnose(-signal.SIGSEGV, path).hint
    assert "1953 MiB" in hint
    assert "ulimit -v unlimited" in hint
    assert triton_server.diagnose(1, path).hint is None


def test_a_model_s_own_words_are_the_message_without_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    words = "failed to load 'x' version 1: Internal: ServerError: no such file\\n\\nAt:\\n  /a/b.py(1): initialize\\n"
    path.write_text(
        f'E1122 11:24:17.392562 24665 model_lifecycle.cc:642] "{words}"\n'
        "I1122 11:24:17.392958 24665 server.cc:604] \n"
        'I1122 11:24:17.392958 24665 x.cc:1] "Failed to initialize Python stub"\n'
    )
    error = triton_server.diagnose(1, path)
    assert error.message == "Triton could not load the model x: ServerError: no such file"
    assert error.failure is FailureClass.BUG
    assert error.hint is not None
    assert "missing or not set here" in error.hint
    assert "server.cc" not in quoted(path)


def test_the_line_that_calls_itself_an_error_is_the_message(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text('I1 starting\nE1 server.cc:10] "no such option"\nI1 waiting for requests to complete\nbye\n')
    assert (
        triton_server.diagnose(1, path).message
        == "Triton ended with exit status 1; the first error in its log: no such option"
    )
    path.write_text("I1 starting\nbye\n")
    assert triton_server.diagnose(1, path).message == "Triton ended with exit status 1; its last line: bye"


def closing(folder: Path, knows: str) -> tuple[list[str], list[str]]:
    """The options for a server whose --help says `knows`."""
    binary = folder / f"tritonserver-{len(list(folder.iterdir()))}"
    binary.write_text(f"#!/bin/sh\necho '{knows}' >&2\nexit 1\n")
    binary.chmod(0o755)
    return triton_server.closing_options(triton_installation.TritonInstallation(binary, "test", folder))


def test_what_no_client_needs_is_closed_by_a_header_that_none_can_send(tmp_path: Path) -> None:
    every = "  --http-restricted-api <a>\n  --grpc-restricted-protocol <b>\n  --allow-vertex-ai <boolean>"
    options, missing = closing(tmp_path, every)
    assert missing == []
    assert options[2] == "--allow-vertex-ai=false"
    apis, _, header = options[0].removeprefix("--http-restricted-api=").partition(":")
    assert apis.split(",") == ["shared-memory", "model-repository", "trace", "logging"]
    assert ":" in header.partition("=")[0]
    assert options[1] == f"--grpc-restricted-protocol={apis}:{header}"
    assert closing(tmp_path, every)[0][0] != options[0], "another one each time"


def test_options_that_a_triton_lacks_are_left_out_and_named(tmp_path: Path) -> None:
    options, missing = closing(
        tmp_path, "  --http-restricted-api-of-another-kind <a>\n  --grpc-restricted-protocol <b>"
    )
    assert [option.partition("=")[0] for option in options] == ["--grpc-restricted-protocol"]
    assert missing == ["--http-restricted-api", "--allow-vertex-ai"]


def test_a_triton_that_says_nothing_of_its_options_is_taken_to_have_them(tmp_path: Path) -> None:
    assert (
        triton_server.closing_options(triton_installation.TritonInstallation(tmp_path / "none", "test", tmp_path))[1]
        == []
    )


def test_ports_are_free_different_and_found_busy_once_taken() -> None:
    ports = triton_server.free_ports()
    assert len(set(ports)) == 3
    assert triton_server.busy_ports(ports) == []
    with socket.socket() as other:
        other.bind((triton_server.LOOPBACK, ports.grpc))
        other.listen()
        assert triton_server.busy_ports(ports) == [ports.grpc]


def test_ports_are_none_that_the_kernel_gives_to_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server listens after it has loaded its models; a connection that was made meanwhile may have the port otherwise."""
    given = tmp_path / "ip_local_port_range"
    given.write_text("32768\t60999\n")
    monkeypatch.setattr(triton_server, "_GIVEN_AWAY", given)
    assert all(20_000 <= port < 32_768 for _ in range(20) for port in triton_server.free_ports())
    with socket.socket() as other:
        other.bind((triton_server.LOOPBACK, 0))
        given.write_text(f"{other.getsockname()[1] + 1} 60999")
        monkeypatch.setattr(triton_server, "_LEAST_PORT", other.getsockname()[1])
        taken = triton_server.free_ports()
        assert len(set(taken)) == 3
        assert other.getsockname()[1] not in taken
    for unknown in ("", "1024 65535", "none"):
        given.write_text(unknown)
        assert len(set(triton_server.free_ports())) == 3
    with pytest.raises(OSError, match="address"):
        triton_server.free_ports("192.0.2.1")


def test_ports_are_none_that_a_server_which_still_loads_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    several = triton_server.unused_ports(6)
    triton_server._CHOSEN.clear()
    monkeypatch.setattr(triton_server, "_not_given_away", lambda: several)
    assert triton_server.unused_ports(2) == several[:2]
    assert triton_server.unused_ports(2) == several[2:4], "nothing listens at the first two, but they are chosen"
    program = f"from trtllm_pipeline.tensorrt.servers import triton_server as triton; triton._not_given_away = lambda: {several}; print(*triton.unused_ports(2))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.split() == [str(port) for port in several[4:]], "nor does another process choose them"
    assert triton_server.unused_ports(2) == several[4:], "which let them go when it ended"
    assert not set(triton_server.unused_ports(2)) & set(several), "others, where all are chosen"


def test_an_answer_of_another_program_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its port was free when it was chosen; before the server listens there, something else may."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        ports = triton_server.Ports(http=8000, grpc=8001, metrics=8002)
        server = triton_server.TritonProcess(
            process=process, ports=ports, output=tmp_path / "log", prefix="none", models=("m",), loaded=("m",)
        )
        for answer in (b"", b"[]", b"{}", b"null"):
            monkeypatch.setattr(server, "request", lambda *_, answer=answer: (200, answer))
            with pytest.raises(ServerError, match=r"port 8000 of 127\.0\.0\.1 does not belong to Triton") as error:
                server.service()
            assert error.value.failure is FailureClass.TRANSIENT
    finally:
        process.kill()
        process.wait()


def test_a_stub_that_no_listing_has_shown_ends_with_its_server(tmp_path: Path) -> None:
    prefix = triton_server.new_prefix()
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    left, others = (
        subprocess.Popen([sys.executable, "-c", deaf, each], stdout=subprocess.PIPE)
        for each in (prefix, triton_server.new_prefix())
    )
    try:
        for each in (left, others):
            each.stdout.readline()
        server = triton_server.TritonProcess(
            process=subprocess.Popen(["sleep", "60"]),
            ports=triton_server.Ports(http=8000, grpc=8001, metrics=8002),
            output=tmp_path / "log",
            prefix=prefix,
            models=("m",),
            loaded=("m",),
        )
        server.stop()
        assert left.wait(60) == -signal.SIGKILL
        assert others.poll() is None
    finally:
        for each in (left, others):
            each.kill()
            each.wait()


def test_a_folder_of_the_python_backend_is_marked_once_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_server, "TEMPORARY", tmp_path)
    monkeypatch.setattr(triton_server, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(triton_server, "stub_processes", lambda pid: iter([(2, "tensorrt_llm")] if pid else []))
    old, *new = (tmp_path / f"python_env_{name}" for name in ("old", "new1", "new2", "new3", "new4"))
    for folder in (old, *new):
        folder.mkdir()
    (new[0] / "0").mkdir()
    os.utime(old, (1000, 1000))
    since = new[1].stat().st_mtime
    for _ in range(2):
        triton_server.mark_folders("one-", since, [1])
        triton_server.mark_folders("none-", since, [0])  # runs no Python model
        triton_server.mark_folders("two-", since, [0, 1, 1])
    marks = {path.parent: path.read_text() for path in tmp_path.glob("*/*") if path.is_file()}
    assert sorted(marks.values()) == ["one-", "two-", "two-"]
    assert set(marks) < set(new)
    triton_server.remove_leftovers("two-")
    assert old.exists()
    assert (new[0] / "0").exists(), "only empty ones are removed"
    assert all(folder.exists() for folder, mark in marks.items() if mark == "one-")
    assert not any(folder.exists() for folder, mark in marks.items() if mark == "two-" and folder != new[0])


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", False), ("127.0.0.2", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_an_address_that_others_reach_is_warned_of(host: str, warned: bool) -> None:
    said = reachable(host)
    assert (said is not None) is warned
    assert said is None or "anyone who can reach it can send prompts" in said


def test_only_shared_memory_of_dead_starters_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_server, "SHARED_MEMORY", tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    kept = [f"trtllm-pipeline-{namespace}-{os.getpid()}-ab-1", f"trtllm-pipeline-1-{ended.pid}-ab-1", "other"]
    for name in (*kept, f"trtllm-pipeline-{namespace}-{ended.pid}-ab-1"):
        (tmp_path / name).touch()
    triton_server.remove_stale_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize(
    ("variables", "source"),
    [({}, "tritonserver unknown"), ({"NVIDIA_TRITON_SERVER_VERSION": "24.11"}, "tritonserver 24.11")],
)
def test_a_server_on_path_is_named_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], source: str
) -> None:
    monkeypatch.delenv("TRITON_SERVER_VERSION", raising=False)
    monkeypatch.delenv("NVIDIA_TRITON_SERVER_VERSION", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tritonserver").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert triton_installation.find().source == source
    assert embedded._triton() == source


def test_the_toolchain_asks_for_any_server_not_for_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> triton_installation.TritonInstallation:
        raise ServerError("no Triton Inference Server found")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytriton" else object())
    monkeypatch.setattr(sys, "version_info", (3, 11, 4))
    monkeypatch.setattr(triton_installation, "find", lambda: WHEEL)
    assert embedded._missing(Machine(cpus=1, cpu="test")) is None
    monkeypatch.setattr(triton_installation, "find", nothing)
    assert embedded._missing(Machine(cpus=1, cpu="test")) == "the package nvidia-pytriton is not installed"


def test_a_model_is_dead_when_its_own_process_has_ended() -> None:
    def stub(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    lives, ends, zombie = stub("input()"), stub("pass"), stub("pass")
    try:
        ends.wait(60)
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        stubs = {lives.pid: "preprocessing", ends.pid: "postprocessing", zombie.pid: "tensorrt_llm_bls"}
        expected = {ends.pid: "postprocessing", zombie.pid: "tensorrt_llm_bls"}
        assert triton_server.dead_stubs(stubs, os.getpid()) == expected
        reused = {lives.pid: "preprocessing"}
        assert triton_server.dead_stubs(reused, os.getppid()) == reused, "a process of another parent has taken the id"
    finally:
        for process in (lives, zombie):
            process.communicate(b"\n", timeout=60)


def test_what_others_put_into_shared_memory_under_our_names_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_server, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(triton_server, "TEMPORARY", tmp_path)
    name = f"{triton_server._prefix(2**22 + 1)}00000000-x"  # of a process that cannot be
    (tmp_path / name).touch()
    (tmp_path / f"{name}-folder").mkdir()
    (tmp_path / f"{name}-link").symlink_to(tmp_path)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        triton_server.remove_stale_leftovers()
    assert len(list(tmp_path.iterdir())) == 3
    triton_server.remove_stale_leftovers()
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}-folder", f"{name}-link"}
