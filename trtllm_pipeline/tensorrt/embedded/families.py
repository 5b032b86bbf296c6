"""Tiny models with random weights for architectures beyond the embedded toolchain's, and their float reference.

The reference uses Llama's weight names plus an architecture's additional ones. A table here describes how each family's
files name, join, transpose and shift the same weights. It is used in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from trtllm_pipeline.models import Fields
from trtllm_pipeline.tensorrt.embedded import random_model, safetensors
from trtllm_pipeline.tensorrt.embedded.architecture import EMBEDDING, FINAL_NORM, HEAD, ModelConfig, tensors
from trtllm_pipeline.tensorrt.embedded.params import ARCHITECTURES
from trtllm_pipeline.tensorrt.embedded.random_model import tiny_config
from trtllm_pipeline.tensorrt.embedded.reference import POSITIONS, Array, Reference

_LAYER: Final = "model.layers.{}."
_QKV: Final = tuple(f"self_attn.{part}_proj" for part in "qkv")
_NORMS: Final = ("input_layernorm", "post_attention_layernorm", "norm")


@dataclass(frozen=True, slots=True)
class Stored:
    """Weights of one layer, or of the whole model, in a family's files."""

    name: str
    """Name in the files, without `.weight` and `.bias`."""
    parts: tuple[str, ...]
    """The reference's names. Several names are stacked into one matrix in the files."""
    transposed: bool = False
    """The files store inputs along the rows."""


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """One architecture."""

    architecture: str
    """Class name in config.json."""
    config: ModelConfig
    """Shape of the tiny model."""
    more: Mapping[str, Any]
    """Additions and overrides of the common config.json. None removes a key."""
    layer: str = _LAYER
    stored: tuple[Stored, ...] = ()
    """Different names in the files: parts of a layer."""
    outside: tuple[Stored, ...] = ()
    """Different names in the files: outside the layers."""
    shifted_norms: bool = False
    """The files store norm weights minus 1."""
    biases: tuple[str, ...] = ()
    """Last name parts of weights with a bias, in addition to those of the architecture of `config`."""
    without: tuple[str, ...] = ()
    """Last name parts of absent weights."""
    shared_expert: bool = False
    gains: Mapping[str, float] = field(default_factory=dict)
    """Last name part -> factor of random weights. With a tied embedding, layers must outweigh it, or each token would be
    followed by itself. Token-dependent parts must outweigh constant ones."""


_GEMMA: Final = tiny_config(
    hidden_size=256, head_dim=64, tie_word_embeddings=True, activation="gelu_tanh", embedding_scale=16.0
)
_GEMMA_SAYS: Final = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_MLP_BY_NUMBER: Final = (Stored("mlp.fc1", ("mlp.up_proj",)), Stored("mlp.fc2", ("mlp.down_proj",)))
_EXPERTS: Final = {"num_experts_per_tok": 2}
_EXPERT: Final = "mlp.experts.{expert}."

_OTHERS: Final[Mapping[str, TinyFamily]] = {
    "mistral": TinyFamily("MistralForCausalLM", tiny_config(), {"sliding_window": None}),
    "mixtral": TinyFamily(
        "MixtralForCausalLM",
        tiny_config(num_experts=4, experts_per_token=2),
        {**_EXPERTS, "num_local_experts": 4, "sliding_window": None},
        stored=(
            Stored("block_sparse_moe.gate", ("mlp.gate",)),
            Stored("block_sparse_moe.experts.{expert}.w1", (_EXPERT + "gate_proj",)),
            Stored("block_sparse_moe.experts.{expert}.w2", (_EXPERT + "down_proj",)),
            Stored("block_sparse_moe.experts.{expert}.w3", (_EXPERT + "up_proj",)),
        ),
    ),
    "qwen2_moe": TinyFamily(
        "Qwen2MoeForCausalLM",
        tiny_config("qwen2", num_experts=4, experts_per_token=2, renormalized=False),
        {
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        shared_expert=True,
    ),
    "qwen3_moe": TinyFamily(
        "Qwen3MoeForCausalLM",
        tiny_config("qwen3", head_dim=64, num_experts=4, experts_per_token=2),
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "phi3": TinyFamily(
        "Phi3ForCausalLM",
        tiny_config(),
        {"original_max_position_embeddings": 2048, "pad_token_id": 0, "sliding_window": None},
        stored=(Stored("self_attn.qkv_proj", _QKV), Stored("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))),
    ),
    "phi": TinyFamily(
        "PhiForCausalLM",
        tiny_config(num_kv_heads=4, rotary_dim=16, parallel=True, activation="gelu_tanh", rms_norm_eps=1e-5),
        {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "rms_norm_eps": None, "layer_norm_eps": 1e-5},
        stored=(Stored("self_attn.dense", ("self_attn.o_proj",)), *_MLP_BY_NUMBER),
        outside=(Stored("model.final_layernorm", ("model.norm",)),),
        biases=("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "input_layernorm", "norm", "lm_head"),
        without=("gate_proj", "post_attention_layernorm"),
        gains={
            **dict.fromkeys(("embed_tokens", "v_proj", "up_proj", "down_proj"), 2.0),
            **dict.fromkeys(("q_proj", "k_proj"), 1.5),
            "o_proj": 4.0,
        },
    ),
    "gemma": TinyFamily(
        "GemmaForCausalLM", _GEMMA, _GEMMA_SAYS, shifted_norms=True, gains={"o_proj": 12.0, "down_proj": 12.0}
    ),
    "gemma2": TinyFamily(
        "Gemma2ForCausalLM",
        replace(_GEMMA, attention_scale=128**-0.5, attention_cap=5.0, logit_cap=30.0),
        {
            **_GEMMA_SAYS,
            "query_pre_attn_scalar": 128,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
        },
        shifted_norms=True,
        gains={
            **dict.fromkeys(("post_attention_layernorm", "post_feedforward_layernorm"), 32.0),
            **dict.fromkeys(("q_proj", "k_proj"), 2.0),
        },
    ),
    "gpt2": TinyFamily(
        "GPT2LMHeadModel",
        tiny_config(
            "qwen2", num_kv_heads=4, rotary_dim=0, tie_word_embeddings=True, activation="gelu_tanh", rms_norm_eps=1e-5
        ),
        {
            "n_embd": 128,
            "n_head": 4,
            "n_layer": 4,
            "n_positions": 2048,
            "n_inner": 512,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            **dict.fromkeys(
                ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim")
            ),
            **dict.fromkeys(("intermediate_size", "max_position_embeddings", "hidden_act", "rms_norm_eps")),
            "rope_theta": None,
        },
        layer="transformer.h.{}.",
        stored=(
            Stored("ln_1", ("input_layernorm",)),
            Stored("ln_2", ("post_attention_layernorm",)),
            Stored("attn.c_attn", _QKV, transposed=True),
            Stored("attn.c_proj", ("self_attn.o_proj",), transposed=True),
            Stored("mlp.c_fc", ("mlp.up_proj",), transposed=True),
            Stored("mlp.c_proj", ("mlp.down_proj",), transposed=True),
        ),
        outside=(
            Stored("transformer.wte", ("model.embed_tokens",)),
            Stored("transformer.wpe", ("model.embed_positions",)),
            Stored("transformer.ln_f", ("model.norm",)),
        ),
        biases=(*_NORMS, "o_proj", "up_proj", "down_proj"),
        without=("gate_proj",),
        gains={
            **dict.fromkeys(("q_proj", "k_proj", "up_proj"), 1.5),
            "embed_positions": 0.3,
            "down_proj": 2.0,
            "o_proj": 5.0,
        },
    ),
}

FAMILIES: Final = (*ARCHITECTURES.values(), *_OTHERS)
"""As `model_type` of config.json names them."""


def write_model(folder: Path, family: str) -> None:
    """Write the tiny model of a family into `folder`, see `random_model.write_model`."""
    if family in ARCHITECTURES.values():
        random_model.write_model(folder, family, comparable=True)
        return
    known = _OTHERS[family]
    config_json = {**random_model.config_json(known.architecture, family, known.config), **known.more}
    quiet = random_model.write_texts(folder, {name: value for name, value in config_json.items() if value is not None})
    random = np.random.default_rng([0, len(ARCHITECTURES) + list(_OTHERS).index(family)])
    safetensors.write(folder / "model.safetensors", dict(_stored(known, _random(known, random, quiet))))


def reference(folder: Path) -> Reference:
    """The float reference of a model from `write_model`."""
    family = Fields.read(folder, "config.json").text("model_type")
    if family is None or family not in _OTHERS:
        return Reference.from_folder(folder)
    known = _OTHERS[family]
    return Reference(known.config, _canonical(known, safetensors.Weights(folder)))


def _shapes(family: TinyFamily) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The reference's names and shapes of a family's weights."""
    config = family.config
    hidden, inner = config.hidden_size, config.intermediate_size
    for name, shape in tensors(config):
        module = name.rpartition(".")[0]
        part = module.rpartition(".")[2]
        if part in family.without:
            continue
        if config.num_experts and ".mlp." in name:
            before, after = name.split("mlp.")
            yield from ((f"{before}mlp.experts.{expert}.{after}", shape) for expert in range(config.num_experts))
            if part == "down_proj":
                yield f"{before}mlp.gate.weight", (config.num_experts, hidden)
                if family.shared_expert:
                    yield f"{before}mlp.shared_expert_gate.weight", (1, hidden)
                    for up in ("gate_proj", "up_proj"):
                        yield f"{before}mlp.shared_expert.{up}.weight", (inner, hidden)
                    yield f"{before}mlp.shared_expert.down_proj.weight", (hidden, inner)
            continue
        yield name, shape
        if name.endswith("weight") and part in family.biases:
            yield f"{module}.bias", shape[:1]
        if part == "post_attention_layernorm" and config.attention_cap is not None:
            yield from (
                (name.replace("post_attention", each), shape) for each in ("pre_feedforward", "post_feedforward")
            )
    if config.rotated == 0:
        yield POSITIONS, (config.max_position_embeddings, hidden)


def _random(family: TinyFamily, random: np.random.Generator, quiet: list[int]) -> dict[str, Array]:
    config = family.config
    weights = {name: random_model.weight(name, shape, random, comparable=True) for name, shape in _shapes(family)}
    if config.tie_word_embeddings:
        weights[EMBEDDING] = random_model.weight(HEAD, weights[EMBEDDING].shape, random, comparable=True)
    for name in weights:
        weights[name] *= np.float32(family.gains.get(name.split(".")[-2], 1.0))
    weights[EMBEDDING if config.tie_word_embeddings else HEAD][quiet] *= np.float32(_QUIET)
    return weights


_QUIET: Final = 0.1
"""Tokens that the model must not generate but must still read, even with a tied embedding."""


def _stored(family: TinyFamily, weights: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    """The reference's weights in the format of the family's files."""
    left = dict(weights)
    for stored, suffix in _places(family):
        parts = [f"{part}.{suffix}" for part in stored.parts]
        if parts[0] in left:
            joined = np.concatenate([left.pop(part) for part in parts])
            yield f"{stored.name}.{suffix}", joined.T if stored.transposed and joined.ndim == 2 else joined
    prefix, own = _LAYER.split("{}")[0], family.layer.split("{}")[0]
    for name, values in left.items():
        yield name.replace(prefix, own), values - 1 if family.shifted_norms and _is_norm(name) else values


def _canonical(family: TinyFamily, files: Mapping[str, Array]) -> dict[str, Array]:
    """Weights of the family's files under the reference's names."""
    shapes, weights = dict(_shapes(family)), dict[str, Array]()
    for stored, suffix in _places(family):
        parts = [f"{part}.{suffix}" for part in stored.parts]
        if parts[0] in shapes:
            joined = files[f"{stored.name}.{suffix}"]
            joined = joined.T if stored.transposed and joined.ndim == 2 else joined
            ends = np.cumsum([shapes[part][0] for part in parts])[:-1]
            weights.update(zip(parts, np.split(joined, ends), strict=True))
    prefix, own = _LAYER.split("{}")[0], family.layer.split("{}")[0]
    for name in shapes.keys() - weights.keys():
        values = files[name.replace(prefix, own)]
        weights[name] = values + 1 if family.shifted_norms and _is_norm(name) else values
    return {name: np.ascontiguousarray(values) for name, values in weights.items()}


def _places(family: TinyFamily) -> Iterator[tuple[Stored, str]]:
    """All differently named weights and biases, for each layer and expert."""
    for suffix in ("weight", "bias"):
        yield from ((each, suffix) for each in family.outside)
        for layer in range(family.config.num_layers):
            for each in family.stored:
                experts = range(family.config.num_experts) if "{expert}" in each.name else range(1)
                for expert in experts:
                    name = family.layer.format(layer) + each.name.format(expert=expert)
                    parts = tuple(_LAYER.format(layer) + part.format(expert=expert) for part in each.parts)
                    yield replace(each, name=name, parts=parts), suffix


def _is_norm(name: str) -> bool:
    return name == FINAL_NORM or name.endswith("layernorm.weight")
