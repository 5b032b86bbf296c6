"""Checks the signed statement of an artifact: its files, its signers and the policy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import StateError, UsageError, canonical
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
"""Values that turn on a switch in an environment variable."""
_NAMED: Final = 5
"""Maximum number of differing files to name."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Requirements for signatures. Without keys none can be verified; with `required`, an unsigned artifact is refused."""

    keys: tuple[TrustedKey, ...] = ()
    required: bool = False


REQUIRE_SIGNED: Final = "PIPELINE_REQUIRE_SIGNED"
TRUSTED_KEYS: Final = "PIPELINE_TRUSTED_KEYS"


def policy(trusted_keys: Path | None = None, *, required: bool = False) -> Policy:
    """Return the policy that trusts the public keys in a directory. Raises UsageError, including for missing but
    required keys.

    A policy in the environment applies to every command, even without these options.
    """
    required = required or os.environ.get(REQUIRE_SIGNED, "").lower() in _TRUE
    if trusted_keys is None and os.environ.get(TRUSTED_KEYS):
        trusted_keys = Path(os.environ[TRUSTED_KEYS])
    if trusted_keys is None and required:
        raise UsageError(
            "--require-signed needs the trusted public keys",
            hint=f"give a directory of them with --trusted-keys DIR or {TRUSTED_KEYS}",
        )
    return Policy(() if trusted_keys is None else read_trusted(trusted_keys), required)


@dataclass(frozen=True, slots=True)
class Signed:
    """One signature. `trusted` is the file of its trusted key, else None."""

    keyid: str
    trusted: str | None


@dataclass(frozen=True, slots=True)
class Looked:
    """The findings about an artifact's signed statement."""

    payload: bytes | None
    """The signed statement. None if there is none, or if the envelope is damaged."""
    signed: tuple[Signed, ...]
    findings: tuple[Discrepancy, ...]


def check(folder: Path, policy: Policy, *, contents: bool = True) -> tuple[Discrepancy, ...]:
    """Return the discrepancies of the signed statement of the artifact in `folder`.

    A missing statement is valid unless the policy requires one. Otherwise every file is read and compared with it. Without
    `contents` the digests of the manifest are trusted, for callers that have just read the files. Raises StateError for an
    artifact without a valid manifest.
    """
    return look(folder, policy, contents=contents).findings


def require(folders: Iterable[Path], policy: Policy) -> None:
    """Raise StateError with all findings of `check` for these artifacts, if there are any."""
    findings = [finding for folder in folders for finding in check(folder, policy)]
    if findings:
        raise StateError(
            "\n  ".join(["the provenance is not valid:", *map(str, findings)]),
            hint=f"pipeline store provenance {findings[0].stage}-{findings[0].fingerprint[:12]} shows the statement and its signers",
        )


def require_folders(outs: Iterable[Path], policy: Policy) -> None:
    """Like `require`, for input directories: results of artifacts, or others, which cannot be signed.

    Raises UsageError for others if the policy requires signatures.
    """
    folders = dict.fromkeys(out.absolute() for out in outs)
    artifacts = [out.parent for out in folders if out.name == OUT and (out.parent / manifest.NAME).is_file()]
    others = [out for out in folders if out.name != OUT or out.parent not in artifacts]
    if policy.required and others:
        raise UsageError(
            f"{others[0]}: is not an artifact of a workspace, so it cannot be signed",
            hint=f"name a cell, or leave out --require-signed ({REQUIRE_SIGNED})",
        )
    require(artifacts, policy)


def look(folder: Path, policy: Policy, *, contents: bool = True) -> Looked:
    """Return the findings of `check` with the statement and its signatures."""
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
    findings = [finding(ENVELOPE, wrong) for wrong in _wrong_signatures(envelope, signed, policy)]
    findings += [finding(ENVELOPE, wrong) for wrong in mismatches(envelope.payload, sealed)]
    if contents and not findings:
        findings += [finding(path, wrong) for path, wrong in _changed(folder)]
    return Looked(envelope.payload, signed, tuple(findings))


def read_envelope(folder: Path) -> Envelope | None:
    """Return the envelope of the artifact in `folder`, or None. Raises StateError, and EnvelopeError for an invalid file."""
    try:
        return Envelope.parse(read_bytes(folder / ENVELOPE))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise manifest.unreadable(error, folder / ENVELOPE) from error


def _signed(envelope: Envelope, policy: Policy) -> Iterator[Signed]:
    for each in envelope.signatures:
        # The key id only narrows down the keys to try.
        keys = [key for key in policy.keys if key.keyid == each.keyid] or policy.keys
        by = next((key for key in keys if key.verifies(each.value, envelope.signed_bytes)), None)
        yield Signed(each.keyid if by is None else by.keyid, None if by is None else by.name)


def _wrong_signatures(envelope: Envelope, signed: tuple[Signed, ...], policy: Policy) -> Iterator[str]:
    trusted = {key.keyid: key.name for key in policy.keys}
    for each, signature in zip(envelope.signatures, signed, strict=True):
        if signature.trusted is None and each.keyid in trusted:
            yield f"the signature of {trusted[each.keyid]} is wrong: it does not match this statement"
    if policy.required and not any(each.trusted for each in signed):
        named = ", ".join(each.keyid[:16] or "no name" for each in signed)
        yield f"no trusted key signed it; its signer's key id is {named}"


def mismatches(payload: bytes, sealed: Manifest) -> Iterator[str]:
    """Yield the differences between a statement and this artifact's manifest."""
    try:
        statement = strict_json(payload)
        if not isinstance(statement, dict):
            raise EnvelopeError("is not an object")
        yield from _mismatches(statement, sealed)
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
            yield f"the statement is about another stage run, {brief(other)}"
            return
        yield "externalParameters are not those of its build"
    if canonical(run["metadata"]) != canonical(metadata(sealed)):
        yield f"the statement is about another attempt, {brief(run['metadata'].get('invocationId'))}"
    yield from _files(statement["subject"], sealed)


def _files(given: list[dict[str, Any]], sealed: Manifest) -> Iterator[str]:
    """Every file must be a subject with its BLAKE3, and there may be no other subjects."""
    expected = {str(each["name"]): each for each in subjects(sealed, {})}
    named = {str(each["name"]): each for each in given}
    if len(named) != len(given):
        yield "a subject is twice in the statement"
    wrong = sorted(expected.keys() ^ named.keys())
    for name in expected.keys() & named.keys():
        # SHA-256 was computed for the signature. The manifest has none.
        digest = {kind: value for kind, value in named[name]["digest"].items() if kind != "sha256"}
        if {**named[name], "digest": digest} != expected[name]:
            wrong.append(name)
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        yield f"its subjects are not this artifact's files: {', '.join(map(brief, sorted(wrong)[:_NAMED]))}{more} differ"


def _changed(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield files whose content differs from the manifest, and so from the statement, and files that are not in it."""
    for each in manifest.inspect(folder, contents=True):
        if each.kind is Kind.DAMAGED:
            yield each.path, f"differs from the signed file: {each.message}"
        elif each.kind in {Kind.DERIVED, Kind.UNLISTED} and each.path.startswith(f"{OUT}/"):
            yield each.path, "is not among the files that were signed; `store repair` removes it"
