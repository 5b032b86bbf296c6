"""Validation of a load run: one function for each gate, and the table of gates.

A gate checks what was observed. A finding of severity "invalid" rejects the measurement; "warning" and "info" are shown
beside it. Everything a gate needs is in the event file, so the verdict can be reproduced later, by anybody.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from trtllm_pipeline.bench.events import ProbeRecord, level_of
from trtllm_pipeline.bench.requests import LoadRun, TimedRequest
from trtllm_pipeline.bench.roofline import CPU_MARGIN
from trtllm_pipeline.bench.stats import percentile

MAX_FAILURES: Final = 0.01
MAX_ENDED_AT_ONCE: Final = 0.10
"""Models do have nothing to say to a prompt now and then, and greedy ones always to the same."""
MAX_MISMATCH: Final = 0.02
"""More than this share between two counts, or above what was asked for, is told."""
MAX_EXCESS: Final = 0.05
"""More than this share above or below what was asked for, after encoding again, is not the tokenizer's ambiguity any
more."""
MAX_BYTES_PER_TOKEN: Final = 3
"""Encoding again gives at most this many tokens for one: a byte that is no text comes back as U+FFFD, three bytes."""
MAX_CLIENT_CPU: Final = 0.80
MIN_CLIENT_WALL_NS: Final = 1_000_000_000
"""In a shorter level the share says little: a fast answer to a short question is mostly the client's work."""
MARKED_LAG_MS: Final = 5.0
MAX_LAG_MS: Final = 50.0
"""Of a time that is that of the read, as over TLS, or of the sending in an open loop."""
MAX_LAG_SHARE: Final = 0.10
"""Of the median time of a request, that much of the load is missing when every next one is sent that late; of the time
between requests of an open loop, that much their distances are others."""
MARKED_SCHEDULE_LAG_MS: Final = 10.0
MARKED_SCHEDULE_LAG_SHARE: Final = 0.05
"""Of the median TTFT."""
MAX_QUEUE_SHARE: Final = 0.10
"""Of the median time of a request."""
_AROUND_THE_ENGINE: Final = ("preprocessing", "postprocessing")
MIN_EVENTS: Final = 8
"""After the first: TPOT of fewer is that of one delay on the way, and no evidence of how fast tokens were made."""
BURST_MS: Final = 0.1
"""Events nearer to each other lay in a buffer together, and came as one."""
SURE_REUSE: Final = 0.5
POSSIBLE_REUSE: Final = 0.8
"""Second time to first token / first, of one prompt sent twice: the median below the one with all below the other."""
LEAST_SAVED_MS: Final = 2.0
"""What saves less is not told from noise."""
PLANNED_ENDS: Final = frozenset({"stop", "length", "end_id", "stop_words"})
"""Reasons to end an answer that a plan has. Not in it: content_filter, cancelled, timeout, abort, error."""


class GateFinding(NamedTuple):
    """One thing a gate has to say. `concurrency` is a level's as in `LoadRun.levels`, None for the run as a whole."""

    severity: str
    message: str
    concurrency: float | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition on a run."""

    id: str
    what: str
    limit: str
    """Beyond it the numbers are not published; "-" for a gate that only tells."""
    why: str
    look: Callable[[LoadRun], Iterable[GateFinding]]


def findings(run: LoadRun) -> list[dict[str, Any]]:
    """What all gates found, as in perf.json: severity, check, concurrency, message."""
    return [
        {"severity": found.severity, "check": gate.id, "concurrency": found.concurrency, "message": found.message}
        for gate in GATES
        for found in gate.look(run)
    ]


def _each(run: LoadRun) -> Iterator[tuple[float, list[TimedRequest]]]:
    """Concurrency and requests of each level, all repeats together, warm-up included."""
    for concurrency, repeats in run.levels().items():
        yield concurrency, [request for requests in repeats.values() for request in requests]


def _measured(requests: Iterable[TimedRequest]) -> list[TimedRequest]:
    return [request for request in requests if request.measured]


def _answered(requests: Iterable[TimedRequest]) -> list[TimedRequest]:
    return [request for request in requests if request.measured and request.answered]


def failures(run: LoadRun) -> Iterator[GateFinding]:
    """Requests that ended with an error."""
    for concurrency, requests in _each(run):
        measured = _measured(requests)
        if not measured:
            yield GateFinding("invalid", "no measured requests: all requests of this level are warm-up", concurrency)
        causes = Counter(request.record["error"] for request in measured if not request.ok)
        failed = causes.total()
        if failed:
            cause, times = causes.most_common(1)[0]
            severity = "invalid" if failed > MAX_FAILURES * len(measured) else "warning"
            message = f"{failed} of {len(measured)} requests failed, {times} of them with: {cause}"
            yield GateFinding(severity, message, concurrency)


def empty_answers(run: LoadRun) -> Iterator[GateFinding]:
    """Answers without text, or without tokens."""
    for concurrency, requests in _each(run):
        good = [request for request in _measured(requests) if request.ok]
        empty = [request for request in good if not request.answered]
        if empty:
            # One of a few says nothing about the share.
            few = len(empty) < len(good) and len(empty) <= max(1, MAX_ENDED_AT_ONCE * len(good))
            at_once = few and all(map(_ended_at_once, empty))
            what = "have text but no tokens" if all(request.text for request in empty) else "are empty"
            what = (
                "are empty because the model ended them at once; they count in no latency or rate" if at_once else what
            )
            message = f"{len(empty)} of {len(good)} answers {what}, the first to prompt {empty[0].record['prompt']!r}"
            yield GateFinding("warning" if at_once else "invalid", message, concurrency)


def _ended_at_once(request: TimedRequest) -> bool:
    """The server says that the model's first token was its end: by its reason, or by counting no more than that one."""
    count = request.record.get("output_tokens")
    return not request.text and (request.record.get("finish_reason") == "stop" or (count is not None and count <= 1))


def stop_reasons(run: LoadRun) -> Iterator[GateFinding]:
    """Answers that did not end as planned: by the reason the server gave, and by their length."""
    for concurrency, requests in _each(run):
        good = _answered(requests)
        ends = Counter(str(end) for request in good if (end := request.record.get("finish_reason")) is not None)
        odd = {end: times for end, times in ends.items() if end not in PLANNED_ENDS}
        if odd:
            told = ", ".join(f"{end} ({times})" for end, times in odd.items())
            message = f"{sum(odd.values())} of {len(good)} answers ended for unexpected reasons: {told}"
            yield GateFinding("invalid", message, concurrency)
        # Encoding again may find one token where the server made two.
        allowed = 0 if run.counted_by_server else 1
        cut = [r for r in good if r.record.get("finish_reason") == "length" and _missing(r) > allowed]
        if cut:
            message = (
                f"{len(cut)} of {len(good)} answers were cut off before the requested length, such as for prompt "
                f"{cut[0].record['prompt']!r} after {cut[0].output_tokens} of {cut[0].record['max_tokens']} tokens"
            )
            yield GateFinding(_severity_of_missing(run, cut, good), message, concurrency)
        early = [request for request in good if _fixed_length(run) and _missing(request) > allowed]
        if early:
            message = (
                f"{len(early)} of {len(good)} answers are shorter than the fixed length requested, such as for prompt "
                f"{early[0].record['prompt']!r} {early[0].output_tokens} of {early[0].record['max_tokens']} tokens"
            )
            yield GateFinding(_severity_of_missing(run, early, good), message, concurrency)


def _fixed_length(run: LoadRun) -> bool:
    """The requests asked the server to go on past the model's own end, as `ignore_eos` does."""
    given = run.records.header["settings"].get("extra_inputs")
    asked = given if isinstance(given, list) else ()
    return any(str(each).partition(":")[::2] == ("ignore_eos", "true") for each in asked)


def _missing(request: TimedRequest) -> int:
    """Tokens that were asked for and did not come."""
    return int(request.record["max_tokens"]) - request.output_tokens


def _severity_of_missing(run: LoadRun, short: Iterable[TimedRequest], good: Iterable[TimedRequest]) -> str:
    """The server's own count is exact; of tokens encoded again, one an answer and a few of the whole may be missing."""
    asked = sum(int(request.record["max_tokens"]) for request in good)
    few = sum(_missing(request) - 1 for request in short) <= MAX_EXCESS * asked
    return "warning" if few and not run.counted_by_server else "invalid"


def token_count(run: LoadRun) -> Iterator[GateFinding]:
    """Can the token counts be right? What tokenizers do is a warning, what nothing explains is invalid."""
    for concurrency, requests in _each(run):
        if run.counted_by_server:
            yield from _server_counts(concurrency, requests)
        else:
            yield from _counts_encoded_again(concurrency, requests, encoded=run.special_tokens is not None)


def _counts_encoded_again(
    concurrency: float, requests: Sequence[TimedRequest], *, encoded: bool
) -> Iterator[GateFinding]:
    good = _answered(requests)
    total = sum(request.output_tokens for request in good)
    if total and not encoded:
        message = "no tokenizer, and the server does not count tokens: each content event is taken as one token"
        yield GateFinding("warning", message, concurrency)
        return
    uncounted = [request for request in requests if request.ok and not request.counted_by_server]
    if len(uncounted) < sum(request.ok for request in requests):
        message = f"the server did not count the tokens of {len(uncounted)} answers; the tokenizer counts all of them"
        yield GateFinding("warning", message, concurrency)
    excess = sum(max(0, request.output_tokens - request.record["max_tokens"]) for request in good)
    if excess > MAX_MISMATCH * total:
        message = f"{excess} of {total} output tokens exceed max_tokens, by the tokenizer's count"
        if excess <= MAX_EXCESS * total:
            yield GateFinding("warning", message, concurrency)
        else:
            yield GateFinding("invalid", f"{message}: is this the right tokenizer?", concurrency)


def _server_counts(concurrency: float, requests: Sequence[TimedRequest]) -> Iterator[GateFinding]:
    good = _answered(requests)
    total = sum(request.output_tokens for request in good)
    over = [request for request in good if request.output_tokens > request.record["max_tokens"]]
    if over:
        worst = max(over, key=lambda request: request.output_tokens - request.record["max_tokens"])
        message = (
            f"the server counts more tokens than max_tokens in {len(over)} of {len(good)} answers, such as for prompt "
            f"{worst.record['prompt']!r} {worst.output_tokens} of {worst.record['max_tokens']}"
        )
        yield GateFinding("invalid", message, concurrency)
    encoded = sum(request.encoded_again for request in good)
    mismatch = sum(abs(request.output_tokens - request.encoded_again) for request in good)
    if encoded > MAX_BYTES_PER_TOKEN * total:
        message = f"the server counts {total} output tokens where encoding the answers again gives {encoded}"
        yield GateFinding("invalid", message, concurrency)
    elif mismatch > MAX_MISMATCH * total:
        message = (
            f"the server counts {total} output tokens, encoding the answers again gives {encoded}; answer by answer "
            f"they differ by {mismatch / total:.1%}. The server's count is used"
        )
        yield GateFinding("warning", message, concurrency)


def prompt_echo(run: LoadRun) -> Iterator[GateFinding]:
    """Answers that begin with their prompt."""
    for concurrency, requests in _each(run):
        good = [request for request in _measured(requests) if request.ok]
        echoed = [request for request in good if request.text.lstrip().startswith(request.prompt.strip())]
        if echoed:
            message = f"{len(echoed)} of {len(good)} answers begin with their prompt, which would count as output"
            yield GateFinding("invalid", message, concurrency)


def server(run: LoadRun) -> Iterator[GateFinding]:
    """Was the server there at both ends, ready, and the same process?"""
    start, end = run.records.server.get("start"), run.records.server.get("end")
    if start is None or end is None:
        yield GateFinding("invalid", "the run was interrupted: the server was not checked at its end")
        return
    if start["pid"] is None:
        yield GateFinding("info", "the server's process is unknown here, so a restart would not be noticed")
    elif end["since"] is None or (start["pid"], start["since"]) != (end["pid"], end["since"]):
        yield GateFinding("invalid", f"the server's process {start['pid']} did not survive the run")
    if not end["ready"]:
        yield GateFinding("invalid", "the server was not ready after the run")


def client_cpu(run: LoadRun) -> Iterator[GateFinding]:
    """Did the client have processor time to spare?"""
    for record in run.records.clients:
        cpu = record["cpu_ns"] / max(1, record["wall_ns"])
        if cpu > MAX_CLIENT_CPU:
            # An open loop looks at the clock before each sending, which is processor time too; `schedule` judges it.
            closed = record["concurrency"] is not None
            severity = "invalid" if closed and record["wall_ns"] >= MIN_CLIENT_WALL_NS else "warning"
            message = f"the load client used {cpu:.0%} of a core; above {MAX_CLIENT_CPU:.0%} it limits the measurement"
            yield GateFinding(severity, message, level_of(record))


def client_lag(run: LoadRun) -> Iterator[GateFinding]:
    """Was the client there when something arrived?

    A read has the kernel's time of its last bytes, so a client that is late does not lengthen the time of an event that
    came alone; of several that came before it looked, all get the time of the last. And in a closed loop it sends the
    next request late, so the load is thinner than asked. Over TLS the times are those of its reads.
    """
    answered = {load: good for load, each in _each(run) if (good := _answered(each))}
    for record in run.records.clients:
        lags_ms = sorted(value / 1e6 for value in record["lag_ns"])
        late_ms = percentile(lags_ms, 0.99) if lags_ms else 0.0
        if late_ms <= MARKED_LAG_MS:
            continue
        load = level_of(record)
        said = f"the load client's event loop was up to {late_ms:.1f} ms late (p99)"
        good, mean_ms = answered.get(load, []), fmean(lags_ms)
        closed = record["concurrency"] is not None
        thinner = mean_ms / median(request.e2e_ms for request in good) if closed and good else 0.0
        gaps_ms = [gap for request in good for gap in request.gaps_ms()]
        together = bool(gaps_ms) and late_ms > median(gaps_ms)
        moved = mean_ms / max(median(request.ttft_ms for request in good), 1e-6) if together else 0.0
        told = late_ms > MAX_LAG_MS and record["wall_ns"] >= MIN_CLIENT_WALL_NS
        if run.records.header.get("tls") and late_ms > MAX_LAG_MS:
            yield GateFinding("invalid", f"{said}; over TLS, times of arrival are those of its reads", load)
        elif told and thinner > MAX_LAG_SHARE:
            message = f"{said}, {mean_ms:.1f} ms on average, {thinner:.0%} of a request's latency: the load was lower by as much"
            yield GateFinding("invalid", message, load)
        elif told and moved > MAX_LAG_SHARE:
            message = (
                f"{said}, {mean_ms:.1f} ms on average, {moved:.0%} of the time to first token, while events arrived "
                f"every {median(gaps_ms):.1f} ms: events that arrived together share the time of the last"
            )
            yield GateFinding("invalid", message, load)
        else:
            other = "times" if run.records.header.get("tls") else "times of closely spaced events"
            yield GateFinding(
                "warning", f"{said}: requests may have been sent late, and {other} may be too long, by as much", load
            )


def schedule(run: LoadRun) -> Iterator[GateFinding]:
    """Were the requests of an open loop sent when they were due?"""
    for rate, requests in _each(run):
        measured = [request for request in _measured(requests) if request.record.get("request_rate") is not None]
        if not measured:
            continue
        lags_ms = sorted(request.lag_ms for request in measured)
        lag_ms = percentile(lags_ms, 0.99)
        first = [request.ttft_ms for request in measured if request.answered]
        marked = min(MARKED_SCHEDULE_LAG_MS, MARKED_SCHEDULE_LAG_SHARE * median(first) if first else math.inf)
        if lag_ms > marked:
            # One late request of a few leaves the load what it was: a gap longer, the next one shorter.
            other_load = fmean(lags_ms) > MAX_LAG_SHARE * 1e3 / rate
            severity = "invalid" if lag_ms > MAX_LAG_MS and other_load else "warning"
            message = (
                f"the load client sent requests up to {lag_ms:.1f} ms late (p99), {fmean(lags_ms):.1f} ms on average"
            )
            yield GateFinding(severity, message, rate)


def server_queue(run: LoadRun) -> Iterator[GateFinding]:
    """Did requests wait for the models around the engine, which are quick and have a setting for how many there are?"""
    for load, requests in _each(run):
        good = _answered(requests)
        records = [record for record in run.records.triton if level_of(record) == load]
        if not good or not records:
            continue
        typical_ms = median(request.e2e_ms for request in good)
        for model in _AROUND_THE_ENGINE:
            # A streamed answer is many requests to the postprocessing: their waits, for each request of ours.
            waited_us = sum(record["models"].get(model, {}).get("queue_us", 0.0) for record in records)
            waited_ms = waited_us / 1e3 / len(requests)
            if waited_ms > MAX_QUEUE_SHARE * typical_ms:
                message = (
                    f"each request waited {waited_ms:.1f} ms for the {model}, {waited_ms / typical_ms:.0%} of its "
                    f"latency; raise settings.repository.{model}_instances"
                )
                yield GateFinding("warning", message, load)


def _apart(request: TimedRequest) -> int:
    """How many events came after the first and by themselves."""
    return sum(gap > BURST_MS for gap in request.gaps_ms())


def roofline(run: LoadRun) -> Iterator[GateFinding]:
    """Every token of an answer needs one pass over the weights: no request can be faster than memory allows."""
    limits = run.records.roofline
    known = [(pass_s, limit) for limit in limits if (pass_s := limit["pass_s"]) is not None]
    if limits and not known:
        yield GateFinding("info", f"token times were not checked against memory bandwidth: {limits[0]['reason']}")
    if not known:
        return
    pass_s, limit = min(known, key=lambda each: each[0])
    pass_ms = pass_s * 1e3
    for concurrency, requests in _each(run):
        good = _answered(requests)
        # A whole answer cannot seem faster than it was. Between events, buffering on the way can bring tokens closer
        # together than they were made, so both are judged by the typical request.
        whole = [request.e2e_ms / request.output_tokens for request in good]
        between = [tpot for request in good if _apart(request) >= MIN_EVENTS and (tpot := request.tpot_ms) is not None]
        typical = [(median(times), what) for times, what in ((whole, "e2e / n"), (between, "TPOT")) if times]
        token_ms, what = min(typical, default=(pass_ms, ""))
        if token_ms < pass_ms:
            message = (
                f"a token took {token_ms:.3f} ms ({what}, median), yet reading the {(limit['weight_bytes'] or 0) / 1e6:.0f} MB "
                f"of weights it needs takes {pass_ms:.3f} ms: {limit['reason']}"
            )
            yield GateFinding("invalid", message, concurrency)


def settings(run: LoadRun) -> Iterator[GateFinding]:
    """Does the server run with what was asked for?"""
    checks = [check for record in run.records.settings for check in record["checks"]]
    wrong = dict.fromkeys(
        f"{check['setting']} is {check['got']} by {check['got_from']}, {check['asked']} by {check['asked_by']}"
        for check in checks
        if check["asked"] != check["got"]
    )
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        told = "; ".join(list(wrong)[:3])
        yield GateFinding("invalid", f"the server does not run with the expected settings: {told}{more}")
    unchecked = sorted({name for record in run.records.settings for name in record.get("unchecked", ())})
    if unchecked:
        yield GateFinding("info", f"settings that neither the server nor the engine reports: {', '.join(unchecked)}")


def kv_cache_reuse(run: LoadRun) -> Iterator[GateFinding]:
    """Declared off, is it? By what the server tells, and by a prompt that is answered faster the second time."""
    blocks = [record["blocks"] for record in run.records.reused_blocks if record["blocks"] is not None]
    if blocks and max(blocks) > blocks[0]:
        message = f"KV cache reuse is declared off, but the server reused {max(blocks) - blocks[0]:g} of its blocks"
        yield GateFinding("invalid", message)
    pairs: dict[int, dict[int, ProbeRecord]] = {}
    for record in run.records.probes:
        pairs.setdefault(record["pair"], {})[record["send"]] = record
    if not pairs:
        return
    told = [tokens for pair in pairs.values() for record in pair.values() if (tokens := record["cached_tokens"])]
    if told:
        yield GateFinding(
            "invalid",
            f"KV cache reuse is declared off, but the server took up to {max(told)} tokens of a prompt from the cache",
        )
    whole = [(pair[0]["ttft_ms"], pair[1]["ttft_ms"]) for pair in pairs.values() if len(pair) == 2]
    times = [(first, second) for first, second in whole if first and second]
    if not times:
        yield GateFinding("warning", "KV cache reuse is declared off, but could not be checked: no probe was answered")
        return
    shares = [second / first for first, second in times]
    first_ms, second_ms = (median(column) for column in zip(*times, strict=True))
    if median(shares) < SURE_REUSE and max(shares) < POSSIBLE_REUSE and first_ms - second_ms > LEAST_SAVED_MS:
        message = (
            f"KV cache reuse is declared off, but a prompt's first token came after {first_ms:.1f} ms and, sent again, "
            f"after {second_ms:.1f} ms (medians of {len(times)} prompts)"
        )
        yield GateFinding("invalid", message)


def warmup(run: LoadRun) -> Iterator[GateFinding]:
    """Prompts of the warm-up among the measured ones."""
    for concurrency, requests in _each(run):
        warm = {request.record["prompt"] for request in requests if not request.measured}
        shared = warm & {request.record["prompt"] for request in _measured(requests)}
        if shared:
            message = f"warm-up and measurement share prompts: {', '.join(sorted(shared)[:3])}"
            yield GateFinding("warning", message, concurrency)


def repeated_prompts(run: LoadRun) -> Iterator[GateFinding]:
    """The same prompt several times."""
    for concurrency, requests in _each(run):
        times = Counter((request.record["prompt"], request.record["repeat"]) for request in _measured(requests))
        most = max(times.values(), default=0)
        if most > 1:
            message = f"prompts were sent up to {most} times; a server that reuses their KV cache looks faster"
            yield GateFinding("info", message, concurrency)


GATES: Final = (
    Gate(
        "server",
        "the server is ready at both ends and is the same process",
        "any difference",
        "a restart empties caches and loses requests; an interrupted run was not checked at its end",
        server,
    ),
    Gate(
        "settings",
        "settings reported by the server, its engine and its repository, against those of the matrix",
        "any difference",
        "figures are only meaningful for known settings",
        settings,
    ),
    Gate(
        "client_cpu",
        "CPU time of the load client / wall time, each level",
        f"{MAX_CLIENT_CPU:.0%} of a core in a closed loop of a second or more; otherwise a warning",
        "a saturated client measures itself",
        client_cpu,
    ),
    Gate(
        "client_lag",
        "delay of the load client's event loop, each level",
        f"in a level of a second or more with a p99 over {MAX_LAG_MS:g} ms: mean over {MAX_LAG_SHARE:.0%} of the median "
        f"e2e (closed loop) or, where the p99 is over the median ICL, of the median TTFT; over TLS: that p99; a warning from a p99 of {MARKED_LAG_MS:g} ms",
        "times of arrival are the kernel's, but events that arrive while the client is busy get the time of the last of "
        "them, and the next request is sent late, so the load is lower than requested; over TLS times are those of the read",
        client_lag,
    ),
    Gate(
        "schedule",
        "how late requests of an open loop were sent, p99, each rate",
        f"{MAX_LAG_MS:g} ms, with a mean over {MAX_LAG_SHARE:.0%} of the time between requests; a warning from "
        f"{MARKED_SCHEDULE_LAG_MS:g} ms or {MARKED_SCHEDULE_LAG_SHARE:.0%} of the median TTFT",
        "a request rate that is not kept is another rate",
        schedule,
    ),
    Gate(
        "failures",
        "requests that failed / requests measured",
        f"{MAX_FAILURES:.0%}",
        "failures vanish from averages, and a server that rejects requests looks fast",
        failures,
    ),
    Gate(
        "empty_answers",
        "answers without text or without tokens",
        f"any, unless the server reports that the model ended at once: one, or up to {MAX_ENDED_AT_ONCE:.0%}",
        "an empty answer takes no time to generate",
        empty_answers,
    ),
    Gate(
        "prompt_echo",
        "answers that begin with their prompt",
        "any",
        "the prompt's tokens would count as output",
        prompt_echo,
    ),
    Gate(
        "stop_reasons",
        "finish reasons: the model's own end, a stop word, or the requested length",
        f"any other reason, or a length not reached (by the tokenizer's count: by more than a token per answer and "
        f"{MAX_EXCESS:.0%}; a warning below)",
        "shorter answers take less time",
        stop_reasons,
    ),
    Gate(
        "token_count",
        "the server's token count against the tokenizer's, and against max_tokens",
        f"more than max_tokens (by the tokenizer's count: by more than {MAX_EXCESS:.0%}), or fewer than a third of the "
        f"tokenizer's count; a warning from {MAX_MISMATCH:.0%} on",
        "tokens per second are only as good as the tokens",
        token_count,
    ),
    Gate(
        "server_queue",
        "time requests spend in Triton's queues of preprocessing and postprocessing, by its own counters",
        f"-; a warning from {MAX_QUEUE_SHARE:.0%} of the median e2e on",
        "the queue is measured, not the engine",
        server_queue,
    ),
    Gate(
        "roofline",
        f"e2e / n, and TPOT of answers with {MIN_EVENTS} events by themselves after the first, against the time to read the weights "
        "once",
        f"faster, in the median of a level; a CPU's measured bandwidth may be exceeded {CPU_MARGIN:g} times",
        "a dense model without speculation reads all its weights for every token",
        roofline,
    ),
    Gate(
        "kv_cache_reuse",
        "where declared off: TTFT of a new prompt sent a second time / the first time; cached tokens the server "
        "reports",
        f"median below {SURE_REUSE:g} with every prompt below {POSSIBLE_REUSE:g}, by {LEAST_SAVED_MS:g} ms; any cached "
        "token or reused block",
        "a cached prompt costs nothing to prefill",
        kv_cache_reuse,
    ),
    Gate("warmup", "prompts that warm-up and measurement share", "-", "cached prompts are faster", warmup),
    Gate(
        "repeated_prompts",
        "prompts sent more than once in a level",
        "-",
        "a server that reuses their KV cache looks faster",
        repeated_prompts,
    ),
)
"""Every gate, in the order in which findings are told."""
