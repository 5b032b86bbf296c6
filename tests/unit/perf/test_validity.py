"""Gates whose evidence is in records of their own; those about requests are in test_perf_metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.perf.test_perf_metrics import Words, counted, found, write
from trtllm_pipeline.perf.metrics import analyze
from trtllm_pipeline.perf.validity import GATES


def judged(path: Path, *records: dict[str, Any]) -> dict[str, str]:
    return found(analyze(write(path / "e", *records), Words()))


def answer(at: int, tokens: int = 3, **changes: Any) -> dict[str, Any]:
    """Tokens 10 ms apart, the first after 20 ms."""
    events = [(at + 20 + 10 * index, " a", index + 1) for index in range(tokens)]
    return counted(at, events, max_tokens=3, **changes)


def probes(*pairs: tuple[float | None, float | None], cached: int | None = None) -> list[dict[str, Any]]:
    return [
        {"type": "probe", "pair": pair, "send": send, "ttft_ms": ms, "cached_tokens": cached and send, "error": None}
        for pair, times in enumerate(pairs)
        for send, ms in enumerate(times)
    ]


def test_every_gate_says_what_it_does() -> None:
    assert len({gate.id for gate in GATES}) == len(GATES)
    for gate in GATES:
        assert gate.what
        assert gate.limit
        assert gate.why
        assert gate.look.__name__ == gate.id, "one function for each gate, called like it"


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(40, 5), (41, 6), (39, 5), (40, 30)], {"kv_cache_reuse": "invalid"}),
        ([(40, 39), (41, 44), (39, 38), (40, 12)], {}),  # one lucky prompt
        ([(40, 5), (41, 6), (39, 5), (40, 35)], {}),  # one prompt was computed
        ([(1.5, 0.4), (1.4, 0.5), (1.5, 0.4)], {}),  # too quick to tell
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


@pytest.mark.parametrize(
    ("pass_ms", "expected"),
    [
        ([9.9], {}),
        ([10.1], {"roofline": "invalid"}),  # TPOT is 10 ms
        ([30.0, 9.9], {}),  # the faster of two measurements of memory counts
        ([None], {"roofline": "info"}),
    ],
)
def test_no_token_is_faster_than_memory(tmp_path: Path, pass_ms: list[float | None], expected: dict[str, str]) -> None:
    limits = [
        {"type": "roofline", "pass_s": ms and ms / 1e3, "weight_bytes": 10**9, "reason": "told"} for ms in pass_ms
    ]
    assert judged(tmp_path, answer(0), *limits) == expected


def test_an_answer_in_one_piece_is_judged_by_its_whole_time(tmp_path: Path) -> None:
    limit = {"type": "roofline", "pass_s": 0.011, "weight_bytes": 10**9, "reason": "told"}
    whole = counted(0, [(30, " a b c", 3)], max_tokens=3)
    assert judged(tmp_path, whole, limit) == {"roofline": "invalid"}
    assert judged(tmp_path, whole, {**limit, "pass_s": 0.0099}) == {}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (answer(0, finish_reason="length"), {}),
        (answer(0, 2, finish_reason="stop"), {}),
        (answer(0, 2, finish_reason="length"), {"stop_reasons": "invalid"}),
        (answer(0, 2, finish_reason="content_filter"), {"stop_reasons": "invalid"}),
        (answer(0, 2, finish_reason=None), {}),
    ],
)
def test_answers_end_as_planned(tmp_path: Path, record: dict[str, Any], expected: dict[str, str]) -> None:
    assert judged(tmp_path, record) == expected


def test_a_fixed_length_is_that_length(tmp_path: Path) -> None:
    for asked, tokens, expected in (
        (["ignore_eos:true"], 3, {}),
        (["ignore_eos:true"], 2, {"stop_reasons": "invalid"}),
        (["ignore_eos:false"], 2, {}),
    ):
        path = write(tmp_path / "e", answer(0, tokens))
        lines = path.read_text().splitlines()
        lines[0] = json.dumps({**json.loads(lines[0]), "settings": {"extra_inputs": asked}})
        path.write_text("\n".join(lines) + "\n")
        assert found(analyze(path, Words())) == expected


def test_settings_that_are_not_what_was_asked(tmp_path: Path) -> None:
    check = {"setting": "max_batch_size", "asked": 8, "asked_by": "the matrix", "got": 8, "got_from": "the server"}
    assert judged(tmp_path, answer(0), {"type": "settings", "at": "end", "checks": [check]}) == {}
    path = write(tmp_path / "e", answer(0), {"type": "settings", "at": "end", "checks": [{**check, "got": 4}]})
    (finding,) = analyze(path, Words())["findings"]
    assert (finding["check"], finding["severity"]) == ("settings", "invalid")
    assert finding["message"].endswith("asked for: max_batch_size is 4 by the server, 8 by the matrix")


def test_what_failed_a_gate_has_no_headline(tmp_path: Path) -> None:
    result = analyze(write(tmp_path / "e", answer(0, finish_reason="abort")), Words())
    (level,) = result["levels"]
    assert level["headline"] == {"window": None, "reason": "not valid: stop_reasons"}
    assert (level["output_tokens_per_s"], level["requests_per_s"]) == (None, None)
