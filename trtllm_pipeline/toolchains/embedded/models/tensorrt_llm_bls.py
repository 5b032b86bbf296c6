"""Triton model `tensorrt_llm_bls`: the ensemble's interface, running the other models by business logic scripting.

With `accumulate_tokens` each streamed response carries the text of all tokens so far, else only of the new ones.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # provided by the stub

from trtllm_pipeline.toolchains.embedded.models.requests import FINAL, failed, flag, parameters, response, tensor
from trtllm_pipeline.toolchains.embedded.models.tensors import (
    ENGINE_OUTPUTS,
    ENGINE_PASSED,
    ENGINE_STEP,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_OUTPUTS,
    PREPROCESSING_STEP,
)
from trtllm_pipeline.toolchains.embedded.runtime import RequestError


class TritonPythonModel:
    """Called by Triton's Python stub."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the settings."""
        settings = parameters(args)
        self._accumulate = flag(settings["accumulate_tokens"])
        self._engine = settings["tensorrt_llm_model_name"]
        self._decoupled = flag(settings["decoupled"])
        self._pool = ThreadPoolExecutor(int(settings["threads"]), thread_name_prefix="bls")
        self._closing = threading.Event()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start every request; each is answered from a thread of its own."""
        for request in requests:
            self._pool.submit(self._answer, request, request.get_response_sender())

    def finalize(self) -> None:
        """Wait for what runs."""
        self._closing.set()
        self._pool.shutdown(wait=True)

    def _answer(self, request: Any, sender: Any) -> None:
        try:
            last = None
            for answer in self._responses(request, sender):
                if last is not None:
                    sender.send(last)
                last = answer
            sender.send(last, flags=FINAL) if last is not None else sender.send(flags=FINAL)
        except Exception as error:  # noqa: BLE001  the client must hear of whatever happened
            sender.send(failed(error), flags=FINAL)
