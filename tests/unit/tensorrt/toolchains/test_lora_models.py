"""LoRA adapters in the Triton models around an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.adapters import random_pairs, write_adapter, write_tensors
from tests.helpers.broken_repositories import write_engine, write_model
from tests.standins import templates as standin
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.base.machine.model import TensorRTLLM
from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.tensorrt.trtllm import frontends
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository

BUILT: dict[str, Any] = {"max_lora_rank": 8, "lora_target_modules": ["attn_q", "attn_k", "attn_v"]}


def engine_for(folder: Path, release: str, dtype: str = "float16", **lora: Any) -> Path:
    engine = write_engine(folder / "engine", release)
    config = json.loads((engine / "config.json").read_text())
    config["pretrained_config"]["dtype"] = dtype
    config["build_config"]["plugin_config"]["lora_plugin"] = dtype if lora else None
    config["build_config"]["lora_config"] = lora
    (engine / "config.json").write_text(json.dumps(config))
    return engine


def write(folder: Path, release: str, engine: Path, *adapters: Path, **asked: Any) -> Path:
    model, out = write_model(folder / "model"), folder / "out"
    (model / "config.json").write_text('{"hidden_size": 16}')
    out.mkdir()
    installed = TensorRTLLM(release, templates=str(standin.install(folder, release)))
    frontends.write_engine(
        out,
        installed,
        engine=engine,
        model=model,
        params=EngineRepository(max_batch_size=4, **asked),
        adapters=adapters,
    )
    return out


def tensors(out: Path, model: str) -> dict[str, str]:
    config = model_config.read(out / model / "config.pbtxt")
    return {tensor.name: model_config.data_type_name(tensor.data_type) for tensor in config.input}


@pytest.mark.parametrize("release", ["0.10.0", "0.14.0", "0.16.0", "1.1.0rc6"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_model_that_takes_weights_takes_them_in_the_engine_s_type(
    tmp_path: Path, release: str, dtype: str
) -> None:
    adapters = [write_adapter(tmp_path / str(rank), random_pairs({"q_proj": (16, 16)}, rank=rank)) for rank in (2, 4)]
    out = write(tmp_path, release, engine_for(tmp_path, release, dtype, **BUILT), *adapters)
    wanted = {"float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}[dtype]
    for name in ("ensemble", "tensorrt_llm"):
        found = tensors(out, name)
        assert {each: found[each] for each in ("lora_task_id", "lora_weights", "lora_config")} == {
            "lora_task_id": "TYPE_UINT64",
            "lora_weights": wanted,
            "lora_config": "TYPE_INT32",
        }
    assert tensors(out, "tensorrt_llm_bls").get("lora_weights", wanted) == wanted
    (step,) = (
        step
        for step in model_config.read(out / "ensemble" / "config.pbtxt").ensemble_scheduling.step
        if step.model_name == "tensorrt_llm"
    )
    assert {step.input_map[each] for each in ("lora_task_id", "lora_weights", "lora_config")} == {
        *("lora_task_id", "lora_weights", "lora_config")
    }
    parameters = model_config.string_parameters(model_config.read(out / "tensorrt_llm" / "config.pbtxt"))
    assert parameters["lora_cache_max_adapter_size"] == parameters["lora_cache_optimal_adapter_size"] == "4"
    assert "lora_cache_host_memory_bytes" not in parameters


def test_the_cache_is_as_large_as_asked_for_or_as_adapters_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "a", random_pairs({"q_proj": (16, 16)}, rank=4))
    engine = engine_for(tmp_path, "1.1.0rc6", **BUILT)
    values = 2 * 4 * (16 + 16)
    with pytest.raises(StageError, match=rf"lora_cache_host_memory_bytes 100: the adapters have {2 * values} bytes"):
        write(tmp_path, "1.1.0rc6", engine, adapter, lora_cache_host_memory_bytes=100)
    monkeypatch.setattr("trtllm_pipeline.tensorrt.trtllm.lora_models.ADAPTER_CACHE", 3 * values)
    (tmp_path / "b").mkdir()
    out = write(tmp_path / "b", "1.1.0rc6", engine, adapter, lora_cache_max_adapter_size=64)
    parameters = model_config.string_parameters(model_config.read(out / "tensorrt_llm" / "config.pbtxt"))
    assert parameters["lora_cache_host_memory_bytes"] == str(4 * values)
    assert parameters["lora_cache_max_adapter_size"] == "64"


@pytest.mark.parametrize(
    ("built", "pairs", "words"),
    [
        ({}, {"q_proj": (16, 16)}, "was built without lora_plugin"),
        ({**BUILT, "max_lora_rank": 2}, {"q_proj": (16, 16)}, "accepts adapters up to rank 2, this one has 4"),
        (BUILT, {"o_proj": (16, 16)}, "accepts adapters of attn_q, attn_k, attn_v, this one changes attn_dense"),
        (BUILT, {"q_proj": (24, 16)}, "takes 24 values, the model's layers have 16"),
    ],
)
def test_an_engine_that_was_not_built_for_an_adapter_is_refused(
    tmp_path: Path, built: dict[str, Any], pairs: dict[str, tuple[int, int]], words: str
) -> None:
    adapter = write_adapter(tmp_path / "a", random_pairs(pairs, rank=4))
    with pytest.raises(StageError, match=words):
        write(tmp_path, "1.1.0rc6", engine_for(tmp_path, "1.1.0rc6", **built), adapter)


def test_biases_of_layers_are_refused(tmp_path: Path) -> None:
    """PEFT keeps them with `bias: all`, of layers that have any."""
    adapter = write_adapter(tmp_path / "a", random_pairs({"q_proj": (16, 16)}, rank=4), bias="all")
    write_tensors(adapter / "bias.safetensors", {"base_model.model.q_proj.bias": np.zeros(16, np.float32)})
    with pytest.raises(StageError, match=r"has a bias of a layer \(base_model\.model\.q_proj\.bias\)"):
        write(tmp_path, "1.1.0rc6", engine_for(tmp_path, "1.1.0rc6", **BUILT), adapter)
