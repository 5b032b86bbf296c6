"""LoRA adapters with known numbers, as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PEFT = "base_model.model.model.layers.{layer}.{block}.{module}.lora_{part}.weight"
Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
"""A [r, in], B [out, r]."""


def write_adapter(folder: Path, pairs: dict[tuple[int, str], Pair], *, names: str = PEFT, **configuration: Any) -> Path:
    """An adapter of layers (number, module) in float32, with `adapter_config.json`."""
    tensors = {
        names.format(layer=layer, block="self_attn" if module[0] in "qkvo" else "mlp", module=module, part=part): values
        for (layer, module), pair in pairs.items()
        for part, values in zip("AB", pair, strict=True)
    }
    known = {
        "peft_type": "LORA",
        "r": max(len(a) for a, _ in pairs.values()),
        "lora_alpha": 16,
        "target_modules": sorted({module for _, module in pairs}),
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**known, **configuration}), encoding="utf-8")
    write_tensors(folder / "adapter_model.safetensors", tensors)
    return folder


def write_tensors(path: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    """A safetensors file of float32."""
    header: dict[str, Any] = {}
    position = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [position, position + values.nbytes]}
        position += values.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(each.tobytes() for each in tensors.values()))


def random_pairs(
    modules: dict[str, tuple[int, int]], *, rank: int, layers: int = 2, seed: int = 0
) -> dict[tuple[int, str], Pair]:
    """Pairs for modules of (in, out) values, for every layer."""
    rng = np.random.default_rng(seed)
    return {
        (layer, module): (
            rng.standard_normal((rank, sizes[0]), np.float32),
            rng.standard_normal((sizes[1], rank), np.float32),
        )
        for layer in range(layers)
        for module, sizes in modules.items()
    }
