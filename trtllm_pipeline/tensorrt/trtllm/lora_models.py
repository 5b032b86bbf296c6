"""LoRA adapters in the Triton models around an engine: whether it accepts one, and their parts of config.pbtxt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.models import Engine, model_config, model_names
from trtllm_pipeline.tensorrt.stage.lora import check_weights, number_of_values
from trtllm_pipeline.tensorrt.toolchains.companions import read_adapter
from trtllm_pipeline.tensorrt.trtllm.needs import ADAPTER_CACHE
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository

INPUTS: Final = {
    "lora_task_id": ("TYPE_UINT64", [1]),
    "lora_weights": ("", [-1, -1]),
    "lora_config": ("TYPE_INT32", [-1, 3]),
}
"""Data type and dimensions of an adapter's inputs in a request. Weights have the engine's type."""

_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


def check(adapter: Path, engine: Engine, model: Path) -> int:
    """The rank of an adapter that `engine`, built from the directory `model`, accepts. Raises StageError for another.

    Source: `loraValidateRequestTensors` of loraUtils.cpp, which checks it at the first request.
    """
    rank, modules = read_adapter(adapter)
    why = None
    if engine.max_lora_rank is None:
        why = "was built without lora_plugin"
    elif rank > engine.max_lora_rank:
        why = f"accepts adapters up to rank {engine.max_lora_rank}, this one has {rank}"
    elif lacking := [name for name in modules if name not in engine.lora_target_modules]:
        why = f"accepts adapters of {', '.join(engine.lora_target_modules)}, this one changes {', '.join(lacking)}"
    if why is not None:
        raise StageError(
            f"{adapter}: the engine {engine.folder} {why}",
            failure=FailureClass.INFEASIBLE,
            hint="pipeline stage build --max-lora-rank N --lora-target-modules LAYER,... builds one that accepts it",
        )
    check_weights(adapter, model)
    return rank


def check_all(adapters: Iterable[Path], engine: Engine, model: Path) -> int:
    """The maximum rank of adapters that `engine` accepts, see `check`. 0 without adapters."""
    return max((check(adapter, engine, model) for adapter in adapters), default=0)


def with_cache(params: EngineRepository, rank: int, adapters: Iterable[Path], engine: Engine) -> EngineRepository:
    """With a cache on the host and on GPUs for `adapters` of a rank, unless the user sets it: by default, it is laid
    out for small ones, and has 1 GiB. Raises StageError if the user's cache cannot hold them.

    Rows are padded in the cache, so it needs more than the values themselves (issue 559 of tensorrtllm_backend): twice
    as much here.
    """
    needed = sum(number_of_values(adapter) for adapter in adapters) * _BYTES[engine.dtype or "float16"]
    given = params.lora_cache_host_memory_bytes
    if given is not None and given < needed:
        raise StageError(
            f"settings.repository.lora_cache_host_memory_bytes {given}: the adapters have {needed} bytes",
            failure=FailureClass.USER,
            hint=f"{2 * needed} is enough for them",
        )
    return replace(
        params,
        lora_cache_host_memory_bytes=2 * needed if given is None and 2 * needed > ADAPTER_CACHE else given,
        lora_cache_optimal_adapter_size=params.lora_cache_optimal_adapter_size or rank,
        lora_cache_max_adapter_size=params.lora_cache_max_adapter_size or rank,
    )


def change(engine: Engine, name: str, config: model_config.ModelConfig) -> None:
    """Let a Triton model accept adapters in the engine's type, and let the ensemble pass them on, as from 0.16 on.

    Templates have FP16. The runtime refuses any type other than the engine's, or, if bytes are misread, continues
    without the adapter (issue 791 of tensorrtllm_backend).
    """
    if name == model_names.ENSEMBLE:
        (step,) = (each for each in config.ensemble_scheduling.step if each.model_name == model_names.ENGINE_MODEL)
        known = {tensor.name for tensor in config.input}
        for tensor, (kind, dims) in INPUTS.items():
            if tensor not in known:
                number = model_config.data_type_number(kind or "TYPE_FP16")
                config.input.add(
                    name=tensor, data_type=number, dims=dims, optional=True, allow_ragged_batch=len(dims) > 1
                )
            step.input_map[tensor] = tensor
    for tensor in config.input:
        if tensor.name == "lora_weights":
            tensor.data_type = model_config.data_type_number(model_config.FLOAT_TYPES[engine.dtype or "float16"])
