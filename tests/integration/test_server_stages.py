"""Smoke, perf and accuracy against a server that answers as it should, and against one that lies in each way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import text_format
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.contexts import context
from tests.helpers.scripted_server import Respond, Script, config, running
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.measure.load.metrics import analyze
from trtllm_pipeline.measure.load.requests import read_run
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.stage import accuracy, perf, score, smoke
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import AccuracyParams, PerfParams, ScoreParams, SmokeParams, load

ANSWER = " one two three four five six seven eight"
MAX_INPUT_LEN = 24
BOTH = {"ensemble": config("ensemble"), "tensorrt_llm_bls": config("tensorrt_llm_bls", decoupled=False)}
COUNTING = {"ensemble": config("ensemble", counts=True)}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([ANSWER, " count word"] * 9, trainer)
    return tokenizer


def behave(_model: str, values: Mapping[str, Any]) -> Script:
    """A server as it should be: greedy, limited, obeying stop words."""
    if len(values["text_input"].split()) > MAX_INPUT_LEN:
        return Script((), error=f"the prompt exceeds the engine's max_input_len {MAX_INPUT_LEN}")
    stop = values.get("stop_words")
    text = ANSWER.partition(stop)[0] if stop else ANSWER
    return Script.of(" ".join(text.split(" ")[: values["max_tokens"] + 1]), gap_s=0.001)


Start = Callable[..., StageContext[Any]]


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Start]:
    """Starts a server that behaves as told, and gives the StageContext[Any] for a stage on it."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(
            respond: Respond = behave, files: Mapping[str, str] | None = None, *, counts: bool = False, **params: Json
        ) -> StageContext[Any]:
            models = COUNTING if counts else BOTH
            _server, service = stack.enter_context(running(respond, models))
            engine, repository, out = tmp_path / "engine", tmp_path / "repository", tmp_path / "out"
            for folder in (engine, out, *(repository / name for name in models)):
                folder.mkdir(parents=True)
            tokenizer.save(str(engine / "tokenizer.json"))
            limits = {"build_config": {"max_input_len": MAX_INPUT_LEN, "max_seq_len": 40}}
            (engine / "config.json").write_text(json.dumps(limits))
            for name, message in models.items():
                (repository / name / "config.pbtxt").write_text(text_format.MessageToString(message))
            (tmp_path / "service.json").write_text(json.dumps(service))
            paths = {}
            for name, text in (files or {}).items():
                paths[name] = tmp_path / name
                paths[name].write_text(text)
            inputs = {"service": tmp_path / "service.json", "engine": engine, "repository": repository}
            cls = SmokeParams if "prompt" in params else PerfParams if "requests" in params else AccuracyParams
            return context(cls, params, inputs, paths, out, tmp_path)

        yield start


def result(work: StageContext[Any], name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((work.out / name).read_text())
    return loaded


# ------------------------------------------------------------------------------------------------------------- smoke

SMOKE: dict[str, Json] = {"prompt": "count", "max_tokens": 6, "expected": "three"}


@pytest.mark.seam
def test_smoke_of_a_good_server(start: Start) -> None:
    work = start(**SMOKE)
    smoke.run(work)
    written = result(work, "smoke.json")
    assert written["answer"] == " one two three four five six"
    names = [(check["name"], check["model"], check["protocol"]) for check in written["checks"]]
    answers = [(model, protocol) for name, model, protocol in names if name == "answer"]
    assert answers == [
        *(("ensemble", protocol) for protocol in ("grpc", "http", "http_unary")),
        *(("tensorrt_llm_bls", protocol) for protocol in ("grpc", "grpc_unary", "http", "http_unary")),
    ]
    assert [skipped["protocol"] for skipped in written["skipped"]] == ["grpc_unary"]
    assert {name for name, _, _ in names} == {
        "health",
        "configuration",
        "answer",
        "expected",
        "stop_words",
        "limits",
        "alive",
    }
    assert all(check["ok"] for check in written["checks"])


def lie(**lies: Any) -> Respond:
    """A server that behaves but for one thing."""

    def respond(model: str, values: Mapping[str, Any]) -> Script:
        script = behave(model, {**values, **({"stop_words": None} if "ignore_stop" in lies else {})})
        if script.error is not None:
            return (
                Script(((0, "yes"),))
                if "ignore_limit" in lies
                else dataclasses.replace(script, **lies.get("refuse", {}))
            )
        if "text" in lies:
            return Script(((0, lies["text"]),))
        if "unary" in lies and not values.get("stream"):
            return Script(((0, lies["unary"]),))
        return script

    return respond


@pytest.mark.seam
@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (lie(text=" "), "answer failed on model ensemble over grpc: the answer to 'count' is empty"),
        (lie(text="count one two three"), "starts with the prompt itself"),
        (lie(text=" one two"), "should contain 'three', got ' one two'"),
        (lie(unary=" one two three"), "over http_unary: the greedy answer should be ' one two three four five six'"),
        (lie(ignore_stop=True), "stop_words failed on model ensemble over grpc: stop word ' two' should end"),
        (lie(ignore_limit=True), r"limits failed .* a prompt of \d+ tokens should be rejected \(24 fit\), got 'yes'"),
        (lie(refuse={"error": "no"}), "should name the limit 24: no"),
        (lambda _m, _v: Script((), error="boom"), "the request failed: boom"),
    ],
)
def test_smoke_catches_every_lie(start: Start, respond: Respond, message: str) -> None:
    work = start(respond, **SMOKE)
    with pytest.raises(StageError, match=message):
        smoke.run(work)
    assert not all(check["ok"] for check in result(work, "smoke.json")["checks"])


@pytest.mark.seam
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("max_batch_size: 64", "max_batch_size: 8"),
            "max_batch_size should be 8 as in config.pbtxt, the server reports 64",
        ),
        (("TYPE_UINT64", "TYPE_INT64"), "inputs should be"),
        (("text_output", "answer"), "outputs should be"),
        (
            ("decoupled: true", "decoupled: false"),
            "decoupled should be False as in config.pbtxt, the server reports True",
        ),
    ],
)
def test_smoke_compares_the_configuration(start: Start, change: tuple[str, str], message: str) -> None:
    work = start(**SMOKE)
    path = work.inputs["repository"] / "ensemble" / "config.pbtxt"
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(StageError, match=message):
        smoke.run(work)


# -------------------------------------------------------------------------------------------------------------- perf

PERF: dict[str, Json] = {
    "concurrency": [1, 3],
    "requests": 4,
    "warmup_requests": 2,
    "max_tokens": 8,
    "temperature": 0.0,
    "protocol": "grpc",
    "repeats": 2,
}
PROMPTS = "".join(json.dumps({"id": f"p{number}", "input": f"count {number}"}) + "\n" for number in range(16))


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_perf_of_a_good_server(start: Start, tokenizer: Tokenizer, protocol: str, counts: bool) -> None:
    work = start(files={"input_data": PROMPTS}, counts=counts, **{**PERF, "protocol": protocol})
    perf.run(work)
    written = result(work, "perf.json")
    assert written["valid"]
    assert written["token_count"] == {
        "source": "server" if counts else "encoded_again",
        "server": 224 if counts else None,
        "encoded_again": 224,
        "events": 224,
        "mismatch": 0.0 if counts else None,
    }
    assert [(level["concurrency"], level["requests"], level["failures"]) for level in written["levels"]] == [
        (1, 8, 0),
        (3, 20, 0),
    ]
    for level in written["levels"]:
        assert len(level["repeats"]) == 2
        assert (level["output_tokens_per_request"]["min"], level["output_tokens_per_request"]["max"]) == (8, 8)
        assert level["answers_at_limit"] == level["requests"]
        assert level["tokens_per_event"] >= 1, "a busy machine reads several at once"
        # Scripted: seven gaps of one millisecond; asyncio's timers are never early by more than their resolution.
        assert level["e2e_ms"]["min"] > 6.5
        assert level["ttft_ms"]["p50"] <= level["e2e_ms"]["p50"]
    events = work.out / "events.jsonl"
    assert json.loads(json.dumps(analyze(events, tokenizer).to_json())) == written
    records = [json.loads(line) for line in events.read_text().splitlines()]
    requests = [record for record in records if record["type"] == "request"]
    assert sum(record["phase"] == "warmup" for record in requests) == 2 * 2 * 2
    progress = json.loads((work.attempt / "progress.json").read_text())
    assert progress == {"done": len(requests), "total": len(requests), "unit": "requests"}


def test_perf_of_request_rates_against_objectives(start: Start) -> None:
    rates: dict[str, Json] = {"request_rate": [100.0, 50], "request_distribution": "constant", "requests": 10}
    asked = {**PERF, **rates, "slo": {"ttft_ms": 5000, "e2e_ms": 0.5}, "max_tokens": None}
    work = start(files={"input_data": PROMPTS}, **asked)
    perf.run(work)
    written = result(work, "perf.json")
    assert written["settings"]["max_tokens"] == 40 - MAX_INPUT_LEN, "as long as the engine was built for"
    levels = written["levels"]
    assert [(level["concurrency"], level["request_rate"]) for level in levels] == [
        (1, None),
        (3, None),
        (None, 100.0),
        (None, 50.0),
    ]
    for level in levels:
        assert level["goodput"]["objectives_ms"] == {"ttft": 5000, "e2e": 0.5}
        assert level["goodput"]["share"] == 0, "seven gaps of a millisecond each"
    records = [json.loads(line) for line in (work.out / "events.jsonl").read_text().splitlines()]
    for level in levels[2:]:
        assert level["schedule"]["achieved_rate"] > 0
        for repeat in range(2):
            place = ("measured", level["request_rate"], repeat)
            sent = (each for each in records if each["type"] == "request")
            scheduled = sorted(
                each["scheduled_ns"] for each in sent if (each["phase"], each["request_rate"], each["repeat"]) == place
            )
            steps = [after - before for before, after in pairwise(scheduled)]
            assert steps == pytest.approx([1e9 / level["request_rate"]] * 9, abs=1e3)


@pytest.mark.seam
def test_perf_by_hand_ends_with_what_it_measured(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = start(files={"input_data": PROMPTS}, **PERF)
    inputs = (word for name, path in work.inputs.items() for word in (f"--{name}", str(path)))
    words = ("--input-data", str(work.files["input_data"]), "--requests", "4", "--concurrency", "1")
    assert main(["stage", "perf", *inputs, *words, "--output-dir", str(tmp_path / "by hand")]) == 0
    told = capsys.readouterr()
    assert told.out == f"{tmp_path / 'by hand'}\n"
    table = told.err[told.err.index("ensemble over grpc; output tokens counted by encoded_again") :]
    assert "TTFT p50 ms" in table
    assert "rates use the window " in table


@pytest.mark.seam
@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (lambda _m, _v: Script((), error="boom"), "4 of 4 requests failed, 4 of them with: boom"),
        (lambda _m, _v: Script(((0, ""),)), "4 of 4 responses are empty"),
        (lambda _m, v: Script.of(v["text_input"] + ANSWER), "start with their prompt"),
        (lambda _m, _v: Script.of(ANSWER * 3), "exceed max_tokens"),
    ],
)
def test_perf_refuses_numbers_that_lie(start: Start, respond: Respond, message: str) -> None:
    work = start(respond, files={"input_data": PROMPTS}, **{**PERF, "concurrency": [1], "repeats": 1})
    with pytest.raises(StageError, match=message):
        perf.run(work)
    assert not result(work, "perf.json")["valid"]


def counting(*counts: int) -> Respond:
    """A good server but for its token counts, given for each of the eight responses with text; the first has none."""
    return lambda model, values: dataclasses.replace(behave(model, values), counts=(0, *counts))


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (
            counting(1, 1, 1, 1, 1, 1, 1, 2),
            "more tokens than max_tokens in 4 of 4 responses, such as for prompt 'p0' 9 of 8",
        ),
        (
            counting(2, 1, 1, 1, -1, 1, 1, 1),
            "4 of 4 requests failed, .* num_output_tokens in the server's response is -1, expected a number",
        ),
        (counting(0, 0, 0, 0, 0, 0, 0, 0), "4 of 4 responses have text but no tokens"),
        (counting(1, 0, 0, 0, 1, 0, 0, 0), "counts 8 output tokens, but encoding the texts again gives 32"),
    ],
)
def test_perf_refuses_counts_that_lie(start: Start, respond: Respond, message: str) -> None:
    work = start(respond, files={"input_data": PROMPTS}, counts=True, **{**PERF, "concurrency": [1], "repeats": 1})
    with pytest.raises(StageError, match=message):
        perf.run(work)


def test_perf_goes_by_counts_that_differ_from_encoding_again(start: Start) -> None:
    """A character held back, special tokens without text: the tokenizer cannot know, the server does."""
    work = start(counting(2, 1, 1, 1, 0, 0, 1, 1), files={"input_data": PROMPTS}, counts=True, **PERF)
    perf.run(work)
    written = result(work, "perf.json")
    assert written["token_count"]["mismatch"] == pytest.approx(1 / 7, abs=1e-6)
    assert {finding["severity"] for finding in written["findings"] if finding["check"] == "token_count"} == {"warning"}
    lengths = [level["output_tokens_per_request"] for level in written["levels"]]
    assert {(each["min"], each["max"]) for each in lengths} == {(7, 7)}
    levels = read_run(work.out / "events.jsonl", None).levels
    streamed = [[request.streamed for request in level.answered] for level in levels]
    assert [len(each) for each in streamed] == [8, 20]
    expected = [5 * sum(each) for each in streamed]
    assert [level["itl_ms"]["n"] for level in written["levels"]] == expected, (
        "five of each answer that did not come at once"
    )


@pytest.mark.seam
def test_perf_asks_only_what_the_engine_takes(start: Start) -> None:
    long = json.dumps({"id": "long", "input": "word " * 40}) + "\n"
    work = start(files={"input_data": PROMPTS + long}, **PERF)
    with pytest.raises(
        StageError, match=r"1 prompts do not fit the engine; the longest, 'long', has .* max_input_len is 24"
    ) as caught:
        perf.run(work)
    assert caught.value.failure is FailureClass.INFEASIBLE
    assert not (work.out / "events.jsonl").exists()


def test_perf_asks_only_what_a_server_of_weights_was_told_to_take(start: Start) -> None:
    long = json.dumps({"id": "long", "input": "word " * 40}) + "\n"
    work = start(files={"input_data": PROMPTS + long}, **PERF, declared={"max_seq_len": 40})
    (work.inputs["engine"] / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StageError, match=r"1 prompts do not fit the engine; the longest, 'long', has .* is 40"):
        perf.run(work)
    assert not (work.out / "events.jsonl").exists()


def test_perf_wants_an_engine_with_a_tokenizer(start: Start) -> None:
    work = start(files={"input_data": PROMPTS}, **PERF)
    (work.inputs["engine"] / "tokenizer.json").unlink()
    with pytest.raises(StageError, match=r"tokenizer\.json: it is missing") as caught:
        perf.run(work)
    assert caught.value.failure is FailureClass.USER


@pytest.mark.parametrize("stage", [smoke, perf, accuracy])
@pytest.mark.parametrize(
    ("cause", "failure"),
    [("Stub process 'tensorrt_llm_0_0' is not healthy.", FailureClass.TRANSIENT), ("boom", FailureClass.BUG)],
)
def test_a_model_process_that_died_is_worth_another_try(
    start: Start, stage: ModuleType, cause: str, failure: FailureClass
) -> None:
    data = ROWS if stage is accuracy else PROMPTS
    params = {smoke: SMOKE, perf: PERF, accuracy: ACCURACY}[stage]
    work = start(lambda _m, _v: Script((), error=cause), files={"input_data": data}, **params)
    with pytest.raises(StageError, match=cause) as caught:
        stage.run(work)
    assert caught.value.failure is failure


# ---------------------------------------------------------------------------------------------------------- accuracy

ROWS = """{"id": "a", "input": "count", "output": "three"}
{"id": "b", "input": "count b", "output": ["nine", "One two three four five six."]}
{"id": "c", "input": "count c", "output": "twelve"}
{"id": "d", "input": "count d", "output": "one", "max_tokens": 1}
{"id": "e", "input": "count e", "output": "one two", "stop_words": " three"}
"""
ACCURACY: dict[str, Json] = {"max_tokens": 6, "metrics": ["contains", "exact"], "concurrency": 3, "min_score": 0.7}


@pytest.mark.seam
def test_accuracy(start: Start) -> None:
    work = start(files={"input_data": ROWS}, **ACCURACY)
    accuracy.run(work)
    written = result(work, "accuracy.json")
    assert (written["total"], written["scores"]) == (5, {"contains": 0.8, "exact": 0.6})
    rows = [json.loads(line) for line in (work.out / "answers.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c", "d", "e"]
    assert rows[3]["answer"] == " one"
    assert [row["scores"]["contains"] for row in rows] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("params", "rows", "respond", "message"),
    [
        ({"min_score": 0.9}, ROWS, behave, "contains is 0.800 on 5 questions, expected at least 0.9"),
        ({"metrics": ["bleu"]}, ROWS, behave, "unknown metric 'bleu'"),
        (
            {},
            ROWS + '{"input": "x"}',
            behave,
            "1 row cannot be scored: row '6': output: the row has no reference",
        ),
        ({}, ROWS, lambda _m, _v: Script((), error="boom"), "5 of 5 requests failed.*'a', with: boom"),
    ],
)
def test_accuracy_fails_in_words(
    start: Start, params: dict[str, Json], rows: str, respond: Respond, message: str
) -> None:
    work = start(respond, files={"input_data": rows}, **{**ACCURACY, **params})
    with pytest.raises(StageError, match=message):
        accuracy.run(work)


def test_answers_outlive_a_request_that_failed(start: Start) -> None:
    def respond(model: str, values: Mapping[str, Any]) -> Script:
        return Script((), error="boom") if values["text_input"] == "count c" else behave(model, values)

    work = start(respond, files={"input_data": ROWS}, **ACCURACY)
    with pytest.raises(StageError, match=r"1 of 5 requests failed.*'c', with: boom"):
        accuracy.run(work)
    rows = [json.loads(line) for line in (work.out / "answers.jsonl").read_text().splitlines()]
    assert [(row["id"], row["scores"]) for row in rows] == [("a", {}), ("b", {}), ("d", {}), ("e", {})]
    assert rows[2]["answer"] == " one"


@pytest.mark.seam
def test_the_answers_that_perf_timed_are_scored(start: Start) -> None:
    rows = "".join(f'{{"id": "{n}", "input": "count {n}", "output": "{w}"}}\n' for n, w in enumerate(("one", "x") * 4))
    work = start(
        files={"input_data": rows}, concurrency=[1, 2], requests=6, warmup_requests=2, max_tokens=4, protocol="grpc"
    )
    perf.run(work)
    scores = work.attempt / "scores"
    scores.mkdir()
    params: dict[str, Json] = {"metrics": ["contains"], "min_score": None}
    inputs = {"perf": work.out, "engine": work.inputs["engine"]}
    score.run(dataclasses.replace(work, params=load(ScoreParams, params), inputs=inputs, out=scores))
    found = json.loads((scores / "accuracy.json").read_text())
    assert found["answers"] == sum(level["requests"] for level in result(work, "perf.json")["levels"])
    assert found["not_scored"] == {"rows": 0, "failed_requests": 0, "not_asked": ["6", "7"]}, "six requests"
    assert found["scores"] == {"contains": round(3 / 6, 6)}
    assert [level["concurrency"] for level in found["levels"]] == [1, 2]
    first = json.loads((scores / "answers.jsonl").read_text().splitlines()[0])
    assert first["answer"] == " one two three four"
    assert len(first["tokens"]) > 0
