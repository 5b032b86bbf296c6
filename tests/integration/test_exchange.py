"""Stage runs on nodes that do not see the workspace: in a mount namespace of their own, where its place is an empty disk."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.helpers.jobs import end, isolated, job, may_isolate, submit
from tests.helpers.s3 import s3_server
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.domain import Fingerprint, Scope
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.base.fingerprints import fingerprint
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.orchestrate.clusters.agent import folder_of
from trtllm_pipeline.orchestrate.clusters.cluster import ClusterExecutor
from trtllm_pipeline.orchestrate.clusters.exchange import Exchange
from trtllm_pipeline.orchestrate.run import file_views
from trtllm_pipeline.orchestrate.run.executor import Job, Ready
from trtllm_pipeline.orchestrate.run.scheduler import Capacity, NodeCame, NodeGone
from trtllm_pipeline.orchestrate.store import manifest
from trtllm_pipeline.orchestrate.store.manifest import Manifest


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    (folder / "work").mkdir(parents=True)
    if not may_isolate(folder):
        pytest.skip("needs to be allowed to mount")
    return folder


class Isolated:
    """A cluster of one such node."""

    machine = Machine(cpus=4, cpu="of a node")
    nodes = (Capacity(4, downloads=0, node="one"),)

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.sees_it = False
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: Job, command: Sequence[str]) -> str:
        words = command if self.sees_it else isolated(self.workspace, *command)
        self.started[job.id] = subprocess.Popen(words)
        return job.id

    def over(self, timeout_s: float) -> Mapping[str, StageError | None]:
        time.sleep(timeout_s)
        ended = [name for name, process in self.started.items() if process.poll() is not None]
        lost = StageError("lost with its node", failure=FailureClass.LOST)
        return {name: lost if self.started.pop(name).returncode < 0 else None for name in ended}

    def changes(self) -> Sequence[NodeGone | NodeCame]:
        return ()

    def left(self, attempt: Path) -> str | None:
        return None

    def cancel(self, tickets: Sequence[str]) -> None:
        for ticket in tickets:
            if ticket in self.started:
                self.started[ticket].kill()

    def close(self) -> None: ...


@pytest.fixture
def cluster(workspace: Path) -> Isolated:
    return Isolated(workspace)


@pytest.fixture
def url(tmp_path: Path) -> Path:
    return tmp_path / "exchange"


@pytest.fixture
def executor(cluster: Isolated, url: Path) -> Iterator[ClusterExecutor]:
    url.mkdir()
    executor = ClusterExecutor(cluster, Exchange(str(url)))
    yield executor
    executor.close()


def made(workspace: Path, stage: str, files: Mapping[str, str]) -> Path:
    """The result of an artifact with these files."""
    key = f'{{"stage":"{stage}"}}'
    folder = workspace / "store" / stage / fingerprint(key)
    for name, text in files.items():
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).write_text(text)
    Manifest(stage, Fingerprint(folder.name), key, stage, manifest.scan(folder / "out"), {}).write(folder)
    return folder / "out"


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-ec", script)


@pytest.mark.seam
def test_a_job_reads_artifacts_and_files_and_its_result_comes_back(
    workspace: Path, executor: ClusterExecutor, tmp_path: Path
) -> None:
    whole = made(workspace, "download", {"weights": "w", "deep/config": "c"})
    of_user = tmp_path / "prompts.jsonl"
    of_user.write_text("mine")
    script = f"test ! -e {workspace}/store/other; cat {whole}/weights {whole}/deep/config $0 > out/all; echo said; ln -s all out/link"
    command = (*sh(script), str(of_user))
    one = job(workspace / "work", "one", inputs={"model": str(whole)}, command=command, files={"prompts": str(of_user)})
    submit(executor, one)
    ended = end(executor)
    assert ended.error is None
    assert ended.system is not None
    attempt = Path(one.attempt)
    assert (attempt / "out" / "all").read_text() == "wcmine"
    assert (attempt / "out" / "link").readlink() == Path("all")
    assert (attempt / "log").read_text() == "said\n"
    assert eventually(lambda: executor.wait(0.1) == [] and not folder_of(attempt).exists())


def test_a_view_of_an_artifact_has_only_its_files_there_too(workspace: Path, executor: ClusterExecutor) -> None:
    whole = made(workspace, "download", {"tokenizer": "t", "weights": "w"})
    one = job(workspace / "work", "one", command=sh("ls inputs/model > out/seen"), viewed={"model": str(whole)})
    seen = file_views.make(Path(one.attempt), "model", whole, ["tokenizer"])
    one.inputs["model"] = str(seen)  # type: ignore[index]
    submit(executor, one)
    assert end(executor).error is None
    assert (Path(one.attempt) / "out" / "seen").read_text() == "tokenizer\n"


def test_a_failure_comes_back_with_its_log_and_without_a_result(workspace: Path, executor: ClusterExecutor) -> None:
    one = submit(executor, job(workspace / "work", "one", command=sh("echo half > out/half; echo why >&2; exit 3")))
    error = end(executor).error
    assert error is not None
    assert error.message == "one: ended with exit code 3; its last line: why"
    assert not list((Path(one.attempt) / "out").iterdir())


def test_a_log_grows_here_while_it_is_written_there(workspace: Path, executor: ClusterExecutor) -> None:
    one = submit(executor, job(workspace / "work", "one", command=sh("echo first; sleep 600")))
    log = Path(one.attempt) / "log"

    def first() -> bool:
        executor.wait(0.1)
        return log.exists() and log.read_text() == "first\n"

    assert eventually(first)
    executor.stop(one.id, 1.0)
    assert end(executor).error is not None


def test_a_service_and_what_is_measured_inside_it(workspace: Path, executor: ClusterExecutor, url: Path) -> None:
    serve = job(workspace / "work", "serve", Scope.SERVICE, command=sh('echo "{}" > service.json; exec sleep 600'))
    submit(executor, serve)
    events = []
    while not events:
        events = executor.wait(1.0)
    assert events == [Ready(serve.id)]
    data = made(workspace, "data", {"rows": "r"})
    service = str(Path(serve.attempt) / "service.json")
    perf = job(
        workspace / "work",
        "perf",
        Scope.IN_SERVICE,
        command=sh(f"cat {service} {data}/rows > out/measured"),
        inputs={"service": service, "data": str(data)},
    )
    submit(executor, perf)
    assert end(executor).error is None
    assert (Path(perf.attempt) / "out" / "measured").read_text() == "{}\nr"
    executor.stop(serve.id, 1.0)
    assert end(executor).id == serve.id
    # The executor drops an agent in the first wait after its end.
    assert eventually(lambda: executor.wait(0.1) == [] and not list((url / "parcels").iterdir())), "parcels are removed"


def test_a_node_that_dies_is_lost(workspace: Path, cluster: Isolated, executor: ClusterExecutor) -> None:
    one = submit(executor, job(workspace / "work", "one", command=sh("echo up; sleep 600")))
    log = Path(one.attempt) / "log"
    assert eventually(lambda: executor.wait(0.1) == [] and log.exists() and log.read_text() == "up\n")
    os.kill(cluster.started["one"].pid, signal.SIGKILL)
    error = end(executor).error
    assert error is not None
    assert error.failure is FailureClass.LOST


def test_what_cannot_be_sent_is_said(workspace: Path, executor: ClusterExecutor) -> None:
    whole = made(workspace, "download", {"weights": "w"})
    (whole / "weights").write_text("x")
    submit(executor, job(workspace / "work", "one", inputs={"model": str(whole)}))
    error = end(executor).error
    assert error is not None
    assert error.message == f"one: what it reads cannot be sent: {whole}/weights: its content changed"
    assert error.failure is FailureClass.TRANSIENT


def test_the_pipelines_own_machine_needs_no_copies(
    workspace: Path, cluster: Isolated, executor: ClusterExecutor, url: Path
) -> None:
    cluster.sees_it = True
    one = submit(executor, job(workspace / "work", "one", command=sh("echo made > out/made")))
    assert end(executor).error is None
    assert (Path(one.attempt) / "out" / "made").read_text() == "made\n"
    assert not (url / "files").exists()


def test_everything_passes_through_s3(
    workspace: Path, cluster: Isolated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("moto", "s3fs"):
        pytest.importorskip(package, reason="needs the extras [test] and [remote]")
    whole = made(workspace, "download", {"weights": "w" * 20_000_000})
    with s3_server(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        executor = ClusterExecutor(cluster, Exchange("s3://engines/exchange"))
        try:
            script = f"cp {whole}/weights out; echo said"
            one = submit(executor, job(workspace / "work", "one", inputs={"model": str(whole)}, command=sh(script)))
            assert end(executor).error is None
        finally:
            executor.close()
    attempt = Path(one.attempt)
    assert (attempt / "out" / "weights").stat().st_size == 20_000_000
    assert (attempt / "log").read_text() == "said\n"
