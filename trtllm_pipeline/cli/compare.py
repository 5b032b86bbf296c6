"""`pipeline compare`: what is better and what is worse than before, or than another configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit_rendered, note, rendered, write_output
from trtllm_pipeline.errors import NOT_COMPARABLE, UsageError
from trtllm_pipeline.terminal import clean

if TYPE_CHECKING:
    from trtllm_pipeline.report.compare import Comparison
    from trtllm_pipeline.report.gate import Break
    from trtllm_pipeline.report.measured import Side


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `compare`."""
    parser.description = (
        "Hold a run against a baseline, or the cells of one run against each other: differences of latency, throughput, "
        "accuracy, build time and size, with 95 % intervals; what is beyond noise is marked.\n\n"
        "RUN and BASELINE are a run's id or its beginning, latest, latest~1 (the one before), a report.json, or what "
        "`pipeline perf` left of any server (its event file, perf.json, or their folder). Several separated by commas are "
        "repeats: measured in turn (a,b,a,b), they are compared pair by pair."
    )
    parser.epilog = (
        "examples:\n"
        "  pipeline compare latest latest~1\n"
        "  pipeline compare --by precision --base fp16\n"
        "  pipeline compare latest main-report.json --fail-on 'ttft_p99:+10%,output_tps:-5%,accuracy:-1%'\n"
        "  pipeline compare latest vllm.jsonl --cells '*/fp8/*' --format markdown\n\n"
        "exit codes: 0; 1 when --fail-on breaks; 4 when cells are not comparable: measured under another load, or on "
        "another system"
    )
    parser.add_argument("run", nargs="?", default="latest", metavar="RUN", help="what is judged (default: latest)")
    parser.add_argument("baseline", nargs="?", metavar="BASELINE", help="what it is held against")
    parser.add_argument(
        "--by", metavar="AXIS", help="instead of a baseline: RUN's cells that differ in this axis alone"
    )
    parser.add_argument("--base", metavar="VALUE", help="with --by: the value to start from (default: the first)")
    parser.add_argument(
        "--metrics",
        metavar="NAMES",
        help="such as ttft_p99,tpot_p50,output_tps,accuracy.contains (default: the main ones)",
    )
    parser.add_argument(
        "--fail-on",
        metavar="CONDITIONS",
        help="exit with 1 when a figure rises (+) or falls (-) by more than that; a missing one breaks it too",
    )
    parser.add_argument(
        "--beyond-noise", action="store_true", help="--fail-on lets pass what is within noise, however large"
    )
    options.add_allow(parser)
    parser.add_argument(
        "--cells", metavar="PATTERN", action="append", default=[], help="only cells like this; '!PATTERN' leaves out"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="counts tokens of event files whose server did not")
    options.add_workspace(parser)
    options.add_format(parser, "table", "json", "csv", "markdown")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to stdout")


def run(args: argparse.Namespace) -> int:
    """Compare, print, judge."""
    from trtllm_pipeline.planning.names import count
    from trtllm_pipeline.report import gate
    from trtllm_pipeline.report.compare import DEFAULT, check_metric, compare, compare_by

    conditions = gate.parse(args.fail_on) if args.fail_on is not None else ()
    names = [check_metric(name.strip()) for name in args.metrics.split(",")] if args.metrics else DEFAULT
    metrics = tuple(dict.fromkeys([*names, *(condition.metric for condition in conditions)]))
    if (args.by is None) == (args.baseline is None):
        raise UsageError(
            "compare: give a BASELINE, or --by AXIS" + (", not both" if args.by else ""),
            hint="pipeline compare latest latest~1, or pipeline compare --by precision --base fp16",
        )
    if args.base is not None and args.by is None:
        raise UsageError("--base says where --by starts from; without --by give a BASELINE")
    new = side(args, args.run)
    if args.by is not None:
        result = compare_by(new, args.by, args.base, metrics, allow=args.allow)
    else:
        result = compare(new, side(args, args.baseline), metrics, allow=args.allow)
    if not (result.pairs or result.only_base or result.lost or result.unfit or result.refused):
        reasons = [why for _, why in result.only_new]
        raise UsageError("no two cells can be compared" + (f": {reasons[0]}" if reasons else ""))
    broken = gate.breaks(result, conditions, beyond_noise=args.beyond_noise) if conditions else None
    show(args, result, broken)
    if result.refused:
        about = dict.fromkeys(each.field.about for _, _, why in result.refused for each in why)
        cells = count(len({cell for cell, _, _ in result.refused}), "cell")
        first = result.refused[0]
        note(f"error: {cells} not comparable, such as {first[0]}: {first[2][0]}")
        note(f"  try: measure both alike; or --allow {','.join(about)} if that is what the comparison is about")
    return 1 if broken else NOT_COMPARABLE if result.refused else 0


def side(args: argparse.Namespace, text: str) -> Side:
    """What `text` names, with the cells that `--cells` lets through. Raises UsageError when none is left."""
    from trtllm_pipeline.report.measured import load

    tokenizer = Path(args.tokenizer) if args.tokenizer else None
    found = load(text, options.open_store(args), tokenizer=tokenizer, allow=args.allow)
    for each in found.left_out:
        note(f"note: {each}; left out")
    return selected(found, args.cells)


def selected(found: Side, patterns: Sequence[str]) -> Side:
    """`found` with the cells that `patterns` let through; what has no axes stays. Raises UsageError when none is left."""
    from dataclasses import replace

    from trtllm_pipeline.config.expand import select

    if not patterns or not any(cell.axes for cell in found.cells):
        return found
    return replace(found, cells=tuple(select(found.cells, patterns)))


def show(args: argparse.Namespace, result: Comparison, broken: tuple[Break, ...] | None) -> None:
    """Print or write the comparison in the format asked for."""
    from trtllm_pipeline.report import compare_writers as writers
    from trtllm_pipeline.report.compare import to_json

    if args.format == "json":
        judged = not result.refused
        data = {**to_json(result), "gate": None if broken is None else writers.gate_json(broken, judged=judged)}
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    elif args.format == "csv":
        text = writers.to_csv(result)
        if broken:
            note(f"gate: {len(broken)} broken; --format table or json says what")
    elif args.format == "markdown":
        text = writers.to_markdown(result, broken)
    else:
        text = rendered(writers.to_table(result, broken))
    if args.format != "table":
        text = clean(text)
    if args.output is None:
        emit_rendered(text)
    else:
        write_output(args.output, text)
