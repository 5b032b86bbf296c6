"""Sizes of tensors in files of torch and of GGUF, and of what a token reads of them."""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType, GGUFWriter

from trtllm_pipeline.base.errors import DownloadError
from trtllm_pipeline.measure.load import roofline
from trtllm_pipeline.measure.load.roofline import bytes_per_token, limit
from trtllm_pipeline.models.hub.other_weights import gguf_files, gguf_header, torch_files, torch_tensors

Save = Callable[[Path, Mapping[str, tuple[str, tuple[int, ...], str]]], None]


class _Storage:
    def __init__(self, kind: type, key: str, count: int) -> None:
        self.kind, self.key, self.count = kind, key, count


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Save:
    """Writes a file as `torch.save` does of a state dict: name -> kind of storage, shape, key of the storage."""
    torch, utils = ModuleType("torch"), ModuleType("torch._utils")
    for module in (torch, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def _rebuild_tensor_v2(*_: object) -> None: ...

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    widths = {"FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2}
    for name in widths:
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    class Tensor:
        def __init__(self, storage: _Storage, shape: tuple[int, ...]) -> None:
            hooks: OrderedDict[str, Any] = OrderedDict()
            self.args = (storage, 0, shape, (1,) * len(shape), False, hooks)

        def __reduce__(self) -> tuple[Any, ...]:
            return _rebuild_tensor_v2, self.args

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", obj.kind, obj.key, "cpu", obj.count) if isinstance(obj, _Storage) else None

    def written(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> None:
        state: OrderedDict[str, Any] = OrderedDict()
        values = {}
        for name, (kind, shape, key) in tensors.items():
            count = int(np.prod(shape))
            state[name] = Tensor(_Storage(getattr(torch, kind), key, count), shape)
            values[key] = bytes(count * widths[kind])
        state._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
        Pickler(table := io.BytesIO(), protocol=2).dump(state)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", table.getvalue())
            for key, data in values.items():
                archive.writestr(f"archive/data/{key}", data)

    return written


def test_tensors_of_a_file_of_torch(tmp_path: Path, save: Save) -> None:
    save(
        tmp_path / "pytorch_model.bin",
        {
            "model.embed_tokens.weight": ("FloatStorage", (10, 4), "0"),
            "a": ("HalfStorage", (3, 4), "1"),
            "b": ("BFloat16Storage", (), "2"),
            "lm_head.weight": ("FloatStorage", (10, 4), "0"),
        },
    )
    found = torch_tensors(tmp_path, "pytorch_model.bin")
    assert {name: tuple(each) for name, each in found.items()} == {
        "model.embed_tokens.weight": (40, 160),
        "a": (12, 24),
        "b": (1, 2),
    }, "a head that is the embedding is there once"


def test_weights_of_a_folder_of_torch(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    embedding, head = ("HalfStorage", (100,), "0"), ("HalfStorage", (100,), "2")
    save(
        tmp_path / "pytorch_model-00001-of-00002.bin",
        {"model.embed_tokens.weight": embedding, "a": ("FloatStorage", (30,), "1")},
    )
    save(
        tmp_path / "pytorch_model-00002-of-00002.bin",
        {"self_attn.output.weight": ("HalfStorage", (20,), "0"), "lm_head.weight": head},
    )
    (tmp_path / "training_args.bin").write_bytes(b"anything")
    assert bytes_per_token(tmp_path) == (60 + 40 + 200, ""), (
        "32 bits are loaded as 16, of the embedding one row is read"
    )
    assert bytes_per_token(tmp_path, 8)[0] == 30 + 20 + 100
    assert bytes_per_token(tmp_path, 0)[0] is None
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: (1e9, "NVML"))
    assert limit(tmp_path).pass_s == pytest.approx(3e-7)
    save(tmp_path / "pytorch_model.bin", {"a": ("HalfStorage", (7,), "0")})
    assert torch_files(tmp_path) == ["pytorch_model.bin"]
    (tmp_path / "config.json").write_text(json.dumps({"num_local_experts": 8}))
    assert "mixture" in bytes_per_token(tmp_path)[1]


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@pytest.mark.parametrize("what", ["hostile", "old", "short", "empty"])
def test_a_file_of_torch_that_is_none_is_refused(
    tmp_path: Path, save: Save, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pytorch_model.bin"
    (tmp_path / "config.json").write_text("{}")
    if what == "old":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif what == "short":
        save(path, {"a": ("HalfStorage", (7,), "0")})
        with zipfile.ZipFile(path) as archive:
            table = archive.read("archive/data.pkl")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", table)
            archive.writestr("archive/data/0", b"too few")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"a": _Hostile()}) if what == "hostile" else b"")
    with pytest.raises(DownloadError, match=r"cannot use pytorch_model\.bin"):
        torch_tensors(tmp_path, path.name)
    found, reason = bytes_per_token(tmp_path)
    assert found is None
    assert "pytorch_model.bin" in reason
    assert capsys.readouterr().out == "", "nothing of it is run"


def gguf(path: Path, *, tied: bool = False, experts: int = 0) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0])
    writer.add_bool("general.some", True)
    if experts:
        writer.add_expert_count(experts)
    writer.add_tensor("token_embd.weight", np.zeros((100, 32), dtype=np.float16))
    writer.add_tensor("blk.0.attn_output.weight", np.zeros((32, 32), dtype=np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((64, 34), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    if not tied:
        writer.add_tensor("output.weight", np.zeros((100, 32), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_of_a_gguf_file_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf(tmp_path / "model-Q8_0.gguf")
    assert {name: each.bytes for name, each in gguf_header(path).tensors.items()} == {
        "token_embd.weight": 6400,
        "blk.0.attn_output.weight": 4096,
        "blk.0.ffn_up.weight": 64 * 34,
        "output.weight": 6400,
    }
    read = 4096 + 64 * 34 + 6400
    assert bytes_per_token(path) == bytes_per_token(tmp_path) == (read, "")
    assert bytes_per_token(tmp_path, 4)[0] == read, "its server keeps the bits that it has"
    monkeypatch.setattr(roofline, "gpu_bandwidth", lambda: (1e9, "NVML"))
    assert limit(path).pass_s == limit(tmp_path).pass_s == pytest.approx(read / 1e9)
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(b"what looks at images")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert bytes_per_token(tmp_path) == (read, "")
    gguf(path, tied=True)
    assert bytes_per_token(tmp_path) == (read, ""), "the embedding is the head"
    gguf(path, experts=8)
    assert "mixture" in bytes_per_token(tmp_path)[1]
    gguf(tmp_path / "model-Q4_0.gguf")
    found, reason = bytes_per_token(tmp_path)
    assert found is None
    assert "2 GGUF models" in reason


def test_a_gguf_model_in_parts_is_one(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"m-{number:05}-of-00002.gguf").touch()
    assert len(gguf_files(tmp_path)) == 2


def test_a_gguf_file_that_is_cut_is_not_known(tmp_path: Path) -> None:
    whole = gguf(tmp_path / "model.gguf").read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 200)):
        (tmp_path / "model.gguf").write_bytes(whole[:length])
        found, reason = bytes_per_token(tmp_path)
        assert (found is None) == (reason != "")
        if length < 400:
            assert "cannot use model.gguf" in reason
