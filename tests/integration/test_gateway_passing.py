"""A gateway in front of OpenAI-compatible servers whose answers are late, broken or not whole."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.gateways import listening
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel

pytestmark = pytest.mark.seam

DONE = b"data: [DONE]\n\n"


def event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"model": "m", "choices": [choice]}).encode() + b"\n\n"


def whole(text: str | None, finish_reason: str | None = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return json.dumps({"model": "m", "choices": [choice]}).encode()


ROLE, TEXT, STOP = event({"role": "assistant", "content": ""}), event({"content": "tok "}), event({}, "stop")
DIED = b'data: {"error": {"message": "the engine died", "code": 500}}\n\n'
BROKEN_STREAMS = {
    "cut": [ROLE, TEXT, TEXT],
    "empty": [],
    "error": [ROLE, TEXT, DIED, TEXT, STOP, DONE],
    "error-in-place": [b'{"error": {"message": "the engine died"}}'],
}
BROKEN_ANSWERS = {
    "no-reason": whole("tok", None),
    "error": b'{"error": {"message": "the engine died", "code": 500}}',
}


class Upstream:
    """A server that sends the parts of `parts`, one a chunk; before each after the first it waits until it may continue."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.asked: list[dict[str, Any]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                upstream.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for number, part in enumerate(filter(None, upstream.parts)):
                    if number:
                        upstream.may_go_on.wait(60)
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the library
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


class Passing:
    """A gateway in front of an `Upstream`."""

    def __init__(self, url: str, upstream: Upstream) -> None:
        self.url = url
        self.upstream = upstream
        self.client = httpx.Client(timeout=60, trust_env=False)

    def body(self, *, stream: bool) -> dict[str, Any]:
        return {"model": "renamed", "messages": [{"role": "user", "content": "hi"}], "stream": stream}

    def ask(self, *parts: bytes, stream: bool) -> httpx.Response:
        self.upstream.parts = list(parts)
        return self.client.post(f"{self.url}/chat/completions", json=self.body(stream=stream))

    def counted(self, name: str) -> float:
        page = self.client.get(f"{self.url.removesuffix('/v1')}/metrics").text
        return sum(map(float, re.findall(rf"^pipeline_gateway_{re.escape(name)} (.+)$", page, re.MULTILINE)))

    def requests(self, status: int) -> float:
        return self.counted(f'requests_total{{endpoint="/v1/chat/completions",model="renamed",status="{status}"}}')


@contextmanager
def passing(folder: Path) -> Iterator[Passing]:
    upstream = Upstream()
    threading.Thread(target=upstream.server.serve_forever, daemon=True).start()
    try:
        models = (OfferedModel(name="renamed", url=upstream.url, server_model="m"),)
        with listening(folder, GatewayConfig(models=models)) as url:
            found = Passing(url, upstream)
            with found.client:
                yield found
    finally:
        upstream.server.shutdown()
        upstream.server.server_close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Passing]:
    with passing(tmp_path_factory.mktemp("passing")) as found:
        yield found


@pytest.mark.parametrize("before", [[ROLE], [b": processing\n\n", b": keep-alive\r\n\r\n"]])
@pytest.mark.parametrize("first", [{"content": "tok"}, {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}])
def test_the_first_token_is_the_first_output(served: Passing, before: list[bytes], first: dict[str, Any]) -> None:
    name = 'time_to_first_token_seconds_count{model="renamed"}'
    counted = served.counted(name)
    upstream = served.upstream
    upstream.parts = [b"".join(before), event(first), STOP, DONE]
    upstream.may_go_on.clear()
    with served.client.stream("POST", f"{served.url}/chat/completions", json=served.body(stream=True)) as response:
        received = response.iter_raw()
        assert next(received) == b"".join(before).replace(b'"m"', b'"renamed"')
        assert served.counted(name) == counted
        upstream.may_go_on.set()
        assert b"".join(received).endswith(DONE)
    assert served.counted(name) == counted + 1


@pytest.mark.parametrize("name", BROKEN_STREAMS)
def test_a_stream_that_is_not_whole_ends_with_an_error(served: Passing, name: str) -> None:
    failed, well = served.requests(502), served.requests(200)
    errors = served.counted('upstream_errors_total{kind="upstream",model="renamed"}')
    response = served.ask(*BROKEN_STREAMS[name], stream=True)
    if response.status_code == 200:
        assert DONE not in response.content
        last = response.text.rstrip().rpartition("\n\n")[2].removeprefix("data: ")
    else:
        assert response.status_code == 502
        last = response.text
    error = json.loads(last)["error"]
    assert (error["type"], error["code"]) == ("server_error", "bad_gateway")
    assert ("the engine died" in error["message"]) == ("error" in name)
    assert (served.requests(502), served.requests(200)) == (failed + 1, well)
    assert served.counted('upstream_errors_total{kind="upstream",model="renamed"}') == errors + 1


@pytest.mark.parametrize("name", BROKEN_ANSWERS)
def test_an_answer_that_is_not_whole_is_a_bad_gateway(served: Passing, name: str) -> None:
    failed = served.requests(502)
    response = served.ask(BROKEN_ANSWERS[name], stream=False)
    assert response.status_code == 502
    assert ("the engine died" in response.json()["error"]["message"]) == (name == "error")
    assert served.requests(502) == failed + 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_error_is_shortened(served: Passing, stream: bool) -> None:
    response = served.ask(json.dumps({"error": {"message": "died" * 1000}}).encode(), stream=stream)
    assert response.json()["error"]["message"].endswith("dieddied... (4000 characters)")


def test_whole_answers_pass(served: Passing) -> None:
    well = served.requests(200)
    for parts in ([ROLE, TEXT, STOP, DONE], [TEXT, event({}, "length")], [event({}, "stop"), DONE]):
        assert served.ask(*parts, stream=True).content == b"".join(parts).replace(b'"m"', b'"renamed"')
    assert served.ask(whole(""), stream=False).json()["model"] == "renamed"
    assert served.requests(200) == well + 4


def test_a_long_answer_that_is_not_streamed_passes(served: Passing) -> None:
    """It is longer than what is kept of a stream that its client does not read."""
    text = "tok " * 200_000
    answer = served.ask(whole(text), stream=False).json()
    assert answer["choices"][0]["message"]["content"] == text


def test_a_failure_of_the_server_is_in_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with passing(tmp_path) as found:
        found.ask(ROLE, TEXT, DIED, stream=True)
    logged = capfd.readouterr().err
    assert "a request for model renamed failed with 502" in logged
    assert "the engine died" in logged
