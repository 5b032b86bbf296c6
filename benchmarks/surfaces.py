"""Surfaces to search: what every cell of a matrix would measure, by models of decoding on GPUs and CPUs, with noise.

Nothing here was measured on a GPU. A surface is drawn once for each seed and kept, so that all searches and the full grid see
the same numbers. The model of a step: reading the weights and the KV cache against computing, whichever takes longer, plus what
each step costs whatever its batch, plus talking between GPUs (a roofline; Williams et al. 2009). Prompts that arrive interrupt
those who generate, and who finds no free slot waits.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trtllm_pipeline.base.domain import CellId, Json
from trtllm_pipeline.measure.load.result import LevelResult, RepeatResult
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus
from trtllm_pipeline.show.report.measured import pooled

Axes = Mapping[str, Json]
_BITS = {"fp16": 16.0, "fp8": 8.0, "int8_sq": 8.0, "int8_wo": 8.0, "int4_awq": 4.25, "q8": 8.5, "q5": 5.5, "q4": 4.5}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a host."""

    bandwidth: float
    """Bytes in a second."""
    operations: Mapping[str, float]
    """Operations per second by precision, with `fp16` as default."""
    memory: float
    """Bytes."""
    step_s: float
    """Fixed cost of each step."""
    hop_s: float
    """Latency of one all-reduce between two."""


@dataclass(frozen=True, slots=True)
class Surface:
    """A matrix of cells, and its goals."""

    name: str
    axes: Mapping[str, Sequence[Json]]
    parameters: float
    layers: int
    kv_bytes: float
    """KV cache bytes per token."""
    isl: int
    osl: int
    device: Device
    slo: str = ""
    objective: str = "throughput"
    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    unpacking: Mapping[str, float] = field(default_factory=dict)
    """Precision -> how many times as long as its operations unpacking weights makes a step that computes."""
    twist: Callable[[Axes, int], float] | None = None
    """Factor on a step's time, for what the formulas do not know."""
    noise: float = 0.02
    """Standard deviation of the logarithm of rates and medians. That of p99 is three times as large."""
    repeats: int = 1
    """Repeats of each level, each with the noise. A level has their medians."""

    def cells(self) -> list[Axes]:
        """Every combination of the axes."""
        return [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]

    def takes(self, axes: Axes, done: Collection[str]) -> float:
        """Seconds until a cell is measured, of what is not `done`: quantizing for each precision, then building and measuring."""
        return 360.0 + (600.0 if str(axes["precision"]) not in {*done, "fp16"} else 0.0)

    def draw(self, seed: int) -> dict[CellId, CellResult]:
        """Each cell's measurements, or its out-of-memory failure."""
        rng = random.Random(f"{self.name} {seed}")
        return {row.id: row for row in (self._row(axes, rng) for axes in self.cells())}

    def _row(self, axes: Axes, rng: random.Random) -> CellResult:
        cell = CellId("/".join(f"{name}={value}" for name, value in axes.items()))
        slots = self._slots(axes)
        if slots < 1:
            return CellResult(
                cell, axes, CellStatus.FAILED, failed_stage="launch", failure="out_of_memory", reason="out of memory"
            )
        levels = tuple(self._level(axes, slots, concurrency, rng) for concurrency in self.concurrency)
        return CellResult(cell, axes, CellStatus.DONE, levels=levels, engine_size_bytes=round(self._weights(axes)))

    def _weights(self, axes: Axes) -> float:
        return self.parameters * _BITS[str(axes["precision"])] / 8

    def _slots(self, axes: Axes) -> int:
        """Requests that it works on at a time: its batch, or what the KV cache has room for."""
        gpus, batch = _number(axes, "tp"), _number(axes, "max_batch_size")
        kv = self.kv_bytes * (0.5 if axes.get("kv_cache") == "fp8" else 1.0)
        room = 0.9 * gpus * self.device.memory - self._weights(axes) - 2e7 * batch
        return min(int(batch), int(room / (kv * (self.isl + self.osl))))

    def _level(self, axes: Axes, slots: int, concurrency: int, rng: random.Random) -> LevelResult:
        running = min(slots, concurrency)
        precision, gpus, device = str(axes["precision"]), _number(axes, "tp"), self.device
        operations = device.operations.get(precision, device.operations["fp16"]) * gpus
        kv = self.kv_bytes * (0.5 if axes.get("kv_cache") == "fp8" else 1.0)
        reads = (self._weights(axes) + running * (self.isl + self.osl / 2) * kv) / (device.bandwidth * gpus)
        computes = 2 * self.parameters * running / operations * self.unpacking.get(precision, 1.0)
        talks = 0.0 if gpus == 1 else 2 * self.layers * device.hop_s * (1 + math.log2(gpus)) * (1 + running / 64)
        step = (max(reads, computes) + device.step_s + talks) * (
            1.0 if self.twist is None else self.twist(axes, running)
        )
        prompt = max(2 * self.parameters * self.isl / operations * self.unpacking.get(precision, 1.0), step) + talks
        interrupted = 0.6 if axes.get("chunked") is True else 1.0
        tpot = step + interrupted * (running - 1) * prompt / self.osl
        whole = prompt + self.osl * tpot
        waits = (concurrency / running - 1) * whole
        ttft = waits + prompt * (1 + 0.35 * (running - 1)) * (1.15 if axes.get("chunked") is True else 1.0)
        e2e = ttft + self.osl * tpot

        def noisy(value: float, times: float = 1.0) -> float:
            return value * math.exp(rng.gauss(0.0, self.noise * times))

        def summary(seconds: float, tail: float) -> dict[str, float | None]:
            return {"p50": noisy(1e3 * seconds), "p99": noisy(1e3 * seconds * tail, 3.0)}

        def repeat(number: int) -> RepeatResult:
            rate = noisy(running / whole)
            return RepeatResult(
                repeat=number,
                output_tokens_per_s=rate * self.osl,
                requests_per_s=rate,
                latencies={"ttft_ms": summary(ttft, 1.6), "tpot_ms": summary(tpot, 1.2), "e2e_ms": summary(e2e, 1.3)},
            )

        repeats = tuple(map(repeat, range(self.repeats)))
        return pooled(
            [
                LevelResult(concurrency=concurrency, requests=200, **each.rates(), latencies=each.latencies)
                for each in repeats
            ]
        )


def _number(axes: Axes, name: str) -> float:
    value = axes.get(name, 1)
    assert isinstance(value, int)
    return float(value)


H100 = Device(2.5e12, {"fp16": 7.7e14, "fp8": 1.26e15, "int8_sq": 1.1e15}, 80e9, 4e-4, 8e-6)
L4 = Device(2.3e11, {"fp16": 9.4e13, "fp8": 1.5e14, "int8_sq": 1.4e14}, 24e9, 6e-4, 4e-5)
HOST = Device(2e10, {"fp16": 1.3e11, "q8": 2.2e11, "q5": 0.9e11, "q4": 1.6e11}, 64e9, 2e-3, 0.0)
_PRECISIONS = ("fp16", "fp8", "int8_sq", "int8_wo", "int4_awq")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_GRID: Mapping[str, Sequence[Json]] = {"precision": _PRECISIONS, "tp": (1, 2, 4, 8), "max_batch_size": _BATCHES}
_UNPACKING = {"int8_wo": 1.5, "int4_awq": 1.9}


def _threads(axes: Axes, running: int) -> float:
    """Decoding scales up to the memory bandwidth and slows beyond the cores. q5's kernels are slow for odd batches."""
    threads = _number(axes, "settings.threads")
    slower = math.pow(max(1.0, 8 / threads), 0.8) * (1.35 if threads > 16 else 1.0)
    return slower * (1.2 if axes["precision"] == "q5" and running in {2, 16} else 1.0)


def _tactics(axes: Axes, running: int) -> float:
    """Engines of some batch sizes find better kernels than their neighbours: no formula knows which."""
    return random.Random(f"{axes} {running > 8}").uniform(0.92, 1.08)


def _routing(axes: Axes, running: int) -> float:
    """A mixture of experts reads few experts for few requests, nearly all for many, and fewer if they are split."""
    return 0.25 + 0.75 * (1 - math.exp(-running / (12 + _number(axes, "tp") / 4)))


def _drafting(axes: Axes, running: int) -> float:
    """Checking drafts costs little in memory-bound steps and much in compute-bound ones. 70% of drafted tokens are accepted, 62% for a
    4-bit model, and the tokens after a rejected one are lost (geometric series).
    """
    drafted = _number(axes, "max_draft_len")
    taken = 0.62 if axes["precision"] == "int4_awq" else 0.7
    return (1 + drafted * (0.06 + running / 80)) * (1 - taken) / (1 - math.pow(taken, drafted + 1))


SURFACES = (
    Surface(
        "8B, TTFT and TPOT", _GRID, 8e9, 32, 131e3, 1024, 256, H100, "ttft_p99=1s,tpot_p99=15ms", unpacking=_UNPACKING
    ),
    Surface("70B, some do not fit", _GRID, 70e9, 80, 328e3, 1024, 256, H100, "tpot_p99=40ms", unpacking=_UNPACKING),
    Surface("0.5B, bound by launches", _GRID, 5e8, 24, 25e3, 128, 128, H100, unpacking=_UNPACKING),
    Surface(
        "8B, long prompts",
        _GRID,
        8e9,
        32,
        131e3,
        16384,
        128,
        H100,
        "ttft_p99=4s",
        concurrency=(1, 4, 16, 64),
        unpacking=_UNPACKING,
    ),
    Surface("70B, latency", _GRID, 70e9, 80, 328e3, 512, 128, H100, "output_tps=300", "latency", unpacking=_UNPACKING),
    Surface(
        "8B on L4, settings",
        {
            "precision": _PRECISIONS,
            "tp": (1, 2),
            "max_batch_size": (4, 16, 64, 128, 256),
            "chunked": (False, True),
            "kv_cache": ("fp16", "fp8"),
        },
        *(8e9, 32, 131e3, 2048, 256, L4, "tpot_p99=120ms"),
        unpacking=_UNPACKING,
    ),
    Surface(
        "1B on a host, threads",
        {"precision": ("fp16", "q8", "q5", "q4"), "settings.threads": (2, 4, 8, 16, 32), "max_batch_size": _BATCHES},
        *(1e9, 16, 32e3, 256, 64, HOST, "tpot_p99=400ms"),
        concurrency=(1, 4, 16, 64),
        twist=_threads,
        noise=0.04,
    ),
    Surface(
        "mixture of experts",
        *(_GRID, 47e9, 32, 131e3, 1024, 256, H100, "tpot_p99=25ms"),
        unpacking=_UNPACKING,
        twist=_routing,
        noise=0.03,
    ),
    Surface(
        "8B, uneven kernels",
        _GRID,
        8e9,
        32,
        131e3,
        256,
        512,
        H100,
        "tpot_p99=12ms",
        unpacking=_UNPACKING,
        twist=_tactics,
    ),
    Surface(
        "8B, drafted tokens",
        {
            "precision": _PRECISIONS,
            "max_draft_len": (0, 1, 2, 4, 8),
            "max_batch_size": (1, 4, 8, 16, 32, 64, 128, 256),
        },
        *(8e9, 32, 131e3, 1024, 256, H100, "tpot_p99=20ms"),
        unpacking=_UNPACKING,
        twist=_drafting,
        noise=0.03,
    ),
)
"""Each has 200 cells. The last was written after the search was tuned, and the search was not changed for it."""
