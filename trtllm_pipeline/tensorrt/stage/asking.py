"""What smoke, perf and accuracy have in common when they ask a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.measure import ImagesAsked, Prompt, Service, with_images
from trtllm_pipeline.models import BLS_MODEL, FLOAT_TYPES, Engine
from trtllm_pipeline.tensorrt.stage.lora import ADAPTERS, NO_ADAPTER

if TYPE_CHECKING:
    from trtllm_pipeline.measure import Client, InputTensor, Option, ServedModel
    from trtllm_pipeline.tensorrt.stage.lora_tensors import LoraTensors


_EXTERNAL: Final = "draft_tokens_external"
_FIRST_PROMPT: Final = "Hello"


def protocol_for(service: Service, wanted: str = "grpc", *, images: bool = False) -> str:
    """The protocol to ask `service` over: the one that is wanted of Triton, and of an OpenAI server chat where it is asked with
    images, else its endpoint.
    """
    if service.kind != "openai":
        return wanted
    return "openai_chat" if images else f"openai_{service.endpoint}"


def special_tokens_asked(service: Service, protocol: str, timeout_s: float) -> Callable[[], bool]:
    """Asks `service`, when it is called, whether it puts special tokens around prompts. Imports a client no sooner."""

    def ask() -> bool:
        from trtllm_pipeline.measure import adds_special_tokens

        return adds_special_tokens(service, protocol, timeout_s)

    return ask


def each_with_an_image(prompts: Sequence[Prompt], asked: str | None, service: Service) -> tuple[Prompt, ...]:
    """`prompts` with the images that are `asked` made up for them. Of Triton only those that have none: it takes one."""
    if asked is None:
        return tuple(prompts)
    made = ImagesAsked.parse(asked)
    return tuple(
        prompt if prompt.images and service.kind != "openai" else with_images(prompt, made.make(number))
        for number, prompt in enumerate(prompts)
    )


def draft_options(model: str, engine: Path) -> dict[str, Option]:
    """What every request to a served `model` says where its engine, in a directory, has a draft model beside it, which requests
    alone ask for; else nothing.

    Answers are not streamed then, and have to be said not to be. Source: decode.py of tensorrt_llm_bls.
    """
    if model != BLS_MODEL:
        return {}
    built = Engine.read(engine)
    return {} if built.speculation != _EXTERNAL else {"num_draft_tokens": built.max_draft_len, "stream": False}


AdapterOptions: TypeAlias = "Mapping[str, Mapping[str, Option]]"
"""Name of an adapter -> what a request says to have it."""


def adapters_asked(
    service: Service, inputs: Mapping[str, Path], timeout_s: float, names: Sequence[str] = ()
) -> AdapterOptions:
    """As `adapter_options`, for who has no event loop. Without adapters none is begun."""
    if not any(place in inputs for place in ADAPTERS):
        return {}
    import asyncio

    return asyncio.run(adapter_options(service, inputs, timeout_s, names))


async def adapter_options(
    service: Service, inputs: Mapping[str, Path], timeout_s: float, names: Sequence[str] = ()
) -> AdapterOptions:
    """What requests say of each LoRA adapter among a stage's inputs; `names` are theirs, where there are several.

    Raises StageError for one that the server does not take.
    """
    folders = [inputs[place] for place in ADAPTERS if place in inputs]
    named = enumerate(zip(names or ADAPTERS, folders, strict=False), 1)
    return {
        name: await load_adapter(service, service.model, name, number, folder, inputs.get("engine"), timeout_s)
        for number, (name, folder) in named
    }


def number_of(folder: Path) -> int:
    """A number for the LoRA adapter in a directory, another one for other files: servers keep an adapter under its number, and take
    it for whatever is asked for by that.
    """
    from hashlib import blake2b

    told: list[object] = [str(folder.absolute())]
    with suppress(OSError):  # a server elsewhere may have what is not here
        told += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    return int.from_bytes(blake2b(repr(told).encode(), digest_size=4).digest(), "big") // 2 + 1


def lora_request(name: str, number: int, folder: Path) -> Mapping[str, Option]:
    """What a request to trtllm-serve says to have a LoRA adapter, which it loads itself. Source: its protocol."""
    return {"lora_request": {"lora_name": name, "lora_int_id": number, "lora_path": str(folder)}}


async def load_adapter(
    service: Service, model: str, name: str, number: int, folder: Path, engine: Path | None, timeout_s: float
) -> Mapping[str, Option]:
    """What a request to a served `model` says to have the LoRA adapter in a directory.

    An engine in Triton is sent the adapter here: its backend keeps each under a number, and takes that alone from then on,
    over every protocol; `engine` is its directory, where that is known. Other servers load the directory themselves. Raises
    StageError for an adapter that the server does not take.

    Source: inputs of the Triton models `llmapi` and `inflight_batcher_llm`.
    """
    if service.kind == "openai":
        return lora_request(name, number, folder)
    from trtllm_pipeline.measure import Client

    async with Client(service, model, "grpc", timeout_s=timeout_s) as client:
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
        hint="the templates of the release decide; settings.serve.frontend: trtllm_serve has one",
    )


def chosen_adapters(found: AdapterOptions, wanted: str | None) -> tuple[Mapping[str, Option], ...]:
    """What requests say in turn: of the adapter that is wanted, of none, or of all. Raises StageError for an unknown name."""
    if wanted is None or not found:
        return tuple(found.values())
    if wanted == NO_ADAPTER:
        return ()
    if wanted not in found:
        raise StageError(f"there is no LoRA adapter {wanted}; there are {', '.join(found)}", failure=FailureClass.USER)
    return (found[wanted],)


def _data_type(engine: Path | None, model: ServedModel) -> str:
    """Of the engine, in which the adapter has to be; as the model in Triton says it where the engine is not known.

    Raises StageError where the server takes another.
    """
    served = model.inputs["lora_weights"]
    if engine is None:
        return next((dtype for dtype, kind in FLOAT_TYPES.items() if kind == served), "float16")
    dtype = Engine.read(engine).dtype or "float16"
    if served != FLOAT_TYPES[dtype]:
        raise StageError(
            f"the engine is {dtype}, and model {model.name} takes lora_weights as {served}: they would be misread",
            failure=FailureClass.USER,
            hint="pipeline stage repository --adapter DIR writes one that fits",
        )
    return dtype


async def _send(client: Client, number: int, adapter: LoraTensors) -> None:
    """The first request of an adapter, with which the server keeps it. Raises StageError."""
    from trtllm_pipeline.measure import GenerationRequest, failure_class, sampling

    options: dict[str, Option | InputTensor] = {**sampling(0, seed=0), "lora_task_id": number, **adapter.inputs()}
    answer = await client.session().generate(GenerationRequest(_FIRST_PROMPT, 1, options))
    if answer.error is not None:
        raise StageError(
            f"the server did not take the LoRA adapter: {answer.error}", failure=failure_class(answer.error)
        )
