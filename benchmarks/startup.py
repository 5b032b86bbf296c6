"""Start-up time of help, version, a plan and stage programs, compared with the bare interpreter and other command lines.

    python benchmarks/startup.py                 medians of 11 runs, taken in turns
    python benchmarks/startup.py --check         exit code 1 if a limit is broken; needs an idle machine

Help runs twice: into a pipe, as plain text, and on a terminal, drawn by rich. The first run of each is not counted. It
compiles imported modules into its own directory, because an installed package has byte code, and an
environment may keep Python from writing any. On a busy machine, use the CPU time.
"""

from __future__ import annotations

import argparse
import os
import pty
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
BARE: Final = "bare interpreter"
HELP: Final = "pipeline --help, piped"
TERMINAL: Final = "pipeline --help, on a terminal"
PLAN: Final = "pipeline plan, 2 cells"
RATIO: Final = 8.0
"""Maximum ratio of help in a pipe to the bare interpreter."""
TERMINAL_MS: Final = 150.0
PROGRAM_MS: Final = 150.0
"""Maximum time until a stage's program starts."""
_PROGRAMS: Final = (
    *(f"stages.{stage}" for stage in ("download", "smoke", "perf", "accuracy", "score", "launch")),
    *(f"toolchains.embedded.{stage}" for stage in ("convert", "build", "repository")),
)
_OTHERS: Final = ("hf", "aiperf")


def programs(workspace: Path) -> dict[str, list[str]]:
    """Measured programs by name."""
    ours = [sys.executable, "-m", "trtllm_pipeline"]
    matrix = str(ROOT / "matrices" / "tiny.yaml")
    commands = {
        BARE: [sys.executable, "-c", "pass"],
        HELP: [*ours, "--help"],
        TERMINAL: [*ours, "--help"],
        "pipeline --version": [*ours, "--version"],
        "pipeline plan --help": [*ours, "plan", "--help"],
        PLAN: [*ours, "plan", "--matrix", matrix, "--toolchain", "embedded", "--workspace", str(workspace)],
        "a worker, until it reads its job": [sys.executable, "-c", "import trtllm_pipeline.tensorrt.worker"],
        **{
            f"the program of {module.rpartition('.')[2]}, until it starts": [
                sys.executable,
                "-c",
                f"import trtllm_pipeline.tensorrt.worker, trtllm_pipeline.{module}",
            ]
            for module in _PROGRAMS
        },
    }
    for name in _OTHERS:
        path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if path is not None:
            commands[f"{name} --help, piped"] = [path, "--help"]
    return commands


def milliseconds(words: list[str], *, byte_code: str, terminal: bool) -> tuple[float, float]:
    """From start to end of one program, and of CPU. Raises CalledProcessError when it fails."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": byte_code, "PYTHONDONTWRITEBYTECODE": ""}
    master, slave = pty.openpty() if terminal else os.pipe()
    begin = time.perf_counter()
    process = subprocess.Popen(
        words, stdout=slave, stderr=subprocess.DEVNULL, cwd=tempfile.gettempdir(), env=environment
    )
    os.close(slave)
    try:
        while os.read(master, 65536):
            pass
    except OSError:
        pass  # how a terminal ends
    finally:
        os.close(master)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return (time.perf_counter() - begin) * 1e3, (used.ru_utime + used.ru_stime) * 1e3


def main() -> int:
    """Measure in turns, so that what else the machine does hits all alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="runs of each program (default 11)")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is broken")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = programs(Path(folder) / "none")
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in wanted}
        for _ in range(args.rounds + 1):
            for name, words in wanted.items():
                times[name].append(milliseconds(words, byte_code=f"{folder}/code", terminal=name == TERMINAL))
    medians = {
        name: statistics.median(wall for wall, _ in each[1:]) for name, each in times.items()
    }  # the first compiles
    width = max(map(len, medians))
    print(f"{'':<{width}}  median ms  ratio  least CPU ms")
    for name, value in medians.items():
        print(
            f"{name:<{width}}  {value:>9.0f}  {value / medians[BARE]:>5.1f}  {min(cpu for _, cpu in times[name][1:]):>12.0f}"
        )
    broken = []
    if medians[HELP] > RATIO * medians[BARE]:
        broken.append(f"{HELP}: more than {RATIO:g} x the {BARE}")
    if medians[TERMINAL] > TERMINAL_MS:
        broken.append(f"{TERMINAL}: more than {TERMINAL_MS:g} ms")
    broken += [
        f"{name}: more than {PROGRAM_MS:g} ms"
        for name, value in medians.items()
        if name.endswith("until it starts") and value > PROGRAM_MS
    ]
    for line in broken:
        print(f"over the limit: {line}")
    return 1 if args.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
