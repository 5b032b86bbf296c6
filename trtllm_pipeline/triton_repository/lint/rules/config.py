"""TRT2: each config.pbtxt by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from trtllm_pipeline.triton_repository.lint.repository import ModelRepository
from trtllm_pipeline.triton_repository.lint.rule import Violation, rule
from trtllm_pipeline.triton_repository.lint.rules.parameters import TAKEN_FOR_UNSET
from trtllm_pipeline.triton_repository.model_config import FaultKind

LONG_QUEUE_DELAY_US: Final = 1_000_000
"""A second. Longer ones are almost always milliseconds written as microseconds."""
_PLATFORMS: Final = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
"""Platforms that may stand beside the backend they are the old name of."""


def _faults(repository: ModelRepository, kind: FaultKind) -> Iterator[Violation]:
    """Texts that do not parse for this reason, and not for a bare placeholder, which TRT205 has."""
    for model in repository.models.values():
        if model.fault is None or model.fault.kind != kind:
            continue
        bare = {place.line for place in model.placeholders if not place.quoted}
        if model.fault.line not in bare:
            yield Violation(model.path, model.fault.fault, model.fault.line)


@rule("TRT201", "syntax", "error", "text that is not protobuf text", "check this line and the one before it")
def syntax(repository: ModelRepository) -> Iterator[Violation]:
    """Brackets, quotes, colons."""
    yield from _faults(repository, "syntax")


@rule("TRT202", "unknown-field", "error", "a field that ModelConfig does not have", "correct the field's name")
def unknown_field(repository: ModelRepository) -> Iterator[Violation]:
    """Misspelt, or in the wrong place."""
    yield from _faults(repository, "field")


@rule(
    "TRT203",
    "unknown-word",
    "error",
    "a value that its field does not have, such as TYPE_FLOAT",
    "types are TYPE_BOOL, TYPE_INT32, TYPE_FP16, TYPE_BF16, TYPE_FP32, TYPE_STRING ...; kinds KIND_CPU, KIND_GPU ...",
)
def unknown_word(repository: ModelRepository) -> Iterator[Violation]:
    """A data type or kind that does not exist."""
    yield from _faults(repository, "enum")


@rule(
    "TRT204",
    "wrong-value",
    "error",
    "a value of the wrong type or out of its range, such as a negative queue delay",
    "write numbers without quotes and texts with quotes; times and sizes must not be negative",
)
def wrong_value(repository: ModelRepository) -> Iterator[Violation]:
    """A value that its field cannot hold."""
    yield from _faults(repository, "value")


@rule(
    "TRT205",
    "unfilled-placeholder",
    "error",
    "a `${name}` in place of a number or an enum value; the file does not parse",
    "fill the template: `pipeline stage repository` fills every placeholder it finds",
)
def unfilled_placeholder(repository: ModelRepository) -> Iterator[Violation]:
    """A bare placeholder."""
    for model in repository.models.values():
        for place in model.placeholders:
            if not place.quoted:
                yield Violation(model.path, f"${{{place.name}}} has no value", place.line)


@rule(
    "TRT206",
    "literal-placeholder",
    "warning",
    "a `${name}` left inside a text, which reaches the model literally; except those that TensorRT-LLM's own documentation "
    "leaves in its templates, which its models treat as unset",
    "give it a value or remove the parameter: a model may read it as a path, a name or false",
)
def literal_placeholder(repository: ModelRepository) -> Iterator[Violation]:
    """A quoted placeholder."""
    for model in repository.models.values():
        # Engines need a tokenizer for guided decoding alone, the models around them always do.
        own = {**TAKEN_FOR_UNSET, "tokenizer_dir": "tokenizer_dir"} if model.is_engine else TAKEN_FOR_UNSET
        unset = {(name, line) for key, name, line in model.unset() if own.get(key) == name}
        for place in model.placeholders:
            if place.quoted and (place.name, place.line) not in unset:
                yield Violation(model.path, f'"${{{place.name}}}" is not filled in', place.line)


@rule(
    "TRT207",
    "parameter-missing",
    "error",
    "a TensorRT-LLM model without required parameters",
    "fill the template; gpt_model_path is the engine's folder, gpt_model_type inflight_fused_batching",
)
def parameter_missing(repository: ModelRepository) -> Iterator[Violation]:
    """Absent, empty, or still a placeholder."""
    for model, config in repository.engines():
        if any(model.parameters.get(name) for name in ("gpt_model_path", "encoder_model_path")):
            needed = ["gpt_model_type"]
        else:
            needed = ["gpt_model_path", "gpt_model_type"]
        for name in needed:
            if not model.parameters.get(name):
                said = "has no value" if name in config.parameters else "is not there"
                yield Violation(model.path, f"parameter {name} {said}", model.line_of_parameter(name))


@rule(
    "TRT208",
    "no-backend",
    "warning",
    "neither backend nor platform",
    'add backend: "python", or whatever runs it: Triton guesses by the files in the version folder, unless it is '
    "told not to complete configurations, as TensorRT-LLM's launcher tells it",
)
def no_backend(repository: ModelRepository) -> Iterator[Violation]:
    """Triton has to guess what runs the model."""
    for model, config in repository.parsed():
        if not config.backend and not config.platform and not model.is_ensemble:
            yield Violation(model.path, "says neither backend nor platform")


@rule(
    "TRT209",
    "backend-and-platform",
    "warning",
    "a backend and a platform that contradict each other",
    "remove the platform: the backend wins",
)
def backend_and_platform(repository: ModelRepository) -> Iterator[Violation]:
    """Two answers to one question."""
    for model, config in repository.parsed():
        if config.backend and config.platform and _PLATFORMS.get(config.platform) != config.backend:
            said = f"platform {config.platform!r} and backend {config.backend!r}"
            yield Violation(model.path, said, model.line_of("platform"))


@rule("TRT210", "tensor-twice", "warning", "two inputs or two outputs with the same name", "remove one")
def tensor_twice(repository: ModelRepository) -> Iterator[Violation]:
    """Names within a model must differ."""
    for model, config in repository.parsed():
        for kind, tensors in (("inputs", config.input), ("outputs", config.output)):
            for name, count in Counter(tensor.name for tensor in tensors).items():
                if count > 1:
                    yield Violation(model.path, f"{count} {kind} have the name {name}", model.line_of("name", name))


@rule("TRT211", "parameter-twice", "warning", "a parameter that is given twice; only the last one counts", "remove one")
def parameter_twice(repository: ModelRepository) -> Iterator[Violation]:
    """Protobuf takes the last and says nothing."""
    for model, _ in repository.parsed():
        lines: dict[str, int] = {}
        for key, line in model.matches(r"""\bparameters\s*:?\s*\{\s*key\s*:\s*["']([^"']*)["']"""):
            if key in lines:
                yield Violation(model.path, f"parameter {key} is already given at line {lines[key]}", line)
            lines[key] = line


@rule(
    "TRT212",
    "instance-count",
    "warning",
    "an instance group with count 0, which Triton treats as 1",
    "set count to 1 or more; remove a model that you do not want from the repository",
)
def instance_count(repository: ModelRepository) -> Iterator[Violation]:
    """0 is the same as nothing said."""
    for model, config in repository.parsed():
        if any(group.count <= 0 for group in config.instance_group):
            for count, line in model.matches(r"\bcount\s*:\s*(0+|-\d+)\b"):
                yield Violation(model.path, f"an instance group's count is {count}", line)


@rule(
    "TRT213",
    "gpu-instances",
    "warning",
    "a Python model with KIND_GPU, which starts a process for each GPU",
    "use KIND_CPU: tokenizers do not compute on GPUs, and an engine finds its GPUs itself",
)
def gpu_instances(repository: ModelRepository) -> Iterator[Violation]:
    """`count` processes on every GPU that the server sees."""
    for model, config in repository.parsed():
        if config.backend == "python" and any(group.kind == group.KIND_GPU for group in config.instance_group):
            yield Violation(model.path, "a Python model has instances of KIND_GPU", model.line_of("kind", "KIND_GPU"))


@rule(
    "TRT214",
    "preferred-batch-size",
    "error",
    "a preferred batch size above max_batch_size",
    "Triton rejects the model: lower the one or raise the other",
)
def preferred_batch_size(repository: ModelRepository) -> Iterator[Violation]:
    """Larger than any batch can be."""
    for model, config in repository.parsed():
        for size in config.dynamic_batching.preferred_batch_size:
            if size > config.max_batch_size or size <= 0:
                said = f"preferred batch size {size} with max_batch_size {config.max_batch_size}"
                yield Violation(model.path, said, model.line_of("preferred_batch_size"))


@rule(
    "TRT215",
    "negative-batch-size",
    "error",
    "a negative max_batch_size",
    "use 0 for a model whose tensors have no batch dimension",
)
def negative_batch_size(repository: ModelRepository) -> Iterator[Violation]:
    """Triton refuses the model."""
    for model, config in repository.parsed():
        if config.max_batch_size < 0:
            yield Violation(model.path, f"max_batch_size is {config.max_batch_size}", model.line_of("max_batch_size"))


@rule(
    "TRT216",
    "queue-delay",
    "warning",
    "a queue delay of a second or more",
    "the unit is microseconds; each request may wait this long to be batched",
)
def queue_delay(repository: ModelRepository) -> Iterator[Violation]:
    """Milliseconds taken for microseconds."""
    for model, config in repository.parsed():
        delay = config.dynamic_batching.max_queue_delay_microseconds
        if delay >= LONG_QUEUE_DELAY_US:
            said = f"requests may wait {delay / 1e6:g} s to be batched"
            yield Violation(model.path, said, model.line_of("max_queue_delay_microseconds"))


@rule(
    "TRT217",
    "decoupled-cache",
    "error",
    "a decoupled model with a response cache",
    "Triton only caches models with one response per request: turn one of them off",
)
def decoupled_cache(repository: ModelRepository) -> Iterator[Violation]:
    """Triton refuses the model."""
    for model, config in repository.parsed():
        if config.model_transaction_policy.decoupled and config.response_cache.enable:
            yield Violation(model.path, "decoupled, with response_cache", model.line(r"\bresponse_cache\b"))
