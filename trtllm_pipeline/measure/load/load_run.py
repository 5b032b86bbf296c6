"""A complete load run against any server: `pipeline bench load` and the perf stage.

target + prompts + levels -> event file (`record`) -> metrics (`metrics.analyze`)
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_pipeline.base import FailureClass, Json, StageError, UsageError, allow_open_files
from trtllm_pipeline.measure.client.triton import PERF_METRICS, Client
from trtllm_pipeline.measure.load import conditions, counters, server_checks, workers
from trtllm_pipeline.measure.load.load import EventFile, Load, run_level
from trtllm_pipeline.measure.load.objectives import LEAST_SEARCHED, NONE, Objectives
from trtllm_pipeline.measure.load.prompts import (
    LeftOut,
    Prompt,
    chat_renderer,
    read_prompts,
    tokenizer_folder,
    unrendered,
)
from trtllm_pipeline.measure.load.server_checks import ExpectedServer
from trtllm_pipeline.measure.load.stopping import LoadProgress, Rounds, StopRule
from trtllm_pipeline.measure.load.target import Target, adds_special_tokens
from trtllm_pipeline.measure.load.workloads import Openings, Workload, made

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trtllm_pipeline.measure.load.metrics import SoFar


def record(
    target: Target,
    rounds: Rounds,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    settings: Mapping[str, Json],
    claim: ExpectedServer,
    progress: Callable[[int, int], None],
    tokenizer: Tokenizer | None = None,
    processes: int | None = None,
    synthetic: Mapping[str, Json] | None = None,
    objectives: Objectives = NONE,
    repeats: str | None = None,
    openings: Openings | None = None,
) -> None:
    """Measure the levels of all rounds and write all that is observed into the new file `path`.

    `progress` gets the requests done and the requests planned so far. `processes` None: as many as each level
    needs. `synthetic` has the target lengths of synthetic prompts, `repeats` decides how often levels repeat. A
    search for the highest rate needs `objectives`. `openings` varies the first words of synthetic prompts. Raises ServerError
    if the server or the model is missing, or cannot serve a prompt's options, and StageError if `claim` cannot be read, or
    `objectives` limit a metric that the model lacks.
    """
    for prompt in prompts:
        target.of_row(prompt)
    plan = rounds.levels
    total, done = sum(len(level.planned) for level in plan), 0
    reader: SoFar | None = None

    def count() -> None:
        nonlocal done
        done += 1
        progress(done, max(done, total))

    def progress_so_far() -> LoadProgress:
        nonlocal reader
        if not done:
            return LoadProgress()
        if reader is None:
            from trtllm_pipeline.measure.load.metrics import SoFar

            reader = SoFar(path, tokenizer, objectives)
        return reader.look()

    async def measure(events: EventFile) -> None:
        nonlocal total
        written: set[str] = set()

        def write_prompts(those: Sequence[Prompt]) -> None:
            for prompt in those:
                if prompt.id not in written:
                    about = {"images": prompt.images, "input_tokens": prompt.input_tokens, "shared": prompt.shared}
                    recorded_settings = {name: value for name, value in about.items() if value}
                    events.write("prompt", id=prompt.id, text=prompt.text, **recorded_settings)
                    written.add(prompt.id)

        write_prompts(prompts)
        async with target.client() as client:
            if "tpot" in objectives.per_request and isinstance(client, Client) and not client.model.decoupled:
                raise StageError(
                    f"model {target.model} does not stream, so it has no TPOT, but the SLO limits tpot",
                    failure=FailureClass.USER,
                    hint="leave tpot out of the SLO, or serve a decoupled model",
                )
            system = conditions.system(target, claim.engine, settings.get("exclusive"))
            system["server"] = await client.server() or target.service.version
            workload = conditions.workload(target, prompts, plan, synthetic=synthetic, repeats=repeats)
            events.write("conditions", system=system, workload=workload)
            await server_checks.look(client, target, claim, events, "start")
            drafting = claim.drafts and target.service.kind == "openai"
            load = target
            if claim.drafts and isinstance(client, Client) and client.model.tells_drafts:
                load = replace(target, options={**target.options, PERF_METRICS: True})
            metrics = target.service.metrics
            left = deque(plan)
            while left or (rounds.open_end and (left := deque(rounds.next(progress_so_far())))):
                level = left.popleft()
                if level not in plan:
                    total += len(level.planned)
                write_prompts(level.warmup)
                if level.probes:
                    events.write("probed", **level.key)
                if openings is not None:
                    level = replace(level, openings=openings.of(level))
                workers_count = workers.wanted(level, processes)
                before = await counters.triton(metrics)
                if drafting:
                    await counters.speculation(target.service.http)  # discard what precedes this level
                with counters.gpus(target.service.pid) as gpus, counters.watching(metrics) as gauges:
                    if workers_count == 1:
                        await run_level(client, level, load.generation, events, count)
                    else:
                        await workers.run(load, level, events.path, count, workers=workers_count)
                after = await counters.triton(metrics)
                if gauges:
                    events.write("gauges", **level.key, samples=gauges)
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

    with EventFile(path) as events:
        events.header(target, settings=settings)
        asyncio.run(measure(events))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A load run on a running server: the arguments of `pipeline bench load`."""

    target: Target
    load: Load
    stop: StopRule = field(default_factory=StopRule)
    find_rate: float | None = None
    """Look for the highest rate at which this share of requests meets the objectives."""
    find_concurrency: float | None = None
    """Look for the most requests in flight at which this share of requests meets the objectives."""
    expected: ExpectedServer = field(default_factory=ExpectedServer)
    input_data: Path | None = None
    turns: int = 1
    """Maximum turns per conversation of `input_data`."""
    most_rows: int | None = None
    """Maximum rows of `input_data`."""
    workload: Workload | None = None
    """Prompts of given lengths, cut from `input_data` if there is one. Needs the tokenizer."""
    tokenizer: Path | None = None
    """tokenizer.json or a model's directory."""
    processes: int | None = None

    def check(self, objectives: Objectives) -> None:
        """Raise UsageError for options that contradict each other."""
        if self.load.concurrency and self.load.request_rate:
            raise UsageError(
                "--concurrency and --request-rate exclude each other", hint="measure twice, once with each"
            )
        if self.load.max_in_flight is not None and not self.load.request_rate and self.find_rate is None:
            raise UsageError(
                "--max-in-flight needs --request-rate: --concurrency already limits the requests in flight"
            )
        if self.target.protocol.endswith("_unary") and "tpot" in objectives.per_request:
            raise UsageError("--slo tpot: without streaming there is no TPOT", hint="leave out --no-streaming")
        if not 0 <= self.target.temperature < math.inf:
            raise UsageError(f"--temperature: expected a number from 0 on, got {self.target.temperature:g}")
        if self.workload is not None and self.tokenizer is None:
            raise UsageError("--isl needs --tokenizer to count tokens")
        for option, share in (("--find-rate", self.find_rate), ("--find-concurrency", self.find_concurrency)):
            if share is not None and not 0 < share <= 1:
                raise UsageError(f"{option}: expected a share above 0 and up to 1, got {share:g}")
            if share is not None and not objectives.per_request:
                raise UsageError(
                    f"{option} needs --slo, such as ttft=300ms,tpot=40ms: the load is the highest that keeps it"
                )
        if self.find_rate is not None and self.load.interval_s is None and self.load.requests < LEAST_SEARCHED:
            raise UsageError(
                f"--find-rate needs --requests {LEAST_SEARCHED} or more: {self.load.requests} requests are over before a "
                "queue is long, and any rate seems to do",
                hint="use --requests 1500 for a reliable interval, or --measurement-interval",
            )

    def record_until_interrupted(
        self,
        path: Path,
        tokenizer: Tokenizer | None,
        progress: Callable[[int, int], None],
        objectives: Objectives = NONE,
    ) -> bool:
        """Measure into the new file `path`. Returns True if Ctrl-C ended it after some requests.

        Raises UsageError, ServerError or StageError before the first request, KeyboardInterrupt before the first measurement.
        """
        left_out = LeftOut()
        prompts = self._prompts(tokenizer, left_out)
        rounds = Rounds(self.load, prompts, self.stop, self.find_rate, self.find_concurrency)
        asyncio.run(_check_server(self.target))
        allow_open_files(rounds.most_in_flight)
        try:
            record(
                self.target,
                rounds,
                prompts,
                path,
                settings={**self._settings(), "rows_left_out": str(left_out)},
                claim=self.expected,
                progress=progress,
                tokenizer=tokenizer,
                processes=self.processes,
                synthetic=None if self.workload is None else self.workload.to_json(),
                objectives=objectives,
                repeats=self.stop.words(),
                openings=self._openings(tokenizer),
            )
        except KeyboardInterrupt:
            if not path.exists() or '"type": "request"' not in path.read_text(encoding="utf-8"):
                raise
            return True
        return False

    def _prompts(self, tokenizer: Tokenizer | None, left_out: LeftOut) -> tuple[Prompt, ...]:
        if self.workload is not None:
            assert tokenizer is not None
            rows = read_prompts(self.input_data, unrendered, left_out=left_out) if self.input_data else ()
            return made(tokenizer, self.workload, rows)
        assert self.input_data is not None
        chats = self.target.protocol.startswith("openai_chat")  # the server has the template
        target = self.target
        special = partial(adds_special_tokens, target.service, target.protocol, target.timeout_s)
        with nullcontext(unrendered) if chats else chat_renderer(tokenizer_folder(self.tokenizer), special) as render:
            return read_prompts(self.input_data, render, turns=self.turns, most=self.most_rows, left_out=left_out)

    def _openings(self, tokenizer: Tokenizer | None) -> Openings | None:
        lengths = self.workload
        return (
            Openings(tokenizer, lengths.seed)
            if lengths is not None and lengths.fresh and tokenizer is not None
            else None
        )

    def _settings(self) -> dict[str, Any]:
        """Settings in the event file's header."""
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
            "prompts": "given" if self.input_data is not None else "synthetic",
            "synthetic": None if self.workload is None else self.workload.to_json(),
            "turns": self.turns,
            "exact_length": target.exact_length,
            "stop_words": list(target.stop_words),
            "stop_when": dict(self.stop.precisions),
            "find_rate": self.find_rate,
            "find_concurrency": self.find_concurrency,
        }


async def _check_server(target: Target) -> None:
    """Raises ServerError if the server or its model is missing, UsageError for a wrong metrics endpoint."""
    async with target.client():
        pass
    metrics = target.service.metrics
    if metrics is not None and await counters.triton(metrics) is None:
        raise UsageError(
            f"--metrics-url {metrics}: no Triton metrics there",
            hint="give Triton's metrics port, HOST:8002 by default",
        )
