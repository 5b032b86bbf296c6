"""Releases of TensorRT-LLM: their order, and their changes other than options (those are in `options.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import UsageError

if TYPE_CHECKING:
    from packaging.version import Version

FIRST: Final = "0.8"
"""First release with `trtllm-build` and the current checkpoint format."""
FIRST_PYTORCH: Final = "1.0"
"""First release with PyTorch as the default backend. Before, it was a preview."""
FIRST_DISAGGREGATED: Final = "1.1"
"""First release whose settings of disaggregated serving are known: `cache_transceiver_config` of examples/disaggregated."""
FIRST_SERVE: Final = "0.15"
"""First release with `trtllm-serve`."""
FIRST_BENCH: Final = "0.20"
"""First release whose trtllm-bench is known to keep requests in flight and to write a report."""
FIRST_SCHEMA: Final = "1.4"
"""First line of releases known to ship a JSON schema of the LLM API's YAML files."""

_LINES: Final = (*(f"0.{minor}" for minor in range(8, 22)), "1.0", "1.1", "1.2", "1.3", "1.4")
"""Release lines up to the newest candidates of November 2026."""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture family in the example scripts."""

    script: str
    """Directory of its `convert_checkpoint.py`."""
    since: str
    """First release known to convert it from a Hugging Face directory."""
    tensor_parallel: str = FIRST
    """First release that splits its tensors over GPUs."""
    pipeline_parallel: str | None = FIRST
    """First release with pipeline stages for it. None if there is none."""
    expert_parallel: str | None = None
    """First release that distributes whole experts over GPUs. None if there are none."""
    transformers: str | None = ""
    """First version of transformers with the architecture, for a family whose repositories contain code: earlier
    versions need that code. "" if repositories contain none, None if no version has it.
    """
    former_script: str | None = None
    """That directory before 0.20, if it had another name."""


_LLAMA: Final = Family("llama", "0.8")
_QWEN: Final = Family("qwen", "0.9")

# By `model_type` of config.json. Releases are those of the support matrices and of the scripts themselves: phi's
# asserts one pipeline stage and took no sizes from 0.9 to 0.10, gemma's has only a world size, gpt's has had stages
# since 0.10; those of llama and qwen have had `--moe_ep_size` since 0.11; GLM-4's asserts one stage. InternLM2 and
# GLM-4: release notes of 0.11 and 0.12.
FAMILIES: Final = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": replace(_LLAMA, expert_parallel="0.11"),
    "qwen": replace(_QWEN, transformers=None),
    "qwen2": _QWEN,
    "qwen2_moe": Family("qwen", "0.11", expert_parallel="0.11"),
    "qwen2_vl": Family("qwen", "0.16"),
    "llava_onevision": Family("qwen", "0.16"),
    "qwen3": Family("qwen", "0.20"),
    "qwen3_moe": Family("qwen", "0.20", expert_parallel="0.20"),
    "phi": Family("phi", "0.8", tensor_parallel="0.11", pipeline_parallel=None),
    "phi3": Family("phi", "0.10.0", tensor_parallel="0.11", pipeline_parallel=None, transformers="4.41.0"),
    "gpt2": Family("gpt", "0.9", pipeline_parallel="0.10"),
    "gemma": Family("gemma", "0.13", pipeline_parallel=None),
    "gemma2": Family("gemma", "0.13", pipeline_parallel=None),
    "internlm2": Family("internlm2", "0.11", transformers=None),
    "chatglm": Family("glm-4-9b", "0.12", pipeline_parallel=None, transformers=None, former_script="chatglm"),
}


def brings_code(family: str) -> bool:
    """True if repositories of a family contain code that some versions of transformers need to load it."""
    known = FAMILIES.get(family)
    return known is not None and known.transformers != ""


@dataclass(frozen=True, slots=True)
class ReleaseRequirements:
    """Requirements of releases from `since` on and before `before`, as far as they were read."""

    since: str
    before: str
    transformers: str
    torch: str
    """In words. Empty if unknown."""
    cuda: str
    source: str


REQUIREMENTS: Final = (
    ReleaseRequirements(
        "0.10", "0.11.dev0", "4.38.2", "", "12.4", "requirements of 0.10; Triton's compatibility matrix"
    ),
    ReleaseRequirements(
        "1.2.1",
        "1.3.0.dev0",
        "4.57.3",
        "2.9.1",
        "13.1",
        "PKG-INFO of the source package of 1.2.1; Triton's compatibility matrix",
    ),
    ReleaseRequirements("1.3.0rc21", "1.3.0rc29", "5.5.4", "", "", "issue 16171"),
    ReleaseRequirements(
        "1.3.0rc29",
        "1.4.0rc2",
        "5.5.4",
        "2.14",
        "13.4.1",
        "PKG-INFO of the source packages of 1.3.0rc29 and 1.4.0rc1; README",
    ),
)


def requirements(release: str) -> ReleaseRequirements | None:
    """Requirements of a release. None if they were not read."""
    fits = (each for each in REQUIREMENTS if at_least(release, each.since) and parse(release) < parse(each.before))
    return next(fits, None)


def transformers_of(release: str) -> str | None:
    """The version of transformers that a release pins. None if unknown."""
    known = requirements(release)
    return None if known is None else known.transformers


WITHOUT_WHEEL: Final = ("1.3.0rc16", "1.3.0rc21")
"""First and last of the releases that are not on PyPI. As of 28 November 2026."""
NEWEST: Final = "1.4.0rc1"
"""The newest release on PyPI on that day. The newest final one is 1.2.1."""
IMAGE: Final = "nvcr.io/nvidia/tensorrt-llm/release"
"""TensorRT-LLM alone, tagged with the release; without Triton."""


def hard_to_get(release: str) -> str | None:
    """A warning for a release that pip cannot install, with its location. None for others, and for unknown ones."""
    version = parse(release)
    if parse(WITHOUT_WHEEL[0]) <= version <= parse(WITHOUT_WHEEL[1]):
        return f"TensorRT-LLM {release} is not on PyPI; {IMAGE}:{release} has it, or build it from source"
    if (version.major, version.minor) == (1, 3) and not version.is_prerelease:
        return f"TensorRT-LLM {release} was never published: 1.3 has only release candidates, up to 1.3.0rc29"
    return None


def unknown(release: str) -> str | None:
    """A warning for a release that does not exist as far as this project knows, with the release that plans follow."""
    version = parse(release)
    if f"{version.major}.{version.minor}" in _LINES:
        return None
    older = [line for line in _LINES if parse(line) < version]
    follows = f"planned like {older[-1]}" if older else f"plans need {FIRST} or newer"
    return f"TensorRT-LLM {release} is unknown (known: {_LINES[0]} to {_LINES[-1]}); {follows}"


@lru_cache(maxsize=256)
def parse(release: str) -> Version:
    """The release as a comparable version. Raises UsageError for an invalid version."""
    from packaging.version import InvalidVersion, Version  # not at the top: workers without it read FAMILIES

    try:
        return Version(release)
    except InvalidVersion as error:
        raise UsageError(
            f"{release!r} is not a TensorRT-LLM release", hint="write it as its package does: 0.16.0, 1.3.0rc3"
        ) from error


@lru_cache(maxsize=4096)
def at_least(release: str, since: str) -> bool:
    """True if `release` is `since` or newer. `0.17` includes every build of that line, even nightly ones; `0.17.0` is
    exact.
    """
    first = f"{since}.dev0" if since.count(".") == 1 else since
    return parse(release) >= parse(first)


HEADS: Final = ("medusa", "eagle")
"""Parts of a model with a separate `convert_checkpoint.py`."""


def convert_script(release: str, family: str, heads: str | None = None) -> str:
    """Path, in `examples`, of the `convert_checkpoint.py` of a family, or of heads that become part of a checkpoint."""
    if heads is not None:
        return f"{heads}/convert_checkpoint.py"
    known = FAMILIES[family]
    if at_least(release, "0.20"):
        return f"models/core/{known.script}/convert_checkpoint.py"
    return f"{known.former_script or known.script}/convert_checkpoint.py"


QUANTIZE_SCRIPT: Final = "quantization/quantize.py"
"""Path inside the directory `examples`, in every release."""


def visual_script(release: str) -> str:
    """Path, inside the directory `examples`, of the script that builds visual engines: renamed with 0.19, when images
    became one of several kinds of input.
    """
    nested = "models/core/" * at_least(release, "0.20")
    return f"{nested}multimodal/build_{'multimodal' if at_least(release, '0.19') else 'visual'}_engine.py"


RUN_SCRIPT: Final = "run.py"
"""Path inside the directory `examples`, in every release."""


def convert_tool(family: str, heads: str | None = None) -> str:
    """Name of the convert script of a family, or of heads, in the table of options."""
    return f"convert_checkpoint.py:{heads or FAMILIES[family].script}"
