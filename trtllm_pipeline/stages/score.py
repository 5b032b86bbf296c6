"""Score the answers that perf timed: no request is made, no server is needed.

Leaves `answers.jsonl` (every measured answer and its scores) and `accuracy.json`, as the accuracy stage does.
"""

from __future__ import annotations

from trtllm_pipeline.bench.prompts import chat_renderer
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.evaluate import result, timed
from trtllm_pipeline.evaluate.questions import read, scorable
from trtllm_pipeline.stages.asking import encoder
from trtllm_pipeline.stages.base import StageContext
from trtllm_pipeline.stages.params import ScoreParams, to_json


def run(context: StageContext[ScoreParams]) -> None:
    """Read, score, write. Raises StageError when there is nothing to score or the score is too low."""
    engine = context.inputs["engine"]
    asked = context.params
    metrics = result.metrics_of(asked.metrics, context.files.get("metric_module"))
    path = context.files["input_data"]
    with chat_renderer(engine) as render:
        everything = read(path, metrics, asked.metrics, render)
    questions, faults = scorable(everything, metrics)
    if not questions:
        raise StageError(
            f"{path}: none of the {len(everything)} rows can be scored; {faults[0]}",
            failure=FailureClass.USER,
            hint="give rows an `output`, or name a data set that has it in settings.perf.input_data",
        )
    found = timed.read(
        context.inputs["perf"] / "events.jsonl", {each.prompt.id: each for each in questions}, encoder(engine)
    )
    if not found.samples:
        raise StageError(
            f"perf measured no answer to any of the {len(questions)} questions",
            failure=FailureClass.USER,
            hint="--input-data must be the file that perf was given",
        )
    scored = result.score(found.samples, metrics, context.progress)
    about = {
        "not_scored": {
            "rows": len(everything) - len(questions),
            "failed_requests": found.failed,
            "not_asked": list(found.not_asked),
        },
        "greedy": not found.settings.get("temperature"),
    }
    written = result.write(context.out, scored, metrics, source="perf", **about, settings=to_json(asked))
    print(result.line(written), f"({len(found.samples)} answers)")  # noqa: T201 - the stage's log
    for fault in faults:
        print(f"not scored: {fault}")  # noqa: T201
    result.check_least(written, asked.metrics[0], asked.min_score)
