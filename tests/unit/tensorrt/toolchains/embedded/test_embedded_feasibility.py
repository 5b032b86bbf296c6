"""Cells that the embedded toolchain refuses, and what it suggests."""

from __future__ import annotations

from tests.helpers.trtllm_cells import cell, machine
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains


def test_awq_is_infeasible_and_the_reason_names_a_4_bit_precision() -> None:
    infeasible = toolchains.load("embedded").infeasible
    reason = infeasible(cell("int4_awq", toolchain="embedded"), machine())
    assert reason == (
        "precision int4_awq: the embedded toolchain supports fp32, fp16, bf16, int8_wo, int4_wo; for 4 bits use int4_wo"
    )
    assert infeasible(cell("int4_wo", toolchain="embedded"), machine()) is None
