"""A small recipe and a matrix that the tests change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = """\
name: small
summary: a small model
family: llama
license: MIT
sources: [{local: ./small}]
num_hidden_layers: 6
num_attention_heads: 8
num_key_value_heads: 2
hidden_size: 64
intermediate_size: 128
head_dim: 8
vocab_size: 100
max_position_embeddings: 4096
precisions: {embedded: [fp16, int8_wo]}
"""

MATRIX: dict[str, Any] = {
    "name": "test",
    "axes": {
        "model": ["small", "small-2"],
        "precision": ["fp16", "int8_wo"],
        "parallel": ["tp1", "tp2pp2"],
        "max_batch_size": [4, 8],
        "lengths": ["128,32", "2048,1024"],
    },
}

Write = Callable[..., Path]
