"""Requests of clients: what is read, and what is refused in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trtllm_pipeline.serve.gateway.api_error import ApiError
from trtllm_pipeline.serve.gateway.parsed_request import Endpoint, Guide, ParsedRequest, parse_body, read

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "m", "prompt": "x"}


def refused(endpoint: Endpoint, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(endpoint, body)
    assert caught.value.status == 400
    return caught.value


def test_defaults_and_nulls_are_the_same() -> None:
    nulls = dict.fromkeys(
        ("n", "stop", "seed", "temperature", "tools", "logprobs", "stream_options", "response_format")
    )
    assert (
        read("chat", CHAT) == read("chat", {**CHAT, **nulls}) == ParsedRequest("chat", "m", messages=CHAT["messages"])
    )
    assert read("completions", TEXT) == ParsedRequest("completions", "m", prompts=("x",))
    assert read("completions", {**TEXT, "prompt": ["a", "b"], "n": 3}).choices == 6


def test_everything_at_once() -> None:
    asked = read(
        "chat",
        {
            **CHAT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "stop": "end",
            "seed": -1,
            "temperature": 1,
            "top_k": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "user": "somebody",
            "logit_bias": {},
        },
    )
    assert (asked.stream, asked.include_usage, asked.max_tokens, asked.stop, asked.seed) == (
        True,
        True,
        7,
        ("end",),
        -1,
    )
    assert asked.sampling == {"temperature": 1.0, "top_k": 5}
    assert asked.guide == Guide("json_schema", '{"type": "object"}')
    assert asked.variables == {"enable_thinking": False, "reasoning_effort": "low"}


def test_fields_that_clients_of_other_servers_send() -> None:
    more = {"ignore_eos": True, "min_tokens": 5, "min_p": 0.1, "stop_token_ids": [2, 7], "skip_special_tokens": True}
    neutral = {
        "include_stop_str_in_output": False,
        "spaces_between_special_tokens": True,
        "guided_json": None,
        "priority": 0,
    }
    asked = read("chat", {**CHAT, **more, **neutral})
    assert (asked.ignore_eos, asked.stop_token_ids, asked.sampling["min_p"]) == (True, (2, 7), 0.1)
    assert (asked.skip_special_tokens, asked.add_special_tokens) == (True, None)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"messages": None}, "messages", "you must provide"),
        ({"messages": []}, "messages", "messages is an empty list; expected a list of one or more messages"),
        ({"messages": [1]}, "messages[0]", "an object with role and content"),
        ({"temperature": True}, "temperature", "temperature is true; expected a number from 0 to 2"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan"),
        ({"temperature": 2.1}, "temperature", "expected a number from 0 to 2"),
        ({"n": 0}, "n", "expected a whole number from 1 to 128"),
        ({"n": 1.0}, "n", "n is 1.0"),
        ({"max_tokens": 10**5000}, "max_tokens", "a number with many digits"),
        ({"stop": ["a", 1]}, "stop", "a text, or a list of texts"),
        ({"stop": ["a"] * 17}, "stop", "the limit is 16"),
        ({"stop": ["a", "b" * 1025]}, "stop", "a text of 1025 characters; the limit is 1024"),
        ({"bad_words": ["b" * 1025]}, "bad_words", "a text of 1025 characters; the limit is 1024"),
        ({"bad_words": ["b" * 1000] * 17}, "bad_words", "17000 characters; the limit is 16384"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        ({"ignore_eos": 1}, "ignore_eos", "expected true or false"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids", "expected a list of token ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids", "expected a list of token ids"),
        ({"stop_token_ids": [1] * 17}, "stop_token_ids", "the limit is 16"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens", "expected true or false"),
        ({"min_p": 2}, "min_p", "expected a number from 0 to 1"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "is not supported"),
        ({"guided_json": {}}, "guided_json", "response_format has its schema"),
        ({"stream": "yes"}, "stream", "expected true or false"),
        ({"top_logprobs": 1}, "top_logprobs", "only allowed with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "expected a whole number from 0 to 20"),
        ({"response_format": {"type": "xml"}}, "response_format.type", '"xml"; expected text'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
        ({"tools": {}}, "tools", "a list of tools"),
        ({"prompt": "x"}, "prompt", "it belongs to /v1/completions"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "logit_bias is not supported"),
        ({"functions": [{}]}, "functions", "its successor is tools"),
        ({"temprature": 1}, "temprature", "unrecognized request argument: temprature"),
    ],
)
def test_what_chat_refuses(change: dict[str, Any], param: str, said: str) -> None:
    error = refused("chat", {**CHAT, **change})
    assert error.param == param
    assert said in error.message
    assert json.loads(error.body)["error"]["param"] == param


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": [1, 2]}, "give its text"),
        ({"prompt": [[1]]}, "give its text"),
        ({"prompt": []}, "a list of texts"),
        ({"prompt": {}}, "a text, or a list of texts"),
        ({"best_of": 2}, "use n"),
        ({"suffix": "x"}, "it cannot fill gaps"),
        ({"logprobs": 6}, "expected a whole number from 0 to 5"),
        ({"logprobs": 0, "echo": True}, "cannot be combined"),
        ({"messages": []}, "it belongs to /v1/chat/completions"),
    ],
)
def test_what_completions_refuse(change: dict[str, Any], said: str) -> None:
    assert said in refused("completions", {**TEXT, **change}).message


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"[" * 99, b"[" * 200_000, b'{"a":' * 200, b"\xff", b"1" * 5000, b'"\\ud800"']
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert caught.value.message.count("JSON") <= 1
