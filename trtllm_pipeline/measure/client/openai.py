"""Client for any OpenAI-compatible server: chat and completions, streamed or not.

Source: OpenAI API reference, "Create chat completion" and "Create completion".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.measure.client import fields, recognise, response_text
from trtllm_pipeline.measure.client.session import Answer, BaseClient, GenerationRequest, HttpSession, Session
from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.urls import api_url

if TYPE_CHECKING:
    from typing_extensions import Self

Endpoint = Literal["chat", "completions"]
_PATHS: Final = {"chat": "/chat/completions", "completions": "/completions"}


class OpenAiClient(BaseClient):
    """Access to one model of a server.

    `url` may end in `/v1` or not. Entering looks the model up and raises ServerError if the server or the model does
    not exist. A server that does not list its models is trusted, and so is one with `lists_models=False`, which lists
    other names.
    """

    def __init__(
        self,
        url: str,
        model: str,
        endpoint: Endpoint,
        *,
        stream: bool,
        timeout_s: float,
        api_key: str | None = None,
        lists_models: bool = True,
    ) -> None:
        self.url = api_url(url)
        self.endpoint = endpoint
        self.stream = stream
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.name = model
        self.lists_models = lists_models
        super().__init__(timeout_s)

    async def __aenter__(self) -> Self:
        names = await self.models()
        if self.lists_models and names is not None and self.name not in names:
            known = fields.shortened(", ".join(names) or "none")
            raise ServerError(f"{self.url} has no model {self.name!r}; it has {known}", failure=FailureClass.USER)
        return self

    async def models(self) -> list[str] | None:
        """The models that the server lists. None if it lists none. Raises ServerError for another kind of server."""
        try:
            status, body = await self._get(self.url, "/models", self.headers)
        except ServerError as error:
            if error.failure is FailureClass.TRANSIENT and (other := await self._other()) is not None:
                raise other from error
            raise
        if status == 200:
            try:
                listed = fields.items(fields.parse(body)["data"], "data")
                return [fields.text(fields.mapping(entry, "data")["id"], "id") for entry in listed]
            except (ProtocolError, KeyError):
                return None
        if status in {401, 403}:
            raise ServerError(
                f"{self.url} rejects the API key: HTTP status {status}",
                failure=FailureClass.USER,
                hint="set OPENAI_API_KEY",
            )
        if (other := await self._other()) is not None:
            raise other
        return None

    async def longest(self) -> int | None:
        """`max_model_len` of the model, as vLLM and SGLang list it. None if the server does not."""
        try:
            status, body = await self._get(self.url, "/models", self.headers)
            listed = fields.items(fields.parse(body).get("data"), "data") if status == 200 else ()
            models = [fields.mapping(entry, "data") for entry in listed]
            lengths = [
                fields.count(each.get("max_model_len"), "max_model_len")
                for each in models
                if each.get("id") == self.name
            ]
        except (ServerError, ProtocolError):
            return None
        return next(iter(lengths), None)

    async def _other(self) -> ServerError | None:
        """The error for another kind of server."""
        return await recognise.wrong_protocol(self.url.removesuffix("/v1"), "openai", self.timeout_s)

    def _new_session(self) -> Session:
        return _OpenAiSession(self)

    async def ready(self) -> dict[str, bool]:
        """`{"http": True}` while the server responds."""
        try:
            return {"http": (await self._get(self.url, "/models", self.headers))[0] > 0}
        except ServerError:
            return {"http": False}

    async def server(self) -> str | None:
        """The server's name and version."""
        version = await self.version()
        return None if version is None else f"OpenAI API {version}"

    async def version(self) -> str | None:
        """The version that the server reports at the path of vLLM and trtllm-serve."""
        try:
            status, body = await self._get(self.url.removesuffix("/v1"), "/version", self.headers)
            version = fields.text(fields.mapping(fields.parse(body), "/version")["version"], "version")
        except (ServerError, ProtocolError, KeyError):
            return None
        return fields.shortened(version) if status == 200 else None


class _OpenAiSession(HttpSession):
    def __init__(self, client: OpenAiClient) -> None:
        super().__init__(client.url, _PATHS[client.endpoint], stream=client.stream, timeout_s=client.timeout_s)
        self._headers = client.headers
        self._model = client.name
        self._endpoint = client.endpoint

    def _encode(self, request: GenerationRequest) -> bytes:
        body: dict[str, Any] = {"model": self._model}
        if self._endpoint == "chat":
            body["messages"] = list(request.messages) or [{"role": "user", "content": request.text}]
        else:
            body["prompt"] = request.text
        body["max_tokens"] = request.max_tokens
        body["stream"] = self._stream
        if self._stream:
            body["stream_options"] = {"include_usage": True}
        return json.dumps({**body, **request.options}).encode()

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        await super()._exchange(message, answer)
        if answer.error is None and answer.finish_reason is None:
            answer.error = "the response ended without a finish_reason"

    def _parse(self, now_ns: int, data: bytes | bytearray, answer: Answer, *, failed: bool = False) -> None:
        if data != b"[DONE]":
            super()._parse(now_ns, data, answer, failed=failed)

    def _take(self, now_ns: int, body: Mapping[str, Any], answer: Answer) -> None:
        for each in fields.items(body.get("choices"), "choices"):
            choice = fields.mapping(each, "a choice")
            message = fields.mapping(choice.get("delta") or choice.get("message"), "a message")
            reasoning, text, calls, unread = response_text.read(
                {"text": choice.get("text")} if self._endpoint == "completions" else message
            )
            if "role" in message and not (reasoning or text or calls) and answer.role_ns is None:
                answer.began(now_ns)
                answer.role_ns = now_ns
            else:
                if reasoning:
                    answer.received(now_ns, reasoning, None, reasoning=True)
                if text or calls or not reasoning:
                    answer.received(now_ns, text + calls, None)
                if not answer.events:
                    answer.unread = answer.unread or unread
            answer.finish_reason = fields.text(choice.get("finish_reason"), "finish_reason") or answer.finish_reason
        usage = fields.mapping(body.get("usage"), "usage")
        if usage:
            answer.usage_ns = now_ns
            answer.output_tokens = fields.count(usage.get("completion_tokens"), "completion_tokens")
            answer.input_tokens = fields.count(usage.get("prompt_tokens"), "prompt_tokens")
            details = fields.mapping(usage.get("prompt_tokens_details"), "prompt_tokens_details")
            answer.cached_tokens = fields.count(details.get("cached_tokens"), "cached_tokens")
            answer.total_tokens = fields.count(usage.get("total_tokens"), "total_tokens")


def options(temperature: float, *, seed: int) -> dict[str, float | int]:
    """Request fields for a temperature; 0 is greedy."""
    return {"temperature": temperature} if temperature == 0 else {"temperature": temperature, "seed": seed}
