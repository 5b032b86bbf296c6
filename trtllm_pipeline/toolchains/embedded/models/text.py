"""The tokenizer as the models need it: encode, decode a piece of an answer, and know where a character is cut."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from trtllm_pipeline.errors import ServerError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE vocabularies, as GPT-2 defined it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


class Text:
    """A Hugging Face tokenizer folder."""

    def __init__(self, folder: str | Path) -> None:
        """Load `folder`. Raises ServerError when it holds no usable tokenizer."""
        from tokenizers import Tokenizer

        path = Path(folder) / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ServerError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._special = {index for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        layers = json.loads(path.read_text(encoding="utf-8"))
        self._byte_level = '"ByteLevel"' in json.dumps([layers.get("pre_tokenizer"), layers.get("decoder")])
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor_text = self._tokenizer.decode(self._anchor)
        self.end_ids = _end_ids(Path(folder), self.token_id)
        """Tokens that end an answer, the most important first."""
        self.pad_id = self.token_id(_token(Path(folder), "pad_token"))

    def token_id(self, token: str | None) -> int | None:
        """The id of exactly this token, or None."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; with `special`, those the model expects around a prompt as well."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids` as a continuation of other text.

        Decoders that strip the first space of what they are given would glue streamed pieces together, so pieces are
        decoded behind an anchor. The start of a whole text, known by its special token, is decoded by itself.
        """
        if not ids:
            return ""
        if ids[0] not in self._special:
            text = self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens=skip_special)
            if text.startswith(self._anchor_text):
                return str(text[len(self._anchor_text) :])
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the UTF-8 bytes of a text; nothing for special tokens."""
        symbol = self._tokenizer.id_to_token(token)
        if symbol is None or token in self._special:
            return b""
        if self._byte_level:
            alphabet = byte_level_alphabet()
            if all(character in alphabet for character in symbol):
                return bytes(map(alphabet.__getitem__, symbol))
        elif match := _BYTE_TOKEN.fullmatch(symbol):
            return bytes.fromhex(match[1])
        return str(symbol).encode()


class Characters:
    """Follows one answer and says after which tokens no character is cut."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def whole(self, token: int) -> bool:
        """Take the next token in; whether the text so far ends with a whole character."""
        self._decoder.decode(self._text.token_bytes(token))
        return not self._decoder.getstate()[0]


def _end_ids(folder: Path, token_id: Callable[[str | None], int | None]) -> tuple[int, ...]:
    ids: list[object] = []
    try:
        given = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
        ids += given if isinstance(given, list) else [given]
    except (OSError, ValueError):
        pass  # optional file
    ids.append(token_id(_token(folder, "eos_token")))
    return tuple(dict.fromkeys(index for index in ids if isinstance(index, int)))


def _token(folder: Path, name: str) -> str | None:
    """A token named in tokenizer_config.json, written as a string or as an object with its content."""
    try:
        value = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError):
        return None
    return value.get("content") if isinstance(value, dict) else value
