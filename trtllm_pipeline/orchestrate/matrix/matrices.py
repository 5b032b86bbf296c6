"""Matrix files by their path, and those that come with the project by their name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import Json, MatrixError, UsageError
from trtllm_pipeline.orchestrate.matrix.document import SUFFIXES, nearest, read
from trtllm_pipeline.orchestrate.matrix.expand import expand
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix

TEMPLATE: Final = Path(__file__).with_name("template.yaml")
"""A commented matrix to start from."""


def list_matrices() -> dict[str, Path]:
    """The matrices that come with the project, by name."""
    return {path.stem: path for path in sorted(matrices_folder().glob("*.yaml"))}


def find_matrix(named: str) -> Path:
    """The file that `--matrix` means: a path, or the name of a matrix that comes with the project.

    A file of that name here goes first. Raises UsageError for a bare name that is neither.
    """
    path = Path(named)
    if "/" in named or path.suffix in SUFFIXES or path.exists():
        return path
    known = list_matrices()
    if named not in known:
        raise UsageError(
            f"there is no matrix {named!r}{nearest(named, known)}",
            hint="give a file, or a name that pipeline matrix list shows",
        )
    return known[named]


def summary(path: Path) -> str:
    """The description in a matrix file, empty where there is none."""
    data = read(path).data
    return str(data.get("description", "")) if isinstance(data, dict) else ""


def write_matrix(path: Path, *, shipped: str | None, force: bool) -> None:
    """Write a matrix to start from: the commented template, or a copy of one that comes with the project.

    Raises UsageError where the file exists, unless `force`, or cannot be written.
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
    """What checking a matrix file found."""

    file: Path
    cells: int
    error: MatrixError | None

    def to_json(self) -> dict[str, Json]:
        """As `pipeline matrix check --format json` prints it."""
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
    """Check a matrix and the recipes it names. Raises UsageError for `sets` that are none, or an unknown name."""
    path = find_matrix(named)
    try:
        return CheckedMatrix(path, len(expand(load_matrix(path, sets), default_toolchain="auto")), None)
    except MatrixError as error:
        return CheckedMatrix(path, 0, error)
