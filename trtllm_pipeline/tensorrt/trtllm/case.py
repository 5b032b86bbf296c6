"""A cell on a machine with TensorRT-LLM, with derived values: the input of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trtllm_pipeline.base import USUAL_KV_SHARE, Cell, Json, Machine, TensorRTLLM
from trtllm_pipeline.models import shown
from trtllm_pipeline.tensorrt.toolchains import vision
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES, PYTORCH
from trtllm_pipeline.tensorrt.toolchains.model_shape import FP8_CACHES, Shape, computed
from trtllm_pipeline.tensorrt.trtllm import commands, prequantized, program_options, speculation
from trtllm_pipeline.tensorrt.trtllm.params import IN_TRITON
from trtllm_pipeline.tensorrt.trtllm.speculation import CONVERTED, Drafting, drafting

_OWN_BUILD_SETTINGS: Final = frozenset({"max_num_tokens", "timeout_s", "retries"})
"""Our own keys in settings.build. All others are options of trtllm-build."""


@dataclass(frozen=True, slots=True)
class Case:
    """The input of a rule. Programs are not run and files are not read."""

    cell: Cell
    machine: Machine
    installed: TensorRTLLM
    sm: int | None
    """Compute capability of the weakest GPU as one number. None without a GPU."""
    shape: Shape
    family: str
    kv: str | None
    """Quantization of the KV cache. None if it is not quantized."""
    build: Mapping[str, Json]
    """Options of trtllm-build in the matrix."""
    installed_help: str | None
    """Output of the installed `trtllm-build --help`, if it is installed."""

    @staticmethod
    def of(cell: Cell, machine: Machine, installed: TensorRTLLM, installed_help: str | None) -> Case:
        return Case(
            cell=cell,
            machine=machine,
            installed=installed,
            sm=machine.sm,
            shape=Shape.of(cell.recipe),
            family=str(cell.recipe["family"]),
            kv=kv_cache(cell),
            build=build_options(cell),
            installed_help=installed_help,
        )

    @property
    def release(self) -> str:
        return self.installed.release

    @property
    def precision(self) -> str:
        """Precision of the cell's weights in memory. For weights used as they are, according to their files."""
        return computed(self.cell)

    @property
    def drafting(self) -> Drafting | None:
        """How its engine drafts tokens. None if it does not."""
        return drafting(self.cell)

    @property
    def heads(self) -> str | None:
        """The heads that become part of its checkpoint."""
        draft = self.drafting
        return draft.method if draft is not None and draft.method in CONVERTED else None

    @property
    def shown(self) -> str:
        return shown(self.cell.precision, prequantized.form_of(self.cell))

    @property
    def route(self) -> str:
        """The stage that creates the checkpoint: convert or quantize."""
        return commands.route(self.release, self.family, self.cell.precision, self.kv)

    @property
    def attention(self) -> commands.ContextAttention:
        return commands.context_attention(
            self.release, precision=self.precision, kv=self.kv, sm=self.sm, extra=self.build
        )

    @property
    def paged_context_fmha(self) -> bool:
        """True if the engine will have it: the builder turns it off if its own conditions are not met."""
        return self.attention.paged and commands.builder_keeps_paged(
            precision=self.precision, kv=self.kv, extra=self.build
        )

    @property
    def in_triton(self) -> bool:
        """True if Triton serves it, False if trtllm-serve does."""
        return self.cell.settings["serve"]["frontend"] in IN_TRITON

    def switch(self, name: str) -> bool | None:
        """A matrix's value for a switch of trtllm-build. None if it has none."""
        return program_options.switched(self.build, name)

    def option(self, name: str, default: Json = None) -> Json:
        """A matrix's value for an option of trtllm-build."""
        return self.build.get(name, self.build.get(f"--{name}", default))

    def repository(self, name: str) -> Any:
        """A setting of the Triton repository. None for the release's default."""
        return self.cell.settings["repository"].get(name)


def kv_cache(cell: Cell) -> str | None:
    """Quantization of a cell's KV cache. None if it is not quantized.

    For weights used as they are, files of Model Optimizer usually make the PyTorch runtime use an FP8 cache. Engines
    built from them use the model's own type.
    """
    precision = cell.precision
    if cell.toolchain == PYTORCH and prequantized.form_of(cell) in FP8_CACHES:
        precision = "fp8"
    return commands.kv_precision(precision, cell.settings["quantize"]["kv_cache_precision"])


def served_cache(cell: Cell) -> str | None:
    """Quantization of the KV cache in a cell's server. The LLM API's argument for it overrides the checkpoint."""
    match cell.settings["repository"]["llm_args"]:
        case {"kv_cache_config": {"dtype": str(given)}} if cell.toolchain == PYTORCH and given != "auto":
            return given
    return kv_cache(cell)


def kv_share(cell: Cell) -> float:
    """The share of the remaining memory for the KV cache of each engine of a cell: as in its settings, or less than
    usual if something else needs the same memory.
    """
    setting = cell.settings["repository"].get("kv_cache_free_gpu_mem_fraction")
    if isinstance(setting, (int, float)):
        return setting
    draft = drafting(cell)
    if draft is not None and draft.method == "draft":
        return speculation.SHARE
    return vision.SHARE if vision.sees(cell) else USUAL_KV_SHARE


def kept_weights(cell: Cell) -> float:
    """Share of its weights that an engine keeps on the GPU, in Triton and run.py: all, unless built to stream them."""
    setting = cell.settings["repository"].get("gpu_weights_percent")
    streams = cell.toolchain == ENGINES and program_options.switched(build_options(cell), "weight_streaming")
    return float(setting) if streams and isinstance(setting, (int, float)) else 1.0


def splits_prompts(cell: Cell) -> bool:
    """True if a prompt may take several forward passes."""
    return cell.settings["repository"]["enable_chunked_context"] is True


def num_tokens(cell: Cell) -> int:
    """Tokens of one forward pass over all requests."""
    setting = cell.settings["build"]["max_num_tokens"]
    if isinstance(setting, int):
        return setting
    tokens = commands.max_num_tokens(cell.group_batch_size, cell.isl, cell.osl, chunked=splits_prompts(cell))
    return max(tokens, least_tokens(cell))


def gathers_logits(cell: Cell) -> bool:
    """True if its engine returns the logits of every prompt token."""
    value = build_options(cell)
    return any(program_options.switched(value, f"gather_{which}_logits") for which in ("context", "all_token"))


def least_tokens(cell: Cell) -> int:
    """Minimum tokens of a forward pass for the cell's drafted tokens. 0 without drafting.

    With a draft model, a prompt includes the output so far.
    """
    draft = drafting(cell)
    if draft is None:
        return 0
    least = draft.least_tokens(cell.group_batch_size)
    return max(least, cell.isl + cell.osl) if draft.method == "draft" and not splits_prompts(cell) else least


def build_options(cell: Cell) -> dict[str, Json]:
    """The options of trtllm-build in a matrix."""
    return {name: value for name, value in cell.settings["build"].items() if name not in _OWN_BUILD_SETTINGS}
