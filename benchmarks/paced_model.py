"""Triton model of `gateway.py --triton`: the first token after FIRST_S, then each stream at its own pace of PACES_S.

The pace follows from the prompt, so a load takes the same time over every way. Streams of different paces do not stay in
step, as streams of one pace in a closed loop would. Runs in Triton's Python stub.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

FIRST_S = 0.05
PACES_S = (0.025, 0.04)


class TritonPythonModel:
    """Called by Triton's Python stub."""

    def initialize(self, _args: Mapping[str, str]) -> None:
        """Start the thread that sends."""
        self._due: list[tuple[float, int, float, int, Any]] = []
        """When, number, pace, tokens left, sender."""
        self._number = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._send, daemon=True).start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Plan the first token of each request."""
        now_s = time.monotonic()
        for request in requests:
            pace_s = random.Random(_value(request, "text_input")).uniform(*PACES_S)
            self._plan(now_s + FIRST_S, pace_s, _value(request, "max_tokens"), request.get_response_sender())

    def _plan(self, due_s: float, pace_s: float, left: int, sender: Any) -> None:
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (due_s, self._number, pace_s, left, sender))
            self._changed.notify()

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)
                due_s, _, pace_s, left, sender = heapq.heappop(self._due)
            token = [
                pb.Tensor("text_output", np.array([b" a"], np.object_)),
                pb.Tensor("num_output_tokens", np.array([1], np.int32)),
            ]
            sender.send(pb.InferenceResponse(token), flags=0 if left > 1 else pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            if left > 1:
                self._plan(due_s + pace_s, pace_s, left - 1, sender)


def _value(request: Any, name: str) -> Any:
    return pb.get_input_tensor_by_name(request, name).as_numpy().flat[0]
