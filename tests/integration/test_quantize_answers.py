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
from trtllm_pipeline.files.tokenizer import read_tokenizer  # noqa: E402
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


BY_CODE = [family for family in families.FAMILIES if families.code(family)]


@pytest.mark.parametrize("family", [family for family in families.FAMILIES if family not in BY_CODE])
def test_the_float_reference_computes_what_transformers_computes(folder: Path, family: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / family, dtype=torch.float32, attn_implementation="eager"
    )
    check_logits(model, folder / family)


def check_logits(model: Any, folder: Path) -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(3, 1000, 40)]
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(families.reference(folder).logits(tokens), expected, atol=1e-3)


@pytest.mark.parametrize("family", BY_CODE)
def test_transformers_loads_by_our_code_what_no_transformers_has(folder: Path, family: str) -> None:
    """As TensorRT-LLM's converters load it: InternLM2 with its head, GLM-4 without asking for one."""
    kind = transformers.AutoModel if family == "chatglm" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder / family, trust_remote_code=True)
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stored = load_file(folder / family / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name].float(), stored[name].float()) for name in stored)
    assert model.config.architectures == [json.loads((folder / family / "config.json").read_text())["architectures"][0]]


def test_the_float_reference_of_glm_4_computes_what_transformers_has_of_it_under_another_name(folder: Path) -> None:
    """transformers has GLM-4 9B converted (model type glm): q, k and v apart, the same order of rows in each."""
    stored = load_file(folder / "chatglm" / "model.safetensors")
    said = json.loads((folder / "chatglm" / "config.json").read_text())
    config = transformers.GlmConfig(
        vocab_size=said["padded_vocab_size"],
        hidden_size=said["hidden_size"],
        intermediate_size=said["ffn_hidden_size"],
        num_hidden_layers=said["num_layers"],
        num_attention_heads=said["num_attention_heads"],
        num_key_value_heads=said["multi_query_group_num"],
        head_dim=said["kv_channels"],
        partial_rotary_factor=0.5,
        rms_norm_eps=said["layernorm_epsilon"],
        max_position_embeddings=said["seq_length"],
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=0,
        attn_implementation="eager",
    )
    renamed = {
        "embedding.word_embeddings": "embed_tokens",
        "encoder.final_layernorm": "norm",
        "encoder.layers": "layers",
        "self_attention.dense": "self_attn.o_proj",
        "dense_h_to_4h": "gate_up_proj",
        "dense_4h_to_h": "down_proj",
    }
    weights = {"lm_head.weight": stored.pop("transformer.output_layer.weight")}
    for name, value in stored.items():
        name = name.replace("transformer.", "model.", 1)
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        if "query_key_value" in name:
            sizes = [said["kv_channels"] * count for count in (4, 2, 2)]
            parts = zip("qkv", value.split(sizes), strict=True)
            weights |= {
                name.replace("self_attention.query_key_value", f"self_attn.{part}_proj"): each for part, each in parts
            }
        else:
            weights[name] = value
    model = transformers.GlmForCausalLM(config).float()
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    check_logits(model, folder / "chatglm")


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
