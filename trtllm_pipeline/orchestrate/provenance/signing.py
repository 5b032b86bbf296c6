"""Signs the statements of artifacts, and imports envelopes that were signed elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trtllm_pipeline.base import StateError, UsageError, canonical, digest
from trtllm_pipeline.orchestrate.provenance.checking import mismatches, read_envelope
from trtllm_pipeline.orchestrate.provenance.dsse import Envelope, EnvelopeError, SigningKey
from trtllm_pipeline.orchestrate.provenance.statement import statement_of
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.manifest import ENVELOPE, Manifest
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import OUT


def full_statement(folder: Path, *, anonymous: bool = False) -> str:
    """The statement to sign, with every file's SHA-256. Raises StateError for one that does not match the manifest."""
    return _payload(folder, _sha256(folder, manifest.read(folder)), anonymous=anonymous).decode()


def _sha256(folder: Path, sealed: Manifest) -> dict[str, str]:
    """Return SHA-256 by path. Several files are read at once, since SHA-256 of one file uses one core."""
    paths = {entry.path: folder / OUT / entry.path for entry in sealed.files if entry.link is None}
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            digests = dict(zip(paths, threads.map(digest.digests_of_file, paths.values()), strict=True))
    except OSError as error:
        raise manifest.unreadable(error, folder) from error
    for entry in sealed.files:
        path = folder / OUT / entry.path
        if path.is_symlink() != (entry.link is not None) or (
            entry.link is None and digests[entry.path][0] != entry.digest
        ):
            raise StateError(
                f"{path}: has changed since its build, so it is not signed",
                hint="pipeline store verify shows the changes",
            )
    return {name: theirs for name, (_, theirs) in digests.items()}


def sign(store: Store, folder: Path, key: SigningKey, *, anonymous: bool = False) -> bool:
    """Sign the statement of the artifact in `folder`, and write the envelope next to its manifest.

    Returns False if the key has signed it already; files are not read then. A signature is added to those of other keys if
    their statement equals ours. Raises StateError for files that have changed since the build, and UsageError for an
    envelope that does not match.
    """
    with store.attaching(folder) as write:
        before = _sound(folder)
        if before is not None and any(
            key.public.verifies(each.value, before.signed_bytes) for each in before.signatures
        ):
            return False
        sealed = manifest.read(folder)
        sha256 = _sha256(folder, sealed)
        fit = [_payload(folder, sha256, anonymous=each) for each in ((True,) if anonymous else (False, True))]
        payload = fit[0] if before is None else before.payload
        if payload not in fit:  # files cannot prove all of it, so do not sign it
            raise UsageError(f"{folder / ENVELOPE}: another statement is already signed", hint=_AGAIN)
        _keep(write, folder, before, Envelope(payload, (key.sign(Envelope(payload, ()).signed_bytes),)))
        return True


def _payload(folder: Path, sha256: Mapping[str, str], *, anonymous: bool) -> bytes:
    return canonical(statement_of(folder, sha256=sha256, anonymous=anonymous)).encode()


def attach(store: Store, folder: Path, envelope: Envelope) -> None:
    """Import an envelope that was signed elsewhere. Raises UsageError if its statement is not about this artifact."""
    with store.attaching(folder) as write:
        wrong = list(mismatches(envelope.payload, manifest.read(folder)))
        if wrong:
            raise UsageError(f"the envelope does not match {folder}: {'; '.join(wrong)}", hint=_HINT)
        _keep(write, folder, _sound(folder), envelope)


def _keep(write: Callable[[str], None], folder: Path, before: Envelope | None, envelope: Envelope) -> None:
    """Write `envelope` with other keys' signatures of the same statement."""
    if before is not None and before.payload != envelope.payload:
        raise UsageError(f"{folder / ENVELOPE}: another statement of this artifact is already signed", hint=_AGAIN)
    new = {each.keyid for each in envelope.signatures}
    others = () if before is None else tuple(each for each in before.signatures if each.keyid not in new)
    write(f"{replace(envelope, signatures=(*others, *envelope.signatures)).text()}\n")


_AGAIN = "find out who signed it, then move that file away and sign again"
_HINT = "sign the exact output of `pipeline store provenance ARTIFACT --format statement`"


def _sound(folder: Path) -> Envelope | None:
    """Return the existing envelope. Raises UsageError if it does not match: a user must look at it first."""
    try:
        envelope = read_envelope(folder)
        wrong = [] if envelope is None else list(mismatches(envelope.payload, manifest.read(folder)))
    except EnvelopeError as error:
        wrong = [str(error)]
    if wrong:
        raise UsageError(f"{folder / ENVELOPE}: {'; '.join(wrong)}", hint=_AGAIN)
    return envelope
