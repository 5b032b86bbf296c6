from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from trtllm_pipeline.base.errors import MatrixError
from trtllm_pipeline.orchestrate.matrix import document, yaml_reader
from trtllm_pipeline.orchestrate.matrix.document import key_text, nearest, parse, read


def faults_of(text: str) -> list[str]:
    with pytest.raises(MatrixError) as caught:
        parse(text, "f")
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-7", -7),
        ("+7", 7),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("0b1", "0b1"),
        ("~", None),
        ("Null", None),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("'12'", "12"),
        ('"null"', "null"),
        ("2048,1024", "2048,1024"),
        ("[2048,1024]", [2048, 1024]),
        ("{a: }", {"a": None}),
        ("|\n  12\n", "12\n"),
        ("- 1\n- a: [x]\n", [1, {"a": ["x"]}]),
        ("{yes: 1, 4: 2, null: 3}", {"yes": 1, "4": 2, "null": 3}),
        ("a: &x [1]\nb: *x\n", {"a": [1], "b": [1]}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    data = parse(text, "f").data
    assert data == value
    assert type(data) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: is empty"),
        ("# only a comment\n", "f: is empty"),
        ("a: 0123", "f:1: 0123 starts with a zero"),
        ("a: .inf", "f:1: .inf is not a finite number"),
        ("a: 1e999", "f:1: 1e999 is not a finite number"),
        (f"a: {'9' * 401}", "f:1: a number of 401 digits is too long"),
        ("a: 1\nb: 2\na: 3", "f:3: the key 'a' is given twice, first on line 1"),
        ("a: !!python/object:os.system x", "f:1: tags are not allowed: tag:yaml.org,2002:python/object:os.system"),
        ("a: !x y", "f:1: tags are not allowed"),
        ("a: {<<: *b}", "merge keys"),
        ("a: *b", "f:1: *b refers to nothing"),
        ("a: &a [*a]", "f:1: *a refers to nothing"),
        ("[a]: 1", "f:1: a key must be plain text"),
        ("a: 1\n---\nb: 1", "f:2: a second document starts here"),
        ("a:\n \tb: 1", "f:2: is not valid YAML: the line starts with a tab; indent with spaces"),
        ("a: [1", "f:1: is not valid YAML"),
        ("a: 'x", "is not valid YAML"),
        ("a: \x07", "is not valid YAML"),
        ("a: \ud800", "f: is not UTF-8 text"),
        ("[" * 500, "f:1: is nested deeper than"),
        ("[" * 5000, "f:1: is nested deeper than"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    assert any(message in fault for fault in faults_of(text)), faults_of(text)


def test_all_faults_of_a_file_come_at_once() -> None:
    assert len(faults_of("a: 01\nb: !x 1\na: .nan\nc: *d\n")) == 5


def test_the_pure_python_parser_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: [1, no, 'x', 1e-3]\nb:\n  c: 0x10\n  d: |\n    t\n"
    fast = parse(text, "f")
    monkeypatch.setattr(yaml_reader, "_LOADER", yaml.SafeLoader)
    slow = parse(text, "f")
    assert (fast.data, fast.origins) == (slow.data, slow.origins)


def test_aliases_cannot_blow_up() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    assert "expands to more than" in faults_of("\n".join(lines))[0]


def test_lines_of_values() -> None:
    found = parse("a: 1\nb:\n  - x\n  - c: 2\n", "f")
    assert {path: origin.line for path, origin in found.origins.items()} == {
        (): 1,
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 1): 4,
        ("b", 1, "c"): 4,
    }
    assert str(found.fault(("b", 1, "missing"), "m")) == "f:4: b[1].missing: m"


def test_json_keeps_lines_and_its_escapes(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"a": "\U0001f600 \\ud83d\\ude00", "b": 1}, indent=4))
    found = read(path)
    assert found.data == {"a": "\U0001f600 \\ud83d\\ude00", "b": 1}
    assert found.fault(("b",), "m").line == 3


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(path).data == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: \xff\n", "m.yaml:2: is not UTF-8 text"),
        ("a: 1".encode("utf-16"), "m.yaml:1: is not UTF-8 text"),
        (b" " * (document.MAX_BYTES + 1), "m.yaml: is larger than 4 MiB"),
        (None, "m.yaml: is a directory"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "m.yaml"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(MatrixError, match=message):
        read(path)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(MatrixError, match=r"there is no such file; did you mean '.*/quickstart.yaml'"):
        read(tmp_path / "quickstrat.yaml")
    with pytest.raises(MatrixError, match=r"there is no such file$"):
        read(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(MatrixError, match="cannot be read"):
        read(tmp_path / "a\0b")


def test_names() -> None:
    assert nearest("precison", ["precision", "model"]) == "; did you mean 'precision'?"
    assert nearest("qwen", ["qwen2", "qwen3", "llama"]) == "; did you mean one of qwen2, qwen3?"
    assert nearest("awq", ["int4_awq", "fp16", "w4a8_awq"]) == "; did you mean one of int4_awq, w4a8_awq?"
    assert nearest("BF16", ["bf16", "fp16"]) == "; did you mean 'bf16'?"
    assert nearest("mymodle", ["MyModel", "other"]) == "; did you mean 'MyModel'?"
    assert nearest("q", [f"q{number}" for number in range(9)]).endswith("q6, q7, ...?")
    assert nearest("zzz", ["b", "a"]) == "; known are a, b"
    assert nearest("zzz", map(str, range(100))) == ""
    assert key_text(("a", 0, "b", "c", 1)) == "a[0].b.c[1]"
