"""A deep examination of this machine, in order: what is usable, the matrix, the answers, what is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline import flow
from trtllm_pipeline.config.models import PRECISIONS
from trtllm_pipeline.errors import PipelineError, PlanError, UsageError
from trtllm_pipeline.evaluate.result import ANSWERS
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.planning.request import Request
from trtllm_pipeline.proof import answers, findings, installed, material
from trtllm_pipeline.proof.findings import DeepExamination, DeepFinding
from trtllm_pipeline.report.rows import CellResult, rows
from trtllm_pipeline.store.store import Store
from trtllm_pipeline.toolchains import base as toolchains

if TYPE_CHECKING:
    from trtllm_pipeline.execution.loop import Observer, Outcome
    from trtllm_pipeline.machine.model import Machine
    from trtllm_pipeline.planning.plan import Plan

FOLDER: Final = "doctor"
"""In the workspace: models, questions, the matrix and the result."""
RESULT: Final = "deep.json"
_LAST_STAGE: Final = "accuracy"
_DAMAGED: Final = "`pipeline store verify` sets damaged artifacts aside; then examine again"


def examine(
    workspace: Path,
    observer: Observer,
    *,
    families: Sequence[str] = material.FAMILIES[:1],
    precisions: Sequence[str] = PRECISIONS,
    toolchain: str | None = None,
) -> DeepExamination:
    """Examine this machine in `workspace`, and leave the result there.

    What an earlier examination made is not made again. Raises UsageError for unknown names, PlanError where no toolchain
    can be used or no cell can work.
    """
    from trtllm_pipeline.machine.probe import machine as this_machine

    _check("--family", families, material.FAMILIES)
    _check("--precision", precisions, PRECISIONS)
    machine = this_machine()
    asked = toolchains.names() if toolchain is None else (toolchains.load(toolchain).name,)
    missing = {name: lacks for name in asked if (lacks := toolchains.load(name).missing(machine)) is not None}
    usable = [name for name in asked if name not in missing]
    if not usable:
        raise PlanError(
            "no toolchain can be examined on this machine\n  "
            + "\n  ".join(f"{name}: {lacks}" for name, lacks in missing.items()),
            hint="pipeline doctor says what is missing",
        )
    store = Store(workspace)  # made for a request that can be understood
    folder = store.workspace / FOLDER
    matrix = material.write(folder, machine, families=families, precisions=precisions, toolchain_names=usable)
    plan, outcome = flow.bring_up_to_date(Request(matrix, until=_LAST_STAGE), store, observer)
    found = DeepExamination(
        machine,
        findings.sorted_findings(
            [
                *(_of_cell(row, plan, outcome, folder) for row in rows(plan, store, outcome)),
                *(() if outcome.interrupted else _of_installation(machine, usable, families)),
                *(findings.of_toolchain(name, lacks) for name, lacks in missing.items()),
            ]
        ),
        interrupted=outcome.interrupted,
    )
    write_json(folder / RESULT, found.to_json())
    return found


def _check(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError for a name that is not known, or where there is none."""
    wrong = [name for name in given if name not in known]
    if wrong or not given:
        raise UsageError(
            f"{option}: {f'there is no {wrong[0]!r}' if wrong else 'names nothing'}",
            hint=f"choose of {', '.join(known)}",
        )


def _of_cell(row: CellResult, plan: Plan, outcome: Outcome, folder: Path) -> DeepFinding:
    """What a cell came to, judged by its answers where it has any."""
    for run in map(plan.stage_runs.__getitem__, plan.by_cell[row.id]):
        if run.stage.name == _LAST_STAGE and (artifact := outcome.artifacts.get(run.fingerprint)) is not None:
            try:
                agreement = answers.compare(artifact.out, folder / str(row.axes["model"]))
            except PipelineError as error:
                unread = findings.of_cell(row, None)
                return replace(unread, detail=f"its answers cannot be read: {error.message}", hint=_DAMAGED)
            return findings.of_cell(row, agreement, str((artifact.out / ANSWERS).relative_to(folder.parent)))
    return findings.of_cell(row, None)


def _of_installation(machine: Machine, usable: Sequence[str], families: Sequence[str]) -> Iterator[DeepFinding]:
    """What is installed of the toolchains that are examined."""
    if usable != [toolchains.EMBEDDED]:
        yield from map(findings.of_comparison, installed.compare(machine, families))
