"""Other OpenAI-compatible servers as toolchains: their command lines, what is refused, and what a result depends on."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.openai_cells import H100S, PORTS, cell, started
from tests.helpers.trtllm_cells import RECIPE
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.base.fingerprints import canonical
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.orchestrate.memory.estimates import Corrections, expected, infeasible, of_stage
from trtllm_pipeline.orchestrate.plan.plan import StageRun, make_plan
from trtllm_pipeline.orchestrate.run.forecast import guess_s
from trtllm_pipeline.tensorrt.others import command
from trtllm_pipeline.tensorrt.others.command import KNOWN
from trtllm_pipeline.tensorrt.others.server import argv, settled
from trtllm_pipeline.tensorrt.stage.params import LaunchOpenAi
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.toolchains.time_estimates import source_bytes

NO_GPU = Machine(cpus=8, cpu="some")


def launched(one: Cell, machine: Machine = H100S) -> tuple[StageRun, list[str]]:
    """The stage run that serves a cell, and the stages that it has."""
    plan = make_plan([one], {one.toolchain: toolchains.load(one.toolchain)}, machine, digest=lambda *_: ("", ""))
    runs = [plan.stage_runs[run] for run in plan.by_cell[one.id]]
    return next(run for run in runs if run.stage.name == "launch"), [run.stage.name for run in runs]


def reason(one: Cell, machine: Machine = H100S) -> str | None:
    return toolchains.load(one.toolchain).infeasible(one, machine)


def test_vllm_is_started_with_what_the_axes_say() -> None:
    words = started(cell(tp=2, openai__options={"gpu_memory_utilization": 0.8, "enforce_eager": True}), model="/m")
    assert words[:3] == ["vllm", "serve", "/m"]
    told = " ".join(words)
    assert "--host 127.0.0.1 --port 8000 --served-model-name small" in told
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 1 --max-num-seqs 4 --max-model-len 160" in told
    assert "--dtype bfloat16" in told
    assert "--gpu-memory-utilization 0.8" in told
    assert words[-1] == "--enforce-eager"


def test_each_server_has_its_own_form_of_data_parallel_attention() -> None:
    own = {"recipe": {**RECIPE, "num_experts": 8}, "tp": 4, "max_batch_size": 10}
    vllm = " ".join(started(cell("vllm", dp=2, ep=4, **own), model="/m"))
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 1 --max-num-seqs 5 " in vllm
    assert "--enable-expert-parallel --data-parallel-size 2" in vllm
    sglang = " ".join(started(cell("sglang", dp=2, ep=2, **own), model="/m"))
    assert "--tp-size 4 --pp-size 1 --max-running-requests 10 " in sglang
    assert "--ep-size 2 --dp-size 2 --enable-dp-attention" in sglang
    split = " ".join(started(cell("vllm", dp=2, **own), model="/m"))
    assert "--data-parallel-size 2" in split
    assert "--enable-expert-parallel" not in split
    assert toolchains.load("vllm").stage("launch").read(cell("vllm", dp=2, ep=4, **own)).gpus == 4


def test_a_cell_has_the_stages_that_its_command_reads() -> None:
    assert launched(cell())[1] == ["download", "launch", "smoke", "perf", "accuracy"]
    assert launched(cell("llama_cpp", "int8_wo"))[1][:3] == ["download", "convert", "launch"]
    own = cell("openai", openai__command="mine --port {port} --gguf {gguf}", precision="fp16")
    assert "convert" in launched(own)[1]


def test_what_is_converted_for_the_embedded_toolchain_is_taken() -> None:
    embedded, llama = cell("embedded", "int8_wo"), cell("llama_cpp", "int8_wo")
    keys = []
    for one in (embedded, llama):
        plan = make_plan([one], {one.toolchain: toolchains.load(one.toolchain)}, NO_GPU, digest=lambda *_: ("", ""))
        keys.append(next(run.fingerprint for run in plan.stage_runs.values() if run.stage.name == "convert"))
    assert keys[0] == keys[1]


def test_a_command_of_ones_own_is_filled() -> None:
    own = "env A=1 serve '{model}' --name {name} --at {host}:{port} --tokens {total_tokens} --json '{\"a\": 1}'"
    assert started(cell("openai", openai__command=own), model="/a b") == [
        *("env", "A=1", "serve", "/a b", "--name", "small", "--at", "127.0.0.1:8000", "--tokens", "640"),
        *("--json", '{"a": 1}'),
    ]
    assert started(cell("openai", openai__command=("serve", "a b", "{port}"))) == ["serve", "a b", "8000"]


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (cell("openai"), "needs settings.openai.url"),
        (cell("openai", openai__url="http://a", openai__command="b {port}"), "use one of them"),
        (cell("openai", openai__url="nothing://:/"), "settings.openai.url nothing://:/: expected HOST"),
        (cell("openai", openai__command="serve {port} {modell}"), "unknown placeholder {modell}"),
        (cell("openai", openai__command="serve {model}"), "has no {port}"),
        (cell("openai", openai__command="serve '{port}"), "No closing quotation"),
        (
            cell("vllm", "int4_awq"),
            "quantizes to no other when it loads; use as_is with a model that is published quantized",
        ),
        (cell("transformers", tp=2), "tp2pp1: transformers has no option"),
        (cell("vllm", tp=8), "8 GPUs are needed, the machine has 4"),
        (cell("vllm", ep=2, tp=4), "ep2: vllm distributes experts over all GPUs, which is ep4 for tp4"),
        (cell("llama_cpp", "fp8"), "precision fp8: GGUF files"),
        (cell("transformers", perf__ignore_eos=True), "settings.perf.ignore_eos: transformers does not support it"),
        (cell("vllm", build__max_num_tokens=4096), "; settings.openai.options has vllm's own options"),
        (cell("vllm", speculative__method="ngram"), "draft tokens; settings.openai.options has vllm's own options"),
        (cell("vllm", serve__frontend="trtllm_serve"), "settings.serve.frontend trtllm_serve"),
        (cell("vllm", lora__adapter="./a"), "settings.lora.adapter"),
        (
            cell("sglang", recipe={**RECIPE, "max_position_embeddings": 165}),
            "128 input and 32 output tokens: sglang needs a context of 166 tokens for them, the model has 165 positions",
        ),
    ],
)
def test_what_cannot_work_says_why(one: Cell, said: str) -> None:
    assert said in str(reason(one))


@pytest.mark.parametrize(
    ("one", "sm", "said"),
    [
        (cell(), 75, "precision bf16: vllm supports it from SM 80 on, this is SM 75; use fp16 or another GPU"),
        (cell("sglang"), 75, "precision bf16: sglang supports it from SM 80 on, this is SM 75; use fp16"),
        (cell(precision="fp8"), 70, "precision fp8: vllm supports it from SM 75 on"),
        (
            cell(precision="as_is", recipe={**RECIPE, "quantization": "awq"}),
            70,
            "precision as_is (awq): vllm supports it",
        ),
        (cell("sglang", "fp16"), 70, "SM 70: sglang supports SM 75 and newer; use another GPU"),
        (cell(), 80, None),
        (cell(precision="fp8"), 75, None),
        (cell(precision="fp16"), 70, None),
        (cell(precision="as_is"), 70, None),
        (cell("transformers"), 70, None),
    ],
)
def test_a_gpu_that_is_too_old_for_a_precision_is_named(one: Cell, sm: int, said: str | None) -> None:
    told = reason(one, parse(f"sm={sm},gpus=4,gpu_memory_gib=80"))
    assert told is None if said is None else said in str(told)


@pytest.mark.parametrize(("name", "positions"), [("sglang", 166), ("vllm", 160)])
def test_lengths_may_fill_the_context_but_for_what_the_server_leaves_free(name: str, positions: int) -> None:
    assert reason(cell(name, recipe={**RECIPE, "max_position_embeddings": positions})) is None
    assert reason(cell(name, pp=3)) is None, "pipeline stages may be unequal"


def test_a_program_that_is_not_there_makes_a_cell_infeasible_on_this_machine_alone() -> None:
    one = cell("openai", openai__command="/nowhere/serve {port}")
    assert "/nowhere/serve is not on PATH" in str(reason(one, NO_GPU))
    assert reason(one) is None


@pytest.mark.parametrize("machine", [NO_GPU, H100S])
def test_a_program_in_a_folder_relative_to_nobody_knows_what_is_refused(machine: Machine) -> None:
    said = str(reason(cell("openai", openai__command="./serve {port}"), machine))
    assert "./serve is relative to the directory of each attempt; use its absolute path" in said


GIB80 = 80 << 30


@pytest.mark.parametrize(
    ("one", "share"),
    [
        (cell(), 0.92),
        (cell(tp=4), 0.92),
        (cell("sglang"), 0.88),
        (cell(openai__options={"gpu_memory_utilization": 0.5}), 0.5),
        (cell("sglang", openai__options={"--mem-fraction-static": 0.7}), 0.7),
        (cell("transformers", openai__options={"continuous_batching": True}), 0.9),
        (cell("transformers", openai__options={"continuous_batching": True, "cb_max_memory_percent": 0.5}), 0.5),
        (cell("openai", openai__command="serve {port} --gpu-memory-utilization=0.3"), 0.3),
        (cell("openai", openai__command="serve {port} --mem-fraction-static 0.3"), 0.3),
    ],
)
def test_a_server_that_allocates_a_share_of_the_gpu_needs_that_share(one: Cell, share: float) -> None:
    needs = expected(toolchains.load(one.toolchain).stage("launch"), one, H100S)
    assert needs.gpu == round(share * GIB80)
    assert needs.assumed == ()
    assert needs.gpu_least < needs.gpu


@pytest.mark.parametrize(
    "one",
    [
        cell("transformers"),
        cell("transformers", openai__options={"cb_max_memory_percent": 0.5}),
        cell("openai", openai__command="serve {port}"),
        cell(openai__options={"gpu-memory-utilization": "all"}),
    ],
)
def test_the_memory_of_other_servers_is_assumed(one: Cell) -> None:
    needs = expected(toolchains.load(one.toolchain).stage("launch"), one, H100S)
    assert "gpu" in needs.assumed


@pytest.mark.parametrize("name", ["transformers", "llama_cpp"])
def test_weights_that_do_not_fit_are_kept_in_host_memory_by_a_server_that_can(name: str) -> None:
    large = cell(name, recipe={**RECIPE, "parameters": 50_000_000_000})
    needs = expected(toolchains.load(name).stage("launch"), large, H100S)
    assert (needs.gpu, needs.host) == (GIB80, source_bytes(large) - GIB80)
    assert toolchains.caveats([large], H100S) == [
        f"small: 13.1 GiB of bf16 weights do not fit on 1 GPU; {name} keeps them in host memory, which is slow"
    ]
    assert toolchains.caveats([cell(name)], H100S) == []


def test_weights_larger_than_the_gpus_are_refused_before_the_start() -> None:
    def refused(**changes: Any) -> str | None:
        wide = cell(recipe={**RECIPE, "parameters": 100_000_000_000}, **changes)
        return infeasible(wide, [toolchains.load("vllm").stage("launch")], H100S, Corrections((), H100S))

    assert str(refused()).startswith("launch: needs about")
    assert refused(openai__options={"cpu_offload_gb": 150}) is None
    assert refused(tp=4) is None
    # 84 GB of weights: less than the GPU has (85.9 GB), more than the share of it.
    own = cell(recipe={**RECIPE, "parameters": 42_000_000_000})
    assert infeasible(own, [toolchains.load("vllm").stage("launch")], H100S, Corrections((), H100S)) is not None


def test_groups_of_data_parallel_attention_have_copies_of_it() -> None:
    def least(dp: int) -> int:
        one = cell("sglang", tp=4, ep=4, dp=dp, recipe={**RECIPE, "num_experts": 8})
        return expected(toolchains.load("sglang").stage("launch"), one, H100S).gpu_least

    of_layer = 2 * 4096 * 128 * (32 + 8)
    assert least(4) - least(1) == pytest.approx(2 * 32 * of_layer * 3 / 4 / 0.88, rel=0.001)


@pytest.mark.parametrize(("batch", "verdict"), [(8, "fits"), (64, "less at a time")])
def test_a_cache_for_some_of_the_requests_works_on_fewer(batch: int, verdict: str) -> None:
    one = cell(max_batch_size=batch, isl=32_768)  # 4 GiB of cache for each
    stage = toolchains.load("vllm").stage("launch")
    (need,) = of_stage(expected(stage, one, H100S), stage, one, H100S, Corrections((), H100S), "")
    assert need.verdict == verdict
    own = cell(max_batch_size=batch, isl=32_768, openai__options={"kv_cache_dtype": "fp8"})
    (need,) = of_stage(expected(stage, own, H100S), stage, own, H100S, Corrections((), H100S), "")
    assert need.verdict == "fits"


def test_a_start_takes_as_long_as_servers_of_its_kind_and_the_weights() -> None:
    long = [
        guess_s(launched(cell(each, precision="int8_wo" if each == "llama_cpp" else "bf16"))[0], H100S)
        for each in KNOWN
    ]
    vllm, sglang, transformers, llama_cpp = long
    assert vllm > sglang > transformers > llama_cpp
    larger = cell(recipe={**RECIPE, "parameters": 70_000_000_000})
    assert guess_s(launched(larger)[0], H100S) > vllm + 10


def test_a_server_that_runs_already_is_given_nothing() -> None:
    one = cell("vllm", tp=8, openai__url="http://host:8000/v1", perf__exclusive="gpu")
    launch, stages = launched(one)
    assert reason(one) is None
    assert launch.params.command is None
    took = launch.stage.resources(one, H100S)
    assert (took.gpus, took.exclusive.value) == (0, "machine")
    assert stages[1:] == ["launch", "smoke", "perf", "accuracy"]
    assert "not started by us" in toolchains.caveats([one], H100S)[0]


def test_of_a_model_that_runs_elsewhere_only_what_counts_tokens_is_downloaded() -> None:
    files = {"config.json": "1" * 64, "tokenizer.json": "2" * 64, "model.safetensors": "3" * 64}
    for url, names in ((None, {*files}), ("http://a", {"config.json", "tokenizer.json"})):
        one = cell(openai__url=url, recipe={**RECIPE, "files": files})
        asked = toolchains.load("vllm").stage("download").read(one)
        assert {*asked.content} == names
        assert asked.form == (None if url is None else "tokenizer")


def test_gpus_are_leased_as_for_our_own() -> None:
    two = cell(tp=2)
    assert launched(two)[0].stage.resources(two, H100S).gpus == 2
    assert launched(two)[0].stage.resources(two, NO_GPU).gpus == 0
    beside = cell(perf__exclusive="gpu")
    assert launched(beside)[0].stage.resources(beside, H100S).exclusive.value == "gpu"
    assert launched(beside)[0].stage.resources(beside, NO_GPU).exclusive.value == "machine"
    told = cell(openai__gpus=3)
    assert launched(told)[0].stage.resources(told, H100S).gpus == 3


def test_the_key_has_the_arguments_and_no_folder_or_port() -> None:
    def key(one: Cell) -> str:
        return launched(one)[0].key

    assert key(cell()) != key(cell(openai__options={"block_size": 32}))
    assert key(cell()) != key(cell(openai__environment={"VLLM_USE_V1": 0}))
    assert key(cell()) == key(cell(serve__http_port=9000))
    assert key(cell()) == key(cell(openai__ready_path="/ping"))
    assert key(cell("openai", openai__url="http://a")) != key(cell("openai", openai__url="http://b"))


def test_a_matrix_without_these_servers_has_the_keys_it_had() -> None:
    assert "openai" not in canonical(toolchains.load("embedded").stage("launch").read(cell("embedded")).__dict__)


def test_smoke_asks_for_the_limit_only_where_it_is_refused() -> None:
    def limit(one: Cell) -> int | None:
        found: int | None = toolchains.load(one.toolchain).stage("smoke").read(one).max_seq_len
        return found

    assert limit(cell("vllm")) == 160
    assert limit(cell("transformers")) is None
    assert limit(cell("vllm", openai__url="http://a")) is None


def test_reuse_of_the_cache_is_as_the_matrix_says_and_nobody_claims_it_of_others() -> None:
    def declared(one: Cell) -> object:
        return toolchains.load(one.toolchain).stage("perf").read(one).declared["enable_kv_cache_reuse"]

    assert "--no-enable-prefix-caching" in started(cell(), model="/m")
    assert "--enable-prefix-caching" in started(cell(repository__enable_kv_cache_reuse=True), model="/m")
    assert "--disable-radix-cache" in started(cell("sglang"), model="/m")
    assert "does not reuse the cache" in str(reason(cell("transformers", repository__enable_kv_cache_reuse=True)))
    assert declared(cell()) is False
    assert declared(cell("vllm", openai__command="mine {port}")) is None
    assert declared(cell("openai", openai__url="http://a")) is None


@pytest.mark.parametrize(
    ("one", "bits"),
    [
        (cell(), None),
        (cell(precision="fp8"), 8),
        (cell("sglang", "fp8"), 8),
        (cell("llama_cpp", "int4_wo"), 4),
        (cell("llama_cpp", "int8_wo"), 8),
        (cell(openai__options={"quantization": "bitsandbytes"}), 0),
        (cell("openai", openai__command="mine {model} --port {port}"), 0),
    ],
)
def test_weights_that_a_server_makes_smaller_are_not_held_against_those_of_the_files(
    one: Cell, bits: int | None
) -> None:
    declared = toolchains.load(one.toolchain).stage("perf").read(one).declared
    assert declared.get("weight_bits") == bits


def test_an_option_of_null_is_none() -> None:
    assert command.options({"max_loras": 2, "seed": None, "trace": True}) == ["--max-loras", "2", "--trace"]


def test_the_version_is_that_of_the_package_that_the_program_belongs_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    version = command.version_of([sys.executable, "-m", "pytest.something"], ())
    assert version == f"pytest {pytest.__version__}"
    script = Path(sys.executable).with_name("pytest")
    assert command.version_of(["/usr/bin/env", "A=1", sys.executable, "-u", "-m", "pytest"], ()) == version
    assert command.version_of([str(script)], ()) == version
    portable = tmp_path / "pytest"
    for line in ("#!/usr/bin/env python3", "#!/usr/bin/env -S python3 -u"):
        portable.write_text(f"{line}\n")
        portable.chmod(0o755)
        assert command.version_of([str(portable)], ()) == version
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho noise\necho 'version: 6000 (abc)' >&2\n")
    program.chmod(0o755)
    assert command.version_of([str(program)], ("--version",)) == "version: 6000 (abc)"
    digest = command.version_of([str(program)], ())
    program.write_text("#!/bin/sh\necho another\n")
    assert digest.startswith("server ")
    assert command.version_of([str(program)], ()) != digest
    assert command.version_of(["/nowhere/server"], ()) is None


def test_by_hand_a_known_server_has_its_own_defaults() -> None:
    words = command.of_itself(command.KNOWN["vllm"])
    assert words == ["vllm", "serve", "{model}", "--host", "{host}", "--port", "{port}"]
    assert command.placeholders(command.of_itself(command.KNOWN["llama_cpp"])) == {"gguf", "host", "port"}


def test_by_hand_a_placeholder_without_a_value_is_an_error() -> None:
    asked = LaunchOpenAi(command="vllm serve {model} --port {port} --tensor-parallel-size {tp}")
    with pytest.raises(StageError, match=r"\{model\}") as error:
        argv(asked, {}, "127.0.0.1", PORTS)
    assert error.value.hint == "--model DIR"
    with pytest.raises(StageError, match=r"\{tp\}"):
        argv(replace(asked, command="vllm {port} {tp}"), {}, "127.0.0.1", PORTS)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (LaunchOpenAi(), "no server"),
        (
            LaunchOpenAi(url="http://a", server="vllm"),
            "--url names a running server, and --server one to start",
        ),
        (LaunchOpenAi(url="http://a", command="b {port}"), "--url names a running server, and --command one to start"),
    ],
)
def test_by_hand_it_is_one_server(asked: LaunchOpenAi, words: str) -> None:
    with pytest.raises(StageError, match=words):
        settled(asked, {})
    assert settled(LaunchOpenAi(command="b {port}", server="vllm"), {}).command == "b {port}"
