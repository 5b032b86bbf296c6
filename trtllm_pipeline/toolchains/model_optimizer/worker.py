"""The quantization worker: a Hugging Face folder becomes a quantized checkpoint, with NVIDIA Model Optimizer."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.files import model_files
from trtllm_pipeline.files.model_files import Fields
from trtllm_pipeline.files.writing import write_json
from trtllm_pipeline.stages.base import StageContext
from trtllm_pipeline.stages.calibration_rows import Tokens, choose, default_set, read_rows
from trtllm_pipeline.stages.params import Selection
from trtllm_pipeline.toolchains.files import TOKENIZER_FILES
from trtllm_pipeline.toolchains.model_optimizer import calibration, checkpoint, formats, forward, kernel_warmup, memory
from trtllm_pipeline.toolchains.model_optimizer.checkpoint import Layout

if TYPE_CHECKING:
    import torch

FACTS_FILE: Final = "quantize.json"
SCHEMA: Final = 1
_PACKAGES: Final = ("nvidia-modelopt", "torch", "transformers", "safetensors")


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """What is to be made: a stage's parameters, and what they stand for."""

    asked: Any
    precision: formats.WeightPrecision
    kv_cache: str | None
    layout: Layout
    selection: Selection

    @classmethod
    def of(cls, asked: Any) -> QuantizeRequest:
        """The request in a stage's parameters. Raises StageError for what cannot be made."""
        cache = formats.kv_cache_algorithm(asked.kv_cache_precision)
        if cache == "NVFP4" and asked.checkpoint_format == "tensorrt_llm":
            raise StageError(
                "kv_cache_precision nvfp4: no engine reads it",
                failure=FailureClass.INFEASIBLE,
                hint="choose fp8 or int8, or the format hugging_face",
            )
        selection = asked.calibration or Selection()
        return cls(asked, formats.precision(asked.precision), cache, Layout(asked.tp, asked.pp), selection)

    @property
    def for_engines(self) -> bool:
        """Whether a TensorRT-LLM checkpoint is wanted, or else a Hugging Face folder."""
        return bool(self.asked.checkpoint_format == "tensorrt_llm")


@dataclass(slots=True)
class Clock:
    """Wall time by phase, in seconds. A phase that comes again is added up."""

    times_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within as `name`, the GPUs' work included."""
        started = time.monotonic()
        try:
            yield
            _synchronize()
        finally:
            self.times_s[name] = self.times_s.get(name, 0.0) + time.monotonic() - started


def run(context: StageContext[Any]) -> None:
    """Program of the stage. Input `model`: a Hugging Face folder. File `calibration_data`: JSON Lines, for calibration.

    Leaves a checkpoint of the format asked for and `quantize.json`: times, memory, batch size, rows, versions.
    """
    _require_packages()
    # Copying tensors off the GPU is mostly page faults; huge pages make them few. Read by torch at its first allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    request, folder, clock = QuantizeRequest.of(context.params), context.inputs["model"], Clock()
    config = _read_config(folder)
    if request.for_engines:
        checkpoint.check_layout(config, request.layout, request.precision)
    with clock.phase("import"):
        import torch

        quantizer = formats.configuration(request.precision, request.kv_cache, for_engines=request.for_engines)
    torch.manual_seed(request.selection.seed)

    calibrated = request.precision.calibrated or request.kv_cache is not None
    rows: list[list[int]] = []
    if calibrated:
        with clock.phase("tokenize"):
            rows = _read_rows(context, request, config)
    try:
        model, used = _quantized(context, request, clock, quantizer, rows)
        _export(context, request, config, model, clock)
    except RuntimeError as error:
        if not memory.is_out_of_memory(error):
            raise
        raise StageError(
            f"memory ran out outside calibration: {str(error).splitlines()[0]}",
            failure=FailureClass.OUT_OF_MEMORY,
            hint="give it more or larger GPUs",
        ) from error
    facts = {
        "schema": SCHEMA,
        "precision": request.asked.precision,
        "kv_cache_precision": request.kv_cache,
        "dtype": str(model.dtype).removeprefix("torch."),
        "format": request.asked.checkpoint_format,
        "tp": request.layout.tp,
        "pp": request.layout.pp,
        "calibration": {
            "rows": len(rows),
            "tokens": sum(map(len, rows)),
            "digest": calibration.digest(rows),
            "batch_size": used,
        }
        if calibrated
        else None,
        "times_s": {name: round(value, 3) for name, value in clock.times_s.items()},
        "peak_memory": memory.peak(),
        "device": _device_name(),
        "versions": {package: version(package) for package in _PACKAGES},
    }
    write_json(context.out / FACTS_FILE, facts)
    times = ", ".join(f"{name} {value:.1f} s" for name, value in clock.times_s.items())
    print(f"{request.asked.precision} checkpoint ({request.asked.checkpoint_format}): {times}", flush=True)  # noqa: T201 - the stage's log


def _quantized(
    context: StageContext[Any],
    request: QuantizeRequest,
    clock: Clock,
    quantizer: dict[str, Any] | None,
    rows: Sequence[Tokens],
) -> tuple[Any, int | None]:
    """The model with its quantizers calibrated, and the rows of a batch that it ended with."""
    batch_size = request.asked.batch_size
    rehearse = None if quantizer is None else kernel_warmup.rehearsal(quantizer, rows, request.precision, batch_size)
    while True:
        with clock.phase("load"):
            model = load(context.inputs["model"], request, rehearse)
        rehearse = None
        if quantizer is None:
            return model, None
        if rows and batch_size is None:
            batch_size = memory.fitting_rows(model, max(map(len, rows)), searches=request.precision.searches)
        try:
            with clock.phase("calibrate"):
                return model, calibrate(model, quantizer, rows, request.precision, batch_size or 1, context)
        except forward.SmallerBatchError as error:
            batch_size = error.size
        # Losses of the failed batch are half added up in this model: away with it before the next one is loaded.
        del model
        memory.release()


def calibrate(
    model: Any,
    quantizer: dict[str, Any],
    rows: Sequence[Tokens],
    precision: formats.WeightPrecision,
    batch_size: int,
    context: StageContext[Any],
) -> int | None:
    """Put quantizers into `model` and measure what they need on `rows`; the rows of a batch at the end, None without rows.

    Raises StageError (out of memory) where one row does not fit, SmallerBatchError where a search must start again.
    """
    import modelopt.torch.quantization as mtq

    if not rows:
        mtq.quantize(model, quantizer)
        return None
    loop = forward.CalibrationLoop(
        rows,
        min(batch_size, len(rows)),
        precision.passes,
        restart=precision.searches,
        progress=lambda done, total: context.progress(done, total, "rows"),
    )
    tokens = sum(map(len, rows))
    print(f"calibrating on {len(rows)} rows, {tokens} tokens, {loop.batch_size} rows at once", flush=True)  # noqa: T201 - the stage's log
    mtq.quantize(model, quantizer, forward_loop=loop)
    return loop.batch_size


def load(folder: Path, request: QuantizeRequest, rehearse: Callable[[Any], None] | None = None) -> Any:
    """The model in `folder`, on the GPUs where there are any. Meanwhile `rehearse` is called as `warm.beside` says.

    Raises StageError where it does not load or fit.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    gpus = torch.cuda.device_count()
    placement: Any = {"": "cpu"} if gpus == 0 else {"": 0} if gpus == 1 else "auto"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        dtype = _dtype(config, request.asked.precision)
        with nullcontext() if rehearse is None else kernel_warmup.beside(folder, config, dtype, rehearse):
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map=placement,
                trust_remote_code=False,
                local_files_only=True,
            )
    except Exception as error:  # what transformers raises for a damaged folder is not said anywhere
        if memory.is_out_of_memory(error):
            raise
        needs_code = "trust_remote_code" in str(error)
        raise StageError(
            f"the model in {folder} does not load: {next(iter(str(error).splitlines()), type(error).__name__)}",
            failure=FailureClass.USER if needs_code else FailureClass.INFEASIBLE,
            hint="it brings code of its own, which is not run here: try a transformers that has the architecture"
            if needs_code
            else "download the model again, or try a newer transformers",
        ) from error
    spilled = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()} & {"cpu", "disk"})
    if gpus and spilled:
        raise StageError(
            f"the model in {folder} does not fit into {gpus} GPUs",
            failure=FailureClass.OUT_OF_MEMORY,
            hint="give it more or larger GPUs",
        )
    return model.eval()


def _export(
    context: StageContext[Any], request: QuantizeRequest, config: dict[str, Any], model: Any, clock: Clock
) -> None:
    import torch

    def progress(done: int, total: int) -> None:
        context.progress(done, total, "pieces written")

    with torch.inference_mode():
        if request.for_engines:
            checkpoint.write(
                model,
                config,
                context.out,
                precision=request.precision,
                kv_cache=request.kv_cache,
                dtype=model.dtype,
                layout=request.layout,
                progress=progress,
                phase=clock.phase,
            )
            return
        with clock.phase("export"):
            if request.precision.config is None and request.kv_cache is None:
                model.save_pretrained(context.out)
            else:
                from modelopt.torch.export import export_hf_checkpoint

                export_hf_checkpoint(model, export_dir=context.out)
    for name in TOKENIZER_FILES:
        source = model_files.find(context.inputs["model"], name)
        if source is not None and not (context.out / name).exists():
            model_files.copy(source, context.out / name)
    progress(1, 1)


def _dtype(config: Any, precision: str) -> torch.dtype:
    import torch

    if precision in {"fp16", "bf16"}:
        return torch.float16 if precision == "fp16" else torch.bfloat16
    # Scales and kernels are made for 16 bits: what is stored wider becomes bfloat16, which loses no range.
    return torch.float16 if config.dtype == torch.float16 else torch.bfloat16


def _read_rows(context: StageContext[Any], request: QuantizeRequest, config: dict[str, Any]) -> list[list[int]]:
    longest = min(request.selection.max_length, config.get("max_position_embeddings") or request.selection.max_length)
    selection = replace(request.selection, max_length=longest)
    rows = read_rows(context.files.get("calibration_data") or default_set())
    found = calibration.tokenize(context.inputs["model"], choose(rows, selection), selection)
    beyond = max(map(max, found))
    if config.get("vocab_size") and beyond >= config["vocab_size"]:
        raise StageError(
            f"the calibration rows hold token {beyond}, the model's embedding ends at {config['vocab_size'] - 1}",
            failure=FailureClass.USER,
            hint="the rows were tokenized for another model, or the tokenizer is another model's",
        )
    return found


def _read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. Raises DownloadError where that or the tokenizer's files are not to be opened or read."""
    for name in TOKENIZER_FILES:
        if model_files.find(folder, name) is not None and name.endswith(".json"):
            model_files.read_json(folder, name)
    config = Fields.read(folder, "config.json")
    if config.has("quantization_config"):
        raise StageError(
            f"{folder / 'config.json'} is of a model that is quantized already",
            failure=FailureClass.INFEASIBLE,
            hint="start from the unquantized model",
        )
    for name in ("max_position_embeddings", "vocab_size"):
        config.optional_integer(name)
    return dict(config.values)


def _require_packages() -> None:
    for package, module in (("torch", "torch"), ("transformers", "transformers"), ("nvidia-modelopt", "modelopt")):
        if importlib.util.find_spec(module) is None:
            raise StageError(
                f"quantizing needs the package {package}, which {sys.executable} does not have",
                failure=FailureClass.USER,
                hint="pip install 'trtllm-pipeline[quantize]'",
            )


def _synchronize() -> None:
    import torch

    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _device_name() -> str:
    import torch

    from trtllm_pipeline.machine.model import cpu_name

    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
