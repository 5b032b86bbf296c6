"""What smoke, perf and accuracy have in common when they ask a server."""

from __future__ import annotations

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.perf.prompts import Prompt
from trtllm_pipeline.serving.client import Generation, Option
from trtllm_pipeline.stages.base import Work


def sampling(temperature: float, *, seed: int) -> dict[str, Option]:
    """Input tensors for a temperature; 0 is greedy, which TensorRT-LLM calls top_k 1."""
    return {"top_k": 1} if temperature == 0 else {"temperature": temperature, "random_seed": seed}


def generation(prompt: Prompt, *, max_tokens: int, temperature: float, seed: int) -> Generation:
    """The request for one line of a prompt file; what the line says goes before the stage's parameters."""
    options = sampling(temperature, seed=seed)
    if prompt.stop_words:
        options["stop_words"] = prompt.stop_words
    return Generation(prompt.text, prompt.max_tokens or max_tokens, options)


def number(work: Work, name: str, default: float | None = None) -> float:
    """Parameter `name` of a stage as a number; `default` when it is not given or None. Raises StageError otherwise."""
    value: Json = work.params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StageError(f"{name}: expected a number, got {value!r}", failure=FailureClass.USER)
    return value
