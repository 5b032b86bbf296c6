"""The worker as a separate program, under the Python that has Model Optimizer.

That is often not the pipeline's Python: TensorRT-LLM's environment has package versions that the pipeline cannot use, and
the other way round. So the worker is started by the path of its file (`__main__.py` explains how its modules are found),
and beyond the standard library it imports only packages that Model Optimizer needs itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.tensorrt.stage.base import JOB, StageContext

_PROGRAM: Final = Path(__file__).resolve().with_name("__main__.py")


def command(context: StageContext[Any], python: str) -> list[str]:
    """The command line that runs an attempt's job file with the interpreter `python`."""
    return [python, str(_PROGRAM), str(context.attempt / JOB)]
