"""Standard tasks by lm-evaluation-harness: its command line for an OpenAI-compatible server, and what it leaves.

It runs as a separate program, found on PATH or next to this Python: `pip install 'trtllm-pipeline[lm-eval]'`.
Source of flags and of the results file: lm-evaluation-harness, docs/interface.md and docs/API_guide.md (0.4).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, StageError, UsageError, write_json
from trtllm_pipeline.measure.client.urls import api_url
from trtllm_pipeline.measure.load.stats import CONFIDENCE, Interval, mean_interval
from trtllm_pipeline.measure.score.accuracy_result import ACCURACY_FILE, AccuracyResult

PROGRAM: Final = "lm_eval"
_Z: Final = 1.959964
"""Standard errors to either end of a 95% interval of a normal distribution."""
METHOD: Final = (
    f"{CONFIDENCE:.0%}, normal: score ± {_Z:.2f} standard errors as lm-evaluation-harness gives them; "
    "if all questions scored alike, the range that this number of questions can rule out"
)
_MODELS: Final = {
    "completions": ("local-completions", "/completions"),
    "chat": ("local-chat-completions", "/chat/completions"),
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Options of an evaluation."""

    url: str
    """URL of the server, with or without `/v1`."""
    model: str
    tasks: tuple[str, ...]
    endpoint: str = "completions"
    """completions or chat. Tasks that rank choices by their likelihood need completions with prompt logprobs."""
    tokenizer: str | None = None
    """Name or directory of the model's tokenizer. None leaves it to lm_eval, which queries the server or uses the model's
    name. "none" uses no tokenizer, which works for tasks that only generate."""
    num_fewshot: int | None = None
    """None: the task's default."""
    limit: str | None = None
    """Questions a task, or a share of them below 1; for trying out."""
    concurrency: int = 4
    include_path: str | None = None
    """Directory with tasks of the user's own."""


def command(program: str, evaluation: Evaluation, output: Path) -> list[str]:
    """The command line. Raises UsageError for what its `--model_args` cannot hold."""
    name, path = _MODELS[evaluation.endpoint]
    arguments = {
        "model": evaluation.model,
        "base_url": api_url(evaluation.url) + path,
        "num_concurrent": str(evaluation.concurrency),
        "tokenized_requests": "False",
    }
    if evaluation.tokenizer == "none":
        arguments["tokenizer_backend"] = "None"
    elif evaluation.tokenizer is not None:
        arguments["tokenizer"] = evaluation.tokenizer
    for key, value in arguments.items():
        if "," in value or "=" in value:
            raise UsageError(f"{key} {value!r}: lm_eval takes no comma or equals sign here")
    argv = [program, "--model", name]
    argv += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    argv += ["--tasks", ",".join(evaluation.tasks), "--output_path", str(output)]
    if evaluation.endpoint == "chat":
        argv.append("--apply_chat_template")
    for flag, option in (
        ("--num_fewshot", evaluation.num_fewshot),
        ("--limit", evaluation.limit),
        ("--include_path", evaluation.include_path),
    ):
        argv += [] if option is None else [flag, str(option)]
    return argv


def find_program() -> str:
    """Path of lm_eval. Raises UsageError when it is not installed."""
    beside = Path(sys.executable).parent / PROGRAM
    program = shutil.which(PROGRAM) or (str(beside) if beside.is_file() else None)
    if program is None:
        raise UsageError(
            "lm_eval is not installed, neither on PATH nor next to this Python",
            hint="pip install 'trtllm-pipeline[lm-eval]'",
        )
    return program


def evaluate(
    evaluation: Evaluation, folder: Path | None, scratch: Path, *, started: Callable[[Sequence[str]], None]
) -> AccuracyResult:
    """Run it and return its results, which are kept in `directory` if given. `started` is called with the command line.

    Raises UsageError when lm_eval is not installed, StageError when it fails.
    """
    argv = command(find_program(), evaluation, folder or scratch)
    started(argv)
    code = subprocess.run(argv, stdout=sys.stderr, check=False).returncode
    if code != 0:
        raise StageError(
            f"{PROGRAM} ended with exit code {code}", hint="its output is above; to repeat: " + " ".join(argv)
        )
    results = read_results(folder or scratch)
    settings = {name: getattr(evaluation, name) for name in ("url", "model", "endpoint", "limit")}
    results = replace(results, settings=settings, more={**results.more, "command": argv})
    if folder is not None:
        write_json(folder / ACCURACY_FILE, results.to_json())
    return results


def read_results(output: Path) -> AccuracyResult:
    """The newest results below `output` in our form. Raises StageError when there are none, or of another form."""
    files = sorted(output.rglob("results_*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise StageError(f"{PROGRAM} left no results_*.json below {output}")
    try:
        data = json.loads(files[-1].read_text(encoding="utf-8"))
        scores: dict[str, float] = {}
        intervals: dict[str, Interval | None] = {}
        questions: dict[str, int | None] = {}
        samples = {task: (data.get("n-samples", {}).get(task) or {}).get("effective") for task in data["results"]}
        for task, values in data["results"].items():
            for key, value in _metrics(values):
                name, (metric, _, chain) = f"{task}/{key.removesuffix(',none')}", key.partition(",")
                scores[name], questions[name] = value, samples[task]
                intervals[name] = _interval(value, values.get(f"{metric}_stderr,{chain}"), samples[task])
        tasks = {
            task: {
                "version": data.get("versions", {}).get(task),
                "num_fewshot": data.get("n-shot", {}).get(task),
                "questions": samples[task],
                "higher_is_better": data.get("higher_is_better", {}).get(task),
            }
            for task in data["results"]
        }
        return AccuracyResult(
            scores=scores,
            intervals=intervals,
            questions=questions,
            interval_method=METHOD,
            more={"source": "lm-eval", "tasks": tasks, "lm_eval_version": data.get("lm_eval_version")},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError(
            f"{files[-1]}: not a results file of {PROGRAM}: {error!r}", failure=FailureClass.BUG
        ) from error


def _metrics(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(metric,filter) and value of one task's entry, without standard errors and descriptions."""
    return [(key, value) for key, value in values.items() if "," in key and "_stderr," not in key and _is_number(value)]


def _interval(value: float, error: object, questions: int | None) -> Interval | None:
    """From the standard error, unless all questions scored alike: then it is 0 and meaningless."""
    if value in {0, 1} and questions:
        return mean_interval([value] * questions, low=0, high=1)
    return (value - _Z * error, value + _Z * error) if isinstance(error, float) else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
