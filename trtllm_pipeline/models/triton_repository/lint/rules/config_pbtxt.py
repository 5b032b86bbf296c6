"""TRT2: each config.pbtxt by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from trtllm_pipeline.models.triton_repository.lint.model_repository import PLATFORMS, Model, ModelRepository, Violation
from trtllm_pipeline.models.triton_repository.lint.rule import rule
from trtllm_pipeline.models.triton_repository.lint.rules.parameters import TAKEN_FOR_UNSET
from trtllm_pipeline.models.triton_repository.model_config import FaultKind, data_type_name

LONG_QUEUE_DELAY_US: Final = 1_000_000
"""One second. Longer delays are almost always milliseconds written as microseconds."""
_FALSE_TRUE: Final = ("int32_false_true", "fp32_false_true", "bool_false_true")
"""The fields for the values of a control input."""
_CORRID_TYPES: Final = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
"""Data types of sequence ids."""


def _faults(repository: ModelRepository, kind: FaultKind) -> Iterator[Violation]:
    """Texts that cannot be parsed because of this kind of fault, except for a bare placeholder, which TRT205 reports."""
    for model in repository.with_config():
        bare = {place.line for place in model.placeholders if not place.quoted}
        if model.fault is not None and model.fault.kind == kind and model.fault.line not in bare:
            yield Violation(model.path, model.fault.fault, model.fault.line)


@rule("TRT201", "check this line and the one before it")
def syntax(repository: ModelRepository) -> Iterator[Violation]:
    """Text that is not protobuf text."""
    return _faults(repository, "syntax")


@rule("TRT202", "correct the field's name")
def unknown_field(repository: ModelRepository) -> Iterator[Violation]:
    """A field that ModelConfig does not have."""
    return _faults(repository, "field")


@rule(
    "TRT203",
    "types are TYPE_BOOL, TYPE_INT32, TYPE_FP16, TYPE_BF16, TYPE_FP32, TYPE_STRING ...; kinds KIND_CPU, KIND_GPU ...",
)
def unknown_word(repository: ModelRepository) -> Iterator[Violation]:
    """A value that its field does not have, such as TYPE_FLOAT."""
    return _faults(repository, "enum")


@rule("TRT204", "write numbers without quotes and texts with quotes; times and sizes must not be negative")
def wrong_value(repository: ModelRepository) -> Iterator[Violation]:
    """A value of the wrong type or out of its range, such as a negative queue delay."""
    return _faults(repository, "value")


@rule("TRT205", "fill the template: `pipeline stage repository` fills every placeholder it finds")
def unfilled_placeholder(repository: ModelRepository) -> Iterator[Violation]:
    """A `${name}` in place of a number or an enum value; the file does not parse."""
    for model in repository.with_config():
        for place in model.placeholders:
            if not place.quoted:
                yield Violation(model.path, f"${{{place.name}}} has no value", place.line)


@rule(
    "TRT206",
    "give it a value or remove the parameter: a model may read it as a path, a name or false",
    severity="warning",
)
def literal_placeholder(repository: ModelRepository) -> Iterator[Violation]:
    """A `${name}` left inside a text, which reaches the model literally; except those that TensorRT-LLM's own
    documentation leaves in its templates, which its models treat as unset.
    """
    for model in repository.with_config():
        # Engines only need a tokenizer for guided decoding. The models around them always need one.
        own = {**TAKEN_FOR_UNSET, "tokenizer_dir": "tokenizer_dir"} if model.is_engine else TAKEN_FOR_UNSET
        unset = {(name, line) for key, name, line in model.unset() if own.get(key) == name}
        for place in model.placeholders:
            if place.quoted and (place.name, place.line) not in unset:
                yield Violation(model.path, f'"${{{place.name}}}" is not filled in', place.line)


@rule(
    "TRT207",
    "fill the template; gpt_model_path is the engine's directory, gpt_model_type inflight_fused_batching",
    each=ModelRepository.engines,
)
def parameter_missing(model: Model, config: Any) -> Iterator[Violation]:
    """A TensorRT-LLM model without required parameters."""
    needed = [] if model.parameters.get("encoder_model_path") else ["gpt_model_path"]
    for name in (*needed, "gpt_model_type"):
        if not model.parameters.get(name):
            yield model.at_parameter(
                name, f"parameter {name} {'has no value' if name in config.parameters else 'is not there'}"
            )


@rule(
    "TRT208",
    'add backend: "python", or whatever runs it: Triton guesses by the files in the version directory, unless it is '
    "run with strict model configuration, as TensorRT-LLM's launcher does",
    severity="warning",
    each=ModelRepository.parsed,
)
def no_backend(model: Model, config: Any) -> Iterator[Violation]:
    """Neither backend nor platform."""
    if not config.backend and not config.platform and not model.is_ensemble:
        yield Violation(model.path, "has neither backend nor platform")


@rule("TRT209", "remove the platform: the backend wins", severity="warning", each=ModelRepository.parsed)
def backend_and_platform(model: Model, config: Any) -> Iterator[Violation]:
    """A backend and a platform that contradict each other."""
    if config.backend and config.platform and PLATFORMS.get(config.platform) != config.backend:
        yield model.at("platform", f"platform {config.platform!r} and backend {config.backend!r}")


@rule("TRT210", "remove one", severity="warning", each=ModelRepository.parsed)
def tensor_twice(model: Model, config: Any) -> Iterator[Violation]:
    """Two inputs or two outputs with the same name."""
    for kind, tensors in (("inputs", config.input), ("outputs", config.output)):
        for name, count in Counter(tensor.name for tensor in tensors).items():
            if count > 1:
                yield model.at("name", f"{count} {kind} have the name {name}", value=name)


@rule("TRT211", "remove one", severity="warning", each=ModelRepository.parsed)
def parameter_twice(model: Model, _config: Any) -> Iterator[Violation]:
    """A parameter that is given twice; only the last one counts."""
    lines: dict[str, int] = {}
    for key, line in model.matches(r"""\bparameters\s*:?\s*\{\s*key\s*:\s*["']([^"']*)["']"""):
        if key in lines:
            yield Violation(model.path, f"parameter {key} is already given at line {lines[key]}", line)
        lines[key] = line


@rule(
    "TRT212",
    "set count to 1 or more; remove a model that you do not want from the repository",
    severity="warning",
    each=ModelRepository.parsed,
)
def instance_count(model: Model, config: Any) -> Iterator[Violation]:
    """An instance group with count 0, which Triton treats as 1."""
    if any(group.count <= 0 for group in config.instance_group):
        for count, line in model.matches(r"\bcount\s*:\s*(0+|-\d+)\b"):
            yield Violation(model.path, f"an instance group's count is {count}", line)


@rule(
    "TRT213",
    "use KIND_CPU: tokenizers do not compute on GPUs, and an engine finds its GPUs itself",
    severity="warning",
    each=ModelRepository.of_an_llm,
)
def gpu_instances(model: Model, config: Any) -> Iterator[Violation]:
    """A Python model with KIND_GPU in a repository that serves an LLM. It starts a process for each GPU."""
    if config.backend == "python" and any(group.kind == group.KIND_GPU for group in config.instance_group):
        yield model.at("kind", "a Python model has instances of KIND_GPU", value="KIND_GPU")


@rule("TRT214", "Triton rejects the model: lower the one or raise the other", each=ModelRepository.parsed)
def preferred_batch_size(model: Model, config: Any) -> Iterator[Violation]:
    """A preferred batch size above max_batch_size."""
    for size in config.dynamic_batching.preferred_batch_size:
        if size > config.max_batch_size or size <= 0:
            message = f"preferred batch size {size} with max_batch_size {config.max_batch_size}"
            yield model.at("preferred_batch_size", message)


@rule("TRT215", "use 0 for a model whose tensors have no batch dimension", each=ModelRepository.parsed)
def negative_batch_size(model: Model, config: Any) -> Iterator[Violation]:
    """A negative max_batch_size."""
    if config.max_batch_size < 0:
        yield model.at("max_batch_size", f"max_batch_size is {config.max_batch_size}")


@rule(
    "TRT216",
    "the unit is microseconds; each request may wait this long to be batched",
    severity="warning",
    each=ModelRepository.parsed,
)
def queue_delay(model: Model, config: Any) -> Iterator[Violation]:
    """A queue delay of a second or more."""
    delay = config.dynamic_batching.max_queue_delay_microseconds
    if delay >= LONG_QUEUE_DELAY_US:
        yield model.at("max_queue_delay_microseconds", f"requests may wait {delay / 1e6:g} s to be batched")


@rule(
    "TRT217",
    "Triton only caches models with one response per request: turn one of them off",
    each=ModelRepository.parsed,
)
def decoupled_cache(model: Model, config: Any) -> Iterator[Violation]:
    """A decoupled model with a response cache."""
    if config.model_transaction_policy.decoupled and config.response_cache.enable:
        yield model.at("response_cache", "decoupled, with response_cache")


@rule(
    "TRT218",
    "give each tensor a name, a data_type and dims; -1 is a dimension of any size",
    each=ModelRepository.parsed,
)
def tensor_incomplete(model: Model, config: Any) -> Iterator[Violation]:
    """A tensor without name, data_type or dims, or with a dimension that is neither positive nor -1."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            lacking = [field for field in ("name", "data_type", "dims") if not getattr(tensor, field)]
            wrong = [size for size in tensor.dims if size < 1 and size != -1]
            if lacking or wrong:
                fault = f"has no {' and no '.join(lacking)}" if lacking else f"has dimension {wrong[0]}"
                message = f"{kind} {tensor.name} {fault}" if tensor.name else f"an {kind} {fault}"
                yield model.at("name" if tensor.name else kind, message, value=tensor.name or None)


@rule("TRT219", "Triton rejects it: use KIND_GPU, or leave gpus out", each=ModelRepository.parsed)
def cpu_with_gpus(model: Model, config: Any) -> Iterator[Violation]:
    """An instance group of KIND_CPU or KIND_MODEL that names GPUs."""
    for group in config.instance_group:
        kind = group.Kind.Name(group.kind)
        if group.gpus and kind in {"KIND_CPU", "KIND_MODEL"}:
            yield model.at("gpus", f"an instance group of {kind} names GPUs {', '.join(map(str, group.gpus))}")


@rule(
    "TRT220",
    "Triton rejects it: set default_priority_level to a level from 1 on; with preserve_ordering, one level is allowed",
    each=ModelRepository.parsed,
)
def priority_levels(model: Model, config: Any) -> Iterator[Violation]:
    """Priority levels without a valid default level, or several of them with preserve_ordering."""
    batching = config.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        yield model.at("priority_levels", f"default_priority_level is {default}; expected 1 to {levels}")
    elif levels > 1 and batching.preserve_ordering:
        yield model.at("priority_levels", f"{levels} priority levels with preserve_ordering")


@rule("TRT221", "Triton rejects it: use a share such as 0.5, or leave it out", each=ModelRepository.parsed)
def slot_utilization(model: Model, config: Any) -> Iterator[Violation]:
    """A minimum_slot_utilization that is not between 0 and 1."""
    share = config.sequence_batching.direct.minimum_slot_utilization
    if not 0 <= share <= 1:
        yield model.at("minimum_slot_utilization", f"minimum_slot_utilization is {share:g}; expected 0 to 1")


@rule(
    "TRT222",
    "Triton rejects it: START, END and READY need exactly one of int32_false_true, fp32_false_true and bool_false_true, "
    "with two values; CORRID needs a data_type instead, of an integer or TYPE_STRING",
    each=ModelRepository.parsed,
)
def sequence_control(model: Model, config: Any) -> Iterator[Violation]:
    """A control input of a sequence batcher without valid values or a name, or two of the same kind."""
    seen: set[str] = set()
    for tensor in config.sequence_batching.control_input:
        for control in tensor.control:
            kind = control.Kind.Name(control.kind)
            fault = _control_fault(control, kind) if tensor.name else "its tensor has no name"
            fault = fault or ("there are two" if kind in seen else None)
            seen.add(kind)
            if fault is not None:
                yield model.at("control_input", f"{kind}: {fault}")


def _control_fault(control: Any, kind: str) -> str | None:
    given = {name: len(values) for name in _FALSE_TRUE if (values := getattr(control, name))}
    if kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            return f"has {' and '.join(given)}"
        return None if data_type_name(control.data_type) in _CORRID_TYPES else "has no valid data_type"
    if len(given) != 1:
        return f"has {' and '.join(given) or 'none of ' + ', '.join(_FALSE_TRUE)}"
    ((name, count),) = given.items()
    return None if count == 2 else f"{name} has {count} values; expected 2"


@rule(
    "TRT223",
    "Triton rejects it: give dims and reshape the same number of elements, before, between and after dimensions of -1",
    each=ModelRepository.parsed,
)
def reshape(model: Model, config: Any) -> Iterator[Violation]:
    """A tensor whose reshape has other elements than its dims, or is empty in a model without a batch dimension."""
    for tensor in (*config.input, *config.output):
        if not tensor.HasField("reshape") or not _valid(tensor.dims):
            continue
        sizes = [*tensor.reshape.shape]
        wrong = not _valid(sizes) or (not sizes and config.max_batch_size == 0)
        if wrong or _elements(tensor.dims) != _elements(sizes):
            yield model.at("reshape", f"tensor {tensor.name} has dims {[*tensor.dims]} and reshape {sizes}")


def _valid(sizes: Sequence[int]) -> bool:
    return all(size > 0 or size == -1 for size in sizes)


def _elements(sizes: Sequence[int]) -> list[int]:
    """Elements before the first dimension of any size, between each two of them, and after the last."""
    counts = [1]
    for size in sizes:
        if size == -1:
            counts.append(1)
        else:
            counts[-1] *= size
    return counts


@rule(
    "TRT224", 'Triton rejects it: name the backend instead, as in backend: "onnxruntime"', each=ModelRepository.parsed
)
def unknown_platform(model: Model, config: Any) -> Iterator[Violation]:
    """A platform that does not exist, without a backend."""
    if config.platform and not model.backend and not model.is_ensemble:
        yield model.at("platform", f"platform {config.platform!r} is unknown, and there is no backend")
