"""The files for containers: valid by the published schemas, closed by default, and the same server in all of them."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from tests.helpers import needed
from tests.helpers.deployments import KINDS, deployment
from trtllm_pipeline.deploy import manifests
from trtllm_pipeline.deploy.deployment import Deployment
from trtllm_pipeline.deploy.export import check_targets
from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.gateway.config import GatewayConfig

VERSIONS = ("1.27", "1.31", "1.37")
CUSTOM: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "deploy" / "custom_resources.json").read_text(encoding="utf-8")
)
WRITERS = {
    "kubernetes": manifests.write_kubernetes,
    "lws": manifests.write_lws,
    "kserve": manifests.write_kserve,
}
CASES = [
    *(("kubernetes", deployment(kind, openai=kind in {"embedded", "engine"})) for kind in KINDS),
    *(("kserve", deployment(kind, openai=kind == "llmapi")) for kind in KINDS),
    ("lws", deployment("engine", 16, openai=True)),
    ("lws", deployment("trtllm_serve", 16, load_s=None)),
]
IDS = [f"{target}-{each.kind}" for target, each in CASES]


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def documents(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield path.relative_to(folder).as_posix(), document


def written(target: str, of: Deployment, folder: Path) -> dict[str, dict[str, Any]]:
    """What was written, by kind and name; kustomize's own files are left out."""
    WRITERS[target](of, folder)
    found = {f"{each['kind']} {each['metadata']['name']}": each for _, each in documents(folder) if "metadata" in each}
    assert found
    return found


def pod(spec: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "checked", "labels": labels or {}}, "spec": spec}


def check_core(document: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)


def check_custom(document: dict[str, Any]) -> None:
    """By our table of the fields; what it leaves to Kubernetes' types is checked as parts of a pod."""
    table = CUSTOM[document["kind"]]
    assert document["apiVersion"] == table["apiVersion"]
    parts: dict[str, Any] = {}

    def without_pods(schema: Any, value: Any, name: str = "") -> Any:
        if isinstance(schema, dict) and "$pod" in schema:
            if schema["$pod"] == "template":
                check_core(pod(value["spec"], value["metadata"]["labels"]))
            else:
                parts[schema["$pod"]] = value
            return {}
        if isinstance(schema, dict) and isinstance(value, dict) and "properties" in schema:
            known = schema["properties"]
            cleaned = {key: without_pods(known.get(key), each, key) for key, each in value.items()}
            schema["properties"] = {key: {} if "$pod" in (each or {}) else each for key, each in known.items()}
            return cleaned
        return value

    schema = copy.deepcopy(table["spec"])
    spec = without_pods(schema, document["spec"])
    jsonschema.validate(spec, schema)
    if parts:
        check_core(pod({"containers": [{"name": "c", "image": "i"}], **parts}))


@pytest.mark.parametrize(("target", "of"), CASES, ids=IDS)
def test_every_object_is_valid(target: str, of: Deployment, tmp_path: Path) -> None:
    for document in written(target, of, tmp_path).values():
        (check_custom if document["kind"] in CUSTOM else check_core)(document)


def test_the_table_of_custom_resources_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    runtime = written("kserve", deployment(), tmp_path)["ServingRuntime tiny-fp16"]
    runtime["spec"]["securityContext"] = {}  # a ServingRuntime has none
    with pytest.raises(jsonschema.ValidationError):
        check_custom(runtime)
    runtime["spec"].pop("securityContext")
    runtime["spec"]["containers"][0]["no_such_field"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        check_custom(runtime)


def pod_specs(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, each in found.items():
        spec = each.get("spec", {})
        if each["kind"] in {"Deployment", "Job"}:
            yield name, spec["template"]["spec"]
        elif each["kind"] == "Pod":
            yield name, spec
        elif each["kind"] == "LeaderWorkerSet":
            yield from (
                (name, spec["leaderWorkerTemplate"][f"{role}Template"]["spec"]) for role in ("leader", "worker")
            )


@pytest.mark.parametrize(("target", "of"), CASES, ids=IDS)
def test_every_pod_is_closed(target: str, of: Deployment, tmp_path: Path) -> None:
    found = written(target, of, tmp_path)
    for name, spec in pod_specs(found):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            mounted = {each["name"] for each in container["volumeMounts"]}
            assert mounted <= {each["name"] for each in spec["volumes"]}, name
            assert container["resources"]["limits"]["memory"], name
    assert "Secret" not in {each["kind"] for each in found.values()}, "by reference only"
    assert all(
        each["spec"].get("type", "ClusterIP") == "ClusterIP" for each in found.values() if each["kind"] == "Service"
    )


def test_ports_labels_and_selectors_meet(tmp_path: Path) -> None:
    found = written("kubernetes", deployment(openai=True), tmp_path)
    for name in ("tiny-fp16", "tiny-fp16-gateway"):
        service, server = found[f"Service {name}"], found[f"Deployment {name}"]
        labels = server["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert server["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports = {each["name"] for each in server["spec"]["template"]["spec"]["containers"][0]["ports"]}
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports
    others = found["Deployment tiny-fp16-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert not found["Service tiny-fp16"]["spec"]["selector"].items() <= others.items(), "not the gateway's pods"
    policy = found["NetworkPolicy tiny-fp16"]["spec"]
    server = found["Deployment tiny-fp16"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= server.items()
    assert not policy["podSelector"]["matchLabels"].items() <= others.items(), "the gateway has to reach out"
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= others.items()


def test_probes_follow_the_measured_load_time(tmp_path: Path) -> None:
    def startup_s(load_s: float | None, folder: Path) -> int:
        folder.mkdir()
        server = written("kubernetes", deployment(load_s=load_s), folder)["Deployment tiny-fp16"]
        probe = server["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        assert server["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert startup_s(42.5, tmp_path / "measured") == 130
    assert startup_s(1.0, tmp_path / "quick") == 60
    assert startup_s(None, tmp_path / "unknown") == 600
    assert "Nobody measured" in (tmp_path / "unknown" / "base" / "deployment.yaml").read_text(encoding="utf-8")


def test_gpus_go_by_the_label_of_the_verified_one(tmp_path: Path) -> None:
    spec = written("kubernetes", deployment(gpus=4), tmp_path)["Deployment tiny-fp16"]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 4
    shm = next(each for each in spec["volumes"] if each["name"] == "dshm")
    assert shm["emptyDir"]["medium"] == "Memory"


def test_a_cpu_server_asks_for_no_gpu(tmp_path: Path) -> None:
    spec = written("kubernetes", deployment("embedded"), tmp_path)["Deployment tiny-fp16"]["spec"]["template"]["spec"]
    assert "nodeSelector" not in spec
    assert "nvidia.com/gpu" not in spec["containers"][0]["resources"]["limits"]


def test_several_nodes(tmp_path: Path) -> None:
    found = written("lws", deployment(gpus=16), tmp_path)
    group = found["LeaderWorkerSet tiny-fp16"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    leader = group["leaderTemplate"]["spec"]["containers"][0]
    assert leader["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert (
        found["Service tiny-fp16"]["spec"]["selector"].items() <= group["leaderTemplate"]["metadata"]["labels"].items()
    )
    assert found["PersistentVolumeClaim tiny-fp16"]["spec"]["accessModes"] == ["ReadWriteMany"]
    for script in found["ConfigMap tiny-fp16-scripts"]["data"].values():
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("of", "targets", "words"),
    [
        (deployment(gpus=16), ["compose"], "more than the 8 of a node"),
        (deployment(gpus=16), ["kubernetes", "lws"], "more than the 8 of a node"),
        (deployment("llmapi", 16), ["lws"], "llmapi model runs on one node"),
        (deployment(gpus=4), ["lws"], "one is enough"),
    ],
)
def test_a_target_that_cannot_hold_it_is_refused(of: Deployment, targets: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_targets(of, targets)


HOSTILE = "a'b\"c: {d} #e\n- f"


def test_values_that_look_like_yaml_stay_values(tmp_path: Path) -> None:
    of = deployment(image=f"registry/x:{HOSTILE}", storage_class=HOSTILE, gpu=HOSTILE)
    for target, writer in WRITERS.items():
        (tmp_path / target).mkdir()
        writer(of, tmp_path / target)
    manifests.write_compose(of, tmp_path)
    assert yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]["triton"]["image"] == of.image
    found = dict(documents(tmp_path / "kubernetes"))
    assert found["base/volume.yaml"]["spec"]["storageClassName"] == HOSTILE
    assert found["base/deployment.yaml"]["spec"]["template"]["spec"]["containers"][0]["image"] == of.image


@pytest.mark.parametrize("kind", KINDS)
def test_compose(kind: str, tmp_path: Path) -> None:
    of = deployment(kind, openai=kind in {"embedded", "engine"})
    manifests.write_compose(of, tmp_path)
    found = yaml.safe_load((tmp_path / "compose.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(found, get_builtin_schema("vendor.compose-spec"))
    for service in found["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert all(volume["read_only"] for volume in service["volumes"])
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
    server = found["services"]["triton"]
    devices = server.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
    assert (devices is None) == (kind == "embedded")
    assert server["shm_size"]
    if of.openai:
        config = GatewayConfig.read(tmp_path / "gateway-config.json")
        assert (config.models[0].name, config.models[0].url) == ("tiny", "grpc://triton:8001")


@needed.programs("docker-compose")
def test_compose_by_docker_compose(tmp_path: Path) -> None:
    manifests.write_compose(deployment(openai=True), tmp_path)
    path = tmp_path / "compose.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("name:")), encoding="utf-8")
    read = subprocess.run(["docker-compose", "config"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert read.returncode == 0, f"releases before 2 know no name, and all else\n{read.stderr}"
    assert set(yaml.safe_load(read.stdout)["services"]) == {"triton", "gateway"}


@needed.programs("kubectl")
@pytest.mark.parametrize(("target", "of"), [CASES[1], CASES[5], CASES[8]], ids=[IDS[1], IDS[5], IDS[8]])
def test_the_overlay_is_what_kustomize_takes(target: str, of: Deployment, tmp_path: Path) -> None:
    found = written(target, of, tmp_path)
    overlay = tmp_path / "overlay" / "kustomization.yaml"
    text = overlay.read_text(encoding="utf-8").replace("namespace: default", "namespace: serving")
    text = text.replace(f'newTag: "{of.image_tag}"', 'newTag: "mine"')
    head, _, patches = text.partition("# patches:")
    text = head + "\n".join(line.removeprefix("# ") for line in f"# patches:{patches}".splitlines())
    overlay.write_text(text, encoding="utf-8")
    made = subprocess.run(["kubectl", "kustomize", str(overlay.parent)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    objects = list(yaml.safe_load_all(made.stdout))
    assert {each["metadata"]["namespace"] for each in objects} == {"serving"}
    assert {f"{each['kind']} {each['metadata']['name']}" for each in objects} == {
        name for name in found if not name.endswith(("-fill", "-copy"))
    }
    (claim,) = (each for each in objects if each["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "fast"
    if target == "kubernetes":
        server = next(each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"] == of.name)
        assert server["spec"]["template"]["spec"]["containers"][0]["image"] == f"{of.image_name}:mine"
