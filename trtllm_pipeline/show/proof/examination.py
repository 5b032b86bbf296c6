"""A deep examination of this machine: usable toolchains, matrix, time budget, answers, installed programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import PipelineError, PlanError, UsageError, write_json
from trtllm_pipeline.measure import accuracy_result
from trtllm_pipeline.orchestrate import PRECISIONS, CellResult, Request, Store, flow, forecast, nearest, report_file
from trtllm_pipeline.show.phrases import about
from trtllm_pipeline.show.proof import budget, findings, material, reference_answers
from trtllm_pipeline.show.proof.findings import DeepExamination, DeepFinding
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import families as tiny_models
from trtllm_pipeline.tensorrt import installed, params

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate import Observer, Outcome, Plan

FOLDER: Final = "doctor"
"""Directory in the workspace for models, questions, the matrix and the result."""
RESULT: Final = "deep.json"
ALL: Final = "all"
"""Selects every precision."""
_LAST_STAGE: Final = "accuracy"
_DAMAGED: Final = "set damaged artifacts aside with `pipeline store verify`, then examine again"


def examine(
    workspace: Path,
    observer: Observer,
    tell: Callable[[str], None],
    *,
    families: Sequence[str] = tiny_models.FAMILIES[:1],
    precisions: Sequence[str] | None = None,
    toolchain: str | None = None,
) -> DeepExamination:
    """Examine this machine in `workspace`, and write the result there.

    Without `precisions`, runs the cells that fit in about ten minutes, see `budget`. Calls `tell` with the expected time
    first. Results of earlier examinations are reused. Raises UsageError for unknown names, PlanError if no toolchain can
    be used or no cell is feasible.
    """
    from trtllm_pipeline.base import probe

    _check("--family", families, tiny_models.FAMILIES)
    if precisions is not None:
        _check("--precision", precisions, (*PRECISIONS, ALL))
    families = tuple(dict.fromkeys(families))
    names = toolchains.names() if toolchain is None else (toolchain,)
    _check("--toolchain", names, toolchains.names())
    machine = probe.this_machine()
    missing = {name: lacks for name in names if (lacks := toolchains.load(name).missing(machine)) is not None}
    usable = [name for name in names if name not in missing]
    if not usable:
        raise PlanError(
            "no toolchain can be examined on this machine\n  "
            + "\n  ".join(f"{name}: {lacks}" for name, lacks in missing.items()),
            hint="list missing parts with pipeline doctor",
        )
    store = Store(workspace)  # created only for a valid request
    folder = store.workspace / FOLDER
    wanted = had(usable) if precisions is None or ALL in precisions else [*dict.fromkeys(precisions)]
    matrix = material.write(folder, machine, families=families, precisions=wanted, toolchain_names=usable)
    request = Request(matrix, until=_LAST_STAGE)
    full, outlook = flow.outlook(request, store, workspace)
    cells, takes_s = (
        budget.chosen(full, outlook) if precisions is None else ({cell.id for cell in full.feasible}, outlook.total_s)
    )
    left_out = [cell for cell in full.feasible if cell.id not in cells]
    if outlook.to_run:
        tell(_announced(takes_s, len(cells), len(left_out), guessed=outlook.guessed > 0))
    started = time.monotonic()
    plan, outcome = flow.bring_up_to_date(
        replace(request, cells=tuple(f"!{cell.id}" for cell in left_out)), store, observer
    )
    taken, took_s = store.index.taken(flow.BY_HAND), time.monotonic() - started
    examination = DeepExamination(
        machine,
        findings.sorted_findings(
            [
                *(_of_cell(row, plan, outcome, folder) for row in report_file.rows(plan, store, outcome)),
                *map(findings.of_left_out, left_out),
                *(() if outcome.interrupted else _of_installation(machine, usable, families)),
                *(findings.of_toolchain(name, lacks) for name, lacks in missing.items()),
            ]
        ),
        interrupted=outcome.interrupted,
        forecast=forecast.checked(
            plan, replace(outlook, total_s=takes_s), taken, took_s, comparable=outcome.comparable
        ),
    )
    write_json(folder / RESULT, examination.to_json())
    return examination


def had(toolchain_names: Iterable[str]) -> list[str]:
    """The precisions of these toolchains on any machine."""
    fields = (
        each
        for name in toolchain_names
        for stage in toolchains.load(name).stages
        for each in params.table(stage.params)
    )
    known = {choice for each in fields if each.name == "precision" for choice in each.choices}
    return [precision for precision in PRECISIONS if precision in known]


def _announced(takes_s: float, cells: int, left_out: int, *, guessed: bool) -> str:
    basis = (
        "a rough estimate, because not all stages have run in this workspace"
        if guessed
        else "from earlier runs in this workspace"
    )
    words = f"expected to take about {about(takes_s)}, {basis}"
    if left_out:
        words += (
            f"; {left_out} of {cells + left_out} cells are postponed to keep it at about "
            f"{about(budget.LIMIT_S)} (run them now with --precision {ALL})"
        )
    return words


def _check(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError for an unknown name or an empty list."""
    wrong = [name for name in given if name not in known]
    if wrong or not given:
        raise UsageError(
            f"{option}: {f'unknown name {wrong[0]!r}{nearest(wrong[0], known)}' if wrong else 'no names given'}",
            hint=f"choose from {', '.join(known)}",
        )


def _of_cell(row: CellResult, plan: Plan, outcome: Outcome, folder: Path) -> DeepFinding:
    """The finding for a cell, judged by its answers if it has any."""
    for run in map(plan.stage_runs.__getitem__, plan.by_cell[row.id]):
        if run.stage.name == _LAST_STAGE and (artifact := outcome.artifacts.get(run.fingerprint)) is not None:
            try:
                agreement = reference_answers.compare(artifact.out, folder / str(row.axes["model"]))
            except PipelineError as error:
                unread = findings.of_cell(row, None)
                return replace(unread, detail=f"its answers cannot be read: {error.message}", hint=_DAMAGED)
            return findings.of_cell(
                row, agreement, str((artifact.out / accuracy_result.ANSWERS).relative_to(folder.parent))
            )
    return findings.of_cell(row, None)


def _of_installation(machine: Machine, usable: Sequence[str], families: Sequence[str]) -> Iterator[DeepFinding]:
    if usable != [toolchains.EMBEDDED]:
        comparisons = installed.compare(machine, families, engines=toolchains.ENGINES in usable)
        yield from map(findings.of_comparison, comparisons)
