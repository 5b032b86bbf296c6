"""Overhead of the gateway over direct Triton gRPC: TTFT, throughput, CPU time.

    python benchmarks/gateway.py [--rounds 5] [--service service.json --model-folder DIR] [--format json]

Three ways to the same server take turns within each round, so that other work on the machine affects all of them. Figures
are medians of rounds:

    gateway         `pipeline bench load` over OpenAI's protocol at a gateway in front of the server
    direct          `pipeline bench load` over gRPC at the server. Both use arrival times of bytes
    tritonclient    NVIDIA's client over gRPC at the server, `tritonclient.grpc.aio`, one stream per request

The loads:

    one             one stream, one request at a time
    steady          Poisson arrivals at a rate that keeps 64 requests in flight
    burst           64 simultaneous requests, repeated when all of them have ended

The figures:

    ttft            TTFT over the gateway, and its difference from each direct way, as p50 and p99
    throughput      responses per second over the gateway, as a share of `direct`. Clients may merge events that arrive
                    together, so events do not count tokens
    cpu             CPU time of the gateway's process: per event, and per request without its events (from a load of
                    short outputs at the same rate), and as a share of the CPU time of the server's processes

Without --service the server is `tests/helpers/scripted_server.py`, which sends each stream 20 events per second without any
computation: the worst case for shares of CPU time. With --service it is a real Triton, and `steady` needs --rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.helpers import scripted_server
from trtllm_pipeline.measure.load.windows import WAVES

STREAMS: Final = 64
EVENTS: Final = 40
FEW_EVENTS: Final = 2
"""Where only the first one is of interest, or the cost of the request."""
GAP_S: Final = 0.05
SECONDS: Final = 8
"""Duration of the load with Poisson arrivals."""
WARM: Final = 16
NAME: Final = "measured"
PROMPT: Final = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to a server, by concurrency or by request rate."""

    name: str
    max_tokens: int
    requests: int
    concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One load, over one way."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    answers_per_s: float
    gateway_cpu_s: float
    server_cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """Overhead of the gateway under a load: medians of rounds."""

    load: str
    ttft_p50_ms: float
    ttft_p99_ms: float
    added_to_direct_p50_ms: float
    added_to_direct_p99_ms: float
    added_to_tritonclient_p50_ms: float
    added_to_tritonclient_p99_ms: float
    throughput_share: float
    gateway_cpu_us: float
    """Per request with its events."""
    cpu_share_of_server: float
    max_tokens: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--service", type=Path, help="service.json of a running Triton")
    parser.add_argument("--model-folder", type=Path, help="its tokenizer")
    parser.add_argument("--max-tokens", type=int, default=EVENTS)
    parser.add_argument("--rate", type=float, help="requests per second that just keep the server busy")
    parser.add_argument("--load", action="append", help="run only this load (repeatable)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    rows = []
    for load in loads(args.max_tokens, args.rate, scripted=args.service is None):
        if args.load and load.name not in args.load:
            continue
        with (
            tempfile.TemporaryDirectory() as scratch,
            server(args.service, Path(scratch), load.max_tokens) as service,
            gateway(service.absolute(), args.model_folder, Path(scratch)) as (url, pid),
        ):
            description = json.loads(service.read_text(encoding="utf-8"))
            rows.append(row(description, url, pid, load, args.rounds))
    if args.format == "json":
        print(json.dumps([asdict(each) for each in rows], indent=2))
        return
    print(f"{args.rounds} rounds, {'scripted server' if args.service is None else 'real Triton'}; TTFT in ms")
    print(
        f"{'':>8}{'gateway':>18}{'+ to direct':>18}{'+ to tritonclient':>20}{'throughput':>12}{'CPU of the gateway':>24}"
    )
    print(
        f"{'load':>8}"
        + f"{'p50':>9}{'p99':>9}" * 2
        + f"{'p50':>11}{'p99':>9}{'share':>12}{'µs/request':>12}{'of server':>12}"
    )
    for each in rows:
        print(
            f"{each.load:>8}{each.ttft_p50_ms:>9.2f}{each.ttft_p99_ms:>9.2f}"
            f"{each.added_to_direct_p50_ms:>9.2f}{each.added_to_direct_p99_ms:>9.2f}"
            f"{each.added_to_tritonclient_p50_ms:>11.2f}{each.added_to_tritonclient_p99_ms:>9.2f}"
            f"{each.throughput_share:>12.3f}{each.gateway_cpu_us:>12.0f}{each.cpu_share_of_server:>12.1%}"
        )
    by_name = {each.load: each for each in rows}
    if "steady" in by_name and "short" in by_name:
        event_us, request_us = parts(by_name["steady"], by_name["short"])
        print(f"of that {event_us:.0f} µs an event and {request_us:.0f} µs a request")


def loads(max_tokens: int, rate: float | None, *, scripted: bool) -> Iterator[Load]:
    """The measured loads."""
    yield Load("one", FEW_EVENTS if scripted else max_tokens, 20, concurrency=1)
    if scripted and rate is None:
        rate = STREAMS / (max_tokens * GAP_S)
    if rate is not None:
        yield Load("steady", max_tokens, round(rate * SECONDS), rate=rate)
        yield Load("short", FEW_EVENTS, round(rate * SECONDS), rate=rate)
    yield Load("burst", max_tokens, (WAVES + 1) * STREAMS, concurrency=STREAMS)


def parts(long: Row, short: Row) -> tuple[float, float]:
    """CPU time of an event and of a request without its events, in microseconds, from two output lengths."""
    event_us = (long.gateway_cpu_us - short.gateway_cpu_us) / (long.max_tokens - short.max_tokens)
    return event_us, short.gateway_cpu_us - short.max_tokens * event_us


def row(service: Mapping[str, Any], url: str, pid: int, load: Load, rounds: int) -> Row:
    """Rounds of all ways, after a warmup round."""
    rounds_of: list[tuple[Turn, Turn, Turn]] = []
    grpc = ["-u", service["grpc"], "--protocol", "grpc", "--model", service["model"]]
    openai = ["-u", f"{url}/v1", "--protocol", "openai", "--endpoint-type", "completions", "--model", NAME]
    for number in range(rounds + 1):
        turns = turn(service, pid, load, grpc), turn(service, pid, load, openai), by_tritonclient(service, load)
        if number:
            rounds_of.append(turns)

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    return Row(
        load.name,
        middle([over.ttft_p50_ms for _, over, _ in rounds_of]),
        middle([over.ttft_p99_ms for _, over, _ in rounds_of]),
        middle([over.ttft_p50_ms - direct.ttft_p50_ms for direct, over, _ in rounds_of]),
        middle([over.ttft_p99_ms - direct.ttft_p99_ms for direct, over, _ in rounds_of]),
        middle([over.ttft_p50_ms - other.ttft_p50_ms for _, over, other in rounds_of]),
        middle([over.ttft_p99_ms - other.ttft_p99_ms for _, over, other in rounds_of]),
        middle([over.answers_per_s / direct.answers_per_s for direct, over, _ in rounds_of]),
        middle([over.gateway_cpu_s / load.requests * 1e6 for _, over, _ in rounds_of]),
        middle([over.gateway_cpu_s / over.server_cpu_s for _, over, _ in rounds_of]),
        load.max_tokens,
    )


def turn(service: Mapping[str, Any], pid: int, load: Load, way: Sequence[str]) -> Turn:
    """One load by `pipeline bench load`."""
    command = [sys.executable, "-m", "trtllm_pipeline", "bench", "load", *way]
    command += ["--requests", str(load.requests), "--max-tokens", str(load.max_tokens), "--format", "json"]
    if load.rate is None:
        command += ["--concurrency", str(load.concurrency), "--warmup-requests", "0"]
    else:
        command += ["--request-rate", str(load.rate), "--warmup-requests", str(WARM)]
    before = cpu_s(pid), cpu_s(service["pid"])
    with tempfile.TemporaryDirectory() as folder:  # of the event file
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if not done.stdout:
        sys.exit(done.stderr)
    measured = json.loads(done.stdout)
    for each in measured["findings"]:
        if each["severity"] == "invalid":  # a round spoiled by a busy machine, which the medians leave out
            print(f"{load.name}, {way[3]}: {each['message']}", file=sys.stderr)
    (level,) = measured["levels"]
    sent = load.requests if load.rate is None else load.requests + WARM
    used = [(cpu_s(pid) - before[0]), cpu_s(service["pid"]) - before[1]]
    ttft = level["ttft_ms"]
    return Turn(
        ttft["p50"],
        ttft["p99"],
        level["repeats"][0]["whole"]["requests_per_s"],
        *(each * load.requests / sent for each in used),
    )


def by_tritonclient(service: Mapping[str, Any], load: Load) -> Turn:
    """The same load with NVIDIA's client. Its times are taken when Python gets the response."""
    ttft_ms, seconds = asyncio.run(_by_tritonclient(service["grpc"], service["model"], load))
    ranks = statistics.quantiles(ttft_ms, n=100, method="inclusive")
    return Turn(statistics.median(ttft_ms), ranks[98], load.requests / seconds, 0.0, 0.0)


async def _by_tritonclient(address: str, model: str, load: Load) -> tuple[list[float], float]:
    import numpy as np
    from tritonclient.grpc import InferInput, aio

    inputs = []
    for name, kind, value in (
        ("text_input", "BYTES", np.array([[PROMPT.encode()]], dtype=np.object_)),
        ("max_tokens", "INT32", np.array([[load.max_tokens]], dtype=np.int32)),
        ("stream", "BOOL", np.array([[True]])),
    ):
        inputs.append(InferInput(name, [1, 1], kind))
        inputs[-1].set_data_from_numpy(value)
    ttft_ms = []
    async with aio.InferenceServerClient(address) as client:

        async def requests() -> Any:
            yield {"model_name": model, "inputs": inputs, "enable_empty_final_response": True}

        async def ask() -> float:
            began = time.perf_counter()
            first: float | None = None
            async for result, error in client.stream_infer(requests()):
                if error is not None:
                    raise error
                if first is None:
                    first = time.perf_counter() - began
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
            assert first is not None
            return first * 1e3

        async def one_after_another(number: int) -> None:
            ttft_ms.extend([await ask() for _ in range(number)])

        async def due(at_s: float) -> None:
            await asyncio.sleep(at_s)
            ttft_ms.append(await ask())

        await ask()  # connects
        began = time.perf_counter()
        if load.rate is None:
            assert load.concurrency is not None
            each = load.requests // load.concurrency
            await asyncio.gather(*(one_after_another(each) for _ in range(load.concurrency)))
        else:
            drawn, at_s = random.Random(0), 0.0
            arrivals = [at_s := at_s + drawn.expovariate(load.rate) for _ in range(load.requests)]
            await asyncio.gather(*map(due, arrivals))
        return ttft_ms, time.perf_counter() - began


def cpu_s(pid: int) -> float:
    """Processor time of a process and of those that it has started, as far as they live."""
    total = 0.0
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        try:
            fields = Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for task in Path(f"/proc/{each}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="utf-8").split())
        except OSError:
            continue
    return total


@contextmanager
def server(service: Path | None, scratch: Path, events: int) -> Iterator[Path]:
    """The service.json of the server that is measured."""
    if service is not None:
        yield service
        return
    command = [sys.executable, scripted_server.__file__, str(scratch / "log")]
    with subprocess.Popen(
        [*command, f"first_ms={GAP_S * 1e3:g}", f"gap_ms={GAP_S * 1e3:g}", f"events={events}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        path = scratch / "service.json"
        path.write_text(process.stdout.readline(), encoding="utf-8")
        yield path
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def gateway(service: Path, model_folder: Path | None, scratch: Path) -> Iterator[tuple[str, int]]:
    """URL and process of a gateway."""
    command = [sys.executable, "-m", "trtllm_pipeline", "serve", "gateway", f"{NAME}={service}", "--format", "json"]
    if model_folder is not None:
        command += ["--model-folder", f"{NAME}={model_folder}"]
    with subprocess.Popen([*command, "--temperature", "0"], stdout=subprocess.PIPE, text=True, cwd=scratch) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        try:
            yield ready["url"], ready["pid"]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
