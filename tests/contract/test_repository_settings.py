"""One set of settings for repositories: what a matrix takes, what the templates are filled with, what toolchains have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from tests.unit import fabricated, lanes
from tests.unit.conftest import MACHINE
from trtllm_pipeline.config.models import Repository, Section
from trtllm_pipeline.toolchains import base as toolchains
from trtllm_pipeline.toolchains.embedded import _REPOSITORY_SETTINGS as EMBEDDED
from trtllm_pipeline.toolchains.tensorrt_llm import llmapi
from trtllm_pipeline.toolchains.tensorrt_llm.templates import BY_NAME, SETTINGS, Setting

OTHER_KEYS = {"parameters", "llm_args"}
"""Of the matrix: they are no settings themselves."""
OF_ALL_STAGES = set(Section.model_fields)
FIELDS = {name: field for name, field in Repository.model_fields.items() if name not in OF_ALL_STAGES | OTHER_KEYS}
SCHEMA = Repository.model_json_schema()["properties"]
WRONG: dict[str, Any] = {"bool": "x", "int": "x", "float": "x", "str": 5, "ints": "x"}


def accepted(name: str, value: object) -> bool:
    try:
        Repository.model_validate_json(json.dumps({name: value}))
    except ValidationError:
        return False
    return True


def examples(setting: Setting) -> list[Any]:
    """Values that the setting takes."""
    if setting.choices:
        return list(setting.choices)
    if setting.type == "bool":
        return [True, False]
    if setting.type == "float":
        return [0.5, *([setting.most] if setting.most is not None else [])]
    if setting.type == "int":
        return [int(setting.least or 1), 7]
    return [[1, 2]] if setting.type == "ints" else ["some text"]


def test_a_matrix_has_every_setting_of_the_templates_and_no_other() -> None:
    assert FIELDS.keys() == BY_NAME.keys()
    assert len(SETTINGS) == len(BY_NAME)
    assert set(EMBEDDED) < BY_NAME.keys()
    assert set(llmapi.SETTINGS) < BY_NAME.keys()


@pytest.mark.parametrize("name", BY_NAME)
def test_defaults_agree(name: str) -> None:
    """Those that every toolchain has are written out; the others are null, for the release's own or the table's."""
    default = FIELDS[name].get_default()
    if name in EMBEDDED:
        assert default == BY_NAME[name].default
        assert default is not None
    else:
        assert default is None


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_values_that_one_takes_the_other_takes(setting: Setting) -> None:
    for value in examples(setting):
        assert accepted(setting.name, value), value
        assert setting.text(value)
    assert not accepted(setting.name, WRONG[setting.type])
    if setting.choices:
        assert not accepted(setting.name, "something else")
    if setting.least is not None and setting.type in {"int", "float"}:
        assert not accepted(setting.name, setting.least - 1)
    if setting.most is not None:
        assert not accepted(setting.name, setting.most + 1)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_choices_and_releases_are_those_of_the_table(setting: Setting) -> None:
    schema = SCHEMA[setting.name]
    choices = [word for part in schema.get("anyOf", [schema]) for word in part.get("enum", [part.get("const")]) if word]
    assert choices == list(setting.choices)
    told = schema["description"]
    assert (f"From release {setting.since} on." in told) is (setting.since is not None)
    assert (f"Up to release {setting.until}." in told) is (setting.until is not None)


# ------------------------------------------------------------------------------------- settings a toolchain has not


OF_TENSORRT_LLM = [
    *((f"repository.{name}", examples(setting)[0]) for name, setting in BY_NAME.items() if name not in EMBEDDED),
    ("repository.parameters", {"any": 1}),
    ("repository.llm_args", {"any": 1}),
    ("build.tokens_per_block", 64),
    ("quantize.options", {"awq_block_size": 64}),
    ("serve.options", {"num_postprocess_workers": 2}),
    ("serve.frontend", "trtllm_serve"),
    ("quantize.kv_cache_precision", "fp8"),
]


@pytest.mark.parametrize(("path", "value"), OF_TENSORRT_LLM, ids=lambda value: value if isinstance(value, str) else "")
def test_the_embedded_toolchain_refuses_what_it_does_not_have_by_name(path: str, value: object) -> None:
    asked = replace(fabricated.cell(), settings=lanes.settings_of({path: value}))
    reason = toolchains.load("embedded").infeasible(asked, MACHINE)
    assert reason is not None
    assert reason.startswith(f"settings.{path}")


def test_the_embedded_toolchain_takes_its_own() -> None:
    own = {f"repository.{name}": examples(BY_NAME[name])[-1] for name in EMBEDDED}
    for changes in ({}, own, {"build.max_num_tokens": 64}, {"repository.timeout_s": 5.0, "build.retries": 1}):
        asked = replace(fabricated.cell(), settings=lanes.settings_of(changes))
        assert toolchains.load("embedded").infeasible(asked, MACHINE) is None


@pytest.mark.parametrize(
    ("path", "value"), [("build.tokens_per_block", 64), ("quantize.options", {"awq_block_size": 64})]
)
def test_the_pytorch_lane_refuses_options_of_engines(path: str, value: object) -> None:
    reason = lanes.infeasible(lanes.cell(toolchain=lanes.PYTORCH, settings={path: value}))
    assert reason is not None
    assert reason.startswith(f"settings.{path}")
