"""Triton repositories with one thing wrong in each, for the linter and for Triton itself.

`write_good` writes a good one; `BROKEN` says for every rule of the linter how to break it so that the rule applies.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.standins import templates as standin
from trtllm_pipeline.base.machine.model import TensorRTLLM
from trtllm_pipeline.models.triton_repository import lint, model_config
from trtllm_pipeline.tensorrt.stage.params import load
from trtllm_pipeline.tensorrt.trtllm import frontends
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository, WeightsRepository

RELEASE = "0.16.0"


class Case:
    """A good repository with its engine and tokenizer, to break."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = folder / "repository"
        self.engine = folder / "engine"
        self.model = folder / "model"
        self.llmapi = folder / "llmapi"

    def text(self, model: str, old: str, new: str, count: int = 1) -> None:
        path = self.repository / model / "config.pbtxt"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, count))

    def append(self, model: str, text: str) -> None:
        path = self.repository / model / "config.pbtxt"
        path.write_text(f"{path.read_text()}\n{text}\n")

    def config(self, model: str, change: Callable[[Any], object]) -> None:
        path = self.repository / model / "config.pbtxt"
        config = model_config.read(path)
        change(config)
        path.write_text(model_config.to_text(config))

    def parameter(self, model: str, **values: str) -> None:
        def change(config: Any) -> None:
            for key, value in values.items():
                config.parameters[key].string_value = value

        self.config(model, change)

    def build(self, section: str, **values: object) -> None:
        path = self.engine / "config.json"
        config = json.loads(path.read_text())
        config[section].update(values)
        path.write_text(json.dumps(config))

    def yaml(self, old: str, new: str) -> None:
        path = self.llmapi / "tensorrt_llm" / "1" / "model.yaml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def find(self, folder: Path | None = None, **options: Any) -> list[lint.Finding]:
        return lint.lint(folder or self.repository, **options)


def write_engine(folder: Path, release: str) -> Path:
    folder.mkdir()
    config = {
        "version": release,
        "pretrained_config": {
            "dtype": "float16",
            "logits_dtype": "float32",
            "mapping": {"world_size": 2, "tp_size": 2, "pp_size": 1},
        },
        "build_config": {
            "max_batch_size": 8,
            "max_input_len": 64,
            "max_seq_len": 128,
            "max_beam_width": 1,
            "kv_cache_type": "PAGED",
            "plugin_config": {"use_paged_context_fmha": True},
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(2):
        (folder / f"rank{rank}.engine").touch()
    return folder


def write_model(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def write_good(folder: Path) -> Path:
    """Repositories of both backends, an engine and a model in `directory`."""
    for name in ("repository", "llmapi"):
        (folder / name).mkdir()
    engine, model = write_engine(folder / "engine", RELEASE), write_model(folder / "model")
    installed = TensorRTLLM(RELEASE, templates=str(standin.install(folder, RELEASE)))
    frontends.write_engine(
        folder / "repository", installed, engine=engine, model=model, params=EngineRepository(max_batch_size=4)
    )
    newer = TensorRTLLM("1.2.0", templates=str(standin.install(folder / "newer", "1.2.0")))
    asked = load(
        WeightsRepository,
        {"max_num_tokens": 512, "max_batch_size": 4, "max_seq_len": 128, "kv_cache_free_gpu_mem_fraction": 0.8},
    )
    frontends.write_llmapi(folder / "llmapi", newer, model=model, params=asked)
    return folder


def copy(good: Path, folder: Path) -> Case:
    """A copy to break, whose paths lead into the copy."""
    shutil.copytree(good, folder, ignore=shutil.ignore_patterns("all_models"))
    for pattern in ("*.pbtxt", "*.yaml"):
        for path in folder.rglob(pattern):
            path.write_text(path.read_text().replace(str(good), str(folder)))
    return Case(folder)


def tensor(config: Any, kind: str, name: str) -> Any:
    return next(each for each in getattr(config, kind) if each.name == name)


def step(config: Any, model: str) -> Any:
    return next(each for each in config.ensemble_scheduling.step if each.model_name == model)


def empty(case: Case) -> None:
    shutil.rmtree(case.repository)
    case.repository.mkdir()


def stray_folder(case: Case) -> None:
    (case.repository / "weights").mkdir()


def renamed(case: Case) -> None:
    case.text("postprocessing", 'name: "postprocessing"', 'name: "postprocesing"')


def no_version(case: Case) -> None:
    shutil.rmtree(case.repository / "ensemble" / "1")


def no_code(case: Case) -> None:
    (case.repository / "preprocessing" / "1" / "model.py").unlink()


def parameter_twice(case: Case) -> None:
    path = case.repository / "postprocessing" / "config.pbtxt"
    path.write_text(path.read_text() + 'parameters { key: "skip_special_tokens" value { string_value: "false" } }\n')


def no_lengths(config: Any) -> None:
    del step(config, "tensorrt_llm").input_map["input_lengths"]
    del step(config, "preprocessing").output_map["REQUEST_INPUT_LEN"]


def nothing_writes_lengths(config: Any) -> None:
    del step(config, "preprocessing").output_map["REQUEST_INPUT_LEN"]


def shorter_tensor(config: Any) -> None:
    tensor(config, "input", "TOKENS_BATCH").dims[:] = [-1]


def brain_floats(case: Case) -> None:
    case.build("build_config", plugin_config={"lora_plugin": "bfloat16"}, lora_config={"max_lora_rank": 8})
    case.build("pretrained_config", dtype="bfloat16")


def input_nobody_reads(config: Any) -> None:
    config.input.add(name="mood", data_type="TYPE_STRING", dims=[1], optional=True)


def renamed_in_map(config: Any) -> None:
    inputs = step(config, "tensorrt_llm").input_map
    inputs["top_k"] = inputs["runtime_top_k"]
    del inputs["runtime_top_k"]


def unknown_step(config: Any) -> None:
    step(config, "postprocessing").model_name = "postprocess"


def two_writers(config: Any) -> None:
    step(config, "preprocessing").output_map["OUT_PAD_ID"] = "_OUT_END_ID"
    step(config, "tensorrt_llm").input_map["pad_id"] = "_OUT_END_ID"


def request_after_engine(config: Any) -> None:
    """Postprocessing gets a tensor of preprocessing next to those of the decoupled engine."""
    step(config, "postprocessing").input_map["SEQUENCE_LENGTH"] = "_REQUEST_INPUT_LEN"
    config.output.add(name="lengths", data_type="TYPE_INT32", dims=[-1])
    step(config, "tensorrt_llm").output_map["sequence_length"] = "lengths"


def not_decoupled(config: Any) -> None:
    config.model_transaction_policy.decoupled = False


def draft_model(case: Case) -> None:
    shutil.copytree(case.repository / "tensorrt_llm", case.repository / "drafts")
    case.text("drafts", 'name: "tensorrt_llm"', 'name: "drafts"')
    case.parameter("tensorrt_llm_bls", tensorrt_llm_draft_model_name="drafts")


def add(kind: str, name: str) -> Callable[[Any], object]:
    return lambda config: getattr(config, kind).add().CopyFrom(tensor(config, kind, name))


def versions(model: str, *numbers: int) -> Callable[[Case], object]:
    """A policy for these versions of a model, that has version 1."""
    return lambda case: case.config(model, lambda config: config.version_policy.specific.versions.extend(numbers))


def newer_engine(case: Case) -> None:
    """An engine of a release whose backend decodes with grammars, behind a configuration of a release before."""
    path = case.engine / "config.json"
    path.write_text(path.read_text().replace(RELEASE, "0.19.0"))


def more_than_the_engine(case: Case) -> None:
    for name in ("tensorrt_llm",):
        case.config(name, lambda config: setattr(config, "max_batch_size", 16))


def other_engine(case: Case) -> None:
    shutil.copytree(case.engine, case.folder / "other")
    case.parameter("preprocessing", gpt_model_path=str(case.folder / "other"))


def other_tokenizer(case: Case) -> None:
    shutil.copytree(case.model, case.folder / "other")
    case.parameter("postprocessing", tokenizer_dir=str(case.folder / "other"))


def no_tokenizer(case: Case) -> None:
    for path in case.model.glob("tokenizer*"):
        path.unlink()


def half_logits(case: Case) -> None:
    path = case.engine / "config.json"
    path.write_text(path.read_text().replace("float32", "float16").replace(RELEASE, "0.17.0"))


def checkpoint(case: Case) -> None:
    (case.engine / "config.json").write_text('{"architecture": "LlamaForCausalLM", "dtype": "float16"}')


BROKEN: dict[str, Callable[[Case], object]] = {
    "TRT101": empty,
    "TRT102": stray_folder,
    "TRT103": renamed,
    "TRT104": no_version,
    "TRT105": no_code,
    "TRT106": versions("ensemble", 2),
    "TRT107": versions("postprocessing", 1, 2),
    "TRT201": lambda case: case.text("ensemble", "input {", "input {{"),
    "TRT202": lambda case: case.text("tensorrt_llm_bls", "instance_group {", "instance_groups {"),
    "TRT203": lambda case: case.text("tensorrt_llm_bls", "TYPE_STRING", "TYPE_TEXT"),
    "TRT204": lambda case: case.text(
        "tensorrt_llm_bls",
        "model_transaction_policy",
        "dynamic_batching { max_queue_delay_microseconds: -1 }\nmodel_transaction_policy",
    ),
    "TRT205": lambda case: case.text(
        "tensorrt_llm_bls", "max_batch_size: 4", "max_batch_size: ${triton_max_batch_size}"
    ),
    "TRT206": lambda case: case.text("tensorrt_llm", '"guaranteed_no_evict"', '"${policy}"'),
    "TRT207": lambda case: case.config("tensorrt_llm", lambda config: config.parameters.pop("gpt_model_path")),
    "TRT208": lambda case: case.text("tensorrt_llm_bls", 'backend: "python"\n', ""),
    "TRT209": lambda case: case.text(
        "preprocessing", 'backend: "python"', 'backend: "python" platform: "tensorrt_plan"'
    ),
    "TRT210": lambda case: case.config("tensorrt_llm_bls", add("input", "top_k")),
    "TRT211": parameter_twice,
    "TRT212": lambda case: case.text("preprocessing", "count: 1", "count: 0"),
    "TRT213": lambda case: case.text("preprocessing", "KIND_CPU", "KIND_GPU"),
    "TRT214": lambda case: case.text("tensorrt_llm", "preferred_batch_size: 4", "preferred_batch_size: 5"),
    "TRT215": lambda case: case.text("tensorrt_llm_bls", "max_batch_size: 4", "max_batch_size: -4"),
    "TRT216": lambda case: case.text(
        "postprocessing", "dynamic_batching {", "dynamic_batching { max_queue_delay_microseconds: 2000000"
    ),
    "TRT217": lambda case: case.text(
        "tensorrt_llm", "model_transaction_policy", "response_cache { enable: true }\nmodel_transaction_policy"
    ),
    "TRT218": lambda case: case.config(
        "tensorrt_llm_bls", lambda config: tensor(config, "input", "text_input").ClearField("dims")
    ),
    "TRT219": lambda case: case.text("tensorrt_llm_bls", "kind: KIND_CPU", "kind: KIND_CPU gpus: 0"),
    "TRT220": lambda case: case.text(
        "postprocessing", "dynamic_batching {", "dynamic_batching { priority_levels: 2 default_priority_level: 3"
    ),
    "TRT221": lambda case: case.append(
        "tensorrt_llm_bls", "sequence_batching { direct { minimum_slot_utilization: 2 } }"
    ),
    "TRT222": lambda case: case.append(
        "tensorrt_llm_bls",
        'sequence_batching { control_input { name: "start" control { kind: CONTROL_SEQUENCE_START } } }',
    ),
    "TRT223": lambda case: case.config(
        "tensorrt_llm_bls", lambda config: tensor(config, "input", "text_input").reshape.shape.append(2)
    ),
    "TRT224": lambda case: case.text("tensorrt_llm_bls", 'backend: "python"', 'platform: "python"'),
    "TRT301": lambda case: case.text("ensemble", 'platform: "ensemble"\n', ""),
    "TRT302": lambda case: case.config("ensemble", unknown_step),
    "TRT303": lambda case: case.config("ensemble", renamed_in_map),
    "TRT304": lambda case: case.config(
        "ensemble", lambda config: setattr(tensor(config, "input", "top_p"), "data_type", 10)
    ),
    "TRT305": lambda case: case.config("postprocessing", shorter_tensor),
    "TRT306": lambda case: case.config("ensemble", no_lengths),
    "TRT307": lambda case: case.config("ensemble", nothing_writes_lengths),
    "TRT308": lambda case: case.config("ensemble", input_nobody_reads),
    "TRT309": lambda case: case.config("ensemble", two_writers),
    "TRT310": lambda case: case.text("ensemble", "max_batch_size: 4", "max_batch_size: 5"),
    "TRT311": lambda case: case.text("tensorrt_llm_bls", "decoupled: true", "decoupled: false"),
    "TRT312": lambda case: case.config("ensemble", request_after_engine),
    "TRT313": lambda case: case.config("ensemble", not_decoupled),
    "TRT314": draft_model,
    "TRT315": lambda case: case.config(
        "ensemble", lambda config: step(config, "postprocessing").ClearField("model_version")
    ),
    "TRT316": lambda case: case.config("ensemble", lambda config: config.instance_group.add(count=1, kind="KIND_CPU")),
    "TRT317": lambda case: write_ensembles(case.repository, {"loop": "turn", "turn": "loop"}),
    "TRT401": lambda case: shutil.rmtree(case.engine),
    "TRT402": checkpoint,
    "TRT403": lambda case: (case.engine / "rank1.engine").unlink(),
    "TRT404": more_than_the_engine,
    "TRT405": lambda case: case.parameter("tensorrt_llm", max_beam_width="2"),
    "TRT406": lambda case: case.parameter("tensorrt_llm", gpu_device_ids="0,1;2"),
    "TRT408": lambda case: case.parameter("tensorrt_llm", max_tokens_in_paged_kv_cache="127"),
    "TRT409": lambda case: case.build("build_config", kv_cache_type="CONTINUOUS"),
    "TRT410": lambda case: (
        case.parameter("tensorrt_llm", enable_kv_cache_reuse="true"),
        case.build("build_config", plugin_config={"use_paged_context_fmha": False}),
    ),
    "TRT411": half_logits,
    "TRT412": other_engine,
    "TRT413": brain_floats,
    "TRT414": lambda case: case.text("tensorrt_llm", "count: 1", "count: 2"),
    "TRT415": newer_engine,
    "TRT501": lambda case: case.parameter("tensorrt_llm", gpt_model_type="inflight"),
    "TRT502": lambda case: case.parameter("tensorrt_llm", batch_scheduler_policy="max_utilisation"),
    "TRT503": lambda case: case.parameter("tensorrt_llm", kv_cache_free_gpu_mem_fraction="90"),
    "TRT504": lambda case: case.parameter(
        "tensorrt_llm", kv_cache_free_gpu_mem_fraction="0.9", max_tokens_in_paged_kv_cache="4096"
    ),
    "TRT505": lambda case: case.parameter("tensorrt_llm", exclude_input_in_output="yes please"),
    "TRT506": lambda case: case.parameter("tensorrt_llm", cancellation_check_period_ms="-1"),
    "TRT507": lambda case: case.text("tensorrt_llm", 'backend: "tensorrtllm"', 'backend: "tensorrt_llm"'),
    "TRT508": no_tokenizer,
    "TRT509": other_tokenizer,
    "TRT510": lambda case: case.parameter("tensorrt_llm", decoding_mode="greedy"),
    "TRT511": lambda case: case.parameter("tensorrt_llm_bls", tensorrt_llm_draft_model_name="draft"),
    "TRT512": lambda case: case.parameter("tensorrt_llm", decoding_mode="lookahead"),
    "TRT513": lambda case: case.parameter("tensorrt_llm", enable_chunked_prefill="true"),
}
BROKEN_LLMAPI: dict[str, Callable[[Case], object]] = {
    "TRT601": lambda case: (case.llmapi / "tensorrt_llm" / "1" / "model.yaml").unlink(),
    "TRT602": lambda case: case.yaml(str(case.model), str(case.folder / "nowhere")),
    "TRT603": lambda case: case.yaml("decoupled: true", "decoupled: 1"),
    "TRT604": lambda case: case.yaml("tensor_parallel_size: 1", "tensor_parallel_size: 0"),
    "TRT605": lambda case: case.yaml("free_gpu_memory_fraction: 0.8", "free_gpu_memory_fraction: 80"),
    "TRT607": lambda case: case.yaml("free_gpu_memory_fraction:", "free_gpu_mem_fraction:"),
    "TRT610": lambda case: add_parameter(case.llmapi / "tensorrt_llm" / "config.pbtxt", "tensor_parallel_size", "2"),
}

POLICIES: tuple[tuple[str, tuple[str, ...], list[str]], ...] = (
    ("", ("1", "3"), []),
    ("", ("0",), []),
    ("", ("01",), ["TRT104"]),
    ("", ("v1",), ["TRT104"]),
    ("version_policy { all {} }", ("1", "2"), []),
    ("version_policy { latest { num_versions: 2 } }", ("1",), []),
    ("version_policy { latest {} }", ("1",), ["TRT106"]),
    ("version_policy { specific { versions: [2] } }", ("1",), ["TRT106"]),
    ("version_policy { specific {} }", ("1",), ["TRT106"]),
    ("version_policy { specific { versions: [1, 2] } }", ("1",), ["TRT107"]),
)
"""A version policy, version directories, and the rules that apply."""
STEPS: tuple[tuple[str, str, str | None], ...] = (
    ("", "", "2"),
    ("", "model_version: 1", "2"),
    ("", "model_version: 2", None),
    ("", "model_version: -1", None),
    ("version_policy { all {} }", "model_version: 1", None),
    ("version_policy { all {} }", "model_version: 3", "1, 2"),
    ("version_policy { specific { versions: [1] } }", "model_version: 2", "1"),
    ("version_policy { specific { versions: [1] } }", "model_version: -1", None),
)
"""A version policy of a model with versions 1 and 2, a step's version, and the versions that are served instead."""
_TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'
_CODE = """\
class TritonPythonModel:
    def execute(self, requests):
        raise NotImplementedError
"""


def write_small(
    repository: Path, name: str, config: str, *versions: str, files: Mapping[str, str] = {"model.py": _CODE}
) -> Path:
    """A model with `files` in each version."""
    for version in versions or ("1",):
        (repository / name / version).mkdir(parents=True)
        for file, text in files.items():
            (repository / name / version / file).write_text(text)
    (repository / name / "config.pbtxt").write_text(config)
    return repository


def write_ensembles(repository: Path, steps: Mapping[str, str], version: str = "model_version: -1") -> None:
    """Ensembles of one step each."""
    for name, member in steps.items():
        maps = 'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
        step = f'step {{ model_name: "{member}" {version} {maps} }}'
        config = f'platform: "ensemble" {_TENSORS} ensemble_scheduling {{ {step} }}'
        write_small(repository, name, config, files={})


def add_parameter(config: Path, name: str, value: str) -> None:
    with config.open("a") as file:
        file.write(f'\nparameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n')


def write_policy(repository: Path, name: str, policy: str, versions: tuple[str, ...]) -> Path:
    config = f'backend: "python" max_batch_size: 0 {_TENSORS} instance_group {{ kind: KIND_CPU }} {policy}'
    return write_small(repository, name, config, *versions)


def write_step(repository: Path, name: str, policy: str, asked: str) -> Path:
    """An ensemble `name` with one step, and the model of that step."""
    write_policy(repository, f"{name}_step", policy, ("1", "2"))
    write_ensembles(repository, {name: f"{name}_step"}, asked)
    return repository
