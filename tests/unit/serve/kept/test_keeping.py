from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.signed import write_key
from trtllm_pipeline.base.domain import Exclusive, Scope, StageRunId
from trtllm_pipeline.base.errors import ServerError, StateError, UsageError
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.orchestrate.run.executor import Job
from trtllm_pipeline.orchestrate.store import claims
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.serve.kept import control, keeper, servers, shown, systemd
from trtllm_pipeline.serve.kept.health import Health, server_health
from trtllm_pipeline.serve.kept.serve_target import of_folder, require_text
from trtllm_pipeline.serve.kept.servers import Keeper, KeptRecord, State, find, folder_of, look

ODD = "a b'\";$(x)`%n\\é"


def record(**changes: Any) -> KeptRecord:
    about: dict[str, Any] = {
        "toolchain": "embedded",
        "model": "tiny",
        "since_s": 0.0,
        "started_s": 0.0,
        "cell": "m/fp8",
    }
    return KeptRecord(**{**about, **changes})


def recorded(workspace: Path, name: str = "one", **changes: Any) -> Path:
    """The directory of a managed server with this record."""
    folder = folder_of(workspace, name)
    folder.mkdir(parents=True)
    record(**changes).write(folder)
    return folder


def locked(folder: Path, *, shared: bool = False) -> claims.Claim:
    lock = claims.take(folder / "lock", shared=shared, remove=False)
    assert lock is not None
    return lock


def test_pauses_grow_to_a_minute_and_are_short_again_after_a_quiet_one() -> None:
    pauses, pause_s = [], keeper.FIRST_PAUSE_S
    for _ in range(9):
        now_s, pause_s = keeper.next_pause(pause_s, 5.0)
        pauses.append(now_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert keeper.next_pause(60.0, None) == (60.0, 60.0)
    assert keeper.next_pause(60.0, keeper.STEADY_S) == (1.0, 2.0)


def test_a_long_log_is_begun_anew_for_whoever_appends_to_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    keeper.begin_anew(log, 9)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"0123456789")
        keeper.begin_anew(log, 10)
        assert log.read_bytes() == b"0123456789"
        keeper.begin_anew(log, 9)
        writer.write(b"more")
    assert log.read_bytes() == b"more"
    assert (tmp_path / "server.log.1").read_bytes() == b"0123456789"


def test_a_reason_is_not_taken_from_an_earlier_start_nor_from_the_keeper(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA out of memory\n", encoding="utf-8")
    program = keeper._Program(
        "server", (), log, log, tmp_path / "ready", 1.0, server_health, log_bytes=log.stat().st_size
    )
    assert "\n".join(program.printed().lines).strip() == ""
    with log.open("a", encoding="utf-8") as file:
        file.write("loading\n2026-11-22 18:44:49 keeper: the server is ready\n")
    assert "\n".join(program.printed().lines).strip() == "loading"
    log.write_text("anew\n", encoding="utf-8")
    assert "\n".join(program.printed().lines).strip() == "anew"


def test_a_server_that_is_started_just_now_is_not_removed(tmp_path: Path) -> None:
    folder = recorded(tmp_path, state=State.STOPPED)
    lock = locked(folder)
    with pytest.raises(UsageError, match="was not removed"):
        control.remove(look(folder))
    assert (folder / "server.json").exists()
    lock.release()
    server = look(folder)
    control.remove(server)
    assert not folder.parent.exists()
    control.remove(server)  # by someone else meanwhile


def test_no_server_is_kept_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record().write(tmp_path)
    lock = locked(tmp_path)
    assert keeper.main([str(tmp_path)]) == 1
    assert "is already running" in capsys.readouterr().err
    lock.release()


def test_a_lease_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    held, gpus = keeper.lease(0)
    assert gpus == ()
    keeper.lease(0)[0][0].release()  # several are kept at once
    for claim in held:
        claim.release()
    measuring = claims.lease_machine((), exclusive=Exclusive.MACHINE)
    with pytest.raises(StateError, match="a run is measuring on this machine now"):
        keeper.lease(0)
    with pytest.raises(StateError, match="needs 2 GPUs, this machine has 0"):
        keeper.lease(2)
    for claim in measuring[0]:
        claim.release()


def test_a_lease_is_not_refused_for_what_waits_for_the_machine_and_has_a_part_of_it_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    waiting = claims.lease_machine((), exclusive=Exclusive.GPU)
    assert waiting is not None
    sleep = time.sleep

    def pause(seconds: float) -> None:
        if seconds > claims._LOOK_S:  # longer than claims themselves look again
            for claim in waiting[0]:
                claim.release()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", pause)
    for claim in keeper.lease(0)[0]:
        claim.release()


class _Guardian:
    """Takes orders."""

    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []

    def signal(self, name: str, signo: int) -> None:
        self.orders.append((name, signo))

    def spawn(self, name: str, *_words: Any, **_more: Any) -> None:
        self.orders.append((name, "spawn"))

    def read_events(self) -> list[Any]:
        return []

    def close(self) -> None:
        """Nothing to end."""


class _Answers(Health):
    """What is found out about a server."""

    def __init__(self) -> None:
        self.found: tuple[float, str] | None = None

    def unresponsive(self) -> tuple[float, str] | None:
        return self.found

    def close(self) -> None:
        """Nothing to end."""


def job(folder: Path, *inputs: str) -> Job:
    """The launch stage of a managed server."""
    told = {"stage": "launch", "toolchain": "embedded", "fingerprint": "", "program": None, "params_class": ""}
    paths = {"out": str(folder / "out"), "attempt": str(folder), "timeout_s": 1.0, "section": "serve"}
    return Job(
        id=StageRunId("serve"),
        scope=Scope.SERVICE,
        commands=(("true",),),
        environment={},
        params={},
        inputs={name: name for name in inputs},
        files={},
        **told,  # type: ignore[arg-type]
        **paths,  # type: ignore[arg-type]
    )


def kept(workspace: Path, *, ready: bool = True, checked: bool = True, **changes: Any) -> keeper._Kept:
    """A server as its keeper sees it, whose programs are only said to run."""
    folder = recorded(workspace, **changes)
    job(folder).write(folder / "job.json")
    lock = locked(folder)
    found = keeper._Kept(folder, lock, checked=checked)
    found.guardian = _Guardian()  # type: ignore[assignment]
    if ready:
        (program,) = found.programs
        program.runs, program.worked, program.ready_s, program.health = True, True, time.monotonic(), _Answers()
        found.tell(State.READY)
    return found


def test_a_server_that_hangs_is_unresponsive_until_it_answers(tmp_path: Path) -> None:
    found = kept(tmp_path)
    health = found.programs[0].health
    assert isinstance(health, _Answers)
    begun_s = time.time()
    health.found = time.monotonic() - 1000, "GET /health: no complete answer within 3 s"
    found._look()
    told = look(found.folder)
    assert told.state is State.UNRESPONSIVE
    assert begun_s - 1 < told.record.since_s + 1000 < time.time() + 1, "since when"
    assert (told.reason or "").startswith("the server has not responded since ")
    assert told.record.hint == "pipeline serve restart one"
    assert found.guardian.orders == [], "nobody asked for a restart"  # type: ignore[union-attr]
    assert told.endpoint() is None
    health.found = None
    found._look()
    assert (look(found.folder).state, look(found.folder).reason) == (State.READY, None)


def test_a_server_that_hangs_too_long_is_started_again_where_that_was_asked(tmp_path: Path) -> None:
    found = kept(tmp_path, restart=True, unresponsive_timeout_s=600.0)
    (program,) = found.programs
    assert isinstance(program.health, _Answers)
    program.health.found = time.monotonic() - 5, "why"
    found._look()
    assert look(found.folder).state is State.UNRESPONSIVE
    assert program.hung is None
    program.health.found = time.monotonic() - 601, "why"
    for _ in range(3):
        found._look()
    assert found.guardian.orders == [("server", signal.SIGTERM)]  # type: ignore[union-attr]
    found._died(program, ServerError("it was ended"))
    told = look(found.folder)
    assert (told.state, told.reason) == (State.RESTARTING, "the server did not respond for 600 s: why")
    assert (program.hung, program.health) == (None, None)


def test_while_the_launch_stage_starts_its_server_again_it_is_not_ready(tmp_path: Path) -> None:
    found = kept(tmp_path)
    (found.folder / "service.json").write_text(json.dumps({"http": "127.0.0.1:1", "grpc": "", "model": "m"}))
    repair = found.folder / "repair.json"
    repair.write_text(json.dumps({"schema": 1, "reason": "the process of model x died"}))
    for _ in range(2):
        found._look()
    told = look(found.folder)
    assert (told.state, told.reason) == (State.RESTARTING, "the process of model x died")
    assert told.record.restarts == 1
    repair.unlink()
    found._look()
    assert look(found.folder).state is State.READY
    found.programs[0].not_ready()


def test_a_keeper_that_cannot_write_says_in_its_lock_why_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeper, "here", classmethod(lambda cls: cls(2**22, 1, servers.boot_id())))
    found = kept(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as limited:
        limited.setattr(KeptRecord, "write", full)
        found.tell(State.FAILED, "Triton ended with exit status 1")
    found.lock.release()
    told = look(found.folder)
    assert (told.state, told.reason) == (State.FAILED, "Triton ended with exit status 1")


def test_a_keeper_is_told_to_end_while_it_reads_what_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of hundreds of gigabytes is read for minutes."""
    read, asked = threading.Event(), threading.Event()
    monkeypatch.setattr("trtllm_pipeline.serve.kept.signed.check", lambda _: read.wait(3600))
    found = kept(tmp_path, ready=False, require_signed=True)
    found.checked = False
    monkeypatch.setattr(keeper, "select", SimpleNamespace(select=lambda *_: None))
    monkeypatch.setattr(found, "_look", asked.set)  # the end of each step
    monkeypatch.setattr(keeper, "lease", lambda _: ([], ()))
    assert found.keep(asked) == 0
    read.set()
    assert found.guardian.orders == []  # type: ignore[union-attr]


@pytest.mark.parametrize("typed", [False, True])
def test_restart_refuses_what_is_not_signed_and_leaves_it_as_it_is(tmp_path: Path, typed: bool) -> None:
    keys, engine, folder = tmp_path / "trusted", tmp_path / "engine", folder_of(tmp_path, "one")
    for each in (keys, engine, folder):
        each.mkdir(parents=True)
    write_key(tmp_path, "me")
    job(folder, str(engine)).write(folder / "job.json")
    policy: dict[str, Any] = {} if typed else {"require_signed": True, "trusted_keys": str(keys)}
    record(state=State.STOPPED, served_from=(str(engine),), **policy).write(folder)
    before = (folder / "server.json").read_bytes()
    with pytest.raises(UsageError, match="so it cannot be signed"):
        control.restart(look(folder), **({"require_signed": True, "trusted_keys": keys} if typed else {}))
    assert (folder / "server.json").read_bytes() == before


OBEYS = """
import sys, time
print("there", flush=True)
time.sleep(60)
"""


def test_whoever_waits_for_what_another_stops_never_reads_that_it_was_interrupted(tmp_path: Path) -> None:
    folder = recorded(tmp_path, state=State.STARTING)
    lock = locked(folder)
    process = subprocess.Popen([sys.executable, "-c", OBEYS], stdout=subprocess.PIPE, pass_fds=(lock.fd,), text=True)
    process.stdout.readline()
    servers.identify(lock.fd, Keeper.of(process.pid))
    os.close(lock.fd)
    lock.fd = -1
    seen: set[tuple[State, str | None]] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            now = look(folder)
            seen.add((now.state, now.reason))

    def reap() -> None:
        process.wait()

    threads = [threading.Thread(target=each) for each in (watch, reap)]
    for thread in threads:
        thread.start()
    try:
        ended = control.stop(look(folder))
    finally:
        over.set()
        process.kill()
        for thread in threads:
            thread.join()
        process.stdout.close()
    assert (ended.state, ended.reason) == (State.STOPPED, "it was stopped")
    assert {state for state, _ in seen} <= {State.STARTING, State.STOPPING, State.STOPPED}, seen
    assert not (folder / "stop").exists()


@pytest.mark.parametrize("name", ["a", "A1", "a.b_c-d", "x" * 64])
def test_names(name: str) -> None:
    assert control.check_name(name) == name


@pytest.mark.parametrize("name", [".", "..", "a/b", "-a", "_a", "a b", "ä", "x" * 65, "a\n", "a\0"])
def test_names_that_no_folder_should_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid server name"):
        control.start(WHAT, control.Wish(name=name), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_server_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as found:
        control.find(tmp_path, "one")
    assert "pipeline serve start" in str(found.value.hint)
    recorded(tmp_path, "two", state=State.STOPPED)
    with pytest.raises(UsageError) as found:
        control.find(tmp_path, "one")
    assert found.value.hint == "the servers are two"


def test_a_server_that_ended_is_cleaned_up_and_forgotten(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "one")
    (folder / "links").mkdir(parents=True)
    (folder / "service.json").touch()
    record(state=State.READY, keeper=Keeper(2**22, 1, Keeper.here().boot_id)).write(folder)
    assert look(folder).state is State.FAILED
    ended = control.stop(look(folder))
    assert (ended.state, ended.reason) == (State.STOPPED, "it was stopped")
    assert {path.name for path in folder.iterdir()} == {"server.json", "lock"}
    control.remove(ended)
    assert find(tmp_path) == []
    assert not (tmp_path / "serve").exists()


def test_without_the_packages_of_the_gateway_nothing_is_begun_or_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trtllm_pipeline.serve.gateway.gateway_server", None)
    what: Any = None  # not looked at
    with pytest.raises(UsageError, match="the gateway needs the package") as found:
        control.start(what, control.Wish(name="one", gateway=True), tmp_path)
    assert found.value.hint == "pip install 'trtllm-pipeline[gateway]'"
    assert list(tmp_path.iterdir()) == []
    folder = recorded(tmp_path, gateway=True, state=State.READY, keeper=Keeper.here())
    assert look(folder).state.alive
    with pytest.raises(UsageError, match="the gateway needs the package"):
        control.restart(look(folder))
    assert look(folder).state.alive


def test_with_invalid_keys_nothing_is_begun_or_stopped(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("short\n", encoding="utf-8")
    workspace = tmp_path / "w"
    what: Any = SimpleNamespace(inputs={})
    with pytest.raises(UsageError, match="has a key of fewer than 8 characters") as found:
        control.start(what, control.Wish(name="one", gateway=True, api_keys_file=keys), workspace)
    assert "openssl rand -hex 24" in str(found.value.hint)
    assert not workspace.exists()
    folder = folder_of(workspace, "one")
    folder.mkdir(parents=True)
    (folder / "gateway-config.json").write_text(json.dumps({"api_keys_file": str(keys)}), encoding="utf-8")
    record(gateway=True, state=State.READY, keeper=Keeper.here()).write(folder)
    with pytest.raises(UsageError, match="has a key of fewer than 8 characters"):
        control.restart(look(folder))
    assert look(folder).state.alive


@pytest.mark.parametrize("content", [None, "README.md", "config.pbtxt"])
def test_a_folder_that_cannot_be_served_is_told_with_what_can(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / content).touch()
    with pytest.raises(UsageError, match="cannot be served") as found:
        of_folder(tmp_path, None, Machine(2, "cpu"))
    assert "a Triton repository of an LLM (ensemble/config.pbtxt)" in str(found.value.hint)


def test_a_repository_of_other_models_is_told_with_its_models(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").touch()
    with pytest.raises(UsageError, match="no model is named ensemble or tensorrt_llm; its models are a, b"):
        of_folder(tmp_path, None, Machine(2, "cpu"))


@pytest.mark.parametrize("config", ["{}", "[]", "", '{"build_config": {"max_batch_size": 4}}'])
def test_a_folder_without_an_engine_is_no_engine(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match="is not an engine"):
        of_folder(tmp_path, None, Machine(2, "cpu"))


def test_a_repository_whose_engine_is_gone_is_told(tmp_path: Path) -> None:
    for name, text in (
        ("ensemble", ""),
        ("tensorrt_llm", 'parameters { key: "engine_dir" value { string_value: "/x" } }'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    with pytest.raises(UsageError, match="does not exist: /x"):
        of_folder(tmp_path, None, Machine(2, "cpu"))
    (tmp_path / "tensorrt_llm" / "1").mkdir()
    (tmp_path / "tensorrt_llm" / "1" / "model.yaml").write_text("model: [\n")
    with pytest.raises(UsageError, match=r"is not the LLM API's model\.yaml"):
        of_folder(tmp_path, None, Machine(2, "cpu"))


@pytest.mark.parametrize("damaged", [False, True])
def test_json_and_tables_say_what_is_known(tmp_path: Path, damaged: bool) -> None:
    folder = recorded(tmp_path, state=State.STOPPED, reason="it was stopped")
    if damaged:
        (folder / "server.json").write_text("{")
    (found,) = shown.to_json(find(tmp_path))["servers"]
    assert (found["name"], found["state"]) == ("one", "failed" if damaged else "stopped")
    assert ("cell" in found) is not damaged
    assert "one" in shown.to_table(find(tmp_path))
    assert "one" in shown.to_text(find(tmp_path))
    assert shown.to_table([]) == "this workspace has no managed servers"


def test_a_table_fits_the_terminal_as_far_as_it_can(tmp_path: Path) -> None:
    for name in ("one", "two"):
        recorded(tmp_path, name, state=State.STOPPED, cell="a-model/" + "x" * 90)
    lines = shown.to_table(find(tmp_path), 120).splitlines()
    assert max(map(len, lines)) == 120
    assert all(line.endswith("x") and "…" in line for line in lines[1:])
    assert max(map(len, shown.to_table(find(tmp_path), 20).splitlines())) < 100


@pytest.mark.programs("systemd-analyze")
@pytest.mark.parametrize("system", [False, True])
def test_a_unit_is_one_that_systemd_takes(tmp_path: Path, system: bool) -> None:
    folder = tmp_path / ODD / "serve" / "one"
    folder.mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "HF_TOKEN": "secret", "PYTHONPATH": ODD}
    text = systemd.unit(folder, record(restart=True), system=system, environment=environment)
    assert text.startswith(systemd.MARK)
    assert "secret" not in text
    assert "Restart=on-failure\n" in text
    assert ("User=" in text) is system
    assert f"WantedBy={'multi-user' if system else 'default'}.target\n" in text
    assert "Restart=no\n" in systemd.unit(folder, record(), system=system, environment={})
    path = tmp_path / systemd.unit_name("one")
    path.write_text(text)
    words = ["systemd-analyze", *([] if system else ["--user"]), "verify", "--man=no", str(path)]
    runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=runtime)
    said = [line for line in done.stderr.splitlines() if path.name in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_what_to_type_next_depends_on_where_the_unit_is(tmp_path: Path) -> None:
    home = systemd.default_path("one", system=False)
    assert home.name == "trtllm-pipeline-one.service"
    steps = systemd.next_steps(home, "one", system=False, running=True)
    assert steps[:3] == [
        "pipeline serve stop one",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now trtllm-pipeline-one.service",
    ]
    elsewhere = systemd.next_steps(tmp_path / "x.service", "one", system=True, running=False)
    assert elsewhere == [
        f"sudo systemctl link {tmp_path / 'x.service'}",
        "sudo systemctl enable --now x.service",
    ]


def test_no_gateway_stands_before_a_server_whose_questions_have_images(tmp_path: Path) -> None:
    require_text({"repository": tmp_path})
    require_text({"model": tmp_path})
    (tmp_path / "multimodal_encoders").mkdir()
    with pytest.raises(UsageError, match="each request to this server needs an image"):
        require_text({"repository": tmp_path})


@pytest.fixture
def looked_at(tmp_path: Path) -> Iterator[Path]:
    """The directory of a server at which somebody looks for longer than any `servers.look` takes."""
    folder = folder_of(tmp_path, "one")
    folder.mkdir(parents=True)
    looks = locked(folder, shared=True)
    gone = threading.Timer(0.3, looks.release)
    gone.start()
    yield folder
    gone.join()


def test_a_stop_is_recorded_although_somebody_looks_at_that_moment(looked_at: Path) -> None:
    record(state=State.STARTING).write(looked_at)
    control.stop(look(looked_at))
    assert (look(looked_at).state, look(looked_at).reason) == (State.STOPPED, "it was stopped")


def test_a_server_is_removed_although_somebody_looks_at_that_moment(looked_at: Path) -> None:
    record(state=State.STOPPED).write(looked_at)
    control.remove(look(looked_at))
    assert not looked_at.exists()


DEAD = Keeper(2**22, 1, servers.boot_id())
WHAT: Any = SimpleNamespace(
    toolchain="embedded",
    cell="m/fp8",
    folder=None,
    artifacts={},
    model="tiny",
    model_folder=None,
    folders=(),
    gpus=0,
    params=None,
    inputs={},
)


def test_a_server_is_removed_although_another_command_records_its_end_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path, state=State.READY, keeper=DEAD)
    lock = locked(folder)
    monkeypatch.setattr(time, "sleep", lambda _seconds: lock.release())
    control.remove(look(folder))
    assert not folder.exists()


def test_what_is_started_under_the_name_of_one_that_ended_is_starting_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recorded(tmp_path, state=State.STOPPED, keeper=DEAD, ports={"http": 4711})
    seen: list[Any] = []

    def full() -> None:
        seen.append(look(folder))
        raise OSError("no room")

    monkeypatch.setattr(control.triton_server, "remove_stale_leftovers", full)
    with pytest.raises(StateError, match="no room"):
        control.start(WHAT, control.Wish(name="one"), tmp_path)
    assert [(server.state, server.reason) for server in seen] == [(State.STARTING, None)]
    assert servers.read_record(folder).ports == {"http": 4711}


def test_nothing_is_started_of_what_was_removed_since_it_was_found(tmp_path: Path) -> None:
    store, engine = Store(tmp_path / "work"), tmp_path / "engine"
    what: Any = SimpleNamespace(**{**vars(WHAT), "inputs": {"engine": engine}})
    unused = claims.take(store.work_dir / "users.lock", remove=False)  # as `store prune` does
    with pytest.raises(StateError, match="another process is removing unused artifacts"):
        control.start(what, control.Wish(name="one"), store.workspace)
    unused.release()
    with pytest.raises(StateError, match=f"{engine} is missing"):
        control.start(what, control.Wish(name="one"), store.workspace)
    assert find(store.workspace) == []


def test_a_server_is_started_although_one_of_its_name_is_removed_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path, state=State.STOPPED, keeper=DEAD)
    take, began = servers.take, list[State]()

    def removed(of: Path) -> claims.Claim | None:
        if (of / "server.json").exists():
            monkeypatch.setattr(servers, "take", take)
            control.remove(look(of))
        return take(of)

    def begins(of: Path, lock: claims.Claim) -> None:
        began.append(look(of).state)
        lock.release()

    monkeypatch.setattr(servers, "take", removed)
    monkeypatch.setattr(control, "write_repository", lambda *_: tmp_path)
    monkeypatch.setattr(control, "_job", lambda *_: SimpleNamespace(write=lambda _: None))
    monkeypatch.setattr(control, "_spawn", begins)
    control.start(WHAT, control.Wish(name="one"), tmp_path)
    assert began == [State.STARTING]


def test_a_stop_ends_in_order_what_is_started_under_the_name_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for that one until its patience ends, and kill it."""
    folder = recorded(tmp_path, state=State.STOPPED)
    ended = look(folder)
    first, second = (Keeper(pid, 1, servers.boot_id()) for pid in (2**22, 2**22 + 1))
    alive = (replace(ended, state=State.READY, keeper=each) for each in (first, first, second, second))
    told: list[tuple[Keeper, int, bool]] = []

    def tell(keeper: Keeper, signo: int, _server: servers.KeptServer) -> None:
        told.append((keeper, signo, (folder / "stop").exists()))
        (folder / "stop").unlink()  # as a start does

    monkeypatch.setattr(servers, "look", lambda _: next(alive, ended))
    monkeypatch.setattr(control, "_tell", tell)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert control.stop(ended).state is State.STOPPED
    assert told == [(first, signal.SIGTERM, True), (second, signal.SIGTERM, True)]


def test_an_interrupt_while_the_keeper_is_started_comes_after_it() -> None:
    order: list[str] = []

    def start() -> None:
        with control._uninterrupted():
            signal.raise_signal(signal.SIGINT)
            order.append("started")
        order.append("unreached")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert order == ["started"]
    with pytest.raises(KeyboardInterrupt):  # as before
        signal.raise_signal(signal.SIGINT)
