"""Runs an engine directory: llama.cpp with in-flight batching. The interface uses token ids.

One `Runtime` holds one engine and `max_batch_size` slots. Requests join and leave the running batch at any step. There is
no text: prompts arrive as ids, and ids are returned one `Event` at a time, on a thread of the runtime.

Features that llama.cpp lacks are added between *segments*. A request is a chain of completions, each of which continues
the last one. A new segment starts if `min_length` is reached, if a bad word has to be removed (its last token is then
forbidden for one step, as in TensorRT-LLM), or if llama.cpp stops at a token that does not end this request.

The vocabulary in the GGUF must mark every token that is not whole characters as a control token: llama.cpp holds tokens
back while its own text ends within a character and would then not report their ids.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from trtllm_pipeline.base import FailureClass, ServerError
from trtllm_pipeline.base import model as machines
from trtllm_pipeline.models import Fields, ModelFileError
from trtllm_pipeline.tensorrt.embedded.params import CHUNK_TOKENS

if TYPE_CHECKING:
    from typing_extensions import Self

MODEL_FILE: Final = "model.gguf"
CONFIG_FILE: Final = "config.json"
_SEPARATORS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in guided JSON. Small models that may choose it write little else."""
_MOST_SCHEMAS: Final = 1024
MOST_TOP_LOG_PROBS: Final = 20
ONE_THREAD_BYTES: Final = 32 << 20
"""Below this file size a second thread costs more in barriers than it gains."""


class RequestError(ValueError):
    """A request that this engine cannot serve. The message is for the client."""


class Finish(str, Enum):
    """Why a request ended."""

    LENGTH = "length"
    END_ID = "end_id"
    STOP_WORDS = "stop_words"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one request, under TensorRT-LLM's names and with its defaults: greedy, seed 0."""

    temperature: float = 1.0
    top_k: int = 0
    """0 means no limit, or greedy if `top_p` is 0 as well."""
    top_p: float = 0.0
    """0 means no limit."""
    random_seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_length: int = 0
    """Minimum number of tokens before `end_id`."""
    end_id: int | None = None
    """Ends the request. Not part of the output."""
    stop_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end the request. They are part of the output."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated."""
    return_log_probs: bool = False
    top_log_probs: int = 0
    """Number of most likely tokens to return at each position."""
    json_schema: str | None = None
    """JSON text: the output is JSON that this schema accepts."""

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.top_k == 1 or self.temperature == 0 or (self.top_k == 0 and self.top_p == 0)


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a request: a token, an end, or both at once. `error` is set if `finish` is ERROR."""

    token: int | None = None
    log_prob: float | None = None
    """Natural logarithm of the token's probability under the unchanged model distribution."""
    finish: Finish | None = None
    error: str | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at this position, with their log probabilities."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that an engine was built for, in requests and tokens."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int

    @staticmethod
    def read(engine: Path) -> Limits:
        """The limits in an engine directory's config. Raises ServerError if it is not an engine directory."""
        try:
            build = Fields.read(engine, CONFIG_FILE).fields("build_config")
            length = build.integer("max_seq_len")
            return Limits(
                build.integer("max_batch_size"),
                build.integer("max_input_len", length),
                length,
                build.integer("max_num_tokens", CHUNK_TOKENS),
            )
        except ModelFileError as error:
            raise ServerError(
                f"{engine} is not an engine directory: {error.short}", hint="build it with `pipeline stage build`"
            ) from error

    def check(self, input_tokens: int, output_tokens: int) -> None:
        """Raise RequestError for a request beyond these limits."""
        if input_tokens == 0:
            raise RequestError("the prompt has no tokens; send at least one")
        if output_tokens < 1:
            raise RequestError(f"request_output_len is {output_tokens}; it must be at least 1")
        if input_tokens > self.max_input_len:
            raise RequestError(
                f"a prompt of {input_tokens} tokens exceeds the engine's max_input_len {self.max_input_len}"
            )
        if input_tokens + output_tokens > self.max_seq_len:
            raise RequestError(
                f"{input_tokens} prompt tokens + {output_tokens} output tokens exceed the engine's max_seq_len "
                f"{self.max_seq_len}"
            )


@dataclass(slots=True)
class Generation:
    """A submitted request. `cancel` may be called from any thread. The end arrives as an event like any other."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    on_event: Callable[[Event], None]
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cancelled: bool = False
    rejected: set[int] = field(default_factory=set)
    """Tokens that would complete a bad word at the next position."""
    cached_tokens: int = 0
    """Number of prompt tokens with a cached KV. Set shortly after a request that ended by its length."""

    def cancel(self) -> None:
        """Stop with the next token, or before the request starts."""
        self.cancelled = True

    def end(self, finish: Finish, *, error: str | None = None) -> None:
        """Finish without a further token."""
        self.finish = finish
        self.on_event(Event(finish=finish, error=error))

    def accept(self, token: int, log_prob: float | None, top: tuple[tuple[int, float], ...] = ()) -> bool:
        """Process one sampled token. False means that this segment must not continue."""
        if self.cancelled:
            self.end(Finish.CANCELLED)
            return False
        if token == self.sampling.end_id:
            self.end(Finish.END_ID)
            return False
        if _ends_with_any(self.tokens, token, self.sampling.bad_words):
            self.rejected.add(token)
            return False
        stopped = _ends_with_any(self.tokens, token, self.sampling.stop_words)
        self.tokens.append(token)
        self.rejected.clear()
        if stopped:
            self.finish = Finish.STOP_WORDS
        elif len(self.tokens) >= self.max_tokens:
            self.finish = Finish.LENGTH
        self.on_event(Event(token, log_prob, self.finish, top=top))
        return self.finish is not Finish.STOP_WORDS  # a segment ends at its length anyway


class Runtime:
    """One loaded engine. A context manager: `close` ends all requests and frees everything."""

    def __init__(
        self,
        engine: Path,
        *,
        threads: int = 0,
        enable_kv_cache_reuse: bool = False,
        kv_cache_type: Literal["f16", "f32"] = "f16",
    ) -> None:
        """Load `engine`. `threads` 0 means one for tiny models and the physical cores for others.

        Raises ServerError if the directory is not an engine, the runtime is not installed, or loading fails.
        """
        # llama.cpp's threads synchronize hundreds of times per token. By default they spin long while they wait. If
        # another program needs a core (Triton, the client), all wait for a thread that is not running, and only a tenth
        # of the speed is left. Without spinning, an idle machine runs at half speed. A short spin is near the best of
        # both.
        os.environ.setdefault("GOMP_SPINCOUNT", "300")
        try:
            import xllamacpp
        except ImportError as error:
            raise ServerError(
                f"the llama.cpp runtime cannot be imported: {error}",
                failure=FailureClass.USER,
                hint="pip install 'trtllm-pipeline[embedded]'",
            ) from error
        self.limits = Limits.read(engine)
        self._reuse = enable_kv_cache_reuse
        model = engine / MODEL_FILE
        if not model.is_file():
            raise ServerError(f"{engine} has no {MODEL_FILE}", hint="build it with `pipeline stage build`")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.model_alias = {"engine"}
        params.n_parallel = self.limits.max_batch_size
        params.kv_unified = False
        params.n_ctx = self.limits.max_batch_size * self.limits.max_seq_len
        # A step first computes one token of every running request and then adds prompt tokens.
        params.n_batch = max(min(self.limits.max_num_tokens, CHUNK_TOKENS), 2 * self.limits.max_batch_size)
        params.n_ubatch = params.n_batch
        cache_type = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv_cache_type.upper()}")
        params.cache_type_k = params.cache_type_v = cache_type
        if kv_cache_type == "f32":
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.threads = threads or (1 if model.stat().st_size < ONE_THREAD_BYTES else physical_cores())
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        # No state is kept between requests unless requested: it would speed up repeated prompts.
        params.cache_prompt = enable_kv_cache_reuse
        params.cache_ram_mib = 0
        params.cache_idle_slots = False
        params.n_ctx_checkpoints = 0
        params.fit_params = False
        params.ui = params.endpoint_slots = params.endpoint_props = False
        params.endpoint_metrics = True
        params.verbosity = 1  # errors
        # The library requires an HTTP listener. It gets a socket in a directory that is removed right after.
        with tempfile.TemporaryDirectory(prefix="trtllm-pipeline-") as folder:
            params.hostnames = [f"{folder}/closed.sock"]
            params.n_threads_http = 1
            try:
                self._server: Any = xllamacpp.Server(params)
            except (RuntimeError, ValueError, OverflowError) as error:
                raise ServerError(
                    f"llama.cpp cannot load {model} with {self.limits.max_batch_size} slots of "
                    f"{self.limits.max_seq_len} tokens; the log has its message",
                    hint="a smaller max_batch_size or max_seq_len needs less memory",
                ) from error
        # The library's loop sends this response, so it has started. Ending it before has no effect, and `close` would
        # wait forever.
        self._server.handle_metrics()
        self._pool = ThreadPoolExecutor(self.limits.max_batch_size, thread_name_prefix="generation")
        self._lock = threading.Lock()
        self._generations: dict[int, Generation] = {}
        self._followed: set[str] = set()
        """JSON schemas that llama.cpp can follow."""

    def check(self, input_tokens: int, output_tokens: int, sampling: Sampling) -> None:
        """Raise RequestError for a request that cannot be served."""
        self.limits.check(input_tokens, output_tokens)
        _check(sampling)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, on_event: Callable[[Event], None]
    ) -> Generation:
        """Queue a request and return at once. Events arrive in order on another thread.

        The last event has `finish` set. Raises RequestError for a request beyond the engine's limits.
        """
        self.check(len(prompt), max_tokens, sampling)
        generation = Generation(tuple(prompt), max_tokens, sampling, on_event)
        with self._lock:
            self._generations[id(generation)] = generation
        self._pool.submit(self._run, generation)
        return generation

    def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = Sampling()
    ) -> tuple[list[int], list[float | None], Finish]:
        """Run one request to its end: its tokens, their log-probs (None unless requested), and its finish reason."""
        events: SimpleQueue[Event] = SimpleQueue()
        self.submit(prompt, max_tokens, sampling, events.put)
        tokens: list[int] = []
        log_probs: list[float | None] = []
        while True:
            event = events.get()
            if event.token is not None:
                tokens.append(event.token)
                log_probs.append(event.log_prob)
            if event.finish is Finish.ERROR:
                raise ServerError(str(event.error))
            if event.finish is not None:
                return tokens, log_probs, event.finish

    def close(self) -> None:
        """Cancel running requests, wait for them, join all threads and free the engine. A second call has no effect."""
        with self._lock:
            for generation in self._generations.values():
                generation.cancel()
        self._pool.shutdown(wait=True)
        self._server = None  # its destructor joins llama.cpp's threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self, generation: Generation) -> None:
        try:
            self._check_schema(generation.sampling)
            while generation.finish is None:
                if generation.cancelled:
                    generation.end(Finish.CANCELLED)
                else:
                    self._segment(generation)
        except Exception as error:  # noqa: BLE001  the client must get every error
            if generation.finish is None:
                generation.end(Finish.ERROR, error=f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._generations.pop(id(generation), None)

    def _check_schema(self, sampling: Sampling) -> None:
        """Raise RequestError for a JSON schema that llama.cpp cannot follow: it would ignore it.

        JSON never starts with the end token. If that is the first token when it is made the most likely one, nothing forbids it.
        """
        schema = sampling.json_schema
        if schema is None or schema in self._followed:
            return
        first: list[Mapping[str, Any]] = []

        def on_message(message: Mapping[str, Any]) -> bool:
            first.append(message)
            return False

        request = {
            "prompt": [sampling.end_id],
            "n_predict": 1,
            "stream": True,
            "verbose": True,
            "return_tokens": True,
            "logit_bias": [[sampling.end_id, 1000.0]],
            **sampler_settings(replace(sampling, top_k=1, top_log_probs=0), 0, self.limits.max_seq_len),
        }
        self._server.handle_completions(request, on_message)
        if "error" in first[0] or first[0]["__verbose"]["tokens"] == [sampling.end_id]:
            raise RequestError(
                "guided_decoding_guide_type json_schema: llama.cpp cannot follow this schema; its log has the reason"
            )
        if len(self._followed) >= _MOST_SCHEMAS:
            self._followed.clear()
        self._followed.add(schema)

    def _segment(self, generation: Generation) -> None:
        """One completion of llama.cpp, up to the next point where its settings have to change."""
        sampling, made = generation.sampling, len(generation.tokens)
        banned = set(generation.rejected)
        banned.update(word[0] for word in sampling.bad_words if len(word) == 1)
        count = 1 if generation.rejected else generation.max_tokens - made
        if sampling.end_id is not None and made < sampling.min_length:
            banned.add(sampling.end_id)
            count = min(count, sampling.min_length - made)
        request = {
            "prompt": [*generation.prompt, *generation.tokens],
            "n_predict": count,
            "stream": True,
            "verbose": True,
            "return_tokens": True,
            "cache_prompt": self._reuse or made > 0,
            "logit_bias": [[token, False] for token in sorted(banned)],
            **sampler_settings(sampling, made, self.limits.max_seq_len),
        }
        failure: list[BaseException] = []
        received = 0

        def on_message(message: Mapping[str, Any]) -> bool:
            # An exception must not pass through the library's C++ frames.
            nonlocal received
            try:
                if "error" in message:
                    raise ServerError(f"llama.cpp rejected the request: {message['error'].get('message')}")
                detail = message["__verbose"]
                if detail["stop"]:
                    if made == 0:
                        generation.cached_tokens = int(message["usage"]["prompt_tokens_details"]["cached_tokens"])
                    return False
                received += len(detail["tokens"])
                if received != detail["tokens_predicted"]:
                    raise ServerError(
                        "the engine's vocabulary has tokens that are parts of characters and not marked as control "
                        "tokens; convert and build this engine again"
                    )
                log_prob: float | None = None
                top: tuple[tuple[int, float], ...] = ()
                if sampling.return_log_probs or sampling.top_log_probs:
                    found = message["choices"][0]["logprobs"]["content"][-1]
                    log_prob = float(found["logprob"])
                    best = found["top_logprobs"][: sampling.top_log_probs]
                    top = tuple((int(each["id"]), float(each["logprob"])) for each in best)
                return not generation.accept(detail["tokens"][-1], log_prob, top)
            except Exception as error:  # noqa: BLE001
                failure.append(error)
                return True

        self._server.handle_completions(request, on_message)
        if failure:
            raise failure[0]
        if received == 0:
            raise ServerError("llama.cpp ended a request without a token")
        if sampling.json_schema is not None and generation.finish is None:  # the JSON is complete
            generation.end(Finish.END_ID)


def sampler_settings(sampling: Sampling, made: int, window: int) -> dict[str, Any]:
    """llama.cpp's sampler fields for one segment that starts after `made` tokens.

    Penalties look back over `window` tokens, including the prompt. The order (penalties, temperature, top-k, top-p) is
    TensorRT-LLM's. Each segment has a separate random stream, so that a request stays reproducible.
    """
    penalised = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
    settings: dict[str, Any] = {
        "samplers": ["penalties"] if penalised else [],
        "repeat_last_n": window if penalised else 0,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": (sampling.random_seed + made) % 0xFFFFFFFF,  # the last 32-bit value means a random seed
    }
    if sampling.return_log_probs or sampling.top_log_probs:
        settings["logprobs"] = max(1, sampling.top_log_probs)
    if sampling.json_schema is not None:
        settings["json_schema"] = {**json.loads(sampling.json_schema), "x-guidance": _SEPARATORS}
    if sampling.greedy:
        settings["samplers"].append("top_k")
        return {**settings, "top_k": 1, "temperature": 1.0}
    settings["samplers"] += ["temperature", "top_k", "top_p"]
    return {
        **settings,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p or 1.0,
        "min_p": 0.0,
    }


def physical_cores() -> int:
    """Cores that this process may use, by affinity mask and container quota. Hyper-threads count once."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        try:
            cores.add(
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
            )
        except OSError:
            cores.add(str(cpu))
    return machines.limited_by_quota(len(cores))


def _ends_with_any(tokens: Sequence[int], token: int, words: Sequence[Sequence[int]]) -> bool:
    """True if `tokens` followed by `token` ends with one of `words`."""
    return any(
        word[-1] == token and (len(word) == 1 or tuple(tokens[-(len(word) - 1) :]) == tuple(word[:-1]))
        for word in words
    )


def _check(sampling: Sampling) -> None:
    """Raise RequestError for values outside their range."""
    for name, valid, expected in (
        ("temperature", 0 <= sampling.temperature < math.inf, "a number of at least 0"),
        ("top_k", sampling.top_k >= 0, "at least 0"),
        ("top_p", 0 <= sampling.top_p <= 1, "between 0 and 1"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < math.inf, "a number above 0"),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), "a finite number"),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty), "a finite number"),
        ("min_length", sampling.min_length >= 0, "at least 0"),
        ("top_log_probs", 0 <= sampling.top_log_probs <= MOST_TOP_LOG_PROBS, f"between 0 and {MOST_TOP_LOG_PROBS}"),
    ):
        if not valid:
            raise RequestError(f"{name} is {getattr(sampling, name)}; it must be {expected}")
    if sampling.json_schema is not None:
        _check_guided(sampling)


def _check_guided(sampling: Sampling) -> None:
    """Raise RequestError for a request for JSON that needs several segments: each would start a new JSON value."""
    if sampling.min_length or sampling.bad_words or sampling.end_id is None:
        raise RequestError("guided decoding is not supported with min_length, bad_words or end_id -1; leave them out")
    try:
        schema = json.loads(sampling.json_schema or "")
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise RequestError("guided_decoding_guide is not a JSON object; expected a JSON schema")
