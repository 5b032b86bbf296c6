"""`pipeline serve gateway`: the OpenAI endpoint in front of running servers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.orchestrate import AUTO, GatewayConfig, GatewayParams, OfferedModel
from trtllm_pipeline.serve import run
from trtllm_pipeline.show.cli import options, stage_options
from trtllm_pipeline.show.cli.output import emit, note
from trtllm_pipeline.tensorrt import to_json

_HOST = "127.0.0.1"
_of = options.option


def _command(
    models: Annotated[
        list[str] | None,
        options.argument(
            "NAME=SERVER...",
            "What clients ask for, and its server: a service.json, grpc://HOST:PORT, http://HOST:PORT/v1.",
        ),
    ] = None,
    config: Annotated[
        str | None, _of("--config", "FILE", "Everything from this file; other options win over it.")
    ] = None,
    model_folder: Annotated[
        list[str] | None,
        _of(
            "--model-folder",
            "NAME=DIR",
            "Tokenizer, chat template and defaults of a model: an engine or model directory.",
        ),
    ] = None,
    server_model: Annotated[
        list[str] | None,
        _of("--server-model", "NAME=MODEL", "Name of the model on its server (default: what the server says)."),
    ] = None,
    dialect: Annotated[
        list[str] | None,
        _of("--dialect", "NAME=FAMILY", "How a model writes tool calls and reasoning (default: auto)."),
    ] = None,
    max_seq_len: Annotated[
        list[str] | None,
        _of("--max-seq-len", "NAME=N", "Tokens of prompt and answer together (default: the directory's)."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        _of(
            "--adapter",
            "NAME:ADAPTER=DIR",
            "A LoRA adapter that the model's server takes; clients ask for NAME:ADAPTER.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        _of("--host", "ADDRESS", "Address to listen on; anything but loopback lets others in (default: 127.0.0.1)."),
    ] = None,
    port: Annotated[
        int | None, _of("--port", "PORT", "Port of the OpenAI endpoint (default: a free one).", min=0, max=65535)
    ] = None,
    api_keys: Annotated[
        str | None, _of("--api-keys", "FILE", "A key on each line; requests need one of them (default: none needed).")
    ] = None,
    format: options.TextOrJson = "text",
    **typed: Any,
) -> None:
    """Offer running servers as OpenAI endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    It runs until Ctrl-C. A server that is started again is found again. docs/reference/gateway.md says more.

    examples:
      pipeline serve gateway smollm2=service.json --model-folder smollm2=engine --port 9000
      pipeline serve gateway llama=grpc://127.0.0.1:8001 --server-model llama=tensorrt_llm_bls --model-folder llama=model
      pipeline serve gateway llama=service.json --model-folder llama=model --adapter llama:sql=adapters/sql
      pipeline serve gateway --config gateway-config.json
    """
    found, folder = _base(config)
    served = {model.name: model for model in found.models} if found else {}
    served |= {name: _model(name, server) for name, server in _pairs("NAME=SERVER", models).items()}
    changes: Mapping[str, tuple[str, list[str] | None, Callable[[str], Any]]] = {
        "model_folder": ("--model-folder", model_folder, partial(_folder, "--model-folder")),
        "server_model": ("--server-model", server_model, str),
        "dialect": ("--dialect", dialect, str),
        "max_seq_len": ("--max-seq-len", max_seq_len, _whole),
    }
    for field, (flag, given, read) in changes.items():
        for name, value in _pairs(f"{flag} NAME=VALUE", given).items():
            if name not in served:
                raise UsageError(
                    f"{flag} {name}: no such model",
                    hint=f"NAME=SERVER gives it a server; there is {', '.join(served) or 'none'}",
                )
            served[name] = replace(served[name], **{field: read(value)})
    for name, path in _pairs("--adapter NAME:ADAPTER=DIR", adapter).items():
        model, sign, own = name.rpartition(":")
        if not sign or model not in served or not own:
            raise UsageError(
                f"--adapter {name}: expected NAME:ADAPTER=DIR",
                hint=f"NAME is one of {', '.join(served) or 'none'}, ADAPTER what clients add to it",
            )
        known = {**served[model].adapters, own: _folder("--adapter", path)}
        served[model] = replace(served[model], adapters=known)
    if not served:
        raise UsageError(
            "which server?", hint="pipeline serve gateway NAME=service.json; pipeline stage launch starts one"
        )
    defaults = to_json(found.params) if found else {}
    asked = GatewayConfig(
        models=tuple(served.values()),
        host=host or (found.host if found else _HOST),
        port=port if port is not None else found.port if found else 0,
        api_keys_file=Path(api_keys) if api_keys else found.api_keys_file if found else None,
        params=stage_options.read_class(
            GatewayParams, {name: value for name, value in typed.items() if value is not None}, defaults
        ),
    )
    _run(asked, folder, format)


def _run(config: GatewayConfig, folder: Path | None, form: Literal["text", "json"]) -> None:
    def announce(told: Mapping[str, Any]) -> None:
        if form == "json":
            emit(json.dumps(told))
        else:
            emit(str(told["url"]))
            name = told["models"][0]
            body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Who are you?"}]})
            note(
                f"ready: {', '.join(told['models'])}; Ctrl-C stops it. For instance:\n"
                f"  curl -s {told['url']}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
            )

    with tempfile.TemporaryDirectory(prefix="trtllm-pipeline-") as scratch:
        run(config, folder or Path(scratch), announce)


def _base(config: str | None) -> tuple[GatewayConfig | None, Path | None]:
    if config is None:
        return None, None
    path = Path(config)
    return GatewayConfig.read(path), path.absolute().parent


def _pairs(form: str, given: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE texts by name; `form` is how they are typed. Raises UsageError."""
    found: dict[str, str] = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise UsageError(f"{text!r}: expected {form}")
        if name in found:
            raise UsageError(f"{text!r}: {name} is there twice")
        found[name] = value
    return found


def _model(name: str, server: str) -> OfferedModel:
    if "://" in server:
        return OfferedModel(name=name, url=server, dialect=AUTO)
    path = Path(server)
    if not path.is_file():
        raise UsageError(
            f"{name}={server}: there is no such file",
            hint="pipeline stage launch --format json > service.json writes one; grpc://HOST:PORT is a Triton's address",
        )
    return OfferedModel(name=name, service=path.absolute(), dialect=AUTO)


def _folder(option: str, given: str) -> Path:
    found = options.folder(option, Path(given))
    assert found is not None
    return found.absolute()


def _whole(given: str) -> int:
    if not given.isdecimal() or not int(given):
        raise UsageError(f"--max-seq-len {given}: is no positive whole number")
    return int(given)


gateway = stage_options.with_class(_command, GatewayParams)
