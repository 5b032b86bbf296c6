"""Pushed and pulled over fsspec's own file systems: whole and verified, or not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.helpers.fabricated import recorded
from tests.helpers.matrix_files import RECIPE
from tests.helpers.signed import publish, read_key, write_key
from tests.unit.conftest import Refused
from trtllm_pipeline.base.domain import Fingerprint
from trtllm_pipeline.base.errors import RemoteError, StateError
from trtllm_pipeline.base.fingerprints import canonical, fingerprint
from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.orchestrate.store import remote_store
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.remote_store import ArtifactKey, ArtifactTransfer, Progress, Remote
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.show.cli.app import main

FILES = {"config.json": "{}", "rank0.engine": "weights" * 1000, "deep/same": "weights" * 1000, "empty": ""}


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return Store(tmp_path / "other")


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "remote")
        return
    from fsspec.implementations.memory import MemoryFileSystem

    yield "memory://engines/nightly"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def place(artifact: Artifact) -> ArtifactKey:
    return ArtifactKey(artifact.stage, artifact.fingerprint)


def push(store: Store, url: str, *artifacts: Artifact, thorough: bool = False) -> list[ArtifactTransfer]:
    with closing(Remote(url, thorough=thorough)) as there:
        found = remote_store.compare_to_push(store, there, map(place, artifacts))
        pending = [each for each in found if each.state == "pending"]
        return [each for each in found if each not in pending] + list(
            remote_store.push(store, there, pending, Progress())
        )


def pull(store: Store, url: str, policy: provenance.Policy | None = None, *, progress: Progress | None = None) -> Any:
    judge = partial(provenance.check, policy=policy or provenance.Policy(), contents=False)
    with closing(Remote(url)) as there:
        found = remote_store.compare_to_pull(store, there, there.places())
        pending = [each for each in found if each.state == "pending"]
        done = remote_store.pull(store, there, pending, judge, progress or Progress())
        return [each for each in found if each not in pending] + list(done)


def sent(url: str | Path, artifact: Artifact, name: str) -> Path:
    """A file of an artifact that was pushed to a directory."""
    (found,) = Path(url, "artifacts", artifact.stage, artifact.fingerprint).glob(f"*/{name}")
    return found


def states(transfers: list[ArtifactTransfer]) -> list[str]:
    return [each.state for each in transfers]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_and_back_it_is_the_same_to_the_byte(store: Store, other: Store, url: str) -> None:
    made = [publish(store, name, FILES) for name in "abcdef"]
    assert states(push(store, url, *made)) == ["done"] * 6
    assert states(pull(other, url)) == ["done"] * 6
    for each in made:
        got = other.get(each.stage, each.fingerprint)
        assert contents(got.folder) == contents(each.folder)
        assert not any(path.stat().st_mode & 0o222 for path in got.out.rglob("*") if path.is_file())
    assert all(findings == [] for findings in other.verify())
    assert states(pull(other, url)) == ["present"] * 6
    assert not list(other.work_dir.rglob("*.lock"))


def test_what_is_there_is_not_sent_again(store: Store, url: str) -> None:
    artifact = publish(store, "a", FILES)
    with closing(Remote(url)) as there:
        (found,) = remote_store.compare_to_push(store, there, [place(artifact)])
    records = sum((artifact.folder / name).stat().st_size for name in ("log", "job.json"))
    assert (found.state, found.transfer_bytes) == ("pending", artifact.size_bytes + records)
    assert states(push(store, url, artifact)) == ["done"]
    assert states(push(store, url, artifact)) == ["present"]


def test_without_its_manifest_it_is_not_there(
    store: Store, other: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = publish(store, "a", FILES)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            push(store, url, artifact)
    assert pull(other, url) == []
    assert states(push(store, url, artifact)) == ["done"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), "is damaged there"),
        (lambda path: os.truncate(path, 5), "is damaged there"),
        (lambda path: path.unlink(), "is missing there"),
    ],
)
def test_a_wrong_file_is_refused_and_named_and_the_rest_arrives(
    store: Store, other: Store, tmp_path: Path, harm: Any, said: str
) -> None:
    bad, good = publish(store, "a", {"rank0.engine": "unlike others"}), publish(store, "b")
    push(store, str(tmp_path / "remote"), bad, good)
    harm(sent(tmp_path / "remote", bad, "out/rank0.engine"))
    found = {each.fingerprint: each for each in pull(other, str(tmp_path / "remote"))}
    assert found[bad.fingerprint].state == "refused"
    assert "out/rank0.engine" in str(found[bad.fingerprint].message)
    assert said in str(found[bad.fingerprint].message)
    assert found[good.fingerprint].state == "done"
    assert not other.folder(*place(bad)).exists()
    assert not other.arriving(*place(bad)).exists()
    assert states(push(store, str(tmp_path / "remote"), bad)) == ["present"], "only a thorough push looks"
    assert states(push(store, str(tmp_path / "remote"), bad, thorough=True)) == ["done"], "pushing again fixes it"
    assert states(push(store, str(tmp_path / "remote"), bad, thorough=True)) == ["present"]
    assert "done" in states(pull(other, str(tmp_path / "remote")))


def test_damage_here_is_not_sent(store: Store, url: str) -> None:
    artifact = publish(store, "a", FILES)
    (artifact.out / "config.json").chmod(0o644)
    (artifact.out / "config.json").write_text("[]")
    (found,) = push(store, url, artifact)
    assert found.state == "refused"
    assert "its content changed" in str(found.message)


def _altered(folder: Path, change: Any) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    del data["digest"]
    change(data)
    path.write_text(json.dumps({**data, "digest": fingerprint(canonical(data))}))
    for files in [each for each in folder.iterdir() if len(each.name) == 64]:
        files.rename(folder / blake3(path.read_bytes()).hexdigest())


def _named(name: str) -> Any:
    return lambda data: data["files"][0].update(path=name)


def _linked(*links: tuple[str, str]) -> Any:
    return lambda data: data["files"].extend({"path": name, "link": to} for name, to in links)


@pytest.mark.parametrize(
    "change",
    [
        *map(_named, ("../../../outside", "/etc/passwd", "a/../../../b", "", ".", "a//b")),
        _linked(("escape", "/etc/passwd")),
        _linked(("escape", "../../x")),
        _linked(("p/q/b", "../../z"), ("z", "deep"), ("p/q/a", "b/../..")),
        lambda data: data["files"][0].update(blake3="../../secret"),
        lambda data: data["records"][0].update(path="manifest.json"),
        lambda data: data["records"][0].update(path="out/x"),
        lambda data: data.update(stage="../../x"),
        lambda data: data.update(files=[1]),
    ],
)
def test_a_manifest_that_leads_out_of_its_folder_is_refused(
    store: Store, other: Store, tmp_path: Path, change: Any
) -> None:
    artifact = publish(store, "a", FILES)
    push(store, str(tmp_path / "remote"), artifact)
    _altered(tmp_path / f"remote/artifacts/build/{artifact.fingerprint}", change)
    before = contents(tmp_path)
    assert states(pull(other, str(tmp_path / "remote"))) == ["refused"]
    now = contents(tmp_path)
    new = [name for name in now.keys() - before.keys() if not name.startswith("other/state.db")]
    assert new == []


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["files"][0].update(path=5),
        lambda data: data["files"][0].update(path="a\0b"),
        lambda data: data["files"][0].update(path="\x1b[2Ja"),
        lambda data: data["files"][0].update(path="x" * 300),
        lambda data: data["files"][0].update(path="/".join(["d"] * 600)),
        lambda data: data["files"][0].update(size="9"),
        lambda data: data["files"][0].update(size=10**17),
        lambda data: data["files"][0].update(blake3=["0" * 64]),
        lambda data: data["files"][0].update(blake3="0" * 64 + "\n"),
        lambda data: data["files"].append({**data["files"][0], "path": data["files"][1]["path"] + "/x"}),
        lambda data: data["files"].append(data["files"][0]),
        lambda data: data["records"][0].update(path="manifest.json/x"),
        lambda data: data["records"].append({**data["records"][0], "path": "log/x"}),
        _linked(("l", 5)),  # type: ignore[arg-type]
        _linked(("l", "")),
        _linked(("l", ".")),
        _linked(("l", "l")),
        _linked(("l", "a\0")),
        _linked(("l", "m"), ("m", "l")),
        _linked(("l", "deep")),
        lambda data: data.update(files={}),
        lambda data: data.update(files=[]),
        lambda data: data.update(files=[{**data["files"][0], "path": f"f{number}"} for number in range(20_001)]),
        lambda data: data.update(label=None),
        lambda data: data.update(label="two\nlines"),
        lambda data: data.update(label="x" * 10_000),
        lambda data: data["provenance"].update(system={"gpus": 5}),
        lambda data: data["provenance"].update(finished_s=-1e300),
        lambda data: data["provenance"].update(inputs=None),
        lambda data: data["provenance"].update(made_by=[["x"]]),
        lambda data: data["provenance"].update(more={"a": ["\x1b]0;title\x07"]}),
    ],
)
def test_a_manifest_that_is_not_one_of_ours_is_refused_alone(
    store: Store, other: Store, tmp_path: Path, change: Any
) -> None:
    """Whatever it says: the other artifact arrives, and the workspace is as it would be without the bad one."""
    bad, good = publish(store, "a", FILES), publish(store, "b", FILES)
    push(store, str(tmp_path / "remote"), bad, good)
    _altered(tmp_path / f"remote/artifacts/build/{bad.fingerprint}", change)
    found = {each.fingerprint: each for each in pull(other, str(tmp_path / "remote"))}
    assert (found[bad.fingerprint].state, found[good.fingerprint].state) == ("refused", "done")
    assert str(found[bad.fingerprint].message).isprintable()
    assert len(str(found[bad.fingerprint].message)) < 500
    assert [each.fingerprint for each in other.index.all_artifacts()] == [good.fingerprint]
    assert not other.arriving(*place(bad)).exists()


@pytest.mark.parametrize("content", [b"", b"[" * 200_000, b'{"digest": 1e999}', b"\xff", b"5", b"x" * (17 << 20)])
def test_what_is_not_a_manifest_is_refused_alone(store: Store, other: Store, url: str, content: bytes) -> None:
    bad, good = publish(store, "a", FILES), publish(store, "b", FILES)
    push(store, url, bad, good)
    with closing(Remote(url)) as there:
        there.write(f"artifacts/build/{bad.fingerprint}/manifest.json", content)
    found = {each.fingerprint: each.state for each in pull(other, url)}
    assert found == {bad.fingerprint: "refused", good.fingerprint: "done"}


@pytest.mark.parametrize("kind", ["fifo", "folder", "huge"])
def test_what_is_not_a_file_there_is_not_read(store: Store, other: Store, tmp_path: Path, kind: str) -> None:
    bad, good = publish(store, "a", {"rank0.engine": "unlike others"}), publish(store, "b")
    push(store, str(tmp_path / "remote"), bad, good)
    content = sent(tmp_path / "remote", bad, "out/rank0.engine")
    if kind == "huge":
        os.truncate(content, 1 << 40)  # only as much as the manifest says is read
    else:
        content.unlink()
        (os.mkfifo if kind == "fifo" else os.mkdir)(content)
    found = {each.fingerprint: each.state for each in pull(other, str(tmp_path / "remote"))}
    assert found == {bad.fingerprint: "done" if kind == "huge" else "refused", good.fingerprint: "done"}


def test_a_manifest_of_another_type_that_was_published_is_set_aside(store: Store) -> None:
    artifact = publish(store, "a", FILES)
    _altered(artifact.folder, lambda data: data.update(label=None))
    assert store.repair()[0] == 0
    assert store.get(*place(artifact)) is None


def test_links_within_arrive(store: Store, other: Store, url: str) -> None:
    attempt = store.begin("run", "build", fingerprint(canonical({"stage": "build"})))
    (attempt.out / "a").write_text("x")
    (attempt.out / "b").symlink_to("a")
    made = recorded(store, attempt, canonical({"stage": "build"}), "build", {})
    push(store, url, made)
    assert states(pull(other, url)) == ["done"]
    got = other.folder(*place(made)) / "out/b"
    assert got.readlink() == Path("a")


def test_an_artifact_with_a_link_out_of_it_is_not_pushed(store: Store, url: str, tmp_path: Path) -> None:
    attempt = store.begin("run", "build", fingerprint(canonical({"stage": "build"})))
    (tmp_path / "weights").write_text("x")
    (attempt.out / "b").symlink_to(tmp_path / "weights")
    made = recorded(store, attempt, canonical({"stage": "build"}), "build", {})
    (found,) = push(store, url, made)
    assert (found.state, str(tmp_path) in str(found.message)) == ("refused", True)


def test_an_interrupted_pull_leaves_nothing(
    store: Store, other: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_PIECE_BYTES", 100)
    artifact = publish(store, "a", {"rank0.engine": "".join(map(str, range(2000)))})
    push(store, url, artifact)

    class Stopping(Progress):
        def add(self, size_bytes: int) -> None:
            super().add(size_bytes)
            if self.done_bytes > 3000:
                raise RemoteError("the connection was lost")

    with pytest.raises(RemoteError, match="lost"):
        pull(other, url, progress=Stopping())
    assert not other.arriving(*place(artifact)).exists()
    assert other.get(*place(artifact)) is None
    assert not list(other.work_dir.glob("*.lock"))
    assert states(pull(other, url)) == ["done"]


def test_what_a_killed_pull_left_is_fetched_anew(store: Store, other: Store, url: str) -> None:
    artifact = publish(store, "a", FILES)
    push(store, url, artifact)
    left = other.arriving(*place(artifact)) / "out"
    left.mkdir(parents=True)
    (left / "rank0.engine").write_bytes(bytes(7000))
    (left / "other").write_text("of another build")
    (left / "deep").symlink_to("/")
    (left.parent / "log").symlink_to("/")
    assert states(pull(other, url)) == ["done"]
    assert contents(other.folder(*place(artifact))) == contents(artifact.folder)


def test_who_made_it_meanwhile_or_works_on_it_keeps_it(store: Store, other: Store, url: str) -> None:
    busy, made = publish(store, "a"), publish(store, "b")
    push(store, url, busy, made)
    with closing(Remote(url)) as there:
        found = remote_store.compare_to_pull(other, there, [place(busy), place(made)])
        claim = other.claim(busy.fingerprint)
        publish(other, "b")
        done = list(remote_store.pull(other, there, found, lambda _: (), Progress()))
        claim.release()
    assert states(done) == ["busy", "present"]


def test_a_second_build_of_the_same_does_not_mix_with_the_first(store: Store, other: Store, url: str) -> None:
    publish(store, "a", {"engine": "one build"})
    theirs = publish(other, "a", {"engine": "other build"})
    first = publish(store, "a", {"engine": "one build"})
    push(store, url, first)
    assert states(push(other, url, theirs)) == ["present"]
    third = Store(other.workspace.with_name("third"))
    assert states(pull(third, url)) == ["done"]
    assert (third.folder(*place(first)) / "out/engine").read_text() == "one build"


def test_a_full_disk_is_told_before_and_in_the_middle(
    store: Store, other: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = publish(store, "a", FILES)
    push(store, url, artifact)
    with closing(Remote(url)) as there:
        (found,) = remote_store.compare_to_pull(other, there, [place(artifact)])
        usage = shutil.disk_usage("/")
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=found.transfer_bytes))
            with pytest.raises(StateError, match="are free"):
                remote_store.check_room(other, [found, found])
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
            remote_store.check_room(other, [found])
            (refused,) = remote_store.pull(other, there, [found], lambda _: (), Progress())
    assert (refused.state, "are free" in str(refused.message)) == ("refused", True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(other.work_dir))

    with monkeypatch.context() as patch:
        patch.setattr(remote_store.os, "fchmod", full)
        with pytest.raises(StateError, match="no space is left"):
            pull(other, url)
    assert other.get(*place(artifact)) is None
    assert states(pull(other, url)) == ["done"]


def test_signatures_travel_and_policies_hold(store: Store, other: Store, url: str, tmp_path: Path) -> None:
    signed, unsigned = publish(store, "a"), publish(store, "b")
    push(store, url, signed, unsigned)
    key = read_key(write_key(tmp_path, "me"))
    provenance.sign(store, signed.folder, key)
    assert states(push(store, url, signed)) == ["done"], "signed after it was pushed"
    assert states(push(store, url, signed)) == ["present"]
    strict = provenance.policy(tmp_path / "trusted", required=True)
    found = {each.fingerprint: each for each in pull(other, url, strict)}
    assert found[signed.fingerprint].state == "done"
    assert found[unsigned.fingerprint].state == "refused"
    assert "not signed" in str(found[unsigned.fingerprint].message)
    assert provenance.check(other.folder(*place(signed)), strict) == ()


def test_a_statement_of_something_else_is_refused_without_any_policy(
    store: Store, other: Store, tmp_path: Path
) -> None:
    one, two = publish(store, "a"), publish(store, "b")
    provenance.sign(store, one.folder, read_key(write_key(tmp_path, "me")))
    shutil.copy(one.folder / "provenance.intoto.jsonl", two.folder)
    push(store, str(tmp_path / "remote"), two)
    assert states(pull(other, str(tmp_path / "remote"))) == ["refused"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "empty"),
        ("nowhere://x", "nowhere"),
        ("https://engines.example/x", "is read-only"),
    ],
)
def test_a_wrong_url_is_told(tmp_path: Path, refused: Refused, url: str, said: str) -> None:
    store = Store(tmp_path / "w")
    publish(store)
    store.close()
    told = refused("store", "push", url, "--workspace", str(tmp_path / "w"))
    assert said in told
    assert "try:" in told


def test_a_host_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FTP's file system connects when it is made."""
    store = Store(tmp_path / "w")
    publish(store)
    store.close()
    with socket.socket() as unheard:  # nobody listens there
        unheard.bind(("127.0.0.1", 0))
        url = f"ftp://127.0.0.1:{unheard.getsockname()[1]}/x"
        assert main(["store", "push", url, "--workspace", str(tmp_path / "w")]) == 1
    told = capsys.readouterr().err
    assert f"error: {url}: [Errno 111] Connection refused" in told
    assert "try: check the address" in told


def test_passwords_in_urls_are_not_shown() -> None:
    assert remote_store.shown("sftp://ann:secret@host/x/") == "sftp://host/x"


def test_a_file_in_the_place_of_the_remote_is_reported(store: Store, tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("")
    (found,) = push(store, str(tmp_path / "remote"), publish(store))
    assert (found.state, "Not a directory" in str(found.message)) == ("refused", True)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "w")
    made = [publish(store, name) for name in "ab"]
    store.close()
    push_ = ["store", "push", "remote", "--workspace", "w"]
    assert main([*push_, "--dry-run"]) == 0
    assert not (tmp_path / "remote").exists()
    assert main([*push_, f"build-{made[0].fingerprint[:12]}", "--format", "json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out[told.out.index("{") :])["artifacts"][0]["state"] == "done"
    assert main([*push_, "nothing"]) == 2
    assert main([*push_, "--cells", "x"]) == 2
    assert main([*push_, "--run", "x", "--matrix", "quickstart"]) == 2
    assert main([*push_, "repository"]) == 2
    assert main(push_) == 0
    told = capsys.readouterr()
    assert "1 artifact to push to remote" in told.err
    assert "1 already there" in told.err
    pull_ = ["store", "pull", "remote", "--workspace", "w2"]
    assert main([*pull_, "--dry-run"]) == 0
    assert "to be pulled" in capsys.readouterr().out
    assert main([*pull_, "build"]) == 0
    assert [each.fingerprint for each in Store(tmp_path / "w2").index.all_artifacts()] == sorted(
        each.fingerprint for each in made
    )
    next((tmp_path / "remote/artifacts").rglob("manifest.json")).write_text("{}")
    assert main(["store", "pull", "remote", "--workspace", "w3"]) == 1
    assert "refused" in capsys.readouterr().err


def test_a_read_only_workspace_can_be_pushed_from(store: Store, tmp_path: Path, url: str) -> None:
    artifact = publish(store)
    store.unwritable = store.workspace
    assert states(push(store, url, artifact)) == ["done"]
    with pytest.raises(StateError, match="read-only"):
        pull(store, url)


def test_a_matrix_pulls_what_its_cells_need_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/small.yaml").write_text(RECIPE.replace("{local: ./small}", "{generated: llama}"))
    matrix = "name: test\ntoolchain: embedded\naxes: {model: [small], precision: [fp16, int8_wo], max_batch_size: [4], lengths: ['128,32']}\n"
    (tmp_path / "matrix.yaml").write_text(matrix)
    store = Store(tmp_path / "w")
    request = Request(tmp_path / "matrix.yaml")
    runs = [run for run in planner.plan_of(request, store).stage_runs.values() if run.stage.name in ("convert", "perf")]
    for run in runs:
        attempt = store.begin("run", run.stage.name, run.fingerprint)
        (attempt.out / "file").write_text(run.id)
        recorded(store, attempt, run.key, run.label, {})
    publish(store)
    store.close()
    assert main(["store", "push", "remote", "--workspace", "w"]) == 0
    pull_ = ["store", "pull", "remote", "--matrix", "matrix.yaml"]
    assert main([*pull_, "--workspace", "w2", "--until", "convert", "--cells", "*/int8_wo/*"]) == 0
    assert "1 artifact to pull" in capsys.readouterr().err
    assert main([*pull_, "--workspace", "w2"]) == 0
    assert "; 1 already there; " in capsys.readouterr().err
    assert {each.fingerprint for each in Store(tmp_path / "w2").index.all_artifacts()} == {
        run.fingerprint for run in runs
    }


def test_of_many_that_are_not_there_none_is_asked_for_by_itself(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = publish(store)
    push(store, url, artifact)
    asked: list[ArtifactKey] = []
    manifest = Remote.manifest
    monkeypatch.setattr(Remote, "manifest", lambda self, key: [asked.append(key), manifest(self, key)][1])
    others = [ArtifactKey(stage, Fingerprint(f"{number:032x}")) for number in range(150) for stage in ("build", "none")]
    with closing(Remote(url)) as there:
        assert list(remote_store.offered(there, [place(artifact), *others], ())) == [place(artifact)]
        assert asked == [place(artifact)]
        assert list(remote_store.offered(there, [place(artifact), *others[:3]], ())) == [place(artifact)]
    assert len(asked) == 5


def test_a_remote_that_cannot_be_written_is_named(store: Store) -> None:
    with pytest.raises(RemoteError, match="/proc/nothing"):
        push(store, "/proc/nothing", publish(store))


def test_a_generator_of_results_closes_after_its_pool_has_gone() -> None:
    """An exception keeps the generator, and Python closes it at some later moment."""
    release = threading.Event()
    pool = ThreadPoolExecutor(1)
    results = remote_store._each(pool, lambda item: item or release.wait(60), [1, 0, 2, 3], 3)
    assert next(results) == 1
    pool.shutdown(wait=False, cancel_futures=True)
    release.set()
    closing = threading.Thread(target=results.close, daemon=True)  # type: ignore[attr-defined]
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
