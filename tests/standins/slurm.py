"""A stand-in for Slurm's commands: `python slurm.py COMMAND ARGUMENT...`, in a folder SLURM_STANDIN.

sbatch starts the script at once, squeue and scancel know what it started; sinfo lists `nodes`, srun runs. A file `refuse`
holds what every command says, and fails with. A file `state.` and a job's number holds a state, and perhaps a reason, that squeue
tells instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("SLURM_STANDIN", "."))
COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "srun")


def install(folder: Path, python: str) -> Path:
    """Write the commands into `folder`; returns where they are."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in COMMANDS:
        (programs / name).write_text(f'#!/bin/sh\nexec "{python}" "{__file__}" {name} "$@"\n')
        (programs / name).chmod(0o755)
    (folder / "nodes").write_text("n1|4|gpu:h100:2(S:0)|idle\nn2|4|gpu:h100:2|mixed\nn3|4|(null)|down*\n")
    return programs


def split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options, and what follows them."""
    options: dict[str, str] = {}
    while arguments and arguments[0].startswith("-"):
        name, _, value = arguments.pop(0).partition("=")
        options[name] = value
    return options, arguments


def main(command: str, arguments: list[str]) -> int:
    if (FOLDER / "refuse").exists():
        print((FOLDER / "refuse").read_text(), file=sys.stderr)
        return 1
    options, rest = split(arguments)
    jobs = FOLDER / "jobs"
    jobs.mkdir(exist_ok=True)
    if command == "sinfo":
        print((FOLDER / "nodes").read_text(), end="")
    elif command == "srun":
        return subprocess.call(rest)
    elif command == "sbatch":
        number = len(list(jobs.iterdir())) + 1
        with Path(options["--output"]).open("wb") as output:
            process = subprocess.Popen(["/bin/sh", *rest], stdout=output, stderr=output, start_new_session=True)
        asked = " ".join(f"{name}={value}" for name, value in sorted(options.items()))
        (jobs / str(number)).write_text(f"{process.pid}|{options['--comment']}|{asked}")
        print(f"{number};here")
    elif command == "scancel":
        for number in rest:
            os.kill(int((jobs / number).read_text().split("|")[0]), signal.SIGTERM)
            (FOLDER / f"state.{number}").write_text("CANCELLED")
    else:
        for job in sorted(jobs.iterdir()):
            pid, comment, _ = job.read_text().split("|")
            told = FOLDER / f"state.{job.name}"
            stat = Path(f"/proc/{pid}/stat")
            runs = stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
            state, _, reason = (told.read_text() if told.exists() else "RUNNING" if runs else "COMPLETED").partition(
                " "
            )
            print(f"{job.name}|{state}|{reason or 'None'}|{comment}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
