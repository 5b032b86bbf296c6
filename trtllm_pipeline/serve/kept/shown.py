"""Presents managed servers: the table of `ps`, the text and the JSON of `status`."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO

from trtllm_pipeline.base import Json, duration, shorten, terminal, text_tables
from trtllm_pipeline.orchestrate import LOG
from trtllm_pipeline.serve.kept.servers import GATEWAY_LOG, KeptServer, api_keys_file
from trtllm_pipeline.tensorrt import launch

LOGS = {"server": launch.LOG_FILE, "keeper": LOG, "gateway": GATEWAY_LOG}
"""The logs of a managed server, by program."""
_EVERY_S: Final = 1.0
_SERVES = "serves"
_LEAST_WIDTH = 16
_GPU_CHARACTERS = 12
"""Characters of a GPU's UUID that nvidia-smi accepts: GPU-5a1b2c3d."""


def to_json(servers: Sequence[KeptServer]) -> dict[str, Any]:
    """All servers, see docs/reference/formats.md."""
    return {"schema": 1, "servers": [entry(server) for server in servers]}


def entry(server: KeptServer) -> dict[str, Json]:
    record, endpoint = server.record, server.endpoint()
    logs: dict[str, Json] = {
        part: str(server.folder / name) for part, name in LOGS.items() if (server.folder / name).exists()
    }
    fields: dict[str, Json] = {
        "name": server.name,
        "state": server.state.value,
        "reason": server.reason,
        "hint": None if record is None else record.hint,
        "folder": str(server.folder),
        "keeper_pid": None if server.keeper is None else server.keeper.pid,
        "endpoints": None,
        "logs": logs,
    }
    if endpoint is not None:
        service = endpoint.service
        triton = service.kind == "triton"
        fields["endpoints"] = {
            "openai": endpoint.openai,
            "model": endpoint.model,
            "http": service.http if triton else None,
            "grpc": service.grpc if triton else None,
            "metrics": list(endpoint.metrics),
            "server_model": service.model if triton else None,
            "server_pid": service.pid,
        }
    if record is not None:
        fields |= {
            "cell": record.cell,
            "served_folder": record.served_folder,
            "toolchain": record.toolchain,
            "fingerprints": dict(record.fingerprints),
            "model_folder": record.model_folder,
            "gpus": list(record.gpus) if server.state.alive else [],
            "ports": dict(record.ports),
            "restart": record.restart,
            "restarts": record.restarts,
            "started_s": round(record.started_s, 3),
            "since_s": round(record.since_s, 3),
            "command": list(record.command),
        }
    return fields


def to_table(servers: Sequence[KeptServer], width: int | None = None) -> str:
    """One line per server, in at most `width` characters: what they serve is shortened."""
    if not servers:
        return "this workspace has no managed servers"
    rows = [_row(server) for server in servers]
    if width is not None:
        others = text_tables.plain_table([{**row, _SERVES: ""} for row in rows]).splitlines()
        left = max(_LEAST_WIDTH, width - max(map(len, others)) + len(_SERVES))
        rows = [{**row, _SERVES: shorten(str(row[_SERVES]), left)} for row in rows]
    return text_tables.plain_table(rows)


def _row(server: KeptServer) -> dict[str, object]:
    record = server.record
    if record is None:
        return {"name": server.name, "state": server.state.value, **_NOTHING, _SERVES: server.reason}
    ports = record.ports if server.state.alive else {}
    gpus = record.gpus if server.state.alive else ()
    return {
        "name": server.name,
        "state": server.state.value,
        "for": duration(max(0.0, time.time() - record.since_s)),
        "restarts": record.restarts,
        "openai": ports.get("openai", "-"),
        "http": ports.get("http", "-"),
        "grpc": ports.get("grpc", "-"),
        "GPUs": ",".join(gpu[:_GPU_CHARACTERS] for gpu in gpus) or "-",
        "pid": "-" if server.keeper is None else server.keeper.pid,
        _SERVES: record.cell or record.served_folder,
    }


_NOTHING = {"for": "-", "restarts": "-", "openai": "-", "http": "-", "grpc": "-", "GPUs": "-", "pid": "-"}


def watch(look: Callable[[], Sequence[KeptServer]], stream: TextIO) -> None:
    """Show the servers on a terminal, once a second, until Ctrl-C; then print them once more."""
    from rich.text import Text

    with suppress(KeyboardInterrupt), terminal.screen(stream) as screen:
        while True:
            table = to_table(look(), os.get_terminal_size(stream.fileno()).columns)
            screen.update(Text(table, no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(_EVERY_S)
    stream.write(f"{to_table(look())}\n")


def to_text(servers: Sequence[KeptServer]) -> str:
    """Details of all servers, one paragraph each."""
    return "\n\n".join(_paragraph(server) for server in servers) or to_table(servers)


def _paragraph(server: KeptServer) -> str:
    record, endpoint = server.record, server.endpoint()
    lines = {"name": server.name, "state": server.state.value + (f": {server.reason}" if server.reason else "")}
    if record is not None:
        lines["serves"] = record.cell or record.served_folder or ""
        lines["since"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since_s))
        if server.state.alive and record.gpus:
            lines["GPUs"] = ", ".join(record.gpus)
        if record.restarts:
            lines["restarts"] = str(record.restarts)
    if endpoint is not None:
        lines |= endpoints(server)
    if server.keeper is not None:
        lines["keeper"] = f"process {server.keeper.pid}"
    lines["folder"] = str(server.folder)
    return text_tables.aligned(lines)


def endpoints(server: KeptServer) -> dict[str, str]:
    endpoint = server.endpoint()
    if endpoint is None:
        return {}
    service = endpoint.service
    urls = {} if endpoint.openai is None else {"openai": endpoint.openai, "model": ", ".join(endpoint.models)}
    if service.kind == "triton":
        urls |= {"http": service.http, "grpc": service.grpc}
    return urls | ({"metrics": ", ".join(endpoint.metrics)} if endpoint.metrics else {})


def example(server: KeptServer) -> str:
    endpoint = server.endpoint()
    assert endpoint is not None
    if endpoint.openai is not None:
        body: dict[str, Any] = {"model": endpoint.model, "prompt": "The capital of France is", "max_tokens": 8}
        key = "-H 'Authorization: Bearer KEY' " if api_keys_file(server.folder) else ""
        return (
            f"curl -s {endpoint.openai}/completions {key}-H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))}"
        )
    service = endpoint.service
    body = {"text_input": "The capital of France is", "max_tokens": 8, "bad_words": "", "stop_words": ""}
    return f"curl -s http://{service.http}/v2/models/{service.model}/generate -d {shlex.quote(json.dumps(body))}"


def log_of(server: KeptServer, part: str) -> Path:
    return server.folder / LOGS[part]
