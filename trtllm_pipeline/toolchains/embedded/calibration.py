"""Calibration: how large the inputs of each projection are on real text, which says where rounding errors hurt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline import chat
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.tokenizer import read_tokenizer
from trtllm_pipeline.stages.calibration_rows import choose, read_lines
from trtllm_pipeline.stages.params import Selection
from trtllm_pipeline.toolchains.embedded.architecture import EMBEDDING, ModelConfig
from trtllm_pipeline.toolchains.embedded.reference import layer, layer_weights, rope
from trtllm_pipeline.toolchains.embedded.safetensors import Weights

Array = NDArray[np.float32]
_BATCH_TOKENS: Final = 2048
"""Tokens computed at once: bounds the memory of activations."""


@dataclass(frozen=True, slots=True)
class Importance:
    """What a calibration found."""

    mean_square: dict[str, Array]
    """Weight name -> mean square of each of its input channels, (in_features,)."""
    samples: int
    tokens: int


def read_texts(path: Path, column: str | None = None) -> list[str]:
    """The texts of a file: the field `text`, or `input`, or `column`, of each row. Raises MatrixError with every malformed row."""
    return read_lines(path, _text, column)


def _text(row: Any) -> str:
    text = row.get("text", row.get("input")) if isinstance(row, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError('expected an object with "text" or "input", a string')
    return text


def tokenize(folder: Path, texts: Sequence[str], selection: Selection) -> list[list[int]]:
    """The selected texts as token ids of the model in `folder`.

    Raises StageError (infeasible) where a chat template is asked for and the model has none.
    """
    texts = choose(texts, selection)
    if selection.chat_template:
        texts = _as_chats(folder, texts)
    tokenizer = read_tokenizer(folder)
    return [
        row.ids[: selection.max_length]
        for row in tokenizer.encode_batch(texts, add_special_tokens=not selection.chat_template)
    ]


def _as_chats(folder: Path, texts: Sequence[str]) -> list[str]:
    template = chat.read(folder)
    if template is None:
        raise StageError(
            f"{folder} has no chat template",
            failure=FailureClass.INFEASIBLE,
            hint="set calibration.chat_template to false for this model",
        )
    with chat.Renderer(template) as renderer:
        return [renderer.render(chat.Chat([{"role": "user", "content": text}])) for text in texts]


def calibrate(
    config: ModelConfig,
    weights: Weights,
    samples: Sequence[Sequence[int]],
    progress: Callable[[int, int], None],
) -> Importance:
    """Run token sequences through the float model, one layer in memory at a time.

    `progress(done, total)` counts layers. Sequences may differ in length; the padding that squares them up is not counted.
    """
    samples = sorted((sample for sample in samples if len(sample) > 0), key=len)
    if not samples:
        raise StageError("the calibration set holds no tokens", failure=FailureClass.USER)
    batches = []
    for group in _batches(samples):
        tokens = np.zeros((len(group), len(group[-1])), dtype=np.int64)
        real = np.zeros(tokens.shape, dtype=bool)
        for row, sample in enumerate(group):
            # Padding stands behind the text, where causal attention keeps it from being seen.
            tokens[row, : len(sample)], real[row, : len(sample)] = sample, True
        batches.append((tokens, real))
    embedding = weights[EMBEDDING]
    states = [embedding[tokens] for tokens, _ in batches]
    del embedding
    count = sum(map(len, samples))
    found: dict[str, Array] = {}
    for index in range(config.num_layers):
        parts = layer_weights(weights, index)
        sums: dict[str, NDArray[np.float64]] = {}
        for number, (tokens, real) in enumerate(batches):

            def observe(
                name: str,
                inputs: Array,
                real: NDArray[np.bool_] = real,
                sums: dict[str, NDArray[np.float64]] = sums,
            ) -> None:
                rows = inputs[real]
                sums[name] = sums.get(name, np.float64(0)) + np.einsum("ij,ij->j", rows, rows, dtype=np.float64)

            states[number], _ = layer(config, parts, states[number], rope(config, 0, tokens.shape[1]), observe=observe)
        for name, total in sums.items():
            found[f"model.layers.{index}.{name}.weight"] = (total / count).astype(np.float32)
        progress(index + 1, config.num_layers)
    return Importance(found, len(samples), count)


def _batches(samples: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Samples sorted by length in groups of at most _BATCH_TOKENS, padding included."""
    groups: list[list[Sequence[int]]] = [[]]
    for sample in samples:
        if groups[-1] and (len(groups[-1]) + 1) * len(sample) > _BATCH_TOKENS:
            groups.append([])
        groups[-1].append(sample)
    return groups
