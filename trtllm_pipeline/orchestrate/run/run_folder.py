"""The directory of a run: its request, plan, lock files and report, and its row in the index from start to end.

The lock is a matrix and recipes with everything pinned, to repeat the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import Json, StateError, digest_file, write_json, writing
from trtllm_pipeline.models import COMMIT
from trtllm_pipeline.orchestrate.matrix.expand import written_out
from trtllm_pipeline.orchestrate.plan import plan_file, runs
from trtllm_pipeline.orchestrate.plan.plan import Plan
from trtllm_pipeline.orchestrate.plan.planner import REQUEST_FILE, Request
from trtllm_pipeline.orchestrate.run.forecast import Forecast, plan_json
from trtllm_pipeline.orchestrate.run.loop import Observer
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import companions

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix

_SAME_SECOND_S: Final = 0.05


@dataclass(slots=True)
class RunFolder:
    """A run in progress."""

    id: str
    path: Path
    store: Store
    exit_code: int = 1
    forecast: Mapping[str, Json] | None = None
    """The report's comparison of the forecast with the run."""

    def write_plan(self, plan: Plan, forecast: Forecast) -> None:
        """Write plan.json; repeated if a cell is retried with other settings."""
        lines = plan_json(plan, self.store, forecast, run_id=self.id)
        writing.write_lines(self.path / plan_file.NAME, lines)


@contextmanager
def begun(
    request: Request, store: Store, observer: Observer, *, command: tuple[str, ...], name: str | None
) -> Iterator[RunFolder]:
    """Start a run, in the index and shown by `observer` until it ends. Raises StateError if the workspace disappears."""
    run = _new(store, name)
    store.index.begin_run(run.id, str(request.matrix.absolute()), command)
    observer.enter(run.path)
    try:
        write_json(run.path / REQUEST_FILE, request.to_json())
        yield run
    except KeyboardInterrupt:  # while pulling artifacts (later the loop handles it)
        run.exit_code = 130
        raise
    except OSError as error:
        if store.artifacts_dir.is_dir():
            raise
        raise StateError(
            f"{store.workspace}: the workspace is gone: it was moved or removed while in use",
            hint="run again; this run cannot be resumed",
        ) from error
    finally:
        store.index.end_run(run.id, run.exit_code)
        observer.leave(run.forecast)


def _new(store: Store, name: str | None) -> RunFolder:
    """Create a new directory. If a run of the same name started in this second, wait for the next one."""
    while True:
        run_id = runs.run_id(time.time(), name or os.urandom(2).hex())
        folder = store.runs_dir / run_id
        try:
            folder.mkdir()
        except FileExistsError:
            time.sleep(_SAME_SECOND_S)
        else:
            return RunFolder(run_id, folder, store)


_MODULE: Final = "metric_module"
_MOST_BYTES: Final = 10_000_000
"""User files up to this size are copied into the lock. Larger files are referenced by path."""


def write_lock(request: Request, loaded: LoadedMatrix, plan: Plan, folder: Path, *, default_toolchain: str) -> None:
    """A matrix, its recipes and its data files, which give the same plan elsewhere, even if branches on the hubs change.

    `pipeline run --matrix FOLDER/matrix.yaml` repeats the run. Sources are pinned, and the files contain the command line's
    changes. Local models and data files above 10 MB are referenced by absolute path.
    """
    installed = plan.machine.tensorrt_llm
    release = None if installed is None else installed.release
    matrix = written_out(loaded, default_toolchain=default_toolchain, release=release)
    if not loaded.names_toolchains and any(cell.toolchain != default_toolchain for cell in plan.cells):
        del matrix["toolchain"]  # depends on the machine and the model
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
    """The recipe of a planned cell with its model's pinned source, and with the other sources if the files are pinned."""
    source, copies = known["source"], known.get("copies") or []
    assert isinstance(source, dict)
    assert isinstance(copies, list)
    # The matrix lists the code that comes with a source.
    source = {"local": known["folder"]} if "local" in source else {**source}
    source.pop("code", None)
    if "files" in known and "local" not in source:  # a directory is examined each time
        source["files"] = known["files"] or {}
    code, commit = known.get("code"), COMMIT.fullmatch(str(source.get("revision")))
    return {
        **{name: known[name] for name in known if name not in {"source", "folder", "files", "copies", "code"}},
        "code_files": code["files"] if isinstance(code, dict) and commit else {},
        "sources": [source, *copies],
    }


def _unpinned(recipe: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """A recipe without planned cells: they cannot work, or were not selected."""
    sources = [
        {**source, "local": str((base / Path(source["local"]).expanduser()).absolute())}
        if "local" in source
        else source
        for source in recipe["sources"]
    ]
    return {**recipe, "sources": sources}


def _write(path: Path, data: Mapping[str, Any], head: str = "") -> None:
    import yaml  # an up-to-date run writes no lock

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    path.write_text(head + yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _command(request: Request) -> str:
    """The command that runs the lock file. The selected cells and the last stage are not part of a matrix."""
    words = ["pipeline", "run", "--matrix", "matrix.yaml"]
    words += [word for pattern in request.cells for word in ("--cells", pattern)]
    words += ["--until", request.until] if request.until is not None else []
    return f"# {shlex.join(words)}"


def _copied(plan: Plan, folder: Path) -> Iterator[tuple[str, str]]:
    """Copy the files named in settings into the lock. Yields the name in the settings and the name in the lock.

    A path below the matrix's directory stays the same, since axes and rules may use it. A metrics module is referenced by the
    directory that it is imported from.
    """
    named = {
        name_in_settings: (
            run.files[name],
            str(run.first_cell.settings["accuracy"]["python_path"]) if name == _MODULE else None,
        )
        for run in plan.stage_runs.values()
        for name, name_in_settings in run.stage.files(run.first_cell).items()
    }
    for name_in_settings, (path, root) in named.items():
        if name_in_settings.startswith("builtin:") or Path(path).stat().st_size > _MOST_BYTES:
            continue
        below = (
            not name_in_settings.startswith("hub:")
            and not Path(name_in_settings).is_absolute()
            and ".." not in Path(name_in_settings).parts
        )
        digest = digest_file(Path(path))[:12]
        if root is None:
            place = Path(name_in_settings) if below else Path("files", digest, Path(path).name)
            yield name_in_settings, str(place)
        else:
            place = Path(name_in_settings) if below else Path("files", digest, Path(name_in_settings).relative_to(root))
            yield root, root if below else f"files/{digest}"
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)


def _other_models(plan: Plan) -> Iterator[tuple[str, str]]:
    """Names of further models in settings -> their pinned names."""
    for cell in plan.feasible:
        for name, model in companions.named_models(cell).items():
            pinned = cell.companions.get(name, {})
            source, folder = pinned.get("source"), pinned.get("folder")
            if folder is not None:
                yield model, str(folder)
            elif isinstance(source, dict) and "hugging_face" in source:
                yield model, f"{source['hugging_face']}@{source['revision']}"


def _name_models(settings: dict[str, Any], models: Mapping[str, str]) -> None:
    """Replace further models in settings by their pinned names."""
    for name, key in (("speculative", "model"), ("lora", "adapter")):
        section = settings.get(name)
        if not section:
            continue
        value = section.get(key)
        if isinstance(value, dict):
            section[key] = {each: models.get(model, model) for each, model in value.items()}
        elif value in models:
            section[key] = models[value]


def _name_files(settings: dict[str, Any], files: Mapping[str, str], base: Path) -> None:
    """Make paths in settings valid from the lock: copies in the lock, or absolute paths."""
    sections = (settings.get("perf"), settings.get("accuracy"), settings.get("quantize", {}).get("calibration"))
    for section in sections:
        for name in ("input_data", "data", "python_path"):
            if section and name in section and not str(section[name]).startswith("builtin:"):
                path = str(section[name])
                absolute = path if path.startswith("hub:") else str((base / path).absolute())
                section[name] = files.get(path, absolute)
        if section and (folder := section.get("include_path")) is not None:
            copied = any(name == place and name.startswith(f"{folder}/") for name, place in files.items())
            section["include_path"] = folder if copied else str((base / folder).absolute())
