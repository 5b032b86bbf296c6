"""The command lines of a plan, and its JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.base import Scope
from trtllm_pipeline.orchestrate.plan.memory_needs import of_run
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun
from trtllm_pipeline.orchestrate.plan.plan_file import plan_lines
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import JOB, OUT, SERVICE_FILE, StageContext

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine
    from trtllm_pipeline.orchestrate.run.forecast import Forecast


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


def plan_json(plan: Plan, store: Store | None, forecast: Forecast, *, run_id: str | None = None) -> Iterator[str]:
    """Yield lines of the plan in its documented form with real command lines; `{attempt}` is only known at run time."""
    artifacts = "{workspace}/store" if store is None else str(store.artifacts_dir)
    return plan_lines(
        plan,
        present=forecast.present,
        to_run=forecast.to_run,
        reasons=forecast.reasons,
        times=forecast.durations.estimate,
        needs=lambda run: of_run(run, plan.machine, forecast.corrections),
        commands=commands_of(plan, lambda run: f"{artifacts}/{run.stage.name}/{run.fingerprint}/out"),
        pulls=forecast.pulls,
        run_id=run_id,
    )


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
