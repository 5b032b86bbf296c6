"""Images in requests: synthetic ones of a given size, or files, as data URLs in OpenAI chat messages.

Source: OpenAI API reference, "Create chat completion", content parts; PNG (Portable Network Graphics) Specification,
third edition, 5 "Datastream structure".
"""

from __future__ import annotations

import base64
import re
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_FORM: Final = re.compile(r"([1-9]\d?)@([1-9]\d{0,3})x([1-9]\d{0,3})")
_TILE: Final = 16
"""Edge of a single-color square in pixels: images differ everywhere, but still compress."""
_KINDS: Final = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_MAGIC: Final = max(map(len, _KINDS))
_LARGEST: Final = 20_000_000
"""Maximum bytes of an image file, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class ImagesAsked:
    """Number of images per request, and their size in pixels."""

    count: int
    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> ImagesAsked:
        """Parse `2@640x480`. Raises ValueError for any other format."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not COUNT@WIDTHxHEIGHT; write 1@512x512, up to 99@9999x9999")
        return cls(*map(int, match.groups()))

    def make(self, number: int) -> tuple[str, ...]:
        """The images of the request `number`, as data URLs. They differ between requests, and are reproducible."""
        seeds = (number * self.count + index for index in range(self.count))
        return tuple(data_url(png(self.width, self.height, seed)) for seed in seeds)


def png(width: int, height: int, seed: int) -> bytes:
    """An image of colored squares, 8 bits each for red, green and blue."""
    import random  # late, because every stage's program imports this module

    draw = random.Random(seed)  # noqa: S311 - not a secret
    tiles = -(-width // _TILE)
    rows = [
        b"\0" + b"".join(draw.randbytes(3) * _TILE for _ in range(tiles))[: 3 * width]
        for _ in range(-(-height // _TILE))
    ]
    lines = b"".join(rows[line // _TILE] for line in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def data_url(image: bytes) -> str:
    """An image as a data URL. Raises ValueError unless it is PNG, JPEG, GIF or WebP."""
    return f"data:image/{_kind(image)};base64,{base64.b64encode(image).decode()}"


def _kind(image: bytes) -> str:
    kind = next((kind for magic, kind in _KINDS.items() if image.startswith(magic)), None)
    if kind is None:
        raise ValueError("is not a PNG, JPEG, GIF or WebP image")
    return kind


def check(path: Path) -> None:
    """Raise ValueError for a file that cannot be read, or that has no image header."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a file")
        if status.st_size > _LARGEST:
            raise ValueError(f"is larger than {_LARGEST // 1_000_000} MB")
        with path.open("rb") as file:
            _kind(file.read(_MAGIC))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error


def read(path: Path) -> str:
    """An image file as a data URL. Raises ValueError for a file that cannot be read, or is not an image."""
    check(path)
    try:
        return data_url(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """The texts of chat messages, one per line, and the URLs of their images."""
    parts: list[Any] = []
    for message in messages:
        content = message.get("content")
        parts += [{"text": content}] if isinstance(content, str) else content or ()
    urls = (part["image_url"]["url"] for part in parts if "image_url" in part)
    return "\n".join(str(part["text"]) for part in parts if "text" in part), tuple(urls)


def as_jpeg(url: str) -> str:
    """A data URL in the form that Triton's template models accept: labeled as JPEG for any format. They detect the
    format from the image itself. Source: `load_images_from_urls` of `preprocessing`.
    """
    return f"data:image/jpeg;base64,{url.partition('base64,')[2]}"


def with_images(messages: Sequence[Mapping[str, Any]], urls: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Chat messages with images at the end of the last one, after the text, which differs between requests."""
    *before, last = messages
    content = last.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return (*before, {**last, "content": parts})
