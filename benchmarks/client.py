"""Error and CPU cost of our load client and its peers, at a server with a known timeline.

    python benchmarks/client.py [--streams 256] [--events 60] [--rounds 3] [--aiperf PATH] [--format json]

The server (`tests/helpers/scripted_server.py`, a separate process) sends each stream 20 events per second with a different
phase per stream, and records the time just before each event is sent. A tool's error is its own time of an event minus the
server's. Both clocks are CLOCK_MONOTONIC. Errors do not include lateness of the server.

    ours (openai), ours (grpc)   the whole command `pipeline bench load -u ...`
    aiperf                       `aiperf profile --endpoint-type chat --streaming`, if it is installed
    threads                      a thread pool with one tritonclient per request, as in common scripts

CPU time is that of the tool and all its processes. The cost of an event is the difference between a run with many
events and one with few, divided by the events. It excludes start-up, connecting and sending, which are equal in both.
Tools take turns within each round, so that other work on the machine affects all of them. Figures are medians of rounds.
genai-perf is left out because its package on PyPI lacks perf_analyzer's binary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.helpers.scripted_server import server_process
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.load.stats import percentile
from trtllm_pipeline.measure.load.windows import least_requests

EVENTS_PER_S: Final = 20
FEW_EVENTS: Final = 10
REQUESTS: Final = least_requests(1, 0)
"""Sequential requests per stream: the minimum of `pipeline bench load`."""
Times = Mapping[str, Sequence[int]]
"""Prompt -> time of each of its events with text, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One client: the command that loads a server, and how its stamps are read from what it left."""

    name: str
    command: Callable[[Service, Path, int], list[str]]
    times: Callable[[Path], Times]


@dataclass(frozen=True, slots=True)
class Row:
    """One tool's figures: errors of the run with many events in milliseconds, cost of an event in microseconds."""

    tool: str
    streams: int
    events: int
    failed: int
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    event_error_p50_ms: float
    event_error_p99_ms: float
    cpu_us_per_event: float
    events_per_s_per_core: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--events", type=int, default=60, help="events of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--aiperf", default=shutil.which("aiperf"), help="the program, in a separate environment")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--thread-peer", nargs=2, metavar=("GRPC", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.thread_peer:
        thread_peer(args.thread_peer[0], Path(args.thread_peer[1]))
        return
    rounds = [
        {tool.name: measure(tool, args.streams, args.events) for tool in tools(args.aiperf)} for _ in range(args.rounds)
    ]
    rows = [middle([one[name] for one in rounds]) for name in rounds[0]]
    if args.format == "json":
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{args.streams} streams of {EVENTS_PER_S} events/s, {args.events} events each, {args.rounds} rounds")
    print(f"{'':<16}{'TTFT error ms':>16}{'event error ms':>18}{'CPU':>12}{'events/s':>10}")
    print(f"{'':<16}{'p50':>8}{'p99':>8}{'p50':>9}{'p99':>9}{'µs/event':>12}{'per core':>10}{'failed':>8}")
    for row in rows:
        print(
            f"{row.tool:<16}{row.ttft_error_p50_ms:>8.3f}{row.ttft_error_p99_ms:>8.3f}{row.event_error_p50_ms:>9.3f}"
            f"{row.event_error_p99_ms:>9.3f}{row.cpu_us_per_event:>12.1f}{row.events_per_s_per_core:>10.0f}{row.failed:>8}"
        )


def tools(aiperf: str | None) -> Iterator[Tool]:
    """The clients that are here."""

    def ours(protocol: Sequence[str], url: str, folder: Path, streams: int) -> list[str]:
        return [
            *(sys.executable, "-m", "trtllm_pipeline", "bench", "load", "-u", url, *protocol),
            *("--model", "ensemble"),
            *("--concurrency", str(streams), "--requests", "1", "--warmup-requests", "0"),
            *("--input-data", str(folder / "prompts.jsonl"), "--event-file", str(folder / "events.jsonl")),
        ]

    yield Tool("ours (openai)", lambda at, to, n: ours(("--protocol", "openai"), f"http://{at.http}", to, n), our_times)
    yield Tool("ours (grpc)", lambda at, to, n: ours(("--protocol", "grpc"), at.grpc, to, n), our_times)
    if aiperf is not None:
        yield Tool(
            "aiperf",
            lambda at, to, n: [
                *(aiperf, "profile", "--model", "ensemble", "--url", at.http, "--endpoint-type", "chat", "--streaming"),
                *(
                    "--concurrency",
                    str(n),
                    "--request-count",
                    str(REQUESTS * n),
                    "--input-file",
                    str(to / "aiperf.jsonl"),
                ),
                *("--custom-dataset-type", "single-turn", "--tokenizer", str(to / "tokenizer"), "--ui", "none"),
                *("--use-server-token-count", "--artifact-dir", str(to / "artifacts"), "--export-level", "raw"),
            ],
            aiperf_times,
        )
    yield Tool("threads", lambda at, to, _: [sys.executable, __file__, "--thread-peer", at.grpc, str(to)], thread_times)


def middle(rows: Sequence[Row]) -> Row:
    """Medians of the figures of several rounds."""
    names = [name for name, value in asdict(rows[0]).items() if isinstance(value, float)]
    medians = {name: statistics.median(getattr(row, name) for row in rows) for name in names}
    return Row(**{**asdict(rows[0]), "failed": sum(row.failed for row in rows), **medians})


def measure(tool: Tool, streams: int, events: int) -> Row:
    """One run with few events and one with many."""
    few_s, _, few_failed = load(tool, streams, FEW_EVENTS)
    many_s, errors, failed = load(tool, streams, events)
    cost_s = (many_s - few_s) / (REQUESTS * streams * (events - FEW_EVENTS))
    first, every = sorted(row[0] for row in errors), sorted(error for row in errors for error in row)
    return Row(
        tool.name,
        streams,
        events,
        failed + few_failed,
        percentile(first, 0.5),
        percentile(first, 0.99),
        percentile(every, 0.5),
        percentile(every, 0.99),
        cost_s * 1e6,
        1 / cost_s,
    )


def load(tool: Tool, streams: int, events: int) -> tuple[float, list[list[float]], int]:
    """(processor seconds, errors in ms of each request's events, requests that failed) of one run."""
    with tempfile.TemporaryDirectory(prefix="client-benchmark-") as scratch:
        folder = Path(scratch)
        prompts = write_inputs(folder, streams, events)
        log = folder / "server.log"
        with server_process(log) as service:
            command = tool.command(service, folder, streams)
            with (folder / "output").open("w") as output:
                pid = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder).pid
                _, _, usage = os.wait4(pid, 0)
        truth = {record["prompt"]: record["sent_ns"] for record in map(json.loads, log.read_text().splitlines())}
        try:
            times = tool.times(folder)
        except (OSError, ValueError, KeyError) as error:
            raise SystemExit(
                f"{tool.name} wrote no results: {error!r}\n{(folder / 'output').read_text()[-2000:]}"
            ) from error
    errors = [
        [(got - sent) / 1e6 for got, sent in zip(times[prompt], truth[prompt], strict=True)]
        for prompt in prompts
        if len(times.get(prompt, ())) == len(truth.get(prompt, ())) == events
    ]
    if not errors:
        raise SystemExit(f"{tool.name}: no request came through whole")
    return usage.ru_utime + usage.ru_stime, errors, len(prompts) - len(errors)


def write_inputs(folder: Path, streams: int, events: int) -> list[str]:
    """Write the same prompts in each tool's format and return them. A prompt is an instruction for the server."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    draw, gap_ms = random.Random(1), 1e3 / EVENTS_PER_S
    prompts = [
        json.dumps({"name": number, "first_ms": 1000 + draw.random() * gap_ms, "gap_ms": gap_ms, "events": events})
        for number in range(REQUESTS * streams)
    ]
    rows = [json.dumps({"input": text, "max_tokens": events}) for text in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "aiperf.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in prompts))
    (folder / "prompts.json").write_text(json.dumps(prompts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return prompts


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON Lines file."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def our_times(folder: Path) -> Times:
    """From the event file."""
    records = list(lines(folder / "events.jsonl"))
    texts = {record["id"]: record["text"] for record in records if record["type"] == "prompt"}
    return {
        texts[record["prompt"]]: [event[0] for event in record["events"]]
        for record in records
        if record["type"] == "request"
    }


def aiperf_times(folder: Path) -> Times:
    """From its raw records, whose perf_ns is CLOCK_MONOTONIC as Python reads it on Linux."""
    inputs = json.loads((folder / "artifacts" / "inputs.json").read_text())
    texts = {entry["session_id"]: _content(entry["payloads"][0]) for entry in inputs["data"]}
    times: dict[str, list[int]] = {}
    for path in (folder / "artifacts").rglob("*raw*.jsonl"):
        for record in lines(path):
            times[texts[record["metadata"]["conversation_id"]]] = [
                response["perf_ns"]
                for response in record["responses"]
                for packet in response["packets"]
                if '"content": " word"' in packet["value"]
            ]
    return times


def _content(payload: Mapping[str, Any]) -> str:
    content = payload["messages"][-1]["content"]
    return content if isinstance(content, str) else content[0]["text"]


def thread_times(folder: Path) -> Times:
    """What `thread_peer` left."""
    return {record["prompt"]: record["times_ns"] for record in lines(folder / "threads.jsonl")}


def thread_peer(url: str, folder: Path) -> None:
    """A thread for each stream, and a client for each of its requests, stamped in tritonclient's callback."""
    import numpy as np
    from tritonclient.grpc import InferenceServerClient, InferInput

    prompts = json.loads((folder / "prompts.json").read_text())
    lines: list[str] = []

    def user(own: Sequence[str]) -> None:
        for prompt in own:
            ask(prompt)

    def ask(prompt: str) -> None:
        times_ns: list[int] = []
        ended = threading.Event()

        def callback(result: Any, error: Any) -> None:
            now_ns = time.monotonic_ns()
            if error is None and result.get_response().outputs:
                times_ns.append(now_ns)
            if error is not None or result.get_response().parameters["triton_final_response"].bool_param:
                ended.set()

        text = InferInput("text_input", [1, 1], "BYTES")
        text.set_data_from_numpy(np.array([[prompt.encode()]], dtype=object))
        length = InferInput("max_tokens", [1, 1], "INT32")
        length.set_data_from_numpy(np.array([[1]], dtype=np.int32))
        with InferenceServerClient(url) as client:
            client.start_stream(callback)
            client.async_stream_infer("ensemble", [text, length], enable_empty_final_response=True)
            ended.wait(60)
            client.stop_stream()
        lines.append(json.dumps({"prompt": prompt, "times_ns": times_ns}))

    streams = len(prompts) // REQUESTS
    threads = [threading.Thread(target=user, args=(prompts[number::streams],)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder / "threads.jsonl").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
