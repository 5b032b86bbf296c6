"""The start script of a bundle: a shell program, run here with programs that only say how they were started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trtllm_pipeline.tensorrt.servers import start_script

SAYS = (
    '#!/bin/sh\n[ "${1:-}" = --help ] && echo "  --http-restricted-api <x>" && exit\nprintf "%s\\n" "${0##*/}" "$@"\n'
)
SERVE = ["trtllm-serve", "@BUNDLE@/model", "--tp_size", "2", "--config", "@repository@/llm_api.yaml", "it's $HOME `x`"]


def bundle(folder: Path, kind: str, **options: object) -> Path:
    (folder / "repository" / "model").mkdir(parents=True)
    (folder / "repository" / "model" / "config.pbtxt").write_text('x: "@BUNDLE@/engine"\n')
    start = folder / "start"
    start.write_text(start_script.script(kind, **options))  # type: ignore[arg-type]
    start.chmod(0o755)
    return folder


PROGRAMS = ("pipeline", "tritonserver", "mpirun", "trtllm-serve", "trtllm-llmapi-launch")


def started(
    folder: Path, *words: str, code: int = 0, installed: Sequence[str] = PROGRAMS, **variables: str
) -> list[str]:
    """What the script starts, a word a line; paths below its own directory are cut to WORK."""
    programs = folder.parent / f"bin-{len(installed)}"
    programs.mkdir(exist_ok=True)
    for name in installed:
        (programs / name).write_text(SAYS)
        (programs / name).chmod(0o755)
    work = folder.parent / "work"
    for name in (
        "cat",
        "chmod",
        "cp",
        "dirname",
        "find",
        "ln",
        "mkdir",
        "mktemp",
        "od",
        "rm",
        "sed",
        "sh",
        "sleep",
        "tr",
    ):
        if not (programs / name).exists():
            (programs / name).symlink_to(shutil.which(name) or name)
    path = str(programs)
    done = subprocess.run(
        [str(folder / "start"), *words],
        env={"PATH": path, "BUNDLE_WORK": str(work), **variables},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout.replace(str(work), "WORK").splitlines() if code == 0 else done.stderr.splitlines()


@pytest.mark.parametrize("name", ["b", "a b'$(touch x)`\"\\ü|&"])
def test_a_bundle_in_any_folder(name: str, tmp_path: Path) -> None:
    folder = bundle(tmp_path / name, "embedded")
    words = started(folder, HTTP_PORT="1", HOST="::1")
    assert words == [
        *("pipeline", "stage", "launch", "--toolchain", "embedded", "--repository", "WORK/repository", "--host", "::1"),
        *("--http-port=1", "--grpc-port=8001", "--metrics-port=8002"),
    ]
    filled = (tmp_path / "work" / "repository" / "model" / "config.pbtxt").read_text()
    assert filled == f'x: "{tmp_path}/work/bundle/engine"\n'
    assert (tmp_path / "work" / "bundle").resolve() == folder.resolve()
    assert (folder / "repository" / "model" / "config.pbtxt").read_text() == 'x: "@BUNDLE@/engine"\n', "only read"


def test_ranks_are_started_as_the_launch_stage_does(tmp_path: Path) -> None:
    words = started(bundle(tmp_path / "b", "engine", world_size=2, release="1.0.0"))
    first, second = words[: words.index(":")], words[words.index(":") :]
    assert words[0] == "mpirun"
    assert "--http-address=127.0.0.1" in first
    assert "--http-port=8000" in first
    assert "--allow-http=false" in second
    prefixes = [word.partition("=")[2] for word in words if word.startswith("--backend-config=")]
    assert len(set(prefixes)) == 2
    assert all(prefix.endswith(f"-{rank}_") for rank, prefix in enumerate(prefixes)), prefixes
    assert sum(word.startswith("--http-restricted-api=shared-memory,model-repository,") for word in words) == 2
    assert not any(word.startswith("--grpc-restricted") for word in words), "this Triton has no such option"


def options(command: list[str]) -> list[str]:
    """The program and its options without their values, some of which are random."""
    return [word.partition("=")[0] for word in command]


def test_one_rank_needs_no_mpirun(tmp_path: Path) -> None:
    new = bundle(tmp_path / "a", "engine", world_size=1, release="1.0.0")
    old = bundle(tmp_path / "b", "engine", world_size=1, release="0.12.0")
    without = [name for name in PROGRAMS if name != "mpirun"]
    alone = started(new)
    assert alone[0] == "tritonserver"
    assert started(bundle(tmp_path / "c", "llmapi", world_size=4, release="1.0.0"))[0] == "tritonserver"
    by_mpirun = started(old)
    assert by_mpirun[0] == "mpirun"
    assert options(by_mpirun[by_mpirun.index("tritonserver") :]) == options(alone)
    assert options(started(old, installed=without)) == options(alone)


def test_mpirun_is_used_for_one_rank_if_its_options_ask_for_it(tmp_path: Path) -> None:
    new = bundle(tmp_path / "a", "engine", world_size=1, release="1.0.0")
    assert started(new, MPIRUN_OPTIONS="--host a:1")[:3] == ["mpirun", "--host", "a:1"]
    without = [name for name in PROGRAMS if name != "mpirun"]
    for folder in (new, bundle(tmp_path / "b", "engine", world_size=1, release="0.12.0")):
        *_, said = started(folder, code=2, installed=without, MPIRUN_OPTIONS="--host a:1")
        assert said.startswith("error: mpirun is not on PATH")


def test_trtllm_serve(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", "trtllm_serve", world_size=2, command=SERVE)
    assert started(folder) == [
        *("trtllm-serve", "WORK/bundle/model", "--tp_size", "2", "--config", "WORK/repository/llm_api.yaml"),
        *("it's $HOME `x`", "--host", "127.0.0.1", "--port", "8000"),
    ]
    words = started(folder, MPIRUN_OPTIONS="--host a:1,b:1 --mca x y")
    assert words[:6] == ["mpirun", "--host", "a:1,b:1", "--mca", "x", "y"]
    assert words[words.index("-n") : words.index("-n") + 4] == ["-n", "2", "trtllm-llmapi-launch", "trtllm-serve"]


def test_prepare_only_fills(tmp_path: Path) -> None:
    assert started(bundle(tmp_path / "b", "engine", world_size=2, release="1.0.0"), "prepare") == []
    assert (tmp_path / "work" / "repository" / "model" / "config.pbtxt").exists()


def test_what_it_lacks_is_said(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", "embedded")
    (said,) = started(folder, code=2, PATH=os.defpath)
    assert said.startswith("error: pipeline is not on PATH")
    (said,) = started(folder, code=2, BUNDLE_WORK="a b")
    assert "have to be absolute" in said
    assert not (tmp_path / "a b").exists()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", "embedded")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    words = started(folder, BUNDLE_WORK="", TMPDIR=str(temporary))
    assert words[6].startswith(f"{temporary}/bundle.")
    assert list(temporary.iterdir()) == []


KILLED = """#!/bin/sh
[ "${1:-}" != --help ] || exit 0
for word in "$@"; do
    case $word in *shm-region-prefix-name=*) echo "${word##*=}"; : > "/dev/shm/${word##*=}region" ;; esac
done
kill -9 $$
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_server_leaves_nothing_in_shared_memory(ranks: int, tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", "engine", world_size=ranks, release="1.0.0")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("tritonserver", "mpirun"):
        (programs / name).write_text(KILLED)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:{os.defpath}", "TMPDIR": str(tmp_path)}
    command = [str(folder / "start")]
    ended = [subprocess.run(command, env=environment, capture_output=True, text=True, check=False) for _ in range(2)]
    assert [each.returncode for each in ended] == [137, 137]
    prefixes = [prefix for each in ended for prefix in each.stdout.split()]
    assert len(set(prefixes)) == 2 * ranks, "of each start its own"
    assert not [path for prefix in prefixes for path in Path("/dev/shm").glob(f"{prefix}*")]
    assert not list(tmp_path.glob("bundle.*"))


WAITS = f"""#!{sys.executable}
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("up", flush=True)
time.sleep(30)
"""


def test_it_ends_its_server_when_it_is_told_to_end(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", "embedded")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "pipeline").write_text(WAITS)
    (programs / "pipeline").chmod(0o755)
    environment = {"PATH": f"{programs}:{os.defpath}", "TMPDIR": str(tmp_path)}
    with subprocess.Popen([str(folder / "start")], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(60) == 0, "that it ends when told is no failure"
    assert not list(tmp_path.glob("bundle.*"))
