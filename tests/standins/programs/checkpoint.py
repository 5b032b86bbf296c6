"""Model folders in, TensorRT-LLM checkpoints out: what converters and quantize.py have in common."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.standins.programs import ProgramError, Work, refusal

_ARCHITECTURES: Final = {
    # family of the example script -> architectures of Hugging Face models that it converts
    "llama": ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
    "qwen": (
        *("QWenLMHeadModel", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        *("Qwen2VLForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"),
    ),
    "phi": ("PhiForCausalLM", "Phi3ForCausalLM", "Phi3SmallForCausalLM", "PhiMoEForCausalLM"),
    "gpt": ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "Starcoder2ForCausalLM", "NemotronForCausalLM"),
    "gemma": ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    "internlm2": ("InternLM2ForCausalLM",),
    "glm-4-9b": ("ChatGLMModel",),
}
_BY_CODE: Final = ("internlm2", "chatglm")
"""Model types that no transformers has."""
_RENAMED: Final = {"GPT2LMHeadModel": "GPTForCausalLM", "Qwen2ForCausalLM": "QWenForCausalLM"}
"""TensorRT-LLM's name where it is not Hugging Face's."""
_LFS_POINTER: Final = b"version https://git-lfs"


def read_model(work: Work, folder: str | None) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. Raises ProgramError for what loading one would fail on."""
    if folder is None:
        raise refusal("--model_dir is missing")
    path = Path(folder)
    if not path.is_dir():
        raise ProgramError(
            f"OSError: Can't load the configuration of '{folder}'. No such folder, and no hub is reachable"
        )
    file = path / "config.json"
    if not file.is_file():
        raise ProgramError(f"OSError: {folder} does not appear to have a file named config.json.")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    code = {str(name).partition(".")[0] for name in (config.get("auto_map") or {}).values()}
    for name in sorted(f"{module}.py" for module in code):
        if not (path / name).is_file():
            raise ProgramError(f"OSError: {folder} does not appear to have a file named {name}.")
    if not code and config.get("model_type") in _BY_CODE:
        raise ProgramError(
            f"ValueError: The checkpoint you are trying to load has model type `{config['model_type']}` but Transformers "
            "does not recognize this architecture."
        )
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if not weights:
        raise ProgramError(
            f"OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory {folder}."
        )
    for weight in weights:
        with weight.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ProgramError("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge")
    scaling = config.get("rope_scaling")
    if scaling and "type" not in scaling and not work.facts["knows_rope_type"]:
        raise ProgramError("KeyError: 'type'")
    return config


def check_family(config: Mapping[str, Any], family: str) -> None:
    """Raise ProgramError for a model that is another family's."""
    architecture = config["architectures"][0]
    if architecture not in _ARCHITECTURES[family]:
        raise refusal(f"examples/{family} does not convert {architecture}")


def write_checkpoint(
    work: Work,
    folder: Path,
    model: Mapping[str, Any],
    *,
    dtype: str,
    tp: int,
    pp: int,
    cp: int = 1,
    moe: tuple[int, int] | None = None,
    quantization: Mapping[str, Any],
    drafting: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and a file of a few bytes for each rank. `drafting` is what is said of heads that are part of it.

    `moe` has the sizes of tensor and expert parallelism of experts, -1 for one that follows from the other; None where the
    program has no such options.
    """
    heads = int(model.get("num_attention_heads") or model["n_head"])
    layers = int(model.get("num_hidden_layers") or model["n_layer"])
    if heads % tp:
        raise ProgramError(f"AssertionError: num_attention_heads {heads} is not divisible by tp_size {tp}")
    if layers % pp:
        raise ProgramError(f"AssertionError: num_hidden_layers {layers} is not divisible by pp_size {pp}")
    experts = {} if moe is None else _experts(model, tp, *moe)
    if dtype == "auto":
        dtype = str(model.get("torch_dtype") or model.get("dtype") or "float16")
    world = tp * pp * cp
    architecture = model["architectures"][0]
    config = {
        "architecture": _RENAMED.get(architecture, architecture),
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": model["vocab_size"],
        "hidden_size": model.get("hidden_size") or model["n_embd"],
        "intermediate_size": model.get("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("num_key_value_heads") or heads,
        "hidden_act": model.get("hidden_act") or model.get("activation_function"),
        "max_position_embeddings": model.get("max_position_embeddings") or model.get("n_positions"),
        "mapping": {
            "world_size": world,
            "tp_size": tp,
            "pp_size": pp,
            **experts,
            **({"cp_size": cp} if "--cp_size" in work.facts["tools"][work.tool][work.tool] else {}),
        },
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None, **quantization},
        **(drafting or {}),
    }
    files = [(folder / f"rank{rank}.safetensors", safetensors(rank)) for rank in range(world)]
    work.write([(folder / "config.json", json.dumps(config, indent=4).encode()), *files])


def _experts(model: Mapping[str, Any], tp: int, moe_tp: int, moe_ep: int) -> dict[str, int]:
    """What `mapping` says of experts. Raises ProgramError in the words of Mapping and of the layer of experts."""
    moe_tp, moe_ep = (
        (moe_tp, moe_ep)
        if -1 not in (moe_tp, moe_ep)
        else (tp, 1)
        if moe_tp == moe_ep
        else (tp // moe_ep, moe_ep)
        if moe_tp == -1
        else (moe_tp, tp // moe_tp)
    )
    if moe_tp * moe_ep != tp:
        raise ProgramError(
            f"ValueError: tp_size must equal to moe_tp_size * moe_ep_size, but got {tp} != {moe_tp} * {moe_ep}"
        )
    count = number_of_experts(model)
    if moe_ep > 1 and count and count % moe_ep:
        raise ProgramError(
            f"ValueError: MixtureOfExperts - Number of experts {count} is not a multiple of EP size {moe_ep}"
        )
    return {"moe_tp_size": moe_tp, "moe_ep_size": moe_ep}


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer by the config.json of a Hugging Face folder; 0 for a model that is no mixture."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def safetensors(rank: int) -> bytes:
    """A file with one tensor of four float16 zeros, and the rank among its metadata."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "rank": str(rank)},
        "transformer.vocab_embedding.weight": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(8)


def is_whole(file: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        try:
            header = json.loads(opened.read(length)) if 2 <= length <= size - 8 else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)
