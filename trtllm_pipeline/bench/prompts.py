"""Prompt files: JSON Lines, one request per line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from trtllm_pipeline import chat
from trtllm_pipeline.files.user_files import RowError, read_json_lines

_EXAMPLE: Final = 'a line looks like {"input": "The capital of France is", "output": "Paris"}'
Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Chat messages -> prompt text."""


class Encoding(Protocol):
    """The part of `tokenizers.Encoding` used here."""

    @property
    def ids(self) -> list[int]: ...  # noqa: D102

    @property
    def offsets(self) -> list[tuple[int, int]]: ...  # noqa: D102


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` used to count tokens."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    text: str
    max_tokens: int | None = None
    references: tuple[str, ...] = ()
    stop_words: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages that `text` was made of, for endpoints that take those."""


def read(path: Path, render: Render | None = None) -> tuple[Prompt, ...]:
    """The prompts in `path`, at least one. A line is an object with

    `input` or `text_input` (text), or `messages` (role and content, put through `render`); and optionally `id`,
    `max_tokens`, `output` (a reference, or a list of them), `stop_words` (a text that ends the answer, or a list of
    them). Other keys are the user's own and are left alone.
    Raises MatrixError with every faulty line.
    """
    known: set[str] = set()

    def parse(row: object, number: int) -> Prompt:
        prompt = _prompt(row, str(number), render)
        if prompt.id in known:
            raise RowError("id", f"{prompt.id!r} is the id of an earlier line too")
        known.add(prompt.id)
        return prompt

    return tuple(read_json_lines(path, parse, nothing="there is no prompt in this file", hint=_EXAMPLE))


def _prompt(row: object, default_id: str, render: Render | None) -> Prompt:
    if not isinstance(row, dict):
        raise RowError("", "expected an object with `input`")
    given = [key for key in ("input", "text_input", "messages") if key in row]
    if len(given) != 1:
        raise RowError("input", "expected exactly one of `input`, `text_input` and `messages`")
    text, messages = row[given[0]], ()
    if given[0] == "messages":
        if not (isinstance(text, list) and text and all(isinstance(item, dict) for item in text)):
            raise RowError("messages", "expected a list of objects with `role` and `content`")
        if render is None:
            raise RowError("messages", "this model has no chat template; give `input`")
        messages = tuple(text)
        try:
            text = render(messages)
        except chat.RefusedError as error:
            raise RowError("messages", error.message) from error
    if not isinstance(text, str) or not text.strip():
        raise RowError(given[0], "expected a text that is not empty")
    max_tokens = row.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise RowError("max_tokens", f"expected a positive integer, got {max_tokens!r}")
    references, stop_words = _texts(row, "output"), _texts(row, "stop_words")
    return Prompt(str(row.get("id", default_id)), text, max_tokens, references, stop_words, messages)


def _texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A text or a list of texts, as a tuple; empty when the key is not there."""
    value = row.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(item, str) and item for item in texts):
        raise RowError(key, "expected a text or a list of texts")
    return tuple(texts)


def unrendered(messages: Sequence[Mapping[str, Any]]) -> str:
    """Contents of chat messages, one per line, for servers that apply the chat template themselves."""
    return "\n".join(content for message in messages if isinstance(content := message.get("content"), str))


@contextmanager
def chat_renderer(model: Path | None) -> Iterator[Render | None]:
    """How chat messages become a prompt for the model whose tokenizer files lie in the folder `model`.

    None without a template. Rendering raises `chat.TemplateError`.
    """
    template = None if model is None else chat.read(model)
    if template is None:
        yield None
        return
    with chat.Renderer(template) as renderer:
        yield lambda messages: renderer.render(chat.Chat(messages))


def tokenizer_folder(path: Path | None) -> Path | None:
    """The folder that a tokenizer.json lies in, which may be named by itself or by its folder; None for none."""
    return path if path is None or path.is_dir() else path.parent
