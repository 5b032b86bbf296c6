"""A recommendation as a terminal table. JSON is `Recommendation.to_json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.bench.result import load_words
from trtllm_pipeline.planning.names import shared_parts, without
from trtllm_pipeline.report.compare_writers import number
from trtllm_pipeline.report.recommend import OBJECTIVES, Candidate, Recommendation
from trtllm_pipeline.report.workloads import words

if TYPE_CHECKING:
    from rich.console import Group


def to_table(found: Recommendation) -> Group:
    """For each workload the recommended cell, and a table of all candidates with the reason why not."""
    from rich.console import Group
    from rich.text import Text

    parts = shared_parts([each.cell for each in found.candidates])
    said: list[Any] = []
    for group in found.groups:
        said += [Text()] if said else []
        said += _of_workload(group, parts, found)
    return Group(*said)


def _of_workload(group: Sequence[Candidate], parts: Sequence[str], found: Recommendation) -> Iterator[Any]:
    from rich.table import Table
    from rich.text import Text

    good = [each for each in group if each.reason is None]
    workload = words(group[0].workload)
    if workload:
        yield Text(f"for {workload}", "bold")
    if good:
        assert good[0].level is not None
        yield Text(f"recommended: {good[0].cell}, at {load_words(good[0].level)}", "bold green")
        yield Text(f"best of {len(good)} that meet the objectives: {OBJECTIVES[found.goal]}", "dim")
    else:
        yield Text("no configuration meets the objectives", "bold red")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    rate = "tok/s/GPU" if found.per_gpu else "tok/s"
    for name in ("cell", "level", rate, "e2e p50 ms", "engine MB", "accuracy"):
        table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in group:
        megabytes = None if each.engine_bytes is None else each.engine_bytes / 1e6
        figures = [number(value) for value in (each.output_tps_per_device, each.e2e_p50_ms, megabytes, each.accuracy)]
        level = "n/a" if each.level is None else f"@{each.level}"
        why = Text("meets all objectives", "green") if each.reason is None else Text(each.reason, "red")
        table.add_row(without(each.cell, parts), level, *figures, why)
    yield Text()
    yield table
    few = [each for each in good if each.requests is not None and each.requests < 100]
    if few and any(slo.metric.endswith(("p95", "p99")) for slo in found.slos):
        yield Text(f"\nmeasured with {few[0].requests} requests: with fewer than 100, p99 is the maximum", "yellow")
