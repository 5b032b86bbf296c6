"""Memory and disk needs of TensorRT-LLM's stages: pure functions of a model's numbers, a cell and a machine.

`model_shape.py` has the minimum for a server, which decides whether cells are refused, this module the expected needs.
Figures for comparison are in `tests/data/tensorrt_llm/memory.json` and `docs/project/estimates.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from trtllm_pipeline.base import Cell, Json, Machine, Needs
from trtllm_pipeline.tensorrt.modelopt import calibration_memory as model_optimizer
from trtllm_pipeline.tensorrt.modelopt.formats import precision
from trtllm_pipeline.tensorrt.servers.command_lines import IMAGE_POOL
from trtllm_pipeline.tensorrt.stage.calibration_rows import MOST
from trtllm_pipeline.tensorrt.toolchains import companions, vision
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES
from trtllm_pipeline.tensorrt.toolchains.companion_sizes import draft_bytes, draft_kv_bytes_per_token
from trtllm_pipeline.tensorrt.toolchains.model_shape import (
    WEIGHT_BITS,
    Shape,
    attention_copies,
    computed,
    kv_bytes_per_token,
    kv_element_bytes,
    state_bytes,
    weights_bytes,
)
from trtllm_pipeline.tensorrt.trtllm import backends, commands
from trtllm_pipeline.tensorrt.trtllm.case import (
    gathers_logits,
    kept_weights,
    kv_cache,
    kv_share,
    num_tokens,
    served_cache,
)
from trtllm_pipeline.tensorrt.trtllm.installation import installed
from trtllm_pipeline.tensorrt.trtllm.releases import at_least

GIB: Final = 1 << 30
CONTEXT: Final = 590 << 20
"""CUDA context and kernels of a large GPU: the memory that nvidia-smi shows for a process without arrays (TensorRT-LLM,
issue 3058).
"""
_CONTEXT_SHARE: Final = 20
"""Small GPUs have a smaller one: at most a twentieth of the memory."""
_FRAGMENTS: Final = 0.3
"""Memory that allocators hold in addition to activations and buffers, as a share of those. For torch, measured on an H200 (`model_optimizer.memory`); of engines
between 0.15 and 0.4, by logs of 0.12 and 0.15."""
_COLLECTIVES: Final = 392 << 20
"""Memory of NCCL on each of four GPUs or more; 342 MiB on two. Source: nccl_mem of NVIDIA's aiconfigurator
(systems/h800_sxm.yaml).
"""
_ACTIVATIONS_ERROR: Final = 0.35
"""Relative error of `activation_bytes`: the worst public log needed a third more (docs/project/estimates.md)."""
_VISUAL_ERROR: Final = 0.85
"""The same for visual engines, for which no log was found."""
_WEIGHT_ONLY: Final = frozenset({"int8_wo", "int4_wo", "int4_awq", "w4a8_awq"})
"""Precisions whose matrix products are computed by a plugin, with which TensorRT fuses nothing."""
_GEMM_WORKSPACE: Final = 32 << 20
"""Workspace of cuBLAS. It shares its memory with the logits."""
_LOGITS: Final = {True: 28.7, False: 12.0}
"""Bytes per request and vocabulary entry. Engines (true): 9.2 for runtime buffers and 19.5 for the decoder, from logs
of 0.12 to 0.15; PyTorch: three float32 arrays, an assumption.
"""
_STREAMED: Final = "0.17"
"""First release that reads an engine piece by piece. Before, the host holds all of it once."""
_SHARED_ROWS: Final = "0.12"
"""First release whose mixtures keep the inputs and outputs of a product in one place: with LoRA for mixtures, whose
arguments are in the source that does it.
"""
ADAPTER_CACHE: Final = GIB
"""Default of lora_cache_host_memory_bytes. Source: README of the backend for Triton."""
_BUILDER: Final = 5 * GIB
"""Host memory of trtllm-build before weights."""
_RUNTIME: Final = 3 * GIB
"""Host memory of each rank before weights: an assumption."""
_TRITON: Final = 2 * GIB
"""Host memory of Triton and its Python models, with transformers: an assumption."""
_TRITON_SHARED: Final = 64 << 20
"""Memory in /dev/shm for Triton's Python models: an assumption."""
_COLLECTIVES_SHARED: Final = 64 << 20
"""Memory in /dev/shm for each of several ranks: an assumption."""


def context_bytes(machine: Machine) -> int:
    """CUDA's own memory on each GPU, in bytes."""
    smallest = min((gpu.memory_bytes for gpu in machine.gpus), default=80 * GIB)
    return min(CONTEXT, smallest // _CONTEXT_SHARE)


def engine_bytes(shape: Shape, precision_: str, tp: int, pp: int) -> int:
    """The largest rank's engine, in bytes: `layers * bits / 8 / (tp * pp)`, and 16 bits for embedding and head.

    The head is a separate array, even if a model ties it to the embedding. Each rank has a whole embedding and its part
    of the head. With several pipeline stages, the first has the embedding, the last the head.
    """
    bits = WEIGHT_BITS[precision_]
    table = shape.vocab_size * shape.hidden_size * max(bits, 16.0) / 8
    layers = shape.layer_weights * bits / 8 / (tp * pp)
    return int(layers + (table + table / tp if pp == 1 else table))


def rank_bytes(shape: Shape, precision_: str, tp: int, pp: int, dp: int = 1) -> int:
    """Weights of the PyTorch backend on the fullest GPU, in bytes: its layers, and its part of embedding and head,
    which are 16-bit. With several pipeline stages, the first has the embedding, the last the head.

    A mixture's experts are split or distributed, which gives the same size. More GPUs than KV heads hold copies of
    their weights, and each of the `dp` groups of data parallel attention holds a copy of attention.
    """
    bits = WEIGHT_BITS[precision_]
    share = -(-shape.num_hidden_layers // pp) / shape.num_hidden_layers
    copies = max(1 / shape.num_key_value_heads - dp / tp, 0.0) if shape.kv_lora_rank is None else 0.0
    keys = 2 * shape.kv_layers * shape.hidden_size * shape.head_dim * shape.num_key_value_heads * copies
    tables = shape.weights - shape.layer_weights
    table = shape.vocab_size * shape.hidden_size
    return int(
        share * (shape.layer_weights / tp + keys + attention_copies(shape, tp, dp)) * bits / 8
        + (tables if pp == 1 else table) / tp * max(bits, 16.0) / 8
    )


def activation_bytes(shape: Shape, tokens: int, tp: int, ep: int = 1) -> int:
    """Activations of a forward pass of `tokens` tokens on one GPU, in bytes: `tokens * 2 * (4 * i / tp + 7 * h)`.

    Four tensors of the MLP's width, or two without a gate, and seven of the hidden size are alive at once, in 16 bits.
    In a mixture, the kernels group the rows by expert: `e` rows of the hidden size before and after it, and three of
    its width, all of which may be on one GPU if it holds whole experts. The input of the first product uses the memory
    of the activation, and the first product that of the second, except in older releases. Source:
    `getWorkspaceBufferSizes` in moe_kernels.cu.
    """
    return 2 * tokens * (_mlp_width(shape, tp, ep, shares=True) + 7 * shape.hidden_size)


def _mlp_width(shape: Shape, tp: int, ep: int, *, shares: bool) -> int:
    """Elements per token that are alive within an MLP, on one GPU."""
    dense = (4 if shape.gated else 2) * shape.intermediate_size / tp
    if shape.num_experts:
        chosen, shared = shape.num_experts_per_tok or 1, shape.n_shared_experts or 0
        hidden, width, whole = shape.hidden_size, shape.expert_size * ep / tp, shape.expert_size / tp
        row = max(hidden, width) + max(2 * width, hidden) if shares else 2 * hidden + 3 * width
        routed = chosen * row + 4 * shared * whole
        dense = max(routed, dense if shape.mixture_layers < shape.num_hidden_layers else 0)
    return int(dense)


def engine_activation_bytes(
    shape: Shape, precision_: str, tokens: int, rows: int, tp: int, ep: int = 1, *, shares: bool
) -> int:
    """The same for an engine ("execution context memory" in its log), with logits for `rows` tokens in 16 bits.

    They share memory with the MLP, `2 * max(tokens * 4 * i / tp, rows * V) + 2 * tokens * 7 * h`. If only weights are
    quantized, also with cuBLAS's workspace: `2 * tokens * (2 * i / tp + 2 * h) + max(2 * rows * V, 32 MiB)`.
    """
    logits, hidden = rows * shape.vocab_size, shape.hidden_size
    if precision_ in _WEIGHT_ONLY and not shape.num_experts:
        return 2 * tokens * (2 * shape.intermediate_size // tp + 2 * hidden) + max(2 * logits, _GEMM_WORKSPACE)
    return 2 * (max(tokens * _mlp_width(shape, tp, ep, shares=shares), logits) + tokens * 7 * hidden)


def logits_bytes(batch: int, shape: Shape, *, engines: bool) -> int:
    """Buffers of the runtime and the sampler for `batch` requests, in bytes on one GPU."""
    return int(_LOGITS[engines] * batch * shape.vocab_size)


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Memory of a server on each GPU, in bytes."""

    weights: int
    """Weights of the model, the vision encoder, adapters and the draft model."""
    activations: int
    visual: int
    """Memory of a visual engine other than its weights."""
    logits: int
    collectives: int
    context: int
    fragments: int
    """Memory that allocators hold unused."""
    state: int
    """State of layers without a KV cache, for all concurrent sequences."""
    kv_token: int
    """KV cache of one token, including the drafter's."""

    @property
    def fixed(self) -> int:
        """Everything except the KV cache."""
        own = self.weights + self.activations + self.visual + self.logits + self.state
        return own + self.collectives + self.context + self.fragments

    @property
    def uncertain(self) -> float:
        """Amount by which it may be higher."""
        return _ACTIVATIONS_ERROR * self.activations + _VISUAL_ERROR * self.visual


def served(cell: Cell, machine: Machine) -> ServerParts:
    """The parts of a server of one cell.

    The vision encoder and adapters are on each of its GPUs. A draft model is split like the model.
    """
    shape, engines = Shape.of(cell.recipe), cell.toolchain == ENGINES
    split = (
        engine_bytes(shape, computed(cell), cell.tp, cell.pp)
        if engines
        else rank_bytes(shape, computed(cell), cell.tp, cell.pp, cell.dp)
    )
    weights = int(split * _kept(cell))
    drafting, per_drafted = drafting_bytes(cell)
    beside = shape.tower_bytes + sum(companions.weights_bytes(cell, name) for name in companions.adapters(cell))
    element = kv_element_bytes(computed(cell), served_cache(cell))
    tokens, batch = num_tokens(cell), cell.group_batch_size * beams(cell)
    if engines:
        rows = tokens if gathers_logits(cell) else batch
        shares = at_least(installed(machine).release, _SHARED_ROWS)
        activations = engine_activation_bytes(shape, computed(cell), tokens, rows, cell.tp, cell.ep, shares=shares)
    else:
        activations = activation_bytes(shape, tokens, cell.tp, cell.ep)
    logits = logits_bytes(batch, shape, engines=engines)
    return ServerParts(
        weights=weights + beside + drafting // cell.tp,
        activations=activations,
        visual=visual_bytes(cell),
        logits=logits,
        collectives=_COLLECTIVES if cell.tp * cell.pp > 1 else 0,
        context=context_bytes(machine),
        fragments=int(_FRAGMENTS * (activations + logits)),
        state=batch * state_bytes(shape, cell.attention_tp, cell.pp),
        kv_token=kv_bytes_per_token(shape, element, cell.attention_tp, cell.pp) + per_drafted,
    )


def beams(cell: Cell) -> int:
    """Beams that an engine follows for each request."""
    setting = _number(cell.settings["build"].get("max_beam_width")) if cell.toolchain == ENGINES else None
    return 1 if setting is None else max(1, int(setting))


def _kept(cell: Cell) -> float:
    """The share of its weights that a server keeps on the GPU. Below 1, the host has all of them."""
    return kept_weights(cell) if backends.in_triton(cell) else 1.0


def visual_bytes(cell: Cell) -> int:
    """Memory of a visual engine on a GPU other than its weights, in bytes: activations, the pool in which Triton passes
    features on, and the features of all prompts in flight.
    """
    if not vision.sees(cell):
        return 0
    features = 2 * Shape.of(cell.recipe).hidden_size * cell.max_batch_size * cell.isl
    return vision.activation_bytes(str(cell.recipe["family"]), cell.max_batch_size) + IMAGE_POOL + features


def drafting_bytes(cell: Cell) -> tuple[int, int]:
    """Memory of speculative decoding: the draft weights, over all GPUs, and its KV cache per token on each.

    The model's own draft layers (mtp) are as large as its others.
    """
    drafts = companions.speculation(cell)
    if drafts is not None and drafts["method"] == "mtp":
        shape = Shape.of(cell.recipe)
        bits = WEIGHT_BITS[computed(cell)]
        layer = shape.layer_weights / shape.num_hidden_layers
        return int(layer * bits / 8), kv_bytes_per_token(shape, 2.0, cell.attention_tp, 1) // shape.kv_layers
    drafter = cell.companions.get(companions.DRAFT)
    return (0, 0) if drafter is None else (draft_bytes(drafter, cell), draft_kv_bytes_per_token(drafter, cell))


def serving(cell: Cell, machine: Machine) -> Needs:
    """All servers of one cell. For disaggregated ones, the sum on the host, and the larger kind's memory on each GPU."""
    servers = backends.disaggregated(cell)
    if servers is None:
        return serving_alone(cell, machine)
    context, generation = (serving_alone(each, machine) for each in (backends.context_cell(cell), cell))
    counts = servers["context_servers"], servers["generation_servers"]
    larger = max(context, generation, key=lambda each: each.gpu)
    return replace(
        larger,
        host=counts[0] * context.host + counts[1] * generation.host,
        shared=counts[0] * context.shared + counts[1] * generation.shared,
    )


def serving_alone(cell: Cell, machine: Machine) -> Needs:
    """A server of one cell, with the KV cache of its maximum number of concurrent requests, or at least of one.

    The cache is a fraction of the remaining memory, so that much more must remain. Beams share their prompt there.
    """
    parts = served(cell, machine)
    repository = cell.settings["repository"]
    fraction = kv_share(cell)
    block = commands.TOKENS_PER_BLOCK
    request = -(-(cell.isl + beams(cell) * cell.osl) // block) * block
    limit = _number(repository.get("max_tokens_in_paged_kv_cache"))
    tokens = request * cell.group_batch_size
    tokens = tokens if limit is None else max(request, min(tokens, int(limit)))
    ranks = cell.tp * cell.pp
    shape = Shape.of(cell.recipe)
    loaded = 0
    if cell.toolchain == ENGINES and (_kept(cell) < 1 or not at_least(installed(machine).release, _STREAMED)):
        loaded = ranks * engine_bytes(shape, computed(cell), cell.tp, cell.pp)
    elif cell.toolchain != ENGINES:
        loaded = weights_bytes(shape, computed(cell), 1, 1)  # the files, mapped while they are read
        loaded += shape.tower_bytes + companions.weights_bytes(cell, companions.DRAFT)
    if companions.adapters(cell):
        cache = _number(repository.get("lora_cache_host_memory_bytes"))
        loaded += ranks * (ADAPTER_CACHE if cache is None else int(cache))
    in_triton = backends.in_triton(cell)
    gpu_least, gpu = (parts.fixed + int(parts.kv_token * number / fraction) for number in (request, tokens))
    uncertain = parts.uncertain
    if vision.sees(cell) and fraction < 1:  # the cache is allocated first, and a visual engine gets the rest
        more = fraction / (1 - fraction)
        crowded = parts.fixed + int(more * (shape.tower_bytes + parts.visual))
        uncertain += _VISUAL_ERROR * more * parts.visual if crowded > gpu_least else 0
        gpu_least, gpu = max(gpu_least, crowded), max(gpu, crowded)
    return Needs(
        host=ranks * _RUNTIME + loaded + (_TRITON if in_triton else 0),
        gpu=gpu,
        gpu_least=gpu_least,
        shared=(_TRITON_SHARED if in_triton else 0) + (ranks * _COLLECTIVES_SHARED if ranks > 1 else 0),
        error=max(Needs().error, uncertain / gpu_least),
        assumed=("host", "shared"),
    )


def checking(cell: Cell, machine: Machine) -> Needs:
    """An engine that generates one response: like a server, without Triton, and for one request."""
    served = serving_alone(cell, machine)
    triton, shared = (_TRITON, _TRITON_SHARED) if backends.in_triton(cell) else (0, 0)
    return Needs(
        host=served.host - triton,
        gpu=served.gpu_least or served.gpu,
        shared=served.shared - shared,
        error=served.error,
        assumed=("host", "shared"),
    )


def build_host_bytes(engine: int) -> int:
    """Host memory of a worker of trtllm-build, in bytes: `5 GiB + 2 * engine`."""
    return _BUILDER + 2 * engine


def building(cell: Cell, machine: Machine) -> Needs:
    """trtllm-build. Host: `workers * (5 GiB + 2 * engine)`, GPU: the engine and the context.

    Every rank has a separate worker. Logs of three builds from 0.8 on are within 10% of it (docs/project/estimates.md).
    There is no known log of an engine that streams weights, whose GPU is smaller than they are.
    """
    ranks, engine = cell.tp * cell.pp, engine_bytes(Shape.of(cell.recipe), computed(cell), cell.tp, cell.pp)
    return Needs(
        host=ranks * build_host_bytes(engine),
        gpu=engine + context_bytes(machine),
        leaves=ranks * engine,
        assumed=("gpu",) if kept_weights(cell) < 1 else (),
    )


def building_visual(cell: Cell, machine: Machine) -> Needs:
    """The script that builds a visual engine: assumptions, based on how it works.

    It loads the whole model, exports the vision encoder as ONNX, which is removed again, and builds from that. Host: `5
    GiB + the model + 3 * the vision encoder`, in the loaded bits. GPU: the vision encoder, in PyTorch and as an engine,
    and the engine's activations.
    """
    shape, family = Shape.of(cell.recipe), str(cell.recipe["family"])
    tower, widened = shape.tower_bytes, vision.FAMILIES[family].loaded_bits // 16
    model = weights_bytes(shape, "bf16", 1, 1) + tower
    return Needs(
        host=_BUILDER + widened * (model + 3 * tower),
        gpu=2 * tower + vision.activation_bytes(family, cell.max_batch_size) + context_bytes(machine),
        leaves=tower,
        scratch=widened * tower,
        assumed=("host", "gpu"),
    )


def checkpoint_bytes(cell: Cell) -> int:
    """A checkpoint, in bytes: quantized layers, embedding and head in 16 bits, and a separate head for engines."""
    shape = Shape.of(cell.recipe)
    if cell.toolchain == ENGINES:
        return engine_bytes(shape, computed(cell), 1, 1)
    return rank_bytes(shape, computed(cell), 1, 1) + shape.tower_bytes


def converting(cell: Cell, _machine: Machine) -> Needs:
    """convert_checkpoint.py, with one worker. Host: the 16-bit weights, and one rank's part of the result.

    Based on how it works: it loads the whole model and creates one rank after another. No public figure was found.
    """
    shape = Shape.of(cell.recipe)
    rank = weights_bytes(shape, computed(cell), cell.tp, cell.pp)
    return Needs(
        host=_RUNTIME + weights_bytes(shape, "bf16", 1, 1) + rank, leaves=checkpoint_bytes(cell), assumed=("host",)
    )


def quantizing(cell: Cell, machine: Machine) -> Needs:
    """The release's quantize.py, or else our own worker, on enough GPUs for the 16-bit weights."""
    return quantizing_on(cell, machine, max(1, backends.quantizing_takes(cell, machine).gpus))


def quantizing_on(cell: Cell, machine: Machine, gpus: int) -> Needs:
    """The same, on this number of GPUs."""
    shape = Shape.of(cell.recipe)
    weights, leaves = weights_bytes(shape, "bf16", 1, 1), checkpoint_bytes(cell)
    if backends.quantizes_by_script(cell, machine):
        return Needs(
            host=_RUNTIME + weights + leaves,
            gpu=int(weights * backends.SCRIPT_ROOM / gpus) + context_bytes(machine),
            leaves=leaves,
            error=0.35,
            assumed=("host",),
        )
    rows = calibration_rows(cell)
    setting = cell.settings["quantize"].get("batch_size")
    free = min((gpu.memory_bytes for gpu in machine.gpus), default=0) - context_bytes(machine)
    made = precision(cell.precision)
    measured = made.calibrated or kv_cache(cell) is not None
    gpu, gpu_least = model_optimizer.expected_bytes(
        weights if gpus == 1 else _share(shape, gpus),
        wide=shape.expert_size if shape.num_experts else shape.intermediate_size,
        narrow=shape.hidden_size,
        table=2 * shape.vocab_size * shape.hidden_size,
        experts=2 * shape.expert_weights * (shape.num_experts or 0),
        rehearsed=gpus == 1 and 2 * weights <= free,
        searches=made.searches,
        longest=rows["max_length"],
        rows=rows["samples"] if measured else 0,
        requested_rows=setting if isinstance(setting, int) else None,
        free=free,
    )
    return Needs(
        host=model_optimizer.expected_host_bytes(weights, leaves),
        gpu=gpu + context_bytes(machine),
        gpu_least=gpu_least + context_bytes(machine),
        leaves=leaves,
    )


def _share(shape: Shape, gpus: int) -> int:
    """16-bit weights on the fullest of several GPUs, in bytes: whole layers, spread evenly, and embedding or head.

    Source: accelerate's `get_balanced_memory` and `infer_auto_device_map`.
    """
    layer = 2 * shape.layer_weights // shape.num_hidden_layers
    return 2 * shape.vocab_size * shape.hidden_size + -(-shape.num_hidden_layers // gpus) * layer


def calibration_rows(cell: Cell) -> Mapping[str, int]:
    """Maximum number of rows, and of tokens in one."""
    calibration = backends.calibration(cell)
    numbers = {"samples": MOST, "max_length": MOST}
    return {name: int(_number(calibration.get(name)) or usual) for name, usual in numbers.items()}


def _number(value: Json) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
