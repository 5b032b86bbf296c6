"""The deep examination's judgement: right answers pass, coarse ones too, and those of another computation never do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_pipeline.base.domain import CellId
from trtllm_pipeline.base.errors import MatrixError
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.models.files.tokenizer import read_tokenizer
from trtllm_pipeline.orchestrate.matrix.expand import expand
from trtllm_pipeline.orchestrate.matrix.models import PRECISIONS
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix
from trtllm_pipeline.orchestrate.results.report_file import CellResult, CellStatus
from trtllm_pipeline.show.proof import examination, material, reference_answers
from trtllm_pipeline.show.proof.findings import FindingStatus
from trtllm_pipeline.show.proof.reference_answers import Agreement, tolerance_nats
from trtllm_pipeline.tensorrt.embedded import families, random_model
from trtllm_pipeline.tensorrt.embedded.reference import Reference

LOOSEST = tolerance_nats("tensorrt_llm", "fp8")
"""Of what is no 4-bit arithmetic."""


QUICK = ("llama", "gpt2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    write(folder, *QUICK)
    return folder


def write(folder: Path, *these: str) -> None:
    material.write(folder, Machine(1, "CPU"), families=these, precisions=["fp16"], toolchain_names=["embedded"])


def nightly_but_quick_ones(these: Iterable[str]) -> Iterator[Any]:
    """Each makes a model."""
    yield from (pytest.param(each, marks=() if each in QUICK else pytest.mark.nightly) for each in these)


def said_by(model: Reference, folder: Path, family: str, out: Path) -> Agreement:
    """The agreement of what `model` says to the questions of a family."""
    tokenizer = read_tokenizer(folder / family)
    rows = [json.loads(line) for line in (folder / f"{family}.jsonl").read_text().splitlines()]
    for row in rows:
        row["answer"] = tokenizer.decode(model.generate(tokenizer.encode(row["input"]).ids, material.MAX_TOKENS))
    out.mkdir(exist_ok=True)
    (out / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return reference_answers.compare(out, folder / family)


@pytest.mark.thorough
@pytest.mark.parametrize("family", [*nightly_but_quick_ones(families.FAMILIES)])
def test_the_reference_agrees_with_itself(folder: Path, tmp_path: Path, family: str) -> None:
    write(folder, family)
    found = said_by(families.reference(folder / family), folder, family, tmp_path)
    assert (found.questions, found.tokens, found.favourites) == (8, 8 * material.MAX_TOKENS, 8 * material.MAX_TOKENS)
    assert (found.loss_nats, found.unreadable) == (0.0, ())


def test_weights_of_four_bits_say_the_same(folder: Path, tmp_path: Path) -> None:
    model = Reference.from_folder(folder / "llama")

    def rounded(values: np.ndarray) -> np.ndarray:
        scale = np.abs(values).max(axis=1, keepdims=True) / 7
        return (np.round(values / scale) * scale).astype(np.float32)

    four = {name: rounded(each) if "proj" in name and each.ndim == 2 else each for name, each in model.weights.items()}
    assert said_by(Reference(model.config, four), folder, "llama", tmp_path).loss_nats < 0.001


WRONG = {
    "rotary base": ("llama", lambda config, weights: (replace(config, rope_theta=100_000.0), weights)),
    "no biases": (
        "qwen2",
        lambda config, weights: (config, {name: each for name, each in weights.items() if not name.endswith("bias")}),
    ),
    "no key norms": (
        "qwen3",
        lambda config, weights: (
            config,
            {name: np.ones_like(each) if "k_norm" in name else each for name, each in weights.items()},
        ),
    ),
    "no caps": ("gemma2", lambda config, weights: (replace(config, attention_cap=None, logit_cap=None), weights)),
    "another expert": (
        "mixtral",
        lambda config, weights: (
            config,
            {name: weights[name.replace("experts.0.", "experts.1.")] for name in weights},
        ),
    ),
    "rotary instead of learned positions": (
        "gpt2",
        lambda config, weights: (replace(config, rotary_dim=None), weights),
    ),
    "all of each head rotated": ("phi", lambda config, weights: (replace(config, rotary_dim=None), weights)),
    "gate and up swapped": (
        "phi3",
        lambda config, weights: (
            config,
            {
                name: weights[name.replace("gate", "*").replace("up_proj", "gate_proj").replace("*_proj", "up_proj")]
                for name in weights
            },
        ),
    ),
    "key heads swapped in one layer": (
        "llama",
        lambda config, weights: (
            config,
            {
                name: np.concatenate(np.split(each, 2)[::-1]) if name.endswith("1.self_attn.k_proj.weight") else each
                for name, each in weights.items()
            },
        ),
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.thorough if WRONG[what][0] in QUICK else pytest.mark.nightly)
        for what in WRONG
    ],
)
def test_another_computation_is_found_at_every_precision_but_nvfp4(folder: Path, tmp_path: Path, what: str) -> None:
    family, changed = WRONG[what]
    write(folder, family)
    model = families.reference(folder / family)
    found = said_by(Reference(*changed(model.config, model.weights)), folder, family, tmp_path)
    assert found.loss_nats > 2 * LOOSEST


def test_texts_that_the_model_cannot_say_are_told(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "llama.jsonl").read_text().splitlines()[:3]]
    rows[0]["answer"] = rows[0]["output"]
    rows[1]["answer"] = "\u4e16" + rows[1]["output"]
    rows[2]["answer"] = rows[2]["output"][: len(rows[2]["output"]) // 2]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = reference_answers.compare(tmp_path, folder / "llama")
    assert found.unreadable == (rows[1]["id"], rows[2]["id"])
    assert found.tokens == material.MAX_TOKENS


@pytest.mark.thorough
def test_material_is_written_once_and_repaired(tmp_path: Path) -> None:
    folder = tmp_path
    write(folder, "llama")
    weights = folder / "llama" / "model.safetensors"
    before = weights.stat().st_ino

    def again() -> None:
        material.write(folder, Machine(1, "CPU"), families=["llama"], precisions=["fp16"], toolchain_names=["embedded"])

    again()
    assert weights.stat().st_ino == before
    right = weights.read_bytes()
    weights.write_bytes(right[:-1] + b"x")
    again()
    assert weights.read_bytes() == right
    assert {path.name for path in folder.iterdir()} == {"llama", "llama.jsonl", material.MATRIX}


def test_two_gpus_are_tried_together_where_that_says_something(tmp_path: Path) -> None:
    machine = parse("gpus=2,sm=90")
    toolchains = ["embedded", "tensorrt_llm"]
    matrix = material.write(
        tmp_path, machine, families=["llama"], precisions=["fp16", "int4_awq"], toolchain_names=toolchains
    )
    cells = expand(load_matrix(matrix), default_toolchain="embedded")
    found = sorted(f"{each.precision}/tp{each.tp}pp{each.pp}/{each.toolchain}" for each in cells)
    assert found == [
        "fp16/tp1pp1/embedded",
        "fp16/tp1pp1/tensorrt_llm",
        "fp16/tp1pp2/tensorrt_llm",
        "fp16/tp2pp1/tensorrt_llm",
        "int4_awq/tp1pp1/embedded",
        "int4_awq/tp1pp1/tensorrt_llm",
        "int4_awq/tp1pp2/tensorrt_llm",
    ]


def test_every_token_is_read_back_from_its_text(folder: Path) -> None:
    tokenizer = read_tokenizer(folder / "llama")
    spellings = random_model.spellings(tokenizer)
    assert len(spellings) > 400
    tokens = [*spellings.values()]
    assert random_model.spoken(tokenizer.decode(tokens), spellings) == tokens
    assert random_model.spoken("\u4e16", spellings) is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_has_a_limit_that_wrong_answers_exceed(precision: str) -> None:
    assert 0 < tolerance_nats("tensorrt_llm", precision) <= tolerance_nats("tensorrt_llm", "nvfp4") < 1
    assert 0 < tolerance_nats("embedded", precision) < 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no such file"),
        ("", "the file contains no answers"),
        ('{"id": "a"', "answers.jsonl:1:"),
        ("[1]", "answers.jsonl: row 1: expected an object"),
        ('{"id": "a", "input": "b"}', "answers.jsonl:1: answer: expected a text"),
        ('{"id": "a", "input": 1, "answer": "b"}', "answers.jsonl:1: input: expected a text"),
    ],
)
def test_answers_that_cannot_be_read_are_told_by_file_and_line(
    folder: Path, tmp_path: Path, text: str | None, told: str
) -> None:
    if text is not None:
        (tmp_path / "answers.jsonl").write_text(text)
    with pytest.raises(MatrixError, match=re.escape(told)):
        reference_answers.compare(tmp_path, folder / "llama")


def test_damaged_answers_are_a_row_of_the_examination_not_its_end(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("{")
    run = SimpleNamespace(stage=SimpleNamespace(name="accuracy"), fingerprint="f")
    row = CellResult(
        CellId("llama/fp16"),
        {"model": "./llama", "toolchain": "embedded", "precision": "fp16", "tp": 1, "pp": 1},
        CellStatus.DONE,
    )
    plan = SimpleNamespace(by_cell={row.id: ["f"]}, stage_runs={"f": run})
    outcome = SimpleNamespace(artifacts={"f": SimpleNamespace(out=tmp_path)})
    found = examination._of_cell(row, plan, outcome, folder)  # type: ignore[arg-type]
    assert found.status is FindingStatus.CANNOT
    assert found.detail.startswith("its answers cannot be read: ")
    assert "pipeline store verify" in str(found.hint)
