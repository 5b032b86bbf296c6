"""`pipeline evaluate`: score the answers of any server, compare two sets of answers, run standard tasks."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trtllm_pipeline.cli import options, server_options
from trtllm_pipeline.cli.output import emit, emit_json, note

Format = Annotated[Literal["table", "json", "csv"], typer.Option("--format", help="output format")]
Concurrency = Annotated[int, typer.Option("--concurrency", metavar="N", min=1, help="requests in flight")]


def answers(
    url: options.Url,
    model: options.Model,
    input_data: Annotated[
        str, typer.Option("--input-data", metavar="FILE", help="JSONL file of questions, or builtin:NAME")
    ],
    protocol: server_options.Protocol = "grpc",
    endpoint_type: server_options.EndpointType = "chat",
    request_timeout_s: server_options.RequestTimeout = 300.0,
    metrics: Annotated[
        str,
        typer.Option(
            "--metrics",
            metavar="NAMES",
            help="metrics of rows that name none: names, or your own functions as MODULE:FUNCTION",
        ),
    ] = "exact,contains",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="output tokens of an answer at most")
    ] = 32,
    concurrency: Concurrency = 4,
    min_score: Annotated[
        float | None,
        typer.Option("--min-score", metavar="X", min=0, max=1, help="fail if the first metric is below this"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="a model's folder; its chat template renders rows with messages, its tokens go into answers.jsonl",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", metavar="DIR", help="new folder for answers.jsonl and accuracy.json"),
    ] = None,
    format: Format = "table",
) -> None:
    r"""Ask a running server questions and score its greedy answers.

    No matrix and no workspace are needed. The key for an OpenAI-compatible server is read from OPENAI_API_KEY. The exit code
    is 1 if requests fail or the score is below --min-score.

    examples:
      pipeline evaluate answers -u localhost:8001 --model ensemble --input-data questions.jsonl
      pipeline evaluate answers -u http://localhost:8000 --protocol openai --model Qwen/Qwen2.5-0.5B \
          --input-data builtin:accuracy --format csv
    """
    from trtllm_pipeline.bench.target import Target
    from trtllm_pipeline.evaluate import result
    from trtllm_pipeline.evaluate.ask import score_url
    from trtllm_pipeline.hub.dataset_file import data_file

    target = Target.at(
        url,
        protocol,
        model,
        endpoint=endpoint_type,
        # Nobody times these answers, and every OpenAI-compatible server can send them whole.
        streaming=protocol != "openai",
        timeout_s=server_options.positive("--request-timeout-s", request_timeout_s),
        max_tokens=max_tokens,
    )
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    found = score_url(
        target,
        data_file(input_data, Path()),
        names,
        concurrency=concurrency,
        tokenizer=tokenizer,
        folder=server_options.new_folder("--output-dir", output_dir),
        url=url,
    )
    _show_scores(found, format)
    result.check_least(found, names[0], min_score)


def drift(
    reference: Annotated[Path, typer.Argument(metavar="ANSWERS_A", help="answers.jsonl, or the folder it is in")],
    other: Annotated[Path, typer.Argument(metavar="ANSWERS_B", help="the same of the other model")],
    format: Format = "table",
) -> None:
    """Compare two sets of answers to the same questions.

    Reports how many answers of B agree with those of A, where they diverge, and by how much the scores differ, with a paired
    bootstrap interval. No server is needed.

    examples:
      pipeline evaluate drift fp16/answers.jsonl int4/answers.jsonl
    """
    from trtllm_pipeline.bench.stats import MEAN_INTERVAL
    from trtllm_pipeline.evaluate import drift
    from trtllm_pipeline.report import scores

    found = drift.compare(drift.read(reference), drift.read(other))
    if format == "json":
        emit_json({"schema": 1, **found.to_json(), "interval_method": MEAN_INTERVAL, "definitions": drift.DEFINITIONS})
    else:
        emit(scores.drift_csv(found) if format == "csv" else scores.drift_text(found))


def lm_eval(
    url: options.Url,
    model: options.Model,
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="NAMES", help="tasks, separated by commas; lm_eval ls tasks lists them")
    ],
    endpoint_type: Annotated[
        Literal["completions", "chat"],
        typer.Option("--endpoint-type", help="OpenAI endpoint; tasks that rank choices need completions"),
    ] = "completions",
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="NAME", help="name or folder; none for no tokenizer (default: lm_eval's)"),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", metavar="N", min=0, help="examples before each question (default: the task's)"),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option("--limit", metavar="N", help="questions of each task, or a share of them; for a first try"),
    ] = None,
    concurrency: Concurrency = 4,
    include_path: Annotated[
        str | None, typer.Option("--include-path", metavar="DIR", help="folder of your own tasks")
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", metavar="DIR", help="new folder for accuracy.json and what lm_eval writes"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--no-dry-run", help="print the command line of lm_eval and stop")
    ] = False,
    format: Format = "table",
) -> None:
    """Run standard tasks of lm-evaluation-harness against an OpenAI-compatible server.

    It needs the extra [lm-eval] and a server such as trtllm-serve or vLLM: Triton itself, and so the embedded toolchain, has
    no such endpoint. lm_eval fetches its data sets itself. The key is read from OPENAI_API_KEY.

    examples:
      pipeline evaluate lm-eval -u http://localhost:8000 --model Qwen/Qwen2.5-0.5B --tasks gsm8k --limit 50
      pipeline evaluate lm-eval -u http://localhost:8000 --model m --tasks mine --include-path tasks/ --dry-run
    """
    from trtllm_pipeline.evaluate import lm_eval

    evaluation = lm_eval.Evaluation(
        url=url if "://" in url else f"http://{url}",
        model=model,
        tasks=tuple(filter(None, tasks.split(","))),
        endpoint=endpoint_type,
        tokenizer=tokenizer,
        num_fewshot=num_fewshot,
        limit=limit,
        concurrency=concurrency,
        include_path=include_path,
    )
    if dry_run:
        emit(shlex.join(lm_eval.command(lm_eval.PROGRAM, evaluation, output_dir or Path("DIR"))))
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-lm-eval-") as scratch:
        folder = server_options.new_folder("--output-dir", output_dir)
        found = lm_eval.evaluate(evaluation, folder, Path(scratch), started=lambda argv: note(shlex.join(argv)))
    _show_scores(found, format)


def _show_scores(found: Mapping[str, Any], form: str) -> None:
    from trtllm_pipeline.report import scores

    if form == "json":
        emit_json(found)
    else:
        emit(scores.scores_csv(found) if form == "csv" else scores.scores_text(found))
