"""The programs of the repository stages: TensorRT-LLM's own templates, filled for one engine or one model, and linted.

Engine and tokenizer stay where they are: the repository names their folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, StageError
from trtllm_pipeline.machine import probe
from trtllm_pipeline.machine.model import TensorRTLLM
from trtllm_pipeline.stages.base import Work
from trtllm_pipeline.toolchains.tensorrt_llm import llmapi, templates
from trtllm_pipeline.toolchains.tensorrt_llm.backends import installed
from trtllm_pipeline.triton_repository import lint


def run(work: Work) -> None:
    """Write the five models around the folder `engine`, with the tokenizer of `model`, a Hugging Face folder.

    The engine's own folder has the tokenizer's files too, but not the model's config.json, which tells some tokenizers'
    class.
    """
    engine = work.inputs["engine"]
    write(work.out, installed(probe.machine()), engine=engine, model=work.inputs["model"], params=work.params)
    print(f"wrote {', '.join(templates.MODELS)} for {engine}")  # noqa: T201  a stage's stdout is its log


def run_llmapi(work: Work) -> None:
    """Write the LLM API's model around the Hugging Face folder `work.inputs["model"]`."""
    write_llmapi(work.out, installed(probe.machine()), model=work.inputs["model"], params=work.params)
    print(f"wrote {llmapi.MODEL} for {work.inputs['model']}")  # noqa: T201  a stage's stdout is its log


def write(out: Path, installed: TensorRTLLM, *, engine: Path, model: Path, params: Mapping[str, Json]) -> None:
    """Fill the templates of `installed` into the empty folder `out`. `params` are those of the engine lane's stage.

    Raises StageError for what cannot be filled, and when the linter finds an error in the result.
    """
    try:
        facts = lint.Engine.of_trtllm_build(engine.absolute())
    except lint.EngineError as error:
        raise StageError(error.message, failure=FailureClass.USER, hint=error.hint) from error
    given = {name: value for name, value in params.items() if value is not None}
    max_batch_size, others = given.pop("max_batch_size"), given.pop("parameters", {})
    assert isinstance(max_batch_size, int)
    values = templates.values_of(given, engine=facts, tokenizer=model, max_batch_size=max_batch_size)
    extra = templates.texts(others)
    asked = templates.asked(given, extra)
    templates.fill(_templates(installed), out, {**values, **extra}, release=installed.release, asked=asked)
    _check(out, installed, facts)


def write_llmapi(out: Path, installed: TensorRTLLM, *, model: Path, params: Mapping[str, Json]) -> None:
    """Fill the LLM API's template of `installed` into the empty folder `out`. `params` are those of `llmapi.OPTIONS`.

    Raises StageError for what cannot be filled, and when the linter finds an error in the result.
    """
    llmapi.fill(_templates(installed), out, model=model, params=params, release=installed.release)
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
