"""A stage run hangs on the files of a model that its stage reads, and on no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from tests.helpers.trtllm_cells import PYTORCH, RECIPE, cell, plan
from trtllm_pipeline.base.domain import Cell
from trtllm_pipeline.models.files.model_parts import ModelPart, files_of, part_of
from trtllm_pipeline.models.hub.files import described, is_licence
from trtllm_pipeline.orchestrate.plan.plan import Plan, part
from trtllm_pipeline.tensorrt.toolchains import companions
from trtllm_pipeline.tensorrt.toolchains.catalog import EMBEDDED

FILES: Final = {
    ModelPart.WEIGHTS: ("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
    ModelPart.CONFIG: ("config.json", "hf_quant_config.json"),
    ModelPart.TOKENIZER: ("tokenizer.json", "tokenizer_config.json", "merges.txt"),
    ModelPart.CHAT_TEMPLATE: ("chat_template.jinja",),
    ModelPart.GENERATION_CONFIG: ("generation_config.json",),
    ModelPart.PROCESSOR: ("preprocessor_config.json",),
    ModelPart.OTHER: ("modeling_llama.py", "something.new"),
}
MODEL: Final = {name: f"{number:064x}" for number, name in enumerate(sorted(sum(FILES.values(), ())))}
SERVED: Final = {"repository", "launch", "smoke", "perf", "accuracy"}
"""What a server is started from is a directory that it sees whole, and all that is asked of it is asked of that."""
ALL: Final = frozenset(ModelPart)
CONVERTED: Final = {ModelPart.WEIGHTS, ModelPart.CONFIG, ModelPart.OTHER}
TOKENIZED: Final = CONVERTED | {ModelPart.TOKENIZER}
IN_CHATS: Final = TOKENIZED | {ModelPart.CHAT_TEMPLATE}
CHATS: Final = {"quantize.calibration.chat_template": True}
OWN: Final = {"quantize.calibration.data": "rows.jsonl"}
OPTIONS: Final = {"quantize.options": {"awq_block_size": 64}}
SHARDED: Final = {"quantize.options": {"use_parallel_embedding": True}}

CASES: Final[list[tuple[Cell, Mapping[str, Any]]]] = [
    (cell("fp16"), {"convert": CONVERTED, "build": CONVERTED, "check": ALL}),
    (cell("int8_wo"), {"convert": CONVERTED, "build": CONVERTED, "check": ALL}),
    (cell("fp16", tp=2, settings=SHARDED), {"convert": ALL, "build": ALL, "check": ALL}),
    (cell("fp8"), {"quantize": TOKENIZED, "build": TOKENIZED, "check": ALL}),
    (cell("fp8", settings=CHATS), {"quantize": IN_CHATS, "build": IN_CHATS, "check": ALL}),
    (cell("fp8", settings=OWN), {"quantize": IN_CHATS, "build": IN_CHATS, "check": ALL}),
    (cell("int4_awq", settings=OPTIONS), {"quantize": ALL, "build": ALL, "check": ALL}),
    (cell("fp16", toolchain=PYTORCH), {}),
    # A checkpoint of Hugging Face has the tokenizer and its template in it, since it is served as a directory.
    (cell("fp8", toolchain=PYTORCH), {"quantize": ALL}),
    (cell("fp16", toolchain=EMBEDDED), {"convert": TOKENIZED, "build": TOKENIZED}),
    (cell("fp16", toolchain=EMBEDDED, settings=CHATS), {"convert": TOKENIZED, "build": TOKENIZED}),
]


def of_files(wanted: Cell, files: Mapping[str, str] | None) -> Plan:
    return plan(replace(wanted, recipe={**wanted.recipe, "files": files}))


def fingerprints(found: Plan) -> dict[str, str]:
    return {run.stage.name: run.fingerprint for run in found.stage_runs.values()}


def changed(wanted: Cell, files: Mapping[str, str]) -> set[str]:
    """The stages whose stage runs are others with these files of the model."""
    before, now = fingerprints(of_files(wanted, MODEL)), fingerprints(of_files(wanted, files))
    return {stage for stage in before if before[stage] != now[stage]}


@pytest.mark.parametrize(("wanted", "reads"), CASES, ids=lambda each: each.id if isinstance(each, Cell) else "")
def test_a_changed_file_makes_stale_what_reads_it_and_nothing_else(wanted: Cell, reads: Mapping[str, Any]) -> None:
    for kind, names in FILES.items():
        stale = {"download", *SERVED, *(stage for stage, parts in reads.items() if kind in parts)}
        for name in names:
            assert changed(wanted, {**MODEL, name: "f" * 64}) == stale, name
            assert changed(wanted, {other: MODEL[other] for other in MODEL if other != name}) == stale, name


@pytest.mark.parametrize(("wanted", "_reads"), CASES, ids=lambda each: each.id if isinstance(each, Cell) else "")
def test_keys_of_a_model_that_nobody_tells_are_made_of_its_download(wanted: Cell, _reads: object) -> None:
    found = of_files(wanted, None)
    for run in found.stage_runs.values():
        assert run.reads == {}
        inputs = {name: found.stage_runs[upstream].fingerprint for name, upstream in run.inputs.items()}
        assert json.loads(run.key)["inputs"] == inputs


def test_a_script_of_which_nobody_knows_what_it_reads_is_given_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_pipeline.tensorrt.trtllm.engine_backend._LOOKED_AT", frozenset())
    for precision, stage in (("fp16", "convert"), ("fp8", "quantize")):
        assert {stage, "build"} < changed(cell(precision), {**MODEL, "generation_config.json": "f" * 64})


def test_a_model_with_heads_is_read_whole() -> None:
    heads = {companions.DRAFT: {"source": {"hugging_face": "some/heads", "revision": "1"}, "files": None}}
    with_heads = replace(cell("fp16"), companions=heads)
    assert {"convert", "build"} < changed(with_heads, {**MODEL, "generation_config.json": "f" * 64})


def test_every_file_that_is_fetched_is_of_a_known_part() -> None:
    names = [*sum(FILES.values(), ()), "tokenizer.model", "vocab.txt", "qwen.tiktoken", "chat_template.json"]
    names += ["video_preprocessor_config.json", "quantize_config.json", "spiece.model", "added_tokens.json"]
    fetched = described([*names, "LICENSE"])
    assert {name for name in fetched if part_of(name) is ModelPart.OTHER} == {
        name for name in fetched if is_licence(name)
    }
    assert {part: files_of(MODEL, {part}) for part in ModelPart} == {
        part: tuple(sorted({*FILES[part], *FILES[ModelPart.OTHER]})) for part in ModelPart
    }


def test_models_that_differ_in_what_a_stage_does_not_read_share_its_stage_run() -> None:
    one = replace(cell("fp16"), recipe={**RECIPE, "files": MODEL})
    template = {**MODEL, "chat_template.jinja": "f" * 64}
    other = replace(one, id="other/" + one.id, model="other", recipe={**RECIPE, "files": template})
    both = plan(one, other)
    stages = [run.stage.name for run in both.stage_runs.values()]
    assert {name: stages.count(name) for name in ("download", "convert", "build", "repository")} == {
        "download": 2, "convert": 1, "build": 1, "repository": 2,
    }  # fmt: skip
    alone = part(both, [other])
    assert all(upstream in alone.stage_runs for run in alone.stage_runs.values() for upstream in run.inputs.values())
