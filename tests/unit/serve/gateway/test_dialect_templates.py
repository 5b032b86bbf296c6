"""Each family's chat template: it is recognized, and gets tools, calls and results in the form that it takes."""
# ruff: noqa: RUF001 - markers as models write them

from __future__ import annotations

import json
from typing import Any

import pytest

from trtllm_pipeline.serve.gateway.dialects import dialect_for
from trtllm_pipeline.serve.gateway.dialects.dialect import DialectError, Turn, special_markers
from trtllm_pipeline.serve.gateway.dialects.parsing import CallArguments, CallStart

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"city": 'Köln "am Rhein"', "days": 2}
CALL = {
    "id": "call_0123456789abcdefghijkl",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
}
SECOND = {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}}
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, SECOND]},
    {"role": "tool", "tool_call_id": "call_0123456789abcdefghijkl", "content": "It rains."},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "12:00"}]},
]

TEMPLATES = [
    ("hermes", "Answer with <tool_call>."),
    ("qwen3-coder", "<tool_call>\n<function=NAME>\n<parameter=KEY>"),
    ("glm", "<tool_call>NAME\n<arg_key>KEY</arg_key>"),
    ("llama3", "{% set builtin = '<|python_tag|>' %}"),
    ("llama3", 'Answer with {"name": ..., "parameters": ...}. Environment: ipython'),
    ("llama4", "<|python_start|>[NAME()]<|python_end|>"),
    ("mistral", "[AVAILABLE_TOOLS] [TOOL_CALLS] []"),
    ("mistral-v11", "[AVAILABLE_TOOLS] [TOOL_CALLS]NAME[ARGS]"),
    ("phi", "{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}"),
    ("phi", "functools[...]"),
    ("granite", "Write <|tool_call|> and a list."),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"),
    ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"),
    ("harmony", "<|start|>assistant<|channel|>commentary to=functions.NAME"),
]
"""What the template of a family has, in short."""
AS_TEXT = {"deepseek", "deepseek-v3.1"}
IN_CONTENT = {"phi", "granite"}


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_a_template_is_recognized(name: str, template: str) -> None:
    assert dialect_for("auto", template).name == name


@pytest.mark.parametrize("name", sorted(dict(TEMPLATES)))
def test_a_conversation_with_tools(name: str) -> None:
    """As templates of the family take it: earlier calls with their arguments, and the name of what a result is of."""
    dialect = dialect_for(name, None)
    prepared = dialect.prepare(Turn(TALK, TOOLS))
    system, user, asked, *results = prepared.chat.messages
    assert (system["role"], system["content"], user["content"]) == ("system", "Be\nbrief.", "Is it raining?")
    assert [(each["name"], each["content"]) for each in results] == [("get_weather", "It rains."), ("now", "12:00")]
    assert prepared.chat.tools == TOOLS
    calls = [("get_weather", ARGUMENTS), ("now", {})]
    if name in IN_CONTENT:
        parser = prepared.start("", stream=False).parser
        deltas = [*parser.feed(asked["content"]), *parser.end()]
        names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
        given = [json.loads(delta.text) for delta in deltas if isinstance(delta, CallArguments)]
        assert list(zip(names, given, strict=True)) == calls
        assert len(deltas) == 4, "no content"
    else:
        functions = [each["function"] for each in asked["tool_calls"]]
        loaded = json.loads if name in AS_TEXT else dict
        assert [(each["name"], loaded(each["arguments"])) for each in functions] == calls
        assert {type(each["arguments"]) for each in functions} == {str if name in AS_TEXT else dict}
    if name == "phi":
        assert json.loads(system["tools"]) == [tool["function"] for tool in TOOLS]
    if name.startswith("mistral"):
        ids = [each["id"] for each in asked["tool_calls"]]
        assert all(len(each) == 9 and each.isalnum() for each in ids), "templates refuse others"
        assert [each["tool_call_id"] for each in results] == ids
    if name == "harmony":
        assert "content" not in asked, "a template takes either content or thinking"


def test_reasoning_is_fed_back_where_the_template_takes_it() -> None:
    talk = [*TALK[:2], {**TALK[2], "reasoning_content": "Look it up."}, *TALK[3:]]
    assert dialect_for("harmony", None).prepare(Turn(talk, TOOLS)).chat.messages[2]["thinking"] == "Look it up."


def test_variables_reach_the_template() -> None:
    prepared = dialect_for("plain", None).prepare(Turn(TALK[:2], variables={"enable_thinking": True}))
    assert prepared.chat.variables == {"enable_thinking": True}


def test_tools_are_in_a_system_message_of_phi() -> None:
    """Which is added where there is none, and told to templates that take tools as others do."""
    chat = dialect_for("phi", None).prepare(Turn(TALK[1:2], TOOLS)).chat
    assert [each["role"] for each in chat.messages] == ["system", "user"]
    assert chat.tools == TOOLS


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "messages\\[0\\].role is 'robot'; expected one of assistant"),
        ({"role": "user", "content": 5}, "content is neither a text nor a list"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type 'text' whose text is missing"),
        ({"role": "user", "content": None}, "messages\\[0\\] has no content"),
        ({"role": "system"}, "messages\\[0\\] has no content"),
        ({"role": "user", "content": ["text"]}, "part of type None"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "has no function with a name"),
        ({"role": "assistant", "tool_calls": 5}, "has no function with a name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "[1]"}}]},
            "arguments is not a JSON object",
        ),
    ],
)
def test_messages_that_no_template_takes(message: dict[str, Any], words: str) -> None:
    with pytest.raises(DialectError, match=words) as caught:
        dialect_for("hermes", None).prepare(Turn([message]))
    assert caught.value.param.startswith("messages[0]")


def test_templates_that_are_none_of_a_known_family() -> None:
    for source in (None, "", "{{ messages[0].content }}", "<start_of_turn>{{ messages }}"):
        assert dialect_for("auto", source, {"model_type": "gemma3"}).name == "plain"
    role = "{{ '<|start_of_role|>' }}{{ tools }}"
    assert dialect_for("auto", role, {"model_type": "granite"}).name == "granite"
    assert dialect_for("auto", role, {"model_type": "other"}).name == "plain"


def test_special_tokens_that_a_backend_must_keep() -> None:
    assert special_markers(dialect_for("hermes", None), ["<|im_end|>", "<s>"]) == ()
    assert special_markers(dialect_for("mistral", None), ["</s>", "[TOOL_CALLS]", "[THINK]"]) == (
        "[TOOL_CALLS]",
        "[THINK]",
    )
    assert "<|message|>" in special_markers(dialect_for("harmony", None), ["<|message|>", "<|end|>"])
