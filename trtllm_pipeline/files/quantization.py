"""How the weights of a Hugging Face folder are quantized already, by what its own files say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

FILES: Final = ("config.json", "hf_quant_config.json")
AS_IS: Final = "as_is"
"""The precision of cells that serve weights the way their files have them."""
Form = Literal[
    "fp8", "fp8_block", "fbgemm_fp8", "nvfp4", "mxfp4", "int4_awq", "w4a8_awq", "awq", "gptq", "gptq_desc_act", "mixed"
]
"""Forms of weights that TensorRT-LLM has a name for. int4_awq and w4a8_awq are Model Optimizer's, awq is AutoAWQ's."""
FORMS: Final[tuple[str, ...]] = get_args(Form)

# Model Optimizer's names, in hf_quant_config.json.
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
    """What files say of weights."""

    form: str
    """One of FORMS, or another name that the files give."""
    said: str
    """The files' own word and the file: "FP8 by its hf_quant_config.json"."""
    group_size: int | None = None
    """Weights that share a scale, of a form that has groups of several sizes, where the files say it; -1 for a whole column."""


def quantization(files: Mapping[str, Mapping[str, Any] | None]) -> QuantizedWeights | None:
    """How weights are quantized, out of the parsed FILES by name; None for unquantized weights.

    Model Optimizer's own file comes first, as in TensorRT-LLM's `load_modelopt_quant_config`.
    """
    config, model_optimizer = (files.get(name) or {} for name in FILES)
    found = model_optimizer.get("quantization")
    if isinstance(found, Mapping):
        word = str(found.get("quant_algo") or "an algorithm it does not name")[:40]
        return QuantizedWeights(_ALGORITHMS.get(word.upper(), word.lower()), f"{word} by its {FILES[1]}", _group(found))
    found = config.get("quantization_config")
    if isinstance(found, Mapping):
        word = str(found.get("quant_algo") or found.get("quant_method") or "an algorithm it does not name")[:40]
        return QuantizedWeights(_by_transformers(found, word), f"{word} by its {FILES[0]}", _group(found))
    return None


def _group(found: Mapping[str, Any]) -> int | None:
    size = found.get("group_size", found.get("q_group_size"))
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _by_transformers(found: Mapping[str, Any], word: str) -> str:
    """The form of weights that config.json alone tells of."""
    method = str(found.get("quant_method") or word).lower()[:40]
    if method == "fp8":
        return "fp8_block" if found.get("weight_block_size") == [128, 128] else "fp8 without blocks of 128 x 128"
    if method == "gptq" and found.get("bits") == 4:
        return "gptq_desc_act" if found.get("desc_act") else "gptq"
    if method in {"awq", "gptq"} and found.get("bits") != 4:
        return f"{method} of {found.get('bits')} bits"
    return method if method != "modelopt" else "modelopt without hf_quant_config.json"


def shown(precision: str, form: object) -> str:
    """A precision for people: "as_is (fp8)" where the form of the weights is known."""
    return f"{precision} ({form})" if precision == AS_IS and form else precision
