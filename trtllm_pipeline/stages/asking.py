"""What smoke, perf and accuracy have in common when they ask a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.client.service import Service
from trtllm_pipeline.client.session import GenerationRequest, InputTensor, Option
from trtllm_pipeline.client.triton import Client, ServedModel, failure_class, sampling
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files.model_files import find, read_tokenizer
from trtllm_pipeline.serving.command_lines import BLS_MODEL
from trtllm_pipeline.stages.lora import TRITON_TYPES
from trtllm_pipeline.triton_repository.engine import Engine

if TYPE_CHECKING:
    from trtllm_pipeline.evaluate.answers import Encode
    from trtllm_pipeline.stages.lora_tensors import LoraTensors


_EXTERNAL: Final = "draft_tokens_external"
ADAPTER: Final = "adapter"
"""The input with a LoRA adapter."""
TASK: Final = 1
"""The number by which servers know it."""
_FIRST_PROMPT: Final = "Hello"


def model_folder(inputs: Mapping[str, Path]) -> Path:
    """The folder with tokenizer and chat template; by hand that of the engine, where no other was named."""
    return inputs.get("model") or inputs["engine"]


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


def encoder(model: Path) -> Encode | None:
    """Text to tokens, without special ones, as the tokenizer of a folder does it; None where there is none."""
    if find(model, "tokenizer.json") is None:
        return None
    tokenizer = read_tokenizer(model)
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False).ids)


async def request_options(service: Service, inputs: Mapping[str, Path], timeout_s: float) -> dict[str, Option]:
    """What every request to a server says beside its prompt: how many tokens to draft, and which adapter."""
    return {**draft_options(service, inputs), **await adapter_options(service, inputs, timeout_s)}


def draft_options(service: Service, inputs: Mapping[str, Path]) -> dict[str, Option]:
    """What every request to an engine says that has a draft model beside it, which requests alone ask for; else nothing.

    Answers are not streamed then, and have to be said not to be. Source: decode.py of tensorrt_llm_bls.
    """
    if service.model != BLS_MODEL:
        return {}
    engine = Engine.read(inputs["engine"])
    return {} if engine.speculation != _EXTERNAL else {"num_draft_tokens": engine.max_draft_len, "stream": False}


async def adapter_options(service: Service, inputs: Mapping[str, Path], timeout_s: float) -> dict[str, Option]:
    """What every request says of the LoRA adapter among a stage's inputs; nothing without one.

    An engine in Triton is sent the adapter here, once: its backend keeps it under a number, and takes that alone from then
    on, over every protocol. Other servers load the folder themselves. Raises StageError for one that takes no adapters.

    Source: `lora_request` of trtllm-serve's protocol; inputs of the Triton models `llmapi` and `inflight_batcher_llm`.
    """
    if ADAPTER not in inputs:
        return {}
    folder = inputs[ADAPTER]
    if service.kind == "openai":
        return {"lora_request": {"lora_name": ADAPTER, "lora_int_id": TASK, "lora_path": str(folder)}}
    async with Client(service, service.model, "grpc", timeout_s=timeout_s) as client:
        if client.model.takes("lora_task_id"):
            from trtllm_pipeline.stages.lora_tensors import convert

            await _send(client, convert(folder, _data_type(inputs["engine"], client.model)))
            return {"lora_task_id": TASK}
        if client.model.takes("lora_path"):
            return {"lora_id": TASK, "lora_name": ADAPTER, "lora_path": str(folder)}
    raise StageError(
        f"model {service.model} has no input for LoRA adapters",
        failure=FailureClass.USER,
        hint="the templates of the release decide; settings.serve.frontend: trtllm_serve has one",
    )


def _data_type(engine: Path, model: ServedModel) -> str:
    """Of the engine, in which the adapter has to be. Raises StageError where the server takes another."""
    dtype = Engine.read(engine).dtype or "float16"
    served = model.inputs["lora_weights"]
    if served != TRITON_TYPES[dtype]:
        raise StageError(
            f"the engine is {dtype}, and model {model.name} takes lora_weights as {served}: they would be misread",
            failure=FailureClass.USER,
            hint="pipeline stage repository --adapter DIR writes one that fits",
        )
    return dtype


async def _send(client: Client, adapter: LoraTensors) -> None:
    """The first request of an adapter, with which the server keeps it. Raises StageError."""
    options: dict[str, Option | InputTensor] = {**sampling(0, seed=0), "lora_task_id": TASK, **adapter.inputs()}
    answer = await client.session().generate(GenerationRequest(_FIRST_PROMPT, 1, options))
    if answer.error is not None:
        raise StageError(
            f"the server did not take the LoRA adapter: {answer.error}", failure=failure_class(answer.error)
        )
