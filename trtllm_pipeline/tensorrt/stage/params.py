"""The parameters of stages: one frozen class for each, from which everything else about its parameters is derived.

The class of a stage defines its part of the fingerprint (`key`), the content of job.json (`to_json`, `load`), its
program's input (attributes), the keys of a matrix's settings, and its command's options. Standard library only: workers
import it. No `from __future__ import annotations` in modules that define such classes: types of fields are read.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, overload

from trtllm_pipeline.base import Json
from trtllm_pipeline.measure import ImagesAsked, windows

T = TypeVar("T")
ITSELF = "."
"""For `Param.key_with`: the parameter's own field."""
Scalar = bool | int | float | str
Option = Scalar | list[Any]
"""One or several values of another program's option."""

MOST_IN_FLIGHT = 65_536
MOST_RATE = 1e6
"""In requests per second."""
MOST_REQUESTS = 1_000_000
"""Maximum requests of a level and of its warm-up, and maximum synthetic prompts."""
MOST_REPEATS = 1_000
MOST_PROCESSES = 1_024
MAX_TOKENS: Final = 128
"""Output tokens of a request, if nothing else determines them."""
MOST_TOKENS = 10_000_000
"""Maximum tokens of a prompt and of an answer: event files hold no more."""


@dataclass(frozen=True, slots=True)
class Param:
    """Properties of a parameter besides type and default: of a field (`param`), or of a shared type (Annotated)."""

    help: str
    """A phrase that starts with a small letter, without a full stop."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    null: str = ""
    """The meaning of None."""
    choices: tuple[str, ...] = ()
    """The form of a text, if its type does not define it."""
    runtime: bool = False
    """Cannot change the result, and stays out of the key: ports, timeouts."""
    key_with: str = ""
    """In the key and in job.json only if the field of this name is set: neither None nor empty."""
    later: bool = False
    """Added after keys were in use: in the key and in job.json only if it differs from its default."""
    key_without: str = ""
    """In the key only if the field of this name is None."""
    empty: bool = False
    """An empty list is allowed, although None is too."""
    of_matrix: bool = False
    """Set by a matrix only. The stage's command has no option for it."""


IfSet = partial(Param, key_with=ITSELF)
"""A parameter that is in the key only if it is set."""


@overload
def param(text: str, default: T, **about: Any) -> T: ...
@overload
def param(text: str, **about: Any) -> Any: ...
def param(text: str, default: Any = MISSING, *, kind: type[Param] = Param, **about: Any) -> Any:
    """A field for one parameter, whose help is `text`. Without a default it is required. `about` is as in `Param`."""
    metadata = {"about": kind(text, **about)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def if_set(text: str, default: T, **about: Any) -> T:
    """A parameter that is in the key only if it is set."""
    return param(text, default, key_with=ITSELF, **about)


def later(text: str, default: T, **about: Any) -> T:
    """A parameter that was added after keys were in use."""
    return param(text, default, later=True, **about)


class Parameters:
    """Parameters of a stage. Each class of them is a frozen dataclass with keyword-only fields."""

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent values."""


class ParamField(NamedTuple):
    """One parameter of a class."""

    name: str
    type: Any
    """Type without None."""
    optional: bool
    """True if None is allowed."""
    default: Any
    """MISSING if it is required."""
    about: Param

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed texts. Empty if any text is allowed."""
        return get_args(self.type) if get_origin(self.type) is Literal else self.about.choices


@cache
def table(cls: Any) -> tuple[ParamField, ...]:
    """The parameters of a class, in their order."""
    rows = []
    for each in fields(cls):
        kind, about = each.type, each.metadata.get("about")
        if about is None:
            kind, about = get_args(kind)
        optional = get_origin(kind) in {Union, types.UnionType} and type(None) in get_args(kind)
        if optional:
            (kind,) = (part for part in get_args(kind) if part is not type(None))
        default = each.default if each.default_factory is MISSING else each.default_factory()
        rows.append(ParamField(each.name, kind, optional, default, about))
    return tuple(rows)


def key(given: Any) -> dict[str, Json]:
    """The parameters' part of a key: all that can change the result."""
    return _json(given, runtime=False)


def to_json(given: Any) -> dict[str, Json]:
    """All parameters, in the form that `load` reads."""
    return _json(given, runtime=True)


def _json(given: Any, *, runtime: bool) -> dict[str, Json]:
    written: dict[str, Json] = {}
    for name, _, _, default, about in table(given.__class__):
        value = getattr(given, name)
        if about.later:
            unset = value == default
        else:
            condition = name if about.key_with == ITSELF else about.key_with
            unset = bool(condition) and getattr(given, condition) in (None, (), {})
        left_out = about.runtime or (about.key_without and getattr(given, about.key_without) is not None)
        if unset or (left_out and not runtime):
            continue
        if isinstance(value, Parameters):
            value = _json(value, runtime=runtime)
        written[name] = list(value) if isinstance(value, tuple) else value
    return written


def class_name(given: Any) -> str:
    """The "module:class" of parameters, for a worker."""
    return f"{type(given).__module__}:{type(given).__qualname__}"


def load(cls: Callable[..., T], *sources: Mapping[str, Any]) -> T:
    """An object of `cls`: each parameter from the first of `sources` that has it, lists converted to tuples.

    Other keys are ignored. Raises TypeError if a parameter without a default is missing.
    """
    names, converters = _read(cls)
    values: dict[str, Any] = {}
    for source in reversed(sources):
        values.update({name: source[name] for name in names if name in source})
    for name, convert in converters:
        if values.get(name) is not None:
            values[name] = convert(values[name])
    return cls(**values)


@cache
def _read(cls: Any) -> tuple[tuple[str, ...], tuple[tuple[str, Callable[[Any], Any]], ...]]:
    """All names, and the converters of those whose JSON form differs from their type."""

    def nested(kind: Any) -> Callable[[Any], Any]:
        return lambda value: value if isinstance(value, kind) else load(kind, value)

    converters: list[tuple[str, Callable[[Any], Any]]]
    converters = [(each.name, tuple) for each in table(cls) if get_origin(each.type) is tuple]
    converters += [(each.name, nested(each.type)) for each in table(cls) if is_dataclass(each.type)]
    return tuple(each.name for each in table(cls)), tuple(converters)


# ------------------------------------------------------------------------------------- stages of every toolchain

Beside = Annotated[
    Literal["gpu", "none", "control"] | None,
    IfSet(
        "what may run at the same time: other measurements on separate GPUs, or anything; control: nothing, on the CPUs that "
        "it shares with them",
        null="nothing",
        of_matrix=True,
    ),
]
Frontend = Literal["triton", "trtllm_serve", "triton_openai", "disaggregated"]
OPENAI_SERVERS: Final[tuple[str, ...]] = ("vllm", "sglang", "transformers", "llama_cpp")
"""OpenAI-compatible servers whose command lines are known."""
Objectives = dict[Literal["ttft_ms", "tpot_ms", "e2e_ms"], float]
"""Latency limits for a request."""
StopMetric = Literal[
    "output_tps",
    "input_tps",
    "rps",
    "ttft_mean",
    "ttft_p50",
    "ttft_p99",
    "tpot_mean",
    "tpot_p50",
    "tpot_p99",
    "itl_p50",
    "itl_p99",
    "e2e_mean",
    "e2e_p50",
    "e2e_p99",
]
"""Metrics of a level whose intervals can end a measurement."""
Precisions = dict[StopMetric, float]
"""Metric of a level -> target half-width of its interval, as a share of its value."""


Form = Literal["model", "draft", "adapter", "tokenizer"]
"""The content of a directory: a model with its tokenizer, a draft model, which may lack one, a LoRA adapter, or a model
without its weights."""
LoraNames = Annotated[tuple[str, ...], IfSet("names of the LoRA adapters, in the order of --adapter, --adapter2, ...")]
Speculation = Literal["draft", "eagle3", "mtp", "ngram", "sa", "pard", "dflash", "medusa", "lookahead", "eagle"]
"""The source of drafts: another model; an EAGLE-3 head on the model's own states; the model's own extra layers; the text so
far, by a table (ngram) or a suffix automaton (sa); a model that drafts all tokens in one pass (pard), or one that also reads the
model's states (dflash); heads on the last state (Medusa); the model itself, ahead (lookahead); or an EAGLE head."""
HeadMethod = Literal["eagle3", "medusa", "eagle"]
"""Methods that draft with heads trained for the model."""
WITH_DRAFT_MODEL: Final[frozenset[str]] = frozenset(("draft", "eagle3", "pard", "dflash", "medusa", "eagle"))
"""Methods that need a separate model."""
DRAFT_LENGTHS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("draft", "eagle3", "ngram", "sa", "pard", "dflash"), 3),
    "mtp": 1,
    "medusa": 63,
    "eagle": 63,
}
"""Default number of tokens drafted at a time. For lookahead it follows from its sizes."""


@dataclass(frozen=True, kw_only=True)
class DownloadParams(Parameters):
    """Parameters of the download stage."""

    source: dict[str, Any] = param("source as in a recipe, pinned to a revision or digest", key_without="content")
    content: dict[str, str] | None = if_set(
        "digest of each file that is read, by name: SHA-256, of a local source BLAKE3",
        None,
        null="not known before the download",
    )
    form: Form | None = if_set("content to download", None, null="a whole model")
    folder: str | None = param("path of a local source", None, runtime=True)
    copies: list[dict[str, Any]] | None = param(
        "other sources on hubs, which continue if the first fails", None, null="none", runtime=True
    )
    quantization: str | None = param("required quantization of the weights", None, null="any", runtime=True)
    offline: bool = param("use only files on this machine, and fail if one is missing", False, runtime=True)
    max_workers: int = param("files fetched at a time", 4, ge=1, le=64, runtime=True)


@dataclass(frozen=True, kw_only=True)
class Selection(Parameters):
    """The part of a calibration set that is used, and its presentation."""

    samples: int | None = param("rows used, all of a smaller set", None, ge=1, null="all rows, up to 512")
    max_length: int = param("tokens kept of a row", 512, ge=1)
    seed: int = param("seed for choosing the rows", 0, ge=0)
    chat_template: bool = param("wrap each row as a user's turn of the model's chat template", False)
    column: str | None = if_set("column, or key, to read", None, null="text, input, text_input, messages or input_ids")


@dataclass(frozen=True, kw_only=True)
class LaunchParams(Parameters):
    """Parameters of every launch stage."""

    host: str = param(
        "address to listen on; any address but loopback is open to other machines", "127.0.0.1", runtime=True
    )
    http_port: int = param("port of HTTP; 0 uses a free one", 0, ge=0, le=65535, runtime=True)
    grpc_port: int = param("port of gRPC; 0 uses a free one", 0, ge=0, le=65535, runtime=True)
    metrics_port: int = param("port of metrics; 0 uses a free one", 0, ge=0, le=65535, runtime=True)
    ready_timeout_s: float = param("time limit from start to ready", 600.0, gt=0, le=1e9, runtime=True)
    stop_timeout_s: float = param(
        "time limit for a graceful shutdown, before the server is killed", 3.0, gt=0, le=1e9, runtime=True
    )
    restarts: int = param("restarts of a server that died", 3, ge=0, runtime=True)
    exclusive: Beside = None


@dataclass(frozen=True, kw_only=True)
class LaunchEmbedded(LaunchParams):
    """Parameters of the embedded toolchain's launch stage."""

    threads: int = param("CPU threads of the embedded runtime; 0 means one per core", 0, ge=0, le=4096)


@dataclass(frozen=True, kw_only=True)
class LaunchFrontend(LaunchParams):
    """Parameters of TensorRT-LLM's launch stages."""

    frontend: Frontend = param(
        "server: Triton, TensorRT-LLM's OpenAI server trtllm-serve, the OpenAI front end of Triton's images, or servers of "
        "trtllm-serve for prompts and for generation behind a router",
        "triton",
    )


@dataclass(frozen=True, kw_only=True)
class OtherServer(Parameters):
    """An OpenAI-compatible server: a running one, or its command line."""

    url: str | None = if_set(
        "address of a running server, http://HOST:PORT; it is neither started nor stopped",
        None,
        null="none: a command starts it",
    )
    command: str | None = param(
        "command line of the server, with {model}, {port} and other placeholders", None, null="that of a known server"
    )
    options: dict[str, Option] = if_set(
        "additional options of the command, appended; a list gives an option several values", {}
    )
    environment: dict[str, Scalar] = if_set("environment variables of the server", {})
    served_name: str | None = if_set("model name in requests", None, null="that of the first model that it lists")
    endpoint: Literal["completions", "chat"] = param(
        "endpoint: bare prompts, or chats for servers that have nothing else", "completions"
    )
    ready_path: str | None = param(
        "path that returns status 200 when it is ready", None, null="/v1/models", runtime=True
    )
    gpus: int | None = param(
        "GPUs leased for it", None, ge=0, le=1024, null="one for each rank, if the machine has GPUs"
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOpenAi(OtherServer, LaunchParams):
    """Parameters of the launch stages of OpenAI-compatible servers."""

    server: str | None = if_set("known server whose command line is used", None, null="none", choices=OPENAI_SERVERS)
    lists_models: bool = param("it lists the models that it serves", True, of_matrix=True, runtime=True)
    version: str | None = param("version of the server", None, null="unknown until it starts", of_matrix=True)


GENERAL_PROMPT = "The capital of France is"


@dataclass(frozen=True, kw_only=True)
class CheckParams(Parameters):
    """First prompt to a new engine, without a server. Only the stage check of TensorRT-LLM engines reads it."""

    prompt: str = param("prompt of the check", GENERAL_PROMPT)
    max_tokens: int = param("length of the answer", 8, ge=1, le=MOST_TOKENS)


@dataclass(frozen=True, kw_only=True)
class SmokeParams(Parameters):
    """Parameters of the smoke stage."""

    prompt: str = param("prompt of the check", GENERAL_PROMPT)
    max_tokens: int = param("length of the answer", 16, ge=1, le=MOST_TOKENS)
    expected: str | None = param("text that the greedy answer must contain", None, null="any text passes")
    images: str | None = if_set(
        "synthetic images for one more prompt, such as 1@64x64; with an engine, one for every prompt",
        None,
        null="no such prompt",
    )
    lora: str | None = if_set(
        "LoRA adapter of the compared answers; none is the model without one", None, null="the first"
    )
    lora_names: LoraNames = ()
    max_seq_len: int | None = param(
        "maximum tokens of prompt and output together, if no engine specifies it", None, ge=1, runtime=True
    )
    request_timeout_s: float = param("time limit of one request", 120.0, gt=0, le=1e9, runtime=True)


@dataclass(frozen=True, kw_only=True)
class PerfParams(Parameters):
    """Parameters of the perf stage."""

    concurrency: tuple[int, ...] | None = param(
        "requests in flight, one level after the other",
        None,
        ge=1,
        le=MOST_IN_FLIGHT,
        null="1, 4, 16 ... up to the batch size, 1 if that is unknown; none with request_rate or trace_speed",
        empty=True,
    )
    request_rate: tuple[float, ...] = if_set(
        "requests per second on average, with any number in flight; levels after those of concurrency",
        (),
        gt=0,
        le=MOST_RATE,
    )
    request_distribution: Literal["poisson", "constant", "gamma"] = param(
        "arrivals of a request rate: random (independent users), evenly spaced, or with burstiness",
        "poisson",
        key_with="request_rate",
    )
    burstiness: float = later(
        "shape of request_distribution gamma: below 1 in bursts, above 1 more even", 1.0, gt=0, le=1e6
    )
    trace_speed: tuple[float, ...] = if_set(
        "replay the input data at its own times (timestamp), this many times as fast; 1 is as recorded; levels after those of "
        "request_rate",
        (),
        gt=0,
        le=MOST_RATE,
    )
    slo: Objectives | None = if_set(
        "report goodput, the share of requests that meet all of these: ttft=300ms,tpot=40ms", None
    )
    requests: int | None = param(
        "requests measured at each level; at least three for each in flight",
        None,
        ge=1,
        le=MOST_REQUESTS,
        null=f"{windows.DEFAULT_REQUESTS_EACH} for each in flight, at least {windows.DEFAULT_LEAST_REQUESTS}",
    )
    level_budget_s: float | None = later(
        "time after which a level starts no further request; requests in flight end normally [s]",
        None,
        gt=0,
        le=1e9,
        null=f"{windows.DEFAULT_BUDGET_S:g} s, or no limit if requests is given",
    )
    warmup_requests: int | None = param(
        "requests before each level, not measured",
        None,
        ge=0,
        le=MOST_REQUESTS,
        null="two for each in flight, 4 for a request rate",
    )
    max_tokens: int | None = param(
        "output tokens of a request whose prompt does not set them",
        None,
        ge=1,
        le=MOST_TOKENS,
        null=f"the output length that the engine was built for, {MAX_TOKENS} if that is unknown",
    )
    temperature: float = param("temperature; 0 is greedy", 0.0, ge=0, le=100)
    workload: Literal["prompts", "isl_osl"] | None = later(
        "prompts: rows of the input data as they are; isl_osl: prompts of exactly the given input length, rows cut or "
        "padded, or synthetic text, with outputs of exactly the given length",
        None,
        null="isl_osl; prompts with input data and no lengths, or without a known length and tokenizer",
    )
    input_tokens: int | None = later(
        "(isl_osl) mean prompt length",
        None,
        ge=1,
        le=MOST_TOKENS,
        null="the input length that the engine was built for",
    )
    ignore_eos: bool | None = later(
        "generate exactly the requested output tokens, past the model's own end, by the inputs that the server has for it",
        None,
        null="yes with isl_osl, if the server has such inputs",
    )
    input_tokens_stddev: float = later("(isl_osl) standard deviation of prompt lengths", 0.0, ge=0, le=MOST_TOKENS)
    output_tokens_stddev: float = later("(isl_osl) standard deviation of answer lengths", 0.0, ge=0, le=MOST_TOKENS)
    shared_prefix_tokens: int = later("(isl_osl) tokens of the prefix that prompts share", 0, ge=0, le=MOST_TOKENS)
    shared_prefixes: int = later("(isl_osl) number of shared prefixes, used round-robin", 1, ge=1, le=MOST_REQUESTS)
    turns: int = later(
        "requests of a conversation, each sent after the previous answer; with isl_osl the last one has the whole length, "
        "with input data it is the maximum number of turns",
        1,
        ge=1,
        le=1_000,
    )
    turn_delay_s: float = later("seconds between an answer and the next turn of its conversation", 0.0, ge=0, le=1e6)
    num_prompts: int | None = later(
        "number of prompts, or conversations: the first rows of the input data, or synthetic ones",
        None,
        ge=1,
        le=MOST_REQUESTS,
        null="all rows of the input data; one synthetic prompt for each request",
    )
    too_long: Literal["fail", "skip"] | None = later(
        "action if rows of the input data do not fit the engine", None, null="skip for requests of a trace, else fail"
    )
    top_k: int | None = later("number of tokens that sampling chooses from", None, ge=1, null="the server's own")
    top_p: float | None = later(
        "total probability of the tokens that sampling chooses from", None, gt=0, le=1, null="the server's own"
    )
    stop_words: tuple[str, ...] = later("texts that end an answer, for prompts without their own", ())
    extra_inputs: dict[str, Any] = later(
        "additional inputs of every request, by the server's names, such as repetition_penalty", {}
    )
    random_seed: int = later("seed of arrival times, synthetic prompts and sampling", 0, ge=0, le=2**31)
    warmup: Literal["count", "flat"] = later(
        "count: this many requests before each level; flat: at least as many, until the time to first token stops "
        "falling, eight times as many at most",
        "count",
    )
    measurement_interval_ms: float | None = later(
        "duration of each level [ms], instead of requests", None, gt=0, le=1e9, null="requests"
    )
    max_in_flight: int | None = later(
        "maximum requests in flight of a request rate; a server that falls behind counts as saturated",
        None,
        ge=1,
        le=MOST_IN_FLIGHT,
        null="no limit",
    )
    stop_when: Precisions = later(
        "repeat until the 95% intervals of these metrics are this narrow, to either side: output_tps=3%", {}
    )
    max_repeats: int = later("maximum repeats with stop_when", 20, ge=1, le=MOST_REPEATS)
    budget_s: float | None = later(
        "time after which no further repeat, or rate, starts [s]",
        None,
        gt=0,
        le=1e9,
        null="max_repeats is the only limit",
    )
    find_rate: float | None = later(
        "search for the highest request rate at which this share of requests meets slo, such as 0.95; needs 300 requests",
        None,
        gt=0,
        le=1,
        null="no search",
    )
    find_concurrency: float | None = later(
        "search for the most requests in flight at which this share of requests meets slo, such as 0.95, up to saturation",
        None,
        gt=0,
        le=1,
        null="no search",
    )
    images: str | None = if_set(
        "synthetic images for each request, COUNT@WIDTHxHEIGHT such as 1@512x512", None, null="none"
    )
    lora: str | None = if_set(
        "LoRA adapter of requests; none is the model without one", None, null="all of them, in turn"
    )
    lora_names: LoraNames = ()
    protocol: Literal["grpc", "http"] = param("protocol of requests; both support streaming", "grpc")
    repeats: int = param(
        "runs of the whole list of levels, on one server; they determine the intervals", 1, ge=1, le=MOST_REPEATS
    )
    declared: dict[str, Any] = param("required settings of the server", {})
    dcgm_url: tuple[str, ...] = if_set(
        "DCGM exporters of the server's GPUs, such as http://HOST:9400/metrics, for power, energy, memory and load of GPUs "
        "on other machines",
        (),
    )
    dcgm_gpus: tuple[int, ...] = param(
        "GPUs of each machine to read from dcgm_url, by index; empty means all", (), ge=0, le=1_000, key_with="dcgm_url"
    )
    exclusive: Beside = None
    request_timeout_s: float = param("time limit of one request", 300.0, gt=0, le=1e9, runtime=True)

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent values."""
        for wrong in conflicts(self):
            raise ValueError(wrong)
        if self.images is not None:
            ImagesAsked.parse(self.images)


def too_many(interval_s: float, rate: float) -> str | None:
    """Why a rate cannot be offered for this long: requests are planned before they are sent. None if it can."""
    requests = round(interval_s * rate)
    if requests <= MOST_REQUESTS:
        return None
    return f"{interval_s:g} s at {rate:g} requests a second are {requests:,} requests, {MOST_REQUESTS:,} at most"


def conflicts(perf: Any) -> Iterator[str]:
    """The inconsistencies of perf's parameters or settings."""
    searches = {name: getattr(perf, name) for name in ("find_rate", "find_concurrency")}
    opened = perf.request_rate or perf.trace_speed
    if perf.concurrency is not None and not perf.concurrency and not opened and not any(searches.values()):
        yield "needs a concurrency, a request_rate, a trace_speed, find_rate or find_concurrency"
    if perf.max_in_flight is not None and not opened and perf.find_rate is None:
        yield "max_in_flight needs a request_rate or trace_speed: concurrency already limits the requests in flight"
    if perf.burstiness != 1 and perf.request_distribution != "gamma":
        yield f"burstiness needs request_distribution: gamma; {perf.request_distribution} does not use it"
    if perf.trace_speed and fixed_lengths(perf, getattr(perf, "input_data", "")):
        yield "trace_speed needs input_data with timestamps, and none of the lengths of workload: isl_osl"
    for name, share in searches.items():
        if share is not None and not perf.slo:
            yield f"{name} needs slo: the load is the highest that keeps it"
    if perf.find_rate is not None and perf.measurement_interval_ms is None and perf.requests is not None:
        from trtllm_pipeline.measure import objectives

        if perf.requests < objectives.LEAST_SEARCHED:
            yield (
                f"find_rate needs requests: {objectives.LEAST_SEARCHED} or more, better 1500, or a measurement_interval_ms: "
                f"{perf.requests} requests end before a queue builds up, so any rate seems sustainable"
            )
    for rate in perf.request_rate if perf.measurement_interval_ms is not None else ():
        if (wrong := too_many(perf.measurement_interval_ms / 1e3, rate)) is not None:
            yield f"measurement_interval_ms: {wrong}"
    if not perf.temperature and (perf.top_k or perf.top_p):
        yield "top_k and top_p choose nothing at temperature 0, which is greedy"
    if perf.workload == "prompts":
        for name in _LENGTHS:
            if getattr(perf, name, None):
                yield f"{name} needs workload: isl_osl"
    elif perf.stop_words and perf.ignore_eos is not False and fixed_lengths(perf, getattr(perf, "input_data", "")):
        yield "stop_words end answers before the length that workload: isl_osl requires; ignore_eos: false allows it"


_LENGTHS: Final = (
    "input_tokens",
    "input_tokens_stddev",
    "output_tokens_stddev",
    "shared_prefix_tokens",
    "lengths_data",
)
"""Parameters that give lengths."""


def fixed_lengths(perf: Any, input_data: object) -> bool:
    """True if prompts have given lengths. `perf` are perf's parameters or settings, `input_data` the user's prompts or None."""
    if perf.workload is not None:
        return bool(perf.workload == "isl_osl")
    return input_data is None or any(getattr(perf, name, None) for name in _LENGTHS)


@dataclass(frozen=True, kw_only=True)
class ScoreParams(Parameters):
    """Parameters of the score stage."""

    metrics: tuple[str, ...] = param(
        "metrics: exact, contains, regex, numeric, choice, rouge_l, chrf, or MODULE:FUNCTION of your own Python",
        ("exact", "contains"),
    )
    min_score: float | None = param(
        "minimum mean score of the first metric; below it the stage fails", None, ge=0, le=1
    )


@dataclass(frozen=True, kw_only=True)
class AccuracyParams(ScoreParams):
    """Parameters of the accuracy stage."""

    max_tokens: int = param("length of the greedy answers", 32, ge=1, le=MOST_TOKENS)
    lora: str | None = if_set(
        "LoRA adapter of the scored answers; none is the model without one",
        None,
        null="the adapter of perf, else the only one",
    )
    lora_names: LoraNames = ()
    images: str | None = if_set("synthetic image for each question without one, such as 1@384x384", None, null="none")
    concurrency: int = param("requests in flight", 4, ge=1, le=MOST_IN_FLIGHT, runtime=True)
    request_timeout_s: float = param("time limit of one request", 300.0, gt=0, le=1e9, runtime=True)


TASK_FILE: Final = "task "
"""Start of the names of a stage's files that are tasks of the user, before their path in the directory of tasks."""


def task_conflicts(accuracy: Any) -> Iterator[str]:
    """The inconsistencies of the settings of accuracy."""
    given = {"answers": "own", "input_data": "builtin:accuracy", "lora": None}
    of_tasks = ("num_fewshot", "task_endpoint", "include_path")
    if not accuracy.tasks:
        yield from (f"{name} needs tasks" for name in of_tasks if getattr(accuracy, name) is not None)
        return
    for name, default in given.items():
        if getattr(accuracy, name) != default:
            yield f"tasks bring their own questions: remove {name}"
    names = [task.partition(":")[0] for task in accuracy.tasks]
    yield from (f"task {name} is given twice" for name in dict.fromkeys(names) if names.count(name) > 1)


@dataclass(frozen=True, kw_only=True)
class TaskParams(Parameters):
    """Parameters of the tasks stage."""

    tasks: tuple[str, ...] = param(
        "standard tasks of lm-evaluation-harness: names of tasks or groups, or NAME:LIMIT, such as mmlu:200", ()
    )
    num_fewshot: int | None = if_set(
        "(tasks) examples before each question", None, ge=0, le=1000, null="the task's own"
    )
    task_endpoint: Literal["completions", "chat"] | None = if_set(
        "(tasks) endpoint: chat puts each question into the model's chat template",
        None,
        null="completions, or chat for servers that have nothing else",
    )
    min_score: float | None = param(
        "minimum of the first task's first score; below it the stage fails", None, ge=0, le=1
    )
    max_length: int = param("tokens of a prompt and its answer, for likelihoods", 2048, ge=1, of_matrix=True)
    version: str | None = param("release of lm-evaluation-harness", None, null="unknown", of_matrix=True)
    concurrency: int = param("requests in flight", 4, ge=1, le=MOST_IN_FLIGHT, runtime=True)
    request_timeout_s: float = param("time limit of one request", 300.0, gt=0, le=1e9, runtime=True)


SECTIONS: Final[Mapping[str, type]] = {"check": CheckParams}
"""Sections of a matrix's settings that are a class of parameters, `timeout_s` and `retries`. The docstring of the class describes
the section. `orchestrate/matrix/models.py` has the sections with other keys."""
