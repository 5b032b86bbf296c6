"""Layers in the form that Model Optimizer's checkpoints for engines need: experts as separate modules, and gate and up that
are one matrix in another order.

Transformers 5 stores all experts of a layer as two tensors, but Model Optimizer packs one linear layer after another. The
modules are views of the same memory. Of one matrix for gate and up (Phi-3), it swaps the halves and splits the result among
ranks, and each rank needs its part of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

_QWEN: Final = ("gate_proj", "down_proj", "up_proj")
_BLOCKS: Final = {
    "MixtralSparseMoeBlock": ("w1", "w2", "w3"),
    "Qwen2MoeSparseMoeBlock": _QWEN,
    "Qwen3MoeSparseMoeBlock": _QWEN,
}
"""Classes of transformers whose experts are separated, and Model Optimizer's names of an expert's gate, down and up
projection."""
_FUSED: Final = ("Phi3MLP",)
"""Classes of transformers whose gate and up are one matrix."""


def take_apart(model: Any) -> None:
    """Replace every such block of `model` with a block of separate experts."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (names := _BLOCKS.get(type(child).__name__)) is not None:
                setattr(module, name, SeparateSparseMoeBlock(child, names))


class Expert(nn.Module):  # type: ignore[misc]
    """A gated MLP. `names` are those of its gate, down and up projection."""

    def __init__(self, names: Sequence[str], gate_up: torch.Tensor, down: torch.Tensor, activation: Any) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in zip(names, (gate, down, up), strict=True):
            self.add_module(name, _linear(weight))
        self.names = names
        self.act_fn = activation

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Output for (tokens, hidden_size)."""
        gate, down, up = map(self.get_submodule, self.names)
        outputs: torch.Tensor = down(self.act_fn(gate(states)) * up(states))
        return outputs


class SeparateSparseMoeBlock(nn.Module):  # type: ignore[misc]
    """A mixture that computes the same as its block of transformers. Model Optimizer detects it by the suffix of its name."""

    def __init__(self, block: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.top_k = block.gate.top_k
        self.renormalized = getattr(block.gate, "norm_topk_prob", True)
        self.gate = _linear(block.gate.weight)
        self.experts = nn.ModuleList(
            Expert(names, gate_up, down, block.experts.act_fn)
            for gate_up, down in zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
        )
        if hasattr(block, "shared_expert"):
            self.shared_expert, self.shared_expert_gate = block.shared_expert, block.shared_expert_gate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's `top_k` experts and the shared one, (batch, tokens, hidden_size)."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        shares, chosen = self.gate(rows).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.renormalized:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        output = torch.zeros_like(rows)
        if hasattr(self, "shared_expert"):
            output = self.shared_expert_gate(rows).sigmoid() * self.shared_expert(rows)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            if token.numel():
                output.index_add_(0, token, (expert(rows[token]) * shares[token, place, None]).to(output.dtype))
        return output.reshape(hidden_states.shape)


def _linear(weight: torch.Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made


def reorder(model: Any, tp: int) -> None:
    """Reorder the rows of every matrix of gate and up of `model` for `tp` ranks. The model's results do not change."""
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
