"""Names, types and choices in the LLM API's YAML files, and the differences of a file from them.

TensorRT-LLM's package has a JSON schema of these files, `INSTALLED`. Recorded ones are in
`data/tensorrt_llm/llm_args.json`, in the form of `compact`. For releases without a schema, they are from the class
reference. The schema of an installation takes precedence. Neither contains all rules, so the program has the last word.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import Machine, distribution_of, probe
from trtllm_pipeline.tensorrt.trtllm.releases import parse

RECORDED: Final = PACKAGE / "data/tensorrt_llm/llm_args.json"
INSTALLED: Final = "tensorrt_llm/schemas/trtllm-serve-config.schema.json"
"""Path of the schema in the directory of packages."""
FILE: Final = "file"
"""The class of the whole file."""
_PLAIN: Final[Mapping[str, tuple[type, ...]]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "null": (type(None),),
    "object": (dict,),
}
_SPELLED: Final = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_CLOSE: Final = 0.75
"""Minimum similarity of names for a suggestion."""

_UNKNOWN: Final = "any"
"""The type of names whose types were not read."""
_AUTO_DEPLOY: Final = "_autodeploy"

Classes = Mapping[str, Mapping[str, Any]]
"""Class -> name -> type. A type is a word of JSON schema, `any`, `never` or a class; {"enum": values}, {"list": type},
{"map": type of the values}; or a list of alternatives.
"""


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of one release."""

    release: str
    source: str
    """Its source: the label of a record, or a path."""
    classes: Classes
    whole: bool = True
    """False if the release was read in part: the rest is that of the record before it, and it may have more."""

    def problems(self, settings: Mapping[str, Any]) -> list[str]:
        """The parts of `settings` that the schema does not have, in words. AutoDeploy's own arguments are in no record."""
        if settings.get("backend") == _AUTO_DEPLOY and self.classes[FILE].get("backend") == _UNKNOWN:
            return []
        return [f"{place}: {words}" for place, words in _of_class(self.classes, FILE, settings, "")]

    def compared(self, other: Schema) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Names that `other` lacks, names that only it has, and names of another type, with words."""
        ours, theirs = self.names(), other.names()
        both = (name for name in sorted(ours.keys() & theirs.keys()) if _UNKNOWN not in _alternatives(ours[name]))
        changed = (name for name in both if ours[name] != theirs[name])
        return (
            tuple(sorted(ours.keys() - theirs.keys())),
            tuple(sorted(theirs.keys() - ours.keys())),
            tuple(f"{name} is {_words([theirs[name]])}, was {_words([ours[name]])}" for name in changed),
        )

    def joined(self, other: Schema) -> Schema:
        """A schema with the names of both, and their types as alternatives."""
        classes = {
            kind: {
                name: [*_alternatives(ours.get(name, [])), *_alternatives(theirs.get(name, []))]
                for name in sorted(ours.keys() | theirs.keys())
            }
            for kind in self.classes.keys() | other.classes.keys()
            for ours, theirs in [(self.classes.get(kind, {}), other.classes.get(kind, {}))]
        }
        return Schema(f"{self.release} and {other.release}", f"{self.source}; {other.source}", classes)

    def names(self) -> dict[str, Any]:
        """Type by name, as CLASS.NAME, and NAME in the file itself."""
        return {
            name if kind == FILE else f"{kind}.{name}": each
            for kind, entries in self.classes.items()
            for name, each in entries.items()
        }


@lru_cache(maxsize=1)
def recorded() -> tuple[Schema, ...]:
    """All recorded schemas, in order of releases."""
    return read(RECORDED)


def read(record: Path) -> tuple[Schema, ...]:
    """The schemas of a record, in order of releases. A part, which has new names alone, is completed by the one before it."""
    found: list[Schema] = []
    rows = json.loads(record.read_text(encoding="utf-8"))["schemas"]
    for schema in sorted((Schema(**row) for row in rows), key=lambda each: parse(each.release)):
        before = {} if schema.whole else found[-1].classes
        classes = {
            kind: {**before.get(kind, {}), **schema.classes.get(kind, {})} for kind in {**before, **schema.classes}
        }
        found.append(replace(schema, classes=classes))
    return tuple(found)


def of_release(release: str) -> Schema | None:
    """The recorded schema of a release, or of the nearest earlier one in the same line. None if there is none."""
    wanted = parse(release)
    fits = [each for each in recorded() if parse(each.release) <= wanted and _line(each.release) == _line(release)]
    return fits[-1] if fits else None


def around(release: str) -> Schema | None:
    """The same, including the names of the next record if the release is between two."""
    before = of_release(release)
    if before is None or before.release == release:
        return before
    after = next((each for each in recorded() if parse(each.release) > parse(release)), None)
    return before if after is None else before.joined(after)


def of_machine(machine: Machine) -> Schema | None:
    """The schema of the installed release: its own, or else the recorded ones around it."""
    installation = machine.tensorrt_llm
    if installation is None:
        return None
    own = None if machine.assumed else installed(installation.release, installation.python)
    return own or around(installation.release)


@lru_cache(maxsize=4)
def installed(release: str, python: str) -> Schema | None:
    """The schema in the package of an interpreter. None without one, or if it cannot be read."""
    package = distribution_of("tensorrt_llm", probe.packages_of(python))
    path = None if package is None else Path(str(package.locate_file(INSTALLED)))
    try:
        return (
            None if path is None else Schema(release, str(path), compact(json.loads(path.read_text(encoding="utf-8"))))
        )
    except (OSError, ValueError):
        return None


def _line(release: str) -> tuple[int, int]:
    version = parse(release)
    return version.major, version.minor


# ------------------------------------------------------------------------------------------------------ JSON schema


def compact(document: Any) -> dict[str, dict[str, Any]]:
    """The names, types and choices of a JSON schema. Raises ValueError for other content."""
    properties = document.get("properties") if isinstance(document, Mapping) else None
    if properties is None:
        raise ValueError("is not a JSON schema of a YAML file: it has no properties")
    reader = _Reader(document.get("$defs", {}))
    reader.add(FILE, document)
    for name, definition in reader.definitions.items():
        if "properties" in definition:
            reader.add(name, definition)
    return dict(sorted(reader.classes.items(), key=lambda each: (each[0] != FILE, each[0])))


class _Reader:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self.definitions = definitions
        self.classes: dict[str, dict[str, Any]] = {}

    def add(self, name: str, schema: Mapping[str, Any]) -> None:
        self.classes[name] = {}  # before its parts, which may refer to it
        self.classes[name] = {each: self.type(part) for each, part in sorted(schema["properties"].items())}

    def type(self, schema: Mapping[str, Any]) -> Any:
        """The compact type of one part of a schema."""
        found: list[Any] = []
        for each in self.alternatives(schema):
            if each not in found:
                found.append(each)
        return found[0] if len(found) == 1 else found

    def alternatives(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        for several in ("anyOf", "oneOf"):
            for part in schema.get(several, ()):
                yield from self.alternatives(part)
        if "anyOf" in schema or "oneOf" in schema:
            return
        if "$ref" in schema:
            yield from self.reference(schema["$ref"])
        elif "const" in schema or "enum" in schema:
            yield {"enum": schema.get("enum", [schema.get("const")])}
        elif "not" in schema:
            yield "never"
        else:
            kinds = schema.get("type", "any")
            for kind in [kinds] if isinstance(kinds, str) else kinds:
                yield self.plain(kind, schema)

    def reference(self, reference: str) -> Iterator[Any]:
        name = reference.rpartition("/")[2]
        if name not in self.definitions:
            raise ValueError(f"refers to {reference}, which it does not define")
        if "properties" in self.definitions[name]:
            yield name
        else:
            yield from self.alternatives(self.definitions[name])

    def plain(self, kind: str, schema: Mapping[str, Any]) -> Any:
        if kind == "array":
            parts = [*schema.get("prefixItems", ()), *([schema["items"]] if "items" in schema else ())]
            return {"list": self.type({"anyOf": parts}) if parts else "any"}
        if kind == "object" and "properties" in schema:
            name = str(schema["title"])
            if name not in self.classes:
                self.add(name, schema)
            return name
        if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
            return {"map": self.type(schema["additionalProperties"])}
        if kind != "any" and kind not in _PLAIN:
            raise ValueError(f"has a type that is not known: {kind!r}")
        return kind


# -------------------------------------------------------------------------------------------------------- settings


Problem = tuple[str, str]
"""Path of a value, and its problem."""


def _of_class(classes: Classes, name: str, value: Mapping[str, Any], above: str) -> Iterator[Problem]:
    known = classes[name]
    for key, each in value.items():
        place = f"{above}{key}"
        if key in known:
            yield from _of_type(classes, known[key], each, place)
        else:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=_CLOSE)
            yield place, f"no such name{f'; did you mean {near[0]}?' if near else ''}"


def _alternatives(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind]


def _of_type(classes: Classes, kind: Any, value: Any, place: str) -> list[Problem]:
    """The problem of a value, for the most similar alternative."""
    alternatives = _alternatives(kind)
    named = [each for each in alternatives if isinstance(each, str) and each in classes]
    if named and isinstance(value, Mapping):
        return _of_classes(classes, named, value, place)
    others = [each for each in alternatives if each not in named]
    for each in others:
        if isinstance(each, dict) and "list" in each and isinstance(value, Sequence) and not isinstance(value, str):
            return [
                found
                for at, part in enumerate(value)
                for found in _of_type(classes, each["list"], part, f"{place}[{at}]")
            ]
        if isinstance(each, dict) and "map" in each and isinstance(value, Mapping):
            return [
                found for key, part in value.items() for found in _of_type(classes, each["map"], part, f"{place}.{key}")
            ]
        if _is(each, value):
            return []
    return [(place, f"{json.dumps(value)} is not {_words(alternatives)}")]


def _of_classes(classes: Classes, names: Sequence[str], value: Mapping[str, Any], place: str) -> list[Problem]:
    """The same for a mapping that may belong to one of several classes, which a constant may distinguish."""
    constants = [{key: kind["enum"][0] for key, kind in classes[name].items() if _constant(kind)} for name in names]
    for key in set.intersection(*map(set, constants)) & value.keys():
        fits = [name for name, own in zip(names, constants, strict=True) if own[key] == value[key]]
        if not fits:
            known = ", ".join(str(own[key]) for own in constants)
            return [(f"{place}.{key}", f"{json.dumps(value[key])} is not one of {known}")]
        names = fits
        break
    return min((list(_of_class(classes, name, value, f"{place}.")) for name in names), key=len)


def _constant(kind: Any) -> bool:
    return isinstance(kind, dict) and len(kind.get("enum", ())) == 1


def _is(kind: Any, value: Any) -> bool:
    """True if a value has a plain type. Text with numbers or booleans is accepted, because pydantic converts it."""
    if isinstance(kind, dict):
        return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in kind.get("enum", ()))
    if kind in {"integer", "number"} and isinstance(value, str):
        return value[:1].isdigit()
    if kind == "boolean" and isinstance(value, str):
        return value.lower() in _SPELLED
    if kind in {"integer", "number"} and isinstance(value, bool):
        return False
    return kind == "any" or isinstance(value, _PLAIN.get(kind, ()))


def _words(alternatives: Iterable[Any]) -> str:
    """Types as displayed."""
    found: list[str] = []
    for each in chain.from_iterable(map(_alternatives, alternatives)):
        if isinstance(each, dict):
            found += map(json.dumps, each["enum"]) if "enum" in each else ["a list" if "list" in each else "a mapping"]
        else:
            found.append({"null": "null", "never": "for a file", "any": "anything"}.get(each, f"of type {each}"))
    return " or ".join(found)
