"""Damaged model directories: whatever is wrong in them ends in words. Seeded; failures repeat."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from trtllm_pipeline.base.errors import PipelineError
from trtllm_pipeline.base.files.digest import digest_file
from trtllm_pipeline.models.hub import local
from trtllm_pipeline.tensorrt.embedded import gguf_file, random_model
from trtllm_pipeline.tensorrt.embedded.architecture import read_config
from trtllm_pipeline.tensorrt.embedded.models.text import Text
from trtllm_pipeline.tensorrt.embedded.quantize import PRECISIONS
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights

VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), 1.5),
    *("", "x", "\u00e9" * 50, "\ud800", "\0", "../x", "a" * 5000),
    *([], {}, [[]], [None], {"a": 1}, [1] * 100, ["a", "b", "c"], {"content": []}),
]
HEADERS = [b"[" * 100_000, b'{"a":' * 5000, b"\xff" * 50, b"{}", b"[]", b"null", b'{"a":{}}', b'{"a":1,"a":2}']
LINKS = ["/etc/passwd", "/dev/zero", "nothing", "config.json", ".", "/proc/self/environ"]


def spoil_json(chance: random.Random, path: Path) -> None:
    value = json.loads(path.read_text())
    for _ in range(chance.choice([1, 1, 2, 4])):
        here = value
        while isinstance(here, (dict, list)) and here:
            key = chance.choice(list(here)[:60]) if isinstance(here, dict) else chance.randrange(min(60, len(here)))
            if not isinstance(here[key], (dict, list)) or not here[key] or chance.random() < 0.4:
                if chance.random() < 0.3:
                    del here[key]
                else:
                    here[key] = chance.choice(VALUES)
                break
            here = here[key]
    path.write_text(json.dumps(value))


def spoil_header(chance: random.Random, path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header[chance.choice([name for name in header if name != "__metadata__"])]
    entry[chance.choice(list(entry))] = chance.choice([*VALUES, [0, 2**63], [-5, 10], [10, 5], ["a", "b"], "F8_E4M3"])
    text = chance.choice([json.dumps(header).encode()] * 4 + HEADERS)
    told = chance.choice([len(text)] * 6 + [2**63, 0, len(text) + 5])
    path.write_bytes(told.to_bytes(8, "little") + text + content[8 + length :])


def spoil(chance: random.Random, folder: Path) -> str:
    """Damage one file; returns what was done."""
    path = chance.choice(sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink()))
    kind = chance.choice(["value"] * 6 + ["text", "flip", "cut", "gone", "link", "pipe"])
    if kind == "value" and path.suffix in {".json", ".safetensors"}:
        with suppress(ValueError, RecursionError, AttributeError, TypeError, LookupError):  # spoilt before
            (spoil_json if path.suffix == ".json" else spoil_header)(chance, path)
    elif kind == "text":
        path.write_bytes(chance.choice(HEADERS))
    elif kind in {"link", "pipe"}:
        path.unlink()
        if kind == "link":
            path.symlink_to(chance.choice([*LINKS, path.name]))
        else:
            os.mkfifo(path)
    elif kind == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        for _ in range(chance.choice([1, 10, 100]) if kind == "flip" and content else 0):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content[: chance.randrange(len(content) + 1)] if kind == "cut" else content)
    return f"{path.name}: {kind}"


def look_at(folder: Path) -> None:
    """What planning, downloading, converting and serving read of a model's directory."""
    local.contents(folder, digest_file)


def read_all(folder: Path) -> None:
    config, weights = read_config(folder), Weights(folder)
    for plan in gguf_file.plan_tensors(folder, config, weights, PRECISIONS["fp16"])[:2]:
        weights[plan.source]
    gguf_file.read_tokenizer(folder, config)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    random_model.write_model(folder)
    (folder / "LICENSE").write_text("free")
    return folder


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 8))])
def test_a_damaged_folder_ends_in_words(good: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    for number in range(25):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        done = [spoil(chance, folder) for _ in range(chance.choice([1, 1, 2]))]
        for use in (look_at, read_all, Text):
            try:
                use(folder)
                ends["fine"] += 1
            except PipelineError:
                ends["told"] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}, case {number}: {done}") from error
        shutil.rmtree(folder)
    assert ends["fine"] > 5
    assert ends["told"] > 20
