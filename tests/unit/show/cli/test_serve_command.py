from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.unit.conftest import Refused
from trtllm_pipeline.serve.kept.servers import KeptRecord, State, find, folder_of
from trtllm_pipeline.show.cli import app, serve


def test_a_folder_says_itself_which_toolchain_serves_it(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["serve", "start", str(tmp_path), "--workspace", str(tmp_path / "w")]
    assert "--toolchain is for a cell" in refused(*words, "--toolchain", "embedded")
    monkeypatch.setenv("PIPELINE_TOOLCHAIN", "embedded")
    assert "cannot be served" in refused(*words), "what the environment says is for cells"


def test_a_limit_of_silence_is_for_servers_that_are_started_again(tmp_path: Path, refused: Refused) -> None:
    assert "add --restart" in refused("serve", "start", str(tmp_path), "--unresponsive-timeout-s", "9")


def test_a_limit_of_silence_is_a_duration_of_a_second_or_more(tmp_path: Path, refused: Refused) -> None:
    words = ["serve", "start", str(tmp_path), "--restart", "--unresponsive-timeout-s"]
    for typed, said in (("100ms", "expected 1s or more, got 0.1 s"), ("nan", "'nan' is not a duration")):
        assert said in refused(*words, typed)
    assert "cannot be served" in refused(*words, "2m"), "the duration is in order"


def test_parameters_of_the_server_are_the_options_of_stage_launch() -> None:
    def helps(path: str) -> dict[str, str]:
        command: Any = get_command(app.build(path.split()))
        for word in path.split():
            command = command.commands[word]
        return {param.name: param.help for param in command.params if param.param_type_name == "option"}

    start, launch = helps("serve start"), helps("stage launch")
    assert {"http_port", "grpc_port", "metrics_port", "ready_timeout_s", "stop_timeout_s", "threads"} == set(
        serve.OF_LAUNCH
    )
    assert {name: start[name] for name in serve.OF_LAUNCH} == {name: launch[name] for name in serve.OF_LAUNCH}


def test_stop_says_that_there_is_nothing_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["serve", "stop", "--all", "--workspace", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "this workspace has no managed servers\n")


@pytest.mark.parametrize("remove", [False, True])
def test_stop_says_as_json_what_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str], remove: bool) -> None:
    for name in ("one", "two"):
        folder = folder_of(tmp_path, name)
        folder.mkdir(parents=True)
        record = KeptRecord(toolchain="embedded", model="tiny", state=State.FAILED, since_s=1.0, started_s=1.0)
        record.write(folder)
    words = ["serve", "stop", "--all", "--workspace", str(tmp_path), "--format", "json"]
    assert app.main([*words, "--remove"] if remove else words) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert [(each["name"], each["state"]) for each in told["servers"]] == [("one", "failed"), ("two", "failed")]
    assert captured.err == ("" if remove else "one had already failed\ntwo had already failed\n")
    assert [each.name for each in find(tmp_path)] == ([] if remove else ["one", "two"])
