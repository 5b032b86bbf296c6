"""A validated client request: OpenAI's fields, and those that clients of vLLM, SGLang and trtllm-serve also send."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from trtllm_pipeline.base import user_files
from trtllm_pipeline.serve.gateway.api_error import ApiError, bad, missing, unsupported

Endpoint = Literal["chat", "completions", "responses"]
PATHS: Final[Mapping[Endpoint, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
MOST_CHOICES: Final = 128
MOST_STOPS: Final = 16
_MOST_WORD_CHARACTERS: Final = 1024
"""In one stop word, since text that may begin it is held back, and in one bad word."""
_MOST_CHARACTERS: Final = MOST_STOPS * _MOST_WORD_CHARACTERS
"""In all of them: the server encodes them as it does a prompt, but without the prompt's limit."""
MOST_MESSAGES: Final = 10_000
INT32: Final = 2**31 - 1
_MOST_BRACKETS: Final = 100_000
"""Limit for the objects in a body: more small objects would block the parser, and all other requests, for longer."""
FOR_OPENAI: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "request_id", "rid", "priority"),
    }
)
"""Fields that do not affect the response."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    # unsupported field, of OpenAI, vLLM, SGLang or trtllm-serve -> the values that have no effect
    **dict.fromkeys(
        ("prediction", "audio", "web_search_options", "prompt_logprobs", "truncate_prompt_tokens"), (None,)
    ),
    **dict.fromkeys(("cache_salt", "kv_transfer_params", "disaggregated_params", "lora_request", "lora_path"), (None,)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"), (None,)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "continue_final_message", "no_stop_trim"), (None, False)),
    **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids", "return_token_ids"), (None, False)),
    **dict.fromkeys(("spaces_between_special_tokens", "detokenize", "add_generation_prompt"), (None, True)),
    **dict.fromkeys(("functions", "allowed_token_ids"), (None, [])),
    **dict.fromkeys(("logit_bias", "structured_outputs"), (None, {})),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "function_call": (None, "none"),
    "verbosity": (None, "medium"),
    "top_p_min": (None, 0),
}
_WHY: Final = {
    "best_of": "it would generate choices and discard them; use n",
    "suffix": "the model continues a text, it cannot fill gaps",
    "functions": "its successor is tools",
    "function_call": "its successor is tool_choice",
    **dict.fromkeys(("guided_json", "structured_outputs"), "response_format has its schema"),
    **dict.fromkeys(("lora_request", "lora_path"), "the model's name selects the adapter: MODEL:ADAPTER"),
}
_SAMPLING: Final[Mapping[str, tuple[type, float, float]]] = {
    # field -> type, minimum, maximum
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, INT32),
    "min_p": (float, 0, 1),
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    "repetition_penalty": (float, 1e-6, 100),
    "length_penalty": (float, -100, 100),
    "min_tokens": (int, 0, INT32),
    "end_id": (int, -1, INT32),
    "pad_id": (int, 0, INT32),
}
_COMMON: Final = frozenset(
    {
        *("model", "stream", "stream_options", "n", "max_tokens", "stop", "seed", "bad_words", "response_format"),
        *("ignore_eos", "stop_token_ids", "skip_special_tokens", "add_special_tokens"),
    }
)
_OF_BOTH: Final = _COMMON | _SAMPLING.keys() | _NEUTRAL.keys() | FOR_OPENAI
_KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "chat": _OF_BOTH
    | {
        *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice"),
        *("parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
    },
    "completions": _OF_BOTH | {"prompt", "echo", "logprobs"},
}


@dataclass(frozen=True, slots=True)
class Guide:
    """The format that the text must follow. `kind` is TensorRT-LLM's guided_decoding_guide_type."""

    kind: Literal["json", "json_schema"]
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request."""

    endpoint: Endpoint
    model: str
    stream: bool = False
    include_usage: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Only `stop` ends the response before `max_tokens`."""
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool | None = None
    """Omit special tokens from the response."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to the prompt."""
    seed: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The fields of `_SAMPLING` in the request."""
    logprobs: bool = False
    top_logprobs: int = 0
    """Number of most likely tokens to return at each position."""
    echo: bool = False
    guide: Guide | None = None
    prompts: tuple[str, ...] = ()
    """Fields of completions."""
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """(responses) Fields of the request that the response repeats."""

    @property
    def choices(self) -> int:
        return self.n * max(1, len(self.prompts))


def parse_body(body: bytes) -> dict[str, Any]:
    """The object in a request's body. Raises ApiError."""
    if body.count(b"[") + body.count(b"{") > _MOST_BRACKETS:
        raise ApiError(400, f"the body has more than {_MOST_BRACKETS} lists and objects", code="invalid_json")
    try:
        value = user_files.decode(body)
    except user_files.JsonError as error:
        raise ApiError(
            400, f"the body is not JSON: {str(error).removeprefix('not JSON: ')}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return value


def model_of(body: Mapping[str, Any]) -> str:
    """The model requested in a body. Raises ApiError."""
    model = body.get("model")
    if model is None:
        raise missing("model")
    if not isinstance(model, str):
        raise wrong("model", "a text", model)
    return model


def read(endpoint: Literal["chat", "completions"], body: Mapping[str, Any]) -> ParsedRequest:
    """The request in a body. Raises ApiError for invalid and for unsupported fields."""
    other: Endpoint = "completions" if endpoint == "chat" else "chat"
    refuse_unknown(body, _KNOWN[endpoint], {PATHS[other]: _KNOWN[other]})
    refuse_unless_neutral(body, _NEUTRAL, _WHY)
    stream = flag(body, "stream")
    options = typed_object(body, "stream_options")
    if options and not stream:
        raise bad("stream_options", "stream_options is only allowed with stream: true")
    given: dict[str, Any] = {
        "stream": stream,
        "include_usage": flag(options, "include_usage", "stream_options.include_usage"),
        "n": whole(body, "n", 1, MOST_CHOICES) or 1,
        "max_tokens": whole(body, "max_tokens", 1, INT32),
        "stop": _words(body, "stop", MOST_STOPS),
        "bad_words": _words(body, "bad_words", 1000),
        "ignore_eos": flag(body, "ignore_eos"),
        "stop_token_ids": _token_ids(body, "stop_token_ids"),
        **{
            name: flag(body, name)
            for name in ("skip_special_tokens", "add_special_tokens")
            if body.get(name) is not None
        },
        "seed": whole(body, "seed", -(2**63), 2**64 - 1),
        "sampling": {name: number(body, name) for name in body if name in _SAMPLING and body[name] is not None},
        "guide": guide_of(typed_object(body, "response_format")),
    }
    own = _chat(body) if endpoint == "chat" else _completion(body)
    return ParsedRequest(endpoint, model_of(body), **{**given, **own})


def refuse_unknown(
    body: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, Collection[str]] = MappingProxyType({})
) -> None:
    """Raise ApiError for unknown fields. `elsewhere`: paths that accept other fields."""
    if unknown := sorted(set(body).difference(known)):
        where = "".join(f"; it belongs to {path}" for path, names in elsewhere.items() if unknown[0] in names)
        raise bad(
            unknown[0], f"unrecognized request argument: {', '.join(unknown)[:200]}{where}", code="unknown_parameter"
        )


def refuse_unless_neutral(
    body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], why: Mapping[str, str]
) -> None:
    """Raise ApiError for unsupported fields whose value would have an effect."""
    for name, value in body.items():
        if name in neutral and not any(value is each or value == each for each in neutral[name]):
            because = f": {why[name]}" if name in why else ""
            raise unsupported(name, f"{name} is not supported{because}")


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if messages is None:
        raise missing("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a list of one or more messages", messages)
    if len(messages) > MOST_MESSAGES:
        raise bad("messages", f"messages has {len(messages)} items; the limit is {MOST_MESSAGES}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(f"messages[{number}]", "an object with role and content", message)
    most = whole(body, "max_completion_tokens", 1, INT32)
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise wrong("tools", "a list of tools", tools)
    choice = body.get("tool_choice")
    if choice is not None and not isinstance(choice, (str, dict)):
        raise wrong("tool_choice", "a text or an object", choice)
    logprobs, top = flag(body, "logprobs"), whole(body, "top_logprobs", 0, 20)
    if top is not None and not logprobs:
        raise bad("top_logprobs", "top_logprobs is only allowed with logprobs: true")
    variables = dict(typed_object(body, "chat_template_kwargs"))
    if (effort := body.get("reasoning_effort")) is not None:
        if not isinstance(effort, str):
            raise wrong("reasoning_effort", "a text", effort)
        variables.setdefault("reasoning_effort", effort)
    return {
        **({} if most is None else {"max_tokens": most}),
        "messages": messages,
        "tools": tools or (),
        "tool_choice": choice,
        "parallel_tool_calls": flag(body, "parallel_tool_calls", default=True),
        "logprobs": logprobs,
        "top_logprobs": top or 0,
        "variables": variables,
    }


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt")
    if prompt is None:
        raise missing("prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(prompts, list) and any(isinstance(each, (int, list)) for each in prompts):
        raise unsupported("prompt", "a prompt of token ids is not supported: give its text")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(each, str) for each in prompts):
        raise wrong("prompt", "a text, or a list of texts", prompt)
    if len(prompts) > MOST_CHOICES:
        raise bad("prompt", f"prompt has {len(prompts)} texts; the limit is {MOST_CHOICES}")
    logprobs = whole(body, "logprobs", 0, 5)
    echo = flag(body, "echo")
    if logprobs is not None and echo:
        raise bad("echo", "echo cannot be combined with logprobs: the server returns none for the prompt")
    return {"prompts": tuple(prompts), "logprobs": logprobs is not None, "top_logprobs": logprobs or 0, "echo": echo}


def guide_of(request: Mapping[str, Any], where: str = "response_format", inside: str = "json_schema") -> Guide | None:
    """The guide in a `response_format`, whose schema is in the object `inside`, or in itself. Raises ApiError."""
    kind = request.get("type") if request else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide("json")
    if kind != "json_schema":
        raise bad(f"{where}.type", f"{where}.type is {_shown(kind)}; expected text, json_object or json_schema")
    if inside:
        where = f"{where}.{inside}"
        request = typed_object(request, inside, where)
    schema = typed_object(request, "schema", f"{where}.schema")
    if not schema:
        raise bad(f"{where}.schema", f"{where}.schema is missing")
    return Guide("json_schema", json.dumps(schema, ensure_ascii=False))


def flag(body: Mapping[str, Any], name: str, where: str = "", *, default: bool = False) -> bool:
    """A field that is true or false. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(where or name, "true or false", value)
    return value


def typed_object(body: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """An object field. Empty if missing. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(where or name, "an object", value)
    return value


def whole(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    """An integer field within limits. Raises ApiError."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise wrong(name, f"a whole number from {least} to {most}", value)
    return value


def number(body: Mapping[str, Any], name: str) -> float | None:
    """A field of `_SAMPLING`. Raises ApiError."""
    kind, least, most = _SAMPLING[name]
    if kind is int:
        return whole(body, name, int(least), int(most))
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise wrong(name, f"a number from {least:g} to {most:g}", value)  # comparisons with nan are false
    return float(value)


def _words(body: Mapping[str, Any], name: str, most: int) -> tuple[str, ...]:
    value = body.get(name)
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise wrong(name, "a text, or a list of texts", value)
    if len(texts) > most:
        raise bad(name, f"{name} has {len(texts)} texts; the limit is {most}")
    if (longest := max(map(len, texts), default=0)) > _MOST_WORD_CHARACTERS:
        raise bad(name, f"{name} has a text of {longest} characters; the limit is {_MOST_WORD_CHARACTERS}")
    if (total := sum(map(len, texts))) > _MOST_CHARACTERS:
        raise bad(name, f"the texts of {name} have {total} characters; the limit is {_MOST_CHARACTERS}")
    return tuple(each for each in texts if each)


def _token_ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = body.get(name)
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= INT32 for each in ids):
        raise wrong(name, "a list of token ids", value)
    if len(ids) > MOST_STOPS:
        raise bad(name, f"{name} has {len(ids)} ids; the limit is {MOST_STOPS}")
    return tuple(ids)


def wrong(param: str, expected: str, value: object) -> ApiError:
    return bad(param, f"{param} is {_shown(value)}; expected {expected}")


def _shown(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, dict)):
        if not value:
            return "an empty list" if isinstance(value, list) else "an empty object"
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) > 2**128:
        return "a number with many digits"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."
