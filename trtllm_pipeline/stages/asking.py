"""What smoke, perf and accuracy have in common when they ask a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.client.service import Service
from trtllm_pipeline.client.session import Option
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.model_files import find, read_tokenizer

if TYPE_CHECKING:
    from trtllm_pipeline.evaluate.answers import Encode


ADAPTER: Final = "adapter"
"""The input with a LoRA adapter."""


def protocol_for(service: Service, wanted: str = "grpc", *, images: bool = False) -> str:
    """The protocol to ask `service` over: the one that is wanted of Triton, bare completions of an OpenAI server, and chat
    of one that is asked with images. Raises StageError for images where there is no chat.
    """
    if images and service.kind != "openai":
        raise StageError(
            "the prompts have images, which only the chat of an OpenAI server takes; this is Triton",
            failure=FailureClass.USER,
            hint="settings.serve.frontend: trtllm_serve",
        )
    if images:
        return "openai_chat"
    return "openai_completions" if service.kind == "openai" else wanted


def encoder(engine: Path) -> Encode | None:
    """Text to tokens, without special ones, as the tokenizer beside the engine does it; None where there is none."""
    if find(engine, "tokenizer.json") is None:
        return None
    tokenizer = read_tokenizer(engine)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def adapter_request(inputs: Mapping[str, Path]) -> dict[str, Option]:
    """What every request to trtllm-serve says of the LoRA adapter among a stage's inputs; nothing without one.

    Source: `lora_request` of the server's protocol, and LoRARequest.
    """
    if ADAPTER not in inputs:
        return {}
    return {"lora_request": {"lora_name": ADAPTER, "lora_int_id": 1, "lora_path": str(inputs[ADAPTER])}}
