"""`pipeline matrix`: create, check, show and describe matrix files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trtllm_pipeline.base import text_tables
from trtllm_pipeline.show.cli import options
from trtllm_pipeline.show.cli.output import emit, emit_as, emit_json, note, terminal_width
from trtllm_pipeline.show.phrases import wrapped


def init(
    file: Annotated[Path, options.argument("FILE", "File to write.")] = Path("matrix.yaml"),
    shipped: Annotated[
        str | None, options.option("--from", "NAME", "Shipped matrix to start from, listed by pipeline matrix list.")
    ] = None,
    force: Annotated[bool, options.switch("--force", "Overwrite an existing file.")] = False,
    format: options.TextOrJson = "text",
) -> None:
    """Write a commented matrix file as a starting point.

    examples:
      pipeline matrix init my-matrix.yaml
      pipeline matrix init my-matrix.yaml --from quickstart
    """
    from trtllm_pipeline.orchestrate import matrices

    matrices.write_matrix(file, shipped=shipped, force=force)
    emit_as(format, {"schema": 1, "file": str(file)}, text=lambda _: f"wrote {file}; next: pipeline matrix show {file}")


def check(
    files: Annotated[
        list[str],
        options.argument("FILE", "Matrix files, or names of shipped matrices.", complete=options.completion.matrices),
    ],
    sets: options.Sets = None,
    format: options.TextOrJson = "text",
) -> None:
    """Check matrix files and their recipes.

    Reports all faults at once. The exit code is 2 if there are any.

    examples:
      pipeline matrix check my-matrix.yaml
      pipeline matrix check my-matrix.yaml --set axes.precision=[fp16]
    """
    from trtllm_pipeline.orchestrate import matrices

    checks = [matrices.check_matrix(file, sets or ()) for file in files]
    if format == "json":
        emit_json({"schema": 1, "files": [each.to_json() for each in checks]})
    else:
        for each in checks:
            if each.error is not None:
                note(each.error.message)
            else:
                emit(f"{each.file}: {each.cells} {'cell' if each.cells == 1 else 'cells'}")
    raise typer.Exit(0 if all(each.error is None for each in checks) else 2)


def show(
    matrix: options.Matrix,
    cells: options.Cells = None,
    toolchain: Annotated[
        str | None, options.toolchain("Toolchain for cells whose matrix names none (default: undecided).")
    ] = None,
    sets: options.Sets = None,
    assume: options.Assume = None,
    format: options.TextOrJson = "text",
) -> None:
    """List the cells of a matrix, and the reasons for infeasible ones.

    Without --assume, no machine is considered.

    examples:
      pipeline matrix show quickstart
      pipeline matrix show my-matrix.yaml --assume 2xH100,tensorrt_llm==1.2
      pipeline matrix show my-matrix.yaml --set axes.precision=[fp16]
    """
    from trtllm_pipeline.orchestrate import expand, load, machine_and_cells, plan_file, select
    from trtllm_pipeline.tensorrt import load_words

    request = options.request(matrix, cells, sets, None, toolchain, assume)
    if assume is None:
        selected = select(expand(load(request), default_toolchain=toolchain or "auto"), request.cells)
    else:
        _, selected = machine_and_cells(request)
    loads = {cell.id: load_words(cell) for cell in selected}
    rows = [
        {
            "id": cell.id,
            **plan_file.axes(cell),
            "load": loads[cell.id],
            "settings": cell.settings,
            "reason": cell.reason,
        }
        for cell in selected
    ]
    mixed = len({cell.toolchain for cell in selected if cell.reason is None}) > 1
    lines = {}
    for cell in selected:
        toolchain_shown = f", {cell.toolchain}" if mixed and cell.toolchain not in cell.id.split("/") else ""
        lines[str(cell.id)] = f"can never work: {cell.reason}" if cell.reason else f"{loads[cell.id]}{toolchain_shown}"
    emit_as(format, {"schema": 1, "cells": rows}, text=lambda _: wrapped(text_tables.aligned(lines), terminal_width()))


def list_(format: options.TextOrJson = "text") -> None:
    """List the shipped matrices: names for --matrix, with one line each.

    examples:
      pipeline matrix list
    """
    from trtllm_pipeline.orchestrate import matrices

    shipped = {name: (path, matrices.summary(path)) for name, path in matrices.list_matrices().items()}
    rows = [{"name": name, "summary": text, "file": str(path)} for name, (path, text) in shipped.items()]
    emit_as(
        format,
        {"schema": 1, "matrices": rows},
        text=lambda _: text_tables.aligned({name: text for name, (_, text) in shipped.items()}),
    )


def schema(
    kind: Annotated[Literal["matrix", "recipe"], options.option("--kind", None, "File type.")] = "matrix",
) -> None:
    """Print the JSON Schema of matrix or recipe files, for editors.

    examples:
      pipeline matrix schema > matrix.schema.json
      pipeline matrix schema --kind recipe > recipe.schema.json
    """
    from trtllm_pipeline.orchestrate import json_schema

    emit_json(json_schema(kind))
