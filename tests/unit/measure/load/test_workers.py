"""How many processes a level takes."""

from __future__ import annotations

import pytest

from trtllm_pipeline.measure.load import workers
from trtllm_pipeline.measure.load.load import Load
from trtllm_pipeline.measure.load.prompts import Prompt


@pytest.mark.parametrize(("most", "asked", "expected"), [(3, 8, 3), (3, 2, 2), (None, 8, 8)])
def test_each_process_has_a_place_in_flight(most: int | None, asked: int, expected: int) -> None:
    load = Load(request_rate=(5.0,), requests=4, max_in_flight=most)
    assert workers.wanted(load.level([Prompt("1", "a b")], 0, None, 5.0), asked) == expected


def test_a_rate_that_takes_many_processes_has_as_many_as_may_be_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    rate = 5.0 * workers.REQUESTS_PER_S_PER_WORKER
    load = Load(request_rate=(rate,), requests=4)
    (free,) = load.levels([Prompt("1", "a b")])
    assert workers.wanted(free) == 5
    (held,) = Load(request_rate=(rate,), requests=4, max_in_flight=2).levels([Prompt("1", "a b")])
    assert workers.wanted(held) == 2
