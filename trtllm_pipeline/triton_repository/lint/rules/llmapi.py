"""TRT6: repositories of the LLM API (`llmapi`), whose settings are in `1/model.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.files.user_files import decode_yaml
from trtllm_pipeline.triton_repository.lint.repository import ModelRepository
from trtllm_pipeline.triton_repository.lint.rule import Violation, rule

FILE_NAME: Final = "model.yaml"
_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "max_num_tokens", "max_seq_len")


def _files(repository: ModelRepository) -> Iterator[Path]:
    for model in repository.models.values():
        if model.text is not None and model.is_llmapi:
            yield from (version / FILE_NAME for version in model.versions)


def _settings(repository: ModelRepository) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The files that are a mapping, with it."""
    for path in _files(repository):
        found = _load(path)
        if isinstance(found, dict):
            yield path, found


def _load(path: Path) -> object:
    """What the YAML says; its error where it says nothing."""
    try:
        return decode_yaml(path.read_bytes())
    except (OSError, ValueError) as error:
        return error


def _line(path: Path, key: str) -> int | None:
    text = path.read_text(encoding="utf-8")
    match = re.search(rf"(?m)^[ \t]*{re.escape(key)}\s*:", text)
    return None if match is None else text.count("\n", 0, match.start()) + 1


@rule(
    "TRT601",
    "model-yaml",
    "error",
    "an LLM API model without a valid model.yaml",
    "write 1/model.yaml: model, backend, tensor_parallel_size, pipeline_parallel_size, triton_config",
)
def model_yaml(repository: ModelRepository) -> Iterator[Violation]:
    """Its model.py reads all its settings there."""
    for path in _files(repository):
        found = _load(path)
        if isinstance(found, FileNotFoundError):
            yield Violation(path.parent, "has no model.yaml")
        elif not isinstance(found, dict):
            fault = isinstance(found, Exception)
            yield Violation(path, str(found) if fault else "is not a mapping", getattr(found, "line", None))


@rule(
    "TRT602",
    "yaml-model",
    "error",
    "a model.yaml whose model is missing or is a path that does not exist",
    "set model to the absolute path of a Hugging Face folder",
)
def yaml_model(repository: ModelRepository) -> Iterator[Violation]:
    """A name is a download when the server starts; a path must be there."""
    for path, settings in _settings(repository):
        model = settings.get("model")
        if not isinstance(model, str) or not model:
            yield Violation(path, "names no model", _line(path, "model"))
        elif Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
            yield Violation(path, f"model {model} is not a folder with a config.json", _line(path, "model"))


@rule(
    "TRT603",
    "triton-config",
    "error",
    "a model.yaml without triton_config.max_batch_size and triton_config.decoupled",
    "triton_config: {max_batch_size: 0, decoupled: true}",
)
def triton_config(repository: ModelRepository) -> Iterator[Violation]:
    """The model's code takes both from there when Triton asks for its configuration."""
    for path, settings in _settings(repository):
        triton = settings.get("triton_config")
        values = triton if isinstance(triton, dict) else {}
        if type(values.get("max_batch_size")) is not int or type(values.get("decoupled")) is not bool:
            said = "triton_config needs max_batch_size, a whole number, and decoupled, true or false"
            yield Violation(path, said, _line(path, "triton_config"))


@rule(
    "TRT604",
    "yaml-sizes",
    "error",
    "a size in model.yaml that is not a positive whole number",
    "write a whole number, or remove the key",
)
def yaml_sizes(repository: ModelRepository) -> Iterator[Violation]:
    """Parallel sizes and limits."""
    for path, settings in _settings(repository):
        for name in _SIZES:
            if name in settings and (type(settings[name]) is not int or settings[name] < 1):
                yield Violation(path, f"{name} is {settings[name]!r}", _line(path, name))


@rule(
    "TRT605",
    "yaml-fraction",
    "error",
    "a kv_cache_config.free_gpu_memory_fraction that is not above 0 and at most 1",
    "use a fraction such as 0.9, TensorRT-LLM's default",
)
def yaml_fraction(repository: ModelRepository) -> Iterator[Violation]:
    """90 instead of 0.9."""
    for path, settings in _settings(repository):
        cache = settings.get("kv_cache_config")
        value = cache.get("free_gpu_memory_fraction") if isinstance(cache, dict) else None
        if value is not None and (isinstance(value, bool | str) or not 0 < value <= 1):
            line = _line(path, "free_gpu_memory_fraction")
            yield Violation(path, f"free_gpu_memory_fraction is {value!r}", line)


@rule(
    "TRT606",
    "yaml-backend",
    "error",
    "a backend in model.yaml that the release does not support",
    "use backend: pytorch; release 1.0 removed the TensorRT engine mode of the LLM API model",
)
def yaml_backend(repository: ModelRepository) -> Iterator[Violation]:
    """Engines are for the five-model repository from 1.0 on. Asked only where the release is given."""
    major = int(repository.release.partition(".")[0]) if repository.release else 0
    for path, settings in _settings(repository):
        backend = settings.get("backend", "pytorch")
        if major >= 1 and backend in {"tensorrt", "trt", None}:
            yield Violation(path, f"backend {backend!r} with release {repository.release}", _line(path, "backend"))
