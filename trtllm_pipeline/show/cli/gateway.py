"""`pipeline serve gateway`: an OpenAI endpoint in front of running servers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.orchestrate import GatewayParams
from trtllm_pipeline.serve import gateway_config, run
from trtllm_pipeline.show.cli import options, stage_options
from trtllm_pipeline.show.cli.output import emit, note
from trtllm_pipeline.tensorrt import command_lines, params

_of = options.option


def _command(
    models: Annotated[
        list[str] | None,
        options.argument(
            "NAME=SERVER...",
            "Model name for clients, and its server: a service.json, grpc://HOST:PORT or http://HOST:PORT/v1.",
        ),
    ] = None,
    config: Annotated[str | None, _of("--config", "FILE", "Configuration file. Options override it.")] = None,
    model_folder: Annotated[
        list[str] | None,
        _of(
            "--model-folder",
            "NAME=DIR",
            "Engine or model directory with the model's tokenizer, chat template and defaults.",
        ),
    ] = None,
    server_model: Annotated[
        list[str] | None,
        _of(
            "--server-model",
            "NAME=MODEL",
            "Name of the model on its server (default: the name that the server reports).",
        ),
    ] = None,
    dialect: Annotated[
        list[str] | None,
        _of("--dialect", "NAME=FAMILY", "Format of the model's tool calls and reasoning (default: auto)."),
    ] = None,
    max_seq_len: Annotated[
        list[str] | None,
        _of(
            "--max-seq-len",
            "NAME=N",
            "Maximum number of prompt and output tokens together (default: from the directory).",
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        _of("--adapter", "NAME:ADAPTER=DIR", "LoRA adapter for the model's server. Clients request NAME:ADAPTER."),
    ] = None,
    host: Annotated[
        str | None,
        _of(
            "--host",
            "ADDRESS",
            "Address to listen on. Other machines can connect unless it is a loopback address (default: 127.0.0.1).",
        ),
    ] = None,
    port: options.GatewayPort = None,
    api_keys: options.ApiKeys = None,
    format: options.TextOrJson = "text",
    **typed: Any,
) -> None:
    """Serve OpenAI endpoints for running servers: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics.

    Runs until Ctrl-C, and reconnects to restarted servers. See docs/reference/gateway.md.

    examples:
      pipeline serve gateway smollm2=service.json --model-folder smollm2=engine --port 9000
      pipeline serve gateway llama=grpc://127.0.0.1:8001 --server-model llama=tensorrt_llm_bls --model-folder llama=model
      pipeline serve gateway llama=service.json --model-folder llama=model --adapter llama:sql=adapters/sql
      pipeline serve gateway --config gateway-config.json
    """
    base = None if config is None else gateway_config.GatewayConfig.read(Path(config))
    served = {model.name: model for model in base.models} if base else {}
    served |= {name: _model(name, server) for name, server in options.pairs("NAME=SERVER", models).items()}
    changes: Mapping[str, tuple[str, list[str] | None, Callable[[str], Any]]] = {
        "model_folder": ("--model-folder", model_folder, partial(_folder, "--model-folder")),
        "server_model": ("--server-model", server_model, str),
        "dialect": ("--dialect", dialect, str),
        "max_seq_len": ("--max-seq-len", max_seq_len, _whole),
    }
    for field, (flag, given, read) in changes.items():
        for name, value in options.pairs(f"{flag} NAME=VALUE", given).items():
            if name not in served:
                raise UsageError(
                    f"{flag} {name}: unknown model",
                    hint=f"add NAME=SERVER for it; models: {', '.join(served) or 'none'}",
                )
            served[name] = replace(served[name], **{field: read(value)})
    for name, path in options.pairs("--adapter NAME:ADAPTER=DIR", adapter).items():
        model, sign, own = name.rpartition(":")
        if not sign or model not in served or not own:
            raise UsageError(
                f"--adapter {name}: expected NAME:ADAPTER=DIR",
                hint=f"NAME is a model ({', '.join(served) or 'none'}), ADAPTER the name that clients append",
            )
        known = {**served[model].adapters, own: _folder("--adapter", path)}
        served[model] = replace(served[model], adapters=known)
    if not served:
        raise UsageError(
            "no server given",
            hint="pipeline serve gateway NAME=service.json; start a server with pipeline stage launch",
        )
    defaults = params.to_json(base.params) if base else {}
    gateway = gateway_config.GatewayConfig(
        models=tuple(served.values()),
        host=host or (base.host if base else command_lines.LOOPBACK),
        port=port if port is not None else base.port if base else 0,
        api_keys_file=Path(api_keys) if api_keys else base.api_keys_file if base else None,
        params=stage_options.read_class(
            GatewayParams, {name: value for name, value in typed.items() if value is not None}, defaults
        ),
    )
    _run(gateway, None if config is None else Path(config).absolute().parent, format)


def _run(config: gateway_config.GatewayConfig, folder: Path | None, form: Literal["text", "json"]) -> None:
    def announce(endpoints: Mapping[str, Any]) -> None:
        if form == "json":
            emit(json.dumps(endpoints))
        else:
            emit(str(endpoints["url"]))
            name = endpoints["models"][0]
            body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Who are you?"}]})
            note(
                f"ready: {', '.join(endpoints['models'])}; stop with Ctrl-C. Example:\n"
                f"  curl -s {endpoints['url']}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
            )

    with tempfile.TemporaryDirectory(prefix="trtllm-pipeline-") as scratch:
        run(config, folder or Path(scratch), announce)


def _model(name: str, server: str) -> gateway_config.OfferedModel:
    if "://" in server:
        return gateway_config.OfferedModel(name=name, url=server, dialect=gateway_config.AUTO)
    path = Path(server)
    if not path.is_file():
        raise UsageError(
            f"{name}={server}: no such file",
            hint="create it with pipeline stage launch --format json > service.json, or give a Triton address: grpc://HOST:PORT",
        )
    return gateway_config.OfferedModel(name=name, service=path.absolute(), dialect=gateway_config.AUTO)


def _folder(option: str, given: str) -> Path:
    folder = options.folder(option, Path(given))
    assert folder is not None
    return folder.absolute()


def _whole(given: str) -> int:
    if not given.isdecimal() or not int(given):
        raise UsageError(f"--max-seq-len {given}: expected a positive whole number")
    return int(given)


gateway = stage_options.with_class(_command, GatewayParams)
