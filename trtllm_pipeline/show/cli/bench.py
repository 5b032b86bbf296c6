"""`pipeline bench`: load any server by its URL, compute its metrics again, test the load client itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from trtllm_pipeline.base import UsageError, terminal
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_as, note
from trtllm_pipeline.tensorrt import params

OTHER_NAMES: Final = {
    **dict.fromkeys(("request-count", "num-requests"), "requests"),
    **dict.fromkeys(("warmup-request-count", "num-warmup-requests"), "warmup-requests"),
    **dict.fromkeys(("output-tokens-mean", "osl"), "max-tokens"),
    "synthetic-input-tokens-mean": "isl",
    "synthetic-input-tokens-stddev": "isl-stddev",
    "output-tokens-stddev": "osl-stddev",
    "session-turns-mean": "turns",
    "arrival-pattern": "request-distribution",
    "arrival-smoothness": "burstiness",
    "request-timeout-seconds": "request-timeout-s",
    "concurrency-range": "concurrency",
    "profile-export-file": "event-file",
    **options.TOKENIZER_NAMES,
}
"""What genai-perf, aiperf and other load clients call options that mean the same."""

_server: Final = partial(options.option, rich_help_panel=options.SERVER_PANEL)
_expected: Final = partial(options.option, rich_help_panel="Expected server configuration, verified against the server")
_load: Final = partial(options.option, rich_help_panel="The load")
_requests: Final = partial(options.option, rich_help_panel="The requests")
_results: Final = partial(options.option, rich_help_panel="The results")

MetricsUrl = _server(
    "--metrics-url", "HOST:PORT", "Triton's metrics endpoint; adds the queue and compute times that Triton reports."
)
Declare = _expected(
    "--declare",
    "NAME=VALUE",
    "A setting by TensorRT-LLM's name, read back where the server reports it; enable_kv_cache_reuse=false is also "
    "probed, tp=N and weight_bits=N are used for the roofline; can be given several times.",
)
Engine = _expected(
    "--engine",
    "DIR",
    "The engine, model directory or GGUF file that it serves, on this machine: limits, and the roofline of its weights.",
)
Repository = _expected(
    "--repository", "DIR", "Its model repository; each config.pbtxt is compared with what the server runs."
)
Concurrency = _load(
    "--concurrency",
    "N,...",
    "Requests in flight, level by level, such as 1,4; a range is FIRST:LAST:STEP (default: 1).",
)
RequestRate = _load(
    "--request-rate", "N,...", "Requests a second, level by level, such as 5,10, however many are in flight."
)
Distribution = _load("--request-distribution", None, "Gaps between requests of a rate.")
Burstiness = _load("--burstiness", "X", "Shape of gamma: below 1 in bursts, above 1 more even.")
RandomSeed = _load("--random-seed", "N", "Seed of arrival times and synthetic prompts.")
Requests = _load(
    "--requests", "N", "Requests at each level; at least three for each in flight.", min=1, max=params.MOST_REQUESTS
)
WarmupRequests = _load(
    "--warmup-requests",
    "N",
    "Requests before each level (default: 2 for each in flight; 4 for a rate).",
    min=0,
    max=params.MOST_REQUESTS,
)
Repeats = _load(
    "--repeats", "N", "Measure each level this often, the levels taking turns.", min=1, max=params.MOST_REPEATS
)
UntilFlat = Annotated[
    bool,
    options.switch(
        "--warmup-until-flat",
        "Go on with the warm-up until the time to first token has stopped falling, eight times as long at most.",
        rich_help_panel="The load",
    ),
]
Interval = _load(
    "--measurement-interval",
    "MS",
    "Measure each level for so many milliseconds, instead of --requests.",
    min=0,
    max=1e9,
)
MaxInFlight = _load(
    "--max-in-flight",
    "N",
    "Requests in flight of a rate, at most; a server that falls behind is measured as saturated.",
    min=1,
    max=params.MOST_IN_FLIGHT,
)
StopWhen = _load(
    "--stop-when",
    "METRIC=PERCENT,...",
    "Repeat until the 95% intervals of these metrics are this narrow, to either side, such as output_tps=3%.",
)
MaxRepeats = _load("--max-repeats", "N", "Most repeats, where --stop-when decides.", min=1, max=params.MOST_REPEATS)
Budget = _load("--budget-s", "SECONDS", "After that no further repeat, or rate, is begun.", min=0)
FindRate = _load(
    "--find-rate",
    "SHARE",
    "Look for the highest request rate at which this share of requests, such as 0.95, meets --slo; needs 300 --requests.",
)
Processes = _load(
    "--processes", "N", "Load processes (default: as many as a level needs).", min=1, max=params.MOST_PROCESSES
)
InputData = _requests("--input-data", "FILE", "JSONL file of prompts, or builtin:NAME (default: builtin:prompts).")
Isl = _requests(
    "--isl",
    "N",
    "Prompts of exactly N tokens, or on average: --input-data cut or padded, or else synthetic; needs --tokenizer.",
    min=1,
    max=params.MOST_TOKENS,
)
IslStddev = _requests("--isl-stddev", "N", "Standard deviation of that length.", min=0, max=params.MOST_TOKENS)
OslStddev = _requests(
    "--osl-stddev", "N", "Standard deviation of --max-tokens, of prompts of --isl.", min=0, max=params.MOST_TOKENS
)
Lengths = _requests(
    "--lengths-data",
    "FILE",
    "JSONL of input_tokens and output_tokens, one pair for each prompt, instead of --isl and --max-tokens.",
)
SharedPrefix = _requests(
    "--shared-prefix-tokens",
    "N",
    "Tokens at the beginning of prompts of --isl that they share.",
    min=0,
    max=params.MOST_TOKENS,
)
SharedPrefixes = _requests(
    "--shared-prefixes", "N", "How many such beginnings there are, in turn.", min=1, max=params.MOST_REQUESTS
)
SessionTurns = _requests(
    "--turns",
    "N",
    "Requests of a conversation, at most, each sent when the one before is answered; of --isl the last has the whole length.",
    min=1,
    max=1000,
)
TurnDelay = _requests("--turn-delay-s", "SECONDS", "Between an answer and the next turn.", min=0, max=1e6)
NumPrompts = _requests(
    "--num-prompts",
    "N",
    "Prompts, or conversations: the first of --input-data (default: all), or so many synthetic ones (default: another for each request).",
    min=1,
    max=params.MOST_REQUESTS,
)
IgnoreEos = Annotated[
    bool,
    options.switch(
        "--ignore-eos",
        "Answers of exactly their --max-tokens, past the model's own end, by the inputs that the server has for it.",
        rich_help_panel="The requests",
    ),
]
StopWords = _requests("--stop-words", "TEXT", "A text that ends an answer; can be given several times.")
MaxTokens = _requests(
    "--max-tokens", "N", "Output tokens of a request whose prompt does not say.", min=1, max=params.MOST_TOKENS
)
Temperature = _requests("--temperature", "X", "Temperature; 0 is greedy.")
ExtraInputs = _requests(
    "--extra-inputs",
    "NAME:VALUE",
    "A further input of every request, such as ignore_eos:true; can be given several times.",
)
TokenCounter = Annotated[
    Path | None,
    _results(
        "--tokenizer",
        "PATH",
        "A tokenizer.json or a model's directory; counts tokens (default: the server's own count).",
    ),
]
Slo = Annotated[
    str | None,
    _results(
        "--slo",
        "OBJECTIVES",
        "Objectives of requests, for goodput, the share that meets all of them (ttft=300ms,tpot=40ms), or of levels "
        "(ttft_p99=500ms,output_tps=100).",
    ),
]
TrtllmBench = _results(
    "--trtllm-bench",
    "FILE",
    "A report (JSON) of trtllm-bench about the throughput of the same engine, to be shown beside it.",
)
TrtllmDataset = _results("--trtllm-dataset", "FILE", "Write the requests there as a data set for trtllm-bench.")
EventFile = _results(
    "--event-file", "FILE", "Record everything that is observed there (default: perf-DATE-TIME-PID.jsonl)."
)


def load(
    url: options.Url,
    model: options.Model,
    protocol: options.Protocol = "grpc",
    endpoint_type: options.EndpointType = "chat",
    streaming: Annotated[
        bool, options.switch("--streaming", "Stream the answers.", rich_help_panel=options.SERVER_PANEL)
    ] = True,
    metrics_url: Annotated[str | None, MetricsUrl] = None,
    request_timeout_s: options.RequestTimeout = 300.0,
    declare: Annotated[list[str] | None, Declare] = None,
    engine: Annotated[Path | None, Engine] = None,
    repository: Annotated[Path | None, Repository] = None,
    concurrency: Annotated[str | None, Concurrency] = None,
    request_rate: Annotated[str | None, RequestRate] = None,
    request_distribution: Annotated[Literal["poisson", "constant", "gamma"], Distribution] = "poisson",
    burstiness: Annotated[float, Burstiness] = 1.0,
    random_seed: Annotated[int, RandomSeed] = 0,
    requests: Annotated[int, Requests] = 64,
    warmup_requests: Annotated[int | None, WarmupRequests] = None,
    warmup_until_flat: UntilFlat = False,
    measurement_interval: Annotated[float | None, Interval] = None,
    max_in_flight: Annotated[int | None, MaxInFlight] = None,
    repeats: Annotated[int, Repeats] = 1,
    stop_when: Annotated[str | None, StopWhen] = None,
    max_repeats: Annotated[int, MaxRepeats] = 20,
    budget_s: Annotated[float | None, Budget] = None,
    find_rate: Annotated[float | None, FindRate] = None,
    processes: Annotated[int | None, Processes] = None,
    input_data: Annotated[str | None, InputData] = None,
    isl: Annotated[int | None, Isl] = None,
    isl_stddev: Annotated[int, IslStddev] = 0,
    osl_stddev: Annotated[int, OslStddev] = 0,
    lengths_data: Annotated[Path | None, Lengths] = None,
    shared_prefix_tokens: Annotated[int, SharedPrefix] = 0,
    shared_prefixes: Annotated[int, SharedPrefixes] = 1,
    turns: Annotated[int, SessionTurns] = 1,
    turn_delay_s: Annotated[float, TurnDelay] = 0.0,
    num_prompts: Annotated[int | None, NumPrompts] = None,
    max_tokens: Annotated[int, MaxTokens] = 128,
    ignore_eos: IgnoreEos = False,
    temperature: Annotated[float, Temperature] = 0.0,
    stop_words: Annotated[list[str] | None, StopWords] = None,
    extra_inputs: Annotated[list[str] | None, ExtraInputs] = None,
    tokenizer: TokenCounter = None,
    slo: Slo = None,
    event_file: Annotated[Path | None, EventFile] = None,
    format: options.TableOrCsv = "table",
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
    from trtllm_pipeline.measure import (
        BUILT_IN_PROMPTS,
        LEVEL_METRICS,
        ExpectedServer,
        Load,
        LoadResult,
        ServerLoad,
        StopRule,
        Target,
        Workload,
        analyze,
        of_load,
        parse_precisions,
        read_lengths,
    )
    from trtllm_pipeline.models import dataset_file, tokenizer_at
    from trtllm_pipeline.show.report import load_tables

    objectives = of_load(slo)
    lengths = () if lengths_data is None else read_lengths(lengths_data)
    made = bool(isl or lengths)
    if not made and (isl_stddev or osl_stddev or shared_prefix_tokens):
        raise UsageError("--isl-stddev, --osl-stddev and --shared-prefix-tokens need --isl")
    rates = options.numbers("--request-rate", request_rate, float, params.MOST_RATE)
    interval_s = None
    if measurement_interval is not None:
        interval_s = options.positive("--measurement-interval", measurement_interval) / 1e3
        if wrong := next(filter(None, (params.too_many(interval_s, rate) for rate in rates)), None):
            raise UsageError(f"--measurement-interval: {wrong}", hint="give a shorter interval, or a lower rate")
    run = ServerLoad(
        target=Target.at(
            url,
            protocol,
            model,
            endpoint=endpoint_type,
            streaming=streaming,
            metrics=metrics_url,
            timeout_s=options.positive("--request-timeout-s", request_timeout_s),
            max_tokens=max_tokens,
            temperature=temperature,
            options=options.pairs("--extra-inputs", extra_inputs, ":"),
            exact_length=ignore_eos,
            stop_words=tuple(stop_words or ()),
            seed=random_seed,
        ),
        load=Load(
            concurrency=options.counts(
                "--concurrency", concurrency or (None if request_rate or find_rate else "1"), params.MOST_IN_FLIGHT
            ),
            request_rate=rates,
            requests=requests,
            warmup_requests=warmup_requests,
            repeats=repeats,
            distribution=request_distribution,
            burstiness=options.positive("--burstiness", burstiness),
            seed=random_seed,
            until_flat=warmup_until_flat,
            interval_s=interval_s,
            max_in_flight=max_in_flight,
            turn_delay_s=turn_delay_s,
        ),
        stop=StopRule(
            precisions={} if stop_when is None else parse_precisions(stop_when, LEVEL_METRICS),
            max_repeats=max_repeats,
            budget_s=budget_s,
        ),
        find_rate=find_rate,
        expected=ExpectedServer(
            options.pairs("--declare", declare, "="),
            engine
            if engine is not None and engine.suffix == ".gguf" and engine.is_file()
            else options.folder("--engine", engine),
            options.folder("--repository", repository),
            "the command line",
        ),
        input_data=None
        if made and input_data is None
        else dataset_file.data_file(input_data or BUILT_IN_PROMPTS, Path()),
        turns=turns,
        most_rows=num_prompts,
        workload=Workload(
            input_tokens=isl or 0,
            input_tokens_stddev=isl_stddev,
            output_tokens=max_tokens if osl_stddev else None,
            output_tokens_stddev=osl_stddev,
            lengths=lengths,
            shared_prefix_tokens=shared_prefix_tokens,
            shared_prefixes=shared_prefixes,
            turns=turns,
            prompts=num_prompts,
            fresh=input_data is None and num_prompts is None,
            seed=random_seed,
        )
        if made
        else None,
        tokenizer=tokenizer,
        processes=processes,
    )
    run.check(objectives)
    path = _new_file("--event-file", event_file or Path(time.strftime(f"perf-%Y%m%d-%H%M%S-{os.getpid()}.jsonl")))
    counter = None if tokenizer is None else tokenizer_at(tokenizer)
    interrupted = run.record_until_interrupted(path, counter, _progress(), objectives)
    note(f"events: {path}")
    result = analyze(path, counter, objectives)
    emit_as(format, result, table=load_tables.to_text, csv=load_tables.to_csv, json=LoadResult.to_json)
    raise typer.Exit(130 if interrupted else 0 if result.valid else 1)


vars(load)["aliases"] = OTHER_NAMES


def analyze(
    events: Annotated[Path, options.argument("FILE", "The events.jsonl of a perf stage, or an --event-file.")],
    tokenizer: TokenCounter = None,
    slo: Slo = None,
    trtllm_bench: Annotated[Path | None, TrtllmBench] = None,
    trtllm_dataset: Annotated[Path | None, TrtllmDataset] = None,
    format: options.TableOrCsv = "table",
) -> None:
    """Recompute every metric of a load run from its event file.

    No server is needed. The exit code is 1 if the measurement is not valid.

    examples:
      pipeline bench analyze perf-20260101-120000-4711.jsonl --tokenizer MODEL_DIR --slo ttft=300ms
      pipeline bench analyze perf-20260101-120000-4711.jsonl --trtllm-bench report.json
    """
    from trtllm_pipeline.base import user_files
    from trtllm_pipeline.measure import BenchComparison, EngineReport, LoadResult, analyze, of_load, write_dataset
    from trtllm_pipeline.models import tokenizer_at
    from trtllm_pipeline.show.report import load_tables

    user_files.check(events)
    result = analyze(events, None if tokenizer is None else tokenizer_at(tokenizer), of_load(slo))
    beside = None if trtllm_bench is None else BenchComparison.of(result, EngineReport.read(trtllm_bench))
    if trtllm_dataset is not None:
        path = _new_file("--trtllm-dataset", trtllm_dataset)
        note(f"{write_dataset(events, path)} requests: {path}")
    emit_as(
        format,
        result,
        table=lambda result: "\n".join([load_tables.to_text(result), *load_tables.beside_engine(beside)]),
        csv=load_tables.to_csv,
        json=lambda result: {**LoadResult.to_json(result), **({"trtllm_bench": beside.to_json()} if beside else {})},
    )
    raise typer.Exit(0 if result.valid else 1)


vars(analyze)["aliases"] = options.TOKENIZER_NAMES


def _new_file(option: str, path: Path) -> Path:
    if path.exists():
        raise UsageError(f"{option} {path}: already exists", hint="choose another name; nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}")
    return path


def _progress() -> Callable[[int, int], None]:
    """Shows on a terminal how far a load is."""

    def shown(done: int, total: int) -> None:
        terminal.raw(sys.stderr).write(f"\r{done} of {total} requests" + "\n" * (done == total))

    return shown if sys.stderr.isatty() else lambda _done, _total: None
