"""Pieces of the embedded engine model that need neither Triton nor llama.cpp."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.base.errors import DownloadError, ServerError
from trtllm_pipeline.base.machine import model
from trtllm_pipeline.tensorrt.embedded.models.text import Characters, Text, byte_level_alphabet
from trtllm_pipeline.tensorrt.embedded.runtime import (
    Event,
    Finish,
    Generation,
    Limits,
    RequestError,
    Sampling,
    physical_cores,
    sampler_settings,
)
from trtllm_pipeline.tensorrt.embedded.runtime import _check as check_sampling

tokenizers = pytest.importorskip("tokenizers")


def byte_level(folder: Path) -> Text:
    """A tokenizer with one token a byte and one special token, 256."""
    folder.mkdir(exist_ok=True)
    vocabulary = dict(byte_level_alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Text(folder)


def sentencepiece(folder: Path) -> Text:
    """A tokenizer whose words start with a marker and whose rare characters fall back to bytes, as Llama 2's."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "c", "a", "▁"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: i for i, word in enumerate(words)}, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Text(folder)


def streamed(text: Text, ids: list[int]) -> list[str]:
    """The pieces a client gets: tokens wait until no character is cut, and the rest comes at the end."""
    characters, pieces, held = Characters(text), [], []
    for token in ids:
        held.append(token)
        if characters.whole(token):
            pieces.append(text.decode(held))
            held = []
    return [*pieces, text.decode(held)]


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return byte_level(tmp_path_factory.mktemp("bytes"))


@given(st.text(max_size=30))
def test_streamed_pieces_join_to_the_text_and_cut_no_character(byte_text: Text, text: str) -> None:
    pieces = streamed(byte_text, list(text.encode()))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=30))
def test_bytes_that_are_no_text_stream_like_they_decode_at_once(byte_text: Text, data: bytes) -> None:
    assert "".join(streamed(byte_text, list(data))) == byte_text.decode(list(data))


def test_spaces_at_the_start_of_pieces_survive(tmp_path: Path) -> None:
    text = sentencepiece(tmp_path)
    a, b, c = (text.token_id(word) for word in ("▁a", "▁b", "c"))
    assert a is not None
    assert b is not None
    assert c is not None
    assert streamed(text, [a, c, b])[:3] == [" a", "c", " b"]
    emoji = [text.token_id(f"<0x{byte:02X}>") for byte in "🎉".encode()]
    assert [piece for piece in streamed(text, [i for i in emoji if i is not None]) if piece] == ["🎉"]
    start = text.token_id("<s>")
    assert start is not None
    assert text.decode([start, a, c]) == "ac", "a whole text is decoded as the tokenizer does it"


def test_special_tokens_add_nothing(byte_text: Text) -> None:
    assert byte_text.decode([*b"ab", 256]) == "ab"
    assert byte_text.decode([*b"ab", 256], skip_special=False) == "ab<end>"
    assert byte_text.token_bytes(256) == b""


@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": 256}, {}, (256,)),
        ({"eos_token_id": [65, 66]}, {"eos_token": "<end>"}, (65, 66, 256)),
        ({}, {"eos_token": {"content": "<end>"}}, (256,)),
        ({}, {}, ()),
    ],
)
def test_end_tokens_come_from_all_files(
    tmp_path: Path, generation: object, tokenizer: object, expected: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert byte_level(tmp_path).end_ids == expected


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"tokenizer\.json: it is missing"):
        Text(tmp_path)


def generation(**settings: object) -> tuple[Generation, list[Event]]:
    events: list[Event] = []
    return Generation((1,), 5, Sampling(**settings), events.append), events  # type: ignore[arg-type]


def test_length_ends_a_request_with_its_last_token() -> None:
    request, events = generation()
    assert [request.accept(token, None) for token in range(5)] == [True] * 5
    assert events[-1] == Event(4, None, Finish.LENGTH)


def test_stop_words_are_sequences_and_part_of_the_output() -> None:
    request, events = generation(stop_words=((1, 2, 3), (9,)))
    assert [request.accept(token, None) for token in (2, 1, 2)] == [True] * 3
    assert not request.accept(3, -0.5)
    assert events[-1] == Event(3, -0.5, Finish.STOP_WORDS)


def test_the_end_token_is_not_part_of_the_output() -> None:
    request, events = generation(end_id=7)
    request.accept(1, None)
    assert not request.accept(7, None)
    assert request.tokens == [1]
    assert events[-1] == Event(finish=Finish.END_ID)


def test_the_last_token_of_a_bad_word_is_taken_back() -> None:
    request, events = generation(bad_words=((1, 2),))
    assert request.accept(1, None)
    assert not request.accept(2, None)
    assert (request.tokens, request.rejected, request.finish) == ([1], {2}, None)
    assert request.accept(5, None)
    assert request.rejected == set()
    assert request.accept(2, None), "alone it is no bad word"
    assert [event.token for event in events] == [1, 5, 2]


def test_a_cancelled_request_takes_no_token() -> None:
    request, events = generation()
    request.cancel()
    assert not request.accept(1, None)
    assert events == [Event(finish=Finish.CANCELLED)]


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 1, "top_p": 0.5}, True),
        ({"top_k": 40, "temperature": 0.0}, True),
        ({"top_k": 40}, False),
        ({"top_p": 0.9}, False),
    ],
)
def test_greedy_is_what_tensorrt_llm_takes_for_greedy(settings: dict[str, float], greedy: bool) -> None:
    sampling = Sampling(**settings)  # type: ignore[arg-type]
    assert sampling.greedy is greedy
    assert (sampler_settings(sampling, 0, 100)["top_k"] == 1) is greedy


def test_sampler_settings() -> None:
    settings = sampler_settings(Sampling(top_k=5, random_seed=2**32 - 1, repetition_penalty=1.2), 3, 100)
    assert settings["samplers"] == ["penalties", "temperature", "top_k", "top_p"]
    assert settings["top_p"] == 1.0
    assert settings["min_p"] == 0.0
    assert settings["repeat_last_n"] == 100
    assert 0 <= settings["seed"] < 2**32 - 1
    assert "logprobs" not in settings
    assert sampler_settings(Sampling(), 0, 100)["repeat_last_n"] == 0


@given(st.integers(-3, 300), st.integers(-3, 300))
def test_limits(input_tokens: int, output_tokens: int) -> None:
    limits = Limits(4, 64, 100, 8192)
    fits = 1 <= input_tokens <= 64 and output_tokens >= 1 and input_tokens + output_tokens <= 100
    if fits:
        limits.check(input_tokens, output_tokens)
    elif input_tokens >= 0:
        with pytest.raises(RequestError):
            limits.check(input_tokens, output_tokens)


def test_limits_are_read_from_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"build_config": {"max_batch_size": 2, "max_seq_len": 9}}))
    assert Limits.read(tmp_path) == Limits(2, 9, 9, 64)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ServerError, match="is not an engine directory"):
        Limits.read(tmp_path)


@pytest.mark.parametrize(
    "name", ["temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_p"]
)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_that_json_does_not_have_are_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value}; it must be"):
        check_sampling(Sampling(**{name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_a_quota_limits_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    monkeypatch.setattr(model, "_QUOTA_FILE", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert model.cpu_count() == expected
    assert physical_cores() <= expected
