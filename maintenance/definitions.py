"""Reads the options of a program from its source, without running the program or having what it imports.

A name of the source is defined when something asks for it, by executing that one statement: the function that makes the
parser, a constant that it uses, a class whose fields become options. Modules of the same source tree are read in the same
way. argparse, click and a few modules without effects are the real ones; all else is a stub that is whatever is wanted
of it. A parser that is asked to parse ends it all, and is what was looked for.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import builtins
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Final, NoReturn

Options = dict[str, dict[str, Any]]
REAL: Final = frozenset(
    ("abc", "click", "collections", "copy", "dataclasses", "enum", "functools", "itertools", "math", "operator", "re", "string",
     "textwrap", "types", "typing", "typing_extensions", "__future__")
)  # fmt: skip
"""Modules that are what they are: importing and using them has no effect beyond their values."""
_EFFECTS: Final = frozenset(("breakpoint", "compile", "eval", "exec", "exit", "input", "open", "print", "quit"))
"""Builtins that are stubs too."""
_TYPES: Final = {int: "int", float: "float"}


class DefinitionsError(Exception):
    """No options could be read."""


class Stub:
    """Stands for whatever is not there: any attribute, result and item of it is one; as a decorator it changes nothing."""

    def __init__(self, name: str) -> None:
        self._name = self.__name__ = name

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}")

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What it decorates, or another stub."""
        if len(given) == 1 and not named and isinstance(given[0], (FunctionType, type)):
            return given[0]
        return Stub(f"{self._name}()")

    def __getitem__(self, key: object) -> Stub:
        return Stub(f"{self._name}[]")

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __or__(self, other: object) -> Stub:
        return self

    __ror__ = __add__ = __radd__ = __or__

    def __str__(self) -> str:
        return f"<{self._name}>"


class _ParsedError(Exception):
    """A parser was asked to parse: it is complete."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, *_: Any, **__: Any) -> NoReturn:
        raise _ParsedError(self)


_ARGPARSE: Final = SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})


class Source(dict[str, Any]):
    """The names of one file, each defined when it is asked for."""

    def __init__(self, path: Path, root: Path, known: dict[Path, Source] | None = None) -> None:
        super().__init__(__name__=__name__, __file__=str(path))  # dataclasses look the module up
        stubs = {name: Stub(name) for name in _EFFECTS}
        self["__builtins__"] = {**vars(builtins), **stubs, "__import__": self._import}
        self.path = path
        self._root = root
        self._known = {} if known is None else known
        self._known[path] = self
        try:
            self.tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise DefinitionsError(f"{path}: cannot be parsed: {error}") from error
        self._statements = dict(_defined(self.tree.body))
        self._flags = __future__.annotations.compiler_flag if "annotations" in self._statements else 0
        self.unread: list[str] = []
        """Names whose definitions failed, and are stubs."""

    def __missing__(self, name: str) -> Any:
        statement = self._statements.pop(name, None)
        if statement is None:
            if hasattr(builtins, name):
                raise KeyError(name)
            return Stub(name)
        try:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self[name] = self._imported(statement, name)
            else:
                if isinstance(statement, ast.ClassDef):
                    for each in _looked_up(statement):
                        self.get_name(each)
                self.execute([statement])
            return dict.__getitem__(self, name)
        except _ParsedError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a definition needs that is not here
            self.unread.append(f"{name}: {type(error).__name__}: {error}")
            self[name] = Stub(name)
            return self[name]

    def get_name(self, name: str) -> None:
        """Define a name, where the file does: a class's body does not ask for it."""
        if name in self._statements:
            self[name]

    def execute(self, statements: list[ast.stmt]) -> None:
        """Run statements of the file with its names."""
        module = ast.fix_missing_locations(ast.Module(body=statements, type_ignores=[]))
        exec(compile(module, str(self.path), "exec", self._flags, dont_inherit=True), self)  # noqa: S102

    def not_read(self) -> str:
        """What failed in all files, in words."""
        return "; ".join(each for source in self._known.values() for each in source.unread) or "nothing"

    def functions(self) -> Iterator[ast.FunctionDef]:
        """The functions at the top of the file."""
        return (each for each in self.tree.body if isinstance(each, ast.FunctionDef))

    def _imported(self, statement: ast.Import | ast.ImportFrom, name: str) -> Any:
        alias = next(each for each in statement.names if (each.asname or each.name.partition(".")[0]) == name)
        if isinstance(statement, ast.Import):
            return self._module(alias.name if alias.asname else name, 0)
        module = self._module(statement.module or "", statement.level)
        if isinstance(module, Source):
            return module[alias.name]
        return getattr(module, alias.name)

    def _import(
        self, name: str, _globals: object = None, _locals: object = None, names: Sequence[str] = (), level: int = 0
    ) -> Any:
        """An import inside a function, as one at the top."""
        module = self._module(name if names else name.partition(".")[0], level)
        return _Names(module) if isinstance(module, Source) else module

    def _module(self, name: str, level: int) -> Any:
        if not level and name == "argparse":
            return _ARGPARSE
        if not level and name.partition(".")[0] in REAL:
            return importlib.import_module(name)
        above = self.path.parents[level - 1] if level else None
        for folder in (self.path.parent, self._root) if above is None else (above,):
            place = folder.joinpath(*name.split(".")) if name else folder
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file() and file.resolve().is_relative_to(self._root):
                    return self._known.get(file) or Source(file, self._root, self._known)
        return Stub(name)


class _Names:
    """A file's names as a module's attributes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return self._source[name]


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Each name that a block defines, with its statement; the first branch of an `if` and a `try` goes before the others."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, statement
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((each.asname or each.name.partition(".")[0], statement) for each in names)
            case ast.Assign(targets=targets):
                yield from (
                    (node.id, statement) for each in targets for node in ast.walk(each) if isinstance(node, ast.Name)
                )
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                yield name, statement
            case ast.If(body=first, orelse=second) | ast.Try(body=first, orelse=second):
                handlers = [line for each in getattr(statement, "handlers", ()) for line in each.body]
                yield from _defined([*handlers, *second])
                yield from _defined(first)


def _looked_up(statement: ast.ClassDef) -> Iterator[str]:
    """Names that a class's body uses when it is executed: all but those in bodies of functions."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            yield node.id
        within = node.body if isinstance(node, ast.FunctionDef) else ()
        waiting += [each for each in ast.iter_child_nodes(node) if each not in within]


def of_argparse(file: Path, root: Path) -> Options:
    """The options of the first parser that a file makes: in a function, or below `if __name__ == "__main__"`.

    Raises DefinitionsError where none is made.
    """
    source = Source(file.resolve(), root.resolve())
    makers = sorted(
        (each for each in source.functions() if _mentions(each, "ArgumentParser")),
        key=lambda each: each.name != "parse_arguments",
    )
    guards = [each for each in source.tree.body if isinstance(each, ast.If) and _mentions(each.test, "__name__")]
    for maker in (*makers, *(each for each in guards if _mentions(each, "ArgumentParser"))):
        try:
            if isinstance(maker, ast.If):
                source.execute(maker.body)
                continue
            assert isinstance(maker, ast.FunctionDef)
            needed = len(maker.args.args) - len(maker.args.defaults)
            made = source[maker.name](*(Stub("argument") for _ in range(needed)))
        except _ParsedError as parsed:
            made = parsed.parser
        except Exception as error:
            raise DefinitionsError(f"{file}: {type(error).__name__}: {error}; not read: {source.not_read()}") from error
        if isinstance(made, argparse.ArgumentParser):
            return dict(sorted(_of_actions(made)))
    raise DefinitionsError(f"{file}: no parser is made; not read: {source.not_read()}")


def _mentions(node: ast.AST, name: str) -> bool:
    return any(name in (getattr(each, "attr", None), getattr(each, "id", None)) for each in ast.walk(node))


def _of_actions(parser: argparse.ArgumentParser) -> Iterator[tuple[str, dict[str, Any]]]:
    for action in parser._actions:  # noqa: SLF001  argparse has no public list of them
        if isinstance(action, argparse._HelpAction) or not action.option_strings:  # noqa: SLF001
            continue
        negative = [each for each in action.option_strings if each.startswith("--no-")]
        names = [
            each
            for each in action.option_strings
            if not isinstance(action, argparse.BooleanOptionalAction) or each not in negative
        ]
        name = next((each for each in names if each.startswith("--")), names[0])
        found: dict[str, Any] = {"takes_value": action.nargs != 0}
        if len(names) > 1:
            found["aliases"] = sorted({*names} - {name})
        if action.nargs == 0:
            found["type"] = "bool"
        else:
            found |= _values(action.choices, _TYPES.get(action.type, "str") if isinstance(action.type, type) else "str")
        default = "<suppressed>" if action.default is argparse.SUPPRESS else action.default
        found |= _finished(default, required=action.required, nargs=action.nargs if action.nargs != 0 else None)
        yield name, found


def of_click(file: Path, root: Path) -> dict[str, Options]:
    """The options of a click program by subcommand; of one without, under the name of the file's own command.

    Raises DefinitionsError for a file without commands.
    """
    import click

    source = Source(file.resolve(), root.resolve())
    names = [name for name, _ in _defined(source.tree.body)]
    decorated = [
        each.name for each in source.functions() if any(_mentions(line, "command") for line in each.decorator_list)
    ]
    for name in dict.fromkeys((*(["main"] if "main" in names else ()), *decorated)):
        found = source[name]
        if isinstance(found, click.Group):
            return {each: dict(sorted(_of_click(command))) for each, command in sorted(found.commands.items())}
        if isinstance(found, click.Command):
            return {"": dict(sorted(_of_click(found)))}
    raise DefinitionsError(f"{file}: no click command is defined; not read: {source.not_read()}")


def _of_click(command: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    import click

    kinds = {"integer": "int", "integer range": "int", "float": "float", "float range": "float"}
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        name = next((each for each in option.opts if each.startswith("--")), option.opts[0])
        found: dict[str, Any] = {"takes_value": not option.is_flag}
        if len(option.opts) > 1:
            found["aliases"] = sorted({*option.opts} - {name})
        if option.is_flag:
            found["type"] = "bool"
        else:
            found |= _values(getattr(option.type, "choices", None), kinds.get(option.type.name, "str"))
        if option.secondary_opts:
            found["negative_flag"] = option.secondary_opts[0]
        if option.multiple:
            found["multiple"] = True
        default = option.default if option.default is not False or not option.is_flag else None
        yield name, found | _finished(default, required=option.required, nargs=None)


def _values(choices: Any, kind: str) -> dict[str, Any]:
    if isinstance(choices, Stub) or not choices:
        return {"type": kind}
    return {
        "type": "enum",
        "choices": [each if isinstance(each, (str, int, type(None))) else str(each) for each in choices],
    }


def _finished(default: Any, *, required: bool, nargs: object) -> dict[str, Any]:
    """What both kinds say at the end; defaults that are computed elsewhere are left out."""
    found: dict[str, Any] = {}
    if isinstance(default, (str, int, float)) and default is not False:
        found["default"] = default
    elif (
        isinstance(default, (list, tuple)) and all(isinstance(each, (str, int, float)) for each in default) and default
    ):
        found["default"] = list(default)
    if nargs is not None:
        found["nargs"] = nargs
    if required:
        found["required"] = True
    return found


def names(table: Mapping[str, Options]) -> int:
    """How many options there are over all subcommands."""
    return sum(map(len, table.values()))
