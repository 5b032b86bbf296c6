"""Admits requests to a model: limits the number in progress and the number waiting, and rejects the others."""

from __future__ import annotations

import asyncio
from collections import deque

from trtllm_pipeline.serve.gateway.api_error import ApiError


class Admission:
    """Places at one model, assigned in order of arrival. A request with several choices takes a place for each."""

    def __init__(self, places: int, queue: int, timeout_s: float) -> None:
        self.places = places
        self.queue = queue
        self.taken = 0
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_enter(self, count: int) -> bool:
        """Take `count` places if they are free and no request waits."""
        if self._waiting or self.taken + count > self.places:
            return False
        self.taken += count
        return True

    async def wait(self, count: int) -> None:
        """Wait for `count` places. Raises ApiError 429 if too many requests wait already, or after a timeout."""
        if len(self._waiting) >= self.queue:
            raise self._busy(f"{self.taken} requests are in progress and {len(self._waiting)} wait", "queue_full")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = (count, turn)
        self._waiting.append(entry)
        # Not wait_for: before Python 3.12, it loses a cancellation that arrives together with the turn.
        timer = loop.call_later(self._timeout_s, self._expire, entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave(count)
            raise
        finally:
            timer.cancel()
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()  # a request behind a larger one may fit

    def _expire(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        if not entry[1].done():
            self._waiting.remove(entry)
            entry[1].set_exception(self._busy(f"no place was free within {self._timeout_s:g} s", "queue_timeout"))
            self._admit()  # now: the time of the request behind it may be over as well

    def leave(self, count: int = 1) -> None:
        self.taken -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.taken + self._waiting[0][0] <= self.places:
            count, turn = self._waiting.popleft()
            if not turn.done():
                self.taken += count
                turn.set_result(None)

    def _busy(self, message: str, reason: str) -> ApiError:
        seconds = max(1, min(30, len(self._waiting) // max(1, self.places)))
        return ApiError(
            429, f"the model is busy: {message}", code="rate_limit_exceeded", retry_after_s=seconds, reason=reason
        )
