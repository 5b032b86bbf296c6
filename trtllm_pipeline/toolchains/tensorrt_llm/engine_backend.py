"""The engine lane of TensorRT-LLM, 0.8 to 1.2 and the candidates of 1.3: checkpoints become engines, Triton serves them.

download -> quantize or convert -> build -> check -> repository -> launch -> smoke, perf, accuracy
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from trtllm_pipeline.domain import Cell, Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.machine.model import Machine
from trtllm_pipeline.stages.base import Option, Stage, Work
from trtllm_pipeline.stages.calibration_rows import MOST, Selection, default_set, with_true_samples
from trtllm_pipeline.toolchains.base import Toolchain
from trtllm_pipeline.toolchains.common_stages import ACCURACY, DOWNLOAD, PERF, SCORE, SMOKE
from trtllm_pipeline.toolchains.model_optimizer import formats, job
from trtllm_pipeline.toolchains.tensorrt_llm import (
    backends,
    case,
    checkpoint,
    commands,
    dataset,
    feasibility,
    releases,
    templates,
)
from trtllm_pipeline.toolchains.tensorrt_llm.backends import installed, mapping, number, text
from trtllm_pipeline.toolchains.tensorrt_llm.installed import help_for

CHECKPOINT: Final = ("quantize", "convert")
_CHECKPOINT_OPTIONS: Final = backends.checkpoint_options(
    precisions=tuple(dict.fromkeys((*commands.PLAIN, *formats.PRECISIONS))),
    caches=(backends.NONE, "fp8", "int8"),
    families=tuple(releases.FAMILIES),
    checkpoint_format="tensorrt_llm",
)
_CHECK_PROMPT: Final = "The capital of France is"
_CHECK_TOKENS: Final = 8


def _route(cell: Cell, machine: Machine) -> str:
    """The stage that makes the cell's checkpoint."""
    release = installed(machine).release
    return commands.route(release, str(cell.recipe["family"]), cell.precision, backends.kv_cache(cell))


def _quantize(work: Work, machine: Machine) -> Sequence[Sequence[str]]:
    script = backends.script(machine, releases.QUANTIZE_SCRIPT)
    release, params = installed(machine).release, work.params
    if script is None or not commands.calibrates_as_told(release):
        return (job.command(work, backends.quantizing_python(machine)),)
    data = {"calibration_data": str(work.files.get("calibration_data", default_set()))}  # by hand none need be named
    given = Selection.parse(params.get("calibration"))  # raises for what is not understood
    taken = Selection.parse(_calibrated({"calibration": asdict(given)}, data, machine)["calibration"])
    calibration = commands.Calibration(
        dataset=str(dataset.folder(work)) if commands.takes_dataset(release) else None,
        samples=taken.samples or MOST,
        max_length=taken.max_length,
        batch_size=dataset.BATCH_SIZE if params.get("batch_size") is None else number(params, "batch_size"),
        seed=taken.seed,
    )
    quantize = commands.quantize(
        release,
        script=script,
        family=text(params, "family"),
        model=str(work.inputs["model"]),
        output=str(work.out),
        precision=text(params, "precision"),
        kv=_cache(params),
        tp=number(params, "tp"),
        pp=number(params, "pp"),
        calibration=calibration,
        extra=mapping(params, "options"),
        python=installed(machine).python,
    )
    return (quantize,) if calibration.dataset is None else (dataset.command(work), quantize)


def _calibrated(params: Mapping[str, Json], files: Mapping[str, str], machine: Machine) -> Mapping[str, Json]:
    """With the number of rows there are; as given where the release's script calibrates on a set of its own."""
    own = backends.script(machine, releases.QUANTIZE_SCRIPT) is not None
    if own and not commands.takes_dataset(installed(machine).release):
        return params
    return with_true_samples(params, files)


def _convert(work: Work, machine: Machine) -> Sequence[Sequence[str]]:
    release, params, family = installed(machine).release, work.params, text(work.params, "family")
    _check_convertible(release, params)
    script = backends.script(machine, releases.convert_script(release, family))
    if script is None:
        return (job.command(work, backends.quantizing_python(machine)),)
    return (
        commands.convert_checkpoint(
            release,
            script=script,
            family=family,
            model=str(work.inputs["model"]),
            output=str(work.out),
            precision=text(params, "precision"),
            tp=number(params, "tp"),
            pp=number(params, "pp"),
            workers=1,  # each loads all the weights
            max_position_embeddings=int(str(params.get("max_position_embeddings") or 0)),
            extra=mapping(params, "options"),
            python=installed(machine).python,
        ),
    )


def _build(work: Work, machine: Machine) -> Sequence[Sequence[str]]:
    params, tp, pp = work.params, number(work.params, "tp"), number(work.params, "pp")
    _check_buildable(work, tp, pp)
    program = installed(machine).build
    return (
        commands.build(
            installed(machine).release,
            checkpoint=str(work.inputs["checkpoint"]),
            output=str(work.out),
            family=text(params, "family"),
            precision=text(params, "precision"),
            kv=_cache(params),
            sm=machine.sm,
            world_size=tp * pp,
            workers=tp * pp,
            max_batch_size=number(params, "max_batch_size"),
            isl=number(params, "max_input_len"),
            osl=number(params, "max_seq_len") - number(params, "max_input_len"),
            num_tokens=number(params, "max_num_tokens"),
            extra=mapping(params, "options"),
            program=program or "trtllm-build",
        ),
    )


def _check(work: Work, machine: Machine) -> Sequence[Sequence[str]]:
    script = backends.script(machine, releases.RUN_SCRIPT)
    if script is None:
        return ()
    return (
        commands.engine_check(
            installed(machine).release,
            script=script,
            engine=str(work.inputs["engine"]),
            tokenizer=str(work.inputs["model"]),
            prompt=text(work.params, "prompt"),
            max_tokens=number(work.params, "max_tokens"),
            world_size=number(work.params, "world_size"),
            as_root=backends.is_root(),
            oversubscribe=True,  # else mpirun refuses more ranks than there are cores, though ranks mostly wait for GPUs
            mpirun=machine.mpirun or "mpirun",
            python=installed(machine).python,
        ),
    )


def _cache(params: Mapping[str, Json]) -> str | None:
    """How the KV cache is quantized, None for not at all."""
    asked = text(params, "kv_cache_precision")
    return None if asked == backends.NONE else asked


def _check_convertible(release: str, params: Mapping[str, Json]) -> None:
    """Raise StageError for a checkpoint that takes measuring: converting would leave another one, without a word."""
    family, precision, kv = text(params, "family"), text(params, "precision"), _cache(params)
    if commands.route(release, family, precision, kv) == "convert":
        return
    what = precision if kv is None else f"{precision} with a cache of {kv}"
    raise StageError(
        f"convert_checkpoint.py of TensorRT-LLM {release} does not make {what} for {family}",
        failure=FailureClass.USER,
        hint="pipeline quantize makes it",
    )


def _check_buildable(work: Work, tp: int, pp: int) -> None:
    """Raise StageError where the builder would make another engine than was asked for, or fail after minutes."""
    longest, prompt = number(work.params, "max_seq_len"), number(work.params, "max_input_len")
    if longest <= prompt:
        raise StageError(
            f"max_seq_len {longest} counts prompt and answer together; expected more than max_input_len {prompt}",
            failure=FailureClass.USER,
        )
    # An attempt of a pipeline holds its own results, and builds from what was checked when it was made, or will be.
    if work.out.parent != work.attempt:
        folder = work.inputs["checkpoint"]
        try:
            quantization = checkpoint.check(folder, tp=tp, pp=pp).get("quantization") or {}
            checkpoint.check_precision(folder / "config.json", quantization, work.params)
        except StageError as error:
            hint = "--tp, --pp, --precision and --kv-cache-precision are those that the checkpoint was made with"
            raise StageError(error.message, failure=FailureClass.USER, hint=hint) from error


def _build_params(cell: Cell) -> Mapping[str, Json]:
    return {
        **backends.model_params(cell),
        "tp": cell.tp,
        "pp": cell.pp,
        "max_batch_size": cell.max_batch_size,
        "max_input_len": cell.isl,
        "max_seq_len": cell.isl + cell.osl,
        # trtllm-build has no use for more, and would build the same engine.
        "max_num_tokens": min(case.num_tokens(cell), cell.max_batch_size * (cell.isl + cell.osl)),
        "options": case.build_options(cell),
    }


QUANTIZE: Final = Stage(
    name="quantize",
    version=1,
    summary="quantize a model into a checkpoint, measuring activations where the precision needs it",
    program="trtllm_pipeline.toolchains.tensorrt_llm.checkpoint:run",
    commands=_quantize,
    inputs={"model": "download"},
    applies=lambda cell, machine: _route(cell, machine) == "quantize",
    options=_CHECKPOINT_OPTIONS,
    params=lambda cell: backends.checkpoint_params(cell, calibrated=True),
    advice=lambda cell: {"batch_size": cell.settings["quantize"]["batch_size"]},
    file_names=("calibration_data",),
    files=backends.calibration_data,
    settle=_calibrated,
    resources=backends.quantizing_takes,
    identity=("tensorrt_llm", "checkpoints"),
    expected_s=60.0,
    expected_s_per_gb=15.0,
    leaves="weights",
    timeout_s=6 * 3600.0,
)

CONVERT: Final = Stage(
    name="convert",
    version=1,
    summary="turn a model into a checkpoint for its ranks, unquantized or with weights alone quantized",
    program="trtllm_pipeline.toolchains.tensorrt_llm.checkpoint:run",
    commands=_convert,
    inputs={"model": "download"},
    applies=lambda cell, machine: _route(cell, machine) == "convert",
    options=_CHECKPOINT_OPTIONS,
    params=lambda cell: backends.checkpoint_params(cell, calibrated=False),
    resources=backends.one_gpu,
    section="quantize",
    identity=("tensorrt_llm", "checkpoints"),
    expected_s=20.0,
    expected_s_per_gb=8.0,
    leaves="weights",
    timeout_s=3 * 3600.0,
)

BUILD: Final = Stage(
    name="build",
    version=2,
    summary="build an engine from a checkpoint, with the tokenizer beside it",
    program="trtllm_pipeline.toolchains.tensorrt_llm.engine:run",
    commands=_build,
    inputs={"checkpoint": CHECKPOINT, "model": "download"},
    options=(
        *(option for option in _CHECKPOINT_OPTIONS if option.name in {"family", "precision", "kv_cache_precision"}),
        Option("tp", "int", "tensor parallel size of the checkpoint", default=1),
        Option("pp", "int", "pipeline parallel size of the checkpoint", default=1),
        Option("max_batch_size", "int", "requests in flight", required=True),
        Option("max_input_len", "int", "tokens of a prompt", required=True),
        Option("max_seq_len", "int", "tokens of prompt and answer together", required=True),
        Option("max_num_tokens", "int", "tokens of one forward pass over all requests", required=True),
        Option("options", "json", "further options of trtllm-build: {NAME: VALUE}", default={}),
    ),
    params=_build_params,
    resources=backends.all_ranks,
    identity=("tensorrt_llm", "sm"),
    expected_s=30.0,
    expected_s_per_gb=10.0,
    leaves="weights",
    timeout_s=6 * 3600.0,
)

CHECK: Final = Stage(
    name="check",
    version=1,
    summary="let an engine answer once, without a server",
    program="trtllm_pipeline.toolchains.tensorrt_llm.engine:run_check",
    commands=_check,
    inputs={"engine": "build", "model": "download"},
    options=(
        Option("prompt", "str", "what to ask", default=_CHECK_PROMPT),
        Option("max_tokens", "int", "length of the answer", default=_CHECK_TOKENS),
        Option("world_size", "int", "ranks of the engine", default=1),
    ),
    params=lambda cell: {"prompt": _CHECK_PROMPT, "max_tokens": _CHECK_TOKENS, "world_size": backends.world_size(cell)},
    resources=backends.all_ranks,
    section="build",
    identity=("tensorrt_llm", "gpu"),
    expected_s=20.0,
    expected_s_per_gb=3.0,
    timeout_s=1800.0,
)

REPOSITORY: Final = Stage(
    name="repository",
    version=1,
    summary="fill the release's five Triton models for an engine, and lint them",
    program="trtllm_pipeline.toolchains.tensorrt_llm.frontends:run_engine",
    inputs={"engine": "build", "model": "download"},
    after=("check",),
    options=(
        backends.FRONTEND,
        Option("max_batch_size", "int", "requests Triton lets in at once", required=True),
        *(setting.option() for setting in templates.SETTINGS),
        Option("parameters", "json", "values of any other placeholder of the templates: {NAME: VALUE}", default={}),
        backends.SERVE_OPTIONS,
    ),
    params=lambda cell: {
        **backends.frontend_params(cell),
        **backends.repository_params(cell, templates.BY_NAME),
        "max_batch_size": cell.max_batch_size,
        "parameters": cell.settings["repository"]["parameters"],
    },
    identity=("tensorrt_llm", "templates"),
    expected_s=2.0,
)


def _missing(machine: Machine) -> str | None:
    if lacks := backends.missing(machine):
        return lacks
    if installed(machine).build is None:
        return f"TensorRT-LLM {installed(machine).release} is installed, but no trtllm-build is on PATH"
    return None


def _infeasible(cell: Cell, machine: Machine) -> str | None:
    program = machine.tensorrt_llm.build if machine.tensorrt_llm else None
    asked = help_for(machine, case.build_options(cell), program)
    return (
        feasibility.infeasible(cell, machine, asked)
        or backends.unservable(cell, machine, _read_settings(cell))
        or _unfilled(cell, machine)
    )


def _unfilled(cell: Cell, machine: Machine) -> str | None:
    """Which of a cell's repository settings the release's templates have no place for, or None."""
    if cell.settings["serve"]["frontend"] != backends.TRITON:
        return None
    found, given = installed(machine), backends.repository_params(cell, templates.BY_NAME)
    try:
        parameters = templates.texts(cell.settings["repository"]["parameters"])
        places = None
        if not machine.assumed and found.templates is not None:
            places = templates.installed_places(Path(found.templates))
        if places is None:
            places = templates.recorded_places(found.release, parameters)
        templates.check_asked(templates.asked(given, parameters), places, found.release)
    except StageError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return None


def _read_settings(cell: Cell) -> Collection[str]:
    """The repository settings that something reads, with the frontend of a cell."""
    if cell.settings["serve"]["frontend"] == backends.TRITON:
        return (*templates.BY_NAME, "parameters")
    return backends.SERVE_SETTINGS


TOOLCHAIN: Final = Toolchain(
    name="tensorrt_llm",
    summary="TensorRT engines built by TensorRT-LLM 0.8 to 1.2, served by Triton or trtllm-serve",
    stages=(
        DOWNLOAD,
        QUANTIZE,
        CONVERT,
        BUILD,
        CHECK,
        REPOSITORY,
        backends.launching("launch_engine", {"repository": "repository", "engine": "build"}),
        SMOKE,
        PERF,
        ACCURACY,
        SCORE,
    ),
    missing=_missing,
    identity=backends.identity,
    infeasible=_infeasible,
)
