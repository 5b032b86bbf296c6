"""How much memory of a GPU a cell needs at the very least: its share of the weights, and the KV cache of one request.

What the runtime adds (activations, buffers, the CUDA context) depends on the release: `needs.py` estimates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.domain import Json

_WEIGHT_BITS: Final = {
    "fp32": 32.0,
    "fp16": 16.0,
    "bf16": 16.0,
    "fp8": 8.0,
    "int8_wo": 8.0,
    "int8_sq": 8.0,
    "int4_wo": 4.0,
    "int4_awq": 4.0 + 16 / 128,  # a 16-bit scale for each block of 128
    "w4a8_awq": 4.0 + 16 / 128,
    "mxfp4": 4.0 + 8 / 32,  # an 8-bit scale for each block of 32
    "nvfp4": 4.0 + 8 / 16,  # an 8-bit scale for each block of 16
}
"""Precision -> bits of one weight of a quantized layer, its scales included."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a model's architecture, under the names of Hugging Face's `config.json`."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    parameters: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    @staticmethod
    def of(recipe: Mapping[str, Json]) -> Shape:
        """The numbers of a recipe, which has all of them but perhaps `parameters`. Cells share recipes and ask often."""
        known = _SHAPES.get(id(recipe))
        if known is None or known[0] is not recipe:
            numbers = {name: recipe.get(name) for name in Shape.__dataclass_fields__}
            found = Shape(**{name: int(value) for name, value in numbers.items() if isinstance(value, int)})
            known = _SHAPES[id(recipe)] = recipe, found
        return known[1]

    @property
    def weights(self) -> int:
        """Number of weights: as the recipe says, else those of a dense decoder with a gated MLP and tied embeddings,
        `V*h + L*(2*h*n*d + 2*h*k*d + 3*h*i)`.
        """
        if self.parameters is not None:
            return self.parameters
        return self.vocab_size * self.hidden_size + self._dense

    @property
    def layer_weights(self) -> int:
        """Those of the layers alone: without the embedding, and without the head where that has weights of its own."""
        table = self.vocab_size * self.hidden_size
        own_head = self.weights - self._dense > 1.5 * table
        return max(self.weights - (2 if own_head else 1) * table, 0)

    @property
    def _dense(self) -> int:
        """Weights of the layers of a dense decoder with a gated MLP."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


_SHAPES: Final[dict[int, tuple[Mapping[str, Json], Shape]]] = {}
"""By identity; the recipe beside it is kept, so that its identity is no other's."""


def weight_bits(precision: str) -> float:
    """Bits of one weight of a quantized layer, its scales included."""
    return _WEIGHT_BITS[precision]


def weights_bytes(shape: Shape, precision: str, tp: int, pp: int) -> int:
    """Weights on one GPU, in bytes: `(quantized * bits + V*h * 16) / 8 / (tp * pp)`. Embeddings stay as they are.

    Source: TensorRT-LLM's memory reference, `parameters * bytes / (tp * pp)`; embeddings count once, and as split, so
    this is a lower limit.
    """
    bits = _WEIGHT_BITS[precision]
    embeddings = min(shape.vocab_size * shape.hidden_size, shape.weights)
    total_bits = (shape.weights - embeddings) * bits + embeddings * max(bits, 16.0)
    return int(total_bits / 8 / (tp * pp))


def kv_bytes_per_token(shape: Shape, element_bytes: float, tp: int, pp: int) -> int:
    """KV cache of one token on one GPU, in bytes: `2 * layers/pp * max(kv_heads // tp, 1) * head_dim * element_bytes`.

    More GPUs than KV heads hold copies of them. Source: TensorRT-LLM's KV cache manager, size per token. Latent attention
    keeps `layers/pp * (kv_lora_rank + qk_rope_head_dim) * element_bytes` on every GPU. Source: the paper on DeepSeek-V2, 2.1.
    """
    layers = -(-shape.num_hidden_layers // pp)
    if shape.kv_lora_rank is not None:
        return int(layers * (shape.kv_lora_rank + (shape.qk_rope_head_dim or 0)) * element_bytes)
    heads = max(shape.num_key_value_heads // tp, 1)
    return int(2 * layers * heads * shape.head_dim * element_bytes)


def kv_element_bytes(precision: str, kv: str | None) -> float:
    """Bytes of one number in the KV cache: 1 when it is quantized (`kv` is fp8 or int8), else that of the data type."""
    if kv is not None:
        return 1.0
    return 4.0 if precision == "fp32" else 2.0


def least_bytes(shape: Shape, *, precision: str, kv: str | None, tp: int, pp: int, tokens: int) -> tuple[int, int]:
    """Weights, and KV cache of one request of `tokens` tokens, on one GPU, in bytes."""
    per_token = kv_bytes_per_token(shape, kv_element_bytes(precision, kv), tp, pp)
    return weights_bytes(shape, precision, tp, pp), per_token * tokens
