"""An OpenAI-compatible server behind the gateway: requests and responses pass through with only the model's name
changed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from trtllm_pipeline.measure import Service, fields, http, session, timestamped_socket, urls
from trtllm_pipeline.orchestrate import GatewayParams
from trtllm_pipeline.serve.gateway.api_error import ApiError, bad_gateway, timed_out, unavailable
from trtllm_pipeline.serve.gateway.feed import PassedFeed
from trtllm_pipeline.serve.gateway.gateway_config import OfferedModel
from trtllm_pipeline.serve.gateway.parsed_request import PATHS, Endpoint
from trtllm_pipeline.serve.gateway.passing import AnswerCheck, StreamCutter, check_of
from trtllm_pipeline.tensorrt import server_requests

_CONNECT_S: Final = 5.0
_MOST_WAITING_BYTES: Final = 1 << 18
"""Limit for the unread part of a response. Beyond it, the server has to wait."""
_MOST_ERROR_BYTES: Final = 1 << 16
DEFAULTS: Final = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens")
"""The fields of `GatewayParams` that OpenAI-compatible servers accept under the same name."""
OF_RESPONSES: Final = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
"""The same, for the Responses API."""


class OpenAiBackend:
    """One model of a running server."""

    idle_s = 4.0
    """Servers close idle connections after some time, uvicorn after 5 s."""

    def __init__(self, service: Service, served: OfferedModel, params: GatewayParams) -> None:
        url = service.http if "://" in service.http else f"http://{service.http}"
        self._url = urls.server_url(url)
        self._served = served
        self._params = params
        self._timeout_s = params.generation_timeout_s
        self._model = served.server_model or service.model or served.name
        self._idle: deque[tuple[http.Connection, float]] = deque()
        self._closed = False
        self.broken = False
        """There is no state that could be wrong when the server comes back."""
        self._adapters: dict[str, Mapping[str, session.Option]] = {
            name: {}
            if folder is None
            else server_requests.lora_request(name, server_requests.number_of(folder), folder)
            for name, folder in served.names.items()
        }
        """Model name in requests -> additional fields of a request."""

    async def ready(self) -> bool:
        try:
            return (await http.fetch(self._url, "/v1/models", timeout_s=_CONNECT_S))[0] == 200
        except (OSError, http.HttpError):
            return False

    async def ask(self, endpoint: Endpoint, body: dict[str, Any], feed: PassedFeed) -> None:
        """Pass a request on and fill `feed`. If cancelled, it closes the connection, which tells the server."""
        name = body["model"]
        request = {**with_defaults(endpoint, body, self._params), "model": self._model, **self._adapters[name]}
        message = json.dumps(request, ensure_ascii=False).encode(errors="replace")
        try:
            await asyncio.wait_for(self._ask(endpoint, message, name, feed), self._timeout_s)
        except asyncio.TimeoutError:
            feed.end(timed_out(self._timeout_s))
        except OSError:
            feed.end(unavailable(f"the server of model {self._served.name} is not reachable, or is being restarted"))
        except http.HttpError as error:
            feed.end(self._failed(str(error)))

    def _failed(self, why: str) -> ApiError:
        return bad_gateway(f"the server of model {self._served.name} failed: {fields.shortened(why)}")

    async def _ask(self, endpoint: Endpoint, message: bytes, name: str, feed: PassedFeed) -> None:
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop()[0] if kept else http.Connection(self._url)
            answer = _Answer(connection, feed, _renaming(self._model, name), self._failed, check_of(endpoint))
            try:
                await connection.open()
                status = await connection.request(
                    "POST", PATHS[endpoint], message, answer.take, max_bytes=timestamped_socket.MAX_STREAM_BYTES
                )
            except http.HttpError:
                if not kept or connection.answer.began:
                    raise
                continue  # the server had closed the idle connection
            except BaseException:
                connection.close()
                raise
            self._idle.append((connection, time.monotonic()))
            if self._closed:
                self.forget_idle()
            feed.end(answer.end() if status == 200 else _error(status, bytes(answer.refused)))
            return

    def forget_idle(self, older_than_s: float = 0.0) -> None:
        """Close connections that have been idle for that long."""
        before = time.monotonic() - older_than_s
        while self._idle and self._idle[0][1] <= before:
            self._idle.popleft()[0].close()

    def close(self) -> None:
        """Close idle connections. The others are closed when their request ends."""
        self._closed = True
        self.forget_idle()


class _Answer:
    """Reads one response. A stream is passed on in whole events, and ends if the server reports a failure."""

    def __init__(
        self,
        connection: http.Connection,
        feed: PassedFeed,
        names: list[tuple[bytes, bytes]],
        failed: Callable[[str], ApiError],
        check: AnswerCheck,
    ) -> None:
        self.refused = bytearray()
        self._connection = connection
        self._feed = feed
        self._names = names
        self._failed = failed
        self._cutter = StreamCutter()
        self._check = check

    def take(self, _now_ns: int, part: bytes) -> None:
        """Process one read of the body."""
        feed = self._feed
        if self._connection.answer.status != 200:
            if len(self.refused) < _MOST_ERROR_BYTES:
                self.refused += part
        elif not feed.stream:
            feed.waiting += part
        elif not feed.over:
            self._pass(self._cutter.feed(part))
            if len(feed.waiting) > _MOST_WAITING_BYTES and feed.paused is None:
                feed.paused = self._connection
                self._connection.pause()

    def _pass(self, events: Iterable[bytes]) -> None:
        feed, check = self._feed, self._check
        output = added = False
        for event in events:
            output |= check.event(event)
            if check.error is not None or (check.done and check.failure is not None):
                feed.end(self._failed(str(check.failure)))
            if feed.over:  # clients stop reading at an error
                return
            feed.waiting += self._renamed(event)
            added = True
        feed.counts = check.usage
        if added:
            feed.arrived(output=output)

    def end(self) -> ApiError | None:
        """The server has sent everything. Returns why the response is incomplete."""
        feed, check = self._feed, self._check
        if not feed.stream:
            whole = bytes(feed.waiting)
            check.whole(whole)
            feed.waiting[:] = self._renamed(whole)
        elif rest := self._cutter.end():
            check.event(rest)
            feed.waiting += self._renamed(rest) if check.failure is None else b""
        feed.counts = check.usage
        return None if check.failure is None else self._failed(check.failure)

    def _renamed(self, text: bytes) -> bytes:
        for renamed, wanted in self._names:
            text = text.replace(renamed, wanted)
        return text


def _renaming(name: str, wanted: str) -> list[tuple[bytes, bytes]]:
    """The server's model name in a response, and its replacement. Within a text, quotes are escaped."""
    if name == wanted:
        return []
    spaces = (b"", b" ")
    return [
        (b'"model":' + space + json.dumps(name).encode(), b'"model":' + space + json.dumps(wanted).encode())
        for space in spaces
    ]


def with_defaults(endpoint: Endpoint, body: Mapping[str, Any], params: GatewayParams) -> dict[str, Any]:
    """A request, with sampling defaults for absent fields. The server checks the others."""
    request = dict(body)
    if endpoint == "responses":  # uses other names, and lacks fields for the rest
        for name, default in OF_RESPONSES.items():
            if body.get(name) is None and (value := getattr(params, default)) is not None:
                request[name] = value
        return request
    for name in DEFAULTS:
        value = getattr(params, name)
        # A chat has two names for its limit.
        given = body.get(name) is not None or (name == "max_tokens" and body.get("max_completion_tokens") is not None)
        if value is not None and not given:
            request[name] = value
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if params.stop and isinstance(stops, list):
        request["stop"] = [*stops, *(each for each in params.stop if each not in stops)]
    return request


def _error(status: int, body: bytes) -> ApiError:
    """The server's error in OpenAI's envelope, which some servers omit."""
    try:
        parsed = json.loads(body)
        parsed = parsed.get("error", parsed)
        message = str(parsed["message"]) if isinstance(parsed, dict) else str(parsed)
        param, code = (parsed.get("param"), parsed.get("code")) if isinstance(parsed, dict) else (None, None)
    except (ValueError, KeyError, AttributeError, RecursionError):
        message, param, code = f"the server answered with HTTP status {status}", None, None
    return ApiError(
        status if status >= 400 else 502,
        message[:1000],
        param=param if isinstance(param, str) else None,
        code=str(code) if code is not None else None,
        reason="upstream",
    )
