"""Gate and up as one matrix (Phi-3), in the order that Model Optimizer's checkpoints for engines need.

Model Optimizer swaps the halves and splits the result among ranks, and each rank needs its part of both.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_FUSED: Final = ("Phi3MLP",)
"""Classes of transformers with such a matrix."""


def reorder(model: Any, tp: int) -> None:
    """Reorder the rows of every such matrix of `model` for `tp` ranks. The model's results do not change."""
    for module in model.modules():
        if type(module).__name__ in _FUSED:
            _reorder(module.gate_up_proj, tp)


def _reorder(linear: Any, tp: int) -> None:
    gate, up = torch.arange(len(linear.weight)).chunk(2)
    by_rank = torch.cat([torch.cat(parts) for parts in zip(up.chunk(tp), gate.chunk(tp), strict=True)])
    order = by_rank.roll(len(gate))
    linear.weight.data = linear.weight.data[order.to(linear.weight.device)]
    back = order.argsort().to(linear.weight.device)
    linear.register_forward_hook(lambda _module, _inputs, output: output[..., back])
