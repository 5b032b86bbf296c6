"""Signatures: DSSE envelopes around in-toto statements, with keys that are files.

The protocol is https://github.com/secure-systems-lab/dsse, version 1. Keys are Ed25519 or ECDSA P-256 with SHA-256 and
nothing else. The key determines the algorithm, never the envelope, so an envelope cannot downgrade it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import UsageError, reading

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
    PublicKey = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_BUNDLE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_BYTES: Final = 64 << 20
"""Maximum size of an envelope: enough for a hundred thousand files."""
_MAX_SIGNATURES: Final = 64
_KINDS: Final = "an Ed25519 or ECDSA P-256 key in PEM form"
_NEW_KEY: Final = "openssl genpkey -algorithm ed25519 -out signing.pem"


def brief(value: object) -> str:
    """Return `value` as short text: the start and end of a long one."""
    shown = Repr()
    shown.maxstring = shown.maxother = 100
    return shown.repr(value)


class EnvelopeError(ValueError):
    """An invalid envelope or statement, with the reason."""


def strict_json(data: bytes) -> Any:
    """Return the value of a UTF-8 JSON text without duplicate names. Raises EnvelopeError."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise EnvelopeError(f"is not strict JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{brief(name)} is twice in one object")
        values[name] = value
    return values


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


@dataclass(frozen=True, slots=True)
class EnvelopeSignature:
    """One signature. `keyid` is set by the signer: a hint without proof."""

    keyid: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """The signed bytes of a statement, and its signatures."""

    payload: bytes
    signatures: tuple[EnvelopeSignature, ...]

    @staticmethod
    def parse(data: bytes) -> Envelope:
        """Parse one DSSE envelope of an in-toto statement with signatures. Raises EnvelopeError for anything else."""
        envelope = strict_json(data)
        if isinstance(envelope, dict) and isinstance(envelope.get("dsseEnvelope"), dict):
            envelope = envelope["dsseEnvelope"]  # a Sigstore bundle, as cosign writes it
        if not isinstance(envelope, dict) or not isinstance(envelope.get("signatures"), list):
            raise EnvelopeError("is not a DSSE envelope: it has no list of signatures")
        if envelope.get("payloadType") != PAYLOAD_TYPE:
            raise EnvelopeError(f"payloadType is {brief(envelope.get('payloadType'))}, not {PAYLOAD_TYPE!r}")
        if not 0 < len(envelope["signatures"]) <= _MAX_SIGNATURES:
            raise EnvelopeError(f"it has {len(envelope['signatures'])} signatures, expected 1 to {_MAX_SIGNATURES}")
        return Envelope(_bytes(envelope.get("payload"), "payload"), tuple(map(_signature, envelope["signatures"])))

    def text(self) -> str:
        """Return one line of JSON."""
        return _line(self._json())

    def bundles(self) -> Iterator[str]:
        """Yield the same as Sigstore bundles, one line per signature, for tools that only read these."""
        for each in self.signatures:
            alone = Envelope(self.payload, (each,))
            material = {"publicKey": {"hint": each.keyid}, "tlogEntries": []}
            yield _line({"mediaType": _BUNDLE, "verificationMaterial": material, "dsseEnvelope": alone._json()})

    def _json(self) -> dict[str, object]:
        signatures = [{"keyid": each.keyid, "sig": _base64(each.value)} for each in self.signatures]
        return {"payloadType": PAYLOAD_TYPE, "payload": _base64(self.payload), "signatures": signatures}

    @property
    def signed_bytes(self) -> bytes:
        """The bytes to sign: the pre-authentication encoding of type and payload."""
        kind = PAYLOAD_TYPE.encode()
        return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(self.payload), self.payload)


def _signature(entry: Any) -> EnvelopeSignature:
    if not isinstance(entry, dict) or not isinstance(keyid := entry.get("keyid") or "", str):
        raise EnvelopeError("a signature is not an object with keyid and sig")
    return EnvelopeSignature(keyid, _bytes(entry.get("sig"), "sig"))


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any, name: str) -> bytes:
    """Decode Base64 in either of its alphabets, as the protocol allows."""
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except (AttributeError, ValueError, binascii.Error) as error:
        raise EnvelopeError(f"{name} is not Base64") from error


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, and EnvelopeError for a link, another file type or a larger file."""
    try:
        fd = reading.open_fd(path, os.O_RDONLY | os.O_NOFOLLOW)
    except reading.NotAFileError:
        raise EnvelopeError("is not a file") from None
    except OSError:
        if path.is_symlink():
            raise EnvelopeError("is a link") from None
        raise
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > most:
            raise EnvelopeError(f"has more than {most >> 10} KiB")
        return file.read(most)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key from the file `name`."""

    name: str
    keyid: str
    key: PublicKey

    def verifies(self, signature: bytes, data: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

        try:
            if isinstance(self.key, EllipticCurvePublicKey):
                self.key.verify(signature, data, _ecdsa())
            else:
                self.key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key from a file, never shown."""

    keyid: str
    key: PrivateKey

    def __repr__(self) -> str:
        return f"SigningKey({self.keyid})"

    def sign(self, data: bytes) -> EnvelopeSignature:
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

        ecdsa = isinstance(self.key, EllipticCurvePrivateKey)
        return EnvelopeSignature(self.keyid, self.key.sign(data, _ecdsa()) if ecdsa else self.key.sign(data))  # type: ignore[call-arg]

    @property
    def public(self) -> TrustedKey:
        return TrustedKey("", self.keyid, self.key.public_key())

    @staticmethod
    def read(path: Path, passphrase: Callable[[], str]) -> SigningKey:
        """Read the key in a file that only its owner may read. `passphrase` is called for an encrypted one. Raises UsageError."""
        _need_cryptography()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                data = file.read(1 << 16)
        except OSError as error:
            raise UsageError(
                f"{path}: cannot be read: {error.strerror}", hint=f"create a key with {_NEW_KEY}"
            ) from error
        if b"PRIVATE KEY" not in data:
            raise UsageError(f"{path}: is not a private key in PEM form", hint=f"create a key with {_NEW_KEY}")
        if mode & 0o077:
            raise UsageError(
                f"{path}: others may read or change this private key (mode {stat.S_IMODE(mode):04o})",
                hint=f"chmod 600 {path}; if others may have read it, create a new one",
            )
        try:
            try:
                key = load_pem_private_key(data, None)
            except TypeError:  # encrypted
                key = load_pem_private_key(data, passphrase().encode())
        except (ValueError, UnsupportedAlgorithm):
            raise UsageError(
                f"{path}: is not {_KINDS}, or the passphrase is wrong", hint=f"create a key with {_NEW_KEY}"
            ) from None
        if not _accepted(key.public_key()):
            raise UsageError(f"{path}: is not {_KINDS}", hint=f"create a key with {_NEW_KEY}")
        return SigningKey(keyid_of(key.public_key()), key)  # type: ignore[arg-type]


def read_trusted(folder: Path) -> tuple[TrustedKey, ...]:
    """Return the public keys in the files *.pem and *.pub of a directory. Raises UsageError for an unreliable one."""
    _need_cryptography()
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in {".pem", ".pub"})
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read: {error.strerror}", hint=_TRUST) from error
    if not files:
        raise UsageError(f"{folder}: has no public keys (*.pem, *.pub)", hint=_TRUST)
    for path in (folder, *files):
        if path.stat().st_mode & 0o002:
            raise UsageError(
                f"{path}: is writable by all users, so its keys cannot be trusted", hint=f"chmod o-w {path}"
            )
    return tuple(map(_trusted, files))


_TRUST: Final = "put public keys there: openssl pkey -in signing.pem -pubout -out trusted/me.pem"


def _trusted(path: Path) -> TrustedKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        data = read_bytes(path.resolve(), 1 << 16)
        if b"PRIVATE KEY" in data:
            raise UsageError(f"{path}: is a private key", hint=f"keep it elsewhere; {_TRUST}")
        key = load_pem_public_key(data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=_TRUST) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path}: is not {_KINDS}", hint=_TRUST) from error
    if not _accepted(key):
        raise UsageError(f"{path}: is not {_KINDS}", hint=_TRUST)
    return TrustedKey(path.name, keyid_of(key), key)  # type: ignore[arg-type]


def keyid_of(key: Any) -> str:
    """Return the SHA-256 of the public key in DER: `openssl pkey -pubin -in FILE -outform DER | sha256sum`."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _accepted(key: object) -> bool:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if isinstance(key, ec.EllipticCurvePublicKey):
        return isinstance(key.curve, ec.SECP256R1)
    return isinstance(key, ed25519.Ed25519PublicKey)


def _ecdsa() -> ec.ECDSA:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    return ECDSA(SHA256())


def _need_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UsageError(
            "signatures need the package cryptography", hint="pip install 'trtllm-pipeline[sign]'"
        ) from None
