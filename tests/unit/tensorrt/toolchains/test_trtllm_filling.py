"""Filling TensorRT-LLM's templates: whatever a file has, with whatever value, or words why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contexts import faults
from tests.helpers.broken_repositories import write_engine, write_model
from tests.standins import templates as standin
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.base.machine.model import TensorRTLLM
from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.tensorrt.stage.params import load, table
from trtllm_pipeline.tensorrt.stage.repository_settings import DEFAULTS, SETTINGS
from trtllm_pipeline.tensorrt.trtllm import engine_backend, frontends, llmapi, templates
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository, WeightsRepository

RELEASE = "0.16.0"


class Installed:
    """A release with templates, an engine and a model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = write_engine(folder / "engine", RELEASE)
        self.model = write_model(folder / "model")

    def fill(self, release: str = RELEASE, **params: Any) -> dict[str, Any]:
        out = self.folder / "out"
        out.mkdir()
        config = self.engine / "config.json"
        config.write_text(config.read_text().replace(RELEASE, release))
        installed = TensorRTLLM(release, templates=str(standin.install(self.folder, release)))
        asked = load(EngineRepository, {"max_batch_size": 4, **params})
        frontends.write_engine(out, installed, engine=self.engine, model=self.model, params=asked)
        return {path.parent.name: model_config.read(path) for path in out.glob("*/config.pbtxt")}

    def fill_llmapi(self, **params: Any) -> tuple[dict[str, Any], Any]:
        out = self.folder / "out"
        out.mkdir()
        installed = TensorRTLLM("1.2.0", templates=str(standin.install(self.folder, "1.2.0")))
        asked = load(WeightsRepository, {"max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 512, **params})
        frontends.write_llmapi(out, installed, model=self.model, params=asked)
        model = out / "tensorrt_llm"
        return yaml.safe_load((model / "1" / "model.yaml").read_text()), model_config.read(model / "config.pbtxt")


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


def strings(configs: dict[str, Any], model: str) -> dict[str, str]:
    return model_config.string_parameters(configs[model])


def test_settings_reach_their_files(installed: Installed) -> None:
    configs = installed.fill(
        decoupled=False,
        preprocessing_instances=2,
        postprocessing_instances=3,
        bls_instances=4,
        kv_cache_free_gpu_mem_fraction=0.5,
        max_tokens_in_paged_kv_cache=4096,
        max_attention_window_size=[64, 128],
        batch_scheduler_policy="max_utilization",
        exclude_input_in_output=False,
        accumulate_tokens=True,
        max_queue_delay_microseconds=100,
        max_queue_size=16,
        gpu_device_ids=[1, 0],
        skip_special_tokens=False,
        encoder_input_features_data_type="TYPE_BF16",
    )
    engine = configs["tensorrt_llm"]
    assert strings(configs, "tensorrt_llm") == {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "batch_scheduler_policy": "max_utilization",
        "enable_kv_cache_reuse": "false",
        "exclude_input_in_output": "false",
        "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
        "gpt_model_path": str(installed.engine),
        "gpt_model_type": "inflight_fused_batching",
        "gpu_device_ids": "1,0",
        "kv_cache_free_gpu_mem_fraction": "0.5",
        "max_attention_window_size": "64,128",
        "max_beam_width": "1",
        "max_tokens_in_paged_kv_cache": "4096",
    }
    assert engine.backend == "tensorrtllm"
    assert not engine.model_transaction_policy.decoupled
    assert not configs["tensorrt_llm_bls"].model_transaction_policy.decoupled
    assert engine.dynamic_batching.max_queue_delay_microseconds == 100
    assert engine.dynamic_batching.default_queue_policy.max_queue_size == 16
    assert list(engine.dynamic_batching.preferred_batch_size) == [4]
    kinds = {tensor.name: model_config.data_type_name(tensor.data_type) for tensor in engine.input}
    assert kinds["encoder_input_features"] == "TYPE_BF16"
    counts = {name: config.instance_group[0].count for name, config in configs.items() if config.instance_group}
    assert counts == {"preprocessing": 2, "postprocessing": 3, "tensorrt_llm_bls": 4, "tensorrt_llm": 1}
    assert strings(configs, "tensorrt_llm_bls")["accumulate_tokens"] == "true"
    assert strings(configs, "postprocessing")["skip_special_tokens"] == "false"


def test_what_nobody_set_is_absent_or_empty_as_its_reader_needs(installed: Installed) -> None:
    """A C++ backend takes "" for a false; preprocessing reads visual_model_path without asking whether it is there."""
    configs = installed.fill()
    assert "kv_cache_onboard_blocks" not in configs["tensorrt_llm"].parameters
    assert "multi_block_mode" not in configs["tensorrt_llm"].parameters
    assert strings(configs, "preprocessing")["visual_model_path"] == ""
    assert "tensorrt_llm_draft_model_name" not in configs["tensorrt_llm_bls"].parameters


@pytest.mark.parametrize("release", ["0.8.0", "0.10.0", RELEASE, "1.2.0"])
@pytest.mark.parametrize(("said", "written"), [(None, "true"), (True, "true"), (False, "false")])
def test_special_tokens_are_added_by_default(
    installed: Installed, release: str, said: bool | None, written: str
) -> None:
    """The template of 0.8 has the value False in the file."""
    configs = installed.fill(release, add_special_tokens=said)
    assert strings(configs, "preprocessing")["add_special_tokens"] == written


def test_parameters_read_without_asking_stay_in_newer_releases(installed: Installed) -> None:
    configs = installed.fill("0.19.0")
    assert strings(configs, "tensorrt_llm")["guided_decoding_backend"] == ""
    assert strings(configs, "tensorrt_llm")["xgrammar_tokenizer_info_path"] == ""
    assert strings(configs, "preprocessing")["multimodal_model_path"] == ""


@pytest.mark.parametrize(("said", "word"), [("float16", "TYPE_FP16"), ("bfloat16", "TYPE_BF16"), (None, "TYPE_FP32")])
def test_logits_have_the_engines_type_in_all_models(installed: Installed, said: str | None, word: str) -> None:
    path = installed.engine / "config.json"
    config = json.loads(path.read_text())
    config["pretrained_config"]["logits_dtype"] = said
    path.write_text(json.dumps(config))
    configs = installed.fill("0.18.0")
    for name in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble"):
        kinds = {tensor.name: model_config.data_type_name(tensor.data_type) for tensor in configs[name].output}
        assert kinds["context_logits"] == kinds["generation_logits"] == word


@pytest.mark.parametrize("name", ["a, b:c", 'say "hi"', "back\\slash", "# no comment", "Größe", "it's"])
def test_any_path_is_safe(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    installed = Installed(folder)
    configs = installed.fill()
    assert strings(configs, "tensorrt_llm")["gpt_model_path"] == str(installed.engine)
    assert strings(configs, "preprocessing")["tokenizer_dir"] == str(installed.model)


def test_engines_are_named_and_never_copied(installed: Installed) -> None:
    installed.fill()
    assert not list((installed.folder / "out").rglob("*.engine"))


def test_placeholders_that_only_the_release_knows(installed: Installed) -> None:
    root = standin.install(installed.folder, RELEASE)
    path = root / templates.TEMPLATE_SET / "tensorrt_llm" / "config.pbtxt"
    path.write_text(
        path.read_text().replace("max_batch_size: ${triton_max_batch_size}", "max_batch_size: ${new_number}")
        + 'parameters { key: "new_switch" value { string_value: "${new_switch}" } }\n'
    )
    values = {"triton_backend": "tensorrtllm", "decoupled_mode": "true", "triton_max_batch_size": "4"}
    values |= {"max_queue_delay_microseconds": "0", "max_queue_size": "0"}
    values |= {"encoder_input_features_data_type": "TYPE_FP16"}
    with pytest.raises(
        StageError, match=r"config.pbtxt:\d+: no value for \$\{new_number\}, which .* 9.9 needs"
    ) as error:
        templates.fill_text(path.read_text(), values, path=path, release="9.9")
    assert error.value.hint == "settings.repository.parameters: {new_number: VALUE}"
    filled = templates.fill_text(path.read_text(), {**values, "new_number": "7"}, path=path, release="9.9")
    assert filled.max_batch_size == 7
    assert "new_switch" not in filled.parameters
    with pytest.raises(StageError, match="must be a number or a word, not '7 }'"):
        templates.fill_text(path.read_text(), {**values, "new_number": "7 }"}, path=path, release="9.9")
    with pytest.raises(StageError, match="Couldn't parse integer: four, after filling"):
        templates.fill_text(path.read_text(), {**values, "new_number": "four"}, path=path, release="9.9")


def test_parameters_fill_other_placeholders(installed: Installed) -> None:
    template = standin.install(installed.folder, RELEASE) / templates.TEMPLATE_SET / "postprocessing" / "config.pbtxt"
    text = template.read_text() + 'parameters { key: "strip" value { string_value: "${strip}" } }\n'
    values = {"triton_max_batch_size": "1", "postprocessing_instance_count": "1", "strip": "a\nb"}
    filled = templates.fill_text(text, values, path=template, release=RELEASE)
    assert filled.parameters["strip"].string_value == "a\nb"


@pytest.mark.parametrize(
    ("release", "params", "words"),
    [
        ("0.8.0", {"max_queue_size": 4}, "settings.repository.max_queue_size: no template of TensorRT-LLM 0.8.0 has"),
        ("0.8.0", {"decoding_mode": "top_k"}, r"known to have it from 0.10.0 on"),
        ("0.16.0", {"tokenizer_type": "llama"}, r"known to have it up to 0.8.0"),
        ("0.16.0", {"parameters": {"moon_phase": 1}}, "settings.repository.parameters.moon_phase: no template"),
        ("0.16.0", {"parameters": {"decoupled_mode": "x"}}, "decoupled_mode: use settings.repository.decoupled"),
        ("0.16.0", {"max_batch_size": 9}, "max_batch_size is 9; expected 1 to 8, the engine's max_batch_size"),
        ("0.16.0", {"max_beam_width": 2}, "TRT405 beam-width: max_beam_width is 2, but the engine's is 1"),
        ("0.16.0", {"max_tokens_in_paged_kv_cache": 64}, "TRT408 kv-tokens"),
    ],
)
def test_refused_with_words(installed: Installed, release: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(StageError, match=words) as error:
        installed.fill(release, **params)
    assert error.value.failure in {FailureClass.USER, FailureClass.INFEASIBLE}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"parameters": {"x": [1]}}, "parameters.x: "),
        ({"parameters": "x"}, "parameters: must be a mapping of keys to values"),
        ({"color": "red"}, "color: unknown key"),
        ({"kv_cache_free_gpu_mem_fraction": 1.5}, "should be less than or equal to 1, not 1.5"),
        ({"kv_cache_free_gpu_mem_fraction": 0.0}, "should be greater than 0, not 0.0"),
        ({"kv_cache_free_gpu_mem_fraction": "half"}, 'should be a valid number, not "half"'),
        ({"bls_instances": 0}, "should be greater than or equal to 1, not 0"),
        ({"bls_instances": True}, "bls_instances: must be a whole number"),
        ({"decoupled": "yes"}, "decoupled: should be a valid boolean"),
        ({"batching_strategy": "inflight"}, "did you mean one of inflight_batching, inflight_fused_batching"),
        ({"gpu_device_ids": "0,1"}, "gpu_device_ids: must be a list"),
        ({"medusa_choices": 3}, "medusa_choices: must be text, not 3"),
    ],
)
def test_values_that_cannot_be_are_refused_before_anything_is_filled(params: dict[str, Any], words: str) -> None:
    assert faults(EngineRepository, max_batch_size=4) == ""
    assert words in faults(EngineRepository, max_batch_size=4, **params)


def test_without_templates(installed: Installed, tmp_path: Path) -> None:
    asked = EngineRepository(max_batch_size=4)
    with pytest.raises(StageError, match=r"all_models\) of TensorRT-LLM 0.16.0 were not found") as error:
        frontends.write_engine(
            tmp_path, TensorRTLLM(RELEASE), engine=installed.engine, model=installed.model, params=asked
        )
    assert "TENSORRT_LLM_TEMPLATES" in str(error.value.hint)
    with pytest.raises(StageError, match="has no templates for preprocessing, tensorrt_llm"):
        templates.fill(tmp_path, tmp_path / "out", {}, release=RELEASE)
    with pytest.raises(StageError, match=r"has no template llmapi: TensorRT-LLM 0.12.0 cannot serve"):
        llmapi.fill(
            tmp_path,
            tmp_path / "out",
            model=tmp_path,
            params=WeightsRepository(max_batch_size=1, max_seq_len=2, max_num_tokens=2),
            release="0.12.0",
        )


def test_a_folder_that_is_no_engine(installed: Installed, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"config.json: it is missing|did not write it"):
        frontends.write_engine(
            tmp_path,
            TensorRTLLM(RELEASE),
            engine=installed.model,
            model=installed.model,
            params=EngineRepository(max_batch_size=4),
        )


@pytest.mark.parametrize("release", ["0.10.0", "0.16.0", "0.20.0"])
def test_what_stands_in_config_pbtxt_itself(installed: Installed, release: str) -> None:
    """Also what no template has a place for."""
    configs = installed.fill(
        release,
        max_batch_size=3,
        preferred_batch_size=[1, 2],
        instance_kinds={"preprocessing": "KIND_GPU", "tensorrt_llm": "KIND_MODEL"},
        triton_parameters={
            "tensorrt_llm": {"of_mine": True, "FORCE_CPU_ONLY_INPUT_TENSORS": "yes"},
            "postprocessing": {"threads": 4},
            "ensemble": {"note": "x"},
        },
    )
    assert {config.max_batch_size for config in configs.values()} == {3}
    assert list(configs["tensorrt_llm"].dynamic_batching.preferred_batch_size) == [1, 2]
    kinds = {name: [group.Kind.Name(group.kind) for group in config.instance_group] for name, config in configs.items()}
    assert kinds["preprocessing"] == ["KIND_GPU"]
    assert kinds["tensorrt_llm"] == ["KIND_MODEL"]
    assert kinds["postprocessing"] == ["KIND_CPU"]
    engine = strings(configs, "tensorrt_llm")
    assert (engine["of_mine"], engine["FORCE_CPU_ONLY_INPUT_TENSORS"]) == ("true", "yes")
    assert strings(configs, "postprocessing")["threads"] == "4"
    assert strings(configs, "ensemble") == {"note": "x"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"triton_parameters": {"tensorrt_llm": {"max_beam_width": 2}}}, "use settings.repository.max_beam_width"),
        (
            {"triton_parameters": {"tensorrt_llm": {"gpt_model_type": "V1"}}},
            "use settings.repository.batching_strategy",
        ),
        ({"triton_parameters": {"tensorrt_llm": {"gpt_model_path": "/x"}}}, "it follows from the engine and model"),
        ({"triton_parameters": {"preprocessing": {"tokenizer_dir": "/x"}}}, "it follows from the engine and model"),
        (
            {"triton_parameters": {"tensorrtllm": {"x": 1}}},
            "unknown model tensorrtllm; the models are preprocessing",
        ),
        ({"preferred_batch_size": [8]}, "preferred_batch_size: 8 is more than Triton's max_batch_size, 4"),
        ({"instance_kinds": {"ensemble": "KIND_CPU"}}, "ensemble has no instances; preprocessing, tensorrt_llm, p"),
    ],
)
def test_what_cannot_be_changed_in_config_pbtxt(installed: Installed, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(StageError, match=said):
        installed.fill(**asked)


def test_a_parameter_that_a_release_lacks_a_setting_for_is_added(installed: Installed) -> None:
    assert not templates.known_in(SETTINGS["cuda_graph_mode"], "0.12.0")
    configs = installed.fill("0.12.0", triton_parameters={"tensorrt_llm": {"cuda_graph_mode": True}})
    assert strings(configs, "tensorrt_llm")["cuda_graph_mode"] == "true"


def test_every_setting_is_an_option_of_the_stage() -> None:
    own = {each.name for each in table(engine_backend.REPOSITORY.params)}
    config = {"triton_parameters", "preferred_batch_size", "instance_kinds"}
    assert own == {"frontend", "options", "max_batch_size", "parameters", *config, *SETTINGS}
    assert len(SETTINGS) > 60
    assert {templates.text(value) for value in DEFAULTS.values()} >= {"true", "false", "1", "guaranteed_no_evict"}


def test_llmapi_settings(installed: Installed) -> None:
    settings, config = installed.fill_llmapi(
        tensor_parallel_size=2,
        decoupled=False,
        kv_cache_free_gpu_mem_fraction=0.7,
        enable_kv_cache_reuse=True,
        enable_chunked_context=True,
        max_num_tokens=None,
        llm_args={"kv_cache_config": {"dtype": "fp8"}, "enable_attention_dp": True},
    )
    assert settings == {
        "model": str(installed.model),
        "backend": "pytorch",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "max_batch_size": 4,
        "max_seq_len": 128,
        "max_num_tokens": 512,
        "enable_chunked_prefill": True,
        "enable_attention_dp": True,
        "kv_cache_config": {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.7, "dtype": "fp8"},
        "triton_config": {"max_batch_size": 0, "decoupled": False},
    }
    assert config.max_batch_size == 0
    assert not config.model_transaction_policy.decoupled


def test_llmapi_refuses_what_cannot_be(installed: Installed) -> None:
    with pytest.raises(StageError, match="TRT605 yaml-fraction"):
        installed.fill_llmapi(kv_cache_free_gpu_mem_fraction=7)


def test_an_engine_of_another_release_fails_the_stage(installed: Installed) -> None:
    out = installed.folder / "out"
    out.mkdir()
    newer = TensorRTLLM("0.18.0", templates=str(standin.install(installed.folder, "0.18.0")))
    with pytest.raises(StageError, match=r"TRT407 engine-release: .* was built by 0.16.0, but 0.18.0 will serve it"):
        frontends.write_engine(
            out, newer, engine=installed.engine, model=installed.model, params=EngineRepository(max_batch_size=4)
        )
