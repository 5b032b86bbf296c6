"""Damaged GGUF files: whatever is wrong in one ends in words. Seeded; failures repeat."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf

from trtllm_pipeline.base.errors import DownloadError
from trtllm_pipeline.models.hub.gguf_folder import write_folder

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefgh", "ab", "cd"]
WIDTH, INNER, HEADS = 32, 64, 4
GOOD: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["a b", "c d"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}
SHAPES = {
    "token_embd.weight": (len(TOKENS), WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_k.weight": (WIDTH, WIDTH),
    "blk.0.ffn_up.weight": (INNER, WIDTH),
}
VALUES = [
    0,
    1,
    -1,
    7,
    2**31,
    1.5,
    float("nan"),
    float("inf"),
    -1.0,
    True,
    "",
    "x",
    "a b c",
    ["x"],
    [1],
    [3] * 13,
    [1.5],
]
NAMES = [
    "blk.x.attn_q.weight",
    "blk.99.attn_q.weight",
    "blk.0.attn_q.bias",
    "rope_freqs.weight",
    "../x",
    "output.weight",
]
ODD_SHAPES = [(1,), (33,), (3, 32), (WIDTH, WIDTH, 2), (2, 0), (0,)]


def write(path: Path, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], scale: float = 0.1) -> None:
    kinds = gguf.GGUFValueType
    writer = gguf.GGUFWriter(path, "llama")
    writer.kv_data[0].clear()
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
            continue
        kind = {bool: kinds.BOOL, int: kinds.INT64, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
        writer.add_key_value(key, value, kind)
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = (numbers.standard_normal(shape) * scale).astype(np.float32)
        if len(shape) == 2 and shape[1] % 32 == 0 and shape[1]:
            with np.errstate(over="ignore"):
                values = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def spoil(chance: random.Random, path: Path) -> str:
    """Write a file with something wrong in it; returns what."""
    fields, shapes, scale, done = dict(GOOD), dict(SHAPES), 0.1, []
    for _ in range(chance.choice([1, 1, 2])):
        key, name = chance.choice(list(fields)), chance.choice(list(shapes))
        kind = chance.choice(["value", "value", "value", "gone", "shape", "name", "scale", "bytes", "cut"])
        done.append(f"{kind} {key} {name}")
        if kind == "value":
            fields[key] = chance.choice(VALUES)
        elif kind == "gone":
            del fields[key]
        elif kind == "shape":
            shapes[name] = chance.choice(ODD_SHAPES)
        elif kind == "name":
            shapes[chance.choice(NAMES)] = shapes.pop(name)
        elif kind == "scale":
            scale = 1e30
    write(path, fields, shapes, scale)
    content = bytearray(path.read_bytes())
    if any(each.startswith("bytes") for each in done):
        for _ in range(chance.choice([1, 3, 10])):
            content[chance.randrange(chance.choice([64, 400, len(content)]))] = chance.choice(
                [0, 255, chance.randrange(256)]
            )
    if any(each.startswith("cut") for each in done):
        content = content[: chance.randrange(len(content))]
    path.write_bytes(content)
    return ", ".join(done)


def test_a_good_file_is_unpacked(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", GOOD, SHAPES)
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "m.gguf", tmp_path / "out", source={})
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2 * WIDTH * INNER


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_ends_in_words(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    for number in range(30):
        out = tmp_path / str(number)
        out.mkdir()
        done = spoil(chance, tmp_path / "m.gguf")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                write_folder(tmp_path / "m.gguf", out, source={})
            ends["fine"] += 1
        except DownloadError:
            ends["told"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, case {number}: {done}") from error
    assert ends["told"] > 10
