"""Container files: Docker Compose, Kubernetes, LeaderWorkerSet and KServe, from the templates next to this module.

A template is the file as its reader sees it, with comments. Every value goes through `yaml`, which quotes it.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.orchestrate import GatewayParams
from trtllm_pipeline.serve.export import container_images
from trtllm_pipeline.serve.export.deployment import FILL_LIMIT_S, Deployment, label
from trtllm_pipeline.serve.gateway.gateway_config import CONFIG_FILE, SCHEMA, GatewayConfig, OfferedModel
from trtllm_pipeline.tensorrt import catalog, companions
from trtllm_pipeline.tensorrt import params as stage_params

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES: Final = Path(__file__).with_name("templates")
MODELS: Final = "/models"
"""Path of the bundle in containers."""
KEYS: Final = "/etc/gateway-keys"
"""Path of the Secret with a gateway's API keys in Kubernetes."""
GATEWAY_PORT: Final = 8080
FILL_SCRIPT: Final = "fill-from-bundle.sh"
RESOURCES: Final = {
    "kubernetes": ("volume.yaml", "deployment.yaml", "service.yaml", "networkpolicy.yaml"),
    "lws": ("volume.yaml", "scripts.yaml", "leaderworkerset.yaml", "service.yaml", "networkpolicy.yaml"),
    "kserve": ("volume.yaml", "servingruntime.yaml", "inferenceservice.yaml", "networkpolicy.yaml"),
}
"""Target in a cluster -> the files of its kustomize base, without those of a gateway."""


def write_compose(deployment: Deployment, folder: Path) -> None:
    """Write compose.yaml and, with a gateway, its configuration."""
    _render("compose.yaml", deployment, folder)
    if deployment.openai:
        gateway_config(deployment, "triton").write(folder / CONFIG_FILE)


def gateway_config(deployment: Deployment, host: str, keys: Path | None = None) -> GatewayConfig:
    """The configuration of a gateway in front of the server at `host`; `keys` is the file with its API keys."""
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
    params = stage_params.load(GatewayParams, settings)
    return GatewayConfig(
        models=(model,),
        host="0.0.0.0",  # noqa: S104  the container's
        port=GATEWAY_PORT,
        api_keys_file=keys,
        params=params,
    )


def write_base(target: str, deployment: Deployment, folder: Path) -> None:
    """Write the kustomize base of one of `RESOURCES`, an overlay to start from, and the jobs that fill the volume."""
    kserve, service = target == "kserve", deployment.name
    server_labels = {label(each): deployment.labels[label(each)] for each in ("instance", "name")}
    if kserve:  # it creates pods and their service itself
        server_labels = {"serving.kserve.io/inferenceservice": service, "component": "predictor"}
        service = f"{service}-predictor"
    resources, gateway_json = RESOURCES[target], None
    if deployment.openai:
        resources = (*resources, "gateway.yaml")
        config = gateway_config(deployment, service, Path(KEYS, "keys") if deployment.api_keys else None)
        gateway_json = json.dumps({"schema": SCHEMA, **config.to_json()}, indent=2, ensure_ascii=False)
    for name in ("base", "overlay", "fill"):
        (folder / name).mkdir()
    values: dict[str, Any] = {
        "kserve": kserve,
        "server_labels": server_labels,
        "gateway_json": gateway_json,
        "keys": KEYS,
    }
    for name in resources:
        _render(name, deployment, folder / "base", **values)
    _render("kustomization.yaml", deployment, folder / "base", resources=resources)
    images = [container_images.parts(image) for image in deployment.images]
    _render("overlay.yaml", deployment, folder / "overlay", target="kustomization.yaml", images=images)
    for name in ("fill-from-hub.yaml", "fill-from-bundle.yaml", FILL_SCRIPT):
        _render(name, deployment, folder / "fill")


def _render(name: str, deployment: Deployment, folder: Path, *, target: str | None = None, **values: Any) -> None:
    known = {"d": deployment, "models": MODELS, "embedded": catalog.EMBEDDED, "fill_limit_s": FILL_LIMIT_S, **values}

    def part(name: str, **more: Any) -> str:
        return templates().get_template(f"{name}.yaml.j2").render({**known, "part": part, **more}).rstrip("\n")

    text = templates().get_template(f"{name}.j2").render({**known, "part": part})
    # A part that is empty for this cell leaves blank lines.
    lines = [line.rstrip() for line in text.splitlines() if line.strip() or not line]
    (folder / (target or name)).write_text("\n".join(lines) + "\n", encoding="utf-8")


@lru_cache(maxsize=1)
def templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # YAML is not HTML: `yaml` quotes inserted values.
    environment = Environment(  # noqa: S701
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["yaml"] = partial(json.dumps, ensure_ascii=False)  # JSON is YAML
    environment.filters["comment"] = lambda text: " ".join(str(text).split())
    environment.globals["fill_program"] = TEMPLATES.with_name("fill.py").read_text(encoding="utf-8")
    return environment
