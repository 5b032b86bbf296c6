from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trtllm_pipeline.serving.readback import compare


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
        (lambda c: c.ClearField("input"), "input[0]", "there", None),
        (
            lambda c: setattr(c.parameters["enable_kv_cache_reuse"], "string_value", "true"),
            "parameters[enable_kv_cache_reuse].string_value",
            "false",
            "true",
        ),
        (lambda c: c.parameters.clear(), "parameters[enable_kv_cache_reuse]", "there", None),
    ],
)
def test_what_is_different_is_told(change: Callable[[Any], Any], path: str, asked: Any, got: Any) -> None:
    served = filled_in(written())
    change(served)
    assert differing(written(), served) == [(path, asked, got)]
