"""Llama 3.1 to 3.3 and Llama 4: a call is the whole response, as bare JSON or as a Python call."""

from __future__ import annotations

from typing import ClassVar

from trtllm_pipeline.serve.gateway.dialects.json_calls import JsonCalls
from trtllm_pipeline.serve.gateway.dialects.parsing import BrokenError, Reader, Steps
from trtllm_pipeline.serve.gateway.dialects.python_calls import python_calls


class Llama(JsonCalls):
    """Bare JSON with `name` and `parameters`, or after a marker, which is a special token.

    A response that starts like a call of an offered tool is a call. Sources:
    https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1, .../llama4
    """

    name = "llama3"
    markers = ("<|python_tag|>",)
    ends: ClassVar[tuple[str, ...]] = ("<|eom_id|>", "<|eot_id|>")
    arguments_key = "parameters"

    def grammar(self, reader: Reader) -> Steps[None]:
        """Calls without a marker are at the start, or after another call and a semicolon."""
        if reader.expected.tools:
            yield from reader.space()
            while (yield from reader.ahead("{", "[")) and (yield from reader.attempt(self._bare(reader))):
                yield from reader.space()
                yield from reader.take(";")
                yield from reader.space()
                reader.settle()
        yield from super().grammar(reader)

    def _bare(self, reader: Reader) -> Steps[None]:
        if (yield from reader.ahead("[")):
            yield from python_calls(reader)
        else:
            yield from reader.calls_in_json(declared=True)

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        """JSON, or `name.call(key="value")`, as for Llama 3's built-in tools."""
        while True:
            yield from reader.space()
            if (yield from reader.ahead("{")):
                yield from reader.calls_in_json()
            else:
                yield from python_calls(reader)
            yield from reader.space()
            reader.settle()
            if not (yield from reader.take(";")):
                return


class Llama4(Llama):
    """Its template requests JSON. The model was also trained on lists of Python calls."""

    name = "llama4"
    markers = ("<|python_start|>",)
    ends = ("<|python_end|>", "<|eom|>", "<|eot|>")

    def calls(self, reader: Reader, marker: str) -> Steps[None]:
        """A list of Python calls, or JSON, up to the end marker."""
        yield from super().calls(reader, marker)
        if not reader.calls:
            raise BrokenError
