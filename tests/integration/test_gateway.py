"""The gateway under abuse: what it refuses, what ends when, and that nothing stays behind or disturbs anybody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.helpers.adapters import random_pairs, write_adapter
from tests.helpers.chat_models import LOG, Running, gateway, spoken, write_model
from tests.helpers.gateways import Process, listening, process_of
from tests.helpers.scripted_server import Respond, Script, config, running
from tests.helpers.waiting import eventually
from tests.standins import templates
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel
from trtllm_pipeline.tensorrt.stage.server_requests import number_of

JSON = {"content-type": "application/json"}
LIMITS: dict[str, Any] = {
    "max_concurrency": 8,
    "max_queue": 4,
    "queue_timeout_s": 1.0,
    "max_body_bytes": 1 << 20,
    "write_timeout_s": 1.0,
    "max_connections": 400,
}
IMPATIENT: dict[str, Any] = {**LIMITS, "keep_alive_s": 3.0, "body_timeout_s": 3.0, "generation_timeout_s": 4.0}
"""For what takes too long alone: on a busy machine, anything may take that long."""


def respond(_model: str, values: Mapping[str, Any]) -> Script:
    """What a prompt asks for."""
    prompt = str(values["text_input"])
    match prompt.partition(" ")[0]:
        case "slow":
            return spoken("abcdefghijklmnopqrstuvwxyz" * 4, gap_s=0.01, size=1)
        case "hang":
            return Script(((0.0, "x"),), hang=True)
        case "silent":
            return Script((), hang=True)
        case "drop":
            return Script((), drop=True)
        case "break":
            return Script(((0.0, "begin"), (0.05, "!")), drop=True)
        case "refuse":
            return Script((), error="the prompt is too long: it must be shorter")
        case "die":
            return Script((), error="CUDA error")
        case "nothing":
            return Script(())
        case "break-late":
            return Script(((0.0, "begin"), (0.05, "!")), error="CUDA error")
        case "huge":
            return Script(tuple((0.002 * at, "0123456789abcdef" * 16384) for at in range(160)), counts=(1,) * 160)
        case "big":
            return Script(tuple((0.004 * at, "0123456789abcdef" * 1024) for at in range(240)), counts=(1,) * 240)
    return spoken(prompt)


def recording(text: str) -> tuple[list[Mapping[str, Any]], Respond]:
    """What is asked, and a server that always answers `text`."""
    asked: list[Mapping[str, Any]] = []

    def answer(_model: str, values: Mapping[str, Any]) -> Script:
        asked.append(values)
        return spoken(text)

    return asked, answer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with gateway(tmp_path_factory.mktemp("gateway"), respond, **LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with gateway(tmp_path_factory.mktemp("impatient"), respond, **IMPATIENT) as found:
        yield found


HTTP = httpx.Client(
    timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=20)
)
"""One for all: making a client takes longer than most requests."""


def ask(url: str, prompt: str, **more: Any) -> httpx.Response:
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 2000, **more}
    return HTTP.post(f"{url}/completions", json=body)


def error(response: httpx.Response) -> Mapping[str, Any]:
    """The error of a response, in OpenAI's shape."""
    assert response.headers["content-type"] == "application/json"
    told = response.json()["error"]
    assert told.keys() == {"message", "type", "param", "code"}
    assert isinstance(told["message"], str)
    return told


def raw(url: str, data: bytes, *, wait_s: float = 60.0) -> bytes:
    """What comes back when exactly these bytes are sent."""
    at = urlsplit(url)
    with socket.create_connection((at.hostname, at.port), timeout=wait_s) as sock:
        sock.sendall(data)
        found = b""
        with suppress(TimeoutError, ConnectionError):
            while part := sock.recv(1 << 16):
                found += part
        return found


def head(path: str = "/v1/completions", size: int | None = None) -> bytes:
    length = "" if size is None else f"Content-Length: {size}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n".encode()


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.seam
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b'{"model": "other", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": "scripted", "prompt": ""}', 400, "invalid_value"),
        (b'{"model": "scripted", "prompt": "x", "n": 9}', 400, "invalid_value"),
        (b'{"model": "scripted", "prompt": "x", "top_p": 0.5}', 400, "unsupported_parameter"),
        (b'{"model": "scripted", "prompt": "x", "logprobs": 0}', 400, "unsupported_parameter"),
        (
            b'{"model": "scripted", "prompt": "x", "response_format": {"type": "json_object"}}',
            400,
            "unsupported_parameter",
        ),
        (b'{"model": "scripted", "prompt": "x", "max_tokens": 30000}', 400, "context_length_exceeded"),
        (b'{"model": "scripted", "prompt": "' + b"x" * 30000 + b'"}', 400, "context_length_exceeded"),
        (b"x" * 6_000_000, 413, "request_too_large"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bodies_that_are_refused(served: Running, body: bytes, status: int, code: str) -> None:
    response = HTTP.post(f"{served.url}/completions", content=body, headers=JSON)
    assert (response.status_code, error(response)["code"]) == (status, code)


def test_a_body_in_chunks_has_the_same_limit(served: Running) -> None:
    response = HTTP.post(f"{served.url}/completions", content=(b"x" * 100_000 for _ in range(40)), headers=JSON)
    assert (response.status_code, error(response)["code"]) == (413, "request_too_large")


def test_paths_methods_and_types(served: Running) -> None:
    top = served.url.removesuffix("/v1")
    assert error(HTTP.get(f"{top}/nothing"))["code"] == "unknown_path"
    assert HTTP.get(f"{served.url}/completions").status_code == 405
    assert error(HTTP.get(f"{served.url}/completions"))["code"] == "method_not_allowed"
    assert HTTP.post(f"{served.url}/completions", content=b"{}").status_code == 415
    assert HTTP.post(f"{served.url}/completions", json={}, headers={"content-encoding": "gzip"}).status_code == 415
    assert HTTP.get(f"{served.url}/models/other").status_code == 404
    assert HTTP.get(f"{top}/health").json() == {"status": "ok", "models": {"scripted": True}}
    assert HTTP.get(f"{top}/health/live").status_code == 200


def test_headers_and_bodies_that_do_not_come(served: Running, impatient: Running) -> None:
    assert raw(impatient.url, head(size=10) + b"{").startswith(b"HTTP/1.1 408 ")
    assert raw(impatient.url, b"") == b""  # an idle connection is closed after keep_alive_s
    told = raw(served.url, b"\x16\x03\x01 this is TLS\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 400 ")
    assert b'"code": "invalid_http"' in told


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("PRI * HTTP/2.0\r\n\r\nSM", 400),
        ("CONNECT x:80 HTTP/1.1\r\nHost: localhost", 400),
        ("POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6", 400),
        ("POST /v1/completions HTTP/1.1\r\nContent-Length: -5", 400),
        ("POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999999999999999", 400),
        ("GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket", 200),
        ("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close", 405),
        ("GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close", 404),
    ],
)
def test_heads_that_are_unusual(served: Running, lines: str, status: int) -> None:
    told = raw(served.url, f"{lines}\r\n\r\n".encode())
    assert told.startswith(f"HTTP/1.1 {status} ".encode())
    assert status == 200 or b'{"error": {"message": ' in told


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/health/live", "/metrics", "/", "/v1/completions"])
def test_a_page_that_has_its_name_resolve_to_this_machine_reads_nothing(served: Running, path: str) -> None:
    top = served.url.removesuffix("/v1")
    response = HTTP.get(f"{top}{path}", headers={"host": "evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_host")
    body = {"model": "scripted", "prompt": "x", "max_tokens": 1}
    response = HTTP.post(f"{top}{path}", json=body, headers={"host": "evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_host")


def test_requests_that_are_no_http_and_upgrades_leave_no_line_in_the_log(tmp_path: Path) -> None:
    upgrade = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    with gateway(tmp_path, respond, **LIMITS) as found:
        for data in (upgrade, b"\x16\x03\x01\r\n\r\n", b"no http\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
            assert raw(found.url, data).startswith(b"HTTP/1.1 ")
    assert (tmp_path / LOG).read_bytes() == b""


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(served: Running, stream: bool) -> None:
    """Which nginx speaks to servers unless it is told otherwise."""
    body = json.dumps({"model": "scripted", "prompt": "slow", "max_tokens": 9, "stream": stream}).encode()
    answer = raw(served.url, head(size=len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
    fields, _, content = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in fields.lower()
    if stream:
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(content)["choices"][0]["text"]


# --------------------------------------------------------------------------------------------- when servers fail


@pytest.mark.parametrize(
    ("prompt", "status"),
    [("silent", 504), ("drop", 503), ("die", 502), ("nothing", 502), ("refuse", 400)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_answer_are_statuses(impatient: Running, prompt: str, status: int, stream: bool) -> None:
    response = ask(impatient.url, prompt, stream=stream)
    assert response.status_code == status
    assert error(response)["message"]
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.seam
@pytest.mark.parametrize("prompt", ["hang", "break", "break-late"])
def test_failures_within_a_stream_are_its_last_event(impatient: Running, prompt: str) -> None:
    response = ask(impatient.url, prompt, stream=True)
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert "error" in json.loads(events[-1])
    assert "[DONE]" not in events


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    with gateway(tmp_path, respond, **LIMITS) as found:
        assert ask(found.url, "hello").json()["choices"][0]["text"] == "hello"
        service = tmp_path / "service.json"
        service.unlink()
        response = ask(found.url, "hello")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        at = f"{found.url.removesuffix('/v1')}/health"
        assert eventually(lambda: HTTP.get(at).status_code != 200)  # it looks once a second
        health = HTTP.get(at)
        assert (health.status_code, health.json()["models"]) == (503, {"scripted": False})
        with running(lambda _model, _values: spoken("another"), {"ensemble": config("ensemble")}) as (_, told):
            service.write_text(json.dumps(told), encoding="utf-8")
            assert ask(found.url, "hello").json()["choices"][0]["text"] == "another"


# --------------------------------------------------------------------------------------------------- stop words


@pytest.mark.seam
def test_stop_words_are_never_sent_though_they_come_in_pieces(served: Running) -> None:
    for stop, text in (("fgh", "abcde"), (["zz", "mno"], "abcdefghijkl"), ("a", ""), ("never", None)):
        whole = ask(served.url, "slow", stop=stop).json()["choices"][0]
        streamed = ask(served.url, "slow", stop=stop, stream=True).text
        parts = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        joined = "".join(part["choices"][0]["text"] for part in parts)
        assert whole["text"] == joined == ("abcdefghijklmnopqrstuvwxyz" * 4 if text is None else text)
        assert whole["finish_reason"] == parts[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stream_to_the_server_is_kept_for_the_next_request(served: Running, stream: bool) -> None:
    port = served.triton._grpc.sockets[0].getsockname()[1]
    ask(served.url, "one", stream=stream)
    before = _connected(port)
    for _ in range(10):
        assert ask(served.url, "one", stream=stream).status_code == 200
    assert _connected(port) == before


def _connected(port: int) -> set[str]:
    """Ends of the connections to a port of this machine."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    return {own for _, own, other, state, *_ in lines if other == f"0100007F:{port:04X}" and state == "01"}


@pytest.mark.seam
def test_usage_finish_reasons_echo_and_several_choices(served: Running) -> None:
    answer = ask(served.url, "hello there", max_tokens=4, n=2, echo=True).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello there" * 2] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 8, "total_tokens": 19}
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    response = ask(served.url, "hello there", stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15}
    assert all(event["usage"] is None for event in events[:-1])
    assert ask(served.url, ["a b", "c"], n=2).json()["usage"]["prompt_tokens"] == 4


# ---------------------------------------------------------------------------------------- who waits and who leaves


@pytest.mark.seam
def test_more_than_can_wait_are_refused_and_a_place_is_free_when_a_client_leaves(served: Running) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(served.url, "slow"), range(20)))
    assert {answer.status_code for answer in answers} <= {200, 429}
    leaving = [_begin(served.url, "hang", stream=True) for _ in range(8)]
    for sock in leaving:
        assert b"200 OK" in sock.recv(100)
    refused = ask(served.url, "hello")  # all places are taken, for longer than the queue waits
    assert (refused.status_code, error(refused)["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
    for sock in leaving:
        sock.close()
    assert becomes(served, 0)  # what they asked for never ends by itself
    assert ask(served.url, "hello").status_code == 200


def test_a_client_that_does_not_read_is_given_up_and_disturbs_nobody(served: Running) -> None:
    pid = process_of(served.process)
    before = pid.memory_bytes()
    readers = [_begin(served.url, "big", stream=True, max_tokens=2000, buffer=4096) for _ in range(3)]
    with HTTP.stream(
        "POST",
        f"{served.url}/completions",
        json={"model": "scripted", "prompt": "slow", "max_tokens": 200, "stream": True},
    ) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    parts = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(parts) == "abcdefghijklmnopqrstuvwxyz" * 4
    assert len(list(filter(None, parts))) > 1, "it streams while the others do not read"
    assert pid.memory_bytes() - before < 60e6  # 4 MB of text each, most of it not written
    assert becomes(served, 0)
    for sock in readers:
        sock.close()


def test_bodies_that_clients_left_unfinished_leave_no_memory_behind(tmp_path: Path) -> None:
    with gateway(tmp_path, respond, max_body_bytes=2 << 20) as found, ExitStack() as open_until_the_end:
        process, url = process_of(found.process), urlsplit(found.url)

        def connect() -> socket.socket:
            return socket.create_connection((url.hostname, url.port), timeout=60)

        ask(found.url, "hello")
        before = process.memory_bytes()
        for _ in range(3):
            leaving = [connect() for _ in range(100)]
            for client in leaving:
                client.sendall(head(size=2 << 20) + b" " * 2_000_000)
                open_until_the_end.enter_context(connect()).sendall(head()[:40])  # what it needs lies between
            assert eventually(lambda: process.memory_bytes() > before + 150e6)
            for client in leaving:
                client.close()
            ask(found.url, "slow", stream=True)
        assert eventually(lambda: process.memory_bytes() < before + 50e6)


def test_a_slow_reader_holds_back_a_server_that_is_passed_through(tmp_path: Path) -> None:
    with running(respond, {"upstream": config("upstream", counts=True)}) as (_, told):
        models = (
            OfferedModel(name="upstream", url=f"http://{told['http']}"),
            OfferedModel(name="b", url="grpc://127.0.0.1:9"),
        )
        with listening(tmp_path, GatewayConfig(models=models)) as url:
            pid = Process(json.loads((tmp_path / "gateway.json").read_text(encoding="utf-8"))["pid"])
            before = pid.memory_bytes()
            sock = _begin(url, "huge", stream=True, buffer=4096, model="upstream")
            time.sleep(1.5)
            assert pid.memory_bytes() - before < 15e6  # of 42 MB
            received = 0
            last = b""
            while not last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                part = sock.recv(1 << 18)
                assert part, "the stream ended early"
                received += part.count(b"0123456789abcdef")
                last = (last + part)[-40:]
            sock.close()
            assert received > 160 * 16384 * 0.99  # without those that a read cut


def _begin(url: str, prompt: str, *, buffer: int = 1 << 16, **more: Any) -> socket.socket:
    at = urlsplit(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(60)
    sock.connect((at.hostname, at.port))
    body = json.dumps({"model": "scripted", "prompt": prompt, "max_tokens": 100, **more}).encode()
    sock.sendall(head(size=len(body)) + body)
    return sock


def _in_flight(served: Running) -> float:
    page = HTTP.get(f"{served.url.removesuffix('/v1')}/metrics").text
    (line,) = (
        line for line in page.splitlines() if line.startswith('pipeline_gateway_requests_in_flight{model="scripted"')
    )
    return float(line.rpartition(" ")[2])


def becomes(served: Running, in_flight: int) -> bool:
    """Whether so many requests are in flight, soon."""
    return eventually(lambda: _in_flight(served) == in_flight)


def abuse(url: str, rounds: int, threads: int) -> None:
    """Good requests, clients that leave at any moment, and garbage, all at once."""
    bodies = [b"[" * 200_000, b"\x00" * 1000, b'{"model": "scripted", "prompt": 1}', b"x" * 1_100_000]

    def one(number: int) -> None:
        with suppress(httpx.HTTPError, OSError):
            match number % 8:
                case 0 | 1:
                    ask(url, "hello", stream=bool(number % 2))
                case 2:
                    sock = _begin(url, "slow", stream=True)
                    sock.recv(10)
                    sock.close()
                case 3:
                    _begin(url, "slow", stream=True).close()
                case 4:
                    HTTP.post(f"{url}/completions", content=bodies[number // 8 % 4], headers=JSON)
                case 5:
                    raw(url, b"GARBAGE\r\n\r\n" * 10)
                case 6:
                    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as sock:
                        sock.sendall(head(size=100) + b'{"model"')
                case 7:
                    ask(url, "break", stream=True)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(rounds)))


@pytest.mark.parametrize(
    ("rounds", "threads"),
    [pytest.param(240, 16, id="short"), pytest.param(2_000, 128, id="long", marks=pytest.mark.nightly)],
)
def test_nothing_stays_behind(tmp_path: Path, rounds: int, threads: int) -> None:
    limits = {**LIMITS, "max_concurrency": 256, "body_timeout_s": 5.0, "keep_alive_s": 1.0}
    with gateway(tmp_path, respond, **limits) as found:
        pid = process_of(found.process)
        # Streams to the server are kept for a while, as many as there were at a time; the steady client has one more.
        most = pid.usage().descriptors + threads + 1
        abuse(found.url, 200, threads)  # what is made once
        before = pid.usage()
        stop = threading.Event()
        answers: set[int] = set()

        def steady() -> None:
            while not stop.is_set():
                answers.add(ask(found.url, "hello").status_code)
                time.sleep(0.05)

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(steady)
            try:
                abuse(found.url, rounds, threads)
            finally:
                stop.set()
        other.result()  # raises what it did
        assert eventually(lambda: pid.usage().descriptors <= most)
        after = pid.usage()
        assert after.threads <= before.threads
        assert after.children == before.children
        assert after.memory_bytes - before.memory_bytes < 40e6
        assert _in_flight(found) == 0
        assert ask(found.url, "hello").status_code == 200
        assert answers <= {200, 429}


# ---------------------------------------------------------------------------------------------------- the rest


@pytest.mark.seam
def test_keys_are_needed_and_never_shown(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-secret-key\nsecond-secret-key\n", encoding="utf-8")
    with gateway(tmp_path, respond, api_keys_file=keys) as found:
        assert ask(found.url, "hello").status_code == 401
        for given, status in (
            ("Bearer second-secret-key", 200),
            ("Bearer wrong-secret-key", 401),
        ):
            headers = {"authorization": given}
            body = {"model": "scripted", "prompt": "x", "max_tokens": 1}
            response = HTTP.post(f"{found.url}/completions", json=body, headers=headers)
            assert response.status_code == status, given
            assert "secret" not in response.text
        assert HTTP.get(f"{found.url}/models").status_code == 401
        top = found.url.removesuffix("/v1")
        assert HTTP.get(f"{top}/health").status_code == 200
        assert "secret" not in HTTP.get(f"{top}/metrics").text + (tmp_path / "gateway.json").read_text(encoding="utf-8")


@pytest.mark.seam
def test_sigterm_lets_answers_end_and_takes_no_more(tmp_path: Path) -> None:
    with gateway(tmp_path, respond, stop_timeout_s=60.0) as found:
        sock = _begin(found.url, "slow", stream=True, max_tokens=2000)
        told = sock.recv(10)
        found.process.terminate()
        while part := sock.recv(1 << 16):
            told += part
        assert b'"finish_reason":"stop"' in told
        assert b"data: [DONE]" in told
        assert found.process.wait(60) == 0
        assert not (tmp_path / "gateway.json").exists()


def test_an_answer_that_takes_too_long_ends_with_the_gateway(tmp_path: Path) -> None:
    with gateway(tmp_path, respond, stop_timeout_s=0.2) as found:
        sock = _begin(found.url, "hang", stream=True)
        sock.recv(10)
        found.process.terminate()
        told = b""
        while part := sock.recv(1 << 16):
            told += part
        assert b"the gateway is being stopped" in told
        assert found.process.wait(60) == 0


def test_two_models_behind_one_gateway_and_a_server_that_is_passed_through(tmp_path: Path) -> None:
    with running(respond, {"upstream": config("upstream", counts=True)}) as (_, told):
        models = (
            OfferedModel(name="ours", url=f"grpc://{told['grpc']}", server_model="upstream"),
            OfferedModel(name="renamed", url=f"http://{told['http']}/v1", server_model="upstream"),
            OfferedModel(name="absent", url="http://127.0.0.1:9/v1"),
        )
        with listening(tmp_path, GatewayConfig(models=models)) as url:
            listed = HTTP.get(f"{url}/models").json()["data"]
            assert [model["id"] for model in listed] == ["ours", "renamed", "absent"]
            body = {"model": "ours", "prompt": "hello", "max_tokens": 9}
            assert HTTP.post(f"{url}/completions", json=body).json()["choices"][0]["text"] == "hello"
            passed = HTTP.post(f"{url}/completions", json={**body, "model": "renamed"})
            assert (passed.json()["model"], passed.json()["choices"][0]["text"]) == ("renamed", "hello")
            chat = {"model": "renamed", "messages": [{"role": "user", "content": "hello"}], "stream": True}
            streamed = HTTP.post(f"{url}/chat/completions", json=chat)
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert b"upstream" not in streamed.content
            events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            assert {event["model"] for event in events} == {"renamed"}
            missing = HTTP.post(f"{url}/completions", json={**body, "model": "absent"})
            assert (missing.status_code, error(missing)["code"]) == (503, "server_unavailable")
            no_chat = HTTP.post(f"{url}/chat/completions", json={**chat, "model": "ours"})
            assert "no chat template" in error(no_chat)["message"]


def test_a_triton_is_asked_which_models_it_has(tmp_path: Path) -> None:
    several = {name: config(name, counts=True) for name in ("one", "two")}
    whole = {name: config(name, counts=True) for name in ("ensemble", "preprocessing", "tensorrt_llm_bls")}
    with (
        running(respond, {"only": config("only", counts=True)}) as (_a, only),
        running(respond, whole) as (_b, usual),
        running(respond, several) as (_c, unclear),
    ):
        models = (
            OfferedModel(name="m", url=f"grpc://{only['grpc']}"),
            OfferedModel(name="usual", url=f"grpc://{usual['grpc']}"),
            OfferedModel(name="two", url=f"grpc://{unclear['grpc']}"),
            OfferedModel(name="unclear", url=f"grpc://{unclear['grpc']}"),
            OfferedModel(name="wrong", url=f"grpc://{unclear['grpc']}", server_model="three"),
        )
        with listening(tmp_path, GatewayConfig(models=models)) as url:
            for name in ("m", "usual", "two"):
                assert ask(url, "hello", model=name).json()["choices"][0]["text"] == "hello"
            failed = ask(url, "hello", model="unclear")
            assert failed.status_code == 502
            assert "has one, two: --server-model unclear=MODEL selects one" in error(failed)["message"]
            assert "it has one, two" in error(ask(url, "hello", model="wrong"))["message"]


def test_a_path_behind_a_slash_and_the_top_are_answered(served: Running) -> None:
    top = served.url.removesuffix("/v1")
    assert HTTP.get(f"{top}//v1/models").json() == HTTP.get(f"{top}/v1/models").json()
    body = {"model": "scripted", "prompt": "hello", "max_tokens": 9}
    assert HTTP.post(f"{top}//v1//completions", json=body).json()["choices"][0]["text"] == "hello"
    assert (
        "the paths are /v1/chat/completions, /v1/completions, /v1/responses, /v1/models"
        in error(HTTP.get(top))["message"]
    )


def test_an_adapter_is_a_model_of_its_own_and_is_sent_again_where_the_server_has_forgotten_it(tmp_path: Path) -> None:
    """A scripted server with the inputs of TensorRT-LLM's ensemble, which keeps one adapter at a time."""
    adapters = {
        name: write_adapter(tmp_path / name, random_pairs({"q_proj": (16, 16)}, rank=2)) for name in ("sql", "chat")
    }
    ensemble = config("ensemble")
    for tensor, kind, dims in (
        ("lora_task_id", "TYPE_UINT64", [1]),
        ("lora_weights", "TYPE_FP32", [-1, -1]),
        ("lora_config", "TYPE_INT32", [-1, 3]),
    ):
        ensemble.input.add(name=tensor, data_type=kind, dims=dims, optional=True)
    kept: list[int] = []
    sent: list[int] = []

    def answer(_model: str, values: Mapping[str, Any]) -> Script:
        task = values.get("lora_task_id")
        if task is not None and "lora_weights" in values:
            sent.append(task)
            kept[:] = [task]
            return spoken("kept")
        if task is not None and task not in kept:
            return Script((), error=f"LoRA task {task} not found in cache. Please send LoRA weights with request")
        return spoken("the model itself" if task is None else f"adapter {task}")

    sql, chat = (number_of(folder) for folder in adapters.values())
    assert sql != chat

    with running(answer, {"ensemble": ensemble}) as (_triton, told):
        models = (
            OfferedModel(name="m", url=f"grpc://{told['grpc']}", server_model="ensemble", adapters=adapters),
            OfferedModel(
                name="wrong", url=f"grpc://{told['grpc']}", server_model="ensemble", adapters={"none": tmp_path}
            ),
        )
        with listening(tmp_path, GatewayConfig(models=models)) as url:
            listed = {model["id"]: model.get("parent") for model in HTTP.get(f"{url}/models").json()["data"]}
            assert listed == {"m": None, "m:sql": "m", "m:chat": "m", "wrong": None, "wrong:none": "wrong"}

            def said(name: str) -> str:
                done = ask(url, "x", model=name).json()
                assert done["model"] == name
                text: str = done["choices"][0]["text"]
                return text

            names = ("m", "m:sql", "m:chat", "m:sql", "m:sql", "m")
            assert [said(name) for name in names] == [
                *("the model itself", f"adapter {sql}", f"adapter {chat}", f"adapter {sql}", f"adapter {sql}"),
                "the model itself",
            ]
            assert sent[-3:] == [sql, chat, sql], "each again where the other has taken its place"
            streamed = ask(url, "x", model="m:chat", stream=True).text
            assert '"model":"m:chat"' in streamed
            bad = ask(url, "x", model="wrong:none")
            assert (bad.status_code, error(bad)["code"]) == (502, "bad_gateway")
            assert ask(url, "x", model="wrong").status_code == 200
            unknown = ask(url, "x", model="m:law")
            assert (unknown.status_code, error(unknown)["code"]) == (404, "model_not_found")
            page = HTTP.get(f"{url.removesuffix('/v1')}/metrics").text
            assert 'gateway_requests_total{endpoint="/v1/completions",model="m:sql",status="200"} 3.0' in page


@pytest.mark.parametrize("readable", [True, False])
def test_a_draft_model_is_asked_for_where_the_engine_says_how_many_tokens(tmp_path: Path, readable: bool) -> None:
    """A scripted server with the models of an engine that has another one draft for it."""
    built = {"max_draft_len": 5, "speculative_decoding_mode": 2, "max_seq_len": 105, "max_input_len": 80}
    engine = {"pretrained_config": {"dtype": "float16"}, "build_config": built}
    if readable:
        (tmp_path / "config.json").write_text(json.dumps(engine), encoding="utf-8")
    models = {
        name: config(name, decoupled=False) for name in ("tensorrt_llm_bls", "tensorrt_llm", "tensorrt_llm_draft")
    }
    models["tensorrt_llm_bls"].input.add(name="num_draft_tokens", data_type="TYPE_INT32", dims=[1], optional=True)
    models["tensorrt_llm"].parameters["gpt_model_path"].string_value = str(tmp_path)
    asked, answer = recording("hello")

    folder = tmp_path / "gateway"
    folder.mkdir()
    with gateway(folder, answer, others=models.values(), served_model="tensorrt_llm_bls") as found:
        assert ask(found.url, "x").json()["choices"][0]["text"] == "hello"
        assert ask(found.url, "x", stream=True).status_code == 200
    told = [(each.get("num_draft_tokens"), each.get("stream")) for each in asked]
    said = (folder / LOG).read_text(encoding="utf-8")
    if readable:
        assert told == [(5, False), (5, False)]
        assert "is not asked" not in said
    else:
        assert {drafted for drafted, _ in told} == {None}
        assert "the draft model of scripted is not used: the number of draft tokens is in the config.json" in said


def test_an_openai_server_is_told_which_adapter_a_request_is_for(tmp_path: Path) -> None:
    asked, answer = recording("hello")

    with running(answer, {"upstream": config("upstream", counts=True)}) as (_, told):
        model = OfferedModel(
            name="m", url=f"http://{told['http']}/v1", server_model="upstream", adapters={"sql": tmp_path / "sql"}
        )
        with listening(tmp_path, GatewayConfig(models=(model,))) as url:
            names = [ask(url, "x", model=name).json()["model"] for name in ("m", "m:sql")]
            assert '"upstream"' not in ask(url, "x", model="m:sql", stream=True).text
    assert names == ["m", "m:sql"]
    assert "lora_request" not in asked[0]
    folder = tmp_path / "sql"
    wanted = {"lora_name": "m:sql", "lora_int_id": number_of(folder), "lora_path": str(folder)}
    assert [each["lora_request"] for each in asked[1:]] == [wanted, wanted]


def test_the_llm_api_s_model_is_asked_by_its_own_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The gateway in front of weights in Triton, as TensorRT-LLM's template declares their inputs."""
    written = (templates.install(tmp_path, "1.2.0") / "llmapi" / "tensorrt_llm" / "config.pbtxt").read_text()
    declared = text_format.Parse(written, model_config_pb2.ModelConfig())
    declared.model_transaction_policy.decoupled = True
    asked, answer = recording("one two")

    with running(answer, {"tensorrt_llm": declared}) as (_triton, service):
        (tmp_path / "service.json").write_text(json.dumps({**service, "model": "tensorrt_llm"}), encoding="utf-8")
        folder = write_model(tmp_path / "model")
        model = OfferedModel(
            name="weights", service=tmp_path / "service.json", model_folder=folder, server_model="tensorrt_llm"
        )
        (folder / "generation_config.json").write_text('{"repetition_penalty": 1.05}', encoding="utf-8")
        params = GatewayParams(end_id=2, pad_id=0)
        with listening(tmp_path, GatewayConfig(models=(model,), params=params)) as url:
            sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": "END", "max_tokens": 9}
            done = ask(url, "x", model="weights", **sampling).json()
            streamed = ask(url, "x", model="weights", stream=True, **sampling).text
            refused = ask(url, "x", model="weights", repetition_penalty=1.5)
    assert done["choices"][0]["text"] == "one two", done
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(each["choices"][0]["text"] for each in events) == "one two"
    whole, parts = ({name: value for name, value in each.items() if name.startswith("sampling_")} for each in asked)
    assert whole == parts
    assert whole == {
        "sampling_param_max_tokens": 9,
        "sampling_param_temperature": pytest.approx(0.5),
        "sampling_param_top_p": pytest.approx(0.9),
        "sampling_param_top_k": 7,
        "sampling_param_seed": 3,
        "sampling_param_stop": "END",
    }
    assert (refused.status_code, error(refused)["code"]) == (400, "unsupported_parameter")
    assert "has no input repetition_penalty, end_id, pad_id: that default" in capfd.readouterr().err


def test_default_sampling_is_for_requests_that_say_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    declared = config("engine")
    for name, kind in (("repetition_penalty", "TYPE_FP32"), ("end_id", "TYPE_INT32"), ("pad_id", "TYPE_INT32")):
        declared.input.add(name=name, data_type=kind, dims=[1], optional=True)
    asked, answer = recording("hello")

    with running(answer, {"engine": declared}) as (_triton, service):
        (tmp_path / "service.json").write_text(json.dumps({**service, "model": "engine"}), encoding="utf-8")
        folder = write_model(tmp_path / "model")
        (folder / "generation_config.json").write_text('{"repetition_penalty": 1.25}', encoding="utf-8")
        model = OfferedModel(name="m", service=tmp_path / "service.json", model_folder=folder)
        with listening(tmp_path, GatewayConfig(models=(model,), params=GatewayParams(end_id=2))) as url:
            for said in ({}, {"repetition_penalty": 1, "end_id": 3}, {"repetition_penalty": 1.5}):
                assert ask(url, "x", model="m", **said).is_success
    told = [tuple(each.get(name) for name in ("repetition_penalty", "end_id", "pad_id")) for each in asked]
    assert told == [(1.25, 2, None), (None, 3, None), (1.5, 2, None)]
    assert "that default sampling" not in capfd.readouterr().err
