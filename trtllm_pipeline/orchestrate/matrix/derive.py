"""Derives pydantic models from parameter classes: settings with the types, limits and help texts of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, is_dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, create_model
from pydantic import Field as Key

from trtllm_pipeline.tensorrt import params, repository_settings

M = TypeVar("M", bound=BaseModel)
STRICT: Final = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""Unknown keys, conversions and changes are errors."""
T = TypeVar("T")


def _unique(values: tuple[T, ...]) -> tuple[T, ...]:
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise ValueError(f"{repeated[0]!r} is given twice")
    return values


UNIQUE: Final = AfterValidator(_unique)
_MOST: Final = 2**40
"""Limit of all integers."""


def derived(cls: type, *, leave: tuple[str, ...] = ()) -> Callable[[type[M]], type[M]]:
    """Add the parameters of `cls` to a model, except those in `leave` and those that the model defines."""

    def add(model: type[M]) -> type[M]:
        but = {*leave, *model.__annotations__}
        return create_model(
            model.__name__,
            __base__=model,
            __doc__=model.__doc__,
            __module__=model.__module__,
            **{each.name: key(each) for each in params.table(cls) if each.name not in but},
        )

    return add


def with_sections(sections: Mapping[str, type], base: type[BaseModel]) -> Callable[[type[M]], type[M]]:
    """Add a field to a model for each class of parameters. Its value is a model of the class, derived from `base`."""

    def section(name: str, cls: type) -> type[BaseModel]:
        keys = {each.name: key(each) for each in params.table(cls)}
        title = name.title().replace("_", "")
        return create_model(title, __base__=base, __doc__=cls.__doc__, __module__=base.__module__, **keys)

    def add(model: type[M]) -> type[M]:
        models = {name: section(name, cls) for name, cls in sections.items()}
        fields: Any = {name: (each, each()) for name, each in models.items()}
        return create_model(
            model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **fields
        )

    return add


def model_of(cls: Any) -> type[BaseModel]:
    """A model with the fields of `cls`."""
    return create_model(cls.__name__, __config__=STRICT, **{each.name: key(each) for each in params.table(cls)})


def key(field: params.ParamField) -> Any:
    """A parameter as a field of a model."""
    default = ... if field.default is MISSING else field.default
    if is_dataclass(default):
        default = None
    return _type(field), Key(default, description=description(field))


def description(field: params.ParamField) -> str:
    """The description of a field, as sentences."""
    about = field.about
    text = about.help[:1].upper() + about.help[1:]
    if field.optional and about.null:
        text += f". Default: {about.null}"
    text += "."
    if isinstance(about, repository_settings.Setting):
        text += f" From release {about.since} on." if about.since else ""
        text += f" Up to release {about.until}." if about.until else ""
    return text


def _type(field: params.ParamField) -> Any:
    kind, about = field.type, field.about
    item: Any = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if item in {int, float}:
        most = about.le if about.le is not None else _MOST if item is int else None
        item = Annotated[item, Key(ge=about.ge, gt=about.gt, le=most)]
    if item is str and about.choices:
        item = Literal[about.choices]
    elif item is str:
        item = Annotated[str, Key(min_length=1)]
    elif is_dataclass(item):
        item = model_of(kind)
    if get_origin(kind) is dict and get_args(kind)[1] is float:
        item = dict.__class_getitem__((get_args(kind)[0], Annotated[float, Key(gt=0)]))
    if get_origin(kind) is tuple:
        item = Annotated[tuple.__class_getitem__((item, ...)), UNIQUE]
        item = Annotated[item, Key(min_length=1)] if field.optional and not about.empty else item
    return item | None if field.optional else item
