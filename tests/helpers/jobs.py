"""Jobs of no stage, for executors."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.helpers.waiting import eventually
from trtllm_pipeline.base.domain import Scope, StageRunId
from trtllm_pipeline.orchestrate.clusters.cluster import ClusterExecutor
from trtllm_pipeline.orchestrate.run.executor import Ended, ExecutorEvent, Job
from trtllm_pipeline.tensorrt.stage.base import JOB


def job(folder: Path, name: str, scope: Scope = Scope.ARTIFACT, **more: Any) -> Job:
    """A job of one command, with its attempt's directory; for the node "one"."""
    attempt = folder / f"{name}.1"
    (attempt / "out").mkdir(parents=True, exist_ok=True)
    return Job(
        id=StageRunId(name),
        stage=name,
        toolchain="toy",
        fingerprint=name,
        scope=scope,
        commands=(more.pop("command", ("true",)),),
        environment=more.pop("environment", {}),
        program=None,
        params_class="",
        params={},
        inputs=more.pop("inputs", {}),
        files=more.pop("files", {}),
        out=str(attempt / "out"),
        attempt=str(attempt),
        timeout_s=60.0,
        section=name,
        node=more.pop("node", "one"),
        **more,
    )


def submit(executor: ClusterExecutor, of: Job) -> Job:
    """Start a job whose file is where nodes read it."""
    of.write(Path(of.attempt) / JOB)
    executor.submit(of, [])
    return of


def end(executor: ClusterExecutor) -> Ended:
    """The first that happens, which is an end."""
    found: list[ExecutorEvent] = []
    assert eventually(lambda: found.extend(executor.wait(0.1)) or found), "nothing ended"
    assert isinstance(found[0], Ended)
    return found[0]


def isolated(workspace: Path, *command: str) -> list[str]:
    """The command, where another disk is in the place of `workspace`."""
    script = 'mount -t tmpfs none "$1" && shift && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", str(workspace), *command]


def may_isolate(workspace: Path) -> bool:
    """Whether such a command can be run here."""
    return subprocess.run(isolated(workspace, "true"), capture_output=True, check=False).returncode == 0
