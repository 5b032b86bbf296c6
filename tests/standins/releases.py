"""Which options a program had in a given release, from what was recorded of releases before and after it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

RECORDED: Final = Path(__file__).resolve().parents[1] / "data" / "tensorrt_llm" / "recorded.json"
FIRST_WITHOUT_ENGINES: Final = Version("1.3.0rc21")
"""1.3.0rc20 calls itself the last with the TensorRT backend."""
FIRST_SERVE: Final = Version("0.15.0")
FIRST_NESTED_EXAMPLES: Final = Version("0.20.0")
"""From here on `examples/models/core/FAMILY`; before, `examples/FAMILY`."""
HEADS: Final = ("medusa", "eagle")
"""Converters that are no family's: `examples/medusa` in every release."""
SERVE: Final = "trtllm-serve"
BENCH: Final = "trtllm-bench"
_NEWEST: Final = "1.3.0rc29"
_LATE: Final = (
    *("--agent_percentage", "--agent_types", "--enable_visual_gen", "--generation-config", "--grpc-protocol"),
    *("--num_input_processor_workers", "--num_media_load_workers", "--num_serve_frontends", "--post_processor_hook"),
    *("--report_addr", "--fail_fast_on_attention_window_too_large"),
)
"""Options of `trtllm-serve serve` that came or went between 1.3.0rc20 and 1.3.0rc29."""

Options = dict[str, dict[str, Any]]
Table = dict[str, Options]
"""Options by subcommand; those of a program without subcommands are under its own name."""


@dataclass(frozen=True, slots=True)
class Between:
    """A release that was not recorded, but whose differences from one that was are known from its release notes."""

    base: str
    other: str = ""
    names: tuple[str, ...] = ()
    """Options that are as in `other` (so absent when absent there), not as in `base`."""


_BETWEEN: Final[dict[str, dict[str, Between]]] = {
    "trtllm-build": {
        "0.9.0": Between(
            "0.8.0",
            "0.10.0",
            (
                *("--tp_size", "--pp_size", "--auto_parallel", "--gpus_per_node", "--cluster_key", "--lora_dir"),
                *("--lora_ckpt_source", "--lora_target_modules", "--max_lora_rank", "--opt_num_tokens"),
                *("--max_draft_len", "--multiple_profiles", "--use_fp8_context_fmha", "--paged_state"),
                *("--streamingllm", "--moe_plugin", "--mamba_conv1d_plugin", "--input_timing_cache"),
                *("--output_timing_cache", "--timing_cache"),
            ),
        ),
        "0.13.0": Between(
            "0.12.0",
            "0.14.0",
            ("--kv_cache_type", "--low_latency_gemm_plugin", "--paged_kv_cache", "--use_fused_mlp", "--workers"),
        ),
        "0.15.0": Between(
            "0.14.0",
            "0.16.0.dev2024121000",
            (
                *("--monitor_memory", "--pp_reduce_scatter", "--low_latency_gemm_swiglu_plugin"),
                *("--builder_force_num_profiles", "--lookup_plugin"),
            ),
        ),
        "0.17.0": Between("0.18.2"),
        "0.19.0": Between("0.20.0"),
        "0.21.0": Between("1.0.0"),
    },
    "quantize.py": {
        "0.15.0": Between("0.14.0", "0.16.0.dev2024121000", ("--auto_quantize_bits",)),
        "0.17.0": Between("main@059c97c"),
        "0.20.0": Between("main after 0.19 (commit c8c6df0)"),
    },
    "convert_checkpoint.py:llama": {
        "0.15.0": Between("0.14.0", "0.16.0.dev2024121000", ("--dtype", "--weight_only_precision")),
        "1.2.0": Between("0.16.0.dev2024121000", "main after 1.1.0rc6 (commit fd96a08)", ("--use_nvfp4",)),
    },
    SERVE: {
        "0.15.0": Between("0.16.0.dev2024121000"),
        "0.17.0": Between("0.18.2"),
        "0.19.0": Between("0.20.0", "0.18.2", ("serve --cluster_size", "serve --reasoning_parser")),
        "0.21.0": Between("1.0.0", "0.20.0", ("serve --backend", "serve --fail_fast_on_attention_window_too_large")),
        "1.1.0": Between("1.1.0rc6", "1.2.0", ("serve --backend",)),
        "1.3.0rc7": Between("1.3.0rc3", _NEWEST, ("serve --served_model_name", "serve --kv_cache_dtype")),
        "1.3.0rc20": Between(_NEWEST, "1.3.0rc3", tuple(f"serve {name}" for name in (*_LATE, "--backend"))),
        str(FIRST_WITHOUT_ENGINES): Between(_NEWEST, "1.3.0rc3", tuple(f"serve {name}" for name in _LATE)),
    },
}


@lru_cache(maxsize=1)
def _recorded() -> dict[str, list[dict[str, Any]]]:
    tools: dict[str, list[dict[str, Any]]] = json.loads(RECORDED.read_text(encoding="utf-8"))["tools"]
    bench = json.loads(RECORDED.with_name("bench.json").read_text(encoding="utf-8"))
    return {**tools, BENCH: bench["entries"]}


def families() -> tuple[str, ...]:
    """Model families whose `convert_checkpoint.py` was recorded."""
    prefix = "convert_checkpoint.py:"
    return tuple(tool.removeprefix(prefix) for tool in _recorded() if tool.startswith(prefix))


def table(tool: str, release: str) -> Table | None:
    """The options of `tool` in `release`: recorded of it, known to differ from a recorded one, or those of the nearest
    release before it. None where it had no such program.
    """
    wanted = Version(release)
    known: dict[Version, Table] = {}
    for name in reversed(list(_usable(tool))):  # of two records of a release the first one counts
        for alias in (name, *_usable(tool)[name].get("also_valid_for", ())):
            try:
                known[Version(alias)] = _table(tool, name)
            except InvalidVersion:
                continue
    for name, between in _BETWEEN.get(tool, {}).items():
        known.setdefault(Version(name), _between(tool, between))
    before = [version for version in known if version <= wanted]
    return known[max(before)] if before else None


def _usable(tool: str) -> dict[str, dict[str, Any]]:
    """Whole entries by release. Where a recorded source tree lacks a program, nothing is known of its options."""
    entries: dict[str, dict[str, Any]] = {}
    for entry in _recorded()[tool]:
        if not entry.get("partial") and not entry.get("none"):
            entries.setdefault(entry["release"], entry)
    return entries


def _table(tool: str, name: str) -> Table:
    entry = _usable(tool)[name]
    table: Table = entry.get("subcommands") or {tool: entry["options"]}
    return table


def _between(tool: str, between: Between) -> Table:
    table = {command: dict(options) for command, options in _table(tool, between.base).items()}
    other = _table(tool, between.other) if between.other else {}
    for name in between.names:
        command, _, option = name.rpartition(" ")
        command = command or tool
        table[command].pop(option, None)
        if option in other.get(command, {}):
            table[command][option] = other[command][option]
    return table
