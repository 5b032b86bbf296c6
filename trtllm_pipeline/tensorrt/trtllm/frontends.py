"""Programs of the repository stages: the input of a server, for each backend and each frontend.

For Triton, it is a model repository: TensorRT-LLM's own templates, filled for one engine or one model, and linted.
Engine, weights and tokenizer stay in place. For `trtllm-serve`, it is `serve.json`, the command line without its
address, and a file with the settings of the LLM API that have no option. Disaggregated servers have two of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtllm_pipeline.base import FailureClass, StageError, TensorRTLLM, probe, write_json
from trtllm_pipeline.models import Engine, lint, model_config
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.lora import ADAPTERS
from trtllm_pipeline.tensorrt.toolchains import vision
from trtllm_pipeline.tensorrt.toolchains.catalog import DRAFTER, VISUAL
from trtllm_pipeline.tensorrt.toolchains.companions import DRAFT
from trtllm_pipeline.tensorrt.trtllm import checkpoint, llmapi, lora_models, templates
from trtllm_pipeline.tensorrt.trtllm.installation import installed
from trtllm_pipeline.tensorrt.trtllm.params import (
    CONTEXT_SETTINGS_FILE,
    FRONTEND_DISAGGREGATED,
    FRONTEND_TRITON,
    SERVE_FILE,
    SETTINGS_FILE,
    EngineRepository,
    WeightsRepository,
)


def run_engine(context: StageContext[EngineRepository]) -> None:
    """Write the files that serve the directory `engine`, with the tokenizer of the Hugging Face directory `model`. Its
    config.json gives some tokenizers' class.

    Raises StageError for templates that cannot be filled and engines that cannot be served.
    """
    installation, inputs = installed(probe.this_machine()), context.inputs
    if context.params.frontend != FRONTEND_TRITON:
        _write_serving(context, installation)
        return
    engine, model, visual = inputs["engine"], inputs["model"], inputs.get(VISUAL)
    write_engine(
        context.out,
        installation,
        engine=engine,
        model=model,
        params=context.params,
        adapters=_adapters(inputs),
        drafter=inputs.get(DRAFTER),
        visual=visual,
    )
    models = templates.MODELS if visual is None else vision.MODELS
    print(f"wrote {', '.join(models)} for {inputs['engine']}")  # noqa: T201  a stage's stdout is its log


def run_pytorch(context: StageContext[WeightsRepository]) -> None:
    """Write the files that serve the Hugging Face directory `model`. Raises StageError if that is impossible."""
    model = context.inputs["model"]
    checkpoint.check_stated(model)
    if context.params.unquantized:
        checkpoint.check_unquantized(model)
    installation = installed(probe.this_machine())
    if context.params.frontend == FRONTEND_DISAGGREGATED:
        _write_disaggregated(context, installation)
        return
    if context.params.frontend != FRONTEND_TRITON:
        _write_serving(context, installation)
        return
    draft, adapters = context.inputs.get(DRAFT), _adapters(context.inputs)
    write_llmapi(context.out, installation, model=model, params=context.params, draft=draft, adapters=adapters)
    print(f"wrote {llmapi.MODEL} for {model}")  # noqa: T201  a stage's stdout is its log


def write_engine(
    out: Path,
    installed: TensorRTLLM,
    *,
    engine: Path,
    model: Path,
    params: EngineRepository,
    adapters: Sequence[Path] = (),
    drafter: Path | None = None,
    visual: Path | None = None,
) -> None:
    """Fill the templates of `installed` for an engine, with LoRA adapters, the engine of a draft model or a visual
    engine, into the empty directory `out`.

    Raises StageError for templates that cannot be filled, and for errors that the linter finds in the result.
    """
    facts = Engine.of_trtllm_build(engine.absolute())
    if rank := lora_models.check_all(adapters, facts, model):
        params = lora_models.with_cache(params, rank, adapters, facts)
    values = templates.values_of(params, engine=facts, tokenizer=model, visual=visual)
    values |= templates.texts(params.parameters)
    given = templates.given(params)
    places = templates.installed_places(Path(_templates(installed))) or frozenset()
    templates.check_config(params, places, most=facts.max_batch_size or params.max_batch_size)

    def change(name: str, config: model_config.ModelConfig) -> None:
        templates.change(params, name, config)
        if adapters:
            lora_models.change(facts, name, config)

    templates.fill(
        _templates(installed),
        out,
        values,
        release=installed.release,
        required=given,
        change=change,
        images=visual is not None,
    )
    if drafter is not None:
        templates.fill_draft(
            _templates(installed), out, values, params=params, release=installed.release, engine=drafter
        )
    _check(out, installed, facts)


def write_llmapi(
    out: Path,
    installed: TensorRTLLM,
    *,
    model: Path,
    params: WeightsRepository,
    draft: Path | None = None,
    adapters: Sequence[Path] = (),
) -> None:
    """Fill the LLM API's template of `installed` into the empty directory `out`. Raises StageError as `write_engine`."""
    llmapi.fill(
        _templates(installed),
        out,
        model=model,
        params=params,
        release=installed.release,
        draft=draft,
        adapters=adapters,
    )
    _check(out, installed, None)


def _templates(installed: TensorRTLLM) -> Path:
    if installed.templates is None:
        raise StageError(
            f"the Triton templates (all_models) of TensorRT-LLM {installed.release} were not found: wheels do not include them",
            failure=FailureClass.USER,
            hint=f"run in Triton's TensorRT-LLM image, or check out TensorRT-LLM {installed.release} (to 0.19: "
            f"tensorrtllm_backend) and set {probe.TEMPLATES_VARIABLE} to its all_models directory",
        )
    return Path(installed.templates)


def _check(out: Path, installed: TensorRTLLM, engine: Engine | None) -> None:
    """Print the linter's findings. Raise StageError for errors."""
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


def _write_serving(
    context: StageContext[EngineRepository] | StageContext[WeightsRepository], installation: TensorRTLLM
) -> None:
    params = context.params
    settings = llmapi.serve_settings(params, installation.release, context.inputs.get(DRAFT))
    if adapters := _adapters(context.inputs):
        settings = {**_adapter_settings(context, adapters, installation.release), **settings}
    command = llmapi.serve_line(params, context.inputs, installation)
    if settings:
        (context.out / SETTINGS_FILE).write_text(llmapi.to_yaml(settings), encoding="utf-8")
    write_json(context.out / SERVE_FILE, {"schema": 1, "command": command})


def _write_disaggregated(context: StageContext[WeightsRepository], installation: TensorRTLLM) -> None:
    params, release, draft = context.params, installation.release, context.inputs.get(DRAFT)
    servers = llmapi.disaggregated_lines(params, context.inputs, installation)
    for name, own in ((CONTEXT_SETTINGS_FILE, llmapi.context_params(params)), (SETTINGS_FILE, params)):
        settings = llmapi.disaggregated_settings(own, release, draft, context=name == CONTEXT_SETTINGS_FILE)
        (context.out / name).write_text(llmapi.to_yaml(settings), encoding="utf-8")
    write_json(context.out / SERVE_FILE, {"schema": 1, "servers": asdict(servers)})


def _adapters(inputs: Mapping[str, Path]) -> list[Path]:
    return [inputs[place] for place in ADAPTERS if place in inputs]


def _adapter_settings(
    context: StageContext[EngineRepository] | StageContext[WeightsRepository], adapters: Sequence[Path], release: str
) -> dict[str, Any]:
    """Arguments of the LLM API for adapters: an engine records what it supports, weights do not."""
    model = context.inputs["model"]
    if not isinstance(context.params, EngineRepository):
        return llmapi.lora(adapters, model, release)
    rank = lora_models.check_all(adapters, Engine.of_trtllm_build(context.inputs["engine"]), model)
    sizes = {"optimal_adapter_size": rank, "max_adapter_size": rank}
    return {} if rank <= llmapi.CACHED_RANK else {"peft_cache_config": sizes}
