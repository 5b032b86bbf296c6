"""The end of the build stage: a complete engine directory with the requested limits.

`trtllm-build` has filled it by now. `engine.json` records the machine that built it, so that a launch elsewhere is
refused before it loads for minutes. The tokenizer stays with the model: a corrected chat template must not require
another build.
"""

from __future__ import annotations

from pathlib import Path

from trtllm_pipeline.base import Machine, StageError, probe, write_json
from trtllm_pipeline.models import Engine, Fields
from trtllm_pipeline.tensorrt.servers import engine_requirements
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.toolchains.companions import ADAPTER
from trtllm_pipeline.tensorrt.trtllm.installation import script
from trtllm_pipeline.tensorrt.trtllm.params import EngineBuild, EngineCheck, VisualBuild
from trtllm_pipeline.tensorrt.trtllm.releases import RUN_SCRIPT
from trtllm_pipeline.tensorrt.trtllm.speculation import MODES, UNCHECKED


def run(context: StageContext[EngineBuild]) -> None:
    """Check the output of `trtllm-build` in `context.out` and complete it. Raises StageError, ServerError."""
    check_limits(context.out, context.params)
    built = engine_requirements.write(context.out, probe.this_machine().gpus[0])
    size = sum(file.stat().st_size for file in context.out.glob("rank*"))
    print(f"engine for {built.gpu}: {built.world_size} ranks, {size / 1e9:.2f} GB")  # noqa: T201 - the stage's log


def check_limits(engine: Path, params: EngineBuild) -> None:
    """Raise StageError if an engine's limits are not the requested ones, as after a build that ignored an option."""
    built = Engine.read(engine)
    mode = None if params.speculative is None else MODES[params.speculative]
    if mode not in {None, built.speculation}:
        raise StageError(f"{engine}: the engine's speculative decoding is {built.speculation}, expected {mode}")
    if mode is not None and params.max_draft_len not in {None, built.max_draft_len}:
        raise StageError(
            f"{engine}: the engine's max_draft_len is {built.max_draft_len}, expected {params.max_draft_len}"
        )
    for name in ("max_input_len", "max_seq_len", "max_batch_size", "max_num_tokens"):
        value = getattr(built, name)
        wanted = getattr(params, name)
        if value is None or wanted is None or value == wanted:
            continue
        what = f"the engine's {name} is {value}, expected {wanted}"
        if name != "max_num_tokens" or value not in _bounds_of_num_tokens(built):
            raise StageError(f"{engine}: {what}")
        print(f"{what}: trtllm-build clamps it between one block of the KV cache and a full batch")  # noqa: T201 - the stage's log


def _bounds_of_num_tokens(built: Engine) -> set[int]:
    """The limits to which `trtllm-build` itself adjusts max_num_tokens: a full batch, in the first releases of prompts
    alone, one block of the KV cache, or all tokens that a full batch drafts at a time.
    """
    lengths = (built.max_seq_len, built.max_input_len, built.max_draft_len and built.max_draft_len + 1)
    full = {(built.max_batch_size or 0) * length for length in lengths if length}
    return full | ({built.tokens_per_block} if built.tokens_per_block else set())


def run_visual(context: StageContext[VisualBuild]) -> None:
    """Check the script's output in `context.out`: an engine of the requested model type. Raises StageError."""
    built = Fields.read(context.out, "config.json").fields("builder_config").text("model_type")
    if built != context.params.family:
        raise StageError(f"{context.out}: the visual engine is for {built}, expected {context.params.family}")
    size = sum(file.stat().st_size for file in context.out.glob("*.engine"))
    if not size:
        raise StageError(f"{context.out} has no engine")
    print(f"visual engine for {built}: {size / 1e9:.2f} GB")  # noqa: T201 - the stage's log


def asks(context: StageContext[EngineCheck], machine: Machine) -> bool:
    """True if run.py exists and can load the engine. It cannot if the engine has Medusa heads, or supports LoRA
    adapters but none is given.

    Source: `ModelRunnerCpp.from_dir` of model_runner_cpp.py. A plan shows an engine that is yet to be built.
    """
    engine = context.inputs["engine"]
    if script(machine, RUN_SCRIPT) is None or context.params.speculative in UNCHECKED:
        return False
    if ADAPTER in context.inputs or not (engine / "config.json").is_file():
        return True
    built = Engine.read(engine)
    return built.max_lora_rank is None or bool(built.lora_dirs)


def run_check(context: StageContext[EngineCheck]) -> None:
    """The result of the engine check: run.py responded or, if it cannot run, the engine's files match this machine."""
    machine = probe.this_machine()
    check = engine_requirements.check(context.inputs["engine"], machine)
    how = "run.py" if asks(context, machine) else "files"
    write_json(context.out / "check.json", {"schema": 1, "how": how, "world_size": check.world_size})
