"""Reads files from users. The result is data, or a MatrixError with file and line.

Reading cannot hang, because only regular files are opened, and no content can raise any other exception.
"""

from __future__ import annotations

import codecs
import difflib
import errno
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from trtllm_pipeline.base.domain import Json
from trtllm_pipeline.base.errors import ROWS_SHOWN, Fault, MatrixError
from trtllm_pipeline.base.files.reading import KINDS, open_file

T = TypeVar("T")
_FIRST_BYTES: Final = 1 << 20
"""How much of a file of lines a plan reads."""
MAX_DEPTH: Final = 100
"""Depth limit of a JSON value. Python's own limit depends on its version and on the caller's stack depth."""
_BRACKET_RUN: Final = re.compile(rf"(?:[\[{{]\s*){{{MAX_DEPTH + 1}}}")
"""More than MAX_DEPTH levels opened in a row."""
_WORDS: Final = {
    errno.ELOOP: "is a link that leads back to itself",
    errno.ENAMETOOLONG: "the name is too long for the file system",
}


def fail(name: str, line: int | None, message: str, *, hint: str | None = None) -> NoReturn:
    """Raise MatrixError with this fault."""
    raise MatrixError((Fault(name, line, "", message),), hint=hint)


def check(path: Path, *, hint: str | None = None) -> None:
    """Raise MatrixError unless `path` is a regular file."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        fail(os.fspath(path), None, _why(path, error), hint=hint)
    if not stat.S_ISREG(mode):
        fail(os.fspath(path), None, f"is {KINDS.get(stat.S_IFMT(mode), 'not a file')}, expected a file", hint=hint)


def _why(path: Path, error: OSError | ValueError) -> str:
    """The reason why a file cannot be read. A ValueError means a NUL in the name."""
    if not isinstance(error, OSError):
        return f"cannot be read: {error}"
    if error.errno not in {errno.ENOENT, errno.ENOTDIR}:
        return _WORDS.get(error.errno or 0) or f"cannot be read: {error.strerror or error}"
    if path.is_symlink():
        return f"is a link to {path.readlink()}, which is not there"
    try:
        names = {entry.stem: entry.name for entry in path.parent.iterdir() if not entry.is_dir()}
    except OSError:
        names = {}
    close = difflib.get_close_matches(path.stem, names, n=1, cutoff=0.6)
    near = f"; did you mean {os.fspath(path.parent / names[close[0]])!r}?" if close else ""
    return f"there is no such file{near}"


def read_text(path: Path, *, limit: int | None = None) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises MatrixError, including for more than `limit` bytes."""
    content = _read(path, -1 if limit is None else limit + 1)
    if limit is not None and len(content) > limit:
        fail(os.fspath(path), None, f"is larger than {limit // 1024**2} MiB")
    return _text(path, content)


def _first_lines(path: Path) -> str | None:
    """The complete lines in the first _FIRST_BYTES of a file of lines. Raises MatrixError.

    None for a larger file that is one JSON array, or whose first line is longer.
    """
    content = _read(path, _FIRST_BYTES + 1)
    if len(content) > _FIRST_BYTES:
        content = content[: content.rfind(b"\n", 0, _FIRST_BYTES) + 1]
        if not content.strip() or content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return None
    return _text(path, content)


def _read(path: Path, most: int) -> bytes:
    check(path)
    try:
        with open_file(path) as file:
            return file.read(most)
    except OSError as error:
        fail(os.fspath(path), None, _why(path, error))


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(os.fspath(path), content.count(b"\n", 0, error.start) + 1, "is not UTF-8 text; save it as UTF-8")


class JsonError(ValueError):
    """The fault of a JSON text, with its line if it is known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def decode(text: str | bytes, *, unique: bool = False) -> Json:
    """The value of a JSON text. Raises JsonError for any fault; with `unique`, including a duplicate key."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value: Json = json.loads(text, object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError as error:
        # Python 3.13 recurses deeper than others, and so may reach another fault first.
        if _BRACKET_RUN.search(error.doc, 0, error.pos):
            raise JsonError(f"nested deeper than {MAX_DEPTH} levels") from None
        raise JsonError(f"not JSON: {error.msg} at column {error.colno}", error.lineno) from None
    except RecursionError:
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError:
        raise JsonError("not UTF-8 text") from None
    except JsonError:
        raise
    except ValueError:  # Python does not read integers with more than 4300 digits
        raise JsonError("a number has more than 4300 digits") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels")
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise JsonError("an unpaired surrogate (\\ud800 to \\udfff) is not a character") from None
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise JsonError("a name occurs twice")
    return result


def decode_mapping(text: str | bytes) -> dict[str, Any]:
    """The object in a JSON text. Raises JsonError."""
    value = decode(text)
    if not isinstance(value, dict):
        raise JsonError("not a JSON object")
    return value


def decode_yaml(text: str | bytes) -> Any:
    """The value of a YAML text, as other programs read it. Raises JsonError for any fault."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "not UTF-8 text"
        raise JsonError(f"not YAML: {problem}", mark.line + 1 if mark else None) from None
    except RecursionError:
        raise JsonError(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # an invalid date or number
        raise JsonError(f"not YAML: {error}") from None


def _deeper(value: Json, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def read_json(path: Path, decode: Callable[[str], Any] = decode) -> Any:
    """The value of a JSON file, or the result of `decode`. Raises MatrixError with the line."""
    text = read_text(path)
    try:
        return decode(text)
    except JsonError as error:
        fail(os.fspath(path), error.line, str(error))


def read_mapping(path: Path, decode: Callable[[str], Any] = decode) -> dict[str, Any]:
    """The object in a JSON file, or the result of `decode`. Raises MatrixError with the line."""
    value = read_json(path, decode)
    if not isinstance(value, dict):
        fail(os.fspath(path), None, "expected a mapping of keys to values")
    return value


def read_json_lines(
    path: Path, parse: Callable[[Json, int], T], *, nothing: str, hint: str | None = None, first: bool = False
) -> list[T]:
    """The results of `parse` for the value and number of each nonblank line, or of each element of one JSON array.

    With `first`, only the lines in the first MiB are read: a plan does not read all of a large file. Raises MatrixError
    with every line that is not JSON or for which `parse` raises RowError or ValueError, and with `nothing` for an empty
    file.
    """
    results: list[T] = []
    faults: list[Fault] = []
    text = _first_lines(path) if first else read_text(path)
    if text is None:
        return []
    array = json_array(text)
    for number, row in enumerate(text.split("\n") if array is None else array, 1):
        if array is None and not row.strip():
            continue
        try:
            results.append(parse(decode(row) if array is None else row, number))
        except RowError as error:
            faults.append(fault_of_row(path, number, error.key, error.message, by_line=array is None))
        except ValueError as error:
            faults.append(fault_of_row(path, number, "", str(error), by_line=array is None))
    if not results and not faults:
        faults.append(Fault(os.fspath(path), None, "", nothing))
    if faults:
        raise MatrixError(tuple(faults), hint=hint, most=ROWS_SHOWN)
    return results


def fault_of_row(path: Path, number: int, key: str, message: str, *, by_line: bool) -> Fault:
    """A fault of a line, or of an element of an array or a table, which may all be in one line."""
    if by_line:
        return Fault(os.fspath(path), number, key, message)
    return Fault(os.fspath(path), None, f"row {number}: {key}" if key else f"row {number}", message)


def is_array(path: Path) -> bool:
    """True if a file of rows is one JSON array, not one row in each line."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(4096).lstrip().startswith("[")


def json_array(text: str) -> list[Any] | None:
    """The elements of a text that is one JSON array. None for other text, such as JSON Lines."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = decode(text)
    except JsonError:
        return None
    return value if isinstance(value, list) else None


class RowError(ValueError):
    """The fault of one key in a row."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message
