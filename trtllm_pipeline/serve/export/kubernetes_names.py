"""Converts names of cells and models to valid Kubernetes names and labels."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from trtllm_pipeline.base import UsageError

LONGEST: Final = 40
"""Length limit of a composed name: derived names (of pods and their hosts) must stay below 63."""
_DNS_SUBDOMAIN: Final = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
)
_DNS_LABEL: Final = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
_LABEL_VALUE: Final = 63


def dns_label(text: str) -> str:
    """`text` as a DNS label (RFC 1035): lower-case letters, digits and dashes, starting with a letter, at most 40.

    A shortened name ends with six digits of its digest, so that different texts stay different.
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not label or not label[0].isalpha():
        label = f"m-{label}".rstrip("-")
    if len(label) <= LONGEST:
        return label
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return f"{label[: LONGEST - 7].rstrip('-')}-{digest}"


def checked_name(option: str, name: str) -> str:
    """`name`, if it is valid for Kubernetes objects. Raises UsageError."""
    if len(name) > LONGEST or not _DNS_LABEL.fullmatch(name):
        raise UsageError(
            f"{option} {name!r}: expected at most {LONGEST} lower-case letters, digits and dashes, a letter first",
            hint=f"{option} {dns_label(name)}",
        )
    return name


def checked_storage_class(name: str) -> str:
    """`name`, if it is valid for a storage class. Raises UsageError."""
    if not _DNS_SUBDOMAIN.fullmatch(name):
        raise UsageError(
            f"--storage-class {name!r}: expected lower-case letters, digits, dashes and dots",
            hint="kubectl get storageclass lists those of the cluster",
        )
    return name


def label_value(text: str) -> str:
    """`text` as the value of a label: letters, digits, `-`, `_` and `.`, at most 63. Empty if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_LABEL_VALUE].strip("-_.")
