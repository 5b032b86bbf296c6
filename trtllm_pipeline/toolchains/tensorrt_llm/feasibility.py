"""Why a cell can never work on a machine with TensorRT-LLM. Asked while planning; nothing is run or read."""

from __future__ import annotations

from trtllm_pipeline.domain import Cell
from trtllm_pipeline.machine.model import Machine
from trtllm_pipeline.toolchains.tensorrt_llm.case import Case
from trtllm_pipeline.toolchains.tensorrt_llm.rules import RULES, Rule


def refusal(cell: Cell, machine: Machine, installed_help: str | None = None) -> tuple[Rule, str] | None:
    """The first rule of the release that `cell` breaks, with its words, or None. The machine has TensorRT-LLM.

    `installed_help` is what the installed `trtllm-build --help` prints, where there is one to ask.
    """
    assert machine.tensorrt_llm is not None
    case = Case.of(cell, machine, machine.tensorrt_llm, installed_help)
    for rule in RULES:
        if cell.toolchain in rule.toolchains and rule.holds_in(case.release) and (said := rule.check(case)) is not None:
            return rule, said
    return None


def infeasible(cell: Cell, machine: Machine, installed_help: str | None = None) -> str | None:
    """Why `cell` can never work on `machine`, and what to do, or None; for both toolchains of TensorRT-LLM."""
    if machine.tensorrt_llm is None:
        return "TensorRT-LLM is not installed"
    found = refusal(cell, machine, installed_help)
    if found is None:
        return None
    rule, said = found
    return f"{said}; {rule.hint}" if rule.hint else said
