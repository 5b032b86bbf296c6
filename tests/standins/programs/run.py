"""`examples/run.py`: one answer from an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.standins.programs import ProgramError, Work, arguments, refusal
from tests.standins.programs.build import MODES
from tests.standins.programs.engine import check_tokenizer, read_engine


def _check_adapters(built: Mapping[str, Any], options: Mapping[str, Any], engine: Path) -> None:
    """An engine with lora_plugin does not load without adapters. Source: `ModelRunnerCpp.from_dir` of model_runner_cpp.py."""
    folders = options.get("lora_dir")
    if "lora_config" not in built:
        return
    if not folders:
        raise ProgramError(
            f"RuntimeError: LoRA weights are unspecified and also unavailable in the engine_dir ({engine})."
        )
    for folder in folders:
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ProgramError(f"ValueError: {folder}/adapter_config.json does not exist")


def _check_speculation(mode: int | None, options: Mapping[str, Any]) -> None:
    """Raise ProgramError for an engine that drafts and is not told what it takes. Source: READMEs of the examples."""
    if mode == MODES["draft_tokens_external"] and not options.get("kv_cache_enable_block_reuse"):
        words = "KV cache block reuse must be enabled for speculative decoding target model"
        raise ProgramError(f"RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: {words}")
    if mode == MODES["lookahead_decoding"] and not options.get("lookahead_config"):
        raise refusal("an engine with lookahead decoding takes --lookahead_config")
    if mode == MODES["medusa"] and not options.get("medusa_choices"):
        raise refusal("an engine with Medusa heads takes --medusa_choices")


def run(work: Work, argv: Sequence[str]) -> int:
    """Answer the input text."""
    options = arguments.parse("run.py", work.facts["tools"][work.tool][work.tool], argv)
    if options.get("input_file") is None:
        check_tokenizer(options["tokenizer_dir"])
    if not work.gpus:
        raise ProgramError("RuntimeError: No CUDA GPUs are available")
    config = read_engine(work, Path(options["engine_dir"]), ranks=work.ranks)
    _check_speculation(config["build_config"].get("speculative_decoding_mode"), options)
    _check_adapters(config["build_config"], options, Path(options["engine_dir"]))
    work.begin()
    if work.rank == 0:
        built, asked = config["build_config"], options["max_output_len"]
        limit = built.get("max_seq_len") or built["max_input_len"] + built["max_output_len"]
        for index, text in enumerate(options["input_text"]):
            words = text.split() or ["nothing"]
            if len(words) + asked > limit:
                # Source: `_check_inputs` of model_runner_cpp.py.
                raise ProgramError(
                    f"RuntimeError: Maximum input length ({len(words)}) + maximum new tokens ({asked}) exceeds the engine or "
                    f"specified limit ({limit})"
                )
            answer = " ".join(words[i % len(words)] for i in range(asked))
            print(f'Input [Text {index}]: "{text}"\nOutput [Text {index} Beam 0]: "{answer}"')
    return 0
