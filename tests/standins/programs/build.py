"""`trtllm-build`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.standins import refusals
from tests.standins.programs import ProgramError, Work, arguments, refusal
from tests.standins.programs.checkpoint import is_whole
from tests.standins.programs.engine import engine_bytes

_FP8_INPUTS: Final = frozenset(("FP8", "W4A8_AWQ", "NVFP4"))
"""Quantizations whose layers take FP8 or FP4 activations."""
MODES: Final = {
    None: 1,
    "draft_tokens_external": 2,
    "medusa": 4,
    "lookahead_decoding": 8,
    "explicit_draft_tokens": 16,
    "eagle": 32,
}
"""--speculative_decoding_mode -> what config.json has."""
_PLUGINS: Final = ("gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin", "low_latency_gemm_plugin")
"""Those that some GPU does not have."""


def run(work: Work, argv: Sequence[str]) -> int:
    """Build one engine for each rank of the checkpoint."""
    table = work.facts["tools"][work.tool][work.tool]
    options = arguments.parse("trtllm-build", table, argv)
    source = options.get("checkpoint_dir")
    if source is None:
        raise refusal("--checkpoint_dir is missing; the stand-in builds from checkpoints only")
    print(f"[TensorRT-LLM] TensorRT-LLM version: {work.release}")
    checkpoint = _read_checkpoint(Path(source))
    if not work.gpus:
        raise ProgramError(
            "[TRT] [E] createInferBuilder: Error Code 6: API Usage Error (CUDA initialization failure with error: 100.)",
            traceback=False,
        )
    plugins = {
        name.lstrip("-"): options[name.lstrip("-")]
        for name, option in table.items()
        if "plugin_kind" in option and name.lstrip("-") in options
    }
    check(work, checkpoint, plugins)
    adapters = lora_config(table, options, checkpoint, plugins)
    work.begin()
    world = int(checkpoint["mapping"]["world_size"])
    under_mpi = work.ranks > 1
    workers = 1 if under_mpi else max(1, min(int(options["workers"]), len(work.gpus), world))
    mine = range(work.rank, world, work.ranks) if under_mpi else range(world)
    output = Path(options["output_dir"])
    files = []
    for rank in mine:
        gpu = work.gpus[(work.rank if under_mpi else rank % workers) % len(work.gpus)]
        files.append((output / f"rank{rank}.engine", engine_bytes(work, rank, gpu)))
        print(f"[TRT-LLM] [I] Serializing engine to {files[-1][0]}...", flush=True)
    if work.rank == 0:
        config = {
            "version": work.release,
            "pretrained_config": checkpoint,
            "build_config": {**build_config(table, options, checkpoint, plugins), **adapters},
        }
        files.insert(0, (output / "config.json", json.dumps(config, indent=4).encode()))
    work.write(files)
    if work.rank == 0 and options.get("output_timing_cache"):
        Path(options["output_timing_cache"]).write_bytes(b"stand-in")
    print("[TRT-LLM] [I] Total time of building all engines: 00:00:00")
    return 0


def build_config(
    table: Mapping[str, Any], options: Mapping[str, Any], checkpoint: Mapping[str, Any], plugins: Mapping[str, Any]
) -> dict[str, Any]:
    """The `build_config` section. A release with --max_seq_len takes it, when absent, from the model's positions."""
    names = (
        *("max_input_len", "max_batch_size", "max_beam_width", "max_num_tokens", "opt_num_tokens", "max_draft_len"),
        "max_prompt_embedding_table_size",
    )
    config: dict[str, Any] = {name: options[name] for name in names if name in options}
    if "--max_output_len" in table:
        config["max_output_len"] = options["max_output_len"]
    if "--max_seq_len" in table:
        config["max_seq_len"] = options["max_seq_len"]
        if config["max_seq_len"] is None and options.get("max_output_len") is not None:
            config["max_seq_len"] = options["max_input_len"] + options["max_output_len"]
        elif config["max_seq_len"] is None:
            config["max_seq_len"] = checkpoint["max_position_embeddings"]
    limited_num_tokens(config, plugins)
    if "--speculative_decoding_mode" in table:
        speculation(config, options.get("speculative_decoding_mode"), checkpoint, plugins)
    return {**config, "plugin_config": dict(plugins)}


def speculation(
    config: dict[str, Any], mode: str | None, checkpoint: Mapping[str, Any], plugins: Mapping[str, Any]
) -> None:
    """Make room for drafted tokens. Raises ProgramError for what cannot be drafted. Source: `build` in builder.py."""
    config["speculative_decoding_mode"] = MODES[mode]
    if not config.get("max_draft_len"):
        config["max_draft_len"] = checkpoint.get("max_draft_len", 0)
    if mode is None:
        return
    drafted = config["max_draft_len"]
    _raise_length(config, drafted, "max_draft_len")
    if mode == "eagle":
        if "num_eagle_layers" not in checkpoint:
            raise ProgramError("AssertionError")
        _raise_length(config, checkpoint["num_eagle_layers"], "num_eagle_layers")
    least = config["max_batch_size"] * (drafted + 1)
    if config.get("max_num_tokens") is not None and config["max_num_tokens"] < least:
        print(f"[TRT-LLM] [I] New max_num_tokens is set to {least}.")
        config["max_num_tokens"] = least
    if mode == "eagle" and config["max_batch_size"] > 512:
        raise ProgramError("AssertionError: Max batch size > 512 is not supported for EAGLE")
    if mode == "eagle" and drafted > 256:
        raise ProgramError("AssertionError: Max draft len > 256 is not supported for EAGLE")
    if mode == "eagle" and plugins.get("use_paged_context_fmha") != "enable":
        raise refusal("the builder turns use_paged_context_fmha on for EAGLE")


def _raise_length(config: dict[str, Any], tokens: int, name: str) -> None:
    longest = config.get("max_seq_len")
    if longest is not None:
        print(f"[TRT-LLM] [I] Increasing max_seq_len ({longest}) by {name} ({tokens})")
        config["max_seq_len"] = longest + tokens


def limited_num_tokens(config: dict[str, Any], plugins: Mapping[str, Any]) -> None:
    """Move max_num_tokens between one block of the KV cache and a full batch, up to 0.10 a full batch of prompts alone."""
    if config.get("max_num_tokens") is None:
        return
    most = (config.get("max_seq_len") or config["max_input_len"]) * config["max_batch_size"]
    config["max_num_tokens"] = max(min(config["max_num_tokens"], most), plugins.get("tokens_per_block") or 0)


def lora_config(
    table: Mapping[str, Any], options: Mapping[str, Any], checkpoint: Mapping[str, Any], plugins: dict[str, Any]
) -> dict[str, Any]:
    """What the engine says of adapters. Raises ProgramError for a plugin that its layers do not take, or for no layers."""
    plugin = plugins.get("lora_plugin")
    if plugin in {None, "disable"} or "--max_lora_rank" not in table:
        return {}
    plugins["lora_plugin"] = checkpoint["dtype"] if plugin == "auto" else plugin
    if checkpoint["quantization"]["quant_algo"] == "FP8" and plugins["lora_plugin"] != checkpoint["dtype"]:
        raise ProgramError("AssertionError")  # of FP8Linear
    modules = options.get("lora_target_modules")
    if not modules:
        raise refusal("lora_plugin without lora_target_modules; the stand-in does not read them from lora_dir")
    config = {"lora_dir": [], "lora_ckpt_source": "hf", "max_lora_rank": options["max_lora_rank"]}
    return {"lora_config": {**config, "lora_target_modules": list(modules)}}


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ProgramError(f"FileNotFoundError: {error}") from None
    for key in (
        "architecture",
        "dtype",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
    ):
        if key not in config:
            raise ProgramError(f"KeyError: '{key}'")
    for rank in range(int(config["mapping"]["world_size"])):
        file = folder / f"rank{rank}.safetensors"
        if not file.is_file():
            raise ProgramError(f'FileNotFoundError: No such file or directory: "{file}"')
        if not is_whole(file):
            raise ProgramError(
                "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"
            )
    return config


def check(work: Work, checkpoint: Mapping[str, Any], plugins: dict[str, Any]) -> None:
    """Raise ProgramError for what this release refuses on these GPUs. Turns on and off in `plugins` what it would."""
    quantization = checkpoint["quantization"]
    algorithm = quantization["quant_algo"]
    attention = refusals.attention_facts(plugins)
    facts = {
        "sm": work.sm,
        "quant_algo": algorithm,
        "quantized": algorithm is not None,
        "fp8_inputs": algorithm in _FP8_INPUTS,
        "kv_cache": quantization["kv_cache_quant_algo"],
        **{name: plugins.get(name) for name in (*_PLUGINS, "lora_plugin")},
        **attention,
    }
    for row, said in refusals.applied(work.facts["refusals"]["trtllm-build"], facts):
        if row["does"] == "refuses":
            raise ProgramError(said, traceback=not said.startswith("["))
        print(said, file=sys.stderr)
    for name, before in attention.items():
        if facts[name] != before:
            plugins[name] = "enable" if facts[name] else "disable"
