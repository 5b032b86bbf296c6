"""Other OpenAI-compatible servers as toolchains: vLLM, SGLang, `transformers serve`, llama.cpp's server, and `openai`
for any other, given by its URL or its command line.

download (-> convert, for a command that reads a GGUF file) -> launch -> smoke, perf, accuracy
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import (
    Cell,
    Exclusive,
    Json,
    Machine,
    Needs,
    Resources,
    ServerError,
    assume,
    count,
    memory_size,
    probe,
)
from trtllm_pipeline.models import AS_IS, ModelPart, part_of, shown
from trtllm_pipeline.tensorrt.embedded import toolchain as embedded
from trtllm_pipeline.tensorrt.embedded.params import PRECISIONS as GGUF_PRECISIONS
from trtllm_pipeline.tensorrt.others import command
from trtllm_pipeline.tensorrt.others.command import GGUF, KNOWN
from trtllm_pipeline.tensorrt.stage.base import Stage, StageContext
from trtllm_pipeline.tensorrt.stage.params import DownloadParams, LaunchOpenAi, PerfParams, SmokeParams, load
from trtllm_pipeline.tensorrt.toolchains import tiles
from trtllm_pipeline.tensorrt.toolchains.catalog import EMBEDDED, OPENAI, SERVERS, Toolchain
from trtllm_pipeline.tensorrt.toolchains.common_stages import (
    ACCURACY,
    DOWNLOAD,
    PERF,
    SCORE,
    SMOKE,
    exclusive,
    foreign,
    launch,
    planned_ports,
    rule,
)
from trtllm_pipeline.tensorrt.toolchains.model_shape import FP8_CACHES, Shape, computed, least_bytes
from trtllm_pipeline.tensorrt.toolchains.numerics import Numerics, loaded_as_fp8, unknown
from trtllm_pipeline.tensorrt.toolchains.standard_tasks import TASKS
from trtllm_pipeline.tensorrt.toolchains.time_estimates import READ, source_bytes

ASKED_FOR_S: Final = 2.0
"""Timeout of a running server, when a plan requests its version."""
_OWN_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "quantize": ("calibration", "timeout_s", "retries"),
    "serve": (),
    "build": ("timeout_s", "retries"),
    "repository": ("enable_kv_cache_reuse", "timeout_s", "retries"),
}
"""Section -> the settings that have an effect here, () for all except the options of TensorRT-LLM's programs."""
_SPLITTING: Final = frozenset({"vllm", "sglang"})
"""Servers that split weights over GPUs."""
_WHOLE_EXPERTS: Final = frozenset({"enable_expert_parallel", "ep_size", "expert_parallel_size", "ep"})
"""Options of these servers with which no expert is split."""
_SHARE_ERROR: Final = 0.05
"""Error of a server's use of its share: CUDA graphs and the context come on top (docs/project/vllm.md)."""
_FEWER_BITS: Final = {"fp8": 8, "int8": 8, "int4": 4}
"""Prefix of a precision -> bits of a weight, without scales."""


def _infeasible(cell: Cell, machine: Machine) -> str | None:
    openai = command.settings(cell)
    own = "" if openai["url"] else f"; settings.openai.options has {cell.toolchain}'s own options"
    if (reason := foreign(cell, _OWN_SETTINGS, own)) is not None:
        return reason
    if (frontend := cell.settings["serve"]["frontend"]) != "triton":
        return f"settings.serve.frontend {frontend}: only the TensorRT-LLM toolchains have frontends"
    if openai["url"]:
        if openai["command"]:
            return "settings.openai.url and command are both set: use one of them"
        from trtllm_pipeline.measure import target

        try:
            target.service_at(openai["url"], "openai", cell.model)
        except ServerError as error:
            return f"settings.openai.url {error.message}"
        return None
    try:
        words = command.template(cell)
    except ValueError as error:
        return f"settings.openai.command: {error}"
    if not words:
        return f"toolchain {OPENAI} needs settings.openai.url, of a running server, or settings.openai.command"
    placeholders, known = command.placeholders(words), {*command.values(cell), *command.AT_START}
    if unknown := sorted(placeholders - known):
        return f"settings.openai.command: unknown placeholder {{{unknown[0]}}}; known: {', '.join(sorted(known))}"
    if "port" not in placeholders:
        return "settings.openai.command: has no {port}, so the server's port is unknown"
    return (
        _of_known(cell, placeholders)
        or _gpus_lacking(cell, machine)
        or _too_old(cell, machine)
        or _programs_lacking(cell, words, machine)
    )


def _of_known(cell: Cell, placeholders: set[str]) -> str | None:
    """The features of a cell that a known server, as it is started, does not support."""
    known = command.known_of(cell)
    if GGUF in placeholders and cell.precision not in GGUF_PRECISIONS:
        return f"precision {cell.precision}: GGUF files are converted to {', '.join(GGUF_PRECISIONS)}"
    if known is None:
        return None
    if command.reuses(cell) and "true" not in known.reuse:
        return f"settings.repository.enable_kv_cache_reuse: {cell.toolchain} does not reuse the cache between prompts"
    if cell.settings["perf"]["ignore_eos"] and not known.exact_lengths:
        return f"settings.perf.ignore_eos: {cell.toolchain} does not support it"
    if known.precisions is not None and cell.precision not in known.precisions:
        return (
            f"precision {cell.precision}: {cell.toolchain} supports {', '.join(known.precisions)}, and quantizes to no other "
            f"when it loads; use {AS_IS} with a model that is published quantized"
        )
    if cell.tp * cell.pp > 1 and not {"tp", "attention_tp"} & placeholders:
        return f"tp{cell.tp}pp{cell.pp}: {cell.toolchain} has no option for several GPUs"
    if cell.ep > 1 and not known.experts:
        return f"ep{cell.ep}: {cell.toolchain} has no option for expert parallelism"
    if cell.ep not in {1, cell.tp} and "ep" not in command.placeholders(known.experts):
        return f"ep{cell.ep}: {cell.toolchain} distributes experts over all GPUs, which is ep{cell.tp} for tp{cell.tp}"
    if cell.dp > 1 and not known.attention_groups:
        return f"dp{cell.dp}: {cell.toolchain} has no option for data parallel attention"
    context, positions = command.context_length(cell), Shape.of(cell.recipe).max_position_embeddings
    if context > positions:  # it does not start with a context longer than the model's
        return (
            f"{cell.isl} input and {cell.osl} output tokens: {cell.toolchain} needs a context of {context} tokens for them, "
            f"the model has {positions} positions"
        )
    # Pipeline stages may be unequal: vLLM gives one layer more to the last but one (its pull request 6115), SGLang accepts
    # them too (13282).
    return _cut(cell) if cell.toolchain in _SPLITTING else None


def _cut(cell: Cell) -> str | None:
    """The quantized weights that cannot be split over the cell's ranks, in words, or None."""
    form = cell.recipe.get("quantization")
    tile = tiles.SERVERS.get(str(form)) if cell.precision == AS_IS else None
    if tile is None:
        return None
    widths, given = tiles.Widths.of(Shape.of(cell.recipe)), command.settings(cell)["options"]
    if _WHOLE_EXPERTS & {name.lstrip("-").replace("-", "_") for name in given}:
        widths = replace(widths, experts=0)
    size = cell.recipe.get("quantization_group_size")
    return tiles.cut(
        tiles.grouped(tile, size), widths, cell.tp, cell.ep, cell.dp, precision=shown(cell.precision, form)
    )


def _gpus_lacking(cell: Cell, machine: Machine) -> str | None:
    wanted = gpus(cell, machine)
    if wanted <= len(machine.gpus):
        return None
    return f"{wanted} GPUs are needed, the machine has {len(machine.gpus)}"


def _too_old(cell: Cell, machine: Machine) -> str | None:
    """The precision of a cell that a known server does not compute on the machine's GPUs, in words, or None."""
    known, form, sm = command.known_of(cell), cell.recipe.get("quantization"), machine.sm
    if known is None or sm is None:
        return None
    precision = str(form) if cell.precision == AS_IS else cell.precision
    if sm < (least := known.least_sm.get("any", 0)):
        return f"SM {sm}: {cell.toolchain} supports SM {least} and newer; use another GPU"
    if sm < (least := known.least_sm.get(precision, 0)):
        other = "fp16" if cell.precision == "bf16" else "another precision"
        return (
            f"precision {shown(cell.precision, form)}: {cell.toolchain} supports it from SM {least} on, this is SM {sm}; "
            f"use {other} or another GPU"
        )
    return None


def _programs_lacking(cell: Cell, words: Sequence[str], machine: Machine) -> str | None:
    if "/" in words[0] and not Path(words[0]).is_absolute():
        return (
            f"settings.openai.command: {words[0]} is relative to the directory of each attempt; use its absolute path"
        )
    if machine.assumed:
        return None
    if shutil.which(words[0]) is None:
        return f"{words[0]} is not on PATH; settings.openai.command can have its whole path"
    if command.uses(cell, GGUF) and importlib.util.find_spec("gguf") is None:
        return "a GGUF file needs the package gguf: pip install 'trtllm-pipeline[embedded]'"
    return None


def gpus(cell: Cell, machine: Machine) -> int:
    openai = command.settings(cell)
    if openai["url"]:
        return 0
    return cell.tp * cell.pp if openai["gpus"] is None and machine.gpus else int(openai["gpus"] or 0)


def _takes(cell: Cell, machine: Machine) -> Resources:
    """GPUs with their share of CPUs. Without a GPU all CPUs, because the number that the server uses is unknown. A running
    server gets none: its measurements take turns with all others here.
    """
    if command.settings(cell)["url"]:
        return Resources(cpus=1, exclusive=exclusive(cell), beside_standing=True)
    leased, beside = gpus(cell, machine), exclusive(cell)
    if not leased:
        return Resources(cpus=machine.cpus, exclusive=Exclusive.MACHINE if beside is Exclusive.GPU else beside)
    return Resources(max(1, machine.cpus * leased // len(machine.gpus)), leased, exclusive=beside)


def _needs(cell: Cell, machine: Machine) -> Needs:
    """The share of a GPU that the server is configured to allocate, or as much memory as a GPU must have for its share to
    hold the weights and the KV cache of all requests. If the share is unknown: the weights alone, as an assumption, on
    the host if a server keeps those there that do not fit.
    """
    if command.settings(cell)["url"]:
        return Needs()
    leased = gpus(cell, machine)
    if not leased:
        return Needs(host=source_bytes(cell), assumed=("host",))
    share = command.gpu_share(cell)
    if share is None:
        spilled = _spilled(cell, machine)
        return Needs(host=spilled, gpu=(source_bytes(cell) - spilled) // leased, assumed=("host", "gpu"))
    allocated = round(share * min(gpu.memory_bytes for gpu in machine.gpus))
    if _weight_bits(cell) == 0:  # options can offload or quantize weights and cache
        return Needs(gpu=allocated, gpu_least=0, error=_SHARE_ERROR)
    weights, request = _held(cell)
    # Layers with a window have a smaller cache, so that nothing is refused because of it.
    held = weights + request * cell.group_batch_size
    return Needs(gpu=max(allocated, round(held / share)), gpu_least=round(weights / share), error=_SHARE_ERROR)


def _spilled(cell: Cell, machine: Machine) -> int:
    """Weights that do not fit on the GPUs of a server that keeps them in host memory, in bytes."""
    known, leased = command.known_of(cell), gpus(cell, machine)
    if known is None or not known.spills or not leased:
        return 0
    return max(0, source_bytes(cell) - leased * min(gpu.memory_bytes for gpu in machine.gpus))


def _held(cell: Cell) -> tuple[int, int]:
    """The weights of a server that splits them, and the KV cache and state of one request, on each GPU, in bytes."""
    shape, form = Shape.of(cell.recipe), str(cell.recipe.get("quantization"))
    # The precision of weights does not change the cache, except in files that define it.
    cache = "fp8" if cell.precision == AS_IS and form in FP8_CACHES else None
    weights, request = least_bytes(
        shape,
        precision=computed(cell),
        kv=cache,
        tp=cell.tp,
        pp=cell.pp,
        tokens=command.context_length(cell),
        dp=cell.dp,
    )
    return weights + shape.tower_bytes, request


def _read(cell: Cell) -> LaunchOpenAi:
    """The command line without directories and port, for the key."""
    openai, known = command.settings(cell), KNOWN.get(cell.toolchain)
    own: dict[str, Any] = {"restarts": 0, **rule(cell), "command": None, "options": {}}
    if not openai["url"]:
        own["gpus"] = cell.tp * cell.pp if openai["gpus"] is None else openai["gpus"]
        own["command"] = shlex.join(command.fill(command.template(cell), command.values(cell)))
    if known is not None:
        own["ready_path"] = openai["ready_path"] or known.ready
        own["served_name"] = openai["served_name"] or (None if openai["url"] else known.served_name)
        own["lists_models"] = known.lists_models
    return load(LaunchOpenAi, own, openai, cell.settings["serve"])


def _with_version(
    asking: tuple[str, ...], params: LaunchOpenAi, _files: Mapping[str, str], machine: Machine
) -> LaunchOpenAi:
    """The parameters with the server's version, which is part of the key."""
    if machine.assumed:
        return replace(params, version=assume.ASSUMED)
    if params.url is not None:
        return replace(params, version=_running(params.url))
    return replace(params, version=command.version_of(shlex.split(params.command or ""), asking))


@lru_cache(maxsize=64)
def _running(url: str) -> str | None:
    """Name and models that a running server reports. None if it does not respond."""
    import asyncio  # not needed for printing a plan or a log

    from trtllm_pipeline.measure import OpenAiClient, target

    async def ask() -> str | None:
        client = OpenAiClient(
            url, "", "completions", stream=True, timeout_s=ASKED_FOR_S, api_key=target.environment_key()
        )
        try:
            models = await client.models()
        except ServerError:
            return None
        return ", ".join(filter(None, (await client.version(), *(models or ()))))

    return asyncio.run(ask())


def _starts(_cell: Cell, context: StageContext[LaunchOpenAi], _machine: Machine) -> Sequence[Sequence[str]]:
    from trtllm_pipeline.tensorrt.others.server import argv

    params = context.params
    if params.url is not None:
        return ()
    return (argv(params, context.inputs, params.host, planned_ports(params)),)


@lru_cache(maxsize=1)
def _identity(machine: Machine) -> Mapping[str, Json]:
    return {**embedded.TOOLCHAIN.identity(machine), "gpu": probe.identity(machine)["gpu"]}


def _reads_weights(cell: Cell) -> bool:
    return command.uses(cell, command.MODEL) or command.uses(cell, GGUF)


def _download(cell: Cell) -> DownloadParams:
    """The whole model, or only its tokenizer for a model on a hub whose weights no program reads here."""
    params: DownloadParams = DOWNLOAD.read(cell)
    if _reads_weights(cell) or params.content is None or params.folder is not None:
        return params
    content = {name: digest for name, digest in params.content.items() if part_of(name) is not ModelPart.WEIGHTS}
    return replace(params, form="tokenizer", content=content, quantization=None)


def _downloading(cell: Cell, machine: Machine) -> Needs:
    assert DOWNLOAD.needs is not None
    return DOWNLOAD.needs(cell, machine) if _reads_weights(cell) else Needs()


def _download_s(cell: Cell, machine: Machine) -> float:
    assert DOWNLOAD.takes is not None
    return DOWNLOAD.takes(cell, machine) if _reads_weights(cell) else 0.0


def _smoke(cell: Cell) -> SmokeParams:
    """Like every cell's, with the limit of prompts if the server is known to reject longer ones."""
    params: SmokeParams = SMOKE.read(cell)
    known = command.known_of(cell)
    return params if known is not None and known.refuses_longer else replace(params, max_seq_len=None)


def _perf(cell: Cell) -> PerfParams:
    """Like every cell's, but with only the server settings that it was started with."""
    params: PerfParams = PERF.read(cell)
    declared = {name: params.declared[name] for name in ("tp", "max_input_len", "max_seq_len")}
    bits = {} if (kept := _weight_bits(cell)) is None else {"weight_bits": kept}
    known = command.known_of(cell)
    if params.workload == "isl_osl" and params.ignore_eos is None and known is not None and not known.exact_lengths:
        params = replace(params, ignore_eos=False)
    return replace(params, declared={**declared, **bits, "enable_kv_cache_reuse": command.reuses(cell)})


def _weight_bits(cell: Cell) -> int | None:
    """Bits of a weight for a server that quantizes the model when it starts, which limits its speed. 0 if only its
    command line defines them. None: as many as in the files.
    """
    if command.settings(cell)["url"]:
        return None
    if command.known_of(cell) is None or command.settings(cell)["options"]:
        return 0
    return next((bits for name, bits in _FEWER_BITS.items() if cell.precision.startswith(name)), None)


def _numerics(cell: Cell) -> Numerics:
    """What a cell's precision means, as far as its command line shows."""
    if command.known_of(cell) is None:
        return unknown(cell)
    if cell.toolchain == "llama_cpp":
        return embedded.numerics_of(cell)
    given = {name.lstrip("-").replace("-", "_"): value for name, value in command.settings(cell)["options"].items()}
    cache = given.get("kv_cache_dtype")
    return loaded_as_fp8(cell, None if cache in {None, "auto"} else str(cache))


def _asking(stage: Stage, **changed: Any) -> Stage:
    """A stage that sends requests to a server, without a repository."""
    inputs = {name: upstream for name, upstream in stage.inputs.items() if name != "repository"}
    return replace(stage, inputs=inputs, **changed)


def _caveat(cell: Cell, machine: Machine) -> str | None:
    if url := command.settings(cell)["url"]:
        return f"at {url}: a running server, not started by us"
    if spilled := _spilled(cell, machine):
        return (
            f"{memory_size(spilled)} of {cell.precision} weights do not fit on {count(gpus(cell, machine), 'GPU')}; "
            f"{cell.toolchain} keeps them in host memory, which is slow"
        )
    return None


def _toolchain(name: str) -> Toolchain:
    known = KNOWN.get(name)
    download = replace(
        DOWNLOAD, read=_download, contents=lambda cell: _download(cell).content, needs=_downloading, takes=_download_s
    )
    convert = replace(embedded.CONVERT, applies=lambda cell, _machine: command.uses(cell, GGUF), of=EMBEDDED)
    serve = replace(
        launch(LaunchOpenAi),
        summary="start a server and keep it running",
        program="trtllm_pipeline.tensorrt.others.server:run",
        starter="trtllm_pipeline.tensorrt.others.server:starter",
        read=_read,
        settle=partial(_with_version, () if known is None else tuple(known.version)),
        inputs={"checkpoint": "convert", command.MODEL: "download"},
        optional=frozenset({"checkpoint", command.MODEL}),
        identity=("gpu", "cpu"),
        resources=_takes,
        gpus=lambda context: context.params.gpus or 0,
        starts=_starts,
        needs=_needs,
        expected_s=30.0 if known is None else known.start_s,
        takes=lambda cell, _machine: source_bytes(cell) / READ if _reads_weights(cell) else 0.0,
    )
    return Toolchain(
        name=name,
        summary=known.summary if known else "any OpenAI-compatible server, by its URL or its command line",
        stages=(
            download,
            convert,
            serve,
            _asking(SMOKE, read=_smoke),
            _asking(PERF, read=_perf),
            _asking(ACCURACY),
            SCORE,
            _asking(TASKS),
        ),
        missing=lambda _machine: None,
        identity=_identity,
        infeasible=_infeasible,
        numerics=_numerics,
        caveat=_caveat,
    )


TOOLCHAINS: Final = {name: _toolchain(name) for name in SERVERS}
