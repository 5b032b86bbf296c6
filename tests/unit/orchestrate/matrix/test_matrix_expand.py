from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.matrix_files import RECIPE, Write
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.errors import MatrixError, UsageError
from trtllm_pipeline.orchestrate.matrix.expand import expand, judged, select, with_control, written_out
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix


def cells_of(path: Path, *sets: str, toolchain: str = "embedded") -> tuple[Cell, ...]:
    return expand(load_matrix(path, sets), default_toolchain=toolchain)


def ids(cells: tuple[Cell, ...]) -> list[str]:
    return [cell.id for cell in cells]


def faults_of(path: Path, *sets: str) -> list[str]:
    with pytest.raises(MatrixError) as caught:
        cells_of(path, *sets)
    return [str(fault).replace(f"{path.parent}/", "") for fault in caught.value.faults]


ONE: dict[str, Any] = {
    "model": ["small"],
    "precision": ["fp16"],
    "parallel": ["tp1"],
    "max_batch_size": [4],
    "lengths": ["128,32"],
}
ADDED = {"model": "small", "precision": "int8_wo", "max_batch_size": 64, "lengths": "1,1"}


def test_product_and_ids(write: Write) -> None:
    cells = cells_of(write())
    assert len(cells) == len({cell.id for cell in cells}) == 32
    assert cells[0].id == "small/fp16/tp1pp1/bs4/isl128-osl32"
    assert cells[-1].id == "small-2/int8_wo/tp2pp2/bs8/isl2048-osl1024"
    last = cells[-1]
    assert (last.model, last.toolchain, last.precision, last.tp, last.pp) == ("small-2", "embedded", "int8_wo", 2, 2)
    assert (last.max_batch_size, last.isl, last.osl, last.reason) == (8, 2048, 1024, None)
    assert last.recipe["num_hidden_layers"] == 6
    assert last.recipe["sources"] == [{"local": "./small"}]


SIDE_BY_SIDE = "settings.perf.exclusive=gpu"


def test_the_first_that_is_measured_beside_others_is_measured_alone_as_well(write: Write) -> None:
    cells = cells_of(write(axes={**ONE, "precision": ["fp16", "int8_wo"]}), SIDE_BY_SIDE, toolchain="tensorrt_llm")
    *same, alone = with_control(cells, lambda _cell: 2)
    assert tuple(same) == cells
    assert alone.id == f"alone:{cells[0].id}"
    assert alone.settings["perf"] == {**cells[0].settings["perf"], "exclusive": "control"}
    assert {**alone.settings, "perf": None} == {**cells[0].settings, "perf": None}
    assert ids(select((*cells, alone), [cells[0].id])) == [cells[0].id], "a cell's id is its own still"
    assert ids(select((*cells, alone), ["fp16"])) == [cells[0].id]
    assert ids(select((*cells, alone), ["alone:*"])) == [alone.id]
    assert ids(select((*cells, alone), ["!alone:*"])) == ids(cells)
    assert with_control(cells, lambda _cell: 2, lambda cell: "no" if cell.precision == "fp16" else None) == cells, (
        "one cannot work"
    )


@pytest.mark.parametrize(
    ("axes", "setting", "gpus", "toolchain"),
    [
        ({"precision": ["fp16", "int8_wo"]}, "settings.perf.exclusive=machine", 8, "tensorrt_llm"),
        ({"precision": ["fp16", "int8_wo"]}, SIDE_BY_SIDE, 1, "tensorrt_llm"),
        ({"precision": ["fp16", "int8_wo"]}, SIDE_BY_SIDE, 8, "embedded"),
        ({"precision": ["fp16", "int8_wo"], "parallel": ["tp2"]}, SIDE_BY_SIDE, 2, "tensorrt_llm"),
        ({}, SIDE_BY_SIDE, 8, "tensorrt_llm"),
    ],
)
def test_there_is_no_control_where_nothing_can_be_beside(
    write: Write, axes: dict[str, Any], setting: str, gpus: int, toolchain: str
) -> None:
    cells = cells_of(write(axes={**ONE, **axes}), setting, toolchain=toolchain)
    assert with_control(cells, lambda _cell: gpus) == cells


def test_ids_do_not_depend_on_other_cells(write: Write) -> None:
    everything = set(ids(cells_of(write())))
    some = ids(cells_of(write(axes={"precision": ["int8_wo"], "max_batch_size": [8]}, add=[ADDED])))
    assert set(some) - everything == {"small/int8_wo/tp1pp1/bs64/isl1-osl1"}
    assert len(some) == 9


def test_parallel_is_tp1_without_that_axis(folder: Path) -> None:
    path = folder / "m.yaml"
    path.write_text(json.dumps({"name": "m", "axes": {key: ONE[key] for key in ONE if key != "parallel"}}))
    assert ids(cells_of(path)) == ["small/fp16/tp1pp1/bs4/isl128-osl32"]


def test_toolchain_axis(write: Write) -> None:
    cells = cells_of(write(axes={**ONE, "toolchain": ["auto", "tensorrt_llm"]}))
    assert ids(cells) == [
        "small/fp16/tp1pp1/bs4/isl128-osl32/embedded",
        "small/fp16/tp1pp1/bs4/isl128-osl32/tensorrt_llm",
    ]
    assert [cell.toolchain for cell in cells] == ["embedded", "tensorrt_llm"]


def test_axes_over_settings(write: Write) -> None:
    cells = cells_of(
        write(
            axes={
                **ONE,
                "settings.perf.concurrency": [[1], [1, 8]],
                "settings.smoke.prompt": ["Hi", "Où est-il?*", None],
                "settings.repository.decoupled": [True],
            }
        )
    )
    assert ids(cells)[:2] == [
        "small/fp16/tp1pp1/bs4/isl128-osl32/concurrency=1/prompt=Hi/decoupled=true",
        "small/fp16/tp1pp1/bs4/isl128-osl32/concurrency=1/prompt=O-est-il/decoupled=true",
    ]
    assert cells[3].settings["perf"]["concurrency"] == [1, 8]
    assert cells[4].settings["smoke"]["prompt"] == "Où est-il?*"
    assert cells[5].settings["smoke"]["prompt"] is None
    assert len({cell.id for cell in cells}) == 6


def test_equal_last_words_of_axes_are_told_apart(write: Write) -> None:
    axes = {**ONE, "settings.perf.max_tokens": [4], "settings.accuracy.max_tokens": [8]}
    assert ids(cells_of(write(axes=axes)))[0].endswith("/perf.max_tokens=4/accuracy.max_tokens=8")


@pytest.mark.parametrize(
    ("axis", "values"), [("settings.smoke.prompt", ["a?", "a*"]), ("toolchain", ["embedded", "auto"])]
)
def test_values_that_look_the_same_in_ids_are_a_fault(write: Write, axis: str, values: list[str]) -> None:
    (fault,) = faults_of(write(axes={**ONE, axis: values}))
    assert f"axes.{axis}[1]: two values have the same name in cell ids" in fault


def test_long_values_are_shortened_in_ids_and_stay_apart(write: Write) -> None:
    cells = cells_of(write(axes={**ONE, "settings.smoke.prompt": ["x" * 100 + "a", "x" * 100 + "b", "??"]}))
    segments = [cell.id.rpartition("prompt=")[2] for cell in cells]
    assert len(set(segments)) == 3
    assert max(map(len, segments)) < 50


# ------------------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ([{"model": "small"}], 16),
        ([{"model": "small*"}, {"model": "small"}], 0),
        ([{"model": "small-?"}], 16),
        ([{"model": "small", "precision": "fp16", "parallel": "tp1", "max_batch_size": 4, "lengths": "128, 32"}], 31),
        ([{"parallel": "tp2pp2", "max_batch_size": [4, 8]}], 16),
        ([{"parallel": "tp1pp1"}, {"lengths": "*,32"}], 8),
    ],
)
def test_exclude(write: Write, exclude: list[dict[str, Any]], left: int) -> None:
    path = write(exclude=exclude)
    if left:
        assert len(cells_of(path)) == left
    else:
        assert "exclude: leaves no cell" in faults_of(path)[0]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"precision": "fp8"}, "precision: 'fp8' matches no value of precision; known are fp16, int8_wo"),
        ({"precision": ["fp16", "fp8"]}, "precision[1]: 'fp8' matches no value"),
        ({"max_batch_size": 16}, "max_batch_size: 16 matches no value"),
        ({"parallel": "tp4"}, "parallel: 'tp4' matches no value"),
        ({"parallel": "4"}, "parallel: '4' matches no value"),
    ],
)
def test_rules_that_match_nothing_are_faults(write: Write, rule: dict[str, Any], message: str) -> None:
    faults = faults_of(write(exclude=[rule], override=[{"where": rule, "settings": {"perf": {"requests": 1}}}]))
    assert [fault for fault in faults if message in fault] == faults
    assert len(faults) == 2
    assert all(fault.startswith("matrix.yaml:") for fault in faults)


def test_an_empty_rule_overrides_everything_and_excludes_nothing(write: Write) -> None:
    path = write(override=[{"where": {}, "settings": {"perf": {"requests": 9}}}])
    assert {cell.settings["perf"]["requests"] for cell in cells_of(path)} == {9}
    assert "exclude[0]: names no axis" in faults_of(write(exclude=[{}]))[0]


ON_ENGINES: dict[str, Any] = {"toolchain": ["embedded", "tensorrt_llm"], **ONE}


@pytest.mark.parametrize(
    ("release", "requests", "left"),
    [(None, None, 2), ("0.15.0", 1, 2), ("0.16.0", None, 2), ("0.20.0rc3", 2, 2), ("1.2.0", 2, 1)],
)
def test_rules_of_a_release_are_for_the_machines_that_have_it(
    write: Write, release: str | None, requests: int | None, left: int
) -> None:
    path = write(
        axes=ON_ENGINES,
        override=[
            {"where": {"release": "<0.16"}, "settings": {"perf": {"requests": 1}}},
            {"where": {"release": ">=0.19", "precision": "fp16"}, "settings": {"perf": {"requests": 2}}},
            {"where": {"release": ">=99", "toolchain": "embedded"}, "settings": {"perf": {"requests": 3}}},
        ],
        exclude=[{"release": ">=1.2", "lengths": "*"}],
    )
    loaded = load_matrix(path)
    cells = expand(loaded, default_toolchain="embedded", release=release)
    assert len(cells) == left
    found = {cell.toolchain: cell.settings["perf"]["requests"] for cell in cells}
    assert found["embedded"] is None, "the embedded toolchain has no release"
    assert found.get("tensorrt_llm", requests) == requests
    # A lock file holds over releases as its matrix does.
    matrix = written_out(loaded, default_toolchain="embedded", release=release)
    assert [rule["where"]["release"] for rule in matrix["override"]] == ["<0.16", ">=0.19"]
    assert matrix["exclude"] == [{"lengths": ["*"], "release": ">=1.2"}]


@pytest.mark.parametrize(
    ("release", "specifiers", "holds"),
    [
        ("1.3.0rc3", ">=1.3", True),
        ("1.3.0rc3", "<1.3", False),
        ("1.3.0rc3", "==1.3.*,!=1.3.1", True),
        ("1.3.0rc3", "<1.3.0rc20", True),
        ("1.3.0rc20", "<1.3.0rc20", False),
        ("1.3.0rc20", ">=1.3.0rc20,<1.4", True),
        ("1.3.0", "<1.3.0rc20", False),
        ("0.17.0.dev2024121700", "<0.17", False),
        ("0.19.0.post1", ">0.19", False),
    ],
)
def test_a_candidate_counts_as_its_release_unless_one_is_named(
    write: Write, release: str, specifiers: str, holds: bool
) -> None:
    rule = {"where": {"release": specifiers}, "settings": {"perf": {"requests": 1}}}
    loaded = load_matrix(write(axes={**ON_ENGINES, "toolchain": ["tensorrt_llm"]}, override=[rule]))
    (found,) = expand(loaded, default_toolchain="embedded", release=release)
    assert (found.settings["perf"]["requests"] == 1) is holds


def test_what_a_release_lacks_makes_no_rule_of_its_cells_wrong(write: Write) -> None:
    rule = {"where": {"toolchain": "tensorrt_llm", "precision": "fp16"}, "settings": {"perf": {"requests": 1}}}
    path = write(axes=ON_ENGINES, override=[rule], exclude=[{"release": "<0.16"}])
    for release, count in (("0.15.0", 1), ("0.16.0", 2)):
        cells = expand(load_matrix(path), default_toolchain="embedded", release=release)
        assert len(cells) == count
        matrix = written_out(load_matrix(path), default_toolchain="embedded", release=release)
        assert len(matrix["override"]) == 1


def test_rules_of_a_release_are_checked_wherever_they_stand(write: Write) -> None:
    rule = {"release": "<0.16", "precision": "fp8"}
    (fault,) = faults_of(write(override=[{"where": rule, "settings": {}}]))
    assert "override[0].where.precision: 'fp8' matches no value of precision" in fault
    (fault,) = faults_of(write(exclude=[{"release": "0.16"}]))
    assert "exclude[0].release: '0.16' is not a version specifier" in fault
    (fault,) = faults_of(write(axes={"release": ["<0.16"]}))
    assert "axes.release" in fault


def test_written_out_makes_the_same_cells_elsewhere(folder: Path, write: Write, tmp_path: Path) -> None:
    (folder / "models" / "m").mkdir(parents=True)
    config = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"), 8)
    config |= {"vocab_size": 9, "max_position_embeddings": 9}
    (folder / "models" / "m" / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    path = write(
        axes={"model": ["small", "models/m"], "settings.perf.concurrency": [[1], [1, 8]]},
        exclude=[
            {"precision": ["fp16", "int8_wo"], "max_batch_size": 4, "model": "models/m"},
            {"precision": "int8_wo"},
            {"settings.perf.concurrency": [[1, 8]], "parallel": "tp2pp2"},
        ],
        add=[{**ADDED, "model": "models/m", "settings.perf.concurrency": [1]}],
        override=[
            {"where": {"model": "models/m"}, "settings": {"perf": {"requests": 3}, "build": {"use_x": "enable"}}},
            {"where": {"precision": "fp16", "max_batch_size": 8}, "settings": {"perf": {"requests": 4}}},
        ],
    )
    sets = ["axes.precision=[fp16]", "settings.perf.repeats=5", "recipes.small.parameters=7"]
    loaded = load_matrix(path, sets)
    cells = expand(loaded, default_toolchain="embedded")
    elsewhere = tmp_path / "lock"
    (elsewhere / "recipes").mkdir(parents=True)
    for recipe in loaded.recipes.values():
        (elsewhere / "recipes" / f"{recipe['name']}.yaml").write_text(json.dumps(recipe))
    matrix = written_out(loaded, default_toolchain="embedded")
    (elsewhere / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False))
    again = cells_of(elsewhere / "matrix.yaml")
    assert [replace(cell, base_dir="") for cell in again] == [replace(cell, base_dir="") for cell in cells]
    assert len(cells) == 19


def test_rules_that_match_no_combination_are_faults(write: Write) -> None:
    rule = {"model": "small", "precision": "bf16"}
    faults = faults_of(
        write(
            add=[{**ADDED, "model": "small-2", "precision": "bf16"}],
            exclude=[rule],
        )
    )
    assert faults[0].endswith("exclude[0]: matches no cell")
    path = write(add=[{**ADDED, "model": "small-2", "precision": "bf16"}], override=[{"where": rule, "settings": {}}])
    assert faults_of(path)[0].endswith("override[0].where: matches no cell")


def test_axes_changed_on_the_command_line_excuse_rules(write: Write) -> None:
    path = write(
        exclude=[{"precision": "fp16", "max_batch_size": 8}],
        override=[{"where": {"precision": "fp16"}, "settings": {"perf": {"requests": 1}}}],
        add=[ADDED],
    )
    assert len(cells_of(path, "axes.precision=[int8_wo]", "axes.max_batch_size=[64]", "axes.lengths=['1,1']")) == 4


def test_add(write: Write) -> None:
    cells = cells_of(write(axes=ONE, add=[ADDED, {**ADDED, "parallel": "tp2pp2", "precision": "fp16"}]))
    assert ids(cells)[1:] == ["small/int8_wo/tp1pp1/bs64/isl1-osl1", "small/fp16/tp2pp2/bs64/isl1-osl1"]


def test_added_cells_are_not_excluded(write: Write) -> None:
    cells = cells_of(write(exclude=[{"precision": "int8_wo"}], add=[ADDED]))
    assert [cell.precision for cell in cells].count("int8_wo") == 1


def test_an_added_cell_that_is_there_already_is_a_fault(write: Write) -> None:
    there = {"model": "small", "precision": "fp16", "max_batch_size": 4, "lengths": "128,32"}
    faults = faults_of(write(add=[there, ADDED, ADDED]))
    assert [fault.partition(": ")[2] for fault in faults] == [
        "add[0]: is already a cell of the matrix",
        "add[2]: is already a cell of the matrix",
    ]


def test_an_added_cell_needs_all_axes(write: Write) -> None:
    with pytest.raises(MatrixError) as caught:
        load_matrix(write(axes={"settings.perf.requests": [1]}, add=[{"model": "small"}]))
    keys = {fault.key for fault in caught.value.faults if fault.message == "is required"}
    assert keys == {f"add[0].{key}" for key in ("precision", "max_batch_size", "lengths", "settings.perf.requests")}


def test_too_many_cells(write: Write) -> None:
    axes = {"max_batch_size": list(range(1, 1000)), "lengths": [f"{n},1" for n in range(1, 1000)]}
    assert "axes: the axes have" in faults_of(write(axes=axes))[0]


# --------------------------------------------------------------------------------------------------------- settings


def test_settings_in_order(write: Write) -> None:
    cells = cells_of(
        write(
            settings={"perf": {"requests": 1, "repeats": 2}, "quantize": {"calibration": {"samples": 5}}},
            override=[
                {"where": {"precision": "fp16"}, "settings": {"perf": {"requests": 3}, "build": {"use_x": "enable"}}},
                {"where": {"model": "small"}, "settings": {"perf": {"requests": 4}}},
                {"where": {"max_batch_size": 8}, "settings": {"quantize": {"calibration": {"seed": 9}}}},
            ],
        ),
        "settings.perf.warmup_requests=0",
    )
    by_id = {cell.id: cell.settings for cell in cells}
    plain = by_id["small-2/int8_wo/tp1pp1/bs4/isl128-osl32"]
    assert (plain["perf"]["requests"], plain["perf"]["repeats"], plain["perf"]["warmup_requests"]) == (1, 2, 0)
    assert plain["perf"]["concurrency"] is None
    assert plain["build"] == {"timeout_s": None, "retries": None, "max_num_tokens": None}
    both = by_id["small/fp16/tp1pp1/bs8/isl128-osl32"]
    assert both["perf"]["requests"] == 4
    assert both["build"]["use_x"] == "enable"
    assert both["quantize"]["calibration"] == {**plain["quantize"]["calibration"], "seed": 9}  # type: ignore[dict-item]


def test_the_command_line_wins_over_overrides(write: Write) -> None:
    path = write(override=[{"where": {"model": "small"}, "settings": {"perf": {"requests": 3}}}])
    assert {cell.settings["perf"]["requests"] for cell in cells_of(path, "settings.perf.requests=7")} == {7}


def test_null_overrides_a_value(write: Write) -> None:
    path = write(
        settings={"perf": {"max_tokens": 5}},
        override=[{"where": {"model": "small"}, "settings": {"perf": {"max_tokens": None}}}],
    )
    assert {(cell.model, cell.settings["perf"]["max_tokens"]) for cell in cells_of(path)} == {
        ("small", None),
        ("small-2", 5),
    }


def test_equal_settings_and_recipes_are_shared(write: Write) -> None:
    cells = cells_of(write(override=[{"where": {"model": "small"}, "settings": {"perf": {"requests": 3}}}]))
    assert len({id(cell.settings) for cell in cells}) == 2
    assert len({id(cell.settings["serve"]) for cell in cells}) == 1
    assert len({id(cell.recipe) for cell in cells}) == 2


def test_notes_of_recipes_reach_no_stage(folder: Path, write: Write) -> None:
    (folder / "recipes" / "small.yaml").write_text(RECIPE.replace("{local: ./small}", "{local: ./small, note: hm}"))
    assert cells_of(write(axes=ONE))[0].recipe["sources"] == [{"local": "./small"}]


# ------------------------------------------------------------------------------------------------------ feasibility


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ({"precision": ["fp8"]}, "the recipe small lists only fp16, int8_wo for embedded, not fp8"),
        ({"parallel": ["tp3"]}, "8 attention heads cannot be divided over tp3"),
        ({"parallel": ["tp1pp7"]}, "pp7: small has 6 layers, and each stage needs one"),
        ({"parallel": ["tp4"]}, None),  # 2 key/value heads are repeated
        ({"parallel": ["tp8pp6"]}, None),
        ({"lengths": ["4000,97"]}, "4000 input and 97 output tokens are more than the model's 4096 positions"),
        ({"lengths": ["4000,96"]}, None),
    ],
)
def test_cells_that_cannot_work_are_kept_with_their_reason(
    write: Write, axes: dict[str, Any], reason: str | None
) -> None:
    assert [cell.reason for cell in cells_of(write(axes={**ONE, **axes}))] == [reason]


def test_experts_are_dealt_where_a_recipe_has_them(folder: Path, write: Write) -> None:
    asked = write(axes={**ONE, "parallel": ["tp8", "tp8ep4"]})
    plain, dealt = cells_of(asked)
    assert (plain.id, plain.ep, plain.reason) == ("small/fp16/tp8pp1/bs4/isl128-osl32", 1, None)
    assert (dealt.id, dealt.tp, dealt.ep) == ("small/fp16/tp8pp1ep4/bs4/isl128-osl32", 8, 4)
    assert dealt.reason == "ep4: small is not a mixture of experts, its recipe has no num_experts"
    (folder / "recipes" / "small.yaml").write_text(f"{RECIPE}num_experts: 8\n")
    assert [cell.reason for cell in cells_of(asked)] == [None, None]
    (folder / "recipes" / "small.yaml").write_text(f"{RECIPE}num_experts: 6\n")
    assert [cell.reason for cell in cells_of(asked)] == [None, "6 experts cannot be distributed evenly over ep4"]


def test_key_value_heads(folder: Path, write: Write) -> None:
    recipe = RECIPE.replace("num_attention_heads: 8", "num_attention_heads: 12").replace(
        "num_key_value_heads: 2", "num_key_value_heads: 4"
    )
    (folder / "recipes" / "small.yaml").write_text(recipe)
    reason = "4 key/value heads can be neither divided over nor repeated to tp6"
    assert [cell.reason for cell in cells_of(write(axes={**ONE, "parallel": ["tp6"]}))] == [reason]


def test_unlisted_toolchains_are_left_to_themselves(folder: Path, write: Write) -> None:
    path = write(axes={**ONE, "precision": ["nvfp4"]})
    assert cells_of(path, toolchain="tensorrt_llm")[0].reason is None
    (folder / "recipes" / "small.yaml").write_text(RECIPE.replace("{embedded: [", "{tensorrt_llm: [], embedded: ["))
    assert cells_of(path, toolchain="tensorrt_llm")[0].reason == (
        "tensorrt_llm does not have small: its recipe lists no precision for it"
    )


def test_the_caller_may_know_more_reasons(write: Write) -> None:
    asked = []

    def feasibility(cell: Cell) -> str | None:
        asked.append(cell.precision)
        return "no GPU" if cell.precision == "int8_wo" else None

    loaded = load_matrix(write(axes={**ONE, "precision": ["fp16", "int8_wo", "fp8"]}))
    cells = [judged(cell, feasibility) for cell in expand(loaded, default_toolchain="embedded")]
    assert [cell.reason for cell in cells][:2] == [None, "no GPU"]
    assert asked == ["fp16", "int8_wo"], "a cell the recipe rules out needs no second opinion"


# -------------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ([], 32),
        (["*"], 32),
        (["small"], 16),
        (["small*"], 32),
        (["small-2/fp16/*"], 8),
        (["small-2/fp16"], 8),
        (["small-2/fp16/"], 8),
        (["*/*/tp2pp2"], 16),
        (["*/*/*/bs4/isl128-osl32"], 8),
        (["*/*/*/bs4/isl128-osl32/*"], 8),
        (["small/fp16/tp1pp1/bs4/isl128-osl32"], 1),
        (["small/fp16", "small-2/int8_wo", "small/fp16"], 16),
        (["small", "!*/*/tp1pp1"], 8),
        (["!small"], 16),
        (["small-[0-9]/*/*/bs?"], 16),
    ],
)
def test_select(write: Write, patterns: list[str], count: int) -> None:
    chosen = select(cells_of(write()), patterns)
    assert len(chosen) == len({cell.id for cell in chosen}) == count


def test_select_keeps_the_order(write: Write) -> None:
    cells = cells_of(write())
    assert select(cells, ["*/int8_wo", "*/fp16"]) == cells


def test_a_cell_by_the_name_that_tables_give_it(write: Write) -> None:
    cells = cells_of(write())
    found = select(cells, ["small-2/fp16/bs4"])
    assert found
    assert {(cell.model, cell.precision, "bs4" in cell.id.split("/")) for cell in found} == {("small-2", "fp16", True)}
    with pytest.raises(UsageError, match="'fp16/small' matches none"):
        select(cells, ["fp16/small"])


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("smal/fp16", "instead of 'smal', use small or small-2"),
        ("small/int8wo/*", "instead of 'int8wo', use int8_wo or fp16"),
        ("!small/*/tp1", "instead of 'tp1', use tp1pp1 or tp2pp2"),
        ("small/fp16/tp1pp1/bs4/isl128-osl32/embedded", "`pipeline matrix show FILE` lists the cells"),
        ("fp16/bs9", "instead of 'bs9', use bs8 or bs4"),
        ("int8_wo/*/bs9", "instead of 'bs9', use bs8 or bs4"),
        ("int8_wo/tp1pp1/*", "instead of 'int8_wo/tp1pp1/*', use '*/int8_wo/tp1pp1/*'"),
        ("fp16/small", "`pipeline matrix show FILE` lists the cells"),
        ("", "instead of '', use"),
        ("!", "instead of '', use"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(write: Write, pattern: str, hint: str) -> None:
    with pytest.raises(UsageError, match="matches none of the 32 cells") as caught:
        select(cells_of(write()), [pattern])
    assert (caught.value.hint or "").startswith(hint)


def test_nothing_left_is_an_error(write: Write) -> None:
    with pytest.raises(UsageError, match="also left out"):
        select(cells_of(write()), ["small", "!small*"])
