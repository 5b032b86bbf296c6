"""TRT6: models whose settings are in a file of their version directory: model.yaml of the LLM API, model.json of vLLM."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import user_files
from trtllm_pipeline.models.triton_repository.lint.known_names import advice, known_names, nearest
from trtllm_pipeline.models.triton_repository.lint.model_repository import Model, ModelRepository, Violation
from trtllm_pipeline.models.triton_repository.lint.rule import rule

FILE_NAME: Final = "model.yaml"
VLLM_FILE_NAME: Final = "model.json"
_OF_TRITON: Final = "triton_config"
"""The section that the model takes out before the LLM API gets the file."""
_GPUS: Final = "gpu_device_ids"
"""The parameter of engines that the LLM API's model reads too."""
_SIZES: Final = (
    *("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size"),
    *("max_batch_size", "max_num_tokens", "max_seq_len"),
)

_VLLM_SIZES: Final = ("tensor_parallel_size", "pipeline_parallel_size", "max_num_seqs")
_VLLM_SHARE: Final = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """One model.yaml or model.json."""

    path: Path
    settings: Any
    """Its content, or the error if it cannot be read."""

    def at(self, place: str, message: str) -> Violation:
        """A violation at the line of the key `place`, whose sections are before it: kv_cache_config.dtype."""
        text = self.path.read_text(encoding="utf-8")
        begin: int | None = None
        for number, key in enumerate(place.split(".")):
            names = rf"""["']?{re.escape(key)}["']?\s*:"""
            match = None if number else re.search(rf"(?m)^{names}", text)
            match = match or re.compile(rf"(?m)(?:^|[{{,])[ \t]*{names}").search(text, begin or 0)
            begin = begin if match is None else match.start()
        return Violation(self.path, message, None if begin is None else text.count("\n", 0, begin) + 1)


def _files(repository: ModelRepository) -> Iterator[SettingsFile]:
    for model in repository.with_config():
        for path in (version / FILE_NAME for version in model.served if model.is_llmapi):
            yield _read(path, user_files.decode_yaml)


def _vllm_files(repository: ModelRepository) -> Iterator[SettingsFile]:
    """The existing model.json files. TRT105 reports missing ones."""
    for model, config in repository.parsed():
        if config.backend == "vllm":
            yield from _vllm_files_of(model)


def _vllm_files_of(model: Model) -> Iterator[SettingsFile]:
    paths = (version / VLLM_FILE_NAME for version in model.served)
    return (_read(path, json.loads) for path in paths if path.is_file())


def _read(path: Path, decode: Callable[[bytes], Any]) -> SettingsFile:
    try:
        return SettingsFile(path, decode(path.read_bytes()))
    except (OSError, ValueError) as error:
        return SettingsFile(path, error)


def _settings(repository: ModelRepository) -> Iterator[tuple[SettingsFile, dict[str, Any]]]:
    """The files whose content is a mapping, with the mapping."""
    yield from ((file, file.settings) for file in _files(repository) if isinstance(file.settings, dict))


def _vllm_settings(repository: ModelRepository) -> Iterator[tuple[SettingsFile, dict[str, Any]]]:
    yield from ((file, file.settings) for file in _vllm_files(repository) if isinstance(file.settings, dict))


@rule("TRT601", "write 1/model.yaml: model, backend, tensor_parallel_size, pipeline_parallel_size, triton_config")
def model_yaml(repository: ModelRepository) -> Iterator[Violation]:
    """An LLM API model without a valid model.yaml."""
    for file in _files(repository):
        settings = file.settings
        if isinstance(settings, FileNotFoundError):
            yield Violation(file.path.parent, "has no model.yaml")
        elif isinstance(settings, Exception):
            yield Violation(file.path, str(settings), getattr(settings, "line", None))
        elif not isinstance(settings, dict):
            yield Violation(file.path, "is not a mapping")


@rule("TRT602", "set model to the absolute path of a Hugging Face directory", each=_settings)
def yaml_model(file: SettingsFile, settings: dict[str, Any]) -> Iterator[Violation]:
    """A model.yaml whose model is missing or is a path that does not exist."""
    model = settings.get("model")
    if not isinstance(model, str) or not model:
        yield file.at("model", "names no model")
    elif Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
        yield file.at("model", f"model {model} is not a directory with a config.json")


@rule("TRT603", "triton_config: {max_batch_size: 0, decoupled: true}", each=_settings)
def triton_config(file: SettingsFile, settings: dict[str, Any]) -> Iterator[Violation]:
    """A model.yaml without triton_config.max_batch_size and triton_config.decoupled."""
    triton = settings.get(_OF_TRITON)
    values = triton if isinstance(triton, dict) else {}
    if type(values.get("max_batch_size")) is not int or type(values.get("decoupled")) is not bool:
        message = "triton_config needs max_batch_size, a whole number, and decoupled, true or false"
        yield file.at(_OF_TRITON, message)


@rule("TRT604", "write a whole number, or remove the key", each=_settings)
def yaml_sizes(file: SettingsFile, settings: dict[str, Any]) -> Iterator[Violation]:
    """A size in model.yaml that is not a positive whole number."""
    for name in _SIZES:
        if name in settings and (type(settings[name]) is not int or settings[name] < 1):
            yield file.at(name, f"{name} is {settings[name]!r}")


@rule("TRT605", "use a fraction such as 0.9, TensorRT-LLM's default", each=_settings)
def yaml_fraction(file: SettingsFile, settings: dict[str, Any]) -> Iterator[Violation]:
    """A kv_cache_config.free_gpu_memory_fraction that is not above 0 and at most 1."""
    cache = settings.get("kv_cache_config")
    value = cache.get("free_gpu_memory_fraction") if isinstance(cache, dict) else None
    if value is not None and (isinstance(value, bool | str) or not 0 < value <= 1):
        yield file.at("kv_cache_config.free_gpu_memory_fraction", f"free_gpu_memory_fraction is {value!r}")


@rule("TRT606", "use backend: pytorch; release 1.0 removed the TensorRT engine mode of the LLM API model")
def yaml_backend(repository: ModelRepository) -> Iterator[Violation]:
    """A backend in model.yaml that the release does not support."""
    major = int(repository.release.partition(".")[0]) if repository.release else 0
    for file, settings in _settings(repository):
        backend = settings.get("backend", "pytorch")
        if major >= 1 and backend in {"tensorrt", "trt", None}:
            yield file.at("backend", f"backend {backend!r} with release {repository.release}")


@rule("TRT607", "correct the key: the LLM API refuses unknown ones when the model is loaded", each=_settings)
def yaml_key(file: SettingsFile, settings: dict[str, Any]) -> Iterator[Violation]:
    """A key in model.yaml that the LLM API does not have: misspelled, in the wrong section, or another program's name."""
    yield from _unknown(file, settings, known_names().llmapi, known_names().instead["llmapi"])


@rule("TRT608", "write one JSON object: no comma after the last member, no comments, names and texts in double quotes")
def vllm_json(repository: ModelRepository) -> Iterator[Violation]:
    """A model.json of the vLLM backend that is not a JSON object or names no model."""
    for file in _vllm_files(repository):
        settings = file.settings
        if isinstance(settings, json.JSONDecodeError):
            yield Violation(file.path, f"is not JSON: {settings.msg}", settings.lineno)
        elif isinstance(settings, Exception):
            yield Violation(file.path, f"cannot be read: {settings}")
        elif not isinstance(settings, dict):
            yield Violation(file.path, "is not a JSON object")
        elif not isinstance(settings.get("model"), str):
            yield file.at("model", "names no model")


@rule("TRT609", "correct the key: the vLLM backend stops at unknown ones when the model is loaded", each=_vllm_settings)
def vllm_key(file: SettingsFile, settings: dict[str, Any]) -> Iterator[Violation]:
    """A key in model.json that vLLM does not have: misspelled, or another program's name."""
    yield from _unknown(file, settings, known_names().vllm, known_names().instead["vllm"])


@rule("TRT612", "correct the value, or remove the key: vLLM stops at it when the model is loaded", each=_vllm_settings)
def vllm_value(file: SettingsFile, settings: dict[str, Any]) -> Iterator[Violation]:
    """A size or memory fraction in model.json that vLLM cannot use."""
    for name in (*_VLLM_SIZES, _VLLM_SHARE):
        value = settings.get(name)
        number = _number(value)
        good = 0 <= number <= 1 if name == _VLLM_SHARE else number >= 1 and number.is_integer()
        if value is not None and not good:
            expected = "a number from 0 to 1" if name == _VLLM_SHARE else "a whole number of at least 1"
            yield file.at(name, f"{name} is {value!r}; expected {expected}")


def _number(value: object) -> float:
    """A number, also one written as text, which vLLM accepts. NaN for anything else."""
    try:
        return float(str(value))
    except ValueError:
        return math.nan


@rule("TRT613", "use KIND_MODEL with count 1: vLLM then finds its GPUs itself")
def vllm_gpus(repository: ModelRepository) -> Iterator[Violation]:
    """A vLLM model of several GPUs in instances of KIND_GPU, which are for one GPU."""
    for model, config in repository.parsed():
        if config.backend == "vllm" and any(group.kind == group.KIND_GPU for group in config.instance_group):
            for file in _vllm_files_of(model):
                size = file.settings.get(_VLLM_SIZES[0]) if isinstance(file.settings, dict) else None
                if _number(size) > 1:
                    yield model.at("kind", f"KIND_GPU, but {_VLLM_SIZES[0]} is {size}", value="KIND_GPU")


@rule(
    "TRT610", "write it into the model's settings file, or remove it: the backend uses the default", severity="warning"
)
def setting_in_config(repository: ModelRepository) -> Iterator[Violation]:
    """A setting of model.json, model.yaml or an engine among the parameters of config.pbtxt, where it is not read."""
    names = known_names()
    for model, config in repository.parsed():
        if not model.is_llmapi and config.backend != "vllm":
            continue
        file, known = (FILE_NAME, names.llmapi) if model.is_llmapi else (VLLM_FILE_NAME, names.vllm)
        engines = {*names.tensorrtllm} - {_GPUS} if model.is_llmapi else set()
        for key in sorted({*config.parameters} & {*known[""], *engines}):
            # People extend these models. The LLM API's own code mentions the keys of its file.
            if "parameters" in model.code and re.search(rf"\b{re.escape(key)}\b", model.code):
                continue
            if key in known[""]:
                words = f", but in {file}"
            elif key in names.instead["llmapi"]:
                words = f"; in {file} it is {names.instead['llmapi'][key]}"
            else:
                words = "; it is a parameter of engines"
            yield model.at_parameter(key, f"{key} is not read here{words}")


@rule(
    "TRT611",
    "use a name and a value that the release has: the LLM API refuses others when the model is loaded",
    severity="warning",
)
def yaml_release(repository: ModelRepository) -> Iterator[Violation]:
    """A key or value in model.yaml that the given release does not have, by the recorded schema nearest to it. `--release` names it."""
    if repository.unlike_release is None:
        return
    names = known_names()
    for file, settings in _settings(repository):
        misspelled = {key for key, _ in _near(settings, names.llmapi, names.instead["llmapi"])}
        own = {name: value for name, value in settings.items() if name != _OF_TRITON}
        for problem in repository.unlike_release(own):
            place = problem.partition(":")[0]
            if place not in misspelled and place not in _SIZES:
                yield file.at(place, problem)


def _unknown(
    file: SettingsFile, settings: dict[str, Any], sections: Mapping[str, Sequence[str]], instead: Mapping[str, str]
) -> Iterator[Violation]:
    for place, near in _near(settings, sections, instead):
        yield file.at(place, f"{place} is unknown{advice(near)}")


def _near(
    settings: dict[str, Any], sections: Mapping[str, Sequence[str]], instead: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Keys that are close to a known one, with that. The lists lack keys of other releases, which must not be reported."""
    elsewhere = {
        key: f"{name}.{key}" for name, keys in sections.items() if name for key in keys if key not in sections[""]
    }
    for name, known in sections.items():
        values = settings.get(name) if name else settings
        for key in values if isinstance(values, dict) else ():
            near = None if key in known else nearest(str(key), known, {} if name else {**elsewhere, **instead})
            if near is not None:
                yield f"{name}{'.' * bool(name)}{key}", near
