"""The programs of the repository stages: TensorRT-LLM's own templates, filled for one engine or one model, and linted.

Engine and tokenizer stay where they are: the repository names their folders.
"""

from __future__ import annotations

from pathlib import Path

from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.machine import probe
from trtllm_pipeline.machine.model import TensorRTLLM
from trtllm_pipeline.stages.base import StageContext
from trtllm_pipeline.toolchains.tensorrt_llm import llmapi, templates
from trtllm_pipeline.toolchains.tensorrt_llm.backends import installed
from trtllm_pipeline.toolchains.tensorrt_llm.params import EngineRepository, WeightsRepository
from trtllm_pipeline.triton_repository import lint


def run(context: StageContext[EngineRepository]) -> None:
    """Write the five models around the folder `engine`, with the tokenizer of `model`, a Hugging Face folder.

    The engine's own folder has the tokenizer's files too, but not the model's config.json, which tells some tokenizers'
    class.
    """
    engine = context.inputs["engine"]
    write(context.out, installed(probe.machine()), engine=engine, model=context.inputs["model"], asked=context.params)
    print(f"wrote {', '.join(templates.MODELS)} for {engine}")  # noqa: T201  a stage's stdout is its log


def run_llmapi(context: StageContext[WeightsRepository]) -> None:
    """Write the LLM API's model around the Hugging Face folder `context.inputs["model"]`."""
    write_llmapi(context.out, installed(probe.machine()), model=context.inputs["model"], asked=context.params)
    print(f"wrote {llmapi.MODEL} for {context.inputs['model']}")  # noqa: T201  a stage's stdout is its log


def write(out: Path, installed: TensorRTLLM, *, engine: Path, model: Path, asked: EngineRepository) -> None:
    """Fill the templates of `installed` into the empty folder `out`.

    Raises StageError for what cannot be filled, and when the linter finds an error in the result.
    """
    try:
        facts = lint.Engine.of_trtllm_build(engine.absolute())
    except lint.EngineError as error:
        raise StageError(error.message, failure=FailureClass.USER, hint=error.hint) from error
    values = templates.values_of(asked, engine=facts, tokenizer=model)
    extra = templates.texts(asked.parameters)
    templates.fill(
        _templates(installed), out, {**values, **extra}, release=installed.release, asked=templates.given(asked)
    )
    _check(out, installed, facts)


def write_llmapi(out: Path, installed: TensorRTLLM, *, model: Path, asked: WeightsRepository) -> None:
    """Fill the LLM API's template of `installed` into the empty folder `out`.

    Raises StageError for what cannot be filled, and when the linter finds an error in the result.
    """
    llmapi.fill(_templates(installed), out, model=model, asked=asked, release=installed.release)
    _check(out, installed, None)


def _templates(installed: TensorRTLLM) -> Path:
    if installed.templates is None:
        raise StageError(
            f"the Triton templates (all_models) of TensorRT-LLM {installed.release} were not found: no wheel has them",
            failure=FailureClass.USER,
            hint=f"run in Triton's TensorRT-LLM image, or check out TensorRT-LLM {installed.release} (to 0.19: "
            f"tensorrtllm_backend) and set {probe.TEMPLATES_VARIABLE} to its all_models folder",
        )
    return Path(installed.templates)


def _check(out: Path, installed: TensorRTLLM, engine: lint.Engine | None) -> None:
    """Print what the linter finds; raise StageError for errors."""
    findings = lint.lint(out, engine=engine, release=installed.release)
    for finding in findings:
        print(finding)  # noqa: T201  a stage's stdout is its log
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise StageError(
            "the repository would not work:\n  " + "\n  ".join(map(str, errors)),
            failure=FailureClass.USER,
            hint=errors[0].hint,
        )
