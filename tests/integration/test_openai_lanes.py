"""Other OpenAI-compatible servers as lanes of a matrix, whole runs: stand-ins for vLLM and SGLang (`tests/standins/openai_server.py`), and, slow,
the real `transformers serve` and llama.cpp's own server, out of the package xllamacpp.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import command_line
from tests.helpers.needed import quantize_package
from tests.helpers.trtllm_runs import Lane, cells
from tests.helpers.waiting import eventually
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports

STAND_IN = Path(__file__).parents[1] / "standins" / "openai_server.py"
LLAMA_SERVER = Path(__file__).parents[1] / "helpers" / "llama_server.py"
MATRIX: dict[str, Any] = {
    "name": "servers",
    "axes": {"model": ["tiny"], "precision": ["fp16"], "max_batch_size": [2], "lengths": ["192,16"]},
    "settings": {
        "smoke": {"max_tokens": 8},
        "perf": {"concurrency": [1], "requests": 3, "warmup_requests": 1, "exclusive": "none"},
        "accuracy": {"max_tokens": 2},
    },
}


class Servers:
    """A workspace, and programs by the names of servers on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        self.workspace = folder / "ws"

    def stand_in(self, name: str) -> Path:
        return self.program(name, f'exec {sys.executable} {STAND_IN} {name} "$@"')

    def program(self, name: str, text: str) -> Path:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def pipeline(self, *words: str, code: int = 0, **variables: str) -> str:
        variables["PATH"] = f"{self.programs}:{os.environ['PATH']}"
        if words[0] in {"export", "report"} or words[:2] in {("serve", "ps"), ("serve", "stop")}:
            found = command_line.pipeline(*words, cwd=self.folder, code=code, **variables)
            return found.stdout + found.stderr
        done = subprocess.run(
            [sys.executable, "-m", "trtllm_pipeline", *words],
            cwd=self.folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(
        self, toolchains: list[str], settings: Mapping[str, Any] | None = None, *, code: int = 0, **variables: str
    ) -> dict[str, dict[str, Any]]:
        """The rows of a run, by toolchain."""
        matrix = {**MATRIX, "axes": {**MATRIX["axes"], "toolchain": toolchains}}
        matrix["settings"] = {**MATRIX["settings"], **(settings or {})}
        (self.folder / "matrix.json").write_text(json.dumps(matrix))
        self.said = self.pipeline("run", "-m", "matrix.json", "-w", str(self.workspace), code=code, **variables)
        report = self.pipeline("report", "-w", str(self.workspace), "--format", "json")
        return {name.rpartition("/")[2]: row for name, row in cells(report).items()}


@pytest.fixture
def servers(tmp_path: Path) -> Servers:
    return Servers(tmp_path)


def test_vllm_and_sglang_stand_in_one_table(servers: Servers) -> None:
    for name in ("vllm", "sglang"):
        servers.stand_in(name)
    rows = servers.run(["vllm", "sglang"])
    for row in rows.values():
        assert row["status"] == "done", servers.said
        checks = {check["name"]: check["detail"] for check in row["smoke"]["checks"]}
        assert "rejected" in checks["limits"]
        assert row["perf"][0]["requests"] == 3
        assert row["accuracy_total"] == 28
    assert {row["status"] for row in servers.run(["vllm", "sglang"]).values()} == {"up_to_date"}
    # Another program by that name is another server: what was measured is measured again, the model is there.
    servers.program("vllm", f'exec {sys.executable} {STAND_IN} vllm "$@" # changed')
    again = servers.run(["vllm", "sglang"])
    assert (again["vllm"]["status"], again["sglang"]["status"]) == ("done", "up_to_date")
    assert "1 up to date" in servers.said or "stage runs" in servers.said


def test_a_cell_is_kept_by_serve_start_and_not_exported(servers: Servers) -> None:
    servers.stand_in("vllm")
    assert servers.run(["vllm"])["vllm"]["status"] == "done", servers.said
    known = ("--workspace", str(servers.workspace))
    refused = servers.pipeline("export", "vllm", *known, "--to", "bundle", "--output-dir", "bundle", code=2)
    assert "vllm has images and charts of its own" in refused
    try:
        servers.pipeline("serve", "start", "vllm", *known, "--openai", "--name", "kept")
        (kept,) = json.loads(servers.pipeline("serve", "ps", *known, "--format", "json"))["servers"]
        answer = httpx.post(
            f"{kept['endpoints']['openai']}/completions",
            json={"model": "tiny", "prompt": "The capital of France is", "max_tokens": 2},
            timeout=280,
        ).json()
        assert answer["choices"][0]["text"].startswith(" P")
    finally:
        servers.pipeline("serve", "stop", "kept", *known)


def test_a_server_that_dies_while_it_loads_fails_with_what_its_log_says(servers: Servers) -> None:
    servers.stand_in("vllm")
    (row,) = servers.run(["vllm"], code=1, STANDIN_DIES="loading").values()
    assert row["failed_stage"] == "launch"
    assert "out of memory" in row["reason"].lower()
    assert row["failure"] == "out_of_memory"


def test_an_option_that_the_server_refuses_is_told(servers: Servers) -> None:
    servers.stand_in("vllm")
    (row,) = servers.run(["vllm"], {"openai": {"options": {"max_seqs": 4}}}, code=1).values()
    assert row["failed_stage"] == "launch"
    assert "--max-seqs" in row["reason"] + servers.said


@pytest.fixture
def running(servers: Servers) -> Iterator[str]:
    """The URL of a server that somebody else has started."""
    servers.pipeline("stage", "download", "tiny", "--output-dir", "model")
    command = [sys.executable, str(STAND_IN), "vllm", "serve", str(servers.folder / "model"), "--host", "127.0.0.1"]
    (port,) = unused_ports(1)
    process = subprocess.Popen([*command, "--port", str(port), "--max-model-len", "208"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert b"serves" in process.stdout.readline()
    yield f"http://127.0.0.1:{port}"
    assert process.poll() is None, "it was stopped"
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def test_a_server_that_runs_already_is_left_alone_and_the_report_says_so(servers: Servers, running: str) -> None:
    (row,) = servers.run(["openai"], {"openai": {"url": running}}).values()
    assert row["status"] == "done", servers.said
    assert "not started by us" in servers.said
    assert any("started externally" in finding for finding in row["findings"])
    assert servers.run(["openai"], {"openai": {"url": running}})["openai"]["status"] == "up_to_date"


def test_a_managed_server_is_measured_through_its_own_gateway(servers: Servers, tmp_path: Path) -> None:
    """It stands on the machine for as long as people want, so nothing that asks it may wait for its end."""
    servers.stand_in("vllm")
    assert servers.run(["vllm"])["vllm"]["status"] == "done", servers.said
    known = ("--workspace", str(servers.workspace))
    exact = {"perf": {**MATRIX["settings"]["perf"], "exclusive": "machine", "workload": "isl_osl"}}
    try:
        servers.pipeline("serve", "start", "vllm", *known, "--openai", "--name", "kept")
        (kept,) = json.loads(servers.pipeline("serve", "ps", *known, "--format", "json"))["servers"]
        servers.workspace = tmp_path / "measured"
        (row,) = servers.run(["openai"], {"openai": {"url": kept["endpoints"]["openai"]}, **exact}).values()
        assert "in use by" not in servers.said
    finally:
        servers.pipeline("serve", "stop", "kept", *known)
    assert row["status"] == "done", servers.said
    assert row["perf"][0]["requests"] == 3, "three for the one in flight"
    assert (row["accuracy_total"], row["accuracy_asked"]) == (28, "/v1/completions, without a chat template")


def test_nothing_at_a_url_is_told_at_once(servers: Servers) -> None:
    (port,) = unused_ports(1)
    (row,) = servers.run(["openai"], {"openai": {"url": f"http://127.0.0.1:{port}"}}, code=1).values()
    assert row["failed_stage"] == "launch"
    assert "no response from" in row["reason"]


@pytest.mark.seam
def test_a_server_is_launched_by_hand_and_measured(servers: Servers) -> None:
    servers.stand_in("vllm")
    servers.pipeline("stage", "download", "tiny", "--output-dir", "model")
    words = ["stage", "launch", "--toolchain", "openai", "--command", "vllm serve {model} --host {host} --port {port}"]
    with (servers.folder / "service.json").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "trtllm_pipeline", *words, "--model", "model", "--format", "json"],
            cwd=servers.folder,
            env={**os.environ, "PATH": f"{servers.programs}:{os.environ['PATH']}"},
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
    try:
        assert eventually(lambda: (servers.folder / "service.json").stat().st_size > 0 or process.poll() is not None)
        asking = ["--toolchain", "openai", "--service", "service.json", "--engine", "model", "--model", "model"]
        servers.pipeline("stage", "smoke", *asking, "--output-dir", "smoked")
        assert json.loads((servers.folder / "smoked" / "smoke.json").read_text())["answer"].startswith(" Paris")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in {0, 130}


def test_a_printed_command_starts_the_server(servers: Servers) -> None:
    servers.stand_in("vllm")
    servers.pipeline("stage", "download", "tiny", "--output-dir", "a model")
    words = [
        "--toolchain",
        "openai",
        "--command",
        "vllm serve {model} --host {host} --port {port}",
        "--model",
        "a model",
    ]
    (port,) = unused_ports(1)
    shell = servers.pipeline("stage", "launch", *words, "--http-port", str(port), "--print")
    process = subprocess.Popen(
        ["bash", "-c", shell],
        env={**os.environ, "PATH": f"{servers.programs}:{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        assert eventually(lambda: process.poll() is not None or served(port))
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def served(port: int) -> bool:
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60).json()["data"])
    except httpx.TransportError:
        return False


def test_engines_pytorch_vllm_and_sglang_stand_in_one_report(tmp_path: Path) -> None:
    machine = Lane(tmp_path / "machine", "1.2.0")
    others = tmp_path / "others"
    others.mkdir()
    servers = Servers(others)
    for name in ("vllm", "sglang"):
        servers.stand_in(name)
    machine.environment["PATH"] = f"{servers.programs}:{machine.environment['PATH']}"
    machine.matrix.write_text(
        """\
name: migration
axes:
  model: [tiny]
  precision: [fp16]
  parallel: [tp2]
  max_batch_size: [2]
  lengths: ["512,16"]
  toolchain: [tensorrt_llm, tensorrt_llm_pytorch, vllm, sglang]
settings:
  perf: { exclusive: none, concurrency: [1], requests: 4, repeats: 3 }
override:
  - where: { toolchain: [tensorrt_llm, tensorrt_llm_pytorch] }
    settings: { serve: { frontend: trtllm_serve } }
"""
    )
    rows = {name.rpartition("/")[2]: row for name, row in machine.run().items()}
    assert {row["status"] for row in rows.values()} == {"done"}
    (log,) = (path for path in machine.workspace.glob("work/*/server.log") if "vllm serves" in path.read_text())
    visible = log.read_text().partition("CUDA_VISIBLE_DEVICES=")[2].split()[0]
    assert len(visible.split(",")) == 2, "a GPU is leased for each of two ranks"
    shown = machine.pipeline(
        "compare", "--by", "toolchain", "--workspace", str(machine.workspace), "--format", "markdown"
    )
    assert "toolchain tensorrt_llm_pytorch" in shown
    assert all(name in shown for name in rows)
    assert "s of quantization, conversion and build" in shown


def test_transformers_and_llama_cpp_for_real(servers: Servers) -> None:
    pytest.importorskip("xllamacpp")
    quantize_package("torch")
    quantize_package("transformers")
    pytest.importorskip("fastapi", reason="transformers serve needs it")
    servers.program("transformers", f'exec {sys.executable} -m transformers.cli.transformers "$@"')
    servers.program("llama-server", f'exec {sys.executable} {LLAMA_SERVER} "$@"')
    rows = servers.run(["transformers", "llama_cpp"])
    for row in rows.values():
        assert row["status"] == "done", servers.said
        assert row["perf"][0]["output_tokens_per_s"] > 0
    # Both compute with the same 16-bit weights, so that their greedy answers agree.
    assert rows["transformers"]["smoke"]["answer"][:4] == rows["llama_cpp"]["smoke"]["answer"][:4]
