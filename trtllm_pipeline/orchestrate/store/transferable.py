"""The valid manifest of a remote store: strict types, bounded sizes, names that stay in their directory.

A remote manifest is untrusted. Its digest proves only that it is complete. After these checks it can break neither the
workspace that receives it nor the terminal that shows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, StringConstraints, ValidationError

from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.manifest import FileEntry, Manifest
from trtllm_pipeline.tensorrt import OUT

_OURS: Final = frozenset({OUT, manifest.NAME, manifest.ENVELOPE})
"""Reserved names in an artifact's directory."""
_MOST_FILES: Final = 20_000
_YEAR_2200_S: Final = 7_258_118_400
_LONGEST_PATH: Final = 1000
"""Maximum path length in bytes: the workspace's own path is added."""
_LONGEST_NAME: Final = 255
"""Maximum name length in bytes, as in file systems."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has control characters")
    return text


def _all_printable(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return _printable(value)
    for each in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        _all_printable(each)
    return value


def _inside(text: str) -> str:
    path = PurePosixPath(_printable(text))
    if str(path) != text or not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError("is not a name in its directory")
    if len(text.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in path.parts):
        raise ValueError("is too long")
    return text


_Text = Annotated[str, StringConstraints(min_length=1, max_length=1000), AfterValidator(_printable)]
_Path = Annotated[str, AfterValidator(_inside)]
_Amount = Annotated[int, Field(ge=0, le=1 << 60)]
_Seconds = Annotated[float, Field(ge=0, le=_YEAR_2200_S, allow_inf_nan=False)]
_Digest = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{64}\z")]
_Fingerprint = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{32}\z")]
_Shown = Annotated[JsonValue, AfterValidator(_all_printable)]
_Values = dict[str, JsonValue]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Open(_Strict):
    """Other fields may come from another release. They must be printable."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Shown]


class _File(_Strict):
    path: _Path
    size: _Amount
    digest: _Digest


class _Link(_Strict):
    path: _Path
    link: _Text


class _Contents(_Strict):
    files: list[_File]
    links: list[_Link]
    records: list[_File]


class _System(_Open):
    gpus: list[_Text] = []


class _Provenance(_Open):
    run: _Text | None = None
    attempt: _Amount | None = None
    finished_s: _Seconds = 0.0
    duration_s: _Seconds = 0.0
    cpu_s: _Seconds | None = None
    max_rss_bytes: _Amount | None = None
    system: _System | None = None
    inputs: dict[_Text, _Digest] = {}
    made_from: dict[_Text, _Fingerprint] = {}
    made_by: dict[_Text, _Text] = {}


class _Key(_Strict):
    params: _Values = {}
    inputs: _Values = {}
    files: dict[str, str] = {}
    identity: _Values = {}


class _About(_Strict):
    label: _Text
    key: _Key
    provenance: _Provenance


def fault(sealed: Manifest) -> str | None:
    """Return why an artifact cannot be transferred between workspaces. None if it can."""
    if not sealed.files:
        return "it has no files"
    key = json.loads(sealed.key)
    return _invalid(_About, label=sealed.label, key=key, provenance=dict(sealed.provenance)) or contents_fault(sealed)


def contents_fault(sealed: Manifest) -> str | None:
    """Return why its files cannot be written into a directory. None if they can."""
    if len(sealed.files) + len(sealed.records) > _MOST_FILES:
        return f"it has more than {_MOST_FILES} files"
    files = [entry for entry in sealed.files if entry.link is None]
    links = [entry for entry in sealed.files if entry.link is not None]
    wrong = _invalid(
        _Contents,
        files=[_file(entry) for entry in files],
        links=[{"path": entry.path, "link": entry.link} for entry in links],
        records=[_file(entry) for entry in sealed.records],
    )
    return wrong or next(_misplaced(files, links, sealed.records), None)


def _file(entry: FileEntry) -> dict[str, Any]:
    return {"path": entry.path, "size": entry.size, "digest": entry.digest}


def _invalid(model: type[_Strict], **values: Any) -> str | None:
    """Return the first fault of these values. None if there is none."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(ascii(each).strip("'") for each in first["loc"])
        return f"{where[:100]}: {first['msg'].removeprefix('Value error, ')}: {ascii(first['input'])[:60]}"
    except RecursionError:
        return "it is nested too deeply"
    return None


def _misplaced(files: Sequence[FileEntry], links: Sequence[FileEntry], records: Sequence[FileEntry]) -> Iterator[str]:
    """Yield names that conflict with another name or a file of ours, and links that do not lead to a file."""
    for entries in ([*files, *links], records):
        names = {entry.path for entry in entries}
        if len(names) < len(entries):
            yield "two of its files have the same name"
        for name in names:
            if any(str(above) in names for above in PurePosixPath(name).parents):
                yield f"{name!r} is below a file"
    for entry in records:
        if PurePosixPath(entry.path).parts[0] in _OURS:
            yield f"{entry.path!r} is not a name for a record"
    targets = {entry.path for entry in files}
    for entry in links:
        if os.path.normpath(os.path.join(os.path.dirname(entry.path), str(entry.link))) not in targets:
            yield f"{entry.path!r} is a link to {entry.link!r}, which is not a file of it"
