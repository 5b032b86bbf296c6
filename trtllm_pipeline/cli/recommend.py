"""`pipeline recommend`: the cheapest configuration that meets the objectives, and why not the others."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit_json, emit_rendered, note, rendered

if TYPE_CHECKING:
    from trtllm_pipeline.bench.objectives import Objective
    from trtllm_pipeline.report.recommend import Candidate


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `recommend`."""
    parser.description = (
        "Say which of a run's configurations to take: the cheapest that meets every objective at some level, and for "
        "each of the others the first reason why not. Without --min-accuracy, what is clearly (95 %) less accurate than "
        "the unquantized cell falls out, as on the HTML page. Cells of other models, lengths or prompts, or measured on another "
        "system, are not compared: each has a recommendation of its own."
    )
    parser.epilog = (
        "examples:\n"
        "  pipeline recommend --slo ttft_p99=300ms,tpot_p99=40ms --min-accuracy -1%\n"
        "  pipeline recommend 20261121 --slo e2e_p95=2s --objective size\n\n"
        "exit codes: 0, or 3 when no configuration meets the objectives"
    )
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="as for compare (default: latest)")
    parser.add_argument(
        "--slo", metavar="LIMITS", default="", help="such as ttft_p99=300ms,tpot_p99=40ms; a rate is a least one"
    )
    parser.add_argument(
        "--min-accuracy",
        metavar="LEAST",
        help="-1%% (of the unquantized cell's score), 0.6, or contains:-1%% for a score that is not the first",
    )
    parser.add_argument(
        "--objective",
        choices=("throughput", "latency", "size"),
        default="throughput",
        help="throughput: most output tokens a second for each GPU (default); latency: shortest median e2e; size: "
        "smallest engine",
    )
    parser.add_argument(
        "--cells", metavar="PATTERN", action="append", default=[], help="only cells like this; '!PATTERN' leaves out"
    )
    # `-1%` is a value, not an option; argparse lets only plain negative numbers be.
    parser._negative_number_matcher = re.compile(r"-\d+(\.\d+)?%?$")  # noqa: SLF001
    options.add_allow(parser)
    options.add_workspace(parser)
    options.add_format(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    """Recommend."""
    from trtllm_pipeline.cli.compare import selected
    from trtllm_pipeline.planning.names import shared_parts
    from trtllm_pipeline.report.measured import load
    from trtllm_pipeline.report.recommend import OBJECTIVES, devices, parse_least, parse_slo, recommend

    slos = parse_slo(args.slo) if args.slo else ()
    least = parse_least(args.min_accuracy) if args.min_accuracy else None
    measured = load(args.run, options.open_store(args), allow=args.allow)
    for each in measured.left_out:
        note(f"note: {each}; left out")
    chosen = {cell.id for cell in selected(measured, args.cells).cells}
    # Of the whole run: what a quantized cell's accuracy is held against need not be among those to choose from.
    found = [each for each in recommend(measured, slos, least, args.objective, allow=args.allow) if each.cell in chosen]
    groups = [list(group) for _, group in groupby(found, key=lambda each: each.workload)]
    if args.format == "json":
        emit_json(
            {
                "schema": 1,
                "run": measured.name,
                "objective": args.objective,
                "slo": {slo.metric: slo.limit for slo in slos},
                "min_accuracy": args.min_accuracy,
                "recommended": [
                    {"workload": dict(group[0].workload), "cell": group[0].cell if group[0].reason is None else None}
                    for group in groups
                ],
                "candidates": [each.to_json() for each in found],
            }
        )
    else:
        parts = shared_parts([each.cell for each in found])
        # Of one device each, or of none: then it is the whole's.
        rate = "out tok/s/GPU" if any(devices(cell) > 1 for cell in measured.cells) else "out tok/s"
        for number, group in enumerate(groups):
            text = rendered(_table(group, parts, slos, OBJECTIVES[args.objective], rate))
            emit_rendered("\n" * (number > 0) + text)
    return 0 if any(each.reason is None for each in found) else 3


def _table(
    found: Sequence[Candidate], parts: Sequence[str], slos: Sequence[Objective], objective: str, rate: str
) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from trtllm_pipeline.bench.result import load_words
    from trtllm_pipeline.planning.names import without
    from trtllm_pipeline.report.compare_writers import number
    from trtllm_pipeline.report.workloads import words

    holding = [each for each in found if each.reason is None]
    workload = words(found[0].workload)
    said: list[Any] = [Text(f"for {workload}", "bold")] if workload else []
    if holding:
        best = holding[0]
        assert best.level is not None
        said.append(Text(f"take {best.cell}, measured at {load_words(best.level)}", "bold green"))
        said += [Text(f"of {len(holding)} that hold: {objective}", "dim")]
    else:
        said.append(Text("no configuration holds", "bold red"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("cell", "level", rate, "e2e p50 ms", "engine MB", "accuracy"):
        table.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in found:
        megabytes = None if each.engine_bytes is None else each.engine_bytes / 1e6
        figures = [number(value) for value in (each.output_tps_per_device, each.e2e_p50_ms, megabytes, each.accuracy)]
        level = "n/a" if each.level is None else f"@{each.level}"
        why = Text("holds", "green") if each.reason is None else Text(each.reason, "red")
        table.add_row(without(each.cell, parts), level, *figures, why)
    said += [Text(), table]
    few = [each for each in holding if each.requests is not None and each.requests < 100]
    if few and any(slo.metric.endswith(("p95", "p99")) for slo in slos):
        said.append(
            Text(f"\nmeasured with {few[0].requests} requests: a p99 of fewer than 100 is their slowest", "yellow")
        )
    return Group(*said)
