"""Properties the forward pass must have; that it computes the right thing is shown against llama.cpp (integration)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from trtllm_pipeline.tensorrt.embedded import random_model
from trtllm_pipeline.tensorrt.embedded.reference import Array, Reference, _rotate, log_softmax, rope

TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 1000, 40)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp(request.param)
    random_model.write_model(folder, request.param)
    return Reference.from_folder(folder)


def test_later_tokens_change_nothing_before_them(model: Reference) -> None:
    changed = [*TOKENS[:20], *reversed(TOKENS[20:])]
    np.testing.assert_allclose(model.logits(changed)[:20], model.logits(TOKENS)[:20], atol=2e-4)
    assert np.abs(model.logits(changed)[20:] - model.logits(TOKENS)[20:]).max() > 0.1


def test_batch_equals_one_by_one(model: Reference) -> None:
    batch = np.array([TOKENS[:20], TOKENS[20:]], dtype=np.int64)
    together = model.hidden_states(batch)
    for row, tokens in zip(together, batch, strict=True):
        np.testing.assert_allclose(row, model.hidden_states(tokens[None])[0], atol=1e-4)


def test_generate_is_the_argmax_of_logits_and_stops(model: Reference) -> None:
    output = model.generate(TOKENS, 12)
    expected = model.logits([*TOKENS, *output]).argmax(axis=-1)[len(TOKENS) - 1 : -1]
    assert output == expected.tolist()
    cut = output.index(output[5])
    assert model.generate(TOKENS, 12, stop=[output[5]]) == output[:cut]


def test_rotation_depends_on_distance_alone(model: Reference) -> None:
    random = np.random.default_rng(2)
    query, key = random.standard_normal((2, 1, model.config.head_dim), dtype=np.float32)

    cosines, sines = rope(model.config, 108)

    def at(heads: Array, position: int) -> Array:
        return _rotate(heads, (cosines[[position]], sines[[position]]))

    def score(query_at: int, key_at: int) -> float:
        return float((at(query, query_at) @ at(key, key_at).T)[0, 0])

    assert score(12, 5) == pytest.approx(score(107, 100), abs=1e-4)
    assert abs(score(12, 5) - score(12, 11)) > 1e-3


def test_log_softmax_sums_to_one_far_from_zero() -> None:
    logits = np.array([[1e4, 1e4 - 1.0, -1e4]], dtype=np.float32)
    assert np.exp(log_softmax(logits)).sum() == pytest.approx(1.0)
