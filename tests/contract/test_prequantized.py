"""`precision: as_is`: weights that are quantized already, planned by what their files or their recipe say of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.helpers import trtllm_cells
from tests.helpers.trtllm_cells import ENGINES, PYTORCH, cell, commands, infeasible, plan, stage_run, stages, values
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.base.errors import DownloadError, FailureClass, StageError
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.models.files.quantization import FORMS, QuantizedWeights
from trtllm_pipeline.models.hub import peek, sources
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.plan_file import axes
from trtllm_pipeline.orchestrate.plan.planner import Request
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.stage.params import key
from trtllm_pipeline.tensorrt.toolchains import catalog as toolchains
from trtllm_pipeline.tensorrt.toolchains.model_shape import computed
from trtllm_pipeline.tensorrt.trtllm import checkpoint, prequantized
from trtllm_pipeline.tensorrt.trtllm.params import Checkpoint

REACHED: Final = {"hugging_face": "some/model", "revision": "a" * 40}


def on(release: str, sm: int = 90) -> Machine:
    return parse(f"tensorrt_llm=={release},sm={sm},gpus=8,gpu_memory_gib=80")


def as_is(form: str | None, lane: str = PYTORCH, family: str = "llama", **settings: Any) -> Cell:
    return cell("as_is", toolchain=lane, recipe={"quantization": form, "family": family}, settings=settings)


# (lane, form, family, release, SM) that work, and beside each the nearest one that does not.
WORKS: Final = [
    (PYTORCH, "fp8", "llama", "1.0.0", 89),
    (PYTORCH, "fp8_block", "deepseek_v3", "1.0.0", 90),
    (PYTORCH, "fp8_block", "deepseek_v3", "1.0.0", 103),
    (PYTORCH, "nvfp4", "llama", "1.0.0", 100),
    (PYTORCH, "nvfp4", "llama", "1.3.0rc20", 90),
    (PYTORCH, "mxfp4", "gpt_oss", "1.1.0", 90),
    (PYTORCH, "mxfp4", "gpt_oss", "1.1.0", 120),
    (PYTORCH, "int4_awq", "llama", "1.0.0", 80),
    (PYTORCH, "nvfp4", "llama", "1.3.0rc29", 89),
    (PYTORCH, "int4_awq", "llama", "1.2.1", 103),
    (PYTORCH, "mixed", "llama", "1.2.0", 90),
    (PYTORCH, "mixed_nvfp4", "llama", "1.2.0", 100),
    (PYTORCH, "mixed_nvfp4", "llama", "1.3.0rc29", 89),
    (ENGINES, "fp8", "llama", "0.13.0", 89),
    (ENGINES, "awq", "llama", "0.16.0", 80),
    (ENGINES, "gptq", "mistral", "0.16.0", 80),
    (ENGINES, "awq", "qwen2", "0.16.0", 80),
    (ENGINES, "gptq", "qwen2", "0.17.0", 80),
    (ENGINES, "fbgemm_fp8", "llama", "0.15.0", 90),
]
FAILS: Final = [
    (PYTORCH, "fp8", "llama", "1.0.0", 80, "precision as_is (fp8) needs SM 89"),
    (PYTORCH, "fp8_block", "deepseek_v3", "1.0.0", 89, "works on SM 90 and 100 to 119"),
    (PYTORCH, "fp8_block", "deepseek_v3", "1.0.0", 120, "works on SM 90 and 100 to 119"),
    (PYTORCH, "nvfp4", "llama", "1.2.0", 90, "precision as_is (nvfp4) needs SM 100"),
    (PYTORCH, "nvfp4", "llama", "1.3.0rc20", 89, "precision as_is (nvfp4) needs SM 90"),
    (PYTORCH, "mixed_nvfp4", "llama", "1.2.0", 90, "precision as_is (mixed_nvfp4) needs SM 100"),
    (PYTORCH, "mxfp4", "gpt_oss", "1.0.0", 90, "from 1.1 on, this is 1.0.0"),
    (PYTORCH, "mxfp4", "gpt_oss", "1.1.0", 89, "needs SM 90"),
    (PYTORCH, "int4_awq", "llama", "1.0.0", 100, "on SM 100 from 1.2.1 on, this is 1.0.0"),
    (PYTORCH, "int4_awq", "llama", "1.2.1", 120, "does not support it on SM 120"),
    (PYTORCH, "awq", "qwen2", "1.2.0", 90, "weights of Model Optimizer"),
    (PYTORCH, "gptq", "qwen2", "1.2.0", 90, "weights of Model Optimizer"),
    (PYTORCH, "gptq", "qwen2", "1.4.0rc1", 90, "pull request 19442, open in September 2026"),
    (PYTORCH, "compressed-tensors", "llama", "1.2.0", 90, "weights of Model Optimizer"),
    (PYTORCH, "fp8", "llama", "0.21.0", 90, "PyTorch backend is a preview before 1.0"),
    (ENGINES, "fp8", "llama", "0.12.0", 90, "converts it for llama from 0.13 on"),
    (ENGINES, "fp8", "qwen2", "1.0.0", 90, "no known script of TensorRT-LLM converts such weights of qwen2"),
    (ENGINES, "awq", "llama", "0.15.0", 90, "from 0.16 on"),
    (ENGINES, "awq", "mixtral", "1.0.0", 90, "such weights of mixtral"),
    (ENGINES, "awq", "llama", "1.2.0", 100, "precision as_is (awq): TensorRT-LLM refuses it on SM 100"),
    (ENGINES, "gptq_desc_act", "llama", "1.0.0", 90, "such weights of llama"),
    (ENGINES, "nvfp4", "llama", "1.2.0", 100, "such weights of llama"),
    (ENGINES, "mxfp4", "gpt_oss", "1.2.0", 100, "no known script of TensorRT-LLM converts it"),
]


CONVERTS: Final = "the toolchain tensorrt_llm converts it"
QUANTIZES: Final = "precision int4_awq creates weights of that size from the unquantized model"


@pytest.mark.parametrize(
    ("form", "family", "release", "experts", "said"),
    [
        ("awq", "qwen2", "1.2.0", None, {CONVERTS, QUANTIZES}),
        ("gptq", "llama", "1.3.0rc20", None, {CONVERTS, QUANTIZES}),
        ("gptq", "llama", "1.3.0rc21", None, {QUANTIZES}),
        ("gptq", "mixtral", "1.2.0", 8, set()),
        ("compressed-tensors", "llama", "1.2.0", None, set()),
    ],
)
def test_what_pytorch_does_not_read_comes_with_what_does(
    form: str, family: str, release: str, experts: int | None, said: set[str]
) -> None:
    recipe = {"quantization": form, "family": family, "num_experts": experts}
    told = str(infeasible(cell("as_is", toolchain=PYTORCH, recipe=recipe), on(release)))
    assert {words for words in (CONVERTS, QUANTIZES) if words in told} == said


@pytest.mark.parametrize(("lane", "form", "family", "release", "sm"), WORKS)
def test_what_a_release_reads_is_planned_without_quantizing(
    lane: str, form: str, family: str, release: str, sm: int
) -> None:
    asked = as_is(form, lane, family)
    made = stages(plan(asked, on=on(release, sm)), asked)
    assert "quantize" not in made
    assert ("convert" in made) is (lane == ENGINES)
    assert axes(asked)["precision"] == f"as_is ({form})"
    assert "/as_is/" in asked.id


@pytest.mark.parametrize(("lane", "form", "family", "release", "sm", "said"), FAILS)
def test_what_it_does_not_read_is_refused(lane: str, form: str, family: str, release: str, sm: int, said: str) -> None:
    assert said in str(infeasible(as_is(form, lane, family), on(release, sm)))


def test_every_form_is_known_to_work_somewhere_or_is_refused_everywhere() -> None:
    assert {form for _, form, *_ in WORKS} | {"w4a8_awq"} == set(prequantized.FORMS)
    assert set(FORMS) == {*prequantized.FORMS, "gptq_desc_act"}


def test_the_cache_is_not_quantized_beside_weights_that_are_taken_as_they_are() -> None:
    asked = as_is("fp8", **{"quantize.kv_cache_precision": "fp8"})
    assert "the files also define the cache" in str(infeasible(asked, on("1.0.0")))


@pytest.mark.parametrize(
    ("form", "cache"),
    [("fp8", "fp8"), ("nvfp4", "fp8"), ("mixed", "fp8"), ("fp8_block", "16-bit"), ("int4_awq", "16-bit")],
)
def test_the_cache_is_fp8_beside_weights_of_model_optimizer_and_not_beside_blocks(form: str, cache: str) -> None:
    """`load_hf_quant_config` of the runtime sets only the algorithm of weights in blocks (DeepSeek V3)."""
    assert toolchains.load(PYTORCH).numerics(as_is(form)).kv_cache == cache


@pytest.mark.parametrize(
    ("form", "switch", "gemm"), [("fp8", "--use_fp8", "disable"), ("awq", None, "float16"), ("gptq", None, "float16")]
)
def test_engines_convert_what_the_model_is_and_build_for_it(form: str, switch: str | None, gemm: str) -> None:
    planned = plan(as_is(form, ENGINES), on=on("1.0.0"))
    converted, *_ = commands(planned, "convert")
    assert ("--use_fp8" in converted) is (switch is not None)
    assert "--use_weight_only" not in converted
    built, *_ = commands(planned, "build")
    assert values(built)["--gemm_plugin"] == gemm
    assert stage_run(planned, "convert").params.quantization == form


def test_a_converted_checkpoint_is_what_the_model_was(tmp_path: Path) -> None:
    asked = Checkpoint(precision="int4_awq", quantization="awq", family="llama")
    checkpoint.check_precision(tmp_path, {"quant_algo": "W4A16_GPTQ"}, asked)
    with pytest.raises(StageError, match="quant_algo is None, expected W4A16_GPTQ"):
        checkpoint.check_precision(tmp_path, {}, asked)


def test_keys_of_weights_that_we_quantize_do_not_know_of_others() -> None:
    assert "quantization" not in key(Checkpoint(precision="fp8", family="llama"))
    assert key(Checkpoint(precision="fp8", quantization="fp8", family="llama"))["quantization"] == "fp8"


def test_weights_count_with_the_size_they_have() -> None:
    big = {"parameters": 116_829_156_672, "quantization": "mxfp4", "family": "gpt_oss"}
    assert infeasible(cell("as_is", toolchain=PYTORCH, recipe=big), on("1.1.0")) is None
    assert "GiB on each GPU" in str(
        infeasible(cell("bf16", toolchain=PYTORCH, recipe={**big, "quantization": None}), on("1.1.0"))
    )


@pytest.mark.parametrize(
    ("form", "size"),
    [
        *((None, "bf16"), ("gptq", "int4_awq"), ("gptq_desc_act", "int4_awq"), ("compressed-tensors", "int4_awq")),
        *(("fp8 without blocks of 128 x 128", "fp8"), ("gptq of 8 bits", "fp8")),
    ],
)
def test_a_form_without_a_name_counts_with_the_least_it_can_have(form: str | None, size: str) -> None:
    assert computed(cell("as_is", recipe={"quantization": form})) == size


# ------------------------------------------------------------------------------------- from a matrix, by what hubs say

RECIPE: Final[Mapping[str, Any]] = {
    "name": "mine",
    "summary": "A model",
    "license": "MIT",
    "sources": [{"hugging_face": "some/model"}],
    **{name: value for name, value in trtllm_cells.RECIPE.items() if name not in {"source", "parameters"}},
}
Planned = Callable[..., Cell]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    def planned(
        precision: str,
        *,
        stated: str | None,
        found: QuantizedWeights | None,
        reached: bool = True,
        gpu_memory_gib: int = 80,
    ) -> Cell:
        def unreached(*_args: object, **_options: object) -> Any:
            raise DownloadError("no hub", failure=FailureClass.TRANSIENT)

        monkeypatch.setattr(sources, "resolve", (lambda *_a, **_o: REACHED) if reached else unreached)
        monkeypatch.setattr(sources, "content_of", lambda *_a, **_o: None)
        monkeypatch.setattr(peek, "quantized", (lambda *_a, **_o: found) if reached else unreached)
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**RECIPE, **({"quantization": stated} if stated else {})}))
        axes = {"model": ["mine"], "precision": [precision], "max_batch_size": [4], "lengths": ["128,64"]}
        (tmp_path / "matrix.yaml").write_text(
            yaml.safe_dump({"name": "matrix", "axes": {**axes, "toolchain": [PYTORCH]}})
        )
        (one,) = planner.plan_of(
            Request(tmp_path / "matrix.yaml", assume=f"tensorrt_llm==1.0.0,sm=90,gpus=1,{gpu_memory_gib=}"),
            None,
            guess=True,
        ).cells
        return one

    return planned


FP8: Final = QuantizedWeights("fp8", "FP8 by its hf_quant_config.json")
AWQ: Final = QuantizedWeights("awq", "awq by its config.json")


def test_files_say_what_the_precision_is(planned: Planned) -> None:
    found = planned("as_is", stated=None, found=FP8)
    assert found.reason is None
    assert axes(found)["precision"] == "as_is (fp8)"


def test_a_form_that_only_files_tell_of_has_its_own_size(planned: Planned) -> None:
    of_4_bits = QuantizedWeights("int4_awq", "INT4 AWQ by its hf_quant_config.json")
    assert planned("as_is", stated=None, found=of_4_bits, gpu_memory_gib=10).reason is None
    assert "GiB" in str(planned("as_is", stated=None, found=of_4_bits, gpu_memory_gib=3).reason)
    assert "GiB" in str(planned("bf16", stated=None, found=None, gpu_memory_gib=10).reason)


def test_a_form_that_only_files_tell_of_is_judged_too(planned: Planned) -> None:
    assert "reads FP8, NVFP4 and AWQ weights of Model Optimizer" in str(planned("as_is", stated=None, found=AWQ).reason)


@pytest.mark.parametrize(
    ("precision", "stated", "found", "reached", "said"),
    [
        ("fp16", "fp8", None, False, "already quantized (fp8): use precision as_is"),
        ("fp8", None, FP8, True, "Use precision as_is"),
        ("as_is", None, None, True, "have no quantized weights"),
        ("as_is", "fp8", None, True, "have no quantized weights"),
        ("as_is", "nvfp4", FP8, True, "nvfp4) needs SM 100"),
        (
            "as_is",
            "int4_awq",
            FP8,
            True,
            "has quantization int4_awq, but the model has FP8 by its hf_quant_config.json",
        ),
        ("as_is", None, None, False, "Set `quantization` in its recipe"),
    ],
)
def test_recipes_and_files_must_agree(
    planned: Planned, precision: str, stated: str | None, found: QuantizedWeights | None, reached: bool, said: str
) -> None:
    assert said in str(planned(precision, stated=stated, found=found, reached=reached).reason)


def test_without_a_hub_the_recipe_says_it(planned: Planned) -> None:
    found = planned("as_is", stated="fp8", found=None, reached=False)
    assert found.reason is None
    assert axes(found)["precision"] == "as_is (fp8)"


@pytest.mark.parametrize(
    ("config", "said"),
    [({}, "weights that are not quantized, expected fp8"), ({"quant_algo": "NVFP4"}, r"nvfp4 \(NVFP4 by its hf_quant")],
)
def test_the_download_checks_what_was_planned(tmp_path: Path, config: Mapping[str, str], said: str) -> None:
    from trtllm_pipeline.tensorrt.stage import download

    (tmp_path / "config.json").write_text("{}")
    if config:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
    with pytest.raises(DownloadError, match=said):
        download._check_quantization(tmp_path, "fp8")


def test_the_table_of_cells_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**RECIPE, "quantization": "fp8"}))
    axes = {"model": ["mine"], "precision": ["as_is"], "max_batch_size": [4], "lengths": ["128,64"]}
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump({"name": "matrix", "axes": axes}))
    assert main(["matrix", "show", str(tmp_path / "matrix.yaml"), "--toolchain", PYTORCH, "--format", "json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["cells"]
    assert (shown["precision"], shown["id"]) == ("as_is (fp8)", "mine/as_is/tp1pp1/bs4/isl128-osl64")
