"""Reads rows of CSV and Parquet files as strictly as those of JSON Lines."""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from trtllm_pipeline.base.errors import ROWS_SHOWN, Fault, MatrixError, UsageError

T = TypeVar("T")
Columns = Callable[[Sequence[str]], Sequence[str]]
"""Names of a table's columns -> the columns to read."""
_LONGEST: Final = 1 << 24
"""Length limit of one CSV value, in characters."""
_FIRST_ROWS: Final = 1000
_MOST_FAULTS: Final = 20


def is_table(path: Path) -> bool:
    """True if the file name has a table's suffix."""
    return path.suffix.lower() in _READERS


def read(path: Path, parse: Callable[[Any, int], T], columns: Columns = list, *, first: bool = False) -> list[T]:
    """The results of `parse` for each row, a mapping, and its number. With `first`, only for the first thousand, for a
    plan.

    Raises MatrixError with every row for which `parse` raises ValueError, and UsageError for a Parquet file without
    pyarrow.
    """
    rows: list[T] = []
    faults: list[Fault] = []
    most = _FIRST_ROWS if first else None
    try:
        for number, value in enumerate(itertools.islice(_READERS[path.suffix.lower()](path, columns), most), 1):
            try:
                rows.append(parse(value, number))
            except ValueError as error:
                faults.append(Fault(os.fspath(path), None, f"row {number}", str(error)))
                if len(faults) == _MOST_FAULTS:
                    break
    except (OSError, ValueError, NotImplementedError) as error:
        faults.append(Fault(os.fspath(path), None, "", f"cannot be read: {error}"))
    if not rows and not faults:
        faults.append(Fault(os.fspath(path), None, "", "it has no rows"))
    if faults:
        raise MatrixError(tuple(faults), most=ROWS_SHOWN)
    return rows


def count(path: Path) -> int:
    """Number of rows in a table. Raises OSError or ValueError for an invalid table, and UsageError as `read` does."""
    if path.suffix.lower() == ".parquet":
        with _parquet_file(path) as table:
            return int(table.metadata.num_rows)
    csv.field_size_limit(_LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            return max(0, sum(map(bool, csv.reader(file))) - 1)
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _csv_rows(path: Path, columns: Columns) -> Iterator[Any]:
    csv.field_size_limit(_LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = csv.DictReader(file, strict=True)
            columns(list(rows.fieldnames or ()))
            yield from rows
        except csv.Error as error:
            raise ValueError(f"line {rows.line_num}: {error}") from error


def _parquet_rows(path: Path, columns: Columns) -> Iterator[Any]:
    with _parquet_file(path) as file:
        for batch in file.iter_batches(columns=list(columns(file.schema_arrow.names))):
            yield from batch.to_pylist()


def _parquet_file(path: Path) -> Any:
    """An open Parquet file. Raises UsageError without pyarrow, and ValueError for an invalid file."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UsageError(
            f"{path}: reading Parquet needs the package pyarrow ({error})",
            hint="pip install 'trtllm-pipeline[parquet]', or give the rows as JSONL or CSV",
        ) from error
    return ParquetFile(path)


_READERS: Final = {".csv": _csv_rows, ".parquet": _parquet_rows}
