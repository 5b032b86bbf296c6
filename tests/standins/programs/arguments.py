"""Command lines by a recorded table of options: as argparse reads them, and as click does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

Options = Mapping[str, Mapping[str, Any]]
_TYPES: Final[dict[str, Callable[[str], Any]]] = {"int": int, "float": float, "str": str}


def parse(program: str, options: Options, arguments: Sequence[str]) -> dict[str, Any]:
    """Values by option without its dashes, `-` as `_`. Ends the process with code 2, in argparse's words, as Python
    scripts and `trtllm-build` do."""
    parser = argparse.ArgumentParser(prog=program)
    for name, option in options.items():
        given: dict[str, Any] = {"required": bool(option.get("required"))}
        if option.get("default") == "<suppressed>":
            given["default"] = argparse.SUPPRESS
        elif "default" in option:
            given["default"] = option["default"]
        if not option["takes_value"]:
            given["action"] = "store_false" if option.get("default") is True else "store_true"
        else:
            choices = option.get("choices")
            given["type"] = int if choices and isinstance(choices[0], int) else _TYPES.get(option["type"], str)
            given["choices"] = choices
            if "nargs" in option:
                count = str(option["nargs"])
                given["nargs"] = int(count) if count.isdecimal() else count
            if "action" in option:
                given["action"] = option["action"]
        parser.add_argument(name, *option.get("aliases", ()), **given)
    return vars(parser.parse_args(list(arguments)))


class _UsageError(Exception):
    """What click says before it exits with code 2."""


def parse_click(
    program: str, table: Mapping[str, Options], arguments: Sequence[str], default: str, positional: str | None
) -> tuple[str, dict[str, Any]]:
    """(subcommand, values) as a click program reads them: options spelled in full, one positional argument or None.

    `default` is the subcommand of a command line that names none; a program without subcommands has only that.
    """
    left = list(arguments)
    command = left.pop(0) if left and left[0] in table and left[0] != program else default
    path = program if command == program else f"{program} {command}"
    if "--help" in left:
        print(f"Usage: {path} [OPTIONS] {positional or ''}\n\nOptions:")
        for name, option in table[command].items():
            spellings = ", ".join((name, *option.get("aliases", ())))
            print(f"  {spellings}{' ' + option['type'].upper() if option['takes_value'] else ''}")
        raise SystemExit(0)
    try:
        return command, _click_values(table[command], left, positional)
    except _UsageError as usage:
        _exit(path, positional or "", str(usage))


def parse_group(
    program: str, table: Mapping[str, Options], arguments: Sequence[str]
) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """(values of the group, subcommand, its values) as a click group reads them, whose own options come first."""
    at = next((place for place, word in enumerate(arguments) if word in table and word != program), len(arguments))
    command = arguments[at] if at < len(arguments) else ""
    try:
        group = _click_values(table[program], list(arguments[:at]), None)
        if not command:
            raise _UsageError("Missing command.")
        return group, command, _click_values(table[command], list(arguments[at + 1 :]), None)
    except _UsageError as usage:
        _exit(f"{program} {command}".rstrip(), "COMMAND", str(usage))


def _exit(path: str, positional: str, words: str) -> NoReturn:
    print(f"Usage: {path} [OPTIONS] {positional}\nTry '{path} --help' for help.\n\nError: {words}", file=sys.stderr)
    raise SystemExit(2)


def _click_values(options: Options, arguments: list[str], positional: str | None) -> dict[str, Any]:
    names = {spelling: name for name in options for spelling in (name, *options[name].get("aliases", ()))}
    negative = {option["negative_flag"]: name for name, option in options.items() if "negative_flag" in option}
    values: dict[str, Any] = {
        name: [] if option.get("multiple") else option.get("default", None if option["takes_value"] else False)
        for name, option in options.items()
    }
    plain: list[str] = []
    left = iter(arguments)
    for argument in left:
        spelling, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            plain.append(argument)
        elif argument in negative:
            values[negative[argument]] = False
        elif spelling not in names:
            raise _UsageError(f"No such option: {spelling}")
        elif not options[names[spelling]]["takes_value"]:
            if equals:
                raise _UsageError(f"Option '{spelling}' does not take a value.")
            values[names[spelling]] = True
        else:
            if not equals:
                following = next(left, None)
                if following is None:
                    raise _UsageError(f"Option '{spelling}' requires an argument.")
                value = following
            read = _click_value(spelling, options[names[spelling]], value)
            if options[names[spelling]].get("multiple"):
                values[names[spelling]].append(read)
            else:
                values[names[spelling]] = read
    for name, option in options.items():
        if option.get("required") and values[name] is None:
            raise _UsageError(f"Missing option '{name}'.")
    if positional is None:
        plain.insert(0, "")
    elif not plain:
        raise _UsageError(f"Missing argument '{positional}'.")
    if len(plain) > 1:
        raise _UsageError(f"Got unexpected extra argument{'s' * (len(plain) > 2)} ({' '.join(plain[1:])})")
    first = {} if positional is None else {positional.lower(): plain[0]}
    return {**first, **{name.lstrip("-").replace("-", "_"): values[name] for name in values}}


def _click_value(spelling: str, option: Mapping[str, Any], value: str) -> Any:
    choices = option.get("choices")
    if choices and value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise _UsageError(f"Invalid value for '{spelling}': {value!r} is not one of {listed}.")
    try:
        return _TYPES.get(option["type"], str)(value)
    except ValueError:
        word = {"int": "integer", "float": "float"}[option["type"]]
        raise _UsageError(f"Invalid value for '{spelling}': {value!r} is not a valid {word}.") from None
