"""The maintainers' script that writes JSON Schemas: what may be null does not hang on the run, and a signal leaves no servers."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(name="schemas")
def _schemas(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("json_schemas")


@pytest.mark.parametrize(
    ("path", "nullable"),
    [
        ("servers[].requests_per_s", True),
        ("levels[].requests_per_s", True),
        ("levels[].requests", False),
        ("levels[].goodput.requests_per_s", False),
        ("stages[].changed", False),
        ("metrics[].change", True),
        ("cells[].change", False),
        ("levels[].steady", True),
        ("levels[].steady.requests", False),
        ("findings[].family", True),
    ],
)
def test_what_may_be_null_is_told_by_its_whole_path(schemas: Any, path: str, nullable: bool) -> None:
    assert ("null" in schemas.schema_of([1], path)["type"]) == nullable


def test_a_number_that_every_example_lacks_stays_a_number(schemas: Any) -> None:
    for path in ("paybacks[].tokens", "paybacks[].saved_s_per_token", "servers[].queued"):
        assert schemas.schema_of([None], path) == {"type": ["number", "null"]}
    assert schemas.schema_of([None], "system.tokens") == {"type": ["object", "null"]}


def test_told_to_end_it_ends_what_it_has_started(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    code = f"""
import pathlib, sys, time
sys.path.insert(0, {str(DOCS)!r})
import json_schemas
def examples(directory):
    try:
        print("started", flush=True)
        time.sleep(30)
    finally:
        pathlib.Path({str(ended)!r}).touch()
json_schemas.FOLDER, json_schemas.examples = pathlib.Path({str(tmp_path)!r}), examples
json_schemas.main()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert ended.exists()
