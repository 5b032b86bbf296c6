"""The options of TensorRT-LLM's programs by release: a single table, and checks of a user's options.

The table is `data/tensorrt_llm/options.json`, which describes its own format. If a program is installed, the output of
its `--help` decides instead: `parse_help`.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import Json, Machine
from trtllm_pipeline.tensorrt.trtllm.releases import at_least

Tool = str
Scalar = bool | int | float | str
Kind = Literal["switch", "on_off", "int", "float", "str"]
_ON_OFF: Final = ("enable", "disable")
_CLICK: Final = frozenset({"trtllm-serve"})
"""Programs that repeat an option for several values. argparse's accept all of them after one name."""


@dataclass(frozen=True, slots=True)
class Form:
    """An option from one release on."""

    since: str
    kind: Kind
    choices: tuple[Scalar, ...] | None
    default: Scalar | None
    """None if the program has none, or if it depends on others."""
    nargs: str | None
    """As in argparse: + several, ? an optional value, a number."""
    repeat: bool
    """True if it is repeated for each of several values."""
    required: bool
    aliases: tuple[str, ...]
    deprecated: str | None
    """Its replacement. None if it has none."""
    least: float | None = None
    """Minimum value: programs parse any number, and fail late, or create something that no server loads."""

    @property
    def takes_value(self) -> bool:
        """True if a value follows it."""
        return self.kind != "switch"


@dataclass(frozen=True, slots=True)
class Gone:
    """The option does not exist from this release on."""

    since: str
    instead: str
    """Its replacement. Empty if unknown."""


@dataclass(frozen=True, slots=True)
class Program:
    """One program over all releases."""

    first: str
    """Its first release."""
    ours: Mapping[str, str]
    """Options that the pipeline sets, and the settings that determine them."""
    options: Mapping[str, tuple[Form | Gone, ...]]
    """All options of any release, each with its forms in order of releases."""

    def at(self, name: str, release: str) -> Form | None:
        """The option `name` (`--with-dashes`, no alias) in `release`. None if it does not exist."""
        form_then: Form | None = None
        for form in self.options.get(name, ()):
            if not at_least(release, form.since):
                break
            form_then = form if isinstance(form, Form) else None
        return form_then

    def spelled(self, name: str, release: str) -> Form | None:
        """The option with the spelling `name` in `release`, its own name or an alias. None if there is none."""
        canonical = self.canonical(name)
        form = None if canonical is None else self.at(canonical, release)
        return form if form is not None and name in (canonical, *form.aliases) else None

    def canonical(self, name: str) -> str | None:
        """The table's spelling for `name`, which may be an alias in any release. None for unknown names."""
        if name in self.options:
            return name
        for option, forms in self.options.items():
            if any(isinstance(form, Form) and name in form.aliases for form in forms):
                return option
        return None


@lru_cache(maxsize=1)
def load() -> Mapping[Tool, Program]:
    """The whole table: trtllm-build, quantize.py, convert_checkpoint.py:FAMILY, run.py, trtllm-serve (its `serve`)."""
    text = (PACKAGE / "data/tensorrt_llm/options.json").read_text(encoding="utf-8")
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


def _forms(rows: Iterable[Mapping[str, Any]], named: Mapping[str, list[Scalar]]) -> Iterable[Form | Gone]:
    fields: Mapping[str, Any] = {}
    for row in rows:
        if "gone" in row:
            fields = {}
            yield Gone(row["since"], row["gone"])
            continue
        fields = {**fields, **row}
        choices, kind, default = fields.get("choices"), fields["type"], fields.get("default")
        values = named[choices[1:]] if isinstance(choices, str) else choices
        yield Form(
            since=fields["since"],
            kind=kind,
            choices=_ON_OFF if kind == "on_off" else None if values is None else tuple(values),
            default=None if isinstance(default, list) else default,
            nargs=None if fields.get("nargs") is None else str(fields["nargs"]),
            repeat=fields.get("repeat") is True,
            required=fields.get("required") is True,
            aliases=tuple(fields.get("aliases") or ()),
            deprecated=fields.get("deprecated"),
            least=fields.get("least"),
        )


def known(tool: Tool, release: str) -> Mapping[str, Form]:
    """Options of `tool` in `release` by their spelling in the table, without aliases."""
    program = load()[tool]
    return {name: form for name in program.options if (form := program.at(name, release)) is not None}


def exists(tool: Tool, release: str, name: str) -> bool:
    """True if `tool` has the option `name` (`--with-dashes`) in `release`."""
    return load()[tool].at(name, release) is not None


def has(tool: Tool, release: str, key: str) -> bool:
    """True if `tool` accepts a user's option `key` in `release`, in any spelling."""
    return load()[tool].spelled(spelling(key), release) is not None


def accepts(tool: Tool, release: str, name: str, value: Scalar) -> bool:
    """True if `tool` has the option in `release` and accepts `value` for it."""
    form = load()[tool].at(name, release)
    return form is not None and form.takes_value and (form.choices is None or value in form.choices)


def decided(tool: Tool, key: str) -> str | None:
    """The setting behind an option that the pipeline sets itself, in any spelling. None for any other."""
    program, name = load()[tool], spelling(key)
    return program.ours.get(program.canonical(name) or name)


def render(tool: Tool, release: str, options: Mapping[str, Json]) -> list[str]:
    """A user's options as arguments: as in a matrix (dashes optional, true and false), and checked by `check_extra`."""
    arguments: list[str] = []
    for key, value in options.items():
        name = spelling(key)
        form = load()[tool].at(load()[tool].canonical(name) or name, release)
        if isinstance(value, bool) and form is not None and form.kind == "on_off":
            arguments += [name, _ON_OFF[not value]]
        elif isinstance(value, bool) and (form is None or not form.takes_value):
            arguments += [name] * value
        elif isinstance(value, list) and (tool in _CLICK if form is None else form.repeat):
            arguments += [word for each in value for word in (name, str(each))]
        else:
            words = value if isinstance(value, list) else str(value).split() if form and form.nargs else [value]
            arguments += [name, *map(str, words)]
    return arguments


def switched(options: Mapping[str, Json], name: str) -> bool | None:
    """The value of an enable/disable switch in a user's options. None if it is absent."""
    value = options.get(name, options.get(f"--{name}"))
    return (
        {"enable": True, True: True, "disable": False, False: False}.get(value)
        if isinstance(value, str | bool)
        else None
    )


def spelling(key: str) -> str:
    """`--name` for `name`. Names with dashes stay unchanged."""
    return key if key.startswith("-") else f"--{key}"


# ---------------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class Installed:
    """An option in the output of an installed program's `--help`."""

    takes_value: bool
    choices: tuple[Scalar, ...] | None
    several: bool = False
    """True if several values follow it. Unknown for click's options."""


def check_extra(
    tool: Tool, release: str, options: Mapping[str, Json], installed_help: str | None = None
) -> tuple[str, ...]:
    """The faults of a user's options for `tool`, one sentence each. Empty if they can be passed.

    `installed_help`, the installed program's `--help` output, decides on options and values; the table then explains.
    """
    if not options:
        return ()
    installed = None if installed_help is None else parse_help(installed_help)
    problems = (
        (key, _problem(tool, release, spelling(key), value, installed or None)) for key, value in options.items()
    )
    return tuple(f"{key}: {problem}" for key, problem in problems if problem is not None)


def _problem(tool: Tool, release: str, name: str, value: Json, installed: Mapping[str, Installed] | None) -> str | None:
    program = load()[tool]
    if ours := decided(tool, name):
        return f"is set from {ours}"
    form = program.spelled(name, release)
    shown = form if installed is None else installed.get(name)
    if shown is None:
        return _absence(program, tool, release, name, installed)
    if isinstance(value, list) and (problem := _list_problem(tool, value, shown, form)):
        return problem
    return _value_problem(value, shown, form)


def _list_problem(tool: Tool, value: list[Json], shown: Form | Installed, form: Form | None) -> str | None:
    """The fault of several values for an option, if any."""
    if form is None:
        several = tool in _CLICK or (isinstance(shown, Installed) and shown.several)
    else:
        if form.nargs is not None and form.nargs.isdecimal() and len(value) != int(form.nargs):
            return f"takes {form.nargs} values, not {len(value)}"
        several = form.repeat or form.nargs not in {None, "?"}
    return None if several or not shown.takes_value else "takes one value, not a list"


def _absence(program: Program, tool: Tool, release: str, name: str, installed: Mapping[str, Installed] | None) -> str:
    text = f"{tool.partition(':')[0]} {release} has no such option"
    canonical = program.canonical(name)
    if canonical is not None:
        for form in reversed(program.options[canonical]):
            if isinstance(form, Gone) and at_least(release, form.since):
                return f"{text}: gone since {form.since}" + (f"; instead: {form.instead}" if form.instead else "")
        for form in program.options[canonical]:
            if isinstance(form, Form) and not at_least(release, form.since):
                return f"{text}: it exists from {form.since} on"
    names = set(known(tool, release)) if installed is None else set(installed)
    close = difflib.get_close_matches(name, names - set(program.ours), n=1, cutoff=0.6)
    return f"{text}; did you mean {close[0].lstrip('-')!r}?" if close else text


def _value_problem(value: Json, shown: Form | Installed, form: Form | None) -> str | None:
    """The fault of a value for an option as it is `shown`. `form` is its entry in the table, if any."""
    if not shown.takes_value:
        return None if isinstance(value, bool) else f"takes no value; write true or false, not {value!r}"
    if isinstance(value, bool):
        return None if form is not None and form.kind == "on_off" else f"needs a value, not {value!r}"
    choices = None if shown.choices is None else tuple(map(str, shown.choices))
    words = value if isinstance(value, list) else str(value).split() if form and form.nargs == "+" else [value]
    for word in words:
        if choices is not None and str(word) not in choices:
            return f"{word!r} is not one of {', '.join(choices)}"
        if form is not None and form.kind in {"int", "float"} and not _is_number(word, form.kind):
            return f"{word!r} is not {'a whole number' if form.kind == 'int' else 'a number'}"
        if form is not None and form.least is not None and float(str(word)) < form.least:
            return f"must be {form.least} or more, not {word}"
    return None


def _is_number(value: Json, kind: str) -> bool:
    try:
        _ = int(str(value)) if kind == "int" else float(str(value))
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- --help

_HELP_TIMEOUT_S: Final = 180.0
"""The programs import all of TensorRT-LLM before they print anything."""


def help_for(machine: Machine, options: Json, *command: str | None) -> str | None:
    """Output of `command --help`. None if there is nothing to check, no program, or no output.

    Only runs if a matrix sets options of the program, and not for an assumed machine: then the recorded table decides.
    """
    if not options or machine.assumed or command[0] is None:
        return None
    return installed_help(tuple(str(word) for word in command))


@lru_cache(maxsize=8)
def installed_help(command: tuple[str, ...]) -> str | None:
    """Output of `command --help`. None if it prints nothing or fails."""
    ask = [*command, "--help"]
    try:
        ran = subprocess.run(
            ask, capture_output=True, text=True, timeout=_HELP_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 and ran.stdout.strip() else None


_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_ROW = re.compile(r"^ {1,8}(?=-)(?P<call>\S+(?: \S+)*)")
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_BRACES = re.compile(r"\{([^{}]*)\}")
_BARS = re.compile(r"\[([^\[\]\s|]+(?:\|[^\[\]\s|]+)+)\]")


def parse_help(text: str) -> Mapping[str, Installed]:
    """Options by every spelling in a program's `--help` output, as printed by argparse or click.

    An option's row is indented by at most eight columns and starts with a dash. Two or more spaces separate it from its
    description. Empty for text without such rows.
    """
    entries: dict[str, Installed] = {}
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
        entries |= dict.fromkeys(names, Installed(takes_value=bool(rest), choices=choices, several="..." in call))
    return entries
