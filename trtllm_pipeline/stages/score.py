"""Score the answers that perf timed: no request is made, no server is needed.

Leaves `answers.jsonl` (every measured answer and its scores) and `accuracy.json`, as the accuracy stage does.
"""

from __future__ import annotations

from trtllm_pipeline.bench.prompts import chat_renderer
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.evaluate import result, timed
from trtllm_pipeline.evaluate.questions import read, scorable
from trtllm_pipeline.stages.asking import encoder
from trtllm_pipeline.stages.base import Work


def run(work: Work) -> None:
    """Read, score, write. Raises StageError when there is nothing to score or the score is too low."""
    engine = work.inputs["engine"]
    names = work.params["metrics"]
    metrics = result.metrics_of(names, work.files.get("metric_module"))
    assert isinstance(names, list)
    path = work.files["input_data"]
    with chat_renderer(engine) as render:
        everything = read(path, metrics, list(map(str, names)), render)
    questions, faults = scorable(everything, metrics)
    if not questions:
        raise StageError(
            f"{path}: none of the {len(everything)} rows can be scored; {faults[0]}",
            failure=FailureClass.USER,
            hint="give rows an `output`, or name a data set that has it in settings.perf.input_data",
        )
    found = timed.read(
        work.inputs["perf"] / "events.jsonl", {each.prompt.id: each for each in questions}, encoder(engine)
    )
    if not found.samples:
        raise StageError(
            f"perf measured no answer to any of the {len(questions)} questions",
            failure=FailureClass.USER,
            hint="--input-data must be the file that perf was given",
        )
    scored = result.score(found.samples, metrics, work.progress)
    about = {
        "not_scored": {
            "rows": len(everything) - len(questions),
            "failed_requests": found.failed,
            "not_asked": list(found.not_asked),
        },
        "greedy": not found.settings.get("temperature"),
    }
    written = result.write(work.out, scored, metrics, source="perf", **about, settings=dict(work.params))
    print(result.line(written), f"({len(found.samples)} answers)")  # noqa: T201 - the stage's log
    for fault in faults:
        print(f"not scored: {fault}")  # noqa: T201
    result.check_least(written, str(names[0]), work.params.get("min_score"))
