"""Shared by the two backends of TensorRT-LLM: checkpoints, identity of the software, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import (
    Cell,
    Json,
    Machine,
    Resources,
    assume,
    canonical,
    digest_file,
    fingerprint,
    parse_parallel,
    probe,
    triton_installation,
)
from trtllm_pipeline.models import Fields
from trtllm_pipeline.tensorrt.modelopt.checkpoint_writer import FORM
from trtllm_pipeline.tensorrt.modelopt.formats import PRECISIONS
from trtllm_pipeline.tensorrt.servers.command_lines import nested
from trtllm_pipeline.tensorrt.stage.base import Stage, StageContext
from trtllm_pipeline.tensorrt.stage.calibration_rows import DEFAULT_DATA
from trtllm_pipeline.tensorrt.stage.params import LaunchFrontend
from trtllm_pipeline.tensorrt.stage.repository_settings import DEFAULTS
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES
from trtllm_pipeline.tensorrt.toolchains.common_stages import exclusive, launch
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape, computed, weights_bytes
from trtllm_pipeline.tensorrt.toolchains.numerics import Numerics, numerics
from trtllm_pipeline.tensorrt.trtllm import commands, prequantized, program_options
from trtllm_pipeline.tensorrt.trtllm.case import kv_cache, served_cache
from trtllm_pipeline.tensorrt.trtllm.installation import installed, script
from trtllm_pipeline.tensorrt.trtllm.params import (
    FRONTEND_DISAGGREGATED,
    FRONTEND_TRITON,
    FRONTEND_TRITON_OPENAI,
    IN_TRITON,
    NONE,
)
from trtllm_pipeline.tensorrt.trtllm.releases import QUANTIZE_SCRIPT, RUN_SCRIPT, at_least

LEAST_MODEL_OPTIMIZER: Final = "0.47"
"""Older releases expect other configurations."""
_ROOM: Final = 1.25
"""GPU memory that our worker needs for quantizing, as a multiple of the 16-bit weights."""
SCRIPT_ROOM: Final = 1.5
"""The same for quantize.py. Source: its README, 210 GB for Llama 70B in FP8."""
BACKEND: Final = "tensorrtllm"
"""Triton's backend for engines."""
_OF_EVERY_STAGE: Final = frozenset(("timeout_s", "retries"))


def launching(backend: str) -> Stage:
    """The stage that serves a cell with its frontend, using the functions of `launching` for "engine" or "pytorch"."""
    return replace(
        launch(LaunchFrontend),
        program=f"trtllm_pipeline.tensorrt.trtllm.launching:launch_{backend}",
        starter=f"trtllm_pipeline.tensorrt.trtllm.launching:{backend}_starter",
        identity=("tensorrt_llm", "gpu", "triton"),
        resources=serving_takes,
        gpus=lambda context: ranks_of(context.inputs.get("engine")),
    )


def world_size(cell: Cell) -> int:
    """Number of ranks, one per GPU."""
    return cell.tp * cell.pp


def expert_parallel(cell: Cell) -> int | None:
    """Size of expert parallelism. None without it."""
    return cell.ep if cell.ep > 1 else None


def checkpoint_params(cell: Cell) -> dict[str, Any]:
    """The settings that determine a cell's checkpoint. Batch size and lengths do not."""
    return {
        "family": cell.recipe["family"],
        "precision": computed(cell),
        "quantization": prequantized.form_of(cell),
        "kv_cache_precision": kv_cache(cell) or NONE,
        "tp": cell.tp,
        "pp": cell.pp,
        "ep": expert_parallel(cell),
    }


def numerics_of(cell: Cell) -> Numerics:
    weights = PRECISIONS.get(cell.precision)
    calibrated = weights is not None and weights.calibrated
    made = "calibrated with Model Optimizer" if calibrated else "rounded to nearest, without calibration"
    return numerics(cell, kv_cache=served_cache(cell), made=made)


def calibration_data(cell: Cell) -> Mapping[str, str]:
    return {"calibration_data": str(calibration(cell)["data"])}


def has_own_calibration_data(cell: Cell) -> bool:
    """True if a matrix names a calibration text."""
    return calibration(cell).get("data") != DEFAULT_DATA


def calibration(cell: Cell) -> Mapping[str, Json]:
    setting = cell.settings["quantize"]["calibration"]
    assert isinstance(setting, dict)
    return setting


def quantizes_by_script(cell: Cell, machine: Machine) -> bool:
    """True if the release's quantize.py creates the checkpoint, False if our worker does."""
    present = cell.toolchain == ENGINES and script(machine, QUANTIZE_SCRIPT) is not None
    return present and commands.has_calibration_option(installed(machine).release)


def quantizing_takes(cell: Cell, machine: Machine) -> Resources:
    """Enough GPUs for the unquantized weights and the computation, at most all of them."""
    memory = min((gpu.memory_bytes for gpu in machine.gpus), default=1)
    weights = weights_bytes(Shape.of(cell.recipe), "bf16", 1, 1) if "num_hidden_layers" in cell.recipe else 0
    room = SCRIPT_ROOM if quantizes_by_script(cell, machine) else _ROOM
    return Resources(gpus=max(1, min(len(machine.gpus), math.ceil(weights * room / memory))))


def one_gpu(_cell: Cell, _machine: Machine) -> Resources:
    """Converting computes little, but TensorRT-LLM does not load without a GPU."""
    return Resources(gpus=1)


def all_visible(_context: StageContext[Any]) -> None:
    """The number of GPUs that hold the model is unknown."""


def ranks_of(folder: Path | None) -> int | None:
    """The ranks of a checkpoint or an engine. None if it does not record them, or if nothing is built."""
    if folder is None:
        return None
    config = Fields.read_optional(folder, "config.json")
    built = config.fields("pretrained_config") if config.has("pretrained_config") else config
    return built.fields("mapping").optional_integer("world_size")


def all_ranks(cell: Cell, _machine: Machine) -> Resources:
    """One GPU per rank."""
    return Resources(gpus=world_size(cell))


def identity(machine: Machine) -> dict[str, Json]:
    """Versions and hardware that results depend on. Never a device's number, the host, or a path."""
    return {
        **probe.identity(machine),
        "cpu": f"{machine.cpu} x {machine.cpus}",
        "checkpoints": _checkpoint_makers(machine),
        "templates": _templates(machine),
    }


def _checkpoint_makers(machine: Machine) -> str:
    """The tools that create engines' checkpoints: the release's scripts, Model Optimizer, or both."""
    scripts = machine.tensorrt_llm is not None and machine.tensorrt_llm.examples is not None
    if machine.tensorrt_llm and scripts and commands.has_calibration_option(machine.tensorrt_llm.release):
        return "scripts"
    return f"{'scripts, ' * scripts}model_optimizer {machine.model_optimizer}, form {FORM}"


def _templates(machine: Machine) -> str | None:
    """Digest of the installed Triton templates, because people edit them. None without templates."""
    folder = machine.tensorrt_llm.templates if machine.tensorrt_llm else None
    if folder is None or machine.assumed:
        return None if folder is None else assume.ASSUMED
    return _folder_digest(folder)


@lru_cache(maxsize=4)
def _folder_digest(folder: str) -> str:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return fingerprint(canonical({str(path.relative_to(folder)): digest_file(path) for path in files}))


def frontend(cell: Cell) -> dict[str, Any]:
    """The frontend, and its own options."""
    # A repository is the same for either front end of Triton.
    if in_triton(cell):
        return {"frontend": FRONTEND_TRITON, "options": None}
    return {"frontend": cell.settings["serve"]["frontend"], "options": cell.settings["serve"]["options"]}


def in_triton(cell: Cell) -> bool:
    """True if Triton serves it, with either of its front ends."""
    return cell.settings["serve"]["frontend"] in IN_TRITON


def disaggregated(cell: Cell) -> Mapping[str, Any] | None:
    """The settings of a cell's disaggregated servers. None if one server does everything."""
    return cell.settings["disaggregated"] if cell.settings["serve"]["frontend"] == FRONTEND_DISAGGREGATED else None


def context_cell(cell: Cell) -> Cell:
    """A cell for one of the servers that read a disaggregated cell's prompts."""
    servers = disaggregated(cell)
    layout = None if servers is None else servers["context_parallel"]
    alone = {**cell.settings, "serve": {**cell.settings["serve"], "frontend": "trtllm_serve"}}
    return replace(cell, settings=alone, **(parse_parallel(layout)._asdict() if layout else {}))


def served_gpus(cell: Cell) -> int:
    servers = disaggregated(cell)
    if servers is None:
        return world_size(cell)
    contexts, generations = servers["context_servers"], servers["generation_servers"]
    return int(contexts * world_size(context_cell(cell)) + generations * world_size(cell))


def quantizing_python(machine: Machine) -> str:
    """The interpreter for our quantization worker."""
    return machine.model_optimizer_python or installed(machine).python


def quantizing_lacks(machine: Machine) -> str | None:
    """The requirement of our quantization worker that a machine lacks, or None."""
    model_optimizer = machine.model_optimizer
    if model_optimizer is None:
        return f"Model Optimizer is not installed: {probe.QUANTIZING_VARIABLE} names a Python that has trtllm-pipeline[quantize]"
    if model_optimizer != assume.ASSUMED and not at_least(model_optimizer, LEAST_MODEL_OPTIMIZER):
        return (
            f"Model Optimizer {model_optimizer} is older than {LEAST_MODEL_OPTIMIZER}: {probe.QUANTIZING_VARIABLE} names a Python "
            "that has trtllm-pipeline[quantize]"
        )
    return None


def serving_takes(cell: Cell, machine: Machine) -> Resources:
    """One GPU per rank, and its share of CPUs: measurements on other GPUs have their own."""
    gpus = served_gpus(cell)
    cpus = max(1, machine.cpus * gpus // max(1, len(machine.gpus)))
    return Resources(cpus=cpus, gpus=gpus, exclusive=exclusive(cell))


def unservable(cell: Cell, machine: Machine, read: Mapping[str, frozenset[str]]) -> str | None:
    """Why a cell's frontend cannot serve it on a machine that could otherwise build it, or None.

    `read` has the repository settings that have an effect with each frontend; any other with a value is a mistake.
    """
    installation, frontend = installed(machine), str(cell.settings["serve"]["frontend"])
    if frontend == FRONTEND_TRITON_OPENAI and (reason := _without_openai(cell, machine)):
        return f"settings.serve.frontend {frontend}: {reason}"
    for name, value in cell.settings["repository"].items():
        # Defaults are ignored.
        if name not in read[frontend] and name not in _OF_EVERY_STAGE and value not in (None, {}, DEFAULTS.get(name)):
            return f"settings.repository.{name}: {cell.toolchain} does not read it with the frontend {frontend}"
    if cell.toolchain == ENGINES and (reason := _without_mpirun(cell, machine)):
        return reason
    if not in_triton(cell):
        if installation.serve is None:
            return f"settings.serve.frontend {frontend}: TensorRT-LLM {installation.release} here has no trtllm-serve"
        given = cell.settings["serve"]["options"]
        assert isinstance(given, dict)
        help_text = program_options.help_for(
            machine, given, installation.serve, *commands.serve_subcommand(installation.release)
        )
        problems = program_options.check_extra("trtllm-serve", installation.release, given, help_text)
        return "; ".join(f"settings.serve.options.{problem}" for problem in problems) or None
    if cell.settings["serve"]["options"]:
        return "settings.serve.options are trtllm-serve's: settings.serve.frontend: trtllm_serve"
    if machine.triton is None:
        return "Triton is not installed; settings.serve.frontend: trtllm_serve needs none"
    in_backend = cell.toolchain == ENGINES and cell.settings["repository"]["triton_backend"] in (None, BACKEND)
    if in_backend and BACKEND not in machine.triton.backends:
        return f"Triton here has no backend {BACKEND}; NVIDIA's TensorRT-LLM images have it"
    if installation.templates is None:
        return (
            "the Triton templates of the release (all_models) were not found; `pipeline doctor` shows the search path"
        )
    return None


def _without_openai(cell: Cell, machine: Machine) -> str | None:
    """Why Triton's own OpenAI front end cannot serve a cell. None also if Triton itself cannot."""
    if cell.toolchain != ENGINES:
        return "it serves engines; settings.serve.frontend: trtllm_serve serves PyTorch's models over OpenAI"
    if (ranks := world_size(cell)) > 1:
        return f"it is one process, but mpirun starts {ranks} ranks; use triton, with pipeline serve gateway in front of it"
    if not cell.settings["repository"]["decoupled"]:
        return "it streams answers, which requires settings.repository.decoupled: true"
    if machine.triton is not None and machine.triton.openai is None and not machine.assumed:
        return (
            f"Triton here has no {triton_installation.OPENAI_PROGRAM}; NVIDIA's images have it; or use triton, with "
            "pipeline serve gateway in front of it"
        )
    return None


def openai_program(machine: Machine) -> str:
    """Path of the `main.py` of Triton's OpenAI front end. For an assumed machine, its path in NVIDIA's images."""
    value = machine.triton.openai if machine.triton else None
    return value or str(triton_installation.CONTAINER_BINARY.parents[1] / triton_installation.OPENAI_PROGRAM)


def _without_mpirun(cell: Cell, machine: Machine) -> str | None:
    """Why mpirun cannot start an engine's ranks, for the launch or its check. None if it can, or is not needed."""
    ranks = world_size(cell)
    served = cell.settings["serve"]["frontend"] == FRONTEND_TRITON
    if ranks == 1 or not (served or script(machine, RUN_SCRIPT)):
        return None
    if machine.mpirun is None:
        return f"{ranks} ranks are started by mpirun, which is not on PATH: apt-get install openmpi-bin"
    return None if machine.assumed else nested()
