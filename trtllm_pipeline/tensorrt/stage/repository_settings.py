"""Settings of a Triton model repository: one table for matrices, options and the placeholders of templates.

Their meaning in TensorRT-LLM: https://github.com/triton-inference-server/tensorrtllm_backend, `docs/model_config.md`.
Types of fields are read, so no `from __future__ import annotations`.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, cast

from trtllm_pipeline.base import Json
from trtllm_pipeline.tensorrt.stage.params import ITSELF, Param, Parameters, table

DataType = Literal["TYPE_FP16", "TYPE_BF16", "TYPE_FP32"]


@dataclass(frozen=True, slots=True)
class Setting(Param):
    """A parameter that fills a placeholder of the templates. If unset, it is neither in the key nor in the file."""

    default: Json = None
    """The value if unset. None leaves it to the release: the parameter is removed from the file."""
    placeholder: str = ""
    """Name of the placeholder, if it differs from the setting's."""
    key_with: str = ITSELF
    since: str | None = None
    """First recorded release whose templates have it. Installed files take precedence."""
    until: str | None = None

    @property
    def unset(self) -> str:
        """The meaning of None, in words."""
        if self.default is None:
            return self.null or "the release's own"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


@dataclass(frozen=True, kw_only=True)
class EveryRepository(Parameters):
    """Settings that every toolchain has."""

    decoupled: Annotated[
        bool,
        Setting(
            "stream answers: several responses per request; false sends one over every protocol",
            placeholder="decoupled_mode",
        ),
    ] = True
    enable_kv_cache_reuse: Annotated[
        bool, Setting("reuse the KV cache of prompt prefixes; speeds up measurements with repeated prompts")
    ] = False


@dataclass(frozen=True, kw_only=True)
class TextModels(EveryRepository):
    """Settings of the five models around an engine."""

    accumulate_tokens: Annotated[
        bool, Setting("each streamed part has the whole answer so far, not only the new text")
    ] = False
    exclude_input_in_output: Annotated[bool, Setting("answers do not repeat the prompt")] = True
    preprocessing_instances: Annotated[
        int, Setting("processes that tokenize", ge=1, le=1024, placeholder="preprocessing_instance_count")
    ] = 1
    postprocessing_instances: Annotated[
        int,
        Setting(
            "processes that turn tokens into text; several reorder the parts of streamed answers",
            ge=1,
            le=1024,
            placeholder="postprocessing_instance_count",
        ),
    ] = 1
    bls_instances: Annotated[
        int, Setting("processes of the tensorrt_llm_bls model", ge=1, le=1024, placeholder="bls_instance_count")
    ] = 1
    max_queue_delay_microseconds: Annotated[
        int, Setting("maximum time that Triton delays a request to batch it", ge=0)
    ] = 0


@dataclass(frozen=True, kw_only=True)
class LlmApi(EveryRepository):
    """Settings that TensorRT-LLM's Python API has too."""

    kv_cache_free_gpu_mem_fraction: Annotated[
        float | None, Setting("share of the memory left after loading that the KV cache gets", gt=0, le=1)
    ] = None
    max_tokens_in_paged_kv_cache: Annotated[
        int | None, Setting("tokens in the KV cache; the smaller limit wins", ge=1)
    ] = None
    max_attention_window_size: Annotated[
        tuple[int, ...] | None, Setting("sliding windows in tokens, one or one for each layer", ge=0)
    ] = None
    sink_token_length: Annotated[
        int | None, Setting("first tokens kept with a sliding window", ge=0, since="0.10.0")
    ] = None
    kv_cache_host_memory_bytes: Annotated[
        int | None, Setting("host memory that KV blocks are moved to", ge=0, since="0.10.0")
    ] = None
    kv_cache_onboard_blocks: Annotated[
        bool | None, Setting("move blocks back from the host before use", since="0.10.0")
    ] = None
    enable_chunked_context: Annotated[bool | None, Setting("split long prompts over several passes")] = None


@dataclass(frozen=True, kw_only=True)
class RepositorySettings(TextModels, LlmApi):
    """All user settings of a TensorRT-LLM repository."""

    max_queue_size: Annotated[
        int | None, Setting("requests that may wait; 0 means no limit", ge=0, default=0, since="0.12.0")
    ] = None
    batching_strategy: Annotated[
        Literal["inflight_fused_batching", "inflight_batching", "V1"] | None,
        Setting("batching of requests", default="inflight_fused_batching"),
    ] = None
    batch_scheduler_policy: Annotated[
        Literal["guaranteed_no_evict", "max_utilization"] | None,
        Setting(
            "guaranteed_no_evict finishes running requests; max_utilization packs tighter and may pause requests",
            default="guaranteed_no_evict",
        ),
    ] = None
    cross_kv_cache_fraction: Annotated[
        float | None, Setting("share of the KV cache for cross attention", gt=0, le=1, since="0.14.0")
    ] = None
    max_beam_width: Annotated[int | None, Setting("beams of a request", ge=1, default=1)] = None
    normalize_log_probs: Annotated[bool | None, Setting("divide log probabilities by the length")] = None
    decoding_mode: Annotated[
        Literal["top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"] | None,
        Setting("method of choosing tokens", since="0.10.0"),
    ] = None
    medusa_choices: Annotated[str | None, Setting("Medusa's tree, such as {0, 0, 0}, {0, 1}", since="0.10.0")] = None
    eagle_choices: Annotated[str | None, Setting("Eagle's tree, such as {0, 0, 0}, {0, 1}", since="0.16.0")] = None
    lookahead_window_size: Annotated[int | None, Setting("window size of lookahead decoding", ge=0, since="0.19.0")] = (
        None
    )
    lookahead_ngram_size: Annotated[int | None, Setting("n-gram size of lookahead decoding", ge=0, since="0.19.0")] = (
        None
    )
    lookahead_verification_set_size: Annotated[
        int | None, Setting("verification set size of lookahead decoding", ge=0, since="0.19.0")
    ] = None
    speculative_decoding_fast_logits: Annotated[
        bool | None, Setting("pass draft logits on the GPU", since="0.16.0")
    ] = None
    guided_decoding_backend: Annotated[Literal["xgrammar"] | None, Setting("grammar engine", since="0.19.0")] = None
    xgrammar_tokenizer_info_path: Annotated[
        str | None, Setting("JSON file with the vocabulary for xgrammar", since="0.19.0")
    ] = None
    lora_cache_optimal_adapter_size: Annotated[
        int | None, Setting("rank that the LoRA cache is laid out for", ge=0, since="0.10.0")
    ] = None
    lora_cache_max_adapter_size: Annotated[
        int | None, Setting("largest rank in the LoRA cache", ge=0, since="0.10.0")
    ] = None
    lora_cache_gpu_memory_fraction: Annotated[
        float | None, Setting("share of free GPU memory for LoRA", gt=0, le=1, since="0.10.0")
    ] = None
    lora_cache_host_memory_bytes: Annotated[
        int | None, Setting("host memory for LoRA weights", ge=0, since="0.10.0")
    ] = None
    lora_prefetch_dir: Annotated[str | None, Setting("directory of LoRA weights loaded at startup", since="0.19.0")] = (
        None
    )
    gpu_device_ids: Annotated[tuple[int, ...] | None, Setting("GPUs of the ranks, in order", ge=0)] = None
    participant_ids: Annotated[
        tuple[int, ...] | None, Setting("MPI ranks that run this model", ge=0, since="0.14.0")
    ] = None
    num_nodes: Annotated[int | None, Setting("hosts of the ranks", ge=1, since="0.19.0")] = None
    gpu_weights_percent: Annotated[
        float | None, Setting("share of the weights kept on the GPU", ge=0, le=1, since="0.10.0")
    ] = None
    multi_block_mode: Annotated[bool | None, Setting("split long attention over blocks", since="0.12.0")] = None
    enable_context_fmha_fp32_acc: Annotated[
        bool | None, Setting("accumulate context attention in FP32", since="0.12.0")
    ] = None
    cuda_graph_mode: Annotated[bool | None, Setting("replay decoding steps as CUDA graphs", since="0.16.0")] = None
    cuda_graph_cache_size: Annotated[int | None, Setting("CUDA graphs kept", ge=0, since="0.16.0")] = None
    cancellation_check_period_ms: Annotated[
        int | None, Setting("interval of checks for cancelled requests", ge=0, since="0.10.0")
    ] = None
    stats_check_period_ms: Annotated[int | None, Setting("interval of reading statistics", ge=0, since="0.10.0")] = None
    iter_stats_max_iterations: Annotated[
        int | None, Setting("steps whose statistics are kept", ge=0, since="0.10.0")
    ] = None
    request_stats_max_iterations: Annotated[
        int | None, Setting("steps whose requests' statistics are kept", ge=0, since="0.10.0")
    ] = None
    enable_trt_overlap: Annotated[bool | None, Setting("overlap two half batches", until="0.8.0")] = None
    add_special_tokens: Annotated[
        bool | None,
        Setting("preprocessing adds the tokenizer's special tokens to prompts", default=True),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, Setting("answers omit special tokens", default=True, since="0.11.0")
    ] = None
    tokenizer_type: Annotated[
        Literal["auto", "llama", "t5"] | None, Setting("class of the tokenizer", default="auto", until="0.8.0")
    ] = None
    triton_backend: Annotated[
        Literal["tensorrtllm", "python"] | None, Setting("backend of the engine", default="tensorrtllm", since="0.10.0")
    ] = None
    logits_datatype: Annotated[DataType | None, Setting("type of logits", null="the engine's", since="0.18.0")] = None
    encoder_input_features_data_type: Annotated[
        DataType | None,
        Setting("type of an encoder's input; TYPE_BF16 for mllama", default="TYPE_FP16", since="0.16.0"),
    ] = None
    prompt_embedding_table_data_type: Annotated[
        DataType | None, Setting("type of prompt tables", default="TYPE_FP16", since="1.1.0rc6")
    ] = None
    max_num_images: Annotated[int | None, Setting("images of a request", ge=1, since="0.16.0")] = None
    multimodal_model_path: Annotated[str | None, Setting("directory of the vision engines", since="0.19.0")] = None
    visual_model_path: Annotated[
        str | None, Setting("directory of the vision engines", since="0.12.0", until="0.18.2")
    ] = None
    multimodal_encoders_name: Annotated[
        str | None, Setting("model that tensorrt_llm_bls sends images to", since="0.14.0")
    ] = None
    encoder_engine_dir: Annotated[str | None, Setting("engine directory of the encoder", since="0.11.0")] = None
    tensorrt_llm_model_name: Annotated[
        str | None, Setting("model that tensorrt_llm_bls calls", default="tensorrt_llm", since="0.10.0")
    ] = None
    tensorrt_llm_draft_model_name: Annotated[str | None, Setting("model that drafts tokens for it", since="0.10.0")] = (
        None
    )


SETTINGS: Final[dict[str, Setting]] = {each.name: cast("Setting", each.about) for each in table(RepositorySettings)}
DEFAULTS: Final[dict[str, Json]] = {
    each.name: each.default if each.default is not None else SETTINGS[each.name].default
    for each in table(RepositorySettings)
}
"""Default value of each. None leaves it to the release."""
