"""Checkpoints of Model Optimizer: made by our worker, and turned back into floats by the arithmetic of each format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.contexts import context
from tests.helpers.needed import quantize_package
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.tensorrt.embedded.architecture import ModelConfig
from trtllm_pipeline.tensorrt.embedded.reference import Array, Reference
from trtllm_pipeline.tensorrt.modelopt import quantization_worker
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint, HuggingFaceCheckpoint

torch = quantize_package("torch")
load_file, save_file = (getattr(quantize_package("safetensors.torch"), name) for name in ("load_file", "save_file"))
Tensors = Mapping[str, Any]
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats, by code. Source: OCP Microscaling Formats 1.0."""


def quantize(folder: Path, rows: Path, attempt: Path, **params: Json) -> Path:
    out = attempt / "out"
    out.mkdir(parents=True)
    quantization_worker.run(
        context(
            HuggingFaceCheckpoint if params.get("checkpoint_format") == "hugging_face" else Checkpoint,
            {"family": "llama", **params},
            {"model": folder},
            {"calibration_data": rows},
            out,
            attempt,
        )
    )
    return out


def unpacked(weight: Any) -> Any:
    """int4 values, two of them in each byte along the output, the low one first."""
    low, high = (weight.to(torch.int16) & 0xF), ((weight.to(torch.int16) >> 4) & 0xF)
    values = torch.stack([low, high], dim=1).reshape(-1, weight.shape[-1])
    return torch.where(values > 7, values - 16, values)


def dequantized(tensors: Tensors, name: str) -> Any:
    """The weight `name` as the format's arithmetic gives it back, float32."""
    weight = tensors[f"{name}.weight"]
    scale = tensors.get(f"{name}.weights_scaling_factor")
    if scale is None:
        return weight.float()
    if weight.dim() == 3:
        value = weight.float() * scale[:, :, None]
    elif weight.dtype == torch.float8_e4m3fn:
        value = weight.float() * scale
    elif scale.dim() == 2:
        value = unpacked(weight).float() * scale.repeat_interleave(128, dim=1)
    else:
        value = weight.float() * scale[:, None]
    smoothing = tensors.get(f"{name}.prequant_scaling_factor")
    return value if smoothing is None else value * smoothing.float()


def dequantized_folder(out: Path, model: Path, folder: Path) -> Path:
    """A Hugging Face checkpoint in `out` as the directory of a model that is not quantized, with what its files say as weights: the
    tensors of `model`, which it was made of, by name and shape.
    """
    tensors, original = load_file(out / "model.safetensors"), load_file(model / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_scale"):  # of experts that saw no row, too
            assert 0 < tensors[name.replace("weight_scale", "input_scale")] < float("inf"), name
    found = {name: _plain(tensors, name) for name in tensors if not name.endswith(_SCALES)}
    assert found.keys() == original.keys()
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in original.items()}
    folder.mkdir()
    save_file({name: each.contiguous() for name, each in found.items()}, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def _plain(tensors: Tensors, name: str) -> Any:
    """float32. NVFP4 has two numbers a byte, the low one first, and blocks of 16 with a scale each and one for all."""
    named = name if name.endswith("weight") else f"{name}_weight"  # what is no layer of its own has its name before it
    weight, scale = tensors[name], tensors.get(f"{named}_scale")
    if weight.dtype == torch.float8_e4m3fn:
        assert scale is not None
        return weight.float() * scale
    if weight.dtype != torch.uint8:
        assert scale is None
        return weight.float()
    assert scale is not None
    inward = (
        1 if weight.dim() == 3 else -1
    )  # all experts of a layer of Llama 4 are one tensor, its inputs before its outputs
    weight, scale = weight.movedim(inward, -1), scale.float().movedim(inward, -1)
    codes = torch.stack([weight & 0xF, weight >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor(E2M1)[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return (values * (scale * tensors[f"{named}_scale_2"].float()).repeat_interleave(16, dim=-1)).movedim(-1, inward)


_SCALES: Final = ("_scale", "_scale_2")


# ------------------------------------------------------------------ a checkpoint for engines, as TensorRT-LLM reads it

_ACTIVATIONS: Final = {"silu": "silu", "swiglu": "silu", "gelu": "gelu_tanh", "gelu_new": "gelu_tanh"}
_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh"}
_NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    "attention.q_layernorm": "self_attn.q_norm",
    "attention.k_layernorm": "self_attn.k_norm",
}
_OUTSIDE: Final = {
    "transformer.vocab_embedding": "model.embed_tokens",
    "transformer.position_embedding": "model.embed_positions",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
}
_ROWS: Final = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "embed_positions", "lm_head")
"""What ranks have parts of, one below the other."""
_COLUMNS: Final = ("o_proj", "down_proj")


def read_engine_checkpoint(out: Path) -> Reference:
    """The float reference of a checkpoint for engines, of any layout: all that it computes is what its files say.

    Sources: TensorRT-LLM's checkpoint format, and `models` of its sources (gpt, gemma, llama, phi, phi3, qwen).
    """
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    said = _said(config)
    tp, pp = config["mapping"]["tp_size"], config["mapping"]["pp_size"]
    found: dict[str, Array] = {}
    for stage in range(pp):
        ranks = []
        for rank in range(tp):
            tensors = load_file(out / f"rank{stage * tp + rank}.safetensors")
            first = stage * said.num_layers // pp
            ranks.append({name: each.float() for name, each in _of_rank(tensors, config, said, tp, first)})
        for name, part in ranks[0].items():
            parts, module = [each[name] for each in ranks], name.split(".")[-2]
            weight = name.endswith("weight")
            if module in _ROWS:
                whole = torch.cat(parts)
            elif module in _COLUMNS and weight:
                whole = torch.cat(parts, dim=1)
            else:
                whole = part
                assert all(torch.equal(each, part) for each in parts), f"{name} should be the same on every rank"
            found[name] = whole.numpy()
    return Reference(said, found)


def _said(config: Mapping[str, Any]) -> ModelConfig:
    """What config.json says, with what TensorRT-LLM's classes of these architectures have built in."""
    architecture, moe = config["architecture"], config.get("moe") or {}
    assert config.get("rotary_scaling") is None
    learned = config["position_embedding_type"] == "learned_absolute"
    kind = config.get("qwen_type")
    assert kind is None or config["seq_length"], "QWenDecoderLayer asks for it"
    # QWenDecoderLayer takes the sizes of experts from keys of their own.
    inner = config["moe_intermediate_size"] if moe and kind is not None else config["intermediate_size"]
    scalar = config.get("query_pre_attn_scalar")
    return ModelConfig(
        architecture="llama",
        hidden_size=config["hidden_size"],
        intermediate_size=inner,
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        # PhiDecoderLayer leaves it at LayerNorm's own.
        rms_norm_eps=1e-5 if architecture == "PhiForCausalLM" else config["norm_epsilon"],
        rope_theta=config.get("rotary_base", 10000.0),
        rope_scaling=None,
        tie_word_embeddings=config["share_embedding_table"],
        activation=_ACTIVATIONS[config["hidden_act"]],  # type: ignore[arg-type]
        rotary_dim=0 if learned else int(config["head_size"] * config["rotary_pct"]),
        embedding_scale=config["hidden_size"] ** 0.5 if architecture.startswith("Gemma") else 1.0,
        attention_scale=None if scalar is None else scalar**-0.5,
        attention_cap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
        parallel=architecture == "PhiForCausalLM",
        num_experts=moe.get("num_experts", 0),
        experts_per_token=moe.get("top_k", 0),
        renormalized=moe.get("normalization_mode") == 1,
    )


def _of_rank(
    tensors: Tensors, config: Mapping[str, Any], said: ModelConfig, tp: int, first: int
) -> Iterator[tuple[str, Any]]:
    """A rank's weights by the reference's names; its layers start with the model's layer `first`."""
    for theirs, ours in _OUTSIDE.items():
        if f"{theirs}.weight" in tensors:
            yield f"{ours}.weight", dequantized(tensors, theirs)
        if f"{theirs}.bias" in tensors:
            yield f"{ours}.bias", tensors[f"{theirs}.bias"]
    rows = [count * said.head_dim // tp for count in (said.num_heads, said.num_kv_heads, said.num_kv_heads)]
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("transformer.layers.")}
    for layer in sorted(layers):
        prefix, hf = f"transformer.layers.{layer}.", f"model.layers.{first + layer}."

        def has(name: str, prefix: str = prefix) -> bool:
            return f"{prefix}{name}" in tensors

        for theirs, ours in _NORMS.items():
            for kind in ("weight", "bias"):
                if has(f"{theirs}.{kind}"):
                    yield f"{hf}{ours}.{kind}", tensors[f"{prefix}{theirs}.{kind}"]
        names = [f"{hf}self_attn.{part}_proj" for part in "qkv"]
        qkv = dequantized(tensors, f"{prefix}attention.qkv").split(rows)
        yield from ((f"{name}.weight", part) for name, part in zip(names, qkv, strict=True))
        if "qwen_type" in config:
            assert has("attention.qkv.bias") == config["attn_bias"]
        if has("attention.qkv.bias"):
            biases = tensors[f"{prefix}attention.qkv.bias"].split(rows)
            yield from ((f"{name}.bias", part) for name, part in zip(names, biases, strict=True))
        yield f"{hf}self_attn.o_proj.weight", dequantized(tensors, f"{prefix}attention.dense")
        if has("attention.dense.bias"):
            yield f"{hf}self_attn.o_proj.bias", tensors[f"{prefix}attention.dense.bias"]
        fc, proj = (dequantized(tensors, f"{prefix}mlp.{name}") for name in ("fc", "proj"))
        # GatedMLP activates fc and multiplies by gate. swiglu of a fused matrix activates its second half.
        if has("mlp.router.weight"):
            yield f"{hf}mlp.gate.weight", tensors[f"{prefix}mlp.router.weight"]
            for expert in range(said.num_experts):
                up, gate = fc[expert].chunk(2)
                yield f"{hf}mlp.experts.{expert}.gate_proj.weight", gate
                yield f"{hf}mlp.experts.{expert}.up_proj.weight", up
                yield f"{hf}mlp.experts.{expert}.down_proj.weight", proj[expert]
            if config.get("qwen_type") == "qwen2_moe":
                up, gate = dequantized(tensors, f"{prefix}mlp.shared_expert.fc").chunk(2)
                yield f"{hf}mlp.shared_expert.gate_proj.weight", gate
                yield f"{hf}mlp.shared_expert.up_proj.weight", up
                yield f"{hf}mlp.shared_expert.down_proj.weight", dequantized(tensors, f"{prefix}mlp.shared_expert.proj")
                yield f"{hf}mlp.shared_expert_gate.weight", tensors[f"{prefix}mlp.shared_expert_gate.weight"]
            continue
        if config["hidden_act"] == "swiglu":
            up, gate = fc.chunk(2)
            yield f"{hf}mlp.gate_proj.weight", gate
            yield f"{hf}mlp.up_proj.weight", up
        elif has("mlp.gate.weight"):
            yield f"{hf}mlp.gate_proj.weight", fc
            yield f"{hf}mlp.up_proj.weight", dequantized(tensors, f"{prefix}mlp.gate")
        else:
            yield f"{hf}mlp.up_proj.weight", fc
            if has("mlp.fc.bias"):
                yield f"{hf}mlp.up_proj.bias", tensors[f"{prefix}mlp.fc.bias"]
        yield f"{hf}mlp.down_proj.weight", proj
        if has("mlp.proj.bias"):
            yield f"{hf}mlp.down_proj.bias", tensors[f"{prefix}mlp.proj.bias"]
