"""Compares two plans of one matrix, such as for another release: `pipeline plan --compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from trtllm_pipeline.base import Json, StageRunId, changes, count, text_blocks
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, stages_in_order
from trtllm_pipeline.orchestrate.plan.plan_file import commands_of
from trtllm_pipeline.orchestrate.plan.planner import Request, plan_of
from trtllm_pipeline.orchestrate.plan.stage_status import in_words
from trtllm_pipeline.orchestrate.store.store import Store

Commands = Callable[[StageRun], Sequence[Sequence[str]]]
"""The command lines of a stage run, with placeholders for directories that always differ, such as those of inputs."""
_FOLDED: Final = 10
"""Markdown collapses longer lists of cells."""


@dataclass(frozen=True, slots=True)
class CellChange:
    """A cell that can work on one side only, or that has another toolchain."""

    cell: str
    change: str
    """`lost`, `gained` or `toolchain`."""
    reason: str


@dataclass(frozen=True, slots=True)
class StageCount:
    """Stage runs of one stage."""

    stage: str
    same: int
    changed: int
    """Cells with the stage on both sides and different fingerprints."""
    only_new: int
    only_base: int


@dataclass(frozen=True, slots=True)
class CommandChange:
    """Words that the command lines of a stage lose and gain. An option includes its value."""

    stage: str
    stage_runs: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """Two plans compared."""

    new: str
    base: str
    feasible: tuple[int, int]
    """Feasible cells of the new plan and of the base."""
    cells: tuple[CellChange, ...]
    stages: tuple[StageCount, ...]
    reasons: tuple[tuple[str, int], ...]
    """Reasons for different fingerprints with the number of stage runs, the most frequent first."""
    commands: tuple[CommandChange, ...]

    def to_json(self) -> dict[str, Json]:
        """The output of `pipeline plan --compare MACHINE --format json`, see docs/reference/formats.md."""
        return {
            "schema": 1,
            "new": self.new,
            "base": self.base,
            "feasible": {"new": self.feasible[0], "base": self.feasible[1]},
            "cells": [asdict(each) for each in self.cells],
            "stages": [asdict(each) for each in self.stages],
            "reasons": [{"reason": reason, "stage_runs": times} for reason, times in self.reasons],
            "commands": [
                {**asdict(each), "removed": [*each.removed], "added": [*each.added]} for each in self.commands
            ],
        }

    def blocks(self) -> Iterator[text_blocks.Block]:
        yield text_blocks.Heading(f"{self.new}, compared with {self.base}")
        new, base = self.feasible
        if not new and not base:
            yield text_blocks.TextLine("no cell can work on either machine: pipeline plan shows the reasons")
            return
        if not (self.cells or any(each.changed or each.only_new or each.only_base for each in self.stages)):
            yield text_blocks.TextLine(f"{count(new, 'feasible cell')}. The plans are the same: no fingerprint differs")
            return
        yield text_blocks.TextLine(f"{count(new, 'feasible cell')}, {base} before")
        rows = [
            (each.stage, *map(str, (each.same, each.changed, each.only_new, each.only_base))) for each in self.stages
        ]
        yield text_blocks.Grid(["stage", "the same", "made again", "new", "gone"], rows)
        for kind, title in (
            ("lost", "can no longer work"),
            ("gained", "can work now"),
            ("toolchain", "built by another toolchain"),
        ):
            lines = [text_blocks.TextLine(f"{each.cell}: {each.reason}") for each in self.cells if each.change == kind]
            yield text_blocks.Items(f"{title} ({len(lines)})", lines, folded=len(lines) > _FOLDED)
        yield text_blocks.Items(
            "why", [text_blocks.TextLine(f"{count(times, 'stage run')}: {reason}") for reason, times in self.reasons]
        )
        yield text_blocks.Items("command lines", list(map(_command_line, self.commands)))


def _command_line(each: CommandChange) -> text_blocks.TextLine:
    sides = (("without", each.removed), ("with", each.added))
    words = "; ".join(f"{side} {' '.join(words)}" for side, words in sides if words)
    return text_blocks.TextLine(f"{each.stage} ({count(each.stage_runs, 'stage run')}): {words}")


def _keys_of_inputs(run: StageRun, plan: Plan) -> dict[str, str]:
    return {name: plan.stage_runs[upstream].key for name, upstream in run.inputs.items()}


def compare_plans(request: Request, base: str, store: Store | None) -> PlanDifference:
    """Compare the plan of `request` with the plan for the machine `base`, given as for `--assume`. Raises like `plan_of`."""
    new, old = (plan_of(each, store, guess=True) for each in (request, replace(request, assume=base)))
    commands = commands_of(new, _input), commands_of(old, _input)
    return difference(new, old, names=(request.assume or "this machine", base), commands=commands)


def _input(run: StageRun) -> str:
    return f"{{{run.stage.name}}}"


def difference(new: Plan, base: Plan, *, names: tuple[str, str], commands: tuple[Commands, Commands]) -> PlanDifference:
    """Compare `new` with `base`, two plans of one matrix. `names` and `commands` are for both, in this order."""
    changed = {
        run: other
        for cell, before in base.by_cell.items()
        for run, other in _pairs(new, new.by_cell.get(cell, ()), base, before)
        if run not in base.stage_runs
    }
    why = Counter(
        in_words(new, run, changes(other.key, run.key), _keys_of_inputs(other, base))
        for run, other in ((new.stage_runs[run], base.stage_runs[other]) for run, other in changed.items())
    )
    return PlanDifference(
        *names,
        (len(new.feasible), len(base.feasible)),
        tuple(_cells(new, base)),
        tuple(_stages(new, base, changed)),
        tuple(why.most_common()),
        tuple(_commands(new, base, changed, commands)),
    )


def _pairs(
    new: Plan, now: Sequence[StageRunId], base: Plan, before: Sequence[StageRunId]
) -> Iterator[tuple[StageRunId, StageRunId]]:
    """The stage runs of one cell that both plans have, by stage."""
    by_stage = {_what(base.stage_runs[run]): run for run in before}
    for run in now:
        if (other := by_stage.get(_what(new.stage_runs[run]))) is not None:
            yield run, other


def _what(run: StageRun) -> tuple[str, str]:
    """A cell may have two runs of a stage: its own, and its draft model's."""
    return run.stage.name, run.first_cell.model


def _cells(new: Plan, base: Plan) -> Iterator[CellChange]:
    before = {cell.id: cell for cell in base.cells}
    for cell in new.cells:
        old = before.pop(cell.id, None)
        worked = old is not None and old.reason is None
        if cell.reason is None and not worked:
            yield CellChange(cell.id, "gained", f"before: {'no such cell' if old is None else old.reason}")
        elif cell.reason is not None and worked:
            yield CellChange(cell.id, "lost", cell.reason)
        elif worked and old is not None and cell.toolchain != old.toolchain:
            yield CellChange(cell.id, "toolchain", f"{cell.toolchain}, before {old.toolchain}")
    yield from (CellChange(cell.id, "lost", "no such cell") for cell in before.values() if cell.reason is None)


def _stages(new: Plan, base: Plan, changed: Mapping[StageRunId, StageRunId]) -> Iterator[StageCount]:
    replaced = {*changed.values()}
    for stage in stages_in_order(base, new):
        now, before = ({run.id for run in plan.stage_runs.values() if run.stage.name == stage} for plan in (new, base))
        yield StageCount(
            stage,
            len(now & before),
            len(now & changed.keys()),
            len(now - before - changed.keys()),
            len(before - now - replaced),
        )


def _commands(
    new: Plan, base: Plan, changed: Mapping[StageRunId, StageRunId], commands: tuple[Commands, Commands]
) -> Iterator[CommandChange]:
    """Equal for many stage runs, so reported once."""
    counts: Counter[tuple[str, tuple[str, ...], tuple[str, ...]]] = Counter()
    for run, other in changed.items():
        now, before = (
            Counter(item for words in of(plan.stage_runs[each]) for item in _items(words))
            for of, plan, each in zip(commands, (new, base), (run, other), strict=True)
        )
        if now != before:
            counts[new.stage_runs[run].stage.name, tuple(before - now), tuple(now - before)] += 1
    for (stage, removed, added), times in counts.items():
        yield CommandChange(stage, times, removed, added)


def _items(words: Sequence[str]) -> Iterator[str]:
    """A command line as words. An option includes its values."""
    item: list[str] = []
    for word in words:
        if item and (word.startswith("-") or not item[0].startswith("-")):
            yield " ".join(item)
            item = []
        item.append(word)
    yield from [" ".join(item)] * bool(item)
