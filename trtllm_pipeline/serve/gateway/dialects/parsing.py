"""Parses a model's response while it is generated: its content, reasoning and tool calls.

A grammar is a generator that requests text from a `Reader` and yields to wait for more. A marker may be split at any
point, and the result does not depend on the pieces.

    parser = AnswerParser(grammar, Expected(tools, stream=True))
    deltas = parser.feed("Let me see.<tool_c")     # [Content("Let me see.")]
    deltas = parser.end()

Text is never lost and nothing raises: text that starts like a call but is not one becomes content. A streamed call is
forwarded as it is generated. If it is cut off, it stays unfinished, and `finish_reason` gives the reason. An unfinished
call that is not streamed becomes content.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar, Union

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields when it needs more text, and returns its result."""
Emit = Callable[[str], None]
_ALPHANUMERIC: Final = string.ascii_letters + string.digits
_IN_STRING: Final = re.compile(r'["\\\x00-\x1f]')
_AFTER_SCALAR: Final = re.compile(r"[\s,:\]}<]")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SCALARS: Final = {
    "true": "true",
    "false": "false",
    "null": "null",
    # as written by models that confuse JSON with Python
    "True": "true",
    "False": "false",
    "None": "null",
}
_ESCAPES: Final = frozenset('"\\/bfnrtu')
_DEEPEST: Final = 100
"""Maximum depth of nested arguments: `json` recurses, too."""
_SPACE: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the response."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its response."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call starts. `index` counts the calls of a response."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments. Together, all parts of a finished call are a JSON object."""

    index: int
    text: str


Delta = Union[Content, Reasoning, CallStart, CallArguments]  # noqa: UP007 - evaluated


class BrokenError(Exception):
    """Text that started like a call is not a call."""


class _EnoughError(Exception):
    """The only allowed call is complete."""


def call_id() -> str:
    return "call_" + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(24))


@dataclass(frozen=True, slots=True)
class Expected:
    """The markers and tools of a parser."""

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Schema of the arguments, by tool name. Without any, text is never parsed as a call."""
    stream: bool = False
    """True if parts of a call are passed on before it is complete."""
    parallel: bool = True
    new_id: Callable[[], str] = call_id


class AnswerParser:
    """Parses one response. `done` is true if no further text is needed: the only allowed call is complete."""

    def __init__(self, grammar: Callable[[Reader], Steps[None]], expected: Expected) -> None:
        self._reader = Reader(expected)
        self._steps = grammar(self._reader)
        self.done = False

    @property
    def called(self) -> bool:
        return self._reader.calls > 0

    def prime(self, text: str) -> None:
        """Read the start of the response that is in the prompt. Its events come with the next part."""
        if text:
            self._reader.add(text)
            self._go_on()

    def feed(self, text: str) -> list[Delta]:
        """The events of the next part of the response."""
        if text and not self.done:
            self._reader.add(text)
            self._go_on()
        return self._reader.taken()

    def end(self) -> list[Delta]:
        """The events held back, at the end of the response."""
        self._reader.ended = True
        if not self.done:
            self._go_on()
        return self._reader.taken()

    def _go_on(self) -> None:
        try:
            next(self._steps)
        except (StopIteration, _EnoughError):
            self.done = True


class Reader:
    """The text of a response, and the deltas made from it.

    The text between `_mark` and `_position` was read but is still undecided: `settle` drops it as syntax, and
    a failed `attempt` makes it content.
    """

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.ended = False
        self.calls = 0
        self._text = ""
        self._mark = self._position = 0
        self._deltas: list[Delta] = []

    def add(self, text: str) -> None:
        self._text = self._text[self._mark :] + text
        self._position -= self._mark
        self._mark = 0

    def taken(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def settle(self) -> None:
        """The text just read is syntax."""
        self._mark = self._position

    def attempt(self, steps: Steps[None]) -> Steps[bool]:
        """Follow `steps`. If the text is not a call, it is content."""
        try:
            yield from steps
        except BrokenError:
            self._send(self._position, Content)
            return False
        self.settle()
        return True

    def _send(self, end: int, kind: type[Content | Reasoning]) -> None:
        if end > self._mark:
            self._deltas.append(kind(self._text[self._mark : end]))
            self._mark = end

    def more(self) -> Steps[bool]:
        """Wait for more text. False at the end of the response."""
        length = len(self._text) - self._position
        while len(self._text) - self._position == length:
            if self.ended:
                return False
            yield
        return True

    def ahead(self, *texts: str) -> Steps[str | None]:
        """The one of `texts` that comes next."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._position):
                    return text
            left = len(self._text) - self._position
            begun = any(left < len(text) and text.startswith(self._text[self._position :]) for text in texts)
            if not begun or not (yield from self.more()):
                return None

    def take(self, *texts: str) -> Steps[str | None]:
        """Read whichever of `texts` comes next."""
        marker = yield from self.ahead(*texts)
        self._position += len(marker or "")
        return marker

    def close(self, *texts: str) -> Steps[None]:
        """Read whichever of `texts` comes next, or the start of one that the end of the response cut off."""
        if (yield from self.take(*texts)) is None and self.ended:
            rest = self._text[self._position :]
            if any(text.startswith(rest) for text in texts):
                self._position = len(self._text)

    def need(self, *texts: str) -> Steps[str]:
        """Read one of `texts`. Raises BrokenError if none comes next."""
        marker = yield from self.take(*texts)
        if marker is None:
            raise BrokenError
        return marker

    def space(self) -> Steps[str]:
        """Read white space, up to the first other character."""
        marker = ""
        while True:
            start = self._position
            while self._position < len(self._text) and self._text[self._position] in _SPACE:
                self._position += 1
            marker += self._text[start : self._position]
            if self._position < len(self._text) or not (yield from self.more()):
                return marker

    def character(self) -> Steps[str]:
        """One character. Raises BrokenError at the end of the response."""
        if (yield from self.at_end()):
            raise BrokenError
        self._position += 1
        return self._text[self._position - 1]

    def back(self, length: int) -> None:
        """Go back by `length` characters, which must have just been read."""
        self._position -= length

    def until(self, *markers: str) -> Steps[str]:
        """Read up to and including the first of `markers`, and return the text before it. Raises BrokenError."""
        parts: list[str] = []
        if (yield from self.copy(parts.append, *markers)) is None:
            raise BrokenError
        return "".join(parts)

    def copy(self, emit: Emit, *markers: str) -> Steps[str | None]:
        """Pass the text before the first of `markers` to `emit` as it arrives. Reads and returns the marker."""
        return (yield from self._copy(emit, *_patterns(markers)))

    def pass_on(self, *markers: str, kind: type[Content | Reasoning] = Content) -> Steps[str | None]:
        """Make the text before the first of `markers` content. Reads and returns the marker, or None at the end.

        White space before the marker is read with it, and stays undecided.
        """
        if not markers:
            self._position = len(self._text)
            self._send(self._position, kind)
            while (yield from self.more()):
                self._position = len(self._text)
                self._send(self._position, kind)
            return None

        def send(_piece: str) -> None:
            self._send(self._mark + len(self._text[self._mark : self._position].rstrip(_SPACE)), kind)

        marker = yield from self.copy(send, *markers)
        if marker is None:
            self._send(self._position, kind)
        return marker

    def _copy(
        self, emit: Emit, whole: re.Pattern[str], partial: re.Pattern[str] | None = None, longest: int = 1
    ) -> Steps[str | None]:
        while True:
            marker = whole.search(self._text, self._position)
            stop = len(self._text)
            if marker is not None:
                stop = marker.start()
            elif partial is not None:
                # The text may end with the start of a marker.
                cut = partial.search(self._text, max(self._position, stop - longest + 1))
                stop = stop if cut is None else cut.start()
            self._emit(stop, emit)
            if marker is not None:
                self._position = marker.end()
                return marker[0]
            if not (yield from self.more()):
                self._emit(len(self._text), emit)
                return None

    def _emit(self, stop: int, emit: Emit) -> None:
        if stop > self._position:
            piece = self._text[self._position : stop]
            self._position = stop
            emit(piece)

    def string(self) -> Steps[str]:
        """A JSON string. Raises BrokenError."""
        parts: list[str] = []
        yield from self._string(parts.append)
        try:
            text: str = json.loads("".join(parts))
        except ValueError as error:
            raise BrokenError from error
        return text

    def json(self, emit: Emit, depth: int = 0) -> Steps[None]:
        """Pass a JSON value to `emit` as it arrives. Repairs common model errors: control characters, escapes, Python
        literals.

        Raises BrokenError for other text.
        """
        first = yield from self.ahead('"', "{", "[")
        if first == '"':
            yield from self._string(emit)
        elif first is None:
            yield from self._scalar(emit)
        elif depth == _DEEPEST:
            raise BrokenError
        else:
            yield from self._compound(emit, first, depth)

    def _compound(self, emit: Emit, first: str, depth: int) -> Steps[None]:
        last = {"{": "}", "[": "]"}[first]
        emit((yield from self.need(first)))
        emit((yield from self.space()))
        marker = yield from self.take(last)
        while marker != last:
            if first == "{":
                yield from self._string(emit)
                emit((yield from self.space()))
                emit((yield from self.need(":")))
                emit((yield from self.space()))
            yield from self.json(emit, depth + 1)
            emit((yield from self.space()))
            marker = yield from self.need(",", last)
            if marker == ",":
                emit(marker)
                emit((yield from self.space()))
        emit(last)

    def _string(self, emit: Emit) -> Steps[None]:
        emit((yield from self.need('"')))
        while True:
            marker = yield from self._copy(emit, _IN_STRING)
            if marker is None:
                raise BrokenError
            if marker == "\\":
                escaped = yield from self.character()
                emit(("\\" if escaped in _ESCAPES else "\\\\") + escaped)
            else:
                emit(marker if marker == '"' else json.dumps(marker)[1:-1])
            if marker == '"':
                return

    def _scalar(self, emit: Emit) -> Steps[None]:
        parts: list[str] = []
        marker = yield from self._copy(parts.append, _AFTER_SCALAR)
        self._position -= len(marker or "")
        word = "".join(parts)
        if word not in _SCALARS and not _NUMBER.fullmatch(word):
            raise BrokenError
        emit(_SCALARS.get(word, word))

    def at_end(self) -> Steps[bool]:
        """True if no text follows."""
        return self._position == len(self._text) and not (yield from self.more())

    def call(self, name: str, read: Callable[[Emit], Steps[None]]) -> Steps[None]:
        """A call of `name`. `read` passes the arguments to its function as they arrive. Raises BrokenError."""
        parts: list[str] = []
        index = -1

        def emit(piece: str) -> None:
            nonlocal index
            if not self.expected.stream:
                parts.append(piece)
            elif piece:
                index = self._start(name) if index < 0 else index
                self._deltas.append(CallArguments(index, piece))
                self.settle()

        yield from read(emit)
        if not self.expected.stream:
            self._deltas.append(CallArguments(self._start(name), "".join(parts)))
        self.settle()
        if not self.expected.parallel:
            raise _EnoughError

    def _start(self, name: str) -> int:
        self._deltas.append(CallStart(self.calls, self.expected.new_id(), name))
        self.calls += 1
        return self.calls - 1

    def arguments(self, emit: Emit) -> Steps[None]:
        """Arguments as a JSON object, as a string that contains one, or as null. Raises BrokenError."""
        if (yield from self.ahead("{")):
            yield from self.json(emit)
        elif (yield from self.ahead('"')):
            text = yield from self.string()
            try:
                given = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise BrokenError from error
            if not isinstance(given, dict):
                raise BrokenError
            emit(text)
        else:
            yield from self.need("null", "None")
            emit("{}")

    def listed(self, call: Callable[[bool], Steps[None]]) -> Steps[None]:
        """Follow `call`, or each one in a list of calls. It gets whether it is in a list."""
        if not (yield from self.take("[")):
            yield from call(False)
            return
        separator: str | None = ","
        while separator == ",":
            yield from self.space()
            yield from call(True)
            yield from self.space()
            separator = yield from self.take(",", "]")
        self.settle()

    def calls_in_json(self, *, declared: bool = False) -> Steps[None]:
        """One call as an object with `name` and `arguments` or `parameters`, or a list of these. Raises BrokenError.

        A missing end is ignored after complete arguments. `declared`: names of other tools are not calls.
        """
        yield from self.space()
        yield from self.listed(lambda _in_list: self._call_in_json(declared=declared))

    def _call_in_json(self, *, declared: bool) -> Steps[None]:
        name: str | None = None
        early: list[str] = []
        called = False
        yield from self.need("{")
        while True:
            yield from self.space()
            if called and (yield from self.at_end()):
                return
            key = yield from self.string()
            yield from self.space()
            yield from self.need(":")
            yield from self.space()
            if key == "name" and name is None:
                name = yield from self.string()
                if not name or (declared and name not in self.expected.tools):
                    raise BrokenError
            elif key not in {"arguments", "parameters"} or called or early:
                yield from self.json(lambda _piece: None)
            elif name is None:
                yield from self.arguments(early.append)
            else:
                yield from self.call(name, self.arguments)
                called = True
            yield from self.space()
            separator = yield from self.take(",", "}")
            if separator == ",":
                continue
            if separator is None and not called:
                raise BrokenError
            break
        if name is None:
            raise BrokenError
        if not called:
            yield from self.call(name, lambda emit: _given("".join(early) or "{}", emit))
        self.settle()


def _given(text: str, emit: Emit) -> Steps[None]:
    yield from ()
    emit(text)


@lru_cache(maxsize=256)
def _patterns(markers: Collection[str]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Patterns for one of `markers` and for a partial one at the end of a text, and the length of the longest."""
    beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
    ordered = sorted(beginnings, key=len, reverse=True) or ["\0"]
    whole = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
    return whole, re.compile(f"(?:{'|'.join(map(re.escape, ordered))})\\Z"), max(map(len, markers))
