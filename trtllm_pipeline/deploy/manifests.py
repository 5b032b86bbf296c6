"""The files of containers: Docker Compose, Kubernetes, LeaderWorkerSet and KServe, from the templates beside this module.

A template is the file as its reader sees it, comments and all; every value goes through `yaml`, which quotes it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.deploy import images
from trtllm_pipeline.deploy.deployment import Deployment
from trtllm_pipeline.gateway.config import CONFIG_FILE, SCHEMA, GatewayConfig, GatewayParams, OfferedModel
from trtllm_pipeline.stages.params import load
from trtllm_pipeline.toolchains import companions
from trtllm_pipeline.toolchains.base import EMBEDDED

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES: Final = Path(__file__).with_name("templates")
MODELS: Final = "/models"
"""Where containers find the bundle."""
GATEWAY_PORT: Final = 8080
_KUBERNETES: Final = ("volume.yaml", "deployment.yaml", "service.yaml", "networkpolicy.yaml")
_LWS: Final = ("volume.yaml", "scripts.yaml", "leaderworkerset.yaml", "service.yaml", "networkpolicy.yaml")
_KSERVE: Final = ("volume.yaml", "servingruntime.yaml", "inferenceservice.yaml")


def write_compose(deployment: Deployment, folder: Path) -> None:
    """Write compose.yaml and, with a gateway, its configuration."""
    _render("compose.yaml", deployment, folder)
    if deployment.openai:
        gateway_config(deployment, "triton").write(folder / CONFIG_FILE)


def write_kubernetes(deployment: Deployment, folder: Path) -> None:
    """Write a kustomize base with a Deployment, an overlay to start from, and the jobs that fill the volume."""
    _write_base(deployment, folder, _KUBERNETES)


def write_lws(deployment: Deployment, folder: Path) -> None:
    """As `write_kubernetes`, with a LeaderWorkerSet."""
    _write_base(deployment, folder, _LWS)


def write_kserve(deployment: Deployment, folder: Path) -> None:
    """As `write_kubernetes`, with a ServingRuntime and an InferenceService."""
    _write_base(deployment, folder, _KSERVE, service=f"{deployment.name}-predictor")  # as KServe calls it


def gateway_config(deployment: Deployment, host: str) -> GatewayConfig:
    """What a gateway in front of the server at `host` is told."""
    served = deployment.served
    model = OfferedModel(
        name=served.cell.model,
        url=f"grpc://{host}:8001",
        server_model=deployment.model,
        model_folder=Path(MODELS, "model"),
        max_seq_len=served.max_seq_len,
        max_input_len=served.cell.isl,
        max_concurrency=served.cell.max_batch_size,
        adapters={name: Path(MODELS, place) for place, (name, _) in companions.adapters(served.cell).items()},
    )
    settings = {name: value for name, value in served.cell.settings.get("gateway", {}).items() if value is not None}
    params = load(GatewayParams, settings)
    return GatewayConfig(models=(model,), host="0.0.0.0", port=GATEWAY_PORT, params=params)  # noqa: S104  the container's


def _write_base(
    deployment: Deployment, folder: Path, resources: tuple[str, ...], *, service: str | None = None
) -> None:
    """Write base, overlay and jobs; a gateway finds the server at `service`, by default that of the deployment's name."""
    if deployment.openai:
        resources = (*resources, "gateway.yaml")
    (folder / "base").mkdir()
    (folder / "overlay").mkdir()
    (folder / "fill").mkdir()
    for name in resources:
        _render(name, deployment, folder / "base", service=service or deployment.name)
    _render("kustomization.yaml", deployment, folder / "base", resources=resources)
    _render("overlay.yaml", deployment, folder / "overlay", target="kustomization.yaml")
    for name in ("fill-from-hub.yaml", "fill-from-bundle.yaml"):
        _render(name, deployment, folder / "fill")


def _render(name: str, deployment: Deployment, folder: Path, *, target: str | None = None, **values: Any) -> None:
    known = {"d": deployment, "models": MODELS, "embedded": EMBEDDED, "gateway_image": images.CPU, **values}

    def part(name: str, **more: Any) -> str:
        return _environment().get_template(f"{name}.yaml.j2").render({**known, "part": part, **more}).rstrip("\n")

    text = _environment().get_template(f"{name}.j2").render({**known, "part": part})
    # A part that is empty for this cell leaves a line of blanks.
    lines = [line.rstrip() for line in text.splitlines() if line.strip() or not line]
    (folder / (target or name)).write_text("\n".join(lines) + "\n", encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # YAML is no HTML: `yaml` quotes what is inserted.
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["yaml"] = _yaml
    environment.filters["comment"] = lambda text: " ".join(str(text).split())
    environment.globals["gateway_json"] = _gateway_json
    environment.globals["fill_program"] = TEMPLATES.with_name("fill.py").read_text(encoding="utf-8")
    return environment


def _yaml(value: Any) -> str:
    """A value as JSON, which YAML takes."""
    return json.dumps(value, ensure_ascii=False)


def _gateway_json(deployment: Deployment, host: str) -> str:
    return json.dumps({"schema": SCHEMA, **gateway_config(deployment, host).to_json()}, indent=2, ensure_ascii=False)
