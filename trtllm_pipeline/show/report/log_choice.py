"""Choice of the log to print: of a named stage, of the failed or running stage, or of the server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import Scope, StageRunId, StageStatus, UsageError, in_brackets, read_object
from trtllm_pipeline.orchestrate import LOG, Outline, OutlineCell, OutlineRun, Store, stage_status
from trtllm_pipeline.orchestrate import runs as run_folders

if TYPE_CHECKING:
    from trtllm_pipeline.measure import LevelResult

SERVER_LOG: Final = "server.log"


def stage_run_of(
    outline: Outline, store: Store, cell: str, stage: str | None, *, server: bool
) -> tuple[OutlineRun, str] | None:
    """The stage run to show: `stage`, the server, or the failed or running stage, with a reason.

    None if no stage is named and no stage failed or is running. `logs_of` then lists the logs. Raises UsageError.
    """
    by_id = outline.stage_runs.get(StageRunId(cell))
    if by_id is not None and stage is None:
        return by_id, ""
    chosen = run_folders.find_cell(outline, cell, stage)
    if stage is not None:
        return run_folders.find_stage(outline, chosen, stage), ""
    if chosen.reason is not None:
        raise UsageError(f"{chosen.id} has no logs because it is infeasible: {chosen.reason}")
    runs = _runs(outline, chosen)
    if server:
        service = next((run for run in runs if run.scope is Scope.SERVICE), None)
        if service is None:
            raise UsageError(f"{chosen.id} has no server in this plan")
        return service, ""
    states = stage_status.stage_states(outline, store)
    failed = [run for run in runs if states[run.id].status is StageStatus.FAILED]
    running = [run for run in runs if states[run.id].status is StageStatus.RUNNING]
    if failed:
        return failed[0], f"{failed[0].stage} failed: {failed[0].id}"
    # The log of a stage that runs against a server is more informative than the server's.
    return (running[-1], f"{running[-1].stage} is running: {running[-1].id}") if running else None


def logs_of(outline: Outline, store: Store, cell: str) -> tuple[OutlineCell, dict[str, Path]]:
    """The logs of a cell, by stage. Raises UsageError if it has none."""
    chosen = run_folders.find_cell(outline, cell)
    logs = {run.stage: path for run in _runs(outline, chosen) if (path := find_log(store, run, LOG)) is not None}
    if not logs:
        raise UsageError(f"{chosen.id} has no logs yet", hint="see its progress with pipeline status")
    return chosen, logs


def failure_of(store: Store, run: OutlineRun) -> list[str]:
    """Why the latest attempt of a stage run failed, and how to fix it. Empty if it did not fail."""
    attempt = store.index.attempts([run.fingerprint]).get(run.fingerprint)
    if attempt is None or attempt.outcome != "failed":
        return []
    state = stage_status.failed_attempt(attempt)
    return [f"{run.stage} failed{in_brackets(state.failure)}: {state.message}", *state.details]


def log_of(store: Store, run: OutlineRun, *, server: bool) -> Path:
    """The log of a stage run, or of the server that it started. Raises UsageError if there is none."""
    name = SERVER_LOG if server else LOG
    log = find_log(store, run, name)
    if log is not None:
        return log
    if server and run.scope is not Scope.SERVICE:
        raise UsageError(f"{run.stage} starts no server", hint="--server requires the stage launch")
    tried = run.fingerprint in store.index.attempts([run.fingerprint])
    why = "it ran, but its files were removed" if tried else "it has not run in this workspace"
    raise UsageError(f"{run.id} has no {name}", hint=f"{why}; see pipeline status")


def find_log(store: Store, run: OutlineRun, name: str) -> Path | None:
    """The file in the newest attempt that still has it, or in the artifact."""
    folders = []
    attempt = store.index.attempts([run.fingerprint]).get(run.fingerprint)
    if attempt is not None:
        folders.append(attempt.folder)
    # Attempts that the index lost, or that were killed between the rename and the row.
    numbered = [path for path in store.work_dir.glob(f"{run.fingerprint}.*") if path.suffix[1:].isdigit()]
    folders += sorted(numbered, key=lambda path: int(path.suffix[1:]), reverse=True)
    folders.append(store.folder(run.stage, run.fingerprint))
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def measurements_of(log: Path) -> tuple[LevelResult, ...]:
    """The measurements of the load run that wrote this log, by level."""
    data = read_object(log.parent / "out" / "perf.json")
    if data is None:
        return ()
    from trtllm_pipeline.measure import result

    return result.levels_of(data.get("levels"))


def _runs(outline: Outline, cell: OutlineCell) -> list[OutlineRun]:
    return [outline.stage_runs[run] for run in cell.stage_runs]
