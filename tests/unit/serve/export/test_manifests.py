"""The files for containers: valid by the published schemas, closed by default, and the same server in all of them."""

from __future__ import annotations

import copy
import hashlib
import json
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from tests.helpers.deployments import KINDS, deployment
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.serve.export import container_images, manifests
from trtllm_pipeline.serve.export.cell_export import check_targets
from trtllm_pipeline.serve.export.deployment import Deployment
from trtllm_pipeline.serve.gateway.gateway_config import GatewayConfig

VERSIONS = ("1.27", "1.31", "1.37")
CUSTOM: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "data" / "deploy" / "custom_resources.json").read_text(encoding="utf-8")
)
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
    manifests.write_base(target, of, folder)
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


def pod_specs(found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods of all objects; KServe's is the predictor, with containers and volumes of the runtime that it names."""
    for name, each in found.items():
        spec = each.get("spec", {})
        if each["kind"] == "InferenceService":
            runtime = found[f"ServingRuntime {spec['predictor']['model']['runtime']}"]["spec"]
            yield name, {**runtime, **spec["predictor"]}
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


@pytest.mark.parametrize(("target", "of"), CASES, ids=IDS)
def test_servers_wait_for_the_bundle_before_their_probes_count(target: str, of: Deployment, tmp_path: Path) -> None:
    servers = 0
    for name, spec in pod_specs(written(target, of, tmp_path)):
        if "startupProbe" in spec["containers"][0]:
            servers += 1
            (wait,) = spec["initContainers"]
            assert "until [ -f /models/SHA256SUMS ]" in wait["command"][-1], name
            assert "until" not in " ".join(spec["containers"][0]["command"]), name
            for container in (wait, spec["containers"][0]):
                (mount,) = (each for each in container["volumeMounts"] if each["mountPath"] == "/models")
                (volume,) = (each for each in spec["volumes"] if each["name"] == mount["name"])
                assert volume["persistentVolumeClaim"] == {"claimName": of.name}, name
    assert servers == 1


@pytest.mark.parametrize(("target", "of"), CASES, ids=IDS)
def test_another_bundle_of_the_same_name_replaces_the_servers(target: str, of: Deployment, tmp_path: Path) -> None:
    """They wait for their own bundle, whatever the volume still holds, and are recreated on their GPUs."""

    def exported(fingerprint: str) -> dict[str, dict[str, Any]]:
        folder = tmp_path / fingerprint
        folder.mkdir()
        served: Any = SimpleNamespace(**vars(of.served))
        served.artifacts = {"repository": SimpleNamespace(fingerprint=fingerprint)}
        return written(target, replace(of, served=served), folder)

    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "SHA256SUMS").touch()

    def starts(spec: dict[str, Any]) -> bool:
        (wait,) = spec["initContainers"]
        *program, script = wait["command"]
        script = script.replace("/models", str(volume)).replace("sleep 5", "exit 9")
        done = subprocess.run([*program, script], capture_output=True, text=True, check=False)
        assert (done.returncode, "waiting for the bundle" in done.stdout) in {(0, False), (9, True)}, done
        return done.returncode == 0

    old, new = exported("a" * 32), exported("b" * 32)
    waiting = [name for name, spec in pod_specs(new) if "initContainers" in spec]
    assert len(waiting) == 1 + of.openai + (target == "lws")
    for fingerprint, right, wrong in (("a" * 32, old, new), ("b" * 32, new, old)):
        (volume / "bundle.json").write_text(json.dumps({"artifacts": {"repository": fingerprint}}))
        assert all(starts(spec) for name, spec in pod_specs(right) if name in waiting)
        assert not any(starts(spec) for name, spec in pod_specs(wrong) if name in waiting)
    if target == "kserve":
        assert new[f"InferenceService {of.name}"]["spec"]["predictor"]["deploymentStrategy"] == {"type": "Recreate"}


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
    assert "tiny-fp16-gateway-client" not in json.dumps(policy), "clients of the gateway do not reach the server"
    server = found["Deployment tiny-fp16"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= server.items()
    assert not policy["podSelector"]["matchLabels"].items() <= others.items(), "the gateway has to reach out"
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= others.items()


SELECTED = {
    "kubernetes": {"app.kubernetes.io/instance": "tiny-fp16", "app.kubernetes.io/name": "triton"},
    "lws": {"app.kubernetes.io/instance": "tiny-fp16", "app.kubernetes.io/name": "triton"},
    "kserve": {"serving.kserve.io/inferenceservice": "tiny-fp16", "component": "predictor"},
}
"""Labels of the server's pods; KServe sets those of its own."""


@pytest.mark.parametrize("target", SELECTED)
def test_only_chosen_pods_reach_the_server_and_its_gateway(target: str, tmp_path: Path) -> None:
    found = written(target, deployment(gpus=16 if target == "lws" else 1, openai=True), tmp_path)
    server, gateway = (found[f"NetworkPolicy {name}"]["spec"] for name in ("tiny-fp16", "tiny-fp16-gateway"))
    assert server["podSelector"]["matchLabels"] == SELECTED[target]
    pod = found["Deployment tiny-fp16-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert gateway["podSelector"]["matchLabels"].items() <= pod.items()
    assert gateway["policyTypes"] == ["Ingress", "Egress"]
    (allowed,) = gateway["ingress"]
    assert {"tiny-fp16-gateway-client": "true"} in [
        each.get("podSelector", {}).get("matchLabels") for each in allowed["from"]
    ]
    assert gateway["egress"][0]["to"] == [{"podSelector": {"matchLabels": SELECTED[target]}}]


@pytest.mark.parametrize("target", SELECTED)
@pytest.mark.parametrize("api_keys", [True, False])
def test_the_gateway_requires_keys_unless_told_otherwise(target: str, api_keys: bool, tmp_path: Path) -> None:
    of = deployment(gpus=16 if target == "lws" else 1, openai=True, api_keys=api_keys)
    found = written(target, of, tmp_path)
    config = json.loads(found["ConfigMap tiny-fp16-gateway"]["data"]["gateway-config.json"])
    spec = found["Deployment tiny-fp16-gateway"]["spec"]["template"]["spec"]
    secrets = [each for each in spec["volumes"] if "secret" in each]
    if not api_keys:
        assert (config["api_keys_file"], secrets) == (None, [])
        return
    (secret,) = secrets
    assert secret["secret"] == {"secretName": "tiny-fp16-api-keys", "defaultMode": 0o440}, "not optional"
    (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == secret["name"])
    assert config["api_keys_file"] == f"{mount['mountPath']}/keys"
    text = (tmp_path / "base" / "gateway.yaml").read_text(encoding="utf-8")
    assert "kubectl create secret generic tiny-fp16-api-keys --from-literal=keys=" in text


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_pods_that_share_a_volume_of_one_node_meet_there(target: str, tmp_path: Path) -> None:
    found = written(target, deployment(openai=True), tmp_path)
    assert found["PersistentVolumeClaim tiny-fp16"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    if target == "kubernetes":
        server = found["Deployment tiny-fp16"]["spec"]["template"]
    else:  # KServe gives its pods the labels of the InferenceService
        service = found["InferenceService tiny-fp16"]
        server = {"metadata": service["metadata"], "spec": service["spec"]["predictor"]}
    fill = found["Job tiny-fp16-fill"]["spec"]["template"]
    gateway = found["Deployment tiny-fp16-gateway"]["spec"]["template"]
    pods = {"server": server, "fill": fill, "copy": found["Pod tiny-fp16-copy"], "gateway": gateway}

    def follows(pod: dict[str, Any], kind: str = "required") -> set[str]:
        terms = pod["spec"]["affinity"]["podAffinity"].get(f"{kind}DuringSchedulingIgnoredDuringExecution", [])
        (term,) = [each.get("podAffinityTerm", each) for each in terms] or [None]
        if term is None:
            return set()
        assert term["topologyKey"] == "kubernetes.io/hostname"
        wanted = term["labelSelector"]["matchLabels"]
        (expression,) = term["labelSelector"]["matchExpressions"]
        return {
            name
            for name, each in pods.items()
            if wanted.items() <= each["metadata"]["labels"].items()
            and each["metadata"]["labels"][expression["key"]] in expression["values"]
        }

    assert follows(gateway) == {"server"}, "it never holds the volume on a node where the server cannot be"
    # A pod that its own affinity selects is scheduled where no other such pod is.
    assert follows(fill) == follows(found["Pod tiny-fp16-copy"]) == {"server", "fill", "copy"}
    assert follows(server) == set()
    assert follows(server, "preferred") == {"gateway", "fill", "copy"}
    for pod in pods.values():
        assert pod["spec"]["tolerations"] == server["spec"]["tolerations"], "all have to be admitted to that node"


def test_a_volume_of_several_nodes_binds_no_pod(tmp_path: Path) -> None:
    found = written("lws", deployment(gpus=16, openai=True), tmp_path)
    assert not [name for name, spec in pod_specs(found) if "affinity" in spec]


STAND_IN_KUBECTL = """#!/bin/sh
[ -e "$VOLUME/SHA256SUMS" ] && whole=whole || whole=
echo "$1${whole:+ $whole}" >> "$LOG"
[ "$1" = exec ] || exit 0
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


def test_the_script_copies_a_bundle_and_checks_it(tmp_path: Path) -> None:
    written("kubernetes", deployment(), tmp_path)
    script, volume, bundle = (tmp_path / name for name in ("fill/fill-from-bundle.sh", "volume", "a bundle"))
    script.write_text(script.read_text().replace("/models", str(volume)))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(STAND_IN_KUBECTL)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    volume.mkdir()
    volume.chmod(0o777)
    for name in ("lost+found", ".snapshot"):  # the file system's own
        (volume / name).mkdir()
    (bundle / "engine").mkdir(parents=True)
    (bundle / "engine" / "rank0.engine").write_bytes(b"e")
    (bundle / "SHA256SUMS").write_text(f"{hashlib.sha256(b'e').hexdigest()}  engine/rank0.engine\n")
    log = tmp_path / "log"
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LOG": str(log), "VOLUME": str(volume)}

    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        words = ["sh", str(script), str(folder)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    refused = run(tmp_path)
    assert refused.returncode == 2
    assert "expected a directory that pipeline export --to bundle wrote" in refused.stderr
    assert not log.exists()
    done = run(bundle)
    assert done.returncode == 0, done.stderr
    assert (volume / "engine" / "rank0.engine").read_bytes() == b"e"
    assert log.read_text().splitlines() == ["replace", "wait", "exec", "exec", "exec", "delete whole"]
    assert stat.S_IMODE(volume.stat().st_mode) == 0o777, "root owns a volume, so tar may not change it"

    (bundle / "engine").rename(bundle / "model")
    (bundle / "SHA256SUMS").write_text(f"{hashlib.sha256(b'e').hexdigest()}  model/rank0.engine\n")
    log.unlink()
    done = run(bundle)
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == ["replace whole", "wait whole", "exec whole", "exec", "exec", "delete whole"]
    assert {path.name for path in volume.iterdir()} == {"model", "SHA256SUMS", "lost+found", ".snapshot"}

    (bundle / "model" / "rank0.engine").write_bytes(b"f")
    assert run(bundle).returncode != 0, "the content is not what SHA256SUMS says"
    assert not (volume / "SHA256SUMS").exists()


def test_probes_allow_for_the_measured_load_time_and_for_a_cold_read(tmp_path: Path) -> None:
    def startup_s(load_s: float | None, gb: int, target: str = "kubernetes") -> int:
        folder = tmp_path / f"{target}-{load_s}-{gb}"
        folder.mkdir()
        of = deployment(load_s=load_s, bundle_bytes=gb * 10**9, openai=True)
        found = written(target, of, folder)
        if target == "kubernetes":
            server = found["Deployment tiny-fp16"]["spec"]
            container = server["template"]["spec"]["containers"][0]
        else:
            container = found["ServingRuntime tiny-fp16"]["spec"]["containers"][0]
        probe = container["startupProbe"]
        limit = int(probe["periodSeconds"] * probe["failureThreshold"])
        if target == "kubernetes":
            filled_s = found["Pod tiny-fp16-copy"]["spec"]["activeDeadlineSeconds"]
            gateway = found["Deployment tiny-fp16-gateway"]["spec"]
            assert server["progressDeadlineSeconds"] == gateway["progressDeadlineSeconds"] > filled_s + limit
        manifests.write_compose(of, folder)
        service = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))["services"]["triton"]
        assert service["healthcheck"]["start_period"] == f"{limit}s"
        return limit

    assert startup_s(42.5, 3) == 130
    assert startup_s(1.0, 3) == 60
    assert startup_s(None, 3) == 600
    assert startup_s(25.0, 70) == startup_s(25.0, 70, "kserve") == 700, "70 GB at 100 MB/s"
    text = (tmp_path / "kubernetes-None-3" / "base" / "deployment.yaml").read_text(encoding="utf-8")
    assert "The load time was not measured" in text
    assert "reading 3.0 GB at 100 MB/s" in text
    assert "reading 1.4 MB at 100 MB/s" in deployment(bundle_bytes=1_400_000).start_limit_words


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
DIGEST = f"sha256:{'a' * 64}"


def test_the_overlay_names_the_image_of_the_gateway_too(tmp_path: Path) -> None:
    def named(folder: str, **changes: Any) -> list[dict[str, str]]:
        (tmp_path / folder).mkdir()
        written("kubernetes", deployment(**changes), tmp_path / folder)
        text = (tmp_path / folder / "overlay" / "kustomization.yaml").read_text(encoding="utf-8")
        return list(yaml.safe_load(text)["images"])

    cpu = container_images.parts(container_images.CPU)
    assert [each["name"] for each in named("both", openai=True)] == [container_images.TRITON, cpu.name]
    assert [each["name"] for each in named("one", kind="embedded", openai=True)] == [cpu.name]
    own = named("own", kind="embedded", openai=True, image="registry:5000/x:1")
    assert [each["name"] for each in own] == ["registry:5000/x"], "it has the gateway too"
    pinned = named("pinned", image=f"registry:5000/x@{DIGEST}")
    assert pinned == [{"name": "registry:5000/x", "newName": "registry:5000/x", "digest": DIGEST}]


def test_an_image_for_cpus_serves_as_gateway_too(tmp_path: Path) -> None:
    of = deployment("embedded", openai=True, image="registry/x:1")
    specs = dict(pod_specs(written("kubernetes", of, tmp_path)))
    assert len(specs) == 4
    for spec in specs.values():
        images = {each["image"] for each in (*spec["containers"], *spec.get("initContainers", ()))}
        assert images == {"registry/x:1"}


def test_values_that_look_like_yaml_stay_values(tmp_path: Path) -> None:
    of = deployment(image="registry/x:y", storage_class=HOSTILE, gpu=HOSTILE)
    for target in manifests.RESOURCES:
        (tmp_path / target).mkdir()
        manifests.write_base(target, of, tmp_path / target)
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


@pytest.mark.programs("docker-compose")
def test_compose_by_docker_compose(tmp_path: Path) -> None:
    manifests.write_compose(deployment(openai=True), tmp_path)
    path = tmp_path / "compose.yaml"
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("name:")), encoding="utf-8")
    read = subprocess.run(["docker-compose", "config"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert read.returncode == 0, f"releases before 2 know no name, and all else\n{read.stderr}"
    assert set(yaml.safe_load(read.stdout)["services"]) == {"triton", "gateway"}


@pytest.mark.programs("kubectl")
@pytest.mark.parametrize(("target", "of"), [CASES[1], CASES[5], CASES[8]], ids=[IDS[1], IDS[5], IDS[8]])
def test_the_overlay_is_what_kustomize_takes(target: str, of: Deployment, tmp_path: Path) -> None:
    found = written(target, of, tmp_path)
    overlay = tmp_path / "overlay" / "kustomization.yaml"
    text = overlay.read_text(encoding="utf-8").replace("namespace: default", "namespace: serving")
    image = container_images.parts(of.image)
    text = text.replace(f'newTag: "{image.tag}"', 'newTag: "mine"')
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
        assert server["spec"]["template"]["spec"]["containers"][0]["image"] == f"{image.name}:mine"
