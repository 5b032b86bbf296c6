"""The roofline of decoding: the minimum time of one pass over a model's weights.

A dense model reads all its weights for every output token, so a token cannot take less time than weights / memory
bandwidth (Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009; for decoding: Pope et al., Efficiently Scaling
Transformer Inference, 2022, section 2.2).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trtllm_pipeline.base import DownloadError, gpus, speeds
from trtllm_pipeline.base import model as machines
from trtllm_pipeline.models import (
    INDEX,
    SINGLE,
    Fields,
    ModelFileError,
    gguf_header,
    model_files,
    read_index,
    speculation_of,
    verify,
)

CPU_MARGIN: Final = 4.0
"""Factor by which a runtime may exceed the measured memory bandwidth of a CPU. It is large because the measurement can
be several times too low: other processes may use cores and memory at the same time, and caches that would hold a small
model are cold. A GPU's bandwidth comes from its data sheet, without a margin.
"""
_MOST_READ_BYTES: Final = 256 << 20
_LEAST_READ_BYTES: Final = 16 << 20
"""Minimum bytes per thread and reading, so that thread start-up is negligible."""
_READINGS: Final = 5
_MIXTURE: Final = "a mixture of experts reads a part of its weights for a token"
_MOSTLY_TABLE: Final = "the size of the weights is not known, or most of it is the embedding table"
_HEADS: Final = ("lm_head.weight", "embed_out.weight", "output.weight")
_EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
    "token_embd.weight",
)
_VISION: Final = re.compile(r"(^|\.)(visual|vision)")
_SERVED_BITS: Final = 16
"""Maximum bits of a loaded value of a Hugging Face model: 32-bit weights are loaded as 16-bit."""
_TORCH: Final = "pytorch_model*.bin"
_TORCH_SINGLE: Final = "pytorch_model.bin"
_TORCH_BITS: Final = {"float16": 16, "bfloat16": 16}
_Form = Literal["engine", "safetensors", "torch", "gguf"]
_CLOCK_MEM: Final = 2
"""As in nvml.h."""


@dataclass(frozen=True, slots=True)
class Limit:
    """`pass_s` is the minimum time of one pass in seconds. None if unknown, with a `reason`."""

    pass_s: float | None
    weight_bytes: int | None
    reason: str


def limit(engine: Path, *, tp: int = 1, weight_bits: int = _SERVED_BITS) -> Limit:
    """The limit for a directory with an engine, a Hugging Face model, or a GGUF file or its directory, on this machine.
    `weight_bits`: see `bytes_per_token`.

    A TensorRT engine runs on GPUs, with `tp` of them reading in parallel. So do other models if there is a GPU.
    Otherwise, the CPU's memory bandwidth is measured, which takes up to a second.
    """
    read_bytes, reason = bytes_per_token(engine, weight_bits)
    if read_bytes is None:
        return Limit(None, None, reason)
    on_gpus = any(engine.glob("rank*.engine"))
    a_model = _form(engine, Fields.read_optional(engine, "config.json")) != "engine"
    bandwidth, source = gpu_bandwidth() if on_gpus or a_model else (None, "")
    if bandwidth is not None:
        return Limit(read_bytes / (bandwidth * tp), read_bytes, f"{tp} x {bandwidth / 1e9:.0f} GB/s by {source}")
    if on_gpus:
        why = "the GPU's memory bandwidth is not known, or nvidia-ml-py is not installed (the extra `gpu`)"
        return Limit(None, read_bytes, why)
    bandwidth = cpu_bandwidth(read_bytes)
    words = f"{bandwidth / 1e9:.0f} GB/s measured here, and {CPU_MARGIN:g} times that allowed"
    return Limit(read_bytes / (bandwidth * CPU_MARGIN), read_bytes, words)


def bytes_per_token(engine: Path, weight_bits: int = _SERVED_BITS) -> tuple[int | None, str]:
    """Minimum bytes of weights that one token reads. If unknown, None and the reason.

    A token reads one row of an embedding table that is not also the output head, so the table is left out, at four
    bytes per value. Values of a Hugging Face model are capped at the server's weight bits. 0: unknown.
    """
    try:
        return _bytes_per_token(engine, weight_bits)
    except ModelFileError as error:
        return None, f"the engine's {error.short}"
    except DownloadError as error:
        return None, error.message


def _form(engine: Path, config: Fields) -> _Form:
    """The form of the weights in a directory or a file."""
    if engine.is_file():
        return "gguf"
    if any(engine.glob("*.safetensors")):
        return "safetensors"
    if any(engine.glob(_TORCH)):
        return "torch"
    built = any(config.has(name) for name in ("weights_bytes", "geometry", "pretrained_config", "build_config"))
    return "gguf" if not built and any(engine.glob("*.gguf")) else "engine"


def _bytes_per_token(engine: Path, weight_bits: int) -> tuple[int | None, str]:
    config = Fields.read_optional(engine, "config.json")
    form = _form(engine, config)
    if form == "gguf":  # a server keeps the bits that it has
        headers = [gguf_header.read(path) for path in gguf_header.files(engine)]
        if any(each.experts for each in headers):
            return None, _MIXTURE
        return _read({name: size for each in headers for name, size in each.tensors.items()}), ""
    config = Fields.read(engine, "config.json")
    if form != "engine":
        return (_of_torch if form == "torch" else _of_model)(engine, config, weight_bits)
    model = config.fields("pretrained_config" if config.has("pretrained_config") else "geometry")
    experts = [model.optional_integer(name) for name in ("num_experts", "num_local_experts")]
    if any((*experts, model.fields("moe").optional_integer("num_experts"))):
        return None, _MIXTURE
    if speculation_of(config.fields("build_config")) is not None:
        return None, "with speculative decoding one pass can give several tokens"
    weights = config.integer("weights_bytes", 0, least=0, most=2**63)
    weights = weights or sum(file.stat().st_size for file in engine.glob("rank*.engine"))
    sizes = [model.optional_integer(name) or 0 for name in ("vocab_size", "hidden_size")]
    table = 0 if model.flag("tie_word_embeddings") else 4 * math.prod(sizes)
    if weights <= table:
        return None, _MOSTLY_TABLE
    return weights - table, ""


def _shards(folder: Path) -> list[str]:
    """Weight files that a server reads. Some directories also have the same weights in another format."""
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if names and (folder / INDEX).is_file():
        return sorted({*read_index(folder).values()})
    return [SINGLE] if SINGLE in names else names


def _of_model(folder: Path, config: Fields, weight_bits: int) -> tuple[int | None, str]:
    """The same of a Hugging Face model, by the headers of the files that a server reads."""
    if reason := _unknown(config, weight_bits):
        return None, reason
    stored = [tensor for shard in _shards(folder) for tensor in verify.tensors(folder, shard).tensors.items()]
    sizes = {name: min(each.end - each.begin, math.prod(each.shape) * weight_bits // 8) for name, each in stored}
    return _read(sizes), ""


def _of_torch(folder: Path, config: Fields, weight_bits: int) -> tuple[int | None, str]:
    """The same of a model in files of torch, by their size: at least, if its config.json says less than all."""
    if reason := _unknown(config, weight_bits):
        return None, reason
    if config.has("vision_config"):
        return None, "which part of a file of torch is a vision encoder is not known"
    files = [folder / _TORCH_SINGLE] if (folder / _TORCH_SINGLE).is_file() else folder.glob(_TORCH)
    stored_bits = _TORCH_BITS.get(config.text("torch_dtype") or "", 32)
    sizes = [config.optional_integer(name) or 0 for name in ("vocab_size", "hidden_size")]
    table = 0 if config.flag("tie_word_embeddings") else math.prod(sizes)
    values = sum(file.stat().st_size for file in files) * 8 // stored_bits - table
    if values <= 0:
        return None, _MOSTLY_TABLE
    return values * min(stored_bits, weight_bits) // 8, ""


def _unknown(config: Fields, weight_bits: int) -> str | None:
    """Why the bytes per token of a Hugging Face model are not known."""
    if model_files.num_experts(config.values) is not None:
        return _MIXTURE
    if weight_bits == 0:
        return "the server's bits per weight are not known: its command line is the matrix's own"
    return None


def _read(sizes: Mapping[str, int]) -> int:
    """Bytes of the tensors that a token reads: no vision parts, and no embeddings that are not also the output head."""

    def named(name: str, kinds: tuple[str, ...]) -> bool:
        return f".{name}".endswith(tuple(f".{kind}" for kind in kinds))

    untied = any(named(name, _HEADS) for name in sizes)
    return sum(
        size for name, size in sizes.items() if not (untied and named(name, _EMBEDDINGS)) and not _VISION.search(name)
    )


def cpu_bandwidth(size: int) -> float:
    """Bytes per second at which all CPUs together read a buffer of `size` bytes (up to 256 MiB), the best of several
    readings.

    A buffer as small as the weights uses the caches as the weights do.
    """
    import numpy as np

    parts = machines.cpu_count()
    count = max(1024, min(size, _MOST_READ_BYTES) // 4 // parts)
    times = max(1, _LEAST_READ_BYTES // (4 * count))
    buffers = [np.ones(count, dtype=np.float32) for _ in range(parts)]

    def read(part: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        for _ in range(times):
            np.dot(part, part)  # vectorized, and without the interpreter lock

    best_s = float("inf")
    with ThreadPoolExecutor(parts) as pool:
        for _ in range(_READINGS):
            started = time.perf_counter()
            list(pool.map(read, buffers))
            best_s = min(best_s, time.perf_counter() - started)
    return parts * count * times * 4 / best_s


def gpu_bandwidth() -> tuple[float | None, str]:
    """Peak memory bandwidth of the fastest NVIDIA GPU in bytes per second, and its source. None without a GPU or
    nvidia-ml-py.

    Bus width x highest memory clock x 2 transfers per cycle, both from NVML. Otherwise from the data sheet of a GPU
    with that name.
    """
    with gpus.nvml() as ask:
        if ask is None:
            return None, ""
        devices = [
            (
                ask("nvmlDeviceGetMemoryBusWidth", handle),
                ask("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_MEM),
                ask("nvmlDeviceGetName", handle) or "",
            )
            for handle in ask.handles()
        ]
    by_nvml = max((bits / 8 * mhz * 1e6 * 2 for bits, mhz, _ in devices if bits and mhz), default=None)
    if by_nvml is not None:
        return by_nvml, "NVML"
    sheets = [(bandwidth, name) for _, _, name in devices if (bandwidth := speeds.sheet_bandwidth(name)) is not None]
    bandwidth, name = max(sheets, default=(None, ""))
    return bandwidth, f"the data sheet of {name}"
