"""The answers that a load run timed, from its event file (`perf/load.py` describes it)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_pipeline.accuracy.result import Place, Sample
from trtllm_pipeline.accuracy.scores import Question
from trtllm_pipeline.errors import FailureClass, StageError


@dataclass(frozen=True, slots=True)
class Timed:
    """What a load run has to say about some questions."""

    samples: tuple[Sample, ...]
    failed: int
    """Measured requests of these questions that have no answer; they are not scored."""
    not_asked: tuple[str, ...]
    """Ids of questions that no measured request asked: there were fewer requests than prompts."""
    settings: Mapping[str, Any]
    """Of the load run."""


def read(events: Path, questions: Mapping[str, Question], tokens: Callable[[str], tuple[int, ...]] | None) -> Timed:
    """The measured answers to `questions` (by id). `tokens` encodes an answer again.

    Raises StageError for what is no event file, and for questions that are not those that were asked.
    """
    samples: list[Sample] = []
    seen: Counter[tuple[Any, ...]] = Counter()
    asked: set[str] = set()
    failed = 0
    settings: Mapping[str, Any] | None = None
    for record in _records(events):
        kind = record.get("type")
        if kind == "header":
            settings = record.get("settings", {})
        elif kind == "prompt" and record["id"] in questions:
            if record["text"] != questions[record["id"]].prompt.text:
                raise StageError(
                    f"row {record['id']!r}: the load run asked {record['text'][:60]!r}, the row says "
                    f"{questions[record['id']].prompt.text[:60]!r}",
                    failure=FailureClass.USER,
                    hint="score with the file that was asked",
                )
        elif kind == "request" and record["phase"] == "measured" and record["prompt"] in questions:
            asked.add(record["prompt"])
            level = (record.get("concurrency"), record.get("request_rate"), record["repeat"])
            key = (*level, record["prompt"])
            if record["error"] is None:
                text = "".join(
                    event[1] for event in record["events"] if not any(event[3:])
                )  # [3]: reasoning, no answer
                encoded = None if tokens is None else tokens(text)
                samples.append(Sample(questions[record["prompt"]], text, encoded, Place(*level, seen[key])))
            else:
                failed += 1
            seen[key] += 1
    if settings is None:
        raise StageError(f"{events} is not an event file of a load run: it has no header", failure=FailureClass.USER)
    return Timed(tuple(samples), failed, tuple(id_ for id_ in questions if id_ not in asked), settings)


def _records(events: Path) -> Iterator[dict[str, Any]]:
    """Its records. A last line cut off by a crash is left out."""
    try:
        lines = events.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise StageError(f"{events} is not an event file of a load run: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line else {}
        except ValueError as error:
            if number == len(lines):
                return
            raise StageError(f"{events}:{number}: not a record of a load run: {error}") from error
        if isinstance(record, dict):
            yield record
