"""`pipeline explain`: why a cell's stages have to run, and the content of their fingerprints."""

from __future__ import annotations

from typing import Annotated

import typer

from trtllm_pipeline.show.cli import completion, options
from trtllm_pipeline.show.cli.output import emit_as


def explain(
    ctx: typer.Context,
    cell: Annotated[str, options.argument("CELL", "Cell id, pattern or part of an id.", complete=completion.cells)],
    stage: Annotated[
        str | None,
        options.argument(
            "STAGE", "Only this stage, with the full content of its fingerprint.", complete=completion.stages
        ),
    ] = None,
    matrix: options.MatrixOrLatest = None,
    sets: options.Sets = None,
    toolchain: options.Toolchain = None,
    workspace: options.Workspace = options.WORKSPACE,
    assume: options.Assume = None,
    format: options.TextOrJson = "text",
) -> None:
    """Explain why each stage of a cell has to run, and what changed since the cell's last result.

    Artifacts created by another version of the pipeline's code are marked. The fingerprint does not include the code.

    examples:
      pipeline explain 'smollm2*/fp16/*' build
      pipeline explain fp16 --set axes.max_batch_size=[16]
      pipeline explain fp8 build --matrix my.yaml --assume 2xH100,tensorrt_llm==1.2
    """
    from trtllm_pipeline.orchestrate import forecast, plan_of
    from trtllm_pipeline.show.report.plan_text import explanation, explanation_text

    store = options.store_at(workspace)
    request = options.request_or_latest(ctx, store, matrix, [cell], sets, None, toolchain, assume)
    plan = plan_of(request, store, guess=assume is not None)
    explained = explanation(plan, forecast.forecast(plan, store), stage, store)
    emit_as(format, explained, text=lambda each: explanation_text(each, full=stage is not None))
