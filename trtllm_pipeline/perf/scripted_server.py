"""A server whose timeline is known: what the client reports can be held against what really happened.

Speaks the KServe v2 protocols a Triton server speaks (gRPC ModelStreamInfer, ModelInfer, metadata, configuration,
readiness; HTTP generate and generate_stream) and answers each request with a `Script`. It notes when each request
arrived and when each response was handed to the network, on the same CLOCK_MONOTONIC the client uses.

    python -m trtllm_pipeline.perf.scripted_server --first-ms 50 --gap-ms 50 --events 20 --log FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
from tritonclient.grpc import model_config_pb2, service_pb2

_STREAM_END: Final = "triton_final_response"


@dataclass(frozen=True, slots=True)
class Script:
    """How one request is answered: texts with the time each is sent, in seconds after the request arrived."""

    events: tuple[tuple[float, str], ...]
    error: str | None = None
    """Sent after the events, instead of the end."""
    hang: bool = False
    """Never send the end."""
    cut: bool = False
    """HTTP: every server-sent event arrives in two reads, cut in the middle of a character where there is one."""
    merge: int = 1
    """HTTP: this many server-sent events arrive in one read."""
    counts: tuple[int, ...] | None = None
    """`num_output_tokens` of each event, true or not, for clients that ask; None for a server that does not count."""

    @classmethod
    def of(cls, text: str, *, first_s: float = 0.0, gap_s: float = 0.0) -> Script:
        """`text` word by word, evenly spaced; every word is counted as one token."""
        words = [word if index == 0 else f" {word}" for index, word in enumerate(text.split(" "))]
        events = tuple((first_s + index * gap_s, word) for index, word in enumerate(words))
        return cls(events, counts=tuple(int(bool(word)) for word in words))


@dataclass(slots=True)
class Served:
    """What happened to one request, in CLOCK_MONOTONIC nanoseconds."""

    prompt: str
    received_ns: int
    sent_ns: list[int] = field(default_factory=list)


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
    """The server. `respond` decides every answer; `served` is the truth to compare with, in order of arrival."""

    def __init__(self, respond: Respond, models: Mapping[str, model_config_pb2.ModelConfig]) -> None:
        self.respond = respond
        self.models = models
        self.served: list[Served] = []

    async def start(self) -> dict[str, Any]:
        """Listen on free ports of loopback; returns what a service.json holds."""
        self._grpc = grpc.aio.server()
        methods = {
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
            "ModelInfer": _unary(self._infer, service_pb2.ModelInferRequest),
            "ModelConfig": _unary(self._config, service_pb2.ModelConfigRequest),
            "ModelMetadata": _unary(self._metadata, service_pb2.ModelMetadataRequest),
            "ServerReady": _unary(self._ready, service_pb2.ServerReadyRequest),
        }
        handler = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
        self._grpc.add_generic_rpc_handlers((handler,))
        grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")
        await self._grpc.start()
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
        """Close both ports."""
        await self._grpc.stop(None)
        self._http.close()

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
            yield served, script, _Part(text, tokens)
        if script.hang:
            await asyncio.sleep(3600)
        if script.error is not None:
            raise _ScriptedError(script.error)

    # gRPC

    async def _stream(self, _requests: object, context: Any) -> None:
        while (raw := await context.read()) is not grpc.aio.EOF:
            request = service_pb2.ModelInferRequest.FromString(raw)
            reply = service_pb2.ModelStreamInferResponse()
            try:
                self._known(request.model_name)
                async for served, _script, part in self._play(request.model_name, _values(request)):
                    message = service_pb2.ModelStreamInferResponse(infer_response=_response(request, part))
                    data = message.SerializeToString()
                    served.sent_ns.append(time.monotonic_ns())
                    await context.write(data)
                reply.infer_response.parameters[_STREAM_END].bool_param = True
            except _ScriptedError as error:
                reply.error_message = str(error)
            reply.infer_response.id = request.id
            await context.write(reply.SerializeToString())

    async def _infer(self, request: service_pb2.ModelInferRequest, context: Any) -> bytes:
        try:
            self._known(request.model_name, decoupled=False)
            whole = _joined([part async for _, _, part in self._play(request.model_name, _values(request))])
        except _ScriptedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        data: bytes = _response(request, whole).SerializeToString()
        return data

    async def _config(self, request: service_pb2.ModelConfigRequest, context: Any) -> bytes:
        try:
            data: bytes = service_pb2.ModelConfigResponse(config=self._known(request.name)).SerializeToString()
        except _ScriptedError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return data

    async def _metadata(self, request: service_pb2.ModelMetadataRequest, _context: object) -> bytes:
        model = self._known(request.name)
        reply = service_pb2.ModelMetadataResponse(name=model.name, versions=["1"], platform=model.platform)
        for tensors, described in ((model.input, reply.inputs), (model.output, reply.outputs)):
            for tensor in tensors:
                kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
                shape = [*([-1] if model.max_batch_size else []), *tensor.dims]
                described.add(name=tensor.name, datatype="BYTES" if kind == "STRING" else kind, shape=shape)
        data: bytes = reply.SerializeToString()
        return data

    async def _ready(self, _request: object, _context: object) -> bytes:
        data: bytes = service_pb2.ServerReadyResponse(ready=True).SerializeToString()
        return data

    def _known(self, name: str, *, decoupled: bool = True) -> model_config_pb2.ModelConfig:
        if name not in self.models:
            raise _ScriptedError(f"Request for unknown model: '{name}' is not found")
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
            return _whole(writer, 200, {})
        _, _version, _models, model, verb = path.split("/")
        try:
            self._known(model)
            values = json.loads(body)
            if verb == "generate_stream":
                return await self._events(model, values, writer)
            return _whole(writer, 200, _json(model, _joined([part async for _, _, part in self._play(model, values)])))
        except _ScriptedError as error:
            return _whole(writer, 400, {"error": str(error)})

    async def _events(self, model: str, values: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        def chunk(data: bytes) -> None:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        waiting: list[bytes] = []
        try:
            async for served, script, part in self._play(model, values):
                body = json.dumps(_json(model, part), ensure_ascii=False)
                waiting.append(f"data: {body}\n\n".encode())
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
        except _ScriptedError as error:
            chunk(f"data: {json.dumps({'error': str(error)})}\n\n".encode())
        chunk(b"")


class _Part(NamedTuple):
    """One response."""

    text: str
    tokens: int | None


class _ScriptedError(Exception):
    pass


def _unary(method: Callable[[Any, Any], Any], request: Any) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(method, request_deserializer=request.FromString)


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


def _joined(parts: Sequence[_Part]) -> _Part:
    """The one response of a request that is not streamed."""
    counts = [part.tokens for part in parts if part.tokens is not None]
    return _Part("".join(part.text for part in parts), sum(counts) if counts else None)


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
    service = asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield server, service
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def main(argv: list[str] | None = None) -> None:
    """Serve one fixed timeline until stdin closes; then write what happened to the log, a JSON object a line."""
    parser = argparse.ArgumentParser(description="A server with a known timeline.")
    parser.add_argument("--first-ms", type=float, default=50.0, help="from request to first event")
    parser.add_argument("--gap-ms", type=float, default=50.0, help="between events")
    parser.add_argument("--events", type=int, default=20, help="events an answer")
    parser.add_argument("--log", type=Path, required=True, help="file for the truth")
    args = parser.parse_args(argv)
    script = Script(tuple(((args.first_ms + index * args.gap_ms) / 1e3, " word") for index in range(args.events)))

    async def serve() -> None:
        server = ScriptedServer(lambda _model, _values: script, {"ensemble": config("ensemble")})
        sys.stdout.write(json.dumps(await server.start()) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        with args.log.open("w", encoding="utf-8") as log:
            for served in server.served:
                record = {"prompt": served.prompt, "received_ns": served.received_ns, "sent_ns": served.sent_ns}
                log.write(json.dumps(record) + "\n")
        await server.stop()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
