"""Command lines of TensorRT-LLM's programs for a release. Pure: programs are not run and files are not read.

The table of options determines everything that depends on the release. Defaults that differ between releases are always
written out, so that one matrix builds the same engine everywhere. `rules.py` has refused impossible cells before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from trtllm_pipeline.base import USUAL_NUM_TOKENS, FailureClass, Json, PlanError, StageError
from trtllm_pipeline.models import AS_IS
from trtllm_pipeline.tensorrt.servers.command_lines import MPIRUN
from trtllm_pipeline.tensorrt.stage.calibration_rows import MOST
from trtllm_pipeline.tensorrt.stage.params import DRAFT_LENGTHS, Selection
from trtllm_pipeline.tensorrt.trtllm import program_options
from trtllm_pipeline.tensorrt.trtllm.params import (
    NONE,
    Checkpoint,
    EngineBench,
    EngineBuild,
    EngineCheck,
    EngineRepository,
    VisualBuild,
    WeightsRepository,
)
from trtllm_pipeline.tensorrt.trtllm.prequantized import FORMS
from trtllm_pipeline.tensorrt.trtllm.program_options import Scalar, Tool
from trtllm_pipeline.tensorrt.trtllm.releases import FAMILIES, FIRST_SERVE, at_least, convert_tool
from trtllm_pipeline.tensorrt.trtllm.speculation import DEFAULTS as HEADS_DEFAULTS
from trtllm_pipeline.tensorrt.trtllm.speculation import MODES

PLAIN: Final = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Precision -> data type of unquantized weights."""
WEIGHT_ONLY: Final[Mapping[str, str]] = {"int8_wo": "int8", "int4_wo": "int4"}
"""Precision -> the convert scripts' name for weights that need no calibration."""

_BUILD: Final = "trtllm-build"
_QUANTIZE: Final = "quantize.py"
_RUN: Final = "run.py"
_SERVE: Final = "trtllm-serve"
_CONFIG: Final = "--extra_llm_api_options"
"""The only spelling that is valid in all releases with this option."""
FP8_INPUTS: Final = frozenset({"fp8", "w4a8_awq", "nvfp4"})
"""Precisions whose layers use FP8 or FP4 activations."""
W4A8_PAGED: Final = "1.2.0"
"""First release known to support w4a8_awq with an FP8 cache and paged context attention."""
TOKENS_PER_BLOCK: Final = 64
"""Tokens of a block of the KV cache."""
CALIBRATION_BATCH_SIZE: Final = 16
"""Default for the calibration batch of quantize.py. Its own default, 1, underuses a GPU."""


class _Arguments:
    """Arguments of one program in one release. Rejects options that the program does not have."""

    def __init__(self, tool: Tool, release: str, *command: str) -> None:
        self.tool, self.release = tool, release
        self.argv = list(command)

    def has(self, name: str) -> bool:
        return program_options.exists(self.tool, self.release, name)

    def add(self, values: Mapping[str, Scalar | None]) -> None:
        """Options with their values: True is an enabled switch, None an omitted option."""
        for name, value in values.items():
            if value is not None:
                assert self.has(name), f"{self.tool} {self.release} has no {name}"
                self.argv += [name] if value is True else [name, str(value)]

    def add_where_known(self, values: Mapping[str, Scalar | None]) -> None:
        self.add({name: value for name, value in values.items() if self.has(name)})

    def with_extra(self, extra: Mapping[str, Json] | None) -> list[str]:
        """All arguments, with a user's options last: those of a matrix have been checked. Raises StageError for options
        that are set here, which a manual command may contain.
        """
        for key in extra or ():
            if program_options.decided(self.tool, key):
                raise StageError(
                    f"{key} of {self.tool.partition(':')[0]} is set by an option of this verb",
                    failure=FailureClass.USER,
                    hint="--help lists them",
                )
        return [*self.argv, *program_options.render(self.tool, self.release, extra or {})]


# ------------------------------------------------------------------------------------------------------- checkpoints


def data_type(precision: str, family: str) -> str:
    """Data type of all that is not quantized: the precision's, else float16, or bfloat16 for Gemma, which overflows."""
    return PLAIN.get(precision, "bfloat16" if family.startswith("gemma") else "float16")


def quantized_cache(params: str) -> str | None:
    """The quantized KV cache's precision, as a stage's parameter names it. None if it is not quantized."""
    return None if params == NONE else params


def kv_precision(precision: str, params: Json) -> str | None:
    """Quantization of the KV cache. None without. By default, FP8 and FP4 weights get an FP8 cache."""
    if params is None:
        return "fp8" if precision in {"fp8", "nvfp4"} else None
    return str(params) if params in {"fp8", "int8"} else None


def route(release: str, family: str, precision: str, kv: str | None) -> Literal["convert", "quantize"]:
    """The script that creates the checkpoint: quantize.py if calibration is needed, otherwise convert_checkpoint.py."""
    if precision == AS_IS:
        return "convert"
    if kv is not None or (precision not in PLAIN and precision not in WEIGHT_ONLY):
        return "quantize"
    if precision in WEIGHT_ONLY and not program_options.exists(
        convert_tool(family), release, _weight_only_option(family)
    ):
        return "quantize"
    return "convert"


def _weight_only_option(family: str) -> str:
    return "--use-weight-only-with-precision" if FAMILIES[family].script == "gemma" else "--weight_only_precision"


def convert_checkpoint(
    release: str, params: Checkpoint, program: Sequence[str], *, model: str, output: str, draft: str | None = None
) -> list[str]:
    """The family's `convert_checkpoint.py`: a Hugging Face directory becomes a checkpoint of all ranks, uncalibrated.

    `draft` is the directory of the heads that become part of it, which have a separate `convert_checkpoint.py`.
    """
    arguments = _Arguments(convert_tool(params.family, params.heads), release, *program)
    if params.heads is not None:
        return _with_heads(arguments, params, model=model, output=output, draft=draft)
    if FAMILIES[params.family].script == "gemma":
        arguments.add(
            {"--ckpt-type": "hf", "--model-dir": model, "--output-model-dir": output, "--world-size": params.tp}
        )
    else:
        arguments.add({"--model_dir": model, "--output_dir": output})
        arguments.add_where_known({"--tp_size": params.tp, "--pp_size": params.pp})
        if params.ep is not None:
            arguments.add({"--moe_tp_size": params.tp // params.ep, "--moe_ep_size": params.ep})
    arguments.add({"--dtype": data_type(params.precision, params.family)})
    if params.precision in WEIGHT_ONLY:
        arguments.add_where_known({"--use_weight_only": True})
        arguments.add({_weight_only_option(params.family): WEIGHT_ONLY[params.precision]})
    if params.quantization is not None:
        arguments.add(FORMS[params.quantization].options)
    if params.family == "phi3":
        # It distinguishes the two Phi-3 minis if the script needs it.
        size = "128k" if (params.max_position_embeddings or 0) > 4096 else "4k"
        arguments.add_where_known({"--model_type": f"Phi-3-mini-{size}-instruct"})
    if params.family == "chatglm":
        # Otherwise, it looks for the version in the directory's name, and fails without one.
        arguments.add({"--chatglm_version": "glm4"})
    arguments.add_where_known({"--workers": 1})  # each worker loads all weights
    return arguments.with_extra(params.options)


def _with_heads(arguments: _Arguments, params: Checkpoint, *, model: str, output: str, draft: str | None) -> list[str]:
    """The rest of a converter's command line, for the model with its heads."""
    length = params.max_draft_len or DRAFT_LENGTHS[str(params.heads)]
    arguments.add({"--model_dir": model, f"--{params.heads}_model_dir": draft, "--output_dir": output})
    arguments.add(
        {"--dtype": data_type(params.precision, params.family), "--tp_size": params.tp, "--pp_size": params.pp}
    )
    if params.heads == "medusa":
        arguments.add(_medusa(params) | {"--max_medusa_token_len": length})
    else:
        names = ("num_eagle_layers", "max_non_leaves_per_layer")
        arguments.add({"--max_draft_len": length, **{f"--{name}": _or_default(params, name) for name in names}})
    arguments.add({"--workers": 1})  # each worker loads all weights
    return arguments.with_extra(params.options)


def _medusa(params: Checkpoint) -> dict[str, Scalar | None]:
    return {f"--{name}": _or_default(params, name) for name in ("num_medusa_heads", "num_medusa_layers")}


def _or_default(params: Checkpoint, name: str) -> int:
    return int(getattr(params, name) or HEADS_DEFAULTS[name])


def quantize(
    release: str,
    params: Checkpoint,
    program: Sequence[str],
    *,
    model: str,
    output: str,
    dataset: str | None,
    draft: str | None = None,
) -> list[str]:
    """`quantize.py`: converts a Hugging Face directory to a quantized checkpoint of all ranks.

    `dataset` is the directory of the calibration rows. None if the script uses its own: `takes_dataset`. `draft` is the
    directory of the Medusa heads that become part of it.
    """
    arguments = _Arguments(_QUANTIZE, release, *program)
    arguments.add({"--model_dir": model, "--output_dir": output, "--dtype": data_type(params.precision, params.family)})
    arguments.add({"--qformat": "full_prec" if params.precision in PLAIN else params.precision})
    arguments.add({"--kv_cache_dtype": quantized_cache(params.kv_cache_precision)})
    arguments.add({"--tp_size": params.tp, "--pp_size": params.pp})
    rows = params.calibration or Selection()
    arguments.add({"--calib_size": rows.samples or MOST, "--batch_size": params.batch_size or CALIBRATION_BATCH_SIZE})
    if dataset is not None:
        arguments.add({"--calib_dataset": dataset, "--calib_max_seq_length": rows.max_length, "--seed": rows.seed})
    if params.heads is not None:
        length = params.max_draft_len or DRAFT_LENGTHS[params.heads]
        arguments.add({"--medusa_model_dir": draft, **_medusa(params), "--max_draft_len": length})
    return arguments.with_extra(params.options)


def takes_dataset(release: str) -> bool:
    """True if this release's `quantize.py` has an option for the calibration data."""
    return program_options.exists(_QUANTIZE, release, "--calib_dataset")


def has_calibration_option(release: str) -> bool:
    """True if `quantize.py` has an option for the calibration data: since 0.10, which does not accept a directory."""
    return not takes_dataset(release) or at_least(release, "0.11")


# ----------------------------------------------------------------------------------------------------------- engines


def max_num_tokens(max_batch_size: int, isl: int, osl: int, *, chunked: bool = False) -> int:
    """Default for the tokens of one forward pass: 8192 as in TensorRT-LLM since 0.11, at least one token per request
    and, unless prompts are split (`chunked`), a whole prompt, and at most those of a full batch.
    """
    return min(max_batch_size * (isl + osl), max(USUAL_NUM_TOKENS, 0 if chunked else isl, max_batch_size))


def build(
    release: str, params: EngineBuild, program: str = _BUILD, *, checkpoint: str, output: str, sm: int | None
) -> list[str]:
    """`trtllm-build`: a checkpoint to an engine of as many ranks as it has, each built by a separate worker.

    `sm` is the compute capability as one number (90). The user's options override our defaults.
    """
    batch, prompt, longest = params.max_batch_size, params.max_input_len, params.max_seq_len
    arguments = _Arguments(_BUILD, release, program)
    arguments.add({"--checkpoint_dir": checkpoint, "--output_dir": output})
    arguments.add({"--max_batch_size": batch, "--max_input_len": prompt})
    arguments.add_where_known({"--max_seq_len": longest})
    if not arguments.has("--max_seq_len"):
        arguments.add({"--max_output_len": longest - prompt})
    arguments.add({"--max_num_tokens": params.max_num_tokens or max_num_tokens(batch, prompt, longest - prompt)})
    arguments.add({"--max_prompt_embedding_table_size": params.max_multimodal_len})
    arguments.add({"--workers": params.tp * params.pp})
    if params.speculative is not None:
        length = params.max_draft_len or DRAFT_LENGTHS.get(params.speculative)
        arguments.add({"--speculative_decoding_mode": MODES[params.speculative], "--max_draft_len": length})
    table = program_options.load()[_BUILD]
    chosen = {table.canonical(program_options.spelling(key)) for key in params.options}
    defaults = _build_defaults(release, params, sm)
    arguments.add_where_known({name: value for name, value in defaults.items() if name not in chosen})
    if params.max_lora_rank is not None:
        lora: dict[str, Json] = {
            "max_lora_rank": params.max_lora_rank,
            "lora_target_modules": [*params.lora_target_modules],
        }
        arguments.argv += program_options.render(_BUILD, release, lora)
    return arguments.with_extra(params.options)


def visual_engine(params: VisualBuild, program: Sequence[str], *, model: str, output: str) -> list[str]:
    """`build_visual_engine.py`, from 0.19 on `build_multimodal_engine.py`: builds the vision part of a Hugging Face
    directory as an engine with one rank. It has had these four options since 0.9.
    """
    return [
        *program,
        *("--model_type", params.family, "--model_path", model, "--output_dir", output),
        *("--max_batch_size", str(params.max_batch_size)),
    ]


def _build_defaults(release: str, params: EngineBuild, sm: int | None) -> dict[str, Scalar | None]:
    """Options of `trtllm-build` that we write out because their default changed, or because a precision needs them."""
    precision, dtype = params.precision, data_type(params.precision, params.family)
    kv = quantized_cache(params.kv_cache_precision)
    attention = context_attention(release, precision=precision, kv=kv, sm=sm, extra=params.options)
    fused: Scalar | None = None
    if program_options.accepts(_BUILD, release, "--use_fused_mlp", "enable"):
        fused = "enable"
    elif precision in PLAIN or precision == "fp8":
        fused = True  # the switch of these releases fails for other quantized layers
    return {
        "--gpt_attention_plugin": dtype,
        # TensorRT's own FP8 multiplication is faster except for the smallest batches.
        "--gemm_plugin": {"fp8": "disable", "nvfp4": "nvfp4"}.get(precision, dtype),
        "--nccl_plugin": dtype,
        "--moe_plugin": dtype,
        # Like `auto` in releases from 0.11 on: layers and adapters must have the same type.
        "--lora_plugin": None if params.max_lora_rank is None else dtype,
        "--tokens_per_block": TOKENS_PER_BLOCK,
        "--use_paged_context_fmha": "enable" if attention.paged else "disable",
        "--use_fp8_context_fmha": "enable" if attention.fp8 else "disable",
        "--use_fused_mlp": fused,
        "--strongly_typed": True if precision == "fp8" else None,  # always on in later releases; before, FP8 needs it
    }


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Attention over prompts, as requested from `trtllm-build`."""

    paged: bool
    """True if it reads the KV cache, as required by chunked context and KV cache reuse (use_paged_context_fmha)."""
    fp8: bool
    """True if it computes in FP8 (use_fp8_context_fmha)."""


def context_attention(
    release: str, *, precision: str, kv: str | None, sm: int | None, extra: Mapping[str, Json]
) -> ContextAttention:
    """The requested value: the user's, or else the best in the release for these weights, this cache and this GPU."""
    off = _excludes_paged_context(extra)
    fp8, paged = (program_options.switched(extra, name) for name in ("use_fp8_context_fmha", "use_paged_context_fmha"))
    fp8_layers = precision in FP8_INPUTS
    # w4a8_awq only counts as FP8 for paged prompts in the releases since 1.2 that were read.
    pages_fp8 = precision != "w4a8_awq" or at_least(release, W4A8_PAGED)
    if fp8 is None:
        # Before 0.12, it lacks paged prompts, and is off.
        fp8 = not off and fp8_layers and kv == "fp8" and has_fp8_context_fmha(release, sm) and pages_fp8
    if paged is None:
        # With FP8 layers and an FP8 cache, paged prompts imply FP8 attention. With other layers, the builder of 0.19
        # and later releases turns it on by default and decides. It never works with an INT8 cache.
        with_fp8_cache = fp8 and pages_fp8 if fp8_layers else at_least(release, "0.19")
        paged = not off and (kv is None or (kv == "fp8" and with_fp8_cache))
    return ContextAttention(paged=paged, fp8=fp8)


def unpaged(extra: Mapping[str, Json]) -> bool:
    """True if options of trtllm-build request a KV cache without pages."""
    kind = str(extra.get("kv_cache_type", extra.get("--kv_cache_type", "paged"))).lower()
    return kind != "paged" or program_options.switched(extra, "paged_kv_cache") is False


def _excludes_paged_context(extra: Mapping[str, Json]) -> bool:
    off = (
        program_options.switched(extra, "context_fmha") is False
        or program_options.switched(extra, "streamingllm") is True
    )
    return off or unpaged(extra)


def builder_keeps_paged(*, precision: str, kv: str | None, extra: Mapping[str, Json]) -> bool:
    """True if a requested use_paged_context_fmha is in the engine: from 0.19 on, the builder turns it off with a
    warning if the cache or the layers do not support it. Earlier ones refuse it.
    """
    return not _excludes_paged_context(extra) and (kv is None or (kv == "fp8" and precision in FP8_INPUTS))


def has_fp8_context_fmha(release: str, sm: int | None) -> bool:
    """True if the release has FP8 kernels for attention over prompts that work with paged ones: SM 89 and 90 since
    0.12, SM 100 since 0.17, SM 120 since 0.20.
    """
    if sm is None:
        return False
    since = "0.12" if sm in {89, 90} else "0.17" if 100 <= sm < 120 else "0.20" if sm >= 120 else None
    return since is not None and at_least(release, since)


def engine_check(
    release: str,
    params: EngineCheck,
    program: Sequence[str],
    *,
    engine: str,
    tokenizer: str,
    mpirun: str = MPIRUN,
    as_root: bool = False,
    adapter: str | None = None,
) -> list[str]:
    """`run.py`: generates one response from an engine without a server, with one process per rank.

    An engine for LoRA adapters does not load without one: `adapter` is its directory.
    """
    ranks: list[str] = []
    if params.world_size > 1:
        ranks = [mpirun, *["--allow-run-as-root"] * as_root]
        # Without it, mpirun refuses more ranks than there are cores, although ranks mostly wait for GPUs.
        ranks.append("--oversubscribe")
        # All ranks are on this host. Without ssh or rsh, mpirun needs an option for that. If called by its path, it
        # would put its own directory before those on PATH.
        ranks += ["--noprefix", "--mca", "plm_rsh_agent", "", "-n", str(params.world_size)]
    arguments = _Arguments(_RUN, release, *ranks, *program)
    arguments.add({"--engine_dir": engine, "--tokenizer_dir": tokenizer})
    arguments.add({"--max_output_len": params.max_tokens})
    if params.prompt.startswith("-"):  # alone, it would be parsed as an option
        arguments.argv.append(f"--input_text={params.prompt}")
    else:
        arguments.add({"--input_text": params.prompt})
    if params.speculative == "draft":
        # An engine that verifies drafts does not load without it, even if no tokens are drafted here.
        arguments.add({"--kv_cache_enable_block_reuse": True})
    if params.lookahead:
        arguments.add({"--lookahead_config": f"[{','.join(map(str, params.lookahead))}]"})
    if params.gpu_weights_percent < 1:
        arguments.add({"--gpu_weights_percent": params.gpu_weights_percent})
    if adapter is not None:
        arguments.add({"--lora_dir": adapter, "--lora_task_uids": "0"})
    return arguments.argv


# ------------------------------------------------------------------------------------------------------------ servers


def takes_config(release: str) -> bool:
    """True if this release's trtllm-serve reads settings of the LLM API from a file."""
    return program_options.exists(_SERVE, release, _CONFIG)


def serve_engine(
    release: str, params: EngineRepository, *, engine: str, tokenizer: str, config: str | None, program: str = _SERVE
) -> list[str]:
    """`trtllm-serve` on an engine directory, which records its limits and ranks. The address is added at launch.

    `config` is a YAML file with the cache's settings, if there are any and the release `takes_config`. Raises PlanError
    for releases without trtllm-serve or engines.
    """
    arguments = _serve(release, program, engine)
    arguments.add({"--tokenizer": tokenizer})
    if at_least(release, "1.0"):
        # Up to 0.21, it serves an engine by default; since then, a model with PyTorch.
        backend = next(
            (word for word in ("tensorrt", "trt") if program_options.accepts(_SERVE, release, "--backend", word)), None
        )
        if backend is None:
            raise PlanError(
                f"trtllm-serve {release} does not serve engines: TensorRT-LLM removed them",
                hint="use the toolchain tensorrt_llm_pytorch, or TensorRT-LLM 1.2 or older",
            )
        arguments.add({"--backend": backend})
    # A file's cache settings replace those of options, so the memory share is in the file too.
    if config is None:
        arguments.add({"--kv_cache_free_gpu_memory_fraction": params.kv_cache_free_gpu_mem_fraction})
    return _finished(arguments, config, params.options)


def serve_pytorch(
    release: str, params: WeightsRepository, *, model: str, config: str | None, program: str = _SERVE
) -> list[str]:
    """`trtllm-serve` on a Hugging Face directory, with PyTorch, the default backend.

    `config` is a YAML file with further settings of the LLM API. It must not repeat settings made here, since releases
    differ in which of the two takes precedence. The address is added at launch.
    """
    arguments = _serve(release, program, model)
    arguments.add({"--tp_size": params.tensor_parallel_size, "--pp_size": params.pipeline_parallel_size})
    arguments.add({"--ep_size": params.moe_expert_parallel_size})
    arguments.add({"--max_batch_size": params.max_batch_size, "--max_seq_len": params.max_seq_len})
    arguments.add({"--max_num_tokens": tokens_of_a_pass(params)})
    return _finished(arguments, config, params.options)


def tokens_of_a_pass(params: WeightsRepository) -> int:
    """The requested value, or else a matrix's default if prompts may be as long as the model's limit."""
    chunked = params.enable_chunked_context is True
    return params.max_num_tokens or max_num_tokens(params.max_batch_size, params.max_seq_len, 0, chunked=chunked)


def _serve(release: str, program: str, model: str) -> _Arguments:
    if not at_least(release, FIRST_SERVE):
        raise PlanError(
            f"TensorRT-LLM {release} has no trtllm-serve; it came with {FIRST_SERVE}",
            hint="serve the engine with Triton",
        )
    return _Arguments(_SERVE, release, program, *serve_subcommand(release), model)


def serve_subcommand(release: str) -> tuple[str, ...]:
    """The word between `trtllm-serve` and its options."""
    return ("serve",) if at_least(release, "0.19") else ()


def _finished(arguments: _Arguments, config: str | None, extra: Mapping[str, Json] | None) -> list[str]:
    """All arguments, with the settings file and the user's options. Telemetry is off."""
    arguments.add({_CONFIG: config})
    if arguments.has("--telemetry"):
        arguments.argv.append("--no-telemetry")
    return arguments.with_extra(extra)


def bench(
    release: str,
    params: EngineBench,
    program: str,
    *,
    model: str,
    engine: str | None,
    dataset: str,
    report: str,
    workspace: str,
    config: str | None,
) -> list[str]:
    """`trtllm-bench throughput` on an engine, or on a Hugging Face directory with the PyTorch backend.

    All options are valid from 0.20 to 1.3, in their only spelling there. `config` is a YAML file with arguments of the
    LLM API. If there is one, it has the memory share, since releases differ in which takes precedence.
    """
    values: dict[str, Scalar | None] = {"--dataset": dataset, "--concurrency": params.concurrency}
    if params.backend == "engine":
        # PyTorch is the default since 1.0.
        values |= {"--engine_dir": engine, "--backend": "tensorrt" if at_least(release, "1.0") else None}
    else:
        values |= {"--tp": params.tp, "--pp": params.pp, "--ep": params.ep, "--max_batch_size": params.max_batch_size}
        values |= {"--max_seq_len": params.max_seq_len, "--max_num_tokens": params.max_num_tokens}
    if config is None:
        values["--kv_cache_free_gpu_mem_fraction"] = params.kv_cache_free_gpu_mem_fraction
    values |= {_CONFIG: config, "--report_json": report}
    options_ = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    group = ["--model", params.name, "--model_path", model, "--workspace", workspace]
    return [program, *group, "throughput", *options_, "--streaming"]
