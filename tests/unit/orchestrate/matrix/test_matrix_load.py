from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.matrix_files import MATRIX, RECIPE, Write
from trtllm_pipeline.base.errors import MatrixError, UsageError
from trtllm_pipeline.orchestrate.matrix.document import canonical_parallel, parse_lengths, parse_parallel
from trtllm_pipeline.orchestrate.matrix.recipe_files import find_recipe, load_recipe
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix


def faults_of(path: Path, *sets: str) -> list[str]:
    with pytest.raises(MatrixError) as caught:
        load_matrix(path, sets)
    return [str(fault).replace(f"{path.parent}/", "") for fault in caught.value.faults]


def test_a_matrix_with_everything(write: Write) -> None:
    loaded = load_matrix(
        write(
            description="all of it",
            axes={"toolchain": ["auto"], "settings.perf.concurrency": [[1], [1, 8]]},
            exclude=[{"model": "small", "parallel": ["tp1"]}],
            add=[
                {
                    "model": "small",
                    "precision": "bf16",
                    "max_batch_size": 1,
                    "lengths": "1, 1",
                    "toolchain": "embedded",
                    "settings.perf.concurrency": [2],
                }
            ],
            override=[{"where": {"precision": "int8_wo"}, "settings": {"build": {"use_x": "enable"}}}],
            settings={"quantize": {"calibration": {"samples": 8}}},
        )
    )
    assert loaded.axes["parallel"] == ["tp1pp1", "tp2pp2"]
    assert loaded.added[0]["lengths"] == "1,1"
    assert loaded.recipes["small"]["num_hidden_layers"] == 6
    assert loaded.written["settings"]["quantize"]["calibration"] == {"samples": 8}
    assert loaded.defaults["quantize"]["calibration"]["data"] == "builtin:general"


YAML = """\
name: bad
axes:
  model: [small, smal]
  precison: [fp16]
  parallel: [tp1, tp0, tp1pp1]
  max_batch_size: ["4", true, 0]
  lengths: [2048,1024]
exclude: [{modle: small}]
override:
- where: {precision: fp16}
  settings: {perf: {concurency: [1]}, quantise: {}}
settings:
  serve: {host: 1}
  build: {a: {b: 1}}
  accuracy: {metrics: [exact, contain]}
"""


def test_all_faults_with_file_line_key_and_nearest_name(write: Write) -> None:
    faults = faults_of(write(YAML))
    expected = [
        "matrix.yaml:2: axes.precision: is required",
        "matrix.yaml:5: axes.parallel[1]: 'tp0' is not a valid parallelism",
        'matrix.yaml:6: axes.max_batch_size[0]: must be a whole number, not "4"',
        "matrix.yaml:6: axes.max_batch_size[1]: must be a whole number, not true",
        "matrix.yaml:6: axes.max_batch_size[2]: should be greater than or equal to 1, not 0",
        'matrix.yaml:7: axes.lengths[0]: must be text, not 2048, write each pair in quotes, such as "2048,512"',
        'matrix.yaml:7: axes.lengths[1]: must be text, not 1024, write each pair in quotes, such as "2048,512"',
        "matrix.yaml:11: override[0].settings.perf.concurency: unknown key; did you mean 'concurrency'?",
        "matrix.yaml:11: override[0].settings.quantise: unknown key; did you mean 'quantize'?",
        "matrix.yaml:13: settings.serve.host: must be text, not 1",
        "matrix.yaml:14: settings.build.a",
        "matrix.yaml:15: settings.accuracy.metrics[1]: \"contain\" is not allowed; did you mean 'contains'?",
        "matrix.yaml:4: axes.precison: unknown axis; did you mean 'precision'?",
        "matrix.yaml:8: exclude[0].modle: unknown axis; did you mean 'model'?",
        "matrix.yaml:3: axes.model[1]: there is no recipe 'smal'; did you mean 'small'? use a name from",
    ]
    for start in expected:
        assert any(fault.startswith(start) for fault in faults), (start, faults)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "matrix.yaml:1: must be a mapping of keys to values"),
        ("name: x\naxes: 3", "matrix.yaml:2: axes: must be a mapping of keys to values, not 3"),
        ("name: x\naxes: {model: small}", 'matrix.yaml:2: axes.model: must be a list, such as ["small"]'),
        (
            'name: x\naxes: {max_batch_size: "16, 64"}',
            "matrix.yaml:2: axes.max_batch_size: must be a list, such as [16, 64]",
        ),
        (
            'name: x\naxes: {precision: "bf16,fp8"}',
            'matrix.yaml:2: axes.precision: must be a list, such as ["bf16", "fp8"]',
        ),
        ('name: x\naxes: {lengths: "8,2"}', 'matrix.yaml:2: axes.lengths: must be a list, such as ["8,2"]'),
        ("name: x\naxes: {parallel: [2]}", "matrix.yaml:2: axes.parallel[0]: must be text, not 2, write tp2"),
        ("name: x\naxes: {model: []}", "matrix.yaml:2: axes.model: must not be empty"),
        ("name: ../x\naxes: {}", 'matrix.yaml:1: name: "../x" is not of the form'),
        ("name: x", "matrix.yaml:1: axes: is required"),
        ("name: x\nexclude: {}", "matrix.yaml:2: exclude: must be a list"),
    ],
)
def test_wrong_shapes(write: Write, text: str, message: str) -> None:
    assert any(fault.startswith(message) for fault in faults_of(write(text))), faults_of(write(text))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"parallel": ["tp1", "tp1pp1"]}, "axes.parallel[1]: the same value as axes.parallel[0]"),
        ({"max_batch_size": [4, 4]}, "axes.max_batch_size[1]: the same value"),
        ({"settings.perf.concurrency": [[1], [1]]}, "axes.settings.perf.concurrency[1]: the same value"),
        ({"settings.perf.concurrency": [1]}, "axes.settings.perf.concurrency[0]: must be a list, such as [1]"),
        ({"settings.perf.concurrancy": [[1]]}, "did you mean 'concurrency'"),
        ({"settings.perf": [{"requests": 1}]}, "axes.settings.perf[0]: is a mapping, name one setting to vary"),
        ({"settings.": [1]}, "unknown key"),
        ({"precision": ["fp61"]}, "\"fp61\" is not allowed; did you mean 'fp16'?"),
        ({"model": ["../../etc/passwd"]}, "there is no such file"),
        (
            {"model": ["https://huggingface.co/Qwen/Qwen3-8B"]},
            "a model is named by its repository: write Qwen/Qwen3-8B",
        ),
        ({"model": ["a b"]}, "there is no recipe 'a b'"),
    ],
)
def test_faults_of_axes(write: Write, axes: dict[str, Any], message: str) -> None:
    faults = faults_of(write(axes=axes))
    assert any(message in fault for fault in faults), faults


def test_an_axis_over_a_setting_is_the_only_place_that_sets_it(write: Write) -> None:
    path = write(
        axes={"settings.perf.requests": [1, 2]},
        settings={"perf": {"requests": 3, "repeats": 2}},
        override=[{"where": {"model": "small"}, "settings": {"perf": {"requests": 4}}}],
    )
    message = "settings.perf.requests is an axis, change axes.settings.perf.requests instead"
    faults = faults_of(path, "settings.perf.requests=5")
    assert [fault for fault in faults if message in fault] == faults
    assert len(faults) == 3
    assert faults[1].startswith("--set settings.perf.requests=5: ")


@pytest.mark.parametrize(
    ("setting", "messages"),
    [
        ("retry.oom.max_num_tokens=[a]", ['[0]: must be a whole number, not "a"']),
        ("retry.oom.max_num_tokens=[]", [": must not be empty"]),
        ("retry.oom.max_num_tokens=half", [": \"half\" is not allowed; did you mean 'halve'?", ": must be a list"]),
        ("speculative.method=egle3", [": \"egle3\" is not allowed; did you mean 'eagle3'?"]),
        ("quantize.calibration.data=hub:a/b/../c", ["must be a relative path"]),
        ("lora.adapter={none: a/b}", [".none: 'none' cannot be the name of an adapter"]),
        ("lora.adapter={sql: 3}", [".sql: must be text, not 3"]),
        ("lora.adapter={}", [": must not be empty"]),
        ("lora.adapter={a: x/y, b: x/y, c: x/y, d: x/y, e: x/y}", [": must not have more than 4"]),
        ("smoke.prompt={a: b}", [': must be text, not {"a": "b"}']),
    ],
)
def test_what_may_be_something_else_has_one_fault(write: Write, setting: str, messages: list[str]) -> None:
    with pytest.raises(MatrixError) as raised:
        load_matrix(write(), [f"settings.{setting}"])
    found = [str(fault) for fault in raised.value.faults]
    assert len(found) == len(messages)
    assert all(message in fault for message, fault in zip(messages, found, strict=True)), found


def test_rules_may_only_name_axes_there_are(write: Write) -> None:
    faults = faults_of(
        write(
            exclude=[{"toolchain": "embedded"}, {"settings.perf.requests": 1}],
            add=[{"model": "small", "precision": "fp16", "max_batch_size": 1, "lengths": "1,1", "batch": 1}],
        )
    )
    assert any("exclude[0].toolchain: the matrix has no axis toolchain" in fault for fault in faults)
    assert any("exclude[1].settings.perf.requests: unknown axis" in fault for fault in faults)
    assert any("add[0].batch: unknown axis" in fault for fault in faults)


# ------------------------------------------------------------------------------------------------------------ --set


def test_set(write: Write) -> None:
    loaded = load_matrix(
        write(),
        [
            "settings.perf.concurrency=[1, 8]",
            "settings.quantize.calibration.samples=3",
            "axes.precision=[bf16]",
            "axes.settings.perf.requests=[1, 2]",
            "recipes.small.sources.0.local=./other",
            "recipes.small-2.smoke.prompt=hello",
            "recipes.*.parameters=7",
            "name=renamed",
            "description=",
        ],
    )
    assert loaded.command_line == {
        "perf": {"concurrency": [1, 8]},
        "quantize": {"calibration": {"samples": 3}},
    }
    assert loaded.axes["precision"] == ["bf16"]
    assert loaded.axes_changed
    assert loaded.recipes["small"]["sources"][0]["local"] == "./other"
    assert loaded.recipes["small"]["smoke"] is None
    assert loaded.recipes["small-2"]["smoke"] is not None
    assert [recipe["parameters"] for recipe in loaded.recipes.values()] == [7, 7]
    assert loaded.written["name"] == "renamed"
    assert loaded.written["description"] is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "settings.perf.requests=two",
            "--set settings.perf.requests=two: settings.perf.requests: must be a whole number",
        ),
        (
            "settings.perv.requests=2",
            "--set settings.perv.requests=2: settings.perv: unknown key; did you mean 'perf'?",
        ),
        (
            "settings.perf.requests.x=2",
            "--set settings.perf.requests.x=2: settings.perf.requests: must be a whole number",
        ),
        ("axes.precision=fp16", '--set axes.precision=fp16: axes.precision: must be a list, such as ["fp16"]'),
        (
            "axes.tp=[1,2]",
            "axes.tp: unknown axis; tensor, pipeline and expert parallelism are one axis: parallel: [tp1, tp2,",
        ),
        ("axes.isl=[128]", "axes.isl: unknown axis; input and output lengths are one axis: lengths: "),
        ("recipes.small.family=qwen2.5", '"qwen2.5" is not of the form the model_type of config.json, such as qwen2'),
        ("axes.precission=[fp16]", "--set axes.precission=[fp16]: axes.precission: unknown axis; did you mean"),
        (
            "recipes.smal.parameters=1",
            "recipes.smal.parameters: this key starts with no model of the matrix; did you mean",
        ),
        ("recipes.small.params=1", "--set recipes.small.params=1: params: unknown key; did you mean 'parameters'?"),
        ("recipes.small.sources.4.local=x", "sources[4].local: this key does not exist"),
        ("recipes.small.sources.x=x", "this key does not exist"),
        ("recipes.small.name.x=x", "this key does not exist"),
        ("settings.perf.requests=[1", "--set settings.perf.requests=[1: is not valid YAML"),
        ("settings.perf.requests=01", "01 starts with a zero"),
        ("settings.download.trust_remote_code=true", "must be a mapping"),
        (f"settings.download.trust_remote_code={{small: {{../a.py: '{'0' * 64}'}}}}", '"../a.py" is not of the form'),
        ("settings.download.trust_remote_code={small: {a.py: '123'}}", '"123" is not of the form'),
    ],
)
def test_faults_of_set_name_the_argument(write: Write, argument: str, message: str) -> None:
    faults = faults_of(write(), argument)
    assert any(message in fault for fault in faults), faults
    assert all(fault.startswith(f"--set {argument}: ") for fault in faults)


@pytest.mark.parametrize(
    "argument", ["", "x", "=1", "exclude=[]", "settings=1", "settings.perf=1", "recipes.a=1", "axes="]
)
def test_what_cannot_be_set(write: Write, argument: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_matrix(write(), [argument])
    assert caught.value.hint


def test_names_of_recipes_may_hold_dots(folder: Path, write: Write) -> None:
    (folder / "recipes" / "small.2.yaml").write_text(RECIPE.replace("name: small", "name: small.2"))
    path = write(axes={"model": ["small", "small.2"]})
    loaded = load_matrix(path, ["recipes.small.2.parameters=9"])
    assert loaded.recipes["small.2"]["parameters"] == 9
    assert loaded.recipes["small"]["parameters"] is None


# ---------------------------------------------------------------------------------------------------------- recipes


def test_recipes_beside_the_matrix_come_before_the_shipped(folder: Path) -> None:
    shipped = find_recipe("tiny", folder)
    assert folder not in shipped.parents
    (folder / "tiny.yaml").write_text(RECIPE.replace("name: small", "name: tiny"))
    assert find_recipe("tiny", folder) == folder / "tiny.yaml"
    (folder / "recipes" / "tiny.yaml").write_text(RECIPE.replace("name: small", "name: tiny"))
    assert find_recipe("tiny", folder) == folder / "recipes" / "tiny.yaml"


def test_a_matrix_is_not_taken_for_the_recipe_of_its_name(folder: Path) -> None:
    path = folder / "tiny.yaml"
    path.write_text(json.dumps({**MATRIX, "name": "tiny", "axes": {**MATRIX["axes"], "model": ["tiny"]}}))
    assert load_matrix(path).recipes["tiny"]["family"] == "llama"
    assert find_recipe("tiny", folder) != path


@pytest.mark.parametrize("name", ["smal", "../recipes/small", "", "a/b", "/etc/passwd"])
def test_recipes_are_found_by_name_only(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="there is no recipe"):
        find_recipe(name, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: small", "name: large"), "recipes/small.yaml:1: name: must be 'small', as the file is called"),
        (("sources: [{local: ./small}]", "sources: []"), "recipes/small.yaml:5: sources: must not be empty"),
        (("{local: ./small}", "{}"), "sources[0]: needs exactly one of hugging_face, modelscope, package_index"),
        (("{local: ./small}", "{local: a, generated: llama}"), "sources[0]: needs exactly one of"),
        (("{local: ./small}", "{local: a, revison: b}"), "sources[0].revison: unknown key"),
        (("{local: ./small}", "{hugging_face: a/b, revison: b}"), "unknown key; did you mean 'revision'?"),
        (("{local: ./small}", "{hugging_face: ../b}"), 'sources[0].hugging_face: "../b" is not of the form'),
        (("{local: ./small}", "{package_index: a==1, sha256: xx, member: /etc}"), "sources[0].member: '/etc' must be"),
        (
            ("{local: ./small}", "{package_index: a==1, sha256: xx, member: a}"),
            'sources[0].sha256: "xx" is not of the form',
        ),
        (
            ("{local: ./small}", "{package_index: --index-url=evil}"),
            'package_index: "--index-url=evil" is not of the form',
        ),
        (("{local: ./small}", "{package_index: a==1}"), "sources[0].member: is required"),
        (
            ("sources: [{local: ./small}]", f"sources: [{{hugging_face: a/b}}]\ncode_files: {{a.py: {'f' * 64}}}"),
            "code_files: needs a first source on a hub with a commit as its revision",
        ),
        (("{local: ./small}", "{generated: llama, code: {}}"), "sources[0].code: unknown key"),
        (("{local: ./small}", "{generated: gpt}"), 'sources[0].generated: "gpt" is not allowed'),
        (
            ("{embedded: [fp16, int8_wo]}", "fp16"),
            "precisions: must be a list of precisions, or a list for each toolchain",
        ),
        (("{embedded: [fp16, int8_wo]}", "[fp16, fp16]"), "precisions: 'fp16' is given twice"),
        (("{embedded:", "{embeded:"), "did you mean 'embedded'?"),
        (("{local: ./small}", "{local: ./small, revision: b}"), "revision: cannot be combined with local"),
        (("num_hidden_layers: 6\n", ""), "recipes/small.yaml:1: num_hidden_layers: is required"),
    ],
)
def test_faults_of_recipes(folder: Path, write: Write, change: tuple[str, str], message: str) -> None:
    (folder / "recipes" / "small.yaml").write_text(RECIPE.replace(*change))
    faults = faults_of(write())
    assert any(message in fault for fault in faults), faults
    with pytest.raises(MatrixError):
        load_recipe(folder / "recipes" / "small.yaml")


CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "rope_scaling": None,
}


def test_a_local_folder_makes_its_own_recipe(folder: Path, write: Write) -> None:
    (folder / "models" / "My Model").mkdir(parents=True)
    (folder / "models" / "My Model" / "config.json").write_text(json.dumps(CONFIG))
    recipe = load_matrix(write(axes={"model": ["./models/My Model"]})).recipes["./models/My Model"]
    assert recipe["name"] == "My-Model"
    assert (recipe["family"], recipe["num_key_value_heads"], recipe["head_dim"]) == ("qwen3", 4, 16)
    assert recipe["eos_token_ids"] == [2]
    assert recipe["sources"] == [{"local": "./models/My Model"}]
    assert recipe["precisions"] is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "models/m/config.json: there is no such file"),
        ("{", "models/m/config.json:1: is not valid YAML"),
        ("[]", "models/m/config.json: num_hidden_layers: is required"),
        (json.dumps({**CONFIG, "num_attention_heads": 0}, indent=1), "config.json:4: num_attention_heads: should be"),
        (json.dumps({**CONFIG, "model_type": "x y"}), 'family: "x y" is not of the form'),
    ],
)
def test_faults_of_local_folders(folder: Path, write: Write, config: str | None, message: str) -> None:
    (folder / "models" / "m").mkdir(parents=True)
    if config is not None:
        (folder / "models" / "m" / "config.json").write_text(config)
    faults = faults_of(write(axes={"model": ["models/m"]}))
    assert any(message in fault for fault in faults), faults


def test_two_folders_of_one_name_are_a_fault(folder: Path, write: Write) -> None:
    for parent in ("a", "b"):
        (folder / parent / "m").mkdir(parents=True)
        (folder / parent / "m" / "config.json").write_text(json.dumps(CONFIG))
    assert (
        "axes.model[1]: has the same name in cell ids as a/m: m" in faults_of(write(axes={"model": ["a/m", "b/m"]}))[0]
    )


# ----------------------------------------------------------------------------------------------------------- models


def test_grammars() -> None:
    assert parse_parallel("tp4pp2") == (4, 2, 1, 1)
    assert parse_parallel("tp16") == (16, 1, 1, 1)
    assert parse_parallel("tp8pp2ep4") == (8, 2, 4, 1)
    assert parse_parallel("tp8dp8") == (8, 1, 8, 8)
    assert [canonical_parallel(text) for text in ("tp4", "tp4ep1", "tp4ep2")] == ["tp4pp1", "tp4pp1", "tp4pp1ep2"]
    for text in ("tp4dp2", "tp4ep1dp2", "tp4pp1ep4dp2"):
        assert canonical_parallel(canonical_parallel(text)) == canonical_parallel(text)
    assert canonical_parallel("tp4dp2") == "tp4pp1ep4dp2"
    assert canonical_parallel("tp4ep1dp2") == "tp4pp1ep1dp2"
    with pytest.raises(ValueError, match="ep3 must divide"):
        parse_parallel("tp4ep3")
    with pytest.raises(ValueError, match="dp3 must divide"):
        parse_parallel("tp4dp3")
    assert parse_lengths("2048, 1024") == (2048, 1024)
    for text in ("tp", "tp0", "pp2", "tp01", "TP1", "tp1pp0", "tp1 ", "tp1pp2x", "ep2", "tp4ep0", "tp4ep2pp2"):
        with pytest.raises(ValueError, match="parallelism"):
            parse_parallel(text)
    for text in ("1", "0,1", "1,0", "1;2", "1,2,3", " 1,2", "1,  2"):
        with pytest.raises(ValueError, match="pair of lengths"):
            parse_lengths(text)


def test_what_may_be_a_value_or_a_list_of_them(write: Write) -> None:
    build = {"a": {"b": 1}, "c": [], "d": ["x", ["y"]], "e": ["x", 1], "f": 2}
    faults = faults_of(write(settings={"build": build, "repository": {"parameters": {"q": [1]}}}))
    assert [fault.split(": ", 1)[1] for fault in faults] == [
        'settings.build.a: must be one value or a list of values, not {"b": 1}',
        "settings.build.c: must be one value or a list of values, not []",
        'settings.build.d[1]: must be one value, not ["y"]',
        "settings.repository.parameters.q: must be one value, not [1]",
    ]
