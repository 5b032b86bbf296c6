"""A model is its files, wherever they come from: plans and runs with the hubs' real clients from hubs of ours on loopback."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import command_line
from tests.helpers.fake_hub import FakeHub, Fault, Repository, sha256
from trtllm_pipeline.base.errors import DownloadError
from trtllm_pipeline.models.hub.sources import content_of, fetch, resolve
from trtllm_pipeline.orchestrate.matrix.recipe_files import recipes_folder
from trtllm_pipeline.tensorrt.embedded import random_model

HUGGING_FACE, MODELSCOPE = "org/tiny", "other/tiny-copy"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    random_model.write_model(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "MODELSCOPE")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    for name in ("HF_HOME", "MODELSCOPE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    copies = {
        HUGGING_FACE: Repository({**files, "README.md": b"# tiny", "LICENSE": b"MIT", ".gitattributes": b"*.x lfs"}),
        MODELSCOPE: Repository({**files, "README.md": b"# a copy", "configuration.json": b'{"framework": "x"}'}),
    }
    with FakeHub(copies) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        yield hub


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    """Two recipes of the same model, each with a hub of its own."""
    tiny = yaml.safe_load((recipes_folder() / "tiny.yaml").read_text())
    (tmp_path / "recipes").mkdir()
    for name, source in (("from-hf", {"hugging_face": HUGGING_FACE}), ("from-ms", {"modelscope": MODELSCOPE})):
        recipe = {**tiny, "name": name, "sources": [source]}
        (tmp_path / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    axes = {"model": ["from-hf", "from-ms"], "precision": ["fp16"], "max_batch_size": [2], "lengths": ["32,8"]}
    path = tmp_path / "matrix.yaml"
    path.write_text(yaml.safe_dump({"name": "m", "axes": axes}))
    return path


def pipeline(*words: object, code: int = 0) -> str:
    """What a command prints."""
    return command_line.pipeline(*words, code=code).stdout


def planned(matrix: Path, workspace: Path, *words: str) -> dict[str, Any]:
    asked = ("--until", "build", "--format", "json", "--toolchain", "embedded")
    found: dict[str, Any] = json.loads(pipeline("plan", "-m", matrix, "--workspace", workspace, *asked, *words))
    return found


def fingerprints(plan: dict[str, Any]) -> dict[str, str]:
    return {run["stage"]: run["fingerprint"] for run in plan["stage_runs"]}


def todo(plan: dict[str, Any]) -> dict[str, str]:
    return {run["stage"]: run["reason"] for run in plan["stage_runs"] if run["action"] == "run"}


def changed(weights: bytes) -> bytes:
    return weights[:-4] + bytes(4 * [weights[-1] ^ 1])


def test_copies_are_one_model_and_only_what_is_read_makes_it_stale(hub: FakeHub, matrix: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    run = ("run", "-m", matrix, "--workspace", workspace, "--toolchain", "embedded", "--until", "build", "--refresh")
    before = planned(matrix, workspace)
    assert [each["stage"] for each in before["stage_runs"]] == ["download", "convert", "build"]
    assert {len(each["cells"]) for each in before["stage_runs"]} == {2}
    assert hub.count(WEIGHTS) == 0, "the plan fetches no weights"
    pipeline(*run)
    assert {path.parent.name for path in workspace.glob("store/*/*")} == {"download", "convert", "build"}
    assert len(list(workspace.glob("store/*/*"))) == 3

    for number, name in enumerate((HUGGING_FACE, MODELSCOPE)):
        repository = hub.repositories[name]
        repository.commit = f"{number}" * 40
        repository.files.update({"README.md": b"# better words", "LICENSE": b"Apache-2.0", "picture.png": b"\x89PNG"})
    fetched = hub.count(WEIGHTS)
    pipeline(*run)
    after = planned(matrix, workspace)
    assert fingerprints(after) == fingerprints(before)
    assert todo(after) == {}
    assert hub.count(WEIGHTS) == fetched

    repository = hub.repositories[HUGGING_FACE]
    repository.commit = "e" * 40
    repository.files[WEIGHTS] = changed(repository.files[WEIGHTS])
    only = ("--cells", "from-hf/*", "--until", "download")
    pipeline("stage", "download", "-m", matrix, "--workspace", workspace, "--toolchain", "embedded", *only[:2])
    assert todo(planned(matrix, workspace)) == {}, "pinned until it is asked for again"
    pipeline("run", "-m", matrix, "--workspace", workspace, "--toolchain", "embedded", "--refresh", *only)
    stale = planned(matrix, workspace)
    assert todo(stale) == {"convert": f"download ({WEIGHTS}) changed", "build": "convert changed"}
    assert {tuple(each["cells"]) for each in stale["stage_runs"] if each["action"] == "run"} == {
        ("from-hf/fp16/tp1pp1/bs2/isl32-osl8",)
    }
    told = pipeline("explain", "from-hf", "-m", matrix, "--workspace", workspace, "--toolchain", "embedded")
    assert f"download ({WEIGHTS}) changed" in told


def test_a_new_chat_template_costs_neither_conversion_nor_build(hub: FakeHub, matrix: Path, tmp_path: Path) -> None:
    """And what was made sees only what it hangs on; `exec` makes it again from the whole model, byte for byte."""
    workspace = tmp_path / "w"
    asked = ("-m", matrix, "--workspace", workspace, "--toolchain", "embedded", "--cells", "from-hf/*")
    pipeline("run", *asked, "--until", "repository")
    (made,) = workspace.glob("store/convert/*")
    (download,) = workspace.glob("store/download/*")
    manifest, job = (json.loads((made / name).read_text()) for name in ("manifest.json", "job.json"))
    assert manifest["key"]["inputs"]["model"].keys() == {"files"}
    assert manifest["provenance"]["made_from"] == {"model": download.name}
    assert job["viewed"] == {"model": str(download / "out")}
    assert not list(workspace.glob("**/inputs")), "gone with the attempt"
    statement = pipeline("store", "provenance", made.name, "--workspace", workspace)
    assert f"stage-run/{download.name}" in statement
    pipeline("stage", "replay", made / "job.json", "--output-dir", tmp_path / "again")
    assert (tmp_path / "again" / "out" / "model.gguf").read_bytes() == (made / "out" / "model.gguf").read_bytes()

    repository = hub.repositories[HUGGING_FACE]
    repository.commit = "e" * 40
    repository.files["chat_template.jinja"] = b"{{ messages }}"
    repository.files["generation_config.json"] = json.dumps({"eos_token_id": 2}).encode()
    pipeline("run", *asked, "--refresh", "--until", "download")
    plan = json.loads(pipeline("plan", *asked, "--until", "repository", "--format", "json"))
    assert todo(plan) == {"repository": "download (chat_template.jinja, generation_config.json) changed"}
    pipeline("run", *asked, "--until", "repository")
    assert [len(list(workspace.glob(f"store/{stage}/*"))) for stage in ("download", "convert", "build")] == [2, 1, 1]
    (newest,) = {*workspace.glob("store/download/*")} - {download}
    served = [path.read_text() for path in workspace.glob("store/repository/*/out/preprocessing/config.pbtxt")]
    assert [sum(each.name in text for text in served) for each in (download, newest)] == [1, 1]

    repository.commit = "f" * 40
    tokenizer = json.loads(repository.files["tokenizer_config.json"])
    repository.files["tokenizer_config.json"] = json.dumps({**tokenizer, "chat_template": "{{ messages }}"}).encode()
    pipeline("run", *asked, "--refresh", "--until", "download")
    plan = json.loads(pipeline("plan", *asked, "--until", "repository", "--format", "json"))
    assert todo(plan) == {
        "convert": "download (tokenizer_config.json) changed",
        "build": "convert changed",
        "repository": "build and download (tokenizer_config.json) changed",
    }


def test_a_local_folder_that_somebody_edits_is_read_by_file(
    files: dict[str, bytes], matrix: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    recipe = tmp_path / "recipes" / "from-hf.yaml"
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "sources": [{"local": str(folder)}]}))
    workspace = tmp_path / "w"
    asked = ("-m", matrix, "--workspace", workspace, "--toolchain", "embedded", "--cells", "from-hf/*")
    pipeline("run", *asked, "--until", "build")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "LICENSE").write_text("yours")
    plan = json.loads(pipeline("plan", *asked, "--until", "build", "--format", "json"))
    assert todo(plan) == {}
    (folder / "config.json").write_text(json.dumps({**json.loads(files["config.json"]), "rope_theta": 5e5}))
    plan = json.loads(pipeline("plan", *asked, "--until", "build", "--format", "json"))
    assert todo(plan)["convert"] == "download (config.json) changed"
    assert "config.json" in todo(plan)["download"]


@pytest.mark.seam
def test_a_changed_file_is_named_with_its_digests(hub: FakeHub, matrix: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    asked = ("-m", matrix, "--workspace", workspace, "--toolchain", "embedded", "--cells", "from-ms/*")
    pipeline("run", *asked, "--until", "download")
    files = hub.repositories[MODELSCOPE].files
    old, new = files["config.json"], json.dumps({**json.loads(files["config.json"]), "rope_theta": 5e5}).encode()
    files["config.json"] = new
    hub.repositories[MODELSCOPE].commit = "e" * 40
    text = pipeline("run", *asked, "--until", "download", "--refresh", "--dry-run", "--format", "json")
    assert todo(json.loads(text)) == {}, "a dry run asks no hub for what is pinned"
    (workspace / "state.db").unlink()
    history = workspace / "history.jsonl"
    history.write_bytes(b"".join(line for line in history.read_bytes().splitlines(True) if b'"pins"' not in line))
    plan = json.loads(pipeline("plan", *asked, "--until", "download", "--format", "json"))
    assert todo(plan) == {"download": f"changed: config.json {sha256(old)[:12]} -> {sha256(new)[:12]}"}


def test_a_lock_needs_no_hub_to_plan_the_same(hub: FakeHub, matrix: Path, tmp_path: Path, monkeypatch: Any) -> None:
    workspace = tmp_path / "w"
    pipeline("run", "-m", matrix, "--workspace", workspace, "--toolchain", "embedded", "--until", "download")
    (lock,) = workspace.glob("runs/*/lock/matrix.yaml")
    before = fingerprints(planned(matrix, workspace))
    for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    asked = len(hub.requests)
    assert fingerprints(planned(matrix, workspace)) == before
    assert fingerprints(planned(lock, tmp_path / "elsewhere")) == before
    assert len(hub.requests) == asked


def test_a_model_without_a_tokenizer_that_we_read_is_told_by_the_plan(
    hub: FakeHub, matrix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    del hub.repositories[HUGGING_FACE].files["tokenizer.json"]
    pipeline("plan", "-m", matrix, "--workspace", tmp_path / "w", "--toolchain", "embedded")
    told = [line for line in caplog.messages if "tokenizer.json" in line]
    (said,) = told
    assert said == (
        "from-hf: its repository has no tokenizer.json, and no other tokenizer that smoke, perf and accuracy can read. "
        "See docs/models.md"
    )


def test_a_hub_out_of_reach_stops_a_run_rather_than_changing_its_keys(
    hub: FakeHub, matrix: Path, tmp_path: Path
) -> None:
    """A commit needs no asking for what it is, but what its files are has to be told once."""
    recipe = tmp_path / "recipes" / "from-hf.yaml"
    source = {"hugging_face": HUGGING_FACE, "revision": "c" * 40}
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "sources": [source]}))
    hub.repositories[HUGGING_FACE].listed["README.md"] = {}
    asked = ("-m", matrix, "--workspace", tmp_path / "w", "--toolchain", "embedded", "--cells", "from-hf/*")
    for endpoint, code in (("http://127.0.0.1:9", 1), (hub.url, 0)):
        os.environ["HF_ENDPOINT"] = endpoint
        pipeline("run", *asked, "--until", "download", code=code)
    (made,) = (tmp_path / "w").glob("store/download/*/manifest.json")
    key = json.loads(made.read_text())["key"]["params"]
    assert key.keys() == {"content"}
    assert key["content"][WEIGHTS] == sha256(hub.repositories[HUGGING_FACE].files[WEIGHTS])
    statement = pipeline("store", "provenance", made.parent.name, "--workspace", tmp_path / "w")
    assert f"pkg:huggingface/{HUGGING_FACE}@{'c' * 40}" in statement


def test_a_gated_model_fails_in_its_own_download_alone(hub: FakeHub, matrix: Path, tmp_path: Path) -> None:
    """At a commit, where nothing else asks the hub before; once access is given, it is known by its files."""
    recipe = tmp_path / "recipes" / "from-hf.yaml"
    source = {"hugging_face": HUGGING_FACE, "revision": "c" * 40}
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "sources": [source]}))
    hub.repositories[HUGGING_FACE].gated = True
    asked = ("-m", matrix, "--workspace", tmp_path / "w", "--toolchain", "embedded", "--until", "download")
    out = pipeline("run", *asked, code=1)
    assert "1 done, 1 failed" in out
    assert "is gated on Hugging Face" in out
    hub.repositories[HUGGING_FACE].gated = False
    assert len(planned(matrix, tmp_path / "w")["stage_runs"]) == 3


def test_what_cannot_be_told_is_known_by_its_address(hub: FakeHub) -> None:
    for kind, model, digest in (
        ("modelscope", MODELSCOPE, {"sha256": ""}),
        ("hugging_face", HUGGING_FACE, {"sha256": "0" * 10}),
    ):
        pinned = resolve([{kind: model}])
        told = content_of(pinned)
        assert told is not None
        assert "LICENSE" not in told
        hub.repositories[model].listed[WEIGHTS] = digest
        assert content_of(pinned) is None
        hub.repositories[model].listed.clear()
        kept = hub.repositories[model].files.pop(WEIGHTS)
        assert content_of(pinned) is None, "the download says what is missing"
        hub.repositories[model].files[WEIGHTS] = kept


@pytest.mark.seam
@pytest.mark.parametrize("offline", [False, True])
def test_other_content_than_was_planned_is_refused(hub: FakeHub, tmp_path: Path, offline: bool) -> None:
    """Whoever wrote a lock file: what it says of the files is what the artifact holds, or there is none."""
    from huggingface_hub import snapshot_download

    snapshot_download(HUGGING_FACE, endpoint=hub.url, cache_dir=tmp_path / "hf")
    pinned = resolve([{"hugging_face": HUGGING_FACE}])
    told = content_of(pinned, offline=offline)
    assert told == content_of(pinned, offline=not offline)
    assert told is not None

    def fetched(name: str, content: dict[str, str]) -> Path:
        out = tmp_path / name
        out.mkdir()
        fetch(pinned, out, progress=lambda *_: None, partial=tmp_path / "partial", offline=offline, content=content)
        return out

    assert (fetched("good", told) / WEIGHTS).is_file()
    with pytest.raises(DownloadError, match=r"config\.json"):
        fetched("lie", {**told, "config.json": "0" * 64})
    with pytest.raises(DownloadError, match=r"other files than were planned: config\.json"):
        fetched("less", {name: digest for name, digest in told.items() if name != "config.json"})
    with pytest.raises(DownloadError, match=r"other files than were planned: more\.json"):
        fetched("more", {**told, "more.json": "0" * 64})


def test_large_files_of_the_cache_are_not_read_for_their_digests(hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(HUGGING_FACE, endpoint=hub.url, cache_dir=tmp_path / "hf")
    pinned = resolve([{"hugging_face": HUGGING_FACE}], offline=True)
    told = content_of(pinned, offline=True)
    (weights,) = (tmp_path / "hf").glob(f"*/snapshots/*/{WEIGHTS}")
    content = weights.resolve()
    content.write_bytes(random.Random(0).randbytes(content.stat().st_size))
    assert content_of(pinned, offline=True) == told


# ------------------------------------------------------------------------------------------- from one hub to the other

COPY = {"modelscope": MODELSCOPE}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_pipeline.models.hub.hub_errors.BACKOFF_S", 0.001)


@pytest.mark.parametrize(
    ("source", "copy", "faults"),
    [
        (HUGGING_FACE, MODELSCOPE, [Fault(f"{HUGGING_FACE}/", status=503, times=1000)]),
        (HUGGING_FACE, MODELSCOPE, [Fault("/resolve/", status=429, headers={"Retry-After": "3600"}, times=1000)]),
        (HUGGING_FACE, MODELSCOPE, [Fault(f"/{HUGGING_FACE}/{WEIGHTS}", kind="drop", after=100_000, times=1000)]),
        (MODELSCOPE, HUGGING_FACE, [Fault(f"models/{MODELSCOPE}/repo?", status=502, times=1000)]),
    ],
    ids=["down", "rate limit", "breaks off", "modelscope down"],
)
@pytest.mark.usefixtures("quick")
def test_another_hub_goes_on_where_one_breaks_off(
    hub: FakeHub,
    files: dict[str, bytes],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    copy: str,
    faults: list[Fault],
) -> None:
    """Byte for byte, from the byte where the first one stopped, and nobody is sent the other's token."""
    monkeypatch.setenv("HF_TOKEN", "good")
    kinds = {HUGGING_FACE: "hugging_face", MODELSCOPE: "modelscope"}
    pinned = resolve([{kinds[source]: source}])
    content = content_of(pinned)
    hub.requests.clear()
    hub.faults += faults
    out = tmp_path / "out"
    out.mkdir()
    copies: list[dict[str, Any]] = [{kinds[copy]: copy}]
    fetch(pinned, out, progress=lambda *_: None, partial=tmp_path / "partial", content=content, copies=copies)
    assert {name: (out / name).read_bytes() for name in files} == files
    told = caplog.text
    name = {HUGGING_FACE: "Hugging Face", MODELSCOPE: "ModelScope"}[copy]
    assert f"{name} ({copy}) continues from byte" in told or f"{name} ({copy}) instead" in told
    if faults[0].kind == "drop":
        assert f"{WEIGHTS}: peer closed connection" in told
        resumed = [headers["range"] for _, path, headers in hub.requests if MODELSCOPE in path and "range" in headers]
        assert resumed
        assert all(int(each.removeprefix("bytes=").rstrip("-")) >= 100_000 for each in resumed)
    for _, path, headers in hub.requests:
        assert "authorization" not in headers or MODELSCOPE not in path or kinds[source] == "modelscope"


@pytest.mark.usefixtures("quick")
def test_a_copy_with_other_files_does_not_go_on(hub: FakeHub, tmp_path: Path) -> None:
    """Nor one that refuses; what happened to the hub that was asked is the error then."""
    weights = hub.repositories[MODELSCOPE].files[WEIGHTS]
    pinned = resolve([{"hugging_face": HUGGING_FACE}])
    content = content_of(pinned)

    def attempt(name: str, times: int) -> Path:
        hub.faults[:] = [Fault(f"/{HUGGING_FACE}/{WEIGHTS}", status=503, times=times)]
        out = tmp_path / name
        out.mkdir()
        fetch(pinned, out, progress=lambda *_: None, partial=tmp_path / "p", content=content, copies=[COPY])
        return out

    hub.repositories[MODELSCOPE].files[WEIGHTS] = changed(weights)
    with pytest.raises(DownloadError, match=r"org/tiny: Hugging Face reports a server error \(HTTP 503\)"):
        attempt("changed", 1000)
    hub.repositories[MODELSCOPE].files[WEIGHTS] = weights
    hub.repositories[MODELSCOPE].gated = True
    with pytest.raises(DownloadError, match=r"org/tiny: Hugging Face reports a server error \(HTTP 503\)"):
        attempt("gated", 1000)
    assert (attempt("later", 3) / WEIGHTS).read_bytes() == weights, "with one place left it is as patient as ever"


def test_a_lie_of_a_copy_is_not_believed(hub: FakeHub, tmp_path: Path, quick: None) -> None:
    """It lists the digest that was planned and sends something else: what arrived is verified, whoever sent it."""
    repository = hub.repositories[MODELSCOPE]
    planned_digest = sha256(repository.files[WEIGHTS])
    pinned = resolve([{"hugging_face": HUGGING_FACE}])
    content = content_of(pinned)
    repository.files[WEIGHTS] = changed(repository.files[WEIGHTS])
    repository.listed[WEIGHTS] = {"sha256": planned_digest}
    hub.faults.append(Fault(f"/{HUGGING_FACE}/{WEIGHTS}", status=503, times=1000))
    (tmp_path / "out").mkdir()
    with pytest.raises(DownloadError, match=rf"{WEIGHTS} from ModelScope failed verification"):
        fetch(pinned, tmp_path / "out", progress=lambda *_: None, content=content, copies=[COPY])
    assert not list((tmp_path / "out").iterdir())


def test_a_run_goes_on_from_the_other_hub_and_says_so_in_its_log(hub: FakeHub, matrix: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "from-hf.yaml"
    sources = [{"hugging_face": HUGGING_FACE}, {"modelscope": MODELSCOPE}, {"generated": "llama"}]
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "sources": sources}))
    workspace = tmp_path / "w"
    asked = ("-m", matrix, "--workspace", workspace, "--toolchain", "embedded", "--cells", "from-hf/*")
    before = json.loads(pipeline("plan", *asked, "--until", "download", "--format", "json"))
    hub.faults.append(Fault(f"/{HUGGING_FACE}/{WEIGHTS}", status=503, times=1000))
    pipeline("run", *asked, "--until", "download")
    (made,) = workspace.glob("store/download/*")
    assert made.name == before["stage_runs"][0]["fingerprint"], "where the bytes came from is in no key"
    assert f"{WEIGHTS}: {HUGGING_FACE}: Hugging Face reports a server error (HTTP 503); ModelScope ({MODELSCOPE})" in (
        (made / "log").read_text()
    )
    (lock,) = workspace.glob("runs/*/lock/recipes/from-hf.yaml")
    assert [each.keys() & {"hugging_face", "modelscope"} for each in yaml.safe_load(lock.read_text())["sources"]] == [
        {"hugging_face"},
        {"modelscope"},
    ]
    # It holds for both: what one hub has no more comes from the other, if it is the same.
    del hub.repositories[HUGGING_FACE]
    elsewhere = ("-m", lock.parents[1] / "matrix.yaml", "--workspace", tmp_path / "elsewhere", "--cells", "from-hf/*")
    pipeline("run", *elsewhere, "--until", "download")
    assert [path.name for path in (tmp_path / "elsewhere").glob("store/download/*")] == [made.name]
