"""What the gateway adds to asking Triton over gRPC directly: time to first token, throughput, processor time.

    python benchmarks/gateway.py [--rounds 5] [--service service.json --model-folder DIR] [--format json]

The load client is `pipeline bench load` both times, over gRPC at the server and over OpenAI's protocol at a gateway
in front of it; it stamps bytes as they arrive. The two take turns within each round, so that other work on the machine hits
both, and figures are medians of rounds.

    ttft added      time to first token over the gateway less the direct one, at 1 stream and at 64, as p50 and p99.
                    At 64 all requests of a turn come at the same moment, as a load client sends them.
    throughput      output tokens per second over the gateway, as a share of the direct ones, at 64 streams
    cpu             processor time of the gateway's process, of an event, and as a share of what the server's processes
                    use for the same work

Without --service the server is `bench/scripted_server.py`, which sends each stream 20 events a second and computes nothing:
the worst case for shares of processor time. With --service it is a real Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

STREAMS: Final = (1, 64)
EVENTS: Final = 40
FEW_EVENTS: Final = 2
"""At 1 stream, where only the first one is of interest."""
NAME: Final = "measured"


@dataclass(frozen=True, slots=True)
class Turn:
    """One load, over one way."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_s: float
    tokens: int
    gateway_cpu_s: float
    server_cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """What the gateway adds at a number of streams: medians of rounds."""

    streams: int
    ttft_p50_added_ms: float
    ttft_p99_added_ms: float
    throughput_share: float
    cpu_us_per_event: float
    cpu_share_of_server: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--service", type=Path, help="service.json of a running Triton")
    parser.add_argument("--model-folder", type=Path, help="its tokenizer")
    parser.add_argument("--max-tokens", type=int, default=EVENTS)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    rows = []
    for streams in STREAMS:
        tokens = args.max_tokens if streams > 1 or args.service else FEW_EVENTS
        with tempfile.TemporaryDirectory() as scratch, server(args.service, Path(scratch), tokens) as service:
            told = json.loads(service.read_text(encoding="utf-8"))
            with gateway(service.absolute(), args.model_folder, Path(scratch)) as (url, pid):
                rows.append(row(told, url, pid, streams, args.rounds, tokens))
    if args.format == "json":
        print(json.dumps([asdict(each) for each in rows], indent=2))
        return
    print(f"{args.rounds} rounds, {'scripted server' if args.service is None else 'real Triton'}")
    print(f"{'streams':>8}{'TTFT added ms':>22}{'throughput':>12}{'CPU of the gateway':>28}")
    print(f"{'':>8}{'p50':>11}{'p99':>11}{'share':>12}{'µs/event':>14}{'of server':>14}")
    for each in rows:
        print(
            f"{each.streams:>8}{each.ttft_p50_added_ms:>11.2f}{each.ttft_p99_added_ms:>11.2f}{each.throughput_share:>12.3f}"
            f"{each.cpu_us_per_event:>14.0f}{each.cpu_share_of_server:>14.1%}"
        )


def row(told: Mapping[str, Any], url: str, pid: int, streams: int, rounds: int, max_tokens: int) -> Row:
    """Rounds of both ways; a round before them warms both up."""
    pairs = []
    for number in range(rounds + 1):
        direct = turn(
            told, pid, streams, max_tokens, ["-u", told["grpc"], "--protocol", "grpc", "--model", told["model"]]
        )
        over = turn(
            told,
            pid,
            streams,
            max_tokens,
            ["-u", f"{url}/v1", "--protocol", "openai", "--endpoint-type", "completions", "--model", NAME],
        )
        if number:
            pairs.append((direct, over))

    def middle(values: Sequence[float]) -> float:
        return statistics.median(values)

    return Row(
        streams,
        middle([over.ttft_p50_ms - direct.ttft_p50_ms for direct, over in pairs]),
        middle([over.ttft_p99_ms - direct.ttft_p99_ms for direct, over in pairs]),
        middle([over.tokens_per_s / direct.tokens_per_s for direct, over in pairs]),
        middle([over.gateway_cpu_s / over.tokens * 1e6 for _, over in pairs]),
        middle([over.gateway_cpu_s / over.server_cpu_s for _, over in pairs]),
    )


def turn(told: Mapping[str, Any], pid: int, streams: int, max_tokens: int, way: Sequence[str]) -> Turn:
    """One load."""
    requests = max(20, 2 * streams)
    before = cpu_s(pid), cpu_s(told["pid"])
    command = [sys.executable, "-m", "trtllm_pipeline", "bench", "load", *way]
    command += ["--concurrency", str(streams), "--requests", str(requests), "--warmup-requests", "0"]
    command += ["--max-tokens", str(max_tokens), "--format", "json"]
    with tempfile.TemporaryDirectory() as folder:  # of the event file
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        sys.exit(done.stderr)
    (level,) = json.loads(done.stdout)["levels"]
    after = cpu_s(pid), cpu_s(told["pid"])
    return Turn(
        level["ttft_ms"]["p50"],
        level["ttft_ms"]["p99"],
        level["output_tokens_per_s"],
        requests * max_tokens,
        after[0] - before[0],
        after[1] - before[1],
    )


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
    command = [sys.executable, "-m", "trtllm_pipeline.bench.scripted_server", str(scratch / "log")]
    with subprocess.Popen(
        [*command, "first_ms=50", "gap_ms=50", f"events={events}"],
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
    command = [sys.executable, "-m", "trtllm_pipeline", "gateway", f"{NAME}={service}", "--format", "json"]
    if model_folder is not None:
        command += ["--model-folder", f"{NAME}={model_folder}"]
    with subprocess.Popen([*command, "--temperature", "0"], stdout=subprocess.PIPE, text=True, cwd=scratch) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            yield told["url"], told["pid"]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
