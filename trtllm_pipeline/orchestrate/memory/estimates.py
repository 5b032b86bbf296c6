"""Estimates of memory and disk for stage runs, corrected by earlier measurements, and their comparison with the
machine's resources.

The toolchains compute the estimates (`Stage.needs`). Each stage run records its estimate and its actual use. The median
ratio of the two corrects later estimates of the same kind, and the spread of the ratios is their error. Labels are the
kinds: the measurements of one stage run predict others with the same label, or with a prefix of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from trtllm_pipeline.base import Cell, Json, Machine, Needs, memory_size
from trtllm_pipeline.orchestrate.store.index import Peak, prefixes
from trtllm_pipeline.tensorrt import Stage


def label_of(stage: Stage, cell: Cell) -> str:
    """The label of the stage run of a cell: stage/toolchain/model/precision, and the type of GPU if the cell has one."""
    gpu_type = "" if cell.gpu is None else f"/{cell.gpu}"
    return f"{stage.name}/{cell.toolchain}/{cell.model}/{cell.precision}{gpu_type}"


HOST: Final = "host memory"
GPU: Final = "GPU memory"
SHARED: Final = "/dev/shm"  # noqa: S108  a name in a table
DISK: Final = "disk"
TIME: Final = "time"
KINDS: Final = {HOST: "host", GPU: "gpu", SHARED: "shared", DISK: "leaves", TIME: "ms"}
"""Resource -> its name in `Needs` and in records of peaks."""
LESS: Final = "less at a time"
"""Verdict: works with fewer requests or rows at a time than configured."""
NOT: Final = "does not fit"
TIGHT: Final = "tight"
"""Verdict: the error of the estimate decides."""
_LATEST: Final = 20
"""Number of latest measurements used for a correction."""
_ASSUMED_ERROR: Final = 0.5
_LEAST_ERROR: Final = 0.05
"""Lower bound of the error, even if measurements agree."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate in bytes, or in milliseconds for time, with its relative error."""

    value: int
    error: float
    measured: int = 0
    """Number of measurements used for the correction."""

    @property
    def least(self) -> int:
        """Lower bound, if the estimate is too high by its error."""
        return int(self.value * (1 - self.error))

    @property
    def most(self) -> int:
        """Upper bound, if the estimate is too low by its error."""
        return int(self.value * (1 + self.error))


class Corrections:
    """Ratios of actual to estimated use, measured on systems like `machine`, by label and kind."""

    def __init__(self, peaks: Iterable[Peak], machine: Machine) -> None:
        peaks = tuple(peaks) if machine.types else peaks
        self._of_types = {name: Corrections(peaks, each) for name, each in machine.types}
        self._ratios: dict[tuple[str, str], list[float]] = {}
        self._known: dict[tuple[str, str], tuple[str, float, float, int] | None] = {}
        here = system(machine)
        for peak in peaks:
            if peak.system != here:
                continue
            for kind, expected in peak.expected.items():
                taken = peak.taken.get(kind)
                for label in _useful(peak.label):
                    if taken and expected > 0:
                        self._ratios.setdefault((label, kind), []).append(taken / expected)

    def on(self, gpu: str | None) -> Corrections:
        """Corrections for a type of GPU, see `Machine.of`."""
        return self if gpu is None else self._of_types.get(gpu.lower(), self)

    def of(self, label: str, resource: str, expected: int, error: float) -> Estimate:
        """`expected` bytes, corrected by the most similar measured stage runs. The error is `error` without measurements."""
        key = label, KINDS[resource]
        if key not in self._known:
            self._known[key] = self._similar(*key)
        known = self._known[key]
        if known is None:
            return Estimate(expected, error)
        similar, middle, spread, number = known
        error_share = max(_LEAST_ERROR, spread) if number > 1 else error
        if similar != label:  # ratios of small models hardly apply to large ones and must not rule them out
            error_share = max(error_share, error, 1 - (1 - error) / middle)
        return Estimate(round(expected * middle), error_share, number)

    def _similar(self, label: str, kind: str) -> tuple[str, float, float, int] | None:
        """The most similar label with measurements, their median ratio, the largest deviation from it, and their number."""
        for similar in _useful(label):
            if ratios := self._ratios.get((similar, kind), [])[:_LATEST]:
                # It imports fractions and decimals, which are not needed without measurements.
                from statistics import median

                middle = median(ratios)
                return similar, middle, max(abs(each / middle - 1) for each in ratios), len(ratios)
        return None


def _useful(label: str) -> list[str]:
    """A label and its prefixes with a toolchain: formulas of different toolchains have different errors."""
    return [*prefixes(label)][:-1]


def system(machine: Machine) -> str:
    """The system that memory use depends on: type of GPU and release."""
    gpus = ", ".join(sorted({gpu.name for gpu in machine.gpus})) or "no GPU"
    release = machine.tensorrt_llm.release if machine.tensorrt_llm else "no TensorRT-LLM"
    return f"{gpus}; {release}"


def expected(stage: Stage, cell: Cell, machine: Machine) -> Needs | None:
    """The uncorrected estimate of one stage of a cell. None if the size of the model is unknown."""
    if stage.needs is None or "num_hidden_layers" not in cell.recipe:
        return None
    return stage.needs(cell, machine.of(cell.gpu))


def expected_by_kind(needs: Needs, machine: Machine) -> dict[str, int]:
    """An estimate in the form that is recorded with the actual use. What works on less at a time takes the memory that
    there is: its use does not show that the rest of the estimate was wrong.
    """
    gpu, has = needs.gpu, min((each.memory_bytes for each in machine.gpus), default=needs.gpu)
    if needs.gpu_least is not None and needs.gpu_least <= has:
        gpu = min(gpu, has)
    return {"host": needs.host, "gpu": gpu, "shared": needs.shared, "leaves": needs.leaves}


@dataclass(frozen=True, slots=True)
class Need:
    """Need of one stage run, or of the whole plan, for one resource."""

    stage: str
    """Empty for the whole plan."""
    cell: str
    resource: str
    estimate: Estimate
    has: int | None
    """Available amount. None if unknown."""
    least: int | None = None
    """The minimum without which it fails. None means the whole estimate."""
    assumed: bool = False
    """The estimate is an assumption without a measurement."""

    @property
    def headroom(self) -> int | None:
        """Available amount minus the estimate."""
        return None if self.has is None else self.has - self.estimate.value

    @property
    def impossible(self) -> bool:
        """True if it cannot work even if the estimate is too high by its error."""
        needed = self.estimate.value if self.least is None else self.least
        return self.has is not None and not self.assumed and needed * (1 - self.estimate.error) > self.has

    @property
    def verdict(self) -> str:
        """One of "fits", "tight" if it depends on the estimate's error, "less at a time" or "does not fit"."""
        if self.has is None:
            return "unknown"
        if self.impossible:
            return NOT
        if self.assumed and self.estimate.most > self.has:
            return TIGHT
        if self.estimate.value > self.has:
            return NOT if self.least is None or self.least > self.has else LESS
        return "fits" if self.estimate.most <= self.has else TIGHT

    def to_json(self) -> dict[str, Json]:
        """The entry in plan.json."""
        return {
            "resource": self.resource,
            "needs_bytes": self.estimate.value,
            "error": round(self.estimate.error, 3),
            "measured": self.estimate.measured,
            "has_bytes": self.has,
            "headroom_bytes": self.headroom,
            "verdict": self.verdict,
        }


def of_stage(
    needs: Needs | None, stage: Stage, cell: Cell, machine: Machine, corrections: Corrections, label: str
) -> list[Need]:
    """Memory that one stage of a cell needs. Resources that it does not use are omitted. `needs` is the result of `expected`."""
    if needs is None:
        return []
    machine, corrections = machine.of(cell.gpu), corrections.on(cell.gpu)
    gpus = [gpu.memory_bytes for gpu in machine.gpus]
    result = []
    for resource, value, has in (
        (HOST, needs.host, machine.memory_bytes),
        (GPU, needs.gpu, min(gpus, default=None)),
        (SHARED, needs.shared, machine.shared_bytes),
    ):
        if value:
            assumed = KINDS[resource] in needs.assumed
            estimate = corrections.of(label, resource, value, _ASSUMED_ERROR if assumed else needs.error)
            least = None
            if resource == GPU and needs.gpu_least is not None:
                least = round(needs.gpu_least * estimate.value / value)
            guess = assumed and not estimate.measured
            result.append(Need(stage.name, cell.id, resource, estimate, has, least, guess))
    return result


def tightest(needs: Iterable[Need]) -> list[Need]:
    """For each stage and resource, the need with the largest share of the available amount."""
    worst: dict[tuple[str, str], Need] = {}
    for need in needs:
        key = need.stage, need.resource
        if key not in worst or _share(need) > _share(worst[key]):
            worst[key] = need
    return list(worst.values())


def _share(need: Need) -> tuple[float, int]:
    """Share of the available amount, since GPUs of several types differ."""
    return need.estimate.value / need.has if need.has else 0.0, need.estimate.value


def infeasible(cell: Cell, stages: Iterable[Stage], machine: Machine, corrections: Corrections) -> str | None:
    """The reason why a machine definitely lacks memory for a cell, with a remedy, or None."""
    needs = (need for need in _of_cell(cell, stages, machine, corrections) if need.impossible)
    return next((f"{in_words(need)}; {_remedy(need)}" for need in needs), None)


def lacking(cell: Cell, stages: Iterable[Stage], machine: Machine, corrections: Corrections) -> Need | None:
    """The first need that exceeds the machine's memory, by the plain estimates. "does not fit" takes precedence over "less at a time"."""
    less = None
    for need in _of_cell(cell, stages, machine, corrections):
        if need.verdict == NOT:
            return need
        if need.verdict == LESS:
            less = less or need
    return less


def _of_cell(cell: Cell, stages: Iterable[Stage], machine: Machine, corrections: Corrections) -> Iterator[Need]:
    for stage in stages:
        if stage.needs is not None and stage.applies(cell, machine.of(cell.gpu)):
            needs = expected(stage, cell, machine)
            yield from of_stage(needs, stage, cell, machine, corrections, label_of(stage, cell))


def without_limits(machine: Machine) -> Machine:
    """The same machine with unlimited GPU memory."""
    return replace(
        machine,
        gpus=tuple(replace(gpu, memory_bytes=1 << 60) for gpu in machine.gpus),
        types=tuple((name, without_limits(each)) for name, each in machine.types),
    )


def in_words(need: Need) -> str:
    assert need.has is not None
    value = need.least if need.least is not None and need.impossible else need.estimate.value
    place = {GPU: "of memory on each GPU", HOST: "of host memory", SHARED: f"in {SHARED}"}[need.resource]
    return f"{need.stage}: needs about {memory_size(value)} {place}, {memory_size(need.has)} available"


def _remedy(need: Need) -> str:
    if need.resource == GPU and need.stage == "quantize":
        return "use more or larger GPUs, or precision as_is with a published model that is already quantized"
    return {
        GPU: "a larger tp or pp, or a smaller precision, reduces it",
        HOST: "use a machine with more, or a smaller model",
        SHARED: "docker run --shm-size=SIZE enlarges it",
    }[need.resource]
