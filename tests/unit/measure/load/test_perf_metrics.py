from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.measure.load import metrics
from trtllm_pipeline.measure.load.objectives import Objectives, of_load, per_request
from trtllm_pipeline.measure.load.requests import tokens_by_event
from trtllm_pipeline.measure.load.result import LoadResult, levels_of
from trtllm_pipeline.show.report.load_tables import overview, to_text
from trtllm_pipeline.show.report.log_choice import measurements_of

MS = 1_000_000


class Words:
    """Every word with its leading space is a token. A special token comes first if requested."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any:
        offsets = [match.span() for match in re.finditer(r"\s*\S+", sequence)]
        return SimpleNamespace(ids=[0] * (len(offsets) + add_special_tokens), offsets=offsets)


def request(sent_ms: float, events: list[tuple[float, str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "request",
        "concurrency": 1,
        "repeat": 0,
        "phase": "measured",
        "slot": 0,
        "prompt": "p",
        "max_tokens": 10,
        "scheduled_ns": int(sent_ms * MS),
        "sent_ns": int(sent_ms * MS),
        "first_byte_ns": int(events[0][0] * MS) if events else None,
        "events": [[int(at * MS), text] for at, text in events],
        "end_ns": int((events[-1][0] if events else sent_ms) * MS) + 1,
        "error": None,
        **changes,
    }


def counted(sent_ms: float, events: list[tuple[float, str, int | None]], **changes: Any) -> dict[str, Any]:
    """A request to a server that counts: events with the tokens so far."""
    record = request(sent_ms, [(at, text) for at, text, _ in events])
    record["events"] = [[int(at * MS), text, tokens] for at, text, tokens in events]
    return {**record, "output_tokens": events[-1][2] if events else 0, **changes}


def moved(record: dict[str, Any], ms: float) -> dict[str, Any]:
    """The same request, later."""
    times = {name: value + int(ms * MS) for name, value in record.items() if name.endswith("_ns") and value is not None}
    return {**record, **times, "events": [[at + int(ms * MS), *rest] for at, *rest in record["events"]]}


ALIVE = {"type": "server", "pid": 5, "since": 9, "ready": True}


def write(
    path: Path,
    *records: dict[str, Any],
    server: tuple[dict[str, Any], ...] = ({**ALIVE, "at": "start"}, {**ALIVE, "at": "end"}),
    prompt: dict[str, Any] | None = None,
    **header: Any,
) -> Path:
    """An event file with `records`. `prompt` and `header` are further keys of the prompt "p" and of the header."""
    everything = [
        {"type": "header", "schema": 1, "protocol": "grpc", "model": "ensemble", "settings": {}, **header},
        {"type": "prompt", "id": "p", "text": "three word prompt", **(prompt or {})},
        {"type": "prompt", "id": "w", "text": "warm"},
        *server,
        *records,
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in everything), encoding="utf-8")
    return path


def analyze(events: Path, tokenizer: Any, limits: dict[str, float] | None = None) -> Any:
    """The content of perf.json."""
    return json.loads(json.dumps(metrics.analyze(events, tokenizer, Objectives(limits or {})).to_json()))


def found(result: dict[str, Any]) -> dict[str, str]:
    """Check -> the worst that was found."""
    findings = sorted(result["findings"], key=lambda finding: ("info", "warning", "invalid").index(finding["severity"]))
    return {finding["check"]: finding["severity"] for finding in findings}


def test_a_token_belongs_to_the_event_with_its_last_character() -> None:
    # "ab cd" in four events; the second token " cd" is complete with the last one.
    assert tokens_by_event(["a", "b ", "c", "d"], [(0, 2), (2, 5)]) == (0, 1, 0, 1)
    # Two tokens that make up one character share its offsets.
    assert tokens_by_event(["é"], [(0, 1), (0, 1)]) == (2,)
    assert tokens_by_event([], []) == ()


def test_every_metric_of_a_known_timeline(tmp_path: Path) -> None:
    events = write(
        tmp_path / "e",
        # 100 ms to the first event with two tokens, then one token after 50 ms, then two after 60 ms.
        request(0, [(100, " a b"), (150, " c"), (210, " d e")]),
        request(300, [(400, " a")]),
    )
    result = analyze(events, Words())
    assert result["valid"]
    (level,) = result["levels"]
    assert (level["requests"], level["failures"]) == (2, 0)
    assert level["ttft_ms"]["n"] == 2
    assert level["ttft_ms"]["mean"] == 100
    assert (level["tpot_ms"]["n"], level["tpot_ms"]["mean"]) == (1, round(110 / 3, 3))
    assert (level["itl_ms"]["n"], level["itl_ms"]["min"], level["itl_ms"]["max"]) == (3, 30, 50)
    assert (level["icl_ms"]["min"], level["icl_ms"]["max"]) == (50, 60)
    assert (level["e2e_ms"]["min"], level["e2e_ms"]["max"]) == (100, 210)
    assert level["duration_s"] == 0.4
    assert (level["input_tokens"], level["output_tokens"]) == (8, 6)
    assert (level["input_tokens_per_s"], level["output_tokens_per_s"], level["requests_per_s"]) == (20, 15, 5)
    assert level["headline"]["window"] == "whole"
    assert "steady window of 0.1 s holds 1.0 waves of requests, fewer than 3" in level["headline"]["reason"]
    assert level["tokens_per_event"] == 1.5
    assert analyze(events, Words()) == result


def test_a_gap_without_a_token_is_added_to_the_next(tmp_path: Path) -> None:
    # "bc" comes in two events: its token is there with the second, 30 + 50 ms after the last one.
    events = write(tmp_path / "e", request(0, [(100, " a"), (130, " b"), (180, "c")]))
    (level,) = analyze(events, Words())["levels"]
    assert (level["itl_ms"]["n"], level["itl_ms"]["max"]) == (1, 80)
    assert level["icl_ms"]["n"] == 2


def test_warm_up_is_left_out_of_everything_but_the_steady_window(tmp_path: Path) -> None:
    events = write(
        tmp_path / "e",
        request(0, [(10, " x"), (99, " y z")], phase="warmup", prompt="w", slot=0, concurrency=2),
        request(0, [(10, " x"), (149, " y z")], phase="warmup", prompt="w", slot=1, concurrency=2),
        *(request(100 * at, [(100 * at + 99, " a")], slot=0, concurrency=2) for at in range(1, 5)),
        *(request(100 * at + 50, [(100 * at + 149, " b")], slot=1, concurrency=2) for at in range(1, 5)),
    )
    (level,) = analyze(events, Words())["levels"]
    assert level["requests"] == level["ttft_ms"]["n"] == 8
    assert level["ttft_ms"]["max"] == 99
    steady, whole = level["repeats"][0]["steady"], level["repeats"][0]["whole"]
    # From the first measured sending until the first slot has no other request: eight are sent, two of them with 50 ms left.
    assert (steady["duration_s"], steady["waves"]) == (0.399, 4)
    assert (steady["output_tokens"], steady["requests"]) == (9, 8), "two tokens of the warm-up are in it"
    assert (whole["duration_s"], whole["output_tokens"], whole["requests"]) == (0.449, 8, 8)
    assert level["headline"] == {
        "window": "steady",
        "reason": "every repeat has a steady window of 3 waves of requests or more",
    }
    assert level["requests_per_s"] == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize(
    ("record", "check"),
    [
        (request(0, []), "empty_answers"),
        # The server's counts: more than requested, none for a text, one for a text that cannot be one token.
        (counted(0, [(10, " a b", 11)]), "token_count"),
        (counted(0, [(10, " a", 0)]), "empty_answers"),
        (counted(0, [], output_tokens=5), "empty_answers"),
        (counted(0, [(10, " a b c d", 1)]), "token_count"),
    ],
)
def test_the_gate_catches(tmp_path: Path, record: dict[str, Any], check: str) -> None:
    result = analyze(write(tmp_path / "e", record), Words())
    assert not result["valid"]
    assert found(result)[check] == "invalid"


def test_the_servers_counts_are_the_tokens(tmp_path: Path) -> None:
    # Three tokens by the first content event (a character was held back), one without text after the last.
    record = counted(0, [(100, " a", 3), (150, " b c", 4), (210, " d", 6)], output_tokens=7)
    result = analyze(write(tmp_path / "e", record), Words())
    (level,) = result["levels"]
    assert result["valid"]
    assert level["output_tokens"] == 7
    assert (level["tpot_ms"]["n"], level["tpot_ms"]["mean"]) == (1, round(110 / 3, 3))
    assert (level["itl_ms"]["n"], level["itl_ms"]["min"], level["itl_ms"]["max"]) == (3, 30, 50)
    assert level["tokens_per_event"] == 2
    assert result["token_count"] == {
        "source": "server",
        "server": 7,
        "encoded_again": 4,
        "events": 3,
        "mismatch": round(3 / 7, 6),
    }
    assert found(result) == {"token_count": "warning"}
    assert "counts 7 output tokens, encoding the texts again gives 4" in result["findings"][0]["message"]


@pytest.mark.parametrize(("off", "expected"), [(0, None), (1, None), (2, "warning")])
def test_counts_may_differ_by_two_percent(tmp_path: Path, off: int, expected: str | None) -> None:
    text, tokens = " a" * 5, [6] * off + [5] * (10 - off)  # 50 words
    records = [counted(i * 10, [(i * 10 + 5, text, count)]) for i, count in enumerate(tokens)]
    result = analyze(write(tmp_path / "e", *records), Words())
    assert result["valid"]
    assert found(result).get("token_count") == expected


@pytest.mark.parametrize(("over", "expected"), [(2, None), (4, "warning"), (6, "invalid")])
def test_encoding_again_may_give_a_few_tokens_too_many(tmp_path: Path, over: int, expected: str | None) -> None:
    records = [request(i * 10, [(i * 10 + 5, " a" * (11 if i < over else 10))]) for i in range(10)]
    result = analyze(write(tmp_path / "e", *records), Words())
    assert found(result).get("token_count") == expected
    assert result["token_count"] == {
        "source": "encoded_again",
        "server": None,
        "encoded_again": 100 + over,
        "events": 10,
        "mismatch": None,
    }


def test_one_answer_without_the_servers_count_has_all_encoded_again(tmp_path: Path) -> None:
    silent = counted(300, [(400, " a", None)], output_tokens=None)
    result = analyze(write(tmp_path / "e", counted(0, [(10, " a b", 5)]), silent), Words())
    assert result["token_count"]["source"] == "encoded_again"
    assert result["levels"][0]["output_tokens"] == 3
    assert found(result)["token_count"] == "warning"
    failed = counted(300, [], output_tokens=None, error="boom", phase="warmup", prompt="w")
    assert analyze(write(tmp_path / "f", counted(0, [(10, " a b", 2)]), failed), Words())["token_count"]["server"] == 2


@pytest.mark.parametrize(
    "end",
    [
        {**ALIVE, "at": "end", "since": None},
        {**ALIVE, "at": "end", "ready": False},
        None,
    ],
)
def test_the_server_must_live_through_the_run(tmp_path: Path, end: dict[str, Any] | None) -> None:
    server = ({**ALIVE, "at": "start"}, *([end] if end else []))
    result = analyze(write(tmp_path / "e", request(0, [(1, " a")]), server=server), Words())
    assert not result["valid"]
    assert found(result)["server"] == "invalid"


def client(*, cpu: float = 0.5, wall_ms: int = 2000, lag_ms: tuple[float, ...] = (1,) * 100) -> dict[str, Any]:
    """A client record with 100 lag samples."""
    return {
        "type": "client",
        "concurrency": 1,
        "repeat": 0,
        "wall_ns": wall_ms * MS,
        "cpu_ns": int(cpu * wall_ms * MS),
        "lag_ns": [int(lag * MS) for lag in lag_ms],
    }


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (client(lag_ms=(0.1,) * 98 + (6,) * 2), {"client_lag": "warning"}),
        (
            client(lag_ms=(0.1,) * 98 + (200,) * 2),
            {"client_lag": "warning"},
        ),  # now and then, and the kernel's times hold
        (client(lag_ms=(9,) * 100), {"client_lag": "warning"}),  # 9% of a request's 100 ms
        (client(lag_ms=(11,) * 100), {"client_lag": "warning"}),  # a thinner load, though never by much
        (client(lag_ms=(5,) * 90 + (80,) * 10), {"client_lag": "invalid"}),
        (client(lag_ms=(5,) * 90 + (80,) * 10, wall_ms=900), {"client_lag": "warning"}),  # too short to tell
    ],
)
def test_the_client_must_not_be_in_the_way(tmp_path: Path, record: dict[str, Any], expected: dict[str, str]) -> None:
    result = analyze(write(tmp_path / "e", request(0, [(50, " a"), (100, " b")]), record), Words())
    assert found(result) == expected


def test_how_much_lower_a_late_client_makes_the_load(tmp_path: Path) -> None:
    late = client(lag_ms=(300,) * 100)
    result = analyze(write(tmp_path / "e", request(0, [(50, " a"), (100, " b")]), late), Words())
    (finding,) = [each for each in result["findings"] if each["check"] == "client_lag"]
    assert "300.0 ms on average, so the load was about 75% lower: requests took 100.0 ms" in finding["message"]


LATE = (4,) * 98 + (200,) * 2
"""8 ms on average."""


@pytest.mark.parametrize(
    ("events", "late", "expected"),
    [
        ([(50, " a"), *((60 + 10 * index, " b") for index in range(90))], client(lag_ms=LATE), "invalid"),
        ([(50, " a"), *((60 + 10 * index, " b") for index in range(90))], client(lag_ms=LATE, wall_ms=900), "warning"),
        (
            [(90, " a"), *((100 + 10 * index, " b") for index in range(90))],
            client(lag_ms=LATE),
            "warning",
        ),  # 8.8% of it
        ([(50, " a"), (300, " b"), (550, " c"), (800, " d")], client(lag_ms=LATE), "warning"),  # an event a read
        ([(500, " a")], client(lag_ms=LATE), "warning"),  # without a gap
    ],
)
def test_events_that_come_together_are_moved(
    tmp_path: Path, events: list[tuple[float, str]], late: dict[str, Any], expected: str
) -> None:
    for load in ({}, {"concurrency": None, "request_rate": 2.0}):
        record = request(0, events, max_tokens=100, **load)
        result = analyze(write(tmp_path / "e", record, {**late, **load}), Words())
        assert found(result) == {"client_lag": expected}


def test_the_schedule_judges_an_open_loop_not_the_processor_time(tmp_path: Path) -> None:
    load = {"concurrency": None, "request_rate": 2.0}
    result = analyze(write(tmp_path / "e", request(0, [(50, " a")], **load), {**client(cpu=0.9), **load}), Words())
    assert found(result) == {"client_cpu": "warning"}


@pytest.mark.parametrize(("late_ms", "severity"), [(4, None), (40, "warning"), (60, "invalid")])
def test_over_tls_a_late_read_is_a_late_time(tmp_path: Path, late_ms: float, severity: str | None) -> None:
    records = request(0, [(50, " a"), (10_000, " b")]), client(lag_ms=(late_ms,) * 100)
    path = write(tmp_path / "e", *records, tls=True)
    assert found(analyze(path, Words())).get("client_lag") == severity


def due(scheduled_ms: float, sent_ms: float, events: list[tuple[float, str]], **changes: Any) -> dict[str, Any]:
    """A request of an open loop."""
    scheduled = {"concurrency": None, "request_rate": 10.0, "scheduled_ns": int(scheduled_ms * MS)}
    return {**request(sent_ms, events), **scheduled, **changes}


def test_an_open_loop_counts_from_the_schedule_too(tmp_path: Path) -> None:
    events = write(
        tmp_path / "e",
        due(0, 0, [(20, " a"), (30, " b")]),
        due(100, 104, [(124, " a"), (134, " b")]),
        due(200, 230, [(250, " a"), (260, " b")]),
    )
    result = analyze(events, Words(), {"ttft": 25})
    (level,) = result["levels"]
    assert (level["concurrency"], level["request_rate"]) == (None, 10.0)
    assert level["ttft_ms"]["max"] == 20, "from sending"
    assert level["schedule"]["ttft_from_schedule_ms"]["max"] == 50
    assert level["schedule"]["response_ms"]["max"] == 60
    assert level["schedule"]["lag_ms"]["max"] == 30
    assert level["schedule"]["achieved_rate"] == round(2 / 0.23, 3)
    assert level["schedule"]["most_in_flight"] == 1
    assert level["goodput"]["share"] == round(2 / 3, 6), "who waited for the client has waited"
    assert level["repeats"][0]["steady"]["duration_s"] == 0.2, "from 30 ms, a request's time, to the last sending"
    assert level["repeats"][0]["active"]["duration_s"] == pytest.approx(0.09, abs=1e-6)
    (finding,) = [finding for finding in result["findings"] if finding["check"] == "schedule"]
    assert (finding["severity"], finding["concurrency"], finding["request_rate"]) == ("warning", None, 10.0)


def test_limits_of_an_open_loop_count_the_wait_for_a_place(tmp_path: Path) -> None:
    """Requests are due every 10 ms and get a place every 40 ms."""
    held = (
        due(10 * at, 40 * at, [(40 * at + 20, " a"), (40 * at + 30, " b")], held_ns=30 * at * MS) for at in range(10)
    )
    slos = of_load("ttft_p50=30ms,ttft_p99=30ms,e2e_p50=50ms,tpot_p50=30ms,ttft=30ms")
    result = metrics.analyze(write(tmp_path / "e", *held), Words(), slos)
    (level,) = result.levels
    assert [each.missed for each in level.details.objectives] == [
        "ttft_p50 155 ms > 30 ms from the schedule",
        "ttft_p99 290 ms > 30 ms from the schedule (the maximum: 10 requests, a p99 needs 100)",
        "e2e_p50 165 ms > 50 ms from the schedule",
        None,
    ]
    assert level.details.objectives[0].value == 155
    words = "from the schedule, with the wait to be sent: TTFT p50 155.00 ms, p90 263.00 ms, e2e p50 165.00 ms, p90 273.00 ms"
    assert f"\n10 requests/s {words}\n" in to_text(result)
    for again in (LoadResult.read(json.loads(json.dumps(result.to_json()))).levels, levels_of([level.to_json()])):
        assert [each.missed(slo) for each in again for slo in slos.of_level] == [
            each.missed for each in level.details.objectives
        ]
        assert [each.schedule for each in again] == [level.schedule]
    on_time = (due(100 * at, 100 * at, [(100 * at + 20, " a"), (100 * at + 40, " b")]) for at in range(10))
    result = metrics.analyze(write(tmp_path / "f", *on_time), Words(), slos)
    assert "objective missed" not in to_text(result)
    assert "with the wait to be sent" not in to_text(result)


def test_one_late_request_does_not_make_another_load(tmp_path: Path) -> None:
    sent = [(number * 100, number * 100 + 80 * (number == 7)) for number in range(20)]
    result = analyze(write(tmp_path / "e", *(due(at, late, [(late + 9, " a")]) for at, late in sent)), Words())
    (finding,) = [finding for finding in result["findings"] if finding["check"] == "schedule"]
    assert (finding["severity"], finding["request_rate"]) == ("warning", 10.0)


def test_goodput_counts_failures_against(tmp_path: Path) -> None:
    events = write(
        tmp_path / "e",
        request(0, [(10, " a"), (20, " b"), (30, " c")]),
        request(40, [(50, " a"), (90, " b"), (130, " c")]),
        request(140, [(150, " a")], error="gone"),
        request(160, [(170, " a")]),
    )
    (level,) = analyze(events, Words(), {"ttft": 300, "tpot": 15})["levels"]
    assert (level["requests"], level["failures"], level["ttft_ms"]["n"]) == (4, 1, 3)
    # Slow tokens miss, one without a TPOT cannot.
    assert level["goodput"]["objectives_ms"] == {"ttft": 300, "tpot": 15}
    assert level["goodput"]["share"] == 0.5


@pytest.mark.parametrize(("waves", "known"), [(3, False), (8, True)])
def test_waves_of_a_server_are_not_noise(tmp_path: Path, waves: int, known: bool) -> None:
    """Four requests in step, all of whose tokens come at their end: a rate without noise has a narrow interval, or none."""
    records = [
        request(100 * wave, [(100 * wave + 99, " a b c d")], slot=slot, concurrency=4)
        for wave in range(waves + 2)
        for slot in range(4)
    ]
    (level,) = analyze(write(tmp_path / "e", *records), Words())["levels"]
    interval = level["intervals"].get("output_tps")
    assert (interval is not None) is known
    if interval:
        assert interval == pytest.approx([level["output_tokens_per_s"]] * 2, rel=0.1)


def test_goodput_has_rates_if_the_measurement_is_valid(tmp_path: Path) -> None:
    fast = request(0, [(10, " a"), (20, " b"), (30, " c")])
    slow = request(40, [(50, " a"), (90, " b"), (130, " c")])
    for requests, rates in (((fast, slow), (7.692, 23.077)), ((fast, {**slow, "error": "gone"}), (None, None))):
        result = metrics.analyze(write(tmp_path / "e", *requests), Words(), of_load("tpot=15ms"))
        goodput = result.levels[0].goodput
        assert goodput.share == 0.5
        assert (goodput.requests_per_s, goodput.output_tokens_per_s) == rates
        assert "goodput_output_tokens_per_s" in to_text(result)


def test_a_level_meets_its_objectives_or_says_by_how_much_not(tmp_path: Path) -> None:
    events = write(tmp_path / "e", request(0, [(10, " a"), (20, " b"), (30, " c")]))
    result = metrics.analyze(events, Words(), of_load("ttft=0.1s,ttft_p99=20ms,e2e_p50=20ms,output_tps=200"))
    (level,) = json.loads(json.dumps(result.to_json()))["levels"]
    assert level["objectives"] == [
        {"metric": "ttft_p99", "limit": 20.0, "value": 10.0, "missed": None},
        {"metric": "e2e_p50", "limit": 20.0, "value": 30.0, "missed": "e2e_p50 30 ms > 20 ms"},
        {"metric": "output_tps", "limit": 200.0, "value": 100.0, "missed": "output_tps 100/s < 200/s"},
    ]
    assert level["goodput"]["objectives_ms"] == {"ttft": 100.0}
    assert "objective missed: e2e_p50 30 ms > 20 ms" in to_text(result)
    refused = metrics.analyze(
        write(tmp_path / "f", request(0, [(9, " a")], error="boom")), None, of_load("output_tps=1")
    )
    assert refused.levels[0].details.objectives[0].missed == "not judged, since the measurement is not valid: failures"
    assert "\nno rates (not valid: " in to_text(refused)
    assert "rates use the window" not in to_text(refused)
    for text in ("ttft<3", "ttft_p42=3ms", "output_tps=3ms", "ttft=0"):
        with pytest.raises(UsageError, match="is not an objective"):
            of_load(text)
    with pytest.raises(UsageError, match="not ttft_p99") as caught:
        per_request("ttft_p99=300ms")
    assert str(caught.value.hint).startswith("write ttft=300ms; bench load,")


def test_the_log_of_a_load_run_is_followed_by_what_it_measured(tmp_path: Path) -> None:
    assert measurements_of(tmp_path / "log") == ()
    (tmp_path / "out").mkdir()
    events = write(tmp_path / "e", request(0, [(10, " a"), (20, " b"), (30, " c")]))
    (tmp_path / "out" / "perf.json").write_text(json.dumps(analyze(events, Words(), {"ttft": 5})))
    head, row = overview(measurements_of(tmp_path / "log")).splitlines()
    assert head.split()[:3] == ["load", "requests", "failed"]
    assert row.split()[:6] == ["concurrency", "1", "1", "0", "10.00", "-"], "no p99 of one request"
    assert row.split()[-1] == "0.00", "goodput"


@pytest.mark.parametrize("width", [80, 100, 150])
def test_tables_fit_the_terminal(tmp_path: Path, width: int) -> None:
    records = [request(1000 * at, [(1000 * at + 500, " a"), (1000 * at + 900, " b")]) for at in range(9)]
    result = metrics.analyze(write(tmp_path / "e", *records), Words(), of_load("ttft=300ms,tpot=40ms"))
    lines = to_text(result, width).splitlines()
    assert max(map(len, lines)) <= width
    head = next(line for line in lines if line.startswith("load "))
    assert all(name in head for name in ("failed", "TTFT p50 ms", "TPOT p50 ms", "out tokens/s", "goodput"))
    assert ("in tokens/s" in head) is (width == 150)
    assert ("TTFT p99 ms" in head) is (width > 80)
    assert any(line.startswith("A wider terminal also shows in tokens/s") for line in lines) is (width < 150)
    assert "A wider terminal" not in to_text(result), "a file has room"
    without_goodput = to_text(metrics.analyze(tmp_path / "e", Words()), width)
    assert "TTFT p99 ms" in next(line for line in without_goodput.splitlines() if line.startswith("load "))


def test_goodput_and_limits_of_the_level_are_told_apart(tmp_path: Path) -> None:
    """Every request misses its limit, and the level meets its own."""
    result = metrics.analyze(
        write(tmp_path / "e", request(0, [(10, " a")])), Words(), of_load("ttft=5ms,ttft_p50=20ms")
    )
    head, row = overview(result.levels).splitlines()
    assert head.endswith("goodput  level SLOs")
    assert row.split()[-2:] == ["0.00", "met"]


def test_the_same_events_in_the_words_of_other_tools(tmp_path: Path) -> None:
    role = {"first_byte_ns": 40 * MS, "first_event_ns": 40 * MS, "role_ns": 40 * MS, "end_ns": 400 * MS}
    (level,) = analyze(write(tmp_path / "e", request(0, [(100, " a b"), (160, " c"), (220, " d")], **role)), Words())[
        "levels"
    ]
    tools = level["as"]
    assert level["tpot_ms"]["mean"] == 60, "two tokens after the first event"
    assert (tools["genai_perf"]["ttft_ms"]["mean"], tools["genai_perf"]["itl_ms"]["mean"]) == (100, 40)
    assert tools["genai_perf"]["output_tokens_per_s"] == round(4 / 0.22, 3)
    assert (tools["vllm"]["ttft_ms"]["mean"], tools["vllm"]["tpot_ms"]["mean"]) == (40, 60)
    assert tools["vllm"]["itl_ms"]["n"] == 3, "the message without text starts a gap"
    # Special tokens are counted, and the end of the stream is waited for: (400 - 40) / (5 - 1).
    assert tools["llm_perf"]["itl_ms"]["mean"] == 90
    assert tools["llm_perf"]["output_tokens_per_s"] == round(5 / 0.4, 3)


USAGE = {
    "usage_ns": 300 * MS,
    "end_ns": 300 * MS,
    "output_tokens": 7,
    "input_tokens": 11,
    "finish_reason": "stop",
    "cached_tokens": 8,
}


def test_usage_is_the_servers_count_and_events_share_it(tmp_path: Path) -> None:
    events = write(tmp_path / "e", request(0, [(100, " aaa"), (200, " bbbb cc")], **USAGE))
    result = analyze(events, Words())
    (level,) = result["levels"]
    assert result["token_count"] == {
        "source": "server",
        "server": 7,
        "encoded_again": 3,
        "events": 2,
        "mismatch": round(4 / 7, 6),
    }
    assert (level["output_tokens"], level["cached_input_tokens"], level["finish_reasons"]) == (7, 8, {"stop": 1})
    assert level["tpot_ms"]["mean"] == 25, "six tokens over three words: two, then four. The seventh is the end token"
    blind = analyze(events, None)
    (level,) = blind["levels"]
    assert (blind["token_count"]["source"], blind["token_count"]["encoded_again"]) == ("server", None)
    assert (level["input_tokens"], level["output_tokens"]) == (11, 7)
    assert level["tpot_ms"]["mean"] == 20, "seven tokens over twelve characters: two, then five"
    assert set(level["as"]) == {"vllm"}, "without a tokenizer, tools that encode are left out"


def test_usage_below_what_encoding_gives_never_makes_negative_tokens(tmp_path: Path) -> None:
    (level,) = analyze(
        write(tmp_path / "e", request(0, [(1, " a b"), (2, " c d"), (3, " e")], **{**USAGE, "output_tokens": 3})),
        Words(),
    )["levels"]
    assert level["output_tokens"] == 3
    assert level["itl_ms"]["n"] == 2


@pytest.mark.parametrize("tokens", [[1, 1, 1, 1], [2, 1, 3, 2], [1, 0, 0, 1]])
@pytest.mark.parametrize(("total", "reason"), [(4, "length"), (4, "stop"), (5, "stop")])
def test_as_many_events_as_tokens_have_one_each(tmp_path: Path, tokens: list[int], total: int, reason: str) -> None:
    """Whatever the tokenizer makes of their texts. Some servers also count the end token."""
    texts = [" a" * count or "a" for count in tokens]
    record = request(0, [(10 * at, text) for at, text in enumerate(texts, 1)])
    usage = {"usage_ns": 40 * MS, "output_tokens": total, "finish_reason": reason}
    (level,) = analyze(write(tmp_path / "e", record | usage), Words())["levels"]
    assert (level["output_tokens"], level["tpot_ms"]["mean"]) == (total, 10)
    assert (level["itl_ms"]["n"], level["itl_ms"]["min"], level["itl_ms"]["max"]) == (3, 10, 10)


def test_tokens_that_a_tokenizer_counts_otherwise_are_shared_by_its_counts(tmp_path: Path) -> None:
    usage = {"usage_ns": 30 * MS, "output_tokens": 12, "finish_reason": "length"}
    record = request(0, [(10, " a b"), (20, " c d"), (30, " e f")], max_tokens=12) | usage
    (level,) = analyze(write(tmp_path / "e", record), Words())["levels"]
    assert (level["tpot_ms"]["mean"], level["itl_ms"]["n"]) == (2.5, 8)


def test_without_any_count_events_are_taken_for_tokens_and_that_is_told(tmp_path: Path) -> None:
    result = analyze(write(tmp_path / "e", request(0, [(100, " a b"), (150, " c")])), None)
    assert result["token_count"]["source"] == "events"
    assert found(result)["token_count"] == "warning"
    (level,) = result["levels"]
    assert (level["output_tokens"], level["input_tokens"], level["input_tokens_per_s"]) == (2, None, None)


def test_thinking_is_content_but_no_answer(tmp_path: Path) -> None:
    thinking = request(0, [(10, " hm"), (20, " so"), (70, " yes")])
    thinking["events"] = [[*event, None, True] for event in thinking["events"][:2]] + [thinking["events"][2]]
    (level,) = analyze(write(tmp_path / "e", thinking, request(100, [(130, " no")])), Words())["levels"]
    assert level["ttft_ms"]["min"] == 10
    assert (level["ttfa_ms"]["n"], level["ttfa_ms"]["mean"]) == (1, 70)
    assert level["stall_ms"]["max"] == 50


def test_triton_and_gpus_stand_beside_their_level(tmp_path: Path) -> None:
    place = {"concurrency": 1, "request_rate": None, "repeat": 0}
    triton = {"type": "triton", **place, "models": {"m": {"requests": 2, "queue_us": 3000}}}
    gpu = {"type": "gpu", **place, "devices": [{"name": "G", "uuid": "u", "samples": [[0, 10.0, 1.0, 2.0, 3.0]]}]}
    (level,) = analyze(write(tmp_path / "e", request(0, [(1, " a")]), triton, gpu), Words())["levels"]
    assert level["triton"] == [{"repeat": 0, "of": {"m": {"requests": 2, "queue_ms": 1.5}}}]
    assert level["gpu"][0]["of"][0]["power_w"] == 10.0


def test_accepted_drafts_are_a_share_of_all_that_were_drafted(tmp_path: Path) -> None:
    place = {"concurrency": 1, "request_rate": None}
    records = [
        {"type": "speculation", **place, "repeat": repeat, "drafted_tokens": drafted, "accepted_tokens": accepted}
        for repeat, (drafted, accepted) in enumerate(((30, 20), (10, 0)))
    ]
    (level,) = analyze(write(tmp_path / "e", request(0, [(1, " a")]), *records), Words())["levels"]
    assert level["acceptance"] == 0.5
    (level,) = analyze(write(tmp_path / "f", request(0, [(1, " a")])), Words())["levels"]
    assert "acceptance" not in level
    (level,) = analyze(write(tmp_path / "g", request(0, [(1, " a")]), {**records[0], "drafted_tokens": 0}), Words())[
        "levels"
    ]
    assert "acceptance" not in level


def test_triton_tells_of_each_answer_what_was_accepted(tmp_path: Path) -> None:
    records = [
        {**request(start, [(start + 1, " a")]), "drafted_tokens": drafted, "accepted_tokens": accepted}
        for start, drafted, accepted in ((0, 30, 20), (100, 10, 0))
    ]
    (level,) = analyze(write(tmp_path / "e", *records), Words())["levels"]
    assert level["acceptance"] == 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"concurrency": [1]}, ""),
        ({"request_rate": [2.0], "request_distribution": "poisson"}, "; arrivals poisson"),
        (
            {"request_rate": [2.0], "request_distribution": "gamma", "burstiness": 0.5},
            "; arrivals gamma, burstiness 0.5",
        ),
    ],
)
def test_the_load_names_its_arrivals(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "e", request(0, [(10, " a")]), settings=settings)
    (load,) = [line for line in to_text(metrics.analyze(path, Words())).splitlines() if line.startswith("load: ")]
    assert load == f"load: not recorded{words}"
