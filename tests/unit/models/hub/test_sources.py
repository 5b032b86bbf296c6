from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from trtllm_pipeline.base.errors import DownloadError
from trtllm_pipeline.models.files import model_files
from trtllm_pipeline.models.hub import hub_errors, hugging_face, local, modelscope, peek
from trtllm_pipeline.models.hub.files import described
from trtllm_pipeline.models.hub.sources import code_of, fetch, kind_of, local_folder, resolve
from trtllm_pipeline.orchestrate.store.store import Store

PACKAGE = {"package_index": "model-in-a-wheel==1.0", "sha256": "0" * 64, "member": "model.gguf"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    (folder / "notes.txt").write_text("not part of the model")
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_sources_that_name_their_content_are_pinned_as_they_are() -> None:
    assert resolve([PACKAGE]) == PACKAGE
    assert resolve([{"generated": "llama"}]) == {"generated": "llama", "seed": 0}
    assert kind_of(PACKAGE) == "package_index"


def test_hubs_without_an_answer_are_asked_once_and_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def silent(hub: hub_errors.Hub) -> Callable[..., NoReturn]:
        def pin(model: str, *_: object, **__: object) -> NoReturn:
            asked.append(hub.name)
            raise hub_errors.unreachable(hub, model, "https://hub", OSError("Name or service not known"))

        return pin

    monkeypatch.setattr(hugging_face, "pin", silent(hub_errors.HUGGING_FACE))
    monkeypatch.setattr(modelscope, "pin", silent(hub_errors.MODELSCOPE))
    unreached: dict[str, hub_errors.UnavailableError] = {}
    for name in ("one", "two"):
        sources = [{"hugging_face": f"org/{name}"}, {"modelscope": f"org/{name}"}, PACKAGE]
        assert resolve(sources, unreached=unreached) == PACKAGE
    assert asked == ["Hugging Face", "ModelScope"]
    used = f"using package index {PACKAGE['package_index']} instead"
    assert [record.message for record in caplog.records] == [
        f"Hugging Face and ModelScope cannot be reached; {used}"
    ] * 2


def test_a_local_folder_is_pinned_by_content_alone(folder: Path, tmp_path: Path) -> None:
    pinned = resolve([{"local": "mine"}], base_dir=tmp_path)
    (folder / "notes.txt").write_text("changed")
    folder.rename(tmp_path / "elsewhere")
    digest = Store(tmp_path / "w").index.digest
    assert resolve([{"local": "elsewhere"}], base_dir=tmp_path, digest=digest) == pinned
    (tmp_path / "elsewhere" / "config.json").write_text('{"a": 1}')
    assert resolve([{"local": "elsewhere"}], base_dir=tmp_path) != pinned
    assert local_folder([{"generated": "llama"}, {"local": "mine"}, {"local": "elsewhere"}], tmp_path) == (
        tmp_path / "elsewhere"
    )
    assert local_folder([PACKAGE], tmp_path) is None


def test_local_files_are_taken_and_later_edits_do_not_reach_them(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_COPIED_BYTES", 50)  # so that the weights are shared
    pinned = resolve([{"local": str(folder)}])
    fetch(pinned, out, progress=lambda *_: None, folder=folder)
    assert {path.name for path in out.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    (folder / "config.json").write_text('{"edited": true}')
    assert (out / "config.json").read_text() == "{}"
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_local_folder_that_changed_after_planning_is_refused(folder: Path, out: Path) -> None:
    pinned = resolve([{"local": str(folder)}])
    (folder / "config.json").write_text('{"edited": true}')
    with pytest.raises(DownloadError, match="it changed after it was planned"):
        fetch(pinned, out, progress=lambda *_: None, folder=folder)


def test_a_local_folder_of_links_becomes_files(folder: Path, tmp_path: Path, out: Path) -> None:
    repository = tmp_path / "models--org--name"
    linked, blobs = repository / "snapshots" / "abc", repository / "blobs"
    linked.mkdir(parents=True)
    folder.rename(blobs)
    for path in blobs.iterdir():
        (linked / path.name).symlink_to(Path("../../blobs", path.name))
    fetch(resolve([{"local": str(linked)}]), out, progress=lambda *_: None, folder=linked)
    assert not any(path.is_symlink() for path in out.iterdir())


CODE = b"class Config: pass"
BRINGS_CODE = {"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}


def with_code(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(BRINGS_CODE))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["a.B", None]}, "x": 1}))
    (folder / "configuration_phi3.py").write_bytes(CODE)
    return folder


def test_the_code_of_a_folder_is_what_python_files_lie_beside_its_weights(folder: Path) -> None:
    (folder / "tools").mkdir()
    (folder / "tools" / "more.py").write_bytes(CODE)
    (folder / "-c.py").write_bytes(CODE)
    assert code_of({"local": "x"}, folder=with_code(folder)) == {
        "configuration_phi3.py": hashlib.sha256(CODE).hexdigest()
    }


def test_code_is_taken_when_it_is_named_with_its_digest(folder: Path, out: Path) -> None:
    pinned = resolve([{"local": str(with_code(folder))}])
    trusted = {**pinned, "code": {"configuration_phi3.py": hashlib.sha256(CODE).hexdigest()}}
    fetch(trusted, out, progress=lambda *_: None, folder=folder)
    assert (out / "configuration_phi3.py").read_bytes() == CODE
    assert json.loads((out / "config.json").read_text()) == BRINGS_CODE


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ({"configuration_phi3.py": "0" * 64}, "is not the trusted code"),
        (
            {"modeling_phi3.py": "0" * 64},
            "has no file modeling_phi3.py, which settings.download.trust_remote_code names",
        ),
    ],
)
def test_other_code_than_was_read_is_refused(folder: Path, out: Path, code: dict[str, str], said: str) -> None:
    pinned = resolve([{"local": str(with_code(folder))}])
    with pytest.raises(DownloadError, match=said):
        fetch({**pinned, "code": code}, out, progress=lambda *_: None, folder=folder)


def test_a_link_by_the_name_of_code_is_not_followed_out_of_the_folder(folder: Path, tmp_path: Path, out: Path) -> None:
    (tmp_path / "secret").write_bytes(CODE)
    with_code(folder)
    (folder / "configuration_phi3.py").unlink()
    (folder / "configuration_phi3.py").symlink_to(tmp_path / "secret")
    source = {**resolve([{"local": str(folder)}]), "code": {"configuration_phi3.py": hashlib.sha256(CODE).hexdigest()}}
    with pytest.raises(DownloadError, match="outside the model's directory"):
        fetch(source, out, progress=lambda *_: None, folder=folder)
    assert not (out / "configuration_phi3.py").exists()


def test_what_nobody_can_look_at_is_not_called_unquantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nonexistent")
    with pytest.raises(DownloadError, match="offline mode forbids requests to"):
        peek.quantized({"hugging_face": "some/model", "revision": "a" * 40}, folder=None, offline=True)


def test_without_code_nothing_in_the_folder_asks_for_it(folder: Path, out: Path) -> None:
    pinned = resolve([{"local": str(with_code(folder))}])
    fetch(pinned, out, progress=lambda *_: None, folder=folder)
    assert not list(out.glob("*.py"))
    assert json.loads((out / "config.json").read_text()) == {"model_type": "phi3"}
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"x": 1}
    assert json.loads((folder / "config.json").read_text()) == BRINGS_CODE, "the original stays"


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def mixed(*algorithms: str) -> dict[str, object]:
    layers = {str(number): {"quant_algo": each} for number, each in enumerate(algorithms)}
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("name", "content", "form", "said"),
    [
        ("config.json", {"quant_method": "fp8"}, "fp8 without blocks of 128 x 128", "fp8"),
        ("config.json", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", "fp8"),
        ("config.json", {"quant_method": "fbgemm_fp8"}, "fbgemm_fp8", "fbgemm_fp8"),
        ("config.json", {"quant_method": "mxfp4"}, "mxfp4", "mxfp4"),
        ("config.json", {"quant_method": "awq", "bits": 4}, "awq", "awq"),
        ("config.json", {"quant_method": "awq", "bits": 8}, "awq of 8 bits", "awq"),
        ("config.json", {"quant_method": "gptq", "bits": 4, "desc_act": False}, "gptq", "gptq"),
        ("config.json", {"quant_method": "gptq", "bits": 4, "desc_act": True}, "gptq_desc_act", "gptq"),
        ("config.json", MODELOPT, "modelopt without hf_quant_config.json", "NVFP4"),
        ("config.json", {}, "an algorithm it does not name", "an algorithm it does not name"),
        ("hf_quant_config.json", {"quant_algo": "NVFP4"}, "nvfp4", "NVFP4"),
        ("hf_quant_config.json", {"quant_algo": "FP8"}, "fp8", "FP8"),
        ("hf_quant_config.json", {"quant_algo": "fp8_pb_wo"}, "fp8_block", "fp8_pb_wo"),
        ("hf_quant_config.json", {"quant_algo": "W4A16_AWQ"}, "int4_awq", "W4A16_AWQ"),
        ("hf_quant_config.json", mixed("FP8"), "mixed", "MIXED_PRECISION"),
        ("hf_quant_config.json", mixed("FP8", "W4A16_NVFP4"), "mixed_nvfp4", "MIXED_PRECISION"),
        ("config.json", None, None, None),
    ],
)
def test_what_a_folder_says_of_its_weights(
    folder: Path, name: str, content: object, form: str | None, said: str | None
) -> None:
    section = "quantization_config" if name == "config.json" else "quantization"
    (folder / name).write_text(json.dumps({section: content}))
    found = peek.quantized({"local": "digest"}, folder=folder, offline=True)
    assert (found and found[:2]) == (None if said is None else (form, f"{said} by its {name}"))


def test_a_configuration_that_is_none_says_nothing_of_weights(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    assert peek.quantized({"local": "digest"}, folder=folder, offline=True) is None


def test_what_belongs_to_a_model() -> None:
    wanted = {
        "config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer.model",
        "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
        "qwen.tiktoken", "chat_template.jinja", "chat_template.json", "model.safetensors.index.json",
        "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
        "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md",
    }  # fmt: skip
    other = {
        "README.md", ".gitattributes", "pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors",
        "modeling_qwen.py", "training_args.bin", "original/config.json", "onnx/config.json", "model.gguf", "tf_model.h5",
        "trainer_state.json", "license/x", "sub/tokenizer.json",
    }  # fmt: skip
    assert set(described(wanted | other)) == wanted


def test_a_copy_that_breaks_off_has_not_the_name_of_a_whole_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(_source: Path, target: Path) -> None:
        target.write_bytes(b"ha")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EXDEV, "Invalid cross-device link")))
    monkeypatch.setattr(model_files, "copy", broken_off)
    with pytest.raises(OSError, match="No space left"):
        model_files.share(folder / "config.json", tmp_path / "config.json")
    assert not (tmp_path / "config.json").exists()
