"""Why a cell can never work on a machine with TensorRT-LLM. Asked while planning; nothing is run or read.

Gates by GPU are those of TensorRT-LLM's support matrix and of its builder's own assertions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from packaging.specifiers import SpecifierSet

from trtllm_pipeline.domain import Cell, Json
from trtllm_pipeline.machine import Machine, TensorRTLLM
from trtllm_pipeline.toolchains.tensorrt_llm import memory, options
from trtllm_pipeline.toolchains.tensorrt_llm.commands import (
    PLAIN,
    WEIGHT_ONLY,
    build_defaults,
    data_type,
    kv_precision,
    max_num_tokens,
    route,
    uses_fp8_context_fmha,
)
from trtllm_pipeline.toolchains.tensorrt_llm.memory import Shape
from trtllm_pipeline.toolchains.tensorrt_llm.releases import (
    FAMILIES,
    FIRST,
    FIRST_PYTORCH,
    at_least,
    convert_tool,
    parse,
)

ENGINES: Final = "tensorrt_llm"
PYTORCH: Final = "tensorrt_llm_pytorch"

PYTORCH_PRECISIONS: Final = ("fp16", "bf16", "fp8", "int4_awq", "w4a8_awq", "nvfp4")
"""Precisions with a Hugging Face form that the PyTorch backend loads."""
_OWN_BUILD_SETTINGS: Final = frozenset({"max_num_tokens", "timeout_s", "retries"})
"""Keys of settings.build that are ours; all others are options of trtllm-build."""

_LEAST_SM: Final = {"bf16": 80, "fp8": 89, "w4a8_awq": 89, "nvfp4": 100}
_NOT_ON_BLACKWELL: Final = frozenset({*WEIGHT_ONLY, "int8_sq"})
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class _Case:
    cell: Cell
    machine: Machine
    installed: TensorRTLLM
    shape: Shape
    family: str
    asked_kv: str | None
    kv: str | None
    extra: dict[str, Json]
    installed_help: str | None

    @property
    def release(self) -> str:
        return self.installed.release


def splits_prompts(cell: Cell) -> bool:
    """Whether a prompt may take several forward passes."""
    return cell.settings["repository"]["enable_chunked_context"] is True


def num_tokens(cell: Cell) -> int:
    """Tokens of one forward pass over all requests."""
    asked = cell.settings["build"]["max_num_tokens"]
    if isinstance(asked, int):
        return asked
    return max_num_tokens(cell.max_batch_size, cell.isl, cell.osl, chunked=splits_prompts(cell))


def build_options(cell: Cell) -> dict[str, Json]:
    """The options of trtllm-build that a matrix gives."""
    return {name: value for name, value in cell.settings["build"].items() if name not in _OWN_BUILD_SETTINGS}


def infeasible(cell: Cell, machine: Machine, installed_help: str | None = None) -> str | None:
    """Why `cell` can never work on `machine`, or None, for both toolchains of TensorRT-LLM.

    `installed_help` is what the installed `trtllm-build --help` prints, where there is one to ask.
    """
    installed = machine.tensorrt_llm
    if installed is None:
        return "TensorRT-LLM is not installed"
    asked = cell.settings["quantize"].get("kv_cache_precision")
    asked_kv = None if asked is None else str(asked)
    case = _Case(
        cell=cell,
        machine=machine,
        installed=installed,
        shape=Shape.of(cell.recipe),
        family=str(cell.recipe["family"]),
        asked_kv=asked_kv,
        kv=kv_precision(cell.precision, asked_kv),
        extra=build_options(cell),
        installed_help=installed_help,
    )
    lane = _ENGINE_GATES if cell.toolchain == ENGINES else _PYTORCH_GATES
    return next((reason for gate in (*lane, *_GATES) if (reason := gate(case)) is not None), None)


# ------------------------------------------------------------------------------------------------------- engine lane


def _has_builder(case: _Case) -> str | None:
    if not at_least(case.release, FIRST):
        return f"TensorRT-LLM {case.release}: engines are built this way since {FIRST}"
    if case.installed.build is None:
        return f"TensorRT-LLM {case.release} here has no trtllm-build; engines need it, up to 1.2 it is part of the package"
    return None


def _has_family(case: _Case) -> str | None:
    family = FAMILIES.get(case.family)
    if family is None:
        return (
            f"family {case.family}: no script of TensorRT-LLM that we know converts it; known are {', '.join(FAMILIES)}"
        )
    if not at_least(case.release, family.since):
        return f"family {case.family}: TensorRT-LLM converts it since {_short(family.since)}, this is {case.release}"
    if case.cell.tp > 1 and not at_least(case.release, family.tensor_parallel):
        return (
            f"tp{case.cell.tp}: {case.family} is split over GPUs since {family.tensor_parallel}, this is {case.release}"
        )
    if case.cell.pp > 1 and family.pipeline_parallel is None:
        return f"pp{case.cell.pp}: TensorRT-LLM has no pipeline stages for {case.family}"
    if case.cell.pp > 1 and not at_least(case.release, family.pipeline_parallel or FIRST):
        return f"pp{case.cell.pp}: {case.family} has pipeline stages since {family.pipeline_parallel}, this is {case.release}"
    return None


def _engine_precision(case: _Case) -> str | None:
    precision, release = case.cell.precision, case.release
    if route(release, case.family, precision, case.kv) == "quantize" and precision not in PLAIN:
        form = options.known("quantize.py", release)["--qformat"]
        if precision not in (form.choices or ()):
            return f"precision {precision}: TensorRT-LLM {release} makes {', '.join(map(str, form.choices or ()))}"
    elif precision in WEIGHT_ONLY:
        name = next(name for name in _WEIGHT_ONLY_OPTIONS if options.exists(convert_tool(case.family), release, name))
        if not options.accepts(convert_tool(case.family), release, name, WEIGHT_ONLY[precision]):
            return f"precision {precision}: TensorRT-LLM {release} cannot convert {case.family} to it"
    if precision == "w4a8_awq" and case.machine.sm == 89 and not at_least(release, "0.10"):
        return f"precision w4a8_awq: TensorRT-LLM has it for SM 89 since 0.10, this is {release}"
    return None


_WEIGHT_ONLY_OPTIONS: Final = ("--weight_only_precision", "--use-weight-only-with-precision")


def _checkpoint_options(case: _Case) -> str | None:
    extra = case.cell.settings["quantize"].get("options")
    if not isinstance(extra, dict) or not extra:
        return None
    if case.installed.examples is None:
        return "settings.quantize.options are for TensorRT-LLM's example scripts, which this machine does not have"
    tool, other = "quantize.py", convert_tool(case.family)
    if route(case.release, case.family, case.cell.precision, case.kv) == "convert":
        tool, other = other, tool
    problems: list[str] = []
    for name, value in extra.items():
        if options.has(other, case.release, name) and not options.has(tool, case.release, name):
            theirs, ours = other.partition(":")[0], tool.partition(":")[0]
            problems.append(f"{name}: {theirs} has it, {ours} makes this cell; an `override` gives it to others alone")
        else:
            problems += options.check_extra(tool, case.release, {name: value})
    return "; ".join(f"settings.quantize.options.{problem}" for problem in problems) or None


def _engine_gpu(case: _Case) -> str | None:
    sm, precision = case.machine.sm, case.cell.precision
    if sm is None:
        return None
    if sm >= 100 and not at_least(case.release, "0.17.0"):
        return f"SM {sm}: TensorRT-LLM builds for it since 0.17, this is {case.release}"
    if sm < 75 and at_least(case.release, "0.16"):
        return f"SM {sm}: TensorRT-LLM dropped it before 0.16, this is {case.release}"
    if 100 <= sm < 120:
        if precision in _NOT_ON_BLACKWELL:
            return f"precision {precision}: TensorRT-LLM refuses it on SM 100 and above, this is SM {sm}; fp8 and nvfp4 work"
        if case.kv == "int8":
            return f"settings.quantize.kv_cache_precision int8: TensorRT-LLM refuses it on SM {sm}; fp8 works"
    return None


def _engine_options(case: _Case) -> str | None:
    problems = options.check_extra("trtllm-build", case.release, case.extra, case.installed_help)
    if problems:
        return "; ".join(f"settings.build.{problem}" for problem in problems)
    wanted = case.extra.get("use_fp8_context_fmha", case.extra.get("--use_fp8_context_fmha"))
    if wanted in ("enable", True) and not _may_use_fp8_context_fmha(case):
        return (
            f"settings.build.use_fp8_context_fmha: TensorRT-LLM {case.release} has it for fp8, w4a8_awq and nvfp4 with an "
            f"FP8 cache on SM {_fp8_context_fmha_gpus(case.release)}; "
            f"this is {case.cell.precision} with {case.kv or 'no quantized'} cache on SM {case.machine.sm}"
        )
    return None


def _may_use_fp8_context_fmha(case: _Case) -> bool:
    if uses_fp8_context_fmha(case.release, case.cell.precision, case.kv, case.machine.sm):
        return True
    # Before 0.12 it is off unless asked for, and Hopper's alone.
    early = not at_least(case.release, "0.12") and case.machine.sm == 90
    return early and case.cell.precision in {"fp8", "w4a8_awq"} and case.kv == "fp8"


def _fp8_context_fmha_gpus(release: str) -> str:
    if not at_least(release, "0.12"):
        return "90"
    if not at_least(release, "0.17"):
        return "89 and 90"
    return "89 to 119" if not at_least(release, "0.20") else "89 and above"


# ------------------------------------------------------------------------------------------------------ PyTorch lane


def _has_pytorch(case: _Case) -> str | None:
    if at_least(case.release, FIRST_PYTORCH):
        return None
    return f"TensorRT-LLM {case.release}: its PyTorch backend is for use since {FIRST_PYTORCH}; use the toolchain {ENGINES}"


def _pytorch_precision(case: _Case) -> str | None:
    if case.cell.precision not in PYTORCH_PRECISIONS:
        return f"precision {case.cell.precision}: the PyTorch backend has {', '.join(PYTORCH_PRECISIONS)}"
    if case.kv == "int8":
        return "settings.quantize.kv_cache_precision int8: the PyTorch backend has fp8 or the model's own"
    return None


def _pytorch_options(case: _Case) -> str | None:
    if case.extra:
        return f"settings.build.{next(iter(case.extra))}: the PyTorch backend builds no engine"
    if case.cell.settings["quantize"].get("options"):
        return (
            "settings.quantize.options are for the scripts that make engines' checkpoints; here Model Optimizer does it"
        )
    return None


# ------------------------------------------------------------------------------------------------------------- both


def _recipe_precision(case: _Case) -> str | None:
    listed = case.cell.recipe.get("precisions")
    works = listed.get(case.cell.toolchain) if isinstance(listed, dict) else listed
    if not isinstance(works, list | tuple) or case.cell.precision in works:
        return None
    known = ", ".join(map(str, works)) or "none"
    return f"precision {case.cell.precision}: the recipe of {case.cell.model} has for {case.cell.toolchain}: {known}"


def _recipe_release(case: _Case) -> str | None:
    cell = case.cell
    limits = _of_toolchain(case, "releases")
    if isinstance(limits, str) and parse(case.release) not in _specifier(limits):
        return f"{cell.model}: TensorRT-LLM has it in releases {limits}, this is {case.release}"
    later = _of_toolchain(case, "precision_releases")
    limits = later.get(cell.precision) if isinstance(later, dict) else None
    if isinstance(limits, str) and parse(case.release) not in _specifier(limits):
        return f"precision {cell.precision}: works with {cell.model} in releases {limits}, this is {case.release}"
    return None


def _of_toolchain(case: _Case, key: str) -> Json:
    known = case.cell.recipe.get(key)
    return known.get(case.cell.toolchain) if isinstance(known, dict) else None


def _specifier(limits: str) -> SpecifierSet:
    return SpecifierSet(limits, prereleases=True)


def _gpu_precision(case: _Case) -> str | None:
    sm, least = case.machine.sm, _LEAST_SM.get(case.cell.precision)
    if sm is None:
        return None
    if least is not None and sm < least:
        return f"precision {case.cell.precision} needs SM {least} or newer, this is SM {sm}"
    if case.kv == "fp8" and sm < _LEAST_SM["fp8"]:
        return f"settings.quantize.kv_cache_precision fp8 needs SM {_LEAST_SM['fp8']} or newer, this is SM {sm}"
    return None


def _cache_type(case: _Case) -> str | None:
    dtype = data_type(case.cell.precision, case.family)
    if case.asked_kv is None or case.kv is not None or PLAIN[case.asked_kv] == dtype:
        return None
    return (
        f"settings.quantize.kv_cache_precision {case.asked_kv}: a cache that is not quantized is {dtype}, as the model"
    )


def _layout(case: _Case) -> str | None:
    shape, tp, pp = case.shape, case.cell.tp, case.cell.pp
    gpus = len(case.machine.gpus)
    if tp * pp > gpus:
        return f"tp{tp}pp{pp} needs {tp * pp} GPUs, this machine has {gpus}"
    if shape.num_attention_heads % tp:
        return f"tp{tp}: {shape.num_attention_heads} attention heads cannot be split evenly over {tp} GPUs"
    heads = shape.num_key_value_heads
    if max(heads, tp) % min(heads, tp):
        return f"tp{tp}: {heads} KV heads can neither be split over {tp} GPUs nor copied to them evenly"
    if shape.num_hidden_layers % pp:
        return f"pp{pp}: {shape.num_hidden_layers} layers cannot be split evenly into {pp} stages"
    return None


def _lengths(case: _Case) -> str | None:
    cell, most = case.cell, case.shape.max_position_embeddings
    if cell.isl + cell.osl > most:
        return f"lengths {cell.isl},{cell.osl} are {cell.isl + cell.osl} tokens, {cell.model} has {most} positions"
    tokens = num_tokens(cell)
    if tokens >= cell.isl:
        return None
    if not splits_prompts(cell):
        return (
            f"settings.build.max_num_tokens {tokens} is less than a prompt of {cell.isl} tokens, which "
            "settings.repository.enable_chunked_context: true would split"
        )
    if cell.toolchain == ENGINES and not _has_paged_context_fmha(case):
        return (
            f"settings.repository.enable_chunked_context: passes of {tokens} tokens split a prompt of {cell.isl}, and "
            f"engines can with use_paged_context_fmha, which is off for {cell.precision} with {case.kv or 'no quantized'} "
            "cache here"
        )
    return None


def _has_paged_context_fmha(case: _Case) -> bool:
    name = "use_paged_context_fmha"
    defaults = build_defaults(
        case.release, precision=case.cell.precision, family=case.family, kv=case.kv, sm=case.machine.sm
    )
    wanted = case.extra.get(name, case.extra.get(f"--{name}", defaults.get(f"--{name}")))
    return wanted in ("enable", True)


def _fits(case: _Case) -> str | None:
    cell = case.cell
    smallest = min((gpu.memory_bytes for gpu in case.machine.gpus), default=None)
    if smallest is None:
        return None
    weights, cache = memory.least_bytes(
        case.shape, precision=cell.precision, kv=case.kv, tp=cell.tp, pp=cell.pp, tokens=cell.isl + cell.osl
    )
    if weights + cache <= smallest:
        return None
    return (
        f"needs {(weights + cache) / _GIB:.1f} GiB on each GPU ({weights / _GIB:.1f} of weights, {cache / _GIB:.1f} of KV "
        f"cache for one request), which have {smallest / _GIB:.1f}; more of tp or pp, or a smaller precision, makes it less"
    )


def _short(release: str) -> str:
    return ".".join(release.split(".")[:2])


_Gate = Callable[[_Case], str | None]
_ENGINE_GATES: Final[tuple[_Gate, ...]] = (
    _has_builder,
    _has_family,
    _engine_precision,
    _checkpoint_options,
    _engine_gpu,
    _engine_options,
)
_PYTORCH_GATES: Final[tuple[_Gate, ...]] = (_has_pytorch, _pytorch_precision, _pytorch_options)
_GATES: Final[tuple[_Gate, ...]] = (
    _recipe_precision,
    _recipe_release,
    _gpu_precision,
    _cache_type,
    _layout,
    _lengths,
    _fits,
)
"""After those of the lane; the first reason is the cell's."""
