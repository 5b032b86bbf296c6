"""Columns of the result table: header, value per cell, and formula.

To add a column, add one line to `columns`. Formulas are defined next to the code that computes the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.measure import LevelResult
from trtllm_pipeline.orchestrate import CellResult, report_file

_FORMULAS: Final = {metric.name: metric.formula for metric in report_file.METRICS}
LOWEST: Final = "lowest"
HIGHEST: Final = "highest"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table. `head` is one line. If the table is too wide, columns with the highest `rank` are
    dropped first.

    Rank 0 is never dropped. Ranks 1 and 2 are read first: cell names are shortened before these columns are dropped.
    """

    head: str
    value: Callable[[CellResult], str | None]
    rank: int
    metric: str | None = None
    of_level: str | None = None
    """Path of the value in a level of the HTML page's data. None if the value does not depend on the level."""

    @property
    def is_latency(self) -> bool:
        return self.head.startswith(("TTFT ms", "TPOT ms"))

    @property
    def formula(self) -> str | None:
        return None if self.metric is None else _FORMULAS.get(self.metric)


def columns(rows: Sequence[CellResult], level: str = HIGHEST) -> tuple[Column, ...]:
    """The columns after the cell's id, in display order. Columns without any value are left out.

    `level` is the key of a level, such as "4" or "2.5/s", or the lowest or highest level of each cell.
    """
    at = _head_of({shown.key for row in rows if (shown := level_of(row, level)) is not None}, level)
    last = _head_of({row.levels[-1].key for row in rows if row.levels}, HIGHEST)
    gigabytes = max((row.engine_size_bytes or 0 for row in rows), default=0) >= 10e9
    scale, unit = (1e9, "GB") if gigabytes else (1e6, "MB")
    scores = list(dict.fromkeys(name for row in rows for name in row.accuracy))
    several = any(row.gpus > 1 for row in rows)
    unnamed = [row for row in rows if row.axes.get("toolchain") not in row.id.split("/")]
    mixed = len({row.axes.get("toolchain") for row in unnamed}) > 1

    def of_level(
        head: str, value: Callable[[CellResult, LevelResult], str | None], rank: int, metric: str | None, path: str
    ) -> Column:
        def shown(row: CellResult) -> str | None:
            found = level_of(row, level)
            return None if found is None else value(row, found)

        return Column(f"{head} {at}", shown, rank, metric, path)

    def measured(
        head: str, value: Callable[[LevelResult], float | None], rank: int, metric: str | None, path: str
    ) -> Column:
        return of_level(head, lambda _, each: _number(value(each)), rank, metric, path)

    def of_last(head: str, value: Callable[[LevelResult], str | None], rank: int, metric: str) -> Column:
        return Column(f"{head} {last}", lambda row: value(row.levels[-1]) if row.levels else None, rank, metric)

    every = [
        Column("status", _status, 0),
        *([Column("toolchain", lambda row: str(row.axes.get("toolchain", "")), 2)] if mixed else []),
        measured("TTFT ms", lambda each: each.latency("ttft_ms", "p50"), 1, "ttft_ms", "ttft_ms.p50"),
        measured("TTFT p99", lambda each: each.latency("ttft_ms", "p99"), 3, "ttft_ms", "ttft_ms.p99"),
        measured("TPOT ms", lambda each: each.latency("tpot_ms", "p50"), 2, "tpot_ms", "tpot_ms.p50"),
        measured("TPOT p99", lambda each: each.latency("tpot_ms", "p99"), 4, "tpot_ms", "tpot_ms.p99"),
        measured("tok/s", lambda each: each.output_tokens_per_s, 1, "output_tokens_per_s", "out"),
        *([of_level("tok/s/GPU", lambda row, each: _number(row.per_gpu(each)), 2, None, "per_gpu")] if several else []),
        measured("tok/s/user", lambda each: each.value("user_tps"), 3, "user_tps", "per_user"),
        of_level("tok/s 95%", lambda _, each: _certainty(each), 5, "intervals", "certainty"),
        of_level("$/M tok", lambda row, each: _number(row.cost(each)), 2, "cost", "cost"),
        measured("req/s", lambda each: each.requests_per_s, 4, "requests_per_s", "req"),
        of_last("goodput", lambda each: _share(each.goodput.share if each.goodput else None), 2, "goodput"),
        of_last(
            "goodput tok/s",
            lambda each: _number(each.goodput.output_tokens_per_s if each.goodput else None),
            4,
            "goodput",
        ),
        of_last("accept", lambda each: _share(each.acceptance), 3, "acceptance"),
        Column(
            "SLO req/s", lambda row: _number(row.highest_rate.rate) if row.highest_rate else None, 2, "highest_rate"
        ),
        Column(
            "SLO in flight",
            lambda row: _number(row.highest_concurrency.concurrency) if row.highest_concurrency else None,
            2,
            "highest_concurrency",
        ),
        Column("trtllm-bench tok/s", lambda row: _number(row.trtllm_bench_tps), 3, "trtllm_bench"),
        measured("tok/J", lambda each: each.tokens_per_joule, 3, "tokens_per_joule", "joule"),
        measured("GPU W", lambda each: each.gpu_use.power_w if each.gpu_use else None, 7, None, "gpu.power_w"),
        *(column for place, name in enumerate(scores) for column in _score(name, scores, first=place == 0)),
        Column(
            "agree", lambda row: _share(row.accuracy_drift.agreement if row.accuracy_drift else None), 5, "agreement"
        ),
        Column(
            f"engine {unit}",
            lambda row: None if row.engine_size_bytes is None else f"{row.engine_size_bytes / scale:.1f}",
            4,
        ),
        Column("build s", lambda row: _number(row.build_s), 5),
        measured("input tok/s", lambda each: each.input_tokens_per_s, 8, "input_tokens_per_s", "in"),
    ]
    return tuple(column for column in every if any(column.value(row) is not None for row in rows))


def _head_of(keys: Collection[str], word: str) -> str:
    """The level, e.g. "@4" or "@2.5/s", if all rows share it, otherwise which of each row's levels is shown."""
    return f"@{next(iter(keys)) if len(keys) == 1 else word}"


def level_keys(rows: Sequence[CellResult]) -> list[str]:
    """Keys of all levels: concurrencies, then rates, both increasing."""
    found = {
        each.key: (each.request_rate is not None, each.request_rate or each.concurrency or 0)
        for row in rows
        for each in row.levels
    }
    return sorted(found, key=found.__getitem__)


def level_of(row: CellResult, level: str) -> LevelResult | None:
    """The level of a cell: the one with this key, or its lowest or highest. None if it was not measured."""
    if level not in (LOWEST, HIGHEST):
        return next((each for each in row.levels if each.key == level), None)
    # Prefers closed loops: the throughput of an open loop is the offered load.
    closed = [each for each in row.levels if each.request_rate is None] or list(row.levels)
    return closed[0 if level == LOWEST else -1] if closed else None


def _status(row: CellResult) -> str:
    """The status, marked if the measurement has warnings."""
    return f"{row.status.value.replace('_', ' ')}{' !' if row.warnings else ''}"


def _certainty(level: LevelResult) -> str | None:
    """The interval of the throughput, or the number of requests that it is based on."""
    ends = level.interval("output_tps")
    if ends is not None:
        return " to ".join(str(_number(end)) for end in ends)
    return None if level.requests is None or level.output_tokens_per_s is None else f"of {level.requests} requests"


def _score(name: str, scores: Sequence[str], *, first: bool) -> tuple[Column, ...]:
    """A score with its interval, and its difference from the unquantized cell. The only score of a task has its name."""
    task = name.partition(".")[0]
    head = task if sum(each.partition(".")[0] == task for each in scores) == 1 else name

    def score(row: CellResult) -> str | None:
        value, ends = row.accuracy.get(name), row.accuracy_intervals.get(name)
        return None if value is None else f"{value:.2f} ({_ends(ends)})" if ends else f"{value:.2f}"

    def difference(row: CellResult) -> str | None:
        drift = None if row.accuracy_drift is None else row.accuracy_drift.scores.get(name)
        return None if drift is None else f"{drift.difference:+.2f} ({_ends(drift.interval)})"

    return (
        Column(head, score, 2 if first else 3, name),
        Column(f"{head} change", difference, 6 if first else 7, "difference"),
    )


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _ends(interval: Sequence[float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def _number(value: float | None) -> str | None:
    """Rounds to three significant digits, the precision of such measurements. Whole numbers are not rounded."""
    if value is None:
        return None
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
