"""Prompts: read from JSON Lines, one request per line, or synthetic, cut out of a corpus to a wanted length."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from trtllm_pipeline import chat
from trtllm_pipeline.client import images
from trtllm_pipeline.errors import FailureClass, MatrixError, StageError
from trtllm_pipeline.files.user_files import RowError, check, decode, read_json_lines

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CORPUS: Final = Path(__file__).parents[1] / "data" / "calibration" / "general.jsonl"
_TRIES: Final = 20

_EXAMPLE: Final = 'a line looks like {"input": "The capital of France is", "output": "Paris"}'
T = TypeVar("T")
Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Chat messages -> prompt text."""


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
    images: int = 0
    """How many images the messages have: for chat endpoints, and for engines of models that take them."""


def read(path: Path, render: Render | None = None) -> tuple[Prompt, ...]:
    """The prompts in `path`, at least one. A line is an object with

    `input` or `text_input` (text), or `messages` (role and content, put through `render`); and optionally `id`,
    `max_tokens`, `output` (a reference, or a list of them), `stop_words` (a text that ends the answer, or a list of
    them), `image` (a file from the folder of `path`, or a list of them). Other keys are the user's own and are left alone.
    Raises MatrixError with every faulty line.
    """
    return read_rows(path, lambda prompt, _row: prompt, render)


def read_rows(path: Path, make: Callable[[Prompt, dict[str, Any]], T], render: Render | None) -> tuple[T, ...]:
    """What `make` makes of each prompt in `path` and of its row, for which it may raise RowError too."""
    known: set[str] = set()

    def parse(row: object, number: int) -> T:
        if not isinstance(row, dict):
            raise RowError("", "expected an object with `input`")
        prompt = _with_images_of(row, path.parent, _prompt(row, str(number), render))
        if prompt.id in known:
            raise RowError("id", f"{prompt.id!r} is the id of an earlier line too")
        known.add(prompt.id)
        return make(prompt, row)

    return tuple(read_json_lines(path, parse, nothing="there is no prompt in this file", hint=_EXAMPLE))


def _prompt(row: dict[str, Any], default_id: str, render: Render | None) -> Prompt:
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


def _with_images_of(row: Mapping[str, Any], folder: Path, prompt: Prompt) -> Prompt:
    """A prompt with the images that its row names."""
    try:
        urls = [images.read(folder / name) for name in _texts(row, "image")]
    except ValueError as error:
        raise RowError("image", f"{row['image']!r}: {error}") from error
    return with_images(prompt, urls) if urls else prompt


def with_images(prompt: Prompt, urls: Sequence[str]) -> Prompt:
    """A prompt as chat messages with images, given as URLs."""
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return replace(prompt, messages=images.with_images(messages, urls), images=prompt.images + len(urls))


def image_files(path: Path) -> tuple[str, ...]:
    """The image files that the rows of a prompt file name; nothing of a file that is none, which is said when it is read."""
    found: dict[str, None] = {}
    try:
        check(path)
        with path.open(encoding="utf-8-sig") as lines:
            for line in lines:
                row = decode(line) if '"image"' in line else None
                named = row.get("image") if isinstance(row, dict) else None
                names = named if isinstance(named, list) else [named]
                found |= dict.fromkeys(name for name in names if isinstance(name, str) and name)
    except (MatrixError, OSError, ValueError):
        return ()
    return tuple(found)


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


def synthetic(tokenizer: Tokenizer, count: int, *, mean: int, stddev: float = 0.0, seed: int = 0) -> tuple[Prompt, ...]:
    """`count` prompts of `mean` tokens, special ones included; normally distributed with `stddev`, never below one.

    Text that reads as text: random tokens would be no prompt any model was made for, and change what is generated.
    Each begins at another place of the corpus, so that none shares a prefix with another. The same seed gives the same
    prompts. A length is exact where cutting at tokens allows it, and never more than asked for.
    Raises StageError when a prompt cannot be that short.
    """
    rows = CORPUS.read_text(encoding="utf-8").splitlines()
    corpus = tokenizer.encode("\n".join(json.loads(row)["text"] for row in rows), add_special_tokens=False).ids
    special = len(tokenizer.encode("").ids)
    draw = random.Random(seed)  # noqa: S311 - not a secret
    made = []
    for number in range(count):
        wanted = max(1, round(draw.gauss(mean, stddev))) - special
        if wanted < 1:
            raise StageError(
                f"a prompt cannot have {mean} tokens: {special} are special ones", failure=FailureClass.USER
            )
        made.append(Prompt(f"synthetic-{number + 1}", _text(tokenizer, corpus, draw, wanted)))
    return tuple(made)


def _text(tokenizer: Tokenizer, corpus: list[int], draw: random.Random, wanted: int) -> str:
    """Text that encodes to `wanted` tokens, or the nearest below that cutting gives."""
    best = ""
    for _ in range(_TRIES):
        start = draw.randrange(len(corpus))
        around = corpus[start:] + corpus * (wanted // len(corpus) + 1)
        # Cut between tokens, text may encode to other tokens: a few more or fewer until it fits.
        length = wanted
        for _ in range(_TRIES):
            text = tokenizer.decode(around[:length])
            found = len(tokenizer.encode(text, add_special_tokens=False).ids)
            if found == wanted and text.strip():
                return text
            if found < wanted and len(text) > len(best):
                best = text
            length = max(1, length + wanted - found)
    if not best.strip():
        raise StageError(f"this tokenizer gives no text of {wanted} tokens", failure=FailureClass.USER)
    return best
