"""The lock files of a run: a matrix and recipes in which everything is pinned, so that the run can be repeated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trtllm_pipeline.config.expand import written_out
from trtllm_pipeline.config.load import LoadedMatrix
from trtllm_pipeline.planning.plan import Plan


def write_lock(loaded: LoadedMatrix, plan: Plan, folder: Path, *, default_toolchain: str) -> None:
    """A matrix and its recipes that plan the same again, whatever happens to branches on the hubs.

    `pipeline run --matrix FOLDER/matrix.yaml`: sources are pinned and changes from the command line are in the files.
    """
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    def write(path: Path, data: Mapping[str, Any]) -> None:
        path.write_text(yaml.dump(data, Dumper=dumper, sort_keys=False, allow_unicode=True), encoding="utf-8")

    matrix = written_out(loaded, default_toolchain=default_toolchain)
    if any("metric_module" in run.files for run in plan.stage_runs.values()):
        matrix.setdefault("settings", {}).setdefault("accuracy", {}).setdefault("python_path", ".")
    for settings in (matrix.get("settings", {}), *(rule["settings"] for rule in matrix["override"])):
        _make_absolute(settings, loaded.path.parent)
    (folder / "recipes").mkdir(parents=True)
    write(folder / "matrix.yaml", matrix)
    for cell in {cell.model: cell for cell in plan.feasible}.values():
        recipe: dict[str, Any] = {name: cell.recipe[name] for name in cell.recipe if name not in {"source", "folder"}}
        source = cell.recipe["source"]
        assert isinstance(source, dict)
        recipe["sources"] = [{"local": cell.recipe["folder"]} if "local" in source else source]
        write(folder / "recipes" / f"{cell.model}.yaml", recipe)


def _make_absolute(settings: dict[str, Any], base: Path) -> None:
    """Let the files and folders that settings name be found from any folder."""
    sections = (settings.get("perf"), settings.get("accuracy"), settings.get("quantize", {}).get("calibration"))
    for section in sections:
        for name in ("input_data", "data", "python_path"):
            if section and name in section and not str(section[name]).startswith(("builtin:", "hub:")):
                section[name] = str((base / section[name]).absolute())
