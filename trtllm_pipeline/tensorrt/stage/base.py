"""A stage: its inputs, parameters and resources, and the program that runs it.

A toolchain is a table of `Stage` rows. Everything a stage's program can read arrives through its `StageContext`, and all
of that except paths and runtime parameters is in the fingerprint. A program cannot read undeclared input, so undeclared
input cannot make a result stale.

A stage's own program is a function `run(context: StageContext[Params]) -> None`, named by "module:function" and
imported only in the process that runs it. It writes its results under `context.out`, prints its log to stdout and
stderr, raises `StageError` for failures it understands, and calls `context.progress(done, total, unit)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from trtllm_pipeline.base import Cell, Needs, Resources, Scope, write_json
from trtllm_pipeline.models import ModelPart

if TYPE_CHECKING:
    from trtllm_pipeline.base import Machine

OUT: Final = "out"
"""Directory of an attempt, and of an artifact, that holds the result."""
P = TypeVar("P")
JOB: Final = "job.json"
PROGRESS_FILE: Final = "progress.json"
FAILURE_FILE: Final = "failure.json"
SERVICE_FILE: Final = "service.json"
"""Written into the attempt directory by a service when it is ready: its endpoints."""
REPAIR_FILE: Final = "repair.json"
"""Next to it, while the service restarts its server."""


@dataclass(frozen=True)
class StageContext(Generic[P]):
    """The input of a stage's program."""

    params: P
    """An instance of the class that the stage names, see `tensorrt/stage/params.py`."""
    inputs: Mapping[str, Path]
    """Directory of each upstream artifact by input name. A stage inside a service also has `service`, a JSON file."""
    files: Mapping[str, Path]
    """Files of the user (prompts, calibration rows) by name. Their content is in the fingerprint."""
    out: Path
    """An empty directory of this attempt alone. It becomes the artifact if the program succeeds."""
    attempt: Path
    """The attempt's directory around `out`: job, log, progress."""

    def progress(self, done: float, total: float | None, unit: str) -> None:
        """Report progress. It is shown live, at most a few times a second. `unit` is e.g. "bytes" or "requests"."""
        now = time.monotonic()
        if done != total and now - _last_progress.get(self.attempt, -1.0) < 0.2:
            return
        _last_progress[self.attempt] = now
        write_json(self.attempt / PROGRESS_FILE, {"done": done, "total": total, "unit": unit})


_last_progress: dict[Path, float] = {}


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of work of one toolchain."""

    name: str
    version: int
    """Bumped by hand if the same inputs would give another result."""
    summary: str
    """A phrase that starts with a small letter, without a full stop."""
    program: str | None
    """"module:function" that does the work, or completes the work of `commands`. None: `commands` do all of it."""
    params: Callable[..., Any]
    """The class of its parameters."""
    read: Callable[[Cell], Any]
    """The parameters of a cell."""
    inputs: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Input name -> name of the upstream stage of the same cell. With several names, the first that the cell has."""
    optional: frozenset[str] = frozenset()
    """Names of the inputs that a cell may lack."""
    parts: Callable[[Cell], Mapping[str, frozenset[ModelPart]]] | None = None
    """Input name -> the parts of the model that it reads, for inputs that are not read whole. The key depends only on these
    files, and the program sees no others."""
    contents: Callable[[Cell], Mapping[str, str] | None] | None = None
    """Name -> digest of each file that it produces, if known before it runs."""
    after: tuple[str, ...] = ()
    """Stages of the same cell that must have succeeded first, without being read."""
    scope: Scope = Scope.ARTIFACT
    applies: Callable[[Cell, Machine], bool] = lambda _cell, _machine: True
    """True if a cell has this stage on a machine. Another stage of the cell cannot require one that it lacks."""
    shared: bool = False
    """True if the work is the same for every toolchain, so that they share the result."""
    of: str | None = None
    """The toolchain that owns the stage, if another has it as well: the result is the same for both."""
    files: Callable[[Cell], Mapping[str, str]] = lambda _cell: {}
    """Name -> path of the user's files it reads; "builtin:NAME" for those that come with the project."""
    file_names: tuple[str, ...] = ()
    """All names that `files` can give."""
    settle: Callable[[Any, Mapping[str, str], Machine], Any] = lambda params, _files, _machine: params
    """Completes the parameters once the paths of `files` are known, for those that depend on a file's size."""
    resources: Callable[[Cell, Machine], Resources] = lambda _cell, _machine: Resources()
    """Resources that it occupies on a machine."""
    gpus: Callable[[StageContext[Any]], int | None] = lambda _context: 0
    """Number of GPUs for a manual run, without a cell. None for all visible GPUs."""
    commands: Callable[[StageContext[Any], Machine], Sequence[Sequence[str]]] | None = None
    """Command lines of other programs that do the work, run in order. Our program then checks their output."""
    starts: Callable[[Cell, StageContext[Any], Machine], Sequence[Sequence[str]]] | None = None
    """Command lines that its program starts itself, for plans. `{http_port}` and the like are chosen at the start."""
    starter: str | None = None
    """(service) "module:function" that returns the `launch.Starter` of a context."""
    identity: tuple[str, ...] = ()
    """Names of the toolchain's identity entries (versions, GPU) this stage's result depends on."""
    timeout_s: float = 3600.0
    expected_s: float = 30.0
    """The part of its duration (for a service, until it is ready) that is the same for every model."""
    takes: Callable[[Cell, Machine], float] | None = None
    """Seconds that the model adds on a machine. The cell's recipe has the numbers of its model."""
    needs: Callable[[Cell, Machine], Needs] | None = None
    """Memory and disk that it needs on a machine. The cell's recipe has the numbers of its model."""
    retries: int = 2
    """Number of retries after a transient failure."""
    examples: tuple[str, ...] = ()
    """What to type after `pipeline stage NAME` for a run on explicit files. Without any, the stage has no command. Of stages with
    one name, the first toolchain's summary and examples are shown."""
    section: str | None = None
    """Settings section with its timeout and retries, if its name differs from the stage's."""

    @property
    def sentence(self) -> str:
        return f"{self.summary[:1].upper()}{self.summary[1:]}."

    def upstream(self, name: str) -> tuple[str, ...]:
        """The stages that input `name` can come from, the preferred first."""
        stages = self.inputs[name]
        return (stages,) if isinstance(stages, str) else stages
