"""The table of options and the command lines made from it, against everything recorded of TensorRT-LLM's programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from packaging.version import Version

from maintenance.record_release import default_of, disagreements
from trtllm_pipeline.base.errors import PlanError
from trtllm_pipeline.tensorrt.trtllm import commands
from trtllm_pipeline.tensorrt.trtllm import program_options as options
from trtllm_pipeline.tensorrt.trtllm.params import (
    Checkpoint,
    EngineBuild,
    EngineCheck,
    EngineRepository,
    WeightsRepository,
)
from trtllm_pipeline.tensorrt.trtllm.releases import FAMILIES, at_least, convert_tool
from trtllm_pipeline.tensorrt.trtllm.speculation import DEFAULTS

RECORDED: Final = Path(__file__).parents[1] / "data" / "tensorrt_llm" / "recorded.json"
STANDS_FOR: Final = {
    "main@008b2b8": "0.17.0",
    "main@059c97c": "0.19.0",
    "main after 0.19 (commit c8c6df0)": "0.20.0",
    "after 0.19 (fork, commit 3b9703d)": "0.20.0",
    "main after 1.1, before the July 2026 removal (yingeli, commit eb5d926)": "1.2.0",
    "main after 1.1, before the July 2026 removal (HuiGao-NV, commit 195839a)": "1.2.0",
    "main after 1.1, before the July 2026 removal (Muqi1029, commit 024e751)": "1.2.0",
    "main after 1.1.0rc6 (commit fd96a08)": "1.2.0",
    "main 2026 before the removal (commit 368f8f2)": "1.2.0",
    "main 2026 before the removal (commit 10c1d59)": "1.2.0",
    "main 2026 before the removal (commit 7edbccc)": "1.2.0",
    "main 2026 before the removal (commit 310decb)": "1.2.0",
    "main 2026 before the removal (examples/medusa)": "1.2.0",
    "main 2026 before the removal (examples/eagle)": "1.2.0",
}
"""Records of sources without a release -> the release whose options they have."""
NOT_OF_A_RELEASE: Final = {
    ("after 0.19 (fork, commit 3b9703d)", "--kv_cache_dtype"),  # the fork added a value
    ("main@008b2b8", "--cluster_key"),  # the release has two GPUs more
}
"""Values of sources between releases that no release had."""
OTHER_RELEASES: Final = (
    *("0.9.0", "0.13.0", "0.15.0", "0.16.0", "0.17.0", "0.18.0", "0.18.1", "0.19.0"),
    *("0.20.1", "0.21.0", "1.0.1", "1.1.0", "1.1.1", "1.2.0rc2", "1.2.1", "1.3.0rc9"),
)
"""Releases without a record, or with one of another build of theirs."""
PRECISIONS: Final = (
    *("fp32", "fp16", "bf16", "fp8", "int8_wo", "int4_wo"),
    *("int8_sq", "int4_awq", "w4a8_awq", "nvfp4"),
)
LAYOUTS: Final = ((1, 1), (4, 1), (8, 1), (1, 2), (4, 2))
LENGTHS: Final = ((128, 128), (2048, 1024), (100_000, 2_000))
BATCH_SIZES: Final = (1, 8, 4096)
GPUS: Final = (None, 80, 89, 90, 100, 120)
ONE_EACH: Final = ("llama", "qwen2", "phi3", "gpt2", "gemma2")
"""A family for each script."""


class Record(NamedTuple):
    tool: str
    name: str
    release: str
    options: dict[str, dict[str, Any]]
    partial: bool

    def __str__(self) -> str:
        return f"{self.tool} {self.name}"


def _records() -> list[Record]:
    found = []
    for tool, entries in json.loads(RECORDED.read_text(encoding="utf-8"))["tools"].items():
        for entry in entries:
            subcommands = entry.get("subcommands") or {tool: entry["options"]}
            listed = subcommands.get("serve") or subcommands.get(tool)
            if entry.get("none") or tool not in options.load():
                continue
            for name in (entry["release"], *entry.get("also_valid_for", ())):
                release = STANDS_FOR.get(name, name)
                found.append(Record(tool, name, release, listed, entry.get("partial", False)))
    return found


RECORDS: Final = _records()


def _of(tool: str) -> list[Record]:
    return [record for record in RECORDS if record.tool == tool and not record.partial]


# --------------------------------------------------------------------------------------------------------- the table


def test_every_record_is_of_a_program_in_the_table_or_of_a_launcher_we_do_not_use() -> None:
    recorded = set(json.loads(RECORDED.read_text(encoding="utf-8"))["tools"])
    assert recorded - set(options.load()) == {"launch_triton_server.py"}
    assert {record.tool for record in RECORDS} == set(options.load())
    assert len(RECORDS) > 70


@pytest.mark.parametrize("tool", sorted(options.load()))
def test_the_table_agrees_with_every_record(tool: str) -> None:
    wrong = [fault for record in RECORDS if record.tool == tool for fault in _disagreements(record)]
    assert not wrong, "\n".join(wrong)


def _disagreements(record: Record) -> Iterator[str]:
    found = disagreements(record.tool, record.release, record.options, partial=record.partial)
    for option, field, words in found:
        if field != "choices" or (record.name, option) not in NOT_OF_A_RELEASE:
            yield f"{record}: {option} {words}"


# What the release notes and the documents of releases without a record say: (program, option, first release with it).
APPEARED: Final = [
    *[("trtllm-build", name, "0.9.0", "0.8.0") for name in ("tp_size", "use_fp8_context_fmha", "max_draft_len")],
    *[("trtllm-build", name, "0.9.0", "0.8.0") for name in ("moe_plugin", "opt_num_tokens", "input_timing_cache")],
    *[
        ("trtllm-build", name, "0.10.0", "0.9.0")
        for name in ("dry_run", "strip_plan", "weight_streaming", "nccl_plugin")
    ],
    *[("trtllm-build", name, "0.11.0", "0.10.0") for name in ("max_seq_len", "reduce_fusion", "gemm_swiglu_plugin")],
    *[("trtllm-build", name, "0.13.0", "0.12.0") for name in ("kv_cache_type", "low_latency_gemm_plugin")],
    *[("trtllm-build", name, "0.15.0", "0.14.0") for name in ("monitor_memory", "pp_reduce_scatter")],
    ("trtllm-build", "user_buffer", "0.16.0", "0.15.0"),
    *[("trtllm-build", name, "0.19.0", "0.18.2") for name in ("dora_plugin", "fuse_fp4_quant", "norm_quant_fusion")],
    *[("quantize.py", name, "0.10.0", "0.9.0") for name in ("calib_dataset", "calib_max_seq_length")],
    ("quantize.py", "autoq_format", "0.14.0", "0.13.0"),
    ("quantize.py", "auto_quantize_bits", "0.15.0", "0.14.0"),
    ("convert_checkpoint.py:llama", "use_fp8_rowwise", "0.12.0", "0.11.0"),
    ("convert_checkpoint.py:llama", "use_fp8", "0.13.0", "0.12.0"),
    ("convert_checkpoint.py:llama", "cp_size", "0.16.0", "0.15.0"),
    ("convert_checkpoint.py:llama", "modelopt_quant_ckpt_path", "0.10.0", "0.9.0"),
    ("convert_checkpoint.py:llama", "quant_ckpt_path", "0.11.0", "0.10.0"),
    ("convert_checkpoint.py:qwen", "tp_size", "0.9.0", "0.8.0"),
    ("trtllm-serve", "port", "0.15.0", "0.14.0"),
    *[("trtllm-serve", name, "0.19.0", "0.18.2") for name in ("extra_llm_api_options", "ep_size", "log_level")],
    *[("trtllm-serve", name, "0.20.0", "0.19.0") for name in ("cluster_size", "reasoning_parser")],
    *[("trtllm-serve", name, "0.21.0", "0.20.0") for name in ("server_role", "metadata_server_config_file")],
    ("trtllm-serve", "fail_fast_on_attention_window_too_large", "1.0.0", "0.21.0"),
    ("trtllm-serve", "custom_tokenizer", "1.2.0", "1.1.0"),
    *[("trtllm-serve", name, "1.3.0rc20", "1.3.0rc11") for name in ("enable_attention_dp", "telemetry", "middleware")],
    *[
        ("trtllm-serve", name, "1.3.0rc29", "1.3.0rc20")
        for name in ("report_addr", "generation-config", "grpc-protocol")
    ],
]
# (program, option, first release without it, last with it)
VANISHED: Final = [
    ("trtllm-build", "timing_cache", "0.9.0", "0.8.0"),
    *[("trtllm-build", name, "0.11.0", "0.10.0") for name in ("strongly_typed", "weight_only_precision")],
    *[
        ("trtllm-build", name, "0.12.0", "0.11.0")
        for name in ("max_output_len", "multi_block_mode", "tp_size", "pp_size")
    ],
    *[("trtllm-build", name, "0.12.0", "0.11.0") for name in ("use_custom_all_reduce", "context_fmha_fp32_acc")],
    ("trtllm-build", "builder_opt", "0.14.0", "0.13.0"),
    *[("trtllm-build", name, "0.15.0", "0.14.0") for name in ("builder_force_num_profiles", "lookup_plugin")],
    ("trtllm-build", "enable_xqa", "0.16.0", "0.15.0"),
    *[("trtllm-build", name, "1.2.0", "1.1.0") for name in ("auto_parallel", "gpus_per_node", "cluster_key")],
    ("convert_checkpoint.py:llama", "ammo_quant_ckpt_path", "0.10.0", "0.9.0"),
    ("convert_checkpoint.py:llama", "use_embedding_sharing", "0.16.0", "0.15.0"),
]
# (program, option, field, last release before, its value, first release after, its value)
CHANGED: Final = [
    ("trtllm-build", "tokens_per_block", "default", "0.9.0", 128, "0.10.0", 64),
    ("trtllm-build", "tokens_per_block", "default", "0.18.2", 64, "0.19.0", 32),
    ("trtllm-build", "use_paged_context_fmha", "default", "0.17.0", "disable", "0.19.0", "enable"),
    ("trtllm-build", "use_fp8_context_fmha", "default", "0.18.2", "disable", "0.19.0", "enable"),
    ("trtllm-build", "max_batch_size", "default", "0.10.0", 1, "0.11.0", 256),
    ("trtllm-build", "max_batch_size", "default", "0.13.0", 256, "0.14.0", 2048),
    ("trtllm-build", "max_num_tokens", "default", "0.10.0", None, "0.11.0", 8192),
    ("trtllm-build", "gpt_attention_plugin", "default", "0.10.0", "float16", "0.11.0", "auto"),
    ("trtllm-build", "gemm_plugin", "default", "0.16.0", "disable", "0.17.0", None),
    ("trtllm-build", "use_fused_mlp", "kind", "0.12.0", "switch", "0.13.0", "on_off"),
    ("trtllm-build", "visualize_network", "kind", "0.16.0", "switch", "0.17.0", "str"),
    ("trtllm-build", "paged_kv_cache", "deprecated", "0.12.0", None, "0.13.0", "--kv_cache_type"),
    ("convert_checkpoint.py:llama", "dtype", "default", "0.14.0", "float16", "0.15.0", "auto"),
    ("trtllm-serve", "backend", "default", "0.21.0", None, "1.0.0", "pytorch"),
]
# (program, option, value, release, whether it is taken)
VALUES: Final = [
    ("quantize.py", "qformat", "nvfp4", "0.16.0", False),
    ("quantize.py", "qformat", "nvfp4", "0.17.0", True),
    ("trtllm-build", "gemm_plugin", "fp8", "0.10.0", False),
    ("trtllm-build", "gemm_plugin", "nvfp4", "0.16.0", False),
    ("trtllm-build", "gemm_plugin", "nvfp4", "0.17.0", True),
    ("trtllm-build", "log_level", "trace", "0.21.0", True),
    ("trtllm-build", "cluster_key", "V100-PCIe-16GB", "0.18.2", True),
    ("trtllm-build", "cluster_key", "V100-PCIe-16GB", "0.19.0", False),
    ("convert_checkpoint.py:llama", "weight_only_precision", "int4_awq", "0.12.0", False),
    ("convert_checkpoint.py:llama", "weight_only_precision", "int4_awq", "0.13.0", True),
    ("convert_checkpoint.py:llama", "weight_only_precision", "int8_gptq", "0.15.0", True),
    ("trtllm-serve", "backend", "trt", "0.21.0", False),
    ("trtllm-serve", "backend", "trt", "1.0.0", True),
    ("trtllm-serve", "backend", "tensorrt", "1.0.0", False),
    ("trtllm-serve", "backend", "tensorrt", "1.1.0", True),
    ("trtllm-serve", "backend", "tensorrt", "1.2.1", True),
]


def test_the_table_is_right_between_the_records() -> None:
    wrong = [
        *(
            f"{tool} {new}: no --{name}"
            for tool, name, new, _ in APPEARED
            if not options.exists(tool, new, f"--{name}")
        ),
        *(f"{tool} {old}: --{name}" for tool, name, _, old in APPEARED if options.exists(tool, old, f"--{name}")),
        *(f"{tool} {new}: --{name}" for tool, name, new, _ in VANISHED if options.exists(tool, new, f"--{name}")),
        *(
            f"{tool} {old}: no --{name}"
            for tool, name, _, old in VANISHED
            if not options.exists(tool, old, f"--{name}")
        ),
        *(
            f"{tool} {release}: --{name} {field} is not {expected!r}"
            for tool, name, field, old, before, new, after in CHANGED
            for release, expected in ((old, before), (new, after))
            if getattr(options.load()[tool].at(f"--{name}", release), field) != expected
        ),
        *(
            f"{tool} {release}: --{name} {value}: {taken}"
            for tool, name, value, release, taken in VALUES
            if options.accepts(tool, release, f"--{name}", value) is not taken
        ),
    ]
    assert not wrong, "\n".join(wrong)


def test_forms_are_in_order_of_releases_and_start_with_one_that_exists() -> None:
    for tool, program in options.load().items():
        for name, forms in program.options.items():
            starts = [Version(f"{form.since}.dev0" if form.since.count(".") == 1 else form.since) for form in forms]
            assert all(older < newer for older, newer in pairwise(starts)), (tool, name)
            assert isinstance(forms[0], options.Form), (tool, name)
        assert set(program.ours) <= set(program.options), tool


# ----------------------------------------------------------------------------------------------------- command lines


def _parse(argv: list[str], recorded: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Arguments by canonical name, as a program with these options reads them. Raises ValueError with what it refuses."""
    names = {spelling: name for name, row in recorded.items() for spelling in (name, *row.get("aliases", ()))}
    names |= {row["negative_flag"]: name for name, row in recorded.items() if "negative_flag" in row}
    found: dict[str, list[str]] = {}
    words = iter([*argv, None])
    word = next(words)
    while word is not None:
        if word not in names:
            raise ValueError(f"unrecognized arguments: {word}")
        name = names[word]
        if name in found:
            raise ValueError(f"{name} twice")
        row, values = recorded[name], []
        word = next(words)
        while word is not None and not word.startswith("--"):
            values.append(word)
            word = next(words)
        if len(values) != (1 if row["takes_value"] else 0):
            raise ValueError(f"{name} has {len(values)} values")
        choices = [str(choice) for choice in row.get("choices") or ()]
        if choices and values[0] not in choices:
            raise ValueError(f"{name} {values[0]} is not among {choices}")
        if row["takes_value"] and row["type"] in {"int", "float"}:
            _ = (int if row["type"] == "int" else float)(values[0])
        if row.get("deprecated"):
            raise ValueError(f"{name} is deprecated")
        found[name] = values
    missing = [name for name, row in recorded.items() if row.get("required") and name not in found]
    if missing:
        raise ValueError(f"the following arguments are required: {missing}")
    return found


def _as_recorded(tool: str, release: str) -> dict[str, dict[str, Any]]:
    """The table's options of a release in the form of a record."""
    return {
        name: {
            "takes_value": form.takes_value,
            "type": form.kind,
            "choices": form.choices,
            "aliases": form.aliases,
            "required": form.required,
            "deprecated": form.deprecated,
        }
        for name, form in options.known(tool, release).items()
    }


def _targets(tool: str) -> list[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Name, release and options: of every record, and by the table of the releases without one."""
    first = options.load()[tool].first
    others = [release for release in OTHER_RELEASES if at_least(release, first)]
    return [
        *((str(record), record.release, record.options) for record in _of(tool)),
        *((f"{tool} {release}", release, _as_recorded(tool, release)) for release in others),
    ]


def _families(script: str, release: str) -> list[str]:
    tool = f"convert_checkpoint.py:{script}"
    return [family for family in FAMILIES if convert_tool(family) == tool and at_least(release, FAMILIES[family].since)]


def _layouts(family: str, release: str) -> list[tuple[int, int]]:
    known = FAMILIES[family]
    stages = known.pipeline_parallel is not None and at_least(release, known.pipeline_parallel)
    split = at_least(release, known.tensor_parallel)
    return [(tp, pp) for tp, pp in LAYOUTS if (tp == 1 or split) and (pp == 1 or stages)]


@pytest.mark.parametrize("script", sorted({family.script for family in FAMILIES.values()}))
def test_convert_checkpoint(script: str) -> None:
    tool, wrong, made = f"convert_checkpoint.py:{script}", [], 0
    for name, release, recorded in _targets(tool):
        for family, precision in product(_families(script, release), PRECISIONS):
            if commands.route(release, family, precision, None) != "convert":
                continue
            for tp, pp in _layouts(family, release):
                asked = Checkpoint(family=family, precision=precision, tp=tp, pp=pp)
                argv = commands.convert_checkpoint(release, asked, ("python3", "S"), model="M", output="O")
                made += 1
                try:
                    got = _parse(argv[2:], recorded)
                    assert _one(got, "--model_dir", "--model-dir") == "M"
                    assert _one(got, "--output_dir", "--output-model-dir") == "O"
                    assert got["--dtype"] == [commands.data_type(precision, family)]
                    assert tp == 1 or _one(got, "--tp_size", "--world-size") == str(tp)
                    assert pp == 1 or _one(got, "--pp_size") == str(pp)
                    assert int(_one(got, "--workers") or 1) <= tp * pp
                except (ValueError, AssertionError) as error:
                    wrong.append(f"{name} {family} {precision} tp{tp}pp{pp}: {error}")
    assert not wrong, "\n".join(wrong[:20])
    assert made > 50


def test_converting_with_heads() -> None:
    own = {
        "medusa": ("--max_medusa_token_len", {"num_medusa_heads": 2, "num_medusa_layers": 3}),
        "eagle": ("--max_draft_len", {"num_eagle_layers": 5, "max_non_leaves_per_layer": 7}),
    }
    for kind, (length, settings) in own.items():
        seen = 0
        for name, release, recorded in _targets(f"convert_checkpoint.py:{kind}"):
            for given in ({}, settings):
                asked = Checkpoint(family="llama", precision="bf16", tp=2, heads=kind, max_draft_len=32, **given)
                argv = commands.convert_checkpoint(release, asked, ("p", "S"), model="M", output="O", draft="D")
                got = _parse(argv[2:], recorded)
                assert (got["--model_dir"], got[f"--{kind}_model_dir"], got["--output_dir"]) == (["M"], ["D"], ["O"])
                assert (got["--dtype"], got["--tp_size"], got[length]) == (["bfloat16"], ["2"], ["32"]), name
                defaults = {each: recorded[f"--{each}"].get("default", DEFAULTS[each]) for each in settings}
                for each, value in {**defaults, **given}.items():
                    assert got[f"--{each}"] == [str(value)], name
                seen += 1
        assert seen > 10


def test_converting_with_expert_parallelism() -> None:
    for family, known in FAMILIES.items():
        for name, release, recorded in _targets(convert_tool(family)) if known.expert_parallel else ():
            if not at_least(release, known.expert_parallel or ""):
                assert "--moe_ep_size" not in recorded or not at_least(release, known.since), name
                continue
            for tp, ep, moe_tp in ((4, 4, 1), (4, 2, 2), (8, 2, 4)):
                asked = Checkpoint(family=family, precision="bf16", tp=tp, ep=ep)
                argv = commands.convert_checkpoint(release, asked, ("python3", "S"), model="M", output="O")
                got = _parse(argv[2:], recorded)
                sizes = [got[option] for option in ("--tp_size", "--moe_tp_size", "--moe_ep_size")]
                assert sizes == [[str(tp)], [str(moe_tp)], [str(ep)]], name


def _one(got: dict[str, list[str]], *names: str) -> str | None:
    return next((got[name][0] for name in names if name in got), None)


def test_quantize() -> None:
    wrong, made = [], 0
    for name, release, recorded in _targets("quantize.py"):
        for family, precision, asked in product(ONE_EACH, PRECISIONS, (None, "fp8", "int8")):
            kv = commands.kv_precision(precision, asked)
            plain = precision in commands.PLAIN
            if not at_least(release, FAMILIES[family].since) or not (
                plain or options.accepts("quantize.py", release, "--qformat", precision)
            ):
                continue
            if commands.route(release, family, precision, kv) != "quantize":
                continue
            for tp, pp in _layouts(family, release):
                checkpoint = Checkpoint(
                    family=family, precision=precision, kv_cache_precision=kv or "none", tp=tp, pp=pp
                )
                dataset = "D" if commands.takes_dataset(release) else None
                argv = commands.quantize(release, checkpoint, ("python3", "S"), model="M", output="O", dataset=dataset)
                made += 1
                try:
                    got = _parse(argv[2:], recorded)
                    assert (got["--tp_size"], got["--pp_size"]) == ([str(tp)], [str(pp)])
                    assert got["--qformat"] == ["full_prec" if plain else precision]
                    assert got.get("--kv_cache_dtype") == (None if kv is None else [kv])
                    assert (got.get("--calib_dataset") == ["D"]) is at_least(release, "0.10")
                except (ValueError, AssertionError) as error:
                    wrong.append(f"{name} {family} {precision} {kv} tp{tp}pp{pp}: {error}")
    assert not wrong, "\n".join(wrong[:20])
    assert made > 500


def test_build() -> None:
    wrong, made = [], 0
    rest = cycle(product((None, "int8", "fp16"), GPUS, BATCH_SIZES))
    for name, release, recorded in _targets("trtllm-build"):
        for family, precision, (tp, pp), (isl, osl) in product(("llama", "gemma2"), PRECISIONS, LAYOUTS, LENGTHS):
            if precision == "nvfp4" and not at_least(release, "0.17.0"):
                continue
            asked, sm, batch = next(rest)
            kv = commands.kv_precision(precision, asked)
            asked_for = EngineBuild(
                family=family,
                precision=precision,
                kv_cache_precision=kv or "none",
                tp=tp,
                pp=pp,
                max_batch_size=batch,
                max_input_len=isl,
                max_seq_len=isl + osl,
            )
            argv = commands.build(release, asked_for, checkpoint="C", output="O", sm=sm)
            made += 1
            try:
                _check_build(_parse(argv[1:], recorded), release, isl, osl, batch, tp * pp)
            except (ValueError, AssertionError) as error:
                wrong.append(f"{name} {family} {precision} {kv} sm{sm} tp{tp}pp{pp} {isl},{osl}: {error}")
    assert not wrong, "\n".join(wrong[:20])
    assert made > 8_000


def _check_build(got: dict[str, list[str]], release: str, isl: int, osl: int, batch: int, world_size: int) -> None:
    assert got["--max_input_len"] == [str(isl)]
    assert got["--max_batch_size"] == [str(batch)]
    if at_least(release, "0.11"):
        assert got["--max_seq_len"] == [str(isl + osl)]
        assert "--max_output_len" not in got
    else:
        assert got["--max_output_len"] == [str(osl)]
        assert "--max_seq_len" not in got
    assert not {"--tp_size", "--pp_size", "--auto_parallel"} & set(got), "sizes do nothing when building"
    assert got["--workers"] == [str(world_size)]
    assert min(isl, batch) <= int(got["--max_num_tokens"][0])
    assert got["--tokens_per_block"] == ["64"]


NOT_OURS: Final = {
    "--bert_attention_plugin": "encoders",
    "--mamba_conv1d_plugin": "state-space models",
    "--lora_plugin": "none and disable are the same",
    "--lookup_plugin": "none and disable are the same",
    "--paged_kv_cache": "absent means paged, which is what it was before",
    "--max_output_len": "gives way to --max_seq_len",
    "--log_level": "does not change the engine",
}


def test_every_default_of_trtllm_build_that_ever_moved_is_written_out() -> None:
    defaults: dict[str, set[object]] = {}
    for record in _of("trtllm-build"):
        for name, row in record.options.items():
            defaults.setdefault(name, set()).add(default_of(row))
    moved = {name for name, values in defaults.items() if len(values) > 1} - set(NOT_OURS)
    assert {"--tokens_per_block", "--use_fp8_context_fmha", "--gemm_plugin", "--use_fused_mlp"} <= moved
    for name, release, recorded in _targets("trtllm-build"):
        asked = EngineBuild(family="llama", precision="fp16", max_batch_size=8, max_input_len=128, max_seq_len=256)
        argv = commands.build(release, asked, checkpoint="C", output="O", sm=90)
        silent = {option for option in moved if option in recorded and option not in argv}
        assert not silent, f"{name}: left to the release: {silent}"


def test_run() -> None:
    for name, release, recorded in _targets("run.py"):
        for world_size in (1, 4):
            asked = EngineCheck(world_size=world_size)
            argv = commands.engine_check(release, asked, ("python3", "S"), engine="E", tokenizer="T")
            got = _parse(argv[argv.index("S") + 1 :], recorded)
            assert got["--engine_dir"] == ["E"], name
            assert got["--max_output_len"] == ["8"], name
            ranks = ["mpirun", "--oversubscribe", "--noprefix", "--mca", "plm_rsh_agent", "", "-n", "4"]
            assert (argv[:8] == ranks) is (world_size == 4), name


def test_serving_an_engine() -> None:
    asked = EngineRepository(max_batch_size=8, kv_cache_free_gpu_mem_fraction=0.8)
    for name, release, recorded in _targets("trtllm-serve"):
        if at_least(release, "1.3.0rc21"):
            with pytest.raises(PlanError, match="does not serve engines"):
                commands.serve_engine(release, asked, engine="E", tokenizer="T", config=None)
            continue
        argv = commands.serve_engine(release, asked, engine="E", tokenizer="T", config=None)
        got = _parse(argv[argv.index("E") + 1 :], recorded)
        backend = None if not at_least(release, "1.0") else "tensorrt" if at_least(release, "1.1.0") else "trt"
        assert got.get("--backend") == (None if backend is None else [backend]), name
        assert ["0.8"] in got.values(), name
        assert argv[1] == ("serve" if at_least(release, "0.19") else "E"), name


def test_serving_with_pytorch() -> None:
    checked = 0
    asked = WeightsRepository(
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        moe_expert_parallel_size=2,
        max_batch_size=8,
        max_seq_len=3072,
        max_num_tokens=8192,
    )
    for name, release, recorded in _targets("trtllm-serve"):
        if not at_least(release, "1.0"):
            continue
        argv = commands.serve_pytorch(release, asked, model="M", config="C")
        got = _parse(argv[argv.index("M") + 1 :], {**recorded, **_negative(recorded)})
        canonical = options.load()["trtllm-serve"].canonical
        values = {canonical(option): words for option, words in got.items()}
        assert values["--tp_size"] == ["4"], name
        assert values["--ep_size"] == ["2"], name
        assert values["--extra_llm_api_options"] == ["C"], name
        assert values["--max_num_tokens"] == ["8192"], name
        assert "--backend" not in values, name
        assert ("--telemetry" in values) is at_least(release, "1.3.0rc20"), name
        checked += 1
    assert checked >= 10


def _negative(recorded: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    row = recorded.get("--telemetry")
    return {} if row is None else {"--telemetry": {**row, "negative_flag": "--no-telemetry"}}
