"""The analysis of events that a real server sent, against what the server's own benchmark client measured.

`vllm_events.jsonl.gz`: `pipeline bench load --isl 1024 --max-tokens 128 --ignore-eos --requests 64 --concurrency 16` on vLLM
0.25.1 with random weights in the shape of Llama 3.1 8B in bf16, on one H200 on 2026-11-28. The texts were replaced.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from trtllm_pipeline.measure.load.metrics import analyze

EVENTS = Path(__file__).parents[3] / "data" / "vllm_events.jsonl.gz"
THEIRS = {"output_tokens_per_s": 1887.80, "tpot_ms": 6.324, "e2e_ms": 1082.2}
"""Throughput and means that `vllm bench serve` reported at the same server in the same round, for as many requests."""


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    path.write_bytes(gzip.decompress(EVENTS.read_bytes()))
    return path


def test_the_events_of_a_real_vllm_give_what_its_own_client_measured(events: Path) -> None:
    result = analyze(events, None)
    (level,) = result.levels
    assert result.valid
    assert result.tokens_counted_by == "server"
    assert (level.requests, level.failures) == (64, 0)
    as_theirs = level.details.other_tools["vllm"]
    assert as_theirs["output_tokens_per_s"] == pytest.approx(THEIRS["output_tokens_per_s"], rel=0.02)
    assert as_theirs["tpot_ms"]["mean"] == pytest.approx(THEIRS["tpot_ms"], rel=0.02)
    assert as_theirs["e2e_ms"]["mean"] == pytest.approx(THEIRS["e2e_ms"], rel=0.02)
    assert level.output_tokens_per_s == pytest.approx(THEIRS["output_tokens_per_s"], rel=0.02)
