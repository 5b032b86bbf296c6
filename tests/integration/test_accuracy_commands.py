"""`pipeline eval`: answers of a server, two sets of them compared, and standard tasks by a program that takes lm_eval's flags and no others."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.answering import answering
from tests.helpers.scripted_server import Script, config, running
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.load.target import OPENAI
from trtllm_pipeline.measure.score import drift
from trtllm_pipeline.measure.score.lm_eval import SHIPPED_TASKS
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.stage.server_requests import protocol_for

pytestmark = pytest.mark.seam

STANDINS = Path(__file__).parents[1] / "standins"
ROWS = """{"id": "fr", "input": "The capital of France is", "output": "Paris"}
{"id": "it", "input": "The capital of Italy is", "output": "B", "metric": "choice", "choices": ["Paris", "Rome"]}
{"id": "chat", "messages": [{"role": "user", "content": "The capital of France?"}], "output": "Paris"}
"""


def answer_to(text: str) -> str:
    """Raises ValueError when it is to refuse."""
    if "Atlantis" in text:
        raise ValueError("there is no such place")
    return " Paris" if "France" in text else " Rome"


def as_openai(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    try:
        text = answer_to(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])
    except ValueError as error:
        return 200, {"error": {"message": str(error)}}
    said = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
    return 200, {"choices": [{"index": 0, **said, "finish_reason": "stop"}]}


@pytest.fixture
def openai() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with answering(as_openai) as server:
        yield server


@pytest.fixture
def rows(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return str(tmp_path / "rows.jsonl")


def ask(url: str, rows: str, *words: str) -> int:
    """`pipeline eval answers` of the model m; its exit code."""
    return main(["eval", "answers", "-u", url, "--protocol", "openai", "--model", "m", "--input-data", rows, *words])


@pytest.mark.parametrize("key", [None, "secret"])
def test_an_openai_server(
    openai: Any,
    rows: str,
    key: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, asked = openai
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    words = ("--endpoint-type", "chat", "--format", "json", "--output-dir", str(tmp_path / "out"), "--max-tokens", "7")
    assert ask(url, rows, *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scores"] == {"exact": 1.0, "contains": 1.0, "choice": 1.0}
    assert found["questions"] == {"exact": 2, "contains": 2, "choice": 1}
    assert found["intervals"]["exact"] == [pytest.approx(0.025**0.5, abs=1e-4), 1.0]
    assert json.loads((tmp_path / "out" / "accuracy.json").read_text()) == found
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in answers] == [" Paris", " Rome", " Paris"]
    assert {request["path"] for request in asked} == {"/v1/chat/completions"}
    assert found["asked"] == "/v1/chat/completions, with the server's chat template"
    assert {(request["temperature"], request["max_tokens"]) for request in asked} == {(0, 7)}
    assert {request["key"] for request in asked} == {None if key is None else "Bearer secret"}


def test_an_openai_server_is_asked_as_in_a_run(openai: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text of a question is the prompt: a chat template around it can change every score."""
    url, asked = openai
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "The capital of France is", "output": "Paris"}\n')
    assert ask(url, str(path)) == 0
    assert "asked at /v1/completions, without a chat template" in capsys.readouterr().out
    of_run = protocol_for(Service(url, "", None, None, "m", None, "openai"))
    assert [request["path"] for request in asked] == [f"/v1/{OPENAI[of_run][0]}"]


@pytest.mark.parametrize("interface", ["grpc", "http"])
def test_a_triton_server_and_a_least_score(interface: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(ROWS.splitlines(keepends=True)[:1]) + '{"input": "Nothing", "output": "x"}\n')
    respond = lambda _model, values: Script.of(answer_to(values["text_input"]), gap_s=0.0)  # noqa: E731
    with running(respond, {"ensemble": config("ensemble")}) as (_server, service):
        words = ["eval", "answers", f"--url=http://{service[interface]}", "-i", interface, "--model", "ensemble"]
        words += ["--input-data", str(path)]
        assert main([*words, "--format", "csv"]) == 0
        (row,) = [row for row in csv.DictReader(io.StringIO(capsys.readouterr().out)) if row["metric"] == "exact"]
        assert (row["score"], row["questions"]) == ("0.5", "2")
        assert main([*words, "--metrics", "exact", "--min-score", "0.6"]) == 1
        said = capsys.readouterr()
        assert said.out.splitlines()[1].split() == ["exact", "0.500", "0.000", "1.000", "2"]
        assert "exact is 0.500 on 2 questions, expected at least 0.6" in said.err
        assert "try: keep the answers with --output-dir DIR; --min-score sets the limit" in said.err
        kept = tmp_path / "kept"
        assert main([*words, "--metrics", "exact", "--min-score", "0.6", "--output-dir", str(kept)]) == 1
        assert f"try: see the answers in {kept}/answers.jsonl; --min-score sets the limit" in capsys.readouterr().err
        assert (kept / "answers.jsonl").is_file()


def test_mistakes_are_told(openai: Any, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = openai

    def said(*more: str) -> str:
        assert ask(url, rows, "--endpoint-type", "chat", *more) in {1, 2}
        return capsys.readouterr().err

    assert "the model has no chat template; use `input`" in said("--endpoint-type", "completions")
    assert "has no model 'x'; it has m" in said("--model", "x")
    assert "unknown metric 'bleu'" in said("--metrics", "bleu")
    assert "rows.jsonl: 2 rows cannot be scored; the first: row 'fr': pattern" in said("--metrics", "regex")
    openai[1].clear()
    told = said("--tokenizer", str(tmp_path / "nowhere"))
    assert f"--tokenizer {tmp_path / 'nowhere'}" in told
    assert "it is missing" in told
    assert not openai[1], "nothing was asked before"
    for option, value in (("--min-score", "nan"), ("--min-score", "2"), ("--request-timeout-s", "-1")):
        assert ask(url, rows, option, value) == 2
    assert "not an empty directory" in said("--output-dir", str(tmp_path))


@pytest.mark.parametrize(
    ("more", "metrics", "words", "kept"),
    [
        ("", "own_metric:broken", "own_metric:broken, row 'fr': ZeroDivisionError", ["fr", "it"]),
        ('{"id": "lost", "input": "Atlantis", "output": "x"}', "exact", "1 of 3 requests failed", ["fr", "it"]),
    ],
)
def test_answers_outlive_what_fails_after_them(
    openai: Any,
    more: str,
    metrics: str,
    words: str,
    kept: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_metric.py").write_text("def broken(answer, row):\n    return 1 / 0\n")
    rows = ('{"id": "fr", "input": "France", "output": "Paris"}', '{"id": "it", "input": "Italy", "output": "Rome"}')
    Path("rows.jsonl").write_text("\n".join((*rows, more)))
    assert ask(openai[0], "rows.jsonl", "--metrics", metrics, "--output-dir", "out") in {1, 2}
    assert words in capsys.readouterr().err
    answers = drift.read(Path("out"))
    assert [(row["id"], row["answer"], row["scores"]) for row in answers] == [
        (id_, {"fr": " Paris", "it": " Rome"}[id_], {}) for id_ in kept
    ]
    assert not Path("out", "accuracy.json").exists()


def test_answers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, answers in {"a": ["Paris", "Rome"], "b": ["Paris", "Roma"]}.items():
        rows = [
            {"id": str(n), "input": "?", "answer": text, "tokens": [7, n], "scores": {"exact": float(text != "Roma")}}
            for n, text in enumerate(answers)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "drift", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main([*words, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["agreement"], found["scores"]["exact"]["difference"]) == (0.5, -0.5)
    assert found["first_divergence"]["chars"]["p50"] == 3
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("agreement  0.500 (0.000 to 1.000) of 2 answers")
    assert lines[1] == "parts at   chars: median 3, from 3 to 3"
    assert lines[4].split()[:4] == ["exact", "1.000", "0.500", "-0.500"]
    assert main(["eval", "drift", str(tmp_path / "a.jsonl"), str(tmp_path / "none")]) == 2


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for lm_eval on PATH."""
    program = tmp_path / "bin" / "lm_eval"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{(STANDINS / 'lm_eval.py').read_text(encoding='utf-8')}")
    program.chmod(0o755)
    monkeypatch.delenv("LM_EVAL_PYTHON", raising=False)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def evaluate(url: str, *words: str) -> int:
    return main(["eval", "lm-eval", "-u", url, "--model", "m", *words])


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_standard_tasks(openai: Any, endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url, asked = openai
    (tmp_path / "tasks").mkdir()
    more = ("--num-fewshot", "5", "--include-path", str(tmp_path / "tasks"), "--tokenizer", "none")
    out, given = tmp_path / "out", ("--tasks", "a,b:1", "--endpoint-type", endpoint)
    assert evaluate(url, *given, *more, "--output-dir", str(out), "--format", "json") == 0
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert "a table for people" in said.err
    assert "Requesting API" not in said.err
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
    assert [request["path"] for request in asked] == [path] * 3
    assert found["scores"] == {
        f"{task}.{name}": value
        for task, exact in (("a", 0.5), ("b", 1.0))
        for name, value in (("exact_match", exact), ("f1.strict_match", 0.5), ("ppl", 7.5))
    }
    assert found["intervals"]["a.exact_match"] == pytest.approx([0.304, 0.696], abs=1e-3)
    assert found["intervals"]["b.exact_match"] == pytest.approx([0.025, 1], abs=1e-3), "all questions scored alike"
    assert found["intervals"]["a.ppl"] is None
    assert found["questions"]["b.exact_match"] == 1
    assert found["asked"] == f"{path}, by lm-evaluation-harness 0.4.13"
    about = found["tasks"]["a"]
    assert (about["version"], about["num_fewshot"], about["questions"]) == (2.0, 5, 2)
    assert about["standard_errors"] == {"a.exact_match": 0.1, "a.f1.strict_match": 0.1, "a.ppl": None}
    assert json.loads((out / "accuracy.json").read_text()) == found
    answers = drift.read(out)
    assert [(row["id"], row["answer"], row["scores"]) for row in answers] == [
        ("a/0", " Paris", {"a.exact_match": 1.0}),
        ("a/1", " Rome", {"a.exact_match": 0.0}),
        ("b/0", " Paris", {"b.exact_match": 1.0}),
    ]


@pytest.mark.usefixtures("lm_eval")
def test_what_goes_wrong_with_standard_tasks(openai: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert evaluate(openai[0], *words) in {1, 2}
        return capfd.readouterr().err

    missing = said("--tasks", "missing")
    assert "Tasks not found: missing" in missing
    assert "lm_eval ended with exit code 1 for missing" in missing
    assert "'a:' is not a task: write NAME, or NAME:LIMIT" in said("--tasks", "a:")
    assert "task a is given twice" in said("--tasks", "a,a:3")
    assert "is not a directory with tasks" in said("--tasks", "a", "--include-path", "nowhere")
    assert main(["eval", "lm-eval", "-u", openai[0], "--model", "a,b", "--tasks", "a"]) == 2
    assert "lm_eval does not accept commas" in capfd.readouterr().err


def test_lm_eval_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LM_EVAL_PYTHON", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert evaluate("localhost:1", "--tasks", "a") == 2
    assert "pip install 'trtllm-pipeline[lm-eval]'" in capsys.readouterr().err
    monkeypatch.setenv("LM_EVAL_PYTHON", "/nowhere/bin/python")
    assert evaluate("localhost:1", "--tasks", "a") == 2
    assert "LM_EVAL_PYTHON=/nowhere/bin/python has no lm_eval" in capsys.readouterr().err
    assert evaluate("localhost:1", "--tasks", "a,pipeline_arithmetic:5", "--dry-run", "--tokenizer", "org/name") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "lm_eval --model local-completions --model_args model=m,base_url=http://localhost:1/v1/completions,"
        "num_concurrent=4,tokenized_requests=False,tokenizer=org/name,tokenizer_backend=huggingface "
        "--tasks a --output_path DIR/a --log_samples"
    )
    assert second.endswith(f"--limit 5 --include_path {SHIPPED_TASKS}")
