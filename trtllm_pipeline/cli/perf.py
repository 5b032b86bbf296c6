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
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.bench.objectives import per_request
from trtllm_pipeline.cli import options, stage
from trtllm_pipeline.cli.output import emit, emit_json, note
from trtllm_pipeline.errors import PipelineError, UsageError
from trtllm_pipeline.files.user_files import check, decode
from trtllm_pipeline.terminal import raw

_URL_FLAGS: Final = ("-u", "--url")
_FORMATS: Final = ("table", "json", "csv")


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
        "--slo", type=per_request, metavar="NAME=TIME,...", help="objectives of goodput: ttft=300ms,tpot=40ms,e2e=5s"
    )
    options.add_format(parser, *_FORMATS)


def _load(args: argparse.Namespace) -> int:
    from trtllm_pipeline.bench.metrics import analyze
    from trtllm_pipeline.bench.run import BUILT_IN_PROMPTS, Load, ServerLoad, Synthetic
    from trtllm_pipeline.bench.server_checks import ExpectedServer
    from trtllm_pipeline.bench.target import Target
    from trtllm_pipeline.hub.dataset_file import data_file

    if args.concurrency is not None and args.request_rate is not None:
        raise UsageError("--concurrency and --request-rate exclude each other", hint="two runs, one with each")
    if not args.streaming and "tpot" in (args.slo or {}):
        raise UsageError("--slo tpot: an answer in one piece tells no time per token", hint="leave out --no-streaming")
    for option, folder in (("--engine", args.engine), ("--repository", args.repository)):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{option} {folder}: there is no such folder")
    made_up = None
    if args.synthetic_input_tokens_mean is not None:
        made_up = Synthetic(
            input_tokens_mean=args.synthetic_input_tokens_mean,
            input_tokens_stddev=args.synthetic_input_tokens_stddev,
            prompts=args.num_prompts,
        )
        if args.input_data is not None or args.tokenizer is None:
            raise UsageError("--synthetic-input-tokens-mean needs --tokenizer, and no --input-data")
    path = _new_file(args.profile_export_file)
    tokenizer = _tokenizer(args.tokenizer)
    load = ServerLoad(
        target=Target.at(
            args.url,
            args.interface,
            args.model,
            endpoint=args.endpoint_type,
            streaming=args.streaming,
            metrics=args.metrics_url,
            timeout_s=args.request_timeout_s,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            options=dict(_pair("--extra-inputs", text, ":") for text in args.extra_inputs),
        ),
        load=Load(
            concurrency=tuple(args.concurrency or () if args.request_rate else args.concurrency or (1,)),
            request_rate=tuple(args.request_rate or ()),
            requests=args.request_count,
            warmup_requests=args.warmup_request_count,
            repeats=args.repeats,
            distribution=args.request_distribution,
            burstiness=args.burstiness,
            seed=args.random_seed,
        ),
        claim=ExpectedServer(
            dict(_pair("--declare", text, "=") for text in args.declare),
            args.engine,
            args.repository,
            "the command line",
        ),
        input_data=None if made_up else data_file(args.input_data or BUILT_IN_PROMPTS, Path()),
        synthetic=made_up,
        tokenizer=args.tokenizer,
        processes=args.processes,
    )
    interrupted = False
    try:
        load.run(path, tokenizer, _count_down())
    except KeyboardInterrupt:
        interrupted = True
    note(f"events: {path}")
    if interrupted and '"type": "request"' not in path.read_text(encoding="utf-8"):
        raise KeyboardInterrupt
    result = analyze(path, tokenizer, args.slo)
    _show(result, args.format)
    return 130 if interrupted else 0 if result["valid"] else 1


def _new_file(given: Path | None) -> Path:
    path = given or Path(time.strftime(f"perf-%Y%m%d-%H%M%S-{os.getpid()}.jsonl"))
    if path.exists():
        raise UsageError(f"--profile-export-file {path}: is there already", hint="name another; nothing is overwritten")
    if not path.parent.is_dir():
        raise UsageError(f"--profile-export-file {path}: there is no folder {path.parent}")
    return path


def _count_down() -> Callable[[int, int], None]:
    """Shows on a terminal how far a load is."""

    def shown(done: int, total: int) -> None:
        raw(sys.stderr).write(f"\r{done} of {total} requests" + "\n" * (done == total))

    return shown if sys.stderr.isatty() else lambda _done, _total: None


def _pair(option: str, text: str, sign: str) -> tuple[str, Any]:
    """NAME and VALUE of an option, the value as JSON where it is any."""
    name, found, value = text.partition(sign)
    if not found or not name:
        raise UsageError(f"{option} {text}: expected NAME{sign}VALUE")
    try:
        return name, decode(value)
    except ValueError:
        return name, value


def _tokenizer(path: Path | None) -> Any:
    """The tokenizer in a file or folder, None for none. Raises UsageError when it is no tokenizer."""
    if path is None:
        return None
    from trtllm_pipeline.files.model_files import tokenizer_at

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
        from trtllm_pipeline.report import figures

        emit(figures.self_test_text(result))
    return 0 if result["pass"] and all(result["checks"].values()) else 1


def _show(result: dict[str, Any], form: str) -> None:
    from trtllm_pipeline.report import figures

    if form == "json":
        emit_json(result)
    else:
        emit(figures.to_csv(result) if form == "csv" else figures.to_text(result))


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
