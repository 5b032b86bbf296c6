"""Starts servers for tests and talks to them as any client would."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.tensorrt.embedded import repository
from trtllm_pipeline.tensorrt.embedded.params import RepositoryEmbedded
from trtllm_pipeline.tensorrt.embedded.runtime import Limits
from trtllm_pipeline.tensorrt.servers import triton_server

_TYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", np.object_),
    "bad_words": ("BYTES", np.object_),
    "stop_words": ("BYTES", np.object_),
    "embedding_bias_words": ("BYTES", np.object_),
    "stream": ("BOOL", np.bool_),
    "streaming": ("BOOL", np.bool_),
    "stop": ("BOOL", np.bool_),
    "return_log_probs": ("BOOL", np.bool_),
    "return_num_input_tokens": ("BOOL", np.bool_),
    "return_num_output_tokens": ("BOOL", np.bool_),
    "return_context_logits": ("BOOL", np.bool_),
    "exclude_input_in_output": ("BOOL", np.bool_),
    "top_p": ("FP32", np.float32),
    "runtime_top_p": ("FP32", np.float32),
    "temperature": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32),
    "random_seed": ("UINT64", np.uint64),
    "seed": ("UINT64", np.uint64),
    "lora_task_id": ("UINT64", np.uint64),
}


def tensors(values: Mapping[str, object]) -> list[Any]:
    """InferInputs for these values; one row unless an array with its own batch dimension is given. Default: INT32."""
    inputs = []
    for name, value in values.items():
        kind, dtype = _TYPES.get(name, ("INT32", np.int32))
        array = value if isinstance(value, np.ndarray) else np.array([value if isinstance(value, list) else [value]])
        if kind == "BYTES":
            array = np.array([str(each).encode() for each in array.flat], dtype=np.object_).reshape(array.shape)
        tensor = grpcclient.InferInput(name, array.shape, kind)
        tensor.set_data_from_numpy(array.astype(dtype))
        inputs.append(tensor)
    return inputs


@dataclass
class Answer:
    """What came back for one streamed request."""

    results: list[Any] = field(default_factory=list)
    error: str | None = None

    @property
    def texts(self) -> list[str]:
        assert self.error is None, self.error
        return [result.as_numpy("text_output").flat[0].decode() for result in self.results]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ids(self) -> list[int]:
        return [int(i) for result in self.results for i in result.as_numpy("output_ids").flat]


class Stream:
    """One gRPC stream that carries any number of requests, told apart by their ids."""

    def __init__(self, url: str) -> None:
        self.client = grpcclient.InferenceServerClient(url)
        self.events: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self.events.put((result, error)))
        self.answers: dict[str, Answer] = {}
        self.open: set[str] = set()

    def send(self, model: str, request_id: str, outputs: Sequence[str] | None = None, **values: object) -> None:
        """Send a request; `outputs` are those that it wants, None for all."""
        self.answers.setdefault(request_id, Answer())
        self.open.add(request_id)
        self.client.async_stream_infer(
            model,
            tensors(values),
            outputs=None if outputs is None else [grpcclient.InferRequestedOutput(name) for name in outputs],
            request_id=request_id,
            enable_empty_final_response=True,
        )

    def receive(self, timeout_s: float = 20) -> str:
        """Take one event in; the id of its request. An error ends all open requests if it cannot be told whose it is."""
        result, error = self.events.get(timeout=timeout_s)
        if error is not None:
            name = next(iter(self.open))
            self.answers[name].error = error.message()
            self.open.discard(name)
            return name
        response = result.get_response()
        if response.outputs:
            self.answers[response.id].results.append(result)
        if response.parameters["triton_final_response"].bool_param:
            self.open.discard(response.id)
        return str(response.id)

    def finish(self, timeout_s: float = 20) -> dict[str, Answer]:
        while self.open:
            self.receive(timeout_s)
        return self.answers

    def close(self, *, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


class Client:
    """HTTP and gRPC to one server."""

    def __init__(self, server: triton_server.TritonProcess) -> None:
        self.server = server
        self.grpc_url = f"{server.host}:{server.ports.grpc}"

    def generate(self, model: str = "ensemble", **body: object) -> tuple[int, dict[str, Any]]:
        status, answer = self.server.request("POST", f"/v2/models/{model}/generate", body, timeout_s=60)
        return status, json.loads(answer)

    def text(self, model: str = "ensemble", **body: object) -> str:
        status, answer = self.generate(model, **body)
        assert status == 200, answer
        return str(answer["text_output"])

    def events(self, model: str = "ensemble", **body: object) -> list[dict[str, Any]]:
        path = f"/v2/models/{model}/generate_stream"
        status, answer = self.server.request("POST", path, {**body, "stream": True}, timeout_s=60)
        assert status == 200, answer
        return [json.loads(line[5:]) for line in answer.decode().splitlines() if line.startswith("data:")]

    @contextmanager
    def stream(self, *, cancel: bool = False) -> Iterator[Stream]:
        stream = Stream(self.grpc_url)
        try:
            yield stream
        finally:
            stream.close(cancel=cancel)

    def ask(self, model: str = "ensemble", **values: object) -> Answer:
        """One streamed request over gRPC."""
        with self.stream() as stream:
            stream.send(model, "1", stream=True, **values)
            return stream.finish()["1"]


@contextmanager
def serve(folder: Path, engine: Path, **settings: Any) -> Iterator[Client]:
    """A server for `engine`, which has its tokenizer beside it, started straight through serving.triton."""
    models = folder / "repository"
    models.mkdir(parents=True)
    most = Limits.read(engine).max_batch_size
    repository.write(models, engine, engine, RepositoryEmbedded(**{"max_batch_size": most, **settings}))
    installed = triton_installation.find()
    triton_server.check(installed, 4)
    with started(installed, models, folder) as client:
        yield client


@contextmanager
def started(installed: triton_installation.TritonInstallation, models: Path, folder: Path) -> Iterator[Client]:
    """A server for a repository that is ready."""
    server = triton_server.start(
        installed,
        models,
        ("ensemble", "tensorrt_llm_bls"),
        folder=folder / "links",
        log=folder / "server.log",
        ports=triton_server.free_ports(),
    )
    try:
        server.wait_ready(180)
        yield Client(server)
    except BaseException:
        # Shown by pytest beside the failure. The log is gone with the folder of the test on a machine of CI.
        print(
            f"exit status {server.process.poll()}; the log of the server:",
            (folder / "server.log").read_text(),
            sep="\n",
        )
        raise
    finally:
        server.stop()
