"""Reads YAML text to plain data with the line of every value. Applies the rules of `document` to the events of PyYAML's parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import yaml

from trtllm_pipeline.base import Fault, Json, MatrixError, user_files
from trtllm_pipeline.orchestrate.matrix.document import Document, KeyPath, Origin

MAX_DEPTH: Final = 40
TOO_DEEP: Final = f"is nested deeper than {MAX_DEPTH} levels"
MAX_VALUES: Final = 200_000

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_OTHER_BASE = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_MAX_DIGITS: Final = 400
# JSON writes characters beyond 16 bits as two escapes, which YAML does not support.
_SURROGATES = re.compile(r"(?<!\\)((?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)


def parsed(text: str, name: str, *, lines: bool, json: bool) -> Document:
    """See `document.parse`."""
    if json:
        text = _SURROGATES.sub(_join_surrogates, text)
    reader = _Reader(name, lines)
    try:
        text.encode("utf-8")
        node = reader.document(text)
    except UnicodeEncodeError:
        user_files.fail(name, None, "is not UTF-8 text")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        last = text.rstrip("\n").count("\n")  # the end of the file counts as the line after it
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        if problem.startswith("found character") and mark and text.split("\n")[mark.line].lstrip(" ").startswith("\t"):
            problem = "the line starts with a tab; indent with spaces"
        # PyYAML has its own limit since 6.0.4, which applies before ours.
        fault = TOO_DEEP if "nesting depth" in problem else f"is not valid YAML: {problem}"
        user_files.fail(name, min(mark.line, last) + 1 if mark and lines else None, fault)
    if reader.faults:
        raise MatrixError(tuple(reader.faults))
    document = Document(name, None)
    document.data = reader.expand(node, (), document.origins)
    return document


def _join_surrogates(match: re.Match[str]) -> str:
    pair = int(match[2], 16).to_bytes(2, "big") + int(match[3], 16).to_bytes(2, "big")
    return match[1] + pair.decode("utf-16-be")


@dataclass(slots=True)
class _YamlNode:
    line: int | None
    scalar: Json = None
    items: list[_YamlNode] | None = None
    entries: list[tuple[str, int | None, _YamlNode]] | None = None


class _Reader:
    """Builds nodes from parser events, one by one, so the recursion depth stays below MAX_DEPTH."""

    def __init__(self, name: str, lines: bool) -> None:
        self.name = name
        self.lines = lines
        self.faults: list[Fault] = []
        self.anchors: dict[str, _YamlNode] = {}
        self.values = 0

    def document(self, text: str) -> _YamlNode:
        events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
        root: _YamlNode | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    user_files.fail(self.name, self.line(event), "a second document starts here, only one is allowed")
                root = self.node(next(events), events, 1)
        if root is None:
            user_files.fail(self.name, None, "is empty")
        return root

    def line(self, event: yaml.Event) -> int | None:
        return event.start_mark.line + 1 if self.lines and event.start_mark else None

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> _YamlNode:
        line = self.line(event)
        if depth > MAX_DEPTH:
            user_files.fail(self.name, line, TOO_DEEP)
        if isinstance(event, yaml.AliasEvent):
            anchor = str(event.anchor)
            if anchor not in self.anchors:
                self.fault(line, f"*{anchor} refers to nothing that is complete before it")
            return self.anchors.get(anchor, _YamlNode(line))
        if event.tag is not None:  # type: ignore[attr-defined]
            self.fault(line, f"tags are not allowed: {event.tag}")  # type: ignore[attr-defined]
        node = _YamlNode(line)
        if isinstance(event, yaml.ScalarEvent):
            node.scalar = self.scalar(event, line)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.items = []
            while not isinstance(item := next(events), yaml.SequenceEndEvent):
                node.items.append(self.node(item, events, depth + 1))
        else:
            node.entries = self.mapping(events, depth)
        if event.anchor is not None:  # type: ignore[attr-defined]
            self.anchors[event.anchor] = node  # type: ignore[attr-defined]
        return node

    def mapping(self, events: Iterator[yaml.Event], depth: int) -> list[tuple[str, int | None, _YamlNode]]:
        entries: list[tuple[str, int | None, _YamlNode]] = []
        first: dict[str, int | None] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            line = self.line(event)
            key = event.value if isinstance(event, yaml.ScalarEvent) else None
            if key is None:
                self.node(event, events, depth + 1)
                self.fault(line, "a key must be plain text")
            elif key == "<<":
                self.fault(line, "merge keys (<<) are not part of YAML 1.2. Repeat the keys, or alias a whole value")
            elif key in first:
                where = f", first on line {first[key]}" if self.lines else ""
                self.fault(line, f"the key {key!r} is given twice{where}")
            value = self.node(next(events), events, depth + 1)
            if key is not None:
                first.setdefault(key, line)
                entries.append((key, line, value))
        return entries

    def scalar(self, event: yaml.ScalarEvent, line: int | None) -> Json:
        """The value of a scalar by YAML 1.2's core schema (yaml.org/spec/1.2.2, section 10.3)."""
        text: str = event.value
        if event.style in ("'", '"', "|", ">"):  # always text
            return text
        if text in _NULL:
            return None
        if text in _BOOL:
            return _BOOL[text]
        if _LEADING_ZERO.fullmatch(text):
            self.fault(line, f"{text} starts with a zero, which some parsers read as octal. Quote it or drop the zero")
        elif len(text) > _MAX_DIGITS and _FLOAT.fullmatch(text):
            self.fault(line, f"a number of {len(text)} digits is too long")
        elif _INT.fullmatch(text):
            return int(text)
        elif _OTHER_BASE.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                self.fault(line, f"a number of {len(text)} digits is too long")
            return int(text[:_MAX_DIGITS], 0)
        elif _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and abs(float(text)) == float("inf")):
            self.fault(line, f"{text} is not a finite number")
        elif _FLOAT.fullmatch(text):
            return float(text)
        return text

    def fault(self, line: int | None, message: str) -> None:
        self.faults.append(Fault(self.name, line, "", message))

    def expand(self, node: _YamlNode, at: KeyPath, origins: dict[KeyPath, Origin]) -> Json:
        """Plain data of `node` with expanded aliases. Records the line of each value."""
        self.values += 1
        if self.values > MAX_VALUES or len(at) > MAX_DEPTH:
            user_files.fail(
                self.name, node.line, f"expands to more than {MAX_VALUES} values, or nests too deep, with its aliases"
            )
        origins.setdefault(at, Origin(self.name, node.line))
        if node.items is not None:
            return [self.expand(item, (*at, index), origins) for index, item in enumerate(node.items)]
        if node.entries is not None:
            mapping: dict[str, Json] = {}
            for key, line, value in node.entries:
                origins[(*at, key)] = Origin(self.name, line)
                mapping[key] = self.expand(value, (*at, key), origins)
            return mapping
        return node.scalar
