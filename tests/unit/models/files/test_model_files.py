"""Which files of a stranger's directory are opened, and what is made of their JSON."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import DownloadError, FailureClass
from trtllm_pipeline.base.files.digest import digest_file
from trtllm_pipeline.models.files import model_files
from trtllm_pipeline.models.files.model_files import Fields, ModelFileError, find
from trtllm_pipeline.models.hub import local

HEADER = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + b"data")
    return folder


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("{}")
    path.chmod(0o600)
    return path


def take(folder: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    local.take(folder, out, progress=lambda *_: None)


# --------------------------------------------------------------------------------------------------------------- links


OUTSIDE = "a link to .*/secret, outside the model's directory"
BAD: dict[str, tuple[dict[str, str], str]] = {
    # what is laid into the model's directory: what it is, or what it links to; and why it is not opened
    "leads out": ({"LICENSE": "SECRET"}, OUTSIDE),
    "leads out by dots": ({"sub": "directory", "LICENSE": "sub/../../secret"}, OUTSIDE),
    "leads out in two steps": ({"first": "SECRET", "LICENSE": "first"}, OUTSIDE),
    "leads out by a directory": ({"sub": "PARENT", "LICENSE": "sub/secret"}, OUTSIDE),
    "is in a snapshot whose blobs are a link": ({"LICENSE": "SECRET", "../../blobs": "PARENT"}, OUTSIDE),
    "leads to a device": ({"LICENSE": "/dev/zero"}, "a link to /dev/zero, outside the model's directory"),
    "leads to itself": ({"LICENSE": "LICENSE"}, "a link that leads to itself"),
    "leads nowhere": ({"LICENSE": "nothing"}, "a link that cannot be followed: No such file"),
    "leads to a directory": ({"sub": "directory", "LICENSE": "sub"}, "a directory, not a file"),
    "is a pipe": ({"LICENSE": "pipe"}, "a named pipe, not a file"),
    "leads to a pipe": ({"first": "pipe", "LICENSE": "first"}, "a named pipe, not a file"),
    "is a socket": ({"LICENSE": "socket"}, "a socket, not a file"),
}


def lay(path: Path, what: str) -> None:
    if what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to(what)


@pytest.mark.parametrize("bad", BAD)
def test_what_is_never_opened(
    folder: Path, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    laid, words = BAD[bad]
    if "../../blobs" in laid:
        snapshots = tmp_path / "models--org--name" / "snapshots"
        snapshots.mkdir(parents=True)
        folder = folder.rename(snapshots / "abc")
    monkeypatch.chdir(folder)  # the path of a socket is short
    for name, what in laid.items():
        lay(Path(name), what.replace("SECRET", str(secret)).replace("PARENT", str(secret.parent)))
    for use in (
        lambda: find(folder, "LICENSE"),
        lambda: local.contents(folder, digest_file),
        lambda: take(folder, tmp_path / "out"),
        lambda: model_files.link(folder, "LICENSE", tmp_path / "linked"),
    ):
        with pytest.raises(ModelFileError, match=rf"/LICENSE: it is {words}") as caught:
            use()
        assert caught.value.hint
        assert caught.value.failure is FailureClass.USER
    assert not (tmp_path / "linked").exists()
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_told_and_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DownloadError, match=rf"{name}: it is a named pipe"):
        local.contents(folder, digest_file)


def test_links_within_the_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "licence").write_text("yours")
    (folder / "there").symlink_to("sub")
    (folder / "LICENSE").symlink_to("there/licence")
    (tmp_path / "link").symlink_to(folder)
    for named in (folder, tmp_path / "link"):
        take(named, out := tmp_path / f"out-{named.name}")
        assert (out / "LICENSE").read_text() == "yours"
        assert not (out / "LICENSE").is_symlink()


def test_what_does_not_belong_to_the_model_is_not_looked_at(folder: Path, secret: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").symlink_to(secret)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    local.contents(folder, digest_file)
    take(folder, tmp_path / "out")


@pytest.mark.parametrize("variable", [*CACHE_VARIABLES, "HOME"])
def test_links_into_the_hugging_face_cache_are_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub", "HOME": ".cache/huggingface/hub"}.get(variable, "")
    hub = tmp_path / "there" / below
    blobs = hub / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_text("a licence")
    (folder / "LICENSE").symlink_to(blobs / "abc")
    take(folder, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "a licence"

    # The cache's directory has more than models in it, such as the user's token.
    for other in (hub.parent / "token", hub / "token", hub / "models--org--name" / "token", hub / "x" / "blobs" / "y"):
        other.parent.mkdir(exist_ok=True, parents=True)
        other.write_text("hf_secret")
        (folder / "LICENSE").unlink()
        (folder / "LICENSE").symlink_to(other)
        with pytest.raises(ModelFileError, match="outside the model's directory"):
            find(folder, "LICENSE")


def test_the_cache_is_where_its_own_library_looks() -> None:
    from huggingface_hub import constants

    assert str(model_files.hub_cache()) == os.path.realpath(constants.HF_HUB_CACHE)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_copies_are_open_to_nobody_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).chmod(mode)
    take(folder, tmp_path / "copied")
    monkeypatch.setattr(local, "_COPIED_BYTES", 10)  # so that the weights are shared
    take(folder, tmp_path / "shared")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "other file system")))
    model_files.link(folder, "config.json", tmp_path / "linked")
    for path in (
        *(tmp_path / out / name for out in ("copied", "shared") for name in ("config.json", "model.safetensors")),
        tmp_path / "linked",
    ):
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


# ---------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 5000, "nested deeper than 100 levels"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has more than 4300 digits"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
    ],
)
def test_json_that_is_none(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=f"config.json: (it is )?{words}"):
        Fields.read(tmp_path, "config.json")


def test_a_file_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_JSON_BYTES", 10)
    (tmp_path / "config.json").write_text(json.dumps({"a": "x" * 20}))
    with pytest.raises(ModelFileError, match="it has 29 bytes; expected at most 10"):
        Fields.read(tmp_path, "config.json")


def fields(**values: Any) -> Fields:
    return Fields(values, Path("m/config.json"))


def test_values_of_the_right_type() -> None:
    given = fields(
        n=3, x=0.5, s="t", f=True, o={"k": 1}, l=["a"], e=None, one=7, many=[7, 8], t={"content": "<s>"}, off=-1
    )
    assert (given.integer("n"), given.integer("e", 5), given.integer("missing", 5)) == (3, 5, 5)
    assert (given.number("x"), given.number("n"), given.number("e", 2.0)) == (0.5, 3.0, 2.0)
    assert (given.text("s"), given.text("e"), given.flag("f"), given.flag("e")) == ("t", None, True, False)
    assert (given.fields("o").integer("k"), given.texts("l"), given.array("e")) == (1, ["a"], [])
    assert [given.token_ids(key) for key in ("one", "many", "off", "e")] == [(7,), (7, 8), (), ()]
    assert (given.token("t"), given.token("s"), given.token("e")) == ("<s>", "t", None)


@pytest.mark.parametrize(
    ("read", "value", "said"),
    [
        ("integer", None, "key is missing"),
        ("integer", True, "key is true; expected a whole number from 1 to 2147483647"),
        ("integer", 1.0, "key is 1.0; expected a whole number"),
        ("integer", 2**63, "key is 9223372036854775808; expected a whole number"),
        ("integer", 0, "key is 0; expected a whole number"),
        ("number", float("nan"), "key is NaN; expected a number above 0"),
        ("number", 10**400, "key is 1000.*\\.\\.\\.; expected a number above 0"),
        ("number", "1", 'key is "1"; expected a number'),
        ("number", False, "key is false; expected a number"),
        ("text", [], "key is \\[\\]; expected a text"),
        ("required_text", None, "key is missing"),
        ("flag", 1, "key is 1; expected true or false"),
        ("fields", [1], "key is \\[1\\]; expected an object"),
        ("texts", [1], ".*expected a list of texts"),
        ("texts", "x", ".*expected a list"),
        ("token_ids", ["x"], ".*expected the number of a token, or a list of them"),
        ("token_ids", True, ".*expected the number of a token"),
        ("token_ids", 1e308, ".*expected the number of a token"),
        ("token", {"content": 5}, "key.content is 5; expected a text"),
    ],
)
def test_values_of_another_type(read: str, value: Any, said: str) -> None:
    with pytest.raises(ModelFileError, match=rf"m/config\.json: {said}") as caught:
        getattr(fields(key=value), read)("key")
    assert caught.value.failure is FailureClass.INFEASIBLE
    with pytest.raises(ModelFileError, match="expected a list of objects"):
        list(fields(key=[5]).objects("key"))
