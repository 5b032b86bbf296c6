"""Statements, signatures and what is said of wrong ones."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from tests.helpers.fabricated import recorded
from tests.helpers.signed import key_text, publish, read_key, write_key
from trtllm_pipeline.base.errors import PipelineError, StateError, UsageError
from trtllm_pipeline.base.fingerprints import canonical, fingerprint
from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.orchestrate.provenance import Policy, SigningKey
from trtllm_pipeline.orchestrate.provenance.described import Described
from trtllm_pipeline.orchestrate.provenance.dsse import Envelope, EnvelopeSignature
from trtllm_pipeline.orchestrate.provenance.signing import full_statement
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.manifest import ENVELOPE, Kind, inspect, read
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.stage.base import JOB

NOTHING = Policy()


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return read_key(write_key(tmp_path, "me"))


def sign(store: Store, folder: Path, key: SigningKey, *, anonymous: bool = False) -> Envelope:
    assert provenance.sign(store, folder, key, anonymous=anonymous)
    return provenance.envelope_of(folder)


@pytest.fixture
def signed(store: Store, key: SigningKey) -> Artifact:
    artifact = publish(store)
    provenance.sign(store, artifact.folder, key)
    return artifact


@pytest.fixture
def theirs(tmp_path: Path) -> SigningKey:
    """The key of somebody else."""
    (tmp_path / "theirs").mkdir()
    return read_key(write_key(tmp_path / "theirs", "me"))


@pytest.fixture
def strict(tmp_path: Path, key: SigningKey) -> Policy:
    return provenance.policy(tmp_path / "trusted", required=True)


def messages(artifact: Artifact, policy: Policy) -> str:
    return "; ".join(f"{each.path} {each.message}" for each in provenance.check(artifact.folder, policy))


def test_a_signed_artifact_passes_and_an_unsigned_one_where_nobody_asks(
    store: Store, key: SigningKey, strict: Policy
) -> None:
    artifact = publish(store)
    assert provenance.check(artifact.folder, NOTHING) == ()
    assert messages(artifact, strict) == " is not signed"
    provenance.sign(store, artifact.folder, key)
    assert provenance.check(artifact.folder, strict) == ()
    assert provenance.check(artifact.folder, NOTHING) == ()
    assert inspect(artifact.folder, contents=True) == (), "store verify has nothing against the envelope"
    provenance.require([artifact.folder], strict)
    with pytest.raises(StateError, match="is not signed"):
        provenance.require([artifact.folder, publish(store, "b").folder], strict)


def test_folders_that_are_used_are_checked_if_they_are_artifacts(
    store: Store, key: SigningKey, strict: Policy, tmp_path: Path
) -> None:
    artifact = publish(store)
    provenance.require_folders([artifact.out, tmp_path], NOTHING)
    with pytest.raises(StateError, match="is not signed"):
        provenance.require_folders([artifact.out], strict)
    provenance.sign(store, artifact.folder, key)
    provenance.require_folders([artifact.out, artifact.out], strict)
    with pytest.raises(UsageError, match="so it cannot be signed"):
        provenance.require_folders([artifact.out, tmp_path], strict)
    with pytest.raises(UsageError, match="so it cannot be signed"):
        provenance.require_folders([artifact.out, artifact.folder / "log"], strict)
    change_file(artifact)
    with pytest.raises(StateError, match="differs from the signed file"):
        provenance.require_folders([artifact.out], NOTHING)


def test_without_keys_nothing_can_be_required() -> None:
    with pytest.raises(UsageError, match="needs the trusted public keys"):
        provenance.policy(None, required=True)


# What a statement says.


def test_a_statement_names_files_inputs_versions_commands_and_times(store: Store) -> None:
    about = {"inputs": {"checkpoint": "d" * 64}, "made_by": {"user": "ann", "host": "h1"}}
    statement: Any = provenance.statement_of(publish(store, **about).folder)
    build, run = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    assert [each["name"] for each in statement["subject"]] == [".", "config.json", "deep/weights"]
    assert build["externalParameters"]["key"]["params"] == {"name": "a", "max_batch_size": 4}
    told = build["internalParameters"]
    assert told["runtime"] == {"workers": 2}
    assert told["gpus"] == ["GPU-1"]
    assert told["made_by"] == {"user": "ann", "host": "h1"}
    assert told["commands"] == [
        ["trtllm-build", "--output_dir", "{attempt}/out", "--checkpoint_dir", "{workspace}/store/x"]
    ]
    assert told["environment"] == {"HOME_OF": "~/models"}, "paths name no user"
    assert build["resolvedDependencies"] == [
        {
            "name": "inputs/checkpoint",
            "uri": f"trtllm-pipeline:stage-run/{'0' * 32}",
            "digest": {"dirHashBlake3": "d" * 64},
        },
        {"name": "files/rows", "digest": {"blake3": "c" * 64}},
    ]
    assert run["builder"] == {
        "id": "pkg:generic/trtllm-pipeline@0.1.0",
        "version": {"driver": "570", "trtllm-pipeline": "0.1.0"},
    }
    assert run["metadata"]["invocationId"].startswith("r/build-")
    assert (run["metadata"]["startedOn"], run["metadata"]["finishedOn"]) == (
        "2001-09-09T01:46:39Z",
        "2001-09-09T01:46:40Z",
    )
    assert [each["name"] for each in run["byproducts"]] == ["job.json", "log"]
    anonymous: Any = provenance.statement_of(publish(store, "b", **about).folder, anonymous=True)
    assert "ann" not in json.dumps(anonymous)
    assert "h1" not in json.dumps(anonymous["predicate"]["buildDefinition"]["internalParameters"])


def test_a_manifest_without_names_is_sound(store: Store) -> None:
    artifact = publish(store, made_by={"user": "ann", "host": "h1"})
    sealed = read(artifact.folder)
    assert "made_by" in sealed.provenance
    sealed.anonymous.write(artifact.folder)
    assert read(artifact.folder) == sealed.anonymous
    assert "ann" not in (artifact.folder / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            {"hugging_face": "org/m", "revision": "a" * 40},
            {"uri": f"pkg:huggingface/org/m@{'a' * 40}", "digest": {"gitCommit": "a" * 40}},
        ),
        ({"modelscope": "org/m", "revision": "v1"}, {"uri": "git+https://www.modelscope.cn/org/m.git@v1"}),
        (
            {"package_index": "m==1.0", "sha256": "b" * 64, "member": "x/y"},
            {"uri": "pkg:pypi/m@1.0", "digest": {"sha256": "b" * 64}, "annotations": {"member": "x/y"}},
        ),
        ({"local": "d" * 32}, None),
    ],
)
def test_the_source_of_a_model_is_a_pinned_dependency(store: Store, source: Any, expected: Any) -> None:
    key = canonical({"stage": "download", "params": {"source": source}, "inputs": {}})
    attempt = store.begin("run", "download", fingerprint(key))
    (attempt.out / "config.json").write_text("{}")
    artifact = recorded(store, attempt, key, "download/toy", {})
    statement: Any = provenance.statement_of(artifact.folder)
    found = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert found == ([{"name": "model", **expected}] if expected else [])


def test_an_older_artifact_says_what_was_not_recorded(store: Store, key: SigningKey, strict: Policy) -> None:
    text = key_text("old")
    attempt = store.begin("run", "build", fingerprint(text))
    (attempt.out / "engine").write_text("x")
    artifact = recorded(store, attempt, text, "build/toy", {"duration_s": 1.0})
    described = Described.of(artifact.folder, NOTHING).text()
    assert "made by    not recorded" in described
    assert "command    not recorded" in described
    assert inspect(artifact.folder, contents=True) == ()
    provenance.sign(store, artifact.folder, key)
    assert provenance.check(artifact.folder, strict) == ()


def test_a_changed_job_is_not_told_as_what_was_run(store: Store) -> None:
    artifact = publish(store)
    (artifact.folder / JOB).write_text('{"commands": [["something", "else"]]}')
    with pytest.raises(StateError, match="is not the job"):
        provenance.statement_of(artifact.folder)


def test_all_files_together_have_the_digest_that_tools_compute(store: Store) -> None:
    artifact = publish(store, files={"b": "1", "a/c": "2", "ü": "3", "a-b": "4", "Z": "5"})
    from blake3 import blake3

    names = sorted(
        (str(each.relative_to(artifact.out)) for each in artifact.out.rglob("*") if each.is_file()), key=str.encode
    )
    lines = "".join(f"{blake3((artifact.out / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    assert read(artifact.folder).tree == blake3(lines.encode()).hexdigest()


# Attacks.


def resigned(artifact: Artifact, key: SigningKey, change: Callable[[dict[str, Any]], None]) -> None:
    """A statement that was changed and then really signed, by a trusted key that should not have."""
    statement: dict[str, Any] = json.loads(full_statement(artifact.folder))
    change(statement)
    write_signed(artifact, key, canonical(statement).encode())


def write_signed(artifact: Artifact, key: SigningKey, payload: bytes) -> None:
    envelope = Envelope(payload, ())
    envelope = Envelope(payload, (key.sign(envelope.signed_bytes),))
    (artifact.folder / ENVELOPE).write_text(envelope.text())


def test_a_flipped_bit_anywhere_in_the_envelope_is_found(signed: Artifact, strict: Policy) -> None:
    sound = (signed.folder / ENVELOPE).read_bytes().rstrip(b"\n")
    harmless = []
    for place in range(0, len(sound), 11):
        flipped = bytearray(sound)
        flipped[place] ^= 1 << (place % 8)
        (signed.folder / ENVELOPE).write_bytes(flipped)
        if provenance.check(signed.folder, strict) == ():
            harmless.append(place)
    start = sound.index(b'"keyid":"')
    allowed = range(start, sound.index(b'"sig"'))  # nobody relies on the name of the key
    assert [place for place in harmless if place not in allowed] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"), "_type is"),
        (lambda s: s.update(predicateType="https://slsa.dev/provenance/v0.2"), "predicateType is"),
        (lambda s: s.pop("predicateType"), "predicateType is None"),
        (lambda s: s["predicate"]["buildDefinition"].update(buildType="x:y"), "buildType is"),
        (
            lambda s: s["predicate"]["buildDefinition"]["externalParameters"].update(fingerprint="f" * 32),
            "about another stage run, 'ffff",
        ),
        (
            lambda s: s["predicate"]["buildDefinition"]["externalParameters"]["key"]["params"].update(name="z"),
            "externalParameters are not those",
        ),
        (
            lambda s: s["predicate"]["buildDefinition"]["externalParameters"].update(more=1),
            "externalParameters are not those",
        ),
        (
            lambda s: s["predicate"]["runDetails"]["metadata"].update(invocationId="other"),
            "about another attempt, 'other'",
        ),
        (lambda s: s["predicate"].pop("runDetails"), "malformed"),
        (lambda s: s.update(predicate=[]), "malformed"),
        (lambda s: s["predicate"]["buildDefinition"].update(externalParameters=[]), "malformed"),
        (lambda s: s["predicate"]["runDetails"].update(metadata="x"), "malformed"),
        (lambda s: s["subject"].append({"name": 7}), "7' differ"),
        (lambda s: s.update(subject={}), "are not this artifact's files"),
        (lambda s: s.update(subject=None), "malformed"),
        (lambda s: s["subject"].pop(), "'deep/weights' differ"),
        (lambda s: s["subject"].append(dict(s["subject"][1])), "is twice"),
        (lambda s: s["subject"].append({**s["subject"][1], "name": "../../escape"}), "'../../escape' differ"),
        (lambda s: s["subject"][1].update(name="config.json\u0000"), "differ"),
        (lambda s: s["subject"][1]["digest"].pop("blake3"), "'config.json' differ"),
        (lambda s: s["subject"][1]["digest"].update(sha1="0" * 40), "'config.json' differ"),
        (lambda s: s["subject"][1].update(annotations={"link": "/etc/passwd"}), "'config.json' differ"),
        (lambda s: s["subject"][1].pop("digest"), "malformed"),
        (lambda s: s["subject"].__setitem__(1, "config.json"), "malformed"),
    ],
)
def test_a_trusted_signature_does_not_save_a_statement_that_does_not_fit(
    store: Store, key: SigningKey, strict: Policy, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    artifact = publish(store)
    resigned(artifact, key, change)
    for policy in (strict, NOTHING):
        assert said in messages(artifact, policy)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b'{"_type": "' + b"x" * 2_000_000 + b'"}', "xxx..."),
        (b'{"a":' * 700, "strict JSON"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(200_000)) + b',"7":1}', "'7' is twice"),
        (b"", "strict JSON"),
        (b"[]", "is not an object"),
        (b'{"_type": "a", "_type": "b"}', "'_type' is twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b"\xff", "strict JSON"),
        (b'{"_type": "\\ud800"}', "_type is"),
        (b"9" * 5000, "strict JSON"),
    ],
)
def test_a_signed_payload_that_is_no_statement(
    store: Store, key: SigningKey, strict: Policy, payload: bytes, said: str
) -> None:
    artifact = publish(store)
    write_signed(artifact, key, payload)
    assert said in messages(artifact, strict)


def test_another_artifact_s_statement_is_told_by_its_stage_run(store: Store, key: SigningKey, strict: Policy) -> None:
    one, other = publish(store, files={"same": "x"}), publish(store, "b", files={"same": "x"})
    provenance.sign(store, one.folder, key)
    shutil.copy(one.folder / ENVELOPE, other.folder / ENVELOPE)
    assert f"the statement is about another stage run, '{one.fingerprint}'" in messages(other, strict)
    assert f"the statement is about another stage run, '{one.fingerprint}'" in messages(other, NOTHING)


def test_a_statement_of_an_earlier_attempt_is_told(store: Store, key: SigningKey, strict: Policy) -> None:
    first = publish(store)
    provenance.sign(store, first.folder, key)
    envelope = (first.folder / ENVELOPE).read_bytes()
    again = publish(store, attempt=2)
    assert messages(again, strict) == " is not signed", "an artifact that is made again is not signed yet"
    (again.folder / ENVELOPE).write_bytes(envelope)
    assert "the statement is about another attempt" in messages(again, strict)


def test_another_user_s_key_is_not_trusted_whatever_it_is_called(
    store: Store, key: SigningKey, strict: Policy, theirs: SigningKey
) -> None:
    artifact = publish(store)
    envelope = sign(store, artifact.folder, theirs)
    assert "no trusted key signed it" in messages(artifact, strict)
    assert messages(artifact, NOTHING) == "", "and is as good as unsigned where nobody asks"
    for keyid in (key.keyid, "", "me.pem"):
        claimed = Envelope(envelope.payload, (EnvelopeSignature(keyid, envelope.signatures[0].value),))
        (artifact.folder / ENVELOPE).write_text(claimed.text())
        assert "no trusted key signed it" in messages(artifact, strict)


def test_a_second_signature_keeps_the_first(
    store: Store, key: SigningKey, strict: Policy, theirs: SigningKey, tmp_path: Path
) -> None:
    artifact = publish(store)
    first = sign(store, artifact.folder, key)
    second = sign(store, artifact.folder, theirs)
    assert second.payload == first.payload
    assert not provenance.sign(store, artifact.folder, theirs), "it is signed already"
    assert provenance.envelope_of(artifact.folder) == second
    assert provenance.check(artifact.folder, strict) == ()
    assert provenance.check(artifact.folder, provenance.policy(tmp_path / "theirs/trusted", required=True)) == ()


def no_keyid(text: str) -> str:
    envelope = json.loads(text)
    del envelope["signatures"][0]["keyid"]
    return json.dumps(envelope)


def url_safe(text: str) -> str:
    return (
        text.replace("+", "-").replace("/", "_").replace("application_vnd.in-toto-json", "application/vnd.in-toto+json")
    )


@pytest.mark.parametrize("change", [no_keyid, url_safe, lambda text: json.dumps(json.loads(text), indent=4)])
def test_other_spellings_of_a_sound_envelope_are_read(
    store: Store, key: SigningKey, strict: Policy, change: Callable[[str], str]
) -> None:
    artifact = publish(store, files={f"file {number}": str(number) for number in range(40)})
    provenance.sign(store, artifact.folder, key)
    path = artifact.folder / ENVELOPE
    path.write_text(change(path.read_text()))
    assert provenance.check(artifact.folder, strict) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e.update(payloadType="application/json"), "payloadType is"),
        (lambda e: e.update(signatures=[]), "0 signatures"),
        (lambda e: e.update(signatures=e["signatures"] * 65), "65 signatures"),
        (lambda e: e.update(signatures={}), "no list of signatures"),
        (lambda e: e.update(signatures=["x"]), "not an object with keyid"),
        (lambda e: e["signatures"][0].update(keyid=7), "not an object with keyid"),
        (lambda e: e["signatures"][0].update(sig="!!"), "sig is not Base64"),
        (lambda e: e["signatures"][0].update(sig=""), "the signature of me.pem is wrong"),
        (lambda e: e["signatures"][0].pop("sig"), "sig is not Base64"),
        (lambda e: e.update(payload=e["payload"] + "\n "), "payload is not Base64"),
        (lambda e: e.update(payload=None), "payload is not Base64"),
    ],
)
def test_an_envelope_that_is_none(
    signed: Artifact, strict: Policy, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    envelope = json.loads((signed.folder / ENVELOPE).read_text())
    change(envelope)
    (signed.folder / ENVELOPE).write_text(json.dumps(envelope))
    assert said in messages(signed, strict)


def test_names_that_stand_twice_in_an_envelope_are_refused(signed: Artifact, strict: Policy) -> None:
    text = (signed.folder / ENVELOPE).read_text()
    other = base64.b64encode(b"{}").decode()
    (signed.folder / ENVELOPE).write_text(f'{{"payload":"{other}",{text[1:]}')
    assert "'payload' is twice" in messages(signed, strict)


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "huge", "empty"])
def test_what_is_no_file_of_sensible_size_is_not_read(
    signed: Artifact, strict: Policy, kind: str, tmp_path: Path
) -> None:
    path = signed.folder / ENVELOPE
    moved = tmp_path / "moved"
    path.rename(moved)
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(65 << 20)
    else:
        path.touch()
    for policy in (strict, NOTHING):
        assert {
            "link": "is a link",
            "directory": "is not a file",
            "pipe": "is not a file",
            "huge": "more than 65536 KiB",
        }.get(kind, "strict JSON") in messages(signed, policy)


def change_file(artifact: Artifact) -> None:
    path = artifact.out / "deep/weights"
    path.chmod(0o644)
    path.write_text("b")  # of the same size


def add_model(artifact: Artifact) -> None:
    (artifact.out / "extra").mkdir()
    (artifact.out / "extra/model.py").write_text("import os")


def link_file(artifact: Artifact) -> None:
    path = artifact.out / "deep/weights"
    (artifact.folder.parent / "elsewhere").write_text("a")
    path.unlink()
    path.symlink_to(artifact.folder.parent / "elsewhere")


def remove_file(artifact: Artifact) -> None:
    (artifact.out / "deep/weights").unlink()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (change_file, "out/deep/weights differs from the signed file"),
        (add_model, "out/extra/model.py is not among the files"),
        (link_file, "out/deep/weights differs from the signed file"),
        (remove_file, "out/deep/weights differs from the signed file: is missing"),
    ],
)
def test_files_are_read_where_something_was_signed(
    signed: Artifact, strict: Policy, harm: Callable[[Artifact], None], said: str
) -> None:
    harm(signed)
    for policy in (strict, NOTHING):
        assert said in messages(signed, policy)


def test_files_changed_together_with_their_manifest_do_not_fit_the_statement(
    store: Store, key: SigningKey, strict: Policy
) -> None:
    artifact = publish(store)
    envelope = sign(store, artifact.folder, key)
    shutil.rmtree(artifact.folder)
    forged = publish(store, files={"config.json": "{}", "deep/weights": "evil"})
    (forged.folder / ENVELOPE).write_text(envelope.text())
    assert inspect(forged.folder, contents=True) == (), "the manifest alone does not tell"
    assert "deep/weights" in messages(forged, strict)


# Signing.


def test_damaged_files_are_not_signed(store: Store, key: SigningKey) -> None:
    artifact = publish(store)
    change_file(artifact)
    with pytest.raises(StateError, match="has changed since its build, so it is not signed"):
        provenance.sign(store, artifact.folder, key)
    assert not (artifact.folder / ENVELOPE).exists()


def test_what_somebody_tampered_with_is_not_signed_over(store: Store, key: SigningKey) -> None:
    artifact = publish(store)
    (artifact.folder / ENVELOPE).write_text("{}")
    with pytest.raises(UsageError, match="not a DSSE envelope"):
        provenance.sign(store, artifact.folder, key)


def test_a_signature_made_elsewhere_is_taken_over_if_it_fits(
    store: Store, key: SigningKey, strict: Policy, tmp_path: Path
) -> None:
    one, other = publish(store), publish(store, "b")
    payload = provenance.statement_line(one.folder).encode()
    envelope = Envelope(payload, (key.sign(Envelope(payload, ()).signed_bytes),))
    bundle = tmp_path / "bundle.json"
    bundle.write_text(json.dumps({"mediaType": "x", "dsseEnvelope": json.loads(envelope.text())}))
    provenance.attach(store, one.folder, provenance.read_file(bundle))
    assert provenance.check(one.folder, strict) == ()
    with pytest.raises(UsageError, match="does not match"):
        provenance.attach(store, other.folder, envelope)
    assert provenance.check(other.folder, NOTHING) == ()


def test_an_envelope_does_not_push_out_another_s(
    store: Store, key: SigningKey, theirs: SigningKey, tmp_path: Path
) -> None:
    artifact = publish(store, made_by={"user": "ann"})
    mine = sign(store, artifact.folder, key)
    hers = Envelope(mine.payload, (theirs.sign(mine.signed_bytes),))
    provenance.attach(store, artifact.folder, hers)
    assert [each.keyid for each in provenance.envelope_of(artifact.folder).signatures] == [key.keyid, theirs.keyid]
    other = full_statement(artifact.folder, anonymous=True).encode()
    with pytest.raises(UsageError, match="another statement"):
        provenance.attach(store, artifact.folder, Envelope(other, (theirs.sign(Envelope(other, ()).signed_bytes),)))
    third = read_key(write_key(tmp_path, "third"))
    with pytest.raises(UsageError, match="another statement"):
        provenance.sign(store, artifact.folder, third, anonymous=True)
    assert provenance.sign(store, artifact.folder, third)
    (artifact.folder / ENVELOPE).unlink()
    assert b"ann" not in sign(store, artifact.folder, key, anonymous=True).payload


@pytest.mark.parametrize(
    "lie",
    [
        lambda s: s["subject"][1]["digest"].update(sha256="0" * 64),
        lambda s: s["predicate"]["buildDefinition"]["internalParameters"].update(made_by={"user": "the boss"}),
        lambda s: s["predicate"]["buildDefinition"]["resolvedDependencies"].clear(),
        lambda s: s["predicate"]["runDetails"]["builder"].update(id="pkg:generic/other@1"),
    ],
)
def test_nobody_signs_below_another_s_lies(
    store: Store, key: SigningKey, theirs: SigningKey, lie: Callable[[dict[str, Any]], None]
) -> None:
    artifact = publish(store)
    resigned(artifact, theirs, lie)
    assert provenance.check(artifact.folder, NOTHING) == (), "what only a signature vouches for"
    with pytest.raises(UsageError, match="another statement is already signed"):
        provenance.sign(store, artifact.folder, key)


def test_what_nobody_trusted_says_is_not_shown(store: Store, key: SigningKey, strict: Policy) -> None:
    artifact = publish(store)

    def lie(statement: dict[str, Any]) -> None:
        statement["predicate"]["buildDefinition"]["internalParameters"] = ["\x1b[31mlies"]
        statement["predicate"]["runDetails"]["builder"] = 7

    resigned(artifact, key, lie)
    described = Described.of(artifact.folder, NOTHING)
    assert described.looked.findings == ()
    assert "lies" not in described.text()
    assert "lies" not in json.dumps(described.to_json())
    trusted = Described.of(artifact.folder, strict)
    assert "lies" in json.dumps(trusted.to_json()), "what a trusted key signed is shown, as it is"
    assert "lies" not in trusted.text()


def test_a_killed_signer_leaves_nothing_in_the_artifact(store: Store, key: SigningKey, monkeypatch: Any) -> None:
    artifact = publish(store)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        provenance.sign(store, artifact.folder, key)
    monkeypatch.undo()
    assert inspect(artifact.folder, contents=True) == ()
    assert len(store.sweep()) == 1
    provenance.sign(store, artifact.folder, key)


def test_nobody_signs_what_another_process_works_on(store: Store, key: SigningKey) -> None:
    artifact = publish(store)
    claim = store.claim(artifact.fingerprint)
    with pytest.raises(StateError, match="another process works on it"):
        provenance.sign(store, artifact.folder, key)
    claim.release()
    provenance.sign(store, artifact.folder, key)


def test_repair_and_verify_keep_the_envelope(store: Store, signed: Artifact, strict: Policy) -> None:
    (signed.folder / "log").write_text("changed")
    assert [each.kind for each in inspect(signed.folder, contents=True)] == [Kind.RECORD]
    store.repair()
    assert provenance.check(signed.folder, strict) == (), "the log that is gone was only a byproduct"
    assert list(store.verify(lambda folder: provenance.check(folder, strict, contents=False))) == [[]]


# Keys.


def test_ecdsa_p256_as_cosign_makes_it_is_a_key_too(store: Store, tmp_path: Path) -> None:
    key = read_key(write_key(tmp_path, "p256", ec.generate_private_key(ec.SECP256R1())))
    artifact = publish(store)
    provenance.sign(store, artifact.folder, key)
    assert provenance.check(artifact.folder, provenance.policy(tmp_path / "trusted", required=True)) == ()
    (tmp_path / "trusted/p256.pem").unlink()
    write_key(tmp_path, "other", ec.generate_private_key(ec.SECP256R1()))
    strict = provenance.policy(tmp_path / "trusted", required=True)
    assert "no trusted key" in messages(artifact, strict)


@pytest.mark.parametrize(
    "key", [rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())], ids=["rsa", "p384"]
)
def test_other_kinds_of_keys_are_refused(tmp_path: Path, key: Any) -> None:
    path = write_key(tmp_path, "odd", key)
    with pytest.raises(UsageError, match="is not an Ed25519 or ECDSA P-256 key"):
        read_key(path)
    with pytest.raises(UsageError, match="is not an Ed25519 or ECDSA P-256 key"):
        provenance.policy(tmp_path / "trusted", required=False)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_private_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_key(tmp_path, "me")
    path.chmod(mode)
    with pytest.raises(UsageError, match="others may read or change this private key") as refused:
        read_key(path)
    assert "chmod 600" in str(refused.value.hint)


def test_an_encrypted_key_needs_its_passphrase_and_nothing_shows_it(tmp_path: Path) -> None:
    path = write_key(tmp_path, "me", passphrase=b"sesame")
    key = SigningKey.read(path, lambda: "sesame")
    with pytest.raises(UsageError, match="passphrase is wrong") as refused:
        SigningKey.read(path, lambda: "wrong word")
    assert "wrong word" not in str(refused.value)
    assert repr(key) == f"SigningKey({key.keyid})"


@pytest.mark.parametrize("text", ["", "garbage", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_file_that_is_no_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "me.pem"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(UsageError, match=r"is not an Ed25519|is not a private key"):
        read_key(path)
    with pytest.raises(UsageError, match=r"is not an Ed25519|is a private key"):
        provenance.policy(tmp_path, required=False)


def test_trusted_keys_that_cannot_be_relied_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        provenance.policy(tmp_path / "nowhere", required=True)
    (tmp_path / "README").write_text("not a key")
    with pytest.raises(UsageError, match="has no public keys"):
        provenance.policy(tmp_path, required=True)
    path = write_key(tmp_path, "me")
    trusted = tmp_path / "trusted"
    (trusted / "me.pem").chmod(0o666)
    with pytest.raises(UsageError, match="is writable by all users"):
        provenance.policy(trusted, required=True)
    (trusted / "me.pem").chmod(0o644)
    shutil.copy(path, trusted / "oops.pem")
    with pytest.raises(UsageError, match="is a private key"):
        provenance.policy(trusted, required=True)


def test_errors_are_ours(store: Store, tmp_path: Path) -> None:
    with pytest.raises(PipelineError):
        provenance.check(tmp_path, NOTHING)
    with pytest.raises(UsageError, match="is not signed"):
        provenance.envelope_of(publish(store).folder)
