"""Minimum GPU memory of a cell: its share of the weights, and the KV cache of one request.

The runtime's own memory (activations, buffers, the CUDA context) depends on the release: `needs.py` estimates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from trtllm_pipeline.base import Cell, Json
from trtllm_pipeline.models import AS_IS

WEIGHT_BITS: Final = {
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
"""Precision -> bits per weight of a quantized layer, including its scales."""
FORM_PRECISIONS: Final = {
    "fp8": "fp8",
    "fp8_block": "fp8",
    "fbgemm_fp8": "fp8",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int4_awq": "int4_awq",
    "w4a8_awq": "w4a8_awq",
    "awq": "int4_awq",
    "gptq": "int4_awq",
    "mixed": "fp8",
    "mixed_nvfp4": "nvfp4",
}
"""Form of already quantized weights -> the precision with the same kernels, GPUs and size."""
FP8_CACHES: Final = frozenset({"fp8", "nvfp4", "mixed", "mixed_nvfp4"})
"""Forms of Model Optimizer, whose files usually define an FP8 KV cache (`kv_cache_quant_algo`). Those in blocks define none:
config.json of DeepSeek V3 names only the form of its weights.
"""
_INDEXER_BLOCK: Final = 128
"""Numbers of an indexer's key that share a scale."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers of Mamba-2 or of linear attention (gated DeltaNet), as in a recipe."""

    layers: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_kernel: int

    @property
    def weights(self) -> int:
        """Weights of one layer per value of the hidden state: `3 d + 2 g s + n` with `d = n * head_dim`. The input is
        as wide as gate, value, key, query and the step of each head, the output as wide as the value.
        """
        return 3 * self.heads * self.head_dim + 2 * self.groups * self.state_size + self.heads

    def state_bytes(self, tp: int) -> int:
        """State of one sequence in one layer on one GPU, in bytes: `(2 (d + 2 g s) (conv_kernel - 1) + 4 d s) / tp`.

        The second part has 32 bits, as in the models' config.json (`mamba_ssm_dtype`). Releases that ignore it need
        half. Source: `get_states_bytes_per_layer` in config_utils.py of TensorRT-LLM's pyexecutor.
        """
        width, keys = self.heads * self.head_dim, 2 * self.groups * self.state_size
        return (2 * (width + keys) * (self.conv_kernel - 1) + 4 * width * self.state_size) // tp


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
    q_lora_rank: int | None = None
    index_head_dim: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    n_shared_experts: int | None = None
    first_k_dense_replace: int | None = None
    interleave_moe_layer_step: int | None = None
    expert_layers: int | None = None
    attention_layers: int | None = None
    vision_parameters: int | None = None
    recurrent: Recurrent | None = None
    weights: int = field(init=False, repr=False, compare=False)
    """Number of weights: the recipe's, or embedding and layers, and a separate head for a mixture, as all known have.
    """
    layer_weights: int = field(init=False, repr=False, compare=False)
    """Weights of the layers: without the embedding, and without a head that has separate weights."""

    def __post_init__(self) -> None:
        # Computed once: every estimate of every cell needs them.
        layers, table = self._layers, self.vocab_size * self.hidden_size
        weights = (2 if self.num_experts else 1) * table + layers if self.parameters is None else self.parameters
        own_head = weights - layers > 1.5 * table
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "layer_weights", max(weights - (2 if own_head else 1) * table, 0))

    @staticmethod
    def of(recipe: Mapping[str, Json]) -> Shape:
        """The numbers of a recipe, which has all of them except possibly `parameters`. Cached, because cells share recipes."""
        known = _SHAPES.get(id(recipe))
        if known is None or known[0] is not recipe:
            numbers = {each.name: recipe.get(each.name) for each in fields(Shape) if each.init}
            known_numbers = {name: int(value) for name, value in numbers.items() if isinstance(value, int)}
            result = Shape(**known_numbers, recurrent=_recurrent(recipe.get("recurrent")))
            known = _SHAPES[id(recipe)] = recipe, result
        return known[1]

    @property
    def tower_bytes(self) -> int:
        """Weights of the vision encoder, in 16 bits."""
        return 2 * (self.vision_parameters or 0)

    @property
    def _layers(self) -> int:
        """Weights of the layers: attention or recurrence, an MLP in those without experts, router and experts in the others."""
        mixture = self.hidden_size * (self.num_experts or 0) + self.expert_weights * (
            (self.num_experts or 0) + (self.n_shared_experts or 0)
        )
        dense = self.num_hidden_layers - self.mixture_layers - (self.mixers if self.apart else 0)
        mlp = self.matrices * self.hidden_size * self.intermediate_size
        return self.mixer_weights + dense * mlp + self.mixture_layers * mixture

    @property
    def kv_layers(self) -> int:
        return self.attention_layers or self.num_hidden_layers

    @property
    def mixers(self) -> int:
        """Layers with attention or recurrence."""
        return self.kv_layers + (self.recurrent.layers if self.recurrent else 0)

    @property
    def apart(self) -> bool:
        """True if MLPs and experts are separate layers, as in Nemotron-H."""
        return self.recurrent is not None and self.mixers < self.num_hidden_layers

    @property
    def matrices(self) -> int:
        """Matrices of an MLP or expert: three if it is gated. Those that are separate layers have no gate."""
        return 2 if self.apart else 3

    @property
    def mixer_weights(self) -> int:
        """Weights of attention and recurrence, of all layers."""
        recurrent = self.recurrent.layers * self.hidden_size * self.recurrent.weights if self.recurrent else 0
        return self.kv_layers * self.attention_weights + recurrent

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's attention: `2*h*d*(n + k)`. In latent attention, queries also come from a latent
        vector, as in the paper on DeepSeek-V2, 2.1.
        """
        hidden, heads, size = self.hidden_size, self.num_attention_heads, self.head_dim
        if self.kv_lora_rank is None:
            return 2 * hidden * size * (heads + self.num_key_value_heads)
        rope = self.qk_rope_head_dim or 0
        into = hidden if self.q_lora_rank is None else self.q_lora_rank
        queries = (hidden * into if self.q_lora_rank is not None else 0) + into * heads * (size + rope)
        cached = hidden * (self.kv_lora_rank + rope) + self.kv_lora_rank * heads * 2 * size
        return queries + cached + heads * size * hidden

    @property
    def mixture_layers(self) -> int:
        """Layers with experts: all but the first dense ones, or one in every N, unless their number is known."""
        if not self.num_experts:
            return 0
        if self.expert_layers is not None:
            return self.expert_layers
        return (self.num_hidden_layers - (self.first_k_dense_replace or 0)) // (self.interleave_moe_layer_step or 1)

    @property
    def gated(self) -> bool:
        """True if an MLP has three matrices, as in models since Llama, not two: inferred from its number of weights."""
        if self.num_experts or self.parameters is None:
            return True
        mlp = self.layer_weights / self.num_hidden_layers - self.attention_weights
        return mlp > 2.5 * self.hidden_size * self.intermediate_size

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def expert_weights(self) -> int:
        return self.matrices * self.hidden_size * self.expert_size

    def read_weights(self, tokens: int) -> int:
        """Weights that a forward pass of `tokens` tokens reads, including the head. For a mixture, the experts that at
        least one token uses: `E * (1 - (1 - e/E)^tokens)` of them with even routing.
        """
        without_embedding = self.layer_weights + self.vocab_size * self.hidden_size
        if not self.num_experts:
            return without_embedding
        chosen = (self.num_experts_per_tok or 1) / self.num_experts
        idle = self.num_experts * (1 - chosen) ** tokens
        return int(without_embedding - self.mixture_layers * idle * self.expert_weights)

    @property
    def computed_weights(self) -> int:
        """Weights that one token is multiplied with, including the head."""
        return self.read_weights(1)


def _recurrent(numbers: Json) -> Recurrent | None:
    if not isinstance(numbers, Mapping):
        return None
    return Recurrent(**{each.name: int(str(numbers[each.name])) for each in fields(Recurrent)})


_SHAPES: Final[dict[int, tuple[Mapping[str, Json], Shape]]] = {}
"""Keyed by identity. The recipe is kept as well, so that its identity stays unique."""


def weights_bytes(shape: Shape, precision: str, tp: int, pp: int) -> int:
    """Weights on one GPU, in bytes: `(quantized * bits + V*h * 16) / 8 / (tp * pp)`. Embeddings are not quantized.

    Source: TensorRT-LLM's memory reference, `parameters * bytes / (tp * pp)`. Embeddings count once, and as if split,
    so this is a lower limit.
    """
    bits = WEIGHT_BITS[precision]
    embeddings = min(shape.vocab_size * shape.hidden_size, shape.weights)
    total_bits = (shape.weights - embeddings) * bits + embeddings * max(bits, 16.0)
    return int(total_bits / 8 / (tp * pp))


def attention_copies(shape: Shape, tp: int, dp: int) -> float:
    """Weights of attention and recurrence that one GPU has beyond its share under tensor parallelism, summed over
    layers: `layers * attention * (dp - 1) / tp`. Each group of data parallel attention has all of them.
    """
    return shape.mixer_weights * (dp - 1) / tp


def kv_bytes_per_token(shape: Shape, element_bytes: float, tp: int, pp: int) -> int:
    """KV cache of one token on one GPU, in bytes: `2 * layers/pp * max(kv_heads // tp, 1) * head_dim * element_bytes`.

    More GPUs than KV heads hold copies of them. Only layers with attention count. Source: TensorRT-LLM's KV cache
    manager, size per token. Latent attention keeps `layers/pp * (kv_lora_rank + qk_rope_head_dim) * element_bytes` on
    every GPU. Source: the paper on DeepSeek-V2, 2.1. An indexer adds `index_head_dim` bytes, with a scale of 4 bytes
    for each 128. Source: `BlockManager` of kvCacheManager.cpp.
    """
    layers = -(-shape.kv_layers // pp)
    if shape.kv_lora_rank is not None:
        indexer = (shape.index_head_dim or 0) * (1 + 4 / _INDEXER_BLOCK)
        return int(layers * ((shape.kv_lora_rank + (shape.qk_rope_head_dim or 0)) * element_bytes + indexer))
    heads = max(shape.num_key_value_heads // tp, 1)
    return int(2 * layers * heads * shape.head_dim * element_bytes)


def state_bytes(shape: Shape, tp: int, pp: int) -> int:
    """Recurrent state of one sequence on one GPU, in bytes. It does not depend on the sequence's length."""
    return 0 if shape.recurrent is None else -(-shape.recurrent.layers // pp) * shape.recurrent.state_bytes(tp)


def kv_element_bytes(precision: str, kv: str | None) -> float:
    """Bytes per value in the KV cache: half a byte and a scale of one byte per 16 values for nvfp4, 1 if it is quantized
    otherwise, such as to fp8 or int8, or else that of the data type.
    """
    if kv is not None:
        return 0.5 + 1 / 16 if kv == "nvfp4" else 1.0
    return 4.0 if precision == "fp32" else 2.0


def least_bytes(
    shape: Shape, *, precision: str, kv: str | None, tp: int, pp: int, tokens: int, dp: int = 1
) -> tuple[int, int]:
    """Weights, KV cache and state of one request with `tokens` tokens, on one GPU, in bytes."""
    per_token = kv_bytes_per_token(shape, kv_element_bytes(precision, kv), tp // dp, pp)
    copies = attention_copies(shape, tp, dp) / pp * WEIGHT_BITS[precision] / 8
    return weights_bytes(shape, precision, tp, pp) + int(copies), per_token * tokens + state_bytes(shape, tp // dp, pp)


def computed(cell: Cell) -> str:
    """The precision of a cell's weights in memory. For weights used as they are, the precision of their form.

    Forms without a name, such as compressed-tensors, count as 4 bits unless they name 8: a cell is not refused for memory that
    it may not need.
    """
    form = cell.recipe.get("quantization")
    if cell.precision != AS_IS or form is None:
        return "bf16" if cell.precision == AS_IS else cell.precision
    of_8_bits = str(form).startswith("fp8") or str(form).endswith("of 8 bits")
    return FORM_PRECISIONS.get(str(form), "fp8" if of_8_bits else "int4_awq")
