"""A complete load run against any server: `pipeline bench load` and the perf stage.

plan -> prompts and levels -> event file (`record`) -> metrics (`metrics.analyze`)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.base import FailureClass, Json, StageError, UsageError, allow_open_files
from trtllm_pipeline.measure.client.triton import PERF_METRICS, Client
from trtllm_pipeline.measure.load import conditions, counters, server_checks, workers
from trtllm_pipeline.measure.load.dcgm import Exporters
from trtllm_pipeline.measure.load.load import EventFile, Load, run_level
from trtllm_pipeline.measure.load.metrics import SoFar, analyze
from trtllm_pipeline.measure.load.objectives import NONE, Objectives
from trtllm_pipeline.measure.load.prompts import (
    OWN_LENGTHS,
    LeftOut,
    Prompt,
    chat_renderer,
    conversations,
    each_with_an_image,
    read_prompts,
    tokenizer_folder,
    unrendered,
)
from trtllm_pipeline.measure.load.server_checks import ExpectedServer
from trtllm_pipeline.measure.load.stopping import LoadProgress, Rounds, StopRule
from trtllm_pipeline.measure.load.target import Target, adds_special_tokens, served_length
from trtllm_pipeline.measure.load.workloads import MOST_MADE, Openings, Workload, made, of_trace
from trtllm_pipeline.models import Engine, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trtllm_pipeline.measure.load.result import LoadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A load run on a running server: its requests, its levels, and the rule that ends it."""

    target: Target
    load: Load
    stop: StopRule = field(default_factory=StopRule)
    find_rate: float | None = None
    """Search for the highest rate at which this share of requests meets the objectives."""
    find_concurrency: float | None = None
    """Search for the most requests in flight at which this share of requests meets the objectives."""
    objectives: Objectives = NONE
    expected: ExpectedServer = field(default_factory=ExpectedServer)
    input_data: Path | None = None
    """Prompt file. None: synthetic prompts of `workload`."""
    turns: int = 1
    """Maximum turns per conversation of `input_data`."""
    num_prompts: int | None = None
    """Maximum rows of `input_data`, or number of synthetic prompts or conversations."""
    exact_if_possible: bool = False
    """Outputs of prompts with a target length have that many tokens if the server has an input for it, else at most."""
    skip_too_long: bool | None = None
    """Leave out rows that do not fit the engine. Otherwise they are an error. None: only leave out requests of a trace."""
    workload: Workload | None = None
    """Prompts of given lengths, cut or padded from `input_data` if there is one. Needs the tokenizer."""
    images: str | None = None
    """Synthetic images for each request, as for `ImagesAsked`."""
    tokenizer: Path | None = None
    """tokenizer.json, or a model's directory."""
    processes: int | None = None
    """Load processes. None: as many as each level needs."""
    exporters: Exporters | None = None
    """DCGM exporters of the server's GPUs. None: the GPUs of this machine."""
    settings: Mapping[str, Json] = field(default_factory=dict)
    """Recorded in the event file's header."""


def record(
    plan: LoadPlan,
    prompts: Sequence[Prompt],
    path: Path,
    progress: Callable[[int, int], None],
    tokenizer: Tokenizer | None = None,
    openings: Openings | None = None,
) -> None:
    """Measure the levels of all rounds of `plan` and write all observations into the new file `path`.

    `progress` gets the requests done and the requests planned so far. `openings` varies the first words of synthetic
    prompts. Raises ServerError if the server or the model is missing, or cannot process a prompt's options, and
    StageError if the expected server's files cannot be read, or the objectives limit a metric that the model lacks.
    """
    target, claim, objectives, exporters = plan.target, plan.expected, plan.objectives, plan.exporters
    rounds = Rounds(plan.load, prompts, plan.stop, plan.find_rate, plan.find_concurrency)
    allow_open_files(rounds.most_in_flight)
    for prompt in prompts:
        target.of_row(prompt)
    levels = rounds.levels
    total, done = sum(len(level.planned) for level in levels), 0
    reader = SoFar(path, tokenizer, objectives)

    def count() -> None:
        nonlocal done
        done += 1
        progress(done, max(done, total))

    def progress_so_far() -> LoadProgress:
        return reader.look() if done else LoadProgress()

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
            system = conditions.system(target, claim.engine, plan.settings.get("exclusive"))
            system["server"] = await client.server() or target.service.version
            synthetic = None if plan.workload is None else plan.workload.to_json()
            workload = conditions.workload(target, prompts, levels, synthetic, plan.stop.words())
            events.write("conditions", system=system, workload=workload)
            await server_checks.look(client, target, claim, events, "start")
            drafting = claim.drafts and target.service.kind == "openai"
            load = target
            if claim.drafts and isinstance(client, Client) and client.model.tells_drafts:
                load = replace(target, options={**target.options, PERF_METRICS: True})
            metrics = target.service.metrics
            left = deque(levels)
            while left or (rounds.open_end and (left := deque(rounds.next(progress_so_far())))):
                level = left.popleft()
                if level not in levels:
                    total += len(level.planned)
                write_prompts(level.warmup)
                if level.probes:
                    events.write("probed", **level.key)
                if openings is not None:
                    level = replace(level, openings=openings.of(level))
                workers_count = workers.wanted(level, plan.processes)
                before = await counters.triton(metrics)
                if drafting:
                    await counters.speculation(target.service.http)  # discard everything before this level
                problems: list[str] = []
                sampled = exporters.sampled(problems) if exporters else counters.gpus(target.service.pid)
                with sampled as gpus, counters.watching(metrics) as gauges:
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
                if gpus or problems:
                    lacking = {"problems": problems} if problems else {}
                    events.write("gpu", **level.key, devices=gpus, **lacking)
            if claim.without_reuse:
                await server_checks.probe(client, target, claim, prompts, tokenizer, events)
            await server_checks.look(client, target, claim, events, "end")

    with EventFile(path) as events:
        events.header(target, settings=plan.settings)
        asyncio.run(measure(events))


def run(plan: LoadPlan, path: Path, progress: Callable[[int, int], None]) -> LoadResult:
    """Measure, and write all observations into the new file `path`. `progress` gets the requests done and planned so far.

    Raises UsageError, ServerError or StageError before the first request.
    """
    tokenizer = None if plan.tokenizer is None else read_tokenizer(plan.tokenizer)
    left_out = LeftOut()
    prompts = _prompts(plan, tokenizer, left_out)
    target, workload = plan.target, plan.workload
    replayed = any(prompt.blocks is not None for prompt in prompts)
    exact_if_possible = plan.exact_if_possible and (workload is not None or replayed)
    if target.protocol == "openai_completions" and any(prompt.images for prompt in prompts):
        target = replace(target, protocol="openai_chat")
    if target.service.pid is None or exact_if_possible:
        exact = asyncio.run(_check_server(target))
        target = replace(target, exact_length=exact) if exact_if_possible else target
    openings = None
    if tokenizer and (replayed or (workload and workload.fresh)):
        openings = Openings(tokenizer, plan.load.seed, together=replayed)
    settings = {**plan.settings, "exact_length": target.exact_length, **left_out.settings}
    record(replace(plan, target=target, settings=settings), prompts, path, progress, tokenizer, openings)
    return analyze(path, tokenizer, plan.objectives)


def _prompts(plan: LoadPlan, tokenizer: Tokenizer | None, left_out: LeftOut) -> tuple[Prompt, ...]:
    """The prompts, checked against the engine's limits if they can be counted."""
    engine = plan.expected.limits
    if plan.workload is not None:
        assert tokenizer is not None
        data, most = plan.input_data, plan.num_prompts
        rows = () if data is None else read_prompts(data, unrendered, most=most, left_out=left_out)
        if any(row.blocks is not None for row in rows):
            raise StageError(f"{data}: {OWN_LENGTHS}", failure=FailureClass.USER)
        count = most or min(MOST_MADE, -(-plan.load.most_requests(plan.turns) // plan.turns))
        prompts = made(tokenizer, replace(plan.workload, prompts=count), rows)
    else:
        prompts = _rows(plan, engine, tokenizer, left_out)
    prompts = each_with_an_image(prompts, plan.images, plan.target.service)
    if engine is not None and tokenizer is not None:
        engine.check_lengths(
            (prompt.id, len(tokenizer.encode(prompt.text).ids), prompt.max_tokens or plan.target.max_tokens)
            for prompt in prompts
        )
    return prompts


def _rows(plan: LoadPlan, engine: Engine | None, tokenizer: Tokenizer | None, left_out: LeftOut) -> tuple[Prompt, ...]:
    """The prompts of the input data, unchanged; of a trace, as many as are sent."""
    assert plan.input_data is not None
    target, load = plan.target, plan.load

    special = partial(adds_special_tokens, target.service, target.protocol, target.timeout_s)
    with chat_renderer(tokenizer_folder(plan.tokenizer), special) as render:
        if render is None and target.protocol.startswith("openai_chat"):
            render = unrendered  # the server applies its own template
        rows = read_prompts(
            plan.input_data,
            render,
            turns=plan.turns,
            most=plan.num_prompts,
            fits=_fitting(plan, engine, tokenizer),
            left_out=left_out,
            timed=bool(load.trace_speed),
        )
    if load.trace_speed:
        rows = tuple(
            prompt for talk in sorted(conversations(rows), key=lambda talk: talk[0].at_s or 0) for prompt in talk
        )
    of_lengths = any(prompt.blocks is not None for prompt in rows)
    if load.trace_speed or of_lengths:
        searches = plan.find_rate is not None or plan.find_concurrency is not None
        sent = load.needed(rows, plan.turns, searches=searches)
        left_out.unsent, rows = len(rows) - len(sent), sent
    if tokenizer is None:
        if of_lengths:
            raise UsageError(
                f"{plan.input_data}: the requests of a trace have lengths instead of text, which need a tokenizer",
                hint="give --tokenizer DIR",
            )
        return rows
    rows = tuple(_as_recorded(prompt, tokenizer, target.max_tokens) for prompt in rows)
    return of_trace(tokenizer, rows, load.seed) if of_lengths else rows


def _fitting(plan: LoadPlan, engine: Engine | None, tokenizer: Tokenizer | None) -> Callable[[Prompt], bool]:
    """A function that is True for prompts to send: within the limits of the engine or server, or to be sent anyway."""

    @cache
    def limits() -> Engine:
        return engine or Engine(Path(), max_seq_len=asyncio.run(served_length(plan.target)))

    def fits(prompt: Prompt) -> bool:
        if not (plan.skip_too_long or (plan.skip_too_long is None and prompt.blocks is not None)):
            return True
        longest = limits().longest_prompt(prompt.max_tokens or plan.target.max_tokens)
        tokens = prompt.input_tokens
        if tokens is None and tokenizer is not None and longest is not None:
            tokens = len(tokenizer.encode(prompt.text).ids)
        return longest is None or tokens is None or tokens <= longest

    return fits


def _as_recorded(prompt: Prompt, tokenizer: Tokenizer, most: int) -> Prompt:
    """A turn of a recorded conversation whose output is at most as long as its recorded answer."""
    if not (prompt.recorded and prompt.references) or prompt.max_tokens is not None:
        return prompt
    tokens = len(tokenizer.encode(prompt.references[0], add_special_tokens=False).ids)
    return replace(prompt, max_tokens=max(1, min(most, tokens)))


async def _check_server(target: Target) -> bool:
    """True if requests can set an exact output length, as far as the server reports it.

    Raises ServerError if the server or its model is missing, UsageError for a wrong metrics endpoint.
    """
    async with target.client() as client:
        exact = not isinstance(client, Client) or client.model.takes("min_tokens")
    metrics = target.service.metrics
    if metrics is not None and await counters.triton(metrics) is None:
        raise UsageError(
            f"--metrics-url {metrics}: no Triton metrics there", hint="give Triton's metrics port, HOST:8002 by default"
        )
    return exact
