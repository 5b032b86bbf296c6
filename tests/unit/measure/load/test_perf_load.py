from __future__ import annotations

from collections import Counter

import pytest

from trtllm_pipeline.measure.load.load import Load, Share, warmup_prompt
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.windows import least_requests


def some(count: int) -> list[Prompt]:
    return [Prompt(str(number), f"prompt number {number}") for number in range(count)]


@pytest.mark.parametrize("warmup_requests", [0, 2, None, 9])
@pytest.mark.parametrize(
    ("count", "requests"), [(1, 5), (2, 3), (4, 8), (5, 64), (28, 64), (28, 28), (28, 10), (28, 7)]
)
def test_every_prompt_is_measured_evenly(count: int, requests: int, warmup_requests: int | None) -> None:
    prompts = some(count)
    load = Load(concurrency=(1, 4), request_rate=(5, 9), requests=requests, warmup_requests=warmup_requests, repeats=5)
    of_load: dict[object, Counter[str]] = {}
    for level in load.levels(prompts):
        for worker in range(3):  # an open loop's numbers by process (a closed loop's are shared round-robin)
            numbers = Share(worker, 3).slots(len(level.planned))
            mine = [level.planned[number].id for number in numbers if number >= len(level.warmup)]
            of_load.setdefault((level.concurrency, level.request_rate), Counter()).update(mine)
    assert len(of_load) == 4
    for measured in of_load.values():
        assert measured.keys() == {prompt.id for prompt in prompts}
        assert max(measured.values()) - min(measured.values()) <= 1
    warm = 8 if warmup_requests is None else warmup_requests
    assert of_load[4, None].total() == 5 * max(requests, least_requests(4, warm))
    assert of_load[None, 5].total() == 5 * requests


@pytest.mark.parametrize("count", [1, 2, 3, 28])
def test_warm_up_and_measured_prompts_share_nothing(count: int) -> None:
    for level in Load(concurrency=(1, 4), requests=40, repeats=2).levels(some(count)):
        assert len(level.warmup) == 2 * (level.concurrency or 0)
        measured = {prompt.text for prompt in level.measured}
        assert not [prompt for prompt in level.warmup if any(text.startswith(prompt.text) for text in measured)]
        assert not {prompt.id for prompt in level.warmup} & {prompt.id for prompt in level.measured}


def test_a_warm_up_prompt_is_a_word_shorter() -> None:
    made = warmup_prompt(Prompt("7", " The capital of France", 5, ("Paris",), ("x",)))
    assert made == Prompt("7 (warm-up)", " capital of France", 5, ("Paris",), ("x",))
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"})
    value = warmup_prompt(Prompt("8", "<s>Be brief. Who are you?", messages=chat))
    assert value.messages == (chat[0], {"role": "user", "content": " are you?"})
    assert value.text == " brief. Who are you?"
    for alone in (Prompt("9", "Hello"), Prompt("9", "<s> Hi", messages=({"role": "user", "content": "Hi"},))):
        assert warmup_prompt(alone) is alone


def test_repeats_are_interleaved_and_prompts_recycled() -> None:
    plan = Load(concurrency=(1, 4), requests=5, warmup_requests=2, repeats=2).levels(some(4))
    assert [(level.concurrency, level.repeat) for level in plan] == [(1, 0), (4, 0), (1, 1), (4, 1)]
    assert [prompt.id for prompt in plan[0].warmup] == ["0 (warm-up)", "1 (warm-up)"]
    assert [prompt.id for prompt in plan[0].measured] == ["0", "1", "2", "3", "0"]
    assert [prompt.id for prompt in plan[2].measured] == ["1", "2", "3", "0", "1"]
    assert len(plan[1].measured) == 14, "three waves, and one request of each slot that the warm-up left empty"
