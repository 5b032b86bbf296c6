"""The guardian with real processes: what it reports, and that nothing survives what should end it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

import pytest

from tests.helpers.waiting import eventually
from trtllm_pipeline.base.errors import PipelineError
from trtllm_pipeline.base.processes.guardian import MARK
from trtllm_pipeline.base.processes.process import Exited, Guardian, ProcessEvent, Refused, Spawned

ROOT = Path(__file__).parents[2]


@pytest.fixture
def guardian() -> Iterator[Guardian]:
    with Guardian() as guardian:
        yield guardian


@pytest.fixture
def nap() -> str:
    """Seconds to sleep: minutes, and a number by which the sleepers of this test alone are found."""
    return f"{random.randint(100, 200)}.{random.randrange(10**9):09}"


def sleepers(nap: str) -> list[int]:
    """Pids of the processes with this number on their command line."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0") if name.isdigit() else []
        except OSError:
            continue
        if nap.encode() in words:
            found.append(int(name))
    return found


def wait_for(guardian: Guardian, kind: type[ProcessEvent] | UnionType, count: int = 1) -> list:
    """The events of this kind, once at least `count` have come. Others that come meanwhile are dropped."""
    found: list = []

    def enough() -> bool:
        select.select([guardian], [], [], 0.1)
        found.extend(event for event in guardian.read_events() if isinstance(event, kind))
        return len(found) >= count

    assert eventually(enough), f"no {kind}"
    return found


def shell(guardian: Guardian, tmp_path: Path, script: str, run_id: str = "run", **options) -> Path:
    log = tmp_path / "log"
    options = {"env": os.environ, "cwd": tmp_path, "log": log} | options
    guardian.spawn(run_id, ["sh", "-c", script], **options)
    return log


# What is reported.


@pytest.mark.seam
def test_a_process_runs_where_and_as_told_and_is_accounted_for(guardian: Guardian, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = (
        "import os, sys; x = b'x' * 60_000_000; print(os.getcwd(), os.environ['COLOUR'], file=sys.stderr); sys.exit(3)"
    )
    environment = {"COLOUR": "green", "PATH": os.environ["PATH"]}
    guardian.spawn("a", [sys.executable, "-S", "-c", code], env=environment, cwd=tmp_path, log=log)
    spawned, exited = wait_for(guardian, Spawned | Exited, 2)  # one read may find both
    assert spawned.id == exited.id == "a"
    assert exited.returncode == 3
    assert 60e6 < exited.max_rss_bytes < 200e6
    assert 0 < exited.user_s + exited.sys_s <= exited.wall_s + 0.1
    assert log.read_text() == f"before\n{tmp_path} green\n"
    assert exited.swept == 0


def test_a_pipeline_that_runs_below_another_marks_its_processes_whatever_their_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, "of the other")
    with Guardian() as below:
        log = shell(below, tmp_path, "env", env={"PATH": os.environ["PATH"]})
        wait_for(below, Exited)
    marks = [line for line in log.read_text().splitlines() if line.startswith(MARK)]
    assert len(marks) == 1
    assert marks != [f"{MARK}=of the other"]


def test_the_memory_of_all_processes_together_is_measured(guardian: Guardian, tmp_path: Path) -> None:
    # Two that hold memory at the same time, started by one that has next to none. Each waits for the other.
    hold = tmp_path / "hold.py"
    hold.write_text(
        "import os, sys, time\n"
        "x = b'x' * 50_000_000\n"
        "open(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[2]):\n"
        "    time.sleep(0.01)\n"
        "time.sleep(5)\n"
    )
    script = " & ".join(f"{sys.executable} -S {hold} {mine} {other}" for mine, other in ("ab", "ba")) + " & wait"
    shell(guardian, tmp_path, script, measure=True)
    (measured,) = wait_for(guardian, Exited)
    assert 50e6 < measured.max_rss_bytes < 90e6, "the largest of them"
    assert 100e6 < measured.peak_bytes < 160e6, "their sum"
    shell(guardian, tmp_path, script)
    (other,) = wait_for(guardian, Exited)
    assert other.peak_bytes == other.max_rss_bytes, "nobody looked"


def test_what_is_written_to_disks_and_to_shared_memory_is_measured(guardian: Guardian, tmp_path: Path) -> None:
    code = (
        "import os, time; f = open('file', 'wb'); f.write(os.urandom(20_000_000)); f.flush(); os.fsync(f.fileno());"
        "os.unlink('file'); n = f'/dev/shm/guardian-{os.getpid()}'; open(n, 'wb').write(b'x' * 50_000_000);"
        "time.sleep(5); os.unlink(n)"
    )
    guardian.spawn(
        "a", [sys.executable, "-S", "-c", code], env=os.environ, cwd=tmp_path, log=tmp_path / "log", measure=True
    )
    (exited,) = wait_for(guardian, Exited)
    assert exited.shared_bytes > 20e6, "what others give back in the meantime is missing"
    on_disk = subprocess.run(
        ["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    if on_disk.strip() != "tmpfs":
        assert 20e6 <= exited.written_bytes < 40e6, "though it is removed again"


@pytest.mark.seam
def test_a_process_is_a_session_with_default_signals_and_no_descriptors_of_others(
    guardian: Guardian, tmp_path: Path
) -> None:
    code = (
        "import os, signal; print(os.getsid(0) == os.getpid(), sorted(map(int, os.listdir('/proc/self/fd')))[:-1],"
        "[s.name for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_IGN],"
        "os.read(0, 1))"
    )
    guardian.spawn("a", [sys.executable, "-c", code], env=os.environ, cwd=tmp_path, log=tmp_path / "log")
    wait_for(guardian, Exited)
    assert (tmp_path / "log").read_text() == "True [0, 1, 2] [] b''\n"


def test_a_signal_that_ended_it_is_told(guardian: Guardian, tmp_path: Path) -> None:
    shell(guardian, tmp_path, "kill -SEGV $$")
    assert wait_for(guardian, Exited)[0].returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("argv", "options", "message"),
    [
        (["no-such-program"], {}, "cannot run no-such-program: No such file or directory"),
        (["true"], {"env": {"PATH": "/nowhere"}}, "cannot run true: No such file or directory"),
        (["/etc/passwd"], {}, "cannot run /etc/passwd: Permission denied"),
        (["true", "a\0b"], {}, "cannot run /"),
        (["true"], {"cwd": Path("/no/such/folder")}, "cannot change to the directory /no/such/folder: No such file"),
        (["true"], {"log": Path("/no/such/log")}, "cannot open the log /no/such/log: No such file or directory"),
        (["true"], {"log": Path("/")}, "cannot open the log /: Is a directory"),
    ],
)
def test_what_cannot_be_started_is_refused_in_words(
    guardian: Guardian, tmp_path: Path, argv: list[str], options: dict, message: str
) -> None:
    guardian.spawn("a", argv, **({"env": os.environ, "cwd": tmp_path, "log": tmp_path / "log"} | options))
    (refused,) = wait_for(guardian, Refused)
    assert refused.id == "a"
    assert refused.message.startswith(message)
    shell(guardian, tmp_path, "true")  # and it continues
    assert wait_for(guardian, Exited)[0].returncode == 0


def test_an_environment_too_long_for_a_packet(guardian: Guardian, tmp_path: Path) -> None:
    environment = {f"VARIABLE_{number}": "ü" * 50_000 for number in range(10)} | {"PATH": os.environ["PATH"]}
    with (tmp_path / "claim").open("w") as claim:
        log = shell(
            guardian, tmp_path, "echo ${#VARIABLE_9}; ls /proc/self/fd", env=environment, claim_fds=[claim.fileno()]
        )
        assert wait_for(guardian, Exited)[0].returncode == 0
    length, *fds = log.read_text().split()
    assert length in ("50000", "100000")
    assert len(fds) == 5  # three standard ones, the claim, and the directory that `ls` reads: not the long message


def test_an_id_in_use_is_refused(guardian: Guardian, tmp_path: Path, nap: str) -> None:
    shell(guardian, tmp_path, f"exec sleep {nap}")
    shell(guardian, tmp_path, "true")
    assert wait_for(guardian, Refused)[0].message.endswith("it runs already")


# What is left behind.

DAEMON = "(setsid sleep {nap} &)"
DEAF = "(trap '' TERM; touch deaf; exec {command}) & while [ ! -e deaf ]; do sleep 0.01; done"
BARE_DAEMON = "(env -i $(command -v setsid) $(command -v sleep) {nap} &)"


@pytest.mark.seam
@pytest.mark.parametrize(
    "left", ["sleep {nap} &", f"{DAEMON};", "setsid sh -c 'sleep {nap} & sleep {nap}' & sleep 0.1;"]
)
def test_what_a_process_leaves_behind_ends_with_it(guardian: Guardian, tmp_path: Path, nap: str, left: str) -> None:
    shell(guardian, tmp_path, left.format(nap=nap) + " sleep 0.05; exit 5")
    (exited,) = wait_for(guardian, Exited)
    assert exited.returncode == 5
    assert exited.swept >= 1
    assert not sleepers(nap)


def test_what_ignores_being_terminated_is_killed(guardian: Guardian, tmp_path: Path, nap: str) -> None:
    shell(guardian, tmp_path, DEAF.format(command=f"sleep {nap}"))
    began = time.monotonic()
    wait_for(guardian, Exited)
    assert time.monotonic() - began > 1.5
    assert not sleepers(nap)


def test_others_are_left_alone_when_one_ends(guardian: Guardian, tmp_path: Path, nap: str) -> None:
    shell(guardian, tmp_path, f"{DAEMON.format(nap=nap)}; sleep {nap}", "stays")
    assert eventually(lambda: len(sleepers(nap)) == 2)
    for number in range(5):
        shell(guardian, tmp_path, "sleep 0.01 & setsid sleep 0.01 & true", f"short {number}")
    wait_for(guardian, Exited, 5)
    assert len(sleepers(nap)) == 2


def test_a_claim_is_held_as_long_as_anything_of_the_stage_run_lives(
    guardian: Guardian, tmp_path: Path, nap: str
) -> None:
    claim = tmp_path / "claim"
    with claim.open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        deaf = DEAF.format(command=f"setsid sleep {nap}")
        script = f"{deaf}; while [ ! -e goes ]; do sleep 0.01; done"
        shell(guardian, tmp_path, script, claim_fds=[ours.fileno()])
        wait_for(guardian, Spawned)
    with claim.open() as other:

        def freed() -> bool:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        assert eventually(lambda: sleepers(nap))
        assert not freed()
        (tmp_path / "goes").touch()
        # The first process ends. Its daemon ignores what it is told, until it is killed.
        assert eventually(freed)
        assert not sleepers(nap)
        wait_for(guardian, Exited)


@pytest.mark.seam
def test_a_guardian_holds_the_claims_it_was_given_until_it_has_ended(tmp_path: Path) -> None:
    """Its stage runs do not have them: each has its own."""
    claim = tmp_path / "claim"
    claim.touch()
    with claim.open() as other:
        with claim.open() as ours:
            fcntl.flock(ours, fcntl.LOCK_EX)
            guardian = Guardian(claim_fds=(ours.fileno(),))
        with guardian:
            log = shell(guardian, tmp_path, "ls /proc/self/fd")
            wait_for(guardian, Exited)
            assert len(log.read_text().split()) == 4, "three standard ones, and the directory that `ls` reads"
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Ending.

STUBBORN = """
import os, signal, subprocess, sys, time
for signo in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signo, lambda signo, _: print(signal.Signals(signo).name, flush=True))
subprocess.Popen(["sleep", sys.argv[1]], process_group=0) if sys.version_info >= (3, 11) else None
print("up", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.seam
def test_end_interrupts_then_terminates_then_kills(guardian: Guardian, tmp_path: Path, nap: str) -> None:
    log = tmp_path / "log"
    guardian.spawn("a", [sys.executable, "-c", STUBBORN, nap], env=os.environ, cwd=tmp_path, log=log)
    assert eventually(lambda: "up" in log.read_text() if log.exists() else False)
    began = time.monotonic()
    guardian.end("a", 0.3)
    (exited,) = wait_for(guardian, Exited)
    assert time.monotonic() - began > 0.5
    assert exited.returncode == -signal.SIGKILL
    assert log.read_text().split() == ["up", "SIGINT", "SIGTERM"]
    assert not sleepers(nap)


def test_end_needs_no_force_for_what_obeys(guardian: Guardian, tmp_path: Path, nap: str) -> None:
    # The loop: a shell whose last command is interrupted before itself ends with that command's status.
    shell(guardian, tmp_path, f"trap 'exit 7' INT; setsid sleep {nap} & sleep {nap}; while true; do sleep 0.05; done")
    assert eventually(lambda: len(sleepers(nap)) == 2)
    guardian.end("run", 30)
    (exited,) = wait_for(guardian, Exited)
    assert exited.returncode == 7
    assert not sleepers(nap)


def test_a_signal_goes_to_the_first_process_or_to_all(guardian: Guardian, tmp_path: Path, nap: str) -> None:
    log = shell(
        guardian, tmp_path, f"trap 'echo told' USR1; setsid sleep {nap} & while kill -0 $!; do sleep 0.05; done"
    )
    assert eventually(lambda: sleepers(nap))
    guardian.signal("run", signal.SIGUSR1)
    assert eventually(lambda: "told" in log.read_text())
    assert sleepers(nap)
    guardian.signal("run", signal.SIGUSR1, whole=True)
    wait_for(guardian, Exited)
    assert not sleepers(nap)
    guardian.signal("run", signal.SIGUSR1)  # of one that is gone: nothing


@pytest.mark.seam
def test_closing_lets_services_stop_first_and_leaves_nothing(tmp_path: Path, nap: str) -> None:
    guardian = Guardian()
    log = shell(guardian, tmp_path, f"trap 'sleep 0.3; echo stopped; exit' TERM; sleep {nap} & wait")
    shell(
        guardian, tmp_path, f"{DAEMON} ; {BARE_DAEMON}; sleep {{nap}}".format(nap=nap), "other", log=tmp_path / "other"
    )
    assert eventually(lambda: len(sleepers(nap)) == 4)
    guardian.close()
    assert log.read_text() == "stopped\n"
    assert not sleepers(nap)
    guardian.close()


# Being killed.

CLIENT = """
import os, select, sys
from pathlib import Path
from trtllm_pipeline.base.processes.process import Guardian
directory, nap = Path(sys.argv[1]), sys.argv[2]
guardian = Guardian()
print(guardian.pid, flush=True)
for number in range(20):
    daemon = ["({setsid} sleep {nap} &);", "(env -i {setsid} {sleep} {nap} &);", "sleep {nap} &", ""][number % 4]
    daemon = daemon.format(nap=nap, setsid="/usr/bin/setsid", sleep="/bin/sleep")
    guardian.spawn(str(number), ["sh", "-c", f"{daemon} sleep {nap}"], env=os.environ, cwd=directory, log=directory / "log")
print("spawned", flush=True)
while True:
    select.select([guardian], [], [])
    guardian.read_events()
"""


@contextlib.contextmanager
def client(tmp_path: Path, nap: str) -> Iterator[subprocess.Popen]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CLIENT, str(tmp_path), nap]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.seam
@pytest.mark.parametrize("trial", range(4))
def test_killing_the_pipeline_at_any_moment_leaves_nothing(tmp_path: Path, nap: str, trial: int) -> None:
    with client(tmp_path, nap) as process:
        pid = int(process.stdout.readline())
        time.sleep(random.uniform(0, 0.25) if trial else 0)
        process.kill()
    assert eventually(lambda: not alive(pid))
    assert not sleepers(nap)


def test_signals_to_the_group_of_the_pipeline_do_not_reach_the_guardian(tmp_path: Path, nap: str) -> None:
    with client(tmp_path, nap) as process:
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "spawned\n"
        assert eventually(lambda: len(sleepers(nap)) == 36)  # 20 shells, 15 daemons, the client
        for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, signo)
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        assert alive(pid)
        assert len(sleepers(nap)) == 36
        os.killpg(process.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(pid))
    assert not sleepers(nap)


@pytest.mark.seam
@pytest.mark.parametrize(
    "script",
    [
        "(setsid sleep {nap} &); sleep {nap}",  # told by the variable in their environment
        "(env -i /bin/sleep {nap} &); exec env -i /bin/sleep {nap}",  # by their session
    ],
)
def test_a_killed_guardian_is_noticed_and_nothing_is_left(tmp_path: Path, nap: str, script: str) -> None:
    with Guardian() as guardian:
        shell(guardian, tmp_path, "true", "before", log=tmp_path / "before")
        wait_for(guardian, Exited)
        shell(guardian, tmp_path, script.format(nap=nap))
        assert eventually(lambda: len(sleepers(nap)) == 2)
        os.kill(guardian.pid, signal.SIGKILL)
        with pytest.raises(PipelineError, match="was killed"):
            wait_for(guardian, Exited)
        assert not sleepers(nap)


def test_the_guardian_imports_nothing_of_ours() -> None:
    code = "import sys; sys.path.append(sys.argv[1]); import guardian; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT / "trtllm_pipeline" / "base" / "processes")]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in modules if name.startswith("trtllm_pipeline")]
    assert len(modules) < 100, textwrap.fill(" ".join(modules))
