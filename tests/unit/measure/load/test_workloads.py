"""Prompts of wanted lengths, and those of public data sets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from tokenizers import Tokenizer

from trtllm_pipeline.base.errors import MatrixError, StageError
from trtllm_pipeline.measure.load.load import Load, warmup_prompt
from trtllm_pipeline.measure.load.prompts import LeftOut, Prompt, conversations, opened, read_prompts, read_rows
from trtllm_pipeline.measure.load.workloads import Openings, Workload, made, read_lengths


def lengths(tokenizer: Tokenizer, prompts: tuple[Prompt, ...]) -> list[int]:
    return [len(tokenizer.encode(prompt.text).ids) for prompt in prompts]


def test_real_prompts_are_cut_and_padded(tokenizer: Tokenizer) -> None:
    texts = [Prompt("short", "Why?"), Prompt("long", "It was the best of times, it was the worst of times. " * 40)]
    prompts = made(tokenizer, Workload(input_tokens=60, output_tokens=9, prompts=8), texts)
    assert lengths(tokenizer, prompts) == [60, 60]
    assert [(prompt.id, prompt.input_tokens, prompt.max_tokens) for prompt in prompts] == [
        ("short", 60, 9),
        ("long", 60, 9),
    ]
    assert prompts[0].text.startswith("Why? ")
    assert texts[1].text.startswith(prompts[1].text)


@pytest.mark.parametrize("text", ["東京は日本の首都である。" * 30, "😀 ü " * 100, "a" * 4000, "\n\n\n" * 400])
def test_any_text_can_be_cut(tokenizer: Tokenizer, text: str) -> None:
    assert lengths(tokenizer, made(tokenizer, Workload(input_tokens=33), [Prompt("1", text)])) == [33]


def test_lengths_are_normal_within_what_the_server_takes(tokenizer: Tokenizer) -> None:
    workload = Workload(
        input_tokens=50,
        input_tokens_stddev=15,
        output_tokens=20,
        output_tokens_stddev=6,
        longest=(64, 24),
        prompts=300,
        seed=3,
    )
    prompts = made(tokenizer, workload)
    inputs, outputs = lengths(tokenizer, prompts), [prompt.max_tokens or 0 for prompt in prompts]
    assert inputs == [prompt.input_tokens for prompt in prompts]
    assert max(inputs) <= 64
    assert max(outputs) <= 24
    # The part of a normal distribution that fits has a smaller mean and spread.
    assert 43 < fmean(inputs) < 50
    assert 8 < pstdev(inputs) < 15
    assert 15 < fmean(outputs) < 20


def test_lengths_from_a_file_are_taken_one_after_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_tokens": 30, "output_tokens": 5}\n\n{"input_tokens": 12, "output_tokens": 8}\n')
    pairs = read_lengths(path)
    prompts = made(tokenizer, Workload(input_tokens=1, lengths=pairs, prompts=3))
    assert list(zip(lengths(tokenizer, prompts), [prompt.max_tokens for prompt in prompts], strict=True)) == [
        (30, 5),
        (12, 8),
        (30, 5),
    ]


def test_where_nothing_says_how_many_each_text_or_pair_of_lengths_is_a_prompt(tokenizer: Tokenizer) -> None:
    texts = [Prompt(str(number), f"Text {number}.") for number in range(70)]
    assert len(made(tokenizer, Workload(input_tokens=20), texts)) == 70
    assert len(made(tokenizer, Workload(input_tokens=20, prompts=3), texts)) == 3
    assert len(made(tokenizer, Workload(input_tokens=0, lengths=((20, 2),) * 65))) == 65
    assert len(made(tokenizer, Workload(input_tokens=20))) == 64


def test_conditions_tell_the_lengths_of_a_file_instead_of_means() -> None:
    pairs = ((30, 5), (12, 8))
    told = Workload(input_tokens=9, output_tokens=4, lengths=pairs).to_json()
    assert str(told.pop("lengths")).startswith("2 pairs, digest ")
    assert told == {}
    assert len({str(Workload(input_tokens=0, lengths=each).to_json()) for each in (pairs, pairs, pairs[::-1])}) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("3", "an object"),
        ('{"input_tokens": 0, "output_tokens": 1}', "input_tokens: expected a positive"),
        ('{"input_tokens": 1}', "output_tokens: expected a positive integer, got None"),
        ('{"input_tokens": true, "output_tokens": 1}', "input_tokens"),
        ("", "no lengths in this file"),
    ],
)
def test_lengths_that_are_none_are_named(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(f"{row}\n")
    with pytest.raises(MatrixError, match=words):
        read_lengths(path)


def test_shared_beginnings(tokenizer: Tokenizer) -> None:
    workload = Workload(input_tokens=80, shared_prefix_tokens=40, shared_prefixes=2, prompts=6)
    prompts = made(tokenizer, workload)
    assert lengths(tokenizer, prompts) == [80] * 6
    begins = [prompt.text[: prompt.shared] for prompt in prompts]
    assert begins[0] == begins[2] == begins[4] != begins[1] == begins[3] == begins[5]
    assert {len(tokenizer.encode(text).ids) for text in begins} == {40}
    rests = [prompt.text[prompt.shared :].split()[:6] for prompt in prompts]
    assert len(set(map(tuple, rests))) == 6
    warm = warmup_prompt(prompts[0])
    assert warm.text.startswith(begins[0])
    assert warm.text != prompts[0].text
    assert warm.input_tokens is None


def test_a_shared_beginning_that_no_prompt_has_room_for_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(StageError, match="no prompt is longer than the 64 tokens"):
        made(tokenizer, Workload(input_tokens=40, shared_prefix_tokens=64, prompts=4))
    some = made(tokenizer, Workload(input_tokens=0, lengths=((40, 4), (90, 4)), shared_prefix_tokens=64))
    assert [bool(prompt.shared) for prompt in some] == [False, True]


def test_turns_go_on_where_the_one_before_ended(tokenizer: Tokenizer) -> None:
    prompts = made(tokenizer, Workload(input_tokens=90, turns=3, prompts=2))
    assert lengths(tokenizer, prompts) == [30, 60, 90] * 2
    assert [prompt.turn for prompt in prompts] == [1, 2, 3] * 2
    first, second, third = prompts[:3]
    assert third.text.startswith(second.text)
    assert second.text.startswith(first.text)
    assert len({prompt.id for prompt in prompts}) == 6
    assert [len(talk) for talk in conversations(prompts)] == [3, 3]


def test_levels_have_whole_conversations(tokenizer: Tokenizer) -> None:
    prompts = made(tokenizer, Workload(input_tokens=40, turns=3, prompts=4))
    for level in Load(concurrency=(1, 2), request_rate=(5.0,), requests=7, repeats=2).levels(prompts):
        for part in (level.warmup, level.measured):
            assert {len(talk) for talk in conversations(part)} <= {3}
        assert len(level.measured) == 9
        assert len(level.at_s) in {0, len(level.planned)}


# Public data sets

TALK = {
    "id": "abc_0",
    "conversations": [
        {"from": "gpt", "value": "As I said"},
        {"from": "human", "value": "What is a cat?"},
        {"from": "gpt", "value": "An animal."},
        {"from": "human", "value": "And a dog?"},
        {"from": "gpt", "value": "Another."},
    ],
}


def data(folder: Path, *rows: dict[str, Any], array: bool = False) -> Path:
    path = folder / ("rows.json" if array else "rows.jsonl")
    path.write_text(json.dumps(rows, indent=1) if array else "\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def render(messages: Any) -> str:
    return "".join(f"[{message['role']}: {message['content']}]" for message in messages)


@pytest.mark.parametrize("array", [False, True])
def test_rows_of_sharegpt(tmp_path: Path, array: bool) -> None:
    path = data(tmp_path, TALK, {"conversations": [{"from": "gpt", "value": "alone"}]}, TALK, array=array)
    first, again = read_prompts(path, render)
    assert (first.text, first.references) == ("[user: What is a cat?]", ("An animal.",))
    assert first.id != again.id
    one, two, *_ = read_prompts(path, render, turns=9)
    assert (one.text, one.turn, one.references) == (first.text, 1, ("An animal.",))
    assert two.text == "[user: What is a cat?][assistant: An animal.][user: And a dog?]"
    assert (two.turn, two.references) == (2, ("Another.",))
    assert len(read_prompts(path, render, turns=9, most=1)) == 2


@pytest.mark.parametrize(
    ("who", "what", "user", "key"),
    [
        ("from", "value", "human", "conversations"),
        ("role", "content", "user", "conversations"),
        ("role", "value", "user", "conversations"),
        ("from", "content", "human", "conversations"),
        ("role", "content", "user", "conversation"),
    ],
)
def test_rows_like_those_of_sharegpt_with_other_names(tmp_path: Path, who: str, what: str, user: str, key: str) -> None:
    messages = [{who: "system", what: "Be brief."}, {who: user, what: "Why?"}, {who: "bing", what: "So."}]
    (prompt,) = read_prompts(data(tmp_path, {key: messages, "max_tokens": 3}), render)
    assert (prompt.text, prompt.references) == ("[system: Be brief.][user: Why?]", ("So.",))
    assert prompt.max_tokens == 3


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"speaker": "human", "value": "x"}, "expected an object with `from` and `value`, or `role` and `content`"),
        ({"from": "human", "words": "x"}, "expected an object with `from` and `value`, or `role` and `content`"),
        ({"from": "human", "value": 3}, "expected an object with `from` and `value`, or `role` and `content`"),
        ({"from": "nobody", "value": "x"}, "'nobody' is an unknown speaker; expected human, user, gpt"),
    ],
)
def test_a_conversation_that_is_not_understood_is_named_by_its_line(
    tmp_path: Path, said: dict[str, object], told: str
) -> None:
    path = data(tmp_path, TALK, {"conversations": [{"from": "human", "value": "x"}, said]})
    with pytest.raises(MatrixError, match=re.escape(f"rows.jsonl:2: conversations[1]: {told}")):
        read_prompts(path, render)


def test_rows_that_are_left_out_are_counted_with_their_reason(tmp_path: Path) -> None:
    alone = {"conversations": [{"from": "gpt", "value": "alone"}]}
    path, left_out = data(tmp_path, TALK, alone, {"input": "x" * 99}, {"input": "y" * 99}, alone), LeftOut()
    assert len(read_prompts(path, render, fits=lambda prompt: len(prompt.text) < 90, left_out=left_out)) == 1
    assert str(left_out) == (
        "rows.jsonl: rows left out: 4 of 5 (without a message of a user: 2, the first in line 2; "
        "too long for the engine: 2, the first in line 3)"
    )
    assert len(read_prompts(data(tmp_path, TALK, alone, array=True), render, left_out=(rows := LeftOut()))) == 1
    assert str(rows).endswith("(without a message of a user: 1, the first in row 2)"), "all are in few lines"
    whole = LeftOut()
    read_prompts(data(tmp_path, TALK, {"input": "x"}), render, left_out=whole)
    assert (str(whole), whole.rows) == ("", 2)
    with pytest.raises(MatrixError, match=r"no row is a prompt, of 2 \(without a message of a user: 2, the") as caught:
        read_prompts(data(tmp_path, alone, alone), render)
    assert "longer lengths" not in (caught.value.hint or "")
    with pytest.raises(MatrixError, match=r"rows\.jsonl:2: conversations: expected a message of a user"):
        read_rows(data(tmp_path, TALK, alone), lambda prompt, _row: prompt, render)


def test_rows_of_cnn_dailymail(tmp_path: Path) -> None:
    (prompt,) = read_prompts(data(tmp_path, {"article": "Rain fell.", "highlights": "Rain.", "id": "x"}))
    assert (prompt.text, prompt.references) == ("Rain fell.\n\nTL;DR:", ("Rain.",))


def test_rows_of_tables(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    rows = [{"article": "Rain fell.", "highlights": "Rain.", "id": "x"}, {"article": "Sun.", "highlights": "S."}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [prompt.text for prompt in read_prompts(path)] == ["Rain fell.\n\nTL;DR:", "Sun.\n\nTL;DR:"]
    talks = tmp_path / "talks.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([TALK]), talks)
    assert len(read_prompts(talks, render, turns=2)) == 2


def test_turns_of_own_messages(tmp_path: Path) -> None:
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    path = data(tmp_path, {"id": "t", "messages": messages, "max_tokens": 4}, {"input": "plain"})
    assert [prompt.text for prompt in read_prompts(path, render)] == ["[user: a][assistant: b][user: c]", "plain"]
    prompts = read_prompts(path, render, turns=4)
    assert [(prompt.id, prompt.turn, prompt.max_tokens) for prompt in prompts] == [
        ("t, turn 1", 1, 4),
        ("t, turn 2", 2, 4),
        ("2", 1, None),
    ]
    assert [prompt.text for prompt in prompts] == ["[user: a]", "[user: a][assistant: b][user: c]", "plain"]


@pytest.mark.parametrize("said", [None, 3, "text", [3], [["human", "x"]]])
def test_conversations_that_are_none_are_named(tmp_path: Path, said: object) -> None:
    with pytest.raises(MatrixError, match=r"rows\.jsonl:1: conversations: expected a list"):
        read_prompts(data(tmp_path, {"conversations": said}), render)


def test_rows_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    path = data(tmp_path, *({"input": "x" * count} for count in (9, 3, 5, 12, 4)))
    assert [len(prompt.text) for prompt in read_prompts(path, fits=lambda prompt: len(prompt.text) < 6, most=2)] == [
        3,
        5,
    ]
    with pytest.raises(
        MatrixError, match=r"no row is a prompt, of 5 \(too long for the engine: 5, the first in line 1\)"
    ):
        read_prompts(path, fits=lambda _: False)
    later = data(tmp_path, TALK)
    assert [p.turn for p in read_prompts(later, render, turns=2, fits=lambda prompt: len(prompt.text) < 30)] == [1]


# Other words each time


@pytest.mark.parametrize(
    "asked",
    [
        Workload(input_tokens=40),
        Workload(input_tokens=40, input_tokens_stddev=20),
        Workload(input_tokens=60, shared_prefix_tokens=30, shared_prefixes=2),
        Workload(input_tokens=60, turns=3),
        Workload(input_tokens=6),
    ],
)
def test_every_request_of_a_run_begins_with_other_words_and_has_its_length(
    tokenizer: Tokenizer, asked: Workload
) -> None:
    prompts = made(tokenizer, replace(asked, prompts=8))
    load = Load(concurrency=(2, 4), requests=32, repeats=3, until_flat=True)
    openings, sent = Openings(tokenizer, 0), list[str]()
    for level in load.levels(prompts):
        talks = (*conversations(level.warmup), *conversations(level.measured))
        for talk, opening in zip(talks, openings.of(level), strict=True):
            texts = [opened(prompt.text, prompt.shared, opening) for prompt in talk]
            for text, prompt in zip(texts, talk, strict=True):
                assert text[: prompt.shared] == prompt.text[: prompt.shared]
                if prompt.input_tokens is not None:
                    assert len(tokenizer.encode(text).ids) == prompt.input_tokens
            assert texts[-1].startswith(texts[0][:20]), "a conversation continues where it ended"
            sent.append(texts[0][talk[0].shared :].lstrip())
    beginnings = {" ".join(text.split(" ")[:2]) for text in sent}
    assert len(beginnings) == len(sent) > 100


def test_every_synthetic_prompt_gets_another_beginning(tokenizer: Tokenizer) -> None:
    """Also those that would start with a number, a table or a path of the corpus."""
    openings = Openings(tokenizer, 0)
    for level in Load(concurrency=(1, 16, 64), requests=96).levels(made(tokenizer, Workload(input_tokens=64))):
        drawn = openings.of(level)
        assert "" not in drawn
        assert len({*drawn}) == len(level.planned)


def test_openings_are_those_of_the_seed(tokenizer: Tokenizer) -> None:
    (level,) = Load(concurrency=(1,), requests=50).levels(made(tokenizer, Workload(input_tokens=20)))
    first, again, other = (Openings(tokenizer, seed).of(level) for seed in (1, 1, 2))
    assert first == again != other


def test_a_level_that_lasts_a_time_has_openings_for_all_that_may_be_answered(tokenizer: Tokenizer) -> None:
    prompts = made(tokenizer, Workload(input_tokens=20, prompts=4))
    (level,) = Load(concurrency=(2,), requests=4, interval_s=1.5).levels(prompts)
    drawn = Openings(tokenizer, 0).of(level)
    assert len({*drawn}) == len(drawn) == 300 + len(level.warmup)


def test_where_no_words_are_left_a_prompt_is_sent_again(tokenizer: Tokenizer) -> None:
    prompts = made(tokenizer, Workload(input_tokens=2, prompts=2))
    (level,) = Load(concurrency=(1,), requests=900, warmup_requests=0).levels(prompts)
    drawn = [opening for opening in Openings(tokenizer, 0).of(level) if opening]
    assert 0 < len(drawn) == len({*drawn}) < 900


def test_made_up_prompts_begin_at_different_places(tokenizer: Tokenizer) -> None:
    prompts = made(tokenizer, Workload(input_tokens=40, prompts=1000))
    assert len({prompt.text for prompt in prompts}) == 1000
