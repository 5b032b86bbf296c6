"""Standard tasks by lm-evaluation-harness: its command line for an OpenAI-compatible server, and its results.

It runs as a separate program: `pip install 'trtllm-pipeline[lm-eval]'`, here or in a separate environment. Source of
options, log and result files: lm-evaluation-harness 0.4, docs/interface.md, and its `evaluation_tracker`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import FailureClass, StageError, UsageError, write_json
from trtllm_pipeline.measure.client.urls import api_url
from trtllm_pipeline.measure.load.stats import CONFIDENCE, Interval, mean_interval
from trtllm_pipeline.measure.score.accuracy_result import ACCURACY_FILE, ANSWERS, AccuracyResult

PROGRAM: Final = "lm_eval"
PYTHON_VARIABLE: Final = "LM_EVAL_PYTHON"
"""Environment variable with the Python that has lm-eval."""
INSTALL: Final = (
    f"pip install 'trtllm-pipeline[lm-eval]', or set {PYTHON_VARIABLE} to the Python of an environment that has it"
)
SHIPPED_TASKS: Final = PACKAGE / "data" / "tasks"
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
_ITEM: Final = re.compile(r"(\w[\w.+-]*)(?::([1-9]\d*))?")
_ROUNDING: Final = 1e-6
_LINE: Final = re.compile(r"[\r\n]")
_PROGRESS: Final = re.compile(r"Requesting API:.*?(\d+)/(\d+) \[[^\]]*\]")
_LIKELIHOOD: Final = re.compile(r"Running loglikelihood(?:_rolling)? requests")
_REFUSAL: Final = re.compile(r"API request failed.*?(?:Response text|error message): (.*?)\. Retrying")
Progress = Callable[[float, float | None, str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Options of an evaluation."""

    url: str
    """URL of the server, with or without `/v1`."""
    model: str
    tasks: tuple[str, ...]
    """Names of tasks or groups, each optionally with its own limit as NAME:LIMIT."""
    endpoint: str = "completions"
    """completions or chat. Tasks that rank choices by their likelihood need completions with prompt logprobs."""
    tokenizer: str | None = None
    """Name or directory of the model's tokenizer. None leaves it to lm_eval, which queries the server or uses the model's
    name. "none" uses no tokenizer, which works for tasks that only generate."""
    max_length: int | None = None
    """Send tokens instead of text, at most this many with the answer. Needs a tokenizer."""
    num_fewshot: int | None = None
    """None: the task's default."""
    limit: str | None = None
    """Questions of each task without its own limit, or a share of them below 1."""
    concurrency: int = 4
    timeout_s: float | None = None
    """Time limit of one request. None: lm_eval's."""
    include_path: str | None = None
    """Directory with the user's own tasks. Relative paths in their files start there."""
    likelihoods: bool = True
    """False if the server is known not to return log probabilities of prompts."""


class TaskItem(NamedTuple):
    """A task or a group of tasks, and the limit for the questions of each."""

    name: str
    limit: str | None = None

    @staticmethod
    def parse(text: str) -> TaskItem:
        """`gsm8k` or `mmlu:200`. Raises ValueError."""
        match = _ITEM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a task: write NAME, or NAME:LIMIT such as mmlu:200")
        return TaskItem(match[1], match[2])

    @property
    def shipped(self) -> bool:
        """True for a task that comes with the project."""
        return (SHIPPED_TASKS / f"{self.name}.yaml").is_file()


class Harness(NamedTuple):
    """The program, and its version if known."""

    argv: tuple[str, ...]
    version: str | None


def installed() -> Harness | None:
    """lm_eval of the Python in LM_EVAL_PYTHON, on PATH, or next to this Python. None if missing."""
    if python := os.environ.get(PYTHON_VARIABLE):
        version = _version(Path(python))
        return None if version is None else Harness((python, "-m", PROGRAM), version)
    beside = Path(sys.executable).parent / PROGRAM
    program = shutil.which(PROGRAM) or (str(beside) if beside.is_file() else None)
    return None if program is None else Harness((program,), _version(Path(program)))


def _version(program: Path) -> str | None:
    """The release in the environment of a program or Python, determined without starting it."""
    records = program.parent.parent.glob("lib/python3*/site-packages/lm_eval-*.dist-info")
    return next((record.name.removeprefix("lm_eval-").removesuffix(".dist-info") for record in records), None)


def missing() -> str:
    """Where lm_eval was searched for without success."""
    if python := os.environ.get(PYTHON_VARIABLE):
        return f"{PYTHON_VARIABLE}={python} has no lm_eval"
    return "lm_eval is not installed, neither on PATH nor next to this Python"


def commands(program: Sequence[str], evaluation: Evaluation, output: Path) -> dict[TaskItem, list[str]]:
    """A command line for each task: lm_eval has one limit and one directory for all of its tasks.

    Raises UsageError for invalid or repeated names, and for text that `--model_args` cannot contain.
    """
    try:
        items = [TaskItem.parse(task) for task in evaluation.tasks]
    except ValueError as error:
        raise UsageError(str(error)) from error
    names = [item.name for item in items]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"task {twice} is given twice")
    return {item: _command(program, evaluation, item, output) for item in items}


def _command(program: Sequence[str], evaluation: Evaluation, item: TaskItem, output: Path) -> list[str]:
    name, path = _MODELS[evaluation.endpoint]
    arguments = {
        "model": evaluation.model,
        "base_url": api_url(evaluation.url) + path,
        "num_concurrent": str(evaluation.concurrency),
        "tokenized_requests": str(evaluation.max_length is not None),
    }
    if evaluation.max_length is not None:
        arguments["max_length"] = str(evaluation.max_length)
    if evaluation.timeout_s is not None:
        arguments["timeout"] = str(max(1, round(evaluation.timeout_s)))
    if evaluation.tokenizer == "none":
        arguments["tokenizer_backend"] = "None"
    elif evaluation.tokenizer is not None:
        arguments |= {"tokenizer": evaluation.tokenizer, "tokenizer_backend": "huggingface"}
    for key, value in arguments.items():
        if "," in value or "=" in value:
            raise UsageError(f"{key} {value!r}: lm_eval does not accept commas or equals signs here")
    argv = [*program, "--model", name]
    argv += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    argv += ["--tasks", item.name, "--output_path", str(output / item.name), "--log_samples"]
    if evaluation.endpoint == "chat":
        argv.append("--apply_chat_template")
    for flag, option in (
        ("--num_fewshot", evaluation.num_fewshot),
        ("--limit", item.limit or evaluation.limit),
        ("--include_path", _folder(evaluation, item)),
    ):
        argv += [] if option is None else [flag, str(option)]
    return argv


def _folder(evaluation: Evaluation, item: TaskItem) -> Path | None:
    """The directory of a task that is not built into lm_eval."""
    own = None if evaluation.include_path is None else Path(evaluation.include_path).absolute()
    return SHIPPED_TASKS if item.shipped else own


def evaluate(
    evaluation: Evaluation,
    output: Path,
    *,
    started: Callable[[Sequence[str]], None],
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
    shares: bool = False,
) -> AccuracyResult:
    """Run the tasks one after another. Returns their scores, and writes accuracy.json and answers.jsonl into `output`,
    next to the files of lm_eval, whose log goes to stderr. `started` is called with each command line. `shares`: only
    scores from 0 to 1, higher is better.

    Raises UsageError when lm_eval is not installed, StageError when it fails, or when a task needs log probabilities of
    prompts that the server does not return.
    """
    if (harness := installed()) is None:
        raise UsageError(missing(), hint=INSTALL)
    found = []
    for item, argv in commands(harness.argv, evaluation, output.absolute()).items():
        started(argv)
        _run(argv, item, evaluation, progress)
        found.append(TaskResults.read(output / item.name, item.name, shares=shares))
        if found[-1].ranks and not evaluation.likelihoods:
            raise _no_likelihoods(item)
    given = {name: getattr(evaluation, name) for name in ("url", "model", "endpoint", "limit")}
    result = _summary(found, given if settings is None else settings, f"/v1{_MODELS[evaluation.endpoint][1]}")
    with (output / ANSWERS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for each in found for row in each.answers)
    write_json(output / ACCURACY_FILE, result.to_json())
    return result


def _run(argv: Sequence[str], item: TaskItem, evaluation: Evaluation, progress: Progress | None) -> None:
    """Run one command line in the directory of its tasks."""
    refused, folder = None, _folder(evaluation, item)
    if folder is not None and not folder.is_dir():
        raise UsageError(
            f"{folder} is not a directory with tasks", hint="--include-path DIR, or settings.accuracy.include_path"
        )
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "LMEVAL_LOG_LEVEL": "INFO"},  # the kind of requests is logged
    ) as process:
        try:
            for line in _lines(process):
                if (done := _PROGRESS.search(line)) is not None:
                    if progress is not None:
                        progress(int(done[1]), int(done[2]), f"questions of {item.name}")
                    line = _PROGRESS.sub("", line)
                    if not line.strip():
                        continue
                print(line, file=sys.stderr)  # noqa: T201 - the log
                refused = found[1] if (found := _REFUSAL.search(line)) else refused
                if _LIKELIHOOD.search(line) and not evaluation.likelihoods:
                    raise _no_likelihoods(item)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        why = "" if refused is None else f"; the server refused a request: {refused}"
        raise StageError(
            f"{PROGRAM} ended with exit code {process.returncode} for {item.name}{why}",
            hint="its output is in the log above"
            if refused is None
            else "prompt and answer must fit the lengths that the model is served with",
        )


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Lines of the output. Each state of a progress bar is a separate line."""
    assert process.stdout is not None
    rest = ""
    for data in iter(partial(process.stdout.read1, 1 << 16), b""):  # type: ignore[attr-defined]
        *lines, rest = _LINE.split(rest + data.decode(errors="replace"))
        yield from filter(None, lines)
    if rest:
        yield rest


def _no_likelihoods(item: TaskItem) -> StageError:
    return StageError(
        f"task {item.name} needs log probabilities of the prompt, which this server does not return",
        failure=FailureClass.USER,
        hint="use a task that generates its answers, such as gsm8k, or a server that returns them, such as vLLM, "
        "at its endpoint completions",
    )


# Results


@dataclass(frozen=True, slots=True)
class TaskResults:
    """The results of one run of lm_eval. Scores have names such as `gsm8k.exact_match.strict_match`."""

    scores: Mapping[str, float]
    errors: Mapping[str, float | None]
    questions: Mapping[str, int | None]
    tasks: Mapping[str, Mapping[str, Any]]
    """Version, number of examples before a question, number of questions and standard errors of each task."""
    lm_eval_version: str | None
    ranks: bool
    """True if a task ranks choices by log probabilities."""
    answers: Sequence[Mapping[str, Any]]
    """Rows of answers.jsonl. An answer only has a score if the score of the task is the mean of its questions' scores."""

    @staticmethod
    def read(output: Path, task: str, *, shares: bool = False) -> TaskResults:
        """The newest results below `output`: of `task`, or of its parts if it has no own results.

        Raises StageError if there are none, if they have another format, or if no score can be used.
        """
        files = sorted(output.rglob("results_*.json"), key=lambda path: path.stat().st_mtime_ns)
        if not files:
            raise StageError(f"{PROGRAM} left no results_*.json below {output}")
        try:
            found = _read(files[-1], task, shares=shares)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise StageError(
                f"{files[-1]}: not a results file of {PROGRAM}: {error!r}", failure=FailureClass.BUG
            ) from error
        if not found.scores:
            raise StageError(f"task {task} has no score from 0 to 1, higher is better", failure=FailureClass.USER)
        return found


def _summary(found: Sequence[TaskResults], settings: Mapping[str, Any], asked: str) -> AccuracyResult:
    """All results together."""
    scores = {name: value for each in found for name, value in each.scores.items()}
    errors = {name: value for each in found for name, value in each.errors.items()}
    questions = {name: count for each in found for name, count in each.questions.items()}
    rows = sorted(f"{row['id']} {row['input']} {row['output']}" for each in found for row in each.answers)
    version = found[0].lm_eval_version
    return AccuracyResult(
        scores=scores,
        intervals={name: _interval(value, errors[name], questions[name]) for name, value in scores.items()},
        questions=questions,
        total=len(rows) or None,
        rows_digest=f"sha256:{hashlib.sha256(json.dumps(rows).encode()).hexdigest()}" if rows else None,
        asked=f"{asked}, by lm-evaluation-harness {version or 'of unknown version'}",
        interval_method=METHOD,
        settings=settings,
        more={
            "source": "lm-eval",
            "tasks": {name: about for each in found for name, about in each.tasks.items()},
            "lm_eval_version": version,
        },
    )


def _read(file: Path, asked: str, *, shares: bool) -> TaskResults:
    data = json.loads(file.read_text(encoding="utf-8"))
    results: dict[str, Any] = {task: values for task, values in data["results"].items() if _metrics(values)}
    shown = [asked] if asked in results else list(results)  # a tag only has the results of its tasks
    parts = {task: _parts(task, data.get("group_subtasks") or {}) for task in shown}
    samples = {part: _samples(file, part) for part in {part for each in parts.values() for part in each}}
    counts: dict[str, int | None] = {
        task: (data.get("n-samples", {}).get(task) or {}).get("effective")
        or sum(len(samples[each]) for each in part)
        or None
        for task, part in parts.items()
    }
    scores: dict[str, float] = {}
    errors: dict[str, float | None] = {}
    questions: dict[str, int | None] = {}
    answers: dict[str, dict[str, Any]] = {}
    for task in shown:
        for key, value in _metrics(results[task]):
            metric, _, chain = key.partition(",")
            rising = (data.get("higher_is_better", {}).get(task) or {}).get(metric)
            if shares and (rising is False or not _is_share(value)):
                continue
            name = ".".join(map(_plain, (task, metric) if chain == "none" else (task, metric, chain)))
            error = results[task].get(f"{metric}_stderr,{chain}")
            scores[name], questions[name] = value, counts[task]
            errors[name] = float(error) if _is_number(error) else None
            rows = [(part, row) for part in parts[task] for row in samples[part] if row.get("filter", "none") == chain]
            for part, row in rows:
                answers.setdefault(f"{part}/{row['doc_id']}", _answer(part, row))
            values = [float(row[metric]) for _, row in rows if _is_share(row.get(metric))]
            if rows and len(values) == len(rows) and abs(fmean(values) - value) < _ROUNDING:
                for (part, row), of_row in zip(rows, values, strict=True):
                    answers[f"{part}/{row['doc_id']}"]["scores"][name] = of_row
    about = {
        task: {
            "version": data.get("versions", {}).get(task),
            "num_fewshot": data.get("n-shot", {}).get(task),
            "questions": counts[task],
            "higher_is_better": data.get("higher_is_better", {}).get(task),
            "standard_errors": {name: errors[name] for name in scores if name.startswith(f"{_plain(task)}.")},
        }
        for task in shown
    }
    kinds = {(data.get("configs", {}).get(part) or {}).get("output_type") for each in parts.values() for part in each}
    ranks = bool(kinds - {None, "generate_until"})
    return TaskResults(scores, errors, questions, about, data.get("lm_eval_version"), ranks, list(answers.values()))


def _parts(task: str, groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The tasks of a group, or the task itself."""
    below = [part for each in groups.get(task, ()) for part in _parts(each, groups)]
    return tuple(dict.fromkeys(below)) or (task,)


def _samples(file: Path, task: str) -> list[dict[str, Any]]:
    """The answers to a task, one for each question and filter. Empty if they are missing."""
    moment = file.name.removeprefix("results_").removesuffix(".json")
    path = file.with_name(f"samples_{task}_{moment}.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line] if path.is_file() else []


def _answer(task: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of answers.jsonl: the text, or the number of the likeliest choice. The prompt is in lm_eval's own file."""
    first = row["resps"][0][0] if row["resps"] and row["resps"][0] else ""
    if not isinstance(first, str):
        likelihoods = [float(each[0][0]) for each in row["resps"]]
        first = str(max(range(len(likelihoods)), key=likelihoods.__getitem__))
    hashes = {name: str(row.get(f"{of}_hash") or "") for name, of in (("input", "prompt"), ("output", "target"))}
    return {"id": f"{task}/{row['doc_id']}", **hashes, "answer": first, "scores": {}}


def _metrics(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(metric,filter) and value of one task's entry, without standard errors and descriptions."""
    return [(key, value) for key, value in values.items() if "," in key and "_stderr," not in key and _is_number(value)]


def _plain(text: str) -> str:
    """`text` in the characters allowed for metrics."""
    return re.sub(r"\W", "_", text.lower(), flags=re.ASCII)


def _interval(value: float, error: float | None, questions: int | None) -> Interval | None:
    """Interval from the standard error, unless all questions scored alike: then it is 0 and meaningless."""
    if value in {0, 1} and questions:
        return mean_interval([value] * questions, low=0, high=1)
    if error is None:
        return None
    low, high = value - _Z * error, value + _Z * error
    return (max(0.0, low), min(1.0, high)) if 0 < value < 1 else (low, high)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    """True for the score of a question. lm_eval writes some as booleans."""
    return isinstance(value, (int, float)) and 0 <= value <= 1
