"""The code of tiny models whose families no transformers has; `families` puts this file into their folders.

The weights are there under the names of the family's own code, which is all that TensorRT-LLM's converters look at. It is
loaded by the transformers that they bring along, from 4.38 on.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel


class TinyConfig(PretrainedConfig):  # type: ignore[misc]
    """What config.json says."""

    def __init__(self, weights: dict[str, list[int]] | None = None, **rest: Any) -> None:
        self.weights = weights or {}
        super().__init__(**rest)


class TinyModel(PreTrainedModel):  # type: ignore[misc]
    """Weights of the names and shapes in `config.weights`."""

    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        for name, shape in config.weights.items():
            module: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(torch.empty(shape)))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """They are loaded."""
