"""A validated request of OpenAI's Responses API. It becomes a conversation, as for a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from trtllm_pipeline.serve.gateway.api_error import ApiError, bad, missing, unsupported
from trtllm_pipeline.serve.gateway.parsed_request import (
    FOR_OPENAI,
    INT32,
    MOST_MESSAGES,
    ParsedRequest,
    flag,
    guide_of,
    model_of,
    number,
    refuse_unknown,
    refuse_unless_neutral,
    typed_object,
    whole,
    wrong,
)

_NOT_STORED: Final = "responses are not stored here: send the earlier items in input"
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    # unsupported field -> the values that have no effect
    "store": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "max_tool_calls": (None,),
    "truncation": (None, "disabled"),
}
_WHY: Final = {
    "store": "responses are not stored here; leave it out, or send false",
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "truncation": "long inputs are not truncated",
}
_KNOWN: Final = (
    _NEUTRAL.keys()
    | (FOR_OPENAI - {"store"})
    | {
        *("model", "input", "instructions", "stream", "stream_options", "max_output_tokens", "temperature", "top_p"),
        *("tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include", "top_logprobs"),
    }
)
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDE: Final = (_LOGPROBS, "reasoning.encrypted_content")
"""Additions to a response that may be requested. Reasoning is never encrypted here."""
_CHAT_FIELDS: Final = {"messages": "input", "response_format": "text.format"}
"""Field of a chat -> the field of the Responses API that it came from."""


def read_response(body: Mapping[str, Any]) -> ParsedRequest:
    """The request in a body. Raises ApiError."""
    refuse_unknown(body, _KNOWN)
    refuse_unless_neutral(body, _NEUTRAL, _WHY)
    text, reasoning = typed_object(body, "text"), typed_object(body, "reasoning")
    if text.get("verbosity") not in {None, "medium"}:
        raise unsupported("text.verbosity", "text.verbosity is not supported")
    stream = flag(body, "stream")
    typed_object(body, "stream_options")
    include = _list(body, "include")
    if unknown := [each for each in include if each not in _INCLUDE]:
        raise bad("include", f"include has {unknown[0]!r:.100}; expected {' or '.join(_INCLUDE)}")
    top = whole(body, "top_logprobs", 0, 20) or 0
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong("reasoning.effort", "a text", effort)
    tools, choice = _tools(body), _tool_choice(body.get("tool_choice"))
    sampling = {name: value for name in ("temperature", "top_p") if (value := number(body, name)) is not None}
    most = whole(body, "max_output_tokens", 1, INT32)
    parallel = flag(body, "parallel_tool_calls", default=True)
    return ParsedRequest(
        "responses",
        model_of(body),
        stream=stream,
        include_usage=True,
        max_tokens=most,
        sampling=sampling,
        logprobs=_LOGPROBS in include or top > 0,
        top_logprobs=top,
        guide=guide_of(typed_object(text, "format", "text.format"), "text.format", inside=""),
        messages=_messages(body),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        variables={} if effort is None else {"reasoning_effort": effort},
        repeated={
            "instructions": body.get("instructions"),
            "max_output_tokens": most,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": parallel,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": sampling.get("temperature"),
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": sampling.get("top_p"),
            "truncation": "disabled",
        },
    )


def as_of_response(error: ApiError) -> ApiError:
    """The error, with the name that the client knows in place of a chat's field."""
    name = (error.param or "").partition("[")[0]
    if name in _CHAT_FIELDS:
        error.param = _CHAT_FIELDS[name]
    return error


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`instructions` and `input` as the messages of a chat. Each assistant turn becomes one message."""
    given, instructions = body.get("input"), body.get("instructions")
    if given is None:
        raise missing("input", "an")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "a text, or a list of items, at least one", given)
    if len(given) > MOST_MESSAGES:
        raise bad("input", f"input has {len(given)} items; the limit is {MOST_MESSAGES}")
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise wrong("instructions", "a text", instructions)
        messages.append({"role": "system", "content": instructions})
    for position, item in enumerate(given):
        _add(messages, item, f"input[{position}]")
    return messages


def _add(messages: list[dict[str, Any]], item: object, where: str) -> None:
    if not isinstance(item, dict):
        raise wrong(where, "an item", item)
    kind = item.get("type") or "message"
    if kind == "message":
        role, text = item.get("role"), _text(item.get("content"), f"{where}.content")
        if not isinstance(role, str):
            raise wrong(f"{where}.role", "a text", role)
        if role == "assistant":
            _turn(messages, free_of=("content", "tool_calls"))["content"] = text
        else:
            messages.append({"role": role, "content": text})
    elif kind == "reasoning":
        thought = _text(item.get("content") or "", f"{where}.content")
        if thought:
            _turn(messages, free_of=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = thought
    elif kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _text(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    else:
        raise unsupported(
            f"{where}.type",
            f"{where} is of type {kind!r:.100}, which is not supported; expected message, function_call, "
            "function_call_output or reasoning",
        )


def _turn(messages: list[dict[str, Any]], free_of: Sequence[str] = ()) -> dict[str, Any]:
    """The assistant's message at the end of the conversation, or a new one if it already has one of these fields."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in free_of):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _text(content: object, where: str) -> str:
    """The text of an item's content: a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "a text, or a list of parts", content)
    texts = []
    for number_of_part, part in enumerate(content):
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise unsupported(
                f"{where}[{number_of_part}]", f"{where} has a part of type {kind!r:.100}; this model only accepts text"
            )
        texts.append(text)
    return "".join(texts)


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = []
    for position, tool in enumerate(_list(body, "tools")):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else None
            raise unsupported(
                f"tools[{position}].type",
                f"tools[{position}] is of type {kind!r:.100}, which is not supported: tools run at the client; expected function",
            )
        tools.append({"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}})
    return tools


def _tool_choice(choice: object) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise wrong("tool_choice", 'none, auto, required or {"type": "function", "name": NAME}', choice)


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(name, "a list", value)
    return value
