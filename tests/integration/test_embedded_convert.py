"""Converted models in llama.cpp against the float reference: tokens, log-probabilities, and the tolerance of each precision."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

from tokenizers import Tokenizer

from benchmarks import fidelity
from benchmarks.fidelity import TOLERANCES
from tests.contexts import context
from trtllm_pipeline.tensorrt.embedded import build, gguf_file, random_model, safetensors
from trtllm_pipeline.tensorrt.embedded.architecture import read_config
from trtllm_pipeline.tensorrt.embedded.params import BuildEmbedded, ConvertEmbedded
from trtllm_pipeline.tensorrt.embedded.quantize import PRECISIONS
from trtllm_pipeline.tensorrt.embedded.reference import Reference
from trtllm_pipeline.tensorrt.embedded.runtime import Event, Runtime, Sampling
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights

ARCHITECTURES = ("llama", "qwen2", "qwen3")
PROMPTS = ("Hello world", "The capital of France is", "Once upon a time, in a village by the sea, there lived a")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    random_model.write_model(folder, request.param)
    return folder


def run_convert(model: Path, attempt: Path, precision: str, **params: Any) -> Path:
    out = attempt / "out"
    out.mkdir(parents=True)
    gguf_file.run(context(ConvertEmbedded, {"precision": precision, **params}, {"model": model}, {}, out, attempt))
    return out


def encode(model: Path, *texts: str) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        *(("llama", precision) for precision in PRECISIONS),
        # An architecture adds names of tensors, which are the same for all precisions.
        *((name, precision) for name in ("qwen2", "qwen3") for precision in ("bf16", "int4_wo")),
    ],
    indirect=["model"],
)
def test_each_precision_is_within_its_tolerance(model: Path, tmp_path: Path, precision: str) -> None:
    reference = Reference.from_folder(model)
    path = run_convert(model, tmp_path, precision) / "model.gguf"
    texts = [tokens[:40] for tokens in encode(model, " ".join(PROMPTS) * 4, Path(fidelity.__file__).read_text())]
    tolerance = TOLERANCES[precision]
    weights_only = fidelity.measure(reference, texts, fidelity.dequantized(path, reference.config))
    with fidelity.open_llama_cpp(path, context=256, vocab_size=random_model.VOCAB_SIZE) as llama_cpp:
        served = fidelity.measure(reference, texts, llama_cpp)
    for found in (weights_only, served):
        assert tolerance.admits(found.kl, found.perplexity / found.reference_perplexity), (precision, found)
    # A 4-bit model that is as good as an 8-bit one would mean that nothing was quantized.
    if precision.startswith("int4"):
        assert weights_only.kl > TOLERANCES["int8_wo"].kl


@pytest.mark.parametrize(
    ("precision", "kv_cache", "tie"), [("fp32", "f32", 0.0), ("fp16", "f32", 0.02), ("fp16", "f16", 0.05)]
)
@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.seam), "qwen2", "qwen3"], indirect=True)
def test_greedy_tokens_are_the_references(
    model: Path, tmp_path: Path, precision: str, kv_cache: Any, tie: float
) -> None:
    """Equal, but where the reference itself finds two tokens equally likely: within `tie` of log-probability."""
    reference = Reference.from_folder(model)
    path = run_convert(model, tmp_path, precision) / "model.gguf"
    with fidelity.open_llama_cpp(path, context=256, vocab_size=random_model.VOCAB_SIZE, kv_cache=kv_cache) as llama_cpp:
        for prompt in encode(model, *PROMPTS):
            expected, found = reference.generate(prompt, 40, stop=[0, 2]), llama_cpp.generate(prompt, 40)
            assert len(found) == len(expected)
            parted = next((at for at, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]), None)
            if parted is not None:
                row = reference.log_probs([*prompt, *expected[:parted]])[-1]
                assert row[expected[parted]] - row[found[parted]] < tie


@pytest.mark.seam
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_requests_that_join_a_running_batch_are_answered_as_by_the_reference(model: Path, tmp_path: Path) -> None:
    """At full precision, through the served runtime: converted, built, batched in flight."""
    reference = Reference.from_folder(model)
    checkpoint = run_convert(model, tmp_path / "checkpoint", "fp32")
    engine = tmp_path / "engine" / "out"
    engine.mkdir(parents=True)
    limits: dict[str, Any] = {"max_batch_size": 3, "max_input_len": 64, "max_seq_len": 128}
    build.run(context(BuildEmbedded, limits, {"checkpoint": checkpoint}, {}, engine, engine.parent))
    prompts = encode(model, *PROMPTS)
    expected = [reference.generate(prompt, 40, stop=[0, 2]) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [threading.Event() for _ in prompts]

    def listener(number: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            if event.token is not None:
                answers[number].append(event.token)
            if event.finish is not None:
                ended[number].set()

        return on_event

    with Runtime(engine, threads=1, kv_cache_type="f32") as runtime:
        for number, prompt in enumerate(prompts):
            runtime.submit(prompt, 40, Sampling(), listener(number))
            time.sleep(0.01)  # the next one joins while this one is being answered
        assert all(each.wait(60) for each in ended)
    assert answers == expected


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
)
def test_rope_scaling_as_llama_cpp_computes_it(tmp_path: Path, scaling: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    random_model.write_model(folder)
    unscaled = Reference.from_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    reference = Reference.from_folder(folder)
    path = run_convert(folder, tmp_path / "attempt", "fp32") / "model.gguf"
    (text,) = encode(folder, " ".join(PROMPTS) * 5)
    with fidelity.open_llama_cpp(path, context=512, vocab_size=random_model.VOCAB_SIZE) as llama_cpp:
        found = fidelity.measure(reference, [text[:64]], llama_cpp)
    assert found.max_error < 1e-3
    assert np.abs(reference.log_probs(text[:64]) - unscaled.log_probs(text[:64])).max() > 0.1


@pytest.mark.seam
def test_shards_give_the_same_file(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    random_model.write_model(whole, "qwen2")
    random_model.write_model(split, "qwen2")
    weights = Weights(whole)
    shards = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(weights)}
    for shard in set(shards.values()):
        safetensors.write(split / shard, {name: weights[name] for name in weights if shards[name] == shard})
    (split / "model.safetensors").unlink()
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    one = run_convert(whole, tmp_path / "one", "int8_wo") / "model.gguf"
    other = run_convert(split, tmp_path / "other", "int8_wo") / "model.gguf"
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.seam
def test_engine_folder(model: Path, tmp_path: Path) -> None:
    checkpoint = run_convert(model, tmp_path / "convert", "int8_wo")
    out = tmp_path / "build" / "out"
    out.mkdir(parents=True)
    params = {"max_batch_size": 3, "max_input_len": 48, "max_seq_len": 80}
    build.run(context(BuildEmbedded, params, {"checkpoint": checkpoint}, {}, out, out.parent))

    assert (out / "model.gguf").samefile(checkpoint / "model.gguf")
    assert {path.name for path in out.iterdir()} == {"model.gguf", "config.json", "build.json"}
    config = json.loads((out / "config.json").read_text())
    assert config["build_config"] == {**params, "max_num_tokens": 8192}
    geometry = read_config(model)
    per_token = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * 2
    assert config["kv_cache"] == {"precision": "fp16", "bytes_per_token": per_token, "bytes": per_token * 256 * 3}
    proof = json.loads((out / "build.json").read_text())
    assert len(proof["tokens"]) == 8
    assert proof["load_s"] > 0
    assert proof["resident_bytes"] > 1_000_000
    assert str(tmp_path) not in (out / "config.json").read_text() + (out / "build.json").read_text()
