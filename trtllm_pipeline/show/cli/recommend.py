"""`pipeline recommend`: the cheapest configuration that meets the objectives, and the reasons against others."""

from __future__ import annotations

from dataclasses import replace

import typer

from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_blocks, note


def recommend(
    run: options.MeasuredRun = "latest",
    slo: options.Slo = None,
    min_accuracy: options.MinAccuracy = None,
    objective: options.Objective = "throughput",
    gpu_hour: options.GpuHour = None,
    cells: options.Cells = None,
    allow: options.Allow = "",
    workspace: options.Workspace = options.WORKSPACE,
    format: options.TextOrJson = "text",
) -> None:
    """Recommend the cheapest configuration that meets the objectives, and explain why others were excluded.

    Without --min-accuracy, cells that are significantly (95%) less accurate than the unquantized one are excluded, as
    on the HTML page. Cells are only compared within a group with the same model, lengths, prompts and system. Each
    group has its own recommendation. If the difference to the best is within noise, it is a tie, and the cheapest tied
    cell is recommended. The exit code is 3 if no configuration meets the objectives. The nearest one is then shown with
    the objectives that it misses.

    examples:
      pipeline recommend --slo ttft_p99=300ms,tpot_p99=40ms --min-accuracy -1%
      pipeline recommend --slo tpot_p50=40ms --gpu-hour H100=2.50,L40S=1.10
      pipeline recommend 20261121 --slo e2e_p95=2s --objective size
    """
    from trtllm_pipeline.show.report import recommendation as library
    from trtllm_pipeline.show.report.measured import load_measured
    from trtllm_pipeline.show.report.prices import with_price

    goals = library.Goals.parse(objective, slo, min_accuracy, gpu_hour)
    allowed = options.allowed(allow)
    measured = load_measured(run, options.store_at(workspace), allow=allowed)
    for each in measured.left_out:
        note(f"note: {each}; left out")
    measured = replace(measured, cells=tuple(with_price(cell, goals.prices) for cell in measured.cells))
    recommendation = library.advise(measured, cells or (), goals, allowed)
    emit_blocks(format, recommendation)
    raise typer.Exit(recommendation.exit_code)
