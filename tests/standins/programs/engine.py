"""Engine folders: what builders write and runtimes check. Nothing of Python's beyond json is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.standins.programs import ProgramError, Work


def engine_bytes(work: Work, rank: int, gpu: int) -> bytes:
    """A rank's engine: where and by what it was built."""
    return json.dumps({"release": work.release, "sm": work.sm, "rank": rank, "gpu": gpu}).encode()


def is_engine(folder: Path) -> bool:
    """Whether this is a folder that `trtllm-build` writes."""
    return (folder / "rank0.engine").is_file() and (folder / "config.json").is_file()


def read_engine(work: Work, folder: Path, *, ranks: int | None = None) -> dict[str, Any]:
    """The config.json of an engine folder. Raises ProgramError for what the runtime fails on: no or broken files, another
    release's engine, another GPU's, a world of another size than `ranks` (None: any)."""
    file = folder / "config.json"
    if not file.is_file():
        raise ProgramError(f"FileNotFoundError: [Errno 2] No such file or directory: '{file}'")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "version" not in config:
        raise ProgramError("RuntimeError: [TensorRT-LLM][ERROR] stand-in: engine of the old builder format")
    world = int(config["pretrained_config"]["mapping"]["world_size"])
    print(
        f"[TensorRT-LLM][INFO] Engine version {config['version']} found in the config file, assuming engine(s) built by new builder API."
    )
    if ranks is not None and ranks != world:
        raise ProgramError(
            f"RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: mpiSize == tp * pp ({ranks} vs {world})"
        )
    for rank in range(world):
        try:
            engine = json.loads((folder / f"rank{rank}.engine").read_bytes())
        except FileNotFoundError as error:
            raise ProgramError(f"FileNotFoundError: {error}") from None
        except ValueError:
            raise ProgramError(
                "RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine"
            ) from None
        if engine["release"] != work.release:
            raise ProgramError(
                "[TensorRT-LLM][ERROR] IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization "
                "assertion stdVersionRead == kSERIALIZATION_VERSION failed. Version tag does not match. Note: Current "
                f"Version: {work.release}, Serialized Engine Version: {engine['release']})"
            )
        if engine["sm"] != work.sm:
            mine, theirs = (f"{sm // 10}.{sm % 10}" for sm in (work.sm, engine["sm"]))
            raise ProgramError(
                "[TensorRT-LLM][ERROR] The engine plan file is generated on an incompatible device, expecting compute "
                f"{mine} got compute {theirs}, please rebuild."
            )
    return config


def check_tokenizer(folder: Path | str | None) -> None:
    """Raise ProgramError when this is no folder with a tokenizer."""
    if folder is None or not Path(folder).is_dir():
        raise ProgramError(
            f"OSError: Can't load tokenizer for '{folder}'. No such folder, and no hub is reachable to look for it"
        )
    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ProgramError(f"OSError: Can't load tokenizer for '{folder}'. It has none of the tokenizer files.")
