"""Images for requests: synthetic, read from files, added to messages."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from trtllm_pipeline.measure.client import images
from trtllm_pipeline.measure.client.images import ImagesAsked


@pytest.mark.parametrize(("width", "height"), [(1, 1), (16, 16), (17, 33), (640, 480)])
def test_a_png_is_whole_and_has_the_size(width: int, height: int) -> None:
    made, chunks = images.png(width, height, 7), {}
    assert made.startswith(b"\x89PNG\r\n\x1a\n")
    rest = made[8:]
    while rest:
        (length,) = struct.unpack(">I", rest[:4])
        kind, data = rest[4:8], rest[8 : 8 + length]
        assert struct.pack(">I", zlib.crc32(kind + data)) == rest[8 + length : 12 + length]
        chunks[kind], rest = data, rest[12 + length :]
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (width, height, 8, 2, 0, 0, 0)
    lines = zlib.decompress(chunks[b"IDAT"])
    assert len(lines) == height * (1 + 3 * width)
    assert {lines[line * (1 + 3 * width)] for line in range(height)} == {0}, "no line is filtered"


def test_another_request_has_other_images_and_the_same_has_the_same() -> None:
    images_wanted = ImagesAsked.parse("2@32x48")
    assert (images_wanted.count, images_wanted.width, images_wanted.height) == (2, 32, 48)
    made = [*images_wanted.make(0), *images_wanted.make(1)]
    assert len(set(made)) == 4
    assert images_wanted.make(1) == tuple(made[2:])


@pytest.mark.parametrize("text", ["", "512x512", "0@8x8", "1@0x8", "1@8", "100@8x8", "1@8x80000", "1 @ 8x8"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write 1@512x512"):
        ImagesAsked.parse(text)


def test_files_are_known_by_what_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(images.png(8, 8, 0))
    assert images.read(path).startswith("data:image/png;base64,")
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match="not a PNG, JPEG, GIF or WebP"):
        images.read(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        images.read(tmp_path / "b.png")


def test_images_come_behind_the_text_of_the_last_message() -> None:
    messages = ({"role": "system", "content": "short"}, {"role": "user", "content": "What is it?"})
    system, user = images.with_images(messages, ["data:1", "data:2"])
    assert system == messages[0]
    assert [part["type"] for part in user["content"]] == ["text", "image_url", "image_url"]
    (again,) = images.with_images((user,), ["data:3"])
    assert [part.get("image_url", {}).get("url") for part in again["content"]] == [None, "data:1", "data:2", "data:3"]


def test_texts_and_images_of_a_chat_are_told_apart() -> None:
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"})
    (url,) = ImagesAsked.parse("1@8x8").make(0)
    assert images.split_images(images.with_images(chat, [url])) == ("Be brief.\nWhat is it?", (url,))
    assert images.split_images(chat) == ("Be brief.\nWhat is it?", ())
    head, _, data = images.as_jpeg(url).partition(",")
    assert (head, data) == ("data:image/jpeg;base64", url.partition(",")[2])
