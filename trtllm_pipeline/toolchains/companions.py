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
ADAPTER: Final = "adapter"
NAMES: Final = (DRAFT, ADAPTER)
SETTINGS: Final = {DRAFT: "settings.speculative.model", ADAPTER: "settings.lora.adapter"}
"""What names them."""
MODULES: Final = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
}
"""Layer of an adapter -> TensorRT-LLM's name of it. Source: `get_default_trtllm_modules_to_hf_modules` in lora_manager.py."""
_ALL_LINEAR: Final = "all-linear"


def speculation(cell: Cell) -> Mapping[str, Json] | None:
    """The settings of speculative decoding, None where a cell has none."""
    found = cell.settings.get("speculative")
    return None if found is None or found["method"] == "none" else found


def asked_for(cell: Cell) -> dict[str, str]:
    """Companion -> the model that a cell's settings name for it."""
    settings, lora = speculation(cell), adapter(cell)
    found = {} if lora is None else {ADAPTER: lora}
    if settings is not None and settings["method"] in WITH_DRAFT_MODEL and settings["model"] is not None:
        found[DRAFT] = str(settings["model"])
    return found


def adapter(cell: Cell) -> str | None:
    """The LoRA adapter that a cell's settings name, or None."""
    found = cell.settings.get("lora", {}).get("adapter")
    return None if found is None else str(found)


def modules_of(configuration: Mapping[str, Any]) -> list[str]:
    """TensorRT-LLM's names of the layers that an adapter_config.json targets. Raises ValueError for what it has no name for."""
    targets = configuration.get("target_modules")
    if targets == _ALL_LINEAR:
        return list(MODULES.values())
    if not isinstance(targets, list) or not targets:
        raise ValueError(f"its target_modules are {targets!r}; expected a list of layers")
    names = [str(each).rpartition(".")[2] for each in targets]
    if unknown := sorted({*names} - MODULES.keys()):
        raise ValueError(f"it changes {', '.join(unknown)}; TensorRT-LLM takes {', '.join(MODULES)}")
    return list(dict.fromkeys(MODULES[name] for name in MODULES if name in names))


def rank_of(configuration: Mapping[str, Any]) -> int:
    """Largest rank of an adapter by its adapter_config.json. Raises ValueError where it has none."""
    pattern = configuration.get("rank_pattern")
    ranks = [configuration.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ValueError(f"its rank r is {configuration.get('r')!r}; expected a whole number")
    return max(int(str(rank)) for rank in ranks)


CONFIGURATION: Final = (
    *("architectures", "hidden_size", "target_hidden_size", "draft_vocab_size"),
    "num_nextn_predict_layers",
    *("peft_type", "r", "rank_pattern", "target_modules", "use_dora"),
)
"""What is looked at of config.json, of a companion and of the cell's own model, and of adapter_config.json."""


def configurations_needed(cell: Cell) -> tuple[str, ...]:
    """Whose config.json tells whether a cell's companions fit: a companion's, or its own "model"."""
    settings = speculation(cell)
    method = None if settings is None else settings["method"]
    needed = {"eagle3": (DRAFT,), "mtp": ("model",)}.get(str(method), ())
    return needed if adapter(cell) is None else (*needed, ADAPTER)


def unfit(cell: Cell, of: Mapping[str, Mapping[str, Any] | None]) -> str | None:
    """Why speculative decoding cannot work with the models that are meant, or None; `of` has their config.json, as known.

    Source: the drafters of the PyTorch backend. An EAGLE-3 head reads hidden states of the model that it was trained for,
    and draws from a vocabulary of its own; layers for more tokens are part of the model's weights.
    """
    if (lora := of.get(ADAPTER)) is not None and (said := _unfit_adapter(cell, lora)) is not None:
        return f"settings.lora.adapter {adapter(cell)}: {said}"
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


def _unfit_adapter(cell: Cell, configuration: Mapping[str, Any]) -> str | None:
    if configuration.get("peft_type", "LORA") != "LORA" or configuration.get("use_dora"):
        kind = "DoRA" if configuration.get("use_dora") else configuration.get("peft_type")
        return f"it is {kind} by its adapter_config.json; expected LoRA"
    try:
        modules_of(configuration)
        rank, width = rank_of(configuration), int(str(cell.recipe["hidden_size"]))
    except ValueError as error:
        return str(error)
    return f"its rank {rank} is more than the hidden size {width} of {cell.model}" if rank > width else None


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


FETCH_ADAPTER: Final = _fetching(ADAPTER, "fetch a LoRA adapter and verify it")
FETCH_DRAFT: Final = _fetching(DRAFT, "fetch the draft model of speculative decoding and verify it")
