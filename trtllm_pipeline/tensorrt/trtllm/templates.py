"""Fills the Triton templates of an installed TensorRT-LLM: every placeholder in a file, for any release.

Values come from three places: settings of the user (`tensorrt/stage/repository_settings.py`), facts about the engine,
and paths. Parameters without a value are removed, as the C++ backend has a default for each. The few parameters that a
model reads without a check become empty texts. Sources: tensorrtllm_backend
`inflight_batcher_llm/src/model_instance_state.cc` (0.16 to 0.19) and the models' Python code.

The result is parsed, so that written files are always a valid `ModelConfig`.
"""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, Json, StageError
from trtllm_pipeline.models import Engine, model_config, model_names
from trtllm_pipeline.tensorrt.stage.params import Scalar
from trtllm_pipeline.tensorrt.stage.repository_settings import DEFAULTS, SETTINGS, Setting
from trtllm_pipeline.tensorrt.toolchains import vision
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository
from trtllm_pipeline.tensorrt.trtllm.releases import at_least, parse

TEMPLATE_SET: Final = "inflight_batcher_llm"
WRITTEN_OUT: Final = "add_special_tokens"
"""A parameter for which templates before 0.10 have a value, False, instead of a placeholder."""
MODELS: Final = (
    "preprocessing",
    model_names.ENGINE_MODEL,
    "postprocessing",
    model_names.ENSEMBLE,
    model_names.BLS_MODEL,
)
READ_WITHOUT_ASKING: Final = frozenset(
    (
        "tokenizer_dir",
        "xgrammar_tokenizer_info_path",
        "guided_decoding_backend",
        "visual_model_path",
        "multimodal_model_path",
    )
)
"""Parameters that must be present even without a value: models read them unconditionally, and treat "" as unset."""
_BARE: Final = re.compile(r"[A-Za-z0-9_.+-]+")


PLACEHOLDERS: Final[Mapping[str, str]] = {name: about.placeholder or name for name, about in SETTINGS.items()}
"""Setting -> the placeholder that it fills."""
_FILLED_BY: Final = {
    "gpt_model_path": "engine_dir",
    "gpt_model_type": "batching_strategy",
    "encoder_model_path": "encoder_engine_dir",
}
"""Parameter -> its placeholder, if the names differ."""
_SETTING_OF: Final = {placeholder: name for name, placeholder in PLACEHOLDERS.items()}
FIXED: Final = ("triton_max_batch_size", "engine_dir", "tokenizer_dir")
"""Placeholders without a setting: they follow from the engine and the model."""


def known_in(setting: Setting, release: str) -> bool:
    """True if the templates of `release` have a setting, according to the records."""
    begun = setting.since is None or at_least(release, setting.since)
    return begun and (setting.until is None or parse(release) <= parse(setting.until))


def text(value: Json | tuple[int, ...]) -> str:
    """A value as written into a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def values_of(
    params: EngineRepository, *, engine: Engine, tokenizer: Path, visual: Path | None = None
) -> dict[str, str]:
    """The values of the known placeholders that have one. `visual` is the directory of the visual engine of a model
    that accepts images. Raises StageError.
    """
    values: dict[str, str] = {}
    if visual is not None:  # releases have two names for its directory
        values = dict.fromkeys(("visual_model_path", "multimodal_model_path"), str(visual.absolute()))
        values |= {"hf_model_path": str(tokenizer.absolute()), "max_num_images": "1"}
    for name, setting in SETTINGS.items():
        value = getattr(params, name)
        value = setting.usual if value is None else value
        if value is not None:
            values[PLACEHOLDERS[name]] = text(value)
    values.setdefault("logits_datatype", engine.logits_type or "TYPE_FP32")
    if engine.max_batch_size is not None and params.max_batch_size > engine.max_batch_size:
        raise StageError(
            f"max_batch_size is {params.max_batch_size}; expected 1 to {engine.max_batch_size}, the engine's max_batch_size",
            failure=FailureClass.INFEASIBLE,
        )
    return {
        **values,
        "triton_max_batch_size": str(params.max_batch_size),
        "engine_dir": str(engine.folder.absolute()),
        "tokenizer_dir": str(tokenizer.absolute()),
    }


def fill(
    templates: Path,
    out: Path,
    values: Mapping[str, str],
    *,
    release: str,
    required: Iterable[str] = (),
    change: Callable[[str, model_config.ModelConfig], None] = lambda _name, _config: None,
    images: bool = False,
) -> None:
    """Write the models into the directory `out`, filled from `all_models/inflight_batcher_llm` at `templates`. With
    `images`, those for images, and what `all_models/multimodal` has is taken from there.

    `change` may change each model, by its name, after it was filled.

    `required` are the placeholders for which the user set a value. Raises StageError if no file has one of them, since
    the setting would have no effect; for missing templates, a bare placeholder without a value, or an invalid result.
    """
    folders = {name: _folder(templates, name, images=images) for name in (vision.MODELS if images else MODELS)}
    lacking = [name for name, folder in folders.items() if not (folder / model_config.FILE_NAME).is_file()]
    if lacking:
        raise StageError(
            f"{templates} has no templates for {', '.join(lacking)}",
            failure=FailureClass.USER,
            hint=f"name the all_models directory of TensorRT-LLM {release}: pipeline doctor shows the search path",
        )
    texts = {name: (folders[name] / model_config.FILE_NAME).read_text(encoding="utf-8") for name in folders}
    check_required(required, _places(texts.values()), release)
    for name, text in texts.items():
        path = folders[name] / model_config.FILE_NAME
        config = fill_text(text, values, path=path, release=release)
        change(name, config)
        _write(folders[name], out / name, config)


def fill_draft(
    templates: Path, out: Path, values: Mapping[str, str], *, params: EngineRepository, release: str, engine: Path
) -> None:
    """Write the model DRAFT_MODEL into the directory `out`: the engine's, with the same values and changes, for the
    draft model's `engine`. Raises StageError as `fill`.
    """
    path = templates / TEMPLATE_SET / model_names.ENGINE_MODEL / model_config.FILE_NAME
    own = {**values, "engine_dir": str(engine.absolute())}
    config = fill_text(path.read_text(encoding="utf-8"), own, path=path, release=release)
    change(params, model_names.ENGINE_MODEL, config)
    config.name = model_names.DRAFT_MODEL
    _write(path.parent, out / model_names.DRAFT_MODEL, config)


def _write(source: Path, target: Path, config: model_config.ModelConfig) -> None:
    """Copy a model's directory with another configuration."""
    filled = model_config.to_text(config)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    (target / model_config.FILE_NAME).write_text(filled, encoding="utf-8")
    # Some ways of copying drop empty directories, and Triton requires one for each version.
    (target / "1").mkdir(exist_ok=True)
    if not any((target / "1").iterdir()):
        (target / "1" / ".keep").touch()


def _folder(templates: Path, name: str, *, images: bool) -> Path:
    """Directory of a model's template."""
    of_images = templates / vision.TEMPLATE_SET / name
    return of_images if images and of_images.is_dir() else templates / TEMPLATE_SET / name


def fill_text(text: str, values: Mapping[str, str], *, path: Path, release: str) -> model_config.ModelConfig:
    """The ModelConfig of one template text. `path` and `release` are for errors, which are StageErrors."""

    def value(place: model_config.Placeholder) -> str:
        entry = values.get(place.name)
        if place.quoted:
            return f"${{{place.name}}}" if entry is None else entry
        if entry is None:
            raise StageError(
                f"{path}:{place.line}: no value for ${{{place.name}}}, which TensorRT-LLM {release} needs there",
                failure=FailureClass.USER,
                hint=f"settings.repository.parameters: {{{place.name}: VALUE}}",
            )
        if not _BARE.fullmatch(entry):
            raise StageError(
                f"{path}:{place.line}: ${{{place.name}}} must be a number or a word, not {entry!r}",
                failure=FailureClass.USER,
            )
        return entry

    try:
        config = model_config.parse(model_config.substitute(text, value), source=str(path))
    except model_config.ModelConfigError as error:
        raise StageError(
            f"{error.message}, after filling",
            failure=FailureClass.USER,
            hint="a value has the wrong type, or the template is not TensorRT-LLM's",
        ) from error
    unset = {place.name for place in model_config.placeholders(text) if place.name not in values}
    for key in list(config.parameters):
        if not any(f"${{{name}}}" in config.parameters[key].string_value for name in unset):
            continue
        if key in READ_WITHOUT_ASKING or (config.backend == "python" and key not in _SETTING_OF):
            config.parameters[key].string_value = ""  # the model needs it
        else:
            del config.parameters[key]
    left = next(model_config.placeholders(model_config.to_text(config)), None)
    if left is not None:
        raise StageError(
            f"{path}: no value for ${{{left.name}}}, which TensorRT-LLM {release} has outside its parameters",
            failure=FailureClass.USER,
            hint=f"settings.repository.parameters: {{{left.name}: VALUE}}",
        )
    return config


def given(params: EngineRepository) -> set[str]:
    """Placeholders for which a user set a value. Defaults need no placeholder."""
    names = (name for name in SETTINGS if getattr(params, name) not in (None, DEFAULTS[name]))
    return {*(PLACEHOLDERS[name] for name in names), *params.parameters}


@lru_cache(maxsize=8)
def installed_places(templates: Path) -> frozenset[str] | None:
    """Placeholders of the models in `all_models` at `templates`. None if one of them is missing."""
    files = [templates / TEMPLATE_SET / name / model_config.FILE_NAME for name in MODELS]
    try:
        return _places(file.read_text(encoding="utf-8") for file in files)
    except OSError:
        return None


@lru_cache(maxsize=64)
def recorded_places(release: str) -> frozenset[str]:
    """Placeholders of a release that is not installed: those of the settings that it is known to have."""
    return frozenset(PLACEHOLDERS[name] for name, setting in SETTINGS.items() if known_in(setting, release))


def _places(texts: Iterable[str]) -> frozenset[str]:
    names = set()
    for text in texts:
        names |= {place.name for place in model_config.placeholders(text)}
        if f'"{WRITTEN_OUT}"' in text:
            names.add(WRITTEN_OUT)
    return frozenset(names)


def check_required(required: Iterable[str], places: Collection[str], release: str) -> None:
    """Raise StageError if one of the placeholders `required` is not in `places`: its value would have no effect."""
    unknown = sorted(set(required) - set(places))
    if not unknown:
        return
    name = _SETTING_OF.get(unknown[0])
    setting = SETTINGS[name] if name else None
    known = (
        [f"from {setting.since} on"] * bool(setting.since) + [f"up to {setting.until}"] * bool(setting.until)
        if setting
        else []
    )
    span = f", which are known to have it {' and '.join(known)}" if known else ""
    close = [] if setting else difflib.get_close_matches(unknown[0], sorted(places), n=1)
    raise StageError(
        f"settings.repository.{name or f'parameters.{unknown[0]}'}: no template of TensorRT-LLM "
        f"{release} has ${{{unknown[0]}}}{span}",
        failure=FailureClass.USER,
        hint=f"did you mean {close[0]!r}?" if close else "remove it",
    )


def check_config(params: EngineRepository, places: Collection[str], *, most: int) -> None:
    """Raise StageError for invalid changes to config.pbtxt: batches over `most`, and parameters that settings fill."""

    def refuse(setting: str, why: str) -> None:
        raise StageError(f"settings.repository.{setting}: {why}", failure=FailureClass.USER)

    if params.max_batch_size > most:
        refuse("triton_max_batch_size", f"{params.max_batch_size} is more than the engine's {most}")
    for size in params.preferred_batch_size or ():
        if size > params.max_batch_size:
            refuse("preferred_batch_size", f"{size} is more than Triton's max_batch_size, {params.max_batch_size}")
    for model, parameters in (params.triton_parameters or {}).items():
        if model not in MODELS:
            refuse("triton_parameters", f"unknown model {model}; the models are {', '.join(MODELS)}")
        for name in parameters:
            placeholder = _FILLED_BY.get(name, name)
            if placeholder in FIXED:
                refuse(f"triton_parameters.{model}.{name}", "it follows from the engine and model")
            if placeholder in places and placeholder in _SETTING_OF:
                refuse(f"triton_parameters.{model}.{name}", f"use settings.repository.{_SETTING_OF[placeholder]}")
    for model in params.instance_kinds or {}:
        if model not in MODELS or model == model_names.ENSEMBLE:
            refuse(
                "instance_kinds",
                f"{model} has no instances; {', '.join(name for name in MODELS if name != model_names.ENSEMBLE)} have",
            )


def change(params: EngineRepository, model: str, config: model_config.ModelConfig) -> None:
    """Apply the requested changes to a model's config.pbtxt other than its placeholders. See `check_config`."""
    if WRITTEN_OUT in config.parameters:
        add_special_tokens = params.add_special_tokens
        config.parameters[WRITTEN_OUT].string_value = text(
            DEFAULTS[WRITTEN_OUT] if add_special_tokens is None else add_special_tokens
        )
    for name, value in (params.triton_parameters or {}).get(model, {}).items():
        config.parameters[name].string_value = text(value)
    if model == model_names.ENGINE_MODEL and params.preferred_batch_size is not None:
        del config.dynamic_batching.preferred_batch_size[:]
        config.dynamic_batching.preferred_batch_size.extend(params.preferred_batch_size)
    kind = (params.instance_kinds or {}).get(model)
    if kind is not None:
        for group in config.instance_group or [config.instance_group.add(count=1)]:
            group.kind = group.Kind.Value(kind)


def texts(parameters: Mapping[str, Scalar]) -> dict[str, str]:
    """Values of placeholders as written. Raises StageError for those that settings fill."""
    for name in parameters:
        if name in _SETTING_OF or name in FIXED:
            own = _SETTING_OF.get(name)
            message = "it follows from the engine and model" if own is None else f"use settings.repository.{own}"
            raise StageError(f"settings.repository.parameters.{name}: {message}", failure=FailureClass.USER)
    return {name: text(value) for name, value in parameters.items()}
