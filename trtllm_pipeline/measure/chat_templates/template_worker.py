"""The process that renders a chat template: lines of JSON in, lines of JSON out. Started by its path, see `Renderer`.

The first line has the template and the limits, every other line the variables of a conversation. It imports only Jinja2
and the standard library, so that any Python with Jinja2 can run it.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # never import from the directory of this file

import json
import resource
import signal
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST_MESSAGE = 500


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training. Its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TooLongError(Exception):
    """The text exceeds its limit."""


def main(source: TextIO, sink: TextIO) -> None:
    """Write a response to `sink` for each line of `source`."""
    first = json.loads(source.readline())
    wanted = _address_space_bytes() + int(first["memory_bytes"])
    inherited = _lower(resource.RLIMIT_AS, wanted) < wanted
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    _write(sink, json.dumps({}))
    render: Callable[..., Iterator[str]] | None = None
    for line in source:
        # Processor time, which does not advance faster on a busy machine. SIGPROF ends this process, even inside
        # Jinja2's C code.
        signal.setitimer(signal.ITIMER_PROF, first["time_s"])
        try:
            render = render or environment().from_string(first["source"]).generate
            text = _joined(render(**json.loads(line)["variables"]), int(first["characters"]))
            answer = json.dumps({"text": text})
        except MemoryError:
            if inherited:
                answer = _failed("inherited", "needs more memory than this shell's limit allows (ulimit -v)")
            else:
                answer = _failed("limit", f"needs more than {first['memory_bytes'] >> 20} MB of memory")
        except TooLongError as error:
            answer = _failed("limit", str(error))
        except TemplateSyntaxError as error:
            answer = _failed("broken", f"line {error.lineno}: {_error_text(error)}")
        except TemplateError as error:
            answer = _failed("refused", _error_text(error))
        except Exception as error:  # noqa: BLE001 - whatever an expression of a template may raise
            answer = _failed("refused", f"{type(error).__name__}: {_error_text(error)}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, answer)


def environment() -> Environment:
    """Jinja2 as chat templates expect it. Source: https://huggingface.co/docs/transformers/chat_templating_writing"""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = _now
    return sandbox


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, unlike Jinja2's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _joined(parts: Iterator[str], most: int) -> str:
    texts, length = [], 0
    for part in parts:
        length += len(part)
        if length > most:
            raise TooLongError(f"writes more than {most} characters")
        texts.append(part)
    return "".join(texts)


def _error_text(error: Exception) -> str:
    message = str(error)
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."


def _failed(kind: str, words: str) -> str:
    return json.dumps({"kind": kind, "error": words})


def _lower(kind: int, wanted: int) -> int:
    """Set a limit to `wanted`, or to the process's inherited hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))
    return limit


def _write(sink: TextIO, answer: str) -> None:
    sink.write(answer + "\n")
    sink.flush()


def _address_space_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
