"""`pipeline export`: a bundle that was moved serves as the cell's own server did; what is refused leaves nothing behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.adapters import random_pairs, write_adapter
from tests.helpers.bundles import started
from tests.helpers.command_line import pipeline
from tests.helpers.deployments import deployment
from tests.helpers.fake_hub import FakeHub
from tests.helpers.trtllm_runs import LARGER, PLAIN, Lane
from tests.standins.programs.checkpoint import safetensors
from trtllm_pipeline.serve.export import container_images, manifests
from trtllm_pipeline.tensorrt.servers import start_script

CELL = "tiny/int8_wo/tp1pp1/bs4/isl192-osl16"
BODY = {"text_input": "The capital of France is", "max_tokens": 8, "bad_words": "", "stop_words": ""}


def ask(port: int, path: str = "/v2/models/ensemble/generate", body: object = BODY) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with one cell of each precision of the tiny matrix, both tested."""
    workspace = tmp_path_factory.mktemp("export") / "w"
    pipeline("run", "--matrix", "tiny", "--until", "smoke", "--toolchain", "embedded", "--workspace", str(workspace))
    return workspace


@pytest.fixture
def workspace(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may harm."""
    return Path(shutil.copytree(built, tmp_path / "w", symlinks=True))


@pytest.mark.seam
def test_a_moved_bundle_answers_as_the_cell_did(workspace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = json.loads(
        pipeline(
            *("export", CELL, "--to", "bundle,compose", "--workspace", str(workspace)),
            *("--output-dir", str(out), "--format", "json"),
        ).stdout
    )
    assert told["targets"] == {"bundle": str(out / "bundle"), "compose": str(out / "compose")}
    (repository,) = (
        path
        for path in workspace.glob("store/repository/*")
        if json.loads((path / "manifest.json").read_text())["label"].endswith("int8_wo")
    )
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    original = tmp_path / "original"
    original.mkdir()
    text = start_script.script("embedded")
    (original / "start").write_text(text)
    (original / "start").chmod(0o755)
    shutil.copytree(repository / "out", original / "repository")  # as it is, with paths into that workspace
    with started(original, environment) as port:
        expected = [ask(port, body={**BODY, "text_input": prompt})["text_output"] for prompt in ("Once", "A b c")]

    shutil.rmtree(workspace)
    moved = tmp_path / "another place ü" / "bundle"
    moved.parent.mkdir()
    shutil.move(out / "bundle", moved)
    texts = [path.read_bytes() for path in (moved / "repository").rglob("*") if path.is_file()]
    assert not any(b"/store/" in text for text in texts), "nothing leads back"
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=moved, check=True)
    with started(moved, environment) as port:
        found = [ask(port, body={**BODY, "text_input": prompt})["text_output"] for prompt in ("Once", "A b c")]
    assert found == expected
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=moved, check=True)
    listed = {line.split("  ", 1)[1] for line in (moved / "SHA256SUMS").read_text().splitlines()}
    assert listed | {"SHA256SUMS"} == {str(path.relative_to(moved)) for path in moved.rglob("*") if path.is_file()}


def test_the_card_is_what_a_hub_reads(built: Path, tmp_path: Path) -> None:
    pipeline("export", CELL, "--to", "bundle", "--workspace", str(built), "--output-dir", str(tmp_path / "out"))
    text = (tmp_path / "out" / "bundle" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"]
    for words in (CELL, "sha256sum -c", "## License", "## Accuracy", "Not measured."):
        assert words in body
    about = json.loads((tmp_path / "out" / "bundle" / "bundle.json").read_text())
    assert (about["cell"], about["kind"], about["gpus"], about["max_seq_len"]) == (CELL, "embedded", 0, 208)
    assert about["load_s"] > 0


def test_what_cannot_be_exported_is_refused_in_words(workspace: Path, tmp_path: Path) -> None:
    def refused(*words: str, code: int = 2, to: str = "bundle") -> str:
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        cell = words[0] if words and not words[0].startswith("-") else CELL
        more = [word for word in words if word != cell]
        found = pipeline(
            "export", cell, "--to", to, "--workspace", str(workspace), "--output-dir", str(out), *more, code=code
        ).stderr
        assert list(out.iterdir()) == [], "nothing is left"
        return found

    assert "2 cells are selected" in refused("tiny")
    assert "matches none" in refused("no-such-cell")
    assert "unknown target 'helm'" in refused(to="helm")
    assert "expected at most 40" in refused("--name", "A_b")
    assert "--repository ORGANIZATION/NAME" in refused(to="hub")
    assert "ORGANIZATION/NAME" in refused("--repository", "a b/c", to="hub")
    assert "require --to hub" in refused("--upload")
    assert "--to lws is for several nodes" in refused(to="lws")
    assert "needs the trusted public keys" in refused("--require-signed")
    assert r"--image 'a\x01b': expected" in refused("--image", "a\x01b")
    assert "--image ''" in refused("--image", "")
    assert "expected lower-case letters" in refused("--storage-class", "a\nb")
    assert "--no-require-keys requires --openai" in refused("--no-require-keys")

    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    words = ("export", CELL, "--to", "bundle", "--workspace", str(workspace), "--output-dir", str(full))
    assert "not an empty directory" in pipeline(*words, code=2).stderr
    assert [each.name for each in full.iterdir()] == ["mine"]

    for weights in workspace.glob("store/build/*/out/model.gguf"):
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.chmod(0o644)
        weights.unlink()  # its content is shared with other artifacts
        weights.write_bytes(data)
    assert "its content changed: nothing is exported from damaged files" in refused()
    shutil.rmtree(workspace / "store" / "build")
    said = refused()
    assert "is not verified: build is missing, which its repository was built from" in said
    assert "try: pipeline run --matrix" in said
    assert " --until build " in said


def test_the_next_commands_are_said(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "out of here"
    words = ("export", CELL, "--to", "kubernetes,compose", "--workspace", str(built), "--output-dir", str(out))
    told = json.loads(pipeline(*words, "--openai", "--format", "json").stdout)
    (again,) = told["next_commands"]["bundle"]
    image, choices, keys, *steps = told["next_commands"]["kubernetes"]
    name, bundle = told["name"], f"{out}-bundle/bundle"
    built_image = f"docker build -f CLONE/Dockerfile.cpu -t {{}}{container_images.CPU} CLONE"
    assert image == f"{built_image.format('REGISTRY/')} && docker push REGISTRY/{container_images.CPU}"
    assert choices == f"grep -rn CHOOSE '{out}/kubernetes'"
    lines = subprocess.run(choices, shell=True, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {Path(line.split(":")[0]).name for line in lines} >= {
        *("kustomization.yaml", "fill-from-hub.yaml", "fill-from-bundle.yaml", "gateway.yaml")
    }
    assert keys == f'kubectl create secret generic {name}-api-keys --from-literal=keys="$(openssl rand -hex 24)"'
    assert steps[:2] == [
        f"kubectl apply -k '{out}/kubernetes/overlay'",
        f"sh '{out}/kubernetes/fill/fill-from-bundle.sh' '{bundle}'",
    ]
    assert steps[2:] == [f"kubectl wait --for=condition=available --timeout=30m deployment/{name}"]
    assert told["next_commands"]["compose"][0] == built_image.format("")
    program, *typed = shlex.split(again)
    assert program == "pipeline"
    pipeline(*typed)
    assert (Path(bundle) / "SHA256SUMS").is_file()

    both = tmp_path / "both"
    said = pipeline(*words[:3], "bundle,kubernetes", *words[4:-1], str(both), "--image", "mine/x:1").stderr
    assert said.startswith(f"next, for kubernetes:\n  grep -rn CHOOSE {both}/kubernetes\n  kubectl apply -k ")
    assert f"fill-from-bundle.sh {both}/bundle\n" in said


def test_a_cell_whose_server_was_never_tested(tmp_path: Path) -> None:
    workspace = str(tmp_path / "w")
    pipeline("run", "--matrix", "tiny", "--cells", CELL, "--until", "repository", "--workspace", workspace)
    words = ("export", CELL, "--to", "bundle", "--workspace", workspace, "--output-dir", str(tmp_path / "out"))
    assert "its server was never tested (smoke)" in pipeline(*words, code=2).stderr


def test_a_full_disk_leaves_nothing(built: Path, tmp_path: Path) -> None:
    words = ["export", CELL, "--to", "bundle", "--workspace", str(built), "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 600; exec "$@"', "sh", sys.executable, "-m", "trtllm_pipeline", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 1
    assert "files are limited to" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_the_hub_is_asked_only_when_told_to_upload(built: Path, tmp_path: Path) -> None:
    with FakeHub({}) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "good", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
        words = ("export", CELL, "--to", "hub", "--repository", "me/tiny", "--workspace", str(built))
        dry = pipeline(*words, "--output-dir", str(tmp_path / "dry"), **environment)
        assert not hub.requests
        assert "engine/model.gguf" in dry.stdout
        assert "nothing was uploaded" in dry.stderr
        real = pipeline(*words, "--output-dir", str(tmp_path / "real"), "--upload", **environment)
        assert f"hub\t{hub.url}/me/tiny/commit/" in real.stdout
        bundle = tmp_path / "real" / "bundle"
        uploaded = hub.repositories["me/tiny"]
        assert uploaded.private
        assert hub.commits == [CELL]
        assert uploaded.files == {
            path.relative_to(bundle).as_posix(): path.read_bytes() for path in bundle.rglob("*") if path.is_file()
        }
        refused = pipeline(
            *words, "--output-dir", str(tmp_path / "no"), "--upload", code=2, **{**environment, "HF_TOKEN": "stranger"}
        )
        assert "not uploaded" in refused.stderr
        assert f"the bundle is in {tmp_path / 'no' / 'bundle'}" in refused.stderr


def test_a_moved_bundle_with_two_ranks(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.0.0")
    lane.run("--cells", LARGER, "--until", "smoke")
    out = tmp_path / "out"
    lane.pipeline(
        *("export", LARGER, "--to", "bundle,kubernetes", "--workspace", str(lane.workspace), "--output-dir", str(out))
    )
    shutil.rmtree(lane.workspace)
    moved = tmp_path / "b b"
    shutil.move(out / "bundle", moved)
    # The Python of Triton's images has numpy; here that is the one of the tests.
    path = f"{Path(sys.executable).parent}:{lane.environment['PATH']}"
    with started(moved, {**lane.environment, "PATH": path}) as port:
        assert ask(port)["text_output"]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ask(port, "/v2/repository/index", {})
    assert lane.left() == []


SEND = """\
import sys
import numpy as np
import tritonclient.grpc as grpc

client = grpc.InferenceServerClient(sys.argv[1])
given = {
    "text_input": ("BYTES", np.array([["abcd"]], dtype=object)),
    "max_tokens": ("INT32", np.array([[1]], np.int32)),
    "lora_task_id": ("UINT64", np.array([[1]], np.uint64)),
    "lora_weights": ("FP16", np.load(sys.argv[2] + "/model.lora_weights.npy")),
    "lora_config": ("INT32", np.load(sys.argv[2] + "/model.lora_config.npy")),
}
inputs = []
for name, (kind, values) in given.items():
    inputs.append(grpc.InferInput(name, list(values.shape), kind))
    inputs[-1].set_data_from_numpy(values)
said = []
client.start_stream(lambda result, error: said.append((result, error)))
client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
client.stop_stream()
assert said and said[0][1] is None, said
"""
"""What any client does with the files of a bundle."""


def test_a_moved_bundle_with_an_adapter(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", "1.2.0")
    write_adapter(lane.folder / "sql", random_pairs({"q_proj": (128, 128)}, rank=2, layers=4))
    lane.matrix.write_text(f"{lane.matrix.read_text()}  lora: {{ adapter: {{ sql: ./sql }} }}\n")
    lane.run("--cells", PLAIN, "--until", "smoke")
    out = tmp_path / "out"
    lane.pipeline("export", PLAIN, "--to", "bundle", "--workspace", str(lane.workspace), "--output-dir", str(out))
    shutil.rmtree(lane.workspace)
    moved = tmp_path / "b b"
    shutil.move(next(path for path in (out / "bundle", out) if (path / "start").exists()), moved)
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=moved, check=True)
    assert {path.name for path in (moved / "adapter").iterdir()} >= {
        *("adapter_config.json", "adapter_model.safetensors", "model.lora_weights.npy", "model.lora_config.npy")
    }
    assert '| sql | `adapter/` | `"lora_task_id": 1` |' in (moved / "README.md").read_text()
    path = f"{Path(sys.executable).parent}:{lane.environment['PATH']}"
    with started(moved, {**lane.environment, "PATH": path}) as port:
        body = {"text_input": "abcd", "max_tokens": 3, "bad_words": "", "stop_words": ""}
        grpc = json.loads((tmp_path / "ports.json").read_text())["GRPC_PORT"]
        subprocess.run(
            [sys.executable, "-c", SEND, f"127.0.0.1:{grpc}", str(moved / "adapter")], check=True, timeout=60
        )
        # The tokens are "ab", "c", "d"; the stand-in turns them by one, and by the rank of an adapter.
        assert ask(port, body=body)["text_output"] == "cdab"
        assert ask(port, body={**body, "lora_task_id": 1})["text_output"] == "abcd"
    assert lane.left() == []


WITH_DRAFT = """\
name: drafts
axes:
  model: [tiny]
  precision: [fp16]
  max_batch_size: [2]
  lengths: ["256,32"]
settings:
"""
TWO_ENGINES = """\
  speculative: { method: draft, model: tiny, max_draft_len: 4 }
  repository: { decoupled: false, enable_kv_cache_reuse: true }
"""
HEAD = """\
  speculative: { method: eagle3, model: ./head }
  serve: { frontend: trtllm_serve }
"""


@pytest.mark.parametrize(
    ("release", "settings", "folder"), [("1.2.0", TWO_ENGINES, "drafter"), ("1.3.0", HEAD, "draft")]
)
def test_a_bundle_has_what_drafts_too(tmp_path: Path, release: str, settings: str, folder: str) -> None:
    lane = Lane(tmp_path / "lane", release)
    lane.matrix.write_text(WITH_DRAFT + settings, encoding="utf-8")
    (lane.folder / "head").mkdir()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 128, "draft_vocab_size": 32}
    (lane.folder / "head" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (lane.folder / "head" / "model.safetensors").write_bytes(safetensors(0))
    load = ("settings.perf.requests=4", "settings.perf.concurrency=[1]")
    found = lane.run(*(word for each in load for word in ("--set", each)))
    ((cell, measured),) = found.items()
    assert (measured["status"], measured["perf"][0]["failures"]) == ("done", 0), measured
    out = tmp_path / "out"
    lane.pipeline("export", cell, "--to", "bundle", "--workspace", str(lane.workspace), "--output-dir", str(out))
    about = json.loads((out / "bundle" / "bundle.json").read_text())
    assert folder in about["artifacts"]
    assert about["model"] == {"drafter": "tensorrt_llm_bls", "draft": "model"}[folder]
    assert (out / "bundle" / folder / "config.json").is_file()
    assert (out / "bundle" / "provenance" / f"{folder}.statement.json").is_file()
    written = [
        path.read_text() for path in (out / "bundle" / "repository").rglob("*") if path.suffix in {".pbtxt", ".yaml"}
    ]
    assert sum(f"@BUNDLE@/{folder}" in text for text in written) == 1
    assert not any(str(lane.workspace) in text for text in written)
    shutil.rmtree(lane.workspace)
    if folder == "drafter":
        moved = tmp_path / "b b"
        shutil.move(out / "bundle", moved)
        path = f"{Path(sys.executable).parent}:{lane.environment['PATH']}"
        asked = {"text_input": "The capital", "max_tokens": 9, "num_draft_tokens": 4, "stream": False}
        with started(moved, {**lane.environment, "PATH": path}) as port:
            assert ask(port, "/v2/models/tensorrt_llm_bls/generate", asked)["text_output"]
    assert lane.left() == []


def _namespaces() -> bool:
    command = ["unshare", "--map-root-user", "--uts", "--mount", "hostname", "x"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


STAND_IN = """#!/bin/sh
[ "${1:-}" != --help ] || exit 0
echo "rank $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $(hostname)"
sleep 1
"""


@pytest.mark.programs("mpirun")
@pytest.mark.skipif(not _namespaces(), reason="needs namespaces of its own")
def test_the_leader_starts_ranks_on_its_workers(tmp_path: Path) -> None:
    """Two pods as namespaces with host names and /tmp of their own, on one volume; the rest is as in the manifests."""
    manifests.write_base("lws", deployment(gpus=2, gpus_per_node=1), tmp_path)
    scripts = yaml.safe_load((tmp_path / "base" / "scripts.yaml").read_text())["data"]
    volume, temporary = tmp_path / "volume", tmp_path / "tmp"
    for folder in (volume / "repository", temporary, tmp_path / "scripts", tmp_path / "bin"):
        folder.mkdir(parents=True)
    (volume / "start").write_text(start_script.script("engine", world_size=2, release="1.0.0"))
    (tmp_path / "bin" / "tritonserver").write_text(STAND_IN)
    (tmp_path / "bin" / "tritonserver").chmod(0o755)
    places = {"/models/": f"{volume}/", "/volume": str(volume), "/scripts/": f"{tmp_path}/scripts/"}
    for name, text in scripts.items():
        text = text.replace("/tmp/", f"{temporary}/")
        for place, here in places.items():
            text = text.replace(place, here)
        (tmp_path / "scripts" / name).write_text(text.replace(f"{tmp_path}{tmp_path}", str(tmp_path)))
        (tmp_path / "scripts" / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LWS_GROUP_SIZE": "2",
        "TMPDIR": str(temporary),
    }

    def pod(name: str, script: str) -> subprocess.Popen[str]:
        (tmp_path / name).mkdir()
        inside = f'hostname {name} && mount --bind "{tmp_path / name}" "{temporary}" && exec sh "{tmp_path}/scripts/{script}"'
        return subprocess.Popen(
            ["unshare", "--map-root-user", "--uts", "--mount", "sh", "-c", inside],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    worker, leader = pod("x-0-1", "worker.sh"), pod("x-0", "leader.sh")
    try:
        said, _ = leader.communicate(timeout=280)
        assert "rank 0 of 2 on x-0\n" in said, said
        assert "rank 1 of 2 on x-0-1\n" in said, said
        assert worker.wait(60) is not None, "so that its pod is started again"
    finally:
        for process in (leader, worker):
            process.kill()
            process.wait()
