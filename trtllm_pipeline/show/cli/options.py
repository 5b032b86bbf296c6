"""Options that several commands share: one spelling and one help for each, as annotated types of Typer commands."""

from __future__ import annotations

import errno
import inspect
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import typer

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.orchestrate import DEFAULT_WORKSPACE, Request, Store, is_workspace
from trtllm_pipeline.show.cli import completion

WORKSPACE = DEFAULT_WORKSPACE
N = TypeVar("N", int, float)
_MOST_LEVELS: Final = 100
_POSITIVE: Final[Mapping[Any, str]] = {int: "a positive whole number", float: "a positive number"}


def option(flags: str, metavar: str | None, text: str, *, complete: Any = None, **more: Any) -> Any:
    """An option by its flags ("-u --url"), what stands for its value, and its help, which is a sentence."""
    return typer.Option(*flags.split(), metavar=metavar, help=text, autocompletion=complete, **more)


def switch(flags: str, text: str, **more: Any) -> Any:
    """An option that is on or off: `--verbose` and `--no-verbose`."""
    return option(f"{flags}/--no-{flags.rpartition('--')[2]}", None, text, **more)


_UNITS_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?) ?(ms|s|m|h|d)?")


def seconds(text: str | float) -> float:
    """The seconds of a duration such as 300ms, 5s, 2m, 1h or 30d; a number alone is seconds. Raises ValueError."""
    found = _DURATION.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"{text!r} is not a duration such as 300ms, 5s, 2m or 1h")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def duration(flags: str, text: str, **more: Any) -> Any:
    """An option for a duration, in seconds for the command."""

    def read(typed: str | float) -> float:
        try:
            return seconds(typed)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return option(flags, "DURATION", text, parser=read, **more)


TOKENIZER_NAMES: Final = {"tokenizer-path": "tokenizer"}
"""What other tools call the option."""


def argument(metavar: str, text: str, *, complete: Any = None) -> Any:
    """A word without a flag."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete)


def _named(folder: str) -> str:
    """A workspace that is named: the empty text, as of a variable that is not set, would be the current directory."""
    if not folder:
        raise UsageError("--workspace: is empty", hint=f"name a directory, or leave it out for {WORKSPACE}")
    return folder


def _matrix(default: str) -> Any:
    text = f"Matrix file, or the name of a shipped one ({default})."
    return option("-m --matrix", "FILE", text, complete=completion.matrices)


Workspace = Annotated[
    str,
    option(
        "-w --workspace",
        "DIR",
        "The workspace: directory of all results.",
        envvar="PIPELINE_WORKSPACE",
        callback=_named,
    ),
]
Matrix = Annotated[str, _matrix("pipeline matrix list")]
OptionalMatrix = Annotated[str | None, _matrix("pipeline matrix list")]
MatrixOrLatest = Annotated[str | None, _matrix("default: that of the latest run")]
Cells = Annotated[
    list[str] | None,
    option(
        "--cells",
        "PATTERN",
        "Only cells that match, e.g. 'qwen2*/fp8'; '!PATTERN' excludes cells; can be given several times.",
        complete=completion.cells,
    ),
]
Sets = Annotated[
    list[str] | None,
    option(
        "--set",
        "KEY=VALUE",
        "Change a setting, an axis or a recipe, e.g. settings.perf.max_tokens=64; can be given several times.",
    ),
]
Toolchain = Annotated[
    str | None,
    option(
        "--toolchain",
        "NAME",
        "Toolchain of cells whose matrix names none (default: the first that this machine has).",
        complete=completion.toolchains,
        envvar="PIPELINE_TOOLCHAIN",
    ),
]
Assume = Annotated[
    str | None,
    option(
        "--assume",
        "MACHINE",
        "Plan for another machine: tensorrt_llm==1.0.0,sm=90,gpus=8 (pipeline doctor prints such a line).",
    ),
]
Run = Annotated[
    str | None,
    option(
        "--run",
        "RUN",
        "Only this run: latest, latest~1, its name, id or the beginning of its id.",
        complete=completion.runs,
    ),
]
MeasuredRun = Annotated[
    str,
    argument(
        "RUN",
        "A run (latest, latest~1, a name, an id or its beginning), a report.json, or the result of a load run.",
        complete=completion.runs,
    ),
]
Server = Annotated[str, argument("NAME", "A managed server (pipeline serve ps).", complete=completion.servers)]
Allow = Annotated[
    str,
    option(
        "--allow",
        "NAME,...",
        "Compare even if these differ: workload, system, or single fields such as driver,protocol.",
    ),
]
Slo = Annotated[
    str | None,
    option(
        "--slo",
        "OBJECTIVES",
        "Such as ttft_p99=300ms; several with commas; a rate such as output_tps=100 is a minimum.",
    ),
]
MinAccuracy = Annotated[
    str | None,
    option(
        "--min-accuracy",
        "MINIMUM",
        "Least score: -1% (of the unquantized cell's score), 0.6, or contains:-1% for a score that is not the first.",
    ),
]
Objective = Annotated[
    Literal["throughput", "latency", "size"],
    option(
        "--objective",
        None,
        "What counts: throughput (most output tokens a second per GPU), latency (shortest median e2e) or size "
        "(smallest engine).",
    ),
]
Executor = Annotated[
    Literal["local", "ray", "slurm"] | None,
    option("--executor", None, "Where stages run: on this machine, or on a cluster (default: local)."),
]
RayAddress = Annotated[
    str | None,
    option("--ray-address", "HOST:PORT", "The Ray cluster (default: RAY_ADDRESS, or the one on this machine)."),
]
Progress = Annotated[
    Literal["auto", "live", "plain", "json", "quiet"],
    option(
        "--progress",
        None,
        "On stderr: a live picture, plain lines, JSON lines, or failures only; auto is live on a terminal.",
        envvar="PIPELINE_PROGRESS",
    ),
]
Output = Annotated[str | None, option("-o --output", "FILE", "Write there instead of to stdout.")]
Url = Annotated[str, option("-u --url", "URL", "Where the server is: HOST:PORT or http(s)://...")]
Model = Annotated[str, option("--model", "NAME", "Model to ask.")]
RequireSigned = Annotated[
    bool,
    switch(
        "--require-signed",
        "Refuse artifacts whose statement no trusted key has signed.",
        envvar="PIPELINE_REQUIRE_SIGNED",
    ),
]
TrustedKeys = Annotated[
    Path | None,
    option(
        "--trusted-keys",
        "DIR",
        "Directory of the public keys (*.pem, *.pub) whose signatures are trusted.",
        envvar="PIPELINE_TRUSTED_KEYS",
    ),
]
"""With RequireSigned, what `provenance.policy` takes."""
AllowOtherGpu = Annotated[
    bool,
    switch("--allow-other-gpu", "Also pull engines that were made on another GPU of the same compute capability."),
]


@dataclass(frozen=True, kw_only=True)
class Pulling:
    """What is pulled instead of being made."""

    remote: Annotated[
        str | None,
        option(
            "--remote",
            "URL",
            "Pull what this remote store has instead of making it (default: remote of the matrix).",
            envvar="PIPELINE_REMOTE",
        ),
    ] = None
    allow_other_gpu: AllowOtherGpu = False
    require_signed: RequireSigned = False
    trusted_keys: TrustedKeys = None

    def of(self, request: Request) -> Request:
        """`request` with what is said here; what is not stays as it is. Raises UsageError."""
        remote = self.remote
        if remote and "://" not in remote:
            remote = str(Path(remote).absolute())
        elif remote and urlsplit(remote).password:
            raise UsageError(
                "--remote: the password in it would be kept in the workspace",
                hint="put it where the URL's package looks for it: variables, ~/.netrc, a configuration file",
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
    """`function` as a command whose parameters that are a dataclass are typed as one option for each field."""
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
Verbose = Annotated[bool, switch("-v --verbose", "Show everything: all rows, notes and definitions.")]
_FORMAT = option("--format", None, "Output format.")
TextOrJson = Annotated[Literal["text", "json"], _FORMAT]
TableOrCsv = Annotated[Literal["table", "json", "csv"], _FORMAT]
TableFormat = Annotated[Literal["table", "json", "csv", "markdown"], _FORMAT]


SERVER_PANEL: Final = "The server"
_of_server: Final = partial(option, rich_help_panel=SERVER_PANEL)

Protocol = Annotated[
    Literal["grpc", "http", "openai"],
    _of_server(
        "-i --protocol", "NAME", "Protocol: grpc or http of Triton, or openai for any OpenAI-compatible server."
    ),
]
EndpointType = Annotated[
    Literal["chat", "completions"],
    _of_server("--endpoint-type", "NAME", "Endpoint of OpenAI: chat or completions."),
]
RequestTimeout = Annotated[
    float, duration("--request-timeout-s", "Timeout of one request, such as 90s or 5m.", rich_help_panel=SERVER_PANEL)
]


def without(function: Callable[..., Any], name: str) -> inspect.Signature:
    """The signature of a command without one of its parameters."""
    signature = inspect.signature(function, eval_str=True)
    return signature.replace(parameters=[each for each in signature.parameters.values() if each.name != name])


def request(
    matrix: str,
    cells: Sequence[str] | None,
    sets: Sequence[str] | None,
    until: str | None,
    toolchain: str | None,
    assume: str | None,
) -> Request:
    """What the options ask for. Raises UsageError for a matrix that is neither a file nor the name of a shipped one."""
    from trtllm_pipeline.orchestrate import find_matrix

    return Request(find_matrix(matrix), tuple(sets or ()), tuple(cells or ()), until, toolchain, assume)


def request_or_latest(
    ctx: typer.Context,
    store: Store | None,
    matrix: str | None,
    cells: Sequence[str] | None,
    sets: Sequence[str] | None,
    until: str | None,
    toolchain: str | None,
    assume: str | None,
) -> Request:
    """What the options ask for; without a matrix, what the workspace's latest run was asked for, with these changes."""
    if matrix is not None:
        return request(matrix, cells, sets, until, toolchain, assume)
    if store is None:
        raise UsageError("--matrix FILE is missing", hint="pipeline matrix init writes one to start from")
    from trtllm_pipeline.orchestrate import served_cell

    latest = served_cell.latest_request(store)
    if latest.toolchain is not None:  # the environment says what to take where nobody said anything
        toolchain = typed(ctx, "toolchain", toolchain)
    return latest.changed(Request(Path(), tuple(sets or ()), tuple(cells or ()), until, toolchain, assume))


def typed(ctx: typer.Context, name: str, value: str | None) -> str | None:
    """The value of an option, None where the environment gave it."""
    source = ctx.get_parameter_source(name)
    return None if source is not None and source.name == "ENVIRONMENT" else value


def request_of_cell(
    ctx: typer.Context,
    store: Store,
    matrix: str | None,
    cell: str,
    sets: Sequence[str] | None,
    toolchain: str | None,
) -> Request:
    """What selects a cell to serve: one of a matrix, or else of the workspace's latest run. Raises UsageError."""
    return request_or_latest(ctx, store, matrix, [cell], sets, None, toolchain, None)


def pair(option: str, text: str, sign: str) -> tuple[str, str]:
    """The two sides of NAME=VALUE. Raises UsageError."""
    name, found, value = text.partition(sign)
    if not found or not name or not value:
        raise UsageError(f"{option} {text}: expected NAME{sign}VALUE")
    return name, value


def typed_again(workspace: str) -> str:
    """The option that names the workspace in a command to be typed next; nothing where it is the default."""
    return "" if workspace == WORKSPACE else f" -w {shlex.quote(workspace)}"


def store_at(workspace: str) -> Store | None:
    """The workspace, or None when there is none yet; looking never makes one."""
    folder = Path(workspace)
    return Store(folder) if is_workspace(folder) else None


def known_store(workspace: str) -> Store:
    """The workspace. Raises UsageError when there is none yet."""
    store = store_at(workspace)
    if store is None:
        raise UsageError(
            f"{workspace}: there is no workspace",
            hint="pipeline run --matrix FILE makes one; or give --workspace DIR",
        )
    return store


def allowed(text: str) -> frozenset[str]:
    """The names of `--allow`. Raises UsageError."""
    from trtllm_pipeline.measure import GROUPS, NAMES

    found = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(found - NAMES - set(GROUPS))
    if unknown:
        raise UsageError(
            f"--allow: there is no {unknown[0]!r}", hint=f"{', '.join(GROUPS)}, or of them: {', '.join(sorted(NAMES))}"
        )
    return found


def empty_folder(given: str) -> Path:
    """The directory that `--output-dir` names, made where it is missing. Raises UsageError when it cannot be filled."""
    if not given:  # as of a variable that is not set: it would be the current directory
        raise UsageError("--output-dir: is empty", hint="name a new directory")
    folder = Path(given).absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(
                f"--output-dir {folder}: is not an empty directory", hint="name a new one; nothing is overwritten"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"--output-dir {folder}: cannot be written: {error.strerror}", hint="name a directory that you may write"
        ) from error
    return folder


def positive(option: str, value: float) -> float:
    """`value`, if it is a positive number. Raises UsageError."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option}: expected a positive number, got {value:g}")
    return value


def numbers(option: str, text: str | None, kind: Callable[[str], N], most: N) -> tuple[N, ...]:
    """`1,4` as positive numbers up to `most`, empty for None. Raises UsageError."""
    found: list[N] = []
    for part in [] if text is None else text.split(","):
        try:
            value = kind(part if "_" not in part and "+" not in part else "0")
        except ValueError:
            value = kind("0")
        if not 0 < value <= most:
            raise UsageError(
                f"{option}: expected {_POSITIVE[kind]} up to {most:.0f}, got {part.strip()!r}",
                hint=f"levels are separated by commas: {option} 1,4",
            )
        if value in found:
            raise UsageError(f"{option} {text}: has a value twice", hint="--repeats measures every level again")
        found.append(value)
    return tuple(found)


def counts(option: str, text: str | None, most: int) -> tuple[int, ...]:
    """As `numbers`, and FIRST:LAST[:STEP] as the numbers from FIRST to LAST. Raises UsageError."""
    parts = []
    for part in [] if text is None else text.split(","):
        if ":" not in part:
            parts.append(part)
            continue
        words = [int(word) if word.isdecimal() and len(word) < 10 else 0 for word in part.strip().split(":")]
        first, last, step = (*words, 1)[:3] if len(words) < 4 else (0, 0, 0)
        values = range(first, last + 1, step) if first and step else range(0)
        if not 0 < len(values) <= _MOST_LEVELS:
            raise UsageError(
                f"{option}: expected FIRST:LAST:STEP with at most {_MOST_LEVELS} levels, got {part.strip()!r}",
                hint=f"{option} 2:8:2 is {option} 2,4,6,8",
            )
        parts += map(str, values)
    return numbers(option, None if text is None else ",".join(parts), int, most)


def pairs(option: str, texts: Sequence[str] | None, sign: str) -> dict[str, Any]:
    """NAME and VALUE of an option that is given several times, a value as JSON where it is any. Raises UsageError."""
    from trtllm_pipeline.base import decode

    found = {}
    for text in texts or ():
        name, value = pair(option, text, sign)
        try:
            found[name] = decode(value)
        except ValueError:
            found[name] = value
    return found


def folder(option: str, path: Path | None) -> Path | None:
    """`path`, if it is a directory or None. Raises UsageError."""
    if path is not None and not path.is_dir():
        raise UsageError(f"{option} {path}: there is no such directory")
    return path
