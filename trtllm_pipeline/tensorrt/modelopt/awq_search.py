"""AWQ's search with the products of a batch's inputs, if that takes fewer operations than with outputs.

For each linear layer Model Optimizer tries eleven scales: it quantizes the weights with each, runs the whole batch through
them, and computes the mean square of the change. With D, the change of the weights, and X, the inputs, that is
trace(D (X'X) D') / (tokens x outputs). X'X is the same for all scales and for layers that read the same inputs, and a
scale then takes 2 x outputs x inputs^2 operations instead of 2 x outputs x inputs x tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

_LAYER: Final = "_forward_no_awq"
"""Attribute of Model Optimizer for the forward method of a layer during the search."""


@contextmanager
def by_products(model: Any) -> Iterator[None]:
    """Within the context, losses of layers in a search are computed this way. Other models are not changed."""
    products = _Products()
    searched = [module for module in model.modules() if hasattr(module, _LAYER)]
    for layer in searched:
        setattr(layer, _LAYER, _Layer(layer, getattr(layer, _LAYER), products))
    try:
        yield
    finally:
        for layer in searched:
            setattr(layer, _LAYER, getattr(layer, _LAYER).forward)


class _Products:
    """X'X of the last inputs, (channels, channels). Layers that read the same inputs, such as query, key and value, follow each
    other.
    """

    def __init__(self) -> None:
        self.inputs: torch.Tensor | None = None
        self.found: torch.Tensor | None = None

    def of(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.found is None or inputs is not self.inputs:
            self.inputs = self.found = None
            rows = inputs.reshape(-1, inputs.shape[-1]).to(_wide(inputs))
            self.inputs, self.found = inputs, rows.T @ rows
        return self.found


class _Layer:
    """The forward method of a linear layer, as Model Optimizer's search calls it."""

    def __init__(self, layer: Any, forward: Any, products: _Products) -> None:
        self.layer, self.forward, self.products = layer, forward, products

    def __call__(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The outputs. For a scale in the search, the loss if products are the faster way."""
        scale, tokens = self.layer.input_quantizer.pre_quant_scale, inputs.numel() // max(1, inputs.shape[-1])
        if scale is None or 2 * inputs.shape[-1] > tokens:
            return self.forward(inputs, *args, **kwargs)
        weight = self.layer.weight
        change = torch.addcmul(weight, self.layer.weight_quantizer(weight), scale, value=-1).to(_wide(weight))
        total = (change @ self.products.of(inputs)).mul_(change).sum(dtype=torch.float32)
        return _Loss(total / (tokens * weight.shape[0]))


class _Loss:
    """A known loss in place of outputs: the search computes `(outputs - actual).float().pow(2).mean()`."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __sub__(self, _actual: torch.Tensor) -> _Loss:
        return self

    def float(self) -> _Loss:
        return self

    def pow(self, _exponent: int) -> _Loss:
        return self

    def mean(self) -> torch.Tensor:
        return self.value


def _wide(like: torch.Tensor) -> torch.dtype:
    """A type whose range includes sums of squares. GPUs accumulate in float32 either way."""
    return torch.bfloat16 if like.is_cuda else torch.float32
