"""DeepSeek V3, R1 and V3.1. The markers contain full-width bars, and are not special tokens."""

from __future__ import annotations

from typing import Final

from trtllm_pipeline.serve.gateway.dialects.dialect import Dialect, Object
from trtllm_pipeline.serve.gateway.dialects.parsing import BrokenError, Emit, Reader, Steps

_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_FENCE: Final = "```"


class DeepSeek(Dialect):
    """`function`, a separator, the name, and the arguments in a fence. Templates get earlier calls as text.

    Source: https://huggingface.co/deepseek-ai/DeepSeek-V3-0324, its chat template
    """

    name = "deepseek"
    markers = (_CALLS, _CALL)
    ends = ("<｜end▁of▁sentence｜>",)
    takes_tools = True
    arguments_as_text = True
    before_name = f"function{_SEPARATOR}"
    after_name = f"\n{_FENCE}json\n"

    def beginning(self, name: str, schemas: Object, *, guided: bool) -> tuple[str, Object | None]:
        beginning = f"{_CALLS}{_CALL}{self.before_name}"
        return (beginning + name + self.after_name, schemas[name] if guided else None) if name else (beginning, None)

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        if marker == _CALLS:
            yield from reader.space()
            yield from reader.need(_CALL)
        while True:
            yield from self._call(reader)
            reader.settle()
            yield from reader.space()
            if not (yield from reader.take(_CALL)):
                break
        yield from reader.close(_CALLS_END)

    def _call(self, reader: Reader) -> Steps[None]:
        """Either form: V3.1 writes the name before the separator, without a fence."""
        name = (yield from reader.until(_SEPARATOR)).strip()
        if name == "function" and name not in reader.expected.tools:
            name = (yield from reader.until("\n")).strip()
        if not name or _CALL in name:
            raise BrokenError
        yield from reader.call(name, lambda emit: _arguments(reader, emit))
        yield from reader.space()
        yield from reader.close(_FENCE)
        yield from reader.space()
        yield from reader.close(_CALL_END)


class DeepSeekV31(DeepSeek):
    """Writes the name before the separator."""

    name = "deepseek-v3.1"
    before_name = ""
    after_name = _SEPARATOR


def _arguments(reader: Reader, emit: Emit) -> Steps[None]:
    yield from reader.space()
    if (yield from reader.take(_FENCE)):
        yield from reader.until("\n")
        yield from reader.space()
    yield from reader.arguments(emit)
