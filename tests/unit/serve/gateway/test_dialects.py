"""Dialects: what families write becomes content, reasoning and calls, in whatever pieces it comes."""
# ruff: noqa: RUF001 - markers as models write them

from __future__ import annotations

import json
import string
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.serve.gateway import dialects
from trtllm_pipeline.serve.gateway.dialects import dialect_for
from trtllm_pipeline.serve.gateway.dialects.dialect import DialectError, Started, Turn
from trtllm_pipeline.serve.gateway.dialects.parsing import CallArguments, CallStart, Content, Delta, Reasoning

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "near": {"type": "array", "items": {"type": "string"}},
        "at": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = [{"role": "user", "content": "Is it raining?"}]
BERLIN, NOW = ("get_weather", {"city": "Berlin", "days": 2}), ("now", {})


class Found(NamedTuple):
    """What an answer says."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


def found(deltas: list[Delta]) -> Found:
    """All deltas together. Arguments that are no JSON are left as they are."""
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.index == len(names)
            names.append(delta.name)
            arguments.append("")
        elif isinstance(delta, CallArguments):
            assert delta.index == len(names) - 1, "a call's parts come after its start and before the next call"
            arguments[delta.index] += delta.text
    told = [_loaded(text) for text in arguments]
    return Found(
        "".join(each.text for each in deltas if isinstance(each, Content)),
        "".join(each.text for each in deltas if isinstance(each, Reasoning)),
        tuple(zip(names, told, strict=True)),
    )


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def start(name: str, prompt: str = "", *, stream: bool = True, tools: Any = TOOLS, **asked: Any) -> Started:
    guided = asked.pop("guided", False)
    return dialect_for(name, None).prepare(Turn(ASK, tools, **asked)).start(prompt, stream=stream, guided=guided)


def read(started: Started, pieces: list[str]) -> list[Delta]:
    deltas = [delta for piece in pieces for delta in started.parser.feed(piece)]
    return deltas + started.parser.end()


def answer(name: str, text: str, prompt: str = "", **asked: Any) -> Found:
    """What the text says: the same whole, by character, streamed and not."""
    wholly = found(read(start(name, prompt, **asked), [text]))
    for stream in (True, False):
        assert found(read(start(name, prompt, stream=stream, **asked), list(text))) == wholly
    return wholly


CALLS = {
    "hermes": [
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>'
        ),
        (
            '<tool_call>{"arguments": {"city": "Berlin", "days": 2}, "name": "get_weather"}</tool_call>'
            '<tool_call>{"name": "now", "arguments": null}'
        ),
        '<tool_call>[{"name": "get_weather", "arguments": "{\\"city\\": \\"Berlin\\", \\"days\\": 2}"}, {"name": "now"}]',
    ],
    "qwen3-coder": [
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nBerlin\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
        (
            "<function=get_weather><parameter=city>Berlin</parameter><parameter=days>2</parameter></function>\n"
            "<function=now></function>"
        ),
    ],
    "glm": [
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Berlin</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call><|observation|>"
        ),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Berlin</arg_value><arg_key>days</arg_key>"
            "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>"
        ),
    ],
    "llama3": [
        '{"name": "get_weather", "parameters": {"city": "Berlin", "days": 2}}; {"name": "now", "parameters": {}}',
        (
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Berlin", "days": 2}}; '
            '{"type": "function", "name": "now", "parameters": {}}<|eom_id|>'
        ),
        '<|python_tag|>get_weather.call(city="Berlin", days=2); now.call()<|eom_id|>',
    ],
    "llama4": [
        '[get_weather(city="Berlin", days=2), now()]<|eot|>',
        "<|python_start|>[get_weather(city='Berlin', days=2), now()]<|python_end|><|eom|>",
        '{"name": "get_weather", "parameters": {"city": "Berlin", "days": 2}}\n{"name": "now", "parameters": {}}<|eot|>',
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, '
            '{"name": "now", "arguments": {}, "id": "VvvODy9mT"}]</s>'
        ),
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Berlin", "days": 2}[TOOL_CALLS]now[ARGS]{}</s>',
        '[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Berlin", "days": 2}[TOOL_CALLS]now{}',
        # by a backend that drops control tokens
        '[{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, {"name": "now", "arguments": {}}]',
        'get_weather{"city": "Berlin", "days": 2}now{}',
    ],
    "phi": [
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, {"name": "now"}]<|/tool_call|>',
        'functools[{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, {"name": "now", "arguments": {}}]',
        '[{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, {"name": "now", "arguments": {}}]',
    ],
    "granite": [
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, {"name": "now"}]',
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}, {"name": "now"}]',
    ],
    "deepseek": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Berlin", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
            "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        ),
    ],
    "deepseek-v3.1": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Berlin", "days": 2}'
            "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ],
    "harmony": [
        (
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Berlin", "days": 2}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}'
            "<|call|>"
        ),
    ],
}
CALLS["mistral-v11"] = CALLS["mistral"]
EVERY = [(name, text) for name, texts in CALLS.items() for text in texts]


def test_every_dialect_with_tools_is_tested() -> None:
    assert {name for name in dialects.names() if name not in {"auto", "plain"}} == set(CALLS)


def test_every_dialect_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "gateway.md").read_text(encoding="utf-8")
    assert [name for name in CALLS if f"\n| `{name}` |" not in page] == []


@pytest.mark.parametrize(("name", "text"), EVERY)
def test_calls(name: str, text: str) -> None:
    assert answer(name, text) == Found("", "", (BERLIN, NOW))


VLLM = json.loads((Path(__file__).parents[3] / "data" / "vllm_tool_calls.json").read_text(encoding="utf-8"))
"""Responses written for this test, and the content and calls that vLLM's parser of the same family reads in them."""


@pytest.mark.parametrize("case", VLLM["cases"], ids=[each["dialect"] for each in VLLM["cases"]])
def test_a_response_has_the_content_and_calls_that_vllm_reads_in_it(case: dict[str, Any]) -> None:
    read_here = answer(case["dialect"], case["text"], tools=VLLM["tools"])
    assert read_here.content.strip() == case["content"]
    assert [list(call) for call in read_here.calls] == case["calls"]


@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        (name, text[: text.rindex(end)], end)
        for name, end in (
            ("hermes", "</tool_call>"),
            ("qwen3-coder", "</tool_call>"),
            ("phi", "<|/tool_call|>"),
            ("deepseek", "```<｜tool▁call▁end｜>"),
            ("deepseek-v3.1", "<｜tool▁call▁end｜>"),
            ("deepseek-v3.1", "<｜tool▁calls▁end｜>"),
        )
        for text in CALLS[name][:1]
    ],
)
def test_a_response_that_is_cut_off_inside_the_end_of_a_call_has_no_part_of_it_as_content(
    name: str, text: str, end: str
) -> None:
    for length in range(len(end)):
        assert answer(name, text + end[:length]) == Found("", "", (BERLIN, NOW))


@pytest.mark.parametrize(("name", "text"), EVERY)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_split_changes_what_is_said(name: str, text: str, data: st.DataObject) -> None:
    if name not in {"llama3", "llama4", "harmony"}:
        text = "Let me see.\n\n" + text
    if name != "harmony":
        text = "\n<think>\nIs it?\n</think>\n\n" + text if not name.startswith("mistral") else text
    # what is cut off or damaged as well
    text = text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    at = data.draw(st.integers(0, len(text)))
    text = (
        text[:at]
        + data.draw(st.sampled_from(["", "", '"', "}", "<", "\\", "\n", "é", "<tool_call>", "[", "("]))
        + text[at:]
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    pieces = [text[left:right] for left, right in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for stream in (True, False):
        wholly = read(start(name, stream=stream), [text])
        assert found(read(start(name, stream=stream), pieces)) == found(wholly)
        if not stream:
            assert all(isinstance(arguments, dict) for _, arguments in found(wholly).calls)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(CALLS)),
    parts=st.lists(
        st.sampled_from([piece for texts in CALLS.values() for text in texts for piece in text.split(" ")])
        | st.text(max_size=8)
    ),
)
def test_anything_can_be_read(name: str, parts: list[str]) -> None:
    for stream in (True, False):
        read(start(name, stream=stream), parts)


MARKS = ("<", "[THINK]", "[TOOL_CALLS]", "functools[")
"""With which calls and reasoning begin; Hypothesis takes such texts from the code."""


@pytest.mark.parametrize("name", [name for name in dialects.names() if name not in {"auto", "harmony"}])
@given(text=st.text(alphabet=string.printable, max_size=60).filter(lambda text: not any(map(text.__contains__, MARKS))))
@settings(max_examples=20, deadline=None)
def test_text_without_calls_is_content_as_it_is(name: str, text: str) -> None:
    for tools in ([], TOOLS) if name != "plain" else ([],):
        assert found(read(start(name, tools=tools), list(text))) == Found(text)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "glm", "deepseek", "phi", "granite", "mistral"])
def test_content_before_between_and_after_calls(name: str) -> None:
    text = CALLS[name][0]
    assert answer(name, f"First.\n\n{text} \nThen.\n{text}\n") == Found("First.Then.", "", (BERLIN, NOW, BERLIN, NOW))


BROKEN = [
    ("hermes", "<tool_call>nonsense</tool_call> and more"),
    ("hermes", '<tool_call>\n{"nome": "now"}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "none"}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}'),
    ("hermes", '<tool_call>{"name": "now"'),
    ("hermes", "a <tool"),
    ("hermes", "a < b, <tool_call> c"),
    ("qwen3-coder", "<tool_call>\n<function=now"),
    ("qwen3-coder", "<tool_call>\nnothing"),
    ("llama3", '{"name": "unknown", "parameters": {}}'),
    ("llama3", '{"temperature": 3}'),
    ("llama3", "[1] is the source"),
    ("llama3", "<|python_tag|>print(1)"),
    ("llama3", "<|python_tag|>get_weather(**x)"),
    ("llama4", '[get_weather(city=open("x"))]'),
    ("llama4", '[get_weather("Berlin")]'),
    ("llama4", "[get_weather(city=" + "(" * 5000),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] of no form"),
    ("mistral", '[{"a": 1}]'),
    ("phi", "functools[0] is Python"),
    ("granite", "<|tool_call|>[]"),
    ("deepseek", "<｜tool▁calls▁begin｜>none"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"),
    ("harmony", "just text"),
    ("harmony", "<|channel|>commentary to=functions.now"),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>none"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert answer(name, text) == Found(text)


def test_a_broken_call_does_not_hide_the_next() -> None:
    text = '<tool_call>{"name": }</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert answer("hermes", text) == Found('<tool_call>{"name": }</tool_call>', "", (NOW,))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_that_is_cut_off(name: str) -> None:
    """Whole, it is content. Streamed, it was begun: what came of it is not JSON, and nothing else is said."""
    first = CALLS[name][0]
    text = first[: first.index("Berlin") + 3]
    assert found(read(start(name, stream=False), [text])) == Found(text)
    streamed = found(read(start(name), list(text)))
    if name == "llama4":  # whose calls are passed on when they are whole
        assert streamed == Found(text)
    else:
        assert (streamed.content, streamed.reasoning) == ("", "")
        (call,) = streamed.calls
        assert call == ("get_weather", '{"city": "Ber')


def test_a_call_streams_while_it_is_written() -> None:
    started = start("hermes")
    pieces = ['<tool_call>{"name": "get_', 'weather", "arguments": {"city": "Ber', "lin"]
    told = [started.parser.feed(piece) for piece in pieces]
    assert told[0] == []
    assert [type(delta) for delta in told[1]] == [CallStart, *[CallArguments] * (len(told[1]) - 1)]
    assert "".join(delta.text for delta in told[1] if isinstance(delta, CallArguments)) == '{"city": "Ber'
    assert told[2] == [CallArguments(0, "lin")]
    assert started.parser.called


@pytest.mark.parametrize("wrong", ["one\ntwo", "a\tb", "it\\'s", "\\d+"])
def test_strings_that_models_write_wrongly_are_repaired(wrong: str) -> None:
    text = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{wrong}", "exact": True, "at": None}}}}</tool_call>'
    expected = wrong.replace("\\'", "\\'")
    assert answer("hermes", text).calls == (("get_weather", {"city": expected, "exact": True, "at": None}),)


def test_tags_are_read_by_the_schema() -> None:
    body = {"city": '"Köln"\n <b>', "days": "3", "exact": "True", "near": '["a", "b"]', "at": "null", "other": "7"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in body.items())
    (call,) = answer("qwen3-coder", f"<tool_call>\n<function=get_weather>\n{text}</function>\n</tool_call>").calls
    assert call[1] == {
        "city": '"Köln"\n <b>',
        "days": 3,
        "exact": True,
        "near": ["a", "b"],
        "at": None,
        "other": "7",
    }
    wrong = "<function=get_weather><parameter=days>\nmany\n</parameter></function>"
    assert answer("qwen3-coder", wrong).calls == (("get_weather", {"days": "many"}),)


@pytest.mark.timing
@pytest.mark.parametrize("name", sorted(CALLS))
def test_long_answers_take_time_by_their_length(name: str) -> None:
    """Whatever they are: about 5 µs a token; a hundred times as much would not pass."""
    beginning = CALLS[name][0].partition("Berlin")[0]
    texts = [beginning + "x" * 15_000, beginning * (15_000 // len(beginning)), CALLS[name][0] * 80, " \n" * 7_500]
    for text in texts:
        for size, stream in ((4, True), (4, False), (len(text), False)):
            began_s = time.process_time()
            read(start(name, stream=stream), [text[at : at + size] for at in range(0, len(text), size)])
            assert time.process_time() - began_s < len(text) / 4 * 500e-6


@pytest.mark.parametrize("part", ["-", "not ", "[", "{", "(", "1 if 1 else ", "lambda:", "x.", "1+", "9", "f(", "1,"])
def test_python_that_only_looks_like_values(part: str) -> None:
    text = f"[get_weather(city={part * (30_000 // len(part))}1)]"
    assert found(read(start("llama4"), [text])) == Found(text)


def test_values_in_python() -> None:
    text = "[get_weather(city='it\\'s', near=[\"a\", 'b'], exact=true, at=None, days=-2, more={'a': (1, 2.5)})]"
    assert answer("llama4", text).calls == (
        (
            "get_weather",
            {"city": "it's", "near": ["a", "b"], "exact": True, "at": None, "days": -2, "more": {"a": [1, 2.5]}},
        ),
    )


# -------------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize("name", ["plain", "hermes", "qwen3-coder", "deepseek", "phi", "granite", "mistral"])
def test_reasoning(name: str) -> None:
    tools = [] if name == "plain" else TOOLS
    assert answer(name, "<think>\nIs it?\n\n</think>\n\nIt is.", tools=tools) == Found("It is.", "Is it?")
    assert answer(name, "Is it?\n</think>\n\nIt is.", "<|assistant|><think>\n", tools=tools) == Found(
        "It is.", "Is it?"
    )
    repeated = answer(name, "<think>\nIs it?\n</think>\n\nIt is.", "<|assistant|><think>\n", tools=tools)
    assert repeated == Found("It is.", "Is it?"), "some models write the marker again"
    assert answer(name, "<think>\n\n</think>\n\nIt is.", tools=tools) == Found("It is.")
    assert answer(name, "It is.", "<think>\n\n</think>\n\n", tools=tools) == Found("It is.")
    assert answer(name, "<think>Is it", tools=tools) == Found("", "Is it")
    assert answer(name, "Say <think> to think.", tools=tools) == Found("Say <think> to think.")


def test_reasoning_before_calls() -> None:
    assert answer("hermes", f"<think>\nHm.\n</think>\n\n{CALLS['hermes'][0]}") == Found("", "Hm.", (BERLIN, NOW))
    text = f"[THINK]Hm.[/THINK]{CALLS['mistral'][0]}"
    assert answer("mistral", text) == Found("", "Hm.", (BERLIN, NOW))


def test_channels() -> None:
    said = (
        "<|channel|>analysis<|message|>The user asks. <|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant" + CALLS["harmony"][0]
    )
    assert answer("harmony", said) == Found("Wait.", "The user asks.", (BERLIN, NOW))
    last = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is.<|return|>"
    assert answer("harmony", last) == Found("It is.", "Hm.")
    assert answer("harmony", last, tools=[]) == Found("It is.", "Hm.")
    assert answer("harmony", last.replace("<|end|>", "")) == Found("It is.", "Hm.")


# ----------------------------------------------------------------------------------------------------------- tool_choice


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_named_call_is_begun_in_the_prompt(name: str) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    started = start(name, "PROMPT ", tool_choice=choice, stream=False)
    assert started.prompt.startswith("PROMPT ")
    assert "get_weather" in started.prompt
    in_tags = {
        "qwen3-coder": "<parameter=city>\nBerlin\n</parameter>\n<parameter=days>2</parameter></function>",
        "glm": CALLS["glm"][1].partition("get_weather")[2].partition("<tool_call>")[0],
    }
    rest = in_tags.get(name, '{"city": "Berlin", "days": 2}')
    assert found(read(started, [rest])) == Found("", "", (BERLIN,))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_required_call_is_begun_in_the_prompt(name: str) -> None:
    beginning = start(name, tool_choice="required").prompt
    text = next((text for text in CALLS[name] if text.startswith(beginning)), None)
    assert beginning
    assert text is not None, "the beginning is one that this family writes"
    for guided in (False, True):
        started = start(name, tool_choice="required", guided=guided)
        whole = text[len(started.prompt) :]
        assert text.startswith(started.prompt)
        assert found(read(started, list(whole))) == Found("", "", (BERLIN, NOW))


def test_one_tool_that_is_required_is_named() -> None:
    assert '"now"' in start("hermes", tools=TOOLS[1:], tool_choice="required").prompt


def test_what_guides_a_forced_call() -> None:
    named = start("hermes", tool_choice={"type": "function", "function": {"name": "get_weather"}}, guided=True)
    assert named.guide == WEATHER
    either = start("hermes", tool_choice="required", guided=True).guide
    assert [one["properties"]["name"] for one in either["anyOf"]] == [{"const": "get_weather"}, {"const": "now"}]
    assert start("hermes", tool_choice="required").guide is None
    assert start("hermes", guided=True).guide is None


def test_a_forced_call_ends_the_reasoning_that_the_prompt_begins() -> None:
    started = start("hermes", "<think>\n", tool_choice="required", stream=False)
    assert started.prompt == '<think>\n\n</think>\n\n<tool_call>\n{"name": "'
    assert found(read(started, ['now", "arguments": {}}'])) == Found("", "", (NOW,))
    prepared = dialect_for("hermes", None).prepare(Turn(ASK))
    assert prepared.start("<think>\n", stream=True, answer_only=True).prompt == "<think>\n\n</think>\n\n"
    assert prepared.start("<think>\n", stream=True).prompt == "<think>\n"


def test_no_call_is_read_where_none_may_be() -> None:
    text = CALLS["hermes"][0].removesuffix("<|im_end|>")
    assert answer("hermes", text, tool_choice="none") == Found(text)
    prepared = dialect_for("hermes", None).prepare(Turn(ASK, TOOLS, tool_choice="none"))
    assert prepared.chat.tools is None


def test_one_call_and_no_more() -> None:
    for name, texts in CALLS.items():
        for text in texts:
            started = start(name, parallel_tool_calls=False, stream=False)
            assert found(read(started, [text])) == Found("", "", (BERLIN,)), (name, text)
            assert started.parser.done


def test_ids() -> None:
    for name in CALLS:
        ids = [delta.id for delta in read(start(name), [CALLS[name][0]]) if isinstance(delta, CallStart)]
        assert len(set(ids)) == 2
        if name.startswith("mistral"):
            assert all(len(each) == 9 and each.isalnum() for each in ids)
        else:
            assert all(each.startswith("call_") for each in ids)


@pytest.mark.parametrize(
    ("asked", "words", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice needs tools", "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice must be one of", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x'; the tools are", "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "is not a function", "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "name is missing", "tools[0].function.name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "another tool named 'now'", "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": 1}}]},
            "is not a JSON schema",
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, Any], words: str, param: str) -> None:
    turn = Turn(ASK, **{"tools": TOOLS, **asked})
    with pytest.raises(DialectError, match=words) as caught:
        dialect_for("hermes", None).prepare(turn)
    assert caught.value.param == param


JSON = st.recursive(
    st.sampled_from([None, True, 1, 1.5, "x", "", "f", "{}", "[", '{"a": 1}', "function", "text", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "text", "function", "name", "arguments", "id"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(dialects.names()))
def test_whatever_is_asked_is_prepared_or_refused(data: st.DataObject, name: str) -> None:
    keys = st.sampled_from(["content", "tool_calls", "tool_call_id", "name", "reasoning_content"])
    role = st.sampled_from(["user", "assistant", "tool", "system"]) | JSON
    message = st.builds(lambda more, role: {**more, "role": role}, st.dictionaries(keys, JSON, max_size=3), role)
    tool = st.fixed_dictionaries({"type": st.just("function"), "function": JSON}) | st.sampled_from(TOOLS)
    choice = st.sampled_from([None, "none", "auto", "required"]) | JSON
    try:
        asked = Turn(data.draw(st.lists(message, max_size=3)), data.draw(st.lists(tool, max_size=2)), data.draw(choice))
        started = dialect_for(name, "<tool_call>").prepare(asked).start("<think>", stream=True)
    except DialectError:
        return
    read(started, [text for texts in CALLS.values() for text in texts])


def test_a_model_without_a_known_form_takes_no_tools() -> None:
    with pytest.raises(DialectError, match="has no form of tool calls") as caught:
        dialect_for("plain", None).prepare(Turn(ASK, TOOLS))
    assert caught.value.param == "tools"


def test_names() -> None:
    with pytest.raises(UsageError, match="unknown dialect 'x'") as caught:
        dialect_for("x", None)
    assert "hermes" in str(caught.value.hint)
