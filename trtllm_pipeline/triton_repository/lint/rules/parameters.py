"""TRT5: parameters of TensorRT-LLM's models.

The C++ backend reads each parameter for itself and, where it cannot, goes on with a default and a line in its log; so
a wrong word here often does not fail, it silently does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from trtllm_pipeline.triton_repository.lint.repository import ModelRepository
from trtllm_pipeline.triton_repository.lint.rule import Violation, rule

BATCHING: Final = ("inflight_fused_batching", "inflight_batching", "V1", "v1")
POLICIES: Final = ("guaranteed_no_evict", "max_utilization")
DECODING_MODES: Final = ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle")
BACKENDS: Final = ("tensorrtllm", "python")
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""Any of these makes a Hugging Face folder one that has a tokenizer."""
_FRACTIONS: Final = (
    "kv_cache_free_gpu_mem_fraction",
    "cross_kv_cache_fraction",
    "lora_cache_gpu_memory_fraction",
)
_SWITCHES: Final = (
    "exclude_input_in_output",
    "enable_kv_cache_reuse",
    "enable_chunked_context",
    "enable_trt_overlap",
    "normalize_log_probs",
    "kv_cache_onboard_blocks",
    "multi_block_mode",
    "enable_context_fmha_fp32_acc",
    "cuda_graph_mode",
    "speculative_decoding_fast_logits",
    "add_special_tokens",
    "skip_special_tokens",
    "accumulate_tokens",
)
_NUMBERS: Final = (
    "max_beam_width",
    "max_tokens_in_paged_kv_cache",
    "sink_token_length",
    "kv_cache_host_memory_bytes",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_host_memory_bytes",
    "cuda_graph_cache_size",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "num_nodes",
)
_FROM_ONE: Final = ("max_beam_width", "num_nodes")
_MODEL_NAMES: Final = ("tensorrt_llm_model_name", "tensorrt_llm_draft_model_name", "multimodal_encoders_name")


_NAMED_OTHERWISE: Final = {"gpt_model_path": "engine_dir", "encoder_model_path": "encoder_engine_dir"}
TAKEN_FOR_UNSET: Final[Mapping[str, str]] = {
    name: name
    for name in (
        *_FRACTIONS,
        *_SWITCHES,
        *_NUMBERS,
        *_MODEL_NAMES,
        *("batch_scheduler_policy", "decoding_mode", "medusa_choices", "eagle_choices", "gpu_weights_percent"),
        *("max_attention_window_size", "gpu_device_ids", "participant_ids", "lora_prefetch_dir", "max_num_images"),
        *("guided_decoding_backend", "xgrammar_tokenizer_info_path", "visual_model_path", "multimodal_model_path"),
    )
} | _NAMED_OTHERWISE
"""Parameter -> its placeholder in TensorRT-LLM's templates, for those whose models go on with a default where it is still
there. What they cannot do without, other rules look for."""


def _wrong(
    repository: ModelRepository, names: tuple[str, ...], fault: Callable[[str], str | None]
) -> Iterator[Violation]:
    """Parameters of these names, with a value, that `fault` has words for."""
    for model, _ in repository.parsed():
        for name in names:
            value = model.parameters.get(name, "")
            said = fault(value) if value else None
            if said:
                yield Violation(model.path, f"{name} is {value!r}; {said}", model.line_of_parameter(name))


def _one_of(known: tuple[str, ...]) -> Callable[[str], str | None]:
    return lambda value: None if value in known else f"expected one of {', '.join(known)}"


@rule(
    "TRT501",
    "batching-strategy",
    "error",
    "a gpt_model_type that does not exist",
    "use inflight_fused_batching; V1 turns in-flight batching off",
)
def batching_strategy(repository: ModelRepository) -> Iterator[Violation]:
    """The model does not load."""
    yield from _wrong(repository, ("gpt_model_type",), _one_of(BATCHING))


@rule(
    "TRT502",
    "scheduler-policy",
    "error",
    "a batch_scheduler_policy that does not exist; the backend logs it and uses guaranteed_no_evict",
    "use guaranteed_no_evict or max_utilization",
)
def scheduler_policy(repository: ModelRepository) -> Iterator[Violation]:
    """Silently the default."""
    yield from _wrong(repository, ("batch_scheduler_policy",), _one_of(POLICIES))


@rule(
    "TRT503",
    "fraction",
    "error",
    "a memory fraction that is not above 0 and at most 1",
    "fractions refer to the memory that is free after loading the engine; 0.9 is the backend's default for the KV cache",
)
def fraction(repository: ModelRepository) -> Iterator[Violation]:
    """90 instead of 0.9, or a word. No weights at all on the GPU is possible: they are streamed."""
    yield from _wrong(repository, _FRACTIONS, _not_a_fraction)
    yield from _wrong(repository, ("gpu_weights_percent",), lambda value: _not_a_fraction(value, zero=True))


def _not_a_fraction(value: str, *, zero: bool = False) -> str | None:
    try:
        return None if 0 < float(value) <= 1 or (zero and float(value) == 0) else "expected above 0, at most 1"
    except ValueError:
        return "expected a number"


@rule(
    "TRT504",
    "two-kv-limits",
    "note",
    "two limits for the KV cache; the smaller one wins",
    "set only one of max_tokens_in_paged_kv_cache and kv_cache_free_gpu_mem_fraction, unless you mean both",
)
def two_kv_limits(repository: ModelRepository) -> Iterator[Violation]:
    """Often the fraction is left from another time."""
    for model, _ in repository.parsed():
        if all(model.parameters.get(name) for name in ("max_tokens_in_paged_kv_cache", _FRACTIONS[0])):
            said = f"max_tokens_in_paged_kv_cache and {_FRACTIONS[0]} are both set"
            yield Violation(model.path, said, model.line_of_parameter("max_tokens_in_paged_kv_cache"))


@rule("TRT505", "switch", "error", "a switch that is neither true nor false and has no effect", "write true or false")
def switch(repository: ModelRepository) -> Iterator[Violation]:
    """`yes`, `on`, `enable`."""
    known = ("true", "false", "1", "0")
    yield from _wrong(repository, _SWITCHES, lambda value: None if value.lower() in known else "expected true or false")


@rule(
    "TRT506",
    "whole-number",
    "error",
    "a number that is not whole, negative, or zero where at least 1 is required; it has no effect or stops the model",
    "write a whole number, or remove the parameter",
)
def whole_number(repository: ModelRepository) -> Iterator[Violation]:
    """Counts, sizes and periods."""
    said = "expected a whole number of at least"
    yield from _wrong(repository, _NUMBERS, lambda value: None if value.isascii() and value.isdigit() else f"{said} 0")
    yield from _wrong(repository, _FROM_ONE, lambda value: None if value.strip("0") else f"{said} 1")


@rule(
    "TRT507",
    "triton-backend",
    "error",
    "an engine model whose backend is neither tensorrtllm nor python",
    "set triton_backend to tensorrtllm (C++) or python",
)
def triton_backend(repository: ModelRepository) -> Iterator[Violation]:
    """Such as tensorrt_llm or tensorrt."""
    for model, config in repository.engines():
        if config.backend and config.backend not in BACKENDS:
            said = f"backend is {config.backend!r}; expected {' or '.join(BACKENDS)}"
            yield Violation(model.path, said, model.line_of("backend"))


@rule(
    "TRT508",
    "tokenizer",
    "error",
    "a tokenizer_dir that is missing, relative, or without tokenizer files",
    "give the absolute path of the model's Hugging Face folder, as the server sees it; anything else is treated as "
    "the name of a model to download",
)
def tokenizer(repository: ModelRepository) -> Iterator[Violation]:
    """Preprocessing and postprocessing load it when they start."""
    for model, config in repository.parsed():
        if "tokenizer_dir" not in config.parameters or (model.is_engine and not model.parameters.get("tokenizer_dir")):
            continue
        line = model.line_of_parameter("tokenizer_dir")
        said = model.parameters.get("tokenizer_dir", "")
        path = Path(said)
        if not said:
            yield Violation(model.path, "tokenizer_dir has no value", line)
        elif not path.is_absolute():
            yield Violation(model.path, f"tokenizer_dir {said} is not an absolute path", line)
        elif not path.is_dir():
            yield Violation(model.path, f"tokenizer_dir {said} is not a folder", line)
        elif not any((path / name).is_file() for name in TOKENIZER_FILES):
            yield Violation(model.path, f"tokenizer_dir {said} has no tokenizer files", line)


@rule(
    "TRT509",
    "tokenizers-differ",
    "warning",
    "models that tokenize differently",
    "give preprocessing and postprocessing the same tokenizer_dir",
)
def tokenizers_differ(repository: ModelRepository) -> Iterator[Violation]:
    """Text in by one vocabulary, text out by another."""
    first: tuple[str, str] | None = None
    for model, _ in repository.parsed():
        path = model.parameters.get("tokenizer_dir")
        if not path:
            continue
        if first is None:
            first = model.name, path
        elif path != first[1]:
            said = f"tokenizer_dir is {path}, but that of {first[0]} is {first[1]}"
            yield Violation(model.path, said, model.line_of_parameter("tokenizer_dir"))


@rule(
    "TRT510",
    "decoding-mode",
    "error",
    "a decoding_mode that does not exist; the backend logs it and chooses one itself",
    "use one of top_k, top_p, top_k_top_p, beam_search, medusa, redrafter, lookahead, eagle, or none",
)
def decoding_mode(repository: ModelRepository) -> Iterator[Violation]:
    """Silently the default."""
    yield from _wrong(repository, ("decoding_mode",), _one_of(DECODING_MODES))


@rule(
    "TRT511",
    "callee",
    "error",
    "a tensorrt_llm_bls model that calls a model outside the repository",
    "correct the name, or remove the parameter",
)
def callee(repository: ModelRepository) -> Iterator[Violation]:
    """Requests to it would fail."""
    models: Mapping[str, object] = repository.models
    yield from _wrong(repository, _MODEL_NAMES, lambda name: None if name in models else "there is no such model here")


@rule(
    "TRT512",
    "lookahead-sizes",
    "error",
    "lookahead decoding without its three sizes",
    "set lookahead_window_size, lookahead_ngram_size and lookahead_verification_set_size",
)
def lookahead_sizes(repository: ModelRepository) -> Iterator[Violation]:
    """The model does not load."""
    for model, _ in repository.engines():
        needed = (f"lookahead_{each}_size" for each in ("window", "ngram", "verification_set"))
        lacking = [name for name in needed if not model.parameters.get(name)]
        if model.parameters.get("decoding_mode") == "lookahead" and lacking:
            said = f"decoding_mode is lookahead, but {', '.join(lacking)} missing"
            yield Violation(model.path, said, model.line_of_parameter("decoding_mode"))
