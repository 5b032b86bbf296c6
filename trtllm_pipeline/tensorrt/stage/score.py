"""Score the answers that perf timed. No requests are sent and no server is needed.

Writes `answers.jsonl` (every measured answer and its scores) and `accuracy.json`, like the accuracy stage.
"""

from __future__ import annotations

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure import EVENTS_FILE, accuracy_result, answers, metrics_of, prompts, questions, timed_answers
from trtllm_pipeline.models import added_prefix, read_tokenizer
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.model_inputs import encoder, model_folder
from trtllm_pipeline.tensorrt.stage.params import ScoreParams, to_json


def run(context: StageContext[ScoreParams]) -> None:
    """Read, score, write. Raises StageError if no answer can be scored or the score is too low."""
    model = model_folder(context.inputs)
    params = context.params
    metrics = metrics_of(params.metrics, context.files.get("metric_module"))
    path = context.files["input_data"]
    with prompts.chat_renderer(model, lambda: True) as render:
        everything = questions.read_questions(path, metrics, params.metrics, render)
    rated, faults = questions.scorable(everything, metrics)
    if not rated:
        raise StageError(
            f"{path}: none of the {len(everything)} rows can be scored; {faults[0]}",
            failure=FailureClass.USER,
            hint="add `output` to the rows, or set settings.perf.input_data to a data set with it",
        )
    encode = encoder(model)
    timed = timed_answers(
        context.inputs["perf"] / EVENTS_FILE,
        {each.prompt.id: each for each in rated},
        encode,
        "" if encode is None else added_prefix(read_tokenizer(model)),
    )
    if not timed.answers:
        raise StageError(
            f"perf measured no answer to any of the {len(rated)} questions",
            failure=FailureClass.USER,
            hint="--input-data must be perf's input file",
        )
    scored = accuracy_result.score(timed.answers, metrics, context.progress)
    not_scored = {
        "rows": len(everything) - len(rated),
        "failed_requests": timed.failed,
        "not_asked": list(timed.not_asked),
    }
    greedy = not timed.settings.get("temperature")
    means = accuracy_result.summary(
        scored,
        metrics,
        to_json(params),
        asked=answers.question_endpoint(timed.protocol, rated),
        source="perf",
        not_scored=not_scored,
        greedy=greedy,
    )
    accuracy_result.write(context.out, scored, means)
    print(means, f"({len(scored)} answers)")  # noqa: T201 - the stage's log
    for fault in faults:
        print(f"not scored: {fault}")  # noqa: T201
    means.check_least(params.metrics[0], params.min_score)
