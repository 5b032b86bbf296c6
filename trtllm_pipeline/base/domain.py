"""The project's terms as types: cells, stage runs, resources, statuses. Imports no other module of the package."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, NewType, Union

# A value that survives a round trip through JSON unchanged. Written with Union because Python 3.10 cannot `|` a string.
Json = Union[None, bool, int, float, str, "list[Json]", "dict[str, Json]"]
CellId = NewType("CellId", str)
StageRunId = NewType("StageRunId", str)
Fingerprint = NewType("Fingerprint", str)
DEFAULT_WORKSPACE: Final = ".pipeline"
USUAL_KV_SHARE: Final = 0.9
"""Share of free memory that TensorRT-LLM uses for the KV cache by default. Source: memory reference."""
USUAL_NUM_TOKENS: Final = 8192
"""Default for the tokens of one forward pass: TensorRT-LLM's since 0.11, so that a matrix means the same everywhere."""


def in_order(segments: Sequence[str], parts: Sequence[str]) -> bool:
    """True if `parts` are among the segments of a cell's id, in their order: tables name cells like this."""
    left = iter(segments)
    return all(part in left for part in parts)


PARALLEL: Final = re.compile(r"tp([1-9]\d{0,3})(?:pp([1-9]\d{0,3}))?(?:ep([1-9]\d{0,3}))?(?:dp([1-9]\d{0,3}))?")


class Parallelism(NamedTuple):
    """Tensor, pipeline and expert parallelism, and data parallelism of attention."""

    tp: int
    """GPUs that share each layer."""
    pp: int = 1
    """Pipeline stages, groups of consecutive layers."""
    ep: int = 1
    """Groups of the `tp` GPUs that hold whole experts. 1 splits each expert over all GPUs."""
    dp: int = 1
    """Groups of the `tp` GPUs that compute attention for their own requests. 1 splits each request's attention over all GPUs."""


def parse_parallel(text: str) -> Parallelism:
    """The sizes in `tp4pp2ep4dp4`. `tp4` means `tp4pp1ep1dp1`, and `tp4dp4` means `tp4pp1ep4dp4`. Raises ValueError for other text."""
    match = PARALLEL.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a valid parallelism: write tp4, tp4pp2 with pipeline stages, tp4ep4 with expert parallelism, "
            "tp4dp4 with data parallel attention as well"
        )
    tp, pp, ep, dp = (int(size or 0) for size in match.groups())
    sizes = Parallelism(tp, pp or 1, ep or (tp if dp > 1 else 1), dp or 1)
    if tp % sizes.ep:
        raise ValueError(f"{text!r}: ep{sizes.ep} must divide tp{tp}, whose GPUs the experts are distributed over")
    if tp % sizes.dp:
        raise ValueError(f"{text!r}: dp{sizes.dp} must divide tp{tp}, whose GPUs the requests are distributed over")
    return sizes


def layout_name(tp: int, pp: int, ep: int = 1, dp: int = 1) -> str:
    """The id of a layout over GPUs, including expert parallelism if there is any, or if attention is data parallel."""
    return f"tp{tp}pp{pp}" + (f"ep{ep}" if ep > 1 or dp > 1 else "") + (f"dp{dp}" if dp > 1 else "")


class StageStatus(str, Enum):
    """The state of a stage run. Only `scheduler.py` changes it."""

    PENDING = "pending"
    """Waits for inputs, for a free resource, or for the time of a retry."""
    RUNNING = "running"
    """A process of this run works on it."""
    ELSEWHERE = "elsewhere"
    """Another invocation on this workspace works on it. This run waits for its result."""
    SUCCEEDED = "succeeded"
    """Done in this run; its artifact is published."""
    UP_TO_DATE = "up_to_date"
    """Was done before this run; nothing to do."""
    SKIPPED = "skipped"
    """Not needed in this run: a service without dependents that have work to do."""
    FAILED = "failed"
    """Failed, and will not be tried again in this run."""
    BLOCKED = "blocked"
    """One of its inputs failed."""
    CANCELLED = "cancelled"
    """The run was interrupted before it finished."""


class Scope(str, Enum):
    """The kind of a stage run. It determines when it runs."""

    ARTIFACT = "artifact"
    """Runs once, produces a directory."""
    SERVICE = "service"
    """Runs while stage runs inside it need it. Only its log is kept."""
    IN_SERVICE = "inside"
    """Runs while its service runs, produces a directory with results."""


class Exclusive(str, Enum):
    """Other pipeline work allowed on the machine during a measurement."""

    MACHINE = "machine"
    """Nothing."""
    GPU = "gpu"
    """Other measurements of this kind, each on its own GPUs, and nothing else."""
    NONE = "none"
    """Anything that fits. Also used for stages that do not measure."""
    CONTROL = "control"
    """Nothing, on the CPUs that it would have alongside other measurements. Any difference is then their effect."""

    @property
    def alone(self) -> bool:
        """True if it has the machine to itself."""
        return self is Exclusive.MACHINE or self is Exclusive.CONTROL

    @property
    def pinned(self) -> bool:
        """True if it is bound to the CPUs near its GPUs."""
        return self is Exclusive.GPU or self is Exclusive.CONTROL


ALONE: Final = "alone:"
"""Prefix for the id of a cell that is measured alone, to show the effect of measuring that cell alongside others."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a stage run occupies."""

    cpus: int = 1
    gpus: int = 0
    downloads: int = 0
    exclusive: Exclusive = Exclusive.NONE
    accelerator: str | None = None
    """Type of its GPUs, in lower case, if a cluster has several."""
    beside_standing: bool = False
    """True if managed servers may run at the same time: it measures a server that it did not start."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that a retry changed, see `orchestrate/plan/planner.py`."""

    setting: str
    """settings.SECTION.KEY"""
    old: Json
    new: Json
    stage_run: StageRunId
    """The stage that failed."""
    why: str
    refused: tuple[str, ...] = ()
    """Values before `new` that the release or a rule refuses, each in words."""


def in_words(changes: Sequence[SettingChange]) -> list[str]:
    """One line for each changed setting: "settings.build.max_num_tokens 4096 -> 2048: build ran out of memory"."""

    def shown(value: Json) -> str:
        return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    values: dict[str, list[Json]] = {}
    stages: dict[str, dict[str, None]] = {}
    refused: dict[str, str] = {}
    for change in changes:
        refused[change.setting] = "".join((refused.get(change.setting, ""), *(f"; {each}" for each in change.refused)))
        values.setdefault(change.setting, [change.old]).append(change.new)
        stages.setdefault(change.setting, {})[change.stage_run.rpartition("-")[0]] = None
    return [
        f"{setting} {' -> '.join(map(shown, words))}: {' and '.join(stages[setting])} ran out of memory{refused[setting]}"
        for setting, words in values.items()
    ]


@dataclass(frozen=True, slots=True)
class Needs:
    """Estimated peak memory and disk space of a stage run, in bytes. 0 for negligible amounts."""

    host: int = 0
    """Sum over its processes."""
    gpu: int = 0
    """On each of its GPUs."""
    gpu_least: int | None = None
    """The part of `gpu` that it cannot run without. Without the rest, it works on less at a time. None: all of it."""
    shared: int = 0
    """In /dev/shm."""
    leaves: int = 0
    """Its artifact on disk."""
    scratch: int = 0
    """Additional disk space while it runs."""
    error: float = 0.15
    """Error of the memory estimate, as a share, if no comparable run was measured."""
    assumed: tuple[str, ...] = ()
    """Names of the fields above that are assumptions. They are shown, but nothing is refused because of them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the matrix. Immutable, like the recipe and settings that cells share.

    `settings` maps a section (download, quantize, build, serve, smoke, perf, accuracy, ...) to its values with defaults
    filled in and this cell's overrides applied. `reason` is the reason why the cell cannot work, or None.
    """

    id: CellId
    model: str
    toolchain: str
    precision: str
    tp: int
    pp: int
    max_batch_size: int
    isl: int
    osl: int
    recipe: Mapping[str, Json] = field(repr=False)
    settings: Mapping[str, Mapping[str, Json]] = field(repr=False)
    base_dir: str = field(default=".", repr=False)
    """Directory of the matrix file. Relative paths in settings and recipes start here."""
    reason: str | None = None
    changes: tuple[SettingChange, ...] = ()
    """Changes to the settings of the matrix after it ran out of memory."""
    ep: int = 1
    """Expert parallel size, a divisor of `tp`; 1 splits each expert over all of its GPUs."""
    dp: int = 1
    """Attention data parallel size, a divisor of `tp`: groups of its GPUs, each with its own requests and a copy of attention."""
    gpu: str | None = None
    """Required type of GPU. None: any."""
    companions: Mapping[str, Mapping[str, Json]] = field(default_factory=dict, repr=False)
    """Additional models, once pinned: name -> `source`, `files` and `folder`, as in a pinned recipe.

    A draft model with a recipe also has its `numbers`, or its `recipe` if it becomes an engine.
    """

    @property
    def attention_tp(self) -> int:
        """GPUs that share the attention of a layer."""
        return self.tp // self.dp

    @property
    def group_batch_size(self) -> int:
        """Requests that one group of `attention_tp` GPUs processes at a time."""
        return -(-self.max_batch_size // self.dp)
