from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.errors import StateError, UsageError
from trtllm_pipeline.hosting import control, keeper, shown, systemd
from trtllm_pipeline.hosting.servers import Keeper, KeptRecord, State, find, folder_of, look
from trtllm_pipeline.hosting.target import of_folder
from trtllm_pipeline.machine.model import Machine
from trtllm_pipeline.store import claims

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
    program = keeper._Program("server", (), log, log, tmp_path / "ready", 1.0, log_bytes=log.stat().st_size)
    assert program.said() == []
    with log.open("a", encoding="utf-8") as file:
        file.write("loading\n2026-11-22 18:44:49 keeper: the server is ready\n")
    assert program.said() == ["loading"]
    log.write_text("anew\n", encoding="utf-8")
    assert program.said() == ["anew"]


def test_a_time_that_cannot_be_is_damage(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "one")
    folder.mkdir(parents=True)
    record(since_s=1e300).write(folder)
    assert (look(folder).reason or "").startswith("server.json is damaged")
    assert shown.to_text(find(tmp_path))


def test_a_server_that_is_started_just_now_is_not_removed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "one")
    folder.mkdir(parents=True)
    record(state=State.STOPPED).write(folder)
    lock = claims.take(folder / "lock", remove=False)
    assert lock is not None
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
    lock = claims.take(tmp_path / "lock", remove=False)
    assert lock is not None
    assert keeper.main([str(tmp_path)]) == 1
    assert "is kept already" in capsys.readouterr().err
    lock.release()


def test_a_lease_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    held, gpus = keeper.lease(0)
    assert gpus == ()
    keeper.lease(0)[0][0].release()  # several are kept at once
    for claim in held:
        claim.release()
    measuring = claims.lease_machine((), exclusive=True)
    assert measuring is not None
    with pytest.raises(StateError, match="a run measures on this machine now"):
        keeper.lease(0)
    with pytest.raises(StateError, match="needs 2 GPUs, this machine has 0"):
        keeper.lease(2)
    for claim in measuring[0]:
        claim.release()


@pytest.mark.parametrize("name", ["a", "A1", "a.b_c-d", "x" * 64])
def test_names(name: str) -> None:
    assert control.check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "_a", "a b", "ä", "x" * 65, "a\n", "a\0"])
def test_names_that_no_folder_should_have(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a server"):
        control.check_name(name)


def test_an_unknown_server_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as found:
        control.find(tmp_path, "one")
    assert "pipeline serve start" in str(found.value.hint)
    folder = folder_of(tmp_path, "two")
    folder.mkdir(parents=True)
    record(state=State.STOPPED).write(folder)
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


@pytest.mark.parametrize("content", [None, "README.md", "config.pbtxt"])
def test_a_folder_that_cannot_be_served_is_told_with_what_can(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / content).touch()
    with pytest.raises(UsageError, match="cannot be served") as found:
        of_folder(tmp_path, None, Machine(2, "cpu"))
    assert "a Triton repository" in str(found.value.hint)


@pytest.mark.parametrize("config", ["{}", "[]", "", '{"build_config": {"max_batch_size": 4}}'])
def test_a_folder_without_an_engine_is_no_engine(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match="is no engine"):
        of_folder(tmp_path, None, Machine(2, "cpu"))


def test_a_repository_whose_engine_is_gone_is_told(tmp_path: Path) -> None:
    for name, text in (
        ("ensemble", ""),
        ("tensorrt_llm", 'parameters { key: "engine_dir" value { string_value: "/x" } }'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(text)
    with pytest.raises(UsageError, match="names no engine folder that is there: /x"):
        of_folder(tmp_path, None, Machine(2, "cpu"))
    (tmp_path / "tensorrt_llm" / "1").mkdir()
    (tmp_path / "tensorrt_llm" / "1" / "model.yaml").write_text("model: [\n")
    with pytest.raises(UsageError, match=r"is not the LLM API's model\.yaml"):
        of_folder(tmp_path, None, Machine(2, "cpu"))


@pytest.mark.parametrize("damaged", [False, True])
def test_json_and_tables_say_what_is_known(tmp_path: Path, damaged: bool) -> None:
    folder = folder_of(tmp_path, "one")
    folder.mkdir(parents=True)
    record(state=State.STOPPED, reason="it was stopped").write(folder)
    if damaged:
        (folder / "server.json").write_text("{")
    (found,) = shown.to_json(find(tmp_path))["servers"]
    assert (found["name"], found["state"]) == ("one", "failed" if damaged else "stopped")
    assert ("cell" in found) is not damaged
    assert "one" in shown.to_table(find(tmp_path))
    assert "one" in shown.to_text(find(tmp_path))
    assert shown.to_table([]) == "no servers are kept in this workspace"


def test_a_table_fits_the_terminal_as_far_as_it_can(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = folder_of(tmp_path, name)
        folder.mkdir(parents=True)
        record(state=State.STOPPED, cell="a-model/" + "x" * 90).write(folder)
    lines = shown.to_table(find(tmp_path), 120).splitlines()
    assert max(map(len, lines)) == 120
    assert all(line.endswith("x") and "…" in line for line in lines[1:])
    assert max(map(len, shown.to_table(find(tmp_path), 20).splitlines())) < 100


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
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze (Debian, Ubuntu: systemd)")
    path = tmp_path / systemd.unit_name("one")
    path.write_text(text)
    words = [analyze, *([] if system else ["--user"]), "verify", "--man=no", str(path)]
    runtime = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, env=runtime)
    said = [line for line in done.stderr.splitlines() if path.name in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_what_to_type_next_depends_on_where_the_unit_is(tmp_path: Path) -> None:
    home = systemd.default_path("one", system=False)
    assert home.name == "trtllm-pipeline-one.service"
    steps = systemd.next_steps(home, "one", system=False, running=True).splitlines()
    assert steps[:3] == [
        "pipeline serve stop one",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now trtllm-pipeline-one.service",
    ]
    elsewhere = systemd.next_steps(tmp_path / "x.service", "one", system=True, running=False)
    assert elsewhere.splitlines() == [
        f"sudo systemctl link {tmp_path / 'x.service'}",
        "sudo systemctl enable --now x.service",
    ]
