"""Triton model `tensorrt_llm`: token ids to token ids, on an engine of the embedded toolchain.

Requests are passed to the runtime and answered from its threads, so the running batch accepts new ones at any time. A
streamed response never ends within a character: such tokens wait for the next one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # provided by the stub

from trtllm_pipeline.tensorrt.embedded.models import messages, tensors
from trtllm_pipeline.tensorrt.embedded.models.text import Characters, Text
from trtllm_pipeline.tensorrt.embedded.runtime import Event, Finish, Generation, RequestError, Runtime, Sampling
from trtllm_pipeline.tensorrt.servers.command_lines import THREADS_VARIABLE

_SAMPLING = {
    # input -> field of Sampling; the later of two names for the same thing wins
    "temperature": "temperature",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "random_seed": "random_seed",
    "seed": "random_seed",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_length": "min_length",
    "min_tokens": "min_length",
    "return_log_probs": "return_log_probs",
    "return_top_log_probs": "top_log_probs",
}
_ANY_OBJECT = '{"type": "object"}'


class TritonPythonModel:
    """Called by Triton's Python stub."""

    def initialize(self, args: Mapping[str, str]) -> None:
        settings = messages.parameters(args)
        self._exclude_input = messages.flag(settings["exclude_input_in_output"])
        self._decoupled = pb.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self._text = Text(settings["tokenizer_dir"])
        self._runtime = Runtime(
            Path(settings["gpt_model_path"]),
            threads=int(os.environ.get(THREADS_VARIABLE) or 0),
            enable_kv_cache_reuse=messages.flag(settings["enable_kv_cache_reuse"]),
        )
        self._lock = threading.Lock()
        self._answers: dict[str, list[PendingRequest]] = {}

    def execute(self, requests: Sequence[Any]) -> None:
        """Start every request. Responses come from the runtime's threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except Exception as error:  # noqa: BLE001  one bad request must not fail the others
                sender.send(messages.failed(error), flags=messages.FINAL)

    def finalize(self) -> None:
        """End all requests and free the engine: a remaining thread would keep the stub from exiting."""
        self._runtime.close()

    def _start(self, request: Any, sender: Any) -> None:
        name = request.request_id()
        lengths = messages.array(request, "input_lengths")
        assert lengths is not None
        batch = len(lengths)
        if any(messages.rows(request, "stop", batch)):
            self._stop(name, sender, messages.requested_outputs(request))
            return
        messages.refuse(
            request, ((each.name, each) for each in (*tensors.UNSUPPORTED, *tensors.UNSUPPORTED_ENGINE_ONLY))
        )
        prompts = _prompts(request, messages.rows(request, "input_lengths", batch))
        samplings = _samplings(request, batch)
        output_lengths = messages.rows(request, "request_output_len", batch)
        for prompt, count, sampling in zip(prompts, output_lengths, samplings, strict=True):
            self._runtime.check(len(prompt), count, sampling)
        streaming = bool(messages.rows(request, "streaming", batch)[0])
        if streaming and not self._decoupled:
            raise RequestError("streaming needs a repository written with decoupled set")
        if streaming and batch > 1:
            raise RequestError(f"a streamed request has 1 row, this one has {batch}; send {batch} requests")
        exclude = messages.rows(request, "exclude_input_in_output", batch)[0]
        pads = messages.rows(request, "pad_id", batch)
        counts = [each.name for each in tensors.COUNTS if any(messages.rows(request, f"return_{each.name}", batch))]
        answer = PendingRequest(
            name,
            sender,
            [
                PendingRow(
                    [] if streaming or (self._exclude_input if exclude is None else exclude) else list(prompt),
                    Characters(self._text),
                    sampling.return_log_probs,
                    sampling.top_log_probs,
                    0 if pad is None else pad,
                    len(prompt),
                )
                for prompt, sampling, pad in zip(prompts, samplings, pads, strict=True)
            ],
            streaming,
            counts,
            messages.requested_outputs(request),
            self._forget,
        )
        with self._lock:
            self._answers.setdefault(name, []).append(answer)
        for row, prompt, count, sampling in zip(answer.sequences, prompts, output_lengths, samplings, strict=True):
            generation = self._runtime.submit(prompt, count, sampling, answer.listener(row))
            answer.generations.append(generation)

    def _stop(self, name: str, sender: Any, wanted: Collection[str]) -> None:
        """End the requests of this id. They end like cancelled ones. The stop request gets an empty response."""
        if not name:
            raise RequestError("stop needs the id of the request to end as its own request id")
        with self._lock:
            answers = list(self._answers.get(name, ()))
        for answer in answers:
            answer.cancel()
        ids = messages.tensor("output_ids", np.zeros((1, 1, 0)), np.int32)
        length = messages.tensor("sequence_length", [[0]], np.int32)
        sender.send(messages.response([ids, length], wanted), flags=messages.FINAL)

    def _forget(self, answer: PendingRequest) -> None:
        with self._lock:
            running = self._answers[answer.name]
            running.remove(answer)
            if not running:
                del self._answers[answer.name]


@dataclass(slots=True, eq=False)
class PendingRow:
    """One sequence of a request: the part that has not been sent."""

    tokens: list[int]
    characters: Characters
    log_probs_wanted: bool
    top_wanted: int
    pad_id: int
    input_tokens: int
    output_tokens: int = 0
    """Generated tokens among `tokens`, which may start with the prompt."""
    log_probs: list[float] = field(default_factory=list)
    top: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    cum_log_prob: float = 0.0
    finished: bool = False


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One Triton request in progress: collects events of its rows and sends responses."""

    name: str
    sender: Any
    sequences: list[PendingRow]
    streaming: bool
    counts: Sequence[str]
    """Names of the requested token counts."""
    wanted: Collection[str]
    """Names of the outputs that the client requested."""
    forget: Callable[[PendingRequest], None]
    """Called once, after the last response."""
    generations: list[Generation] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: str | None = None

    def cancel(self) -> None:
        """End all rows early."""
        for generation in self.generations:
            generation.cancel()

    def listener(self, row: PendingRow) -> Callable[[Event], None]:

        def on_event(event: Event) -> None:
            with self.lock:
                self._take(row, event)

        return on_event

    def _take(self, row: PendingRow, event: Event) -> None:
        whole = True
        if event.token is not None:
            row.tokens.append(event.token)
            row.output_tokens += 1
            whole = row.characters.whole(event.token)
            if event.log_prob is not None:
                row.log_probs.append(event.log_prob)
                row.cum_log_prob += event.log_prob
                row.top.append(event.top)
        if event.finish is not None:
            row.finished = True
            if event.finish is Finish.ERROR:
                self.error = event.error
                self.cancel()
        done = all(each.finished for each in self.sequences)
        if done and self.error is not None:
            self.sender.send(messages.failed(RuntimeError(self.error)), flags=messages.FINAL)
        elif done:
            self.sender.send(_response(self.sequences, self.counts, self.wanted), flags=messages.FINAL)
        elif self.sender.is_cancelled():
            self.cancel()
        elif self.streaming and whole:
            self.sender.send(_response(self.sequences, self.counts, self.wanted))
            row.tokens, row.output_tokens, row.log_probs, row.top = [], 0, [], []
        if done:
            self.forget(self)


def _prompts(request: Any, lengths: Sequence[int]) -> list[list[int]]:
    ids = messages.array(request, "input_ids")
    if ids is None:
        raise RequestError("input_ids is missing")
    if len(ids) != len(lengths):
        raise RequestError(f"input_ids has {len(ids)} rows; input_lengths has {len(lengths)}")
    width = ids.shape[-1]
    for length in lengths:
        if not 0 <= length <= width:
            raise RequestError(f"input_lengths has {length} tokens; input_ids has {width}")
    return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


def _samplings(request: Any, batch: int) -> list[Sampling]:
    settings: list[dict[str, Any]] = [{} for _ in range(batch)]
    for name, attribute in _SAMPLING.items():
        for setting, value in zip(settings, messages.rows(request, name, batch), strict=True):
            if value is not None:
                setting[attribute] = value
    ends = messages.rows(request, "end_id", batch)
    words = [read_word_lists(messages.array(request, f"{kind}_words_list"), batch) for kind in ("stop", "bad")]
    guides = _schemas(request, batch)
    return [
        Sampling(
            **setting, json_schema=guide, end_id=None if end is None or end < 0 else end, stop_words=stop, bad_words=bad
        )
        for setting, guide, end, stop, bad in zip(settings, guides, ends, *words, strict=True)
    ]


def _schemas(request: Any, batch: int) -> list[str | None]:
    """The JSON schema that guides each row. None for a row without a guide."""
    kinds, guides = (messages.rows(request, each.name, batch) for each in tensors.GUIDE)
    return [
        _schema(messages.text(kind or ""), messages.text(guide or ""))
        for kind, guide in zip(kinds, guides, strict=True)
    ]


def _schema(kind: str, guide: str) -> str | None:
    if kind == "json_schema" or not kind:
        return guide or None
    if kind == "json":
        return _ANY_OBJECT
    raise RequestError(f"guided_decoding_guide_type {kind} is not supported; expected json or json_schema")


def read_word_lists(lists: np.ndarray[Any, Any] | None, batch: int) -> list[tuple[tuple[int, ...], ...]]:
    """Word lists in TensorRT-LLM's form, [batch, 2, length], as token sequences; see preprocessing.word_lists."""
    if lists is None or lists.size == 0:
        return [()] * batch
    if len(lists) != batch:
        raise RequestError(f"a word list has {len(lists)} rows; the batch has {batch}")
    result = []
    for ids, ends in lists:
        stops = [int(end) for end in ends if end > 0]
        pairs = zip([0, *stops], stops, strict=False)  # every word starts where the one before it ends
        result.append(tuple(tuple(ids[start:stop].tolist()) for start, stop in pairs if stop > start))
    return result


def _response(sequences: Sequence[PendingRow], counts: Sequence[str], wanted: Collection[str]) -> Any:
    """output_ids [batch, 1, length] padded with pad ids, sequence_length [batch, 1], and the requested outputs."""
    width = max(len(row.tokens) for row in sequences)
    outputs = [
        messages.tensor(
            "output_ids", [[row.tokens + [row.pad_id] * (width - len(row.tokens))] for row in sequences], np.int32
        ),
        messages.tensor("sequence_length", [[len(row.tokens)] for row in sequences], np.int32),
        messages.tensor("batch_index", [[index] for index in range(len(sequences))], np.int32),
        messages.tensor("sequence_index", [[0] for _ in sequences], np.int32),
    ]
    if any(row.log_probs_wanted for row in sequences):
        made = max(len(row.log_probs) for row in sequences)
        log_probs = [[row.log_probs + [0.0] * (made - len(row.log_probs))] for row in sequences]
        outputs.append(messages.tensor("output_log_probs", log_probs, np.float32))
        outputs.append(messages.tensor("cum_log_probs", [[row.cum_log_prob] for row in sequences], np.float32))
    if count := max(row.top_wanted for row in sequences):
        made = max(len(row.top) for row in sequences)
        top = np.zeros((len(sequences), made, count, 2))
        for index, row in enumerate(sequences):
            for position, best in enumerate(row.top):
                top[index, position, : len(best)] = best
        outputs.append(messages.tensor("top_token_ids", top[..., 0], np.int32))
        outputs.append(messages.tensor("top_log_probs", top[..., 1], np.float32))
    numbers = {
        "num_input_tokens": [[row.input_tokens] for row in sequences],
        "num_output_tokens": [[row.output_tokens] for row in sequences],
    }
    outputs += [messages.tensor(name, numbers[name], np.int32) for name in counts]
    return messages.response(outputs, wanted)
