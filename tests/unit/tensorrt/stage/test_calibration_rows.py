"""How many rows a model is calibrated on: the number that plans, keys and command lines say is the true one."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trtllm_cells import ENGINES, PYTORCH, cell, commands, machine, stage_run, values
from trtllm_pipeline.base.errors import MatrixError, UsageError
from trtllm_pipeline.orchestrate.plan.plan import StageRun, make_plan
from trtllm_pipeline.tensorrt.stage.calibration_rows import MOST, Row, choose, default_set, read_rows, with_true_samples
from trtllm_pipeline.tensorrt.stage.params import Selection
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm.params import HuggingFaceCheckpoint

BUILT_IN = 64


def calibrated(samples: int | None) -> HuggingFaceCheckpoint:
    return HuggingFaceCheckpoint(precision="int4_awq", family="llama", calibration=Selection(samples=samples))


def rows_file(folder: Path, count: int) -> Path:
    path = folder / f"{count}.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n\n" for row in range(count)))
    return path


@pytest.mark.parametrize(
    ("there", "asked", "taken"),
    [(10, None, 10), (10, 3, 3), (10, 10, 10), (10, 11, 10), (MOST + 5, None, MOST), (MOST + 5, MOST + 1, MOST + 1)],
)
def test_the_rows_that_are_taken_are_those_that_are_said(
    tmp_path: Path, there: int, asked: int | None, taken: int
) -> None:
    params = with_true_samples(calibrated(asked), {"calibration_data": str(rows_file(tmp_path, there))})
    assert params.calibration == Selection(samples=taken)
    assert len(choose(range(there), params.calibration)) == taken
    assert len(choose(range(there), Selection(samples=asked))) == taken


@pytest.mark.parametrize("indent", [None, 1])
def test_the_rows_of_a_file_that_is_one_array_are_its_elements(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": f"row {row}"} for row in range(20)], indent=indent), encoding="utf-8-sig")
    assert len(read_rows(path)) == 20
    assert with_true_samples(calibrated(None), {"calibration_data": str(path)}).calibration == Selection(samples=20)


@pytest.mark.parametrize(
    ("name", "content", "column", "said"),
    [
        ("rows.jsonl", '\n{"article": "a"}\n', None, 'rows.jsonl:2: expected an object with "text"'),
        ("rows.jsonl", '{"article": "a"}\n', "artcle", "rows.jsonl:1: has no 'artcle'; it has article"),
        ("rows.jsonl", "plain text\n", None, "rows.jsonl:1: not JSON"),
        ("rows.csv", "article,id\na,1\n", "artcle", "has no column 'artcle'; it has article, id"),
        ("rows.jsonl", '\ufeff{"text": "a"}\nnot JSON\n', None, "rows.jsonl:2: not JSON"),
        ("rows.jsonl", "\n", None, "it has no rows"),
        ("rows.jsonl", f'{{"text": "{"a" * 2**20}"}}\nnot JSON\n', None, None),
        ("rows.jsonl", f'{{"text": "a"}}\n{{"text": "{"a" * 2**20}"}}\nnot JSON\n', None, None),
        ("rows.csv", "article,id\na,1\n", "article", None),
    ],
)
def test_first_rows_that_cannot_be_read_are_found_by_the_plan(
    tmp_path: Path, name: str, content: str, column: str | None, said: str | None
) -> None:
    """Rows behind the first MiB are left to the stage: all of a large file would have to be read for each plan."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    files = {"calibration_data": str(tmp_path / name)}
    asked = HuggingFaceCheckpoint(precision="int4_awq", family="llama", calibration=Selection(column=column))
    if said is None:
        assert with_true_samples(asked, files).calibration is not None
        return
    with pytest.raises(MatrixError, match=re.escape(said)):
        with_true_samples(asked, files)


def test_too_few_rows_are_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {"calibration_data": str(rows_file(tmp_path, 7))}
    with caplog.at_level(logging.WARNING):
        with_true_samples(calibrated(7), files)
        with_true_samples(calibrated(None), files)
        assert caplog.messages == []
        with_true_samples(calibrated(8), files)
    (said,) = caplog.messages
    assert "samples is 8" in said
    assert "has 7 rows: the model is calibrated on 7" in said


def test_a_file_that_is_not_here_yet_is_left_to_the_stage() -> None:
    given = calibrated(8)
    assert with_true_samples(given, {"calibration_data": "hub:some/set/rows.jsonl"}) == given
    plain = HuggingFaceCheckpoint(precision="fp16", family="llama")
    assert with_true_samples(plain, {}) == plain


def quantizing(toolchain: str, samples: int, release: str) -> tuple[StageRun, list[list[str]]]:
    """The stage run that calibrates on the built-in rows, and its command lines."""
    asked = cell("fp8", toolchain=toolchain, settings={"quantize.calibration.samples": samples})
    found = make_plan(
        [asked],
        {toolchain: toolchains.load(toolchain)},
        machine(release, more=",model_optimizer==0.47" if toolchain == PYTORCH else ""),
        digest=lambda _path, _cell: (str(default_set()), "c"),
    )
    return stage_run(found, "quantize"), commands(found, "quantize")


@pytest.mark.parametrize("toolchain", [ENGINES, PYTORCH])
def test_a_plan_and_its_key_say_the_true_number(toolchain: str) -> None:
    run, _ = quantizing(toolchain, 512, "1.0.0")
    assert run.params.calibration.samples == BUILT_IN
    same, _ = quantizing(toolchain, BUILT_IN, "1.0.0")
    assert run.fingerprint == same.fingerprint, "equal work has an equal key"


@pytest.mark.parametrize(("release", "told"), [("0.12.0", str(BUILT_IN)), ("0.9.0", "512")])
def test_the_script_is_told_the_true_number_unless_it_calibrates_on_a_set_of_its_own(release: str, told: str) -> None:
    _, lines = quantizing(ENGINES, 512, release)
    (line,) = (line for line in lines if "--calib_size" in line)
    assert values(line)["--calib_size"] == told


# --------------------------------------------------------------------------------------------------------------- files


TEXTS = ["Water, it is said,\nboils.", 'a "quoted" one', "日本"]


def table(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif kind == "csv":
        import csv

        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pytest.importorskip("pyarrow", reason="part of the extra [parquet]")
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_rows_come_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    path = table(
        tmp_path, kind, [{"id": place, "article": text, "text": f"{place}"} for place, text in enumerate(TEXTS)]
    )
    assert read_rows(path) == [Row(text="0"), Row(text="1"), Row(text="2")]
    assert read_rows(path, "article") == [Row(text=text) for text in TEXTS]
    with pytest.raises(MatrixError, match="'body'"):
        read_rows(path, "body")
    params = with_true_samples(calibrated(None), {"calibration_data": str(path)})
    assert params.calibration == Selection(samples=3)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_of_conversations_and_tokens(tmp_path: Path, kind: str) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    path = table(tmp_path, kind, [{"chat": chat, "ids": [1, 2]}])
    assert read_rows(path, "chat") == [Row(messages=chat)]
    assert read_rows(path, "ids") == [Row(tokens=[1, 2])]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "none of the columns text, input"),
        ("a.csv", b"text\n", "it has no rows"),
        (
            "a.csv",
            b"title,body\na,b\n",
            "has none of the columns text, input, text_input, messages, input_ids; it has title, body",
        ),
        ("a.csv", b'text\n"never ends', "unexpected end of data"),
        ("a.csv", b"text\n\xff\n", "cannot be read"),
        ("a.csv", b"text,id\n,1\n,2\n", "row 2: expected an object with"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.parquet", b"text\nnot one", "cannot be read"),
    ],
)
def test_damaged_files_are_told_with_their_rows(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="part of the extra [parquet]")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(MatrixError, match=f"{name}.*") as raised:
        read_rows(path)
    assert said in str(raised.value)
    with pytest.raises(MatrixError):
        with_true_samples(calibrated(2), {"calibration_data": str(path)})


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match="needs the package pyarrow") as raised:
        read_rows(tmp_path / "rows.parquet")
    assert "trtllm-pipeline[parquet]" in raised.value.hint


def test_the_column_is_part_of_the_key_only_where_it_is_said() -> None:
    from trtllm_pipeline.tensorrt.stage.params import key

    assert "column" not in key(Selection())
    assert key(Selection(column="article"))["column"] == "article"
