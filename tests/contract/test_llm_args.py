"""The LLM API's YAML files have names that the release takes: what the package writes against `tests/data/tensorrt_llm/llm_args.json`."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.trtllm_cells import PYTORCH, cell, infeasible, machine
from tests.standins.programs import ProgramError, llm_api
from tests.standins.refusals import holds
from trtllm_pipeline.base.errors import FailureClass, StageError
from trtllm_pipeline.tensorrt.servers.disaggregated import Servers
from trtllm_pipeline.tensorrt.stage.params import WITH_DRAFT_MODEL
from trtllm_pipeline.tensorrt.stage.repository_settings import LlmApi
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm import llm_args, llmapi
from trtllm_pipeline.tensorrt.trtllm.params import WeightsRepository
from trtllm_pipeline.tensorrt.trtllm.releases import at_least

DATA: Final = Path(__file__).parents[1] / "data" / "tensorrt_llm"
RELEASES: Final = (
    *("1.0.0", "1.1.0", "1.2.0", "1.2.1", "1.3.0rc0", "1.3.0rc3", "1.3.0rc5", "1.3.0rc6", "1.3.0rc7", "1.3.0rc11"),
    *("1.3.0rc12", "1.3.0rc13", "1.3.0rc20", "1.3.0rc29", "1.4.0rc1"),
)
EVERYTHING: Final[dict[str, Any]] = {
    "enable_kv_cache_reuse": True,
    "enable_chunked_context": True,
    "kv_cache_free_gpu_mem_fraction": 0.5,
    "max_tokens_in_paged_kv_cache": 4096,
    "max_attention_window_size": (4096,),
    "sink_token_length": 4,
    "kv_cache_host_memory_bytes": 1 << 30,
    "kv_cache_onboard_blocks": True,
    "decoupled": True,
}
NEW: Final = ("sa", "pard", "dflash")
"""Ways to draft that came late."""
ASKED: Final = WeightsRepository(
    max_batch_size=4, max_seq_len=128, max_num_tokens=512, tensor_parallel_size=2, moe_expert_parallel_size=2
)


def without(release: str) -> set[str]:
    """Settings that a release has no name for."""
    return set() if "onboard_blocks" in llm_api.of(release)["kv_cache_config"] else {"kv_cache_onboard_blocks"}


def test_all_settings_are_looked_at() -> None:
    assert EVERYTHING.keys() == {each.name for each in fields(LlmApi)}


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_is_one_of_the_release(release: str, tmp_path: Path) -> None:
    settings = {name: value for name, value in EVERYTHING.items() if name not in without(release)}
    asked = replace(ASKED, **settings)
    written = llmapi.yaml_settings(tmp_path, asked, release)
    del written["triton_config"]  # Triton's own, which the model's code takes out
    llm_api.check_names(written, llm_api.of(release))
    llm_api.check_names(llmapi.serve_settings(asked, release), llm_api.of(release))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("method", ["draft", "eagle3", "mtp", "ngram", *NEW])
@pytest.mark.parametrize("length", [None, 4])
def test_every_way_to_draft_is_told_in_the_release_s_words(
    release: str, method: Any, length: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = replace(ASKED, speculative=method, max_draft_len=length)
    written = llmapi.speculation(asked, release, tmp_path if method in WITH_DRAFT_MODEL else None)
    if method in NEW and not at_least(release, llmapi.NEW_DRAFTERS):
        with pytest.raises(ProgramError, match="Invalid decoding type"):
            llm_api.check_speculation(written["speculative_config"], {}, llm_api.of(release))
        return
    model = {"num_nextn_predict_layers": 1}
    drafted = llm_api.check_speculation(written["speculative_config"], model, llm_api.of(release))
    assert drafted == (length or {"mtp": 1}.get(method, 3))


@pytest.mark.parametrize(
    ("method", "release", "key", "value"),
    [
        ("ngram", "1.2.0", "max_matching_ngram_size", 2),
        ("ngram", "1.4.0rc1", "max_matching_ngram_size", 2),
        ("ngram", "1.2.0", "max_draft_len", 3),
        ("sa", "1.4.0rc1", "decoding_type", "SA"),
        ("pard", "1.4.0rc1", "speculative_model_dir", ""),
        ("dflash", "1.4.0rc1", "decoding_type", "DFlash"),
        ("draft", "1.2.1", "decoding_type", "DraftTarget"),
        ("draft", "1.3.0rc5", "decoding_type", "DraftTarget"),
        ("draft", "1.3.0rc6", "decoding_type", "Draft_Target"),
        ("mtp", "1.3.0rc7", "num_nextn_predict_layers", 1),
        ("mtp", "1.3.0rc12", "max_draft_len", 1),
    ],
)
def test_words_that_changed(method: Any, release: str, key: str, value: object, tmp_path: Path) -> None:
    written = llmapi.speculation(replace(ASKED, speculative=method), release, tmp_path)["speculative_config"]
    assert written[key] == (value or str(tmp_path))
    assert not {"num_nextn_predict_layers", "max_draft_len"} <= written.keys()


def test_the_facts_refuse_what_those_releases_refuse() -> None:
    model = {"num_nextn_predict_layers": 1}
    for release, asked in (
        ("1.2.0", {"decoding_type": "NGram", "max_draft_len": 3}),
        ("1.3.0rc3", {"decoding_type": "Draft_Target", "max_draft_len": 3}),
        ("1.3.0rc6", {"decoding_type": "DraftTarget", "max_draft_len": 3}),
        ("1.3.0rc7", {"decoding_type": "MTP", "max_draft_len": 1}),
        ("1.4.0rc0", {"decoding_type": "MTP", "num_nextn_predict_layers": 1}),
    ):
        with pytest.raises(ProgramError):
            llm_api.check_speculation(asked, model, llm_api.of(release))
    with pytest.raises(ProgramError, match="onboard_blocks"):
        llm_api.check_names({"kv_cache_config": {"onboard_blocks": True}}, llm_api.of("1.3.0rc13"))


@pytest.mark.parametrize("release", ["1.2.1", "1.3.0rc20", "1.3.0rc29", "1.4.0rc0", "1.4.0rc1"])
def test_the_schema_and_the_history_of_names_agree(release: str) -> None:
    """Two records that were read apart: every name that the package may write is in the schema, and no former one is."""
    schema = llm_args.of_release(release)
    assert schema is not None
    assert schema.release == release
    known, classes = llm_api.of(release), schema.classes
    former: dict[str, Any] = llm_api.recorded()
    for mapping, kind in (("arguments", "file"), ("kv_cache_config", "KvCacheConfig"), ("lora_config", "LoraConfig")):
        if kind in classes:
            assert {*known[mapping]} <= classes[kind].keys()
            assert not ({*former[mapping]} - {*known[mapping]}) & classes[kind].keys()
    for word, own in known["decoding_types"].items():
        drafter = classes[f"{word.replace('_', '')}DecodingConfig"]
        assert {*known["speculative_config"], *own["names"], *own["required"]} <= drafter.keys(), word
    gone = {word.replace("_", "") for word in former["decoding_types"]} - {
        word.replace("_", "") for word in known["decoding_types"]
    }
    assert not {f"{word}DecodingConfig" for word in gone} & classes.keys()


def test_names_of_a_class_reference_are_checked_without_types() -> None:
    for release in ("1.2.1", "1.3.0rc20"):
        schema = llm_args.of_release(release)
        assert schema is not None
        asked = {"kv_cache_config": {"dtype": "fp8"}, "lora_config": {"any": 1}, "max_batch_size": 8}
        assert schema.problems(asked) == []
        asked = {"kv_cache_config": {"enable_blok_reuse": True}, "print_iter_logs": True}
        assert schema.problems(asked) == [
            "kv_cache_config.enable_blok_reuse: no such name; did you mean enable_block_reuse?",
            "print_iter_logs: no such name; did you mean print_iter_log?",
        ]
        assert schema.problems({"backend": "_autodeploy", "transforms": {}}) == []


def test_between_two_records_a_name_of_either_is_none_to_warn_of() -> None:
    schema = llm_args.around("1.3.0rc24")
    assert schema is not None
    assert schema.release == "1.3.0rc20 and 1.3.0rc29"
    assert schema.problems({"sampler_type": "auto", "kv_cache_config": {"block_reuse_config": {}}}) == []
    assert schema.problems({"speculative_config": {"decoding_type": "DSpark", "max_draft_len": 3}}) == []
    assert schema.problems({"tensor_parallel_size": "four"}) == []
    (found,) = schema.problems({"kv_cache_config": {"onboard_blocks": True}})
    assert found.startswith("kv_cache_config.onboard_blocks: no such name")


def test_the_router_s_file_has_names_of_upstream_s_schema() -> None:
    record = json.loads((DATA / "disaggregated.json").read_text(encoding="utf-8"))
    schema = llm_args.Schema(record["release"], record["source"], record["classes"])
    servers = Servers(
        context=["trtllm-serve", "M"],
        generation=["trtllm-serve", "M"],
        contexts=2,
        generations=1,
        context_gpus=1,
        generation_gpus=2,
        router=["trtllm-serve", "disaggregated"],
    )
    written = servers.config("127.0.0.1", 8000, [8001, 8002, 8003])
    assert schema.problems(written) == []
    assert schema.problems({**written, "context_servers": {"num_instance": 1}}) == [
        "context_servers.num_instance: no such name; did you mean num_instances?"
    ]


@pytest.mark.parametrize("release", ["1.2.1", "1.3.0rc20", "1.3.0rc29", "1.4.0rc0", "1.4.0rc1"])
@pytest.mark.parametrize("context", [True, False])
def test_files_of_disaggregated_servers_have_names_of_the_schema(release: str, context: bool) -> None:
    schema = llm_args.of_release(release)
    assert schema is not None
    assert schema.problems(llmapi.disaggregated_settings(ASKED, release, context=context)) == []


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_that_is_gone_is_refused_with_what_holds_now(value: bool, tmp_path: Path) -> None:
    asked = replace(ASKED, kv_cache_onboard_blocks=value)
    planned = cell(toolchain=PYTORCH, settings={"repository.kv_cache_onboard_blocks": value})
    assert llmapi.yaml_settings(tmp_path, asked, "1.3.0rc12")["kv_cache_config"]["onboard_blocks"] is value
    assert infeasible(planned, machine("1.3.0rc12")) is None
    for write in (
        lambda: llmapi.yaml_settings(tmp_path, asked, "1.3.0rc13"),
        lambda: llmapi.serve_settings(asked, "1.3.0rc13"),
    ):
        with pytest.raises(StageError, match=r"kv_cache_onboard_blocks: .* since 1\.3\.0rc13") as refused:
            write()
        assert refused.value.failure is FailureClass.USER
    said = infeasible(planned, machine("1.3.0rc13"))
    assert "blocks are moved back wherever kv_cache_host_memory_bytes is set" in str(said)


def test_a_plan_says_that_sinks_have_no_effect() -> None:
    sinks = cell(toolchain=PYTORCH, settings={"repository.sink_token_length": 4})
    assert toolchains.caveats([cell(toolchain=PYTORCH), sinks], machine("1.2.0")) == [
        "model: settings.repository.sink_token_length has no effect: the PyTorch backend ignores it"
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_adapters_keep_cuda_graphs_where_the_release_has_both(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llmapi, "read_adapter", lambda _folder: (8, ["attn_q"]))
    monkeypatch.setattr(llmapi, "check_weights", lambda *_: None)
    written = llmapi.lora([tmp_path], tmp_path, release)
    llm_api.check_names(written, llm_api.of(release))
    both = holds(llm_api.recorded()["cuda_graphs_with_adapters"], release)
    assert written.get("cuda_graph_config", "the release's own") == ("the release's own" if both else None)
