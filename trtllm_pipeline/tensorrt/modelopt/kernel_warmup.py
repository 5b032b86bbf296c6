"""Loads the GPU's kernels while the weights are read and the GPU is idle.

A process's first batch waits about a second for kernels and libraries. One layer of the model's shape, with random weights,
is quantized the same way beforehand, so that calibration finds them loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.tensorrt.modelopt import calibration_memory, forward
from trtllm_pipeline.tensorrt.modelopt.formats import WeightPrecision
from trtllm_pipeline.tensorrt.stage.calibration_rows import Tokens

if TYPE_CHECKING:
    import torch

_VOCABULARY: Final = 8
_WEIGHT_FILES: Final = ("*.safetensors", "*.bin")


@contextmanager
def during_load(folder: Path, config: Any, dtype: torch.dtype, rehearse: Callable[[Any], None]) -> Iterator[None]:
    """In this context, `rehearse` runs on one random layer of the model in `folder`, whose configuration is `config`.

    Leaving the context waits for it. Its errors are printed, without other effects. Not done without a GPU, with several (each
    would need a separate run), and with one that is more than half filled by the weights.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="warm") as thread:
        try:
            # Not in the thread: constructing a model changes process-wide settings of transformers.
            if (device := _device(folder)) is not None:
                thread.submit(_attempt, rehearse, _layer(config, dtype, device))
        except Exception as error:  # noqa: BLE001 - the stage works without
            _tell(error)
        yield


def rehearsal(
    quantizer: Future[dict[str, Any]], rows: Sequence[Tokens], precision: WeightPrecision, batch_size: int | None
) -> Callable[[Any], None]:
    """The rehearsal: the quantization, on one batch of the first shape, once `quantizer` is set. Before that, only the batch: most
    of the missing kernels are those of the model itself.
    """

    def rehearse(layer: Any) -> None:
        first: list[list[int]] = []
        if rows:
            longest = max(map(len, rows))
            size = batch_size or calibration_memory.fitting_rows(layer, longest, searches=precision.searches)
            first = [[0] * len(row) for row in sorted(rows, key=len, reverse=True)[:size]]
            forward.run_unmeasured(layer.base_model, first)
        configuration = copy.deepcopy(quantizer.result())
        import modelopt.torch.quantization as mtq

        loop = None
        if first:
            loop = forward.CalibrationLoop(
                first, len(first), precision.passes, restart=precision.searches, progress=lambda _done, _total: None
            )
        mtq.quantize(layer, configuration, forward_loop=loop)

    return rehearse


def _attempt(rehearse: Callable[[Any], None], layer: Any) -> None:
    try:
        rehearse(layer)
    except Exception as error:  # noqa: BLE001 - the stage works without
        _tell(error)
    del layer
    calibration_memory.release()


def _device(folder: Path) -> torch.device | None:
    import torch

    if torch.cuda.device_count() != 1:
        return None
    weights = sum(file.stat().st_size for pattern in _WEIGHT_FILES for file in folder.glob(pattern))
    free, _ = torch.cuda.mem_get_info(0)
    return torch.device("cuda", 0) if 2 * weights <= free else None


def _layer(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of one layer and a few words."""
    import torch
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    layers = small.num_hidden_layers
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, _VOCABULARY, None
    for name, value in vars(small).items():
        if isinstance(value, list) and len(value) == layers:  # one value for each layer
            setattr(small, name, value[:1])
    # The state of random numbers is restored: results must not depend on the rehearsal.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        return AutoModelForCausalLM.from_config(small, dtype=dtype, trust_remote_code=False).eval()


def _tell(error: Exception) -> None:
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    print(f"kernels were not loaded ahead, so the first batch will be slower: {reason}", flush=True)  # noqa: T201 - the stage's log
