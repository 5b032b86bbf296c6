"""Which processes get the user's tokens: a download, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs import job
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.machine.triton_installation import TritonInstallation
from trtllm_pipeline.base.processes.process import Guardian
from trtllm_pipeline.orchestrate.run.executor import Ended, Executor
from trtllm_pipeline.orchestrate.store import claims
from trtllm_pipeline.serve.kept import control
from trtllm_pipeline.tensorrt.servers import triton_server

pytestmark = pytest.mark.seam
SECRETS = {
    "HF_TOKEN": "hf_1",
    "HUGGING_FACE_HUB_TOKEN": "hf_2",
    "MODELSCOPE_API_TOKEN": "ms_3",
    "PIPELINE_SIGNING_PASSPHRASE": "open",
    "WANDB_API_KEY": "wb_4",
}
OF_HUBS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN"}


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTHER", "x")


def names(environment: bytes, between: bytes = b"\n") -> set[str]:
    return {line.partition(b"=")[0].decode() for line in environment.split(between)}


@pytest.mark.parametrize(("stage", "expected"), [("download", OF_HUBS), ("build", set()), ("launch", set())])
def test_only_a_download_gets_tokens(tmp_path: Path, stage: str, expected: set[str]) -> None:
    (asked,) = jobs = [job(tmp_path, stage, command=("env",), environment={"HF_HOME": "/x"})]
    executor = Executor()
    executor.submit(asked, ())
    events = executor.wait(60.0)
    while not any(isinstance(event, Ended) for event in events):
        events = executor.wait(60.0)
    executor.close()
    found = names((Path(jobs[0].attempt) / "log").read_bytes())
    assert found & SECRETS.keys() == expected
    assert {"OTHER", "HF_HOME", "PATH"} <= found


def test_a_guardian_has_none_itself() -> None:
    with Guardian() as guardian:
        environment = Path(f"/proc/{guardian.pid}/environ")
        assert eventually(lambda: "OTHER" in names(environment.read_bytes(), b"\0")), "it is between fork and exec"
        found = names(environment.read_bytes(), b"\0")
    assert not found & SECRETS.keys()


def test_a_server_has_none() -> None:
    found = triton_server.environment(TritonInstallation(Path(), "a package", Path()))
    assert not found.keys() & SECRETS.keys()


def test_a_keeper_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def popen(*_: object, env: dict[str, str], **__: object) -> object:
        given.append(env)
        raise InterruptedError

    monkeypatch.setattr(control.subprocess, "Popen", popen)
    claim = claims.take(tmp_path / "lock")
    assert claim is not None
    with pytest.raises(InterruptedError):
        control._spawn(tmp_path, claim)
    assert not given[0].keys() & SECRETS.keys()
