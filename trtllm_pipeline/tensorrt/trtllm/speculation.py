"""Speculative decoding with engines: a method's effect on checkpoint, engine and repository. Pure.

Sources: examples/{draft_target_model,medusa,lookahead,eagle} of the releases, `build` in builder.py,
docs/model_config.md of tensorrtllm_backend, and the page on speculative decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from trtllm_pipeline.base import Cell, Json
from trtllm_pipeline.tensorrt.stage.params import DRAFT_LENGTHS
from trtllm_pipeline.tensorrt.toolchains import companions
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES
from trtllm_pipeline.tensorrt.trtllm.releases import HEADS

MODES: Final = {
    "draft": "draft_tokens_external",
    "medusa": "medusa",
    "lookahead": "lookahead_decoding",
    "eagle": "eagle",
}
"""Method of an engine -> `--speculative_decoding_mode` of trtllm-build."""
CONVERTED: Final = frozenset(HEADS)
"""Methods whose heads are part of the model's own checkpoint, by a separate converter."""
DECODING_MODES: Final = frozenset(("medusa", "lookahead", "eagle"))
"""Methods with a `decoding_mode` in the repository."""
UNCHECKED: Final = frozenset(("medusa",))
"""Methods whose engines run.py does not check: it needs Medusa's tree in another format."""
LOOKAHEAD: Final = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
"""The repository's settings of lookahead decoding, (W, N, G)."""
SHARE: Final = 0.5
"""Default share of free memory for the KV caches of two engines on one GPU, each: as in examples/draft_target_model."""
DEFAULTS: Final = {"num_medusa_heads": 4, "num_medusa_layers": 1, "num_eagle_layers": 4, "max_non_leaves_per_layer": 10}
"""Options of the converters."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a cell's engine drafts tokens."""

    method: str
    """One of MODES."""
    length: int
    """Tokens drafted at a time: max_draft_len of the engine."""
    settings: dict[str, Json]
    """Options of the converter with a value other than its default."""

    @property
    def added(self) -> int:
        """Number of tokens by which trtllm-build raises the engine's max_seq_len."""
        layers = self.settings["num_eagle_layers"] or DEFAULTS["num_eagle_layers"] if self.method == "eagle" else 0
        return self.length + int(str(layers))

    def least_tokens(self, max_batch_size: int) -> int:
        """Tokens of a pass over a full batch. trtllm-build raises a smaller max_num_tokens to it."""
        return max_batch_size * (self.length + 1)


def drafting(cell: Cell) -> Drafting | None:
    """How the cell's engine drafts tokens. None for other backends, without drafting, and for methods of no engine."""
    speculation = companions.speculation(cell)
    if cell.toolchain != ENGINES or speculation is None or speculation["method"] not in MODES:
        return None
    method, value = str(speculation["method"]), speculation["max_draft_len"]
    if method == "lookahead":
        length = lookahead_length(*(_size(cell, name) for name in LOOKAHEAD))
    else:
        length = value if isinstance(value, int) else DRAFT_LENGTHS[method]
    return Drafting(method, length, companions.beyond_default(speculation, DEFAULTS))


def lookahead_length(window: int, ngram: int, verification_set: int) -> int:
    """Tokens that lookahead decoding drafts at a time. Source: README of examples/lookahead."""
    if ngram < 1 or window < 1:
        return 0
    return (0 if ngram == 1 else ngram - 2) + (window - 1 + verification_set) * (ngram - 1)


def checkpoint_params(cell: Cell) -> dict[str, Any]:
    """Parameters that a method adds to a cell's checkpoint."""
    draft = drafting(cell)
    if draft is None or draft.method not in CONVERTED:
        return {}
    length = None if draft.length == DRAFT_LENGTHS[draft.method] else draft.length
    return {"heads": draft.method, "max_draft_len": length, **draft.settings}


def check_params(cell: Cell) -> dict[str, Any]:
    """Parameters that a method adds to the check of a cell's engine."""
    draft = drafting(cell)
    if draft is None:
        return {}
    sizes = tuple(_size(cell, name) for name in LOOKAHEAD) if draft.method == "lookahead" else ()
    return {"speculative": draft.method, "lookahead": sizes}


def drafter(cell: Cell) -> Cell | None:
    """The cell of the draft model that becomes a separate engine: like the cell, with the lengths of its requests.

    None without one, and if its numbers are unknown.
    """
    draft, companion = drafting(cell), cell.companions.get(companions.DRAFT, {})
    recipe = companion.get("recipe")
    if draft is None or draft.method != "draft" or not isinstance(recipe, dict):
        return None
    pinned = {name: value for name, value in companion.items() if name != "recipe"}
    plain: dict[str, Mapping[str, Json]] = {
        "speculative": {**cell.settings["speculative"], "method": "none"},
        "lora": {"adapter": None},
    }
    return replace(
        cell,
        model=str(cell.settings["speculative"]["model"]),
        recipe={**recipe, **pinned},
        settings={**cell.settings, **plain},
        isl=companions.longest_prompt(cell),
        osl=1,
        companions={},
    )


def _size(cell: Cell, name: str) -> int:
    value = cell.settings["repository"][name]
    return value if isinstance(value, int) else 0
