"""Evidence for the validity gates beside the requests: settings read back, the roofline, a probe of the KV cache.

Everything found goes into the event file; `bench/validity.py` judges it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from trtllm_pipeline.bench import counters, roofline
from trtllm_pipeline.bench.effective_config import read_back
from trtllm_pipeline.bench.load import EventFile
from trtllm_pipeline.bench.prompts import Prompt, Tokenizer
from trtllm_pipeline.bench.target import AnyClient, Target
from trtllm_pipeline.bench.validity import POSSIBLE_REUSE
from trtllm_pipeline.client.triton import Client
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import StageError
from trtllm_pipeline.processes.process import running_since
from trtllm_pipeline.triton_repository.engine import Engine

PROBES: Final = 4
PROBE_TOKENS: Final = 256
"""Length of a probe's prompt where the engine takes that much: long enough to see whether it was computed."""
PROBE_ANSWER_TOKENS: Final = 2
_CHARACTERS_PER_TOKEN: Final = 4
"""Of ordinary English, about; for probes where there is no tokenizer."""
_NOT_TOLD: Final = frozenset({"tp"})
"""Declared for the roofline; neither engine nor server has it under that name."""


@dataclass(frozen=True, slots=True)
class ExpectedServer:
    """Expected server configuration, verified against the server."""

    declared: Mapping[str, Json] = field(default_factory=dict)
    """Settings under TensorRT-LLM's names, e.g. `enable_kv_cache_reuse`; `tp` is how many GPUs read the weights."""
    engine: Path | None = None
    """What it serves: its config.json has limits and the size of the weights."""
    repository: Path | None = None
    """Its config.pbtxt are held against the configurations that the server reports."""
    by: str = "the matrix"
    """Who says so."""

    @property
    def without_reuse(self) -> bool:
        """KV cache reuse is said to be off."""
        return self.declared.get("enable_kv_cache_reuse") is False


async def look(client: AnyClient, target: Target, claim: ExpectedServer, events: EventFile, at: str) -> None:
    """Record the state of the server at the "start" or "end" of a run. Nothing may be timed meanwhile.

    Raises StageError for an engine or repository that cannot be read.
    """
    pid = target.service.pid
    ready = all((await client.ready()).values())
    events.write("server", at=at, pid=pid, since=None if pid is None else running_since(pid), ready=ready)
    if not ready:
        return
    triton = client if isinstance(client, Client) else None
    if claim.declared or claim.engine or claim.repository:
        try:
            checks = await read_back(
                triton, claim.declared, engine=claim.engine, repository=claim.repository, asked_by=claim.by
            )
        except (OSError, ValueError) as error:
            raise StageError(f"the settings of {claim.engine or claim.repository} cannot be read: {error}") from error
        known = {check.setting.rpartition(": ")[2] for check in checks}
        asked = {name for name, value in claim.declared.items() if value is not None}
        events.write(
            "settings", at=at, checks=[check._asdict() for check in checks], unchecked=sorted(asked - known - _NOT_TOLD)
        )
    if claim.without_reuse and triton is not None:
        events.write("reused_blocks", at=at, blocks=await reused_blocks(triton))
    if claim.engine is not None:
        tp = claim.declared.get("tp")
        limit = await asyncio.to_thread(roofline.limit, claim.engine, tp=tp if isinstance(tp, int) else 1)
        events.write("roofline", at=at, **limit.to_json())


async def reused_blocks(client: Client) -> float | None:
    """KV cache blocks the server has reused so far, by TensorRT-LLM's own metric; None where it tells none."""
    if client.service.metrics is None:
        return None
    page = await counters.metrics_page(client.service.metrics, timeout_s=client.timeout_s)
    found = [
        value
        for name, labels, value in counters.samples(page or "")
        if name == "nv_trt_llm_kv_cache_block_metrics" and 'kv_cache_block_type="reused"' in labels
    ]
    return sum(found) if found else None


def probes(texts: Sequence[str], tokenizer: Tokenizer | None, *, longest: int | None) -> list[str]:
    """Prompts nobody has sent before, of `texts` one after another, in at most `longest` and PROBE_TOKENS tokens."""
    # Joining and cutting can change a token or two, and the server may add special ones.
    room = max(1, min(longest or PROBE_TOKENS, PROBE_TOKENS) - 8)
    made = []
    for number in range(PROBES):
        text = f"{secrets.token_hex(4)} " + " ".join([*texts[number:], *texts[:number]])
        while (ends := _ends(text, tokenizer)) and len(ends) < room:
            text = f"{text} {text}"
        made.append(text[: ends[room - 1]] if len(ends) >= room else text)
    return made


def _ends(text: str, tokenizer: Tokenizer | None) -> Sequence[int]:
    """Where each token of `text` ends, in characters."""
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
    """Try a cache that is said to be off: each of a few new prompts sent twice, nothing else in flight.

    A first token that takes as long again ends it: the gate finds a cache only where every prompt was faster.
    """
    longest = None if claim.engine is None else Engine.read(claim.engine).longest_prompt(PROBE_ANSWER_TOKENS)
    greedy = replace(target, temperature=0.0)
    session = client.session()
    for pair, text in enumerate(probes([prompt.text for prompt in prompts], tokenizer, longest=longest)):
        times: list[float] = []
        for send in (0, 1):
            answer = await session.generate(greedy.generation(Prompt("probe", text, PROBE_ANSWER_TOKENS), 0))
            ttft_ms = (answer.events[0].time_ns - answer.sent_ns) / 1e6 if answer.events else None
            told = {"ttft_ms": ttft_ms, "cached_tokens": answer.cached_tokens, "error": answer.error}
            events.write("probe", pair=pair, send=send, **told)
            times += [] if ttft_ms is None or answer.cached_tokens else [ttft_ms]
        if len(times) == 2 and times[1] >= POSSIBLE_REUSE * times[0]:
            return
