"""A cell on a machine with TensorRT-LLM, with derived values: the input of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trtllm_pipeline.base import USUAL_KV_SHARE, Cell, Json, Machine, TensorRTLLM
from trtllm_pipeline.models import AS_IS, shown
from trtllm_pipeline.tensorrt.toolchains import vision
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES, PYTORCH
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape, computed
from trtllm_pipeline.tensorrt.trtllm import commands, prequantized, program_options, speculation
from trtllm_pipeline.tensorrt.trtllm.params import IN_TRITON
from trtllm_pipeline.tensorrt.trtllm.speculation import CONVERTED, Drafting, drafting

_OWN_BUILD_SETTINGS: Final = frozenset({"max_num_tokens", "timeout_s", "retries"})
"""Keys of settings.build that are ours; all others are options of trtllm-build."""


@dataclass(frozen=True, slots=True)
class Case:
    """The input of a rule. No program is run and no file is read."""

    cell: Cell
    machine: Machine
    installed: TensorRTLLM
    sm: int | None
    """Compute capability of the weakest GPU as one number, None without one."""
    shape: Shape
    family: str
    kv: str | None
    """How the KV cache is quantized, None for not at all."""
    build: Mapping[str, Json]
    """Options of trtllm-build that a matrix gives."""
    installed_help: str | None
    """Output of the installed `trtllm-build --help`, if it is installed."""

    @staticmethod
    def of(cell: Cell, machine: Machine, installed: TensorRTLLM, installed_help: str | None) -> Case:
        """The question for a cell on a machine that has `installed`."""
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
        """The TensorRT-LLM that is installed."""
        return self.installed.release

    @property
    def precision(self) -> str:
        """Precision of the cell's weights in memory. For weights used as they are, by their files."""
        return computed(self.cell.precision, self.cell.recipe)

    @property
    def drafting(self) -> Drafting | None:
        """How its engine drafts tokens, None for not at all."""
        return drafting(self.cell)

    @property
    def heads(self) -> str | None:
        """The heads that become part of its checkpoint."""
        draft = self.drafting
        return draft.method if draft is not None and draft.method in CONVERTED else None

    @property
    def shown(self) -> str:
        """The cell's precision for people."""
        return shown(self.cell.precision, prequantized.form_of(self.cell))

    @property
    def route(self) -> str:
        """The stage that makes the checkpoint: convert or quantize."""
        return commands.route(self.release, self.family, self.cell.precision, self.kv)

    @property
    def attention(self) -> commands.ContextAttention:
        """The request to trtllm-build."""
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
        """Whether Triton serves it, and not trtllm-serve."""
        return self.cell.settings["serve"]["frontend"] in IN_TRITON

    def switch(self, name: str) -> bool | None:
        """A matrix's value of a switch of trtllm-build. None if it has none."""
        return program_options.switched(self.build, name)

    def option(self, name: str, default: Json = None) -> Json:
        """The value that a matrix gives an option of trtllm-build."""
        return self.build.get(name, self.build.get(f"--{name}", default))

    def repository(self, name: str) -> Any:
        """A setting of the Triton repository. None for the release's default."""
        return self.cell.settings["repository"].get(name)


def kv_cache(cell: Cell) -> str | None:
    """How the KV cache of a cell is quantized, None for not at all.

    With weights used as they are, files of Model Optimizer mostly make the PyTorch runtime use an FP8 cache. Engines of
    them have the model's own.
    """
    precision = cell.precision
    if precision == AS_IS and cell.toolchain == PYTORCH:
        precision = computed(precision, cell.recipe)
    return commands.kv_precision(precision, cell.settings["quantize"]["kv_cache_precision"])


def kv_share(cell: Cell) -> float:
    """The share of the memory that is left, which the KV cache of each engine of a cell takes: what its settings say, or
    less than usual where something else comes into the same memory.
    """
    setting = cell.settings["repository"].get("kv_cache_free_gpu_mem_fraction")
    if isinstance(setting, (int, float)):
        return setting
    draft = drafting(cell)
    if draft is not None and draft.method == "draft":
        return speculation.SHARE
    return vision.SHARE if vision.sees(cell) else USUAL_KV_SHARE


def kept_weights(cell: Cell) -> float:
    """The share of its weights that an engine keeps on the GPU in Triton and in run.py: all, unless it is built to stream them."""
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
    """True if its engine returns logits of every token of a prompt."""
    value = build_options(cell)
    return any(program_options.switched(value, f"gather_{which}_logits") for which in ("context", "all_token"))


def least_tokens(cell: Cell) -> int:
    """Minimum tokens of a forward pass for the cell's drafted tokens. 0 without drafting.

    With a draft model, a prompt is all that was answered so far too.
    """
    draft = drafting(cell)
    if draft is None:
        return 0
    least = draft.least_tokens(cell.group_batch_size)
    return max(least, cell.isl + cell.osl) if draft.method == "draft" and not splits_prompts(cell) else least


def build_options(cell: Cell) -> dict[str, Json]:
    """The options of trtllm-build that a matrix gives."""
    return {name: value for name, value in cell.settings["build"].items() if name not in _OWN_BUILD_SETTINGS}
