"""The tokenizer of the models: encode, decode a piece of an answer, and detect cut characters."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from trtllm_pipeline.models import Fields, read_tokenizer

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """The character for each byte in byte-level BPE vocabularies, as GPT-2 defined it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


class Text:
    """A Hugging Face tokenizer directory."""

    def __init__(self, folder: str | Path) -> None:
        """Load `folder`. Raises DownloadError if it has no usable tokenizer."""
        folder = Path(folder)
        self._tokenizer = read_tokenizer(folder)
        self._special = {index for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        layers = Fields.read(folder, "tokenizer.json").values
        self._byte_level = '"ByteLevel"' in json.dumps([layers.get("pre_tokenizer"), layers.get("decoder")])
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor_text = self._tokenizer.decode(self._anchor)
        named = Fields.read_optional(folder, "tokenizer_config.json")
        last = self.token_id(named.token("eos_token"))
        ends = Fields.read_optional(folder, "generation_config.json").token_ids("eos_token_id")
        self.end_ids = tuple(dict.fromkeys((*ends, *(() if last is None else (last,)))))
        """Tokens that end an answer, the most important first."""
        self.pad_id = self.token_id(named.token("pad_token"))

    def token_id(self, token: str | None) -> int | None:
        """The id of exactly this token, or None."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`. With `special`, also the special tokens that the model expects around a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids` as a continuation of other text.

        Decoders that strip the first space of their input would join streamed pieces without it, so pieces are decoded behind an
        anchor. The start of a whole text, known by its special token, is decoded alone.
        """
        if not ids:
            return ""
        if ids[0] not in self._special:
            text = self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens=skip_special)
            if text.startswith(self._anchor_text):
                return str(text[len(self._anchor_text) :])
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that one token adds to a text. Empty for special tokens."""
        symbol = self._tokenizer.id_to_token(token)
        if symbol is None or token in self._special:
            return b""
        if self._byte_level:
            alphabet = byte_level_alphabet()
            if all(character in alphabet for character in symbol):
                return bytes(map(alphabet.__getitem__, symbol))
        elif match := BYTE_TOKEN.fullmatch(symbol):
            return bytes.fromhex(match[1])
        return str(symbol).encode()


class Characters:
    """Follows one answer and reports the tokens after which no character is cut."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def whole(self, token: int) -> bool:
        """Process the next token. True if the text so far ends with a whole character."""
        self._decoder.decode(self._text.token_bytes(token))
        return not self._decoder.getstate()[0]
