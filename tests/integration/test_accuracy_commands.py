"""`pipeline eval`: answers of a server, two sets of them compared, and standard tasks by a program that takes lm_eval's flags and no others."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.helpers.scripted_server import Script, config, running
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.load.target import OPENAI
from trtllm_pipeline.measure.score import drift
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.stage.server_requests import protocol_for

pytestmark = pytest.mark.seam

ROWS = """{"id": "fr", "input": "The capital of France is", "output": "Paris"}
{"id": "it", "input": "The capital of Italy is", "output": "B", "metric": "choice", "choices": ["Paris", "Rome"]}
{"id": "chat", "messages": [{"role": "user", "content": "The capital of France?"}], "output": "Paris"}
"""


def answer_to(text: str) -> str:
    """Raises ValueError when it is to refuse."""
    if "Atlantis" in text:
        raise ValueError("there is no such place")
    return " Paris" if "France" in text else " Rome"


class OpenAi(BaseHTTPRequestHandler):
    """A server of the model `m`."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._say({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({"path": self.path, "key": self.headers["authorization"], **body})
        try:
            text = answer_to(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])
        except ValueError as error:
            self._say({"error": {"message": str(error)}})
            return
        said = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
        self._say({"choices": [{"index": 0, **said, "finish_reason": "stop"}]})

    def _say(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def openai() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (OpenAi,), {"asked": asked}))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def rows(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text(ROWS)
    return str(tmp_path / "rows.jsonl")


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
    words = [
        "eval",
        "answers",
        "-u",
        url,
        "--protocol",
        "openai",
        "--model",
        "m",
        "--endpoint-type",
        "chat",
        "--input-data",
        rows,
    ]
    assert main([*words, "--format", "json", "--output-dir", str(tmp_path / "out"), "--max-tokens", "7"]) == 0
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
    words = ["eval", "answers", "-u", url, "--protocol", "openai", "--model", "m", "--input-data", str(path)]
    assert main(words) == 0
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


def test_mistakes_are_told(openai: Any, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = openai
    words = ["eval", "answers", "-u", url, "--protocol", "openai", "--input-data", rows]

    def said(*more: str) -> str:
        assert main([*words, *more]) in {1, 2}
        return capsys.readouterr().err

    assert "the model has no chat template; use `input`" in said("--model", "m", "--endpoint-type", "completions")
    assert "has no model 'x'; it has m" in said("--model", "x", "--endpoint-type", "chat")
    assert "unknown metric 'bleu'" in said("--model", "m", "--metrics", "bleu")
    assert "rows.jsonl: 2 rows cannot be scored; the first: row 'fr': pattern" in said(
        "--model", "m", "--endpoint-type", "chat", "--metrics", "regex"
    )
    openai[1].clear()
    told = said("--model", "m", "--endpoint-type", "chat", "--tokenizer", str(tmp_path / "nowhere"))
    assert f"--tokenizer {tmp_path / 'nowhere'}" in told
    assert "it is missing" in told
    assert not openai[1], "nothing was asked before"
    for option, value in (("--min-score", "nan"), ("--min-score", "2"), ("--request-timeout-s", "-1")):
        assert main([*words, "--model", "m", option, value]) == 2
    assert "not an empty directory" in said("--model", "m", "--endpoint-type", "chat", "--output-dir", str(tmp_path))


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
    argv = [
        "eval",
        "answers",
        "-u",
        openai[0],
        "-i",
        "openai",
        "--model",
        "m",
        "--input-data",
        "rows.jsonl",
        "--metrics",
        metrics,
    ]
    assert main([*argv, "--output-dir", "out"]) in {1, 2}
    assert words in capsys.readouterr().err
    answers = drift.read(Path("out"))
    assert [(row["id"], row["answer"], row["scores"]) for row in answers] == [
        (id_, {"fr": " Paris", "it": " Rome"}[id_], {}) for id_ in kept
    ]
    assert not Path("out", "accuracy.json").exists()


def test_answers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, answers in {"a": ["Paris", "Rome"], "b": ["Paris", "Roma"]}.items():
        lines = [
            json.dumps(
                {
                    "id": str(n),
                    "input": "?",
                    "answer": text,
                    "tokens": [7, n],
                    "scores": {"exact": float(text != "Roma")},
                }
            )
            for n, text in enumerate(answers)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
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


STAND_IN = """#!{python}
import argparse, json, pathlib, sys, urllib.request
parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("--model", "--model_args", "--tasks", "--output_path"):
    parser.add_argument(flag, required=True)
for flag in ("--num_fewshot", "--limit", "--include_path"):
    parser.add_argument(flag)
parser.add_argument("--apply_chat_template", action="store_true")
args = parser.parse_args()
model = dict(pair.split("=") for pair in args.model_args.split(","))
assert set(model) <= {{"model", "base_url", "num_concurrent", "tokenized_requests", "tokenizer", "tokenizer_backend"}}
chat = args.model == "local-chat-completions"
assert chat == args.apply_chat_template and (chat or args.model == "local-completions")
asked = {{"messages": [{{"role": "user", "content": "France"}}]}} if chat else {{"prompt": "France"}}
body = json.dumps({{"model": model["model"], "max_tokens": 4, **asked}}).encode()
reply = json.load(urllib.request.urlopen(urllib.request.Request(model["base_url"], body)))["choices"][0]
said = reply["message"]["content"] if chat else reply["text"]
tasks = args.tasks.split(",")
if "missing" in tasks:
    print("Tasks not found: missing", file=sys.stderr)
    sys.exit(1)
print("a table for people")
directory = pathlib.Path(args.output_path) / model["model"]
directory.mkdir(parents=True)
score = float(said == " Paris")
(directory / "results_2026-01-02T03-04-05.678901.json").write_text(json.dumps({{
    "results": {{task: {{"name": task, "alias": task, "sample_len": 9, "exact_match,none": score,
                        "exact_match_stderr,none": 0.0, "f1,strict": 0.5, "f1_stderr,strict": 0.1,
                        "ppl,none": 7.5, "ppl_stderr,none": "N/A"}} for task in tasks}},
    "versions": {{task: 2.0 for task in tasks}}, "n-shot": {{task: int(args.num_fewshot or 0) for task in tasks}},
    "higher_is_better": {{task: {{"exact_match": True}} for task in tasks}},
    "n-samples": {{task: {{"original": 50, "effective": int(args.limit or 50)}} for task in tasks}},
    "lm_eval_version": "0.4.13",
}}))
"""


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for lm_eval on PATH: it takes the flags and model arguments of 0.4 that are used here, and no others."""
    program = tmp_path / "bin" / "lm_eval"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def evaluate(url: str, *words: str) -> int:
    return main(["eval", "lm-eval", "-u", url, "--model", "m", *words])


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_standard_tasks(openai: Any, endpoint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url, asked = openai
    more = ("--num-fewshot", "5", "--limit", "20", "--include-path", "tasks", "--tokenizer", "none")
    out = tmp_path / "out"
    assert (
        evaluate(
            url, "--tasks", "a,b", "--endpoint-type", endpoint, *more, "--output-dir", str(out), "--format", "json"
        )
        == 0
    )
    said = capfd.readouterr()
    found = json.loads(said.out)
    assert "a table for people" in said.err
    assert asked[0]["path"] == ("/v1/completions" if endpoint == "completions" else "/v1/chat/completions")
    assert found["scores"] == {
        f"{task}/{name}": value
        for task in "ab"
        for name, value in (("exact_match", 1), ("f1,strict", 0.5), ("ppl", 7.5))
    }
    assert found["intervals"]["a/f1,strict"] == pytest.approx([0.304, 0.696], abs=1e-3)
    assert found["intervals"]["a/exact_match"] == pytest.approx([0.8316, 1], abs=1e-3), (
        "a standard error of 0 says nothing"
    )
    assert found["intervals"]["a/ppl"] is None
    assert found["tasks"]["b"] == {
        "version": 2.0,
        "num_fewshot": 5,
        "questions": 20,
        "higher_is_better": {"exact_match": True},
    }
    assert json.loads((out / "accuracy.json").read_text()) == found


@pytest.mark.usefixtures("lm_eval")
def test_standard_tasks_as_a_table(openai: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(openai[0], "--tasks", "a") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].split() == ["a/exact_match", "1.000", "0.929", "1.000", "50"]
    assert lines[3].split() == ["a/ppl", "7.500", "50"]


@pytest.mark.usefixtures("lm_eval")
def test_what_goes_wrong_with_standard_tasks(openai: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluate(openai[0], "--tasks", "missing") == 1
    said = capfd.readouterr().err
    assert "Tasks not found: missing" in said
    assert "lm_eval ended with exit code 1" in said
    assert main(["eval", "lm-eval", "-u", openai[0], "--model", "a,b", "--tasks", "a"]) == 2
    assert "lm_eval takes no comma" in capfd.readouterr().err


def test_lm_eval_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert evaluate("localhost:1", "--tasks", "a") == 2
    assert "pip install 'trtllm-pipeline[lm-eval]'" in capsys.readouterr().err
    assert evaluate("localhost:1", "--tasks", "a", "--dry-run", "--tokenizer", "org/name") == 0
    assert capsys.readouterr().out.strip() == (
        "lm_eval --model local-completions --model_args model=m,base_url=http://localhost:1/v1/completions,"
        "num_concurrent=4,tokenized_requests=False,tokenizer=org/name --tasks a --output_path DIR"
    )
