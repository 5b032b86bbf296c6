"""The process that renders a chat template: lines of JSON in, lines of JSON out. Started by its path, see `Renderer`.

The first line has the template and the limits, every other one the variables of a conversation. Nothing of this project
is imported: whatever Python can start has to do, with Jinja2.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # the folder of this file, where nothing is to be imported from

import json
import resource
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST_MESSAGE = 500


class Generation(Extension):
    """`{% generation %}` marks what the model is to say, for training. The text within is written as it is."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TooLongError(Exception):
    """More text than may be."""


def main(source: TextIO, sink: TextIO) -> None:
    """Answer each line of `source` in `sink`."""
    first = json.loads(source.readline())
    memory = _address_space_bytes() + int(first["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _write(sink, {})
    render: Callable[..., Iterator[str]] | None = None
    for line in source:
        # Should nobody be there any more to end this process, its own time does.
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime + first["time_s"]) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            render = render or environment().from_string(first["source"]).generate
            answer = {"text": _joined(render(**json.loads(line)["variables"]), int(first["characters"]))}
        except MemoryError:
            answer = {"kind": "limit", "error": f"needs more than {first['memory_bytes'] >> 20} MB of memory"}
        except TooLongError as error:
            answer = {"kind": "limit", "error": str(error)}
        except TemplateSyntaxError as error:
            answer = {"kind": "broken", "error": f"line {error.lineno}: {_said(error)}"}
        except TemplateError as error:
            answer = {"kind": "refused", "error": _said(error)}
        except Exception as error:  # noqa: BLE001 - whatever an expression of a template may raise
            answer = {"kind": "refused", "error": f"{type(error).__name__}: {_said(error)}"}
        _write(sink, answer)


def environment() -> Environment:
    """Jinja2 as chat templates expect it. Source: https://huggingface.co/docs/transformers/chat_templating_writing"""
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = _now
    return found


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja2's own filter escapes what HTML needs escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _joined(parts: Iterator[str], most: int) -> str:
    found, length = [], 0
    for part in parts:
        length += len(part)
        if length > most:
            raise TooLongError(f"writes more than {most} characters")
        found.append(part)
    return "".join(found)


def _said(error: Exception) -> str:
    message = str(error)
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."


def _write(sink: TextIO, answer: dict[str, Any]) -> None:
    sink.write(json.dumps(answer) + "\n")
    sink.flush()


def _address_space_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
