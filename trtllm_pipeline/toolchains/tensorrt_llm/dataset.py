"""A calibration set as TensorRT-LLM's quantize.py reads one: a folder that `datasets` loads, with a column `text`.

A small program, so that what quantize.py was given can be made again by hand, from the command line in job.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trtllm_pipeline.bench.prompts import Render, chat_renderer
from trtllm_pipeline.errors import FailureClass, PipelineError, StageError
from trtllm_pipeline.stages.base import Work, write_failure
from trtllm_pipeline.stages.calibration_rows import Row, Selection, choose, default_set, read_rows

BATCH_SIZE: Final = 16
"""Rows that quantize.py calibrates at a time where the matrix says nothing; its own default, 1, leaves a GPU idle."""
_FILE: Final = "train.jsonl"
_TAKEN: Final = ("cnn_dailymail", "scienceqa", "science_qa")
"""Words that quantize.py looks for anywhere in a path, and takes for the data set of that name."""


def folder(work: Work) -> Path:
    """Where an attempt's calibration set lies."""
    return work.attempt / "calibration"


def command(work: Work) -> list[str]:
    """The command line that writes it, for the stage's parameters."""
    return [
        sys.executable,
        "-m",
        "trtllm_pipeline.toolchains.tensorrt_llm.dataset",
        "--data",
        str(work.files.get("calibration_data", default_set())),  # by hand none need be named
        "--model",
        str(work.inputs["model"]),
        "--calibration",
        json.dumps(work.params.get("calibration"), sort_keys=True),
        "--output-dir",
        str(folder(work)),
    ]


def write(data: Path, model: Path, selection: Selection, output: Path) -> int:
    """Write the selected rows of the JSON Lines file `data` as text into the folder `output`; returns how many.

    Raises MatrixError for malformed rows, StageError where a conversation needs a chat template and `model` has none.
    """
    if taken := next((word for word in _TAKEN if word in str(output).lower()), None):
        raise StageError(
            f"{output}: quantize.py takes a path with {taken} in it for the data set of that name",
            failure=FailureClass.USER,
            hint="use a workspace whose path has no such word: mv WORKSPACE ELSEWHERE keeps what is done",
        )
    rows = choose(read_rows(data), selection)

    def text(row: Row, render: Render | None) -> str:
        messages = row.messages
        if row.text is not None and not selection.chat_template:
            return row.text
        if row.tokens is not None:
            raise StageError(
                f"{data}: rows of token ids cannot be given to quantize.py, which reads texts",
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

    with chat_renderer(model) as render:
        lines = [json.dumps({"text": text(row, render)}, ensure_ascii=False) for row in rows]
    output.mkdir(parents=True, exist_ok=True)
    (output / _FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The program. What went wrong goes into the attempt's folder as well, as for every stage."""
    parser = argparse.ArgumentParser(prog="dataset", description="Write a calibration set for quantize.py.")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines file")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder, for its chat template")
    parser.add_argument("--calibration", required=True, help="JSON: samples, max_length, seed, chat_template")
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        count = write(args.data, args.model, Selection.parse(json.loads(args.calibration)), args.output_dir)
    except PipelineError as error:
        write_failure(args.output_dir.parent, error)
        print(f"error: {error.message}", file=sys.stderr)  # noqa: T201 - the stage's log
        return 1
    print(f"{count} rows to calibrate on")  # noqa: T201 - the stage's log
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
