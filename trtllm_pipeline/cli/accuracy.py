"""`pipeline accuracy`: score any server by its URL, compare answers, run standard tasks; else the stage of that name.

pipeline accuracy -u URL -m MODEL --input-data FILE      ask a server and score its answers
pipeline accuracy compare ANSWERS_A ANSWERS_B            how far B's answers are from A's
pipeline accuracy lm-eval -u URL -m MODEL --tasks ...    standard tasks by lm-evaluation-harness
pipeline accuracy --matrix FILE | --service FILE ...     the stage
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.cli import options, stage
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.errors import UsageError

_URL_FLAGS: Final = ("-u", "--url")
_FORMATS: Final = ("table", "json", "csv")


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the form that the words on the command line choose."""
    words: Sequence[str] = parser.get_default("words") or ()
    if words[:1] == ["compare"]:
        _configure_compare(parser)
    elif words[:1] == ["lm-eval"]:
        _configure_lm_eval(parser)
    elif any(word.partition("=")[0] in _URL_FLAGS or word.startswith("-u") for word in words):
        _configure_url(parser)
    else:
        stage.configure(parser)
        parser.set_defaults(form=stage.run)
        forms = "other forms, each with its own --help:"
        parser.epilog = (
            f"{parser.epilog}\n\n{forms}\n"
            "  pipeline accuracy -u URL -m MODEL --input-data FILE     ask any server and score its answers\n"
            "  pipeline accuracy compare ANSWERS_A ANSWERS_B           how far B's answers are from A's\n"
            "  pipeline accuracy lm-eval -u URL -m MODEL --tasks TASK  standard tasks by lm-evaluation-harness"
        )


def run(args: argparse.Namespace) -> int:
    """Do what the chosen form does."""
    code: int = args.form(args)
    return code


# One server, by its URL.


def _configure_url(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask a running server the questions of a JSONL file, greedily, and score its answers. No matrix and no "
        "workspace are needed. A key for an OpenAI-compatible server is taken from OPENAI_API_KEY."
    )
    parser.epilog = (
        "examples:\n"
        "  pipeline accuracy -u localhost:8001 -m ensemble --input-data questions.jsonl\n"
        "  pipeline accuracy -u http://localhost:8000 -i openai -m Qwen/Qwen2.5-0.5B --input-data builtin:accuracy --format csv"
    )
    _add_server(parser)
    parser.add_argument(
        "-i",
        "--interface",
        choices=("grpc", "http", "openai"),
        default="grpc",
        help="how to talk (default grpc, Triton's)",
    )
    parser.add_argument(
        "--endpoint-type", choices=("chat", "completions"), default="chat", help="of OpenAI (default chat)"
    )
    parser.add_argument("--input-data", metavar="FILE", required=True, help="JSONL of questions, or builtin:NAME")
    parser.add_argument(
        "--metrics",
        metavar="NAMES",
        default="exact,contains",
        help="for rows that name no `metric` (default exact,contains); or functions of yours: MODULE:FUNCTION",
    )
    parser.add_argument("--max-tokens", type=_positive, metavar="N", default=32, help="length of answers (default 32)")
    parser.add_argument("--concurrency", type=_positive, metavar="N", default=4, help="requests in flight (default 4)")
    parser.add_argument("--min-score", type=_score, metavar="X", help="exit code 1 when the first metric is below it")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder with tokenizer.json and chat template: for rows with `messages`, and tokens in answers.jsonl",
    )
    parser.add_argument("--request-timeout-s", type=_seconds, metavar="S", default=300.0, help="default 300")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="leave answers.jsonl and accuracy.json there")
    options.add_format(parser, *_FORMATS)
    parser.set_defaults(form=_score_url)


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-u", "--url", metavar="URL", required=True, help="where the server is, HOST:PORT or http://..."
    )
    parser.add_argument("-m", "--model", metavar="NAME", required=True, help="model to ask")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _score(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"expected a score from 0 to 1, got {text!r}")
    return value


def _score_url(args: argparse.Namespace) -> int:
    from trtllm_pipeline.bench.prompts import chat_renderer, tokenizer_folder, unrendered
    from trtllm_pipeline.bench.target import Target
    from trtllm_pipeline.evaluate import result
    from trtllm_pipeline.evaluate.ask import questions_of, score_server
    from trtllm_pipeline.files.model_files import tokenizer_at
    from trtllm_pipeline.hub.dataset_file import data_file

    names = [name.strip() for name in args.metrics.split(",") if name.strip()]
    metrics = result.metrics_of(list(names))
    path = data_file(args.input_data, Path())
    # Nobody times these answers: unary is what every OpenAI-compatible server has.
    openai = args.interface == "openai"
    target = Target.at(
        args.url,
        args.interface,
        args.model,
        endpoint=args.endpoint_type,
        streaming=not openai,
        timeout_s=args.request_timeout_s,
        max_tokens=args.max_tokens,
    )
    # Before anything is asked: a wrong folder must not cost the answers.
    tokenizer = None if args.tokenizer is None else tokenizer_at(args.tokenizer)
    chats = target.protocol.startswith("openai_chat")  # the server has the template
    with nullcontext(unrendered) if chats else chat_renderer(tokenizer_folder(args.tokenizer)) as render:
        questions = questions_of(path, metrics, names, render)
    _check_new(args.output_dir)
    found = score_server(
        target,
        questions,
        metrics,
        concurrency=args.concurrency,
        encode=None if tokenizer is None else lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids),
        folder=args.output_dir,
        source="url",
        settings={"url": args.url, "model": args.model, "protocol": target.protocol},
    )
    _show_scores(found, args.format)
    result.check_least(found, names[0], args.min_score)
    return 0


def _check_new(folder: Path | None) -> None:
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"--output-dir {folder}: is not an empty folder", hint="name a new one; nothing is overwritten"
        )


def _show_scores(found: Mapping[str, Any], form: str) -> None:
    from trtllm_pipeline.report import scores

    if form == "json":
        emit_json(found)
    else:
        emit(scores.scores_csv(found) if form == "csv" else scores.scores_text(found))


# Two files of answers.


def _configure_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "How far the answers of B are from those of A to the same questions: how many agree, where they part, and by "
        "how much the scores differ, with a paired bootstrap interval. No server is needed."
    )
    parser.epilog = "example:\n  pipeline accuracy compare fp16/answers.jsonl int4/answers.jsonl"
    parser.add_argument("verb", metavar="compare", help=argparse.SUPPRESS)
    parser.add_argument("reference", type=Path, metavar="ANSWERS_A", help="answers.jsonl, or the folder it lies in")
    parser.add_argument("other", type=Path, metavar="ANSWERS_B", help="the same of the other model")
    options.add_format(parser, *_FORMATS)
    parser.set_defaults(form=_compare)


def _compare(args: argparse.Namespace) -> int:
    from trtllm_pipeline.bench.stats import MEAN_INTERVAL
    from trtllm_pipeline.evaluate import drift
    from trtllm_pipeline.report import scores

    found = drift.compare(drift.read(args.reference), drift.read(args.other))
    if args.format == "json":
        emit_json({"schema": 1, **found.to_json(), "interval_method": MEAN_INTERVAL, "definitions": drift.DEFINITIONS})
        return 0
    emit(scores.drift_csv(found) if args.format == "csv" else scores.drift_text(found))
    return 0


# Standard tasks.


def _configure_lm_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Standard tasks by lm-evaluation-harness (the extra [lm-eval]) against an OpenAI-compatible server, such as "
        "trtllm-serve or vLLM. Triton itself, and so the embedded toolchain, has no such endpoint. It fetches its "
        "data sets itself. A key is taken from OPENAI_API_KEY."
    )
    parser.epilog = (
        "examples:\n"
        "  pipeline accuracy lm-eval -u http://localhost:8000 -m Qwen/Qwen2.5-0.5B --tasks gsm8k --limit 50\n"
        "  pipeline accuracy lm-eval -u http://localhost:8000 -m m --tasks mine --include-path tasks/ --dry-run"
    )
    parser.add_argument("verb", metavar="lm-eval", help=argparse.SUPPRESS)
    _add_server(parser)
    parser.add_argument("--tasks", metavar="NAMES", required=True, help="with commas; `lm_eval ls tasks` lists them")
    parser.add_argument(
        "--endpoint-type",
        choices=("completions", "chat"),
        default="completions",
        help="tasks that rank choices need completions (default)",
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="name or folder; none does without (default: lm_eval finds one)"
    )
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)"
    )
    parser.add_argument("--limit", metavar="N", help="questions a task, or a share of them; for trying out")
    parser.add_argument("--concurrency", type=_positive, metavar="N", default=4, help="requests in flight (default 4)")
    parser.add_argument("--include-path", metavar="DIR", help="folder with tasks of your own")
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="leave what lm_eval writes there, and accuracy.json"
    )
    parser.add_argument("--dry-run", action="store_true", help="print lm_eval's command line and stop")
    options.add_format(parser, *_FORMATS)
    parser.set_defaults(form=_lm_eval)


def _lm_eval(args: argparse.Namespace) -> int:
    import shlex

    from trtllm_pipeline.evaluate import lm_eval
    from trtllm_pipeline.files.writing import write_json

    evaluation = lm_eval.Evaluation(
        url=args.url if "://" in args.url else f"http://{args.url}",
        model=args.model,
        tasks=tuple(filter(None, args.tasks.split(","))),
        endpoint=args.endpoint_type,
        tokenizer=args.tokenizer,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        concurrency=args.concurrency,
        include_path=args.include_path,
    )
    if args.dry_run:
        output = args.output_dir or Path("DIR")
        emit(shlex.join(lm_eval.command(lm_eval.PROGRAM, evaluation, output)))
        return 0
    program = lm_eval.find_program()
    _check_new(args.output_dir)
    with tempfile.TemporaryDirectory(prefix="pipeline-lm-eval-") as scratch:
        output = args.output_dir or Path(scratch)
        argv = lm_eval.command(program, evaluation, output)
        note(shlex.join(argv))
        found = lm_eval.run(argv, output)
        found["settings"] = {"url": args.url, "model": args.model, "endpoint": args.endpoint_type, "limit": args.limit}
        found["command"] = argv
        if args.output_dir is not None:
            write_json(args.output_dir / "accuracy.json", found)
    _show_scores(found, args.format)
    return 0
