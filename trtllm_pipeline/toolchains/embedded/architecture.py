"""What a Hugging Face `config.json` says about a model, for the architectures that are converted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.errors import FailureClass, StageError

ARCHITECTURES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class name in `config.json` -> name of the architecture in a GGUF file."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies stretched by wavelength, as Llama 3.1 does it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of a decoder-only transformer with RMS norms, rotary embeddings, grouped attention and a SiLU-gated MLP."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: float | Llama3Scaling | None
    """A float is the factor of linear position interpolation."""
    tie_word_embeddings: bool

    def rope_divisors(self) -> NDArray[np.float64]:
        """What each of the head_dim/2 rotary frequencies is divided by; ones without scaling.

        Source for llama3: the reference implementation in https://github.com/meta-llama/llama-models.
        """
        half = self.head_dim // 2
        scaling = self.rope_scaling
        if not isinstance(scaling, Llama3Scaling):
            return np.full(half, scaling or 1.0)
        frequencies = self.rope_theta ** (-np.arange(half) / half)
        turns = scaling.original_context * frequencies / (2 * np.pi)  # full turns within the original context
        # 0 where the whole frequency is stretched, 1 where none is, between the two a linear blend.
        keep = np.clip(
            (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0
        )
        return 1.0 / ((1.0 - keep) / scaling.factor + keep)


def read_config(folder: Path) -> ModelConfig:
    """The geometry of the model in `folder`.

    Raises StageError (infeasible) where the model is not one the converter, and llama.cpp, would compute exactly.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(
            f"{path} cannot be read: {error}",
            failure=FailureClass.USER,
            hint="the model has to be a Hugging Face folder: config.json, *.safetensors, tokenizer.json",
        ) from error
    if not isinstance(raw, dict):
        raise refused(path, "it is not a JSON object")
    names = raw.get("architectures") or []
    architecture = ARCHITECTURES.get(names[0]) if len(names) == 1 else None
    if architecture is None:
        raise refused(path, f"architecture {', '.join(map(str, names)) or '(none named)'} is not converted")
    if "quantization_config" in raw:
        raise refused(path, "its weights are quantized already", hint="start from the unquantized model")
    if raw.get("hidden_act", "silu") != "silu":
        raise refused(path, f"activation {raw['hidden_act']!r} is not silu")
    if raw.get("use_sliding_window"):
        raise refused(path, "sliding window attention is not supported")
    theta, scaling = _rope(path, raw)
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        config = ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise refused(path, f"it lacks {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise refused(path, f"a value has the wrong type: {error}") from error
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise refused(
            path,
            f"{config.num_heads} heads over {config.num_kv_heads} key/value heads of {config.head_dim} do not divide evenly",
        )
    return config


def _rope(path: Path, raw: Mapping[str, Any]) -> tuple[float, float | Llama3Scaling | None]:
    """Base and scaling of the rotary embedding, from the older keys or from transformers 5's `rope_parameters`."""
    merged = {
        "rope_theta": raw.get("rope_theta"),
        **(raw.get("rope_scaling") or {}),
        **(raw.get("rope_parameters") or {}),
    }
    theta = float(merged["rope_theta"] or 10000.0)
    if float(merged.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise refused(path, "a rotary embedding over a part of each head is not supported")
    kind = merged.get("rope_type", merged.get("type", "default"))
    try:
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, float(merged["factor"])
        if kind == "llama3" and raw["architectures"] == ["LlamaForCausalLM"]:
            return theta, Llama3Scaling(
                factor=float(merged["factor"]),
                low_freq_factor=float(merged["low_freq_factor"]),
                high_freq_factor=float(merged["high_freq_factor"]),
                original_context=int(merged["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise refused(path, f"its {kind} rope scaling lacks {error.args[0]}") from error
    raise refused(path, f"rope scaling {kind!r} is not supported (default, linear, and llama3 for Llama are)")


def refused(path: Path, reason: str, *, hint: str | None = None) -> StageError:
    """A model that can never be converted, in words."""
    return StageError(
        f"{path} cannot be converted: {reason}",
        failure=FailureClass.INFEASIBLE,
        hint=hint or f"the embedded toolchain converts {', '.join(ARCHITECTURES)}",
    )
