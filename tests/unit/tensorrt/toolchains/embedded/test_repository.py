"""The Triton repository as files: what a client and Triton can rely on before any server runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contexts import context, faults
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.tensorrt.embedded import repository
from trtllm_pipeline.tensorrt.embedded.params import RepositoryEmbedded
from trtllm_pipeline.tensorrt.stage.params import table as table_of

pytest.importorskip("tritonclient.grpc")
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    build = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 128}
    (folder / "config.json").write_text(json.dumps({"build_config": build}))
    model_of(folder).mkdir()
    (model_of(folder) / "tokenizer.json").write_text("{}")
    return folder


def model_of(engine: Path) -> Path:
    """The directory with the engine's tokenizer."""
    return engine.parent / "model"


def written(tmp_path: Path, engine: Path, **params: Any) -> dict[str, Any]:
    out = tmp_path / "out"
    out.mkdir()
    inputs = {"engine": engine, "model": model_of(engine)}
    repository.run(context(RepositoryEmbedded, {"max_batch_size": 4, **params}, inputs, {}, out, tmp_path))
    return {path.parent.name: text_format.Parse(path.read_text(), ModelConfig()) for path in out.glob("*/config.pbtxt")}


def test_five_models_with_code_that_compiles(tmp_path: Path, engine: Path) -> None:
    configs = written(tmp_path, engine)
    assert set(configs) == {"preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls"}
    assert all(config.name == name and config.max_batch_size == 4 for name, config in configs.items())
    for path in (tmp_path / "out").glob("*/1/model.py"):
        compile(path.read_text(), str(path), "exec")
    assert (tmp_path / "out" / "ensemble" / "1").is_dir()


def test_settings_reach_the_models(tmp_path: Path, engine: Path) -> None:
    configs = written(
        tmp_path,
        engine,
        max_batch_size=2,
        decoupled=False,
        accumulate_tokens=True,
        preprocessing_instances=3,
        max_queue_delay_microseconds=500,
        exclude_input_in_output=False,
        enable_kv_cache_reuse=True,
    )
    values = {name: {k: v.string_value for k, v in config.parameters.items()} for name, config in configs.items()}
    assert values["tensorrt_llm"]["gpt_model_path"] == str(engine)
    assert {values[name].get("tokenizer_dir") for name in ("preprocessing", "postprocessing")} == {
        str(model_of(engine))
    }
    assert values["tensorrt_llm"]["exclude_input_in_output"] == "false"
    assert values["tensorrt_llm"]["enable_kv_cache_reuse"] == "true"
    assert values["tensorrt_llm_bls"]["accumulate_tokens"] == "true"
    assert configs["preprocessing"].instance_group[0].count == 3
    assert configs["preprocessing"].dynamic_batching.max_queue_delay_microseconds == 500
    assert not configs["tensorrt_llm"].model_transaction_policy.decoupled
    assert configs["ensemble"].max_batch_size == 2


def test_every_ensemble_tensor_has_one_source_and_its_type(tmp_path: Path, engine: Path) -> None:
    configs = written(tmp_path, engine)
    ensemble = configs["ensemble"]
    types = {tensor.name: tensor.data_type for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = configs[step.model_name]
        inputs, outputs = ({t.name: t for t in table} for table in (model.input, model.output))
        assert set(step.input_map) <= set(inputs)
        assert {name for name, tensor in inputs.items() if not tensor.optional} <= set(step.input_map)
        for name, source in step.input_map.items():
            assert types[source] == inputs[name].data_type, (step.model_name, name)
        for name, target in step.output_map.items():
            assert target not in types or target in {t.name for t in ensemble.output}
            types[target] = outputs[name].data_type
    for tensor in ensemble.output:
        assert types[tensor.name] == tensor.data_type
    consumed = {source for step in ensemble.ensemble_scheduling.step for source in step.input_map.values()}
    assert {tensor.name for tensor in ensemble.input} == consumed - {name for name in consumed if name.startswith("_")}


def test_ensemble_and_bls_have_one_interface(tmp_path: Path, engine: Path) -> None:
    configs = written(tmp_path, engine)
    for table in ("input", "output"):
        ours, theirs = (list(getattr(configs[name], table)) for name in ("ensemble", "tensorrt_llm_bls"))
        assert ours == theirs


def test_no_path_of_the_attempt_is_inside(tmp_path: Path, engine: Path) -> None:
    written(tmp_path, engine)
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or str(tmp_path / "out") not in path.read_text()


def test_a_model_without_tokenizer_is_refused(tmp_path: Path, engine: Path) -> None:
    (model_of(engine) / "tokenizer.json").unlink()
    with pytest.raises(StageError, match=r"has no tokenizer\.json"):
        written(tmp_path, engine)


def test_every_option_of_the_stage_is_used(tmp_path: Path, engine: Path) -> None:
    settings = RepositoryEmbedded(max_batch_size=4)
    for field in table_of(RepositoryEmbedded):
        value = getattr(settings, field.name)
        changed = replace(settings, **{field.name: not value if isinstance(value, bool) else 7})
        assert any(
            repository.config_text(name, engine, engine, settings)
            != repository.config_text(name, engine, engine, changed)
            for name in repository.MODELS
        ), field.name


def test_more_requests_than_the_engine_takes_are_refused(tmp_path: Path, engine: Path) -> None:
    with pytest.raises(
        StageError, match="max_batch_size is 400; expected 1 to 4, the engine's max_batch_size"
    ) as error:
        written(tmp_path, engine, max_batch_size=400)
    assert error.value.failure is FailureClass.INFEASIBLE
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("max_batch_size", -4, 1),
        ("preprocessing_instances", -1, 1),
        ("bls_instances", 0, 1),
        ("max_queue_delay_microseconds", -1, 0),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: int, least: int) -> None:
    said = faults(RepositoryEmbedded, **{"max_batch_size": 4, name: value})
    assert said == f"{name}: should be greater than or equal to {least}, not {value}"
