"""`pipeline matrix`: start, check, show and describe matrix files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

EXAMPLE: Final = """examples:
  pipeline matrix init my-matrix.yaml
  pipeline matrix validate my-matrix.yaml
  pipeline matrix show my-matrix.yaml --set axes.precision=[fp16]
  pipeline matrix schema --kind recipe > recipe.schema.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `pipeline matrix`."""
    parser.description = "Start, check, show and describe matrix files."
    parser.epilog = EXAMPLE
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    init = verbs.add_parser("init", help="write a commented matrix to start from")
    init.add_argument("file", type=Path, nargs="?", default=Path("matrix.yaml"), help="default: matrix.yaml")
    init.add_argument("--force", action="store_true", help="overwrite a file that is there")
    _format(init)

    validate = verbs.add_parser("validate", help="check matrix files and the recipes they name")
    validate.add_argument("files", type=Path, nargs="+", metavar="FILE", help="matrix files")
    _shared(validate)

    show = verbs.add_parser("show", help="list a matrix's cells, and why some cannot work")
    show.add_argument("file", type=Path, metavar="FILE", help="a matrix file")
    show.add_argument(
        "--cells",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only cells like this, e.g. 'qwen2*/fp8'; '!PATTERN' leaves out",
    )
    show.add_argument(
        "--toolchain",
        default="auto",
        metavar="NAME",
        help="what auto, or no toolchain axis, stands for (default auto: left open)",
    )
    _shared(show)

    schema = verbs.add_parser("schema", help="print the JSON Schema of matrix or recipe files, for editors")
    schema.add_argument("--kind", choices=("matrix", "recipe"), default="matrix", help="default matrix")


def _shared(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="KEY=VALUE",
        help="change a value, e.g. axes.precision=[fp16]",
    )
    _format(verb)


def _format(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--format", choices=("text", "json"), default="text", help="default text")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code is 2 when a file has faults."""
    match args.verb:
        case "init":
            return _init(args.file, force=args.force, as_json=args.format == "json")
        case "validate":
            return _validate(args)
        case "show":
            return _show(args)
        case _:
            from trtllm_pipeline.cli.output import emit_json
            from trtllm_pipeline.config.models import json_schema

            emit_json(json_schema(args.kind))
            return 0


def _init(path: Path, *, force: bool, as_json: bool) -> int:
    from trtllm_pipeline.cli.output import emit, emit_json
    from trtllm_pipeline.config.load import TEMPLATE
    from trtllm_pipeline.errors import UsageError

    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(TEMPLATE.read_text(encoding="utf-8").replace("FILE", str(path)))
    except FileExistsError:
        raise UsageError(f"{path} is there already", hint="choose another name, or --force to overwrite it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    if as_json:
        emit_json({"schema": 1, "file": str(path)})
    else:
        emit(f"wrote {path}; next: pipeline matrix show {path}")
    return 0


def _validate(args: argparse.Namespace) -> int:
    from trtllm_pipeline.cli.output import emit, emit_json, note
    from trtllm_pipeline.config.expand import expand
    from trtllm_pipeline.config.load import load_matrix
    from trtllm_pipeline.errors import MatrixError

    results = []
    for path in args.files:
        cells, faults = 0, []
        try:
            cells = len(expand(load_matrix(path, args.sets), default_toolchain="auto"))
        except MatrixError as error:
            faults = [
                {"path": fault.path, "line": fault.line, "key": fault.key, "message": fault.message}
                for fault in error.faults
            ]
            if args.format == "text":
                note(error.message)
        else:
            if args.format == "text":
                emit(f"{path}: {cells} {'cell' if cells == 1 else 'cells'}")
        results.append({"file": str(path), "valid": not faults, "cells": cells, "faults": faults})
    if args.format == "json":
        emit_json({"schema": 1, "files": results})
    return 0 if all(result["valid"] for result in results) else 2


def _show(args: argparse.Namespace) -> int:
    from trtllm_pipeline.cli.output import emit, emit_json
    from trtllm_pipeline.config.expand import expand, select
    from trtllm_pipeline.config.load import load_matrix
    from trtllm_pipeline.planning.plan_file import axes

    cells = select(expand(load_matrix(args.file, args.sets), default_toolchain=args.toolchain), args.cells)
    if args.format == "json":
        emit_json(
            {
                "schema": 1,
                "cells": [
                    {"id": cell.id, **axes(cell), "settings": cell.settings, "reason": cell.reason} for cell in cells
                ],
            }
        )
    else:
        for cell in cells:
            emit(cell.id if cell.reason is None else f"{cell.id}  cannot work: {cell.reason}")
    return 0
