"""Chat templates: what well-known ones use works, and what a hostile one does ends in words."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trtllm_pipeline.base.errors import DownloadError, FailureClass, StageError
from trtllm_pipeline.measure import chat_templates as chat
from trtllm_pipeline.measure.chat_templates import (
    Chat,
    LimitError,
    RefusedError,
    Renderer,
    RenderLimits,
    Template,
    TemplateError,
)
from trtllm_pipeline.tensorrt.modelopt import calibration_batches

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ASK = [{"role": "user", "content": "Why?"}]
TALK = [{"role": "system", "content": " Be brief. "}, *ASK, {"role": "assistant", "content": "So."}, *ASK]
TOOL = {"type": "function", "function": {"name": "look", "description": "<b> & é"}}
SMALL = RenderLimits(time_s=30.0, memory_bytes=64 << 20, characters=10_000)


def render(source: str, messages: Any = ASK, **given: Any) -> str:
    with Renderer(Template(source, TOKENS)) as renderer:
        return renderer.render(Chat(messages, **given))


# ------------------------------------------------------------------------------------------ what real templates are made of

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "[head]system[end]\\n" }}
{{- "Date: " + date_string + "\\n" + system }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '[head]' + message['role'] + '[end]\\n' + message['content'] | trim + '[eot]' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[head]assistant[end]\\n' }}
{%- endif %}
"""

LAST_QUERY = """\
{%- set ns = namespace(last=-1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0%}
    {%- if not ns.seen and message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- set ns.seen = true %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|a|>' + content + '<|end|>' }}
    {%- elif loop.first or loop.index0 == ns.last %}
        {{- '<|' + message.role[:1] + '|>' + message.content + '<|end|>' }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
    {{- '<think></think>' }}
{%- endif %}
"""

ALTERNATION = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0% 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {{- ' ' + message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""

MACROS = """\
{%- macro say(role, text='') -%}<{{ role }}>{{ text | replace('\\n', ' ') }}{{ caller() if caller else '' }}{%- endmacro -%}
{%- for m in messages | selectattr('role', 'ne', 'system') | list %}{{ say(m.role, m.content) }}{% endfor -%}
{%- call say('end') %}!{% endcall -%}
{%- filter upper %}{{ messages | map(attribute='role') | unique | join(',') }}{% endfilter -%}
"""


def test_headers_a_date_and_tools() -> None:
    text = render(HEADERS, TALK[:2], tools=[TOOL], variables={"date_string": "26 Jul 2024"})
    assert text == (
        "<s>[head]system[end]\nDate: 26 Jul 2024\nBe brief."
        + json.dumps(TOOL, indent=4, ensure_ascii=False)
        + "[head]user[end]\nWhy?[eot][head]assistant[end]\n"
    )
    before = date.today()  # noqa: DTZ011 - as the template asks for it
    match = re.search(r"Date: (.*)\n", render(HEADERS))
    assert before <= datetime.strptime(match[1], "%d %b %Y").date() <= date.today()  # noqa: DTZ007, DTZ011


def test_a_namespace_loop_controls_and_variables() -> None:
    thought = [*ASK, {"role": "assistant", "content": "<think>hm</think>\nSo."}, {"role": "user", "content": "And?"}]
    assert render(LAST_QUERY, thought) == "<|u|>Why?<|end|><|a|>So.<|end|><|u|>And?<|end|>"
    assert render(LAST_QUERY, variables={"enable_thinking": False}).endswith("<think></think>")


def test_alternation_and_generation_blocks() -> None:
    assert render(ALTERNATION, TALK[1:]) == "<s> [INST] Why? [/INST] So.</s> [INST] Why? [/INST]"
    with pytest.raises(RefusedError, match="rejects this conversation: Conversation roles must alternate") as caught:
        render(ALTERNATION, TALK)
    assert caught.value.failure is FailureClass.USER


def test_macros_filters_and_calls() -> None:
    assert render(MACROS, TALK) == "<user>Why?<assistant>So.<user>Why?<end>!SYSTEM,USER,ASSISTANT"


def test_blocks_are_trimmed_and_no_html_is_escaped() -> None:
    assert render("  {% if true %}\n{{ messages[0].content }}\n  {% endif %}\n<&") == "Why?\n<&"
    assert render("{{ '<é&>' | tojson }}|{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}") == (
        '"<é&>"|{"a":2,"b":1}'
    )


def test_a_conversation_of_any_characters() -> None:
    text = "a\u2028b\x00c\n\ud83d \U0001f600\x1b[31m'\"\\"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_no_generation_prompt() -> None:
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


# ------------------------------------------------------------------------------------------------------- hostile templates

MEMORY, TEXT, TIME = "needs more than 64 MB of memory", "writes more than 10000 characters", "needs more than 0.2 s"
HOSTILE = {
    "range": ("{% for i in range(10**9) %}x{% endfor %}", RefusedError, "Range too big"),
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
        LimitError,
        TIME,
    ),
    "loops that write": (
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        LimitError,
        TEXT,
    ),
    "a long text": ("{{ 'x' * 10**9 }}", LimitError, MEMORY),
    "a text too long": ("{{ 'x' * 10001 }}", LimitError, TEXT),
    "doubling": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        LimitError,
        MEMORY,
    ),
    "tojson": ("{{ messages | tojson(indent=10**9) }}", LimitError, MEMORY),
    "str.format": ("{{ '{:>1000000000}'.format('x') }}", LimitError, MEMORY),
    "a power": ("{% set x = messages | length + 9%}{{ (x ** (3 * 10**7)) % 7 }}", LimitError, TIME),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RefusedError, "RecursionError"),
    "parentheses": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", RefusedError, "RecursionError"),
    "Python": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", RefusedError, "unsafe"),
    "Python by format": ("{{ '{0.__class__.__mro__}'.format('') }}", RefusedError, "unsafe"),
    "a global's insides": ("{{ raise_exception.__globals__['sys'] }}", RefusedError, "unsafe"),
    "changing the messages": ("{{ messages.append(1) }}", RefusedError, "unsafe"),
    "a file": ("{% include '/etc/passwd' %}", RefusedError, "no loader"),
    "division": ("{{ 1 / 0 }}", RefusedError, "ZeroDivisionError"),
    "undefined": ("{{ this.that }}", RefusedError, "'this' is undefined"),
    "a long message": ("{{ raise_exception('x' * 10**6) }}", RefusedError, r"x{500}\.\.\.$"),
    "syntax": ("a\n{% if %}", TemplateError, "line 2: Expected an expression"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_WAIT", 300.0)  # however little of the processor its process gets
    source, kind, words = HOSTILE[name]
    limits = replace(SMALL, time_s=0.2) if words == TIME else SMALL
    with Renderer(Template(source, TOKENS, "the chat template of m"), limits) as renderer:
        with pytest.raises(TemplateError, match=f"the chat template of m.*{words}") as caught:
            renderer.render(Chat(ASK))
        assert type(caught.value) is kind
        assert caught.value.failure is (FailureClass.USER if kind is RefusedError else FailureClass.INFEASIBLE)
        assert caught.value.hint
        # A failure does not affect the next conversation.
        with pytest.raises(kind, match=words):
            renderer.render(Chat(ASK))


def test_one_process_renders_many_and_ends_with_its_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = chat._start
    monkeypatch.setattr(chat, "_start", lambda: started.append(start()) or started[-1])
    with Renderer(Template("{{ messages[0].content }}")) as renderer:
        assert not started
        texts = [renderer.render(Chat([{"content": str(number)}])) for number in range(200)]
        assert started[0].poll() is None
    assert texts == [str(number) for number in range(200)]
    assert len(started) == 1
    assert started[0].poll() is not None


@pytest.mark.parametrize(
    ("number", "failure"),
    [
        (signal.SIGKILL, FailureClass.TRANSIENT),
        (signal.SIGTERM, FailureClass.TRANSIENT),
        (signal.SIGSEGV, FailureClass.BUG),
    ],
)
def test_a_process_that_ended_is_told_and_replaced(number: int, failure: FailureClass) -> None:
    with Renderer(Template("{{ messages[0].content }}")) as renderer:
        renderer.render(Chat(ASK))
        renderer._process.send_signal(number)
        renderer._process.wait()
        with pytest.raises(TemplateError, match=f"its process ended by signal {int(number)}") as caught:
            renderer.render(Chat(ASK))
        assert caught.value.failure is failure
        assert renderer.render(Chat(ASK)) == "Why?"


def test_a_process_that_gets_no_processor_is_told_apart_from_one_that_takes_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "_WAIT", 0.001)
    with Renderer(Template("x"), replace(SMALL, time_s=20.0)) as renderer:
        process = renderer._process = chat._start()  # it waits for a template, and gets a conversation
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TemplateError, match=r"its process did not respond within 0\.02 s") as caught:
            renderer.render(Chat(ASK))
    assert not isinstance(caught.value, LimitError)
    assert caught.value.failure is FailureClass.TRANSIENT


def test_no_limit_is_raised_above_the_inherited_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real, inherited = subprocess.Popen, {resource.RLIMIT_AS: 8 << 30, resource.RLIMIT_CPU: 60}

    def limited(command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        code = "import os, resource, sys\n" + "".join(
            f"resource.setrlimit({kind}, ({limit}, {limit}))\n" for kind, limit in inherited.items()
        )
        return real([command[0], "-c", code + "os.execv(sys.argv[1], sys.argv[1:])", *command], **given)

    monkeypatch.setattr(subprocess, "Popen", limited)
    template = Template("{{ messages[0].content * messages[0].times }}", origin="the chat template of m")
    with Renderer(template, RenderLimits(memory_bytes=1 << 40)) as renderer:
        assert renderer.render(Chat([{"content": "a", "times": 2}])) == "aa"
        assert renderer._process is not None
        entries = {kind: resource.prlimit(renderer._process.pid, kind)[1] for kind in inherited}
        assert entries == inherited
        with pytest.raises(LimitError, match=r"needs more memory than .* \(ulimit -v\)") as caught:
            renderer.render(Chat([{"content": "a", "times": 10**10}]))
    assert caught.value.failure is FailureClass.USER


@pytest.mark.parametrize(
    ("error", "failure", "hint"),
    [
        (
            RefusedError("no", failure=FailureClass.USER, hint="h"),
            FailureClass.INFEASIBLE,
            "set calibration.chat_template",
        ),
        (LimitError("no", failure=FailureClass.INFEASIBLE, hint="h"), FailureClass.INFEASIBLE, "set calibration."),
        (TemplateError("no", failure=FailureClass.TRANSIENT, hint="try again"), FailureClass.TRANSIENT, "try again"),
    ],
)
def test_calibration_remembers_what_the_template_did_and_no_more(
    monkeypatch: pytest.MonkeyPatch, error: TemplateError, failure: FailureClass, hint: str
) -> None:
    def render(*_: object) -> str:
        raise error

    class Tokenizer:
        special_tokens_map: ClassVar[dict[str, str]] = {}

        def get_chat_template(self) -> str:
            return "x"

    monkeypatch.setattr(Renderer, "render", render)
    with pytest.raises(StageError) as caught:
        calibration_batches._chats(Path("m"), Tokenizer(), [ASK])
    assert caught.value.failure is failure
    assert (caught.value.hint or "").startswith(hint)


def test_a_running_event_loop_renders_long_conversations_and_keeps_the_process_after_a_refusal() -> None:
    source = "{% if messages[0].role == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"

    async def run(renderer: Renderer) -> None:
        text = '"ä\n' * 400_000
        assert await renderer.render_on_loop(Chat([{"role": "user", "content": text}])) == text
        process = renderer._process
        with pytest.raises(RefusedError, match="rejects this conversation: no"):
            await renderer.render_on_loop(Chat([{"role": "bad", "content": ""}]))
        assert await renderer.render_on_loop(Chat(ASK)) == "Why?"
        assert renderer._process is process

    with Renderer(Template(source), replace(SMALL, characters=10_000_000)) as renderer:
        asyncio.run(run(renderer))


def test_the_process_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    process = chat._start()
    try:
        assert b"hf_secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    finally:
        process.kill()
        process.communicate()


def test_a_python_without_jinja_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def bare(command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        return real([command[0], "-S", "-I", *command[1:]], **given)

    monkeypatch.setattr(subprocess, "Popen", bare)
    with Renderer(Template("x")) as renderer, pytest.raises(TemplateError, match="did not start") as caught:
        renderer.render(Chat(ASK))
    assert caught.value.hint == f"{sys.executable} needs the package jinja2, and memory to start (ulimit -v)"


# -------------------------------------------------------------------------------------------------- where templates are read


def write(folder: Path, **settings: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_template_of_a_folder(tmp_path: Path) -> None:
    assert chat.read(tmp_path) is None
    write(tmp_path, chat_template="one", bos_token={"content": "<s>"}, eos_token=None, pad_token="<p>")
    assert chat.read(tmp_path) == Template(
        "one", {"bos_token": "<s>", "eos_token": "", "pad_token": "<p>"}, f"the chat template of {tmp_path}"
    )
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert chat.read_source(write(tmp_path, chat_template=named)) == "d"
    assert chat.read_source(write(tmp_path, chat_template=named[:1])) is None
    (tmp_path / "chat_template.jinja").write_text("beside", encoding="utf-8")
    assert chat.read_source(tmp_path) == "beside"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chat_template": 5}, "chat_template is 5; expected a text"),
        ({"chat_template": [{"name": "default"}]}, r"chat_template\[0\].template is missing"),
        ({"chat_template": ["x"]}, "expected a list of objects"),
        ({"chat_template": "x", "bos_token": [1]}, r"bos_token is \[1\]; expected a text"),
    ],
)
def test_settings_of_another_type(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DownloadError, match=words):
        chat.read(write(tmp_path, **settings))


def test_a_template_that_leads_out_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(DownloadError, match="outside the model's directory"):
        chat.read(folder)
