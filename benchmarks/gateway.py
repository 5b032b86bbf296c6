"""Overhead of the gateway over direct Triton gRPC: TTFT, throughput, CPU time.

    python benchmarks/gateway.py [--rounds 5] [--triton | --service service.json --model-folder DIR] [--format json]

Three ways to the same server take turns within each round, and in the other order in the next one, so that other work on
the machine affects all of them. Figures are medians of rounds. JSON has the rounds too:

    gateway         `pipeline bench load` over OpenAI's protocol at a gateway in front of the server
    direct          `pipeline bench load` over gRPC at the server. Both use arrival times of bytes
    tritonclient    NVIDIA's client over gRPC at the server, `tritonclient.grpc.aio`, one stream per request

The loads:

    one             one stream, one request at a time
    steady          Poisson arrivals at a rate that keeps 64 requests in flight
    burst           64 simultaneous requests, repeated when all of them have ended
    closed          with --triton instead of it: 64 in flight, each answer at its own pace

The figures:

    ttft            TTFT over the gateway, and its difference from each direct way, as p50 and p99
    throughput      responses per second over the gateway, as a share of `direct`. Clients may merge events that arrive
                    together, so events do not count tokens
    cpu             CPU time of the gateway's process: per event, and per request without its events (from a load of
                    short outputs at the same rate), and as a share of the CPU time of the server's processes

Without --service the server is `tests/helpers/scripted_server.py`, which sends each stream 20 events per second without any
computation: the worst case for shares of CPU time. With --triton it is a real Triton with the model `paced_model.py`, which
sends a token every 25 to 40 ms. With --service it is a running one, and `steady` needs --rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
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
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.measure.load.windows import WAVES
from trtllm_pipeline.tensorrt.servers import triton_server

STREAMS: Final = 64
EVENTS: Final = 40
FEW_EVENTS: Final = 2
"""Where only the first one is of interest, or the cost of the request."""
GAP_S: Final = 0.05
PACE_S: Final = 0.0325
"""Of `paced_model.py`, on average."""
MODEL: Final = "ensemble"
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
    warmup: int = 0


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
    load_average: float
    """Of the machine, over a minute, with the load's own processes."""
    rounds: tuple[tuple[Turn, Turn, Turn], ...]
    """Direct, over the gateway, by tritonclient."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--triton", action="store_true", help="start a real Triton with a model of a fixed pace")
    parser.add_argument("--service", type=Path, help="service.json of a running Triton")
    parser.add_argument("--model-folder", type=Path, help="its tokenizer")
    parser.add_argument("--max-tokens", type=int, default=EVENTS)
    parser.add_argument("--rate", type=float, help="requests per second that just keep the server busy")
    parser.add_argument("--load", action="append", help="run only this load (repeatable)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    rows = []
    scripted = args.service is None and not args.triton
    for load in loads(args.max_tokens, args.rate, scripted=scripted, paced=args.triton):
        if args.load and load.name not in args.load:
            continue
        with (
            tempfile.TemporaryDirectory() as scratch,
            triton(Path(scratch)) if args.triton else server(args.service, Path(scratch), load.max_tokens) as service,
            gateway(service.absolute(), args.model_folder, Path(scratch)) as (url, pid),
        ):
            description = json.loads(service.read_text(encoding="utf-8"))
            rows.append(row(description, url, pid, load, args.rounds))
    if args.format == "json":
        print(json.dumps([asdict(each) for each in rows], indent=2))
        return
    print(
        f"{args.rounds} rounds, {'scripted server' if scripted else 'real Triton'}; TTFT in ms; load average {statistics.median(each.load_average for each in rows):.1f}"
    )
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


def loads(max_tokens: int, rate: float | None, *, scripted: bool, paced: bool) -> Iterator[Load]:
    """The measured loads."""
    yield Load("one", FEW_EVENTS if scripted or paced else max_tokens, 100, concurrency=1)
    if rate is None and (scripted or paced):
        rate = STREAMS / (max_tokens * (PACE_S if paced else GAP_S))
    if rate is not None:
        yield Load("steady", max_tokens, round(rate * SECONDS), rate=rate, warmup=WARM)
        yield Load("short", FEW_EVENTS, round(rate * SECONDS), rate=rate, warmup=WARM)
    if paced:
        yield Load("closed", max_tokens, (WAVES + 1) * STREAMS, concurrency=STREAMS, warmup=STREAMS)
    else:
        yield Load("burst", max_tokens, (WAVES + 1) * STREAMS, concurrency=STREAMS)


def parts(long: Row, short: Row) -> tuple[float, float]:
    """CPU time of an event and of a request without its events, in microseconds, from two output lengths."""
    event_us = (long.gateway_cpu_us - short.gateway_cpu_us) / (long.max_tokens - short.max_tokens)
    return event_us, short.gateway_cpu_us - short.max_tokens * event_us


def row(service: Mapping[str, Any], url: str, pid: int, load: Load, rounds: int) -> Row:
    """Rounds of all ways, after a warmup round."""
    rounds_of: list[tuple[Turn, Turn, Turn]] = []
    load_averages: list[float] = []
    grpc = ["-u", service["grpc"], "--protocol", "grpc", "--model", service["model"]]
    openai = ["-u", f"{url}/v1", "--protocol", "openai", "--endpoint-type", "completions", "--model", NAME]
    ways = (
        lambda: turn(service, pid, load, grpc),
        lambda: turn(service, pid, load, openai),
        lambda: by_tritonclient(service, load),
    )
    for number in range(rounds + 1):
        order = range(3) if number % 2 else (2, 1, 0)
        done = {way: ways[way]() for way in order}
        if number:
            rounds_of.append((done[0], done[1], done[2]))
            load_averages.append(os.getloadavg()[0])

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
        middle(load_averages),
        tuple(rounds_of),
    )


def turn(service: Mapping[str, Any], pid: int, load: Load, way: Sequence[str]) -> Turn:
    """One load by `pipeline bench load`."""
    command = [sys.executable, "-m", "trtllm_pipeline", "bench", "load", *way]
    command += ["--requests", str(load.requests), "--max-tokens", str(load.max_tokens), "--format", "json"]
    if load.rate is None:
        command += ["--concurrency", str(load.concurrency)]
    else:
        command += ["--request-rate", str(load.rate)]
    command += ["--warmup-requests", str(load.warmup)]
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
    sent = load.requests + load.warmup
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

    numbers = itertools.count()

    def inputs() -> list[Any]:
        made = []
        for name, kind, value in (
            ("text_input", "BYTES", np.array([[f"{PROMPT} {next(numbers)}".encode()]], dtype=np.object_)),
            ("max_tokens", "INT32", np.array([[load.max_tokens]], dtype=np.int32)),
            ("stream", "BOOL", np.array([[True]])),
        ):
            made.append(InferInput(name, [1, 1], kind))
            made[-1].set_data_from_numpy(value)
        return made

    ttft_ms = []
    async with aio.InferenceServerClient(address) as client:

        async def requests() -> Any:
            yield {"model_name": model, "inputs": inputs(), "enable_empty_final_response": True}

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
def triton(scratch: Path) -> Iterator[Path]:
    """The service.json of a real Triton with `paced_model.py`."""
    folder = scratch / "repository" / MODEL
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(str(scripted_server.config(MODEL, counts=True)), encoding="utf-8")
    shutil.copy(Path(__file__).with_name("paced_model.py"), folder / "1" / "model.py")
    process = triton_server.start(
        triton_installation.find(),
        scratch / "repository",
        (MODEL,),
        folder=scratch / "links",
        log=scratch / "triton.log",
        ports=triton_server.free_ports(),
    )
    try:
        process.wait_ready(120)
        path = scratch / "service.json"
        path.write_text(json.dumps({"schema": 1, **process.service()}), encoding="utf-8")
        yield path
    finally:
        process.stop(3)


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
