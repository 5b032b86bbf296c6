"""The Triton repository of the PyTorch backend: TensorRT-LLM's LLM API inside one Python model.

The model's code and tensors are those of the installed release (`all_models/llmapi`, from 0.19 on). What it runs is said
in `1/model.yaml`, which is written here: arguments of the LLM API, and `triton_config`, which the code hands to Triton.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.user_files import decode_yaml
from trtllm_pipeline.stages.repository_settings import LlmApi
from trtllm_pipeline.toolchains.tensorrt_llm.params import WeightsRepository
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
LIMITS: Final = ("max_batch_size", "max_seq_len", "max_num_tokens")


def fill(root: Path, out: Path, *, model: Path, asked: WeightsRepository, release: str) -> None:
    """Write the repository of the Hugging Face folder `model` into the folder `out`, from `all_models` at `root`.

    Raises StageError where the release has no such template.
    """
    source = root / TEMPLATE_SET / MODEL
    if not (source / model_config.FILE_NAME).is_file():
        raise StageError(
            f"{root} has no template {TEMPLATE_SET}: TensorRT-LLM {release} cannot serve Hugging Face weights in Triton",
            failure=FailureClass.USER,
            hint="0.19 and later have it; trtllm-serve needs no repository",
        )
    settings = _merged(_template_settings(source / "1" / "model.yaml"), yaml_settings(model, asked))
    config = model_config.read(source / model_config.FILE_NAME)
    # The code says both again when Triton completes the configuration, which a launch may have turned off.
    config.max_batch_size = settings["triton_config"]["max_batch_size"]
    config.model_transaction_policy.decoupled = settings["triton_config"]["decoupled"]
    shutil.copytree(source, out / MODEL, ignore=shutil.ignore_patterns("__pycache__"))
    (out / MODEL / model_config.FILE_NAME).write_text(model_config.to_text(config), encoding="utf-8")
    (out / MODEL / "1" / "model.yaml").write_text(to_yaml(settings), encoding="utf-8")


def yaml_settings(model: Path, asked: WeightsRepository) -> dict[str, Any]:
    """What `model.yaml` says for these parameters.

    Triton's max_batch_size is 0: the code takes one prompt a request, and the LLM API batches them itself.
    """
    own = {
        "model": str(model.absolute()),
        "backend": "pytorch",
        "tensor_parallel_size": asked.tensor_parallel_size,
        "pipeline_parallel_size": asked.pipeline_parallel_size,
        "triton_config": {"max_batch_size": 0, "decoupled": asked.decoupled},
    }
    limits = {name: value for name in LIMITS if (value := getattr(asked, name)) is not None}
    return _merged(own, {**limits, **arguments(asked, asked.llm_args)})


def arguments(asked: LlmApi, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The LLM API's arguments for the settings that have a value, and `extra` over them."""
    found: dict[str, Any] = {
        argument: value for name, argument in ARGUMENTS.items() if (value := getattr(asked, name)) is not None
    }
    cache = {key: value for name, key in KV_CACHE.items() if (value := getattr(asked, name)) is not None}
    cache = {key: list(value) if isinstance(value, tuple) else value for key, value in cache.items()}
    return _merged({**found, "kv_cache_config": cache}, extra)


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
