"""The gateway as its clients know it: OpenAI's own Python client, curl, and OpenAI's published types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from tests.helpers.chat_models import LOG, Running, gateway, said, spoken
from tests.helpers.openai_shapes import chunk_of, shaped
from tests.helpers.scripted_server import Script, config

openai = pytest.importorskip("openai")

from openai.types import Completion, Model  # noqa: E402
from openai.types.chat import ChatCompletion  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {what}",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name, what in (("get_weather", "weather"), ("get_time", "time"))
]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def respond(_model: str, values: Mapping[str, Any]) -> Script:
    """What the model says: by the last message, or to the tools' results."""
    prompt = str(values["text_input"])
    if "<|im_start|>" not in prompt:
        return spoken(f" [{prompt}]")
    messages = said(prompt)
    begun = prompt.rpartition("<|im_start|>assistant\n")[2]
    role, asked = messages[-1]
    if begun:  # a call that was begun in the prompt
        rest = (
            'get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
            if begun.endswith('"name": "')
            else '{"city": "Oslo"}}'
        )
        return spoken(rest.removesuffix("}") if "guided_decoding_guide" in values else rest)
    if role == "tool":
        results = [text for role, text in messages if role == "tool"]
        return spoken(f"The tools say: {' and '.join(results)}.")
    match asked:
        case "weather":
            return spoken(call("get_weather", city="Köln"))
        case "both":
            return spoken(
                f"Let me look.\n\n{call('get_weather', city='Köln')}\n{call('get_time', city='Rome')}<|im_end|>",
                gap_s=0.005,
            )
        case "cut":
            return spoken(call("get_weather", city="Köln")[:60])
        case "broken":
            return spoken("<tool_call>nothing</tool_call>")
        case "think":
            return spoken("<think>\nLet me think.\n</think>\n\nIt is.")
        case "fail":
            return Script(((0.0, "Now"),), error="the engine died")
        case "options":
            shown = {name: value for name, value in values.items() if name != "text_input"}
            return spoken(json.dumps(shown, default=str))
    return spoken(f"{len(messages)} messages: {asked}")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with gateway(tmp_path_factory.mktemp("gateway"), respond) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=running.url, api_key="none", max_retries=0) as found:
        yield found


def ask(client: Any, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": text}], **more)


# ------------------------------------------------------------------------------------------------------ the client


@pytest.mark.seam
def test_chat(client: Any) -> None:
    answer = ask(client, "hello")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "1 messages: hello",
        "stop",
    )
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


@pytest.mark.seam
def test_chat_streamed(client: Any) -> None:
    chunks = list(ask(client, "hello", stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(texts) == "1 messages: hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    with client.chat.completions.stream(model="scripted", messages=[{"role": "user", "content": "think"}]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "content.delta" in kinds
    assert (final.content, final.reasoning_content) == ("It is.", "Let me think.")


def test_several_choices_and_completions(client: Any) -> None:
    assert [choice.message.content for choice in ask(client, "x", n=3).choices] == ["1 messages: x"] * 3
    done = client.completions.create(model="scripted", prompt=["a", "b"], max_tokens=50)
    assert [choice.text for choice in done.choices] == [" [a]", " [b]"]
    parts: dict[int, str] = {}
    for chunk in client.completions.create(model="scripted", prompt=["a", "b"], max_tokens=50, stream=True):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    assert parts == {0: " [a]", 1: " [b]"}


@pytest.mark.seam
def test_stop_words_and_limits(client: Any) -> None:
    stopped = ask(client, "one two three", stop=["two"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("1 messages: one ", "stop")
    given = json.loads(
        ask(client, "options", max_tokens=999, seed=7, temperature=0.5, extra_body={"top_k": 4})
        .choices[0]
        .message.content
    )
    assert {name: given[name] for name in ("max_tokens", "random_seed", "top_k")} == {
        "max_tokens": 999,
        "random_seed": 7,
        "top_k": 4,
    }


def test_requests_at_once(running: Running) -> None:
    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=running.url, api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(ask(client, f"number {number}") for number in range(16)))
            assert [answer.choices[0].message.content for answer in answers] == [
                f"1 messages: number {number}" for number in range(16)
            ]

    asyncio.run(talk())


# -------------------------------------------------------------------------------------------------------------- tools


@pytest.mark.seam
def test_tools(client: Any) -> None:
    choice = ask(client, "both", tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    calls = choice.message.tool_calls
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == [
        ("get_weather", {"city": "Köln"}),
        ("get_time", {"city": "Rome"}),
    ]
    assert len({each.id for each in calls}) == 2
    # the results go back, with what was said before
    talk = [{"role": "user", "content": "both"}, choice.message.model_dump(exclude_none=True)]
    talk += [
        {"role": "tool", "tool_call_id": each.id, "content": text}
        for each, text in zip(calls, ("18 °C", "12:00"), strict=True)
    ]
    answer = client.chat.completions.create(model="scripted", messages=talk, tools=TOOLS)
    assert answer.choices[0].message.content == "The tools say: 18 °C and 12:00."


@pytest.mark.seam
def test_tools_streamed(client: Any) -> None:
    chunks = list(ask(client, "both", tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    names = [(part.index, part.function.name) for part in parts if part.id]
    assert names == [(0, "get_weather"), (1, "get_time")]
    for index, city in enumerate(("Köln", "Rome")):
        pieces = [part.function.arguments for part in parts if part.index == index and not part.id]
        assert json.loads("".join(pieces)) == {"city": city}
    assert "".join(delta.content or "" for delta in deltas) == "Let me look."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # the client's own way to put them together
    with client.chat.completions.stream(
        model="scripted", messages=[{"role": "user", "content": "weather"}], tools=TOOLS
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [("get_weather", '{"city": "K\\u00f6ln"}')]


def test_tool_choice(client: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, expected in ((named, ("get_weather", {"city": "Oslo"})), ("required", ("get_time", {"city": "Rome"}))):
        (made,) = ask(client, "hello", tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == expected
    none = ask(client, "weather", tools=TOOLS, tool_choice="none").choices[0]
    assert none.message.content.startswith("<tool_call>")
    assert none.finish_reason == "stop"
    one = ask(client, "both", tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert [each.function.name for each in one.message.tool_calls] == ["get_weather"]
    assert one.finish_reason == "tool_calls"


def test_calls_that_are_none(client: Any) -> None:
    broken = ask(client, "broken", tools=TOOLS).choices[0]
    assert (broken.message.content, broken.message.tool_calls) == ("<tool_call>nothing</tool_call>", None)
    cut = ask(client, "cut", tools=TOOLS).choices[0]
    assert cut.message.content.startswith('<tool_call>\n{"name": "get_weather"')
    assert cut.message.tool_calls is None


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.seam
@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"model": "other"}, "NotFoundError", "does not exist"),
        ({"messages": []}, "BadRequestError", "messages"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "BadRequestError",
            "names 'x'",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "BadRequestError", "name is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "BadRequestError",
            "image_url",
        ),
        ({"max_tokens": 10**6}, "BadRequestError", "context"),
        ({"messages": [{"role": "user", "content": "fail"}]}, "APIStatusError", "the engine died"),
    ],
)
def test_errors(client: Any, asked: dict[str, Any], error: str, words: str) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], **asked}
    for stream in (False, True):
        if error == "APIStatusError" and stream:
            continue
        with pytest.raises(getattr(openai, error), match=words) as caught:
            client.chat.completions.create(**body, stream=stream)
        assert caught.value.body["message"]
        assert caught.value.request is not None


@pytest.mark.seam
def test_an_error_within_a_stream(client: Any) -> None:
    with pytest.raises(openai.APIError, match="the engine died"):
        list(ask(client, "fail", stream=True))


# ------------------------------------------------------------------------------------- an OpenAI-compatible server


def test_parts_that_are_no_text_pass_through(tmp_path: Path) -> None:
    """What the server behind the gateway takes, its clients may send: images, tools of its own."""
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
    ]
    asked: list[Mapping[str, Any]] = []

    def see(_model: str, values: Mapping[str, Any]) -> Script:
        asked.append(values)
        return spoken("A cat.")

    with gateway(tmp_path, see, passing=True) as found, openai.OpenAI(base_url=found.url, api_key="x") as client:
        messages = [{"role": "user", "content": parts}]
        answer = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
        assert (answer.model, answer.choices[0].message.content) == ("scripted", "A cat.")
        chunks = list(client.chat.completions.create(model="scripted", messages=messages, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "A cat."
    assert [each["messages"] for each in asked] == [messages] * 2
    assert asked[0]["tools"] == TOOLS


# ------------------------------------------------------------------------------------------------------ special tokens


@pytest.mark.parametrize("kept", [False, True])
def test_markers_that_the_server_drops(tmp_path: Path, kept: bool) -> None:
    """A Mistral whose control tokens do not arrive: the log says so, and a call is found without its marker."""
    marker = "[TOOL_CALLS]" if kept else ""

    def mistral(_model: str, _values: Mapping[str, Any]) -> Script:
        return spoken(f'{marker}[{{"name": "get_time", "arguments": {{"city": "Rome"}}}}]{"</s>" if kept else ""}')

    postprocessing = config("postprocessing")
    postprocessing.parameters["skip_special_tokens"].string_value = str(not kept)
    template = "{{ '[INST]' + messages[-1].content + '[/INST]' }}{% set form = '[TOOL_CALLS]' %}"
    with (
        gateway(
            tmp_path, mistral, template=template, special=["[TOOL_CALLS]", "</s>"], others=[postprocessing]
        ) as found,
        openai.OpenAI(base_url=found.url, api_key="x") as client,
    ):
        (made,) = ask(client, "hello", tools=TOOLS).choices[0].message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("get_time", {"city": "Rome"})
        assert len(made.id) == 9
    log = (tmp_path / LOG).read_text(encoding="utf-8")
    assert ("without [TOOL_CALLS] they look like text" in log) is not kept


# --------------------------------------------------------------------------------------------------- guided decoding


def engine(backend: str) -> Any:
    """TensorRT-LLM's engine model, which has the inputs for guided decoding with and without a backend for it."""
    model = config("tensorrt_llm")
    model.parameters["guided_decoding_backend"].string_value = backend
    return model


def test_a_server_that_follows_no_schema(tmp_path: Path) -> None:
    """A call is forced by its beginning alone."""
    others = [engine("${guided_decoding_backend}")]
    with (
        gateway(tmp_path, respond, guided=True, others=others) as found,
        openai.OpenAI(base_url=found.url, api_key="x") as client,
    ):
        (made,) = ask(client, "hello", tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("get_time", {"city": "Rome"})
        with pytest.raises(openai.BadRequestError, match="no guided decoding"):
            ask(client, "hello", response_format={"type": "json_object"})


@pytest.mark.parametrize("others", [[], [engine("xgrammar")]], ids=["another model", "an engine"])
def test_what_guides_the_model(tmp_path: Path, others: list[Any]) -> None:
    with (
        gateway(tmp_path, respond, guided=True, others=others) as found,
        openai.OpenAI(base_url=found.url, api_key="x") as client,
    ):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        given = json.loads(ask(client, "options", response_format=form).choices[0].message.content)
        assert given["guided_decoding_guide_type"] == "json_schema"
        assert json.loads(given["guided_decoding_guide"]) == schema
        choice = {"type": "function", "function": {"name": "get_weather"}}
        (made,) = ask(client, "hello", tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
        assert json.loads(made.function.arguments) == {"city": "Oslo"}


# ---------------------------------------------------------------------------------------------------------- responses


RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]


@pytest.mark.seam
def test_responses_and_their_tools(client: Any) -> None:
    """The items of a response go back with the results of its calls."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "both"}]}]
    first = client.responses.create(model="scripted", input=items, instructions="Be brief.", tools=RESPONSE_TOOLS)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert (first.output_text, first.status) == ("Let me look.", "completed")
    items += first.output
    for item in first.output[1:]:
        city = json.loads(item.arguments)["city"]
        items.append({"type": "function_call_output", "call_id": item.call_id, "output": f"{item.name} {city}"})
    second = client.responses.create(model="scripted", input=items, tools=RESPONSE_TOOLS, store=False)
    assert second.output_text == "The tools say: get_weather Köln and get_time Rome."
    with pytest.raises(openai.BadRequestError, match="send the earlier items in input") as caught:
        client.responses.create(model="scripted", input="hello", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="no guided decoding") as caught:
        client.responses.create(model="scripted", input="x", text={"format": {"type": "json_object"}})
    assert caught.value.param == "text.format"


@pytest.mark.parametrize(
    ("asked", "types", "status"),
    [
        ({"input": "hello"}, ["message"], "completed"),
        ({"input": "hello", "max_output_tokens": 2}, ["message"], "incomplete"),
        ({"input": "think"}, ["reasoning", "message"], "completed"),
        ({"input": "both", "tools": RESPONSE_TOOLS}, ["message", "function_call", "function_call"], "completed"),
        ({"input": "x", "tools": RESPONSE_TOOLS, "tool_choice": "required"}, ["function_call"], "completed"),
    ],
    ids=str,
)
def test_every_response_has_the_published_shape(
    running: Running, asked: dict[str, Any], types: list[str], status: str
) -> None:
    """The events of a stream build the response that is sent whole."""
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    with httpx.Client(timeout=60) as http:
        whole = shaped(Response, http.post(f"{running.url}/responses", json={"model": "scripted", **asked}).text)
        streamed = http.post(f"{running.url}/responses", json={"model": "scripted", **asked, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in streamed.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(event_type.validate_json(data.removeprefix("data: "), strict=True))
        assert name == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert (events[-1].type, last.status, whole.status) == (f"response.{status}", status, status)
    assert [item.type for item in last.output] == [item.type for item in whole.output] == types
    assert last.usage == whole.usage
    for number, (item, same) in enumerate(zip(last.output, whole.output, strict=True)):
        mine = [event for event in events if getattr(event, "output_index", None) == number]
        text = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert text == (same.arguments if item.type == "function_call" else same.content[0].text)
        assert (mine[0].type, mine[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert mine[-1].item == item


def test_a_response_that_fails_ends_with_an_error(running: Running, client: Any) -> None:
    with pytest.raises(openai.APIError, match="the engine died"):
        list(client.responses.create(model="scripted", input="fail", stream=True))
    streamed = httpx.post(
        f"{running.url}/responses", json={"model": "scripted", "input": "fail", "stream": True}, timeout=60
    )
    name, data = streamed.text.strip().split("\n\n")[-1].split("\n")
    error = TypeAdapter(ResponseStreamEvent).validate_json(data.removeprefix("data: "), strict=True)
    assert (name, error.type, error.code) == ("event: error", "error", "bad_gateway")


# ------------------------------------------------------------------------------------------------------------- shapes


REQUESTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hello"}]},
    {"messages": [{"role": "user", "content": "hello"}], "n": 2},
    {"messages": [{"role": "user", "content": "think"}]},
    {"messages": [{"role": "user", "content": "both"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": "cut"}], "tools": TOOLS},
    {"messages": [{"role": "user", "content": "both"}], "tools": TOOLS, "parallel_tool_calls": False},
    {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": "required"},
    {"prompt": "a", "max_tokens": 50},
    {"prompt": ["a", "b"], "max_tokens": 50, "echo": True},
]


@pytest.mark.parametrize("asked", REQUESTS, ids=str)
def test_every_answer_has_the_published_shape(running: Running, asked: dict[str, Any]) -> None:
    chat = "messages" in asked
    path = f"{running.url}/{'chat/completions' if chat else 'completions'}"
    with httpx.Client(timeout=60) as http:
        whole = http.post(path, json={"model": "scripted", **asked})
        assert whole.status_code == 200
        assert whole.headers["content-type"] == "application/json"
        answer = shaped(ChatCompletion if chat else Completion, whole.text)
        for usage in (False, True):
            body = {"model": "scripted", **asked, "stream": True, "stream_options": {"include_usage": usage}}
            streamed = http.post(path, json=body)
            assert streamed.headers["content-type"].startswith("text/event-stream")
            _check_stream(streamed.text, chat=chat, usage=usage, choices=len(answer.choices))


def _check_stream(text: str, *, chat: bool, usage: bool, choices: int) -> None:
    assert text.endswith("\n\n")
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    chunks = [chunk_of(event, chat=chat) for event in events]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    if usage:
        assert all("usage" in json.loads(event.removeprefix("data: ")) for event in events)
        assert (chunks[-1].choices, [chunk.usage for chunk in chunks[:-1]]) == ([], [None] * (len(chunks) - 1))
        assert chunks.pop().usage.total_tokens > 0
    else:
        assert not any("usage" in json.loads(event.removeprefix("data: ")) for event in events)
    for index in range(choices):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.finish_reason for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason is not None
        if chat:
            assert [choice.delta.role for choice in mine] == ["assistant", *[None] * (len(mine) - 1)]


def test_models_and_errors_have_the_published_shape(running: Running) -> None:
    with httpx.Client(base_url=running.url, timeout=60) as http:
        listed = http.get("/models").json()
        assert listed["object"] == "list"
        for model in listed["data"]:
            shaped(Model, json.dumps(model))
        shaped(Model, http.get("/models/scripted").text)
        wrong = [
            http.post("/chat/completions", content=b"{", headers={"content-type": "application/json"}),
            http.post("/chat/completions", json={"model": "x"}),
            http.post("/chat/completions", json={"model": "scripted", "messages": "x"}),
            http.post("/chat/completions", content=b"x"),
            http.get("/chat/completions"),
            http.get("/nothing"),
            http.get("/models/nothing"),
        ]
    assert [answer.status_code for answer in wrong] == [400, 404, 400, 415, 405, 404, 404]
    for answer in wrong:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
