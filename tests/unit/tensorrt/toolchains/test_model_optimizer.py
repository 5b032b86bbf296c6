"""The parts of the quantization worker that need neither torch nor Model Optimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.contexts import context
from tests.helpers.adapters import write_tensors
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import FailureClass, MatrixError, StageError
from trtllm_pipeline.base.machine.model import Machine, TensorRTLLM
from trtllm_pipeline.tensorrt.modelopt import calibration_batches, checkpoint_writer, formats, job, quantization_worker
from trtllm_pipeline.tensorrt.modelopt.checkpoint_writer import Layout
from trtllm_pipeline.tensorrt.stage.base import FAILURE_FILE, Stage
from trtllm_pipeline.tensorrt.stage.calibration_rows import Row, choose, read_rows
from trtllm_pipeline.tensorrt.stage.params import Selection
from trtllm_pipeline.tensorrt.trtllm import engine_backend, pytorch_backend
from trtllm_pipeline.tensorrt.trtllm.checkpoint import run_hugging_face
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint, HuggingFaceCheckpoint
from trtllm_pipeline.tensorrt.worker import write_job

QWEN2_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}


def _file(folder: Path, *lines: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), encoding="utf-8"
    )
    return path


def test_rows_come_in_every_form(tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": "d"}]
    path = _file(
        tmp_path,
        {"text": "a"},
        {"input": "b"},
        {"text_input": "c"},
        "",
        {"messages": conversation},
        {"input_ids": [1, 2]},
    )
    rows = read_rows(path)
    assert [row.text for row in rows] == ["a", "b", "c", None, None]
    assert rows[3].messages == conversation
    assert rows[4].tokens == [1, 2]


def test_every_malformed_row_is_reported(tmp_path: Path) -> None:
    path = _file(tmp_path, {"text": "a"}, "{", {"text": ""}, ["a"], {"input_ids": [1, -1]}, {"input_ids": [True]})
    with pytest.raises(MatrixError) as caught:
        read_rows(path)
    assert [fault.line for fault in caught.value.faults] == [2, 3, 4, 5, 6]


def test_rows_are_drawn_by_seed_and_keep_their_order() -> None:
    rows = [Row(tokens=[index]) for index in range(50)]
    first, again, other = ([row.tokens for row in choose(rows, Selection(samples=10, seed=seed))] for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 10
    assert first == sorted(first, key=lambda tokens: (tokens or [0])[0])
    assert choose(rows, Selection(samples=50)) == rows


def test_tokenized_rows_need_no_tokenizer(tmp_path: Path) -> None:
    rows = [Row(tokens=[1, 2, 3]), Row(tokens=[4])]
    found = calibration_batches.tokenize(tmp_path, rows, Selection(max_length=2))
    assert found == [[1, 2], [4]]


def test_the_digest_is_that_of_the_tokens_row_by_row() -> None:
    digests = {calibration_batches.digest(rows) for rows in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[12], [3]])}
    assert len(digests) == 4
    assert calibration_batches.digest([[1, 2]]) == calibration_batches.digest([(1, 2)])


def test_batches_hold_neighbours_in_length_the_longest_first() -> None:
    rows = [[0] * length for length in (1, 7, 3, 7, 5)]
    assert [[len(row) for row in batch] for batch in calibration_batches.batches(rows, 2, padded=True)] == [
        [7, 7],
        [5, 3],
        [1],
    ]
    alone = [[len(row) for row in batch] for batch in calibration_batches.batches(rows, 3, padded=False)]
    assert alone == [[7, 7], [5], [3], [1]]


SMALL = {**QWEN2_7B, "num_attention_heads": 32, "hidden_size": 4096, "num_key_value_heads": 8}
MIXTURE = {**QWEN2_7B, "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": []}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}


@pytest.mark.parametrize(
    ("config", "layout", "precision", "said"),
    [
        (QWEN2_7B, Layout(8, 1), "fp8", "tp8: 28 attention heads cannot be split evenly over 8 GPUs"),
        (QWEN2_7B, Layout(1, 3), "fp8", "pp3: 28 layers cannot be split evenly into 3 stages"),
        (QWEN2_7B, Layout(7, 1), "fp8", "tp7: 4 KV heads can neither be split over 7 GPUs nor copied to them evenly"),
        (
            SMALL,
            Layout(8, 1),
            "int4_awq",
            "18944 gives each GPU 2368, which must be a multiple of 128 for int4_awq; tp4 fits",
        ),
        ({**MIXTURE, "decoder_sparse_step": 2}, Layout(1, 1), "fp8", "qwen2_moe with layers without experts"),
        ({**MIXTURE, "mlp_only_layers": [0]}, Layout(1, 1), "fp8", "qwen2_moe with layers without experts"),
        (GPT2, Layout(8, 1), "fp8", "12 attention heads"),
    ],
)
def test_layouts_that_cannot_be_are_refused(
    config: dict[str, object], layout: Layout, precision: str, said: str
) -> None:
    with pytest.raises(StageError, match=said) as caught:
        checkpoint_writer.check_layout(config, layout, formats.PRECISIONS[precision])
    assert caught.value.failure is FailureClass.INFEASIBLE


def test_layouts_that_can_be_are_taken() -> None:
    for tp, pp in ((1, 1), (2, 2), (4, 1), (4, 7)):
        checkpoint_writer.check_layout(QWEN2_7B, Layout(tp, pp), formats.PRECISIONS["int4_awq"])
    for config, layout in ((SMALL, Layout(8, 1)), (MIXTURE, Layout(1, 1)), (GPT2, Layout(4, 2))):
        checkpoint_writer.check_layout(config, layout, formats.PRECISIONS["fp8"])


def test_an_architecture_that_would_lose_parts_is_refused() -> None:
    with pytest.raises(StageError, match="FalconForCausalLM") as caught:
        checkpoint_writer.check_layout(
            {"architectures": ["FalconForCausalLM"]}, Layout(1, 1), formats.PRECISIONS["fp8"]
        )
    assert "hugging_face" in str(caught.value.hint)


def test_awq_of_a_mixture_is_refused_before_it_is_measured() -> None:
    checkpoint_writer.check_experts({"num_local_experts": 8}, formats.PRECISIONS["fp8"])
    checkpoint_writer.check_experts({"num_experts": None}, formats.PRECISIONS["int4_awq"])
    with pytest.raises(StageError, match="W4A16_AWQ of a mixture of experts"):
        checkpoint_writer.check_experts({"num_local_experts": 8}, formats.PRECISIONS["int4_awq"])


@pytest.mark.parametrize(
    ("architecture", "model_type"), [("MixtralForCausalLM", "mixtral"), ("Qwen3MoeForCausalLM", "qwen3_moe")]
)
def test_what_would_be_written_wrongly_is_refused(architecture: str, model_type: str) -> None:
    config = {**QWEN2_7B, "architectures": [architecture]}
    checkpoint_writer.check_layout(config, Layout(1, 1), formats.PRECISIONS["fp8"])
    with pytest.raises(StageError, match=f"{model_type} .* fp16, bf16, fp8") as caught:
        checkpoint_writer.check_layout(config, Layout(1, 1), formats.PRECISIONS["int4_awq"])
    assert caught.value.failure is FailureClass.INFEASIBLE
    assert checkpoint_writer.unwritten(model_type, "fp8") is None
    assert checkpoint_writer.unwritten(model_type, "int4_awq") is not None


def test_cache_precisions() -> None:
    assert [formats.kv_cache_algorithm(name) for name in (None, "none", "fp16", "fp8", "int8")] == [
        None,
        None,
        None,
        "FP8",
        "INT8",
    ]
    with pytest.raises(StageError, match="int3"):
        formats.kv_cache_algorithm("int3")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    work = context(Checkpoint, {"precision": "fp8", "family": "llama"}, {"model": tmp_path}, {}, tmp_path, tmp_path)
    with pytest.raises(StageError) as caught:
        quantization_worker.run(work)
    assert caught.value.failure is FailureClass.USER
    assert caught.value.hint == "pip install 'trtllm-pipeline[quantize]'"


def test_a_python_without_packages_says_what_it_lacks(tmp_path: Path) -> None:
    """As a program it must come that far with the standard library alone."""
    work = context(Checkpoint, {"precision": "fp8", "family": "llama"}, {"model": tmp_path}, {}, tmp_path, tmp_path)
    write_job("quantize", None, work)
    python, *words = job.command(work, sys.executable)
    done = subprocess.run([python, "-IS", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: quantizing needs the package torch, which {sys.executable} does not have\n"
    told = json.loads((tmp_path / FAILURE_FILE).read_text(encoding="utf-8"))
    assert told["failure"] == FailureClass.USER.value
    assert "torch" in told["message"]
    assert told["hint"]


@pytest.mark.parametrize("stage", [engine_backend.QUANTIZE, engine_backend.CONVERT, pytorch_backend.QUANTIZE])
def test_without_scripts_the_worker_runs_under_the_python_of_tensorrt_llm(tmp_path: Path, stage: Stage) -> None:
    machine = Machine(cpus=1, cpu="test", tensorrt_llm=TensorRTLLM("1.1.0", python="/opt/trt/bin/python3"))
    params: dict[str, Json] = {"precision": "fp16", "family": "llama", "kv_cache_precision": "none"}
    work = context(stage.params, params, {"model": tmp_path / "m"}, {}, tmp_path / "out", tmp_path)
    (command,) = stage.commands(work, machine)
    assert command == job.command(work, "/opt/trt/bin/python3")
    assert command[-1] == str(tmp_path / "job.json")


def test_a_hugging_face_checkpoint_is_looked_at(tmp_path: Path) -> None:
    work = context(HuggingFaceCheckpoint, {"precision": "fp8", "family": "llama"}, {}, {}, tmp_path, tmp_path)
    write_tensors(tmp_path / "model.safetensors", {"a": np.zeros(1, np.float32)})
    whole = (tmp_path / "model.safetensors").read_bytes()
    quantized = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    stated = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    for content, config, beside, said in (
        (whole, {"model_type": "llama"}, stated, "quantization_config is missing"),
        (whole[:-1], quantized, stated, "its tensors end at byte"),
        (whole, None, stated, "config.json: it is missing"),
        (whole, quantized, None, "hf_quant_config.json is missing or names no algorithm"),
        (whole, quantized, {"quantization": {}}, "hf_quant_config.json is missing or names no algorithm"),
        (whole, quantized, {"quantization": {"quant_algo": "NVFP4"}}, "quant_algo is NVFP4, expected FP8 for fp8"),
        (whole, quantized, {"quantization": []}, r"quantization is \[\]; expected an object"),
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        for name, value in (("config.json", config), ("hf_quant_config.json", beside)):
            (tmp_path / name).unlink(missing_ok=True)
            if value is not None:
                (tmp_path / name).write_text(json.dumps(value), encoding="utf-8")
        with pytest.raises(StageError, match=said):
            run_hugging_face(work)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated), encoding="utf-8")
    run_hugging_face(work)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(StageError, match="no tokenizer"):
        run_hugging_face(work)
