"""The linter of Triton model repositories: what is wrong with a folder before any server reads it.

`lint` works on any repository. It knows more about those of TensorRT-LLM: the engine behind them, the five models'
parameters, `model.yaml`. Every rule has an id that stays (`TRT304`), a name, a severity and a hint; they stand in
`rules/`, one module for each hundred.
"""

from __future__ import annotations

from trtllm_pipeline.triton_repository.engine import Engine, EngineError
from trtllm_pipeline.triton_repository.lint.check import RULES, lint, select
from trtllm_pipeline.triton_repository.lint.rule import Finding, LintRule, Severity

__all__ = ["RULES", "Engine", "EngineError", "Finding", "LintRule", "Severity", "lint", "select"]
