"""Traces: requests by their lengths and blocks, recorded conversations, and replay at their own times."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from trtllm_pipeline.base.errors import MatrixError, StageError, UsageError
from trtllm_pipeline.measure.client.openai import OpenAiClient
from trtllm_pipeline.measure.load.load import Load
from trtllm_pipeline.measure.load.load_run import LoadPlan, _prompts
from trtllm_pipeline.measure.load.prompts import LeftOut, Prompt, check_first_prompt, opened, read_prompts, read_rows
from trtllm_pipeline.measure.load.target import Target
from trtllm_pipeline.measure.load.workloads import MOST_MADE, Openings, Workload, of_trace

TRACE = (
    {"timestamp": 27_000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30_000, "input_length": 1400, "output_length": 26, "hash_ids": [46, 47, 2353]},
    {"timestamp": 30_000, "input_length": 600, "output_length": 9, "hash_ids": [46, 9]},
    {"timestamp": 37_000, "input_length": 1536, "output_length": 8, "hash_ids": [46, 47, 2353]},
)
"""Made for these tests, in the form of Mooncake's traces."""


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A directory with the tokenizer and the trace."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    written(tmp_path, *TRACE)
    return tmp_path


@pytest.fixture(autouse=True)
def longest(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The longest sequence that the server lists."""
    listed: list[int | None] = [None]

    async def limit(_target: Target) -> int | None:
        return listed[-1]

    monkeypatch.setattr("trtllm_pipeline.measure.load.load_run.served_length", limit)
    return listed


def written(folder: Path, *rows: Any, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def plan(folder: Path, load: Load, **more: Any) -> LoadPlan:
    target = replace(Target.at("http://localhost:1", "openai", "tiny"), max_tokens=20)
    return replace(
        LoadPlan(target=target, load=load, input_data=folder / "trace.jsonl", tokenizer=folder / "tokenizer.json"),
        **more,
    )


def prompts_of(plan: LoadPlan, left_out: LeftOut | None = None) -> tuple[Prompt, ...]:
    assert plan.tokenizer is not None
    return _prompts(plan, Tokenizer.from_file(str(plan.tokenizer)), left_out or LeftOut())


def shared_tokens(tokenizer: Tokenizer, one: Prompt, other: Prompt) -> int:
    """Tokens of the common prefix."""
    pairs = zip(tokenizer.encode(one.text).ids, tokenizer.encode(other.text).ids, strict=False)
    return next((at for at, (first, second) in enumerate(pairs) if first != second), 0)


def test_equal_hashes_are_equal_tokens_and_lengths_are_exact(folder: Path, tokenizer: Tokenizer) -> None:
    prompts = prompts_of(plan(folder, Load(trace_speed=(1.0,))))
    assert [len(tokenizer.encode(prompt.text).ids) for prompt in prompts] == [1100, 1400, 600, 1536]
    assert [prompt.max_tokens for prompt in prompts] == [52, 26, 9, 8]
    first, second, third, fourth = prompts
    for one, other, blocks in ((first, second, 2), (first, third, 1), (second, third, 1), (first, fourth, 2)):
        assert 0 <= shared_tokens(tokenizer, one, other) - (1 + 512 * blocks) < 4, "a word may be alike by chance"
    assert shared_tokens(tokenizer, second, fourth) >= 1400 - 8, "the last block is the start of a whole one"


def test_the_same_seed_gives_the_same_trace(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = read_prompts(written(tmp_path, *TRACE))
    first, again, other = (of_trace(tokenizer, rows, seed) for seed in (1, 1, 2))
    assert first == again
    assert not {prompt.text for prompt in first} & {prompt.text for prompt in other}


def test_requests_without_hashes_share_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"input_length": 700, "output_length": 5}] * 3
    prompts = of_trace(tokenizer, read_prompts(written(tmp_path, *rows)), 0)
    assert {len(tokenizer.encode(prompt.text).ids) for prompt in prompts} == {700}
    assert all(shared_tokens(tokenizer, one, other) < 8 for one, other in pairwise(prompts))


def test_every_level_has_its_own_blocks_that_its_requests_share(folder: Path, tokenizer: Tokenizer) -> None:
    load = Load(trace_speed=(1.0, 2.0), repeats=2)
    prompts = prompts_of(plan(folder, load))
    openings = Openings(tokenizer, 0, together=True)
    firsts = set[str]()
    for level in load.levels(prompts):
        drawn = openings.of(level)[-4:]
        sent = [replace(one, text=opened(one.text, 0, opening)) for one, opening in zip(prompts, drawn, strict=True)]
        assert [len(tokenizer.encode(prompt.text).ids) for prompt in sent] == [1100, 1400, 600, 1536]
        assert len({*drawn}) == 1, "they start with the same block"
        assert shared_tokens(tokenizer, sent[0], sent[1]) >= 1 + 2 * 512
        firsts.add(drawn[0])
    assert len(firsts) == 4


def test_a_replay_keeps_the_times_of_the_trace(folder: Path) -> None:
    load = Load(trace_speed=(1.0, 4.0), warmup_requests=2)
    prompts = prompts_of(plan(folder, load))
    for level, speed in zip(load.levels(prompts), load.trace_speed, strict=True):
        starts_s = level.at_s[len(level.warmup) :]
        assert [start_s - starts_s[0] for start_s in starts_s] == pytest.approx([at / speed for at in (0, 3, 3, 10)])
        assert level.measured == prompts
        assert (len(level.warmup), level.trace_speed) == (2, speed)
        assert level.request_rate == pytest.approx(speed * 3 / 10)
        assert level.at_s == tuple(sorted(level.at_s))
    assert load.levels(prompts)[0].key == {"concurrency": None, "request_rate": 0.3, "repeat": 0}


def test_rows_are_sent_in_the_order_of_their_times(folder: Path) -> None:
    written(folder, *reversed(TRACE))
    assert [prompt.id for prompt in prompts_of(plan(folder, Load(trace_speed=(1.0,))))] == ["4", "2", "3", "1"]
    assert [prompt.id for prompt in prompts_of(plan(folder, Load(concurrency=(1,))))] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("load", "sent"),
    [
        (Load(trace_speed=(1.0,), budget_s=5.0), 3),
        (Load(trace_speed=(1.0, 4.0), budget_s=2.6), 4),
        (Load(trace_speed=(1.0,), interval_s=3.0), 1),
        (Load(trace_speed=(1.0,), requests=2), 2),
        (Load(concurrency=(1,), requests=3), 3),
        (Load(concurrency=(1,)), 4),
    ],
)
def test_only_requests_within_the_limits_are_made_and_the_rest_is_counted(folder: Path, load: Load, sent: int) -> None:
    left_out = LeftOut()
    prompts = prompts_of(plan(folder, load), left_out)
    assert len(prompts) == sent
    assert left_out.unsent == 4 - sent
    assert len(load.levels(prompts)[-1].measured) >= sent
    assert ("unsent_of_trace" in left_out.settings) == (sent < 4)


@pytest.mark.parametrize(
    ("load", "searches", "sent"),
    [
        (Load(), True, MOST_MADE),
        (Load(requests=1500), True, 1500),
        (Load(concurrency=(4,), interval_s=1.0), False, MOST_MADE),
    ],
)
def test_a_long_trace_gets_few_texts_if_the_server_decides_how_many_are_sent(
    load: Load, searches: bool, sent: int
) -> None:
    lengths = [Prompt(str(number), "", input_tokens=9, blocks=(number,)) for number in range(2000)]
    assert len(load.needed(lengths, searches=searches)) == sent
    texts = [Prompt(str(number), "Where?") for number in range(2000)]
    assert len(load.needed(texts, searches=searches)) == 2000


def test_a_search_sends_the_first_requests_of_a_long_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_pipeline.measure.load.load.MOST_MADE", 3)
    left_out = LeftOut()
    load = Load(requests=2)
    assert len(prompts_of(plan(folder, load, find_concurrency=0.95), left_out)) == 3
    assert left_out.unsent == 1


def test_a_trace_in_which_all_starts_at_once(folder: Path) -> None:
    load = Load(trace_speed=(1.0, 2.0))
    written(folder, *({**row, "timestamp": 5} for row in TRACE))
    one, twice = load.levels(prompts_of(plan(folder, load)))
    assert (one.request_rate, twice.request_rate) == (4.0, 8.0)
    assert len({*one.at_s[len(one.warmup) :]}) == 1


def test_requests_too_long_for_the_server_are_left_out_and_counted(folder: Path, longest: list[int | None]) -> None:
    longest.append(1426)
    left_out = LeftOut()
    prompts = prompts_of(plan(folder, Load(trace_speed=(1.0,))), left_out)
    assert [prompt.id for prompt in prompts] == ["1", "2", "3"]
    assert str(left_out) == "trace.jsonl: rows left out: 1 of 4 (too long for the engine: 1, the first in line 4)"
    everything = plan(folder, Load(trace_speed=(1.0,)), skip_too_long=False)
    assert len(prompts_of(everything)) == 4, "too_long: fail lets the server refuse them"


def test_recorded_answers_limit_outputs(folder: Path, tokenizer: Tokenizer) -> None:
    answer = "Paris is the capital of France, and a large city on the river Seine."
    talk = [("human", "Where?"), ("gpt", "Paris."), ("human", "Really? Tell me more."), ("gpt", answer)]
    entries = [{"from": speaker, "value": words} for speaker, words in talk]
    (folder / "trace.jsonl").write_text(json.dumps([{"id": "a", "conversations": entries[2:]}] * 2))
    first, *_ = prompts_of(plan(folder, Load(concurrency=(1,))), LeftOut())
    assert first.max_tokens == min(20, len(tokenizer.encode(answer, add_special_tokens=False).ids))
    written(folder, {"id": "a", "max_tokens": 7, "conversations": entries[2:]})
    assert [prompt.max_tokens for prompt in prompts_of(plan(folder, Load(concurrency=(1,))))] == [7]
    written(folder, {"input": "Where?", "output": "Paris."})
    assert [prompt.max_tokens for prompt in prompts_of(plan(folder, Load(concurrency=(1,))))] == [None]


@pytest.mark.parametrize(
    ("row", "key", "words"),
    [
        ({**TRACE[0], "hash_ids": [46]}, "hash_ids", "expected 3, one for each 512 tokens of 1100, got 1"),
        ({**TRACE[0], "hash_ids": 46}, "hash_ids", "expected a list of integers, got 46"),
        ({**TRACE[0], "input_length": 0}, "input_length", "expected a positive integer, got 0"),
        ({**TRACE[0], "output_length": "9"}, "output_length", "expected a positive integer, got '9'"),
        ({"timestamp": 1, "hash_ids": [1]}, "input_length", "expected a positive integer, got None"),
        ({**TRACE[0], "session_id": "a"}, "session_id", "turns of a session are not supported"),
        ({**TRACE[0], "timestamp": "noon"}, "timestamp", "trace_speed needs the time of each request in milliseconds"),
        ({"input": "Hi"}, "timestamp", "trace_speed needs the time of each request in milliseconds, got None"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, row: Any, key: str, words: str) -> None:
    path = written(tmp_path, TRACE[0], row)
    for look in (read_prompts, check_first_prompt):
        with pytest.raises(MatrixError) as raised:
            look(path, timed=True)
        (fault,) = raised.value.faults
        assert (fault.line, fault.key) == (2, key)
        assert words in fault.message
        hints = {"hash_ids": "a hash for each 512 tokens", "timestamp": "--request-rate", "session_id": ""}
        assert hints.get(key, '"input_length": 600, "output_length": 52') in (raised.value.hint or "")
        assert "capital of France" not in (raised.value.hint or "")


def test_one_fault_of_all_rows_does_not_fill_the_screen(tmp_path: Path) -> None:
    with pytest.raises(MatrixError) as raised:
        read_prompts(written(tmp_path, *[{**TRACE[0], "hash_ids": [46]}] * 17))
    assert len(raised.value.faults) == 17
    *shown, last = str(raised.value).splitlines()
    assert [line.partition(": ")[0].rpartition(":")[2] for line in shown] == ["1", "2", "3", "4", "5"]
    assert last == "and 12 more"


def test_text_and_times_make_a_trace_too(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 500, "text_input": "Hi", "output_length": 3},
        {"timestamp": 0.5, "messages": [{"role": "user", "content": "Hi"}], "output_length": 4},
        {"timestamp": 7, "conversations": [{"from": "human", "value": "Hi"}]},
    ]
    prompts = read_prompts(written(tmp_path, *rows), lambda _messages, **_more: "Hi", timed=True)
    assert [(prompt.at_s, prompt.max_tokens) for prompt in prompts] == [(0.5, 3), (0.0005, 4), (0.007, None)]


def test_a_trace_of_lengths_is_not_cut_to_other_lengths_and_is_no_question(folder: Path) -> None:
    path = folder / "trace.jsonl"
    with pytest.raises(StageError, match="have their own lengths; leave out workload: isl_osl"):
        prompts_of(plan(folder, Load(concurrency=(1,)), workload=Workload(input_tokens=32)))
    with pytest.raises(MatrixError, match="have their own lengths"):
        check_first_prompt(path, cut=True)
    with pytest.raises(MatrixError, match="a row of a trace has no text"):
        read_rows(path, lambda prompt, _row: prompt, None)
    with pytest.raises(UsageError, match="lengths instead of text, which need a tokenizer"):
        _prompts(plan(folder, Load(concurrency=(1,)), tokenizer=None), None, LeftOut())


@pytest.mark.parametrize(
    ("listed", "longest"),
    [
        ([{"id": "other", "max_model_len": 9}, {"id": "tiny", "max_model_len": 4096}], 4096),
        ([{"id": "tiny"}], None),
        ([{"id": "tiny", "max_model_len": "long"}], None),
        ([], None),
    ],
)
def test_the_longest_sequence_is_what_the_server_lists(listed: list[Any], longest: int | None) -> None:
    class Listing(OpenAiClient):
        async def _get(self, *_where: Any) -> tuple[int, bytes]:
            return 200, json.dumps({"data": listed}).encode()

    client = Listing("http://localhost:1", "tiny", "chat", stream=True, timeout_s=1.0)
    assert asyncio.run(client.longest()) == longest
