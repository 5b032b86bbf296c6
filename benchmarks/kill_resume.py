"""Kill a run at random instants, or cut the power, resume it, repeat, and check the remains.

    python benchmarks/kill_resume.py --matrix matrices/quickstart.yaml --kills 200
    python benchmarks/kill_resume.py --toy 64 --kills 50 --how power --longest 3

Each round starts `pipeline run` (all of `--at-once` of them on one workspace) and does one of these after a random time:

    group      kill -9 of the pipeline, its guardian and all processes that they started
    pipeline   kill -9 of the pipeline alone
    child      kill -9 of one direct or indirect child process. The run is left to end
    power      the workspace is on a separate file system, ext4 on a loop device, which is shut down without
               writing its journal: unsynced data is lost, as in a power cut. Needs root and mkfs.ext4

Then no process may be left, no finished stage run may be repeated, and no artifact may be torn: the files of every artifact
are compared with their digests. A power cut must keep the stage runs that the pipeline reported as done, by its events on a
disk that keeps its power. Other losses are counted. When a run has finished everything, the next one starts in a
new workspace.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from trtllm_pipeline.orchestrate.store.manifest import Kind, inspect

HOW: Final = ("group", "pipeline", "child", "power")
_SHUTDOWN: Final = 0x8004587D
"""EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32). Source: include/uapi/linux/ext4.h."""
_NO_LOG_FLUSH: Final = 2
_DISK_BYTES: Final = 3 << 30
"""Size of the file, most of it never written, that the file system is in."""
_ENDS_S: Final = 30.0
"""Seconds in which everything has ended after a kill."""
_RUN_S: Final = 600.0
"""Seconds for a run to end after one of its processes was killed."""


class Disk:
    """A directory, optionally on a disk whose power can be cut."""

    def __init__(self, folder: Path, *, real: bool) -> None:
        self.folder = folder / "disk"
        self.folder.mkdir()
        self._image = folder / "image"
        self._real = real
        if real:
            with self._image.open("wb") as file:
                file.truncate(_DISK_BYTES)
            subprocess.run(["mkfs.ext4", "-q", "-F", self._image], check=True)
            self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.folder], check=True)

    def cut_power(self) -> None:
        """From now on nothing reaches the disk."""
        fd = os.open(self.folder, os.O_RDONLY)
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        os.close(fd)

    def come_back(self) -> None:
        """Start again with what had reached the disk."""
        self.close()
        self._mount()

    def close(self) -> None:
        """Unmount it."""
        until = time.monotonic() + _ENDS_S
        # A killed process has no command line any more, and its files until the kernel has taken its memory apart.
        while self._real and subprocess.run(["umount", self.folder], capture_output=True, check=False).returncode:
            if time.monotonic() > until:
                raise SystemExit(f"{self.folder}: something still uses it")
            time.sleep(0.1)


def main() -> int:
    """Run the rounds. Returns 0 if nothing was torn, redone or left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", default="matrices/quickstart.yaml")
    parser.add_argument("--toy", type=int, metavar="CELLS", help="a matrix of toy.py instead, 64 cells or more")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--how", default=",".join(HOW[:3]), help="which kills, at random: " + ", ".join(HOW))
    parser.add_argument(
        "--at-once", type=int, default=1, help="concurrent runs on the workspace, all of which are killed"
    )
    parser.add_argument("--longest", type=float, default=12.0, help="seconds from a start to its kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kinds = args.how.split(",")
    if set(kinds) - set(HOW):
        parser.error(f"--how: expected some of {', '.join(HOW)}")
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    disk = Disk(folder, real="power" in kinds)
    try:
        return rounds(args, kinds, folder, disk)
    finally:
        disk.close()
        shutil.rmtree(folder)


def rounds(args: argparse.Namespace, kinds: list[str], folder: Path, disk: Disk) -> int:
    """All rounds, and the last run that must finish everything."""
    chance = random.Random(args.seed)
    workspace = disk.folder / "w"
    words = [sys.executable, "-m", "trtllm_pipeline"]
    matrix = Path(args.matrix).absolute()
    if args.toy is not None:
        import toy

        words, matrix = [sys.executable, toy.__file__], toy.write_matrix(args.toy, folder)
    command = [*words, "run", "--matrix", str(matrix), "--workspace", str(workspace), "--progress", "json"]
    command += [] if args.toy is None else ["--toolchain", "toy"]
    # Use separate machine leases: the benchmark and other pipelines do not wait for each other.
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    events = folder / "events"
    tally = Counter(dict.fromkeys(("kills", "redone", "torn", "left behind", "hung", "failed"), 0))
    finished = set[tuple[str, int]]()
    slowest_end_s = 0.0

    def verify() -> None:
        output = subprocess.run(
            [*words, "store", "verify", "-w", str(workspace), "--format", "json"],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        tally["torn"] += json.loads(output.stdout)["damaged"]

    while tally["kills"] < args.kills:
        with events.open("wb") as output:
            runs = [
                subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True, env=environment
                )
                for _ in range(args.at_once)
            ]
        until = time.monotonic() + chance.uniform(0.1, args.longest)
        while time.monotonic() < until and any(run.poll() is None for run in runs):
            time.sleep(0.005)
        how = "none"
        if any(run.poll() is None for run in runs):
            how = chance.choice(kinds)
            tally.update(("kills", how))
        before = artifacts(workspace) if how == "power" else {}
        kill(how, runs, disk, chance)
        killed_at = time.monotonic()
        for run in runs:
            try:
                run.wait(_RUN_S)
            except subprocess.TimeoutExpired:
                tally["hung"] += 1
                run.kill()
                run.wait()
        ended_at = time.monotonic() if how == "child" else killed_at
        while (left := processes(str(folder))) and time.monotonic() - ended_at < _ENDS_S:
            time.sleep(0.02)
        slowest_end_s = max(slowest_end_s, time.monotonic() - ended_at)
        tally["left behind"] += len(left)
        if how == "power":
            disk.come_back()
        now = artifacts(workspace)
        if how == "power":
            lost = before.keys() - now.keys()
            tally["lost"] += len(lost)
            done_before = done(events)
            tally["said done"] += len(done_before)
            tally["lost, said done"] += sum(not is_whole(workspace, each) for each in done_before)
            finished = {(name, inode) for name, inode in finished if name in now}
        tally["redone"] += len(finished - now.items())
        finished = {*now.items()}
        print(f"{tally['kills']:>4} {how:<8} {len(finished)} artifacts, {len(left)} processes left", flush=True)
        if how == "none":
            tally["failed"] += sum(run.returncode != 0 for run in runs)
            tally["workspaces finished"] += 1
            verify()
            shutil.rmtree(workspace)
            finished.clear()
    last = subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    tally["failed"] += last != 0
    verify()
    print(", ".join(f"{number} {what}" for what, number in tally.items()))
    print(f"everything had ended {slowest_end_s:.1f} s after a kill at the latest")
    bad = ("redone", "torn", "left behind", "hung", "failed", "lost, said done")
    return 1 if any(tally[each] for each in bad) else 0


def kill(how: str, runs: list[subprocess.Popen[bytes]], disk: Disk, chance: random.Random) -> None:
    """Do to the runs what `how` says."""
    if how == "power":
        disk.cut_power()
    if how == "child":
        if children := sorted(descendants([run.pid for run in runs])):
            stop([chance.choice(children)])
        return
    if how in {"group", "power"}:
        # All at once, as far as signals can: what a killed process leaves has no time to be tidied up.
        every = [*(run.pid for run in runs), *descendants([run.pid for run in runs])]
        for pid in every:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stop(every)
    elif how == "pipeline":
        stop([run.pid for run in runs])


def stop(pids: list[int]) -> None:
    """End each that is still there with SIGKILL."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pids: list[int]) -> set[int]:
    """Processes that these have started, directly or not, as long as those between live."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, pending = set[int](), list(pids)
    while pending:
        children = parents.get(pending.pop(), [])
        found.update(children)
        pending += children
    return found


def artifacts(workspace: Path) -> dict[str, int]:
    """The directory of every published artifact, with its inode."""
    names = {}
    for path in workspace.glob("store/*/*/manifest.json"):
        with suppress(OSError, ValueError):  # torn by a power cut: not there
            json.loads(path.read_bytes())
            names[path.parent.name] = path.parent.stat().st_ino
    return names


def is_whole(workspace: Path, name: str) -> bool:
    """True if an artifact has this prefix in its directory name, and all its bytes match its manifest."""
    directory = next(workspace.glob(f"store/*/{name}*"), None)
    return directory is not None and all(each.kind is not Kind.DAMAGED for each in inspect(directory, contents=True))


def done(events: Path) -> set[str]:
    """Directory name prefixes of the artifacts that these run events report as done."""
    prefixes = set()
    for line in events.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # cut short by a kill
            event = json.loads(line)
            if event.get("event") == "changed" and event["status"] == "succeeded" and event["stage"] != "launch":
                prefixes.add(event["stage_run"].rpartition("-")[2])
    return prefixes


def processes(text: str, where: str = "cmdline") -> list[int]:
    """Living processes with `text` in their command line, or in another file of them in /proc, such as `environ`."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if text.encode() in (entry / where).read_bytes():
                    pids.append(int(entry.name))
    return pids


if __name__ == "__main__":
    sys.exit(main())
