"""Model Optimizer's checkpoints of the deep examination's models say what the float reference says: on the CPU, or on a GPU.

    python -m pytest -n 0 tests/integration/test_quantize_answers.py

is the quantizing part of `pipeline doctor --deep` alone, on any machine that has Model Optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.needed import quantize_package

torch = quantize_package("torch")
quantize_package("modelopt.torch.quantization")
transformers = quantize_package("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.helpers.checkpoints import dequantized_nvfp4, quantize, read_engine_checkpoint  # noqa: E402
from trtllm_pipeline.files.model_files import read_tokenizer  # noqa: E402
from trtllm_pipeline.machine.model import Machine  # noqa: E402
from trtllm_pipeline.proof import answers, families, material  # noqa: E402
from trtllm_pipeline.stages.calibration_rows import default_set  # noqa: E402
from trtllm_pipeline.toolchains.embedded.reference import Array, Reference  # noqa: E402
from trtllm_pipeline.toolchains.model_optimizer import checkpoint  # noqa: E402

pytestmark = pytest.mark.integration

# Threads that wait for each other make tiny tensors forty times slower on a busy machine.
torch.set_num_threads(1)

SLOW = ("int4_awq", "w4a8_awq", "fp16")
TESTED = ("bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq")


def cases() -> Iterator[Any]:
    """Family, precision, tp and pp: all that engines' checkpoints are written in; two ranks each way where they can be cut."""
    for known in checkpoint.FAMILIES.values():
        family = known.model_type
        for precision in TESTED:
            if checkpoint.unwritten(family, precision) is None:
                slow = [pytest.mark.slow] if precision in SLOW else []
                yield pytest.param(family, precision, 1, 1, marks=slow)
        # Groups of 128 of AWQ are as wide as what these models have in all.
        for precision in ("bf16", "fp8"):
            if checkpoint.unwritten(family, precision) is None:
                yield pytest.param(family, precision, 2, 2, marks=[pytest.mark.slow])
    yield from (pytest.param(family, "nvfp4", 1, 1) for family in ("llama", "qwen2", "qwen3"))


MOST_NATS = 0.05
"""A token. Weights come back as they were, but for smoothing, whose factors are rounded, and norms that count from 1."""
CALIBRATION = {"samples": 16, "max_length": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    material.write(
        folder, Machine(1, "CPU"), families=material.FAMILIES, precisions=["fp16"], toolchain_names=["embedded"]
    )
    return folder


def read_back(model: Path, out: Path, precision: str) -> Reference:
    """The float reference of the checkpoint in `out`."""
    if precision != "nvfp4":
        stored = load_file(out / "rank0.safetensors")["transformer.layers.0.mlp.proj.weight"].dtype
        assert (stored == torch.bfloat16) == (precision == "bf16"), stored
        return read_engine_checkpoint(out)
    reference = Reference.from_folder(model)
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.uint8
    changed: dict[str, Array] = {}
    for name, weight in reference.weights.items():
        if "proj" in name and name.endswith("weight"):
            changed[name] = dequantized_nvfp4(tensors, name.removesuffix(".weight")).float().numpy()
            assert changed[name].shape == weight.shape, name
    assert len(changed) == 7 * reference.config.num_layers
    return Reference(reference.config, {**reference.weights, **changed})


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_float_reference_computes_what_transformers_computes(folder: Path, family: str) -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(3, 1000, 40)]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / family, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(families.reference(folder / family).logits(tokens), expected, atol=1e-3)


@pytest.mark.parametrize(("family", "precision", "tp", "pp"), [*cases()])
def test_a_checkpoint_says_what_the_float_reference_says(
    folder: Path, tmp_path: Path, family: str, precision: str, tp: int, pp: int
) -> None:
    model = folder / family
    params: dict[str, Any] = {"precision": precision, "family": family, "calibration": CALIBRATION, "tp": tp, "pp": pp}
    if precision == "nvfp4":
        params["checkpoint_format"] = "hugging_face"
    out = quantize(model, default_set(), tmp_path, **params)
    read = read_back(model, out, precision)
    tokenizer = read_tokenizer(model)
    rows = [json.loads(line) for line in (folder / f"{family}.jsonl").read_text().splitlines()]
    for row in rows:
        row["answer"] = tokenizer.decode(read.generate(tokenizer.encode(row["input"]).ids, material.MAX_TOKENS))
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = answers.compare(tmp_path, model)
    print(f"{family} {precision} tp{tp}pp{pp} on {'cuda' if torch.cuda.is_available() else 'cpu'}: {found}")
    assert found.unreadable == ()
    assert found.loss_nats <= MOST_NATS
