"""Memory and disk that the stage runs of a plan need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trtllm_pipeline.base import Machine, StageRunId
from trtllm_pipeline.orchestrate.memory.estimates import DISK, Corrections, Estimate, Need, expected, of_stage
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun


def of_run(run: StageRun, machine: Machine, corrections: Corrections) -> list[Need]:
    """The memory that a stage run needs."""
    needs = expected(run.stage, run.first_cell, machine)
    return of_stage(needs, run.stage, run.first_cell, machine, corrections, run.label)


def of_plan(
    plan: Plan,
    runs: Iterable[StageRun],
    corrections: Corrections,
    free: int | None,
    fetched: Mapping[StageRunId, int] | None = None,
) -> list[Need]:
    """Needs of these stage runs of a plan: memory of each, and disk of all together. `free` bytes of disk are available.

    `fetched` are bytes of downloads that are already on the disk.
    """
    result: list[Need] = []
    leaves = scratch = on_disk = measured = 0
    for run in runs:
        needs = expected(run.stage, run.first_cell, plan.machine)
        result += of_stage(needs, run.stage, run.first_cell, plan.machine, corrections, run.label)
        if needs is not None and needs.leaves + needs.scratch:
            artifact = corrections.on(run.first_cell.gpu).of(run.label, DISK, needs.leaves, needs.error)
            leaves, scratch = leaves + artifact.value, max(scratch, needs.scratch)
            measured += bool(artifact.measured)
            on_disk += min((fetched or {}).get(run.id, 0), artifact.value + needs.scratch)
    if leaves + scratch:
        result.append(Need("", "", DISK, Estimate(leaves + scratch - on_disk, 0.1, measured), free))
    return result
