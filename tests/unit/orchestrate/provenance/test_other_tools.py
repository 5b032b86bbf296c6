"""Other people's implementations read what is signed here, and what they sign is read here."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from securesystemslib.dsse import Envelope as TheirEnvelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import CryptoSigner, SSlibKey

from tests.helpers.signed import publish, read_key, write_key
from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.orchestrate.store.manifest import ENVELOPE
from trtllm_pipeline.orchestrate.store.store import Store

KINDS = {"ed25519": ed25519.Ed25519PrivateKey.generate, "p256": lambda: ec.generate_private_key(ec.SECP256R1())}


@pytest.mark.parametrize("kind", KINDS)
def test_securesystemslib_verifies_what_is_signed_here(store: Store, tmp_path: Path, kind: str) -> None:
    key = read_key(write_key(tmp_path, "me", KINDS[kind]()))
    artifact = publish(store)
    provenance.sign(store, artifact.folder, key)
    public = load_pem_public_key((tmp_path / "trusted/me.pem").read_bytes())
    theirs = SSlibKey.from_crypto(public, keyid=key.keyid)
    envelope = TheirEnvelope.from_dict(json.loads((artifact.folder / ENVELOPE).read_text()))
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert list(envelope.verify([theirs], 1)) == [key.keyid]
    envelope.payload = envelope.payload.replace(b"config.json", b"config.jsom")
    with pytest.raises(VerificationError):
        envelope.verify([theirs], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_securesystemslib_signed_is_verified_here(store: Store, tmp_path: Path, kind: str) -> None:
    private = KINDS[kind]()
    write_key(tmp_path, "me", private)
    artifact = publish(store)
    payload = provenance.statement_line(artifact.folder).encode()
    envelope = TheirEnvelope(payload, "application/vnd.in-toto+json", {})
    envelope.sign(CryptoSigner(private))
    file = tmp_path / "signed.json"
    file.write_text(json.dumps(envelope.to_dict()))
    provenance.attach(store, artifact.folder, provenance.read_file(file))
    policy = provenance.policy(tmp_path / "trusted", required=True)
    assert provenance.check(artifact.folder, policy) == ()


def test_in_toto_s_own_schema_accepts_statement_and_predicate(store: Store, tmp_path: Path) -> None:
    about = {"inputs": {"checkpoint": "d" * 64}, "made_by": {"user": "ann"}}
    found: Any = json.loads(provenance.statement_line(publish(store, **about).folder))
    statement = Statement.copy_from_pb(json_format.ParseDict(found, statement_pb2.Statement()))
    statement.validate()
    # Unknown fields are errors to this parser.
    predicate = json_format.ParseDict(found["predicate"], provenance_pb2.Provenance())
    assert predicate.build_definition.build_type == "trtllm-pipeline:stage-run/v1"
    assert predicate.run_details.metadata.finished_on.ToSeconds() == 10**9
    for each in (*predicate.build_definition.resolved_dependencies, *predicate.run_details.byproducts):
        ResourceDescriptor.copy_from_pb(each).validate()
    digests = {each.name: dict(each.digest) for each in statement.pb.subject}
    assert digests["deep/weights"]["sha256"] == hashlib.sha256(b"a").hexdigest()


@pytest.mark.programs("openssl")
def test_openssl_makes_keys_and_verifies_as_the_page_says(store: Store, tmp_path: Path) -> None:
    """The lines of docs/reference/provenance.md, with nothing of this project."""

    def shell(line: str) -> str:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    shell("openssl genpkey -algorithm ed25519 -out signing.pem; mkdir trusted")
    shell("openssl pkey -in signing.pem -pubout -out trusted/me.pem")
    key = read_key(tmp_path / "signing.pem")
    assert shell("openssl pkey -pubin -in trusted/me.pem -outform DER | sha256sum").split()[0] == key.keyid
    artifact = publish(store)
    provenance.sign(store, artifact.folder, key)
    page = (Path(__file__).parents[4] / "docs/reference/provenance.md").read_text()
    lines = page.split("```text\n")[1].split("```")[0]
    shutil.copy(artifact.folder / ENVELOPE, tmp_path)
    shutil.copytree(artifact.out, tmp_path / "out")
    assert "Signature Verified Successfully" in shell(lines)
    (tmp_path / "out/config.json").chmod(0o644)
    (tmp_path / "out/config.json").write_text("[]")
    with pytest.raises(subprocess.CalledProcessError):
        shell(lines)
