"""Downloads with the hubs' real clients from a hub of ours on loopback, well behaved and not."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.contexts import context
from tests.helpers.fake_hub import FakeHub, Fault, Repository
from tests.helpers.waiting import eventually
from trtllm_pipeline.base.errors import DownloadError, FailureClass, StageError
from trtllm_pipeline.models.hub import hub_errors, transfer
from trtllm_pipeline.models.hub.peek import quantized
from trtllm_pipeline.models.hub.sources import code_of, fetch, resolve
from trtllm_pipeline.tensorrt.stage.base import PROGRESS_FILE
from trtllm_pipeline.tensorrt.stage.download import run
from trtllm_pipeline.tensorrt.stage.params import DownloadParams
from trtllm_pipeline.tensorrt.worker import run_program

MODEL = "org/tiny"
BIG = "model-00001-of-00002.safetensors"


def safetensors(tensors: dict[str, bytes]) -> bytes:
    header, position = {}, 0
    for name, content in tensors.items():
        end = position + len(content)
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def model_files(size: int = 3_000_000) -> dict[str, bytes]:
    noise = random.Random(0).randbytes
    shards = {BIG: {"a": noise(size)}, "model-00002-of-00002.safetensors": {"b": noise(20_000), "c": noise(10)}}
    placed = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    return {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "tokenizer.json": json.dumps({"vocab": list(range(3000))}).encode(),
        "tokenizer_config.json": b"{}",
        "LICENSE": b"Apache License",
        "README.md": b"# tiny",
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": placed}).encode(),
        **{name: safetensors(tensors) for name, tensors in shards.items()},
        "consolidated.safetensors": b"the same again",
        "pytorch_model.bin": b"pickle",
        "original/params.json": b"{}",
        "onnx/model.onnx": b"onnx",
        "modeling_tiny.py": b"import os",
    }


WANTED = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE",
    "model.safetensors.index.json", BIG, "model-00002-of-00002.safetensors",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token, cache or proxy of this machine; and no long waits."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "MODELSCOPE")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "ms-home"))
    monkeypatch.setattr(hub_errors, "BACKOFF_S", 0.01)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    with FakeHub({MODEL: Repository(model_files())}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
        yield hub


HUBS = pytest.mark.parametrize("kind", ["hugging_face", "modelscope"])


def get(kind: str, folder: Path, **options: object) -> Path:
    """Resolve and fetch as two stages do it; the model's directory."""
    pinned = resolve([{kind: MODEL}])
    return fetch_pinned(pinned, folder, **options)


def fetch_pinned(pinned: dict, folder: Path, **options: object) -> Path:
    out = folder / f"attempt{len(list(folder.glob('attempt*')))}"
    out.mkdir(parents=True)
    options.setdefault("progress", lambda *_: None)
    fetch(pinned, out, partial=folder / "partial", **options)  # type: ignore[arg-type]
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What is fetched


@pytest.mark.seam
@HUBS
def test_only_the_needed_files_come_and_they_are_whole(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    seen: list[tuple[float, float | None]] = []
    out = get(kind, tmp_path, progress=lambda done, total, unit: seen.append((done, total)))
    files = hub.repositories[MODEL].files
    assert contents(out) == {name: files[name] for name in WANTED}
    total = sum(len(files[name]) for name in WANTED)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert not [path for path in (tmp_path / "partial").iterdir() if path.suffix != ".lock"]


@HUBS
def test_a_model_that_somebody_else_serves_comes_without_its_weights(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    out = get(kind, tmp_path, form="tokenizer")
    files = hub.repositories[MODEL].files
    assert contents(out) == {name: files[name] for name in WANTED if "safetensors" not in name}


@HUBS
def test_code_comes_only_when_it_is_named_with_its_digest(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    files = hub.repositories[MODEL].files
    files["config.json"] = json.dumps({"model_type": "tiny", "auto_map": {"AutoConfig": "modeling_tiny.C"}}).encode()
    pinned = resolve([{kind: MODEL}])
    plain = fetch_pinned(pinned, tmp_path)
    assert not (plain / "modeling_tiny.py").exists()
    assert json.loads((plain / "config.json").read_text()) == {"model_type": "tiny"}
    code = {"modeling_tiny.py": hashlib.sha256(files["modeling_tiny.py"]).hexdigest()}
    assert code_of(pinned, folder=None) == code
    trusted = fetch_pinned({**pinned, "code": code}, tmp_path)
    assert (trusted / "modeling_tiny.py").read_bytes() == files["modeling_tiny.py"]
    assert (trusted / "config.json").read_bytes() == files["config.json"]
    with pytest.raises(DownloadError, match=r"modeling_tiny\.py from .* failed verification"):
        fetch_pinned({**pinned, "code": {"modeling_tiny.py": "0" * 64}}, tmp_path)
    with pytest.raises(
        DownloadError, match=r"has no file other\.py, which settings\.download\.trust_remote_code names"
    ):
        fetch_pinned({**pinned, "code": {"other.py": "0" * 64}}, tmp_path)


def said(kind: str) -> str | None:
    found = quantized(resolve([{kind: MODEL}]), folder=None, offline=False)
    return None if found is None else found.said


@HUBS
def test_quantized_weights_are_seen_before_anything_is_fetched(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    files = hub.repositories[MODEL].files
    assert said(kind) is None
    files["config.json"] = json.dumps({"quantization_config": {"quant_method": "fp8"}}).encode()
    assert said(kind) == "fp8 by its config.json"
    files["hf_quant_config.json"] = json.dumps({"quantization": {"quant_algo": "FP8"}}).encode()
    assert said(kind) == "FP8 by its hf_quant_config.json"
    files["config.json"] = b"[" * (1 << 21)
    files["hf_quant_config.json"] = b"{"
    assert said(kind) is None


@HUBS
def test_a_branch_is_pinned_to_its_commit_and_pinning_is_repeatable(hub: FakeHub, kind: str) -> None:
    pinned = resolve([{kind: MODEL}])
    assert pinned["revision"] == "c" * 40
    assert resolve([pinned]) == pinned == resolve([{kind: MODEL}])
    assert json.loads(json.dumps(pinned)) == pinned


def test_a_commit_alone_needs_no_network() -> None:
    source = {"hugging_face": MODEL, "revision": "a" * 40}
    assert resolve([source], offline=True) == source


def test_the_stage_program_reports_bytes(hub: FakeHub, tmp_path: Path) -> None:
    attempt = tmp_path / "work" / "fp.1"
    (attempt / "out").mkdir(parents=True)
    run(context(DownloadParams, {"source": resolve([{"hugging_face": MODEL}])}, {}, {}, attempt / "out", attempt))
    assert {path.name for path in (attempt / "out").iterdir()} == WANTED
    progress = json.loads((attempt / PROGRESS_FILE).read_text())
    assert progress["unit"] == "bytes"
    assert progress["done"] == progress["total"] > 3_000_000


def test_files_in_the_users_cache_are_not_fetched_again(hub: FakeHub, tmp_path: Path, monkeypatch) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(MODEL, endpoint=hub.url, cache_dir=tmp_path / "hf-cache", allow_patterns=list(WANTED))
    pinned = resolve([{"hugging_face": MODEL}])
    before = len(hub.requests)
    out = fetch_pinned(pinned, tmp_path)
    assert all("/api/" in path for _, path, _ in hub.requests[before:])
    assert {path.name for path in out.iterdir()} == WANTED
    assert not any(path.is_symlink() for path in out.iterdir())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = len(hub.requests)
    assert resolve([{"hugging_face": MODEL}]) == pinned
    assert contents(fetch_pinned(pinned, tmp_path)) == contents(out)
    assert len(hub.requests) == before


# Transfers that break


@HUBS
def test_a_dropped_connection_is_resumed_within_an_attempt(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    hub.faults = [Fault(f"tiny/{BIG}", "drop", after=n) for n in (1_000_000, 500_000)]
    out = get(kind, tmp_path)
    assert (out / BIG).read_bytes() == hub.repositories[MODEL].files[BIG]
    assert set(hub.ranges(BIG)) == {"bytes=1000000-", "bytes=1500000-"}


def test_what_arrives_is_hashed_on_its_way_and_only_what_an_earlier_attempt_left_is_read(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = Path.open

    def opened(path: Path, mode: str = "r", *others: object, **options: object) -> object:
        if path.name == f"{BIG}.part" and mode == "rb":
            read.append(path.stat().st_size)
        return whole(path, mode, *others, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)
    get("hugging_face", tmp_path / "straight")
    assert read == []
    hub.faults = [Fault(f"tiny/{BIG}", "drop", after=n) for n in (1_500_000, 500_000)]
    hub.faults.append(Fault(f"tiny/{BIG}", "drop", times=99))
    with pytest.raises(DownloadError):
        get("hugging_face", tmp_path / "broken")
    assert read == [], "connections of one attempt continue where the last one stopped"
    hub.faults = []
    get("hugging_face", tmp_path / "broken")
    assert read == [2_000_000]


@pytest.mark.seam
@HUBS
def test_a_transfer_that_broke_goes_on_in_the_next_attempt(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    pinned = resolve([{kind: MODEL}])
    hub.faults = [Fault(f"tiny/{BIG}", "drop", after=1_500_000), Fault(f"tiny/{BIG}", "drop", times=99)]
    with pytest.raises(DownloadError, match=r"stopped at \d+ of") as failed:
        fetch_pinned(pinned, tmp_path)
    assert failed.value.failure is FailureClass.TRANSIENT
    hub.faults = []
    hub.requests.clear()
    out = fetch_pinned(pinned, tmp_path)
    assert contents(out).keys() == WANTED
    assert set(hub.ranges(BIG)) == {"bytes=1500000-"}
    assert hub.count("tokenizer.json") == 0


def test_one_files_failure_does_not_cost_what_the_others_have(hub: FakeHub, tmp_path: Path) -> None:
    small = "model-00002-of-00002.safetensors"
    pinned = resolve([{"hugging_face": MODEL}])
    hub.faults = [
        Fault(f"tiny/{BIG}", "drop", after=1_000_000),
        Fault(f"tiny/{BIG}", "slow", delay_s=1.0),
        Fault(f"tiny/{small}", "slow", delay_s=0.3),
    ]
    hub.repositories[MODEL].listed[small] = {"sha256": "0" * 64}
    with pytest.raises(DownloadError, match="failed verification"):
        fetch_pinned(pinned, tmp_path)
    assert next((tmp_path / "partial").glob(f"*/{BIG}.part")).stat().st_size >= 1_000_000


def test_two_at_once_do_not_disturb_each_other(hub: FakeHub, tmp_path: Path) -> None:
    pinned = resolve([{"hugging_face": MODEL}])
    outs = [tmp_path / "one", tmp_path / "two"]
    hub.faults = [Fault(f"tiny/{BIG}", "slow", delay_s=0.3)]
    with ThreadPoolExecutor(2) as pool:
        for out in outs:
            out.mkdir()
            pool.submit(fetch, pinned, out, progress=lambda *_: None, partial=tmp_path / "partial")
    assert contents(outs[0]) == contents(outs[1])
    assert contents(outs[0]).keys() == WANTED


def test_a_redirect_without_end_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    location = {"Location": "/org/tiny/resolve/main/tokenizer.json"}
    hub.faults = [Fault("/tokenizer.json", status=302, headers=location, times=999)]
    with pytest.raises(DownloadError, match=r"tokenizer\.json .* stopped at .*redirect"):
        get("hugging_face", tmp_path)


def test_a_killed_process_goes_on_in_the_next_attempt(hub: FakeHub, tmp_path: Path) -> None:
    pinned = resolve([{"hugging_face": MODEL}])
    hub.faults = [Fault(f"tiny/{BIG}", "drop", after=2_000_000), Fault(f"tiny/{BIG}", "slow", delay_s=20.0)]
    (tmp_path / "killed").mkdir()
    program = (
        "import sys, json; from pathlib import Path; from trtllm_pipeline.models.hub.sources import fetch;"
        "fetch(json.loads(sys.argv[1]), Path(sys.argv[2]), progress=lambda *_: None, partial=Path(sys.argv[3]))"
    )
    arguments = [json.dumps(pinned), str(tmp_path / "killed"), str(tmp_path / "partial")]
    child = subprocess.Popen([sys.executable, "-c", program, *arguments])
    try:
        assert eventually(lambda: hub.ranges(BIG))
        child.send_signal(signal.SIGKILL)
    finally:
        child.wait()
    hub.requests.clear()
    out = fetch_pinned(pinned, tmp_path)
    assert contents(out).keys() == WANTED
    assert set(hub.ranges(BIG)) == {"bytes=2000000-"}


@pytest.mark.parametrize(("kind", "status"), [("hugging_face", 429), ("modelscope", 503)])
def test_passing_troubles_are_waited_out(hub: FakeHub, tmp_path: Path, kind: str, status: int) -> None:
    hub.faults = [Fault(f"tiny/{BIG}", status=status, headers={"Retry-After": "0.05"}, times=3)]
    assert (get(kind, tmp_path) / BIG).exists()


def test_retry_after_is_respected_and_bounded(hub: FakeHub, tmp_path: Path) -> None:
    pinned = resolve([{"hugging_face": MODEL}])
    hub.faults = [Fault(f"tiny/{BIG}", status=429, headers={"Retry-After": "0.4"})]
    started = time.monotonic()
    fetch_pinned(pinned, tmp_path)
    assert time.monotonic() - started >= 0.4
    shutil.rmtree(tmp_path / "partial")
    hub.faults = [Fault(f"tiny/{BIG}", status=429, headers={"Retry-After": "3600"})]
    with pytest.raises(DownloadError, match="is rate limiting") as failed:
        fetch_pinned(pinned, tmp_path)
    assert failed.value.failure is FailureClass.TRANSIENT
    assert "HF_TOKEN" in (failed.value.hint or "")


def test_a_server_that_stays_broken_ends_the_attempt(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault(f"tiny/{BIG}", status=503, times=999)]
    with pytest.raises(DownloadError, match="HTTP 503") as failed:
        get("hugging_face", tmp_path)
    assert failed.value.failure is FailureClass.TRANSIENT
    assert hub.count(f"tiny/{BIG}") == hub_errors.TRIES


def test_a_listing_that_fails_is_asked_for_again(hub: FakeHub, tmp_path: Path) -> None:
    pinned = resolve([{"hugging_face": MODEL}])
    hub.faults = [Fault("/api/models", status=502, times=2)]
    assert (fetch_pinned(pinned, tmp_path) / BIG).exists()


def test_a_server_without_ranges_sends_the_file_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault(f"tiny/{BIG}", "drop", after=1_500_000), Fault(f"tiny/{BIG}", "no_range")]
    out = get("hugging_face", tmp_path)
    assert (out / BIG).read_bytes() == hub.repositories[MODEL].files[BIG]


# Content that is not what the hub says


@HUBS
def test_a_corrupted_transfer_is_repeated_once(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    hub.faults = [Fault(f"tiny/{BIG}", "corrupt")]
    out = get(kind, tmp_path)
    assert (out / BIG).read_bytes() == hub.repositories[MODEL].files[BIG]


@pytest.mark.seam
@HUBS
@pytest.mark.parametrize("name", [BIG, "config.json"])
def test_a_wrong_digest_is_refused(hub: FakeHub, tmp_path: Path, kind: str, name: str) -> None:
    lie = {"sha256": "0" * 64, "oid": "0" * 40}
    hub.repositories[MODEL].listed[name] = lie
    with pytest.raises(DownloadError, match=f"{name} .* failed verification: sha"):
        get(kind, tmp_path)


@HUBS
@pytest.mark.parametrize("difference", [-1000, 1000])
def test_a_wrong_size_is_refused(hub: FakeHub, tmp_path: Path, kind: str, difference: int) -> None:
    hub.repositories[MODEL].listed[BIG] = {"size": len(hub.repositories[MODEL].files[BIG]) + difference}
    with pytest.raises(DownloadError, match="stopped at") as failed:
        get(kind, tmp_path)
    assert "bytes it lists" in str(failed.value) or "range from" in str(failed.value)


def test_a_truncated_answer_is_resumed(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults = [Fault(f"tiny/{BIG}", "short", after=1234)]
    assert (get("hugging_face", tmp_path) / BIG).read_bytes() == hub.repositories[MODEL].files[BIG]


def test_a_tensor_the_index_names_must_be_there(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[MODEL].files[BIG] = safetensors({"other": bytes(5000)})
    with pytest.raises(DownloadError, match="the index places a in it"):
        get("hugging_face", tmp_path)


def test_pickles_alone_are_refused(hub: FakeHub, tmp_path: Path) -> None:
    files = hub.repositories[MODEL].files
    for name in [name for name in files if "safetensors" in name]:
        del files[name]
    with pytest.raises(DownloadError, match=r"only \.bin, \.onnx files") as failed:
        get("hugging_face", tmp_path)
    assert failed.value.failure is FailureClass.USER
    assert hub.count("pytorch_model.bin") == 0


@HUBS
@pytest.mark.parametrize("name", ["../../etc/config.json", "/etc/config.json"])
def test_a_name_that_leaves_the_folder_is_refused(hub: FakeHub, tmp_path: Path, kind: str, name: str) -> None:
    hub.repositories[MODEL].extra = (name,)
    with pytest.raises(DownloadError, match="outside the model's directory"):
        get(kind, tmp_path)
    assert not (tmp_path / "partial").exists() or not list((tmp_path / "partial").rglob("*.json"))


def test_modelscope_content_that_moved_is_noticed(hub: FakeHub, tmp_path: Path) -> None:
    pinned = resolve([{"modelscope": MODEL}])
    hub.repositories[MODEL].files["config.json"] = b'{"model_type": "qwen2"}'
    with pytest.raises(DownloadError, match="has changed on ModelScope"):
        fetch_pinned(pinned, tmp_path)


# Refusals


def test_a_gated_model_without_token(hub: FakeHub) -> None:
    hub.repositories[MODEL].gated = True
    with pytest.raises(DownloadError, match="gated on Hugging Face") as failed:
        resolve([{"hugging_face": MODEL}, {"modelscope": MODEL}])
    assert failed.value.failure is FailureClass.USER
    assert "huggingface.co/org/tiny" in (failed.value.hint or "")


def test_a_gated_model_at_a_pinned_commit_is_noticed_when_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[MODEL].gated = True
    with pytest.raises(DownloadError, match="gated on Hugging Face"):
        fetch_pinned({"hugging_face": MODEL, "revision": "c" * 40}, tmp_path)


@HUBS
def test_a_gated_model_with_a_token_that_may(hub: FakeHub, tmp_path: Path, kind: str, monkeypatch, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    hub.repositories[MODEL].gated = True
    monkeypatch.setenv("HF_TOKEN", "good")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "good")
    out = get(kind, tmp_path)
    assert (out / BIG).exists()
    sent = [(path, headers) for _, path, headers in hub.requests if "authorization" in headers or "cookie" in headers]
    assert sent
    assert not [path for path, _ in sent if path.startswith(f"/{MODEL}/model")], "the token went to the CDN"
    assert "Bearer good" not in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"Bearer" in path.read_bytes()]


@HUBS
def test_a_gated_model_with_a_strangers_token(hub: FakeHub, kind: str, monkeypatch) -> None:
    hub.repositories[MODEL].gated = True
    monkeypatch.setenv("HF_TOKEN", "stranger")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "stranger")
    with pytest.raises(DownloadError, match=r"gated|refuses access") as failed:
        resolve([{kind: MODEL}])
    assert failed.value.failure is FailureClass.USER


@HUBS
def test_a_bad_token(hub: FakeHub, kind: str, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "hf_expired")
    with pytest.raises(DownloadError, match="does not accept the token") as failed:
        resolve([{kind: MODEL}])
    assert failed.value.failure is FailureClass.USER
    assert "hf_expired" not in str(failed.value)


@HUBS
@pytest.mark.parametrize("token", [None, "good"])
def test_a_missing_model(hub: FakeHub, kind: str, token: str | None, monkeypatch) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", token)
    with pytest.raises(DownloadError, match="does not have it, or it is private") as failed:
        resolve([{kind: "org/absent"}])
    assert failed.value.failure is FailureClass.USER


def test_a_missing_revision(hub: FakeHub) -> None:
    with pytest.raises(DownloadError, match="does not have this revision"):
        resolve([{"hugging_face": MODEL, "revision": "v9"}])


# Choosing


def test_nothing_reached_names_every_source(monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError) as failed:
        resolve([{"hugging_face": MODEL}, {"modelscope": MODEL}, {"local": "absent"}])
    assert failed.value.failure is FailureClass.TRANSIENT
    for words in ("Hugging Face cannot be reached", "ModelScope cannot be reached", "does not exist"):
        assert words in str(failed.value)


def test_offline_asks_nobody(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="no source"):
        resolve([{"hugging_face": MODEL}, {"modelscope": MODEL}], offline=True)
    with pytest.raises(DownloadError, match="offline mode"):
        fetch_pinned({"hugging_face": MODEL, "revision": "c" * 40}, tmp_path, offline=True)
    assert hub.requests == []


def test_a_preference_restricts_the_choice(hub: FakeHub) -> None:
    sources = [{"hugging_face": MODEL}, {"modelscope": MODEL}]
    assert "modelscope" in resolve(sources, prefer="modelscope")
    with pytest.raises(DownloadError, match="no source of kind local"):
        resolve(sources, prefer="local")


# Full disks


def test_a_model_bigger_than_the_disk_is_refused_before_it_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(DownloadError, match="does not fit on the disk") as failed:
        get("hugging_face", tmp_path)
    assert failed.value.failure is FailureClass.USER
    assert hub.count(BIG) == 0


@pytest.mark.seam
def test_a_disk_that_fills_up_meanwhile(hub: FakeHub, tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer.Transfer, "_receive", full)
    (tmp_path / "attempt/out").mkdir(parents=True)
    asked = {"source": resolve([{"hugging_face": MODEL}])}
    given = context(DownloadParams, asked, {}, {}, tmp_path / "attempt/out", tmp_path / "attempt")
    with pytest.raises(StageError, match="no space is left on the file system at") as failed:
        run_program("trtllm_pipeline.tensorrt.stage.download:run", "download", given)
    assert failed.value.failure is FailureClass.USER
    assert "--workspace" in (failed.value.hint or "")
