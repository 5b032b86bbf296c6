"""kill -9 the pipeline at random instants of a whole run, again and again, and look at what is left.

    python benchmarks/kill_resume.py --matrix matrices/quickstart.yaml --kills 50

Each round starts `pipeline run`, kills it (-9, the pipeline's process only, or with --group its whole process group)
after a random time, and checks: no finished artifact was made again, none is torn, no process of the run is left.
At the end a last run must finish everything; then every artifact's files are read again and compared with their digests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    """Run the rounds; 0 when nothing was torn, redone or left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", default="matrices/quickstart.yaml")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--longest", type=float, default=12.0, help="seconds from a start to its kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", action="store_true", help="kill the process group, not only the pipeline")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill-resume-"))
    command = [sys.executable, "-m", "trtllm_pipeline", "run", "--matrix", str(Path(args.matrix).absolute())]
    command += ["--workspace", str(folder / "w"), "--progress", "quiet"]
    finished: dict[str, int] = {}
    redone = left_behind = kills = 0
    slowest_end_s = 0.0
    ended = False
    while kills < args.kills:
        if ended:  # everything is done: start again in a new workspace
            shutil.rmtree(folder / "w")
            finished, ended = {}, False
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(timeout=chance.uniform(0.3, args.longest))
            ended = True
        except subprocess.TimeoutExpired:
            kills += 1
            if args.group:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            process.wait()
        killed_at = time.monotonic()
        while (left := processes(str(folder))) and time.monotonic() - killed_at < 20:
            time.sleep(0.05)
        slowest_end_s = max(slowest_end_s, time.monotonic() - killed_at)
        left_behind += len(left)
        now = artifacts(folder / "w")
        redone += sum(now.get(name) != inode for name, inode in finished.items())
        finished = now
        print(f"kill {kills}: {len(finished)} artifacts, {len(left)} processes left", flush=True)
    code = subprocess.call([*command[:-2]])
    verify = [sys.executable, "-m", "trtllm_pipeline", "store", "verify", "-w", str(folder / "w"), "--format", "json"]
    torn = json.loads(subprocess.run(verify, check=False, capture_output=True, text=True).stdout)["damaged"]
    print(
        f"{kills} kills: {redone} artifacts redone, {torn} torn, {left_behind} processes left behind; "
        f"everything had ended {slowest_end_s:.1f} s after a kill at the latest; the last run ended with {code}"
    )
    shutil.rmtree(folder)
    return 1 if redone or torn or left_behind or code else 0


def artifacts(workspace: Path) -> dict[str, int]:
    """Folder -> inode of every published artifact."""
    return {str(path.parent): path.parent.stat().st_ino for path in workspace.glob("store/*/*/manifest.json")}


def processes(text: str, where: str = "cmdline") -> list[int]:
    """Living processes with `text` in their command line, or in another file of them in /proc, such as `environ`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found_in = (entry / where).read_bytes()
            except OSError:
                continue
            if text.encode() in found_in:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
