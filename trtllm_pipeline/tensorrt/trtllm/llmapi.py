"""Settings of TensorRT-LLM's LLM API: for the Triton repository of the PyTorch backend, and for `trtllm-serve`.

The repository has the LLM API inside one Python model. The model's code and tensors are those of the installed release
(`all_models/llmapi`, from 0.19 on). `1/model.yaml`, which is written here, configures it: arguments of the LLM API, and
`triton_config`, which the code passes to Triton.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, StageError, TensorRTLLM, user_files
from trtllm_pipeline.models import model_config
from trtllm_pipeline.tensorrt.servers.disaggregated import Servers
from trtllm_pipeline.tensorrt.stage.lora import check_weights
from trtllm_pipeline.tensorrt.stage.params import DRAFT_LENGTHS, WITH_DRAFT_MODEL
from trtllm_pipeline.tensorrt.stage.repository_settings import LlmApi
from trtllm_pipeline.tensorrt.toolchains.companions import ADAPTER, DRAFT, read_adapter
from trtllm_pipeline.tensorrt.trtllm import commands
from trtllm_pipeline.tensorrt.trtllm.params import (
    CONTEXT_SETTINGS_FILE,
    SETTINGS_FILE,
    EngineRepository,
    WeightsRepository,
)
from trtllm_pipeline.tensorrt.trtllm.releases import at_least
from trtllm_pipeline.tensorrt.trtllm.speculation import LOOKAHEAD

TEMPLATE_SET: Final = "llmapi"
MODEL: Final = "tensorrt_llm"
OF_TRITON: Final = "triton_config"
"""The key of model.yaml that is not passed to the LLM API."""
ADAPTER_INPUT: Final = "lora_path"
CACHED_RANK: Final = 64
"""`maxAdapterSize` of the runtime's cache of adapters. Source: PeftCacheConfig."""
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
SERVE_SETTINGS: Final = ("kv_cache_free_gpu_mem_fraction", "enable_kv_cache_reuse")
"""Repository settings that `trtllm-serve` supports for an engine."""
DRAFT_TARGET_RENAMED: Final = "1.3.0rc6"
"""First release that only has the new name for a draft model: pull request 11158, on the release page of 1.3.0rc6."""
MTP_LENGTH_RENAMED: Final = "1.3.0rc12"
"""First release known to have `max_draft_len` as the draft length of MTP (pull request 12341, of March 2026). Releases
until mid-2026 also accept `num_nextn_predict_layers`.
"""
WITHOUT_ONBOARDING: Final = "1.3.0rc13"
"""First release known to refuse `onboard_blocks`: pull request 12449, of 16 April 2026."""
GRAPHS_WITH_ADAPTERS: Final = "1.3"
"""First release with CUDA graphs together with LoRA adapters: cuda_graph_lora_manager.py, pull request 8279."""
_DECODING_TYPES: Final = {
    "eagle3": "Eagle",
    "mtp": "MTP",
    "ngram": "NGram",
    "sa": "SA",
    "pard": "PARD",
    "dflash": "DFlash",
}
NEW_DRAFTERS: Final = "1.3.0rc20"
"""First release known to have `sa`, `pard` and `dflash`: its page of the LLM API's classes. Merged by pull requests 11434 and 11438 of
February and 12794 of April 2026."""
NGRAM_SIZE: Final = 2
"""Default for `ngram`. Source: the default since 1.3.0rc6. Before, it is 0, which TorchLlmArgs refuses."""


def fill(
    root: Path,
    out: Path,
    *,
    model: Path,
    params: WeightsRepository,
    release: str,
    draft: Path | None = None,
    adapters: Sequence[Path] = (),
) -> None:
    """Write the repository of the Hugging Face directory `model` into the directory `out`, from `all_models` at `root`.

    `draft` is the directory of the draft model, if there is one. `adapters` are those of LoRA adapters.

    Raises StageError if the release has no such template.
    """
    source = root / TEMPLATE_SET / MODEL
    if not (source / model_config.FILE_NAME).is_file():
        raise StageError(
            f"{root} has no template {TEMPLATE_SET}: TensorRT-LLM {release} cannot serve Hugging Face weights in Triton",
            failure=FailureClass.USER,
            hint="0.19 and later have it; trtllm-serve needs no repository",
        )
    settings = _merged(_template_settings(source / "1" / "model.yaml"), yaml_settings(model, params, release, draft))
    config = model_config.read(source / model_config.FILE_NAME)
    if adapters:
        if not takes_adapters(config):
            raise StageError(
                f"{source} has no input {ADAPTER_INPUT}: Triton's LLM API model of TensorRT-LLM {release} does not support LoRA adapters",
                failure=FailureClass.USER,
                hint="settings.serve.frontend: trtllm_serve serves them",
            )
        settings = {**lora(adapters, model, release), **settings}
    # The code sets both again when Triton completes the configuration, which a launch may have turned off.
    config.max_batch_size = settings[OF_TRITON]["max_batch_size"]
    config.model_transaction_policy.decoupled = settings[OF_TRITON]["decoupled"]
    shutil.copytree(source, out / MODEL, ignore=shutil.ignore_patterns("__pycache__"))
    (out / MODEL / model_config.FILE_NAME).write_text(model_config.to_text(config), encoding="utf-8")
    (out / MODEL / "1" / "model.yaml").write_text(to_yaml(settings), encoding="utf-8")


def yaml_settings(model: Path, params: WeightsRepository, release: str, draft: Path | None = None) -> dict[str, Any]:
    """The content of `model.yaml` for these parameters.

    Triton's max_batch_size is 0: the code accepts one prompt per request, and the LLM API batches them itself. Raises
    StageError for a setting that the release does not have.
    """
    _check(params, release)
    own = {
        "model": str(model.absolute()),
        "backend": "pytorch",
        "tensor_parallel_size": params.tensor_parallel_size,
        "pipeline_parallel_size": params.pipeline_parallel_size,
        **({"moe_expert_parallel_size": experts} if (experts := params.moe_expert_parallel_size) else {}),
        OF_TRITON: {"max_batch_size": 0, "decoupled": params.decoupled},
    }
    limits = {
        "max_batch_size": params.max_batch_size,
        "max_seq_len": params.max_seq_len,
        "max_num_tokens": commands.tokens_of_a_pass(params),
    }
    return _merged(own, {**limits, **_merged(speculation(params, release, draft), _of_weights(params))})


def speculation(params: WeightsRepository, release: str, draft: Path | None) -> dict[str, Any]:
    """Arguments of the LLM API for speculative decoding. Empty without it. `draft` is the directory of the draft model.

    Source: `DecodingBaseConfig` and its subclasses in llm_args.py of releases around 1.0 to 1.3.
    """
    method = params.speculative
    if method is None:
        return {}
    if method in WITH_DRAFT_MODEL and draft is None:
        raise StageError(f"{method} needs a draft model, but no model was given", failure=FailureClass.USER)
    value: dict[str, Any] = {"decoding_type": decoding_type(method, release)}
    former = method == "mtp" and not at_least(release, MTP_LENGTH_RENAMED)
    key = "num_nextn_predict_layers" if former else "max_draft_len"
    value[key] = params.max_draft_len or DRAFT_LENGTHS[method]
    if method in WITH_DRAFT_MODEL:
        value["speculative_model_dir"] = str(draft)
    if method == "ngram" or params.max_ngram_size is not None:
        value["max_matching_ngram_size"] = params.max_ngram_size or NGRAM_SIZE
    return {"speculative_config": value}


def template(root: Path) -> model_config.ModelConfig:
    """The configuration of the LLM API's model in `all_models` at `root`. Raises OSError, ModelConfigError."""
    return model_config.read(root / TEMPLATE_SET / MODEL / model_config.FILE_NAME, allow_unknown=True)


def takes_adapters(config: model_config.ModelConfig) -> bool:
    """True if the LLM API's model in Triton, by its configuration, accepts a LoRA adapter in a request."""
    return any(tensor.name == ADAPTER_INPUT for tensor in config.input)


def lora(adapters: Sequence[Path], model: Path, release: str) -> dict[str, Any]:
    """Arguments of the LLM API for LoRA adapters in directories: maximum rank, the layers that they change, and the
    path of the first.

    It accepts one directory, from which it may read a vocabulary; the others are sent with their requests. CUDA graphs
    are off in releases that do not support them with LoRA. Source: `LoraConfig` and `load_torch_hf_lora` of
    lora_manager.py. Raises StageError for an invalid adapter, or one for a model of another size.
    """
    ranks, modules = [], []
    for adapter in adapters:
        rank, changed = read_adapter(adapter)
        ranks.append(rank)
        modules += changed
        check_weights(adapter, model)
    several = {"max_loras": len(adapters), "max_cpu_loras": len(adapters)} if len(adapters) > 1 else {}
    config = {
        "lora_dir": [str(adapters[0])],
        "max_lora_rank": max(ranks),
        "lora_target_modules": list(dict.fromkeys(modules)),
        **several,
    }
    graphs = {} if at_least(release, GRAPHS_WITH_ADAPTERS) else {"cuda_graph_config": None}
    return {"lora_config": config, **graphs}


def decoding_type(method: str, release: str) -> str:
    """TensorRT-LLM's name for a method."""
    if method == "draft":
        return "Draft_Target" if at_least(release, DRAFT_TARGET_RENAMED) else "DraftTarget"
    return _DECODING_TYPES[method]


def serve_settings(
    params: EngineRepository | WeightsRepository, release: str, draft: Path | None = None
) -> dict[str, Any]:
    """The settings that trtllm-serve reads from a file.

    For weights, all except the limits, which are options, since releases differ in which takes precedence. For an
    engine, which records all others, those of the cache, if the release reads a file. Raises StageError for a setting
    that the release does not have.
    """
    entries: dict[str, Any] = {}
    if isinstance(params, WeightsRepository):
        _check(params, release)
        drafts = speculation(params, release, draft)
        # The server's statistics of iterations include drafted and accepted tokens. Triton shows neither.
        result = {"enable_iter_perf_stats": True} if drafts else {}
        entries = _merged({**drafts, **result}, _of_weights(params))
    elif commands.takes_config(release):
        entries = of_settings(params)
        if params.decoding_mode == "lookahead":
            # With other methods, the engine itself has the settings. Source: LookaheadDecodingConfig of 0.20 and 1.1.
            sizes = {f"max_{name.removeprefix('lookahead_')}": getattr(params, name) for name in LOOKAHEAD}
            entries["speculative_config"] = {"decoding_type": "Lookahead", **sizes}
    return {name: value for name, value in entries.items() if value != {}}


def disaggregated_settings(
    params: WeightsRepository, release: str, draft: Path | None = None, *, context: bool
) -> dict[str, Any]:
    """The settings file of a disaggregated server, one that reads prompts (`context`) or one that generates.

    The buffer of the KV cache's transfer holds the longest request. Source: examples/disaggregated/README.md, which also
    turns off the overlap scheduler of servers that read prompts.
    """
    transfer = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": params.max_seq_len}}
    scheduler = {"disable_overlap_scheduler": True} if context else {}
    return _merged({**transfer, **scheduler}, serve_settings(params, release, draft))


def context_params(params: WeightsRepository) -> WeightsRepository:
    """Parameters of the disaggregated servers that read prompts. Raises StageError for an unknown name."""
    own: dict[str, Any] = dict(params.context)
    own["llm_args"] = _merged(params.llm_args, own.pop("llm_args", {}))
    if unknown := own.keys() - {each.name for each in fields(WeightsRepository)}:
        raise StageError(f"context: unknown setting {min(unknown)}", failure=FailureClass.USER)
    return replace(params, **own, context={})


def without_onboarding(params: bool | None, release: str) -> str | None:
    """Why the PyTorch backend of a release does not accept `kv_cache_onboard_blocks`, or None."""
    if params is None or not at_least(release, WITHOUT_ONBOARDING):
        return None
    return f"kv_cache_onboard_blocks: the LLM API has no such argument since {WITHOUT_ONBOARDING}, this is {release}"


ONBOARDING_HINT: Final = "leave it out: blocks are moved back wherever kv_cache_host_memory_bytes is set"


def _check(params: WeightsRepository, release: str) -> None:
    if (why := without_onboarding(params.kv_cache_onboard_blocks, release)) is not None:
        raise StageError(why, failure=FailureClass.USER, hint=ONBOARDING_HINT)


def of_settings(params: EngineRepository | WeightsRepository) -> dict[str, Any]:
    """The LLM API's arguments for the settings of a cell without drafting. For an engine, only those of the cache,
    which it does not record itself.
    """
    if isinstance(params, WeightsRepository):
        result = _of_weights(params)
    else:
        result = arguments(LlmApi(**{name: getattr(params, name) for name in SERVE_SETTINGS}), {})
    return {name: value for name, value in result.items() if value != {}}


def disaggregated_lines(
    params: WeightsRepository, inputs: Mapping[str, Path], installation: TensorRTLLM, folder: Path | None = None
) -> Servers:
    """The command lines of disaggregated servers without their addresses. `folder` has the settings files."""
    program = installation.serve or "trtllm-serve"

    def line(own: WeightsRepository, file: str) -> list[str]:
        config = file if folder is None else str(folder / file)
        return commands.serve_pytorch(
            installation.release, own, model=str(inputs["model"]), config=config, program=program
        )

    context = context_params(params)
    return Servers(
        context=line(context, CONTEXT_SETTINGS_FILE),
        generation=line(params, SETTINGS_FILE),
        contexts=params.context_servers,
        generations=params.generation_servers,
        context_gpus=context.tensor_parallel_size * context.pipeline_parallel_size,
        generation_gpus=params.tensor_parallel_size * params.pipeline_parallel_size,
        router=[program, "disaggregated"],
    )


def serve_line(
    params: EngineRepository | WeightsRepository,
    inputs: Mapping[str, Path],
    installation: TensorRTLLM,
    folder: Path | None = None,
) -> list[str]:
    """The command line of trtllm-serve without its address. `folder` has the settings file. With None, only its name is
    given.
    """
    release, program = installation.release, installation.serve or "trtllm-serve"
    model, config, weights = str(inputs["model"]), None, isinstance(params, WeightsRepository)
    if (ADAPTER in inputs and weights) or serve_settings(params, release, inputs.get(DRAFT)):
        config = SETTINGS_FILE if folder is None else str(folder / SETTINGS_FILE)
    if isinstance(params, WeightsRepository):
        return commands.serve_pytorch(release, params, model=model, config=config, program=program)
    engine = str(inputs["engine"])
    return commands.serve_engine(release, params, engine=engine, tokenizer=model, config=config, program=program)


def _of_weights(params: WeightsRepository) -> dict[str, Any]:
    """The LLM API's arguments for settings of weights that no option of trtllm-serve covers in all releases."""
    attention = {"enable_attention_dp": True} if params.enable_attention_dp else {}
    return {**attention, **arguments(params, params.llm_args)}


def arguments(params: LlmApi, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The LLM API's arguments for the settings that have a value, overridden by `extra`."""
    entries: dict[str, Any] = {
        argument: value for name, argument in ARGUMENTS.items() if (value := getattr(params, name)) is not None
    }
    cache = {key: value for name, key in KV_CACHE.items() if (value := getattr(params, name)) is not None}
    cache = {key: list(value) if isinstance(value, tuple) else value for key, value in cache.items()}
    return _merged({**entries, "kv_cache_config": cache}, extra)


def to_yaml(settings: Mapping[str, Any]) -> str:
    """`settings` as YAML, in order."""
    import yaml

    return str(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` merged into `below`, key by key."""
    both = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return {**below, **both}


def _template_settings(path: Path) -> dict[str, Any]:
    """The settings in the template's model.yaml, without its example of a model."""
    try:
        data = user_files.decode_yaml(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise StageError(f"{path} cannot be read: {error}", failure=FailureClass.USER) from error
    return data if isinstance(data, dict) else {}
