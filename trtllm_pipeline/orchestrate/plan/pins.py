"""What a plan depends on outside the matrix, pinned: models to one revision, files of users to their content."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from trtllm_pipeline.base import Cell, DownloadError, FailureClass, Json, UsageError, canonical, check, digest_file
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
from trtllm_pipeline.tensorrt import ENGINES, brings_code, companions

logger = logging.getLogger(__name__)


_HUBS: Final = frozenset(("hugging_face", "modelscope"))
_OF_THE_HUB: Final = {
    "cnn_dailymail": "hub:abisee/cnn_dailymail/3.0.0 is that data set of the Hub; as calibration data with column: article"
}
"""Name that quantize.py has for a data set -> what it is called here."""


class _Said(NamedTuple):
    """What is known of a model's weights."""

    found: QuantizedWeights | None
    """None for unquantized weights."""
    known: bool = True
    """Whether their files could be read."""


_UNKNOWN: Final = _Said(None, known=False)


class Pins:
    """Models and files of cells, pinned; each is looked at once. With `guess`, a hub that is not reached is no error."""

    def __init__(self, store: Store | None, *, guess: bool) -> None:
        self._index = None if store is None else store.index
        self._digest_file = digest_file if store is None else store.index.digest
        self._guess = guess
        self._reached = True
        """Whether hubs answer, as far as is known."""
        self._said_offline = False
        self._unreached: dict[str, UnavailableError] = {}
        self._recipes: dict[tuple[int, int, bool], tuple[Mapping[str, Json], _Said]] = {}
        self._alone: dict[int, bool] = {}
        """By id of settings, which many cells share: whether they name no other model."""
        self._companions: dict[tuple[str, str, str, int], Mapping[str, Json]] = {}
        self._numbers: dict[tuple[str, str], dict[str, Json]] = {}
        self._files: dict[tuple[str, str], tuple[str, str]] = {}

    def pin(self, cell: Cell) -> Cell:
        """`cell` with the one source its model is fetched from, pinned to a revision or digest.

        It has a reason where that source's weights rule it out: what is quantized already is served as it is or not at
        all. What their files say of them is the recipe's `quantization`.
        """
        by_code = cell.toolchain == ENGINES and brings_code(str(cell.recipe["family"]))
        same = (id(cell.recipe), id(cell.settings["download"]), by_code)
        if same not in self._recipes:
            recipe = self._recipe(cell)
            if self._lacks_tokenizer(cell, recipe):
                logger.warning(
                    "%s: its repository has no %s, nor another tokenizer that smoke, perf and accuracy can read; "
                    "docs/models.md says what to do",
                    cell.model,
                    TOKENIZER,
                )
            said = self._said_of_weights(cell, recipe)
            if said.found is not None:
                recipe = {**recipe, "quantization": said.found.form}
                if said.found.group_size is not None:
                    recipe = {**recipe, "quantization_group_size": said.found.group_size}
            if by_code:
                recipe = {**recipe, "code": self._code_of(cell, recipe)}
            self._recipes[same] = recipe, said
        recipe, said = self._recipes[same]
        pinned = cell.pinned(recipe, _ruled_out(cell, said))
        if id(cell.settings) not in self._alone:
            self._alone[id(cell.settings)] = not (
                companions.named_models(cell) or companions.configurations_needed(cell)
            )
        if pinned.reason is not None or self._alone[id(cell.settings)]:
            return pinned
        return self._with_companions(pinned)

    def _with_companions(self, cell: Cell) -> Cell:
        """`cell` with the other models that it needs, pinned; with a reason where one does not fit its own."""
        asked = companions.named_models(cell)
        found = {name: self._companion(name, model, cell) for name, model in asked.items()}
        known = {"model": cell.recipe, **found}
        configurations = {
            name: self._configuration(
                known[name], cell, CONFIGURATION[MODEL if name == MODEL else companions.form(name)]
            )
            for name in companions.configurations_needed(cell)
            if name in known
        }
        if not found and not configurations:
            return cell
        if companions.has_own_engine(cell) and companions.DRAFT in found:
            return self._with_drafter(cell, found)
        drafter = asked.get(companions.DRAFT, "")
        if drafter in list_recipes(Path(cell.base_dir)):
            same = (drafter, cell.base_dir)
            if same not in self._numbers:
                self._numbers[same] = {**numbers_of(drafter, None, Path(cell.base_dir))}
            numbers = self._numbers[same]
            found[companions.DRAFT] = {**found[companions.DRAFT], "numbers": numbers}
            if configurations.get(companions.DRAFT, {}) is None:
                configurations[companions.DRAFT] = numbers
        described = dataclasses.replace(cell, companions=companions.described(found, configurations))
        return dataclasses.replace(described, reason=companions.unfit(described, configurations))

    def _with_drafter(self, cell: Cell, found: Mapping[str, Mapping[str, Json]]) -> Cell:
        """`cell` with the numbers of its draft model, by which that becomes an engine too."""
        name, draft = companions.named_models(cell)[companions.DRAFT], found[companions.DRAFT]
        config = self._configuration(draft, cell, CONFIGURATION[MODEL], whole=True)
        try:
            numbers = numbers_of(name, config, Path(cell.base_dir))
        except UsageError as error:
            said = f"{companions.SETTINGS[companions.DRAFT]} {error.message}; {error.hint}"
            return dataclasses.replace(cell, companions=found, reason=said)
        known = {**found, companions.DRAFT: {**draft, "recipe": {**numbers}}}
        return dataclasses.replace(cell, companions=known, reason=companions.unlike(cell, numbers))

    def _companion(self, name: str, model: str, cell: Cell) -> Mapping[str, Json]:
        """`source`, `files` and `directory` of another model than the cell's own, by what its settings call it."""
        same = (name, model, cell.base_dir, id(cell.settings["download"]))
        if same not in self._companions:
            local = model.startswith((".", "/", "~"))
            if companions.form(name) == companions.ADAPTER and model in list_recipes(Path(cell.base_dir)):
                raise UsageError(
                    f"{companions.SETTINGS[name]} {model} is the recipe of a model",
                    hint="an adapter is ORGANISATION/NAME of the Hugging Face Hub, or a directory",
                )
            try:
                sources: list[Json] = [{"local": model}] if local else [*sources_of(model, Path(cell.base_dir))]
            except UsageError as error:
                raise UsageError(f"{companions.SETTINGS[name]} {error.message}", hint=error.hint) from error
            settings = {"download": {**cell.settings["download"], "source": "auto", "trust_remote_code": {}}}
            asked = dataclasses.replace(cell, model=model, recipe={"sources": sources}, settings=settings)
            found = self._recipe(asked, form=companions.form(name))
            self._companions[same] = {part: found[part] for part in ("source", "files", "folder") if part in found}
        return self._companions[same]

    def _configuration(
        self, pinned: Mapping[str, Json], cell: Cell, file: str, *, whole: bool = False
    ) -> Mapping[str, Json] | None:
        """What the configuration of a pinned model says to `companions.unfit`, or all of it; None where nobody can tell now."""
        from trtllm_pipeline.models import configuration

        source, folder = pinned["source"], pinned.get("folder")
        assert isinstance(source, dict)
        kind = "configuration_of" if not whole else "whole_configuration_of"
        about = canonical({kind: {name: value for name, value in source.items() if name != "code"}})
        known = None if self._index is None or folder is not None else self._index.pin(about)
        if known is not None:
            return known
        if not self._reached and folder is None:
            return None
        try:
            place = None if folder is None else Path(str(folder))
            found = configuration(source, file, folder=place, offline=bool(cell.settings["download"]["offline"]))
        except DownloadError as error:
            logger.warning("%s: cannot tell now whether its models fit: %s", cell.id, error.message)
            return None
        if found is None:
            return None
        known = {name: found[name] for name in (found if whole else companions.CONFIGURATION) if name in found}
        if self._index is not None and folder is None:
            self._index.set_pin(about, known)
        return known

    def _recipe(self, cell: Cell, *, form: str = MODEL) -> Mapping[str, Json]:
        listed = cell.recipe["sources"]
        assert isinstance(listed, list)
        # What is said of a source to people changes nothing.
        told = [source for source in listed if isinstance(source, dict)]
        sources = [{name: value for name, value in source.items() if name != "note"} for source in told]
        settings = cell.settings["download"]
        request = canonical({"sources": [*sources], "source": settings["source"]})
        source = None if self._index is None else self._index.pin(request)
        if source is None:
            from trtllm_pipeline.models import resolve, unpinned

            prefer = str(settings["source"])
            try:
                source = resolve(
                    sources,
                    prefer=prefer,
                    offline=bool(settings["offline"]),
                    base_dir=Path(cell.base_dir),
                    digest=self._digest_file,
                    unreached=self._unreached,
                    form=form,
                )
            except DownloadError as error:
                self._allow(error)
                self._say_unreached(error)
                return {**cell.recipe, "source": _with_code(unpinned(sources, prefer=prefer), cell)}
            # A local directory may change under the same name; what it holds is looked at each time.
            if self._index is not None and "local" not in source:
                self._index.set_pin(request, source)
        if "local" in source:
            from trtllm_pipeline.models import local_folder

            folder = str(local_folder(sources, Path(cell.base_dir)))
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
        """SHA-256 by name of what is read of a pinned source; None where it cannot be told, and the source has to do.

        What was told once is remembered: a hub that is out of reach for an hour must not make everything stale.
        """
        from trtllm_pipeline.models import content_of

        asked = canonical({"content_of": dict(source)})
        known = None if self._index is None else self._index.pin(asked)
        if known is None:
            if not self._reached and self._guess:
                return None
            try:
                found = content_of(source, offline=bool(cell.settings["download"]["offline"]), form=form)
            except DownloadError as error:
                if error.failure is not FailureClass.TRANSIENT:
                    return None  # offline, gated, not there: the download says so, to the cells that need it alone
                self._allow(error)
                self._reached = False
                logger.warning("%s: cannot tell now what its files are: %s", cell.model, error.message)
                return None
            known = {"files": None if found is None else {**found}}
            if self._index is not None:
                self._index.set_pin(asked, known)
        return known.get("files")

    def _lacks_tokenizer(self, cell: Cell, recipe: Mapping[str, Json]) -> bool:
        """Whether no stage can read the tokenizer of a model; false where nobody can tell now."""
        from trtllm_pipeline.models import configuration

        files, source, folder = recipe.get("files"), recipe["source"], recipe.get("folder")
        assert isinstance(source, dict)
        if not isinstance(files, dict) or TOKENIZER in files:
            return False
        about = canonical({"tokenizer_of": {name: value for name, value in source.items() if name != "code"}})
        known = None if self._index is None or folder is not None else self._index.pin(about)
        if known is None:
            place = None if folder is None else Path(str(folder))
            try:
                found = configuration(
                    source, SETTINGS, folder=place, offline=bool(cell.settings["download"]["offline"])
                )
            except DownloadError:
                return False
            known = {"lacking": not has_tokenizer(files, found or {})}
            if self._index is not None and folder is None:
                self._index.set_pin(about, known)
        return bool(known["lacking"])

    def _said_of_weights(self, cell: Cell, recipe: Mapping[str, Json]) -> _Said:
        """How the weights are quantized already, as far as that can be told now."""
        from trtllm_pipeline.models import quantized

        source, folder = recipe["source"], recipe.get("folder")
        assert isinstance(source, dict)
        if folder is not None:
            return _Said(quantized(source, folder=Path(str(folder)), offline=True))
        about = canonical({"quantization_of": {name: value for name, value in source.items() if name != "code"}})
        known = None if self._index is None else self._index.pin(about)
        if known is None and not self._reached:
            return _UNKNOWN  # a hub that does not answer is not asked for every model; it has been said
        if known is None:
            offline = bool(cell.settings["download"]["offline"])
            try:
                found = quantized(source, folder=None, offline=offline)
                known = {} if found is None else found._asdict()
            except OfflineError:
                return _UNKNOWN  # it has been said, or the model needs no hub in this plan
            except DownloadError as error:
                self._reached = error.failure is not FailureClass.TRANSIENT
                logger.warning("%s: cannot tell now whether its weights are quantized: %s", cell.model, error.message)
                return _UNKNOWN
            if self._index is not None:
                self._index.set_pin(about, known)
        return _Said(QuantizedWeights(**known) if known else None)

    def _code_of(self, cell: Cell, recipe: Mapping[str, Json]) -> dict[str, Json] | None:
        """`files`, the Python files beside the model's weights with their SHA-256, and `page`, where people read them.

        The recipe lists them, or the hub is asked. None where nobody can tell now.
        """
        from trtllm_pipeline.models import code_of, page_of

        folder = None if recipe.get("folder") is None else Path(str(recipe["folder"]))
        source = {name: value for name, value in recipe["source"].items() if name != "code"}  # type: ignore[union-attr]
        if folder is None and not source.keys() & _HUBS:
            return None  # out of a package, or generated: such a model brings none
        if (listed := _listed_code(recipe, source)) is not None:
            return {"files": listed, "page": page_of(source, folder=folder)}
        about = canonical({"code_of": source})
        known = None if self._index is None or folder is not None else self._index.pin(about)
        if known is None:
            if not self._reached and folder is None:
                return None
            try:
                found = code_of(source, folder=folder, offline=bool(cell.settings["download"]["offline"]))
            except OfflineError:
                return None  # it has been said, as of its weights
            except DownloadError as error:
                logger.warning("%s: cannot tell now what code it brings: %s", cell.model, error.message)
                return None
            known = {"files": None if found is None else {**found}}
            if self._index is not None and folder is None:
                self._index.set_pin(about, known)
        files = known.get("files")
        return None if files is None else {"files": files, "page": page_of(source, folder=folder)}

    def digest(self, name: str, cell: Cell) -> tuple[str, str]:
        """Path and digest of `name`; see `hub.dataset_file`. A guess where a hub is not reached and guesses are allowed."""
        from trtllm_pipeline.models import data_file

        found = self._files.get((name, cell.base_dir))
        if found is None:
            try:
                path = data_file(name, Path(cell.base_dir))
            except DownloadError as error:
                self._allow(error)
                logger.warning("%s cannot be read now; planned as if it were new", name)
                return name, "unknown"
            hint = "the matrix names it; relative paths start at the matrix file's directory"
            check(
                path,
                hint=_OF_THE_HUB.get(
                    name.rpartition("/")[2], f"{hint}; hub:ORGANISATION/NAME is a data set of the Hub"
                ),
            )
            try:
                found = self._files[name, cell.base_dir] = (str(path), self._digest_file(path))
            except OSError as error:
                raise UsageError(f"{path}: cannot be read: {error.strerror}", hint=hint) from error
        return found

    def _allow(self, error: DownloadError) -> None:
        """Raise what is no reason to guess."""
        if not self._guess or not (error.failure is FailureClass.TRANSIENT or isinstance(error, OfflineError)):
            raise error

    def _say_unreached(self, error: DownloadError) -> None:
        """Say once why models are planned as their recipes list them. In offline mode others may still be on the machine."""
        if isinstance(error, OfflineError):
            if not self._said_offline:
                logger.warning(
                    "offline mode: models that are not on this machine are planned as their recipes list them"
                )
            self._said_offline = True
        else:
            if self._reached:
                logger.warning("no hub can be reached; models are planned as their recipes list them")
            self._reached = False


def _copies(sources: Sequence[dict[str, Json]], pinned: Mapping[str, Json], prefer: str) -> list[Json]:
    """The other sources on hubs, as they are listed: whether they have the same files is seen when they are needed."""
    wanted = _HUBS if prefer == "auto" else _HUBS & {prefer}
    return [
        dict(source)
        for source in sources
        if any(name in source and source[name] != pinned.get(name) for name in wanted)
    ]


def _listed_code(recipe: Mapping[str, Json], source: Mapping[str, Json]) -> dict[str, Json] | None:
    """The Python files that a recipe lists for the commit of its first source; None for another source, or without a list."""
    files, sources = recipe.get("code_files"), recipe["sources"]
    assert isinstance(sources, list | tuple)
    first = sources[0]
    if not files or not isinstance(files, dict) or not isinstance(first, dict):
        return None
    same = all(source.get(name) == first.get(name) for name in (*_HUBS, "revision"))
    return {**files} if same else None


def _with_code(source: Mapping[str, Json], cell: Cell) -> dict[str, Json]:
    """A source with the code of its model that the matrix trusts."""
    trusted = cell.settings["download"]["trust_remote_code"]
    code = trusted.get(cell.model) if isinstance(trusted, dict) else None
    if not code:
        return dict(source)
    return {**source, "code": code} if source.keys() & {"hugging_face", "modelscope", "local"} else dict(source)


def _ruled_out(cell: Cell, said: _Said) -> str | None:
    """Why the weights rule a cell out, by what their files say or, where those cannot be read now, by its recipe."""
    stated, found = cell.recipe.get("quantization"), said.found
    if not said.known:
        if cell.precision != AS_IS or stated is not None:
            return None
        return (
            f"precision {AS_IS}: how the weights of {cell.model} are quantized cannot be told now, since its hub is not "
            "reached; `quantization` in its recipe says it, and the download checks it"
        )
    if found is None and (cell.precision == AS_IS or stated is not None):
        return f"precision {cell.precision}: the files of {cell.model} say nothing of quantized weights; name another precision"
    if found is not None and stated not in {None, found.form}:
        return f"the recipe of {cell.model} says quantization {stated}, and its files {found.said}; correct the recipe"
    if found is not None and cell.precision != AS_IS:
        return (
            f"precision {cell.precision}: the weights of {cell.model} are quantized already, {found.said}, and would be "
            f"served as that, whatever the cell says; use precision {AS_IS}, or name the model's unquantized repository"
        )
    return None
