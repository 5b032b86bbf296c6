"""TRT3: how the models of an ensemble fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_pipeline.triton_repository import model_config
from trtllm_pipeline.triton_repository.lint.repository import Model, ModelRepository
from trtllm_pipeline.triton_repository.lint.rule import Violation, rule


@dataclass(frozen=True, slots=True)
class End:
    """Where an ensemble tensor is written or read: the ensemble's own interface, or one step's."""

    owner: str
    tensor: Any
    batched: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """With the batch dimension, where there is one."""
        return ((-1,) if self.batched else ()) + tuple(self.tensor.dims)

    @property
    def type(self) -> str:
        """Its data type's word."""
        return model_config.data_type_name(self.tensor.data_type)

    def __str__(self) -> str:
        return f"{self.owner} {self.tensor.name}"


def _ensembles(repository: ModelRepository) -> Iterator[tuple[Model, Any]]:
    yield from ((model, config) for model, config in repository.parsed() if model.is_ensemble)


def _steps(repository: ModelRepository, config: Any) -> Iterator[tuple[Any, Any]]:
    """Each step with its model's config, where that is known."""
    for step in config.ensemble_scheduling.step:
        model = repository.models.get(step.model_name)
        if model is not None and model.config is not None:
            yield step, model.config


def _whole(repository: ModelRepository, config: Any) -> bool:
    """Whether every step's model could be read: what is missing cannot be told otherwise."""
    return len(list(_steps(repository, config))) == len(config.ensemble_scheduling.step)


def _writers(repository: ModelRepository, config: Any) -> dict[str, list[End]]:
    """Who writes each ensemble tensor: requests, and outputs of steps."""
    found: dict[str, list[End]] = {}
    for tensor in config.input:
        found.setdefault(tensor.name, []).append(End("input", tensor, config.max_batch_size > 0))
    for step, model in _steps(repository, config):
        outputs = {tensor.name: tensor for tensor in model.output}
        for name, target in step.output_map.items():
            if name in outputs:
                found.setdefault(target, []).append(End(step.model_name, outputs[name], model.max_batch_size > 0))
    return found


def _readers(repository: ModelRepository, config: Any) -> dict[str, list[End]]:
    """Who reads each ensemble tensor: inputs of steps, and responses."""
    found: dict[str, list[End]] = {}
    for step, model in _steps(repository, config):
        inputs = {tensor.name: tensor for tensor in model.input}
        for name, source in step.input_map.items():
            if name in inputs:
                found.setdefault(source, []).append(End(step.model_name, inputs[name], model.max_batch_size > 0))
    for tensor in config.output:
        found.setdefault(tensor.name, []).append(End("output", tensor, config.max_batch_size > 0))
    return found


def _pairs(repository: ModelRepository, config: Any) -> Iterator[tuple[str, End, End]]:
    """Ensemble tensor, who writes it, who reads it."""
    readers = _readers(repository, config)
    for name, writers in _writers(repository, config).items():
        for reader in readers.get(name, ()):
            yield from ((name, writer, reader) for writer in writers)


def _fits(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in {a, b} for a, b in zip(one, other, strict=True))


@rule(
    "TRT301",
    "not-an-ensemble",
    "error",
    "an ensemble platform without steps, or steps without the platform",
    'an ensemble needs platform: "ensemble" and ensemble_scheduling with its steps',
)
def not_an_ensemble(repository: ModelRepository) -> Iterator[Violation]:
    """One of the two is missing."""
    for model, config in _ensembles(repository):
        if config.platform != "ensemble":
            yield Violation(model.path, "has ensemble_scheduling, but its platform is not ensemble")
        elif not config.ensemble_scheduling.step:
            yield Violation(model.path, "is an ensemble without steps", model.line_of("platform"))


@rule(
    "TRT302",
    "unknown-model",
    "error",
    "a step whose model is not in the repository",
    "add the model, or correct model_name",
)
def unknown_model(repository: ModelRepository) -> Iterator[Violation]:
    """The ensemble does not load without it."""
    for model, config in _ensembles(repository):
        for step in config.ensemble_scheduling.step:
            if step.model_name not in repository.models:
                line = model.line_of("model_name", step.model_name)
                yield Violation(
                    model.path, f"a step uses model {step.model_name!r}, which is not in the repository", line
                )


@rule(
    "TRT303",
    "unknown-tensor",
    "error",
    "a mapped tensor that the step's model does not have",
    "the keys of input_map and output_map are the model's own tensors, the values the ensemble's",
)
def unknown_tensor(repository: ModelRepository) -> Iterator[Violation]:
    """Misspelt, or renamed between releases."""
    for model, config in _ensembles(repository):
        for step, member in _steps(repository, config):
            for kind, names, tensors in (
                ("input", step.input_map, member.input),
                ("output", step.output_map, member.output),
            ):
                known = {tensor.name for tensor in tensors}
                for name in sorted(set(names) - known):
                    said = f"{step.model_name} has no {kind} {name}"
                    yield Violation(model.path, said, model.line_of("key", name))


@rule(
    "TRT304",
    "types-differ",
    "error",
    "a tensor written as one data type and read as another",
    "give both ends the same type; logits_datatype must be the same in all models",
)
def types_differ(repository: ModelRepository) -> Iterator[Violation]:
    """Triton refuses the ensemble."""
    for model, config in _ensembles(repository):
        for name, writer, reader in _pairs(repository, config):
            if writer.type != reader.type:
                said = f"{name}: {writer} is {writer.type}, but {reader} expects {reader.type}"
                yield Violation(model.path, said, model.line_of("value", name))


@rule(
    "TRT305",
    "dims-differ",
    "error",
    "a tensor whose dims differ between writer and reader, the batch dimension included",
    "-1 fits any size; a model with max_batch_size 0 has no batch dimension",
)
def dims_differ(repository: ModelRepository) -> Iterator[Violation]:
    """Triton refuses the ensemble."""
    for model, config in _ensembles(repository):
        for name, writer, reader in _pairs(repository, config):
            if not _fits(writer.shape, reader.shape):
                said = f"{name}: {writer} is {list(writer.shape)}, but {reader} expects {list(reader.shape)}"
                yield Violation(model.path, said, model.line_of("value", name))


@rule("TRT306", "input-not-mapped", "error", "a step without an input that its model needs", "add it to input_map")
def input_not_mapped(repository: ModelRepository) -> Iterator[Violation]:
    """Not optional, and in no input_map."""
    for model, config in _ensembles(repository):
        for step, member in _steps(repository, config):
            for tensor in member.input:
                if not tensor.optional and tensor.name not in step.input_map:
                    line = model.line_of("model_name", step.model_name)
                    yield Violation(model.path, f"nothing is mapped to input {tensor.name} of {step.model_name}", line)


@rule(
    "TRT307",
    "not-written",
    "error",
    "a tensor that is read or returned but never written",
    "map an output of a step to it, or make it an input of the ensemble",
)
def not_written(repository: ModelRepository) -> Iterator[Violation]:
    """An output of the ensemble, or a step's input, from nowhere."""
    for model, config in _ensembles(repository):
        if not _whole(repository, config):
            continue
        # By the maps alone, so that a tensor its model does not have is TRT303's alone.
        written = {tensor.name for tensor in config.input}
        written |= {target for step in config.ensemble_scheduling.step for target in step.output_map.values()}
        for name, readers in _readers(repository, config).items():
            if name not in written:
                said = f"{name} is read by {readers[0]} but never written"
                yield Violation(model.path, said, model.line_of("value", name))


@rule(
    "TRT308",
    "not-read",
    "error",
    "a tensor of a request or a step that is never read",
    "map it to a step's input or make it an output of the ensemble, or remove it",
)
def not_read(repository: ModelRepository) -> Iterator[Violation]:
    """Triton refuses the ensemble."""
    for model, config in _ensembles(repository):
        if not _whole(repository, config):
            continue
        read = {tensor.name for tensor in config.output}
        read |= {source for step in config.ensemble_scheduling.step for source in step.input_map.values()}
        for name, writers in _writers(repository, config).items():
            if name not in read:
                line = model.line_of("value", name) or model.line_of("name", name)
                yield Violation(model.path, f"{name}, written by {writers[0]}, is never read", line)


@rule("TRT309", "written-twice", "error", "a tensor that two steps write", "give one of them another name")
def written_twice(repository: ModelRepository) -> Iterator[Violation]:
    """Which of them counts is not defined."""
    for model, config in _ensembles(repository):
        for name, writers in _writers(repository, config).items():
            if len(writers) > 1:
                said = f"{name} is written by {' and by '.join(map(str, writers))}"
                yield Violation(model.path, said, model.line_of("value", name))


@rule(
    "TRT310",
    "ensemble-batch-size",
    "error",
    "an ensemble with a larger max_batch_size than one of its models",
    "Triton rejects it: its max_batch_size must not exceed that of any of its models",
)
def ensemble_batch_size(repository: ModelRepository) -> Iterator[Violation]:
    """A batch that a member could not take."""
    for model, config in _ensembles(repository):
        for step, member in _steps(repository, config):
            if 0 < member.max_batch_size < config.max_batch_size:
                said = f"max_batch_size is {config.max_batch_size}, but that of {step.model_name} is {member.max_batch_size}"
                yield Violation(model.path, said, model.line_of("max_batch_size"))


@rule(
    "TRT311",
    "decoupled-differs",
    "error",
    "a tensorrt_llm_bls model that is decoupled while the model it calls is not, or vice versa",
    "set decoupled_mode to the same value in both: true to stream, false for one response per request",
)
def decoupled_differs(repository: ModelRepository) -> Iterator[Violation]:
    """Streaming needs both; one response a request needs neither."""
    for model, config in repository.parsed():
        callee = repository.models.get(model.parameters.get("tensorrt_llm_model_name") or "tensorrt_llm")
        is_bls = "accumulate_tokens" in config.parameters
        if not is_bls or callee is None or callee.config is None:
            continue
        own, other = (each.model_transaction_policy.decoupled for each in (config, callee.config))
        if own != other:
            said = f"is {_words(own)}, but {callee.name}, which it calls, is {_words(other)}"
            yield Violation(model.path, said, model.line_of("decoupled"))


def _words(decoupled: bool) -> str:
    return "decoupled" if decoupled else "not decoupled"
