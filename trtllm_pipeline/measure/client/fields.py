"""Typed access to JSON from servers. A value of the wrong type raises a ProtocolError that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from trtllm_pipeline.measure.client.transport import ProtocolError

_MAX_COUNT: Final = 2**31
_SHOWN: Final = 200


def parse(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `data`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ProtocolError(f"expected a JSON object, got {bytes(data[:_SHOWN])!r}")
    return value


def error_of(body: Mapping[str, Any], *, failed: bool = False) -> str | None:
    """The error that an OpenAI server reports, in its own words. None without one.

    TensorRT-LLM and vLLM send it without OpenAI's envelope. FastAPI, and therefore Triton's OpenAI front end, sends it
    as `detail`. With `failed`, `body` is known to be an error, whatever its form.
    """
    error = body.get("message") if body.get("object") == "error" else body.get("error", body.get("detail"))
    if error is None and not failed:
        return None
    error = body if error is None else error
    words = error.get("message") or error if isinstance(error, dict) else error
    return text(words, "the error") if isinstance(words, str) and words else shown(words)


def not_a_stream(data: bytes | bytearray) -> str | None:
    """The error for JSON in place of a stream of events, in the server's words if it has any. None for events."""
    if not data.lstrip().startswith(b"{"):
        return None
    try:
        body = parse(data)
    except ProtocolError as error:
        return str(error)
    return error_of(body) or f"expected a stream of events, got {shown(body)}"


def mapping(value: object, what: str) -> Mapping[str, Any]:
    """A JSON object. Empty for null."""
    if value is None:
        return {}
    return value if isinstance(value, dict) else refuse(value, what, "an object")


def items(value: object, what: str) -> list[Any]:
    """A list. Empty for null."""
    if value is None:
        return []
    return value if isinstance(value, list) else refuse(value, what, "a list")


def text(value: object, what: str) -> str:
    """A string that can be encoded as UTF-8. Empty for null."""
    if value is None:
        return ""
    if not isinstance(value, str):
        refuse(value, what, "text")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a character beyond the first 65536, as JSON may escape it
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def count(value: object, what: str) -> int | None:
    """A number of tokens. None for null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
        refuse(value, what, "a number of tokens")
    return value


def shortened(message: str, length: int = 1000) -> str:
    """A server's message, shortened for display."""
    return message if len(message) <= length else f"{message[:length]}... ({len(message)} characters)"


def shown(value: object) -> str:
    """A value as JSON, shortened for display."""
    try:
        return shortened(json.dumps(value), _SHOWN)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be shown"


def refuse(value: object, what: str, expected: str) -> NoReturn:
    """Raise the ProtocolError for a value of the wrong type."""
    raise ProtocolError(f"{what} in the server's response is {shown(value)}, expected {expected}")
