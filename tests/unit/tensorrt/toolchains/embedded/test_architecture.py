"""What of a config.json is understood, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.tensorrt.embedded.architecture import Llama3Scaling, read_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_config(folder)


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.architecture, config.head_dim, config.rope_theta) == ("llama", 16, 10000.0)
    assert not config.tie_word_embeddings
    np.testing.assert_array_equal(config.rope_divisors(), np.ones(8))
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 4
    assert read(tmp_path, head_dim=32).head_dim == 32


def test_rope_in_old_and_new_keys(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3)
    new = read(tmp_path, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert old == new
    assert old.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == 2.0


def test_llama3_divisors_keep_high_frequencies_and_stretch_low_ones(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=128, rope_theta=5e5, rope_scaling=LLAMA3)
    divisors = config.rope_divisors()
    wavelengths = 2 * np.pi * 5e5 ** (np.arange(64) / 64)
    np.testing.assert_allclose(divisors[wavelengths < 8192 / 4], 1.0)
    np.testing.assert_allclose(divisors[wavelengths > 8192 / 1], 8.0)
    between = divisors[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert len(between) > 2
    assert (np.diff(divisors) >= 0).all()
    assert ((between > 1) & (between < 8)).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not converted"),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantized already"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": LLAMA3, "architectures": ["Qwen2ForCausalLM"]}, "llama3"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"vocab_size": "many"}, 'vocab_size is "many"; expected a whole number'),
        ({"vocab_size": 10**400}, "vocab_size is 1000.*expected a whole number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected"),
        ({"rope_theta": [1]}, "rope_theta is \\[1\\]; expected a number"),
        ({"rope_theta": float("inf")}, "rope_theta is Infinity; expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; expected a number"),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear"; expected an object'),
        ({"architectures": "LlamaForCausalLM"}, "expected a list"),
        ({"num_key_value_heads": 3}, "divide"),
    ],
)
def test_refusals_are_infeasible_and_worded(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StageError, match=words) as caught:
        read(tmp_path, **changes)
    assert caught.value.failure is FailureClass.INFEASIBLE
    assert caught.value.hint


def test_no_folder_and_no_object(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"config\.json: it is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StageError, match="not a JSON object"):
        read_config(tmp_path)
