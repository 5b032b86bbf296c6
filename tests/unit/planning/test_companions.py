"""Draft models: pinned beside a cell's own, part of what is made from them, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_cells import PYTORCH, cell, plan, stages
from tests.standins.programs.checkpoint import safetensors
from trtllm_pipeline.domain import Cell
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.planning.pins import Pins
from trtllm_pipeline.toolchains import companions

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


def asked(of: Path, /, **settings: Any) -> Cell:
    changed = {f"speculative.{name}": value for name, value in settings.items()}
    found = cell(toolchain=PYTORCH, recipe={"sources": [{"local": str(of)}]}, settings=changed)
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


def test_a_method_without_a_model_of_its_own_leaves_the_one_that_is_named_alone(model: Path) -> None:
    ngram = asked(model, method="ngram", model="./not-there")
    assert pinned(ngram).companions == {}
    plain, drafting = plan(pinned(asked(model))), plan(pinned(ngram))
    changed = {run.stage.name for run in drafting.stage_runs.values() if run.id not in plain.stage_runs}
    assert changed == {"repository", "launch", "smoke", "perf", "accuracy"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**HEAD, "hidden_size": 2048}, "is for models with a hidden size of 2048; model has 4096"),
        ({**HEAD, "hidden_size": 1024, "target_hidden_size": 4096}, None),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}, "is no EAGLE-3 head"),
    ],
)
def test_a_head_of_another_model_is_refused_before_anything_is_fetched(
    model: Path, config: dict[str, Any], words: str | None
) -> None:
    write(model.parent / "head", config)
    reason = pinned(asked(model, method="eagle3", model="./head")).reason
    assert reason is None if words is None else words in str(reason)


def test_layers_of_its_own_are_looked_for_in_the_model(model: Path) -> None:
    assert "has no num_nextn_predict_layers" in str(pinned(asked(model, method="mtp")).reason)
    (model / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    assert pinned(asked(model, method="mtp")).reason is None


def test_a_draft_model_that_nobody_knows_is_a_mistake_in_the_matrix(model: Path) -> None:
    with pytest.raises(UsageError, match="there is no such recipe or folder"):
        pinned(asked(model, method="draft", model="no-such-recipe"))
