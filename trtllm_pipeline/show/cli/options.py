"""Options shared by several commands, as annotated Typer types with one spelling and one help text each."""

from __future__ import annotations

import errno
import inspect
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import typer

from trtllm_pipeline.base import DEFAULT_WORKSPACE, UsageError
from trtllm_pipeline.show.cli import completion
from trtllm_pipeline.show.report.report_formats import AFTER_RUN, COMPARED, FORMATS

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate import Request, Store

WORKSPACE = DEFAULT_WORKSPACE


def option(flags: str, metavar: str | None, text: str, *, complete: Any = None, **more: Any) -> Any:
    """A Typer option from its flags ("-u --url"), metavar and help text."""
    return typer.Option(*flags.split(), metavar=metavar, help=text, autocompletion=complete, **more)


def switch(flags: str, text: str, **more: Any) -> Any:
    """A Boolean option: `--verbose` and `--no-verbose`."""
    return option(f"{flags}/--no-{flags.rpartition('--')[2]}", None, text, **more)


_UNITS_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?) ?(ms|s|m|h|d)?")


def seconds(text: str | float) -> float:
    """Parse a duration such as 300ms, 5s, 2m, 1h or 30d into seconds. A plain number is in seconds. Raises ValueError."""
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 300ms, 5s, 2m or 1h")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def duration(flags: str, text: str, **more: Any) -> Any:
    """An option for a duration. The command gets seconds."""

    def read(typed: str | float) -> float:
        try:
            return seconds(typed)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return option(flags, "DURATION", text, parser=read, **more)


TOKENIZER_NAMES: Final = {"tokenizer-path": "tokenizer"}
"""Option name -> its name in other tools."""


def argument(metavar: str, text: str, *, complete: Any = None) -> Any:
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete)


def _named(folder: str) -> str:
    """Reject an empty workspace name, for example from an unset variable. It would mean the current directory."""
    if not folder:
        raise UsageError("--workspace is empty", hint=f"name a directory, or omit the option to use {WORKSPACE}")
    return folder


def _matrix(default: str) -> Any:
    text = f"Matrix file, or name of a shipped matrix ({default})."
    return option("-m --matrix", "FILE", text, complete=completion.matrices)


def toolchain(text: str, **more: Any) -> Any:
    return option("--toolchain", "NAME", text, complete=completion.toolchains, **more)


Workspace = Annotated[
    str,
    option(
        "-w --workspace", "DIR", "Workspace directory with all results.", envvar="PIPELINE_WORKSPACE", callback=_named
    ),
]
Matrix = Annotated[str, _matrix("listed by pipeline matrix list")]
OptionalMatrix = Annotated[str | None, _matrix("listed by pipeline matrix list")]
MatrixOrLatest = Annotated[str | None, _matrix("default: the latest run's matrix")]
Cells = Annotated[
    list[str] | None,
    option(
        "--cells",
        "PATTERN",
        "Only matching cells, e.g. 'qwen2*/fp8'. '!PATTERN' excludes cells. Repeatable.",
        complete=completion.cells,
    ),
]
Sets = Annotated[
    list[str] | None,
    option(
        "--set", "KEY=VALUE", "Change a setting, an axis or a recipe, e.g. settings.perf.max_tokens=64. Repeatable."
    ),
]
Toolchain = Annotated[
    str | None,
    toolchain(
        "Toolchain for cells whose matrix names none (default: the first available on this machine).",
        envvar="PIPELINE_TOOLCHAIN",
    ),
]
Assume = Annotated[
    str | None,
    option(
        "--assume",
        "MACHINE",
        "Plan for another machine: 2xH100,tensorrt_llm==1.2 (pipeline doctor describes this one).",
    ),
]
Run = Annotated[
    str | None,
    option("--run", "RUN", "Only this run: latest, latest~1, a name, an id or an id prefix.", complete=completion.runs),
]
MeasuredRun = Annotated[
    str,
    argument(
        "RUN",
        "A run (latest, latest~1, a name, an id or an id prefix), a report.json, or the result of a load run.",
        complete=completion.runs,
    ),
]
Server = Annotated[str, argument("NAME", "Managed server, listed by pipeline serve ps.", complete=completion.servers)]
Allow = Annotated[
    str,
    option(
        "--allow",
        "NAME,...",
        "Compare even if these conditions differ: workload, system, or single fields such as driver,protocol.",
    ),
]
Slo = Annotated[
    str | None,
    option(
        "--slo",
        "OBJECTIVES",
        "Objectives, separated by commas, e.g. ttft_p99=300ms. A rate such as output_tps=100 is a minimum.",
    ),
]
MinAccuracy = Annotated[
    str | None,
    option(
        "--min-accuracy",
        "MINIMUM",
        "Minimum score: -1% or -1pt (percent or points below the unquantized cell), 0.6, or contains:-1% for a score other "
        "than the first.",
    ),
]
GpuHour = Annotated[
    str | None,
    option(
        "--gpu-hour",
        "PRICE",
        "Price of a GPU, or of a host without one, for an hour: 2.50, or H100=2.50,L40S=1.10 (default: settings.cost of the "
        "matrix). Adds dollars per million output tokens.",
    ),
]
Objective = Annotated[
    Literal["throughput", "latency", "size"],
    option(
        "--objective",
        None,
        "Goal: throughput (most output tokens per second per GPU), latency (shortest median e2e) or size "
        "(smallest engine).",
    ),
]
Executor = Annotated[
    Literal["local", "ray", "slurm"] | None,
    option("--executor", None, "Run stages on this machine or on a cluster (default: local)."),
]
RayAddress = Annotated[
    str | None,
    option(
        "--ray-address",
        "HOST:PORT",
        "Address of the Ray cluster (default: RAY_ADDRESS, or the cluster on this machine).",
    ),
]
Progress = Annotated[
    Literal["auto", "live", "plain", "json", "quiet"],
    option(
        "--progress",
        None,
        "Progress on stderr: live display, plain lines, JSON lines, or failures only (quiet). auto is live on a terminal.",
        envvar="PIPELINE_PROGRESS",
    ),
]
Output = Annotated[str | None, option("-o --output", "FILE", "Write to this file instead of stdout.")]
GatewayPort = Annotated[
    int | None, option("--port", "PORT", "Port of the OpenAI endpoint (default: any free port).", min=0, max=65535)
]
ApiKeys = Annotated[
    str | None,
    option(
        "--api-keys",
        "FILE",
        "File with one API key of at least 8 characters per line. Requests need one of them (default: no keys).",
    ),
]
Url = Annotated[str, option("-u --url", "URL", "Server address: HOST:PORT or http(s)://...")]
Model = Annotated[str, option("--model", "NAME", "Model name.")]
RequireSigned = Annotated[
    bool,
    switch(
        "--require-signed",
        "Reject artifacts without a statement signed by a trusted key.",
        envvar="PIPELINE_REQUIRE_SIGNED",
    ),
]
TrustedKeys = Annotated[
    Path | None,
    option("--trusted-keys", "DIR", "Directory of trusted public keys (*.pem, *.pub).", envvar="PIPELINE_TRUSTED_KEYS"),
]
"""With RequireSigned, the arguments of `provenance.policy`."""
AllowOtherGpu = Annotated[
    bool, switch("--allow-other-gpu", "Also pull engines built on another GPU of the same compute capability.")
]


@dataclass(frozen=True, kw_only=True)
class Pulling:
    """Options for pulling artifacts instead of creating them."""

    remote: Annotated[
        str | None,
        option(
            "--remote",
            "URL",
            "Pull artifacts from this remote store instead of creating them (default: the matrix's remote).",
            envvar="PIPELINE_REMOTE",
        ),
    ] = None
    allow_other_gpu: AllowOtherGpu = False
    require_signed: RequireSigned = False
    trusted_keys: TrustedKeys = None

    def of(self, request: Request) -> Request:
        """`request` with these options applied. Options not given leave it unchanged. Raises UsageError."""
        remote = self.remote
        if remote and "://" not in remote:
            remote = str(Path(remote).absolute())
        elif remote and urlsplit(remote).password:
            raise UsageError(
                "--remote: the password in the URL would be stored in the workspace",
                hint="put the password into a variable, ~/.netrc or a configuration file that the URL's package reads",
            )
        keys = None if self.trusted_keys is None else str(self.trusted_keys.absolute())
        return replace(
            request,
            remote=remote or request.remote,
            allow_other_gpu=self.allow_other_gpu or request.allow_other_gpu,
            require_signed=self.require_signed or request.require_signed,
            trusted_keys=keys or request.trusted_keys,
        )


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a command. Each field of a dataclass parameter becomes an option."""
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }

    def command(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        return function(**values)

    parameters = [
        each.replace(kind=each.KEYWORD_ONLY)
        for name, own in signature.parameters.items()
        for each in (inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else (own,))
    ]
    vars(command)["__signature__"] = signature.replace(parameters=parameters)
    command.__doc__ = function.__doc__
    return command


Until = Annotated[
    str | None, option("--until", "STAGE", "Stop after this stage, e.g. build.", complete=completion.stages)
]
Verbose = Annotated[bool, switch("-v --verbose", "Show all rows, notes and definitions.")]
_FORMAT = option("--format", None, "Output format.")
TextOrJson = Annotated[Literal["text", "json"], _FORMAT]
TableOrCsv = Annotated[Literal["table", "json", "csv"], _FORMAT]


def _formats(names: Iterable[str]) -> Any:
    text = ", ".join(f"{name} ({FORMATS[name].help})" for name in names)
    return Annotated[Literal[tuple(names)], option("--format", None, f"Output format: {text}.")]


if TYPE_CHECKING:
    ReportFormat = str
    RunFormat = str
    ComparisonFormat = str
else:
    ReportFormat, RunFormat, ComparisonFormat = map(_formats, (FORMATS, AFTER_RUN, COMPARED))


SERVER_PANEL: Final = "The server"
_of_server: Final = partial(option, rich_help_panel=SERVER_PANEL)
Protocol = Annotated[
    Literal["grpc", "http", "openai"],
    _of_server("-i --protocol", "NAME", "Protocol: grpc or http (Triton), or openai for any OpenAI-compatible server."),
]
EndpointType = Annotated[
    Literal["chat", "completions"], _of_server("--endpoint-type", "NAME", "OpenAI endpoint: chat or completions.")
]
RequestTimeout = Annotated[
    float, duration("--request-timeout-s", "Timeout of one request, e.g. 90s or 5m.", rich_help_panel=SERVER_PANEL)
]


def request(
    matrix: str,
    cells: Sequence[str] | None = None,
    sets: Sequence[str] | None = None,
    until: str | None = None,
    toolchain: str | None = None,
    assume: str | None = None,
) -> Request:
    """The request that the options specify. Raises UsageError if the matrix is neither a file nor a shipped name."""
    from trtllm_pipeline.orchestrate import Request, matrices

    return Request(matrices.find_matrix(matrix), tuple(sets or ()), tuple(cells or ()), until, toolchain, assume)


def request_or_latest(
    ctx: typer.Context,
    store: Store | None,
    matrix: str | None,
    cells: Sequence[str] | None = None,
    sets: Sequence[str] | None = None,
    until: str | None = None,
    toolchain: str | None = None,
    assume: str | None = None,
) -> Request:
    """The request that the options specify. Without a matrix, they change the request of the workspace's latest run."""
    if matrix is not None:
        return request(matrix, cells, sets, until, toolchain, assume)
    if store is None:
        raise UsageError(
            "no matrix given, and the workspace has no run whose matrix could be used",
            hint="--matrix FILE names one; create a matrix with pipeline matrix init",
        )
    from trtllm_pipeline.orchestrate import Request, served_cell

    latest = served_cell.latest_request(store)
    if latest.toolchain is not None:  # an environment variable does not override the latest run's toolchain
        toolchain = typed(ctx, "toolchain", toolchain)
    return latest.changed(Request(Path(), tuple(sets or ()), tuple(cells or ()), until, toolchain, assume))


def typed(ctx: typer.Context, name: str, value: str | None) -> str | None:
    """The value of an option, or None if it comes from the environment."""
    source = ctx.get_parameter_source(name)
    return None if source is not None and source.name == "ENVIRONMENT" else value


def typed_again(workspace: str) -> str:
    """The workspace option for a suggested command, empty for the default workspace."""
    return "" if workspace == WORKSPACE else f" -w {shlex.quote(workspace)}"


def store_at(workspace: str) -> Store | None:
    """The workspace, or None if it does not exist yet. Never creates it."""
    from trtllm_pipeline.orchestrate import Store, is_workspace

    folder = Path(workspace)
    return Store(folder) if is_workspace(folder) else None


def known_store(workspace: str) -> Store:
    """The workspace. Raises UsageError if it does not exist yet."""
    store = store_at(workspace)
    if store is None:
        raise UsageError(
            f"{workspace}: no such workspace", hint="create one with pipeline run FILE, or give --workspace DIR"
        )
    return store


def allowed(text: str) -> frozenset[str]:
    """The names of `--allow`. Raises UsageError."""
    from trtllm_pipeline.measure import conditions

    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(names - conditions.NAMES - set(conditions.GROUPS))
    if unknown:
        raise UsageError(
            f"--allow: unknown condition {unknown[0]!r}",
            hint=f"groups: {', '.join(conditions.GROUPS)}; fields: {', '.join(sorted(conditions.NAMES))}",
        )
    return names


def empty_folder(given: str) -> Path:
    """The directory of `--output-dir`, created if it is missing. Raises UsageError if it cannot be filled."""
    if not given:  # for example from an unset variable; it would mean the current directory
        raise UsageError("--output-dir is empty", hint="name a new directory")
    folder = Path(given).absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"--output-dir {folder}: not an empty directory", hint="name a new one; nothing is overwritten"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"--output-dir {folder}: cannot be written: {error.strerror}", hint="name a directory that you can write to"
        ) from error
    return folder


def positive(option: str, value: float) -> float:
    """`value`, checked to be a positive number. Raises UsageError."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option}: expected a positive number, got {value:g}")
    return value


def pairs(form: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Values of NAME=VALUE texts by name. `form` is the expected syntax. Raises UsageError."""
    values: dict[str, str] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if not (name and value):
            raise UsageError(f"{text!r}: expected {form}")
        if name in values:
            raise UsageError(f"{text!r}: {name} is given twice")
        values[name] = value
    return values


def folder(option: str, path: Path | None) -> Path | None:
    """`path`, checked to be a directory or None. Raises UsageError."""
    if path is not None and not path.is_dir():
        raise UsageError(f"{option} {path}: no such directory")
    return path
