"""A conversation with a model behind any OpenAI-compatible server, with streamed replies."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.measure.client import fields, recognise, response_text
from trtllm_pipeline.measure.client.session import ServerSentEvents
from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.transport.http import Connection, fetch
from trtllm_pipeline.measure.client.transport.timestamped_socket import MAX_MESSAGE_BYTES, MAX_STREAM_BYTES
from trtllm_pipeline.measure.client.urls import api_url

_LOOK_S: Final = 10.0
_SILENCE_S: Final = 300.0
"""A server that sends no data for this time counts as gone."""
_USERS: Final = range(400, 500)


@dataclass(slots=True)
class Reply:
    """A reply so far. Times are seconds of a monotonic clock."""

    asked_s: float
    text: str = ""
    finish_reason: str | None = None
    """None if it was stopped."""
    first_s: float | None = None
    last_s: float = 0.0
    parts: int = 0
    tokens: int | None = None
    """Output tokens, as counted by the server."""
    calls: dict[int, str] = field(default_factory=dict)
    """Tool calls by index, as text: a server may call tools without a request for it."""

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first. None for fewer than two."""
        count = self.tokens or self.parts
        if self.first_s is None or count < 2 or self.last_s <= self.first_s:
            return None
        return (count - 1) / (self.last_s - self.first_s)


Show = Callable[[str, bool], None]
"""Called with each part of a reply, and True if it is reasoning."""


class Conversation:
    """Messages exchanged with one model. `url` may end in /v1."""

    def __init__(self, url: str, model: str, *, api_key: str | None = None, options: Mapping[str, Any]) -> None:
        self.url = base_url(url)
        self.model = model
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []
        self._options = options
        self._headers = _authorization(api_key)

    def reset(self) -> None:
        """Clear the history. The system prompt stays."""
        self.messages = []

    def ask(self, text: str, show: Show) -> Reply:
        """Send a message and return the reply. An interrupt ends the reply, and the part received so far is kept.

        Raises ServerError and leaves the history unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        reply = asyncio.run(self._ask([*system, *messages], show))
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply

    async def _ask(self, messages: list[dict[str, str]], show: Show) -> Reply:
        body = {
            **self._options,
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = Reply(asked_s=time.monotonic())
        asking = asyncio.ensure_future(self._stream(json.dumps(body).encode(), reply, show))
        with _cancelled_by_interrupt(asking):
            try:
                await asking
            except asyncio.CancelledError:
                if not asking.cancelled():
                    raise
        return reply

    async def _stream(self, body: bytes, reply: Reply, show: Show) -> None:
        """Fill `reply`. Raises ServerError."""
        connection, events, refusal = Connection(self.url), ServerSentEvents(), bytearray()
        last_s = time.monotonic()
        raised: list[Exception] = []

        def arrived(_now_ns: int, part: bytes) -> None:
            nonlocal last_s
            last_s = time.monotonic()
            if connection.answer.status != 200:
                refusal.extend(part)
                return
            try:
                for event in events.feed(part):
                    if event.data != b"[DONE]":
                        _take(fields.parse(event.data), reply, show, failed=event.failed)
            except (ServerError, OSError) as error:  # the connection only handles its own errors
                raised.append(error)
                raise ProtocolError(str(error)) from error

        async def post() -> int:
            await connection.open()
            return await connection.request(
                "POST", "/chat/completions", body, arrived, self._headers, max_bytes=MAX_STREAM_BYTES
            )

        posting = asyncio.ensure_future(post())
        try:
            while not (await asyncio.wait([posting], timeout=1.0))[0]:
                if time.monotonic() - last_s > _SILENCE_S:
                    raise ServerError(
                        f"{self.url}: no response within {_SILENCE_S:g} s", failure=FailureClass.TRANSIENT
                    )
            status = await posting
        except (OSError, ProtocolError) as error:
            if raised:
                raise raised[0] from None
            if reply.parts:
                raise ServerError(f"the response broke off: {error}", failure=FailureClass.TRANSIENT) from error
            raise _unreachable(self.url, error) from error
        finally:
            posting.cancel()
            connection.close()
        if status != 200:
            raise _refused(self.url, status, bytes(refusal[:MAX_MESSAGE_BYTES]))
        if (refused := events.error) is not None:
            raise ServerError(f"the server failed: {fields.shortened(refused)}")
        if reply.finish_reason is None:
            raise ServerError(f"{self.url}: the response ended early", failure=FailureClass.TRANSIENT)


@contextmanager
def _cancelled_by_interrupt(task: asyncio.Future[None]) -> Iterator[None]:
    """While active, Ctrl-C cancels a task instead of the program."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def base_url(url: str) -> str:
    """`url` with a trailing /v1. Raises ServerError if it has no host."""
    if not urlsplit(url if "://" in url else f"//{url}").netloc:
        raise ServerError(f"{url!r} is not http://HOST:PORT", failure=FailureClass.USER)
    return api_url(url)


def models(url: str, api_key: str | None = None) -> dict[str, str | None]:
    """The models that a server lists. A LoRA adapter has its model as `parent`, as in vLLM. Raises ServerError."""
    return asyncio.run(_models(base_url(url), api_key))


async def _models(url: str, api_key: str | None) -> dict[str, str | None]:
    try:
        status, body = await fetch(url, "/models", timeout_s=_LOOK_S, headers=_authorization(api_key))
        if status != 200:
            raise await recognise.wrong_protocol(url.removesuffix("/v1"), "openai", _LOOK_S) or _refused(
                url, status, body
            )
        names: dict[str, str | None] = {}
        for each in fields.items(fields.parse(body).get("data"), "data"):
            model = fields.mapping(each, "a model")
            parent = model.get("parent")
            names[fields.text(model.get("id"), "id")] = None if parent is None else fields.text(parent, "parent")
        return names
    except (OSError, ProtocolError) as error:
        other = await recognise.wrong_protocol(url.removesuffix("/v1"), "openai", _LOOK_S)
        raise other or _unreachable(url, error) from error
    except ValueError as error:
        raise ServerError(str(error), failure=FailureClass.USER) from error


def _authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _take(body: Mapping[str, Any], reply: Reply, show: Show, *, failed: bool = False) -> None:
    """Process one event of a stream. Raises ProtocolError, and ServerError for an error in it."""
    if (error := fields.error_of(body, failed=failed)) is not None:
        raise ServerError(f"the server failed: {fields.shortened(error)}")
    for each in fields.items(body.get("choices"), "choices"):
        choice = fields.mapping(each, "a choice")
        delta = fields.mapping(choice.get("delta"), "delta")
        thought, text, *_ = response_text.read(delta)
        for call in fields.items(delta.get("tool_calls"), "tool_calls"):
            _call(fields.mapping(call, "a tool call"), reply)
        reply.finish_reason = fields.text(choice.get("finish_reason"), "finish_reason") or reply.finish_reason
        for piece, reasoning in ((thought, True), (text, False)):
            if piece:
                reply.last_s = time.monotonic()
                reply.first_s = reply.first_s or reply.last_s
                reply.parts += 1
                reply.text += "" if reasoning else piece
                show(piece, reasoning)
    usage = fields.mapping(body.get("usage"), "usage")
    reply.tokens = fields.count(usage.get("completion_tokens"), "completion_tokens") or reply.tokens


def _call(call: Mapping[str, Any], reply: Reply) -> None:
    index = call.get("index")
    function = fields.mapping(call.get("function"), "function")
    name, arguments = (fields.text(function.get(each), each) for each in ("name", "arguments"))
    key = index if isinstance(index, int) else 0
    reply.calls[key] = reply.calls.get(key, "") + (f"{name} " if name else "") + arguments


def _refused(url: str, status: int, body: bytes) -> ServerError:
    try:
        message = fields.shortened(fields.error_of(fields.parse(body), failed=True) or "")
    except ProtocolError:
        message = ""
    hint = "set OPENAI_API_KEY" if status in {401, 403} else None
    failure = FailureClass.USER if status in _USERS else FailureClass.TRANSIENT
    return ServerError(f"{url}: {message or f'HTTP status {status}'}", failure=failure, hint=hint)


def _unreachable(url: str, error: Exception) -> ServerError:
    return ServerError(
        f"no response from {url}: {str(error) or type(error).__name__}",
        failure=FailureClass.BUG if "not an HTTP" in str(error) else FailureClass.TRANSIENT,
        hint="check that the server is running and that this is its address",
    )
