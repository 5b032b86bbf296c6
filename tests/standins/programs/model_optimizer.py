"""A Python that has Model Optimizer, as far as quantizing goes: `python .../modelopt/__main__.py JOB`.

Takes the job file that our worker takes, and refuses what Model Optimizer and transformers refuse; what is in its words
was met with Model Optimizer 0.47 and transformers 5.14.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.standins.programs import ProgramError, Work, refusal
from tests.standins.programs.checkpoint import number_of_experts, read_model, safetensors, write_checkpoint
from tests.standins.programs.quantize import ALGORITHMS, WITHOUT_CALIBRATION

_GROUPS: Final = {"int4_awq": 128, "w4a8_awq": 128, "nvfp4": 16}
_PLAIN: Final = ("fp16", "bf16")
_TEXT_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def run(work: Work, argv: Sequence[str]) -> int:
    """Quantize."""
    program, path = argv
    if Path(program).parts[-2:] != ("modelopt", "__main__.py"):
        raise refusal(f"this Python is there for the quantization worker, not for {program}")
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    asked, folder, out = job["params"], Path(job["inputs"]["model"]), Path(job["out"])
    precision = asked["precision"]
    if not work.gpus:
        raise refusal("no GPU is visible")
    model = read_model(work, str(folder))
    if "quantization_config" in model:
        raise refusal(f"{folder} is quantized already")
    if "auto_map" in model:
        raise ProgramError(
            f"ValueError: The repository {folder} contains custom code which must be executed to correctly load the model."
        )
    algorithm = None if precision in _PLAIN else ALGORITHMS[precision]
    cache = {"fp8": "FP8", "int8": "INT8", "nvfp4": "NVFP4"}.get(asked.get("kv_cache_precision") or "")
    if (precision not in {*WITHOUT_CALIBRATION, *_PLAIN} or cache) and "calibration_data" in job["files"]:
        json.loads(Path(job["files"]["calibration_data"]).read_text(encoding="utf-8").splitlines()[0])
    width = model.get("hidden_size") or model["n_embd"]
    if width % _GROUPS.get(precision, 1):
        raise refusal(f"rows of {width} weights are not whole groups of {_GROUPS[precision]}")
    if precision in {"int4_awq", "w4a8_awq"} and number_of_experts(model):
        raise refusal("export_hf_checkpoint ends with an error for AWQ of experts")
    work.begin()
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": cache}
    if asked["checkpoint_format"] == "tensorrt_llm":
        layout = {name: int(asked[name]) for name in ("tp", "pp")}
        write_checkpoint(work, out, model, dtype=asked.get("dtype") or "auto", **layout, quantization=quantization)
    else:
        _write_folder(work, folder, out, model, quantization)
    print(f"{precision} checkpoint ({asked['checkpoint_format']})")
    return 0


def _write_folder(
    work: Work, source: Path, out: Path, model: Mapping[str, Any], quantization: Mapping[str, Any]
) -> None:
    """A Hugging Face folder as Model Optimizer leaves it; the weights are a few bytes."""
    said = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    config = {**model, "quantization_config": {"quant_method": "modelopt", **said}}
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": safetensors(0)}
    stated = {"hf_quant_config.json": json.dumps(said).encode()}
    work.write([(out / name, content) for name, content in {**files, **stated}.items()])
    for name in _TEXT_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
