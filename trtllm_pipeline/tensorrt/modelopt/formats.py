"""The precisions: Model Optimizer's configuration and TensorRT-LLM's name of each.

Source of the names: TensorRT-LLM's checkpoint format, https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from trtllm_pipeline.base import FailureClass, StageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class WeightPrecision:
    """One precision of the weights."""

    config: str | None
    """Name of the configuration in `modelopt.torch.quantization`. None for unquantized weights."""
    algorithm: str | None
    """TensorRT-LLM's `quant_algo`."""
    calibrated: bool = False
    """True if activations are calibrated on text."""
    passes: int = 1
    """Number of calibration passes over the rows."""
    searches: bool = False
    """True if calibration adds up losses, so that a batch must not count twice. The others only compute maxima."""
    by_builder: bool = False
    """True if weights stay unquantized in a TensorRT-LLM checkpoint: `trtllm-build` quantizes them into its kernels' layout."""


PRECISIONS: Final[Mapping[str, WeightPrecision]] = {
    "fp16": WeightPrecision(None, None),
    "bf16": WeightPrecision(None, None),
    "fp8": WeightPrecision("FP8_DEFAULT_CFG", "FP8", calibrated=True),
    "int8_wo": WeightPrecision("INT8_WEIGHT_ONLY_CFG", "W8A16", by_builder=True),
    "int4_wo": WeightPrecision("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "W4A16", by_builder=True),
    "int8_sq": WeightPrecision("INT8_SMOOTHQUANT_CFG", "W8A8_SQ_PER_CHANNEL", calibrated=True),
    "int4_awq": WeightPrecision("INT4_AWQ_CFG", "W4A16_AWQ", calibrated=True, passes=2, searches=True),
    "w4a8_awq": WeightPrecision("W4A8_AWQ_BETA_CFG", "W4A8_AWQ", calibrated=True, passes=2, searches=True),
    "nvfp4": WeightPrecision("NVFP4_DEFAULT_CFG", "NVFP4", calibrated=True),
}

_CACHES: Final = {None: None, "none": None, "fp16": None, "bf16": None, "fp8": "FP8", "int8": "INT8", "nvfp4": "NVFP4"}
"""Precision of a KV cache -> TensorRT-LLM's `kv_cache_quant_algo`."""
_WILDCARDS: Final = frozenset("*?[")
T = TypeVar("T")


def precision(name: str) -> WeightPrecision:
    """The precision called `name`. Raises StageError (infeasible) for other names."""
    return _known("precision", name, PRECISIONS)


def kv_cache_algorithm(name: str | None) -> str | None:
    """TensorRT-LLM's `kv_cache_quant_algo`. None if the cache is not quantized. Raises StageError for unknown names."""
    return _known("kv_cache_precision", name, _CACHES)


def _known(what: str, name: str | None, table: Mapping[Any, T]) -> T:
    if name not in table:
        raise StageError(
            f"{what} {name!r} is not known to the quantization worker",
            failure=FailureClass.INFEASIBLE,
            hint=f"choose one of {', '.join(filter(None, table))}",
        )
    return table[name]


def keeps_weights(chosen: WeightPrecision, *, for_engines: bool) -> bool:
    """True if the checkpoint has the model's own weights."""
    return chosen.config is None or (chosen.by_builder and for_engines)


def configuration(chosen: WeightPrecision, kv_cache: str | None, *, for_engines: bool) -> dict[str, Any]:
    """Model Optimizer's configuration for weights or cache. Imports Model Optimizer.

    Raises StageError if it is too old.
    """
    import modelopt.torch.quantization as mtq

    from trtllm_pipeline.tensorrt.modelopt import maximum

    quantizers: dict[str, Any]
    if keeps_weights(chosen, for_engines=for_engines):
        quantizers = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
    else:
        quantizers = copy.deepcopy(getattr(mtq, str(chosen.config)))
    if not isinstance(quantizers["quant_cfg"], list):
        from importlib.metadata import version

        raise StageError(
            f"Model Optimizer {version('nvidia-modelopt')} of {sys.executable} is too old: its configurations have another form",
            failure=FailureClass.USER,
            hint="pip install 'trtllm-pipeline[quantize]' installs a release that works",
        )
    if kv_cache == "INT8":
        # Model Optimizer has no preset for it. The two quantizers are from its FP8 and NVFP4 presets.
        quantizers["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": 8, "axis": None}})
    elif kv_cache is not None:
        quantizers["quant_cfg"].extend(copy.deepcopy(getattr(mtq, f"{kv_cache}_KV_CFG")["quant_cfg"]))
    maximum.use_in(quantizers)
    return quantizers


def concerning(configuration: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A configuration without the exceptions for parts that `model` does not have.

    Model Optimizer searches all quantizers for each exception: a tenth of a second in total for a 7B model.
    """
    names = [f"{name}." for name, _ in model.named_modules()]
    kinds = {f"nn.{kind.__name__}" for module in model.modules() for kind in type(module).__mro__}

    def needed(entry: Mapping[str, Any]) -> bool:
        part = entry["quantizer_name"].strip("*")
        if entry.get("enable") is not False or part.endswith("quantizer") or _WILDCARDS & {*part}:
            return True
        return entry.get("parent_class") in {None, *kinds} and any(part in name for name in names)

    return {**configuration, "quant_cfg": [entry for entry in configuration["quant_cfg"] if needed(entry)]}
