"""The rates that durations are expected by, as this machine has them, beside the data sheets' in `machine/speeds.py`.

    python benchmarks/rates.py [--json FILE] [--folder FOLDER]

Memory: a copy, bytes read and written; and a token of a decoder of 7 billion random weights, one matrix after another as
decoding reads them, replayed as a graph. Arithmetic: matrix products of 8192 on random numbers, of 16 and of 8 bits. Host:
a file written, read from the page cache, copied to the GPU. Several GPUs: an all-reduce of 32 MiB. Medians of 10.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import quantize as speed
import torch

from trtllm_pipeline.files.writing import write_json

_REPEATS: Final = 10
_BYTES: Final = 4 << 30


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for a file of 4 GiB; a temporary one if not given")
    parser.add_argument("--json", type=Path, help="where to write the figures as well")
    options = parser.parse_args()
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    found |= memory() | {"decoding": {f"batch {rows}": decoding(rows) for rows in (1, 8, 64)}}
    found |= {"bf16_tflop_per_s": round(speed.matrix_rate() / 1e12), "fp8_tflop_per_s": fp8_rate()}
    found |= host(options.folder)
    if torch.cuda.device_count() > 1:
        found["all_reduce_gb_per_s"] = all_reduce(2)
    print(json.dumps(found, indent=1))
    if options.json:
        write_json(options.json, found)


def seconds(work: Callable[[], object]) -> float:
    """Median wall time of `work` and of what it leaves to the GPU, after two runs that are not counted."""
    taken = []
    for _ in range(_REPEATS + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def memory() -> dict[str, Any]:
    """Copies on the GPU and to it, in GB a second."""
    source, target = (torch.empty(_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    copied = 2 * _BYTES / seconds(lambda: target.copy_(source)) / 1e9
    pageable = torch.ones(1 << 30, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    there = target[: 1 << 30]
    return {
        "copy_gb_per_s": round(copied),
        "to_gpu_pinned_gb_per_s": round((1 << 30) / seconds(lambda: there.copy_(pinned)) / 1e9, 1),
        "to_gpu_pageable_gb_per_s": round((1 << 30) / seconds(lambda: there.copy_(pageable)) / 1e9, 1),
    }


def decoding(rows: int) -> dict[str, float]:
    """One token of `rows` requests: all matrices of Qwen2-7B's layers and head, in milliseconds and GB a second."""
    shape = speed.SHAPES["qwen2-7b"]
    hidden, inner, vocabulary = (int(shape[name]) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    sizes = [(hidden, hidden + 2 * 512), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
    every = [*sizes * int(shape["num_hidden_layers"]), (hidden, vocabulary)]
    with torch.device("cuda"):
        weights = [torch.randn(wide, narrow, dtype=torch.bfloat16) for narrow, wide in every]
        values = {narrow: torch.randn(rows, narrow, dtype=torch.bfloat16) for narrow in (hidden, inner)}
    graph = torch.cuda.CUDAGraph()

    def token() -> None:
        for weight in weights:
            torch.nn.functional.linear(values[weight.shape[1]], weight)

    token()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        token()
    taken = seconds(graph.replay)
    read = sum(weight.numel() for weight in weights) * 2
    return {"ms": round(taken * 1e3, 3), "gb_per_s": round(read / taken / 1e9)}


def fp8_rate(size: int = 8192) -> int | None:
    """Of matrix products of 8-bit numbers, in TFLOP/s; None where the GPU has none."""
    if torch.cuda.get_device_capability() < (8, 9):
        return None
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> None:
        torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: SLF001  no public name

    return round(2 * size**3 / seconds(product) / 1e12)


def host(folder: Path | None) -> dict[str, Any]:
    """A file written and read again from the page cache, in GB a second."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "file"
        block = os.urandom(64 << 20)
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        wrote = time.perf_counter() - started
        started = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(64 << 20):
                pass
        read = time.perf_counter() - started
    return {"written_gb_per_s": round(_BYTES / wrote / 1e9, 2), "read_gb_per_s": round(_BYTES / read / 1e9, 2)}


def all_reduce(ranks: int) -> float:
    """Bytes of one GPU's array over the time of summing it over `ranks` GPUs, in GB a second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_rank, args=(ranks, port, queue), nprocs=ranks)
    return float(queue.get())


def _rank(rank: int, ranks: int, port: int, queue: Any) -> None:
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    values = torch.ones(16 << 20, dtype=torch.bfloat16, device="cuda")
    taken = seconds(lambda: torch.distributed.all_reduce(values))
    if rank == 0:
        queue.put(round(values.numel() * 2 / taken / 1e9, 1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
