"""`pipeline download|convert|build|...`: one stage, for cells of a matrix or for explicit files."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.domain import Scope
from trtllm_pipeline.errors import StageError, UsageError
from trtllm_pipeline.processes.process import allow_open_files
from trtllm_pipeline.stages import verbs
from trtllm_pipeline.stages.base import SERVICE_FILE, Stage, Work
from trtllm_pipeline.toolchains import base as toolchains
from trtllm_pipeline.worker import run_program, write_job

if TYPE_CHECKING:
    from trtllm_pipeline.planning.plan import Plan
    from trtllm_pipeline.store.store import Store


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of one stage: those of its cells, and those of its own program."""
    name = str(parser.get_default("command"))
    stage = _stage(name, _toolchain_named(parser.get_default("words") or []))
    parser.description = (
        f"{stage.summary[0].upper()}{stage.summary[1:]}.\n\n"
        f"With --matrix: for the cells it selects, with all that comes before, in the workspace.\n"
        f"Without: on the files you name, nothing else is read or written."
    )
    words = [f"{verbs.flag(each)} PATH" for each in stage.inputs]
    words += [f"{verbs.flag(option.name)} {option.type.upper()}" for option in stage.options if option.required]
    if stage.scope is not Scope.SERVICE:
        words.append("--output-dir DIR")
    parser.epilog = (
        f"examples:\n  pipeline {name} --matrix matrices/quickstart.yaml --cells 'smollm2*/int8_wo/*/bs4'\n"
        f"  pipeline {name} {' '.join(words)}"
    )
    options.add_matrix(parser)
    options.add_workspace(parser)
    options.add_format(parser, "text", "json")
    verbs.configure(parser, stage)


def run(args: argparse.Namespace) -> int:
    """Run the stage, for cells or for files."""
    stage = _stage(args.command, args.toolchain)
    if args.matrix is not None:
        return _for_cells(args, stage)
    return _by_hand(args, stage)


def _toolchain_named(words: Sequence[str]) -> str | None:
    """The toolchain a command line names, which decides the other options it may have."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--toolchain", nargs="?")
    found: str | None = finder.parse_known_args(words)[0].toolchain
    return found


def _stage(name: str, toolchain: str | None) -> Stage:
    """The stage of the toolchain that is named, or else of the first that has it.

    Those this machine can use come first, then the embedded one, which any machine can have.
    """
    if toolchain is not None:
        return toolchains.load(toolchain).stage(name)
    from trtllm_pipeline.machine.probe import machine

    known = [toolchains.load(each) for each in toolchains.names()]
    usable = [each for each in known if each.missing(machine()) is None]
    for each in (*usable, *reversed(known)):
        for stage in each.stages:
            if stage.name == name:
                return stage
    raise UsageError(f"no toolchain of this release has a stage {name!r}")


def _for_cells(args: argparse.Namespace, stage: Stage) -> int:
    from trtllm_pipeline import flow
    from trtllm_pipeline.progress import observer
    from trtllm_pipeline.store.store import Store

    service = stage.scope is Scope.SERVICE
    until = stage.upstream("repository")[0] if service else stage.name
    request = options.request_of(args, until=until)
    if service:
        machine = flow.machine_of(request)
        cells = [cell.id for cell in flow.select_cells(request, flow.load(request), machine) if cell.reason is None]
        if len(cells) > 1:
            raise UsageError(
                f"{len(cells)} cells are selected, a server is launched for one",
                hint="--cells ID; one of " + ", ".join(cells[:8]) + (", ..." if len(cells) > 8 else ""),
            )
    store = Store(Path(args.workspace))
    plan, outcome = flow.bring_up_to_date(request, store, observer(sys.stderr, mode="auto"))
    if outcome.exit_code:
        return outcome.exit_code
    if service:
        return _serve_cell(args, plan, store)
    folders = {
        cell.id: str(store.folder(until, found.fingerprint) / "out")
        for cell in plan.feasible
        for found in (plan.stage_runs[run] for run in plan.by_cell[cell.id])
        if found.stage.name == until
    }
    if args.format == "json":
        emit_json({"schema": 1, "stage": stage.name, "cells": folders})
    else:
        for cell, folder in folders.items():
            emit(f"{cell}\t{folder}")
    return 0


def _serve_cell(args: argparse.Namespace, plan: Plan, store: Store) -> int:
    """Serve the plan's one cell by hand: what its stages left and the matrix's settings are as if they had been typed."""
    (cell,) = plan.feasible
    # The cell's own toolchain may be another than the one that the command line was read for.
    stage = toolchains.load(cell.toolchain).stage(args.command)
    made = {plan.stage_runs[run].stage.name: plan.stage_runs[run] for run in plan.by_cell[cell.id]}
    for name in stage.inputs:
        found = next(made[upstream] for upstream in stage.upstream(name) if upstream in made)
        setattr(args, f"in_{name}", str(store.folder(found.stage.name, found.fingerprint) / "out"))
    settings = cell.settings["serve"]
    for option in stage.options:
        typed, value = getattr(args, f"opt_{option.name}", None), settings.get(option.name)
        if typed is None and value is not None:
            typed = json.dumps(value) if option.type == "json" else str(value)
        setattr(args, f"opt_{option.name}", typed)
    return _by_hand(args, stage)


def _program(stage: Stage, work: Work) -> None:
    if stage.program is not None:
        run_program(stage.program, stage.name, work)


def _commands(stage: Stage, work: Work) -> None:
    """Run what other programs do of a stage; their output is the log. Raises StageError when one fails."""
    if stage.commands is None:
        return
    import subprocess

    from trtllm_pipeline.machine.probe import machine

    write_job(stage.name, stage.program, work)  # which helpers of ours among them read
    for command in stage.commands(work, machine()):
        note(shlex.join(command))
        code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
        if code:
            raise StageError(f"{stage.name}: {command[0]} ended with exit code {code}; what it said is above")


def _by_hand(args: argparse.Namespace, stage: Stage) -> int:
    """Run for a person: say where the results are, or keep a service until Ctrl-C. The program's own log is for stderr."""
    _find_files(args, stage)
    if stage.scope is not Scope.ARTIFACT:
        allow_open_files()
    with _scratch(stage.name) as scratch:
        if stage.scope is Scope.SERVICE:
            args.output_dir = args.output_dir or str(scratch / "out")
        work = verbs.to_work(stage, args, scratch)
        if stage.scope is Scope.SERVICE:
            with _announced_when_ready(work, sys.stdout, as_json=args.format == "json"), redirect_stdout(sys.stderr):
                _program(stage, work)
            return 0
        with redirect_stdout(sys.stderr):
            _commands(stage, work)
            _program(stage, work)
    if args.format == "json":
        emit_json({"schema": 1, "stage": stage.name, "output_dir": str(work.out)})
    else:
        emit(str(work.out))
    return 0


@contextmanager
def _scratch(name: str) -> Iterator[Path]:
    """A folder for the time being. It stays where an error names a log in it."""
    folder = Path(tempfile.mkdtemp(prefix=f"pipeline-{name}-"))
    kept = False
    try:
        yield folder
    except StageError as error:
        kept = error.log is not None and error.log.is_relative_to(folder)
        raise
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _find_files(args: argparse.Namespace, stage: Stage) -> None:
    """Put paths for `builtin:NAME`, and where nothing was typed, the file that a matrix would take."""
    from trtllm_pipeline.config.models import Settings
    from trtllm_pipeline.hub.dataset_file import data_file

    defaults = getattr(Settings(), stage.section or stage.name, None)
    for name in stage.file_names:
        given = getattr(args, f"file_{name}") or getattr(defaults, name, None)
        if given is not None:
            setattr(args, f"file_{name}", str(data_file(str(given), Path())))


def _example(service: Mapping[str, str]) -> str:
    """A command line that asks the service."""
    if service["kind"] == "openai":
        body = {"model": service["model"], "prompt": "The capital of France is", "max_tokens": 8}
        return (
            f"curl -s {service['url']}/v1/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))}"
        )
    body = {"text_input": "The capital of France is", "max_tokens": 8, "bad_words": "", "stop_words": ""}
    return f"curl -s http://{service['http']}/v2/models/{service['model']}/generate -d {shlex.quote(json.dumps(body))}"


@contextmanager
def _announced_when_ready(work: Work, stream: TextIO, *, as_json: bool) -> Iterator[None]:
    """Print the endpoints to `stream` as soon as the service has written them."""

    def look(_signal: int, _frame: FrameType | None) -> None:
        path = work.attempt / SERVICE_FILE
        if not path.exists():
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return
        service = json.loads(path.read_text(encoding="utf-8"))
        with redirect_stdout(stream):
            if as_json:
                emit_json(service)
            else:
                named = ("url", "model") if service["kind"] == "openai" else ("http", "grpc", "metrics")
                emit("\n".join(f"{name:<8} {service[name]}" for name in named))
            stream.flush()
        if not as_json:
            note("ready; Ctrl-C stops it. For instance:")
            note(f"  {_example(service)}")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the handler goes: an alarm that nobody handles kills
        signal.signal(signal.SIGALRM, before)
