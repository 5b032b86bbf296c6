"""`trtllm-serve disaggregated`: the router in front of servers that read prompts and servers that generate.

It asks a server of each kind in turn, as the real one does: first for the prompt alone, then for the answer, which it passes on as
it comes. It lists no models. Sources: openai_disagg_server.py, disagg_utils.py.
"""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Final

from tests.standins.programs import ProgramError, Work

_KEYS: Final = ("hostname", "port", "context_servers", "generation_servers")
_KINDS: Final = ("num_instances", "urls")
_LOOK_S: Final = 0.05


def run(work: Work, options: Mapping[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT."""
    config = json.loads(Path(options["config_file"]).read_text(encoding="utf-8"))
    servers = {kind: _servers(config[kind]) for kind in ("context_servers", "generation_servers")}
    if unknown := config.keys() - {*_KEYS}:
        raise ProgramError(f"stand-in: {min(unknown)} is handed on to servers, which have it from their own files")
    work.begin()
    deadline = time.monotonic() + int(options["server_start_timeout"])
    for address in itertools.chain(*servers.values()):
        while not _healthy(address):
            if time.monotonic() > deadline:
                raise ProgramError("TimeoutError: Timeout waiting for context and generation servers to be ready")
            time.sleep(_LOOK_S)
    server = _Router((config["hostname"], int(config["port"])), servers)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    print("INFO:     Application startup complete.", flush=True)
    ended.wait()
    server.shutdown()
    return 0


def _servers(kind: Mapping[str, Any]) -> list[str]:
    if kind.keys() != {*_KINDS}:
        raise ProgramError(f"stand-in: expected {' and '.join(_KINDS)}, got {', '.join(kind)}")
    if len(kind["urls"]) != kind["num_instances"]:
        raise ProgramError(
            f"ValueError: Number of hostnames ({len(kind['urls'])}) should be equal to the number of instances "
            f"({kind['num_instances']})"
        )
    return [*kind["urls"]]


def _healthy(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


class _Router(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], servers: Mapping[str, list[str]]) -> None:
        super().__init__(address, _Handler)
        self.turns = {kind: itertools.cycle(addresses) for kind, addresses in servers.items()}
        self.lock = threading.Lock()

    def server_bind(self) -> None:
        """Bind, without the look-up of a host name that HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def next(self, kind: str) -> str:
        """The server of a kind whose turn it is."""
        with self.lock:
            return next(self.turns[kind])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Router

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        print(f"INFO:     {self.client_address[0]} - {format % args}", flush=True)

    def do_GET(self) -> None:
        self._send(200 if self.path in {"/health", "/version"} else 404, b'{"version": "router"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        prompt = {**body, "stream": False, "max_tokens": 1, "disaggregated_params": {"request_type": "context_only"}}
        prompt.pop("max_completion_tokens", None)
        prompt.pop("stream_options", None)
        status, content = self._ask("context_servers", prompt)
        if status != 200:
            self._send(status, content)
            return
        answer = {**body, "disaggregated_params": {"request_type": "generation_only", "ctx_request_id": 1}}
        if not body.get("stream"):
            self._send(*self._ask("generation_servers", answer))
            return
        connection = http.client.HTTPConnection(self.server.next("generation_servers"))
        connection.request("POST", self.path, json.dumps(answer), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            self._send(response.status, response.read())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece := response.read1():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def _ask(self, kind: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.server.next(kind))
        try:
            connection.request("POST", self.path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
