"""Weights that are quantized already (`precision: as_is`): which release reads which form, on which GPUs.

Sources. PyTorch runtime: `_update_from_hf_quant_config` in llm_utils.py and `model_config.py` of 1.0 to 1.3, which end
with NotImplementedError for any other form or, in later candidates of 1.3, look for weights that AutoAWQ and GPTQ do
not store; the hardware matrix of the page on quantization; the deployment guide of gpt-oss. That page's matrix of
models has GPTQ for Llama and Qwen, but pull request 19442, which reads it, was open when it was last read (19 September
2026). Engines: `update_quant_config_from_hf` of the scripts that convert Llama and Qwen; release notes 0.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from trtllm_pipeline.base import Cell, Json, assume
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.tensorrt.modelopt.formats import PRECISIONS
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES
from trtllm_pipeline.tensorrt.toolchains.model_shape import FORM_PRECISIONS
from trtllm_pipeline.tensorrt.trtllm.releases import FAMILIES, FIRST_PYTORCH, at_least, parse


@dataclass(frozen=True, slots=True)
class WeightsForm:
    """One form of quantized weights."""

    pytorch: str | None = None
    """First release whose PyTorch runtime reads it. None if no release does."""
    sms: tuple[tuple[int, int], ...] = ()
    """First and last compute capability that supports it, if narrower than the precision's."""
    converters: Mapping[str, str] = field(default_factory=dict)
    """Family's script -> first release that converts it."""
    options: Mapping[str, bool] = field(default_factory=dict)
    """Switches of the script. It reads the others from the model's config.json."""
    algorithm: str | None = None
    """TensorRT-LLM's `quant_algo` in a converted checkpoint."""


FORMS: Final[Mapping[str, WeightsForm]] = {
    "fp8": WeightsForm(FIRST_PYTORCH, (), {"llama": "0.13"}, {"--use_fp8": True}, "FP8"),
    "fp8_block": WeightsForm(FIRST_PYTORCH, ((90, 90), (100, 119))),
    "fbgemm_fp8": WeightsForm(None, ((89, 90),), {"llama": "0.15"}, {}, "FP8_PER_CHANNEL_PER_TOKEN"),
    "nvfp4": WeightsForm(FIRST_PYTORCH),
    "mxfp4": WeightsForm("1.1"),
    "int4_awq": WeightsForm(FIRST_PYTORCH),
    "w4a8_awq": WeightsForm(FIRST_PYTORCH),
    # Both are groups of 4 bits with a zero point: TensorRT-LLM computes AutoAWQ's as GPTQ's.
    "awq": WeightsForm(None, (), {"llama": "0.16", "qwen": "0.16"}, {}, "W4A16_GPTQ"),
    "gptq": WeightsForm(None, (), {"llama": "0.16", "qwen": "0.17"}, {}, "W4A16_GPTQ"),
    "mixed": WeightsForm(FIRST_PYTORCH),
    "mixed_nvfp4": WeightsForm(FIRST_PYTORCH),
}
_GPTQ_READER: Final = "pull request 19442, open in September 2026,"
_LLAMA: Final = ("llama", "mistral")
"""Families of the script for Llama whose quantized weights it is known to read."""


def form_of(cell: Cell) -> str | None:
    """The format of a cell's weights. None if they are not used as they are."""
    value = cell.recipe.get("quantization")
    return str(value) if cell.precision == AS_IS and value is not None else None


def unreadable(cell: Cell, release: str, sm: int | None) -> str | None:
    """Why a release cannot use the weights of a cell as they are, or None. Unknown forms are not checked."""
    name = form_of(cell)
    if name is None:
        return None
    form = FORMS.get(name)
    family = str(cell.recipe["family"])
    if cell.toolchain == ENGINES:
        reason = unconvertible(family, name, release)
    else:
        reason = _unloadable(name, form, release, cell.recipe)
    sms = () if form is None else form.sms
    if reason is not None or sm is None or not sms or any(low <= sm <= high for low, high in sms):
        return reason
    known = " and ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in sms)
    return f"precision {AS_IS} ({name}): works on SM {known}, this is SM {sm}"


def _unloadable(name: str, form: WeightsForm | None, release: str, recipe: Mapping[str, Json]) -> str | None:
    if form is None or form.pytorch is None:
        reads = (
            f"precision {AS_IS} ({name}): the PyTorch runtime reads FP8, NVFP4 and AWQ weights of Model Optimizer, FP8 weights "
            "with scales of 128 x 128 blocks, and MXFP4"
        )
        coming = [f"{_GPTQ_READER} would read GPTQ without desc_act"] if name == "gptq" else []
        return "; ".join([reads, *coming, *_instead(name, form, release, recipe)])
    if not at_least(release, form.pytorch):
        return f"precision {AS_IS} ({name}): the PyTorch runtime reads it from {form.pytorch} on, this is {release}"
    return None


def _instead(name: str, form: WeightsForm | None, release: str, recipe: Mapping[str, Json]) -> Iterator[str]:
    """A release's alternative for weights that its PyTorch runtime does not read."""
    if form is None:
        return
    engines = parse(release) <= parse(assume.LAST_WITH_ENGINES)
    if engines and unconvertible(str(recipe["family"]), name, release) is None:
        yield f"the toolchain {ENGINES} converts it"
    precision = FORM_PRECISIONS[name]
    if not (PRECISIONS[precision].searches and recipe.get("num_experts")):
        yield f"precision {precision} creates weights of that size from the unquantized model"


def unconvertible(family: str, name: str, release: str) -> str | None:
    """Why no script of a release converts weights of the form `name`, or None, for a family that it converts."""
    form, script = FORMS.get(name), FAMILIES[family].script if family in FAMILIES else None
    since = None if form is None or script is None else form.converters.get(script)
    if since is None or (script == "llama" and family not in _LLAMA) or (script == "qwen" and family == "qwen"):
        return f"precision {AS_IS} ({name}): no known script of TensorRT-LLM converts such weights of {family}"
    if not at_least(release, since):
        return f"precision {AS_IS} ({name}): TensorRT-LLM converts it for {family} from {since} on, this is {release}"
    return None
