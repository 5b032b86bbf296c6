"""The interface of a dialect: how a model family receives tools, and how it writes reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.measure import Chat
from trtllm_pipeline.serve.gateway.dialects.parsing import (
    AnswerParser,
    BrokenError,
    Expected,
    Reader,
    Reasoning,
    Steps,
    call_id,
)

Object = Mapping[str, Any]
_ROLES: Final = ("assistant", "developer", "system", "tool", "user")
_SPEAKING: Final = frozenset({"developer", "system", "user"})
"""Roles whose messages need content. An assistant may only call tools, and a tool may return nothing."""


class DialectError(UsageError):
    """A conversation that this model cannot process. `param` is the field of the request, as OpenAI's errors name it."""

    def __init__(self, message: str, *, param: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, in the terms of OpenAI's API."""

    messages: Sequence[Object]
    tools: Sequence[Object] = ()
    tool_choice: str | Object | None = None
    """"none", "auto", "required" or an object that names a function; None is "auto" if there are tools."""
    parallel_tool_calls: bool = True
    variables: Object = field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""


@dataclass(frozen=True, slots=True)
class Started:
    """The start of a response: the prompt and options for the backend, and the parser of its text."""

    prompt: str
    parser: AnswerParser
    guide: Object | None = None
    """JSON schema that the text must follow, for backends with guided decoding."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation in the form that a model's chat template accepts."""

    dialect: Dialect
    chat: Chat
    schemas: Object
    """Schema of the arguments of each allowed tool."""
    forced: str | None
    """The tool that must be called. "" for any."""
    parallel: bool

    def start(self, prompt: str, *, stream: bool, guided: bool = False, answer_only: bool = False) -> Started:
        """Start a response to `prompt`, the text of `chat`.

        `guided`: the backend follows a JSON schema. `answer_only`: no reasoning, because something else guides the
        text. A forced call starts in the prompt, and the parser has already read that start.
        """
        inside = self.dialect.reasoning_opened(prompt)
        beginning, guide = "", None
        if self.forced is not None:
            beginning, guide = self.dialect.beginning(self.forced, self.schemas, guided=guided)
        if inside and (beginning or answer_only):
            beginning = f"\n{self.dialect.reasoning[inside]}\n\n{beginning}"
        expected = Expected(self.schemas, stream, self.parallel, self.dialect.new_id)
        parser = self.dialect.parser(expected, inside)
        parser.prime(beginning)
        return Started(prompt + beginning, parser, guide)


class Dialect:
    """A model family. Subclasses define the differences. Instances have no state."""

    name: ClassVar[str] = "plain"
    markers: ClassVar[tuple[str, ...]] = ()
    """The texts by which the parser recognizes calls and reasoning. If some of them are special tokens of the
    tokenizer, the backend must be told to keep special tokens in the text: see `special_markers`.
    """
    ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a response. They are in its text if special tokens are kept."""
    reasoning: ClassVar[Mapping[str, str]] = {"<think>": "</think>"}
    """Opening marker of the reasoning -> its closing marker."""
    takes_tools: ClassVar[bool] = False
    arguments_as_text: ClassVar[bool] = False
    """True if the template expects the arguments of earlier calls as JSON text, not as an object."""

    def prepare(self, turn: Turn) -> Prepared:
        """The conversation for the template. Raises DialectError."""
        schemas = _schemas(turn.tools)
        forced = _forced(turn.tool_choice, schemas)
        if turn.tool_choice == "none":
            schemas = {}
        if schemas and not self.takes_tools:
            raise DialectError(
                "this model's chat template has no form of tool calls that the gateway knows",
                param="tools",
                hint="send the request without tools; the operator of the server can set the model's family with --dialect",
            )
        offered = [{"type": "function", "function": dict(tool["function"])} for tool in turn.tools] if schemas else []
        messages = _messages(turn.messages, as_text=self.arguments_as_text)
        return Prepared(self, self.chat(messages, offered, turn.variables), schemas, forced, turn.parallel_tool_calls)

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: Object) -> Chat:
        return Chat(messages, tools=tools or None, variables=variables)

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        """The text that starts a call of `name`, or of any tool, and the schema of the rest. Raises DialectError."""
        raise DialectError(
            "this model cannot be made to call a tool", param="tool_choice", hint="leave it to the model: auto"
        )

    def reasoning_opened(self, prompt: str) -> str | None:
        """The opening marker of the reasoning that is open at the end of `prompt`."""
        end = prompt[-64:].rstrip()
        return next((opening for opening in self.reasoning if end.endswith(opening)), None)

    def new_id(self) -> str:
        return call_id()

    def parser(self, expected: Expected, inside: str | None) -> AnswerParser:
        return AnswerParser(lambda reader: self._answer(reader, inside), expected)

    def _answer(self, reader: Reader, inside: str | None) -> Steps[None]:
        if inside is None:
            yield from reader.space()
            inside = yield from reader.take(*self.reasoning)
        if inside is not None:
            yield from reader.space()
            if (yield from reader.take(inside)):  # some models repeat the marker at the end of the prompt
                yield from reader.space()
            reader.settle()
            yield from reader.pass_on(self.reasoning[inside], *self.ends, kind=Reasoning)
            yield from reader.space()
            reader.settle()
        yield from self.grammar(reader)

    def grammar(self, reader: Reader) -> Steps[None]:
        """Read everything after the reasoning: content and, if there are tools, calls behind markers, in any order."""
        looked_for = self.markers if reader.expected.tools else ()
        while (marker := (yield from reader.pass_on(*looked_for, *self.ends))) is not None:
            if marker in self.ends or (yield from reader.attempt(self.calls(reader, marker))):
                yield from reader.space()
                reader.settle()

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        """Read the call or calls behind `marker`. Raises BrokenError if there is none."""
        yield from ()
        raise BrokenError


PLAIN: Final = Dialect()


def special_markers(dialect: Dialect, special_tokens: Sequence[str]) -> tuple[str, ...]:
    """The markers that a backend drops unless told to keep special tokens."""
    known = frozenset(special_tokens)
    return tuple(marker for marker in (*dialect.markers, *dialect.reasoning) if marker in known)


def _schemas(tools: Sequence[Object]) -> dict[str, Object]:
    schemas: dict[str, Object] = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise DialectError(
                f"{where} is not a function", param=where, hint='{"type": "function", "function": {...}}'
            )
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise DialectError(f"{where}.function.name is missing", param=f"{where}.function.name")
        if name in schemas:
            raise DialectError(f"{where}: there is another tool named {name!r}", param=f"{where}.function.name")
        if not isinstance(schema, Mapping) and schema is not None:
            raise DialectError(
                f"{where}.function.parameters is not a JSON schema", param=f"{where}.function.parameters"
            )
        schemas[name] = schema or {"type": "object", "properties": {}}
    return schemas


def _forced(choice: str | Object | None, schemas: Mapping[str, Object]) -> str | None:
    """The tool that must be called. "" for any of several."""
    if choice in (None, "none", "auto"):
        return None
    if not schemas:
        raise DialectError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return next(iter(schemas)) if len(schemas) == 1 else ""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in schemas:
        known = ", ".join(map(repr, schemas))
        raise DialectError(
            f"tool_choice names {name!r}; the tools are {known}"
            if isinstance(name, str)
            else 'tool_choice must be one of "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return name


def _messages(given: Sequence[Object], *, as_text: bool) -> list[dict[str, Any]]:
    """The messages as templates expect them: texts, arguments as objects, and the called tool's name in results."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = message.get("role")
        if role not in _ROLES:
            raise DialectError(f"{where}.role is {role!r}; expected one of {', '.join(_ROLES)}", param=where)
        one = {key: value for key, value in message.items() if value is not None}
        one["role"] = "system" if role == "developer" else role
        if role in _SPEAKING and message.get("content") is None:
            raise DialectError(f"{where} has no content", param=f"{where}.content")
        one["content"] = _content(message.get("content"), f"{where}.content")
        calls = one.pop("tool_calls", None)
        if role == "assistant" and calls:
            one["tool_calls"] = _calls(calls, f"{where}.tool_calls", names, as_text=as_text)
        elif role == "tool":
            called = names.get(str(one.get("tool_call_id")))
            if called is not None:
                one.setdefault("name", called)
        messages.append(one)
    if not messages:
        raise DialectError("messages is empty", param="messages")
    return messages


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DialectError(f"{where} is neither a text nor a list of parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if kind == "text" and not isinstance(text, str):
            raise DialectError(f"{where} has a part of type 'text' whose text is missing", param=where)
        if not isinstance(text, str):
            raise DialectError(
                f"{where} has a part of type {kind!r}; this model only accepts text",
                param=where,
                hint="leave the part out, or use a model that accepts it",
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, where: str, names: dict[str, str], *, as_text: bool) -> list[dict[str, Any]]:
    items = []
    for number, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise DialectError(f"{where}[{number}] has no function with a name", param=where)
        arguments = _arguments(function.get("arguments"), f"{where}[{number}].function.arguments")
        assert isinstance(call, Mapping)
        names[str(call.get("id"))] = name
        encoded = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        items.append({**call, "type": "function", "function": {"name": name, "arguments": encoded}})
    return items


def _arguments(given: Any, where: str) -> Object:
    try:
        value = json.loads(given or "{}") if isinstance(given, str) or given is None else given
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise DialectError(f"{where} is not a JSON object", param=where)
    return value
