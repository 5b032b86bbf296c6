"""What smoke, perf and accuracy have in common when they ask a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.client.service import Service
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.model_files import find, read_tokenizer
from trtllm_pipeline.stages.base import Work

if TYPE_CHECKING:
    from trtllm_pipeline.evaluate.ask import Encode


def protocol_for(service: Service, wanted: str = "grpc") -> str:
    """The protocol to ask `service` over: the one that is wanted of Triton, bare completions of an OpenAI server."""
    return "openai_completions" if service.kind == "openai" else wanted


def number(work: Work, name: str, default: float | None = None) -> float:
    """Parameter `name` of a stage as a number; `default` when it is not given or None. Raises StageError otherwise."""
    value: Json = work.params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StageError(f"{name}: expected a number, got {value!r}", failure=FailureClass.USER)
    return value


def encoder(engine: Path) -> Encode | None:
    """Text to tokens, without special ones, as the tokenizer beside the engine does it; None where there is none."""
    if find(engine, "tokenizer.json") is None:
        return None
    tokenizer = read_tokenizer(engine)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
