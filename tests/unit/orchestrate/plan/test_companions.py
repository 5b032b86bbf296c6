"""Draft models: pinned beside a cell's own, part of what is made from them, and refused where they do not fit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_cells import (
    ENGINES,
    PYTORCH,
    cell,
    commands,
    infeasible,
    machine,
    plan,
    stage_run,
    stages,
    values,
)
from tests.standins.programs.checkpoint import safetensors
from trtllm_pipeline.base.domain import Cell, CellId
from trtllm_pipeline.base.errors import DownloadError, StageError, UsageError
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.target import Target
from trtllm_pipeline.models.hub import peek
from trtllm_pipeline.models.hub.hub_errors import UnavailableError
from trtllm_pipeline.orchestrate.matrix.recipe_files import numbers_of
from trtllm_pipeline.orchestrate.plan.pins import Pins
from trtllm_pipeline.tensorrt.stage.server_requests import adapter_options, chosen_adapters
from trtllm_pipeline.tensorrt.toolchains import companions
from trtllm_pipeline.tensorrt.trtllm import needs

HEAD: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "draft_vocab_size": 32000}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write(tmp_path / "model", {"architectures": ["LlamaForCausalLM"]})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write(folder: Path, config: dict[str, Any], *, content: int = 0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors(content))
    return folder


def asked(of: Path, /, *, lane: str = PYTORCH, more: dict[str, Any] | None = None, **settings: Any) -> Cell:
    changed = {f"speculative.{name}": value for name, value in settings.items()} | (more or {})
    found = cell(toolchain=lane, recipe={"sources": [{"local": str(of)}]}, settings=changed)
    return replace(found, base_dir=str(of.parent))


def pinned(wanted: Cell) -> Cell:
    return Pins(None, guess=False).pin(wanted)


def test_a_head_is_pinned_by_its_content_and_needs_no_tokenizer(model: Path) -> None:
    head = write(model.parent / "head", HEAD)
    found = pinned(asked(model, method="eagle3", model="./head", max_draft_len=4))
    assert found.reason is None
    assert found.companions[companions.DRAFT]["folder"] == str(head)
    planned = plan(found)
    assert stages(planned, found)[:3] == ["download", "draft", "repository"]
    runs = {run.stage.name: run for run in planned.stage_runs.values()}
    assert runs["repository"].inputs == {"model": runs["download"].id, "draft": runs["draft"].id}
    assert runs["launch"].inputs["draft"] == runs["draft"].id
    assert json.loads(runs["repository"].key)["params"]["speculative"] == "eagle3"
    assert json.loads(runs["perf"].key)["params"]["declared"]["speculative"] == "eagle3"
    (head / "model.safetensors").write_bytes(safetensors(1))
    again = plan(pinned(asked(model, method="eagle3", model="./head", max_draft_len=4)))
    same = set(planned.stage_runs) & set(again.stage_runs)
    assert {planned.stage_runs[run].stage.name for run in same} == {"download"}, (
        "what is made from the draft is another"
    )


def test_without_speculation_a_model_that_is_named_says_nothing(model: Path) -> None:
    assert pinned(asked(model, method="none", model="./not-there")).companions == {}


def test_a_method_without_a_model_of_its_own_has_none(model: Path) -> None:
    ngram = asked(model, method="ngram")
    assert pinned(ngram).companions == {}
    assert infeasible(asked(model, method="ngram", model="./not-there")) == (
        "settings.speculative.model: ngram does not use it; it is for dflash and draft and eagle and eagle3 and medusa and pard; "
        "remove it, or give it to the methods that read it by an `override` with `where: { settings.speculative.method: ... }`"
    )
    plain, drafting = plan(pinned(asked(model))), plan(pinned(ngram))
    changed = {run.stage.name for run in drafting.stage_runs.values() if run.id not in plain.stage_runs}
    assert changed == {"repository", "launch", "smoke", "perf", "accuracy"}


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        ("eagle3", {**HEAD, "hidden_size": 2048}, "is for models with a hidden size of 2048; model has 4096"),
        ("eagle3", {**HEAD, "hidden_size": 1024, "target_hidden_size": 4096}, None),
        ("eagle3", {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}, "is not an EAGLE-3 head"),
        ("pard", {"vocab_size": 128256}, None),
        ("pard", {"vocab_size": 32000}, "has 32000 words in its vocabulary"),
        ("dflash", {"hidden_size": 4096, "dflash_config": {"mask_token_id": 1}}, None),
        ("dflash", {"hidden_size": 2048, "dflash_config": {}}, "is for models with a hidden size of 2048"),
        ("dflash", HEAD, "is not a DFlash model: its config.json has no dflash_config"),
    ],
)
def test_a_model_that_drafts_for_another_is_refused_before_anything_is_fetched(
    model: Path, method: str, config: dict[str, Any], words: str | None
) -> None:
    write(model.parent / "head", config)
    reason = pinned(asked(model, method=method, model="./head")).reason
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_a_head_of_another_kind_is_refused_before_anything_is_fetched(model: Path, method: str) -> None:
    write(model.parent / "head", HEAD)
    reason = pinned(asked(model, lane=ENGINES, method=method, model="./head")).reason
    assert f"./head is an EAGLE-3 head by its config.json, and {method} needs another kind" in str(reason)


@pytest.mark.parametrize(
    ("saved", "several", "words"),
    [
        (["model.embed_tokens", "lm_head"], False, None),
        (["lm_head"], True, "which all requests would get, or none"),
        (["score"], False, "whole layers (score), which would be ignored"),
    ],
)
def test_the_llm_api_takes_a_vocabulary_of_an_adapter_alone(
    model: Path, saved: list[str], several: bool, words: str | None
) -> None:
    write_adapter(model.parent / "adapter", {**ADAPTER, "modules_to_save": saved})
    wanted = with_adapter(model)
    if several:
        lora = {"adapter": {"one": "./adapter", "two": "./adapter"}}
        wanted = replace(wanted, settings={**wanted.settings, "lora": lora})
    reason = pinned(wanted).reason
    assert reason is None if words is None else words in str(reason)


def test_layers_of_its_own_are_looked_for_in_the_model(model: Path) -> None:
    assert "has no num_nextn_predict_layers" in str(pinned(asked(model, method="mtp")).reason)
    (model / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    assert pinned(asked(model, method="mtp")).reason is None
    for layers, words in ((0, "its recipe has no num_nextn_predict_layers"), (1, None)):  # before any file is looked at
        told = asked(model, method="mtp")
        told = replace(told, recipe={**told.recipe, "num_nextn_predict_layers": layers})
        assert companions.configurations_needed(told) == ()
        reason = companions.unfit(told, {})
        assert reason is None if words is None else words in str(reason)


def test_a_draft_model_that_nobody_knows_is_a_mistake_in_the_matrix(model: Path) -> None:
    with pytest.raises(
        UsageError, match=r"settings\.speculative\.model no-such-recipe: neither a recipe nor a directory"
    ):
        pinned(asked(model, method="draft", model="no-such-recipe"))


def test_a_recipe_is_no_adapter(model: Path) -> None:
    with pytest.raises(UsageError, match=r"settings\.lora\.adapter tiny is a model, not an adapter"):
        pinned(with_adapter(model, named="tiny"))


def test_folders_are_beside_the_matrix_with_and_without_a_dot(model: Path) -> None:
    (model.parent / "org").mkdir()
    write_adapter(model.parent / "org" / "sql", ADAPTER)
    told = [
        pinned(with_adapter(model, named=name)).companions["adapter"]["folder"] for name in ("org/sql", "./org/sql")
    ]
    assert told == [str(model.parent / "org" / "sql")] * 2


def test_a_draft_model_whose_hub_is_not_reached_says_so() -> None:
    with pytest.raises(UsageError, match=r"org/name: its config\.json cannot be read, because the hub") as raised:
        numbers_of("org/name", None, Path())
    assert raised.value.hint == "give a recipe or a directory of the model"


ADAPTER: dict[str, Any] = {"peft_type": "LORA", "r": 16, "target_modules": ["q_proj", "v_proj"]}


def with_adapter(
    of: Path,
    toolchain: str = PYTORCH,
    recipe: dict[str, Any] | None = None,
    *,
    named: str = "./adapter",
    **build: Any,
) -> Cell:
    found = cell(
        toolchain=toolchain,
        recipe={"sources": [{"local": str(of)}], **(recipe or {})},
        settings={
            "lora.adapter": named,
            **({"serve.frontend": "trtllm_serve"} if toolchain == PYTORCH else {}),
            **{f"build.{name}": value for name, value in build.items()},
        },
    )
    return replace(found, base_dir=str(of.parent))


def write_adapter(folder: Path, configuration: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    (folder / "adapter_model.safetensors").write_bytes(safetensors(0))
    return folder


def test_an_adapter_is_a_model_of_its_own_and_every_request_asks_for_it(model: Path) -> None:
    folder = write_adapter(model.parent / "adapter", ADAPTER)
    found = pinned(with_adapter(model))
    assert found.reason is None
    assert found.companions[companions.ADAPTER]["folder"] == str(folder)
    planned = plan(found)
    runs = {run.stage.name: run for run in planned.stage_runs.values()}
    asking = ("repository", "launch", "smoke", "perf", "accuracy")
    assert {name for name, run in runs.items() if "adapter" in run.inputs} == set(asking)
    service = Service("http://localhost:1", "", None, None, "model", None, "openai")
    inputs = {"adapter": folder, "adapter2": model}
    told = asyncio.run(adapter_options(service, inputs, 1.0, ("sql", "chat")))
    assert told == {
        "sql": {"lora_request": {"lora_name": "sql", "lora_int_id": 1, "lora_path": str(folder)}},
        "chat": {"lora_request": {"lora_name": "chat", "lora_int_id": 2, "lora_path": str(model)}},
    }
    assert list(asyncio.run(adapter_options(service, {"adapter": folder}, 1.0))) == ["adapter"]
    assert chosen_adapters(told, None) == (told["sql"], told["chat"])
    assert chosen_adapters(told, "chat") == (told["chat"],)
    assert chosen_adapters(told, "none") == ()
    with pytest.raises(StageError, match="unknown LoRA adapter law; known: sql, chat"):
        chosen_adapters(told, "law")
    target = Target("openai_completions", service, "model", 1.0, 8, in_turn=chosen_adapters(told, None))
    asked = [target.generation(Prompt("a", "Hello"), number).options["lora_request"] for number in range(3)]
    assert asked == [told[name]["lora_request"] for name in ("sql", "chat", "sql")]


def test_an_engine_is_built_for_the_rank_and_the_layers_of_its_adapter(model: Path) -> None:
    folder = write_adapter(model.parent / "adapter", ADAPTER)
    found = plan(pinned(with_adapter(model, ENGINES)))
    runs = {run.stage.name: run for run in found.stage_runs.values()}
    assert {name for name, run in runs.items() if "adapter" in run.inputs} == {
        *("check", "repository", "launch", "smoke", "perf", "accuracy")
    }
    command = commands(found, "build")[0]
    place = command.index("--lora_target_modules")
    assert command[place + 1 : place + 4] == ["attn_q", "attn_v", "attn_k"], "the engine computes all three as one"
    assert {name: values(command)[name] for name in ("--max_lora_rank", "--lora_plugin")} == {
        "--max_lora_rank": "16",
        "--lora_plugin": "float16",
    }
    (folder / "adapter_model.safetensors").write_bytes(safetensors(1))
    other = plan(pinned(with_adapter(model, ENGINES)))
    same = {found.stage_runs[run].stage.name for run in set(found.stage_runs) & set(other.stage_runs)}
    assert same == {"download", "convert", "build"}, "the engine holds nothing of the weights"
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, "r": 8}))
    for said in ({"max_lora_rank": 16}, {"max_lora_rank": "16"}, {"--max_lora_rank": 16}):
        larger = plan(pinned(with_adapter(model, ENGINES, **said)))
        assert stage_run(larger, "build").id == stage_run(found, "build").id, (
            "what it is built for counts, not who says it"
        )


def test_several_adapters_share_an_engine_for_all_of_them(model: Path) -> None:
    write_adapter(model.parent / "sql", ADAPTER)
    write_adapter(model.parent / "chat", {**ADAPTER, "r": 32, "target_modules": ["o_proj"]})
    named = {"sql": "./sql", "chat": "./chat"}
    several = with_adapter(model, ENGINES)
    settings = {
        **several.settings,
        "lora": {"adapter": named},
        "accuracy": {**several.settings["accuracy"], "lora": "chat"},
    }
    found = plan(pinned(replace(several, settings=settings)))
    runs = {run.stage.name: run for run in found.stage_runs.values()}
    assert (runs["build"].params.max_lora_rank, set(runs["build"].params.lora_target_modules)) == (
        32,
        {"attn_q", "attn_k", "attn_v", "attn_dense"},
    )
    assert {name for name, run in runs.items() if {"adapter", "adapter2"} <= run.inputs.keys()} == {
        *("repository", "launch", "smoke", "perf", "accuracy")
    }
    assert json.loads(runs["perf"].key)["params"]["lora_names"] == ["sql", "chat"]
    assert runs["accuracy"].params.lora == "chat"
    for own, measured, scored in ((None, "sql", "sql"), (None, "none", "none"), ("chat", "sql", "chat")):
        changed = {"perf": {**settings["perf"], "lora": measured}, "accuracy": {**settings["accuracy"], "lora": own}}
        asking = plan(pinned(replace(several, settings={**settings, **changed})))
        assert stage_run(asking, "accuracy").params.lora == scored
        assert stage_run(asking, "launch").id == runs["launch"].id, "each on the same server"
    with_cache = [
        needs.serving(each, machine()).host for each in (several, pinned(replace(several, settings=settings)))
    ]
    assert with_cache[0] == with_cache[1]
    bare = replace(several, settings={**settings, "lora": {"adapter": None}})
    assert with_cache[0] - needs.serving(bare, machine()).host == 1 << 30
    (model.parent / "chat" / "adapter_config.json").write_text(json.dumps({**ADAPTER, "peft_type": "IA3"}))
    assert "settings.lora.adapter ./chat: it is IA3" in str(pinned(replace(several, settings=settings)).reason)


@pytest.mark.parametrize(
    ("change", "build", "words"),
    [
        ({"target_modules": "all-linear"}, None, None),
        ({"target_modules": ["model.layers.0.self_attn.q_proj"]}, None, None),
        ({"target_modules": ["q_proj", "lm_head"]}, None, "it changes lm_head; TensorRT-LLM supports q_proj"),
        ({"target_modules": ".*proj"}, None, "expected a list of layers"),
        ({"peft_type": "IA3"}, None, "it is IA3 by its adapter_config.json; expected LoRA"),
        ({"use_dora": True}, None, "it is DoRA"),
        ({"r": 8192}, None, "its rank 8192 is more than the hidden size 4096 of model"),
        ({"r": "16"}, None, "expected a whole number"),
        ({}, {"max_lora_rank": 8}, "its rank 16 is above settings.build.max_lora_rank 8"),
        ({}, {"max_lora_rank": "8"}, "its rank 16 is above settings.build.max_lora_rank 8"),
        ({}, {"--max_lora_rank": 8}, "its rank 16 is above settings.build.max_lora_rank 8"),
        ({}, {"--lora_target_modules": "attn_dense"}, "settings.build.lora_target_modules does not have"),
        ({}, {"max_lora_rank": 16, "lora_target_modules": ["attn_q"]}, None),
        (
            {},
            {"lora_target_modules": "mlp_gate"},
            "it changes attn_q, attn_v, which settings.build.lora_target_modules does not",
        ),
        ({"modules_to_save": ["lm_head"]}, {}, "it has whole layers (lm_head)"),
        ({"lora_bias": True}, {}, "it has a bias"),
    ],
)
def test_what_an_adapter_changes_is_looked_at_before_anything_is_fetched_or_built(
    model: Path, change: dict[str, Any], build: dict[str, Any] | None, words: str | None
) -> None:
    """By PyTorch, and by an engine with settings of its build."""
    write_adapter(model.parent / "adapter", {**ADAPTER, **change})
    reason = pinned(with_adapter(model) if build is None else with_adapter(model, ENGINES, **build)).reason
    assert reason is None if words is None else words in str(reason)


def test_layers_of_experts_are_not_converted(model: Path) -> None:
    write_adapter(model.parent / "adapter", {**ADAPTER, "target_modules": ["q_proj", "up_proj"]})
    experts = {"family": "mixtral", "num_experts": 8}
    assert "it changes layers of experts" in str(pinned(with_adapter(model, ENGINES, experts)).reason)
    assert pinned(with_adapter(model, ENGINES)).reason is None


def test_without_the_hub_the_matrix_has_to_say_what_an_engine_is_built_for(model: Path) -> None:
    unknown = {companions.ADAPTER: None}
    assert "set settings.build.max_lora_rank and lora_target_modules" in str(
        companions.unfit(with_adapter(model, ENGINES), unknown)
    )
    told = with_adapter(model, ENGINES, max_lora_rank=8, lora_target_modules=["attn_q"])
    assert companions.unfit(told, unknown) is None
    assert companions.unfit(with_adapter(model), unknown) is None


def test_a_folder_that_is_no_adapter_is_said_to_be_none(model: Path) -> None:
    write(model.parent / "adapter", {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(DownloadError, match=r"has no adapter_config\.json, so it is not a LoRA adapter"):
        pinned(with_adapter(model))
    (model.parent / "adapter" / "sql.nemo").write_bytes(b"")
    with pytest.raises(DownloadError, match=r"as PEFT writes it; sql\.nemo is NVIDIA NeMo's, which is not supported"):
        pinned(with_adapter(model))


def test_the_largest_rank_counts() -> None:
    assert companions.rank_of({"r": 8, "rank_pattern": {"q_proj": 32}}) == 32
    assert companions.modules_of({"target_modules": ["v_proj", "down_proj"]}) == ["attn_v", "mlp_4h_to_h"]


@pytest.mark.parametrize("name", ["hub:org/head", "org/-head", "ör/g"])
def test_a_draft_model_that_no_hub_can_have_is_refused_in_words(model: Path, name: str) -> None:
    cell = asked(model, method="draft", model=name)
    offline = {**cell.settings, "download": {**cell.settings["download"], "offline": True}}
    with pytest.raises(DownloadError, match="is not a valid model name"):
        pinned(replace(cell, settings=offline))


@pytest.mark.parametrize(
    ("lane", "settings", "stage"),
    [
        (PYTORCH, {"method": "ngram", "max_draft_len": 3}, "repository"),
        (PYTORCH, {"method": "mtp", "max_draft_len": 1}, "repository"),
        (ENGINES, {"method": "medusa", "max_draft_len": 63, "num_medusa_heads": 4, "num_medusa_layers": 1}, "convert"),
        (ENGINES, {"method": "eagle", "max_draft_len": 63, "num_eagle_layers": 4}, "build"),
    ],
)
def test_a_default_that_is_written_out_makes_the_same(
    model: Path, lane: str, settings: dict[str, Any], stage: str
) -> None:
    (model / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    family = "deepseek_v3" if settings["method"] == "mtp" else "llama"
    head = write(model.parent / "head", {"hidden_size": 4096, "medusa_num_heads": 5})
    given: dict[str, Any] = {"method": settings["method"]}
    if lane == ENGINES:
        given["model"] = f"./{head.name}"
    runs = [
        {
            run.stage.name: run.fingerprint
            for run in plan(_of(family, asked(model, lane=lane, **said))).stage_runs.values()
        }
        for said in (given, {**given, **settings})
    ]
    assert runs[0][stage] == runs[1][stage]
    assert runs[0] == runs[1]


def _of(family: str, wanted: Cell) -> Cell:
    return pinned(replace(wanted, recipe={**wanted.recipe, "family": family}))


SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
}
WITH_DRAFT: dict[str, Any] = {
    "repository.decoupled": False,
    "repository.enable_kv_cache_reuse": True,
}


def test_a_draft_model_becomes_an_engine_that_other_cells_share(model: Path) -> None:
    small = write(model.parent / "small", SMALL)
    (small / "tokenizer.json").write_text("{}")
    found = pinned(asked(model, lane=ENGINES, more=WITH_DRAFT, method="draft", model="./small", max_draft_len=5))
    assert found.reason is None
    # The same model, built for the same lengths on its own.
    alone = pinned(replace(cell(recipe={**recipe_of(small), "sources": [{"local": str(small)}]}), isl=191, osl=1))
    planned = plan(found, replace(alone, id=CellId("alone")))
    both = [planned.stage_runs[run] for run in planned.by_cell[found.id] if run in planned.by_cell[CellId("alone")]]
    assert [run.stage.name for run in both] == ["download", "convert", "build"]
    assert stages(planned, found) == [
        *("download", "convert", "build"),
        *("download", "convert", "build", "check", "repository", "launch", "smoke", "perf", "accuracy"),
    ]
    runs = {run.stage.name: run for run in (planned.stage_runs[each] for each in planned.by_cell[found.id])}
    assert runs["repository"].inputs["drafter"] == both[-1].id == runs["launch"].inputs["drafter"]
    assert runs["build"].id != both[-1].id
    engines = [each.params for each in (both[-1], runs["build"])]
    assert [(each.max_input_len, each.max_seq_len, each.speculative) for each in engines] == [
        (191, 192, None),
        (191, 192, "draft"),
    ]
    assert engines[1].max_draft_len == 5
    assert runs["repository"].params.tensorrt_llm_draft_model_name == "tensorrt_llm_draft"
    assert runs["repository"].params.kv_cache_free_gpu_mem_fraction == 0.5
    assert all(found.id in run.cells for run in both)


def recipe_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
    return {"family": "llama", "head_dim": 64, "num_key_value_heads": 8, **{name: config[name] for name in names}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**SMALL, "vocab_size": 32000}, "./small has 32000 words in its vocabulary, model has 128256"),
        ({"model_type": "llama", "vocab_size": 128256}, "./small: is required; give a recipe of the model"),
    ],
)
def test_a_draft_model_that_cannot_draft_is_refused_before_anything_is_fetched(
    model: Path, config: dict[str, Any], words: str
) -> None:
    (write(model.parent / "small", config) / "tokenizer.json").write_text("{}")
    found = pinned(asked(model, lane=ENGINES, more=WITH_DRAFT, method="draft", model="./small"))
    assert words in str(found.reason)


@pytest.mark.parametrize(
    ("words", "fits"),
    [(128256, True), (128256 + 1023, True), (128256 - 1023, True), (128256 + 1024, False), (32000, False)],
)
def test_on_pytorch_a_draft_model_has_the_same_tokens(model: Path, words: int, *, fits: bool) -> None:
    (write(model.parent / "small", {**SMALL, "vocab_size": words}) / "tokenizer.json").write_text("{}")
    found = pinned(asked(model, method="draft", model="./small"))
    told = f"settings.speculative.model ./small has {words} words in its vocabulary, model has 128256"
    assert found.reason == (None if fits else told)


def test_where_its_hub_is_not_reached_a_recipe_tells_the_vocabulary_of_a_draft_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write(model.parent / "weights", SMALL)
    configuration = peek.configuration

    def unreached(*arguments: Any, folder: Path | None, offline: bool) -> Any:
        if folder == small:
            raise UnavailableError("the hub does not answer")
        return configuration(*arguments, folder=folder, offline=offline)

    monkeypatch.setattr(peek, "configuration", unreached)
    recipe = {**recipe_of(small), "vocab_size": 32000, "name": "small", "summary": "small", "license": "MIT"}
    recipe["max_position_embeddings"] = 4096
    recipe["sources"] = [{"local": str(small)}]
    (small / "tokenizer.json").write_text("{}")
    (model.parent / "recipes").mkdir()
    (model.parent / "recipes" / "small.yaml").write_text(json.dumps(recipe))
    found = pinned(asked(model, method="draft", model="small"))
    assert "small has 32000 words in its vocabulary, model has 128256" in str(found.reason)


@pytest.mark.parametrize(
    ("config", "head", "options", "words"),
    [
        ({}, {}, {}, None),
        ({"rope_theta": 10000.0}, {"hidden_size": 4096}, {}, None),
        ({"rope_theta": 500000.0}, {}, {}, "settings.quantize.options: {rotary_base: 500000}"),
        ({"rope_theta": 500000.0}, {}, {"rotary_base": 500000}, None),
        ({"rope_scaling": {"rope_type": "llama3"}}, {}, {}, "scales its rotary embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {}, {}, "scales its rotary embeddings"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}, {}, "has rope_theta 500000"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}, {}, None),
        ({}, {"hidden_size": 2048}, {}, "is for models with a hidden size of 2048; model has 4096"),
    ],
)
def test_heads_that_would_be_converted_wrongly_are_refused(
    model: Path, config: dict[str, Any], head: dict[str, Any], options: dict[str, Any], words: str | None
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    write(model.parent / "head", head)
    told = {"quantize.options": options}
    reason = pinned(asked(model, lane=ENGINES, more=told, method="eagle", model="./head")).reason
    assert reason is None if words is None else words in str(reason)
