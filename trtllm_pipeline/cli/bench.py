"""`pipeline bench`: load any server by its URL, compute its figures again, test the load client itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from trtllm_pipeline.cli import options, server_options
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.terminal import raw

_SERVER: Final = server_options.PANEL
_EXPECTED: Final = "Expected server configuration, verified against the server"
_LOAD: Final = "The load"
_REQUESTS: Final = "The requests"
_RESULTS: Final = "The results"

OTHER_NAMES: Final = {
    **dict.fromkeys(("request-count", "num-requests"), "requests"),
    **dict.fromkeys(("warmup-request-count", "num-warmup-requests"), "warmup-requests"),
    **dict.fromkeys(("output-tokens-mean", "osl"), "max-tokens"),
    "synthetic-input-tokens-mean": "isl",
    "synthetic-input-tokens-stddev": "isl-stddev",
    "arrival-pattern": "request-distribution",
    "arrival-smoothness": "burstiness",
    "request-timeout-seconds": "request-timeout-s",
    "profile-export-file": "event-file",
}
"""What genai-perf and aiperf call options that mean the same."""

Format = Annotated[Literal["table", "json", "csv"], typer.Option("--format", help="output format")]
TokenCounter = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json or a model's folder; counts tokens (default: the server's own count)",
        rich_help_panel=_RESULTS,
    ),
]
Slo = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="OBJECTIVES",
        help="report goodput, the share of requests that meet all of these: ttft=300ms,tpot=40ms",
        rich_help_panel=_RESULTS,
    ),
]


def load(
    url: options.Url,
    model: options.Model,
    protocol: server_options.Protocol = "grpc",
    endpoint_type: server_options.EndpointType = "chat",
    streaming: Annotated[
        bool, typer.Option("--streaming/--no-streaming", help="stream the answers", rich_help_panel=_SERVER)
    ] = True,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            "--metrics-url",
            metavar="HOST:PORT",
            help="Triton's metrics endpoint; adds the queue and compute times that Triton reports",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    request_timeout_s: server_options.RequestTimeout = 300.0,
    declare: Annotated[
        list[str] | None,
        typer.Option(
            "--declare",
            metavar="NAME=VALUE",
            help="a setting by TensorRT-LLM's name, read back where the server reports it; enable_kv_cache_reuse=false "
            "is also probed, tp=N is used for the roofline; can be given several times",
            rich_help_panel=_EXPECTED,
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(
            "--engine",
            metavar="DIR",
            help="the engine it serves, on this machine: limits, and the roofline of its weights",
            rich_help_panel=_EXPECTED,
        ),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option(
            "--repository",
            metavar="DIR",
            help="its model repository; each config.pbtxt is compared with what the server runs",
            rich_help_panel=_EXPECTED,
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            metavar="N,N",
            help="requests in flight, level by level, such as 1,4 (default: 1)",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(
            "--request-rate",
            metavar="R,R",
            help="requests a second, level by level, such as 5,10, however many are in flight",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    request_distribution: Annotated[
        Literal["poisson", "constant", "gamma"],
        typer.Option("--request-distribution", help="gaps between requests of a rate", rich_help_panel=_LOAD),
    ] = "poisson",
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness",
            metavar="X",
            help="shape of gamma: below 1 in bursts, above 1 more even",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    random_seed: Annotated[
        int,
        typer.Option(
            "--random-seed", metavar="N", help="seed of arrival times and synthetic prompts", rich_help_panel=_LOAD
        ),
    ] = 0,
    requests: Annotated[
        int,
        typer.Option(
            "--requests",
            metavar="N",
            min=1,
            help="requests at each level",
            rich_help_panel=_LOAD,
        ),
    ] = 64,
    warmup_requests: Annotated[
        int | None,
        typer.Option(
            "--warmup-requests",
            metavar="N",
            min=0,
            help="requests before each level (default: 2 for each in flight; 4 for a rate)",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            "--repeats",
            metavar="N",
            min=1,
            help="measure each level this often, the levels taking turns",
            rich_help_panel=_LOAD,
        ),
    ] = 1,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            metavar="N",
            min=1,
            help="load processes (default: as many as a level needs)",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    input_data: Annotated[
        str | None,
        typer.Option(
            "--input-data",
            metavar="FILE",
            help="JSONL file of prompts, or builtin:NAME (default: builtin:prompts)",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    isl: Annotated[
        int | None,
        typer.Option(
            "--isl",
            metavar="N",
            min=1,
            help="synthetic prompts with a mean length of N tokens; needs --tokenizer",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    isl_stddev: Annotated[
        int,
        typer.Option(
            "--isl-stddev",
            metavar="N",
            min=0,
            help="standard deviation of that length",
            rich_help_panel=_REQUESTS,
        ),
    ] = 0,
    num_prompts: Annotated[
        int,
        typer.Option("--num-prompts", metavar="N", min=1, help="synthetic prompts", rich_help_panel=_REQUESTS),
    ] = 64,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            metavar="N",
            min=1,
            help="output tokens of a request whose prompt does not say",
            rich_help_panel=_REQUESTS,
        ),
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="0 is greedy", rich_help_panel=_REQUESTS)
    ] = 0.0,
    extra_inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--extra-inputs",
            metavar="NAME:VALUE",
            help="a further input of every request, such as ignore_eos:true; can be given several times",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    tokenizer: TokenCounter = None,
    slo: Slo = None,
    event_file: Annotated[
        Path | None,
        typer.Option(
            "--event-file",
            metavar="FILE",
            help="record everything that is observed there (default: perf-DATE-TIME-PID.jsonl)",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    format: Format = "table",
) -> None:
    r"""Load a running server and report its latency and throughput.

    No matrix and no workspace are needed. Everything observed goes into one file as it happens; Ctrl-C keeps it. The key
    for an OpenAI-compatible server is read from OPENAI_API_KEY. The exit code is 1 if the measurement is not valid. Names of
    options of genai-perf and aiperf are accepted where they mean the same: docs/performance.md lists them.

    examples:
      pipeline bench load -u localhost:8001 --model ensemble --concurrency 1,2,4,8 --input-data prompts.jsonl
      pipeline bench load -u http://localhost:8000 --protocol openai --model Qwen/Qwen2.5-0.5B \
          --request-rate 5,10 --slo ttft=300ms,tpot=40ms
      pipeline bench load -u localhost:8001 --model ensemble --concurrency 8 --tokenizer MODEL_DIR \
          --isl 512 --max-tokens 128
      pipeline bench load -u localhost:8001 --model ensemble --declare enable_kv_cache_reuse=false --engine ENGINE_DIR
    """
    from trtllm_pipeline.bench.metrics import analyze
    from trtllm_pipeline.bench.objectives import per_request
    from trtllm_pipeline.bench.run import BUILT_IN_PROMPTS, Load, ServerLoad, Synthetic
    from trtllm_pipeline.bench.server_checks import ExpectedServer
    from trtllm_pipeline.bench.target import Target
    from trtllm_pipeline.files.model_files import tokenizer_at
    from trtllm_pipeline.hub.dataset_file import data_file

    objectives = None if slo is None else per_request(slo)
    run = ServerLoad(
        target=Target.at(
            url,
            protocol,
            model,
            endpoint=endpoint_type,
            streaming=streaming,
            metrics=metrics_url,
            timeout_s=server_options.positive("--request-timeout-s", request_timeout_s),
            max_tokens=max_tokens,
            temperature=temperature,
            options=server_options.pairs("--extra-inputs", extra_inputs, ":"),
        ),
        load=Load(
            concurrency=server_options.whole_numbers("--concurrency", concurrency or (None if request_rate else "1")),
            request_rate=server_options.numbers("--request-rate", request_rate),
            requests=requests,
            warmup_requests=warmup_requests,
            repeats=repeats,
            distribution=request_distribution,
            burstiness=server_options.positive("--burstiness", burstiness),
            seed=random_seed,
        ),
        expected=ExpectedServer(
            server_options.pairs("--declare", declare, "="),
            server_options.folder("--engine", engine),
            server_options.folder("--repository", repository),
            "the command line",
        ),
        input_data=None if isl and input_data is None else data_file(input_data or BUILT_IN_PROMPTS, Path()),
        synthetic=None
        if isl is None
        else Synthetic(
            input_tokens_mean=isl,
            input_tokens_stddev=isl_stddev,
            prompts=num_prompts,
        ),
        tokenizer=tokenizer,
        processes=processes,
    )
    run.check(objectives or ())
    path = _new_file(event_file)
    counter = None if tokenizer is None else tokenizer_at(tokenizer)
    interrupted = run.record_until_interrupted(path, counter, _progress())
    note(f"events: {path}")
    result = analyze(path, counter, objectives)
    _show(result, format)
    raise typer.Exit(130 if interrupted else 0 if result["valid"] else 1)


vars(load)["aliases"] = OTHER_NAMES


def analyze(
    events: Annotated[Path, typer.Argument(metavar="FILE", help="events.jsonl of a perf stage, or an --event-file")],
    tokenizer: TokenCounter = None,
    slo: Slo = None,
    format: Format = "table",
) -> None:
    """Recompute every figure of a load run from its event file.

    No server is needed. The exit code is 1 if the measurement is not valid.

    examples:
      pipeline bench analyze perf-20260101-120000-4711.jsonl --tokenizer MODEL_DIR --slo ttft=300ms
    """
    from trtllm_pipeline.bench.metrics import analyze
    from trtllm_pipeline.bench.objectives import per_request
    from trtllm_pipeline.files.model_files import tokenizer_at
    from trtllm_pipeline.files.user_files import check

    check(events)
    result = analyze(
        events, None if tokenizer is None else tokenizer_at(tokenizer), None if slo is None else per_request(slo)
    )
    _show(result, format)
    raise typer.Exit(0 if result["valid"] else 1)


def self_test(
    protocol: server_options.Protocol = "grpc",
    endpoint_type: server_options.EndpointType = "chat",
    streams: Annotated[int, typer.Option("--streams", metavar="N", min=1, help="answers at once")] = 256,
    events: Annotated[int, typer.Option("--events", metavar="N", min=1, help="events of each answer")] = 40,
    processes: Annotated[
        int | None, typer.Option("--processes", metavar="N", min=1, help="load processes (default: as many as needed)")
    ] = None,
    format: options.TextOrJson = "text",
) -> None:
    """Measure the error of the load client on this machine.

    It is measured against a scripted server that records when it really sent each byte. The test also checks that the
    client recognises merged and cut events, stalls, errors and false counts. The exit code is 1 if it does not, or if it
    is too late.

    examples:
      pipeline bench self-test
      pipeline bench self-test --protocol http --streams 64
    """
    from trtllm_pipeline.bench import self_test
    from trtllm_pipeline.bench.target import protocol_name
    from trtllm_pipeline.report import figures

    result = self_test.run(protocol_name(protocol, endpoint_type), self_test.Size(streams, events), processes=processes)
    if format == "json":
        emit_json({"schema": 1, **result, "definitions": self_test.DEFINITIONS})
    else:
        emit(figures.self_test_text(result))
    raise typer.Exit(0 if result["pass"] and all(result["checks"].values()) else 1)


def _new_file(given: Path | None) -> Path:
    path = given or Path(time.strftime(f"perf-%Y%m%d-%H%M%S-{os.getpid()}.jsonl"))
    if path.exists():
        raise UsageError(f"--event-file {path}: already exists", hint="choose another name; nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"--event-file {path}: there is no folder {path.parent}")
    return path


def _progress() -> Callable[[int, int], None]:
    """Shows on a terminal how far a load is."""

    def shown(done: int, total: int) -> None:
        raw(sys.stderr).write(f"\r{done} of {total} requests" + "\n" * (done == total))

    return shown if sys.stderr.isatty() else lambda _done, _total: None


def _show(result: Mapping[str, Any], form: str) -> None:
    from trtllm_pipeline.report import figures

    if form == "json":
        emit_json(result)
    else:
        emit(figures.to_csv(result) if form == "csv" else figures.to_text(result))
