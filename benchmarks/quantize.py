"""Speed of the quantization worker by phase, compared with batch 1 and with the minimum arithmetic.

    python benchmarks/quantize.py [--shape qwen2-7b] [--layers N] [--runs fp8,int8_sq,int4_awq/32] [--samples 512] ...

First, a directory with random weights in a model's true shape is created (no download, no tokenizer: rows are token ids). Then the
stage's own program runs on it. A run is written PRECISION[/SAMPLES][@BATCH][:tpN][:gN][:hf], gN for N GPUs. `--by-hand` names runs
that are repeated as a plain script would do them: one row at a time through the whole model with its head, Model Optimizer's own
export. `--process` names runs that are done first, each in a separate process as in the pipeline: kernels are not loaded yet, and
`process s` is the time from start to end with imports.

The floor of calibration is 2 x parameters x tokens / matrix rate for each forward pass of the precision (AWQ: one
for its statistics, and one plus eleven candidates for its search). The rate is measured here with random bf16 matrices. Stage
times exclude importing Python packages. Weights come from the page cache. Both are equal on both sides.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base.files.writing import write_json
from trtllm_pipeline.tensorrt import worker as worker_file
from trtllm_pipeline.tensorrt.modelopt import calibration_memory, job, quantization_worker
from trtllm_pipeline.tensorrt.modelopt.checkpoint_writer import FAMILIES
from trtllm_pipeline.tensorrt.modelopt.shards import ShardWriter
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import Selection
from trtllm_pipeline.tensorrt.toolchains.model_shape import Shape
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint, HuggingFaceCheckpoint

_LLAMA: Final = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0}
COMMON: Final = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen2-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_theta": 1000000.0,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_theta": 1000000.0,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "toy": {
        **_LLAMA,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}
_ATTEMPT: Final = "attempt"
_FORWARDS: Final = {"int4_awq": 13, "w4a8_awq": 13}
_RUN: Final = re.compile(
    r"(?P<precision>\w+)(/(?P<samples>\d+))?(@(?P<batch>\d+))?(:tp(?P<tp>\d+))?(:g(?P<gpus>\d+))?(?P<hf>:hf)?"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One requested measurement."""

    text: str
    precision: str
    samples: int
    batch: int | None
    tp: int
    format: str
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: times in seconds, memory in GB."""

    run: str
    by: str
    rows: int
    tokens: int
    batch: int | None
    load_s: float
    calibrate_s: float
    export_s: float
    write_s: float
    stage_s: float
    floor_s: float
    over_floor: float
    gpu_peak_gb: float | None
    host_peak_gb: float | None
    written_gb: float
    process_s: float | None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2-7b")
    parser.add_argument("--layers", type=int, help="layers, fewer than in the shape if it does not fit")
    parser.add_argument("--runs", default="fp8,int8_sq,int4_awq/32", help="comma-separated runs, as above")
    parser.add_argument("--by-hand", default="", help="runs also done by hand")
    parser.add_argument("--process", default="", help="runs also done in separate processes, before all others")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--limit-s", type=float, default=500.0, help="no run starts after this time")
    parser.add_argument("--folder", type=Path, help="directory for models and checkpoints (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="a directory for checkpoints alone, where both would not fit")
    parser.add_argument("--json", type=Path, help="where to write the figures as well")
    options = parser.parse_args()
    # Packages are compiled, as pip leaves them, whatever the environment says: reading torch's sources takes 7 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    started = time.monotonic()
    shape = {**COMMON, **SHAPES[options.shape]}
    full = int(shape["num_hidden_layers"])
    shape["num_hidden_layers"] = options.layers or full
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.out:
            (folder / _ATTEMPT).symlink_to(options.out.resolve() / f"{_ATTEMPT}-{os.getpid()}")
        seconds = _timed(lambda: write_model(folder / "model", shape))
        say(
            f"{options.shape}, {shape['num_hidden_layers']} of {full} layers: random weights written in {seconds:.1f} s"
        )
        _warm_up(folder, options)
        rate = matrix_rate()
        parameters = count_parameters(shape)
        say(f"{parameters / 1e9:.2f} billion parameters, matrix products at {rate / 1e12:.0f} TFLOP/s")
        rows: list[Row] = []
        report = {
            "shape": options.shape,
            "layers": shape["num_hidden_layers"],
            "layers_of_the_shape": full,
            "parameters": parameters,
            "matrix_tflop_per_s": round(rate / 1e12, 1),
            "length": options.length,
        }
        for run, by in _runs(options):
            if time.monotonic() - started > options.limit_s:
                say(f"left out for time: {run.text} ({by})")
                continue
            data = folder / "rows.jsonl"
            write_rows(data, run.samples, options.length, int(shape["vocab_size"]))
            measured = _WAYS[by](folder, run)
            floor = 2 * parameters * run.samples * options.length * _FORWARDS.get(run.precision, 1) / rate
            rows.append(_row(run, by, measured, run.samples * options.length, floor))
            say(json.dumps(asdict(rows[-1])))
            if options.json:
                write_json(options.json, {**report, "runs": [asdict(row) for row in rows], "ratios": _ratios(rows)})
    _print(rows)


def say(text: str) -> None:
    """A line of the log."""
    print(text, file=sys.stderr, flush=True)


def numbers(shape: Mapping[str, Any]) -> dict[str, Any]:
    """A shape as in a recipe. Only matrices count as weights, because norms and biases are small."""
    heads = int(shape["num_attention_heads"])
    recipe = {**shape, "head_dim": int(shape.get("head_dim") or int(shape["hidden_size"]) // heads)}
    recipe["num_experts"] = shape.get("num_local_experts") or shape.get("num_experts")
    untied = Shape.of({**recipe, "parameters": None})
    table = untied.vocab_size * untied.hidden_size
    return {**recipe, "parameters": untied.weights + (0 if recipe["num_experts"] else table)}


def count_parameters(shape: Mapping[str, Any]) -> int:
    """Weights of the embedding, the layers' matrices and the head."""
    return int(numbers(shape)["parameters"])


def write_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """A Hugging Face directory with random bfloat16 weights of a shape of Llama, Qwen2, Mixtral or Qwen3's mixtures."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden, inner, vocab = int(shape["hidden_size"]), int(shape["intermediate_size"]), int(shape["vocab_size"])
    head, heads = int(numbers(shape)["head_dim"]), int(shape["num_attention_heads"])
    wide, kv, kind = heads * head, head * int(shape["num_key_value_heads"]), str(shape["model_type"])

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=device).mul_(columns**-0.5).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def mlp(prefix: str, names: Sequence[str], inner: int) -> dict[str, torch.Tensor]:
        gate, up, down = (f"{prefix}.{name}.weight" for name in names)
        return {gate: matrix(inner, hidden), up: matrix(inner, hidden), down: matrix(hidden, inner)}

    def experts(prefix: str, names: Sequence[str], count: int, inner: int) -> dict[str, torch.Tensor]:
        by_name = {f"{prefix}.gate.weight": matrix(count, hidden)}
        for index in range(count):
            by_name |= mlp(f"{prefix}.experts.{index}", names, inner)
        return by_name

    folder.mkdir()
    write_json(folder / "config.json", shape)
    layers = int(shape["num_hidden_layers"])
    with ShardWriter(folder / "model.safetensors", (16 + 3 * _experts(shape)) * (layers + 1)) as file:
        file.add({"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": ones(hidden)})
        file.add({"lm_head.weight": matrix(vocab, hidden)})
        for index in range(layers):
            tensors = {
                "self_attn.q_proj.weight": matrix(wide, hidden),
                "self_attn.k_proj.weight": matrix(kv, hidden),
                "self_attn.v_proj.weight": matrix(kv, hidden),
                "self_attn.o_proj.weight": matrix(hidden, wide),
                "input_layernorm.weight": ones(hidden),
                "post_attention_layernorm.weight": ones(hidden),
            }
            if kind == "mixtral":
                tensors |= experts("block_sparse_moe", ("w1", "w3", "w2"), _experts(shape), inner)
            elif kind == "qwen3_moe":
                tensors |= experts("mlp", _MLP, _experts(shape), int(shape["moe_intermediate_size"]))
                tensors |= {f"self_attn.{part}_norm.weight": ones(head) for part in ("q", "k")}
            else:
                tensors |= mlp("mlp", _MLP, inner)
            if kind == "qwen2":
                for part, size in (("q", wide), ("k", kv), ("v", kv)):
                    tensors[f"self_attn.{part}_proj.bias"] = torch.zeros(size, dtype=torch.bfloat16)
            file.add({f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items()})


_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def _experts(shape: Mapping[str, Any]) -> int:
    return int(numbers(shape)["num_experts"] or 0)


def matrix_rate(size: int = 8192, repeats: int = 20) -> float:
    """Floating-point operations a second of a bf16 matrix product on random data: the median of `repeats`."""
    import torch

    if not torch.cuda.is_available():
        size, repeats = 512, 5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(5):
        a @ b
    times = [_timed(lambda: a @ b) for _ in range(repeats)]
    return float(2 * size**3 / statistics.median(times))


def _timed(work: Any) -> float:
    _synchronize()
    started = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _runs(options: argparse.Namespace) -> Iterator[tuple[Run, str]]:
    for text, by in [
        *((t, "process") for t in options.process.split(",")),
        *((t, "ours") for t in options.runs.split(",")),
        *((t, "hand") for t in options.by_hand.split(",")),
    ]:
        if not text:
            continue
        yield parse_run(text, options.samples), by


def parse_run(text: str, samples: int) -> Run:
    """Parse a run, with `samples` rows by default."""
    match = _RUN.fullmatch(text)
    if match is None:
        raise SystemExit(f"{text!r} is not PRECISION[/SAMPLES][@BATCH][:tpN][:gN][:hf]")
    return Run(
        text=text,
        precision=match["precision"],
        samples=int(match["samples"] or samples),
        batch=int(match["batch"]) if match["batch"] else None,
        tp=int(match["tp"] or 1),
        format="hugging_face" if match["hf"] else "tensorrt_llm",
        gpus=int(match["gpus"] or 1),
    )


def _warm_up(folder: Path, options: argparse.Namespace) -> None:
    """Each precision once on a toy: Model Optimizer compiles its kernels the first time a machine needs them."""
    (folder / "toy").mkdir()
    write_model(folder / "toy" / "model", {**COMMON, **SHAPES["toy"]})
    write_rows(folder / "toy" / "rows.jsonl", 8, 16, 1024)
    for precision in dict.fromkeys(run.precision for run, _ in _runs(options)):
        seconds = _timed(lambda name=precision: _ours(folder / "toy", Run(name, name, 8, None, 1, "tensorrt_llm")))
        say(f"{precision}: first use took {seconds:.1f} s")


def write_rows(path: Path, samples: int, length: int, vocabulary: int) -> None:
    import torch

    rows = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8")


def _ours(folder: Path, run: Run) -> Mapping[str, Any]:
    """The stage's program itself, and what it says of itself."""
    calibration_memory.release()
    _reset_peak()
    with attempt(folder, run) as work:
        quantization_worker.run(work)
        return facts(work)


def _process(folder: Path, run: Run) -> Mapping[str, Any]:
    """The same as the pipeline starts it."""
    calibration_memory.release()
    with attempt(folder, run) as work:
        started = time.monotonic()
        worker_file.write_job("quantize", None, work)
        subprocess.run(job.command(work, sys.executable), check=True, stdout=sys.stderr)
        return {**facts(work), "process_s": round(time.monotonic() - started, 2)}


@contextmanager
def attempt(folder: Path, run: Run) -> Iterator[StageContext[Any]]:
    """The stage's work, in a directory that is gone afterwards."""
    out = (folder / _ATTEMPT).resolve() / "out"
    out.mkdir(parents=True)
    common: dict[str, Any] = {
        "precision": run.precision,
        "family": "llama",
        "batch_size": run.batch,
        "calibration": Selection(samples=run.samples, max_length=8192),
    }
    of_engines = run.format == "tensorrt_llm"
    params = Checkpoint(tp=run.tp, **common) if of_engines else HuggingFaceCheckpoint(**common)
    try:
        yield StageContext(
            params=params,
            inputs={"model": folder / "model"},
            files={"calibration_data": folder / "rows.jsonl"},
            out=out,
            attempt=out.parent,
        )
    finally:
        shutil.rmtree(out.parent)


def facts(work: StageContext[Any]) -> Mapping[str, Any]:
    facts = json.loads((work.out / quantization_worker.FACTS_FILE).read_text(encoding="utf-8"))
    batch = (facts["calibration"] or {}).get("batch_size")
    return {"times": facts["times_s"], "peak": facts["peak_memory"], "batch": batch, "bytes": _size(work.out)}


def _by_hand(folder: Path, run: Run) -> Mapping[str, Any]:
    """As a plain script does it: one row at a time through the whole model, Model Optimizer's own export."""
    import torch
    from modelopt.torch import quantization
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from transformers import AutoModelForCausalLM

    from trtllm_pipeline.tensorrt.modelopt import formats
    from trtllm_pipeline.tensorrt.stage.calibration_rows import read_rows

    calibration_memory.release()
    _reset_peak()
    out, times = folder / "by-hand", dict[str, float]()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with quantization_worker.timed(times, "load"):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16, device_map=device).eval()
    rows = read_rows(folder / "rows.jsonl")

    def loop(model: Any) -> None:
        with torch.no_grad():
            for row in rows:
                model(torch.tensor([row.tokens], device=device))

    try:
        configuration = copy.deepcopy(getattr(quantization, str(formats.precision(run.precision).config)))
        with quantization_worker.timed(times, "calibrate"):
            quantization.quantize(model, configuration, forward_loop=loop)
        with quantization_worker.timed(times, "export"), torch.inference_mode():
            family = FAMILIES[model.config.architectures[0]].decoder
            export_tensorrt_llm_checkpoint(
                model, family, torch.bfloat16, export_dir=out, inference_tensor_parallel=run.tp
            )
        return {"times": times, "peak": calibration_memory.peak(), "batch": 1, "bytes": _size(out)}
    finally:
        shutil.rmtree(out, ignore_errors=True)


_WAYS: Final = {"process": _process, "ours": _ours, "hand": _by_hand}


def _reset_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _row(run: Run, by: str, measured: Mapping[str, Any], tokens: int, floor: float) -> Row:
    times, peak = measured["times"], measured["peak"]
    phases = [float(times.get(name, 0.0)) for name in ("load", "calibrate", "export", "write")]
    gpu = peak["gpu_bytes"]
    return Row(
        run=run.text,
        by=by,
        rows=run.samples,
        tokens=tokens,
        batch=measured["batch"],
        load_s=round(phases[0], 2),
        calibrate_s=round(phases[1], 2),
        export_s=round(phases[2], 2),
        write_s=round(phases[3], 2),
        stage_s=round(sum(phases) + float(times.get("tokenize", 0.0)), 2),
        floor_s=round(floor, 2),
        over_floor=round(phases[1] / floor, 3),
        gpu_peak_gb=None if gpu is None else round(gpu / 1e9, 1),
        # The peak of a process never falls: only the first run's is its own.
        host_peak_gb=round(peak["host_bytes"] / 1e9, 1),
        written_gb=round(measured["bytes"] / 1e9, 2),
        process_s=measured.get("process_s"),
    )


def _ratios(rows: Sequence[Row]) -> Mapping[str, Mapping[str, float]]:
    """How many times faster ours is than the same by hand."""
    ours = {row.run: row for row in rows if row.by == "ours"}
    return {
        row.run: {
            "calibrate": round(row.calibrate_s / ours[row.run].calibrate_s, 2),
            "stage": round(row.stage_s / ours[row.run].stage_s, 2),
        }
        for row in rows
        if row.by == "hand" and row.run in ours
    }


def _print(rows: Sequence[Row]) -> None:
    print(
        "| run | by | rows | batch | load s | calibrate s | export s | write s | stage s | process s | floor s | x floor | GPU GB | out GB |"
    )
    print("|" + "---|" * 14)
    for row in rows:
        cells = (
            row.run, row.by, row.rows, row.batch, row.load_s, row.calibrate_s, row.export_s, row.write_s, row.stage_s,
            row.process_s, row.floor_s, row.over_floor, row.gpu_peak_gb, row.written_gb,
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
    for run, ratio in _ratios(rows).items():
        print(f"{run}: calibration {ratio['calibrate']} times, stage {ratio['stage']} times as fast as by hand")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
