"""The end of the quantize and convert stages: a checkpoint that is whole and is what was asked for.

The release's example scripts or Model Optimizer have filled the folder by now. The result is looked at before anybody
builds from it or serves it: a program that was killed, or that took another layout than it was told, must not cost an hour
in the next stage.

Format: https://nvidia.github.io/TensorRT-LLM/architecture/checkpoint.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import DownloadError, StageError
from trtllm_pipeline.hub.verify import check_folder, tensors
from trtllm_pipeline.stages.base import Work
from trtllm_pipeline.toolchains.model_optimizer.formats import PRECISIONS, kv_cache_algorithm

REQUIRED: Final = (
    "architecture",
    "dtype",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
)
"""Keys of config.json without which nothing can be built."""
_UNQUANTIZED: Final = (None, "", "NO_QUANT")
_MIXED: Final = "MIXED_PRECISION"
"""Algorithm of a checkpoint whose layers were given one each, as an option of quantize.py asks for."""


def run(work: Work) -> None:
    """Check a TensorRT-LLM checkpoint. Raises StageError."""
    tp, pp = int(str(work.params["tp"])), int(str(work.params["pp"]))
    config = check(work.out, tp=tp, pp=pp)
    check_precision(work.out, config, work.params)
    size = sum(file.stat().st_size for file in work.out.glob("rank*.safetensors"))
    algorithm = (config.get("quantization") or {}).get("quant_algo") or config["dtype"]
    print(f"checkpoint of {config['architecture']}: {algorithm}, tp{tp}pp{pp}, {size / 1e9:.2f} GB")  # noqa: T201 - the stage's log


def run_hugging_face(work: Work) -> None:
    """Check a quantized Hugging Face checkpoint. Raises StageError."""
    check_folder(work.out, "checkpoint")
    config = json.loads((work.out / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise StageError(
            f"{work.out / 'config.json'}: quantization_config is missing, so it would be served as if unquantized"
        )
    size = sum(file.stat().st_size for file in work.out.glob("*.safetensors"))
    algorithm = quantization.get("quant_algo") or work.params["precision"]
    print(f"checkpoint of {config.get('model_type')}: {algorithm}, {size / 1e9:.2f} GB")  # noqa: T201 - the stage's log


def check(folder: Path, *, tp: int, pp: int) -> Mapping[str, Any]:
    """The config.json of a checkpoint that has every rank of tp x pp, each file as long as its header says.

    Raises StageError naming what is missing or differs.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StageError(f"{path}: a checkpoint has one, and it is JSON: {error}") from error
    if not isinstance(config, dict):
        raise StageError(f"{path}: a checkpoint has one, and it is JSON: an object was expected")
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise StageError(f"{path}: {', '.join(missing)} is missing")
    mapping = config.get("mapping") or {}
    asked = {"world_size": tp * pp, "tp_size": tp, "pp_size": pp}
    for name, value in asked.items():
        if mapping.get(name, 1) != value:
            raise StageError(f"{path}: mapping.{name} is {mapping.get(name, 1)}, expected {value} for tp{tp}pp{pp}")
    for rank in range(tp * pp):
        file = folder / f"rank{rank}.safetensors"
        if not file.is_file():
            raise StageError(f"{file} is missing: tp{tp}pp{pp} has {tp * pp} ranks")
        try:
            tensors(file, folder.name)
        except DownloadError as error:
            raise StageError(f"{file} is damaged: {error.message}") from error
    return config


def check_precision(folder: Path, config: Mapping[str, Any], asked: Mapping[str, Json]) -> None:
    """Raise StageError where the config.json of `folder` says other algorithms than the parameters `asked` for."""
    precision, cache = str(asked["precision"]), str(asked["kv_cache_precision"])
    known = PRECISIONS.get(precision)
    wanted = {
        "quant_algo": (precision, known.algorithm if known else None),
        "kv_cache_quant_algo": (f"a KV cache of {cache}", kv_cache_algorithm(cache)),
    }
    quantization = config.get("quantization") or {}
    for name, (what, expected) in wanted.items():
        found = quantization.get(name)
        if not _agree(found, expected):
            raise StageError(f"{folder / 'config.json'}: {name} is {found}, expected {expected} for {what}")


def _agree(found: Any, expected: str | None) -> bool:
    if expected is None:
        return found in _UNQUANTIZED
    # Scripts add how activations are scaled: W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN, FP8_PER_CHANNEL_PER_TOKEN.
    return found in {expected, _MIXED} or str(found).startswith(f"{expected}_PER_")
