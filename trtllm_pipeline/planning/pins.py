"""What a plan depends on outside the matrix, pinned: models to one revision, files of users to their content."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.domain import Cell, Json
from trtllm_pipeline.errors import DownloadError, FailureClass, UsageError
from trtllm_pipeline.files.user_files import check
from trtllm_pipeline.fingerprint import canonical
from trtllm_pipeline.store.store import Store

if TYPE_CHECKING:
    from trtllm_pipeline.hub.hub_errors import UnavailableError

logger = logging.getLogger(__name__)


class ModelPins:
    """Puts into each cell's recipe the one source its model is fetched from, pinned to a revision or digest.

    What the source says of its weights decides whether the cell can work: nothing here is made of quantized ones.
    """

    def __init__(self, store: Store | None, digest: Callable[[Path], str], *, guess: bool) -> None:
        self._store = store
        self._digest = digest
        self._guess = guess
        self._reached = True
        """Whether hubs answer, as far as is known."""
        self._unreached: dict[str, UnavailableError] = {}
        self._recipes: dict[tuple[int, int], tuple[Mapping[str, Json], str | None]] = {}

    def pin(self, cell: Cell) -> Cell:
        """`cell` with its recipe's one source, and with a reason where that source's weights rule the cell out."""
        same = (id(cell.recipe), id(cell.settings["download"]))
        if same not in self._recipes:
            recipe = self._recipe(cell)
            self._recipes[same] = recipe, self._quantized(cell, recipe)
        recipe, quantized = self._recipes[same]
        reason = None if quantized is None else _of_quantized_weights(cell, quantized)
        return dataclasses.replace(cell, recipe=recipe, reason=reason)

    def _recipe(self, cell: Cell) -> Mapping[str, Json]:
        listed = cell.recipe["sources"]
        assert isinstance(listed, list)
        sources = [_without_note(source) for source in listed if isinstance(source, dict)]
        settings = cell.settings["download"]
        wanted: dict[str, Json] = {"sources": [dict(source) for source in sources], "source": settings["source"]}
        request = canonical(wanted)
        source = self._store.index.pin(request) if self._store is not None else None
        if source is None:
            from trtllm_pipeline.hub.sources import resolve, unpinned

            prefer = str(settings["source"])
            try:
                source = resolve(
                    sources,
                    prefer=prefer,
                    offline=bool(settings["offline"]),
                    base_dir=Path(cell.base_dir),
                    digest=self._digest,
                    unreached=self._unreached,
                )
            except DownloadError as error:
                if not self._guess or error.failure is not FailureClass.TRANSIENT:
                    raise
                if self._reached:
                    logger.warning("no hub can be reached; models are planned as their recipes list them")
                self._reached = False
                return {**cell.recipe, "source": _with_code(unpinned(sources, prefer=prefer), cell)}
            # A local folder may change under the same name; what it holds is looked at each time.
            if self._store is not None and "local" not in source:
                self._store.index.set_pin(request, source)
        source = _with_code(source, cell)
        if "local" in source:
            from trtllm_pipeline.hub.sources import local_folder

            return {**cell.recipe, "source": dict(source), "folder": str(local_folder(sources, Path(cell.base_dir)))}
        return {**cell.recipe, "source": dict(source)}

    def _quantized(self, cell: Cell, recipe: Mapping[str, Json]) -> str | None:
        """How the weights are quantized already; None where they are not, and where nobody can tell now."""
        from trtllm_pipeline.hub.peek import quantized

        source, folder = recipe["source"], recipe.get("folder")
        assert isinstance(source, dict)
        if folder is not None:
            return quantized(source, folder=Path(str(folder)), offline=True)
        about = canonical({"weights_of": {name: value for name, value in source.items() if name != "code"}})
        known = self._store.index.pin(about) if self._store is not None else None
        if known is None and not self._reached:
            return None  # a hub that does not answer is not asked for every model; it has been said
        if known is None:
            try:
                known = {
                    "quantized": quantized(source, folder=None, offline=bool(cell.settings["download"]["offline"]))
                }
            except DownloadError as error:
                self._reached = error.failure is not FailureClass.TRANSIENT
                logger.warning("%s: cannot tell now whether its weights are quantized: %s", cell.model, error.message)
                return None
            if self._store is not None:
                self._store.index.set_pin(about, known)
        found = known.get("quantized")
        return None if found is None else str(found)


class FileDigests:
    """Paths and content digests of the files that settings name; each file is looked at once."""

    def __init__(self, digest: Callable[[Path], str], *, guess: bool) -> None:
        self._digest = digest
        self._guess = guess
        self._known: dict[tuple[str, str], tuple[str, str]] = {}

    def digest(self, name: str, cell: Cell) -> tuple[str, str]:
        """Path and digest of `name`; see `hub.dataset_file`. A guess where a hub is not reached and guesses are allowed."""
        from trtllm_pipeline.hub.dataset_file import data_file

        found = self._known.get((name, cell.base_dir))
        if found is None:
            try:
                path = data_file(name, Path(cell.base_dir))
            except DownloadError as error:
                if not self._guess or error.failure is not FailureClass.TRANSIENT:
                    raise
                logger.warning("%s is not reached; planned as if it were new", name)
                return name, "unknown"
            hint = "the matrix names it; relative paths start at the matrix file's folder"
            check(path, hint=hint)
            try:
                found = self._known[name, cell.base_dir] = (str(path), self._digest(path))
            except OSError as error:
                raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=hint) from error
        return found


def _with_code(source: Mapping[str, Json], cell: Cell) -> dict[str, Json]:
    """A source with the code that the recipe names, where the matrix trusts it."""
    code = cell.recipe.get("code")
    if not code or not cell.settings["download"]["trust_remote_code"]:
        return dict(source)
    return {**source, "code": code} if source.keys() & {"hugging_face", "modelscope", "local"} else dict(source)


def _of_quantized_weights(cell: Cell, quantized: str) -> str:
    return (
        f"precision {cell.precision}: the weights of {cell.model} are quantized already, {quantized}, and would be served "
        "as that, whatever the cell says; name the model's unquantized repository"
    )


def _without_note(source: Mapping[str, Json]) -> dict[str, Json]:
    """A source without what is said of it to people, which changes nothing."""
    return {name: value for name, value in source.items() if name != "note"}
