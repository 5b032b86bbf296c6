"""The end of the quantize and convert stages: a complete checkpoint with the requested properties.

The release's example scripts or Model Optimizer have filled the directory by now. The result is checked before anything
is built from it or serves it: a program that was killed, or that used another parallelism, must not cost an hour in the
next stage.

Format: https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import DownloadError, FailureClass, StageError, layout_name
from trtllm_pipeline.models import FILES, Fields, quantization, verify
from trtllm_pipeline.tensorrt.modelopt.formats import PRECISIONS, kv_cache_algorithm
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint, EngineBuild, HuggingFaceCheckpoint
from trtllm_pipeline.tensorrt.trtllm.prequantized import FORMS

REQUIRED: Final = (
    "architecture",
    "dtype",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
)
"""Keys of config.json that every build needs."""
STATED_FILE: Final = "hf_quant_config.json"
"""Model Optimizer's description of its work on a Hugging Face directory."""
_UNQUANTIZED: Final = (None, "", "NO_QUANT")
_MIXED: Final = "MIXED_PRECISION"
"""Algorithm of a checkpoint with a separate one for each layer, which an option of quantize.py requests."""


def run(context: StageContext[Checkpoint]) -> None:
    """Check a TensorRT-LLM checkpoint. Raises StageError."""
    tp, pp, ep = context.params.tp, context.params.pp, context.params.ep
    config = check(context.out, tp=tp, pp=pp, ep=ep)
    check_precision(context.out / "config.json", config.get("quantization") or {}, context.params)
    size = sum(file.stat().st_size for file in context.out.glob("rank*.safetensors"))
    algorithm = (config.get("quantization") or {}).get("quant_algo") or config["dtype"]
    print(f"checkpoint of {config['architecture']}: {algorithm}, {layout_name(tp, pp, ep or 1)}, {size / 1e9:.2f} GB")  # noqa: T201 - the stage's log


def run_hugging_face(context: StageContext[HuggingFaceCheckpoint]) -> None:
    """Check a quantized Hugging Face checkpoint. Raises StageError."""
    verify.check_folder(context.out, "checkpoint")
    config = Fields.read(context.out, "config.json")
    if not config.has("quantization_config"):
        raise StageError(
            f"{context.out / 'config.json'}: quantization_config is missing, so it would be served as if unquantized"
        )
    stated = check_stated(context.out)
    check_precision(context.out / STATED_FILE, stated, context.params)
    size = sum(file.stat().st_size for file in context.out.glob("*.safetensors"))
    algorithm = stated.get("quant_algo") or context.params.precision
    print(f"checkpoint of {config.text('model_type')}: {algorithm}, {size / 1e9:.2f} GB")  # noqa: T201 - the stage's log


def check_stated(folder: Path) -> Mapping[str, Any]:
    """The quantization in hf_quant_config.json of a Hugging Face directory from Model Optimizer. Empty for any other.

    The PyTorch runtime reads that file and does not read Model Optimizer's entry in config.json: without it, the
    weights would be treated as unquantized. Raises StageError in that case.
    """
    config = Fields.read(folder, "config.json").fields("quantization_config")
    stated = Fields.read_optional(folder, STATED_FILE).fields("quantization")
    made_by_it = config.text("quant_method") == "modelopt" or config.fields("producer").text("name") == "modelopt"
    if made_by_it and not (stated.text("quant_algo") or stated.text("kv_cache_quant_algo")):
        raise StageError(
            f"{folder / STATED_FILE} is missing or names no algorithm: Model Optimizer quantized this model, and "
            "TensorRT-LLM would serve it as if unquantized",
            failure=FailureClass.INFEASIBLE,
            hint="get the whole checkpoint, or quantize the model again",
        )
    return stated.values


def check_unquantized(folder: Path) -> None:
    """Raise StageError for a Hugging Face directory with quantized weights: it would be served as such.

    A plan checks this before anything is fetched, if a hub can be reached.
    """
    weights = quantization({name: Fields.read_optional(folder, name).values for name in FILES})
    if weights is not None:
        raise StageError(
            f"{folder}: the weights are quantized already, {weights.said}; expected unquantized ones",
            failure=FailureClass.INFEASIBLE,
            hint="use precision as_is, or name the model's unquantized repository",
        )


def check(folder: Path, *, tp: int, pp: int, ep: int | None = None) -> Mapping[str, Any]:
    """The config.json of a checkpoint that has all ranks of tp x pp, each file as long as its header states.

    For a mixture of experts with expert parallelism `ep`, this is checked as well.

    Raises StageError that names what is missing or differs.
    """
    path = folder / "config.json"
    fields = Fields.read(folder, path.name)
    config = fields.values
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise StageError(f"{path}: {', '.join(missing)} is missing")
    fields.fields("quantization")
    mapping = fields.fields("mapping").values
    expected = {"world_size": tp * pp, "tp_size": tp, "pp_size": pp, "moe_ep_size": ep or 1}
    for name, value in expected.items():
        if mapping.get(name, 1) != value:
            raise StageError(
                f"{path}: mapping.{name} is {mapping.get(name, 1)}, expected {value} for {layout_name(tp, pp, ep or 1)}"
            )
    for rank in range(tp * pp):
        file = folder / f"rank{rank}.safetensors"
        if not file.is_file():
            raise StageError(f"{file} is missing: tp{tp}pp{pp} has {tp * pp} ranks")
        try:
            verify.tensors(folder, file.name)
        except DownloadError as error:
            raise StageError(f"{file} is damaged: {error.message}") from error
    return config


def check_precision(
    path: Path, quantization: Mapping[str, Any], params: Checkpoint | HuggingFaceCheckpoint | EngineBuild
) -> None:
    """Raise StageError if `quantization`, from the file at `path`, has other algorithms than `params` requests."""
    precision, cache = params.precision, params.kv_cache_precision
    known = PRECISIONS.get(precision)
    algorithm = known.algorithm if known else None
    if not isinstance(params, HuggingFaceCheckpoint) and params.quantization is not None:
        algorithm = FORMS[params.quantization].algorithm
    wanted = {
        "quant_algo": (precision, algorithm),
        "kv_cache_quant_algo": (f"a KV cache of {cache}", kv_cache_algorithm(cache)),
    }
    for name, (what, expected) in wanted.items():
        value = quantization.get(name)
        if not _agree(value, expected):
            raise StageError(f"{path}: {name} is {value}, expected {expected} for {what}")


def _agree(algorithm: Any, expected: str | None) -> bool:
    if expected is None:
        return algorithm in _UNQUANTIZED
    # Scripts append how activations are scaled: W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN, FP8_PER_CHANNEL_PER_TOKEN.
    return algorithm in {expected, _MIXED} or str(algorithm).startswith(f"{expected}_PER_")
