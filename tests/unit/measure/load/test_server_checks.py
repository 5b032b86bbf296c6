from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.measure.load.server_checks import ExpectedServer, SettingCheck, compare, read_back


def written() -> Any:
    config = ModelConfig(name="tensorrt_llm", backend="python", max_batch_size=4)
    config.model_transaction_policy.decoupled = False
    config.dynamic_batching.max_queue_delay_microseconds = 0
    config.instance_group.add(count=2, kind="KIND_AUTO")
    config.input.add(name="ids", data_type="TYPE_INT32", dims=[-1])
    config.parameters["enable_kv_cache_reuse"].string_value = "false"
    return config


def filled_in(config: Any) -> Any:
    """What Triton makes of it: defaults written out, an instance group named."""
    served = ModelConfig()
    served.CopyFrom(config)
    served.default_model_filename = "model.py"
    served.optimization.input_pinned_memory.enable = True
    served.instance_group[0].name = "tensorrt_llm_0"
    served.instance_group[0].kind = ModelConfig().instance_group.add().KIND_CPU
    served.parameters["more"].string_value = "x"
    return served


def differing(asked: Any, got: Any) -> list[tuple[str, Any, Any]]:
    return [each for each in compare(asked, got) if each[1] != each[2]]


def test_what_triton_fills_in_is_no_difference() -> None:
    assert differing(written(), filled_in(written())) == []
    looked_at = {path for path, _, _ in compare(written(), filled_in(written()))}
    assert "parameters[enable_kv_cache_reuse].string_value" in looked_at
    assert "dynamic_batching.max_queue_delay_microseconds" in looked_at
    assert "input[0].dims[0]" in looked_at


@pytest.mark.parametrize(
    ("change", "path", "asked", "got"),
    [
        (lambda c: setattr(c, "max_batch_size", 8), "max_batch_size", 4, 8),
        (
            lambda c: setattr(c.model_transaction_policy, "decoupled", True),
            "model_transaction_policy.decoupled",
            False,
            True,
        ),
        (
            lambda c: setattr(c.dynamic_batching, "max_queue_delay_microseconds", 100),
            "dynamic_batching.max_queue_delay_microseconds",
            0,
            100,
        ),
        (lambda c: setattr(c.instance_group[0], "count", 1), "instance_group[0].count", 2, 1),
        (lambda c: c.instance_group.add(count=1), "number of instance_group", 1, 2),
        (lambda c: c.ClearField("input"), "input[0]", "present", None),
        (
            lambda c: setattr(c.parameters["enable_kv_cache_reuse"], "string_value", "true"),
            "parameters[enable_kv_cache_reuse].string_value",
            "false",
            "true",
        ),
        (lambda c: c.parameters.clear(), "parameters[enable_kv_cache_reuse]", "present", None),
    ],
)
def test_what_is_different_is_told(change: Callable[[Any], Any], path: str, asked: Any, got: Any) -> None:
    served = filled_in(written())
    change(served)
    assert differing(written(), served) == [(path, asked, got)]


class Served:
    """A server with TensorRT-LLM's `llmapi` model, as its code completes it: without a batch dimension, decoupled."""

    model = ModelConfig(name="tensorrt_llm")

    async def config(self, name: str) -> Any:
        served = ModelConfig(name=name, backend="python", max_batch_size=0)
        served.model_transaction_policy.decoupled = True
        return served


def of_llmapi(folder: Path, text: str | None, **declared: Json) -> list[SettingCheck]:
    """Checks of a repository whose model.yaml contains `text`."""
    version = folder / "tensorrt_llm" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('name: "tensorrt_llm" backend: "python"')
    if text is not None:
        (version / "model.yaml").write_text(text)
    checks = asyncio.run(read_back(Served(), ExpectedServer(declared, repository=folder)))  # type: ignore[arg-type]
    return [check for check in checks if check.asked_by == "the matrix"]


def test_what_llmapi_was_told_is_read_back_under_the_names_of_engines(tmp_path: Path) -> None:
    text = "max_batch_size: 8\nmax_seq_len: 192\nkv_cache_config: {enable_block_reuse: true}\n"
    declared: dict[str, Json] = {"max_batch_size": 4, "max_seq_len": 192, "max_input_len": 128, "tp": 1}
    checks = of_llmapi(tmp_path, text, **declared, enable_kv_cache_reuse=False, decoupled=True, max_num_tokens=None)
    assert checks == [
        SettingCheck("max_batch_size", 4, "the matrix", 8, "model.yaml"),
        SettingCheck("max_seq_len", 192, "the matrix", 192, "model.yaml"),
        SettingCheck("enable_kv_cache_reuse", False, "the matrix", True, "model.yaml"),
        SettingCheck("tensorrt_llm: decoupled", True, "the matrix", True, "the server"),
    ], "the LLM API batches internally: Triton's 0 is not a difference"


@pytest.mark.parametrize("text", [None, "model: x\n", "kv_cache_config:\n"])
def test_what_llmapi_was_not_told_is_not_made_up(tmp_path: Path, text: str | None) -> None:
    assert of_llmapi(tmp_path, text, max_batch_size=4, enable_kv_cache_reuse=False) == []


def test_a_server_that_is_no_triton_tells_nothing(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    claim = ExpectedServer({"max_seq_len": 192}, engine, tmp_path)
    assert asyncio.run(read_back(None, claim)) == [], "a directory of weights"
    (engine / "config.json").write_text('{"build_config": {"max_seq_len": 128}}')
    expected = [SettingCheck("max_seq_len", 192, "the matrix", 128, "the engine's config.json")]
    assert asyncio.run(read_back(None, claim)) == expected
