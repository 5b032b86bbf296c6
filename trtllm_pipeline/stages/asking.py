"""What smoke, perf and accuracy have in common when they ask a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.client.service import Service
from trtllm_pipeline.files.model_files import find, read_tokenizer

if TYPE_CHECKING:
    from trtllm_pipeline.evaluate.answers import Encode


def protocol_for(service: Service, wanted: str = "grpc") -> str:
    """The protocol to ask `service` over: the one that is wanted of Triton, bare completions of an OpenAI server."""
    return "openai_completions" if service.kind == "openai" else wanted


def encoder(engine: Path) -> Encode | None:
    """Text to tokens, without special ones, as the tokenizer beside the engine does it; None where there is none."""
    if find(engine, "tokenizer.json") is None:
        return None
    tokenizer = read_tokenizer(engine)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
