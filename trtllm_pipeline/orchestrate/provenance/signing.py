"""Signs the statements of artifacts, and takes over envelopes that were signed elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trtllm_pipeline.base import StateError, UsageError, canonical, digests_of_file
from trtllm_pipeline.orchestrate.provenance.checking import mismatches, read_envelope
from trtllm_pipeline.orchestrate.provenance.dsse import Envelope, EnvelopeError, SigningKey
from trtllm_pipeline.orchestrate.provenance.statement import statement_of
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.manifest import ENVELOPE, Manifest
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import OUT


def full_statement(folder: Path, *, anonymous: bool = False) -> str:
    """The statement as it is signed, with the SHA-256 of every file. Every file is read once, and has to be what was made.

    Raises StateError.
    """
    return _payload(folder, _sha256(folder, manifest.read(folder)), anonymous=anonymous).decode()


def _sha256(folder: Path, sealed: Manifest) -> dict[str, str]:
    """SHA-256 by path. SHA-256 of one file takes one core, so that several files are read at once."""
    paths = {entry.path: folder / OUT / entry.path for entry in sealed.files if entry.link is None}
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = dict(zip(paths, threads.map(digests_of_file, paths.values()), strict=True))
    except OSError as error:
        raise manifest.unreadable(error, folder) from error
    for entry in sealed.files:
        path = folder / OUT / entry.path
        if path.is_symlink() != (entry.link is not None) or (
            entry.link is None and found[entry.path][0] != entry.digest
        ):
            raise StateError(
                f"{path}: is not what was made, and is not signed", hint="pipeline store verify says what changed"
            )
    return {name: theirs for name, (_, theirs) in found.items()}


def sign(store: Store, folder: Path, key: SigningKey, *, anonymous: bool = False) -> bool:
    """Sign the statement of the artifact in `directory`, and keep the envelope beside its manifest.

    Returns whether there was anything to sign: what the key has signed already is left as it is, and not read. What
    somebody else has signed is signed as well, if it is the very statement that would be made here. Raises StateError for
    files that are not what was made, and UsageError for an envelope that does not fit.
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
        if payload not in fit:  # it may lie in what no file tells, and one's own name would stand below that
            raise UsageError(f"{folder / ENVELOPE}: somebody has signed another statement", hint=_AGAIN)
        _keep(write, folder, before, Envelope(payload, (key.sign(Envelope(payload, ()).signed_bytes),)))
        return True


def _payload(folder: Path, sha256: Mapping[str, str], *, anonymous: bool) -> bytes:
    return canonical(statement_of(folder, sha256=sha256, anonymous=anonymous)).encode()


def attach(store: Store, folder: Path, envelope: Envelope) -> None:
    """Keep an envelope that was signed elsewhere. Raises UsageError where its statement is not of this artifact."""
    with store.attaching(folder) as write:
        wrong = list(mismatches(envelope.payload, manifest.read(folder)))
        if wrong:
            raise UsageError(f"the envelope does not fit {folder}: {'; '.join(wrong)}", hint=_HINT)
        _keep(write, folder, _sound(folder), envelope)


def _keep(write: Callable[[str], None], folder: Path, before: Envelope | None, envelope: Envelope) -> None:
    """Write `envelope`, with the signatures that other keys have made of the same statement."""
    if before is not None and before.payload != envelope.payload:
        raise UsageError(f"{folder / ENVELOPE}: somebody has signed another statement of this artifact", hint=_AGAIN)
    new = {each.keyid for each in envelope.signatures}
    others = () if before is None else tuple(each for each in before.signatures if each.keyid not in new)
    write(f"{replace(envelope, signatures=(*others, *envelope.signatures)).text()}\n")


_AGAIN = "find out who did; with that file moved away, sign again"
_HINT = "sign what `pipeline store provenance ARTIFACT --format statement` prints, byte for byte"


def _sound(folder: Path) -> Envelope | None:
    """The envelope that is there. Raises UsageError for one that does not fit: somebody should look at it first."""
    try:
        found = read_envelope(folder)
        wrong = [] if found is None else list(mismatches(found.payload, manifest.read(folder)))
    except EnvelopeError as error:
        wrong = [str(error)]
    if wrong:
        raise UsageError(f"{folder / ENVELOPE}: {'; '.join(wrong)}", hint=_AGAIN)
    return found
