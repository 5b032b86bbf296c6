"""What TensorRT-LLM refuses after its options are parsed, by release: the one table, asked while planning.

A rule is a function from a case to words, or None. The first that finds something is the cell's reason. Most stand for
a check in a program of TensorRT-LLM that comes late, after a download, a calibration or a build; the others for what a
release does not have at all. The programs' own words are in `tests/data/tensorrt_llm/refusals.json`, by which the
stand-ins refuse, so that this table and they can disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from packaging.specifiers import SpecifierSet

from trtllm_pipeline.domain import Json
from trtllm_pipeline.machine.assume import LAST_WITH_ENGINES
from trtllm_pipeline.toolchains.model_optimizer.checkpoint import MODEL_TYPES
from trtllm_pipeline.toolchains.tensorrt_llm import backends, commands, memory, options
from trtllm_pipeline.toolchains.tensorrt_llm.case import ENGINES, PYTORCH, Case, num_tokens, splits_prompts
from trtllm_pipeline.toolchains.tensorrt_llm.commands import FP8_INPUTS, PLAIN, W4A8_PAGED, WEIGHT_ONLY
from trtllm_pipeline.toolchains.tensorrt_llm.params import PYTORCH_PRECISIONS
from trtllm_pipeline.toolchains.tensorrt_llm.releases import (
    FAMILIES,
    FIRST,
    FIRST_PYTORCH,
    at_least,
    convert_tool,
    parse,
    transformers_of,
)

Severity = Literal["error", "warning"]
"""error: a program of TensorRT-LLM ends with an error, or has no such thing. warning: it goes on without what was asked
for, so that something else would be measured than the cell says."""

_BOTH: Final = (ENGINES, PYTORCH)
_TRITON: Final = "triton"
_LEAST_SM: Final = {"bf16": 80, "fp8": 89, "w4a8_awq": 89, "nvfp4": 100}
_NOT_ON_BLACKWELL: Final = frozenset({*WEIGHT_ONLY, "int8_sq", "int4_awq", "w4a8_awq"})
_AWQ: Final = frozenset({"int4_awq", "w4a8_awq"})
_NOT_ON_BLACKWELL_PLUGINS: Final = ("gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin", "low_latency_gemm_plugin")
_MARLIN: Final = "1.3.0rc20"
"""First release whose PyTorch backend computes NVFP4 weights on Hopper, by Marlin kernels."""
_GEMMA2_TOKENS: Final = 4096
_WEIGHT_ONLY_OPTIONS: Final = ("--weight_only_precision", "--use-weight-only-with-precision")
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that cannot work."""

    id: str
    name: str
    severity: Severity
    toolchains: tuple[str, ...]
    since: str | None
    """First release with it, None for all from the first on. `0.19` counts every build of that line."""
    before: str | None
    """First release without it, None where none is known."""
    what: str
    """What it finds, in half a sentence."""
    source: str
    """Who says so."""
    hint: str
    """What to do about it."""
    check: Callable[[Case], str | None]

    def holds_in(self, release: str) -> bool:
        """Whether `release` has it."""
        begun = self.since is None or at_least(release, self.since)
        return begun and (self.before is None or not at_least(release, self.before))


def rule(
    number: str,
    name: str,
    severity: Severity,
    what: str,
    source: str,
    hint: str,
    *,
    toolchains: tuple[str, ...] = (ENGINES,),
    since: str | None = None,
    before: str | None = None,
) -> Callable[[Callable[[Case], str | None]], Rule]:
    """Make a rule of a function that says what it finds."""
    return lambda check: Rule(number, name, severity, toolchains, since, before, what, source, hint, check)


# ------------------------------------------------------------------------------------ TLM1: what a release has at all


@rule(
    "TLM101",
    "no-builder",
    "error",
    "engines with a release, or an installation, that has no `trtllm-build`",
    f"the release page of {LAST_WITH_ENGINES}, which calls itself the last one with the TensorRT backend",
    f"engines need trtllm-build, which is part of the package from {FIRST} to {LAST_WITH_ENGINES}; the toolchain {PYTORCH} "
    "needs none",
)
def no_builder(case: Case) -> str | None:
    """What is installed decides, not the number of the release."""
    if not at_least(case.release, FIRST):
        return f"TensorRT-LLM {case.release}: engines are built this way since {FIRST}"
    return None if case.installed.build else f"TensorRT-LLM {case.release} here has no trtllm-build"


@rule(
    "TLM102",
    "no-family",
    "error",
    "an architecture, or a layout of it over GPUs, that the release's converter does not have",
    "support matrices, and the converters themselves",
    "take a release or a layout of the table of families",
)
def no_family(case: Case) -> str | None:
    """Families by `model_type`."""
    cell, release, family = case.cell, case.release, FAMILIES.get(case.family)
    if family is None:
        return (
            f"family {case.family}: no script of TensorRT-LLM that we know converts it; known are {', '.join(FAMILIES)}"
        )
    if not at_least(release, family.since):
        return f"family {case.family}: TensorRT-LLM converts it since {_short(family.since)}, this is {release}"
    if cell.tp > 1 and not at_least(release, family.tensor_parallel):
        return f"tp{cell.tp}: {case.family} is split over GPUs since {family.tensor_parallel}, this is {release}"
    if cell.pp > 1 and family.pipeline_parallel is None:
        return f"pp{cell.pp}: TensorRT-LLM has no pipeline stages for {case.family}"
    if cell.pp > 1 and not at_least(release, family.pipeline_parallel or FIRST):
        return f"pp{cell.pp}: {case.family} has pipeline stages since {family.pipeline_parallel}, this is {release}"
    return None


@rule(
    "TLM103",
    "no-pytorch",
    "error",
    f"the PyTorch runtime before {FIRST_PYTORCH}, where it was a preview",
    "release notes",
    f"use the toolchain {ENGINES}",
    toolchains=(PYTORCH,),
    before=FIRST_PYTORCH,
)
def no_pytorch(case: Case) -> str | None:
    """It became the default with 1.0."""
    return f"TensorRT-LLM {case.release}: its PyTorch backend is for use since {FIRST_PYTORCH}"


@rule(
    "TLM104",
    "not-in-recipe",
    "error",
    "a precision or release that the model's recipe leaves out",
    "the recipe, whose comments say from where it knows",
    "`pipeline recipes show MODEL` has what works",
    toolchains=_BOTH,
)
def not_in_recipe(case: Case) -> str | None:
    """What is known of one model."""
    cell = case.cell
    listed = cell.recipe.get("precisions")
    works = listed.get(cell.toolchain) if isinstance(listed, dict) else listed
    if isinstance(works, list | tuple) and cell.precision not in works:
        known = ", ".join(map(str, works)) or "none"
        return f"precision {cell.precision}: the recipe of {cell.model} has for {cell.toolchain}: {known}"
    limits = _of_toolchain(case, "releases")
    if isinstance(limits, str) and parse(case.release) not in _specifier(limits):
        return f"{cell.model}: TensorRT-LLM has it in releases {limits}, this is {case.release}"
    later = _of_toolchain(case, "precision_releases")
    limits = later.get(cell.precision) if isinstance(later, dict) else None
    if isinstance(limits, str) and parse(case.release) not in _specifier(limits):
        return f"precision {cell.precision}: works with {cell.model} in releases {limits}, this is {case.release}"
    return None


@rule(
    "TLM105",
    "needs-code",
    "error",
    "a model whose repository brings code that transformers needs to load it, and that nobody has said to trust",
    "the converters, which load with `trust_remote_code=True`; wheels of transformers, for what they have themselves",
    "name the files under `code` in the recipe, with their SHA-256, read them, and set "
    "settings.download.trust_remote_code: true; or take a release with a newer transformers",
)
def needs_code(case: Case) -> str | None:
    """Where transformers has the architecture itself, the download takes the references to code away instead."""
    family = FAMILIES.get(case.family)
    if (
        family is None
        or family.transformers == ""
        or (case.cell.recipe.get("code") and case.cell.settings["download"].get("trust_remote_code"))
    ):
        return None
    if family.transformers is None:
        return f"family {case.family}: no transformers has it, it is loaded by Python code of the model's repository"
    found = case.installed.transformers or transformers_of(case.release)
    if found is None or parse(found) >= parse(family.transformers):
        return None
    return (
        f"family {case.family}: transformers has it since {family.transformers}, here is {found}, which loads it by Python "
        "code of the model's repository"
    )


# ----------------------------------------------------------------------------------------- TLM2: precisions and GPUs


@rule(
    "TLM201",
    "no-precision",
    "error",
    "a precision that no script of the release makes",
    "the choices of `--qformat` and of the converters",
    "take one of those, or another release",
)
def no_precision(case: Case) -> str | None:
    """Engines."""
    precision, release = case.cell.precision, case.release
    if case.route == "quantize" and precision not in PLAIN:
        made = options.known("quantize.py", release)["--qformat"].choices or ()
        if precision not in made:
            return f"precision {precision}: TensorRT-LLM {release} makes {', '.join(map(str, made))}"
    elif precision in WEIGHT_ONLY:
        tool = convert_tool(case.family)
        name = next(name for name in _WEIGHT_ONLY_OPTIONS if options.exists(tool, release, name))
        if not options.accepts(tool, release, name, WEIGHT_ONLY[precision]):
            return f"precision {precision}: TensorRT-LLM {release} cannot convert {case.family} to it"
    return None


@rule(
    "TLM202",
    "w4a8-on-ada",
    "error",
    "w4a8_awq on SM 89 before 0.10",
    "release notes",
    "take SM 90, or a newer release",
    before="0.10",
)
def w4a8_on_ada(case: Case) -> str | None:
    """Its kernels came for Hopper."""
    if case.cell.precision != "w4a8_awq" or case.sm != 89:
        return None
    return f"precision w4a8_awq: TensorRT-LLM has it for SM 89 since 0.10, this is {case.release}"


@rule(
    "TLM203",
    "gpu-too-new",
    "error",
    "SM 100 and newer before 0.17",
    "release notes",
    "install a newer release",
    before="0.17.0",
)
def gpu_too_new(case: Case) -> str | None:
    """Blackwell."""
    if case.sm is None or case.sm < 100:
        return None
    return f"SM {case.sm}: TensorRT-LLM builds for it since 0.17, this is {case.release}"


@rule(
    "TLM204",
    "gpu-too-old",
    "error",
    "SM 70 from 0.16 on",
    "release notes",
    "install an older release",
    since="0.16",
)
def gpu_too_old(case: Case) -> str | None:
    """Volta."""
    return (
        f"SM {case.sm}: TensorRT-LLM dropped it before 0.16, this is {case.release}" if (case.sm or 75) < 75 else None
    )


@rule(
    "TLM205",
    "integers-on-blackwell",
    "error",
    "INT4 and INT8 weights (int8_wo, int4_wo, int4_awq, w4a8_awq), SmoothQuant or an INT8 KV cache on SM 100 to 119",
    "`build` in builder.py of 1.2.0 and 1.3.0rc3",
    "fp8 and nvfp4 work there, and an fp8 cache",
)
def integers_on_blackwell(case: Case) -> str | None:
    """AWQ's groups do not keep `is_int4_weight_only` from being true."""
    if case.sm is None or not 100 <= case.sm < 120:
        return None
    if case.cell.precision in _NOT_ON_BLACKWELL:
        return f"precision {case.cell.precision}: TensorRT-LLM refuses it on SM 100 and above, this is SM {case.sm}"
    if case.kv == "int8":
        return f"settings.quantize.kv_cache_precision int8: TensorRT-LLM refuses it on SM {case.sm}"
    return None


@rule(
    "TLM206",
    "not-in-pytorch",
    "error",
    "a precision or cache that the PyTorch runtime has no form of",
    "its page on quantization",
    f"the toolchain {ENGINES} has more",
    toolchains=(PYTORCH,),
)
def not_in_pytorch(case: Case) -> str | None:
    """Weight-only and SmoothQuant are the engines'."""
    if case.cell.precision not in PYTORCH_PRECISIONS:
        return f"precision {case.cell.precision}: the PyTorch backend has {', '.join(PYTORCH_PRECISIONS)}"
    if case.kv == "int8":
        return "settings.quantize.kv_cache_precision int8: the PyTorch backend has fp8 or the model's own"
    return None


@rule(
    "TLM207",
    "awq-on-blackwell",
    "error",
    "AWQ weights in the PyTorch runtime on SM 100 and newer",
    "the hardware matrix of its page on quantization, which has AWQ for Ampere (int4_awq), Ada and Hopper",
    "fp8 and nvfp4 work there",
    toolchains=(PYTORCH,),
)
def awq_on_blackwell(case: Case) -> str | None:
    """No kernels."""
    if case.cell.precision not in _AWQ or case.sm is None or case.sm < 100:
        return None
    return f"precision {case.cell.precision}: the PyTorch backend has it up to SM 90, this is SM {case.sm}"


@rule(
    "TLM208",
    "gpu-precision",
    "error",
    f"a precision that the GPU cannot compute; NVFP4 works on Hopper with PyTorch from {_MARLIN} on, by Marlin",
    f"support matrices; pull request 13476 for {_MARLIN}",
    "take another precision or GPU",
    toolchains=_BOTH,
)
def gpu_precision(case: Case) -> str | None:
    """BF16 needs Ampere, FP8 Ada, FP4 Blackwell."""
    sm, precision = case.sm, case.cell.precision
    if sm is None:
        return None
    least = _LEAST_SM.get(precision, 0)
    if precision == "nvfp4" and case.cell.toolchain == PYTORCH and at_least(case.release, _MARLIN):
        least = 90
    if sm < least:
        return f"precision {precision} needs SM {least} or newer, this is SM {sm}"
    if case.kv == "fp8" and sm < _LEAST_SM["fp8"]:
        return f"settings.quantize.kv_cache_precision fp8 needs SM {_LEAST_SM['fp8']} or newer, this is SM {sm}"
    return None


@rule(
    "TLM209",
    "cache-type",
    "error",
    "an unquantized cache of another data type than the model's",
    "the builder makes the cache of the data type of attention",
    "leave the cache's precision out, or name the model's",
    toolchains=_BOTH,
)
def cache_type(case: Case) -> str | None:
    """FP16 weights with a BF16 cache."""
    dtype = commands.data_type(case.cell.precision, case.family)
    if case.asked_kv is None or case.kv is not None or PLAIN[case.asked_kv] == dtype:
        return None
    return (
        f"settings.quantize.kv_cache_precision {case.asked_kv}: a cache that is not quantized is {dtype}, as the model"
    )


# ------------------------------------------------------------------------------------------------ TLM3: checkpoints


@rule(
    "TLM301",
    "script-options",
    "error",
    "options of a script that does not make the cell's checkpoint, or that the release does not have",
    "the table of options",
    "",
)
def script_options(case: Case) -> str | None:
    """`settings.quantize.options`."""
    extra = case.cell.settings["quantize"].get("options")
    if not isinstance(extra, dict) or not extra:
        return None
    if case.installed.examples is None:
        return "settings.quantize.options are for TensorRT-LLM's example scripts, which this machine does not have"
    tool, other = "quantize.py", convert_tool(case.family)
    if case.route == "convert":
        tool, other = other, tool
    elif not commands.calibrates_as_told(case.release):
        return (
            f"settings.quantize.options are for quantize.py; with {case.release} Model Optimizer makes this checkpoint"
        )
    problems: list[str] = []
    for name, value in extra.items():
        if options.has(other, case.release, name) and not options.has(tool, case.release, name):
            theirs, ours = other.partition(":")[0], tool.partition(":")[0]
            problems.append(f"{name}: {theirs} has it, {ours} makes this cell; an `override` gives it to others alone")
        else:
            problems += options.check_extra(tool, case.release, {name: value})
    return "; ".join(f"settings.quantize.options.{problem}" for problem in problems) or None


@rule(
    "TLM302",
    "not-by-model-optimizer",
    "error",
    "checkpoints that Model Optimizer has to make and cannot: where the example scripts are missing, and calibrated ones "
    "at 0.10",
    "`get_calib_dataloader` of 0.10.0, which knows pileval and CNN/DailyMail and no folder",
    "the examples of the same release make them, where TENSORRT_LLM_EXAMPLES names their folder; `pipeline doctor` says what "
    "is looked for",
)
def not_by_model_optimizer(case: Case) -> str | None:
    """Of a few families, and only where it is installed."""
    cell = case.cell
    if case.installed.examples is None:
        why = "there are no example scripts of TensorRT-LLM"
    elif case.route == "quantize" and not commands.calibrates_as_told(case.release):
        why = f"quantize.py of TensorRT-LLM {case.release} calibrates on data sets of its own alone"
    else:
        return None
    lacks = backends.quantizing_lacks(case.machine)
    if lacks is not None:
        return f"{why}, and {lacks}"
    if case.family not in MODEL_TYPES or cell.precision == "fp32":
        return f"{case.family} in {cell.precision}: {why}, so Model Optimizer makes checkpoints, and not this one"
    return None


@rule(
    "TLM303",
    "gemma2-as-gemma",
    "error",
    "quantize.py on Gemma 2 before 0.15, which takes it for Gemma 1",
    "MODEL_NAME_PATTERN_MAP of quantize_by_modelopt.py; issue 2327",
    "what convert_checkpoint.py makes works: fp32, bf16, int8_wo, int4_wo, with the model's own cache",
    before="0.15",
)
def gemma2_as_gemma(case: Case) -> str | None:
    """The checkpoint it writes has no soft caps and no second norms."""
    if case.family != "gemma2" or case.route != "quantize":
        return None
    return f"{case.cell.precision} of gemma2: quantize.py of TensorRT-LLM {case.release} takes it for Gemma 1"


@rule(
    "TLM304",
    "calibration-data",
    "warning",
    "calibration data of your own before 0.10, whose quantize.py fetches CNN/DailyMail and takes no other",
    "the options of quantize.py",
    "leave settings.quantize.calibration.data out, or install a newer release",
    before="0.10",
)
def calibration_data(case: Case) -> str | None:
    """It would be calibrated on something else."""
    if case.installed.examples is None or case.route != "quantize" or not backends.has_own_calibration_data(case.cell):
        return None
    return f"settings.quantize.calibration.data: quantize.py of TensorRT-LLM {case.release} takes none"


# ------------------------------------------------------------------------------------------------------ TLM4: engines


@rule(
    "TLM401",
    "build-options",
    "error",
    "options that `trtllm-build` of the release, or the one that is installed, does not take",
    "the table of options; `trtllm-build --help`",
    "",
)
def build_options(case: Case) -> str | None:
    """`settings.build`."""
    problems = options.check_extra("trtllm-build", case.release, case.build, case.installed_help)
    return "; ".join(f"settings.build.{problem}" for problem in problems) or None


@rule(
    "TLM402",
    "context-fmha-off",
    "error",
    "`context_fmha: disable` with `use_paged_context_fmha` or `use_fp8_context_fmha` on",
    "`build` in builder.py, which turns both off from 0.19 on; the attention plugin before",
    "turn both off, or leave context_fmha on",
)
def context_fmha_off(case: Case) -> str | None:
    """Both are kinds of it."""
    asked = [name for name in ("use_paged_context_fmha", "use_fp8_context_fmha") if case.switch(name)]
    if case.switch("context_fmha") is not False or not asked:
        return None
    return f"settings.build.{asked[0]} enable contradicts settings.build.context_fmha disable"


@rule(
    "TLM403",
    "streaming-with-paged",
    "error",
    "`streamingllm` with `use_paged_context_fmha` on",
    "the attention operator; `build` in builder.py turns the latter off from 0.19 on",
    "turn one of them off",
)
def streaming_with_paged(case: Case) -> str | None:
    """Sinks are not read from pages."""
    if not (case.switch("streamingllm") and case.switch("use_paged_context_fmha")):
        return None
    return "settings.build.use_paged_context_fmha enable contradicts settings.build.streamingllm enable"


@rule(
    "TLM404",
    "fp8-attention",
    "error",
    "`use_fp8_context_fmha` without FP8 activations and an FP8 cache, or on a GPU that the release has no kernels for",
    "`build` in builder.py; the attention operator's own checks",
    "leave it out: it is on where it can be",
)
def fp8_attention(case: Case) -> str | None:
    """Asked for by a matrix."""
    if not case.switch("use_fp8_context_fmha"):
        return None
    release, precision = case.release, case.cell.precision
    # Before 0.12 it is Hopper's alone.
    early = not at_least(release, "0.12") and case.sm == 90 and precision != "nvfp4"
    if precision in FP8_INPUTS and case.kv == "fp8" and (early or commands.has_fp8_context_fmha(release, case.sm)):
        return None
    return (
        f"settings.build.use_fp8_context_fmha: TensorRT-LLM {release} has it for fp8, w4a8_awq and nvfp4 with an "
        f"FP8 cache on SM {_fp8_context_fmha_gpus(release)}; "
        f"this is {precision} with {case.kv or 'no quantized'} cache on SM {case.sm}"
    )


@rule(
    "TLM405",
    "paged-int8",
    "error",
    "`use_paged_context_fmha` with an INT8 KV cache",
    "`build` in builder.py: a RuntimeError at first, turned off from 0.19 on",
    "leave it out: it is on where it can be",
)
def paged_int8(case: Case) -> str | None:
    """No kernels read INT8 pages."""
    if not case.switch("use_paged_context_fmha") or case.kv != "int8":
        return None
    return "settings.build.use_paged_context_fmha: it does not go with an INT8 KV cache"


@rule(
    "TLM406",
    "paged-fp8-refused",
    "error",
    "`use_paged_context_fmha` with an FP8 KV cache and weights that are not fp8, before 0.19",
    "`build` in builder.py of 0.11 and the attention operators of 0.12 to 0.17",
    "leave it out, or take fp8 weights",
    before="0.19",
)
def paged_fp8_refused(case: Case) -> str | None:
    """An FP8 cache alone is not the FP8 workflow; nor is w4a8_awq, for which TLM407 stands."""
    if not case.attention.paged or case.kv != "fp8" or case.cell.precision in FP8_INPUTS:
        return None
    return (
        f"settings.build.use_paged_context_fmha: TensorRT-LLM {case.release} has it with an FP8 cache for fp8 weights, "
        f"this is {case.cell.precision}"
    )


@rule(
    "TLM407",
    "paged-w4a8",
    "error",
    f"`use_paged_context_fmha` with an FP8 KV cache and w4a8_awq before {W4A8_PAGED}, the first release known to take it",
    f"the attention operators of 0.12 to 0.17; `build` in builder.py of {W4A8_PAGED}. 0.17.0 to 1.1 were not read",
    "leave it out, or take the model's own cache",
    before=W4A8_PAGED,
)
def paged_w4a8(case: Case) -> str | None:
    """Its quantization mode has no FP8_QDQ."""
    if not case.attention.paged or case.kv != "fp8" or case.cell.precision != "w4a8_awq":
        return None
    return (
        f"settings.build.use_paged_context_fmha: w4a8_awq with an FP8 cache is known to have it since {W4A8_PAGED}, "
        f"this is {case.release}"
    )


@rule(
    "TLM408",
    "paged-turned-off",
    "warning",
    "`use_paged_context_fmha` with an FP8 KV cache and weights without FP8 activations, from 0.19 on",
    "`build` in builder.py of 1.2.0 and 1.3.0rc3: turned off, with a warning",
    "leave it out, or take fp8 weights",
    since="0.19",
)
def paged_turned_off(case: Case) -> str | None:
    """Asked for by a matrix, it would not be in the engine."""
    if not case.switch("use_paged_context_fmha") or case.kv != "fp8" or case.cell.precision in FP8_INPUTS:
        return None
    return (
        f"settings.build.use_paged_context_fmha: TensorRT-LLM {case.release} turns it off with an FP8 cache and weights "
        f"in {case.cell.precision}"
    )


@rule(
    "TLM409",
    "paged-turns-fp8-on",
    "warning",
    "`use_paged_context_fmha` on and `use_fp8_context_fmha` off, with FP8 activations and an FP8 KV cache",
    "`build` in builder.py, from 0.11 to 1.3.0rc3: the latter is turned on, with a warning",
    "turn both off, or leave the latter on where the GPU has it",
)
def paged_turns_fp8_on(case: Case) -> str | None:
    """Pages in FP8 are read by the FP8 kernels only."""
    attention = case.attention
    if case.kv != "fp8" or case.cell.precision not in FP8_INPUTS or not attention.paged or attention.fp8:
        return None
    return (
        "settings.build.use_paged_context_fmha enable turns use_fp8_context_fmha on with an FP8 cache, which is off "
        f"{'as asked' if case.switch('use_fp8_context_fmha') is False else f'with {case.release} on SM {case.sm}'}"
    )


@rule(
    "TLM410",
    "paged-needed",
    "error",
    "quantized weights without `use_paged_context_fmha` at 0.20",
    "pull request 131 of NVIDIA-NeMo/Export-Deploy: such builds fail",
    "leave it on, with a cache that goes with it, or take another release",
    since="0.20",
    before="0.21",
)
def paged_needed(case: Case) -> str | None:
    """Of one line of releases."""
    if case.sm is None or case.cell.precision in PLAIN or case.kv == "int8" or case.paged_context_fmha:
        return None
    return (
        f"{case.cell.precision} without use_paged_context_fmha: TensorRT-LLM {case.release} does not build quantized "
        "checkpoints that way"
    )


@rule(
    "TLM411",
    "no-streamingllm",
    "error",
    "`streamingllm` from 1.1 on",
    "`trtllm-build` of 1.1.0rc6",
    "leave it out",
    since="1.1.0rc6",
)
def no_streamingllm(case: Case) -> str | None:
    """The option is still parsed."""
    return (
        f"settings.build.streamingllm: TensorRT-LLM {case.release} refuses it" if case.switch("streamingllm") else None
    )


@rule(
    "TLM412",
    "plugins-on-blackwell",
    "error",
    "gemm_swiglu_plugin, fp8_rowwise_gemm_plugin or low_latency_gemm_plugin on SM 100 to 119",
    "plugin.py of 1.3.0rc3",
    "leave it out",
)
def plugins_on_blackwell(case: Case) -> str | None:
    """Their kernels are Hopper's and Ada's."""
    if case.sm is None or not 100 <= case.sm < 120:
        return None
    for name in _NOT_ON_BLACKWELL_PLUGINS:
        if case.option(name) not in (None, "disable", False):
            return f"settings.build.{name}: TensorRT-LLM refuses it on SM 100 and above, this is SM {case.sm}"
    return None


# -------------------------------------------------------------------------------------------------- TLM5: what serves


@rule(
    "TLM501",
    "beam-width",
    "error",
    "a server's `max_beam_width` above the engine's",
    "the runtime's check when it loads an engine",
    "settings.build.max_beam_width builds an engine with more",
)
def beam_width(case: Case) -> str | None:
    """An engine has one beam unless it is built for more."""
    built = _whole(case.option("max_beam_width", 1))
    for name, asked in _served(case, "max_beam_width"):
        if built is not None and asked > built:
            return f"{name} {asked} is above the engine's, {built}"
    return None


@rule(
    "TLM502",
    "batch-size",
    "error",
    "a server's batch above the engine's",
    "the runtime's check when it loads an engine",
    "the axis max_batch_size is the engine's and the server's",
)
def batch_size(case: Case) -> str | None:
    """Only options of trtllm-serve can say so; the linter looks at repositories."""
    for name, asked in _served(case, "max_batch_size"):
        if asked > case.cell.max_batch_size:
            return f"{name} {asked} is above the engine's, {case.cell.max_batch_size}"
    return None


@rule(
    "TLM503",
    "sinks-with-paged",
    "error",
    "`sink_token_length` with an engine that has `use_paged_context_fmha`",
    "the attention operator, at the first request",
    "settings.build.use_paged_context_fmha: disable, or no sink_token_length",
)
def sinks_with_paged(case: Case) -> str | None:
    """StreamingLLM."""
    tokens = _whole(case.repository("sink_token_length"))
    if not tokens or not case.paged_context_fmha:
        return None
    return f"settings.repository.sink_token_length {tokens}: the engine has use_paged_context_fmha, which excludes it"


@rule(
    "TLM504",
    "chunked-context",
    "error",
    "`enable_chunked_context: true` with an engine without `use_paged_context_fmha`",
    "the runtime's check when it loads an engine",
    "leave it out, or let the engine have use_paged_context_fmha: its options, weights and cache decide",
)
def chunked_context(case: Case) -> str | None:
    """Whether a prompt would be split or not."""
    if not splits_prompts(case.cell) or case.paged_context_fmha:
        return None
    return (
        "settings.repository.enable_chunked_context: engines have it with use_paged_context_fmha, which is off "
        f"{_why_not_paged(case)}"
    )


@rule(
    "TLM505",
    "kv-cache-reuse",
    "warning",
    "`enable_kv_cache_reuse: true` with an engine without `use_paged_context_fmha`",
    "the runtime turns it off, with a warning",
    "leave it out, or let the engine have use_paged_context_fmha: its options, weights and cache decide",
)
def kv_cache_reuse(case: Case) -> str | None:
    """Numbers without reuse would be taken for numbers with it."""
    if case.repository("enable_kv_cache_reuse") is not True or case.paged_context_fmha:
        return None
    return (
        "settings.repository.enable_kv_cache_reuse: engines have it with use_paged_context_fmha, which is off "
        f"{_why_not_paged(case)}"
    )


@rule(
    "TLM506",
    "kv-tokens",
    "error",
    "a KV cache too small for one request of the cell's lengths",
    "the runtime's check when it loads an engine",
    "raise max_tokens_in_paged_kv_cache, or remove it",
)
def kv_tokens(case: Case) -> str | None:
    """The pool must hold at least one sequence."""
    tokens, longest = _whole(case.repository("max_tokens_in_paged_kv_cache")), case.cell.isl + case.cell.osl
    if tokens is None or tokens >= longest:
        return None
    return f"settings.repository.max_tokens_in_paged_kv_cache {tokens} is less than a request of {longest} tokens"


@rule(
    "TLM507",
    "unpaged-inflight",
    "error",
    "in-flight batching of an engine without a paged KV cache",
    "the runtime's check when it loads an engine",
    "build a paged cache, or set settings.repository.batching_strategy: V1",
)
def unpaged_inflight(case: Case) -> str | None:
    """In-flight batching is the default."""
    if not commands.unpaged(case.build) or not _in_triton(case) or case.repository("batching_strategy") == "V1":
        return None
    return "settings.build: the KV cache is not paged, which in-flight batching needs"


@rule(
    "TLM508",
    "lookahead-sizes",
    "error",
    "lookahead decoding without its three sizes",
    "the backend reads them in that mode",
    "give lookahead_window_size, lookahead_ngram_size and lookahead_verification_set_size",
)
def lookahead_sizes(case: Case) -> str | None:
    """The model does not load."""
    names = (f"lookahead_{each}_size" for each in ("window", "ngram", "verification_set"))
    lacking = [name for name in names if not case.repository(name)]
    if case.repository("decoding_mode") != "lookahead" or not lacking:
        return None
    return f"settings.repository.decoding_mode lookahead: {', '.join(lacking)} missing"


@rule(
    "TLM509",
    "device-ids",
    "error",
    "`gpu_device_ids` or `participant_ids` that are not as many as the engine has ranks",
    "the runtime's check when it loads an engine",
    "name one for each rank, or remove it",
)
def device_ids(case: Case) -> str | None:
    """One GPU and one MPI rank each."""
    ranks = case.cell.tp * case.cell.pp
    for name in ("gpu_device_ids", "participant_ids"):
        ids = case.repository(name)
        if isinstance(ids, list | tuple) and len(set(ids)) != ranks:
            return f"settings.repository.{name} does not name {ranks} different ones"
    return None


@rule(
    "TLM510",
    "engine-settings",
    "error",
    "options for engines where there is none",
    "the PyTorch runtime loads weights as they are",
    "an `override` with `where: { toolchain: tensorrt_llm }` gives them to engines alone",
    toolchains=(PYTORCH,),
)
def engine_settings(case: Case) -> str | None:
    """`settings.build`, `settings.quantize.options`."""
    if case.build:
        return f"settings.build.{next(iter(case.build))}: the PyTorch backend builds no engine"
    if case.cell.settings["quantize"].get("options"):
        return (
            "settings.quantize.options are for the scripts that make engines' checkpoints; here Model Optimizer does it"
        )
    return None


# ---------------------------------------------------------------------------------------------------- TLM6: sizes


@rule(
    "TLM601",
    "layout",
    "error",
    "more ranks than GPUs, or heads and layers that they do not divide",
    "the models' own assertions",
    "take another tp and pp",
    toolchains=_BOTH,
)
def layout(case: Case) -> str | None:
    """28 heads do not go over 8 GPUs."""
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


@rule(
    "TLM602",
    "lengths",
    "error",
    "more tokens than the model has positions, or a prompt longer than a forward pass",
    "config.json of the model; `max_num_tokens` of the engine",
    "",
    toolchains=_BOTH,
)
def lengths(case: Case) -> str | None:
    """Of prompt and answer together."""
    cell, most = case.cell, case.shape.max_position_embeddings
    if cell.isl + cell.osl > most:
        return f"lengths {cell.isl},{cell.osl} are {cell.isl + cell.osl} tokens, {cell.model} has {most} positions"
    tokens = num_tokens(cell)
    if tokens >= cell.isl or splits_prompts(cell):
        return None
    return (
        f"settings.build.max_num_tokens {tokens} is less than a prompt of {cell.isl} tokens, which "
        "settings.repository.enable_chunked_context: true would split"
    )


@rule(
    "TLM603",
    "gemma2-lengths",
    "error",
    f"engines of Gemma 2 for more than {_GEMMA2_TOKENS} tokens, the window of every other layer",
    "README of examples/gemma in 0.17; no later release is known to lift it",
    "shorter lengths",
)
def gemma2_lengths(case: Case) -> str | None:
    """Beyond it every layer would have to see its own window."""
    tokens = case.cell.isl + case.cell.osl
    if case.family != "gemma2" or tokens <= _GEMMA2_TOKENS:
        return None
    return (
        f"lengths {case.cell.isl},{case.cell.osl} are {tokens} tokens; engines of Gemma 2 have at most {_GEMMA2_TOKENS}"
    )


@rule(
    "TLM604",
    "memory",
    "error",
    "weights, and the KV cache of one request, that do not fit on a GPU",
    "memory reference: parameters, layers, heads and bytes of each",
    "more of tp or pp, or a smaller precision, makes it less",
    toolchains=_BOTH,
)
def fits(case: Case) -> str | None:
    """A lower limit: what the runtime adds is left out."""
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
        f"cache for one request), which have {smallest / _GIB:.1f}"
    )


RULES: Final[tuple[Rule, ...]] = tuple(each for each in list(globals().values()) if isinstance(each, Rule))
"""In the order in which they are asked."""


def _why_not_paged(case: Case) -> str:
    """What keeps use_paged_context_fmha off: an option of the matrix, or the weights and the cache."""
    for name, off in (("use_paged_context_fmha", False), ("context_fmha", False), ("streamingllm", True)):
        if case.switch(name) is off:
            return f"by settings.build.{name}"
    if commands.unpaged(case.build):
        return "without a paged KV cache (settings.build)"
    return f"for {case.cell.precision} with {case.kv or 'no quantized'} cache here"


def _in_triton(case: Case) -> bool:
    return case.cell.settings["serve"]["frontend"] == _TRITON


def _served(case: Case, name: str) -> list[tuple[str, int]]:
    """What a server is told of one of the engine's limits, with the setting's name."""
    if _in_triton(case):
        found = {f"settings.repository.{name}": case.repository(name)}
    else:
        given = case.cell.settings["serve"]["options"]
        given = given if isinstance(given, dict) else {}
        found = {f"settings.serve.options.{name}": given.get(name, given.get(f"--{name}"))}
    return [(setting, number) for setting, value in found.items() if (number := _whole(value)) is not None]


def _whole(value: Json) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _of_toolchain(case: Case, key: str) -> Json:
    known = case.cell.recipe.get(key)
    return known.get(case.cell.toolchain) if isinstance(known, dict) else None


def _specifier(limits: str) -> SpecifierSet:
    return SpecifierSet(limits, prereleases=True)


def _fp8_context_fmha_gpus(release: str) -> str:
    if not at_least(release, "0.12"):
        return "90"
    if not at_least(release, "0.17"):
        return "89 and 90"
    return "89 to 119" if not at_least(release, "0.20") else "89 and above"


def _short(release: str) -> str:
    return ".".join(release.split(".")[:2])
