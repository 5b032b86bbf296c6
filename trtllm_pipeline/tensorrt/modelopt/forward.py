"""Runs calibration rows through a model, so that its quantizers see only the rows.

Rows of a batch are padded on the right: causal attention keeps the text from seeing the padding. The layers' outputs for the
padding are zeroed before any quantizer sees them: zeros change no maximum and no product. So a batch gives the same
statistics as its rows one by one. An attention mask would not do that: it hides padding from other tokens, but quantizers
would still measure the padded positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.tensorrt.modelopt import calibration_memory
from trtllm_pipeline.tensorrt.modelopt.calibration_batches import batches
from trtllm_pipeline.tensorrt.stage.calibration_rows import Tokens

if TYPE_CHECKING:
    import torch


class SmallerBatchError(Exception):
    """Memory ran out within a search: start again with batches of `size` rows, on a model without partial sums."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass(slots=True)
class CalibrationLoop:
    """The forward loop for Model Optimizer. Called once for each pass."""

    rows: Sequence[Tokens]
    batch_size: int
    """Rows of a forward pass. Halved if memory runs out."""
    passes: int
    restart: bool
    """If memory runs out, raise SmallerBatchError instead of continuing the pass."""
    progress: Callable[[int, int], None]
    """Receives the finished rows and the rows of all passes."""
    done: int = 0

    def __call__(self, model: Any) -> None:
        """Run all rows through `model` once. Raises StageError (out of memory) if not even one row fits."""
        import torch

        from trtllm_pipeline.tensorrt.modelopt.awq_search import by_products

        padded = not _has_experts(model)
        # The head is not quantized, and its logits are the largest tensors.
        decoder = model.base_model
        with (
            torch.no_grad(),
            _fused_norms(decoder),
            _short_rotation(decoder),
            by_products(decoder),
            _blanked_padding(decoder) as blank,
        ):
            waiting = list(batches(self.rows, self.batch_size, padded=padded))
            while waiting:
                batch = waiting[0]
                if self._fits(decoder, batch, blank):
                    waiting.pop(0)
                    self.done += len(batch)
                    self.progress(self.done, self.passes * len(self.rows))
                else:
                    self._halve(len(batch), len(batch[0]))
                    left = [row for group in waiting for row in group]
                    waiting = list(batches(left, self.batch_size, padded=padded))

    def _fits(self, decoder: Any, batch: Sequence[Tokens], blank: Callable[[torch.Tensor | None], None]) -> bool:
        """Run one batch. A separate function, so that a failed batch's tensors are freed before memory is released."""
        try:
            _forward(decoder, batch, blank)
            return True
        except RuntimeError as error:
            if not calibration_memory.is_out_of_memory(error):
                raise
        return False

    def _halve(self, rows: int, length: int) -> None:
        calibration_memory.release()
        if rows == 1:
            raise StageError(
                f"calibration ran out of memory on a single row of {length} tokens",
                failure=FailureClass.OUT_OF_MEMORY,
                hint="use more or larger GPUs, or a lower calibration.max_length",
            )
        self.batch_size = rows // 2
        print(  # noqa: T201 - the stage's log
            f"memory ran out at {rows} rows of {length} tokens; continuing {self.batch_size}", flush=True
        )
        if self.restart:
            raise SmallerBatchError(self.batch_size)


def run_unmeasured(decoder: Any, batch: Sequence[Tokens]) -> None:
    """Run one batch, the longest row first, through a model without quantizers."""
    import torch

    with torch.no_grad(), _fused_norms(decoder), _short_rotation(decoder):
        _forward(decoder, batch, lambda _padding: None)


def _forward(decoder: Any, batch: Sequence[Tokens], blank: Callable[[torch.Tensor | None], None]) -> None:
    import torch

    longest = len(batch[0])
    tokens = torch.zeros((len(batch), longest), dtype=torch.long)
    for row, sample in enumerate(batch):
        tokens[row, : len(sample)] = torch.as_tensor(sample)
    device = decoder.get_input_embeddings().weight.device
    lengths = torch.tensor([len(sample) for sample in batch])
    padding = None
    if int(lengths.min()) < longest:
        padding = (torch.arange(longest)[None] >= lengths[:, None]).to(device)
    blank(padding)
    decoder(input_ids=tokens.to(device), use_cache=False)


@contextmanager
def _blanked_padding(decoder: Any) -> Iterator[Callable[[torch.Tensor | None], None]]:
    """A function to set the padding positions, (rows, tokens). Quantized layers then see zeros there."""
    from modelopt.torch.quantization.utils import is_quantized_linear

    padding: torch.Tensor | None = None

    def say(positions: torch.Tensor | None) -> None:
        nonlocal padding
        padding = positions

    def hook(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if padding is None:
            return None
        values, *rest = args
        # A cache quantizer sees (rows, heads, tokens, channels), a linear layer (rows, tokens, channels).
        where = padding[:, None, :, None] if values.dim() == 4 else padding[:, :, None]
        return (values.masked_fill(where.to(values.device), 0), *rest)

    hooked = [
        module.register_forward_pre_hook(hook)
        for name, module in decoder.named_modules()
        if is_quantized_linear(module) or name.endswith(("k_bmm_quantizer", "v_bmm_quantizer"))
    ]
    try:
        yield say
    finally:
        for handle in hooked:
            handle.remove()


@contextmanager
def _fused_norms(decoder: Any) -> Iterator[None]:
    """Norms in one kernel instead of transformers' six: saves a twelfth of calibration on an H200.

    They round once and transformers' round twice, a difference within the last bit of bfloat16.
    """
    from torch.nn.functional import rms_norm

    def fused(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda values: rms_norm(values, norm.weight.shape, norm.weight, norm.variance_epsilon)

    # Families whose weight starts from 1 have another name for epsilon.
    norms = [
        module
        for module in decoder.modules()
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    ]
    for norm in norms:
        norm.forward = fused(norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


@contextmanager
def _short_rotation(decoder: Any) -> Iterator[None]:
    """Rotary embeddings with two thirds of the memory traffic: saves a thirtieth of calibration on an H200.

    They round twice and transformers' round three times. Families that rotate differently from Llama keep theirs.
    """
    from transformers.models.llama import modeling_llama

    def code(file: ModuleType) -> list[bytes]:
        functions = [getattr(file, name, None) for name in ("rotate_half", _ROTATION)]
        return [function.__code__.co_code for function in functions if function is not None]

    files = {sys.modules[kind.__module__] for module in decoder.modules() for kind in type(module).__mro__}
    kept = {file: getattr(file, _ROTATION) for file in files if code(file) == code(modeling_llama)}
    for file in kept:
        setattr(file, _ROTATION, _rotated)
    try:
        yield
    finally:
        for file, theirs in kept.items():
            setattr(file, _ROTATION, theirs)


_ROTATION: Final = "apply_rotary_pos_emb"


def _rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both rotated. `cos` and `sin` are (rows, tokens, channels), their two halves of channels alike."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim).chunk(2, -1)[0]

    def rotated(values: torch.Tensor) -> torch.Tensor:
        product = values * cos
        for part, other, sign in zip(product.chunk(2, -1), reversed(values.chunk(2, -1)), (-1, 1), strict=True):
            part.addcmul_(other, sin, value=sign)
        return product

    return rotated(q), rotated(k)


def _has_experts(model: Any) -> bool:
    # An expert gets a separate list of its tokens, without their positions: such batches have no padding.
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
