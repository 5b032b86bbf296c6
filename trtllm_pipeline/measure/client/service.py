"""The description of a running server in service.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtllm_pipeline.base import ServerError, user_files


@dataclass(frozen=True, slots=True)
class Service:
    """Endpoints of a running server from service.json. "" for an unknown one."""

    http: str
    grpc: str
    metrics: str | None
    pid: int | None
    model: str
    bls_model: str | None
    kind: str = "triton"
    """`triton`, or `openai`, whose `http` is a URL."""
    endpoint: str = "completions"
    """Endpoint of an OpenAI server: `completions`, or `chat` if it has only that."""
    lists_models: bool = True
    """True if the model list of an OpenAI server includes `model`."""
    version: str | None = None
    """Version of the server, from the stage that started it."""
    started: bool = True
    """False for a server that was started externally."""

    @classmethod
    def read(cls, path: Path) -> Service:
        """The service described by `path`. Raises ServerError if it is not a valid service.json."""
        try:
            raw = user_files.decode_mapping(path.read_bytes())
            return cls(
                raw.get("url", raw["http"]),
                raw["grpc"],
                raw.get("metrics"),
                raw.get("pid"),
                raw["model"],
                raw.get("bls_model"),
                raw.get("kind", "triton"),
                raw.get("endpoint", "completions"),
                raw.get("lists_models", True),
                (raw.get("server") or {}).get("version"),
                raw.get("started", True),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{path} does not describe a running server: {type(error).__name__}: {error}",
                hint="start one: pipeline stage launch --repository DIR",
            ) from error
