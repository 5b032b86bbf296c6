"""`dataclass`, as the standard library's, at less than a third of what that takes to make a class: a third of a small command was that.

The standard library compiles up to nine methods for a class. Here it compiles none, and of each class only `__init__` is: the
other methods are the same for all, and find the fields of theirs. A leaf.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, FrozenInstanceError, fields
from dataclasses import dataclass as _of_library
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, Final

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from dataclasses import Field, dataclass
else:

    def dataclass(cls=None, /, *, eq=True, frozen=False, kw_only=False, slots=False):
        """As `dataclasses.dataclass`, of which it takes the options that are used here."""
        if cls is None:
            return lambda each: dataclass(each, eq=eq, frozen=frozen, kw_only=kw_only, slots=slots)
        if any(base.__dataclass_params__.frozen for base in cls.__mro__[1:] if hasattr(base, "__dataclass_params__")):
            return _of_library(eq=eq, frozen=frozen, kw_only=kw_only, slots=slots)(cls)  # as its base
        own = dict(vars(cls))
        cls.__doc__ = cls.__doc__ or cls.__name__  # else the library writes one, for which it imports what reads Python
        made = _of_library(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)(cls)
        _complete(made, own, eq=eq, frozen=frozen, slots=slots)
        return made


_COMPARED: Final = "_compared"
"""Takes out of an object what decides whether it is equal to another."""


def _complete(made: Any, own: Mapping[str, object], *, eq: bool, frozen: bool, slots: bool) -> None:
    """Give a class, whose fields are known, the methods that are not its `own`."""
    known = fields(made)
    methods: dict[str, object] = {"__init__": _init(made, known, frozen=frozen), "__repr__": _repr}
    if eq:
        methods |= {"__eq__": _eq, _COMPARED: staticmethod(_values([each.name for each in known if each.compare]))}
    if frozen:
        methods |= {"__setattr__": _assign, "__delattr__": _delete}
    if frozen and slots:
        methods |= {"__getstate__": _state, "__setstate__": _restore}
    for name, method in methods.items():
        if name not in own:
            setattr(made, name, method)
    # Python itself forbids to hash what says by itself when it is equal.
    if eq and ("__hash__" not in own or (own["__hash__"] is None and "__eq__" in own)):
        made.__hash__ = _hash if frozen else None


def _init(cls: type, all_fields: Sequence[Field[Any]], *, frozen: bool) -> Callable[..., None]:
    """The `__init__` of a class. It is compiled, since large plans make many objects."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    by_place, by_name, lines = ["self"], ["*"], []
    for each in all_fields:
        name, value, default = each.name, each.name, ""
        if each.default is not MISSING:
            known[f"_default_{name}"] = each.default
            default = f"=_default_{name}"
        if each.default_factory is not MISSING:
            known[f"_make_{name}"] = each.default_factory
            default, value = "=_missing", f"_make_{name}() if {name} is _missing else {name}"
        if each.init:
            (by_name if each.kw_only else by_place).append(f"{name}{default}")
        elif default:
            value = f"_make_{name}()" if each.default is MISSING else f"_default_{name}"
        else:
            continue
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    lines += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    signature = ", ".join(by_place + (by_name if len(by_name) > 1 else []))
    body = "\n  ".join(lines) or "pass"
    found: dict[str, Any] = {}
    text = f"def make({', '.join(known)}):\n def __init__({signature}):\n  {body}\n return __init__"
    exec(text, vars(sys.modules[cls.__module__]), found)  # noqa: S102 - our own words
    init: Callable[..., None] = found["make"](**known)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {each.name: each.type for each in all_fields if each.init} | {"return": None}
    return init


def _values(names: Sequence[str]) -> Callable[[Any], tuple[object, ...]]:
    """Takes these values out of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda each: tuple([getattr(each, name) for name in names])


@recursive_repr("...")
def _repr(self: Any) -> str:
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: object) -> bool:
    compared: Callable[[object], object] = self._compared
    return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _refuse(self: Any, name: str, what: str) -> None:
    """Raise for a field, or anything of a class that has nothing but fields."""
    if "__dataclass_fields__" in vars(type(self)) or name in [each.name for each in fields(self)]:
        raise FrozenInstanceError(f"cannot {what} field {name!r}")


def _assign(self: Any, name: str, value: object) -> None:
    _refuse(self, name, "assign to")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    _refuse(self, name, "delete")
    object.__delattr__(self, name)


def _state(self: Any) -> list[object]:
    """For copies: `__setattr__` would refuse them."""
    return [getattr(self, each.name) for each in fields(self)]


def _restore(self: Any, state: Iterable[object]) -> None:
    for each, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
