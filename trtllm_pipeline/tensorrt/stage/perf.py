"""Measure a running server: latencies and throughput over a list of concurrencies and request rates.

Writes `events.jsonl` (all observations) and `perf.json` (all results). A measurement that fails the validity gates fails
the stage. Both files remain in the attempt's directory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_pipeline.base import FailureClass, StageError, UsageError, write_json
from trtllm_pipeline.measure import EVENTS_FILE, Service, prompts, windows
from trtllm_pipeline.models import dataset_file, read_tokenizer
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.model_inputs import model_folder
from trtllm_pipeline.tensorrt.stage.params import MAX_TOKENS, PerfParams, fixed_lengths, to_json
from trtllm_pipeline.tensorrt.stage.server_requests import (
    adapter_options_now,
    chosen_adapters,
    draft_options,
    protocol_for,
)

if TYPE_CHECKING:
    from trtllm_pipeline.measure import ExpectedServer, LoadPlan, LoadResult, Objectives, Target, session, workloads
    from trtllm_pipeline.models import Engine


def run(context: StageContext[PerfParams]) -> None:
    """Measure. Raises StageError if the measurement is not valid."""
    from trtllm_pipeline.measure import PERF_FILE, ExpectedServer, Target
    from trtllm_pipeline.measure import run as measure

    params, inputs = context.params, context.inputs
    service, engine = Service.read(inputs["service"]), inputs["engine"]
    adapters = adapter_options_now(service, inputs, params.request_timeout_s, params.lora_names)
    target = Target(
        protocol_for(service, params.protocol),
        service,
        service.model,
        options=draft_options(service.model, engine),
        in_turn=chosen_adapters(adapters, params.lora),
    )
    plan = load_plan(
        params,
        target,
        ExpectedServer(params.declared, engine, inputs.get("repository")),
        input_data=context.files.get("input_data"),
        lengths_data=context.files.get("lengths_data"),
        tokenizer=model_folder(inputs),
        objectives=_objectives(params),
    )
    result = measure(plan, context.out / EVENTS_FILE, lambda done, total: context.progress(done, total, "requests"))
    write_json(context.out / PERF_FILE, result.to_json())
    for finding in result.findings:
        print(f"{finding.check}: {finding}")  # noqa: T201 - the stage's log
    if result.invalid:
        raise StageError(
            "the measurement is not valid: " + "; ".join(finding.message for finding in result.invalid),
            failure=failure_of(result),
            hint=f"all observations are in {EVENTS_FILE} next to the log of this attempt",
        )


def load_plan(
    params: PerfParams,
    target: Target,
    expected: ExpectedServer,
    *,
    input_data: Path | None,
    lengths_data: Path | None,
    tokenizer: Path | None,
    objectives: Objectives,
    processes: int | None = None,
) -> LoadPlan:
    """The load for these parameters, with defaults for everything that they leave open: levels, lengths and prompts.

    `target` has the server, and additional inputs of each request. Raises UsageError or StageError without a length.
    """
    from trtllm_pipeline.measure import Exporters, Load, LoadPlan, stopping

    engine = expected.limits
    max_tokens = params.max_tokens or _output_length(engine) or MAX_TOKENS
    built_in = dataset_file.data_file(prompts.BUILT_IN_PROMPTS, Path())
    given = None if input_data == built_in else input_data
    if params.trace_speed and given is None:
        raise UsageError("trace_speed replays the times of a file", hint="give --input-data FILE with timestamps")
    workload = _workload(params, expected, engine, max_tokens, given=given, lengths_data=lengths_data)
    if workload is not None and tokenizer is None:
        if lengths_data is not None or fixed_lengths(params, built_in):
            raise UsageError("prompts of given lengths need a tokenizer to count tokens", hint="give --tokenizer DIR")
        workload = None
    settings = {**to_json(replace(params, max_tokens=max_tokens)), "declared": dict(expected.declared)}
    chosen: dict[str, session.Option | None] = {"top_k": params.top_k, "top_p": params.top_p}
    sampling = {name: value for name, value in chosen.items() if value is not None}
    return LoadPlan(
        expected=expected,
        target=replace(
            target,
            timeout_s=params.request_timeout_s,
            max_tokens=max_tokens,
            temperature=params.temperature,
            options={**target.options, **sampling, **params.extra_inputs},
            exact_length=bool(params.ignore_eos),
            stop_words=params.stop_words,
            seed=params.random_seed,
        ),
        load=Load(
            concurrency=_levels(params, expected, engine),
            request_rate=params.request_rate,
            trace_speed=params.trace_speed,
            requests=params.requests,
            warmup_requests=params.warmup_requests,
            repeats=params.repeats,
            distribution=params.request_distribution,
            burstiness=params.burstiness,
            seed=params.random_seed,
            until_flat=params.warmup == "flat",
            interval_s=None if params.measurement_interval_ms is None else params.measurement_interval_ms / 1e3,
            max_in_flight=params.max_in_flight,
            turn_delay_s=params.turn_delay_s,
            budget_s=params.level_budget_s,
        ),
        stop=stopping.StopRule(
            precisions={str(name): share for name, share in params.stop_when.items()},
            max_repeats=params.max_repeats,
            budget_s=params.budget_s,
        ),
        find_rate=params.find_rate,
        find_concurrency=params.find_concurrency,
        objectives=objectives,
        input_data=given if workload is not None else input_data or built_in,
        turns=params.turns,
        num_prompts=params.num_prompts,
        exact_if_possible=params.ignore_eos is None,
        skip_too_long=None if params.too_long is None else params.too_long == "skip",
        workload=workload,
        images=params.images,
        tokenizer=tokenizer,
        processes=processes,
        exporters=Exporters(params.dcgm_url, params.dcgm_gpus) if params.dcgm_url else None,
        settings=settings,
    )


def measured(context: StageContext[PerfParams]) -> LoadResult:
    """The results from the events of a stage that has run."""
    from trtllm_pipeline.measure import analyze

    return analyze(context.out / EVENTS_FILE, read_tokenizer(model_folder(context.inputs)), _objectives(context.params))


def _objectives(params: PerfParams) -> Objectives:
    from trtllm_pipeline.measure import Objectives

    return Objectives({name.removesuffix("_ms"): limit for name, limit in (params.slo or {}).items()})


def _levels(params: PerfParams, expected: ExpectedServer, engine: Engine | None) -> tuple[int, ...]:
    """The concurrencies, by default up to the server's batch size."""
    if params.concurrency is not None:
        return params.concurrency
    if params.request_rate or params.trace_speed:
        return ()
    batch_size = expected.declared.get("max_batch_size") or (None if engine is None else engine.max_batch_size)
    return windows.levels_up_to(batch_size if isinstance(batch_size, int) else 1)


def _workload(
    params: PerfParams,
    expected: ExpectedServer,
    engine: Engine | None,
    max_tokens: int,
    *,
    given: Path | None,
    lengths_data: Path | None,
) -> workloads.Workload | None:
    """The lengths of prompts. None for prompts as they are in the input data, `given` by the user or built in.

    Raises StageError if a required input length is unknown.
    """
    from trtllm_pipeline.measure import workloads

    if lengths_data is None and not fixed_lengths(params, given):
        return None
    longest = expected.declared.get("max_input_len") or (None if engine is None else engine.max_input_len)
    longest = longest if isinstance(longest, int) else None
    lengths = () if lengths_data is None else workloads.read_lengths(lengths_data)
    input_tokens = params.input_tokens or longest
    if not input_tokens and not lengths:
        if params.workload is None:
            return None
        raise StageError(
            "the input length of prompts is unknown", failure=FailureClass.USER, hint="give --input-tokens N"
        )
    longest_output = engine.max_seq_len - longest if longest and engine is not None and engine.max_seq_len else None
    return workloads.Workload(
        input_tokens=input_tokens or 0,
        input_tokens_stddev=params.input_tokens_stddev,
        output_tokens=max_tokens,
        output_tokens_stddev=params.output_tokens_stddev,
        lengths=lengths,
        longest=(longest, longest_output) if longest and longest_output else None,
        shared_prefix_tokens=params.shared_prefix_tokens,
        shared_prefixes=params.shared_prefixes,
        turns=params.turns,
        fresh=given is None and params.num_prompts is None,
        seed=params.random_seed,
    )


def _output_length(engine: Engine | None) -> int | None:
    """The output length that an engine was built for. None if it is unknown."""
    if engine is None or not engine.max_seq_len or not engine.max_input_len:
        return None
    return engine.max_seq_len - engine.max_input_len or None


def failure_of(result: LoadResult) -> FailureClass:
    """TRANSIENT if the machine was too busy to measure, or if the server restarted during the measurement."""
    if all(finding.check in {"client_cpu", "client_lag", "schedule", "server"} for finding in result.invalid):
        return FailureClass.TRANSIENT
    from trtllm_pipeline.measure import triton

    causes = "; ".join(finding.message for finding in result.invalid if finding.check == "failures")
    return triton.failure_class(causes) if causes else FailureClass.CHECK
