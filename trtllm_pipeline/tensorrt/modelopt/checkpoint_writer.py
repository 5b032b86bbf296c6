"""A calibrated model as a TensorRT-LLM checkpoint of any tensor and pipeline parallelism.

Model Optimizer packs and splits the weights. It gets more pipeline stages than requested, so that one piece of the model
is written while the next is packed. Stages of one rank are combined again here. Entries that its configuration lacks
without TensorRT-LLM (rotary embedding, kind of Qwen, modules excluded on other ranks) are filled in from the model's.
Format: https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import FailureClass, StageError, write_json
from trtllm_pipeline.models import Fields, model_files
from trtllm_pipeline.tensorrt.modelopt.formats import PRECISIONS, WeightPrecision
from trtllm_pipeline.tensorrt.modelopt.shards import ShardWriter
from trtllm_pipeline.tensorrt.toolchains import tiles

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class EngineFamily:
    """An architecture in Model Optimizer's terms."""

    model_type: str
    """Name in config.json."""
    decoder: str
    """Model Optimizer's name of the family."""
    kind: str | None = None
    """TensorRT-LLM's `model_type`, if it reads one."""
    described: bool = True
    """True if Model Optimizer writes its configuration. For the others it writes the weights, and since 0.23 it requests the
    configuration from an installed TensorRT-LLM. The configuration of the releases up to 0.21 is written here."""
    precisions: tuple[str, ...] | None = None
    """Precisions that are known to be read. None for all of the worker's."""
    since: str | None = None
    """First release whose engines use Model Optimizer's names of its weights. None for all."""


_OF_MIXTURES: Final = ("fp16", "bf16", "fp8")

FAMILIES: Final[Mapping[str, EngineFamily]] = {
    "LlamaForCausalLM": EngineFamily("llama", "llama", "llama"),
    "MistralForCausalLM": EngineFamily("mistral", "llama", "llama"),
    "MixtralForCausalLM": EngineFamily("mixtral", "llama", "llama", precisions=_OF_MIXTURES),
    "Qwen2ForCausalLM": EngineFamily("qwen2", "qwen", "qwen"),
    "Qwen3ForCausalLM": EngineFamily("qwen3", "qwen", "qwen"),
    "Qwen2MoeForCausalLM": EngineFamily("qwen2_moe", "qwen", "qwen", precisions=_OF_MIXTURES, since="0.20"),
    "Qwen3MoeForCausalLM": EngineFamily("qwen3_moe", "qwen", "qwen", precisions=_OF_MIXTURES),
    "GemmaForCausalLM": EngineFamily("gemma", "gemma"),
    "Gemma2ForCausalLM": EngineFamily("gemma2", "gemma2", described=False),
    "GPT2LMHeadModel": EngineFamily("gpt2", "gpt"),
    "PhiForCausalLM": EngineFamily("phi", "phi", described=False),
    "Phi3ForCausalLM": EngineFamily("phi3", "phi3", described=False),
}
"""By architecture."""
_BY_TYPE: Final = {family.model_type: family for family in FAMILIES.values()}
_UNWRITTEN: Final = {"qwen": "transformers does not have it"}
AWQ_OF_EXPERTS: Final = (
    "Model Optimizer measures it, and its export of Hugging Face checkpoints then ends with an error"
)
FORM: Final = 2
"""Bumped if the files written for the same model change."""

_TIED: Final = frozenset({"gemma", "gemma2"})
"""Models whose head is their embedding in every engine."""
_GEMMA2_KEYS: Final = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_IN_MIXTURES: Final = ("router", "shared_expert_gate")
"""Parts of a mixture that are never quantized."""
_LONG_ROPE: Final = frozenset({"longrope", "su"})
_PIECES: Final = 8
_TENSORS_PER_LAYER: Final = 48
"""More than any layer of these families, including scales."""
_LAYER: Final = re.compile(r"(transformer\.layers\.)(\d+)(\..+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """The split of a checkpoint: over `tp` ranks within a layer, over `pp` groups of layers."""

    tp: int
    pp: int


def uneven_stages(layers: int, pp: int) -> str | None:
    """Why `layers` cannot be divided into `pp` stages of an engine, in words, or None."""
    return f"pp{pp}: {layers} layers cannot be split evenly into {pp} stages" if layers % pp else None


def unwritten(model_type: str, precision: str) -> str | None:
    """Why no checkpoint for engines is written for such a model in `precision`, in words, or None."""
    family = _BY_TYPE.get(model_type)
    if family is None:
        return _UNWRITTEN.get(model_type, "Model Optimizer's engine checkpoints of it are untested")
    if precision not in PRECISIONS:
        return f"Model Optimizer writes {', '.join(PRECISIONS)}"
    if family.precisions is not None and precision not in family.precisions:
        return f"Model Optimizer writes {model_type} only in {', '.join(family.precisions)}"
    return None


def check_experts(config: Mapping[str, Any], precision: WeightPrecision) -> None:
    """Raise StageError (infeasible) for a mixture that Model Optimizer calibrates but cannot write for Hugging Face."""
    if precision.searches and model_files.num_experts(config):
        raise _infeasible(
            f"{precision.algorithm} of a mixture of experts: {AWQ_OF_EXPERTS}", "choose fp8 or nvfp4 for this model"
        )


def read_since(model_type: str) -> str | None:
    """First release that reads the checkpoint of such a model. None for all that have the family."""
    family = _BY_TYPE.get(model_type)
    return None if family is None else family.since


def check_layout(config: Mapping[str, Any], layout: Layout, precision: WeightPrecision) -> None:
    """Raise StageError (infeasible) if the model of this Hugging Face configuration cannot be split this way."""
    given = Fields(model_files.named_alike(config), Path("config.json"))
    architecture = next(iter(given.texts("architectures")), None)
    known = None if architecture is None else FAMILIES.get(architecture)
    if known is None:
        raise _infeasible(
            f"architecture {architecture}: TensorRT-LLM checkpoints are written for {', '.join(FAMILIES)}",
            "set the checkpoint format to hugging_face (PyTorch backend), or use TensorRT-LLM's example scripts",
        )
    if known.precisions is not None and precision not in map(PRECISIONS.__getitem__, known.precisions):
        raise _infeasible(
            f"TensorRT-LLM checkpoints of {known.model_type} are written in {', '.join(known.precisions)}",
            "choose one of these, or use TensorRT-LLM's example scripts",
        )
    heads, layers = given.integer("num_attention_heads"), given.integer("num_hidden_layers")
    if given.values.get("decoder_sparse_step", 1) != 1 or given.values.get("mlp_only_layers"):
        raise _infeasible(
            f"{known.model_type} with layers without experts: TensorRT-LLM requires experts in all layers",
            "use another model",
        )
    head = given.optional_integer("head_dim") or given.integer("hidden_size") // heads
    widths = tiles.Widths(
        heads, given.integer("num_key_value_heads", heads), head, dense=given.integer("intermediate_size")
    )
    name = next(name for name, each in PRECISIONS.items() if each == precision)
    uneven = tiles.uneven(heads, widths.kv_heads, layout.tp) or uneven_stages(layers, layout.pp)
    if uneven is None and (tile := tiles.ENGINES.get(name)) is not None:
        uneven = tiles.cut(tile, widths, layout.tp, precision=name)
    if uneven is not None:
        raise _infeasible(uneven)


def write(
    model: Any,
    config: Mapping[str, Any],
    out: Path,
    *,
    precision: WeightPrecision,
    kv_cache: str | None,
    layout: Layout,
    progress: Callable[[int, int], None],
    phase: Callable[[str], AbstractContextManager[None]],
) -> None:
    """Write `config.json` and a `rank{N}.safetensors` for each rank into `out`.

    `config` is the Hugging Face configuration as stored. `progress` receives the finished and total number of pieces. `phase`
    is entered as "export", which overlaps most of the writing, and as "write" for the rest of the writing at the end. Raises
    StageError (infeasible) if Model Optimizer cannot split the model this way.
    """
    from modelopt.torch.export import torch_to_tensorrt_llm_checkpoint

    family = FAMILIES[config["architectures"][0]]
    config = model_files.named_alike(config)
    layers = int(config["num_hidden_layers"])
    per_stage = layers // layout.pp
    pieces = max(count for count in range(1, min(_PIECES, per_stage) + 1) if per_stage % count == 0)
    excluded: set[str] = set()
    written: dict[str, Any] = {}
    done, total = 0, layout.tp * layout.pp * pieces
    with ExitStack() as stack:
        files = [
            stack.enter_context(ShardWriter(out / f"rank{rank}.safetensors", _TENSORS_PER_LAYER * (per_stage + 1)))
            for rank in range(layout.tp * layout.pp)
        ]
        try:
            with phase("export"), nullcontext() if family.described else _described_as_llama():
                for written, weights, _ in torch_to_tensorrt_llm_checkpoint(
                    model, family.decoder, model.dtype, layout.tp, layout.pp * pieces
                ):
                    tp_rank, piece = written["rank"] % layout.tp, written["rank"] // layout.tp
                    excluded.update((written.get("quantization") or {}).get("exclude_modules") or ())
                    stage, within = divmod(piece, pieces)
                    renamed = _renumbered(weights, within * (per_stage // pieces))
                    if family.model_type in _TIED:
                        renamed.pop("lm_head.weight", None)
                    files[stage * layout.tp + tp_rank].add(_joined_cache_scales(renamed))
                    done += 1
                    progress(done, total)
        except (AssertionError, NotImplementedError) as error:
            raise _infeasible(f"Model Optimizer cannot write this checkpoint: {error}") from error
        with phase("write"):
            stack.close()
    quantization = dict(written["quantization"] or {})
    if precision.algorithm is None or precision.by_builder:
        # The builder decides what it quantizes: it excludes the head itself.
        quantization = {"quant_algo": precision.algorithm, "kv_cache_quant_algo": kv_cache}
    else:
        if family.model_type in _TIED:
            excluded.add("lm_head")
        # Layers count from 0 in each piece. Releases differ in whether they match whole names or suffixes.
        for end in _IN_MIXTURES:
            if any(name.endswith(f".{end}") for name in excluded):
                excluded = {name for name in excluded if not name.endswith(f".{end}")} | {end, f"*.{end}"}
        quantization["exclude_modules"] = sorted(excluded)
    del written["rank"]
    world = {"world_size": layout.tp * layout.pp, "tp_size": layout.tp, "pp_size": layout.pp}
    write_json(
        out / "config.json", {**written, **_from_source(config, family), "mapping": world, "quantization": quantization}
    )


def _renumbered(weights: Mapping[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    """Layers count from 0 in each rank's file: the layers of a later piece follow those of earlier ones."""
    renumbered = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        renumbered[f"{match[1]}{int(match[2]) + first}{match[3]}" if match else name] = tensor
    return renumbered


def _joined_cache_scales(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One scale for keys and values, the larger one: the only form that every release reads."""
    for name in [name for name in weights if name.endswith(".k_cache_scaling_factor")]:
        values = weights.pop(name.replace(".k_cache_", ".v_cache_"))
        weights[name.replace(".k_cache_", ".kv_cache_")] = weights.pop(name).maximum(values)
    return weights


@contextmanager
def _described_as_llama() -> Iterator[None]:
    """In this context, Model Optimizer describes any family like Llama, which adds no keys to the common ones.

    Its function queries the family again only there, after the weights are packed.
    """
    from modelopt.torch.export import model_config_export

    theirs = model_config_export.convert_to_tensorrt_llm_config

    def ours(model_config: Any, *rest: Any, **named: Any) -> Any:
        for layer in model_config.layers:
            layer.decoder_type = "llama"
        return theirs(model_config, *rest, **named)

    model_config_export.convert_to_tensorrt_llm_config = ours
    try:
        yield
    finally:
        model_config_export.convert_to_tensorrt_llm_config = theirs


def _from_source(config: Mapping[str, Any], family: EngineFamily) -> dict[str, Any]:
    """The keys about the model that TensorRT-LLM needs and that Model Optimizer omits or writes incorrectly.

    The rotary base matters most: without one, TensorRT-LLM uses 10000 and the engine generates nonsense. The keys are those
    that Model Optimizer 0.21 wrote.
    """
    entries: dict[str, Any] = {"decoder": family.decoder}
    if family.kind is not None:
        entries["model_type"] = family.kind
    if family.decoder == "qwen":
        # TensorRT-LLM assumes biases, and needs this length even for models that do not use it.
        entries |= {
            "qwen_type": family.model_type,
            "attn_bias": family.model_type in {"qwen2", "qwen2_moe"},
            "seq_length": config.get("seq_length", 8192),
        }
    if family.model_type in {"qwen2_moe", "qwen3_moe"}:
        entries |= {
            "intermediate_size": config["intermediate_size"],
            "moe_intermediate_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size", 0),
            "moe": {
                "num_experts": config["num_experts"],
                "top_k": config["num_experts_per_tok"],
                "normalization_mode": int(bool(config.get("norm_topk_prob"))),
            },
        }
    if family.model_type in _TIED:
        entries["share_embedding_table"] = True
    if family.model_type == "gpt2":
        # It would use learned positions instead of rotary ones.
        return {**entries, "position_embedding_type": "learned_absolute"}
    base, kind = model_files.rotary(config)
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.pop("rope_theta", None)
    entries["rotary_base"] = 10000.0 if base is None else base
    part = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part is not None:
        entries["rotary_pct"] = entries["partial_rotary_factor"] = part
    # Releases differ in which of the two names they read.
    entries["rotary_scaling"] = None if kind is None else {**rope, "type": kind, "rope_type": kind}
    if family.model_type == "gemma2":
        entries |= {name: config.get(name) for name in _GEMMA2_KEYS}
        entries["inter_layernorms"] = True
    elif family.model_type == "phi3":
        # Gate and up are one matrix, whose rows Model Optimizer counts.
        entries["intermediate_size"] = config["intermediate_size"]
        entries["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        )
        if kind in _LONG_ROPE:
            entries |= {
                "position_embedding_type": "long_rope",
                "rotary_scaling": None,
                "longrope_scaling_short_factors": rope["short_factor"],
                "longrope_scaling_long_factors": rope["long_factor"],
            }
    elif family.model_type == "mixtral":
        # Releases up to 0.10 read these. Later ones read `moe`, which Model Optimizer writes.
        entries |= {"moe_num_experts": config["num_local_experts"], "moe_top_k": config["num_experts_per_tok"]}
    return entries


def _infeasible(message: str, hint: str = "choose another tensor or pipeline parallelism") -> StageError:
    return StageError(message, failure=FailureClass.INFEASIBLE, hint=hint)
