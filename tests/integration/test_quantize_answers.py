"""Model Optimizer's checkpoints of the deep examination's models say what the float reference says: on the CPU, or on a GPU.

    python -m pytest -n 0 tests/integration/test_quantize_answers.py

is the quantizing part of `pipeline doctor --deep` alone, on any machine that has Model Optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.needed import quantize_package

torch = quantize_package("torch")
quantize_package("modelopt.torch.quantization")
quantize_package("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.helpers.checkpoints import Tensors, dequantized, dequantized_nvfp4, quantize  # noqa: E402
from trtllm_pipeline.files.model_files import read_tokenizer  # noqa: E402
from trtllm_pipeline.machine.model import Machine  # noqa: E402
from trtllm_pipeline.proof import answers, material  # noqa: E402
from trtllm_pipeline.stages.calibration_rows import default_set  # noqa: E402
from trtllm_pipeline.toolchains.embedded.reference import Array, Reference  # noqa: E402

pytestmark = pytest.mark.integration

PRECISIONS = (
    *("bf16", "fp8", "int8_sq", "nvfp4"),
    *(pytest.param(precision, marks=pytest.mark.slow) for precision in ("int4_awq", "w4a8_awq")),
)
MOST_NATS = 0.05
"""A token. Weights come back as they were, but for smoothing, whose factors are rounded."""
CALIBRATION = {"samples": 16, "max_length": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    material.write(
        folder, Machine(1, "CPU"), families=material.FAMILIES, precisions=["fp16"], toolchain_names=["embedded"]
    )
    return folder


def _engine_weights(tensors: Tensors, layers: int, sizes: list[int]) -> Iterator[tuple[str, Any]]:
    """Projections by their Hugging Face names; `sizes` are rows of queries, keys and values."""
    for index in range(layers):
        hf, ours = f"model.layers.{index}.", f"transformer.layers.{index}."
        qkv = dequantized(tensors, f"{ours}attention.qkv").split(sizes)
        yield from ((f"{hf}self_attn.{name}_proj.weight", part) for name, part in zip("qkv", qkv, strict=True))
        for theirs, name in (
            ("attention.dense", "self_attn.o_proj"),
            ("mlp.fc", "mlp.gate_proj"),
            ("mlp.gate", "mlp.up_proj"),
            ("mlp.proj", "mlp.down_proj"),
        ):
            yield f"{hf}{name}.weight", dequantized(tensors, f"{ours}{theirs}")


def read_back(model: Path, out: Path, precision: str) -> Reference:
    """The float reference with the checkpoint's projections in place of the model's."""
    reference = Reference.from_folder(model)
    config = reference.config
    changed: dict[str, Array] = {}
    if precision == "nvfp4":
        tensors = load_file(out / "model.safetensors")
        assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.uint8
        names = [
            name.removesuffix(".weight") for name in reference.weights if "proj" in name and name.endswith("weight")
        ]
        found: Any = ((f"{name}.weight", dequantized_nvfp4(tensors, name)) for name in names)
    else:
        sizes = [count * config.head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        tensors = load_file(out / "rank0.safetensors")
        stored = tensors["transformer.layers.0.mlp.proj.weight"].dtype
        assert (stored == torch.bfloat16) == (precision == "bf16"), stored
        changed["lm_head.weight"] = dequantized(tensors, "lm_head").float().numpy()
        found = _engine_weights(tensors, config.num_layers, sizes)
    for name, values in found:
        assert values.shape == reference.weights[name].shape, name
        changed[name] = values.float().numpy()
    assert len(changed) >= 7 * config.num_layers
    return Reference(config, {**reference.weights, **changed})


@pytest.mark.parametrize("family", material.FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_says_what_the_float_reference_says(
    folder: Path, tmp_path: Path, family: str, precision: str, record_property: Any
) -> None:
    model = folder / family
    params: dict[str, Any] = {"precision": precision, "family": family, "calibration": CALIBRATION}
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
    print(f"{family} {precision} on {'cuda' if torch.cuda.is_available() else 'cpu'}: {found}")
    assert found.unreadable == ()
    assert found.loss_nats <= MOST_NATS
