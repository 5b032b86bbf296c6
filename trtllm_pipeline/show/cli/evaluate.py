"""`pipeline eval`: score the answers of any server, compare two sets of answers, run standard tasks."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, emit_as, note
from trtllm_pipeline.tensorrt import params

Concurrency = Annotated[
    int, options.option("--concurrency", "N", "Number of requests in flight.", min=1, max=params.MOST_IN_FLIGHT)
]


def _folder(holds: str) -> Any:
    return options.option("--output-dir", "DIR", f"New or empty directory for {holds}.")


def answers(
    url: options.Url,
    model: options.Model,
    input_data: Annotated[str, options.option("--input-data", "FILE", "JSONL file of questions, or builtin:NAME.")],
    protocol: options.Protocol = "grpc",
    endpoint_type: options.EndpointType = "completions",
    request_timeout_s: options.RequestTimeout = 300.0,
    metrics: Annotated[
        str,
        options.option(
            "--metrics", "NAME,...", "Metrics for rows without their own: names, or functions as MODULE:FUNCTION."
        ),
    ] = "exact,contains",
    max_tokens: Annotated[
        int,
        options.option(
            "--max-tokens", "N", "Maximum number of output tokens of an answer.", min=1, max=params.MOST_TOKENS
        ),
    ] = 32,
    concurrency: Concurrency = 4,
    min_score: Annotated[
        float | None,
        options.option("--min-score", "NUMBER", "Fail if the first metric is below this value.", min=0, max=1),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        options.option(
            "--tokenizer",
            "PATH",
            "Model directory. Its chat template renders rows with messages, and its token ids are written to answers.jsonl.",
        ),
    ] = None,
    output_dir: Annotated[str | None, _folder("answers.jsonl and accuracy.json")] = None,
    format: options.TableOrCsv = "table",
) -> None:
    r"""Send questions to a running server and score its greedy answers.

    Needs no matrix and no workspace. As in a run, an OpenAI-compatible server gets the questions at /v1/completions. With
    --endpoint-type chat, each question is a user message, rendered by the server's chat template. The API key is read
    from OPENAI_API_KEY. The exit code is 1 if requests fail or the score is below --min-score.

    examples:
      pipeline eval answers -u localhost:8001 --model ensemble --input-data questions.jsonl
      pipeline eval answers -u http://localhost:8000 --protocol openai --model Qwen/Qwen2.5-0.5B \
          --input-data builtin:accuracy --format csv
    """
    from trtllm_pipeline.measure import AccuracyResult, Target, answers
    from trtllm_pipeline.models import dataset_file
    from trtllm_pipeline.show.report import score_tables

    target = Target.at(
        url,
        protocol,
        model,
        endpoint=endpoint_type,
        # These answers are not timed, and every OpenAI-compatible server supports responses without streaming.
        streaming=protocol != "openai",
        timeout_s=options.positive("--request-timeout-s", request_timeout_s),
        max_tokens=max_tokens,
    )
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    scores = answers.score_url(
        target,
        dataset_file.data_file(input_data, Path()),
        names,
        concurrency=concurrency,
        tokenizer=tokenizer,
        folder=None if output_dir is None else options.empty_folder(output_dir),
        url=url,
    )
    emit_as(format, scores, json=AccuracyResult.to_json, table=score_tables.scores_text, csv=score_tables.scores_csv)
    kept = (
        "keep the answers with --output-dir DIR"
        if output_dir is None
        else f"see the answers in {output_dir}/answers.jsonl"
    )
    scores.check_least(names[0], min_score, f"{kept}; --min-score sets the limit")


vars(answers)["aliases"] = options.TOKENIZER_NAMES


def drift(
    reference: Annotated[Path, options.argument("ANSWERS_A", "An answers.jsonl, or its directory.")],
    other: Annotated[Path, options.argument("ANSWERS_B", "The answers.jsonl of the other model, or its directory.")],
    format: options.TableOrCsv = "table",
) -> None:
    """Compare two sets of answers to the same questions.

    Reports how many answers of B match those of A, where they diverge, and the difference in scores with a paired
    bootstrap interval. Needs no server.

    examples:
      pipeline eval drift fp16/answers.jsonl int4/answers.jsonl
    """
    from trtllm_pipeline.measure import drift, scores, stats
    from trtllm_pipeline.show.report import score_tables

    comparison = drift.compare(drift.read(reference), drift.read(other))
    data = {"schema": 1, **comparison.to_json(), "interval_method": stats.MEAN_INTERVAL, "definitions": scores.DRIFT}
    emit_as(
        format,
        data,
        csv=lambda _: score_tables.drift_csv(comparison),
        table=lambda _: "\n".join(score_tables.drift_lines(comparison)),
    )


def lm_eval(
    url: options.Url,
    model: options.Model,
    tasks: Annotated[
        str,
        options.option(
            "--tasks", "NAME[:LIMIT],...", "Tasks or groups, separated by commas (lm_eval ls tasks lists them)."
        ),
    ],
    endpoint_type: Annotated[
        Literal["completions", "chat"],
        options.option("--endpoint-type", "NAME", "OpenAI endpoint. Tasks that rank choices need completions."),
    ] = "completions",
    tokenizer: Annotated[
        str | None,
        options.option("--tokenizer", "NAME", "Name or directory, or none for no tokenizer (default: lm_eval's)."),
    ] = None,
    num_fewshot: Annotated[
        int | None, options.option("--num-fewshot", "N", "Examples before each question (default: the task's).", min=0)
    ] = None,
    limit: Annotated[
        str | None,
        options.option(
            "--limit", "N", "Limit on the questions of each task, as a number or a fraction, for a first try."
        ),
    ] = None,
    concurrency: Concurrency = 4,
    include_path: Annotated[str | None, options.option("--include-path", "DIR", "Directory of your own tasks.")] = None,
    output_dir: Annotated[str | None, _folder("accuracy.json and the files of lm_eval")] = None,
    dry_run: Annotated[bool, options.switch("--dry-run", "Only print the command line of lm_eval.")] = False,
    format: options.TableOrCsv = "table",
) -> None:
    """Run standard tasks of lm-evaluation-harness against an OpenAI-compatible server.

    Needs the extra [lm-eval], here or in the environment that LM_EVAL_PYTHON names. A Triton server gets an endpoint from
    pipeline serve gateway. lm_eval downloads its own data sets; pipeline_arithmetic comes with the project. The API key is
    read from OPENAI_API_KEY. In a matrix, settings.accuracy.tasks does the same for every cell.

    examples:
      pipeline eval lm-eval -u http://localhost:8000 --model Qwen/Qwen2.5-0.5B --tasks gsm8k:50
      pipeline eval lm-eval -u http://localhost:8000 --model m --tasks mine --include-path tasks/ --dry-run
    """
    from trtllm_pipeline.measure import AccuracyResult, lm_eval
    from trtllm_pipeline.show.report import score_tables

    evaluation = lm_eval.Evaluation(
        url=url if "://" in url else f"http://{url}",
        model=model,
        tasks=tuple(filter(None, tasks.split(","))),
        endpoint=endpoint_type,
        tokenizer=tokenizer if tokenizer is None or not Path(tokenizer).is_dir() else str(Path(tokenizer).absolute()),
        num_fewshot=num_fewshot,
        limit=limit,
        concurrency=concurrency,
        include_path=include_path,
    )
    if dry_run:
        for argv in lm_eval.commands((lm_eval.PROGRAM,), evaluation, Path(output_dir or "DIR")).values():
            emit(shlex.join(argv))
        return
    with tempfile.TemporaryDirectory(prefix="pipeline-lm-eval-") as scratch:
        folder = Path(scratch) if output_dir is None else options.empty_folder(output_dir)
        scores = lm_eval.evaluate(evaluation, folder, started=lambda argv: note(shlex.join(argv)))
    emit_as(format, scores, json=AccuracyResult.to_json, table=score_tables.scores_text, csv=score_tables.scores_csv)


vars(lm_eval)["aliases"] = options.TOKENIZER_NAMES
