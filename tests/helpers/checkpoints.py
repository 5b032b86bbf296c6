"""Checkpoints of Model Optimizer: made by our worker, and turned back into floats by the arithmetic of each format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.contexts import context
from tests.helpers.needed import quantize_package
from trtllm_pipeline.domain import Json
from trtllm_pipeline.toolchains.model_optimizer import worker
from trtllm_pipeline.toolchains.tensorrt_llm.params import Checkpoint, HuggingFaceCheckpoint

torch = quantize_package("torch")
Tensors = Mapping[str, Any]
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats, by code. Source: OCP Microscaling Formats 1.0."""


def quantize(folder: Path, rows: Path, attempt: Path, **params: Json) -> Path:
    out = attempt / "out"
    out.mkdir(parents=True)
    worker.run(
        context(
            HuggingFaceCheckpoint if params.get("checkpoint_format") == "hugging_face" else Checkpoint,
            {"family": "llama", **params},
            {"model": folder},
            {"calibration_data": rows},
            out,
            attempt,
        )
    )
    return out


def unpacked(weight: Any) -> Any:
    """int4 values, two of them in each byte along the output, the low one first."""
    low, high = (weight.to(torch.int16) & 0xF), ((weight.to(torch.int16) >> 4) & 0xF)
    values = torch.stack([low, high], dim=1).reshape(-1, weight.shape[-1])
    return torch.where(values > 7, values - 16, values)


def dequantized(tensors: Tensors, name: str) -> Any:
    """The weight `name` as the format's arithmetic gives it back, float32."""
    weight = tensors[f"{name}.weight"]
    scale = tensors.get(f"{name}.weights_scaling_factor")
    if scale is None:
        return weight.float()
    if weight.dtype == torch.float8_e4m3fn:
        value = weight.float() * scale
    elif scale.dim() == 2:
        value = unpacked(weight).float() * scale.repeat_interleave(128, dim=1)
    else:
        value = weight.float() * scale[:, None]
    smoothing = tensors.get(f"{name}.prequant_scaling_factor")
    return value if smoothing is None else value * smoothing.float()


def dequantized_nvfp4(tensors: Tensors, name: str) -> Any:
    """The projection `name` of a Hugging Face checkpoint: blocks of 16, a scale each, and one for all."""
    weight = tensors[f"{name}.weight"].long()
    codes = torch.stack([weight & 0xF, weight >> 4], dim=-1).flatten(1)
    values = torch.tensor(E2M1)[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    scales = tensors[f"{name}.weight_scale"].float() * tensors[f"{name}.weight_scale_2"].float()
    return values * scales.repeat_interleave(16, dim=1)
