"""The smoke check of the tokens that preprocessing makes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_pipeline.base.errors import ServerError
from trtllm_pipeline.tensorrt.stage import smoke


class Tokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=[1] * add_special_tokens + [ord(each) for each in text])


def looked(made: list[int] | Exception, *, adds: bool) -> str:
    async def adds_special_tokens() -> bool:
        return adds

    async def input_ids(_text: str) -> list[int]:
        if isinstance(made, Exception):
            raise made
        return made

    client: Any = SimpleNamespace(adds_special_tokens=adds_special_tokens, input_ids=input_ids)
    checks: Any = SimpleNamespace(tokenizer=Tokenizer(), params=SimpleNamespace(prompt="A"))
    return asyncio.run(smoke._Smoke._tokens(checks, client))


@pytest.mark.parametrize(("made", "adds"), [([1, 65], True), ([65], False)])
def test_the_tokens_of_the_tokenizer(made: list[int], adds: bool) -> None:
    assert looked(made, adds=adds).startswith(f"{len(made)} tokens match the tokenizer, ")


@pytest.mark.parametrize(
    ("made", "adds", "words"),
    [
        ([65], True, r"converts 'A' to \[65\]; expected \[1, 65\] from the model's tokenizer, with its special tokens"),
        ([1, 65], False, "without its special tokens"),
        ([1, 66], True, r"expected \[1, 65\]"),
        (ServerError("no such model"), True, "returns no tokens: no such model"),
    ],
)
def test_other_tokens_are_found(made: list[int] | Exception, adds: bool, words: str) -> None:
    with pytest.raises(smoke._CheckError, match=words):
        looked(made, adds=adds)
