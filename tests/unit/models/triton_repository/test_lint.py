"""The linter: each rule finds what it is for, and nothing else does; good repositories are found good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.broken_repositories import (
    BROKEN,
    BROKEN_LLMAPI,
    POLICIES,
    RELEASE,
    STEPS,
    Case,
    step,
    write_ensembles,
    write_policy,
    write_small,
    write_step,
)
from tests.standins import templates as standin
from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.models.triton_repository import lint, model_config
from trtllm_pipeline.show.cli.app import main
from trtllm_pipeline.tensorrt.embedded import repository as embedded
from trtllm_pipeline.tensorrt.embedded.params import RepositoryEmbedded
from trtllm_pipeline.tensorrt.trtllm import llm_args

BY_RELEASE = {"TRT407", "TRT606", "TRT611"}
OF_VLLM = {"TRT608", "TRT609", "TRT612", "TRT613"}


def test_every_rule_has_its_broken_repository() -> None:
    assert {rule.id for rule in lint.RULES} == BROKEN.keys() | BROKEN_LLMAPI.keys() | BY_RELEASE | OF_VLLM
    assert len({rule.name for rule in lint.RULES}) == len(lint.RULES)


def test_every_rule_is_documented_as_it_is() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "reference" / "repository-lint.md").read_text(
        encoding="utf-8"
    )
    for rule in lint.RULES:
        assert f"| `{rule.id}` | {rule.name} | {rule.severity} | {rule.what} | {rule.hint} |" in page


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_repository_is_found_by_its_rule_alone(case: Case, rule: str) -> None:
    assert case.find() == []
    BROKEN[rule](case)
    found = case.find()
    assert {finding.rule for finding in found} == {rule}, [str(finding) for finding in found]
    for finding in found:
        assert finding.file.exists()
        assert finding.hint
        if finding.line is not None:
            assert 1 <= finding.line <= len(finding.file.read_text().splitlines())


@pytest.mark.parametrize("rule", BROKEN_LLMAPI)
def test_a_broken_llmapi_repository_is_found_by_its_rule_alone(case: Case, rule: str) -> None:
    assert case.find(case.llmapi, release="1.2.0") == []
    BROKEN_LLMAPI[rule](case)
    assert {finding.rule for finding in case.find(case.llmapi)} == {rule}


def test_what_depends_on_the_release(case: Case) -> None:
    assert case.find(release=RELEASE) == case.find(release=f"{RELEASE}+cu124") == []
    path = case.engine / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": f"{RELEASE}+cu124"}))
    assert case.find(release=RELEASE) == []
    assert [finding.rule for finding in case.find(release="0.17.0")] == ["TRT407"]
    case.yaml("backend: pytorch", "backend: tensorrt")
    assert case.find(case.llmapi, release="0.21.0") == case.find(case.llmapi) == []
    assert [finding.rule for finding in case.find(case.llmapi, release="1.2.0")] == ["TRT606"]


@pytest.mark.parametrize(
    ("break_it", "rule", "line_holds", "words"),
    [
        (BROKEN["TRT503"], "TRT503", '"kv_cache_free_gpu_mem_fraction"', "is '90'; expected above 0, at most 1"),
        (BROKEN["TRT205"], "TRT205", "${triton_max_batch_size}", "${triton_max_batch_size} has no value"),
        (BROKEN["TRT203"], "TRT203", "TYPE_TEXT", "no value named TYPE_TEXT"),
        (BROKEN["TRT310"], "TRT310", "max_batch_size: 5", "max_batch_size is 5, but that of"),
        (BROKEN["TRT302"], "TRT302", '"postprocess"', "a step uses model 'postprocess'"),
        (BROKEN["TRT211"], "TRT211", "parameters { key", "is already given at line"),
        (BROKEN["TRT402"], "TRT402", '"gpt_model_path"', "trtllm-build did not write it"),
    ],
)
def test_findings_name_the_line(
    case: Case, break_it: Callable[[Case], object], rule: str, line_holds: str, words: str
) -> None:
    break_it(case)
    finding = next(finding for finding in case.find() if finding.rule == rule)
    assert finding.line is not None
    assert line_holds in finding.file.read_text().splitlines()[finding.line - 1]
    assert words in finding.message
    assert str(finding).startswith(f"{finding.file}:{finding.line}: {finding.severity} {rule} {finding.name}: ")


@pytest.mark.parametrize("value", ["relative/path", "meta-llama/Llama-2-7b-chat-hf", ""])
def test_tokenizer_dirs_that_are_no_absolute_path(case: Case, value: str) -> None:
    for name in ("preprocessing", "postprocessing"):
        case.parameter(name, tokenizer_dir=value)
    assert [finding.rule for finding in case.find()] == ["TRT508", "TRT508"]


@pytest.mark.parametrize("name", ["max_beam_width", "num_nodes"])
@pytest.mark.parametrize("value", ["0", "00"])
def test_no_beam_and_no_node_serve_nobody(case: Case, name: str, value: str) -> None:
    case.parameter("tensorrt_llm", **{name: value})
    (finding,) = case.find()
    assert (finding.rule, finding.message) == ("TRT506", f"{name} is '{value}'; expected a whole number of at least 1")


@pytest.mark.parametrize(
    "value", ["${policy}", "${batch_scheduler_policy}/x", "x ${batch_scheduler_policy}", "${max_beam_width}"]
)
def test_placeholders_that_no_template_has_there(case: Case, value: str) -> None:
    case.parameter("tensorrt_llm", batch_scheduler_policy=value)
    assert [finding.rule for finding in case.find()] == ["TRT206"]


def test_outputs_of_a_step_that_nothing_reads(case: Case) -> None:
    case.config("ensemble", lambda config: step(config, "preprocessing").output_map.update({"OUT_X": "_x"}))
    case.config("preprocessing", lambda config: config.output.add(name="OUT_X", data_type="TYPE_FP32", dims=[1]))
    (finding,) = case.find()
    assert (finding.rule, finding.message) == ("TRT308", "_x, written by preprocessing OUT_X, is never read")


def test_an_unfilled_template_is_reported_as_just_that(tmp_path: Path) -> None:
    """Bare placeholders of every file are found, and not the parser's stumbling over them."""
    root = standin.install(tmp_path, RELEASE)
    found = lint.lint(root / standin.ENGINE_SET)
    assert {finding.rule for finding in found} == {"TRT205", "TRT206"}
    assert {finding.file.parent.name for finding in found if finding.rule == "TRT205"} == set(standin.MODELS)


def write_embedded(tmp_path: Path) -> None:
    """A repository of an engine with batch 4, in `out`."""
    engine = tmp_path / "engine"
    engine.mkdir()
    build = {"max_batch_size": 4, "max_input_len": 64, "max_seq_len": 128}
    (engine / "config.json").write_text(json.dumps({"build_config": build}))
    (engine / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    embedded.write(tmp_path / "out", engine, engine, RepositoryEmbedded(max_batch_size=4))


def test_an_embedded_repository_is_good(tmp_path: Path) -> None:
    write_embedded(tmp_path)
    assert lint.lint(tmp_path / "out") == []


def test_a_repository_that_is_none_of_ours_is_good(tmp_path: Path) -> None:
    for name, backend, file in (("resnet", "onnxruntime", "model.onnx"), ("add", "python", "model.py")):
        (tmp_path / name / "3").mkdir(parents=True)
        (tmp_path / name / "3" / file).touch()
        (tmp_path / name / "config.pbtxt").write_text(
            f'backend: "{backend}"\nmax_batch_size: 8\n'
            "input [ { name: 'x' data_type: TYPE_FP32 dims: [ 3 ] } ] # ${nothing}\n"
            "output [ { name: 'y' data_type: TYPE_FP32 dims: [ 3 ] } ]\n"
        )
    assert lint.lint(tmp_path) == []


def found(folder: Path, **options: Any) -> list[tuple[str, str]]:
    return [(finding.rule, finding.message) for finding in lint.lint(folder, **options)]


@pytest.mark.parametrize(("policy", "versions", "rules"), POLICIES)
def test_versions_that_triton_serves(tmp_path: Path, policy: str, versions: tuple[str, ...], rules: list[str]) -> None:
    assert [rule for rule, _ in found(write_policy(tmp_path, "a", policy, versions))] == rules


@pytest.mark.parametrize(("policy", "asked", "served"), STEPS)
def test_versions_that_a_step_asks_for(tmp_path: Path, policy: str, asked: str, served: str | None) -> None:
    findings = found(write_step(tmp_path, "e", policy, asked))
    assert [rule for rule, _ in findings] == ([] if served is None else ["TRT315"])
    assert all(message.endswith(f"served: {served}") for _, message in findings)


def test_versions_that_are_not_served_need_no_file(tmp_path: Path) -> None:
    write_policy(tmp_path, "a", "", ("1", "2"))
    (tmp_path / "a" / "1" / "model.py").unlink()
    assert found(tmp_path) == []
    (tmp_path / "a" / "2" / "model.py").unlink()
    assert [rule for rule, _ in found(tmp_path)] == ["TRT105"]


@pytest.mark.parametrize(
    ("groups", "ids", "words"),
    [
        ("{ count: 1 kind: KIND_CPU }", "", None),
        ("{ count: 1 kind: KIND_MODEL }", "", None),
        ("{ count: 1 kind: KIND_GPU gpus: [ 0 ] }", "", None),
        ("{ count: 2 kind: KIND_CPU }", "0,1;2,3", None),
        ("{ count: 2 kind: KIND_CPU }", "0,1", "KIND_CPU starts 2 instances; gpu_device_ids lists 1 set of GPUs"),
        ("{ count: 1 kind: KIND_GPU gpus: [ 0, 1 ] }", "", "KIND_GPU starts 2 instances; gpu_device_ids lists no sets"),
        ("{ count: 1 kind: KIND_GPU }", "", "KIND_GPU starts 1 instance for each GPU"),
        ("{ count: 1 }", "", "KIND_AUTO starts 1 instance for each GPU"),
        ("", "", "has no instance_group"),
    ],
)
def test_each_instance_of_an_engine_needs_its_gpus(case: Case, groups: str, ids: str, words: str | None) -> None:
    path = case.repository / "tensorrt_llm" / "config.pbtxt"
    config = model_config.read(path)
    config.ClearField("instance_group")
    config.parameters["gpu_device_ids"].string_value = ids
    path.write_text(model_config.to_text(config) + (f"instance_group [ {groups} ]" if groups else ""))
    findings = found(case.repository)
    assert [rule for rule, _ in findings] == ([] if words is None else ["TRT414"])
    assert all(message.startswith(words or "") for _, message in findings)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("kv_cache_free_gpu_memory_fraction", "; did you mean kv_cache_free_gpu_mem_fraction?"),
        ("max_tokens_in_kv_cache", "; did you mean max_tokens_in_paged_kv_cache?"),
        ("Max_beam_width", "; did you mean max_beam_width?"),
        ("batching_type", "; did you mean gpt_model_type?"),
        ("use_paged_context_fmha", "; it is an option of trtllm-build"),
        ("of_mine", ""),
    ],
)
def test_parameters_that_the_backend_does_not_read(case: Case, name: str, near: str) -> None:
    case.parameter("tensorrt_llm", **{name: "1"})
    assert found(case.repository) == [("TRT513", f"the tensorrtllm backend does not read {name}{near}")]


def test_python_models_may_read_parameters_of_their_own(case: Case) -> None:
    case.parameter("preprocessing", of_mine="1", add_special_token="true")
    assert found(case.repository) == [
        ("TRT513", "the model's code does not mention add_special_token; did you mean add_special_tokens?")
    ]
    code = case.repository / "preprocessing" / "1" / "model.py"
    code.write_text('wanted = parameters["add_special_token"]')
    assert found(case.repository) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "tensor_parallel_size:",
            "tensor_paralel_size:",
            "tensor_paralel_size is unknown; did you mean tensor_parallel_size?",
        ),
        ("tensor_parallel_size:", "tp_size:", "tp_size is unknown; did you mean tensor_parallel_size?"),
        (
            "backend:",
            "free_gpu_memory_fraction: 0.5\nbackend:",
            "free_gpu_memory_fraction is unknown; did you mean kv_cache_config.free_gpu_memory_fraction?",
        ),
        ("backend:", "max-seq-len: 2\nbackend:", "max-seq-len is unknown; did you mean max_seq_len?"),
        ("backend:", "Max_num_tokens: 2\nbackend:", "Max_num_tokens is unknown; did you mean max_num_tokens?"),
        (
            "backend:",
            "cuda_graph_config: {max_batch_sizes: [1]}\nbackend:",
            "cuda_graph_config.max_batch_sizes is unknown",
        ),
        ("backend:", "something_of_next_year: 1\nbackend:", None),
    ],
)
def test_keys_of_model_yaml(case: Case, old: str, new: str, message: str | None) -> None:
    case.yaml(old, new)
    findings = found(case.llmapi)
    assert [rule for rule, _ in findings] == ([] if message is None else ["TRT607"])
    assert all(text.startswith(message or "") for _, text in findings)


def test_no_key_of_a_recorded_schema_is_reported(case: Case) -> None:
    for schema in llm_args.recorded():
        classes = schema.classes
        settings: dict[str, Any] = dict.fromkeys(classes["file"])
        for section, kind in classes["file"].items():
            settings[section] = {key: None for each in _words(kind) for key in classes.get(each, ())} or None
        (case.llmapi / "tensorrt_llm" / "1" / "model.yaml").write_text(json.dumps(settings))
        assert found(case.llmapi, rules=lint.select(["TRT607"])) == []


def _words(kind: Any) -> list[str]:
    """Classes among the alternatives of a type."""
    return [each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)]


def test_triton_completes_the_configuration_of_some_models(tmp_path: Path) -> None:
    model = tmp_path / "resnet" / "1" / "model.onnx"
    model.parent.mkdir(parents=True)
    assert found(tmp_path) == [("TRT101", "no directory in it has a config.pbtxt")]
    model.touch()
    assert found(tmp_path) == []
    write_small(tmp_path, "vllm_model", VLLM, files={"model.json": '{"model": "a/b"}'})
    assert found(tmp_path) == []
    code = tmp_path / "notes" / "1" / "model.py"
    code.parent.mkdir(parents=True)
    assert found(tmp_path) == [("TRT102", "has no config.pbtxt")]
    code.write_text("class TritonPythonModel:\n    pass\n")
    assert found(tmp_path) == [("TRT102", "has no config.pbtxt")]
    code.write_text("class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config): ...\n")
    assert found(tmp_path) == []


SMALL = "max_batch_size: 4"


def test_python_models_of_other_repositories_may_compute_on_gpus(tmp_path: Path) -> None:
    config = f'{SMALL} backend: "python" instance_group {{ kind: KIND_GPU }}'
    assert found(write_small(tmp_path, "resnet", config)) == []


@pytest.mark.parametrize(
    ("config", "file", "wanted"),
    [
        ('platform: "onnxruntime_onnx"', "yolo.onnx", "model.onnx, which the onnxruntime backend loads"),
        ('platform: "onnxruntime_onnx"', "model.onnx", None),
        ('platform: "onnxruntime_onnx" default_model_filename: "yolo.onnx"', "yolo.onnx", None),
        ('platform: "onnxruntime_onnx" cc_model_filenames { key: "8.0" value: "a.onnx" }', "a.onnx", None),
        ('backend: "python" cc_model_filenames { key: "8.0" value: "a.py" }', "a.py", "model.py, which the python"),
        ('platform: "tensorrt_plan"', "model.engine", "model.plan, which the tensorrt backend loads"),
        ('platform: "pytorch_libtorch"', "resnet.pt", "model.pt, which the pytorch backend loads"),
        ('platform: "tensorflow_savedmodel"', "saved_model.pb", "model.savedmodel, which the tensorflow backend loads"),
        ('platform: "tensorflow_graphdef" backend: "tensorflow"', "model.graphdef", None),
        ('backend: "tensorflow"', "model.savedmodel", None),
        ('backend: "pytorch"', "model.py", "model.pt, which the pytorch backend loads"),
        ('backend: "pytorch" runtime: "model.py"', "model.py", None),
        ('backend: "something_else"', "weights", None),
    ],
)
def test_files_that_backends_load(tmp_path: Path, config: str, file: str, wanted: str | None) -> None:
    findings = found(write_small(tmp_path, "small", f"{SMALL} {config}", files={file: ""}))
    assert [rule for rule, _ in findings] == ([] if wanted is None else ["TRT105"])
    assert all(message.startswith(f"has no {wanted}") for _, message in findings)


START = "kind: CONTROL_SEQUENCE_START"
CORRID = "kind: CONTROL_SEQUENCE_CORRID"


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ("dynamic_batching { priority_levels: 2 }", "TRT220"),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 3 }", "TRT220"),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }", "TRT220"),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 1 }", None),
        ("dynamic_batching { priority_levels: 1 default_priority_level: 1 preserve_ordering: true }", None),
        ("dynamic_batching { default_priority_level: 1 }", None),
        ("sequence_batching { direct { minimum_slot_utilization: -0.5 } }", "TRT221"),
        ("sequence_batching { direct { minimum_slot_utilization: 1 } }", None),
        ("sequence_batching { direct { minimum_slot_utilization: 0 } }", None),
        (f"{START} int32_false_true: [ 0 ]", "TRT222"),
        (f"{START} int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]", "TRT222"),
        (f"{START} bool_false_true: [ false, true ]", None),
        (f"{START} int32_false_true: [ 0, 1 ] }} control {{ {START} int32_false_true: [ 0, 1 ]", "TRT222"),
        (CORRID, "TRT222"),
        (f"{CORRID} data_type: TYPE_FP32", "TRT222"),
        (f"{CORRID} data_type: TYPE_UINT64 int32_false_true: [ 0, 1 ]", "TRT222"),
        (f"{CORRID} data_type: TYPE_STRING", None),
        ("sequence_batching { control_input { name: 'a' } }", None),
        ('platform: "onnx"', "TRT224"),
    ],
)
def test_what_triton_refuses_and_takes(tmp_path: Path, config: str, rule: str | None) -> None:
    """As Triton 2.51 does."""
    if config.startswith("kind:"):
        config = f'sequence_batching {{ control_input {{ name: "a" control {{ {config} }} }} }}'
    backend = "" if "platform" in config else 'backend: "python"'
    findings = found(write_small(tmp_path, "small", f"{SMALL} {backend} {config}"))
    assert [each for each, _ in findings] == ([] if rule is None else [rule])


@pytest.mark.parametrize(
    ("dims", "shape", "batched", "good"),
    [
        ("4", "3", True, False),
        ("4", "2, 2", True, True),
        ("4", "-1", True, False),
        ("4", "0", True, False),
        ("4", "", True, False),
        ("1", "", True, True),
        ("1", "", False, False),
        ("-1", "-1, 1", True, True),
        ("-1, 2", "-1", True, False),
        ("-1, 2, -1", "-1, 2, -1", True, True),
        ("2, -1, 2, -1", "2, -1, -1, 2", True, False),
    ],
)
@pytest.mark.parametrize("kind", ["input", "output"])
def test_reshapes(tmp_path: Path, kind: str, dims: str, shape: str, batched: bool, good: bool) -> None:
    """As Triton 2.51 refuses and takes them."""
    reshaped = f'{kind} {{ name: "a" data_type: TYPE_FP32 dims: [ {dims} ] reshape {{ shape: [ {shape} ] }} }}'
    text = f'backend: "python" max_batch_size: {4 * batched} {reshaped}'
    assert [each for each, _ in found(write_small(tmp_path, "small", text))] == ([] if good else ["TRT223"])


@pytest.mark.parametrize(
    ("release", "settings", "rules"),
    [
        ("1.2.1", "kv_cache_config: {onboard_blocks: true}", {}),
        (
            "1.4.0rc1",
            "kv_cache_config: {onboard_blocks: true}",
            {"TRT611": "kv_cache_config.onboard_blocks: no such name"},
        ),
        ("1.2.1", "pytorch_backend_config: {use_cuda_graph: true}", {"TRT611": "pytorch_backend_config: no such name"}),
        ("1.2.1", "max_batch_sizes: 8", {"TRT607": "max_batch_sizes is unknown; did you mean max_batch_size?"}),
        ("1.4.0rc1", "something_of_next_year: 1", {"TRT611": "something_of_next_year: no such name"}),
        ("1.4.0rc1", "disable_overlap_scheduler: 7", {"TRT611": "disable_overlap_scheduler: 7 is not"}),
        ("1.4.0rc1", "moe_expert_parallel_size: many", {"TRT604": "moe_expert_parallel_size is 'many'"}),
        ("0.21.0", "pytorch_backend_config: {use_cuda_graph: true}", {}),
    ],
)
def test_settings_that_a_release_does_not_have(
    case: Case, release: str, settings: str, rules: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = case.llmapi / "tensorrt_llm" / "1" / "model.yaml"
    path.write_text(f"{path.read_text()}{settings}\n")
    main(["models", "lint", str(case.llmapi), "--release", release, "--format", "json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {each["rule"] for each in findings} == {*rules}
    for each in findings:
        assert each["message"].startswith(rules[each["rule"]])
        assert each["line"] == len(path.read_text().splitlines())


VLLM = 'backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]'


@pytest.mark.parametrize(
    ("text", "rule", "line", "words"),
    [
        ('{"model": "a/b", "gpu_memory_utilization": 0.5}', None, None, ""),
        ('{"model": "a/b",\n "gpu_memory_utilization": 0.5,}', "TRT608", 2, "is not JSON"),
        ('["model"]', "TRT608", None, "is not a JSON object"),
        ('{"gpu_memory_utilization": 0.5}', "TRT608", None, "names no model"),
        ('{"model": "a/b",\n "gpu_memory_utilisation": 1}', "TRT609", 2, "did you mean gpu_memory_utilization?"),
        ('{"model": "a/b", "max_seq_len": 64}', "TRT609", 1, "max_seq_len is unknown; did you mean max_model_len?"),
        ('{"model": "a/b", "something_of_next_year": 1}', None, None, ""),
    ],
)
def test_model_json_of_vllm(tmp_path: Path, text: str, rule: str | None, line: int | None, words: str) -> None:
    findings = lint.lint(write_small(tmp_path, "vllm_model", VLLM, files={"model.json": text}))
    assert [(finding.rule, finding.line) for finding in findings] == ([(rule, line)] if rule else [])
    assert all(words in finding.message for finding in findings)


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        ("max_num_tokens", "max_num_tokens is not read here, but in model.yaml"),
        (
            "kv_cache_free_gpu_mem_fraction",
            "kv_cache_free_gpu_mem_fraction is not read here; in model.yaml it is kv_cache_config.free_gpu_memory_fraction",
        ),
        ("gpt_model_type", "gpt_model_type is not read here; it is a parameter of engines"),
        ("gpu_device_ids", None),
        ("our_own", None),
    ],
)
def test_parameters_of_an_llm_api_model(case: Case, parameter: str, said: str | None) -> None:
    path = case.llmapi / "tensorrt_llm" / "config.pbtxt"
    path.write_text(f'{path.read_text()}parameters {{ key: "{parameter}" value {{ string_value: "0" }} }}\n')
    findings = found(case.llmapi, rules=lint.select(["TRT610"]))
    assert [rule for rule, _ in findings] == ([] if said is None else ["TRT610"])
    assert all(text.startswith(said or "") for _, text in findings)


def test_settings_of_vllm_that_stand_in_config_pbtxt(tmp_path: Path) -> None:
    given = {"gpu_memory_utilization": "0.5", "REPORT_CUSTOM_METRICS": "yes", "our_own": "1"}
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in given.items()
    )
    write_small(tmp_path, "vllm_model", VLLM + parameters, files={"model.json": '{"model": "a/b"}'})
    assert found(tmp_path) == [("TRT610", "gpu_memory_utilization is not read here, but in model.json")]
    code = {"model.json": '{"model": "a/b"}', "model.py": 'parameters["gpu_memory_utilization"]'}
    write_small(tmp_path / "extended", "vllm_model", VLLM + parameters, files=code)
    assert found(tmp_path / "extended") == []


@pytest.mark.parametrize(
    ("steps", "ways"),
    [
        ({"a": "a"}, ["a -> a"]),
        ({"a": "b", "b": "c", "c": "a"}, ["a -> b -> c -> a", "b -> c -> a -> b", "c -> a -> b -> c"]),
        ({"a": "b", "b": "c", "c": "b"}, ["b -> c -> b", "c -> b -> c"]),
        ({"a": "b", "c": "b", "b": "m"}, []),
    ],
)
def test_ensembles_that_contain_themselves(tmp_path: Path, steps: dict[str, str], ways: list[str]) -> None:
    write_policy(tmp_path, "m", "", ("1",))
    write_ensembles(tmp_path, steps)
    assert found(tmp_path) == [("TRT317", f"contains itself: {way}") for way in ways]


@pytest.mark.parametrize(
    ("kind", "settings", "rule"),
    [
        ("KIND_GPU", '"tensor_parallel_size": 2', "TRT613"),
        ("KIND_GPU", '"tensor_parallel_size": 1', None),
        ("KIND_MODEL", '"tensor_parallel_size": 2', None),
        ("KIND_MODEL", '"tensor_parallel_size": "2", "gpu_memory_utilization": "0.5"', None),
        ("KIND_MODEL", '"tensor_parallel_size": null, "gpu_memory_utilization": null', None),
        ("KIND_MODEL", '"tensor_parallel_size": "two"', "TRT612"),
        ("KIND_MODEL", '"tensor_parallel_size": 0', "TRT612"),
        ("KIND_MODEL", '"max_num_seqs": 1.5', "TRT612"),
        ("KIND_MODEL", '"gpu_memory_utilization": 1.5', "TRT612"),
        ("KIND_MODEL", '"gpu_memory_utilization": "much"', "TRT612"),
        ("KIND_MODEL", '"gpu_memory_utilization": 0', None),
        ("KIND_MODEL", '"gpu_memory_utilization": 1', None),
    ],
)
def test_values_of_model_json(tmp_path: Path, kind: str, settings: str, rule: str | None) -> None:
    config = VLLM.replace("KIND_MODEL", kind)
    findings = found(write_small(tmp_path, "v", config, files={"model.json": f'{{"model": "a/b", {settings}}}'}))
    assert [each for each, _ in findings] == ([] if rule is None else [rule])


def test_vllm_needs_its_model_json(tmp_path: Path) -> None:
    assert [rule for rule, _ in found(write_small(tmp_path, "vllm_model", VLLM, files={}))] == ["TRT105"]


def test_the_batch_of_an_embedded_engine(tmp_path: Path) -> None:
    write_embedded(tmp_path)
    path = tmp_path / "out" / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 4", "max_batch_size: 5"))
    assert found(tmp_path / "out") == [("TRT404", "max_batch_size is 5, but the engine's is 4")]


def test_rules_are_selected_by_id_beginning_and_name() -> None:
    def ids(*words: str, ignored: tuple[str, ...] = ()) -> set[str]:
        return {rule.id for rule in lint.select(words, ignored)}

    assert ids("TRT304") == ids("types-differ") == {"TRT304"}
    assert ids("trt3", "TRT101") == {rule.id for rule in lint.RULES if rule.id.startswith("TRT3")} | {"TRT101"}
    assert ids(ignored=("TRT5", "TRT6")) == {rule.id for rule in lint.RULES if rule.id < "TRT5"}
    for word in ("TRT999", "", "types"):
        with pytest.raises(UsageError, match="unknown rule"):
            lint.select((word,))
