"""Commands that start servers, as text for a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import ServerError
from trtllm_pipeline.tensorrt.servers import disaggregated
from trtllm_pipeline.tensorrt.servers.disaggregated import Servers
from trtllm_pipeline.tensorrt.servers.pasted import USUAL_PORTS, PastedCommand

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['WHO'], os.environ['PATHS'], os.environ['CARD']]))"


def test_a_shell_passes_every_word_and_variable_as_it_is() -> None:
    words = [
        "--name",
        'it\'s "$HOME"',
        "--path=a b",
        "two\nlines",
        "*",
        "--folder=$made",
        "--literal=$HOME",
        "--not=$(touch x)",
        ":",
        "-n",
        "1",
    ]
    command = PastedCommand(
        [sys.executable, "-c", SHOW, *words], {"WHO": "$(id) 'x'"}, {"PATHS": ["/a b", "/c"]}, before={"made": "'d e'"}
    )
    done = subprocess.run(
        ["sh", "-c", command.to_shell({"CARD": "GPU-1,GPU-2"})],
        env={"PATHS": "/own"},
        capture_output=True,
        check=True,
    )
    expected = [*words[:5], "--folder=d e", *words[6:]]
    assert json.loads(done.stdout) == [expected, "$(id) 'x'", "/a b:/c:/own", "GPU-1,GPU-2"]


def test_disaggregated_servers_are_started_beside_their_router_and_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    note, wait = tmp_path / "note", tmp_path / "wait"
    note.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $*" >> "$0.txt"\nsleep 300\n')
    wait.write_text('#!/bin/sh\nuntil [ "$(wc -l < "${0%wait}note.txt")" = 2 ]; do sleep 0.05; done\ncat "${2#*=}"\n')
    for program in (note, wait):
        program.chmod(0o755)
    (tmp_path / "note.txt").touch()
    servers = Servers(
        context=[str(note), "c"],
        generation=[str(note), "g"],
        contexts=1,
        generations=1,
        context_gpus=2,
        generation_gpus=1,
        router=[str(wait), "disaggregated"],
    )
    text = disaggregated.pasted_command(servers, ports=USUAL_PORTS, host="127.0.0.1", timeout_s=60).to_shell()
    done = subprocess.run(["sh", "-c", text], capture_output=True, start_new_session=True, check=False)
    config = json.loads(done.stdout)
    assert config["port"] == 8000
    assert config["context_servers"] == {"num_instances": 1, "urls": ["127.0.0.1:8003"]}
    assert config["generation_servers"] == {"num_instances": 1, "urls": ["127.0.0.1:8004"]}
    assert sorted((tmp_path / "note.txt").read_text().splitlines()) == [
        "GPU-a,GPU-b c --host 127.0.0.1 --port 8003",
        "GPU-c g --host 127.0.0.1 --port 8004",
    ]


def test_too_few_gpus_for_disaggregated_servers_are_said() -> None:
    servers = Servers(
        context=["c"], generation=["g"], contexts=2, generations=1, context_gpus=1, generation_gpus=2, router=["r"]
    )
    with pytest.raises(ServerError, match="need 4 GPUs, and 3 are visible"):
        list(servers.started([1, 2, 3], ["0", "1", "2"]))


def test_one_line_has_one_option() -> None:
    text = PastedCommand(["server", "serve", "model", "--port", "8000", "--host=::1", "--quick"]).to_shell()
    assert text.splitlines() == [
        "(",
        "umask 077",
        "exec server \\",
        "  serve \\",
        "  model \\",
        "  --port 8000 \\",
        "  --host=::1 \\",
        "  --quick",
        ")",
    ]
