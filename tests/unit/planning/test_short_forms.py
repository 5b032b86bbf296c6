from __future__ import annotations

from trtllm_pipeline.planning.names import said_once


def test_lines_below_are_said_once() -> None:
    assert [*said_once(["a:\n  1\n  2", "b", "a:\n  1\n  2", "b"])] == ["a:\n  1\n  2", "b", "a:", "b"]
