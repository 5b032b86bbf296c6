"""The table of report formats, which `pipeline report`, `pipeline run` and `pipeline compare` read.

To add a format, write a function `write(report)` in a module of this package, and add a row to `FORMATS`. A writer is
imported only when its format is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import TextIO

    from trtllm_pipeline.orchestrate import CellResult, ForecastCheck
    from trtllm_pipeline.show.report.comparison import Comparison
    from trtllm_pipeline.show.report.record import Record


def _not_stored() -> Any:
    raise AssertionError("only a format with `stored` reads the workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The input of a format's writer: the results, and where they go."""

    rows: Sequence[CellResult]
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    run_id: str = ""
    matrix: str = ""
    finished: bool = True
    workspace: Path | None = None
    forecast: ForecastCheck | None = None
    verbose: bool = False
    """Add definitions and all details of the measurements."""
    level: str = "highest"
    """Level of the table: its key, or the lowest or highest of each cell."""
    reported: Collection[str] = ()
    """Reasons already shown, which a table does not repeat."""
    limits: Mapping[str, float | str] = field(default_factory=dict)
    """Initial limits of the HTML page."""
    record: Callable[[], Record] = _not_stored
    previous: Callable[[], Comparison | None] = _not_stored
    """Compares the results with an earlier run."""


class Format(NamedTuple):
    """A row of the table. Writers are MODULE:FUNCTION in `trtllm_pipeline.show.report`."""

    writer: str
    """A function of a `Report`, which writes to the report's stream."""
    help: str
    stored: bool = False
    """True if the writer reads more than the rows from the workspace. `pipeline run` does not offer these formats."""
    comparison: str | None = None
    """A function of a `Judgement` that returns text or rich content. None if `pipeline compare` lacks the format."""


FORMATS: Final[Mapping[str, Format]] = {
    "table": Format("writers:write_table", "for a terminal", comparison="compare_writers:to_table"),
    "json": Format("writers:write_json", "all values", comparison="compare_writers:to_json"),
    "csv": Format("writers:write_csv", "for spreadsheets", comparison="compare_writers:to_csv"),
    "markdown": Format("writers:write_markdown", "for pull requests", comparison="compare_writers:to_markdown"),
    "html": Format("html.page:write", "one page with plots", stored=True),
    "junit": Format("junit:write", "a test case per stage run", stored=True),
    "openmetrics": Format("openmetrics:write", "for Prometheus", stored=True),
}
AFTER_RUN: Final = tuple(name for name, row in FORMATS.items() if not row.stored)
COMPARED: Final = tuple(name for name, row in FORMATS.items() if row.comparison is not None)


def write(report: Report, form: str) -> None:
    _function(FORMATS[form].writer)(report)


def compared(judgement: Any, form: str) -> Any:
    """A comparison and its gate as text or rich content, in one of the formats `COMPARED`."""
    target = FORMATS[form].comparison
    assert target is not None
    return _function(target)(judgement)


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"trtllm_pipeline.show.report.{module}"), name)
    return function
