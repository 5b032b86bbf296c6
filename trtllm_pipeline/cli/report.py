"""`pipeline report`: a run's results as a table, JSON, CSV or Markdown."""

from __future__ import annotations

import argparse
import sys
from io import StringIO
from pathlib import Path
from typing import TextIO

from trtllm_pipeline.cli import options
from trtllm_pipeline.cli.output import note
from trtllm_pipeline.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `report`."""
    parser.description = (
        "Show what came out of a run, one row a cell: status, build time, engine size, latency, throughput, accuracy, "
        "and why a cell failed. It needs no matrix. Of a run that has not ended it shows what is there so far."
    )
    parser.epilog = (
        "examples:\n  pipeline report\n  pipeline report --format markdown --output report.md\n"
        "  pipeline report --format csv | cut -d, -f1,10"
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or its beginning (default: the latest)")
    options.add_workspace(parser)
    options.add_format(parser, "table", "json", "csv", "markdown")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to stdout")


def run(args: argparse.Namespace) -> int:
    """Print or write the report."""
    from trtllm_pipeline.report.rows import rows_of
    from trtllm_pipeline.report.runs import find_run, read_run
    from trtllm_pipeline.report.writers import NAME, print_report, read_report

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
        print_report(
            rows,
            args.format,
            run_id=folder.name,
            matrix=matrix,
            finished=finished,
            stream=stream,
            workspace=store.workspace,
        )

    if args.output is None:
        show(sys.stdout)
    else:
        text = StringIO()
        show(text)
        try:
            Path(args.output).write_text(text.getvalue(), encoding="utf-8", newline="")
        except OSError as error:
            raise UsageError(f"--output {args.output}: cannot be written: {error.strerror}") from error
        note(f"written to {args.output}")
    return 0
