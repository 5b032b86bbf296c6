"""Accuracy drift: differences between two models' answers to the same questions, such as before and after quantization.

Pure functions of two `answers.jsonl` files. Answers are compared as they are. Scores are taken from the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

from annotated_types import Ge, Le
from typing_extensions import NotRequired, TypedDict

from trtllm_pipeline.base import UsageError, reading, user_files
from trtllm_pipeline.measure.load.events import STRICT, Count, Rate, validation_error_text
from trtllm_pipeline.measure.load.stats import Interval, Summary, mean_interval, summary

Key = tuple[Any, ...]
"""Id of the question, and the answer's position in a load run."""


@dataclass(frozen=True, slots=True)
class ScoreDrift:
    """One metric on the questions that both scored with it."""

    questions: int
    reference: float
    score: float
    difference: float
    interval: Interval
    """Interval of the difference, from pairs."""
    better: int
    """Questions with a higher score than the reference's."""
    worse: int

    @property
    def verdict(self) -> str:
        """The difference in words, judged by its interval."""
        low, high = self.interval
        if low <= 0 <= high:
            return "no loss beyond noise"
        return f"{'loses' if high < 0 else 'gains'} {abs(self.difference):.3f} ± {(high - low) / 2:.3f}"

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ScoreDrift:
        """The drift of one metric from the output of `to_json`. Raises KeyError or TypeError for anything else."""
        low, high = data["interval"]
        return ScoreDrift(**{**{name: data[name] for name in ScoreDrift.__dataclass_fields__}, "interval": (low, high)})


@dataclass(frozen=True, slots=True)
class Drift:
    """The result of `compare`."""

    pairs: int
    """Answers to the same question, at the same position of a load run if there was one."""
    unpaired: int
    """Answers that only one of the two has."""
    agreement: float
    interval: Interval
    """Interval of the agreement."""
    first_divergence_chars: Summary
    first_divergence_tokens: Summary | None
    """None for answers without tokens."""
    scores: Mapping[str, ScoreDrift]

    reference: str | None = None
    """The unquantized reference cell. None for answers from outside of cells."""

    def to_json(self) -> dict[str, Any]:
        """As in report.json, see docs/reference/formats.md."""
        return {
            **({} if self.reference is None else {"reference": self.reference}),
            "pairs": self.pairs,
            "unpaired": self.unpaired,
            "agreement": self.agreement,
            "agreement_interval": list(self.interval),
            "first_divergence": {"chars": self.first_divergence_chars, "tokens": self.first_divergence_tokens},
            "scores": {name: asdict(drift) for name, drift in self.scores.items()},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Drift:
        """The drift from the output of `to_json`. Raises KeyError or TypeError for anything else."""
        low, high = data["agreement_interval"]
        return Drift(
            pairs=data["pairs"],
            unpaired=data["unpaired"],
            agreement=data["agreement"],
            interval=(low, high),
            first_divergence_chars=data["first_divergence"]["chars"],
            first_divergence_tokens=data["first_divergence"]["tokens"],
            scores={name: ScoreDrift.from_json(each) for name, each in data["scores"].items()},
            reference=data.get("reference"),
        )


class ScoredAnswer(TypedDict):
    """A line of answers.jsonl."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    id: str
    answer: str
    scores: dict[str, Annotated[float, Ge(0), Le(1)]]
    input: NotRequired[str | None]
    tokens: NotRequired[list[Count] | None]
    concurrency: NotRequired[Count | None]
    request_rate: NotRequired[Rate | None]
    repeat: NotRequired[Count | None]
    time: NotRequired[Count | None]


def read(path: Path) -> list[ScoredAnswer]:
    """The rows of an answers.jsonl. Raises UsageError with the line of a bad one, MatrixError for no regular file."""
    from pydantic import TypeAdapter, ValidationError

    if path.is_dir():
        path = path / "answers.jsonl"
    user_files.check(path, hint=_HINT)
    rows: list[ScoredAnswer] = []
    first_lines: dict[Key, int] = {}
    adapter = TypeAdapter(ScoredAnswer)
    try:
        lines = reading.read_bytes(path).removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=_HINT) from error
    for number, line in enumerate(lines, 1):
        try:
            row = adapter.validate_json(line)
        except ValidationError as error:
            wrong = validation_error_text(error.errors(include_url=False)[0])
            raise UsageError(f"{path}:{number}: not an answer with its scores: {wrong}", hint=_HINT) from error
        first = first_lines.setdefault(_key(row), number)
        if first != number:
            raise UsageError(
                f"{path}:{number}: the answer to {row['id'][:60]!r} is in line {first} already", hint=_HINT
            )
        rows.append(row)
    return rows


_HINT: Final = "`pipeline stage accuracy` and `pipeline stage score` write answers.jsonl to their directory"


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first difference between `a` and `b`: the shorter length if one is a prefix of the other, None if equal."""
    differs = (index for index, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    return next(differs, None if len(a) == len(b) else min(len(a), len(b)))


def compare(reference: Sequence[ScoredAnswer], other: Sequence[ScoredAnswer]) -> Drift:
    """The drift of `other` from `reference`, both rows of an answers.jsonl.

    Raises UsageError if they share no question, or if questions with the same id differ.
    """
    left, right = ({_key(row): row for row in rows} for rows in (reference, other))
    pairs = [(a, right[key]) for key, a in left.items() if key in right]
    if not pairs:
        raise UsageError("the two have no question in common", hint="both must come from the same prompt file")
    for a, b in pairs:
        if a.get("input") != b.get("input"):
            raise UsageError(
                f"question {a['id']!r} is not the same: {str(a.get('input'))[:60]!r} and {str(b.get('input'))[:60]!r}",
                hint="both must come from the same prompt file, and the same chat template",
            )
    differ = [(a, b) for a, b in pairs if a["answer"] != b["answer"]]
    same = _by_question((a["id"], float(a["answer"] == b["answer"])) for a, b in pairs)
    encoded = all(row.get("tokens") is not None for pair in pairs for row in pair)
    tokens = [(a.get("tokens") or [], b.get("tokens") or []) for a, b in differ]
    names = dict.fromkeys(name for a, b in pairs for name in a["scores"] if name in b["scores"])
    return Drift(
        pairs=len(pairs),
        unpaired=len(left) + len(right) - 2 * len(pairs),
        agreement=round(fmean(same), 6),
        interval=_interval(same, low=0),
        first_divergence_chars=_divergences((a["answer"], b["answer"]) for a, b in differ),
        first_divergence_tokens=_divergences(tokens) if encoded else None,
        scores={name: _score_drift(name, pairs) for name in names},
    )


def _key(row: ScoredAnswer) -> Key:
    return row["id"], *(row.get(name) for name in ("concurrency", "request_rate", "repeat", "time"))


def _divergences(pairs: Iterable[tuple[Sequence[object], Sequence[object]]]) -> Summary:
    # A normalizing tokenizer may encode different texts as the same tokens.
    return summary(index for a, b in pairs if (index := first_difference(a, b)) is not None)


def _by_question(values: Iterable[tuple[str, float]]) -> list[float]:
    """Mean of each question's values: answers to one question are not independent."""
    scores: dict[str, list[float]] = {}
    for id_, value in values:
        scores.setdefault(id_, []).append(value)
    return [fmean(of_one) for of_one in scores.values()]


def _interval(values: Sequence[float], low: float) -> Interval:
    interval = mean_interval(values, low=low, high=1)
    assert interval is not None
    return interval


def _score_drift(name: str, pairs: Iterable[tuple[ScoredAnswer, ScoredAnswer]]) -> ScoreDrift:
    both = [
        (a["id"], a["scores"][name], b["scores"][name]) for a, b in pairs if name in a["scores"].keys() & b["scores"]
    ]
    before, after = _by_question((id_, a) for id_, a, _ in both), _by_question((id_, b) for id_, _, b in both)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return ScoreDrift(
        questions=len(differences),
        reference=round(fmean(before), 6),
        score=round(fmean(after), 6),
        difference=round(fmean(differences), 6),
        interval=_interval(differences, low=-1),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )
