"""`pipeline report`: results as a table, a page of HTML, and in the formats of other programs."""

from __future__ import annotations

import sys
from io import StringIO
from typing import Annotated, Literal

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, note, write_output


def report(
    run: options.Run = None,
    workspace: options.Workspace = options.WORKSPACE,
    format: Annotated[
        Literal["table", "json", "csv", "markdown", "html", "junit", "openmetrics"],
        options.option(
            "--format",
            None,
            "Format of the report; junit has a test case for each stage run.",
        ),
    ] = "table",
    output: Annotated[
        str | None,
        options.option(
            "-o --output",
            "FILE",
            "Write there instead of to stdout, which is -; HTML goes to report.html in the directory of the run.",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        options.option(
            "--slo", "OBJECTIVES", "Limits that the HTML page starts with, such as ttft_p99=300ms,tpot_p99=40ms."
        ),
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    """Show the results, one row for each cell: status, build time, size, latency, throughput, accuracy, and failures.

    It needs no matrix. The cells are all of the latest run's matrix, each as the newest run left it; of a run that has not
    ended it shows what is there so far. The HTML page is one file that needs no network: which configuration to take,
    plots, and each cell's commands, logs and provenance.

    examples:
      pipeline report
      pipeline report --format html
      pipeline report --run latest~1 --format markdown --output report.md
      pipeline report --format csv | cut -d, -f1,10
      pipeline report --format openmetrics | curl -T - -X POST http://127.0.0.1:9091/metrics/job/nightly
    """
    from trtllm_pipeline.show.progress.left import goes_on
    from trtllm_pipeline.show.report.results import page_limits, read_results, write_results

    if slo is not None and format != "html":
        raise UsageError("--slo sets the limits that an HTML page starts with", hint="add --format html")
    limits = {} if slo is None else page_limits(slo)
    store = options.known_store(workspace)
    results = read_results(store, run)
    if not results.finished:
        how = "is still running" if goes_on(results.runs.newest) else "has not ended by itself"
        note(f"run {results.runs.newest.name} {how}: this is what is there now")
    in_run = output is None and format == "html"
    if in_run:
        output = str(results.runs.newest / "report.html")
    stream = sys.stdout if output in {None, "-"} else StringIO()
    write_results(results, store, format, stream, limits=limits, verbose=verbose)
    if output is not None and isinstance(stream, StringIO):
        write_output(output, stream.getvalue())
    if in_run:
        emit(str(output))
