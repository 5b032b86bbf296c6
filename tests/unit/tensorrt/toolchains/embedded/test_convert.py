"""What goes into a GGUF file, and which models are refused before anything is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from benchmarks.fidelity import unpermute
from tests.contexts import context, faults
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.tensorrt.embedded import build, gguf_file, random_model, safetensors
from trtllm_pipeline.tensorrt.embedded.architecture import read_config
from trtllm_pipeline.tensorrt.embedded.params import BuildEmbedded, ConvertEmbedded
from trtllm_pipeline.tensorrt.embedded.quantize import PRECISIONS
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights

LIMITS = ("max_batch_size", "max_input_len", "max_seq_len")

FP16 = PRECISIONS["fp16"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model.write_model(tmp_path / "model")
    return tmp_path / "model"


def change_tokenizer(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"].update(changes)
    path.write_text(json.dumps(raw))


def test_permutation_interleaves_halves_and_has_an_inverse() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(12, 1)  # two heads of six rows
    assert gguf_file.permute(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(unpermute(gguf_file.permute(rows, 2), 2), rows)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_types_by_role(folder: Path, precision: str) -> None:
    plans = gguf_file.plan_tensors(folder, read_config(folder), Weights(folder), PRECISIONS[precision])
    kinds = {plan.name: plan.kind for plan in plans}
    assert kinds["blk.0.attn_norm.weight"] == kinds["output_norm.weight"] == gguf.GGMLQuantizationType.F32
    assert kinds["blk.3.ffn_down.weight"] == PRECISIONS[precision].linear
    assert kinds["token_embd.weight"] == kinds["output.weight"] == PRECISIONS[precision].embedding


def test_tensors_that_do_not_fit_the_config(folder: Path) -> None:
    config, weights = read_config(folder), dict(Weights(folder))

    def plan(changed: dict[str, Any], config: Any = config) -> list[gguf_file.TensorPlan]:
        safetensors.write(folder / "model.safetensors", changed)
        return gguf_file.plan_tensors(folder, config, Weights(folder), FP16)

    name = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(StageError, match=f"lack {name}"):
        plan({key: value for key, value in weights.items() if key != name})
    with pytest.raises(StageError, match=r"shape \[128, 512\]"):
        plan({**weights, name: weights[name].T})
    with pytest.raises(StageError, match=r"q_proj\.bias, which no llama"):
        plan({**weights, "model.layers.0.self_attn.q_proj.bias": np.zeros(128, dtype=np.float32)})
    # What older exports store besides is no reason to refuse.
    plan({**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(16, dtype=np.float32)})
    tied = plan(weights, replace(config, tie_word_embeddings=True))
    assert "output.weight" not in {entry.name for entry in tied}


def test_vocabulary_has_a_token_for_every_row(folder: Path) -> None:
    config = read_config(folder)
    facts = gguf_file.read_tokenizer(folder, replace(config, vocab_size=1030))
    assert len(facts.tokens) == len(facts.types) == 1030
    assert facts.tokens[-1] == b"[PAD1029]"
    assert facts.types[-1] == gguf.TokenType.UNUSED
    assert len(set(facts.tokens)) == 1030
    assert (facts.bos, facts.eos, facts.pad) == (0, (2,), 0)
    with pytest.raises(StageError, match="has token 1023"):
        gguf_file.read_tokenizer(folder, replace(config, vocab_size=1000))


def test_tokens_cut_within_a_character_are_control_tokens(folder: Path) -> None:
    from tokenizers import Tokenizer

    facts = gguf_file.read_tokenizer(folder, read_config(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for number in range(3, 1024):
        whole = "\ufffd" not in tokenizer.decode([number])
        assert facts.types[number] == (gguf.TokenType.NORMAL if whole else gguf.TokenType.CONTROL), number
    assert facts.types.count(gguf.TokenType.CONTROL) == 3 + 128


def test_sentencepiece_style_vocabulary(folder: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "<0xE4>": 4, "\u2581the": 5, "\u2581": 6, "the": 7}
    change_tokenizer(folder, byte_fallback=True, vocab=vocab, merges=[["\u2581", "the"]])
    facts = gguf_file.read_tokenizer(folder, replace(read_config(folder), vocab_size=8))
    kinds = gguf.TokenType
    assert facts.model == "llama"
    assert facts.types[3:6] == [kinds.BYTE, kinds.CONTROL, kinds.NORMAL]
    assert facts.scores is not None
    assert facts.merges == ["\u2581 the"]


def test_other_tokenizers_are_refused(folder: Path) -> None:
    change_tokenizer(folder, type="WordPiece")
    with pytest.raises(StageError, match="WordPiece"):
        gguf_file.read_tokenizer(folder, read_config(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StageError, match=r"tokenizer\.json cannot be converted: the file is missing"):
        gguf_file.read_tokenizer(folder, read_config(folder))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"precision": "fp8"}, 'precision: "fp8" is not allowed'),
        ({"precision": "int4_wo", "group_size": 128}, "group_size: unknown key"),
        ({"precision": "fp16", "kv_cache_precision": "int8"}, "kv_cache_precision: unknown key"),
    ],
)
def test_params_out_of_range(params: dict[str, Any], words: str) -> None:
    assert words in faults(ConvertEmbedded, **params)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((1, 16, 16), "no room for an answer"),
        ((1, 16, 4096), "exceeds the 2048 positions"),
        ((10**9, 16, 2048), "this machine has"),
    ],
)
def test_engine_limits(tmp_path: Path, limits: tuple[int, int, int], words: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.gguf").touch()
    geometry = {"max_position_embeddings": 2048, "num_layers": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 9}
    facts = {"schema": 1, "geometry": geometry, "kv_cache_precision": "fp16", "parameters": 100}
    facts |= {"architecture": "llama", "precision": "fp16"}
    (checkpoint / "config.json").write_text(json.dumps(facts))
    assert build.kv_cache_bytes_per_token(facts) == 2 * 4 * 2 * 32 * 2
    params = dict(zip(LIMITS, limits, strict=True))
    with pytest.raises(StageError, match=words):
        build.run(context(BuildEmbedded, params, {"checkpoint": checkpoint}, {}, tmp_path, tmp_path))


@pytest.mark.parametrize(("name", "value"), [("max_batch_size", 0), ("max_input_len", True), ("max_seq_len", "x")])
def test_limits_are_counted(name: str, value: object) -> None:
    assert faults(BuildEmbedded, **{**dict.fromkeys(LIMITS, 1), name: value}).startswith(f"{name}: ")


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="not a checkpoint"):
        build.run(context(BuildEmbedded, dict.fromkeys(LIMITS, 1), {"checkpoint": tmp_path}, {}, tmp_path, tmp_path))
