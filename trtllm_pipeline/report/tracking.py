"""Results in experiment trackers, MLflow and Weights & Biases: a run there for each cell, a step for each of its levels.

Where their own environment variables name a server (MLFLOW_TRACKING_URI; WANDB_API_KEY, WANDB_BASE_URL) they are logged there,
else written as files: a database of MLflow, or runs that `wandb sync` sends later. Their packages are extras.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.planning.names import count
from trtllm_pipeline.records import dataclass
from trtllm_pipeline.report.results import Results
from trtllm_pipeline.report.rows import CellResult
from trtllm_pipeline.report.writers import flat

MLFLOW: Final = "mlflow"
WANDB: Final = "wandb"
_QUIET: Final = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Without these, both tell their makers how they are used. A user's own word for it stays."""
_SERVER: Final = {MLFLOW: ("MLFLOW_TRACKING_URI",), WANDB: ("WANDB_API_KEY", "WANDB_BASE_URL")}


@dataclass(frozen=True, slots=True)
class TrackedCell:
    """A cell as a tracker takes it. Names are those of the columns of the CSV."""

    name: str
    params: Mapping[str, str]
    """Axes, status, conditions: what is no number, and what says which cell it is."""
    once: Mapping[str, float]
    """What does not depend on the load: accuracy, size, seconds."""
    levels: Mapping[int, Mapping[str, float]]
    """Step -> what was measured there, steps in ascending order. The step is the concurrency, or, where some level is a request
    rate, the place of the level."""


def track(form: str, results: Results, output: Path | None) -> str:
    """Log the results; where there is no server, into the folder `output` (default: in the folder of the run).

    Returns a line that says where they are. Raises UsageError where the package is missing or the tracker refuses.
    """
    server = next((os.environ[name] for name in _SERVER[form] if os.environ.get(name)), None)
    folder = output or results.runs.newest / form
    cells = list(tracked(results.rows))
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        if server is None:
            folder.mkdir(parents=True, exist_ok=True)
        where = (_to_mlflow if form == MLFLOW else _to_wandb)(results, cells, None if server else folder.absolute())
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--format {form} needs the package {error.name}", hint=f"pip install 'trtllm-pipeline[{form}]'"
        ) from error
    except OSError as error:
        raise UsageError(f"--output {folder}: cannot be written: {error.strerror}") from error
    return f"{count(len(cells), 'cell')} logged: {where}"


def tracked(rows: tuple[CellResult, ...]) -> Iterator[TrackedCell]:
    """The cells as trackers take them."""
    lines: dict[str, list[dict[str, object]]] = {}
    for line in flat(rows):
        lines.setdefault(str(line["cell"]), []).append(line)
    for row in rows:
        of_cell = lines[row.id]
        of_level = {name for name in of_cell[0] if len({line[name] for line in of_cell}) > 1} if row.levels else set()
        numbers = _numbers(of_cell[0])
        fixed = {*row.axes, *(name for name in of_cell[0] if name.startswith(("system_", "workload_")))}
        closed = [level.concurrency for level in row.levels if level.concurrency is not None]
        steps = closed if len(closed) == len(row.levels) else range(1, len(row.levels) + 1)
        yield TrackedCell(
            row.id,
            {
                name: str(value)
                for name, value in of_cell[0].items()
                if value is not None and (name in fixed or name not in numbers)
            },
            {name: value for name, value in numbers.items() if name not in of_level | fixed},
            {
                step: {name: value for name, value in _numbers(line).items() if name in of_level}
                # W&B drops a step that is not above the one before.
                for step, line in sorted(zip(steps, of_cell, strict=False), key=lambda pair: pair[0])
            },
        )


def _numbers(line: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


@contextmanager
def _ending(well: Callable[[], object], failed: Callable[[], object]) -> Iterator[None]:
    """End a tracker's run whatever happens, or it is shown as one that still goes on."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # what went wrong first is what has to be told
            failed()
        raise
    well()


def _to_mlflow(results: Results, cells: list[TrackedCell], folder: Path | None) -> str:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(None if folder is None else f"sqlite:///{folder / 'mlflow.db'}")
        name = Path(results.matrix).stem or "pipeline"
        known = client.get_experiment_by_name(name)
        artifacts = None if folder is None else (folder / "artifacts").as_uri()
        experiment = known.experiment_id if known is not None else client.create_experiment(name, artifacts)
        for cell in cells:
            run = client.create_run(experiment, run_name=cell.name, tags={"pipeline.run": results.runs.newest.name})
            told = [Metric(metric, value, run.info.start_time, 0) for metric, value in cell.once.items()]
            told += [
                Metric(metric, value, run.info.start_time, step)
                for step, measured in cell.levels.items()
                for metric, value in measured.items()
            ]
            params = [Param(key, value[:_LONGEST]) for key, value in cell.params.items()]
            with _ending(
                partial(client.set_terminated, run.info.run_id),
                partial(client.set_terminated, run.info.run_id, "FAILED"),
            ):
                for start in range(0, max(len(told), len(params), 1), _BATCH):
                    part = slice(start, start + _BATCH)
                    client.log_batch(run.info.run_id, told[part], params[part], [RunTag("pipeline.cell", cell.name)])
    except MlflowException as error:
        raise UsageError(f"MLflow refuses: {str(error).splitlines()[0]}") from error
    return (
        os.environ["MLFLOW_TRACKING_URI"]
        if folder is None
        else f"mlflow ui --backend-store-uri sqlite:///{folder / 'mlflow.db'}"
    )


_BATCH: Final = 100
"""Parameters that a server of MLflow takes at once."""
_LONGEST: Final = 6000
"""Characters of a parameter that it takes."""


def _to_wandb(results: Results, cells: list[TrackedCell], folder: Path | None) -> str:
    import wandb

    for cell in cells:
        settings: dict[str, Any] = {"console": "off", "silent": True}
        try:
            run = wandb.init(
                project=Path(results.matrix).stem or "pipeline",
                group=results.runs.newest.name,
                name=cell.name,
                config=dict(cell.params),
                dir=None if folder is None else str(folder),
                mode="online" if folder is None else "offline",
                reinit="create_new",
                settings=wandb.Settings(**settings),
            )
            with _ending(run.finish, partial(run.finish, exit_code=1)):  # its own `with` prints a traceback
                for step, measured in cell.levels.items():
                    run.log(dict(measured), step=step)
                run.summary.update(dict(cell.once))
        except wandb.Error as error:
            raise UsageError(f"Weights & Biases refuses: {str(error).splitlines()[0]}") from error
    return "Weights & Biases" if folder is None else f"wandb sync {folder}/wandb/offline-run-*"
