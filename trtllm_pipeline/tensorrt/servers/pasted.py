"""The command that starts a server in any shell, with its environment: to paste, or to run as a file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from trtllm_pipeline.tensorrt.servers.command_lines import Ports

USUAL_PORTS: Final = Ports(8000, 8001, 8002)
"""Triton's default ports, for a command that is printed for use at another time or place."""
_INDENT: Final = " \\\n  "


@dataclass(frozen=True, slots=True)
class PastedCommand:
    """A server's command line, and the parts of its environment that differ from the user's."""

    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, by name."""
    searched: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Search path variable -> directories that come before its present value."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Shell commands that run first, by the variable that each sets."""
    beside: Sequence[str] = ()
    """Shell lines before the server itself, such as servers that it needs, in the background. They end with it."""

    def to_shell(self, more: Mapping[str, str] = MappingProxyType({})) -> str:
        """A subshell that becomes the server, so that the user's shell stays as it is and Ctrl-C ends the server.

        `more` are further environment variables.
        """
        exports = [f"export {name}={shlex.quote(value)}" for name, value in {**self.variables, **more}.items()]
        for name, folders in self.searched.items():
            exports.append(f'export {name}={shlex.quote(":".join(folders))}"${{{name}:+:${name}}}"')
        first, *others = (_quoted(word, [*self.before]) for word in self.words)
        # Files in shared memory hold prompts and responses.
        lines = [
            "umask 077",
            *(f"{name}={command}" for name, command in self.before.items()),
            *exports,
            *(["trap 'kill 0' EXIT INT TERM", *self.beside] if self.beside else []),
            f"{'' if self.beside else 'exec '}{first}{''.join(_INDENT + word for word in _paired(others))}",
        ]
        return "\n".join(["(", *lines, ")"])


def _quoted(word: str, made: Sequence[str]) -> str:
    """The word for a shell. `made` are the variables that its value may name; every other word stays as it is."""
    name, equals, value = word.partition("=")
    if value in {f"${each}" for each in made}:
        return f'{name}{equals}"{value}"'
    return shlex.quote(word)


def _paired(words: Sequence[str]) -> list[str]:
    """Options with the values that follow them, so that each line has one option."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith(("-", "':'", ":")) and lines[-1].startswith("-") and "=" not in lines[-1]:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
