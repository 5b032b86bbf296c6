"""The embedded toolchain: a real Triton Inference Server from a PyPI wheel and llama.cpp, on any machine, without a GPU.

download -> convert (with quantization) -> build -> repository -> launch -> smoke, perf, accuracy
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from trtllm_pipeline.base import Cell, Json, Machine, Resources, ServerError, version_of
from trtllm_pipeline.models import CONVERTED, ModelPart
from trtllm_pipeline.tensorrt.embedded import durations, needs
from trtllm_pipeline.tensorrt.embedded.params import (
    ARCHITECTURES,
    PRECISIONS,
    BuildEmbedded,
    ConvertEmbedded,
    RepositoryEmbedded,
)
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.params import LaunchEmbedded, load, table
from trtllm_pipeline.tensorrt.stage.repository_settings import TextModels
from trtllm_pipeline.tensorrt.toolchains.catalog import Toolchain
from trtllm_pipeline.tensorrt.toolchains.common_stages import (
    ACCURACY,
    DOWNLOAD,
    PERF,
    SCORE,
    SMOKE,
    exclusive,
    foreign,
    launch,
    planned_server,
)
from trtllm_pipeline.tensorrt.toolchains.numerics import PLAIN, Numerics, numerics
from trtllm_pipeline.tensorrt.toolchains.standard_tasks import TASKS

_READ: Final = CONVERTED | {ModelPart.TOKENIZER}
"""A GGUF file includes the vocabulary."""
_OWN_SETTINGS: Final = {
    # section -> the settings that this toolchain supports, () for all except the options of TensorRT-LLM's programs
    "quantize": (),
    "serve": (),
    "build": {"max_num_tokens", "timeout_s", "retries"},
    "repository": {*(each.name for each in table(TextModels)), "timeout_s", "retries"},
}


def _missing(_machine: Machine) -> str | None:
    missing = next((package for package in ("xllamacpp", "gguf") if importlib.util.find_spec(package) is None), None)
    if missing is None:
        missing = "nvidia-pytriton" if _triton() is None else None
    if missing is None:
        return None
    if sys.version_info >= (3, 13):
        return f"needs Python 3.10 to 3.12, this is {sys.version_info.major}.{sys.version_info.minor}"
    return f"the package {missing} is not installed"


def _triton() -> str | None:
    """The server that would be started and its version, without its path. None without one."""
    from trtllm_pipeline.base import triton_installation

    try:
        return triton_installation.find().source
    except ServerError:
        return None


@lru_cache(maxsize=1)
def _identity(machine: Machine) -> Mapping[str, Json]:
    return {
        "gguf": version_of("gguf"),
        "xllamacpp": version_of("xllamacpp"),
        "triton": _triton(),
        "cpu": f"{machine.cpu} x {machine.cpus}",
    }


def _infeasible(cell: Cell, _machine: Machine) -> str | None:
    if cell.tp * cell.pp != 1:
        return f"tp{cell.tp}pp{cell.pp}: the embedded toolchain runs on one CPU host, tp1 only"
    family = cell.recipe.get("family")
    if family is not None and family not in ARCHITECTURES.values():
        return f"family {family}: the embedded toolchain converts {', '.join(ARCHITECTURES.values())}"
    if cell.precision not in PRECISIONS:
        instead = "; for 4 bits use int4_wo" if cell.precision == "int4_awq" else ""
        return f"precision {cell.precision}: the embedded toolchain supports {', '.join(PRECISIONS)}{instead}"
    if cell.settings["quantize"]["kv_cache_precision"] not in {None, "fp16"}:
        return f"settings.quantize.kv_cache_precision {cell.settings['quantize']['kv_cache_precision']}: only fp16 here"
    if (reason := foreign(cell, _OWN_SETTINGS)) is not None:
        return reason
    if cell.settings["serve"]["frontend"] != "triton":
        frontend = cell.settings["serve"]["frontend"]
        return f"settings.serve.frontend {frontend}: the embedded toolchain serves with Triton"
    return None


def numerics_of(cell: Cell) -> Numerics:
    """What a cell's precision means. llama.cpp rounds activations to blocks of 8 bits before products with quantized weights."""
    if cell.precision in PLAIN:
        return numerics(cell, kv_cache="fp16", made="")
    kind = {"int8_wo": "GGUF Q8_0", "int4_wo": "GGUF Q4_0"}.get(cell.precision, cell.precision)
    return Numerics(kind, "int8 blocks", "fp16", "rounded to nearest, without calibration")


CONVERT = Stage(
    name="convert",
    version=3,
    summary="convert a Hugging Face directory to a GGUF checkpoint in the cell's precision",
    program="trtllm_pipeline.tensorrt.embedded.gguf_file:run",
    inputs={"model": "download"},
    parts=lambda _cell: {"model": _READ},
    params=ConvertEmbedded,
    read=lambda cell: load(ConvertEmbedded, {"precision": cell.precision}),
    section="quantize",
    identity=("gguf", "xllamacpp"),
    expected_s=1.0,
    takes=durations.converting,
    needs=needs.converting,
)

BUILD = Stage(
    name="build",
    version=2,
    summary="build an engine directory: weights, limits, and a test that it loads",
    program="trtllm_pipeline.tensorrt.embedded.build:run",
    inputs={"checkpoint": "convert"},
    params=BuildEmbedded,
    read=lambda cell: load(
        BuildEmbedded,
        {"max_batch_size": cell.max_batch_size, "max_input_len": cell.isl, "max_seq_len": cell.isl + cell.osl},
        cell.settings["build"],
    ),
    identity=("xllamacpp",),
    needs=needs.building,
    expected_s=1.2,
    takes=durations.building,
)

REPOSITORY = Stage(
    name="repository",
    version=3,
    summary="write the five-model Triton repository for an engine",
    program="trtllm_pipeline.tensorrt.embedded.repository:run",
    inputs={"engine": "build", "model": "download"},
    expected_s=0.2,
    params=RepositoryEmbedded,
    read=lambda cell: load(RepositoryEmbedded, {"max_batch_size": cell.max_batch_size}, cell.settings["repository"]),
)

TOOLCHAIN: Final = Toolchain(
    name="embedded",
    summary="Triton from a PyPI wheel and llama.cpp; any machine, no GPU",
    has_family=lambda family: family in ARCHITECTURES.values(),
    stages=(
        DOWNLOAD,
        CONVERT,
        BUILD,
        REPOSITORY,
        replace(
            launch(LaunchEmbedded),
            inputs={"repository": "repository"},
            identity=("triton", "xllamacpp"),
            # All CPUs: the number that the runtime uses is unknown, so no other stage runs at the same time.
            resources=lambda cell, machine: Resources(cpus=machine.cpus, exclusive=exclusive(cell)),
            starts=lambda _cell, context, machine: (planned_server(context, machine),),
            needs=needs.serving,
            expected_s=5.0,
            takes=durations.loading,
        ),
        SMOKE,
        PERF,
        ACCURACY,
        SCORE,
        TASKS,
    ),
    missing=_missing,
    identity=_identity,
    infeasible=_infeasible,
    numerics=numerics_of,
)
