"""Evidence for the validity gates apart from the requests: settings read back, the roofline, a KV cache probe.

Three sources are compared: the matrix, the engine and repository, and the configuration that the server reports. All of
it goes into the event file. `measure/load/validity.py` evaluates it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trtllm_pipeline.base import FailureClass, Json, ServerError, StageError, running_since, user_files
from trtllm_pipeline.measure.client.triton import Client
from trtllm_pipeline.measure.load import counters
from trtllm_pipeline.measure.load.load import EventFile
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.target import AnyClient, Target
from trtllm_pipeline.measure.load.validity import POSSIBLE_REUSE, SURE_PAIRS
from trtllm_pipeline.models import Engine, Fields, model_config, model_names

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from tokenizers import Tokenizer

_ALWAYS: Final = frozenset({"max_batch_size", "decoupled", "max_queue_delay_microseconds"})
"""Fields whose default is meaningful. Triton fills in the others if a configuration omits them."""
_TRITONS_CHOICE: Final = frozenset({"kind", "gpus"})
_BUILD: Final = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")
PROBE_TOKENS: Final = 256
"""Length of a probe's prompt if the engine accepts it: long enough to detect a skipped prefill."""
PROBE_ANSWER_TOKENS: Final = 2
_CHARACTERS_PER_TOKEN: Final = 4
"""Rough value for English text, for probes without a tokenizer."""
_NOT_TOLD: Final = frozenset({"tp", "speculative", "weight_bits"})
"""Declared for the roofline and token counts. Engine and server do not report them under these names."""


@dataclass(frozen=True, slots=True)
class ExpectedServer:
    """Expected server configuration, verified against the server."""

    declared: Mapping[str, Json] = field(default_factory=dict)
    """Settings by TensorRT-LLM's names, e.g. `enable_kv_cache_reuse`. `tp` is the number of GPUs that read the weights."""
    engine: Path | None = None
    """The served engine: its config.json has limits and the size of the weights."""
    repository: Path | None = None
    """Its config.pbtxt files are compared with the configurations that the server reports."""
    by: str = "the matrix"
    """Source of `declared`."""

    @property
    def limits(self) -> Engine | None:
        """Limits of the served engine. None if its directory is unknown. Raises EngineError."""
        if self.engine is None or not self.engine.is_dir():
            return None
        longest = self.declared.get("max_seq_len")
        return Engine.read(self.engine, max_seq_len=longest if isinstance(longest, int) else None)

    @property
    def drafts(self) -> bool:
        """True with speculative decoding: TensorRT-LLM's servers then count accepted tokens."""
        return "speculative" in self.declared

    @property
    def without_reuse(self) -> bool:
        """True if KV cache reuse is declared off."""
        return self.declared.get("enable_kv_cache_reuse") is False


async def look(client: AnyClient, target: Target, claim: ExpectedServer, events: EventFile, at: str) -> None:
    """Record the state of the server at the "start" or "end" of a run. Must not run during timed requests.

    Raises StageError for an engine or repository that cannot be read.
    """
    pid = target.service.pid
    ready = all((await client.ready()).values())
    theirs = {} if target.service.started else {"started": False}
    events.write("server", at=at, pid=pid, since=None if pid is None else running_since(pid), ready=ready, **theirs)
    if not ready:
        return
    triton = client if isinstance(client, Client) else None
    if claim.declared or claim.engine or claim.repository:
        try:
            checks = await read_back(triton, claim)
        except (OSError, ValueError) as error:
            raise StageError(f"the settings of {claim.engine or claim.repository} cannot be read: {error}") from error
        known = {check.setting.rpartition(": ")[2] for check in checks}
        declared_settings = {name for name, value in claim.declared.items() if value is not None}
        events.write(
            "settings",
            at=at,
            checks=[check._asdict() for check in checks],
            unchecked=sorted(declared_settings - known - _NOT_TOLD),
        )
    if claim.without_reuse and triton is not None:
        events.write("reused_blocks", at=at, blocks=await reused_blocks(triton))
    if claim.engine is not None and target.service.started:
        from trtllm_pipeline.measure.load import roofline

        facts = {name: value for name in ("tp", "weight_bits") if isinstance(value := claim.declared.get(name), int)}
        limit = await asyncio.to_thread(roofline.limit, claim.engine, **facts)
        events.write("roofline", at=at, **asdict(limit))


async def reused_blocks(client: Client) -> float | None:
    """Number of KV cache blocks that the server has reused so far, by TensorRT-LLM's metric. None if not reported."""
    if client.service.metrics is None:
        return None
    page, _ = await counters.metrics_page(client.service.metrics)
    values = [
        value
        for name, labels, value in counters.samples(page or "")
        if name == "nv_trt_llm_kv_cache_block_metrics" and 'kv_cache_block_type="reused"' in labels
    ]
    return sum(values) if values else None


def probes(texts: Sequence[str], tokenizer: Tokenizer | None, *, longest: int | None) -> list[str]:
    """New prompts, concatenated from `texts`, of at most `longest` and PROBE_TOKENS tokens."""
    # Joining and cutting can change a token or two, and the server may add special ones.
    room = max(1, min(longest or PROBE_TOKENS, PROBE_TOKENS) - 8)
    made = []
    for number in range(SURE_PAIRS):
        text = f"{secrets.token_hex(4)} " + " ".join([*texts[number:], *texts[:number]])
        while (ends := _ends(text, tokenizer)) and len(ends) < room:
            text = f"{text} {text}"
        made.append(text[: ends[room - 1]] if len(ends) >= room else text)
    return made


def _ends(text: str, tokenizer: Tokenizer | None) -> Sequence[int]:
    """End position of each token in `text`, in characters."""
    if tokenizer is None:
        return range(_CHARACTERS_PER_TOKEN, len(text) + 1, _CHARACTERS_PER_TOKEN)
    return [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]


async def probe(
    client: AnyClient,
    target: Target,
    claim: ExpectedServer,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    events: EventFile,
) -> None:
    """Probe a cache that is declared off: send each of a few new prompts twice, with nothing else in flight.

    It stops when a TTFT does not fall: the gate only reports a cache if every prompt was faster.
    """
    engine = claim.limits
    longest = None if engine is None else engine.longest_prompt(PROBE_ANSWER_TOKENS)
    greedy = replace(target, temperature=0.0)
    session = client.session()
    for pair, text in enumerate(probes([prompt.text for prompt in prompts], tokenizer, longest=longest)):
        times: list[float] = []
        for send in (0, 1):
            answer = await session.generate(greedy.generation(Prompt("probe", text, PROBE_ANSWER_TOKENS), 0))
            ttft_ms = (answer.events[0].time_ns - answer.sent_ns) / 1e6 if answer.events else None
            outcome = {"ttft_ms": ttft_ms, "cached_tokens": answer.cached_tokens, "error": answer.error}
            events.write("probe", pair=pair, send=send, **outcome)
            times += [] if ttft_ms is None or answer.cached_tokens else [ttft_ms]
        if len(times) == 2 and times[1] >= POSSIBLE_REUSE * times[0]:
            return


# Settings read back


class SettingCheck(NamedTuple):
    """One setting: the expected value and its source, the actual value and its source."""

    setting: str
    asked: Json
    asked_by: str
    got: Json
    got_from: str


async def read_back(client: Client | None, claim: ExpectedServer) -> list[SettingCheck]:
    """Settings that two sources report. Without a repository, the declared ones are compared with the client's model and
    `tensorrt_llm`. `client` is None for other servers than Triton.

    Raises ServerError if the server does not respond, OSError or ValueError for a file that cannot be read.
    """
    checks, repository = list(_engine(claim)), claim.repository
    if client is None:
        return checks
    if repository is None:
        for name in dict.fromkeys((client.model.name, model_names.ENGINE_MODEL)):
            with suppress(ServerError):  # without an ensemble, the second model is missing
                checks += _model(claim, name, await client.config(name))
    else:
        checks += _llm_api(claim, repository / model_names.ENGINE_MODEL / "1" / "model.yaml")
    for path in sorted(repository.glob("*/config.pbtxt")) if repository is not None else ():
        name = path.parent.name
        try:
            served = await client.config(name)
        except ServerError as error:
            if error.failure is FailureClass.TRANSIENT:
                raise
            checks.append(SettingCheck(f"model {name}", "present", "the repository", "missing", "the server"))
            continue
        checks += [
            SettingCheck(f"{name}: {key}", wanted, "config.pbtxt", got, "the server")
            for key, wanted, got in compare(model_config.read(path, allow_unknown=True), served)
        ]
        checks += _model(claim, name, served)
    return checks


def compare(written: Message, served: Message, prefix: str = "") -> Iterator[tuple[str, Json, Json]]:
    """(path, written, served) of every field that `written`, a ModelConfig, sets. Triton fills in the others."""
    for each in written.DESCRIPTOR.fields:
        path = f"{prefix}{each.name}"
        expected, got = getattr(written, each.name), getattr(served, each.name)
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            for key in sorted(expected):
                yield from _values(f"{path}[{key}]", expected[key], got[key] if key in got else None)  # noqa: SIM401  a protobuf map's get() makes the key
        elif each.is_repeated:
            for index, value in enumerate(expected):
                yield from _values(f"{path}[{index}]", value, got[index] if index < len(got) else None)
            if len(got) > len(expected) > 0:
                yield f"number of {path}", len(expected), len(got)
        elif each.message_type is not None:
            if written.HasField(each.name):
                yield from compare(expected, got, f"{path}.")
        elif each.name in _ALWAYS or (expected != each.default_value and each.name not in _TRITONS_CHOICE):
            yield path, expected, expected if _same_file(expected, got) else got


def _same_file(one: object, other: object) -> bool:
    """True if both are absolute paths of the same file or directory: servers see it under another name, see `links`."""
    if not (isinstance(one, str) and isinstance(other, str) and one.startswith("/") and other.startswith("/")):
        return False
    with suppress(OSError, ValueError):
        return Path(one).samefile(other)
    return False


def _values(path: str, expected: Any, got: Any) -> Iterator[tuple[str, Json, Json]]:
    if not hasattr(expected, "DESCRIPTOR"):
        yield path, expected, got
    elif got is None:
        yield path, "present", None
    else:
        yield from compare(expected, got, f"{path}.")


def _engine(claim: ExpectedServer) -> Iterator[SettingCheck]:
    """The limits in an engine's config.json, at TensorRT-LLM's paths."""
    if claim.engine is None:
        return
    built = dict(Fields.read_optional(claim.engine, "config.json").fields("build_config").values)
    if built.get("max_seq_len") is not None:
        built["max_seq_len"] = Engine.read(claim.engine).max_seq_len  # without the length added for drafts
    yield from _compared(claim, _BUILD, built, "the engine's config.json")


def _compared(
    claim: ExpectedServer, names: Iterable[str], got: Mapping[str, Json], got_from: str
) -> Iterator[SettingCheck]:
    for name in names:
        if claim.declared.get(name) is not None and got.get(name) is not None:
            yield SettingCheck(name, claim.declared[name], claim.by, got[name], got_from)


def _llm_api(claim: ExpectedServer, path: Path) -> Iterator[SettingCheck]:
    """Settings of TensorRT-LLM's `llmapi` model, if a repository has one."""
    if not path.is_file():
        return
    configured = user_files.read_mapping(path, user_files.decode_yaml)
    got = {**configured, "enable_kv_cache_reuse": (configured.get("kv_cache_config") or {}).get("enable_block_reuse")}
    yield from _compared(claim, (*_BUILD, "enable_kv_cache_reuse"), got, "model.yaml")


def _model(claim: ExpectedServer, name: str, served: Any) -> Iterator[SettingCheck]:
    """The declared settings that the configuration of model `name` has as parameters or fields."""
    declared = claim.declared
    for key, expected in declared.items():
        if expected is None or key in _BUILD:
            continue
        if key in served.parameters:
            text = str(expected).lower() if isinstance(expected, bool) else str(expected)
            got = str(served.parameters[key].string_value)
            yield SettingCheck(
                f"{name}: {key}", text, claim.by, got.lower() if isinstance(expected, bool) else got, "the server"
            )
    if name == model_names.ENGINE_MODEL:
        batch = "triton_max_batch_size" if "triton_max_batch_size" in declared else "max_batch_size"
        for key, got in ((batch, served.max_batch_size), ("decoupled", served.model_transaction_policy.decoupled)):
            # A model without a batch dimension batches internally, as llmapi does.
            if declared.get(key) is not None and not (key == batch and got == 0):
                yield SettingCheck(f"{name}: {key}", declared[key], claim.by, got, "the server")
