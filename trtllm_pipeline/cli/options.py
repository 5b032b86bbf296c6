"""Options that several commands share: one spelling and one help for each, as annotated types of Typer commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_pipeline.cli import completion
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.flow import Request, read_request
from trtllm_pipeline.store.store import Store

WORKSPACE = ".pipeline"

Workspace = Annotated[
    str,
    typer.Option("-w", "--workspace", metavar="DIR", envvar="PIPELINE_WORKSPACE", help="folder of all results"),
]
Matrix = Annotated[
    str,
    typer.Option(
        "-m",
        "--matrix",
        metavar="FILE",
        help="matrix file; pipeline matrix init writes one to start from",
        autocompletion=completion.matrices,
    ),
]
MatrixOrLatest = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--matrix",
        metavar="FILE",
        help="matrix file (default: that of the latest run)",
        autocompletion=completion.matrices,
    ),
]
Cells = Annotated[
    list[str] | None,
    typer.Option(
        "--cells",
        metavar="PATTERN",
        help="only cells like this, e.g. 'qwen2*/fp8'; '!PATTERN' leaves cells out; can be given several times",
        autocompletion=completion.cells,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="change a setting, an axis or a recipe, e.g. settings.perf.max_tokens=64; can be given several times",
    ),
]
Toolchain = Annotated[
    str | None,
    typer.Option(
        "--toolchain",
        metavar="NAME",
        envvar="PIPELINE_TOOLCHAIN",
        help="toolchain of cells whose matrix names none (default: the first that this machine has)",
        autocompletion=completion.toolchains,
    ),
]
Assume = Annotated[
    str | None,
    typer.Option(
        "--assume",
        metavar="MACHINE",
        help="plan for another machine: tensorrt_llm==1.0.0,sm=90,gpus=8,gpu_memory_gib=80 (pipeline help doctor)",
    ),
]
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="only this run: an id or its beginning, latest, latest~1",
        autocompletion=completion.runs,
    ),
]
Allow = Annotated[
    str,
    typer.Option(
        "--allow",
        metavar="NAMES",
        help="compare although these differ: workload, system, or single fields of them, such as driver,kernel,protocol",
    ),
]
MeasuredRun = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="a run (latest, latest~1, an id or its beginning), a report.json, or what a load left",
        autocompletion=completion.runs,
    ),
]
Output = Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="write there instead of to stdout")]
Url = Annotated[str, typer.Option("-u", "--url", metavar="URL", help="where the server is: HOST:PORT or http(s)://...")]
Model = Annotated[str, typer.Option("--model", metavar="NAME", help="model to ask")]
Yes = Annotated[bool, typer.Option("--yes/--no-yes", "-y", help="do not ask")]
TextOrJson = Annotated[Literal["text", "json"], typer.Option("--format", help="format of what is printed")]


def add_workspace(parser: argparse.ArgumentParser) -> None:
    """`--workspace DIR`."""
    parser.add_argument(
        "-w",
        "--workspace",
        metavar="DIR",
        type=_folder,
        default=WORKSPACE,
        help=f"folder of all results (default {WORKSPACE})",
    )


def _folder(text: str) -> str:
    if not text:
        raise UsageError("--workspace: is empty", hint=f"name a folder, or leave it out for {WORKSPACE}")
    return text


def allowed(text: str) -> frozenset[str]:
    """The names of `--allow`. Raises UsageError."""
    from trtllm_pipeline.bench.conditions import GROUPS, NAMES

    found = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(found - NAMES - set(GROUPS))
    if unknown:
        raise UsageError(
            f"--allow: there is no {unknown[0]!r}", hint=f"{', '.join(GROUPS)}, or of them: {', '.join(sorted(NAMES))}"
        )
    return found


def add_format(parser: argparse.ArgumentParser, *formats: str) -> None:
    """`--format`, the first of `formats` being the default."""
    parser.add_argument("--format", choices=formats, default=formats[0], help=f"default {formats[0]}")


def add_matrix(parser: argparse.ArgumentParser, *, cells: bool = True) -> None:
    """What selects cells of a matrix; without `--cells` where a command names its cell itself."""
    parser.add_argument("-m", "--matrix", metavar="FILE", help="matrix file")
    if cells:
        parser.add_argument(
            "--cells",
            metavar="PATTERN",
            action="append",
            default=[],
            help="only cells like this, e.g. 'qwen2*/fp8'; '!PATTERN' leaves cells out; can be given several times",
        )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="sets",
        help="change a setting, an axis or a recipe, e.g. settings.perf.concurrency=[1,8]",
    )
    parser.add_argument(
        "--toolchain",
        metavar="NAME",
        help="toolchain of cells whose matrix names none (default: the first that this machine has)",
    )


def add_assume(parser: argparse.ArgumentParser) -> None:
    """`--assume MACHINE`."""
    parser.add_argument(
        "--assume",
        metavar="MACHINE",
        help="plan for another machine: tensorrt_llm==1.0.0,sm=90,gpus=8,gpu_memory_gib=80 (`pipeline doctor --help`)",
    )


def request_of(args: argparse.Namespace, *, until: str | None = None) -> Request:
    """The request the options make. Raises UsageError without a matrix."""
    if args.matrix is None:
        raise UsageError(
            f"pipeline {args.command}: --matrix FILE is missing", hint="pipeline matrix init writes one to start from"
        )
    from trtllm_pipeline.config.matrices import find_matrix

    assume = getattr(args, "assume", None)
    return Request(find_matrix(args.matrix), tuple(args.sets), tuple(args.cells), until, args.toolchain, assume)


def request_or_latest(args: argparse.Namespace, store: Store | None) -> Request:
    """The request the options make, or without a matrix that of the workspace's latest run."""
    if args.matrix is not None or store is None:
        return request_of(args)
    runs = store.index.runs()
    if not runs:
        raise UsageError(f"{store.workspace}: there was no run yet", hint="give --matrix FILE")
    request = read_request(store.runs_dir / runs[0].id / "request.json")
    return Request(
        request.matrix,
        (*request.sets, *args.sets),
        tuple(args.cells) or request.cells,
        getattr(args, "until", None) or request.until,
        args.toolchain or request.toolchain,
        getattr(args, "assume", None) or request.assume,
    )


def open_store(args: argparse.Namespace | str) -> Store | None:
    """The workspace, or None when there is none yet; looking never makes one."""
    folder = Path(args if isinstance(args, str) else args.workspace)
    return Store(folder) if (folder / "state.db").exists() or (folder / "store").is_dir() else None


def existing_store(args: argparse.Namespace) -> Store:
    """The workspace. Raises UsageError when there is none yet."""
    store = open_store(args)
    if store is None:
        raise UsageError(
            f"{args.workspace}: there is no workspace",
            hint="pipeline run --matrix FILE makes one; or give --workspace DIR",
        )
    return store
