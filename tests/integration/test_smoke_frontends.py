"""Smoke of what is not the five models: an OpenAI server, and TensorRT-LLM's `llmapi` model in Triton."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tritonclient.grpc import model_config_pb2

from tests.contexts import context
from tests.helpers.scripted_server import Respond, Script, running
from tests.standins import templates
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.tensorrt.stage import smoke
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import SmokeParams

pytestmark = pytest.mark.seam

ANSWER = " one two three four five six"
MAX_SEQ_LEN = 24
ASK: dict[str, Json] = {"prompt": "count", "max_tokens": 6, "expected": "three", "max_seq_len": MAX_SEQ_LEN}
MODEL = "tensorrt_llm"
Start = Callable[..., StageContext[Any]]


def behave(_model: str, values: Mapping[str, Any]) -> Script:
    """A server as it should be, whatever its inputs are called."""

    def given(*names: str) -> Any:
        return next((values[name] for name in names if name in values), None)

    if len(values["text_input"].split()) > MAX_SEQ_LEN:
        return Script((), error=f"the prompt is too long: {MAX_SEQ_LEN} tokens fit")
    stop = given("stop", "sampling_param_stop")
    stop = stop[0] if isinstance(stop, list) else stop
    assert given("max_tokens", "sampling_param_max_tokens") in {1, 6}
    assert given("temperature") == 0 or given("sampling_param_top_k") == 1, "greedy"
    return Script.of(ANSWER.partition(stop)[0] if stop else ANSWER, gap_s=0.001)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """The StageContext[Any] of a smoke test of a server of some kind, on weights that say no limit of their own."""
    weights, repository, out = (tmp_path / name for name in ("weights", "repository", "out"))
    for folder in (weights, repository / MODEL, out):
        folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator([ANSWER, "count word ?"], trainers.WordLevelTrainer(show_progress=False))
    tokenizer.save(str(weights / "tokenizer.json"))
    (weights / "config.json").write_text('{"model_type": "llama"}')
    written = (templates.install(tmp_path, "1.2.0") / "llmapi" / MODEL / "config.pbtxt").read_text()

    with ExitStack() as stack:

        def start(kind: str, respond: Respond = behave, **params: Any) -> StageContext[Any]:
            config = text_format.Parse(written, model_config_pb2.ModelConfig())
            config.model_transaction_policy.decoupled = True
            if kind == "triton":
                (repository / MODEL / "config.pbtxt").write_text(text_format.MessageToString(config))
            _server, service = stack.enter_context(running(respond, {MODEL: config}))
            service |= {"model": MODEL, "kind": kind}
            if kind == "openai":
                service |= {"url": f"http://{service['http']}", "grpc": ""}
            (tmp_path / "service.json").write_text(json.dumps(service))
            inputs = {"service": tmp_path / "service.json", "engine": weights, "repository": repository}
            return context(SmokeParams, {**ASK, **params}, inputs, {}, out, tmp_path)

        yield start


def checks(work: StageContext[Any]) -> list[tuple[str, str]]:
    said = json.loads((work.out / "smoke.json").read_text())
    assert all(check["ok"] for check in said["checks"]), said
    assert said["answer"] == ANSWER
    return [(check["name"], check["protocol"]) for check in said["checks"]]


def test_an_openai_server_is_asked_over_both_its_protocols(start: Start) -> None:
    work = start("openai")
    smoke.run(work)
    assert checks(work) == [
        ("health", "http"),
        ("answer", "openai_completions"),
        ("answer", "openai_completions_unary"),
        ("expected", "openai_completions"),
        ("stop_words", "openai_completions"),
        ("limits", "openai_completions_unary"),
        ("alive", "http"),
    ], "it has no configuration to compare"


def test_the_llmapi_model_is_asked_in_its_own_words(start: Start) -> None:
    work = start("triton")
    smoke.run(work)
    assert checks(work) == [
        ("health", "http, grpc"),
        ("configuration", "grpc"),
        ("answer", "grpc"),
        ("answer", "http"),
        ("answer", "http_unary"),
        ("expected", "grpc"),
        ("stop_words", "grpc"),
        ("limits", "grpc"),
        ("alive", "http, grpc"),
    ]


@pytest.mark.parametrize("kind", ["openai", "triton"])
def test_where_nobody_says_a_limit_none_is_tried(start: Start, kind: str) -> None:
    work = start(kind, max_seq_len=None)
    smoke.run(work)
    said = json.loads((work.out / "smoke.json").read_text())["checks"]
    assert [check["detail"] for check in said if check["name"] == "limits"] == [
        "not tested: the engine specifies no limit"
    ]


def unary_lie(model: str, values: Mapping[str, Any]) -> Script:
    return behave(model, values) if values.get("stream") else Script(((0.0, " one two three"),))


@pytest.mark.parametrize(
    ("respond", "words"),
    [
        (lambda _model, _values: Script(((0.0, "count one two three"),)), "starts with the prompt itself"),
        (lambda _model, _values: Script(((0.0, " one"),)), "over openai_completions: .* should contain 'three'"),
        (lambda _model, _values: Script.of(ANSWER), "stop_words failed .* should end the answer"),
        (unary_lie, "over openai_completions_unary: the greedy answer should be ' one two three four five six'"),
        (lambda _model, _values: Script((), error="boom"), "the request failed: boom"),
    ],
)
def test_an_openai_server_that_lies_is_found_out(start: Start, respond: Respond, words: str) -> None:
    with pytest.raises(StageError, match=words):
        smoke.run(start("openai", respond))


def test_a_server_that_took_a_prompt_beyond_its_limit_is_found_out(start: Start) -> None:
    def takes_all(model: str, values: Mapping[str, Any]) -> Script:
        return behave(model, {**values, "text_input": "count"})

    with pytest.raises(StageError, match=r"limits failed .* a prompt of 25 tokens should be rejected \(24 fit\)"):
        smoke.run(start("openai", takes_all))


def test_a_model_that_the_server_does_not_have_fails_it(start: Start) -> None:
    work = start("openai")
    path = work.inputs["service"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "another"}))
    with pytest.raises(StageError, match=r"has no model 'another'; it has tensorrt_llm"):
        smoke.run(work)
