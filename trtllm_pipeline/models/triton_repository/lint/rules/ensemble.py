"""TRT3: how the models of an ensemble fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.models.triton_repository.lint.model_repository import Model, ModelRepository, Violation
from trtllm_pipeline.models.triton_repository.lint.rule import rule


@dataclass(frozen=True, slots=True)
class End:
    """A writer or reader of an ensemble tensor: the ensemble's own interface, or a step's."""

    owner: str
    tensor: Any
    batched: bool

    @property
    def shape(self) -> list[int]:
        """Shape with the batch dimension, if there is one."""
        return [-1] * self.batched + list(self.tensor.dims)

    @property
    def type(self) -> str:
        return model_config.data_type_name(self.tensor.data_type)

    def __str__(self) -> str:
        return f"{self.owner} {self.tensor.name}"


@dataclass(frozen=True, slots=True)
class Ensemble:
    """An ensemble with those steps whose models are known."""

    config: Any
    steps: Sequence[tuple[Any, Any]]
    """Each step with its model's config."""

    @property
    def whole(self) -> bool:
        """True if every step's model could be read. Otherwise, missing tensors cannot be detected."""
        return len(self.steps) == len(self.config.ensemble_scheduling.step)

    def writers(self) -> dict[str, list[End]]:
        """The writers of each ensemble tensor: requests, and outputs of steps."""
        ends: dict[str, list[End]] = {}
        for tensor in self.config.input:
            ends.setdefault(tensor.name, []).append(End("input", tensor, self.config.max_batch_size > 0))
        for step, model in self.steps:
            for name, end in _ends(step, model, model.output, step.output_map):
                ends.setdefault(name, []).append(end)
        return ends

    def readers(self) -> dict[str, list[End]]:
        """The readers of each ensemble tensor: inputs of steps, and responses."""
        ends: dict[str, list[End]] = {}
        for step, model in self.steps:
            for name, end in _ends(step, model, model.input, step.input_map):
                ends.setdefault(name, []).append(end)
        for tensor in self.config.output:
            ends.setdefault(tensor.name, []).append(End("output", tensor, self.config.max_batch_size > 0))
        return ends

    def pairs(self) -> Iterator[tuple[str, End, End]]:
        """Ensemble tensor, its writer, its reader."""
        readers = self.readers()
        for name, writers in self.writers().items():
            for reader in readers.get(name, ()):
                yield from ((name, writer, reader) for writer in writers)


def _ends(step: Any, model: Any, tensors: Any, mapped: Any) -> Iterator[tuple[str, End]]:
    """Ensemble tensors named in a step's map, each with the model's own tensor, if it has one."""
    own = {tensor.name: tensor for tensor in tensors}
    for name, target in mapped.items():
        if name in own:
            yield target, End(step.model_name, own[name], model.max_batch_size > 0)


def _ensembles(repository: ModelRepository) -> Iterator[tuple[Model, Ensemble]]:
    configs = {model.name: config for model, config in repository.parsed()}
    for model, config in repository.parsed():
        if model.is_ensemble:
            steps = config.ensemble_scheduling.step
            yield (
                model,
                Ensemble(config, [(each, configs[each.model_name]) for each in steps if each.model_name in configs]),
            )


def _fits(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in {a, b} for a, b in zip(one, other, strict=True))


@rule("TRT301", 'an ensemble needs platform: "ensemble" and ensemble_scheduling with its steps', each=_ensembles)
def not_an_ensemble(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """An ensemble platform without steps, or steps without the platform."""
    if ensemble.config.platform != "ensemble":
        yield Violation(model.path, "has ensemble_scheduling, but its platform is not ensemble")
    elif not ensemble.config.ensemble_scheduling.step:
        yield model.at("platform", "is an ensemble without steps")


@rule("TRT302", "add the model, or correct model_name")
def unknown_model(repository: ModelRepository) -> Iterator[Violation]:
    """A step whose model is not in the repository."""
    for model, ensemble in _ensembles(repository):
        for step in ensemble.config.ensemble_scheduling.step:
            if step.model_name not in repository.models:
                message = f"a step uses model {step.model_name!r}, which is not in the repository"
                yield model.at("model_name", message, value=step.model_name)


@rule(
    "TRT303",
    "the keys of input_map and output_map are the model's own tensors, the values the ensemble's",
    each=_ensembles,
)
def unknown_tensor(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A mapped tensor that the step's model does not have."""
    for step, member in ensemble.steps:
        for kind, names, tensors in (
            ("input", step.input_map, member.input),
            ("output", step.output_map, member.output),
        ):
            for name in sorted(set(names) - {tensor.name for tensor in tensors}):
                yield model.at("key", f"{step.model_name} has no {kind} {name}", value=name)


@rule("TRT304", "give both ends the same type; logits_datatype must be the same in all models", each=_ensembles)
def types_differ(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A tensor written as one data type and read as another."""
    for name, writer, reader in ensemble.pairs():
        if writer.type != reader.type:
            message = f"{name}: {writer} is {writer.type}, but {reader} expects {reader.type}"
            yield model.at("value", message, value=name)


@rule("TRT305", "-1 fits any size; a model with max_batch_size 0 has no batch dimension", each=_ensembles)
def dims_differ(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A tensor whose dims differ between writer and reader, the batch dimension included."""
    for name, writer, reader in ensemble.pairs():
        if not _fits(writer.shape, reader.shape):
            message = f"{name}: {writer} is {writer.shape}, but {reader} expects {reader.shape}"
            yield model.at("value", message, value=name)


@rule("TRT306", "add it to input_map", each=_ensembles)
def input_not_mapped(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A step without an input that its model needs."""
    for step, member in ensemble.steps:
        for tensor in member.input:
            if not tensor.optional and tensor.name not in step.input_map:
                message = f"nothing is mapped to input {tensor.name} of {step.model_name}"
                yield model.at("model_name", message, value=step.model_name)


@rule("TRT307", "map an output of a step to it, or make it an input of the ensemble", each=_ensembles)
def not_written(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A tensor that is read or returned but never written."""
    # Only by the maps, so that TRT303 alone reports a tensor that its model does not have.
    written = {tensor.name for tensor in ensemble.config.input}
    written |= {target for step in ensemble.config.ensemble_scheduling.step for target in step.output_map.values()}
    for name, readers in ensemble.readers().items() if ensemble.whole else ():
        if name not in written:
            yield model.at("value", f"{name} is read by {readers[0]} but never written", value=name)


@rule("TRT308", "map it to a step's input or make it an output of the ensemble, or remove it", each=_ensembles)
def not_read(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A tensor of a request or a step that is never read."""
    read = {tensor.name for tensor in ensemble.config.output}
    read |= {source for step in ensemble.config.ensemble_scheduling.step for source in step.input_map.values()}
    for name, writers in ensemble.writers().items() if ensemble.whole else ():
        if name not in read:
            message = f"{name}, written by {writers[0]}, is never read"
            mapped = model.at("value", message, value=name)
            yield mapped if mapped.line is not None else model.at("name", message, value=name)


@rule("TRT309", "give one of them another name", each=_ensembles)
def written_twice(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A tensor that two steps write."""
    for name, writers in ensemble.writers().items():
        if len(writers) > 1:
            yield model.at("value", f"{name} is written by {' and by '.join(map(str, writers))}", value=name)


@rule("TRT310", "Triton rejects it: its max_batch_size must not exceed that of any of its models", each=_ensembles)
def ensemble_batch_size(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """An ensemble with a larger max_batch_size than one of its models."""
    size = ensemble.config.max_batch_size
    for step, member in ensemble.steps:
        if 0 < member.max_batch_size < size:
            message = f"max_batch_size is {size}, but that of {step.model_name} is {member.max_batch_size}"
            yield model.at("max_batch_size", message)


@rule("TRT311", "set decoupled_mode to the same value in both: true to stream, false for one response per request")
def decoupled_differs(repository: ModelRepository) -> Iterator[Violation]:
    """A tensorrt_llm_bls model that is decoupled while a model it calls is not, or vice versa."""
    for model, config, called in _bls_models(repository):
        for callee in called.values():
            if callee is None or callee.config is None:
                continue
            own, other = (each.model_transaction_policy.decoupled for each in (config, callee.config))
            if own != other:
                own_words, other_words = ("decoupled" if each else "not decoupled" for each in (own, other))
                yield model.at("decoupled", f"is {own_words}, but {callee.name}, which it calls, is {other_words}")


def _bls_models(repository: ModelRepository) -> Iterator[tuple[Model, Any, dict[str, Model | None]]]:
    """Each tensorrt_llm_bls model with the models it calls: the engine, and the one that drafts tokens."""
    for model, config in repository.parsed():
        if "accumulate_tokens" in config.parameters:
            names = {
                "engine": model.parameters.get("tensorrt_llm_model_name") or "tensorrt_llm",
                "draft": model.parameters.get("tensorrt_llm_draft_model_name") or "",
            }
            yield model, config, {role: repository.models.get(name) for role, name in names.items()}


@rule("TRT312", "Triton rejects it: map only outputs of one decoupled model to the steps after it", each=_ensembles)
def decoupled_inputs(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """A step that combines responses of a decoupled model with the request or with another decoupled model."""
    origins: dict[str, str | None] = {tensor.name: None for tensor in ensemble.config.input}
    steps = list(ensemble.steps) if ensemble.whole else []
    while ready := [each for each in steps if set(each[0].input_map.values()) <= origins.keys()]:
        for step, member in ready:
            steps.remove((step, member))
            sources = {origins[source] for source in step.input_map.values()}
            if len(sources) > 1:
                words = " and ".join(sorted(each or "the request" for each in sources))
                message = f"{step.model_name} receives inputs from {words}, which send different numbers of messages"
                yield model.at("model_name", message, value=step.model_name)
            origin = step.model_name if member.model_transaction_policy.decoupled else next(iter(sources), None)
            origins.update(dict.fromkeys(step.output_map.values(), origin))


@rule("TRT313", "leave it out: Triton derives it from the steps", severity="warning", each=_ensembles)
def ensemble_policy(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """An ensemble whose model_transaction_policy differs from its steps."""
    if ensemble.whole and ensemble.config.HasField("model_transaction_policy"):
        written = ensemble.config.model_transaction_policy.decoupled
        steps = any(member.model_transaction_policy.decoupled for _, member in ensemble.steps)
        if written != steps:
            streams = "streams, since a step is decoupled" if steps else "cannot stream, since no step is decoupled"
            yield model.at(
                "model_transaction_policy", f"decoupled is {str(written).lower()}, but the ensemble {streams}"
            )


@rule("TRT314", "set decoupled_mode to false in all three: requests that draft tokens get one response")
def decoupled_drafts(repository: ModelRepository) -> Iterator[Violation]:
    """A tensorrt_llm_bls model that is decoupled and has a draft model."""
    for model, config, called in _bls_models(repository):
        if called["draft"] is not None and config.model_transaction_policy.decoupled:
            message = f"is decoupled, but calls {called['draft'].name} for drafts, which cannot be streamed"
            yield model.at("decoupled", message)


@rule("TRT315", "write model_version: -1 for the newest version, or a version that Triton serves")
def step_version(repository: ModelRepository) -> Iterator[Violation]:
    """A step that requests a version of its model that is not served. Without model_version, it requests version 0."""
    for model, ensemble in _ensembles(repository):
        for step in ensemble.config.ensemble_scheduling.step:
            member = repository.models.get(step.model_name)
            served = [] if member is None else [int(path.name) for path in member.served]
            if served and step.model_version not in {-1, *served}:
                written = "" if step.model_version else ", the default of model_version"
                message = (
                    f"a step requests version {step.model_version} of {step.model_name}{written}; "
                    f"served: {', '.join(map(str, served))}"
                )
                yield model.at("model_name", message, value=step.model_name)


@rule("TRT316", "remove the field: an ensemble has neither instances nor a backend", each=_ensembles)
def ensemble_fields(model: Model, ensemble: Ensemble) -> Iterator[Violation]:
    """An ensemble with an instance_group or a backend, which Triton rejects."""
    for field in ("instance_group", "backend"):
        if getattr(ensemble.config, field):
            yield model.at(field, f"is an ensemble with {field}")


@rule("TRT317", "Triton rejects it, or crashes: remove the step that leads back to its own ensemble")
def ensemble_cycle(repository: ModelRepository) -> Iterator[Violation]:
    """An ensemble that is a step of itself, directly or through other ensembles."""
    members = {
        model.name: [step.model_name for step in ensemble.config.ensemble_scheduling.step]
        for model, ensemble in _ensembles(repository)
    }
    for model, _ in _ensembles(repository):
        if (way := _way_back(model.name, members)) is not None:
            yield model.at("model_name", f"contains itself: {' -> '.join(way)}", value=way[1])


def _way_back(start: str, members: Mapping[str, Sequence[str]]) -> list[str] | None:
    """The shortest way from an ensemble through steps back to itself. None without one."""
    ways, seen = [[start]], set[str]()
    for way in ways:  # grows during the loop
        for name in members.get(way[-1], ()):
            if name == start:
                return [*way, name]
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return None
