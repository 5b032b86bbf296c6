"""The table of what TensorRT-LLM refuses after parsing: an example for each rule, and plans of everything against facts.

The facts are `tests/data/tensorrt_llm/refusals.json`, by which the stand-ins refuse; they know nothing of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.helpers.trtllm_cells import ENGINES, PYTORCH, infeasible, settings_of, values
from tests.helpers.trtllm_cells import cell as some_cell
from tests.standins import refusals
from tests.standins.programs import ProgramError, Work, build
from tests.standins.programs.quantize import ALGORITHMS
from trtllm_pipeline.base.domain import Cell, CellId
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.orchestrate.matrix.models import PRECISIONS
from trtllm_pipeline.orchestrate.matrix.recipe_files import load_recipe, recipes_folder
from trtllm_pipeline.orchestrate.plan.plan import make_plan
from trtllm_pipeline.orchestrate.plan.plan_file import command_lines
from trtllm_pipeline.tensorrt.stage.calibration_rows import default_set
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.trtllm.rules import RULES, WITHOUT_OWN_LAYERS, refusal

BY_ID: Final = {rule.id: rule for rule in RULES}
GEMMA2: Final[dict[str, Any]] = {"family": "gemma2", "max_position_embeddings": 8192}
ADAPTER: Final[dict[str, Any]] = {"lora__adapter": "some/adapter"}
NGRAM: Final[dict[str, Any]] = {"speculative__method": "ngram"}
MEDUSA: Final[dict[str, Any]] = {"speculative__method": "medusa", "speculative__model": "some/heads"}
EAGLE: Final[dict[str, Any]] = {"speculative__method": "eagle", "speculative__model": "some/head"}
LOOKAHEAD: Final[dict[str, Any]] = {
    "speculative__method": "lookahead",
    "repository__lookahead_window_size": 4,
    "repository__lookahead_ngram_size": 3,
    "repository__lookahead_verification_set_size": 4,
}
DRAFT: Final[dict[str, Any]] = {
    "speculative__method": "draft",
    "speculative__model": "some/model",
    "repository__decoupled": False,
    "repository__enable_kv_cache_reuse": True,
}
HEADS: Final[dict[str, Any]] = {"draft_heads": {"eagle3": ["org/EAGLE3"], "eagle": ["org/EAGLE"]}}
MIXTRAL: Final[dict[str, Any]] = {"family": "mixtral", "num_experts": 8}
QWEN2_VL: Final[dict[str, Any]] = {"family": "qwen2_vl", "images": True, "vocab_size": 152064}
CODE: Final = {"configuration_phi3.py": "0" * 64}
PHI3: Final[dict[str, Any]] = {"family": "phi3", "source": {}, "code": {"files": CODE, "page": "https://hub/phi3"}}


class Example(NamedTuple):
    """A cell that a rule refuses, and one that differs only in what the rule is about, which works."""

    broken: Cell
    good: Cell
    on: Machine
    good_on: Machine | None = None


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", ".", 1): value for key, value in settings.items()}


def cell(precision: str = "fp16", *, lane: str = ENGINES, **settings: Any) -> Cell:
    """A cell of Llama with settings `SECTION__KEY`."""
    return some_cell(precision, toolchain=lane, settings=_dotted(settings))


def on(release: str = "1.2.0", sm: int = 90) -> Machine:
    """A machine on which memory decides nothing but for `TLM604`."""
    return parse(f"tensorrt_llm=={release},sm={sm},gpus=8,gpu_memory_gib=80")


_WITHOUT_SCRIPTS: Final = parse("tensorrt_llm==1.2.0,sm=90,gpus=8,gpu_memory_gib=80,examples=no,model_optimizer=0.47")
TRTLLM_SERVE: Final = {"serve__frontend": "trtllm_serve"}
EXAMPLES: Final[Mapping[str, Example]] = {
    "TLM101": Example(cell(), cell(), on("1.3.0rc21"), on("1.3.0rc20")),
    "TLM102": Example(some_cell(recipe={"family": "mamba"}), cell(), on()),
    "TLM103": Example(cell(lane=PYTORCH), cell(lane=PYTORCH), on("0.21.0"), on("1.0.0")),
    "TLM104": Example(some_cell(recipe={"precisions": ["bf16"]}), cell(), on()),
    "TLM105": Example(
        some_cell(recipe=PHI3),
        some_cell(recipe={**PHI3, "source": {"code": CODE}}),
        on("0.10.0"),
    ),
    "TLM106": Example(
        some_cell("as_is", recipe={"quantization": "awq"}),
        some_cell("as_is", recipe={"quantization": "awq"}),
        on("0.15.0"),
        on("0.16.0"),
    ),
    "TLM107": Example(some_cell(toolchain=PYTORCH, recipe={"family": "llava"}), cell(lane=PYTORCH), on()),
    "TLM108": Example(
        some_cell("bf16", toolchain=PYTORCH, recipe=GEMMA2), some_cell("bf16", recipe=GEMMA2), on("1.2.0")
    ),
    "TLM109": Example(some_cell(recipe={"family": "qwen3"}), cell(), on("0.19.0")),
    "TLM201": Example(cell("nvfp4"), cell("fp8"), on("0.16.0")),
    "TLM202": Example(cell("w4a8_awq"), cell("int4_awq"), on("0.9.0", 89)),
    "TLM203": Example(cell(), cell(), on("0.16.0", 100), on("0.17.0", 100)),
    "TLM204": Example(cell(), cell(), on("0.16.0", 70), on("0.15.0", 70)),
    "TLM205": Example(cell("int4_awq"), cell("nvfp4"), on(sm=100)),
    "TLM206": Example(cell("int8_sq", lane=PYTORCH), cell("int4_awq", lane=PYTORCH), on()),
    "TLM207": Example(cell("w4a8_awq", lane=PYTORCH), cell("nvfp4", lane=PYTORCH), on(sm=120)),
    "TLM208": Example(cell("nvfp4", lane=PYTORCH), cell("nvfp4", lane=PYTORCH), on("1.3.0rc19"), on("1.3.0rc20")),
    "TLM209": Example(cell(quantize__kv_cache_precision="bf16"), cell(quantize__kv_cache_precision="fp16"), on()),
    "TLM301": Example(cell("fp8", quantize__options={"smooth": 1}), cell("fp8"), on()),
    "TLM302": Example(cell("fp8"), cell("fp8"), replace(on("0.10.0"), model_optimizer=None), on("0.10.0")),
    "TLM303": Example(some_cell("fp8", recipe=GEMMA2), some_cell("bf16", recipe=GEMMA2), on("0.13.0")),
    "TLM304": Example(cell("fp8", **{"quantize__calibration.data": "mine.jsonl"}), cell("fp8"), on("0.9.0")),
    "TLM305": Example(
        some_cell("int4_awq", toolchain=PYTORCH, recipe=MIXTRAL),
        some_cell("fp8", toolchain=PYTORCH, recipe=MIXTRAL),
        on(),
    ),
    "TLM401": Example(cell(build__multi_block_mode="enable"), cell(build__remove_input_padding="enable"), on()),
    "TLM402": Example(
        cell(build__context_fmha="disable", build__use_paged_context_fmha="enable"),
        cell(build__context_fmha="disable"),
        on(),
    ),
    "TLM403": Example(
        cell(build__streamingllm="enable", build__use_paged_context_fmha="enable"),
        cell(build__streamingllm="enable"),
        on("1.0.0"),
    ),
    "TLM404": Example(
        cell(build__use_fp8_context_fmha="enable"), cell("fp8", build__use_fp8_context_fmha="enable"), on()
    ),
    "TLM405": Example(
        cell(quantize__kv_cache_precision="int8", build__use_paged_context_fmha="enable"),
        cell(quantize__kv_cache_precision="int8"),
        on(),
    ),
    "TLM406": Example(
        cell(quantize__kv_cache_precision="fp8", build__use_paged_context_fmha="enable"),
        cell(quantize__kv_cache_precision="fp8"),
        on("0.16.0"),
    ),
    "TLM407": Example(
        cell("w4a8_awq", quantize__kv_cache_precision="fp8", build__use_paged_context_fmha="enable"),
        cell("w4a8_awq", quantize__kv_cache_precision="fp8"),
        on("0.16.0"),
    ),
    "TLM408": Example(
        cell(quantize__kv_cache_precision="fp8", build__use_paged_context_fmha="enable"),
        cell(quantize__kv_cache_precision="fp8"),
        on(),
    ),
    "TLM409": Example(
        cell("fp8", build__use_fp8_context_fmha="disable", build__use_paged_context_fmha="enable"),
        cell("fp8", build__use_fp8_context_fmha="disable"),
        on(),
    ),
    "TLM410": Example(cell("fp8", build__use_fp8_context_fmha="disable"), cell("fp8"), on("0.20.0")),
    "TLM411": Example(cell(build__streamingllm="enable"), cell(), on("1.1.0")),
    "TLM412": Example(cell("fp8", build__gemm_swiglu_plugin="fp8"), cell("fp8"), on(sm=100)),
    "TLM501": Example(
        cell(repository__max_beam_width=2), cell(repository__max_beam_width=2, build__max_beam_width=2), on()
    ),
    "TLM502": Example(cell(**TRTLLM_SERVE, serve__options={"max_batch_size": 64}), cell(**TRTLLM_SERVE), on()),
    "TLM503": Example(
        cell(repository__sink_token_length=4),
        cell(repository__sink_token_length=4, build__use_paged_context_fmha="disable"),
        on(),
    ),
    "TLM504": Example(
        cell(quantize__kv_cache_precision="fp8", repository__enable_chunked_context=True),
        cell("fp8", repository__enable_chunked_context=True),
        on(),
    ),
    "TLM505": Example(
        cell(quantize__kv_cache_precision="int8", repository__enable_kv_cache_reuse=True),
        cell(repository__enable_kv_cache_reuse=True),
        on(),
    ),
    "TLM506": Example(
        cell(repository__max_tokens_in_paged_kv_cache=191), cell(repository__max_tokens_in_paged_kv_cache=192), on()
    ),
    "TLM507": Example(
        cell(build__kv_cache_type="continuous"),
        cell(build__kv_cache_type="continuous", repository__batching_strategy="V1"),
        on(),
    ),
    "TLM508": Example(cell(repository__decoding_mode="lookahead"), cell(repository__decoding_mode="top_k"), on()),
    "TLM509": Example(cell(repository__gpu_device_ids=[0, 1]), cell(repository__gpu_device_ids=[1]), on()),
    "TLM510": Example(cell(lane=PYTORCH, build__fast_build=True), cell(lane=PYTORCH), on()),
    "TLM511": Example(
        some_cell(toolchain=PYTORCH, recipe={"images": True}, settings={"perf.images": "1@64x64"}),
        some_cell(
            toolchain=PYTORCH,
            recipe={"images": True},
            settings={"perf.images": "1@64x64", "serve.frontend": "trtllm_serve"},
        ),
        on(),
    ),
    "TLM512": Example(
        some_cell(recipe=QWEN2_VL, settings={"perf.images": "2@224x224"}),
        some_cell(recipe=QWEN2_VL, settings={"perf.images": "1@224x224"}),
        on(),
    ),
    "TLM513": Example(
        some_cell(
            toolchain=PYTORCH,
            recipe={"family": "qwen2_5_vl", "images": True},
            settings={"perf.images": "3@224x224", "serve.frontend": "trtllm_serve"},
        ),
        some_cell(
            toolchain=PYTORCH,
            recipe={"family": "qwen2_5_vl", "images": True},
            settings={"perf.images": "1@224x224", "serve.frontend": "trtllm_serve"},
        ),
        on(),
    ),
    "TLM514": Example(
        cell(lane=PYTORCH, repository__kv_cache_onboard_blocks=True),
        cell(lane=PYTORCH, repository__kv_cache_onboard_blocks=True),
        on("1.3.0rc13"),
        on("1.3.0rc12"),
    ),
    "TLM601": Example(some_cell(tp=16), some_cell(tp=8), on()),
    "TLM602": Example(cell(build__max_num_tokens=64), cell(build__max_num_tokens=128), on()),
    "TLM603": Example(some_cell("bf16", osl=4096, recipe=GEMMA2), some_cell("bf16", osl=3968, recipe=GEMMA2), on()),
    "TLM604": Example(some_cell("fp32", recipe={"parameters": 70_000_000_000}), some_cell("fp32"), on()),
    "TLM605": Example(
        some_cell("fp8", tp=4, ep=4, recipe=MIXTRAL), some_cell("bf16", tp=4, ep=4, recipe=MIXTRAL), on()
    ),
    "TLM606": Example(
        some_cell("int4_awq", tp=2, recipe={"intermediate_size": 14208}),
        some_cell("int4_awq", tp=1, recipe={"intermediate_size": 14208}),
        _WITHOUT_SCRIPTS,
    ),
    "TLM607": Example(cell(check__max_tokens=192), cell(check__max_tokens=191), on()),
    "TLM608": Example(
        some_cell(tp=4, ep=4, dp=4, recipe=MIXTRAL),
        some_cell(tp=4, ep=4, dp=4, recipe=MIXTRAL, toolchain=PYTORCH),
        on(),
    ),
    "TLM701": Example(cell(**NGRAM), cell(lane=PYTORCH, **NGRAM), on()),
    "TLM702": Example(
        cell(lane=PYTORCH, speculative__method="eagle3"),
        cell(lane=PYTORCH, speculative__method="eagle3", speculative__model="some/head"),
        on(),
    ),
    "TLM703": Example(
        cell(lane=PYTORCH, **NGRAM, repository__llm_args={"speculative_config": {"decoding_type": "NGram"}}),
        cell(lane=PYTORCH, **NGRAM, repository__llm_args={"print_iter_log": True}),
        on(),
    ),
    "TLM704": Example(cell(lane=PYTORCH, **ADAPTER), cell(lane=PYTORCH, **ADAPTER, **TRTLLM_SERVE), on("1.3.0rc19")),
    "TLM705": Example(
        cell(lane=PYTORCH, **ADAPTER, **TRTLLM_SERVE, repository__llm_args={"lora_config": {"max_lora_rank": 8}}),
        cell(lane=PYTORCH, **ADAPTER, **TRTLLM_SERVE),
        on(),
    ),
    "TLM706": Example(
        some_cell(toolchain=PYTORCH, settings={"speculative.method": "mtp"}),
        some_cell(toolchain=PYTORCH, recipe={"family": "deepseek_v3"}, settings={"speculative.method": "mtp"}),
        on(),
    ),
    "TLM707": Example(
        cell(lane=PYTORCH, speculative__method="sa"),
        cell(lane=PYTORCH, speculative__method="sa"),
        on(),
        on("1.3.0rc20"),
    ),
    "TLM711": Example(
        cell(**MEDUSA, speculative__num_eagle_layers=4), cell(**EAGLE, speculative__num_eagle_layers=4), on()
    ),
    "TLM712": Example(cell(**EAGLE), cell(**EAGLE), on("0.16.0"), on("0.17.0")),
    "TLM713": Example(cell("int4_awq", **MEDUSA), cell("fp8", **MEDUSA), on()),
    "TLM714": Example(some_cell(pp=2, settings=_dotted(MEDUSA)), some_cell(tp=2, settings=_dotted(MEDUSA)), on()),
    "TLM715": Example(cell(**{**DRAFT, "repository__decoupled": True}), cell(**DRAFT), on()),
    "TLM716": Example(
        cell(**EAGLE, speculative__max_draft_len=257), cell(**EAGLE, speculative__max_draft_len=256), on()
    ),
    "TLM717": Example(cell(**MEDUSA, build__max_num_tokens=256), cell(**MEDUSA, build__max_num_tokens=512), on()),
    "TLM721": Example(cell(**ADAPTER, build__lora_plugin="bfloat16"), cell(**ADAPTER, build__lora_plugin="auto"), on()),
    "TLM722": Example(cell("int8_sq", **ADAPTER), cell("int8_wo", **ADAPTER), on()),
    "TLM723": Example(
        cell(**ADAPTER, repository__enable_kv_cache_reuse=True),
        cell(**ADAPTER, repository__enable_kv_cache_reuse=True),
        on("0.12.0"),
        on("0.13.0"),
    ),
    "TLM724": Example(
        cell("bf16", **ADAPTER, repository__triton_backend="python"),
        cell("fp16", **ADAPTER, repository__triton_backend="python"),
        on(),
    ),
    "TLM725": Example(
        cell(**ADAPTER, build__lora_ckpt_source="nemo"), cell(**ADAPTER, build__lora_ckpt_source="hf"), on()
    ),
    "TLM726": Example(
        cell(lora__adapter={"sql": "a/b", "chat": "a/c"}),
        cell(lora__adapter={"sql": "a/b", "chat": "a/c"}, perf__lora="none"),
        on(),
    ),
    "TLM731": Example(
        cell(lane=PYTORCH, perf__ignore_eos=True),
        cell(lane=PYTORCH, **TRTLLM_SERVE, perf__ignore_eos=True),
        on(),
    ),
    "TLM732": Example(
        cell(lane=PYTORCH, serve__frontend="disaggregated"),
        cell(lane=PYTORCH, serve__frontend="disaggregated"),
        on("1.0.0"),
        on("1.1.0"),
    ),
}


SPECULATION: Final[Sequence[tuple[Cell, str, str | None]]] = (
    # cell, release, what is said of it
    (cell(**NGRAM), "1.2.0", "ngram: engines have no such way to draft"),
    (cell(lane=PYTORCH, **MEDUSA), "1.2.0", "medusa: the PyTorch backend has no such way to draft"),
    (
        cell(speculative__method="medusa"),
        "1.2.0",
        "medusa needs a draft model, but settings.speculative.model is not set",
    ),
    (cell(speculative__method="eagle2"), "1.2.0", "eagle2: Triton's TensorRT-LLM backend has no dynamic trees"),
    (cell(lane=PYTORCH, speculative__method="eagle2"), "1.2.0", "its heads are those of the method eagle"),
    (
        cell(speculative__method="redrafter"),
        "1.2.0",
        "redrafter: the PyTorch backend has none, and no engines are made with examples/redrafter here",
    ),
    (
        some_cell(recipe=HEADS, settings={"speculative.method": "eagle"}),
        "1.2.0",
        "settings.speculative.model is not set; known for model: org/EAGLE",
    ),
    (
        some_cell(recipe=HEADS, settings={"speculative.method": "eagle", "speculative.model": "Org/eagle3@main"}),
        "1.2.0",
        "settings.speculative.model Org/eagle3@main is a head of the method eagle3, this is eagle; known for model: org/EAGLE",
    ),
    (
        some_cell(recipe=HEADS, settings={"speculative.method": "eagle", "speculative.model": "org/EAGLE"}),
        "1.2.0",
        None,
    ),
    (
        some_cell(recipe=HEADS, settings={"speculative.method": "eagle", "speculative.model": "org/other"}),
        "1.2.0",
        None,
    ),
    (
        cell(**MEDUSA, build__max_draft_len=5),
        "1.2.0",
        "settings.build.max_draft_len is already set by settings.speculative",
    ),
    (cell(**MEDUSA, repository__decoding_mode="medusa"), "1.2.0", "settings.repository.decoding_mode is already set"),
    (
        cell("fp8", **MEDUSA, quantize__options={"num_medusa_heads": 3}),
        "1.2.0",
        "options.num_medusa_heads is already set",
    ),
    (cell(**LOOKAHEAD, speculative__max_draft_len=5), "1.2.0", "max_draft_len: lookahead does not use it"),
    (
        cell(speculative__method="lookahead"),
        "1.2.0",
        "method lookahead needs lookahead_window_size, lookahead_ngram_size, loo",
    ),
    (cell(**MEDUSA), "0.9.0", "trtllm-build of TensorRT-LLM 0.9.0 has no such mode"),
    (cell(**MEDUSA), "0.10.0", None),
    (cell(**LOOKAHEAD), "0.10.0", "trtllm-build of TensorRT-LLM 0.10.0 has no such mode"),
    (cell(**LOOKAHEAD), "0.18.2", "lookahead: it is known to be served from TensorRT-LLM 0.19 on, this is 0.18.2"),
    (cell(speculative__method="lookahead"), "0.18.2", "lookahead: it is known to be served from TensorRT-LLM 0.19 on"),
    (cell(**LOOKAHEAD), "0.19.0", None),
    (cell(**LOOKAHEAD, **TRTLLM_SERVE), "0.19.0", "trtllm-serve is known to support it from 0.20 on"),
    (cell(**LOOKAHEAD, **TRTLLM_SERVE), "1.0.0", None),
    (cell(**MEDUSA, **TRTLLM_SERVE), "1.2.0", None),
    (cell(**EAGLE, **TRTLLM_SERVE), "1.2.0", "eagle: trtllm-serve only supports it with PyTorch"),
    (cell(**DRAFT), "0.17.0", "known to be served from TensorRT-LLM 0.18 on"),
    (cell("fp8", **EAGLE), "1.2.0", "documented with fp16, bf16, this is fp8"),
    (cell("bf16", **EAGLE, quantize__kv_cache_precision="fp8"), "1.2.0", "its converter does not quantize the cache"),
    (
        some_cell(recipe={"family": "qwen2"}, settings=_dotted(EAGLE)),
        "1.2.0",
        "heads are converted only with Llama models",
    ),
    (some_cell(recipe={"family": "qwen2"}, settings=_dotted(LOOKAHEAD)), "1.2.0", None),
    (cell("fp8", **MEDUSA), "0.10.0", "its checkpoint needs example scripts of TensorRT-LLM"),
    (some_cell(tp=2, settings=_dotted(DRAFT)), "1.2.0", "two engines are planned on one GPU, this is tp2"),
    (cell(**MEDUSA, build__max_beam_width=4), "1.2.0", "supports one beam, max_beam_width is 4"),
    (
        cell(**EAGLE, **TRTLLM_SERVE, build__kv_cache_type="continuous"),
        "1.2.0",
        "needs a paged KV cache",
    ),
    (cell(**LOOKAHEAD, repository__batching_strategy="V1"), "1.2.0", "inflight_fused_batching, this is V1"),
    (cell(**{**DRAFT, "repository__enable_kv_cache_reuse": False}), "1.2.0", "enable_kv_cache_reuse: true"),
    (cell(**{**LOOKAHEAD, "repository__lookahead_ngram_size": 1}), "1.2.0", "sizes of 4, 1, 4 draft nothing"),
    (cell(**EAGLE, build__use_paged_context_fmha="disable"), "1.2.0", "trtllm-build turns it on for eagle"),
    (some_cell(batch=513, settings=_dotted(EAGLE)), "1.2.0", "eagle supports at most 512 requests"),
    (cell(**LOOKAHEAD, repository__max_tokens_in_paged_kv_cache=206), "1.2.0", "less than a request of 207 tokens"),
)


def test_of_every_recipe_it_is_known_whether_its_model_drafts_by_itself() -> None:
    for path in recipes_folder().glob("*.yaml"):
        recipe = load_recipe(path)
        assert (recipe.family in WITHOUT_OWN_LAYERS) == (recipe.num_nextn_predict_layers is None), path.stem


@pytest.mark.parametrize(
    ("asked", "release", "said"),
    [
        (
            cell(),
            "1.4.0rc0",
            "builds engines; the toolchain tensorrt_llm_pytorch serves the model without; trtllm-build",
        ),
        (
            cell("int8_wo"),
            "1.4.0rc0",
            "the toolchain tensorrt_llm_pytorch serves the model in fp16, bf16, fp8, int4_awq, w4a8",
        ),
        (
            cell(),
            "0.5.0",
            "engines are built this way from 0.8 on; trtllm-build is part of the package from 0.8 to 1.3.0rc20",
        ),
        (
            cell("int8_wo", lane=PYTORCH),
            "1.4.0rc0",
            "use one of these, or engines (the toolchain tensorrt_llm, to 1.3.0rc20)",
        ),
        (
            some_cell("as_is", recipe={"family": "deepseek_v3", "quantization": "fp8_block"}),
            "1.2.0",
            (
                "no known script of TensorRT-LLM converts it to an engine; the toolchain tensorrt_llm_pytorch serves the model "
                "without"
            ),
        ),
        (some_cell(recipe={"family": "mamba"}), "0.12.0", "to an engine; known families: llama, "),
    ],
)
def test_what_engines_do_not_do_comes_with_what_works(asked: Cell, release: str, said: str) -> None:
    assert said in str(infeasible(asked, on(release)))


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (
            1,
            "disaggregated: 2 servers need 2 GPUs, this machine has 1; settings.serve.frontend: trtllm_serve is one server",
        ),
        (2, None),
    ],
)
def test_disaggregated_servers_on_one_gpu_have_one_server_as_the_way_on(gpus: int, said: str | None) -> None:
    machine = parse(f"tensorrt_llm==1.2.0,sm=90,gpus={gpus},gpu_memory_gib=80")
    told = infeasible(cell(lane=PYTORCH, serve__frontend="disaggregated"), machine)
    assert told is None if said is None else said in str(told)
    wide = some_cell(toolchain=PYTORCH, tp=2, settings={"serve.frontend": "disaggregated"})
    assert gpus < 2 or "need 4 GPUs, this machine has 2; a smaller tp or pp needs fewer" in str(
        infeasible(wide, machine)
    )


def test_a_gpu_that_both_backends_dropped_is_refused_by_both() -> None:
    assert "SM 70: TensorRT-LLM does not support it" in str(infeasible(cell(lane=PYTORCH), on("1.2.0", 70)))
    assert infeasible(cell(lane=PYTORCH), on("1.2.0", 80)) is None


@pytest.mark.parametrize(("asked", "release", "words"), SPECULATION, ids=lambda value: str(value)[:60])
def test_speculation_with_engines_works_where_the_release_has_it(asked: Cell, release: str, words: str | None) -> None:
    said = infeasible(asked, on(release))
    assert said is None if words is None else words in str(said), said


@pytest.mark.parametrize(
    ("lane", "release", "frontend", "words"),
    [
        (ENGINES, "0.8.0", "triton", "engines accept adapters in requests from 0.10 on"),
        (ENGINES, "0.9.0", "triton", "engines accept adapters in requests from 0.10 on"),
        (ENGINES, "0.10.0", "triton", None),
        (ENGINES, "1.3.0rc20", "triton", None),
        (ENGINES, "1.0.0", "triton_openai", "cannot send an adapter to an engine"),
        (ENGINES, "0.21.0", "trtllm_serve", "trtllm-serve accepts lora_request from 1.0 on"),
        (ENGINES, "1.0.0", "trtllm_serve", None),
        (PYTORCH, "1.0.0", "trtllm_serve", None),
        (PYTORCH, "1.3.0rc19", "triton", "is known to have one from 1.3.0rc20 on"),
        (PYTORCH, "1.3.0", "triton", None),
    ],
)
def test_where_adapters_can_be_asked_for(lane: str, release: str, frontend: str, words: str | None) -> None:
    said = infeasible(cell(lane=lane, **ADAPTER, serve__frontend=frontend), on(release))
    assert said is None if words is None else words in str(said), said


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"build.weight_streaming": True, "repository.gpu_weights_percent": 0.3}, True),
        ({"build.weight_streaming": True, "repository.gpu_weights_percent": 0.9}, False),
        ({"build.weight_streaming": True}, False),
        ({"repository.gpu_weights_percent": 0.3}, False),
        (
            {
                "build.weight_streaming": True,
                "repository.gpu_weights_percent": 0.3,
                "serve.frontend": "trtllm_serve",
            },
            False,
        ),
    ],
)
def test_of_weights_that_are_streamed_only_the_share_that_stays_must_fit(
    settings: Mapping[str, Any], *, fits: bool
) -> None:
    """140 GB of weights on 80 GiB."""
    asked = some_cell(recipe={"parameters": 70_000_000_000}, settings=settings)
    found = refusal(asked, on("0.19.0"))
    assert (found is None) is fits, found


def test_every_rule_has_an_example_and_words() -> None:
    assert list(EXAMPLES) == [rule.id for rule in RULES] == sorted({rule.id for rule in RULES})
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.what and rule.source and rule.toolchains for rule in RULES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_finds_its_example_and_nothing_is_wrong_with_the_other(name: str) -> None:
    example = EXAMPLES[name]
    found = refusal(example.broken, example.on)
    assert found is not None
    assert found[0].id == name, found
    said = infeasible(example.broken, example.on)
    if (
        found[0].toolchains == (PYTORCH,) or name != "TLM103"
    ):  # a backend that is missing at all says so in words of its own
        assert said is not None
    assert infeasible(example.good, example.good_on or example.on) is None


# ----------------------------------------------------------------------------------------------- against the facts

RELEASES: Final = (
    *("0.8.0", "0.9.0", "0.10.0", "0.11.0", "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0", "0.17.0", "0.18.2"),
    *("0.19.0", "0.20.0", "0.21.0", "1.0.0", "1.1.0", "1.2.0", "1.3.0rc3", "1.3.0rc20", "1.3.0rc21", "1.3.0"),
)
TYPICAL: Final = ("0.8.0", "0.12.0", "0.20.0", "1.0.0", "1.3.0")
GPUS: Final = (80, 89, 90, 100, 120)
LAYOUTS: Final = ((1, 1), (4, 2))
VARIED: Final = "llama of no recipe"
"""Of whose precisions nothing is known, so that they all are tried."""
CACHES: Final = (None, "fp8", "int8")
VARIANTS: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {"repository.enable_chunked_context": True},
    {"repository.sink_token_length": 4},
    {"repository.max_beam_width": 4},
    {"repository.max_tokens_in_paged_kv_cache": 1000},
    {"build.context_fmha": "disable"},
    {"build.context_fmha": "disable", "build.use_paged_context_fmha": "enable"},
    {"build.streamingllm": "enable", "build.use_paged_context_fmha": "enable"},
    {"build.use_fp8_context_fmha": "disable", "build.use_paged_context_fmha": "enable"},
    {"build.streamingllm": "enable"},
    {"build.use_paged_context_fmha": "enable"},
    {"build.use_paged_context_fmha": "disable"},
    {"build.use_fp8_context_fmha": "enable"},
    {"build.use_fp8_context_fmha": "disable"},
    {"lora.adapter": "some/adapter", "build.max_lora_rank": 8, "build.lora_target_modules": ["attn_q"]},
)
"""Settings that decide between what works and what does not."""


@lru_cache(maxsize=1)
def recipes() -> dict[str, dict[str, Any]]:
    """A shipped recipe of each family and set of precisions: no refusal depends on more of it. And a model without one."""
    found = {path.stem: load_recipe(path).model_dump(mode="json") for path in sorted(recipes_folder().glob("*.yaml"))}
    for recipe in found.values():
        recipe["source"] = recipe["sources"][0]
    known = {
        (recipe["family"], str(recipe["precisions"])): (name, recipe)
        for name, recipe in found.items()
        if set(recipe["precisions"] or {}) - {"embedded"}
    }
    free = {**found["llama-3.1-8b-instruct"], "precisions": None, "releases": {}, "precision_releases": {}}
    return {VARIED: free} | dict(known.values())


@lru_cache(maxsize=32)
def settings(variant: int, cache: str | None) -> dict[str, Any]:
    return settings_of({**VARIANTS[variant], "quantize.kv_cache_precision": cache})


def cells(lane: str) -> Iterator[Cell]:
    """All recipes, precisions and layouts; caches and other settings with one recipe on one GPU."""
    for model, recipe in recipes().items():
        for precision in PRECISIONS:
            points = [(layout, None, 0) for layout in LAYOUTS]
            if model == VARIED:
                points += [((1, 1), cache, number) for cache in CACHES for number in range(len(VARIANTS))][1:]
            for (tp, pp), cache, number in points:
                # The PyTorch backend has none of the builder's switches.
                if lane == PYTORCH and any(name.startswith("build.") for name in VARIANTS[number]):
                    continue
                yield Cell(
                    id=CellId(f"{model}/{precision}/tp{tp}pp{pp}/{cache}/{number}"),
                    model=model,
                    toolchain=lane,
                    precision=precision,
                    tp=tp,
                    pp=pp,
                    max_batch_size=8,
                    isl=4096 if recipe["family"] == "gemma2" else 1024,
                    osl=1024,
                    recipe=recipe,
                    settings=settings(number, cache),
                )


def _of_theirs(argvs: Sequence[Sequence[str]], params: Any) -> dict[str, str]:
    """Options of the one command line that is a program of TensorRT-LLM; of our worker, what it is told of the cache."""
    for argv in argvs:
        if {Path(word).name for word in argv} & {"quantize.py", "trtllm-build"}:
            return values(list(argv))
    cache = params.kv_cache_precision
    return {} if cache == "none" else {"--kv_cache_dtype": cache}


def refused_by_facts(cell: Cell, commands: Mapping[str, dict[str, str]], release: str, sm: int) -> Iterator[str]:
    """What the programs of a release would say to a cell's command lines: read from those, and from nothing of ours."""
    seen: dict[str, Any] = {
        "sm": sm,
        "precision": cell.precision,
        "family": cell.recipe["family"],
        "tokens": cell.isl + cell.osl,
    }
    for row in refusals.of("none", release):
        if row["lane"] == cell.toolchain and refusals.met(row, seen):
            yield f"{row['rule']}: {refusals.words(row, seen)}"
    if cell.toolchain != ENGINES:
        return
    quantize, build = commands.get("quantize", {}), commands["build"]
    cache = quantize.get("--kv_cache_dtype")
    if "--qformat" in quantize:
        architecture = {"gemma2": "Gemma2ForCausalLM"}.get(str(cell.recipe["family"]))
        facts = {"architecture": architecture, "calibrates": True, "dataset_known": "--calib_dataset" not in quantize}
        yield from (said for _, said in refusals.applied(refusals.of("quantize.py", release), facts))
    algorithm = ALGORITHMS.get(cell.precision)
    plugins = {name.lstrip("-"): value for name, value in build.items()}
    attention = refusals.attention_facts(plugins)
    facts = {
        "sm": sm,
        "quant_algo": algorithm,
        "quantized": algorithm is not None,
        "fp8_inputs": algorithm in {"FP8", "W4A8_AWQ", "NVFP4"},
        "kv_cache": cache.upper() if cache else None,
        "lora_plugin": plugins.get("lora_plugin"),
        **attention,
    }
    asked = cell.settings["build"]
    for row, said in refusals.applied(refusals.of("trtllm-build", release), facts):
        turned = row["does"] if isinstance(row["does"], dict) else {}
        # What we write out ourselves the builder may turn off; what a matrix asks for it may not.
        if row["does"] == "refuses" or any(asked.get(name) is not None for name in turned):
            yield f"{row['rule']}: {said}"
    repository = cell.settings["repository"]
    names = ("max_beam_width", "sink_token_length", "max_tokens_in_paged_kv_cache", "enable_chunked_context")
    facts |= {name: repository[name] for name in names}
    facts |= {"engine_max_beam_width": int(plugins.get("max_beam_width", 1)), "engine_max_seq_len": cell.isl + cell.osl}
    yield from (f"{row['rule']}: {said}" for row, said in refusals.applied(refusals.of("tensorrtllm", release), facts))


@pytest.mark.parametrize("lane", [ENGINES, PYTORCH])
@pytest.mark.parametrize(
    "release", [pytest.param(each, marks=() if each in TYPICAL else pytest.mark.nightly) for each in RELEASES]
)
def test_no_planned_cell_is_refused_by_the_release(release: str, lane: str) -> None:
    toolchain, wrong, planned_cells = toolchains.load(lane), [], 0
    last = "build" if lane == ENGINES else "download"
    for sm in GPUS:
        # Enough of everything, so that nothing but the rules in question decides.
        machine = parse(f"tensorrt_llm=={release},sm={sm},gpus=8,gpu_memory_gib=640")
        if toolchain.missing(machine) is not None:
            continue
        works = [each for each in cells(lane) if toolchain.infeasible(each, machine) is None]
        planned_cells += len(works)
        # Options do not depend on the layout, so one of each is enough to look at.
        works = list({each.id.replace(f"/tp{each.tp}pp{each.pp}", ""): each for each in works}.values())
        planned = make_plan(
            works, {lane: toolchain}, machine, digest=lambda _path, _cell: (str(default_set()), "c"), until=last
        )
        lines: dict[str, tuple[str, dict[str, str]]] = {}
        for name, run in planned.stage_runs.items():
            if run.stage.name in {"quantize", "build"} and lane == ENGINES:
                argvs = command_lines(run, {each: f"/{each}" for each in run.inputs}, "/attempt", machine)
                lines[name] = run.stage.name, _of_theirs(argvs, run.params)
        for each in works:
            commands = dict(lines[run] for run in planned.by_cell[each.id] if run in lines)
            wrong += [f"{each.id} on SM {sm}: {said}" for said in refused_by_facts(each, commands, release, sm)]
    assert wrong == []
    known = {ENGINES: on(release).tensorrt_llm.build is not None, PYTORCH: release.startswith("1.")}
    assert (planned_cells > 100) is known[lane], planned_cells


def test_the_facts_are_of_rules_that_hold_then() -> None:
    for program, rows in refusals.recorded().items():
        for row in rows:
            if row["rule"] is None:
                continue
            spans = [release for release in RELEASES if row in refusals.of(program, release)]
            assert all(BY_ID[row["rule"]].holds_in(release) for release in spans), row


# ------------------------------------------------------------------------------------------------ by the stand-ins

MADE_OF: Final = {
    # facts that stand-ins work out, and what they work them out of
    "fp8_inputs": {True: "FP8", False: "W8A16"},
    "quantized": {True: "FP8", False: None},
}


@pytest.mark.parametrize("row", refusals.recorded()["trtllm-build"], ids=lambda row: f"{row['rule']}-{row['since']}")
def test_the_builder_s_stand_in_refuses_as_recorded(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted: dict[str, Any] = {
        name: value[0] if isinstance(value, list) else value for name, value in row["when"].items()
    }
    sm = wanted.get("sm", 90)
    if isinstance(sm, dict):
        sm = sm.get("least") or sm["below"] - 1
    algorithm = wanted.get("quant_algo")
    for name, made_of in MADE_OF.items():
        if name in wanted:
            algorithm = made_of[wanted[name]]
    plugins: dict[str, Any] = {
        name: "fp8" if isinstance(value, dict) else "enable" if value else "disable"
        for name, value in wanted.items()
        if name not in {"sm", "quant_algo", "kv_cache", *MADE_OF}
    }
    # Alone: a row before it may have words of its own for the same.
    work = Work("trtllm-build", tmp_path, {"gpus": [{"sm": sm}], "refusals": {"trtllm-build": [row]}})
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": wanted.get("kv_cache")}
    words = refusals.words(row, {"sm": sm})
    if row["does"] == "refuses":
        with pytest.raises(ProgramError) as refused:
            build.check(work, {"quantization": quantization}, plugins)
        assert str(refused.value) == words
    else:
        build.check(work, {"quantization": quantization}, plugins)
        assert words in capsys.readouterr().err
        assert {name: plugins[name] for name in row["does"]} == {
            name: "enable" if on else "disable" for name, on in row["does"].items()
        }
    build.check(
        replace(work, facts={**work.facts, "refusals": {"trtllm-build": []}}), {"quantization": quantization}, {}
    )


@pytest.mark.parametrize(
    ("code", "trusted", "said"),
    [
        (None, {}, "and its hub, which has the files' SHA-256, cannot be reached now"),
        (None, {"a.py": "0" * 64}, None),
        ({}, {}, "but https://hub/m has no Python file; use another copy of the model"),
        ({"a.py": "0" * 64, "b.py": "1" * 64}, {}, "which is not trusted yet"),
        ({"a.py": "0" * 64, "b.py": "1" * 64}, {"a.py": "0" * 64}, None),
        ({"a.py": "0" * 64}, {"a.py": "1" * 64}, "and a.py is not the file that settings.download.trust_remote_code"),
        ({"a.py": "0" * 64}, {"a.py": "0" * 64, "b.py": "1" * 64}, "and b.py is not the file that"),
    ],
)
def test_code_is_trusted_file_by_file(code: dict[str, str] | None, trusted: dict[str, str], said: str | None) -> None:
    """InternLM2, which no transformers has."""
    found = None if code is None else {"files": code, "page": "https://hub/m"}
    recipe = {"family": "internlm2", "source": {"code": trusted}, "code": found}
    refused = infeasible(some_cell(recipe=recipe), on())
    assert (refused is None) == (said is None), refused
    assert said is None or f"Python code of the model's repository loads it, {said}" in str(refused)
    assert said is None or not code or all(f"{name}: '{digest}'" in str(refused) for name, digest in code.items())


def test_a_draft_model_that_only_code_loads_is_refused() -> None:
    assert infeasible(some_cell(recipe={"family": "internlm2", "source": {}}), on()) is not None


def test_engines_read_a_shared_expert_as_model_optimizer_names_it_since_a_release() -> None:
    mixture = some_cell("fp8", recipe={"family": "qwen2_moe", "num_experts": 60})
    said = {
        release: infeasible(mixture, parse(f"tensorrt_llm=={release},sm=90,gpus=8,gpu_memory_gib=80,examples=no"))
        for release in ("0.19.0", "0.20.0")
    }
    assert "from 0.20 on, this is 0.19.0" in str(said["0.19.0"])
    assert said["0.20.0"] is None


def test_model_optimizer_deals_no_experts_either() -> None:
    """Its checkpoint would be refused when it is made."""
    refused = infeasible(some_cell("bf16", tp=4, ep=4, recipe=MIXTRAL), _WITHOUT_SCRIPTS)
    assert refused is not None
    assert "Model Optimizer, which creates bf16 here, splits each expert over all GPUs of tp" in refused
    assert infeasible(some_cell("bf16", tp=4, recipe=MIXTRAL), _WITHOUT_SCRIPTS) is None
