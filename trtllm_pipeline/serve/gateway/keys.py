"""API keys: a file with one key per line. They are compared in constant time and never shown."""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import PipelineError, UsageError, user_files

_SHORTEST: Final = 8
_LOG: Final = logging.getLogger(__name__)


def read_keys(path: Path) -> list[str]:
    """The keys in a file, without empty lines and lines that start with #. Raises MatrixError or UsageError."""
    hint = "write one on each line: openssl rand -hex 24"
    lines = [line.strip() for line in user_files.read_text(path, limit=1 << 20).splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{path} has no key", hint=hint)
    if any(len(key) < _SHORTEST for key in keys):
        raise UsageError(f"{path} has a key of fewer than {_SHORTEST} characters", hint=hint)
    return keys


class Keys:
    """The accepted keys. Only their digests are kept."""

    def __init__(self, path: Path) -> None:
        """Read a file. Raises MatrixError or UsageError."""
        self._path = path
        self._version = _version(path)
        self._digests = self._read()

    def refresh(self) -> None:
        """Read the file again if it has changed. If it is invalid, the keys stay, and the error is logged."""
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = self._read()
        except PipelineError as error:
            _LOG.error("the API keys stay as they were: %s", error.message)

    def _read(self) -> list[bytes]:
        return [_digest(key.encode()) for key in read_keys(self._path)]

    def accept(self, authorization: bytes) -> bool:
        """True if a header field `Authorization: Bearer KEY` has one of the keys."""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # All are compared, each in constant time, so the time reveals nothing about any key.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _version(path: Path) -> tuple[int, ...] | None:
    """Changes with the file. None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
