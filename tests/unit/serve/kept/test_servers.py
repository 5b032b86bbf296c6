from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.orchestrate.store import claims
from trtllm_pipeline.serve.kept import servers, shown
from trtllm_pipeline.serve.kept.servers import Keeper, KeptRecord, State, boot_id, find, folder_of, look, standing

KEEPER = Keeper(4711, 99, "this boot")


def record(state: State = State.READY, **changes: Any) -> KeptRecord:
    return dataclasses.replace(
        KeptRecord(toolchain="embedded", model="tiny", since_s=1.0, started_s=1.0, state=state, keeper=KEEPER),
        **changes,
    )


def kept(workspace: Path, name: str, told: KeptRecord) -> Path:
    folder = folder_of(workspace, name)
    folder.mkdir(parents=True)
    told.write(folder)
    return folder


@pytest.mark.parametrize("told", list(State))
def test_while_its_keeper_lives_it_stands_as_that_says(told: State) -> None:
    assert standing(record(told, reason="why"), held=True, lives=True, boot="this boot") == (told, "why")


@pytest.mark.parametrize("told", [State.STOPPED, State.FAILED])
@pytest.mark.parametrize("boot", ["this boot", "another"])
@pytest.mark.parametrize("held", [False, True])
def test_what_has_ended_has_ended(told: State, boot: str, held: bool) -> None:
    """Also while a command has its lock that is about to start or remove it."""
    assert standing(record(told, reason="why"), held=held, lives=False, boot=boot) == (told, "why")


@pytest.mark.parametrize("told", [State.STARTING, State.READY, State.RESTARTING, State.STOPPING])
def test_a_keeper_that_is_gone_was_killed_unless_the_machine_was_rebooted(told: State) -> None:
    rebooted = standing(record(told), held=False, lives=False, boot="another")
    assert rebooted == (State.STOPPED, "the machine was rebooted"), "whatever runs under its id now"
    killed = (State.FAILED, "its keeper (process 4711) was killed")
    found = standing(record(told), held=False, lives=False, boot="this boot")
    assert told is State.STOPPING or found == killed


def test_what_a_killed_keeper_left_is_being_ended() -> None:
    state, reason = standing(record(), held=True, lives=False, boot="this boot")
    assert (state, reason) == (State.STOPPING, "its keeper was killed; its processes are being ended")


def test_killed_while_it_was_stopping_it_is_stopped() -> None:
    told = record(State.STOPPING, reason="it was stopped")
    assert standing(told, held=False, lives=False, boot="this boot") == (State.STOPPED, "it was stopped")


def test_between_its_files_and_its_keeper_it_is_starting() -> None:
    told = record(State.STARTING, keeper=None)
    assert standing(told, held=True, lives=False, boot="this boot") == (State.STARTING, None)
    assert standing(told, held=False, lives=False, boot="this boot") == (
        State.FAILED,
        "it was interrupted before it was started",
    )


def test_a_process_is_told_by_start_time_and_boot() -> None:
    own = Keeper.here()
    assert own.lives()
    assert not dataclasses.replace(own, start_time=own.start_time + 1).lives()
    assert not dataclasses.replace(own, boot_id="another").lives()
    assert not dataclasses.replace(own, pid=2**22 + 1).lives()
    assert own.boot_id == boot_id() != ""


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    told = record(
        cell="m/fp8",
        fingerprints={"build": "f"},
        command=("pipeline", "serve"),
        gpus=("GPU-1",),
        ports={"http": 80},
        restarts=3,
        unresponsive_timeout_s=9.0,
        served_from=("/engine",),
        require_signed=True,
        trusted_keys="/keys",
    )
    told.write(tmp_path)
    assert servers.read_record(tmp_path) == told


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"schema": 1}',
        b'{"schema": 2}',
        b"\xff\xfe",
        b"[" * 10_000,
        *(
            json.dumps(
                {"schema": 1, "state": "ready", "toolchain": "x", "model": "m", "since_s": 0, "started_s": 0, **odd}
            )
            for odd in ({"state": "odd"}, {"since_s": []}, {"since_s": 1e300}, {"keeper": 1})
        ),
    ],
)
def test_damage_is_told_and_ends_nothing(tmp_path: Path, damage: bytes | str) -> None:
    folder = kept(tmp_path, "one", record())
    (folder / "server.json").write_bytes(damage.encode() if isinstance(damage, str) else damage)
    (found,) = find(tmp_path)
    assert found.state is State.FAILED
    assert found.reason.startswith("server.json is damaged")
    assert (found.record, found.cell, found.endpoint()) == (None, None, None)
    assert shown.to_text([found])
    lock = claims.take(folder / "lock", remove=False)
    servers.identify(lock.fd, Keeper.here())
    assert (look(folder).state, look(folder).keeper) == (State.READY, Keeper.here())
    servers.identify(lock.fd, KEEPER)
    assert (look(folder).state, look(folder).keeper) == (State.STOPPING, None)
    lock.release()


def test_what_is_no_server_is_not_found(tmp_path: Path) -> None:
    assert find(tmp_path) == []
    (tmp_path / "serve" / "empty").mkdir(parents=True)
    (tmp_path / "serve" / "file").touch()
    assert find(tmp_path) == []
    (tmp_path / "other" / "serve").parent.mkdir()
    (tmp_path / "other" / "serve").touch()
    assert find(tmp_path / "other") == []


def test_an_endpoint_is_that_of_the_gateway_or_of_the_server(tmp_path: Path) -> None:
    told = record(keeper=Keeper.here(), model_folder="/m")
    folder = kept(tmp_path, "one", told)
    assert look(folder).endpoint() is None, "service.json is not there yet"
    service = {"http": "h:1", "grpc": "h:2", "metrics": "h:3", "model": "ensemble"}
    (folder / "service.json").write_text(json.dumps(service))
    plain = look(folder).endpoint()
    assert (plain.openai, plain.model, plain.metrics) == (None, "ensemble", ("http://h:3/metrics",))
    (folder / "gateway.json").write_text(json.dumps({"url": "http://h:4/"}))
    dataclasses.replace(told, gateway=True).write(folder)
    behind = look(folder).endpoint()
    assert (behind.openai, behind.model, behind.model_folder) == ("http://h:4/v1", "tiny", Path("/m"))
    assert behind.metrics == ("http://h:4/metrics", "http://h:3/metrics")
    (folder / "service.json").write_text(
        json.dumps({"kind": "openai", "url": "http://h:5", "http": "h:5", "grpc": "", "metrics": None, "model": "q"})
    )
    (folder / "gateway.json").unlink()
    told.write(folder)
    own = look(folder).endpoint()
    assert (own.openai, own.model, own.metrics) == ("http://h:5/v1", "q", ("http://h:5/prometheus/metrics",))


def test_time_of_a_state_changes_with_the_state_alone() -> None:
    told = record(since_s=5.0)
    assert servers.changed(told, State.READY, "new reason", None, 9.0).since_s == 5.0
    assert servers.changed(told, State.STOPPED, None, None, 9.0).since_s == 9.0


def test_an_identity_is_written_over_a_longer_one(tmp_path: Path) -> None:
    folder = kept(tmp_path, "one", record())
    lock = claims.take(folder / "lock", remove=False)
    servers.identify(lock.fd, Keeper(2**22, 2**60, "b" * 36))
    servers.identify(lock.fd, Keeper.here())
    assert look(folder).keeper == Keeper.here()
    assert os.fstat(lock.fd).st_size <= 4096
    lock.release()


def test_a_keeper_that_ended_itself_on_a_full_disk_was_not_killed(tmp_path: Path) -> None:
    folder = kept(tmp_path, "one", record(State.READY, keeper=Keeper(2**22, 1, boot_id())))
    lock = claims.take(folder / "lock", remove=False)
    servers.identify(lock.fd, Keeper(2**22, 1, boot_id()))
    size = os.fstat(lock.fd).st_size
    servers.identify(lock.fd, Keeper(2**22, 1, boot_id()), (State.FAILED, "\x01ä" * 9999))
    assert os.fstat(lock.fd).st_size == size, "there is room for it already"
    lock.release()
    assert look(folder).state is State.FAILED
    assert (look(folder).reason or "").startswith("\x01ä")
    record(State.STOPPED, reason="it was stopped").write(folder)
    assert look(folder).reason == "it was stopped", "what server.json says is newer"


@pytest.mark.parametrize("keeper", [None, Keeper(2**22, 1, boot_id())])
def test_what_somebody_stops_was_not_interrupted(tmp_path: Path, keeper: Keeper | None) -> None:
    """Also where its keeper ends before it can say so."""
    folder = kept(tmp_path, "one", record(State.STARTING, keeper=keeper))
    assert look(folder).state is State.FAILED
    (folder / "stop").touch()
    assert (look(folder).state, look(folder).reason) == (State.STOPPED, "it was stopped")


def test_what_ends_while_it_is_looked_at_was_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept(tmp_path, "one", record(State.STOPPING))
    lock = claims.take(folder / "lock", remove=False)
    assert lock is not None

    def ends(_keeper: Keeper) -> bool:
        record(State.STOPPED, reason="it was stopped").write(folder)
        lock.release()
        return False

    monkeypatch.setattr(Keeper, "lives", ends)
    assert (look(folder).state, look(folder).reason) == (State.STOPPED, "it was stopped")


def test_what_is_removed_while_they_are_listed_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, "one", record())
    kept(tmp_path, "two", record())

    def removed(folder: Path) -> servers.KeptServer:
        if folder.name == "one":
            shutil.rmtree(folder)
        return look(folder)

    monkeypatch.setattr(servers, "look", removed)
    assert [server.name for server in find(tmp_path)] == ["two"]
