"""Conditions that TensorRT-LLM refuses after its options are parsed, by release: a single table, evaluated while
planning.

A rule is a function that yields why a case is refused. The first words of the first such rule are the cell's reason. Most
represent a check in a TensorRT-LLM program that comes late, after a download, a calibration or a build; the others,
features that a release lacks. The programs' own words are in `tests/data/tensorrt_llm/refusals.json`, which the
stand-ins use, so that this table and they can disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

from packaging.specifiers import SpecifierSet

from trtllm_pipeline.base import Cell, Json, Machine, assume
from trtllm_pipeline.measure import ImagesAsked
from trtllm_pipeline.models import AS_IS, trusted_code
from trtllm_pipeline.tensorrt.modelopt.checkpoint_writer import AWQ_OF_EXPERTS, read_since, uneven_stages, unwritten
from trtllm_pipeline.tensorrt.stage.lora import NO_ADAPTER
from trtllm_pipeline.tensorrt.stage.params import WITH_DRAFT_MODEL
from trtllm_pipeline.tensorrt.toolchains import companions, tiles, vision
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES, PYTORCH
from trtllm_pipeline.tensorrt.toolchains.common_stages import ends_early, image_setting
from trtllm_pipeline.tensorrt.toolchains.model_shape import computed, least_bytes
from trtllm_pipeline.tensorrt.trtllm import backends, commands, llmapi, prequantized, program_options
from trtllm_pipeline.tensorrt.trtllm.case import (
    Case,
    kept_weights,
    least_tokens,
    num_tokens,
    served_cache,
    splits_prompts,
)
from trtllm_pipeline.tensorrt.trtllm.commands import FP8_INPUTS, PLAIN, W4A8_PAGED, WEIGHT_ONLY
from trtllm_pipeline.tensorrt.trtllm.params import (
    FRONTEND_DISAGGREGATED,
    FRONTEND_TRITON,
    FRONTEND_TRITON_OPENAI,
    PYTORCH_PRECISIONS,
)
from trtllm_pipeline.tensorrt.trtllm.releases import (
    FAMILIES,
    FIRST,
    FIRST_DISAGGREGATED,
    FIRST_PYTORCH,
    at_least,
    convert_tool,
    parse,
    transformers_of,
)
from trtllm_pipeline.tensorrt.trtllm.speculation import LOOKAHEAD, MODES

Severity = Literal["error", "warning"]
"""error: a program of TensorRT-LLM fails, or lacks the feature. warning: it continues without the requested feature, so
the measurement would not match the cell.
"""

Check = Callable[[Case], Iterator[str | None]]
_BOTH: Final = (ENGINES, PYTORCH)
_LEAST_SM: Final = {"bf16": 80, "fp8": 89, "w4a8_awq": 89, "mxfp4": 90, "nvfp4": 100}
_NOT_ON_BLACKWELL: Final = frozenset({*WEIGHT_ONLY, "int8_sq", "int4_awq", "w4a8_awq"})
_NOT_ON_BLACKWELL_PLUGINS: Final = ("gemm_swiglu_plugin", "fp8_rowwise_gemm_plugin", "low_latency_gemm_plugin")
_ENGINES_ONLY: Final = frozenset({"chatglm", "gemma", "gemma2", "gpt2", "internlm2", "phi", "qwen"})
_MARLIN: Final = "1.3.0rc20"
"""First release whose PyTorch backend computes NVFP4 weights on Hopper, with Marlin kernels."""
_MARLIN_ADA: Final = "1.3.0rc29"
"""First release known to do so on SM 89: a probe on an L40. Upstream's hardware matrix does not list it."""
_AWQ_ON_BLACKWELL: Final = "1.2.1"
"""First release whose PyTorch backend is known to compute AWQ weights on SM 100."""
_RUBIN: Final = (107, "1.3.0rc29")
"""Compute capability of Rubin, and the first release whose hardware matrix is known to list it."""
_GEMMA2_TOKENS: Final = 4096
_WEIGHT_ONLY_OPTIONS: Final = ("--weight_only_precision", "--use-weight-only-with-precision")
_LORA_IN_ENGINES: Final = "0.10"
"""First release whose templates are known to have `lora_task_id`."""
_LORA_IN_SERVE: Final = "1.0"
_LORA_IN_LLMAPI: Final = "1.3.0rc20"
"""Of 30 June 2026; pull request 14079 was merged in May."""
_NOT_PLANNED: Final = {
    "eagle2": "Triton's TensorRT-LLM backend has no dynamic trees; its heads are those of the method eagle",
    "redrafter": "the PyTorch backend has none, and no engines are made with examples/redrafter here; pipeline stage build "
    "--checkpoint DIR --options speculative_decoding_mode=explicit_draft_tokens makes one of a checkpoint of yours",
}
"""Popular methods -> why no cell can use them."""
WITHOUT_OWN_LAYERS: Final = frozenset(
    {*FAMILIES, "gemma3", "gemma3_text", "gpt_oss", "internvl_chat", "llama4", "llava", "llava_next", "qwen2_5_vl"}
)
"""Families whose models have no draft layers. For others, config.json or a recipe has the number."""
_SPECULATION_SINCE: Final = {"draft": "0.18", "eagle": "0.17", "lookahead": "0.19"}
_SPECULATION_SERVED: Final = "0.20"
_SPECULATION_PRECISIONS: Final = {
    "draft": ("fp16", "bf16", "fp8"),
    "medusa": ("fp16", "bf16", "fp8"),
    "lookahead": ("fp16", "bf16", "fp8"),
    "eagle": ("fp16", "bf16"),
}
_SPECULATION_SM: Final = 80
_EAGLE_TOKENS: Final = 256
_EAGLE_BATCH: Final = 512
_BLOCK_SIZE: Final = "awq_block_size"
_SMALL_BLOCK: Final = 64
"""The other group size of AWQ that kernels support: issue 988."""
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Rule:
    """One combination that cannot work."""

    id: str
    name: str
    severity: Severity
    toolchains: tuple[str, ...]
    since: str | None
    """First release that has it. None: all from the first on. `0.19` includes every build of that line."""
    before: str | None
    """First release without it. None if unknown."""
    what: str
    """The fault that it finds, as a phrase."""
    source: str
    """The source."""
    hint: str
    """The remedy."""
    check: Callable[[Case], str | None]
    """The reason why a case is refused, or None."""

    def holds_in(self, release: str) -> bool:
        begun = self.since is None or at_least(release, self.since)
        return begun and (self.before is None or not at_least(release, self.before))


RULES: Final[list[Rule]] = []
"""All rules, in evaluation order."""


def rule(
    number: str,
    hint: str = "",
    *,
    severity: Severity = "error",
    toolchains: tuple[str, ...] = (ENGINES,),
    since: str | None = None,
    before: str | None = None,
) -> Callable[[Check], Check]:
    """Define a rule by a function that yields why a case is refused; None and what follows words count for nothing. Its
    name becomes the rule's name. Its docstring has the fault that it finds and, after "Source:", the source.
    """

    def define(check: Check) -> Check:
        name = check.__name__.replace("_", "-")
        what, _, source = " ".join((check.__doc__ or "").split()).rstrip(".").partition(". Source: ")

        def first(case: Case) -> str | None:
            return next(filter(None, check(case)), None)

        RULES.append(Rule(number, name, severity, toolchains, since, before, what, source, hint, first))
        return check

    return define


_OF_MODEL: Final = frozenset(
    (
        *("TLM102", "TLM103", "TLM104", "TLM106", "TLM107", "TLM108", "TLM109", "TLM201", "TLM202", "TLM205", "TLM206"),
        *("TLM207", "TLM208", "TLM305", "TLM601", "TLM605", "TLM606"),
    )
)
"""Rules about a model, a precision and a parallelism, regardless of settings."""


def takes_model(cell: Cell, machine: Machine) -> bool:
    """True if the cell's toolchain supports its model in its precision and parallelism. The machine has TensorRT-LLM."""
    assert machine.tensorrt_llm is not None
    case = Case.of(cell, machine, machine.tensorrt_llm, None)
    rules = _rules_of(cell.toolchain, case.release)
    return all(each.id not in _OF_MODEL or each.check(case) is None for each in rules)


def refusal(cell: Cell, machine: Machine, installed_help: str | None = None) -> tuple[Rule, str] | None:
    """The first rule of the release that `cell` breaks, with its words, or None. The machine has TensorRT-LLM.

    `installed_help` is the output of the installed `trtllm-build --help`, if it is installed.
    """
    assert machine.tensorrt_llm is not None
    case = Case.of(cell, machine, machine.tensorrt_llm, installed_help)
    for each in _rules_of(cell.toolchain, case.release):
        if (fault := each.check(case)) is not None:
            return each, fault
    return None


def infeasible(cell: Cell, machine: Machine, installed_help: str | None = None) -> str | None:
    """Why `cell` can never work on `machine`, and what to do, or None; for both TensorRT-LLM toolchains."""
    if machine.tensorrt_llm is None:
        return "TensorRT-LLM is not installed"
    reason = refusal(cell, machine, installed_help)
    return None if reason is None else "; ".join(filter(None, (reason[1], reason[0].hint)))


@lru_cache(maxsize=64)
def _rules_of(toolchain: str, release: str) -> tuple[Rule, ...]:
    return tuple(each for each in RULES if toolchain in each.toolchains and each.holds_in(release))


# ---------------------------------------------------------------------------------------- TLM1: features of a release


@rule("TLM101", f"trtllm-build is part of the package from {FIRST} to {assume.LAST_WITH_ENGINES}")
def no_builder(case: Case) -> Iterator[str | None]:
    """Engines with a release, or an installation, that has no `trtllm-build`. Source: the release page of 1.3.0rc20,
    which calls itself the last one with the TensorRT backend.
    """
    if not at_least(case.release, FIRST):
        yield f"TensorRT-LLM {case.release}: engines are built this way from {FIRST} on"
    # The installation decides, not the release number.
    if not case.installed.build:
        yield f"TensorRT-LLM {case.release} here has no trtllm-build, which builds engines{_on_pytorch(case)}"


def _on_pytorch(case: Case) -> str:
    """Words for the PyTorch backend, if it supports the cell of an engine, at least in another precision."""
    on_pytorch = replace(case.cell, toolchain=PYTORCH)
    if not at_least(case.release, FIRST_PYTORCH):
        return ""
    if takes_model(on_pytorch, case.machine):
        return f"; the toolchain {PYTORCH} serves the model without"
    listed = precisions_of(case.cell.recipe, PYTORCH) or PYTORCH_PRECISIONS
    known = [each for each in listed if takes_model(replace(on_pytorch, precision=each), case.machine)]
    return f"; the toolchain {PYTORCH} serves the model in {', '.join(known)}" if known else ""


@rule("TLM102", "docs/tensorrt-llm.md has the families of both toolchains")
def no_family(case: Case) -> Iterator[str | None]:
    """An architecture that no release's converter supports, or a model with images that no release's Triton templates
    support. Source: support matrices, and the converters themselves; preprocessing of the templates.
    """
    if (why := vision.ENGINES_WITHOUT.get(case.family)) is not None:
        other = "" if case.family in vision.PYTORCH_WITHOUT else f"; the toolchain {PYTORCH} supports them"
        yield f"family {case.family}: {why}{other}"
    if case.family in FAMILIES:
        return
    instead = _on_pytorch(case) or f"; known families: {', '.join(FAMILIES)}"
    yield f"family {case.family}: no known script of TensorRT-LLM converts it to an engine{instead}"


@rule("TLM103", f"use the toolchain {ENGINES}, or a newer release", toolchains=(PYTORCH,), before=FIRST_PYTORCH)
def no_pytorch(case: Case) -> Iterator[str | None]:
    """The PyTorch runtime before 1.0, when it was a preview. Source: release notes."""
    yield f"TensorRT-LLM {case.release}: its PyTorch backend is a preview before {FIRST_PYTORCH}"


@rule("TLM104", "use what the recipe lists", toolchains=_BOTH)
def not_in_recipe(case: Case) -> Iterator[str | None]:
    """A precision or release that the model's recipe leaves out. Source: the recipe, whose comments name the sources."""
    cell = case.cell
    works = precisions_of(cell.recipe, cell.toolchain)
    if works is not None and cell.precision not in works:
        known = ", ".join(works) or "none"
        yield f"precision {cell.precision}: the recipe of {cell.model} lists for {cell.toolchain}: {known}"
    limits = _of_toolchain(case, "releases")
    if isinstance(limits, str) and not _within(case.release, limits):
        yield f"{cell.model}: TensorRT-LLM supports it in releases {limits}, this is {case.release}"
    later = _of_toolchain(case, "precision_releases")
    limits = later.get(cell.precision) if isinstance(later, dict) else None
    if isinstance(limits, str) and not _within(case.release, limits):
        yield f"precision {cell.precision}: works with {cell.model} in releases {limits}, this is {case.release}"


def precisions_of(recipe: Mapping[str, Json], toolchain: str) -> Sequence[str] | None:
    """The precisions that a recipe lists for a toolchain. None if it does not limit them."""
    listed = recipe.get("precisions")
    works = listed.get(toolchain) if isinstance(listed, dict) else listed
    return [*map(str, works)] if isinstance(works, list | tuple) else None


_LATER: Final = {"qwen": " (Qwen 1; Qwen1.5, Qwen2 and Qwen2.5 are family qwen2)"}
"""Family -> the models that it includes, if later models of the same name belong to another."""


@rule("TLM105")
def needs_code(case: Case) -> Iterator[str | None]:
    """A model whose repository contains code that transformers needs to load it, and that
    `settings.download.trust_remote_code` does not list. The message has its files and the lines to add. Source: the
    converters, which load with `trust_remote_code=True`; wheels of transformers, for the architectures that they
    include.
    """
    family, recipe = FAMILIES.get(case.family), case.cell.recipe
    # The existing files are known for a pinned model.
    if family is None or family.transformers == "" or "source" not in recipe:
        return
    why = f"family {case.family}{_LATER.get(case.family, '')}: no version of transformers supports it"
    if family.transformers is not None:
        # If transformers has the architecture itself, the download removes the references to code.
        transformers = case.installed.transformers or transformers_of(case.release)
        if transformers is None or parse(transformers) >= parse(family.transformers):
            return
        why = f"family {case.family}: transformers supports it from {family.transformers} on, this is {transformers}"
    source = recipe["source"]
    assert isinstance(source, dict)
    untrusted = _untrusted(case.cell.model, trusted_code(source), recipe.get("code"))
    yield None if untrusted is None else f"{why}; Python code of the model's repository loads it, {untrusted}"


HUB_UNREACHED: Final = "its hub, which has the files' SHA-256, cannot be reached now"


def _untrusted(model: str, trusted: Mapping[str, str], code: Json) -> str | None:
    """The code of a model that is not trusted, and what to do. None if exactly the `trusted` code exists.

    `code` has `files` and `page`, see `planning.pins`. None if unknown now: the download decides.
    """
    if not isinstance(code, dict):
        return None if trusted else f"and {HUB_UNREACHED}"
    files, page = code["files"], code["page"]
    assert isinstance(files, dict)
    if not files:
        return f"but {page} has no Python file; use another copy of the model"
    other = sorted(name for name in trusted if trusted[name] != files.get(name))
    if trusted and not other:
        return None
    reason = "which is not trusted yet"
    if other:
        reason = f"and {other[0]} is not the file that settings.download.trust_remote_code names"
    lines = llmapi.to_yaml({"settings": {"download": {"trust_remote_code": {model: files}}}}).rstrip()
    return f"{reason}; read {page}, then add to the matrix:\n{lines}"


@rule(
    "TLM106",
    "use a model or a form that it reads, or the model's unquantized repository; docs/models.md has the forms",
    toolchains=_BOTH,
)
def as_is(case: Case) -> Iterator[str | None]:
    """Weights that are already quantized (`as_is`), in a form that the release does not read, or not on this GPU, or
    with a cache of another precision than theirs. Source: the scripts for Llama and Qwen;
    `_update_from_hf_quant_config` in llm_utils.py.
    """
    setting = case.cell.settings["quantize"]["kv_cache_precision"]
    if case.cell.precision == AS_IS and setting is not None:
        yield f"settings.quantize.kv_cache_precision {setting}: precision {AS_IS} quantizes nothing, and the files also define the cache"
    yield prequantized.unreadable(case.cell, case.release, case.sm)


@rule("TLM107", "`pipeline models list` shows other models that accept images", toolchains=(PYTORCH,))
def no_vision(case: Case) -> Iterator[str | None]:
    """A model with images that the PyTorch backend does not support. Source: its lists of models, 0.19 to candidates of
    1.3.
    """
    if case.family in vision.PYTORCH_WITHOUT:
        yield f"family {case.family}: the PyTorch backend's list of models does not include it in any release"


@rule("TLM108", f"the toolchain {ENGINES} converts it", toolchains=(PYTORCH,), before="1.3")
def engines_only(case: Case) -> Iterator[str | None]:
    """A family of the engines' converters that the PyTorch runtime lacks, before 1.3. Source: its list of supported
    models, of 1.0.0 and later. For families without a converter, recipes have this information.
    """
    if case.family in _ENGINES_ONLY:
        yield f"family {case.family}: the PyTorch runtime of TensorRT-LLM {case.release} does not list it"


@rule("TLM109", "use a release or a parallelism from the table of families")
def family_layout(case: Case) -> Iterator[str | None]:
    """A release before the first that converts an architecture, or that supports its parallelism. Source: as for
    TLM102.
    """
    cell, release, family = case.cell, case.release, FAMILIES[case.family]
    if not at_least(release, family.since):
        since = ".".join(family.since.split(".")[:2])
        yield f"family {case.family}: TensorRT-LLM converts it from {since} on, this is {release}"
    if cell.tp > 1 and not at_least(release, family.tensor_parallel):
        yield f"tp{cell.tp}: {case.family} can be split over GPUs from {family.tensor_parallel} on, this is {release}"
    if cell.pp > 1 and family.pipeline_parallel is None:
        yield f"pp{cell.pp}: TensorRT-LLM has no pipeline stages for {case.family}"
    if cell.pp > 1 and not at_least(release, family.pipeline_parallel or FIRST):
        yield f"pp{cell.pp}: {case.family} has pipeline stages from {family.pipeline_parallel} on, this is {release}"
    if cell.ep > 1 and family.expert_parallel is None:
        yield f"ep{cell.ep}: TensorRT-LLM has no expert parallelism for {case.family}"
    if cell.ep > 1 and not at_least(release, family.expert_parallel or FIRST):
        yield f"ep{cell.ep}: whole experts of {case.family} can be distributed over GPUs from {family.expert_parallel} on, this is {release}"


# ----------------------------------------------------------------------------------------- TLM2: precisions and GPUs


@rule("TLM201", "use one of these, or another release")
def no_precision(case: Case) -> Iterator[str | None]:
    """A precision that no script of the release creates. Source: the choices of `--qformat` and of the converters."""
    precision, release = case.precision, case.release
    if case.route == "quantize" and precision not in PLAIN:
        made = program_options.known("quantize.py", release)["--qformat"].choices or ()
        if precision not in made:
            yield f"precision {precision}: TensorRT-LLM {release} makes {', '.join(map(str, made))}"
    elif precision in WEIGHT_ONLY:
        tool = convert_tool(case.family)
        name = next(name for name in _WEIGHT_ONLY_OPTIONS if program_options.exists(tool, release, name))
        if not program_options.accepts(tool, release, name, WEIGHT_ONLY[precision]):
            yield f"precision {precision}: TensorRT-LLM {release} cannot convert {case.family} to it"


@rule("TLM202", "use SM 90, or a newer release", before="0.10")
def w4a8_on_ada(case: Case) -> Iterator[str | None]:
    """w4a8_awq on SM 89 before 0.10. Source: release notes."""
    if case.precision == "w4a8_awq" and case.sm == 89:
        yield f"precision w4a8_awq: TensorRT-LLM supports it on SM 89 from 0.10 on, this is {case.release}"


@rule("TLM203", "install a newer release", before="0.17.0")
def gpu_too_new(case: Case) -> Iterator[str | None]:
    """SM 100 and newer before 0.17. Source: release notes."""
    if case.sm is not None and case.sm >= 100:
        yield f"SM {case.sm}: TensorRT-LLM supports it from 0.17 on, this is {case.release}"


@rule("TLM204", "use a GPU of SM 75 or newer", toolchains=_BOTH, since="0.16")
def gpu_too_old(case: Case) -> Iterator[str | None]:
    """SM 70 from 0.16 on. Source: release notes."""
    if case.sm is None or case.sm >= 75:
        return
    family = FAMILIES.get(case.family) if case.cell.toolchain == ENGINES else None
    older = ""
    if family is not None and not at_least(family.since, "0.16") and case.sm >= _LEAST_SM.get(case.precision, 0):
        older = f"; releases {family.since} to 0.15 convert {case.family} and support it"
    yield f"SM {case.sm}: TensorRT-LLM does not support it from 0.16 on, this is {case.release}{older}"


@rule("TLM205", "fp8 and nvfp4 work there, and an fp8 cache")
def integers_on_blackwell(case: Case) -> Iterator[str | None]:
    """INT4 and INT8 weights (int8_wo, int4_wo, int4_awq, w4a8_awq), SmoothQuant or an INT8 KV cache on SM 100 to 119.
    Source: `build` in builder.py of 1.2.0 and 1.3.0rc3.
    """
    if case.sm is None or not 100 <= case.sm < 120:
        return
    # AWQ's groups do not keep `is_int4_weight_only` from being true.
    if case.precision in _NOT_ON_BLACKWELL:
        yield f"precision {case.shown}: TensorRT-LLM refuses it on SM 100 and above, this is SM {case.sm}"
    if case.kv == "int8":
        yield f"settings.quantize.kv_cache_precision int8: TensorRT-LLM refuses it on SM {case.sm}"


@rule(
    "TLM206",
    f"use one of these, or engines (the toolchain {ENGINES}, to {assume.LAST_WITH_ENGINES}), which have more",
    toolchains=(PYTORCH,),
)
def not_in_pytorch(case: Case) -> Iterator[str | None]:
    """A precision or cache that the PyTorch runtime does not support. Source: its page on quantization."""
    if case.cell.precision not in (*PYTORCH_PRECISIONS, AS_IS):
        yield f"precision {case.precision}: the PyTorch backend supports {', '.join(PYTORCH_PRECISIONS)}"
    if case.kv == "int8":
        yield "settings.quantize.kv_cache_precision int8: the PyTorch backend supports fp8 or the model's own"


@rule("TLM207", "fp8 and nvfp4 work there", toolchains=(PYTORCH,))
def awq_on_blackwell(case: Case) -> Iterator[str | None]:
    """AWQ weights in the PyTorch runtime on SM 100 and newer before 1.2.1, on SM 107 before 1.3.0rc29, and on SM 110
    and newer. Source: the hardware matrix of its page on quantization: that of 1.0 has AWQ for Ampere (int4_awq), Ada
    and Hopper, that of 1.2.1 for SM 100 and 103 too, that of 1.3.0rc29 also for SM 107, but not for SM 120. The
    releases in between were not read.
    """
    rubin, listed = _RUBIN
    if case.precision not in {"int4_awq", "w4a8_awq"} or case.sm is None or case.sm < 100:
        return
    if case.sm >= 110:
        yield f"precision {case.shown}: the PyTorch backend does not support it on SM {case.sm}"
    since = _AWQ_ON_BLACKWELL if case.sm < rubin else listed
    if not at_least(case.release, since):
        yield f"precision {case.shown}: the PyTorch backend supports it on SM {case.sm} from {since} on, this is {case.release}"


@rule("TLM208", "use another precision or GPU", toolchains=_BOTH)
def gpu_precision(case: Case) -> Iterator[str | None]:
    """A precision that the GPU cannot compute; with PyTorch, Marlin computes NVFP4 on Hopper from 1.3.0rc20 on, and on
    SM 89, with a warning, from 1.3.0rc29 on. Source: support matrices; pull request 13476 for 1.3.0rc20; a probe on an
    L40 for 1.3.0rc29.
    """
    sm, precision = case.sm, case.precision
    if sm is None:
        return
    least, later = _LEAST_SM.get(precision, 0), ""
    if precision == "nvfp4" and case.cell.toolchain == PYTORCH:
        if at_least(case.release, _MARLIN):
            least = 89 if at_least(case.release, _MARLIN_ADA) else 90
        since = {90: _MARLIN, 89: _MARLIN_ADA}.get(sm)
        later = "" if since is None else f" before TensorRT-LLM {since}"
    if sm < least:
        yield f"precision {case.shown} needs SM {least} or newer{later}, this is SM {sm}"
    if served_cache(case.cell) == "fp8" and sm < _LEAST_SM["fp8"]:
        place = "quantize.kv_cache_precision" if case.kv == "fp8" else "repository.llm_args.kv_cache_config.dtype"
        yield f"settings.{place} fp8 needs SM {_LEAST_SM['fp8']} or newer, this is SM {sm}"


def unlisted_gpu(machine: Machine) -> str | None:
    """A warning for Rubin before the release whose hardware matrix lists it, or None. The releases in between were not
    read.
    """
    rubin, listed = _RUBIN
    if machine.sm != rubin or machine.tensorrt_llm is None or at_least(machine.tensorrt_llm.release, listed):
        return None
    return f"SM {rubin} is not in any known hardware matrix before {listed}, this is {machine.tensorrt_llm.release}"


def by_marlin(cell: Cell, machine: Machine) -> str | None:
    """A warning for NVFP4 weights on SM 89, or None. Source: as for `gpu_precision`; for mixtures, the same probe."""
    if machine.sm != 89 or computed(cell) != "nvfp4":
        return None
    mixture = "; a mixture needs settings.repository.llm_args.moe_config.backend: MARLIN" * bool(
        cell.recipe.get("num_experts")
    )
    return f"NVFP4 weights are computed by Marlin on SM 89, which upstream's hardware matrix does not list{mixture}"


@rule("TLM209", "omit the cache's precision, or set the model's", toolchains=_BOTH)
def cache_type(case: Case) -> Iterator[str | None]:
    """An unquantized cache of another data type than the model's. Source: the builder creates the cache with the data
    type of attention.
    """
    setting, dtype = (
        case.cell.settings["quantize"]["kv_cache_precision"],
        commands.data_type(case.precision, case.family),
    )
    if setting is not None and case.kv is None and PLAIN[str(setting)] != dtype:
        yield f"settings.quantize.kv_cache_precision {setting}: an unquantized cache is {dtype}, like the model"


# ------------------------------------------------------------------------------------------------ TLM3: checkpoints


@rule("TLM301")
def script_options(case: Case) -> Iterator[str | None]:
    """Options of a script that does not create the cell's checkpoint, or that the release does not have. Source: the
    table of options.
    """
    extra = case.cell.settings["quantize"].get("options")
    if not isinstance(extra, dict) or not extra:
        return
    if case.installed.examples is None:
        yield "settings.quantize.options are for TensorRT-LLM's example scripts, which this machine does not have"
    tool, other = "quantize.py", convert_tool(case.family, case.heads)
    if case.route == "convert":
        tool, other = other, tool
    elif not commands.has_calibration_option(case.release):
        yield f"settings.quantize.options are for quantize.py; with {case.release} Model Optimizer creates this checkpoint"
    problems: list[str] = []
    for name, value in extra.items():
        if program_options.has(other, case.release, name) and not program_options.has(tool, case.release, name):
            theirs, ours = other.partition(":")[0], tool.partition(":")[0]
            problems.append(
                f"{name} is an option of {theirs}, but {ours} creates this cell's checkpoint; use an `override` for other cells"
            )
        else:
            problems += program_options.check_extra(tool, case.release, {name: value})
    yield "; ".join(f"settings.quantize.options.{problem}" for problem in problems) or None


@rule(
    "TLM302",
    "the examples of the same release make them, where TENSORRT_LLM_EXAMPLES names their directory; `pipeline doctor` says what "
    "is looked for",
)
def not_by_model_optimizer(case: Case) -> Iterator[str | None]:
    """Checkpoints that only Model Optimizer could create, but cannot: if the example scripts are missing, and
    calibrated ones with 0.10. Source: `get_calib_dataloader` of 0.10.0, which supports pileval and CNN/DailyMail but no
    directory.
    """
    why = _without_scripts(case)
    if why is None:
        return
    if case.cell.precision == AS_IS:
        yield f"precision {case.shown}: {why}, and only they convert weights that are already quantized"
    lacks = backends.quantizing_lacks(case.machine)
    if lacks is not None:
        yield f"{why}, and {lacks}"
    reason = unwritten(case.family, case.precision)
    if reason is None and (since := read_since(case.family)) is not None and not at_least(case.release, since):
        reason = f"engines use Model Optimizer's names for its weights from {since} on, this is {case.release}"
    yield None if reason is None else f"{case.family} in {case.precision}: {why}, and {reason}"


def _without_scripts(case: Case) -> str | None:
    """The reason why Model Optimizer, and not a script of the release, creates a checkpoint for engines. None if a
    script does.
    """
    if case.installed.examples is None:
        return "the example scripts of TensorRT-LLM are missing"
    if case.route == "quantize" and not commands.has_calibration_option(case.release):
        return f"quantize.py of TensorRT-LLM {case.release} calibrates only on its own data sets"
    return None


@rule(
    "TLM303",
    "use a precision that convert_checkpoint.py creates: fp32, bf16, int8_wo, int4_wo, with the model's own cache",
    before="0.15",
)
def gemma2_as_gemma(case: Case) -> Iterator[str | None]:
    """quantize.py on Gemma 2 before 0.15, which treats it as Gemma 1. Source: MODEL_NAME_PATTERN_MAP of
    quantize_by_modelopt.py; issue 2327.
    """
    # The checkpoint it writes has no soft caps and no second norms.
    if case.family == "gemma2" and case.route == "quantize":
        yield f"{case.precision} of gemma2: quantize.py of TensorRT-LLM {case.release} treats it as Gemma 1"


@rule(
    "TLM304", "omit settings.quantize.calibration.data, or install a newer release", severity="warning", before="0.10"
)
def calibration_data(case: Case) -> Iterator[str | None]:
    """Custom calibration data before 0.10, whose quantize.py fetches CNN/DailyMail and accepts no other. Source: the
    options of quantize.py.
    """
    if (
        case.installed.examples is not None
        and case.route == "quantize"
        and backends.has_own_calibration_data(case.cell)
    ):
        yield f"settings.quantize.calibration.data: quantize.py of TensorRT-LLM {case.release} does not accept it"


@rule("TLM305", "use fp8 or nvfp4, or as_is with a model that is published quantized", toolchains=(PYTORCH,))
def awq_of_experts(case: Case) -> Iterator[str | None]:
    """AWQ of a mixture of experts. Source: `get_experts_list` of Model Optimizer 0.47, run on tiny models of Mixtral
    and of Qwen's mixtures.
    """
    if case.cell.precision in {"int4_awq", "w4a8_awq"} and case.shape.num_experts:
        yield f"precision {case.precision} of a mixture of experts: {AWQ_OF_EXPERTS}"


# ------------------------------------------------------------------------------------------------------ TLM4: engines


@rule("TLM401")
def build_options(case: Case) -> Iterator[str | None]:
    """Options that `trtllm-build` of the release, or the installed one, does not accept. Source: the table of options;
    `trtllm-build --help`.
    """
    problems = program_options.check_extra("trtllm-build", case.release, case.build, case.installed_help)
    yield "; ".join(f"settings.build.{problem}" for problem in problems) or None


@rule("TLM402", "turn both off, or leave context_fmha on")
def context_fmha_off(case: Case) -> Iterator[str | None]:
    """`context_fmha: disable` with `use_paged_context_fmha` or `use_fp8_context_fmha` on. Source: `build` in builder.py,
    which turns both off from 0.19 on; the attention plugin before.
    """
    items = [name for name in ("use_paged_context_fmha", "use_fp8_context_fmha") if case.switch(name)]
    if case.switch("context_fmha") is False and items:
        yield f"settings.build.{items[0]} enable contradicts settings.build.context_fmha disable"


@rule("TLM403", "turn one of them off")
def streaming_with_paged(case: Case) -> Iterator[str | None]:
    """`streamingllm` with `use_paged_context_fmha` on. Source: the attention operator; `build` in builder.py turns the
    latter off from 0.19 on.
    """
    if case.switch("streamingllm") and case.switch("use_paged_context_fmha"):
        yield "settings.build.use_paged_context_fmha enable contradicts settings.build.streamingllm enable"


@rule("TLM404", "omit it: it is on if possible")
def fp8_attention(case: Case) -> Iterator[str | None]:
    """`use_fp8_context_fmha` without FP8 activations and an FP8 cache, or on a GPU for which the release has no
    kernels. Source: `build` in builder.py; the attention operator's own checks.
    """
    if not case.switch("use_fp8_context_fmha"):
        return
    release, precision = case.release, case.precision
    # Before 0.12, only Hopper supports it.
    early = not at_least(release, "0.12") and case.sm == 90 and precision != "nvfp4"
    if precision in FP8_INPUTS and case.kv == "fp8" and (early or commands.has_fp8_context_fmha(release, case.sm)):
        return
    spans = {"0.12": "90", "0.17": "89 and 90", "0.20": "89 to 119"}
    gpus = next((gpus for before, gpus in spans.items() if not at_least(release, before)), "89 and above")
    yield (
        f"settings.build.use_fp8_context_fmha: TensorRT-LLM {release} supports it for fp8, w4a8_awq and nvfp4 with an "
        f"FP8 cache on SM {gpus}; this is {precision} with {case.kv or 'no quantized'} cache on SM {case.sm}"
    )


@rule("TLM405", "omit it: it is on if possible")
def paged_int8(case: Case) -> Iterator[str | None]:
    """`use_paged_context_fmha` with an INT8 KV cache. Source: `build` in builder.py: a RuntimeError at first, turned off
    from 0.19 on.
    """
    if case.switch("use_paged_context_fmha") and case.kv == "int8":
        yield "settings.build.use_paged_context_fmha: it does not work with an INT8 KV cache"


@rule("TLM406", "omit it, or use fp8 weights", before="0.19")
def paged_fp8_refused(case: Case) -> Iterator[str | None]:
    """`use_paged_context_fmha` with an FP8 KV cache and weights that are not fp8, before 0.19. Source: `build` in
    builder.py of 0.11 and the attention operators of 0.12 to 0.17.
    """
    # An FP8 cache alone is not the FP8 workflow. Neither is w4a8_awq, which TLM407 covers.
    if case.attention.paged and case.kv == "fp8" and case.precision not in FP8_INPUTS:
        yield (
            f"settings.build.use_paged_context_fmha: TensorRT-LLM {case.release} supports it with an FP8 cache for fp8 weights, "
            f"this is {case.precision}"
        )


@rule("TLM407", "omit it, or use the model's own cache", before=W4A8_PAGED)
def paged_w4a8(case: Case) -> Iterator[str | None]:
    """`use_paged_context_fmha` with an FP8 KV cache and w4a8_awq before 1.2.0, the first release known to support it.
    Source: the attention operators of 0.12 to 0.17; `build` in builder.py of 1.2.0. 0.17.0 to 1.1 were not read.
    """
    # Its quantization mode has no FP8_QDQ.
    if case.attention.paged and case.kv == "fp8" and case.precision == "w4a8_awq":
        yield (
            f"settings.build.use_paged_context_fmha: it is known to work with w4a8_awq and an FP8 cache from {W4A8_PAGED} on, "
            f"this is {case.release}"
        )


@rule("TLM408", "omit it, or use fp8 weights", severity="warning", since="0.19")
def paged_turned_off(case: Case) -> Iterator[str | None]:
    """`use_paged_context_fmha` with an FP8 KV cache and weights without FP8 activations, from 0.19 on. Source: `build` in
    builder.py of 1.2.0 and 1.3.0rc3: turned off, with a warning.
    """
    if case.switch("use_paged_context_fmha") and case.kv == "fp8" and case.precision not in FP8_INPUTS:
        yield (
            f"settings.build.use_paged_context_fmha: TensorRT-LLM {case.release} turns it off with an FP8 cache and weights "
            f"in {case.precision}"
        )


@rule("TLM409", "turn both off, or leave the latter on if the GPU supports it", severity="warning")
def paged_turns_fp8_on(case: Case) -> Iterator[str | None]:
    """`use_paged_context_fmha` on and `use_fp8_context_fmha` off, with FP8 activations and an FP8 KV cache. Source:
    `build` in builder.py, from 0.11 to 1.3.0rc3: the latter is turned on, with a warning.
    """
    attention = case.attention
    if case.kv == "fp8" and case.precision in FP8_INPUTS and attention.paged and not attention.fp8:
        yield (
            "settings.build.use_paged_context_fmha enable turns use_fp8_context_fmha on with an FP8 cache, which is off "
            f"{'as requested' if case.switch('use_fp8_context_fmha') is False else f'with {case.release} on SM {case.sm}'}"
        )


@rule("TLM410", "leave it on, with a compatible cache, or use another release", since="0.20", before="0.21")
def paged_needed(case: Case) -> Iterator[str | None]:
    """Quantized weights without `use_paged_context_fmha` at 0.20. Source: pull request 131 of NVIDIA-NeMo/Export-Deploy:
    such builds fail.
    """
    if case.sm is not None and case.precision not in PLAIN and case.kv != "int8" and not case.paged_context_fmha:
        yield (
            f"{case.precision} without use_paged_context_fmha: TensorRT-LLM {case.release} does not build quantized "
            "checkpoints that way"
        )


@rule("TLM411", "leave it out", since="1.1.0rc6")
def no_streamingllm(case: Case) -> Iterator[str | None]:
    """`streamingllm` from 1.1 on, which is still parsed. Source: `trtllm-build` of 1.1.0rc6."""
    if case.switch("streamingllm"):
        yield f"settings.build.streamingllm: TensorRT-LLM {case.release} refuses it"


@rule("TLM412", "leave it out")
def plugins_on_blackwell(case: Case) -> Iterator[str | None]:
    """gemm_swiglu_plugin, fp8_rowwise_gemm_plugin or low_latency_gemm_plugin on SM 100 to 119. Source: plugin.py of
    1.3.0rc3.
    """
    if case.sm is None or not 100 <= case.sm < 120:
        return
    for name in _NOT_ON_BLACKWELL_PLUGINS:
        if case.option(name) not in (None, "disable", False):
            yield f"settings.build.{name}: TensorRT-LLM refuses it on SM 100 and above, this is SM {case.sm}"


# --------------------------------------------------------------------------------------------------- TLM5: the server


@rule("TLM501", "settings.build.max_beam_width builds an engine with more")
def beam_width(case: Case) -> Iterator[str | None]:
    """A server's `max_beam_width` above the engine's. Source: the runtime's check when it loads an engine."""
    yield _above(case, "max_beam_width", _whole(case.option("max_beam_width", 1)))


@rule("TLM502", "the axis max_batch_size is the engine's and the server's")
def batch_size(case: Case) -> Iterator[str | None]:
    """A server's batch above the engine's. Source: the runtime's check when it loads an engine."""
    # Only options of trtllm-serve can set it. The linter checks repositories.
    yield _above(case, "max_batch_size", case.cell.max_batch_size)


@rule("TLM503", "settings.build.use_paged_context_fmha: disable, or no sink_token_length")
def sinks_with_paged(case: Case) -> Iterator[str | None]:
    """`sink_token_length` with an engine that has `use_paged_context_fmha`. Source: the attention operator, at the first
    request.
    """
    tokens = _whole(case.repository("sink_token_length"))
    if tokens and case.paged_context_fmha:
        yield f"settings.repository.sink_token_length {tokens}: the engine has use_paged_context_fmha, which excludes it"


@rule(
    "TLM504",
    "omit it, or build the engine with use_paged_context_fmha, which depends on its options, weights and cache",
)
def chunked_context(case: Case) -> Iterator[str | None]:
    """`enable_chunked_context: true` with an engine without `use_paged_context_fmha`. Source: the runtime's check when it
    loads an engine.
    """
    yield _without_pages(case, "enable_chunked_context")


@rule(
    "TLM505",
    "omit it, or build the engine with use_paged_context_fmha, which depends on its options, weights and cache",
    severity="warning",
)
def kv_cache_reuse(case: Case) -> Iterator[str | None]:
    """`enable_kv_cache_reuse: true` with an engine without `use_paged_context_fmha`. Source: the runtime turns it off,
    with a warning.
    """
    yield _without_pages(case, "enable_kv_cache_reuse")


@rule("TLM506", "raise max_tokens_in_paged_kv_cache, or remove it")
def kv_tokens(case: Case) -> Iterator[str | None]:
    """A KV cache too small for one request of the cell's lengths. Source: the runtime's check when it loads an engine."""
    tokens, longest = _whole(case.repository("max_tokens_in_paged_kv_cache")), case.cell.isl + case.cell.osl
    if case.drafting is not None:
        longest += case.drafting.added
    if tokens is not None and tokens < longest:
        yield f"settings.repository.max_tokens_in_paged_kv_cache {tokens} is less than a request of {longest} tokens"


@rule("TLM507", "build a paged cache, or set settings.repository.batching_strategy: V1")
def unpaged_inflight(case: Case) -> Iterator[str | None]:
    """In-flight batching of an engine without a paged KV cache. Source: the runtime's check when it loads an engine."""
    if commands.unpaged(case.build) and case.in_triton and case.repository("batching_strategy") != "V1":
        yield "settings.build: the KV cache is not paged, which in-flight batching needs"


@rule("TLM508", "set them in settings.repository, such as 4 each")
def lookahead_sizes(case: Case) -> Iterator[str | None]:
    """Lookahead decoding without its three sizes. Source: the backend reads them in that mode."""
    drafts = case.drafting is not None and case.drafting.method == "lookahead"
    if (case.repository("decoding_mode") != "lookahead" and not drafts) or any(speculation_release(case)):
        return
    lacking = ", ".join(name for name in LOOKAHEAD if case.repository(name) is None)
    what = "settings.speculative.method" if drafts else "settings.repository.decoding_mode"
    yield f"{what} lookahead needs {lacking}" if lacking else None


@rule("TLM509", "name one for each rank, or remove it")
def device_ids(case: Case) -> Iterator[str | None]:
    """`gpu_device_ids` or `participant_ids` whose number differs from the engine's ranks. Source: the runtime's check
    when it loads an engine.
    """
    ranks = case.cell.tp * case.cell.pp
    for name in ("gpu_device_ids", "participant_ids"):
        ids = case.repository(name)
        if isinstance(ids, list | tuple) and len(set(ids)) != ranks:
            yield f"settings.repository.{name} does not list {ranks} different ids"


@rule(
    "TLM510", "an `override` with `where: { toolchain: tensorrt_llm }` restricts them to engines", toolchains=(PYTORCH,)
)
def engine_settings(case: Case) -> Iterator[str | None]:
    """Options for engines in a cell without an engine. Source: the PyTorch runtime loads weights as they are."""
    if case.build:
        yield f"settings.build.{next(iter(case.build))}: the PyTorch backend does not build engines"
    if case.cell.settings["quantize"].get("options"):
        yield "settings.quantize.options are for the scripts that create engines' checkpoints; here Model Optimizer quantizes"


@rule(
    "TLM511",
    "use a model with images on the toolchain tensorrt_llm_pytorch, and settings.serve.frontend: trtllm_serve",
    toolchains=_BOTH,
)
def image_prompts(case: Case) -> Iterator[str | None]:
    """Images in `settings.perf.images`, or in rows of perf or accuracy, with engines of a family without a visual
    engine, with Triton's LLM API model, or with a model that only accepts text. Source: image_url of the chat of
    `trtllm-serve`; its list of models with images; inputs of the template `llmapi`, issue 8945 of Triton's server for
    1.2.1.
    """
    images = image_setting(case.cell)
    if images is None:
        return
    if vision.sees(case.cell):
        return  # TLM512 checks them
    if case.cell.toolchain == ENGINES:
        yield f"{images}: no visual engine is built for family {case.family}"
    if case.in_triton:
        yield f"{images}: Triton's LLM API model only accepts text; trtllm-serve accepts images"
    if not case.cell.recipe.get("images"):
        yield f"{images}: the recipe of {case.cell.model} does not state that it accepts images"


@rule("TLM512", "docs/models.md lists the requirements of engines for models with images")
def visual_engine(case: Case) -> Iterator[str | None]:
    """A model with images on engines, if the release's templates do not support them, or not with these settings.
    Source: `preprocessing` and `multimodal_encoders` of the templates; issues 2714 and 7247 (trtllm-serve), 8207 of
    Triton's server (its OpenAI front end).
    """
    encoder, cell, family = vision.FAMILIES.get(case.family), case.cell, case.family
    if encoder is None:
        return
    frontend = cell.settings["serve"]["frontend"]
    if frontend != FRONTEND_TRITON:
        served = "trtllm-serve does not support a visual engine" if not case.in_triton else "it only forwards text"
        yield f"settings.serve.frontend {frontend}: {served}"
    if not at_least(case.release, encoder.since):
        yield f"family {family}: Triton's templates support its images from {encoder.since} on, this is {case.release}"
    if cell.precision not in vision.PRECISIONS or case.kv is not None:
        what = f"with a cache of {case.kv}" if cell.precision in vision.PRECISIONS else cell.precision
        yield (
            f"precision {what}: models with images are converted to {', '.join(vision.PRECISIONS)} with a cache of FP16"
        )
    if encoder.vocabulary not in (None, case.shape.vocab_size):
        yield (
            f"family {family}: preprocessing of the templates has {encoder.vocabulary} tokens written in it, and "
            f"{cell.model} has {case.shape.vocab_size}"
        )
    if cell.pp > 1:
        yield f"pp{cell.pp}: with a visual engine, only tensor parallelism is known to work"
    if companions.adapters(cell):
        yield "settings.lora.adapter: it is unknown how engines accept an adapter and images in one request"
    if companions.speculation(cell) is not None:
        yield "settings.speculative: it is unknown how engines draft tokens for a prompt with an image"
    if case.repository("enable_kv_cache_reuse"):
        yield "settings.repository.enable_kv_cache_reuse: all images have the same token ids in prompts, and would be mixed up"
    yield _wrong_image(case, encoder)


def _wrong_image(case: Case, family_images: vision.Vision) -> str | None:
    """The reason why a synthetic image of the cell cannot be used, or None."""
    images = case.cell.settings["perf"]["images"]
    parse, name = (
        ImagesAsked.parse(str(images or f"1@{family_images.image}")),
        "settings.perf.images: " if images else "",
    )
    if parse.count > 1:
        return f"{name}{parse.count} images: Triton's templates accept one per prompt for {case.family}"
    if (case.repository("max_num_images") or 1) > 1:
        return f"settings.repository.max_num_images: Triton's templates accept one per prompt for {case.family}"
    return _large_image(case, parse, name, vision.image_tokens)


@rule("TLM513", "use smaller or fewer images, or longer lengths", toolchains=(PYTORCH,))
def image_tokens(case: Case) -> Iterator[str | None]:
    """Images of `settings.perf.images` that leave no tokens for the prompt, for families whose token counts are known:
    qwen2_vl, qwen2_5_vl and gemma3. Source: the models' processors.
    """
    setting = case.cell.settings["perf"]["images"]
    if setting:
        yield _large_image(case, ImagesAsked.parse(str(setting)), "settings.perf.images: ", vision.pytorch_image_tokens)


def _large_image(
    case: Case, images_wanted: ImagesAsked, name: str, tokens_of: Callable[[str, int, int], int | None]
) -> str | None:
    """Words for images that leave no token for a question, or that the model does not accept."""
    images = "an image" if images_wanted.count == 1 else f"{images_wanted.count} images"
    try:
        each = tokens_of(case.family, images_wanted.width, images_wanted.height)
    except ValueError as error:
        return f"{name}{images} of {images_wanted.width}x{images_wanted.height}: {error}"
    if each is None or (tokens := each * images_wanted.count) < case.cell.isl:
        return None
    return (
        f"{name}{images} of {images_wanted.width}x{images_wanted.height} take{'s' * (images_wanted.count == 1)} {tokens} tokens of {case.family}, and "
        f"prompts of the cell have {case.cell.isl}"
    )


@rule("TLM514", llmapi.ONBOARDING_HINT, toolchains=(PYTORCH,), since=llmapi.WITHOUT_ONBOARDING)
def onboarding(case: Case) -> Iterator[str | None]:
    """`kv_cache_onboard_blocks`, an argument that was removed from the LLM API. Source: pull request 12449; the schema
    of 1.4.0rc0.
    """
    why = llmapi.without_onboarding(case.repository("kv_cache_onboard_blocks"), case.release)
    yield None if why is None else f"settings.repository.{why}"


# ---------------------------------------------------------------------------------------------------- TLM6: sizes


@rule("TLM601", "use another tp and pp", toolchains=_BOTH)
def layout(case: Case) -> Iterator[str | None]:
    """More ranks than GPUs, heads that tp does not divide, or, for engines, layers that pp does not divide. Source: the
    models' own assertions; `Mapping.pp_layers`, by which the PyTorch backend gives the first stages one layer more.
    """
    shape, tp, pp, gpus = case.shape, case.cell.tp, case.cell.pp, len(case.machine.gpus)
    if tp * pp > gpus:
        yield f"tp{tp}pp{pp} needs {tp * pp} GPUs, this machine has {gpus}"
    uneven = tiles.uneven(shape.num_attention_heads, shape.num_key_value_heads, case.cell.attention_tp)
    yield uneven or (uneven_stages(shape.num_hidden_layers, pp) if case.cell.toolchain == ENGINES else None)


@rule("TLM602", toolchains=_BOTH)
def lengths(case: Case) -> Iterator[str | None]:
    """More tokens than the model has positions, or a prompt longer than a forward pass. Source: config.json of the model;
    `max_num_tokens` of the engine.
    """
    cell, most = case.cell, case.shape.max_position_embeddings
    if cell.isl + cell.osl > most:
        yield f"lengths {cell.isl},{cell.osl} are {cell.isl + cell.osl} tokens, {cell.model} has {most} positions"
    tokens = num_tokens(cell)
    if tokens < cell.isl and not splits_prompts(cell):
        yield (
            f"settings.build.max_num_tokens {tokens} is less than a prompt of {cell.isl} tokens, which "
            "settings.repository.enable_chunked_context: true would split"
        )


@rule("TLM603", "shorter lengths")
def gemma2_lengths(case: Case) -> Iterator[str | None]:
    """Engines of Gemma 2 for more than 4096 tokens, the window of every other layer. Source: README of examples/gemma
    in 0.17; no later release is known to support more.
    """
    # Beyond it, every layer would need its own window.
    tokens = case.cell.isl + case.cell.osl
    if case.family == "gemma2" and tokens > _GEMMA2_TOKENS:
        yield f"lengths {case.cell.isl},{case.cell.osl} are {tokens} tokens; engines of Gemma 2 support at most {_GEMMA2_TOKENS}"


@rule("TLM604", "a larger tp or pp, or a smaller precision, reduces it", toolchains=_BOTH)
def memory(case: Case) -> Iterator[str | None]:
    """Weights, and the KV cache of one request, that do not fit on a GPU; for an engine in Triton built with
    `weight_streaming`, the share of the weights in `gpu_weights_percent`. Source: memory reference: parameters, layers,
    heads and bytes of each.
    """
    cell = case.cell
    smallest = min((gpu.memory_bytes for gpu in case.machine.gpus), default=None)
    weights, cache = least_bytes(
        case.shape,
        precision=case.precision,
        kv=served_cache(cell),
        tp=cell.tp,
        pp=cell.pp,
        dp=cell.dp,
        tokens=cell.isl + cell.osl,
    )
    if case.in_triton and program_options.exists("trtllm-build", case.release, "--weight_streaming"):
        weights = int(weights * kept_weights(cell))
    if smallest is not None and weights + cache > smallest:
        yield (
            f"needs {(weights + cache) / _GIB:.1f} GiB on each GPU ({weights / _GIB:.1f} of weights, {cache / _GIB:.1f} of KV "
            f"cache for one request), which have {smallest / _GIB:.1f}"
        )


@rule(
    "TLM605",
    "use a parallelism without ep, or a precision that convert_checkpoint.py creates: bf16, fp16, int8_wo, int4_wo, with the model's own cache",
)
def experts(case: Case) -> Iterator[str | None]:
    """Expert parallelism with a checkpoint from quantize.py or Model Optimizer. Source: their options, none of which
    distributes experts.
    """
    by = "Model Optimizer" if _without_scripts(case) else "quantize.py" if case.route == "quantize" else None
    if case.cell.ep != 1 and by is not None:
        yield f"ep{case.cell.ep}: {by}, which creates {case.cell.precision} here, splits each expert over all GPUs of tp"


@rule("TLM606", toolchains=_BOTH)
def groups(case: Case) -> Iterator[str | None]:
    """Ranks that would get a part of a tile, group or block of quantized weights: 64 inputs and columns for int8_wo and
    int4_wo, 128 for AWQ and GPTQ or the size in `awq_block_size` or the files, 128 for FP8 blocks, 16 for nvfp4.
    Source: the table in tensorrt/toolchains/tiles.py, which has a source for each.
    """
    cell, on_pytorch = case.cell, case.cell.toolchain == PYTORCH
    form = prequantized.form_of(cell) or case.precision
    tile = (tiles.PYTORCH if on_pytorch else tiles.ENGINES).get(form)
    if tile is None:
        return
    scripts = not on_pytorch and case.route == "quantize" and _without_scripts(case) is None
    size = cell.recipe.get("quantization_group_size") if cell.precision == AS_IS else None
    if scripts and cell.precision != AS_IS:
        extra = cell.settings["quantize"]["options"]
        assert isinstance(extra, dict)
        size = extra.get(_BLOCK_SIZE, extra.get(f"--{_BLOCK_SIZE}"))
    widths = _split_widths(case)
    cut = tiles.cut(tiles.grouped(tile, size), widths, cell.tp, cell.ep, cell.dp, precision=case.shown)
    if cut is None or form != "int4_awq" or not scripts:
        yield cut
        return
    smaller = tiles.cut(tiles.grouped(tile, _SMALL_BLOCK), widths, cell.tp, cell.ep, cell.dp, precision=case.shown)
    yield cut if smaller else f"{cut}, and tp{cell.tp} with settings.quantize.options.{_BLOCK_SIZE}: {_SMALL_BLOCK}"


def _split_widths(case: Case) -> tiles.Widths:
    """The widths that tensor parallelism splits in TensorRT-LLM."""
    widths = replace(tiles.Widths.of(case.shape), shared=0)
    if case.cell.toolchain != PYTORCH:
        return widths
    if case.family.startswith("deepseek"):
        # Its dense layers are split over as many ranks as get whole blocks: `_compute_mlp_tp_size` of
        # modeling_deepseekv3.py.
        widths = replace(widths, dense=0)
    arguments = case.repository("llm_args") or {}
    if "moe_expert_parallel_size" in arguments:
        widths = replace(widths, experts=0)
    return widths


@rule("TLM607", "the engine supports prompts and outputs of the axis lengths")
def check_lengths(case: Case) -> Iterator[str | None]:
    """`settings.check.max_tokens` that leaves no space for a prompt in the cell's engine. Source: `_check_inputs` of
    model_runner_cpp.py, by which run.py refuses it.
    """
    setting, cell = case.cell.settings["check"]["max_tokens"], case.cell
    longest = cell.isl + cell.osl + (case.drafting.added if case.drafting else 0)
    if isinstance(setting, int) and setting >= longest:
        yield f"settings.check.max_tokens {setting}: engines for {cell.isl},{cell.osl} support {longest} tokens of prompt and output together"


@rule("TLM608", "the toolchain tensorrt_llm_pytorch has as many groups as GPUs, such as tp8dp8", toolchains=_BOTH)
def attention_groups(case: Case) -> Iterator[str | None]:
    """Data parallel attention in engines, or over groups other than single GPUs. Source: `enable_attention_dp` of
    TorchLlmArgs, which engines do not have, and `Mapping`, whose groups are the ranks of tp.
    """
    tp, dp = case.cell.tp, case.cell.dp
    if dp == 1:
        return
    if case.cell.toolchain == ENGINES:
        yield f"dp{dp}: engines split the attention of each request over all GPUs of tp"
    yield None if dp == tp else f"dp{dp}: TensorRT-LLM computes attention on single GPUs, which is dp{tp} for tp{tp}"


# ------------------------------------------------------------------------------------------ TLM7: speculative decoding


@rule(
    "TLM701",
    f"the toolchain {ENGINES} has {', '.join(MODES)}; the toolchain {PYTORCH} has draft, eagle3, mtp and ngram from 1.0 on, and sa, pard and "
    f"dflash from {llmapi.NEW_DRAFTERS} on",
    toolchains=_BOTH,
)
def speculation(case: Case) -> Iterator[str | None]:
    """A method of speculative decoding that the backend does not support, in Triton or `trtllm-serve`, and ReDrafter.
    Source: `--speculative_decoding_mode` of trtllm-build and examples/prompt_lookup, which is a separate program, for
    engines; `DecodingBaseConfig` and its subclasses for PyTorch; Triton's tutorial on speculative decoding, for
    EAGLE-2.
    """
    speculation = companions.speculation(case.cell)
    if speculation is not None and (why := _NOT_PLANNED.get(str(speculation["method"]))) is not None:
        yield f"settings.speculative.method {speculation['method']}: {why}"
    if (
        speculation is None
        or (speculation["method"] in MODES) is (case.cell.toolchain == ENGINES)
        or speculation["method"] == "draft"
    ):
        return
    backend = "engines have" if case.cell.toolchain == ENGINES else "the PyTorch backend has"
    yield f"settings.speculative.method {speculation['method']}: {backend} no such way to draft"


@rule("TLM702", "settings.speculative.model: ORGANIZATION/NAME, a recipe, or a directory", toolchains=_BOTH)
def draft_model(case: Case) -> Iterator[str | None]:
    """A method that needs a draft model, without one, or with a head that the model's recipe lists for another method.
    Source: `DecodingBaseConfig` and its subclasses of the LLM API; the converters of examples/medusa and
    examples/eagle; recipes.
    """
    speculation = companions.speculation(case.cell)
    if speculation is None or speculation["method"] not in WITH_DRAFT_MODEL:
        return
    method, heads = str(speculation["method"]), companions.known_heads(case.cell)
    known = f"; known for {case.cell.model}: {', '.join(heads[method])}" if method in heads else ""
    if speculation["model"] is None:
        yield f"settings.speculative.method {method} needs a draft model, but settings.speculative.model is not set{known}"
    name = str(speculation["model"]).partition("@")[0].lower()
    taken = next((of for of, names in heads.items() if name in map(str.lower, names)), method)
    if taken != method:
        yield f"settings.speculative.model {speculation['model']} is a head of the method {taken}, this is {method}{known}"


@rule("TLM703", "set it in only one of the two", toolchains=_BOTH)
def speculation_twice(case: Case) -> Iterator[str | None]:
    """Speculative decoding both in `settings.speculative` and in `settings.repository.llm_args`, `settings.build`,
    `settings.quantize.options` or `settings.repository`. Source: each has one place, such as the LLM API's argument
    `speculative_config`, or `--max_draft_len` of trtllm-build.
    """
    if companions.speculation(case.cell) is None:
        return
    given = case.repository("llm_args")
    if isinstance(given, dict) and "speculative_config" in given:
        yield "settings.repository.llm_args.speculative_config is already set by settings.speculative"
    if case.cell.toolchain != ENGINES:
        return
    for name in ("speculative_decoding_mode", "max_draft_len"):
        if case.option(name) is not None:
            yield f"settings.build.{name} is already set by settings.speculative"
    for name in ("decoding_mode", "tensorrt_llm_draft_model_name"):
        if case.repository(name) is not None:
            yield f"settings.repository.{name} is already set by settings.speculative"
    extra = case.cell.settings["quantize"].get("options")
    mine = {"medusa_model_dir", "num_medusa_heads", "num_medusa_layers", "max_draft_len"} if case.heads else set()
    twice = sorted({str(name).lstrip("-") for name in extra} & mine) if isinstance(extra, dict) else []
    yield f"settings.quantize.options.{twice[0]} is already set by settings.speculative" if twice else None


@rule(
    "TLM704",
    f"the toolchain {PYTORCH} with settings.serve.frontend: trtllm_serve supports them from {FIRST_PYTORCH} on",
    toolchains=_BOTH,
)
def lora(case: Case) -> Iterator[str | None]:
    """A LoRA adapter, if the release or its frontend has no way to request one. Source: inputs of the Triton models;
    pull request 14079, which added some to the LLM API's model; `lora_request` of trtllm-serve; options of Triton's
    OpenAI front end.
    """
    if not companions.adapters(case.cell):
        return
    frontend, release = case.cell.settings["serve"]["frontend"], case.release
    if case.cell.toolchain == PYTORCH:
        # If templates are installed, their own inputs decide: `pytorch_backend`.
        if not case.in_triton or not case.machine.assumed or at_least(release, _LORA_IN_LLMAPI):
            return
        yield (
            f"settings.lora.adapter: Triton's LLM API model of TensorRT-LLM {release} has no input for it; it is known to have "
            f"one from {_LORA_IN_LLMAPI} on"
        )
    if not at_least(release, _LORA_IN_ENGINES):
        yield (
            f"settings.lora.adapter: engines accept adapters in requests from {_LORA_IN_ENGINES} on, this is {release}"
        )
    if frontend == FRONTEND_TRITON_OPENAI:
        yield f"settings.lora.adapter: requests to {frontend} cannot send an adapter to an engine"
    if not case.in_triton and not at_least(release, _LORA_IN_SERVE):
        yield f"settings.lora.adapter: trtllm-serve accepts lora_request from {_LORA_IN_SERVE} on, this is {release}"


@rule("TLM705", "set it in only one of the two", toolchains=(PYTORCH,))
def lora_twice(case: Case) -> Iterator[str | None]:
    """An adapter both in `settings.lora` and in `settings.repository.llm_args`. Source: one argument of the LLM API,
    `lora_config`, has it.
    """
    given = case.repository("llm_args")
    if companions.adapters(case.cell) and isinstance(given, dict) and "lora_config" in given:
        yield "settings.repository.llm_args.lora_config is already set by settings.lora"


@rule("TLM706", "use another method, or a model with such layers, such as DeepSeek V3", toolchains=(PYTORCH,))
def speculation_family(case: Case) -> Iterator[str | None]:
    """`mtp` with a model whose family has no draft layers of its own. Source: the model types in `MTPForCausalLM` of
    modeling_speculative.py, around 1.0 to 1.3, which do not include it.
    """
    speculation = companions.speculation(case.cell)
    if speculation is not None and speculation["method"] == "mtp" and case.family in WITHOUT_OWN_LAYERS:
        yield f"settings.speculative.method mtp: models of the family {case.family} have no draft layers of their own"


@rule("TLM707", "use another method, or a newer release", toolchains=(PYTORCH,), before=llmapi.NEW_DRAFTERS)
def speculation_later(case: Case) -> Iterator[str | None]:
    """`sa`, `pard` and `dflash` before 1.3.0rc20. Source: that release's page of the LLM API's classes; pull requests
    11434, 11438 and 12794, whose first releases were not read.
    """
    speculation = companions.speculation(case.cell)
    if speculation is None or speculation["method"] not in {"sa", "pard", "dflash"}:
        return
    method = f"settings.speculative.method {speculation['method']}"
    yield f"{method}: it is known to exist from TensorRT-LLM {llmapi.NEW_DRAFTERS} on, this is {case.release}"


@rule(
    "TLM711",
    "remove it, or give it to the methods that read it by an `override` with `where: { settings.speculative.method: ... }`",
    toolchains=_BOTH,
)
def speculation_settings(case: Case) -> Iterator[str | None]:
    """A setting of speculative decoding that the cell's method does not read. Source: the arguments of each method."""
    speculation = companions.speculation(case.cell)
    if speculation is None:
        return
    for name, methods in companions.READ_BY.items():
        if speculation.get(name) is not None and speculation["method"] not in methods:
            yield f"settings.speculative.{name}: {speculation['method']} does not use it; it is for {' and '.join(sorted(methods))}"


@rule("TLM712", "use a newer release, another method, or, from 1.0, the toolchain tensorrt_llm_pytorch")
def speculation_release(case: Case) -> Iterator[str | None]:
    """A method for which the release cannot build engines, or whose use in its server was not read. Source: the choices
    of `--speculative_decoding_mode`; Triton's tutorial, which has EAGLE from images 25.01 (0.17) on; README of
    examples/draft_target_model, of 0.18; the templates of 0.19, which name the sizes of lookahead.
    """
    draft = case.drafting
    if draft is None:
        return
    method, release = f"settings.speculative.method {draft.method}", case.release
    if not program_options.accepts("trtllm-build", release, "--speculative_decoding_mode", MODES[draft.method]):
        yield f"{method}: trtllm-build of TensorRT-LLM {release} has no such mode"
    since = _SPECULATION_SINCE.get(draft.method)
    if since is not None and not at_least(release, since):
        yield f"{method}: it is known to be served from TensorRT-LLM {since} on, this is {release}"


@rule("TLM713", "use one of these, or another method")
def speculation_model(case: Case) -> Iterator[str | None]:
    """Medusa or EAGLE heads for a model other than Llama, a precision or a LoRA adapter with which a method is not
    documented, or heads without the release's example scripts. Source: the converters of examples/medusa and
    examples/eagle; the support matrices of their READMEs and of examples/lookahead and examples/draft_target_model.
    """
    draft = case.drafting
    if draft is None:
        return
    method = f"settings.speculative.method {draft.method}"
    if case.heads and case.family != "llama":
        yield f"{method}: heads are converted only with Llama models, this is {case.family}"
    known = _SPECULATION_PRECISIONS[draft.method]
    if case.cell.precision not in known:
        yield f"{method}: it is documented with {', '.join(known)}, this is {case.shown}"
    if case.heads == "eagle" and case.kv is not None:
        yield f"{method}: its converter does not quantize the cache, but settings.quantize.kv_cache_precision is {case.kv}"
    if companions.adapters(case.cell):
        yield f"{method}: it is not documented with a LoRA adapter (settings.lora.adapter)"
    scripts = case.installed.examples is not None and commands.has_calibration_option(case.release)
    if case.heads and (case.installed.examples is None or (case.route == "quantize" and not scripts)):
        yield f"{method}: its checkpoint needs example scripts of TensorRT-LLM, which are missing"
    quantizes = program_options.exists("quantize.py", case.release, "--medusa_model_dir")
    if case.heads and case.route == "quantize" and not quantizes:
        yield f"{method}: quantize.py of TensorRT-LLM {case.release} does not support heads"


@rule("TLM714", "use tensor parallelism only (one GPU with a draft model), on SM 80 or newer")
def speculation_layout(case: Case) -> Iterator[str | None]:
    """Speculative decoding with engines on a GPU before SM 80 or with pipeline stages; with a draft model on several
    GPUs, where two engines need the orchestrator mode of Triton's backend, which is not planned. Source: support
    matrices of the examples' READMEs.
    """
    draft = case.drafting
    if draft is None:
        return
    method, cell = f"settings.speculative.method {draft.method}", case.cell
    if case.sm is not None and case.sm < _SPECULATION_SM:
        yield f"{method} needs SM {_SPECULATION_SM} or newer, this is SM {case.sm}"
    if cell.pp > 1:
        yield f"{method} does not support pipeline stages, this is pp{cell.pp}"
    if draft.method == "draft" and cell.tp > 1:
        yield f"{method}: two engines are planned on one GPU, this is tp{cell.tp}"


@rule("TLM715")
def speculation_server(case: Case) -> Iterator[str | None]:
    """Settings that are incompatible with speculative decoding with engines: beams, a cache without pages, batching
    other than fused in-flight batching; `trtllm-serve` with a draft model or EAGLE; streaming, or no reuse of the KV
    cache, with a draft model. Source: the examples' READMEs; `TrtGptModelInflightBatching`; decode.py of
    tensorrt_llm_bls; llm_args.py of 0.20 and 1.1.
    """
    draft = case.drafting
    if draft is None:
        return
    method = f"settings.speculative.method {draft.method}"
    beams = max(_whole(case.option("max_beam_width", 1)) or 1, _whole(case.repository("max_beam_width")) or 1)
    if beams > 1:
        yield f"{method} supports one beam, max_beam_width is {beams}"
    if commands.unpaged(case.build):
        yield f"{method} needs a paged KV cache, which settings.build turns off"
    strategy = case.repository("batching_strategy")
    if case.in_triton and strategy not in {None, "inflight_fused_batching"}:
        yield f"{method} needs settings.repository.batching_strategy inflight_fused_batching, this is {strategy}"
    if not case.in_triton and draft.method in {"draft", "eagle"}:
        yield f"{method}: trtllm-serve only supports it with PyTorch; settings.serve.frontend: triton serves it with engines"
    if not case.in_triton and not at_least(case.release, _SPECULATION_SERVED):
        yield f"{method}: trtllm-serve is known to support it from {_SPECULATION_SERVED} on, this is {case.release}"
    if draft.method != "draft":
        return
    if case.cell.settings["serve"]["frontend"] != "triton":
        yield f"{method}: requests name how many tokens to draft, which Triton's OpenAI front end does not support; use triton"
    if case.repository("decoupled"):
        yield f"{method}: tensorrt_llm_bls does not stream answers with it; set settings.repository.decoupled: false"
    if not case.repository("enable_kv_cache_reuse"):
        yield (
            f"{method}: both engines see the answer so far again with every step, and refuse to load without "
            "settings.repository.enable_kv_cache_reuse: true"
        )


@rule("TLM716", "shorter drafts, or a smaller batch")
def speculation_sizes(case: Case) -> Iterator[str | None]:
    """More than 256 drafted tokens, or more than 512 requests, with EAGLE; lookahead sizes that draft nothing. Source:
    `build` in builder.py; README of examples/lookahead.
    """
    draft = case.drafting
    if draft is None:
        return
    if draft.method == "eagle" and draft.length > _EAGLE_TOKENS:
        yield f"settings.speculative.max_draft_len {draft.length}: eagle drafts at most {_EAGLE_TOKENS} tokens"
    if draft.method == "eagle" and case.cell.max_batch_size > _EAGLE_BATCH:
        yield f"max_batch_size {case.cell.max_batch_size}: eagle supports at most {_EAGLE_BATCH} requests"
    if draft.method == "lookahead" and draft.length < 1:
        sizes = ", ".join(str(case.repository(name)) for name in LOOKAHEAD)
        yield f"settings.repository.lookahead_*: sizes of {sizes} draft nothing; the smallest that do are 2, 2, 1"


@rule("TLM717", "leave it out", severity="warning")
def speculation_build(case: Case) -> Iterator[str | None]:
    """`max_num_tokens` below the tokens that a full batch drafts in a pass, or EAGLE with `use_paged_context_fmha:
    disable`. Source: `build` in builder.py, which raises the former and turns on the latter.
    """
    draft = case.drafting
    if draft is None:
        return
    least, setting = least_tokens(case.cell), _whole(case.cell.settings["build"]["max_num_tokens"])
    if setting is not None and setting < least:
        yield f"settings.build.max_num_tokens {setting}: {draft.method} needs {least} per pass here"
    if draft.method == "eagle" and case.switch("use_paged_context_fmha") is False:
        yield "settings.build.use_paged_context_fmha disable: trtllm-build turns it on for eagle"


@rule("TLM721", "omit it: the default is the model's data type")
def lora_plugin(case: Case) -> Iterator[str | None]:
    """`lora_plugin` with another data type than the model's, or off, with an adapter. Source: layers of FP8 assert it;
    with others, the adapter silently has no effect (issue 791 of tensorrtllm_backend).
    """
    given, dtype = case.option("lora_plugin"), commands.data_type(case.precision, case.family)
    if companions.adapters(case.cell) and given not in (None, "auto", dtype):
        yield f"settings.build.lora_plugin {given}: with settings.lora.adapter it must be {dtype}, like the model"


@rule("TLM722", "use fp16, bf16, fp8, int8_wo, int4_wo or int4_awq")
def lora_on_smoothquant(case: Case) -> Iterator[str | None]:
    """An adapter on layers of SmoothQuant. Source: `SmoothQuantGatedMLP` of quantization/layer.py, which asserts that
    there is none.
    """
    if companions.adapters(case.cell) and case.precision == "int8_sq":
        yield f"settings.lora.adapter: layers of {case.shown} do not support LoRA adapters"


@rule("TLM723", "omit it, or install a newer release", before="0.13")
def lora_with_reuse(case: Case) -> Iterator[str | None]:
    """`enable_kv_cache_reuse` with an adapter before 0.13: blocks of another adapter would be reused. Source: release
    notes of 0.13.
    """
    if companions.adapters(case.cell) and case.repository("enable_kv_cache_reuse") is True:
        yield (
            f"settings.repository.enable_kv_cache_reuse: supported with LoRA adapters from 0.13 on, this is {case.release}"
        )


@rule("TLM724", "omit it: bfloat16 works with the backend tensorrtllm")
def lora_in_python(case: Case) -> Iterator[str | None]:
    """An adapter with `triton_backend: python`, whose code converts it to float16. Source: issue 671 of
    tensorrtllm_backend; that of releases before 0.16 was not read.
    """
    if not companions.adapters(case.cell) or case.repository("triton_backend") != "python":
        return
    dtype = commands.data_type(case.precision, case.family)
    if dtype != "float16" or not at_least(case.release, "0.16"):
        yield f"settings.repository.triton_backend python: in TensorRT-LLM {case.release}, it does not support adapters in {dtype}"


@rule("TLM725", "omit it: adapters are in Hugging Face's format, and are sent with requests")
def lora_files(case: Case) -> Iterator[str | None]:
    """`lora_dir`, or a `lora_ckpt_source` other than hf, together with an adapter. Source: `LoraConfig` of
    lora_manager.py: the engine would contain other adapters than the fetched one.
    """
    if not companions.adapters(case.cell):
        return
    for name, allowed in (("lora_dir", None), ("lora_ckpt_source", "hf")):
        if case.option(name) not in (None, allowed):
            yield f"settings.build.{name} specifies where adapters are, and so does settings.lora.adapter"


@rule("TLM726", "use a name from settings.lora.adapter, or none", toolchains=_BOTH)
def lora_names(case: Case) -> Iterator[str | None]:
    """`lora` of smoke, perf or accuracy that is not an adapter of the cell; accuracy with several adapters, if neither
    it nor perf selects one. Source: the matrix.
    """
    names = [name for name, _ in companions.adapters(case.cell).values()]
    for section in ("smoke", "perf", "accuracy"):
        setting = case.cell.settings[section]["lora"]
        if setting not in (None, NO_ADAPTER, *names):
            yield f"settings.{section}.lora {setting}: unknown adapter; known: {', '.join(names) or 'none'}"
    accuracy, perf = (case.cell.settings[section] for section in ("accuracy", "perf"))
    if len(names) > 1 and accuracy["lora"] is perf["lora"] is None and accuracy["answers"] == "own":
        yield f"settings.accuracy.lora must select one of the adapters {', '.join(names)}"


@rule("TLM731", "settings.serve.frontend: trtllm_serve supports both", toolchains=_BOTH)
def exact_lengths(case: Case) -> Iterator[str | None]:
    """`settings.perf.ignore_eos: true`, if requests cannot set an exact output length. Source: inputs of the Triton model
    `llmapi`, which have neither `min_tokens` nor `ignore_eos`; the OpenAI front end of Triton's images ignores both.
    """
    if not case.cell.settings["perf"]["ignore_eos"] or not ends_early(case.cell):
        return
    frontend = case.cell.settings["serve"]["frontend"]
    server = frontend if frontend == FRONTEND_TRITON_OPENAI else "Triton's LLM API model"
    yield f"settings.perf.ignore_eos: {server} cannot generate outputs of an exact length"


@rule("TLM732", "settings.serve.frontend: trtllm_serve is one server for both", toolchains=_BOTH)
def disaggregated(case: Case) -> Iterator[str | None]:
    """Disaggregated servers of an engine, of a release with other names for their settings, on too few GPUs, or with
    features that the router is not known to pass on. Source: examples/disaggregated and `CacheTransceiverConfig`, which
    had other names before 1.1.
    """
    servers, gpus = backends.disaggregated(case.cell), len(case.machine.gpus)
    if servers is None:
        return
    frontend = f"settings.serve.frontend {FRONTEND_DISAGGREGATED}"
    if case.cell.toolchain == ENGINES:
        yield f"{frontend}: it serves Hugging Face weights, on the toolchain {PYTORCH}"
    if not at_least(case.release, FIRST_DISAGGREGATED):
        yield f"{frontend}: known for TensorRT-LLM {FIRST_DISAGGREGATED} and later, this is {case.release}"
    if (needed := backends.served_gpus(case.cell)) > gpus:
        fewest = servers["context_servers"] + servers["generation_servers"]
        smaller = "; a smaller tp or pp needs fewer" if fewest <= gpus else ""
        yield f"{frontend}: {fewest} servers need {needed} GPUs, this machine has {gpus}{smaller}"
    yield f"settings.lora.adapter: not known to work with {frontend}" if companions.adapters(case.cell) else None


def _without_pages(case: Case, setting: str) -> str | None:
    """Words for a setting that is true and needs use_paged_context_fmha, which the engine will not have."""
    if case.repository(setting) is not True or case.paged_context_fmha:
        return None
    why = f"for {case.precision} with {case.kv or 'no quantized'} cache here"
    if commands.unpaged(case.build):
        why = "without a paged KV cache (settings.build)"
    for name, off in (("use_paged_context_fmha", False), ("context_fmha", False), ("streamingllm", True)):
        if case.switch(name) is off:
            why = f"by settings.build.{name}"
            break
    return f"settings.repository.{setting}: it needs use_paged_context_fmha, which is off {why}"


def _above(case: Case, name: str, built: int | None) -> str | None:
    """Message for a server's limit above that of the engine."""
    if case.in_triton:
        setting, value = f"settings.repository.{name}", case.repository(name)
    else:
        given: Json = case.cell.settings["serve"]["options"]
        given = given if isinstance(given, dict) else {}
        setting, value = f"settings.serve.options.{name}", given.get(name, given.get(f"--{name}"))
    result = _whole(value)
    if result is None or built is None or result <= built:
        return None
    return f"{setting} {result} is above the engine's, {built}"


def _whole(value: Json) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _of_toolchain(case: Case, key: str) -> Json:
    known = case.cell.recipe.get(key)
    return known.get(case.cell.toolchain) if isinstance(known, dict) else None


@lru_cache(maxsize=256)
def _within(release: str, limits: str) -> bool:
    return parse(release) in SpecifierSet(limits, prereleases=True)
