"""Triton model `tensorrt_llm_bls`: the ensemble's interface, running the other models by business logic scripting.

With `accumulate_tokens` each streamed response carries the text of all tokens so far, else only of the new ones;
`num_output_tokens` counts the new ones in both cases.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # provided by the stub

from trtllm_pipeline.tensorrt.embedded.models import messages, tensors

_KEEP_S = 5.0


class TritonPythonModel:
    """Called by Triton's Python stub."""

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = messages.parameters(args)
        self._accumulate = messages.flag(settings["accumulate_tokens"])
        self._engine = settings["tensorrt_llm_model_name"]
        self._decoupled = pb.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self._pool = ThreadPoolExecutor(int(settings["threads"]), thread_name_prefix="bls")
        self._closing = threading.Event()
        self._kept: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start every request, each on a separate thread."""
        for request in requests:
            self._pool.submit(self._answer, request, request.get_response_sender())

    def finalize(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True)

    def _answer(self, request: Any, sender: Any) -> None:
        try:
            # Triton ignores a final flag after the only response of a model that is not decoupled.
            for answer in self._responses(request, sender):
                sender.send(answer, flags=0 if self._decoupled else messages.FINAL)
            if self._decoupled:
                sender.send(flags=messages.FINAL)
        except CallError as error:
            sender.send(pb.InferenceResponse(error=error.cause), flags=messages.FINAL)
        except Exception as error:  # noqa: BLE001  the client must get every error
            sender.send(messages.failed(error), flags=messages.FINAL)

    def _responses(self, request: Any, sender: Any) -> Iterator[Any]:
        messages.refuse_parameters(request)
        given = {each.name(): each for each in request.inputs()}
        wanted = messages.requested_outputs(request)
        encoded = self._call(
            "preprocessing",
            [_renamed(name, given[client]) for name, client in tensors.PREPROCESSING_STEP.items() if client in given],
            tensors.PREPROCESSING_OUTPUTS,
        )
        inputs = [_renamed(name, encoded[source]) for name, source in tensors.ENGINE_STEP.items()]
        inputs += [_renamed(name, given[client]) for name, client in tensors.ENGINE_PASSED.items() if client in given]
        # The engine ends a request by its id, so a request without one gets a new id.
        name = request.request_id() or uuid.uuid4().hex
        streamed = "stream" in given and bool(given["stream"].as_numpy().any())
        earlier: list[dict[str, Any]] = []
        stopping = False
        for outputs in self._generate(inputs, name):
            if not stopping and (sender.is_cancelled() or self._closing.is_set()):
                stopping = True
                self._stop(inputs, name)
            if streamed and self._accumulate:
                earlier.append(outputs)
                outputs = _joined(earlier)
            decoded = self._call(
                "postprocessing",
                [
                    _renamed("TOKENS_BATCH", outputs["output_ids"]),
                    _renamed("SEQUENCE_LENGTH", outputs["sequence_length"]),
                ],
                tensors.POSTPROCESSING_OUTPUTS,
            )
            kept = [outputs[each.name] for each in tensors.ENGINE_OUTPUTS[2:] if each.name in outputs]
            yield messages.response([_renamed("text_output", decoded["OUTPUT"]), *kept], wanted)

    def _generate(self, inputs: Sequence[Any], name: str) -> Iterator[dict[str, Any]]:
        wanted = [each.name for each in tensors.ENGINE_OUTPUTS]
        call = pb.InferenceRequest(
            model_name=self._engine, inputs=list(inputs), requested_output_names=wanted, request_id=name
        )
        nothing = True
        answers = call.exec(decoupled=True) if self._decoupled else [call.exec()]
        try:
            for answer in answers:
                if outputs := _outputs(answer):  # the final, empty response has none
                    nothing = False
                    yield outputs
        finally:
            self._keep(answers)
        if nothing:  # a lost response must not look like an empty text
            raise RuntimeError(f"{self._engine} ended request {name} without a response")

    def _keep(self, answers: Any) -> None:
        """Keep the responses to a call for some time after its end.

        A thread of the stub releases its own reference to them shortly after, without Python's lock. If that reference were the
        last one, it would free Python objects, and Python 3.12 would crash.
        """
        now = time.monotonic()
        with self._lock:
            self._kept.append((now, answers))
            while self._kept[0][0] < now - _KEEP_S:
                self._kept.popleft()

    def _stop(self, inputs: Sequence[Any], name: str) -> None:
        needed = [each for each in inputs if each.name() in {"input_ids", "input_lengths", "request_output_len"}]
        batch = len(needed[0].as_numpy())
        for _ in self._generate([*needed, messages.tensor("stop", np.ones((batch, 1)), np.bool_)], name):
            pass

    def _call(self, model: str, inputs: Sequence[Any], outputs: Sequence[tensors.Tensor]) -> dict[str, Any]:
        wanted = [each.name for each in outputs]
        call = pb.InferenceRequest(model_name=model, inputs=list(inputs), requested_output_names=wanted)
        return _outputs(call.exec())


class CallError(Exception):
    """An error response of another model, which is passed on unchanged."""

    def __init__(self, cause: Any) -> None:
        super().__init__(cause.message())
        self.cause = cause


def _outputs(answer: Any) -> dict[str, Any]:
    if answer.has_error():
        raise CallError(answer.error())
    return {each.name(): each for each in answer.output_tensors()}


def _renamed(name: str, given: Any) -> Any:
    return pb.Tensor(name, given.as_numpy())


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One response with the tokens of all. Streamed requests have one row."""
    joined = dict(parts[-1])
    for name, axis in (("output_ids", 2), ("output_log_probs", 2), ("top_log_probs", 1), ("top_token_ids", 1)):
        if name in joined:
            joined[name] = pb.Tensor(name, np.concatenate([part[name].as_numpy() for part in parts], axis=axis))
    joined["sequence_length"] = messages.tensor(
        "sequence_length", [[joined["output_ids"].as_numpy().shape[2]]], np.int32
    )
    return joined
