"""The perf stage against a server that lies in each of the ways the validity gate knows, and against an honest one."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.contexts import context
from tests.helpers.scripted_server import Respond, Script, ScriptedServer, config, running
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.measure.load import validity
from trtllm_pipeline.measure.load.metrics import analyze
from trtllm_pipeline.tensorrt.stage import perf
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import PerfParams

ANSWER = " one two three four five six seven eight"
PROMPTS = "".join(json.dumps({"id": f"p{number}", "input": f"count {number}"}) + "\n" for number in range(16))
DECLARED: dict[str, Json] = {
    "tp": 1,
    "max_batch_size": 64,
    "max_input_len": 64,
    "max_seq_len": 96,
    "decoupled": True,
    "accumulate_tokens": False,
    "exclude_input_in_output": True,
    "enable_kv_cache_reuse": False,
}
ENGINE: dict[str, Any] = {
    "build_config": {"max_batch_size": 64, "max_input_len": 64, "max_seq_len": 96},
    "geometry": {"tie_word_embeddings": True},
    "weights_bytes": 1_000_000,
}
PARAMS: dict[str, Json] = {
    "concurrency": [2],
    "requests": 4,
    "warmup_requests": 2,
    "max_tokens": 8,
    "temperature": 0.0,
    "protocol": "grpc",
    "repeats": 1,
    "declared": DECLARED,
}


def honest(_model: str, values: Mapping[str, Any]) -> Script:
    return Script.of(" ".join(ANSWER.split(" ")[: values["max_tokens"] + 1]), first_s=0.004, gap_s=0.001)


def engine_model(**parameters: str) -> Any:
    message = config("tensorrt_llm")
    for key, value in {"exclude_input_in_output": "true", "enable_kv_cache_reuse": "false", **parameters}.items():
        message.parameters[key].string_value = value
    return message


def served(**parameters: str) -> dict[str, Any]:
    return {"ensemble": config("ensemble", counts=True), "tensorrt_llm": engine_model(**parameters)}


class Process:
    """A process that stands for the server, which in these tests is a thread of this one."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()

    def die(self) -> None:
        os.kill(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@dataclasses.dataclass
class Stand:
    """Everything a lie can be about."""

    respond: Respond = honest
    models: dict[str, Any] = dataclasses.field(default_factory=served)
    repository: dict[str, Any] = dataclasses.field(default_factory=served)
    engine: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(ENGINE))
    server: ScriptedServer | None = None
    process: Process | None = None


Start = Callable[[Stand], StageContext[Any]]


@pytest.fixture(autouse=True)
def a_client_with_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on the machine that runs the tests is not their business; unit tests try these two gates."""
    monkeypatch.setattr(validity, "MARKED_LAG_MS", math.inf)
    monkeypatch.setattr(validity, "MAX_CLIENT_CPU", math.inf)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the server of a stand, and gives the StageContext[Any] for the perf stage on it."""
    with ExitStack() as stack:

        def start(stand: Stand) -> StageContext[Any]:
            stand.process = Process()
            stack.callback(stand.process.end)
            stand.server, service = stack.enter_context(running(stand.respond, stand.models))
            engine, repository, out = tmp_path / "engine", tmp_path / "repository", tmp_path / "out"
            for folder in (engine, out, *(repository / name for name in stand.repository)):
                folder.mkdir(parents=True)
            for name, message in stand.repository.items():
                (repository / name / "config.pbtxt").write_text(text_format.MessageToString(message))
            tokenizer().save(str(engine / "tokenizer.json"))
            (engine / "config.json").write_text(json.dumps(stand.engine))
            (tmp_path / "service.json").write_text(json.dumps({**service, "pid": stand.process.popen.pid}))
            (tmp_path / "prompts.jsonl").write_text(PROMPTS)
            inputs = {"service": tmp_path / "service.json", "engine": engine, "repository": repository}
            return context(PerfParams, PARAMS, inputs, {"input_data": tmp_path / "prompts.jsonl"}, out, tmp_path)

        yield start


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [ANSWER, " count word"] * 9,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def told(work: StageContext[Any], severity: str) -> set[str]:
    findings = json.loads((work.out / "perf.json").read_text())["findings"]
    return {finding["check"] for finding in findings if finding["severity"] == severity}


@pytest.mark.seam
def test_nothing_is_found_on_an_honest_server(start: Start) -> None:
    work = start(Stand())
    perf.run(work)
    assert told(work, "invalid") == set()
    # On a busy machine, all parts of an answer may be read at once, or late. `test_gates_both_ways` tries these gates.
    warnings = told(work, "warning") - {"one_response", "pause"}
    assert warnings == {"far_lengths"}, "prompts of three words on an engine for 64 tokens"
    records = [json.loads(line) for line in (work.out / "events.jsonl").read_text().splitlines()]
    kinds = [record["type"] for record in records]
    assert kinds.count("probe") in range(2, 16, 2), "a prompt that takes as long again ends it"
    assert kinds.count("settings") == kinds.count("roofline") == 2
    looked_at = {check["setting"] for record in records if record["type"] == "settings" for check in record["checks"]}
    assert {
        "max_input_len",
        "tensorrt_llm: max_batch_size",
        "tensorrt_llm: enable_kv_cache_reuse",
        "tensorrt_llm: parameters[enable_kv_cache_reuse].string_value",
        "ensemble: model_transaction_policy.decoupled",
    } <= looked_at
    assert all(record["pass_s"] > 0 for record in records if record["type"] == "roofline")


def failing(stand: Stand) -> None:
    stand.respond = lambda _model, _values: Script((), error="boom")


def restarting(stand: Stand) -> None:
    def respond(model: str, values: Mapping[str, Any]) -> Script:
        assert stand.process is not None
        if stand.process.popen.returncode is None:
            stand.process.die()
        return honest(model, values)

    stand.respond = respond


def giving_up(stand: Stand) -> None:
    def respond(model: str, values: Mapping[str, Any]) -> Script:
        assert stand.server is not None
        stand.server.ready = False
        return honest(model, values)

    stand.respond = respond


def too_fast(stand: Stand) -> None:
    stand.engine["weights_bytes"] = 100_000_000_000


def other_engine(stand: Stand) -> None:
    stand.engine["build_config"] = {**ENGINE["build_config"], "max_seq_len": 64}


def other_than_the_matrix(stand: Stand) -> None:
    stand.models = stand.repository = served(exclude_input_in_output="false")


def other_than_the_repository(stand: Stand) -> None:
    stand.models["ensemble"].max_batch_size = 8


def without_a_model(stand: Stand) -> None:
    del stand.models["tensorrt_llm"]


def remembering(stand: Stand) -> None:
    seen: set[str] = set()

    def respond(model: str, values: Mapping[str, Any]) -> Script:
        # More than a busy machine adds to a prompt that is sent again.
        first_s = 0.004 if values["text_input"] in seen else 0.5
        seen.add(values["text_input"])
        script = honest(model, values)
        return dataclasses.replace(script, events=tuple((first_s + at_s, text) for at_s, text in script.events))

    stand.respond = respond


@pytest.mark.seam
@pytest.mark.parametrize(
    ("lie", "gate", "message"),
    [
        (failing, "failures", "6 of 6 requests failed"),
        (restarting, "server", "did not survive the run"),
        (giving_up, "server", "was not ready after the run"),
        (too_fast, "roofline", r"reading the 100000 MB of weights it needs takes \d+"),
        (
            other_engine,
            "settings",
            "max_seq_len is 64 according to the engine's config.json, 96 according to the matrix",
        ),
        (
            other_than_the_matrix,
            "settings",
            "exclude_input_in_output is false according to the server, true according to the matrix",
        ),
        (
            other_than_the_repository,
            "settings",
            "ensemble: max_batch_size is 8 according to the server, 64 according to config.pbtxt",
        ),
        (
            without_a_model,
            "settings",
            "model tensorrt_llm is missing according to the server, present according to the repository",
        ),
        (remembering, "kv_cache_reuse", r"TTFT fell from \d.* ms to .* when a prompt was sent again"),
    ],
)
def test_each_lie_is_caught_by_its_own_gate(
    start: Start, lie: Callable[[Stand], None], gate: str, message: str
) -> None:
    stand = Stand()
    lie(stand)
    work = start(stand)
    with pytest.raises(StageError, match=message):
        perf.run(work)
    assert told(work, "invalid") == {gate}
    written = json.loads((work.out / "perf.json").read_text())
    assert not written["valid"]
    for level in written["levels"]:
        assert level["headline"]["window"] is None
        assert gate in level["headline"]["reason"]
        assert level["output_tokens_per_s"] is None
    again = analyze(work.out / "events.jsonl", tokenizer()).to_json()
    assert json.loads(json.dumps(again)) == written
