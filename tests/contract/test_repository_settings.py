"""One set of settings for repositories: what a matrix takes, what the templates are filled with, what toolchains have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.helpers import fabricated, trtllm_cells
from tests.unit.conftest import MACHINE
from trtllm_pipeline.models.triton_repository.lint.rules.parameters import BACKENDS, BATCHING, DECODING_MODES, POLICIES
from trtllm_pipeline.orchestrate.matrix.models import Repository, Section
from trtllm_pipeline.tensorrt.stage.params import ParamField, table
from trtllm_pipeline.tensorrt.stage.repository_settings import (
    DEFAULTS,
    SETTINGS,
    LlmApi,
    RepositorySettings,
    TextModels,
)
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm.templates import text

TABLE = table(RepositorySettings)
EMBEDDED = [each.name for each in table(TextModels)]
OTHER_KEYS = {
    *("parameters", "llm_args"),
    *("triton_parameters", "triton_max_batch_size", "preferred_batch_size", "instance_kinds"),
}
"""Of the matrix: they are no settings themselves."""
OF_ALL_STAGES = set(Section.model_fields)
FIELDS = {name: field for name, field in Repository.model_fields.items() if name not in OF_ALL_STAGES | OTHER_KEYS}
SCHEMA = Repository.model_json_schema()["properties"]


def accepted(name: str, value: object) -> bool:
    try:
        Repository.model_validate_json(json.dumps({name: value}))
    except ValidationError:
        return False
    return True


def examples(field: ParamField) -> list[Any]:
    """Values that the setting takes."""
    if field.choices:
        return list(field.choices)
    if field.type is bool:
        return [True, False]
    if field.type is float:
        return [0.5, *([field.about.le] if field.about.le is not None else [])]
    if field.type is int:
        return [int(field.about.ge or 1), 7]
    return ["some text"] if field.type is str else [[1, 2]]


def test_a_matrix_has_every_setting_and_no_other() -> None:
    assert FIELDS.keys() == SETTINGS.keys()
    assert set(EMBEDDED) < SETTINGS.keys()
    assert {each.name for each in table(LlmApi)} < SETTINGS.keys()


@pytest.mark.parametrize("field", TABLE, ids=lambda field: field.name)
def test_defaults_agree(field: ParamField) -> None:
    """Those that every toolchain has are written out; the others are null, for the release's own or the table's."""
    assert FIELDS[field.name].get_default() == field.default
    assert field.optional is (field.name not in EMBEDDED)


@pytest.mark.parametrize("field", TABLE, ids=lambda field: field.name)
def test_values_are_those_of_the_table(field: ParamField) -> None:
    for value in examples(field):
        assert accepted(field.name, value), value
        assert text(tuple(value) if isinstance(value, list) else value)
    assert not accepted(field.name, 5 if field.type is str or field.choices else "x")
    if field.choices:
        assert not accepted(field.name, "something else")
    if field.about.ge is not None and field.type in {int, float}:
        assert not accepted(field.name, field.about.ge - 1)
    if field.about.le is not None:
        assert not accepted(field.name, field.about.le + 1)


@pytest.mark.parametrize("field", TABLE, ids=lambda field: field.name)
def test_choices_and_releases_are_those_of_the_table(field: ParamField) -> None:
    schema, setting = SCHEMA[field.name], SETTINGS[field.name]
    choices = [word for part in schema.get("anyOf", [schema]) for word in part.get("enum", [part.get("const")]) if word]
    assert choices == list(field.choices)
    told = schema["description"]
    assert (f"From release {setting.since} on." in told) is (setting.since is not None)
    assert (f"Up to release {setting.until}." in told) is (setting.until is not None)


def test_choices_are_those_that_the_linter_takes() -> None:
    known = {"batching_strategy": BATCHING, "batch_scheduler_policy": POLICIES, "decoding_mode": DECODING_MODES}
    known["triton_backend"] = BACKENDS
    for name, words in known.items():
        (field,) = (each for each in TABLE if each.name == name)
        assert set(field.choices) <= set(words)


# ------------------------------------------------------------------------------------- settings a toolchain has not


OF_TENSORRT_LLM = [
    *(
        (f"repository.{each.name}", value)
        for each in TABLE
        if each.name not in EMBEDDED
        # A default has no effect, so one matrix may name it for several toolchains; some have no other value.
        for value in [value for value in examples(each) if value != DEFAULTS.get(each.name)][:1]
    ),
    ("repository.parameters", {"any": 1}),
    ("repository.triton_parameters", {"tensorrt_llm": {"any": 1}}),
    ("repository.triton_max_batch_size", 2),
    ("repository.preferred_batch_size", [2]),
    ("repository.instance_kinds", {"preprocessing": "KIND_GPU"}),
    ("repository.llm_args", {"any": 1}),
    ("build.tokens_per_block", 64),
    ("quantize.options", {"awq_block_size": 64}),
    ("serve.options", {"num_postprocess_workers": 2}),
    ("serve.frontend", "trtllm_serve"),
    ("quantize.kv_cache_precision", "fp8"),
]


@pytest.mark.parametrize(("path", "value"), OF_TENSORRT_LLM, ids=lambda value: value if isinstance(value, str) else "")
def test_the_embedded_toolchain_refuses_what_it_does_not_have_by_name(path: str, value: object) -> None:
    asked = replace(fabricated.cell(), settings=trtllm_cells.settings_of({path: value}))
    reason = toolchains.load("embedded").infeasible(asked, MACHINE)
    assert reason is not None
    assert reason.startswith(f"settings.{path}")


def test_the_embedded_toolchain_takes_its_own() -> None:
    own = {f"repository.{each.name}": examples(each)[-1] for each in TABLE if each.name in EMBEDDED}
    for changes in ({}, own, {"build.max_num_tokens": 64}, {"repository.timeout_s": 5.0, "build.retries": 1}):
        asked = replace(fabricated.cell(), settings=trtllm_cells.settings_of(changes))
        assert toolchains.load("embedded").infeasible(asked, MACHINE) is None


@pytest.mark.parametrize(
    ("path", "value"), [("build.tokens_per_block", 64), ("quantize.options", {"awq_block_size": 64})]
)
def test_the_pytorch_lane_refuses_options_of_engines(path: str, value: object) -> None:
    reason = trtllm_cells.infeasible(trtllm_cells.cell(toolchain=trtllm_cells.PYTORCH, settings={path: value}))
    assert reason is not None
    assert reason.startswith(f"settings.{path}")
