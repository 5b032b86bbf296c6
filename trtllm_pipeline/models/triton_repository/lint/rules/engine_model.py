"""TRT4: the model that runs an engine, and the engine it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.models.triton_repository.engine_config import Engine, EngineError
from trtllm_pipeline.models.triton_repository.lint.model_repository import Model, ModelRepository, Violation
from trtllm_pipeline.models.triton_repository.lint.rule import rule

_LOGITS: Final = ("context_logits", "generation_logits")
_FREE_LOGITS: Final = (0, 17)
"""First release whose templates have logits_datatype."""
_GUIDED: Final = (0, 19)
"""First release whose C++ backend supports guided decoding."""
_GUIDED_PARAMETERS: Final = ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path")
"""Parameters that it reads without a default. Source: getGuidedDecodingConfigFromParams in model_instance_state.cc."""
_TENSORS: Final = ("input_ids", "request_output_len")
"""Inputs without which the C++ backend cannot create a request."""


def _served(repository: ModelRepository) -> Iterator[tuple[Model, Any, Engine]]:
    """Each engine model with its engine, if that is known."""
    if repository.engine is not None:
        yield from ((model, config, repository.engine) for model, config in repository.engines())


def _limited(repository: ModelRepository) -> Iterator[tuple[Model, Any, Engine]]:
    """The same, including the models of the embedded toolchain, whose engines also have a max_batch_size."""
    yield from _served(repository)
    if repository.engine is not None:
        yield from ((model, config, repository.engine) for model, config in repository.embedded())


def _whole_models(repository: ModelRepository) -> Iterator[tuple[Model, Any]]:
    """The models of which every instance loads a whole model: engine models and LLM API models."""
    yield from ((model, config) for model, config in repository.parsed() if model.is_engine or model.is_llmapi)


def _number(model: Model, name: str) -> int | None:
    """A parameter as an integer. None if it is not one."""
    try:
        return int(model.parameters[name])
    except (KeyError, ValueError):
        return None


@rule(
    "TRT401",
    "set gpt_model_path to the absolute path of the directory that trtllm-build wrote, as the server sees it",
    each=ModelRepository.engines,
)
def engine_folder(model: Model, _config: Any) -> Iterator[Violation]:
    """A path to an engine that does not exist or is relative."""
    for name in ("gpt_model_path", "encoder_model_path"):
        path = model.parameters.get(name)
        if path and not Path(path).is_absolute():
            yield model.at_parameter(name, f"{name} {path} is relative")
        elif path and not Path(path).is_dir():
            yield model.at_parameter(name, f"{name} {path} is not a directory")


@rule(
    "TRT402",
    "name the directory that contains rank0.engine and config.json, not a checkpoint or a parent directory",
    each=ModelRepository.engines,
)
def engine_config(model: Model, _config: Any) -> Iterator[Violation]:
    """An engine directory without the config.json of trtllm-build."""
    path = Path(model.parameters.get("gpt_model_path", ""))
    if path.is_absolute() and path.is_dir():
        try:
            Engine.of_trtllm_build(path)
        except EngineError as error:
            yield model.at_parameter("gpt_model_path", error.message)


@rule("TRT403", "build the engine again: the rank of a build worker that died is missing", each=_served)
def rank_files(model: Model, _config: Any, engine: Engine) -> Iterator[Violation]:
    """An engine whose rank files do not match its world size."""
    wanted = {path.name for path in engine.rank_files}
    present = {path.name for path in engine.folder.glob("rank*.engine")}
    if wanted != present:
        lacks, more = ", ".join(sorted(wanted - present)), ", ".join(sorted(present - wanted))
        message = "; ".join(filter(None, (lacks and f"lacks {lacks}", more and f"has extra {more}")))
        yield model.at_parameter("gpt_model_path", f"{engine.folder} has world size {engine.world_size} but {message}")


@rule("TRT404", "lower it, or build the engine with a larger max_batch_size", each=_limited)
def batch_size(model: Model, config: Any, engine: Engine) -> Iterator[Violation]:
    """A max_batch_size above the engine's."""
    if engine.max_batch_size is not None and config.max_batch_size > engine.max_batch_size:
        message = f"max_batch_size is {config.max_batch_size}, but the engine's is {engine.max_batch_size}"
        yield model.at("max_batch_size", message)


@rule("TRT405", "lower it, or build the engine with a larger max_beam_width", each=_served)
def beam_width(model: Model, _config: Any, engine: Engine) -> Iterator[Violation]:
    """A max_beam_width above the engine's."""
    width = _number(model, "max_beam_width")
    if width is not None and engine.max_beam_width is not None and width > engine.max_beam_width:
        message = f"max_beam_width is {width}, but the engine's is {engine.max_beam_width}"
        yield model.at_parameter("max_beam_width", message)


@rule(
    "TRT406",
    "list one GPU for each rank, as 0,1,2,3 (sets for several instances: 0,1;2,3), or remove the parameter",
    each=_served,
)
def device_ids(model: Model, _config: Any, engine: Engine) -> Iterator[Violation]:
    """Device or participant ids whose number differs from the engine's ranks."""
    for name in ("gpu_device_ids", "participant_ids"):
        for ids in filter(None, model.parameters.get(name, "").split(";")):
            given = [each.strip() for each in ids.split(",")]
            if not all(each.isdigit() for each in given) or len(set(given)) != engine.world_size:
                yield model.at_parameter(name, f"{name} {ids} does not list {engine.world_size} different ids")


@rule("TRT407", "build the engine with the release that serves it: engines are bound to it")
def engine_release(repository: ModelRepository) -> Iterator[Violation]:
    """An engine from another TensorRT-LLM release than the one that serves it."""
    for model, _, engine in _served(repository):
        served, built = (str(release or "").partition("+")[0] for release in (repository.release, engine.version))
        if served and built and built != served:
            message = f"{engine.folder} was built by {engine.version}, but {repository.release} will serve it"
            yield model.at_parameter("gpt_model_path", message)


@rule("TRT408", "raise max_tokens_in_paged_kv_cache, or build the engine with a smaller max_seq_len", each=_served)
def kv_tokens(model: Model, _config: Any, engine: Engine) -> Iterator[Violation]:
    """A KV cache too small for one request of max_seq_len."""
    tokens = _number(model, "max_tokens_in_paged_kv_cache")
    if tokens is not None and engine.max_seq_len is not None and 0 < tokens < engine.max_seq_len:
        message = f"max_tokens_in_paged_kv_cache is {tokens}, but the engine's max_seq_len is {engine.max_seq_len}"
        yield model.at_parameter("max_tokens_in_paged_kv_cache", message)


@rule("TRT409", "build the engine with a paged KV cache, or fill batching_strategy with V1", each=_served)
def inflight_without_paged_kv(model: Model, _config: Any, engine: Engine) -> Iterator[Violation]:
    """In-flight batching of an engine without a paged KV cache."""
    strategy = model.parameters.get("gpt_model_type", "")
    if strategy.startswith("inflight") and engine.paged_kv_cache is False:
        yield model.at_parameter("gpt_model_type", f"{strategy}, but the engine's KV cache is not paged")


@rule("TRT410", "build with use_paged_context_fmha enabled, or turn both off", severity="warning", each=_served)
def paged_context(model: Model, _config: Any, engine: Engine) -> Iterator[Violation]:
    """KV cache reuse or chunked context with an engine built without use_paged_context_fmha."""
    for name in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if model.parameters.get(name, "").lower() in {"true", "1"} and engine.paged_context_fmha is False:
            message = f"{name} is set, but the engine was built without use_paged_context_fmha"
            yield model.at_parameter(name, message)


@rule(
    "TRT411", "set logits_datatype to the engine's logits_dtype: TYPE_FP32 unless it was built otherwise", each=_served
)
def logits_type(model: Model, config: Any, engine: Engine) -> Iterator[Violation]:
    """Logits with another data type than the engine's."""
    wanted = engine.logits_type
    # Earlier templates have TYPE_FP32 for every engine.
    if wanted is None or _release(engine) < _FREE_LOGITS:
        return
    for tensor in config.output:
        data_type = model_config.data_type_name(tensor.data_type)
        if tensor.name in _LOGITS and data_type != wanted:
            message = f"{tensor.name} is {data_type}, but the engine's logits are {engine.logits_dtype}"
            yield model.at("name", message, value=tensor.name)


@rule("TRT412", "give preprocessing and tensorrt_llm the same gpt_model_path", severity="warning")
def path_differs(repository: ModelRepository) -> Iterator[Violation]:
    """Models of one repository that refer to different engines."""
    paths = {model.parameters.get("gpt_model_path") for model, _ in repository.engines()} - {None, ""}
    for model, _ in repository.parsed():
        path = model.parameters.get("gpt_model_path")
        if not model.is_engine and path and paths and path not in paths:
            message = (
                f"gpt_model_path is {path}, but that of the engine model is {' or '.join(sorted(map(str, paths)))}"
            )
            yield model.at_parameter("gpt_model_path", message)


@rule(
    "TRT413",
    "set the data_type of lora_weights to the engine's, in the ensemble and tensorrt_llm_bls too",
    severity="warning",
    each=_served,
)
def adapters_type(model: Model, config: Any, engine: Engine) -> Iterator[Violation]:
    """LoRA adapters in another data type than the engine that takes them."""
    wanted = model_config.FLOAT_TYPES.get(engine.dtype or "")
    for tensor in config.input:
        data_type = model_config.data_type_name(tensor.data_type)
        if tensor.name == "lora_weights" and engine.max_lora_rank and wanted not in {None, data_type}:
            yield model.at(
                "name", f"lora_weights is {data_type}, but the engine is {engine.dtype}", value="lora_weights"
            )


@rule(
    "TRT414",
    "use one instance_group with count 1 and KIND_CPU: the model finds its GPUs itself. For more instances, give each its "
    "GPUs in the parameter gpu_device_ids: 0,1;2,3",
    severity="warning",
    each=_whole_models,
)
def engine_instances(model: Model, config: Any) -> Iterator[Violation]:
    """More instances of an engine model or LLM API model than sets of GPUs in gpu_device_ids. Each instance loads the whole model."""
    sets = len([each for each in model.parameters.get("gpu_device_ids", "").split(";") if each])
    given = f"gpu_device_ids lists {sets or 'no'} set{'s' * (sets != 1)} of GPUs"
    if not config.instance_group:
        yield Violation(model.path, "has no instance_group: Triton starts an instance for each GPU")
    for group in config.instance_group:
        kind, count = group.Kind.Name(group.kind), max(group.count, 1)
        if kind == "KIND_GPU" and config.backend == "python":
            continue  # reported by TRT213
        if kind in {"KIND_GPU", "KIND_AUTO"} and not group.gpus:
            yield model.at("instance_group", f"{kind} starts {count} instance{'s' * (count > 1)} for each GPU; {given}")
        elif (instances := count * max(len(group.gpus), 1)) > max(sets, 1):
            yield model.at("instance_group", f"{kind} starts {instances} instances; {given}")


@rule(
    "TRT415",
    "add them; a parameter that is not used has an empty string_value: the backend reads these without a default",
)
def backend_needs(repository: ModelRepository) -> Iterator[Violation]:
    """An engine model without an input or a parameter that the C++ backend of the release needs."""
    for model, config in repository.engines():
        if config.backend != "tensorrtllm":
            continue
        release = repository.release or (repository.engine.version if repository.engine else None)
        guided = _GUIDED_PARAMETERS if (_numbers(release) or (0,)) >= _GUIDED else ()
        inputs = {tensor.name for tensor in config.input}
        for kind, needed, present in (("parameters", guided, config.parameters), ("inputs", _TENSORS, inputs)):
            if lacking := [name for name in needed if name not in present]:
                yield Violation(model.path, f"lacks the {kind} {', '.join(lacking)}")


def _release(engine: Engine) -> tuple[int, ...]:
    """Major and minor number of an engine's release. An unknown one counts as new."""
    return _numbers(engine.version) or _FREE_LOGITS


def _numbers(release: str | None) -> tuple[int, ...] | None:
    """Major and minor number of a release. None if it is unknown."""
    match = re.match(r"(\d+)\.(\d+)", release or "")
    return None if match is None else (int(match[1]), int(match[2]))
