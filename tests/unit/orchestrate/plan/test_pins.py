"""Models whose hub may not be asked: planned as in their recipes, where a plan is all that is wanted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_cells import cell, infeasible
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.errors import DownloadError, MatrixError
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.models.hub import hugging_face
from trtllm_pipeline.orchestrate.plan.pins import Pins

HUB = {"hugging_face": "some/model", "revision": "main"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hugging_face, "offline_by_environment", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def listed(*sources: Any) -> Cell:
    found = cell(recipe={"sources": [*sources]})
    return replace(found, recipe={name: value for name, value in found.recipe.items() if name != "source"})


def test_a_plan_is_made_without_asking(caplog: pytest.LogCaptureFixture) -> None:
    pins = Pins(None, guess=True)
    for name in ("some/model", "another/model"):
        assert pins.pin(listed({**HUB, "hugging_face": name})).recipe["source"]["hugging_face"] == name
    assert caplog.messages == ["offline mode: models that are not on this machine are planned as in their recipes"]


def test_what_is_to_run_must_be_there() -> None:
    with pytest.raises(DownloadError, match="offline mode forbids requests to Hugging Face"):
        Pins(None, guess=False).pin(listed(HUB))


def test_a_folder_that_is_not_there_is_no_reason_to_guess(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="nothing"):
        Pins(None, guess=True).pin(listed({"local": str(tmp_path / "nothing")}))


def test_a_data_set_that_cannot_be_read_now_is_planned_as_new(caplog: pytest.LogCaptureFixture) -> None:
    asked = listed(HUB)
    assert Pins(None, guess=True).digest("hub:org/rows", asked) == ("hub:org/rows", "unknown")
    assert caplog.messages == ["hub:org/rows cannot be read now, it is planned as if it were new"]
    with pytest.raises(DownloadError, match="org/rows is not on this machine"):
        Pins(None, guess=False).digest("hub:org/rows", asked)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (
            "cnn_dailymail",
            "hub:abisee/cnn_dailymail/3.0.0 is this data set on the Hub. For calibration, set column",
        ),
        ("org/rows", "hub:ORGANIZATION/NAME is a data set on the Hub"),
    ],
)
def test_a_data_set_that_is_no_file_says_how_to_name_one_of_the_hub(name: str, way: str) -> None:
    with pytest.raises(MatrixError) as error:
        Pins(None, guess=True).digest(name, listed(HUB))
    assert way in str(error.value.hint)


PHI3 = {"hugging_face": "some/phi3", "revision": "b" * 40}
CODE = {"configuration_phi3.py": "0" * 64}


def phi3(source: dict[str, str], trusted: dict[str, str], **recipe: Any) -> Cell:
    found = listed(source)
    settings = {**found.settings, "download": {**found.settings["download"], "trust_remote_code": {"model": trusted}}}
    known = {**found.recipe, "family": "phi3", **recipe}
    return replace(found, recipe=known, settings=settings)


@pytest.mark.parametrize(
    ("trusted", "release", "said"),
    [
        ({}, "0.10.0", "which is not trusted yet"),
        (CODE, "0.10.0", None),
        (
            {"configuration_phi3.py": "1" * 64},
            "0.10.0",
            "is not the file that settings.download.trust_remote_code names",
        ),
        ({}, "0.11.0", None),
        ({}, "0.10.0,transformers==4.41.0", None),
        ({}, "0.10.0,transformers=4.40.2", "transformers supports it from 4.41.0 on, this is 4.40.2"),
    ],
)
def test_code_that_a_recipe_lists_needs_no_hub(trusted: dict[str, str], release: str, said: str | None) -> None:
    pinned = Pins(None, guess=True).pin(phi3(PHI3, trusted, code_files=CODE))
    assert pinned.recipe["code"] == {"files": CODE, "page": f"https://huggingface.co/some/phi3/tree/{'b' * 40}"}
    machine = parse(f"tensorrt_llm=={release},sm=90,gpu_memory_gib=80")
    reason = pinned.reason or infeasible(pinned, machine)
    assert (reason is None) if said is None else said in str(reason)


def test_the_code_of_another_source_or_without_a_list_is_unknown() -> None:
    for recipe in ({}, {"code_files": CODE, "sources": [{**PHI3, "revision": "c" * 40}, PHI3]}):
        assert Pins(None, guess=True)._code_of(phi3(PHI3, {}), {"source": PHI3, "sources": [PHI3], **recipe}) is None
