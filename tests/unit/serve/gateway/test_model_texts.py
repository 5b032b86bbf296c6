"""Tokens of prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from tests.helpers.chat_models import write_model
from trtllm_pipeline.measure.chat_templates import Chat
from trtllm_pipeline.serve.gateway.model_texts import ModelTexts


@pytest.mark.parametrize("size", [10, 10_000])
def test_short_and_long_texts_are_counted(tmp_path: Path, size: int) -> None:
    """A token is a byte."""

    async def run() -> None:
        found = ModelTexts(write_model(tmp_path), 1)
        assert await found.count("x" * size) == size
        assert await found.count("x" * size, most=size) == size
        assert await found.count("x" * size, most=1) > 1
        found.close()

    asyncio.run(run())


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
