"""Fuzz the client's parsers with millions of broken and lying responses.

    python benchmarks/fuzz_wire.py [--inputs 1000000] [--seconds 600] [--seed 1] [--only http sse ...] [--format json]

Inputs follow the structure of the protocol: heads, chunks, frames, header blocks, events, messages. Each is valid or has a
lie in one place, is then changed byte by byte, and cut at random. An input fails if a parser raises anything but
ProtocolError, needs more than CPU_S seconds of CPU time, or keeps more than was sent. Seed and number reproduce an
input: --seed S --first N --inputs 1 --only PARSER.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, Literal

import hpack
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from trtllm_pipeline.measure.client import openai
from trtllm_pipeline.measure.client.session import Answer, ServerSentEvents
from trtllm_pipeline.measure.client.transport import ProtocolError, http, http2
from trtllm_pipeline.measure.client.triton import ServedModel, config_of, text_output, token_count
from trtllm_pipeline.measure.load import counters

CPU_S: Final = 2.0
LONG: Final = 10**6
"""Bytes of an input now and then, to meet the limits."""
NUMBERS: Final = (
    "-5", "0", "1", "-0", "+5", "00005", "5", "1_0", "0x5", "ZZZ", "", " ", "٣", "²", "1e3", "1.5", "nan", "inf", "1e999",
    "-9223372036854775808", "18446744073709551616", "FFFFFFFFFFFFFFFF", "9" * 400, "5, 5", "5, 6",
)  # fmt: skip
JSON: Final = (
    "null", "true", "0", "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", "9" * 5000, '""', '"x"', '"\\ud800"', '"\\u0000"',
    "[]", "{}", "[null]", "[[]]", '{"a":1}', "[" * 5000, "[" * 200000, '{"a":' * 5000, "{", "[1,", '"', "\xff", "[0,0]",
)  # fmt: skip


def http_answer(draw: random.Random) -> bytes:
    """A response over HTTP/1.1."""
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * draw.choice((*(0, 0, 1) * 50, 5000))
    status = draw.choice(("200", "200", "200", "404", "204", "304", "101", "099", "1000", "-20", "2 0", "²00"))
    version = draw.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2", "http/1.1", "SSH-2.0", ""))
    body = draw.randbytes(draw.choice((0, 1, 5, 100, 500)))
    fields, framed = [], body
    kind = draw.choice(("length", "length", "chunked", "chunked", "both", "neither"))
    if kind in {"length", "both"}:
        fields.append(
            f"Content-Length: {draw.choice((str(len(body)), *NUMBERS)) if draw.random() < 0.6 else len(body)}"
        )
    if kind in {"chunked", "both"}:
        coding = draw.choice(
            ("chunked", "chunked", "chunked", "gzip", "gzip, chunked", "chunked, chunked", "CHUNKED", "x")
        )
        fields.append(f"Transfer-Encoding: {coding}")
        framed = b""
        for start in range(0, len(body), step := draw.choice((1, 7, 4096))):
            part = body[start : start + step]
            size = draw.choice(NUMBERS).encode() if draw.random() < 0.02 else f"{len(part):x}".encode()
            extension = b";" + b"e" * draw.choice((0, 3, 5000)) if draw.random() < 0.05 else b""
            framed += size + extension + b"\r\n" + part + (b"\r\n" if draw.random() < 0.98 else b"")
        framed += b"0\r\n" + b"Trailer: x\r\n" * draw.choice((*(0, 0, 1) * 99, 20, 10000)) + b"\r\n"
    for _ in range(draw.choice((*(0, 1, 3) * 99, 300, 5000))):
        fields += [f"X-{draw.random()}: " + "y" * draw.choice((1, 20, 200))]
    for extra in (
        "Content-Encoding: gzip",
        " folded",
        "no colon",
        ": x",
        "Content-Length: 7",
        "Connection: close",
        "A: \0",
    ):
        if draw.random() < 0.04:
            fields.insert(draw.randrange(len(fields) + 1), extra)
    end = draw.choice(("\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r"))
    head = end.join((f"{version} {status} X", *fields, "", "")).encode()
    return interim + head + framed + (b"HTTP/1.1 200 OK\r\n\r\n" if draw.random() < 0.05 else b"")


def read_http(parts: Sequence[bytes]) -> int:
    kept = bytearray()
    answer = http.Parser(lambda _now_ns, part: kept.extend(part))
    for part in parts:
        answer.feed(0, part)
        if answer.complete:
            break
    else:
        answer.end("closed")
    return len(kept)


def frames(draw: random.Random) -> bytes:
    """Bytes of a gRPC server on one connection."""
    encoder = hpack.Encoder()
    out = bytearray()
    for _ in range(draw.choice((*(1, 3, 10) * 33, 300))):
        kind = draw.choice((0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9, 10, 255))
        flags = draw.choice((0, 0, 1, 4, 4, 5, 8, 12, 13, 0x20, 0x2C, 255))
        stream = draw.choice((0, 1, 1, 1, 1, 3, 2, 2**31 - 1, 2**32 - 1))
        if kind in {1, 9} and draw.random() < 0.8:
            fields = [(":status", draw.choice(("200", "502", "x"))), ("grpc-status", draw.choice(("0", "5", *NUMBERS)))]
            fields += [
                (f"x-{draw.random()}", "v" * draw.choice((*(0, 10) * 20, 5000))) for _ in range(draw.choice((0, 1, 4)))
            ]
            payload = encoder.encode(fields, huffman=draw.random() < 0.5)
        elif kind in {1, 9}:
            payload = draw.choice(
                (b"", b"\xff" * 400, b"\x3f" + b"\xff" * 9 + b"\x01", b"\x80", b"\x40\x7f\xff\xff\x7f")
            )
        elif kind == 0:
            payload = b"".join(grpc_message(draw) for _ in range(draw.choice((0, 1, 3))))
        elif kind == 4:
            many = draw.choice((*(0, 1, 3) * 9, 500))
            values = (0, 1, 16384, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
            pairs = ((draw.randrange(8), draw.choice(values)) for _ in range(many))
            payload = b"".join(struct.pack(">HI", *pair) for pair in pairs)
        else:
            payload = draw.randbytes(draw.choice((0, 4, 4, 8, 8, 9, 50)))
        frame = bytearray(http2.frame(kind, flags, stream & 0xFFFFFFFF, payload))
        if draw.random() < 0.03:
            frame[:3] = draw.choice((b"\xff\xff\xff", b"\0\0\0", b"\0\x40\x01"))
        out += frame
    return bytes(out)


def grpc_message(draw: random.Random) -> bytes:
    data = infer_response(draw)
    size = draw.choice((0, 2**32 - 1, 2**24 + 1, len(data) + 3)) if draw.random() < 0.05 else len(data)
    return struct.pack(">BI", draw.random() < 0.02, size) + data


def infer_response(draw: random.Random) -> bytes:
    """A message of ModelStreamInfer, possibly with a lie."""
    message = service_pb2.ModelStreamInferResponse(error_message=draw.choice(("", "", "", "boom", "é" * 500)))
    response = message.infer_response
    for name in ("text_output", "num_output_tokens", "other")[draw.randrange(3) :: draw.choice((1, 1, 2))]:
        tensor = response.outputs.add(name=name, datatype="BYTES", shape=[draw.choice((1, -1, 2**62))])
        if draw.random() < 0.2:
            tensor.contents.int_contents.extend([draw.choice((1, -1, 2**31 - 1))] * draw.choice((0, 1, 3)))
            tensor.contents.bytes_contents.extend([draw.randbytes(3)] * draw.choice((0, 1)))
        else:
            size = struct.pack("<I", draw.choice((2, 0, 2**32 - 1)))
            response.raw_output_contents.append(draw.choice((b"", b"\x01", size + b"ab", size)))
    response.parameters["triton_final_response"].bool_param = draw.random() < 0.3
    data: bytes = message.SerializeToString()
    return data


def read_frames(parts: Sequence[bytes]) -> int:
    kept = 0
    messages = http2.Messages()

    def on(_now_ns: int, kind: http2.Kind, _stream: int, value: http2.Headers | bytes | int, _ended: bool) -> None:
        nonlocal kept
        if isinstance(value, bytes):
            for received in messages.feed(value):
                kept += len(received)
                read_response([received])
        elif kind == "headers" and not isinstance(value, int):
            http2._status(dict(value))  # noqa: SLF001

    sent = bytearray()
    connection = http2.Http2(sent.extend, on)
    connection.start()
    connection.headers(1, ((":path", "/x"),))
    connection.data(1, b"x" * 1000)
    for part in parts:
        connection.feed(0, part)
    return max(kept, len(sent) - 2000)


def read_response(parts: Sequence[bytes]) -> int:
    try:
        message = service_pb2.ModelStreamInferResponse.FromString(b"".join(parts))
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    response = message.infer_response
    token_count(response, "num_output_tokens")
    return len(text_output(response)) // 3  # U+FFFD for an invalid byte


def json_text(draw: random.Random, value: object) -> str:
    """JSON, possibly with a lie in one place."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    made = json.loads(json.dumps(value))
    walk(made)
    marks: dict[str, str] = {}
    for _ in range(draw.choice((0, 1, 1, 2))):
        node, key = draw.choice(places)
        if draw.random() < 0.2 and isinstance(node, dict):
            node.pop(key, None)
        else:
            marks[mark := f"@{len(marks)}@"] = draw.choice(JSON)
            node[key] = mark
    text = json.dumps(made)
    for mark, lie in marks.items():
        text = text.replace(f'"{mark}"', lie)
    return text


CHAT: Final = {
    "choices": [
        {
            "index": 0,
            "delta": {
                "role": "assistant",
                "content": "text",
                "reasoning_content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
            "text": "text",
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    "text_output": "text",
    "num_output_tokens": 1,
}
CONFIG: Final = {
    "name": "ensemble",
    "platform": "ensemble",
    "max_batch_size": 8,
    "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": ["-1"], "optional": False}],
    "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": ["-1"]}],
    "model_transaction_policy": {"decoupled": True},
    "parameters": {"accumulate_tokens": {"string_value": "true"}},
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
    "version_policy": {"latest": {"num_versions": 1}},
}


def event_stream(draw: random.Random) -> bytes:
    """Server-sent events, as generate_stream and OpenAI's endpoints send them."""
    out = []
    for _ in range(draw.choice((*(0, 1, 3) * 20, 30))):
        end = draw.choice(("\n", "\n", "\r\n", "\r"))
        text = draw.choice((json_text(draw, CHAT), "[DONE]", '{"error": {"message": 5}}', '{"error": [[]]}', ""))
        prefix = draw.choice(
            ("data: ", "data: ", "data:", "data", ": comment", "id: 1" + end + "data: ", "\ufeffdata: ")
        )
        out.append(prefix + text.replace("\n", f"{end}data: ") + end * draw.choice((1, 2, 2, 2, 3)))
    return "".join(out).encode("latin-1", "replace")


def read_events(endpoint: Literal["chat", "completions"]) -> Callable[[Sequence[bytes]], int]:
    def read(parts: Sequence[bytes]) -> int:
        client = openai.OpenAiClient("http://x:1", "m", endpoint, stream=True, timeout_s=1)
        session, answer, events = client.session(), Answer(), ServerSentEvents()
        for part in parts:
            for event in events.feed(part):
                session._parse(0, event.data, answer, failed=event.failed)  # type: ignore[attr-defined]  # noqa: SLF001
        # As the event file does it.
        record = json.dumps([answer.text, answer.events, answer.finish_reason, answer.error], ensure_ascii=False)
        return len(answer.text.encode()) // 3 + 0 * len(record.encode())

    return read


def configuration(draw: random.Random) -> bytes:
    """A model's configuration."""
    return json_text(draw, CONFIG).encode("latin-1")


def read_configuration(parts: Sequence[bytes]) -> int:
    ServedModel.of(config_of(b"".join(parts)))
    return 0


def binary_configuration(draw: random.Random) -> bytes:
    """The same over gRPC, with numbers for types that do not exist."""
    config = model_config_pb2.ModelConfig(name="m", max_batch_size=draw.choice((0, -1, 2**31 - 1)))
    tensor = config.input.add(name="x")
    tensor.data_type = draw.choice((0, 13, 999, -1))
    data: bytes = config.SerializeToString()
    return data


def read_binary_configuration(parts: Sequence[bytes]) -> int:
    try:
        config = model_config_pb2.ModelConfig.FromString(b"".join(parts))
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    ServedModel.of(config)
    return 0


def metrics(draw: random.Random) -> bytes:
    """A page of Triton's metrics."""
    names = (*counters.TRITON, "nv_trt_llm_kv_cache_block_metrics", "other")
    lines = [
        f'{draw.choice(names)}{draw.choice(("{", ""))}model="{draw.choice(("a", "b" * 50))}",version="1"'
        f"{draw.choice(('}', '}', '}}', ''))} {draw.choice(NUMBERS)}"
        for _ in range(draw.choice((0, 1, 20)))
    ]
    return draw.choice(("\n", "\r\n")).join(lines).encode()


def read_metrics(parts: Sequence[bytes]) -> int:
    kept = counters.parse(b"".join(parts).decode(errors="replace"))
    json.dumps(counters.growth({}, kept), allow_nan=False)
    return 0


PARSERS: Final[dict[str, tuple[Callable[[random.Random], bytes], Callable[[Sequence[bytes]], int]]]] = {
    "http": (http_answer, read_http),
    "http2": (frames, read_frames),
    "grpc": (infer_response, read_response),
    "chat": (event_stream, read_events("chat")),
    "completions": (event_stream, read_events("completions")),
    "config": (configuration, read_configuration),
    "grpc_config": (binary_configuration, read_binary_configuration),
    "metrics": (metrics, read_metrics),
}
"""Generator and reader of each input. The reader returns the number of bytes that it kept."""


def made(parser: str, seed: int, number: int) -> list[bytes]:
    """Input `number` of a seed, cut into the reads it comes in."""
    draw = random.Random(f"{parser} {seed} {number}")
    data = bytearray(PARSERS[parser][0](draw))
    if draw.random() < 0.5:
        for _ in range(draw.choice((1, 1, 2, 10))):
            _change(draw, data)
    if draw.random() < 0.002 and data:
        at = draw.randrange(len(data))
        data[at:at] = bytes(data[at : at + draw.choice((1, 1, 20, 200))]) * (LONG // 200)
    cuts = draw.choice((0, 0, 1, 3, len(data) if len(data) < 3000 else 3))
    edges = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(cuts))})
    return [bytes(data[start:stop]) for start, stop in pairwise(edges)]


def _change(draw: random.Random, data: bytearray) -> None:
    at = draw.randrange(len(data) + 1)
    to = min(len(data), at + draw.choice((1, 1, 4, 100)))
    how = draw.randrange(5)
    if how == 0:
        del data[at:to]
    elif how == 1:
        data[at:at] = data[at:to]
    elif how == 2:
        data[at:to] = draw.randbytes(to - at)
    elif how == 3:
        data[at:at] = draw.choice((b"\r\n", b"\n", b"\0", b"-", b"[", b"{", b'"', b"\xff" * 4, b"data:", b":"))
    else:
        del data[at:]


class TooSlowError(Exception):
    """An input took more than CPU_S."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise TooSlowError in what runs longer than CPU_S of processor time, whatever else the machine does."""

    def late(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def fault(parser: str, parts: Sequence[bytes]) -> str | None:
    """The parser's fault on `parts`, None without one."""
    try:
        with limited():
            kept = PARSERS[parser][1](parts)
    except ProtocolError:
        return None
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        return traceback.format_exc()
    size = sum(map(len, parts))
    return f"{kept} bytes kept of {size}" if kept > size else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each parser (default 1000000)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each parser at most (default 600)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input (default 0)")
    parser.add_argument("--only", nargs="+", choices=tuple(PARSERS), default=tuple(PARSERS))
    parser.add_argument("--format", choices=("table", "json"), default="table")
    args = parser.parse_args()
    rows = []
    for name in args.only:
        start, faults, number, size, slowest_s = time.monotonic(), 0, args.first, 0, 0.0
        while number < args.first + args.inputs and time.monotonic() - start < args.seconds:
            parts = made(name, args.seed, number)
            before_s = time.process_time()
            fault_text = fault(name, parts)
            slowest_s = max(slowest_s, time.process_time() - before_s)
            if fault_text:
                faults += 1
                print(f"{name} --seed {args.seed} --first {number}: {fault_text}", file=sys.stderr)
            size += sum(map(len, parts))
            number += 1
        row = {
            "parser": name,
            "inputs": number - args.first,
            "bytes": size,
            "faults": faults,
            "slowest_ms": slowest_s * 1e3,
        }
        rows.append(row)
        if args.format == "table":
            summary = f"{size / 1e6:9.1f} MB {faults:6} faults, slowest {slowest_s * 1e3:7.1f} ms of processor time"
            print(f"{name:12} {number - args.first:9} inputs {summary}", flush=True)
    if args.format == "json":
        print(json.dumps({"schema": 1, "seed": args.seed, "parsers": rows}, indent=2))
    return 1 if any(row["faults"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
