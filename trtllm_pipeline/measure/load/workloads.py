"""Prompts of given lengths: real texts cut and padded, or text from a corpus, with shared prefixes and several turns.

Lengths are exact according to the tokenizer, including special tokens. The analysis compares them with the counts of
tokenizer and server.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import FailureClass, Json, StageError, user_files
from trtllm_pipeline.measure.load.prompts import BLOCK_TOKENS, OPENING_WORDS, Prompt, conversations

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trtllm_pipeline.measure.load.load import Level

CORPUS: Final = PACKAGE / "data" / "calibration" / "general.jsonl"
MOST_MADE: Final = 1024
"""Maximum number of synthetic prompts, if it follows from the number of requests."""
MADE: Final = 64
"""Default number of synthetic prompts."""
_TRIES: Final = 20
_NEAR: Final = 16
"""Range of cuts, in tokens around the target, to find a text with the exact length after encoding again."""
_CHARACTERS_PER_TOKEN: Final = 6
_DRAWS: Final = 1000
_AROUND: Final = 20
"""Number of preceding characters that may affect the token count of a text's first words."""
MOST_OPENINGS: Final = 50_000
"""Limit for a level with a duration."""
_QUICKEST_S: Final = 0.01
"""Assumed minimum e2e, if the number of requests is unknown."""
_ORDINARY: Final = re.compile(rf"(?<= )(?=(?:[a-zA-Z]+ ){{{OPENING_WORDS + 1}}})")
"""Position before replaceable words. One extra, because the warmup drops the first."""
_BETWEEN: Final = "\n\n"
"""Separator after a shared prefix."""

Lengths = tuple[int, int]
"""Input and output tokens of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Target lengths of prompts, and their shared prefixes."""

    input_tokens: int
    """Mean prompt length, special tokens included. In a conversation: of the last turn."""
    input_tokens_stddev: float = 0.0
    output_tokens: int | None = None
    """Mean output length. None: max_tokens of the load."""
    output_tokens_stddev: float = 0.0
    lengths: tuple[Lengths, ...] = ()
    """Lengths of the first request, the second and so on, cycling. Used instead of means."""
    longest: Lengths | None = None
    """Limits of the server. Longer lengths are drawn again."""
    shared_prefix_tokens: int = 0
    """Length of the shared prefix. Only longer prompts have it."""
    shared_prefixes: int = 1
    """Number of different prefixes, used round-robin."""
    turns: int = 1
    """Turns per conversation: each prompt continues the previous one."""
    prompts: int | None = None
    """Number of prompts or conversations. None: one for each text, or else for each of `lengths`, or else MADE."""
    fresh: bool = False
    """Every request starts with different words, see `Openings`."""
    seed: int = 0

    def to_json(self) -> dict[str, Json]:
        """As in the conditions of a measurement, without defaults."""
        plain = Workload(input_tokens=0)
        changed = {
            name: value
            for name, value in asdict(self).items()
            if name not in {"prompts", "lengths", "longest"} and value != getattr(plain, name)
        }
        if self.lengths:
            digest = hashlib.sha256(json.dumps(self.lengths).encode()).hexdigest()[:12]
            changed |= {"lengths": f"{len(self.lengths)} pairs, digest {digest}"}
            changed.pop("input_tokens", None)
            changed.pop("output_tokens", None)
        return changed


def read_lengths(path: Path) -> tuple[Lengths, ...]:
    """The lengths in a file: each line is an object with `input_tokens` and `output_tokens`. Raises MatrixError."""

    def parse(row: object, _number: int) -> Lengths:
        if not isinstance(row, dict):
            raise user_files.RowError("", "expected an object with `input_tokens` and `output_tokens`")
        for name in ("input_tokens", "output_tokens"):
            if type(row.get(name)) is not int or row[name] < 1:
                raise user_files.RowError(name, f"expected a positive integer, got {row.get(name)!r}")
        return row["input_tokens"], row["output_tokens"]

    hint = 'a line looks like {"input_tokens": 512, "output_tokens": 128}'
    return tuple(user_files.read_json_lines(path, parse, nothing="no lengths in this file", hint=hint))


def made(tokenizer: Tokenizer, workload: Workload, texts: Sequence[Prompt] = ()) -> tuple[Prompt, ...]:
    """The prompts of a workload: consecutive `texts`, cut or padded, or else text from the corpus.

    Prompts are natural text: random tokens are unlike any real prompt and change the output. Padding and synthetic text
    start at a different place in the corpus each time, while places are left, so that prompts only share a requested
    prefix. The same seed gives the same prompts. Raises StageError if a prompt cannot have its length.
    """
    writer = _Writer(tokenizer, random.Random(workload.seed))  # noqa: S311 - not a secret
    count = workload.prompts or len(texts) or len(workload.lengths) or MADE
    count = min(count, len(texts) or count)
    shared = [""] * workload.shared_prefixes
    if workload.shared_prefix_tokens:
        shared = [writer.exactly(workload.shared_prefix_tokens) for _ in shared]
    prompts: list[Prompt] = []
    for number, (input_tokens, output_tokens) in enumerate(islice(_lengths(workload, writer.draw), count)):
        of = texts[number] if texts else Prompt(f"synthetic-{number + 1}", "")
        prefix = shared[number % len(shared)]
        if prefix and input_tokens > workload.shared_prefix_tokens:
            of = replace(of, text=f"{prefix}{_BETWEEN}{of.text}", shared=len(prefix))
        of = replace(of, max_tokens=output_tokens, messages=(), references=(), stop_words=(), turn=1)
        prompts += _turns(writer, of, input_tokens, workload.turns)
    if workload.shared_prefix_tokens and not any(prompt.shared for prompt in prompts):
        raise StageError(
            f"no prompt is longer than the {workload.shared_prefix_tokens} tokens that prompts are to share",
            failure=FailureClass.USER,
        )
    return tuple(prompts)


def _turns(writer: _Writer, of: Prompt, input_tokens: int, turns: int) -> Iterator[Prompt]:
    """A conversation whose last turn has `input_tokens`, and earlier turns a share of them."""
    text = writer.exactly(input_tokens, of.text)
    for turn in range(1, turns):
        share = max(writer.special + 1, input_tokens * turn // turns)
        yield replace(of, id=f"{of.id}, turn {turn}", text=writer.exactly(share, text), input_tokens=share, turn=turn)
    last = of.id if turns == 1 else f"{of.id}, turn {turns}"
    yield replace(of, id=last, text=text, input_tokens=input_tokens, turn=turns)


def _lengths(workload: Workload, draw: random.Random) -> Iterator[tuple[int, int | None]]:
    if workload.lengths:
        yield from cycle(workload.lengths)
    most = workload.longest or (None, None)
    while True:
        output = workload.output_tokens
        yield (
            _normal(draw, workload.input_tokens, workload.input_tokens_stddev, most[0]),
            None if output is None else _normal(draw, output, workload.output_tokens_stddev, most[1]),
        )


def _normal(draw: random.Random, mean: int, stddev: float, most: int | None) -> int:
    """An integer from a normal distribution truncated to 1 to `most`."""
    for _ in range(_DRAWS if stddev else 0):
        drawn = round(draw.gauss(mean, stddev))
        if 1 <= drawn <= (drawn if most is None else most):
            return drawn
    return mean


class _Writer:
    """Creates texts of exact lengths."""

    def __init__(self, tokenizer: Tokenizer, draw: random.Random) -> None:
        self.draw = draw
        self.special = len(tokenizer.encode("").ids)
        """Number of tokens that the tokenizer adds to a text."""
        self._tokenizer = tokenizer
        self._corpus = ""
        self._starts: list[int] = []

    def exactly(self, tokens: int, text: str = "") -> str:
        """`text` cut or padded to `tokens`, including special ones. Raises StageError if that is impossible."""
        wanted = tokens - self.special
        if wanted < 1:
            raise StageError(
                f"a prompt cannot have {tokens} tokens: {self.special} are special ones", failure=FailureClass.USER
            )
        for _ in range(_TRIES):
            padded = self._padded(text, wanted)
            cut_text = _cut(self._tokenizer, padded, wanted)
            if cut_text is not None:
                return cut_text
            text = padded[: len(padded) // 2]  # another end may work
        raise StageError(f"this tokenizer gives no text of {tokens} tokens", failure=FailureClass.USER)

    def _padded(self, text: str, wanted: int) -> str:
        """A prefix of `text` with at least `wanted` tokens. A shorter `text` is padded from the corpus."""
        for beginning in (text[: wanted * _CHARACTERS_PER_TOKEN * 2], text):
            if _count(self._tokenizer, beginning) >= wanted:
                return beginning
        self._corpus = self._corpus or _corpus()
        if not self._starts:
            self._starts = [found.start() for found in _ORDINARY.finditer(self._corpus)]
            self.draw.shuffle(self._starts)
        start = self._starts.pop()
        room = wanted * _CHARACTERS_PER_TOKEN
        while True:
            around = self._corpus[start:] + self._corpus * (room // len(self._corpus) + 1)
            padded = f"{text} {around[:room]}" if text else around[:room]
            if _count(self._tokenizer, padded) > wanted + _NEAR:
                return padded
            room *= 2


def of_trace(tokenizer: Tokenizer, prompts: Sequence[Prompt], seed: int) -> tuple[Prompt, ...]:
    """The prompts of a trace, with text for their blocks. Special tokens are included in the length.

    A block has the same text in every prompt. Raises StageError if a prompt cannot have its length.
    """
    blocks = _Blocks(tokenizer, seed)
    return tuple(prompt if prompt.blocks is None else replace(prompt, text=blocks.text(prompt)) for prompt in prompts)


class _Blocks:
    """Text of BLOCK_TOKENS tokens for each block name.

    A block is a passage of the corpus, filled up with short words. Tokenizers do not join tokens across words, so a
    block has the same tokens after any other block.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed
        self._special = len(tokenizer.encode("").ids)
        self._words = _corpus().split()
        self._tokens = {word: _count_behind(tokenizer, word) for word in set(self._words)}
        ordinary = sorted(word for word in self._tokens if word.isalpha())
        self._firsts = [word for word in ordinary if _count(tokenizer, word) == self._tokens[word]] or ordinary
        """Words with the same number of tokens at the start of a text as after another word."""
        least = min(self._tokens[word] for word in ordinary)
        self._short = [word for word in ordinary if self._tokens[word] == least]
        self._known: dict[int | str, list[str]] = {}

    def text(self, prompt: Prompt) -> str:
        assert prompt.blocks is not None
        assert prompt.input_tokens is not None
        left = prompt.input_tokens - self._special
        words: list[str] = []
        for name in prompt.blocks:
            if name not in self._known:
                self._known[name] = self._filled(name, BLOCK_TOKENS)
            words += self._known[name] if left >= BLOCK_TOKENS else self._filled(name, left)
            left -= BLOCK_TOKENS
        text = " ".join(words)
        if len(self._tokenizer.encode(text).ids) == prompt.input_tokens:
            return text
        draw = random.Random(f"{self._seed}:{prompt.blocks[-1]}")  # noqa: S311 - not a secret
        return _Writer(self._tokenizer, draw).exactly(prompt.input_tokens, text)

    def _filled(self, name: int | str, tokens: int) -> list[str]:
        """The words of a block, or of a number of its tokens."""
        draw = random.Random(f"{self._seed}:{name}")  # noqa: S311 - not a secret
        start = draw.randrange(len(self._words))
        opening = draw.choices(self._firsts, k=OPENING_WORDS)
        words, total = list[str](), 0
        for word in (*opening, *islice(cycle(self._words), start, start + BLOCK_TOKENS)):
            if total + self._tokens[word] <= tokens:
                words.append(word)
                total += self._tokens[word]
        while total < tokens:
            words.append(draw.choice(self._short))
            total += self._tokens[words[-1]]
        return words


class Openings:
    """Different first words for synthetic prompts, so that requests of a run never share a prefix that a cache could
    reuse. `together`: requests of a level that start alike still do, as a trace requires.

    The rest of a prompt is unchanged. Only its first words are tokenized again: the tokens after a space some words
    later do not depend on them. The analysis counts the whole prompt. The same seed gives the same openings.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, together: bool = False) -> None:
        self._tokenizer = tokenizer
        self._together = together
        self._draw = random.Random(seed)  # noqa: S311 - not a secret
        self._used: set[str] = set()
        self._words: tuple[dict[int, list[str]], dict[int, list[str]]] = ({}, {})
        """Number of tokens -> words with that number, at the start of a text and after another word."""
        for word in sorted({word for word in _corpus().split() if word.isalpha()}):
            self._words[0].setdefault(_count(tokenizer, word), []).append(word)
            self._words[1].setdefault(_count_behind(tokenizer, word), []).append(word)

    def of(self, level: Level) -> tuple[str, ...]:
        """One opening for each conversation of a level. "" if none of the same length is left. For a level with a
        duration: enough for the requests that fit into it, within limits.
        """
        warmup, measured = conversations(level.warmup), conversations(level.measured)
        count = len(measured)
        if level.seconds is not None:
            count = max(count, min(MOST_OPENINGS, math.ceil(level.seconds * (level.concurrency or 1) / _QUICKEST_S)))
        talks = [tuple(map(_Begun.of, talk)) for talk in (*warmup, *islice(cycle(measured), count))]
        if self._together:
            drawn = {talk: self._one(talk) for talk in dict.fromkeys(talks)}
            return tuple(drawn[talk] for talk in talks)
        return tuple(map(self._one, talks))

    def _one(self, begun: Sequence[_Begun]) -> str:
        counts = [_count(self._tokenizer, each.with_opening(each.opening)) for each in begun]
        behind = begun[0].before
        total = (_count_behind if behind else _count)(self._tokenizer, begun[0].opening)
        firsts, later = self._words[bool(behind)], self._words[1]
        ways = [(firsts[total], [""])] if total in firsts else []
        ways += [(words, later[total - count]) for count, words in firsts.items() if total - count in later]
        weights = [len(one) * len(other) for one, other in ways]
        for _ in range(_TRIES if ways else 0):
            ((one, other),) = self._draw.choices(ways, weights)
            opening = f"{self._draw.choice(one)} {self._draw.choice(other)}".rstrip()
            fits = [_count(self._tokenizer, each.with_opening(opening)) for each in begun] == counts
            if fits and opening not in self._used:
                self._used.add(opening)
                return opening
        return ""


class _Begun(NamedTuple):
    """A prompt split around its first words."""

    before: str
    opening: str
    after: str

    @classmethod
    def of(cls, prompt: Prompt) -> _Begun:
        start = len(prompt.text) - len(prompt.text[prompt.shared :].lstrip())
        whole = prompt.text[max(0, start - _AROUND) : start + 4 * _AROUND]
        start = min(start, _AROUND)
        words = whole[start:].split(" ", OPENING_WORDS)
        return cls(
            whole[:start], " ".join(words[:OPENING_WORDS]), "".join(f" {word}" for word in words[OPENING_WORDS:])
        )

    def with_opening(self, opening: str) -> str:
        return f"{self.before}{opening}{self.after}"


def _count(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of a text, excluding special ones."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _count_behind(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of a text after another word."""
    return _count(tokenizer, f"a {text}") - _count(tokenizer, "a")


def _corpus() -> str:
    rows = CORPUS.read_text(encoding="utf-8").splitlines()
    return "\n".join(json.loads(row)["text"] for row in rows)


def _cut(tokenizer: Tokenizer, text: str, wanted: int) -> str | None:
    """The prefix of `text` that encodes to `wanted` tokens. None if no cut gives one."""
    ends = [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]
    for away in range(_NEAR):
        for place in dict.fromkeys((wanted + away, wanted - away)):
            if 0 < place <= len(ends):
                prefix = text[: ends[place - 1]]
                if prefix.strip() and _count(tokenizer, prefix) == wanted:
                    return prefix
    return None
