"""Shell completion beyond commands and options: cells, stages, runs, recipes, matrix files, toolchains.

Completers only read files and are quick. On an error they complete nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate import Outline, Store


def matrices(incomplete: str) -> list[str]:
    from trtllm_pipeline.orchestrate import recipe_files

    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    prefix = "" if str(folder) == "." and not incomplete.startswith("./") else f"{folder}/".replace("//", "/")
    try:
        here = [f"{prefix}{each.name}{'/' * each.is_dir()}" for each in sorted(folder.iterdir())]
    except OSError:
        here = []
    shipped = [file.stem for file in sorted(recipe_files.matrices_folder().glob("*.yaml"))]
    return [name for name in [*here, *shipped] if name.startswith(incomplete) and not name.startswith(".")]


def toolchains() -> list[str]:
    from trtllm_pipeline.tensorrt import catalog

    return list(catalog.every_name())


def recipes() -> list[str]:
    from trtllm_pipeline.orchestrate import recipe_files

    return list(recipe_files.list_recipes(Path()))


def runs(ctx: typer.Context) -> list[tuple[str, str]]:
    """Ids of the workspace's runs, newest first, and relative names such as latest."""
    store = _store(ctx)
    known = [] if store is None else store.index.runs()
    return [("latest", ""), *((run.id, Path(run.matrix).name) for run in known)] if known else []


def cells(ctx: typer.Context) -> list[str]:
    """Ids of the cells of the matrix on the command line, or of the latest run."""
    from trtllm_pipeline.base import PipelineError

    try:
        if matrix := ctx.params.get("matrix") or ctx.params.get("matrix_word"):
            return _cells_of({**ctx.params, "matrix": matrix})
        return [str(cell.id) for outline in _outlines(ctx) for cell in outline.cells]
    except (OSError, PipelineError):
        return []


def servers(ctx: typer.Context) -> list[tuple[str, str]]:
    """Names and states of the workspace's managed servers."""
    from trtllm_pipeline.serve import servers
    from trtllm_pipeline.show.cli.options import WORKSPACE

    workspace = Path(ctx.params.get("workspace") or WORKSPACE)
    try:
        return [(server.name, server.state.value) for server in servers.find(workspace)]
    except OSError:
        return []


def servers_and_cells(ctx: typer.Context) -> list[str | tuple[str, str]]:
    return [*servers(ctx), *cells(ctx)]


def stages(ctx: typer.Context) -> list[str]:
    """Names of the stages of the latest run, or of all toolchains."""
    from trtllm_pipeline.base import PipelineError
    from trtllm_pipeline.tensorrt import catalog

    try:
        names = [stage for outline in _outlines(ctx) for stage in outline.stages]
    except (OSError, PipelineError):
        names = []
    return names or list(dict.fromkeys(stage.name for name in catalog.names() for stage in catalog.load(name).stages))


def _cells_of(params: dict[str, Any]) -> list[str]:
    from trtllm_pipeline.orchestrate import expand, load_matrix
    from trtllm_pipeline.orchestrate import matrices as matrix_files

    loaded = load_matrix(matrix_files.find_matrix(params["matrix"]), params.get("sets") or ())
    return [str(cell.id) for cell in expand(loaded, default_toolchain=params.get("toolchain") or "auto")]


def _store(ctx: typer.Context) -> Store | None:
    from trtllm_pipeline.orchestrate import INDEX
    from trtllm_pipeline.show.cli.options import WORKSPACE, store_at

    workspace = Path(ctx.params.get("workspace") or WORKSPACE)
    # Completion must neither create a workspace nor rebuild the index of one.
    return store_at(str(workspace)) if (workspace / INDEX).exists() else None


def _outlines(ctx: typer.Context) -> Iterator[Outline]:
    from trtllm_pipeline.orchestrate import runs as run_folders

    store = _store(ctx)
    if store is not None:
        yield run_folders.read_run(run_folders.find_run(store, ctx.params.get("run")))
