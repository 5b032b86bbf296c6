"""How the weights of a Hugging Face directory are already quantized, according to its own files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

FILES: Final = ("config.json", "hf_quant_config.json")
AS_IS: Final = "as_is"
"""The precision of cells that serve weights in the form of their files."""
Form = Literal[
    "fp8",
    "fp8_block",
    "fbgemm_fp8",
    "nvfp4",
    "mxfp4",
    "int4_awq",
    "w4a8_awq",
    "awq",
    "gptq",
    "gptq_desc_act",
    "mixed",
    "mixed_nvfp4",
]
"""Forms of weights with a TensorRT-LLM name. int4_awq and w4a8_awq are Model Optimizer's, awq is AutoAWQ's; mixed and
mixed_nvfp4 are Model Optimizer's weights with a separate algorithm for each layer, without and with NVFP4 among them.
"""
FORMS: Final[tuple[str, ...]] = get_args(Form)

# Model Optimizer's names in hf_quant_config.json.
_ALGORITHMS: Final = {
    "FP8": "fp8",
    "FP8_BLOCK_SCALES": "fp8_block",
    "FP8_PB_WO": "fp8_block",
    "NVFP4": "nvfp4",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "MIXED_PRECISION": "mixed",
}


class QuantizedWeights(NamedTuple):
    """Quantization of weights, as a model's files describe it."""

    form: str
    """One of FORMS, or another name from the files."""
    said: str
    """The name in the files, and the file: "FP8 by its hf_quant_config.json". The field's name is in the index of workspaces."""
    group_size: int | None = None
    """Number of weights that share a scale, if the format has several group sizes and the files specify it. -1: a whole
    column.
    """


def quantization(files: Mapping[str, Mapping[str, Any] | None]) -> QuantizedWeights | None:
    """The quantization of weights, from the parsed FILES by name. None for unquantized weights.

    Model Optimizer's own file takes precedence, as in TensorRT-LLM's `load_modelopt_quant_config`.
    """
    config, model_optimizer = (files.get(name) or {} for name in FILES)
    section = model_optimizer.get("quantization")
    if isinstance(section, Mapping):
        word = str(section.get("quant_algo") or "an algorithm it does not name")[:40]
        form = _ALGORITHMS.get(word.upper(), word.lower())
        return QuantizedWeights(
            f"{form}_nvfp4" if form == "mixed" and _has_nvfp4(section) else form,
            f"{word} by its {FILES[1]}",
            _group(section),
        )
    section = config.get("quantization_config")
    if isinstance(section, Mapping):
        word = str(section.get("quant_algo") or section.get("quant_method") or "an algorithm it does not name")[:40]
        return QuantizedWeights(_by_transformers(section, word), f"{word} by its {FILES[0]}", _group(section))
    return None


def _has_nvfp4(section: Mapping[str, Any]) -> bool:
    """True if any layer has NVFP4 weights, with 4-bit or 16-bit activations."""
    layers = section.get("quantized_layers")
    parts = layers.values() if isinstance(layers, Mapping) else ()
    return any("NVFP4" in str(each.get("quant_algo")).upper() for each in parts if isinstance(each, Mapping))


def _group(section: Mapping[str, Any]) -> int | None:
    size = section.get("group_size", section.get("q_group_size"))
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _by_transformers(section: Mapping[str, Any], word: str) -> str:
    """The weight format, if config.json alone determines it."""
    method = str(section.get("quant_method") or word).lower()[:40]
    if method == "fp8":
        return "fp8_block" if section.get("weight_block_size") == [128, 128] else "fp8 without blocks of 128 x 128"
    if method == "gptq" and section.get("bits") == 4:
        return "gptq_desc_act" if section.get("desc_act") else "gptq"
    if method in {"awq", "gptq"} and section.get("bits") != 4:
        return f"{method} of {section.get('bits')} bits"
    return method if method != "modelopt" else "modelopt without hf_quant_config.json"


def shown(precision: str, form: object) -> str:
    """A precision as displayed: "as_is (fp8)" if the weight format is known."""
    return f"{precision} ({form})" if precision == AS_IS and form else precision
