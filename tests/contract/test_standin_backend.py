"""The stand-in for Triton's backend `tensorrtllm` on a real server, with the tensors that each release declares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.standins.triton import MODEL, install_server
from trtllm_pipeline.base.errors import ServerError
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.tensorrt.servers import triton_server

pytestmark = pytest.mark.thorough
TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "tensorrt_llm" / "templates.json"
RELEASES = ("0.8.0", "0.12.0", "0.16.0", "1.1.0rc6")


def template(release: str) -> dict[str, Any]:
    recorded = json.loads(TEMPLATES.read_text(encoding="utf-8"))["releases"]
    model: dict[str, Any] = recorded[release]["inflight_batcher_llm"]["tensorrt_llm"]
    return template(model["as"]) if "as" in model else model


def config(name: str, release: str, engine: Path, *, backend: str, decoupled: bool, **parameters: str) -> ModelConfig:
    """The engine model's configuration as that release's template, filled."""
    message = ModelConfig(name=name, backend=backend, max_batch_size=4)
    message.model_transaction_policy.decoupled = decoupled
    message.instance_group.add(count=1, kind="KIND_CPU")
    recorded = template(release)
    for field, tensors in ((message.input, recorded["inputs"]), (message.output, recorded["outputs"])):
        for tensor, kind, dims, *flags in map(str.split, tensors):
            kind = {"logits_datatype": "FP32"}.get(kind.strip("${}"), "FP16" if "$" in kind else kind)
            entry = field.add(name=tensor, data_type=f"TYPE_{kind}", dims=json.loads(dims))
            if field is message.input:
                entry.optional = "optional" in flags
                entry.allow_ragged_batch = "ragged" in flags
                if "scalar" in flags:
                    entry.reshape.SetInParent()
    for key, value in {"gpt_model_path": str(engine), **parameters}.items():
        message.parameters[key].string_value = value
    return message


def engine(folder: Path, world: int = 1) -> Path:
    folder.mkdir()
    about = {
        "version": "0.12.0",
        "pretrained_config": {"mapping": {"world_size": world}},
        "build_config": {
            "max_input_len": 20,
            "max_seq_len": 30,
            "max_beam_width": 1,
            "plugin_config": {"use_paged_context_fmha": "enable"},
        },
    }
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "rank0.engine").write_bytes(b"{}")
    return folder


@contextmanager
def serve(folder: Path, configs: Mapping[str, ModelConfig], **variables: str) -> Iterator[triton_server.TritonProcess]:
    repository = folder / "repository"
    for name, message in configs.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(str(message), encoding="utf-8")
        if message.backend == "python":
            (repository / name / "1" / "model.py").write_bytes(MODEL.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**install_server(folder / "tritonserver"), **variables}.items():
            patch.setenv(key, value)
        server = triton_server.start(
            triton_installation.find(),
            repository,
            tuple(configs),
            folder=folder / "links",
            log=folder / "log",
            ports=triton_server.free_ports(),
        )
    try:
        server.wait_ready(180)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[triton_server.TritonProcess]:
    folder = tmp_path_factory.mktemp("standin")
    built = engine(folder / "engine")
    configs = {
        f"r{release}": config(f"r{release}", release, built, backend="tensorrtllm", decoupled=True)
        for release in RELEASES
    }
    configs["unary"] = config(
        "unary", "0.16.0", built, backend="python", decoupled=False, exclude_input_in_output="true"
    )
    with serve(folder, configs) as server:
        yield server


def ask(server: triton_server.TritonProcess, model: str, **inputs: object) -> tuple[int, dict[str, Any]]:
    body = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4, **inputs}
    status, answer = server.request("POST", f"/v2/models/{model}/generate", body, timeout_s=20)
    return status, json.loads(answer)


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_s_tensors_are_taken_and_all_outputs_sent(
    server: triton_server.TritonProcess, release: str
) -> None:
    status, answer = ask(server, f"r{release}")
    assert status == 200, answer
    assert (answer["output_ids"], answer["sequence_length"]) == ([5, 6, 7, 6, 7, 5, 6], 7)
    declared = {tensor.split()[0] for tensor in template(release)["outputs"]}
    assert set(answer) - {"model_name", "model_version"} == declared - {"num_input_tokens", "num_output_tokens"}


def test_limits_of_the_engine_hold(server: triton_server.TritonProcess) -> None:
    answer = ask(server, "r0.12.0", input_ids=[1] * 21, input_lengths=21)[1]
    assert "exceeds maximum input length (20)" in answer["error"]
    assert ask(server, "r0.12.0", request_output_len=99)[1]["sequence_length"] == 30


@pytest.mark.parametrize(
    ("world", "parameters", "words"),
    [
        (2, {}, r"mpiSize == tp \* pp \(1 vs 2\)"),
        (1, {"max_tokens_in_paged_kv_cache": "16"}, r"maxTokensInPagedKvCache \(16\) must be large enough"),
        (1, {"max_beam_width": "2"}, r"max beam width \(2\) must not exceed engine max beam width \(1\)"),
        (1, {"sink_token_length": "4"}, r"Cannot support StreamingLLM now when enabling paged KV context FMHA"),
    ],
)
def test_what_the_runtime_refuses_keeps_the_server_from_starting(
    tmp_path: Path, world: int, parameters: dict[str, str], words: str
) -> None:
    built = engine(tmp_path / "engine", world)
    configs = {"m": config("m", "0.12.0", built, backend="tensorrtllm", decoupled=True, **parameters)}
    with pytest.raises(ServerError, match=words), serve(tmp_path, configs):
        pass
