"""A plain numpy forward pass of the converted architectures, with which `pipeline doctor --deep` compares servers.

Single precision matrix products, double precision for long sums (norms, softmax). Weights have their Hugging Face names, so
the same code runs on a model directory and, through `benchmarks/fidelity.py`, on a converted file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.tensorrt.embedded.architecture import EMBEDDING, FINAL_NORM, HEAD, ModelConfig, read_config
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights

Array = NDArray[np.float32]
POSITIONS: Final = "model.embed_positions.weight"
"""Learned positions, (positions, hidden_size), of models that have them."""
HEAD_BIAS: Final = HEAD.replace("weight", "bias")


def layer_weights(weights: Mapping[str, Array], index: int) -> dict[str, Array]:
    """The weights of one layer, by the part of their name after `model.layers.N.`."""
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}


def layer(config: ModelConfig, weights: Mapping[str, Array], states: Array, rotation: tuple[Array, Array]) -> Array:
    """One transformer layer: the new states (batch, tokens, hidden_size)."""

    def linear(name: str, inputs: Array) -> Array:
        # One product of two matrices: numpy would loop over a batch.
        output: Array = (inputs.reshape(-1, inputs.shape[-1]) @ weights[f"{name}.weight"].T).reshape(
            *inputs.shape[:-1], -1
        )
        bias = weights.get(f"{name}.bias")
        return output if bias is None else output + bias

    def norm(name: str, inputs: Array) -> Array:
        return normalized(inputs, weights, name, config.rms_norm_eps)

    batch, length, _ = states.shape
    dim, groups = config.head_dim, config.num_heads // config.num_kv_heads
    normed = norm("input_layernorm", states)

    def heads(name: str, count: int) -> Array:
        return linear(f"self_attn.{name}_proj", normed).reshape(batch, length, count, dim).transpose(0, 2, 1, 3)

    query, key, value = heads("q", config.num_heads), heads("k", config.num_kv_heads), heads("v", config.num_kv_heads)
    if "self_attn.q_norm.weight" in weights:
        query, key = norm("self_attn.q_norm", query), norm("self_attn.k_norm", key)
    query, key = _rotate(query, rotation), _rotate(key, rotation)

    # The query heads of a group share their key and value head, so a group's queries are rows of one product.
    rows = query.reshape(batch, config.num_kv_heads, groups * length, dim)
    scores = (rows @ key.transpose(0, 1, 3, 2)).reshape(batch, config.num_kv_heads, groups, length, length)
    scores *= np.float32(config.attention_scale or dim**-0.5)
    if config.attention_cap is not None:
        scores = capped(scores, config.attention_cap)
    scores += np.triu(np.full((length, length), -np.inf, dtype=np.float32), k=1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True, dtype=np.float64)
    mixed = scores.reshape(batch, config.num_kv_heads, groups * length, length) @ value
    mixed = mixed.reshape(batch, config.num_heads, length, dim).transpose(0, 2, 1, 3).reshape(batch, length, -1)
    attention = linear("self_attn.o_proj", mixed)

    def mlp(name: str, inputs: Array) -> Array:
        up = linear(f"{name}.up_proj", inputs)
        gated = f"{name}.gate_proj.weight" in weights
        gate = linear(f"{name}.gate_proj", inputs) if gated else up
        active = _ACTIVATIONS[config.activation](gate)
        return linear(f"{name}.down_proj", active * up if gated else active)

    def feed_forward(inputs: Array) -> Array:
        return _experts(config, weights, inputs, mlp) if config.num_experts else mlp("mlp", inputs)

    if config.parallel:
        states = states + attention + feed_forward(normed)
    elif "post_feedforward_layernorm.weight" in weights:
        states = states + norm("post_attention_layernorm", attention)
        outcome = feed_forward(norm("pre_feedforward_layernorm", states))
        states = states + norm("post_feedforward_layernorm", outcome)
    else:
        states = states + attention
        states = states + feed_forward(norm("post_attention_layernorm", states))
    return states


def _experts(
    config: ModelConfig, weights: Mapping[str, Array], inputs: Array, mlp: Callable[[str, Array], Array]
) -> Array:
    """The outputs of the experts that a router chooses for each token, weighted by its probabilities, plus a shared expert's."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    shares = np.exp(log_softmax(rows @ weights["mlp.gate.weight"].T)).astype(np.float32)
    dropped = np.argsort(-shares, axis=-1, kind="stable")[:, config.experts_per_token :]
    np.put_along_axis(shares, dropped, 0.0, axis=-1)
    if config.renormalized:
        shares /= shares.sum(axis=-1, keepdims=True)
    output = np.zeros_like(rows)
    for index in range(config.num_experts):
        chosen = np.flatnonzero(shares[:, index])
        if chosen.size:
            output[chosen] += shares[chosen, index, None] * mlp(f"mlp.experts.{index}", rows[chosen])
    if "mlp.shared_expert_gate.weight" in weights:
        share = 1.0 / (1.0 + np.exp(-rows @ weights["mlp.shared_expert_gate.weight"].T))
        output += share * mlp("mlp.shared_expert", rows)
    return output.reshape(inputs.shape)


def _silu(values: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) of a very negative x is inf, and the value is then correctly 0
        activated: Array = values / (1.0 + np.exp(-values))
    return activated


def _gelu_tanh(values: Array) -> Array:
    """Source: arXiv 1606.08415."""
    cube = values * values * values  # numpy's power takes ten times as long
    activated: Array = 0.5 * values * (1.0 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (values + 0.044715 * cube)))
    return activated


_ACTIVATIONS: Final = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def capped(values: Array, cap: float) -> Array:
    """Values between -cap and cap: cap tanh(x / cap)."""
    limited: Array = np.float32(cap) * np.tanh(values / np.float32(cap))
    return limited


def normalized(values: Array, weights: Mapping[str, Array], name: str, eps: float) -> Array:
    """Values normalized by the norm of that name. One with a bias subtracts the mean first. Source: arXiv 1607.06450."""
    bias = weights.get(f"{name}.bias")
    if bias is None:
        return rms_norm(values, weights[f"{name}.weight"], eps)
    return rms_norm(values - values.mean(axis=-1, keepdims=True), weights[f"{name}.weight"], eps) + bias


def rms_norm(values: Array, weight: Array, eps: float) -> Array:
    """Values over their root mean square along the last axis, times `weight`. Source: arXiv 1910.07467."""
    mean = np.einsum("...i,...i->...", values, values, dtype=np.float64)[..., None] / values.shape[-1]
    normed: Array = values * (1.0 / np.sqrt(mean + eps)).astype(np.float32) * weight
    return normed


def rope(config: ModelConfig, count: int) -> tuple[Array, Array]:
    """Cosine and sine, (count, rotated / 2) each, of the first positions. Source: arXiv 2104.09864."""
    half = config.rotated // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half) / config.rope_divisors()
    angles = np.outer(np.arange(count), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(heads: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotary embedding in Hugging Face's layout: the two halves of the rotated part are the pairs' first and second members."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


class Reference:
    """A model in float32. All of its weights are kept in memory."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Array]) -> None:
        self.config = config
        self.weights = {name: weights[name] for name in weights}

    @classmethod
    def from_folder(cls, folder: Path) -> Reference:
        return cls(read_config(folder), Weights(folder))

    def hidden_states(self, tokens: NDArray[np.int64]) -> Array:
        """States after the final norm, (batch, tokens, hidden_size). `tokens` is (batch, tokens), all of one length."""
        length = tokens.shape[1]
        states = self.weights[EMBEDDING][tokens] * np.float32(self.config.embedding_scale)
        if (learned := self.weights.get(POSITIONS)) is not None:
            states = states + learned[:length]
        rotation = rope(self.config, length)
        for index in range(self.config.num_layers):
            states = layer(self.config, layer_weights(self.weights, index), states, rotation)
        return normalized(states, self.weights, FINAL_NORM.removesuffix(".weight"), self.config.rms_norm_eps)

    def logits(self, tokens: Sequence[int], last: int = 0) -> Array:
        """Logits after each of `tokens`, or of the `last` of them, (tokens, vocab_size)."""
        states = self.hidden_states(np.asarray([tokens], dtype=np.int64))[0, -last:]
        logits: Array = states @ self.weights[EMBEDDING if self.config.tie_word_embeddings else HEAD].T
        logits += self.weights.get(HEAD_BIAS, np.float32(0.0))
        return logits if self.config.logit_cap is None else capped(logits, self.config.logit_cap)

    def log_probs(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Log-probabilities of the next token after each of `tokens`, (tokens, vocab_size)."""
        return log_softmax(self.logits(tokens))

    def generate(self, tokens: Sequence[int], count: int, stop: Iterable[int] = ()) -> list[int]:
        """Up to `count` greedy tokens after `tokens`. Ends before a token in `stop`. Ties go to the lowest id."""
        stop, output = frozenset(stop), list[int]()
        while len(output) < count:
            token = int(np.argmax(self.logits([*tokens, *output], last=1)))
            if token in stop:
                break
            output.append(token)
        return output


def log_softmax(logits: Array) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
