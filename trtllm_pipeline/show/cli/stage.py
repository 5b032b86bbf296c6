"""`pipeline stage download|convert|build|...`: one stage, for cells of a matrix or for explicit files.

`__getattr__` creates the command of a stage. Its options are derived from the toolchains' tables (`stage_options`).
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.base import MatrixError, Scope, UsageError, allow_open_files, probe, user_files
from trtllm_pipeline.base import gpus as devices
from trtllm_pipeline.orchestrate import by_hand, provenance
from trtllm_pipeline.show.cli import options, stage_options
from trtllm_pipeline.show.cli.output import emit_as, note
from trtllm_pipeline.show.cli.stage_options import FETCHING, OF_ANOTHER, SHARED, flag, flag_of
from trtllm_pipeline.tensorrt import Stage, StageContext, companions
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import params as stage_params

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate import Plan, Request, Store


def __getattr__(name: str) -> Callable[..., int]:
    shown = toolchains.with_command().get(name)
    if shown is None:
        raise AttributeError(name)

    def command(**values: Any) -> int:
        return _run(name, {each: value for each, value in values.items() if value not in (None, [])})

    vars(command)["__signature__"] = stage_options.signature(name, stage_options.of_name(name))
    matrix = "--matrix quickstart --cells 'smollm2*/int8_wo/*/bs4'"
    lines = (*shown.examples, matrix)
    command.__doc__ = (
        f"{shown.sentence}\n\n"
        "With --matrix, runs for the selected cells in the workspace, after all earlier stages. Without --matrix, uses only "
        "the given files.\n\nexamples:\n" + "\n".join(f"  pipeline stage {name} {line}" for line in lines)
    )
    return command


def _run(name: str, typed: dict[str, Any]) -> int:
    stage = _stage(name, typed.get("toolchain"))
    if typed.get("matrix") is not None:
        return _for_cells(stage, typed)
    if only := [option for each, option in (("cells", "--cells"), ("sets", "--set")) if each in typed]:
        raise UsageError(f"{' and '.join(only)} need a matrix", hint="add --matrix FILE")
    values = stage_options.values(stage, typed)
    settled: dict[str, Any] = {"source": {}} if name in FETCHING else {}
    _refuse(
        name,
        _wrong_paths(stage, typed) + stage_options.faults(stage.params, {**settled, **values}),
        ", or use a matrix: --matrix FILE --cells ID",
    )
    if name in FETCHING:
        values |= _download(stage, typed.get("model"), typed["output_dir"], offline=values.get("offline", False))
    try:
        params = stage_params.load(stage.params, values)
    except ValueError as error:
        raise UsageError(
            f"pipeline stage {name}: {error}", hint=f"list all options with pipeline stage {name} --help"
        ) from error
    return _by_hand(stage, typed, params)


def _refuse(name: str, wrong: list[str], or_else: str = "") -> None:
    """Raise UsageError if anything is wrong."""
    if wrong:
        hint = f"list all options with pipeline stage {name} --help{or_else}"
        raise UsageError(f"pipeline stage {name}: " + "\n  ".join(wrong), hint=hint)


def _stage(name: str, toolchain: str | None) -> Stage:
    """The stage of the named toolchain, or of the first toolchain that has it.

    Toolchains usable on this machine come first, then the embedded one, which any machine can install.
    """
    if toolchain is not None:
        return toolchains.load(toolchain).stage(name)

    known = [toolchains.load(each) for each in toolchains.names()]
    usable = [each for each in known if each.missing(probe.this_machine()) is None]
    for each in (*usable, *reversed(known)):
        for stage in each.stages:
            if stage.name == name:
                return stage
    raise UsageError(f"no toolchain has a stage {name!r}")


def _for_cells(stage: Stage, typed: dict[str, Any]) -> int:
    from trtllm_pipeline.orchestrate import Store, flow
    from trtllm_pipeline.show.progress import observer

    service = stage.scope is Scope.SERVICE
    shared = {name for name, _, _ in SHARED}
    if more := [name for name in typed if name not in shared and not (service and not name.startswith("in_"))]:
        raise UsageError(
            f"{flag_of(more[0])} cannot be combined with --matrix", hint=stage_options.instead(stage, more[0])
        )
    until = None if service else stage.name
    request = options.request(
        typed["matrix"], typed.get("cells"), typed.get("sets"), until, typed.get("toolchain"), assume=None
    )
    if service:
        stage, values, until = _of_one_cell(stage, typed, request)
        request = replace(request, until=until)
    store = Store(Path(typed["workspace"]))
    plan, outcome = flow.bring_up_to_date(request, store, observer(sys.stderr, mode="auto"))
    if outcome.exit_code:
        return outcome.exit_code
    if service:
        return _serve_cell(stage, typed, values, plan, store)
    folders = {
        cell.id: str(store.folder(until, located.fingerprint) / "out")
        for cell in plan.feasible
        for located in (plan.stage_runs[run] for run in plan.by_cell[cell.id])
        if located.stage.name == until
    }
    data = {"schema": 1, "stage": stage.name, "cells": folders}
    emit_as(typed["format"], data, text=lambda _: "\n".join(f"{cell}\t{folder}" for cell, folder in folders.items()))
    return 0


def _of_one_cell(stage: Stage, typed: Mapping[str, Any], request: Request) -> tuple[Stage, dict[str, Any], str | None]:
    """The service stage of the selected cell's toolchain, its typed options, and the last stage that it depends on.

    Raises UsageError.
    """
    from trtllm_pipeline.orchestrate import machine_and_cells

    machine, cells = machine_and_cells(request)
    able = [cell for cell in cells if cell.reason is None]
    if len(able) > 1:
        ids = ", ".join(cell.id for cell in able[:8]) + (", ..." if len(able) > 8 else "")
        raise UsageError(
            f"{len(able)} cells are selected, but launch starts one server", hint=f"--cells ID, one of {ids}"
        )
    if not able:
        return stage, {}, None  # reported later, with the reasons
    toolchain = toolchains.load(able[0].toolchain)
    stage = toolchain.stage(stage.name)
    read = {upstream for place in stage.inputs for upstream in stage.upstream(place)}
    until = [each.name for each in toolchain.stages if each.name in read and each.applies(able[0], machine)][-1]
    values = stage_options.values(stage, typed)
    _refuse(stage.name, stage_options.faults(stage.params, values))
    return stage, values, until


def _serve_cell(stage: Stage, typed: dict[str, Any], values: Mapping[str, Any], plan: Plan, store: Store) -> int:
    """Serve the plan's only cell from its artifacts, with the matrix's settings overridden by `values`."""
    (cell,) = plan.feasible
    made = {plan.stage_runs[run].stage.name: plan.stage_runs[run] for run in plan.by_cell[cell.id]}
    for place in stage.inputs:
        upstream_artifact = next((made[upstream] for upstream in stage.upstream(place) if upstream in made), None)
        if place == toolchains.DRAFTER:
            upstream_artifact = next(
                (plan.stage_runs[run.inputs[place]] for run in made.values() if place in run.inputs), None
            )
        if upstream_artifact is None:
            continue  # this cell has no such option
        typed[f"in_{place}"] = str(store.folder(upstream_artifact.stage.name, upstream_artifact.fingerprint) / "out")
    of_matrix = replace(stage.read(cell), restarts=stage.params().restarts)
    return _by_hand(stage, typed, replace(of_matrix, **values))


def _download(stage: Stage, model: str | None, output_dir: str, *, offline: bool) -> dict[str, Any]:
    from trtllm_pipeline.models import MODEL
    from trtllm_pipeline.models import sources as model_sources
    from trtllm_pipeline.orchestrate import recipe_files

    if model is None:
        command = f"pipeline stage {stage.name}"
        raise UsageError(f"{command}: no model given", hint=f"{command} {stage.examples[0]}")
    sources, form = recipe_files.sources_of(model, Path()), stage.name if stage.name in companions.NAMES else None
    options.empty_folder(output_dir)  # before a hub request
    source = model_sources.resolve(sources, prefer="auto", offline=offline, base_dir=Path(), form=form or MODEL)
    kind, *_ = source
    note(f"{kind}: {source[kind]}" + (f", revision {source['revision']}" if "revision" in source else ""))
    folder = model_sources.local_folder(sources, Path())
    return {"source": source, "folder": None if folder is None else str(folder), "form": form}


def _by_hand(stage: Stage, typed: Mapping[str, Any], params: Any) -> int:
    """Run one stage interactively: print the result paths, or keep a service until Ctrl-C. Logs go to stderr."""
    if typed.get("print"):
        return _print_command(stage, typed, params)
    if stage.scope is not Scope.ARTIFACT:
        allow_open_files()
    service, stdout = stage.scope is Scope.SERVICE, sys.stdout
    policy = provenance.policy()

    def announce(endpoints: Mapping[str, str]) -> None:
        with redirect_stdout(stdout):
            emit_as(typed["format"], endpoints, text=_endpoints)
            stdout.flush()
        if typed["format"] == "text":
            note(f"ready; Ctrl-C stops it. Example:\n  {_example(endpoints)}")

    with by_hand.scratch(stage.name) as scratch:
        context = _context(stage, typed, params, scratch)
        if policy.required:
            provenance.require_folders(context.inputs.values(), policy)
        with by_hand.when_ready(context, announce) if service else nullcontext(), redirect_stdout(sys.stderr):
            by_hand.run(stage, context, lambda command: note(shlex.join(command)))
    if service:
        return 0
    emit_as(
        typed["format"],
        {"schema": 1, "stage": stage.name, "output_dir": str(context.out)},
        text=lambda _: str(context.out),
    )
    if stage.name == "perf" and typed["format"] == "text":
        from trtllm_pipeline.show.report.load_tables import to_text
        from trtllm_pipeline.tensorrt import perf

        note(to_text(perf.measured(context)))
    return 0


def _print_command(stage: Stage, typed: Mapping[str, Any], params: Any) -> int:
    """Print the command that starts a server in a shell, at the requested ports, else at the usual or at free ones."""
    from trtllm_pipeline.tensorrt import USUAL_PORTS, launch, named, triton_server

    assert stage.starter is not None
    usual = {
        f"{name}_port": port for name, port in USUAL_PORTS._asdict().items() if not getattr(params, f"{name}_port")
    }
    wanted = params if triton_server.busy_ports(usual.values(), params.host) else replace(params, **usual)
    with by_hand.scratch(stage.name) as scratch:
        context = _context(stage, typed, params, scratch)
        command = named(stage.starter)(context).pasted(params.host, at := launch.ports(wanted))
        gpus = [gpu.uuid for gpu in probe.this_machine().gpus]
        leased = gpus[: stage.gpus(context)]
    mask = (
        {devices.MASK_VARIABLE: ",".join(leased)}
        if leased not in ([], gpus) and devices.MASK_VARIABLE not in os.environ
        else {}
    )
    shell = command.to_shell(mask)
    data = {"schema": 1, "argv": list(command.words), "ports": at._asdict(), "shell": shell}
    emit_as(typed["format"], data, text=lambda _: shell)
    return 0


def _wrong_paths(stage: Stage, typed: Mapping[str, Any]) -> list[str]:
    """Problems with the inputs and files of a stage: missing or unreadable."""
    inputs = {name: typed.get(f"in_{name}") for name in stage.inputs}
    wrong = [
        f"{flag(name)} is required" for name, path in inputs.items() if path is None and name not in stage.optional
    ]
    wrong += [
        f"{flag(name)} is required: the same file or builtin:NAME as for {of}"
        for (each, name), of in OF_ANOTHER.items()
        if each == stage.name and f"file_{name}" not in typed
    ]
    for name, path in (*inputs.items(), *_files(stage, typed).items()):
        if path and name in inputs and name != "service":
            exists = os.path.exists(path)
            wrong += [] if exists else [f"{flag(name)}: {path} does not exist"]
        elif path:
            try:
                user_files.check(Path(path))
            except MatrixError as error:
                wrong.append(f"{flag(name)}: {error.message}")
    if typed.get("output_dir") is None and stage.scope is not Scope.SERVICE:
        wrong.append("--output-dir is required")
    return wrong


def _context(stage: Stage, typed: Mapping[str, Any], params: Any, scratch: Path) -> StageContext[Any]:
    output = typed.get("output_dir")
    return StageContext(
        params=params,
        inputs={name: Path(typed[f"in_{name}"]).absolute() for name in stage.inputs if f"in_{name}" in typed},
        files={name: Path(path).absolute() for name, path in _files(stage, typed).items()},
        out=scratch / "out" if output is None else options.empty_folder(output),
        attempt=scratch.absolute(),
    )


def _files(stage: Stage, typed: Mapping[str, Any]) -> dict[str, str]:
    """Paths of the files: as typed, a `builtin:NAME`, or the default of a matrix."""
    if not stage.file_names:
        return {}
    from trtllm_pipeline.models import dataset_file
    from trtllm_pipeline.orchestrate import Settings

    defaults = getattr(Settings(), stage.section or stage.name, None)
    given = {name: typed.get(f"file_{name}") or getattr(defaults, name, None) for name in stage.file_names}
    return {name: str(dataset_file.data_file(each, Path())) for name, each in given.items() if each is not None}


def _endpoints(service: Mapping[str, str]) -> str:
    named = ("url", "model") if service["kind"] == "openai" else ("http", "grpc", "metrics")
    return "\n".join(f"{name:<8} {service[name]}" for name in named)


def _example(service: Mapping[str, str]) -> str:
    if service["kind"] == "openai":
        body = {"model": service["model"], "prompt": "The capital of France is", "max_tokens": 8}
        return (
            f"curl -s {service['url']}/v1/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(json.dumps(body))}"
        )
    body = {"text_input": "The capital of France is", "max_tokens": 8, "bad_words": "", "stop_words": ""}
    return f"curl -s http://{service['http']}/v2/models/{service['model']}/generate -d {shlex.quote(json.dumps(body))}"
