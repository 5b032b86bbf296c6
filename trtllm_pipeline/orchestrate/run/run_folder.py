"""The directory of a run: its request, plan and report, and its row in the index from start to end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Json, StateError, write_json
from trtllm_pipeline.orchestrate.plan import plan_file, runs
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.request import REQUEST_FILE, Request
from trtllm_pipeline.orchestrate.run.forecast import Forecast
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.orchestrate.run.plan_commands import plan_json
from trtllm_pipeline.orchestrate.store.store import Store

_SAME_SECOND_S: Final = 0.05


@dataclass(slots=True)
class RunFolder:
    """A run in progress."""

    id: str
    path: Path
    store: Store
    exit_code: int = 1
    forecast: Mapping[str, Json] | None = None
    """The report's comparison of the forecast with the run."""

    def write_plan(self, plan: Plan, forecast: Forecast) -> None:
        """Write plan.json; repeated if a cell is retried with other settings."""
        lines = plan_json(plan, self.store, forecast, run_id=self.id)
        plan_file.write_plan(self.path / plan_file.NAME, plan, lines)


@contextmanager
def begun(
    request: Request, store: Store, observer: Observer, *, command: tuple[str, ...], name: str | None
) -> Iterator[RunFolder]:
    """Start a run, in the index and shown by `observer` until it ends. Raises StateError if the workspace disappears."""
    run = _new(store, name)
    store.index.begin_run(run.id, str(request.matrix.absolute()), command)
    observer.enter(run.path)
    try:
        write_json(run.path / REQUEST_FILE, request.to_json())
        yield run
    except KeyboardInterrupt:  # while pulling artifacts (later the loop handles it)
        run.exit_code = 130
        raise
    except OSError as error:
        if store.artifacts_dir.is_dir():
            raise
        raise StateError(
            f"{store.workspace}: the workspace is gone: it was moved or removed while in use",
            hint="run again; this run cannot be resumed",
        ) from error
    finally:
        store.index.end_run(run.id, run.exit_code)
        observer.leave(run.forecast)


def _new(store: Store, name: str | None) -> RunFolder:
    """Create a new directory. If a run of the same name started in this second, wait for the next one."""
    while True:
        run_id = runs.run_id(time.time(), name or os.urandom(2).hex())
        folder = store.runs_dir / run_id
        try:
            folder.mkdir()
        except FileExistsError:
            time.sleep(_SAME_SECOND_S)
        else:
            return RunFolder(run_id, folder, store)
