"""An attempt's record of its failure, `failure.json` next to its logs."""

from __future__ import annotations

from pathlib import Path

from trtllm_pipeline.base import FailureClass, StageError, read_object, write_json
from trtllm_pipeline.tensorrt.stage.base import FAILURE_FILE


def write(attempt: Path, error: StageError) -> None:
    """Record `error` in the attempt's directory."""
    log = error.log
    write_json(
        attempt / FAILURE_FILE,
        {
            "failure": error.failure.value,
            "message": error.message,
            "hint": error.hint,
            "log": str(log.relative_to(attempt)) if log is not None and log.is_relative_to(attempt) else None,
            "line": error.line,
            "setting": error.setting,
            "telling": list(error.telling),
        },
    )


def read(attempt: Path, default_log: Path) -> StageError | None:
    """The recorded failure of an attempt. None without a readable one. `default_log` is used if the record names no log."""
    record = read_object(attempt / FAILURE_FILE)
    try:
        if record is None:
            return None
        log, line, setting = record.get("log"), record.get("line"), record.get("setting")
        telling = record.get("telling")
        return StageError(
            str(record["message"]),
            failure=FailureClass(record["failure"]),
            hint=None if record["hint"] is None else str(record["hint"]),
            log=attempt / log if isinstance(log, str) else default_log,
            line=line if isinstance(line, int) else None,
            setting=setting if isinstance(setting, str) else None,
            telling=tuple(map(str, telling)) if isinstance(telling, list) else (),
        )
    except (KeyError, ValueError):
        return None
