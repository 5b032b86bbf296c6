"""TRT5: parameters of TensorRT-LLM's models.

The C++ backend reads each parameter separately. If it cannot, it uses a default and logs a line. A wrong value here
often does not fail: it is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.models.triton_repository.lint.known_names import LOOSE, advice, known_names, nearest
from trtllm_pipeline.models.triton_repository.lint.model_repository import Model, ModelRepository, Violation
from trtllm_pipeline.models.triton_repository.lint.rule import rule

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
"""Any of these shows that a Hugging Face directory has a tokenizer."""
_FRACTIONS: Final = ("kv_cache_free_gpu_mem_fraction", "cross_kv_cache_fraction", "lora_cache_gpu_memory_fraction")
_FROM_ONE: Final = ("max_beam_width", "num_nodes")
_MODEL_NAMES: Final = ("tensorrt_llm_model_name", "tensorrt_llm_draft_model_name", "multimodal_encoders_name")


_NAMED_OTHERWISE: Final = {"gpt_model_path": "engine_dir", "encoder_model_path": "encoder_engine_dir"}
TAKEN_FOR_UNSET: Final[Mapping[str, str]] = {
    name: name
    for name in (
        *_FRACTIONS,
        *known_names().switches,
        *known_names().numbers,
        *_MODEL_NAMES,
        *("batch_scheduler_policy", "decoding_mode", "medusa_choices", "eagle_choices", "gpu_weights_percent"),
        *("max_attention_window_size", "gpu_device_ids", "participant_ids", "lora_prefetch_dir", "max_num_images"),
        *("guided_decoding_backend", "xgrammar_tokenizer_info_path", "visual_model_path", "multimodal_model_path"),
    )
} | _NAMED_OTHERWISE
"""Parameter -> its placeholder in TensorRT-LLM's templates, if the model uses a default for an unfilled placeholder.
Other rules check required parameters.
"""


def _wrong(model: Model, names: Iterable[str], fault: Callable[[str], str | None]) -> Iterator[Violation]:
    """Parameters with these names and a value for which `fault` returns a message."""
    for name in names:
        value = model.parameters.get(name, "")
        if value and (message := fault(value)):
            yield model.at_parameter(name, f"{name} is {value!r}; {message}")


def _one_of(model: Model, name: str, known: tuple[str, ...]) -> Iterator[Violation]:
    message = f"expected one of {', '.join(known)}"
    return _wrong(model, (name,), lambda value: None if value in known else message)


@rule("TRT501", "use inflight_fused_batching; V1 turns in-flight batching off", each=ModelRepository.parsed)
def batching_strategy(model: Model, _config: Any) -> Iterator[Violation]:
    """A gpt_model_type that does not exist."""
    return _one_of(model, "gpt_model_type", BATCHING)


@rule("TRT502", "use guaranteed_no_evict or max_utilization", each=ModelRepository.parsed)
def scheduler_policy(model: Model, _config: Any) -> Iterator[Violation]:
    """A batch_scheduler_policy that does not exist; the backend logs it and uses guaranteed_no_evict."""
    return _one_of(model, "batch_scheduler_policy", POLICIES)


@rule(
    "TRT503",
    "fractions refer to the memory that is free after loading the engine; 0.9 is the backend's default for the KV cache",
    each=ModelRepository.parsed,
)
def fraction(model: Model, _config: Any) -> Iterator[Violation]:
    """A memory fraction that is not above 0 and at most 1."""
    yield from _wrong(model, _FRACTIONS, _not_a_fraction)
    # 0 for weights is valid: they are streamed.
    yield from _wrong(model, ("gpu_weights_percent",), lambda value: _not_a_fraction(value, zero=True))


def _not_a_fraction(value: str, *, zero: bool = False) -> str | None:
    try:
        return None if 0 < float(value) <= 1 or (zero and float(value) == 0) else "expected above 0, at most 1"
    except ValueError:
        return "expected a number"


@rule(
    "TRT504",
    "set only one of max_tokens_in_paged_kv_cache and kv_cache_free_gpu_mem_fraction, unless you mean both",
    severity="note",
    each=ModelRepository.parsed,
)
def two_kv_limits(model: Model, _config: Any) -> Iterator[Violation]:
    """Two limits for the KV cache; the smaller one wins."""
    limits = ("max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction")
    if all(map(model.parameters.get, limits)):
        yield model.at_parameter(limits[0], f"{' and '.join(limits)} are both set")


@rule("TRT505", "write true or false", each=ModelRepository.parsed)
def switch(model: Model, _config: Any) -> Iterator[Violation]:
    """A switch that is neither true nor false and has no effect."""
    known = ("true", "false", "1", "0")
    return _wrong(
        model, known_names().switches, lambda value: None if value.lower() in known else "expected true or false"
    )


@rule("TRT506", "write a whole number, or remove the parameter", each=ModelRepository.parsed)
def whole_number(model: Model, _config: Any) -> Iterator[Violation]:
    """A number that is not whole, negative, or zero where at least 1 is required; it has no effect or stops the model."""
    message = "expected a whole number of at least"
    yield from _wrong(
        model, known_names().numbers, lambda value: None if value.isascii() and value.isdigit() else f"{message} 0"
    )
    yield from _wrong(model, _FROM_ONE, lambda value: None if value.strip("0") else f"{message} 1")


@rule("TRT507", "set triton_backend to tensorrtllm (C++) or python", each=ModelRepository.engines)
def triton_backend(model: Model, config: Any) -> Iterator[Violation]:
    """An engine model whose backend is neither tensorrtllm nor python."""
    if config.backend and config.backend not in BACKENDS:
        yield model.at("backend", f"backend is {config.backend!r}; expected {' or '.join(BACKENDS)}")


@rule(
    "TRT508",
    "give the absolute path of the model's Hugging Face directory, as the server sees it; anything else is treated as "
    "the name of a model to download",
    each=ModelRepository.parsed,
)
def tokenizer(model: Model, config: Any) -> Iterator[Violation]:
    """A tokenizer_dir that is missing, relative, or without tokenizer files."""
    given = model.parameters.get("tokenizer_dir", "")
    if "tokenizer_dir" not in config.parameters or (model.is_engine and not given):
        return
    path = Path(given)
    if not given:
        yield model.at_parameter("tokenizer_dir", "tokenizer_dir has no value")
    elif not path.is_absolute():
        yield model.at_parameter("tokenizer_dir", f"tokenizer_dir {given} is not an absolute path")
    elif not path.is_dir():
        yield model.at_parameter("tokenizer_dir", f"tokenizer_dir {given} is not a directory")
    elif not any((path / name).is_file() for name in TOKENIZER_FILES):
        yield model.at_parameter("tokenizer_dir", f"tokenizer_dir {given} has no tokenizer files")


@rule("TRT509", "give preprocessing and postprocessing the same tokenizer_dir", severity="warning")
def tokenizers_differ(repository: ModelRepository) -> Iterator[Violation]:
    """Models that tokenize differently."""
    having = [model for model, _ in repository.parsed() if model.parameters.get("tokenizer_dir")]
    for model in having[1:]:
        path, first = (each.parameters["tokenizer_dir"] for each in (model, having[0]))
        if path != first:
            message = f"tokenizer_dir is {path}, but that of {having[0].name} is {first}"
            yield model.at_parameter("tokenizer_dir", message)


@rule(
    "TRT510",
    "use one of top_k, top_p, top_k_top_p, beam_search, medusa, redrafter, lookahead, eagle, or none",
    each=ModelRepository.parsed,
)
def decoding_mode(model: Model, _config: Any) -> Iterator[Violation]:
    """A decoding_mode that does not exist; the backend logs it and chooses one itself."""
    return _one_of(model, "decoding_mode", DECODING_MODES)


@rule("TRT511", "correct the name, or remove the parameter")
def callee(repository: ModelRepository) -> Iterator[Violation]:
    """A tensorrt_llm_bls model that calls a model outside the repository."""
    for model, _ in repository.parsed():
        yield from _wrong(
            model,
            _MODEL_NAMES,
            lambda name: None if name in repository.models else "this model does not exist in the repository",
        )


@rule(
    "TRT512",
    "set lookahead_window_size, lookahead_ngram_size and lookahead_verification_set_size",
    each=ModelRepository.engines,
)
def lookahead_sizes(model: Model, _config: Any) -> Iterator[Violation]:
    """Lookahead decoding without its three sizes."""
    needed = (f"lookahead_{each}_size" for each in ("window", "ngram", "verification_set"))
    lacking = [name for name in needed if not model.parameters.get(name)]
    if model.parameters.get("decoding_mode") == "lookahead" and lacking:
        yield model.at_parameter("decoding_mode", f"decoding_mode is lookahead, but {', '.join(lacking)} missing")


@rule(
    "TRT513",
    "correct the name, or remove the parameter: the model works with the default",
    severity="warning",
    each=ModelRepository.parsed,
)
def parameter_unread(model: Model, config: Any) -> Iterator[Violation]:
    """A parameter that TensorRT-LLM's model does not read: misspelled, or another program's name."""
    names = known_names()
    ours = {*names.tensorrtllm, *names.python}
    if config.backend == "tensorrtllm":
        for key in sorted(set(config.parameters) - set(names.tensorrtllm)):
            near = nearest(key, names.tensorrtllm, names.instead["tensorrtllm"], LOOSE)
            yield model.at_parameter(key, f"the tensorrtllm backend does not read {key}{advice(near)}")
    elif config.backend == "python" and ours & set(config.parameters):
        # People extend these models.
        for key in sorted(set(config.parameters) - ours):
            near = nearest(key, ours, {})
            if near is not None and not re.search(rf"\b{re.escape(key)}\b", model.code):
                yield model.at_parameter(key, f"the model's code does not mention {key}{advice(near)}")
