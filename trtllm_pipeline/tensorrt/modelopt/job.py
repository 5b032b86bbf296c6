"""The worker as a program of its own, under whichever Python has Model Optimizer.

That is often not the pipeline's: TensorRT-LLM's environment holds versions of packages that the pipeline cannot use, and
the other way round. So the worker is started by the path of its file (`__main__.py` says how its modules are found), and
all that it imports beyond the standard library are packages that Model Optimizer needs itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.tensorrt.stage.base import JOB, StageContext

_PROGRAM: Final = Path(__file__).resolve().with_name("__main__.py")


def command(context: StageContext[Any], python: str) -> list[str]:
    """The command line that does the work of an attempt's job file under the interpreter `python`."""
    return [python, str(_PROGRAM), str(context.attempt / JOB)]
