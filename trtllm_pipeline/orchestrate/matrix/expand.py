"""A loaded matrix to cells: product of the axes, less `exclude`, plus `add`, with settings by `override`; and selection.

A cell's id is made of its values and nothing else, so adding or removing other cells never renames it:
`qwen2-7b/fp8/tp4pp1/bs8/isl2048-osl1024`, then the toolchain and the type of GPU where these are axes, then `key=value` for
each axis over a setting. Cells that cannot work are kept, with their reason.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from trtllm_pipeline.base import ALONE, Cell, CellId, Exclusive, Fault, Json, MatrixError, UsageError, in_order
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.orchestrate.matrix.document import KeyPath, nearest
from trtllm_pipeline.orchestrate.matrix.spelling import (
    SETTINGS_PREFIX,
    Parallelism,
    canonical_lengths,
    canonical_parallel,
    nested,
    parse_lengths,
    parse_parallel,
)

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix

MAX_CELLS: Final = 100_000
_PERF: Final = f"{SETTINGS_PREFIX}perf."
OF_TENSORRT_LLM: Final = frozenset({"tensorrt_llm", "tensorrt_llm_pytorch"})
"""The toolchains that have a release of TensorRT-LLM."""
_ANY_GPU: Final = ""
"""Stands for the type of GPU of a matrix that names none."""
EMBEDDED: Final = "embedded"
"""The toolchain that uses no GPU."""

Feasibility = Callable[[Cell], "str | None"]
Point = tuple[str, ...]
"""A cell as texts, one an axis: settings as JSON, everything else as in the matrix in its one spelling."""
SettingsDict = Mapping[str, Mapping[str, Json]]

_SPELL: Final[Mapping[str, Callable[[str], str]]] = {"parallel": canonical_parallel, "lengths": canonical_lengths}


@dataclass(frozen=True, slots=True)
class _Axis:
    name: str
    values: tuple[str, ...]
    """Values of the product."""
    universe: frozenset[str]
    """All values, those of added cells too."""
    segments: Mapping[str, str]
    """What stands in ids."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A `where` resolved to sets of values, by position of the axis."""

    allowed: tuple[tuple[int, frozenset[str]], ...]
    here: bool = True
    """Whether it is for the machine's release of TensorRT-LLM."""
    of_a_release: bool = False

    def matches(self, point: Point) -> bool:
        for position, values in self.allowed:  # noqa: SIM110  (three times as fast as `all`, and runs for every cell)
            if point[position] not in values:
                return False
        return True


def expand(
    loaded: LoadedMatrix,
    *,
    default_toolchain: str,
    instead: Callable[[Cell], str | None] | None = None,
    release: str | None = None,
) -> tuple[Cell, ...]:
    """The cells of a matrix, in the order of the axes, then the added ones.

    `default_toolchain` is what `auto`, or no toolchain axis, stands for, and `release` the machine's TensorRT-LLM. Where an axis
    names no other, `instead` gives the toolchain of cells whose model, precision or layout the default one does not take.
    Recipes and equal settings are shared between cells. Raises MatrixError with all faults: rules that match nothing, values and cells that are there twice, too many
    cells or none.
    """
    return tuple(_cells(_Grid(loaded, default_toolchain, release), instead))


def judged(cell: Cell, feasibility: Feasibility) -> Cell:
    """`cell` with why it cannot work, as `feasibility` says it or None; its recipe may have ruled it out already."""
    reason = None if cell.reason is not None else feasibility(cell)
    return cell if reason is None else replace(cell, reason=reason)


def with_control(
    cells: Sequence[Cell], gpus: Callable[[Cell], int], feasibility: Feasibility = lambda _cell: None
) -> tuple[Cell, ...]:
    """`cells`, and the first that is measured beside others a second time, alone on the machine.

    It is kept on CPUs as beside others. What both measured tells how much the others matter there. There is none where nothing can be measured side by side on
    the `gpus` that there are for a cell: what cannot work at all, by its recipe or as `feasibility` says it, is not.
    """
    beside = [
        cell
        for cell in cells
        if cell.settings["perf"]["exclusive"] == Exclusive.GPU
        and cell.toolchain != EMBEDDED
        and not cell.settings["openai"]["url"]
        and judged(cell, feasibility).reason is None
    ]
    first = next((cell for cell in beside if 2 * cell.tp * cell.pp <= gpus(cell)), None)
    if first is None or len(beside) < 2:
        return tuple(cells)
    settings = {**first.settings, "perf": {**first.settings["perf"], "exclusive": Exclusive.CONTROL.value}}
    return (*cells, replace(first, id=CellId(f"{ALONE}{first.id}"), settings=settings))


def written_out(loaded: LoadedMatrix, *, default_toolchain: str, release: str | None = None) -> dict[str, Any]:
    """The matrix as data, changes of the command line included: a file of it makes the same cells anywhere.

    Local directories are named as their recipes are, and rules that match nothing any more, since the command line changed
    an axis, are left out. Raises MatrixError as `expand` does.
    """
    grid = _Grid(loaded, default_toolchain, release)
    data: dict[str, Any] = deepcopy({**loaded.written})
    data["toolchain"] = default_toolchain
    data.pop("remote", None)  # it says how to get at results, not which

    def name(model: str) -> str:
        return str(loaded.recipes[model]["name"]) if model in loaded.recipes else model

    def rule(where: dict[str, Any]) -> dict[str, Any]:
        for axis in grid.axes:
            if axis.name in where:
                where[axis.name] = [value for value in _listed(where[axis.name]) if grid.matching(axis, value)]
        return {**where, "model": list(map(name, where["model"]))} if "model" in where else where

    def used(kind: str, rules: Sequence[_Rule], points: Sequence[Point]) -> list[Any]:
        pairs = zip(data.get(kind, ()), rules, strict=True)
        return [written for written, each in pairs if any(map(each.matches, points))]

    kept = {point for point in grid.product if not any(each.here and each.matches(point) for each in grid.excludes)}
    data["axes"]["model"] = list(map(name, data["axes"]["model"]))
    data["exclude"] = list(map(rule, used("exclude", grid.excludes, grid.product)))
    data["add"] = [
        {**cell, "model": name(cell["model"])}
        for cell, point in zip(data.get("add", ()), grid.added, strict=True)
        if point not in kept
    ]
    data["override"] = [
        {**override, "where": rule(override["where"])}
        for override in used("override", grid.overrides, (*grid.points, *grid.left_out))
    ]
    if loaded.command_line:
        data["override"].append({"where": {}, "settings": deepcopy({**loaded.command_line})})
    return data


_LISTED: Final = "`pipeline matrix show FILE` lists the cells"


class _WithId(Protocol):
    @property
    def id(self) -> CellId: ...


_AnyCell = TypeVar("_AnyCell", bound=_WithId)


def select(cells: Sequence[_AnyCell], patterns: Sequence[str]) -> tuple[_AnyCell, ...]:
    """The cells that any pattern matches and no `!pattern` does; without a plain pattern, all but those.

    A pattern is matched with an id segment by segment, `*`, `?` and `[...]` as in a shell; it may end early and then
    takes everything below: `qwen2*/fp8` and `qwen2*/fp8/*` are the same. What has no wildcard and matches nothing so may
    be a part of ids, or some of their segments in order, as tables show them: `fp8/bs4`. Raises UsageError for a pattern that matches nothing, with what would, and when nothing is left.
    """
    if not patterns:
        return tuple(cells)
    split = [cell.id.split("/") for cell in cells]
    wanted: set[int] = set()
    unwanted: set[int] = set()
    for pattern in patterns:
        parts = pattern.removeprefix("!").removesuffix("/").split("/")
        hits = {index for index, segments in enumerate(split) if _fits(segments, parts)}
        if not hits and not set("*?[") & set(pattern):
            part = pattern.removeprefix("!")
            hits = {index for index, cell in enumerate(cells) if part and part in cell.id}
            hits = hits or {index for index, segments in enumerate(split) if in_order(segments, parts)}
            # Whoever names a cell in short does not mean its control.
            hits = {index for index in hits if not cells[index].id.startswith(ALONE)} or hits
        if not hits:
            message = f"{pattern!r} matches none of the {len(cells)} cells"
            raise UsageError(message, hint=_nearest_segments(split, parts))
        (unwanted if pattern.startswith("!") else wanted).update(hits)
    if all(pattern.startswith("!") for pattern in patterns):
        wanted = set(range(len(cells)))
    if not wanted - unwanted:
        raise UsageError(f"--cells {' '.join(patterns)}: every cell that is asked for is also left out")
    return tuple(cells[index] for index in sorted(wanted - unwanted))


def _fits(segments: Sequence[str], parts: Sequence[str]) -> bool:
    # A last `*` stands for everything below, even when the id ends before it.
    if len(parts) > len(segments) + (parts[-1:] == ["*"]):
        return False
    for segment, part in zip(segments, parts, strict=False):  # noqa: SIM110  (as in `matches`)
        if not _matches(segment, part):
            return False
    return True


_matches: Final = cache(fnmatch.fnmatchcase)
"""Cells have few segments that others do not have."""


def _nearest_segments(split: Sequence[Sequence[str]], parts: Sequence[str]) -> str:
    """What ids have at the place where a pattern stops fitting, nearest first.

    What starts with a segment of further down, as tables name cells, is taken to begin there.
    """
    if not any(_fits(segments, parts[:1]) for segments in split):
        for skipped in range(1, max(map(len, split), default=0)):
            found = [segments[skipped:] for segments in split if _fits(segments[skipped:], parts[:1])]
            if found and any(_fits(segments, parts) for segments in found):
                return f"instead of {'/'.join(parts)!r}, use {'/'.join(['*'] * skipped + list(parts))!r}"
            if found:
                later = sorted({each for segments in found for each in segments[1:]})
                wrong = next(
                    (part for part in parts[1:] if not any(fnmatch.fnmatchcase(each, part) for each in later)), ""
                )
                near = difflib.get_close_matches(wrong, later, n=8, cutoff=0.5)
                return f"instead of {wrong!r}, use {' or '.join(near)}" if near else _LISTED
    for depth in range(len(parts)):
        if not any(_fits(segments, parts[: depth + 1]) for segments in split):
            below = {segments[depth] for segments in split if len(segments) > depth and _fits(segments, parts[:depth])}
            near = difflib.get_close_matches(parts[depth], sorted(below), n=8, cutoff=0)
            if near:
                return f"instead of {parts[depth]!r}, use {' or '.join(near)}"
    return _LISTED


_EVEN_STAGES: Final = "tensorrt_llm"
"""The toolchain whose pipeline stages must have equal numbers of layers: engines. The PyTorch backend gives the first stages one
more (`Mapping.pp_layers`), vLLM the last but one (its pull request 6115), and SGLang takes unequal stages too (13282)."""


def infeasible(
    recipe: Mapping[str, Any], *, toolchain: str, precision: str, parallel: Parallelism, isl: int, osl: int
) -> str | None:
    """Why no such engine of this model can exist, as far as its recipe tells; None when nothing speaks against it."""
    tp, pp, ep = parallel
    name, precisions, quantization = recipe["name"], recipe["precisions"], recipe["quantization"]
    if isinstance(precisions, dict):
        precisions = precisions.get(toolchain)
    heads, kv_heads, layers = (
        recipe[number] for number in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    experts, positions = recipe["num_experts"], recipe["max_position_embeddings"]
    if quantization is not None and precision != AS_IS:
        return f"the weights of {name} are quantized already ({quantization}): use precision {AS_IS}, or another model"
    if precisions == []:
        return f"{toolchain} does not have {name}: its recipe lists no precision for it"
    if precisions is not None and precision not in precisions:
        return f"the recipe {name} lists only {', '.join(precisions)} for {toolchain}, not {precision}"
    if heads % tp:
        return f"{heads} attention heads cannot be divided over tp{tp}"
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} key/value heads can be neither divided over nor repeated to tp{tp}"
    if toolchain == _EVEN_STAGES and layers % pp:
        return f"{layers} layers cannot be divided over pp{pp}"
    if layers < pp:
        return f"pp{pp}: {name} has {layers} layers, and each stage needs one"
    if ep > 1 and experts is None:
        return f"ep{ep}: {name} is not known as a mixture of experts; its recipe has no num_experts"
    if experts is not None and experts % ep:
        return f"{experts} experts cannot be dealt evenly over ep{ep}"
    if isl + osl > positions:
        return f"{isl} input and {osl} output tokens are more than the model's {positions} positions"
    return None


# -------------------------------------------------------------------------------------------------- axes and points


class _Grid:
    """The axes of a matrix, its rules resolved, and the points of its cells. Raises MatrixError with all faults."""

    def __init__(self, loaded: LoadedMatrix, default_toolchain: str, release: str | None) -> None:
        self.loaded = loaded
        self.default_toolchain = default_toolchain
        self.release = release
        self.faults: list[Fault] = []
        self.axes = self._axes()
        written = loaded.written
        self.excludes = [
            self._rule(where, ("exclude", index)) for index, where in enumerate(written.get("exclude", ()))
        ]
        self.overrides = [
            self._rule(each["where"], ("override", index, "where"))
            for index, each in enumerate(written.get("override", ()))
        ]
        self._raise_faults()
        count = math.prod(len(axis.values) for axis in self.axes)
        if count > MAX_CELLS:
            self._fault(("axes",), f"the axes make {count} cells; {MAX_CELLS} is the most")
            self._raise_faults()
        self.product: list[Point] = list(itertools.product(*(axis.values for axis in self.axes)))
        self.left_out: set[Point] = set()
        """Points that the machine's release has no cells for."""
        self.points = self._points()
        self._raise_faults()
        here = [(index, rule) for index, rule in enumerate(self.overrides) if rule.here]
        self.matched: list[tuple[int, ...]] = [
            tuple([index for index, rule in here if rule.matches(point)]) for point in self.points
        ]
        """Which overrides apply to each point."""
        for index in sorted(set(range(len(self.overrides))).difference(*self.matched)):
            rule = self.overrides[index]
            if not rule.of_a_release and not any(map(rule.matches, self.left_out)):
                self._fault_of_rule(("override", index, "where"), "matches no cell")
        self._raise_faults()

    def _fault(self, at: KeyPath, message: str) -> None:
        self.faults.append(self.loaded.document.fault(at, message))

    def _fault_of_rule(self, at: KeyPath, message: str) -> None:
        """A fault, unless the command line changed an axis."""
        if not self.loaded.axes_changed:
            self._fault(at, message)

    def _raise_faults(self) -> None:
        if self.faults:
            raise MatrixError(tuple(self.faults))

    def _axes(self) -> list[_Axis]:
        """All axes in the order of an id's segments, the toolchain also when the matrix has no such axis."""
        loaded = self.loaded
        values: dict[str, tuple[str, ...]] = {
            name: tuple(map(_text if name.startswith(SETTINGS_PREFIX) else str, own or ()))
            for name, own in loaded.axes.items()
        }
        values["model"] = tuple([loaded.recipes[model]["name"] for model in values["model"]])
        values["toolchain"] = tuple(map(self._toolchain, values["toolchain"] or ("auto",)))
        values["gpu"] = values["gpu"] or (_ANY_GPU,)
        self.added = [self._added_point(list(values), cell) for cell in loaded.added]
        axes = []
        for position, (name, own) in enumerate(values.items()):
            universe = dict.fromkeys((*own, *(point[position] for point in self.added)))
            segments = {value: segment(name, value, list(values)) for value in universe}
            axes.append(_Axis(name, own, frozenset(universe), segments))
            # Two values may come to look the same: auto beside the toolchain it stands for, or texts with odd characters.
            first: dict[str, int] = {}
            for index, value in enumerate((*own, *(value for value in universe if value not in own))):
                if first.setdefault(segments[value], index) != index:
                    at: KeyPath = ("axes", name, index) if index < len(own) else ("axes", name)
                    self._fault(at, f"two values cannot be told apart in cell ids: both are {segments[value]}")
        return axes

    def _toolchain(self, name: object) -> str:
        return self.default_toolchain if name in {None, "auto"} else str(name)

    def _added_point(self, names: Sequence[str], added: Mapping[str, Json]) -> Point:
        own = {
            "model": self.loaded.recipes[str(added["model"])]["name"],
            "toolchain": self._toolchain(added["toolchain"]),
        }
        values = {**added, **own, "gpu": added["gpu"] or _ANY_GPU}
        return tuple(_text(values[name]) if name.startswith(SETTINGS_PREFIX) else str(values[name]) for name in names)

    def _rule(self, where: Mapping[str, Json], at: KeyPath) -> _Rule:
        """A part of `exclude` or `override`; notes every value in it that no cell has."""
        written = {
            name: value for name, value in where.items() if value is not None or name.startswith(SETTINGS_PREFIX)
        }
        if not written and at[0] == "exclude":
            self._fault(at, "names no axis, so it would leave out every cell")
        allowed = []
        for position, axis in enumerate(self.axes):
            if axis.name in written:
                found: set[str] = set()
                for index, value in enumerate(_listed(written[axis.name])):
                    hits = self.matching(axis, value)
                    if not hits:
                        place = (*at, axis.name)
                        if isinstance(self.loaded.document.get(place), list):
                            place = (*place, index)
                        near = nearest(str(value), axis.universe)
                        self._fault_of_rule(place, f"{value!r} matches no value of {axis.name}{near}")
                    found |= hits
                allowed.append((position, frozenset(found)))
        if "release" not in written:
            return _Rule(tuple(allowed))
        # The same matrix is for machines with other releases, or none: a rule that is for none of its cells there is right.
        position = self.position("toolchain")
        allowed.append((position, self.axes[position].universe & OF_TENSORRT_LLM))
        return _Rule(tuple(allowed), here=_is_release(self.release, str(written["release"])), of_a_release=True)

    def position(self, axis: str) -> int:
        """Of an axis among all."""
        return [each.name for each in self.axes].index(axis)

    def matching(self, axis: _Axis, value: object) -> set[str]:
        """Values of an axis that one value of a rule stands for."""
        if axis.name.startswith(SETTINGS_PREFIX):
            return {_text(value)} & axis.universe
        text = str(value)
        if axis.name == "model" and text in self.loaded.recipes:
            text = str(self.loaded.recipes[text]["name"])
        elif axis.name == "toolchain":
            text = self._toolchain(text)
        elif axis.name in _SPELL and not set(text) & set("*?["):
            try:
                text = _SPELL[axis.name](text)
            except ValueError:
                return set()
        return {known for known in axis.universe if fnmatch.fnmatchcase(known, text)}

    def _points(self) -> list[Point]:
        """The points of all cells."""
        dropped: set[Point] = set()
        for index, rule in enumerate(self.excludes):
            hits = [point for point in self.product if rule.here and rule.matches(point)]
            if not hits and not rule.of_a_release:
                self._fault_of_rule(("exclude", index), "matches no cell")
            dropped.update(hits)
            self.left_out.update(hits if rule.of_a_release else ())
        points = dict.fromkeys(point for point in self.product if point not in dropped)
        for index, point in enumerate(self.added):
            if point in points:
                self._fault_of_rule(("add", index), "is a cell of the matrix already")
            points[point] = None
        if not points:
            self._fault(("exclude",), "leaves no cell")
        return list(points)


def _is_release(release: str | None, specifiers: str) -> bool:
    """Whether the specifiers hold for a release. A candidate counts as what it is one of, where they name no candidate
    themselves: of PEP 440, 1.3.0rc3 is neither "<1.3" nor ">=1.3", and would get neither's settings.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    if release is None:
        return False
    version = Version(release)
    final = version.base_version if version.is_prerelease else release
    return all(
        each.contains(release if any(map(str.isalpha, each.version)) else final, prereleases=True)
        for each in SpecifierSet(specifiers)
    )


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def segment(name: str, value: str, names: Sequence[str]) -> str:
    """What stands in an id for a value of an axis, of all those `names`."""
    match name:
        case "max_batch_size":
            return f"bs{value}"
        case "lengths":
            isl, osl = parse_lengths(value)
            return f"isl{isl}-osl{osl}"
        case _ if name.startswith(SETTINGS_PREFIX):
            key = name.rpartition(".")[2]
            if sum(other.rpartition(".")[2] == key for other in names) > 1:
                key = name.removeprefix(SETTINGS_PREFIX)
            return f"{key}={_value_text(json.loads(value))}"
        case _:
            return value


def _value_text(value: Json) -> str:
    """A setting's value in an id: typeable, without characters that shells or patterns take for theirs."""
    if isinstance(value, list):
        return "+".join(map(_value_text, value))
    text = value if isinstance(value, str) else json.dumps(value)
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if len(plain) <= 40 and plain:
        return plain
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{plain[:30]}-{digest}" if plain else digest


# ------------------------------------------------------------------------------------------------------------ cells


def _cells(grid: _Grid, instead: Callable[[Cell], str | None] | None) -> Iterator[Cell]:
    loaded, axes = grid.loaded, grid.axes
    recipes = {recipe["name"]: {**recipe} for recipe in loaded.recipes.values()}
    optional = {name: loaded.axes[name] is not None for name in ("toolchain", "gpu")}
    by_machine = None if loaded.names_toolchains else instead
    others: dict[tuple[str, str, str, str, int], str | None] = {}
    shown = [axis for axis in axes if optional.get(axis.name, True)]
    positions = [position for position, axis in enumerate(axes) if axis in shown]
    segments = [axes[position].segments for position in positions]
    layouts = {value: parse_parallel(value) for value in axes[grid.position("parallel")].universe}
    lengths = {value: parse_lengths(value) for value in axes[grid.position("lengths")].universe}
    chosen = grid.position("toolchain")
    settings = _SettingsByCell(loaded, axes)
    base_dir = os.path.abspath(loaded.path.parent)  # noqa: PTH100  (symbolic links stay as the user wrote them)
    reasons: dict[tuple[str, ...], str | None] = {}
    for point, overrides in zip(grid.points, grid.matched, strict=True):
        model, precision, parallel, batch, pair, toolchain, gpu, *_ = point
        layout, (isl, osl) = layouts[parallel], lengths[pair]
        parts = [known[point[each]] for each, known in zip(positions, segments, strict=True)]
        cell = Cell(
            id=CellId("/".join(parts)),
            model=model,
            toolchain=toolchain,
            precision=precision,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            max_batch_size=int(batch),
            isl=isl,
            osl=osl,
            recipe=recipes[model],
            settings=settings.of(point, overrides),
            base_dir=base_dir,
            gpu=gpu or None,
        )
        if by_machine is not None:
            alike = (model, precision, parallel, gpu, id(cell.settings))
            if alike not in others:
                others[alike] = by_machine(cell)
            toolchain = others[alike] or toolchain
        asked = (model, precision, parallel, pair, toolchain)
        if asked not in reasons:
            reasons[asked] = infeasible(
                recipes[model], toolchain=toolchain, precision=precision, parallel=layout, isl=isl, osl=osl
            )
        if toolchain != cell.toolchain:
            if chosen in positions:
                parts[positions.index(chosen)] = toolchain
            cell = replace(cell, id=CellId("/".join(parts)), toolchain=toolchain)
        yield cell if reasons[asked] is None else replace(cell, reason=reasons[asked])


class _SettingsByCell:
    """Settings of a cell: defaults, the matrix's, its overrides in order, its axes' values, the command line's.

    Made once for each combination that occurs, and a section that nothing changes is the same object everywhere.
    """

    def __init__(self, loaded: LoadedMatrix, axes: Sequence[_Axis]) -> None:
        self.loaded = loaded
        self.base = _merged({**loaded.defaults}, loaded.written.get("settings", {}))
        self.overrides = [override["settings"] for override in loaded.written.get("override", ())]
        self.last = loaded.command_line
        self.varying = [(index, axis.name) for index, axis in enumerate(axes) if axis.name.startswith(SETTINGS_PREFIX)]
        self.made: dict[tuple[object, ...], SettingsDict] = {}

    def of(self, point: Point, matched: tuple[int, ...]) -> SettingsDict:
        key = (matched, tuple(point[position] for position, _ in self.varying))
        if key not in self.made:
            layers = [self.overrides[index] for index in matched]
            layers += [nested(name, json.loads(point[position])) for position, name in self.varying]
            settings = self.base
            for layer in (*layers, self.last):
                settings = _merged(settings, layer)
            self._check_retry(settings)
            self._check_perf(settings, matched)
            self.made[key] = cast("SettingsDict", settings)
        return self.made[key]

    def _check_retry(self, settings: Mapping[str, Any]) -> None:
        """Raise MatrixError where a retry would halve what has no value."""
        name = "max_tokens_in_paged_kv_cache"
        if settings["retry"]["oom"][name] == "halve" and settings["repository"][name] is None:
            at = ("settings", "retry", "oom", name)
            why = f"there is nothing to halve: settings.repository.{name} is not set; set it, or list values to try"
            given = "retry" in self.last
            raise MatrixError(
                (Fault("--set", None, ".".join(at), why) if given else self.loaded.document.fault(at, why),)
            )

    def _check_perf(self, settings: Mapping[str, Any], matched: tuple[int, ...]) -> None:
        """Raise MatrixError where settings of perf do not fit together, which only all layers together can tell."""
        from trtllm_pipeline.tensorrt import conflicts

        why = next(conflicts(SimpleNamespace(**settings["perf"])), None)
        if why is None:
            return
        if "perf" in self.last:
            raise MatrixError((Fault("--set", None, "settings.perf", why),))
        places: list[KeyPath] = [("axes", name) for _, name in self.varying if name.startswith(_PERF)]
        places += [
            ("override", index, "settings", "perf") for index in reversed(matched) if "perf" in self.overrides[index]
        ]
        raise MatrixError((self.loaded.document.fault((*places, ("settings", "perf"))[0], why),))


def _merged(below: dict[str, Json], above: Mapping[str, Json]) -> dict[str, Json]:
    """`below` with what `above` says; mappings are merged, anything else is replaced. Shares what does not change."""
    merged = dict(below)
    for key, value in above.items():
        known = below.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
