"""Triton model `preprocessing`: text to token ids, words to token sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtllm_pipeline.tensorrt.embedded.models import messages
from trtllm_pipeline.tensorrt.embedded.models.tensors import UNSUPPORTED_TEXT
from trtllm_pipeline.tensorrt.embedded.models.text import Text
from trtllm_pipeline.tensorrt.embedded.runtime import RequestError


class TritonPythonModel:
    """Called by Triton's Python stub."""

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = messages.parameters(args)
        self._text = Text(settings["tokenizer_dir"])
        self._special = messages.flag(settings["add_special_tokens"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return messages.answered(requests, self._encode)

    def _encode(self, request: Any) -> list[Any]:
        messages.refuse_parameters(request)
        messages.refuse(request, UNSUPPORTED_TEXT.items())
        queries = messages.array(request, "QUERY")
        assert queries is not None
        batch = len(queries)
        prompts = [
            self._text.encode(messages.text(query), special=self._special) for query in queries.reshape(batch, -1)[:, 0]
        ]
        lengths = [len(prompt) for prompt in prompts]
        ends, fallback = self._text.end_ids, self._text.pad_id
        stop = self._words(request, "STOP_WORDS_DICT", batch)
        end_ids, pad_ids = [], []
        for end, pad, words in zip(
            messages.rows(request, "END_ID", batch), messages.rows(request, "PAD_ID", batch), stop, strict=True
        ):
            if end is None:  # a model may have several; the engine supports one, so the others become stop words
                words += [[other] for other in ends[1:]]
                end = ends[0] if ends else -1
            end_ids.append(end)
            pad_ids.append(pad if pad is not None else end if fallback is None else fallback)
        ids = [prompt + [pad] * (max(lengths) - len(prompt)) for prompt, pad in zip(prompts, pad_ids, strict=True)]
        return [
            messages.tensor("INPUT_ID", ids, np.int32),
            messages.tensor("REQUEST_INPUT_LEN", [[length] for length in lengths], np.int32),
            messages.tensor("BAD_WORDS_IDS", word_lists(self._words(request, "BAD_WORDS_DICT", batch)), np.int32),
            messages.tensor("STOP_WORDS_IDS", word_lists(stop), np.int32),
            messages.tensor(
                "REQUEST_OUTPUT_LEN", [[n] for n in messages.rows(request, "REQUEST_OUTPUT_LEN", batch)], np.int32
            ),
            messages.tensor("OUT_END_ID", [[end] for end in end_ids], np.int32),
            messages.tensor("OUT_PAD_ID", [[pad] for pad in pad_ids], np.int32),
        ]

    def _words(self, request: Any, name: str, batch: int) -> list[list[list[int]]]:
        """The words of each row of the batch as token sequences. Empty words are ignored."""
        values = messages.array(request, name)
        if values is None or values.size == 0:
            return [[] for _ in range(batch)]
        if len(values) != batch:
            raise RequestError(f"{name} has {len(values)} rows; the batch has {batch}")
        encoded = [
            [self._text.encode(messages.text(word), special=False) for word in words if word]
            for words in values.reshape(batch, -1)
        ]
        return [[ids for ids in words if ids] for words in encoded]


def word_lists(batch: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """TensorRT-LLM's format of word lists, [batch, 2, length]: all ids in a row, and below them the end of each word.

    Rows are padded with 0 for ids and -1 for ends. tensorrt_llm.read_word_lists is the inverse.
    """
    flat = [[token for word in words for token in word] for words in batch]
    ends = [[sum(map(len, words[: i + 1])) for i in range(len(words))] for words in batch]
    length = max(1, *map(len, flat))
    return [
        [ids + [0] * (length - len(ids)), offsets + [-1] * (length - len(offsets))]
        for ids, offsets in zip(flat, ends, strict=True)
    ]
