"""Experts as modules of their own, which Model Optimizer's checkpoints for engines need.

Transformers 5 has all experts of a layer as two tensors, Model Optimizer packs one linear layer after another. These are
views of the same memory.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

_BLOCKS: Final = ("MixtralSparseMoeBlock",)
"""Classes of transformers whose experts are taken apart."""


def take_apart(model: Any) -> None:
    """Put a block with an expert each in the place of every such block of `model`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in _BLOCKS:
                setattr(module, name, SeparateSparseMoeBlock(child))


class Expert(nn.Module):  # type: ignore[misc]
    """A gated MLP, with Mixtral's names: w1 is the gate, w3 goes beside it, w2 comes after."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Any) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.w1, self.w2, self.w3 = (_linear(weight) for weight in (gate, down, up))
        self.act_fn = activation

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """What it says of (tokens, hidden_size)."""
        found: torch.Tensor = self.w2(self.act_fn(self.w1(states)) * self.w3(states))
        return found


class SeparateSparseMoeBlock(nn.Module):  # type: ignore[misc]
    """A mixture, computed as the block of transformers that it is made of. Model Optimizer knows it by the end of its name."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.top_k = block.gate.top_k
        self.gate = _linear(block.gate.weight)
        self.experts = nn.ModuleList(
            Expert(gate_up, down, block.experts.act_fn)
            for gate_up, down in zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what the `top_k` experts of each token say; (batch, tokens, hidden_size)."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        shares, chosen = self.gate(rows).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        output = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if token.numel():
                output.index_add_(0, token, (expert(rows[token]) * shares[token, place, None]).to(output.dtype))
        return output.reshape(hidden_states.shape)


def _linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made
