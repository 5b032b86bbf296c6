"""The launch stage's parameters, and its watch over a server, without one."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.contexts import context
from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.files.writing import read_object
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.models.triton_repository.model_names import ENSEMBLE
from trtllm_pipeline.tensorrt.diagnosis import out_of_memory
from trtllm_pipeline.tensorrt.servers import triton_server
from trtllm_pipeline.tensorrt.stage import launch
from trtllm_pipeline.tensorrt.stage.params import LaunchEmbedded


class FakeServer:
    """A server whose Python processes die on the looks given."""

    def __init__(self, dead: list[set[str]], status: int | None = None) -> None:
        self.dead = dead
        self.process = SimpleNamespace(poll=lambda: status, returncode=status)
        self.log = Path("server.log")
        self.before = out_of_memory.counts()
        self.ended = threading.Event()

    def dead_models(self) -> set[str]:
        if not self.dead:
            self.ended.set()
            return set()
        return self.dead.pop(0)

    def died(self) -> ServerError:
        return ServerError("the server died")


def watch(server: FakeServer) -> set[str]:
    return launch.watch(cast("triton_server.TritonProcess", cast("Any", server)), server.ended, os.getppid())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LOOK_EVERY_S", 0.001)


def test_dead_models_are_named() -> None:
    assert watch(FakeServer([set(), {"tensorrt_llm"}])) == {"tensorrt_llm"}
    assert watch(FakeServer([set(), set()])) == set()


def test_a_dead_server_ends_it() -> None:
    with pytest.raises(ServerError, match="the server died"):
        watch(FakeServer([], status=1))


def test_it_ends_when_its_parent_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([10, 10, 1])  # asked by `watch` above, then on each look
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    server = FakeServer([set()] * 100)
    watch(server)
    assert len(server.dead) == 99


def test_signals_set_the_event_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with launch.stop_requested() as ended:
        assert not ended.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(60)
    assert signal.getsignal(signal.SIGTERM) is before


def test_fixed_ports_are_kept_and_the_rest_is_free() -> None:
    (port,) = triton_server.unused_ports(1)
    ports = launch.ports(LaunchEmbedded(grpc_port=port))
    assert ports.grpc == port
    assert len({*ports}) == 3


def test_a_taken_port_is_named_and_passing() -> None:
    with socket.socket() as other:
        other.bind((triton_server.LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 is used") as error:
            launch.ports(LaunchEmbedded(http_port=port))
    assert error.value.failure is FailureClass.TRANSIENT


def test_a_folder_that_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="has no model ensemble"):
        launch.run(context(LaunchEmbedded, {}, {"repository": tmp_path}, {}, tmp_path, tmp_path))


class Dying:
    """Servers that die at once, or of which a model does, `lives` of them; the next one is told to end."""

    def __init__(self, lives: int, monkeypatch: pytest.MonkeyPatch, *, model: bool = False) -> None:
        self.settings: list[LaunchEmbedded] = []
        self.folder = Path()
        self.repairs: list[str | None] = []
        """What repair.json said whenever one was stopped."""
        self.stopped = 0
        self.lives = lives
        self.model = model
        monkeypatch.setattr(
            triton_installation,
            "find",
            lambda: triton_installation.TritonInstallation(Path("tritonserver"), "a package", Path()),
        )
        monkeypatch.setattr(triton_server, "check", lambda *_args, **_options: None)
        monkeypatch.setattr(triton_server, "closing_options", lambda _triton: ([], []))
        monkeypatch.setattr(launch, "start", self.start)

    def start(self, _begin: object, settings: LaunchEmbedded, ended: threading.Event) -> SimpleNamespace:
        self.settings.append(settings)
        dies = len(self.settings) <= self.lives
        status = -11 if dies and not self.model else None

        def dead_models() -> set[str]:
            if dies:
                return {"tensorrt_llm"}
            ended.set()
            return set()

        return SimpleNamespace(
            process=SimpleNamespace(poll=lambda: status),
            ports=triton_server.Ports(1001, 1002, 1003),
            log=Path("server.log"),
            before=out_of_memory.counts(),
            died=lambda: ServerError("ended by SIGSEGV"),
            dead_models=dead_models,
            service=lambda: {"http": "h", "grpc": "g", "metrics": "m"},
            stop=self.stop,
        )

    def stop(self, _timeout_s: float) -> None:
        self.stopped += 1
        self.repairs.append((read_object(self.folder / launch.REPAIR_FILE) or {}).get("reason"))

    def run(self, folder: Path, **params: int | str) -> None:
        self.folder = folder
        (folder / ENSEMBLE).mkdir()
        (folder / ENSEMBLE / "config.pbtxt").touch()
        launch.run(context(LaunchEmbedded, params, {"repository": folder}, {}, folder, folder))


def test_a_dead_server_is_started_again_on_its_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = Dying(3, monkeypatch)
    dying.run(tmp_path, restarts=3)
    assert [(each.http_port, each.metrics_port) for each in dying.settings] == [(0, 0), *[(1001, 1003)] * 3]
    assert dying.stopped == 4
    said = capsys.readouterr().out
    assert "ended by SIGSEGV\nstarting it again (1 of 3 times)" in said
    assert said.count("ready: ") == 4


@pytest.mark.parametrize("restarts", [3, 0])  # a pipeline's server is not started again
def test_a_server_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    dying = Dying(9, monkeypatch)
    with pytest.raises(ServerError, match="SIGSEGV"):
        dying.run(tmp_path, restarts=restarts)
    assert (len(dying.settings), dying.stopped) == (restarts + 1, restarts + 1)


def test_a_server_is_started_again_for_a_dead_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = Dying(launch.REPAIRS, monkeypatch, model=True)
    dying.run(tmp_path)
    assert [each.grpc_port for each in dying.settings] == [0, *[1002] * launch.REPAIRS]
    assert dying.stopped == launch.REPAIRS + 1
    assert "the process of model tensorrt_llm died" in capsys.readouterr().out
    died = "the process of model tensorrt_llm died"
    assert dying.repairs == [*[died] * launch.REPAIRS, None], "whoever keeps it knows"
    assert not {"service.json", "repair.json"} & {path.name for path in tmp_path.iterdir()}


def test_repeated_deaths_of_models_end_it_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = Dying(9, monkeypatch, model=True)
    with pytest.raises(ServerError, match="process of model tensorrt_llm died, death number 4"):
        dying.run(tmp_path)
    assert dying.stopped == launch.REPAIRS + 1


def test_options_that_this_triton_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dying = Dying(0, monkeypatch)
    found = triton_installation.TritonInstallation(Path("tritonserver"), "tritonserver 2.30", Path())
    monkeypatch.setattr(triton_installation, "find", lambda: found)
    monkeypatch.setattr(triton_server, "closing_options", lambda _triton: ([], ["--http-restricted-api"]))
    dying.run(tmp_path)
    assert "warning: tritonserver 2.30 has no --http-restricted-api" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_who_reaches_it_is_said_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str, warned: bool
) -> None:
    Dying(0, monkeypatch).run(tmp_path, host=host)
    assert ("docs/security.md" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (LaunchEmbedded(http_port=18000, grpc_port=18000), "must differ: http_port 18000, grpc_port 18000"),
        (LaunchEmbedded(host="not.a.host.invalid"), "host 'not.a.host.invalid' cannot be listened on"),
        (LaunchEmbedded(host="8.8.8.8"), "host '8.8.8.8' cannot be listened on: Cannot assign"),
    ],
)
def test_what_cannot_be_listened_on_is_refused_with_words(settings: LaunchEmbedded, words: str) -> None:
    with pytest.raises(ServerError, match=words) as error:
        launch.ports(settings)
    assert error.value.failure is FailureClass.USER


def test_a_hangup_ends_it_in_order_unless_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with launch.stop_requested() as ended:
            os.kill(os.getpid(), signal.SIGHUP)
            assert ended.wait(60)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with launch.stop_requested() as ended:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not ended.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_kernel_s_word_for_a_dead_model_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = FakeServer([])
    server.before = out_of_memory.Counts(group={"memory.events": 0})
    monkeypatch.setattr(out_of_memory, "counts", lambda: out_of_memory.Counts(group={"memory.events": 0}))
    assert "memory" not in launch._repaired(server, {"tensorrt_llm"}, 1)[0]
    monkeypatch.setattr(out_of_memory, "counts", lambda: out_of_memory.Counts(group={"memory.events": 1}))
    counted = "the kernel killed it for lack of memory"
    assert counted in launch._repaired(server, {"tensorrt_llm"}, 1)[0]
    with pytest.raises(ServerError, match=counted) as error:
        launch._repaired(server, {"tensorrt_llm"}, launch.REPAIRS + 1)
    assert error.value.failure is FailureClass.OUT_OF_MEMORY
