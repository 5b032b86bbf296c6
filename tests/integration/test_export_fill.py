"""The job that fills a volume: from both hubs, checked file by file, and going on where it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fake_hub import FakeHub, Fault, Repository, sha256
from trtllm_pipeline.serve.export import fill

FILES = {
    "start": b"#!/bin/sh\n",
    "engine/rank 0.engine": os.urandom(20_000),
    "model/tokenizer.json": b"{}",
}


def repository(files: dict[str, bytes] = FILES, **lies: str) -> Repository:
    sums = "".join(f"{lies.get(name) or sha256(content)}  {name}\n" for name, content in files.items())
    return Repository({**files, "SHA256SUMS": sums.encode()}, private=True)


def run(hub: FakeHub, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    environment = {"REPOSITORY": "me/b", "HF_ENDPOINT": hub.url, "MODELSCOPE_ENDPOINT": hub.url, "TOKEN": "good"}
    return subprocess.run(
        [sys.executable, "-I", str(fill.__file__), str(folder)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.seam
@pytest.mark.parametrize("name", ["huggingface", "modelscope"])
def test_a_volume_is_filled_and_checked(name: str, tmp_path: Path) -> None:
    with FakeHub({"me/b": repository()}) as hub:
        done = run(hub, tmp_path / "v", HUB=name)
        assert done.returncode == 0, done.stderr
        again = run(hub, tmp_path / "v", HUB=name)
    assert {path: (tmp_path / "v" / path).read_bytes() for path in FILES} == FILES
    assert os.access(tmp_path / "v" / "start", os.X_OK)
    assert again.stdout.count("there already") == len(FILES)
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path / "v", check=True).returncode == 0
    with_token = [path for _, path, headers in hub.requests if "authorization" in headers]
    assert with_token
    assert all("/resolve/" in path or path.startswith("/api/v1/") for path in with_token), "not where the files lie"


def test_another_bundle_replaces_the_one_before(tmp_path: Path) -> None:
    """Until it is whole, no server starts with a mix; Triton would load a model that only the old one has."""
    volume = tmp_path / "v"
    for name in ("lost+found", ".snapshot"):  # the file system's own
        (volume / name / "daily").mkdir(parents=True)
        (volume / name / "daily" / "file").touch()
    old = repository({**FILES, "repository/old/1/model.py": b"", "engine/rank 1.engine": b"1"})
    new = {**FILES, "model/tokenizer.json": b"[]"}
    with FakeHub({"me/b": old, "me/c": repository(new)}) as hub:
        assert run(hub, volume).returncode == 0
        missing = run(hub, volume, REPOSITORY="me/none")
        assert (missing.returncode, "Traceback" in missing.stderr) == (1, False)
        assert (volume / "SHA256SUMS").exists(), "the volume is as it was"
        hub.faults = [Fault("model/tokenizer.json", status=403, times=1)]
        broken = run(hub, volume, REPOSITORY="me/c")
        assert broken.returncode == 1
        assert broken.stderr.strip().endswith("tokenizer.json: 403 Forbidden")
        assert not (volume / "SHA256SUMS").exists()
        done = run(hub, volume, REPOSITORY="me/c")
        assert done.returncode == 0, done.stderr
    found = {path.relative_to(volume).as_posix(): path.read_bytes() for path in volume.rglob("*") if path.is_file()}
    found.pop("SHA256SUMS")
    kept = {f"{name}/daily/file": b"" for name in ("lost+found", ".snapshot")}
    assert found == {**new, **kept}
    assert not (volume / "repository").exists()


def test_a_connection_that_breaks_is_tried_again(tmp_path: Path) -> None:
    with FakeHub({"me/b": repository()}) as hub:
        hub.faults = [Fault("rank 0", "drop", after=100), Fault("SHA256SUMS", status=503)]
        done = run(hub, tmp_path / "v")
    assert done.returncode == 0, done.stderr


@pytest.mark.seam
@pytest.mark.parametrize(
    ("lies", "files", "words"),
    [
        ({"start": "0" * 64}, FILES, "start: its SHA-256 is "),
        ({}, {**FILES, "../outside": b"x"}, "outside, which is outside the bundle"),
    ],
)
def test_what_is_not_what_was_exported_is_refused(
    lies: dict[str, str], files: dict[str, bytes], words: str, tmp_path: Path
) -> None:
    with FakeHub({"me/b": repository(files, **lies)}) as hub:
        done = run(hub, tmp_path / "v")
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "v" / "SHA256SUMS").exists()
