"""A calibrator that computes the largest magnitude in one pass over a tensor, and never waits for the GPU.

Model Optimizer's own reads each tensor twice, checks each result three times on the GPU, and measures every weight again
in each forward pass: a tenth of calibration on an H200. The maxima are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from modelopt.torch.quantization.calib import MaxCalibrator

from trtllm_pipeline.base import FailureClass, StageError


class Maximum(MaxCalibrator):  # type: ignore[misc]
    """Largest magnitude so far, of the whole tensor or of each channel along `axis`."""

    _calib_amax: torch.Tensor | None

    def collect(self, x: torch.Tensor) -> None:
        if isinstance(x, torch.nn.Parameter) and self._calib_amax is not None:
            return
        axis = self._axis
        if axis is None:
            largest = torch.linalg.vector_norm(x, float("inf"))
        else:
            kept = {index % x.dim() for index in (axis if isinstance(axis, tuple) else (axis,))}
            others = tuple(index for index in range(x.dim()) if index not in kept)
            largest = torch.linalg.vector_norm(x, float("inf"), dim=others, keepdim=True)
        self._calib_amax = largest if self._calib_amax is None else torch.maximum(self._calib_amax, largest)

    def compute_amax(self) -> torch.Tensor | None:
        """The result. None before any tensor. Raises StageError (infeasible) if it is not a number."""
        if self._calib_amax is not None and not torch.isfinite(self._calib_amax).all():
            raise StageError(
                "the model's activations or weights overflow: calibration met infinity or NaN",
                failure=FailureClass.INFEASIBLE,
                hint="set the dtype to bfloat16",
            )
        return self._calib_amax


def use_in(configuration: dict[str, Any]) -> None:
    """Use this calibrator in a configuration's quantizers that compute a maximum over whole tensors or channels."""
    for entry in configuration["quant_cfg"]:
        attributes = entry.get("cfg")
        if not isinstance(attributes, dict) or attributes.get("block_sizes") or attributes.get("type") == "dynamic":
            continue
        attributes["calibrator"] = (Maximum, (attributes.get("num_bits", 8), attributes.get("axis")))
