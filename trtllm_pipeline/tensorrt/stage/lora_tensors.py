"""A LoRA adapter in the form that TensorRT-LLM engines need: two tensors, sent with the first request that uses it.

    lora_config   [rows, 3]      for each layer that the adapter changes: module, number of the layer, rank r
    lora_weights  [rows, width]  for the same rows: A [r, in], then B [out, r] times the adapter's scale, padded with zeros

`B @ A` of a row is the adapter's addition to the layer's weight [out, in]. Values have the engine's data type. Source:
"LoRA tensor format details" of TensorRT-LLM's page on LoRA, `hf_lora_convert.py` of its examples, `loraUtils.cpp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure import session
from trtllm_pipeline.models import CONFIGURATION, Fields, tensor_values
from trtllm_pipeline.tensorrt.stage.lora import MODULE_IDS, MODULES, tensors_of

WEIGHTS_FILE: Final = "model.lora_weights.npy"
CONFIG_FILE: Final = "model.lora_config.npy"
"""File names from `hf_lora_convert.py`, which `lora_prefetch_dir` looks for."""
_NAME: Final = re.compile(
    r".*\.layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<module>\w+)\.lora_(?P<part>[AB])(?:\.\w+)?\.weight"
)
_ALPHA: Final = 8.0
"""PEFT's default."""


class _Row(NamedTuple):
    module: str
    layer: int


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """An adapter for engines of one data type."""

    weights: NDArray[Any]
    """[rows, width] of float32, float16, or uint16 with the bits of bfloat16."""
    config: NDArray[np.int32]
    """[rows, 3]: module, layer, rank."""

    def inputs(self) -> dict[str, session.InputTensor]:
        """Inputs of the first request, in addition to the adapter's number."""
        return {
            "lora_weights": session.InputTensor(self.weights.shape, self.weights.tobytes()),
            "lora_config": session.InputTensor(self.config.shape, self.config.tobytes()),
        }

    def write(self, folder: Path) -> None:
        """Write both, with a batch dimension, as `hf_lora_convert.py` does: bfloat16 as 2 bytes without a type."""
        weights = self.weights.view("V2") if self.weights.dtype == np.uint16 else self.weights
        np.save(folder / WEIGHTS_FILE, weights[None])
        np.save(folder / CONFIG_FILE, self.config[None])


def convert(adapter: Path, dtype: str) -> LoraTensors:
    """The adapter in a directory, for engines of `dtype`: float32, float16 or bfloat16.

    Raises StageError for a layer that engines do not name, an incomplete pair, and values beyond the range of float16.
    """
    configuration = Fields.read(adapter, CONFIGURATION["adapter"]).values
    rows, config = [], []
    for row, (down, up) in sorted(_pairs(adapter).items()):
        rank = len(down)
        try:
            scale = scale_of(configuration, row.module, rank)
        except (AttributeError, TypeError, ValueError) as error:
            raise _wrong(
                adapter, f"lora_alpha or alpha_pattern of its adapter_config.json is not a number: {error}"
            ) from error
        if up.shape[1] != rank:
            raise _wrong(adapter, f"A of layer {row.layer}, {row.module} has rank {rank}, B has {up.shape[1]}")
        rows.append(np.concatenate([down.ravel(), up.ravel() * np.float32(scale)]))
        config.append((MODULE_IDS[MODULES[row.module]], row.layer, rank))
    if not rows:
        raise _wrong(adapter, "it does not change any layer")
    weights = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for place, values in zip(weights, rows, strict=True):
        place[: len(values)] = values
    return LoraTensors(_as(weights, dtype, adapter), np.array(config, np.int32))


def scale_of(configuration: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor of B: alpha / rank, or alpha / sqrt(rank) for a rank-stabilized adapter.

    Source: PEFT, `LoraLayer.update_layer`; papers 2106.09685, section 4.1, and 2312.03732.
    """
    pattern = configuration.get("alpha_pattern") or {}
    named = next((value for name, value in pattern.items() if name.rpartition(".")[2] == module), None)
    alpha = float(configuration.get("lora_alpha", _ALPHA) if named is None else named)
    return alpha / (math.sqrt(rank) if configuration.get("use_rslora") else rank)


def _pairs(adapter: Path) -> dict[_Row, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """A [r, in] and B [out, r] of each layer."""
    pairs: dict[_Row, dict[str, NDArray[np.float32]]] = {}
    for name, path, entry in tensors_of(adapter):
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in MODULES:
            raise _wrong(adapter, f"engines do not support its tensor {name}")
        if entry.dtype not in tensor_values.DTYPES or len(entry.shape) != 2:
            raise _wrong(
                adapter, f"its tensor {name} is {entry.dtype} {list(entry.shape)}; expected a matrix of floats"
            )
        pairs.setdefault(_Row(match["module"], int(match["layer"])), {})[match["part"]] = tensor_values.read(
            path, entry
        )
    for row, parts in pairs.items():
        if lacking := {"A", "B"} - parts.keys():
            raise _wrong(adapter, f"layer {row.layer}, {row.module} has no lora_{min(lacking)}")
    return {row: (parts["A"], parts["B"]) for row, parts in pairs.items()}


def _as(weights: NDArray[np.float32], dtype: str, adapter: Path) -> NDArray[Any]:
    if not np.isfinite(weights).all():
        raise _wrong(adapter, "it has values that are not finite")
    if dtype == "bfloat16":
        return tensor_values.to_bfloat16(weights)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            halves = weights.astype(np.float16)
        if not np.isfinite(halves).all():
            raise _wrong(adapter, f"its largest value, {np.abs(weights).max():g}, is beyond the range of float16")
        return halves
    return weights


def _wrong(adapter: Path, why: str) -> StageError:
    return StageError(f"the LoRA adapter {adapter}: {why}", failure=FailureClass.INFEASIBLE)
