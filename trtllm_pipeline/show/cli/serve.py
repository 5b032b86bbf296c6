"""`pipeline serve`: servers that outlive the command that started them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from trtllm_pipeline.base import UsageError, allow_open_files, probe, terminal, text_tables
from trtllm_pipeline.orchestrate import GatewayParams
from trtllm_pipeline.serve import control, gateway_config, servers, shown
from trtllm_pipeline.show.cli import completion, options, stage_options
from trtllm_pipeline.show.cli.output import emit, emit_as, emit_json, note, print_log, terminal_width, write_output
from trtllm_pipeline.tensorrt import command_lines
from trtllm_pipeline.tensorrt import params as stage_params

if TYPE_CHECKING:
    from trtllm_pipeline.serve import ServeTarget

_KEEPER: Final = ("host", "restarts")
"""Parameters of the launch stage that the keeper sets."""
OF_LAUNCH: Final = tuple(
    each.name
    for each in stage_params.table(stage_params.LaunchEmbedded)
    if not (each.about.of_matrix or each.name in _KEEPER)
)
"""Those of the embedded toolchain. Every launch stage has most of them."""
_PANELS: Final = {
    "Target": ("sets", "toolchain", "require_signed", "trusted_keys"),
    "The server": (*OF_LAUNCH, "unresponsive_timeout_s"),
    "The model as OpenAI clients see it": ("model_name", "model_folder", "dialect"),
    "Sampling of OpenAI requests that set none": (
        *("temperature", "top_p", "top_k", "repetition_penalty"),
        *("max_tokens", "stop", "end_id", "pad_id"),
    ),
}
"""Options of `serve start` in the help, after the ten most common ones."""
Servers = Annotated[
    list[str] | None,
    options.argument("NAME", "Managed servers, listed by pipeline serve ps.", complete=completion.servers),
]
All = Annotated[bool, options.switch("--all", "All servers of the workspace.")]


def _start(
    ctx: typer.Context,
    what: Annotated[
        str,
        options.argument(
            "CELL",
            "Cell id, pattern or part of an id, or the directory of an engine or of an LLM's Triton repository.",
            complete=completion.cells,
        ),
    ],
    matrix: options.MatrixOrLatest = None,
    name: Annotated[
        str | None, options.option("--name", "NAME", "Name of the server (default: model and precision).")
    ] = None,
    openai: Annotated[
        bool,
        options.option(
            "--openai/--no-openai", None, "Add an OpenAI endpoint in front of it: chat, completions, metrics."
        ),
    ] = False,
    host: Annotated[
        str,
        options.option(
            "--host", "ADDRESS", "Address to listen on. Other machines can connect unless it is a loopback address."
        ),
    ] = "127.0.0.1",
    port: options.GatewayPort = None,
    api_keys: options.ApiKeys = None,
    restart_: Annotated[
        bool, options.switch("--restart", "Restart it when it dies or hangs, after 1, 2, 4 and up to 60 seconds.")
    ] = False,
    wait: Annotated[bool, options.switch("--wait", "Wait until it is ready; Ctrl-C then stops it.")] = True,
    workspace: options.Workspace = options.WORKSPACE,
    form: options.TextOrJson = "text",
    sets: options.Sets = None,
    toolchain: options.Toolchain = None,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
    unresponsive_timeout_s: Annotated[
        float | None,
        options.duration(
            "--unresponsive-timeout-s",
            f"(--restart) Time without a response before it is restarted (default: {servers.UNRESPONSIVE_S:g}).",
        ),
    ] = None,
    model_name: Annotated[
        str | None, options.option("--model-name", "NAME", "Model name for clients (default: its recipe's name).")
    ] = None,
    model_folder: Annotated[
        str | None,
        options.option(
            "--model-folder", "DIR", "Directory with tokenizer and chat template (default: that of the cell or engine)."
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        options.option(
            "--dialect",
            "NAME",
            "Format of the model's tool calls and reasoning (default: detected from its chat template).",
        ),
    ] = None,
    **typed: Any,
) -> None:
    """Start a server and keep it running after this terminal is closed.

    The cell is from --matrix, or else from the workspace's latest run, and must be built. Signed artifacts must still
    match their signatures. With --openai, an OpenAI endpoint listens at --host and --port, and the server behind it
    only on this machine. Options override the matrix.

    examples:
      pipeline serve start '*/int8_wo/*/bs4' --openai --port 8000
      pipeline serve start qwen2-7b/fp8 --restart --host 0.0.0.0 --http-port 8000 --name chat
      pipeline serve start ./engine --name mine --no-wait
    """
    from trtllm_pipeline.orchestrate import provenance
    from trtllm_pipeline.serve import dialect_for

    given = {each: value for each, value in typed.items() if value not in (None, [])}
    of_launch = {each: given.pop(each) for each in OF_LAUNCH if each in given}
    if unresponsive_timeout_s is not None and not restart_:
        raise UsageError("--unresponsive-timeout-s requires --restart", hint="add --restart")
    if unresponsive_timeout_s is not None and not 1 <= unresponsive_timeout_s <= 1e9:
        raise UsageError(f"--unresponsive-timeout-s: expected 1s or more, got {unresponsive_timeout_s:g} s")
    of_openai = {"port": port, "model_name": model_name, "dialect": dialect, "api_keys": api_keys, **given}
    if not openai and (only := [each for each, value in of_openai.items() if value is not None]):
        raise UsageError(f"{stage_options.flag(only[0])} requires the OpenAI endpoint", hint="add --openai")
    options.folder("--model-folder", None if model_folder is None else Path(model_folder))
    if api_keys is not None and not os.path.isfile(api_keys):
        raise UsageError(f"--api-keys {api_keys}: there is no such file")
    control.check_name(name) if name is not None else None
    dialect_for(dialect, None) if dialect is not None else None  # raises for an unknown dialect
    policy = provenance.policy(trusted_keys, required=require_signed)
    target = target_of(ctx, what, matrix, sets, toolchain, workspace=workspace, model_folder=model_folder)
    provenance.require_folders(target.folders, policy)
    params = stage_options.values(target.launch, of_launch)
    limits = stage_options.read_class(GatewayParams, given, target.gateway)
    if openai and getattr(target.params, "frontend", "triton") != "triton":
        for each in gateway_config.OF_TRITON:
            if each in given:
                raise UsageError(
                    f"{stage_options.flag(each)}: the server has no such input; it uses the model's own",
                    hint="leave it out",
                )
            if getattr(limits, each) is not None:
                note(f"note: settings.gateway.{each} is not used: the server has no such input")
    if wrong := stage_options.faults(target.launch.params, params):
        raise UsageError("\n  ".join(wrong))
    _warn(target, host, openai=openai, keys=api_keys is not None)
    allow_open_files()
    wish = control.Wish(
        name=name,
        params=params,
        restart=restart_,
        unresponsive_timeout_s=unresponsive_timeout_s or servers.UNRESPONSIVE_S,
        require_signed=require_signed,
        trusted_keys=None if trusted_keys is None else str(trusted_keys.absolute()),
        gateway=openai,
        host=host,
        port=port or 0,
        model=model_name,
        api_keys_file=None if api_keys is None else Path(api_keys).absolute(),
        limits=limits,
        command=("pipeline", *sys.argv[1:]),
        **({} if dialect is None else {"dialect": dialect}),
    )
    server = control.start(target, wish, Path(workspace))
    if wait:
        server = _until_ready(server)
    _show_started(server, form)


def target_of(
    ctx: typer.Context,
    what: str,
    matrix: str | None = None,
    sets: list[str] | None = None,
    toolchain: str | None = None,
    *,
    workspace: str,
    model_folder: str | None = None,
) -> ServeTarget:
    """The input of the server. Raises UsageError, PlanError."""
    from trtllm_pipeline.serve import serve_target as target

    tokenizer = None if model_folder is None else Path(model_folder).absolute()
    if target.is_folder(what):
        given = (("--matrix", matrix), ("--set", sets), ("--toolchain", options.typed(ctx, "toolchain", toolchain)))
        if only := [flag for flag, value in given if value]:
            raise UsageError(f"{only[0]} is for a cell, but {what} is a directory, which determines its own toolchain")
        return target.of_folder(Path(what), tokenizer, probe.this_machine())
    store = options.known_store(workspace)
    request = options.request_or_latest(ctx, store, matrix, [what], sets, toolchain=toolchain)
    return target.of_request(request, store, tokenizer)


def _warn(target: ServeTarget, host: str, *, openai: bool, keys: bool) -> None:
    of_matrix = str(target.params.host)
    if of_matrix != host and command_lines.reachable(of_matrix) and not command_lines.reachable(host):
        note(
            f"note: the matrix's serve.host {of_matrix} is only for runs; this server listens on {host}, --host changes it"
        )
    warning = command_lines.reachable(host)
    if warning and openai:
        warning = (
            f"the OpenAI endpoint listens on {host}: anyone who can reach it can send prompts"
            f"{' with a key' if keys else ' without a key; --api-keys FILE requires one'}. Nothing is encrypted; "
            "docs/security.md shows how to add TLS with a proxy"
        )
    if warning:
        note(f"warning: {warning}")


def _until_ready(server: servers.KeptServer) -> servers.KeptServer:
    """The server once it is ready. An interrupt stops it."""
    try:
        note(f"server {server.name} is starting; pipeline serve logs {server.name} -f follows its log")
        return control.wait_ready(server)
    except KeyboardInterrupt:
        note(f"stopping {server.name}")
        control.stop(servers.look(server.folder))
        raise


def _show_started(server: servers.KeptServer, form: str) -> None:
    emit_as(
        form, shown.entry(server), text=lambda _: text_tables.aligned({"name": server.name, **shown.endpoints(server)})
    )
    if form == "text" and server.state is servers.State.READY:
        note(f"Example:\n  {shown.example(server)}\nTo stop it: pipeline serve stop {server.name}")


start = stage_options.with_class(
    stage_options.with_class(_start, stage_params.LaunchEmbedded, but=_KEEPER),
    GatewayParams,
    but=OF_LAUNCH,
    panels=_PANELS,
    panel="Limits of the OpenAI endpoint",
)


def ps(workspace: options.Workspace = options.WORKSPACE, form: options.TextOrJson = "text") -> None:
    """List the managed servers of the workspace: state, ports, GPUs.

    examples:
      pipeline serve ps
      pipeline serve ps --format json
    """
    found = servers.find(Path(workspace))
    emit_as(form, shown.to_json(found), text=lambda _: shown.to_table(found, terminal_width()))


def status(
    names: Servers = None,
    workspace: options.Workspace = options.WORKSPACE,
    form: options.TextOrJson = "text",
    watch: Annotated[bool, options.switch("--watch", "Refresh once a second until Ctrl-C. Needs a terminal.")] = False,
) -> None:
    """Show details of managed servers: endpoints, processes, exit reasons.

    Rates and latencies over time: pipeline serve monitoring.

    examples:
      pipeline serve status
      pipeline serve status --watch
      pipeline serve status chat --format json
    """

    def look() -> list[servers.KeptServer]:
        return _named(names, workspace) if names else servers.find(Path(workspace))

    if watch:
        if form != "text" or not sys.stdout.isatty():
            raise UsageError("--watch needs a terminal and --format text", hint="leave out --watch")
        shown.watch(look, terminal.raw(sys.stdout))
        return
    found = look()
    emit_as(form, shown.to_json(found), text=lambda _: shown.to_text(found))


def _named(names: list[str], workspace: str) -> list[servers.KeptServer]:
    return [control.find(Path(workspace), each) for each in dict.fromkeys(names)]


def _chosen(names: list[str] | None, workspace: str, *, every: bool) -> list[servers.KeptServer]:
    if bool(names) == every:
        raise UsageError("name servers, or give --all", hint="pipeline serve ps lists them")
    return servers.find(Path(workspace)) if every else _named(names or [], workspace)


def logs(
    name: options.Server,
    workspace: options.Workspace = options.WORKSPACE,
    part: Annotated[
        Literal["server", "keeper", "gateway"],
        options.option("--part", None, "Log to print; keeper has starts and exits."),
    ] = "server",
    follow: Annotated[
        bool, options.switch("-f --follow", "Keep printing, including after restarts, until Ctrl-C.")
    ] = False,
    lines: Annotated[int | None, options.option("-n --lines", "N", "Only the last N lines.", min=1)] = None,
) -> None:
    """Print and follow the log of a managed server.

    examples:
      pipeline serve logs chat -f
      pipeline serve logs chat --part keeper --lines 20
    """
    server = control.find(Path(workspace), name)
    if server.state is not servers.State.READY:
        note(_standing(server))
    path = shown.log_of(server, part)
    if not path.exists() and not follow:
        there = ", ".join(each for each in shown.LOGS if shown.log_of(server, each).exists())
        raise UsageError(f"{name} has no log of its {part}", hint=f"--part is one of {there}" if there else None)
    seen = server.state

    def goes_on() -> bool:
        nonlocal seen
        before, now = seen, servers.look(server.folder)
        seen = now.state
        if seen is not before:
            note(_standing(now))
        return follow

    try:
        print_log(path, lines, goes_on)
    except KeyboardInterrupt:
        if not follow:
            raise


def _standing(server: servers.KeptServer) -> str:
    return f"{server.name}: {server.state.value}{f': {server.reason}' if server.reason else ''}"


def stop(
    names: Servers = None,
    every: All = False,
    remove: Annotated[bool, options.switch("--remove", "Also remove their settings and logs.")] = False,
    workspace: options.Workspace = options.WORKSPACE,
    form: options.TextOrJson = "text",
) -> None:
    """Stop servers and all of their processes. Running responses get a moment to finish.

    examples:
      pipeline serve stop chat
      pipeline serve stop --all --remove
    """
    done = []
    chosen = _chosen(names, workspace, every=every)
    if not chosen:
        note(shown.to_table(chosen))
    for server in chosen:
        ended = control.stop(server)
        done.append(shown.entry(ended))
        if remove:
            control.remove(ended)
        elif not server.state.alive:
            how = "had already failed" if server.state is servers.State.FAILED else "was already stopped"
            note(f"{server.name} {how}")
        if form == "text":
            emit(server.name)
    if form == "json":
        emit_json({"schema": 1, "servers": done})


def restart(
    names: Servers = None,
    every: All = False,
    wait: Annotated[
        bool, options.switch("--wait", "Wait until they are ready; Ctrl-C then stops the one that is starting.")
    ] = True,
    workspace: options.Workspace = options.WORKSPACE,
    require_signed: options.RequireSigned = False,
    trusted_keys: options.TrustedKeys = None,
    form: options.TextOrJson = "text",
) -> None:
    """Stop servers, and start them again with the same options, on the same ports. Stopped servers are started.

    Their artifacts are checked as by `start`. If a server cannot be started again, it keeps running.

    examples:
      pipeline serve restart chat
      pipeline serve restart --all --no-wait
    """
    allow_open_files()
    done = []
    for server in _chosen(names, workspace, every=every):
        server = control.restart(server, require_signed=require_signed, trusted_keys=trusted_keys)
        done.append(_until_ready(server) if wait else server)
    emit_as(form, shown.to_json(done), text=lambda _: shown.to_text(done))


def install(
    name: options.Server,
    workspace: options.Workspace = options.WORKSPACE,
    system: Annotated[
        bool, options.switch("--system", "Unit for the machine's systemd instead of this user's.")
    ] = False,
    output: Annotated[
        str | None,
        options.option("-o --output", "FILE", "File to write (default: where systemd looks for it); - is stdout."),
    ] = None,
) -> None:
    """Write a systemd unit that starts a managed server at boot.

    The unit runs the server with its last options and ports. `pipeline serve ps`, `stop` and `logs` work on it.

    examples:
      pipeline serve install chat
      pipeline serve install chat --system --output chat.service
    """
    from trtllm_pipeline.serve import systemd

    server = control.find(Path(workspace), name)
    if server.record is None:
        raise UsageError(
            f"server {name}: {server.reason}", hint=f"pipeline serve stop {name} --remove, then start it again"
        )
    text = systemd.unit(server.folder, server.record, system=system, environment=os.environ)
    if output == "-":
        return emit(text.rstrip("\n"))
    path = Path(output).absolute() if output is not None else systemd.default_path(name, system=system)
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(systemd.MARK):
        raise UsageError(f"{path} already exists and was not written by pipeline serve install", hint="--output FILE")
    if output is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_output(str(path), text)
    steps = systemd.next_steps(path, name, system=system, running=server.state.alive)
    return note("\n".join(["next:", *(f"  {step}" for step in steps)]))
