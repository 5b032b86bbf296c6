"""`pipeline search`: find the best cell of a large matrix without measuring every cell."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.orchestrate import Request, Store
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_blocks, note


@options.grouped
def search(
    matrix: options.Matrix,
    slo: options.Slo = None,
    min_accuracy: options.MinAccuracy = None,
    objective: options.Objective = "throughput",
    budget: Annotated[
        int, options.option("--budget", "CELLS", "Maximum number of measured cells, including cells measured before.")
    ] = 20,
    gpu_hour: options.GpuHour = None,
    cells: options.Cells = None,
    sets: options.Sets = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    executor: options.Executor = None,
    ray_address: options.RayAddress = None,
    dry_run: Annotated[bool, options.switch("--dry-run", "Only show the next cell, and why it was chosen.")] = False,
    progress: options.Progress = "auto",
    format: options.TextOrJson = "text",
    *,
    pulling: options.Pulling,
) -> None:
    """Find the best cell of a large matrix without measuring every cell.

    Each step runs one cell like pipeline run --cells and reports why it was chosen. Earlier measurements of any run count,
    so the same command continues after an interrupt or with a larger --budget. Each workload (model, lengths and prompts)
    is searched separately and gets its own recommendation.
    Exit codes: 3 if no measured cell meets the objectives; 1 if the search could not continue.

    examples:
      pipeline search my.yaml --slo ttft_p99=300ms,tpot_p99=40ms --budget 20
      pipeline search my.yaml --objective latency --slo output_tps=100 --min-accuracy -1%
      pipeline search my.yaml --dry-run
    """
    from trtllm_pipeline.show.progress import observer
    from trtllm_pipeline.show.report import recommendation
    from trtllm_pipeline.show.search import driver

    if budget < 1:
        raise UsageError(f"--budget: expected a positive number of cells, got {budget}")
    goals = recommendation.Goals.parse(objective, slo, min_accuracy, gpu_hour)
    request = pulling.of(options.request(matrix, cells, sets, toolchain=toolchain))
    request = request.changed(Request(Path(), executor=executor, ray_address=ray_address))
    if dry_run:
        store = options.store_at(workspace)  # a dry run never creates one
        ended = driver.ended(driver.look(request, store, goals), store, goals, budget, "dry run")
        outcome = replace(ended, exit_code=0)
    else:
        store = Store(Path(workspace))
        announce = note if progress in {"auto", "live", "plain"} else lambda _: None
        shown = observer(sys.stderr, mode=progress)
        outcome = driver.search(request, store, shown, goals, budget, command=tuple(sys.argv), announce=announce)
    emit_blocks(format, outcome)
    if outcome.exit_code == 130:
        note("interrupted; run the same command to continue")
    raise typer.Exit(outcome.exit_code)
