"""A calibrated model as a TensorRT-LLM checkpoint of any tensor and pipeline parallelism.

Model Optimizer packs and splits the weights. It is asked for more pipeline stages than wanted, so that one piece of the
model is written while the next is packed; stages of one rank are put together again here. What its configuration lacks
without TensorRT-LLM installed (rotary embedding, kind of Qwen, modules left out on other ranks) is filled in from the model's.
Format: https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.model_files import Fields
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.toolchains.model_optimizer.formats import WeightPrecision
from trtllm_pipeline.toolchains.model_optimizer.shards import ShardWriter

if TYPE_CHECKING:
    import torch

FAMILIES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}
"""Architecture -> Model Optimizer's name of its family. Others it either cannot export or exports with parts missing: 0.47
refuses Phi-3 and Gemma 2, finds no experts in Mixtral as transformers 5 has it, and takes GPT-2's positions for rotary ones."""
MODEL_TYPES: Final = tuple(name.removesuffix("ForCausalLM").lower() for name in FAMILIES)
"""The same as `model_type` of config.json."""

_PIECES: Final = 8
_TENSORS_PER_LAYER: Final = 48
"""More than any layer of these families has, scales included."""
_LAYER: Final = re.compile(r"(transformer\.layers\.)(\d+)(\..+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint is cut: over `tp` ranks within a layer, over `pp` groups of layers."""

    tp: int
    pp: int


def uneven(heads: int, kv_heads: int, layers: int, tp: int, pp: int) -> str | None:
    """What of a model cannot be divided over `tp` ranks within a layer and `pp` groups of layers, in words; or None."""
    if heads % tp:
        return f"tp{tp}: {heads} attention heads cannot be split evenly over {tp} GPUs"
    if kv_heads % tp and tp % kv_heads:
        return f"tp{tp}: {kv_heads} KV heads can neither be split over {tp} GPUs nor copied to them evenly"
    return f"pp{pp}: {layers} layers cannot be split evenly into {pp} stages" if layers % pp else None


def check_layout(config: Mapping[str, Any], layout: Layout, precision: WeightPrecision) -> None:
    """Raise StageError (infeasible) where the model of this Hugging Face configuration cannot be cut like that."""
    given = Fields(config, Path("config.json"))
    architecture = next(iter(given.texts("architectures")), None)
    if architecture not in FAMILIES:
        raise _infeasible(
            f"architecture {architecture}: TensorRT-LLM checkpoints are written for {', '.join(FAMILIES)}",
            "set the checkpoint format to hugging_face (PyTorch backend), or use TensorRT-LLM's example scripts",
        )
    heads, layers = given.integer("num_attention_heads"), given.integer("num_hidden_layers")
    if said := uneven(heads, given.integer("num_key_value_heads", heads), layers, layout.tp, layout.pp):
        raise _infeasible(said)
    if (group := precision.group_size) is None:
        return
    head = given.optional_integer("head_dim") or given.integer("hidden_size") // heads
    for name, width in (("intermediate_size", given.integer("intermediate_size")), ("attention output", heads * head)):
        if width % (layout.tp * group):
            raise _infeasible(
                f"tp{layout.tp}: each rank's part of {name} {width} must be a multiple of {precision.algorithm}'s group of {group}",
            )


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

    `config` is the Hugging Face configuration as stored; `progress` is told pieces done and all pieces. `phase` is entered
    as "export", which has most of the writing beside it, and as "write", which is what is left of that at the end.
    Raises StageError (infeasible) where Model Optimizer cannot split the model like that.
    """
    from modelopt.torch.export import torch_to_tensorrt_llm_checkpoint

    family = FAMILIES[config["architectures"][0]]
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
            with phase("export"):
                for written, weights, _ in torch_to_tensorrt_llm_checkpoint(
                    model, family, model.dtype, layout.tp, layout.pp * pieces
                ):
                    tp_rank, piece = written["rank"] % layout.tp, written["rank"] // layout.tp
                    excluded.update((written.get("quantization") or {}).get("exclude_modules") or ())
                    stage, within = divmod(piece, pieces)
                    renamed = _renumbered(weights, within * (per_stage // pieces))
                    files[stage * layout.tp + tp_rank].add(_joined_cache_scales(renamed))
                    done += 1
                    progress(done, total)
        except (AssertionError, NotImplementedError) as error:
            raise _infeasible(f"Model Optimizer cannot write this checkpoint: {error}") from error
        with phase("write"):
            stack.close()
    quantization = dict(written["quantization"] or {})
    if precision.algorithm is None or precision.by_builder:
        # What the builder quantizes is its own choice: it leaves out the head by itself.
        quantization = {"quant_algo": precision.algorithm, "kv_cache_quant_algo": kv_cache}
    else:
        quantization["exclude_modules"] = sorted(excluded)
    del written["rank"]
    world = {"world_size": layout.tp * layout.pp, "tp_size": layout.tp, "pp_size": layout.pp}
    write_json(
        out / "config.json",
        {**written, **_from_source(config, family), "mapping": world, "quantization": quantization},
    )


def _renumbered(weights: Mapping[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    """Layers count from 0 in each rank's file: those of a later piece move behind the ones before."""
    found = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        found[f"{match[1]}{int(match[2]) + first}{match[3]}" if match else name] = tensor
    return found


def _joined_cache_scales(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One scale for keys and values, the larger: the only form that every release reads."""
    for name in [name for name in weights if name.endswith(".k_cache_scaling_factor")]:
        values = weights.pop(name.replace(".k_cache_", ".v_cache_"))
        weights[name.replace(".k_cache_", ".kv_cache_")] = weights.pop(name).maximum(values)
    return weights


def _from_source(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """What TensorRT-LLM wants to know of the model and Model Optimizer does not say.

    The rotary base is the worst of it: without one, TensorRT-LLM takes 10000 and the engine talks nonsense.
    """
    found: dict[str, Any] = {"model_type": family}
    if family == "qwen":
        found["qwen_type"] = config["model_type"]
    # Transformers 5 stores base and scaling together, earlier ones apart.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = config.get("rope_theta", rope.pop("rope_theta", None))
    rope.pop("rope_theta", None)
    found["rotary_base"] = 10000.0 if base is None else base
    kind = rope.get("rope_type", rope.get("type"))
    # Releases differ in which of the two names they read.
    found["rotary_scaling"] = None if kind in {None, "default"} else {**rope, "type": kind, "rope_type": kind}
    return found


def _infeasible(message: str, hint: str = "choose another tensor or pipeline parallelism") -> StageError:
    return StageError(message, failure=FailureClass.INFEASIBLE, hint=hint)
