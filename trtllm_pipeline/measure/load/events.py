"""The event file of a load run: types of its records, and a reader that rejects impossible ones.

`measure/load/load.py` writes it, and docs/reference/formats.md describes each record. Other keys are ignored, as are
records of other types. A missing key, as in older files, means null.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, NoReturn

from annotated_types import Interval, MinLen
from typing_extensions import NotRequired, TypedDict

from trtllm_pipeline.base import StageError, reading, user_files
from trtllm_pipeline.measure.load.prompts import opened

if TYPE_CHECKING:  # read by pydantic; programs import it only after measuring
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

EVENTS_FILE: Final = "events.jsonl"
"""Name of the event file in the result of the perf stage."""
STRICT: Final = {"strict": True, "extra": "allow", "allow_inf_nan": False}
_SHOWN: Final = 80

Ns = Annotated[int, Interval(ge=0, lt=2**63)]
Count = Annotated[int, Interval(ge=0, lt=2**31)]
Positive = Annotated[int, Interval(gt=0, lt=2**31)]
Number = Annotated[float, Interval(ge=-1e18, le=1e18)]
Growth = Annotated[float, Interval(ge=0, le=1e18)]
Rate = Annotated[float, Interval(gt=0, le=1e9)]


class EventRecord(NamedTuple):
    """A content event: text that arrived."""

    time_ns: Ns
    text: Annotated[str, MinLen(1)]
    tokens: Count | None = None
    """Output tokens so far by the server's count. None if it sends none."""
    reasoning: bool = False


class GpuSample(NamedTuple):
    """One reading of a GPU."""

    time_ns: Ns
    watts: Number | None = None
    bytes_used: Number | None = None
    sm_mhz: Number | None = None
    busy_percent: Number | None = None
    celsius: Number | None = None
    joules: Number | None = None
    """Counter of its energy. NVML's readings have none."""


class _Record(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]


class _OfLevel(_Record):
    """Closed loops have a `concurrency`, open loops a `request_rate`. The other one is None."""

    concurrency: Positive | None
    request_rate: NotRequired[Rate | None]
    repeat: Count


class Anchor(_Record):
    """One moment in both clocks."""

    monotonic_ns: Ns
    unix_ns: Ns


class Header(_Record):
    """The first record."""

    type: Literal["header"]
    schema: int
    protocol: str
    model: str
    settings: dict[str, Any]
    anchor: NotRequired[Anchor | None]
    tls: NotRequired[bool | None]


class ConditionsRecord(_Record):
    """System and workload, see `measure/load/conditions.py`."""

    type: Literal["conditions"]
    system: dict[str, Any]
    workload: dict[str, Any]


class PromptRecord(_Record):
    """A prompt, with keys of `prompts.Prompt`."""

    type: Literal["prompt"]
    id: str
    text: str
    images: NotRequired[int]
    """Number of images, whose tokens only the server can count."""
    input_tokens: NotRequired[Count]
    shared: NotRequired[Count]


class ServerRecord(_Record):
    """The server's process, before and after."""

    type: Literal["server"]
    at: Literal["start", "end"]
    pid: Count | None
    since: Ns | None
    ready: bool
    started: NotRequired[bool]
    """False if a cell names a server that is already running."""


class RequestRecord(_OfLevel):
    """One request, with what its `client.session.Answer` has."""

    type: Literal["request"]
    phase: Literal["warmup", "measured"]
    worker: NotRequired[Count]
    slot: Count
    prompt: str
    opening: NotRequired[str]
    """Words that replaced the prompt's first words, see `prompts.opened`."""
    max_tokens: Annotated[int, Interval(gt=0, le=10**7)]
    scheduled_ns: Ns
    held_ns: NotRequired[Ns]
    """How long it was due but not sent, because the maximum number of requests was in flight."""
    turn: NotRequired[Positive]
    """Turn of its conversation, from the second on."""
    connected_ns: NotRequired[Ns | None]
    sent_ns: Ns
    headers_ns: NotRequired[Ns | None]
    first_byte_ns: NotRequired[Ns | None]
    first_event_ns: NotRequired[Ns | None]
    role_ns: NotRequired[Ns | None]
    silent_ns: NotRequired[Ns | None]
    silent: NotRequired[Count]
    unread: NotRequired[str | None]
    events: list[EventRecord]
    usage_ns: NotRequired[Ns | None]
    output_tokens: NotRequired[Count | None]
    input_tokens: NotRequired[Count | None]
    cached_tokens: NotRequired[Count | None]
    total_tokens: NotRequired[Count | None]
    drafted_tokens: NotRequired[Count | None]
    accepted_tokens: NotRequired[Count | None]
    finish_reason: NotRequired[str | None]
    late_ns: NotRequired[Ns]
    end_ns: Ns
    error: str | None


class ClientRecord(_OfLevel):
    """CPU time and event-loop delays of one load process."""

    type: Literal["client"]
    worker: NotRequired[Count]
    wall_ns: Ns
    cpu_ns: Ns
    lag_ns: list[Ns]


class GaugeSample(NamedTuple):
    """One check of the server."""

    time_ns: Ns
    in_flight: Growth | None = None
    waiting: Growth | None = None
    kv_cache_use: Growth | None = None
    """Share of the blocks."""


class GaugesRecord(_OfLevel):
    """Gauges of Triton during a level."""

    type: Literal["gauges"]
    samples: list[GaugeSample]


class UnsentRecord(_OfLevel):
    """Requests of a level that a process did not send: an open loop's server had fallen behind, or its time was over."""

    type: Literal["unsent", "over_budget"]
    worker: NotRequired[Count]
    requests: Count


class ProbedRecord(_OfLevel):
    """The start of a level in a search for the highest rate."""

    type: Literal["probed"]


class TritonRecord(_OfLevel):
    """Growth of Triton's counters during a level."""

    type: Literal["triton"]
    models: dict[str, dict[str, Number]]


class SpeculationRecord(_OfLevel):
    """Drafted tokens during a level, by the server's own statistics of its iterations."""

    type: Literal["speculation"]
    drafted_tokens: Count
    accepted_tokens: Count


class GpuDevice(_Record):
    """A GPU and its readings."""

    name: str
    uuid: str
    exporter: NotRequired[str]
    """URL of its DCGM exporter. None for a GPU that NVML reads here."""
    samples: list[GpuSample]


class GpuRecord(_OfLevel):
    """The GPUs during a level."""

    type: Literal["gpu"]
    devices: list[GpuDevice]
    problems: NotRequired[list[str]]
    """Metrics that DCGM exporters do not report."""


class _Check(_Record):
    setting: str
    asked: Any
    asked_by: str
    got: Any
    got_from: str


class SettingsRecord(_Record):
    """Settings read back from the server, see `measure/load/server_checks.py`."""

    type: Literal["settings"]
    checks: list[_Check]
    unchecked: NotRequired[list[str]]


class RooflineRecord(_Record):
    """Minimum time to read the weights once, see `measure/load/roofline.py`."""

    type: Literal["roofline"]
    pass_s: Rate | None
    weight_bytes: Ns | None
    reason: str | None


class ReusedRecord(_Record):
    """Number of KV cache blocks reused so far."""

    type: Literal["reused_blocks"]
    blocks: Growth | None


class ProbeRecord(_Record):
    """A new prompt that is sent twice."""

    type: Literal["probe"]
    pair: Count
    send: Literal[0, 1]
    ttft_ms: Growth | None
    cached_tokens: Count | None
    error: str | None


_Known = (
    Header
    | ConditionsRecord
    | PromptRecord
    | ServerRecord
    | RequestRecord
    | ClientRecord
    | TritonRecord
    | GpuRecord
    | SettingsRecord
    | RooflineRecord
    | ReusedRecord
    | ProbeRecord
    | SpeculationRecord
    | UnsentRecord
    | ProbedRecord
    | GaugesRecord
)
_IN_ORDER: Final = (
    "scheduled_ns",
    "connected_ns",
    "sent_ns",
    "headers_ns",
    "first_byte_ns",
    "first_event_ns",
    "silent_ns",
)
_OF_LEVEL: Final = ("concurrency", "request_rate", "repeat")
_ONE_EACH: Final[Mapping[str, tuple[str, ...]]] = {
    "header": (),
    "conditions": (),
    "prompt": ("id",),
    "server": ("at",),
    "probe": ("pair", "send"),
    **dict.fromkeys(("triton", "gpu", "speculation", "gauges", "probed"), _OF_LEVEL),
    **dict.fromkeys(("client", "unsent", "over_budget"), (*_OF_LEVEL, "worker")),
}
"""Record type -> its unique key."""
_LISTS: Final = {
    "requests": "request",
    "clients": "client",
    "gpus": "gpu",
    "probes": "probe",
    **{name: name for name in ("triton", "settings", "roofline", "reused_blocks", "speculation")},
    **{name: name for name in ("unsent", "probed", "gauges", "over_budget")},
}
"""Field of `Records` -> its record type."""


@dataclass(frozen=True, slots=True)
class Records:
    """Everything in one event file."""

    header: Header
    prompts: Mapping[str, PromptRecord]
    """By id."""
    requests: Sequence[RequestRecord]
    conditions: ConditionsRecord | None
    server: Mapping[str, ServerRecord]
    """The server's process at the "start" and at the "end"."""
    clients: Sequence[ClientRecord]
    triton: Sequence[TritonRecord]
    gpus: Sequence[GpuRecord]
    settings: Sequence[SettingsRecord]
    roofline: Sequence[RooflineRecord]
    reused_blocks: Sequence[ReusedRecord]
    probes: Sequence[ProbeRecord]
    speculation: Sequence[SpeculationRecord] = ()
    unsent: Sequence[UnsentRecord] = ()
    probed: Sequence[ProbedRecord] = ()
    gauges: Sequence[GaugesRecord] = ()
    over_budget: Sequence[UnsentRecord] = ()

    def text(self, request: RequestRecord) -> str:
        """The prompt of a request as it was sent."""
        prompt, opening = self.prompts[request["prompt"]], request.get("opening")
        return opened(prompt["text"], prompt.get("shared", 0), opening) if opening else prompt["text"]


def level_of(record: _OfLevel) -> tuple[int | None, float | None]:
    """Concurrency and request rate of a record's level. One of them is None."""
    return record["concurrency"], record.get("request_rate")


def read_records(path: Path, text: bytes | None = None) -> Records:
    """The records in `path`, or in `text`, a part of it. A last line cut off by a crash is ignored.

    Raises StageError with the line of an invalid or impossible record.
    """
    by_type: dict[str, list[tuple[int, Any]]] = {}
    for number, record in _records(path, text):
        if not by_type and record["type"] != "header":
            _fail(path, number, "not the header, with which an event file of a load run starts")
        by_type.setdefault(record["type"], []).append((number, record))
    if not by_type:
        raise StageError(f"{path} is not an event file of a load run: it is empty")
    if "request" not in by_type:
        raise StageError(f"{path}: no request in this event file")
    for kind, keys in _ONE_EACH.items():
        first_lines: dict[tuple[Any, ...], int] = {}
        for number, record in by_type.get(kind, ()):
            first = first_lines.setdefault(tuple(record.get(key) for key in keys), number)
            if first != number:
                _fail(path, number, f"a duplicate of the {kind} record in line {first}")

    def of(kind: str) -> list[Any]:
        return [record for _, record in by_type.get(kind, ())]

    (header,) = of("header")
    prompts = {record["id"]: record for record in of("prompt")}
    started_ns = (header.get("anchor") or {}).get("monotonic_ns", 0)
    for number, request in by_type["request"]:
        wrong = _impossible(request)
        if request["prompt"] not in prompts:
            wrong = f"no prompt {request['prompt'][:_SHOWN]!r} in this file"
        elif request["scheduled_ns"] < started_ns:
            wrong = "scheduled_ns is before the header's anchor"
        if wrong:
            _fail(path, number, wrong)
    _check_together(path, by_type["request"])
    return Records(
        header,
        prompts,
        conditions=next(iter(of("conditions")), None),
        server={record["at"]: record for record in of("server")},
        **{name: of(kind) for name, kind in _LISTS.items()},
    )


@cache
def _reader() -> TypeAdapter[Mapping[str, Any]]:
    """Validates records. Created when the first record is read, so that programs that measure start faster."""
    from pydantic import Field, TypeAdapter

    return TypeAdapter(Annotated[_Known, Field(discriminator="type")])


def _records(path: Path, text: bytes | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Number and record of each nonblank line."""
    from pydantic import ValidationError

    from trtllm_pipeline.measure.load.load import SCHEMA  # reports only need the record types, not a client

    try:
        text = reading.read_bytes(path) if text is None else text
    except OSError as error:
        raise StageError(f"{path}: cannot be read: {error.strerror}") from error
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record: Mapping[str, Any] | None
        try:
            record = _reader().validate_json(line)
        except ValidationError as error:
            (wrong, *_) = error.errors(include_url=False)
            if wrong["type"] == "json_invalid" and number == len(lines):
                return
            record = _of_another_type(line) if wrong["type"] == "union_tag_invalid" else None
            if record is None:
                _fail(path, number, f"not a record of a load run: {validation_error_text(wrong, 1)}")
        if record["type"] == "header" and record["schema"] != SCHEMA:
            raise StageError(f"{path} is not an event file of schema {SCHEMA}, but of {record['schema']}")
        if record["type"] == "triton" and any(
            not values.get("requests", 0) > 0 for values in record["models"].values()
        ):
            _fail(path, number, "a model that grew by no requests")
        if record["type"] == "roofline" and record["pass_s"] is not None and record["weight_bytes"] is None:
            _fail(path, number, "pass_s without weight_bytes")
        yield number, record


def _of_another_type(line: bytes) -> Mapping[str, Any] | None:
    """A record of a type that a later version may write. None for anything else."""
    try:
        record = user_files.decode_mapping(line)
    except user_files.JsonError:
        return None
    return record if isinstance(record.get("type"), str) else None


def validation_error_text(error: ErrorDetails, skipped: int = 0) -> str:
    """The pydantic error in one line, without the first `skipped` parts of its location, such as a record's type."""
    if error["type"] == "union_tag_not_found":
        return "it has no type"
    message = error["msg"][:1].lower() + error["msg"][1:]
    where = ".".join(str(part)[:_SHOWN] for part in error["loc"][skipped:])
    got = "" if error["type"] in {"missing", "json_invalid"} else f", got {repr(error['input'])[:_SHOWN]}"
    return f"{where}: {message}{got}" if where else message


def _fail(path: Path, line: int, message: str) -> NoReturn:
    raise StageError(f"{os.fspath(path)}:{line}: {message}")


def _impossible(request: RequestRecord) -> str | None:
    """An impossible statement in a request's record, in words."""
    from trtllm_pipeline.measure.client.session import most_tokens

    concurrency, rate = level_of(request)
    if (concurrency is None) == (rate is None):
        return "a level has a concurrency or a request_rate, one of the two"
    if concurrency is not None and request["slot"] >= concurrency:
        return f"slot {request['slot']} of {concurrency}, counted from 0"
    moments = [(name, at_ns) for name in _IN_ORDER if isinstance(at_ns := request.get(name), int)]
    moments += [(f"event {number}", event.time_ns) for number, event in enumerate(request["events"])]
    for (before, earlier_ns), (after, later_ns) in pairwise([*moments, ("end_ns", request["end_ns"])]):
        if later_ns < earlier_ns:
            return f"{after} ({later_ns}) is before {before} ({earlier_ns})"
    for name in ("role_ns", "usage_ns"):
        at_ns = request.get(name)
        if isinstance(at_ns, int) and not request["sent_ns"] <= at_ns <= request["end_ns"]:
            return f"{name} is not between sent_ns and end_ns"
    counts = [event.tokens for event in request["events"] if event.tokens is not None]
    for fewer, more in pairwise(counts):
        if more < fewer:
            return f"the tokens so far fall from {fewer} to {more}"
    total, most = request.get("output_tokens"), most_tokens(request["max_tokens"])
    if total is not None and counts and total < counts[-1]:
        return f"output_tokens is {total}, and {counts[-1]} came with its events"
    if max(total or 0, *counts, 0) > most:
        return f"{max(total or 0, *counts)} output tokens, but max_tokens is {request['max_tokens']}"
    return None


def _check_together(path: Path, requests: Sequence[tuple[int, RequestRecord]]) -> None:
    """Raise StageError for impossible overlaps: a slot has one request at a time, and a run has one level at a time."""
    slots: dict[tuple[Any, ...], list[tuple[int, int, int]]] = {}
    levels: dict[tuple[Any, ...], tuple[int, int, int]] = {}
    for line, request in requests:
        level = (*level_of(request), request["repeat"])
        span = (request["sent_ns"], request["end_ns"], line)
        slots.setdefault((*level, request.get("worker", 0), request["slot"]), []).append(span)
        sent_ns, end_ns, first = levels.get(level, span)
        levels[level] = (min(sent_ns, span[0]), max(end_ns, span[1]), first)
    for (*_, slot), spans in slots.items():
        for (sent_ns, end_ns, line), (next_ns, next_end_ns, next_line) in pairwise(sorted(spans)):
            if next_ns < end_ns or (sent_ns, end_ns) == (next_ns, next_end_ns):
                _fail(path, next_line, f"slot {slot} sent this while the request of line {line} was in flight there")
    for (_, end_ns, line), (next_ns, _, next_line) in pairwise(sorted(levels.values())):
        if next_ns < end_ns:
            _fail(path, next_line, f"its level starts before that of line {line} has ended")
