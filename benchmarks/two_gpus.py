"""Stage runs on real GPUs: visible devices, cleanup after kill -9, and the cost of measuring side by side.

    python benchmarks/two_gpus.py [--gib 8] [--seconds 3] [--passes 2] [--format json] [--pretend]

Needs two or more GPUs, torch and transformers. Downloads nothing. All stage runs are started by the pipeline's own loop,
executor and leases. The exit code is 1 if a check of one of the three parts fails:

    devices     four stage runs of one GPU and one of two allocate on all visible devices, with the GPU use meanwhile
    kill        SIGKILL of the pipeline, then of a stage run of another one: leases and memory become free
    control     the same load alone and next to another on the second GPU: decoding, which waits for the CPU, and
                prefilling, which does not, with and without pinning to the GPU's CPUs (`settings.perf.exclusive: gpu`)

`--pretend` replaces the GPUs with two fake ones and the CPU, to test the script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpu_use import PID, RESULT, TOGETHER_S, WINDOWS, Use

from trtllm_pipeline.base.domain import Cell, CellId, Exclusive, Json, Resources, StageRunId
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.gpus import Device, Graphics, nvml
from trtllm_pipeline.base.machine.model import Gpu
from trtllm_pipeline.base.machine.placement import cpus_of
from trtllm_pipeline.orchestrate.plan.plan import Plan, make_plan
from trtllm_pipeline.orchestrate.run.executor import Executor
from trtllm_pipeline.orchestrate.run.loop import Execution, Observer
from trtllm_pipeline.orchestrate.run.order import capacity
from trtllm_pipeline.orchestrate.store.claims import lease_machine
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt.stage.base import Stage
from trtllm_pipeline.tensorrt.toolchains.catalog import Toolchain

FREE_S: Final = 60.0
"""How long leases and memory may take to be free."""


STAGE: Final = Stage(
    name="use",
    version=1,
    summary="use GPUs",
    program="gpu_use:use",
    params=Use,
    read=lambda cell: Use(**cell.settings["use"]),  # type: ignore[arg-type]  # as `_plan` wrote them
    resources=lambda cell, _machine: Resources(gpus=cell.tp, exclusive=Exclusive(str(cell.settings["use"]["rule"]))),
    retries=0,
)
TOOLCHAIN: Final = Toolchain(
    name="gpus",
    summary="uses GPUs",
    stages=(STAGE,),
    missing=lambda _machine: None,
    identity=lambda _machine: {},
    infeasible=lambda _cell, _machine: None,
)


def _plan(each: Sequence[tuple[int, Mapping[str, Any]]]) -> Plan:
    """A plan with one stage run for each (GPUs, parameters)."""
    cells = []
    for number, (gpus, parameters) in enumerate(each):
        settings: dict[str, Any] = {"use": {"number": number, **parameters}}
        name = CellId(f"use/{number}")
        cells.append(Cell(name, "m", "gpus", "bf16", gpus, 1, 1, 1, 1, recipe={}, settings=settings))
    machine = replace(probe.this_machine(), cpus=max(8, probe.this_machine().cpus))
    return make_plan(cells, {"gpus": TOOLCHAIN}, machine, digest=lambda name, _cell: (name, ""))


class Utilisation(Observer):
    """Looks at the GPUs while a plan runs."""

    def __init__(self) -> None:
        self.busy: dict[int, list[int]] = {}
        self.used: dict[int, list[int]] = {}

    def tick(self, progress: Mapping[StageRunId, Mapping[str, Json]]) -> None:  # noqa: ARG002
        """Note how busy each GPU is, in percent, and how much of its memory is in use, in bytes."""
        for index, (busy, used) in enumerate(_gpus_now()):
            self.busy.setdefault(index, []).append(busy)
            self.used.setdefault(index, []).append(used)


def _gpus_now() -> list[tuple[int, int]]:
    with nvml() as ask:
        if ask is None:
            return []
        states = []
        for handle in ask.handles():
            rates, memory = ask("nvmlDeviceGetUtilizationRates", handle), ask("nvmlDeviceGetMemoryInfo", handle)
            states.append((rates.gpu if rates else 0, memory.used if memory else 0))
        return states


def _execute(plan: Plan, folder: Path, observer: Observer) -> tuple[list[dict[str, Any]], int]:
    """Results of a plan's stage runs, in order, and the exit code."""
    store = Store(folder)
    on = capacity(plan.machine)
    outcome = Execution(plan, store, Executor(), observer, run_id="gpus", nodes=[on], present={}).run()
    results = []
    for run in plan.stage_runs.values():
        left = outcome.artifacts.get(run.fingerprint)
        results.append({} if left is None else json.loads((left.out / RESULT).read_text(encoding="utf-8")))
    for failure in outcome.errors.values():
        print(failure, failure.log and Path(failure.log).read_text(encoding="utf-8")[-2000:], file=sys.stderr)
    store.close()
    return results, outcome.exit_code


# Parts.


def devices(folder: Path, parameters: Mapping[str, Any], checks: dict[str, bool]) -> dict[str, Json]:
    """GPUs visible to stage runs."""
    holding = {**parameters, "what": "hold", "rule": "none", "seconds": 6.0}
    plan = _plan([(1, holding)] * 4 + [(2, holding)])
    visible = Utilisation()
    results, code = _execute(plan, folder / "devices", visible)
    checks["all stage runs succeeded"] = code == 0
    if code == 0:
        names = [str(each["visible"]).split(",") for each in results]
        checks["each sees as many GPUs as requested"] = [len(each) for each in names] == [1, 1, 1, 1, 2]
        if not parameters["cpu"]:
            checks["what it sees is what it was given"] = all(
                each["uuids"] == [*name] for each, name in zip(results, names, strict=True)
            )
        pairs = [(a, b) for a in range(5) for b in range(a) if _overlap(results[a], results[b]) > 1.0]
        checks["two ran at the same time"] = bool(pairs)
        checks["no GPU had two at a time"] = all(not set(names[a]) & set(names[b]) for a, b in pairs)
    if not parameters["cpu"]:
        checks["memory was allocated on both"] = all(
            max(used) > parameters["gib"] * 2**30 for used in visible.used.values()
        )
    return {
        "visible": [each.get("visible") for each in results],
        "utilisation_percent": [
            {"mean": round(statistics.fmean(busy), 1), "highest": max(busy)} for busy in visible.busy.values()
        ],
        "memory_used_gib": [round(max(used) / 2**30, 1) for used in visible.used.values()],
    }


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return float(min(one["end_s"], other["end_s"]) - max(one["begin_s"], other["begin_s"]))


def kill(folder: Path, parameters: Mapping[str, Any], checks: dict[str, bool]) -> dict[str, Json]:
    """Remains of a killed pipeline, and of a killed stage run."""
    gpus = tuple(gpu.uuid for gpu in probe.this_machine().gpus[:2])
    before = [used for _, used in _gpus_now()]
    with _holding(folder / "pipeline", parameters, 2) as (pipeline, pids):
        checks["leases are held while stage runs use the GPUs"] = not _free(gpus)
        during = [used for _, used in _gpus_now()]
        pipeline.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        pipeline_s = _until(lambda: _free(gpus) and not any(map(_alive, pids)), begin)
        memory_s = _until(lambda: _is_back(before), begin)
    checks["after the pipeline was killed its leases were free"] = pipeline_s is not None
    checks["and the memory of its stage runs"] = memory_s is not None
    with _holding(folder / "stage", parameters, 1) as (pipeline, pids):
        os.kill(pids[0], signal.SIGKILL)
        begin = time.monotonic()
        run_s = _until(lambda: _free(gpus), begin)
        code = pipeline.wait(FREE_S)
    checks["after a stage run was killed its lease was free"] = run_s is not None
    checks["and its pipeline reported a failure"] = code == 1
    return {
        "leases_free_after_s": pipeline_s,
        "memory_free_after_s": memory_s,
        "memory_used_gib": [round(used / 2**30, 1) for used in during],
        "lease_of_a_killed_stage_run_free_after_s": run_s,
    }


@contextmanager
def _holding(
    folder: Path, parameters: Mapping[str, Any], runs: int
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A separate pipeline whose stage runs hold a GPU each, and their process ids."""
    given = json.dumps({**parameters, "what": "hold", "rule": "none", "seconds": 300.0})
    words = [sys.executable, __file__, "--keep", str(folder), str(runs), given]
    with subprocess.Popen([*words, *(["--pretend"] if parameters["cpu"] else [])]) as pipeline:
        try:
            until = time.monotonic() + TOGETHER_S
            while len(pids := [*folder.glob(f"work/*/{PID}")]) < runs or not all(each.read_text() for each in pids):
                assert time.monotonic() < until
                assert pipeline.poll() is None
                time.sleep(0.1)
            time.sleep(5.0)  # until they have allocated
            yield pipeline, [int(each.read_text()) for each in pids]
        finally:
            pipeline.kill()


def _free(gpus: tuple[str, ...]) -> bool:
    leased = lease_machine(gpus, exclusive=Exclusive.MACHINE)
    for claim in leased[0] if leased else ():
        claim.release()
    return leased is not None


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _is_back(before: Sequence[int]) -> bool:
    return all(used < was + 2**30 for (_, used), was in zip(_gpus_now(), before, strict=True))


def _until(done: Callable[[], bool], begin: float) -> float | None:
    """Seconds from `begin` until `done`, None after a timeout."""
    while time.monotonic() < begin + FREE_S:
        if done():
            return round(time.monotonic() - begin, 2)
        time.sleep(0.02)
    return None


def control(folder: Path, parameters: Mapping[str, Any], passes: int, checks: dict[str, bool]) -> dict[str, Json]:
    """Tokens per second of the same load alone and next to another, over all windows of all passes."""
    cases = {
        "alone": (1, "machine"),
        "alone, pinned": (1, "gpu"),
        "beside another, pinned": (2, "gpu"),
        "beside another": (2, "none"),
    }
    rates: dict[str, dict[str, list[float]]] = {case: {"decode": [], "prefill": []} for case in cases}
    cpus: dict[str, Json] = {}
    for number in range(passes):
        for case, (many, rule) in cases.items():
            meet = folder / f"meet-{number}-{rule}-{many}"
            meet.mkdir()
            loads = {**parameters, "what": "load", "rule": rule, "together": many, "meet": str(meet)}
            results, code = _execute(_plan([(1, loads)] * many), folder / f"control-{number}-{rule}-{many}", Observer())
            checks[f"{case}: measured"] = code == 0
            if code:
                continue
            cpus[case] = [len(each["cpus"]) for each in results]
            if rule == "gpu" and many == 2:
                checks["those that are pinned share no CPU"] = not set(results[0]["cpus"]) & set(results[1]["cpus"])
            if many == 2:
                checks[f"{case}: at the same time"] = _overlap(*results) > WINDOWS * parameters["seconds"]
            for what, each in rates[case].items():
                for one in results:
                    each += [tokens / (end - begin) for begin, end, tokens in one[what]]
    base = {what: statistics.median(results) for what, results in rates["alone"].items() if results}
    table: dict[str, Json] = {}
    for case, by_what in rates.items():
        table[case] = {
            what: {
                "tokens_per_s": round(statistics.median(results), 1),
                "over_alone": round(statistics.median(results) / base[what], 4),
                "spread": round((max(results) - min(results)) / statistics.median(results), 4),
            }
            for what, results in by_what.items()
            if results and what in base
        }
    return {"rates": table, "cpus": cpus}


def _pretend() -> None:
    """Two GPUs that are not there."""
    fakes = tuple(Device(Gpu(index, f"GPU-{index}", "made up", 2**33, 90), f"GPU-{index}") for index in range(2))
    before = probe.survey()
    machine = replace(before.machine, gpus=tuple(each.gpu for each in fakes))
    after = replace(before, machine=machine, graphics=Graphics(devices=fakes, everything=fakes))
    from trtllm_pipeline.orchestrate.run import loop

    for module in (probe, loop):
        vars(module)["survey"] = lambda: after
    vars(probe)["machine"] = lambda: machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window that is measured")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--keep", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    if args.pretend:
        _pretend()
    if args.keep:
        folder, runs, given = args.keep
        return _execute(_plan([(1, json.loads(given))] * int(runs)), Path(folder), Observer())[1]
    known = probe.survey().graphics
    near = cpus_of(known.everything)
    report: dict[str, Json] = {
        "gpus": [
            {"uuid": each.gpu.uuid, "name": each.gpu.name, "bus": each.bus, "cpus": list(near[each.gpu.uuid])}
            for each in known.everything
        ],
        "problems": list(known.problems),
    }
    checks: dict[str, bool] = {}
    parameters = {"seconds": args.seconds, "gib": args.gib, "together": 1, "cpu": args.pretend, "meet": ""}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # separate leases: do not wait for other pipelines
        for name, part in (("devices", devices), ("kill", kill)):
            report[name] = part(Path(folder), parameters, checks)
            print(name, json.dumps(report[name]), file=sys.stderr, flush=True)
        report["control"] = control(Path(folder), parameters, args.passes, checks)
    report["checks"] = dict(checks)
    if args.format == "json":
        print(json.dumps(report, indent=1))
    else:
        for name, value in report.items():
            rows = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            print(name, *(f"  {key}: {each}" for key, each in rows), sep="\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
