"""Conditions of measurements that never took place."""

from __future__ import annotations

import dataclasses
from typing import Any

from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.measure.load.conditions import Conditions

SYSTEM: dict[str, Json] = {
    "server_on": "this machine",
    "cpu": "AMD EPYC 9654",
    "cores": 16,
    "memory_gib": 128,
    "gpus": ["NVIDIA H200, 140 GiB"],
    "driver": "570.86.15",
    "cuda": "12.8",
    "server": "triton 2.61.0",
    "triton": "2.61.0",
    "tensorrt_llm": "1.0.0",
    "xllamacpp": None,
    "torch": "2.7.1",
    "model_optimizer": None,
    "os": "Ubuntu 24.04.2 LTS",
    "kernel": "Linux 6.8.0",
    "python": "3.12.3",
    "pipeline": "0.1.0",
    "commit": "0123456789ab",
}
LEVELS = (1, 2, 4, 8, 16)
WORKLOAD: dict[str, Json] = {
    "prompts": 24,
    "prompts_digest": "sha256:" + "ab" * 32,
    "synthetic": None,
    "max_tokens": [64, 64],
    "sampling": {"temperature": 0.0},
    "protocol": "grpc",
    "levels": [
        {
            "concurrency": level,
            "request_rate": None,
            "requests": 40,
            "warmup_requests": 2 * level,
            "repeats": 3,
            "arrivals_digest": None,
        }
        for level in LEVELS
    ],
}
QUESTIONS: dict[str, Json] = {"digest": "sha256:" + "cd" * 32, "max_tokens": 32}
CONDITIONS = Conditions(1_790_000_000.0, SYSTEM, WORKLOAD, QUESTIONS)


def other(about: str, **changes: Any) -> Conditions:
    """CONDITIONS with some fields of `about` changed."""
    return dataclasses.replace(CONDITIONS, **{about: {**getattr(CONDITIONS, about), **changes}})
