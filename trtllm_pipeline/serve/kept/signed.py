"""Whether what a managed server is started from is signed as was asked."""

from __future__ import annotations

import threading
from pathlib import Path

from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.serve.kept.servers import KeptRecord


def check(record: KeptRecord) -> None:
    """Raise StateError or UsageError unless it is; every file of an artifact that was signed is read."""
    keys = None if record.trusted_keys is None else Path(record.trusted_keys)
    provenance.require_folders(map(Path, record.served_from), provenance.policy(keys, required=record.require_signed))


class SignedCheck(threading.Thread):
    """`check` in a thread: it reads whole engines, and whoever waits for it must hear that it shall end."""

    def __init__(self, record: KeptRecord) -> None:
        super().__init__(daemon=True, name="signatures")
        self._record = record
        self.error: Exception | None = None
        """What it raised, once it has ended."""
        self.start()

    def run(self) -> None:
        """Check."""
        try:
            check(self._record)
        except Exception as error:  # noqa: BLE001  raised by whoever waits
            self.error = error
