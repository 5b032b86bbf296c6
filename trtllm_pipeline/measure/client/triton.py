"""Client for a running Triton server: its models, and generation over all protocols. The only user of tritonclient.

    async with Client(Service.read(path), "ensemble", "grpc", timeout_s=60) as client:
        session = client.session()                 # one request at a time: use one session per request in flight
        answer = await session.generate(GenerationRequest("The capital of France is", max_tokens=8))

tritonclient's protobuf messages travel over `transport/`, which records when each byte arrived and limits how much a
server may send. Readiness, metadata and configuration are requested the same way.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast
from urllib.parse import quote

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.measure.client import fields, recognise
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.client.session import (
    Answer,
    BaseClient,
    GenerationRequest,
    HttpSession,
    InputTensor,
    Option,
    Session,
    deltas,
)
from trtllm_pipeline.measure.client.transport import ProtocolError
from trtllm_pipeline.measure.client.transport.http import fetch
from trtllm_pipeline.measure.client.transport.http2 import HTTP_1, STATUS, GrpcCall, Http2Error, unary
from trtllm_pipeline.models import model_config_pb2, service_pb2

if TYPE_CHECKING:
    from typing_extensions import Self


PROTOCOLS: Final = ("grpc", "grpc_unary", "http", "http_unary")
"""gRPC ModelStreamInfer, gRPC ModelInfer, HTTP generate_stream (server-sent events), HTTP generate.

A model that is not decoupled sends one response over each of them; "http" then means generate, too.
"""
PREPROCESSING: Final = "preprocessing"
_OK: Final = 200
IMAGE_INPUT: Final = "image_url_input"
"""Input of an ensemble with a visual engine."""
STREAMING: Final = frozenset({"grpc", "http"})

_SERVICE: Final = "/inference.GRPCInferenceService/"

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

# TensorRT-LLM 0.20 renamed the seed; its llmapi model uses other names.
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "max_tokens": ("sampling_param_max_tokens",),
    "temperature": ("sampling_param_temperature",),
    "top_k": ("sampling_param_top_k",),
    "top_p": ("sampling_param_top_p",),
    "random_seed": ("seed", "sampling_param_seed"),
    "stop_words": ("sampling_param_stop",),
    "min_tokens": ("min_length",),
    "stream": ("streaming",),
    "return_perf_metrics": ("sampling_param_return_perf_metrics",),
}

_STOP: Final[Mapping[str, Option]] = {"input_ids": 0, "input_lengths": 1, "request_output_len": 1, "stop": True}
"""Inputs that stop the engine model's request with the same id. The lengths are required but not read."""
_STOP_S: Final = 2.0
_SESSION_BITS: Final = 31
_COUNT_BITS: Final = 32

_NO_MINIMUM: Final = (
    "it cannot generate outputs of an exact length; use an engine's models, or settings.serve.frontend: trtllm_serve"
)
PERF_METRICS: Final = "return_perf_metrics"
DRAFTS: Final = {"drafted_tokens": "total_draft_tokens", "accepted_tokens": "total_accepted_draft_tokens"}
"""Field of an Answer -> TensorRT-LLM's output (0.19 and later), sent if the input PERF_METRICS requests it. The llmapi
model sends numbers as text, even if its configuration has another type. Source: `_create_response` of its model.py.
"""

RELOAD_PATIENCE_S: Final = 20.0
"""How long to wait for a model that is being loaded, or for one of our servers that is restarting."""
_RELOADING: Final = "has no available versions"
_UNKNOWN: Final = "is not found"
"""Error text for a model that is not in the repository, which is permanent."""
_PASSING: Final = re.compile(
    # A server that ends cancels the calls that it has accepted and not answered.
    rf"\bUNAVAILABLE\b|\bCANCELLED\b|\bNOT_FOUND\b(?!.*{_UNKNOWN})|{_RELOADING}|Stub process .*is not healthy"
    "|stopped accepting new"
    # gRPC calls all of these UNAVAILABLE. HTTP has no name for them.
    "|the server closed the connection|the connection closed in the middle"
    "|Connection reset by peer|Broken pipe|Connect call failed",
    re.DOTALL,
)


def sampling(temperature: float, *, seed: int) -> dict[str, Option]:
    """Input tensors for a temperature; 0 is greedy, which TensorRT-LLM calls top_k 1."""
    return {"top_k": 1} if temperature == 0 else {"temperature": temperature, "random_seed": seed}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Properties of a served model that the client needs, from the configuration that the server reports."""

    name: str
    batched: bool
    """True if tensors have a leading batch dimension."""
    decoupled: bool
    inputs: Mapping[str, str]
    """Input name -> data type, as spelled in config.pbtxt."""
    accumulates: bool
    """True if streamed responses repeat the whole text so far (TensorRT-LLM's `accumulate_tokens`)."""
    counts: bool
    """True if responses have TensorRT-LLM's output `num_output_tokens` (0.20 and later)."""
    tells_drafts: bool = False
    """True if responses include the counts of speculative decoding, DRAFTS, on request."""

    @classmethod
    def of(cls, config: model_config_pb2.ModelConfig) -> ServedModel:
        return cls(
            name=config.name,
            batched=config.max_batch_size > 0,
            decoupled=config.model_transaction_policy.decoupled,
            inputs=data_types(config.input),
            accumulates="accumulate_tokens" in config.parameters
            and config.parameters["accumulate_tokens"].string_value.lower() == "true",
            counts=any(tensor.name == "num_output_tokens" for tensor in config.output),
            tells_drafts={*DRAFTS.values()} <= {tensor.name for tensor in config.output}
            and any(tensor.name in (PERF_METRICS, *_OTHER_NAMES[PERF_METRICS]) for tensor in config.input),
        )

    def tensors(self, request: GenerationRequest, *, stream: bool) -> dict[str, Option | InputTensor]:
        """Input values of `request` by tensor name. Raises ServerError for an option the model does not have."""
        options: dict[str, Option | InputTensor] = {
            "text_input": request.text,
            "max_tokens": request.max_tokens,
            **request.options,
        }
        values = {self._input(name): value for name, value in options.items()}
        if stream and self._input("stream") in self.inputs:
            values.setdefault(self._input("stream"), True)
        if self.counts and "return_num_output_tokens" in self.inputs:
            values.setdefault("return_num_output_tokens", True)
        unknown = sorted(values.keys() - self.inputs.keys())
        if IMAGE_INPUT in unknown:
            raise ServerError(
                f"the prompt has an image, but model {self.name} accepts only text: it has no input {IMAGE_INPUT}",
                failure=FailureClass.USER,
                hint="use an engine of a model with images, or settings.serve.frontend: trtllm_serve; see docs/models.md",
            )
        if unknown:
            raise ServerError(
                f"model {self.name} has no input {', '.join(unknown)}; it has {', '.join(sorted(self.inputs))}",
                failure=FailureClass.USER,
                hint=_NO_MINIMUM if "min_tokens" in unknown else None,
            )
        return values

    def takes(self, name: str) -> bool:
        """True if the model has an input of this name, or an equivalent one."""
        return self._input(name) in self.inputs

    def _input(self, name: str) -> str:
        """This model's name for the input `name`, or `name` if it has no such input."""
        return next((each for each in (name, *_OTHER_NAMES.get(name, ())) if each in self.inputs), name)


def is_on(parameters: Mapping[str, str] | None, name: str) -> bool:
    """True if a parameter is on, which is TensorRT-LLM's default.

    `add_special_tokens` puts the tokenizer's special tokens around a prompt, `skip_special_tokens` removes them from
    outputs.
    """
    return (parameters or {}).get(name, "").strip().lower() not in {"false", "0", "no", "off"}


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
        self.stopped_by: ServedModel | None = None
        super().__init__(timeout_s)

    async def __aenter__(self) -> Self:
        try:
            self.model = ServedModel.of(await self._config_when_loaded())
        except ServerError as error:
            # The ports of a server that we started are known.
            if error.failure is not FailureClass.USER and self.service.pid is None:
                transport = self.protocol.removesuffix("_unary")
                other = await recognise.wrong_protocol(getattr(self.service, transport), transport, self.timeout_s)
                if other is not None:
                    raise other from error
            raise
        return self

    def _new_session(self) -> Session:
        kinds: dict[str, Callable[[Client], Session]] = {"grpc": _GrpcStream, "grpc_unary": _GrpcUnary}
        return kinds.get(self.protocol, _Http)(self)

    async def config(self, model: str) -> model_config_pb2.ModelConfig:
        """The configuration of `model` as the server runs it, defaults filled in."""
        if self.protocol.startswith("http"):
            return await self._config_over_http(model)
        request = service_pb2.ModelConfigRequest(name=model)
        return (await self._call("ModelConfig", request, service_pb2.ModelConfigResponse)).config

    async def models(self) -> list[str]:
        """The names of the server's models, over gRPC. Raises ServerError."""
        index = await self._call(
            "RepositoryIndex", service_pb2.RepositoryIndexRequest(), service_pb2.RepositoryIndexResponse
        )
        return sorted({model.name for model in index.models})

    async def parameters(self, model: str) -> dict[str, str] | None:
        """The parameters of a model next to the served one; None if the server has no such model."""
        try:
            config = await self.config(model)
        except ServerError:
            return None
        return {name: value.string_value for name, value in config.parameters.items()}

    async def adds_special_tokens(self) -> bool:
        """True if preprocessing adds the tokenizer's special tokens to prompts."""
        return is_on(await self.parameters(PREPROCESSING), "add_special_tokens")

    async def input_ids(self, text: str) -> list[int]:
        """The token ids of a prompt from preprocessing, over HTTP. Raises ServerError, HttpError, OSError."""
        config = await self.config(PREPROCESSING)
        inputs, types = [], data_types(config.input)
        for tensor in config.input:
            if tensor.name != "QUERY" and tensor.optional:
                continue
            kind, _ = _DTYPES[types[tensor.name]]
            value: object = text if tensor.name == "QUERY" else "" if kind == "BYTES" else 1
            shape = [1] * (len(tensor.dims) + (config.max_batch_size > 0))
            inputs.append({"name": tensor.name, "shape": shape, "datatype": kind, "data": [value]})
        request = {"inputs": inputs, "outputs": [{"name": "INPUT_ID"}]}
        status, body = await fetch(
            self.service.http,
            f"/v2/models/{PREPROCESSING}/infer",
            timeout_s=self.timeout_s,
            method="POST",
            body=json.dumps(request).encode(),
        )
        answer = json.loads(body)
        if status != _OK:
            raise ServerError(f"{PREPROCESSING}: {answer.get('error', status)}")
        return [int(each) for each in answer["outputs"][0]["data"]]

    async def stop_by(self, engine: str) -> None:
        """End cancelled requests at the model `engine` behind an ensemble, if the server has one with an input `stop`.

        An ensemble does not forward the cancellation of a call to its steps, but they get its request id.
        """
        try:
            stop_model = ServedModel.of(await self.config(engine))
        except ServerError:
            return
        if _STOP.keys() <= stop_model.inputs.keys():
            self.stopped_by = stop_model

    async def _config_when_loaded(self) -> model_config_pb2.ModelConfig:
        """The configuration of the client's model, waiting while the server loads it."""
        deadline = time.monotonic() + min(RELOAD_PATIENCE_S, self.timeout_s)
        while True:
            try:
                return await self.config(self._name)
            except ServerError as error:
                if is_unknown(error.message):
                    raise ServerError(
                        error.message, failure=FailureClass.USER, hint="--model names the model"
                    ) from error
                launched = self.service.pid is not None  # and therefore supervised by `pipeline stage launch`
                passing = _RELOADING in error.message or (launched and error.failure is FailureClass.TRANSIENT)
                if not passing or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.1)

    async def _config_over_http(self, model: str) -> model_config_pb2.ModelConfig:
        where = f"the configuration of {model!r} at {self.service.http}"
        status, body = await self._get(self.service.http, f"/v2/models/{quote(model, safe='')}/config")
        if status != 200:
            raise ServerError(f"{where}: {_json_error(body) or f'HTTP status {status}'}")
        try:
            return config_of(body)
        except ProtocolError as error:
            raise ServerError(f"{where}: {error}", failure=FailureClass.USER) from error

    async def metadata(self, model: str) -> service_pb2.ModelMetadataResponse:
        """Names, data types and shapes of the tensors of `model`, as the server reports them to clients."""
        request = service_pb2.ModelMetadataRequest(name=model)
        return await self._call("ModelMetadata", request, service_pb2.ModelMetadataResponse)

    async def server(self) -> str | None:
        """Name and version that the server reports, such as "triton 2.51.0"; None if it reports none."""
        try:
            if not self.protocol.startswith("http"):
                request = service_pb2.ServerMetadataRequest()
                reply = await self._call("ServerMetadata", request, service_pb2.ServerMetadataResponse)
                return f"{reply.name} {reply.version}"
            _, body = await self._get(self.service.http, "/v2")
            metadata = fields.parse(body)
            name, version = (fields.text(metadata[part], part) for part in ("name", "version"))
            return fields.shortened(f"{name} {version}")
        except (ServerError, ProtocolError, KeyError):
            return None

    async def ready(self) -> dict[str, bool]:
        """Readiness that each known endpoint reports, by name."""
        asking = {"http": self._http_ready, "grpc": self._grpc_ready}
        states = {}
        for name in (name for name in asking if getattr(self.service, name)):
            try:
                states[name] = await asking[name]()
            except ServerError:
                states[name] = False
        return states

    async def _http_ready(self) -> bool:
        return (await self._get(self.service.http, "/v2/health/ready"))[0] == 200

    async def _grpc_ready(self) -> bool:
        reply = await self._call("ServerReady", service_pb2.ServerReadyRequest(), service_pb2.ServerReadyResponse)
        return bool(reply.ready)

    async def _call(self, method: str, request: Any, response: Any) -> Any:
        async def ask(call: GrpcCall) -> bytes:
            await call.connect()
            return (await unary(call, _SERVICE + method, request.SerializeToString()))[1]

        try:
            with closing(GrpcCall(self.service.grpc)) as call:
                return response.FromString(await asyncio.wait_for(ask(call), self.timeout_s))
        except (Http2Error, DecodeError, ValueError, asyncio.TimeoutError) as error:
            late = isinstance(error, asyncio.TimeoutError)  # which has no message
            reason = f"{STATUS[4]}: no response within {self.timeout_s:g} s" if late else str(error)
            raise ServerError(
                f"{method} of {getattr(request, 'name', 'the server')!r} at {self.service.grpc}: {reason}",
                failure=failure_class(reason),
                hint="give the gRPC port or --protocol http"
                if HTTP_1 in reason
                else "check that the server is running and that this is its address",
            ) from error


def is_unknown(cause: str) -> bool:
    """True if a server reports that it does not have a model of this name."""
    return _UNKNOWN in cause


def failure_class(cause: str) -> FailureClass:
    """TRANSIENT for errors while a server starts or `pipeline stage launch` restarts it. BUG for all others."""
    return FailureClass.TRANSIENT if _PASSING.search(cause) else FailureClass.BUG


def _json_error(body: bytes) -> str:
    """The error in a JSON response of Triton."""
    try:
        return fields.shortened(str(fields.parse(body).get("error") or ""))
    except ProtocolError:
        return ""


class _GrpcUnary(Session):
    """ModelInfer: one request, one response. Triton refuses it for decoupled models."""

    def __init__(self, client: Client) -> None:
        super().__init__(client.timeout_s)
        self._client = client
        self._model = client.model
        self._call = GrpcCall(client.service.grpc)
        # Requests are ended by their id, so two sessions never share one. Engines require a number.
        self._count = int.from_bytes(os.urandom(4), "big") >> 32 - _SESSION_BITS << _COUNT_BITS
        self._log_probs = self._input_tokens = self._drafts = False
        self._top = 0

    def _encode(self, request: GenerationRequest) -> bytes:
        message: bytes = self._request(request, stream=False).SerializeToString()
        return message

    def _request(self, request: GenerationRequest, *, stream: bool) -> service_pb2.ModelInferRequest:
        self._count += 1
        self._log_probs = bool(request.options.get("return_log_probs"))
        self._top = int(cast("int", request.options.get("return_top_log_probs", 0)))
        self._input_tokens = bool(request.options.get("return_num_input_tokens"))
        self._drafts = bool(request.options.get(PERF_METRICS))
        return infer_request(self._model, self._model.tensors(request, stream=stream), request_id=str(self._count))

    def _take(self, now_ns: int, response: service_pb2.ModelInferResponse, answer: Answer) -> None:
        """Record one response. Raises ProtocolError if it is invalid."""
        if self._log_probs:
            answer.log_probs = output_log_probs(response)
        if self._top:
            answer.top_log_probs = top_log_probs(response, self._top)
        if self._input_tokens:
            answer.input_tokens = token_count(response, "num_input_tokens") or answer.input_tokens
        if self._drafts:
            for name, tensor in DRAFTS.items():
                _keep(answer, name, token_count(response, tensor))
        answer.received(now_ns, text_output(response), token_count(response, "num_output_tokens"))

    async def _connect(self) -> bool:
        return await self._call.connect()

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        if await self._call.connect():
            answer.connected_ns = time.monotonic_ns()
        answer.sent_ns = time.monotonic_ns()
        now_ns, raw = await unary(self._call, _SERVICE + "ModelInfer", message)
        try:
            response = service_pb2.ModelInferResponse.FromString(raw)
        except DecodeError as error:
            raise Http2Error(f"not a response of ModelInfer: {error}") from error
        answer.arrived(now_ns, self._call.late_ns)
        self._take(now_ns, response, answer)

    async def close(self) -> None:
        """End the call and its connection: Triton does not shut down while a stream is open."""
        self._call.close()


class _GrpcStream(_GrpcUnary):
    """ModelStreamInfer: a stream that is reused, as in a user's session."""

    _over = True
    """True once the server has ended the latest request."""

    def _encode(self, request: GenerationRequest) -> bytes:
        message = self._request(request, stream=self._model.decoupled)
        # Otherwise the end of a response is only visible if the last token has text.
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        data: bytes = message.SerializeToString()
        return data

    async def _exchange(self, message: bytes, answer: Answer) -> None:
        call, request_id, parse = self._call, str(self._count), service_pb2.ModelStreamInferResponse.FromString
        self._over = False
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
            if response.id not in (request_id, ""):
                return None  # the rest of an earlier request that ended with an error
            final = response.parameters["triton_final_response"].bool_param
            self._over = final or bool(message_in.error_message)
            if done.done():
                return None
            self._count_message()
            answer.arrived(now_ns, call.late_ns)
            if message_in.error_message:
                return end(message_in.error_message)
            if response.outputs:  # the end of a response may come without outputs
                self._take(now_ns, response, answer)
            if final:
                answer.whole()
                return end(None)
            return None

        call.arrived, call.ended = arrived, lambda reason: end(f"the server ended the stream: {reason or 'OK'}")
        answer.sent_ns = time.monotonic_ns()
        call.send(message)
        answer.error = await done
        if self._model.accumulates:
            answer.events = list(deltas(answer.events))

    async def close(self) -> None:
        """End the stream gracefully if no request is in progress, otherwise cancel it.

        Triton 2.51 can crash if a stream is cancelled while it still completes a response. Source: issue 7368 of
        triton-inference-server/server.
        """
        await (self._call.finish() if self._over else super().close())

    async def cancel(self) -> None:
        """Stop the running request and wait until the server has ended it. The stream can then be reused.

        If there is no engine to stop it, or the engine does not respond, the call is reset and the connection closed.
        """
        call, engine = self._call, self._client.stopped_by
        if self._over:
            return None
        if not call.open or engine is None:
            return await self.close()
        request_id, parse = str(self._count), service_pb2.ModelStreamInferResponse.FromString
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def end(well: bool) -> None:
            if not ended.done():
                ended.set_result(well)

        def arrived(_now_ns: int, raw: bytes) -> None:
            try:
                message_in = parse(raw)
            except DecodeError:
                return end(False)
            response = message_in.infer_response
            # The response to `stop` has the same id but comes from the engine model.
            if response.id == request_id and response.model_name != engine.name:
                final = response.parameters["triton_final_response"].bool_param
                if message_in.error_message or final:
                    return end(True)
            return None

        call.arrived, call.ended = arrived, lambda _reason: end(False)
        message = infer_request(engine, _STOP, request_id=request_id)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        try:
            call.send(message.SerializeToString())
            if not await asyncio.wait_for(ended, _STOP_S):
                await self.close()
        except (ProtocolError, OSError, asyncio.TimeoutError):
            await self.close()


class _Http(HttpSession):
    """Triton's generate and generate_stream."""

    def __init__(self, client: Client) -> None:
        stream = client.protocol in STREAMING and client.model.decoupled
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
        # Several sequences give several elements of text and counts, which cannot be used.
        parts = text if isinstance(text, list) else [text]
        whole = "".join(fields.text(part, "text_output") for part in parts)
        count = None if isinstance(tokens, list) else fields.count(tokens, "num_output_tokens")
        for name, tensor in DRAFTS.items():
            if tensor in body and not isinstance(body[tensor], list):
                datum = body[tensor]
                _keep(answer, name, _count_of(datum, tensor) if isinstance(datum, str) else fields.count(datum, tensor))
        answer.received(now_ns, whole, count)


def _keep(answer: Answer, name: str, count: int | None) -> None:
    """Record a count of the whole response, which only its last chunk has."""
    if count is not None:
        setattr(answer, name, count)


def config_of(body: bytes) -> model_config_pb2.ModelConfig:
    """A model's configuration as Triton sends it over HTTP. Raises ProtocolError if it is invalid."""
    value = fields.parse(body)
    try:
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair causes a SystemError below
        return json_format.ParseDict(value, model_config_pb2.ModelConfig(), ignore_unknown_fields=True)
    except (UnicodeEncodeError, OverflowError, json_format.ParseError) as error:
        raise ProtocolError(f"not a model's configuration: {fields.shortened(str(error))}") from error


def infer_request(
    model: ServedModel, tensors: Mapping[str, Option | InputTensor], *, request_id: str
) -> service_pb2.ModelInferRequest:
    """A KServe v2 request with raw contents: every value is a tensor of shape [1, n] ([n] for a model without
    batching). An InputTensor has its own shape.

    Raises ServerError for a value whose type differs from its tensor's.
    """
    request = service_pb2.ModelInferRequest(model_name=model.name, id=request_id)
    for name, value in tensors.items():
        if isinstance(value, InputTensor):
            datatype = model.inputs[name].removeprefix("TYPE_")
            request.inputs.add(name=name, datatype=datatype, shape=[*[1] * model.batched, *value.shape])
            request.raw_input_contents.append(value.values)
            continue
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
        shown_value = values[0] if len(values) == 1 else list(values)
        raise ServerError(
            f"input {name} of {model.name} is {datatype}, not {shown_value!r}", failure=FailureClass.USER
        ) from error


def data_types(tensors: Iterable[model_config_pb2.ModelInput | model_config_pb2.ModelOutput]) -> dict[str, str]:
    """Data type of each tensor of a configuration by name, as config.pbtxt spells it, or the number of an unknown type."""
    known = model_config_pb2.DataType.DESCRIPTOR.values_by_number
    return {
        each.name: known[each.data_type].name if each.data_type in known else str(each.data_type) for each in tensors
    }


def text_output(response: service_pb2.ModelInferResponse) -> str:
    """First element of the tensor `text_output` in a response, "" without one. Raises ProtocolError if truncated."""
    for index, tensor in enumerate(response.outputs):
        if tensor.name == "text_output":
            return _text(response, index)
    return ""


def _text(response: service_pb2.ModelInferResponse, index: int) -> str:
    """First element of a tensor of texts. Raises ProtocolError."""
    tensor = response.outputs[index]
    if index < len(response.raw_output_contents):
        raw = response.raw_output_contents[index]
        return bytes(_part(raw, tensor.name, 4, int.from_bytes(raw[:4], "little"))).decode(errors="replace")
    return bytes(_first(tensor.contents.bytes_contents, tensor.name)).decode(errors="replace")


def _count_of(text: str, name: str) -> int | None:
    """A count sent as text. Raises ProtocolError for any other text."""
    return fields.count(int(text) if text.isdecimal() and text.isascii() else text, name)


def token_count(response: service_pb2.ModelInferResponse, name: str) -> int | None:
    """First element of the tensor `name` in a response, None without one. Raises ProtocolError for an invalid one."""
    for index, tensor in enumerate(response.outputs):
        if tensor.name == name:
            if tensor.datatype == "BYTES":
                return _count_of(_text(response, index), name)
            if index < len(response.raw_output_contents):
                raw = _part(response.raw_output_contents[index], tensor.name, 0, 4)
                return fields.count(int.from_bytes(raw, "little", signed=True), tensor.name)
            return fields.count(int(_first(tensor.contents.int_contents, tensor.name)), tensor.name)
    return None


def output_log_probs(response: service_pb2.ModelInferResponse) -> list[float]:
    """The tensor `output_log_probs` in a response. [] without one. Raises ProtocolError for a truncated one."""
    for index, tensor in enumerate(response.outputs):
        if tensor.name == "output_log_probs":
            if index >= len(response.raw_output_contents):
                return list(tensor.contents.fp32_contents)
            return list(_unpacked(response, index, "f"))
    return []


def top_log_probs(response: service_pb2.ModelInferResponse, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most likely tokens at each position: id, log probability. Raises ProtocolError."""
    found = {tensor.name: index for index, tensor in enumerate(response.outputs)}
    if not {"top_token_ids", "top_log_probs"} <= found.keys():
        return []
    ids = _unpacked(response, found["top_token_ids"], "i")
    values = _unpacked(response, found["top_log_probs"], "f")
    if len(ids) != len(values) or len(ids) % count:
        raise ProtocolError(f"the server sent {len(ids)} top_token_ids and {len(values)} top_log_probs")
    pairs = list(zip(ids, values, strict=True))
    return [pairs[at : at + count] for at in range(0, len(pairs), count)]


def _unpacked(response: service_pb2.ModelInferResponse, index: int, kind: Literal["f", "i"]) -> tuple[Any, ...]:
    """The raw values of an output of four bytes each."""
    if index >= len(response.raw_output_contents):
        raise ProtocolError(f"{response.outputs[index].name} in the server's response is empty")
    raw = response.raw_output_contents[index]
    return struct.unpack(f"<{len(raw) // 4}{kind}", _part(raw, response.outputs[index].name, 0, len(raw) // 4 * 4))


def _part(raw: bytes, name: str, start: int, size: int) -> bytes:
    if len(raw) < start + size:
        raise ProtocolError(f"{name} in the server's response is truncated: {len(raw)} of {start + size} bytes")
    return raw[start : start + size]


def _first(values: Sequence[Any], name: str) -> Any:
    if not values:
        raise ProtocolError(f"{name} in the server's response is empty")
    return values[0]
