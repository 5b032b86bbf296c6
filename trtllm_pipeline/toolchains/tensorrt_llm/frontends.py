"""Programs of the repository and launch stages: what a server is started from, for each lane and each frontend.

For Triton that is a model repository. For `trtllm-serve` it is `serve.json`, the command line without its address, and
beside it the settings of the LLM API that have no option of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.machine import probe
from trtllm_pipeline.stages import launch
from trtllm_pipeline.stages.base import Work
from trtllm_pipeline.toolchains.tensorrt_llm import backends, checkpoint, commands, llmapi, repository
from trtllm_pipeline.toolchains.tensorrt_llm.backends import installed, mapping, number

SERVE_FILE: Final = "serve.json"
SETTINGS_FILE: Final = "llm_api.yaml"
_TRITON_ONLY: Final = ("decoupled",)


def run_engine(work: Work) -> None:
    """Write what serves the folder `engine`. Raises StageError for what cannot be filled or served."""
    params, release = work.params, installed(probe.machine()).release
    if _triton(params):
        repository.run(replace(work, params=_without(params, "frontend", "options")))
        return
    # A file's cache settings replace those of options, so the share of memory stands where the rest does.
    config = _write_settings(work.out, cache_settings(params)) if commands.takes_config(release) else None
    command = commands.serve_engine(
        release,
        engine=str(work.inputs["engine"]),
        tokenizer=str(work.inputs["model"]),
        kv_fraction=_fraction(params) if config is None else None,
        config=config,
        extra=mapping(params, "options"),
        program=_program(),
    )
    write_json(work.out / SERVE_FILE, {"schema": 1, "command": command})


def run_pytorch(work: Work) -> None:
    """Write what serves the Hugging Face folder `model`. Raises StageError for what cannot be filled or served."""
    checkpoint.check_stated(work.inputs["model"])
    if work.params.get("unquantized"):
        checkpoint.check_unquantized(work.inputs["model"])
    work = replace(work, params=_without(work.params, "unquantized"))
    params, release = work.params, installed(probe.machine()).release
    if _triton(params):
        repository.run_llmapi(replace(work, params=_without(params, "frontend", "options")))
        return
    command = commands.serve_pytorch(
        release,
        model=str(work.inputs["model"]),
        tp=number(params, "tensor_parallel_size"),
        pp=number(params, "pipeline_parallel_size"),
        max_batch_size=number(params, "max_batch_size"),
        max_seq_len=number(params, "max_seq_len"),
        num_tokens=number(params, "max_num_tokens"),
        config=_write_settings(work.out, serve_settings(params)),
        extra=mapping(params, "options"),
        program=_program(),
    )
    write_json(work.out / SERVE_FILE, {"schema": 1, "command": command})


def serve_settings(params: Mapping[str, Json]) -> dict[str, Any]:
    """What of the settings trtllm-serve reads from a file: none of it is an option, since releases differ in which wins."""
    return llmapi.arguments(_without(params, *llmapi.LIMITS, *_TRITON_ONLY))


def cache_settings(params: Mapping[str, Json]) -> dict[str, Any]:
    """What of the settings trtllm-serve reads from a file for an engine, which says everything else itself."""
    return llmapi.arguments({name: params.get(name) for name in backends.SERVE_SETTINGS})


def _write_settings(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Name of the settings file, None where there is nothing to write into it."""
    settings = {name: value for name, value in settings.items() if value != {}}
    if not settings:
        return None
    (folder / SETTINGS_FILE).write_text(llmapi.to_yaml(settings), encoding="utf-8")
    return SETTINGS_FILE


def launch_engine(work: Work) -> None:
    """Serve an engine with as many ranks as it has, or with trtllm-serve. Raises ServerError."""
    if _triton(work.params):
        launch.run_ranks(work, probe.machine())
    else:
        launch.run_openai(work, serve_command(work.inputs["repository"]))


def launch_pytorch(work: Work) -> None:
    """Serve Hugging Face weights, in Triton or with trtllm-serve. Raises StageError, ServerError."""
    checkpoint.check_stated(work.inputs["model"])
    if _triton(work.params):
        launch.run_llmapi(work)
    else:
        launch.run_openai(work, serve_command(work.inputs["repository"]))


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


def _triton(params: Mapping[str, Json]) -> bool:
    return params["frontend"] == backends.TRITON


def _program() -> str:
    return installed(probe.machine()).serve or "trtllm-serve"


def _fraction(params: Mapping[str, Json]) -> float | None:
    value = params.get("kv_cache_free_gpu_mem_fraction")
    return float(value) if isinstance(value, int | float) else None


def _without(params: Mapping[str, Json], *names: str) -> dict[str, Json]:
    return {name: value for name, value in params.items() if name not in names}
