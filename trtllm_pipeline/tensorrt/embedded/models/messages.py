"""Shared by the Python models: reading, rejecting and answering requests. Runs inside Triton's Python stub."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # provided by the stub

from trtllm_pipeline.tensorrt.embedded.models.tensors import Tensor
from trtllm_pipeline.tensorrt.embedded.runtime import RequestError


def parameters(args: Mapping[str, str]) -> dict[str, str]:
    """The string parameters of a model's configuration."""
    config = json.loads(args["model_config"])
    return {key: entry["string_value"] for key, entry in config.get("parameters", {}).items()}


def flag(value: str) -> bool:
    """A boolean parameter as TensorRT-LLM's repositories write it."""
    return value.strip().lower() in {"true", "1", "yes", "on"}


def array(request: Any, name: str) -> np.ndarray[Any, Any] | None:
    """An input with its batch dimension. None if it was not sent."""
    tensor = pb.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def rows(request: Any, name: str, batch: int) -> list[Any]:
    """An input's first value for each row of the batch. None for each if it was not sent."""
    values = array(request, name)
    if values is None or values.size == 0:
        return [None] * batch
    if len(values) != batch:
        raise RequestError(f"{name} has {len(values)} rows; the batch has {batch}")
    return [row.item() if hasattr(row, "item") else row for row in values.reshape(batch, -1)[:, 0]]


def text(value: Any) -> str:
    """A STRING element. Raises RequestError if it is not UTF-8."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"the text is not UTF-8: {error}") from error


def refuse_parameters(request: Any) -> None:
    """Raise RequestError for request parameters: `generate` converts fields that are not inputs to parameters, even typos.

    Parameters with Triton's own prefix are ignored.
    """
    unknown = sorted(name for name in json.loads(request.parameters() or "{}") if not name.startswith("triton_"))
    if unknown:
        raise RequestError(f"unexpected {', '.join(unknown)}: the model has no input of this name")


def refuse(request: Any, unsupported: Iterable[tuple[str, Tensor]]) -> None:
    """Raise RequestError if the request uses one of the inputs `unsupported`, each with the name that clients know."""
    for name, given in unsupported:
        values = array(request, given.name)
        if values is None or values.size == 0 or (values.dtype == object and not any(values.flat)):
            continue
        if given.neutral is None or np.any(values != given.neutral):
            allowed = "leave it out" if given.neutral is None else f"leave it out or send {given.neutral:g}"
            raise RequestError(f"{name} is not supported by the embedded toolchain; {allowed}")


def tensor(name: str, values: object, dtype: Any) -> Any:
    return pb.Tensor(name, np.array(values, dtype=dtype))


def requested_outputs(request: Any) -> frozenset[str]:
    """Names of the outputs that the client requested. All outputs of the model if it named none."""
    return frozenset(request.requested_output_names())


def response(tensors: Sequence[Any], wanted: Collection[str]) -> Any:
    """A response with the tensors that the client requested.

    The stub would drop the others itself, but a sender frees them without Python's lock, which crashes Python 3.12.
    """
    return pb.InferenceResponse(output_tensors=[each for each in tensors if each.name() in wanted])


def answered(requests: Sequence[Any], answer: Callable[[Any], Sequence[Any]]) -> list[Any]:
    """One response per request, with the tensors from `answer`. A bad request does not fail the others."""
    responses = []
    for request in requests:
        try:
            responses.append(response(answer(request), requested_outputs(request)))
        except Exception as error:  # noqa: BLE001  the client must get every error
            responses.append(failed(error))
    return responses


def failed(error: Exception) -> Any:
    """An error response: the client's fault if it is a RequestError, ours otherwise."""
    code = pb.TritonError.INVALID_ARG if isinstance(error, RequestError) else pb.TritonError.INTERNAL
    message = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
    return pb.InferenceResponse(error=pb.TritonError(message, code))


FINAL: int = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
