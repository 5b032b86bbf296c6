"""Counting the tokens of prompts, before or while they are answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers, processors

from tests.helpers.chat_models import write_model
from trtllm_pipeline.measure.chat_templates import Chat
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts, PromptTokens


def texts(folder: Path, normalizer: object = None) -> ModelTexts:
    """A model whose tokens are bytes."""
    write_model(folder)
    if normalizer is not None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.normalizer = normalizer
        tokenizer.save(str(folder / "tokenizer.json"))
    return ModelTexts(folder, 1)


@pytest.mark.parametrize("text", ["word " * 20, "ä" * 40, "\U0001f600" * 20, "\ufb2c" * 10])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["none", "nfc"])
def test_a_text_has_no_more_tokens_than_its_bound(tmp_path: Path, text: str, normalizer: object) -> None:
    found = texts(tmp_path, normalizer)
    tokens = asyncio.run(found.count(text))
    most = next(number for number in range(10_000) if found.has_at_most(text, number))
    assert tokens <= most <= 12 * len(text) + 1
    assert not found.has_at_most(text, tokens - 1)
    found.close()


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_text_that_may_have_no_tokens_is_counted_first(tmp_path: Path, text: str) -> None:
    assert not texts(tmp_path).has_at_most(text, 1000)


def test_nothing_is_assumed_of_other_normalizers(tmp_path: Path) -> None:
    assert not texts(tmp_path, normalizers.NFKC()).has_at_most("word", 10**9)


def test_what_the_template_and_the_tokenizer_put_at_the_beginning_is_there_once(tmp_path: Path) -> None:
    """As of GLM-4, whose tokenizer puts two tokens there."""
    write_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["[gMASK]", "<sop>"])
    both = [(token, tokenizer.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
    tokenizer.post_processor = processors.TemplateProcessing("[gMASK] <sop> $A", None, both)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("[gMASK]<sop>{{ messages[0].content }}")

    async def run() -> None:
        found = ModelTexts(tmp_path, 1)
        text = await found.render(Chat(({"role": "user", "content": "abc"},)), special=True)
        assert (text, await found.count(text)) == ("abc", 5)
        found.close()

    asyncio.run(run())


@pytest.mark.parametrize("size", [10, 10_000])
def test_a_count_that_is_made_meanwhile(tmp_path: Path, size: int) -> None:
    async def run() -> None:
        found = texts(tmp_path)
        tokens = found.count_meanwhile("x" * size, special=True)
        counted = asyncio.Event()
        if not tokens.when_counted(counted.set):
            assert tokens.number is None
            await counted.wait()
        assert tokens.number == size
        found.close()

    asyncio.run(run())


def test_a_count_that_nobody_waits_for() -> None:
    async def run() -> None:
        tokens = PromptTokens(asyncio.get_running_loop().create_future())
        tokens.cancel()
        assert tokens.when_counted(lambda: None)
        assert tokens.number is None

    asyncio.run(run())
