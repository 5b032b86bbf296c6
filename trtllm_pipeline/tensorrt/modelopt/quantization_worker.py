"""The quantization worker: quantizes a Hugging Face directory with NVIDIA Model Optimizer."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import FailureClass, StageError, write_json
from trtllm_pipeline.models import Fields, model_files
from trtllm_pipeline.tensorrt.modelopt import (
    calibration_batches,
    calibration_memory,
    checkpoint_writer,
    formats,
    forward,
    imports,
    kernel_warmup,
)
from trtllm_pipeline.tensorrt.modelopt.checkpoint_writer import Layout
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.calibration_rows import Tokens, choose, default_set, read_rows
from trtllm_pipeline.tensorrt.stage.params import Selection

if TYPE_CHECKING:
    import torch

FACTS_FILE: Final = "quantize.json"
SCHEMA: Final = 1
BESIDE_WEIGHTS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model directory that accompany the weights of a Hugging Face checkpoint, which is served as a whole."""
_PACKAGES: Final = ("nvidia-modelopt", "torch", "transformers", "safetensors")


def run(context: StageContext[Any]) -> None:
    """Program of the stage. Input `model`: a Hugging Face directory. File `calibration_data`: JSON Lines, for calibration.

    Writes a checkpoint of the requested format and `quantize.json`: times, memory, batch size, rows, versions.
    """
    _require_packages()
    # Copying tensors off the GPU is mostly page faults. Huge pages reduce them. Torch reads it at its first allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    imports.leave_out()
    work = Quantization(context)
    try:
        facts = work.run()
    except RuntimeError as error:
        if not calibration_memory.is_out_of_memory(error):
            raise
        raise StageError(
            f"memory ran out outside calibration: {str(error).splitlines()[0]}",
            failure=FailureClass.OUT_OF_MEMORY,
            hint="use more or larger GPUs",
        ) from error
    write_json(context.out / FACTS_FILE, facts)
    params, times = context.params, ", ".join(f"{name} {value:.1f} s" for name, value in work.times_s.items())
    print(f"{params.precision} checkpoint ({params.checkpoint_format}): {times}", flush=True)  # noqa: T201 - the stage's log


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspends cycle collection: it would traverse all objects whenever their number has grown by a quarter.

    For short phases in which nothing is measured or served. Also a decorator.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def timed(times_s: dict[str, float], name: str) -> Iterator[None]:
    """Count the wall time within as `name`, including the GPUs' work. Repeated phases are added up."""
    started = time.monotonic()
    try:
        yield
        _synchronize()
    finally:
        times_s[name] = times_s.get(name, 0.0) + time.monotonic() - started


class Quantization:
    """The requested work of a stage, and the duration of each phase."""

    def __init__(self, context: StageContext[Any]) -> None:
        """Raises StageError for an impossible request."""
        self.context, self.asked, self.model = context, context.params, context.inputs["model"]
        self.for_engines = self.asked.checkpoint_format == "tensorrt_llm"
        self.precision = formats.precision(self.asked.precision)
        self.kv_cache = formats.kv_cache_algorithm(self.asked.kv_cache_precision)
        self.selection = self.asked.calibration or Selection()
        self.times_s: dict[str, float] = {}
        if self.kv_cache == "NVFP4" and self.for_engines:
            raise StageError(
                "kv_cache_precision nvfp4: no engine reads it",
                failure=FailureClass.INFEASIBLE,
                hint="choose fp8 or int8, or the format hugging_face",
            )

    def phase(self, name: str) -> AbstractContextManager[None]:
        return timed(self.times_s, name)

    def run(self) -> dict[str, Any]:
        config, layout = _read_config(self.model), Layout(self.asked.tp, self.asked.pp)
        if self.for_engines:
            checkpoint_writer.check_layout(config, layout, self.precision)
        else:
            checkpoint_writer.check_experts(config, self.precision)
        with self.phase("import"), uncollected():
            import torch
            from transformers import AutoModelForCausalLM  # noqa: F401 - for its time
        # Their objects stay, and are excluded from later collections. A failed model's objects are not: they must be
        # freed.
        gc.freeze()
        torch.manual_seed(self.selection.seed)

        rows: list[list[int]] = []
        if calibrated := self.precision.calibrated or self.kv_cache is not None:
            with self.phase("tokenize"):
                rows = self.rows(config)
        model, used = self.quantized(rows)
        self.export(model, config, layout)
        measured = {"rows": len(rows), "tokens": sum(map(len, rows)), "digest": calibration_batches.digest(rows)}
        return {
            "schema": SCHEMA,
            "precision": self.asked.precision,
            "kv_cache_precision": self.kv_cache,
            "dtype": str(model.dtype).removeprefix("torch."),
            "format": self.asked.checkpoint_format,
            "tp": layout.tp,
            "pp": layout.pp,
            "calibration": {**measured, "batch_size": used} if calibrated else None,
            "times_s": {name: round(value, 3) for name, value in self.times_s.items()},
            "peak_memory": calibration_memory.peak(),
            "device": _device_name(),
            "versions": {package: version(package) for package in _PACKAGES},
        }

    def rows(self, config: dict[str, Any]) -> list[list[int]]:
        longest = min(self.selection.max_length, config.get("max_position_embeddings") or self.selection.max_length)
        selection = replace(self.selection, max_length=longest)
        data = self.context.files.get("calibration_data") or default_set()
        chosen = choose(read_rows(data, selection.column), selection)
        tokenized = calibration_batches.tokenize(self.model, chosen, selection)
        beyond = max(map(max, tokenized))
        if config.get("vocab_size") and beyond >= config["vocab_size"]:
            raise StageError(
                f"the calibration rows have token {beyond}, but the model's embedding ends at {config['vocab_size'] - 1}",
                failure=FailureClass.USER,
                hint="the rows were tokenized for another model, or the tokenizer is another model's",
            )
        return tokenized

    def quantized(self, rows: Sequence[Tokens]) -> tuple[Any, int | None]:
        """The model with calibrated quantizers, and the rows of a batch at the end."""
        if self.kv_cache is None and formats.keeps_weights(self.precision, for_engines=self.for_engines):
            with self.phase("load"):
                return self.load(None), None
        size = self.asked.batch_size
        # Importing Model Optimizer takes as long as reading the weights, and does not need them.
        with uncollected(), ThreadPoolExecutor(1, thread_name_prefix="import") as thread:
            imported = thread.submit(formats.configuration, self.precision, self.kv_cache, for_engines=self.for_engines)
            with self.phase("load"):
                model = self.load(kernel_warmup.rehearsal(imported, rows, self.precision, size))
                quantizer = imported.result()
        while True:
            if rows and size is None:
                size = calibration_memory.fitting_rows(model, max(map(len, rows)), searches=self.precision.searches)
            try:
                with self.phase("calibrate"):
                    return model, self.calibrate(model, quantizer, rows, size or 1)
            except forward.SmallerBatchError as error:
                size = error.size
            # This model has partial losses of the failed batch: free it before the next one is loaded.
            del model
            calibration_memory.release()
            with self.phase("load"):
                model = self.load(None)

    def calibrate(self, model: Any, quantizer: dict[str, Any], rows: Sequence[Tokens], size: int) -> int | None:
        """Add quantizers to `model` and calibrate them on `rows`, `size` at a time. Returns the rows of a batch at the end, None
        without rows.

        Raises StageError (out of memory) if one row does not fit, SmallerBatchError if a search must start again.
        """
        import modelopt.torch.quantization as mtq

        if not rows:
            mtq.quantize(model, quantizer)
            return None
        loop = forward.CalibrationLoop(
            rows,
            min(size, len(rows)),
            self.precision.passes,
            restart=self.precision.searches,
            progress=lambda done, total: self.context.progress(done, total, "rows"),
        )
        tokens = sum(map(len, rows))
        print(f"calibrating on {len(rows)} rows, {tokens} tokens, {loop.batch_size} rows at once", flush=True)  # noqa: T201 - the stage's log
        with uncollected():
            mtq.quantize(model, formats.concerning(quantizer, model), forward_loop=loop)
        return loop.batch_size

    def load(self, rehearse: Callable[[Any], None] | None) -> Any:
        """The model, on the GPUs if there are any. Meanwhile `rehearse` is called as in `kernel_warmup.during_load`.

        Raises StageError if it does not load or fit.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        from trtllm_pipeline.tensorrt.modelopt import experts

        gpus = torch.cuda.device_count()
        placement: Any = {"": "cpu"} if gpus == 0 else {"": 0} if gpus == 1 else "auto"
        try:
            config = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
            dtype = _dtype(config, self.asked.precision)
            kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
            with nullcontext() if rehearse is None else kernel_warmup.during_load(self.model, config, dtype, rehearse):
                model = kind.from_pretrained(
                    self.model,
                    config=config,
                    dtype=dtype,
                    device_map=placement,
                    trust_remote_code=False,
                    local_files_only=True,
                )
        except Exception as error:  # transformers' exceptions for a damaged directory are not documented
            if calibration_memory.is_out_of_memory(error):
                raise
            needs_code = "trust_remote_code" in str(error)
            raise StageError(
                f"the model in {self.model} does not load: {next(iter(str(error).splitlines()), type(error).__name__)}",
                failure=FailureClass.USER if needs_code else FailureClass.INFEASIBLE,
                hint="it has its own code, which is not run here: try a version of transformers with the architecture"
                if needs_code
                else "download the model again, or try a newer version of transformers",
            ) from error
        if gpus and {"cpu", "disk"} & {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}:
            raise StageError(
                f"the model in {self.model} does not fit into {gpus} GPUs",
                failure=FailureClass.OUT_OF_MEMORY,
                hint="use more or larger GPUs",
            )
        if self.for_engines:
            experts.take_apart(model)
            if self.asked.tp > 1:
                experts.reorder(model, self.asked.tp)
        return model.eval()

    def export(self, model: Any, config: dict[str, Any], layout: Layout) -> None:
        import torch

        out = self.context.out

        def progress(done: int, total: int) -> None:
            self.context.progress(done, total, "pieces written")

        with torch.inference_mode():
            if self.for_engines:
                checkpoint_writer.write(
                    model,
                    config,
                    out,
                    precision=self.precision,
                    kv_cache=self.kv_cache,
                    layout=layout,
                    progress=progress,
                    phase=self.phase,
                )
                return
            with self.phase("export"):
                if self.precision.config is None and self.kv_cache is None:
                    model.save_pretrained(out)
                else:
                    from modelopt.torch.export import export_hf_checkpoint

                    export_hf_checkpoint(model, export_dir=out)
        for name in BESIDE_WEIGHTS:
            source = model_files.find(self.model, name)
            if source is not None and not (out / name).exists():
                model_files.copy(source, out / name)
        progress(1, 1)


def _dtype(config: Any, precision: str) -> torch.dtype:
    import torch

    if precision in {"fp16", "bf16"}:
        return torch.float16 if precision == "fp16" else torch.bfloat16
    # Scales and kernels are for 16 bits: wider types become bfloat16, which has the same range.
    return torch.float16 if config.dtype == torch.float16 else torch.bfloat16


def _read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. For a model with images, the text part is at the top.

    Raises DownloadError if that or files next to the weights must not be opened or read.
    """
    for name in BESIDE_WEIGHTS:
        if model_files.find(folder, name) is not None and name.endswith(".json"):
            model_files.read_json(folder, name)
    config = Fields.read(folder, "config.json")
    if config.has("quantization_config"):
        raise StageError(
            f"{folder / 'config.json'} belongs to a model that is quantized already",
            failure=FailureClass.INFEASIBLE,
            hint="start from the unquantized model",
        )
    config = Fields({**config.fields("text_config").values, **config.values}, folder / "config.json")
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

    from trtllm_pipeline.base import model as machines

    return torch.cuda.get_device_name() if torch.cuda.is_available() else machines.cpu_name()
