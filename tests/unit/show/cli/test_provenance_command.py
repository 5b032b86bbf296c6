"""`pipeline store provenance`, `store verify` and `serve start` about signatures, as people type them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.signed import publish, write_key
from tests.unit.conftest import Pipeline
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.manifest import ENVELOPE
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli import serve, stage_options


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_WORKSPACE", "w")
    for name in ("REQUIRE_SIGNED", "TRUSTED_KEYS", "SIGNING_PASSPHRASE"):
        monkeypatch.delenv(f"PIPELINE_{name}", raising=False)
    write_key(tmp_path, "me")
    return tmp_path


@pytest.fixture
def artifacts(desk: Path) -> tuple[Artifact, Artifact]:
    store = Store(desk / "w")
    made = publish(store, made_by={"user": "ann", "host": "h1"}), publish(store, "b")
    store.close()
    return made


def test_sign_show_and_check(
    artifacts: tuple[Artifact, Artifact], pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = artifacts[0]
    code, out, _ = pipeline("store", "provenance")
    assert code == 0
    assert out.count("signed by  no key") == 2
    assert "made by    ann on h1" in out
    code, out, err = pipeline("store", "provenance", f"build-{one.fingerprint[:12]}", "--sign", "me.key")
    assert code == 0
    assert "signed by  me.key (" in out
    assert "signed 1 statement with key" in err
    assert pipeline("store", "verify")[0] == 0
    monkeypatch.setenv("PIPELINE_REQUIRE_SIGNED", "1")
    code, _, err = pipeline("store", "verify")
    assert (code, "needs the trusted public keys" in err) == (2, True)
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", "trusted")
    code, out, err = pipeline("store", "verify", "--format", "json")
    assert code == 1
    (finding,) = json.loads(out)["findings"]
    assert finding["kind"] == "provenance"
    assert finding["fingerprint"] == artifacts[1].fingerprint
    assert "is not signed; left as it is" in err
    assert pipeline("store", "provenance", "build", "--sign", "me.key")[0] == 0
    assert pipeline("store", "verify")[0] == 0


def test_formats(artifacts: tuple[Artifact, Artifact], pipeline: Pipeline) -> None:
    name = artifacts[0].fingerprint[:8]
    code, out, _ = pipeline("store", "provenance", name, "--format", "statement", "--anonymous")
    assert code == 0
    statement = json.loads(out)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert all("sha256" in each["digest"] for each in statement["subject"][1:])
    assert "ann" not in out
    code, _, err = pipeline("store", "provenance", name, "--format", "envelope")
    assert (code, "is not signed" in err) == (2, True)
    assert pipeline("store", "provenance", name, "--sign", "me.key", "--anonymous")[0] == 0
    _, out, _ = pipeline("store", "provenance", name, "--format", "envelope")
    assert out == (artifacts[0].folder / ENVELOPE).read_text()
    _, out, _ = pipeline("store", "provenance", name, "--format", "sigstore")
    bundle = json.loads(out)
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert len(bundle["dsseEnvelope"]["signatures"]) == 1
    _, out, _ = pipeline("store", "provenance", name, "--trusted-keys", "trusted", "--format", "json")
    (found,) = json.loads(out)["artifacts"]
    assert found["signed"] == [{"keyid": bundle["verificationMaterial"]["publicKey"]["hint"], "trusted": "me.pem"}]
    assert found["statement"]["subject"][1]["digest"].keys() == {"blake3", "sha256"}, "as it was signed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "'nothing' is neither an artifact"),
        (("0bad0bad",), "'0bad0bad' is neither an artifact"),
        (("build", "--attach", "me.key"), "2 artifacts are selected"),
        (("build", "--sign", "trusted/me.pem"), "is not a private key"),
        (("build", "--sign", "encrypted.key"), "there is no terminal to prompt for its passphrase"),
        (("build", "--trusted-keys", "nowhere"), "nowhere: cannot be read"),
    ],
)
def test_mistakes_are_answered_in_words(
    desk: Path, artifacts: tuple[Artifact, Artifact], pipeline: Pipeline, words: tuple[str, ...], said: str
) -> None:
    write_key(desk, "encrypted", passphrase=b"sesame")
    code, out, err = pipeline("store", "provenance", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_an_encrypted_key_takes_its_passphrase_from_the_environment(
    desk: Path, artifacts: tuple[Artifact, Artifact], pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key(desk, "encrypted", passphrase=b"sesame")
    monkeypatch.setenv("PIPELINE_SIGNING_PASSPHRASE", "sesame")
    code, out, err = pipeline("store", "provenance", "--sign", "encrypted.key")
    assert code == 0
    assert "sesame" not in out + err
    assert "PRIVATE" not in out + err


def test_serve_start_refuses_what_a_policy_or_a_statement_refuses(
    artifacts: tuple[Artifact, Artifact], pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = artifacts[0]
    passed = []

    def target(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(folders=(one.out,), launch=None)

    def after(*_: Any) -> Any:
        passed.append(True)
        raise KeyboardInterrupt  # the signatures were in order

    monkeypatch.setattr(serve, "target_of", target)
    monkeypatch.setattr(stage_options, "values", after)
    strict = ("--require-signed", "--trusted-keys", "trusted")
    start = ("serve", "start", "cell", "--http-port", "0")
    assert pipeline(*start)[0] == 130
    code, _, err = pipeline(*start, *strict)
    assert (code, "is not signed" in err, len(passed)) == (2, True, 1)
    pipeline("store", "provenance", "--sign", "me.key")
    assert pipeline(*start, *strict)[0] == 130
    weights = one.out / "deep/weights"
    weights.chmod(stat.S_IWUSR | stat.S_IRUSR)
    weights.write_text("b")
    code, _, err = pipeline(*start)
    assert (code, "out/deep/weights: differs from the signed file" in err, len(passed)) == (2, True, 2)
