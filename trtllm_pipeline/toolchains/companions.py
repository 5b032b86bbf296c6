"""Models that a cell has beside its own: the draft model of speculative decoding, and a LoRA adapter.

Each is fetched by a stage of its own, called like it, and pinned as the cell's model is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trtllm_pipeline.domain import Cell, Json, Resources
from trtllm_pipeline.stages.base import Stage
from trtllm_pipeline.stages.params import WITH_DRAFT_MODEL, DownloadParams, load

DRAFT: Final = "draft"
NAMES: Final = (DRAFT,)


def speculation(cell: Cell) -> Mapping[str, Json] | None:
    """The settings of speculative decoding, None where a cell has none."""
    found = cell.settings.get("speculative")
    return None if found is None or found["method"] == "none" else found


def asked_for(cell: Cell) -> dict[str, str]:
    """Companion -> the model that a cell's settings name for it."""
    settings = speculation(cell)
    if settings is None or settings["method"] not in WITH_DRAFT_MODEL or settings["model"] is None:
        return {}
    return {DRAFT: str(settings["model"])}


CONFIGURATION: Final = (
    *("architectures", "hidden_size", "target_hidden_size", "draft_vocab_size"),
    "num_nextn_predict_layers",
)
"""What is looked at of config.json, of a companion and of the cell's own model."""


def configurations_needed(cell: Cell) -> tuple[str, ...]:
    """Whose config.json tells whether a cell's companions fit: a companion's, or its own "model"."""
    settings = speculation(cell)
    method = None if settings is None else settings["method"]
    return {"eagle3": (DRAFT,), "mtp": ("model",)}.get(str(method), ())


def unfit(cell: Cell, of: Mapping[str, Mapping[str, Any] | None]) -> str | None:
    """Why speculative decoding cannot work with the models that are meant, or None; `of` has their config.json, as known.

    Source: the drafters of the PyTorch backend. An EAGLE-3 head reads hidden states of the model that it was trained for,
    and draws from a vocabulary of its own; layers for more tokens are part of the model's weights.
    """
    drafter, model = of.get(DRAFT), of.get("model")
    if drafter is not None:
        name = asked_for(cell)[DRAFT]
        architectures = drafter.get("architectures") or ()
        if "draft_vocab_size" not in drafter and not any("eagle3" in str(each).lower() for each in architectures):
            return (
                f"settings.speculative.model {name} is no EAGLE-3 head: its config.json has no draft_vocab_size, and no "
                "architecture of that name"
            )
        size = drafter.get("target_hidden_size") or drafter.get("hidden_size")
        if isinstance(size, int) and size != cell.recipe["hidden_size"]:
            return (
                f"settings.speculative.model {name} is for models with a hidden size of {size}; {cell.model} has "
                f"{cell.recipe['hidden_size']}"
            )
    if model is not None and not model.get("num_nextn_predict_layers"):
        return (
            f"settings.speculative.method mtp: {cell.model} has no layers of its own that draft; its config.json has no "
            "num_nextn_predict_layers"
        )
    return None


def _params(name: str, cell: Cell) -> DownloadParams:
    found = cell.companions[name]
    content: Any = found.get("files")
    given = {"source": found["source"], "content": content, "folder": found.get("folder"), "form": name}
    return load(DownloadParams, given, cell.settings["download"])


def _fetching(name: str, summary: str) -> Stage:
    return Stage(
        name=name,
        version=1,
        summary=summary,
        program="trtllm_pipeline.stages.download:run",
        shared=True,
        applies=lambda cell, _machine: name in cell.companions,
        params=DownloadParams,
        read=lambda cell: _params(name, cell),
        resources=lambda _cell, _machine: Resources(cpus=0, downloads=1),
        section="download",
        expected_s=20.0,
        timeout_s=24 * 3600.0,
        retries=4,
    )


FETCH_DRAFT: Final = _fetching(DRAFT, "fetch the draft model of speculative decoding and verify it")
