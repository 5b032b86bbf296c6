"""A load run from beginning to end, for any server: `pipeline bench load` and the perf stage.

target + prompts + levels -> event file (`record`) -> metrics (`metrics.analyze`)
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.bench import conditions, counters, self_test, server_checks, workers
from trtllm_pipeline.bench.load import EventFile, Level, Load, run_level
from trtllm_pipeline.bench.objectives import Objectives
from trtllm_pipeline.bench.prompts import Prompt, chat_renderer, read, synthetic, tokenizer_folder, unrendered
from trtllm_pipeline.bench.server_checks import ExpectedServer
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.client.triton import PERF_METRICS, Client
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.processes.process import allow_open_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BUILT_IN_PROMPTS: Final = "builtin:prompts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Prompts of a mean length, where there are none of the user's own."""

    input_tokens_mean: int
    input_tokens_stddev: int = 0
    prompts: int = 64


def record(
    target: Target,
    plan: Sequence[Level],
    prompts: Sequence[Prompt],
    path: Path,
    *,
    settings: Mapping[str, Json],
    claim: ExpectedServer,
    progress: Callable[[int, int], None],
    tokenizer: Tokenizer | None = None,
    processes: int | None = None,
    synthetic: Mapping[str, Json] | None = None,
) -> None:
    """Measure every level of `plan` and write all that is observed into the new file `path`.

    `progress` is called with the requests done and all that are planned. `processes` None: as many as a level takes.
    `synthetic` has the lengths that synthetic prompts were requested with. Raises ServerError when the server or the
    model is not there, StageError when `claim` cannot be read.
    """
    total, done = sum(len(level.planned) for level in plan), 0

    def count() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    async def measure(events: EventFile) -> None:
        warmup = (prompt for level in plan for prompt in level.warmup)
        for prompt in {prompt.id: prompt for prompt in (*prompts, *warmup)}.values():
            pictures = {"images": prompt.images} if prompt.images else {}
            events.write("prompt", id=prompt.id, text=prompt.text, **pictures)
        async with target.client() as client:
            system = conditions.system(target, claim.engine, settings.get("exclusive"))
            system["server"] = await client.server()
            workload = conditions.workload(target, prompts, plan, synthetic=synthetic)
            events.write("conditions", system=system, workload=workload)
            await server_checks.look(client, target, claim, events, "start")
            drafting = claim.drafts and target.service.kind == "openai"
            load = target
            if claim.drafts and isinstance(client, Client) and client.model.tells_drafts:
                load = replace(target, options={**target.options, PERF_METRICS: True})
            for level in plan:
                workers_count = workers.wanted(level) if processes is None else processes
                before = await counters.triton(target.service.metrics)
                if drafting:
                    await counters.speculation(target.service.http)  # what was before is not of this level
                with counters.gpus() as gpus:
                    if workers_count == 1:
                        await run_level(client, level, load.generation, events, count)
                    else:
                        await workers.run(load, level, events.path, count, workers=workers_count)
                after = await counters.triton(target.service.metrics)
                if before is not None and after is not None:
                    events.write("triton", **level.key, models=counters.growth(before, after))
                drafts = await counters.speculation(target.service.http) if drafting else None
                if drafts is not None:
                    events.write("speculation", **level.key, drafted_tokens=drafts[0], accepted_tokens=drafts[1])
                if gpus:
                    events.write("gpu", **level.key, devices=gpus)
            if claim.without_reuse:
                await server_checks.probe(client, target, claim, prompts, tokenizer, events)
            await server_checks.look(client, target, claim, events, "end")

    tested = self_test.recent(target.protocol)  # before the load, not beside it
    with EventFile(path) as events:
        events.header(target, settings=settings, self_test=tested)
        asyncio.run(measure(events))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A load run on a server that somebody else started: all that `pipeline bench load` is told."""

    target: Target
    load: Load
    expected: ExpectedServer = field(default_factory=ExpectedServer)
    input_data: Path | None = None
    synthetic: Synthetic | None = None
    """Instead of `input_data`; needs the tokenizer."""
    tokenizer: Path | None = None
    """tokenizer.json or a model's folder."""
    processes: int | None = None

    def check(self, objectives: Objectives) -> None:
        """Raise UsageError for what does not fit together."""
        if self.load.concurrency and self.load.request_rate:
            raise UsageError(
                "--concurrency and --request-rate exclude each other", hint="measure twice, once with each"
            )
        if self.target.protocol.endswith("_unary") and "tpot" in objectives.per_request:
            raise UsageError(
                "--slo tpot: an answer in one piece has no time per token", hint="leave out --no-streaming"
            )
        if not 0 <= self.target.temperature < math.inf:
            raise UsageError(f"--temperature: expected a number from 0 on, got {self.target.temperature:g}")
        if self.synthetic is not None and (self.input_data is not None or self.tokenizer is None):
            raise UsageError("--isl needs --tokenizer, and excludes --input-data")

    def record_until_interrupted(
        self, path: Path, tokenizer: Tokenizer | None, progress: Callable[[int, int], None]
    ) -> bool:
        """Measure into the new file `path`; returns whether Ctrl-C ended it after some requests.

        Raises UsageError, ServerError or StageError before anything is asked, KeyboardInterrupt where nothing was measured.
        """
        prompts = self._prompts(tokenizer)
        plan = self.load.levels(prompts)
        asyncio.run(_check_server(self.target))
        allow_open_files(max((level.concurrency or 0 for level in plan), default=0))
        made_up = None
        if self.synthetic is not None:
            made_up = {name: value for name, value in asdict(self.synthetic).items() if name != "prompts"}
        try:
            record(
                self.target,
                plan,
                prompts,
                path,
                settings=self._settings(),
                claim=self.expected,
                progress=progress,
                tokenizer=tokenizer,
                processes=self.processes,
                synthetic=made_up,
            )
        except KeyboardInterrupt:
            if not path.exists() or '"type": "request"' not in path.read_text(encoding="utf-8"):
                raise
            return True
        return False

    def _prompts(self, tokenizer: Tokenizer | None) -> tuple[Prompt, ...]:
        if self.synthetic is not None:
            assert tokenizer is not None
            asked = self.synthetic
            return synthetic(
                tokenizer,
                asked.prompts,
                mean=asked.input_tokens_mean,
                stddev=asked.input_tokens_stddev,
                seed=self.load.seed,
            )
        assert self.input_data is not None
        chats = self.target.protocol.startswith("openai_chat")  # the server has the template
        with nullcontext(unrendered) if chats else chat_renderer(tokenizer_folder(self.tokenizer)) as render:
            return read(self.input_data, render)

    def _settings(self) -> dict[str, Any]:
        """What the event file's header says of how it came about."""
        target = self.target
        return {
            "url": target.service.grpc or target.service.http,
            "model": target.model,
            **asdict(self.load),
            "max_tokens": target.max_tokens,
            "temperature": target.temperature,
            "extra_inputs": [
                f"{name}:{value if isinstance(value, str) else json.dumps(value)}"
                for name, value in target.options.items()
            ],
            "request_timeout_s": target.timeout_s,
            "declared": dict(self.expected.declared),
            "processes": self.processes,
            "input_data": None if self.input_data is None else str(self.input_data),
            "prompts": "given" if self.synthetic is None else "synthetic",
            "synthetic": None if self.synthetic is None else asdict(self.synthetic),
        }


async def _check_server(target: Target) -> None:
    """Raises ServerError when the server, or its model, is not there, UsageError for a metrics endpoint that is none."""
    async with target.client():
        pass
    metrics = target.service.metrics
    if metrics is not None and await counters.triton(metrics) is None:
        raise UsageError(
            f"--metrics-url {metrics}: no Triton metrics there",
            hint="give Triton's metrics port, HOST:8002 by default",
        )
