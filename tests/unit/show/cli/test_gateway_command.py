"""`pipeline serve gateway`: what is typed becomes a configuration, and what is wrong is told before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import Refused
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway import gateway_server
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel
from trtllm_pipeline.show.cli.app import main


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[GatewayConfig]:
    """Configurations of gateways that would have run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.json").write_text("{}", encoding="utf-8")
    (tmp_path / "engine").mkdir()
    found: list[GatewayConfig] = []

    def run(config: GatewayConfig, _folder: Path, announce: Callable[[Mapping[str, Any]], None]) -> None:
        found.append(config)
        announce({"url": "http://127.0.0.1:1", "models": [model.name for model in config.models]})

    monkeypatch.setattr(gateway_server, "run", run)
    return found


def test_options_become_a_configuration(
    started: list[GatewayConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "serve gateway a=service.json b=grpc://127.0.0.1:8001 --model-folder a=engine --server-model b=tensorrt_llm_bls"
    )
    words += " --adapter b:sql=engine --adapter b:chat=."
    words += " --dialect a=hermes --max-seq-len b=99 --port 9 --host ::1 --temperature 0 --stop x,y --max-queue 3"
    assert main(words.split()) == 0
    (config,) = started
    assert config.models == (
        OfferedModel(name="a", service=tmp_path / "service.json", model_folder=tmp_path / "engine", dialect="hermes"),
        OfferedModel(
            name="b",
            url="grpc://127.0.0.1:8001",
            server_model="tensorrt_llm_bls",
            max_seq_len=99,
            adapters={"sql": tmp_path / "engine", "chat": tmp_path},
        ),
    )
    assert (config.host, config.port) == ("::1", 9)
    assert config.params == GatewayParams(temperature=0.0, stop=("x", "y"), max_queue=3)
    shown = capsys.readouterr()
    assert shown.out == "http://127.0.0.1:1\n"
    assert "curl -s http://127.0.0.1:1/v1/chat/completions" in shown.err


def test_options_win_over_a_file(started: list[GatewayConfig], tmp_path: Path) -> None:
    written = GatewayConfig(
        models=(OfferedModel(name="a", url="http://127.0.0.1:8000/v1"),),
        port=7,
        params=GatewayParams(max_queue=5, max_concurrency=6),
    )
    written.write(tmp_path / "config.json")
    assert (
        main(["serve", "gateway", "--config", "config.json", "--max-queue", "9", "c=service.json", "--format", "json"])
        == 0
    )
    (config,) = started
    assert [model.name for model in config.models] == ["a", "c"]
    assert (config.port, config.params.max_queue, config.params.max_concurrency) == (7, 9, 6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no server given"),
        ("a", "expected NAME=SERVER"),
        ("a=nothing.json", "no such file"),
        ("a=service.json a=service.json", "a is given twice"),
        ("a=service.json --model-folder b=engine", "--model-folder b: unknown model"),
        ("a=service.json --model-folder a=nothing", "no such directory"),
        ("a=service.json --adapter a=engine", "--adapter a: expected NAME:ADAPTER=DIR"),
        ("a=service.json --adapter b:sql=engine", "--adapter b:sql: expected NAME:ADAPTER=DIR"),
        ("a=service.json --adapter a:sql=nothing", "--adapter nothing: no such directory"),
        ("a=service.json --max-seq-len a=x", "expected a positive whole number"),
        ("a=service.json --max-queue -1", "--max-queue should be greater than or equal to 0"),
        ("a=service.json --temperature warm", "'warm' is not a number"),
        ("--config nothing.json", "there is no such file"),
    ],
)
def test_what_is_wrong_is_told(started: list[GatewayConfig], refused: Refused, words: str, said: str) -> None:
    assert said in refused("serve", "gateway", *words.split())
    assert started == []
