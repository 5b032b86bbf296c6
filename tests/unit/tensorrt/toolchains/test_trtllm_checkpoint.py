"""What other programs leave is looked at: checkpoints, engines, and the rows that a script calibrates on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contexts import context
from tests.helpers.adapters import write_tensors
from tests.standins.programs import quantize
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import FailureClass, MatrixError, ServerError, StageError
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM
from trtllm_pipeline.models.files import model_files as files
from trtllm_pipeline.tensorrt import worker
from trtllm_pipeline.tensorrt.modelopt import formats
from trtllm_pipeline.tensorrt.servers import engine_requirements
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import Selection
from trtllm_pipeline.tensorrt.trtllm import checkpoint, dataset, engine
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint, EngineBuild, EngineCheck
from trtllm_pipeline.tensorrt.worker import write_job

CONFIG = {
    "architecture": "LlamaForCausalLM",
    "dtype": "float16",
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "silu",
    "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
    "quantization": {"quant_algo": "FP8"},
}
FP8 = {"precision": "fp8", "kv_cache_precision": "none"}


def safetensors(path: Path) -> None:
    write_tensors(path, {"t": np.zeros(1, np.float32)})


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A checkpoint of tp2pp2."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for rank in range(4):
        safetensors(folder / f"rank{rank}.safetensors")
    return folder


def work_in(folder: Path, out: Path, **params: Any) -> StageContext[Any]:
    cls = EngineBuild if "max_seq_len" in params else Checkpoint
    return context(
        cls,
        {"precision": "fp8", "family": "qwen2", **params},
        {"model": folder / "model", "engine": out},
        {},
        out,
        folder,
    )


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_a_whole_checkpoint_is_described(ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.run(work_in(ranks.parent, ranks, tp=2, pp=2, **FP8))
    assert capsys.readouterr().out == "checkpoint of LlamaForCausalLM: FP8, tp2pp2, 0.00 GB\n"


def test_a_checkpoint_without_a_mapping_is_of_one_rank(ranks: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name not in {"mapping", "quantization"}}
    (ranks / "config.json").write_text(json.dumps(config))
    assert checkpoint.check(ranks, tp=1, pp=1)["dtype"] == "float16"
    with pytest.raises(StageError, match=r"mapping\.world_size is 1, expected 2 for tp2pp1"):
        checkpoint.check(ranks, tp=2, pp=1)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def saying(config: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(config)


WITHOUT_ACTIVATION = json.dumps({name: value for name, value in CONFIG.items() if name != "hidden_act"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: it is missing"),
        (saying("{"), r"config\.json: not JSON"),
        (saying("[]"), r"config\.json: it is not a JSON object"),
        (saying(WITHOUT_ACTIVATION), r"config\.json: hidden_act is missing"),
        (lambda folder: (folder / "rank3.safetensors").unlink(), r"rank3\.safetensors is missing: tp2pp2 has 4 ranks"),
        (lambda folder: cut(folder / "rank1.safetensors"), r"rank1\.safetensors is damaged"),
        (lambda folder: (folder / "rank0.safetensors").write_bytes(b""), r"rank0\.safetensors is damaged"),
    ],
)
def test_a_damaged_checkpoint_ends_in_words(ranks: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(ranks)
    with pytest.raises(StageError, match=words):
        checkpoint.run(work_in(ranks.parent, ranks, tp=2, pp=2, **FP8))


def test_a_layout_that_the_script_did_not_take_is_found(ranks: Path) -> None:
    with pytest.raises(StageError, match=r"mapping\.tp_size is 2, expected 4 for tp4pp1"):
        checkpoint.check(ranks, tp=4, pp=1)
    with pytest.raises(StageError, match=r"mapping\.moe_ep_size is 1, expected 2 for tp2pp2ep2"):
        checkpoint.check(ranks, tp=2, pp=2, ep=2)
    contexts = {**CONFIG, "mapping": {"world_size": 4, "tp_size": 2, "cp_size": 2}}
    (ranks / "config.json").write_text(json.dumps(contexts))
    with pytest.raises(StageError, match=r"mapping\.pp_size is 1, expected 2 for tp2pp2"):
        checkpoint.check(ranks, tp=2, pp=2)


@pytest.mark.parametrize(
    ("precision", "cache", "algorithm", "cache_algorithm"),
    [
        ("fp16", "none", None, None),
        ("fp32", "none", None, None),
        ("fp16", "fp8", None, "FP8"),
        ("bf16", "none", "NO_QUANT", None),
        ("fp8", "fp8", "FP8", "FP8"),
        ("fp8", "none", "FP8_PER_CHANNEL_PER_TOKEN", None),
        ("int8_wo", "int8", "W8A16", "INT8"),
        ("int4_wo", "none", "W4A16", None),
        ("int8_sq", "none", "W8A8_SQ_PER_CHANNEL", None),
        ("int8_sq", "none", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", None),
        ("int4_awq", "none", "W4A16_AWQ", None),
        ("w4a8_awq", "none", "W4A8_AWQ", None),
        ("nvfp4", "fp8", "NVFP4", "FP8"),
        ("fp8", "none", "MIXED_PRECISION", None),
    ],
)
def test_a_checkpoint_is_of_the_precision_that_was_asked_for(
    precision: str, cache: str, algorithm: str | None, cache_algorithm: str | None
) -> None:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": cache_algorithm}
    checkpoint.check_precision(
        Path("c"), quantization, Checkpoint(precision=precision, kv_cache_precision=cache, family="llama")
    )


@pytest.mark.parametrize("precision", [name for name in formats.PRECISIONS if name not in {"fp16", "bf16"}])
def test_the_stand_in_for_quantize_writes_what_is_looked_for(precision: str) -> None:
    quantization = {"quant_algo": quantize.ALGORITHMS[precision]}
    checkpoint.check_precision(Path("c"), quantization, Checkpoint(precision=precision, family="llama"))


@pytest.mark.parametrize(
    ("precision", "cache", "found", "words"),
    [
        ("fp8", "none", {}, "quant_algo is None, expected FP8 for fp8"),
        ("fp16", "none", {"quant_algo": "FP8"}, "quant_algo is FP8, expected None for fp16"),
        ("fp16", "none", {"quant_algo": "MIXED_PRECISION"}, "quant_algo is MIXED_PRECISION, expected None for fp16"),
        ("int4_wo", "none", {"quant_algo": "W4A16_AWQ"}, "quant_algo is W4A16_AWQ, expected W4A16 for int4_wo"),
        ("int8_wo", "none", {"quant_algo": "W8A16_GPTQ"}, "quant_algo is W8A16_GPTQ, expected W8A16 for int8_wo"),
        ("fp8", "fp8", {"quant_algo": "FP8"}, "kv_cache_quant_algo is None, expected FP8 for a KV cache of fp8"),
        (
            "fp8",
            "none",
            {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            "kv_cache_quant_algo is FP8, expected None for a KV cache of none",
        ),
    ],
)
def test_a_checkpoint_of_another_precision_is_found(
    ranks: Path, precision: str, cache: str, found: dict[str, str], words: str
) -> None:
    (ranks / "config.json").write_text(json.dumps({**CONFIG, "quantization": found}))
    with pytest.raises(StageError, match=words):
        checkpoint.run(work_in(ranks.parent, ranks, tp=2, pp=2, precision=precision, kv_cache_precision=cache))


# ------------------------------------------------------------------------------------------------------------- engines

H100 = Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 << 30, 90)
ASKED = {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 192, "max_num_tokens": 512}


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What trtllm-build leaves for `ASKED`, on a machine with an H100."""
    found = Machine(2, "test", (H100,), tensorrt_llm=TensorRTLLM("1.0.0"))
    monkeypatch.setattr(probe, "this_machine", lambda: found)
    folder = tmp_path / "engine"
    folder.mkdir()
    config = {"version": "1.0.0", "pretrained_config": {"mapping": {"world_size": 1}}, "build_config": ASKED}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rank0.engine").write_bytes(b"plan")
    return folder


def asked_build(**changes: int) -> EngineBuild:
    return EngineBuild(precision="fp16", family="qwen2", **{**ASKED, **changes})


def change(built: Path, **limits: int | None) -> None:
    config = json.loads((built / "config.json").read_text())
    config["build_config"] = {name: value for name, value in {**ASKED, **limits}.items() if value is not None}
    (built / "config.json").write_text(json.dumps(config))


def test_an_engine_gets_its_contract_and_nothing_of_the_model(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine.run(work_in(built.parent, built, **ASKED))
    assert {path.name for path in built.iterdir()} == {"config.json", "rank0.engine", engine_requirements.FILE}
    assert engine_requirements.read(built).gpu == H100.name
    assert capsys.readouterr().out == f"engine for {H100.name}: 1 ranks, 0.00 GB\n"


@pytest.mark.parametrize("name", ASKED)
def test_an_option_that_the_builder_passed_over_is_found(built: Path, name: str) -> None:
    change(built, **{name: ASKED[name] - 1})
    with pytest.raises(StageError, match=f"the engine's {name} is {ASKED[name] - 1}, expected {ASKED[name]}"):
        engine.run(work_in(built.parent, built, **ASKED))
    assert not (built / engine_requirements.FILE).exists()


def test_lengths_are_compared_as_the_first_releases_write_them(built: Path) -> None:
    change(built, max_seq_len=None, max_output_len=64, max_num_tokens=None)
    engine.check_limits(built, asked_build())
    change(built, max_seq_len=None, max_output_len=65)
    with pytest.raises(StageError, match="the engine's max_seq_len is 193, expected 192"):
        engine.check_limits(built, asked_build())


def test_an_engine_drafts_as_it_was_asked_to(built: Path) -> None:
    asked = asked_build(speculative="medusa", max_draft_len=63)
    change(built, max_seq_len=192 + 63, max_draft_len=63, speculative_decoding_mode=4, max_num_tokens=4 * 64)
    engine.check_limits(built, asked)
    for name, value, words in (
        ("max_draft_len", 62, "max_draft_len is 62, expected 63"),
        ("speculative_decoding_mode", 1, "speculative decoding is None, expected medusa"),
        ("max_seq_len", 192, "max_seq_len is 129, expected 192"),
    ):
        good = {"max_seq_len": 255, "max_draft_len": 63, "speculative_decoding_mode": 4, "max_num_tokens": 256}
        change(built, **{**good, name: value})
        with pytest.raises(StageError, match=words):
            engine.check_limits(built, asked)


@pytest.mark.parametrize("asked", [4096, 769])
def test_more_tokens_than_a_full_batch_are_the_builder_s_to_cut(built: Path, asked: int) -> None:
    full = 4 * 192
    change(built, max_num_tokens=full)
    engine.check_limits(built, asked_build(max_num_tokens=asked))
    for other in (full - 1, full + 1):
        change(built, max_num_tokens=other)
        with pytest.raises(StageError, match=f"the engine's max_num_tokens is {other}, expected 4096"):
            engine.check_limits(built, asked_build(max_num_tokens=4096))


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_builder_that_left_no_engine_ends_in_words(built: Path, text: str | None) -> None:
    (built / "config.json").unlink()
    if text is not None:
        (built / "config.json").write_text(text)
    with pytest.raises(StageError, match=r"is not an engine directory: config\.json"):
        engine.run(work_in(built.parent, built, **ASKED))


@pytest.mark.parametrize(("examples", "how"), [("/app/examples", "run.py"), (None, "files")])
def test_a_check_says_how_it_was_made(
    built: Path, monkeypatch: pytest.MonkeyPatch, examples: str | None, how: str
) -> None:
    engine_requirements.write(built, H100)
    found = Machine(2, "test", (H100,), tensorrt_llm=TensorRTLLM("1.0.0", examples=examples))
    monkeypatch.setattr(probe, "this_machine", lambda: found)
    out = built.parent / "check"
    out.mkdir()
    engine.run_check(context(EngineCheck, {}, {"engine": built}, {}, out, built.parent))
    assert json.loads((out / "check.json").read_text()) == {"schema": 1, "how": how, "world_size": 1}


def test_an_engine_for_another_machine_fails_its_check(built: Path) -> None:
    engine_requirements.write(built, Gpu(0, "GPU-1", "NVIDIA A100", 80 << 30, 80))
    with pytest.raises(ServerError, match="compute capability 80"):
        engine.run_check(work_in(built.parent, built))


# --------------------------------------------------------------------------------------------------------------- files


def test_a_file_is_linked_past_links_or_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--name"
    blobs, source, target = repository / "blobs", repository / "snapshots" / "abc", tmp_path / "target"
    for folder in (blobs, source, target):
        folder.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    (source / "tokenizer.json").symlink_to(blobs / "abc")
    files.link(source, "tokenizer.json", target / "tokenizer.json")
    assert [path.name for path in target.iterdir()] == ["tokenizer.json"]
    assert not (target / "tokenizer.json").is_symlink()
    assert (target / "tokenizer.json").samefile(blobs / "abc")

    def other_file_system(_source: Path, _target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_file_system)
    files.link(source, "tokenizer.json", target / "copy")
    assert (target / "copy").read_text() == "{}"
    assert not (target / "copy").samefile(blobs / "abc")


# ------------------------------------------------------------------------------------------------------ calibration set

TEMPLATE = {"chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}
ASK = {"role": "user", "content": "Why?"}


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: object) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return path

    (tmp_path / "model").mkdir()
    return write


def written(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]


def test_rows_become_texts_in_their_order(rows: Callable[..., Path], tmp_path: Path) -> None:
    data = rows(*({"text": f"row {number} ü"} for number in range(9)))
    out = tmp_path / "calibration"
    assert dataset.write(data, tmp_path / "model", Selection(samples=4, seed=3), out) == 4
    texts = written(out)
    assert len(set(texts)) == 4
    assert texts == sorted(texts)
    assert dataset.write(data, tmp_path / "model", Selection(samples=100), out) == 9


def test_conversations_are_rendered_with_the_model_s_template(rows: Callable[..., Path], tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "calibration"
    (model / "tokenizer_config.json").write_text(json.dumps(TEMPLATE))
    data = rows({"messages": [ASK, {"role": "assistant", "content": "So."}]}, {"text": "plain"})
    dataset.write(data, model, Selection(), out)
    assert written(out) == ["<user>Why?<assistant>So.", "plain"]
    dataset.write(data, model, Selection(chat_template=True), out)
    assert written(out) == ["<user>Why?<assistant>So.", "<user>plain"]


@pytest.mark.parametrize(
    ("row", "selection", "failure", "words"),
    [
        ({"messages": [ASK]}, {}, FailureClass.INFEASIBLE, "has no chat template"),
        ({"text": "x"}, {"chat_template": True}, FailureClass.INFEASIBLE, "has no chat template"),
        ({"input_ids": [1, 2]}, {}, FailureClass.USER, "quantize.py only reads text, not rows of token ids"),
        ({"wrong": 1}, {}, FailureClass.USER, "expected an object with"),
    ],
)
def test_rows_that_a_script_cannot_have_fail_the_stage_in_words(
    rows: Callable[..., Path],
    tmp_path: Path,
    row: object,
    selection: dict[str, Any],
    failure: FailureClass,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"calibration_data": rows(row)}
    asked = {"precision": "fp8", "family": "qwen2", "calibration": selection}
    work = context(Checkpoint, asked, {"model": tmp_path / "model"}, files, tmp_path / "out", tmp_path)
    write_job("quantize", None, work)
    assert worker.main(dataset.command(work)[3:]) == 1
    assert words in capsys.readouterr().err
    told = json.loads((tmp_path / "failure.json").read_text())
    assert told["failure"] == failure.value
    assert words in told["message"]
    with pytest.raises((StageError, MatrixError)):
        dataset.write(tmp_path / "rows.jsonl", tmp_path / "model", Selection(**selection), tmp_path / "calibration")


@pytest.mark.parametrize("name", ["cnn_dailymail", "my-ScienceQA-runs"])
def test_a_path_that_quantize_py_would_take_for_a_data_set_is_refused(
    rows: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    data = rows({"text": "x"})
    with pytest.raises(StageError, match="in it as the data set of that name"):
        dataset.write(data, tmp_path / "model", Selection(), tmp_path / name / "calibration")
    assert not (tmp_path / name).exists()


def test_the_command_line_of_a_stage_writes_the_set(
    rows: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration: dict[str, Json] = {"samples": 1, "max_length": 16, "seed": 0, "chat_template": False}
    work = context(
        Checkpoint,
        {"precision": "fp8", "family": "qwen2", "calibration": calibration},
        {"model": tmp_path / "model"},
        {"calibration_data": rows({"text": "a"}, {"text": "b"})},
        tmp_path / "out",
        tmp_path,
    )
    write_job("quantize", None, work)
    assert worker.main(dataset.command(work)[3:]) == 0
    assert capsys.readouterr().out == "1 calibration rows\n"
    assert len(written(dataset.folder(work))) == 1
