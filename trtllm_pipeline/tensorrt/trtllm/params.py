"""Parameters of the stages of TensorRT-LLM's toolchains.

Types of fields are read, so no `from __future__ import annotations`. Standard library only: our quantization worker runs
under other Pythons.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from trtllm_pipeline.tensorrt.modelopt import formats
from trtllm_pipeline.tensorrt.stage.params import (
    CheckParams,
    IfSet,
    Option,
    Param,
    Parameters,
    Scalar,
    Selection,
    if_set,
    later,
    param,
)
from trtllm_pipeline.tensorrt.stage.repository_settings import LlmApi, RepositorySettings
from trtllm_pipeline.tensorrt.toolchains import vision
from trtllm_pipeline.tensorrt.trtllm.releases import FAMILIES

SERVE_FILE: Final = "serve.json"
"""Output of a repository stage for `trtllm-serve`: its command line without the address."""
SETTINGS_FILE: Final = "llm_api.yaml"
"""Next to it, the settings of the LLM API that have no option."""
CONTEXT_SETTINGS_FILE: Final = "context_llm_api.yaml"
"""The same for disaggregated servers that read prompts."""
FRONTEND_TRITON: Final = "triton"
FRONTEND_TRITON_OPENAI: Final = "triton_openai"
"""The OpenAI front end in Triton's images, with Triton in the same process."""
FRONTEND_DISAGGREGATED: Final = "disaggregated"
"""Servers of trtllm-serve that read prompts, others that generate, and the router of `trtllm-serve disaggregated`."""
IN_TRITON: Final = frozenset({FRONTEND_TRITON, FRONTEND_TRITON_OPENAI})
NONE: Final = "none"
"""Precision of a KV cache that is not quantized."""
PYTORCH_PRECISIONS: Final = ("fp16", "bf16", "fp8", "int4_awq", "w4a8_awq", "nvfp4")
"""Precisions with a Hugging Face format that the PyTorch backend loads."""
_ENGINE_PRECISIONS: Final = tuple(dict.fromkeys(("fp16", "bf16", "fp32", *formats.PRECISIONS)))
_FAMILY_HELP: Final = "architecture family: model_type of the model's config.json"
_CACHE_HELP: Final = "precision of the KV cache; none is the model's own"

Drafts = Annotated[
    Literal["draft", "medusa", "lookahead", "eagle"] | None,
    IfSet("source of drafted tokens for the engine", null="none"),
]
Calibrated = Annotated[Selection | None, IfSet("calibration rows")]
RowsAtATime = Annotated[
    int | None, Param("calibration rows per batch", ge=1, null="as many as fit in memory", runtime=True)
]
ServeOptions = Annotated[
    dict[str, Option] | None, IfSet("further options of trtllm-serve, such as num_postprocess_workers=2")
]
InstanceKind = Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"]
"""Triton's names in instance_group."""
Batch = Annotated[int, Param("requests in flight", ge=1)]
Length = Annotated[int, Param("tokens of prompt and output together", ge=1)]
Pass = Annotated[
    int | None,
    Param(
        "tokens of one forward pass over all requests",
        ge=1,
        null="8192, at least a prompt and a token of every request",
    ),
]
TensorParallel = Annotated[int, Param("tensor parallel size", ge=1)]
PipelineParallel = Annotated[int, Param("pipeline parallel size", ge=1)]
ExpertParallel = Annotated[
    int | None,
    IfSet(
        "expert parallel size of a mixture of experts, a divisor of tp",
        ge=1,
        null="1, each expert is split over the GPUs of tp",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineWeights(Parameters):
    """Parameters of the stages that create or read a checkpoint for engines."""

    precision: str = param("precision of the weights", choices=_ENGINE_PRECISIONS)
    kv_cache_precision: Literal["none", "fp8", "int8"] = param(_CACHE_HELP, "none")
    quantization: str | None = if_set(
        "quantization of a model that is published quantized; the precision is then that of its weights in memory",
        None,
        choices=("fp8", "fbgemm_fp8", "awq", "gptq"),
        null="not at all",
    )
    family: str = param(_FAMILY_HELP, choices=tuple(FAMILIES))
    tp: TensorParallel = 1
    pp: PipelineParallel = 1
    ep: ExpertParallel = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint(EngineWeights):
    """Parameters of the stages that create a checkpoint for engines."""

    checkpoint_format: ClassVar[str] = "tensorrt_llm"
    max_position_embeddings: int | None = if_set("longest sequence of the model, for phi3", None, ge=1)
    heads: Literal["medusa", "eagle"] | None = if_set(
        "heads that become part of the checkpoint, from the directory with the draft model", None, null="none"
    )
    max_draft_len: int | None = if_set("tokens in the tree that heads draft", None, ge=1, null="63")
    num_medusa_heads: int | None = if_set("Medusa heads", None, ge=1, null="4")
    num_medusa_layers: int | None = if_set("layers of a Medusa head", None, ge=1, null="1")
    num_eagle_layers: int | None = if_set("depth of EAGLE's tree", None, ge=1, null="4")
    max_non_leaves_per_layer: int | None = if_set(
        "nodes with children in a level of EAGLE's tree", None, ge=1, null="10"
    )
    calibration: Calibrated = None
    batch_size: RowsAtATime = None
    options: dict[str, Option] = param("further options of the script, such as awq_block_size=64", {})


@dataclass(frozen=True, kw_only=True)
class HuggingFaceCheckpoint(Parameters):
    """Parameters of the stage that creates a quantized Hugging Face directory. The parallelism is up to the runtime."""

    precision: str = param("precision of the weights", choices=PYTORCH_PRECISIONS)
    kv_cache_precision: Literal["none", "fp8", "nvfp4"] = param(_CACHE_HELP, "none")
    family: str = param(_FAMILY_HELP)
    calibration: Calibrated = None
    checkpoint_format: Literal["hugging_face"] = param("checkpoint format", "hugging_face")
    batch_size: RowsAtATime = None
    tp: ClassVar[int] = 1
    pp: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class EngineBuild(EngineWeights):
    """Parameters of the build stage."""

    max_batch_size: Batch
    max_input_len: int = param("tokens of a prompt", ge=1)
    max_seq_len: Length
    max_num_tokens: Pass = None
    max_lora_rank: int | None = if_set("largest rank of LoRA adapters", None, ge=1, null="no adapters")
    lora_target_modules: tuple[str, ...] = if_set("layers that LoRA adapters change, by TensorRT-LLM's names", ())
    speculative: Drafts = None
    max_draft_len: int | None = if_set("tokens drafted at a time", None, ge=1, null="3, or 63")
    max_multimodal_len: int | None = if_set("image tokens of all requests in flight", None, ge=1, null="no images")
    options: dict[str, Option] = param("further options of trtllm-build, such as use_fp8_context_fmha=enable", {})


@dataclass(frozen=True, kw_only=True)
class VisualBuild(Parameters):
    """Parameters of the stage that builds a visual engine."""

    family: str = param("architecture family of the model that accepts images", choices=tuple(vision.FAMILIES))
    max_batch_size: int = param("images, or parts of images, that it encodes at once", 4, ge=1)


@dataclass(frozen=True, kw_only=True)
class EngineCheck(CheckParams):
    """Parameters of the check stage."""

    world_size: int = param("ranks of the engine", 1, ge=1)
    speculative: Drafts = None
    lookahead: tuple[int, ...] = if_set("sizes of lookahead decoding: window, n-gram, verification set", (), ge=0)
    gpu_weights_percent: float = later(
        "share of the weights kept on the GPU, for an engine that streams them", 1.0, ge=0, le=1
    )


@dataclass(frozen=True, kw_only=True)
class EngineRepository(RepositorySettings):
    """Parameters of the repository stage for an engine."""

    frontend: Literal["triton", "trtllm_serve"] = param(
        "server: Triton, with any front end, or TensorRT-LLM's OpenAI server trtllm-serve", "triton"
    )
    options: ServeOptions = None
    max_batch_size: int = param("requests that Triton accepts at once", ge=1)
    parameters: dict[str, Scalar] = param("values of other placeholders in the templates, as NAME=VALUE", {})
    triton_parameters: dict[str, dict[str, Scalar]] | None = if_set(
        "parameters of Triton models, added if the template lacks them, as MODEL.NAME=VALUE", None
    )
    preferred_batch_size: tuple[int, ...] | None = if_set(
        "batch sizes that Triton prefers for the engine", None, ge=1, null="the release's own"
    )
    instance_kinds: dict[str, InstanceKind] | None = if_set(
        "where Triton runs instances of a model, such as preprocessing=KIND_GPU", None
    )


@dataclass(frozen=True, kw_only=True)
class WeightsRepository(LlmApi):
    """Parameters of the repository stage for Hugging Face weights."""

    frontend: Literal["triton", "trtllm_serve", "disaggregated"] = param(
        "server: Triton, with any front end, TensorRT-LLM's OpenAI server trtllm-serve, or several of these behind a router",
        "triton",
    )
    options: ServeOptions = None
    max_batch_size: Batch
    max_seq_len: Length
    max_num_tokens: Pass = None
    tensor_parallel_size: int = param("GPUs that share each layer", 1, ge=1)
    pipeline_parallel_size: int = param("pipeline parallel size", 1, ge=1)
    moe_expert_parallel_size: ExpertParallel = None
    enable_attention_dp: bool = later("each GPU computes attention for its own requests", False)
    speculative: Literal["draft", "eagle3", "mtp", "ngram", "sa", "pard", "dflash"] | None = if_set(
        "source of drafted tokens", None, null="none"
    )
    max_draft_len: int | None = if_set("tokens drafted at a time", None, ge=1, null="3, or 1 for mtp")
    max_ngram_size: int | None = if_set(
        "longest n-gram looked up in the text so far", None, ge=1, null="2, or any for sa"
    )
    llm_args: dict[str, Any] = param("further arguments of the LLM API, such as kv_cache_config.dtype=fp8", {})
    context_servers: int = later("(disaggregated) servers that read prompts", 1, ge=1)
    generation_servers: int = later("(disaggregated) servers that generate tokens", 1, ge=1)
    context: dict[str, Any] = if_set(
        "(disaggregated) settings that differ on servers that read prompts, such as tensor_parallel_size=2", {}
    )
    unquantized: bool = param("refuse a model whose weights are quantized", False, runtime=True)


@dataclass(frozen=True, kw_only=True)
class EngineBench(Parameters):
    """Parameters of the stage that runs trtllm-bench. An engine records its limits and its parallelism itself."""

    name: str = param("name of the model")
    concurrency: int = param("requests in flight", ge=1)
    backend: Literal["engine", "pytorch"] = param("endpoint", "engine")
    tp: TensorParallel = 1
    pp: PipelineParallel = 1
    ep: ExpertParallel = None
    max_batch_size: int | None = param("requests in flight", None, ge=1, null="the engine's")
    max_seq_len: int | None = param("tokens of prompt and output together", None, ge=1, null="the engine's")
    max_num_tokens: int | None = param("tokens of one forward pass over all requests", None, ge=1, null="the engine's")
    kv_cache_free_gpu_mem_fraction: float | None = param(
        "share of free GPU memory for the KV cache", None, gt=0, le=1, null="the release's own"
    )
    settings: dict[str, Any] = param("further arguments of the LLM API", {})
