"""Filled TensorRT-LLM repositories in a real Triton: they load and answer, with a stand-in for the engine's backend.

The backend `tensorrtllm` and the models' Python code are stand-ins; configurations, ensembles and Triton are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from packaging.version import Version

from tests.helpers.adapters import random_pairs, write_adapter
from tests.helpers.broken_repositories import BROKEN, POLICIES, STEPS, copy, write_good, write_policy, write_step
from tests.helpers.gateways import listening
from tests.helpers.triton_client import Client, started
from tests.standins import templates as standin
from tests.standins import triton as backend
from trtllm_pipeline.base.errors import ServerError
from trtllm_pipeline.base.machine import triton_installation
from trtllm_pipeline.base.machine.model import TensorRTLLM
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.client.session import Answer, GenerationRequest
from trtllm_pipeline.measure.client.triton import Client as TritonClient
from trtllm_pipeline.models.triton_repository import lint
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig, OfferedModel
from trtllm_pipeline.tensorrt.servers import triton_server
from trtllm_pipeline.tensorrt.stage.lora_tensors import LoraTensors, convert
from trtllm_pipeline.tensorrt.stage.params import load
from trtllm_pipeline.tensorrt.stage.server_requests import adapter_options
from trtllm_pipeline.tensorrt.trtllm import frontends
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository


def engine_folder(folder: Path, release: str) -> Path:
    """What `trtllm-build` leaves, as far as anybody here reads it."""
    folder.mkdir(parents=True)
    config = {
        "version": release,
        "pretrained_config": {"dtype": "float16", "logits_dtype": "float32", "mapping": {"world_size": 1}},
        "build_config": {"max_batch_size": 8, "max_input_len": 64, "max_seq_len": 128, "max_beam_width": 1},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rank0.engine").write_bytes(b"engine")
    return folder


def filled(folder: Path, release: str, **params: Any) -> Path:
    model, out = folder / "model, with a comma", folder / "repository"
    model.mkdir(parents=True)
    out.mkdir()
    (model / "tokenizer_config.json").write_text("{}")
    installed = TensorRTLLM(release, templates=str(standin.install(folder, release)))
    engine = engine_folder(folder / "engine", release)
    frontends.write_engine(
        out, installed, engine=engine, model=model, params=load(EngineRepository, {"max_batch_size": 4, **params})
    )
    return out


@contextmanager
def served(folder: Path, models: Path) -> Iterator[Client]:
    home = folder / "server"
    backend.install_server(home)
    installed = triton_installation.TritonInstallation(
        home / "bin" / "tritonserver", "with a stand-in", home / "backends"
    )
    with started(installed, models, folder) as client:
        yield client


@pytest.mark.parametrize(
    "release",
    [
        "0.8.0",
        "0.16.0",
        pytest.param("1.1.0rc6", marks=pytest.mark.seam),
    ],
)
def test_the_models_of_a_release_load_and_answer(tmp_path: Path, release: str) -> None:
    with served(tmp_path, filled(tmp_path, release)) as client:
        for model in ("ensemble", "tensorrt_llm_bls"):
            assert client.text(model, text_input="abcd", max_tokens=3) == "bcd"
            assert client.ask(model, text_input="abcd", max_tokens=5).texts == list("bcdab")


@pytest.mark.parametrize("release", ["0.12.0", "1.1.0rc6"])
def test_one_response_a_request_without_decoupling(tmp_path: Path, release: str) -> None:
    config = {
        "preferred_batch_size": [2, 3],
        "instance_kinds": {"postprocessing": "KIND_AUTO"},
        "triton_parameters": {"tensorrt_llm": {"of_mine": 1}, "preprocessing": {"of_mine": "x"}},
    }
    models = filled(
        tmp_path, release, decoupled=False, exclude_input_in_output=False, preprocessing_instances=2, **config
    )
    with served(tmp_path, models) as client:
        for model in ("ensemble", "tensorrt_llm_bls"):
            assert client.text(model, text_input="abcd", max_tokens=3) == "abcdbcd"
            assert client.generate(model, text_input="abcd", max_tokens=3, stream=True)[0] != 200


ADAPTER_ROWS = {"q_proj": (16, 16), "v_proj": (16, 16)}


def with_adapters(folder: Path, release: str, dtype: str, adapter: Path) -> Path:
    """A repository of an engine in a data type, for adapters of q, k and v up to rank 8."""
    models, engine = folder / "lora", engine_folder(folder / "engine of adapters", release)
    config = json.loads((engine / "config.json").read_text())
    config["pretrained_config"] |= {"dtype": dtype, "num_hidden_layers": 2}
    config["build_config"] |= {
        "plugin_config": {"lora_plugin": dtype},
        "lora_config": {"max_lora_rank": 8, "lora_target_modules": ["attn_q", "attn_k", "attn_v"]},
    }
    (engine / "config.json").write_text(json.dumps(config))
    model = folder / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text("{}")
    (model / "config.json").write_text('{"hidden_size": 16}')
    models.mkdir()
    installed = TensorRTLLM(release, templates=str(standin.install(folder, release)))
    asked = load(EngineRepository, {"max_batch_size": 4})
    frontends.write_engine(models, installed, engine=engine, model=model, params=asked, adapters=[adapter])
    return models


@pytest.mark.parametrize(("release", "dtype"), [("0.10.0", "float16"), ("1.1.0rc6", "bfloat16")])
def test_an_adapter_is_kept_by_the_engine_s_model_and_handed_on_by_the_ensemble(
    tmp_path: Path, release: str, dtype: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", random_pairs(ADAPTER_ROWS, rank=2))
    models = with_adapters(tmp_path, release, dtype, adapter)
    engine = tmp_path / "engine of adapters"

    async def ask(client: TritonClient, **options: Any) -> Answer:
        return await client.session().generate(GenerationRequest("abcd", 3, {"top_k": 1, **options}))

    async def talk(service: Service) -> None:
        async with TritonClient(service, "ensemble", "grpc", timeout_s=60) as client:
            unknown = await ask(client, lora_task_id=1)
            assert "LoRA task 1 not found in cache. Please send LoRA weights with request" in str(unknown.error)
            told = (await adapter_options(service, {"adapter": adapter, "engine": engine}, 60))["adapter"]
            assert told == {"lora_task_id": 1}
            assert (await ask(client)).text == "bcd"
            assert (await ask(client, **told)).text == "dab", "by an adapter of rank 2"
            for change, words in (
                ({"module": 4}, "lora module attn_dense not enabled for this model"),
                ({"layer": 2}, "Expected layerId to be in the range"),
                ({"rank": 9}, "low_rank must be smaller than mMaxLowRank (8)"),
            ):
                refused = await ask(client, lora_task_id=2, **changed(convert(adapter, dtype), **change).inputs())
                assert words in str(refused.error)
            with_weights = convert(adapter, dtype).inputs()
            alone = await ask(client, lora_task_id=2, lora_weights=with_weights["lora_weights"])
            assert "must have both lora_weights and lora_keys" in str(alone.error)
            large = convert(adapter, dtype)
            padded = np.zeros((len(large.weights), 20_000_000), large.weights.dtype)  # 160 MB
            kept = await ask(client, lora_task_id=3, **replace(large, weights=padded).inputs())
            assert kept.error is None
            assert kept.text == "dab"

    with served(tmp_path, models) as client:
        ports = client.server.ports
        service = Service(f"127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}", None, None, "ensemble", None)
        asyncio.run(talk(service))
        assert client.text("ensemble", text_input="abcd", max_tokens=3, lora_task_id=1) == "dab"
        if Version(release) >= Version("0.16"):
            assert client.text("tensorrt_llm_bls", text_input="abcd", max_tokens=3, lora_task_id=1) == "dab"
        model = OfferedModel(name="m", url=f"grpc://{service.grpc}", server_model="ensemble", adapters={"sql": adapter})
        with listening(tmp_path, GatewayConfig(models=(model,))) as url:
            assert [completion(url, name) for name in ("m", "m:sql", "m")] == ["bcd", "dab", "bcd"]


def completion(url: str, model: str) -> str:
    """What a gateway's model answers to abcd."""
    body = {"model": model, "prompt": "abcd", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{url}/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def changed(tensors: LoraTensors, **change: int) -> LoraTensors:
    """The same with another module, layer or rank in its first row."""
    config = tensors.config.copy()
    for name, value in change.items():
        config[0, ("module", "layer", "rank").index(name)] = value
    return replace(tensors, config=config)


REFUSED = {
    # rule -> words of Triton's log
    "TRT103": "directory name must equal model name",
    "TRT104": "at least one version must be available",
    "TRT106": "at least one version must be available",
    "TRT214": "preferred size must be <= max batch size",
    "TRT215": "'max_batch_size' must be non-negative",
    "TRT217": "Response Cache does not currently support",
    "TRT218": "must specify 'dims'",
    "TRT219": "has kind KIND_CPU but specifies one or more GPUs",
    "TRT220": "default priority level must be in range [1, 2]",
    "TRT221": "minimum slot utilization must be in range",
    "TRT222": "sequence batching must specify either 'int32_false_true'",
    "TRT223": "has different size for dims and reshape",
    "TRT224": "unexpected platform type 'python'",
    "TRT302": "contains models that are not available",
    "TRT303": "mapping to non-existing input top_k",
    "TRT304": "inconsistent data type: TYPE_FP16 is inferred",
    "TRT305": "inconsistent shape",
    "TRT307": "is not written",
    "TRT308": "is not used",
    "TRT309": "can appear in an output map only once",
    "TRT310": "only allows maximum batch size to be 4",
    "TRT315": "whose required version 0 is not loaded",
    "TRT316": "instance group should not be specified for ensemble",
    "TRT317": "circular dependency between ensembles",
}
REFUSED_DAILY = ("TRT103", "TRT218", "TRT304", "TRT317")
"""A part of them: of a directory, of a configuration, of an ensemble, of all models together."""
TAKEN = ("TRT107", "TRT208", "TRT209", "TRT210", "TRT211", "TRT212", "TRT513")
"""Warnings of the linter: Triton makes something of it."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_good(tmp_path_factory.mktemp("good"))


def broken(good: Path, folder: Path, *rules: str) -> Path:
    """A copy with an engine of one rank, since one server is one rank."""
    case = copy(good, folder / "case")
    case.build("pretrained_config", mapping={"world_size": 1})
    (case.engine / "rank1.engine").unlink()
    assert case.find() == []
    for rule in rules:
        BROKEN[rule](case)
    return case.repository


@pytest.mark.parametrize(
    "rule", [pytest.param(each, marks=() if each in REFUSED_DAILY else pytest.mark.nightly) for each in REFUSED]
)
def test_triton_refuses_what_the_linter_calls_an_error(good: Path, tmp_path: Path, rule: str) -> None:
    with pytest.raises(ServerError), served(tmp_path, broken(good, tmp_path, rule)):
        pass
    assert REFUSED[rule] in (tmp_path / "server.log").read_text()


def test_triton_takes_what_the_linter_only_warns_of(good: Path, tmp_path: Path) -> None:
    models = broken(good, tmp_path, *TAKEN)
    assert {finding.rule for finding in lint.lint(models)} == set(TAKEN)
    with served(tmp_path, models) as client:
        assert client.text(text_input="abcd", max_tokens=3) == "bcd"


def test_triton_serves_the_versions_that_the_linter_expects(tmp_path: Path) -> None:
    """A server that loads all models and ends, since some fail."""
    models, good = tmp_path / "models", {}
    for number, (policy, versions, rules) in enumerate(POLICIES):
        write_policy(models, f"policy_{number}", policy, versions)
        good[f"policy_{number}"] = rules in ([], ["TRT107"])
    for number, (policy, asked, served) in enumerate(STEPS):
        write_step(models, f"ensemble_{number}", policy, asked)
        good[f"ensemble_{number}"] = served is None
    installed = triton_installation.find()
    repository, backends = triton_server.link(installed, models, tmp_path / "links")
    closed = [f"--allow-{each}=false" for each in ("http", "grpc", "metrics")]
    command = [installed.binary, f"--model-repository={repository}", f"--backend-directory={backends}", *closed]
    environment = triton_server.environment(installed)
    # Not a pipe: the stubs of a server that gives up may outlive it and hold a pipe open.
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        server.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    ready = set(re.findall(r"(?m)^\| (\w+) +\| \d+ +\| READY", (tmp_path / "log").read_text("utf-8")))
    assert {name for name in good if name in ready} == {name for name, loads in good.items() if loads}


def test_the_python_backend_takes_the_same_templates(tmp_path: Path) -> None:
    models = filled(tmp_path, "0.16.0", triton_backend="python")
    (models / "tensorrt_llm" / "1" / "model.py").write_text(backend.MODEL.read_text())
    with served(tmp_path, models) as client:
        assert client.text(text_input="abcd", max_tokens=3) == "bcd"
