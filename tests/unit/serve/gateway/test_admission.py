"""Places are given in the order of arrival, never twice, and come back."""

from __future__ import annotations

import asyncio

import pytest

from trtllm_pipeline.serve.gateway.admission import Admission
from trtllm_pipeline.serve.gateway.api_error import ApiError


def test_order_size_and_leaving() -> None:
    async def run() -> None:
        admission = Admission(2, 3, 5.0)
        assert admission.try_enter(2)
        assert not admission.try_enter(1)
        order: list[str] = []

        async def enter(name: str, count: int) -> None:
            await admission.wait(count)
            order.append(name)

        large, small, left = (asyncio.create_task(enter(*each)) for each in (("large", 2), ("small", 1), ("left", 1)))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await admission.wait(1)
        assert (caught.value.status, caught.value.reason) == (429, "queue_full")
        left.cancel()
        admission.leave(1)
        await asyncio.sleep(0)
        assert order == []  # nobody overtakes the large one
        admission.leave(1)
        await asyncio.sleep(0)
        assert (order, admission.taken) == (["large"], 2)
        admission.leave(2)
        await asyncio.gather(large, small)
        assert (order, admission.taken, len(admission._waiting)) == (["large", "small"], 1, 0)
        admission.leave(1)
        assert admission.try_enter(2)

    asyncio.run(run())


def test_who_waits_too_long_is_told_and_the_next_one_comes() -> None:
    async def run() -> None:
        admission = Admission(2, 5, 0.02)
        assert admission.try_enter(1)
        late, next_one = (asyncio.create_task(admission.wait(count)) for count in (2, 1))
        with pytest.raises(ApiError) as caught:
            await late
        assert caught.value.reason == "queue_timeout"
        await next_one
        assert admission.taken == 2

    asyncio.run(run())


def test_who_leaves_in_the_moment_of_getting_a_place_gives_it_back() -> None:
    async def run() -> None:
        admission = Admission(1, 5, 5.0)
        assert admission.try_enter(1)
        waiting = asyncio.create_task(admission.wait(1))
        await asyncio.sleep(0)
        admission.leave(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert admission.taken == 0

    asyncio.run(run())
