"""Chat templates turn a conversation into the prompt text for a model.

A template comes with its model, so it is untrusted. A separate process (`template_worker.py`) renders it in Jinja2's
sandbox, which keeps it from files and from Python. The process has little memory and is killed after a timeout.

    template = chat.read(directory)            # None if the model has none
    with chat.Renderer(template) as renderer:
        text = renderer.render(chat.Chat(messages))

A renderer starts its process for the first conversation, and again after one that exceeded a limit. On an event loop,
await `render_on_loop`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.models import Fields, model_files

if TYPE_CHECKING:
    import subprocess

Message = Mapping[str, Any]
FILE: Final = "chat_template.jinja"
_SETTINGS: Final = "tokenizer_config.json"
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ALWAYS: Final = ("bos_token", "eos_token")
"""Special tokens that templates use without checking whether the model has them."""
_WORKER: Final = Path(__file__).with_name("template_worker.py")
_START_S: Final = 60.0
_WAIT: Final = 6.0
"""Wall-clock time allowed per processor time, because other programs use the machine as well."""
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KEPT: Final = frozenset({"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ"})
"""Environment variables of the process. They hold no tokens or keys."""
_CHUNK: Final = 1 << 16
_ESCAPED_BYTES: Final = 12
"""Longest encoding of one character in JSON."""
_REPLACE: Final = "give prompts as text, or put a template that you trust into the model directory"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits for rendering one conversation."""

    time_s: float = 10.0
    """Processor time."""
    memory_bytes: int = 256 << 20
    """In addition to the process's memory before it reads a template."""
    characters: int = 8_000_000
    """Maximum length of the text. It exceeds the longest context of any model."""


@dataclass(frozen=True, slots=True)
class Template:
    """A model's chat template."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by their names in templates, such as `bos_token`."""
    origin: str = "the chat template"
    """Its name in errors."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, and other template variables."""

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    """True if the text ends with the start of the model's reply."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Other variables by name, such as `enable_thinking`."""


class TemplateError(StageError):
    """A chat template failed: invalid Jinja2, a failed process, or, for the subclasses, a failure on a conversation."""


class RefusedError(TemplateError):
    """The template rejects this conversation or fails on it."""


class LimitError(TemplateError):
    """Rendering exceeded a limit of time, memory or text."""


_ERRORS: Final = {
    # the process's status -> class, failure, words, hint
    "limit": (LimitError, FailureClass.INFEASIBLE, "{} {}", _REPLACE),
    "inherited": (LimitError, FailureClass.USER, "{} {}", "run again with a higher ulimit -v"),
    "broken": (TemplateError, FailureClass.INFEASIBLE, "{}: {}", _REPLACE),
    "refused": (
        RefusedError,
        FailureClass.USER,
        "{} rejects this conversation: {}",
        "change the messages to what the template expects, or use a text prompt",
    ),
}


def read(folder: Path) -> Template | None:
    """The chat template in a model's directory, None if it has none. Raises DownloadError for unreadable files."""
    source = read_source(folder)
    if source is None:
        return None
    settings = Fields.read_optional(folder, _SETTINGS)
    tokens = {name: settings.token(name) for name in _SPECIAL}
    given = {name: text or "" for name, text in tokens.items() if text is not None or name in _ALWAYS}
    return Template(source, given, f"the chat template of {folder}")


def read_source(folder: Path) -> str | None:
    """The template's text: from a separate file, or from tokenizer_config.json, alone or as the `default` of several."""
    source = model_files.read_text(folder, FILE)
    if source is not None:
        return source
    settings = Fields.read_optional(folder, _SETTINGS)
    if not isinstance(settings.values.get("chat_template"), list):
        return settings.text("chat_template")
    named = {each.required_text("name"): each.required_text("template") for each in settings.objects("chat_template")}
    return named.get("default")


class Renderer:
    """Renders conversations with one template. A context manager: its process ends with it."""

    def __init__(self, template: Template, limits: RenderLimits = RenderLimits()) -> None:
        self._template = template
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Renderer:  # noqa: PYI034 - typing.Self is younger than Python 3.10
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. The next conversation starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes the pipes and waits
                pass

    def render(self, chat: Chat) -> str:
        """The text of a conversation.

        Raises RefusedError if the template rejects it, LimitError if it needs too much time or memory, and
        TemplateError if the template cannot be read, or its process ends or hangs.
        """
        return asyncio.run(self.render_on_loop(chat))

    async def render_on_loop(self, chat: Chat) -> str:
        """The same on a running event loop. One call at a time."""
        given: dict[str, Any] = {**self._template.tokens, **chat.variables}
        given |= {"messages": list(chat.messages), "add_generation_prompt": chat.add_generation_prompt}
        given |= {"tools": chat.tools, "documents": chat.documents}
        try:
            process = await self._started()
            answer = await self._exchange(process, {"variables": given}, _WAIT * self._limits.time_s)
        except BaseException:
            self.close()
            raise
        if "text" in answer:
            return str(answer["text"])
        if answer["kind"] in {"limit", "inherited"}:
            self.close()
        raise self._error(answer["kind"], answer["error"])

    def _error(self, kind: str, details: str) -> TemplateError:
        cls, failure, words, hint = _ERRORS[kind]
        return cls(words.format(self._template.origin, details), failure=failure, hint=hint)

    async def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = _start()
            setup = {"source": self._template.source, **asdict(self._limits)}
            try:
                await self._exchange(self._process, setup, _START_S)
            except TemplateError as error:
                raise TemplateError(
                    f"the process that renders chat templates did not start: {error.message}",
                    failure=error.failure,
                    hint=f"{sys.executable} needs the package jinja2, and memory to start (ulimit -v)"
                    if error.failure is FailureClass.BUG
                    else error.hint,
                ) from error
        return self._process

    async def _exchange(
        self, process: subprocess.Popen[bytes], question: Mapping[str, Any], time_s: float
    ) -> Mapping[str, Any]:
        """Send a line and return the reply, within `time_s`. Raises TemplateError."""
        sink, source = _pipes(process)
        unsent, received = memoryview(json.dumps(question).encode() + b"\n"), bytearray()
        most = _ESCAPED_BYTES * self._limits.characters + _CHUNK
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        deadline = loop.time() + time_s
        timer = loop.call_at(deadline, ready.set)
        loop.add_reader(source, ready.set)
        loop.add_writer(sink, ready.set)
        try:
            while not received.endswith(b"\n"):
                if len(received) > most:
                    raise self._error("limit", f"writes more than {self._limits.characters} characters")
                try:
                    unsent = unsent[os.write(sink, unsent[:_CHUNK]) :] if unsent else unsent
                except BlockingIOError:
                    pass
                except BrokenPipeError:  # the end of its output has the cause
                    unsent = unsent[:0]
                if not unsent:
                    loop.remove_writer(sink)
                try:
                    part = os.read(source, _CHUNK)
                except BlockingIOError:
                    ready.clear()
                    await ready.wait()
                    if loop.time() >= deadline:
                        raise TemplateError(
                            f"{self._template.origin}: its process did not respond within {time_s:g} s",
                            failure=FailureClass.TRANSIENT,
                            hint="try again when the machine is less busy",
                        ) from None
                    continue
                if not part:
                    raise self._ended(process.wait())
                received += part
        finally:
            timer.cancel()
            loop.remove_reader(source)
            loop.remove_writer(sink)
        answer: Mapping[str, Any] = json.loads(received)
        return answer

    def _ended(self, status: int) -> TemplateError:
        if status == -signal.SIGPROF:
            return self._error("limit", f"needs more than {self._limits.time_s:g} s of CPU time")
        outside = -status in _FROM_OUTSIDE
        return TemplateError(
            f"{self._template.origin}: its process ended "
            + (f"by signal {-status}" if status < 0 else f"with exit code {status}"),
            failure=FailureClass.TRANSIENT if outside else FailureClass.BUG,
            hint="try again; the kernel kills processes when memory is short (see dmesg)" if outside else _REPLACE,
        )


def _start() -> subprocess.Popen[bytes]:
    import subprocess

    environment = {name: value for name, value in os.environ.items() if name in _KEPT}
    process = subprocess.Popen(
        [sys.executable, str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        env=environment,
    )
    for pipe in _pipes(process):
        os.set_blocking(pipe, False)
    return process


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """File descriptors of its stdin and stdout."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin.fileno(), process.stdout.fileno()
