"""TRT1: directories and files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from trtllm_pipeline.models.triton_repository.lint.model_repository import Model, ModelRepository, Violation
from trtllm_pipeline.models.triton_repository.lint.rule import rule

_FILES: Final = {"python": "model.py", "onnxruntime": "model.onnx", "tensorrt": "model.plan", "pytorch": "model.pt"}
"""File that each backend loads unless `default_model_filename` names another."""
_TENSORFLOW_FILES: Final = {"tensorflow_graphdef": "model.graphdef", "tensorflow_savedmodel": "model.savedmodel"}
"""The same for the tensorflow backend, by platform."""
_FIXED_FILES: Final = {"vllm": "model.json"}
"""File that a backend loads whatever `default_model_filename` is."""
_PYTHON_RUNTIME: Final = "model.py"
"""The `runtime` of the pytorch backend for models in Python, which need no TorchScript file."""
_COMPLETED: Final = ("model.onnx", "model.plan", "model.graphdef", "model.savedmodel", "model.xml")
"""Files of models whose configuration Triton can complete, so that they need none."""
_COMPLETES: Final = "auto_complete_config"
"""The function of a Python model that completes its own configuration."""


@rule("TRT101", "name the directory that holds the model directories")
def no_models(repository: ModelRepository) -> Iterator[Violation]:
    """A repository without a model."""
    if all(_without_config(model) for model in repository.models.values()):
        yield Violation(repository.folder, "no directory in it has a config.pbtxt")


@rule("TRT102", "write one, or move the directory out of the repository: Triton tries to load every directory in it")
def config_missing(repository: ModelRepository) -> Iterator[Violation]:
    """A model directory without the config.pbtxt that it needs."""
    lacking = [model for model in repository.models.values() if _without_config(model)]
    if len(lacking) < len(repository.models):
        yield from (Violation(model.folder, "has no config.pbtxt") for model in lacking)


def _without_config(model: Model) -> bool:
    """True for a model that lacks a config.pbtxt which it needs."""
    if model.text is not None or _COMPLETES in model.code:
        return False
    return not any(path for name in _COMPLETED for path in model.folder.glob(f"*/{name}"))


@rule("TRT103", "give the directory and `name` the same name, or leave `name` out", each=ModelRepository.parsed)
def name_differs(model: Model, config: Any) -> Iterator[Violation]:
    """A model whose name differs from its directory's."""
    if config.name and config.name != model.name:
        line = model.line(r"(?m)^\s*name\s*:")
        yield Violation(model.path, f"name is {config.name!r}, but its directory is {model.name!r}", line)


@rule("TRT104", "create a directory 1 in it, also for ensembles")
def no_version(repository: ModelRepository) -> Iterator[Violation]:
    """A model without a version directory."""
    for model in repository.with_config():
        if not model.versions:
            yield Violation(model.folder, "has no version directory, named by a whole number without leading zeros")


@rule("TRT105", "add the file, or name another one in `default_model_filename`", each=ModelRepository.parsed)
def model_file_missing(model: Model, config: Any) -> Iterator[Violation]:
    """A version without the file that its backend loads."""
    backend = model.backend
    wanted = _FIXED_FILES.get(backend) or config.default_model_filename or _usual_file(backend, config)
    of_gpus = () if backend == "python" else config.cc_model_filenames.values()
    for version in model.served:
        if wanted and not any((version / name).exists() for name in (wanted, *of_gpus)):
            yield Violation(version, f"has no {wanted}, which the {backend} backend loads")


def _usual_file(backend: str, config: Any) -> str | None:
    if backend == "tensorflow":
        return _TENSORFLOW_FILES.get(config.platform)
    if backend == "pytorch" and config.runtime == _PYTHON_RUNTIME:
        return _FILES["python"]
    return _FILES.get(backend)


@rule(
    "TRT106",
    "name a version directory that is there, or leave version_policy out: Triton then serves the newest version",
    each=ModelRepository.parsed,
)
def version_policy(model: Model, _config: Any) -> Iterator[Violation]:
    """A version_policy that selects none of the version directories."""
    if model.versions and not model.served:
        present = ", ".join(path.name for path in model.versions)
        yield model.at("version_policy", f"the policy selects no version; present: {present}")


@rule(
    "TRT107",
    "add the version directory, or remove the version from the policy",
    severity="warning",
    each=ModelRepository.parsed,
)
def version_absent(model: Model, config: Any) -> Iterator[Violation]:
    """A version in version_policy that has no directory, next to others that have one."""
    present = {int(path.name) for path in model.versions}
    for number in config.version_policy.specific.versions:
        if model.served and number not in present:
            yield model.at("version_policy", f"version {number} has no directory")
