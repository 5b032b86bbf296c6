"""Matrix files by path, and shipped matrices by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Json, MatrixError, UsageError
from trtllm_pipeline.orchestrate.matrix.document import SUFFIXES, nearest, read
from trtllm_pipeline.orchestrate.matrix.expand import expand
from trtllm_pipeline.orchestrate.matrix.recipe_files import list_recipes, matrices_folder
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix

TEMPLATE: Final = Path(__file__).with_name("template.yaml")


def list_matrices() -> dict[str, Path]:
    """The shipped matrices by name."""
    return {path.stem: path for path in sorted(matrices_folder().glob("*.yaml"))}


def find_matrix(named: str) -> Path:
    """The file of `--matrix`: a path, or the name of a shipped matrix.

    A file with that name in the current directory takes precedence. Raises UsageError for a name that is neither.
    """
    path = Path(named)
    if "/" in named or path.suffix in SUFFIXES or path.exists():
        return path
    known = list_matrices()
    if named in known:
        return known[named]
    if named in list_recipes(Path()):
        raise UsageError(
            f"{named!r} is a model, not a matrix",
            hint=f"write a matrix with pipeline matrix init, and `model: [{named}]` under its axes",
        )
    raise UsageError(
        f"there is no matrix {named!r}{nearest(named, known)}", hint="give a file, or a name from pipeline matrix list"
    )


def summary(path: Path) -> str:
    """The description in a matrix file, or an empty text."""
    data = read(path).data
    return str(data.get("description", "")) if isinstance(data, dict) else ""


def write_matrix(path: Path, *, shipped: str | None, force: bool) -> None:
    """Write a new matrix file: the commented template, or a copy of a shipped matrix.

    Raises UsageError if the file cannot be written, or if it exists, unless `force`.
    """
    if shipped is None:
        text = TEMPLATE.read_text(encoding="utf-8").replace("FILE", str(path))
    else:
        source = list_matrices().get(shipped)
        if source is None:
            raise UsageError(
                f"--from: there is no shipped matrix {shipped!r}{nearest(shipped, list_matrices())}",
                hint="pipeline matrix list",
            )
        text = source.read_text(encoding="utf-8").replace(f"matrices/{source.name}", str(path))
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} already exists", hint="choose another name, or --force to overwrite it") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class CheckedMatrix:
    """Result of checking a matrix file."""

    file: Path
    cells: int
    error: MatrixError | None

    def to_json(self) -> dict[str, Json]:
        """The output of `pipeline matrix check --format json`."""
        faults = self.error.faults if self.error else ()
        return {
            "file": str(self.file),
            "valid": self.error is None,
            "cells": self.cells,
            "faults": [
                {"path": fault.path, "line": fault.line, "key": fault.key, "message": fault.message} for fault in faults
            ],
        }


def check_matrix(named: str, sets: Sequence[str]) -> CheckedMatrix:
    """Check a matrix and its recipes. Raises UsageError for invalid `sets` or an unknown name."""
    path = find_matrix(named)
    try:
        return CheckedMatrix(path, len(expand(load_matrix(path, sets), default_toolchain="auto")), None)
    except MatrixError as error:
        return CheckedMatrix(path, 0, error)
