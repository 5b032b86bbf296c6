"""The ASGI application: OpenAI's endpoints in front of the served models.

A request passes `_checked` (key, type, size), `_read` (body, model) and `_answer` (place, prompts, tasks, feed); each
raises ApiError to refuse it. `_send` writes the response, and waits for a client that reads slowly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trtllm_pipeline.base import process
from trtllm_pipeline.serve.gateway.api_error import ApiError, bad, unavailable
from trtllm_pipeline.serve.gateway.choice import Choice
from trtllm_pipeline.serve.gateway.feed import ChoicesFeed, Feed, PassedFeed
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig
from trtllm_pipeline.serve.gateway.keys import Keys
from trtllm_pipeline.serve.gateway.openai_backend import OpenAiBackend
from trtllm_pipeline.serve.gateway.parsed_request import PATHS, Endpoint, ParsedRequest, model_of, parse_body, read
from trtllm_pipeline.serve.gateway.prometheus_metrics import UNKNOWN, GatewayMetrics, RequestMetrics
from trtllm_pipeline.serve.gateway.responses_request import as_of_response, read_response
from trtllm_pipeline.serve.gateway.served import ModelServer
from trtllm_pipeline.serve.gateway.stops import StopWords
from trtllm_pipeline.serve.gateway.triton_backend import TritonBackend

if TYPE_CHECKING:
    from trtllm_pipeline.serve.gateway.http_protocol import GatewayProtocol

CLIENT_LEFT: Final = 499
"""Metrics status of a request whose client disconnected before the response was complete."""
_TICK_S: Final = 0.5
_HEALTH_S: Final = 1.0
_DISCARDED_BYTES: Final = 1 << 26
"""Bytes to read from a body that is too large. A client that is still sending would never see the response."""
_DISCARD_S: Final = 10.0
_LOG: Final = logging.getLogger(__name__)
_OF_THE_SERVER: Final = frozenset({"unavailable", "timeout", "upstream"})
_LARGE_BYTES: Final = 1 << 18
"""Larger bodies fragment the memory of the process."""
CONNECTION: Final = "pipeline.connection"
"""Key in a scope: the request's `GatewayProtocol`."""
_JSON: Final = (b"content-type", b"application/json")
_EVENTS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_CLOSE: Final = (b"connection", b"close")


class _Asked(NamedTuple):
    """A request to a model."""

    endpoint: Endpoint
    body: Mapping[str, Any]
    served: ModelServer
    metrics: RequestMetrics


class GatewayApp:
    """The models, and the application that serves them."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read keys and model directories. Raises PipelineError."""
        self.config = config
        self.params = config.params
        self.keys = None if config.api_keys_file is None else Keys(config.api_keys_file)
        self.servers = tuple(ModelServer(model, config.params) for model in config.models)
        self.served = {name: server for server in self.servers for name in server.model.names}
        """Model name in requests -> its server. A model and its adapters share one."""
        self.metrics = GatewayMetrics()
        for name, server in self.served.items():
            self.metrics.add(name, server.model.name)
        for server in self.servers:
            limits = server.admission
            self.metrics.limits(server.model.name, in_flight=limits.places, queued=limits.queue)
        self.stopping = False
        self.started = int(time.time())
        self._feeds: set[_Sending] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._had_large = False
        """True if a request with a large body has ended."""
        self._health: tuple[float, dict[str, bool]] = (float("-inf"), {})
        self._health_lock = asyncio.Lock()
        self._endpoints = {path: endpoint for endpoint, path in PATHS.items()}
        routes = [
            *(Route(path, _post_only, methods=["POST"]) for path in self._endpoints),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/health", self._ready, methods=["GET"]),
            Route("/health/live", self._live, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        self._others = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _bug_error},
        )
        self._others.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, or leave the request to Starlette, whose layers would wrap each event of a stream."""
        if scope["type"] != "http":
            return await self._others(scope, receive, send)
        if "//" in scope["path"]:  # the client appended its path to a URL that ends in a slash
            scope["path"] = re.sub("/{2,}", "/", scope["path"])
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is not None and scope["method"] == "POST":
            return await self._generate(endpoint, scope, receive, send)
        return await self._others(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        ticker = asyncio.create_task(self._tick())
        ready = [asyncio.create_task(server.prepare()) for server in self.servers]
        try:
            yield
        finally:
            for task in (ticker, *ready):
                task.cancel()
            await asyncio.gather(ticker, *ready, return_exceptions=True)
            if self._tasks:  # ends requests on their servers
                await asyncio.wait(self._tasks, timeout=3.0)
            for server in self.servers:
                server.close()

    async def _tick(self) -> None:
        """Drop clients that do not read, close idle connections, and reload changed keys."""
        while True:
            await asyncio.sleep(min(_TICK_S, self.params.write_timeout_s / 2))
            before = time.monotonic() - self.params.write_timeout_s
            for sending in list(self._feeds):
                if sending.since is not None and sending.since < before:
                    sending.abort()
            for server in self.servers:
                server.tidy()
            if self.keys is not None:
                self.keys.refresh()
            if self._had_large:
                self._had_large = False
                process.return_free_memory()

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting requests, and wait for those in progress. The rest is cancelled."""
        self.stopping = True
        deadline = time.monotonic() + timeout_s
        while self._feeds and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for sending in list(self._feeds):
            sending.feed.fail(unavailable("the gateway is being stopped"))
        for _ in range(20):
            if not self._feeds:
                return
            await asyncio.sleep(0.05)
        for sending in list(self._feeds):
            sending.abort()

    async def _models(self, request: Request) -> Response:
        self._authorize(request.scope)
        return _response({"object": "list", "data": [self._described(name) for name in self.served]})

    async def _model(self, request: Request) -> Response:
        self._authorize(request.scope)
        self._find(request.path_params["model"])
        return _response(self._described(request.path_params["model"]))

    def _described(self, name: str) -> dict[str, Any]:
        served = self.served[name]
        longest = served.model.max_seq_len or (served.texts.max_seq_len if served.texts else None)
        about = {"id": name, "object": "model", "created": self.started, "owned_by": "trtllm-pipeline"}
        about |= {} if name == served.model.name else {"parent": served.model.name}
        return about if longest is None else {**about, "max_model_len": longest}

    async def _ready(self, _request: Request) -> Response:
        async with self._health_lock:  # each server is checked once a second, regardless of the number of requests
            if self._health[0] < time.monotonic() - _HEALTH_S:
                ready = await asyncio.gather(*(server.ready() for server in self.servers))
                names = (server.model.name for server in self.servers)
                self._health = (time.monotonic(), dict(zip(names, ready, strict=True)))
        models = self._health[1]
        well = all(models.values()) and not self.stopping
        health = {"status": "stopping" if self.stopping else "ok" if well else "unavailable", "models": models}
        return _response(health, 200 if well else 503)

    async def _live(self, _request: Request) -> Response:
        return _response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        page, content_type = self.metrics.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def _generate(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        metrics: RequestMetrics | None = None
        served: ModelServer | None = None
        size: int | None = 0
        try:
            size = self._checked(scope)
            body = parse_body(await self._body(receive, size))
            name = model_of(body)
            served = self._find(name)
            metrics = self.metrics.request(name, PATHS[endpoint])
            metrics.finish(await self._answered(_Asked(endpoint, body, served, metrics), scope, send))
        except ApiError as error:
            metrics = metrics or self.metrics.request(UNKNOWN, PATHS[endpoint])
            if error.reason in _OF_THE_SERVER:
                metrics.upstream_error(error.reason)
                if served is not None and error.status >= 500:
                    served.log_failure(name, error)
            else:
                metrics.rejected(error.reason)
            metrics.finish(error.status)
            await _send_error(as_of_response(error) if endpoint == "responses" else error, send)
        except BaseException as error:
            (metrics or self.metrics.request(UNKNOWN, PATHS[endpoint])).finish(500)
            if isinstance(error, Exception):
                with suppress(RuntimeError):  # uvicorn's, if the response has started
                    await _send_error(_bug(), send)
            raise
        finally:
            self._had_large |= size is None or size > _LARGE_BYTES

    def _checked(self, scope: Scope) -> int | None:
        """Size of the body, if known. Raises ApiError for requests that are refused before their body is read."""
        self._authorize(scope)
        if self.stopping:
            raise unavailable("the gateway is being stopped")
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(
                415, "the content type must be application/json", code="unsupported_media_type", reason="content_type"
            )
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ApiError(
                415, "an encoded body is not supported", code="unsupported_media_type", reason="content_type"
            )
        size = headers.get(b"content-length")
        return None if size is None else int(size)

    def _authorize(self, scope: Scope) -> None:
        if self.keys is None:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            raise ApiError(401, "you did not provide an API key: Authorization: Bearer KEY", code="missing_api_key")
        if not self.keys.accept(given[0]):
            raise ApiError(401, "the API key is not accepted", code="invalid_api_key")

    def _find(self, name: str) -> ModelServer:
        served = self.served.get(name)
        if served is None:
            raise ApiError(
                404,
                f"the model {json.dumps(name[:100], ensure_ascii=False)} does not exist; "
                f"there is {', '.join(self.served)}"[:1000],
                param="model",
                code="model_not_found",
            )
        return served

    async def _body(self, receive: Receive, size: int | None) -> bytes:
        """The whole body. Raises ApiError 408 or 413. A body that is too large is received and discarded."""
        limit = self.params.max_body_bytes
        if size is not None and size > limit:
            await _discard(receive, size)
            raise _too_large(limit)
        parts: list[bytes] = []
        received = 0
        try:
            with anyio.fail_after(self.params.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the body ended early", code="incomplete_body", reason="left")
                    parts.append(message.get("body", b""))
                    received += len(parts[-1])
                    if received > limit:
                        break
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {self.params.body_timeout_s:g} s",
                code="timeout",
                reason="body_timeout",
            ) from None
        parts.clear()
        await _discard(receive, _DISCARDED_BYTES)
        raise _too_large(limit)

    async def _answered(self, asked: _Asked, scope: Scope, send: Send) -> int:
        """Answer a request; returns the status for the metrics. Raises ApiError if nothing has been sent yet."""
        endpoint, body, served, metrics = asked
        task = asyncio.current_task()
        assert task is not None
        connection: GatewayProtocol = scope[CONNECTION]
        sending = _Sending(connection, task)
        connection.watch(sending.leave)
        try:
            backend = await served.backend()
            if isinstance(backend, TritonBackend):
                parsed = read_response(body) if endpoint == "responses" else read(endpoint, body)
                count = parsed.choices
            else:
                parsed, count = None, 1
            if count > served.admission.places:
                raise bad(
                    "n" if parsed is not None and parsed.n > 1 else "prompt",
                    f"the request asks for {count} choices; model {served.model.name} generates at most "
                    f"{served.admission.places} at a time",
                    code="invalid_value",
                )
            metrics.queued()
            if not served.admission.try_enter(count):
                await served.admission.wait(count)
            metrics.started()
            sending.feed = await self._begin(asked, backend, parsed, count)
            self._feeds.add(sending)
            try:
                status = await self._send(sending, metrics, send)
            finally:
                self._feeds.discard(sending)
                sending.feed.cancel()
            if status != CLIENT_LEFT and (failure := sending.feed.failure) is not None:  # within a stream
                served.log_failure(model_of(body), failure)
            return status
        except asyncio.CancelledError:
            if not sending.left:
                raise
            return CLIENT_LEFT
        finally:
            connection.unwatch()

    async def _begin(
        self, asked: _Asked, backend: TritonBackend | OpenAiBackend, request: ParsedRequest | None, count: int
    ) -> Feed:
        """Start the tasks that fill a feed. Each releases its place when it ends."""
        endpoint, body, served, metrics = asked
        leave = served.admission.leave
        try:
            feed: Feed
            if isinstance(backend, OpenAiBackend):
                feed = passing = PassedFeed(metrics, stream=body.get("stream") is True)
                work = [backend.ask(endpoint, dict(body), passing)]
            else:
                assert request is not None
                feed, work = await self._choices(served, backend, request, metrics)
        except BaseException:
            leave(count)
            raise
        for each in work:
            task = asyncio.create_task(each)
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, feed, leave))
            feed.tasks.append(task)
        return feed

    def _ended(self, feed: Feed, leave: Callable[[int], None], task: asyncio.Task[None]) -> None:
        """A task has ended, and so has its request on the server."""
        self._tasks.discard(task)
        leave(1)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a request failed", exc_info=error)
            feed.fail(_bug())

    async def _choices(
        self, served: ModelServer, backend: TritonBackend, request: ParsedRequest, metrics: RequestMetrics
    ) -> tuple[ChoicesFeed, list[Any]]:
        prompts = await backend.prompts(request)
        adapter = await backend.adapter(request.model)
        feed = ChoicesFeed(request, prompts, served.texts, metrics)
        stops = (*request.stop, *self.params.stop)
        work = []
        for number, prompt in enumerate(prompts):
            inputs = {**backend.inputs(request, prompt, number % request.n), **adapter}
            choice = Choice(
                number,
                StopWords(stops),
                prompt.parser,
                max_tokens=prompt.max_tokens,
                accumulates=backend.accumulates,
                wants_tokens=request.logprobs,
                changed=feed.arrived,
                enough=feed.enough,
                count=backend.count,
            )
            feed.choices.append(choice)
            work.append((request.model, prompt, inputs, choice))
        return feed, [backend.generate(*each) for each in work]

    async def _send(self, sending: _Sending, metrics: RequestMetrics, send: Send) -> int:
        """Send the feed until its end; returns the status for metrics. Raises ApiError if nothing has been sent."""
        feed = sending.feed
        begun = over = False
        while not over:
            await feed.wait()
            data = feed.take()
            over = feed.over
            if not begun and over and feed.failure is not None and not data:
                raise feed.failure
            if feed.gone:
                return CLIENT_LEFT
            if not (over or (data and feed.stream)):
                continue
            if not begun:
                begun = True
                head = _EVENTS if feed.stream else [_JSON, (b"content-length", str(len(data)).encode())]
                await send({"type": "http.response.start", "status": 200, "headers": head})
            if over and feed.failure is not None:
                data += feed.failed(feed.failure)
            sending.since = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": not over})
            sending.since = None
        usage = feed.usage()
        metrics.usage(usage.prompt or 0, usage.completion or 0)
        metrics.drafts(*feed.drafts)
        metrics.tool_calls(feed.calls)
        if sending.left:
            return CLIENT_LEFT
        if feed.failure is not None:
            metrics.upstream_error(feed.failure.reason)
            return feed.failure.status
        return 200


class _Sending:
    """A request in progress."""

    def __init__(self, connection: GatewayProtocol, task: asyncio.Task[Any]) -> None:
        self.feed: Feed
        self.since: float | None = None
        """Start time of the unfinished write."""
        self.left = False
        self._connection = connection
        self._task = task

    def leave(self) -> None:
        self.left = True
        feed = getattr(self, "feed", None)
        if feed is None:
            self._task.cancel()  # it waits for a place or for the prompt
        else:
            feed.leave()

    def abort(self) -> None:
        """Close the connection of a client that does not read."""
        self._connection.abort()
        self.leave()


async def _post_only(_request: Request) -> Response:
    raise AssertionError("generated by GatewayApp itself")


async def _discard(receive: Receive, size: int) -> None:
    """Receive up to `size` bytes from a client, so that it reads the response."""
    left = min(size, _DISCARDED_BYTES)
    with anyio.move_on_after(_DISCARD_S):
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large", reason="too_large")


def _response(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, ensure_ascii=False), status, media_type="application/json")


async def _send_error(error: ApiError, send: Send) -> None:
    body = error.body
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if error.status in {401, 403, 408, 413, 415, 503}:
        headers.append(_CLOSE)  # the body may not have been read
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body, error.status, error.headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    paths = ", ".join([*PATHS.values(), "/v1/models", "/health", "/metrics"])
    words = {
        404: f"unknown path {request.url.path[:200]}; the paths are {paths}",
        405: f"{request.method} is not allowed here",
    }
    codes = {404: "unknown_path", 405: "method_not_allowed"}
    error_body = ApiError(
        error.status_code, words.get(error.status_code, error.detail), code=codes.get(error.status_code)
    )
    return Response(error_body.body, error_body.status, error.headers, media_type="application/json")


async def _bug_error(request: Request, _error: Exception) -> Response:
    return await _api_error(request, _bug())


def _bug() -> ApiError:
    return ApiError(500, "the gateway failed; see its log", code="internal_error", reason="bug")
