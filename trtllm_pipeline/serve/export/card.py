"""The engine card: README.md of a bundle, also the model card that a hub shows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.base import read_object, size
from trtllm_pipeline.measure import triton
from trtllm_pipeline.models import AS_IS, shown
from trtllm_pipeline.orchestrate import Artifact, report_file
from trtllm_pipeline.serve.export.deployment import Deployment
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
_NEEDS: Final = {
    catalog.EMBEDDED: "Linux with glibc 2.35 or newer, Python 3.10 to 3.12, and `pipeline` on PATH: trtllm-pipeline[embedded] {version}.",
    "engine": "TensorRT-LLM {release} with Triton, as in the image `{image}`, and {gpus}. An engine only runs with this release and on this kind of GPU.",
    "llmapi": "TensorRT-LLM {release} with Triton, as in the image `{image}`, and {gpus}.",
    "trtllm_serve": "TensorRT-LLM {release} with trtllm-serve, as in the image `{image}`, and {gpus}.",
}


def text(deployment: Deployment) -> str:
    return "\n".join(_lines(deployment)) + "\n"


def _lines(deployment: Deployment) -> Iterator[str]:
    served, cell = deployment.served, deployment.served.cell
    yield from _front_matter(deployment)
    yield f"# {_plain(cell.model)} in {shown(cell.precision, cell.recipe.get('quantization'))}, for {_server(deployment)}"
    yield ""
    yield f"Cell `{cell.id}`, exported by trtllm-pipeline {__version__}. It was verified on the system below."
    yield ""
    yield "## Start it"
    yield ""
    yield "```sh"
    yield "sha256sum -c --quiet SHA256SUMS && ./start"
    yield "```"
    yield ""
    gpus = f"{deployment.world_size} GPU{'s' * (deployment.world_size != 1)} with compute capability {_capability(deployment.sm)}"
    needs = _NEEDS[deployment.kind]
    yield f"It needs {needs.format(version=__version__, release=deployment.release, image=deployment.image, gpus=gpus)}"
    yield "No network is needed. `start` lists its variables. It listens on 127.0.0.1 unless HOST is set;"
    yield "there is no login. Then send a request:"
    yield ""
    yield "```sh"
    yield ask(deployment, "127.0.0.1:8000")
    yield "```"
    yield ""
    yield "## Limits"
    yield ""
    yield from _table(
        ("limit", "value"),
        [
            ("requests at a time", str(cell.max_batch_size)),
            ("tokens of a prompt", str(cell.isl)),
            ("tokens of prompt and output together", str(served.max_seq_len)),
            (
                "GPUs",
                f"{deployment.world_size} (tp {cell.tp}, pp {cell.pp}{f', ep {cell.ep}' if cell.ep > 1 else ''}{f', attention dp {cell.dp}' if cell.dp > 1 else ''})"
                if deployment.world_size
                else "none",
            ),
            ("size of engine or weights", size(deployment.bundle_bytes)),
            ("time to load", f"{deployment.load_s:.0f} s" if deployment.load_s is not None else "not measured"),
        ],
    )
    yield from adapters(deployment)
    yield from _performance(deployment)
    yield from _accuracy(deployment)
    yield from _conditions(deployment)
    yield from _made(deployment)
    yield "## License"
    yield ""
    yield f"The model's license is {_license(deployment)}. It applies to the weights, the engine built from them and"
    yield "the tokenizer. License files that came with the model are in `model/`."


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


def adapters(deployment: Deployment) -> Iterator[str]:
    """How a request selects each LoRA adapter. Empty if there are none."""
    named = companions.adapters(deployment.served.cell)
    if not named:
        return
    yield ""
    yield "## LoRA adapters"
    yield ""
    if deployment.kind == "engine":
        yield "Send `lora_weights` and `lora_config` from an adapter's directory with its `lora_task_id`, over gRPC, in one request"
        yield "after each start of the server. From then on, `lora_task_id` alone selects it. Without it, the base model"
        yield "responds."
    else:
        yield "A request selects one as follows; PATH is the absolute path of the bundle. Without it, the base model"
        yield "responds."
    if deployment.openai:
        yield "The OpenAI endpoint does this itself: it offers each adapter as a model, `MODEL:ADAPTER`."
    fields = {
        "engine": '`"lora_task_id": {number}`',
        "llmapi": '`"lora_id": {number}, "lora_name": "{name}", "lora_path": "PATH/{place}"`',
        "trtllm_serve": '`"lora_request": {{"lora_name": "{name}", "lora_int_id": {number}, "lora_path": "PATH/{place}"}}`',
    }[deployment.kind]
    yield ""
    yield from _table(
        ("adapter", "folder", "request"),
        [
            (_plain(name), f"`{place}/`", fields.format(number=number, name=name, place=place))
            for number, (place, (name, _)) in enumerate(named.items(), 1)
        ],
    )


def _front_matter(deployment: Deployment) -> Iterator[str]:
    """The metadata that a hub reads from the card."""
    import yaml

    stated = _license(deployment)
    known = _HUB_LICENSES.get(stated)
    metadata: dict[str, Any] = {"license": known or "other"}
    if known is None:
        metadata["license_name"] = re.sub(r"[^a-z0-9.]+", "-", stated.lower()).strip("-")
    base = _base_model(deployment)
    if base is not None:
        metadata["base_model"] = base
        if deployment.served.cell.precision not in (*report_file.UNQUANTIZED, AS_IS):
            metadata["base_model_relation"] = "quantized"
    metadata |= {
        "pipeline_tag": "text-generation",
        "tags": ["triton", "trtllm-pipeline", deployment.served.cell.precision],
    }
    if deployment.release is not None:
        metadata["tags"].append("tensorrt-llm")
    yield "---"
    yield yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).rstrip("\n")
    yield "---"
    yield ""


def _license(deployment: Deployment) -> str:
    return str(deployment.served.cell.recipe.get("license") or "not stated by its recipe")


def _base_model(deployment: Deployment) -> str | None:
    """The model's name on Hugging Face, if its recipe has one."""
    sources = deployment.served.cell.recipe.get("sources")
    for source in [deployment.served.cell.recipe.get("source"), *(sources if isinstance(sources, list) else ())]:
        if isinstance(source, dict) and isinstance(source.get("hugging_face"), str):
            return str(source["hugging_face"])
    return None


def _server(deployment: Deployment) -> str:
    return {catalog.EMBEDDED: "Triton with llama.cpp", "trtllm_serve": "trtllm-serve"}.get(
        deployment.kind, "Triton with TensorRT-LLM"
    )


def _capability(sm: int | None) -> str:
    return "as below" if sm is None else f"{sm // 10}.{sm % 10}"


def _performance(deployment: Deployment) -> Iterator[str]:
    yield "## Performance"
    yield ""
    levels = deployment.result.levels
    if not levels:
        yield "Not measured."
        yield ""
        return
    rows = [
        (
            str(level.concurrency) if level.request_rate is None else f"{level.request_rate:g}/s",
            _number(level.output_tokens_per_s),
            _number(level.requests_per_s),
            _number(level.latencies.get("ttft_ms", {}).get("p50")),
            _number(level.latencies.get("ttft_ms", {}).get("p99")),
            _number(level.latencies.get("tpot_ms", {}).get("p50")),
            str(level.requests),
        )
        for level in levels
    ]
    yield from _table(
        ("requests in flight, or rate", "tok/s", "req/s", "TTFT ms p50", "p99", "TPOT ms p50", "requests"), rows
    )
    findings = deployment.result.warnings
    if findings:
        yield "Notes on the measurement:"
        yield ""
        yield from (f"- {_plain(each)}" for each in findings)
        yield ""


def _accuracy(deployment: Deployment) -> Iterator[str]:
    result = deployment.result
    yield "## Accuracy"
    yield ""
    if not result.accuracy:
        yield "Not scored."
        yield ""
        return
    rows = []
    for name, score in result.accuracy.items():
        low, high = result.accuracy_intervals.get(name, (None, None))
        rows.append(
            (name, f"{score:.3f}", "" if low is None else f"{low:.3f} to {high:.3f}", str(result.accuracy_total))
        )
    yield from _table(("metric", "mean", "95% interval", "questions"), rows)


def _conditions(deployment: Deployment) -> Iterator[str]:
    yield "## Verified on"
    yield ""
    conditions: dict[str, Any] = dict(deployment.result.conditions.to_json())
    rows = []
    groups = {name: conditions.get(name) for name in ("system", "workload")}
    made_on = conditions.get("made_on")  # a cell without a measurement
    groups |= made_on if isinstance(made_on, dict) else {}
    for group, about in groups.items():
        for name, value in about.items() if isinstance(about, dict) else ():
            if value not in (None, [], {}):
                rows.append(
                    (f"{group}.{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                )
    yield from _table(("what", "value"), rows)


def _made(deployment: Deployment) -> Iterator[str]:
    yield "## How it was made"
    yield ""
    artifacts = deployment.served.artifacts
    source = deployment.served.cell.recipe.get("source")
    if isinstance(source, dict):
        yield f"The model came from {_plain(', '.join(f'{name} {value}' for name, value in source.items()))}."
        yield ""
    rows = [(stage, each.fingerprint, f"{each.duration_s:.0f}") for stage, each in artifacts.items()]
    yield from _table(("stage", "fingerprint", "seconds"), rows)
    yield "A fingerprint is the hash of everything that the result depends on; `provenance/` has the manifests,"
    yield "with digests of every file."
    yield ""
    commands = {stage: _commands(artifact, artifacts) for stage, artifact in artifacts.items()}
    if any(commands.values()):
        yield "Command lines of external programs:"
        yield ""
        yield "```sh"
        for stage, lines in commands.items():
            yield from (f"{line}  # {stage}" for line in lines)
        yield "```"
        yield ""


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


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _plain(text: str) -> str:
    """Text without Markdown syntax."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", text.replace("\n", " "))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(each.replace('|', '&#124;').replace(chr(10), ' ') for each in row)} |"
    yield ""
