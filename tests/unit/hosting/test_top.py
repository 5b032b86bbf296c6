from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.hosting import top
from trtllm_pipeline.hosting.readings import GpuReading, Rates, Reading

BUSY = top.ServerRow(
    "qwen2.5-7b-instruct-fp8-tp2-on-two-gpus",
    "qwen",
    "ready",
    None,
    2,
    ("0", "1"),
    Reading(in_flight=48, queued=1200, kv_cache_use=0.934),
    Rates(10.0, 123.4, 0.0, 45_678.0, 123_456.0, 1234, 0.0371, 12.34),
)
DEAD = top.ServerRow("llama", None, "failed", "Triton was killed (signal 9): out of memory", 5, (), Reading(), Rates())
GPUS = {"GPU-0b0e4a1c-1": GpuReading("NVIDIA H100 80GB HBM3", 0.99, 70 * 2.0**30, 80 * 2.0**30, 690.4)}


def drawn(sample: top.Sample, width: int, height: int = 25, *, live: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    options = console.options.update(width=width, height=height)
    return [str(line) for line in top.TopPicture(sample, live=live).__rich_console__(console, options)]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_everything_fits_and_says_the_same(width: int) -> None:
    lines = drawn(top.Sample(0.0, (BUSY, DEAD), GPUS), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for value in (
        "ready",
        "failed",
        "123",
        "48",
        "1200",
        "45.7k",
        "123.5k",
        "37 ms",
        "12.3 s",
        "93%",
        "690 W",
        "70.0/80.0 GiB",
    ):
        assert value in text
    assert "llama: Triton was killed (signal 9)" in text


def test_a_low_terminal_says_how_much_is_hidden() -> None:
    lines = drawn(top.Sample(0.0, (BUSY,) * 20, {}), 80, 8, live=True)
    assert len(lines) == 8
    assert lines[-1] == "and 15 lines more"


def test_without_servers_it_says_what_to_do() -> None:
    assert "pipeline serve start" in "\n".join(drawn(top.Sample(0.0, (), {}), 80))


def test_the_sample_as_json() -> None:
    told = json.loads(json.dumps(top.Sample(5.0, (BUSY, DEAD), GPUS).to_json()))
    busy, dead = told["servers"]
    assert busy["ttft_ms"] == {"n": 1234, "p50": 37.1, "p99": 12340.0}
    assert (busy["output_tokens_per_s"], busy["kv_cache_use"], busy["restarts"]) == (123456.0, 0.934, 2)
    assert (dead["requests_per_s"], dead["ttft_ms"]["p50"], dead["state"]) == (None, None, "failed")
    assert told["gpus"][0]["gpu"] == "GPU-0b0e4a1c-1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.04, "0.0"),
        (3.14, "3.1"),
        (99.96, "100"),
        (9999.4, "9999"),
        (12345.0, "12.3k"),
        (2.5e6, "2.5M"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert top.short(value) == text


@pytest.mark.parametrize("url", ["", "ftp://x", "localhost:99999", "http://", "localhost:x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        top.typed([url])
