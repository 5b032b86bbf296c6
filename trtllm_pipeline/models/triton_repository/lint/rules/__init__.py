"""The rules, one module for each hundred."""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.models.triton_repository.lint.rule import DEFINED
from trtllm_pipeline.models.triton_repository.lint.rules import (
    config_pbtxt,
    engine_model,
    ensemble,
    layout,
    llmapi_model,
    parameters,
)

__all__ = ["RULES", "config_pbtxt", "engine_model", "ensemble", "layout", "llmapi_model", "parameters"]

RULES: Final = tuple(sorted(DEFINED, key=lambda rule: rule.id))
