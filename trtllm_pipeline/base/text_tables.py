"""Rows as a plain aligned table or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from trtllm_pipeline.base.files.writing import csv_value


def aligned(names: Mapping[str, str]) -> str:
    """One line of text for each name, aligned."""
    width = max(map(len, names), default=0)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in names.items())


def plain_table(rows: Sequence[Mapping[str, object]], *, digits: int = 2, missing: str = "-") -> str:
    """Rows with the same keys, aligned: the first column to the left, the others to the right."""
    if not rows:
        return ""
    lines = [
        list(rows[0]),
        *([missing if value is None else cell(value, digits) for value in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if at else text.ljust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def csv_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same keys as CSV, missing values empty."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_value(value) for name, value in row.items()} for row in rows)
    return text.getvalue().rstrip("\n")


def cell(value: object, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def number(value: float | None) -> str:
    """Three significant digits; whole numbers from 100 on."""
    if value is None:
        return "n/a"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
