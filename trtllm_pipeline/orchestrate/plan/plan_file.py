"""The plan as a file: the output of `pipeline plan --format json`, and `plan.json` of every run.

See `docs/reference/formats.md`. Reading it returns an `Outline`: cells and stage runs without recipes, settings and
command lines. That is enough for status, logs and reports, so they do not read the matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import (
    Cell,
    CellId,
    Fingerprint,
    Json,
    Scope,
    SettingChange,
    StageRunId,
    StateError,
    in_flow_order,
    reading,
    user_files,
    writing,
)
from trtllm_pipeline.models import shown
from trtllm_pipeline.orchestrate.memory.estimates import Estimate, Need
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun
from trtllm_pipeline.tensorrt import JOB, OUT, SERVICE_FILE, StageContext
from trtllm_pipeline.tensorrt import catalog as toolchains

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine

SCHEMA: Final = 1
NAME: Final = "plan.json"


@dataclass(frozen=True, slots=True)
class OutlineRun:
    """One stage run."""

    id: StageRunId
    stage: str
    fingerprint: Fingerprint
    scope: Scope
    inputs: tuple[StageRunId, ...]
    after: tuple[StageRunId, ...]
    cells: tuple[CellId, ...]

    @property
    def needs(self) -> tuple[StageRunId, ...]:
        """Stage runs that must succeed before this one starts."""
        return (*self.inputs, *self.after)


@dataclass(frozen=True, slots=True)
class OutlineCell:
    """One cell. `stage_runs` are in the order of the flow, and empty for an infeasible cell, see `reason`."""

    id: CellId
    axes: Mapping[str, Json]
    reason: str | None
    stage_runs: tuple[StageRunId, ...]
    changes: tuple[SettingChange, ...] = ()
    about: Mapping[str, Json] = field(default_factory=dict)
    """For reports: the setting `gpu_hour`, `numerics`, the meaning of its precision, and `gpus` if not tp * pp."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Cells and stage runs of a plan, as needed for status and reports. It cannot be run."""

    cells: tuple[OutlineCell, ...]
    stage_runs: Mapping[StageRunId, OutlineRun]

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of all stages, in the order of the flow."""
        of_cells = {cell.id: cell.stage_runs for cell in self.cells}
        return in_flow_order(
            ((run.stage, run.cells[0]) for run in self.stage_runs.values()),
            lambda cell: [self.stage_runs[run].stage for run in of_cells.get(cell, ())],
        )


def axes(cell: Cell) -> dict[str, Json]:
    """A cell's values by axis. Axes over settings are only in its id, as `key=value`."""
    settings = dict(part.split("=", 1) for part in cell.id.split("/") if "=" in part)
    return {
        "model": cell.model,
        "toolchain": cell.toolchain,
        "precision": shown(cell.precision, cell.recipe.get("quantization")),
        "tp": cell.tp,
        "pp": cell.pp,
        **({"ep": cell.ep} if cell.ep > 1 else {}),
        **({"dp": cell.dp} if cell.dp > 1 else {}),
        "max_batch_size": cell.max_batch_size,
        "isl": cell.isl,
        "osl": cell.osl,
        **({} if cell.gpu is None else {"gpu": cell.gpu}),
        **settings,
    }


def about(cell: Cell) -> dict[str, Json]:
    toolchain = toolchains.load(cell.toolchain)
    known = None if cell.reason is not None else asdict(toolchain.numerics(cell))
    gpus = {} if (number := toolchain.gpus(cell)) == cell.tp * cell.pp else {"gpus": number}
    return {"gpu_hour": cell.settings["cost"]["gpu_hour"], "numerics": known, **gpus}


def outline(plan: Plan) -> Outline:
    return Outline(
        tuple(
            OutlineCell(cell.id, axes(cell), cell.reason, plan.by_cell[cell.id], cell.changes, about(cell))
            for cell in plan.cells
        ),
        {
            run.id: OutlineRun(
                run.id,
                run.stage.name,
                run.fingerprint,
                run.stage.scope,
                tuple(run.inputs.values()),
                run.after,
                tuple(run.cells),
            )
            for run in plan.stage_runs.values()
        },
    )


def plan_lines(
    plan: Plan,
    *,
    present: Collection[StageRunId],
    to_run: Collection[StageRunId],
    reasons: Mapping[StageRunId, str],
    times: Callable[[StageRun], Estimate | None],
    commands: Callable[[StageRun], Sequence[Sequence[str]]],
    needs: Callable[[StageRun], Sequence[Need]] = lambda _run: (),
    pulls: Mapping[StageRunId, int] = MappingProxyType({}),
    run_id: str | None = None,
) -> Iterator[str]:
    """The plan as lines of JSON text, one for each cell and each stage run, so that large plans are written incrementally.

    `commands` returns a stage run's command lines, `times` its milliseconds, `needs` its memory, `pulls` the bytes to
    pull. `run_id` is None if nothing was run. In the plan of a run, only stage runs that will run have the first three.
    """
    from trtllm_pipeline.tensorrt import params  # not needed to read a plan

    whole = run_id is None

    def cell_entry(cell: Cell) -> Json:
        return {
            "id": cell.id,
            "axes": axes(cell),
            "feasible": cell.reason is None,
            "reason": cell.reason,
            "stage_runs": list(plan.by_cell[cell.id]),
            "changes": [asdict(change) for change in cell.changes],
            "about": about(cell),
        }

    def run_entry(run: StageRun) -> Json:
        full = whole or run.id in to_run
        return {
            "id": run.id,
            "stage": run.stage.name,
            "toolchain": run.toolchain,
            "fingerprint": run.fingerprint,
            "scope": run.stage.scope.value,
            "inputs": dict(run.inputs),
            "after": list(run.after),
            "cells": list(run.cells),
            "argv": [list(command) for command in commands(run)] if full else [],
            "program": run.stage.program,
            "params": params.to_json(run.params),
            "environment": {},
            "resources": asdict(plan.resources(run)),
            **_expected(times(run) if full else None),
            "needs": [need.to_json() for need in needs(run)] if full else [],
            "action": action(run.id, to_run, present, pulls),
            **({"pull_bytes": pulls[run.id]} if run.id in pulls else {}),
            "reason": reasons.get(run.id),
        }

    return writing.json_lines(
        schema=SCHEMA,
        run=run_id,
        cells=map(cell_entry, plan.cells),
        stage_runs=map(run_entry, plan.stage_runs.values()),
    )


def action(
    run: StageRunId, to_run: Collection[StageRunId], present: Collection[StageRunId], pulls: Collection[StageRunId]
) -> str:
    """Action for a stage run: run, pull, reuse or skip."""
    if run in pulls:
        return "pull"
    return "run" if run in to_run else "up_to_date" if run in present else "skip"


def _expected(estimate: Estimate | None) -> dict[str, Json]:
    if estimate is None:
        return {"expected_s": None, "expected_error": None, "expected_measured": 0}
    seconds, error = estimate.value / 1000, round(estimate.error, 3)
    return {"expected_s": seconds, "expected_error": error, "expected_measured": estimate.measured}


def _changes(written: Collection[Mapping[str, Any]]) -> tuple[SettingChange, ...]:
    return tuple([SettingChange(**{**change, "refused": tuple(change.get("refused", ()))}) for change in written])


def read_plan(path: Path) -> Outline:
    """The outline of a plan file. Raises StateError if the file is not a plan."""
    try:
        data = user_files.decode_mapping(reading.read_bytes(path))
        if data["schema"] != SCHEMA:
            raise StateError(f"{path}: plan of schema {data['schema']}, this release reads {SCHEMA}")
        return Outline(
            tuple(
                OutlineCell(
                    cell["id"],
                    cell["axes"],
                    cell["reason"],
                    tuple(cell["stage_runs"]),
                    _changes(cell.get("changes", ())),  # older plans have none
                    dict(cell.get("about", {})),
                )
                for cell in data["cells"]
            ),
            {
                run["id"]: OutlineRun(
                    run["id"],
                    run["stage"],
                    run["fingerprint"],
                    Scope(run["scope"]),
                    tuple(run["inputs"].values()),
                    tuple(run["after"]),
                    tuple(run["cells"]),
                )
                for run in data["stage_runs"]
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{path}: not a plan: {error}", hint="`pipeline run` writes one when it starts") from error


def command_lines(
    run: StageRun, inputs: Mapping[str, str], attempt: str, machine: Machine, *, started: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Return the commands of one attempt at a stage run on `machine`, in order: external programs, then ours.

    With `started`, as in plans, the commands that our own program starts come first.
    """
    machine = machine.of(run.first_cell.gpu)

    def context() -> StageContext[Any]:
        paths = {name: Path(path) for name, path in inputs.items()}
        files = {name: Path(path) for name, path in run.files.items()}
        return StageContext(run.params, paths, files, Path(attempt) / OUT, Path(attempt))

    lines: list[Sequence[str]] = []
    if started and run.stage.starts is not None:
        lines += run.stage.starts(run.first_cell, context(), machine)
    if run.stage.commands is not None:
        lines += run.stage.commands(context(), machine)
    if run.stage.program is not None:
        lines.append((sys.executable, "-m", "trtllm_pipeline.tensorrt.worker", f"{attempt}/{JOB}"))
    return tuple(map(tuple, lines))


def commands_of(plan: Plan, artifact: Callable[[StageRun], str]) -> Callable[[StageRun], tuple[tuple[str, ...], ...]]:
    """Return the command lines by stage run of a plan. `artifact` returns the path of a result."""

    def commands(run: StageRun) -> tuple[tuple[str, ...], ...]:
        # A server's command line may name the inputs of its repository.
        of_inputs = [plan.stage_runs[each].inputs for each in run.inputs.values() if run.stage.starts is not None]
        upstreams = dict(item for each in (*of_inputs, run.inputs) for item in each.items())
        inputs = {
            name: f"{{attempt of {upstream}}}/{SERVICE_FILE}"
            if plan.stage_runs[upstream].stage.scope is Scope.SERVICE
            else artifact(plan.stage_runs[upstream])
            for name, upstream in upstreams.items()
        }
        return command_lines(run, inputs, "{attempt}", plan.machine, started=True)

    return commands
