"""The bundle: a directory with everything needed to serve one cell. It can be moved to any host and checked there.

`docs/deploying.md` lists its files, `docs/reference/formats.md` describes bundle.json. In repository/, @BUNDLE@ stands
for the bundle's directory. For an engine in Triton, each adapter has the tensors that a client sends for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.base import StateError, user_files, write_json
from trtllm_pipeline.base import digest as digests
from trtllm_pipeline.models import Engine, model_config
from trtllm_pipeline.orchestrate import manifest, provenance
from trtllm_pipeline.serve.export import card
from trtllm_pipeline.serve.export.deployment import BESIDE, Deployment
from trtllm_pipeline.tensorrt import SERVE_FILE, catalog, companions, start_script

FILE: Final = "bundle.json"
SUMS: Final = "SHA256SUMS"
START: Final = "start"
_WEIGHTS: Final = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ckpt"}
)
_ARTIFACT: Final = re.compile(
    r"/(?:.*/)?store/[a-z0-9]+/(?P<fingerprint>[0-9a-f]{32})/out(?P<below>(?:/.*)?)", re.DOTALL
)
_INDEX: Final = ".index.json"


def write(deployment: Deployment, folder: Path) -> None:
    """Write the bundle into the empty `folder`. Raises StateError for a repository with paths outside it, OSError."""
    served = deployment.served
    weights = served.inputs.get("model")
    if served.engine is not None:
        _copy(served.engine, folder / "engine")
    if weights is not None:
        _copy(weights, folder / "model")
    else:
        _copy(served.model_folder, folder / "model", small=True)
    for name in BESIDE:
        if name in served.inputs:
            _copy(served.inputs[name], folder / name)
    write_tensors(deployment, folder)
    places = {"build": "engine", "download": "model", "quantize": "model", "repository": "repository"}
    places |= {name: name for name in BESIDE}
    moved: dict[str, str] = {
        served.artifacts[stage].fingerprint: f"{start_script.BUNDLE}/{name}"
        for stage, name in places.items()
        if stage in served.artifacts
    }
    if served.drafter is not None:
        moved[served.drafter.fingerprint] = f"{start_script.BUNDLE}/{catalog.DRAFTER}"
    _copy(served.repository, folder / "repository")
    command = _fill(folder / "repository", moved)
    start = folder / START
    start.write_text(
        start_script.script(
            deployment.kind,
            world_size=max(1, deployment.world_size),
            release=deployment.release,
            command=command,
            images=deployment.sees,
        ),
        encoding="utf-8",
    )
    start.chmod(0o755)
    _write_provenance(deployment, folder / "provenance")
    write_json(folder / FILE, _about(deployment))
    (folder / "README.md").write_text(card.text(deployment), encoding="utf-8")
    write_sums(folder)


def write_tensors(deployment: Deployment, folder: Path) -> None:
    """Write each LoRA adapter's tensors next to it, in the form that an engine in Triton accepts."""
    adapters = companions.adapters(deployment.served.cell)
    if deployment.kind != "engine" or not adapters:
        return
    from trtllm_pipeline.tensorrt import convert

    dtype = Engine.read(folder / "engine").dtype or "float16"
    for place in adapters:
        convert(folder / place, dtype).write(folder / place)


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of every file below `folder` into SHA256SUMS, in the format of `sha256sum -c`."""
    names = [name for name in files(folder) if name != SUMS]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # SHA-256 of one file keeps one core busy
        sums = threads.map(digests.sha256_of_file, (folder / name for name in names))
        lines = [f"{digest}  {name}\n" for digest, name in zip(sums, names, strict=True)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _copy(source: Path, target: Path, *, small: bool = False) -> None:
    """Copy a directory's files, following symbolic links; with `small`, without weights and directories.

    Copied, not linked: recipients may change the bundle, and the workspace must stay unchanged.
    """
    target.mkdir()
    for path in sorted(source.iterdir()):
        weights = path.suffix in _WEIGHTS or path.name.endswith(_INDEX)
        if path.name == "__pycache__" or (small and (weights or path.is_dir())):
            continue
        if path.is_dir():
            _copy(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def _fill(repository: Path, moved: Mapping[str, str]) -> list[str]:
    """Write marks for the artifacts `moved`, by fingerprint, into a copied repository. Returns the command line of
    trtllm-serve, if it has one.

    Raises StateError for a path that leads elsewhere: it would not be there on another host.
    """
    for path in repository.glob(f"*/{model_config.FILE_NAME}"):
        config = model_config.read(path, allow_unknown=True)
        for key, value in model_config.string_parameters(config).items():
            config.parameters[key].string_value = _marked(value, moved, path)
        path.write_text(model_config.to_text(config), encoding="utf-8")
    import yaml

    for path in repository.rglob("*.yaml"):
        data = _each(user_files.decode_yaml(path.read_bytes()), moved, path)
        path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), encoding="utf-8")
    if not (repository / SERVE_FILE).exists():
        return []
    program, *words = json.loads((repository / SERVE_FILE).read_text(encoding="utf-8"))["command"]
    settings = {path.name: f"@repository@/{path.name}" for path in repository.glob("*.yaml")}
    command = [Path(program).name, *(settings.get(word) or _marked(word, moved, repository) for word in words)]
    write_json(repository / SERVE_FILE, {"schema": 1, "command": command})
    return command


def _each(value: Any, moved: Mapping[str, str], path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _each(each, moved, path) for key, each in value.items()}
    if isinstance(value, list):
        return [_each(each, moved, path) for each in value]
    return _marked(value, moved, path) if isinstance(value, str) else value


def _marked(value: str, moved: Mapping[str, str], of: Path) -> str:
    match = _ARTIFACT.fullmatch(value)
    if match is not None and match["fingerprint"] in moved:  # regardless of the workspace that it was written for
        return f"{moved[match['fingerprint']]}{match['below']}"
    if match is not None or (value.startswith("/") and os.path.exists(value)):
        raise StateError(
            f"{of.relative_to(of.parents[1])} refers to {value}, which is not part of the export",
            hint="a bundle holds the engine, the model's files and the repository; settings.repository may name others",
        )
    return value


def _write_provenance(deployment: Deployment, folder: Path) -> None:
    folder.mkdir()
    for stage, artifact in deployment.served.all_artifacts.items():
        write_json(folder / f"{stage}.{manifest.NAME}", manifest.read(artifact.folder).anonymous.to_json())
        if (artifact.folder / manifest.ENVELOPE).is_file():
            shutil.copyfile(artifact.folder / manifest.ENVELOPE, folder / f"{stage}.{manifest.ENVELOPE}")
        write_json(folder / f"{stage}.statement.json", provenance.statement_of(artifact.folder, anonymous=True))
    write_json(folder / "results.json", deployment.result.to_json())


def _about(deployment: Deployment) -> dict[str, Any]:
    served = deployment.served
    return {
        "schema": 1,
        "name": deployment.name,
        "cell": str(served.cell.id),
        "kind": deployment.kind,
        "model": deployment.model,
        "toolchain": served.cell.toolchain,
        "tensorrt_llm": deployment.release,
        "image": deployment.image,
        "gpus": deployment.world_size,
        "gpu": deployment.gpu,
        "compute_capability": deployment.sm,
        "max_batch_size": served.cell.max_batch_size,
        "max_input_len": served.cell.isl,
        "max_seq_len": served.max_seq_len,
        "load_s": deployment.load_s,
        "memory_bytes": deployment.memory_bytes,
        "artifacts": {stage: artifact.fingerprint for stage, artifact in served.all_artifacts.items()},
        "pipeline": __version__,
        "made_s": round(time.time(), 3),
    }


def largest(folder: Path) -> Iterator[tuple[str, int]]:
    """Every file with its size, largest first."""
    sizes = {name: (folder / name).stat().st_size for name in files(folder)}
    yield from sorted(sizes.items(), key=lambda item: -item[1])
