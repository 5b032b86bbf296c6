"""Signing by real processes: killed at any moment, and several at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.signed import publish, write_key
from tests.helpers.waiting import eventually
from trtllm_pipeline.orchestrate import provenance
from trtllm_pipeline.orchestrate.store.index import Artifact
from trtllm_pipeline.orchestrate.store.manifest import ENVELOPE, inspect
from trtllm_pipeline.orchestrate.store.store import Store

FILES = {f"part-{number}": "x" * 2_000_000 for number in range(8)}


@pytest.fixture
def artifacts(tmp_path: Path) -> list[Artifact]:
    store = Store(tmp_path / "w")
    made = [publish(store, name, files=FILES) for name in ("a", "b", "c", "d")]
    store.close()
    return made


def signer(folder: Path, key: str) -> subprocess.Popen[bytes]:
    words = ("store", "provenance", "--workspace", "w", "--sign", f"{key}.key")
    return subprocess.Popen(
        (sys.executable, "-m", "trtllm_pipeline", *words),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def test_a_signer_killed_at_any_moment_leaves_all_of_an_envelope_or_none(
    tmp_path: Path, artifacts: list[Artifact]
) -> None:
    write_key(tmp_path, "me")
    strict = provenance.policy(tmp_path / "trusted", required=True)

    def signed() -> list[Artifact]:
        return [artifact for artifact in artifacts if (artifact.folder / ENVELOPE).exists()]

    for number in range(len(artifacts) + 1):
        for artifact in artifacts:
            (artifact.folder / ENVELOPE).unlink(missing_ok=True)
        process = signer(tmp_path, "me")
        assert eventually(lambda: len(signed()) >= number)  # noqa: B023
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        for artifact in signed():
            assert provenance.check(artifact.folder, strict) == ()
        for artifact in artifacts:
            assert inspect(artifact.folder, contents=False) == ()
    assert signer(tmp_path, "me").wait() == 0
    provenance.require((artifact.folder for artifact in artifacts), strict)


@pytest.mark.seam
def test_of_several_signers_at_once_none_undoes_another_s_signature(tmp_path: Path, artifacts: list[Artifact]) -> None:
    names = ("ann", "bob", "cyd")
    for name in names:
        write_key(tmp_path, name)
    todo = set(names)
    for _ in range(20):
        processes = {name: signer(tmp_path, name) for name in todo}
        for name, process in processes.items():
            error = process.communicate()[1].decode()
            if process.returncode == 0:
                todo.remove(name)
            else:
                assert "another process works on it" in error
        if not todo:
            break
    assert not todo
    strict = provenance.policy(tmp_path / "trusted", required=True)
    for artifact in artifacts:
        looked = provenance.look(artifact.folder, strict)
        assert looked.findings == ()
        assert sorted(each.trusted or "" for each in looked.signed) == [f"{name}.pem" for name in names]
