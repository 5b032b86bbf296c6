"""Objects as text that people read: a line for each part."""

from __future__ import annotations

import json

import pytest

from trtllm_pipeline.base.files.writing import object_text, write_once


def test_parts_and_items_of_lists_have_lines_of_their_own() -> None:
    data = {
        "a": 1,
        "none": [],
        "é": None,
        "files": [{"path": "x\ny", "size": 2}, {"path": "z", "size": 3}],
        "in": {"b": [1]},
    }
    text = object_text(data)
    assert json.loads(text) == data
    assert text == (
        '{\n "a": 1,\n "none": [],\n "é": null,\n "files": [\n  {"path": "x\\ny", "size": 2},\n  {"path": "z", "size": 3}\n ],\n'
        ' "in": {"b": [1]}\n}\n'
    )


def test_a_file_that_does_not_fit_is_named() -> None:
    with pytest.raises(OSError, match="No space left") as failed:
        write_once("/dev/full", "text")
    assert failed.value.filename == "/dev/full"
