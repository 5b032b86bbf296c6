"""Results for Python programs: `trtllm_pipeline.load_report(path)`.

report = trtllm_pipeline.load_report("runs/20261121-031502-9f3a/report.json")
report.rows[0].levels[0].latency("ttft_ms", "p99")
report.frame().groupby("precision").output_tokens_per_s.max()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.base import CellId, UsageError
from trtllm_pipeline.orchestrate import CellResult, Store, is_workspace, report_file
from trtllm_pipeline.show.report.results import read_results
from trtllm_pipeline.show.report.writers import flat

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class LoadedReport:
    """The results of the cells of a run, or of a workspace's latest matrix."""

    run: str
    """Id of the (newest) run."""
    matrix: str
    rows: tuple[CellResult, ...]

    @property
    def cells(self) -> Mapping[CellId, CellResult]:
        return {row.id: row for row in self.rows}

    def frame(self) -> pd.DataFrame:
        """A data frame with one row per cell and level and the columns of `pipeline report --format csv`.

        Raises UsageError if pandas is not installed.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise UsageError("frame() needs pandas", hint="pip install 'trtllm-pipeline[frame]'") from error
        return pd.DataFrame(flat(self.rows))


def load_report(path: str | Path) -> LoadedReport:
    """Load the results of a report.json, a run directory or a workspace. Raises UsageError, StateError."""
    place = Path(path)
    if is_workspace(place):
        store = Store(place)
        try:
            results = read_results(store)
        finally:
            store.close()
        return LoadedReport(results.run_id, results.matrix, tuple(results.rows))
    rows, about = report_file.read_report(place / report_file.NAME if place.is_dir() else place)
    return LoadedReport(str(about.get("id") or ""), str(about.get("matrix") or ""), rows)
