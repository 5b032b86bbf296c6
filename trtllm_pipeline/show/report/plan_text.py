"""`pipeline plan` as text or Markdown, and `pipeline explain` as text or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from trtllm_pipeline.base import (
    Cell,
    Json,
    Scope,
    StageRunId,
    StateError,
    UsageError,
    count,
    duration,
    memory_size,
    probe,
    size,
    text_blocks,
)
from trtllm_pipeline.models import AS_IS, shown
from trtllm_pipeline.orchestrate import Forecast, Plan, StageRun, Store, estimates, forecast, manifest, stages_in_order
from trtllm_pipeline.show.phrases import MAX_CELLS, about, never_works
from trtllm_pipeline.tensorrt import catalog as toolchains
from trtllm_pipeline.tensorrt import load_words

_ACTIONS: Final = {"run": "run", "pull": "pull", "up_to_date": "up to date", "skip": "not needed"}
"""Action in a plan's JSON -> words."""
_LOADS: Final = 8
_FITTING: Final = ("fits", "unknown")
"""Verdicts that need no attention."""


def plan_text(plan: Plan, outlook: Forecast, *, verbose: bool) -> str:
    """A plan: totals and cells that do not fit, then its stages. With `verbose`, also each stage run and its needs."""
    lines = _summary(plan, outlook)
    for title, cells in _misfits(plan, outlook).items():
        lines += ["", title, *_some(cells, None if verbose else "--verbose")]
    never = [(cell.id, str(cell.reason)) for cell in plan.cells if cell.reason is not None]
    lines += ["", *never_works(never, None if verbose else "--verbose")] if never else []
    lines += _work(plan, outlook, verbose=verbose) if plan.feasible else []
    return "\n".join(lines)


def doubts(plan: Plan, outlook: Forecast) -> list[str]:
    """What a run says before it starts: cells that probably do not fit, and stages that may exceed their time limit."""
    doubtful = _misfits(plan, outlook, {estimates.NOT: _MISFITS[estimates.NOT]})
    return [line for title, cells in doubtful.items() for line in (title, *_some(cells, "pipeline plan -v"))]


def plan_markdown(plan: Plan, outlook: Forecast, title: str) -> str:
    """The summary of a plan for a CI job."""
    blocks: list[text_blocks.Block] = [
        text_blocks.Heading(title),
        *map(text_blocks.TextLine, _summary(plan, outlook)),
        *(
            text_blocks.Items(misfit, list(map(text_blocks.TextLine, cells)))
            for misfit, cells in _misfits(plan, outlook).items()
        ),
    ]
    if plan.feasible:
        blocks.append(text_blocks.Grid(_heads(outlook), list(_by_stage(plan, outlook))))
        if rows := list(_needs(outlook.needs)):
            blocks.append(text_blocks.Grid(_NEEDS, rows, left=(0, 1, 7, 8)))
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


def _summary(plan: Plan, outlook: Forecast) -> list[str]:
    work = [*_offers(outlook), *_takes(plan, outlook)] if plan.feasible else []
    return [_cells(plan, outlook), _machine(plan), *_loads(plan), *work, *_notes(plan)]


def _heads(outlook: Forecast) -> tuple[str, ...]:
    memory_heads = [f"{_SHORT[resource]} GiB" for resource in _memory_columns(outlook)]
    pulled = ["to pull"] if outlook.pulls else []
    return ("stage", "runs", "up to date", *pulled, "to run", "expected", *memory_heads)


def _cells(plan: Plan, outlook: Forecast) -> str:
    """The headline: numbers of cells and stage runs, and of cells that are too large even with the estimate's error."""
    feasible = len(plan.feasible)
    beyond = (
        need
        for need in outlook.needs
        if need.verdict == estimates.NOT or (need.verdict == estimates.LESS and need.estimate.least > (need.has or 0))
    )
    large = len(_cells_of(beyond, _sharing(plan)))
    unshared = sum(len(run.cells) for run in plan.stage_runs.values())
    return (
        count(len(plan.cells), "cell")
        + (f", {feasible or 'none'} of them feasible" if feasible < len(plan.cells) else "")
        + (f"; {count(len(plan.stage_runs), 'stage run')}, {unshared} if nothing were shared" if feasible else "")
        + (f"; {count(large, 'cell')} too large" if large else "")
    )


def _machine(plan: Plan) -> str:
    known = dict(plan.machine.types) or {"": plan.machine}
    named = []
    for machine in known.values():
        gpus = Counter((gpu.name, gpu.memory_bytes) for gpu in machine.gpus)
        parts = [f"{number} x {name} ({memory_size(size_bytes)})" for (name, size_bytes), number in gpus.items()]
        parts = parts or [f"no GPU, {count(machine.cpus, 'CPU')}"]
        installed = machine.tensorrt_llm
        named.append(", ".join([*parts, *([] if installed is None else [f"TensorRT-LLM {installed.release}"])]))
    on_cpu = (
        plan.machine.assumed and plan.machine.gpus and {cell.toolchain for cell in plan.cells} == {toolchains.EMBEDDED}
    )
    unused = "; its GPUs are not used: add tensorrt_llm==1.2 to --assume, or choose a toolchain" if on_cpu else ""
    return f"{'assumed machine' if plan.machine.assumed else 'machine'}: {'; '.join(dict.fromkeys(named))}{unused}"


_MISFITS: Final = {
    estimates.NOT: "probably does not fit; pipeline plan --fit looks for changes",
    estimates.LESS: "works on fewer requests or rows at a time; pipeline plan --fit proposes changes",
    estimates.TIGHT: "tight",
}
"""Verdicts that need attention, the worst first, and their words."""


def _some(cells: Sequence[str], command: str | None) -> list[str]:
    """Lines of the first cells, and the command that lists all. All of them without a command."""
    shown = cells if command is None else cells[:MAX_CELLS]
    more = [f"  and {len(cells) - len(shown)} more: {command} lists all"] if len(shown) < len(cells) else []
    return [*(f"  {cell}" for cell in shown), *more]


def _misfits(plan: Plan, outlook: Forecast, verdicts: Mapping[str, str] = _MISFITS) -> dict[str, list[str]]:
    """Feasible cells with one of these verdicts on their stages, by the missing resource, and slow ones by their timeout."""
    sharing = _sharing(plan)
    memory = [need for need in outlook.needs if need.resource != estimates.DISK]
    lacking: dict[str, list[str]] = {}
    for verdict, words in verdicts.items():
        for top, cells in _worst((need for need in memory if need.verdict == verdict), sharing):
            amounts = f"{memory_size(top.estimate.value)} of {top.resource} (±{top.estimate.error:.0%})"
            title = f"{top.stage} needs up to {amounts}, {memory_size(top.has or 0)} available: {words}"
            lacking[title] = cells
    slow = (need for need in forecast.durations(plan, outlook) if need.verdict in verdicts)
    settings = {run.stage.name: forecast.timeout(run)[0] for run in plan.stage_runs.values()}
    for top, cells in _worst(slow, sharing):
        most, limit = (duration(milliseconds / 1000) for milliseconds in (top.estimate.most, top.has or 0))
        title = f"{top.stage} may take {most}, its time limit is {limit}: raise {settings[top.stage]}"
        lacking[title] = cells
    return lacking


def _worst(
    needs: Iterable[estimates.Need], sharing: Mapping[tuple[str, str], Sequence[str]]
) -> Iterator[tuple[estimates.Need, list[str]]]:
    """The worst need of each stage and resource, with the cells of all of them."""
    needs = list(needs)
    for top in estimates.tightest(needs):
        alike = [need for need in needs if (need.stage, need.resource) == (top.stage, top.resource)]
        yield top, _cells_of(alike, sharing)


def _sharing(plan: Plan) -> dict[tuple[str, str], list[str]]:
    """The cells that share the stage runs of a stage, by stage and first cell."""
    sharing: dict[tuple[str, str], list[str]] = {}
    for run in plan.stage_runs.values():
        sharing.setdefault((run.stage.name, run.first_cell.id), []).extend(run.cells)
    return sharing


def _cells_of(needs: Iterable[estimates.Need], sharing: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """The cells that share the stage runs with these needs."""
    return list(dict.fromkeys(cell for need in needs for cell in sharing.get((need.stage, need.cell), ())))


def _notes(plan: Plan) -> list[str]:
    """Facts missing from cell ids: other toolchains, formats of weights used as they are, parts that servers ignore."""
    forms: dict[str, dict[str, None]] = {}
    for cell in plan.cells:
        if cell.precision == AS_IS and (form := cell.recipe.get("quantization")):
            forms.setdefault(shown(AS_IS, str(form)), {})[cell.model] = None
    return [
        *_toolchains(plan),
        *(f"{form}: {', '.join(models)}" for form, models in forms.items()),
        *toolchains.caveats(plan.feasible, plan.machine),
    ]


def _toolchains(plan: Plan) -> list[str]:
    """The cells that use the PyTorch backend instead of engines, next to cells of another toolchain."""
    unnamed = [cell for cell in plan.feasible if cell.toolchain not in cell.id.split("/")]
    instead = [cell for cell in unnamed if cell.toolchain == toolchains.PYTORCH]
    if not instead or len(instead) == len(unnamed):
        return []
    everywhere = _common(each.id.split("/") for each in unnamed)
    common = _common((each.id.split("/") for each in instead), but=everywhere)
    named = ", ".join([count(len(instead), "cell"), *common])
    because = f"because of the model, precision or parallelism; --toolchain {toolchains.ENGINES} shows why"
    compare = "Set axes.toolchain to compare cells on one toolchain"
    return [f"{named}: on {toolchains.PYTORCH} instead of {toolchains.ENGINES}, {because}. {compare}"]


def _parts(cell: Cell) -> list[str]:
    """The segments of a cell's id, and its toolchain."""
    parts = cell.id.split("/")
    return parts if cell.toolchain in parts else [*parts, cell.toolchain]


def _loads(plan: Plan) -> list[str]:
    """The loads that the plan's cells are measured with, most frequent first."""
    measured = {cell for run in plan.stage_runs.values() if run.stage.name == "perf" for cell in run.cells}
    cells: dict[str, list[list[str]]] = {}
    for cell in plan.feasible:
        if cell.id in measured:
            cells.setdefault(load_words(cell), []).append(_parts(cell))
    loads = sorted(cells, key=lambda words: -len(cells[words]))
    if len(loads) > _LOADS:
        return [f"load: {loads[0]}, and {len(loads) - 1} others; --format json lists them by cell"]
    if len(loads) < 2:
        return [f"load: {words}" for words in loads]
    everywhere = _common(chain.from_iterable(cells.values()))
    return [
        f"load of {', '.join([count(len(cells[words]), 'cell'), *_common(cells[words], but=everywhere)])}: {words}"
        for words in loads
    ]


def _common(ids: Iterable[Sequence[str]], but: Sequence[str] = ()) -> list[str]:
    """Segments that all of these cells have."""
    first, *others = ids
    return [part for part in first if part not in but and all(part in other for other in others)]


def _by_stage(plan: Plan, outlook: Forecast) -> Iterator[tuple[str, ...]]:
    """One row per stage, with the columns of `_heads`."""
    by_stage: dict[str, list[StageRun]] = {stage: [] for stage in stages_in_order(plan)}
    for run in plan.stage_runs.values():
        by_stage[run.stage.name].append(run)
    largest = {(need.stage, need.resource): need for need in estimates.tightest(outlook.needs)}
    for stage, runs in by_stage.items():
        todo = [run for run in runs if run.id in outlook.to_run]
        done = sum(run.id in outlook.present for run in runs)
        kept = "-" if runs[0].stage.scope is Scope.SERVICE else str(done)
        seconds = about(sum(outlook.expected_s[run.id] for run in todo)) if todo else ""
        pulled = [str(sum(run.id in outlook.pulls for run in runs))] if outlook.pulls else []
        amounts = (_amount(largest.get((stage, resource))) for resource in _memory_columns(outlook))
        yield stage, str(len(runs)), kept, *pulled, str(len(todo)), seconds, *amounts


_SHORT: Final = {estimates.GPU: "GPU", estimates.HOST: "host"}
"""Resources with a column in the table of stages."""


def _memory_columns(outlook: Forecast) -> list[str]:
    return [resource for resource in _SHORT if any(need.resource == resource for need in outlook.needs)]


def _amount(need: estimates.Need | None) -> str:
    if need is None:
        return ""
    value, has = need.estimate.value / 2**30, need.has
    return f"{value:.1f}" if has is None else f"{value:.1f} of {has / 2**30:.1f}"


def _offers(outlook: Forecast) -> list[str]:
    offers = outlook.offers
    if offers is None:
        return []
    if offers.fault is not None:
        return [f"no artifacts pulled: {offers.fault}"]
    pulled, them = count(len(offers.pulls), "artifact"), "it" if len(offers.pulls) == 1 else "them"
    lines = [f"pull: {pulled} from {offers.url}, {size(offers.size_bytes)}, instead of creating {them}"]
    if not offers.pulls:
        lines = [f"nothing to pull from {offers.url}"]
    refused = Counter(f"{each.stage}: {each.message}" for each in offers.refused.values())
    return [*lines, *(f"not pulled: {number} x {why}" for why, number in refused.most_common(3))]


def _takes(plan: Plan, outlook: Forecast) -> list[str]:
    if not outlook.to_run and outlook.pulls:
        return ["no stages to run after the pull"]
    if not outlook.to_run:
        return ["nothing to do: all results are up to date"]
    some = f"rough for {outlook.guessed} of {count(len(outlook.to_run), 'stage run')}"
    every = "rough: no comparable run yet"
    guess = "" if not outlook.guessed else f"; {every if outlook.guessed == len(outlook.to_run) else some}"
    where = "the assumed machine" if plan.machine.assumed else "this machine"
    disk = next((need for need in outlook.needs if need.resource == estimates.DISK), None)
    space = ""
    if disk is not None:
        free = "" if disk.has is None else f" of {size(disk.has)} free"
        space = f"; disk: {size(disk.estimate.value)}{free}{'' if disk.verdict in _FITTING else f' ({disk.verdict})'}"
    return [f"time: about {about(outlook.total_s)} on {where}{guess}{space}"]


_NEEDS: Final = ("needs", "of", "about", "has", "headroom", "error", "measured", "verdict", "cell")


def _needs(needs: Iterable[estimates.Need]) -> Iterator[tuple[str, ...]]:
    """One row per resource of `_NEEDS`."""
    for need in needs:
        estimate, has, left = need.estimate, need.has, need.headroom
        in_words = size if need.resource == estimates.DISK else memory_size
        yield (
            need.stage or "all",
            need.resource,
            in_words(estimate.value),
            "?" if has is None else in_words(has),
            "?" if left is None else f"{'-' if left < 0 else ''}{in_words(abs(left))}",
            f"±{estimate.error:.0%}",
            str(estimate.measured or "-"),
            need.verdict,
            need.cell,
        )


def _needs_table(plan: Plan, outlook: Forecast) -> list[str]:
    """The memory and disk of each stage run next to the available amounts."""
    order = {stage: number for number, stage in enumerate(stages_in_order(plan))}
    needs = sorted(outlook.needs, key=lambda need: order.get(need.stage, len(order)))
    return [
        "",
        *(
            f"{stage:<12}{of:<12}{about:>9}{has:>9}{left:>10}{error:>7}{measured:>9}  {verdict:<14}  {cell}".rstrip()
            for stage, of, about, has, left, error, measured, verdict, cell in (_NEEDS, *_needs(needs))
        ),
    ]


def _work(plan: Plan, outlook: Forecast, *, verbose: bool) -> list[str]:
    rows = (_heads(outlook), *_by_stage(plan, outlook))
    amounts = [max(len(row[-place]) for row in rows) + 2 for place in range(len(_memory_columns(outlook)), 0, -1)]
    widths = (6, 12, *((9,) if outlook.pulls else ()), 8, 12, *amounts)
    lines = ["", *(f"{stage:<12}{''.join(map(str.rjust, row, widths))}".rstrip() for stage, *row in rows)]
    if outlook.to_run:
        lines += ["", "why:", *_why(outlook)]
    if verbose and outlook.to_run:
        lines += _needs_table(plan, outlook)
    if verbose:
        lines += _listing(plan, frozenset(plan.stage_runs), outlook)
    elif outlook.to_run:
        lines += ["", "-v: each stage run, its memory and its first cell"]
    return lines


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
    """Why each stage of each cell, or only `stage`, has to run, and its fingerprint's content. Raises UsageError."""

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
