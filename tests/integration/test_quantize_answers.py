"""Model Optimizer's checkpoints of the deep examination's models say what the float reference says: on the CPU, or on a GPU.

    python -m pytest -n 0 tests/integration/test_quantize_answers.py

is the quantizing part of `pipeline doctor --deep` alone, on any machine that has Model Optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
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
from trtllm_pipeline.base.machine.model import Machine  # noqa: E402
from trtllm_pipeline.models.files.tokenizer import read_tokenizer  # noqa: E402
from trtllm_pipeline.show.proof import material, reference_answers  # noqa: E402
from trtllm_pipeline.tensorrt.embedded import families  # noqa: E402
from trtllm_pipeline.tensorrt.embedded.reference import Reference  # noqa: E402
from trtllm_pipeline.tensorrt.modelopt import calibration_batches, checkpoint_writer  # noqa: E402
from trtllm_pipeline.tensorrt.stage.calibration_rows import choose, default_set, read_rows  # noqa: E402
from trtllm_pipeline.tensorrt.stage.params import Selection  # noqa: E402

# Threads that wait for each other make tiny tensors forty times slower on a busy machine.
torch.set_num_threads(1)

TESTED = ("bf16", "fp8", "int8_sq", "int4_awq", "w4a8_awq")


def cases() -> Iterator[Any]:
    """Family, precision, tp and pp: all that engines' checkpoints are written in; two ranks each way where they can be cut."""
    for known in checkpoint_writer.FAMILIES.values():
        family = known.model_type
        for precision in TESTED:
            if checkpoint_writer.unwritten(family, precision) is None:
                yield family, precision, 1, 1
        # Groups of 128 of AWQ are as wide as what these models have in all.
        for precision in ("bf16", "fp8"):
            if checkpoint_writer.unwritten(family, precision) is None:
                yield family, precision, 2, 2


MOST_NATS = 0.05
"""A token. Weights come back as they were, but for smoothing, whose factors are rounded, and norms that count from 1."""
CALIBRATION = {"samples": 16, "max_length": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    material.write(
        folder, Machine(1, "CPU"), families=families.FAMILIES, precisions=["fp16"], toolchain_names=["embedded"]
    )
    return folder


def read_back(model: Path, out: Path, precision: str) -> Reference:
    """The float reference of the checkpoint in `out`."""
    stored = load_file(out / "rank0.safetensors")["transformer.layers.0.mlp.proj.weight"].dtype
    assert (stored == torch.bfloat16) == (precision == "bf16"), stored
    return read_engine_checkpoint(out)


FOR_PYTORCH = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "phi3")


@pytest.mark.parametrize("family", families.FAMILIES)
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


TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
PIECES = {**VISION, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
GEMMA_3 = {**TEXT, "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}
QWEN = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}


@dataclass(frozen=True)
class Images:
    """A tiny model that takes images: what its configuration says of text and vision, and of both."""

    text: dict[str, Any]
    vision: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)


TAKE_IMAGES = {
    "llama4": Images(
        {
            **TEXT,
            "intermediate_size": 128,
            "intermediate_size_mlp": 256,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
        {**PIECES, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    ),
    "gemma3": Images(GEMMA_3, PIECES, {"mm_tokens_per_image": 4, "image_token_index": 1023}),
    "qwen2_vl": Images(QWEN, {"depth": 1, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "num_heads": 2}),
    "qwen2_5_vl": Images(
        QWEN,
        {
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [0],
        },
    ),
    "llava_next": Images(
        {**TEXT, "model_type": "mistral"}, {**PIECES, "model_type": "clip_vision_model"}, {"image_token_index": 1023}
    ),
}


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
@pytest.mark.parametrize("family", TAKE_IMAGES)
def test_of_a_model_that_takes_images_only_what_reads_text_is_quantized(
    folder: Path, tmp_path: Path, family: str, precision: str
) -> None:
    known = TAKE_IMAGES[family]
    config = transformers.CONFIG_MAPPING[family](text_config=known.text, vision_config=known.vision, **known.more)
    model = write_exact(transformers.AutoModelForImageTextToText.from_config(config), tmp_path / family, folder)
    (model / "preprocessor_config.json").write_text("{}")
    out = check_exact(model, tmp_path, family, precision)
    assert (out / "preprocessor_config.json").is_file()
    kept = {
        name: each.dim()
        for name, each in load_file(out / "model.safetensors").items()
        if name.startswith(("vis", "multi"))
    }
    told = json.loads((out / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    layers = [name for name, dimensions in kept.items() if dimensions == 2 and name.endswith(".weight")]
    assert layers
    assert [name for name in layers if not any(fnmatch(name, each) for each in told)] == []


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_text_of_gemma_3_is_quantized(folder: Path, tmp_path: Path, precision: str) -> None:
    config = transformers.Gemma3TextConfig(**GEMMA_3)
    model = write_exact(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "gemma3_text", folder)
    check_exact(model, tmp_path, "gemma3_text", precision)


def write_exact(made: Any, folder: Path, material: Path) -> Path:
    """A model whose weights all formats hold as they are: a power of two for each output, the first of its layer the largest."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in made.named_parameters():
            # Experts of Llama 4 are one tensor, with inputs before outputs.
            rows = (*value.shape[:-2], 1, value.shape[-1]) if value.dim() == 3 else value.shape[:1]
            sizes = torch.randint(1, 4, rows)
            sizes.view(-1)[0] = 1
            signs = torch.randint(0, 2, value.shape) * 2.0 - 1
            many = sizes if value.dim() == 3 else sizes.view(-1, *[1] * (value.dim() - 1))
            value.copy_(signs * 0.5**many)
            if "norm" in name:
                value.fill_(1)
    made.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((material / "llama" / name).read_bytes())
    return folder


def check_exact(model: Path, work: Path, family: str, precision: str) -> Path:
    """Quantize `model`: layers that read text are quantized and hold what they held, all else is untouched."""
    params: dict[str, Any] = {"precision": precision, "family": family, "calibration": CALIBRATION}
    out = quantize(model, default_set(), work, checkpoint_format="hugging_face", **params)
    source, told = (json.loads((each / "config.json").read_text()) for each in (model, out))
    assert told["architectures"] == source["architectures"]
    stored, written = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    quantized = {name for name in stored if written[name].dtype != stored[name].dtype}
    assert quantized == {
        name for name in stored if name.startswith(("language", "model")) and "layers." in name and "proj" in name
    } - {name for name in stored if name.endswith("bias")}
    plain = load_file(dequantized_folder(out, model, work / "plain") / "model.safetensors")
    for name, value in stored.items():
        torch.testing.assert_close(plain[name], value.float(), rtol=1e-5, atol=0, msg=name)
    if precision == "fp8":
        check_activations(model, written)
    return out


def check_activations(model: Path, written: Any) -> None:
    """Each layer's scale is the largest of what it is given, of the rows one by one in floats, over the largest E4M3 number."""
    kind = transformers.AutoConfig.from_pretrained(model)
    auto = (
        transformers.AutoModelForImageTextToText
        if hasattr(kind, "vision_config")
        else transformers.AutoModelForCausalLM
    )
    loaded = auto.from_pretrained(model, dtype=torch.float32).eval()
    largest: dict[str, float] = {}

    def measured(name: str) -> Any:
        def hook(_module: Any, given: Any) -> None:
            largest[name] = max(largest.get(name, 0.0), float(given[0].abs().max()))

        return hook

    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            module.register_forward_pre_hook(measured(name[name.index("layers.") :]))
    selection = Selection(**CALIBRATION)
    for row in calibration_batches.tokenize(model, choose(read_rows(default_set()), selection), selection):
        with torch.no_grad():
            loaded(input_ids=torch.tensor([row]))
    scales = {name[name.index("layers.") :]: value for name, value in written.items() if name.endswith("input_scale")}
    found = {name: float(scales[f"{name}.input_scale"]) * 448 for name in largest if f"{name}.input_scale" in scales}
    assert found
    # They were measured in bfloat16.
    assert found == pytest.approx({name: largest[name] for name in found}, rel=0.06)


def check_answers(work: Path, folder: Path, family: str, read: Reference) -> None:
    model = folder / family
    tokenizer = read_tokenizer(model)
    rows = [json.loads(line) for line in (folder / f"{family}.jsonl").read_text().splitlines()]
    for row in rows:
        row["answer"] = tokenizer.decode(read.generate(tokenizer.encode(row["input"]).ids, material.MAX_TOKENS))
    (work / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = reference_answers.compare(work, model)
    print(f"{family} on {'cuda' if torch.cuda.is_available() else 'cpu'}: {found}")
    assert found.unreadable == ()
    assert found.loss_nats <= MOST_NATS
