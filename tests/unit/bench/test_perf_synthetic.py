from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from trtllm_pipeline.bench.prompts import CORPUS
from trtllm_pipeline.bench.prompts import synthetic as prompts
from trtllm_pipeline.errors import StageError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with a token at the front of every text, as many models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train([str(CORPUS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.mark.parametrize("length", [2, 17, 256, 12_000])
def test_prompts_have_the_length_asked_for(tokenizer: Tokenizer, length: int) -> None:
    made = prompts(tokenizer, 6, mean=length, seed=4)
    assert [len(tokenizer.encode(prompt.text).ids) for prompt in made] == [length] * 6
    assert made == prompts(tokenizer, 6, mean=length, seed=4)
    assert len({prompt.id for prompt in made}) == 6


def test_lengths_spread_and_prefixes_differ(tokenizer: Tokenizer) -> None:
    made = prompts(tokenizer, 40, mean=100, stddev=20)
    lengths = [len(tokenizer.encode(prompt.text).ids) for prompt in made]
    assert 90 < sum(lengths) / 40 < 110
    assert max(lengths) - min(lengths) > 40
    assert len({prompt.text[:12] for prompt in made}) > 36


def test_a_prompt_needs_room_for_special_tokens(tokenizer: Tokenizer) -> None:
    with pytest.raises(StageError, match="cannot have 1 tokens: 1 are special"):
        prompts(tokenizer, 1, mean=1)
