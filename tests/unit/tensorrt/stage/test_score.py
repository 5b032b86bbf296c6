"""The stage that scores what perf timed: event files in, scores out, no server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contexts import context
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.tensorrt import worker
from trtllm_pipeline.tensorrt.stage import score
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import ScoreParams

ROWS: tuple[dict[str, Any], ...] = (
    {"id": "fr", "input": "France", "output": "Paris"},
    {"id": "it", "input": "Italy", "output": "Rome"},
    {"id": "sum", "input": "1 + 1", "output": "2", "metric": "numeric"},
    {"id": "bare", "input": "Tell a story"},
)


def request(prompt: str, answer: str | None, concurrency: int | None = 1, **more: Any) -> dict[str, Any]:
    events = [] if answer is None else [[1, "(thinking)", 0, True], [2, answer[:2], 1], [3, answer[2:], 2, False]]
    return {
        "type": "request",
        "concurrency": concurrency,
        "request_rate": None,
        "repeat": 0,
        "phase": "measured",
        "slot": 0,
        "prompt": prompt,
        "max_tokens": 9,
        "events": events,
        "error": "boom" if answer is None else None,
        **more,
    }


def work(
    folder: Path, *requests: dict[str, Any], rows: tuple[dict[str, Any], ...] = ROWS, **params: Json
) -> StageContext[Any]:
    for name in ("perf", "engine", "out"):
        (folder / name).mkdir()
    header = {"type": "header", "schema": 1, "protocol": "grpc", "model": "m", "settings": {"temperature": 0.0}}
    prompts = [{"type": "prompt", "id": row["id"], "text": row["input"]} for row in ROWS]
    # One after the other, as a client in one slot sends them.
    times = [{"scheduled_ns": 9 * at, "sent_ns": 9 * at, "end_ns": 9 * at + 8} for at in range(len(requests))]
    later = [
        {**each, **times[at], "events": [[9 * at + event[0], *event[1:]] for event in each["events"]]}
        for at, each in enumerate(requests)
    ]
    lines = [json.dumps(record) for record in (header, *prompts, *later)]
    (folder / "perf" / "events.jsonl").write_text("\n".join(lines) + '\n{"type": "requ')
    (folder / "input.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values: dict[str, Json] = {"metrics": ["exact"], "min_score": None, **params}
    inputs = {"perf": folder / "perf", "engine": folder / "engine"}
    return context(ScoreParams, values, inputs, {"input_data": folder / "input.jsonl"}, folder / "out", folder)


def result(work: StageContext[Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work.out / "accuracy.json").read_text())
    return found


MEASURED = (
    request("fr", "Rome", phase="warmup"),
    request("fr", "Paris"),
    request("bare", "Once"),
    request("it", "Milan"),
    request("fr", "Paris", 4),
    request("fr", "Lyon", 4),
    request("it", None, 4),
)


def test_the_measured_answers_are_scored(tmp_path: Path) -> None:
    this = work(tmp_path, *MEASURED)
    score.run(this)
    found = result(this)
    assert (found["total"], found["answers"], found["source"], found["greedy"]) == (2, 4, "perf", True)
    assert found["scores"] == {"exact": round((2 / 3 + 0) / 2, 6)}, "every question counts once"
    assert found["questions"] == {"exact": 2}
    assert found["levels"] == [
        {"concurrency": 1, "request_rate": None, "scores": {"exact": 0.5}},
        {"concurrency": 4, "request_rate": None, "scores": {"exact": 0.5}},
    ]
    assert found["not_scored"] == {"rows": 1, "failed_requests": 1, "not_asked": ["sum"]}
    low, high = found["intervals"]["exact"]
    assert low <= 1 / 3 <= high
    answers = [json.loads(line) for line in (this.out / "answers.jsonl").read_text().splitlines()]
    assert [(row["id"], row["answer"], row["concurrency"], row["time"]) for row in answers] == [
        ("fr", "Paris", 1, 0),
        ("it", "Milan", 1, 0),
        ("fr", "Paris", 4, 0),
        ("fr", "Lyon", 4, 1),
    ]
    assert answers[0]["tokens"] is None, "there is no tokenizer here"


def test_rows_and_functions_of_the_user(tmp_path: Path) -> None:
    this = work(tmp_path, request("sum", "it is 2"), request("fr", "PARIS"), metrics=["exact", "own_score:loud"])
    module = tmp_path / "own_score.py"
    module.write_text("def loud(answer, row):\n    return answer.isupper() and row['id'] == 'fr'\n")
    this = replace(this, files={**this.files, "metric_module": module})
    score.run(this)
    assert result(this)["scores"] == {"numeric": 1.0, "exact": 1.0, "own_score:loud": 1.0}
    assert "own function" in result(this)["definitions"]["own_score:loud"]


def test_the_order_of_rows_does_not_change_the_digest(tmp_path: Path) -> None:
    digests = []
    for number, rows in enumerate((ROWS, ROWS[::-1])):
        (tmp_path / str(number)).mkdir()
        this = work(tmp_path / str(number), *MEASURED, rows=rows)
        score.run(this)
        digests.append(result(this)["rows_digest"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("requests", "rows", "params", "message"),
    [
        (MEASURED, ({"id": "fr", "input": "France"},), {}, "none of the 1 rows can be scored; row 'fr': output"),
        (MEASURED, ROWS, {"min_score": 0.5}, "exact is 0.333 on 2 questions, expected at least 0.5"),
        (MEASURED, ROWS, {"metrics": ["chrf"], "min_score": 0.99}, "chrf is 0"),
        (MEASURED, ROWS, {"metrics": ["bleu"]}, "unknown metric 'bleu'"),
        (MEASURED[:1], ROWS, {}, "perf measured no answer to any of the 3 questions"),
        ((), ROWS, {}, "no request in this event file"),
        (MEASURED, ({"id": "fr", "input": "Germany", "output": "x"},), {}, "row 'fr': the load run sent 'France'"),
    ],
)
def test_it_fails_in_words(
    tmp_path: Path,
    requests: tuple[dict[str, Any], ...],
    rows: tuple[dict[str, Any], ...],
    params: dict[str, Json],
    message: str,
) -> None:
    with pytest.raises(StageError, match=message):
        score.run(work(tmp_path, *requests, rows=rows, **params))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    this = work(tmp_path)
    (tmp_path / "perf" / "events.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(StageError, match=r"events\.jsonl:1: not a record of a load run: it has no type"):
        score.run(this)
    (tmp_path / "perf" / "events.jsonl").write_text("x\n\n")
    with pytest.raises(StageError, match=r"events\.jsonl:1: not a record"):
        score.run(this)


def test_a_faulty_row_is_the_users_to_mend(tmp_path: Path) -> None:
    this = work(tmp_path, *MEASURED, rows=({"id": "fr", "input": "France", "metric": "bleu"},))
    assert worker.main([str(worker.write_job("score", "trtllm_pipeline.tensorrt.stage.score:run", this))]) == 1
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["failure"] == "user"
    assert "input.jsonl:1: metric: unknown metric 'bleu'" in failure["message"]
