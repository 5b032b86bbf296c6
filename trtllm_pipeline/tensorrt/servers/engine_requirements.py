"""Compares an engine's requirements with the machine that will serve it.

An engine only runs with exactly the release, the compute capability and the number of ranks it was built for. TensorRT-LLM
reports a difference after minutes of loading, or crashes. This module reports it before.

TensorRT-LLM writes `config.json` with the release and tp * pp. The build stage writes `engine.json` with the GPU of the
build and the digests of every rank's files. Engines from elsewhere have no engine.json, and only their config.json is compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from trtllm_pipeline.base import FailureClass, Machine, ServerError, digest_file, model, write_json
from trtllm_pipeline.models import Engine, Fields, ModelFileError, model_files

FILE: Final = "engine.json"
_ENGINE: Final = re.compile(r"rank(\d+)\.engine")
_OF_A_RANK: Final = re.compile(r"rank\d+(\.engine|_managed_weights\.safetensors)")
_REBUILD: Final = "build the engine on this machine, or serve it on a machine like the one that built it"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size, time and digest of an engine's file after the build."""

    size: int
    mtime_ns: int
    blake3: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read all of `path`."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, digest_file(path))


@dataclass(frozen=True, slots=True)
class Requirements:
    """The requirements of an engine. None means unknown."""

    release: str | None
    """TensorRT-LLM release in config.json, such as 0.12.0; engines of the first releases have none."""
    world_size: int
    """Ranks: tp * pp (* cp)."""
    sm: int | None = None
    """Compute capability as one number: 90 is 9.0."""
    gpu: str | None = None
    """Name of the GPU that it was built on."""
    digests: Mapping[str, FileDigest] | None = None
    """By the name of the file in the engine's directory."""


def write(engine: Path, gpu: model.Gpu) -> Requirements:
    """Write engine.json into a directory that `trtllm-build` has filled on `gpu`. Returns its content.

    Reads every rank's files once. Raises ServerError if the engine is incomplete.
    """
    built = _from_config(engine)
    _check_ranks(engine, built.world_size)
    files = sorted(path for path in engine.iterdir() if _OF_A_RANK.fullmatch(path.name))
    written = Requirements(
        built.release, built.world_size, gpu.sm, gpu.name, {path.name: FileDigest.of(path) for path in files}
    )
    write_json(engine / FILE, {"schema": 1, **asdict(written)})
    return written


def read(engine: Path) -> Requirements:
    """The requirements of the engine in this directory. Raises ServerError if it is not an engine directory."""
    config = _from_config(engine)
    path = engine / FILE
    try:
        if model_files.find(engine, FILE) is None:
            return config
        raw = Fields.read(engine, FILE)
        files = raw.fields("digests")
        digests = {
            name: FileDigest(
                file.integer("size", least=0, most=2**63),
                file.integer("mtime_ns", least=-(2**63), most=2**63),
                file.required_text("blake3"),
            )
            for name, file in ((name, files.fields(name)) for name in files.values)
        }
        return Requirements(config.release, config.world_size, raw.integer("sm"), raw.required_text("gpu"), digests)
    except ModelFileError as error:
        raise ServerError(f"{path} was not written by `pipeline stage build`: {error.short}") from error


def check(engine: Path, machine: Machine) -> Requirements:
    """The requirements of the engine, all met by `machine`. Raises ServerError that names the first difference.

    Only a different release or compute capability is INFEASIBLE; files can be restored and GPUs added. A file is read again
    only if its modification time has changed, as in a copy.
    """
    needs, gpus = read(engine), machine.gpus
    built = needs.release or "of an unknown old release"
    installed = machine.tensorrt_llm.release if machine.tensorrt_llm else "none"
    if _public(built) != _public(installed):
        raise _differs(engine, "version", f"TensorRT-LLM {built}", installed, _REBUILD, FailureClass.INFEASIBLE)
    _check_ranks(engine, needs.world_size)
    if len(gpus) < needs.world_size:
        hint = "serve it with that many GPUs, or build for a smaller tp and pp"
        raise _differs(engine, "world_size", f"{needs.world_size} ranks with a GPU each", f"{len(gpus)} GPUs", hint)
    for gpu in gpus:
        if needs.sm not in {None, gpu.sm}:
            wanted, present = f"compute capability {needs.sm} ({needs.gpu})", f"{gpu.sm} ({gpu.name})"
            raise _differs(engine, "sm", wanted, present, _REBUILD, FailureClass.INFEASIBLE)
    for name, digest in (needs.digests or {}).items():
        _check_file(engine, name, digest)
    return needs


def _public(release: str) -> str:
    """A release without its local version, such as +cu124."""
    return release.partition("+")[0]


def _from_config(folder: Path) -> Requirements:
    engine = Engine.read(folder)
    if engine.world_size != engine.parallel_size:
        wanted, hint = f"tp * pp = {engine.parallel_size}", "convert the checkpoint again"
        raise _differs(folder / "config.json", "mapping.world_size", wanted, engine.world_size, hint)
    return Requirements(engine.version, engine.world_size)


def _check_ranks(engine: Path, world_size: int) -> None:
    """Raise ServerError unless there is one engine file for each rank."""
    ranks = sorted(int(match[1]) for path in engine.iterdir() if (match := _ENGINE.fullmatch(path.name)))
    if ranks != list(range(world_size)):
        present = ", ".join(f"rank{rank}.engine" for rank in ranks) or "none"
        wanted, hint = f"one file for each of {world_size} ranks", "build the engine again: it is incomplete"
        raise _differs(engine, "rank files", wanted, present, hint)


def _check_file(engine: Path, name: str, built: FileDigest) -> None:
    """Raise ServerError if the file has changed since the build, DownloadError for a link out of the directory."""

    def damaged(what: str) -> ServerError:
        hint = "build or copy the engine again"
        return ServerError(
            f"{engine / name} has changed since it was built: {what}", failure=FailureClass.USER, hint=hint
        )

    path = model_files.find(engine, name)
    if path is None:
        raise damaged(f"expected a file of {built.size} bytes, found none")
    status = path.stat()
    if status.st_size != built.size:
        raise damaged(f"expected {built.size} bytes, found {status.st_size}")
    if status.st_mtime_ns != built.mtime_ns and (digest := digest_file(path)) != built.blake3:
        raise damaged(f"expected digest {built.blake3}, found {digest}")


def _differs(
    path: Path, field: str, engine: object, here: object, hint: str, failure: FailureClass = FailureClass.USER
) -> ServerError:
    return ServerError(
        f"{path} does not fit this machine: {field}: the engine needs {engine}, found {here}",
        failure=failure,
        hint=hint,
    )
