from __future__ import annotations

import pytest

from trtllm_pipeline.perf.load import levels, split
from trtllm_pipeline.perf.prompts import Prompt


@pytest.mark.parametrize("count", [2, 3, 4, 28])
def test_warm_up_and_measured_prompts_share_nothing(count: int) -> None:
    prompts = [Prompt(str(number), "text") for number in range(count)]
    warmup, measured = split(prompts)
    assert warmup
    assert measured
    assert {*warmup} | {*measured} == {*prompts}
    assert not {*warmup} & {*measured}


def test_repeats_are_interleaved_and_prompts_recycled() -> None:
    prompts = [Prompt(str(number), "text") for number in range(4)]
    plan = levels(prompts, [1, 4], requests=5, warmup_requests=2, repeats=2)
    assert [(level.concurrency, level.repeat) for level in plan] == [(1, 0), (4, 0), (1, 1), (4, 1)]
    assert [prompt.id for prompt in plan[0].warmup] == ["3", "3"]
    assert [prompt.id for prompt in plan[0].measured] == ["0", "1", "2", "0", "1"]
    # Never fewer than two requests for each one in flight.
    assert len(plan[1].measured) == 8
