"""What planning a large matrix costs: `pipeline plan` of the embedded toolchain's eight stages, every cell different.

    python benchmarks/plan.py [--cells 1000 10000] [--repeat 5] [--format json]

The whole command is timed, from starting the interpreter to the last line, in a folder without a workspace: no result
is there and nothing is learnt. Then the steps once more, each timed by itself: reading the matrix (with the modules
that takes), expanding it to cells, planning, and the forecast, in which the scheduler plays the whole run on a
simulated clock.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestration import Sample, measured, prepare_environment

PRECISIONS = ("fp16", "fp32", "int8_wo", "int4_wo")
LENGTHS = 50


@dataclass(frozen=True, slots=True)
class Row:
    """One size: medians of whole commands; steps, in seconds, of one process."""

    cells: int
    stage_runs: int
    text: Sample
    json: Sample
    load_s: float
    expand_s: float
    plan_s: float
    forecast_s: float


def write_matrix(cells: int, folder: Path) -> Path:
    """A matrix of the tiny recipe: precisions x lengths x batch sizes. `cells` is rounded up to a multiple of 200."""
    batches = -(-cells // (len(PRECISIONS) * LENGTHS))
    lengths = [f'"{8 + number},8"' for number in range(LENGTHS)]
    text = [
        "name: large",
        "axes:",
        "  model: [tiny]",
        f"  precision: [{', '.join(PRECISIONS)}]",
        f"  max_batch_size: [{', '.join(str(1 + number) for number in range(batches))}]",
        f"  lengths: [{', '.join(lengths)}]",
    ]
    path = folder / f"{cells}.yaml"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def steps(matrix: Path) -> list[float]:
    """Number of stage runs in the matrix's plan; seconds of loading, expanding, planning and forecasting."""
    from trtllm_pipeline import flow
    from trtllm_pipeline.execution.forecast import forecast
    from trtllm_pipeline.planning.request import Request

    gc.set_threshold(100_000, 50, 100)  # as the command line does
    request = Request(matrix, toolchain="embedded")
    machine = flow.machine_of(request)
    times = [time.perf_counter()]
    loaded = flow.load(request)
    times.append(time.perf_counter())
    cells = flow.select_cells(request, loaded, machine)
    times.append(time.perf_counter())
    plan = flow.plan_cells(cells, None, machine)
    times.append(time.perf_counter())
    forecast(plan, None)
    times.append(time.perf_counter())
    return [len(plan.stage_runs), *(after - before for before, after in itertools.pairwise(times))]


def middle(samples: list[Sample]) -> Sample:
    """Medians; of memory the maximum."""
    return Sample(
        statistics.median(one.wall_s for one in samples),
        statistics.median(one.cpu_s for one in samples),
        max(one.max_rss_bytes for one in samples),
    )


def measure(cells: int, repeat: int, folder: Path) -> Row:
    """One size."""
    matrix = write_matrix(cells, folder)
    words = ("plan", "--matrix", str(matrix), "--toolchain", "embedded", "--workspace", str(folder / "none"))
    command = (sys.executable, "-m", "trtllm_pipeline", *words)
    samples: dict[str, list[Sample]] = {"text": [], "json": []}
    for _ in range(repeat):
        for form, taken in samples.items():
            taken.append(measured((*command, "--format", form), folder))
    alone = [sys.executable, __file__, "--steps-of", str(matrix)]
    found = [json.loads(subprocess.check_output(alone)) for _ in range(repeat)]
    stage_runs, *seconds = (statistics.median(column) for column in zip(*found, strict=True))
    return Row(cells, int(stage_runs), middle(samples["text"]), middle(samples["json"]), *seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default 5)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--steps-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps_of is not None:
        print(json.dumps(steps(args.steps_of)))
        return
    with tempfile.TemporaryDirectory(prefix="plan-") as name:
        prepare_environment(Path(name))
        rows = [measure(cells, args.repeat, Path(name)) for cells in sorted(args.cells)]
    if args.format == "json":
        json.dump([asdict(row) for row in rows], sys.stdout, indent=1)
        print()
        return
    heads = "cells, stage runs, text: wall, CPU, peak RSS, JSON: wall, CPU, peak RSS, load, expand, plan, forecast"
    print(f"| {heads.replace(', ', ' | ')} |")
    print("|" + "---:|" * 12)
    for row in rows:
        whole = [
            f"{one.wall_s:.2f} s | {one.cpu_s:.2f} s | {one.max_rss_bytes / 1e6:.0f} MB" for one in (row.text, row.json)
        ]
        parts = [f"{seconds:.2f} s" for seconds in (row.load_s, row.expand_s, row.plan_s, row.forecast_s)]
        print(f"| {row.cells} | {row.stage_runs} | {' | '.join(whole)} | {' | '.join(parts)} |")
    print(f"load average {os.getloadavg()[0]:.1f}, on {len(os.sched_getaffinity(0))} CPUs")


if __name__ == "__main__":
    main()
