"""Input files of a deep examination: models with random weights, questions, and a matrix."""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Json, Machine, write_json, writing
from trtllm_pipeline.models import dataset_file, read_tokenizer
from trtllm_pipeline.tensorrt import BACKEND
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import families as tiny_models

MATRIX: Final = "matrix.yaml"
MAX_TOKENS: Final = 24
"""Length of answers. The models never stop on their own."""
_QUESTIONS: Final = 8
_ISL: Final = 192
_OSL: Final = 32
_BATCH_SIZE: Final = 4
_LAYOUTS: Final = ("tp1pp1", "tp2pp1", "tp1pp2")
"""Layouts to try with two GPUs."""
_IN_GROUPS: Final = ("int4_awq", "w4a8_awq")
"""Precisions for one rank only: a rank's share of the attention is narrower than a group of 128."""


def write(
    folder: Path,
    machine: Machine,
    *,
    families: Sequence[str],
    precisions: Sequence[str],
    toolchain_names: Sequence[str],
) -> Path:
    """Write all files into `folder`, and return the matrix file. Unchanged files are left alone.

    Each model is a directory named after its family, next to FAMILY.jsonl: questions with the answers of the float
    reference.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for family in families:
        _write_model(folder / family, family)
        writing.write_lines(folder / f"{family}.jsonl", map(json.dumps, questions(folder / family)))
    matrix = folder / MATRIX
    # JSON is YAML.
    write_json(matrix, _matrix(machine, families, precisions, toolchain_names))
    return matrix


def _write_model(folder: Path, family: str) -> None:
    """Replace a file atomically if its content changed, because another examination may read it."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        made = Path(scratch) / family
        tiny_models.write_model(made, family)
        names = sorted(path.name for path in made.iterdir())
        if folder.is_dir():
            if filecmp.cmpfiles(made, folder, names, shallow=False)[0] == names:
                return
            shutil.rmtree(folder)
        made.rename(folder)


def questions(model: Path) -> Iterator[dict[str, Json]]:
    """Rows of a question file: prompts with the greedy answers of the float reference."""
    tokenizer, floats = read_tokenizer(model), tiny_models.reference(model)
    lines = dataset_file.data_file("builtin:prompts", model).read_text(encoding="utf-8").splitlines()
    # A token has at least one byte, so no prompt exceeds the engine's limit.
    short = [row for row in map(json.loads, lines) if len(row["input"].encode()) <= _ISL]
    for row in short[:_QUESTIONS]:
        answer = floats.generate(tokenizer.encode(row["input"]).ids, MAX_TOKENS)
        yield {"id": row["id"], "input": row["input"], "output": tokenizer.decode(answer)}


def _matrix(
    machine: Machine, families: Sequence[str], precisions: Sequence[str], toolchain_names: Sequence[str]
) -> dict[str, Any]:
    return {
        "name": "doctor",
        "description": "tiny models in every precision, for pipeline doctor --deep",
        "axes": {
            "model": [f"./{family}" for family in families],
            "precision": [*precisions],
            **({"parallel": [*_LAYOUTS]} if len(machine.gpus) > 1 else {}),
            "max_batch_size": [_BATCH_SIZE],
            "lengths": [f"{_ISL},{_OSL}"],
            "toolchain": [*toolchain_names],
        },
        "exclude": [*_excluded(machine, precisions, toolchain_names)],
        "override": [
            *(
                {"where": {"model": f"./{family}"}, "settings": {"accuracy": {"input_data": f"{family}.jsonl"}}}
                for family in families
            ),
            *(
                {"where": {"toolchain": toolchain}, "settings": {"serve": {"frontend": "trtllm_serve"}}}
                for toolchain in toolchain_names
                if not _has_triton(toolchain, machine)
            ),
        ],
        "settings": {
            "quantize": {"calibration": {"samples": 16}},
            "perf": {"exclusive": "none"},  # no performance is measured, so servers run concurrently on separate GPUs
            "accuracy": {"metrics": ["exact"], "max_tokens": MAX_TOKENS},
        },
    }


def _excluded(machine: Machine, precisions: Sequence[str], toolchain_names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Unusable layouts: the embedded toolchain has one rank, and a rank's share is narrower than an AWQ group."""
    if len(machine.gpus) < 2:
        return
    if toolchains.EMBEDDED in toolchain_names:
        yield {"toolchain": toolchains.EMBEDDED, "parallel": list(_LAYOUTS[1:])}
    if grouped := [each for each in precisions if each in _IN_GROUPS]:
        yield {"precision": grouped, "parallel": _LAYOUTS[1]}


def _has_triton(toolchain: str, machine: Machine) -> bool:
    """True if Triton can serve a toolchain's output. Otherwise TensorRT-LLM's own server is needed."""
    available: Mapping[str, bool] = {
        toolchains.ENGINES: machine.triton is not None and BACKEND in machine.triton.backends,
        toolchains.PYTORCH: machine.triton is not None,
    }
    has_templates = machine.tensorrt_llm is not None and machine.tensorrt_llm.templates is not None
    return toolchain not in available or (available[toolchain] and has_templates)
