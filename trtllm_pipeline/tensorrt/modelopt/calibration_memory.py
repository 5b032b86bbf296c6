"""The number of rows that fit into memory at once, the memory used, and the detection of out-of-memory errors."""

from __future__ import annotations

import gc
import resource
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

SATURATING_TOKENS: Final = 16_384
"""Tokens of one forward pass above which more tokens do not make it faster, measured on an H200 (docs/project/quantizing.md)."""
CPU_TOKENS: Final = 2048
_FRAGMENTS: Final = 1.3
"""Ratio of the memory that torch reserves for activations to the allocated memory, measured on an H200."""
_PACKAGES_BYTES: Final = 1_700_000_000
"""Host memory of a process with torch, CUDA, transformers and Model Optimizer, measured on an H200."""
_USABLE: Final = 0.8
"""Usable part of the free GPU memory. The rest is for fragments and the libraries' workspaces."""


def bytes_per_token(wide: int, narrow: int, element_bytes: int, *, searches: bool) -> int:
    """Memory that one token of a forward pass needs at its peak, in bytes, from the width of the widest projection and the hidden
    size.

    An MLP has four live tensors of the widest projection's width (gate, up, its activation, their product), and the residual
    stream about eight, some of them float32. AWQ's search also holds two outputs and their difference in float32 if it
    computes losses from outputs.
    """
    estimate = element_bytes * (4 * wide + 8 * narrow)
    return estimate + _searched(element_bytes) * wide if searches else estimate


def _searched(element_bytes: int) -> int:
    return 2 * element_bytes + 8


def expected_bytes(
    weights: int,
    *,
    wide: int,
    narrow: int,
    table: int,
    experts: int = 0,
    rehearsed: bool = False,
    searches: bool,
    rows: int,
    longest: int,
    requested_rows: int | None,
    free: int,
) -> tuple[int, int]:
    """GPU memory for quantization, in bytes without the CUDA context: as planned, and at least, with one row at a time.

    `weights` is the part of the 16-bit weights there and `free` its memory. `rows` of at most `longest` tokens are measured,
    `requested_rows` of them at a time, or as many as `fitting_rows` finds. `table` is the size of the embedding. For activations torch
    keeps a third more than is in use. Exporting needs two of the largest tensor. `experts` are those of one layer of a
    mixture, which are combined and quantized as a whole. If it is `rehearsed` (`kernel_warmup`), there is one more layer of
    random weights.
    """
    token = bytes_per_token(wide, narrow, 2, searches=searches)
    # With more tokens (`awq_search`), the outputs after the widest projection count, not the projection's own.
    token_of_many = bytes_per_token(wide, narrow, 2, searches=False) + searches * _searched(2) * narrow
    fitting = min(SATURATING_TOKENS, max(0, int(_USABLE * (free - weights))) // token) // longest
    at_once = min(rows, requested_rows or max(1, fitting))
    planned, least = (
        weights
        + max(
            2 * table,
            (2 + rehearsed) * experts,
            int(_FRAGMENTS * each * longest * (token if each * longest < 2 * narrow else token_of_many)),
        )
        for each in (at_once, min(rows, 1))
    )
    # Without a requested number, the number that fits.
    return planned if requested_rows else max(least, min(planned, free)), least


def expected_host_bytes(weights: int, leaves: int) -> int:
    """Host memory for quantization, in bytes: Python's packages and either the files of the weights, mapped while they are read,
    or the result before it is written.
    """
    return _PACKAGES_BYTES + max(weights, leaves)


def token_bytes(model: torch.nn.Module, *, searches: bool) -> int:
    """Memory that one token of a forward pass of `model` needs at its peak, in bytes, see `bytes_per_token`."""
    import torch

    # Heads are not run, so their width does not count.
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name]
    wide = max((m.out_features for m in linear), default=1)
    narrow = max((m.in_features for m in linear if m.in_features != wide), default=wide)
    size = 2 if not linear else linear[0].weight.element_size()
    return bytes_per_token(wide, narrow, size, searches=searches)


def fitting_rows(model: torch.nn.Module, longest: int, *, searches: bool) -> int:
    """Rows of `longest` tokens in one forward pass, at least one."""
    import torch

    device = next(model.parameters()).device
    tokens = CPU_TOKENS
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved and not allocated is also free.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        tokens = min(SATURATING_TOKENS, int(_USABLE * free) // token_bytes(model, searches=searches))
    return max(1, tokens // longest)


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch could not allocate memory, on a GPU or on the host."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def release() -> None:
    """Free the memory of a failed or finished computation."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak() -> dict[str, int | None]:
    """Peak memory of this process so far, in bytes: on the fullest GPU (None without one) and on the host."""
    import torch

    gpus = [torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"gpu_bytes": max(gpus, default=None), "host_bytes": host}
