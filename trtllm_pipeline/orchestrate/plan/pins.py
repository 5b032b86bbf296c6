"""Pins what a plan depends on outside the matrix: models to a revision, user files to their content."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from trtllm_pipeline.base import Cell, DownloadError, FailureClass, Json, UsageError, canonical, digest_file, user_files
from trtllm_pipeline.models import (
    AS_IS,
    CONFIGURATION,
    MODEL,
    SETTINGS,
    TOKENIZER,
    OfflineError,
    QuantizedWeights,
    UnavailableError,
    has_tokenizer,
)
from trtllm_pipeline.orchestrate.matrix.recipe_files import list_recipes, numbers_of, sources_of
from trtllm_pipeline.orchestrate.store.store import Store
from trtllm_pipeline.tensorrt import catalog, companions, releases

logger = logging.getLogger(__name__)


_HUBS: Final = frozenset(("hugging_face", "modelscope"))
_OF_THE_HUB: Final = {
    "cnn_dailymail": "hub:abisee/cnn_dailymail/3.0.0 is this data set on the Hub. For calibration, set column: article"
}
"""Data set name of quantize.py -> its name in this project."""


class _Weights(NamedTuple):
    """Quantization of a model's weights, as far as known."""

    quantized: QuantizedWeights | None
    """None for unquantized weights."""
    known: bool = True
    """True if their files could be read."""


_UNKNOWN: Final = _Weights(None, known=False)


class Pins:
    """Pins models and files of cells, each once. With `guess`, an unreachable hub is not an error."""

    def __init__(self, store: Store | None, *, guess: bool) -> None:
        self._index = None if store is None else store.index
        self._digest_file = digest_file if store is None else store.index.digest
        self._guess = guess
        self._reached = True
        """True until a hub could not be reached."""
        self._warned_offline = False
        self._unreached: dict[str, UnavailableError] = {}
        self._recipes: dict[tuple[int, int, bool], tuple[Mapping[str, Json], _Weights]] = {}
        self._companions: dict[tuple[str, str, str, int], Mapping[str, Json]] = {}
        self._numbers: dict[tuple[str, str], dict[str, Json]] = {}
        self._files: dict[tuple[str, str], tuple[str, str]] = {}

    def pin(self, cell: Cell) -> Cell:
        """`cell` with the one source its model is fetched from, pinned to a revision or digest.

        The cell gets a reason if the weights rule it out, since quantized weights can only be served as they are. The
        recipe's `quantization` becomes the one in the model's files.
        """
        by_code = cell.toolchain == catalog.ENGINES and releases.brings_code(str(cell.recipe["family"]))
        same = (id(cell.recipe), id(cell.settings["download"]), by_code)
        if same not in self._recipes:
            recipe = self._recipe(cell)
            if self._lacks_tokenizer(cell, recipe):
                logger.warning(
                    "%s: its repository has no %s, and no other tokenizer that smoke, perf and accuracy can read. "
                    "See docs/models.md",
                    cell.model,
                    TOKENIZER,
                )
            published = self._weights_of(cell, recipe)
            if published.quantized is not None:
                recipe = {**recipe, "quantization": published.quantized.form}
                if published.quantized.group_size is not None:
                    recipe = {**recipe, "quantization_group_size": published.quantized.group_size}
            if by_code:
                recipe = {**recipe, "code": self._code_of(cell, recipe)}
            self._recipes[same] = recipe, published
        recipe, published = self._recipes[same]
        pinned = dataclasses.replace(cell, recipe=recipe, reason=_ruled_out(cell, published))
        return pinned if pinned.reason is not None else self._with_companions(pinned)

    def _with_companions(self, cell: Cell) -> Cell:
        """`cell` with its further models pinned. It gets a reason if one of them does not fit its model."""
        further = companions.named_models(cell)
        pinned = {name: self._companion(name, model, cell) for name, model in further.items()}
        known = {"model": cell.recipe, **pinned}
        configurations = {
            name: self._configuration(
                known[name], cell, CONFIGURATION[MODEL if name == MODEL else companions.form(name)]
            )
            for name in companions.configurations_needed(cell)
            if name in known
        }
        if not pinned and not configurations:
            return cell
        if companions.has_own_engine(cell) and companions.DRAFT in pinned:
            return self._with_drafter(cell, pinned)
        drafter = further.get(companions.DRAFT, "")
        if drafter in list_recipes(Path(cell.base_dir)):
            same = (drafter, cell.base_dir)
            if same not in self._numbers:
                self._numbers[same] = {**numbers_of(drafter, None, Path(cell.base_dir))}
            numbers = self._numbers[same]
            pinned[companions.DRAFT] = {**pinned[companions.DRAFT], "numbers": numbers}
            if configurations.get(companions.DRAFT, {}) is None:
                configurations[companions.DRAFT] = numbers
        described = dataclasses.replace(cell, companions=companions.described(pinned, configurations))
        return dataclasses.replace(described, reason=companions.unfit(described, configurations))

    def _with_drafter(self, cell: Cell, pinned: Mapping[str, Mapping[str, Json]]) -> Cell:
        """`cell` with the architecture of its draft model, which also becomes an engine."""
        name, draft = companions.named_models(cell)[companions.DRAFT], pinned[companions.DRAFT]
        config = self._configuration(draft, cell, CONFIGURATION[MODEL], whole=True)
        try:
            numbers = numbers_of(name, config, Path(cell.base_dir))
        except UsageError as error:
            reason = f"{companions.SETTINGS[companions.DRAFT]} {error.message}; {error.hint}"
            return dataclasses.replace(cell, companions=pinned, reason=reason)
        known = {**pinned, companions.DRAFT: {**draft, "recipe": {**numbers}}}
        return dataclasses.replace(cell, companions=known, reason=companions.unlike(cell, numbers))

    def _companion(self, name: str, model: str, cell: Cell) -> Mapping[str, Json]:
        """`source`, `files` and `folder` of a further model of the cell, by its name in the settings."""
        same = (name, model, cell.base_dir, id(cell.settings["download"]))
        if same not in self._companions:
            local = model.startswith((".", "/", "~"))
            if companions.form(name) == companions.ADAPTER and model in list_recipes(Path(cell.base_dir)):
                raise UsageError(
                    f"{companions.SETTINGS[name]} {model} is a model, not an adapter",
                    hint="give ORGANIZATION/NAME on the Hugging Face Hub, or a directory",
                )
            try:
                sources: list[Json] = [{"local": model}] if local else [*sources_of(model, Path(cell.base_dir))]
            except UsageError as error:
                raise UsageError(f"{companions.SETTINGS[name]} {error.message}", hint=error.hint) from error
            settings = {"download": {**cell.settings["download"], "source": "auto", "trust_remote_code": {}}}
            alone = dataclasses.replace(cell, model=model, recipe={"sources": sources}, settings=settings)
            pinned = self._recipe(alone, form=companions.form(name))
            self._companions[same] = {part: pinned[part] for part in ("source", "files", "folder") if part in pinned}
        return self._companions[same]

    def _configuration(
        self, pinned: Mapping[str, Json], cell: Cell, file: str, *, whole: bool = False
    ) -> Mapping[str, Json] | None:
        """The configuration of a pinned model, or the part that `companions.unfit` reads. None if it cannot be read now."""
        from trtllm_pipeline.models import peek

        source, folder = _place(pinned)
        about = {"configuration_of" if not whole else "whole_configuration_of": source}
        known = self._known(about, folder)
        if known is not None:
            return known
        if not self._reached and folder is None:
            return None
        try:
            content = peek.configuration(source, file, folder=folder, offline=_is_offline(cell))
        except DownloadError as error:
            logger.warning("%s: cannot check now if its models fit: %s", cell.id, error.message)
            return None
        if content is None:
            return None
        known = {name: content[name] for name in (content if whole else companions.CONFIGURATION) if name in content}
        return self._keep(about, known, folder)

    def _known(self, about: Mapping[str, Json], folder: Path | None = None) -> Mapping[str, Any] | None:
        """The stored pin of a request. None without one, and for a directory, which is examined each time."""
        return None if self._index is None or folder is not None else self._index.pin(canonical(about))

    def _keep(self, about: Mapping[str, Json], pinned: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
        if self._index is not None and folder is None:
            self._index.set_pin(canonical(about), pinned)
        return pinned

    def _recipe(self, cell: Cell, *, form: str = MODEL) -> Mapping[str, Json]:
        listed = cell.recipe["sources"]
        assert isinstance(listed, list)
        # Notes for people do not count.
        entries = [source for source in listed if isinstance(source, dict)]
        sources = [{name: value for name, value in source.items() if name != "note"} for source in entries]
        settings = cell.settings["download"]
        request: dict[str, Json] = {"sources": [*sources], "source": settings["source"]}
        source = self._known(request)
        if source is None:
            from trtllm_pipeline.models import sources as model_sources

            prefer = str(settings["source"])
            try:
                source = model_sources.resolve(
                    sources,
                    prefer=prefer,
                    offline=_is_offline(cell),
                    base_dir=Path(cell.base_dir),
                    digest=self._digest_file,
                    unreached=self._unreached,
                    form=form,
                )
            except DownloadError as error:
                self._allow(error)
                self._warn_unreached(error)
                return {**cell.recipe, "source": _with_code(model_sources.unpinned(sources, prefer=prefer), cell)}
            # A local directory may change under the same name. It is examined each time.
            if "local" not in source:
                self._keep(request, source, None)
        if "local" in source:
            from trtllm_pipeline.models import sources as model_sources

            folder = str(model_sources.local_folder(sources, Path(cell.base_dir)))
            pinned = _with_code({"local": source["local"]}, cell)
            return {**cell.recipe, "source": pinned, "files": source["files"], "folder": folder}
        if source.keys() & _HUBS:
            listed_files = source.get("files")
            source = {name: value for name, value in source.items() if name != "files"}
            files = self._files_of(source, cell, form) if listed_files is None else listed_files or None
            copies = _copies(sources, source, str(settings["source"])) if files else []
            return {**cell.recipe, "source": _with_code(source, cell), "files": files, "copies": copies or None}
        return {**cell.recipe, "source": dict(source)}

    def _files_of(self, source: Mapping[str, Json], cell: Cell, form: str) -> Json:
        """SHA-256 by name of the files that are read from a pinned source. None if unknown, then the source is the key.

        Known digests are stored: an hour without a hub must not make everything stale.
        """
        from trtllm_pipeline.models import sources as model_sources

        about: dict[str, Json] = {"content_of": dict(source)}
        known = self._known(about)
        if known is None:
            if not self._reached and self._guess:
                return None
            try:
                digests = model_sources.content_of(source, offline=_is_offline(cell), form=form)
            except DownloadError as error:
                if error.failure is not FailureClass.TRANSIENT:
                    return None  # offline, gated or missing: the download reports it for the cells that need it
                self._allow(error)
                self._reached = False
                logger.warning("%s: cannot list its files now: %s", cell.model, error.message)
                return None
            known = self._keep(about, {"files": None if digests is None else {**digests}}, None)
        return known.get("files")

    def _lacks_tokenizer(self, cell: Cell, recipe: Mapping[str, Json]) -> bool:
        """True if no stage can read the tokenizer of a model. False if it is unknown now."""
        from trtllm_pipeline.models import peek

        files, (source, folder) = recipe.get("files"), _place(recipe)
        if not isinstance(files, dict) or TOKENIZER in files:
            return False
        about = {"tokenizer_of": source}
        known = self._known(about, folder)
        if known is None:
            try:
                content = peek.configuration(source, SETTINGS, folder=folder, offline=_is_offline(cell))
            except DownloadError:
                return False
            known = self._keep(about, {"lacking": not has_tokenizer(files, content or {})}, folder)
        return bool(known["lacking"])

    def _weights_of(self, cell: Cell, recipe: Mapping[str, Json]) -> _Weights:
        """Quantization of the published weights, as far as known now."""
        from trtllm_pipeline.models import peek

        source, folder = _place(recipe)
        if folder is not None:
            return _Weights(peek.quantized(source, folder=folder, offline=True))
        about = {"quantization_of": source}
        known = self._known(about)
        if known is None and not self._reached:
            return _UNKNOWN  # no request to an unreachable hub for every model; there was a warning
        if known is None:
            try:
                weights = peek.quantized(source, folder=None, offline=_is_offline(cell))
            except OfflineError:
                return _UNKNOWN  # there was a warning, or the model needs no hub in this plan
            except DownloadError as error:
                self._reached = error.failure is not FailureClass.TRANSIENT
                logger.warning("%s: cannot check now if its weights are quantized: %s", cell.model, error.message)
                return _UNKNOWN
            known = self._keep(about, {} if weights is None else weights._asdict(), None)
        return _Weights(QuantizedWeights(**known) if known else None)

    def _code_of(self, cell: Cell, recipe: Mapping[str, Json]) -> dict[str, Json] | None:
        """`files`, the Python files of the model's repository with their SHA-256, and `page`, the URL to read them.

        From the recipe, or from the hub. None if unknown now.
        """
        from trtllm_pipeline.models import sources as model_sources

        source, folder = _place(recipe)
        if folder is None and not source.keys() & _HUBS:
            return None  # models from packages and generated models have none
        if (listed := _listed_code(recipe, source)) is not None:
            return {"files": listed, "page": model_sources.page_of(source, folder=folder)}
        about = {"code_of": source}
        known = self._known(about, folder)
        if known is None:
            if not self._reached and folder is None:
                return None
            try:
                digests = model_sources.code_of(source, folder=folder, offline=_is_offline(cell))
            except OfflineError:
                return None  # there was a warning about its weights
            except DownloadError as error:
                logger.warning("%s: cannot check now if it comes with code: %s", cell.model, error.message)
                return None
            known = self._keep(about, {"files": None if digests is None else {**digests}}, folder)
        files = known.get("files")
        return None if files is None else {"files": files, "page": model_sources.page_of(source, folder=folder)}

    def digest(self, name: str, cell: Cell) -> tuple[str, str]:
        """Path and digest of `name`, see `hub.dataset_file`. A guess if a hub cannot be reached and guesses are allowed."""
        from trtllm_pipeline.models import dataset_file

        content = self._files.get((name, cell.base_dir))
        if content is None:
            try:
                path = dataset_file.data_file(name, Path(cell.base_dir))
            except DownloadError as error:
                self._allow(error)
                logger.warning("%s cannot be read now, it is planned as if it were new", name)
                return name, "unknown"
            hint = "relative paths in a matrix start at the matrix file's directory"
            user_files.check(
                path,
                hint=_OF_THE_HUB.get(
                    name.rpartition("/")[2], f"{hint}; hub:ORGANIZATION/NAME is a data set on the Hub"
                ),
            )
            try:
                content = self._files[name, cell.base_dir] = (str(path), self._digest_file(path))
            except OSError as error:
                raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=hint) from error
        return content

    def _allow(self, error: DownloadError) -> None:
        """Raise errors that do not permit a guess."""
        if not self._guess or not (error.failure is FailureClass.TRANSIENT or isinstance(error, OfflineError)):
            raise error

    def _warn_unreached(self, error: DownloadError) -> None:
        """Warn once that models are planned as in their recipes. In offline mode, other models may still be on the machine."""
        if isinstance(error, OfflineError):
            if not self._warned_offline:
                logger.warning("offline mode: models that are not on this machine are planned as in their recipes")
            self._warned_offline = True
        else:
            if self._reached:
                logger.warning("no hub can be reached, models are planned as in their recipes")
            self._reached = False


def _is_offline(cell: Cell) -> bool:
    return bool(cell.settings["download"]["offline"])


def _place(pinned: Mapping[str, Json]) -> tuple[dict[str, Json], Path | None]:
    """The source of a pinned model without its trusted code, and its directory if it is local."""
    source, folder = pinned["source"], pinned.get("folder")
    assert isinstance(source, dict)
    without_code = {name: value for name, value in source.items() if name != "code"}
    return without_code, None if folder is None else Path(str(folder))


def _copies(sources: Sequence[dict[str, Json]], pinned: Mapping[str, Json], prefer: str) -> list[Json]:
    """The other sources on hubs. Their files are compared only when they are needed."""
    wanted = _HUBS if prefer == "auto" else _HUBS & {prefer}
    return [
        dict(source)
        for source in sources
        if any(name in source and source[name] != pinned.get(name) for name in wanted)
    ]


def _listed_code(recipe: Mapping[str, Json], source: Mapping[str, Json]) -> dict[str, Json] | None:
    """The Python files in a recipe for the commit of its first source. None for other sources, or without a list."""
    files, sources = recipe.get("code_files"), recipe["sources"]
    assert isinstance(sources, list | tuple)
    first = sources[0]
    if not files or not isinstance(files, dict) or not isinstance(first, dict):
        return None
    same = all(source.get(name) == first.get(name) for name in (*_HUBS, "revision"))
    return {**files} if same else None


def _with_code(source: Mapping[str, Json], cell: Cell) -> dict[str, Json]:
    """A source with the model code that the matrix trusts."""
    trusted = cell.settings["download"]["trust_remote_code"]
    code = trusted.get(cell.model) if isinstance(trusted, dict) else None
    if not code:
        return dict(source)
    return {**source, "code": code} if source.keys() & {"hugging_face", "modelscope", "local"} else dict(source)


def _ruled_out(cell: Cell, published: _Weights) -> str | None:
    """The reason why the weights rule a cell out, from their files or, if these cannot be read now, from the recipe."""
    stated, weights = cell.recipe.get("quantization"), published.quantized
    if not published.known:
        if cell.precision != AS_IS or stated is not None:
            return None
        return (
            f"precision {AS_IS}: the quantization of {cell.model} is unknown, because its hub cannot be reached. "
            "Set `quantization` in its recipe, the download checks it"
        )
    if weights is None and (cell.precision == AS_IS or stated is not None):
        return f"precision {cell.precision}: the files of {cell.model} have no quantized weights, use another precision"
    if weights is not None and stated not in {None, weights.form}:
        return f"the recipe of {cell.model} has quantization {stated}, but the model has {weights.said}. Correct the recipe"
    if weights is not None and cell.precision != AS_IS:
        return (
            f"precision {cell.precision}: the weights of {cell.model} are already quantized ({weights.said}) and would be "
            f"served that way. Use precision {AS_IS}, or the model's unquantized repository"
        )
    return None
