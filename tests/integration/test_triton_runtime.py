"""The runtime on real engines: what joins a running batch changes no answer, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.embedded_engines import END_ID, SCRIPT, random_engine, script_engine
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.errors import ServerError
from trtllm_pipeline.tensorrt.embedded.runtime import Event, Finish, RequestError, Runtime, Sampling

pytestmark = pytest.mark.seam
PROMPTS = [list(prompt.encode()) for prompt in ("once", "upon a time there was", "x", "a much longer prompt " * 6)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_engine(tmp_path_factory.mktemp("random") / "engine")


@pytest.fixture(scope="module")
def runtime(engine: Path) -> Iterator[Runtime]:
    with Runtime(engine, kv_cache_type="f32") as runtime:
        yield runtime


class Collected:
    """The events of one request."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.finish is not None:
            self.ended.set()

    def tokens(self) -> list[int | None]:
        assert self.ended.wait(60)
        return [event.token for event in self.events if event.token is not None]


def test_requests_that_join_a_running_batch_change_no_answer(runtime: Runtime) -> None:
    alone = [runtime.generate(prompt, 120)[0] for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS), "the engine attends to its prompt"
    for delay_s in (0.0, 0.005, 0.02):
        together = [Collected() for _ in PROMPTS]
        for prompt, collected in zip(PROMPTS, together, strict=True):
            runtime.submit(prompt, 120, Sampling(), collected)
            time.sleep(delay_s)
        assert [collected.tokens() for collected in together] == alone


def test_more_requests_than_slots_wait_their_turn(runtime: Runtime) -> None:
    expected = runtime.generate(PROMPTS[0], 30)[0]
    collected = [Collected() for _ in range(3 * runtime.limits.max_batch_size)]
    for each in collected:
        runtime.submit(PROMPTS[0], 30, Sampling(), each)
    assert all(each.tokens() == expected for each in collected)


def test_sampling_in_a_batch_is_reproducible(runtime: Runtime) -> None:
    settings = [Sampling(temperature=1.5, top_k=40, top_p=0.95, random_seed=seed) for seed in range(4)]
    alone = [runtime.generate(PROMPTS[1], 40, each)[0] for each in settings]
    assert len({tuple(tokens) for tokens in alone}) == 4
    together = [Collected() for _ in settings]
    for each, collected in zip(settings, together, strict=True):
        runtime.submit(PROMPTS[1], 40, each, collected)
    assert [collected.tokens() for collected in together] == alone


def test_log_probs_are_those_of_the_whole_distribution(runtime: Runtime) -> None:
    sampling = Sampling(temperature=2.0, top_k=3, return_log_probs=True)
    tokens, log_probs, _ = runtime.generate(PROMPTS[0], 10, sampling)
    for position, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
        forced = Sampling(bad_words=tuple((other,) for other in range(258) if other != token), return_log_probs=True)
        again, expected, _ = runtime.generate([*PROMPTS[0], *tokens[:position]], 1, forced)
        assert again == [token]
        assert log_prob == pytest.approx(expected[0], abs=1e-4)


def test_the_most_likely_tokens_at_each_position(runtime: Runtime) -> None:
    collected = Collected()
    runtime.submit(PROMPTS[0], 5, Sampling(temperature=2.0, top_k=3, top_log_probs=4), collected)
    collected.tokens()
    for event in collected.events:
        values = [value for _, value in event.top]
        assert len(event.top) == 4
        assert values == sorted(values, reverse=True)
        assert (event.token, event.log_prob) in event.top, "it was drawn among the first three"


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_json_follows_its_schema_and_ends(runtime: Runtime, seed: int) -> None:
    drawn = Sampling(temperature=3.0, top_k=200, random_seed=seed, end_id=END_ID, json_schema=json.dumps(SCHEMA))
    tokens, _, finish = runtime.generate(PROMPTS[0], 100, drawn)
    found = json.loads(bytes(tokens))
    assert finish is Finish.END_ID
    assert list(found) == ["a", "b"]
    assert isinstance(found["a"], bool)
    assert found["b"] in {"x", "y"}


def test_json_ends_though_another_token_ends_the_answer(runtime: Runtime) -> None:
    sampling = Sampling(end_id=END_ID + 1, json_schema=json.dumps({"const": 7}))
    tokens, _, finish = runtime.generate(PROMPTS[0], 100, sampling)
    assert (bytes(token for token in tokens if token < END_ID), finish) == (b"7", Finish.END_ID)


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"not": {}}, {"$ref": "http://localhost/x"}])
def test_a_schema_that_cannot_be_followed_is_not_ignored(runtime: Runtime, schema: dict[str, object]) -> None:
    for _ in range(2):
        with pytest.raises(ServerError, match="cannot follow this schema"):
            runtime.generate(PROMPTS[0], 10, Sampling(end_id=END_ID, json_schema=json.dumps(schema)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"min_length": 2}, "not supported with min_length"),
        ({"bad_words": ((65,),)}, "not supported with min_length, bad_words"),
        ({"end_id": None}, "or end_id -1"),
        ({"json_schema": "[]"}, "expected a JSON schema"),
        ({"json_schema": "{"}, "expected a JSON schema"),
        ({"json_schema": None, "top_log_probs": 21}, "between 0 and 20"),
    ],
)
def test_guides_that_are_refused(runtime: Runtime, change: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        runtime.check(1, 1, replace(Sampling(end_id=END_ID, json_schema="{}"), **change))


@pytest.mark.parametrize("reuse", [False, True])
def test_nothing_is_kept_from_one_prompt_to_the_next_unless_asked(engine: Path, reuse: bool) -> None:
    prompt = list(range(32, 127)) * 2
    with Runtime(engine, enable_kv_cache_reuse=reuse) as runtime:
        for _ in range(4):
            collected = Collected()
            generation = runtime.submit(prompt, 3, Sampling(), collected)
            collected.tokens()
    assert generation.cached_tokens == (len(prompt) - 1 if reuse else 0)


def test_cancel(runtime: Runtime) -> None:
    collected, begun, cancelled = Collected(), threading.Event(), threading.Event()

    def listener(event: Event) -> None:
        collected(event)
        begun.set()
        cancelled.wait()

    generation = runtime.submit(PROMPTS[0], 400, Sampling(), listener)
    begun.wait()
    generation.cancel()
    cancelled.set()
    assert len(collected.tokens()) < 400
    assert collected.events[-1] == Event(finish=Finish.CANCELLED)


def test_an_error_in_the_listener_ends_the_request_and_nothing_else(runtime: Runtime) -> None:
    seen: list[Event] = []

    def listener(event: Event) -> None:
        seen.append(event)
        if event.finish is None:
            raise KeyError("the listener failed")

    runtime.submit(PROMPTS[0], 5, Sampling(), listener)
    assert eventually(lambda: seen and seen[-1].finish)
    assert seen[-1].finish is Finish.ERROR
    assert "the listener failed" in str(seen[-1].error)
    assert runtime.generate(PROMPTS[0], 5)[2] is Finish.LENGTH


def test_closing_ends_requests_and_leaves_no_thread_and_no_socket(engine: Path) -> None:
    with Runtime(engine) as warm:  # what the library starts once for the whole process
        warm.generate(PROMPTS[0], 2)
    del warm
    gc.collect()
    threads, files = len(os.listdir("/proc/self/task")), set(os.listdir("/proc/self/fd"))
    runtime = Runtime(engine)
    assert live_listeners() == []
    collected = Collected()
    runtime.submit(PROMPTS[0], 500, Sampling(), collected)
    runtime.close()
    runtime.close()
    assert collected.events[-1].finish is Finish.CANCELLED
    assert len(os.listdir("/proc/self/task")) <= threads
    assert set(os.listdir("/proc/self/fd")) <= files


OPENED_AND_CLOSED = """
import os, sys
from pathlib import Path
from trtllm_pipeline.tensorrt.embedded.runtime import Runtime
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
for _ in range(40):
    Runtime(Path(sys.argv[1])).close()
"""


def test_one_that_is_closed_before_it_was_asked_anything_ends(engine: Path) -> None:
    """Told to end before its loop had begun, it hung for ever: where four share a CPU, each of them did."""
    opened = [subprocess.Popen([sys.executable, "-c", OPENED_AND_CLOSED, str(engine)]) for _ in range(4)]
    try:
        assert [each.wait(60) for each in opened] == [0] * 4
    finally:
        for each in opened:
            each.kill()


def live_listeners() -> list[str]:
    """Listeners of this process's runtimes that something could still connect to. The kernel's list has all processes'."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            own.add(str(Path("/proc/self/fd", name).readlink()))
    rows = [line.split() for line in Path("/proc/self/net/unix").read_text().splitlines()]
    paths = [row[-1] for row in rows if f"socket:[{row[6]}]" in own]
    return [path for path in paths if path.endswith("closed.sock") and Path(path).exists()]


def test_limits_and_settings_are_checked_before_anything_runs(runtime: Runtime) -> None:
    for prompt, count, sampling, words in (
        ([], 1, Sampling(), "no tokens"),
        ([1] * 257, 1, Sampling(), "a prompt of 257 tokens exceeds the engine's max_input_len 256"),
        ([1] * 200, 313, Sampling(), r"200 prompt tokens \+ 313 output tokens exceed the engine's max_seq_len 512"),
        ([1], 1, Sampling(repetition_penalty=0), "repetition_penalty is 0; it must be a number above 0"),
        ([1], 1, Sampling(temperature=float("nan")), "temperature is nan"),
    ):
        with pytest.raises(RequestError, match=words):
            runtime.submit(prompt, count, sampling, lambda _event: pytest.fail("nothing may run"))


def test_a_token_outside_the_vocabulary_is_refused_by_the_library(runtime: Runtime) -> None:
    with pytest.raises(ServerError, match="rejected"):
        runtime.generate([99999], 1)


def test_segments_continue_where_the_last_one_ended(tmp_path: Path) -> None:
    with Runtime(script_engine(tmp_path / "engine")) as runtime:
        tokens, _, finish = runtime.generate([ord("s")], 60, Sampling(end_id=END_ID, min_length=10))
        assert (bytes(tokens).decode(), finish) == (SCRIPT[1:], Finish.END_ID)
        tokens, _, finish = runtime.generate([ord("A")], 9, Sampling(bad_words=((66, 67, 68), (46, 46, 46))))
        assert bytes(tokens[:4]) == b"BC.."
        assert 46 not in tokens[4:5]


def test_fragments_not_marked_as_control_tokens_are_an_error_not_a_wrong_answer(tmp_path: Path) -> None:
    engine = script_engine(tmp_path / "engine")
    path = engine / "model.gguf"
    content = path.read_bytes()
    marked = b"\1\0\0\0" * 128 + b"\3\0\0\0" * 130
    assert content.count(marked) == 1
    path.write_bytes(content.replace(marked, b"\1\0\0\0" * 256 + b"\3\0\0\0" * 2))
    with Runtime(engine) as runtime, pytest.raises(ServerError, match="parts of characters"):
        runtime.generate([ord("s")], 30)


def test_folders_that_are_no_engines(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="is not an engine directory"):
        Runtime(tmp_path)
    engine = script_engine(tmp_path / "engine")
    (engine / "model.gguf").unlink()
    with pytest.raises(ServerError, match=r"has no model\.gguf"):
        Runtime(engine)
