"""Requests of a load run with counted output tokens: the input of metrics and gates."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.measure.load.events import (
    ClientRecord,
    GaugesRecord,
    GpuRecord,
    Records,
    RequestRecord,
    SpeculationRecord,
    TritonRecord,
    level_of,
    read_records,
)
from trtllm_pipeline.measure.load.windows import Span, spans

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BURST_MS: Final = 0.1
"""Events closer together were buffered and arrived as one."""
BURST_SHARE: Final = 0.01
"""Share of e2e. A response whose events all arrived within it, and closer together than BURST_MS, arrived at once."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of an event file, with its tokens counted."""

    record: RequestRecord
    prompt: str
    """Its text as sent."""
    input_tokens: int | None
    """None without a tokenizer, unless the server counts."""
    tokens: tuple[int, ...]
    """New tokens in each content event."""
    output_tokens: int
    """N. It exceeds the sum of `tokens` if some arrived after the last content event."""
    encoded_again: int
    """Tokens of the whole text, encoded without special tokens."""

    @property
    def sent_ns(self) -> int:
        return int(self.record["sent_ns"])

    @property
    def times_ns(self) -> list[int]:
        return [event.time_ns for event in self.record["events"]]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.record["events"])

    @property
    def ok(self) -> bool:
        return self.record["error"] is None

    @property
    def answered(self) -> bool:
        """True if it has text and at least one token."""
        return self.ok and bool(self.tokens) and self.output_tokens > 0

    @property
    def counted_by_server(self) -> bool:
        """True if the server counted all output tokens."""
        return server_total(self.record) is not None

    @property
    def measured(self) -> bool:
        """True if it is not part of the warmup."""
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
    def streamed(self) -> bool:
        """True if its text arrived bit by bit. False for one event, and for several that arrived at once, as from a proxy
        that buffers.
        """
        times_ns = self.times_ns
        span_ms = (times_ns[-1] - times_ns[0]) / 1e6
        return span_ms > min(BURST_SHARE * self.e2e_ms, BURST_MS * (len(times_ns) - 1))

    @property
    def one_token(self) -> bool:
        """True if its text is one token, so there is no time between tokens. Some servers also count the end token."""
        return self.output_tokens - ended_itself(self.record) <= 1

    @property
    def tpot_ms(self) -> float | None:
        """(Last content - first content) / tokens in between. None without any, or if not streamed."""
        later = sum(self.tokens[1:])
        return (self.times_ns[-1] - self.times_ns[0]) / 1e6 / later if later > 0 and self.streamed else None

    @property
    def ttfa_ms(self) -> float | None:
        """First content that is not reasoning - sent. None for output without reasoning, or with only reasoning."""
        thought = [event.reasoning for event in self.record["events"]]
        if not any(thought) or all(thought):
            return None
        return (self.times_ns[thought.index(False)] - self.sent_ns) / 1e6

    @property
    def connect_ms(self) -> float | None:
        """Connected - scheduled. None if the connection was already open."""
        connected_ns = self.record.get("connected_ns")
        return None if not connected_ns else (connected_ns - self.record["scheduled_ns"]) / 1e6

    @property
    def lag_ms(self) -> float:
        """Sent - scheduled."""
        return (self.sent_ns - int(self.record["scheduled_ns"])) / 1e6

    @property
    def held_ms(self) -> float:
        """The part of `lag_ms` spent waiting for a place in flight."""
        return int(self.record.get("held_ns", 0)) / 1e6

    def met(self, objectives: Mapping[str, float]) -> bool:
        """True if it met every objective (ms by "ttft", "tpot", "e2e"). No TPOT meets none, unless it is one token."""
        if not self.answered:
            return False
        waited = self.lag_ms if self.record.get("request_rate") is not None else 0.0
        times: dict[str, float | None] = {
            "ttft": self.ttft_ms + waited,
            "tpot": 0.0 if self.one_token else self.tpot_ms,
            "e2e": self.e2e_ms + waited,
        }
        return all((took := times[name]) is not None and took <= limit for name, limit in objectives.items())

    def gaps_ms(self) -> list[float]:
        """Time between consecutive content events. Empty if not streamed."""
        return [(later - earlier) / 1e6 for earlier, later in pairwise(self.times_ns)] if self.streamed else []

    def itl_ms(self) -> Iterable[float]:
        """Time per token after the first event, one value per token.

        The gap before an event without a token (a character that needed several tokens) is added to the next event.
        """
        waited = 0.0
        for gap, count in zip(self.gaps_ms(), self.tokens[1:] if self.streamed else (), strict=True):
            waited += gap
            if count:
                yield from (waited / count for _ in range(count))
                waited = 0.0


def tokens_by_event(texts: Sequence[str], offsets: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Number of tokens of each event. A token belongs to the event with its last character.

    `offsets` are the tokens' (start, end) in the joined text, in characters.
    """
    ends = list(accumulate(map(len, texts)))
    counts = Counter(min(bisect_left(ends, end), len(ends) - 1) for _, end in offsets)
    return tuple(counts[index] for index in range(len(ends)))


@dataclass(frozen=True)
class LevelRun:
    """Observations at one concurrency (closed loop) or request rate (open loop). The other one is None."""

    concurrency: int | None
    request_rate: float | None
    repeats: Mapping[int, list[TimedRequest]]
    """Requests of each repeat, warmup included."""
    clients: Sequence[ClientRecord]
    triton: Sequence[TritonRecord]
    gpus: Sequence[GpuRecord]
    speculation: Sequence[SpeculationRecord] = ()
    gauges: Sequence[GaugesRecord] = ()
    unsent: int = 0
    """Due requests of an open loop that were never sent."""
    over_budget: int = 0
    """Requests that were not sent because the level's time limit was over."""

    @cached_property
    def requests(self) -> list[TimedRequest]:
        """Requests of all repeats, warmup included."""
        return [request for requests in self.repeats.values() for request in requests]

    @cached_property
    def measured(self) -> list[TimedRequest]:
        """Without the warmup."""
        return [request for request in self.requests if request.measured]

    @cached_property
    def ok(self) -> list[TimedRequest]:
        """Measured, without an error."""
        return [request for request in self.measured if request.ok]

    @cached_property
    def answered(self) -> list[TimedRequest]:
        """Measured, with text and tokens."""
        return [request for request in self.measured if request.answered]

    @cached_property
    def spans(self) -> Mapping[int, Mapping[str, Span | None]]:
        """The windows of each repeat by name, see `windows.spans`."""
        return {repeat: spans(requests, self.concurrency) for repeat, requests in self.repeats.items()}

    def window(self, repeat: int) -> Span | None:
        """The steady window of a repeat, or the whole one if it has none."""
        spans = self.spans[repeat]
        return spans["steady"] or spans["whole"]

    @cached_property
    def saturated_rps(self) -> float | None:
        """Requests completed per second while `max_in_flight` were in flight and others waited. None if few waited."""
        if not self.unsent and sum(request.held_ms > 0 for request in self.measured) <= len(self.measured) / 2:
            return None
        rates = []
        for repeat in self.repeats.values():
            waited = [request.sent_ns for request in repeat if request.held_ms]
            if len(waited) > 1:
                start_ns, end_ns = min(waited), max(waited)
                answered = sum(start_ns < request.times_ns[-1] <= end_ns for request in repeat if request.answered)
                rates.append(answered * 1e9 / (end_ns - start_ns))
        return round(median(rates), 3) if rates else None


@dataclass(frozen=True)
class LoadRun:
    """An event file with counted output tokens."""

    records: Records
    requests: tuple[TimedRequest, ...]
    counted_by_server: bool
    special_tokens: int | None
    """Number of tokens that the tokenizer adds to a text. None without a tokenizer."""

    @cached_property
    def levels(self) -> tuple[LevelRun, ...]:
        """The requested levels, in measuring order."""
        probed = {level_of(each) for each in self.records.probed}
        return tuple(each for each in self._all_levels if (each.concurrency, each.request_rate) not in probed)

    @cached_property
    def probes(self) -> tuple[LevelRun, ...]:
        """Levels that a search tried."""
        return tuple(each for each in self._all_levels if each not in self.levels)

    @cached_property
    def _all_levels(self) -> tuple[LevelRun, ...]:
        levels: dict[tuple[int | None, float | None], dict[int, list[TimedRequest]]] = {}
        for request in self.requests:
            repeats = levels.setdefault(level_of(request.record), {})
            repeats.setdefault(request.record["repeat"], []).append(request)
        recorded = self.records
        return tuple(
            LevelRun(
                *level,
                repeats,
                [each for each in recorded.clients if level_of(each) == level],
                [each for each in recorded.triton if level_of(each) == level],
                [each for each in recorded.gpus if level_of(each) == level],
                [each for each in recorded.speculation if level_of(each) == level],
                [each for each in recorded.gauges if level_of(each) == level],
                sum(each["requests"] for each in recorded.unsent if level_of(each) == level),
                sum(each["requests"] for each in recorded.over_budget if level_of(each) == level),
            )
            for level, repeats in levels.items()
        )


def read_run(events: Path, tokenizer: Tokenizer | None, text: bytes | None = None) -> LoadRun:
    """Read an event file, or `text` as a part of it, and count output tokens: by the server's counts if all responses have
    one, else by encoding again.

    Raises StageError for an invalid event file, or one with impossible records.
    """
    records = read_records(events, text)
    prompts, records_of_requests = records.prompts, records.requests
    answers = [record for record in records_of_requests if record["error"] is None]
    by_server = bool(answers) and all(server_total(record) is not None for record in answers)
    input_tokens: dict[str, int] = {}
    if tokenizer is not None:
        sent = dict.fromkeys(record["prompt"] for record in records_of_requests)
        plain = [prompts[id_] for id_ in sent if not prompts[id_].get("images")]
        input_tokens = {prompt["id"]: len(tokenizer.encode(prompt["text"]).ids) for prompt in plain}
    requests = []
    for record in records_of_requests:
        texts = [event.text for event in record["events"]]
        if tokenizer is None:
            tokens = (1,) * len(texts)
        else:
            tokens = tokens_by_event(texts, tokenizer.encode("".join(texts), add_special_tokens=False).offsets)
        total = again = sum(tokens)
        if by_server and (counted := server_total(record)) is not None:
            total = counted
            weights = [len(text) for text in texts] if tokenizer is None else tokens
            tokens = server_tokens(record) or _shared(weights, total, end_token=ended_itself(record))
            again = total if tokenizer is None else again
        id_, asked_text = record["prompt"], records.text(record)
        input_count = input_tokens.get(id_, record.get("input_tokens"))
        if tokenizer is not None and id_ in input_tokens and record.get("opening"):
            input_count = len(tokenizer.encode(asked_text).ids)
        requests.append(TimedRequest(record, asked_text, input_count, tokens, total, again))
    special = None if tokenizer is None else len(tokenizer.encode("").ids)
    return LoadRun(records, tuple(requests), by_server, special)


def server_total(record: RequestRecord) -> int | None:
    """The server's count of all output tokens. None unless it counted all of them."""
    total: int | None = record.get("output_tokens")
    return total if record.get("usage_ns") is not None or server_tokens(record) is not None else None


def ended_itself(record: RequestRecord) -> bool:
    """True if the model ended its output. Servers count the end token, which has no text."""
    return record.get("finish_reason") == "stop"


def _shared(weights: Sequence[int], total: int, *, end_token: bool) -> tuple[int, ...]:
    """`total` tokens over events: one each if as many, else by `weights`. `end_token`: one may have no text."""
    if len(weights) in {total, total - end_token}:
        return (1,) * len(weights)
    ends = list(accumulate(weights, initial=0))
    total -= end_token and ends[-1] < total
    sums = [round(total * end / max(1, ends[-1])) for end in ends]
    return tuple(later - earlier for earlier, later in pairwise(sums))


def server_tokens(record: RequestRecord) -> tuple[int, ...] | None:
    """New tokens of each content event by the server's count. None unless it counted all of them."""
    totals = [event.tokens for event in record["events"] if event.tokens is not None]
    if record.get("output_tokens") is None or len(totals) < len(record["events"]):
        return None
    return tuple(later - earlier for earlier, later in pairwise([0, *totals]))
