"""Columns of the result table: header, value per cell, and formula.

To add a column, add one line to `columns`. Formulas are defined next to the code that computes the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.measure import LevelResult
from trtllm_pipeline.orchestrate import CellResult, report_file

_FORMULAS: Final = {metric.name: metric.formula for metric in report_file.METRICS}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table. `head` is one line. If the table is too wide, columns with the highest `rank` are dropped first.

    Rank 0 is never dropped. Ranks 1 and 2 are read first: cell names are shortened before these columns are dropped.
    """

    head: str
    value: Callable[[CellResult], str | None]
    rank: int
    metric: str | None = None

    @property
    def is_latency(self) -> bool:
        """The column shows the median of a latency."""
        return self.head.startswith(("TTFT", "TPOT"))

    @property
    def formula(self) -> str | None:
        """Formula of the column's metric."""
        return None if self.metric is None else _FORMULAS.get(self.metric)


def columns(rows: Sequence[CellResult]) -> tuple[Column, ...]:
    """The columns after the cell's id, in display order. Columns without any value are left out."""
    shown = [_shown(row) for row in rows if row.levels]
    low = _head_of({levels[0].key for levels in shown}, "lowest")
    high = _head_of({levels[-1].key for levels in shown}, "highest")
    last = _head_of({row.levels[-1].key for row in rows if row.levels}, "highest")
    gigabytes = max((row.engine_size_bytes or 0 for row in rows), default=0) >= 10e9
    scale, unit = (1e9, "GB") if gigabytes else (1e6, "MB")
    wide = any(row.gpus > 1 for row in rows)
    scores = list(dict.fromkeys(name for row in rows for name in row.accuracy))
    every = [
        Column("status", lambda row: row.status.value.replace("_", " "), 0),
        Column(f"TTFT ms {low}", _at(0, lambda level: level.latency("ttft_ms", "p50")), 1, "ttft_ms"),
        Column(f"TPOT ms {low}", _at(0, lambda level: level.latency("tpot_ms", "p50")), 2, "tpot_ms"),
        Column(f"tok/s {high}", _at(-1, lambda level: level.output_tokens_per_s), 1, "output_tokens_per_s"),
        Column(f"tok/s 95% {high}", lambda row: _certainty(_shown(row)[-1]) if row.levels else None, 5, "intervals"),
        *(
            [Column(f"tok/s/GPU {high}", lambda row: _number(row.per_gpu(_shown(row)[-1])) if row.levels else None, 2)]
            * wide
        ),
        Column(f"tok/s/user {high}", _at(-1, lambda level: level.value("user_tps")), 3, "user_tps"),
        Column(f"$/M tok {high}", lambda row: _number(row.cost(_shown(row)[-1])) if row.levels else None, 2, "cost"),
        Column(f"req/s {high}", _at(-1, lambda level: level.requests_per_s), 2, "requests_per_s"),
        Column(f"goodput {last}", lambda row: _goodput(row.levels[-1]) if row.levels else None, 2, "goodput"),
        Column(
            f"goodput tok/s {last}",
            lambda row: (
                _number(goodput.output_tokens_per_s) if row.levels and (goodput := row.levels[-1].goodput) else None
            ),
            4,
            "goodput",
        ),
        Column(
            f"accept {last}", lambda row: _share(row.levels[-1].acceptance) if row.levels else None, 3, "acceptance"
        ),
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
        Column(f"tok/J {high}", _at(-1, lambda level: level.tokens_per_joule), 3, "tokens_per_joule"),
        Column(f"GPU W {high}", _at(-1, lambda level: level.gpu_use.power_w if level.gpu_use else None), 7),
        *(column for place, name in enumerate(scores) for column in _score(name, first=place == 0)),
        Column(
            "agree", lambda row: _share(row.accuracy_drift.agreement if row.accuracy_drift else None), 5, "agreement"
        ),
        Column(
            f"engine {unit}",
            lambda row: None if row.engine_size_bytes is None else f"{row.engine_size_bytes / scale:.1f}",
            4,
        ),
        Column("build s", lambda row: _number(row.build_s), 5),
        Column(f"input tok/s {high}", _at(-1, lambda level: level.input_tokens_per_s), 8, "input_tokens_per_s"),
    ]
    return tuple(column for column in every if any(column.value(row) is not None for row in rows))


def _shown(row: CellResult) -> tuple[LevelResult, ...]:
    """Prefers closed-loop levels: in an open loop the throughput equals the offered load."""
    return tuple(level for level in row.levels if level.request_rate is None) or row.levels


def _head_of(keys: Iterable[str], word: str) -> str:
    """The level, e.g. "@4" or "@2.5/s", if all rows share it, otherwise which of each row's levels is shown."""
    values = set(keys)
    return f"@{values.pop()}" if len(values) == 1 else f"@{word}"


def _at(place: int, value: Callable[[LevelResult], float | None]) -> Callable[[CellResult], str | None]:
    return lambda row: _number(value(_shown(row)[place])) if row.levels else None


def _certainty(level: LevelResult) -> str | None:
    """The interval of the throughput, or the number of requests that it is from."""
    ends = level.interval("output_tps")
    if ends is not None:
        return " to ".join(str(_number(end)) for end in ends)
    return None if level.requests is None or level.output_tokens_per_s is None else f"of {level.requests} requests"


def _goodput(level: LevelResult) -> str | None:
    return None if level.goodput is None else _share(level.goodput.share)


def _score(name: str, *, first: bool) -> tuple[Column, ...]:
    """A score, its interval, and its difference from the unquantized cell."""

    def interval(row: CellResult) -> str | None:
        return _ends(row.accuracy_intervals.get(name))

    def difference(row: CellResult) -> str | None:
        drift = None if row.accuracy_drift is None else row.accuracy_drift.scores.get(name)
        return None if drift is None else f"{drift.difference:+.2f} ({_ends(drift.interval)})"

    return (
        Column(name, lambda row: _share(row.accuracy.get(name)), 2 if first else 3, name),
        Column(f"{name} 95%", interval, 6 if first else 7, "interval"),
        Column(f"{name} change", difference, 6 if first else 7, "difference"),
    )


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _ends(interval: Sequence[float] | None) -> str | None:
    return None if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _number(value: float | None) -> str | None:
    """Rounds to three significant digits, the precision of such measurements. Whole numbers are not rounded."""
    if value is None:
        return None
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
