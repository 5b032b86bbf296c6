"""TensorRT-LLM as installed on a machine. Imports nothing of the toolchain, because programs of stages use it too."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, Machine, StageError, TensorRTLLM

_NESTED: Final = "models/core/"


def installed(machine: Machine) -> TensorRTLLM:
    """TensorRT-LLM on a machine that has it: for planned work, `missing` and `infeasible` ran first.

    Raises StageError if a stage was started manually on a machine without it.
    """
    if machine.tensorrt_llm is None:
        raise StageError(
            "TensorRT-LLM is not installed here",
            failure=FailureClass.USER,
            hint="pipeline doctor shows what is missing",
        )
    return machine.tensorrt_llm


def script(machine: Machine, inside: str) -> str | None:
    """Path of an example script of the installed release. None if there are none.

    Scripts of families moved into `models/core` with 0.20, or a little earlier: the files decide.
    """
    examples = installed(machine).examples
    if examples is None:
        return None
    path = Path(examples) / inside
    other = Path(examples) / (inside.removeprefix(_NESTED) if inside.startswith(_NESTED) else f"{_NESTED}{inside}")
    return str(other if not machine.assumed and not path.exists() and other.exists() else path)
