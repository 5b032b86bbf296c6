"""Dialects: how each model family receives tools, and how it writes reasoning and tool calls. Pure: no I/O.

    dialect = dialect_for("auto", template_source, config)
    prepared = dialect.prepare(Turn(messages, tools, tool_choice))            # DialectError: a 400 in words
    started = prepared.start(renderer.render(prepared.chat), stream=True)
    for piece in response_to(started.prompt):
        for delta in started.parser.feed(piece):                              # Content, Reasoning, CallStart, CallArguments
            ...
    started.parser.end()

To add a family, write a class in a separate file, such as `json_calls.Hermes`, and add a row to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.serve.gateway.dialects.deepseek import DeepSeek, DeepSeekV31
from trtllm_pipeline.serve.gateway.dialects.dialect import PLAIN, Dialect
from trtllm_pipeline.serve.gateway.dialects.harmony import Harmony
from trtllm_pipeline.serve.gateway.dialects.json_calls import Granite, Hermes, Phi
from trtllm_pipeline.serve.gateway.dialects.llama import Llama, Llama4
from trtllm_pipeline.serve.gateway.dialects.mistral import Mistral, MistralByName
from trtllm_pipeline.serve.gateway.dialects.tag_calls import Glm, QwenCoder

AUTO: Final = "auto"


class DialectFamily(NamedTuple):
    """A dialect, and how its models are recognized: their chat template contains all of `texts`, and their
    configuration has one of `model_types`, if there are any.
    """

    dialect: Dialect
    texts: tuple[str, ...]
    model_types: tuple[str, ...] = ()


FAMILIES: Final = (
    # The first match wins.
    DialectFamily(Harmony(), ("<|channel|>", "<|start|>")),
    DialectFamily(DeepSeek(), ("<｜tool▁calls▁begin｜>", "```json")),
    DialectFamily(DeepSeekV31(), ("<｜tool▁calls▁begin｜>",)),
    DialectFamily(QwenCoder(), ("<function=", "<parameter=")),
    DialectFamily(Glm(), ("<arg_key>",)),
    DialectFamily(MistralByName(), ("[TOOL_CALLS]", "[ARGS]")),
    DialectFamily(Mistral(), ("[TOOL_CALLS]",)),
    DialectFamily(Llama4(), ("<|python_start|>",)),
    DialectFamily(Llama(), ("<|python_tag|>",)),
    DialectFamily(Llama(), ('"parameters": ', "ipython")),
    DialectFamily(Phi(), ("<|tool|>", "message['tools']")),
    DialectFamily(Phi(), ("functools",)),
    DialectFamily(Granite(), ("<|tool_call|>",)),
    DialectFamily(Granite(), ("<|start_of_role|>", "tools"), ("granite", "granitemoe")),
    DialectFamily(Hermes(), ("<tool_call>",)),
)
_OFTEN_MEANT: Final = {
    "qwen": ": Qwen2.5 and Qwen3 write as hermes, Qwen3-Coder as qwen3-coder",
    "gpt": ": gpt-oss writes as harmony",
    "llama": ": Llama 3 writes as llama3, Llama 4 as llama4",
}
"""Prefix of model names that is not a dialect's name -> the dialects of these models."""


def names() -> list[str]:
    return [AUTO, PLAIN.name, *dict.fromkeys(family.dialect.name for family in FAMILIES)]


def dialect_for(name: str, template: str | None, config: Mapping[str, Any] | None = None) -> Dialect:
    """The dialect called `name`, or for `auto` that of this template and config.json. Raises UsageError."""
    if name == PLAIN.name:
        return PLAIN
    if name != AUTO:
        dialect = next((family.dialect for family in FAMILIES if family.dialect.name == name), None)
        if dialect is None:
            meant = next((text for start, text in _OFTEN_MEANT.items() if name.lower().startswith(start)), "")
            raise UsageError(f"unknown dialect {name!r}{meant}", hint=f"the dialects are {', '.join(names())}")
        return dialect
    kind = str((config or {}).get("model_type", ""))
    for family in FAMILIES if template else ():
        if all(text in str(template) for text in family.texts) and (
            not family.model_types or kind.startswith(family.model_types)
        ):
            return family.dialect
    return PLAIN
