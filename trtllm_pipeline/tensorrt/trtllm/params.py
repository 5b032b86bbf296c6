"""Parameters of the stages of TensorRT-LLM's toolchains.

Types of fields are read, so no `from __future__ import annotations`. Standard library only: our quantization worker runs
under other Pythons.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from trtllm_pipeline.tensorrt.modelopt import formats
from trtllm_pipeline.tensorrt.stage.params import (
    CheckParams,
    IfSet,
    Later,
    Option,
    Param,
    Parameters,
    Scalar,
    Selection,
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

Precision = Annotated[str, Param("precision of the weights", choices=_ENGINE_PRECISIONS)]
EngineCache = Annotated[Literal["none", "fp8", "int8"], Param(_CACHE_HELP)]
Family = Annotated[str, Param(_FAMILY_HELP, choices=tuple(FAMILIES))]
Prequantized = Annotated[
    str | None,
    IfSet(
        "quantization of a model that is published quantized; the precision is then that of its weights in memory",
        choices=("fp8", "fbgemm_fp8", "awq", "gptq"),
        null="not at all",
    ),
]
Heads = Annotated[
    Literal["medusa", "eagle"] | None,
    IfSet("heads that become part of the checkpoint, from the directory with the draft model", null="none"),
]
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
Served = Annotated[
    Literal["triton", "trtllm_serve"],
    Param("server: Triton, with any front end, or TensorRT-LLM's OpenAI server trtllm-serve"),
]
ServedWeights = Annotated[
    Literal["triton", "trtllm_serve", "disaggregated"],
    Param(
        "server: Triton, with any front end, TensorRT-LLM's OpenAI server trtllm-serve, or several of these "
        "behind a router"
    ),
]
InstanceKind = Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"]
"""Triton's names in instance_group."""
Batch = Annotated[int, Param("requests in flight", ge=1)]
InputLength = Annotated[int, Param("tokens of a prompt", ge=1)]
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
class Checkpoint(Parameters):
    """Parameters of the stages that create a checkpoint for engines."""

    checkpoint_format: ClassVar[str] = "tensorrt_llm"
    precision: Precision
    kv_cache_precision: EngineCache = "none"
    quantization: Prequantized = None
    family: Family
    tp: TensorParallel = 1
    pp: PipelineParallel = 1
    ep: ExpertParallel = None
    max_position_embeddings: Annotated[int | None, IfSet("longest sequence of the model, for phi3", ge=1)] = None
    heads: Heads = None
    max_draft_len: Annotated[int | None, IfSet("tokens in the tree that heads draft", ge=1, null="63")] = None
    num_medusa_heads: Annotated[int | None, IfSet("Medusa heads", ge=1, null="4")] = None
    num_medusa_layers: Annotated[int | None, IfSet("layers of a Medusa head", ge=1, null="1")] = None
    num_eagle_layers: Annotated[int | None, IfSet("depth of EAGLE's tree", ge=1, null="4")] = None
    max_non_leaves_per_layer: Annotated[
        int | None, IfSet("nodes with children in a level of EAGLE's tree", ge=1, null="10")
    ] = None
    calibration: Calibrated = None
    batch_size: RowsAtATime = None
    options: Annotated[dict[str, Option], Param("further options of the script, such as awq_block_size=64")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True)
class HuggingFaceCheckpoint(Parameters):
    """Parameters of the stage that creates a quantized Hugging Face directory. The parallelism is up to the runtime."""

    precision: Annotated[str, Param("precision of the weights", choices=PYTORCH_PRECISIONS)]
    kv_cache_precision: Annotated[Literal["none", "fp8", "nvfp4"], Param(_CACHE_HELP)] = "none"
    family: Annotated[str, Param(_FAMILY_HELP)]
    calibration: Calibrated = None
    checkpoint_format: Annotated[Literal["hugging_face"], Param("checkpoint format")] = "hugging_face"
    batch_size: RowsAtATime = None
    tp: ClassVar[int] = 1
    pp: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class EngineBuild(Parameters):
    """Parameters of the build stage."""

    precision: Precision
    kv_cache_precision: EngineCache = "none"
    quantization: Prequantized = None
    family: Family
    tp: TensorParallel = 1
    pp: PipelineParallel = 1
    ep: ExpertParallel = None
    max_batch_size: Batch
    max_input_len: InputLength
    max_seq_len: Length
    max_num_tokens: Pass = None
    max_lora_rank: Annotated[int | None, IfSet("largest rank of LoRA adapters", ge=1, null="no adapters")] = None
    lora_target_modules: Annotated[
        tuple[str, ...], IfSet("layers that LoRA adapters change, by TensorRT-LLM's names")
    ] = ()
    speculative: Drafts = None
    max_draft_len: Annotated[int | None, IfSet("tokens drafted at a time", ge=1, null="3, or 63")] = None
    max_multimodal_len: Annotated[
        int | None, IfSet("image tokens of all requests in flight", ge=1, null="no images")
    ] = None
    options: Annotated[
        dict[str, Option], Param("further options of trtllm-build, such as use_fp8_context_fmha=enable")
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class VisualBuild(Parameters):
    """Parameters of the stage that builds a visual engine."""

    family: Annotated[
        str, Param("architecture family of the model that accepts images", choices=tuple(vision.FAMILIES))
    ]
    max_batch_size: Annotated[int, Param("images, or parts of images, that it encodes at once", ge=1)] = 4


@dataclass(frozen=True, kw_only=True)
class EngineCheck(CheckParams):
    """Parameters of the check stage."""

    world_size: Annotated[int, Param("ranks of the engine", ge=1)] = 1
    speculative: Drafts = None
    lookahead: Annotated[
        tuple[int, ...], IfSet("sizes of lookahead decoding: window, n-gram, verification set", ge=0)
    ] = ()
    gpu_weights_percent: Annotated[
        float, Later("share of the weights kept on the GPU, for an engine that streams them", ge=0, le=1)
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class EngineRepository(RepositorySettings):
    """Parameters of the repository stage for an engine."""

    frontend: Served = FRONTEND_TRITON
    options: ServeOptions = None
    max_batch_size: Annotated[int, Param("requests that Triton accepts at once", ge=1)]
    parameters: Annotated[dict[str, Scalar], Param("values of other placeholders in the templates, as NAME=VALUE")] = (
        field(default_factory=dict)
    )
    triton_parameters: Annotated[
        dict[str, dict[str, Scalar]] | None,
        IfSet("parameters of Triton models, added if the template lacks them, as MODEL.NAME=VALUE"),
    ] = None
    preferred_batch_size: Annotated[
        tuple[int, ...] | None, IfSet("batch sizes that Triton prefers for the engine", ge=1, null="the release's own")
    ] = None
    instance_kinds: Annotated[
        dict[str, InstanceKind] | None, IfSet("where Triton runs instances of a model, such as preprocessing=KIND_GPU")
    ] = None


@dataclass(frozen=True, kw_only=True)
class WeightsRepository(LlmApi):
    """Parameters of the repository stage for Hugging Face weights."""

    frontend: ServedWeights = FRONTEND_TRITON
    options: ServeOptions = None
    max_batch_size: Batch
    max_seq_len: Length
    max_num_tokens: Pass = None
    tensor_parallel_size: Annotated[int, Param("GPUs that share each layer", ge=1)] = 1
    pipeline_parallel_size: Annotated[int, Param("pipeline parallel size", ge=1)] = 1
    moe_expert_parallel_size: ExpertParallel = None
    enable_attention_dp: Annotated[bool, Later("each GPU computes attention for its own requests")] = False
    speculative: Annotated[
        Literal["draft", "eagle3", "mtp", "ngram", "sa", "pard", "dflash"] | None,
        IfSet("source of drafted tokens", null="none"),
    ] = None
    max_draft_len: Annotated[int | None, IfSet("tokens drafted at a time", ge=1, null="3, or 1 for mtp")] = None
    max_ngram_size: Annotated[
        int | None, IfSet("longest n-gram looked up in the text so far", ge=1, null="2, or any for sa")
    ] = None
    llm_args: Annotated[
        dict[str, Any], Param("further arguments of the LLM API, such as kv_cache_config.dtype=fp8")
    ] = field(default_factory=dict)
    context_servers: Annotated[int, Later("(disaggregated) servers that read prompts", ge=1)] = 1
    generation_servers: Annotated[int, Later("(disaggregated) servers that generate tokens", ge=1)] = 1
    context: Annotated[
        dict[str, Any],
        IfSet("(disaggregated) settings that differ on servers that read prompts, such as tensor_parallel_size=2"),
    ] = field(default_factory=dict)
    unquantized: Annotated[bool, Param("refuse a model whose weights are quantized", runtime=True)] = False


@dataclass(frozen=True, kw_only=True)
class EngineBench(Parameters):
    """Parameters of the stage that runs trtllm-bench. An engine records its limits and its parallelism itself."""

    name: Annotated[str, Param("name of the model")]
    concurrency: Annotated[int, Param("requests in flight", ge=1)]
    backend: Annotated[Literal["engine", "pytorch"], Param("endpoint")] = "engine"
    tp: TensorParallel = 1
    pp: PipelineParallel = 1
    ep: ExpertParallel = None
    max_batch_size: Annotated[int | None, Param("requests in flight", ge=1, null="the engine's")] = None
    max_seq_len: Annotated[int | None, Param("tokens of prompt and output together", ge=1, null="the engine's")] = None
    max_num_tokens: Annotated[
        int | None, Param("tokens of one forward pass over all requests", ge=1, null="the engine's")
    ] = None
    kv_cache_free_gpu_mem_fraction: Annotated[
        float | None, Param("share of free GPU memory for the KV cache", gt=0, le=1, null="the release's own")
    ] = None
    settings: Annotated[dict[str, Any], Param("further arguments of the LLM API")] = field(default_factory=dict)
