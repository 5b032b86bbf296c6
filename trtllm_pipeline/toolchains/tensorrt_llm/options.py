"""Which options TensorRT-LLM's programs have in a release: the one table, and what is wrong with options of a user.

The table is `data/tensorrt_llm/options.json`; it says itself how it is to be read. Where a program is installed, what
its `--help` prints decides instead: `parse_help`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Final, Literal

from trtllm_pipeline.domain import Json
from trtllm_pipeline.toolchains.tensorrt_llm.releases import at_least

Tool = str
Scalar = bool | int | float | str
Kind = Literal["switch", "on_off", "int", "float", "str"]
_ON_OFF: Final = ("enable", "disable")


@dataclass(frozen=True, slots=True)
class Form:
    """What an option is from one release on."""

    since: str
    kind: Kind
    choices: tuple[Scalar, ...] | None
    default: Scalar | None
    """None where the program has none, or where it depends on others."""
    nargs: str | None
    """As argparse has it: + several, ? an optional value, a number."""
    required: bool
    aliases: tuple[str, ...]
    deprecated: str | None
    """What replaces it; None while nothing does."""

    @property
    def takes_value(self) -> bool:
        """Whether a value follows it."""
        return self.kind != "switch"


@dataclass(frozen=True, slots=True)
class Gone:
    """From this release on there is no such option."""

    since: str
    instead: str
    """What replaces it; empty where nothing is known to."""


@dataclass(frozen=True, slots=True)
class Program:
    """One program over all releases."""

    first: str
    """Its first release."""
    ours: Mapping[str, str]
    """Options the pipeline sets, and what decides them."""
    options: Mapping[str, tuple[Form | Gone, ...]]
    """Every option ever, each with its forms in order of releases."""

    def at(self, name: str, release: str) -> Form | None:
        """The option `name` (`--with-dashes`, no alias) in `release`; None where it does not exist."""
        found: Form | None = None
        for form in self.options.get(name, ()):
            if not at_least(release, form.since):
                break
            found = form if isinstance(form, Form) else None
        return found

    def canonical(self, name: str) -> str | None:
        """The table's spelling for `name`, which may be an alias of any release; None for unknown names."""
        if name in self.options:
            return name
        for option, forms in self.options.items():
            if any(isinstance(form, Form) and name in form.aliases for form in forms):
                return option
        return None


@lru_cache(maxsize=1)
def load() -> Mapping[Tool, Program]:
    """The whole table: trtllm-build, quantize.py, convert_checkpoint.py:FAMILY, run.py, trtllm-serve (its `serve`)."""
    text = resources.files("trtllm_pipeline").joinpath("data/tensorrt_llm/options.json").read_text(encoding="utf-8")
    document = json.loads(text)
    named: Mapping[str, list[Scalar]] = document["choices"]
    return {
        tool: Program(
            first=entry["first"],
            ours=entry["ours"],
            options={name: tuple(_forms(forms, named)) for name, forms in entry["options"].items()},
        )
        for tool, entry in document["tools"].items()
    }


def _forms(rows: Iterable[Mapping[str, Json]], named: Mapping[str, list[Scalar]]) -> Iterable[Form | Gone]:
    fields: dict[str, Json] = {}
    for row in rows:
        if "gone" in row:
            fields = {}
            yield Gone(str(row["since"]), str(row["gone"]))
            continue
        fields = {**fields, **row}
        yield _form(fields, named)


def _form(fields: Mapping[str, Json], named: Mapping[str, list[Scalar]]) -> Form:
    choices, kind = fields.get("choices"), fields["type"]
    values = named[choices[1:]] if isinstance(choices, str) else choices
    aliases, default, nargs = fields.get("aliases"), fields.get("default"), fields.get("nargs")
    deprecated = fields.get("deprecated")
    assert kind in {"switch", "on_off", "int", "float", "str"}
    return Form(
        since=str(fields["since"]),
        kind=kind,  # type: ignore[arg-type]  # asserted above
        choices=_ON_OFF if kind == "on_off" else tuple(values) if isinstance(values, list) else None,  # type: ignore[arg-type]
        default=default if isinstance(default, bool | int | float | str) else None,
        nargs=None if nargs is None else str(nargs),
        required=fields.get("required") is True,
        aliases=tuple(str(alias) for alias in aliases) if isinstance(aliases, list) else (),
        deprecated=None if deprecated is None else str(deprecated),
    )


def known(tool: Tool, release: str) -> Mapping[str, Form]:
    """Options of `tool` in `release` by their spelling in the table, aliases left out."""
    program = load()[tool]
    return {name: form for name in program.options if (form := program.at(name, release)) is not None}


def exists(tool: Tool, release: str, name: str) -> bool:
    """Whether `tool` has the option `name` (`--with-dashes`) in `release`."""
    return load()[tool].at(name, release) is not None


def has(tool: Tool, release: str, key: str) -> bool:
    """Whether `tool` takes a user's option `key` in `release`, however it is spelled."""
    name = spelling(key)
    canonical = load()[tool].canonical(name)
    form = None if canonical is None else load()[tool].at(canonical, release)
    return form is not None and name in (canonical, *form.aliases)


def accepts(tool: Tool, release: str, name: str, value: Scalar) -> bool:
    """Whether `tool` has the option in `release` and takes `value` for it."""
    form = load()[tool].at(name, release)
    return form is not None and form.takes_value and (form.choices is None or value in form.choices)


def render(tool: Tool, release: str, options: Mapping[str, Json]) -> list[str]:
    """A user's options as arguments. They are as in a matrix (no dashes needed, true and false for on and off) and have
    passed `check_extra`.
    """
    arguments: list[str] = []
    for key, value in options.items():
        name = spelling(key)
        form = load()[tool].at(load()[tool].canonical(name) or name, release)
        if isinstance(value, bool) and (form is None or form.kind in {"switch", "on_off"}):
            if form is not None and form.kind == "on_off":
                arguments += [name, _ON_OFF[0] if value else _ON_OFF[1]]
            elif value:
                arguments.append(name)
        else:
            words = value if isinstance(value, list) else str(value).split() if form and form.nargs else [value]
            arguments += [name, *(str(word) for word in words)]
    return arguments


def switched(options: Mapping[str, Json], name: str) -> bool | None:
    """What a user's options say of a switch that takes enable or disable; None where they say nothing of it."""
    value = options.get(name, options.get(f"--{name}"))
    return (
        {"enable": True, True: True, "disable": False, False: False}.get(value)
        if isinstance(value, str | bool)
        else None
    )


def spelling(key: str) -> str:
    """`--name` for `name`; what has dashes keeps them."""
    return key if key.startswith("-") else f"--{key}"


# ---------------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class Installed:
    """An option as an installed program's `--help` shows it."""

    takes_value: bool
    choices: tuple[str, ...] | None


def check_extra(
    tool: Tool, release: str, options: Mapping[str, Json], installed_help: str | None = None
) -> tuple[str, ...]:
    """What is wrong with a user's options for `tool`, one sentence each; empty when they can be passed.

    `installed_help` is what the installed program prints for `--help`; with it, that says which options and values
    there are, and the table only explains.
    """
    installed = None if installed_help is None else parse_help(installed_help)
    return tuple(
        problem
        for key, value in options.items()
        if (problem := _problem(tool, release, key, value, installed or None)) is not None
    )


def _problem(tool: Tool, release: str, key: str, value: Json, installed: Mapping[str, Installed] | None) -> str | None:
    program, name = load()[tool], spelling(key)
    canonical = program.canonical(name) or name
    if decided := program.ours.get(canonical):
        return f"{key}: is set from {decided}"
    form = program.at(canonical, release)
    if form is not None and name != canonical and name not in form.aliases:
        form = None
    exists_here = form is not None if installed is None else name in installed
    if not exists_here:
        return f"{key}: {_absence(program, tool, release, name, installed)}"
    if installed is not None:
        shown = installed[name]
        takes_value, choices = shown.takes_value, shown.choices
    else:
        assert form is not None
        takes_value, choices = form.takes_value, None if form.choices is None else tuple(map(str, form.choices))
    return _value_problem(key, value, takes_value=takes_value, choices=choices, form=form)


def _absence(program: Program, tool: Tool, release: str, name: str, installed: Mapping[str, Installed] | None) -> str:
    text = f"{_title(tool)} {release} has no such option"
    canonical = program.canonical(name)
    if canonical is not None:
        for form in reversed(program.options[canonical]):
            if isinstance(form, Gone) and at_least(release, form.since):
                return f"{text}: gone since {form.since}" + (f"; instead: {form.instead}" if form.instead else "")
        later = [
            form.since
            for form in program.options[canonical]
            if isinstance(form, Form) and not at_least(release, form.since)
        ]
        if later:
            return f"{text}: it exists from {later[0]} on"
    names = set(known(tool, release)) if installed is None else set(installed)
    close = difflib.get_close_matches(name, names - set(program.ours), n=1, cutoff=0.6)
    return f"{text}; did you mean {close[0].lstrip('-')!r}?" if close else text


def _value_problem(
    key: str, value: Json, *, takes_value: bool, choices: tuple[str, ...] | None, form: Form | None
) -> str | None:
    if not takes_value:
        return None if isinstance(value, bool) else f"{key}: takes no value; write true or false, not {value!r}"
    if isinstance(value, bool):
        return None if form is not None and form.kind == "on_off" else f"{key}: needs a value, not {value!r}"
    words = value if isinstance(value, list) else str(value).split() if form and form.nargs == "+" else [value]
    for word in words:
        if choices is not None and str(word) not in choices:
            return f"{key}: {word!r} is not among {', '.join(choices)}"
        if form is not None and form.kind in {"int", "float"} and not _is_number(word, form.kind):
            return f"{key}: {word!r} is not {'a whole number' if form.kind == 'int' else 'a number'}"
    return None


def _is_number(value: Json, kind: str) -> bool:
    try:
        _ = int(str(value)) if kind == "int" else float(str(value))
    except ValueError:
        return False
    return True


def _title(tool: Tool) -> str:
    return tool.partition(":")[0]


# ------------------------------------------------------------------------------------------------------------- --help

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_ROW = re.compile(r"^ {1,8}(?=-)(?P<call>\S+(?: \S+)*)")
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_BRACES = re.compile(r"\{([^{}]*)\}")
_BARS = re.compile(r"\[([^\[\]\s|]+(?:\|[^\[\]\s|]+)+)\]")


def parse_help(text: str) -> Mapping[str, Installed]:
    """Options by every spelling that a program's `--help` shows, as argparse or click print it.

    An option's row is indented by at most eight columns and starts with a dash; two or more spaces part it from its
    description. Empty for text without such rows.
    """
    found: dict[str, Installed] = {}
    for line in _COLOR.sub("", text).expandtabs().splitlines():
        row = _ROW.match(line)
        if row is None:
            continue
        call = row["call"]
        if listed := _BRACES.search(call):
            choices: tuple[str, ...] | None = tuple(word.strip() for word in listed[1].split(","))
        elif listed := _BARS.search(call):
            choices = tuple(listed[1].split("|"))
        else:
            choices = None
        names = _OPTION.findall(_BARS.sub("", _BRACES.sub("", call)))
        rest = _OPTION.sub("", call).strip(" ,/;")
        found |= dict.fromkeys(names, Installed(takes_value=bool(rest), choices=choices))
    return found
