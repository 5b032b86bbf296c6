"""The engine backend of TensorRT-LLM, 0.8 to candidates of 1.3: checkpoints become engines, Triton serves them.

download -> quantize or convert -> build -> check -> repository -> launch -> smoke, perf, accuracy -> trtllm_bench, if requested
         -> visual, of models that take images, instead of check
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import USUAL_KV_SHARE, Cell, FailureClass, Machine, StageError
from trtllm_pipeline.models import CONVERTED, ModelPart, model_names
from trtllm_pipeline.tensorrt.modelopt import job
from trtllm_pipeline.tensorrt.servers.command_lines import MPIRUN, TRITON_OPENAI, triton_openai
from trtllm_pipeline.tensorrt.stage.base import Stage, StageContext
from trtllm_pipeline.tensorrt.stage.calibration_rows import default_set, with_true_samples
from trtllm_pipeline.tensorrt.stage.lora import ADAPTERS
from trtllm_pipeline.tensorrt.stage.params import Selection, load
from trtllm_pipeline.tensorrt.stage.repository_settings import SETTINGS
from trtllm_pipeline.tensorrt.toolchains import companions, vision
from trtllm_pipeline.tensorrt.toolchains.catalog import DRAFTER, PYTORCH, VISUAL, Toolchain, lacks_tensorrt_llm
from trtllm_pipeline.tensorrt.toolchains.common_stages import (
    ACCURACY,
    DOWNLOAD,
    PERF,
    SCORE,
    SMOKE,
    listening,
    planned_world,
)
from trtllm_pipeline.tensorrt.toolchains.companions import ADAPTER
from trtllm_pipeline.tensorrt.toolchains.standard_tasks import TASKS
from trtllm_pipeline.tensorrt.trtllm import (
    backends,
    case,
    checkpoint,
    commands,
    dataset,
    durations,
    engine_bench,
    installation,
    llmapi,
    needs,
    program_options,
    releases,
    rules,
    speculation,
    templates,
)
from trtllm_pipeline.tensorrt.trtllm.installation import installed
from trtllm_pipeline.tensorrt.trtllm.params import (
    FRONTEND_TRITON,
    FRONTEND_TRITON_OPENAI,
    Checkpoint,
    EngineBuild,
    EngineCheck,
    EngineRepository,
    VisualBuild,
)

CHECKPOINT: Final = ("quantize", "convert")
_NO_SCRIPT: Final = "the example scripts of TensorRT-LLM {}, one of which builds visual engines, were not found"
_CONFIG: Final = ("triton_parameters", "triton_max_batch_size", "preferred_batch_size", "instance_kinds")
"""Repository settings that belong to config.pbtxt itself."""
_CALIBRATED: Final = CONVERTED | {ModelPart.TOKENIZER}
_READ_IN_CHATS: Final = _CALIBRATED | {ModelPart.CHAT_TEMPLATE}
_LOOKED_AT: Final = frozenset(("llama", "qwen", "phi", "gpt", "gemma"))
"""Scripts whose input files are known. A model with any other script is read as a whole."""
_READ_BY_RUN: Final = frozenset(ModelPart) - {ModelPart.WEIGHTS}
"""Files that run.py may read for the tokenizer."""
_IN_TRITON: Final = frozenset({*SETTINGS, "parameters", *_CONFIG})
_READ: Final = {"triton": _IN_TRITON, "triton_openai": _IN_TRITON, "trtllm_serve": frozenset(llmapi.SERVE_SETTINGS)}
"""Frontend -> the repository settings that have an effect."""


def _route(cell: Cell, machine: Machine) -> str:
    """The stage that makes the cell's checkpoint."""
    release = installed(machine).release
    return commands.route(release, str(cell.recipe["family"]), cell.precision, case.kv_cache(cell))


def _quantize(context: StageContext[Checkpoint], machine: Machine) -> Sequence[Sequence[str]]:
    script = installation.script(machine, releases.QUANTIZE_SCRIPT)
    release, params = installed(machine).release, context.params
    if script is None or not commands.has_calibration_option(release):
        return (job.command(context, backends.quantizing_python(machine)),)
    data = {"calibration_data": str(context.files.get("calibration_data", default_set()))}  # optional in a manual run
    own_rows = commands.takes_dataset(release)
    quantize = commands.quantize(
        release,
        _calibrated(replace(params, calibration=params.calibration or Selection()), data, machine),
        (installed(machine).python, script),
        model=str(context.inputs["model"]),
        output=str(context.out),
        dataset=str(dataset.folder(context)) if own_rows else None,
        draft=_draft(context),
    )
    return (dataset.command(context), quantize) if own_rows else (quantize,)


def _calibrated(params: Checkpoint, files: Mapping[str, str], machine: Machine) -> Checkpoint:
    """With the number of available rows. Unchanged if the release's script calibrates on its own set."""
    own = installation.script(machine, releases.QUANTIZE_SCRIPT) is not None
    if own and not commands.takes_dataset(installed(machine).release):
        return params
    return with_true_samples(params, files)


def _convert(context: StageContext[Checkpoint], machine: Machine) -> Sequence[Sequence[str]]:
    release, params = installed(machine).release, context.params
    _check_convertible(release, params)
    script = installation.script(machine, releases.convert_script(release, params.family, params.heads))
    if script is None:
        return (job.command(context, backends.quantizing_python(machine)),)
    program, model = (installed(machine).python, script), str(context.inputs["model"])
    draft = _draft(context)
    return (commands.convert_checkpoint(release, params, program, model=model, output=str(context.out), draft=draft),)


def _draft(context: StageContext[Checkpoint]) -> str | None:
    """The directory with the heads of a checkpoint. Raises StageError if they are requested and missing."""
    folder = context.inputs.get(companions.DRAFT)
    if context.params.heads is not None and folder is None:
        raise StageError(
            f"{context.params.heads} heads are a separate model, but no model was given", failure=FailureClass.USER
        )
    return None if folder is None else str(folder)


def _build(context: StageContext[EngineBuild], machine: Machine) -> Sequence[Sequence[str]]:
    _check_buildable(context)
    installation = installed(machine)
    return (
        commands.build(
            installation.release,
            context.params,
            installation.build or "trtllm-build",
            checkpoint=str(context.inputs["checkpoint"]),
            output=str(context.out),
            sm=machine.sm,
        ),
    )


def _visual(context: StageContext[VisualBuild], machine: Machine) -> Sequence[Sequence[str]]:
    release = installed(machine).release
    script = installation.script(machine, releases.visual_script(release))
    if script is None:
        raise StageError(
            _NO_SCRIPT.format(release),
            failure=FailureClass.USER,
            hint="pipeline doctor shows where examples are looked for",
        )
    program, model = (installed(machine).python, script), str(context.inputs["model"])
    return (commands.visual_engine(context.params, program, model=model, output=str(context.out)),)


def _check(context: StageContext[EngineCheck], machine: Machine) -> Sequence[Sequence[str]]:
    from trtllm_pipeline.tensorrt.trtllm.engine import asks

    script = installation.script(machine, releases.RUN_SCRIPT)
    if script is None or not asks(context, machine):
        return ()
    return (
        commands.engine_check(
            installed(machine).release,
            context.params,
            (installed(machine).python, script),
            engine=str(context.inputs["engine"]),
            tokenizer=str(context.inputs["model"]),
            mpirun=machine.mpirun or MPIRUN,
            as_root=os.geteuid() == 0,
            adapter=str(context.inputs[ADAPTER]) if ADAPTER in context.inputs else None,
        ),
    )


def _server(cell: Cell, context: StageContext[Any], machine: Machine) -> Sequence[Sequence[str]]:
    release = installed(machine).release
    if context.params.frontend == FRONTEND_TRITON:
        return (planned_world(context, machine, backends.world_size(cell), release, images=vision.sees(cell)),)
    inputs = context.inputs
    if context.params.frontend == FRONTEND_TRITON_OPENAI:
        program = backends.openai_program(machine)
        command = triton_openai(installed(machine).python, program, str(inputs["repository"]), str(inputs["model"]))
        return (listening(command, context.params, TRITON_OPENAI),)
    command = llmapi.serve_line(_repository(cell), inputs, installed(machine), inputs["repository"])
    return (listening(command, context.params),)


def _check_convertible(release: str, params: Checkpoint) -> None:
    """Raise StageError for a checkpoint that needs calibration: converting would silently create another one."""
    family, precision, kv = params.family, params.precision, commands.quantized_cache(params.kv_cache_precision)
    if params.quantization is not None or commands.route(release, family, precision, kv) == "convert":
        return
    what = precision if kv is None else f"{precision} with a cache of {kv}"
    raise StageError(
        f"convert_checkpoint.py of TensorRT-LLM {release} does not create {what} for {family}",
        failure=FailureClass.USER,
        hint="pipeline stage quantize creates it",
    )


def _check_buildable(context: StageContext[EngineBuild]) -> None:
    """Raise StageError if the builder would create another engine than requested, or fail after minutes."""
    params = context.params
    longest, prompt = params.max_seq_len, params.max_input_len
    if longest <= prompt:
        raise StageError(
            f"max_seq_len {longest} covers prompt and output together; expected more than max_input_len {prompt}",
            failure=FailureClass.USER,
        )
    # A pipeline's attempt has its own results, and builds from inputs that were checked when they were created, or will
    # be.
    if context.out.parent != context.attempt:
        folder = context.inputs["checkpoint"]
        try:
            quantization = checkpoint.check(folder, tp=params.tp, pp=params.pp, ep=params.ep).get("quantization") or {}
            checkpoint.check_precision(folder / "config.json", quantization, params)
        except StageError as error:
            hint = "--tp, --pp, --ep, --precision and --kv-cache-precision must match the checkpoint"
            raise StageError(error.message, failure=FailureClass.USER, hint=hint) from error


def _is_known(cell: Cell) -> bool:
    """True if the files that a script reads are known: options may let it read more, draft heads have own scripts."""
    if cell.settings["quantize"]["options"] or companions.DRAFT in cell.companions:
        return False
    return releases.FAMILIES[str(cell.recipe["family"])].script in _LOOKED_AT


def _quantize_reads(cell: Cell) -> Mapping[str, frozenset[ModelPart]]:
    """Includes the tokenizer, for the calibration rows, and the chat template if rows may be conversations.

    Source: `quantize_and_export` of quantize_by_modelopt.py, which opens a processor for other families only.
    """
    if not _is_known(cell):
        return {}
    chats = backends.calibration(cell)["chat_template"] or backends.has_own_calibration_data(cell)
    return {"model": _READ_IN_CHATS if chats else _CALIBRATED}


def _checkpoint(cell: Cell, *, calibrated: bool) -> Checkpoint:
    phi3 = cell.recipe["family"] == "phi3"
    own = {
        "max_position_embeddings": cell.recipe["max_position_embeddings"] if phi3 else None,
        "calibration": backends.calibration(cell) if calibrated else None,
    }
    heads = speculation.checkpoint_params(cell)
    return load(Checkpoint, backends.checkpoint_params(cell), own, heads, cell.settings["quantize"])


def _build_params(cell: Cell) -> EngineBuild:
    rank, modules = companions.lora_build(cell)
    given, draft = case.build_options(cell), speculation.drafting(cell)
    own = {
        "max_batch_size": cell.max_batch_size,
        "max_input_len": companions.longest_prompt(cell),
        "max_seq_len": cell.isl + cell.osl,
        # trtllm-build does not use more, and would build the same engine.
        "max_num_tokens": max(
            min(case.num_tokens(cell), cell.max_batch_size * (cell.isl + cell.osl)), case.least_tokens(cell)
        ),
        **({} if draft is None else {"speculative": draft.method, "max_draft_len": draft.length}),
        "max_lora_rank": rank,
        "lora_target_modules": modules,
        "max_multimodal_len": cell.max_batch_size * cell.isl if vision.sees(cell) else None,
        "options": {
            name: given[name] for name in given if rank is None or name.removeprefix("--") not in companions.LORA_BUILD
        },
    }
    return load(EngineBuild, backends.checkpoint_params(cell), own)


def _repository(cell: Cell) -> EngineRepository:
    settings = cell.settings["repository"]
    own = {**backends.frontend(cell), "max_batch_size": settings["triton_max_batch_size"] or cell.max_batch_size}
    draft = speculation.drafting(cell)
    if draft is not None and draft.method in speculation.DECODING_MODES:
        own["decoding_mode"] = draft.method
    if draft is not None and draft.method == "draft":
        own["tensorrt_llm_draft_model_name"] = model_names.DRAFT_MODEL
    if (share := case.kv_share(cell)) != USUAL_KV_SHARE:  # defaults of Triton's backend are not written
        own["kv_cache_free_gpu_mem_fraction"] = share
    return load(EngineRepository, own, settings)


QUANTIZE: Final = Stage(
    name="quantize",
    version=1,
    summary="quantize a model into a checkpoint, calibrating activations if the precision needs it",
    program="trtllm_pipeline.tensorrt.trtllm.checkpoint:run",
    commands=_quantize,
    inputs={"model": "download", companions.DRAFT: companions.DRAFT},
    optional=frozenset({companions.DRAFT}),
    parts=_quantize_reads,
    applies=lambda cell, machine: _route(cell, machine) == "quantize",
    params=Checkpoint,
    read=lambda cell: _checkpoint(cell, calibrated=True),
    file_names=("calibration_data",),
    files=backends.calibration_data,
    settle=_calibrated,
    resources=backends.quantizing_takes,
    gpus=backends.all_visible,
    identity=("tensorrt_llm", "checkpoints"),
    expected_s=20.0,
    takes=durations.quantizing,
    needs=needs.quantizing,
    timeout_s=6 * 3600.0,
    examples=("--model model --precision fp8 --family qwen2 --output-dir checkpoint",),
)

CONVERT: Final = Stage(
    name="convert",
    version=1,
    summary="convert a model into a checkpoint, with quantized weights if the precision needs it",
    program="trtllm_pipeline.tensorrt.trtllm.checkpoint:run",
    commands=_convert,
    inputs={"model": "download", companions.DRAFT: companions.DRAFT},
    optional=frozenset({companions.DRAFT}),
    # The scripts only open the tokenizer for calibration. Source: convert_checkpoint.py of `_LOOKED_AT`, and
    # `from_hugging_face` of their models.
    parts=lambda cell: {"model": CONVERTED} if _is_known(cell) else {},
    applies=lambda cell, machine: _route(cell, machine) == "convert",
    params=Checkpoint,
    read=lambda cell: _checkpoint(cell, calibrated=False),
    resources=backends.one_gpu,
    gpus=lambda _context: 1,
    section="quantize",
    identity=("tensorrt_llm", "checkpoints"),
    expected_s=20.0,
    takes=durations.converting,
    needs=needs.converting,
    timeout_s=3 * 3600.0,
    examples=("--model model --precision int8_wo --output-dir checkpoint",),
)

BUILD: Final = Stage(
    name="build",
    version=3,
    summary="build an engine from a checkpoint",
    program="trtllm_pipeline.tensorrt.trtllm.engine:run",
    commands=_build,
    inputs={"checkpoint": CHECKPOINT},
    params=EngineBuild,
    read=_build_params,
    resources=backends.all_ranks,
    gpus=lambda context: backends.ranks_of(context.inputs["checkpoint"]),
    identity=("tensorrt_llm", "sm"),
    expected_s=45.0,
    takes=durations.building,
    needs=needs.building,
    timeout_s=6 * 3600.0,
    examples=("--checkpoint checkpoint --max-batch-size 4 --max-input-len 512 --max-seq-len 640 --output-dir engine",),
)

BUILD_VISUAL: Final = Stage(
    name=VISUAL,
    version=1,
    summary="build the vision encoder engine, which turns images into features for the language engine",
    program="trtllm_pipeline.tensorrt.trtllm.engine:run_visual",
    commands=_visual,
    inputs={"model": "download"},
    applies=lambda cell, _machine: vision.sees(cell),
    params=VisualBuild,
    read=lambda cell: VisualBuild(
        family=str(cell.recipe["family"]),
        max_batch_size=cell.max_batch_size * vision.FAMILIES[str(cell.recipe["family"])].parts,
    ),
    resources=backends.one_gpu,
    gpus=lambda _context: 1,
    section="build",
    identity=("tensorrt_llm", "sm"),
    expected_s=120.0,
    needs=needs.building_visual,
    timeout_s=3 * 3600.0,
    examples=("--model model --family qwen2_vl --output-dir visual",),
)

CHECK: Final = Stage(
    name="check",
    version=1,
    summary="generate one response from an engine, without a server",
    program="trtllm_pipeline.tensorrt.trtllm.engine:run_check",
    commands=_check,
    inputs={"engine": "build", "model": "download", ADAPTER: ADAPTER},
    optional=frozenset({ADAPTER}),
    parts=lambda _cell: {"model": _READ_BY_RUN},
    applies=lambda cell, _machine: not vision.sees(cell),  # run.py only sends text
    params=EngineCheck,
    read=lambda cell: load(
        EngineCheck,
        {
            "world_size": backends.world_size(cell),
            "gpu_weights_percent": case.kept_weights(cell),
            **speculation.check_params(cell),
        },
        cell.settings["check"],
    ),
    resources=backends.all_ranks,
    gpus=lambda context: context.params.world_size,
    identity=("tensorrt_llm", "gpu"),
    expected_s=20.0,
    takes=durations.checking,
    needs=needs.checking,
    timeout_s=1800.0,
    examples=("--engine engine --model model --output-dir checked",),
)

REPOSITORY: Final = Stage(
    name="repository",
    version=2,
    summary="write a Triton model repository for an engine from the release's templates, and lint it",
    program="trtllm_pipeline.tensorrt.trtllm.frontends:run_engine",
    inputs={"engine": "build", "model": "download", **{name: name for name in (*ADAPTERS, DRAFTER, VISUAL)}},
    optional=frozenset({*ADAPTERS, DRAFTER, VISUAL}),
    after=("check",),
    params=EngineRepository,
    read=_repository,
    identity=("tensorrt_llm", "templates"),
    expected_s=2.0,
    examples=("--engine engine --model model --max-batch-size 4 --output-dir repository",),
)


BENCH: Final = engine_bench.stage(
    lambda cell: engine_bench.params(cell, _repository(cell)), {"engine": "build", "model": "download"}
)


def _missing(machine: Machine) -> str | None:
    if lacks := lacks_tensorrt_llm(machine):
        return lacks
    if installed(machine).build is None:
        return f"TensorRT-LLM {installed(machine).release} is installed, but no trtllm-build is on PATH"
    return None


def _infeasible(cell: Cell, machine: Machine) -> str | None:
    program = machine.tensorrt_llm.build if machine.tensorrt_llm else None
    help_text = program_options.help_for(machine, case.build_options(cell), program)
    return (
        rules.infeasible(cell, machine, help_text)
        or backends.unservable(cell, machine, _read(cell))
        or _unfilled(cell, machine)
        or engine_bench.unfit(cell, machine)
    )


def _read(cell: Cell) -> Mapping[str, frozenset[str]]:
    draft = speculation.drafting(cell)
    if draft is None or draft.method != "lookahead":
        return _READ
    return {**_READ, "trtllm_serve": _READ["trtllm_serve"] | {*speculation.LOOKAHEAD}}


def _unfilled(cell: Cell, machine: Machine) -> str | None:
    """The cell's repository setting that the release's templates cannot hold, or None."""
    if not backends.in_triton(cell):
        return None
    installation, value = installed(machine), _repository(cell)
    if vision.sees(cell) and (reason := _not_with_images(cell, machine)):
        return reason
    try:
        parameters = templates.texts(value.parameters)
        places = None
        if not machine.assumed and installation.templates is not None:
            places = templates.installed_places(Path(installation.templates))
        if places is None:  # other placeholders are unknown
            places = templates.recorded_places(installation.release) | parameters.keys()
        templates.check_required(templates.given(value), places, installation.release)
        templates.check_config(value, places, most=cell.max_batch_size)
    except StageError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return None


def _not_with_images(cell: Cell, machine: Machine) -> str | None:
    """The requirement of a visual engine that a machine lacks, or a cell's setting that excludes images, or None."""
    install = installed(machine)
    if installation.script(machine, releases.visual_script(install.release)) is None:
        return _NO_SCRIPT.format(install.release)
    if not machine.assumed and install.templates and not (Path(install.templates) / vision.TEMPLATE_SET).is_dir():
        return f"the Triton templates at {install.templates} have no directory {vision.TEMPLATE_SET}"
    for name in ("triton_parameters", "instance_kinds"):
        if model_names.BLS_MODEL in (getattr(_repository(cell), name) or {}):
            return f"settings.repository.{name}: {model_names.BLS_MODEL} does not accept images, and is left out with a visual engine"
    return None


def _instead(cell: Cell, machine: Machine) -> str | None:
    """The PyTorch runtime, for a family that the release does not convert, for a precision or a parallelism that only
    the runtime supports, and for a precision that the recipe lists only for it: the runtime then has the reason why the
    cell cannot work.
    """
    release, name = installed(machine).release, str(cell.recipe["family"])
    if not releases.at_least(release, releases.FIRST_PYTORCH):
        return None
    family = releases.FAMILIES.get(name)
    if family is None or not releases.at_least(release, family.since):
        return PYTORCH
    if name in vision.FAMILIES and name not in vision.PYTORCH_WITHOUT:
        return PYTORCH  # upstream recommends it for images, and it accepts more than one per request
    if rules.takes_model(cell, machine):
        return None
    if rules.takes_model(replace(cell, toolchain=PYTORCH), machine):
        return PYTORCH
    engines, pytorch = (rules.precisions_of(cell.recipe, each) for each in (cell.toolchain, PYTORCH))
    only = engines is not None and cell.precision not in engines and cell.precision in (pytorch or ())
    return PYTORCH if only else None


TOOLCHAIN: Final = Toolchain(
    name="tensorrt_llm",
    summary="TensorRT engines built by TensorRT-LLM 0.8 to 1.2, served by Triton or trtllm-serve",
    has_family=lambda family: family in releases.FAMILIES and family not in vision.ENGINES_WITHOUT,
    stages=(
        DOWNLOAD,
        companions.FETCH_DRAFT,
        *companions.FETCH_ADAPTERS,
        QUANTIZE,
        CONVERT,
        BUILD,
        BUILD_VISUAL,
        CHECK,
        REPOSITORY,
        replace(
            backends.launching("engine"),
            inputs={
                "repository": "repository",
                "engine": "build",
                **{name: name for name in (*ADAPTERS, DRAFTER, VISUAL)},
            },
            optional=REPOSITORY.optional,
            starts=_server,
            needs=needs.serving,
            expected_s=30.0,
            takes=durations.loading,
        ),
        SMOKE,
        PERF,
        BENCH,
        ACCURACY,
        SCORE,
        TASKS,
    ),
    missing=_missing,
    identity=backends.identity,
    infeasible=_infeasible,
    numerics=backends.numerics_of,
    drafter=speculation.drafter,
    instead=_instead,
)
