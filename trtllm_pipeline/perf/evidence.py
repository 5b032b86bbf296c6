"""What the validity gate needs beside the requests themselves: settings read back, memory's limit, a probe of the cache.

Each function returns records for the event file; `perf/validity.py` judges them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import StageError
from trtllm_pipeline.perf import roofline
from trtllm_pipeline.perf.metrics import Tokenizer
from trtllm_pipeline.serving.client import Client, Generation, Lane
from trtllm_pipeline.serving.http import Connection, HttpError
from trtllm_pipeline.serving.readback import read_back

PROBES: Final = 4
PROBE_TOKENS: Final = 256
"""Length of a probe's prompt where the engine takes that much: long enough to see whether it was computed."""
PROBE_ANSWER_TOKENS: Final = 2
_REUSED: Final = re.compile(
    r'^nv_trt_llm_kv_cache_block_metrics\{[^}]*kv_cache_block_type="reused"[^}]*\}\s+(\S+)', re.MULTILINE
)


async def settings(
    client: Client, declared: Mapping[str, Json], *, engine: Path, repository: Path | None
) -> dict[str, Any]:
    """Content of a `settings` record."""
    try:
        checks = await read_back(client, declared, engine=engine, repository=repository)
    except (OSError, ValueError) as error:
        raise StageError(f"the settings of {engine} cannot be read: {error}") from error
    return {"checks": [check._asdict() for check in checks]}


async def memory(engine: Path, tp: int) -> dict[str, Json]:
    """Content of a `roofline` record; on a CPU it takes up to a second of all cores, so not while anything is timed."""
    return (await asyncio.to_thread(roofline.limit, engine, tp=tp)).to_json()


async def reused_blocks(client: Client) -> float | None:
    """KV cache blocks the server has reused so far, by TensorRT-LLM's own metric; None where it tells none."""
    if client.service.metrics is None:
        return None
    text = bytearray()
    connection = Connection(client.service.metrics)
    try:
        await connection.open()
        await asyncio.wait_for(
            connection.request("GET", "/metrics", b"", lambda _now_ns, part: text.extend(part)), client.timeout_s
        )
    except (OSError, HttpError, asyncio.TimeoutError):  # the last another class than TimeoutError in Python 3.10
        return None
    finally:
        connection.close()
    found = [float(value) for value in _REUSED.findall(text.decode(errors="replace"))]
    return sum(found) if found else None


def probes(texts: Sequence[str], tokenizer: Tokenizer, *, longest: int | None) -> list[str]:
    """Prompts nobody has sent before, of `texts` one after another, in at most `longest` and PROBE_TOKENS tokens."""
    # Joining and cutting can change a token or two, and the server may add special ones.
    room = max(1, min(longest or PROBE_TOKENS, PROBE_TOKENS) - 8)
    made = []
    for number in range(PROBES):
        text = f"{secrets.token_hex(4)} " + " ".join([*texts[number:], *texts[:number]])
        while (ends := [end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets]) and len(
            ends
        ) < room:
            text = f"{text} {text}"
        made.append(text[: ends[room - 1]] if len(ends) >= room else text)
    return made


async def probe(
    lane: Lane, texts: Sequence[str], request: Callable[[str, int], Generation]
) -> AsyncIterator[dict[str, Any]]:
    """Contents of `probe` records: each text sent twice, nothing else in flight. `request` makes one of a text and a length."""
    for pair, text in enumerate(texts):
        for send in (0, 1):
            answer = await lane.generate(request(text, PROBE_ANSWER_TOKENS))
            ttft_ms = (answer.events[0].time_ns - answer.sent_ns) / 1e6 if answer.events else None
            yield {
                "pair": pair,
                "send": send,
                "ttft_ms": ttft_ms,
                "cached_tokens": answer.cached_tokens,
                "error": answer.error,
            }
