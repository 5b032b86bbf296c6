"""Calibration sets, read the same way by every toolchain: rows of a JSON Lines, CSV or Parquet file, and their selection."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import Fault, Machine, MatrixError, tables, user_files
from trtllm_pipeline.tensorrt.stage.params import Selection

logger = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C", bound=Any)
"""A class of parameters with a `calibration`, a Selection or None."""
Tokens = Sequence[int]
Messages = list[dict[str, Any]]
_TEXT_KEYS: Final = ("text", "input", "text_input")
_KEYS: Final = (*_TEXT_KEYS, "messages", "input_ids")
MOST: Final = 512
"""Default number of rows for a larger set, the same as in TensorRT-LLM's quantize.py."""
_EXPECTED: Final = 'expected an object with "text", "input" or "text_input", a string, "messages", or "input_ids"'


DEFAULT_DATA: Final = "builtin:general"
"""Default calibration set of a matrix."""


def default_set() -> Path:
    """The calibration set in the package: 64 short texts of many kinds, written for it."""
    return PACKAGE / "data" / "calibration" / "general.jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a calibration set, in one of three forms."""

    text: str | None = None
    messages: Messages | None = None
    """A conversation, for the model's chat template."""
    tokens: Tokens | None = None
    """Token ids, for sets that were tokenized before."""


def read_rows(path: Path, column: str | None = None, *, first: bool = False) -> list[Row]:
    """The rows of a CSV file with a header, a Parquet file, or else non-blank JSON Lines, or their values in `column`.

    With `first`, only the first rows are read, as in `read_json_lines` and `tables.read`. Raises MatrixError with every
    malformed row, and UsageError for a Parquet file without pyarrow.
    """

    def row(value: Any, _number: int) -> Row:
        return _parse(value if column is None else _of_column(value, column))

    if tables.is_table(path):
        return tables.read(path, row, lambda names: _columns(path, names, column), first=first)
    hint = 'one JSON object a line, for example {"text": "Water boils at ..."}'
    return user_files.read_json_lines(path, row, nothing="it has no rows", hint=hint, first=first)


def _of_column(value: Any, column: str) -> dict[str, Any]:
    if not isinstance(value, dict) or column not in value:
        raise ValueError(
            f"has no {column!r}" + (f"; it has {', '.join(map(str, value))}" if isinstance(value, dict) else "")
        )
    cell = value[column]
    if not isinstance(cell, list):
        return {"text": cell}
    return {"messages" if cell and isinstance(cell[0], dict) else "input_ids": cell}


def _columns(path: Path, names: Sequence[str], column: str | None) -> list[str]:
    """The columns to read. Raises MatrixError if there are none."""
    read = [name for name in names if name in (_KEYS if column is None else (column,))]
    if not read:
        wanted = f"no column {column!r}" if column else f"none of the columns {', '.join(_KEYS)}"
        fault = Fault(os.fspath(path), None, "", f"has {wanted}; it has {', '.join(names) or 'none at all'}")
        raise MatrixError((fault,), hint="name one with settings.quantize.calibration.column, or --calibration-column")
    return read


def _parse(value: Any) -> Row:
    fields = value if isinstance(value, dict) else {}
    for key in _TEXT_KEYS:
        if isinstance(fields.get(key), str) and fields[key]:
            return Row(text=fields[key])
    messages, tokens = fields.get("messages"), fields.get("input_ids")
    if isinstance(messages, list) and messages and all(isinstance(part, dict) for part in messages):
        return Row(messages=messages)
    if isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens):
        return Row(tokens=tokens)
    raise ValueError(_EXPECTED)


def choose(rows: Sequence[T], selection: Selection) -> list[T]:
    """The selected number of rows, in order: all rows of a smaller set, otherwise a sample without replacement."""
    import numpy as np

    samples = selection.samples or MOST
    if selection.samples is not None and selection.samples > len(rows):
        logger.warning("calibrating on %d rows: %d were requested, but there are no more", len(rows), samples)
    if len(rows) <= samples:
        return list(rows)
    chosen = np.random.default_rng(selection.seed).choice(len(rows), samples, replace=False)
    return [rows[index] for index in sorted(chosen)]


def with_true_samples(params: C, files: Mapping[str, str], _machine: Machine | None = None) -> C:
    """The parameters of a calibrating stage, with the number of rows that its file really has.

    Command lines and keys then match what runs. Warns if more rows were requested. Raises MatrixError if the first rows
    cannot be read, such as with a wrong column, before a model is downloaded for them. Missing files and later rows are
    checked by the stage.
    """
    given = params.calibration
    if given is None or not Path(files.get("calibration_data", "")).is_file():
        return params
    _check_first(files["calibration_data"], given.column)
    try:
        rows = _count(files["calibration_data"])
    except (OSError, ValueError, NotImplementedError):
        return params
    if given.samples is not None and given.samples > rows:
        _warn(files["calibration_data"], given.samples, rows)
    if not rows:
        return params
    return replace(params, calibration=replace(given, samples=min(given.samples or MOST, rows)))


@lru_cache(maxsize=64)
def _check_first(path: str, column: str | None) -> None:
    """Raise MatrixError for errors that `read_rows` would find in the first rows of a file."""
    read_rows(Path(path), column, first=True)


@lru_cache(maxsize=64)
def _count(path: str) -> int:
    if tables.is_table(Path(path)):
        return tables.count(Path(path))
    with Path(path).open("rb") as file:
        lines = sum(not line.isspace() for line in file)
        file.seek(0)
        array = b"[" in file.read(64)  # a quick check: the whole file may be large
    rows = user_files.json_array(user_files.read_text(Path(path))) if array else None
    return lines if rows is None else len(rows)


@lru_cache(maxsize=64)
def _warn(path: str, requested: int, rows: int) -> None:
    logger.warning(
        "settings.quantize.calibration.samples is %d, but %s has %d rows: the model is calibrated on %d. "
        "Name a larger set in settings.quantize.calibration.data, or omit samples to use all rows.",
        requested,
        path,
        rows,
        rows,
    )
