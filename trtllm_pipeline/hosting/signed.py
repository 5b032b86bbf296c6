"""Whether what a kept server is started from is signed as was asked."""

from __future__ import annotations

from pathlib import Path

from trtllm_pipeline import provenance
from trtllm_pipeline.hosting.servers import KeptRecord


def check(record: KeptRecord) -> None:
    """Raise StateError or UsageError unless it is; every file of an artifact that was signed is read."""
    keys = None if record.trusted_keys is None else Path(record.trusted_keys)
    provenance.require_folders(map(Path, record.served_from), provenance.policy(keys, required=record.require_signed))
