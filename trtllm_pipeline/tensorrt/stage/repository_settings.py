"""Settings of a Triton model repository: one table for matrices, options and the placeholders of templates.

Their meaning in TensorRT-LLM: https://github.com/triton-inference-server/tensorrtllm_backend, `docs/model_config.md`.
Types of fields are read, so no `from __future__ import annotations`.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from trtllm_pipeline.base import Json
from trtllm_pipeline.tensorrt.stage.params import ITSELF, Param, Parameters, param, table

DataType = Literal["TYPE_FP16", "TYPE_BF16", "TYPE_FP32"]


@dataclass(frozen=True, slots=True)
class Setting(Param):
    """A parameter that fills a placeholder of the templates. If unset, it is neither in the key nor in the file."""

    null: str = "the release's own"
    usual: Json = None
    """The value if unset. None leaves it to the release: the parameter is removed from the file."""
    placeholder: str = ""
    """Name of the placeholder, if it differs from the setting's."""
    key_with: str = ITSELF
    since: str | None = None
    """First recorded release whose templates have it. Installed files take precedence."""
    until: str | None = None


def setting(text: str, default: Any = None, **about: Any) -> Any:
    """A field for one setting. `about` is as in `Setting`."""
    if (usual := about.get("usual")) is not None:
        about["null"] = str(usual).lower() if isinstance(usual, bool) else str(usual)
    return param(text, default, kind=Setting, **about)


@dataclass(frozen=True, kw_only=True)
class EveryRepository(Parameters):
    """Settings that every toolchain has."""

    decoupled: bool = setting(
        "stream answers: several responses per request; false sends one over every protocol",
        True,
        placeholder="decoupled_mode",
    )
    enable_kv_cache_reuse: bool = setting(
        "reuse the KV cache of prompt prefixes; speeds up measurements with repeated prompts", False
    )


@dataclass(frozen=True, kw_only=True)
class TextModels(EveryRepository):
    """Settings of the five models around an engine."""

    accumulate_tokens: bool = setting("each streamed part has the whole answer so far, not only the new text", False)
    exclude_input_in_output: bool = setting("answers do not repeat the prompt", True)
    preprocessing_instances: int = setting(
        "processes that tokenize", 1, ge=1, le=1024, placeholder="preprocessing_instance_count"
    )
    postprocessing_instances: int = setting(
        "processes that turn tokens into text; several reorder the parts of streamed answers",
        1,
        ge=1,
        le=1024,
        placeholder="postprocessing_instance_count",
    )
    bls_instances: int = setting(
        "processes of the tensorrt_llm_bls model", 1, ge=1, le=1024, placeholder="bls_instance_count"
    )
    max_queue_delay_microseconds: int = setting("maximum time that Triton delays a request to batch it", 0, ge=0)


@dataclass(frozen=True, kw_only=True)
class LlmApi(EveryRepository):
    """Settings that TensorRT-LLM's Python API has too."""

    kv_cache_free_gpu_mem_fraction: float | None = setting(
        "share of the memory left after loading that the KV cache gets", gt=0, le=1
    )
    max_tokens_in_paged_kv_cache: int | None = setting("tokens in the KV cache; the smaller limit wins", ge=1)
    max_attention_window_size: tuple[int, ...] | None = setting(
        "sliding windows in tokens, one or one for each layer", ge=0
    )
    sink_token_length: int | None = setting("first tokens kept with a sliding window", ge=0, since="0.10.0")
    kv_cache_host_memory_bytes: int | None = setting("host memory that KV blocks are moved to", ge=0, since="0.10.0")
    kv_cache_onboard_blocks: bool | None = setting("move blocks back from the host before use", since="0.10.0")
    enable_chunked_context: bool | None = setting("split long prompts over several passes")


@dataclass(frozen=True, kw_only=True)
class RepositorySettings(TextModels, LlmApi):
    """All user settings of a TensorRT-LLM repository."""

    max_queue_size: int | None = setting("requests that may wait; 0 means no limit", ge=0, usual=0, since="0.12.0")
    batching_strategy: Literal["inflight_fused_batching", "inflight_batching", "V1"] | None = setting(
        "batching of requests", usual="inflight_fused_batching"
    )
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] | None = setting(
        "guaranteed_no_evict finishes running requests; max_utilization packs tighter and may pause requests",
        usual="guaranteed_no_evict",
    )
    cross_kv_cache_fraction: float | None = setting(
        "share of the KV cache for cross attention", gt=0, le=1, since="0.14.0"
    )
    max_beam_width: int | None = setting("beams of a request", ge=1, usual=1)
    normalize_log_probs: bool | None = setting("divide log probabilities by the length")
    decoding_mode: (
        Literal["top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"] | None
    ) = setting("method of choosing tokens", since="0.10.0")
    medusa_choices: str | None = setting("Medusa's tree, such as {0, 0, 0}, {0, 1}", since="0.10.0")
    eagle_choices: str | None = setting("Eagle's tree, such as {0, 0, 0}, {0, 1}", since="0.16.0")
    lookahead_window_size: int | None = setting("window size of lookahead decoding", ge=0, since="0.19.0")
    lookahead_ngram_size: int | None = setting("n-gram size of lookahead decoding", ge=0, since="0.19.0")
    lookahead_verification_set_size: int | None = setting(
        "verification set size of lookahead decoding", ge=0, since="0.19.0"
    )
    speculative_decoding_fast_logits: bool | None = setting("pass draft logits on the GPU", since="0.16.0")
    guided_decoding_backend: Literal["xgrammar"] | None = setting("grammar engine", since="0.19.0")
    xgrammar_tokenizer_info_path: str | None = setting("JSON file with the vocabulary for xgrammar", since="0.19.0")
    lora_cache_optimal_adapter_size: int | None = setting(
        "rank that the LoRA cache is laid out for", ge=0, since="0.10.0"
    )
    lora_cache_max_adapter_size: int | None = setting("largest rank in the LoRA cache", ge=0, since="0.10.0")
    lora_cache_gpu_memory_fraction: float | None = setting(
        "share of free GPU memory for LoRA", gt=0, le=1, since="0.10.0"
    )
    lora_cache_host_memory_bytes: int | None = setting("host memory for LoRA weights", ge=0, since="0.10.0")
    lora_prefetch_dir: str | None = setting("directory of LoRA weights loaded at startup", since="0.19.0")
    gpu_device_ids: tuple[int, ...] | None = setting("GPUs of the ranks, in order", ge=0)
    participant_ids: tuple[int, ...] | None = setting("MPI ranks that run this model", ge=0, since="0.14.0")
    num_nodes: int | None = setting("hosts of the ranks", ge=1, since="0.19.0")
    gpu_weights_percent: float | None = setting("share of the weights kept on the GPU", ge=0, le=1, since="0.10.0")
    multi_block_mode: bool | None = setting("split long attention over blocks", since="0.12.0")
    enable_context_fmha_fp32_acc: bool | None = setting("accumulate context attention in FP32", since="0.12.0")
    cuda_graph_mode: bool | None = setting("replay decoding steps as CUDA graphs", since="0.16.0")
    cuda_graph_cache_size: int | None = setting("CUDA graphs kept", ge=0, since="0.16.0")
    cancellation_check_period_ms: int | None = setting(
        "interval of checks for cancelled requests", ge=0, since="0.10.0"
    )
    stats_check_period_ms: int | None = setting("interval of reading statistics", ge=0, since="0.10.0")
    iter_stats_max_iterations: int | None = setting("steps whose statistics are kept", ge=0, since="0.10.0")
    request_stats_max_iterations: int | None = setting(
        "steps whose requests' statistics are kept", ge=0, since="0.10.0"
    )
    enable_trt_overlap: bool | None = setting("overlap two half batches", until="0.8.0")
    add_special_tokens: bool | None = setting(
        "preprocessing adds the tokenizer's special tokens to prompts", usual=True
    )
    skip_special_tokens: bool | None = setting("answers omit special tokens", usual=True, since="0.11.0")
    tokenizer_type: Literal["auto", "llama", "t5"] | None = setting(
        "class of the tokenizer", usual="auto", until="0.8.0"
    )
    triton_backend: Literal["tensorrtllm", "python"] | None = setting(
        "backend of the engine", usual="tensorrtllm", since="0.10.0"
    )
    logits_datatype: DataType | None = setting("type of logits", null="the engine's", since="0.18.0")
    encoder_input_features_data_type: DataType | None = setting(
        "type of an encoder's input; TYPE_BF16 for mllama", usual="TYPE_FP16", since="0.16.0"
    )
    prompt_embedding_table_data_type: DataType | None = setting(
        "type of prompt tables", usual="TYPE_FP16", since="1.1.0rc6"
    )
    max_num_images: int | None = setting("images of a request", ge=1, since="0.16.0")
    multimodal_model_path: str | None = setting("directory of the vision engines", since="0.19.0")
    visual_model_path: str | None = setting("directory of the vision engines", since="0.12.0", until="0.18.2")
    multimodal_encoders_name: str | None = setting("model that tensorrt_llm_bls sends images to", since="0.14.0")
    encoder_engine_dir: str | None = setting("engine directory of the encoder", since="0.11.0")
    tensorrt_llm_model_name: str | None = setting(
        "model that tensorrt_llm_bls calls", usual="tensorrt_llm", since="0.10.0"
    )
    tensorrt_llm_draft_model_name: str | None = setting("model that drafts tokens for it", since="0.10.0")


SETTINGS: Final[dict[str, Setting]] = {each.name: cast("Setting", each.about) for each in table(RepositorySettings)}
DEFAULTS: Final[dict[str, Json]] = {
    each.name: each.default if each.default is not None else SETTINGS[each.name].usual
    for each in table(RepositorySettings)
}
"""Default value of each. None leaves it to the release."""
