"""Memory use of quantization compared with the plan's estimates: on the GPU, and on the host.

    python benchmarks/needs.py [--model SHAPE[/LAYERS]=RUN,RUN,...]... [--limit-s 400] [--json FILE]

For each model, a directory with random weights of its true shape is created (see `quantize.py`, which also describes how a run
is written). Then the stage's own program runs on it as in the pipeline, under the measuring guardian, while NVML is
sampled. The estimates are those of `pipeline plan` before corrections by measurements.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import quantize as speed

from trtllm_pipeline.base.domain import Cell, CellId
from trtllm_pipeline.base.files.writing import write_json
from trtllm_pipeline.base.machine import gpus, memory
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.base.processes.process import Exited, Guardian
from trtllm_pipeline.orchestrate.matrix.models import Settings
from trtllm_pipeline.tensorrt import worker as worker_file
from trtllm_pipeline.tensorrt.modelopt import job
from trtllm_pipeline.tensorrt.toolchains.catalog import PYTORCH
from trtllm_pipeline.tensorrt.trtllm import needs

_MODELS: Final = (
    "qwen2-7b=fp8,int8_sq/128,int4_awq/32,fp8@8",
    "llama-70b/12=fp8,int4_awq/16",
    "qwen3-30b-a3b/12=fp8/128:hf,fp8/128:g2:hf",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One run: bytes that were expected, and that were taken."""

    model: str
    run: str
    resource: str
    expected: int
    taken: int

    @property
    def error(self) -> float:
        """By which share the estimate is too high, negative for too low."""
        return self.expected / self.taken - 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="as above (repeatable)")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--limit-s", type=float, default=400.0, help="no run starts after this time")
    parser.add_argument("--folder", type=Path, help="directory for models and checkpoints (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="where to write the figures as well")
    options = parser.parse_args()
    started, rows = time.monotonic(), list[Row]()
    machine = this_machine()
    for text in options.model or _MODELS:
        model, _, runs = text.partition("=")
        name, _, layers = model.partition("/")
        shape: dict[str, Any] = {**speed.COMMON, **speed.SHAPES[name]}
        shape["num_hidden_layers"] = int(layers or shape["num_hidden_layers"])
        with tempfile.TemporaryDirectory(dir=options.folder) as folder_name:
            folder = Path(folder_name)
            speed.write_model(folder / "model", shape)
            speed.say(f"{model}: written after {time.monotonic() - started:.0f} s")
            for run_text in runs.split(","):
                if time.monotonic() - started > options.limit_s:
                    speed.say(f"skipped for time: {model} {run_text}")
                    continue
                run = speed.parse_run(run_text, options.samples)
                speed.write_rows(folder / "rows.jsonl", run.samples, options.length, int(shape["vocab_size"]))
                if run.gpus > len(machine.gpus):
                    speed.say(f"skipped with {len(machine.gpus)} GPUs: {model} {run_text}")
                    continue
                expected = needs.quantizing_on(cell(shape, run, options.length), machine, run.gpus)
                taken, facts = measured(folder, run, machine)
                for resource, should, did in (
                    ("host", expected.host, taken["host"]),
                    ("gpu", expected.gpu, taken["gpu"]),
                    ("artifact", expected.leaves, facts["bytes"]),
                ):
                    if did:
                        rows.append(Row(model, run_text, resource, should, did))
                        speed.say(f"{asdict(rows[-1])} {rows[-1].error:+.1%}")
                speed.say(f"{model} {run_text}: {facts['times']} {facts['peak']} {facts['batch']} {taken}")
                if options.json:
                    write_json(options.json, {"machine": asdict(machine), "rows": [asdict(row) for row in rows]})
    _print(rows)


def this_machine() -> Machine:
    """This machine's GPUs and memory, with a release that quantizes with our own program."""
    machine = tuple(device.gpu for device in gpus.look().devices)
    assumed = parse(f"tensorrt_llm==1.2.0,sm=90,gpus={max(1, len(machine))}")
    return replace(assumed, gpus=machine or assumed.gpus, memory_bytes=memory.host_bytes())


def cell(shape: Mapping[str, Any], run: speed.Run, length: int) -> Cell:
    """The cell of a run."""
    recipe = speed.numbers(shape)
    settings: dict[str, Any] = Settings().model_dump(mode="json")
    settings["quantize"] |= {"batch_size": run.batch, "calibration": {"samples": run.samples, "max_length": length}}
    cell_id = CellId(f"{run.text}/random")
    return Cell(cell_id, "random", PYTORCH, run.precision, run.tp, 1, 8, 1024, 128, recipe, settings)


def measured(folder: Path, run: speed.Run, machine: Machine) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The worker's use in bytes by resource, and its own report."""
    watched, used = gpus.GpuPeaks(), machine.gpus[: run.gpus]
    environment = {**os.environ, gpus.MASK_VARIABLE: ",".join(gpu.uuid for gpu in used)}
    with speed.attempt(folder, run) as work, Guardian() as guardian:
        worker_file.write_job("quantize", None, work)
        watched.begin("run", [gpu.uuid for gpu in used])
        log = folder / "log"
        guardian.spawn("run", job.command(work, sys.executable), env=environment, cwd=folder, log=log, measure=True)
        ended: Exited | None = None
        started = time.monotonic()
        while ended is None:
            select.select([guardian], [], [], 0.05)
            watched.look()
            ended = next((event for event in guardian.read_events() if isinstance(event, Exited)), None)
        if ended.returncode:
            raise SystemExit(log.read_text(encoding="utf-8")[-4000:])
        seconds = time.monotonic() - started
        gpu = watched.end("run") or 0
        watched.close()
        return {"host": ended.peak_bytes, "gpu": gpu, "rss": ended.max_rss_bytes, "s": round(seconds, 1)}, speed.facts(
            work
        )


def _print(rows: list[Row]) -> None:
    print("| model | run | of | expected GB | taken GB | error |")
    print("|---|---|---|---:|---:|---:|")
    for row in rows:
        values = (
            row.model,
            row.run,
            row.resource,
            f"{row.expected / 1e9:.2f}",
            f"{row.taken / 1e9:.2f}",
            f"{row.error:+.1%}",
        )
        print("| " + " | ".join(values) + " |")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
