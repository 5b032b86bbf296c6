"""What the raw events of a load run mean: every metric, its formula, and whether the numbers may be believed.

`analyze` is a pure function of an event file (`perf/load.py`) and a tokenizer: anything it reports can be computed
again later, or by somebody else.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

from trtllm_pipeline.errors import StageError
from trtllm_pipeline.perf.stats import PERCENTILE_METHOD, percentile, summary

DEFINITIONS: Final = {
    "ttft_ms": "first content - sent",
    "tpot_ms": "(last content - first content) / tokens of the content events after the first, one value a request; "
    "left out when all tokens came in one event",
    "itl_ms": "gap between content events / tokens in the later one, weighted by those tokens, pooled",
    "icl_ms": "gap between content events, pooled",
    "e2e_ms": "last content - sent",
    "n": "output tokens of a request, counted by token_count.source. server: by the server's num_output_tokens; tokens "
    "without text belong to the next content event, and those after the last one count in n alone. encoded_again: the "
    "whole text encoded again without special tokens; a token belongs to the event that brought its last character",
    "token_count": "mismatch = sum over the answers of |server - encoded again| / tokens the server counts",
    "input_tokens": "prompt encoded with the special tokens the tokenizer adds",
    "whole": "first send -> last content of the measured requests; tokens of the successful ones",
    "steady": "longest time with at least 95 % of the wanted requests in flight; tokens by their own time of arrival, "
    "input tokens when the first content arrives; a slot between two requests counts as in flight for up to 5 ms",
    "headline": "steady when it is at least 30 s and half of the whole window, else whole",
    "output_tokens_per_s": "output tokens / seconds of the headline window; median of the repeats",
    "input_tokens_per_s": "input tokens / seconds of the headline window; median of the repeats",
    "requests_per_s": "successful requests / seconds of the headline window; median of the repeats",
    "percentiles": PERCENTILE_METHOD,
}
"""Formula of each figure `analyze` returns. Times are CLOCK_MONOTONIC, read before a response is parsed."""

HANDOVER_NS: Final = 5_000_000
STEADY_SHARE: Final = 0.95
HEADLINE_S: Final = 30.0
MAX_FAILURES: Final = 0.01
MAX_MISMATCH: Final = 0.02
"""More than this share between two counts, or above what was asked for, is told."""
MAX_EXCESS: Final = 0.05
"""More than this share above what was asked for, after encoding again, is not the tokenizer's ambiguity any more."""
MAX_BYTES_PER_TOKEN: Final = 3
"""Encoding again gives at most this many tokens for one: a byte that is no text comes back as U+FFFD, three bytes."""
MAX_CLIENT_CPU: Final = 0.80
MIN_CPU_WINDOW_NS: Final = 1_000_000_000
MARKED_LAG_MS: Final = 5.0
MAX_LAG_MS: Final = 50.0


class Encoding(Protocol):
    """The part of `tokenizers.Encoding` used here."""

    @property
    def ids(self) -> list[int]: ...  # noqa: D102

    @property
    def offsets(self) -> list[tuple[int, int]]: ...  # noqa: D102


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` used here."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Request:
    """One request of an event file with its tokens counted."""

    record: Mapping[str, Any]
    prompt: str
    input_tokens: int
    tokens: tuple[int, ...]
    """New tokens with each content event."""
    output_tokens: int
    """N. More than the sum of `tokens` when some came after the last content event."""
    encoded_again: int
    """Tokens of the whole text, encoded without special tokens."""

    @property
    def sent_ns(self) -> int:
        """When it was sent."""
        return int(self.record["sent_ns"])

    @property
    def times_ns(self) -> list[int]:
        """Arrival of each content event."""
        return [event[0] for event in self.record["events"]]

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(event[1] for event in self.record["events"])

    @property
    def ok(self) -> bool:
        """The server answered without an error."""
        return self.record["error"] is None

    @property
    def answered(self) -> bool:
        """There is text, and there are tokens."""
        return self.ok and bool(self.tokens) and self.output_tokens > 0

    @property
    def measured(self) -> bool:
        """Not part of the warm-up."""
        return bool(self.record["phase"] == "measured")

    @property
    def ttft_ms(self) -> float:
        """First content - sent. Needs content."""
        return (self.times_ns[0] - self.sent_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        """Last content - sent. Needs content."""
        return (self.times_ns[-1] - self.sent_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        """(Last content - first content) / tokens that came in between; None when there are none."""
        later = sum(self.tokens[1:])
        return (self.times_ns[-1] - self.times_ns[0]) / 1e6 / later if later > 0 else None

    def gaps_ms(self) -> list[float]:
        """Time between neighbouring content events."""
        return [(later - earlier) / 1e6 for earlier, later in pairwise(self.times_ns)]

    def itl_ms(self) -> Iterable[float]:
        """Time per token after the first event, one value for each token.

        An event without a token of its own (a character that needed several tokens) lends its gap to the next one.
        """
        waited = 0.0
        for gap, count in zip(self.gaps_ms(), self.tokens[1:], strict=True):
            waited += gap
            if count:
                yield from (waited / count for _ in range(count))
                waited = 0.0


def tokens_by_event(texts: Sequence[str], offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """How many tokens each event brought: a token is there when its last character is.

    `offsets` are the tokens' (start, end) in the joined text, in characters.
    """
    ends = list(accumulate(map(len, texts)))
    counts = Counter(min(bisect_left(ends, end), len(ends) - 1) for _, end in offsets)
    return tuple(counts[index] for index in range(len(ends)))


@dataclass(frozen=True, slots=True)
class Run:
    """One event file, read."""

    header: Mapping[str, Any]
    requests: tuple[Request, ...]
    clients: tuple[Mapping[str, Any], ...]
    server: Mapping[str, Mapping[str, Any]]
    """Record of the server's process by "start" and "end"."""
    counted_by_server: bool

    def levels(self) -> dict[int, dict[int, list[Request]]]:
        """Concurrency -> repeat -> requests, in the order measured."""
        levels: dict[int, dict[int, list[Request]]] = {}
        for request in self.requests:
            repeats = levels.setdefault(request.record["concurrency"], {})
            repeats.setdefault(request.record["repeat"], []).append(request)
        return levels


def read(events: Path, tokenizer: Tokenizer) -> Run:
    """Read an event file and count its tokens: as the server did if it counted every answer, else by encoding again.

    A last line cut off by a crash is left out.

    Raises StageError when it is not an event file of ours.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    lines = events.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line else {"type": ""}
            records.setdefault(record["type"], []).append(record)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise StageError(f"{events}:{number}: not a record of a load run: {error!r}") from error
    if "header" not in records:
        raise StageError(f"{events} is not an event file of a load run: it has no header")
    prompts = {record["id"]: record["text"] for record in records.get("prompt", [])}
    input_tokens = {id_: len(tokenizer.encode(text).ids) for id_, text in prompts.items()}
    asked = records.get("request", [])
    answers = [record for record in asked if record["error"] is None]
    by_server = bool(answers) and all(server_tokens(record) is not None for record in answers)
    requests = []
    for record in asked:
        texts = [event[1] for event in record["events"]]
        offsets = tokenizer.encode("".join(texts), add_special_tokens=False).offsets
        tokens, total = tokens_by_event(texts, offsets), len(offsets)
        if by_server and (counted := server_tokens(record)) is not None:
            tokens, total = counted, record["output_tokens"]
        id_ = record["prompt"]
        requests.append(Request(record, prompts[id_], input_tokens[id_], tokens, total, len(offsets)))
    server = {record["at"]: record for record in records.get("server", [])}
    return Run(records["header"][0], tuple(requests), tuple(records.get("client", [])), server, by_server)


def server_tokens(record: Mapping[str, Any]) -> tuple[int, ...] | None:
    """New tokens with each content event as the server counted them; None unless it counted the whole answer."""
    totals = [event[2] for event in record["events"] if len(event) > 2 and event[2] is not None]
    if record.get("output_tokens") is None or len(totals) < len(record["events"]):
        return None
    return tuple(later - earlier for earlier, later in pairwise([0, *totals]))


def analyze(events: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """All figures of an event file: the content of perf.json."""
    run = read(events, tokenizer)
    findings = [*_server_findings(run), *_client_findings(run)]
    levels = []
    for concurrency, repeats in run.levels().items():
        levels.append(_level(concurrency, repeats))
        requests = [request for one in repeats.values() for request in one]
        findings += _level_findings(concurrency, requests)
        findings += _count_findings(concurrency, requests, by_server=run.counted_by_server)
    return {
        "schema": 1,
        "valid": not any(finding["severity"] == "invalid" for finding in findings),
        "protocol": run.header["protocol"],
        "model": run.header["model"],
        "settings": run.header["settings"],
        "levels": levels,
        "findings": findings,
        "token_count": _token_count(run),
        "client": {"transport": "one asyncio process", "levels": [_client(record) for record in run.clients]},
        "definitions": dict(DEFINITIONS),
    }


def _token_count(run: Run) -> dict[str, Any]:
    """Who counted the output tokens of the measured answers, and what the other count says."""
    answers = [request for request in run.requests if request.measured and request.ok]
    server = sum(request.output_tokens for request in answers) if run.counted_by_server else None
    return {
        "source": "server" if run.counted_by_server else "encoded_again",
        "server": server,
        "encoded_again": sum(request.encoded_again for request in answers),
        "mismatch": None if not server else round(_mismatch(answers) / server, 6),
    }


def _mismatch(requests: Iterable[Request]) -> int:
    return sum(abs(request.output_tokens - request.encoded_again) for request in requests)


def _level(concurrency: int, repeats: Mapping[int, Sequence[Request]]) -> dict[str, Any]:
    windows: list[dict[str, Any]] = []
    for repeat, requests in repeats.items():
        whole, steady = _whole(requests), _steady(requests, concurrency)
        windows.append({"repeat": repeat, "whole": whole, "steady": steady})
    name, reason = _headline(windows)
    chosen = [window[name] for window in windows]
    measured = [request for requests in repeats.values() for request in requests if request.measured]
    good = [request for request in measured if request.answered]
    at_limit = sum(request.output_tokens >= request.record["max_tokens"] for request in good)
    return {
        "concurrency": concurrency,
        "requests": len(measured),
        "failures": sum(not request.ok for request in measured),
        "headline": {"window": name, "reason": reason},
        **{
            key: round(sum(window[key] for window in chosen), 3)
            for key in ("duration_s", "input_tokens", "output_tokens")
        },
        **{
            key: round(median(window[key] for window in chosen), 3)
            for key in ("input_tokens_per_s", "output_tokens_per_s", "requests_per_s")
        },
        "ttft_ms": summary(request.ttft_ms for request in good),
        "tpot_ms": summary(tpot for request in good if (tpot := request.tpot_ms) is not None),
        "itl_ms": summary(value for request in good for value in request.itl_ms()),
        "icl_ms": summary(value for request in good for value in request.gaps_ms()),
        "e2e_ms": summary(request.e2e_ms for request in good),
        "input_tokens_per_request": summary(request.input_tokens for request in good),
        "output_tokens_per_request": summary(request.output_tokens for request in good),
        "answers_at_limit": at_limit,
        "tokens_per_event": round(
            sum(sum(request.tokens) for request in good) / max(1, sum(len(request.tokens) for request in good)), 3
        ),
        "repeats": windows,
    }


def _window(start_ns: int, end_ns: int, *, input_tokens: int, output_tokens: int, requests: int) -> dict[str, Any]:
    duration_s = (end_ns - start_ns) / 1e9
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {
        "duration_s": round(duration_s, 6),
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests": requests,
        "input_tokens_per_s": round(input_tokens * per_s, 3),
        "output_tokens_per_s": round(output_tokens * per_s, 3),
        "requests_per_s": round(requests * per_s, 3),
    }


def _whole(requests: Sequence[Request]) -> dict[str, Any]:
    """First send to last content of the measured requests."""
    measured = [request for request in requests if request.measured]
    good = [request for request in measured if request.answered]
    start_ns = min((request.sent_ns for request in measured), default=0)
    return _window(
        start_ns,
        max((request.times_ns[-1] for request in good), default=start_ns),
        input_tokens=sum(request.input_tokens for request in good),
        output_tokens=sum(request.output_tokens for request in good),
        requests=len(good),
    )


def steady_window(
    slots: Iterable[Iterable[tuple[int, int]]], *, concurrency: int, not_before_ns: int
) -> tuple[int, int] | None:
    """Longest time in which at least 95 % of `concurrency` slots were busy, as (start, end) in ns; None without one.

    `slots` gives each slot's (sent, ended) times in order. The short time a slot needs to send its next request
    counts as busy, or every request would end the window.
    """
    changes: list[tuple[int, int]] = []
    for spans in slots:
        busy: list[list[int]] = []
        for start_ns, end_ns in spans:
            if busy and start_ns - busy[-1][1] <= HANDOVER_NS:
                busy[-1][1] = end_ns
            else:
                busy.append([start_ns, end_ns])
        for start_ns, end_ns in busy:
            changes += [(max(start_ns, not_before_ns), 1), (max(end_ns, not_before_ns), -1)]
    wanted = math.ceil(STEADY_SHARE * concurrency)
    best: tuple[int, int] | None = None
    level, since_ns = 0, 0
    for now_ns, change in sorted(changes):
        before, level = level, level + change
        if before < wanted <= level:
            since_ns = now_ns
        elif level < wanted <= before and (best is None or now_ns - since_ns > best[1] - best[0]):
            best = (since_ns, now_ns)
    return best if best is not None and best[1] > best[0] else None


def _steady(requests: Sequence[Request], concurrency: int) -> dict[str, Any] | None:
    slots: dict[int, list[tuple[int, int]]] = {}
    for request in requests:
        slots.setdefault(request.record["slot"], []).append((request.sent_ns, request.record["end_ns"]))
    start_ns = min((request.sent_ns for request in requests if request.measured), default=0)
    window = steady_window(slots.values(), concurrency=concurrency, not_before_ns=start_ns)
    if window is None:
        return None
    start_ns, end_ns = window
    good = [request for request in requests if request.answered]
    return _window(
        start_ns,
        end_ns,
        input_tokens=sum(request.input_tokens for request in good if start_ns < request.times_ns[0] <= end_ns),
        output_tokens=sum(
            count
            for request in good
            for time_ns, count in zip(request.times_ns, request.tokens, strict=True)
            if start_ns < time_ns <= end_ns
        ),
        requests=sum(start_ns < request.times_ns[-1] <= end_ns for request in good),
    )


def _headline(windows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Which window the level's figures are of, and why."""
    for window in windows:
        if window["steady"] is None:
            return "whole", "there is no steady window: the requests in flight never reached the wanted number"
        steady_s, whole_s = window["steady"]["duration_s"], window["whole"]["duration_s"]
        if steady_s < HEADLINE_S:
            return "whole", f"the steady window is {steady_s:.1f} s, less than {HEADLINE_S:g} s: ramp and tail are in"
        if steady_s < whole_s / 2:
            return "whole", f"the steady window is {steady_s:.1f} s, less than half of {whole_s:.1f} s"
    return "steady", "every repeat has a steady window that is long enough"


def _finding(severity: str, check: str, message: str, concurrency: int | None = None) -> dict[str, Any]:
    return {"severity": severity, "check": check, "concurrency": concurrency, "message": message}


def _level_findings(concurrency: int, requests: Sequence[Request]) -> Iterable[dict[str, Any]]:
    """The validity gate for one level, all repeats together; "invalid" ones make the run's numbers unusable."""
    measured = [request for request in requests if request.measured]
    good = [request for request in measured if request.ok]
    failed = len(measured) - len(good)
    if failed:
        causes = Counter(request.record["error"] for request in measured if not request.ok)
        cause, times = causes.most_common(1)[0]
        severity = "invalid" if failed > MAX_FAILURES * len(measured) else "warning"
        message = f"{failed} of {len(measured)} requests failed, {times} of them with: {cause}"
        yield _finding(severity, "failures", message, concurrency)
    empty = [request for request in good if not request.answered]
    if empty:
        what = "have text but no tokens" if all(request.text for request in empty) else "are empty"
        message = f"{len(empty)} of {len(good)} answers {what}, the first to prompt {empty[0].record['prompt']!r}"
        yield _finding("invalid", "empty_answers", message, concurrency)
    echoed = [request for request in good if request.text.lstrip().startswith(request.prompt.strip())]
    if echoed:
        message = f"{len(echoed)} of {len(good)} answers begin with their prompt, which would count as output"
        yield _finding("invalid", "prompt_echo", message, concurrency)
    warmup = {request.record["prompt"] for request in requests if not request.measured}
    shared = warmup & {request.record["prompt"] for request in measured}
    if shared:
        message = f"the warm-up used prompts that were measured as well: {', '.join(sorted(shared)[:3])}"
        yield _finding("warning", "warmup", message, concurrency)
    most = Counter((request.record["prompt"], request.record["repeat"]) for request in measured).most_common(1)
    if most and most[0][1] > 1:
        message = f"prompts were sent up to {most[0][1]} times; a server that keeps their KV cache is flattered"
        yield _finding("info", "repeated_prompts", message, concurrency)


def _count_findings(concurrency: int, requests: Sequence[Request], *, by_server: bool) -> Iterable[dict[str, Any]]:
    """Can the token counts be right? What tokenizers do is a warning, what nothing explains is invalid."""
    good = [request for request in requests if request.measured and request.answered]
    total = sum(request.output_tokens for request in good)
    over = [request for request in good if request.output_tokens > request.record["max_tokens"]]
    if not by_server:
        uncounted = [request for request in requests if request.ok and server_tokens(request.record) is None]
        if len(uncounted) < sum(request.ok for request in requests):
            message = f"the server counted the tokens of some answers, not of {len(uncounted)}; all are encoded again"
            yield _finding("warning", "token_count", message, concurrency)
        excess = sum(request.output_tokens - request.record["max_tokens"] for request in over)
        if excess > MAX_MISMATCH * total:
            message = f"{excess} of {total} output tokens, by encoding the answers again, are more than was asked for"
            if excess <= MAX_EXCESS * total:
                yield _finding("warning", "token_count", message, concurrency)
            else:
                yield _finding("invalid", "token_count", f"{message}: is this the right tokenizer?", concurrency)
        return
    if over:
        worst = max(over, key=lambda request: request.output_tokens - request.record["max_tokens"])
        message = (
            f"the server counts more tokens than were asked for in {len(over)} of {len(good)} answers, for prompt "
            f"{worst.record['prompt']!r} {worst.output_tokens} of {worst.record['max_tokens']}"
        )
        yield _finding("invalid", "token_count", message, concurrency)
    backwards = [request for request in good if min(*request.tokens, request.output_tokens - sum(request.tokens)) < 0]
    if backwards:
        message = f"the server's token count goes back within {len(backwards)} of {len(good)} answers"
        yield _finding("invalid", "token_count", message, concurrency)
    encoded, mismatch = sum(request.encoded_again for request in good), _mismatch(good)
    if encoded > MAX_BYTES_PER_TOKEN * total:
        message = f"the server counts {total} output tokens where encoding the answers again gives {encoded}"
        yield _finding("invalid", "token_count", message, concurrency)
    elif mismatch > MAX_MISMATCH * total:
        message = (
            f"the server counts {total} output tokens, encoding the answers again gives {encoded}; answer by answer "
            f"they differ by {mismatch / total:.1%}. The server's count is used"
        )
        yield _finding("warning", "token_count", message, concurrency)


def _server_findings(run: Run) -> Iterable[dict[str, Any]]:
    start, end = run.server.get("start"), run.server.get("end")
    if start is None or end is None:
        yield _finding("invalid", "server", "the run was interrupted: the server was not looked at after it")
        return
    if start["pid"] is None:
        yield _finding("info", "server", "the server's process is not known here; that it stayed the same is unchecked")
    elif end["since"] is None or (start["pid"], start["since"]) != (end["pid"], end["since"]):
        yield _finding("invalid", "server", f"the server's process {start['pid']} did not live through the run")
    if not end["ready"]:
        yield _finding("invalid", "server", "the server was not ready after the run")


def _client(record: Mapping[str, Any]) -> dict[str, Any]:
    lag_ms = sorted(value / 1e6 for value in record["lag_ns"])
    return {
        "concurrency": record["concurrency"],
        "repeat": record["repeat"],
        "cpu_share": round(record["cpu_ns"] / max(1, record["wall_ns"]), 3),
        "loop_lag_ms": summary(lag_ms),
    }


def _client_findings(run: Run) -> Iterable[dict[str, Any]]:
    """Was the client itself in the way?"""
    for record in run.clients:
        cpu = record["cpu_ns"] / max(1, record["wall_ns"])
        if cpu > MAX_CLIENT_CPU:
            # A share of a few milliseconds says little: a fast answer to a short question is mostly the client's work.
            severity = "invalid" if record["wall_ns"] >= MIN_CPU_WINDOW_NS else "warning"
            message = f"the client used {cpu:.0%} of a core; beyond {MAX_CLIENT_CPU:.0%} it measures itself"
            yield _finding(severity, "client_cpu", message, record["concurrency"])
        lag_ms = percentile(sorted(record["lag_ns"]), 0.99) / 1e6 if record["lag_ns"] else 0.0
        if lag_ms > MARKED_LAG_MS:
            severity = "invalid" if lag_ms > MAX_LAG_MS else "warning"
            message = f"the client's event loop was up to {lag_ms:.1f} ms late (p99), so times may be too long by that"
            yield _finding(severity, "client_lag", message, record["concurrency"])
