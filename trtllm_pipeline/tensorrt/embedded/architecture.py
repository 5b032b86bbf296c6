"""The model description in a Hugging Face `config.json`, for the architectures that are converted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.models import Fields
from trtllm_pipeline.tensorrt.embedded.params import ARCHITECTURES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
_MOST_LAYERS: Final = 10_000
_MOST_TOKENS: Final = 10_000_000
"""Far more than any known model has: a table of each must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies stretched by wavelength, as in Llama 3.1."""

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
    # The remaining fields are only for the float reference: such models are not converted.
    activation: Literal["silu", "gelu_tanh"] = "silu"
    rotary_dim: int | None = None
    """Number of rotated values of each head. None for all of them, 0 for learned positions."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Factor of the attention scores. None for head_dim^-0.5."""
    attention_cap: float | None = None
    """Scores x become cap tanh(x / cap)."""
    logit_cap: float | None = None
    parallel: bool = False
    """True if attention and MLP both read the layer's input."""
    num_experts: int = 0
    experts_per_token: int = 0
    renormalized: bool = True
    """True if the weights of a token's experts add up to 1."""

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def rope_divisors(self) -> NDArray[np.float64]:
        """Divisors of the rotated/2 rotary frequencies. Ones without scaling.

        Source for llama3: the reference implementation in https://github.com/meta-llama/llama-models.
        """
        import numpy as np

        half = self.rotated // 2
        scaling = self.rope_scaling
        if not isinstance(scaling, Llama3Scaling):
            return np.full(half, scaling or 1.0)
        frequencies = self.rope_theta ** (-np.arange(half) / half)
        turns = scaling.original_context * frequencies / (2 * np.pi)  # full turns within the original context
        # 0 if the whole frequency is stretched, 1 if none is, a linear blend between the two.
        keep = np.clip(
            (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0
        )
        return 1.0 / ((1.0 - keep) / scaling.factor + keep)


def tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a Hugging Face directory, from the embedding through the layers to the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for part, rows in (("q", query), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{part}_proj.weight", (rows, hidden)
            if config.architecture == "qwen2":
                yield f"{prefix}self_attn.{part}_proj.bias", (rows,)
        if config.architecture == "qwen3":
            yield prefix + "self_attn.q_norm.weight", (config.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (config.head_dim,)
        yield prefix + "self_attn.o_proj.weight", (hidden, query)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield FINAL_NORM, (hidden,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, hidden)


def read_config(folder: Path) -> ModelConfig:
    """The geometry of the model in `folder`.

    Raises StageError (infeasible) if the converter, and llama.cpp, would not compute the model exactly.
    """
    path = folder / "config.json"
    raw = Fields.read(folder, path.name)
    names = raw.texts("architectures")
    architecture = ARCHITECTURES.get(names[0]) if len(names) == 1 else None
    if architecture is None:
        raise refused(path, f"architecture {', '.join(names) or '(none named)'} is not converted")
    if raw.has("quantization_config"):
        raise refused(path, "its weights are quantized already", hint="start from the unquantized model")
    if (activation := raw.text("hidden_act")) not in {None, "silu"}:
        raise refused(path, f"activation {activation!r} is not silu")
    if raw.flag("use_sliding_window"):
        raise refused(path, "sliding window attention is not supported")
    theta, scaling = _rope(path, raw, names[0])
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        num_layers=raw.integer("num_hidden_layers", most=_MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=raw.integer("head_dim", max(1, hidden // heads)),
        vocab_size=raw.integer("vocab_size", most=_MOST_TOKENS),
        max_position_embeddings=raw.integer("max_position_embeddings"),
        rms_norm_eps=raw.number("rms_norm_eps", most=1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=raw.flag("tie_word_embeddings"),
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise refused(
            path,
            f"{config.num_heads} heads and {config.num_kv_heads} key/value heads of {config.head_dim} do not divide evenly",
        )
    return config


def _rope(path: Path, raw: Fields, architecture: str) -> tuple[float, float | Llama3Scaling | None]:
    """Base and scaling of the rotary embedding, from the older keys or from transformers 5's `rope_parameters`."""
    older, newer = raw.fields("rope_scaling"), raw.fields("rope_parameters")
    base = newer if newer.has("rope_theta") else older if older.has("rope_theta") else raw
    theta = base.number("rope_theta", 10000.0)
    part = next((each for each in (newer, older) if each.has("partial_rotary_factor")), raw)
    if part.number("partial_rotary_factor", 1.0) != 1.0:
        raise refused(path, "a rotary embedding over a part of each head is not supported")
    scaling = newer if newer.values.keys() - {"rope_theta", "partial_rotary_factor"} else older
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, scaling.number("factor")
    if kind == "llama3" and architecture == "LlamaForCausalLM":
        llama3 = Llama3Scaling(
            factor=scaling.number("factor"),
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
            original_context=scaling.integer("original_max_position_embeddings"),
        )
        if llama3.low_freq_factor >= llama3.high_freq_factor:
            raise refused(path, "its low_freq_factor is not below its high_freq_factor")
        return theta, llama3
    raise refused(path, f"rope scaling {kind!r} is not supported (supported: default, linear, and llama3 for Llama)")


def refused(path: Path, reason: str, *, hint: str | None = None) -> StageError:
    return StageError(
        f"{path} cannot be converted: {reason}",
        failure=FailureClass.INFEASIBLE,
        hint=hint or f"the embedded toolchain converts {', '.join(ARCHITECTURES)}",
    )
