"""`pipeline compare`: improvements and regressions against an earlier run or another configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_pipeline.base import UsageError, terminal
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit_rendered, explain_error, note, rendered, write_output

if TYPE_CHECKING:
    from trtllm_pipeline.show.report.measured import Side


def compare(
    run: options.MeasuredRun = "latest",
    baseline: Annotated[
        str | None,
        options.argument("BASELINE", "Baseline that RUN is compared with.", complete=options.completion.runs),
    ] = None,
    by: Annotated[
        str | None,
        options.option("--by", "AXIS", "Instead of a baseline: the cells of RUN that differ only in this axis."),
    ] = None,
    base: Annotated[
        str | None,
        options.option(
            "--base",
            "VALUE",
            "With --by: the value to compare with (default: the first that needs no build, otherwise the first).",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        options.option(
            "--metrics", "NAME,...", "Metrics to compare, e.g. ttft_p99,accuracy.contains (default: the main ones)."
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        options.option(
            "--fail-on",
            "CONDITIONS",
            "Exit with 1 if a metric rises (+) or falls (-) by more, e.g. ttft_p99:+10%,output_tps:-5%, or accuracy:-1pt for "
            "points of a score; a missing metric fails too.",
        ),
    ] = None,
    beyond_noise: Annotated[
        bool, options.switch("--beyond-noise", "Let --fail-on ignore changes within noise.")
    ] = False,
    allow: options.Allow = "",
    cells: options.Cells = None,
    tokenizer: Annotated[
        Path | None,
        options.option("--tokenizer", "PATH", "Tokenizer for event files whose server did not count tokens."),
    ] = None,
    workspace: options.Workspace = options.WORKSPACE,
    format: options.ComparisonFormat = "table",
    output: options.Output = None,
) -> None:
    """Compare a run with a baseline, or the cells of one run with each other.

    Shows differences in latency, throughput, accuracy, build time and size with 95% intervals, and marks changes beyond
    noise. RUN and BASELINE are each a run (latest, latest~1 for the one before, a name or an id), a report.json, or the
    result of a load run (event file, perf.json or their directory). Values separated by commas are repeats. Repeats
    measured alternately (a,b,a,b) are compared pair by pair.

    Exit codes: 1 if a condition of --fail-on is broken, or if nothing was compared, such as after failed measurements; 4 if
    cells are not comparable because the load or the system differs.

    examples:
      pipeline compare latest latest~1
      pipeline compare --by precision --base fp16
      pipeline compare --by toolchain
      pipeline compare latest main-report.json --fail-on 'ttft_p99:+10%,output_tps:-5%,accuracy:-1pt'
      pipeline compare latest vllm.jsonl --cells '*/fp8/*' --format markdown
    """
    from trtllm_pipeline.show.report import gate, report_formats
    from trtllm_pipeline.show.report.measured import load_measured, selected

    if (by is None) == (baseline is None):
        raise UsageError(
            "compare: give a BASELINE, or --by AXIS" + (", not both" if by else ""),
            hint="pipeline compare latest latest~1, or pipeline compare --by precision --base fp16",
        )
    if base is not None and by is None:
        raise UsageError("--base is only valid with --by", hint="add --by AXIS, or give a BASELINE")
    criteria, allowed = gate.Criteria.parse(metrics, fail_on), options.allowed(allow)

    def side(text: str) -> Side:
        measured = load_measured(text, options.store_at(workspace), tokenizer=tokenizer, allow=allowed)
        for each in measured.left_out:
            note(f"note: {each}; left out")
        return selected(measured, cells or ())

    judged = gate.judge(
        side(run),
        None if baseline is None else side(baseline),
        criteria,
        by=by,
        first=base,
        beyond_noise=beyond_noise,
        allow=allowed,
    )
    shown = report_formats.compared(judged, format)
    text = terminal.clean(shown) if isinstance(shown, str) else rendered(shown)
    if output is None:
        emit_rendered(text)
    else:
        write_output(output, text)
    if format == "csv" and judged.broken:
        note(f"gate: {len(judged.broken)} broken (list them with --format table or json)")
    if judged.refusal is not None:
        explain_error(judged.refusal)
    raise typer.Exit(judged.exit_code)


vars(compare)["aliases"] = options.TOKENIZER_NAMES
