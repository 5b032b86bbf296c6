"""Requests of the Responses API: they become conversations, and what cannot be done here is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_pipeline.serve.gateway.api_error import ApiError, bad
from trtllm_pipeline.serve.gateway.parsed_request import Guide
from trtllm_pipeline.serve.gateway.responses_request import as_of_response, read_response

BODY = {"model": "m", "input": "x"}
USER = {"role": "user", "content": "x"}


def messages(given: object, **more: Any) -> list[Any]:
    return list(read_response({"model": "m", "input": given, **more}).messages)


def test_texts_and_messages() -> None:
    assert messages("x") == [USER]
    assert messages("x", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, USER]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages([{"type": "message", "role": "developer", "content": parts}, USER]) == [
        {"role": "developer", "content": "ab"},
        USER,
    ]


def test_one_turn_of_the_assistant_is_one_message() -> None:
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "1",
        "name": "f",
        "arguments": "{}",
        "status": "completed",
    }
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
    }
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    result = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "3"}]}
    turn = [thought, said, call, {**call, "call_id": "2"}, result, said, said]
    function = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages([USER, *turn]) == [
        USER,
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", **function}, {"id": "2", **function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a"},
    ]
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "..."}
    assert messages([USER, encrypted]) == [USER]


def test_fields_of_a_chat() -> None:
    schema = {"type": "object", "properties": {}}
    parsed = read_response(
        {
            **BODY,
            "max_output_tokens": 7,
            "temperature": 0,
            "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_obfuscation": False},
            "store": False,
            "truncation": "disabled",
            "prompt_cache_key": "x",
            "metadata": None,
        }
    )
    assert parsed.tools == [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    assert parsed.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert parsed.guide == Guide("json_schema", '{"type": "object"}')
    assert (parsed.max_tokens, parsed.sampling, parsed.variables) == (
        7,
        {"temperature": 0},
        {"reasoning_effort": "low"},
    )
    assert (parsed.logprobs, parsed.top_logprobs, parsed.stream) == (True, 2, True)
    assert (parsed.repeated["metadata"], parsed.repeated["top_p"]) == ({}, None)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"store": True}, "store", "responses are not stored here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
        ({"conversation": "conv_1"}, "conversation", "send the earlier items in input"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "long inputs are not truncated"),
        ({"input": None}, "input", "you must provide an input"),
        ({"input": []}, "input", "at least one"),
        ({"input": ["x"]}, "input[0]", "expected an item"),
        ({"input": [{"content": "x"}]}, "input[0].role", "expected a text"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type", "'item_reference', which is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]", "only accepts text"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content", "a list of parts"),
        ({"instructions": 1}, "instructions", "expected a text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "tools run at the client"),
        ({"tools": {}}, "tools", "a list"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "expected none, auto, required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", '"xml"'),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"include": ["file_search_call.results"]}, "include", "expected message.output_text.logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
        ({"top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort", "a text"),
        ({"messages": []}, "messages", "unrecognized request argument"),
        ({"model": None}, "model", "must provide a model"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_response({**BODY, **change})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message


def test_errors_of_the_conversation_name_the_fields_of_a_response() -> None:
    assert as_of_response(bad("messages[3].content", "x")).param == "input"
    assert as_of_response(bad("response_format", "x")).param == "text.format"
    assert as_of_response(bad("tools", "x")).param == "tools"
    assert as_of_response(bad("prompt", "x")).param == "prompt"
