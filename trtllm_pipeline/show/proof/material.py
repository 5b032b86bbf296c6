"""What a deep examination runs: models with random weights, questions to them, and a matrix, as files for any run."""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Json, Machine, write_json, write_lines
from trtllm_pipeline.models import data_file, read_tokenizer
from trtllm_pipeline.show.proof.families import FAMILIES, reference, write_model
from trtllm_pipeline.tensorrt import BACKEND
from trtllm_pipeline.tensorrt import catalog as toolchains

MATRIX: Final = "matrix.yaml"
MAX_TOKENS: Final = 24
"""Of an answer. The models end none themselves."""
_QUESTIONS: Final = 8
_ISL: Final = 192
_OSL: Final = 32
_BATCH_SIZE: Final = 4
_LAYOUTS: Final = ("tp1pp1", "tp2pp1", "tp1pp2")
"""What is tried where there are two GPUs."""
_IN_GROUPS: Final = ("int4_awq", "w4a8_awq")
"""A rank's part of these models' attention is narrower than a group of 128."""


__all__ = ["FAMILIES", "MATRIX", "MAX_TOKENS", "questions", "write"]


def write(
    folder: Path,
    machine: Machine,
    *,
    families: Sequence[str],
    precisions: Sequence[str],
    toolchain_names: Sequence[str],
) -> Path:
    """Write everything into `directory`, and return the matrix there. What is there already and the same is left alone.

    The models are directories named as their families, with FAMILY.jsonl beside them: questions with the answers of the float
    reference.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for family in families:
        _write_model(folder / family, family)
        write_lines(folder / f"{family}.jsonl", map(json.dumps, questions(folder / family)))
    matrix = folder / MATRIX
    # JSON is YAML.
    write_json(matrix, _matrix(machine, families, precisions, toolchain_names))
    return matrix


def _write_model(folder: Path, family: str) -> None:
    """As one rename, and only where it changes: another examination of the workspace may read it now."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        made = Path(scratch) / family
        write_model(made, family)
        names = sorted(path.name for path in made.iterdir())
        if folder.is_dir():
            if filecmp.cmpfiles(made, folder, names, shallow=False)[0] == names:
                return
            shutil.rmtree(folder)
        made.rename(folder)


def questions(model: Path) -> Iterator[dict[str, Json]]:
    """Rows of a question file: prompts of the package with the greedy answers of the float reference."""
    tokenizer, floats = read_tokenizer(model), reference(model)
    lines = data_file("builtin:prompts", model).read_text(encoding="utf-8").splitlines()
    # A token has a byte at least: none of these is longer than the engine takes.
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
            "perf": {"exclusive": "none"},  # nothing is measured: servers side by side, on GPUs of their own
            "accuracy": {"metrics": ["exact"], "max_tokens": MAX_TOKENS},
        },
    }


def _excluded(machine: Machine, precisions: Sequence[str], toolchain_names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Unusable layouts: the embedded toolchain has one rank, and a rank's part is narrower than a group of AWQ."""
    if len(machine.gpus) < 2:
        return
    if toolchains.EMBEDDED in toolchain_names:
        yield {"toolchain": toolchains.EMBEDDED, "parallel": list(_LAYOUTS[1:])}
    if grouped := [each for each in precisions if each in _IN_GROUPS]:
        yield {"precision": grouped, "parallel": _LAYOUTS[1]}


def _has_triton(toolchain: str, machine: Machine) -> bool:
    """Whether Triton can serve what a toolchain makes, or else TensorRT-LLM's own server has to."""
    found: Mapping[str, bool] = {
        toolchains.ENGINES: machine.triton is not None and BACKEND in machine.triton.backends,
        toolchains.PYTORCH: machine.triton is not None,
    }
    has_templates = machine.tensorrt_llm is not None and machine.tensorrt_llm.templates is not None
    return toolchain not in found or (found[toolchain] and has_templates)
