"""The program of the repository stage: the five models of a Triton repository around one engine.

Names, types and shapes of all tensors are TensorRT-LLM's (`models/tensors.py`). Configurations are written as
`ModelConfig` protobufs, so they always parse. The models' code stays in this package. The repository only has the few
lines that import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.base import FailureClass, StageError
from trtllm_pipeline.models import model_names
from trtllm_pipeline.tensorrt.embedded.models import tensors
from trtllm_pipeline.tensorrt.embedded.params import RepositoryEmbedded
from trtllm_pipeline.tensorrt.embedded.runtime import Limits
from trtllm_pipeline.tensorrt.stage.base import StageContext

PYTHON_MODELS: Final = ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")
MODELS: Final = (*PYTHON_MODELS, "ensemble")
BLS_THREADS: Final = 64
"""Maximum concurrent requests of one instance of the BLS model. They mostly wait."""

_MODEL_PY: Final = '''\
"""Triton model `{name}`: its code is in the package trtllm_pipeline."""

try:
    from trtllm_pipeline.tensorrt.embedded.models.{name} import TritonPythonModel  # noqa: F401
except ImportError as error:
    import sys

    raise RuntimeError(
        f"{{error}}. This repository needs the package trtllm-pipeline[embedded] in the Python that Triton's stub "
        f"runs, which is {{sys.prefix}}: start it with `pipeline stage launch` or put that Python's directory first on PATH"
    ) from error
'''


def run(context: StageContext[RepositoryEmbedded]) -> None:
    """Write the repository into `context.out`, for the engine and the model's tokenizer among `context.inputs`."""
    engine, model = context.inputs["engine"].absolute(), context.inputs["model"].absolute()
    if not (model / "tokenizer.json").is_file():
        raise StageError(
            f"{model} has no tokenizer.json: serving text needs a fast tokenizer",
            failure=FailureClass.INFEASIBLE,
            hint="set --model, or --model-folder of pipeline serve start, to the model's own directory",
        )
    write(context.out, engine, model, context.params)
    print(f"wrote {', '.join(MODELS)} for {engine}")  # noqa: T201  a stage's stdout is its log


def write(folder: Path, engine: Path, model: Path, params: RepositoryEmbedded) -> None:
    """Write the five models for `engine`, with the tokenizer of `model`, into the empty `folder`. Raises StageError for one that takes fewer requests."""
    limit = Limits.read(engine).max_batch_size
    if params.max_batch_size > limit:
        raise StageError(
            f"max_batch_size is {params.max_batch_size}; expected 1 to {limit}, the engine's max_batch_size",
            failure=FailureClass.INFEASIBLE,
        )
    for name in MODELS:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config_text(name, engine, model, params), encoding="utf-8")
    for name in PYTHON_MODELS:
        (folder / name / "1" / "model.py").write_text(_MODEL_PY.format(name=name), encoding="utf-8")
    # Triton requires a version directory, and some ways of copying directories drop an empty one.
    (folder / "ensemble" / "1" / ".keep").touch()


def config_text(name: str, engine: Path, model: Path, settings: RepositoryEmbedded) -> str:
    """The config.pbtxt of model `name`, as protobuf text."""
    from google.protobuf import text_format

    return str(text_format.MessageToString(model_config(name, engine, model, settings)))


def model_config(name: str, engine: Path, model: Path, settings: RepositoryEmbedded) -> Any:
    from trtllm_pipeline.models import model_config_pb2

    config = model_config_pb2.ModelConfig(name=name, max_batch_size=settings.max_batch_size)
    inputs, outputs = {
        "preprocessing": (tensors.PREPROCESSING_INPUTS, tensors.PREPROCESSING_OUTPUTS),
        "tensorrt_llm": (tensors.ENGINE_INPUTS, tensors.ENGINE_OUTPUTS),
        "postprocessing": (tensors.POSTPROCESSING_INPUTS, tensors.POSTPROCESSING_OUTPUTS),
        "tensorrt_llm_bls": (tensors.TEXT_INPUTS, tensors.TEXT_OUTPUTS),
        "ensemble": (tensors.TEXT_INPUTS, tensors.TEXT_OUTPUTS),
    }[name]
    _add_tensors(config.input, inputs, output=False)
    _add_tensors(config.output, outputs, output=True)
    if name == "ensemble":
        config.platform = "ensemble"
        _add_steps(config)
        return config
    config.backend = "python"
    python_models: dict[str, tuple[int, dict[str, object]]] = {
        "preprocessing": (settings.preprocessing_instances, {"add_special_tokens": True}),
        "tensorrt_llm": (
            1,
            {
                "gpt_model_path": engine,
                "exclude_input_in_output": settings.exclude_input_in_output,
                "enable_kv_cache_reuse": settings.enable_kv_cache_reuse,
                "guided_decoding_backend": "llguidance",
            },
        ),
        "postprocessing": (settings.postprocessing_instances, {"skip_special_tokens": True}),
        "tensorrt_llm_bls": (
            settings.bls_instances,
            {
                "accumulate_tokens": settings.accumulate_tokens,
                "tensorrt_llm_model_name": model_names.ENGINE_MODEL,
                "threads": BLS_THREADS,
            },
        ),
    }
    instances, parameters = python_models[name]
    if name != "tensorrt_llm_bls":
        parameters["tokenizer_dir"] = model
    config.instance_group.add(count=instances, kind="KIND_CPU")
    for key, value in parameters.items():
        config.parameters[key].string_value = str(value).lower() if isinstance(value, bool) else str(value)
    if name in {"tensorrt_llm", "tensorrt_llm_bls"}:
        config.model_transaction_policy.decoupled = settings.decoupled
    else:
        config.dynamic_batching.max_queue_delay_microseconds = settings.max_queue_delay_microseconds
    return config


def _add_tensors(field: Any, table: Sequence[tensors.Tensor], *, output: bool) -> None:
    for tensor in table:
        entry = field.add(name=tensor.name, data_type=f"TYPE_{tensor.type}", dims=tensor.dims)
        if output:
            continue
        entry.optional = tensor.optional
        entry.allow_ragged_batch = tensor.ragged
        if tensor.scalar:
            entry.reshape.SetInParent()  # an empty shape: the model sees the batch dimension only


def _add_steps(config: Any) -> None:
    """Wire client -> preprocessing -> tensorrt_llm -> postprocessing -> client."""
    before = config.ensemble_scheduling.step.add(model_name="preprocessing", model_version=-1)
    before.input_map.update(tensors.PREPROCESSING_STEP)
    before.output_map.update({tensor.name: f"_{tensor.name}" for tensor in tensors.PREPROCESSING_OUTPUTS})
    engine = config.ensemble_scheduling.step.add(model_name=model_names.ENGINE_MODEL, model_version=-1)
    engine.input_map.update({name: f"_{source}" for name, source in tensors.ENGINE_STEP.items()})
    engine.input_map.update(tensors.ENGINE_PASSED)
    engine.output_map.update({"output_ids": "_TOKENS_BATCH", "sequence_length": "_SEQUENCE_LENGTH"})
    engine.output_map.update({tensor.name: tensor.name for tensor in tensors.ENGINE_OUTPUTS[2:]})
    after = config.ensemble_scheduling.step.add(model_name="postprocessing", model_version=-1)
    after.input_map.update({"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"})
    after.output_map.update({"OUTPUT": "text_output"})
