"""What users hand in is read at one edge: whatever it is, it ends as data or as an error with file and line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import Refused
from trtllm_pipeline.base.errors import MatrixError
from trtllm_pipeline.base.files import user_files
from trtllm_pipeline.measure.load import prompts
from trtllm_pipeline.measure.score import questions
from trtllm_pipeline.orchestrate.matrix import document
from trtllm_pipeline.show.report import measured
from trtllm_pipeline.tensorrt.stage import calibration_rows

READERS: dict[str, Callable[[Path], object]] = {
    "matrix": document.read,
    "prompts": prompts.read_prompts,
    "questions": lambda path: questions.read_questions(path, {}, ["exact"]),
    "calibration": calibration_rows.read_rows,
    "json": user_files.read_json,
    "baseline": lambda path: measured.load_measured(str(path), None),
}


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _dangling(path: Path) -> None:
    path.symlink_to("gone.json")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_link_to_itself, "is a link that leads back to itself"),
        (_dangling, "is a link to gone.json, which is not there"),
        (os.mkfifo, "is a named pipe, expected a file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, expected a file"),
        (lambda path: path.write_bytes(b'{}\n{"a": "\xff"}'), "2: is not UTF-8 text"),
        (lambda path: path.write_text("[" * 5000), "nested deeper than"),
        (lambda path: path.write_text('{"input": ' + "[" * 300 + "]" * 300 + "}"), "nested deeper than"),
        (lambda path: path.write_text('{"input": ' + "9" * 5000 + "}"), "digits"),
        (lambda path: path.write_text('{"input": '), ":1: "),
    ],
)
def test_no_file_hangs_a_reader_or_ends_in_a_traceback(
    tmp_path: Path, reader: str, make: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "given.json"
    make(path)
    with pytest.raises(MatrixError) as caught:
        READERS[reader](path)
    assert caught.value.faults[0].path == str(path)
    assert words in caught.value.message


def test_a_name_that_is_too_long_or_nearly_right(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="the name is too long for the file system"):
        user_files.read_text(tmp_path / ("n" * 300))
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(MatrixError, match=r"there is no such file; did you mean '.*/prompts.jsonl'\?"):
        user_files.read_text(tmp_path / "prompt.jsonl")


def test_half_of_a_surrogate_pair_is_refused_where_it_is_read() -> None:
    assert user_files.decode('"\\ud83d\\ude00"') == "\U0001f600"
    with pytest.raises(user_files.JsonError, match="an unpaired surrogate"):
        user_files.decode('{"a": ["\\ud800"]}')


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "a: 2026-99-99", "a: [1", b"\xff\xfe\x00"])
def test_yaml_of_other_programs(text: str | bytes) -> None:
    with pytest.raises(user_files.JsonError):
        user_files.decode_yaml(text)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["stage", "build", "--toolchain", "tensorrt_llm", "--options", "a=" + "[" * 5000, "--output-dir", "o"],
            "nested deeper than",
        ),
        (["stage", "smoke", "--service", "fifo", "--engine", ".", "--output-dir", "o"], "fifo: is a named pipe"),
        (["stage", "perf", "--service", "fifo", "--engine", ".", "--output-dir", "o"], "fifo: is a named pipe"),
        (["stage", "replay", "deep.json"], "not a job file: nested deeper than"),
        (["plan", "--matrix", "MATRIX", "--set", "settings.perf.input_data=fifo"], "fifo: is a named pipe"),
        (["plan", "--matrix", "MATRIX", "--set", "settings.perf.input_data=self"], "leads back to itself"),
        (["plan", "--matrix", "MATRIX", "--set", f"settings.perf.requests=0x{'f' * 5000}"], "digits is too long"),
        (["compare", "n" * 5000, "deep.json"], "is not a file, and there is no workspace with runs"),
        (["compare", "deep.json", "deep.json"], "deep.json: nested deeper than"),
        (["eval", "answers", "-u", "127.0.0.1:1", "--model", "m", "--input-data", "fifo"], "fifo: is a named pipe"),
    ],
)
def test_odd_files_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, argv: list[str], words: str
) -> None:
    pytest.importorskip("xllamacpp", reason="part of the extra [embedded], which is there up to Python 3.12")
    monkeypatch.chdir(tmp_path)
    tiny = Path(__file__).parents[4] / "matrices/tiny.yaml"
    Path("tiny.yaml").write_text(tiny.read_text(encoding="utf-8"), encoding="utf-8")
    os.mkfifo("fifo")
    Path("self").symlink_to("self")
    Path("deep.json").write_text("[" * 5000)
    assert words in refused(*["tiny.yaml" if word == "MATRIX" else word for word in argv])
