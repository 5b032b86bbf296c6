"""Runs a gateway: listens, writes its address to gateway.json, and shuts down gracefully."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trtllm_pipeline.base import UsageError, allow_open_files, write_json
from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.gateway_config import GATEWAY_FILE, SCHEMA, GatewayConfig
from trtllm_pipeline.serve.gateway.http_protocol import GatewayProtocol
from trtllm_pipeline.serve.gateway.openai_app import GatewayApp
from trtllm_pipeline.tensorrt import command_lines

_BACKLOG: Final = 2048
_LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
_PORT: Final = re.compile(r":\d+$")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@*?#]+")
Announce = Callable[[Mapping[str, Any]], None]


class _Server(uvicorn.Server):
    """uvicorn that announces its address, and lets active responses finish before it ends."""

    def __init__(self, config: uvicorn.Config, gateway: GatewayApp, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Python collects garbage after 700 new objects, which is ten requests, and sometimes visits all modules: a
        # tenth of a request's time, and tens of milliseconds for every stream.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if not self.force_exit:
            await self._gateway.drain(self._gateway.params.stop_timeout_s)
        await super().shutdown(sockets)


def run(config: GatewayConfig, folder: Path, announce: Announce) -> None:
    """Serve until SIGTERM or SIGINT. gateway.json is in `folder` while it listens, and `announce` gets its content.

    Raises PipelineError for unreadable files and for an address that it cannot listen on.
    """
    allow_open_files()
    gateway = GatewayApp(config)
    listener = _listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    record = {
        "schema": SCHEMA,
        "url": f"http://{shown}:{port}",
        "pid": os.getpid(),
        "models": list(gateway.served),
        "api_keys": gateway.keys is not None,
    }
    path = folder / GATEWAY_FILE

    def listening() -> None:
        write_json(path, record)
        announce(record)

    if warning := command_lines.reachable(config.host):
        print(f"warning: {warning}", file=sys.stderr, flush=True)  # noqa: T201
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a disconnected client
    server = _Server(
        uvicorn.Config(
            _for_trusted_hosts(_for_browsers(gateway, config), config),
            http=GatewayProtocol,
            limit_concurrency=config.params.max_connections + 1,  # uvicorn refuses at the limit, not above it
            # uvloop misses a reset connection if a socket is watched by add_reader (1 in 100), and is not faster here:
            # most of an event's cost is the system call that sends it.
            loop="asyncio",
            ws="none",
            lifespan="on",
            backlog=_BACKLOG,
            access_log=False,
            log_level="error",  # a log line for each malformed request would fill disks
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=config.params.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=2,
        ),
        gateway,
        listening,
    )
    # uvicorn raises the handled signals again.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run([listener])
    finally:
        path.unlink(missing_ok=True)
        listener.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _for_browsers(gateway: ASGIApp, config: GatewayConfig) -> ASGIApp:
    """The gateway, with CORS responses for browsers if pages of other origins may use it.

    Cookies are not allowed: the gateway has none, and keys are sent in a header. Raises UsageError for an invalid
    origin.
    """
    origins = config.params.cors_origin
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors-origin {origin}: expected SCHEME://HOST[:PORT] or *")
    if not origins:
        return gateway
    return CORSMiddleware(
        gateway, origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["Retry-After"]
    )


def _for_trusted_hosts(gateway: ASGIApp, config: GatewayConfig) -> ASGIApp:
    """The gateway, with a check of the Host header if it listens on loopback without keys.

    A web page can make a browser resolve the page's own name to 127.0.0.1 (DNS rebinding) and would then read the
    responses. The browser still sends that name. Raises UsageError for an invalid pattern.
    """
    if config.api_keys_file is not None or command_lines.reachable(config.host) is not None:
        return gateway
    own = f"[{config.host}]" if ":" in config.host else config.host
    names = [*_LOOPBACK, own, *(_PORT.sub("", name).lower() for name in config.params.allowed_hosts)]
    for name in names:
        if name != "*" and "*" in name.removeprefix("*."):
            raise UsageError(f"--allowed-hosts {name}: expected a host name, *.DOMAIN or *")

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await gateway(scope, receive, send)
        host = _PORT.sub("", Headers(scope=scope).get("host", "")).lower()
        if any(name == host or (name.startswith("*") and host.endswith(name[1:])) for name in names):
            return await gateway(scope, receive, send)
        words = f"the header Host is {host[:200]!r}, which is not a name of this gateway: --allowed-hosts adds names"
        error = ApiError(400, words, code="invalid_host")
        return await Response(error.body, error.status, media_type="application/json")(scope, receive, send)

    return checked


def _listen(host: str, port: int) -> socket.socket:
    """A socket on a free port. Raises UsageError."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, OverflowError, UnicodeError) as error:  # the last one is for an invalid name
        reason = getattr(error, "strerror", None) or error
        of_host = (
            isinstance(error, socket.gaierror | UnicodeError) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        )
        hint = (
            "--host 127.0.0.1, or another address of this machine"
            if of_host
            else "choose another --port, or 0 for a free one"
        )
        raise UsageError(f"cannot listen on {host} port {port}: {reason}", hint=hint) from error
