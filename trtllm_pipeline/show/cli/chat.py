"""`pipeline chat`: a conversation in the terminal, with a managed server, a cell or any OpenAI-compatible server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trtllm_pipeline.base import PipelineError, ServerError, UsageError, terminal
from trtllm_pipeline.measure import conversation
from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.serve import read_keys, servers
from trtllm_pipeline.show.cli import completion, options
from trtllm_pipeline.show.cli.output import explain_error, note

_ADDRESS: Final = re.compile(r"https?://|[\w.-]+:[0-9]+(/|$)")
_KEY: Final = "OPENAI_API_KEY"
_PROMPT: Final = "> "
_MORE: Final = ". "
_BLOCK: Final = '"""'
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_COMMANDS: Final = {
    "/reset": "clear the conversation",
    "/system TEXT": "set the system prompt and clear the conversation; without TEXT, show it",
    "/exit": "end the chat (also Ctrl-D)",
    _BLOCK: "start and end a message of several lines",
}


def chat(
    ctx: typer.Context,
    what: Annotated[
        str | None,
        options.argument(
            "SERVER",
            "Name of a managed server, URL of an OpenAI-compatible server, or a cell, which is served during the chat "
            "(default: the only managed server).",
            complete=completion.servers_and_cells,
        ),
    ] = None,
    model: Annotated[
        str | None, options.option("--model", "NAME", "Model name (default: the server's only model).")
    ] = None,
    lora: Annotated[str | None, options.option("--lora", "NAME", "LoRA adapter of the model (default: none).")] = None,
    system: Annotated[str | None, options.option("--system", "TEXT", "System prompt.")] = None,
    temperature: Annotated[
        float | None,
        options.option(
            "--temperature", "NUMBER", "Sampling temperature; 0 is greedy (default: the server's).", min=0, max=2
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        options.option("--max-tokens", "N", "Maximum number of output tokens (default: as many as fit).", min=1),
    ] = None,
    workspace: options.Workspace = options.WORKSPACE,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
) -> None:
    """Chat with a model in the terminal.

    Ctrl-C stops a response, Ctrl-D ends the chat, /help shows the commands. From a pipe, each line is one message.
    A managed server that requires a key gets one from its own key file. Other servers get OPENAI_API_KEY.

    examples:
      pipeline chat
      pipeline chat demo
      pipeline chat qwen2-7b/fp8 --lora sql
      pipeline chat http://127.0.0.1:8000/v1 --model llama --system 'Be brief.'
      echo 'What is the capital of France?' | pipeline chat demo
    """
    given = {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {name: value for name, value in given.items() if value is not None}
    policy = provenance.policy(trusted_keys, required=require_signed)
    with _server(ctx, what, workspace, policy) as (url, key):
        talk = conversation.Conversation(
            url, _chosen(conversation.models(url, key), url, model, lora), api_key=key, options=sampling
        )
        talk.system = system
        _Terminal(talk).run()


@contextmanager
def _server(
    ctx: typer.Context, what: str | None, workspace: str, policy: provenance.Policy
) -> Iterator[tuple[str, str | None]]:
    """The server's URL and API key. Raises UsageError, PlanError, StageError."""
    if what is not None and _ADDRESS.match(what):
        yield what, os.environ.get(_KEY)
        return
    known = {server.name: server for server in servers.find(Path(workspace))}
    if what is None:
        what = _only(known, workspace)
    if what in known:
        yield _url(known[what]), _key(known[what])
        return
    with _started(ctx, what, workspace, policy, list(known.values())) as server:
        yield _url(server), _key(server)


def _key(server: servers.KeptServer) -> str | None:
    """A key that a managed server accepts, from its key file if this user may read it."""
    file = servers.api_keys_file(server.folder)
    keys: list[str] = []
    with suppress(PipelineError, OSError):
        # Otherwise another user's server could name a file of this user as its key file and receive its content.
        if file is not None and file.stat().st_uid == (server.folder / servers.GATEWAY_CONFIG).stat().st_uid:
            keys = read_keys(file)
    return keys[0] if keys else os.environ.get(_KEY)


@contextmanager
def _started(
    ctx: typer.Context, what: str, workspace: str, policy: provenance.Policy, known: Sequence[servers.KeptServer]
) -> Iterator[servers.KeptServer]:
    """A managed server of the same cell, or a new server for the cell or directory, stopped afterwards."""
    from trtllm_pipeline.orchestrate import GatewayParams
    from trtllm_pipeline.serve import control
    from trtllm_pipeline.show.cli import stage_options
    from trtllm_pipeline.show.cli.serve import target_of

    try:
        target = target_of(ctx, what, workspace=workspace)
    except UsageError as error:
        if "/" in what:
            raise
        # It may be a mistyped server name.
        names = ", ".join(server.name for server in known) or "none"
        raise UsageError(f"{error.message} (managed servers: {names})", hint=error.hint) from error
    for server in known:
        endpoint = server.endpoint()
        if (
            target.cell is not None
            and server.cell == target.cell
            and endpoint is not None
            and endpoint.openai is not None
        ):
            yield server
            return
    provenance.require_folders(target.folders, policy)
    note(f"starting a server for {target.cell or what}; it stops with this chat")
    command = ("pipeline", *sys.argv[1:])
    limits = stage_options.read_class(GatewayParams, {}, target.gateway)
    wish = control.Wish(name=f"chat-{os.getpid()}", gateway=True, limits=limits, command=command)
    server = control.start(target, wish, Path(workspace))
    try:
        yield control.wait_ready(server)
    finally:
        control.remove(control.stop(servers.look(server.folder)))


def _only(known: dict[str, servers.KeptServer], workspace: str) -> str:
    ready = [name for name, server in known.items() if server.state is servers.State.READY]
    if len(ready) == 1:
        return ready[0]
    if ready:
        raise UsageError(f"{len(ready)} servers are ready: {', '.join(ready)}", hint=f"pipeline chat {ready[0]}")
    raise UsageError(
        f"{workspace}: no server is ready",
        hint="serve a cell with pipeline chat CELL, or use any server with pipeline chat URL",
    )


def _url(server: servers.KeptServer) -> str:
    endpoint = server.endpoint()
    if endpoint is None:
        why = f": {server.reason}" if server.reason else ""
        raise UsageError(
            f"server {server.name} is {server.state.value}{why}", hint=f"pipeline serve restart {server.name}"
        )
    if endpoint.openai is None:
        raise UsageError(
            f"server {server.name} has no OpenAI endpoint", hint="start one with pipeline serve start CELL --openai"
        )
    return endpoint.openai


def _chosen(listed: Mapping[str, str | None], url: str, model: str | None, lora: str | None) -> str:
    """The name of the model, or of its adapter `lora`. `listed` maps the server's names to parent models. Raises UsageError."""
    bare = [name for name, parent in listed.items() if parent is None]
    if model is None and len(bare) == 1:
        model = bare[0]
    if model is None or (model not in listed and listed):
        names = ", ".join(listed) or "none"
        raise UsageError(
            f"{url} has no model {model!r}; it has {names}" if model else f"{url} has the models {names}",
            hint="choose one with --model NAME",
        )
    if lora is None:
        return model
    adapters = {name.removeprefix(f"{model}:"): name for name, parent in listed.items() if parent == model}
    if lora not in adapters:
        raise UsageError(
            f"{url} lists no LoRA adapter {lora!r} of {model}; it lists {', '.join(adapters) or 'none'}",
            hint="set settings.lora.adapter in the matrix, or use pipeline serve gateway --adapter",
        )
    return adapters[lora]


class _Terminal:
    """Reads messages and prints responses."""

    def __init__(self, talk: conversation.Conversation) -> None:
        self._talk = talk
        self._typed = sys.stdin.isatty()
        self._colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._thinking = False
        self._column = 0

    def run(self) -> None:
        """Chat until the end of the input or /exit. Raises ServerError if the input is a pipe."""
        if self._typed:
            with suppress(ImportError):
                import readline  # noqa: F401 - lines can be edited, and earlier ones fetched
            note(f"{self._talk.model} at {self._talk.url}; /help shows the commands")
        for message in self._messages():
            if message.startswith("/") and not message.startswith("//"):
                name, _, rest = message.partition(" ")
                if self._command(name, rest.strip()):
                    return
                continue
            try:
                self._say(message.removeprefix("/") if message.startswith("//") else message)
            except ServerError as error:
                self._end_line()
                if not self._typed:
                    raise
                explain_error(error)

    def _messages(self) -> Iterator[str]:
        block: list[str] | None = None
        while True:
            try:
                line = self._line(_PROMPT if block is None else _MORE)
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                block = None
                note("\n(Ctrl-D or /exit ends)")
                continue
            if line is None:
                if block:
                    yield "\n".join(block)
                return
            if block is None and line.startswith(_BLOCK):
                block, line = [], line.removeprefix(_BLOCK)
            if block is None:
                if line.strip():
                    yield line.strip()
                continue
            ended = line.endswith(_BLOCK)
            block.append(line.removesuffix(_BLOCK))
            if ended:
                yield "\n".join(block).strip("\n")
                block = None

    def _line(self, prompt: str) -> str | None:
        if not self._typed:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        if not sys.stdout.isatty():  # stdout is only for responses
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            note("")
            return None

    def _command(self, name: str, rest: str) -> bool:
        """Execute a command. Returns True if it ends the chat."""
        talk = self._talk
        if name in {"/exit", "/quit", "/bye"}:
            return True
        if name in {"/reset", "/clear"}:
            talk.reset()
            note("conversation cleared")
        elif name == "/system":
            if rest:
                talk.system = rest
                talk.reset()
            note(f"system prompt: {talk.system or 'none'}")
        else:
            if name not in {"/help", "/?"}:
                note(f"unknown command {name} (to send a message that starts with /, type //...)")
            width = max(map(len, _COMMANDS))
            note("\n".join(f"  {each:<{width}}  {text}" for each, text in _COMMANDS.items()))
        return False

    def _say(self, message: str) -> None:
        reply = self._talk.ask(message, self._show)
        self._end_line()
        if reply.finish_reason is None and not self._typed:
            raise KeyboardInterrupt  # no user can continue a stopped chat from a pipe
        for call in reply.calls.values():
            note(f"tool call: {call}")
        if self._typed:
            note(_summary(reply))

    def _show(self, piece: str, reasoning: bool) -> None:
        if reasoning != self._thinking:
            if not reasoning:
                self._end_line()
            self._thinking = reasoning
            self._color(_DIM if reasoning else _PLAIN)
        # Reasoning is not part of the response. A pipe gets only the response.
        if not reasoning or self._typed:
            sys.stdout.write(piece)
            sys.stdout.flush()
            self._column = len(piece.rpartition("\n")[2]) + (0 if "\n" in piece else self._column)

    def _end_line(self) -> None:
        if self._thinking:
            self._color(_PLAIN)
            self._thinking = False
        if self._column:
            print(flush=True)  # noqa: T201
            self._column = 0

    def _color(self, code: str) -> None:
        if self._colors:
            terminal.raw(sys.stdout).write(code)


def _summary(reply: conversation.Reply) -> str:
    """Line below a response: an unusual finish reason, and the speed."""
    parts: list[Any] = []
    if reply.finish_reason is None:
        parts.append("stopped")
    elif reply.finish_reason not in {"stop", "tool_calls"}:
        parts.append({"length": "cut off at the length limit"}.get(reply.finish_reason, reply.finish_reason))
    if reply.tokens is not None:
        parts.append(f"{reply.tokens} token{'' if reply.tokens == 1 else 's'}")
    if reply.tokens_per_s is not None:
        parts.append(f"{reply.tokens_per_s:.1f} tokens/s")
    if reply.first_token_s is not None:
        parts.append(f"first after {reply.first_token_s * 1000:.0f} ms")
    return f"[{', '.join(parts) or 'no response'}]"
