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

from tests.helpers.checkpoints import dequantized_folder, quantize, read_engine_checkpoint  # noqa: E402
from trtllm_pipeline.files.tokenizer import read_tokenizer  # noqa: E402
from trtllm_pipeline.machine.model import Machine  # noqa: E402
from trtllm_pipeline.proof import answers, families, material  # noqa: E402
from trtllm_pipeline.stages.calibration_rows import default_set  # noqa: E402
from trtllm_pipeline.toolchains.embedded.reference import Reference  # noqa: E402
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
    stored = load_file(out / "rank0.safetensors")["transformer.layers.0.mlp.proj.weight"].dtype
    assert (stored == torch.bfloat16) == (precision == "bf16"), stored
    return read_engine_checkpoint(out)


FOR_PYTORCH = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "phi3")
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
    out = quantize(model, default_set(), tmp_path, **params)
    check_answers(tmp_path, folder, family, read_back(model, out, precision))


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
@pytest.mark.parametrize("family", FOR_PYTORCH)
def test_a_hugging_face_checkpoint_says_what_the_float_reference_says(
    folder: Path, tmp_path: Path, family: str, precision: str
) -> None:
    params: dict[str, Any] = {"precision": precision, "family": family, "calibration": CALIBRATION}
    out = quantize(folder / family, default_set(), tmp_path, checkpoint_format="hugging_face", **params)
    stored = {str(each.dtype) for name, each in load_file(out / "model.safetensors").items() if "proj.weight" in name}
    assert ("torch.float8_e4m3fn" if precision == "fp8" else "torch.uint8") in stored
    plain = dequantized_folder(out, folder / family, tmp_path / "plain")
    check_answers(tmp_path, folder, family, families.reference(plain))


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_of_a_model_that_takes_images_only_what_reads_text_is_quantized(
    folder: Path, tmp_path: Path, precision: str
) -> None:
    """A tiny Llama 4, whose weights both formats hold as they are."""
    model = write_llama_4(tmp_path / "llama4", folder / "llama")
    params: dict[str, Any] = {"precision": precision, "family": "llama4", "calibration": CALIBRATION}
    out = quantize(model, default_set(), tmp_path, checkpoint_format="hugging_face", **params)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Llama4ForConditionalGeneration"]
    assert (out / "preprocessor_config.json").is_file()
    told = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert {"vision_model*", "multi_modal_projector*", "language_model.lm_head"} <= {*told["exclude_modules"]}
    stored, written = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    quantized = {name for name in stored if written[name].dtype != stored[name].dtype}
    assert quantized == {
        name for name in stored if ".layers." in name and name.startswith("language") and "proj" in name
    }
    plain = load_file(dequantized_folder(out, model, tmp_path / "plain") / "model.safetensors")
    for name, value in stored.items():
        torch.testing.assert_close(plain[name], value.float(), rtol=1e-5, atol=0, msg=name)


def write_llama_4(folder: Path, tokenizer: Path) -> Path:
    text = transformers.Llama4TextConfig(
        hidden_size=128,
        intermediate_size=128,
        intermediate_size_mlp=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=1024,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    vision = transformers.Llama4VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        vision_output_dim=64,
        projector_input_dim=64,
        projector_output_dim=64,
    )
    torch.manual_seed(0)
    config = transformers.Llama4Config(text_config=text.to_dict(), vision_config=vision.to_dict())
    made = transformers.Llama4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, value in made.named_parameters():
            # A power of two for each output, the first of its layer the largest.
            sizes = torch.randint(
                1, 4, (*value.shape[:-2], 1, value.shape[-1]) if value.dim() == 3 else value.shape[:1]
            )
            sizes.view(-1)[0] = 1
            signs = torch.randint(0, 2, value.shape) * 2.0 - 1
            value.copy_(signs * 0.5 ** (sizes if value.dim() != 2 else sizes[:, None]))
            if "norm" in name:
                value.fill_(1)
    made.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def check_answers(work: Path, folder: Path, family: str, read: Reference) -> None:
    model = folder / family
    tokenizer = read_tokenizer(model)
    rows = [json.loads(line) for line in (folder / f"{family}.jsonl").read_text().splitlines()]
    for row in rows:
        row["answer"] = tokenizer.decode(read.generate(tokenizer.encode(row["input"]).ids, material.MAX_TOKENS))
    (work / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = answers.compare(work, model)
    print(f"{family} on {'cuda' if torch.cuda.is_available() else 'cpu'}: {found}")
    assert found.unreadable == ()
    assert found.loss_nats <= MOST_NATS
