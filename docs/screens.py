"""Draws what a terminal shows while a run continues, for the documentation, by the view that draws it there.

The runs are played: real plans for an assumed machine, the scheduler on a simulated clock, durations by their formulas. So the
pictures are the same every time, and `docs/generate.py` writes them again when the view changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any, Final

from trtllm_pipeline.base.domain import Cell, CellId, StageRunId, StageStatus
from trtllm_pipeline.base.machine import assume
from trtllm_pipeline.orchestrate.matrix.models import Settings
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, recipes_folder
from trtllm_pipeline.orchestrate.plan.plan import Plan, make_plan
from trtllm_pipeline.orchestrate.run.forecast import guess_s
from trtllm_pipeline.orchestrate.run.order import capacities, play, tasks
from trtllm_pipeline.orchestrate.run.scheduler import Event, Instruction, Scheduler
from trtllm_pipeline.show.progress.live import Picture
from trtllm_pipeline.show.progress.tracker import Tracker
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

TOOLCHAIN: Final = "tensorrt_llm"
MACHINE: Final = "tensorrt_llm==0.20.0,sm=90,gpus=8,gpu_memory_gib=80"
SCREENS: Final = {80: 24, 200: 40}
"""Columns -> lines."""
_PRECISIONS: Final = ("fp16", "fp8", "int8_wo")
_MODELS: Final = ("llama-3.1-8b-instruct", "mistral-7b-instruct-v0.3", "qwen2.5-7b-instruct", "qwen2-7b-instruct")
_LENGTHS: Final = tuple(product((128, 256, 512, 1024, 2048), (64, 128, 256, 512, 1024)))
CELLS: Final = {
    3: (_MODELS[:1], _PRECISIONS, (1,), (8,), ((2048, 512),)),
    30: (_MODELS[:2], _PRECISIONS, (1,), (1, 2, 4, 8, 16), ((2048, 512),)),
    3000: (_MODELS, _PRECISIONS, (1, 2), (1, 2, 4, 8, 16), _LENGTHS),
}
"""How many -> their models, precisions, numbers of GPUs, batch sizes and lengths."""
PART: Final = {3: 0.8, 30: 0.8, 3000: 0.5}
"""How many -> the part of the run after which the picture is drawn."""
_WHY: Final = (
    "this machine is in use by process 4711 in workspace /home/ann/models/.pipeline (pipeline run --matrix llama.yaml)"
)
_S = StageStatus


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _ReachedError(Exception):
    """The clock is where the picture is drawn."""


class _Watched(Scheduler):
    """Sets a clock to the time of each decision. Raises _ReachedError after the first one at `end_s` or later."""

    def __init__(self, clock: _Clock, end_s: float, *tasks: Any, **more: Any) -> None:
        self._clock, self._end_s = clock, end_s
        super().__init__(*tasks, **more)

    def advance(self, now: float, *events: Event) -> list[Instruction]:
        """See `Scheduler.advance`."""
        self._clock.now = now
        instructions = super().advance(now, *events)
        if now >= self._end_s:
            raise _ReachedError
        return instructions


def _plan(cells: int) -> Plan:
    settings = Settings().model_dump(mode="json")
    settings["perf"]["exclusive"] = "gpu"
    machine = assume.parse(MACHINE)
    recipes = {}
    for model in CELLS[cells][0]:
        recipes[model] = load_recipe(recipes_folder() / f"{model}.yaml").model_dump(mode="json")
        recipes[model]["source"] = {"hugging_face": model, "revision": "0"}
    made = []
    for model, precision, tp, batch, (isl, osl) in product(*CELLS[cells]):
        name = CellId(f"{model}/{precision}/tp{tp}pp1/bs{batch}/isl{isl}-osl{osl}")
        made.append(Cell(name, model, TOOLCHAIN, precision, tp, 1, batch, isl, osl, recipes[model], settings))
    return make_plan(made, {TOOLCHAIN: toolchains.load(TOOLCHAIN)}, machine, digest=lambda path, _cell: (path, "0"))


@cache
def picture(cells: int) -> Picture:
    """That of a run of so many cells, some way on; one build has failed, except of three."""
    plan, clock = _plan(cells), _Clock()
    runs, on = plan.stage_runs, capacities(plan.machine)
    takes = {run.id: guess_s(run, plan.machine) for run in runs.values()}
    learnt = {run.label: takes[run.id] for run in runs.values()}
    tracker = Tracker(plan, dict.fromkeys(runs, _S.PENDING), learnt, clock)
    end_s = PART[cells] * tracker.left_s()[0]
    known = list(tasks(plan, runs, lambda run: takes[run.id], None, on))

    builds = [run.id for run in runs.values() if run.stage.name == "build"]
    unlucky = None if cells == 3 else builds[7]
    lost = set[StageRunId]()

    def changed(run: StageRunId, _old: StageStatus, new: StageStatus) -> None:
        if run == unlucky and new is _S.SUCCEEDED:
            tracker.changed(runs[run], _S.FAILED, None)
            lost.add(run)
            for each in runs.values():
                if lost.intersection(each.needs):
                    lost.add(each.id)
                    tracker.changed(each, _S.BLOCKED, None)
        elif run not in lost:
            tracker.changed(runs[run], new, takes[run] if new is _S.SUCCEEDED else None)

    with suppress(_ReachedError):
        play(known, _Watched(clock, end_s, known, *on, observe=changed))
    clock.now += 12.0
    shown = Picture(tracker)
    running = [run for run, _ in tracker.running()]
    shown.progress = {
        run.id: {"done": 24, "total": 64, "unit": "requests"} for run in running if run.stage.name == "perf"
    }
    tracker.estimate()
    return shown


def waiting() -> Picture:
    """That of a run that waits for another invocation."""
    tracker = Tracker(plan := _plan(3), dict.fromkeys(plan.stage_runs, _S.PENDING), {}, clock := _Clock())
    launches = [run for run in plan.stage_runs.values() if run.stage.name == "launch"]
    for run in plan.stage_runs.values():
        if run.stage.name in {"download", "quantize", "convert", "build", "check", "repository"}:
            tracker.changed(run, _S.UP_TO_DATE, None)
    clock.now += 75.0
    tracker.changed(launches[0], _S.RUNNING, None)
    tracker.waits(launches[0], _WHY)
    tracker.changed(launches[0], _S.ELSEWHERE, None)
    tracker.estimate()
    return Picture(tracker)


def screen(name: str) -> Iterator[str]:
    """What is on the screen, `CELLS COLUMNS` or `waiting COLUMNS`, as an indented block."""
    what, columns = name.split()
    shown = waiting() if what == "waiting" else picture(int(what))
    lines: Sequence[Any] = shown.draw(int(columns) - 1, SCREENS[int(columns)] - 1)
    yield from (f"    {line.plain}".rstrip() for line in lines)
