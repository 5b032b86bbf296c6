from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trtllm_pipeline.show.cli import output


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_POLL_S", 0.0)


def steps(*does: Callable[[], object]) -> Callable[[], bool]:
    """Does the next of `does` before each look; it continues until all are done."""

    def each() -> Iterator[bool]:
        for number, do in enumerate(does, start=1):
            do()
            yield number < len(does)

    left = each()
    return lambda: next(left)


def test_what_is_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert list(output.follow(log, lambda: False)) == []
    log.write_bytes(b"one\ntwo\r\nthree \xff")
    assert list(output.follow(log, lambda: False)) == ["one\ntwo\r\nthree \ufffd"]


def test_what_comes_also_in_a_file_that_is_begun_anew_or_moved(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def append(data: bytes, to: Path = log) -> None:
        with to.open("ab") as file:
            file.write(data)

    goes_on = steps(
        lambda: None,  # it is not there yet
        lambda: append(b"a\nb\n"),
        lambda: append(b"\xc3"),  # half of a character
        lambda: append(b"\xa9 c\n"),
        lambda: log.write_bytes(b"new\n"),
        lambda: (log.replace(tmp_path / "log.1"), append(b"next\n and more\n")),
        lambda: (append(b"last, "), log.replace(tmp_path / "log.2")),
        lambda: append(b"moved", tmp_path / "log.2"),
    )
    found = list(output.follow(log, goes_on))
    assert found == ["a\nb\n", "é c\n", "new\n", "next\n and more\n", "last, ", "moved"]
