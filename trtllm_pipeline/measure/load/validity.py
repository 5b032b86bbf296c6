"""Validation of a load run: one function for each gate.

A gate checks the recorded observations. A finding of severity "invalid" rejects the measurement. Reports show "warning"
and "info" next to it. Gates only read the event file, so anyone can reproduce the verdict later.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import Exclusive
from trtllm_pipeline.measure.load import counters
from trtllm_pipeline.measure.load.events import ClientRecord, ProbeRecord, RequestRecord
from trtllm_pipeline.measure.load.requests import (
    BURST_MS,
    BURST_SHARE,  # noqa: F401 - in load_gates.json
    LevelRun,
    LoadRun,
    TimedRequest,
)
from trtllm_pipeline.measure.load.result import MeasurementFinding
from trtllm_pipeline.measure.load.roofline import CPU_MARGIN  # noqa: F401 - there too
from trtllm_pipeline.measure.load.stats import LEAST_BATCHES, LEAST_P99, percentile

MAX_FAILURES: Final = 0.01
MAX_ENDED_AT_ONCE: Final = 0.10
"""Models sometimes end the output immediately. With greedy sampling, always for the same prompts."""
ECHO_WORDS: Final = 3
MAX_MISMATCH: Final = 0.02
"""A larger share between two counts, or above max_tokens, is reported."""
MAX_EXCESS: Final = 0.05
"""A larger share above or below the requested tokens, after encoding again, exceeds the tokenizer's ambiguity."""
MAX_BYTES_PER_TOKEN: Final = 3
"""Encoding again turns one token into at most this many: an invalid byte becomes U+FFFD, which has three bytes."""
MAX_CLIENT_CPU: Final = 0.80
MIN_CLIENT_WALL_NS: Final = 1_000_000_000
"""The share is not meaningful in a shorter level: with fast responses to short prompts, most work is the client's."""
MARKED_LAG_MS: Final = 5.0
MAX_LAG_MS: Final = 50.0
"""Limit for read times (over TLS), and for send times in an open loop."""
MAX_LAG_SHARE: Final = 0.10
"""Share of the median e2e (open loop: of the time between requests) that sends may be late: the load drops by it."""
MARKED_SCHEDULE_LAG_MS: Final = 10.0
MARKED_SCHEDULE_LAG_SHARE: Final = 0.05
"""Share of the median TTFT."""
MAX_QUEUE_SHARE: Final = 0.10
"""Share of the median e2e."""
_AROUND_THE_ENGINE: Final = ("preprocessing", "postprocessing")
MIN_EVENTS: Final = 8
"""Minimum number of events after the first. With fewer, TPOT may only show one network delay, not the generation speed."""
SURE_REUSE: Final = 0.5
POSSIBLE_REUSE: Final = 0.8
"""Second TTFT / first TTFT of a prompt sent twice: reuse if the median is below SURE_REUSE and all are below POSSIBLE_REUSE."""
SURE_PAIRS: Final = 16
"""Maximum number of prompts sent twice. On a busy machine without a cache, 4 of 10 second sends are below POSSIBLE_REUSE, and
so are 16 of 16 once in two million runs.
"""
LEAST_SAVED_MS: Final = 2.0
"""A smaller saving could be noise."""
_CALLED: Final = ("tool_calls", "function_call")
PLANNED_ENDS: Final = frozenset({"stop", "length", "end_id", "stop_words", *_CALLED})
"""Normal finish reasons. Others are content_filter, cancelled, timeout, abort, error."""
HELD_TOKENS: Final = 3
"""Maximum tokens before a UTF-8 character becomes text: it has up to four bytes."""
MAX_SILENT_SHARE: Final = 0.20
"""Share of TTFT between the first chunk without text and the first text."""
MAX_SILENT_ANSWERS: Final = 0.10
FAR_SHARE: Final = 0.5
"""Mean length / the cell's or the requested length. Below it, a load is not one of these lengths."""
SPARE_TOKENS: Final = 8
"""Per response: tokens that are counted but have no text, such as the end token and reasoning marks."""
MAX_UNSEEN_SHARE: Final = 0.50
"""Share of the tokens in the texts, in addition to SPARE_TOKENS."""
SPARE_TEXTS: Final = 2
"""Per response: texts without a token, such as text that was held back until the end."""
MAX_TEXTS_SHARE: Final = 0.10
PAUSE_TIMES: Final = 5
"""A silence this many times longer than usual is a pause."""
MAX_PAUSE_SHARE: Final = 0.05
"""Share of the window."""

Found = Iterator[tuple[str, str]]
"""Severity and message of each finding."""
Look = Callable[..., Iterator[tuple[Any, ...]]]
"""A gate's function of a run and one of its levels, or of the run alone, whose message may have a level after it."""


ENOUGH_REQUESTS: Final = 1000
"""Requests at each rate of a search."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition on a run."""

    id: str
    what: str
    limit: str
    """The measurement is rejected beyond it. "-" for a gate that never rejects."""
    why: str
    look: Look
    of_level: bool


GATES: Final[list[Gate]] = []
"""All gates, in the order of findings."""
_TEXTS: Final = json.loads((PACKAGE / "data" / "load_gates.json").read_text(encoding="utf-8"))


def _gate(look: Look) -> Look:
    """Register a function as a gate, with its name as id, and with its texts, which have names of constants."""
    name = look.__name__.lstrip("_")
    texts = {part: text.format_map(globals()) for part, text in _TEXTS[name].items()}
    GATES.append(Gate(name, **texts, look=look, of_level=look.__code__.co_argcount == 2))
    return look


def findings(run: LoadRun) -> Iterator[MeasurementFinding]:
    for gate in GATES:
        for level in run.levels if gate.of_level else (None,):
            for severity, message, *place in gate.look(run) if level is None else gate.look(run, level):
                at = level or next(iter(place), None)
                load = (None, None) if at is None else (at.concurrency, at.request_rate)
                yield MeasurementFinding(severity, message, *load, check=gate.id)


@_gate
def _server(run: LoadRun) -> Found:
    start, end = run.records.server.get("start"), run.records.server.get("end")
    if start is None or end is None:
        yield "invalid", "the run was interrupted, so the server was not checked at its end: there are no rates"
        return
    if start.get("started") is False:
        yield ("warning", "the server was started externally: its options, and whether it was restarted, are unknown")
    elif start["pid"] is None:
        yield "info", "the server's process is unknown, so a restart cannot be detected"
    elif end["since"] is None or (start["pid"], start["since"]) != (end["pid"], end["since"]):
        yield "invalid", f"the server's process {start['pid']} did not survive the run"
    if not end["ready"]:
        yield "invalid", "the server was not ready after the run"


@_gate
def _beside(run: LoadRun) -> Found:
    rule = run.records.header["settings"].get("exclusive")
    if rule == Exclusive.NONE:
        yield "warning", "other work may have run at the same time: settings.perf.exclusive is none"
    elif rule == Exclusive.GPU:
        others = "other measurements may have run on other GPUs, and servers of another run may have loaded models"
        yield "info", f"{others}: settings.perf.exclusive is gpu"


@_gate
def _adapters(run: LoadRun) -> Found:
    settings = run.records.header["settings"]
    names = settings.get("lora_names") or ()
    if len(names) > 1 and settings.get("lora") is None:
        yield ("info", f"requests used {', '.join(names)} in turn; an axis settings.perf.lora measures each separately")


@_gate
def _settings(run: LoadRun) -> Found:
    checks = [check for record in run.records.settings for check in record["checks"]]
    wrong = dict.fromkeys(
        f"{check['setting']} is {check['got']} according to {check['got_from']}, {check['asked']} according to {check['asked_by']}"
        for check in checks
        if check["asked"] != check["got"]
    )
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        examples = "; ".join(list(wrong)[:3])
        yield "invalid", f"the server runs with other settings than expected: {examples}{more}"
    unchecked = sorted({name for record in run.records.settings for name in record.get("unchecked", ())})
    if unchecked:
        yield "info", f"settings not reported by server or engine: {', '.join(unchecked)}"


@_gate
def _client_cpu(_run: LoadRun, level: LevelRun) -> Found:
    found = []
    for record in level.clients:
        cpu = record["cpu_ns"] / max(1, record["wall_ns"])
        if cpu > MAX_CLIENT_CPU:
            # An open loop polls the clock before each send, which takes CPU time. The gate `schedule` checks it.
            sure = level.concurrency is not None and record["wall_ns"] >= MIN_CLIENT_WALL_NS
            message = f"the load client used {cpu:.0%} of a core; above {MAX_CLIENT_CPU:.0%} it limits the measurement"
            found.append((cpu, "invalid" if sure else "warning", message, record))
    yield from _worst(level, found)


def _worst(level: LevelRun, found: Iterable[tuple[float, str, str, ClientRecord]]) -> Found:
    """One finding for all load processes and repeats of a level: the largest value of the worst severity."""
    by_severity = sorted(found, key=lambda each: (each[1] == "invalid", each[0]))
    if by_severity:
        _, severity, message, _ = by_severity[-1]
        repeats = len({record["repeat"] for *_, record in by_severity})
        yield severity, message + (f"; in {repeats} of {len(level.repeats)} repeats" if len(level.repeats) > 1 else "")


@_gate
def _client_lag(run: LoadRun, level: LevelRun) -> Found:
    found: list[tuple[float, str, str, ClientRecord]] = []
    tls, good = run.records.header.get("tls"), level.answered
    gaps_ms = [gap for request in good for gap in request.gaps_ms()]
    for record in level.clients:
        lags_ms = sorted(value / 1e6 for value in record["lag_ns"])
        late_ms = percentile(lags_ms, 0.99) if lags_ms else 0.0
        if late_ms <= MARKED_LAG_MS:
            continue
        lag_text, mean_ms = f"the load client's event loop was up to {late_ms:.1f} ms late (p99)", fmean(lags_ms)
        closed = level.concurrency is not None
        e2e_ms = median(request.e2e_ms for request in good) if good else math.inf
        thinner = mean_ms / e2e_ms if closed else 0.0
        together = bool(gaps_ms) and late_ms > median(gaps_ms)
        moved = mean_ms / max(median(request.ttft_ms for request in good), 1e-6) if together else 0.0
        long_enough = late_ms > MAX_LAG_MS and record["wall_ns"] >= MIN_CLIENT_WALL_NS
        if tls and late_ms > MAX_LAG_MS:
            severity, message = "invalid", f"{lag_text}; over TLS, arrival times are those of its reads"
        elif long_enough and thinner > MAX_LAG_SHARE:
            severity = "invalid"
            message = (
                f"{lag_text}, {mean_ms:.1f} ms on average, so the load was about {thinner / (1 + thinner):.0%} lower: "
                f"requests took {e2e_ms:.1f} ms"
            )
        elif long_enough and moved > MAX_LAG_SHARE:
            severity = "invalid"
            message = (
                f"{lag_text}, {mean_ms:.1f} ms on average, {moved:.0%} of TTFT, while events arrived "
                f"every {median(gaps_ms):.1f} ms: events that arrived together share the time of the last one"
            )
        else:
            severity, other = "warning", "times" if tls else "times of closely spaced events"
            message = f"{lag_text}: requests may have been sent late, and {other} may be too long, by that much"
        found.append((late_ms, severity, message, record))
    yield from _worst(level, found)


@_gate
def _schedule(_run: LoadRun, level: LevelRun) -> Found:
    if level.request_rate is None or not level.measured:
        return
    lags_ms = sorted(request.lag_ms - request.held_ms for request in level.measured)
    lag_ms = percentile(lags_ms, 0.99)
    first = [request.ttft_ms for request in level.answered]
    if lag_ms > min(MARKED_SCHEDULE_LAG_MS, MARKED_SCHEDULE_LAG_SHARE * median(first) if first else math.inf):
        # A single late request does not change the load: one gap is longer, the next one shorter.
        other_load = fmean(lags_ms) > MAX_LAG_SHARE * 1e3 / level.request_rate
        message = f"the load client sent requests up to {lag_ms:.1f} ms late (p99), {fmean(lags_ms):.1f} ms on average"
        yield "invalid" if lag_ms > MAX_LAG_MS and other_load else "warning", message


@_gate
def _failures(_run: LoadRun, level: LevelRun) -> Found:
    if not level.measured:
        yield "invalid", "no measured requests: all requests of this level are warmup"
    errors = [str(request.record["error"]) for request in level.measured if not request.ok]
    if errors:
        (cause, times), *_ = Counter(map(_cause, errors)).most_common(1)
        texts = Counter(error for error in errors if _cause(error) == cause)
        severity = "invalid" if len(errors) > MAX_FAILURES * len(level.measured) else "warning"
        how = "with" if len(texts) == 1 else "with errors such as"
        message = f"{len(errors)} of {len(level.measured)} requests failed, {times} of them {how}"
        yield severity, f"{message}: {texts.most_common(1)[0][0]}"


def _cause(error: str) -> str:
    """An error without what differs from request to request: quoted texts, and words with digits. An HTTP status stays."""
    return re.sub(r"""'[^']*'|"[^"]*"|(?<!status )\b\w*\d\w*""", "", error)


@_gate
def _empty_answers(_run: LoadRun, level: LevelRun) -> Found:
    good = level.ok
    empty = [request for request in good if not request.answered]
    if not empty:
        return
    # One of a few is not evidence about the share.
    few = len(empty) < len(good) and len(empty) <= max(1, MAX_ENDED_AT_ONCE * len(good))
    at_once = few and all(map(_ended_at_once, empty))
    what = "have text but no tokens" if all(request.text for request in empty) else "are empty"
    if at_once:
        what = "are empty because the model ended at once; latencies and rates exclude them"
    message = f"{len(empty)} of {len(good)} responses {what}, the first to prompt {empty[0].record['prompt']!r}"
    yield "warning" if at_once else "invalid", message


def _ended_at_once(request: TimedRequest) -> bool:
    """True if the server says that the model's first token was its end token: by finish reason or count."""
    count = request.record.get("output_tokens")
    return not request.text and (request.record.get("finish_reason") == "stop" or (count is not None and count <= 1))


@_gate
def _prompt_echo(_run: LoadRun, level: LevelRun) -> Found:
    """A server that echoes prompts echoes all of them. A model may return a greeting, or repeat a sentence."""
    echoed = [each.prompt for each in level.ok if each.text.lstrip().startswith(each.prompt.strip())]
    if echoed:
        message = f"{len(echoed)} of {len(level.ok)} responses start with their prompt, which counts as output"
        telling = len({*echoed}) > 1 or len(echoed[0].split()) >= ECHO_WORDS
        yield "invalid" if telling and len(echoed) > len(level.ok) / 2 else "warning", message


@_gate
def _stop_reasons(run: LoadRun, level: LevelRun) -> Found:
    good = level.answered
    ends = Counter(str(end) for request in good if (end := request.record.get("finish_reason")) is not None)
    odd = {end: times for end, times in ends.items() if end not in PLANNED_ENDS}
    if odd:
        reasons = ", ".join(f"{end} ({times})" for end, times in odd.items())
        yield "invalid", f"{sum(odd.values())} of {len(good)} responses have unexpected finish reasons: {reasons}"
    # Encoding again may give one token for two of the server's.
    short = [request for request in good if _missing(request) > (0 if run.counted_by_server else 1)]
    cut = [request for request in short if request.record.get("finish_reason") == "length"]
    if not run.counted_by_server and run.special_tokens is None and (wrong := short if _fixed_length(run) else cut):
        advice = "Name the model's directory, which has the tokenizer that counts them"
        severity, message = _too_short(run, wrong, good, "have fewer content events than requested tokens")
        yield severity, f"{message}: an event may hold several tokens. {advice}"
        return
    if cut:
        severity, message = _too_short(run, cut, good, "were cut off before the requested length")
        yield severity, f"{message} tokens"
    if short and _fixed_length(run):
        severity, message = _too_short(run, short, good, "are shorter than the requested fixed length")
        yield severity, f"{message} tokens"


def _too_short(run: LoadRun, short: Sequence[TimedRequest], good: Sequence[TimedRequest], what: str) -> tuple[str, str]:
    """The server's own count is exact. After encoding again, one token per response and a small share may be missing."""
    requested = sum(int(request.record["max_tokens"]) for request in good)
    few = sum(_missing(request) - 1 for request in short) <= MAX_EXCESS * requested
    first = short[0]
    example = f"{first.record['prompt']!r} with {first.output_tokens} of {first.record['max_tokens']}"
    message = f"{len(short)} of {len(good)} responses {what}, such as for prompt {example}"
    return "warning" if few and not run.counted_by_server else "invalid", message


def _fixed_length(run: LoadRun) -> bool:
    """True if requests continue past the model's end token, as with `ignore_eos`."""
    settings = run.records.header["settings"]
    inputs = settings.get("extra_inputs")
    forced = isinstance(inputs, dict) and inputs.get("ignore_eos") in (True, "true")
    return forced or bool(settings.get("exact_length"))


def _missing(request: TimedRequest) -> int:
    """Number of requested tokens that did not arrive."""
    return int(request.record["max_tokens"]) - request.output_tokens


@_gate
def _one_response(_run: LoadRun, level: LevelRun) -> Found:
    several = [request for request in level.answered if not request.one_token]
    at_once = [request for request in several if len(request.times_ns) > 1 and not request.streamed]
    if at_once:
        often = len(at_once) > len(several) / 2
        advice = (
            " Likely cause: a proxy that buffers, or a busy machine. Measure the server directly, or turn buffering off"
        )
        message = (
            f"in {len(at_once)} of {len(several)} responses, all text arrived at once: their TTFT is the end-to-end latency, "
            f"and TPOT, ITL and ICL do not include them.{advice if often else ''}"
        )
        yield "warning" if often else "info", message
    elif several and not any(len(request.times_ns) > 1 for request in several):
        yield (
            "info",
            "responses were not streamed: TTFT is the end-to-end latency, and TPOT, ITL and ICL were not measured",
        )


@_gate
def _token_count(run: LoadRun, level: LevelRun) -> Found:
    """Differences that a tokenizer can explain are warnings. Others are invalid."""
    good = level.answered
    total = sum(request.output_tokens for request in good)
    if run.counted_by_server:
        yield from _server_counts(good, total)
        return
    if total and run.special_tokens is None:
        yield "warning", "no tokenizer, and the server does not count tokens: each content event counts as one token"
        return
    ok = [request for request in level.requests if request.ok]
    uncounted = sum(not request.counted_by_server for request in ok)
    if uncounted < len(ok):
        yield (
            "warning",
            f"the server did not count the tokens of {uncounted} responses; all are counted with the tokenizer",
        )
    excess = sum(max(0, -_missing(request)) for request in good)
    if excess > MAX_MISMATCH * total:
        message = f"{excess} of {total} output tokens exceed max_tokens, by the tokenizer's count"
        if excess <= MAX_EXCESS * total:
            yield "warning", message
        else:
            yield "invalid", f"{message}: is this the right tokenizer?"


def _server_counts(good: list[TimedRequest], total: int) -> Found:
    over = [request for request in good if _missing(request) < 0]
    if over:
        worst = min(over, key=_missing)
        message = (
            f"the server counts more tokens than max_tokens in {len(over)} of {len(good)} responses, such as for prompt "
            f"{worst.record['prompt']!r} {worst.output_tokens} of {worst.record['max_tokens']}"
        )
        yield "invalid", message
    encoded = sum(request.encoded_again for request in good)
    mismatch = sum(abs(request.output_tokens - request.encoded_again) for request in good)
    if encoded > MAX_BYTES_PER_TOKEN * total:
        yield "invalid", f"the server counts {total} output tokens, but encoding the texts again gives {encoded}"
    elif mismatch > MAX_MISMATCH * total:
        message = (
            f"the server counts {total} output tokens, encoding the texts again gives {encoded}; the counts differ "
            f"by {mismatch / total:.1%} over all responses. The server's count is used"
        )
        yield "warning", message


@_gate
def _unseen_text(_run: LoadRun, level: LevelRun) -> Found:
    good = level.answered
    late = [
        request
        for request in good
        if (request.record.get("silent", 0) > HELD_TOKENS or request.record.get("unread"))
        and _silence_ms(request) > MAX_SILENT_SHARE * request.ttft_ms
    ]
    if late:
        worst = max(late, key=_silence_ms)
        message = (
            f"in {len(late)} of {len(good)} responses, chunks without text arrived long before the first text, such as "
            f"{worst.record['silent']} within {_silence_ms(worst):.0f} of the {worst.ttft_ms:.0f} ms to the first text "
            f"of prompt {worst.record['prompt']!r}: the server may send text in an unknown field"
        )
        if unread := worst.record.get("unread"):
            message += f", such as `{unread}`"
        yield "invalid" if len(late) > MAX_SILENT_ANSWERS * len(good) else "warning", message


def _silence_ms(request: TimedRequest) -> float:
    """Time from the first chunk without text to the first text."""
    first_ns = request.record.get("silent_ns")
    return 0.0 if first_ns is None else (request.times_ns[0] - first_ns) / 1e6


@_gate
def _texts(run: LoadRun, level: LevelRun) -> Found:
    """Several tokens per text are normal with speculative decoding or a stream interval. A token has at least one byte."""
    if not run.counted_by_server:
        return
    good = level.answered
    tokens, texts = sum(each.output_tokens for each in good), sum(len(set(each.times_ns)) for each in good)
    if texts - tokens > SPARE_TEXTS * len(good) + MAX_TEXTS_SHARE * tokens:
        yield "invalid", f"the server counts {tokens} output tokens, and sent {texts} texts"
    # Tool call parsers drop the text around the calls.
    plain = [request for request in good if request.record.get("finish_reason") not in _CALLED]
    tokens = sum(request.output_tokens for request in plain)
    if run.special_tokens is None:
        most, spare, unit = sum(len(request.text.encode()) for request in plain), 0.0, "bytes"
    elif _fixed_length(run):  # a model forced past its end writes special tokens, which have no text
        return
    else:
        most, spare, unit = sum(request.encoded_again for request in plain), MAX_UNSEEN_SHARE, "tokens"
    if tokens - most > SPARE_TOKENS * len(plain) + spare * most:
        message = (
            f"the server counts {tokens} output tokens in responses whose texts have {most} {unit}: it counts text that it "
            "does not send, or that it sends in an unknown field"
        )
        yield "invalid", message


@_gate
def _usage(_run: LoadRun, level: LevelRun) -> Found:
    wrong = [
        (request, contradiction)
        for request in level.ok
        if (contradiction := _contradiction(request.record)) is not None
    ]
    if wrong:
        request, contradiction = wrong[0]
        message = (
            f"the server's token counts contradict each other in {len(wrong)} of {len(level.ok)} responses, such as for "
            f"prompt {request.record['prompt']!r}: {contradiction}"
        )
        yield "invalid" if len(wrong) > MAX_FAILURES * len(level.ok) else "warning", message


def _contradiction(record: RequestRecord) -> str | None:
    given, made = record.get("input_tokens"), record.get("output_tokens")
    total, cached = record.get("total_tokens"), record.get("cached_tokens")
    if given is not None and made is not None and total is not None and given + made != total:
        return f"{given} input and {made} output tokens, {total} in total"
    if given is not None and cached is not None and cached > given:
        return f"{cached} cached of {given} input tokens"
    return None


@_gate
def _server_queue(_run: LoadRun, level: LevelRun) -> Found:
    """These models are fast, and the number of instances is a setting. Chunks of a streamed response wait concurrently,
    so the sum of their waits may exceed its latency. Several postprocessing instances do not keep the chunks' order
    (tensorrtllm_backend #614, and seen on Triton 2.51).
    """
    streamed = any(len(request.times_ns) > 1 for request in level.answered)
    if not level.answered or not level.triton:
        return
    typical_ms = median(request.e2e_ms for request in level.answered)
    for model in _AROUND_THE_ENGINE:
        # A streamed response is many requests to the postprocessing model: sum their waits per request.
        waited_us = sum(record["models"].get(model, {}).get("queue_us", 0.0) for record in level.triton)
        waited_ms = waited_us / 1e3 / len(level.requests)
        if waited_ms > MAX_QUEUE_SHARE * typical_ms:
            waited = f"requests waited {waited_ms:.1f} ms"
            advice = f"raise settings.repository.{model}_instances"
            if streamed and model == "postprocessing":
                waited = f"the chunks of a response waited {waited_ms:.1f} ms in total"
                advice = "several instances of it would reorder them"
            yield "warning", f"{waited} for {model}, with a median latency of {typical_ms:.1f} ms; {advice}"


@_gate
def _roofline(run: LoadRun) -> Iterator[tuple[Any, ...]]:
    limits = run.records.roofline
    known = [(pass_s, limit) for limit in limits if (pass_s := limit["pass_s"]) is not None]
    if limits and not known:
        yield "info", f"token times were not checked against memory bandwidth: {limits[0]['reason']}"
    if not known:
        return
    pass_s, limit = min(known, key=lambda each: each[0])
    pass_ms = pass_s * 1e3
    for level in run.levels:
        good = level.answered
        # e2e / n is never too short. Buffering can move events closer together than they were generated, so both are
        # judged by the median request.
        whole = [request.e2e_ms / request.output_tokens for request in good]
        between = [tpot for request in good if _apart(request) >= MIN_EVENTS and (tpot := request.tpot_ms) is not None]
        typical = [(median(times), what) for times, what in ((whole, "e2e / n"), (between, "TPOT")) if times]
        token_ms, what = min(typical, default=(pass_ms, ""))
        if token_ms < pass_ms:
            message = (
                f"a token took {token_ms:.3f} ms ({what}, median), yet reading the {(limit['weight_bytes'] or 0) / 1e6:.0f} MB "
                f"of weights it needs takes {pass_ms:.3f} ms: {limit['reason']}"
            )
            yield "invalid", message, level


def _apart(request: TimedRequest) -> int:
    """Number of separate events after the first."""
    return sum(gap > BURST_MS for gap in request.gaps_ms())


@_gate
def _kv_cache_reuse(run: LoadRun) -> Found:
    blocks = [record["blocks"] for record in run.records.reused_blocks if record["blocks"] is not None]
    if blocks and max(blocks) > blocks[0]:
        message = f"KV cache reuse is declared off, but the server reused {max(blocks) - blocks[0]:g} of its blocks"
        yield "invalid", message
    pairs: dict[int, dict[int, ProbeRecord]] = {}
    for record in run.records.probes:
        pairs.setdefault(record["pair"], {})[record["send"]] = record
    if not pairs:
        return
    cached = max((record["cached_tokens"] or 0 for record in run.records.probes), default=0)
    if cached:
        message = f"KV cache reuse is declared off, but the server reused up to {cached} cached tokens of a prompt"
        yield "invalid", message
    whole = [(pair[0]["ttft_ms"], pair[1]["ttft_ms"]) for pair in pairs.values() if len(pair) == 2]
    times = [(first, second) for first, second in whole if first and second]
    shares = [second / first for first, second in times]
    if max(shares, default=0.0) >= POSSIBLE_REUSE:
        return
    if len(times) < SURE_PAIRS:
        answered = f"{len(times)} of {SURE_PAIRS} probes were answered twice"
        yield "warning", f"KV cache reuse is declared off, but could not be checked: {answered}"
        return
    first_ms, second_ms = (median(column) for column in zip(*times, strict=True))
    if median(shares) < SURE_REUSE and first_ms - second_ms > LEAST_SAVED_MS:
        message = (
            f"KV cache reuse is declared off, but TTFT fell from {first_ms:.1f} ms to "
            f"{second_ms:.1f} ms when a prompt was sent again (medians of {len(times)} prompts)"
        )
        yield "invalid", message


@_gate
def _pause(_run: LoadRun, level: LevelRun) -> Found:
    pauses = [pause for repeat in level.repeats if (pause := _longest_pause(level, repeat)) is not None]
    if pauses and 2 * len(pauses) >= len(level.repeats):  # else the medians of the repeats leave it out
        paused_ns, share, usual_ns = max(pauses)
        message = f"for {paused_ns / 1e9:.2g} s nothing arrived from the server, {share:.0%} of the window"
        usual = f"usually at most {usual_ns / 1e9:.2g} s"
        yield "warning", f"{message} ({usual}). It may have compiled a kernel: measure again, with three repeats"


def _longest_pause(level: LevelRun, repeat: int) -> tuple[float, float, float] | None:
    """The longest time in a repeat's window in which requests were in flight and nothing arrived, in ns, its share of the
    window, and what is usual, in ns. None if it is not unusually long, or if the window has too few parts to tell.

    Usual is the median of the parts, as many times longer as the longest request is longer than the median one.
    """
    requests, span = level.repeats[repeat], level.window(repeat)
    good = [] if span is None else span.answered(requests)
    if span is None or not good:
        return None
    number = span.parts(len(good), level.concurrency)
    part_ns = (span.end_ns - span.start_ns) / number
    changes = [(each.sent_ns, 1) for each in requests] + [(each.record["end_ns"], -1) for each in requests]
    changes += [(time_ns, 0) for each in requests for time_ns in each.times_ns]
    longest_ns: dict[int, int] = {}
    in_flight = since_ns = 0
    for now_ns, change in sorted(changes):
        if change == 0 and span.start_ns < now_ns <= span.end_ns:
            part = min(int((now_ns - span.start_ns) / part_ns), number - 1)
            longest_ns[part] = max(longest_ns.get(part, 0), now_ns - max(since_ns, span.start_ns))
        if change == 0 or in_flight == 0:
            since_ns = now_ns
        in_flight += change
    if len(longest_ns) < LEAST_BATCHES:
        return None
    lengths = ([each.input_tokens or 1 for each in good], [each.output_tokens for each in good])
    usual_ns = median(longest_ns.values()) * max(max(each) / median(each) for each in lengths)
    paused_ns, window_ns = max(longest_ns.values()), span.duration_ns
    unusual = paused_ns > max(PAUSE_TIMES * usual_ns, MAX_PAUSE_SHARE * window_ns)
    return (paused_ns, paused_ns / window_ns, usual_ns) if unusual else None


@_gate
def _prompt_lengths(run: LoadRun, level: LevelRun) -> Found:
    prompts = run.records.prompts
    targets = {id_: count for id_, prompt in prompts.items() if (count := prompt.get("input_tokens"))}
    made = [request for request in level.measured if request.record["prompt"] in targets]
    # Without a tokenizer, and for prompts with images, `input_tokens` is the server's count.
    with_text = [each for each in made if not prompts[each.record["prompt"]].get("images")]
    encoded = [] if run.special_tokens is None else with_text
    other = [request for request in encoded if request.input_tokens != targets[request.record["prompt"]]]
    if other:
        id_ = other[0].record["prompt"]
        message = f"{len(other)} of {len(encoded)} prompts miss their target length, such as {id_!r} with "
        yield "invalid", f"{message}{other[0].input_tokens} of {targets[id_]} tokens"
    counted = [(request, count) for request in made if (count := request.record.get("input_tokens")) is not None]
    differ = [(request, count) for request, count in counted if count != targets[request.record["prompt"]]]
    if differ:
        request, count = differ[0]
        message = (
            f"the server counts another length for {len(differ)} of {len(counted)} prompts, such as {count} for "
            f"{request.record['prompt']!r} instead of {targets[request.record['prompt']]} tokens; a chat template adds some"
        )
        yield "warning", message


@_gate
def _saturation(_run: LoadRun, level: LevelRun) -> Found:
    rate = level.saturated_rps
    if rate is not None:
        left = f"; {level.unsent} requests were never sent" if level.unsent else ""
        yield (
            "warning",
            f"saturated at {rate:.3g} requests/s: the server fell behind the requested {level.request_rate:g}{left}",
        )


@_gate
def _far_lengths(run: LoadRun, level: LevelRun) -> Found:
    if (far := _far_from_the_cell(run, level)) is not None:
        yield "warning", far
        return
    prompts = run.records.prompts
    made = [request for request in level.answered if prompts[request.record["prompt"]].get("input_tokens")]
    if made and not _fixed_length(run):  # else `stop_reasons` judges each output
        mean, requested = (
            fmean(counts)
            for counts in zip(*((each.output_tokens, each.record["max_tokens"]) for each in made), strict=True)
        )
        if mean < FAR_SHARE * requested:
            yield "warning", f"outputs have {mean:.3g} tokens on average, and {requested:.4g} were requested"


def _far_from_the_cell(run: LoadRun, level: LevelRun) -> str | None:
    declared = run.records.header["settings"].get("declared") or {}
    longest, whole = declared.get("max_input_len"), declared.get("max_seq_len")
    if not longest or not whole or whole <= longest or declared.get("speculative") == "draft":
        return None  # an engine with a draft model also accepts the output so far as its input
    inputs = [count for request in level.answered if (count := request.input_tokens) is not None]
    outputs = [request.output_tokens for request in level.answered]
    if not inputs or (fmean(inputs) >= FAR_SHARE * longest and fmean(outputs) >= FAR_SHARE * (whole - longest)):
        return None
    means = f"{fmean(inputs):.0f} input and {fmean(outputs):.0f} output tokens"
    return f"the load has {means} on average, far from the {longest} and {whole - longest} of the cell"


@_gate
def _level_budget(_run: LoadRun, level: LevelRun) -> Found:
    if level.over_budget:
        sent = len(level.measured)
        yield "info", f"the time limit of the level ended it after {sent} of {sent + level.over_budget} requests"


@_gate
def _rate_search(run: LoadRun) -> Found:
    rates = (level for level in run.probes if level.request_rate is not None)
    rounds = (repeat for level in rates for repeat in level.repeats.values())
    fewest = min((sum(request.measured for request in repeat) for repeat in rounds), default=ENOUGH_REQUESTS)
    if fewest < ENOUGH_REQUESTS:
        yield "warning", f"the interval of the highest rate is too narrow: some rates were tried with {fewest} requests"


@_gate
def _stop_when(run: LoadRun, level: LevelRun) -> Found:
    timed = any(request.tpot_ms is not None for request in level.answered)
    known = {
        "tpot": timed,
        "itl": timed,
        "icl": any(request.streamed for request in level.answered),
        "input": all(request.input_tokens is not None for request in level.answered),
        "tokens": any(record["devices"] for record in level.gpus),
    }
    answered = (sum(request.measured and request.answered for request in repeat) for repeat in level.repeats.values())
    fewest = min(answered, default=0)
    for name in run.records.header["settings"].get("stop_when") or ():
        if name.endswith("_p99") and fewest < LEAST_P99:
            yield (
                "warning",
                f"stop_when: a p99 needs {LEAST_P99} requests in each repeat, not {fewest}, so the rule ignored {name}",
            )
        if not known.get(name.partition("_")[0], True):
            yield "warning", f"stop_when: this level has no {name}, so the rule ignored it"


@_gate
def _exported_gpus(_run: LoadRun, level: LevelRun) -> Found:
    for problem in dict.fromkeys(problem for record in level.gpus for problem in record.get("problems", ())):
        yield "warning", f"GPUs: {problem}"
    exported = [[each for each in counters.working(record["devices"]) if "exporter" in each] for record in level.gpus]
    fewest = min((len(counters.updates(each)) for devices in exported for each in devices), default=None)
    if fewest is not None and fewest < counters.LEAST_READINGS:
        message = f"GPUs: {fewest} new readings of the DCGM exporter in a repeat, too few for its energy"
        yield "warning", f"{message}; lengthen the level, or start dcgm-exporter with --collect-interval 1000"


@_gate
def _rows_left_out(run: LoadRun) -> Found:
    if reason := run.records.header["settings"].get("rows_left_out"):
        yield "warning", str(reason)
    if unsent := run.records.header["settings"].get("unsent_of_trace"):
        yield "info", f"{unsent} were not sent: requests, a time limit or the length of a search limits the replay"


@_gate
def _warmup(run: LoadRun, level: LevelRun) -> Found:
    warm = {_sent(run, request) for request in level.requests if not request.measured}
    shared = {request.record["prompt"] for request in level.measured if _sent(run, request) in warm}
    if shared:
        yield "warning", f"warmup and measurement share prompts: {', '.join(sorted(shared)[:3])}"


@_gate
def _repeated_prompts(run: LoadRun, level: LevelRun) -> Found:
    different = {(_sent(run, each), each.record["repeat"]) for each in level.measured}
    again = len(level.measured) - len(different)
    if again:
        message = f"{again} of {len(level.measured)} requests repeat an earlier prompt"
        yield "info", f"{message}; with KV cache reuse the server processes them faster"


def _sent(run: LoadRun, request: TimedRequest) -> str:
    """Identity of a prompt: its text as sent, or its id if it has images, which are not recorded."""
    id_ = request.record["prompt"]
    return id_ if run.records.prompts[id_].get("images") else request.prompt
