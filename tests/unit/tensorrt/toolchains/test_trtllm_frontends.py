"""What servers of both lanes are started from, for each frontend, and which program then starts them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.contexts import context, faults
from tests.helpers.adapters import random_pairs, write_adapter
from tests.helpers.broken_repositories import write_engine, write_model
from tests.standins import templates as standin
from tests.standins.programs import ProgramError, llm_api
from tests.standins.triton import openai_frontend
from trtllm_pipeline.base.errors import FailureClass, PlanError, StageError
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.model import Machine, TensorRTLLM, TritonServer
from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.tensorrt.servers import engine_requirements
from trtllm_pipeline.tensorrt.servers.command_lines import Ports, openai_argv
from trtllm_pipeline.tensorrt.stage import launch
from trtllm_pipeline.tensorrt.stage.base import StageContext
from trtllm_pipeline.tensorrt.stage.params import WITH_DRAFT_MODEL, LaunchFrontend
from trtllm_pipeline.tensorrt.trtllm import frontends, launching, templates
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository, WeightsRepository
from trtllm_pipeline.tensorrt.trtllm.rules import WITHOUT_OWN_LAYERS

LIMITS = {"max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 512}
LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
Make = Callable[..., StageContext[Any]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The context of a repository or launch stage on a machine with a release."""
    engine, model = write_engine(tmp_path / "engine", "1.2.0"), write_model(tmp_path / "model")

    def make(release: str = "1.2.0", **params: Any) -> StageContext[Any]:
        found = TensorRTLLM(
            release, serve="/opt/bin/trtllm-serve", templates=str(standin.install(tmp_path / release, "1.2.0"))
        )
        monkeypatch.setattr(probe, "this_machine", lambda: Machine(cpus=1, cpu="test", tensorrt_llm=found))
        out = tmp_path / release / "out"
        out.mkdir(parents=True)
        pytorch = "tensor_parallel_size" in params
        cls = WeightsRepository if pytorch else EngineRepository if "max_batch_size" in params else LaunchFrontend
        return context(cls, params, {"engine": engine, "model": model, "repository": out}, {}, out, out.parent)

    return make


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------------------- repositories


def test_an_engine_in_triton_is_the_five_models(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    work = make(frontend="triton", max_batch_size=4, enable_kv_cache_reuse=True, options={}, parameters={})
    frontends.run_engine(work)
    assert names(work.out) == set(templates.MODELS)
    engine = model_config.string_parameters(model_config.read(work.out / "tensorrt_llm" / "config.pbtxt"))
    assert engine["gpt_model_path"] == str(work.inputs["engine"])
    assert engine["enable_kv_cache_reuse"] == "true"
    assert capsys.readouterr().out.endswith(f"tensorrt_llm_bls for {work.inputs['engine']}\n")


def test_an_engine_in_trtllm_serve_is_a_command_line(make: Make) -> None:
    work = make(
        frontend="trtllm_serve",
        max_batch_size=4,
        kv_cache_free_gpu_mem_fraction=0.5,
        enable_kv_cache_reuse=False,
        options={"num_postprocess_workers": 2},
    )
    frontends.run_engine(work)
    said = yaml.safe_load((work.out / frontends.SETTINGS_FILE).read_text())
    assert said == {"kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.5}}
    assert launching.serve_command(work.out) == [
        *("/opt/bin/trtllm-serve", "serve", str(work.inputs["engine"]), "--tokenizer", str(work.inputs["model"])),
        *("--backend", "tensorrt", "--extra_llm_api_options", str(work.out / frontends.SETTINGS_FILE)),
        *("--num_postprocess_workers", "2"),
    ]


def test_before_there_was_a_file_of_settings_an_option_says_it(make: Make) -> None:
    work = make("0.16.0", frontend="trtllm_serve", max_batch_size=4, kv_cache_free_gpu_mem_fraction=0.5, options={})
    frontends.run_engine(work)
    assert names(work.out) == {frontends.SERVE_FILE}
    assert launching.serve_command(work.out)[-2:] == ["--kv_cache_free_gpu_memory_fraction", "0.5"]


def test_an_engine_where_no_release_serves_it_is_refused(make: Make) -> None:
    with pytest.raises(PlanError, match=r"TensorRT-LLM 0\.12\.0 has no trtllm-serve"):
        frontends.run_engine(make("0.12.0", frontend="trtllm_serve", max_batch_size=4, options={}))


def test_pytorch_in_triton_is_the_llmapi_model(make: Make) -> None:
    work = make(
        frontend="triton", **LIMITS, **LAYOUT, decoupled=True, llm_args={"enable_attention_dp": True}, options={}
    )
    frontends.run_pytorch(work)
    assert names(work.out) == {"tensorrt_llm"}
    said = yaml.safe_load((work.out / "tensorrt_llm" / "1" / "model.yaml").read_text())
    assert (said["model"], said["tensor_parallel_size"]) == (str(work.inputs["model"]), 2)
    assert {name: said[name] for name in LIMITS} == LIMITS
    assert said["enable_attention_dp"] is True


def test_pytorch_in_trtllm_serve_is_a_command_line_and_the_settings_beside_it(make: Make, tmp_path: Path) -> None:
    work = make(
        frontend="trtllm_serve",
        **LIMITS,
        **LAYOUT,
        decoupled=True,
        enable_kv_cache_reuse=False,
        kv_cache_free_gpu_mem_fraction=0.5,
        enable_chunked_context=True,
        llm_args={"print_iter_log": True},
        options={},
    )
    frontends.run_pytorch(work)
    said = yaml.safe_load((work.out / frontends.SETTINGS_FILE).read_text())
    assert said == {
        "enable_chunked_prefill": True,
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.5},
        "print_iter_log": True,
    }, "nothing of it is an option as well"
    moved = work.out.rename(tmp_path / "artifact")
    assert launching.serve_command(moved) == [
        *("/opt/bin/trtllm-serve", "serve", str(work.inputs["model"])),
        *("--tp_size", "2", "--pp_size", "1", "--max_batch_size", "4", "--max_seq_len", "128"),
        *("--max_num_tokens", "512", "--extra_llm_api_options", str(moved / frontends.SETTINGS_FILE)),
    ]


def test_where_there_are_no_settings_there_is_no_file_of_them(make: Make) -> None:
    work = make(frontend="trtllm_serve", **LIMITS, **LAYOUT, options={}, enable_kv_cache_reuse=None)
    frontends.run_pytorch(work)
    assert names(work.out) == {frontends.SERVE_FILE}
    assert "--extra_llm_api_options" not in launching.serve_command(work.out)


def test_settings_of_the_llm_api_that_are_no_mapping_are_refused() -> None:
    assert "llm_args: must be a mapping of keys to values" in faults(WeightsRepository, **LIMITS, llm_args="x")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema": 1}'])
def test_a_folder_for_another_frontend_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / frontends.SERVE_FILE).write_text(text)
    with pytest.raises(StageError, match=r"was not created for trtllm-serve: serve\.json") as caught:
        launching.serve_command(tmp_path)
    assert caught.value.failure is FailureClass.USER


# ------------------------------------------------------------------------------------------------------------- launch


@pytest.mark.parametrize(
    ("program", "frontend", "expected"),
    [
        (launching.launch_engine, "triton", "ranks"),
        (launching.launch_engine, "trtllm_serve", "openai"),
        (launching.launch_pytorch, "triton", "llmapi"),
        (launching.launch_pytorch, "trtllm_serve", "openai"),
    ],
)
def test_each_lane_and_frontend_has_its_own_start(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[StageContext[Any]], None],
    frontend: str,
    expected: str,
) -> None:
    work = make(frontend=frontend)
    (work.out / frontends.SERVE_FILE).write_text(json.dumps({"schema": 1, "command": ["trtllm-serve", "x"]}))
    started: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(launch, "serve", lambda *_given: None)
    for name in ("starter", "ranks", "llmapi", "openai"):
        monkeypatch.setattr(launch, name, lambda *given, name=name: started.append((name, given)))
    program(work)
    ((name, given),) = started
    assert name == expected
    assert given[0] is work
    if expected == "openai":
        assert given[1] == ["trtllm-serve", "x"]


def of_triton(monkeypatch: pytest.MonkeyPatch, release: str, openai: str | None = "/opt/main.py") -> None:
    triton = TritonServer("/opt/bin/tritonserver", "25.08", ("tensorrtllm",), openai)
    found = Machine(cpus=1, cpu="test", tensorrt_llm=TensorRTLLM(release, python="/opt/python3"), triton=triton)
    monkeypatch.setattr(probe, "this_machine", lambda: found)


def served_by_triton(make: Make, monkeypatch: pytest.MonkeyPatch, *, ranks: int = 1) -> StageContext[Any]:
    """A launch of a filled repository, of an engine of `ranks` that the machine can run."""
    filled = make(frontend="triton", max_batch_size=4, options={}, parameters={})
    frontends.run_engine(filled)
    of_triton(monkeypatch, "1.2.0")
    engine = SimpleNamespace(world_size=ranks, release="1.2.0")
    monkeypatch.setattr(engine_requirements, "check", lambda *_: engine)
    return replace(filled, params=LaunchFrontend(frontend="triton_openai"))


def test_the_openai_front_end_of_triton_is_started_on_the_repository(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = served_by_triton(make, monkeypatch)
    started: list[Any] = []
    monkeypatch.setattr(launch, "serve", lambda *_given: None)
    monkeypatch.setattr(launch, "openai", lambda *given: started.extend(given))
    launching.launch_engine(work)
    assert started[0] is work
    command = openai_argv(started[1], "127.0.0.1", Ports(8123, 0, 0), started[2])
    assert command[:2] == ["/opt/python3", "/opt/main.py"]
    asked = openai_frontend.parser().parse_args(command[2:])  # the options that the real one was read to take
    assert (asked.model_repository, asked.tokenizer) == (str(work.inputs["repository"]), str(work.inputs["model"]))
    assert (asked.host, asked.openai_port, asked.enable_kserve_frontends) == ("127.0.0.1", 8123, False)


@pytest.mark.parametrize(
    ("ranks", "openai", "words"),
    [(2, "/opt/main.py", "has 2 ranks, which need mpirun"), (1, None, "Triton here has no python/openai")],
)
def test_what_the_openai_front_end_of_triton_cannot_serve_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, ranks: int, openai: str | None, words: str
) -> None:
    work = served_by_triton(make, monkeypatch, ranks=ranks)
    of_triton(monkeypatch, "1.2.0", openai)
    with pytest.raises(StageError, match=words) as caught:
        launching.launch_engine(work)
    assert caught.value.failure is FailureClass.USER
    assert "--frontend triton" in str(caught.value.hint)


def test_the_openai_front_end_of_triton_needs_a_repository_and_an_engine(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = served_by_triton(make, monkeypatch)
    (work.inputs["repository"] / "preprocessing" / "config.pbtxt").unlink()
    with pytest.raises(StageError, match="names no tokenizer in its model preprocessing"):
        launching.launch_engine(work)
    with pytest.raises(StageError, match="serves engines"):
        launching.launch_pytorch(work)


@pytest.mark.parametrize("frontend", ["triton", "trtllm_serve"])
def test_quantized_weights_are_not_served_under_the_name_of_unquantized_ones(make: Make, frontend: str) -> None:
    work = make(frontend=frontend, options={}, unquantized=True, **LIMITS, **LAYOUT)
    config = work.inputs["model"] / "config.json"
    config.write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(StageError, match=r"quantized already, fp8 by its config\.json") as caught:
        frontends.run_pytorch(work)
    assert caught.value.failure is FailureClass.INFEASIBLE
    config.write_text("{}")
    frontends.run_pytorch(work)
    assert names(work.out)


@pytest.mark.parametrize("frontend", ["triton", "trtllm_serve"])
@pytest.mark.parametrize("run", [frontends.run_pytorch, launching.launch_pytorch])
def test_a_quantized_folder_that_would_be_served_as_unquantized_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, frontend: str, run: Callable[[StageContext[Any]], None]
) -> None:
    work = make(frontend=frontend, options={}, **LIMITS, **LAYOUT)
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
    (work.inputs["model"] / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(StageError, match=r"hf_quant_config\.json is missing .* as if unquantized") as caught:
        run(work)
    assert caught.value.failure is FailureClass.INFEASIBLE
    (work.inputs["model"] / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    if run is frontends.run_pytorch:
        run(work)
        assert names(work.out)


@pytest.mark.parametrize("release", ["1.0.0", "1.1.0", "1.2.0", "1.3.0"])
@pytest.mark.parametrize("method", ["draft", "eagle3", "mtp", "ngram"])
def test_every_release_takes_what_it_is_told_of_speculative_decoding(
    make: Make, tmp_path: Path, release: str, method: str
) -> None:
    """The facts are the stand-in's: it refuses what the LLM API of a release was read to refuse."""
    own = write_model(tmp_path / "head")
    work = make(release, frontend="trtllm_serve", **LIMITS, **LAYOUT, speculative=method, max_draft_len=4)
    work = replace(work, inputs={**work.inputs, **({"draft": own} if method in WITH_DRAFT_MODEL else {})})
    frontends.run_pytorch(work)
    said = yaml.safe_load((work.out / frontends.SETTINGS_FILE).read_text())
    assert said["enable_iter_perf_stats"] is True
    assert (
        llm_api.check_speculation(said["speculative_config"], {"num_nextn_predict_layers": 1}, llm_api.of(release)) == 4
    )
    assert ("speculative_model_dir" in said["speculative_config"]) is (method in WITH_DRAFT_MODEL)
    if method == "mtp":
        for family in sorted(WITHOUT_OWN_LAYERS):
            model = {"model_type": family, "num_nextn_predict_layers": 1}
            with pytest.raises(ProgramError, match=f"Model type {family} not supported for MTP"):
                llm_api.check_speculation(said["speculative_config"], model, llm_api.of(release))
    other = {**said["speculative_config"], "decoding_type": "Medusa"}
    with pytest.raises(ProgramError):
        llm_api.check_speculation(other, {"num_nextn_predict_layers": 1}, llm_api.of(release))


@pytest.mark.parametrize("release", ["0.20.0", "0.21.0", "1.0.0", "1.2.0"])
def test_trtllm_serve_is_told_the_sizes_of_lookahead_decoding(make: Make, release: str) -> None:
    sizes = {"lookahead_window_size": 3, "lookahead_ngram_size": 3, "lookahead_verification_set_size": 2}
    work = make(release, frontend="trtllm_serve", max_batch_size=4, decoding_mode="lookahead", options={}, **sizes)
    frontends.run_engine(work)
    said = yaml.safe_load((work.out / frontends.SETTINGS_FILE).read_text())["speculative_config"]
    llm_api.check_lookahead(said, {"speculative_decoding_mode": 8, "max_draft_len": 9})
    with pytest.raises(ProgramError, match="the engine was built for 8 drafted tokens, asked for are 9"):
        llm_api.check_lookahead(said, {"speculative_decoding_mode": 8, "max_draft_len": 8})


def test_a_draft_model_that_is_not_there_is_refused_by_hand(make: Make) -> None:
    work = make(frontend="trtllm_serve", **LIMITS, **LAYOUT, speculative="eagle3")
    with pytest.raises(StageError, match="eagle3 needs a draft model"):
        frontends.run_pytorch(work)


def has_hidden_size(model: Path, size: int) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": size}))


def adapter_of(folder: Path, width: int) -> Path:
    return write_adapter(folder, random_pairs({"q_proj": (width, 8), "down_proj": (16, 8)}, rank=4))


def test_an_adapter_is_told_to_the_llm_api_with_its_rank_and_layers(make: Make, tmp_path: Path) -> None:
    work = make(frontend="trtllm_serve", **LIMITS, **LAYOUT)
    has_hidden_size(work.inputs["model"], 8)
    adapter = adapter_of(tmp_path / "adapter", 8)
    frontends.run_pytorch(replace(work, inputs={**work.inputs, "adapter": adapter}))
    said = yaml.safe_load((work.out / frontends.SETTINGS_FILE).read_text())
    assert said["lora_config"] == {
        "lora_dir": [str(adapter)],
        "max_lora_rank": 4,
        "lora_target_modules": ["attn_q", "mlp_4h_to_h"],
    }
    llm_api.check_lora(said["lora_config"])
    assert launching.serve_command(work.out)[-1] == str(work.out / frontends.SETTINGS_FILE)


def test_an_adapter_of_another_model_or_for_triton_is_refused(make: Make, tmp_path: Path) -> None:
    work = make(frontend="trtllm_serve", **LIMITS, **LAYOUT)
    has_hidden_size(work.inputs["model"], 8)
    inputs = {**work.inputs, "adapter": adapter_of(tmp_path / "adapter", 3)}
    with pytest.raises(StageError, match="it was trained for another model") as refused:
        frontends.run_pytorch(replace(work, inputs=inputs))
    assert refused.value.failure is FailureClass.INFEASIBLE
    triton = make("1.2.1", frontend="triton", **LIMITS, **LAYOUT)
    with pytest.raises(StageError, match=r"has no input lora_path: .* does not support LoRA adapters"):
        frontends.run_pytorch(replace(triton, inputs=inputs))
