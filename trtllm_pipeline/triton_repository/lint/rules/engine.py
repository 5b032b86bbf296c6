"""TRT4: the model that runs an engine, and the engine it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.triton_repository import model_config
from trtllm_pipeline.triton_repository.engine import Engine, EngineError
from trtllm_pipeline.triton_repository.lint.repository import Model, ModelRepository
from trtllm_pipeline.triton_repository.lint.rule import Violation, rule

_LOGITS: Final = ("context_logits", "generation_logits")
_TYPES: Final = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
_FREE_LOGITS: Final = (0, 17)
"""First release whose templates have logits_datatype."""
_TRUE: Final = ("true", "1")


def _served(repository: ModelRepository) -> Iterator[tuple[Model, Any, Engine]]:
    """Each engine model with its engine, where there is one to compare with."""
    if repository.engine is not None:
        yield from ((model, config, repository.engine) for model, config in repository.engines())


def number(model: Model, name: str) -> int | None:
    """A parameter as a whole number; None where it is not one."""
    try:
        return int(model.parameters[name])
    except (KeyError, ValueError):
        return None


@rule(
    "TRT401",
    "engine-folder",
    "error",
    "a path to an engine that does not exist or is relative",
    "set gpt_model_path to the absolute path of the folder that trtllm-build wrote, as the server sees it",
)
def engine_folder(repository: ModelRepository) -> Iterator[Violation]:
    """Relative paths start wherever the server was started."""
    for model, _ in repository.engines():
        for name in ("gpt_model_path", "encoder_model_path"):
            path = model.parameters.get(name)
            if not path:
                continue
            line = model.line_of_parameter(name)
            if not Path(path).is_absolute():
                yield Violation(model.path, f"{name} {path} is relative", line)
            elif not Path(path).is_dir():
                yield Violation(model.path, f"{name} {path} is not a folder", line)


@rule(
    "TRT402",
    "engine-config",
    "error",
    "an engine folder without the config.json of trtllm-build",
    "name the folder that contains rank0.engine and config.json, not a checkpoint or a parent folder",
)
def engine_config(repository: ModelRepository) -> Iterator[Violation]:
    """A checkpoint, a folder too high, or an engine of the builder before 0.8."""
    for model, _ in repository.engines():
        path = Path(model.parameters.get("gpt_model_path", ""))
        if path.is_absolute() and path.is_dir():
            try:
                Engine.of_trtllm_build(path)
            except EngineError as error:
                yield Violation(model.path, error.message, model.line_of_parameter("gpt_model_path"))


@rule(
    "TRT403",
    "rank-files",
    "error",
    "an engine whose rank files do not match its world size",
    "build the engine again: the rank of a build worker that died is missing",
)
def rank_files(repository: ModelRepository) -> Iterator[Violation]:
    """One rankN.engine for each of tp_size * pp_size ranks."""
    for model, _, engine in _served(repository):
        wanted = {path.name for path in engine.rank_files}
        there = {path.name for path in engine.folder.glob("rank*.engine")}
        if wanted != there:
            lacks, more = ", ".join(sorted(wanted - there)), ", ".join(sorted(there - wanted))
            said = "; ".join(filter(None, (lacks and f"lacks {lacks}", more and f"has extra {more}")))
            line = model.line_of_parameter("gpt_model_path")
            yield Violation(model.path, f"{engine.folder} has world size {engine.world_size} but {said}", line)


@rule(
    "TRT404",
    "batch-size",
    "error",
    "a max_batch_size above the engine's",
    "lower it, or build the engine with a larger max_batch_size",
)
def batch_size(repository: ModelRepository) -> Iterator[Violation]:
    """Triton would let batches in that the engine cannot take."""
    for model, config, engine in _served(repository):
        if engine.max_batch_size is not None and config.max_batch_size > engine.max_batch_size:
            said = f"max_batch_size is {config.max_batch_size}, but the engine's is {engine.max_batch_size}"
            yield Violation(model.path, said, model.line_of("max_batch_size"))


@rule(
    "TRT405",
    "beam-width",
    "error",
    "a max_beam_width above the engine's",
    "lower it, or build the engine with a larger max_beam_width",
)
def beam_width(repository: ModelRepository) -> Iterator[Violation]:
    """The runtime refuses it when the model is loaded."""
    for model, _, engine in _served(repository):
        width = number(model, "max_beam_width")
        if width is not None and engine.max_beam_width is not None and width > engine.max_beam_width:
            said = f"max_beam_width is {width}, but the engine's is {engine.max_beam_width}"
            yield Violation(model.path, said, model.line_of_parameter("max_beam_width"))


@rule(
    "TRT406",
    "device-ids",
    "error",
    "device or participant ids whose number differs from the engine's ranks",
    "list one GPU for each rank, as 0,1,2,3 (sets for several instances: 0,1;2,3), or remove the parameter",
)
def device_ids(repository: ModelRepository) -> Iterator[Violation]:
    """`gpu_device_ids` and `participant_ids` are lists, one for each instance."""
    for model, _, engine in _served(repository):
        for name in ("gpu_device_ids", "participant_ids"):
            value = model.parameters.get(name, "")
            for ids in filter(None, value.split(";")):
                given = [each.strip() for each in ids.split(",")]
                if not all(each.isdigit() for each in given) or len(set(given)) != engine.world_size:
                    said = f"{name} {ids} does not list {engine.world_size} different ids"
                    yield Violation(model.path, said, model.line_of_parameter(name))


@rule(
    "TRT407",
    "engine-release",
    "error",
    "an engine from another TensorRT-LLM release than the one that serves it",
    "build the engine with the release that serves it: engines are bound to it",
)
def engine_release(repository: ModelRepository) -> Iterator[Violation]:
    """Asked only where the release is given."""
    for model, _, engine in _served(repository):
        served, built = (str(release or "").partition("+")[0] for release in (repository.release, engine.version))
        if served and built and built != served:
            said = f"{engine.folder} was built by {engine.version}, but {repository.release} will serve it"
            yield Violation(model.path, said, model.line_of_parameter("gpt_model_path"))


@rule(
    "TRT408",
    "kv-tokens",
    "error",
    "a KV cache too small for one request of max_seq_len",
    "raise max_tokens_in_paged_kv_cache, or build the engine with a smaller max_seq_len",
)
def kv_tokens(repository: ModelRepository) -> Iterator[Violation]:
    """The model does not load: the pool must hold at least one sequence."""
    for model, _, engine in _served(repository):
        tokens = number(model, "max_tokens_in_paged_kv_cache")
        if tokens is not None and engine.max_seq_len is not None and 0 < tokens < engine.max_seq_len:
            said = f"max_tokens_in_paged_kv_cache is {tokens}, but the engine's max_seq_len is {engine.max_seq_len}"
            yield Violation(model.path, said, model.line_of_parameter("max_tokens_in_paged_kv_cache"))


@rule(
    "TRT409",
    "inflight-without-paged-kv",
    "error",
    "in-flight batching of an engine without a paged KV cache",
    "build the engine with a paged KV cache, or fill batching_strategy with V1",
)
def inflight_without_paged_kv(repository: ModelRepository) -> Iterator[Violation]:
    """In-flight batching needs the paged cache."""
    for model, _, engine in _served(repository):
        strategy = model.parameters.get("gpt_model_type", "")
        if strategy.startswith("inflight") and engine.paged_kv_cache is False:
            said = f"{strategy}, but the engine's KV cache is not paged"
            yield Violation(model.path, said, model.line_of_parameter("gpt_model_type"))


@rule(
    "TRT410",
    "paged-context",
    "warning",
    "KV cache reuse or chunked context with an engine built without use_paged_context_fmha",
    "build with use_paged_context_fmha enabled, or turn both off",
)
def paged_context(repository: ModelRepository) -> Iterator[Violation]:
    """Both work on paged context attention."""
    for model, _, engine in _served(repository):
        for name in ("enable_kv_cache_reuse", "enable_chunked_context"):
            if model.parameters.get(name, "").lower() in _TRUE and engine.paged_context_fmha is False:
                said = f"{name} is set, but the engine was built without use_paged_context_fmha"
                yield Violation(model.path, said, model.line_of_parameter(name))


@rule(
    "TRT411",
    "logits-type",
    "error",
    "logits with another data type than the engine's",
    "set logits_datatype to the engine's logits_dtype: TYPE_FP32 unless it was built otherwise",
)
def logits_type(repository: ModelRepository) -> Iterator[Violation]:
    """Templates before 0.17 have TYPE_FP32 whatever the engine's is."""
    for model, config, engine in _served(repository):
        if _release(engine) < _FREE_LOGITS:
            continue
        wanted = _TYPES.get(engine.logits_dtype or "")
        for tensor in config.output:
            said = model_config.data_type_name(tensor.data_type)
            if tensor.name in _LOGITS and wanted and said != wanted:
                line = model.line_of("name", tensor.name)
                yield Violation(
                    model.path, f"{tensor.name} is {said}, but the engine's logits are {engine.logits_dtype}", line
                )


@rule(
    "TRT412",
    "path-differs",
    "warning",
    "models of one repository that refer to different engines",
    "give preprocessing and tensorrt_llm the same gpt_model_path",
)
def path_differs(repository: ModelRepository) -> Iterator[Violation]:
    """Preprocessing looks into the engine's config for multimodal models."""
    paths = {model.parameters.get("gpt_model_path") for model, _ in repository.engines()} - {None, ""}
    for model, _ in repository.parsed():
        path = model.parameters.get("gpt_model_path")
        if not model.is_engine and path and paths and path not in paths:
            said = f"gpt_model_path is {path}, but that of the engine model is {_either(sorted(map(str, paths)))}"
            yield Violation(model.path, said, model.line_of_parameter("gpt_model_path"))


def _release(engine: Engine) -> tuple[int, ...]:
    """Major and minor number of an engine's release; an unknown one counts as new."""
    match = re.match(r"(\d+)\.(\d+)", engine.version or "")
    return _FREE_LOGITS if match is None else (int(match[1]), int(match[2]))


def _either(words: Sequence[str]) -> str:
    return " or ".join(words)
