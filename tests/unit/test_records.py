"""Our `dataclass` makes what the standard library's makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar

import pytest

from trtllm_pipeline import records

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"slots": True},
    {"slots": True, "eq": False},
    {"kw_only": True},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "slots": True, "kw_only": True},
)


class Plain:
    """With a bit of everything."""

    number: int
    text: str = "t"
    items: list[int] = field(default_factory=list)
    unseen: float = field(default=0.5, repr=False)
    aside: int = field(default=7, compare=False)
    later: int = field(init=False, default=3)
    made: dict[str, int] = field(init=False, default_factory=dict)
    COMMON: ClassVar[int] = 9

    def double(self) -> int:
        return 2 * self.number


class Unset:
    """With what is set by hand."""

    number: int
    never: int = field(init=False, repr=False, compare=False)


class After:
    """With something to do after it was made."""

    number: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.number + 1)


class Own:  # noqa: PLW1641 - as there is
    """With methods of its own."""

    number: int

    def __repr__(self) -> str:
        return "own"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)


class Hashed:
    """With a hash of its own."""

    number: int

    def __hash__(self) -> int:
        return 1


class Nothing:
    """Without fields."""


def made_by(make: Callable[..., Any], cls: type, options: dict[str, Any]) -> Any:
    """The class, as one of the two makes it."""
    own = {name: value for name, value in vars(cls).items() if name not in {"__dict__", "__weakref__"}}
    return make(**options)(type(cls.__name__, (), own))


def outcome(do: Callable[[], object]) -> str:
    """What comes of it, errors too."""
    try:
        return repr(do())
    except (TypeError, AttributeError) as error:
        return repr(error)


def behaviour(made: Any, names: list[str]) -> list[object]:
    """Of a class with these fields."""
    parameters = inspect.signature(made).parameters.values()
    seen: list[object] = [
        made.__doc__,
        made.__match_args__,
        made.__hash__ is None,
        getattr(made, "__slots__", None),
        [(each.name, each.kind, repr(each.default)) for each in parameters if each.name != "items"],
        made.__init__.__annotations__,
        [each.name for each in dataclasses.fields(made)],
    ]
    given: list[dict[str, Any]] = [
        {},
        {"number": 1},
        {"number": 2, "text": "u"},
        {"number": 1, "items": [1]},
        {"number": 1, "aside": 8},
    ]
    seen += [outcome(lambda: made(**values)) for values in [*given, {"new": 1}]]  # noqa: B023
    seen += [outcome(lambda: made(1, "t")), outcome(lambda: made(1).items is made(1).items)]
    if names:
        one, same, other = made(number=1), made(number=1), made(number=2)
        seen += [one == same, one == other, one == 1, outcome(lambda: hash(one) == hash(same))]
        seen += [outcome(lambda: copy.copy(one)), outcome(lambda: copy.deepcopy(one) == one)]
        seen += [outcome(lambda: dataclasses.asdict(one)), outcome(lambda: dataclasses.replace(one, number=4))]
        seen += [
            outcome(lambda: setattr(one, "number", 5)),
            outcome(lambda: one),
            outcome(lambda: delattr(one, "number")),
        ]
    return seen


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("cls", [Plain, Unset, After, Own, Hashed, Nothing])
def test_classes_are_as_the_standard_library_makes_them(cls: type, options: dict[str, Any]) -> None:
    theirs, ours = (made_by(make, cls, options) for make in (dataclasses.dataclass, records.dataclass))
    names = [each.name for each in dataclasses.fields(theirs)]
    assert behaviour(ours, names) == behaviour(theirs, names)


@records.dataclass(frozen=True, slots=True)
class Kept:
    """That can be pickled by its name."""

    number: float
    inner: Kept | None = None


def test_frozen_ones_with_slots_are_copied_pickled_and_hashed() -> None:
    one = Kept(1, Kept(2))
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert len({one, Kept(1, Kept(2)), Kept(1)}) == 2
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'number'"):
        one.number = 3  # type: ignore[misc]
    nothing = float("nan")
    assert Kept(nothing) == Kept(nothing), "the same object, as in a tuple"


def test_what_contains_itself_is_shown() -> None:
    @records.dataclass
    class Loop:
        """That may be its own."""

        next: Any = None

    loop = Loop()
    loop.next = loop
    assert repr(loop).endswith("Loop(next=...)")


@pytest.mark.parametrize("make", [dataclasses.dataclass, records.dataclass])
def test_what_inherits_has_all_fields_whoever_made_its_base(make: Callable[..., Any]) -> None:
    base = make(frozen=True)(type("Base", (), {"__annotations__": {"first": "int"}}))
    below = type("Below", (base,), {"__annotations__": {"second": "int"}, "second": 2})
    made: Any = records.dataclass(frozen=True)(below)
    assert repr(made(1)) == "Below(first=1, second=2)"
    assert made(1) != made(1, 3)
    assert made(1) != base(1)
    with pytest.raises(FrozenInstanceError):
        made(1).first = 2


def test_who_inherits_without_fields_may_add_what_it_likes() -> None:
    class Below(Kept):
        pass

    below = Below(1)
    below.more = 2  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        below.number = 2  # type: ignore[misc]
