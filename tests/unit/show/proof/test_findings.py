"""From rows, agreements and comparisons to findings: which status each gets, and what may be said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM
from trtllm_pipeline.base.text_blocks import as_markdown
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus
from trtllm_pipeline.show.proof import findings
from trtllm_pipeline.show.proof.findings import DeepExamination, FindingStatus
from trtllm_pipeline.show.proof.reference_answers import Agreement
from trtllm_pipeline.tensorrt.trtllm import installed, program_options
from trtllm_pipeline.tensorrt.trtllm.installed import InstalledComparison

AXES: dict[str, Any] = {"model": "./llama", "toolchain": "tensorrt_llm", "precision": "fp8", "tp": 1, "pp": 1}
DONE = CellResult(CellId("llama/fp8"), AXES, CellStatus.DONE, log="store/a/log")
GOOD = Agreement(8, 192, 180, 0.02, ())
H100 = Machine(8, "CPU", gpus=(Gpu(0, "GPU-a", "NVIDIA H100", 80 << 30, 90),), tensorrt_llm=TensorRTLLM("1.2.0"))


@pytest.mark.parametrize(
    ("row", "agreement", "status", "said"),
    [
        (DONE, GOOD, "verified", "180 of 192 tokens match the reference, 0.020 nats lost per token"),
        (DONE, replace(GOOD, loss_nats=0.31), "differs", "expected at most 0.3"),
        (
            DONE,
            replace(GOOD, unreadable=("a",)),
            "differs",
            "1 of 8 answers contain text that this model cannot generate",
        ),
        (DONE, None, "cannot", "not finished: done"),
        (replace(DONE, status=CellStatus.INFEASIBLE, reason="too old"), None, "cannot", "too old"),
        (replace(DONE, status=CellStatus.INTERRUPTED), None, "cannot", "not finished: interrupted"),
        (
            replace(DONE, status=CellStatus.FAILED, failed_stage="build", failure="infeasible", reason="no kernel"),
            None,
            "differs",
            "build failed: no kernel",
        ),
        (
            replace(DONE, status=CellStatus.FAILED, failed_stage="build", failure="user", reason="disk is full"),
            None,
            "cannot",
            "build failed: disk is full",
        ),
    ],
)
def test_a_cell(row: CellResult, agreement: Agreement | None, status: str, said: str) -> None:
    found = findings.of_cell(row, agreement)
    assert found.status.value == status
    assert said in found.detail
    assert (found.log is None) == (status == "verified")


def test_answers_that_differ_can_be_found() -> None:
    done = replace(DONE, log=None)
    assert (
        findings.of_cell(done, replace(GOOD, loss_nats=2), "store/a/out/answers.jsonl").log
        == "store/a/out/answers.jsonl"
    )
    assert findings.of_cell(done, GOOD, "store/a/out/answers.jsonl").log is None


def test_programs_and_templates() -> None:
    same = findings.of_comparison(InstalledComparison("trtllm-build", ("b",), known=7))
    assert (same.kind, same.status, same.detail) == ("program", FindingStatus.VERIFIED, "7 options as recorded")
    more = findings.of_comparison(InstalledComparison("Triton templates", ("t",), known=7, new=("a",), gone=("b", "c")))
    assert (more.kind, more.status) == ("templates", FindingStatus.DIFFERS)
    assert more.detail == "7 placeholders as recorded; gone: b, c; new: a"
    absent = findings.of_comparison(InstalledComparison("run.py", (), reason="is not installed"))
    assert absent.status is FindingStatus.CANNOT


def examined(*found: findings.DeepFinding, **more: Any) -> DeepExamination:
    return DeepExamination(H100, findings.sorted_findings(found), **more)


def test_only_what_was_verified_may_be_said() -> None:
    good, bad = findings.of_cell(DONE, GOOD), findings.of_cell(DONE, replace(GOOD, loss_nats=2))
    other = findings.of_cell(replace(DONE, axes={**AXES, "precision": "fp16"}), GOOD)
    found = examined(good, other, findings.of_comparison(InstalledComparison("trtllm-build", ("b",), known=7)))
    split = findings.of_cell(replace(DONE, axes={**AXES, "tp": 2}), GOOD)
    assert [*examined(good, split).sentences()][1] == (
        "TensorRT-LLM 1.2.0 on NVIDIA H100: a tiny llama model built and served by tensorrt_llm over tp2pp1 matches the "
        "float reference within tolerance, in fp8"
    )
    assert found.exit_code == 0
    assert tuple(found.sentences()) == (
        (
            "TensorRT-LLM 1.2.0 on NVIDIA H100: a tiny llama model built and served by tensorrt_llm matches the float "
            "reference within tolerance, in fp8, fp16"
        ),
        "TensorRT-LLM 1.2.0 on NVIDIA H100: the options printed by trtllm-build match the recorded ones",
    )
    assert ([*examined(bad).sentences()], examined(bad).exit_code) == ([], 1)
    assert examined(findings.of_toolchain("embedded", "no wheel")).exit_code == 3
    assert examined(good, interrupted=True).exit_code == 130
    assert [each.status.value for each in examined(good, bad).findings] == ["differs", "verified"]


def test_text_and_json() -> None:
    found = examined(findings.of_cell(DONE, GOOD), findings.of_toolchain("embedded", "no wheel"))
    text = as_markdown(found.blocks())
    assert "TensorRT-LLM 1.2.0 on NVIDIA H100: 1 verified, 0 differs, 1 cannot" in text
    data = found.to_json()
    assert (data["schema"], data["tensorrt_llm"], data["gpus"]) == (1, "1.2.0", ["NVIDIA H100"])
    assert data["counts"] == {"verified": 1, "differs": 0, "cannot": 1}


def form(**changes: Any) -> program_options.Form:
    known = program_options.load()["trtllm-build"].at("--gemm_plugin", "1.0.0")
    return replace(known, **changes)


def test_what_is_another_in_help() -> None:
    recorded = form(kind="str", choices=("a", "b"))
    change = installed._change
    assert change(recorded, program_options.Installed(takes_value=True, choices=("b", "a", "None"))) is None
    assert change(recorded, program_options.Installed(takes_value=True, choices=None)) is None
    assert change(recorded, program_options.Installed(takes_value=False, choices=None)) == "no longer takes a value"
    told = change(recorded, program_options.Installed(takes_value=True, choices=("a",)))
    assert told == "takes one of a; recorded: a, b"


def test_nothing_is_compared_without_tensorrt_llm() -> None:
    assert installed.compare(Machine(1, "CPU"), ["llama"], engines=True) == ()
