"""The launch stages' program for other OpenAI-compatible servers: starts or uses one until told to stop."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from trtllm_pipeline.base import FailureClass, Group, ServerError, StageError, without_secrets, write_json
from trtllm_pipeline.measure import urls
from trtllm_pipeline.tensorrt.others import command
from trtllm_pipeline.tensorrt.others.command import GGUF, KNOWN, MODEL
from trtllm_pipeline.tensorrt.servers.command_lines import Ports
from trtllm_pipeline.tensorrt.servers.pasted import PastedCommand
from trtllm_pipeline.tensorrt.servers.server_process import Server
from trtllm_pipeline.tensorrt.servers.triton_server import reached_at
from trtllm_pipeline.tensorrt.stage import launch
from trtllm_pipeline.tensorrt.stage.base import SERVICE_FILE, StageContext
from trtllm_pipeline.tensorrt.stage.params import LaunchOpenAi, LaunchParams

_GGUF_FILE: Final = "model.gguf"
_LISTS: Final = "/v1/models"
_LOOK_S: Final = 10.0


@dataclass(kw_only=True)
class CommandServer(Server):
    """A server that a command line has started."""

    process: Group
    params: LaunchOpenAi
    has_repository: ClassVar[bool] = False

    def ready_paths(self) -> Sequence[str]:
        """The known ready path, or else its list of models."""
        return (self.params.ready_path or _LISTS,)

    def service(self) -> dict[str, object]:
        """The information for clients. Raises ServerError if it serves no model."""
        address = f"{self.host}:{self.ports.http}"
        try:
            description = _described(self.params, f"http://{address}")
        except ServerError as error:
            error.log = self.log
            raise
        return {**description, "pid": self.process.pid, "http": address}

    def stop(self, timeout_s: float) -> int | None:
        return self.process.stop(timeout_s)


def run(context: StageContext[LaunchOpenAi]) -> None:
    """Serve until told to stop. Raises StageError for an invalid command line, ServerError if the server cannot continue."""
    params = settled(context.params, context.inputs)
    if params.url is not None:
        _attend(context, params)
    else:
        launch.serve(context, _starter(context, params))


def starter(context: StageContext[LaunchOpenAi]) -> launch.Starter:
    """The server of a command line. Raises StageError if there is none to start."""
    params = settled(context.params, context.inputs)
    if params.url is not None:
        raise StageError(
            f"the server at {params.url} is started by its owner", failure=FailureClass.USER, hint="use it as it is"
        )
    return _starter(context, params)


def _starter(context: StageContext[LaunchOpenAi], params: LaunchOpenAi) -> launch.Starter:
    log = context.attempt / launch.LOG_FILE
    variables = {name: str(value) for name, value in params.environment.items()}

    def begin(settings: LaunchParams) -> Server:
        ports, host = launch.ports(settings), reached_at(settings.host)
        words = argv(params, context.inputs, settings.host, ports)
        process = Group(words, env={**without_secrets(os.environ), **variables}, cwd=context.attempt, log=log)
        return CommandServer(
            process=process, ports=ports, output=log, name=Path(words[0]).name, host=host, params=params
        )

    def pasted(host: str, at: Ports) -> PastedCommand:
        return PastedCommand(argv(params, context.inputs, host, at), variables)

    return launch.Starter(begin, pasted)


def settled(params: LaunchOpenAi, inputs: Mapping[str, Path]) -> LaunchOpenAi:
    """Manual parameters in the form of a matrix's. Raises StageError without a server."""
    if params.url is not None and (starts := "--server" if params.server else "--command" if params.command else None):
        raise StageError(
            f"--url names a running server, and {starts} one to start",
            failure=FailureClass.USER,
            hint="use one of them",
        )
    if params.server is not None:
        known = KNOWN[params.server]
        params = replace(
            params,
            command=params.command or shlex.join(command.of_itself(known)),
            ready_path=params.ready_path or known.ready,
            served_name=params.served_name or known.served_name,
            lists_models=known.lists_models,
        )
    if params.url is None and params.command is None:
        raise StageError("no server: use one of --url, --command and --server", failure=FailureClass.USER)
    if params.served_name == f"{{{MODEL}}}":
        params = replace(params, served_name=str(_folders(inputs)[MODEL]))
    return params


def _folders(inputs: Mapping[str, Path]) -> dict[str, str]:
    folders = {MODEL: str(inputs[MODEL])} if MODEL in inputs else {}
    return {**folders, GGUF: str(inputs["checkpoint"] / _GGUF_FILE)} if "checkpoint" in inputs else folders


def argv(params: LaunchOpenAi, inputs: Mapping[str, Path], host: str, ports: Ports) -> list[str]:
    """The command line of a server at an address. Raises StageError for a placeholder without a value."""
    words = [*shlex.split(params.command or ""), *command.options(params.options)]
    known = {**_folders(inputs), "host": host, "port": str(ports.http)}
    if lacking := sorted(command.placeholders(words) - known.keys()):
        raise StageError(
            f"the command line needs a value for {{{lacking[0]}}}",
            failure=FailureClass.USER,
            hint={MODEL: "--model DIR", GGUF: "--checkpoint DIR"}.get(
                lacking[0], "use --command with the value instead of the placeholder"
            ),
        )
    return command.fill(words, known)


def _attend(context: StageContext[LaunchOpenAi], params: LaunchOpenAi) -> None:
    """Report the address of the server at a URL, until told to stop. The server is not changed."""
    assert params.url is not None
    parent = os.getppid()
    with launch.stop_requested() as ended, launch.removed_after(context.attempt / SERVICE_FILE):
        description = _described(params, urls.server_url(params.url))
        write_json(
            context.attempt / SERVICE_FILE, {"schema": 1, "log": None, **description, "pid": None, "started": False}
        )
        print(f"ready: {description['url']}, which was not started by us", flush=True)  # noqa: T201  a stage's stdout is its log
        while not ended.wait(launch.LOOK_EVERY_S) and os.getppid() == parent:
            pass


def _described(params: LaunchOpenAi, url: str) -> dict[str, Any]:
    """The information for clients about a ready server. Raises ServerError if it does not respond, or serves no model."""
    import asyncio  # imported only after the server has started

    from trtllm_pipeline.measure import OpenAiClient, target

    async def look() -> tuple[list[str] | None, str | None]:
        key = target.environment_key() if params.url else None
        client = OpenAiClient(url, "", params.endpoint, stream=True, timeout_s=_LOOK_S, api_key=key)
        return await client.models(), await client.version()

    models, version = asyncio.run(look())
    name = params.served_name or next(iter(models or ()), None)
    if name is None:
        raise ServerError(
            f"{url} does not report which model it serves",
            failure=FailureClass.USER,
            hint="set settings.openai.served_name",
        )
    return {
        "kind": "openai",
        "grpc": "",
        "metrics": None,
        "http": url,
        "url": url,
        "model": name,
        "bls_model": None,
        "endpoint": params.endpoint,
        "lists_models": params.lists_models,
        "server": {"name": params.server or "OpenAI server", "version": version or params.version},
    }
