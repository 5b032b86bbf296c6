"""What a matrix may say of the levels that perf measures, and what the stage is told of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.helpers import fabricated
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.errors import MatrixError
from trtllm_pipeline.orchestrate.matrix.expand import expand
from trtllm_pipeline.orchestrate.matrix.models import Perf
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix
from trtllm_pipeline.tensorrt.stage.params import PerfParams, key
from trtllm_pipeline.tensorrt.toolchains.common_stages import PERF, beyond_lengths
from trtllm_pipeline.tensorrt.toolchains.load_words import load_words


def with_perf(cell: Cell, **settings: Any) -> Cell:
    return dataclasses.replace(cell, settings={**cell.settings, "perf": {**cell.settings["perf"], **settings}})


def params(**settings: Any) -> dict[str, Any]:
    return key(PERF.read(with_perf(fabricated.cell("fp16"), **settings)))


def test_rates_and_objectives_are_part_of_a_measurement_only_where_they_were_asked_for() -> None:
    assert not {"request_rate", "request_distribution", "slo"} & params().keys()
    asked = params(concurrency=[], request_rate=[2.5], slo={"ttft_ms": 300.0})
    assert (asked["concurrency"], asked["request_rate"], asked["request_distribution"]) == ([], [2.5], "poisson")
    assert asked["slo"] == {"ttft_ms": 300.0}
    assert "request_rate" not in params(slo={"tpot_ms": 40.0})


def test_requests_that_the_lengths_of_a_cell_leave_no_room_for_are_refused() -> None:
    cell = fabricated.cell("fp16")
    isl, osl = cell.isl, cell.osl
    for fits in ({}, {"input_tokens": isl}, {"input_tokens": 1, "max_tokens": isl + osl - 1}):
        assert beyond_lengths(with_perf(cell, **fits)) is None
    for too_long in ({"input_tokens": isl + 1, "max_tokens": 1}, {"max_tokens": osl + 1}):
        assert "use longer axes.lengths" in str(beyond_lengths(with_perf(cell, **too_long)))
    for from_rows in ({"lengths_data": "lengths.jsonl"}, {"input_data": "rows.jsonl"}):
        assert beyond_lengths(with_perf(cell, max_tokens=osl + 1, **from_rows)) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"request_rate": (0.0,)}, "greater than 0"),
        ({"request_rate": (2.0, 2.0)}, "given twice"),
        ({"concurrency": (65_537,)}, "less than or equal to 65536"),
        ({"concurrency": (0,)}, "greater than or equal to 1"),
        ({"request_rate": (2e6,)}, "less than or equal to 1000000"),
        ({"max_tokens": 10_000_001}, "less than or equal to 10000000"),
        ({"slo": {"ttft": 300.0}}, "slo"),
        ({"stop_when": {"output_tps": "300%"}}, "less than 1"),
        ({"stop_when": {"output_tps": "much"}}, "stop_when"),
        ({"stop_when": {"speed": 0.1}}, "stop_when"),
        ({"measurement_interval_ms": 0.0}, "greater than 0"),
        ({"slo": {"ttft_ms": 0.0}}, "greater than 0"),
    ],
)
def test_what_means_nothing_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Perf(**settings)


def matrix(folder: Path, settings: Any = None, override: Any = None, **axes: Any) -> Path:
    """A matrix of one cell and more axes, with these settings of perf."""
    content = {
        "name": "my",
        "axes": {"model": ["tiny"], "precision": ["fp16"], "max_batch_size": [2], "lengths": ["160,16"], **axes},
        "settings": {"perf": settings or {}},
        "override": [] if override is None else [{"where": {}, "settings": {"perf": override}}],
    }
    path = folder / "my.yaml"
    path.write_text(json.dumps(content))
    return path


def cells(path: Path, sets: tuple[str, ...] = ()) -> tuple[Cell, ...]:
    return tuple(expand(load_matrix(path, sets), default_toolchain="embedded"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"concurrency": []}, "needs a concurrency, a request_rate, a trace_speed, find_rate or find_concurrency"),
        ({"find_rate": 0.95}, "find_rate needs slo"),
        (
            {"find_rate": 0.95, "slo": {"ttft_ms": 300.0}, "requests": 16},
            "needs requests: 300 or more, .* 16 requests end before",
        ),
        ({"top_p": 0.9}, "at temperature 0"),
        ({"input_tokens": 9, "workload": "prompts"}, "input_tokens needs workload: isl_osl"),
        ({"lengths_data": "lengths.jsonl", "workload": "prompts"}, "lengths_data needs workload: isl_osl"),
        ({"workload": "isl_osl", "stop_words": ["."]}, "stop_words end answers"),
        ({"stop_words": ["."]}, "stop_words end answers .* ignore_eos: false allows it"),
        ({"max_in_flight": 4}, "max_in_flight needs a request_rate"),
        ({"request_rate": [4.0], "burstiness": 0.5}, "burstiness needs request_distribution: gamma; poisson does not"),
        ({"measurement_interval_ms": 1e9, "request_rate": [2.0]}, "are 2,000,000 requests, 1,000,000 at most"),
    ],
)
def test_what_does_not_fit_together_is_refused_where_it_stands(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    sets = tuple(f"settings.perf.{name}={json.dumps(value)}" for name, value in settings.items())
    for given, changes, place in (
        ({"settings": settings}, (), "settings.perf"),
        ({"override": settings}, (), "override[0].settings.perf"),
        ({}, sets, "settings.perf"),
    ):
        with pytest.raises(MatrixError, match=words) as refused:
            cells(matrix(tmp_path, **given), changes)
        assert [fault.key for fault in refused.value.faults] == [place]


def test_what_fits_together_may_be_said_in_several_places(tmp_path: Path) -> None:
    asked = {"workload": "isl_osl", "slo": {"ttft_ms": 300.0}, "requests": 300}
    beginnings = matrix(tmp_path, asked, **{"settings.perf.shared_prefix_tokens": [0, 64]})
    assert [cell.settings["perf"]["shared_prefix_tokens"] for cell in cells(beginnings)] == [0, 64]
    sets = ("settings.perf.find_rate=0.95", "settings.perf.input_tokens=64")
    (cell,) = cells(matrix(tmp_path, asked), sets)
    assert (cell.settings["perf"]["find_rate"], cell.settings["perf"]["input_tokens"]) == (0.95, 64)
    (cell,) = cells(matrix(tmp_path, asked, {"find_rate": 0.5}))
    assert cell.settings["perf"]["find_rate"] == 0.5
    (cell,) = cells(matrix(tmp_path, {**asked, "requests": 16, "measurement_interval_ms": 9000, "find_rate": 0.9}))
    assert cell.settings["perf"]["requests"] == 16, "an interval says how many"
    apart = matrix(tmp_path, {**asked, "input_tokens": 64}, {"workload": "prompts"})
    with pytest.raises(MatrixError, match="input_tokens needs workload: isl_osl"):
        cells(apart)


def test_what_was_added_is_part_of_a_measurement_only_where_it_is_asked_for() -> None:
    plain = params()
    added = {"turns", "stop_words", "extra_inputs", "warmup", "max_repeats", "stop_when", "find_rate", "ignore_eos"}
    assert not added & plain.keys()
    assert params(turns=1, warmup="count", max_repeats=20, stop_when={}) == plain
    asked = params(workload="isl_osl", turns=2, stop_when={"output_tps": 0.03}, max_repeats=9)
    assert (asked["workload"], asked["turns"], asked["input_tokens"]) == ("isl_osl", 2, 128)
    assert (asked["stop_when"], asked["max_repeats"]) == ({"output_tps": 0.03}, 9)


def test_how_narrow_is_a_percentage_or_a_share() -> None:
    found: Any = Perf(stop_when={"output_tps": "3%", "ttft_p50": 0.05})  # type: ignore[call-arg]
    assert found.stop_when == {"output_tps": 0.03, "ttft_p50": 0.05}


def test_an_open_loop_alone() -> None:
    assert Perf(concurrency=(), request_rate=(2.5,)).warmup_requests is None


def test_a_measurement_needs_a_level() -> None:
    with pytest.raises(
        ValueError, match="needs a concurrency, a request_rate, a trace_speed, find_rate or find_concurrency"
    ):
        PerfParams(max_tokens=4, concurrency=())


def load(**changes: Any) -> str:
    """The load of a cell in words. `perf__name` is a setting of perf."""
    cell = fabricated.cell("fp16")
    settings = {key.removeprefix("perf__"): changes.pop(key) for key in [*changes] if key.startswith("perf__")}
    settings = {**cell.settings, "perf": {**cell.settings["perf"], **settings}}
    return load_words(dataclasses.replace(cell, settings=settings, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "128 in, 64 out, 1/4 in flight, 32 requests"),
        (
            {"isl": 2048, "osl": 512, "max_batch_size": 64},
            "2048 in, 512 out, 1/4/16/64 in flight, 32 to 512 requests",
        ),
        ({"max_batch_size": 1}, "128 in, 64 out, 1 in flight, 32 requests"),
        ({"max_batch_size": 24}, "128 in, 64 out, 1/4/16/24 in flight, 32 to 192 requests"),
        ({"perf__concurrency": [8], "perf__requests": 9}, "128 in, 64 out, 8 in flight, 24 requests"),
        ({"perf__request_rate": [2.5]}, "128 in, 64 out, 2.5 requests/s, 32 requests"),
        ({"perf__input_data": "own.jsonl"}, "prompts of own.jsonl, up to 64 out, 1/4 in flight, 32 requests"),
        ({"perf__workload": "prompts"}, "prompts of builtin:prompts, up to 64 out, 1/4 in flight, 32 requests"),
        (
            {"perf__input_data": "own.jsonl", "perf__workload": "isl_osl"},
            "128 in, 64 out, 1/4 in flight, 32 requests",
        ),
        ({"perf__images": "1@8x8"}, "prompts of builtin:prompts, up to 64 out, 1/4 in flight, 32 requests"),
        ({"perf__ignore_eos": False}, "128 in, up to 64 out, 1/4 in flight, 32 requests"),
        ({"toolchain": "transformers"}, "128 in, up to 64 out, 1/4 in flight, 32 requests"),
        ({"toolchain": "tensorrt_llm_pytorch"}, "128 in, up to 64 out, 1/4 in flight, 32 requests"),
        ({"toolchain": "vllm"}, "128 in, 64 out, 1/4 in flight, 32 requests"),
        ({"toolchain": "auto"}, "128 in, 64 out, 1/4 in flight, 32 requests"),
        (
            {"perf__measurement_interval_ms": 9000.0, "perf__repeats": 3},
            "128 in, 64 out, 1/4 in flight, 9 s each, 3 times",
        ),
    ],
)
def test_the_load_of_a_cell_follows_its_lengths_and_its_batch(changes: dict[str, Any], words: str) -> None:
    assert load(**changes) == words
