"""The measured model and its request options: everything that a worker process needs to send requests to a server."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.measure.client import images
from trtllm_pipeline.measure.client.openai import OpenAiClient
from trtllm_pipeline.measure.client.openai import options as openai_sampling
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.client.session import GenerationRequest, Option
from trtllm_pipeline.measure.client.triton import IMAGE_INPUT, Client, sampling
from trtllm_pipeline.measure.load.prompts import Prompt, beyond_template

OPENAI: Final[Mapping[str, tuple[Literal["chat", "completions"], bool]]] = {
    "openai_chat": ("chat", True),
    "openai_chat_unary": ("chat", False),
    "openai_completions": ("completions", True),
    "openai_completions_unary": ("completions", False),
}
"""Protocol -> endpoint, streamed. `api/chat/completions` and `api/completions` of any OpenAI-compatible server."""

_SAMPLING: Final = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OF_TRITON: Final = {**{name: name for name in (*_SAMPLING, "min_tokens")}, "seed": "random_seed"}
"""Field of a chat request -> input tensor."""
_OF_COMPLETIONS: Final = {
    name: name
    for name in (*_SAMPLING, "min_p", "seed", "min_tokens", "logit_bias", "response_format", "structured_outputs")
} | {name: name for name in ("guided_json", "guided_choice", "guided_regex", "guided_grammar")}
AnyClient = Client | OpenAiClient
_PORTS: Final[Mapping[str, int]] = {"grpc": 8001, "http": 8000}
"""Triton's default ports."""


def adds_special_tokens(service: Service, protocol: str, timeout_s: float) -> bool:
    """True if a server adds the tokenizer's special tokens to prompts sent over `protocol`.

    Triton reports it. OpenAI-compatible servers do so for completions. Raises ServerError if the server is unreachable.
    """
    if protocol in OPENAI:
        return True

    async def query() -> bool:
        async with Client(service, service.model, protocol, timeout_s=timeout_s) as client:
            return await client.adds_special_tokens()

    return asyncio.run(query())


async def served_length(target: Target) -> int | None:
    """The longest sequence, prompt and output together, that an OpenAI-compatible server lists for its model. None if
    unknown.

    Raises ServerError if the server or its model is missing.
    """
    if target.protocol not in OPENAI:
        return None
    async with target.client() as client:
        return await client.longest() if isinstance(client, OpenAiClient) else None


def service_at(url: str, protocol: str, model: str, *, metrics: str | None = None) -> Service:
    """The service at a URL from a user, HOST, HOST:PORT or http(s)://..., over grpc, http or openai.

    Raises ServerError for an invalid URL, and for gRPC over TLS, which is not supported.
    """
    parts = urlsplit(url if "://" in url else f"//{url}")
    try:
        known = parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # above 65535, or not a number
        known = False
    if not known:
        raise ServerError(
            f"{url}: expected HOST, HOST:PORT or http(s)://HOST:PORT, the port from 1 to 65535",
            failure=FailureClass.USER,
        )
    if protocol == "openai" or (protocol == "http" and url.startswith("https:")):
        return Service(url if "://" in url else f"http://{url}", "", metrics, None, model, None)
    scheme, _, address = url.rpartition("://")
    if scheme not in {"", "http", "grpc"}:
        raise ServerError(f"{url}: {protocol} over {scheme} is not supported", failure=FailureClass.USER)
    address = address.rstrip("/").removesuffix(":")
    if "/" in address:
        raise ServerError(f"{url}: a Triton server has no path", failure=FailureClass.USER, hint="give HOST:PORT")
    address = address if re.search(r":\d+$", address) else f"{address}:{_PORTS[protocol]}"
    http, grpc = ("", address) if protocol == "grpc" else (address, "")
    return Service(http, grpc, metrics, None, model, None)


def environment_key() -> str | None:
    """The API key for external servers."""
    return os.environ.get("OPENAI_API_KEY")


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a running server. `service` has its address: for OpenAI protocols, `service.http` is its URL."""

    protocol: str
    service: Service
    model: str
    timeout_s: float = 300.0
    max_tokens: int = 1
    """max_tokens of a request whose prompt has none."""
    temperature: float = 0.0
    options: Mapping[str, Option] = field(default_factory=dict)
    """Additional inputs of every request."""
    api_key: str | None = field(default=None, repr=False)
    in_turn: tuple[Mapping[str, Option], ...] = ()
    """Additional inputs that alternate between requests, round-robin."""
    exact_length: bool = False
    """True to continue generation past the model's end token, up to max_tokens."""
    stop_words: tuple[str, ...] = ()
    """For requests whose prompt has none."""
    seed: int = 0
    """Sampling seed of the first request. Incremented for each further request."""

    @property
    def tls(self) -> bool:
        """True for encrypted connections: their arrival times are those of the reads."""
        return self.service.http.startswith("https:")

    @classmethod
    def at(
        cls,
        url: str,
        protocol: str,
        model: str,
        *,
        endpoint: str = "chat",
        streaming: bool = True,
        metrics: str | None = None,
        timeout_s: float = 300.0,
        max_tokens: int = 1,
    ) -> Target:
        """A model of the server at a URL, see `service_at`. An OpenAI server's key is that of OPENAI_API_KEY."""
        name = f"openai_{endpoint}" if protocol == "openai" else protocol
        return cls(
            name if streaming else f"{name}_unary",
            # With or without the path: others use both.
            service_at(url, protocol, model, metrics=metrics and metrics.rstrip("/").removesuffix("/metrics")),
            model,
            timeout_s,
            max_tokens,
            api_key=environment_key() if protocol == "openai" else None,
        )

    def client(self) -> AnyClient:
        """A client for it, not yet entered."""
        if self.protocol in OPENAI:
            endpoint, stream = OPENAI[self.protocol]
            return OpenAiClient(
                self.service.http,
                self.model,
                endpoint,
                stream=stream,
                timeout_s=self.timeout_s,
                api_key=self.api_key or (None if self.service.started else environment_key()),
                lists_models=self.service.lists_models,
            )
        return Client(self.service, self.model, self.protocol, timeout_s=self.timeout_s)

    def of_row(self, prompt: Prompt) -> dict[str, Any]:
        """Options in the row of `prompt`. Raises ServerError for those that this protocol cannot send."""
        if self.protocol.startswith("openai_chat"):
            return {**prompt.request}
        left = beyond_template(prompt.request)
        names = _OF_COMPLETIONS if self.protocol in OPENAI else _OF_TRITON
        unknown = ", ".join(name for name in left if name not in names)
        if unknown:
            raise ServerError(
                f"prompt {prompt.id}: {unknown} cannot be sent over {self.protocol}",
                failure=FailureClass.USER,
                hint="measure a chat endpoint (--protocol openai), or leave it out of the row",
            )
        return {names[name]: value for name, value in left.items()}

    def generation(self, prompt: Prompt, number: int) -> GenerationRequest:
        """The request for `prompt`, the `number`-th of its level. Options of the prompt override the others."""
        of_openai = self.protocol in OPENAI
        chosen = openai_sampling if of_openai else sampling
        max_tokens = prompt.max_tokens or self.max_tokens
        of_row = self.of_row(prompt)
        temperature = of_row.pop("temperature", self.temperature)
        options: dict[str, Option] = {**chosen(temperature, seed=self.seed + number), **self.options, **of_row}
        if self.exact_length:
            # Engines in Triton have no such switch, so the minimum length is set to the maximum.
            options |= {"min_tokens": max_tokens, **({"ignore_eos": True} if of_openai else {})}
        if self.in_turn:
            options |= self.in_turn[number % len(self.in_turn)]
        if words := prompt.stop_words or self.stop_words:
            options["stop" if of_openai else "stop_words"] = words
        text = prompt.text
        if prompt.images and not of_openai:
            # Ensembles with a visual engine apply the model's chat template themselves.
            text, urls = images.split_images(prompt.messages)
            if len(urls) > 1:
                raise ServerError(
                    f"prompt {prompt.id} has {len(urls)} images; Triton accepts one per prompt",
                    failure=FailureClass.USER,
                )
            options[IMAGE_INPUT] = images.as_jpeg(urls[0])
        return GenerationRequest(text, max_tokens, options, prompt.messages)
