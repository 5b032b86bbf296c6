"""TRT1: folders and files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trtllm_pipeline.triton_repository.lint.repository import ModelRepository
from trtllm_pipeline.triton_repository.lint.rule import Violation, rule

_FILES: Final = {"python": "model.py", "onnxruntime": "model.onnx", "tensorrt": "model.plan", "pytorch": "model.pt"}
"""What each backend loads where `default_model_filename` does not say otherwise."""


@rule("TRT101", "no-models", "error", "a repository without a model", "name the folder that holds the model folders")
def no_models(repository: ModelRepository) -> Iterator[Violation]:
    """Nothing in the folder looks like a model."""
    if not any(model.text is not None for model in repository.models.values()):
        yield Violation(repository.folder, "no folder in it has a config.pbtxt")


@rule(
    "TRT102",
    "config-missing",
    "error",
    "a model folder without config.pbtxt",
    "write one, or move the folder out of the repository: Triton tries to load every folder in it",
)
def config_missing(repository: ModelRepository) -> Iterator[Violation]:
    """Among models, one has no configuration."""
    if any(model.text is not None for model in repository.models.values()):
        for model in repository.models.values():
            if model.text is None:
                yield Violation(model.folder, "has no config.pbtxt")


@rule(
    "TRT103",
    "name-differs",
    "error",
    "a model whose name differs from its folder's",
    "give the folder and `name` the same name, or leave `name` out",
)
def name_differs(repository: ModelRepository) -> Iterator[Violation]:
    """Triton refuses to load it."""
    for model, config in repository.parsed():
        if config.name and config.name != model.name:
            line = model.line(r"(?m)^\s*name\s*:")
            yield Violation(model.path, f"name is {config.name!r}, but its folder is {model.name!r}", line)


@rule(
    "TRT104", "no-version", "error", "a model without a version folder", "create a folder 1 in it, also for ensembles"
)
def no_version(repository: ModelRepository) -> Iterator[Violation]:
    """Triton finds no version to load."""
    for model in repository.models.values():
        if model.text is not None and not any(version.name.lstrip("0") for version in model.versions):
            yield Violation(model.folder, "has no version folder, named by a whole number from 1")


@rule(
    "TRT105",
    "model-file-missing",
    "error",
    "a version without the file that its backend loads",
    "add the file, or name another one in `default_model_filename`",
)
def model_file_missing(repository: ModelRepository) -> Iterator[Violation]:
    """A version folder lacks the model."""
    for model, config in repository.parsed():
        wanted = config.default_model_filename or _FILES.get(config.backend)
        for version in model.versions:
            if wanted and not (version / wanted).exists():
                yield Violation(version, f"has no {wanted}, which the {config.backend} backend loads")
