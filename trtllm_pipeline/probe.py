"""What this machine has."""

from __future__ import annotations

from functools import lru_cache

from trtllm_pipeline.machine import Machine, cpu_count, cpu_name


@lru_cache(maxsize=1)
def machine() -> Machine:
    """This machine."""
    return Machine(cpus=cpu_count(), cpu=cpu_name())
