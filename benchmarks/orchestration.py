"""What the pipeline itself costs, beside ninja, make, doit and snakemake on the same graph of jobs on the same machine.

    python benchmarks/orchestration.py [--cells 100 300] [--run-up-to 300] [--repeat 5] [--format json]

The graph has one download for 64 cells, one quantize for 16, one convert for 8, then build, repository and smoke for
each cell; every job is `sh -c 'echo x > FILE'`, as many at a time as there are CPUs. Ours is the whole command, from
reading the matrix to the printed report, with plan, lock file, manifests, index and claims written on the way (`toy.py`).

    start     `pipeline --help` beside `python -c pass`; the peers' `--version`
    plan      what would run, nothing being there: `pipeline plan`, `ninja -n`, `make -n`, `doit list -s`, `snakemake -n`
    run       all of it
    no-op     the same command again: every output is looked at, nothing is run
    status, explain    ours alone: of all cells, as they were planned or, with --matrix, as they would be now; and why each
              stage of one cell would run

`unsynced` is ours without what makes it survive a power cut; no other tool survives one. snakemake runs graphs up to 100 cells.
Above `--run-up-to` cells our artifacts are published through the store instead of running their jobs, and there is no
"run" row. Rows are medians; tools take turns within each round, so that other work on the machine hits all of them. A
peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import toy

OURS: Final = "pipeline"
UNSYNCED: Final = "unsynced"
_TOY: Final = (sys.executable, str(Path(toy.__file__)))
_FILL: Final = (*_TOY, "fill", "--matrix", "matrix.yaml", "--workspace", "work")
_STAGES: Final = (("download", 64), ("quantize", 16), ("convert", 8), ("build", 1), ("repository", 1), ("smoke", 1))
"""Stage, and how many cells share one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process, with all the processes it started and waited for, took."""

    wall_s: float
    cpu_s: float
    max_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one tool doing one thing."""

    cells: int
    jobs: int
    what: str
    tool: str
    runs: int
    wall_s: float
    cpu_s: float
    max_rss_bytes: int
    """Of the largest process. No less than that of the process that measures, 20 MB or so, can be seen."""


def measured(argv: tuple[str, ...], folder: Path) -> Sample:
    """Run a command in `folder`, its output thrown away. Raises RuntimeError when it fails."""
    program = shutil.which(argv[0])
    assert program is not None
    here = Path.cwd()
    os.chdir(folder)
    begin = time.perf_counter()
    pid = os.posix_spawn(
        program,
        argv,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, str(folder / "stderr"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
        ],
        setsigdef=[signal.SIGPIPE],
    )
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - begin
    os.chdir(here)
    if status:
        said = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{' '.join(argv)}: exit status {status}\n{said}")
    return Sample(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def prepare_environment(base: Path) -> None:
    """Compiled modules are kept, whatever the caller's environment says; leases stay apart from real work's."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(base / "pycache")
    os.environ["XDG_RUNTIME_DIR"] = str(base)


def edges(cells: int) -> list[tuple[str, str | None]]:
    """The graph for tools that name files: (output, input) of each job, as `toy.write_matrix` has it."""
    found: list[tuple[str, str | None]] = []
    for cell in range(cells):
        upstream: str | None = None
        for stage, shared in _STAGES:
            output = f"out/{stage}{cell // shared}"
            if cell % shared == 0:
                found.append((output, upstream))
            upstream = output
    return found


def write_ninja(cells: int, folder: Path) -> None:
    """build.ninja."""
    lines = ["rule job", "  command = echo x > $out"]
    lines += [f"build {output}: job {upstream or ''}" for output, upstream in edges(cells)]
    (folder / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_make(cells: int, folder: Path) -> None:
    """Makefile. The rules are static ones: a pattern rule would be searched for implicit prerequisites."""
    (folder / "out").mkdir()
    graph = edges(cells)
    lines = ["MAKEFLAGS += -rR --no-print-directory", f"all: {' '.join(output for output, _ in graph)}"]
    lines += [f"{output}: {upstream or ''}\n\t@echo x > $@" for output, upstream in graph]
    (folder / "Makefile").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_doit(cells: int, folder: Path) -> None:
    """dodo.py."""
    (folder / "out").mkdir()
    (folder / "dodo.py").write_text(
        f"GRAPH = {edges(cells)!r}\n"
        "def task_job():\n"
        "    for output, upstream in GRAPH:\n"
        "        yield {'name': output, 'actions': [f'echo x > {output}'], 'targets': [output],\n"
        "               'file_dep': [upstream] if upstream else []}\n",
        encoding="utf-8",
    )


def write_snakemake(cells: int, folder: Path) -> None:
    """Snakefile, a rule for each stage."""
    last = _STAGES[-1][0]
    rules = [f'rule all:\n    input: expand("out/{last}{{number}}", number=range({cells}))']
    above: tuple[str, int] | None = None
    for stage, shared in _STAGES:
        read = (
            ""
            if above is None
            else f'    input: lambda w: f"out/{above[0]}{{int(w.number) * {shared} // {above[1]}}}"\n'
        )
        rules.append(
            f'rule {stage}:\n{read}    output: "out/{stage}{{number,[0-9]+}}"\n    shell: "echo x > {{output}}"'
        )
        above = stage, shared
    (folder / "Snakefile").write_text("\n".join(rules) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Tool:
    """How one tool is asked for each thing; () where it is not."""

    name: str
    prepare: Callable[[int, Path], object]
    start: tuple[str, ...]
    plan: tuple[str, ...]
    run: tuple[str, ...]
    most_cells: int = sys.maxsize
    ask: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What else it is asked when there is nothing to do."""


def tools() -> list[Tool]:
    """Ours and the peers that are installed; says which are not."""
    cpus = str(len(os.sched_getaffinity(0)))
    asked = ("--matrix", "matrix.yaml", "--workspace", "work", "--toolchain", toy.TOOLCHAIN.name)
    run = ("run", *asked, "--progress", "quiet")
    starts = (sys.executable, "-m", "trtllm_pipeline", "--help")
    one = "m0000/fp16/tp1pp1/bs1/*"
    questions = {
        "status": (*_TOY, "status", "--workspace", "work"),
        "status --matrix": (*_TOY, "status", *asked),
        "explain": (*_TOY, "explain", one, *asked),
    }
    found = [
        Tool(OURS, toy.write_matrix, starts, (*_TOY, "plan", *asked), (*_TOY, *run), ask=questions),
        Tool(UNSYNCED, toy.write_matrix, (), (), (*_TOY, UNSYNCED, *run)),
    ]
    snakemake = ("snakemake", "--quiet", "all", "--cores", cpus)
    known = [
        Tool("ninja", write_ninja, ("ninja", "--version"), ("ninja", "-n"), ("ninja", "-j", cpus)),
        Tool("make", write_make, ("make", "--version"), ("make", "-n"), ("make", "-j", cpus)),
        Tool("doit", write_doit, ("doit", "--version"), ("doit", "list", "-s", "--all"), ("doit", "-n", cpus)),
        Tool("snakemake", write_snakemake, ("snakemake", "--version"), (*snakemake, "-n"), snakemake, 100),
    ]
    for tool in known:
        if shutil.which(tool.name) is None:
            print(f"{tool.name} is not installed: left out", file=sys.stderr)
        else:
            found.append(tool)
    return found


class Bench:
    """Collects samples and makes rows of them."""

    def __init__(self, repeat: int) -> None:
        self.repeat = repeat
        self.rows: list[Row] = []

    def add(self, cells: int, jobs: int, what: str, tool: str, samples: Sequence[Sample]) -> None:
        """The row of these samples."""
        median = statistics.median
        wall_s, cpu_s = median(one.wall_s for one in samples), median(one.cpu_s for one in samples)
        rss = max(one.max_rss_bytes for one in samples)
        self.rows.append(Row(cells, jobs, what, tool, len(samples), wall_s, cpu_s, rss))

    def start(self, all_tools: Sequence[Tool], folder: Path) -> None:
        """The time until a tool has said anything at all."""
        commands = {
            "python": (sys.executable, "-c", "pass"),
            **{tool.name: tool.start for tool in all_tools if tool.start},
        }
        samples: dict[str, list[Sample]] = {name: [] for name in commands}
        for _ in range(4 * self.repeat):
            for name, argv in commands.items():
                samples[name].append(measured(argv, folder))
        for name, taken in samples.items():
            self.add(0, 0, "start", name, taken)

    def graph(self, all_tools: Sequence[Tool], cells: int, base: Path, *, run: bool) -> None:
        """Plan, run and no-op of one size."""
        jobs = len(edges(cells))
        wanted = [tool for tool in all_tools if cells <= tool.most_cells and (run or tool.name != UNSYNCED)]
        samples: dict[str, dict[str, list[Sample]]] = {
            what: {} for what in ("plan", "run", "no-op", "status", "status --matrix", "explain")
        }
        for number in range(self.repeat):
            for tool in wanted:
                # Never the same folder again: ext4 gives a deleted inode back after minutes, and until then every new
                # file costs a search past those of the round before.
                folder = base / f"{tool.name}-{cells}-{number if run else 0}"
                todo = {"no-op": tool.run, **tool.ask}
                if not folder.exists():
                    folder.mkdir()
                    tool.prepare(cells, folder)
                    todo = {**({"plan": tool.plan} if tool.plan else {}), "run": tool.run, **todo}
                for what, argv in todo.items():
                    if what == "run" and not run:
                        measured(_FILL if tool.name == OURS else argv, folder)
                    else:
                        samples[what].setdefault(tool.name, []).append(measured(argv, folder))
        for what, by_tool in samples.items():
            for name, taken in by_tool.items():
                self.add(cells, jobs, what, name, taken)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, with ratios to ninja, or to the bare interpreter where it comes to starting."""
    lines = [
        "| cells | jobs | what | tool | wall | against | CPU | wall per job | CPU per job | peak RSS |",
        "|---:|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        anchor = "python" if row.what == "start" else "ninja"
        base = [each for each in rows if (each.cells, each.what, each.tool) == (row.cells, row.what, anchor)]
        against = f"{row.wall_s / base[0].wall_s:.2f} x {anchor}" if base and base[0] is not row else ""
        per_job = [f"{value / row.jobs * 1e3:.3f} ms" if row.jobs else "" for value in (row.wall_s, row.cpu_s)]
        size = f"{row.cells} | {row.jobs}" if row.cells else " | "
        lines.append(
            f"| {size} | {row.what} | {row.tool} | {row.wall_s * 1e3:,.0f} ms | {against} | {row.cpu_s * 1e3:,.0f} ms "
            f"| {per_job[0]} | {per_job[1]} | {row.max_rss_bytes / 1e6:.0f} MB |"
        )
    return "\n".join(lines)


def linearity(rows: Sequence[Row]) -> str:
    """Time per job of the largest graph over that of the smallest, for each thing ours was asked for."""
    words = []
    for what in ("plan", "run", "no-op"):
        ours = [row for row in rows if row.tool == OURS and row.what == what]
        if len(ours) > 1:
            first, last = ours[0], ours[-1]
            ratio = (last.wall_s / last.jobs) / (first.wall_s / first.jobs)
            words.append(f"{what} {ratio:.2f} ({first.cells} to {last.cells} cells)")
    return "wall per job, largest over smallest: " + ", ".join(words) if words else ""


def overhead(rows: Sequence[Row]) -> str:
    """What each job adds to a run in which there is nothing to do, in wall-clock time."""
    walls = {(row.cells, row.what, row.tool): row.wall_s for row in rows}
    words = [
        f"{tool} {(wall_s - walls[cells, 'no-op', tool]) / len(edges(cells)) * 1e3:.2f} ms ({cells} cells)"
        for (cells, what, tool), wall_s in walls.items()
        if what == "run"
    ]
    return "run less no-op, per job: " + ", ".join(words) if words else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 300], help="sizes, 64 or more (default 100 300)")
    parser.add_argument("--run-up-to", type=int, default=300, metavar="CELLS", help="run all jobs of graphs up to this")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="rounds (default 5)")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    args = parser.parse_args()
    before = os.getloadavg()
    bench = Bench(args.repeat)
    with tempfile.TemporaryDirectory(prefix="orchestration-") as name:
        base = Path(name)
        prepare_environment(base)
        all_tools = tools()
        bench.start(all_tools, base)
        for cells in sorted(args.cells):
            bench.graph(all_tools, cells, base, run=cells <= args.run_up_to)
    load = {"before": before, "after": os.getloadavg()}
    if args.format == "json":
        json.dump({"load": load, "rows": [asdict(row) for row in bench.rows]}, sys.stdout, indent=1)
        print()
        return
    print(table(bench.rows))
    print(overhead(bench.rows), linearity(bench.rows), sep="\n")
    words = " and ".join(f"{one[0]:.1f} {when}" for when, one in load.items())
    print(f"load average {words}, on {len(os.sched_getaffinity(0))} CPUs")


if __name__ == "__main__":
    main()
