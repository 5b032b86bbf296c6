"""A model repository, read once for all rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.models.triton_repository.engine_config import Engine, EngineError

if TYPE_CHECKING:
    from trtllm_pipeline.models.triton_repository.model_config import ModelConfig


_UNSET: Final = re.compile(
    r"""\bkey\s*:\s*["'](?P<key>\w+)["'][\s,;]*value\s*:?\s*\{\s*string_value\s*:\s*["']\$\{(?P<name>\w+)\}["']"""
)
PLATFORMS: Final = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
"""Platform of earlier configurations -> the backend that replaced it."""
_VERSION: Final = re.compile(r"0|[1-9]\d*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a rule."""

    path: Path
    message: str
    line: int | None = None


@dataclass(frozen=True)
class Model:
    """One model directory. `text` is None without a config.pbtxt, `config` is None unless it can be parsed."""

    folder: Path
    text: str | None
    config: ModelConfig | None
    fault: model_config.ModelConfigError | None
    placeholders: tuple[model_config.Placeholder, ...]

    @property
    def name(self) -> str:
        """The directory's name, under which Triton loads it."""
        return self.folder.name

    @property
    def path(self) -> Path:
        return self.folder / model_config.FILE_NAME

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        """Parameters that have a value. Those with a placeholder are left out."""
        texts = {} if self.config is None else model_config.string_parameters(self.config)
        return {key: value for key, value in texts.items() if "${" not in value}

    @cached_property
    def versions(self) -> tuple[Path, ...]:
        """Its version directories, the newest last. Triton ignores names with leading zeros."""
        versions = (path for path in self.folder.iterdir() if path.is_dir() and _VERSION.fullmatch(path.name))
        return tuple(sorted(versions, key=lambda path: int(path.name)))

    @cached_property
    def served(self) -> tuple[Path, ...]:
        """The version directories selected by its version policy. Without a policy, the newest."""
        policy = None if self.config is None else self.config.version_policy
        choice = None if policy is None else policy.WhichOneof("policy_choice")
        if policy is None or choice is None:
            return self.versions[-1:]
        if choice == "latest":
            return self.versions[-policy.latest.num_versions :] if policy.latest.num_versions else ()
        return tuple(path for path in self.versions if choice == "all" or int(path.name) in policy.specific.versions)

    @property
    def backend(self) -> str:
        """The backend that it names, or that its platform stands for. Empty if it names none."""
        return "" if self.config is None else self.config.backend or PLATFORMS.get(self.config.platform, "")

    @property
    def is_ensemble(self) -> bool:
        config = self.config
        return config is not None and (config.platform == "ensemble" or config.HasField("ensemble_scheduling"))

    @property
    def is_engine(self) -> bool:
        """True if it runs a TensorRT-LLM engine: in the C++ backend, or in the templates' Python model for it."""
        config = self.config
        return config is not None and (config.backend == "tensorrtllm" or "gpt_model_type" in config.parameters)

    @property
    def is_embedded(self) -> bool:
        """True if it runs an engine of the embedded toolchain, which uses TensorRT-LLM's tensor names."""
        config = self.config
        return (
            config is not None
            and not self.is_engine
            and "gpt_model_path" in config.parameters
            and any(each.name == "input_ids" for each in config.input)
        )

    @property
    def is_llmapi(self) -> bool:
        """True if it runs TensorRT-LLM's LLM API, according to its sampling inputs or its model.yaml."""
        if any((version / "model.yaml").is_file() for version in self.versions):
            return True
        return self.config is not None and any(each.name.startswith("sampling_param_") for each in self.config.input)

    @cached_property
    def code(self) -> str:
        return "\n".join(
            path.read_text(encoding="utf-8", errors="replace") for path in sorted(self.folder.rglob("*.py"))
        )

    def unset(self) -> Iterator[tuple[str, str, int]]:
        """Parameters whose value is a placeholder, as in templates: key, placeholder, its line."""
        for match in _UNSET.finditer(self._code):
            yield match["key"], match["name"], self._code.count("\n", 0, match.start("name")) + 1

    def line(self, pattern: str) -> int | None:
        """Line of the first match of a regular expression outside comments."""
        match = re.search(pattern, self._code)
        return None if match is None else self._code.count("\n", 0, match.start()) + 1

    def at(self, field: str, message: str, *, value: object = None) -> Violation:
        """A violation at the first line that sets `field`, or sets it to `value` (a word or a string) if given."""
        pattern = rf"\b{field}\b" if value is None else rf"""\b{field}\s*:\s*["']?{re.escape(str(value))}\b"""
        return Violation(self.path, message, self.line(pattern))

    def at_parameter(self, key: str, message: str) -> Violation:
        return Violation(self.path, message, self.line(rf"""\bkey\s*:\s*["']{re.escape(key)}["']"""))

    def matches(self, pattern: str) -> Iterator[tuple[str, int]]:
        """First group and line of every match of a regular expression outside comments."""
        for match in re.finditer(pattern, self._code):
            yield match[1], self._code.count("\n", 0, match.start()) + 1

    @cached_property
    def _code(self) -> str:
        return model_config.without_comments(self.text or "")


@dataclass(frozen=True)
class ModelRepository:
    """Everything that rules may check."""

    folder: Path
    models: Mapping[str, Model]
    engine: Engine | None
    """The served engine, if it could be read."""
    release: str | None
    unlike_release: Callable[[Mapping[str, Any]], Sequence[str]] | None = None
    """What settings of the LLM API have that the release does not, as `PLACE: words`. None if it is unknown."""

    def with_config(self) -> list[Model]:
        """The models that have a config.pbtxt, whether or not it can be parsed."""
        return [model for model in self.models.values() if model.text is not None]

    def parsed(self) -> Iterator[tuple[Model, ModelConfig]]:
        """The models with a valid configuration, and the configuration."""
        yield from ((model, model.config) for model in self.models.values() if model.config is not None)

    def engines(self) -> Iterator[tuple[Model, ModelConfig]]:
        yield from ((model, config) for model, config in self.parsed() if model.is_engine)

    def of_an_llm(self) -> Iterator[tuple[Model, ModelConfig]]:
        """The valid models of a repository that serves an LLM. Empty for other repositories."""
        if any(model.is_engine or model.is_embedded or model.is_llmapi for model in self.models.values()):
            yield from self.parsed()

    def embedded(self) -> Iterator[tuple[Model, ModelConfig]]:
        yield from ((model, config) for model, config in self.parsed() if model.is_embedded)


def read(
    folder: Path,
    *,
    engine: Engine | None = None,
    release: str | None = None,
    unlike_release: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
) -> ModelRepository:
    folders = (path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith("."))
    models = {path.name: _model(path) for path in folders}
    return ModelRepository(folder, models, engine or _engine_of(models), release, unlike_release)


def _model(folder: Path) -> Model:
    path = folder / model_config.FILE_NAME
    if not path.is_file():
        return Model(folder, None, None, None, ())
    text = path.read_text(encoding="utf-8", errors="replace")
    places = tuple(model_config.placeholders(text))
    try:
        return Model(folder, text, model_config.parse(text, source=str(path)), None, places)
    except model_config.ModelConfigError as fault:
        return Model(folder, text, None, fault, places)


def _engine_of(models: Mapping[str, Model]) -> Engine | None:
    for model in models.values():
        if (model.is_engine or model.is_embedded) and "gpt_model_path" in model.parameters:
            read = Engine.of_trtllm_build if model.is_engine else Engine.read
            try:
                return read(Path(model.parameters["gpt_model_path"]))
            except EngineError:
                return None
    return None
