"""What commands print as JSON is what the schemas of the documentation say: no key more, none less, each of its type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import json_schemas
import pytest

from tests.helpers.command_line import pipeline


def closed(schema: Any) -> Any:
    """A schema that takes no keys but its own: readers may ignore more, the documentation must not."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {**inner, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else inner


def printed(folder: Path, words: str, *, codes: Iterable[int] = (0, 1, 3, 4)) -> str:
    """What a command prints; without a process of its own, of which there would be fifty."""
    done = pipeline(*shlex.split(words), cwd=folder, code=None)
    assert done.returncode in codes, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_output_is_as_documented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    jsonschema = pytest.importorskip("jsonschema")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(json_schemas, "pipeline", printed)
    found = json_schemas.examples(tmp_path)
    documented = {path.stem for path in json_schemas.FOLDER.glob("*.json")}
    assert documented == {*json_schemas.OUTPUTS, *json_schemas.FILES}
    wrong = []
    for name, values in found.items():
        schema = json.loads((json_schemas.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        check = jsonschema.Draft202012Validator(closed(schema))
        assert values, name
        for value in values:
            wrong += [f"{name}: {error.json_path}: {error.message[:200]}" for error in check.iter_errors(value)]
    assert wrong == [], "python docs/json_schemas.py"
