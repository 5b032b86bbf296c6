"""`pipeline report`: results as a table, as an HTML page, and in formats of other programs."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import StringIO
from typing import Annotated

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, note, write_output


def report(
    run: options.Run = None,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.ReportFormat = "table",
    output: Annotated[
        str | None,
        options.option(
            "-o --output",
            "FILE",
            "Output file; - is stdout (default: stdout; for html, report.html in the run's directory).",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        options.option("--slo", "OBJECTIVES", "Initial limits of the HTML page, e.g. ttft_p99=300ms,tpot_p99=40ms."),
    ] = None,
    level: Annotated[
        str | None,
        options.option(
            "--level",
            "LEVEL",
            "Level of the latencies and rates: a concurrency, a rate (2.5/s), lowest or highest (default: highest).",
        ),
    ] = None,
    gpu_hour: options.GpuHour = None,
    verbose: options.Verbose = False,
) -> None:
    """Show the results with one row per cell: status, build time, size, latency, throughput, accuracy, and failures.

    Needs no matrix. Shows all cells of the latest run's matrix, each with its newest result. A run in progress shows the
    results so far. The HTML page is one file that needs no network. It shows the recommended configuration, plots, and
    each cell's commands, logs and provenance.

    examples:
      pipeline report
      pipeline report --level 1
      pipeline report --format html
      pipeline report --gpu-hour 2.50
      pipeline report --run latest~1 --format markdown --output report.md
      pipeline report --format csv | cut -d, -f1,10
      pipeline report --format openmetrics | curl -T - -X POST http://127.0.0.1:9091/metrics/job/nightly
    """
    from trtllm_pipeline.show.progress.left import goes_on
    from trtllm_pipeline.show.report import report_formats
    from trtllm_pipeline.show.report.prices import parse_prices, with_price
    from trtllm_pipeline.show.report.results import check_level, page_limits, read_results

    if slo is not None and format != "html":
        raise UsageError("--slo sets the initial limits of the HTML page", hint="add --format html")
    limits = {} if slo is None else page_limits(slo)
    store = options.known_store(workspace)
    found = read_results(store, run)
    folder = store.runs_dir / found.run_id
    if not found.finished:
        how = "is still running" if goes_on(folder) else "did not finish"
        note(f"run {found.run_id} {how}: these are the results so far")
    in_run = output is None and format == "html"
    if in_run:
        output = str(folder / "report.html")
    stream = sys.stdout if output in {None, "-"} else StringIO()
    found = replace(found, stream=stream, limits=limits, verbose=verbose)
    if level is not None:
        found = replace(found, level=check_level(found.rows, level))
    if gpu_hour is not None:
        prices = parse_prices(gpu_hour)
        found = replace(found, rows=tuple(with_price(row, prices) for row in found.rows))
    report_formats.write(found, format)
    if output is not None and isinstance(stream, StringIO):
        write_output(output, stream.getvalue())
    if in_run:
        emit(str(output))
