"""Companion models of a cell: the draft model of speculative decoding, and LoRA adapters.

Each is fetched by a separate stage with its name, and pinned like the cell's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import Cell, FailureClass, Json, Needs, Resources, StageError
from trtllm_pipeline.models import Fields, model_files
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.stage.lora import ADAPTERS, MODULES
from trtllm_pipeline.tensorrt.stage.params import DRAFT_LENGTHS, WITH_DRAFT_MODEL, DownloadParams, Form, load
from trtllm_pipeline.tensorrt.toolchains.catalog import ENGINES
from trtllm_pipeline.tensorrt.toolchains.companion_sizes import adapter_bytes, draft_bytes
from trtllm_pipeline.tensorrt.toolchains.time_estimates import fetching_s

DRAFT: Final = "draft"
ADAPTER: Final = "adapter"
NAMES: Final = (DRAFT, *ADAPTERS)
SETTINGS: Final = {DRAFT: "settings.speculative.model", **dict.fromkeys(ADAPTERS, "settings.lora.adapter")}
"""Settings that name them."""
LORA_BUILD: Final = ("max_lora_rank", "lora_target_modules")
"""Options of trtllm-build that define the adapters an engine accepts."""
_ATTENTION: Final = frozenset({"attn_q", "attn_k", "attn_v"})
_OWN_LAYERS: Final = "num_nextn_predict_layers"
"""Key in config.json and recipes: number of the model's draft layers."""
_OF_DFLASH: Final = "dflash_config"
"""The section of a DFlash model's config.json. Source: the fields of DFlashDecodingConfig."""
_OF_VOCABULARY: Final = frozenset({"embed_tokens", "lm_head"})
_ROTARY_BASE: Final = 10000
_PADDING: Final = 1024
"""Models with the same tokens may differ by fewer rows of the embedding than this."""
_ALL_LINEAR: Final = "all-linear"


def speculation(cell: Cell) -> Mapping[str, Json] | None:
    """The settings of speculative decoding. None if a cell does not use it."""
    settings = cell.settings.get("speculative")
    return None if settings is None or settings["method"] == "none" else settings


def longest_prompt(cell: Cell) -> int:
    """Tokens of a prompt. An engine with a draft model is also given the output so far."""
    settings = speculation(cell)
    with_output = cell.toolchain == ENGINES and settings is not None and settings["method"] == "draft"
    return cell.isl + cell.osl - 1 if with_output else cell.isl


READ_BY: Final = {
    "model": WITH_DRAFT_MODEL,
    "max_draft_len": frozenset(DRAFT_LENGTHS),
    "max_ngram_size": frozenset(("ngram", "sa")),
    "num_medusa_heads": frozenset(("medusa",)),
    "num_medusa_layers": frozenset(("medusa",)),
    "num_eagle_layers": frozenset(("eagle",)),
    "max_non_leaves_per_layer": frozenset(("eagle",)),
}
"""Key of settings.speculative -> the methods that read it."""


def beyond_default(settings: Mapping[str, Json], defaults: Mapping[str, int]) -> dict[str, Json]:
    """Settings of speculative decoding, None for defaults: an explicit default must not change the key."""
    return {name: None if settings[name] == default else settings[name] for name, default in defaults.items()}


def known_heads(cell: Cell) -> dict[str, list[str]]:
    """Method -> the heads that the recipe of a cell's model names."""
    listed: Any = cell.recipe.get("draft_heads") or {}
    return {method: [*names] for method, names in listed.items()}


def named_models(cell: Cell) -> dict[str, str]:
    """Companion -> the model that a cell's settings name for it."""
    settings, models = speculation(cell), {place: model for place, (_, model) in adapters(cell).items()}
    if settings is not None and settings["method"] in WITH_DRAFT_MODEL and settings["model"] is not None:
        models[DRAFT] = str(settings["model"])
    return models


def adapters(cell: Cell) -> dict[str, tuple[str, str]]:
    """The LoRA adapters in a cell's settings: place among `ADAPTERS` -> name, and the adapter's model."""
    configured = cell.settings.get("lora", {}).get("adapter")
    named = configured if isinstance(configured, dict) else {} if configured is None else {ADAPTER: configured}
    return {place: (name, str(model)) for place, (name, model) in zip(ADAPTERS, named.items(), strict=False)}


def lora_names(cell: Cell) -> tuple[str, ...]:
    """Names of a cell's adapters, if its settings have any."""
    named = isinstance(cell.settings.get("lora", {}).get("adapter"), dict)
    return tuple(name for name, _ in adapters(cell).values()) if named else ()


def form(name: str) -> Form:
    return "adapter" if name in ADAPTERS else "draft"


def modules_of(configuration: Mapping[str, Any]) -> list[str]:
    """TensorRT-LLM's names of the layers that an adapter_config.json targets. Raises ValueError for layers without a name."""
    targets = configuration.get("target_modules")
    if targets == _ALL_LINEAR:
        return list(MODULES.values())
    if not isinstance(targets, list) or not targets:
        raise ValueError(f"its target_modules are {targets!r}; expected a list of layers")
    names = [str(each).rpartition(".")[2] for each in targets]
    if unknown := sorted({*names} - MODULES.keys()):
        raise ValueError(f"it changes {', '.join(unknown)}; TensorRT-LLM supports {', '.join(MODULES)}")
    return list(dict.fromkeys(MODULES[name] for name in MODULES if name in names))


def rank_of(configuration: Mapping[str, Any]) -> int:
    """Largest rank of an adapter from its adapter_config.json. Raises ValueError if it has none."""
    pattern = configuration.get("rank_pattern")
    ranks = [configuration.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise ValueError(f"its rank r is {configuration.get('r')!r}; expected a whole number")
    return max(int(str(rank)) for rank in ranks)


def read_adapter(folder: Path) -> tuple[int, list[str]]:
    """Rank and layers of the LoRA adapter in a directory. Raises StageError if it is not an adapter."""
    configuration = Fields.read(folder, "adapter_config.json").values
    try:
        return rank_of(configuration), modules_of(configuration)
    except ValueError as error:
        raise StageError(f"{folder}: {error}", failure=FailureClass.INFEASIBLE) from error


CONFIGURATION: Final = (
    *("architectures", "hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size"),
    *(_OWN_LAYERS, _OF_DFLASH, "rope_scaling", "rope_theta", "rope_parameters"),
    *("peft_type", "r", "rank_pattern", "target_modules", "use_dora", "modules_to_save", "lora_bias"),
)
"""The relevant content of config.json, of a companion and of the cell's own model, and of adapter_config.json."""


def configurations_needed(cell: Cell) -> tuple[str, ...]:
    """The owners of the config.json files that decide whether a cell's companions fit: a companion, or its own "model"."""
    settings = speculation(cell)
    method = None if settings is None else settings["method"]
    both = (DRAFT, "model")
    own = ("model",) if cell.recipe.get(_OWN_LAYERS) is None else ()
    drafter = () if has_own_engine(cell) else (DRAFT,)
    needed = {"mtp": own, "medusa": both, "eagle": both}.get(str(method), drafter if method in WITH_DRAFT_MODEL else ())
    return (*needed, *adapters(cell))


def unfit(cell: Cell, of: Mapping[str, Mapping[str, Any] | None]) -> str | None:
    """Why speculative decoding cannot work with the cell's models, or None. `of` has their known config.json.

    Source: the drafters of the PyTorch backend. An EAGLE-3 head and a DFlash model read hidden states of the model that
    they were trained for; the head has a separate vocabulary. Layers for more tokens are part of the model's weights.
    """
    for place, (_, name) in adapters(cell).items():
        if place in of and (reason := _unfit_adapter(cell, of[place])) is not None:
            return f"settings.lora.adapter {name}: {reason}"
    settings = speculation(cell)
    method = "" if settings is None else str(settings["method"])
    if method in {"medusa", "eagle"}:
        return _unfit_heads(cell, method, of)
    drafter, model = of.get(DRAFT), of.get("model")
    if method in {"draft", "pard"}:
        return None if drafter is None else unlike(cell, drafter)
    if drafter is not None:
        name = named_models(cell)[DRAFT]
        if method == "dflash" and _OF_DFLASH not in drafter:
            return f"settings.speculative.model {name} is not a DFlash model: its config.json has no {_OF_DFLASH}"
        if method == "eagle3" and not _is_eagle3(drafter):
            return (
                f"settings.speculative.model {name} is not an EAGLE-3 head: its config.json has no draft_vocab_size, and no "
                "architecture of that name"
            )
        if (reason := _unlike_width(cell, drafter.get("target_hidden_size") or drafter.get("hidden_size"))) is not None:
            return reason
    where, known = ("config.json", model) if cell.recipe.get(_OWN_LAYERS) is None else ("recipe", cell.recipe)
    if method == "mtp" and known is not None and not known.get(_OWN_LAYERS):
        return (
            f"settings.speculative.method mtp: {cell.model} has no layers that draft; its {where} has no {_OWN_LAYERS}"
        )
    return None


def lora_build(cell: Cell) -> tuple[int | None, tuple[str, ...]]:
    """Largest rank and layers of adapters that a cell's engine is built for: from `settings.build`, else from its
    adapters. None and none without adapters.

    A query, key or value alone implies all three, because the engine computes them together.
    """
    known = [cell.companions.get(place, {}) for place in adapters(cell)]
    if not known:
        return None, ()
    rank, modules = (_option(cell.settings["build"], name) for name in LORA_BUILD)
    ranks = [each["max_lora_rank"] for each in known if "max_lora_rank" in each] if rank is None else [rank]
    targets = [name for each in known for name in _names(each.get("lora_target_modules"))]
    names = list(dict.fromkeys(targets if modules is None else _names(modules)))
    if not _ATTENTION.isdisjoint(names):
        names += sorted(_ATTENTION.difference(names))
    return max((int(str(each)) for each in ranks if str(each).strip().isdecimal()), default=None), tuple(names)


def _option(build: Mapping[str, Json], name: str) -> Json:
    """A matrix's value of an option of trtllm-build, which may be written with dashes."""
    return build.get(name, build.get(f"--{name}"))


def _names(given: Json) -> list[str]:
    """Layers in the spelling of a matrix or an adapter."""
    return given.split() if isinstance(given, str) else [*map(str, given)] if isinstance(given, list | tuple) else []


def described(pinned: Mapping[str, Mapping[str, Json]], of: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """The pinned companions `found`, with the values of their configurations that stages need: an adapter's rank and layers."""
    described: dict[str, Any] = dict(pinned)
    for place in pinned.keys() & {*ADAPTERS}:
        if (known := of.get(place)) is None:
            continue
        with suppress(ValueError):  # `unfit` reports it
            known_values = {"max_lora_rank": rank_of(known), "lora_target_modules": modules_of(known)}
            described[place] = {**pinned[place], **known_values}
    return described


def has_own_engine(cell: Cell) -> bool:
    """True if a cell's draft model becomes a separate engine, built by the stages of the cell's engine."""
    settings = speculation(cell)
    return cell.toolchain == ENGINES and settings is not None and settings["method"] == "draft"


def unlike(cell: Cell, draft: Mapping[str, Any]) -> str | None:
    """Why a draft model, by its recipe or config.json, cannot draft for a cell's model, or None. Source: README of
    examples/draft_target_model, which requires the same vocabulary. For PyTorch, tokens must match, padding may differ.
    """
    ours, theirs = int(str(cell.recipe["vocab_size"])), draft.get("vocab_size")
    if not isinstance(theirs, int) or abs(ours - theirs) < (1 if cell.toolchain == ENGINES else _PADDING):
        return None
    return f"settings.speculative.model {named_models(cell)[DRAFT]} has {theirs} words in its vocabulary, {cell.model} has {ours}"


def _unfit_heads(cell: Cell, method: str, of: Mapping[str, Mapping[str, Any] | None]) -> str | None:
    """Why heads cannot become part of an engine. Source: the converters of examples/medusa and examples/eagle. They
    keep only the name of the scaling of rotary embeddings, and earlier ones read the base from an option.
    """
    model, head = of.get("model"), of.get(DRAFT) or {}
    if _is_eagle3(head):
        return (
            f"settings.speculative.model {named_models(cell)[DRAFT]} is an EAGLE-3 head by its config.json, and {method} needs "
            "another kind; the toolchain tensorrt_llm_pytorch supports it with settings.speculative.method: eagle3"
        )
    start = f"settings.speculative.method {method}: {cell.model}"
    where, base, scaling = "recipe", cell.recipe.get("rope_theta"), cell.recipe.get("rope_scaling")
    if model is not None:
        where, (base, scaling) = "config.json", model_files.rotary(model)
    if scaling is not None:
        return f"{start} scales its rotary embeddings (rope_scaling of its {where}), which the converter of heads drops"
    options = cell.settings["quantize"].get("options")
    base_set = isinstance(options, dict) and not {"rotary_base", "--rotary_base"}.isdisjoint(options)
    if isinstance(base, int | float) and base != _ROTARY_BASE and not base_set:
        return (
            f"{start} has rope_theta {base:g} in its {where}, and the converter of heads uses {_ROTARY_BASE}; "
            f"set settings.quantize.options: {{rotary_base: {base:g}}}"
        )
    return _unlike_width(cell, head.get("hidden_size"))


def _unlike_width(cell: Cell, size: object) -> str | None:
    """Why a drafter for models with a hidden size of `size` does not fit a cell's model, or None."""
    if not isinstance(size, int) or size == (ours := cell.recipe["hidden_size"]):
        return None
    name = named_models(cell)[DRAFT]
    return f"settings.speculative.model {name} is for models with a hidden size of {size}; {cell.model} has {ours}"


def _is_eagle3(head: Mapping[str, Any]) -> bool:
    architectures = head.get("architectures") or ()
    return "draft_vocab_size" in head or any("eagle3" in str(each).lower() for each in architectures)


def _unfit_adapter(cell: Cell, configuration: Mapping[str, Any] | None) -> str | None:
    engine, build = cell.toolchain == ENGINES, cell.settings["build"]
    if configuration is None:
        if not engine or all(_option(build, name) is not None for name in LORA_BUILD):
            return None
        return (
            "its rank and layers are unknown because its hub cannot be reached; set settings.build.max_lora_rank and "
            "lora_target_modules"
        )
    if configuration.get("peft_type", "LORA") != "LORA" or configuration.get("use_dora"):
        kind = "DoRA" if configuration.get("use_dora") else configuration.get("peft_type")
        return f"it is {kind} by its adapter_config.json; expected LoRA"
    try:
        modules = modules_of(configuration)
        rank, width = rank_of(configuration), int(str(cell.recipe["hidden_size"]))
    except ValueError as error:
        return str(error)
    if rank > width:
        return f"its rank {rank} is more than the hidden size {width} of {cell.model}"
    return _unfit_engine(cell, configuration, rank, modules) if engine else _unfit_pytorch(cell, configuration)


def _unfit_pytorch(cell: Cell, configuration: Mapping[str, Any]) -> str | None:
    """Why the LLM API cannot use an adapter. Source: `DecoderModelForCausalLM` of the PyTorch backend, which reads a
    vocabulary and its mapping from the one directory in `lora_dir` when it loads the model, and no other whole layer.
    """
    saved = [str(name) for name in configuration.get("modules_to_save") or ()]
    if not saved:
        return None
    if others := [name for name in saved if name.rpartition(".")[2] not in _OF_VOCABULARY]:
        return f"it has whole layers ({', '.join(others)}), which would be ignored; merge it into the model"
    if len(adapters(cell)) > 1:
        return (
            f"it has whole layers ({', '.join(saved)}), which all requests would get, or none; serve it alone, or "
            "merge it into the model"
        )
    return None


def _unfit_engine(cell: Cell, configuration: Mapping[str, Any], rank: int, modules: list[str]) -> str | None:
    """Why an engine of the cell cannot use an adapter. Source: `loraValidateRequestTensors` of loraUtils.cpp, which
    checks the first request. Layers of experts have separate names, and `lora_config` has no entry for a bias.
    """
    if configuration.get("modules_to_save"):
        saved = ", ".join(map(str, configuration["modules_to_save"]))
        return f"it has whole layers ({saved}), which requests cannot send to an engine; merge it into the model"
    if configuration.get("lora_bias"):
        return "it has a bias (lora_bias), which engines do not support"
    if cell.recipe.get("num_experts") and any(name.startswith("mlp") for name in modules):
        return "it changes layers of experts, which are not converted; use an adapter of attention layers only"
    most, built = lora_build(cell)
    if most is not None and rank > most:
        return f"its rank {rank} is above settings.build.max_lora_rank {most}"
    if lacking := [name for name in modules if name not in built]:
        return f"it changes {', '.join(lacking)}, which settings.build.lora_target_modules does not have"
    return None


def weights_bytes(cell: Cell, name: str) -> int:
    """Size of a cell's companion. 0 without one and if unknown."""
    companion = cell.companions.get(name)
    return 0 if companion is None else (draft_bytes if name == DRAFT else adapter_bytes)(companion, cell)


def _params(name: str, cell: Cell) -> DownloadParams:
    companion = cell.companions[name]
    content: Any = companion.get("files")
    given = {"source": companion["source"], "content": content, "folder": companion.get("folder"), "form": form(name)}
    return load(DownloadParams, given, cell.settings["download"])


def _fetching(name: str, summary: str, *examples: str) -> Stage:
    return Stage(
        name=name,
        version=1,
        summary=summary,
        program="trtllm_pipeline.tensorrt.stage.download:run",
        shared=True,
        applies=lambda cell, _machine: name in cell.companions and not (name == DRAFT and has_own_engine(cell)),
        params=DownloadParams,
        read=lambda cell: _params(name, cell),
        resources=lambda _cell, _machine: Resources(cpus=0, downloads=1),
        section="download",
        expected_s=2.0,
        takes=lambda cell, _machine: fetching_s(weights_bytes(cell, name)),
        needs=lambda cell, _machine: Needs(leaves=weights_bytes(cell, name)),
        timeout_s=24 * 3600.0,
        retries=4,
        examples=examples,
    )


_FETCH_ADAPTER: Final = "fetch a LoRA adapter and verify it"
FETCH_ADAPTERS: Final = (
    _fetching(ADAPTER, _FETCH_ADAPTER, "ORGANIZATION/NAME --output-dir adapter"),
    *(_fetching(name, _FETCH_ADAPTER) for name in ADAPTERS if name != ADAPTER),
)
FETCH_DRAFT: Final = _fetching(
    DRAFT, "fetch the draft model of speculative decoding and verify it", "ORGANIZATION/NAME --output-dir draft"
)
