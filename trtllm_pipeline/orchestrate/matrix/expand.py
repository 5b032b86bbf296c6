"""Expands a loaded matrix to cells and selects cells: product of the axes without `exclude`, plus `add`, with `override`.

A cell's id consists of its values only, so other cells never change it: `qwen2-7b/fp8/tp4pp1/bs8/isl2048-osl1024`, then
the toolchain and the type of GPU if these are axes, then `key=value` for each axis over a setting. Cells that cannot
work are kept with their reason.
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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from trtllm_pipeline.base import (
    ALONE,
    Cell,
    CellId,
    Exclusive,
    Fault,
    Json,
    MatrixError,
    Parallelism,
    UsageError,
    assume,
    in_order,
    parse_parallel,
)
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.orchestrate.matrix.document import (
    SETTINGS_PREFIX,
    KeyPath,
    canonical_lengths,
    canonical_parallel,
    nearest,
    nested,
    parse_lengths,
)

if TYPE_CHECKING:
    from trtllm_pipeline.orchestrate.matrix.validate import LoadedMatrix

MAX_CELLS: Final = 100_000
ENGINES: Final = "tensorrt_llm"
"""The toolchain that builds engines."""
OF_TENSORRT_LLM: Final = frozenset({ENGINES, "tensorrt_llm_pytorch"})
"""Toolchains that belong to a TensorRT-LLM release."""
_ANY_GPU: Final = ""
"""The type of GPU if the matrix has no such axis."""
EMBEDDED: Final = "embedded"
"""The toolchain that uses no GPU."""

Feasibility = Callable[[Cell], "str | None"]
Point = tuple[str, ...]
"""A cell as texts, one per axis. Settings are JSON, other values have their canonical spelling."""
SettingsDict = Mapping[str, Mapping[str, Json]]

_SPELL: Final[Mapping[str, Callable[[str], str]]] = {"parallel": canonical_parallel, "lengths": canonical_lengths}


@dataclass(frozen=True, slots=True)
class _Axis:
    name: str
    values: tuple[str, ...]
    """Values in the product."""
    universe: frozenset[str]
    """All values, including those of added cells."""
    segments: Mapping[str, str]
    """Value -> its segment in ids."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A `where` resolved to sets of values, by position of the axis."""

    allowed: tuple[tuple[int, frozenset[str]], ...]
    here: bool = True
    """The rule applies to the machine's TensorRT-LLM release."""
    of_a_release: bool = False

    def matches(self, point: Point) -> bool:
        return all(point[position] in values for position, values in self.allowed)


def expand(
    loaded: LoadedMatrix,
    *,
    default_toolchain: str,
    instead: Callable[[Cell], str | None] | None = None,
    release: str | None = None,
) -> tuple[Cell, ...]:
    """The cells of a matrix: the product in the order of the axes, then the added cells.

    `default_toolchain` is the toolchain for `auto` or without a toolchain axis. `release` is the machine's
    TensorRT-LLM. If the axis has no other toolchain, `instead` gives one for cells whose model, precision or
    parallelism the default one lacks. Recipes and equal settings are shared between cells. Raises MatrixError with all
    faults: rules that match nothing, duplicate values and cells, too many cells or none.
    """
    return tuple(_cells(_Grid(loaded, default_toolchain, release), instead))


def judged(cell: Cell, feasibility: Feasibility) -> Cell:
    """`cell` with the reason from `feasibility` why it cannot work, or None. A reason from its recipe is kept."""
    reason = None if cell.reason is not None else feasibility(cell)
    return cell if reason is None else replace(cell, reason=reason)


def with_control(
    cells: Sequence[Cell], gpus: Callable[[Cell], int], feasibility: Feasibility = lambda _cell: None
) -> tuple[Cell, ...]:
    """`cells`, and a control: the first cell that is measured alongside others, again, alone on the machine.

    The control stays on the same number of CPUs. The difference between the two measurements is the influence of the
    others. There is no control if the `gpus` do not suffice for measurements side by side. Infeasible cells do not
    count.
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
    """The matrix as data with the command line's changes. A file with this data has the same cells on any machine.

    Local directories have the names of their recipes. Rules that no longer match anything, because the command line
    changed an axis, are left out. Raises MatrixError like `expand`.
    """
    grid = _Grid(loaded, default_toolchain, release)
    data: dict[str, Any] = deepcopy({**loaded.written})
    data["toolchain"] = default_toolchain
    data.pop("remote", None)  # it affects how results are obtained, not which

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
    """Cells that match any pattern and no `!pattern`. Without a plain pattern, all cells that match no `!pattern`.

    A pattern is matched with an id segment by segment, `*`, `?` and `[...]` as in a shell. It may end early and then
    matches everything below: `qwen2*/fp8` and `qwen2*/fp8/*` are the same. A pattern without a wildcard that matches
    nothing this way may be a part of ids, or some of their segments in order, as in tables: `fp8/bs4`. Raises
    UsageError with a suggestion for a pattern that matches nothing, and if no cell is left.
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
            # A short name of a cell does not mean its control.
            hits = {index for index in hits if not cells[index].id.startswith(ALONE)} or hits
        if not hits:
            message = f"{pattern!r} matches none of the {len(cells)} cells"
            raise UsageError(message, hint=_nearest_segments(split, parts))
        (unwanted if pattern.startswith("!") else wanted).update(hits)
    if all(pattern.startswith("!") for pattern in patterns):
        wanted = set(range(len(cells)))
    if not wanted - unwanted:
        raise UsageError(f"--cells {' '.join(patterns)}: every selected cell is also left out")
    return tuple(cells[index] for index in sorted(wanted - unwanted))


def _fits(segments: Sequence[str], parts: Sequence[str]) -> bool:
    # A last `*` matches everything below, even if the id ends before it.
    if len(parts) > len(segments) + (parts[-1:] == ["*"]):
        return False
    return all(map(fnmatch.fnmatchcase, segments, parts))


def _nearest_segments(split: Sequence[Sequence[str]], parts: Sequence[str]) -> str:
    """The segments of ids at the place where a pattern stops matching, nearest first.

    A pattern that starts with a later segment, as in tables, is matched from there.
    """
    if not any(_fits(segments, parts[:1]) for segments in split):
        for skipped in range(1, max(map(len, split), default=0)):
            tails = [segments[skipped:] for segments in split if _fits(segments[skipped:], parts[:1])]
            if tails and any(_fits(segments, parts) for segments in tails):
                return f"instead of {'/'.join(parts)!r}, use {'/'.join(['*'] * skipped + list(parts))!r}"
            if tails:
                later = sorted({each for segments in tails for each in segments[1:]})
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


def infeasible(
    recipe: Mapping[str, Any], *, toolchain: str, precision: str, parallel: Parallelism, isl: int, osl: int
) -> str | None:
    """The reason in the recipe why this engine of the model cannot exist, or None."""
    tp, pp, ep, dp = parallel
    attention_tp = tp // dp
    name, precisions, quantization = recipe["name"], recipe["precisions"], recipe["quantization"]
    elsewhere = ""
    if isinstance(precisions, dict):
        others = [other for other, listed in precisions.items() if precision in listed]
        last = f", which needs a release up to {assume.LAST_WITH_ENGINES}" if ENGINES in others else ""
        elsewhere = f"; it lists {precision} for {', '.join(others)}{last}" if others else ""
        precisions = precisions.get(toolchain)
    heads, kv_heads, layers = (
        recipe[number] for number in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    experts, positions = recipe["num_experts"], recipe["max_position_embeddings"]
    if quantization is not None and precision != AS_IS:
        return f"the weights of {name} are already quantized ({quantization}): use precision {AS_IS}, or another model"
    if precisions == []:
        return f"{toolchain} does not have {name}: its recipe lists no precision for it"
    if precisions is not None and precision not in precisions:
        return f"the recipe {name} lists only {', '.join(precisions)} for {toolchain}, not {precision}{elsewhere}"
    if dp > 1 and experts is None:
        return f"dp{dp}: {name} is not a mixture of experts. Data parallel attention is for those; use tp{tp}"
    groups = f" in dp{dp}" if dp > 1 else ""
    if heads % attention_tp:
        return f"{heads} attention heads cannot be divided over tp{tp}{groups}"
    if kv_heads % attention_tp and attention_tp % kv_heads:
        return f"{kv_heads} key/value heads can be neither divided over nor repeated to tp{tp}{groups}"
    if layers < pp:
        return f"pp{pp}: {name} has {layers} layers, and each stage needs one"
    if ep > 1 and experts is None:
        return f"ep{ep}: {name} is not a mixture of experts, its recipe has no num_experts"
    if experts is not None and experts % ep:
        return f"{experts} experts cannot be distributed evenly over ep{ep}"
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
            self._fault(("axes",), f"the axes have {count} cells, the limit is {MAX_CELLS}")
            self._raise_faults()
        self.product: list[Point] = list(itertools.product(*(axis.values for axis in self.axes)))
        self.left_out: set[Point] = set()
        """Points without cells for the machine's release."""
        self.points = self._points()
        self._raise_faults()
        here = [(index, rule) for index, rule in enumerate(self.overrides) if rule.here]
        self.matched: list[tuple[int, ...]] = [
            tuple([index for index, rule in here if rule.matches(point)]) for point in self.points
        ]
        """The overrides that apply to each point."""
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
        """All axes in the order of an id's segments. The toolchain is an axis even if the matrix has none."""
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
            # Two values may have the same segment: auto and the default toolchain, or texts with special characters.
            first: dict[str, int] = {}
            for index, value in enumerate((*own, *(value for value in universe if value not in own))):
                if first.setdefault(segments[value], index) != index:
                    at: KeyPath = ("axes", name, index) if index < len(own) else ("axes", name)
                    self._fault(at, f"two values have the same name in cell ids: {segments[value]}")
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
        """One rule of `exclude` or `override`. Reports every value in it that no cell has."""
        written = {
            name: value for name, value in where.items() if value is not None or name.startswith(SETTINGS_PREFIX)
        }
        if not written and at[0] == "exclude":
            self._fault(at, "names no axis, so it would leave out every cell")
        allowed = []
        for position, axis in enumerate(self.axes):
            if axis.name in written:
                matching: set[str] = set()
                for index, value in enumerate(_listed(written[axis.name])):
                    hits = self.matching(axis, value)
                    if not hits:
                        place = (*at, axis.name)
                        if isinstance(self.loaded.document.get(place), list):
                            place = (*place, index)
                        near = nearest(str(value), axis.universe)
                        self._fault_of_rule(place, f"{value!r} matches no value of {axis.name}{near}")
                    matching |= hits
                allowed.append((position, frozenset(matching)))
        if "release" not in written:
            return _Rule(tuple(allowed))
        # The same matrix may be for machines with other releases, or none. A rule without cells is not an error there.
        position = self.position("toolchain")
        allowed.append((position, self.axes[position].universe & OF_TENSORRT_LLM))
        return _Rule(tuple(allowed), here=_is_release(self.release, str(written["release"])), of_a_release=True)

    def position(self, axis: str) -> int:
        return [each.name for each in self.axes].index(axis)

    def matching(self, axis: _Axis, value: object) -> set[str]:
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
                self._fault_of_rule(("add", index), "is already a cell of the matrix")
            points[point] = None
        if not points:
            self._fault(("exclude",), "leaves no cell")
        return list(points)


def _is_release(release: str | None, specifiers: str) -> bool:
    """True if the release satisfies the specifiers. A release candidate counts as its final release, unless the
    specifiers name a candidate. By PEP 440, 1.3.0rc3 is neither "<1.3" nor ">=1.3", and neither settings would apply.
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
    """The segment of an id for a value of an axis, whose values are `names`."""
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
    """A setting's value in an id: easy to type, without special characters of shells or patterns."""
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
            dp=layout.dp,
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
        case = (model, precision, parallel, pair, toolchain)
        if case not in reasons:
            reasons[case] = infeasible(
                recipes[model], toolchain=toolchain, precision=precision, parallel=layout, isl=isl, osl=osl
            )
        if toolchain != cell.toolchain:
            if chosen in positions:
                parts[positions.index(chosen)] = toolchain
            cell = replace(cell, id=CellId("/".join(parts)), toolchain=toolchain)
        yield cell if reasons[case] is None else replace(cell, reason=reasons[case])


class _SettingsByCell:
    """Settings of a cell: defaults, the matrix's, its overrides in order, its axes' values, the command line's.

    Computed once for each combination. Cells share the objects of unchanged sections.
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
            self._check_conflicts("perf", settings, matched)
            self._check_conflicts("accuracy", settings, matched)
            self.made[key] = cast("SettingsDict", settings)
        return self.made[key]

    def _check_retry(self, settings: Mapping[str, Any]) -> None:
        """Raise MatrixError if a retry would halve a setting without a value."""
        name = "max_tokens_in_paged_kv_cache"
        if settings["retry"]["oom"][name] == "halve" and settings["repository"][name] is None:
            at = ("settings", "retry", "oom", name)
            why = f"cannot be halved: settings.repository.{name} is not set. Set it, or list values to try"
            given = "retry" in self.last
            raise MatrixError(
                (Fault("--set", None, ".".join(at), why) if given else self.loaded.document.fault(at, why),)
            )

    def _check_conflicts(self, section: str, settings: Mapping[str, Any], matched: tuple[int, ...]) -> None:
        """Raise MatrixError for settings of a section that contradict each other after all layers are merged."""
        from trtllm_pipeline.tensorrt import params

        conflicts = {"perf": params.conflicts, "accuracy": params.task_conflicts}[section]
        why = next(conflicts(SimpleNamespace(**settings[section])), None)
        if why is None:
            return
        if section in self.last:
            raise MatrixError((Fault("--set", None, f"settings.{section}", why),))
        varied = f"{SETTINGS_PREFIX}{section}."
        places: list[KeyPath] = [("axes", name) for _, name in self.varying if name.startswith(varied)]
        places += [
            ("override", index, "settings", section) for index in reversed(matched) if section in self.overrides[index]
        ]
        raise MatrixError((self.loaded.document.fault((*places, ("settings", section))[0], why),))


def _merged(below: dict[str, Json], above: Mapping[str, Json]) -> dict[str, Json]:
    """`below` updated by `above`. Mappings are merged, other values are replaced. Unchanged parts are shared."""
    merged = dict(below)
    for key, value in above.items():
        known = below.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
