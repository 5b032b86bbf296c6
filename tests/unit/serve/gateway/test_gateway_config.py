"""The gateway's configuration: what is written is read, and what is wrong is told."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import PipelineError, UsageError
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve import gateway
from trtllm_pipeline.serve.gateway import gateway_server as server
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel
from trtllm_pipeline.serve.gateway.keys import Keys
from trtllm_pipeline.serve.gateway.served import ModelServer
from trtllm_pipeline.tensorrt.stage.params import key, table


def test_an_unknown_dialect_is_refused_before_the_first_request() -> None:
    with pytest.raises(UsageError, match=r"unknown dialect 'qwen': Qwen2\.5 and Qwen3 write as hermes"):
        ModelServer(OfferedModel(name="a", url="grpc://127.0.0.1:1", dialect="qwen"), GatewayParams())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = GatewayConfig(
        models=(
            OfferedModel(name="a", service=tmp_path / "service.json", model_folder=tmp_path, max_seq_len=9),
            OfferedModel(name="b", url="grpc://[::1]:8001", server_model="tensorrt_llm_bls", dialect="hermes"),
            OfferedModel(name="c", url="http://x", adapters={"sql": tmp_path / "sql", "chat": tmp_path / "chat"}),
        ),
        host="::1",
        port=8080,
        api_keys_file=tmp_path / "keys",
        params=GatewayParams(temperature=0.0, stop=("</s>",), max_queue=3),
    )
    config.write(tmp_path / "config.json")
    assert GatewayConfig.read(tmp_path / "config.json") == config


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    model = {"name": "a", "service": "s.json", "adapters": {"sql": "adapters/sql"}}
    (tmp_path / "c.json").write_text(json.dumps({"schema": 1, "models": [model]}), encoding="utf-8")
    (read,) = GatewayConfig.read(tmp_path / "c.json").models
    assert (read.service, read.adapters) == (tmp_path / "s.json", {"sql": tmp_path / "adapters" / "sql"})
    assert read.names == {"a": None, "a:sql": tmp_path / "adapters" / "sql"}


def test_no_parameter_is_part_of_a_key() -> None:
    assert key(GatewayParams()) == {}
    assert all(each.about.runtime for each in table(GatewayParams))


def offering(*models: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "models": [{"name": "a", "url": "http://x", **model} for model in models]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "schema is None"),
        ({"schema": 1}, "at least one model"),
        ({"schema": 1, "models": [{}]}, "missing 1 required"),
        ({"schema": 1, "models": [{"name": "a"}]}, "a service.json or a url"),
        (offering({"url": "x"}), "not the address of a server"),
        (offering({"url": "grpc://x:0"}), "not the address of a server"),
        (offering({"colour": 1}), "a model has no colour"),
        (offering({}, {}), "two models have the name a"),
        (offering({"adapters": {"b": "b"}}, {"name": "a:b"}), "two models have the name a:b"),
        (offering({"adapters": ["b"]}), "not a gateway's configuration"),
        ({**offering({}), "params": {"speed": 1}}, "params has no speed"),
        ({"schema": 1, "models": 5}, "is not a gateway's configuration"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps(given), encoding="utf-8")
    with pytest.raises(UsageError, match=r"c\.json") as caught:
        GatewayConfig.read(tmp_path / "c.json")
    assert said in caught.value.message


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# a comment\n\n  key-number-one \nkey-number-two\n", encoding="utf-8")
    keys = Keys(path)
    assert keys.accept(b"Bearer key-number-one")
    assert keys.accept(b"bearer  key-number-two")
    assert not any(
        keys.accept(each)
        for each in (b"", b"Bearer", b"Bearer # a comment", b"key-number-one", b"Basic key-number-one")
    )
    assert "key-number" not in repr(vars(keys))
    for content, said in (("", "has no key"), ("# x\n", "has no key"), ("short\n", "fewer than 8")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(PipelineError, match=said):
            Keys(path)


def test_keys_that_change_are_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("key-number-one\n", encoding="utf-8")
    keys = Keys(path)
    path.write_text("key-number-two\nkey-number-three\n", encoding="utf-8")
    assert keys.accept(b"Bearer key-number-one")
    keys.refresh()
    assert not keys.accept(b"Bearer key-number-one")
    assert keys.accept(b"Bearer key-number-two")
    path.write_text("", encoding="utf-8")
    keys.refresh()
    path.unlink()
    keys.refresh()
    keys.refresh()
    assert keys.accept(b"Bearer key-number-two"), "a file that is being written, or gone, locks nobody out"
    assert len(caplog.messages) == 2
    assert "key-number" not in caplog.text
    path.write_text("key-number-four\n", encoding="utf-8")
    keys.refresh()
    assert keys.accept(b"Bearer key-number-four")


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "trtllm_pipeline.serve.gateway.gateway_server", raising=False)
    monkeypatch.delattr(gateway, "server", raising=False)
    config = GatewayConfig(models=(OfferedModel(name="a", url="grpc://127.0.0.1:1"),))
    with pytest.raises(UsageError, match="needs the package uvicorn") as caught:
        gateway.run(config, tmp_path, lambda _told: None)
    assert caught.value.hint == "pip install 'trtllm-pipeline[gateway]'"


@pytest.mark.parametrize(
    ("host", "said", "hint"),
    [
        ("127.0.0.1", "127.0.0.1 port .*: Address already in use", "--port"),
        ("192.0.2.1", "192.0.2.1 port .*: Cannot assign", "--host"),
        ("not.a.host.invalid", "not.a.host.invalid port", "--host"),
        ("a..b", r"a\.\.b port", "--host"),
    ],
)
def test_where_nobody_can_listen_the_option_to_change_is_named(host: str, said: str, hint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match=said) as caught:
        server._listen(host, other.getsockname()[1])
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("params", "said"), [({"end_id": 2, "pad_id": 0}, ["end_id and pad_id"]), ({"pad_id": 0}, ["pad_id"]), ({}, [])]
)
def test_what_an_openai_server_does_not_take_is_said(
    caplog: pytest.LogCaptureFixture, params: dict[str, Any], said: list[str]
) -> None:
    async def asked() -> None:
        server = ModelServer(OfferedModel(name="a", url="http://127.0.0.1:1/v1"), GatewayParams(**params))
        for _ in range(2):
            await server.backend()
        server.close()

    asyncio.run(asked())
    assert [each.partition(" of the gateway")[0] for each in caplog.messages] == said
