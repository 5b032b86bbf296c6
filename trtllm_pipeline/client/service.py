"""Talks to a running Triton server: what its models are, and generating text over every protocol. Only user of tritonclient.

    async with Client(Service.read(path), "ensemble", "grpc", timeout_s=60) as client:
        session = client.session()                 # one request at a time; as many sessions as requests in flight
        answer = await session.generate(GenerationRequest("The capital of France is", max_tokens=8))

tritonclient's protobuf messages travel over `transport/`, which knows when each byte arrived and limits what a server may
send. Questions about the server itself take the same way: readiness, metadata, configuration.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from trtllm_pipeline.client import fields, recognise
from trtllm_pipeline.client.transport.http import Connection, HttpError, fetch
from trtllm_pipeline.client.transport.http2 import STATUS, GrpcCall, Http2Error, unary
from trtllm_pipeline.client.transport.timestamped_socket import MAX_MESSAGE_BYTES, MAX_STREAM_BYTES, ProtocolError
from trtllm_pipeline.errors import FailureClass, ServerError
from trtllm_pipeline.files.user_files import decode_mapping

if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2, service_pb2
    from typing_extensions import Self

PROTOCOLS: Final = ("grpc", "grpc_unary", "http", "http_unary")
"""gRPC ModelStreamInfer, gRPC ModelInfer, HTTP generate_stream (server-sent events), HTTP generate."""
STREAMING: Final = frozenset({"grpc", "http"})

_SERVICE: Final = "/inference.GRPCInferenceService/"
_SPARE_MESSAGES: Final = 1 << 12
_MESSAGES_PER_TOKEN: Final = 64
"""More of one answer, beside the spare ones, no server needs for what it was asked for: several choices, a role, usage."""
# TensorRT-LLM's data types of optional inputs: (config.pbtxt enum, KServe name, struct format of one element).
_DTYPES: Final = {
    "TYPE_BOOL": ("BOOL", "?"),
    "TYPE_INT32": ("INT32", "i"),
    "TYPE_INT64": ("INT64", "q"),
    "TYPE_UINT32": ("UINT32", "I"),
    "TYPE_UINT64": ("UINT64", "Q"),
    "TYPE_FP16": ("FP16", "e"),
    "TYPE_FP32": ("FP32", "f"),
    "TYPE_STRING": ("BYTES", ""),
}

# TensorRT-LLM 0.20 renamed the seed; its llmapi model has names of its own.
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "max_tokens": ("sampling_param_max_tokens",),
    "temperature": ("sampling_param_temperature",),
    "top_k": ("sampling_param_top_k",),
    "top_p": ("sampling_param_top_p",),
    "random_seed": ("seed", "sampling_param_seed"),
    "stop_words": ("sampling_param_stop",),
    "stream": ("streaming",),
}

RELOAD_PATIENCE_S: Final = 20.0
"""How long to wait for a model that is being loaded, or for a server of ours that is started again."""
_RELOADING: Final = "has no available versions"
_UNKNOWN: Final = "is not found"
"""Said of a model that is not in the repository; that does not pass."""
_PASSING: Final = re.compile(
    rf"\bUNAVAILABLE\b|\bNOT_FOUND\b(?!.*{_UNKNOWN})|{_RELOADING}|Stub process .*is not healthy|stopped accepting new",
    re.DOTALL,
)

Option = bool | int | float | str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Service:
    """Endpoints of a running server from service.json; "" for an unknown one."""

    http: str
    grpc: str
    metrics: str | None
    pid: int | None
    model: str
    bls_model: str | None
    kind: str = "triton"
    """`triton`, or `openai`, whose `http` is a URL."""

    @classmethod
    def read(cls, path: Path) -> Service:
        """The service described by `path`. Raises ServerError when the file is not a service.json of ours."""
        try:
            raw = decode_mapping(path.read_bytes())
            return cls(
                raw.get("url", raw["http"]),
                raw["grpc"],
                raw.get("metrics"),
                raw.get("pid"),
                raw["model"],
                raw.get("bls_model"),
                raw.get("kind", "triton"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{path} does not describe a running server: {type(error).__name__}: {error}",
                hint="start one: pipeline launch --repository DIR",
            ) from error


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A text generation request. `options` are additional input tensors by name, such as `{"top_k": 1}`."""

    text: str
    max_tokens: int
    options: Mapping[str, Option] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    """The same as chat messages, for chat endpoints."""


def most_tokens(asked: int) -> int:
    """Upper bound for the tokens or messages of an answer to a request for `asked` tokens, also with several choices."""
    return _SPARE_MESSAGES + _MESSAGES_PER_TOKEN * asked


def sampling(temperature: float, *, seed: int) -> dict[str, Option]:
    """Input tensors for a temperature; 0 is greedy, which TensorRT-LLM calls top_k 1."""
    return {"top_k": 1} if temperature == 0 else {"temperature": temperature, "random_seed": seed}


class TextChunk(NamedTuple):
    """A response that carried text."""

    time_ns: int
    text: str
    """The text it added."""
    tokens: int | None
    """Output tokens of the request so far, as counted by the server; None if it does not count."""
    reasoning: bool = False
    """Whether the text is reasoning, not the answer."""


@dataclass(slots=True)
class Answer:
    """Everything observed about one request. Times are CLOCK_MONOTONIC nanoseconds; None means that it did not happen.

    The generated text is the joined texts of `events`. `output_tokens` is the server's count for all of it, including
    tokens without text, which may arrive after the last event. A failed request has `error` and keeps what arrived before.
    """

    sent_ns: int = 0
    connected_ns: int | None = None
    """When the connection was made, if this request had to connect; before `sent_ns`."""
    headers_ns: int | None = None
    """HTTP: when the header was complete."""
    first_byte_ns: int | None = None
    """First bytes of the body, or first gRPC message."""
    first_event_ns: int | None = None
    """First whole response, with text or without."""
    role_ns: int | None = None
    """OpenAI chat: the message that only has the role."""
    events: list[TextChunk] = field(default_factory=list)
    usage_ns: int | None = None
    """OpenAI: the message with the server's counts."""
    output_tokens: int | None = None
    input_tokens: int | None = None
    """As the server counts them."""
    cached_tokens: int | None = None
    """Input tokens found in the server's KV cache."""
    finish_reason: str | None = None
    """Why the server stopped, if it says so: stop, length, ..."""
    end_ns: int = 0
    late_ns: int = 0
    """Longest delay between arrival and reading of this answer's bytes, caused by load on the client. A single event still has
    its time of arrival; several events of one read have that of the last."""
    error: str | None = None

    @property
    def text(self) -> str:
        """The generated text without reasoning."""
        return "".join(event.text for event in self.events if not event.reasoning)

    def arrived(self, now_ns: int, late_ns: int) -> None:
        """Note that bytes of a body arrived."""
        if self.first_byte_ns is None:
            self.first_byte_ns = now_ns
        if late_ns > self.late_ns:
            self.late_ns = late_ns

    def received(self, now_ns: int, text: str, tokens: int | None, *, reasoning: bool = False) -> None:
        """Note one response, with or without text, and the server's count of the tokens it brought."""
        if self.first_byte_ns is None:
            self.first_byte_ns = now_ns
        if self.first_event_ns is None:
            self.first_event_ns = now_ns
        if tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + tokens
        if text:
            self.events.append(TextChunk(now_ns, text, None if tokens is None else self.output_tokens, reasoning))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a client needs to know about a served model, from the configuration that the server reports."""

    name: str
    batched: bool
    """Tensors carry a leading batch dimension."""
    decoupled: bool
    inputs: Mapping[str, str]
    """Input name -> data type as config.pbtxt writes it."""
    accumulates: bool
    """Streamed responses repeat the whole text so far (TensorRT-LLM's `accumulate_tokens`)."""
    counts: bool
    """Responses have TensorRT-LLM's output `num_output_tokens` (0.20 and later)."""

    @classmethod
    def of(cls, config: model_config_pb2.ModelConfig) -> ServedModel:
        """The facts in `config`."""
        return cls(
            name=config.name,
            batched=config.max_batch_size > 0,
            decoupled=config.model_transaction_policy.decoupled,
            inputs=data_types(config.input),
            accumulates=config.parameters["accumulate_tokens"].string_value.lower() == "true"
            if "accumulate_tokens" in config.parameters
            else False,
            counts=any(tensor.name == "num_output_tokens" for tensor in config.output),
        )

    def tensors(self, request: GenerationRequest, *, stream: bool) -> dict[str, Option]:
        """Input values of `request` by tensor name. Raises ServerError for an option the model does not have."""
        asked: dict[str, Option] = {"text_input": request.text, "max_tokens": request.max_tokens, **request.options}
        values = {self._input(name): value for name, value in asked.items()}
        if stream and self._input("stream") in self.inputs:
            values[self._input("stream")] = True
        if self.counts and "return_num_output_tokens" in self.inputs:
            values.setdefault("return_num_output_tokens", True)
        unknown = sorted(values.keys() - self.inputs.keys())
        if unknown:
            raise ServerError(
                f"model {self.name} has no input {', '.join(unknown)}; it has {', '.join(sorted(self.inputs))}",
                failure=FailureClass.USER,
            )
        return values

    def _input(self, name: str) -> str:
        """This model's name for the input `name`; `name` itself if it has no such input."""
        return next((each for each in (name, *_OTHER_NAMES.get(name, ())) if each in self.inputs), name)


class BaseClient(ABC):
    """Opens sessions to a model, as many as requests in flight, and closes them at its end. An async context manager."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._sessions: list[Session] = []

    async def __aexit__(self, *_error: object) -> None:
        for session in self._sessions:
            await session.close()

    def session(self) -> Session:
        """A new session; closed with the client."""
        self._sessions.append(self._new_session())
        return self._sessions[-1]

    @abstractmethod
    def _new_session(self) -> Session: ...

    async def _get(self, address: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of a GET request. Raises ServerError if there is no answer."""
        try:
            return await fetch(address, path, timeout_s=self.timeout_s, headers=headers)
        except ValueError as error:
            raise ServerError(str(error), failure=FailureClass.USER) from error
        except (OSError, HttpError) as error:
            raise ServerError(
                f"no answer from {address}: {error}",
                failure=FailureClass.TRANSIENT,
                hint="check that the server is running and that this is its address",
            ) from error


class Client(BaseClient):
    """Access to one model of a server over one of `PROTOCOLS`.

    Entering reads the model's configuration and waits while the model is being loaded. Raises ServerError if the server or
    the model does not exist.
    """

    def __init__(self, service: Service, model: str, protocol: str, *, timeout_s: float) -> None:
        if protocol not in PROTOCOLS:
            raise ServerError(
                f"unknown protocol {protocol!r}; expected one of {', '.join(PROTOCOLS)}", failure=FailureClass.USER
            )
        self.service = service
        self.protocol = protocol
        self._name = model
        super().__init__(timeout_s)

    async def __aenter__(self) -> Self:
        try:
            self.model = ServedModel.of(await self._config_when_loaded())
        except ServerError as error:
            # A server of ours has told its ports itself.
            if error.failure is not FailureClass.USER and self.service.pid is None:
                asked = self.protocol.removesuffix("_unary")
                other = await recognise.wrong_protocol(getattr(self.service, asked), asked, self.timeout_s)
                if other is not None:
                    raise other from error
            raise
        return self

    def _new_session(self) -> Session:
        kinds: dict[str, Callable[[Client], Session]] = {
            "grpc": _GrpcStream,
            "grpc_unary": _GrpcUnary,
            "http": _Http,
            "http_unary": _Http,
        }
        return kinds[self.protocol](self)

    async def config(self, model: str) -> model_config_pb2.ModelConfig:
        """The configuration of `model` as the server runs it, defaults filled in."""
        from tritonclient.grpc import service_pb2

        if self.protocol.startswith("http"):
            return await self._config_over_http(model)
        request = service_pb2.ModelConfigRequest(name=model)
        return (await self._call("ModelConfig", request, service_pb2.ModelConfigResponse)).config

    async def _config_when_loaded(self) -> model_config_pb2.ModelConfig:
        """The configuration of the client's model, waiting while the server loads it."""
        deadline = time.monotonic() + min(RELOAD_PATIENCE_S, self.timeout_s)
        while True:
            try:
                return await self.config(self._name)
            except ServerError as error:
                if _UNKNOWN in error.message:
                    raise ServerError(
                        error.message, failure=FailureClass.USER, hint="--model names the model"
                    ) from error
                launched = self.service.pid is not None  # and so kept, by `pipeline launch`
                passing = _RELOADING in error.message or (launched and error.failure is FailureClass.TRANSIENT)
                if not passing or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _config_over_http(self, model: str) -> model_config_pb2.ModelConfig:
        where = f"the configuration of {model!r} at {self.service.http}"
        status, body = await self._get(self.service.http, f"/v2/models/{quote(model, safe='')}/config")
        if status != 200:
            raise ServerError(f"{where}: {_told(body) or f'HTTP status {status}'}")
        try:
            return config_of(body)
        except ProtocolError as error:
            raise ServerError(f"{where}: {error}", failure=FailureClass.USER) from error

    async def metadata(self, model: str) -> service_pb2.ModelMetadataResponse:
        """Names, data types and shapes of the tensors of `model`, as the server reports them to clients."""
        from tritonclient.grpc import service_pb2

        request = service_pb2.ModelMetadataRequest(name=model)
        return await self._call("ModelMetadata", request, service_pb2.ModelMetadataResponse)

    async def server(self) -> str | None:
        """Name and version that the server reports, such as "triton 2.51.0"; None if it reports none."""
        from tritonclient.grpc import service_pb2

        try:
            if not self.protocol.startswith("http"):
                request = service_pb2.ServerMetadataRequest()
                reply = await self._call("ServerMetadata", request, service_pb2.ServerMetadataResponse)
                return f"{reply.name} {reply.version}"
            _, body = await self._get(self.service.http, "/v2")
            told = fields.parse(body)
            name, version = (fields.text(told[part], part) for part in ("name", "version"))
            return fields.shortened(f"{name} {version}")
        except (ServerError, ProtocolError, KeyError):
            return None

    async def ready(self) -> dict[str, bool]:
        """Readiness that each known endpoint reports, by name."""
        asking = {"http": self._http_ready, "grpc": self._grpc_ready}
        known = {"http": self.service.http, "grpc": self.service.grpc}
        return {name: await ask() for name, ask in asking.items() if known[name]}

    async def _http_ready(self) -> bool:
        try:
            return (await self._get(self.service.http, "/v2/health/ready"))[0] == 200
        except ServerError:
            return False

    async def _grpc_ready(self) -> bool:
        from tritonclient.grpc import service_pb2

        try:
            reply = await self._call("ServerReady", service_pb2.ServerReadyRequest(), service_pb2.ServerReadyResponse)
        except ServerError:
            return False
        return bool(reply.ready)

    async def _call(self, method: str, request: Any, response: Any) -> Any:
        from google.protobuf.message import DecodeError

        try:
            call = GrpcCall(self.service.grpc)
            try:
                return response.FromString(await asyncio.wait_for(self._answer(call, method, request), self.timeout_s))
            finally:
                call.close()
        except (Http2Error, DecodeError, ValueError, asyncio.TimeoutError) as error:
            late = isinstance(error, asyncio.TimeoutError)  # which has no words
            reason = f"{STATUS[4]}: no answer within {self.timeout_s:g} s" if late else str(error)
            raise ServerError(
                f"{method} of {getattr(request, 'name', 'the server')!r} at {self.service.grpc}: {reason}",
                failure=failure_class(reason),
                hint="check that the server is running and that this is its address",
            ) from error

    async def _answer(self, call: GrpcCall, method: str, request: Any) -> bytes:
        await call.connect()
        return (await unary(call, _SERVICE + method, request.SerializeToString()))[1]


def failure_class(cause: str) -> FailureClass:
    """TRANSIENT for errors while a server starts or `pipeline launch` restarts it; BUG for all others."""
    return FailureClass.TRANSIENT if _PASSING.search(cause) else FailureClass.BUG


def _told(body: bytes) -> str:
    """The error in a JSON answer of Triton."""
    try:
        return fields.shortened(str(fields.parse(body).get("error") or ""))
    except ProtocolError:
        return ""


class Session(ABC):
    """One request at a time over one protocol. Errors of the server and the network are in `Answer.error`, never raised."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._messages = self._asked_tokens = 0

    async def open(self) -> None:
        """Connect; what goes wrong shows with the first request."""
        with suppress(ProtocolError, OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._connect(), self._timeout_s)

    @abstractmethod
    async def _connect(self) -> bool: ...

    async def generate(self, request: GenerationRequest) -> Answer:
        """Send `request` and wait for the complete answer."""
        answer = Answer()
        message = self._encode(request)
        self._messages, self._asked_tokens = 0, request.max_tokens
        try:
            await asyncio.wait_for(self._exchange(message, answer), self._timeout_s)
        except asyncio.TimeoutError:  # another class than TimeoutError in Python 3.10
            answer.error = f"no complete answer within {self._timeout_s:g} s: {_so_far(answer)}"
        except (ProtocolError, OSError) as error:
            answer.error = str(error) or type(error).__name__
        answer.end_ns = time.monotonic_ns()
        answer.sent_ns = answer.sent_ns or answer.end_ns
        if max(answer.output_tokens or 0, *(event.tokens or 0 for event in answer.events), 0) > most_tokens(
            request.max_tokens
        ):
            answer.error = (
                f"the server counts {answer.output_tokens} tokens in an answer limited to {request.max_tokens}"
            )
            answer.events = [event._replace(tokens=None) for event in answer.events]
            answer.output_tokens = None
        answer.error = answer.error and fields.shortened(answer.error)
        if answer.error is not None:
            await self.close()
        return answer

    def _count_message(self) -> None:
        """Count a message of the answer. Raises ProtocolError when there are more than any answer needs."""
        self._messages += 1
        most = most_tokens(self._asked_tokens)
        if self._messages > most:
            raise ProtocolError(
                f"the server sent more than {most} messages for an answer of {self._asked_tokens} tokens"
            )

    @abstractmethod
    def _encode(self, request: GenerationRequest) -> bytes: ...

    @abstractmethod
    async def _exchange(self, message: bytes, answer: Answer) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """Release what is held between requests."""


def _so_far(answer: Answer) -> str:
    """What arrived of an incomplete answer."""
    if not answer.sent_ns:
        return "not connected"
    if answer.events:
        ago_s = (time.monotonic_ns() - answer.events[-1].time_ns) / 1e9
        return f"received {len(answer.events)} parts, the last {ago_s:.1f} s ago"
    if answer.first_byte_ns is not None:
        return "received data but no text"
    return "received nothing" if answer.headers_ns is None else "received headers but no body"


class _GrpcUnary(Session):
    """ModelInfer: one request, one response. Triton refuses it for decoupled models."""

    def __init__(self, client: Client) -> None:
        super().__init__(client.timeout_s)
        self._model = client.model
        self._call = GrpcCall(client.service.grpc)
        self._count = 0

    def _encode(self, request: GenerationRequest) -> bytes:
        message: bytes = self._request(request, stream=False).SerializeToString()
        return message

    def _request(self, request: GenerationRequest, *, stream: bool) -> service_pb2.ModelInferRequest:
        self._count += 1
        return infer_request(self._model, self._model.tensors(request, stream=stream), request_id=str(self._count))

    async def _connect(self) -> bool:
        return await self._call.connect()

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        from google.protobuf.message import DecodeError
        from tritonclient.grpc import service_pb2

        if await self._call.connect():
            answer.connected_ns = time.monotonic_ns()
        answer.sent_ns = time.monotonic_ns()
        now_ns, raw = await unary(self._call, _SERVICE + "ModelInfer", message)
        try:
            response = service_pb2.ModelInferResponse.FromString(raw)
        except DecodeError as error:
            raise Http2Error(f"not a response of ModelInfer: {error}") from error
        answer.arrived(now_ns, self._call.late_ns)
        answer.received(now_ns, text_output(response), num_output_tokens(response))

    async def close(self) -> None:
        """End the call and its connection: Triton does not shut down while a stream is open."""
        self._call.close()


class _GrpcStream(_GrpcUnary):
    """ModelStreamInfer: a stream kept open between requests, as a user's session would be."""

    def _encode(self, request: GenerationRequest) -> bytes:
        message = self._request(request, stream=True)
        # Without it the end of an answer is visible only when the last token carries text.
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        data: bytes = message.SerializeToString()
        return data

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        from google.protobuf.message import DecodeError
        from tritonclient.grpc import service_pb2

        call, request_id, parse = self._call, str(self._count), service_pb2.ModelStreamInferResponse.FromString
        if not call.open:
            if await call.connect():
                answer.connected_ns = time.monotonic_ns()
            call.start(_SERVICE + "ModelStreamInfer")
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def end(error: str | None) -> None:
            if not done.done():
                done.set_result(error)

        def arrived(now_ns: int, raw: bytes) -> None:
            try:
                message_in = parse(raw)
            except DecodeError as error:
                return end(f"not a response of ModelStreamInfer: {error}")
            response = message_in.infer_response
            if response.id not in (request_id, "") or done.done():
                return None  # the rest of an earlier request that ended with an error
            self._count_message()
            answer.arrived(now_ns, call.late_ns)
            if message_in.error_message:
                return end(message_in.error_message)
            answer.received(now_ns, text_output(response), num_output_tokens(response))
            if response.parameters["triton_final_response"].bool_param:
                return end(None)
            return None

        call.arrived, call.ended = arrived, lambda reason: end(f"the server ended the stream: {reason or 'OK'}")
        answer.sent_ns = time.monotonic_ns()
        call.send(message)
        answer.error = await done
        if self._model.accumulates:
            answer.events = list(deltas(answer.events))


class HttpSession(Session):
    """POST of JSON; the answer is JSON, or with `stream` server-sent events of JSON."""

    def __init__(self, address: str, path: str, *, stream: bool, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._connection = Connection(address)
        self._path = path
        self._stream = stream
        self._headers: dict[str, str] = {}

    async def _connect(self) -> bool:
        return await self._connection.open()

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        connection, events, whole = self._connection, ServerSentEvents(), bytearray()

        async def post() -> int:
            answer.sent_ns = time.monotonic_ns()
            try:
                limit = MAX_STREAM_BYTES if self._stream else MAX_MESSAGE_BYTES
                return await connection.request("POST", self._path, message, arrived, self._headers, max_bytes=limit)
            finally:
                answer.headers_ns = connection.answer.headers_ns

        def arrived(now_ns: int, part: bytes) -> None:
            answer.arrived(now_ns, connection.late_ns)
            if self._stream and connection.answer.status == 200:
                for data in events.feed(part):
                    self._count_message()
                    self._parse(now_ns, data, answer)
            elif len(whole) < MAX_MESSAGE_BYTES:  # more than that is no refusal of a stream that anybody reads
                whole.extend(part)

        new = await connection.open()
        if new:
            answer.connected_ns = time.monotonic_ns()
        try:
            status = await post()
        except HttpError:
            # A server may close a connection between requests at any time, so just as this one was sent: then it was
            # never taken, and goes once more over a new one (RFC 9112, section 9.5).
            if new or connection.answer.began:
                raise
            await connection.open()
            answer.connected_ns = time.monotonic_ns()
            status = await post()
        if not self._stream or status != 200:
            self._parse(connection.answer.latest_ns, whole, answer)
        if status != 200:
            answer.error = f"HTTP status {status}: {answer.error}" if answer.error else f"HTTP status {status}"

    def _parse(self, now_ns: int, data: bytes | bytearray, answer: Answer) -> None:
        try:
            body = fields.parse(data)
            # TensorRT-LLM and vLLM say it without OpenAI's envelope.
            error = body.get("message") if body.get("object") == "error" else body.get("error")
            if error is None:
                self._take(now_ns, body, answer)
                return
            told = error.get("message") or error if isinstance(error, dict) else error
            said = fields.text(told, "the error") if isinstance(told, str) else fields.shown(told)
        except ProtocolError as error:
            said = str(error)
        answer.error = answer.error or said

    @abstractmethod
    def _take(self, now_ns: int, body: Mapping[str, Any], answer: Answer) -> None:
        """Record one response. Raises ProtocolError if it is invalid."""

    async def close(self) -> None:
        """Close the connection: an answer that was not read to its end cannot be followed by another."""
        self._connection.close()


class _Http(HttpSession):
    """Triton's generate and generate_stream."""

    def __init__(self, client: Client) -> None:
        stream = client.protocol in STREAMING
        path = f"/v2/models/{quote(client.model.name, safe='')}/generate{'_stream' if stream else ''}"
        super().__init__(client.service.http, path, stream=stream, timeout_s=client.timeout_s)
        self._model = client.model

    def _encode(self, request: GenerationRequest) -> bytes:
        return json.dumps(self._model.tensors(request, stream=self._stream)).encode()

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        await super()._exchange(message, answer)
        if self._stream and self._model.accumulates:
            answer.events = list(deltas(answer.events))

    def _take(self, now_ns: int, body: Mapping[str, Any], answer: Answer) -> None:
        text, tokens = body.get("text_output"), body.get("num_output_tokens")
        # Several sequences are several elements, the counts too: those are of no use.
        parts = text if isinstance(text, list) else [text]
        whole = "".join(fields.text(part, "text_output") for part in parts)
        count = None if isinstance(tokens, list) else fields.count(tokens, "num_output_tokens")
        answer.received(now_ns, whole, count)


class ServerSentEvents:
    """Incremental parser of a text/event-stream: bytes in as they come, `data` of complete events out.

    Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream"; lines may end in LF, CRLF or CR.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        """The line that has not ended."""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Data of each event that `chunk` completes. Raises ProtocolError for one larger than MAX_MESSAGE_BYTES."""
        if not chunk:
            return
        # The second half of a CRLF ends nothing.
        start = int(self._after_cr and chunk.startswith(b"\n"))
        self._after_cr = chunk.endswith(b"\r")
        *ended, rest = chunk[start:].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in ended:
            if self._line:
                line = bytes(self._line) + line
                self._line.clear()
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
            elif not line and self._data:
                data, self._data, self._data_bytes = b"\n".join(self._data), [], 0
                yield data
        self._line += rest
        if len(self._line) + self._data_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"an event in the answer exceeds {MAX_MESSAGE_BYTES} bytes")


def deltas(events: Sequence[TextChunk]) -> Iterator[TextChunk]:
    """Turn responses that each repeat the whole text so far into the text each one added.

    Only characters that agree with the final text count, so a character that was incomplete at first is counted when
    it is whole, and the parts join to the final text.
    """
    final = events[-1].text if events else ""
    seen = 0
    for event in events:
        # The longest beginning that they share, by halving: comparing characters one by one takes seconds for long ones.
        text = event.text
        agreed = bisect_left(range(1, len(text) + 1), True, key=lambda size: not final.startswith(text[:size]))
        if agreed > seen:
            yield event._replace(text=final[seen:agreed])
            seen = agreed


def config_of(body: bytes) -> model_config_pb2.ModelConfig:
    """A model's configuration as Triton sends it over HTTP. Raises ProtocolError if it is invalid."""
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    value = fields.parse(body)
    try:
        json.dumps(value, ensure_ascii=False).encode()  # half a character beyond the first 65536 is a SystemError below
        return json_format.ParseDict(value, model_config_pb2.ModelConfig(), ignore_unknown_fields=True)
    except (UnicodeEncodeError, OverflowError, json_format.ParseError) as error:
        raise ProtocolError(f"not a model's configuration: {fields.shortened(str(error))}") from error


def infer_request(
    model: ServedModel, tensors: Mapping[str, Option], *, request_id: str
) -> service_pb2.ModelInferRequest:
    """A KServe v2 request: every value a tensor of shape [1, n] ([n] for a model without batching), raw contents.

    Raises ServerError for a value of another type than its tensor.
    """
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model.name, id=request_id)
    for name, value in tensors.items():
        if model.inputs[name] not in _DTYPES:
            raise ServerError(
                f"input {name} of {model.name} has type {model.inputs[name]}, which this client does not support"
            )
        datatype, code = _DTYPES[model.inputs[name]]
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        shape = [1, len(values)] if model.batched else [len(values)]
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        if code:
            request.raw_input_contents.append(_packed(model, name, datatype, code, values))
        else:
            encoded = [str(item).encode() for item in values]
            request.raw_input_contents.append(b"".join(struct.pack("<I", len(item)) + item for item in encoded))
    return request


def _packed(model: ServedModel, name: str, datatype: str, code: str, values: Sequence[object]) -> bytes:
    try:
        # Python packs any object as a bool, "false" as true.
        if any(isinstance(value, str) for value in values):
            raise TypeError
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError, TypeError) as error:
        told = values[0] if len(values) == 1 else list(values)
        raise ServerError(
            f"input {name} of {model.name} is {datatype}, not {told!r}", failure=FailureClass.USER
        ) from error


def data_types(tensors: Iterable[model_config_pb2.ModelInput | model_config_pb2.ModelOutput]) -> dict[str, str]:
    """Data type of each tensor of a configuration by name, as config.pbtxt spells it; its number where it is unknown."""
    from tritonclient.grpc import model_config_pb2

    known = model_config_pb2.DataType.DESCRIPTOR.values_by_number
    return {
        each.name: known[each.data_type].name if each.data_type in known else str(each.data_type) for each in tensors
    }


def text_output(response: service_pb2.ModelInferResponse) -> str:
    """First element of the tensor `text_output` of a response, "" when there is none (an empty final response).

    Raises ProtocolError for a tensor that is cut off.
    """
    for index, tensor in enumerate(response.outputs):
        if tensor.name == "text_output":
            if index < len(response.raw_output_contents):
                raw = response.raw_output_contents[index]
                size = int.from_bytes(raw[:4], "little")
                return bytes(_part(raw, tensor.name, 4, size)).decode(errors="replace")
            return bytes(_first(tensor.contents.bytes_contents, tensor.name)).decode(errors="replace")
    return ""


def num_output_tokens(response: service_pb2.ModelInferResponse) -> int | None:
    """First element of the tensor `num_output_tokens` of a response, None when there is none.

    Raises ProtocolError for a tensor that is cut off, and for a negative number.
    """
    for index, tensor in enumerate(response.outputs):
        if tensor.name == "num_output_tokens":
            if index < len(response.raw_output_contents):
                raw = _part(response.raw_output_contents[index], tensor.name, 0, 4)
                return fields.count(int.from_bytes(raw, "little", signed=True), tensor.name)
            return fields.count(int(_first(tensor.contents.int_contents, tensor.name)), tensor.name)
    return None


def _part(raw: bytes, name: str, start: int, size: int) -> bytes:
    if len(raw) < start + size:
        raise ProtocolError(f"{name} in the server's answer is truncated: {len(raw)} of {start + size} bytes")
    return raw[start : start + size]


def _first(values: Sequence[Any], name: str) -> Any:
    if not values:
        raise ProtocolError(f"{name} in the server's answer is empty")
    return values[0]
