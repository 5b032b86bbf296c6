"""What smoke, perf and accuracy have in common when they ask a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.serving.client import Service
from trtllm_pipeline.stages.base import Work

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def protocol_for(service: Service, wanted: str = "grpc") -> str:
    """The protocol to ask `service` over: the one that is wanted of Triton, bare completions of an OpenAI server."""
    return "openai_completions" if service.kind == "openai" else wanted


def read_tokenizer(engine: Path) -> Tokenizer:
    """The tokenizer in an engine folder. Raises StageError when there is none, or none that can be read."""
    from tokenizers import Tokenizer

    path = engine / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise StageError(
            f"{path} cannot be read as a tokenizer: {error}",
            failure=FailureClass.USER,
            hint="--engine takes a folder that `pipeline build` left",
        ) from error


def number(work: Work, name: str, default: float | None = None) -> float:
    """Parameter `name` of a stage as a number; `default` when it is not given or None. Raises StageError otherwise."""
    value: Json = work.params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StageError(f"{name}: expected a number, got {value!r}", failure=FailureClass.USER)
    return value


Encode = Callable[[str], tuple[int, ...]]


def encoder(engine: Path) -> Encode | None:
    """Text to tokens, without special ones, as the tokenizer beside the engine does it; None where there is none."""
    if not (engine / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)
