"""The names of layers in LoRA adapters and in TensorRT-LLM, and whether an adapter fits a model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.models import Fields

if TYPE_CHECKING:
    from trtllm_pipeline.models import verify

ADAPTERS: Final = ("adapter", "adapter2", "adapter3", "adapter4")
"""Inputs of stages with adapters, and the stages that fetch them: the maximum of a cell."""
NO_ADAPTER: Final = "none"
"""Replaces an adapter's name: the model itself."""
MODULES: Final = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
}
"""Layer of an adapter -> its name in TensorRT-LLM. Source: `get_default_trtllm_modules_to_hf_modules` in lora_manager.py."""
MODULE_IDS: Final = {
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}
"""Source: `LORA_MODULE_IDS` in lora_manager.py."""


def check_weights(adapter: Path, model: Path) -> None:
    """Raise StageError for an adapter whose layers have another width than those of the model in directory `model`, and
    for one with layer biases, as PEFT trains them with `bias: all`: no request can send them. Source: HF_LORA_PATTERN
    in the releases' LoRA code, which rejects other tensors as unsupported keys.
    """
    hidden_size = Fields.read(model, "config.json").integer("hidden_size")
    for name, path, entry in tensors_of(adapter):
        if name.endswith(".bias"):
            raise StageError(
                f"{path}: it has a bias of a layer ({name}), which TensorRT-LLM does not support",
                failure=FailureClass.INFEASIBLE,
                hint="train it with bias: none, or merge it into the model",
            )
        width = entry.shape[-1]
        if re.search(r"\b[qkv]_proj\b.*lora_A", name) and width != hidden_size:
            raise StageError(
                f"{path}: {name} takes {width} values, the model's layers have {hidden_size}: it was trained for another model",
                failure=FailureClass.INFEASIBLE,
            )


def number_of_values(adapter: Path) -> int:
    return sum(math.prod(entry.shape) for _, _, entry in tensors_of(adapter))


def tensors_of(adapter: Path) -> Iterator[tuple[str, Path, verify.TensorEntry]]:
    """Name, file and entry of each tensor of an adapter."""
    from trtllm_pipeline.models import verify

    for file in sorted(adapter.glob("*.safetensors")):
        shard = verify.tensors(adapter, file.name)
        yield from ((name, shard.path, entry) for name, entry in shard.tensors.items())
