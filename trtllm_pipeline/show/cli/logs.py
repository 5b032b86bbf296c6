"""`pipeline logs`: the log of a cell's stage, from the latest attempt."""

from __future__ import annotations

from typing import Annotated

from trtllm_pipeline.base import UsageError, reading, text_tables
from trtllm_pipeline.orchestrate import Outline, Store, runs
from trtllm_pipeline.show.cli import completion, options
from trtllm_pipeline.show.cli.output import emit, emit_json, note, print_log
from trtllm_pipeline.show.report.log_choice import failure_of, log_of, logs_of, measurements_of, stage_run_of


def logs(
    cell: Annotated[
        str,
        options.argument(
            "CELL", "Cell id, pattern or part of an id, or the id of a stage run.", complete=completion.cells
        ),
    ],
    stage: Annotated[
        str | None, options.argument("STAGE", "Stage, e.g. download, build or launch.", complete=completion.stages)
    ] = None,
    run: options.Run = None,
    workspace: options.Workspace = options.WORKSPACE,
    follow: Annotated[bool, options.switch("-f --follow", "Keep printing until the attempt ends.")] = False,
    lines: Annotated[int | None, options.option("-n --lines", "N", "Only the last N lines.", min=1)] = None,
    server: Annotated[
        bool, options.switch("--server", "Print the log of the server that the launch stage started.")
    ] = False,
    format: options.TextOrJson = "text",
) -> None:
    """Print the log of a cell's stage, from the running or the latest attempt.

    The default is the stage that failed or is running. If there is no such stage, the existing logs are listed. After
    the log of perf comes the table of its measurements. After the log of a failure come its first cause, with file and
    line, and a fix.

    examples:
      pipeline logs 'qwen2*/fp8/*' build
      pipeline logs int4_wo launch --server --lines 50
      pipeline logs build-1a2b3c4d5e6f --follow
    """
    if follow and format == "json":
        raise UsageError("--follow only prints text", hint="omit --format json")
    store = options.known_store(workspace)
    outline = runs.newest_cells(store, run).outline
    chosen = stage_run_of(outline, store, cell, stage, server=server)
    if chosen is None:
        return _list(outline, store, cell, workspace, as_json=format == "json")
    stage_run, why = chosen
    log = log_of(store, stage_run, server=server)
    if format == "json":
        text = reading.read_text(log, errors="replace").splitlines()
        return emit_json(
            {
                "schema": 1,
                "id": stage_run.id,
                "stage": stage_run.stage,
                "path": str(log),
                "lines": text[-(lines or 0) :],
            }
        )
    if why:
        note(why)
    print_log(log, lines, lambda: follow and store.is_claimed(stage_run.fingerprint))
    for line in failure_of(store, stage_run):
        note(line)
    if levels := measurements_of(log):
        from trtllm_pipeline.show.report.load_tables import overview

        emit(f"\n{overview(levels)}")
    return None


def _list(outline: Outline, store: Store, cell: str, workspace: str, *, as_json: bool) -> None:
    chosen, listed = logs_of(outline, store, cell)
    if as_json:
        return emit_json({"schema": 1, "cell": chosen.id, "logs": {stage: str(path) for stage, path in listed.items()}})
    emit(text_tables.aligned({stage: str(path) for stage, path in listed.items()}))
    return note(f"to print one: pipeline logs {chosen.id} STAGE{options.typed_again(workspace)}")
