"""A checked matrix as plain data: what the rest of the pipeline reads of it, without the models that it was checked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_pipeline.config.document import Document
from trtllm_pipeline.domain import Json


@dataclass(frozen=True, slots=True)
class LoadedMatrix:
    """A checked matrix with the recipes it names."""

    path: Path
    sets: tuple[str, ...]
    """What the command line changed."""
    written: Mapping[str, Any]
    """What the file says, and `sets` of it, every value in its one spelling; nothing that is left to a default."""
    axes: Mapping[str, Sequence[Any] | None]
    """Values of all axes, those over settings last; None for one that may be missing and is."""
    added: Sequence[Mapping[str, Json]]
    """The cells of `add`, with a value for each axis."""
    defaults: Mapping[str, Any]
    """Settings where nothing is said."""
    command_line: Mapping[str, Any]
    """Settings given with `--set`; they win over everything."""
    recipes: Mapping[str, Mapping[str, Any]]
    """By value of the model axis (a recipe's name, or the path of a local folder): every key, but notes for people."""
    written_recipes: Mapping[str, Mapping[str, Any]]
    """The same as their files have them."""
    axes_changed: bool
    """`--set` changed an axis, so rules of the file may match nothing without being wrong."""

    @property
    def names_toolchains(self) -> bool:
        """Whether an axis says what toolchains cells have; `auto` alone says nothing."""
        told = {*(self.axes["toolchain"] or ()), *(cell.get("toolchain") for cell in self.added)}
        return not told <= {None, "auto"}

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of GPU that cells are for; empty if the matrix names none."""
        added = [str(cell["gpu"]) for cell in self.added if cell["gpu"] is not None]
        return tuple(dict.fromkeys((*(self.axes["gpu"] or ()), *added)))

    def document(self) -> Document:
        """The file read anew, for the lines of faults found later. Raises MatrixError where it is gone."""
        from trtllm_pipeline.config.validate import document_of

        return document_of(self.path, self.sets)

    def of_cluster(self, key: str) -> Any:
        """A setting of the cluster: the command line's, or the matrix's, or its default."""
        layers = (self.command_line, self.written.get("settings", {}), self.defaults)
        given = [layer["cluster"][key] for layer in layers if key in layer.get("cluster", {})]
        return next(filter(None, given), given[-1])
