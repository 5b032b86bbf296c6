"""The engine card: README.md of a bundle, also the model card that a hub shows. Its text is `templates/README.md.j2`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.base import read_object, size
from trtllm_pipeline.measure import triton
from trtllm_pipeline.models import AS_IS, shown
from trtllm_pipeline.orchestrate import Artifact, report_file
from trtllm_pipeline.serve.export.deployment import Deployment
from trtllm_pipeline.serve.export.manifests import templates
from trtllm_pipeline.tensorrt import JOB, catalog, companions

_HUB_LICENSES: Final = {
    # name in recipes -> name in Hugging Face's model cards
    "Apache-2.0": "apache-2.0",
    "MIT": "mit",
    "BSD-3-Clause": "bsd-3-clause",
    "Gemma": "gemma",
    "Gemma Terms of Use": "gemma",
    "Llama 2 Community License": "llama2",
    "Llama 3 Community License": "llama3",
    "Llama 3.1 Community License": "llama3.1",
    "Llama 3.2 Community License": "llama3.2",
    "Llama 3.3 Community License": "llama3.3",
}


def text(deployment: Deployment) -> str:
    import yaml

    cell, artifacts = deployment.served.cell, deployment.served.artifacts
    source = cell.recipe.get("source")
    environment = templates()
    environment.filters |= {"plain": _plain, "cell": _cell, "tenths": _tenths}
    return environment.get_template("README.md.j2").render(
        d=deployment,
        cell=cell,
        version=__version__,
        embedded=catalog.EMBEDDED,
        metadata=yaml.safe_dump(_metadata(deployment), sort_keys=False, allow_unicode=True).rstrip("\n"),
        precision=shown(cell.precision, cell.recipe.get("quantization")),
        server={catalog.EMBEDDED: "Triton with llama.cpp", "trtllm_serve": "trtllm-serve"}.get(
            deployment.kind, "Triton with TensorRT-LLM"
        ),
        capability="as below" if deployment.sm is None else f"{deployment.sm // 10}.{deployment.sm % 10}",
        request=ask(deployment, "127.0.0.1:8000"),
        size=size,
        adapters=companions.adapters(cell),
        conditions=list(_conditions(deployment)),
        source=", ".join(f"{name} {value}" for name, value in source.items()) if isinstance(source, dict) else "",
        commands=[f"{line}  # {stage}" for stage, each in artifacts.items() for line in _commands(each, artifacts)],
        license=_license(deployment),
    )


def ask(deployment: Deployment, address: str) -> str:
    """A command line that sends a request to the server at HOST:PORT."""
    if deployment.kind == "trtllm_serve":
        body: dict[str, Any] = {"model": deployment.model, "prompt": "The capital of France is", "max_tokens": 8}
        return f"curl -s http://{address}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    body = {"text_input": "The capital of France is", "max_tokens": 8}
    body |= {} if deployment.kind == "llmapi" else {"bad_words": "", "stop_words": ""}
    if deployment.sees:  # may exceed the length limit of a command-line argument
        body |= {"text_input": "Name one color of the image.", triton.IMAGE_INPUT: "data:image/jpeg;base64,%s"}
        command = f'printf {shlex.quote(json.dumps(body))} "$(base64 -w0 image.jpg)"'
        return f"{command} | curl -s http://{address}/v2/models/{deployment.model}/generate -d @-"
    return f"curl -s http://{address}/v2/models/{deployment.model}/generate -d {shlex.quote(json.dumps(body))}"


def _metadata(deployment: Deployment) -> dict[str, Any]:
    precision, stated = deployment.served.cell.precision, _license(deployment)
    known = _HUB_LICENSES.get(stated)
    metadata: dict[str, Any] = {"license": known or "other"}
    if known is None:
        metadata["license_name"] = re.sub(r"[^a-z0-9.]+", "-", stated.lower()).strip("-")
    base = _base_model(deployment)
    if base is not None:
        metadata["base_model"] = base
        if precision not in (*report_file.UNQUANTIZED, AS_IS):
            metadata["base_model_relation"] = "quantized"
    tags = ["triton", "trtllm-pipeline", precision, *(["tensorrt-llm"] if deployment.release is not None else [])]
    return {**metadata, "pipeline_tag": "text-generation", "tags": tags}


def _license(deployment: Deployment) -> str:
    return str(deployment.served.cell.recipe.get("license") or "not stated by its recipe")


def _base_model(deployment: Deployment) -> str | None:
    """The model's name on Hugging Face, if its recipe has one."""
    sources = deployment.served.cell.recipe.get("sources")
    for source in [deployment.served.cell.recipe.get("source"), *(sources if isinstance(sources, list) else ())]:
        if isinstance(source, dict) and isinstance(source.get("hugging_face"), str):
            return str(source["hugging_face"])
    return None


def _conditions(deployment: Deployment) -> Iterator[tuple[str, str]]:
    recorded: dict[str, Any] = dict(deployment.result.conditions.to_json())
    groups = {name: recorded.get(name) for name in ("system", "workload")}
    made_on = recorded.get("made_on")  # a cell without a measurement
    groups |= made_on if isinstance(made_on, dict) else {}
    for group, about in groups.items():
        for name, value in about.items() if isinstance(about, dict) else ():
            if value not in (None, [], {}):
                yield f"{group}.{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _commands(artifact: Artifact, artifacts: Mapping[str, Artifact]) -> list[str]:
    """Command lines of a stage's external programs, with artifact names in place of their directories."""
    job = read_object(artifact.folder / JOB) or {}
    folders = {str(each.out): f"${stage.upper()}" for stage, each in artifacts.items()}
    folders |= {str(job.get("out")): "$OUT", str(job.get("attempt")): "$ATTEMPT"}
    commands = []
    for command in job.get("commands", ()):
        words = [str(word) for word in command]
        if "trtllm_pipeline.tensorrt.worker" in words:
            continue
        for folder, name in folders.items():
            words = [word.replace(folder, name) for word in words]
        commands.append(" ".join(word if word.startswith("$") else shlex.quote(word) for word in words))
    return commands


def _tenths(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text.replace("\n", " "))


def _cell(text: str) -> str:
    """Text for one cell of a table."""
    return text.replace("|", "&#124;").replace("\n", " ")
