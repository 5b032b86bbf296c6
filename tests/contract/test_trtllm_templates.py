"""Templates of every recorded release, with exactly their placeholders and tensors, filled, parsed and linted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.version import Version

from tests.helpers.broken_repositories import write_engine, write_model
from tests.standins import templates as standin
from trtllm_pipeline.base.machine.model import TensorRTLLM
from trtllm_pipeline.models.triton_repository import lint, model_config
from trtllm_pipeline.tensorrt.stage.repository_settings import SETTINGS
from trtllm_pipeline.tensorrt.trtllm import frontends, llmapi, templates
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository, WeightsRepository

OWN_FAULTS = {"0.19.0": {"TRT210"}, "0.20.0": {"TRT210"}, "1.1.0rc6": {"TRT210"}}
"""The ensemble of 0.19 declares one output twice, the same both times; Triton loads it. Later ones are assumed equal."""


def recorded_placeholders(facts: dict[str, Any]) -> set[str]:
    return {part.split("}")[0] for part in json.dumps(facts).split("${")[1:]}


@pytest.mark.parametrize("release", standin.releases())
def test_the_stand_in_has_what_was_recorded(tmp_path: Path, release: str) -> None:
    root = standin.install(tmp_path, release)
    for name in standin.MODELS:
        facts = standin.model(release, name)
        text = (root / standin.ENGINE_SET / name / "config.pbtxt").read_text()
        found = list(model_config.placeholders(text))
        assert {place.name for place in found} == recorded_placeholders(facts)
        filled = model_config.parse(model_config.substitute(text, _any_value))
        for kind, table in (("inputs", filled.input), ("outputs", filled.output)):
            assert [tensor.name for tensor in table] == standin.names(facts[kind])
            for tensor, said in zip(table, facts[kind], strict=True):
                _, _, dims, *marks = said.split()
                assert list(tensor.dims) == json.loads(dims)
                assert getattr(tensor, "optional", False) == ("optional" in marks)
        assert model_config.string_parameters(filled).keys() == facts.get("parameters", {}).keys()


def _any_value(place: model_config.Placeholder) -> str:
    if place.name.endswith(("datatype", "data_type")):
        return "TYPE_FP32"
    return "x" if place.quoted else "true" if place.name == "decoupled_mode" else "1"


@pytest.mark.parametrize("release", standin.releases())
def test_filled_parsed_and_clean(tmp_path: Path, release: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    engine, model = write_engine(tmp_path / "engine", release), write_model(tmp_path / 'a "model", v1:2')
    installed = TensorRTLLM(release, templates=str(standin.install(tmp_path, release)))
    frontends.write_engine(out, installed, engine=engine, model=model, params=EngineRepository(max_batch_size=8))
    assert {path.name for path in out.iterdir()} == set(templates.MODELS)
    for name in templates.MODELS:
        text = (out / name / "config.pbtxt").read_text()
        assert "${" not in text
        config = model_config.parse(text)
        assert config.max_batch_size == 8
        facts = standin.model(release, name)
        assert [tensor.name for tensor in config.input] == standin.names(facts["inputs"])
        assert {str(path.relative_to(out / name)) for path in out.glob(f"{name}/1/**/*") if path.is_file()} >= set(
            facts["files"]
        )
        if name in {"preprocessing", "postprocessing"}:
            assert model_config.string_parameters(config)["tokenizer_dir"] == str(model)
    # Read by the C++ backend without asking whether they are there.
    engine_parameters = model_config.string_parameters(model_config.read(out / "tensorrt_llm" / "config.pbtxt"))
    unguarded = {"gpt_model_type", "gpt_model_path"}
    if Version(release) >= Version("0.19"):
        unguarded |= {"tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"}
    assert unguarded <= engine_parameters.keys()
    assert {found.rule for found in lint.lint(out, release=release)} == OWN_FAULTS.get(release, set())
    assert not [path for path in out.rglob("*") if path.is_symlink() or path.suffix in {".engine", ".safetensors"}]


DOCUMENTED: Final = {
    # what the backend's README fills, by the template's model
    "preprocessing": (
        *("tokenizer_dir", "triton_max_batch_size", "preprocessing_instance_count"),
        *("max_queue_delay_microseconds", "max_queue_size"),
    ),
    "postprocessing": ("tokenizer_dir", "triton_max_batch_size", "postprocessing_instance_count"),
    "tensorrt_llm_bls": ("triton_max_batch_size", "decoupled_mode", "bls_instance_count", "logits_datatype"),
    "ensemble": ("triton_max_batch_size", "logits_datatype"),
    "tensorrt_llm": (
        *("triton_backend", "triton_max_batch_size", "decoupled_mode", "engine_dir", "max_queue_delay_microseconds"),
        *("batching_strategy", "max_queue_size", "encoder_input_features_data_type", "logits_datatype"),
    ),
}


@pytest.mark.parametrize("release", ["0.10.0", "0.16.0", "0.18.2", "0.19.0", "0.20.0"])
def test_nothing_is_wrong_with_the_filling_that_upstream_documents(tmp_path: Path, release: str) -> None:
    engine, model = write_engine(tmp_path / "engine", release), write_model(tmp_path / "model")
    values = {
        "tokenizer_dir": str(model),
        "engine_dir": str(engine),
        "triton_max_batch_size": "8",
        "decoupled_mode": "true",
        "triton_backend": "tensorrtllm",
        "batching_strategy": "inflight_fused_batching",
        "encoder_input_features_data_type": "TYPE_FP16",
        "logits_datatype": "TYPE_FP32",
        "max_queue_delay_microseconds": "0",
        "max_queue_size": "0",
        **{f"{name}_instance_count": "1" for name in ("preprocessing", "postprocessing", "bls")},
    }
    root, left = standin.install(tmp_path, release) / standin.ENGINE_SET, 0
    for name, filled in DOCUMENTED.items():
        path = root / name / "config.pbtxt"
        text = path.read_text()
        for placeholder in filled:
            text = text.replace(f"${{{placeholder}}}", values[placeholder])
        path.write_text(text)
        left += len({place.name for place in model_config.placeholders(text)})
    assert left > 20
    assert {found.rule for found in lint.lint(root, release=release)} <= OWN_FAULTS.get(release, set())


@pytest.mark.parametrize("release", ["0.19.0", "1.1.0rc6"])
def test_llmapi_filled_and_clean(tmp_path: Path, release: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    installed = TensorRTLLM(release, templates=str(standin.install(tmp_path, release)))
    asked = WeightsRepository(max_batch_size=8, max_seq_len=4096, max_num_tokens=8192, tensor_parallel_size=2)
    frontends.write_llmapi(out, installed, model=write_model(tmp_path / "model"), params=asked)
    assert lint.lint(out, release=release) == []
    facts = standin.model(release, llmapi.MODEL, llmapi.TEMPLATE_SET)
    config = model_config.read(out / llmapi.MODEL / "config.pbtxt")
    assert [tensor.name for tensor in config.input] == standin.names(facts["inputs"])
    assert {path.name for path in (out / llmapi.MODEL / "1").iterdir()} >= {"model.py", "helpers.py", "model.yaml"}


def test_settings_say_rightly_which_releases_have_them() -> None:
    """`since` and `until` are the recorded releases that first and last had the placeholder as more than a comment."""
    seen: dict[str, list[str]] = {}
    for release in standin.releases():
        for name in standin.MODELS:
            facts = {**standin.model(release, name), "placeholders_in_comments": ()}
            written_out = {templates.WRITTEN_OUT} & facts.get("parameters", {}).keys()
            for placeholder in {*recorded_placeholders(facts), *written_out}:
                seen.setdefault(placeholder, []).append(release)
    assert seen.keys() == set(templates.PLACEHOLDERS.values()) | set(templates.FIXED)
    for name, setting in SETTINGS.items():
        first, last = seen[templates.PLACEHOLDERS[name]][0], seen[templates.PLACEHOLDERS[name]][-1]
        assert setting.since == (None if first == standin.releases()[0] else first), name
        assert setting.until == (None if last == standin.releases()[-1] else last), name


def test_recorded_releases_are_in_order() -> None:
    assert list(standin.releases()) == sorted(standin.releases(), key=Version)
    assert standin.nearest("0.9.0") == "0.8.0"
    assert standin.nearest("1.0.0") == "0.20.0"
    assert standin.nearest("1.2.1") == "1.1.0rc6"
    with pytest.raises(ValueError, match="no templates llmapi"):
        standin.nearest("0.18.0", standin.LLMAPI_SET)


def test_settings_have_the_placeholders_of_every_release_that_was_recorded() -> None:
    record = json.loads((Path(__file__).parents[1] / "data/tensorrt_llm/recorded.json").read_text())
    for entry in record["templates"]:
        places = {name for names in entry["placeholders"].values() for name in names}
        assert templates.recorded_places(entry["release"]) | {*templates.FIXED} == places, entry["label"]
