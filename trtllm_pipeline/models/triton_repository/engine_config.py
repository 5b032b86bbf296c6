"""Reads the config.json of an engine directory, for the linter, before a launch, and before requests are sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, ServerError, StageError
from trtllm_pipeline.models.files.model_files import Fields, ModelFileError
from trtllm_pipeline.models.triton_repository.model_config import FLOAT_TYPES

_MODES: Final = {
    "2": "draft_tokens_external",
    "4": "medusa",
    "8": "lookahead_decoding",
    "16": "explicit_draft_tokens",
    "32": "eagle",
}
"""Value of SpeculativeDecodingMode in config.json -> its name."""


def speculation_of(build: Fields) -> str | None:
    """How an engine drafts tokens according to its `build_config`, by trtllm-build's name. None if it does not."""
    value = str(build.values.get("speculative_decoding_mode", 1))
    return None if value in {"0", "1", "NONE", "None"} else _MODES.get(value, value.lower())


class EngineError(ServerError):
    """A directory is not an engine directory."""


_OFF = (None, False, "disable")
"""Values for a disabled plugin."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine directory as described by its config.json. None for values that the file lacks.

    Engines of the embedded toolchain and directories of weights have fewer of the fields.
    """

    folder: Path
    version: str | None = None
    """TensorRT-LLM release that built it."""
    world_size: int = 1
    """Number of ranks."""
    parallel_size: int = 1
    """tp_size * pp_size * cp_size, which must equal `world_size`."""
    dtype: str | None = None
    logits_dtype: str | None = None
    max_batch_size: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int | None = None
    tokens_per_block: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    """Tokens of prompt and output together, without the extra length that trtllm-build adds for draft tokens."""
    speculation: str | None = None
    """How it drafts tokens, by trtllm-build's name. None if it does not."""
    max_draft_len: int = 0
    """Tokens drafted at a time."""
    paged_kv_cache: bool | None = None
    paged_context_fmha: bool | None = None
    max_lora_rank: int | None = None
    """Largest rank of its LoRA adapters. None if it does not accept any."""
    lora_target_modules: tuple[str, ...] = ()
    lora_dirs: tuple[str, ...] = ()
    """Directories of its built-in adapters."""

    @classmethod
    def read(cls, folder: Path, *, max_seq_len: int | None = None) -> Engine:
        """The engine in `folder`. Raises EngineError.

        `max_seq_len` is used if the file has none: a directory of weights is served with its server's limit.
        """
        try:
            return cls._of(folder, Fields.read(folder, "config.json"), max_seq_len)
        except ModelFileError as error:
            raise EngineError(
                f"{folder} is not an engine directory: {error.short}",
                failure=FailureClass.USER,
                hint="build an engine with `pipeline stage build` or trtllm-build",
            ) from error

    @classmethod
    def of_trtllm_build(cls, folder: Path) -> Engine:
        """The same, for a directory written by `trtllm-build`. Raises EngineError for any other."""
        engine = cls.read(folder)
        if not {"pretrained_config", "build_config"} <= Fields.read(folder, "config.json").values.keys():
            raise EngineError(
                f"{folder / 'config.json'} has no pretrained_config and build_config: trtllm-build did not write it",
                failure=FailureClass.USER,
                hint="name the directory that trtllm-build wrote, not a checkpoint",
            )
        return engine

    @classmethod
    def _of(cls, folder: Path, config: Fields, max_seq_len: int | None) -> Engine:
        model, build = config.fields("pretrained_config"), config.fields("build_config")
        mapping, plugins = model.fields("mapping"), build.fields("plugin_config")
        parallel_size = math.prod(mapping.integer(name, 1) for name in ("tp_size", "pp_size", "cp_size"))
        max_input_len, longest = build.optional_integer("max_input_len"), build.optional_integer("max_seq_len")
        mode = speculation_of(build)
        drafted = (build.optional_integer("max_draft_len") or 0) if mode else 0
        if longest is not None:
            # Builder: "Increasing max_seq_len by max_draft_len", and for EAGLE by its layers.
            longest -= drafted + (model.integer("num_eagle_layers", 0) if mode == "eagle" else 0)
        answer = build.optional_integer("max_output_len")  # written by releases up to 0.10
        if longest is None and max_input_len is not None and answer is not None:
            longest = max_input_len + answer
        version, paged = config.values.get("version"), plugins.values.get("paged_kv_cache")
        if build.has("kv_cache_type"):  # from release 0.13 on
            paged = str(build.values["kv_cache_type"]).lower() == "paged"
        fmha = plugins.values.get("use_paged_context_fmha")
        lora = build.fields("lora_config") if plugins.values.get("lora_plugin") not in _OFF else None
        return cls(
            folder,
            version=None if version is None else str(version),
            world_size=mapping.integer("world_size", parallel_size),
            parallel_size=parallel_size,
            dtype=model.text("dtype"),
            logits_dtype=model.text("logits_dtype"),
            max_batch_size=build.optional_integer("max_batch_size"),
            max_beam_width=build.optional_integer("max_beam_width"),
            max_num_tokens=build.optional_integer("max_num_tokens"),
            tokens_per_block=plugins.optional_integer("tokens_per_block"),
            max_input_len=max_input_len,
            max_seq_len=max_seq_len if longest is None else longest,
            speculation=mode,
            max_draft_len=drafted,
            paged_kv_cache=paged if isinstance(paged, bool) else None,
            paged_context_fmha=fmha if isinstance(fmha, bool) else None,
            max_lora_rank=None if lora is None else lora.optional_integer("max_lora_rank"),
            lora_target_modules=() if lora is None else tuple(lora.texts("lora_target_modules")),
            lora_dirs=() if lora is None else tuple(lora.texts("lora_dir")),
        )

    @property
    def logits_type(self) -> str | None:
        """Triton's name for the data type of its logits."""
        return FLOAT_TYPES.get(self.logits_dtype or "")

    @property
    def rank_files(self) -> tuple[Path, ...]:
        """The required engine files, one for each rank."""
        return tuple(self.folder / f"rank{rank}.engine" for rank in range(self.world_size))

    def longest_prompt(self, output_tokens: int) -> int | None:
        """Maximum number of prompt tokens for a response of `output_tokens`. None if no limit is known."""
        known = (self.max_input_len, self.max_seq_len - output_tokens if self.max_seq_len else None)
        return min((limit for limit in known if limit is not None), default=None)

    def check_lengths(self, requests: Iterable[tuple[str, int, int]]) -> None:
        """Raise StageError if any (id, input tokens, output tokens) exceeds the engine's limits. The message names the
        longest.
        """
        too_long = [
            (over, id_, tokens, output, limit, name)
            for id_, tokens, output in requests
            for over, name, limit in (
                (tokens - self.max_input_len if self.max_input_len else 0, "max_input_len", self.max_input_len),
                (tokens + output - self.max_seq_len if self.max_seq_len else 0, "max_seq_len", self.max_seq_len),
            )
            if over > 0
        ]
        if too_long:
            _, id_, tokens, output, limit, name = max(too_long)
            raise StageError(
                f"{len({item[1] for item in too_long})} prompts do not fit the engine; the longest, {id_!r}, has "
                f"{tokens} tokens and requests {output} more, and the engine's {name} is {limit}",
                failure=FailureClass.INFEASIBLE,
                hint="shorten the prompts, request fewer tokens, or build for longer lengths",
            )
