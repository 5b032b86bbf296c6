"""`pipeline bench`: load any server by its URL, compute its metrics again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trtllm_pipeline.base import Json, UsageError, terminal, user_files
from trtllm_pipeline.show.cli import options, stage_options
from trtllm_pipeline.show.cli.output import emit_as, note, terminal_width
from trtllm_pipeline.tensorrt import params

OTHER_NAMES: Final = {
    **dict.fromkeys(("request-count", "num-requests"), "requests"),
    **dict.fromkeys(("warmup-request-count", "num-warmup-requests"), "warmup-requests"),
    **dict.fromkeys(("output-tokens-mean", "osl"), "max-tokens"),
    **dict.fromkeys(("synthetic-input-tokens-mean", "isl"), "input-tokens"),
    **dict.fromkeys(("synthetic-input-tokens-stddev", "isl-stddev"), "input-tokens-stddev"),
    "osl-stddev": "output-tokens-stddev",
    "measurement-interval": "measurement-interval-ms",
    "session-turns-mean": "turns",
    "arrival-pattern": "request-distribution",
    "arrival-smoothness": "burstiness",
    "request-timeout-seconds": "request-timeout-s",
    "concurrency-range": "concurrency",
    "profile-export-file": "event-file",
    **options.TOKENIZER_NAMES,
}
"""Names that genai-perf, aiperf and other load clients use for equivalent options."""
_BY_HAND: Final = ("declared", "exclusive", "lora", "lora_names", "protocol", "slo")
"""Parameters of perf that differ or do not exist for a server at a URL."""
_PANELS: Final = {
    options.SERVER_PANEL: (
        *("url", "model", "protocol", "endpoint_type", "streaming", "metrics_url", "dcgm_url", "dcgm_gpus"),
        *("request_timeout_s", "processes"),
    ),
    "Expected server configuration, verified against the server": ("declare", "engine", "repository"),
    "The load": (
        *("concurrency", "request_rate", "request_distribution", "burstiness", "trace_speed", "requests"),
        *("measurement_interval_ms", "level_budget_s", "warmup", "warmup_requests", "max_in_flight", "turn_delay_s"),
        *("find_rate", "find_concurrency", "repeats"),
        *("stop_when", "max_repeats", "budget_s", "random_seed"),
    ),
    "The requests": ("input_data", "lengths_data"),
    "The results": ("tokenizer", "slo", "event_file", "format"),
}
"""Options in the order of the help. All others are in _REQUESTS."""
_REQUESTS: Final = "The requests"
_results: Final = partial(options.option, rich_help_panel="The results")
MetricsUrl = options.option(
    "--metrics-url", "HOST:PORT", "Triton's metrics endpoint; adds the queue and compute times that Triton reports."
)
Declare = options.option(
    "--declare",
    "NAME=VALUE",
    "A setting by TensorRT-LLM's name, read back where the server reports it; enable_kv_cache_reuse=false is also "
    "probed, tp=N and weight_bits=N are used for the roofline. Repeatable.",
)
Engine = options.option(
    "--engine",
    "DIR",
    "Served engine, model directory or GGUF file on this machine, for its limits and the roofline of its weights.",
)
Repository = options.option(
    "--repository",
    "DIR",
    "Model repository of the server; each config.pbtxt is compared with the server's configuration.",
)
Processes = options.option(
    "--processes", "N", "Load processes (default: as many as a level needs).", min=1, max=params.MOST_PROCESSES
)
InputData = options.option(
    "--input-data", "FILE", "File of prompts or a trace, or builtin:NAME (default: synthetic, or builtin:prompts)."
)
Lengths = options.option(
    "--lengths-data",
    "FILE",
    "JSONL of input_tokens and output_tokens, one pair for each prompt, instead of --input-tokens and --max-tokens.",
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
    "Report (JSON) of trtllm-bench on the throughput of the same engine, shown next to the results.",
)
TrtllmDataset = _results("--trtllm-dataset", "FILE", "Write the requests to FILE as a trtllm-bench data set.")
EventFile = _results("--event-file", "FILE", "Record all observations in FILE (default: perf-DATE-TIME-PID.jsonl).")


def _load(
    url: options.Url,
    model: options.Model,
    protocol: options.Protocol = "grpc",
    endpoint_type: options.EndpointType = "chat",
    streaming: Annotated[bool, options.switch("--streaming", "Stream the responses.")] = True,
    metrics_url: Annotated[str | None, MetricsUrl] = None,
    processes: Annotated[int | None, Processes] = None,
    declare: Annotated[list[str] | None, Declare] = None,
    engine: Annotated[Path | None, Engine] = None,
    repository: Annotated[Path | None, Repository] = None,
    input_data: Annotated[str | None, InputData] = None,
    lengths_data: Annotated[Path | None, Lengths] = None,
    tokenizer: TokenCounter = None,
    slo: Slo = None,
    event_file: Annotated[Path | None, EventFile] = None,
    format: options.TableOrCsv = "table",
    **load: Any,
) -> None:
    r"""Load a running server and report its latency and throughput.

    No matrix and no workspace are needed. All observations are written to one file immediately. Ctrl-C keeps it. The
    key for an OpenAI-compatible server is read from OPENAI_API_KEY. The exit code is 1 if the measurement is not valid.
    Equivalent option names of genai-perf and aiperf are accepted: docs/performance.md lists them.

    examples:
      pipeline bench load -u localhost:8001 --model ensemble --concurrency 1,2,4,8 --input-data prompts.jsonl
      pipeline bench load -u http://localhost:8000 --protocol openai --model Qwen/Qwen2.5-0.5B \
          --request-rate 5,10 --slo ttft=300ms,tpot=40ms
      pipeline bench load -u localhost:8001 --model ensemble --concurrency 8 --tokenizer MODEL_DIR \
          --input-tokens 512 --max-tokens 128
      pipeline bench load -u localhost:8001 --model ensemble --declare enable_kv_cache_reuse=false --engine ENGINE_DIR
    """
    from trtllm_pipeline.measure import ExpectedServer, LoadResult, Target, analyze, objectives, run
    from trtllm_pipeline.models import dataset_file, tokenizer_at
    from trtllm_pipeline.show.report import load_tables
    from trtllm_pipeline.tensorrt import perf

    limits = objectives.of_load(slo)
    if not streaming and "tpot" in limits.per_request:
        raise UsageError("--slo tpot: without streaming there is no TPOT", hint="leave out --no-streaming")
    typed = {name: value for name, value in load.items() if value not in (None, [])}
    for name in ("find_rate", "find_concurrency"):
        if name in typed and not limits.per_request:
            given = f"; {limits.of_level[0].metric} limits a whole level" if limits.of_level else ""
            raise UsageError(
                f"{stage_options.flag(name)} needs a limit on each request in --slo{given}",
                hint="give a limit on ttft, tpot or e2e, such as --slo ttft=300ms",
            )
    per_request = {f"{name}_ms": limit for name, limit in limits.per_request.items()}
    plan = perf.load_plan(
        stage_options.read_class(params.PerfParams, typed, {"slo": per_request or None}),
        Target.at(url, protocol, model, endpoint=endpoint_type, streaming=streaming, metrics=metrics_url),
        ExpectedServer(
            {name: _decoded(value) for name, value in options.pairs("--declare NAME=VALUE", declare).items()},
            engine
            if engine is not None and engine.suffix == ".gguf" and engine.is_file()
            else options.folder("--engine", engine),
            options.folder("--repository", repository),
            "the command line",
        ),
        input_data=None if input_data is None else dataset_file.data_file(input_data, Path()),
        lengths_data=lengths_data,
        tokenizer=tokenizer,
        objectives=limits,
        processes=processes,
    )
    counter = None if tokenizer is None else tokenizer_at(tokenizer)
    path = _new_file("--event-file", event_file or Path(time.strftime(f"perf-%Y%m%d-%H%M%S-{os.getpid()}.jsonl")))
    interrupted = False
    try:
        result = run(plan, path, _progress())
    except KeyboardInterrupt:
        if not path.exists() or '"type": "request"' not in path.read_text(encoding="utf-8"):
            raise
        interrupted, result = True, analyze(path, counter, limits)
    note(f"events: {path}")
    emit_as(
        format,
        result,
        table=lambda result: load_tables.to_text(result, terminal_width()),
        csv=load_tables.to_csv,
        json=LoadResult.to_json,
    )
    raise typer.Exit(130 if interrupted else 0 if result.valid else 1)


load: Final = stage_options.with_class(_load, params.PerfParams, but=_BY_HAND, panels=_PANELS, panel=_REQUESTS)
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
    from trtllm_pipeline.measure import LoadResult, analyze, engine_report, objectives
    from trtllm_pipeline.models import tokenizer_at
    from trtllm_pipeline.show.report import load_tables

    user_files.check(events)
    result = analyze(events, None if tokenizer is None else tokenizer_at(tokenizer), objectives.of_load(slo))
    beside = (
        None
        if trtllm_bench is None
        else engine_report.BenchComparison.of(result, engine_report.EngineReport.read(trtllm_bench))
    )
    if trtllm_dataset is not None:
        path = _new_file("--trtllm-dataset", trtllm_dataset)
        note(f"{engine_report.write_dataset(events, path)} requests: {path}")
    emit_as(
        format,
        result,
        table=lambda result: "\n".join(
            [load_tables.to_text(result, terminal_width()), *load_tables.beside_engine(beside)]
        ),
        csv=load_tables.to_csv,
        json=lambda result: {**LoadResult.to_json(result), **({"trtllm_bench": beside.to_json()} if beside else {})},
    )
    raise typer.Exit(0 if result.valid else 1)


vars(analyze)["aliases"] = options.TOKENIZER_NAMES


def _decoded(text: str) -> Json:
    """The value of a JSON text, or the text."""
    try:
        return user_files.decode(text)
    except ValueError:
        return text


def _new_file(option: str, path: Path) -> Path:
    if path.exists():
        raise UsageError(f"{option} {path}: already exists", hint="choose another name; nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}")
    return path


def _progress() -> Callable[[int, int], None]:
    def shown(done: int, total: int) -> None:
        terminal.raw(sys.stderr).write(f"\r{done} of {total} requests" + "\n" * (done == total))

    return shown if sys.stderr.isatty() else lambda _done, _total: None
