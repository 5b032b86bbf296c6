"""What `config.json` of an engine folder says, as far as a repository around it must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_pipeline.errors import PipelineError
from trtllm_pipeline.files.model_files import ModelFileError, read_json
from trtllm_pipeline.triton_repository.engine_limits import EngineLimits


class EngineError(PipelineError):
    """A folder is not an engine folder."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine folder of `trtllm-build`. What its config does not say is None."""

    folder: Path
    version: str | None
    """TensorRT-LLM release that built it."""
    world_size: int
    """Ranks, tp_size * pp_size."""
    dtype: str | None
    logits_dtype: str | None
    max_batch_size: int | None
    max_beam_width: int | None
    max_seq_len: int | None
    """Tokens of prompt and answer together."""
    paged_kv_cache: bool | None
    paged_context_fmha: bool | None

    @property
    def rank_files(self) -> tuple[Path, ...]:
        """The files that must be there: one engine for each rank."""
        return tuple(self.folder / f"rank{rank}.engine" for rank in range(self.world_size))

    @staticmethod
    def read(folder: Path) -> Engine:
        """The engine in `folder`. Raises EngineError for a folder that `trtllm-build` did not write."""
        path = folder / "config.json"
        try:
            config = read_json(folder, path.name)
        except ModelFileError as error:
            raise EngineError(
                f"{folder} is not an engine folder: {error.short}", hint="name the folder trtllm-build wrote"
            ) from error
        if not isinstance(config, dict) or not {"pretrained_config", "build_config"} <= config.keys():
            raise EngineError(
                f"{path} has no pretrained_config and build_config: trtllm-build did not write it",
                hint="name the folder trtllm-build wrote, not a checkpoint",
            )
        model, build = _section(config, "pretrained_config"), _section(config, "build_config")
        mapping, plugins = _section(model, "mapping"), _section(build, "plugin_config")
        layout = _int(mapping, "tp_size", 1) * _int(mapping, "pp_size", 1) * _int(mapping, "cp_size", 1)
        return Engine(
            folder=folder,
            version=_text(config, "version"),
            world_size=_int(mapping, "world_size", layout),
            dtype=_text(model, "dtype"),
            logits_dtype=_text(model, "logits_dtype"),
            max_batch_size=build.get("max_batch_size"),
            max_beam_width=build.get("max_beam_width"),
            max_seq_len=EngineLimits.read(folder).max_seq_len,
            paged_kv_cache=_paged(build, plugins),
            paged_context_fmha=plugins.get("use_paged_context_fmha"),
        )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _text(config: Mapping[str, Any], name: str) -> str | None:
    return None if config.get(name) is None else str(config[name])


def _int(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else default


def _paged(build: Mapping[str, Any], plugins: Mapping[str, Any]) -> bool | None:
    """`kv_cache_type` from release 0.13 on, a plugin's switch before."""
    kind = build.get("kv_cache_type")
    if isinstance(kind, str):
        return kind.lower() == "paged"
    switch = plugins.get("paged_kv_cache")
    return switch if isinstance(switch, bool) else None
