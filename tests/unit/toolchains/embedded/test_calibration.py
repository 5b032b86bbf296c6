"""Calibration: statistics are those of the text alone, and faults in a user's set are told together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from tests.contexts import faults
from trtllm_pipeline.errors import MatrixError, StageError
from trtllm_pipeline.stages.calibration_rows import default_set
from trtllm_pipeline.stages.params import Selection, load, to_json
from trtllm_pipeline.toolchains.embedded import calibration, random_model
from trtllm_pipeline.toolchains.embedded.architecture import read_config
from trtllm_pipeline.toolchains.embedded.params import ConvertEmbedded
from trtllm_pipeline.toolchains.embedded.reference import layer, layer_weights, rope
from trtllm_pipeline.toolchains.embedded.safetensors import Weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_model.write_model(folder)
    return folder


def test_importance_is_the_mean_square_of_inputs_whatever_the_lengths(folder: Path) -> None:
    config, weights = read_config(folder), Weights(folder)
    samples = [[5, 6, 7], [8], list(range(10, 60)), [9] * 20]
    layers: list[tuple[int, int]] = []
    found = calibration.calibrate(config, weights, samples, lambda done, total: layers.append((done, total)))
    assert (found.samples, found.tokens) == (4, 74)
    assert layers == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(found.mean_square) == 4 * 7

    # One sequence at a time needs no padding: the statistics must be the same.
    seen: dict[str, list[np.ndarray]] = {}
    for sample in samples:
        states = weights["model.embed_tokens.weight"][np.array([sample])]
        for index in range(config.num_layers):
            parts = layer_weights(weights, index)

            def keep(name: str, inputs: np.ndarray, index: int = index) -> None:
                seen.setdefault(f"model.layers.{index}.{name}.weight", []).append(inputs[0])

            states, _ = layer(config, parts, states, rope(config, 0, len(sample)), observe=keep)
    for name, rows in seen.items():
        expected = np.mean(np.concatenate(rows).astype(np.float64) ** 2, axis=0)
        np.testing.assert_allclose(found.mean_square[name], expected, rtol=1e-3)


def test_shipped_set_is_read_and_varied() -> None:
    texts = calibration.read_texts(default_set())
    assert len(texts) == 64
    assert len(set(texts)) == 64
    assert all(len(text) > 100 for text in texts)


def test_all_faults_of_a_set_at_once(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"text": "fine"}\nnot json\n\n{"prompt": "no"}\n["text"]\n{"input": "fine too"}\n{"text": ""}\n')
    with pytest.raises(MatrixError) as caught:
        calibration.read_texts(path)
    assert [fault.line for fault in caught.value.faults] == [2, 4, 5, 7]
    path.write_text("\n")
    with pytest.raises(MatrixError, match="no rows"):
        calibration.read_texts(path)


def test_selection_cuts_draws_and_keeps_order(folder: Path) -> None:
    texts = [f"row number {index}" for index in range(50)]
    every = calibration.tokenize(folder, texts, Selection(samples=50))
    some = calibration.tokenize(folder, texts, Selection(samples=5, seed=3))
    assert some == calibration.tokenize(folder, texts, Selection(samples=5, seed=3))
    assert some != calibration.tokenize(folder, texts, Selection(samples=5, seed=4))
    places = [every.index(row) for row in some]
    assert places == sorted(places)
    assert all(len(row) <= 3 for row in calibration.tokenize(folder, texts, Selection(max_length=3)))


def test_chat_template_wraps_rows(folder: Path, tmp_path: Path) -> None:
    (row,) = calibration.tokenize(folder, ["Hi"], Selection(chat_template=True))
    assert row[0] == 1  # <|im_start|>
    assert row.count(2) == 1  # <|im_end|>
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(StageError, match="no chat template"):
        calibration.tokenize(tmp_path, ["Hi"], Selection(chat_template=True))


@pytest.mark.parametrize("value", [{"sample": 3}, {"samples": 0}, {"max_length": "long"}, {"seed": True}])
def test_selection_faults(value: dict[str, object]) -> None:
    assert next(iter(value)) in faults(Selection, **value)


def test_selection_is_read_from_a_job_file() -> None:
    asked = load(ConvertEmbedded, {"precision": "int4_awq", "calibration": {"samples": 3, "seed": 0, "data": "x"}})
    assert asked.calibration == Selection(samples=3)
    assert load(ConvertEmbedded, to_json(asked)) == asked
