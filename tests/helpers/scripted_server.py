"""A server with a known timeline, against which the load client is tested.

Speaks the KServe v2 protocols a Triton server speaks (gRPC ModelStreamInfer, ModelInfer, metadata, configuration,
readiness; HTTP generate and generate_stream) and OpenAI's chat and completions, and handles each request with a
`Script`. It records when each request arrived and when each response was passed to the network, on the same
CLOCK_MONOTONIC the client uses. For that it frames gRPC itself: a gRPC library sends when it sees fit.

    python tests/helpers/scripted_server.py LOG first_ms=50 gap_ms=50 events=20

A prompt that is a JSON object with any of `first_ms`, `gap_ms`, `events`, `merge`, `cut`, `stall_ms` (before the last
event), `drop` and `error` is handled that way instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from google.protobuf import json_format

from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.client.transport.http2 import (
    PREFACE,
    STATUS,
    Headers,
    Http2,
    Http2Error,
    Kind,
    Messages,
    message,
)
from trtllm_pipeline.models.triton_repository.triton_messages import model_config_pb2, service_pb2

_STREAM_END: Final = "triton_final_response"


@dataclass(frozen=True, slots=True)
class Script:
    """Response to one request: texts with their send times, in seconds after the request arrived."""

    events: tuple[tuple[float, str], ...]
    error: str | None = None
    """Sent after the events, instead of the end."""
    drop: bool = False
    """Close the connection after the events, instead of the end."""
    hang: bool = False
    """Never send the end."""
    cut: bool = False
    """HTTP: every server-sent event arrives in two reads, cut within a multibyte character if there is one."""
    merge: int = 1
    """HTTP: this many server-sent events arrive in one read."""
    counts: tuple[int, ...] | None = None
    """`num_output_tokens` of each event, true or not, for clients that request it. None for a server that does not count."""
    reasoning: int = 0
    """OpenAI chat: this many events are thinking."""
    reasoning_as: str = "reasoning_content"
    """OpenAI chat: the field that has it."""
    finish_reason: str = "stop"
    """OpenAI: why it ended, true or not."""

    @classmethod
    def of(cls, text: str, *, first_s: float = 0.0, gap_s: float = 0.0) -> Script:
        """`text` word by word, evenly spaced. Every word counts as one token."""
        words = [word if index == 0 else f" {word}" for index, word in enumerate(text.split(" "))]
        events = tuple((first_s + index * gap_s, word) for index, word in enumerate(words))
        return cls(events, counts=tuple(int(bool(word)) for word in words))


@dataclass(slots=True)
class Served:
    """Timeline of one request, in CLOCK_MONOTONIC nanoseconds."""

    prompt: str
    received_ns: int
    sent_ns: list[int] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    """How much later than scripted each event was ready to be sent."""


Respond = Callable[[str, Mapping[str, Any]], Script]
"""(model, input values by tensor name) -> script."""


def config(
    name: str, *, decoupled: bool = True, accumulate_tokens: bool = False, counts: bool = False
) -> model_config_pb2.ModelConfig:
    """A configuration shaped like TensorRT-LLM's `ensemble` and `tensorrt_llm_bls`, with `counts` like 0.20's."""
    inputs = {
        "text_input": "TYPE_STRING",
        "max_tokens": "TYPE_INT32",
        "stop_words": "TYPE_STRING",
        "bad_words": "TYPE_STRING",
        "top_k": "TYPE_INT32",
        "temperature": "TYPE_FP32",
        "random_seed": "TYPE_UINT64",
        "stream": "TYPE_BOOL",
        **({"return_num_output_tokens": "TYPE_BOOL"} if counts else {}),
    }
    message = model_config_pb2.ModelConfig(name=name, backend="python", max_batch_size=64)
    for tensor, kind in inputs.items():
        message.input.add(name=tensor, data_type=kind, dims=[1], optional=tensor not in {"text_input", "max_tokens"})
    message.output.add(name="text_output", data_type="TYPE_STRING", dims=[-1])
    if counts:
        message.output.add(name="num_output_tokens", data_type="TYPE_INT32", dims=[1])
    message.model_transaction_policy.decoupled = decoupled
    message.parameters["accumulate_tokens"].string_value = str(accumulate_tokens).lower()
    return message


class ScriptedServer:
    """The server. `respond` chooses every response. `served` has the true timelines, in order of arrival."""

    def __init__(self, respond: Respond, models: Mapping[str, model_config_pb2.ModelConfig]) -> None:
        self.respond = respond
        self.models = models
        self.served: list[Served] = []
        self.ready = True
        """Readiness that it reports."""

    async def start(self) -> dict[str, Any]:
        """Listen on free ports of loopback. Returns the content of a service.json."""
        self._grpc = await asyncio.get_running_loop().create_server(lambda: _GrpcConnection(self), "127.0.0.1", 0)
        grpc_port = self._grpc.sockets[0].getsockname()[1]
        self._http = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        http_port = self._http.sockets[0].getsockname()[1]
        return {
            "schema": 1,
            "pid": os.getpid(),
            "http": f"127.0.0.1:{http_port}",
            "grpc": f"127.0.0.1:{grpc_port}",
            "metrics": None,
            "model": "ensemble",
            "bls_model": "tensorrt_llm_bls" if "tensorrt_llm_bls" in self.models else None,
            "server": {"name": "scripted", "version": "1"},
        }

    async def stop(self) -> None:
        """Close both ports and what is connected to them."""
        self._grpc.close()
        self._http.close()
        others = asyncio.all_tasks() - {task for task in (asyncio.current_task(),) if task is not None}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _play(self, model: str, values: Mapping[str, Any]) -> AsyncIterator[tuple[Served, Script, _Part]]:
        """Each event of the script at its time. The caller notes the moment it sends."""
        served = Served(str(values["text_input"]), time.monotonic_ns())
        self.served.append(served)
        script = self.respond(model, values)
        start = served.received_ns / 1e9
        counts = (script.counts or ()) if values.get("return_num_output_tokens") else ()
        for (at_s, text), tokens in zip_longest(script.events, counts):
            wait_s = start + at_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            served.late_ms.append(round((time.monotonic() - start - at_s) * 1e3, 3))
            yield served, script, _Part(text, tokens)
        if script.drop:
            raise _DropError
        if script.hang:
            await asyncio.sleep(3600)
        if script.error is not None:
            raise _ScriptedError(script.error)

    async def _streamed(self, model: str, values: Mapping[str, Any]) -> AsyncIterator[tuple[Served, Script, _Part]]:
        """The events of a Triton model, all in one response if the model is not decoupled."""
        if self.models[model].model_transaction_policy.decoupled:
            async for each in self._play(model, values):
                yield each
            return
        if values.get("stream"):
            raise _ScriptedError("Streaming is only supported if model is deployed using decoupled mode.")
        played = [each async for each in self._play(model, values)]
        yield (*played[-1][:2], _joined(played))

    # gRPC

    async def call(self, method: str, read: Read, write: Write) -> None:
        """Serve one gRPC call. Raises _ScriptedError for a status other than OK."""
        if method == "ModelStreamInfer":
            return await self._stream(read, write)
        raw = await read()
        if method == "ModelInfer":
            reply = await self._infer(service_pb2.ModelInferRequest.FromString(raw))
        elif method == "ModelConfig":
            known = self._known(service_pb2.ModelConfigRequest.FromString(raw).name)
            reply = service_pb2.ModelConfigResponse(config=known)
        elif method == "ModelMetadata":
            reply = _metadata(self._known(service_pb2.ModelMetadataRequest.FromString(raw).name))
        elif method == "RepositoryIndex":
            reply = service_pb2.RepositoryIndexResponse()
            for name in self.models:
                reply.models.add(name=name, version="1", state="READY")
        elif method == "ServerReady":
            reply = service_pb2.ServerReadyResponse(ready=self.ready)
        else:
            raise _ScriptedError(f"unknown method {method}", "UNIMPLEMENTED")
        write(reply.SerializeToString())
        return None

    async def _stream(self, read: Read, write: Write) -> None:
        while raw := await read():
            request = service_pb2.ModelInferRequest.FromString(raw)
            reply = service_pb2.ModelStreamInferResponse()
            try:
                self._known(request.model_name)
                async for served, _script, part in self._streamed(request.model_name, _values(request)):
                    answer = service_pb2.ModelStreamInferResponse(infer_response=_response(request, part))
                    data = answer.SerializeToString()
                    served.sent_ns.append(time.monotonic_ns())
                    write(data)
                reply.infer_response.parameters[_STREAM_END].bool_param = True
            except _ScriptedError as error:
                reply.error_message = str(error)
            reply.infer_response.id = request.id
            write(reply.SerializeToString())

    async def _infer(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferResponse:
        self._known(request.model_name, decoupled=False)
        played = [each async for each in self._play(request.model_name, _values(request))]
        response = _response(request, _joined(played))
        for served, _, _ in played[-1:]:
            served.sent_ns.append(time.monotonic_ns())
        return response

    def _known(self, name: str, *, decoupled: bool = True) -> model_config_pb2.ModelConfig:
        if name not in self.models:
            raise _ScriptedError(f"Request for unknown model: '{name}' is not found", "NOT_FOUND")
        if self.models[name].model_transaction_policy.decoupled and not decoupled:
            raise _ScriptedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
        return self.models[name]

    # HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readline():
                _method, path, _version = request.decode().split()
                length = 0
                while (line := (await reader.readline()).strip()) != b"":
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                await self._answer(path, await reader.readexactly(length), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v2/health/ready":
            return _whole(writer, 200 if self.ready else 400, {})
        if path.startswith("/v1/"):
            return await self._openai(path.removeprefix("/v1/"), body, writer)
        model, _, verb = path.removeprefix("/v2/models/").partition("/")
        if not path.startswith("/v2/models/"):
            return _whole(writer, 404, {"error": f"{path} does not exist"})
        try:
            known = self._known(model)
            if verb == "config":
                return _whole(writer, 200, json_format.MessageToDict(known, preserving_proto_field_name=True))
            values = json.loads(body)
            if verb == "generate_stream":
                played = self._streamed(model, values)
                return await self._event_stream(played, writer, lambda _script, part: _json(model, part))
            return _whole(writer, 200, _json(model, _joined([each async for each in self._play(model, values)])))
        except _ScriptedError as error:
            return _whole(writer, 400, {"error": str(error)})

    async def _event_stream(
        self,
        played: AsyncIterator[tuple[Served, Script, _Part]],
        writer: asyncio.StreamWriter,
        body: Callable[[Script, _Part], dict[str, Any]],
        tail: Iterable[bytes] = (),
        head: bytes = b"",
    ) -> None:
        """Server-sent events: `head`, then `body` of every part of `played` at its time, then `tail`."""

        def chunk(data: bytes) -> None:
            if writer.is_closing():
                raise ConnectionError("the client has gone")
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if head:
            chunk(head)
        waiting: list[bytes] = []
        try:
            async for served, script, part in played:
                waiting.append(_event(body(script, part)))
                if len(waiting) < script.merge and len(served.sent_ns) + len(waiting) < len(script.events):
                    continue
                data = b"".join(waiting)
                if script.cut:
                    middle = next((i for i, byte in enumerate(data) if byte >= 0x80), len(data) // 2) + 1
                    chunk(data[:middle])
                    await asyncio.sleep(0.002)
                    data = data[middle:]
                served.sent_ns.extend([time.monotonic_ns()] * len(waiting))
                chunk(data)
                waiting.clear()
            for data in tail:
                chunk(data)
        except _ScriptedError as error:
            chunk(_event({"error": str(error)}))
        chunk(b"")

    async def _openai(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "models":
            return _whole(writer, 200, {"object": "list", "data": [{"id": name} for name in self.models]})
        request = json.loads(body)
        chat, model = path == "chat/completions", request["model"]
        if model not in self.models:
            return _whole(writer, 404, {"error": {"message": f"the model {model!r} does not exist"}})
        prompt = request["messages"][-1]["content"] if chat else request["prompt"]
        values = {**request, "text_input": prompt, "return_num_output_tokens": True}
        counts, scripts = [0], []
        kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat and request.get("stream") else "")
        about = {"id": "1", "object": kind, "created": int(time.time()), "model": model}

        def choice(part: _Part, index: int, script: Script) -> dict[str, Any]:
            name = script.reasoning_as if index < script.reasoning else "content"
            return {"index": 0, "delta": {name: part.text}} if chat else {"index": 0, "text": part.text}

        def delta(script: Script, part: _Part) -> dict[str, Any]:
            counts[0] += 1 if part.tokens is None else part.tokens
            scripts.append(script)
            return {**about, "choices": [choice(part, len(scripts) - 1, script)]}

        def usage() -> dict[str, Any]:
            count = len(str(prompt).split())
            return {"prompt_tokens": count, "completion_tokens": counts[0], "total_tokens": count + counts[0]}

        def tail() -> Iterator[bytes]:
            reason = scripts[-1].finish_reason if scripts else "stop"
            end: dict[str, Any] = {"index": 0, "finish_reason": reason, **({"delta": {}} if chat else {"text": ""})}
            yield _event({**about, "choices": [end]})
            if (request.get("stream_options") or {}).get("include_usage"):
                yield _event({**about, "choices": [], "usage": usage()})
            yield b"data: [DONE]\n\n"

        if request.get("stream"):
            role = {**about, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            head = _event(role) if chat else b""
            return await self._event_stream(self._play(model, values), writer, delta, tail(), head)
        try:
            played = [each async for each in self._play(model, values)]
        except _ScriptedError as error:
            return _whole(writer, 400, {"error": {"message": str(error)}})
        for _, script, part in played:
            delta(script, part)
        for served, _, _ in played[-1:]:
            served.sent_ns.append(time.monotonic_ns())
        text, reason = _joined(played).text, scripts[-1].finish_reason if scripts else "stop"
        value = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices = [{"index": 0, "finish_reason": reason, **value}]
        return _whole(writer, 200, {**about, "choices": choices, "usage": usage()})


Read = Callable[[], Awaitable[bytes]]
"""The next message of a call, empty at the end."""
Write = Callable[[bytes], None]


class _GrpcConnection(asyncio.Protocol):
    """One client's connection: HTTP/2 frames to calls."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._preface = PREFACE
        self._calls: dict[int, tuple[Messages, asyncio.Queue[bytes], asyncio.Task[None]]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._http2 = Http2(transport.write, self._on, serving=True)
        self._http2.start()

    def data_received(self, data: bytes) -> None:
        skipped = len(self._preface)
        self._preface = self._preface[len(data) :]
        try:
            self._http2.feed(time.monotonic_ns(), data[skipped:])
        except Http2Error:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for _, _, task in self._calls.values():
            task.cancel()

    def _on(self, _now_ns: int, kind: Kind, stream: int, value: Headers | bytes | int, ended: bool) -> None:
        if kind == "headers":
            assert not isinstance(value, (bytes, int))
            messages: asyncio.Queue[bytes] = asyncio.Queue()
            method = dict(value)[":path"].rpartition("/")[2]
            self._calls[stream] = (Messages(), messages, asyncio.create_task(self._serve(stream, method, messages)))
        if stream not in self._calls:
            return
        parser, messages, task = self._calls[stream]
        if isinstance(value, bytes):
            for found in parser.feed(value):
                messages.put_nowait(found)
        if kind == "reset":
            task.cancel()
        elif ended:
            messages.put_nowait(b"")

    async def _serve(self, stream: int, method: str, messages: asyncio.Queue[bytes]) -> None:
        status: Headers = (("grpc-status", "0"),)
        self._http2.headers(stream, ((":status", "200"), ("content-type", "application/grpc")))
        try:
            await self._server.call(method, messages.get, lambda data: self._http2.data(stream, message(data)))
        except _DropError:
            self._transport.abort()
            return
        except _ScriptedError as error:
            status = (("grpc-status", str(STATUS.index(error.status))), ("grpc-message", quote(str(error))))
        finally:
            self._calls.pop(stream, None)
        self._http2.headers(stream, status, end=True)
        self._http2.forget(stream)


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


class _Part(NamedTuple):
    """One response."""

    text: str
    tokens: int | None


class _DropError(ConnectionError):
    pass


class _ScriptedError(Exception):
    def __init__(self, message: str, status: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.status = status


def _whole(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    data = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def _values(request: service_pb2.ModelInferRequest) -> dict[str, Any]:
    codes = {"BOOL": "?", "INT32": "i", "UINT64": "Q", "FP32": "f"}
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            size = int.from_bytes(raw[:4], "little")
            values[tensor.name] = raw[4 : 4 + size].decode()
        else:
            values[tensor.name] = struct.unpack_from(f"<{codes[tensor.datatype]}", raw)[0]
    return values


def _metadata(model: model_config_pb2.ModelConfig) -> service_pb2.ModelMetadataResponse:
    reply = service_pb2.ModelMetadataResponse(name=model.name, versions=["1"], platform=model.platform)
    for tensors, described in ((model.input, reply.inputs), (model.output, reply.outputs)):
        for tensor in tensors:
            kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            shape = [*([-1] if model.max_batch_size else []), *tensor.dims]
            described.add(name=tensor.name, datatype="BYTES" if kind == "STRING" else kind, shape=shape)
    return reply


def _joined(played: Sequence[tuple[Served, Script, _Part]]) -> _Part:
    """The one response of a request that is not streamed."""
    counts = [part.tokens for _, _, part in played if part.tokens is not None]
    return _Part("".join(part.text for _, _, part in played), sum(counts) if counts else None)


def _json(model: str, part: _Part) -> dict[str, Any]:
    counts = {} if part.tokens is None else {"num_output_tokens": part.tokens}
    return {"model_name": model, "text_output": part.text, **counts}


def _response(request: service_pb2.ModelInferRequest, part: _Part) -> service_pb2.ModelInferResponse:
    response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    data = part.text.encode()
    response.raw_output_contents.append(struct.pack("<I", len(data)) + data)
    if part.tokens is not None:
        response.outputs.add(name="num_output_tokens", datatype="INT32", shape=[1, 1])
        response.raw_output_contents.append(struct.pack("<i", part.tokens))
    return response


@contextmanager
def running(
    respond: Respond, models: Mapping[str, model_config_pb2.ModelConfig] | None = None
) -> Iterator[tuple[ScriptedServer, dict[str, Any]]]:
    """A server in a thread of this process, and its service.json's content. For behaviour, not for timing."""
    server = ScriptedServer(respond, models or {"ensemble": config("ensemble")})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    service = asyncio.run_coroutine_threadsafe(server.start(), loop).result(60)
    try:
        yield server, service
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


@contextmanager
def server_process(log: Path, *timeline: str) -> Iterator[Service]:
    """A server in a separate process. It writes its timelines to `log` when the block ends, one JSON object per request.

    `timeline` is the script of a prompt that has none, such as `first_ms=20`, `gap_ms=5`, `events=6`.
    """
    command = [sys.executable, __file__, str(log), *timeline]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            raw = json.loads(process.stdout.readline())
            yield Service(raw["http"], raw["grpc"], None, raw["pid"], raw["model"], None)
            process.communicate("", timeout=60)
        finally:
            process.kill()


def scripted(prompt: str, default: Mapping[str, Any]) -> Script:
    """The script in a prompt, if it is one, with `default` for missing fields."""
    try:
        document = json.loads(prompt)
    except ValueError:
        document = None
    timeline = {**default, **(document if isinstance(document, dict) else {})}
    events = [
        [(timeline["first_ms"] + index * timeline["gap_ms"]) / 1e3, " word"] for index in range(timeline["events"])
    ]
    if events:
        events[-1][0] += timeline.get("stall_ms", 0.0) / 1e3
    return Script(
        tuple((at_s, text) for at_s, text in events),
        error=timeline.get("error"),
        drop=timeline.get("drop", False),
        merge=timeline.get("merge", 1),
        cut=timeline.get("cut", False),
    )


def main(log: str, *timeline: str) -> None:
    """Serve one timeline until stdin closes, then write the timelines to `log`, one JSON object per line."""
    models = {"ensemble": config("ensemble"), "plain": config("plain", decoupled=False)}
    pairs = (pair.split("=") for pair in timeline)
    default = {"first_ms": 50.0, "gap_ms": 50.0, "events": 20} | {name: json.loads(value) for name, value in pairs}

    async def serve() -> None:
        server = ScriptedServer(lambda _model, values: scripted(values["text_input"], default), models)
        sys.stdout.write(json.dumps(await server.start()) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        with Path(log).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(served)) + "\n" for served in server.served)
        await server.stop()

    asyncio.run(serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
