"""Verbs of the engine backend on explicit files: what would fail late, or make something else, is refused in words."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.contexts import context
from tests.helpers.trtllm_cells import machine
from tests.unit.tensorrt.toolchains.test_trtllm_checkpoint import CONFIG, safetensors
from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.orchestrate.run import by_hand
from trtllm_pipeline.show.cli import app
from trtllm_pipeline.tensorrt.stage.calibration_rows import default_set, read_rows
from trtllm_pipeline.tensorrt.trtllm import dataset, engine_backend
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint, EngineBuild

BUILD = "build --checkpoint checkpoint --family llama --max-batch-size 4 --max-num-tokens 64"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model and an FP8 checkpoint of one rank, on a machine where no program may be started."""
    monkeypatch.setattr(probe, "this_machine", machine)
    monkeypatch.chdir(tmp_path)

    def started(*_arguments: object) -> None:
        raise AssertionError("a program was about to be started")

    monkeypatch.setattr(by_hand, "run_program", started)
    monkeypatch.setattr("subprocess.run", started)
    (tmp_path / "model").mkdir()
    (tmp_path / "checkpoint").mkdir()
    config = {**CONFIG, "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1}}
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    safetensors(tmp_path / "checkpoint" / "rank0.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "convert --model model --family llama --precision fp8",
            "convert_checkpoint.py of TensorRT-LLM 1.0.0 does not create fp8 for llama",
        ),
        (
            "convert --model model --family llama --precision fp16 --kv-cache-precision fp8",
            "does not create fp16 with a cache of fp8 for llama",
        ),
        ("convert --model model --family lama --precision fp16", '--family "lama" is not allowed'),
        ("convert --model model --family llama --precision fp17", '--precision "fp17" is not allowed'),
        (
            "convert --model model --family llama --precision fp16 --options [1]",
            "--options: '[1]' is not of the form NAME=VALUE",
        ),
        (
            "convert --model model --family llama --precision fp16 --tp 0",
            "--tp should be greater than or equal to 1, not 0",
        ),
        (
            "quantize --model model --family llama --precision fp8 --calibration-sample 8",
            "no such option: --calibration-sample; did you mean --calibration-samples",
        ),
        (
            "quantize --model model --family llama --precision fp8 --batch-size 0",
            "--batch-size should be greater than or equal to 1, not 0",
        ),
        (
            "quantize --model model --family llama --precision fp8 --kv-cache-precision fp4",
            "--kv-cache-precision \"fp4\" is not allowed; did you mean 'fp8'",
        ),
        (
            f"{BUILD} --precision fp8 --max-input-len 96 --max-seq-len 128 --options max_batch_size=9",
            "max_batch_size of trtllm-build is set by an option of this verb",
        ),
        (
            "convert --model model --family llama --precision fp16 --options --tp_size=4",
            "--tp_size of convert_checkpoint.py is set by an option of this verb",
        ),
        (f"{BUILD} --precision fp17 --max-input-len 96 --max-seq-len 128", '--precision "fp17" is not allowed'),
        (f"{BUILD} --precision fp8 --max-input-len 96 --max-seq-len 64", "expected more than max_input_len 96"),
        (
            f"{BUILD} --precision fp8 --max-input-len 96 --max-seq-len 128 --tp 2",
            "mapping.world_size is 1, expected 2 for tp2pp1",
        ),
        (
            f"{BUILD} --precision fp16 --max-input-len 96 --max-seq-len 128",
            "quant_algo is FP8, expected None for fp16",
        ),
    ],
)
def test_what_would_make_something_else_is_refused(
    here: Path, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *arguments = shlex.split(words)
    code = app.main(["stage", verb, "--toolchain", "tensorrt_llm", *arguments, "--output-dir", str(here / "out")])
    assert code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["64", "512", "0"]),
        ({"samples": 512}, ["64", "512", "0"]),
        ({"samples": 8}, ["8", "512", "0"]),
        ({"samples": 8, "seed": 3}, ["8", "512", "3"]),
    ],
)
def test_calibration_is_the_default_one_as_far_as_nothing_else_is_said(
    here: Path, given: Json, expected: list[str]
) -> None:
    params = {"precision": "fp8", "family": "llama", "calibration": given}
    work = context(Checkpoint, params, {"model": here / "model"}, {}, here / "out", here / "a")
    rows, quantize = map(list, engine_backend.QUANTIZE.commands(work, machine()))
    assert rows == dataset.command(work)
    dataset.run(work)
    taken = [json.loads(line)["text"] for line in (dataset.folder(work) / "train.jsonl").read_text().splitlines()]
    assert set(taken) <= {row.text for row in read_rows(default_set())}
    assert [quantize[quantize.index(f"--{name}") + 1] for name in ("calib_size", "calib_max_seq_length", "seed")] == (
        expected
    )
    assert "--kv_cache_dtype" not in quantize


@pytest.mark.parametrize(("asked", "built"), [(64, "64"), (None, "512")])
def test_a_checkpoint_that_fits_is_built(here: Path, asked: int | None, built: str) -> None:
    params: dict[str, Json] = {"precision": "fp8", "family": "llama", "max_batch_size": 4, "max_num_tokens": asked}
    params |= {"max_input_len": 96, "max_seq_len": 128}
    inputs = {"checkpoint": here / "checkpoint", "model": here / "model"}
    (build,) = engine_backend.BUILD.commands(
        context(EngineBuild, params, inputs, {}, here / "out", here / "a"), machine()
    )
    assert build[:3] == ["trtllm-build", "--checkpoint_dir", str(here / "checkpoint")]
    assert build[build.index("--max_num_tokens") + 1] == built, "as in a matrix, where nothing is said"
