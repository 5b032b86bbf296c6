"""Triton model `postprocessing`: token ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtllm_pipeline.tensorrt.embedded.models import messages
from trtllm_pipeline.tensorrt.embedded.models.text import Text


class TritonPythonModel:
    """Called by Triton's Python stub."""

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = messages.parameters(args)
        self._text = Text(settings["tokenizer_dir"])
        self._skip_special = messages.flag(settings["skip_special_tokens"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return messages.answered(requests, self._decode)

    def _decode(self, request: Any) -> list[Any]:
        tokens, lengths = messages.array(request, "TOKENS_BATCH"), messages.array(request, "SEQUENCE_LENGTH")
        assert tokens is not None
        assert lengths is not None
        texts = [
            [
                self._text.decode(ids[:length].tolist(), skip_special=self._skip_special).encode()
                for ids, length in zip(beams, ends, strict=True)
            ]
            for beams, ends in zip(tokens, lengths, strict=True)
        ]
        return [messages.tensor("OUTPUT", texts, np.object_)]
