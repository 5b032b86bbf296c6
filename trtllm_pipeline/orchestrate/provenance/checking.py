"""Whether the signed statement of an artifact fits its files, who signed it, and whether a policy is met."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import StateError, UsageError, canonical, digest_file
from trtllm_pipeline.orchestrate.provenance.dsse import (
    Envelope,
    EnvelopeError,
    TrustedKey,
    brief,
    read_bytes,
    read_trusted,
    strict_json,
)
from trtllm_pipeline.orchestrate.provenance.statement import (
    BUILD_TYPE,
    PREDICATE_TYPE,
    TYPE,
    external_parameters,
    metadata,
    subjects,
)
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.manifest import ENVELOPE, Discrepancy, Kind, Manifest
from trtllm_pipeline.tensorrt import OUT

_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
"""As options read a variable that is a switch."""
_NAMED: Final = 5
"""So many files that differ are named."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is asked of signatures. Without keys none can be verified; with `required`, an unsigned artifact is refused."""

    keys: tuple[TrustedKey, ...] = ()
    required: bool = False


REQUIRE_SIGNED: Final = "PIPELINE_REQUIRE_SIGNED"
TRUSTED_KEYS: Final = "PIPELINE_TRUSTED_KEYS"


def policy(trusted_keys: Path | None = None, *, required: bool = False) -> Policy:
    """The policy that trusts the public keys in a directory. Raises UsageError, also where keys are required and none are given.

    A policy in the environment holds for every command, whether it has the options or not.
    """
    required = required or os.environ.get(REQUIRE_SIGNED, "").lower() in _TRUE
    if trusted_keys is None and os.environ.get(TRUSTED_KEYS):
        trusted_keys = Path(os.environ[TRUSTED_KEYS])
    if trusted_keys is None and required:
        raise UsageError(
            "--require-signed needs the public keys that are trusted",
            hint=f"--trusted-keys DIR, or {TRUSTED_KEYS}, names a directory of them",
        )
    return Policy(() if trusted_keys is None else read_trusted(trusted_keys), required)


@dataclass(frozen=True, slots=True)
class Signed:
    """One signature. `trusted` is the file of the trusted key that made it, else None."""

    keyid: str
    trusted: str | None


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found out about an artifact's signed statement."""

    payload: bytes | None
    """The statement as it was signed; None where nothing was, or the envelope is damaged."""
    signed: tuple[Signed, ...]
    findings: tuple[Discrepancy, ...]


def check(folder: Path, policy: Policy, *, contents: bool = True) -> tuple[Discrepancy, ...]:
    """What is wrong with the signed statement of the artifact in `directory`; empty where nothing is.

    An artifact without one is fine, unless the policy requires it. Where there is one, every file is read and compared
    with it; without `contents` the digests of the manifest are believed, for whoever has just read the files. Raises
    StateError for an artifact without a valid manifest.
    """
    return look(folder, policy, contents=contents).findings


def require(folders: Iterable[Path], policy: Policy) -> None:
    """Raise StateError, with all findings, unless `check` finds nothing in any of the artifacts."""
    found = [finding for folder in folders for finding in check(folder, policy)]
    if found:
        raise StateError(
            "\n  ".join(["the provenance is not in order:", *map(str, found)]),
            hint=f"pipeline store provenance {found[0].stage}-{found[0].fingerprint[:12]} shows what was signed, and by whom",
        )


def require_folders(outs: Iterable[Path], policy: Policy) -> None:
    """As `require`, for directories that are used: results of artifacts, or any others, which nobody can have signed.

    Raises UsageError for these where the policy requires signatures.
    """
    found = dict.fromkeys(out.absolute() for out in outs)
    artifacts = [out.parent for out in found if out.name == OUT and (out.parent / manifest.NAME).is_file()]
    others = [out for out in found if out.name != OUT or out.parent not in artifacts]
    if policy.required and others:
        raise UsageError(
            f"{others[0]}: is not an artifact of a workspace, so nobody can have signed it",
            hint=f"name a cell, or leave out --require-signed ({REQUIRE_SIGNED})",
        )
    require(artifacts, policy)


def look(folder: Path, policy: Policy, *, contents: bool = True) -> Looked:
    """As `check`, with what was found."""
    sealed = manifest.read(folder)

    def finding(path: str, message: str) -> Discrepancy:
        return Discrepancy(sealed.stage, sealed.fingerprint, Kind.PROVENANCE, path, message)

    try:
        envelope = read_envelope(folder)
        if envelope is None:
            return Looked(None, (), (finding("", "is not signed"),) if policy.required else ())
        signed = tuple(_signed(envelope, policy))
    except EnvelopeError as error:
        return Looked(None, (), (finding(ENVELOPE, str(error)),))
    found = [finding(ENVELOPE, wrong) for wrong in _wrong_signatures(envelope, signed, policy)]
    found += [finding(ENVELOPE, wrong) for wrong in mismatches(envelope.payload, sealed)]
    if contents and not found:
        found += [finding(path, wrong) for path, wrong in _changed(folder, sealed)]
    return Looked(envelope.payload, signed, tuple(found))


def read_envelope(folder: Path) -> Envelope | None:
    """The envelope of the artifact in `directory`, or None. Raises EnvelopeError for a file that is none; StateError."""
    try:
        return Envelope.parse(read_bytes(folder / ENVELOPE))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise manifest.unreadable(error, folder / ENVELOPE) from error


def _signed(envelope: Envelope, policy: Policy) -> Iterator[Signed]:
    for each in envelope.signatures:
        # The key id only narrows down which keys are tried.
        keys = [key for key in policy.keys if key.keyid == each.keyid] or policy.keys
        by = next((key for key in keys if key.verifies(each.value, envelope.signed_bytes)), None)
        yield Signed(each.keyid if by is None else by.keyid, None if by is None else by.name)


def _wrong_signatures(envelope: Envelope, signed: tuple[Signed, ...], policy: Policy) -> Iterator[str]:
    trusted = {key.keyid: key.name for key in policy.keys}
    for each, found in zip(envelope.signatures, signed, strict=True):
        if found.trusted is None and each.keyid in trusted:
            yield f"the signature of {trusted[each.keyid]} is wrong: it is not of this statement"
    if policy.required and not any(each.trusted for each in signed):
        named = ", ".join(each.keyid[:16] or "no name" for each in signed)
        yield f"no trusted key signed it; who did calls itself {named}"


def mismatches(payload: bytes, sealed: Manifest) -> Iterator[str]:
    """In which ways a statement is not one of this artifact, as its manifest describes it."""
    try:
        found = strict_json(payload)
        if not isinstance(found, dict):
            raise EnvelopeError("is not an object")
        yield from _mismatches(found, sealed)
    except EnvelopeError as error:
        yield f"the statement {error}"
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        yield f"the statement is malformed: {type(error).__name__} {brief(str(error))}"


def _mismatches(statement: dict[str, Any], sealed: Manifest) -> Iterator[str]:
    for name, expected in {"_type": TYPE, "predicateType": PREDICATE_TYPE}.items():
        if statement.get(name) != expected:
            yield f"{name} is {brief(statement.get(name))}, expected {expected!r}"
            return
    build, run = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    if build["buildType"] != BUILD_TYPE:
        yield f"buildType is {brief(build['buildType'])}, expected {BUILD_TYPE!r}"
    elif canonical(build["externalParameters"]) != canonical(external_parameters(sealed)):
        other = build["externalParameters"].get("fingerprint")
        if other != sealed.fingerprint:
            yield f"the statement is of another stage run, {brief(other)}"
            return
        yield "externalParameters are not those that it was made with"
    if canonical(run["metadata"]) != canonical(metadata(sealed)):
        yield f"the statement is of another attempt, {brief(run['metadata'].get('invocationId'))}"
    yield from _files(statement["subject"], sealed)


def _files(given: list[dict[str, Any]], sealed: Manifest) -> Iterator[str]:
    """Every file has to be a subject with its BLAKE3, and nothing else may be one."""
    expected = {str(each["name"]): each for each in subjects(sealed, {})}
    named = {str(each["name"]): each for each in given}
    if len(named) != len(given):
        yield "a subject stands twice in the statement"
    wrong = sorted(expected.keys() ^ named.keys())
    for name in expected.keys() & named.keys():
        # SHA-256 was computed when it was signed; the manifest has none.
        digest = {kind: value for kind, value in named[name]["digest"].items() if kind != "sha256"}
        if {**named[name], "digest": digest} != expected[name]:
            wrong.append(name)
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        yield f"its subjects are not this artifact's files: {', '.join(map(brief, sorted(wrong)[:_NAMED]))}{more} differ"


def _changed(folder: Path, sealed: Manifest) -> Iterator[tuple[str, str]]:
    """Files whose content is not what the manifest, and so the statement, says, and files that it does not name."""
    out = folder / OUT
    for entry in sealed.files:
        path = out / entry.path
        try:
            if entry.link is not None:
                sound = str(path.readlink()) == entry.link
            else:
                sound = not path.is_symlink() and digest_file(path) == entry.digest
        except OSError as error:
            yield f"{OUT}/{entry.path}", f"cannot be read: {error.strerror}"
            continue
        if not sound:
            yield f"{OUT}/{entry.path}", "is not what was signed"
    listed = {entry.path for entry in sealed.files}
    for path in manifest.walk(out):
        if str(path.relative_to(out)) not in listed:
            yield str(path.relative_to(folder)), "is not among the files that were signed; `store repair` removes it"
