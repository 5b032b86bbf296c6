"""Generated models: the same every time, varied, and any text comes back from the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("gguf")

from tokenizers import Tokenizer

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.tensorrt.embedded import random_model
from trtllm_pipeline.tensorrt.embedded.reference import Reference
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights

PROMPTS = ("Hello world", "The capital of France is", "1, 2, 3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_model.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_models_are_small_and_their_answers_varied(tmp_path: Path, architecture: str) -> None:
    random_model.write_model(tmp_path, architecture)
    assert 1e6 < sum(values.size for values in Weights(tmp_path).values()) < 2e6
    model, tokenizer = Reference.from_folder(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    answers = [model.generate(tokenizer.encode(prompt).ids, 32) for prompt in PROMPTS]
    assert all(len(set(answer)) >= 6 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert not any(token < len(random_model.SPECIAL_TOKENS) for answer in answers for token in answer)


def test_same_arguments_same_bytes_other_seed_others(folder: Path, tmp_path: Path) -> None:
    random_model.write_model(tmp_path / "again")
    random_model.write_model(tmp_path / "other", seed=1)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert (folder / "model.safetensors").read_bytes() != (tmp_path / "other" / "model.safetensors").read_bytes()


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_and_template(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == random_model.VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in random_model.SPECIAL_TOKENS] == [0, 1, 2]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mamba"):
        random_model.write_model(tmp_path, "mamba")
