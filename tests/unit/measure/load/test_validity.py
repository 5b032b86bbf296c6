"""Gates with evidence in separate records. Gates about requests are in test_perf_metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.measure.load.test_perf_metrics import Words, analyze, counted, found, moved, request, write
from trtllm_pipeline.measure.load.metrics import SoFar
from trtllm_pipeline.measure.load.objectives import Objectives


def judged(path: Path, *records: dict[str, Any]) -> dict[str, str]:
    return found(analyze(write(path / "e", *records), Words()))


def answer(at: int, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    """Tokens 10 ms apart, the first after 20 ms."""
    events = [(at + 20 + 10 * index, " a", index + 1) for index in range(tokens)]
    return counted(at, events, max_tokens=3, **changes)


def at_once(**changes: Any) -> dict[str, Any]:
    """Three tokens in one response, after 30 ms."""
    return counted(0, [(30, " a b c", 3)], **{"max_tokens": 3, **changes})


BUSY = [(5.3, 2.9), (3.8, 1.5), (13.6, 1.1), (6.5, 3.2), (4.9, 1.4), (1.4, 1.1), (9.8, 1.0), (2.0, 1.4)]
"""Measured on a busy machine, without a cache."""


def probes(*pairs: tuple[float | None, float | None], cached: int | None = None) -> list[dict[str, Any]]:
    return [
        {"type": "probe", "pair": pair, "send": send, "ttft_ms": ms, "cached_tokens": cached and send, "error": None}
        for pair, times in enumerate(pairs)
        for send, ms in enumerate(times)
    ]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(40, 5), (41, 6), (39, 5), (40, 30)] * 4, {"kv_cache_reuse": "invalid"}),
        (BUSY, {"kv_cache_reuse": "warning"}),
        ([(40, 39), (41, 44), (39, 38), (40, 12)], {}),  # one lucky prompt
        ([(40, 5), (41, 6), (39, 5), (40, 35)], {}),  # one prompt was computed
        ([(1.5, 0.4), (1.4, 0.5)] * 8, {}),  # too quick to tell
        ([(None, None), (40, None)], {"kv_cache_reuse": "warning"}),
    ],
)
def test_a_cache_that_was_declared_off(
    tmp_path: Path, pairs: list[tuple[float | None, float | None]], expected: dict[str, str]
) -> None:
    assert judged(tmp_path, answer(0), *probes(*pairs)) == expected


def test_a_server_that_tells_of_its_cache(tmp_path: Path) -> None:
    assert judged(tmp_path, answer(0), *probes((40, 40), cached=16)) == {"kv_cache_reuse": "invalid"}

    def blocks(start: float | None, end: float | None) -> list[dict[str, Any]]:
        return [{"type": "reused_blocks", "at": at, "blocks": n} for at, n in (("start", start), ("end", end))]

    assert judged(tmp_path, answer(0), *blocks(4, 9)) == {"kv_cache_reuse": "invalid"}
    assert judged(tmp_path, answer(0), *blocks(4, 4)) == {}
    assert judged(tmp_path, answer(0), *blocks(None, None)) == {}


def roofline(pass_ms: float | None) -> dict[str, Any]:
    return {"type": "roofline", "pass_s": pass_ms and pass_ms / 1e3, "weight_bytes": 10**9, "reason": "told"}


@pytest.mark.parametrize(
    ("pass_ms", "tokens", "expected"),
    [
        ([10.1], 9, {"roofline": "invalid"}),  # TPOT is 10 ms
        ([10.1], 8, {}),  # by the whole time 11.25 ms; of 7 gaps nothing is made
        ([11.3], 8, {"roofline": "invalid"}),
        ([30.0, 9.9], 9, {}),  # the faster of two measurements of memory counts
        ([None], 9, {"roofline": "info"}),
    ],
)
def test_no_token_is_faster_than_memory(
    tmp_path: Path, pass_ms: list[float | None], tokens: int, expected: dict[str, str]
) -> None:
    limits = [roofline(ms) for ms in pass_ms]
    assert judged(tmp_path, answer(0, tokens) | {"max_tokens": tokens}, *limits) == expected


def buffered(at: int = 0, apart_ms: float = 0.01) -> dict[str, Any]:
    """Nine tokens in nine events, all after 100 ms."""
    events = [(at + 100 + apart_ms * index, " a", index + 1) for index in range(9)]
    return counted(at, events, max_tokens=9)


def test_a_burst_is_not_a_speed(tmp_path: Path) -> None:
    """A machine that stood still, or a proxy, delivers in one instant what was generated over a longer time."""
    burst = buffered()
    assert judged(tmp_path, burst, roofline(5)) == {"one_response": "warning"}
    assert judged(tmp_path, burst, roofline(12)) == {"one_response": "warning", "roofline": "invalid"}, "11 ms each"
    quick = counted(0, [(100 + index, " a", index + 1) for index in range(9)], max_tokens=9)
    assert judged(tmp_path, quick, roofline(5)) == {"roofline": "invalid"}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([at_once()], {"one_response": "info"}),
        ([at_once(), moved(answer(0, prompt="w"), 100)], {}),  # one of them was streamed
        ([counted(0, [(30, " a", 1)], max_tokens=1)], {}),  # one token has no other response
    ],
)
def test_answers_that_are_not_streamed_have_no_time_between_tokens(
    tmp_path: Path, records: list[dict[str, Any]], expected: dict[str, str]
) -> None:
    result = analyze(write(tmp_path / "e", *records), Words())
    assert found(result) == expected
    (level,) = result["levels"]
    if expected:
        assert level["ttft_ms"]["p50"] == level["e2e_ms"]["p50"] == 30
        assert [level[name]["n"] for name in ("tpot_ms", "itl_ms", "icl_ms")] == [0, 0, 0]
        tools = level["as"].values()
        assert [of[name]["n"] for of in tools for name in ("tpot_ms", "itl_ms") if name in of] == [0, 0, 0, 0]
        assert "TTFT is the end-to-end latency" in result["findings"][0]["message"]


@pytest.mark.parametrize(
    ("apart_ms", "severity"),
    [
        (0, "warning"),
        (0.09, "warning"),  # within 0.8% of the e2e
        (0.11, None),  # 10,000 tokens a second are possible
        (0.13, None),  # more than 1% of the e2e
    ],
)
def test_text_that_arrived_at_once_has_no_time_between_tokens(
    tmp_path: Path, apart_ms: float, severity: str | None
) -> None:
    result = analyze(write(tmp_path / "e", buffered(apart_ms=apart_ms)), Words(), {"tpot": 1})
    (level,) = result["levels"]
    assert found(result) == ({} if severity is None else {"one_response": severity})
    measured = severity is None
    assert [level[name]["n"] for name in ("tpot_ms", "itl_ms", "icl_ms")] == [measured, 8 * measured, 8 * measured]
    assert level["goodput"]["share"] == measured
    if severity:
        (finding,) = result["findings"]
        assert finding["message"].startswith("in 1 of 1 responses, all text arrived at once: ")
        assert "a proxy that buffers" in finding["message"].lower()


@pytest.mark.parametrize(("at_once", "severity"), [(1, "info"), (2, "info"), (3, "warning")])
def test_a_few_responses_that_arrived_at_once_are_counted(tmp_path: Path, at_once: int, severity: str) -> None:
    records = [buffered(at * 200, 0.01 if at < at_once else 10) for at in range(4)]
    result = analyze(write(tmp_path / "e", *records), Words())
    assert found(result)["one_response"] == severity
    assert result["levels"][0]["tpot_ms"]["n"] == 4 - at_once
    assert result["levels"][0]["tpot_ms"]["p50"] == 10


@pytest.mark.parametrize(
    ("record", "share"),
    [
        (at_once(), 0),
        (answer(0), 1),
        (answer(0, 1), 1),  # one token has no time between tokens
        (counted(0, [(30, " Yes", 2)], max_tokens=3, finish_reason="stop"), 1),  # and the end token
        (counted(0, [(30, " Yes it", 2)], max_tokens=3, finish_reason="length"), 0),
    ],
)
def test_what_was_not_measured_meets_no_limit(tmp_path: Path, record: dict[str, Any], share: float) -> None:
    (level,) = analyze(write(tmp_path / "e", record), Words(), {"tpot": 10})["levels"]
    assert level["goodput"]["share"] == share


def test_an_answer_in_one_piece_is_judged_by_its_whole_time(tmp_path: Path) -> None:
    assert judged(tmp_path, at_once(), roofline(11)) == {"one_response": "info", "roofline": "invalid"}
    assert judged(tmp_path, at_once(), roofline(9.9)) == {"one_response": "info"}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (answer(0, finish_reason="length"), {}),
        (answer(0, 2, finish_reason="stop"), {}),
        (answer(0, 2, finish_reason="length"), {"stop_reasons": "invalid"}),
        (answer(0, 2, finish_reason="content_filter"), {"stop_reasons": "invalid"}),
        (answer(0, 2, finish_reason=None), {}),
        (answer(0, 2, finish_reason="tool_calls"), {}),
        (answer(0, 2, finish_reason="function_call"), {}),
        (answer(0, 2, finish_reason="tool_error"), {"stop_reasons": "invalid"}),
    ],
)
def test_answers_end_as_planned(tmp_path: Path, record: dict[str, Any], expected: dict[str, str]) -> None:
    assert judged(tmp_path, record) == expected


def test_events_that_may_hold_several_tokens_are_not_called_a_shorter_answer(tmp_path: Path) -> None:
    records = [
        moved(
            request(0, [(10 * n, " a a") for n in range(1, 9)], max_tokens=16, repeat=at, finish_reason="length"),
            at * 500,
        )
        for at in range(4)
    ]
    path = write(tmp_path / "e", *records)
    (finding,) = [each for each in analyze(path, None)["findings"] if each["check"] == "stop_reasons"]
    assert "4 of 4 responses have fewer content events than requested tokens" in finding["message"]
    assert "8 of 16" in finding["message"]
    assert finding["severity"] == "invalid"


@pytest.mark.parametrize("asked", [{"finish_reason": "length"}, {}])
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([16] * 4, {}),
        ([15] * 4, {}),  # one token for two of the server's
        ([15, 15, 15, 13], {"stop_reasons": "warning"}),
        ([12] * 4, {"stop_reasons": "invalid"}),
        ([8, 16, 16, 16], {"stop_reasons": "invalid"}),
    ],
)
def test_encoding_again_may_find_a_token_less(
    tmp_path: Path, lengths: list[int], expected: dict[str, str], asked: dict[str, str]
) -> None:
    records = [
        moved(request(0, [(10 * n, " a") for n in range(1, tokens + 1)], max_tokens=16, repeat=at, **asked), at * 500)
        for at, tokens in enumerate(lengths)
    ]
    settings = {} if asked else {"extra_inputs": {"ignore_eos": True}}  # the length was fixed instead
    path = write(tmp_path / "e", *records, settings=settings)
    assert found(analyze(path, Words())) == expected


def silent(**changes: Any) -> dict[str, Any]:
    """A response without text."""
    return counted(0, [], **{"max_tokens": 3, "output_tokens": None, **changes})


@pytest.mark.parametrize(
    ("empty", "others", "expected"),
    [
        ([silent(finish_reason="stop")], 9, {"empty_answers": "warning"}),
        ([silent(output_tokens=1)], 9, {"empty_answers": "warning"}),  # its end, and nothing else
        ([silent(finish_reason="stop")], 2, {"empty_answers": "warning"}),  # one of a few says nothing
        ([silent(finish_reason="stop")], 0, {"empty_answers": "invalid"}),
        ([silent(finish_reason="stop")] * 2, 18, {"empty_answers": "warning"}),
        ([silent(finish_reason="stop")] * 2, 17, {"empty_answers": "invalid"}),  # more than every tenth
        ([silent(finish_reason="length")], 9, {"empty_answers": "invalid"}),
        ([silent(output_tokens=3)], 9, {"empty_answers": "invalid"}),
        ([silent()], 99, {"empty_answers": "invalid"}),  # nobody says why
    ],
)
def test_an_empty_answer_has_to_be_the_models_own(
    tmp_path: Path, empty: list[dict[str, Any]], others: int, expected: dict[str, str]
) -> None:
    records = [moved(record, 100 * at) for at, record in enumerate([*empty, *[answer(0)] * others])]
    result = found(analyze(write(tmp_path / "e", *records), Words()))
    assert result.get("empty_answers") == expected["empty_answers"]


def late(first_ms: float, silent: int, **changes: Any) -> dict[str, Any]:
    """An answer whose first text, after 100 ms, follows responses without text."""
    events = [(100 + 10 * index, " a", index + 1) for index in range(3)]
    first_ns = int(first_ms * 1_000_000)
    return counted(0, events, first_byte_ns=first_ns, silent_ns=first_ns, silent=silent, max_tokens=3, **changes)


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([late(50, 4)] * 2, "invalid"),
        ([late(50, 3)] * 2, None),  # a character of four tokens
        ([late(81, 4)] * 2, None),  # right before the text
        ([late(50, 1, unread="hidden")] * 2, "invalid"),
        ([late(81, 1, unread="hidden")] * 2, None),
        ([late(50, 4)] + [answer(0)] * 9, "warning"),  # one of ten
        ([late(50, 4)] * 2 + [answer(0)] * 9, "invalid"),
        ([counted(0, [(100, " a", 1), (110, " b", 2)], role_ns=1)] * 2, None),  # the role long before the text
    ],
)
def test_responses_without_text_long_before_the_first_text(
    tmp_path: Path, records: list[dict[str, Any]], expected: str | None
) -> None:
    result = judged(tmp_path, *(moved(record, 200 * at) for at, record in enumerate(records)))
    assert result.get("unseen_text") == expected


def reported(texts: int, tokens: int, **changes: Any) -> dict[str, Any]:
    """An answer of single words whose tokens the server reports at its end."""
    events = [(20.0 + 10 * index, " a") for index in range(texts)]
    ends = int(events[-1][0] * 1_000_000)
    return request(0, events, usage_ns=ends, output_tokens=tokens, max_tokens=400, finish_reason="stop") | changes


SPOKEN = {"events": [[(400 * at + 20) * 1_000_000, " a" * 20] for at in range(3)], "usage_ns": 820 * 1_000_000}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (reported(20, 39), {"texts": "invalid", "token_count": "warning"}),
        (reported(20, 39, finish_reason="tool_calls"), {"token_count": "warning"}),
        (reported(20, 16), {"texts": "invalid", "token_count": "warning"}),
        (reported(20, 17), {"token_count": "warning"}),
        (reported(3, 60) | SPOKEN | {"end_ns": 900 * 1_000_000}, {}),  # 20 tokens in each text
    ],
)
def test_texts_and_tokens_fit_each_other(tmp_path: Path, record: dict[str, Any], expected: dict[str, str]) -> None:
    assert judged(tmp_path, record) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(48, {}), (49, {"texts": "invalid"}), (16, {"texts": "invalid"})])
def test_without_a_tokenizer_no_token_has_less_than_a_byte(
    tmp_path: Path, tokens: int, expected: dict[str, str]
) -> None:
    assert found(analyze(write(tmp_path / "e", reported(20, tokens)), None)) == expected


def test_a_fixed_length_may_have_tokens_without_text(tmp_path: Path) -> None:
    record = reported(20, 200, max_tokens=200, finish_reason="length")
    path = write(tmp_path / "e", record, settings={"exact_length": True})
    assert found(analyze(path, Words())) == {"token_count": "warning"}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"input_tokens": 4, "total_tokens": 8}, {"usage": "invalid"}),
        ({"input_tokens": 4}, {}),
        ({"input_tokens": 4, "cached_tokens": 4}, {}),
        ({"input_tokens": 4, "cached_tokens": 5}, {"usage": "invalid"}),
        ({"output_tokens": 0}, {"empty_answers": "invalid"}),
    ],
)
def test_counts_of_one_request_fit_each_other(tmp_path: Path, counts: dict[str, int], expected: dict[str, str]) -> None:
    record = request(0, [(20, " a"), (30, " b"), (40, " c")], usage_ns=40_000_000, output_tokens=3) | counts
    assert judged(tmp_path, record) == expected


def test_a_fixed_length_is_that_length(tmp_path: Path) -> None:
    for asked, tokens, expected in (
        ({"ignore_eos": True}, 3, {}),
        ({"ignore_eos": True}, 2, {"stop_reasons": "invalid"}),
        ({"ignore_eos": False}, 2, {}),
    ):
        path = write(tmp_path / "e", answer(0, tokens), settings={"extra_inputs": asked})
        assert found(analyze(path, Words())) == expected


def test_settings_that_are_not_what_was_asked(tmp_path: Path) -> None:
    check = {"setting": "max_batch_size", "asked": 8, "asked_by": "the matrix", "got": 8, "got_from": "the server"}
    assert judged(tmp_path, answer(0), {"type": "settings", "at": "end", "checks": [check]}) == {}
    untold = {"type": "settings", "at": "end", "checks": [check], "unchecked": ["decoupled"]}
    assert judged(tmp_path, answer(0), untold) == {"settings": "info"}
    path = write(tmp_path / "e", answer(0), {"type": "settings", "at": "end", "checks": [{**check, "got": 4}]})
    (finding,) = analyze(path, Words())["findings"]
    assert (finding["check"], finding["severity"]) == ("settings", "invalid")
    assert finding["message"].endswith(
        "than expected: max_batch_size is 4 according to the server, 8 according to the matrix"
    )


@pytest.mark.parametrize(
    ("prompt", "of_server", "words", "expected"),
    [
        ({"input_tokens": 4}, None, True, {}),
        ({"input_tokens": 4}, 4, False, {}),
        ({"input_tokens": 5}, None, True, {"prompt_lengths": "invalid"}),
        ({"input_tokens": 4}, 9, True, {"prompt_lengths": "warning"}),
        ({"input_tokens": 4}, 9, False, {"prompt_lengths": "warning"}),  # the server's count is no tokenizer's
        ({"input_tokens": 4, "images": 1}, 600, True, {"prompt_lengths": "warning"}),
        ({}, 600, True, {}),
    ],
)
def test_prompts_have_the_length_that_they_were_made_for(
    tmp_path: Path, prompt: dict[str, int], of_server: int | None, words: bool, expected: dict[str, str]
) -> None:
    record = answer(0, **({} if of_server is None else {"input_tokens": of_server}))
    path = write(tmp_path / "e", record, prompt=prompt)
    result = found(analyze(path, Words() if words else None))
    assert {check: severity for check, severity in result.items() if check == "prompt_lengths"} == expected


@pytest.mark.parametrize(("sent", "rounds"), [(0, ((False,) * 3,)), (2, ((True, True, False, False, False),))])
def test_what_a_rate_did_not_send_any_more_counts_also_where_it_is_all(
    tmp_path: Path, sent: int, rounds: tuple[tuple[bool, ...], ...]
) -> None:
    rate = {"concurrency": None, "request_rate": 5.0}
    warm = answer(0, phase="warmup", prompt="w", **rate)
    records = [moved(answer(0, **rate), 100 * at) for at in range(1, 1 + sent)]
    unsent = {"type": "unsent", **rate, "repeat": 0, "requests": 3}
    path = write(tmp_path / "e", {"type": "probed", **rate, "repeat": 0}, warm, *records, unsent)
    (probe,) = SoFar(path, Words(), Objectives({"ttft": 100.0})).look().probes  # type: ignore[arg-type]
    assert (probe.rate, probe.rounds) == (5.0, rounds)


def test_each_look_reads_what_is_new_and_tells_what_one_look_at_the_end_would(tmp_path: Path) -> None:
    class Counting(Words):
        texts = 0

        def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any:
            self.texts += 1
            return super().encode(sequence, add_special_tokens=add_special_tokens)

    rate = {"concurrency": None, "request_rate": 5.0}
    records = [moved(request(0, [(20, " a"), (30 + at, " b")], repeat=at), 200 * at) for at in range(6)]
    for at in range(2):
        records += [{"type": "probed", **rate, "repeat": at}, moved(answer(0, **rate, repeat=at), 2000 + 200 * at)]
    objectives, tokenizer = Objectives({"ttft": 100.0}), Counting()
    path = write(tmp_path / "e", *records[:5])
    looking = SoFar(path, tokenizer, objectives)  # type: ignore[arg-type]
    looking.look()
    encoded = tokenizer.texts
    for record in records[5:]:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if record["type"] == "request":
            progress = looking.look()
    assert tokenizer.texts - encoded == 3 * (1 + 2), "each time the new answer, its prompt and an empty text"
    assert progress == SoFar(path, Words(), objectives).look()  # type: ignore[arg-type]
    assert [len(repeats) for repeats in progress.repeats] == [6]
    assert [probe.rounds for probe in progress.probes] == [((True,), (True,))]
    assert progress.most_rps is not None


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("tpot_p50", "this level has no tpot_p50"),
        ("ttft_p99", "a p99 needs 100 requests in each repeat, not 1, so the rule ignored ttft_p99"),
        ("tokens_per_joule", "this level has no tokens_per_joule"),
        ("input_tps", "input_tps has no interval after 1 repeats, not to 3.0%"),
        ("rps", "rps has no interval after 1 repeats, not to 3.0%"),
    ],
)
def test_a_metric_that_did_not_end_the_repeats_is_named(tmp_path: Path, wanted: str, told: str) -> None:
    path = write(tmp_path / "e", answer(0, tokens=1), settings={"stop_when": {wanted: 0.03}})
    result = analyze(path, Words())
    (finding,) = [each for each in result["findings"] if each["check"] == "stop_when"]
    assert finding["severity"] == "warning"
    assert told in finding["message"]


def test_what_failed_a_gate_has_no_headline(tmp_path: Path) -> None:
    result = analyze(write(tmp_path / "e", answer(0, finish_reason="abort")), Words())
    (level,) = result["levels"]
    assert level["headline"] == {"window": None, "reason": "not valid: stop_reasons"}
    assert (level["output_tokens_per_s"], level["requests_per_s"]) == (None, None)
