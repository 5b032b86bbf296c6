"""Checks the signatures of a managed server's inputs against its policy."""

from __future__ import annotations

import threading
from pathlib import Path

from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.serve.kept.servers import KeptRecord


def check(record: KeptRecord) -> None:
    """Raise StateError or UsageError unless its inputs satisfy the policy. Every file of a signed artifact is read."""
    keys = None if record.trusted_keys is None else Path(record.trusted_keys)
    provenance.require_folders(map(Path, record.served_from), provenance.policy(keys, required=record.require_signed))


class SignedCheck(threading.Thread):
    """`check` in a thread: it reads whole engines, and the waiting keeper must still receive stop requests."""

    def __init__(self, record: KeptRecord) -> None:
        super().__init__(daemon=True, name="signatures")
        self._record = record
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            check(self._record)
        except Exception as error:  # noqa: BLE001  raised by the waiting thread
            self.error = error
