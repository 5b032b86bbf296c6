"""Self-test of the load client: its errors against a scripted server in another process, which records what it sent.

The error of a time is what the client wrote down minus what the server noted just before it handed the bytes to the
network: the client's delay and one pass through the loopback, not the server's own lateness. The result is kept for a
day for this machine and this version, so that a run does not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.bench import workers
from trtllm_pipeline.bench.load import EventFile, Level, run_level
from trtllm_pipeline.bench.prompts import Prompt
from trtllm_pipeline.bench.stats import percentile, summary
from trtllm_pipeline.bench.target import OPENAI, Target
from trtllm_pipeline.client.service import Service
from trtllm_pipeline.client.triton import STREAMING
from trtllm_pipeline.errors import ServerError
from trtllm_pipeline.files.writing import read_object, write_json
from trtllm_pipeline.machine.model import cpu_name

TARGET_P50_MS: Final = 0.2
TARGET_P99_MS: Final = 1.0
KEPT_S: Final = 24 * 3600.0
EVENTS_PER_S: Final = 20
PROTOCOLS: Final = (*sorted(STREAMING), *(name for name, (_, stream) in OPENAI.items() if stream))
"""Those that can be tested: an answer that comes in one piece has no timeline."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is tested: streams at once, and the events of each, EVENTS_PER_S a second."""

    streams: int
    events: int


FULL: Final = Size(256, 40)
QUICK: Final = Size(32, 10)

DEFINITIONS: Final = {
    "ttft_error_ms": "client's time of the first content - the server's time just before it sent it",
    "event_error_ms": "the same for every event",
    "gap_error_ms": "gap between two events by the client - by the server, without sign",
    "read_late_ms": "longest that bytes of an answer waited to be read, one value an answer; in its times only "
    "where events came together",
    "server_late_ms": "server's time of sending - the time scheduled: its own lateness, in no error",
    "cpu_us_per_event": "processor time of the client / events received",
}


def run(protocol: str, size: Size = FULL, *, processes: int | None = None) -> dict[str, Any]:
    """Test the client over `protocol`: its errors in milliseconds, and whether it recognised each scripted fault.

    Takes events / EVENTS_PER_S seconds and about one more. Raises ServerError when the scripted server does not start.
    """
    draw = random.Random(1)  # noqa: S311 - not a secret
    gap_ms = 1e3 / EVENTS_PER_S
    with tempfile.TemporaryDirectory(prefix="pipeline-self-test-") as folder:
        events, log = Path(folder) / "events.jsonl", Path(folder) / "log"
        timed = tuple(
            # Each stream has its own phase, as users do; all at once would be a test of the server.
            _prompt(number, first_ms=50 + draw.random() * gap_ms, gap_ms=gap_ms, events=size.events)
            for number in range(size.streams)
        )
        tricks = tuple(
            _prompt(name, **{"first_ms": 20, "gap_ms": 10, "events": 6, **asked})
            for name, (asked, _) in _TRICKS.items()
        )
        with server(log) as service, EventFile(events) as file:
            target = Target(protocol, service, "ensemble", 30.0, size.events)
            asyncio.run(_load(target, Level(size.streams, 0, (), timed), file, processes))
            asyncio.run(_load(target, Level(len(tricks), 1, (), tricks), file, 1))
        truth = {record["prompt"]: record for record in map(json.loads, log.read_text().splitlines())}
        records = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    requests = [record for record in records if record["type"] == "request" and record["repeat"] == 0]
    tried = {record["prompt"]: record for record in records if record["type"] == "request" and record["repeat"] == 1}
    clients = [record for record in records if record["type"] == "client" and record["repeat"] == 0]
    texts = {prompt.id: prompt.text for prompt in (*timed, *tricks)}
    return {
        **_identity(protocol, size),
        "at": int(time.time()),
        **_errors(requests, {id_: truth[text] for id_, text in texts.items()}),
        "cpu_us_per_event": round(
            sum(record["cpu_ns"] for record in clients)
            / 1e3
            / max(1, sum(len(record["events"]) for record in requests)),
            1,
        ),
        "processes": len(clients),
        "checks": {name: seen(tried[name], truth[texts[name]]["sent_ns"]) for name, (_, seen) in _TRICKS.items()},
    }


def _seen_whole(record: Mapping[str, Any], sent_ns: Sequence[int]) -> bool:
    """All of a timeline was seen, each event at its time."""
    times_ns, text = [event[0] for event in record["events"]], "".join(event[1] for event in record["events"])
    if record["error"] is not None or text != " word" * 6 or len(times_ns) != len(sent_ns):
        return False
    return all(-1 <= (got - sent) / 1e6 <= 5 for got, sent in zip(times_ns, sent_ns, strict=True))


def _seen_stall(record: Mapping[str, Any], sent_ns: Sequence[int]) -> bool:
    return _seen_whole(record, sent_ns) and record["events"][-1][0] - record["events"][-2][0] > 140e6


_TRICKS: Final[Mapping[str, tuple[Mapping[str, Any], Callable[[Mapping[str, Any], Sequence[int]], bool]]]] = {
    "known TTFT and gaps": ({}, _seen_whole),
    "merged events": ({"merge": 3}, _seen_whole),
    "cut events": ({"cut": True}, _seen_whole),
    "stall": ({"stall_ms": 150}, _seen_stall),
    "error": (
        {"error": "scripted failure"},
        lambda record, _: "scripted failure" in (record["error"] or "") and len(record["events"]) == 6,
    ),
    "lie: no content": ({"events": 0}, lambda record, _: not record["events"]),
    "lie: broken off": ({"drop": True}, lambda record, _: record["error"] is not None),
}
"""What the server does, and whether a request's record, held against the times of sending, shows that it was seen."""


def _prompt(name: object, **asked: Any) -> Prompt:
    return Prompt(str(name), json.dumps({"name": str(name), **asked}))


def _errors(requests: Sequence[Mapping[str, Any]], truth: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The client's errors, and how much of them is allowed."""
    first, every, gaps, server_late = [], [], [], []
    failed = 0
    for record in requests:
        sent_ns = truth[record["prompt"]]["sent_ns"]
        times_ns = [event[0] for event in record["events"]]
        if record["error"] is not None or len(times_ns) != len(sent_ns):
            failed += 1
            continue
        errors = [(got - sent) / 1e6 for got, sent in zip(times_ns, sent_ns, strict=True)]
        first.append(errors[0])
        every += errors
        gaps += [abs(later - earlier) for earlier, later in pairwise(errors)]
        server_late += truth[record["prompt"]]["late_ms"]
    passed = bool(first) and not failed
    if passed:
        ordered = sorted(first)
        passed = percentile(ordered, 0.5) <= TARGET_P50_MS and percentile(ordered, 0.99) <= TARGET_P99_MS
    return {
        "pass": passed,
        "failed_requests": failed,
        "ttft_error_ms": summary(first, digits=4),
        "event_error_ms": summary(every, digits=4),
        "gap_error_ms": summary(gaps, digits=4),
        "read_late_ms": summary((record["late_ns"] / 1e6 for record in requests), digits=4),
        "server_late_ms": summary(server_late, digits=3),
    }


async def _load(target: Target, level: Level, events: EventFile, processes: int | None) -> None:
    count = workers.wanted(level) if processes is None else processes
    if count > 1:
        await workers.run(target, level, events.path, lambda: None, workers=count)
        return
    async with target.client() as client:
        await run_level(client, level, target.generation, events, lambda: None)


@contextmanager
def server(log: Path, *timeline: str) -> Iterator[Service]:
    """A scripted server in a process of its own; what it did is in `log` afterwards, a JSON object a request.

    `timeline` is what it does unless a prompt says otherwise, such as `first_ms=20`, `gap_ms=5`, `events=6`.
    """
    command = [sys.executable, "-m", "trtllm_pipeline.bench.scripted_server", str(log), *timeline]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ServerError("the scripted server did not start, see above")
            raw = json.loads(line)
            yield Service(raw["http"], raw["grpc"], None, raw["pid"], raw["model"], None)
            process.communicate("", timeout=10)
        finally:
            process.kill()


def _identity(protocol: str, size: Size) -> dict[str, Any]:
    """What a result is good for."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.node()}, {cpu_name()}, {os.cpu_count()} CPUs",
        "protocol": protocol,
        "streams": size.streams,
        "events": size.events,
        "events_per_s": size.streams * EVENTS_PER_S,
    }


def recent(protocol: str) -> dict[str, Any] | None:
    """A quick result for the streaming form of `protocol`: today's, or else a new one. None when it cannot be tested."""
    streamed = protocol.removesuffix("_unary")
    identity = _identity(streamed, QUICK)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtllm-pipeline"
    path = cache / f"self-test-{streamed}.json"
    kept = read_object(path) or {}
    at = kept.get("at")
    fresh = isinstance(at, (int, float)) and 0 <= time.time() - at < KEPT_S
    if fresh and {key: kept.get(key) for key in identity} == identity:
        return kept
    try:
        result = run(streamed, QUICK)
    except (ServerError, OSError):
        return None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
    return result


def line(result: Mapping[str, Any]) -> str:
    """A result in one line for people."""
    first = result["ttft_error_ms"]
    missed = [name for name, seen in result["checks"].items() if not seen]
    return (
        f"client error over {result['protocol']} at {result['streams']} streams, {result['events_per_s']} events/s: TTFT "
        f"p50 {first['p50']} ms, p99 {first['p99']} ms; {result['cpu_us_per_event']} µs of processor time an event"
        + (f"; did not see: {', '.join(missed)}" if missed else "")
    )
