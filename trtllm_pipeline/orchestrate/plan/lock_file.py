"""The lock files of a run: a matrix and recipes in which everything is pinned, so that the run can be repeated."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import Json, digest_file
from trtllm_pipeline.models import COMMIT
from trtllm_pipeline.orchestrate.matrix.expand import written_out
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.request import Request
from trtllm_pipeline.tensorrt import companions

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix

_MODULE: Final = "metric_module"
_MOST_BYTES: Final = 10_000_000
"""Files of users up to this size are copied into the lock; larger ones are named where they are."""


def write_lock(request: Request, loaded: LoadedMatrix, plan: Plan, folder: Path, *, default_toolchain: str) -> None:
    """A matrix, its recipes and its data files, which plan the same again elsewhere, whatever happens to branches on the hubs.

    `pipeline run --matrix FOLDER/matrix.yaml`: sources are pinned and changes from the command line are in the files.
    Local models and data files of more than 10 MB are named by their absolute paths.
    """
    installed = plan.machine.tensorrt_llm
    release = None if installed is None else installed.release
    matrix = written_out(loaded, default_toolchain=default_toolchain, release=release)
    if not loaded.names_toolchains and any(cell.toolchain != default_toolchain for cell in plan.cells):
        del matrix["toolchain"]  # the machine's, by model
    if any(_MODULE in run.files for run in plan.stage_runs.values()):
        matrix.setdefault("settings", {}).setdefault("accuracy", {}).setdefault("python_path", ".")
    (folder / "recipes").mkdir(parents=True)
    files = dict(_copied(plan, folder))
    models = dict(_other_models(plan))
    for settings in (matrix.get("settings", {}), *(rule["settings"] for rule in matrix["override"])):
        _name_files(settings, files, loaded.path.parent)
        _name_models(settings, models)
    _write(folder / "matrix.yaml", matrix, f"{_command(request)}\n")
    pinned = {cell.model: cell for cell in plan.feasible}
    for recipe in loaded.written_recipes.values():
        cell = pinned.get(recipe["name"])
        data = _unpinned(recipe, loaded.path.parent) if cell is None else _pinned(cell.recipe)
        _write(folder / "recipes" / f"{recipe['name']}.yaml", data)


def _pinned(known: Mapping[str, Json]) -> dict[str, Any]:
    """The recipe of a planned cell, with its model's one source; and the others where it is the files that are pinned."""
    source, copies = known["source"], known.get("copies") or []
    assert isinstance(source, dict)
    assert isinstance(copies, list)
    # The code that a source is fetched with is named by the matrix.
    source = {"local": known["folder"]} if "local" in source else {**source}
    source.pop("code", None)
    if "files" in known and "local" not in source:  # a directory is looked at each time
        source["files"] = known["files"] or {}
    code, commit = known.get("code"), COMMIT.fullmatch(str(source.get("revision")))
    return {
        **{name: known[name] for name in known if name not in {"source", "folder", "files", "copies", "code"}},
        "code_files": code["files"] if isinstance(code, dict) and commit else {},
        "sources": [source, *copies],
    }


def _unpinned(recipe: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A recipe that nothing was planned with: its cells cannot work, or were not asked for."""
    sources = [
        {**source, "local": str((base / Path(source["local"]).expanduser()).absolute())}
        if "local" in source
        else source
        for source in recipe["sources"]
    ]
    return {**recipe, "sources": sources}


def _write(path: Path, data: Mapping[str, Any], head: str = "") -> None:
    import yaml  # a run that finds everything as the one before had left it writes no lock

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    path.write_text(head + yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _command(request: Request) -> str:
    """What runs the lock file: a selection of cells and the last stage are no part of a matrix."""
    words = ["pipeline", "run", "--matrix", "matrix.yaml"]
    words += [word for pattern in request.cells for word in ("--cells", pattern)]
    words += ["--until", request.until] if request.until is not None else []
    return f"# {shlex.join(words)}"


def _copied(plan: Plan, folder: Path) -> Iterator[tuple[str, str]]:
    """Copy the files that settings name into the lock; yields what settings call each, and what it is called there.

    What lies below the matrix's directory keeps its name, so that axes and rules may name it. A module of metrics is called by
    the directory that it is imported from.
    """
    found = {
        told: (run.files[name], str(run.first_cell.settings["accuracy"]["python_path"]) if name == _MODULE else None)
        for run in plan.stage_runs.values()
        for name, told in run.stage.files(run.first_cell).items()
    }
    for told, (path, root) in found.items():
        if told.startswith("builtin:") or Path(path).stat().st_size > _MOST_BYTES:
            continue
        below = not told.startswith("hub:") and not Path(told).is_absolute() and ".." not in Path(told).parts
        digest = digest_file(Path(path))[:12]
        if root is None:
            place = Path(told) if below else Path("files", digest, Path(path).name)
            yield told, str(place)
        else:
            place = Path(told) if below else Path("files", digest, Path(told).relative_to(root))
            yield root, root if below else f"files/{digest}"
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)


def _other_models(plan: Plan) -> Iterator[tuple[str, str]]:
    """What settings call models beside the cells' own, and what names the same for ever."""
    for cell in plan.feasible:
        for name, told in companions.named_models(cell).items():
            pinned = cell.companions.get(name, {})
            source, folder = pinned.get("source"), pinned.get("folder")
            if folder is not None:
                yield told, str(folder)
            elif isinstance(source, dict) and "hugging_face" in source:
                yield told, f"{source['hugging_face']}@{source['revision']}"


def _name_models(settings: dict[str, Any], models: Mapping[str, str]) -> None:
    """Let settings name other models as they are pinned."""
    for name, key in (("speculative", "model"), ("lora", "adapter")):
        section = settings.get(name)
        if not section:
            continue
        found = section.get(key)
        if isinstance(found, dict):
            section[key] = {each: models.get(model, model) for each, model in found.items()}
        elif found in models:
            section[key] = models[found]


def _name_files(settings: dict[str, Any], files: Mapping[str, str], base: Path) -> None:
    """Let the files and directories that settings name be found from the lock: in it, or else where they are."""
    sections = (settings.get("perf"), settings.get("accuracy"), settings.get("quantize", {}).get("calibration"))
    for section in sections:
        for name in ("input_data", "data", "python_path"):
            if section and name in section and not str(section[name]).startswith("builtin:"):
                told = str(section[name])
                absolute = told if told.startswith("hub:") else str((base / told).absolute())
                section[name] = files.get(told, absolute)
