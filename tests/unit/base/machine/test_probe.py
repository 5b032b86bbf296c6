"""Finding TensorRT-LLM and its parts, in directories laid out as images and installations lay them out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtllm_pipeline.base.machine import probe, triton_installation
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM, TritonServer
from trtllm_pipeline.base.machine.probe import identity, survey

OLD, NEW = "llama/convert_checkpoint.py", "models/core/llama/convert_checkpoint.py"
TEMPLATE = "inflight_batcher_llm/tensorrt_llm/config.pbtxt"


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def program(path: Path, first: str = "#!/bin/sh") -> Path:
    put(path, f"{first}\n").chmod(0o755)
    return path


def metadata(folder: Path, package: str, version: str) -> None:
    put(folder / f"{package.replace('-', '_')}-{version}.dist-info/METADATA", f"Name: {package}\nVersion: {version}\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of which nothing is known: an empty PATH, no packages but those in `site`, no known directories."""
    (tmp_path / "site").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own/bin/python3"))
    monkeypatch.setattr(probe, "TREES", (str(tmp_path / "app/tensorrt_llm"), str(tmp_path / "app")))
    monkeypatch.setattr(probe, "_MPIRUNS", ())
    monkeypatch.setattr(triton_installation, "CONTAINER_BINARY", tmp_path / "opt/tritonserver/bin/tritonserver")
    for name in (probe.EXAMPLES_VARIABLE, probe.TEMPLATES_VARIABLE, "TRITON_SERVER_VERSION", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("NVIDIA_TRITON_SERVER_VERSION", raising=False)
    survey.cache_clear()
    yield tmp_path
    survey.cache_clear()


@pytest.fixture
def installed(root: Path) -> Path:
    """TensorRT-LLM 0.12.0 with its programs."""
    metadata(root / "site", "tensorrt_llm", "0.12.0")
    program(root / "bin/trtllm-build")
    return root


def tensorrt_llm() -> TensorRTLLM:
    found = probe.this_machine().tensorrt_llm
    assert found is not None
    return found


def test_nothing_is_found_where_there_is_nothing(root: Path) -> None:
    seen = survey()
    assert seen.problems == {}
    machine = seen.machine
    assert (machine.tensorrt_llm, machine.triton, machine.mpirun, machine.torch, machine.model_optimizer) == (None,) * 5
    assert not machine.assumed
    assert machine.cpus > 0


def test_the_release_is_that_of_the_metadata_and_programs_are_found(installed: Path) -> None:
    program(installed / "bin/trtllm-serve")
    assert tensorrt_llm() == TensorRTLLM(
        "0.12.0", str(installed / "bin/trtllm-build"), str(installed / "bin/trtllm-serve"), python=sys.executable
    )


def test_programs_of_an_environment_that_is_not_activated_are_found(installed: Path) -> None:
    beside = program(Path(sys.executable).parent / "trtllm-build")
    assert tensorrt_llm().build == str(beside)


def test_a_package_without_trtllm_build_cannot_build(root: Path) -> None:
    metadata(root / "site", "tensorrt-llm", "1.3.0rc9")
    put(root / "site/tensorrt_llm/__init__.py", "raise SystemExit('imported')")
    assert tensorrt_llm() == TensorRTLLM("1.3.0rc9", python=sys.executable)


def test_a_stub_from_the_package_index_is_not_taken_for_the_real_thing(root: Path) -> None:
    metadata(root / "site", "tensorrt_llm", "0.12.0")
    (root / "site/tensorrt_llm").mkdir()
    assert survey().machine.tensorrt_llm is None
    assert "neither the package nor its programs" in survey().problems["release"]


def test_metadata_of_a_broken_installation_counts_as_none(root: Path) -> None:
    (root / "site/tensorrt_llm-0.12.0.dist-info").mkdir()
    program(root / "bin/trtllm-build")
    assert survey().machine.tensorrt_llm is None
    assert str(root / "bin/trtllm-build") in survey().problems["release"]


@pytest.mark.parametrize("library", ["lib/python3.12/site-packages", "local/lib/python3.12/dist-packages"])
def test_programs_of_another_environment_say_their_own_release(root: Path, library: str) -> None:
    metadata(root / "site", "tensorrt_llm", "0.12.0")
    metadata(root / "other" / library, "tensorrt_llm", "1.1.0")
    python = root / "other/bin/python3"
    build = program(root / "bin/trtllm-build", f"#!{python} -s")
    assert tensorrt_llm() == TensorRTLLM("1.1.0", str(build), python=str(python))


def test_model_optimizer_is_looked_for_where_the_worker_will_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata(root / "site", "tensorrt_llm", "1.1.0")
    metadata(root / "site", "nvidia-modelopt", "0.47.0")
    assert survey().machine.model_optimizer == "0.47.0", "one environment for all"
    metadata(root / "other/lib/python3.12/site-packages", "tensorrt_llm", "1.1.0")
    metadata(root / "other/lib/python3.12/site-packages", "nvidia-modelopt", "0.37.0")
    program(root / "bin/trtllm-build", f"#!{root / 'other/bin/python3'}")
    survey.cache_clear()
    assert survey().machine.model_optimizer == "0.37.0", "that of TensorRT-LLM's own environment"
    metadata(root / "third/lib/python3.11/site-packages", "nvidia-modelopt", "0.47.1")
    monkeypatch.setenv(probe.QUANTIZING_VARIABLE, str(root / "third/bin/python"))
    survey.cache_clear()
    found = survey().machine
    assert (found.model_optimizer, found.model_optimizer_python) == ("0.47.1", str(root / "third/bin/python"))
    monkeypatch.setenv(probe.QUANTIZING_VARIABLE, "/nowhere/bin/python")
    survey.cache_clear()
    assert survey().machine.model_optimizer is None


@pytest.mark.parametrize("first", ["#!/usr/bin/env python3", "#!", "\x7fELF", "#!python3"])
def test_a_program_that_does_not_say_where_it_belongs_belongs_here(root: Path, first: str) -> None:
    metadata(root / "site", "tensorrt_llm", "0.12.0")
    program(root / "bin/trtllm-build", first)
    assert (tensorrt_llm().release, tensorrt_llm().python) == ("0.12.0", sys.executable)


@pytest.mark.parametrize("tree", ["app", "app/tensorrt_llm"])
@pytest.mark.parametrize("script", [OLD, NEW, "quantization/quantize.py"])
def test_examples_are_found_in_both_layouts(installed: Path, tree: str, script: str) -> None:
    put(installed / tree / "examples" / script)
    assert tensorrt_llm().examples == str(installed / tree / "examples")


def test_a_folder_examples_without_the_scripts_is_not_taken(installed: Path) -> None:
    put(installed / "app/examples/llm-api/quickstart.py")
    assert tensorrt_llm().examples is None
    assert survey().problems == {}


@pytest.mark.parametrize(
    ("part", "file"), [("examples", f"app/tensorrt_llm/examples/{OLD}"), ("templates", f"app/all_models/{TEMPLATE}")]
)
def test_parts_of_another_release_are_refused_and_named(installed: Path, part: str, file: str) -> None:
    put(installed / file)
    put(installed / "app/tensorrt_llm/tensorrt_llm/version.py", '# c\n__version__ = "0.11.0"\n')
    assert getattr(tensorrt_llm(), part) is None
    assert "release 0.11.0" in survey().problems[part]
    assert "TensorRT-LLM 0.12.0" in survey().problems[part]


def test_the_tree_of_the_right_release_wins(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, release in enumerate(("0.11.0", "0.12.0")):
        tree = installed / f"tree{number}"
        put(tree / "examples" / OLD)
        put(tree / "triton_backend/all_models" / TEMPLATE)
        put(tree / "tensorrt_llm/version.py", f'__version__ = "{release}"\n')
    monkeypatch.setattr(probe, "TREES", (str(installed / "tree0"), str(installed / "tree1")))
    assert tensorrt_llm().examples == str(installed / "tree1/examples")
    assert tensorrt_llm().templates == str(installed / "tree1/triton_backend/all_models")
    assert survey().problems == {}


def test_the_triton_backends_tree_has_both(installed: Path) -> None:
    put(installed / "app/tensorrt_llm/tensorrt_llm/version.py", '__version__ = "0.12.0"\n')
    put(installed / "app/tensorrt_llm/examples" / OLD)
    put(installed / "app/all_models" / TEMPLATE)
    found = tensorrt_llm()
    assert (found.examples, found.templates) == (
        str(installed / "app/tensorrt_llm/examples"),
        str(installed / "app/all_models"),
    )


def test_the_variable_comes_first_and_is_the_only_place(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(installed / "app/examples" / OLD)
    put(installed / "mine" / NEW)
    monkeypatch.setenv(probe.EXAMPLES_VARIABLE, str(installed / "mine"))
    monkeypatch.setenv(probe.TEMPLATES_VARIABLE, str(installed / "nowhere"))
    assert tensorrt_llm().examples == str(installed / "mine")
    assert tensorrt_llm().templates is None
    assert "nowhere" in survey().problems["templates"]


def test_a_source_installation_brings_its_examples(root: Path) -> None:
    metadata(root / "site", "tensorrt_llm", "1.0.0")
    sys.path.append(str(root / "checkout"))
    put(root / "checkout/tensorrt_llm/__init__.py")
    put(root / "checkout/tensorrt_llm/version.py", '__version__ = "1.0.0"\n')
    put(root / "checkout/examples" / NEW)
    put(root / "checkout/triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt")
    assert tensorrt_llm().examples == str(root / "checkout/examples")
    assert tensorrt_llm().templates == str(root / "checkout/triton_backend/all_models")


@pytest.mark.parametrize(
    ("told", "file", "version"),
    [("25.08", "2.60.0", "25.08"), (None, "2.60.0\n", "2.60.0"), (None, "", None), (None, None, None)],
)
def test_tritons_version_and_backends(
    root: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, file: str | None, version: str | None
) -> None:
    home = root / "opt/tritonserver"
    program(home / "bin/tritonserver")
    for backend in ("tensorrtllm", "python"):
        (home / "backends" / backend).mkdir(parents=True)
    put(home / "backends/README")
    if told:
        monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", told)
    if file is not None:
        put(home / "TRITON_VERSION", file)
    assert probe.this_machine().triton == TritonServer(
        str(home / "bin/tritonserver"), version, ("python", "tensorrtllm")
    )


def test_versions_of_packages_are_read_not_imported(root: Path) -> None:
    for package, version in (("nvidia-modelopt", "0.47.0"), ("torch", "2.9.0+cu128")):
        metadata(root / "site", package, version)
    put(root / "site/torch/__init__.py", "raise SystemExit('imported')")
    machine = probe.this_machine()
    assert (machine.model_optimizer, machine.torch) == ("0.47.0", "2.9.0+cu128")


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'", "12.8"),
        ('cuda = "13.0"', "13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'", None),
        ("debug = False", None),
    ],
)
def test_what_torch_was_built_for_is_in_its_files(root: Path, line: str, cuda: str | None) -> None:
    assert probe.torch_cuda() is None
    metadata(root / "site", "torch", "2.9.0")
    put(root / "site/torch/version.py", f"__version__ = '2.9.0'\n{line}\n")
    assert probe.torch_cuda() == cuda


def test_identity_is_about_kinds_never_about_places_or_numbers() -> None:
    def machine(count: int, *, place: str) -> Machine:
        return Machine(
            cpus=count,
            cpu=place,
            gpus=tuple(Gpu(index, f"GPU-{place}-{index}", "NVIDIA H100", 80, 90) for index in range(count)),
            driver=place,
            tensorrt_llm=TensorRTLLM("0.12.0", build=f"/{place}/trtllm-build", examples=f"/{place}/examples"),
            model_optimizer="0.47.0",
            triton=TritonServer(f"/{place}/tritonserver", "2.60.0", ("python",)),
            mpirun=f"/{place}/mpirun",
        )

    expected = {
        "tensorrt_llm": "0.12.0",
        "sm": 90,
        "gpu": "NVIDIA H100",
        "model_optimizer": "0.47.0",
        "triton": "2.60.0",
    }
    assert identity(machine(1, place="here")) == identity(machine(8, place="there")) == expected


def test_identity_of_a_machine_with_nothing_is_all_none() -> None:
    assert set(identity(Machine(1, "cpu")).values()) == {None}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="where there is a GPU, NVML's package decides")
def test_probing_imports_nothing_heavy() -> None:
    code = "import sys; from trtllm_pipeline.base.machine import probe; probe.this_machine(); print(*sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}  # it imports much
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    shown = ran.stdout.split()
    heavy = {"numpy", "packaging", "pydantic", "pytriton", "rich", "sqlite3", "subprocess", "torch", "tritonclient"}
    assert not heavy & set(shown)
