"""Programs of the repository and launch stages: what a server is started from, for each backend and each frontend.

For Triton that is a model repository. For `trtllm-serve` it is `serve.json`, the command line without its address, and
beside it the settings of the LLM API that have no option of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.machine import probe
from trtllm_pipeline.stages import launch
from trtllm_pipeline.stages.base import StageContext
from trtllm_pipeline.stages.params import LaunchFrontend
from trtllm_pipeline.stages.repository_settings import LlmApi
from trtllm_pipeline.toolchains.tensorrt_llm import backends, checkpoint, commands, llmapi, repository
from trtllm_pipeline.toolchains.tensorrt_llm.backends import installed
from trtllm_pipeline.toolchains.tensorrt_llm.params import EngineRepository, WeightsRepository

SERVE_FILE: Final = "serve.json"
SETTINGS_FILE: Final = "llm_api.yaml"


def run_engine(context: StageContext[EngineRepository]) -> None:
    """Write what serves the folder `engine`. Raises StageError for what cannot be filled or served."""
    params, release = context.params, installed(probe.machine()).release
    if _triton(params.frontend):
        repository.run(context)
        return
    # A file's cache settings replace those of options, so the share of memory stands where the rest does.
    config = _write_settings(context.out, cache_settings(params)) if commands.takes_config(release) else None
    command = commands.serve_engine(
        release,
        engine=str(context.inputs["engine"]),
        tokenizer=str(context.inputs["model"]),
        kv_fraction=params.kv_cache_free_gpu_mem_fraction if config is None else None,
        config=config,
        extra=params.options or {},
        program=_program(),
    )
    write_json(context.out / SERVE_FILE, {"schema": 1, "command": command})


def run_pytorch(context: StageContext[WeightsRepository]) -> None:
    """Write what serves the Hugging Face folder `model`. Raises StageError for what cannot be filled or served."""
    checkpoint.check_stated(context.inputs["model"])
    if context.params.unquantized:
        checkpoint.check_unquantized(context.inputs["model"])
    params, release = context.params, installed(probe.machine()).release
    if _triton(params.frontend):
        repository.run_llmapi(context)
        return
    command = commands.serve_pytorch(
        release,
        model=str(context.inputs["model"]),
        tp=params.tensor_parallel_size,
        pp=params.pipeline_parallel_size,
        max_batch_size=params.max_batch_size,
        max_seq_len=params.max_seq_len,
        num_tokens=params.max_num_tokens,
        config=_write_settings(context.out, serve_settings(params)),
        extra=params.options or {},
        program=_program(),
    )
    write_json(context.out / SERVE_FILE, {"schema": 1, "command": command})


def serve_settings(asked: WeightsRepository) -> dict[str, Any]:
    """What of the settings trtllm-serve reads from a file: none of it is an option, since releases differ in which wins."""
    return llmapi.arguments(asked, asked.llm_args)


def cache_settings(asked: EngineRepository) -> dict[str, Any]:
    """What of the settings trtllm-serve reads from a file for an engine, which says everything else itself."""
    own = {name: getattr(asked, name) for name in backends.SERVE_SETTINGS}
    return llmapi.arguments(LlmApi(**own), {})


def _write_settings(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Name of the settings file, None where there is nothing to write into it."""
    settings = {name: value for name, value in settings.items() if value != {}}
    if not settings:
        return None
    (folder / SETTINGS_FILE).write_text(llmapi.to_yaml(settings), encoding="utf-8")
    return SETTINGS_FILE


def launch_engine(context: StageContext[LaunchFrontend]) -> None:
    """Serve an engine with as many ranks as it has, or with trtllm-serve. Raises ServerError."""
    if _triton(context.params.frontend):
        launch.run_ranks(context, probe.machine())
    else:
        launch.run_openai(context, serve_command(context.inputs["repository"]))


def launch_pytorch(context: StageContext[LaunchFrontend]) -> None:
    """Serve Hugging Face weights, in Triton or with trtllm-serve. Raises StageError, ServerError."""
    checkpoint.check_stated(context.inputs["model"])
    if _triton(context.params.frontend):
        launch.run_llmapi(context)
    else:
        launch.run_openai(context, serve_command(context.inputs["repository"]))


def serve_command(folder: Path) -> list[str]:
    """The command line in serve.json, its settings file found wherever the folder lies now.

    Raises StageError for a folder that was not made for trtllm-serve.
    """
    try:
        command = [str(word) for word in json.loads((folder / SERVE_FILE).read_text(encoding="utf-8"))["command"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StageError(
            f"{folder} was not made for trtllm-serve: {SERVE_FILE}: {error}",
            failure=FailureClass.USER,
            hint="pipeline stage repository --frontend trtllm_serve makes one; --frontend triton serves a Triton repository",
        ) from error
    return [str(folder / SETTINGS_FILE) if word == SETTINGS_FILE else word for word in command]


def _triton(frontend: str) -> bool:
    return frontend == backends.TRITON


def _program() -> str:
    return installed(probe.machine()).serve or "trtllm-serve"
