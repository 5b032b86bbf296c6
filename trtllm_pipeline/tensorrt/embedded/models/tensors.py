"""Names, types and shapes of the tensors of the five models: those of TensorRT-LLM's own Triton repositories.

The tables follow the templates of tensorrtllm_backend v0.16 to v0.19. Later versions call two inputs `seed` and
`min_tokens`: both names are accepted. From 0.20 on, token counts can be requested: `num_output_tokens` is the number of
tokens generated for this response. Over a streamed answer, the responses' numbers add up to the total, even if a response
has no text or, with `accumulate_tokens`, repeats earlier text.

Inputs that this toolchain does not support are declared all the same, so that a request that uses one is rejected with a
message instead of being answered without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

DataType = Literal["BOOL", "INT32", "INT64", "UINT8", "UINT64", "FP16", "FP32", "STRING"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output. `dims` exclude the batch dimension. `scalar` ones reach the model without their 1."""

    name: str
    type: DataType
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    scalar: bool = False
    ragged: bool = False
    neutral: float | None = None
    """For an unsupported input: the only value that may be sent."""


def _scalar(name: str, kind: DataType, *, optional: bool = True, neutral: float | None = None) -> Tensor:
    return Tensor(name, kind, optional=optional, scalar=True, neutral=neutral)


def _ragged(name: str, kind: DataType, *dims: int) -> Tensor:
    return Tensor(name, kind, dims, ragged=True)


SAMPLING: Final[dict[str, tuple[str, DataType]]] = {
    # client's name -> the engine model's name, type
    "end_id": ("end_id", "INT32"),
    "pad_id": ("pad_id", "INT32"),
    "top_k": ("runtime_top_k", "INT32"),
    "top_p": ("runtime_top_p", "FP32"),
    "temperature": ("temperature", "FP32"),
    "length_penalty": ("len_penalty", "FP32"),
    "repetition_penalty": ("repetition_penalty", "FP32"),
    "min_length": ("min_length", "INT32"),
    "min_tokens": ("min_tokens", "INT32"),
    "presence_penalty": ("presence_penalty", "FP32"),
    "frequency_penalty": ("frequency_penalty", "FP32"),
    "random_seed": ("random_seed", "UINT64"),
    "seed": ("seed", "UINT64"),
    "return_log_probs": ("return_log_probs", "BOOL"),
    "return_top_log_probs": ("return_top_log_probs", "INT32"),
    "return_num_input_tokens": ("return_num_input_tokens", "BOOL"),
    "return_num_output_tokens": ("return_num_output_tokens", "BOOL"),
    "exclude_input_in_output": ("exclude_input_in_output", "BOOL"),
    "stream": ("streaming", "BOOL"),
    "stop": ("stop", "BOOL"),
}

GUIDE: Final = (_ragged("guided_decoding_guide_type", "STRING", 1), _ragged("guided_decoding_guide", "STRING", 1))
"""Available through the ensemble and the BLS model under the same names."""

UNSUPPORTED: Final = (
    _scalar("num_return_sequences", "INT32", neutral=1),
    _scalar("beam_width", "INT32", neutral=1),
    _scalar("return_context_logits", "BOOL", neutral=0),
    _scalar("return_generation_logits", "BOOL", neutral=0),
    _scalar("return_perf_metrics", "BOOL", neutral=0),
    _ragged("prompt_embedding_table", "FP16", -1, -1),
    _scalar("prompt_vocab_size", "INT32", neutral=0),
    _scalar("lora_task_id", "UINT64"),
    _ragged("lora_weights", "FP16", -1, -1),
    _ragged("lora_config", "INT32", -1, 3),
)
"""Rejected by the engine model, and available through the ensemble and the BLS model under the same names."""

UNSUPPORTED_ENGINE_ONLY: Final = (
    _ragged("prompt_table_extra_ids", "UINT64", -1),
    _ragged("embedding_bias", "FP32", -1),
    _ragged("draft_input_ids", "INT32", -1),
    _ragged("draft_logits", "FP32", -1, -1),
    _ragged("decoder_input_ids", "INT32", -1),
    _ragged("encoder_input_features", "FP16", -1, -1),
    _scalar("runtime_top_p_decay", "FP32", neutral=1),
)

UNSUPPORTED_TEXT: Final = {
    # client's name -> preprocessing's name
    "decoder_text_input": Tensor("DECODER_QUERY", "STRING"),
    "embedding_bias_words": Tensor("EMBEDDING_BIAS_WORDS", "STRING", (-1,)),
    "embedding_bias_weights": Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,)),
    "prompt_table_extra_id": Tensor("PROMPT_TABLE_EXTRA_ID", "UINT64"),
}

PREPROCESSING_INPUTS: Final = (
    Tensor("QUERY", "STRING", optional=False),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", optional=False),
    Tensor("BAD_WORDS_DICT", "STRING", (-1,)),
    Tensor("STOP_WORDS_DICT", "STRING", (-1,)),
    Tensor("END_ID", "INT32"),
    Tensor("PAD_ID", "INT32"),
    *UNSUPPORTED_TEXT.values(),
)
PREPROCESSING_OUTPUTS: Final = (
    Tensor("INPUT_ID", "INT32", (-1,)),
    Tensor("REQUEST_INPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
    Tensor("STOP_WORDS_IDS", "INT32", (2, -1)),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    Tensor("OUT_END_ID", "INT32"),
    Tensor("OUT_PAD_ID", "INT32"),
)
ENGINE_INPUTS: Final = (
    _ragged("input_ids", "INT32", -1),
    _scalar("input_lengths", "INT32", optional=False),
    _scalar("request_output_len", "INT32", optional=False),
    _ragged("stop_words_list", "INT32", 2, -1),
    _ragged("bad_words_list", "INT32", 2, -1),
    *(_scalar(name, kind) for name, kind in SAMPLING.values()),
    *GUIDE,
    *UNSUPPORTED,
    *UNSUPPORTED_ENGINE_ONLY,
)
COUNTS: Final = (Tensor("num_input_tokens", "INT32"), Tensor("num_output_tokens", "INT32"))
"""Sent if the input `return_` plus their name requests them."""
TOP: Final = (Tensor("top_log_probs", "FP32", (-1, -1)), Tensor("top_token_ids", "INT32", (-1, -1)))
"""Not TensorRT-LLM's: for each token, the `return_top_log_probs` most likely ones, [tokens, most likely first]."""
ENGINE_OUTPUTS: Final = (
    Tensor("output_ids", "INT32", (-1, -1)),
    Tensor("sequence_length", "INT32", (-1,)),
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
    *COUNTS,
    *TOP,
)
POSTPROCESSING_INPUTS: Final = (
    Tensor("TOKENS_BATCH", "INT32", (-1, -1), optional=False),
    Tensor("SEQUENCE_LENGTH", "INT32", (-1,), optional=False),
)
POSTPROCESSING_OUTPUTS: Final = (Tensor("OUTPUT", "STRING", (-1,)),)
TEXT_INPUTS: Final = (
    Tensor("text_input", "STRING", optional=False),
    Tensor("max_tokens", "INT32", optional=False),
    Tensor("bad_words", "STRING", (-1,)),
    Tensor("stop_words", "STRING", (-1,)),
    *(Tensor(name, kind) for name, (_, kind) in SAMPLING.items()),
    *(Tensor(name, item.type, item.dims) for name, item in UNSUPPORTED_TEXT.items()),
    *(Tensor(item.name, item.type, item.dims) for item in (*GUIDE, *UNSUPPORTED)),
)
"""Inputs of the ensemble and of the BLS model."""
TEXT_OUTPUTS: Final = (
    Tensor("text_output", "STRING", (-1,)),
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("batch_index", "INT32"),
    Tensor("sequence_index", "INT32"),
    *COUNTS,
    *TOP,
)

PREPROCESSING_STEP: Final = {
    # tensor of preprocessing -> tensor of the client
    "QUERY": "text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
    "END_ID": "end_id",
    "PAD_ID": "pad_id",
    **{item.name: name for name, item in UNSUPPORTED_TEXT.items()},
}
ENGINE_STEP: Final = {
    # tensor of the engine model -> output of preprocessing
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
}
ENGINE_PASSED: Final = {
    # tensor of the engine model -> tensor of the client, passed through unchanged
    **{engine: name for name, (engine, _) in SAMPLING.items() if engine not in ENGINE_STEP},
    **{item.name: item.name for item in (*GUIDE, *UNSUPPORTED)},
}
