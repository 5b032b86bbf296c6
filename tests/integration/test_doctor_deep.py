"""`pipeline doctor --deep` as a process: whole on the embedded toolchain, and through the stand-ins of TensorRT-LLM.

The stand-ins compute nothing. Where they are given the float reference's answers they stand for a right server, where
not for one that says something else. No TensorRT-LLM runs here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import pipeline
from tests.helpers.trtllm_runs import Lane
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.show.proof import budget, material


def rows(found: dict[str, Any], kind: str = "cell") -> dict[str, dict[str, Any]]:
    """Findings of a kind; of cells by precision, and by layout where that is over several GPUs."""
    return {
        " ".join(filter(None, (each["precision"], (each["layout"] or "").replace("tp1pp1", "")))) or each["name"]: each
        for each in found["findings"]
        if each["kind"] == kind
    }


def answer_right(lane: Lane, *families: str) -> None:
    """Let servers say what the float reference says, as right ones would."""
    folder = lane.folder / "reference"
    material.write(folder, Machine(1, "CPU"), families=families, precisions=["fp16"], toolchain_names=["tensorrt_llm"])
    said = {
        family: {row["input"]: row["output"] for row in map(json.loads, (folder / f"{family}.jsonl").open())}
        for family in families
    }
    path = lane.folder / "answers.json"
    path.write_text(json.dumps(said if len(families) > 1 else said[families[0]]))
    lane.environment["TRTLLM_STANDIN_ANSWERS"] = str(path)


def test_the_embedded_toolchain_is_verified_once_and_then_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    words = (
        "doctor",
        "--deep",
        "--toolchain",
        "embedded",
        "--precision",
        "fp16,int4_wo,fp8",
        "--family",
        "qwen3,qwen3",
    )
    command = [sys.executable, "-m", "trtllm_pipeline", *words, "--format", "json"]

    def examine() -> tuple[dict[str, Any], str]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert json.loads((tmp_path / ".pipeline/doctor/deep.json").read_text()) == found
        return found, done.stderr

    found, _ = examine()
    cells = rows(found)
    assert {name: each["status"] for name, each in cells.items()} == {
        "fp16": "verified",
        "int4_wo": "verified",
        "fp8": "cannot",
    }
    assert "the embedded toolchain supports" in cells["fp8"]["detail"]
    right, coarse = (cells[name]["agreement"] for name in ("fp16", "int4_wo"))
    assert (right["tokens"], right["unreadable"]) == (8 * material.MAX_TOKENS, [])
    assert right["loss_nats"] < 0.01 < coarse["loss_nats"] < cells["int4_wo"]["tolerance_nats"]
    assert len(found["verified"]) == 1
    assert "qwen3" in found["verified"][0]
    store = tmp_path / ".pipeline/store"
    made = {path: path.stat().st_ino for path in store.glob("*/*")}
    assert found["forecast"]["expected_s"] > 0
    again, told = examine()
    assert again == {**found, "forecast": None}
    assert {path: path.stat().st_ino for path in store.glob("*/*")} == made
    assert "launch" not in told

    # What is known already takes no time; for the others there is none.
    monkeypatch.setattr(budget, "chosen", partial(budget.chosen, limit_s=0))
    words = ("doctor", "--deep", "--toolchain", "embedded", "--family", "qwen3", "--format", "json")
    limited = rows(json.loads(pipeline(*words, cwd=tmp_path).stdout))
    assert {name: each["status"] for name, each in limited.items() if name in cells} == {
        "fp16": "verified",
        "int4_wo": "verified",
    }
    others = limited.keys() - cells.keys()
    assert others
    assert all("postponed to the next run" in limited[name]["detail"] for name in others)
    assert {path: path.stat().st_ino for path in store.glob("*/*")} == made


def test_engines_with_right_answers_are_verified_and_with_others_differ(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.0.0")
    words = ("doctor", "--deep", "--toolchain", "tensorrt_llm", "--format", "json")
    answer_right(lane, "llama")
    found = json.loads(lane.pipeline(*words, "--precision", "fp8,nvfp4", "--workspace", str(tmp_path / "right")))
    assert {name: each["status"] for name, each in rows(found).items()} == {
        f"{precision}{layout}": "cannot" if precision == "nvfp4" else "verified"
        for precision in ("fp8", "nvfp4")
        for layout in ("", " tp2pp1", " tp1pp2")  # the stand-ins have four GPUs
    }
    assert {name: each["status"] for name, each in rows(found, "program").items()} == dict.fromkeys(
        (
            *("trtllm-build", "trtllm-serve", "quantize.py", "run.py"),
            *(f"convert_checkpoint.py:{name}" for name in ("llama", "medusa", "eagle")),
        ),
        "verified",
    )
    assert rows(found, "templates")["Triton templates"]["status"] == "verified"
    assert found["tensorrt_llm"] == "1.0.0"
    assert len(found["verified"]) == 3 + 2
    assert all(line.startswith("TensorRT-LLM 1.0.0 on NVIDIA H100 80GB HBM3: ") for line in found["verified"])
    starts = lane.starts()
    assert starts["trtllm-build"] == 3 + 1  # three engines, and --help

    del lane.environment["TRTLLM_STANDIN_ANSWERS"]
    lane.environment["CUDA_VISIBLE_DEVICES"] = "0"
    script = lane.installed.program("trtllm-build")
    script.write_text(
        script.read_text().replace(
            "sys.exit", "print('  --brand_new X\\n') if '--help' in sys.argv else None\nsys.exit"
        )
    )
    found = json.loads(lane.pipeline(*words, "--precision", "fp16", "--workspace", str(tmp_path / "wrong"), code=1))
    (wrong,) = rows(found).values()
    assert (wrong["precision"], wrong["status"]) == ("fp16", "differs")
    assert wrong["agreement"]["loss_nats"] > 1 or wrong["agreement"]["unreadable"]
    assert (tmp_path / "wrong" / wrong["log"]).name == "answers.jsonl"
    assert (tmp_path / "wrong" / wrong["log"]).is_file()
    build = rows(found, "program")["trtllm-build"]
    assert (build["status"], build["comparison"]["new"]) == ("differs", ["--brand_new"])
    assert not any("matches the float reference" in line for line in found["verified"])


PYTORCH = ("doctor", "--deep", "--toolchain", "tensorrt_llm_pytorch", "--format", "json")


def test_the_pytorch_runtime_with_right_answers_is_verified_and_with_others_differs(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.0.0", gpus=1, model_optimizer="0.47.0")
    answer_right(lane, "llama")
    words = (*PYTORCH, "--precision", "fp16,fp8,nvfp4")
    found = json.loads(lane.pipeline(*words, "--workspace", str(tmp_path / "right")))
    cells = rows(found)
    statuses = {name: each["status"] for name, each in cells.items()}
    assert statuses == {"fp16": "verified", "fp8": "verified", "nvfp4": "cannot"}
    assert "needs SM 100" in cells["nvfp4"]["detail"]
    assert (cells["fp8"]["agreement"]["loss_nats"], cells["fp8"]["agreement"]["tokens"]) == (0, 8 * material.MAX_TOKENS)
    # What is installed for engines is not this toolchain's.
    assert {name: each["status"] for name, each in rows(found, "program").items()} == {"trtllm-serve": "verified"}
    assert not rows(found, "templates")
    assert lane.starts() == {"model_optimizer": 1, "trtllm-serve": 1}
    assert [line.partition(", in ")[2] for line in found["verified"]] == ["fp16, fp8", ""]

    del lane.environment["TRTLLM_STANDIN_ANSWERS"]
    found = json.loads(lane.pipeline(*PYTORCH, "--precision", "fp16", "--workspace", str(tmp_path / "wrong"), code=1))
    wrong = rows(found)["fp16"]
    assert wrong["status"] == "differs"
    assert wrong["agreement"]["loss_nats"] > 1 or wrong["agreement"]["unreadable"]
    assert (tmp_path / "wrong" / wrong["log"]).is_file()


def test_trtllm_serve_serves_where_there_is_no_triton_and_its_options_are_compared(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.0.0", gpus=1)
    del lane.environment["TENSORRT_LLM_TEMPLATES"]
    answer_right(lane, "llama")
    script = lane.installed.program("trtllm-serve")
    script.write_text(
        script.read_text().replace(
            "sys.exit", "print('  --brand_new TEXT\\n') if '--help' in sys.argv else None\nsys.exit"
        )
    )
    found = json.loads(lane.pipeline(*PYTORCH, "--precision", "fp16,fp8", code=1))
    cells = rows(found)
    assert {name: each["status"] for name, each in cells.items()} == {"fp16": "verified", "fp8": "cannot"}
    assert "Model Optimizer is not installed" in cells["fp8"]["detail"]
    serve = rows(found, "program")["trtllm-serve"]
    assert (serve["status"], serve["comparison"]["new"]) == ("differs", ["--brand_new"])
    assert [start.argv[0] for start in lane.installed.invocations("trtllm-serve")] == ["serve", "serve"]


@pytest.mark.nightly
def test_the_pytorch_runtime_in_the_families_and_precisions_that_it_has(tmp_path: Path) -> None:
    has = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "phi3")
    lane = Lane(tmp_path / "lane", "1.2.0", sm=100, gpus=1, model_optimizer="0.47.0")
    answer_right(lane, *has)
    words = (*PYTORCH, "--family", ",".join((*has, "gemma2")), "--precision", "all")
    found = json.loads(lane.pipeline(*words))
    done = {(each["family"], each["precision"]) for each in found["findings"] if each["status"] == "verified"}
    assert done - {(None, None)} == {
        (family, precision) for family in has for precision in ("fp16", "bf16", "fp8", "nvfp4")
    }
    assert not found["counts"]["differs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--family", "llama"), "--family and --precision require --deep"),
        (("--deep", "--assume", "gpus=0"), "--deep runs on this machine"),
        (("--deep", "--family", "mamba"), "unknown name 'mamba'"),
        (("--deep", "--precision", "fp16,"), "unknown name ''"),
        (("--deep", "--toolchain", "tensorrt_llm"), "TensorRT-LLM is not installed"),
        (("--deep", "--toolchain", "vllm"), "unknown name 'vllm'"),
    ],
)
def test_what_cannot_be_examined_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words]) in {2, 3}
    assert said in capsys.readouterr().err
    assert not (tmp_path / ".pipeline").exists()
