"""Requests to a server, shared by smoke, perf and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure import Service
from trtllm_pipeline.models import Engine, model_config, model_names
from trtllm_pipeline.tensorrt.stage.lora import ADAPTERS, NO_ADAPTER

if TYPE_CHECKING:
    from trtllm_pipeline.measure import session, triton
    from trtllm_pipeline.tensorrt.stage.lora_tensors import LoraTensors


_EXTERNAL: Final = "draft_tokens_external"
_FIRST_PROMPT: Final = "Hello"


def protocol_for(service: Service, wanted: str = "grpc", *, images: bool = False) -> str:
    """The protocol for requests to `service`. For Triton, the configured one. For an OpenAI server, chat if requests have
    images, else the server's endpoint.
    """
    if service.kind != "openai":
        return wanted
    return "openai_chat" if images else f"openai_{service.endpoint}"


def special_tokens_check(service: Service, protocol: str, timeout_s: float) -> Callable[[], bool]:
    """When called, checks whether `service` adds special tokens to prompts. Imports a client no sooner."""

    def ask() -> bool:
        from trtllm_pipeline.measure import target

        return target.adds_special_tokens(service, protocol, timeout_s)

    return ask


def draft_options(model: str, engine: Path) -> dict[str, session.Option]:
    """Request inputs for a served `model` whose engine directory has a draft model next to it: only requests turn drafting
    on. Empty without one.

    Such answers are not streamed, and the request has to say so. Source: decode.py of tensorrt_llm_bls.
    """
    if model != model_names.BLS_MODEL:
        return {}
    built = Engine.read(engine)
    return {} if built.speculation != _EXTERNAL else {"num_draft_tokens": built.max_draft_len, "stream": False}


AdapterOptions: TypeAlias = "Mapping[str, Mapping[str, session.Option]]"
"""Name of an adapter -> the request inputs that select it."""


def adapter_options_now(
    service: Service, inputs: Mapping[str, Path], timeout_s: float, names: Sequence[str] = ()
) -> AdapterOptions:
    """Like `adapter_options`, for callers without an event loop. Starts none if there are no adapters."""
    if not any(place in inputs for place in ADAPTERS):
        return {}
    import asyncio

    return asyncio.run(adapter_options(service, inputs, timeout_s, names))


async def adapter_options(
    service: Service, inputs: Mapping[str, Path], timeout_s: float, names: Sequence[str] = ()
) -> AdapterOptions:
    """The request inputs for each LoRA adapter among a stage's inputs. `names` are the adapters' names if there are several.

    Raises StageError for an adapter that the server does not accept.
    """
    folders = [inputs[place] for place in ADAPTERS if place in inputs]
    named = enumerate(zip(names or ADAPTERS, folders, strict=False), 1)
    return {
        name: await load_adapter(service, service.model, name, number, folder, inputs.get("engine"), timeout_s)
        for number, (name, folder) in named
    }


def number_of(folder: Path) -> int:
    """A number for the LoRA adapter in a directory, by its files: servers cache adapters by number."""
    from hashlib import blake2b

    identity: list[object] = [str(folder.absolute())]
    with suppress(OSError):  # the server may have the files if this machine does not
        identity += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    return int.from_bytes(blake2b(repr(identity).encode(), digest_size=4).digest(), "big") // 2 + 1


def lora_request(name: str, number: int, folder: Path) -> Mapping[str, session.Option]:
    """The request inputs with which trtllm-serve loads a LoRA adapter. Source: its protocol."""
    return {"lora_request": {"lora_name": name, "lora_int_id": number, "lora_path": str(folder)}}


async def load_adapter(
    service: Service, model: str, name: str, number: int, folder: Path, engine: Path | None, timeout_s: float
) -> Mapping[str, session.Option]:
    """The request inputs that select the LoRA adapter in a directory on a served `model`.

    An engine in Triton receives the adapter here: its backend caches it by number. Later requests, over every protocol,
    need only the number. `engine` is its directory, if known. Other servers load the directory themselves. Raises
    StageError for an adapter that the server does not accept.

    Source: inputs of the Triton models `llmapi` and `inflight_batcher_llm`.
    """
    if service.kind == "openai":
        return lora_request(name, number, folder)
    from trtllm_pipeline.measure import triton

    async with triton.Client(service, model, "grpc", timeout_s=timeout_s) as client:
        if client.model.takes("lora_task_id"):
            import asyncio

            from trtllm_pipeline.tensorrt.stage.lora_tensors import convert

            dtype = _data_type(engine, client.model)
            await _send(client, number, await asyncio.to_thread(convert, folder, dtype))
            return {"lora_task_id": number}
        if client.model.takes("lora_path"):
            return {"lora_id": number, "lora_name": name, "lora_path": str(folder)}
    raise StageError(
        f"model {model} has no input for LoRA adapters",
        failure=FailureClass.USER,
        hint="the release's templates lack it: use settings.serve.frontend: trtllm_serve",
    )


def chosen_adapters(options: AdapterOptions, wanted: str | None) -> tuple[Mapping[str, session.Option], ...]:
    """The request inputs used in turn: for the `wanted` adapter, for none, or for all. Raises StageError for an unknown name."""
    if wanted is None or not options:
        return tuple(options.values())
    if wanted == NO_ADAPTER:
        return ()
    if wanted not in options:
        raise StageError(f"unknown LoRA adapter {wanted}; known: {', '.join(options)}", failure=FailureClass.USER)
    return (options[wanted],)


def _data_type(engine: Path | None, model: triton.ServedModel) -> str:
    """The engine's data type, which the adapter must have. By the model in Triton if the engine is unknown.

    Raises StageError if the server expects another type.
    """
    served = model.inputs["lora_weights"]
    if engine is None:
        return next((dtype for dtype, kind in model_config.FLOAT_TYPES.items() if kind == served), "float16")
    dtype = Engine.read(engine).dtype or "float16"
    if served != model_config.FLOAT_TYPES[dtype]:
        raise StageError(
            f"the engine is {dtype}, and model {model.name} reads lora_weights as {served}, which would corrupt them",
            failure=FailureClass.USER,
            hint="pipeline stage repository --adapter DIR writes one that fits",
        )
    return dtype


async def _send(client: triton.Client, number: int, adapter: LoraTensors) -> None:
    """The first request of an adapter, after which the server caches it. Raises StageError."""
    from trtllm_pipeline.measure import session, triton

    options: dict[str, session.Option | session.InputTensor] = {
        **triton.sampling(0, seed=0),
        "lora_task_id": number,
        **adapter.inputs(),
    }
    answer = await client.session().generate(session.GenerationRequest(_FIRST_PROMPT, 1, options))
    if answer.error is not None:
        raise StageError(
            f"the server rejected the LoRA adapter: {answer.error}", failure=triton.failure_class(answer.error)
        )
