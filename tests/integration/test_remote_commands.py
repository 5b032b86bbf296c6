"""Remote stores by real processes: an S3 server, a web server, pushes at once, kills in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import command_line
from tests.helpers.s3 import s3_server, server
from tests.helpers.signed import publish
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.servers.triton_server import unused_ports

LARGE = {f"rank{number}.engine": str(number) * 12_000_000 for number in range(2)}
SMALL = {"config.json": "{}", "rank0.engine": "weights" * 1000}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


def begin(folder: Path, *words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, "-m", "trtllm_pipeline", "store", *words),
        cwd=folder,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pipeline(folder: Path, *words: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    if environment is None:
        done = command_line.pipeline("store", *words, cwd=folder, code=None)
        return done.returncode, done.stdout + done.stderr
    process = begin(folder, *words, environment=environment)
    out, err = process.communicate(timeout=280)
    return process.returncode, out + err


def test_s3_there_and_back_again_with_a_wrong_file_in_the_end(tmp_path: Path, s3: dict[str, str]) -> None:
    import fsspec

    store = Store(tmp_path / "w")
    made = [publish(store, "a", LARGE), publish(store, "b", SMALL)]
    store.close()
    url = "s3://engines/nightly"
    code, told = pipeline(tmp_path, "push", url, "-w", "w", environment=s3)
    assert (code, told.count(" pushed ")) == (0, 2), told
    code, told = pipeline(tmp_path, "push", url, "-w", "w", environment=s3)
    assert (code, told.count("already there")) == (0, 3), told
    code, told = pipeline(tmp_path, "pull", url, "-w", "w2", environment=s3)
    assert (code, told.count(" pulled ")) == (0, 2), told
    assert pipeline(tmp_path, "verify", "-w", "w2") == (0, "2 checked, 0 damaged\n")
    files = fsspec.filesystem(
        "s3", key="test", secret="test", endpoint_url=s3["AWS_ENDPOINT_URL"], skip_instance_cache=True
    )
    (engine,) = files.glob(f"engines/nightly/artifacts/build/{made[0].fingerprint}/*/out/rank0.engine")
    files.pipe_file(engine, b"x" * 12_000_000)
    code, told = pipeline(tmp_path, "pull", url, "-w", "w3", environment=s3)
    assert code == 1
    assert f"refused: {engine.removeprefix('engines/nightly/')} is damaged there" in told
    assert [each.fingerprint for each in Store(tmp_path / "w3").index.all_artifacts()] == [made[1].fingerprint]


def test_a_remote_that_is_down_or_lacks_its_bucket_is_told(tmp_path: Path, s3: dict[str, str]) -> None:
    store = Store(tmp_path / "w")
    publish(store)
    store.close()
    nobody = {**s3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{unused_ports(1)[0]}", "AWS_MAX_ATTEMPTS": "1"}
    code, told = pipeline(tmp_path, "pull", "s3://engines/x", "-w", "w2", environment=nobody)
    assert code == 1
    assert "error: s3://engines/x" in told
    assert "Traceback" not in told
    code, told = pipeline(tmp_path, "push", "s3://no-such-bucket/x", "-w", "w", environment=s3)
    assert code == 1
    assert "Traceback" not in told
    assert "no-such-bucket" in told


@pytest.mark.seam
def test_a_web_server_is_pulled_from(tmp_path: Path) -> None:
    store = Store(tmp_path / "w")
    made = publish(store, "a", LARGE)
    store.close()
    assert pipeline(tmp_path, "push", "site/engines", "-w", "w")[0] == 0
    port = unused_ports(1)[0]
    words = ("http.server", str(port), "--bind", "127.0.0.1")
    with server(*words, port=port, folder=tmp_path / "site") as url:
        code, told = pipeline(tmp_path, "pull", f"{url}/engines", "-w", "w2")
        assert (code, told.count(" pulled ")) == (0, 1), told
        code, told = pipeline(tmp_path, "push", f"{url}/engines", "-w", "w")
        assert (code, "is read-only" in told) == (2, True)
    assert (tmp_path / f"w2/store/build/{made.fingerprint}/out/rank0.engine").read_text() == LARGE["rank0.engine"]


def test_pushes_and_pulls_killed_at_any_moment_leave_nothing_half(tmp_path: Path) -> None:
    store = Store(tmp_path / "w")
    for name in "abc":
        publish(store, name, {file: name + text for file, text in LARGE.items()})
    store.close()
    for words in (("push", "remote", "-w", "w"), ("pull", "remote", "-w", "w2")):
        for number in range(3):
            process = begin(tmp_path, *words)
            time.sleep(0.3 + 0.3 * number)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            # Whatever is there by now is whole.
            for manifest in (tmp_path / "remote").glob("artifacts/*/*/manifest.json"):
                for entry in json.loads(manifest.read_text())["files"]:
                    (sent,) = manifest.parent.glob(f"*/out/{entry['path']}")
                    assert sent.stat().st_size == entry["size"]
            if (tmp_path / "w2/store").is_dir():
                assert "0 damaged" in pipeline(tmp_path, "verify", "-w", "w2")[1]
        assert pipeline(tmp_path, *words)[0] == 0
    assert pipeline(tmp_path, "verify", "-w", "w2") == (0, "3 checked, 0 damaged\n")


def test_several_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    for workspace in ("w", "x"):
        store = Store(tmp_path / workspace)
        publish(store, "a", {file: text + workspace for file, text in LARGE.items()})
        publish(store, f"only {workspace}", SMALL)
        store.close()
    pushes = [begin(tmp_path, "push", "remote", "-w", workspace) for workspace in ("w", "w", "x")]
    assert [(process.communicate()[1], process.returncode)[1] for process in pushes] == [0, 0, 0]
    pulls = [begin(tmp_path, "pull", "remote", "-w", workspace) for workspace in ("y", "y", "z")]
    assert [(process.communicate()[1], process.returncode)[1] for process in pulls] == [0, 0, 0]
    for workspace in ("y", "z"):
        assert pipeline(tmp_path, "verify", "-w", workspace) == (0, "3 checked, 0 damaged\n")


def test_an_interrupt_is_told_and_goes_on_later(tmp_path: Path, s3: dict[str, str]) -> None:
    store = Store(tmp_path / "w")
    for name in "abc":
        publish(store, name, {file: name + text for file, text in LARGE.items()})
    store.close()
    process = begin(tmp_path, "push", "s3://engines/interrupted", "-w", "w", environment=s3)
    assert process.stderr is not None
    assert "3 artifacts to push" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=280)
    # Where Ctrl-C comes while a class is made (an exec), `python -m` ends by the signal itself: a shell says 130 for both.
    assert process.returncode in {130, -signal.SIGINT}, told
    assert "interrupted" in told
    assert "Traceback" not in told
    assert pipeline(tmp_path, "push", "s3://engines/interrupted", "-w", "w", environment=s3)[0] == 0


def run(folder: Path, workspace: str, url: str, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    """Starts a run of the tiny model up to its repositories."""
    asked = ("-m", "tiny", "--until", "repository", "-w", workspace, "--remote", url, "--progress", "plain")
    return subprocess.Popen(
        (sys.executable, "-m", "trtllm_pipeline", "run", *asked, *words),
        cwd=folder,
        env=os.environ | environment | {"XDG_RUNTIME_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stages(workspace: Path) -> list[str]:
    return sorted(path.parent.parent.name for path in workspace.glob("store/*/*/manifest.json"))


def test_a_run_pulls_what_is_there_and_makes_what_is_damaged(tmp_path: Path, s3: dict[str, str]) -> None:
    import fsspec

    url = "s3://engines/of-runs"
    first = run(tmp_path, "w", url, s3)
    assert (first.communicate(timeout=280), first.returncode)[1] == 0
    for stage in ("build", "download"):
        assert pipeline(tmp_path, "push", url, stage, "-w", "w", environment=s3)[0] == 0
    second = run(tmp_path, "w2", url, s3)
    _, told = second.communicate(timeout=280)
    assert second.returncode == 0, told
    assert f"pulling 3 artifacts from {url}" in told
    assert stages(tmp_path / "w2") == ["build", "build", "download", "repository", "repository"]
    artifact = max((tmp_path / "w").glob("store/build/*/manifest.json"), key=lambda path: path.stat().st_mtime)
    largest = max(json.loads(artifact.read_text())["files"], key=lambda each: each["size"])
    files = fsspec.filesystem(
        "s3", key="test", secret="test", endpoint_url=s3["AWS_ENDPOINT_URL"], skip_instance_cache=True
    )
    place = f"engines/of-runs/artifacts/build/{artifact.parent.name}/*/out/{largest['path']}"
    files.pipe_file(files.glob(place)[0], b"x" * largest["size"])
    third = run(tmp_path, "w3", url, s3)
    _, told = third.communicate(timeout=280)
    assert third.returncode == 0, told
    assert (told.count("is damaged there"), told.count("; it is built here")) == (1, 1)
    assert stages(tmp_path / "w3") == ["build", "build", "convert", "download", "repository", "repository"]
    assert "0 damaged" in pipeline(tmp_path, "verify", "-w", "w3")[1]
    # Where nobody answers, all is made.
    nobody = {**s3, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{unused_ports(1)[0]}", "AWS_MAX_ATTEMPTS": "1"}
    fourth = run(tmp_path, "w4", url, nobody, "--cells", "*/fp16/*")
    _, told = fourth.communicate(timeout=280)
    assert (fourth.returncode, told.count("; its artifacts are built here")) == (0, 1), told


def test_runs_killed_while_they_pull_leave_nothing_half(tmp_path: Path) -> None:
    first = run(tmp_path, "w", "remote", {})
    assert (first.communicate(timeout=280), first.returncode)[1] == 0
    assert pipeline(tmp_path, "push", "remote", "-w", "w")[0] == 0
    for number in range(6):
        process = run(tmp_path, "w2", "remote", {})
        time.sleep(0.3 + 0.12 * number)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = run(tmp_path, "w2", "remote", {})
    assert (last.communicate(timeout=280), last.returncode)[1] == 0
    assert stages(tmp_path / "w2") == ["build", "build", "download", "repository", "repository"]
    assert "0 damaged" in pipeline(tmp_path, "verify", "-w", "w2")[1]
    assert not list((tmp_path / "w2/work").rglob("*.pulled"))
