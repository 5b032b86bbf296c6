"""Adapters as engines take them: what the runtime multiplies is what the adapter adds to a weight."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers.adapters import PEFT, random_pairs, write_adapter, write_tensors
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.tensorrt.stage import lora, lora_tensors

SIZES = {"q_proj": (16, 16), "v_proj": (16, 8), "down_proj": (40, 16), "up_proj": (16, 40)}


def runtime_delta(tensors: lora_tensors.LoraTensors, row: int, sizes: tuple[int, int]) -> NDArray[np.float32]:
    """What an engine adds to the weight [out, in] of a row, read as the page on tensors says: A [r, in] first, then B [out, r]."""
    values: NDArray[Any] = tensors.weights[row]
    if values.dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    rank, (inner, outer) = int(tensors.config[row, 2]), sizes
    down = values[: rank * inner].astype(np.float32).reshape(rank, inner)
    up = values[rank * inner : rank * (inner + outer)].astype(np.float32).reshape(outer, rank)
    assert not values[rank * (inner + outer) :].any()
    return up @ down


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("stabilised", [False, True])
def test_the_product_of_a_row_is_what_peft_adds(tmp_path: Path, dtype: str, error: float, stabilised: bool) -> None:
    pairs = random_pairs(SIZES, rank=4)
    folder = write_adapter(tmp_path / "a", pairs, lora_alpha=12, use_rslora=stabilised)
    tensors = lora_tensors.convert(folder, dtype)
    rows = {(layer, module_of(module_id), rank) for module_id, layer, rank in tensors.config.tolist()}
    assert rows == {(layer, module, 4) for layer, module in pairs}
    scale = 12 / math.sqrt(4) if stabilised else 12 / 4
    for number, (module_id, layer, _) in enumerate(tensors.config.tolist()):
        module = module_of(module_id)
        a, b = pairs[layer, module]
        expected = scale * (b.astype(np.float64) @ a.astype(np.float64))
        found = runtime_delta(tensors, number, SIZES[module])
        assert np.abs(found - expected).max() <= error * np.abs(expected).max(), (module, layer)


def module_of(module_id: int) -> str:
    return next(module for module, name in lora.MODULES.items() if lora.MODULE_IDS[name] == module_id)


def test_each_module_has_its_own_rank_and_alpha(tmp_path: Path) -> None:
    pairs = {**random_pairs({"q_proj": (16, 16)}, rank=2), **random_pairs({"v_proj": (16, 8)}, rank=8)}
    pattern = {"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"model.layers.0.self_attn.v_proj": 4}}
    tensors = lora_tensors.convert(write_adapter(tmp_path / "a", pairs, r=2, lora_alpha=6, **pattern), "float32")
    assert [row[2] for row in tensors.config.tolist()] == [2, 2, 8, 8]
    for number, (layer, module, scale) in enumerate(
        [(0, "q_proj", 3), (1, "q_proj", 3), (0, "v_proj", 0.5), (1, "v_proj", 0.5)]
    ):
        a, b = pairs[layer, module]
        assert np.allclose(
            runtime_delta(tensors, number, (a.shape[1], b.shape[0])), scale * (b @ a), rtol=1e-5, atol=1e-5
        )


def test_files_are_those_that_the_server_looks_for(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", random_pairs(SIZES, rank=4))
    for dtype, kind in (("float16", "<f2"), ("bfloat16", "|V2")):
        lora_tensors.convert(folder, dtype).write(tmp_path)
        weights, config = (np.load(tmp_path / f"model.lora_{name}.npy") for name in ("weights", "config"))
        assert weights.dtype.str == kind
        assert (weights.shape[:2], config.shape, config.dtype.str) == ((1, 8), (1, 8, 3), "<i4")
        assert weights.shape[2] == 4 * (16 + 40)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (PEFT.replace(".mlp", ""), True),
        (PEFT.replace(".weight", ".default.weight"), True),
        ("base_model.model.model.layers.{layer}.mlp.experts.3.{module}.lora_{part}.weight", False),
        ("base_model.model.lm_head.{layer}{module}.lora_{part}.weight", False),
    ],
)
def test_what_has_no_place_is_refused_by_name(tmp_path: Path, names: str, known: bool) -> None:
    folder = write_adapter(tmp_path / "a", random_pairs({"q_proj": (16, 16)}, rank=4), names=names)
    if known:
        assert len(lora_tensors.convert(folder, "float16").config) == 2
        return
    with pytest.raises(StageError, match="engines do not support its tensor"):
        lora_tensors.convert(folder, "float16")


def test_half_a_pair_and_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    a, b = np.ones((4, 16), np.float32), np.ones((16, 4), np.float32)
    folder = write_adapter(tmp_path / "a", {(0, "q_proj"): (a, b)})
    name = PEFT.format(layer=0, block="self_attn", module="q_proj", part="A")
    write_tensors(folder / "adapter_model.safetensors", {name: a})
    with pytest.raises(StageError, match="layer 0, q_proj has no lora_B"):
        lora_tensors.convert(folder, "float16")
    other = write_adapter(tmp_path / "b", {(0, "q_proj"): (a, b[:, :3])})
    with pytest.raises(StageError, match="A of layer 0, q_proj has rank 4, B has 3"):
        lora_tensors.convert(other, "float16")
    large = write_adapter(tmp_path / "c", {(0, "q_proj"): (a, b * 1e5)})
    with pytest.raises(StageError, match="is beyond the range of float16"):
        lora_tensors.convert(large, "float16")
    assert lora_tensors.convert(large, "bfloat16").weights.dtype == np.uint16
    broken = write_adapter(tmp_path / "d", {(0, "q_proj"): (a * np.nan, b)})
    with pytest.raises(StageError, match="values that are not finite"):
        lora_tensors.convert(broken, "float32")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(StageError, match="it does not change any layer"):
        lora_tensors.convert(folder, "float16")


def test_alpha_that_is_not_given_is_that_of_peft(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", random_pairs({"q_proj": (16, 16)}, rank=4))
    configuration = json.loads((folder / "adapter_config.json").read_text())
    del configuration["lora_alpha"]
    assert lora_tensors.scale_of(configuration, "q_proj", 4) == 2


@pytest.mark.parametrize(
    "change", [{"lora_alpha": "x"}, {"lora_alpha": None}, {"alpha_pattern": [1]}, {"alpha_pattern": {"q_proj": {}}}]
)
def test_a_scale_that_is_no_number_is_said_to_be_none(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_adapter(tmp_path / "a", random_pairs({"q_proj": (16, 16)}, rank=4), **change)
    with pytest.raises(StageError, match=r"lora_alpha or alpha_pattern of its adapter_config\.json is not a number"):
        lora_tensors.convert(folder, "float16")
