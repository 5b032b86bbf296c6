"""What programs of stages are given, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trtllm_pipeline.orchestrate.matrix.derive import model_of
from trtllm_pipeline.orchestrate.matrix.document import Document, check
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import load

P = TypeVar("P")


def context(
    cls: type[P],
    params: Mapping[str, Any],
    inputs: Mapping[str, Path],
    files: Mapping[str, Path],
    out: Path,
    attempt: Path,
) -> StageContext[P]:
    """A context with parameters of `cls` as a job file holds them."""
    return StageContext(load(cls, params), inputs, files, out, attempt)


def faults(cls: Any, **values: Any) -> str:
    """What is wrong with values that were typed, as the verb of a stage says it; "" where nothing is."""
    _, found = check(model_of(cls), Document("", values))
    return "\n".join(f"{fault.key}: {fault.message}" for fault in found)
