"""Each family's chat template: it is recognised, it takes tools, calls and results, and what it writes is read back.

The templates are made up: each takes and writes what its family's does.
"""
# ruff: noqa: RUF001 - markers as models write them

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from trtllm_pipeline.measure.chat_templates import Chat, Renderer, Template
from trtllm_pipeline.serve.gateway.dialects import dialect_for
from trtllm_pipeline.serve.gateway.dialects.dialect import Dialect, DialectError, Turn, special_markers
from trtllm_pipeline.serve.gateway.dialects.parsing import CallArguments, CallStart, Content

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

HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n' + messages[0].content + '\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools> Answer with <tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[1:] %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN_CODER = """\
{%- for tool in tools or [] %}{{ '<tool>' + tool.function.name + '</tool>' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}{{ value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GLM = """\
{%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + message.role + '|>' + ('\\n' + message.content if message.content else '') }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}{{ '</arg_value>\\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

LLAMA = """\
{%- if tools %}{{ 'Answer with {"name": ..., "parameters": ...}. Environment: ipython\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n' }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- message.content | tojson if message.content is mapping or message.content is iterable else message.content }}{{ '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1%}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", ' + '"parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- endif %}{% endfor %}{% set builtin = '<|python_tag|>' %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

LLAMA_4 = """\
{%- for tool in tools or [] %}{{ tool | tojson + '\\n' }}{% endfor %}
{%- for message in messages %}
{{- '<|header_start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|header_end|>\\n\\n' }}
{%- if message.tool_calls %}{{ '<|python_start|>[' }}
{%- for call in message.tool_calls %}{{ call.function.name + '(' }}
{%- for key, value in call.function.arguments | items %}{{ key + '=' + value | tojson }}{{ ', ' if not loop.last }}{% endfor %}
{{- ')' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']<|python_end|><|eom|>' }}
{%- else %}{{ message.content + '<|eot|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{%- for message in messages %}
{%- if message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9%}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{%- set out = call.function | tojson %}{{ out[:-1] }}{{ ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else ']</s>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9%}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.role == 'user' %}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""

MISTRAL_BY_NAME = """\
{%- if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- set given = call.function.arguments %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{ given if given is string else given | tojson }}
{%- endfor %}{{ '</s>' }}
{%- else %}{{ '[' + message.role + ']' + message.content }}{% endif %}{% endfor %}"""

PHI = """\
{%- for message in messages %}
{%- if message['role'] == 'system' and message['tools'] is defined and message['tools'] is not none %}
{{- '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

GRANITE = """\
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' }}{{ tools | tojson(indent=4) }}{{ '<|end_of_text|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|start_of_role|>' + ('tool_response' if message.role == 'tool' else message.role) + '<|end_of_role|>' }}
{{- message.content + '<|end_of_text|>\\n' }}{% endfor %}{% set hint = 'Write <|tool_call|> and a list.' %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

DEEPSEEK = """\
{%- for tool in tools or [] %}{{ tool.function.name + '\\n' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- elif message.tool_calls %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
{{- call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{{ '\\n' if not loop.last }}
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜' + message.role + '｜>' + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

DEEPSEEK_V31 = """\
{%- for tool in tools or [] %}{{ tool.function.name + '\\n' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- elif message.tool_calls %}{{ '<｜Assistant｜></think><｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- else %}{{ '<｜' + message.role + '｜>' + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"""

HARMONY = """\
{%- for tool in tools or [] %}{{ 'type ' + tool.function.name + ';\\n' }}{% endfor %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('either content or thinking') }}{% endif %}
{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- for call in message.tool_calls %}
{%- set last.name = call.function.name %}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + call.function.name + ' <|constrain|>json<|message|>' }}
{{- call.function.arguments | tojson }}{{ '<|call|>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

TEMPLATES = {
    "hermes": HERMES,
    "qwen3-coder": QWEN_CODER,
    "glm": GLM,
    "llama3": LLAMA,
    "llama4": LLAMA_4,
    "mistral": MISTRAL,
    "mistral-v11": MISTRAL_BY_NAME,
    "phi": PHI,
    "granite": GRANITE,
    "deepseek": DEEPSEEK,
    "deepseek-v3.1": DEEPSEEK_V31,
    "harmony": HARMONY,
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def family(request: pytest.FixtureRequest) -> Iterator[tuple[Dialect, Renderer]]:
    dialect = dialect_for("auto", TEMPLATES[request.param])
    assert dialect.name == request.param
    with Renderer(Template(TEMPLATES[request.param])) as renderer:
        yield dialect, renderer


def single(dialect: Dialect, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With one call a message where the template takes no more."""
    if dialect.name != "llama3" or len(messages) < 3:
        return messages
    return [*messages[:2], {**messages[2], "tool_calls": [CALL]}, *messages[3:4]]


def test_a_conversation_with_tools(family: tuple[Dialect, Renderer]) -> None:
    dialect, renderer = family
    prepared = dialect.prepare(Turn(single(dialect, TALK), TOOLS))
    prompt = renderer.render(prepared.chat)
    for text in ("Be\nbrief.", "Is it raining?", "It rains.", "get_weather", "now"):
        assert text in prompt, text
    assert ("12:00" in prompt) is (dialect.name != "llama3")
    # What the template writes of the earlier calls is what the parser reads.
    asked = renderer.render(dialect.prepare(Turn(TALK[:2], TOOLS)).chat)
    told = dialect.prepare(Turn(single(dialect, TALK)[:3], TOOLS)).chat
    whole = renderer.render(Chat(told.messages, add_generation_prompt=False, tools=told.tools))
    assert whole.startswith(asked)
    written = whole[len(asked) :]
    parser = prepared.start(prompt, stream=True).parser
    deltas = [delta for character in written for delta in parser.feed(character)] + parser.end()
    names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
    arguments = [
        json.loads("".join(part.text for part in deltas if isinstance(part, CallArguments) and part.index == index))
        for index in range(len(names))
    ]
    assert [name for name, _ in zip(names, arguments, strict=True)] == ["get_weather", "now"][: len(names)]
    assert arguments == [ARGUMENTS, {}][: len(names)]
    assert len(names) == (1 if dialect.name == "llama3" else 2)
    assert not [delta for delta in deltas if isinstance(delta, Content)]


def test_a_forced_call_follows_the_prompt(family: tuple[Dialect, Renderer]) -> None:
    dialect, renderer = family
    prepared = dialect.prepare(Turn(TALK[:2], TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}))
    prompt = renderer.render(prepared.chat)
    started = prepared.start(prompt, stream=True)
    assert started.prompt.startswith(prompt)
    assert "now" in started.prompt[len(prompt) :]


def test_reasoning_is_fed_back_where_the_template_takes_it() -> None:
    talk = [*TALK[:2], {**TALK[2], "reasoning_content": "Look it up."}, *TALK[3:]]
    prepared = dialect_for("auto", HARMONY).prepare(Turn(talk, TOOLS))
    with Renderer(Template(HARMONY)) as renderer:
        assert "<|channel|>analysis<|message|>Look it up.<|end|>" in renderer.render(prepared.chat)


def test_variables_reach_the_template() -> None:
    source = "{{ 'on' if enable_thinking else 'off' }}"
    prepared = dialect_for("auto", source).prepare(Turn(TALK[:2], variables={"enable_thinking": True}))
    with Renderer(Template(source)) as renderer:
        assert renderer.render(prepared.chat) == "on"


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


def test_another_template_of_phi() -> None:
    """One that takes the tools as others do."""
    source = "{% for tool in tools %}{{ tool.function.name }},{% endfor %}functools{{ messages[-1].content }}"
    prepared = dialect_for("auto", source).prepare(Turn(TALK[1:2], TOOLS))
    assert prepared.dialect.name == "phi"
    with Renderer(Template(source)) as renderer:
        assert renderer.render(prepared.chat) == "get_weather,now,functoolsIs it raining?"


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
