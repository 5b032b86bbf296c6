"""The OpenAI endpoint in front of served cells: `pipeline serve gateway`, `pipeline serve start --openai`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtllm_pipeline.base import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig
    from trtllm_pipeline.serve.gateway.gateway_server import Announce


def run(config: GatewayConfig, folder: Path, announce: Announce) -> None:
    """Runs `server.run`. Raises UsageError if a required package is missing."""
    require_packages()
    from trtllm_pipeline.serve.gateway import gateway_server

    gateway_server.run(config, folder, announce)


def require_packages() -> None:
    """Raises UsageError if a required package is missing."""
    try:
        import trtllm_pipeline.serve.gateway.gateway_server  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"the gateway needs the package {error.name}", hint="pip install 'trtllm-pipeline[gateway]'"
        ) from error
