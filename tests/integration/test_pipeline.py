"""The whole way, as a user goes it: `pipeline` in a process of its own, a tiny model, a real Triton."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import trtllm_pipeline
from tests.helpers import command_line
from tests.helpers.signed import write_key
from tests.helpers.waiting import eventually
from trtllm_pipeline.orchestrate.matrix.recipe_files import matrices_folder

TINY = str(matrices_folder() / "tiny.yaml")
BUILDS_ONLY = ("--until", "repository")


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trtllm_pipeline", *words],
        cwd=cwd,
        env={**os.environ, "XDG_RUNTIME_DIR": str(cwd), "COLUMNS": "140"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pipeline(*words: str, cwd: Path, code: int = 0) -> str:
    """What a command prints. What runs stages is a process of its own."""
    if words[0] not in {"run", "resume", "stage"}:
        return command_line.pipeline(*words, cwd=cwd, code=code, XDG_RUNTIME_DIR=str(cwd), COLUMNS="140").stdout
    process = start(*words, cwd=cwd)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"{words}: exit code {process.returncode}, expected {code}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return out


def plan(*words: str, cwd: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pipeline("plan", *words, "--format", "json", cwd=cwd))
    return found


def to_run(planned: dict[str, Any]) -> list[str]:
    return [run["stage"] for run in planned["stage_runs"] if run["action"] == "run"]


def artifacts(workspace: Path) -> dict[str, dict[str, str]]:
    """Digests of every file of every artifact, as the manifests have them."""
    found = {}
    for path in sorted((workspace / "store").glob("*/*/manifest.json")):
        manifest = json.loads(path.read_text())
        files = {file["path"]: file.get("blake3", file.get("link")) for file in manifest["files"]}
        found[f"{path.parent.parent.name}/{path.parent.name}"] = files
    return found


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that work below `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in words and int(entry.name) != os.getpid():
                found.append(words)
    return found


def wait_until_gone(folder: Path) -> None:
    assert eventually(lambda: not left_over(folder)), left_over(folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which the tiny matrix ran from end to end."""
    folder = tmp_path_factory.mktemp("done")
    out = pipeline("run", "--matrix", TINY, cwd=folder)
    assert "2 cells: 2 done" in out
    yield folder
    wait_until_gone(folder)


@pytest.mark.seam
def test_every_cell_ends_with_numbers(done: Path) -> None:
    report = json.loads(pipeline("report", "--format", "json", cwd=done))
    assert len(report["cells"]) == 2
    for cell in report["cells"]:
        assert cell["status"] == "done"
        assert cell["engine_size_bytes"] > 1_000_000
        assert [level["concurrency"] for level in cell["perf"]] == [1, 2]
        assert all(level["ttft_ms"]["p50"] > 0 and level["output_tokens_per_s"] > 0 for level in cell["perf"])
        assert cell["accuracy"].keys() >= {"exact", "contains"}


@pytest.mark.seam
def test_the_next_server_is_loaded_while_nothing_is_measured(done: Path) -> None:
    """By the times of all attempts, from the history."""
    attempts = times(done / ".pipeline", "attempts")
    servers = [each for each in attempts if each["stage"] == "launch"]
    measured = [each for each in attempts if each["stage"] == "perf"]
    assert len(servers) == len(measured) == 2
    first, second = sorted(servers, key=lambda each: each["started_s"])
    assert measured[0]["ended_s"] <= second["started_s"] < first["ended_s"], "it is loaded beside the rest of the first"
    for each in measured:
        beside = [other for other in attempts if overlap(each, other) and other is not each]
        assert [other["stage"] for other in beside] == ["launch"], "its own server, and nothing else"


def times(workspace: Path, table: str) -> list[dict[str, Any]]:
    """Rows of the index, oldest first."""
    with closing(sqlite3.connect(workspace / "state.db")) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(f"SELECT * FROM {table} ORDER BY started_s")]


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(max(one["started_s"], other["started_s"]) < min(one["ended_s"], other["ended_s"]))


def test_a_moved_workspace_says_what_to_do_and_keeps_all_but_its_repositories(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    pipeline("run", "--matrix", TINY, "--cells", "tiny/fp16", "--until", "repository", cwd=old)
    before = artifacts(old / ".pipeline")
    old.rename(new)
    out = pipeline("resume", "--until", "smoke", cwd=new, code=1)
    assert "the workspace was moved" in " ".join(out.split())
    repositories = new / ".pipeline" / "store" / "repository"
    assert f"rm -r {repositories}" in " ".join(out.split())
    shutil.rmtree(repositories)
    pipeline("resume", "--until", "smoke", cwd=new)
    after = artifacts(new / ".pipeline")
    assert {name for name, digests in before.items() if after[name] != digests} == {
        name for name in before if name.startswith("repository/")
    }
    wait_until_gone(new)


def test_a_missing_repository_is_told_with_the_command_that_writes_it(done: Path, tmp_path: Path) -> None:
    """A run does not write it if only finished measurements would read it."""
    copied = tmp_path / "w"
    shutil.copytree(done / ".pipeline", copied)
    shutil.rmtree(copied / "store" / "repository")
    asked = ("--matrix", TINY, "--cells", "tiny/fp16", "--workspace", str(copied))
    assert "1 up to date" in pipeline("run", *asked, cwd=tmp_path)
    process = start("serve", "start", "tiny/fp16", "--workspace", str(copied), cwd=tmp_path)
    said = process.communicate(timeout=300)[1]
    assert "is not built in" in said
    command = shlex.split(said.partition("try: pipeline ")[2])
    assert " --until repository " in said
    pipeline(*command, cwd=tmp_path)
    assert len([*copied.glob("store/repository/*/out/ensemble/config.pbtxt")]) == 1


def listing(store: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of all that is in a store."""
    found = {path: path.lstat() for path in store.rglob("*") if not path.is_dir()}
    return {str(path.relative_to(store)): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def test_any_folder_is_a_workspace_and_nothing_is_written_into_an_artifact(tmp_path: Path) -> None:
    workspace = tmp_path / "a b'\";$(touch OWNED)`touch OWNED`(&*\\\n世ü" / "w"
    workspace.parent.mkdir()
    asked = ("run", "--matrix", TINY, "--cells", "tiny/fp16", "--workspace", str(workspace))
    pipeline(*asked, *BUILDS_ONLY, cwd=tmp_path)
    for code in workspace.glob("store/repository/*/out/*/1/model.py"):  # as a server of an earlier release left it
        compiled = Path(importlib.util.cache_from_source(str(code)))
        compiled.parent.mkdir()
        stat = code.stat()
        times = (int(stat.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little") + stat.st_size.to_bytes(4, "little")
        compiled.write_bytes(importlib.util.MAGIC_NUMBER + bytes(4) + times + b"torn")
    before = listing(workspace / "store")
    pipeline(*asked, cwd=tmp_path)
    after = listing(workspace / "store")
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} == {"smoke", "perf", "accuracy"}
    assert {name: after[name] for name in before} == before
    assert not any(path.suffix == ".pyc" for path in (workspace / "store").glob("[!r]*/**/*"))
    assert not list(tmp_path.rglob("OWNED"))
    wait_until_gone(tmp_path)


@pytest.mark.seam
def test_the_second_time_nothing_runs(done: Path) -> None:
    assert to_run(plan("--matrix", TINY, cwd=done)) == []
    before = artifacts(done / ".pipeline")
    assert "2 up to date" in pipeline("run", "--matrix", TINY, cwd=done)
    assert artifacts(done / ".pipeline") == before


@pytest.mark.seam
def test_a_new_batch_size_reuses_the_checkpoint_and_says_why(done: Path) -> None:
    changed = ("--set", "axes.max_batch_size=[2]", "--cells", "tiny/fp16")
    planned = plan("--matrix", TINY, *changed, cwd=done)
    assert to_run(planned) == ["build", "repository", "launch", "smoke", "perf", "accuracy"]
    pipeline("run", "--matrix", TINY, *changed, *BUILDS_ONLY, cwd=done)
    out = pipeline("explain", "tiny/fp16", "build", "--matrix", TINY, "--set", "axes.max_batch_size=[3]", cwd=done)
    assert "not made yet" in out  # another batch size is another cell
    setting = ("--matrix", TINY, "--set", "settings.perf.requests=5")
    out = pipeline("explain", "tiny/fp16", *setting, cwd=done)
    assert "params.requests 4 -> 5" in out
    assert "smoke       up to date" in out


def test_going_back_costs_nothing(done: Path) -> None:
    assert to_run(plan("--matrix", TINY, "--set", "settings.perf.requests=5", cwd=done)) == ["launch", "perf"] * 2
    assert to_run(plan("--matrix", TINY, cwd=done)) == []


@pytest.mark.seam
def test_the_lock_plans_the_same(done: Path, tmp_path: Path) -> None:
    lock = min((done / ".pipeline" / "runs").glob("*/lock"))  # of the first run, that of the whole matrix
    runs = json.loads((lock.parent / "plan.json").read_text())["stage_runs"]
    shutil.copytree(lock, tmp_path / "lock")
    for folder, workspace in ((done, ".pipeline"), (tmp_path, "elsewhere")):
        again = plan("--matrix", str(tmp_path / "lock" / "matrix.yaml"), "--workspace", workspace, cwd=folder)
        assert [run["fingerprint"] for run in again["stage_runs"]] == [run["fingerprint"] for run in runs]
        assert (to_run(again) == []) == (folder == done)


@pytest.mark.seam
def test_a_stage_run_can_be_replayed_by_hand(done: Path) -> None:
    artifact = min((done / ".pipeline/store/convert").iterdir())
    out = pipeline("stage", "replay", str(artifact / "job.json"), "--output-dir", "replay", cwd=done)
    assert Path(out.split()[-1]) == done / "replay" / "out"
    for file in (artifact / "out").iterdir():
        assert (done / "replay" / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.seam
def test_logs_status_and_store(done: Path) -> None:
    assert "fp16" in pipeline("logs", "tiny/fp16", "convert", cwd=done)
    told = json.loads(pipeline("logs", "tiny/fp16", "convert", "--format", "json", cwd=done))
    assert "fp16" in told["lines"][-1]
    assert Path(told["path"]).is_file()
    assert "accuracy" in pipeline("status", "--matrix", TINY, cwd=done)
    assert "0 damaged" in pipeline("store", "verify", cwd=done)
    (done / ".pipeline" / "state.db").unlink()
    assert to_run(plan("--matrix", TINY, cwd=done)) == []


@pytest.mark.parametrize("after_s", [0.0, pytest.param(1.5, marks=pytest.mark.nightly)])
def test_neither_of_two_servers_survives_a_kill_of_the_pipeline(tmp_path: Path, after_s: float) -> None:
    process = start("run", "--matrix", TINY, "--progress", "json", cwd=tmp_path)
    begun: set[str] = set()
    assert process.stderr is not None
    for line in process.stderr:
        told = json.loads(line) if line.startswith("{") else {}
        if told.get("status") == "running" and str(told.get("stage_run")).startswith("launch"):
            begun.add(told["stage_run"])
        if len(begun) == 2:
            break
    assert len(begun) == 2
    time.sleep(after_s)
    process.kill()
    process.communicate()
    wait_until_gone(tmp_path)
    # The first cell may have been done with all that it needs before the kill.
    assert re.search(r"2 cells: (2 done|1 done, 1 up to date)\b", pipeline("resume", cwd=tmp_path))
    assert "0 damaged" in pipeline("store", "verify", cwd=tmp_path)
    made = [json.loads(path.read_text())["stage"] for path in (tmp_path / ".pipeline/store").glob("*/*/manifest.json")]
    assert made.count("perf") == made.count("accuracy") == 2
    wait_until_gone(tmp_path)


def test_two_runs_at_once_do_everything_once(tmp_path: Path) -> None:
    runs = [start("run", "--matrix", TINY, cwd=tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in runs]
    assert [process.returncode for process in runs] == [0, 0], outputs
    made = []
    for path in (tmp_path / ".pipeline" / "store").glob("*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest["provenance"]["attempt"] == 1
        made.append(manifest["stage"])
    assert sorted(made) == sorted(["download", *["convert", "build", "repository", "smoke", "perf", "accuracy"] * 2])
    assert to_run(plan("--matrix", TINY, cwd=tmp_path)) == []


def test_an_interrupt_stops_cleanly_and_resume_goes_on(tmp_path: Path) -> None:
    process = start("run", "--matrix", TINY, "--cells", "tiny/fp16", "--until", "smoke", cwd=tmp_path)
    while not list((tmp_path / ".pipeline" / "work").glob("*/service.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 130
    assert "pipeline resume" in err
    assert "Traceback" not in err
    wait_until_gone(tmp_path)
    assert "1 done" in pipeline("resume", "--until", "smoke", cwd=tmp_path)


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(small)], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        process = start("run", "--matrix", TINY, *BUILDS_ONLY, cwd=small)
        out, err = process.communicate(timeout=280)
        assert process.returncode == 1, out + err
        assert "disk" in err.lower() or "disk" in out.lower()
        assert "Traceback" not in err
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        assert "2 done" in pipeline("resume", cwd=small)
    finally:
        wait_until_gone(small)
        subprocess.run(["umount", str(small)], check=True)


def test_a_single_stage_leaves_the_latest_run_what_it_was(done: Path) -> None:
    before = pipeline("report", "--format", "json", cwd=done)
    (folder,) = json.loads(
        pipeline("stage", "convert", "--matrix", TINY, "--cells", "tiny/fp16", "--format", "json", cwd=done)
    )["cells"].values()
    assert Path(folder).is_dir()
    assert pipeline("report", "--format", "json", cwd=done) == before


def test_faults_of_a_data_file_are_said_where_the_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"input": "a"}\n' * 80_000 + '{"input": 5}\n')  # too far behind for a plan
    words = ("--set", f"settings.perf.input_data={tmp_path}/prompts.jsonl", "--cells", "tiny/fp16")
    process = start("run", "--matrix", TINY, *words, "--format", "json", cwd=tmp_path)
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 1
    (cell,) = json.loads(out)["cells"]
    assert cell["failed_stage"] == "perf"
    assert "prompts.jsonl:80001: input" in cell["reason"]
    assert cell["failure"] == "user"


def test_what_failed_is_never_taken_and_what_was_asked_otherwise_never_compared(done: Path) -> None:
    first = min((done / ".pipeline" / "runs").iterdir()).name
    pipeline("run", "--matrix", TINY, "--set", "settings.accuracy.min_score=0.9", cwd=done, code=1)
    taken = json.loads(pipeline("recommend", "--format", "json", cwd=done, code=3))
    assert [each["cell"] for each in taken["recommended"]] == [None]
    assert all("expected at least 0.9" in each["reason"] for each in taken["candidates"])
    assert all(each["accuracy"] is not None for each in taken["candidates"]), "the failing score is there to be seen"
    compared = pipeline("compare", "latest", first, "--fail-on", "ttft_p50:+1000%", cwd=done, code=1)
    assert "accuracy failed: exact is" in compared
    shorter = ("--set", "settings.perf.max_tokens=8", "--cells", "tiny/fp16")
    pipeline("run", "--matrix", TINY, *shorter, cwd=done)
    gate = ("--cells", "tiny/fp16", "--fail-on", "ttft_p50:+1000%", "--format", "json")
    (refused,) = json.loads(pipeline("compare", "latest", first, *gate, cwd=done, code=4))["refused"]
    different = {each["field"]: (each["base"], each["new"]) for each in refused["differences"]}
    assert different.keys() == {"prompts_digest", "max_tokens"}, "the prompts of a cell have its output length"
    assert different["max_tokens"] == ("16", "8")
    allowed = json.loads(pipeline("compare", "latest", first, *gate, "--allow", "workload", cwd=done))
    assert allowed["gate"]["holds"]
    assert {each["field"] for each in allowed["differences"]} >= different.keys()
    assert json.loads(pipeline("compare", first, first, *gate, cwd=done))["gate"]["holds"]
    measured = json.loads(pipeline("report", "--run", first, "--format", "json", cwd=done))["cells"][0]
    assert measured["conditions"]["system"]["server"].startswith("triton ")
    assert measured["conditions"]["system"]["server_on"] == "this machine"
    assert measured["conditions"]["workload"]["max_tokens"] == [16, 16]
    assert [level["requests"] for level in measured["conditions"]["workload"]["levels"]] == [4, 7]
    assert measured["perf"][0]["output_tokens_per_request"]["mean"] == 16


def test_an_artifact_of_other_code_is_marked_and_stays_up_to_date(done: Path, tmp_path: Path) -> None:
    """Two states of the pipeline's code in one workspace."""
    assert "created by other code" not in pipeline("explain", "tiny/fp16", "--matrix", TINY, cwd=done)
    changed = tmp_path / "changed" / "trtllm_pipeline"
    shutil.copytree(Path(trtllm_pipeline.__file__).parent, changed, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(matrices_folder().parent / "recipes", changed.parent / "recipes")
    with (changed / "tensorrt/embedded/build.py").open("a", encoding="utf-8") as file:
        file.write("\n# a branch\n")
    words = ("explain", "tiny/fp16", "build", "--matrix", TINY, "--workspace", str(done / ".pipeline"))
    shown = subprocess.run(
        [sys.executable, "-m", "trtllm_pipeline", *words],
        cwd=changed.parent,
        env={**os.environ, "PYTHONPATH": str(changed.parent)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"build +up to date", shown), shown
    made = json.loads(next((done / ".pipeline/store/build").glob("*/manifest.json")).read_text())["provenance"][
        "system"
    ]
    assert f"created by other code: {made['code']} (this is " in shown


def test_a_policy_in_the_environment_holds_for_what_a_run_finds(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_REQUIRE_SIGNED", "1")
    key = write_key(done, "me")
    builds = ("run", "--matrix", TINY, *BUILDS_ONLY)
    assert "needs the trusted public keys" in refused(*builds, cwd=done)
    monkeypatch.setenv("PIPELINE_TRUSTED_KEYS", str(done / "trusted"))
    engine = next((done / ".pipeline/store/build").iterdir())
    repository = next((done / ".pipeline/store/repository").iterdir())
    job = ("stage", "replay", str(engine / "job.json"), "--output-dir", "replayed")
    by_hand = ("stage", "launch", "--toolchain", "embedded", "--repository")
    for words in (builds, (*by_hand, str(repository / "out")), job):
        assert "is not signed" in refused(*words, cwd=done)
    assert "so it cannot be signed" in refused(*by_hand, str(repository), cwd=done)
    pipeline("store", "provenance", "--sign", str(key), cwd=done)
    assert "2 up to date" in pipeline(*builds, cwd=done)
    pipeline(*job, cwd=done)
    # Also what only another run wants: a new engine of a checkpoint that is signed.
    changed = ("--set", "axes.max_batch_size=[3]", "--cells", "tiny/fp16", *BUILDS_ONLY)
    pipeline("run", "--matrix", TINY, *changed, cwd=done)
    assert "is not signed" in refused("run", "--matrix", TINY, *changed, cwd=done)


def refused(*words: str, cwd: Path) -> str:
    process = start(*words, cwd=cwd)
    err = process.communicate(timeout=300)[1]
    assert process.returncode in {1, 2}, err
    assert "Traceback" not in err, err
    return err
