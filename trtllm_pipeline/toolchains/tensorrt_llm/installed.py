"""What the installed programs say of themselves, asked only when a matrix gives them options of its own."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.machine.model import Machine

_TIMEOUT_S: Final = 180.0
"""The programs import all of TensorRT-LLM before they print anything."""


def help_for(machine: Machine, options: Json, *command: str | None) -> str | None:
    """What `command --help` prints, None where there is nothing to check, nothing to ask, or no answer.

    Not asked for an assumed machine: then the recorded tables decide.
    """
    if not options or machine.assumed or command[0] is None:
        return None
    return _help(tuple(str(word) for word in command))


@lru_cache(maxsize=8)
def _help(command: tuple[str, ...]) -> str | None:
    import subprocess

    try:
        ran = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 and ran.stdout.strip() else None
