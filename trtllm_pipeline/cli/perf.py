"""`pipeline perf`: load any server by its URL, compute figures again, test the client; else the stage of that name.

pipeline perf -u URL -m MODEL --concurrency 1,4 ...    load a server
pipeline perf analyze FILE                             compute all figures of an event file again
pipeline perf self-test                                how wrong the client itself is on this machine
pipeline perf --matrix FILE | --service FILE ...       the stage
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.cli import options, stage
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import PipelineError, UsageError
from trtllm_pipeline.files.user_files import check, decode
from trtllm_pipeline.processes.process import allow_open_files
from trtllm_pipeline.terminal import raw

if TYPE_CHECKING:
    from trtllm_pipeline.bench.load import Level
    from trtllm_pipeline.bench.prompts import Prompt
    from trtllm_pipeline.bench.server_checks import ExpectedServer
    from trtllm_pipeline.bench.target import Target

_URL_FLAGS: Final = ("-u", "--url")
_FORMATS: Final = ("table", "json", "csv")
_OBJECTIVE: Final = re.compile(r"(ttft|tpot|e2e)=(\d+(?:\.\d+)?)(ms|s)")


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the form that the words on the command line choose."""
    words: Sequence[str] = parser.get_default("words") or ()
    if words[:1] == ["analyze"]:
        _configure_analyze(parser)
    elif words[:1] == ["self-test"]:
        _configure_self_test(parser)
    elif any(word.partition("=")[0] in _URL_FLAGS or word.startswith("-u") for word in words):
        _configure_load(parser)
    else:
        stage.configure(parser)
        parser.set_defaults(form=_stage)
        parser.epilog = (
            f"{parser.epilog}\n\nother forms, each with its own --help:\n"
            "  pipeline perf -u URL -m MODEL --concurrency 1,4 --input-data FILE    load any server\n"
            "  pipeline perf analyze FILE                                           compute all figures again\n"
            "  pipeline perf self-test                                              how wrong the client itself is"
        )


def run(args: argparse.Namespace) -> int:
    """Do what the chosen form does."""
    code: int = args.form(args)
    return code


def _stage(args: argparse.Namespace) -> int:
    try:
        return stage.run(args)
    except PipelineError as error:
        # Elsewhere -m names a model.
        if args.matrix is not None and not Path(args.matrix).exists():
            error.hint = error.hint or "to load a server give -u URL"
        raise


# One server, by its URL.


def _configure_load(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Load a running server and report latency and throughput. No matrix and no workspace are needed. Everything "
        "observed goes into one file as it happens; Ctrl-C keeps it. A key for an OpenAI-compatible server is taken from "
        "OPENAI_API_KEY."
    )
    parser.epilog = (
        "examples:\n"
        "  pipeline perf -u localhost:8001 -m ensemble --concurrency 1,2,4,8 --input-data prompts.jsonl --tokenizer MODEL_DIR\n"
        "  pipeline perf -u http://localhost:8000 -i openai -m Qwen/Qwen2.5-0.5B --request-rate 5,10 --slo ttft=300ms,tpot=40ms\n"
        "  pipeline perf -u localhost:8001 -m ensemble --concurrency 8 --tokenizer MODEL_DIR \\\n"
        "      --synthetic-input-tokens-mean 512 --output-tokens-mean 128\n"
        "  pipeline perf -u localhost:8001 -m ensemble --declare enable_kv_cache_reuse=false --engine ENGINE_DIR"
    )
    add = parser.add_argument_group("the server").add_argument
    add("-u", *_URL_FLAGS[1:], metavar="URL", required=True, help="where it is: HOST:PORT or http(s)://...")
    add("-m", "--model", metavar="NAME", required=True, help="model to ask")
    add(
        "-i",
        "--interface",
        choices=("grpc", "http", "openai"),
        default="grpc",
        help="how to talk (default grpc, Triton's)",
    )
    add("--endpoint-type", choices=("chat", "completions"), default="chat", help="of OpenAI (default chat)")
    add("--streaming", action=argparse.BooleanOptionalAction, default=True, help="answers in parts (default) or whole")
    add(
        "--metrics-url",
        metavar="HOST:PORT",
        help="Triton's metrics endpoint: its own queue and compute times beside ours",
    )
    add(
        "--request-timeout-s",
        type=_positive_number,
        metavar="S",
        default=300.0,
        help="limit of one request (default 300)",
    )
    add = parser.add_argument_group("what the server is said to be, held against what it is").add_argument
    add(
        "--declare",
        action="append",
        metavar="NAME=VALUE",
        default=[],
        help="a setting under TensorRT-LLM's name: read back where the server tells it; enable_kv_cache_reuse=false is "
        "also tried, tp=N is for the roofline",
    )
    add(
        "--engine", type=Path, metavar="DIR", help="its engine on this machine: limits, and the roofline of its weights"
    )
    add("--repository", type=Path, metavar="DIR", help="its model repository: config.pbtxt = what the server runs with")
    add = parser.add_argument_group("the load").add_argument
    add("--concurrency", type=_whole_numbers, metavar="N,N", help="requests in flight, a level each (default 1)")
    add(
        "--request-rate",
        type=_numbers,
        metavar="R,R",
        help="requests a second, a level each, however many are in flight",
    )
    add("--request-distribution", choices=("poisson", "constant", "gamma"), default="poisson", help="default poisson")
    add(
        "--burstiness",
        type=_positive_number,
        metavar="X",
        default=1.0,
        help="shape of gamma: below 1 in bursts (default 1)",
    )
    add("--random-seed", type=int, metavar="N", default=0, help="of arrival times and synthetic prompts (default 0)")
    add("--request-count", type=_positive, metavar="N", default=64, help="requests a level (default 64)")
    add(
        "--warmup-request-count",
        type=_count,
        metavar="N",
        help="requests before each level (default 2 for each in flight, 4 for a rate)",
    )
    add(
        "--repeats",
        type=_positive,
        metavar="N",
        default=1,
        help="how often each level is measured, in turns (default 1)",
    )
    add("--processes", type=_positive, metavar="N", help="load processes (default: as many as a level takes)")
    add = parser.add_argument_group("the requests").add_argument
    add(
        "--input-data", metavar="FILE", default=None, help="JSONL of prompts, or builtin:NAME (default builtin:prompts)"
    )
    add("--synthetic-input-tokens-mean", type=_positive, metavar="N", help="made-up prompts of N tokens instead")
    add("--synthetic-input-tokens-stddev", type=_count, metavar="N", default=0, help="default 0")
    add("--num-prompts", type=_positive, metavar="N", default=64, help="made-up prompts (default 64)")
    add(
        "--max-tokens",
        "--output-tokens-mean",
        type=_positive,
        metavar="N",
        default=128,
        help="of an answer (default 128)",
    )
    add("--temperature", type=_temperature, metavar="X", default=0.0, help="0 is greedy (default)")
    add(
        "--extra-inputs",
        action="append",
        metavar="NAME:VALUE",
        default=[],
        help="of every request, e.g. ignore_eos:true",
    )
    add(
        "--profile-export-file",
        type=Path,
        metavar="FILE",
        help="where all events go (default perf-DATE-TIME-PID.jsonl)",
    )
    _add_analysis(parser)
    parser.set_defaults(form=_load)


def _add_analysis(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json or a model's folder: counts tokens (default: as the server counts them)",
    )
    parser.add_argument(
        "--slo", type=_objectives, metavar="NAME=TIME,...", help="objectives of goodput: ttft=300ms,tpot=40ms,e2e=5s"
    )
    options.add_format(parser, *_FORMATS)


def _load(args: argparse.Namespace) -> int:
    from trtllm_pipeline.bench import self_test
    from trtllm_pipeline.bench.metrics import analyze

    if args.concurrency is not None and args.request_rate is not None:
        raise UsageError("--concurrency and --request-rate exclude each other", hint="two runs, one with each")
    if not args.streaming and "tpot" in (args.slo or {}):
        raise UsageError("--slo tpot: an answer in one piece tells no time per token", hint="leave out --no-streaming")
    path = args.profile_export_file or Path(time.strftime(f"perf-%Y%m%d-%H%M%S-{os.getpid()}.jsonl"))
    if path.exists():
        raise UsageError(f"--profile-export-file {path}: is there already", hint="name another; nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"--profile-export-file {path}: there is no folder {path.parent}")
    target, tokenizer, claim = _target(args), _tokenizer(args.tokenizer), _claim(args)
    prompts = _prompts(args, target, tokenizer)
    plan = _plan(args, prompts)
    _check_server(target)
    # Before the load, not beside it.
    tested = self_test.recent(target.protocol)
    interrupted = False
    try:
        _measure(args, target, claim, prompts, plan, path, tokenizer, tested)
    except KeyboardInterrupt:
        interrupted = True
    note(f"events: {path}")
    if interrupted and '"type": "request"' not in path.read_text(encoding="utf-8"):
        raise KeyboardInterrupt
    result = analyze(path, tokenizer, args.slo)
    _show(result, args.format)
    return 130 if interrupted else 0 if result["valid"] else 1


def _target(args: argparse.Namespace) -> Target:
    from trtllm_pipeline.bench.target import Target, service_at

    protocol = f"openai_{args.endpoint_type}" if args.interface == "openai" else args.interface
    return Target(
        protocol if args.streaming else f"{protocol}_unary",
        service_at(
            args.url,
            args.interface,
            args.model,
            # With the path, as others write it, or without.
            metrics=args.metrics_url and args.metrics_url.rstrip("/").removesuffix("/metrics"),
        ),
        args.model,
        args.request_timeout_s,
        args.max_tokens,
        args.temperature,
        dict(_pair("--extra-inputs", text, ":") for text in args.extra_inputs),
        os.environ.get("OPENAI_API_KEY") if args.interface == "openai" else None,
    )


def _claim(args: argparse.Namespace) -> ExpectedServer:
    from trtllm_pipeline.bench.server_checks import ExpectedServer

    for option, folder in (("--engine", args.engine), ("--repository", args.repository)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{option} {folder}: there is no such folder")
    declared = dict(_pair("--declare", text, "=") for text in args.declare)
    return ExpectedServer(declared, args.engine, args.repository, "the command line")


def _pair(option: str, text: str, sign: str) -> tuple[str, Any]:
    """NAME and VALUE of an option, the value as JSON where it is any."""
    name, found, value = text.partition(sign)
    if not found or not name:
        raise UsageError(f"{option} {text}: expected NAME{sign}VALUE")
    try:
        return name, decode(value)
    except ValueError:
        return name, value


def _prompts(args: argparse.Namespace, target: Target, tokenizer: Any) -> tuple[Prompt, ...]:
    from trtllm_pipeline.bench.prompts import chat_renderer, read, tokenizer_folder, unrendered
    from trtllm_pipeline.flow import data_file

    if args.synthetic_input_tokens_mean is not None:
        from trtllm_pipeline.bench import synthetic

        if args.input_data is not None or tokenizer is None:
            raise UsageError("--synthetic-input-tokens-mean needs --tokenizer, and no --input-data")
        return synthetic.prompts(
            tokenizer,
            args.num_prompts,
            mean=args.synthetic_input_tokens_mean,
            stddev=args.synthetic_input_tokens_stddev,
            seed=args.random_seed,
        )
    chats = target.protocol.startswith("openai_chat")  # the server has the template
    with nullcontext(unrendered) if chats else chat_renderer(tokenizer_folder(args.tokenizer)) as render:
        return read(data_file(args.input_data or "builtin:prompts", Path()), render)


def _plan(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[Level]:
    from trtllm_pipeline.bench.load import WARMUP_REQUESTS, levels, rate_levels

    if args.request_rate is not None:
        return rate_levels(
            prompts,
            args.request_rate,
            requests=args.request_count,
            warmup_requests=WARMUP_REQUESTS if args.warmup_request_count is None else args.warmup_request_count,
            repeats=args.repeats,
            distribution=args.request_distribution,
            burstiness=args.burstiness,
            seed=args.random_seed,
        )
    return levels(
        prompts,
        args.concurrency or [1],
        requests=args.request_count,
        warmup_requests=args.warmup_request_count,
        repeats=args.repeats,
    )


def _check_server(target: Target) -> None:
    """Raises ServerError when the server, or its model, is not there, UsageError for a metrics endpoint that is none."""
    import asyncio

    from trtllm_pipeline.bench import counters

    async def look() -> None:
        async with target.client():
            pass
        metrics = target.service.metrics
        if metrics is not None and await counters.triton(metrics) is None:
            raise UsageError(
                f"--metrics-url {metrics}: Triton's counters are not there",
                hint="its metrics port, HOST:8002 unless told otherwise",
            )

    asyncio.run(look())


def _measure(
    args: argparse.Namespace,
    target: Target,
    claim: ExpectedServer,
    prompts: Sequence[Prompt],
    plan: Sequence[Level],
    path: Path,
    tokenizer: Any,
    tested: dict[str, Any] | None,
) -> None:
    import asyncio

    from trtllm_pipeline.bench.load import EventFile
    from trtllm_pipeline.bench.measure import measure

    allow_open_files(max((level.concurrency or 0 for level in plan), default=0))
    total = sum(len(level.planned) for level in plan)
    count = 0

    def done() -> None:
        nonlocal count
        count += 1
        if sys.stderr.isatty():
            raw(sys.stderr).write(f"\r{count} of {total} requests")

    left_out = {"form", "words", "command", "format", "tokenizer", "profile_export_file", "engine", "repository"}
    settings = {name: value for name, value in vars(args).items() if name not in left_out}
    settings["prompts"] = "synthetic" if args.synthetic_input_tokens_mean is not None else "given"
    try:
        with EventFile(path) as events:
            events.header(target, settings=settings, self_test=tested)
            asyncio.run(
                measure(
                    target,
                    plan,
                    prompts,
                    events,
                    done,
                    claim=claim,
                    tokenizer=tokenizer,
                    processes=args.processes,
                    synthetic=_synthetic(args),
                )
            )
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\n")


def _synthetic(args: argparse.Namespace) -> dict[str, Json] | None:
    if args.synthetic_input_tokens_mean is None:
        return None
    return {
        "input_tokens_mean": args.synthetic_input_tokens_mean,
        "input_tokens_stddev": args.synthetic_input_tokens_stddev,
    }


def _tokenizer(path: Path | None) -> Any:
    """The tokenizer in a file or folder, None for none. Raises UsageError when it is no tokenizer."""
    if path is None:
        return None
    from trtllm_pipeline.report.measured import tokenizer_at

    return tokenizer_at(path)


# An event file, again.


def _configure_analyze(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compute every figure of a load run again from its event file. No server is needed."
    parser.epilog = (
        "example:\n  pipeline perf analyze perf-20260101-120000.jsonl --tokenizer MODEL_DIR --slo ttft=300ms"
    )
    parser.add_argument("verb", metavar="analyze", help=argparse.SUPPRESS)
    parser.add_argument(
        "events", type=Path, metavar="FILE", help="events.jsonl of a stage, or what --profile-export-file named"
    )
    _add_analysis(parser)
    parser.set_defaults(form=_analyze)


def _analyze(args: argparse.Namespace) -> int:
    from trtllm_pipeline.bench.metrics import analyze

    check(args.events)
    result = analyze(args.events, _tokenizer(args.tokenizer), args.slo)
    _show(result, args.format)
    return 0 if result["valid"] else 1


# The client itself.


def _configure_self_test(parser: argparse.ArgumentParser) -> None:
    from trtllm_pipeline.bench.self_test import FULL, PROTOCOLS

    parser.description = (
        "Measure the client's own error against a server of ours that notes what it really sent, and look whether the "
        "client sees merged and cut events, stalls, errors and lies for what they are."
    )
    parser.epilog = "example:\n  pipeline perf self-test --protocol http --streams 64"
    parser.add_argument("verb", metavar="self-test", help=argparse.SUPPRESS)
    parser.add_argument("--protocol", choices=PROTOCOLS, default="grpc", help="default grpc")
    parser.add_argument(
        "--streams", type=_positive, metavar="N", default=FULL.streams, help=f"at once (default {FULL.streams})"
    )
    parser.add_argument(
        "--events", type=_positive, metavar="N", default=FULL.events, help=f"of each (default {FULL.events})"
    )
    parser.add_argument(
        "--processes", type=_positive, metavar="N", help="load processes (default: as many as it takes)"
    )
    options.add_format(parser, "text", "json")
    parser.set_defaults(form=_self_test)


def _self_test(args: argparse.Namespace) -> int:
    from trtllm_pipeline.bench import self_test

    result = self_test.run(args.protocol, self_test.Size(args.streams, args.events), processes=args.processes)
    if args.format == "json":
        emit_json({"schema": 1, **result, "definitions": self_test.DEFINITIONS})
    else:
        emit(self_test.line(result))
        names = ("ttft_error_ms", "event_error_ms", "gap_error_ms", "read_late_ms", "server_late_ms")
        _emit_table([_statistics(name, result[name], digits=4) for name in names])
        for name, seen in result["checks"].items():
            emit(f"{'seen  ' if seen else 'MISSED'}  {name}")
        for name, definition in self_test.DEFINITIONS.items():
            emit(f"{name}: {definition}")
    return 0 if result["pass"] and all(result["checks"].values()) else 1


# What is shown.

_COLUMNS: Final = ("n", "min", "mean", "p50", "p75", "p90", "p95", "p99", "max")
_TIMES: Final = (
    "ttft_ms", "ttfa_ms", "tpot_ms", "itl_ms", "icl_ms", "stall_ms", "e2e_ms", "connect_ms", "user_tokens_per_s",
    "input_tokens_per_request", "output_tokens_per_request",
)  # fmt: skip
_SCHEDULED: Final = ("lag_ms", "ttft_from_schedule_ms", "response_ms")


def _show(result: dict[str, Any], form: str) -> None:
    if form == "json":
        emit_json(result)
    elif form == "csv":
        emit(",".join(("load", "metric", "value", *_COLUMNS)))
        for level in result["levels"]:
            for name, value in (*_figures(level), *_as_other_tools(level)):
                cells = (
                    [value.get(column) for column in _COLUMNS] if isinstance(value, dict) else [None] * len(_COLUMNS)
                )
                row = (_load_name(level), name, None if isinstance(value, dict) else value, *cells)
                emit(",".join("" if cell is None else str(cell) for cell in row))
    else:
        _show_table(result)


def _load_name(level: dict[str, Any]) -> str:
    rate = level.get("request_rate")
    return f"concurrency {level['concurrency']}" if rate is None else f"{rate:g} requests/s"


def _figures(level: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every figure of a level by name: a number, or a summary."""
    rows: list[tuple[str, Any]] = [(name, level[name]) for name in ("requests", "failures")]
    rows += [(name, level[name]) for name in ("input_tokens_per_s", "output_tokens_per_s", "requests_per_s")]
    rows += [(name, level[name]) for name in _TIMES if (level.get(name) or {}).get("n")]
    schedule = level.get("schedule")
    if schedule:
        rows += [("achieved_rate", schedule["achieved_rate"]), ("most_in_flight", schedule["most_in_flight"])]
        rows += [(name, schedule[name]) for name in _SCHEDULED]
    if "goodput" in level:
        rows += [
            ("goodput_share", level["goodput"]["share"]),
            ("goodput_requests_per_s", level["goodput"]["requests_per_s"]),
        ]
    return rows


def _as_other_tools(level: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{name} as {tool}", value) for tool, figures in level["as"].items() for name, value in figures.items()]


def _show_table(result: dict[str, Any]) -> None:
    made_up = ", synthetic prompts" if result["settings"].get("prompts") == "synthetic" else ""
    emit(
        f"{result['model']} over {result['protocol']}{made_up}; output tokens counted by {result['token_count']['source']}"
    )
    from trtllm_pipeline.bench.conditions import Conditions, system_words, workload_words

    under = Conditions.read(result)
    emit(f"system: {system_words(under)}")
    emit(f"load: {workload_words(under)}")
    _emit_table([_overview(level) for level in result["levels"]])
    for level in result["levels"]:
        figures = _figures(level)
        emit(f"\n{_load_name(level)}")
        _emit_table([_statistics(name, value) for name, value in figures if isinstance(value, dict)])
        emit("; ".join(f"{name} {_cell(value)}" for name, value in figures if not isinstance(value, dict)))
        if level["as"]:
            emit("the same events, as others would report them:")
            _emit_table([_in_words_of(tool, figures) for tool, figures in level["as"].items()])
        for repeat in level["repeats"]:
            windows = ", ".join(
                f"{name} {window['duration_s']:.2f} s {window['output_tokens_per_s']:.1f} tokens/s"
                for name in ("whole", "active", "steady")
                if (window := repeat.get(name))
            )
            emit(f"output in the windows of repeat {repeat['repeat']}: {windows}")
        if level["headline"]["reason"]:
            emit(f"rates are of the window {level['headline']['window']}: {level['headline']['reason']}")
        for record in level.get("triton", ()):
            for model, times in record["of"].items():
                emit(f"Triton's own times, repeat {record['repeat']}, {model}: " + _words(times))
        for record in level.get("gpu", ()):
            for device in record["of"]:
                emit(f"GPU, repeat {record['repeat']}: " + _words(device))
    emit("")
    for finding in result["findings"]:
        place = f" ({_load_name(finding)})" if finding["concurrency"] or finding.get("request_rate") else ""
        emit(f"{finding['severity']}: {finding['message']}{place}")
    tested = result["client"]["self_test"]
    if tested is not None:
        from trtllm_pipeline.bench import self_test

        emit(self_test.line(tested))
    emit("formulas: --format json, `definitions`")


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_cell(value)}" for name, value in values.items() if value is not None)


def _overview(level: dict[str, Any]) -> dict[str, str]:
    def part(name: str, statistic: str) -> str:
        return _cell(level[name][statistic])

    return {
        "load": _load_name(level),
        "requests": str(level["requests"]),
        "failed": str(level["failures"]),
        "TTFT p50 ms": part("ttft_ms", "p50"),
        "p99": part("ttft_ms", "p99"),
        "TPOT p50 ms": part("tpot_ms", "p50"),
        "ITL p99 ms": part("itl_ms", "p99"),
        "e2e p50 ms": part("e2e_ms", "p50"),
        "in tokens/s": _cell(level["input_tokens_per_s"]),
        "out tokens/s": _cell(level["output_tokens_per_s"]),
        "requests/s": _cell(level["requests_per_s"]),
        **({"goodput": _cell(level["goodput"]["share"])} if "goodput" in level else {}),
    }


def _in_words_of(tool: str, figures: dict[str, Any]) -> dict[str, str]:
    summaries = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
    return {
        "": tool,
        **{
            f"{name} {statistic}": _cell(figures[name][statistic]) if name in figures else "-"
            for name in summaries
            for statistic in ("mean", "p99")
        },
        **{name: _cell(figures.get(name)) for name in ("output_tokens_per_s", "requests_per_s")},
    }


def _statistics(name: str, values: dict[str, Any], *, digits: int = 2) -> dict[str, str]:
    return {"": name, **{column: _cell(values.get(column), digits) for column in _COLUMNS}}


def _cell(value: object, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _emit_table(rows: Sequence[dict[str, str]]) -> None:
    """Rows with the same keys; the first column to the left, the others to the right."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *others = (
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        emit("  ".join((first, *others)).rstrip())


# Words to values.


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return value


def _list(read: Callable[[str], Any], text: str) -> list[Any]:
    values = [read(part.strip()) for part in text.strip("[]").split(",")]
    if len({*values}) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a value twice; --repeats measures levels again")
    return values


def _whole_numbers(text: str) -> list[int]:
    return _list(_positive, text)


def _numbers(text: str) -> list[float]:
    return _list(_positive_number, text)


def _objectives(text: str) -> dict[str, float]:
    objectives = {}
    for part in text.split(","):
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not like ttft=300ms, tpot=40ms or e2e=5s")
        objectives[match[1]] = float(match[2]) * (1e3 if match[3] == "s" else 1.0)
    return objectives
