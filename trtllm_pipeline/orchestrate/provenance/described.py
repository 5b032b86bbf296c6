"""The provenance of an artifact as text and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import Json, UsageError
from trtllm_pipeline.orchestrate.provenance.checking import Looked, Policy, look, read_envelope
from trtllm_pipeline.orchestrate.provenance.dsse import Envelope, EnvelopeError, read_bytes
from trtllm_pipeline.orchestrate.provenance.signing import full_statement
from trtllm_pipeline.orchestrate.provenance.statement import ALL_FILES, statement_of
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Described:
    """An artifact, its statement from the manifest and the job, and the findings about its signatures."""

    folder: Path
    sealed: Manifest
    statement: dict[str, Any]
    looked: Looked

    @staticmethod
    def of(folder: Path, policy: Policy, *, anonymous: bool = False) -> Described:
        """Describe an artifact. Reads the files of a signed one. Raises StateError."""
        statement = statement_of(folder, anonymous=anonymous)
        return Described(folder, manifest.read(folder), statement, look(folder, policy))

    @property
    def _shown(self) -> dict[str, Any]:
        """Return the statement as signed by a trusted key. Other signatures are ignored."""
        trusted = any(each.trusted for each in self.looked.signed) and not self.looked.findings
        return dict(json.loads(self.looked.payload or b"")) if trusted else self.statement

    def to_json(self) -> dict[str, Json]:
        """Return the output of `pipeline store provenance --format json`."""
        return {
            "stage": self.sealed.stage,
            "fingerprint": self.sealed.fingerprint,
            "folder": str(self.folder),
            "signed": [asdict(each) for each in self.looked.signed],
            "findings": [asdict(each) for each in self.looked.findings],
            "statement": self._shown,
        }

    def text(self) -> str:
        """Return readable lines."""
        rows = [f"  {name:<10} {value}" for name, value in self._rows() if value]
        return "\n".join([f"{self.sealed.stage} {self.sealed.fingerprint}  {self.sealed.label}", *rows])

    def _rows(self) -> list[tuple[str, str]]:
        build, run = self.statement["predicate"]["buildDefinition"], self.statement["predicate"]["runDetails"]
        parameters, when = build["internalParameters"], run["metadata"]
        system = parameters.get("system", {})
        who = parameters.get("made_by", {})
        signed = [
            f"{each.trusted} ({each.keyid[:16]})"
            if each.trusted
            else f"{each.keyid[:16] or 'unknown key'}, not trusted"
            for each in self.looked.signed
        ]
        return [
            ("signed by", "; ".join(signed) or "no key"),
            ("made", f"{when['startedOn']} to {when['finishedOn']}, as {when['invocationId']}"),
            ("made by", " on ".join(str(who[name]) for name in ("user", "host") if name in who) or "not recorded"),
            ("made with", ", ".join(f"{name} {version}" for name, version in run["builder"]["version"].items())),
            ("machine", ", ".join([str(system.get("cpu") or "unknown CPU"), *map(str, system.get("gpus") or [])])),
            *(("from", _resource(each)) for each in build["resolvedDependencies"]),
            *(("command", " ".join(command)) for command in parameters.get("commands") or [["not recorded"]]),
            *(("file", _resource(each)) for each in self.statement["subject"] if each["name"] != ALL_FILES),
        ]


def _resource(each: dict[str, Any]) -> str:
    digests = " ".join(f"{name}:{value}" for name, value in each.get("digest", {}).items())
    link = each.get("annotations", {}).get("link")
    return "  ".join(filter(None, [each["name"], each.get("uri"), f"-> {link}" if link else None, digests]))


def statement_line(folder: Path, *, anonymous: bool = False) -> str:
    """Return the statement on one line: the signed one, or one to sign, for which every file is read for its SHA-256."""
    envelope = _envelope(folder)
    return full_statement(folder, anonymous=anonymous) if envelope is None else envelope.payload.decode()


def envelope_of(folder: Path) -> Envelope:
    """Return the signed statement. Raises UsageError if there is none."""
    envelope = _envelope(folder)
    if envelope is None:
        raise UsageError(f"{folder}: is not signed", hint="pipeline store provenance --sign KEY")
    return envelope


def _envelope(folder: Path) -> Envelope | None:
    try:
        return read_envelope(folder)
    except EnvelopeError as error:
        raise UsageError(
            f"{folder}: the envelope {error}", hint="find out who changed it, then remove it and sign again"
        ) from error


def read_file(path: Path) -> Envelope:
    """Read an envelope that was signed elsewhere. Raises UsageError."""
    try:
        return Envelope.parse(read_bytes(path))
    except EnvelopeError as error:
        raise UsageError(f"{path}: {error}", hint="expected a DSSE envelope, or a Sigstore bundle with one") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
