"""The gateway in front of a real Triton: answers, sampling, limits, and that a client who leaves frees its place at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from tests.helpers.embedded_engines import END_ID, LETTERS, SCRIPT, script_engine
from tests.helpers.gateways import listening
from tests.helpers.triton_client import serve
from trtllm_pipeline.measure.client.openai import OpenAiClient
from trtllm_pipeline.measure.client.session import Answer, GenerationRequest
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MODELS = ("ensemble", "tensorrt_llm_bls")
HTTP = httpx.Client(timeout=60, trust_env=False)


class Served(NamedTuple):
    url: str
    grpc: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One slot: whoever comes second waits until the first has really ended."""
    folder = tmp_path_factory.mktemp("served")
    engine = script_engine(folder / "engine", max_batch_size=1, max_input_len=64, max_seq_len=8000)
    (engine / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with serve(folder / "triton", engine) as client:
        models = tuple(
            OfferedModel(name=name, url=f"grpc://{client.grpc_url}", server_model=name, model_folder=engine)
            for name in MODELS
        )
        models = (*models, OfferedModel(name="unnamed", url=f"grpc://{client.grpc_url}", model_folder=engine))
        params = GatewayParams(temperature=0.0)
        with listening(folder, GatewayConfig(models=models, params=params)) as url:
            yield Served(url, client.grpc_url)


def complete(served: Served, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": "ensemble", "prompt": prompt, **more}
    return HTTP.post(f"{served.url}/completions", json=body)


def letters(count: int) -> str:
    return "".join(LETTERS[(1 + at) % 26] for at in range(count))


@pytest.mark.seam
@pytest.mark.parametrize("model", [*MODELS, "unnamed"])
def test_chat_and_completions(served: Served, model: str) -> None:
    answer = complete(served, "A", model=model, max_tokens=30).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (letters(30), "length")
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 30, "total_tokens": 31}
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "s"}]}]
    answer = HTTP.post(f"{served.url}/chat/completions", json={"model": model, "messages": messages}).json()
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", SCRIPT[1:])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": len(SCRIPT[1:].encode()),
        "total_tokens": 2 + len(SCRIPT[1:].encode()),
    }


@pytest.mark.seam
def test_streams_have_every_character_whole(served: Served) -> None:
    response = complete(served, "s", max_tokens=100, stream=True)
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == SCRIPT[1:]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.seam
def test_stop_words_end_the_request_on_the_server(served: Served) -> None:
    for stop, text in (("FG", "BCDE"), (["KL", "XY"], "BCDEFGHIJ")):
        answer = complete(served, "A", max_tokens=5000, stop=stop).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
        assert answer["usage"]["completion_tokens"] < 20
    # A text that the server's tokens do not end with: only the gateway sees it.
    assert complete(served, "s", max_tokens=5000, end_id=-1, stop="stop-").json()["choices"][0]["text"] == SCRIPT[1:]
    assert complete(served, "A", max_tokens=1).status_code == 200


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_an_exact_length(served: Served, model: str, stream: bool) -> None:
    """As `pipeline bench load --ignore-eos` asks for them."""
    client = OpenAiClient(served.url, model, "completions", stream=stream, timeout_s=60)

    async def generate(**options: Any) -> Answer:
        async with client:
            return await client.session().generate(GenerationRequest("s", 150, options))

    short, exact = asyncio.run(generate()), asyncio.run(generate(min_tokens=150, ignore_eos=True))
    assert (short.error, short.finish_reason, exact.error, exact.finish_reason) == (None, "stop", None, "length")
    assert (short.output_tokens or 0) < 100
    assert exact.output_tokens == 150
    assert exact.text.startswith(SCRIPT[1:])


@pytest.mark.seam
def test_special_tokens_end_an_answer_and_are_handled_as_the_server_does(served: Served) -> None:
    assert complete(served, "s", max_tokens=100, stop_token_ids=[END_ID]).json()["choices"][0]["text"] == SCRIPT[1:]
    ends = complete(served, "A", max_tokens=50, stop_token_ids=[ord("C")])
    assert (ends.status_code, ends.json()["error"]["param"]) == (400, "stop_token_ids")
    assert "put the text in stop" in ends.json()["error"]["message"]
    for name in ("skip_special_tokens", "add_special_tokens"):
        statuses = [complete(served, "A", max_tokens=1, **{name: value}).status_code for value in (True, False)]
        assert statuses == [200, 400]


def test_sampling_seed_and_log_probabilities(served: Served) -> None:
    def sample(**more: Any) -> list[str]:
        asked = {"max_tokens": 12, "temperature": 2, "n": 2, **more}
        return [choice["text"] for choice in complete(served, "A", **asked).json()["choices"]]

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    assert len({*sample(), *sample(), *sample()}) > 3  # without a seed answers differ
    assert sample(seed=1)[0] != sample(seed=1)[1]
    chosen = complete(served, "A", max_tokens=3, logprobs=0).json()["choices"][0]["logprobs"]
    assert (chosen["tokens"], chosen["text_offset"]) == (["B", "C", "D"], [0, 1, 2])
    assert all(-1 < value <= 0 for value in chosen["token_logprobs"])
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "A"}], "max_tokens": 2, "logprobs": True}
    content = HTTP.post(f"{served.url}/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["bytes"]) for each in content] == [("B", [66]), ("C", [67])]


@pytest.mark.seam
def test_the_most_likely_tokens(served: Served) -> None:
    """After each letter, the next one is first and "." second."""
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "A"}], "max_tokens": 2}
    asked = {**body, "logprobs": True, "top_logprobs": 2}
    content = HTTP.post(f"{served.url}/chat/completions", json=asked).json()["choices"][0]["logprobs"]["content"]
    assert [[each["token"] for each in token["top_logprobs"]] for token in content] == [["B", "."], ["C", "."]]
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in content)
    text = complete(served, "A", model="tensorrt_llm_bls", max_tokens=2, logprobs=1, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    found = [
        top
        for event in events
        if event["choices"][0]["logprobs"]
        for top in event["choices"][0]["logprobs"]["top_logprobs"]
    ]
    assert [list(top) for top in found] == [["B"], ["C"]]


@pytest.mark.seam
@pytest.mark.parametrize("model", MODELS)
def test_json_that_follows_a_schema(served: Served, model: str) -> None:
    """The model would say letters."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["red", 3]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = complete(served, "A", model=model, max_tokens=50, response_format=form).json()["choices"][0]
    assert (json.loads(choice["text"])["a"] in {"red", 3}, choice["finish_reason"]) == (True, "stop")
    any_object = complete(
        served, "A", model=model, max_tokens=400, response_format={"type": "json_object"}, stream=True
    )
    events = [json.loads(line[6:]) for line in any_object.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events).startswith("{")


def test_what_does_not_fit_or_is_not_supported(served: Served) -> None:
    for body, code, said in (
        ({"prompt": "x" * 65}, "context_length_exceeded", "at most 64 tokens; this one has 65"),
        ({"prompt": "x", "max_tokens": 8000}, "context_length_exceeded", "context is 8000 tokens"),
        (
            {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "unsupported_parameter",
            "does not accept response_format",
        ),
        (
            {"prompt": "x", "response_format": {"type": "json_object"}, "min_tokens": 2},
            "refused_by_server",
            "min_length",
        ),
        ({"prompt": "x", "min_p": 0.5}, "unsupported_parameter", "does not support min_p"),
        (
            {"prompt": "x", "min_tokens": 9, "max_tokens": 8},
            "invalid_value",
            "min_tokens is 9; the output has at most 8",
        ),
        ({"prompt": "x", "length_penalty": 0.5, "temperature": 3}, "invalid_value", "from 0 to 2"),
    ):
        response = complete(served, **body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, code)
        assert said in error["message"]


@pytest.mark.timing
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_one_slot_at_once(served: Served, model: str, stream: bool) -> None:
    at = urlsplit(served.url)
    began = time.monotonic()
    assert complete(served, "A", model=model, max_tokens=500).status_code == 200
    whole_s = 14 * (time.monotonic() - began)
    for _ in range(3):
        asked = {"model": model, "prompt": "A", "max_tokens": 7000, "stream": stream}
        body = json.dumps(asked).encode()
        with socket.create_connection((at.hostname, at.port)) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            if stream:
                assert b"200 OK" in sock.recv(100)
            else:
                time.sleep(0.3)
        began = time.monotonic()
        assert complete(served, "A", model=model, max_tokens=2).json()["choices"][0]["text"] == "BC"
        assert time.monotonic() - began < whole_s / 3
