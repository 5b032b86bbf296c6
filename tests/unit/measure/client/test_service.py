from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2, service_pb2

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.processes.process import running_since
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.client.session import (
    Answer,
    GenerationRequest,
    Option,
    ServerSentEvents,
    TextChunk,
    deltas,
)
from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.triton import (
    PERF_METRICS,
    Client,
    ServedModel,
    failure_class,
    infer_request,
    text_output,
    token_count,
)
from trtllm_pipeline.models.triton_repository import model_config

EVENTS = ['{"text_output": "é😀"}', "two\nlines", "", "last"]
STREAM = "".join(
    "".join(f"data: {line}{end}" for line in event.split("\n")) + f": comment{end}id:1{end}{end}"
    for event, end in zip(EVENTS, ("\n", "\r\n", "\n", "\r\n"), strict=True)
).encode()
INPUTS = {"text_input": "TYPE_STRING", "max_tokens": "TYPE_INT32", "top_k": "TYPE_INT32"}
MODEL = ServedModel("ensemble", batched=True, decoupled=True, inputs=INPUTS, accumulates=False, counts=False)


@pytest.mark.parametrize("first", range(len(STREAM) + 1))
def test_events_survive_every_cut(first: int) -> None:
    for second in range(first, len(STREAM) + 1):
        parser = ServerSentEvents()
        parts = STREAM[:first], STREAM[first:second], STREAM[second:]
        got = [event.data.decode() for part in parts for event in parser.feed(part)]
        assert got == EVENTS
        assert parser.error is None


ERRORS = b"event: error\ndata: {}\n\ndata: 1\r\n\r\nevent: error\n\ndata: 2\n\ndata:3\revent:error\r\r"
IN_PLACE = b'\r\n {\r\n"error": {"message":\n "no"}}'


@pytest.mark.parametrize("cut", range(len(ERRORS)))
def test_an_event_that_is_an_error_survives_every_cut(cut: int) -> None:
    parser = ServerSentEvents()
    got = [tuple(event) for part in (ERRORS[:cut], ERRORS[cut:]) for event in parser.feed(part)]
    assert got == [(b"{}", True), (b"1", False), (b"2", False), (b"3", True)]


@pytest.mark.parametrize("cut", range(len(IN_PLACE)))
def test_json_in_place_of_a_stream_survives_every_cut(cut: int) -> None:
    parser = ServerSentEvents()
    assert [*parser.feed(IN_PLACE[:cut]), *parser.feed(IN_PLACE[cut:])] == []
    assert parser.error == "no"


@given(st.lists(st.text(max_size=5), max_size=8))
def test_deltas_join_to_the_final_text(parts: list[str]) -> None:
    whole = ["".join(parts[: count + 1]) for count in range(len(parts))]
    got = list(deltas([TextChunk(index, text, index + 1) for index, text in enumerate(whole)]))
    assert "".join(event.text for event in got) == "".join(parts)
    assert [event[:3] for event in got] == [(index, part, index + 1) for index, part in enumerate(parts) if part]


def test_a_character_that_was_incomplete_counts_when_it_is_whole() -> None:
    events = [TextChunk(1, "a\ufffd", 2), TextChunk(2, "a\ufffd", 3), TextChunk(3, "a😀b", 5)]
    assert [event[:3] for event in deltas(events)] == [(1, "a", 2), (3, "😀b", 5)]


def test_an_answer_adds_up_what_the_server_counts() -> None:
    answer = Answer()
    for now_ns, text, tokens in ((1, "", 2), (2, "a", 1), (3, "b", 1), (4, "", 1), (5, "", None)):
        answer.received(now_ns, text, tokens)
    assert (answer.first_byte_ns, answer.text, answer.output_tokens) == (1, "ab", 5)
    assert [event[:3] for event in answer.events] == [(2, "a", 3), (3, "b", 4)]
    uncounted = Answer()
    uncounted.received(1, "a", None)
    assert (uncounted.events, uncounted.output_tokens) == ([TextChunk(1, "a", None)], None)


def test_counts_are_asked_for_where_they_can_be() -> None:
    asking = {**INPUTS, "return_num_output_tokens": "TYPE_BOOL"}
    request = GenerationRequest("x", 1)
    assert "return_num_output_tokens" not in MODEL.tensors(request, stream=True)
    model = dataclasses.replace(MODEL, counts=True)
    assert "return_num_output_tokens" not in model.tensors(request, stream=True), "sent unasked"
    assert dataclasses.replace(model, inputs=asking).tensors(request, stream=True)["return_num_output_tokens"] is True


def test_counts_are_found_by_name_raw_or_typed() -> None:
    response = service_pb2.ModelInferResponse()
    assert token_count(response, "num_output_tokens") is None
    response.outputs.add(name="text_output")
    response.outputs.add(name="num_output_tokens").contents.int_contents.append(3)
    assert token_count(response, "num_output_tokens") == 3
    response.raw_output_contents.extend([b"", b"\x02\x01\0\0"])
    assert token_count(response, "num_output_tokens") == 258


@pytest.mark.parametrize(("text", "count"), [(b"258", 258), (b"0", 0), (b"0.5", None), (b"", None), (b"-1", None)])
def test_counts_may_be_texts(text: bytes, count: int | None) -> None:
    """TensorRT-LLM's llmapi model sends speculative decoding counts as text, but its configuration declares integers."""
    raw, typed = service_pb2.ModelInferResponse(), service_pb2.ModelInferResponse()
    raw.outputs.add(name="total_draft_tokens", datatype="BYTES")
    raw.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
    typed.outputs.add(name="total_draft_tokens", datatype="BYTES").contents.bytes_contents.append(text)
    for response in (raw, typed):
        if count is not None:
            assert token_count(response, "total_draft_tokens") == count
            continue
        with pytest.raises(ProtocolError, match="total_draft_tokens"):
            token_count(response, "total_draft_tokens")


@pytest.mark.parametrize("name", ["return_perf_metrics", "sampling_param_return_perf_metrics"])
def test_drafts_are_told_of_a_whole_answer_where_they_are_asked_for(name: str) -> None:
    text = f"""
        input {{ name: "{name}" data_type: TYPE_BOOL dims: [1] }}
        input {{ name: "text_input" data_type: TYPE_STRING dims: [1] }}
        input {{ name: "max_tokens" data_type: TYPE_INT32 dims: [1] }}
        output {{ name: "total_draft_tokens" data_type: TYPE_INT32 dims: [1] }}
        output {{ name: "total_accepted_draft_tokens" data_type: TYPE_INT32 dims: [1] }}
    """
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    model = ServedModel.of(config)
    assert model.tells_drafts
    assert model.tensors(GenerationRequest("x", 1, {PERF_METRICS: True}), stream=False)[name] is True
    del config.output[-1]
    assert not ServedModel.of(config).tells_drafts


def test_tensors_are_packed_as_kserve_says() -> None:
    request = infer_request(MODEL, {"text_input": "é", "max_tokens": -2, "top_k": 1}, request_id="7")
    assert request.id == "7"
    assert [(t.name, t.datatype, list(t.shape)) for t in request.inputs] == [
        ("text_input", "BYTES", [1, 1]),
        ("max_tokens", "INT32", [1, 1]),
        ("top_k", "INT32", [1, 1]),
    ]
    assert list(request.raw_input_contents) == [b"\x02\0\0\0\xc3\xa9", b"\xfe\xff\xff\xff", b"\x01\0\0\0"]


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        ("TYPE_INT32", "abc", "INT32, not 'abc'"),
        ("TYPE_INT32", 1.5, "INT32, not 1.5"),
        ("TYPE_INT32", 2**31, "INT32, not 2147483648"),
        ("TYPE_FP16", 1e9, "FP16, not 1000000000.0"),
        ("TYPE_BOOL", "no", "BOOL, not 'no'"),
        ("TYPE_FP32", {"a": 1}, "FP32, not {'a': 1}"),
    ],
)
def test_a_value_of_another_type_is_told(kind: str, value: Any, told: str) -> None:
    model = dataclasses.replace(MODEL, inputs={**MODEL.inputs, "top_k": kind})
    with pytest.raises(ServerError, match=re.escape(f"input top_k of ensemble is {told}")) as caught:
        infer_request(model, {"top_k": value}, request_id="1")
    assert caught.value.failure is FailureClass.USER


def test_options_the_model_lacks_are_named() -> None:
    with pytest.raises(ServerError, match="ensemble has no input seed; it has max_tokens, text_input, top_k"):
        MODEL.tensors(GenerationRequest("x", 1, {"seed": 3}), stream=False)
    assert "stream" not in MODEL.tensors(GenerationRequest("x", 1), stream=True)
    # The name that was asked for, not that of another release.
    with pytest.raises(ServerError, match="has no input random_seed;"):
        MODEL.tensors(GenerationRequest("x", 1, {"random_seed": 3}), stream=False)
    with pytest.raises(ServerError, match="has no input min_tokens;") as caught:
        MODEL.tensors(GenerationRequest("x", 1, {"min_tokens": 1}), stream=False)
    assert "settings.serve.frontend: trtllm_serve" in str(caught.value.hint)


# The three sets of names: the five models', theirs since 0.20, and the llmapi model's.
NAMES = ("max_tokens", "temperature", "top_k", "top_p", "random_seed", "stop_words", "stream")
SINCE_0_20 = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop_words", "stream")
LLMAPI = (
    *(f"sampling_param_{name}" for name in ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop")),
    "streaming",
)


@pytest.mark.parametrize("names", [NAMES, SINCE_0_20, LLMAPI])
def test_requests_use_the_names_that_a_model_has(names: tuple[str, ...]) -> None:
    types = ("TYPE_INT32", "TYPE_FP32", "TYPE_INT32", "TYPE_FP32", "TYPE_UINT64", "TYPE_STRING", "TYPE_BOOL")
    inputs = {"text_input": "TYPE_STRING", **dict(zip(names, types, strict=True))}
    model = dataclasses.replace(MODEL, inputs=inputs)
    options: dict[str, Option] = {"temperature": 0.5, "top_k": 2, "top_p": 0.9, "random_seed": 7, "stop_words": ("x",)}
    values = (8, 0.5, 2, 0.9, 7, ("x",))
    unary = {"text_input": "hi", **dict(zip(names, values, strict=False))}
    assert model.tensors(GenerationRequest("hi", 8, options), stream=False) == unary
    assert model.tensors(GenerationRequest("hi", 8, options), stream=True) == {**unary, names[-1]: True}
    request = infer_request(model, model.tensors(GenerationRequest("hi", 8, options), stream=True), request_id="1")
    assert {tensor.name for tensor in request.inputs} == inputs.keys()


def test_text_output_is_found_by_name_raw_or_typed() -> None:
    response = service_pb2.ModelInferResponse()
    assert text_output(response) == ""
    response.outputs.add(name="cum_log_probs")
    response.outputs.add(name="text_output").contents.bytes_contents.append(b"hi")
    assert text_output(response) == "hi"
    response.raw_output_contents.extend([b"0000", b"\x02\0\0\0yo"])
    assert text_output(response) == "yo"


def test_model_facts_come_from_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text(
        'name: "m" max_batch_size: 4 input { name: "text_input" data_type: TYPE_STRING dims: [1] }\n'
        "model_transaction_policy { decoupled: true } field_of_tomorrow: 3\n"
        'parameters { key: "accumulate_tokens" value { string_value: "True" } }\n'
    )
    facts = ServedModel(
        "m", batched=True, decoupled=True, inputs={"text_input": "TYPE_STRING"}, accumulates=True, counts=False
    )
    assert ServedModel.of(model_config.read(path, allow_unknown=True)) == facts
    assert not ServedModel.of(model_config_pb2.ModelConfig()).accumulates
    path.write_text('output { name: "num_output_tokens" data_type: TYPE_INT32 dims: [1] }')
    assert ServedModel.of(model_config.read(path, allow_unknown=True)).counts
    path.write_text("name: }")
    with pytest.raises(ServerError, match=r"config\.pbtxt"):
        model_config.read(path)


def test_service_file(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    path.write_text(json.dumps({"http": "h", "grpc": "g", "pid": 1, "model": "m", "later": 1}))
    assert Service.read(path) == Service("h", "g", None, 1, "m", None)
    assert Service.read(path).kind == "triton"
    path.write_text(json.dumps({"kind": "openai", "url": "http://h", "http": "h", "grpc": "", "model": "m"}))
    assert Service.read(path) == Service("http://h", "", None, None, "m", None, kind="openai")
    for text in ("[]", "{}", "{"):
        path.write_text(text)
        with pytest.raises(ServerError, match="does not describe a running server"):
            Service.read(path)


def test_running_since_knows_live_and_dead_processes() -> None:
    assert running_since(os.getpid()) == running_since(os.getpid()) is not None
    assert running_since(2**22 + 1) is None


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("UNAVAILABLE: failed to connect to all addresses", FailureClass.TRANSIENT),
        ("NOT_FOUND: Request for unknown model: 'ensemble' has no available versions", FailureClass.TRANSIENT),
        ("in ensemble 'ensemble', Stub process 'tensorrt_llm_0_0' is not healthy.", FailureClass.TRANSIENT),
        # Only the client cancels requests; a server that ends reports those that it has not answered so.
        ("ModelConfig of 'ensemble' at 127.0.0.1:8001: CANCELLED: CANCELLED", FailureClass.TRANSIENT),
        # Over HTTP, as a request met them whose Triton was started again for a Python model that had died.
        ("the server closed the connection", FailureClass.TRANSIENT),
        ("the connection closed in the middle of the response: after 233 bytes of the body", FailureClass.TRANSIENT),
        ("[Errno 104] Connection reset by peer", FailureClass.TRANSIENT),
        ("[Errno 111] Connect call failed ('127.0.0.1', 8000)", FailureClass.TRANSIENT),
        ("NOT_FOUND: Request for unknown model: 'assemble' is not found", FailureClass.BUG),
        ("INVALID_ARGUMENT: a prompt of 9 tokens exceeds max_input_len 8", FailureClass.BUG),
    ],
)
def test_what_passes_while_a_server_is_repaired(cause: str, expected: FailureClass) -> None:
    assert failure_class(cause) is expected


class Reloading(Client):
    """A client whose server rejects `refusals` requests for the configuration."""

    def __init__(self, refusals: int, words: str, timeout_s: float) -> None:
        super().__init__(Service("h:1", "127.0.0.1:1", None, None, "m", None), "m", "grpc", timeout_s=timeout_s)
        self.left, self.words = refusals, words

    async def config(self, model: str) -> model_config_pb2.ModelConfig:
        self.left -= 1
        if self.left >= 0:
            raise ServerError(self.words, failure=failure_class(self.words))
        return model_config_pb2.ModelConfig(name=model)


async def _enter(client: Client) -> str:
    async with client:
        return client.model.name


LOADING = "NOT_FOUND: Request for unknown model: 'm' has no available versions"


def test_a_client_waits_for_a_model_that_is_loaded_again() -> None:
    assert asyncio.run(_enter(Reloading(3, LOADING, 60))) == "m"


@pytest.mark.parametrize(("refusals", "words"), [(1000, LOADING), (1, "NOT_FOUND: 'm' is not found")])
def test_a_client_does_not_wait_for_ever_or_for_a_model_that_is_not_there(refusals: int, words: str) -> None:
    client = Reloading(refusals, words, 0.5)
    with pytest.raises(ServerError, match="NOT_FOUND") as caught:
        asyncio.run(_enter(client))
    assert caught.value.failure is (FailureClass.TRANSIENT if words == LOADING else FailureClass.USER)
    assert (caught.value.hint == "--model names the model") is (words != LOADING)
    assert client.left >= 0


@pytest.mark.parametrize(
    ("preprocessing", "adds"),
    [({"add_special_tokens": "False"}, False), ({"add_special_tokens": "true"}, True), ({}, True), (None, True)],
)
def test_preprocessing_adds_special_tokens_unless_its_parameter_is_off(
    monkeypatch: pytest.MonkeyPatch, preprocessing: dict[str, str] | None, adds: bool
) -> None:
    async def parameters(_client: Client, model: str) -> dict[str, str] | None:
        assert model == "preprocessing"
        return preprocessing

    monkeypatch.setattr(Client, "parameters", parameters)
    client = Client(Service("h", "g", None, None, "ensemble", None), "ensemble", "grpc", timeout_s=1)
    assert asyncio.run(client.adds_special_tokens()) is adds
