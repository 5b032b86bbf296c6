"""Triton's own OpenAI front end: takes the options and requests that the real one takes, and refuses what it refuses.

The real one has Triton in its process; this one starts the `tritonserver` of its installation and asks that over HTTP, with
the inputs that the real one sends to a TensorRT-LLM model. Source: python/openai of github.com/triton-inference-server/server,
as NVIDIA's images had it in 2025 and 2026: main.py (options), schemas/openai.py (fields, unknown ones are errors),
engine/triton_engine.py (one text, no usage and always `stop` for TensorRT-LLM), engine/utils/triton.py (inputs),
routers/completions.py (an error after a stream began breaks it off), routers/observability.py (/health/ready, /metrics).
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports

FIELDS: Final = frozenset(
    [
        "model",
        "prompt",
        "best_of",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_tokens",
        "n",
        "presence_penalty",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "suffix",
        "temperature",
        "top_p",
        "user",
    ]
)
"""Of a request for completions."""
_START_S: Final = 60.0


def parser() -> argparse.ArgumentParser:
    """The options of main.py that all of these versions have."""
    found = argparse.ArgumentParser(prog="main.py")
    found.add_argument("--model-repository", required=True)
    found.add_argument("--tokenizer")
    found.add_argument("--backend", choices=["vllm", "tensorrtllm"])
    found.add_argument("--lora-separator")
    found.add_argument("--tritonserver-log-verbose-level", type=int, default=0)
    found.add_argument("--host", default="0.0.0.0")
    found.add_argument("--openai-port", type=int, default=9000)
    levels = ["debug", "info", "warning", "error", "critical", "trace"]
    found.add_argument("--uvicorn-log-level", default="info", choices=levels)
    found.add_argument("--enable-kserve-frontends", action="store_true")
    found.add_argument("--kserve-http-port", type=int, default=8000)
    found.add_argument("--kserve-grpc-port", type=int, default=8001)
    return found


def main(server: str, arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT with the `tritonserver` at `server`."""
    asked = parser().parse_args(arguments)
    if asked.tokenizer and not (Path(asked.tokenizer) / "config.json").is_file():
        print(f"OSError: {asked.tokenizer} does not appear to have a file named config.json", file=sys.stderr)
        return 1
    port, metrics = unused_ports(2)
    options = [f"--model-repository={asked.model_repository}", "--http-address=127.0.0.1", f"--http-port={port}"]
    triton = subprocess.Popen([server, *options, "--allow-grpc=false", f"--metrics-port={metrics}"])
    try:
        _wait(triton, port)
        front = _Front((asked.host, asked.openai_port), port, metrics)
        for name in front.models:
            print(f"Found model: name={name!r}", flush=True)
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        ended.wait()
        front.shutdown()
        return 0
    finally:
        triton.terminate()
        triton.wait(60)


def _wait(triton: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if triton.poll() is not None:
            raise SystemExit(1)  # wait_ready of tritonserver.Server raises then
        with suppress(OSError):
            if _ask(port, "GET", "/v2/health/ready").status == 200:
                return
        time.sleep(0.1)
    raise SystemExit("stand-in: Triton was not ready in time")


def _ask(port: int, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_S)
    connection.request(method, path, None if body is None else json.dumps(body))
    return connection.getresponse()


class ClientError(Exception):
    """What becomes status 400."""


def inputs_of(request: dict[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """What Triton's model is sent for a request. Raises ClientError as the real one."""
    if request["model"] not in models:
        raise ClientError(f"Unknown model: {request['model']}")
    if not request.get("prompt"):
        raise ClientError("prompt must be non-empty")
    if not isinstance(request["prompt"], str):
        raise ClientError("only single string input is supported")
    if (request.get("n") or 1) > 1:
        raise ClientError(f"Received n={request['n']}, but only single choice (n=1) is currently supported")
    if request.get("logprobs"):
        raise ClientError("logprobs are currently available only for the vLLM backend")
    if request.get("stream_options") and not request.get("stream"):
        raise ClientError("`stream_options` can only be used when `stream` is True")
    found = {"text_input": request["prompt"], "stream": bool(request.get("stream"))}
    found["max_tokens"] = 16 if request.get("max_tokens") is None else request["max_tokens"]
    stop = request.get("stop")
    if stop:
        found["stop_words"] = [stop] if isinstance(stop, str) else stop
    defaults = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": None, "temperature": 1.0}
    return found | {name: value for name in defaults if (value := request.get(name, defaults[name])) is not None}


class _Front(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], triton: int, metrics: int) -> None:
        super().__init__(address, _Handler)
        self.triton, self.metrics = triton, metrics
        index = json.loads(_ask(triton, "POST", "/v2/repository/index").read())
        self.models = sorted((each["name"] for each in index), reverse=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Front

    def do_GET(self) -> None:
        if self.path == "/health/ready":
            self._send(200, None)
        elif self.path == "/metrics":
            self._send(200, _ask(self.server.metrics, "GET", "/metrics").read())
        elif self.path == "/v1/models":
            data = [{"id": each, "object": "model", "created": 0, "owned_by": "Triton"} for each in self.server.models]
            self._send(200, {"object": "list", "data": data})
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.path != "/v1/completions":
            self._send(404, {"detail": "Not Found"})
            return
        if unknown := sorted(request.keys() - FIELDS):
            said = [{"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs"} for name in unknown]
            self._send(422, {"detail": said})
            return
        try:
            inputs = inputs_of(request, self.server.models)
        except ClientError as error:
            self._send(400, {"detail": str(error)})
            return
        about = {"id": "cmpl-0", "created": int(time.time()), "model": request["model"], "object": "text_completion"}
        way = "generate_stream" if inputs["stream"] else "generate"
        answer = _ask(self.server.triton, "POST", f"/v2/models/{request['model']}/{way}", inputs)
        if inputs["stream"]:
            self._stream(about, answer)
            return
        body = json.loads(answer.read())
        if answer.status != 200:
            self._send(500, {"detail": body["error"]})
            return
        self._send(200, {**about, "choices": [_choice(body["text_output"], "stop")], "usage": None})

    def _stream(self, about: dict[str, Any], answer: http.client.HTTPResponse) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text, last in _texts(answer):
            if text is None:  # the generator raised: what was begun is never ended
                self.close_connection = True
                return
            self._chunk({**about, "choices": [_choice(text, "stop" if last else None)]})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _chunk(self, message: object) -> None:
        content = f"data: {json.dumps(message)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def _send(self, status: int, answer: object) -> None:
        content = answer if isinstance(answer, bytes) else b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _texts(answer: http.client.HTTPResponse) -> Iterator[tuple[str | None, bool]]:
    """(text, whether it is the last) of each response; no text for an error."""
    before: str | None = None
    for line in answer:
        if not line.startswith((b"data: ", b"{")):
            continue
        body = json.loads(line.removeprefix(b"data: "))
        if "error" in body:
            yield None, True
            return
        if before is not None:
            yield before, False
        before = body["text_output"]
    yield before or "", True
