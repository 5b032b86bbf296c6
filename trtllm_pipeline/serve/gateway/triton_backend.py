"""A Triton server behind the gateway: requests become input tensors, sent over gRPC streams that are reused."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, ServerError, StageError
from trtllm_pipeline.measure import GenerationRequest, ProtocolError, Service, Session, fields, session, triton
from trtllm_pipeline.models import Engine, model_names
from trtllm_pipeline.orchestrate import GatewayParams
from trtllm_pipeline.serve.gateway.api_error import (
    CONTEXT_LENGTH,
    ApiError,
    bad,
    bad_gateway,
    timed_out,
    unavailable,
    unsupported,
)
from trtllm_pipeline.serve.gateway.choice import Choice
from trtllm_pipeline.serve.gateway.dialects import dialect_for
from trtllm_pipeline.serve.gateway.dialects.dialect import Dialect, DialectError, Turn, special_markers
from trtllm_pipeline.serve.gateway.dialects.parsing import AnswerParser
from trtllm_pipeline.serve.gateway.gateway_config import OF_TRITON, OfferedModel
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts, PromptTokens
from trtllm_pipeline.serve.gateway.parsed_request import Guide, ParsedRequest
from trtllm_pipeline.tensorrt import server_requests

CONNECT_S: Final = 5.0
_COMPLETION_TOKENS: Final = 16
"""Default length of a completion, the same as OpenAI's."""
_CHAT_TOKENS: Final = 1024
"""Length of a response if neither the request nor the model limits it."""
_POSTPROCESSING: Final = "postprocessing"
_GUIDE: Final = "guided_decoding_guide"
_LOG: Final = logging.getLogger(__name__)
_TOP: Final = "return_top_log_probs"
_GUIDE_TYPE: Final = "guided_decoding_guide_type"
_NEUTRAL: Final = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "min_p": 0,
    "top_p": 1,
}
_UNASKED: Final = ("repetition_penalty", *OF_TRITON)
"""Default limits for request fields other than sampling, if the model accepts them: a model served from weights does
not.
"""
_FORGOTTEN: Final = "not found in cache. Please send LoRA weights"
"""An engine's error for an adapter that is not loaded or was evicted."""
_OF_THE_REQUEST: Final = re.compile(
    r"not supported|unsupported|must be|exceed|too long|longer than|at most|limit|invalid|has no input|empty prompt",
    re.IGNORECASE,
)
"""Patterns in the errors for refused requests. Errors in a stream have no code."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt in the server's form."""

    text: str
    tokens: PromptTokens
    max_tokens: int
    parser: AnswerParser | None = None
    guide: Guide | None = None


class TritonBackend:
    """One model of a running server."""

    idle_s = 15.0
    """How long an idle stream is kept: Triton does not exit while one is open."""

    def __init__(
        self,
        client: triton.Client,
        served: OfferedModel,
        params: GatewayParams,
        texts: ModelTexts | None,
        *,
        special: bool,
        dropped: bool,
        guided: bool,
        engine: Path | None,
    ) -> None:
        """`special`: the server adds the tokenizer's special tokens to prompts. `dropped`: it removes them from
        responses.

        `engine` is the directory of the server's engine. None if it cannot be read here. Raises EngineError.
        """
        self._client = client
        self._engine = engine
        self._always = {} if engine is None else _of_every_request(client.model, engine)
        self._adapters: dict[str, Mapping[str, session.Option]] = {}
        """Model name in requests -> inputs that select its adapter, for the adapters that the server has."""
        self._loading = asyncio.Lock()
        self._served = served
        self._params = params
        self._texts = texts
        self._special = special
        self._dropped = dropped
        self._guided = guided
        self._idle: deque[tuple[Session, float]] = deque()
        self._closed = False
        self.broken = False
        """True if the server has disconnected. It may be another one when it comes back."""
        self.max_seq_len = served.max_seq_len or (texts.max_seq_len if texts else None)
        self.max_input_len = served.max_input_len or (texts.max_input_len if texts else None)
        self._dialect: Dialect | None = None
        if texts is not None and texts.template is not None:
            self._dialect = dialect_for(served.dialect, texts.template.source, texts.config)
        self._more_stops = texts.more_ends if texts is not None and client.model.takes("stop_words") else ()

    @classmethod
    async def connect(
        cls, service: Service, served: OfferedModel, params: GatewayParams, texts: ModelTexts | None
    ) -> TritonBackend:
        """Query the inputs of the server's model. Raises ApiError 503 or 502."""
        name = served.server_model or service.model or await _model_at(service, served.name)
        client = triton.Client(service, name, "grpc", timeout_s=CONNECT_S)
        try:
            await client.__aenter__()
            await client.stop_by(model_names.ENGINE_MODEL)
            special = await client.adds_special_tokens()
            dropped = triton.is_on(await client.parameters(_POSTPROCESSING), "skip_special_tokens")
            parameters = await client.parameters(model_names.ENGINE_MODEL)
            guided = client.model.takes(_GUIDE) and _follows_guides(parameters)
            engine = _engine(parameters)
            alone = engine is None and client.model.name == model_names.BLS_MODEL
            drafts = alone and await client.parameters(model_names.DRAFT_MODEL) is not None
            backend = cls(client, served, params, texts, special=special, dropped=dropped, guided=guided, engine=engine)
        except ServerError as error:
            if error.failure is FailureClass.TRANSIENT:
                raise unavailable(f"the server of model {served.name} does not respond") from error
            known = await _models_at(service)
            has = f"; it has {', '.join(known)}" if known and name not in known else ""
            raise bad_gateway(f"the server of model {served.name}: {error.message}{has}") from error
        client.timeout_s = params.generation_timeout_s
        if drafts:
            _LOG.warning(
                "the draft model of %s is not used: the number of draft tokens is in the config.json of its engine, which "
                "cannot be read here",
                served.name,
            )
        if dropped:
            backend.warn_of_dropped_markers()
        backend.warn_of_unused_defaults()
        return backend

    def warn_of_unused_defaults(self) -> None:
        """Log the sampling defaults for which the model has no input."""
        unused = [name for name in (*_UNASKED, "temperature", "top_k", "top_p") if self._default(name) is not None]
        if lacking := [name for name in unused if not self._client.model.takes(name)]:
            _LOG.warning(
                "the server of model %s has no input %s: that default sampling, of the gateway or of the model's "
                "generation_config.json, is not used",
                self._served.name,
                ", ".join(lacking),
            )

    def warn_of_dropped_markers(self) -> None:
        """Log the markers that are lost if the server drops special tokens from its responses."""
        if self._dialect is None or self._texts is None:
            return
        known = self._texts.tokenizer.get_added_tokens_decoder().values()
        markers = special_markers(self._dialect, [token.content for token in known if token.special])
        if markers:
            _LOG.warning(
                "the server of model %s removes special tokens from its responses, so tool calls or reasoning may be "
                "missed: without %s they look like text; settings.repository.skip_special_tokens: false keeps them",
                self._served.name,
                ", ".join(markers),
            )

    @property
    def accumulates(self) -> bool:
        """True if each response repeats all text so far."""
        return self._client.model.accumulates

    @property
    def count(self) -> Callable[[str], int] | None:
        """Counts the tokens of a response, for a server that sends several at a time. None for other servers."""
        return None if self._texts is None or self._client.model.decoupled else self._texts.answer_tokens

    async def ready(self) -> bool:
        self._client.timeout_s, before = CONNECT_S, self._client.timeout_s
        try:
            return (await self._client.ready()).get("grpc", False)
        finally:
            self._client.timeout_s = before

    async def prompts(self, request: ParsedRequest) -> list[PreparedPrompt]:
        """The prompt for each choice of a request. Raises ApiError for prompts that the model cannot process."""
        if request.guide is not None and not self._guided:
            raise unsupported(
                "response_format",
                f"model {request.model} does not support response_format: its server has no guided decoding",
            )
        self._check_special_tokens(request)
        if request.endpoint == "completions":
            prompts = [await self._prompt(request, text) for text in request.prompts]
            return [prompt for prompt in prompts for _ in range(request.n)]
        if self._texts is None or self._dialect is None:
            raise unsupported("messages", f"model {request.model} has no chat template here; use /v1/completions")
        turn = Turn(
            request.messages, request.tools, request.tool_choice, request.parallel_tool_calls, request.variables
        )
        try:
            prepared = self._dialect.prepare(turn)
            rendered = await self._texts.render(prepared.chat, special=self._special)
            started = [
                prepared.start(
                    rendered, stream=request.stream, guided=self._guided, answer_only=request.guide is not None
                )
                for _ in range(request.n)  # each needs its own parser
            ]
        except DialectError as error:
            raise bad(error.param, error.message + (f"; {error.hint}" if error.hint else "")) from None
        guide = started[0].guide
        given = request.guide if guide is None else Guide("json_schema", json.dumps(guide, ensure_ascii=False))
        first = await self._prompt(request, started[0].prompt)
        return [replace(first, parser=each.parser, guide=given) for each in started]

    def _check_special_tokens(self, request: ParsedRequest) -> None:
        """Raise ApiError if a request wants other handling of special tokens than its server has for all."""
        # A chat template writes the special tokens itself.
        added = request.endpoint == "completions" and self._special
        for name, wanted, done in (
            ("add_special_tokens", request.add_special_tokens, added),
            ("skip_special_tokens", request.skip_special_tokens, self._dropped),
        ):
            if wanted is not None and wanted != done:
                raise unsupported(
                    name,
                    f"{name} is {str(done).lower()} for every request to model {request.model}: its server sets it",
                )

    async def _prompt(self, request: ParsedRequest, text: str) -> PreparedPrompt:
        wanted = request.max_tokens or self._params.max_tokens
        if wanted is None and request.endpoint == "completions":
            wanted = _COMPLETION_TOKENS
        texts = self._texts
        if texts is not None and wanted is not None and texts.has_at_most(text, self._surely_fit(wanted)):
            return PreparedPrompt(text, texts.count_meanwhile(text, special=self._special), wanted, guide=request.guide)
        tokens = None
        if texts is not None:
            most = self.max_input_len or self.max_seq_len
            tokens = await texts.count(text, special=self._special, most=most)
        longest = self._max_tokens(request, tokens, wanted)
        return PreparedPrompt(text, PromptTokens(tokens), longest, guide=request.guide)

    def _surely_fit(self, max_tokens: int) -> float:
        """Prompt tokens that fit the model together with an output of `max_tokens`."""
        left = inf if self.max_seq_len is None else self.max_seq_len - max_tokens
        return left if self.max_input_len is None else min(left, self.max_input_len)

    def _max_tokens(self, request: ParsedRequest, tokens: int | None, wanted: int | None) -> int:
        """Output limit for a prompt. Raises ApiError if the prompt and the output do not fit the model."""
        param = "prompt" if request.endpoint == "completions" else "messages"
        if tokens == 0:
            raise bad(param, "the prompt has no tokens")
        if tokens is not None and self.max_input_len is not None and tokens > self.max_input_len:
            raise bad(
                param,
                f"this model accepts prompts of at most {self.max_input_len} tokens; this one has {tokens}",
                code=CONTEXT_LENGTH,
            )
        if self.max_seq_len is None or tokens is None:
            return wanted or _CHAT_TOKENS
        left = self.max_seq_len - tokens
        if left < 1 or (request.max_tokens is not None and request.max_tokens > left):
            answer = f" and max_tokens is {request.max_tokens}" if request.max_tokens is not None else ""
            raise bad(
                param,
                f"this model's context is {self.max_seq_len} tokens; the prompt has {tokens}{answer}",
                code=CONTEXT_LENGTH,
            )
        return min(left, wanted or left)

    def inputs(self, request: ParsedRequest, prompt: PreparedPrompt, number: int) -> dict[str, session.Option]:
        """Input tensors of choice `number` besides prompt and length. Raises ApiError for unsupported fields."""
        model = self._client.model
        given: dict[str, session.Option] = {**self._always}
        needed: dict[str, str] = {}
        for name, value in request.sampling.items():
            if name not in {"temperature", "top_k", "top_p"} and value != _NEUTRAL.get(name):
                given[name], needed[name] = value, name
        if (least := request.sampling.get("min_tokens", 0)) > prompt.max_tokens:
            raise bad("min_tokens", f"min_tokens is {least}; the output has at most {prompt.max_tokens} tokens")
        if request.ignore_eos:  # the output must not end before its last token
            given["min_tokens"], needed["min_tokens"] = prompt.max_tokens, "ignore_eos"
        given |= self._sampled(request, number, needed)
        if request.logprobs:
            given["return_log_probs"], needed["return_log_probs"] = True, "logprobs"
        if request.top_logprobs:
            field = "logprobs" if request.endpoint == "completions" else "top_logprobs"
            if self._texts is None:
                raise unsupported(
                    field,
                    f"{field} is not supported for model {request.model}: the gateway does not have its tokenizer",
                )
            given[_TOP], needed[_TOP] = request.top_logprobs, field
        if request.bad_words:
            given["bad_words"], needed["bad_words"] = request.bad_words, "bad_words"
        if prompt.guide is not None:
            tensors = guided(prompt.guide)
            given |= tensors
            needed |= dict.fromkeys(tensors, "response_format")
        for name in _UNASKED:
            default = None if name in request.sampling else self._default(name)
            if default is not None and default != _NEUTRAL.get(name) and model.takes(name):
                given[name] = default
        ends = self._ends(request)
        if ends:
            needed["stop_words"] = "stop_token_ids"
        self._refuse(needed)
        stops = (*request.stop, *self._params.stop, *ends, *(() if request.ignore_eos else self._more_stops))
        if stops and model.takes("stop_words"):
            given["stop_words"] = stops
        if model.takes("exclude_input_in_output"):
            given["exclude_input_in_output"] = True
        if self._texts is None and model.takes("return_num_input_tokens"):
            given["return_num_input_tokens"] = True
        return given

    def _ends(self, request: ParsedRequest) -> list[str]:
        """The texts of `stop_token_ids`. Raises ApiError for tokens that cannot be sent to the server as text."""
        added = {} if self._texts is None else self._texts.tokenizer.get_added_tokens_decoder()
        ends = []
        for number in request.stop_token_ids:
            if number not in added:
                raise unsupported(
                    "stop_token_ids",
                    f"stop_token_ids has {number}, which is not known as a special token of model {request.model}; its server accepts "
                    "stop words as text: put the text in stop",
                )
            ends.append(added[number].content)
        return ends

    def _sampled(self, request: ParsedRequest, number: int, needed: dict[str, str]) -> dict[str, session.Option]:
        """Sampling inputs. TensorRT-LLM is greedy unless top_k or top_p is set, and only the seed determines its draws."""
        model, asks = self._client.model, request.sampling
        temperature = asks.get("temperature", self._default("temperature"))
        top_k, top_p = asks.get("top_k", self._default("top_k")), asks.get("top_p", self._default("top_p"))
        if asks.get("temperature", 1) != 1:
            needed["top_k" if temperature == 0 else "temperature"] = "temperature"
        if asks.get("top_p", 1) != 1:
            needed["top_p"] = "top_p"
        if asks.get("top_k", -1) > 0:
            needed["top_k"] = "top_k"
        if request.seed is not None:
            needed["random_seed"] = "seed"
        if temperature == 0 or top_k == 1 or top_p == 0:
            return {"top_k": 1} if model.takes("top_k") else {}
        seed = secrets.randbits(31) if request.seed is None else request.seed
        drawn: dict[str, session.Option] = {
            "temperature": 1.0 if temperature is None else temperature,
            "top_p": 1.0 if top_p is None else top_p,
            "random_seed": (seed + number) % 2**63,
        }
        if top_k is not None and top_k > 0:
            drawn["top_k"] = int(top_k)
        return {name: value for name, value in drawn.items() if name in needed or model.takes(name)}

    def _default(self, name: str) -> float | int | None:
        given: float | None = getattr(self._params, name)
        return given if given is not None or self._texts is None else self._texts.defaults.get(name)

    def _refuse(self, needed: Mapping[str, str]) -> None:
        """Raise ApiError for fields of a request for which the model has no input."""
        missing = {field for name, field in needed.items() if not self._client.model.takes(name)}
        if missing:
            names = ", ".join(sorted(missing))
            raise unsupported(
                min(missing), f"model {self._served.name} does not support {names}: its server has no such input"
            )

    async def adapter(self, name: str) -> Mapping[str, session.Option]:
        """Request inputs that select the LoRA adapter of the offered model `name`. Empty for the model itself.

        A server that stores adapters gets it first, once. Raises ApiError if it refuses it.
        """
        if name == self._served.name:
            return {}
        if (known := self._adapters.get(name)) is not None:
            return known
        async with self._loading:
            if name not in self._adapters:
                folder = self._served.names[name]
                assert folder is not None
                self._adapters[name] = await self._load(name, folder)
            return self._adapters[name]

    async def _load(self, name: str, folder: Path) -> Mapping[str, session.Option]:
        model, limit_s = self._client.model.name, self._params.generation_timeout_s
        try:
            return await server_requests.load_adapter(
                self._client.service, model, name, server_requests.number_of(folder), folder, self._engine, limit_s
            )
        except StageError as error:
            if error.failure is FailureClass.TRANSIENT:
                raise unavailable(f"the server of model {name} does not respond") from error
            _LOG.warning("the LoRA adapter of %s: %s", name, error.message)
            raise bad_gateway(f"the server of model {name} did not accept its adapter") from error

    async def generate(
        self, name: str, prompt: PreparedPrompt, inputs: Mapping[str, session.Option], choice: Choice
    ) -> None:
        """Fill `choice` of a request for model `name`. A cancelled call returns after the server has ended it."""
        request = GenerationRequest(prompt.text, prompt.max_tokens, inputs)
        again = False
        while True:
            kept = bool(self._idle)
            session = self._idle.pop()[0] if kept else self._client.session()
            try:
                await session.generate(request, choice)
            except asyncio.CancelledError:
                with suppress(ProtocolError, OSError):
                    await session.cancel()
                break
            except ServerError as error:  # a value whose type differs from its tensor's
                choice.fail(ApiError(400, error.message, code="invalid_value"))
                break
            finally:
                self._put_back(session)
            if choice.error is None and choice.responses == 0:
                choice.error = "the server ended the stream without a response"
            if choice.error is None:
                choice.end()
                break
            if _FORGOTTEN in choice.error and not again:  # other adapters have evicted it
                again, choice.error = True, None
                self._adapters.pop(name, None)
                try:
                    await self.adapter(name)
                except ApiError as error:
                    choice.fail(error)
                    break
                continue
            passing = triton.failure_class(choice.error) is FailureClass.TRANSIENT
            self.broken |= passing
            if not (kept and passing and choice.first_event_ns is None):
                choice.fail(self._failure(choice, passing=passing))
                break
            choice.error = None  # the stream was broken, as after a restart: try once more over a new one
            self.forget_idle()

    def _failure(self, choice: Choice, *, passing: bool) -> ApiError:
        message = fields.shortened(choice.error or "", 300)
        if choice.timed_out:
            return timed_out(self._params.generation_timeout_s)
        if passing and choice.first_event_ns is None:
            return unavailable(f"the server of model {self._served.name} is not reachable, or is being restarted")
        if not passing and _GUIDE_TYPE in message:
            return unsupported(
                "response_format", f"model {self._served.name} does not accept response_format: {message}"
            )
        if not passing and _OF_THE_REQUEST.search(message):
            return ApiError(400, message, code="refused_by_server")
        return bad_gateway(f"the server of model {self._served.name} failed: {message}")

    def _put_back(self, session: Session) -> None:
        self._idle.append((session, time.monotonic()))
        if self._closed:
            self.forget_idle()

    def forget_idle(self, older_than_s: float = 0.0) -> None:
        """Close streams that have been idle for that long."""
        before = time.monotonic() - older_than_s
        while self._idle and self._idle[0][1] <= before:
            self._client.drop(self._idle.popleft()[0])

    def close(self) -> None:
        """Close idle streams. The others are closed when their request ends."""
        self._closed = True
        self.forget_idle()


def guided(guide: Guide) -> dict[str, Any]:
    schema = {} if guide.schema is None else {_GUIDE: guide.schema}
    return {_GUIDE_TYPE: guide.kind, **schema}


async def _models_at(service: Service) -> list[str]:
    """The models of a server. Empty if it does not list them."""
    try:
        return await triton.Client(service, "", "grpc", timeout_s=CONNECT_S).models()
    except ServerError:
        return []


async def _model_at(service: Service, name: str) -> str:
    """The model to use on a server: `name`, one of TensorRT-LLM's, or its only one.

    Raises ApiError 502 if it is ambiguous. A server without a list of models, like ours, has to be queried for each.
    """
    client = triton.Client(service, "", "grpc", timeout_s=CONNECT_S)
    tried = tuple(dict.fromkeys((name, model_names.ENSEMBLE, model_names.BLS_MODEL, model_names.ENGINE_MODEL)))
    for each in tried:
        try:
            await client.config(each)
        except ServerError as error:
            if triton.is_unknown(error.message):
                continue
        return each  # if the server does not respond, the next request reports it
    known = await _models_at(service)
    if len(known) == 1:
        return known[0]
    has = ", ".join(known) if known else f"no {', '.join(tried[:-1])} or {tried[-1]}"
    raise bad_gateway(f"the server of model {name} has {has}: --server-model {name}=MODEL selects one")


def _follows_guides(parameters: Mapping[str, str] | None) -> bool:
    """True if an engine has a guided decoding backend. It accepts the inputs without one as well."""
    if parameters is None:
        return True  # a model of another kind only has the inputs if it supports them
    name = parameters.get("guided_decoding_backend", "")
    return bool(name) and not name.startswith("${")


def _engine(parameters: Mapping[str, str] | None) -> Path | None:
    """The engine's directory, from its model's parameters. None if it is not on this machine."""
    named = Path((parameters or {}).get("gpt_model_path", ""))
    return named if named.is_absolute() and (named / "config.json").is_file() else None


def _of_every_request(model: triton.ServedModel, engine: Path) -> dict[str, session.Option]:
    """Fields for every request to an engine with draft tokens: their number, or a request for their counts."""
    drafts = server_requests.draft_options(model.name, engine)
    counted = model.tells_drafts and Engine.read(engine).speculation is not None
    return drafts or ({triton.PERF_METRICS: True} if counted else {})
