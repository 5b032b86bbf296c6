"""Schemas of the LLM API's YAML files: their compact form, what they find in a file, and which one a machine has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.trtllm_cells import PYTORCH, cell, infeasible, machine
from trtllm_pipeline.base.machine.model import Machine, TensorRTLLM
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm import installed, llm_args
from trtllm_pipeline.tensorrt.trtllm.llm_args import FILE, Schema, compact

DOCUMENT: Final[dict[str, Any]] = {
    "$defs": {
        "Mode": {"enum": ["fast", "slow"], "type": "string"},
        "First": {"properties": {"kind": {"const": "first"}, "size": {"type": "integer"}}, "type": "object"},
        "Second": {"properties": {"kind": {"const": "second"}, "next": {"$ref": "#/$defs/Second"}}, "type": "object"},
    },
    "properties": {
        "switch": {"type": "boolean"},
        "share": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": 0.9},
        "path": {"anyOf": [{"type": "string"}, {"type": "string", "format": "path"}]},
        "mode": {"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]},
        "part": {"oneOf": [{"$ref": "#/$defs/First"}, {"$ref": "#/$defs/Second"}]},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "pairs": {
            "type": "array",
            "items": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        },
        "by_name": {"type": "object", "additionalProperties": {"type": "number"}},
        "inner": {"type": "object", "title": "Inner", "properties": {"a": {"type": ["string", "null"]}}},
        "free": {"type": "object", "additionalProperties": True},
        "anything": {},
        "live": {"not": {}},
    },
}
SCHEMA: Final = Schema("1.9.0", "a test", compact(DOCUMENT))


def test_a_json_schema_becomes_names_types_and_choices() -> None:
    assert SCHEMA.classes[FILE] == {
        "anything": "any",
        "by_name": {"map": "number"},
        "free": "object",
        "inner": "Inner",
        "live": "never",
        "mode": [{"enum": ["fast", "slow"]}, "null"],
        "pairs": {"list": {"list": ["integer", "string"]}},
        "part": ["First", "Second"],
        "path": "string",
        "share": ["number", "null"],
        "sizes": {"list": "integer"},
        "switch": "boolean",
    }
    assert SCHEMA.classes["Inner"] == {"a": ["string", "null"]}
    assert SCHEMA.classes["Second"] == {"kind": {"enum": ["second"]}, "next": "Second"}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"type": "object"},
        {"properties": {"a": {"$ref": "#/$defs/Absent"}}},
        {"properties": {"a": {"type": "decimal"}}},
    ],
)
def test_what_is_no_schema_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"is not a JSON schema|does not define|is not known"):
        compact(document)


@pytest.mark.parametrize(
    "settings",
    [
        {"switch": True, "share": 1, "mode": None, "sizes": [], "free": {"x": 1}, "anything": [1]},
        {"share": "0.5", "switch": "on", "sizes": ["4"]},  # pydantic converts texts
        {"part": {"kind": "second", "next": {"kind": "second"}}, "inner": {"a": None}, "pairs": [[1, "x"]]},
        {"part": {"size": 4}, "by_name": {"a": 1.5}},
    ],
)
def test_a_file_that_fits(settings: dict[str, Any]) -> None:
    assert SCHEMA.problems(settings) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"swich": True}, "swich: no such name; did you mean switch?"),
        ({"other": True}, "other: no such name"),
        ({"switch": 1}, "switch: 1 is not of type boolean"),
        ({"share": True}, "share: true is not of type number or null"),
        ({"mode": "quick"}, 'mode: "quick" is not "fast" or "slow" or null'),
        ({"part": {"kind": "third"}}, 'part.kind: "third" is not one of first, second'),
        ({"part": {"kind": "second", "size": 4}}, "part.size: no such name"),
        ({"part": {"kind": "second", "next": {"nex": 4}}}, "part.next.nex: no such name; did you mean next?"),
        ({"part": 4}, "part: 4 is not of type First or of type Second"),
        ({"sizes": [1, 2.5]}, "sizes[1]: 2.5 is not of type integer"),
        ({"sizes": "4,4"}, 'sizes: "4,4" is not a list'),
        ({"by_name": {"a": None}}, "by_name.a: null is not of type number"),
        ({"live": 1}, "live: 1 is not for a file"),
    ],
)
def test_a_problem_has_its_place_and_what_was_expected(settings: dict[str, Any], problem: str) -> None:
    assert SCHEMA.problems(settings) == [problem]


def test_a_release_has_the_newest_schema_of_its_line_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Schema(release, "", {FILE: {}}) for release in ("1.4.0rc0", "1.4.0rc3", "1.5.0"))
    monkeypatch.setattr(llm_args, "recorded", lambda: rows)
    found = {
        release: llm_args.of_release(release) for release in ("1.3.0rc29", "1.4.0rc1", "1.4.0rc3", "1.4.1", "1.6.0")
    }
    assert {release: each and each.release for release, each in found.items()} == {
        "1.3.0rc29": None,
        "1.4.0rc1": "1.4.0rc0",
        "1.4.0rc3": "1.4.0rc3",
        "1.4.1": "1.4.0rc3",
        "1.6.0": None,
    }


def test_a_plan_refuses_what_the_schema_of_the_release_has_not_and_warns_for_later_ones() -> None:
    for frontend in ("triton", "trtllm_serve"):
        settings = {"serve.frontend": frontend, "repository.llm_args": {"kv_cache_config": {"onboard": True}}}
        asked = cell(toolchain=PYTORCH, settings=settings)
        for release in ("1.3.0rc29", "1.4.0rc0"):
            said = infeasible(asked, machine(release))
            assert f"kv_cache_config.onboard: no such name, by the schema of TensorRT-LLM {release}" in said
        for release, known in (
            ("1.3.0rc24", "1.3.0rc20 and 1.3.0rc29"),
            ("1.4.0rc1", "1.4.0rc1"),  # known in part
            ("1.4.0rc3", "1.4.0rc1"),
        ):
            assert infeasible(asked, machine(release)) is None
            (warning,) = toolchains.caveats([asked], machine(release))
            assert f"kv_cache_config.onboard: no such name, by what is known of TensorRT-LLM {known}" in warning
        assert toolchains.caveats([asked], machine("1.1.0")) == []
    removed = cell(toolchain=PYTORCH, settings={"repository.llm_args": {"backend": "_autodeploy"}})
    assert '"_autodeploy" is not "pytorch"' in str(infeasible(removed, machine("1.4.0rc0")))


def with_package(folder: Path, release: str, document: Any) -> Machine:
    """A machine with a package that has a schema, in an environment of its own."""
    site = folder / "lib/python3.12/site-packages"
    (site / f"tensorrt_llm-{release}.dist-info").mkdir(parents=True)
    (site / f"tensorrt_llm-{release}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {release}\n", encoding="utf-8"
    )
    schema = site / llm_args.INSTALLED
    schema.parent.mkdir(parents=True)
    schema.write_text(json.dumps(document), encoding="utf-8")
    return Machine(1, "CPU", tensorrt_llm=TensorRTLLM(release, python=str(folder / "bin/python")))


def test_the_schema_of_an_installation_takes_precedence(tmp_path: Path) -> None:
    there = with_package(tmp_path, "1.4.0rc7", DOCUMENT)
    found = llm_args.of_machine(there)
    assert (found.release, found.classes) == ("1.4.0rc7", SCHEMA.classes)
    assert llm_args.of_machine(machine("1.4.0rc7")) == llm_args.of_release("1.4.0rc1")
    without = Machine(1, "CPU", tensorrt_llm=TensorRTLLM("1.1.0", python=sys.executable))
    assert llm_args.of_machine(without) is None


def test_a_schema_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert llm_args.of_machine(with_package(tmp_path, "1.5.0", ["no schema"])) is None


def test_doctor_compares_the_installed_schema_with_the_record(tmp_path: Path) -> None:
    def compared(folder: str, release: str, document: Any) -> installed.InstalledComparison:
        machine_there = with_package(tmp_path / folder, release, document)
        *_, found = installed.compare(machine_there, (), engines=False)
        assert found.name == installed.LLM_API
        return found

    other = compared("a", "1.4.0rc1", DOCUMENT)
    assert "kv_cache_config" in other.gone
    assert "by_name" in other.new
    assert other.command == (str(tmp_path / "a/lib/python3.12/site-packages" / llm_args.INSTALLED),)
    assert compared("b", "1.5.0", DOCUMENT).reason == "no schema of this line of releases is recorded"
    assert "the package has no" in str(compared("c", "1.4.0rc2", None).reason)


def test_an_older_release_has_nothing_to_compare() -> None:
    old = Machine(1, "CPU", tensorrt_llm=TensorRTLLM("1.2.1", python=sys.executable))
    assert [each.name for each in installed.compare(old, (), engines=False)] == ["trtllm-serve"]


def test_the_words_of_a_change() -> None:
    before = Schema("1", "", {FILE: {"a": "string", "b": "integer", "c": ["string", "null"]}})
    after = Schema("2", "", {FILE: {"a": "string", "c": {"enum": ["x"]}, "d": "any"}})
    assert before.compared(after) == (("b",), ("d",), ('c is "x", was of type string or null',))
