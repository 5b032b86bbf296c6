"""`convert_checkpoint.py` of one family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.standins.programs import ProgramError, Work, arguments, refusal
from tests.standins.programs.checkpoint import check_family, read_model, write_checkpoint

_WEIGHT_ONLY: Final = {
    "int8": "W8A16",
    "int4": "W4A16",
    "int8_gptq": "W8A16_GPTQ",
    "int4_gptq": "W4A16_GPTQ",
    "int4_awq": "W4A16_AWQ",
    "w4a16_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
}


def run(work: Work, argv: Sequence[str]) -> int:
    """Convert."""
    options = arguments.parse("convert_checkpoint.py", work.facts["tools"][work.tool][work.tool], argv)
    family = work.tool.partition(":")[2]
    if family in {"medusa", "eagle"}:
        return _with_heads(work, family, options)
    if family == "gemma" and options["ckpt_type"] != "hf":
        raise refusal(f"--ckpt-type is {options['ckpt_type']}; the stand-in reads hf only")
    model = read_model(work, options["model_dir"])
    check_family(model, family)
    if family == "glm-4-9b":
        model = _glm(model, options)
    work.begin()
    write_checkpoint(
        work,
        Path(options["output_model_dir" if family == "gemma" else "output_dir"]),
        model,
        dtype=options["dtype"] or "auto",
        tp=options.get("tp_size", options.get("world_size", 1)),  # gemma's has only the latter
        pp=options.get("pp_size", 1),
        cp=options.get("cp_size", 1),
        moe=(options["moe_tp_size"], options["moe_ep_size"]) if "moe_ep_size" in options else None,
        quantization=quantization(options) | _already(work, family, model, options),
    )
    print("Total time of converting checkpoints: 00:00:00")
    return 0


def _glm(model: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Its configuration by the names of others. Source: `ChatGLMConfig.from_hugging_face`, which takes the version from the
    path of the model where none is given. Raises ProgramError where neither tells.
    """
    if options["chatglm_version"] is None and "glm" not in options["model_dir"]:
        raise ProgramError("AssertionError: assert chatglm_version in GLM_VERSIONS")
    return {
        **model,
        "num_hidden_layers": model["num_layers"],
        "num_key_value_heads": model["multi_query_group_num"],
        "intermediate_size": model["ffn_hidden_size"],
        "max_position_embeddings": model["seq_length"],
        "vocab_size": model["padded_vocab_size"],
        "hidden_act": "swiglu",
    }


def _with_heads(work: Work, kind: str, options: Mapping[str, Any]) -> int:
    """A model with Medusa or EAGLE heads. Sources: the scripts of 0.8 and of 2026; `load_medusa_hf`."""
    if kind == "eagle" and options["pp_size"] != 1:
        raise ProgramError("AssertionError: Pipeline parallelism is not supported in EAGLE yet.")
    model = read_model(work, options["model_dir"])
    check_family(model, "llama")
    length = options["max_draft_len" if kind == "eagle" else "max_medusa_token_len"]
    if options[f"{kind}_model_dir"] is None:
        raise refusal(f"--{kind}_model_dir is missing")
    heads = Path(options[f"{kind}_model_dir"])
    if kind == "eagle":
        if length > 256:
            raise ProgramError("AssertionError: args.max_draft_len > 256 is not supported")
        read_model(work, str(heads))
        own = {name: options[name] for name in ("num_eagle_layers", "max_non_leaves_per_layer")}
    else:
        if not any((heads / f"medusa_lm_head{suffix}").is_file() for suffix in (".pt", ".safetensors")):
            raise ProgramError(f'FileNotFoundError: No such file or directory: "{heads}/medusa_lm_head.safetensors"')
        own = {name: options[name] for name in ("num_medusa_heads", "num_medusa_layers")}
    work.begin()
    write_checkpoint(
        work,
        Path(options["output_dir"]),
        {**model, "architectures": [f"{kind.capitalize()}ForCausalLM"]},
        dtype=options["dtype"],
        tp=options["tp_size"],
        pp=options["pp_size"],
        quantization=quantization(options),
        drafting={"max_draft_len": length, **own},
    )
    print("Total time of converting checkpoints: 00:00:00")
    return 0


def _already(work: Work, family: str, model: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's config.json says of its weights. Source: `update_quant_config_from_hf` of the scripts for Llama (from
    0.16) and Qwen (from 0.17). Raises ProgramError for weights that a script does not read.
    """
    found = model.get("quantization_config") or {}
    method, at = found.get("quant_method"), tuple(map(int, work.release.split(".")[:2]))
    known = {"llama": (0, 16), "qwen": (0, 17)}.get(family)
    if method in {"awq", "gptq"} and known is not None and at >= known:
        if found.get("desc_act"):
            raise refusal("ValueError: GPTQ with desc_act=True is not implemented!")
        return {"quant_algo": "W4A16_GPTQ", "group_size": found.get("group_size", 128), "has_zero_point": True}
    if method == "fbgemm_fp8" and family == "llama":
        return {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    if method is not None and not (method == "modelopt" and options.get("use_fp8")):
        raise ProgramError("KeyError: 'model.layers.0.self_attn.q_proj.weight'")
    return {}


def quantization(options: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization` section for these options. Source: checkpoint documentation of 0.15 for the algorithms."""
    kv = "INT8" if options.get("int8_kv_cache") else "FP8" if options.get("fp8_kv_cache") else None
    precision = options.get("use_weight_only_with_precision")  # gemma's, with no switch before it
    if options.get("use_weight_only"):
        precision = options["weight_only_precision"]
    algorithm = None
    grouped: dict[str, Any] = {}
    if options.get("use_nvfp4"):
        algorithm = "NVFP4"
    elif options.get("use_fp8_rowwise"):
        algorithm = "FP8_PER_CHANNEL_PER_TOKEN"
    elif options.get("use_fp8") or options.get("enable_fp8"):
        algorithm = "FP8"
    elif options.get("smoothquant") is not None:
        algorithm = "W8A8_SQ_PER_CHANNEL"
    elif precision is not None:
        algorithm = _WEIGHT_ONLY[precision]
        if precision.endswith(("gptq", "awq")):
            grouped = {"group_size": options.get("group_size", 128), "has_zero_point": precision.endswith("gptq")}
    return {"quant_algo": algorithm, "kv_cache_quant_algo": kv, **grouped}
