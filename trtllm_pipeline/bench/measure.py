"""A whole load run: every level after the other, with what the server and the GPU said of themselves meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trtllm_pipeline.bench import conditions, counters, server_checks, workers
from trtllm_pipeline.bench.load import EventFile, Level, run_level
from trtllm_pipeline.bench.prompts import Prompt, Tokenizer
from trtllm_pipeline.bench.server_checks import ExpectedServer
from trtllm_pipeline.bench.target import Target
from trtllm_pipeline.domain import Json


async def measure(
    target: Target,
    plan: Sequence[Level],
    prompts: Sequence[Prompt],
    events: EventFile,
    done: Callable[[], None],
    *,
    claim: ExpectedServer,
    tokenizer: Tokenizer | None = None,
    processes: int | None = None,
    synthetic: Mapping[str, Json] | None = None,
) -> None:
    """Measure every level of `plan`; `done` is called for each request. `processes` None: as many as a level takes.

    `synthetic` says what lengths made-up prompts were asked for.

    Raises ServerError when the server or the model is not there, StageError when `claim` cannot be read.
    """
    warmup = (prompt for level in plan for prompt in level.warmup)
    for prompt in {prompt.id: prompt for prompt in (*prompts, *warmup)}.values():
        events.write("prompt", id=prompt.id, text=prompt.text)
    async with target.client() as client:
        system = {**conditions.system(target, claim.engine), "server": await client.server()}
        events.write(
            "conditions", system=system, workload=conditions.workload(target, prompts, plan, synthetic=synthetic)
        )
        await server_checks.look(client, target, claim, events, "start")
        for level in plan:
            count = workers.wanted(level) if processes is None else processes
            before = await counters.triton(target.service.metrics)
            with counters.gpus() as gpus:
                if count == 1:
                    await run_level(client, level, target.generation, events, done)
                else:
                    await workers.run(target, level, events.path, done, workers=count)
            after = await counters.triton(target.service.metrics)
            if before is not None and after is not None:
                events.write("triton", **level.key, models=counters.growth(before, after))
            if gpus:
                events.write("gpu", **level.key, devices=gpus)
        if claim.without_reuse:
            await server_checks.probe(client, target, claim, prompts, tokenizer, events)
        await server_checks.look(client, target, claim, events, "end")
