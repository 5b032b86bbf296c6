"""Secrets in the environment. Only processes that use a secret get it: servers, builders and their guardians do not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

_HUBS: Final = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN"})
_OURS: Final = frozenset(
    {"PIPELINE_SIGNING_PASSPHRASE", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"}
)
"""Used by the commands themselves."""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for programs that do not download."""
    return {name: value for name, value in environment.items() if name not in _HUBS and name not in _OURS}


def hub_tokens() -> dict[str, str]:
    """Tokens of model hubs from our environment, for a program that downloads."""
    return {name: os.environ[name] for name in sorted(_HUBS) if name in os.environ}
