"""Recognition of servers, with local servers that respond like Triton and OpenAI-compatible ones."""

from __future__ import annotations

import asyncio

import pytest

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.measure.client import recognise
from trtllm_pipeline.measure.load.target import Target

TRITON = b'{"name": "triton", "version": "2.51.0", "extensions": ["classification"]}'
SETTINGS = b"\0\0\6\4\0\0\0\0\0\0\4\0\x3f\xff\xff"


async def serving(pages: dict[bytes, bytes] | bytes, act: object) -> object:
    """Call `act` with the address of a server that has `pages`, or always responds with the same bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if isinstance(pages, bytes):
            writer.write(pages)
        else:
            body = pages.get(request.split()[1])
            status = b"404 Not Found" if body is None else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body or b""), body or b""))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        return await act(f"{host}:{port}")  # type: ignore[operator]


def refused(pages: dict[bytes, bytes] | bytes, protocol: str) -> ServerError:
    """The error of a client that enters a server with `pages`."""

    async def ask(address: str) -> ServerError:
        with pytest.raises(ServerError) as caught:
            async with Target.at(address, protocol, "m", max_tokens=1, timeout_s=60).client():
                pass
        return caught.value

    error = asyncio.run(serving(pages, ask))
    assert isinstance(error, ServerError)
    return error


@pytest.mark.parametrize(
    ("pages", "kind"),
    [
        ({b"/v2": TRITON}, "http"),
        ({b"/v1/models": b'{"object": "list", "data": [{"id": "m"}]}'}, "openai"),
        ({b"/metrics": b'nv_inference_count{model="m"} 1\n'}, "metrics"),
        (SETTINGS, "grpc"),
        ({}, None),
        ({b"/v2": b"no JSON", b"/v1/models": b'{"data": 1}'}, None),
        (b"SSH-2.0-OpenSSH_9.6\r\n", None),
        (b"", None),
    ],
)
def test_what_a_server_is(pages: dict[bytes, bytes] | bytes, kind: str | None) -> None:
    assert asyncio.run(serving(pages, recognise.kind_of)) == kind


@pytest.mark.parametrize(
    ("pages", "asked", "told", "hint"),
    [
        ({b"/v2": TRITON}, "grpc", "this is Triton's HTTP port", "use 8001 or --protocol http"),
        ({b"/v2": TRITON}, "openai", "this is Triton's HTTP port", "--protocol http"),
        (SETTINGS, "http", "this is Triton's gRPC port", "use 8000 or --protocol grpc"),
        (SETTINGS, "openai", "this is Triton's gRPC port", "--protocol grpc"),
        ({b"/v1/models": b'{"data": []}'}, "grpc", "this is an OpenAI-compatible server", "--protocol openai"),
        ({b"/v1/models": b'{"data": []}'}, "http", "this is an OpenAI-compatible server", "--protocol openai"),
        ({b"/metrics": b"nv_inference_count 1"}, "http", "this is Triton's metrics port", "use 8000"),
    ],
)
def test_the_wrong_protocol_is_told_with_the_right_one(
    pages: dict[bytes, bytes] | bytes, asked: str, told: str, hint: str
) -> None:
    error = refused(pages, asked)
    assert told in error.message
    assert (error.hint, error.failure) == (hint, FailureClass.USER)


def test_a_server_of_http_that_is_not_known_is_told_from_grpc() -> None:
    error = refused({}, "grpc")
    assert error.message.endswith("the port speaks HTTP/1.1, not gRPC")
    assert error.hint == "give the gRPC port or --protocol http"


def test_a_server_that_is_what_was_asked_keeps_its_own_error() -> None:
    assert "HTTP status 404" in refused({b"/v2": TRITON}, "http").message
