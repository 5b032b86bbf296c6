"""The rules, one module for each hundred."""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.triton_repository.lint.rule import DEFINED
from trtllm_pipeline.triton_repository.lint.rules import config, engine, ensemble, layout, llmapi, parameters

__all__ = ["RULES", "config", "engine", "ensemble", "layout", "llmapi", "parameters"]

RULES: Final = tuple(sorted(DEFINED, key=lambda rule: rule.id))
