"""The Triton repository of the PyTorch lane: TensorRT-LLM's LLM API inside one Python model.

The model's code and tensors are those of the installed release (`all_models/llmapi`, from 0.19 on). What it runs is said
in `1/model.yaml`, which is written here: arguments of the LLM API, and `triton_config`, which the code hands to Triton.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.user_files import decode_yaml
from trtllm_pipeline.stages.base import Option
from trtllm_pipeline.toolchains.tensorrt_llm import templates
from trtllm_pipeline.triton_repository import model_config

TEMPLATE_SET: Final = "llmapi"
MODEL: Final = "tensorrt_llm"
ARGUMENTS: Final = {"enable_chunked_context": "enable_chunked_prefill"}
"""Setting -> argument of the LLM API."""
KV_CACHE: Final = {
    # setting -> key of the LLM API's kv_cache_config
    "enable_kv_cache_reuse": "enable_block_reuse",
    "kv_cache_free_gpu_mem_fraction": "free_gpu_memory_fraction",
    "max_tokens_in_paged_kv_cache": "max_tokens",
    "max_attention_window_size": "max_attention_window",
    "sink_token_length": "sink_token_length",
    "kv_cache_host_memory_bytes": "host_cache_size",
    "kv_cache_onboard_blocks": "onboard_blocks",
}
SETTINGS: Final = ("decoupled", *ARGUMENTS, *KV_CACHE)
"""Settings that this lane has of those of the engine lane, with the same meaning."""
LIMITS: Final = ("max_batch_size", "max_seq_len", "max_num_tokens")
OPTIONS: Final = (
    Option("max_batch_size", "int", "requests in flight", required=True),
    Option("max_seq_len", "int", "tokens of prompt and answer together", required=True),
    Option("max_num_tokens", "json", "tokens of one forward pass over all requests, or null"),
    Option("tensor_parallel_size", "int", "GPUs that share each layer", default=1),
    Option("pipeline_parallel_size", "int", "GPUs one after another", default=1),
    *(templates.BY_NAME[name].option() for name in SETTINGS),
    Option("llm_args", "json", "further arguments of the LLM API: {NAME: VALUE}", default={}),
)


def fill(root: Path, out: Path, *, model: Path, params: Mapping[str, Json], release: str) -> None:
    """Write the repository of the Hugging Face folder `model` into the folder `out`, from `all_models` at `root`.

    `params` are those of OPTIONS. Raises StageError where the release has no such template or a value cannot be.
    """
    source = root / TEMPLATE_SET / MODEL
    if not (source / model_config.FILE_NAME).is_file():
        raise StageError(
            f"{root} has no template {TEMPLATE_SET}: TensorRT-LLM {release} cannot serve Hugging Face weights in Triton",
            failure=FailureClass.USER,
            hint="0.19 and later have it; trtllm-serve needs no repository",
        )
    for name in SETTINGS:
        if params.get(name) is not None:
            templates.BY_NAME[name].text(params[name])  # for its error
    settings = _merged(_template_settings(source / "1" / "model.yaml"), yaml_settings(model, params))
    config = model_config.read(source / model_config.FILE_NAME)
    # The code says both again when Triton completes the configuration, which a launch may have turned off.
    config.max_batch_size = settings["triton_config"]["max_batch_size"]
    config.model_transaction_policy.decoupled = settings["triton_config"]["decoupled"]
    shutil.copytree(source, out / MODEL, ignore=shutil.ignore_patterns("__pycache__"))
    (out / MODEL / model_config.FILE_NAME).write_text(model_config.to_text(config), encoding="utf-8")
    (out / MODEL / "1" / "model.yaml").write_text(to_yaml(settings), encoding="utf-8")


def yaml_settings(model: Path, params: Mapping[str, Json]) -> dict[str, Any]:
    """What `model.yaml` says for these parameters.

    Triton's max_batch_size is 0: the code takes one prompt a request, and the LLM API batches them itself.
    """
    given = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decoupled": True, **_given(params)}
    own = {
        "model": str(model.absolute()),
        "backend": "pytorch",
        "tensor_parallel_size": given["tensor_parallel_size"],
        "pipeline_parallel_size": given["pipeline_parallel_size"],
        "triton_config": {"max_batch_size": 0, "decoupled": given["decoupled"]},
    }
    return _merged(own, arguments(params))


def arguments(params: Mapping[str, Json]) -> dict[str, Any]:
    """The LLM API's arguments for those of `params` that have a value: limits, caches, and `llm_args` over them."""
    given = _given(params)
    extra = given.get("llm_args", {})
    if not isinstance(extra, dict):
        raise StageError(f"llm_args is {extra!r}; expected {{NAME: VALUE}}", failure=FailureClass.USER)
    found: dict[str, Any] = {
        **{name: given[name] for name in LIMITS if name in given},
        **{argument: given[name] for name, argument in ARGUMENTS.items() if name in given},
        "kv_cache_config": {key: given[name] for name, key in KV_CACHE.items() if name in given},
    }
    return _merged(found, extra)


def _given(params: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in params.items() if value is not None}


def to_yaml(settings: Mapping[str, Any]) -> str:
    """`settings` as YAML, in their order."""
    import yaml

    return str(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mappings merged key by key."""
    both = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return {**below, **both}


def _template_settings(path: Path) -> dict[str, Any]:
    """What the template's own model.yaml says beyond its example of a model."""
    try:
        found = decode_yaml(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise StageError(f"{path} cannot be read: {error}", failure=FailureClass.USER) from error
    return found if isinstance(found, dict) else {}
