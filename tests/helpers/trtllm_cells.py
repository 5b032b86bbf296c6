"""Cells of the TensorRT-LLM backends, and plans for machines that are only described: nothing is run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from trtllm_pipeline.base.domain import Cell, CellId, Json
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.orchestrate.matrix.models import Settings
from trtllm_pipeline.orchestrate.plan.plan import Plan, StageRun, make_plan
from trtllm_pipeline.orchestrate.plan.plan_file import command_lines
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains

ENGINES: Final = "tensorrt_llm"
PYTORCH: Final = "tensorrt_llm_pytorch"
RELEASE: Final = "1.0.0"
"""Has both backends, and trtllm-serve for both."""
RECIPE: Final[Mapping[str, Json]] = {
    "family": "llama",
    "source": {"hugging_face": "some/model", "revision": "1"},
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "parameters": 8_030_261_248,
}
"""Of the shape of Llama 3.1 8B."""


def machine(release: str = RELEASE, *, gpus: int = 8, more: str = "") -> Machine:
    """Hopper GPUs of 80 GiB with a release of TensorRT-LLM; `more` as for --assume."""
    return parse(f"tensorrt_llm=={release},sm=90,gpus={gpus},gpu_memory_gib=80{more}")


@lru_cache(maxsize=1)
def _defaults() -> Mapping[str, Any]:
    return Settings().model_dump(mode="json")


def settings_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The matrix's defaults with "SECTION.KEY" and "SECTION.KEY.KEY" set to other values."""
    found: dict[str, Any] = copy.deepcopy(dict(_defaults()))
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = found
        for section in sections:
            place = place[section]
        place[key] = value
    return found


def cell(
    precision: str = "fp16",
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    batch: int = 8,
    osl: int = 64,
    toolchain: str = ENGINES,
    recipe: Mapping[str, Json] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Cell:
    return Cell(
        id=CellId(f"model/{toolchain}/{precision}/tp{tp}pp{pp}/bs{batch}/isl128-osl{osl}"),
        model="model",
        toolchain=toolchain,
        precision=precision,
        tp=tp,
        pp=pp,
        max_batch_size=batch,
        isl=128,
        osl=osl,
        recipe={**RECIPE, **(recipe or {})},
        settings=settings_of(settings or {}),
        ep=ep,
        dp=dp,
    )


def infeasible(asked: Cell, on: Machine | None = None) -> str | None:
    """Why the cell's toolchain refuses it."""
    return toolchains.load(asked.toolchain).infeasible(asked, on or machine())


def plan(*cells: Cell, on: Machine | None = None, content: str = "c") -> Plan:
    """The plan for cells that all can work; `content` is what the user's files hold."""
    on = on or machine()
    for each in cells:
        assert infeasible(each, on) is None
    used = {name: toolchains.load(name) for name in {each.toolchain for each in cells}}
    return make_plan(cells, used, on, digest=lambda path, _cell: (f"/data/{path}", content))


def stages(planned: Plan, asked: Cell) -> list[str]:
    """Names of the stages of a cell, in the order of the flow."""
    return [planned.stage_runs[run].stage.name for run in planned.by_cell[asked.id]]


def stage_run(planned: Plan, stage: str) -> StageRun:
    """The only stage run of a stage."""
    (found,) = (run for run in planned.stage_runs.values() if run.stage.name == stage)
    return found


def commands(planned: Plan, stage: str) -> list[list[str]]:
    """Command lines of the only stage run of a stage; its inputs lie in /INPUT, its attempt in /attempt."""
    run = stage_run(planned, stage)
    inputs = {name: f"/{name}" for name in run.inputs}
    return [list(command) for command in command_lines(run, inputs, "/attempt", planned.machine)]


def values(command: list[str]) -> dict[str, str]:
    """Option -> the word after it."""
    return {word: after for word, after in zip(command, [*command[1:], ""], strict=True) if word.startswith("--")}
