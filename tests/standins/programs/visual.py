"""`build_visual_engine.py`, from 0.19 on `build_multimodal_engine.py`: the engine of the part of a model that sees."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.standins.programs import ProgramError, Work
from tests.standins.programs.checkpoint import read_model

_MODEL_TYPES: Final = (
    *("blip2", "llava", "llava_next", "llava_onevision", "llava_onevision_lmms", "vila", "nougat", "cogvlm", "fuyu"),
    *("pix2struct", "neva", "kosmos-2", "video-neva", "phi-3-vision", "mllama", "internvl", "qwen2_vl"),
    "internlm-xcomposer2",
)
"""Source: choices of `add_multimodal_arguments`, those that were added last left out."""


def run(work: Work, argv: Sequence[str]) -> int:
    """Build."""
    parser = argparse.ArgumentParser(prog="build_multimodal_engine.py")
    parser.add_argument("--model_type", choices=_MODEL_TYPES)
    for name in ("--model_path", "--vila_path", "--output_dir"):
        parser.add_argument(name)
    for name, default in {"--max_batch_size": 4, "--max_hw_dims": 5184, "--min_hw_dims": 128}.items():
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args(list(argv))
    if options.model_type is None:
        raise ProgramError("RuntimeError: Invalid model type None")
    model = read_model(work, options.model_path)
    folder = Path(options.model_path)
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        raise ProgramError(f"OSError: {folder} does not appear to have a file named preprocessor_config.json.")
    if model["model_type"] != options.model_type:
        raise ProgramError(f"AttributeError: stand-in: {options.model_type} is no model type of {folder}")
    if not work.gpus:
        raise ProgramError("[TRT] [E] createInferBuilder: CUDA initialization failure with error: 100", traceback=False)
    work.begin()
    config: dict[str, Any] = {
        "builder_config": {
            "precision": "float16",
            "model_type": options.model_type,
            "max_batch_size": options.max_batch_size,
        }
    }
    output = Path(options.output_dir)
    files = [(output / "config.json", json.dumps(config).encode()), (output / "model.engine", b"visual engine")]
    if options.model_type.startswith("llava_"):
        files.append((output / "image_newlines.safetensors", b"newline"))
    work.write(files)
    print(f"[TRT] [I] Succeeded building {output}/model.engine in 0 s")
    return 0
