"""`pipeline plan` as text or Markdown, and `pipeline explain` as text or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from trtllm_pipeline.base import Json, Scope, StageRunId, StateError, UsageError, count, probe, size, text_blocks
from trtllm_pipeline.models import AS_IS, shown
from trtllm_pipeline.orchestrate import Forecast, Plan, StageRun, Store, estimates, forecast, manifest
from trtllm_pipeline.show.phrases import about, never_works
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import load_words

_ACTIONS: Final = {"run": "run", "pull": "pull", "up_to_date": "up to date", "skip": "not needed"}
"""Action in a plan's JSON -> words."""
_LOADS: Final = 8
"""Maximum number of different loads that are listed."""
_LIST_UP_TO: Final = 40
"""Maximum number of stage runs that are listed one by one without --verbose."""


def plan_text(plan: Plan, outlook: Forecast, *, verbose: bool) -> str:
    """Summary of a plan: totals by stage, reasons, and infeasible cells."""
    lines = [_cells(plan), *_notes(plan), *_loads(plan)]
    lines += _work(plan, outlook, verbose=verbose) if plan.feasible else []
    never = [(cell.id, str(cell.reason)) for cell in plan.cells if cell.reason is not None]
    lines += ["", *never_works(never, None if verbose else "--verbose")] if never else []
    return "\n".join(lines)


def plan_markdown(plan: Plan, outlook: Forecast, title: str) -> str:
    """The summary of a plan for a CI job."""
    blocks: list[text_blocks.Block] = [
        text_blocks.Heading(title),
        *map(text_blocks.TextLine, (_cells(plan), *_notes(plan), *_loads(plan))),
    ]
    if plan.feasible:
        lines = [*_offers(outlook), *_takes(plan, outlook)]
        blocks += [text_blocks.Grid(_heads(outlook), list(_by_stage(plan, outlook))), *map(text_blocks.TextLine, lines)]
        if rows := list(_needs(_tightest(plan, outlook))):
            blocks.append(text_blocks.Grid(_NEEDS, rows, left=(0, 1, 7)))
        counted = Counter(outlook.reasons.values()).most_common()
        blocks.append(
            text_blocks.Items(
                "why", [text_blocks.TextLine(f"{count(times, 'stage run')}: {reason}") for reason, times in counted]
            )
        )
    never = [text_blocks.TextLine(f"{cell.id}: {cell.reason}") for cell in plan.cells if cell.reason is not None]
    return text_blocks.as_markdown(
        [*blocks, text_blocks.Items(f"{count(len(never), 'cell')} can never work", never, folded=True)]
    )


def _heads(outlook: Forecast) -> tuple[str, ...]:
    return ("stage", "runs", "up to date", *(("to pull",) if outlook.pulls else ()), "to run", "expected")


def _cells(plan: Plan) -> str:
    feasible = len(plan.feasible)
    unshared = sum(len(run.cells) for run in plan.stage_runs.values())
    return (
        count(len(plan.cells), "cell")
        + (f", {feasible or 'none'} of them feasible" if feasible < len(plan.cells) else "")
        + (f"; {count(len(plan.stage_runs), 'stage run')}, {unshared} if nothing were shared" if feasible else "")
    )


def _notes(plan: Plan) -> list[str]:
    """Facts missing from cell ids: the format of weights used as they are, and model parts that servers ignore."""
    forms: dict[str, dict[str, None]] = {}
    for cell in plan.cells:
        if cell.precision == AS_IS and (form := cell.recipe.get("quantization")):
            forms.setdefault(shown(AS_IS, str(form)), {})[cell.model] = None
    return [*(f"{form}: {', '.join(models)}" for form, models in forms.items()), *toolchains.caveats(plan.feasible)]


def _loads(plan: Plan) -> list[str]:
    """The loads that the plan's cells are measured with, most frequent first."""
    measured = {cell for run in plan.stage_runs.values() if run.stage.name == "perf" for cell in run.cells}
    counted = Counter(load_words(cell) for cell in plan.feasible if cell.id in measured).most_common()
    if len(counted) > _LOADS:
        return [f"load: {counted[0][0]}, and {len(counted) - 1} others; --format json lists them by cell"]
    one = len(counted) == 1
    return [f"load{'' if one else ' of ' + count(cells, 'cell')}: {words}" for words, cells in counted]


def _by_stage(plan: Plan, outlook: Forecast) -> Iterator[tuple[str, ...]]:
    """One row per stage, with the columns of `_heads`."""
    by_stage: dict[str, list[StageRun]] = {stage: [] for stage in _in_order(plan)}
    for run in plan.stage_runs.values():
        by_stage[run.stage.name].append(run)
    for stage, runs in by_stage.items():
        todo = [run for run in runs if run.id in outlook.to_run]
        done = sum(run.id in outlook.present for run in runs)
        kept = "-" if runs[0].stage.scope is Scope.SERVICE else str(done)
        seconds = about(sum(outlook.expected_s[run.id] for run in todo)) if todo else ""
        pulled = [str(sum(run.id in outlook.pulls for run in runs))] if outlook.pulls else []
        yield stage, str(len(runs)), kept, *pulled, str(len(todo)), seconds


def _offers(outlook: Forecast) -> list[str]:
    """The offers of a remote store, and the rejected ones."""
    offers = outlook.offers
    if offers is None:
        return []
    if offers.fault is not None:
        return [f"no artifacts pulled: {offers.fault}"]
    pulled = count(len(offers.pulls), "artifact")
    lines = [
        f"pull: {pulled} from {offers.url}, {size(offers.size_bytes)}, instead of creating {_them(len(offers.pulls))}"
    ]
    if not offers.pulls:
        lines = [f"nothing to pull from {offers.url}"]
    refused = Counter(f"{each.stage}: {each.message}" for each in offers.refused.values())
    return [*lines, *(f"not pulled: {number} x {why}" for why, number in refused.most_common(3))]


def _them(number: int) -> str:
    return "it" if number == 1 else "them"


def _takes(plan: Plan, outlook: Forecast) -> list[str]:
    """The expected time."""
    if not outlook.to_run and outlook.pulls:
        return ["no stages to run after the pull"]
    if not outlook.to_run:
        return ["nothing to do: all results are up to date"]
    some = f"rough for {outlook.guessed} of {count(len(outlook.to_run), 'stage run')}"
    every = "rough: no comparable run yet"
    guess = "" if not outlook.guessed else f"; {every if outlook.guessed == len(outlook.to_run) else some}"
    where = "the assumed machine" if plan.machine.assumed else "this machine"
    return [f"time: about {about(outlook.total_s)} on {where}{guess}"]


_NEEDS: Final = ("needs", "of", "about", "has", "headroom", "error", "measured", "verdict")


def _needs(needs: Iterable[estimates.Need]) -> Iterator[tuple[str, ...]]:
    """One row per resource of `_NEEDS`."""
    for need in needs:
        estimate, has, left = need.estimate, need.has, need.headroom
        in_words = _duration if need.resource == estimates.TIME else size
        yield (
            need.stage or "all",
            need.resource,
            in_words(estimate.value),
            "?" if has is None else in_words(has),
            "?" if left is None else f"{'-' if left < 0 else ''}{in_words(abs(left))}",
            f"±{estimate.error:.0%}",
            str(estimate.measured or "-"),
            need.verdict,
        )


def _duration(milliseconds: float) -> str:
    return about(milliseconds / 1000)


def _tightest(plan: Plan, outlook: Forecast, *, verbose: bool = False) -> list[estimates.Need]:
    """Memory, disk and time by stage: the run of each stage that needs most, or all runs."""
    order = {stage: number for number, stage in enumerate(_in_order(plan))}
    needs = [
        *(outlook.needs if verbose else estimates.tightest(outlook.needs)),
        *forecast.durations(plan, outlook, every=verbose),
    ]
    return sorted(needs, key=lambda need: order.get(need.stage, len(order)))


def _needs_table(plan: Plan, outlook: Forecast, *, verbose: bool) -> list[str]:
    """The needs of the stages next to the available amounts."""
    needs = _tightest(plan, outlook, verbose=verbose)
    cells = [f"  {need.cell}" if verbose else "" for need in needs]
    rows = zip((_NEEDS, *_needs(needs)), ("", *cells), strict=True)
    return [
        "",
        *(
            f"{stage:<12}{of:<12}{about:>9}{has:>8}{left:>9}{error:>7}{measured:>9}  {verdict}{cell}"
            for (stage, of, about, has, left, error, measured, verdict), cell in rows
        ),
    ]


def _work(plan: Plan, outlook: Forecast, *, verbose: bool) -> list[str]:
    """The work to do, by stage."""
    rows = (_heads(outlook), *_by_stage(plan, outlook))
    widths = (6, 12, *((9,) if outlook.pulls else ()), 8, 12)
    lines = ["", *(f"{stage:<12}{''.join(map(str.rjust, row, widths))}" for stage, *row in rows)]
    lines += ["", *_offers(outlook), *_takes(plan, outlook)]
    if outlook.to_run:
        lines += _needs_table(plan, outlook, verbose=verbose)
    if outlook.to_run:
        lines += ["", "why:", *_why(outlook)]
    todo = outlook.to_run.union(outlook.pulls)
    if verbose or 0 < len(todo) <= _LIST_UP_TO:
        lines += _listing(plan, todo if not verbose else frozenset(plan.stage_runs), outlook)
    return lines


def _in_order(plan: Plan) -> list[str]:
    """The stages of a plan in dependency order, otherwise in order of appearance."""
    runs = plan.stage_runs
    needs: dict[str, set[str]] = {run.stage.name: set() for run in runs.values()}
    for run in runs.values():
        of_stage = needs[run.stage.name]
        for each in run.needs:
            of_stage.add(runs[each].stage.name)
    ordered: list[str] = []
    while left := [name for name in needs if name not in ordered]:
        # Two toolchains can disagree on the order of two stages. Then the first remaining stage is next.
        ordered.append(next((name for name in left if needs[name] <= set(ordered)), left[0]))
    return ordered


def _why(outlook: Forecast) -> list[str]:
    counted = Counter(outlook.reasons.values())
    lines = [f"  {count:>5} x {reason}" for reason, count in counted.most_common(12)]
    return [*lines, f"  and {len(counted) - 12} more reasons"] if len(counted) > 12 else lines


def _listing(plan: Plan, runs: frozenset[StageRunId], outlook: Forecast) -> list[str]:
    lines = ["", f"{'stage run':<26}{'cells':>6}{'expected':>10}  first cell, and why"]
    for run in plan.stage_runs.values():
        if run.id in runs:
            takes = outlook.expected_s.get(run.id)
            expected = size(outlook.pulls[run.id]) if run.id in outlook.pulls else "" if takes is None else about(takes)
            why = outlook.reasons.get(run.id, _ACTIONS[outlook.action(run.id)])
            lines.append(f"{run.id:<26}{len(run.cells):>6}{expected:>10}  {run.first_cell.id}: {why}")
    return lines


# Explanation of a cell's stages


def explanation(plan: Plan, outlook: Forecast, stage: str | None, store: Store | None) -> dict[str, Any]:
    """Explain why each stage of each cell, or only `stage`, has to run, with the content of its fingerprint.

    Includes artifacts that other code created. Raises UsageError.
    """

    def explained(run_id: StageRunId) -> dict[str, Json]:
        run = plan.stage_runs[run_id]
        return {
            "stage": run.stage.name,
            "id": run_id,
            "fingerprint": run.fingerprint,
            "action": outlook.action(run_id),
            "reason": outlook.reasons.get(run_id),
            "shared_with": len(run.cells) - 1,
            "other_code": _other_code(store, run) if store is not None and run_id in outlook.present else None,
            "key": json.loads(run.key),
        }

    cells = []
    for cell in plan.cells:
        runs = [run for run in plan.by_cell[cell.id] if stage in {None, plan.stage_runs[run].stage.name}]
        cells.append({"id": cell.id, "reason": cell.reason, "stages": [explained(run) for run in runs]})
    if stage is not None and not any(cell["stages"] for cell in cells):
        raise UsageError(f"unknown stage in this plan: {stage!r}", hint="list all stages with pipeline explain CELL")
    return {"schema": 1, "cells": cells}


def _other_code(store: Store, run: StageRun) -> str | None:
    """The digest of the code that created an artifact, if it differs from the running code."""
    try:
        system = manifest.read(store.folder(run.stage.name, run.fingerprint)).provenance.get("system")
    except StateError:
        return None
    made = system.get("code") if isinstance(system, dict) else None
    return made if isinstance(made, str) and made != probe.code_digest() else None


def explanation_text(explained: dict[str, Any], *, full: bool) -> str:
    """The explanation as text. `full` adds the content of fingerprints."""
    return "\n".join(line for cell in explained["cells"] for line in _explained(cell, full=full))


def _explained(cell: dict[str, Any], *, full: bool) -> list[str]:
    lines = [cell["id"]]
    if cell["reason"]:
        lines.append(f"  infeasible: {cell['reason']}")
    for stage in cell["stages"]:
        others = stage["shared_with"]
        shared = f", shared with {count(others, 'other cell')}" if others else ""
        lines.append(f"  {stage['stage']:<11} {_ACTIONS[stage['action']]:<11} {stage['fingerprint']}{shared}")
        if stage["reason"]:
            lines.append(f"{'':<14}{stage['reason']}")
        if stage["other_code"]:
            lines.append(f"{'':<14}created by other code: {stage['other_code']} (this is {probe.code_digest()})")
        if full:
            key = json.dumps(stage["key"], indent=2, ensure_ascii=False)
            lines += ["", "  fingerprint content:", *(f"    {line}" for line in key.splitlines())]
    return lines
