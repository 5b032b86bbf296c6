from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import DownloadError
from trtllm_pipeline.models.hub.verify import check_folder, tensors

GOOD = {
    "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
}


def write(path: Path, header: object, size: int = 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path / "model.safetensors", GOOD)
    return tmp_path


def test_a_whole_folder_passes(folder: Path) -> None:
    check_folder(folder, "m")
    found = tensors(folder, "model.safetensors")
    assert {name: (each.dtype, list(each.shape)) for name, each in found.tensors.items()} == {
        "a": ("F16", [2, 3]),
        "b": ("F32", []),
    }
    assert (found.tensors["a"].end, found.tensors["b"].begin) == (found.path.stat().st_size - 4,) * 2


@pytest.mark.parametrize(
    ("header", "size", "words"),
    [
        (GOOD, 15, "tensors end at byte"),
        (GOOD, 17, "tensors end at byte"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [8, 12]}}, 12, "expected to start at 12"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [13, 17]}}, 17, "expected to start at 12"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [12, 11]}}, 11, "expected to start at 12"),
        ({"a": {**GOOD["a"], "shape": [2, 4]}}, 12, "which does not match"),
        ({"a": {"dtype": "F16", "shape": [6]}}, 12, "cannot read its header"),
        ({"a": {**GOOD["a"], "data_offsets": "no"}}, 12, "cannot use"),
        ({"a": {**GOOD["a"], "data_offsets": [0, None]}}, 12, "cannot read its header"),
        ([], 16, "not a JSON object"),
        (b"{not json", 16, "cannot read its header"),
        (b'{"a": 1, "a": 2}', 16, "occurs twice"),
        (b"[" * 100_000, 16, "cannot read its header"),
    ],
)
def test_a_damaged_header_is_refused(folder: Path, header: object, size: int, words: str) -> None:
    write(folder / "model.safetensors", header, size)
    with pytest.raises(DownloadError, match=words):
        check_folder(folder, "m")


@pytest.mark.parametrize("content", [b"", b"short", (10**12).to_bytes(8, "little") + b"{}" + bytes(20)])
def test_a_header_beyond_the_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DownloadError, match="does not fit a file"):
        check_folder(folder, "m")


def test_no_damage_escapes_as_another_error(folder: Path) -> None:
    good = (folder / "model.safetensors").read_bytes()
    chance = random.Random(0)
    refused = 0
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            bad[chance.randrange(len(good) - 16)] = chance.choice(b'"{}[]:,0129-.eax\\ \xff\x00')
        (folder / "model.safetensors").write_bytes(bad[: chance.choice([len(bad), chance.randrange(len(bad))])])
        try:
            check_folder(folder, "m")
        except DownloadError:
            refused += 1
    assert refused > 400


@pytest.mark.parametrize("kind", ["F4", "F3"])
def test_types_of_fewer_bits_than_a_byte_and_of_the_future_pass(folder: Path, kind: str) -> None:
    write(folder / "model.safetensors", {"a": {"dtype": kind, "shape": [4], "data_offsets": [0, 2]}}, 2)
    check_folder(folder, "m")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{", "not JSON"),
        ("config.json", None, "it is missing"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer.json", None, "no tokenizer"),
        ("model.safetensors", None, "no safetensors weights"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
        ("model.safetensors.index.json", "{}", "not a safetensors index"),
        ("model.safetensors.index.json", "[]", "not a JSON object"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "x.safetensors"}}', "incomplete"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../x"}}', "outside the model's directory"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "model.safetensors"}}', "contains b, which the index"),
        ("model.safetensors.index.json", '{"weight_map": {"z": "model.safetensors"}}', "places z in it"),
    ],
)
def test_what_is_missing_or_not_what_its_name_says(folder: Path, name: str, content: str | None, words: str) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(DownloadError, match=words):
        check_folder(folder, "m")
