"""Writes a calibration set for TensorRT-LLM's quantize.py: a directory that `datasets` loads, with a column `text`.

A small separate program, which runs before quantize.py on the same job file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure import prompts
from trtllm_pipeline.tensorrt.stage.base import JOB, StageContext
from trtllm_pipeline.tensorrt.stage.calibration_rows import Row, choose, default_set, read_rows
from trtllm_pipeline.tensorrt.stage.params import Selection
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint

_FILE: Final = "train.jsonl"
_TAKEN: Final = ("cnn_dailymail", "scienceqa", "science_qa")
"""Words that quantize.py searches for anywhere in a path, and interprets as the data set of that name."""


def folder(context: StageContext[Any]) -> Path:
    """Directory of an attempt's calibration set."""
    return context.attempt / "calibration"


def command(context: StageContext[Any]) -> list[str]:
    """The command line that writes it, for an attempt's job file."""
    return [sys.executable, "-m", "trtllm_pipeline.tensorrt.worker", str(context.attempt / JOB), f"{__name__}:run"]


def run(context: StageContext[Checkpoint]) -> None:
    data = context.files.get("calibration_data", default_set())  # optional in a manual run
    count = write(data, context.inputs["model"], context.params.calibration or Selection(), folder(context))
    print(f"{count} calibration rows")  # noqa: T201 - the stage's log


def write(data: Path, model: Path, selection: Selection, output: Path) -> int:
    """Write the selected rows of the file `data` as text into the directory `output`. Returns their number.

    Raises MatrixError for malformed rows, StageError if a conversation needs a chat template and `model` has none.
    """
    if taken := next((word for word in _TAKEN if word in str(output).lower()), None):
        raise StageError(
            f"{output}: quantize.py interprets a path with {taken} in it as the data set of that name",
            failure=FailureClass.USER,
            hint="use a workspace whose path does not contain this word: mv WORKSPACE ELSEWHERE keeps its results",
        )
    rows = choose(read_rows(data, selection.column), selection)

    def text(row: Row, render: prompts.Render | None) -> str:
        messages = row.messages
        if row.text is not None and not selection.chat_template:
            return row.text
        if row.tokens is not None:
            raise StageError(
                f"{data}: quantize.py only reads text, not rows of token ids",
                failure=FailureClass.USER,
                hint='give rows as "text"',
            )
        if render is None:
            raise StageError(
                f"{model} has no chat template",
                failure=FailureClass.INFEASIBLE,
                hint='set calibration.chat_template to false, and give rows as "text"',
            )
        return render(messages or [{"role": "user", "content": row.text}])

    with prompts.chat_renderer(model, lambda: False) as render:
        lines = [json.dumps({"text": text(row, render)}, ensure_ascii=False) for row in rows]
    output.mkdir(parents=True, exist_ok=True)
    (output / _FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)
