"""Shared by tests of prompts with exact lengths."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from trtllm_pipeline.measure.load.workloads import CORPUS


@pytest.fixture(scope="module", params=["bytes", "words"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Byte-level BPE, or one that marks spaces as SentencePiece does; each with a token at the front of every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<s>"))
    if request.param == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        alphabet = sorted({*CORPUS.read_text(encoding="utf-8")})
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train([str(CORPUS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer
