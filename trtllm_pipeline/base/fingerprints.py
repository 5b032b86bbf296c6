"""Fingerprints of stage runs, and why two of them differ.

A stage run's key is a tree of declared parts. It is written once, as canonical JSON. The fingerprint is the hash of
that text, and the explanation is a comparison of two such texts. Both use the same walk, so they cannot disagree. Parts
that JSON cannot represent raise: a part that hashed to a constant would serve stale results forever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from trtllm_pipeline.base.domain import Fingerprint, Json

SCHEMA: Final = 1
"""Part of every key. Raised when the form of keys changes, which makes all older artifacts unreachable."""


_encode: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def canonical(parts: Mapping[str, Json]) -> str:
    """The canonical text of a key: JSON with sorted keys and no white space. Raises TypeError or ValueError."""
    return _encode(parts)


def fingerprint(key: str) -> Fingerprint:
    """Hash of a canonical key: 128 bits of BLAKE2b in hexadecimal."""
    import hashlib  # it loads OpenSSL, which stage programs do not need

    return Fingerprint(hashlib.blake2b(key.encode(), digest_size=16).hexdigest())


@dataclass(frozen=True, slots=True)
class Change:
    """One differing part of a key. None on the side that lacks it."""

    path: str
    old: str | None
    new: str | None


def changes(old_key: str, new_key: str) -> tuple[Change, ...]:
    """All leaves that differ between two canonical keys, by dotted path, sorted."""
    old = dict(_leaves(json.loads(old_key), ""))
    new = dict(_leaves(json.loads(new_key), ""))
    return tuple(
        Change(path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    )


def _leaves(value: Json, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else name)
    else:
        yield path, _encode(value)
