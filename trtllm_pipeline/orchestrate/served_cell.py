"""One cell built in a workspace, with everything that its server needs."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.base import Cell, Scope, UsageError
from trtllm_pipeline.orchestrate.memory.estimates import HOST, SHARED, Corrections, Estimate
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, of_run
from trtllm_pipeline.orchestrate.plan.planner import (
    REQUEST_FILE,
    Request,
    check_feasible,
    load,
    machine_of,
    plan_cells,
    read_request,
    select_cells,
)
from trtllm_pipeline.orchestrate.plan.runs import run_folders
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import catalog as toolchains

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.results.report_file import CellResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedCell:
    """One built cell with everything that its server needs."""

    cell: Cell
    plan: Plan
    """Plan of this cell only."""
    launch: StageRun
    """The stage run that serves it."""
    artifacts: Mapping[str, Artifact]
    """Existing artifacts by stage, including measurements."""
    request: Request
    """The request that selected the cell."""
    drafter: Artifact | None = None
    """The engine of its draft model."""

    @property
    def inputs(self) -> dict[str, Path]:
        """Inputs of its server, by the input names of the launch stage: `repository`, and `engine` or `model`."""
        runs, own = self.plan.stage_runs, {} if self.drafter is None else {toolchains.DRAFTER: self.drafter}
        made = {name: own.get(name) or self.artifacts[runs[run].stage.name] for name, run in self.launch.inputs.items()}
        return {name: artifact.out for name, artifact in made.items()}

    @property
    def all_artifacts(self) -> dict[str, Artifact]:
        """Artifacts by stage, and the engine of its draft model as DRAFTER."""
        own = {} if self.drafter is None else {toolchains.DRAFTER: self.drafter}
        return {**self.artifacts, **own}

    @property
    def repository(self) -> Path:
        """The Triton repository, or the directory with the command line of trtllm-serve."""
        return self.inputs["repository"]

    @property
    def engine(self) -> Path | None:
        """The engine. None if the weights are served directly."""
        return self.artifacts["build"].out if "build" in self.artifacts else None

    @property
    def model_folder(self) -> Path:
        """A directory with tokenizer, chat template and generation_config.json."""
        return self.artifacts["download"].out if "download" in self.artifacts else self.inputs["model"]

    @property
    def max_seq_len(self) -> int:
        """Maximum tokens of prompt and output together."""
        return self.cell.isl + self.cell.osl

    def host_memory(self, store: Store) -> tuple[Estimate | None, int]:
        """Estimated host memory of its server, None if unknown, and the bytes of /dev/shm in addition to it."""
        machine = self.plan.machine
        needs = of_run(self.launch, machine, Corrections(store.index.peaks(), machine))
        host = next((need.estimate for need in needs if need.resource == HOST), None)
        return host, sum(need.estimate.most for need in needs if need.resource == SHARED)

    def result(self, store: Store) -> CellResult:
        from trtllm_pipeline.orchestrate.results.report_file import rows

        return rows(self.plan, store)[0]


def latest_request(store: Store) -> Request:
    """The request of the workspace's latest run, from its lock if its matrix is gone. Raises UsageError."""
    folder = run_folders(store)[0]
    latest = read_request(folder / REQUEST_FILE)
    locked = folder / "lock" / "matrix.yaml"
    if not latest.matrix.exists() and locked.exists():
        logger.warning("%s is gone, using the lock of the latest run instead: %s", latest.matrix, locked)
        return replace(latest, matrix=locked, sets=())  # the lock includes the --set changes
    return latest


def served_cell(request: Request, store: Store) -> ServedCell:
    """The one built cell that the request selects. Reads only, and sends no requests to hubs for pinned models.

    Raises UsageError with a command to type if it selects several cells or the cell is not built yet, PlanError if the cell
    cannot work here, MatrixError.
    """
    machine = machine_of(request)
    cells = select_cells(request, load(request), machine, store)
    able = [cell for cell in cells if cell.reason is None]
    if len(able) > 1:
        ids = ", ".join(cell.id for cell in able[:8]) + (", ..." if len(able) > 8 else "")
        raise UsageError(f"{len(able)} cells are selected, expected one", hint=f"select one of {ids}")
    plan = plan_cells(able or cells, store, machine, guess=True)
    check_feasible(plan, store)
    (cell,) = plan.feasible
    runs = [plan.stage_runs[run] for run in plan.by_cell[cell.id]]
    present = store.present({run.fingerprint: run.stage.name for run in runs if run.stage.scope is not Scope.SERVICE})
    artifacts = {run.stage.name: present[run.fingerprint] for run in runs if run.fingerprint in present}
    launch = next(run for run in runs if run.stage.scope is Scope.SERVICE)
    only = replace(request, cells=(cell.id,))
    needed = {*launch.inputs.values()}
    if missing := [run.stage.name for run in runs if run.id in needed and run.fingerprint not in present]:
        raise UsageError(
            f"{cell.id} is not built in {store.workspace}: {missing[0]} is missing",
            hint=run_command(only, store, until=missing[-1]),
        )
    drafter = launch.inputs.get(toolchains.DRAFTER)
    of_drafter = None if drafter is None else present[plan.stage_runs[drafter].fingerprint]
    if "download" not in artifacts and "model" not in launch.inputs:
        raise UsageError(
            f"{cell.id}: no artifact with its tokenizer is left in {store.workspace}",
            hint=run_command(only, store, until="download"),
        )
    return ServedCell(cell, plan, launch, artifacts, request, of_drafter)


def run_command(request: Request, store: Store, *, until: str | None = None) -> str:
    """The command line that runs the request's cells, up to the stage `until`. A run creates the artifact of its last
    stage, but not one that only finished stages would read.
    """
    words = ["pipeline", "run", "--matrix", str(request.matrix)]
    words += [word for value in request.sets for word in ("--set", value)]
    words += [word for value in request.cells for word in ("--cells", value)]
    words += [] if request.toolchain is None else ["--toolchain", request.toolchain]
    words += [] if request.executor is None else ["--executor", request.executor]
    words += [] if request.ray_address is None else ["--ray-address", request.ray_address]
    words += [] if until is None else ["--until", until]
    return shlex.join([*words, "--workspace", str(store.workspace)])
