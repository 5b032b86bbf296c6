"""`pipeline report`: a run's results as a table, JSON, CSV, Markdown, JUnit XML or a page of HTML."""

from __future__ import annotations

import argparse
import sys
from io import StringIO
from typing import TextIO

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import emit, note, write_output
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.terminal import clean


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `report`."""
    parser.description = (
        "Show what came out of a run, one row a cell: status, build time, engine size, latency, throughput, accuracy, "
        "and why a cell failed. It needs no matrix. Of a run that has not ended it shows what is there so far. "
        "`--format html` writes one file that needs no network: which configuration to take, plots, each cell's "
        "commands, logs and provenance. `--format junit` is for CI systems: a test case for each stage run."
    )
    parser.epilog = (
        "examples:\n  pipeline report\n  pipeline report --format html\n"
        "  pipeline report --format markdown --output report.md\n  pipeline report --format csv | cut -d, -f1,10"
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or its beginning (default: the latest)")
    options.add_workspace(parser)
    options.add_format(parser, "table", "json", "csv", "markdown", "html", "junit")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write there instead of to stdout; HTML goes to report.html in the run's folder unless told otherwise, "
        "and to stdout for `-`",
    )
    parser.add_argument(
        "--slo", metavar="LIMITS", help="limits that the HTML page starts with, such as ttft_p99=300ms,tpot_p99=40ms"
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the report."""
    from trtllm_pipeline.planning.runs import find_run, read_run
    from trtllm_pipeline.report.rows import rows_of
    from trtllm_pipeline.report.writers import NAME, print_report, read_report

    if args.slo is not None and args.format != "html":
        raise UsageError("--slo sets the limits that an HTML page starts with", hint="add --format html")
    limits = {} if args.slo is None else _limits(args.slo)
    store = options.existing_store(args)
    folder = find_run(store, args.run)
    if (folder / NAME).is_file():
        rows, about = read_report(folder / NAME)
        matrix, finished = str(about["matrix"]), True
    else:
        note(f"run {folder.name} has not ended by itself: this is what is there now")
        rows, finished = rows_of(read_run(folder), store), False
        matrix = next((known.matrix for known in store.index.runs() if known.id == folder.name), "")

    def show(stream: TextIO) -> None:
        if args.format in {"html", "junit"}:
            from trtllm_pipeline.report.record import read_record

            record = read_record(store, folder)
            if args.format == "junit":
                from trtllm_pipeline.report.junit import to_junit

                stream.write(clean(to_junit(rows, record, matrix)))
            else:
                from trtllm_pipeline.report.html.page import to_html

                stream.write(clean(to_html(rows, record, matrix, finished=finished, limits=limits)))
            return
        print_report(
            rows,
            args.format,
            run_id=folder.name,
            matrix=matrix,
            finished=finished,
            stream=stream,
            workspace=store.workspace,
        )

    output = args.output
    if output is None and args.format == "html":
        from trtllm_pipeline.report.html.page import NAME as PAGE

        output = str(folder / PAGE)
        emit(output)
    if output in {None, "-"}:
        show(sys.stdout)
        return 0
    text = StringIO()
    show(text)
    write_output(output, text.getvalue())
    return 0


def _limits(text: str) -> dict[str, float | str]:
    """The limits of `--slo` as the page's form has them. Raises UsageError."""
    from trtllm_pipeline.bench.result import RATES, latency_of
    from trtllm_pipeline.report.html.page import LIMITED
    from trtllm_pipeline.report.recommend import parse_slo

    found: dict[str, float | str] = {}
    for slo in parse_slo(text):
        latency, statistic = ("", "") if slo.metric in RATES else latency_of(slo.metric)
        if latency not in LIMITED or found.setdefault("statistic", statistic) != statistic:
            raise UsageError(
                f"--slo: the page's limits are {', '.join(LIMITED)}, all at one statistic, not {text!r}",
                hint="such as ttft_p99=300ms,tpot_p99=40ms; pipeline recommend takes any",
            )
        found[latency] = slo.limit
    return found
