"""Command lines of trtllm-bench as recorded releases take them, and the cells that it is not for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.trtllm_cells import ENGINES, PYTORCH, cell, machine
from tests.standins import releases
from tests.standins.programs.arguments import parse_group
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm import commands
from trtllm_pipeline.tensorrt.trtllm.params import EngineBench

BENCH = {"perf.trtllm_bench": True}


def words(release: str, asked: EngineBench, config: str | None) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """What a recorded release reads of the command line. It ends the process for what it does not take."""
    line = commands.bench(
        release,
        asked,
        "trtllm-bench",
        model="M",
        engine="E",
        dataset="D",
        report="R",
        workspace="W",
        config=config,
    )
    table = releases.table(releases.BENCH, release)
    assert table is not None
    return parse_group("trtllm-bench", table, line[1:])


@pytest.mark.parametrize("release", ["0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.1", "1.3.0rc3"])
def test_an_engine_is_asked_by_what_the_release_takes(release: str) -> None:
    asked = EngineBench(name="N", concurrency=8, kv_cache_free_gpu_mem_fraction=0.8)
    group, command, got = words(release, asked, None)
    assert (group["model"], group["model_path"], group["workspace"], command) == ("N", "M", "W", "throughput")
    assert (got["engine_dir"], got["dataset"], got["report_json"], got["concurrency"]) == ("E", "D", "R", 8)
    assert got["backend"] == ("tensorrt" if release.startswith("1") else None)
    assert (got["streaming"], got["kv_cache_free_gpu_mem_fraction"]) == (True, 0.8)


@pytest.mark.parametrize("release", ["1.0.0", "1.1.0", "1.2.1", "1.3.0rc3", "1.3.0rc29"])
def test_weights_are_asked_with_the_limits_of_the_cell(release: str) -> None:
    limits = {"max_batch_size": 8, "max_seq_len": 640, "max_num_tokens": 4096}
    asked = EngineBench(
        name="N",
        concurrency=8,
        backend="pytorch",
        tp=4,
        pp=2,
        ep=2,
        kv_cache_free_gpu_mem_fraction=0.8,
        **limits,
    )
    _, _, got = words(release, asked, "C")
    assert {name: got[name] for name in limits} == limits
    assert (got["tp"], got["pp"], got["ep"], got.get("engine_dir"), got["backend"]) == (4, 2, 2, None, "pytorch")
    assert (got.get("config") or got.get("extra_llm_api_options")) == "C"
    assert got["kv_cache_free_gpu_mem_fraction"] == 0.9, "said in the file alone, since releases differ in which wins"


def reason(toolchain: str = ENGINES, release: str = "1.2.0", more: str = "", **settings: Any) -> str | None:
    asked = cell(toolchain=toolchain, settings={**BENCH, **settings})
    return toolchains.load(toolchain).infeasible(asked, machine(release, more=more))


def test_where_it_cannot_be_asked_the_plan_says_so() -> None:
    assert reason() is None
    assert reason(PYTORCH) is None
    assert "known to write reports from 0.20 on, this is 0.19.0" in str(reason(release="0.19.0"))
    assert "1.2.0 here has no trtllm-bench" in str(reason(more=",bench=no"))
    assert "settings.perf.concurrency has none" in str(reason(**{"perf.concurrency": [], "perf.request_rate": [2.0]}))
    drafts = {"speculative.method": "ngram", "speculative.max_draft_len": 3}
    assert "not for images, LoRA adapters and drafted tokens" in str(reason(PYTORCH, **drafts))
    embedded = replace(cell(toolchain="embedded", settings=BENCH), precision="fp16")
    assert toolchains.load("embedded").infeasible(embedded, machine()) == (
        "settings.perf.trtllm_bench: only the TensorRT-LLM toolchains support it"
    )


def test_settings_of_the_cell_reach_it() -> None:
    (stage,) = (each for each in toolchains.load(PYTORCH).stages if each.name == "trtllm_bench")
    asked = stage.read(
        cell(toolchain=PYTORCH, tp=2, settings={**BENCH, "perf.concurrency": [1, 16], "repository.llm_args": {"a": 1}})
    )
    assert (asked.concurrency, asked.tp, asked.max_batch_size, asked.settings["a"]) == (16, 2, 8, 1)
    share = {"repository.kv_cache_free_gpu_mem_fraction": 0.5, "repository.enable_kv_cache_reuse": True}
    asked = stage.read(cell(toolchain=PYTORCH, settings={**BENCH, **share}))
    assert asked.settings["kv_cache_config"] == {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": True}
