"""Measure a running server: latencies and throughput over a list of concurrencies and request rates, with the user's prompts.

Writes `events.jsonl` (all observations) and `perf.json` (all results). A measurement that fails the validity gates fails
the stage. Both files remain in the attempt's directory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trtllm_pipeline.base import FailureClass, StageError, write_json
from trtllm_pipeline.measure import (
    BUILT_IN_PROMPTS,
    MOST_MADE,
    LeftOut,
    Objectives,
    Openings,
    Prompt,
    Service,
    Workload,
    chat_renderer,
    least_requests,
    made,
    read_lengths,
    read_prompts,
    unrendered,
)
from trtllm_pipeline.models import Engine, dataset_file, read_tokenizer
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.model_inputs import model_folder
from trtllm_pipeline.tensorrt.stage.params import PerfParams, to_json
from trtllm_pipeline.tensorrt.stage.server_requests import (
    adapter_options_now,
    chosen_adapters,
    draft_options,
    each_with_an_image,
    protocol_for,
    special_tokens_check,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trtllm_pipeline.measure import LoadResult, MeasurementFinding, Option

EVENTS: Final = "events.jsonl"


def run(context: StageContext[PerfParams]) -> None:
    """Measure. Raises StageError if the measurement is not valid."""
    tokenizer = read_tokenizer(model_folder(context.inputs))
    params, service = context.params, Service.read(context.inputs["service"])
    engine = Engine.read(context.inputs["engine"], max_seq_len=params.declared.get("max_seq_len"))
    max_tokens = params.max_tokens or _output_length(engine)
    workload = _workload(context, engine, max_tokens) if params.workload == "isl_osl" else None
    left_out = LeftOut()
    if workload is not None:
        data = context.files["input_data"]
        rows = () if _made_up(context) else read_prompts(data, unrendered, most=workload.prompts, left_out=left_out)
        prompts = made(tokenizer, workload, rows)
    else:
        prompts = _rows(context, engine, tokenizer, max_tokens, left_out)
    prompts = each_with_an_image(prompts, params.images, service)
    engine.check_lengths(
        (prompt.id, len(tokenizer.encode(prompt.text).ids), prompt.max_tokens or max_tokens) for prompt in prompts
    )
    _record(context, service, prompts, max_tokens, tokenizer, workload, left_out)
    from trtllm_pipeline.measure import PERF_FILE

    result = measured(context)
    write_json(context.out / PERF_FILE, result.to_json())
    for finding in result.findings:
        print(f"{finding.check}: {finding}")  # noqa: T201 - the stage's log
    if result.invalid:
        raise StageError(
            "the measurement is not valid: " + "; ".join(finding.message for finding in result.invalid),
            failure=failure_of(result.invalid),
            hint=f"all observations are in {EVENTS} next to the log of this attempt",
        )


def _record(
    context: StageContext[PerfParams],
    service: Service,
    prompts: Sequence[Prompt],
    max_tokens: int,
    tokenizer: Tokenizer,
    workload: Workload | None,
    left_out: LeftOut,
) -> None:
    """Send the requests, and write the observations. Imports the clients late."""
    from trtllm_pipeline.measure import ExpectedServer, Load, Rounds, StopRule, Target, record

    params, engine = context.params, context.inputs["engine"]
    adapters = adapter_options_now(service, context.inputs, params.request_timeout_s, params.lora_names)
    target = Target(
        protocol_for(service, params.protocol, images=any(prompt.images for prompt in prompts)),
        service,
        service.model,
        params.request_timeout_s,
        max_tokens,
        params.temperature,
        {**draft_options(service.model, engine), **_sampling(params)},
        in_turn=chosen_adapters(adapters, params.lora),
        exact_length=workload is not None,
        stop_words=params.stop_words,
        seed=params.random_seed,
    )
    load = Load(
        concurrency=params.concurrency,
        request_rate=params.request_rate,
        requests=params.requests,
        warmup_requests=params.warmup_requests,
        repeats=params.repeats,
        distribution=params.request_distribution,
        seed=params.random_seed,
        until_flat=params.warmup == "flat",
        interval_s=None if params.measurement_interval_ms is None else params.measurement_interval_ms / 1e3,
        max_in_flight=params.max_in_flight,
        turn_delay_s=params.turn_delay_s,
    )
    stop = StopRule(
        precisions={str(name): share for name, share in params.stop_when.items()},
        max_repeats=params.max_repeats,
        budget_s=params.budget_s,
    )
    record(
        target,
        Rounds(load, prompts, stop, params.find_rate),
        prompts,
        context.out / EVENTS,
        settings={**to_json(replace(params, max_tokens=max_tokens)), "rows_left_out": str(left_out)},
        claim=ExpectedServer(params.declared, engine, context.inputs.get("repository")),
        progress=lambda done, total: context.progress(done, total, "requests"),
        tokenizer=tokenizer,
        synthetic=None if workload is None else workload.to_json(),
        objectives=_objectives(params),
        repeats=stop.words(),
        openings=Openings(tokenizer, workload.seed) if workload is not None and workload.fresh else None,
    )


def measured(context: StageContext[PerfParams]) -> LoadResult:
    """The results from the events of a stage that has run."""
    from trtllm_pipeline.measure import analyze

    return analyze(context.out / EVENTS, read_tokenizer(model_folder(context.inputs)), _objectives(context.params))


def _objectives(params: PerfParams) -> Objectives:
    return Objectives({name.removesuffix("_ms"): limit for name, limit in (params.slo or {}).items()})


def _sampling(params: PerfParams) -> dict[str, Option]:
    """Inputs of every request, by the server's names."""
    chosen: dict[str, Option | None] = {"top_k": params.top_k, "top_p": params.top_p}
    return {**{name: value for name, value in chosen.items() if value is not None}, **params.extra_inputs}


def _made_up(context: StageContext[PerfParams]) -> bool:
    """True if no texts of the user are cut or padded."""
    return context.files["input_data"] == dataset_file.data_file(BUILT_IN_PROMPTS, Path())


def _workload(context: StageContext[PerfParams], engine: Engine, max_tokens: int) -> Workload:
    """The lengths of prompts to generate. Raises StageError if an engine does not specify its input length."""
    params = context.params
    longest = params.declared.get("max_input_len") or engine.max_input_len
    input_tokens = params.input_tokens or longest
    if not input_tokens:
        raise StageError(
            f"{engine.folder} does not specify the input length that it was built for",
            failure=FailureClass.USER,
            hint="give --input-tokens N",
        )
    concurrency = max(params.concurrency, default=0)
    warmup = 2 * concurrency if params.warmup_requests is None else params.warmup_requests
    sent = params.repeats * max(params.requests, least_requests(concurrency, warmup, params.turns))
    lengths = read_lengths(context.files["lengths_data"]) if "lengths_data" in context.files else ()
    return Workload(
        input_tokens=input_tokens,
        input_tokens_stddev=params.input_tokens_stddev,
        output_tokens=max_tokens,
        output_tokens_stddev=params.output_tokens_stddev,
        lengths=lengths,
        longest=(longest, engine.max_seq_len - longest) if longest and engine.max_seq_len else None,
        shared_prefix_tokens=params.shared_prefix_tokens,
        shared_prefixes=params.shared_prefixes,
        turns=params.turns,
        prompts=params.num_prompts or min(MOST_MADE, -(-sent // params.turns)),
        fresh=_made_up(context) and params.num_prompts is None,
        seed=params.random_seed,
    )


def _rows(
    context: StageContext[PerfParams], engine: Engine, tokenizer: Tokenizer, max_tokens: int, left_out: LeftOut
) -> tuple[Prompt, ...]:
    """The prompts of the input data, unchanged."""
    params = context.params

    def fits(prompt: Prompt) -> bool:
        output = prompt.max_tokens or max_tokens
        return len(tokenizer.encode(prompt.text).ids) <= (engine.longest_prompt(output) or math.inf)

    service = Service.read(context.inputs["service"])
    special = special_tokens_check(service, protocol_for(service, params.protocol), params.request_timeout_s)
    with chat_renderer(model_folder(context.inputs), special) as render:
        return read_prompts(
            context.files["input_data"],
            render,
            turns=params.turns,
            most=params.num_prompts,
            fits=fits if params.too_long == "skip" else None,
            left_out=left_out,
        )


def _output_length(engine: Engine) -> int:
    """The output length that an engine was built for. Raises StageError if it does not specify one."""
    if not engine.max_seq_len or not engine.max_input_len or engine.max_seq_len <= engine.max_input_len:
        raise StageError(
            f"{engine.folder} does not specify the output length that it was built for",
            failure=FailureClass.USER,
            hint="give --max-tokens N",
        )
    return engine.max_seq_len - engine.max_input_len


def failure_of(invalid: Sequence[MeasurementFinding]) -> FailureClass:
    """TRANSIENT if the machine was too busy to measure, or if the server restarted during the measurement."""
    if all(finding.check in {"client_cpu", "client_lag", "schedule", "server"} for finding in invalid):
        return FailureClass.TRANSIENT
    from trtllm_pipeline.measure import failure_class

    causes = "; ".join(finding.message for finding in invalid if finding.check == "failures")
    return failure_class(causes) if causes else FailureClass.CHECK
