from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.matrix_files import Write
from trtllm_pipeline.show.cli.app import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "--format", "json")[1])


def test_init_writes_a_matrix_that_works_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    assert run(capsys, "matrix", "init", str(path))[0] == 0
    assert f"pipeline matrix show {path}" in path.read_text()
    assert run(capsys, "matrix", "check", str(path))[:2] == (0, f"{path}: 3 cells\n")
    path.write_text("mine")
    code, _, err = run(capsys, "matrix", "init", str(path))
    assert code == 2
    assert "already exists" in err
    assert "--force" in err
    assert path.read_text() == "mine"
    assert run(capsys, "matrix", "init", str(path), "--force")[0] == 0
    assert path.read_text() != "mine"


def test_init_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "matrix", "init", str(tmp_path / "no" / "m.yaml"))
    assert code == 2
    assert "cannot be written" in err


def test_check_reads_every_file(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write()
    bad = good.with_name("bad.yaml")
    bad.write_text(good.read_text().replace('"precision"', '"precison"', 1))
    code, out, err = run(capsys, "matrix", "check", str(bad), str(good))
    assert code == 2
    assert out == f"{good}: 32 cells\n"
    assert "did you mean 'precision'" in err
    result = run_json(capsys, "matrix", "check", str(bad), str(good), "--set", "axes.max_batch_size=[1]")
    assert [(each["valid"], each["cells"]) for each in result["files"]] == [(False, 0), (True, 16)]
    assert {tuple(fault) for fault in result["files"][0]["faults"]} == {("path", "line", "key", "message")}


def test_show(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(axes={"precision": ["fp16", "fp8"]}))
    code, out, _ = run(capsys, "matrix", "show", path, "--cells", "small/*/tp1pp1/bs4", "--toolchain", "embedded")
    assert code == 0
    load = "128 in, 32 out, 1/4 in flight, 32 requests"
    assert out.splitlines()[0].split(maxsplit=1) == ["small/fp16/tp1pp1/bs4/isl128-osl32", load]
    starts = {line.index(word) for line in out.splitlines() for word in ("128 in,", "can never") if word in line}
    assert len(starts) == 1, "aligned"
    assert "  can never work: the recipe small lists only" in out.splitlines()[2]
    cells = run_json(capsys, "matrix", "show", path, "--cells", "small/fp16", "--set", "settings.perf.requests=7")[
        "cells"
    ]
    assert len(cells) == 8
    assert cells[0]["settings"]["perf"]["requests"] == 7
    assert cells[0]["load"] == "128 in, 32 out, 1/4 in flight, 7 to 12 requests"
    assert cells[0]["reason"] is None
    assert run(capsys, "matrix", "show", path, "--cells", "large")[0] == 2


def test_show_names_toolchains_that_differ(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"model": ["qwen3-8b"], "precision": ["bf16", "int4_awq"], "parallel": ["tp1"], "max_batch_size": [4]}
    machine = "1xH200,tensorrt_llm==1.2"
    _, out, _ = run(capsys, "matrix", "show", str(write(axes=axes)), "--assume", machine)
    for line in out.splitlines():
        assert line.endswith(", tensorrt_llm_pytorch" if "/int4_awq/" in line else ", tensorrt_llm")
    _, out, _ = run(capsys, "matrix", "show", str(write(axes={**axes, "precision": ["bf16"]})), "--assume", machine)
    assert "tensorrt_llm" not in out


@pytest.mark.parametrize("kind", ["matrix", "recipe"])
def test_schema(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, out, _ = run(capsys, "matrix", "schema", "--kind", kind)
    assert code == 0
    assert json.loads(out)["title"] == f"trtllm-pipeline {kind}"


def test_recipes(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    listed = run_json(capsys, "models", "list")["recipes"]
    every = ["tensorrt_llm", "tensorrt_llm_pytorch", "embedded"]
    small = {"name": "small", "summary": "a small model", "family": "llama", "license": "MIT", "toolchains": every}
    assert small in listed
    serving = {recipe["name"]: recipe["toolchains"] for recipe in listed}
    assert serving["smollm2-135m-instruct"] == every
    assert serving["gpt-oss-20b"] == every[1:2]
    assert serving["llava-onevision-qwen2-7b"] == every[:1]
    assert [name for name, toolchains in serving.items() if not toolchains] == ["internvl3-8b", "llava-1.5-7b"]
    shown = run(capsys, "models", "list")[1]
    assert shown.count("(not by TensorRT-LLM or the embedded toolchain; a plan gives the reason)") == 2
    assert re.search(r"^small-2 +a small model$", shown, re.MULTILINE)
    assert run_json(capsys, "models", "show", "small")["num_hidden_layers"] == 6
    assert "note: >-" in run(capsys, "models", "show", "smollm2-135m-instruct")[1]
    code, _, err = run(capsys, "models", "show", "smollm2-135m")
    assert code == 2
    assert "did you mean 'smollm2-135m-instruct'" in err


def test_show_for_an_assumed_machine(capsys: pytest.CaptureFixture[str]) -> None:
    show = ("matrix", "show", "nightly", "--cells", "*/fp8/*")
    assert {cell["reason"] for cell in run_json(capsys, *show)["cells"]} == {None}
    cells = run_json(capsys, *show, "--assume", "T4,tensorrt_llm==1.2")["cells"]
    assert cells
    assert all("SM 75" in cell["reason"] for cell in cells), cells


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("1.9", "planned like 1.4"),
        ("0.5", "plans need 0.8 or newer"),
    ],
)
def test_an_unknown_release_is_a_warning(
    write: Write, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, release: str, words: str
) -> None:
    assert run(capsys, "matrix", "show", str(write()), "--assume", "H100,tensorrt_llm==1.2")[0] == 0
    assert not caplog.messages
    run(capsys, "matrix", "show", str(write()), "--assume", f"H100,tensorrt_llm=={release}")
    assert caplog.messages == [f"TensorRT-LLM {release}.0 is unknown (known: 0.8 to 1.4); {words}"]


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("1.3.0rc15", None),
        ("1.3.0rc16", "not on PyPI; nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc16 has it, or build it from source"),
        ("1.3.0rc20", "not on PyPI; nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc20 has it, or build it from source"),
        ("1.3.0rc22.post1", None),
        ("1.3.0", "was never published: 1.3 has only release candidates, up to 1.3.0rc29"),
        ("1.4.0rc1", None),
    ],
)
def test_a_release_that_pip_cannot_install_is_a_warning(
    write: Write, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, release: str, words: str | None
) -> None:
    run(capsys, "matrix", "show", str(write()), "--assume", f"H100,tensorrt_llm=={release}")
    assert words in " ".join(caplog.messages) if words else not caplog.messages
