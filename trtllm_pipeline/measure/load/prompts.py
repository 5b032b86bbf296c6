"""Read prompts from JSON Lines: one request per line, or one per turn of a conversation. `workloads.py` creates synthetic ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, Final, TypeVar

from trtllm_pipeline.base import Fault, MatrixError, UsageError, tables, user_files
from trtllm_pipeline.measure.client import images
from trtllm_pipeline.measure.client.service import Service

BUILT_IN_PROMPTS: Final = "builtin:prompts"
BLOCK_TOKENS: Final = 512
"""Tokens that one hash of a Mooncake trace represents. Source: kvcache-ai/Mooncake, FAST25-release."""
OPENING_WORDS: Final = 2
"""Number of words of a synthetic prompt that are replaced each time it is sent."""
_EXAMPLE: Final = 'a line looks like {"input": "The capital of France is", "output": "Paris"}'
_TRACE_EXAMPLE: Final = (
    'a line of a trace looks like {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'
)
_HINTS: Final = {
    **dict.fromkeys(("", "input", "text_input"), _EXAMPLE),
    **dict.fromkeys(("input_length", "output_length"), _TRACE_EXAMPLE),
    "hash_ids": f"give a hash for each {BLOCK_TOKENS} tokens of input_length, or leave out hash_ids: requests then share no prefix",
    "timestamp": f"{_TRACE_EXAMPLE}; for rows without times, give --request-rate or --concurrency instead of --trace-speed",
}
"""Key of a fault in a row -> what to write. The other faults say it."""
OWN_LENGTHS: Final = (
    "the requests of a trace have their own lengths; leave out workload: isl_osl, input_tokens and the like"
)
_TOO_LONG: Final = "build for longer lengths, or let workload: isl_osl cut them"
_SUMMARY: Final = "\n\nTL;DR:"
"""Asks for a summary of the text before it. Source: Radford et al., Language Models are Unsupervised ..., 2019, 3.6."""
_ROLES: Final = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation"), "tool"),
}
"""Speaker names in ShareGPT and similar datasets."""
_CONVERSATIONS: Final = {"conversations": {"messages"}, "conversation": {"messages", "input", "text_input"}}
"""Key of a conversation in ShareGPT, or in similar data sets -> keys that mark the row as the user's own format."""
_FOR_TEMPLATE: Final[Mapping[str, type | tuple[type, ...]]] = {
    "tools": list,
    "documents": list,
    "chat_template_kwargs": dict,
    "reasoning_effort": str,
}
"""Fields of a chat request that form its prompt, and their types."""
_NUMBER: Final = (int, float)
_REQUEST: Final[Mapping[str, type | tuple[type, ...]]] = {
    **_FOR_TEMPLATE,
    **dict.fromkeys(("tool_choice", "function_call"), (str, dict)),
    **dict.fromkeys(("response_format", "structured_outputs", "logit_bias"), dict),
    **dict.fromkeys(("guided_json", "guided_choice"), (str, list, dict)),
    **dict.fromkeys(("guided_regex", "guided_grammar"), str),
    **dict.fromkeys(("functions",), list),
    **dict.fromkeys(("parallel_tool_calls",), bool),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("top_k", "seed", "min_tokens"), int),
}
"""Fields of a chat request that a row may have in addition to its messages, and their types."""
_TYPES: Final = {
    list: "a list",
    dict: "an object",
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}
T = TypeVar("T")
Render = Callable[..., str]
"""Chat messages, and further fields of a `chat.Chat` by name -> prompt text."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    text: str
    max_tokens: int | None = None
    references: tuple[str, ...] = ()
    stop_words: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat messages behind `text`, for chat endpoints."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of its chat request, by OpenAI's names: `tools`, `response_format`, `temperature`, ..."""
    images: int = 0
    """Number of images in the messages, for chat endpoints and multimodal engines."""
    turn: int = 1
    """Number of its turn in a conversation. Turns are consecutive, and each is sent when the previous one has ended."""
    input_tokens: int | None = None
    """Target length of a synthetic prompt."""
    shared: int = 0
    """Length of the shared prefix in characters."""
    at_s: float | None = None
    """Time of a request in its trace, in seconds."""
    blocks: tuple[int | str, ...] | None = None
    """Request of a trace without text: names of its blocks of BLOCK_TOKENS tokens. Equal names have equal text."""
    recorded: bool = False
    """True if `references` are the recorded answer to this turn. Its length limits the output."""


def opened(text: str, shared: int, opening: str) -> str:
    """The prompt with `opening` instead of the first words after the `shared` characters."""
    start = len(text) - len(text[shared:].lstrip())
    return text[:start] + " ".join((opening, *text[start:].split(" ", OPENING_WORDS)[OPENING_WORDS:]))


def with_text(prompt: Prompt, change: Callable[[str, int], str]) -> Prompt:
    """The prompt with changed text, also of its last message. `change` gets the text and its shared prefix's length."""
    text, messages = change(prompt.text, prompt.shared), prompt.messages
    if messages:
        *before, last = messages
        content = last.get("content")
        if isinstance(content, str):
            content = change(content, prompt.shared)
        elif isinstance(content, list) and content and "text" in content[0]:
            content = [{**content[0], "text": change(content[0]["text"], prompt.shared)}, *content[1:]]
        messages = (*before, {**last, "content": content})
    return replace(prompt, text=text, messages=messages)


def conversations(prompts: Sequence[Prompt]) -> list[tuple[Prompt, ...]]:
    """The turns of each conversation together."""
    result: list[list[Prompt]] = []
    for prompt in prompts:
        if prompt.turn == 1 or not result:
            result.append([])
        result[-1].append(prompt)
    return [tuple(each) for each in result]


def _by_line(path: Path) -> bool:
    """True if rows are counted by lines."""
    return not tables.is_table(path) and not user_files.is_array(path)


@dataclass(slots=True)
class LeftOut:
    """Numbers of rows in a prompt file that do not give a prompt."""

    file: Path = Path()
    rows: int = 0
    without_user: list[int] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)
    unsent: int = 0
    """Prompts at the end of a trace that the levels do not send."""

    @property
    def reasons(self) -> str:
        groups = (("without a message of a user", self.without_user), ("too long for the engine", self.too_long))
        found = [(words, rows) for words, rows in groups if rows]
        place = "line" if found and _by_line(self.file) else "row"
        return "; ".join(f"{words}: {len(rows)}, the first in {place} {rows[0]}" for words, rows in found)

    @property
    def settings(self) -> dict[str, str]:
        """As in an event file's header."""
        unsent = {"unsent_of_trace": f"{self.file.name}: the last {self.unsent} requests"} if self.unsent else {}
        return {"rows_left_out": str(self), **unsent}

    def __str__(self) -> str:
        count = len(self.without_user) + len(self.too_long)
        return f"{self.file.name}: rows left out: {count} of {self.rows} ({self.reasons})" if count else ""


def read_prompts(
    path: Path,
    render: Render | None = None,
    *,
    turns: int = 1,
    most: int | None = None,
    fits: Callable[[Prompt], bool] | None = None,
    left_out: LeftOut | None = None,
    timed: bool = False,
) -> tuple[Prompt, ...]:
    """The prompts in `path`, at least one. A line, or a row of a CSV or Parquet file, is an object with

    `input` or `text_input` (text), or `messages` (role and content, put through `render`); and optionally `id`,
    `max_tokens` (or `output_length`), `timestamp` (in milliseconds), `output` (a reference, or a list of them),
    `stop_words` (a text that ends generation, or a list of them), `image` (a file from the directory of `path`, or a
    list of them), and with `messages` the fields of a chat request that are in _REQUEST. Other keys are ignored. Rows
    of public datasets are supported: `conversations` (`from` and `value`, or `role` and `content`) of ShareGPT, and
    `article` with `highlights` of CNN/DailyMail. So are rows of Mooncake's traces, `input_length` and `hash_ids`
    instead of a text. They give prompts with `blocks`.

    `turns` limits the turns of a conversation. The row's answers are sent between them. At most `most` rows are taken,
    all of whose turns satisfy `fits`. Rows without a prompt are recorded in `left_out`. With `timed`, every row needs a
    `timestamp`. Raises MatrixError with every faulty line, and if no row has a prompt.
    """
    taken = 0
    skipped = LeftOut() if left_out is None else left_out
    skipped.file = path

    def keep(of_row: tuple[Prompt, ...], _row: dict[str, Any], number: int) -> tuple[Prompt, ...]:
        nonlocal taken
        fitting = of_row if fits is None else tuple(takewhile(fits, of_row))
        taken += bool(fitting)
        skipped.rows += 1
        if not fitting:
            (skipped.too_long if of_row else skipped.without_user).append(number)
        return fitting

    rows = _read(path, render, turns, keep, lambda: most is not None and taken >= most, folder=path.parent, timed=timed)
    prompts = tuple(prompt for of_row in rows for prompt in of_row)
    if not prompts:
        hint = _TOO_LONG if skipped.too_long else _EXAMPLE
        message = f"no row is a prompt, of {skipped.rows} ({skipped.reasons})"
        raise MatrixError((Fault(os.fspath(path), None, "", message),), hint=hint)
    return prompts


def read_rows(path: Path, make: Callable[[Prompt, dict[str, Any]], T], render: Render | None) -> tuple[T, ...]:
    """The result of `make` for each prompt in `path` and its row. It may raise RowError. All rows need a prompt."""

    def made(prompts: tuple[Prompt, ...], row: dict[str, Any], _number: int) -> list[T]:
        if not prompts:
            raise user_files.RowError("conversations", "expected a message of a user")
        if prompts[0].blocks is not None:
            raise user_files.RowError("input_length", "a row of a trace has no text; expected `input`")
        return [make(prompt, row) for prompt in prompts]

    rows = _read(path, render, 1, made, lambda: False, folder=path.parent)
    return tuple(each for of_row in rows for each in of_row)


def check_first_prompt(
    path: Path,
    make: Callable[[Prompt, dict[str, Any]], object] = lambda _prompt, _row: None,
    *,
    turns: int = 1,
    most: int | None = None,
    timed: bool = False,
    cut: bool = False,
) -> None:
    """Raise MatrixError for errors that `read_prompts`, or `read_rows` with `make`, would find in the first rows of
    `path`, at most `most`, for any model. With `cut`, prompts get other lengths, so a trace is an error. Images are
    checked by `check_images`.
    """
    rows = 0

    def enough() -> bool:
        nonlocal rows
        rows += 1
        return most is not None and rows > most

    def look(prompts: tuple[Prompt, ...], row: dict[str, Any], _number: int) -> tuple[()]:
        for prompt in prompts:
            if cut and prompt.blocks is not None:
                raise user_files.RowError("input_length", OWN_LENGTHS)
            make(prompt, row)
        return ()

    _read(path, lambda _messages, **_more: "any", turns, look, enough, folder=None, first=True, timed=timed)


def _read(
    path: Path,
    render: Render | None,
    turns: int,
    make: Callable[[tuple[Prompt, ...], dict[str, Any], int], Sequence[T]],
    enough: Callable[[], bool],
    *,
    folder: Path | None,
    first: bool = False,
    timed: bool = False,
) -> list[Sequence[T]]:
    """Results of `make` for the prompts, row and number of each row until there are `enough`, or of the `first` rows. Images come from `folder`."""
    known: set[str] = set()

    def parse(row: object, number: int) -> Sequence[T]:
        if enough():
            return ()
        if not isinstance(row, dict):
            raise user_files.RowError("", "expected an object with `input`")
        talk = _talk_key(row) is not None
        prompts = tuple(
            _with_images_of(row, folder, replace(_prompt(each, default_id, render, turn), recorded=talk))
            for turn, (each, default_id) in enumerate(_turns(row, str(number), turns), 1)
        )
        if timed and prompts and prompts[0].at_s is None:
            raise user_files.RowError(
                "timestamp", f"trace_speed needs the time of each request in milliseconds, got {row.get('timestamp')!r}"
            )
        for prompt in prompts:
            if prompt.id in known:
                raise user_files.RowError("id", f"{prompt.id!r} is the id of an earlier line too")
            known.add(prompt.id)
        return make(prompts, row, number)

    if tables.is_table(path):
        return tables.read(path, lambda row, number: parse(_filled(row), number), first=first)
    try:
        return user_files.read_json_lines(path, parse, nothing="no prompt in this file", first=first)
    except MatrixError as error:
        key = error.faults[0].key.rpartition(": ")[2]
        error.hint = error.hint or _HINTS.get(key)
        raise


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """A table row without its empty cells. CSV files store numbers as text."""
    filled = {name: value for name, value in row.items() if value is not None and value != ""}
    if isinstance(text := filled.get("max_tokens"), str):
        with suppress(ValueError):
            filled["max_tokens"] = int(text)
    return filled


def _turns(row: dict[str, Any], number: str, turns: int) -> list[tuple[dict[str, Any], str]]:
    """Rows in our own form, one for each requested turn, and the ids of conversations without turns."""
    talk = _talk_key(row)
    if talk is not None:
        messages = _messages(row[talk], talk)
        row = {
            **{name: row[name] for name in ("max_tokens", "timestamp", *_REQUEST) if name in row},
            "messages": messages,
        }
        places = [place for place, each in enumerate(messages) if each["role"] == "user"][:turns]
        ended = [
            {**row, "messages": messages[: place + 1], **_answer(messages[place + 1 : place + 2])} for place in places
        ]
    elif "article" in row and "highlights" in row and "input" not in row:
        ended = [{"input": f"{row['article']}{_SUMMARY}", "output": row["highlights"]}]
    elif turns > 1 and isinstance(row.get("messages"), list):
        messages = row["messages"]
        places = [place for place, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"]
        ended = [{**row, "messages": messages[: place + 1]} for place in places[:turns]] or [row]
    else:
        ended = [row]
    if len(ended) == 1:
        return [(ended[0], number)]
    name = str(row.get("id", number))
    return [({**each, "id": f"{name}, turn {turn}"}, name) for turn, each in enumerate(ended, 1)]


def _talk_key(row: Mapping[str, Any]) -> str | None:
    """The key of a ShareGPT conversation in a row. None if it has none."""
    return next((name for name, others in _CONVERSATIONS.items() if name in row and not row.keys() & others), None)


def _messages(entries: object, key: str) -> list[dict[str, Any]]:
    """A ShareGPT conversation as chat messages, starting at the first message of the user or the system."""
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise user_files.RowError(key, "expected a list of objects with `from` and `value`, or `role` and `content`")
    messages = []
    for place, each in enumerate(entries):
        speaker = next((each[name] for name in ("from", "role") if name in each), None)
        words = [each[name] for name in ("value", "content") if name in each]
        if not isinstance(speaker, str) or not words or not isinstance(words[0], (str, list, type(None))):
            raise user_files.RowError(
                f"{key}[{place}]", "expected an object with `from` and `value`, or `role` and `content`"
            )
        if speaker not in _ROLES:
            raise user_files.RowError(
                f"{key}[{place}]", f"{speaker!r} is an unknown speaker; expected {', '.join(_ROLES)}"
            )
        if words[0] and (not isinstance(words[0], str) or words[0].strip()):
            messages.append({"role": _ROLES[speaker], "content": words[0]})
    return list(dropwhile(lambda each: each["role"] == "assistant", messages))


def _answer(after: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer after a turn, used as its reference."""
    return {"output": after[0]["content"]} if after and after[0]["role"] == "assistant" else {}


def _prompt(row: dict[str, Any], default_id: str, render: Render | None, turn: int) -> Prompt:
    given = [key for key in ("input", "text_input", "messages") if key in row]
    if not given and row.keys() & {"input_length", "hash_ids"}:
        return _of_trace(row, default_id)
    if len(given) != 1:
        raise user_files.RowError("input", "expected exactly one of `input`, `text_input` and `messages`")
    text = row[given[0]]
    messages: tuple[Mapping[str, Any], ...] = ()
    request: dict[str, Any] = {}
    if given[0] == "messages":
        if not (isinstance(text, list) and text and all(isinstance(item, dict) for item in text)):
            raise user_files.RowError("messages", "expected a list of objects with `role` and `content`")
        if render is None:
            raise user_files.RowError("messages", "the model has no chat template; use `input`")
        messages, request = tuple(text), _request(row)
        from trtllm_pipeline.measure import chat_templates as chat  # late: it imports subprocess

        try:
            text = render(messages, **_for_template(request))
        except chat.RefusedError as error:
            raise user_files.RowError("messages", error.message) from error
    if not isinstance(text, str) or not text.strip():
        raise user_files.RowError(given[0], "expected a text that is not empty")
    names = ("max_tokens", *(("max_completion_tokens",) if messages else ()), "output_length")
    max_tokens = _positive(row, next((name for name in names if row.get(name) is not None), "max_tokens"))
    references, stop_words = _texts(row, "output"), _texts(row, "stop_words")
    if messages:
        stop_words = stop_words or _texts(row, "stop")
    return Prompt(
        str(row.get("id", default_id)),
        text,
        max_tokens,
        references,
        stop_words,
        messages,
        request,
        turn=turn,
        at_s=_at_s(row),
    )


def _of_trace(row: Mapping[str, Any], id_: str) -> Prompt:
    """A request of a Mooncake trace: its lengths and blocks, without text."""
    if row.get("session_id") is not None:
        raise user_files.RowError(
            "session_id", "turns of a session are not supported with lengths; give each turn's whole prompt without it"
        )
    tokens = _positive(row, "input_length")
    if tokens is None:
        raise user_files.RowError("input_length", "expected a positive integer, got None")
    needed = math.ceil(tokens / BLOCK_TOKENS)
    blocks = row.get("hash_ids") or [f"{id_}:{number}" for number in range(needed)]
    if not isinstance(blocks, list) or not all(type(each) in {int, str} for each in blocks):
        raise user_files.RowError("hash_ids", f"expected a list of integers, got {blocks!r}"[:200])
    if len(blocks) != needed:
        raise user_files.RowError(
            "hash_ids", f"expected {needed}, one for each {BLOCK_TOKENS} tokens of {tokens}, got {len(blocks)}"
        )
    output = _positive(row, "output_length")
    id_ = str(row.get("id", id_))
    return Prompt(id_, "", output, input_tokens=tokens, at_s=_at_s(row), blocks=tuple(blocks))


def _positive(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise user_files.RowError(name, f"expected a positive integer, got {value!r}")
    return value


def _at_s(row: Mapping[str, Any]) -> float | None:
    """The time of a row in seconds. None without a time in milliseconds."""
    value = row.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        return None
    return value / 1e3


def _request(row: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request fields of a row that are not fields of `Prompt`."""
    if row.get("n", 1) not in (1, None):
        raise user_files.RowError("n", f"expected 1, one choice per request, got {row['n']!r}")
    fields_of_row = {name: row[name] for name in _REQUEST if row.get(name) is not None}
    for name, value in fields_of_row.items():
        kinds = _REQUEST[name]
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(dict.fromkeys(_TYPES[kind] for kind in kinds))
            raise user_files.RowError(name, f"expected {expected}, got {value!r}"[:200])
    return fields_of_row


def _for_template(request: Mapping[str, Any]) -> dict[str, Any]:
    """A request's variables for the chat template, by the names of a `chat.Chat`."""
    variables = {**request.get("chat_template_kwargs", {})}
    if "reasoning_effort" in request:
        variables["reasoning_effort"] = request["reasoning_effort"]
    extra = {name: request[name] for name in ("tools", "documents") if name in request}
    if request.get("tool_choice") == "none":
        extra.pop("tools", None)
    return {**extra, **({"variables": variables} if variables else {})}


def beyond_template(request: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that are not part of its prompt."""
    harmless = {"tool_choice": ("auto", "none"), "parallel_tool_calls": (True,)}
    return {
        name: value
        for name, value in request.items()
        if name not in _FOR_TEMPLATE and value not in harmless.get(name, ())
    }


def _with_images_of(row: Mapping[str, Any], folder: Path | None, prompt: Prompt) -> Prompt:
    """The prompt with its row's images. Without a directory, images are not read."""
    names = _texts(row, "image")
    try:
        urls = [] if folder is None else [images.read(folder / name) for name in names]
    except ValueError as error:
        raise user_files.RowError("image", f"{row['image']!r}: {error}") from error
    return with_images(prompt, urls) if urls else prompt


def each_with_an_image(prompts: Sequence[Prompt], spec: str | None, service: Service) -> tuple[Prompt, ...]:
    """`prompts` with synthetic images as in `spec`. Triton accepts one, so prompts that have one stay as they are."""
    if spec is None:
        return tuple(prompts)
    made = images.ImagesAsked.parse(spec)
    return tuple(
        prompt if prompt.images and service.kind != "openai" else with_images(prompt, made.make(number))
        for number, prompt in enumerate(prompts)
    )


def with_images(prompt: Prompt, urls: Sequence[str]) -> Prompt:
    """A prompt as chat messages with images, given as URLs."""
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return replace(prompt, messages=images.with_images(messages, urls), images=prompt.images + len(urls))


def image_files(path: Path) -> dict[str, int]:
    """Image files in the rows of a prompt file, with the first row of each. Empty for an invalid file."""
    first_rows: dict[str, int] = {}

    def look(row: object, number: int) -> None:
        named = row.get("image") if isinstance(row, dict) else None
        for name in named if isinstance(named, list) else [named]:
            if isinstance(name, str) and name:
                first_rows.setdefault(name, number)

    try:
        user_files.check(path)
        if tables.is_table(path):
            tables.read(path, look, lambda columns: [name for name in columns if name == "image"])
        elif '"image"' in user_files.read_text(path):
            user_files.read_json_lines(path, look, nothing="no prompt in this file")
    except (MatrixError, UsageError, OSError, ValueError):
        return {}
    return first_rows


def check_images(path: Path, named: Mapping[str, int]) -> None:
    """Raise MatrixError with the rows of a prompt file whose images cannot be read or have an unknown header."""
    faults = []
    for name, number in named.items():
        try:
            images.check(path.parent / name)
        except ValueError as error:
            fault = user_files.fault_of_row(path, number, "image", f"{name!r} {error}", by_line=_by_line(path))
            faults.append(fault)
    if faults:
        raise MatrixError(tuple(faults), hint="images are files from the directory of the prompt file")


def _texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A text or a list of texts, as a tuple. Empty without the key."""
    value = row.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(item, str) and item for item in texts):
        raise user_files.RowError(key, "expected a text or a list of texts")
    return tuple(texts)


def unrendered(messages: Sequence[Mapping[str, Any]], **_more: object) -> str:
    """Contents of chat messages, one per line, for servers that apply the chat template themselves."""
    return "\n".join(content for message in messages if isinstance(content := message.get("content"), str))


@contextmanager
def chat_renderer(model: Path | None, adds_special_tokens: Callable[[], bool]) -> Iterator[Render | None]:
    """Renders chat messages to a prompt for the model whose tokenizer files are in the directory `model`.

    None without a template. Rendering raises `chat.TemplateError`. If the server `adds_special_tokens` to prompts, the
    template's leading ones are removed, so that prompts have them once. The server is queried at the first message.
    """
    from trtllm_pipeline.measure import chat_templates as chat
    from trtllm_pipeline.models import added_prefix, read_tokenizer

    template = None if model is None else chat.read(model)
    if model is None or template is None:
        yield None
        return

    @cache
    def prefix() -> str:
        return added_prefix(read_tokenizer(model)) if adds_special_tokens() else ""

    with chat.Renderer(template) as renderer:
        yield lambda messages, **more: renderer.render(chat.Chat(messages, **more)).removeprefix(prefix())


def tokenizer_folder(path: Path | None) -> Path | None:
    """The directory of a tokenizer, given as a tokenizer.json or its directory. None for None."""
    return path if path is None or path.is_dir() else path.parent
