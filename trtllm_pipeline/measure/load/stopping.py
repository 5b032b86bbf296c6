"""Length of a load run: repeats until intervals are narrow, and searches for the highest rate, or the most requests in
flight, that meet objectives.

Both choose the next levels only from the measurements so far, so their decisions are reproducible.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.measure.load.load import Level, Load
from trtllm_pipeline.measure.load.objectives import LEAST_SEARCHED
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.stats import crossing_interval, relative_half_width, share_interval

LEAST_REPEATS: Final = 5
"""Minimum repeats before intervals are checked: with fewer, some are narrow by chance."""
STEP: Final = 1.05
"""A search ends when the lowest rate that failed is at most this factor above the highest that passed."""
_ROUNDS: Final = 3
"""Maximum rounds at a rate whose share is too close to the required one."""
_RATES: Final = 24
_OF_MOST: Final = 0.7
"""First rate of a search, as a share of the closed loop's throughput."""
_DOUBLINGS: Final = 10
MOST_SEARCHED: Final = 4096
"""Maximum requests in flight that a search tries."""
_NEAR: Final = 1.5
"""Maximum factor between the result and a rate used in the fit."""
_FORM: Final = re.compile(r"\s*([a-z0-9_]+)\s*=\s*(\d+(?:\.\d+)?)\s*(%?)\s*")


def parse_precisions(text: str, metrics: Sequence[str]) -> dict[str, float]:
    """Metrics and their shares in `output_tps=3%,ttft_p50=0.05`. Raises UsageError."""
    precisions = {}
    for part in text.split(","):
        match = _FORM.fullmatch(part)
        name, number, percent = match.groups() if match else ("", "0", "")
        value = float(number) / (100 if percent else 1)
        if name not in metrics or not 0 < value < 1:
            raise UsageError(
                f"--stop-when: {part.strip()!r} is not METRIC=PRECISION", hint="METRIC=PERCENT, such as output_tps=3%"
            )
        precisions[name] = value
    return precisions


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Rule that ends the repeats."""

    precisions: Mapping[str, float] = field(default_factory=dict)
    """Metric of a level -> half the width of its interval, as a share of its value. None: the repeats of the load."""
    max_repeats: int = 20
    budget_s: float | None = None
    """No repeat, and no round of a search, starts after this time."""

    def narrow(self, repeats: Sequence[Mapping[str, float | None]]) -> bool:
        """True if a level's intervals over its repeats are narrow. Metrics that all repeats lack are left to a gate."""
        for name, wanted in self.precisions.items():
            values = [value for repeat in repeats if (value := repeat.get(name)) is not None]
            if repeats and not values:
                continue
            width = relative_half_width(values)
            if width is None or width > wanted:
                return False
        return True

    def words(self) -> str | None:
        """Text for the conditions of a measurement, instead of a number of repeats."""
        goals = ", ".join(f"{name} within {share:.3g}" for name, share in self.precisions.items())
        return f"until {goals}" if goals else None


@dataclass(frozen=True, slots=True)
class Probe:
    """Results of a search at one rate."""

    rate: float
    """Requests per second, or requests in flight."""
    rounds: tuple[tuple[bool, ...], ...]
    """For each round, in schedule order: whether each request met all objectives."""
    rates_rps: tuple[float, ...] = ()
    """Closed loop: requests per second that completed in each repeat."""

    @property
    def completed_rps(self) -> float | None:
        """The median of `rates_rps`. None without any."""
        return median(self.rates_rps) if self.rates_rps else None

    @property
    def met(self) -> tuple[bool, ...]:
        """Result of each request in all rounds."""
        return tuple(met for one in self.rounds for met in one)

    @property
    def share(self) -> float:
        """Share of the requests that met all objectives."""
        return sum(self.met) / len(self.met)

    def kept(self, wanted: float) -> bool | None:
        """True if the share is at least `wanted`. None if the interval is too wide and another round is allowed."""
        low, high = share_interval(self.met)
        if low >= wanted or high < wanted:
            return low >= wanted
        return None if len(self.rounds) < _ROUNDS else self.share >= wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSearch:
    """Bisection of request rates for the highest at which a share of the requests meets all objectives."""

    wanted: float
    first: float = 1.0
    """First rate in requests per second."""

    def next(self, probes: Sequence[Probe]) -> float | None:
        """The rate to measure next, or a measured rate for another round. None when the search is over."""
        if not probes:
            return self.first
        if len({probe.rate for probe in probes}) >= _RATES:
            return None
        for probe in probes:
            if probe.kept(self.wanted) is None:
                return probe.rate
        low, high = self.bounds(probes)
        if low is None or high is None:
            edge = probes[0].rate if low is None and high is None else (low or high)
            assert edge is not None
            if not 2**-_DOUBLINGS < edge / self.first < 2**_DOUBLINGS:
                return None
            return _rounded(edge * 2 if high is None else edge / 2)
        return None if high <= low * STEP else _rounded(math.sqrt(low * high))

    def bounds(self, probes: Sequence[Probe]) -> tuple[float | None, float | None]:
        """The highest rate up to which all rates passed, and the lowest that failed. None if there is none."""
        return _bounds(probes, self.wanted)

    def interval(self, probes: Sequence[Probe]) -> tuple[float | None, float | None]:
        """95% interval of the rate, with the reported rate. As `bounds` if the share falls too sharply for a fit."""
        low, high = self.bounds(probes)
        near = [
            (probe.rate, len(one), sum(one))
            for probe in probes
            if low is not None and high is not None and low / _NEAR <= probe.rate <= high * _NEAR
            for one in probe.rounds
        ]
        fitted = crossing_interval(near, self.wanted)
        # The rate is the highest that was tried and met the objectives, so the curve may cross slightly above it.
        return (low, high) if fitted is None or low is None else (min(low, fitted[0]), max(low, fitted[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencySearch:
    """Doubling, then bisection, of requests in flight to find the most at which a share of the requests meets all
    objectives.

    It ends early at saturation: if twice as many in flight complete at most STEP times as many requests per second,
    more would only wait.
    """

    wanted: float

    def next(self, probes: Sequence[Probe]) -> int | None:
        """The concurrency to measure next, or a measured one for another round. None when the search is over."""
        for probe in probes:
            if probe.kept(self.wanted) is None:
                return int(probe.rate)
        low, high = self.bounds(probes)
        if high is None:
            done = low is not None and (low >= MOST_SEARCHED or self.saturated(probes) is not None)
            return None if done else min(MOST_SEARCHED, 2 * (low or 0)) or 1
        if low is None:
            return high // 2 or None
        return (
            None
            if high - low <= max(1.0, low * (STEP - 1))
            else min(max(round(math.sqrt(low * high)), low + 1), high - 1)
        )

    def bounds(self, probes: Sequence[Probe]) -> tuple[int | None, int | None]:
        """The highest concurrency up to which all passed, and the lowest that failed. None if there is none."""
        low, high = _bounds(probes, self.wanted)
        return None if low is None else int(low), None if high is None else int(high)

    def saturated(self, probes: Sequence[Probe]) -> int | None:
        """The lowest concurrency at which the server is saturated. None if it is not saturated at any that was tried."""
        known = [(int(probe.rate), probe.completed_rps) for probe in probes if probe.completed_rps]
        return min(
            (few for few, rps in known for many, more in known if many >= 2 * few and more <= STEP * rps), default=None
        )


def _bounds(probes: Sequence[Probe], wanted: float) -> tuple[float | None, float | None]:
    missed = [probe.rate for probe in probes if probe.kept(wanted) is False]
    high = min(missed, default=None)
    kept = [probe.rate for probe in probes if probe.kept(wanted) and (high is None or probe.rate < high)]
    return max(kept, default=None), high


def _rounded(rate: float) -> float:
    """Rounded to four digits, for readability."""
    return float(f"{rate:.4g}")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Measurements so far."""

    repeats: Sequence[Sequence[Mapping[str, float | None]]] = ()
    """StopRule metrics by level, then by repeat."""
    probes: Sequence[Probe] = ()
    """Rates that a search tried."""
    closed: Sequence[Probe] = ()
    """Closed loops: the requested levels, and those that a search tried."""
    most_rps: float | None = None
    """Highest requests per second of any level."""


class Rounds:
    """The levels of a load, round after round, until the results are complete."""

    def __init__(
        self,
        load: Load,
        prompts: Sequence[Prompt],
        stop: StopRule = StopRule(),
        find_rate: float | None = None,
        find_concurrency: float | None = None,
    ) -> None:
        """`find_rate` and `find_concurrency` are shares of requests that must meet the objectives."""
        least = min(LEAST_REPEATS, stop.max_repeats) if stop.precisions else 1
        self._repeats = max(load.repeats, least)
        self._load, self._prompts = load, prompts
        self._stop, self._wanted = stop, find_rate
        self._search: RateSearch | None = None
        self._closed = None if find_concurrency is None else ConcurrencySearch(wanted=find_concurrency)
        self._searching = False
        self._ends_s = math.inf if stop.budget_s is None else time.monotonic() + stop.budget_s
        self.levels = replace(load, repeats=self._repeats).levels(prompts)

    @property
    def open_end(self) -> bool:
        """True if more levels may follow the first ones."""
        return bool(self._stop.precisions) or self._wanted is not None or self._closed is not None

    @property
    def most_in_flight(self) -> int:
        """Maximum requests in flight in a closed loop."""
        return max((MOST_SEARCHED if self._closed else 0, *(level.concurrency or 0 for level in self.levels)))

    def next(self, progress: LoadProgress) -> list[Level]:
        """The levels to measure now. Empty at the end."""
        if time.monotonic() >= self._ends_s:
            return []
        if (
            not self._searching
            and self._repeats < self._stop.max_repeats
            and not all(map(self._stop.narrow, progress.repeats))
        ):
            self._repeats += 1
            return self._load.turn(self._prompts, self._repeats - 1)
        self._searching = True
        concurrency = None if self._closed is None else self._closed.next(progress.closed)
        if concurrency is not None:
            rounds = next((len(probe.rounds) for probe in progress.closed if probe.rate == concurrency), 0)
            level = self._load.level(self._prompts, rounds, concurrency, None)
            return [replace(level, probes=concurrency not in self._load.concurrency)]
        if self._wanted is None:
            return []
        first = _rounded(_OF_MOST * progress.most_rps) if progress.most_rps else 1.0
        self._search = self._search or RateSearch(wanted=self._wanted, first=first)
        rate = self._search.next(progress.probes)
        if rate is None:
            return []
        while rate in self._load.request_rate:
            rate *= 1.001  # a separate level
        rounds = next((len(probe.rounds) for probe in progress.probes if probe.rate == rate), 0)
        long_s = self._load.interval_s and max(self._load.interval_s, LEAST_SEARCHED / rate)
        load = replace(self._load, interval_s=long_s, requests=self._load.requests or LEAST_SEARCHED)
        return [replace(load.level(self._prompts, rounds, None, rate), probes=True)]
