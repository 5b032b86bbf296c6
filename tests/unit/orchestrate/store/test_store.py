from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fabricated import recorded
from trtllm_pipeline.base.domain import Exclusive, Fingerprint
from trtllm_pipeline.base.errors import StageError, StateError
from trtllm_pipeline.base.fingerprints import canonical, fingerprint
from trtllm_pipeline.orchestrate.store import claims, manifest
from trtllm_pipeline.orchestrate.store import store as store_module
from trtllm_pipeline.orchestrate.store.index import Artifact, Index, Peak
from trtllm_pipeline.orchestrate.store.manifest import Kind, inspect
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.stage.base import JOB


def key(name: str) -> str:
    return canonical({"stage": "build", "params": {"name": name}})


def publish(store: Store, name: str = "a", files: dict[str, str] | None = None, seconds: float = 0.5) -> Artifact:
    attempt = store.begin("run", "build", fingerprint(key(name)))
    for path, text in (files or {"config.json": "{}", "deep/weights": name}).items():
        file = attempt.out / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (attempt.folder / JOB).write_text("{}")
    attempt.log.write_text("said\n")
    return recorded(store, attempt, key(name), "build/toy/m/fp16", {"duration_s": seconds})


def test_published_whole_with_log_and_manifest(store: Store) -> None:
    artifact = publish(store)
    assert {path.name for path in artifact.folder.iterdir()} == {"out", "log", "job.json", "manifest.json"}
    assert (artifact.out / "deep/weights").read_text() == "a"
    assert not os.access(artifact.out / "config.json", os.W_OK) or os.getuid() == 0
    assert (artifact.out / "config.json").stat().st_mode & 0o222 == 0
    found = store.get("build", artifact.fingerprint)
    assert found == artifact
    assert found.size_bytes == 3
    assert list((store.workspace / "work").iterdir()) == []


def test_what_only_says_what_there_is_looks_at_folders_and_moves_nothing(store: Store) -> None:
    artifact, gone = publish(store), publish(store, "b")
    wanted = {artifact.fingerprint: "build", gone.fingerprint: "build", Fingerprint("c" * 32): "convert"}
    (artifact.out / "config.json").unlink()
    shutil.rmtree(gone.folder)
    assert store.listed(wanted) == {artifact.fingerprint}
    assert artifact.folder.exists(), "damaged, and left to a run"
    assert not store.present(wanted)
    unknown = publish(store, "d")
    store.index.remove_artifacts((unknown.fingerprint,))
    assert store.listed({unknown.fingerprint: "build"}) == {unknown.fingerprint}, "published, and then killed"


def test_the_artifacts_that_are_asked_for_are_looked_up(store: Store) -> None:
    made = [publish(store, name, files) for name, files in (("a", None), ("b", None), ("c", {"x": "1"}), ("d", {}))]
    for wanted in (made, made[1:], made[3:]):
        asked = [*(each.fingerprint for each in wanted), Fingerprint("f" * 32)]
        assert store.index.artifacts(asked) == {each.fingerprint: each for each in wanted}


@pytest.mark.parametrize("harm", ["delete", "truncate", "no manifest", "empty manifest"])
def test_a_damaged_artifact_is_no_artifact_and_goes_away(store: Store, harm: str) -> None:
    artifact = publish(store)
    if harm == "delete":
        (artifact.out / "config.json").unlink()
    elif harm == "truncate":
        (artifact.out / "deep/weights").chmod(0o644)
        (artifact.out / "deep/weights").write_text("")
    elif harm == "empty manifest":
        (artifact.folder / "manifest.json").write_text("")
    else:
        (artifact.folder / "manifest.json").unlink()
    assert store.get("build", artifact.fingerprint) is None
    assert not artifact.folder.exists()
    assert publish(store).out.is_dir()


def unreadable_schema(manifest: Path) -> None:
    data = {**json.loads(manifest.read_text()), "schema": 99}
    del data["digest"]
    manifest.write_text(json.dumps({**data, "digest": fingerprint(canonical(data))}))


def unreadable_file(manifest: Path) -> None:
    manifest.unlink()
    manifest.symlink_to(manifest)  # reading it is an OSError, for root as well


@pytest.mark.parametrize("harm", [unreadable_schema, unreadable_file])
@pytest.mark.parametrize(
    "look",
    [
        lambda store, artifact: store.get("build", artifact.fingerprint),
        lambda store, artifact: store.present({artifact.fingerprint: "build"}),
        lambda store, _artifact: store.repair(),
    ],
)
def test_an_artifact_that_cannot_be_read_is_kept_and_named(
    store: Store, harm: Callable[[Path], None], look: Callable[[Store, Artifact], object]
) -> None:
    artifact = publish(store)
    store.index.remove_artifacts([artifact.fingerprint])
    harm(artifact.folder / "manifest.json")
    with pytest.raises(StateError, match=artifact.fingerprint) as caught:
        look(store, artifact)
    assert caught.value.hint
    assert (artifact.out / "deep/weights").read_text() == "a"


def test_verify_keeps_what_another_release_wrote(store: Store) -> None:
    artifact = publish(store)
    unreadable_schema(artifact.folder / "manifest.json")
    with pytest.raises(StateError, match="schema 99"):
        list(store.verify())
    assert artifact.out.is_dir()


def test_files_that_cannot_be_looked_at_are_no_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = publish(store)

    real = os.stat

    def stat(path: str, **options: bool) -> os.stat_result:
        if str(path).startswith(str(artifact.folder)):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr("trtllm_pipeline.orchestrate.store.manifest.os.stat", stat)
        with pytest.raises(StateError, match="Input/output error"):
            store.present({artifact.fingerprint: "build"})
    assert store.get("build", artifact.fingerprint) == artifact


def test_a_file_in_the_place_of_a_stage_is_named(store: Store) -> None:
    (store.artifacts_dir / "build").write_text("")
    for look in (lambda: store.present({Fingerprint("a" * 32): "build"}), store.repair):
        with pytest.raises(StateError, match="not a directory"):
            look()


@pytest.mark.parametrize("inner", [".", "inner"])
def test_a_workspace_that_is_a_link_to_nothing_is_told(tmp_path: Path, inner: str) -> None:
    link = tmp_path / "link"
    link.symlink_to("/nowhere/at/all")
    with pytest.raises(StateError, match=f"{link} is a link to nothing: /nowhere/at/all") as caught:
        Store(link / inner)
    assert "--workspace DIR" in (caught.value.hint or "")


def test_a_file_in_the_place_of_a_folder_of_the_workspace_is_named(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w/work").write_text("")
    with pytest.raises(StateError, match=f"{tmp_path}/w/work is not a directory"):
        Store(tmp_path / "w")


def test_a_workspace_that_was_moved_is_told_with_what_to_type(store: Store) -> None:
    def fails(_db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    store.workspace.rename(f"{store.workspace}.moved")
    with pytest.raises(StateError, match="was moved or removed while it was in use") as caught:
        store.index.run(fails)
    assert "--workspace DIR" in (caught.value.hint or "")
    assert "pipeline run --matrix FILE" in (caught.value.hint or "")


def found_by_verify(store: Store) -> list[tuple[str, Kind, str, str]]:
    return [(each.fingerprint, each.kind, each.path, done) for of_one in store.verify() for each, done in of_one]


def found_by_repair(store: Store) -> list[tuple[str, Kind, str, str]]:
    return [(each.fingerprint, each.kind, each.path, done) for each, done in store.repair()[2]]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARMS: dict[str, Callable[[Path], None]] = {
    "flip": flip,
    "truncate": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "extend": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "delete": lambda path: path.unlink(),
    "link": lambda path: (path.rename(f"{path}.elsewhere"), path.symlink_to(f"{path}.elsewhere"))[-1],
    "folder": lambda path: (path.unlink(), path.mkdir())[-1],
}


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (name, harm)
        for name in ("out/config.json", "out/deep/weights", "manifest.json", "job.json", "log")
        for harm in HARMS
        if (name, harm) != ("manifest.json", "link")  # it says what it said; the link is not ours to judge
    ],
)
def test_any_harm_to_any_file_is_found_and_put_right(store: Store, name: str, harm: str) -> None:
    good, bad = publish(store, "good"), publish(store, "bad")
    path = bad.folder / name
    path.chmod(0o644)
    HARMS[harm](path)
    damaged = name.startswith("out/") or name == "manifest.json"
    found = found_by_verify(store)
    assert {each[0] for each in found} == {bad.fingerprint}
    assert (Kind.DAMAGED if damaged else Kind.RECORD) in {each[1] for each in found}
    assert (store.get("build", bad.fingerprint) is None) == damaged
    if damaged:
        assert (store.workspace / f"damaged/build/{bad.fingerprint}/log").is_file(), "it is kept, for people to look at"
    else:
        assert found_by_repair(store)
        assert store.get("build", bad.fingerprint) == bad, "a lost log costs no engine"
        kept = store.workspace / "damaged/build" / bad.fingerprint / name
        assert os.path.lexists(kept) == (harm != "delete")
    assert found_by_verify(store) == found_by_repair(store) == []
    assert store.get("build", good.fingerprint) == good


def test_a_bit_of_any_byte_of_a_manifest_is_noticed(store: Store) -> None:
    artifact = publish(store)
    path = artifact.folder / "manifest.json"
    sound = path.read_bytes()
    for place in range(0, len(sound), 7):
        if sound[place : place + 1] in b" \n":
            continue  # between its words there may be any
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert [each.kind for each in inspect(artifact.folder, contents=False)] == [Kind.DAMAGED], place
    path.write_bytes(sound)
    assert inspect(artifact.folder, contents=True) == ()


def test_a_flipped_bit_of_a_schema_is_damage_and_no_other_release(store: Store) -> None:
    artifact, other = publish(store), publish(store, "other")
    path = artifact.folder / "manifest.json"
    sound = path.read_text()
    aside = f"set aside as damaged/build/{artifact.fingerprint}"
    path.write_text(sound.replace('"schema": 1', '"schema": 3'))
    assert [(each[0], each[3]) for each in found_by_verify(store)] == [(artifact.fingerprint, aside)]
    publish(store)
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 3'))
    assert [(each[0], each[3]) for each in found_by_repair(store)] == [(artifact.fingerprint, f"{aside}.2")]
    assert store.get("build", other.fingerprint) == other


def test_a_manifest_of_another_artifact_is_none(store: Store) -> None:
    one, other = publish(store, "one"), publish(store, "other")
    shutil.copy(one.folder / "manifest.json", other.folder / "manifest.json")
    assert store.get("build", other.fingerprint) is None
    copy = store.folder("build", Fingerprint("e" * 32))
    shutil.copytree(one.folder, copy)
    assert [(each[0], each[1]) for each in found_by_repair(store)] == [("e" * 32, Kind.DAMAGED)]
    assert store.get("build", one.fingerprint) == one


def test_files_that_no_manifest_lists_are_found_and_taken_out(store: Store, tmp_path: Path) -> None:
    artifact = publish(store)
    compiled = artifact.out / "deep/__pycache__/model.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"torn")
    (artifact.out / "more").symlink_to(tmp_path)
    (artifact.folder / "notes").write_text("mine")
    expected = [
        (Kind.DERIVED, "out/deep/__pycache__/model.cpython-311.pyc", "removed"),
        (Kind.UNLISTED, "notes", f"set aside as damaged/build/{artifact.fingerprint}/notes"),
        (Kind.UNLISTED, "out/more", f"set aside as damaged/build/{artifact.fingerprint}/out/more"),
    ]
    assert sorted(each[1:3] for each in found_by_verify(store)) == [each[:2] for each in expected]
    assert compiled.exists(), "what is not damage is left to repair"
    assert sorted(each[1:] for each in found_by_repair(store)) == expected
    assert not compiled.parent.exists()
    assert (store.workspace / f"damaged/build/{artifact.fingerprint}/notes").read_text() == "mine"
    assert found_by_verify(store) == []
    assert store.get("build", artifact.fingerprint) == artifact


def test_modes_are_restored_but_not_those_of_files_with_other_names(store: Store, tmp_path: Path) -> None:
    artifact = publish(store)
    (artifact.out / "config.json").chmod(0o666)
    (artifact.out / "deep/weights").chmod(0o000)
    assert sorted(each[1:] for each in found_by_repair(store)) == [
        (Kind.MODE, "out/config.json", "permissions restored"),
        (Kind.MODE, "out/deep/weights", "permissions restored"),
    ]
    assert (artifact.out / "config.json").stat().st_mode & 0o777 == 0o444
    os.link(artifact.out / "config.json", tmp_path / "mine")
    (tmp_path / "mine").chmod(0o644)
    assert found_by_verify(store) == []


def test_a_link_that_leads_elsewhere_is_damage(store: Store, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    attempt = store.begin("run", "repository", fingerprint(canonical({"link": 1})))
    (attempt.out / "engine").symlink_to(tmp_path / "engine")
    artifact = recorded(store, attempt, canonical({"link": 1}), "l", {})
    assert found_by_verify(store) == []
    (artifact.out / "engine").unlink()
    (artifact.out / "engine").symlink_to(tmp_path)
    assert [each[1:3] for each in found_by_verify(store)] == [(Kind.DAMAGED, "out/engine")]


def test_an_artifact_and_its_name_are_on_the_disk_before_it_is_recorded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    def note(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())

    monkeypatch.setattr(os, "fsync", note)
    record = store.index.record
    before: list[Path] = []

    def noted(*given: Any) -> None:
        before.extend(synced)
        record(*given)

    monkeypatch.setattr(store.index, "record", noted)
    artifact = publish(store)
    *files, parent, top = before
    assert {each.name for each in files} >= {"weights", "config.json", "manifest.json", "log", "out"}
    assert (parent, top) == (artifact.folder.parent, store.artifacts_dir)


def test_what_programs_leave_beside_a_result_that_is_no_file_is_not_synced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = store.begin("run", "build", fingerprint(key("a")))
    (attempt.out / "f").write_text("x")
    monkeypatch.chdir(attempt.folder)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("socket")  # which cannot be opened
    store.seal(attempt, key("a"), "l", {})


def test_a_full_disk_while_syncing_is_told_with_its_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    attempt = store.begin("run", "build", fingerprint(key("a")))
    (attempt.out / "f").write_text("x")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        store.seal(attempt, key("a"), "l", {})
    assert str(raised.value.filename).startswith(str(attempt.folder))


def test_an_attempt_and_its_artifact_are_seen_by_others_at_once(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "w")
    attempts = [store.begin("r", "build", fingerprint(key(str(number)))) for number in range(3)]
    assert [row.number for row in other.index.attempts_of("r")] == [1, 1, 1]
    store.fail(attempts[1], "failed", StageError("no"))
    (attempts[0].out / "f").write_text("x")
    sealed = store.seal(attempts[0], key("0"), "l", {})
    assert other.index.all_artifacts() == []
    lines = len(store.index.history.path.read_text().splitlines())
    artifact = store.publish(attempts[0], sealed, Peak("l", "x", {}, {"ms": 1}))
    assert len(store.index.history.path.read_text().splitlines()) == lines + 2, "its row and its peak"
    assert [row.outcome for row in other.index.attempts_of("r")] == ["succeeded", "failed", None]
    assert other.index.all_artifacts() == [artifact]
    assert len(other.index.peaks()) == 1


def test_what_was_published_and_never_recorded_is_read_before_it_is_taken(store: Store, tmp_path: Path) -> None:
    """A power cut may leave a file as long as it was, with other content; and a name without a file."""
    sound, torn = (publish(store, name, {"f": f"{name}ontent"}) for name in "ck")
    store.index.remove_artifacts([sound.fingerprint, torn.fingerprint])
    path = torn.out / "f"
    path.chmod(0o600)
    path.write_bytes(b"\0" * len("kontent"))
    assert store.present({sound.fingerprint: "build", torn.fingerprint: "build"}).keys() == {sound.fingerprint}
    assert not torn.folder.exists()


def test_what_another_invocation_has_published_and_not_recorded_is_not_there_yet(store: Store) -> None:
    artifact = publish(store)
    store.index.remove_artifacts([artifact.fingerprint])
    claim = store.claim(artifact.fingerprint)
    assert store.present({artifact.fingerprint: "build"}) == {}
    assert store.get("build", artifact.fingerprint) == artifact, "whoever has the claim may take it"
    assert store.index.artifacts([artifact.fingerprint]), "and records it"
    claim.release()


def repaired_only_by_repair(store: Store) -> str:
    """A damaged index is an error that names the command, until that command has rebuilt it. Returns what is lost."""
    for _ in range(2):
        with pytest.raises(StateError, match="the index is damaged") as caught:
            store.index.all_artifacts()
        assert "pipeline store repair" in (caught.value.hint or "")
    lost = store.repair()[1]
    assert (store.workspace / "state.db.damaged").exists()
    store.index.all_artifacts()
    return lost


def damage(database: Path, *, first_page: int, pages: int = 1) -> None:
    with database.open("r+b") as file:
        file.seek((first_page - 1) * 4096)
        file.write(b"\xff" * 4096 * pages)


def remembering(store: Store) -> Artifact:
    """An artifact, and one of each kind of thing that no manifest says."""
    index = store.index
    index.begin_run("20260102-run", "m.yaml", ("pipeline", "run"))
    artifact = publish(store)
    failed = store.begin("20260102-run", "build", fingerprint(key("b")))
    store.fail(failed, "failed", StageError("no memory", hint="more of it"))
    index.end_run("20260102-run", 1)
    index.begin_run("20260101-later", "m.yaml", ())
    index.set_latest([("m/fp16", "build", artifact.fingerprint)])
    index.add_infeasible(Fingerprint("c" * 32), "never")
    index.set_pin("a branch", {"revision": "abc"})
    return artifact


def remembered(store: Store, artifact: Artifact) -> list[object]:
    index = store.index
    return [
        store.get("build", artifact.fingerprint),
        index.all_artifacts(),
        index.durations(),
        index.runs(),
        index.attempts([artifact.fingerprint, fingerprint(key("b"))]),
        index.attempts_of("20260102-run"),
        index.latest(["m/fp16"]),
        index.infeasible(),
        index.pin("a branch"),
    ]


def test_an_index_made_anew_knows_all_it_knew(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = remembering(store)
    before = remembered(store, artifact)
    assert all(before)
    assert store.repair()[:2] == (1, "nothing is lost")
    assert remembered(store, artifact) == before
    store.close()
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (tmp_path / "w" / name).unlink(missing_ok=True)
    store = Store(tmp_path / "w")
    assert remembered(store, artifact) == before
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "the index is missing; it was rebuilt from the manifests and the history, nothing is lost"
    ]


HISTORY_HARMS: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda _: None,
    "empty": lambda _: b"",
    "cut at a line's end": lambda sound: b"\n".join(sound.split(b"\n")[:3]),
    "cut within a line": lambda sound: sound[:300],
    "all damaged": lambda sound: sound.replace(b"[", b"{"),
    **{
        f"line {number} flipped": lambda sound, number=number: b"\n".join(  # type: ignore[misc]
            line.replace(b'["', b'["z') if at == number else line for at, line in enumerate(sound.split(b"\n"))
        )
        for number in range(1, 11)
    },
}


@pytest.mark.parametrize("harm", HISTORY_HARMS)
def test_repair_keeps_what_a_sound_index_knows_that_the_history_lost(store: Store, tmp_path: Path, harm: str) -> None:
    artifact = remembering(store)
    before = remembered(store, artifact)
    path = store.index.history.path
    sound = path.read_bytes()
    assert len(sound.strip().split(b"\n")) == 10
    harmed = HISTORY_HARMS[harm](sound)
    assert harmed != sound
    path.unlink() if harmed is None else path.write_bytes(harmed)
    lost = store.repair()[1]
    assert "history.jsonl" in lost
    assert ("from the old index" in lost) == (harm in {"missing", "empty", "cut at a line's end"})
    assert remembered(store, artifact) == before
    size = path.stat().st_size
    store.repair()
    assert path.stat().st_size == size, "the history is written anew once"
    store.close()
    (tmp_path / "w/state.db").unlink()
    store = Store(tmp_path / "w")
    assert remembered(store, artifact) == before, "the history has it all again"


@pytest.mark.parametrize("what", ["forget_pins", "forget_infeasible"])
def test_what_is_forgotten_stays_so_where_the_history_lost_that_line(store: Store, what: str) -> None:
    artifact = remembering(store)
    getattr(store.index, what)()
    before = remembered(store, artifact)
    path = store.index.history.path
    path.write_bytes(path.read_bytes().replace(b'["no ', b'["on '))
    store.repair()
    assert remembered(store, artifact) == before
    store.repair()
    assert remembered(store, artifact) == before


def test_repair_keeps_an_end_that_only_a_damaged_history_tells(store: Store, tmp_path: Path) -> None:
    artifact = remembering(store)
    before = remembered(store, artifact)
    with sqlite3.connect(tmp_path / "w/state.db") as db:  # as after a power loss
        db.execute("UPDATE runs SET ended_s = NULL, exit_code = NULL")
    path = store.index.history.path
    path.write_bytes(path.read_bytes().replace(b'["pins"', b'["pims"'))
    store.repair()
    assert remembered(store, artifact) == before


def test_of_a_value_that_differs_a_sound_history_is_right(store: Store, tmp_path: Path) -> None:
    artifact = remembering(store)
    before = remembered(store, artifact)
    store.close()
    with sqlite3.connect(tmp_path / "w/state.db") as db:
        db.execute("UPDATE runs SET matrix = 'n.yaml'")
    store = Store(tmp_path / "w")
    assert store.repair()[:2] == (1, "nothing is lost")
    assert remembered(store, artifact) == before


@pytest.mark.parametrize(
    "harm",
    ["UPDATE runs SET command = '{}'", "UPDATE pins SET pinned = x'00'", "UPDATE attempts SET started_s = 'soon'"],
)
def test_an_index_with_rows_that_were_never_written_is_put_aside(store: Store, tmp_path: Path, harm: str) -> None:
    artifact = remembering(store)
    with sqlite3.connect(tmp_path / "w/state.db") as db:
        db.execute(harm)
    store.index.history.path.unlink()
    assert store.repair()[:2] == (1, "without the history of runs, since history.jsonl is missing")
    assert store.get("build", artifact.fingerprint) == artifact
    assert store.index.runs() == ()
    assert (tmp_path / "w/state.db.damaged").exists()


def test_runs_are_in_the_order_in_which_they_began_whatever_the_clock_says(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, now in (("second", 2e9), ("first", 1e9)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        store.index.begin_run(name, "m.yaml", ())
    assert [run.id for run in store.index.runs()] == ["first", "second"]
    store.repair()
    assert [run.id for run in store.index.runs()] == ["first", "second"]


@pytest.mark.parametrize("harm", ["flip", "torn", "not JSON", "another release's"])
def test_a_damaged_line_of_the_history_is_left_out_and_counted(
    store: Store, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = remembering(store)
    lines = store.index.history.path.read_bytes().strip().split(b"\n")
    later = next(number for number, line in enumerate(lines) if b"20260101-later" in line)
    if harm == "flip":
        lines[later] = lines[later].replace(b"20260101", b"20260103")
    elif harm == "torn":
        lines[later] = lines[later][:20]
    elif harm == "not JSON":
        lines[later] = b"\xff\x00["
    else:
        store.index.history.path.unlink()
        store.index.history.append([("invented", (1, 2)), ("runs", (1,))])
        lines[later : later + 1] = store.index.history.path.read_bytes().strip().split(b"\n")
    store.index.history.path.write_bytes(b"\n".join(lines))
    said = f"without {2 if harm.startswith('another') else 1} of {len(lines)} lines of history.jsonl"
    store.close()
    (store.workspace / "state.db").unlink()
    store = Store(store.workspace)
    assert said in caplog.text
    assert [run.id for run in store.index.runs()] == ["20260102-run"]
    assert store.index.pin("a branch")
    assert store.get("build", artifact.fingerprint)


def test_a_stage_that_the_index_has_wrong_is_read_from_the_manifest(store: Store, tmp_path: Path) -> None:
    artifact = publish(store)
    with sqlite3.connect(tmp_path / "w/state.db") as db:
        db.execute("UPDATE artifacts SET stage = 'buile'")
    assert store.get("build", artifact.fingerprint) == artifact
    assert store.present({artifact.fingerprint: "build"}) == {artifact.fingerprint: artifact}


def test_a_line_after_one_that_was_cut_short_counts(store: Store) -> None:
    with store.index.history.path.open("ab") as file:
        file.write(b"\n0123abcd [half")
    store.index.begin_run("run", "m.yaml", ())
    assert store.repair()[:2] == (
        0,
        "without 1 of 2 lines of history.jsonl, which are damaged; everything in the old index is kept",
    )
    assert [run.id for run in store.index.runs()] == ["run"]


@contextmanager
def damage_at_most() -> Iterator[None]:
    """The only error that is let through is the one for a damaged index."""
    try:
        yield
    except StateError as error:
        if "the index is damaged" not in error.message:
            raise


def test_any_bit_of_the_index_may_flip(store: Store, tmp_path: Path) -> None:
    """Damage is never a traceback, an artifact lost, or a problem of the environment. Repair fixes all of it."""
    artifact = remembering(store)
    before = remembered(store, artifact)
    store.close()
    path = tmp_path / "w/state.db"
    sound = path.read_bytes()
    places = random.Random(8)
    for number in range(40):
        damaged = bytearray(sound)
        for _ in range(places.choice((1, 1, 1, 3, 30))):
            at = places.choice((places.randrange(100), places.randrange(4096), places.randrange(len(sound))))
            damaged[at] ^= 1 << places.randrange(8)
        if number % 10 == 0:
            damaged = damaged[: places.randrange(len(sound))]
        path.write_bytes(damaged)
        store = Store(tmp_path / "w")
        with damage_at_most():
            assert len(remembered(store, artifact)) == len(before)
            assert store.get("build", artifact.fingerprint) == artifact, "the index is compared with the manifest"
        assert store.repair()[:2] == (1, "nothing is lost")
        assert remembered(store, artifact) == before
        store.close()


def test_damage_that_shows_during_use_is_an_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtllm_pipeline.orchestrate.store.database._SMALL_BYTES", 0)  # a large file is not read whole
    artifact = publish(store)
    for number in range(3000):
        store.index.begin_attempt("run", "build", Fingerprint(f"{number:032}"), number, tmp_path)
    store.close()
    damage(tmp_path / "w/state.db", first_page=40, pages=20)
    store = Store(tmp_path / "w")
    with pytest.raises(StateError, match="the index is damaged") as caught:
        store.index.attempts_of("run")
    assert "pipeline store repair" in (caught.value.hint or "")
    assert store.repair()[:2] == (1, "nothing is lost")
    assert len(store.index.attempts_of("run")) == 3001
    assert store.get("build", artifact.fingerprint) == artifact


def test_an_index_in_use_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_pipeline.orchestrate.store.database._REPAIR_PATIENCE_S", 0)
    one, other = Store(tmp_path / "w"), Store(tmp_path / "w")
    other.index.begin_run("first", "m.yaml", ())
    with pytest.raises(StateError, match="another process uses the index"):
        one.repair()
    assert [run.id for run in one.index.runs()] == ["first"], "it can still be used"
    other.close()
    assert one.repair()[:2] == (0, "nothing is lost")
    assert [run.id for run in one.index.runs()] == ["first"]
    one.close()
    assert {path.name for path in (tmp_path / "w").iterdir() if path.is_file()} == {
        *("history.jsonl", "state.db", "state.lock")
    }


def test_an_index_that_another_process_makes_just_now_is_shared_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, first = os.path.lexists, list[Store]()

    def exists_a_moment_later(path: Path) -> bool:
        found = exists(path)
        if not first:
            monkeypatch.setattr(os.path, "lexists", exists)
            first.append(Store(tmp_path / "w"))
        return found

    monkeypatch.setattr(os.path, "lexists", exists_a_moment_later)
    second = Store(tmp_path / "w")
    for number, store in enumerate((*first, second)):
        store.index.begin_run(str(number), "m.yaml", ())
    assert [run.id for run in second.index.runs()] == ["1", "0"]
    for store in (*first, second):
        store.close()


@pytest.mark.parametrize("repaired", ["empty file", "folder", "text"])
def test_whatever_is_in_the_place_of_the_index_is_put_aside(tmp_path: Path, repaired: str) -> None:
    (tmp_path / "w").mkdir()
    path = tmp_path / "w/state.db"
    if repaired == "folder":
        (path / "deep").mkdir(parents=True)
    else:
        path.write_text("" if repaired == "empty file" else "not a database, by any means" * 400)
    for lost in ("which are empty", "nothing is lost"):  # what was put aside before gives way
        store = Store(tmp_path / "w")
        assert repaired_only_by_repair(store) == lost
        store.index.begin_run("run", "m.yaml", ())
        store.close()
        assert path.is_file()
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ("database or disk is full", OSError, "No space left"),
        ("disk I/O error", StateError, "cannot use the index: disk I/O error"),
        ("unable to open database file", StateError, "check the disk"),
        ("database is locked", StateError, "has locked the index"),
    ],
)
def test_what_the_surroundings_do_is_no_damage(
    store: Store, tmp_path: Path, said: str, error: type[Exception], words: str
) -> None:
    def fails(_db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError(said)

    with pytest.raises(error) as caught:
        store.index.run(fails)
    assert words in f"{caught.value} {getattr(caught.value, 'hint', '')}"
    assert not (tmp_path / "w/state.db.damaged").exists()


def test_an_input_output_error_on_a_full_disk_is_the_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr("trtllm_pipeline.orchestrate.store.database._free_bytes", lambda _folder: 4096)
    with pytest.raises(OSError, match="No space left"):
        store.index.run(fails)


def test_an_attempt_that_a_full_disk_kept_from_ending_can_still_fail(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = store.begin("r", "build", fingerprint(key("a")))
    (attempt.out / "f").write_text("x")
    (attempt.folder / JOB).write_text("{}")
    sealed = store.seal(attempt, key("a"), "build/a", {"duration_s": 1.0})
    append = store.index.history.append

    def full(_events: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.index.history, "append", full)
    with pytest.raises(OSError, match="No space left"):
        store.publish(attempt, sealed)
    monkeypatch.setattr(store.index.history, "append", append)
    store.fail(attempt, "failed", StageError("no room"))
    assert [row.outcome for row in store.index.attempts_of("r")] == ["failed"]


def test_an_index_of_an_older_release_is_rebuilt_by_repair(store: Store, tmp_path: Path) -> None:
    artifact = publish(store)
    store.close()
    (tmp_path / "w/history.jsonl").unlink()
    with sqlite3.connect(tmp_path / "w/state.db") as db:
        db.execute("ALTER TABLE artifacts DROP COLUMN manifest_bytes")
        db.execute("PRAGMA user_version=1")
        db.execute("PRAGMA application_id=0")
    store = Store(tmp_path / "w")
    with pytest.raises(StateError, match="an older release wrote it"):
        store.index.runs()
    assert store.repair()[0] == 1
    assert store.get("build", artifact.fingerprint) == artifact


def test_an_index_of_another_release_is_refused_and_kept(tmp_path: Path) -> None:
    Store(tmp_path / "w").close()
    with sqlite3.connect(tmp_path / "w" / "state.db") as db:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        db.execute("PRAGMA user_version=99")
        db.execute(f"PRAGMA application_id={application + 99 - Index.SCHEMA}")
    with pytest.raises(StateError, match="schema 99"):
        Store(tmp_path / "w")


def test_nothing_left_or_a_dangling_link_cannot_be_published(store: Store) -> None:
    attempt = store.begin("run", "build", Fingerprint("f" * 32))
    with pytest.raises(StageError, match="left no files"):
        store.seal(attempt, key("x"), "l", {})
    (attempt.out / "link").symlink_to("/nowhere/at/all")
    with pytest.raises(StageError, match="does not exist"):
        store.seal(attempt, key("x"), "l", {})


def test_an_artifact_whose_link_target_is_gone_is_made_again(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    attempt = store.begin("run", "repository", fingerprint(key("r")))
    (attempt.out / "engine").symlink_to(target)
    artifact = recorded(store, attempt, key("r"), "l", {})
    assert store.get("repository", artifact.fingerprint) is not None
    target.rmdir()
    assert store.get("repository", artifact.fingerprint) is None


def test_attempts_count_up_and_failed_ones_stay_until_the_next(store: Store) -> None:
    print_ = fingerprint(key("a"))
    first = store.begin("run", "build", print_)
    first.log.write_text("why it failed")
    store.fail(first, "failed", StageError("no"))
    assert len(store.sweep()) == 0
    assert first.log.exists()
    second = store.begin("run", "build", print_)
    assert (first.number, second.number) == (1, 2)
    assert not first.folder.exists()


def test_what_an_attempt_left_that_the_index_does_not_know_is_not_worked_in(store: Store) -> None:
    print_ = fingerprint(key("a"))
    unknown = store.work_dir / f"{print_}.1" / "out"
    unknown.mkdir(parents=True)
    (unknown / "half").write_text("of something")
    attempt = store.begin("run", "build", print_)
    assert list(attempt.out.iterdir()) == []
    assert [path.name for path in store.work_dir.iterdir()] == [attempt.folder.name]


def test_sweep_leaves_alone_what_is_not_the_store_s(store: Store) -> None:
    (store.work_dir / "thesis").mkdir()
    (store.work_dir / "thesis.1").mkdir()
    assert len(store.sweep()) == 0
    assert (store.work_dir / "thesis.1").is_dir()


def test_sweep_removes_claims_that_nobody_holds(store: Store) -> None:
    """A pipeline that was killed after it had published and before it let go leaves one, and nobody claims that again."""
    left, held, other = (store.work_dir / name for name in (f"{'a' * 32}.lock", f"{'b' * 32}.lock", "notes.lock"))
    left.touch()
    other.touch()
    claim = store.claim(Fingerprint("b" * 32))
    assert len(store.sweep()) == 0
    assert sorted(store.work_dir.glob("*.lock")) == [held, other]
    claim.release()


def test_sweep_removes_what_killed_pipelines_left_but_not_what_others_work_on(store: Store) -> None:
    dead = store.begin("run", "build", Fingerprint("d" * 32))
    live = store.begin("run", "build", Fingerprint("e" * 32))
    claim = store.claim(live.fingerprint)
    assert len(store.sweep()) == 1
    assert not dead.folder.exists()
    assert live.folder.exists()
    claim.release()


def test_what_is_removed_is_not_worked_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, rmtree, claimed = publish(store), shutil.rmtree, list[frozenset[Fingerprint]]()

    def slow(folder: Path, **how: bool) -> None:
        claimed.append(Store(store.workspace).claimed())
        rmtree(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", slow)
    assert store.remove(lambda: [artifact]) == [artifact]
    assert claimed == [frozenset()]
    assert list(store.work_dir.glob("*.0")) == []


def test_what_is_removed_while_it_is_verified_is_not_damaged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, others, digested = publish(store), Store(store.workspace), manifest.digest_file

    def digest(path: Path) -> object:
        others.remove(lambda: [artifact])
        return digested(path)

    monkeypatch.setattr(manifest, "digest_file", digest)
    assert list(store.verify()) == []


def test_what_is_removed_while_it_is_looked_at_is_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    artifact, others = publish(store), Store(store.workspace)

    def whole(*_: object) -> bool:
        others.remove(lambda: [artifact])
        return False

    monkeypatch.setattr(store_module, "whole", whole)
    assert store.get("build", artifact.fingerprint) is None
    others.close()
    assert (caplog.messages, store.repair()[0], (store.workspace / "damaged").exists()) == ([], 0, False)


def test_sweep_leaves_the_log_of_what_failed_while_it_looked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = store.begin("run", "build", Fingerprint("d" * 32))
    others = Store(store.workspace)
    claim = others.claim

    def late(wanted: Fingerprint) -> claims.Claim | None:
        store.fail(attempt, "failed", StageError("out of memory"))
        return claim(wanted)

    monkeypatch.setattr(others, "claim", late)
    assert (others.sweep(), attempt.folder.is_dir()) == ([], True)
    assert not list(store.work_dir.glob("*.lock"))


def test_who_only_looks_at_a_claim_does_not_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "claim"
    looks = claims.take(path, shared=True, remove=False)
    assert looks is not None
    waited: list[float] = []
    monkeypatch.setattr(claims.time, "sleep", waited.append)
    assert claims.take(path) is None, "it is no look: it lasts"
    assert 0 < sum(waited) < 0.1
    monkeypatch.setattr(claims.time, "sleep", lambda _seconds: looks.release())
    claim = claims.take(path)
    monkeypatch.setattr(claims.time, "sleep", lambda _seconds: pytest.fail("whoever has it is not waited for"))
    assert claims.take(path) is None
    claim.release()


def test_claims_exclude_pass_on_and_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = claims.take(path)
    assert claims.take(path) is None
    inherited = os.dup(first.fd)  # as a child process would have it
    os.close(first.fd)
    assert claims.take(path) is None, "the child still holds it"
    os.close(inherited)
    again = claims.take(path)
    again.release()
    again.release()
    assert not path.exists()


def test_leases_lie_in_the_temporary_folder_where_there_is_no_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert claims.machine_leases().parent == tmp_path


@pytest.mark.parametrize("kind", ["file", "link", "not ours"])
def test_a_lease_folder_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"trtllm-pipeline-{os.getuid()}"
    if kind == "file":
        folder.write_text("")
    elif kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        owner = os.getuid()
        monkeypatch.setattr("trtllm_pipeline.orchestrate.store.claims.os.getuid", lambda: owner + 1)
        folder.rename(tmp_path / f"trtllm-pipeline-{owner + 1}")
    with pytest.raises(StateError, match="not a directory that you own"):
        claims.machine_leases()


def test_leases_are_shared_or_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one = claims.lease_machine(())
    two = claims.lease_machine(("GPU-a",))
    assert one is not None
    assert two is not None
    assert claims.lease_machine(("GPU-b", "GPU-a")) is None
    assert claims.lease_machine(("GPU-b",)) is not None, "a refused lease holds nothing"
    assert claims.lease_machine((), exclusive=Exclusive.MACHINE) is None
    three = claims.lease_machine(("GPU-a",), others=("GPU-a", "GPU-c", "GPU-d"))
    assert three[1] == ("GPU-c",), "another one that is free will do"
    assert claims.lease_machine(("GPU-a", "GPU-c"), others=("GPU-d",)) is None
