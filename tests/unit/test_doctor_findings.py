"""What doctor makes of a machine: which line it gives each thing, and what it says to do."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trtllm_pipeline.base.machine import memory as machine_memory
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.assume import parse
from trtllm_pipeline.base.machine.gpus import Device, Graphics
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM, TritonServer
from trtllm_pipeline.base.machine.probe import Survey
from trtllm_pipeline.show import doctor_findings
from trtllm_pipeline.show.doctor_findings import CheckStatus, Examination, MachineCheck, Verdict

GIB = 2**30
H200 = Device(Gpu(0, "GPU-a", "NVIDIA H200", 140 * GIB, 90), "GPU-a", 139 * GIB, 0)
TRITON = TritonServer("/opt/tritonserver/bin/tritonserver", "25.08", ("python", "tensorrtllm"))
COMPLETE = TensorRTLLM("1.2.0", "/b/trtllm-build", "/b/trtllm-serve", "/app/examples", "/app/all_models", "/b/python3")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def survey(*devices: Device, problems: dict[str, str] | None = None, **parts: Any) -> Survey:
    graphics = parts.pop("graphics", Graphics(devices, devices, "580.65", "13.0", "NVML"))
    machine = Machine(cpus=2, cpu="CPU", gpus=tuple(device.gpu for device in graphics.devices), **parts)
    return Survey(machine, graphics, problems or {})


def checks(seen: Survey, workspace: Path = Path()) -> dict[str, MachineCheck]:
    found = doctor_findings.examine(seen, workspace)
    assert len({check.id for check in found if check.id != "gpu.problem"}) == len(
        [check for check in found if check.id != "gpu.problem"]
    )
    return {check.id: check for check in found}


def said(check: MachineCheck) -> tuple[CheckStatus, Any]:
    return check.status, check.value


def test_whatever_is_not_ok_says_what_to_do() -> None:
    for seen in (survey(), survey(H200, tensorrt_llm=COMPLETE), survey(H200, tensorrt_llm=TensorRTLLM("1.3.0"))):
        for check in checks(seen).values():
            assert (check.hint is None) == (check.status is CheckStatus.OK), check
            assert check.detail


def test_a_complete_machine() -> None:
    found = checks(survey(H200, tensorrt_llm=COMPLETE, triton=TRITON, model_optimizer="0.47.0"))
    assert said(found["gpu.driver"]) == (CheckStatus.OK, "580.65")
    assert said(found["gpu.devices"]) == (CheckStatus.OK, 1)
    assert said(found["gpu.0"]) == (CheckStatus.OK, "GPU-a")
    assert "140.0 GiB, compute capability 9.0" in found["gpu.0"].detail
    assert said(found["tensorrt_llm.release"]) == (CheckStatus.OK, "1.2.0")
    for part in ("build", "serve", "examples", "templates"):
        assert said(found[f"tensorrt_llm.{part}"]) == (CheckStatus.OK, getattr(COMPLETE, part))
    assert said(found["triton.server"]) == (CheckStatus.OK, "25.08")
    assert said(found["triton.backends"]) == (CheckStatus.OK, ["python", "tensorrtllm"])
    assert said(found["quantize.model_optimizer"]) == (CheckStatus.OK, "0.47.0")


@pytest.mark.parametrize(
    ("release", "transformers", "status"),
    [
        ("1.2.1", "4.57.3", CheckStatus.OK),
        ("1.2.1", "5.5.4", CheckStatus.WARNING),
        ("1.4.0rc1", "4.57.3", CheckStatus.WARNING),
    ],
)
def test_transformers_other_than_the_release_requires_is_a_warning(
    release: str, transformers: str, status: CheckStatus
) -> None:
    found = checks(survey(H200, tensorrt_llm=replace(COMPLETE, release=release, transformers=transformers)))
    assert said(found["tensorrt_llm.transformers"]) == (status, transformers)
    unread = checks(survey(H200, tensorrt_llm=replace(COMPLETE, release="1.1.0", transformers=transformers)))
    assert "tensorrt_llm.transformers" not in unread


def test_a_machine_with_nothing() -> None:
    found = checks(survey(graphics=Graphics()))
    missing = (
        "gpu.devices",
        "tensorrt_llm.release",
        "triton.server",
        "quantize.model_optimizer",
        "tensorrt_llm.mpirun",
    )
    assert {found[name].status for name in missing} == {CheckStatus.MISSING}
    assert not {"gpu.driver", "gpu.0", "tensorrt_llm.build", "triton.backends"} & found.keys()


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"processes": 2}, CheckStatus.WARNING, "in use by 2 processes"),
        ({"free_bytes": 100 * GIB, "processes": None}, CheckStatus.WARNING, "in use, 40.0 GiB taken"),
        ({"free_bytes": None, "processes": None}, CheckStatus.OK, ""),
    ],
)
def test_a_gpu_that_others_use_is_a_warning(change: dict[str, Any], status: CheckStatus, words: str) -> None:
    check = checks(survey(replace(H200, **change)))["gpu.0"]
    assert check.status is status
    assert words in check.detail


def test_a_mask_is_shown_and_one_that_hides_everything_is_told_apart_from_no_gpu() -> None:
    some = checks(survey(graphics=Graphics((H200,), (H200,) * 8, "580", "13.0", "NVML")))["gpu.devices"]
    assert (some.status, some.detail) == (CheckStatus.OK, "1 of 8, by CUDA_VISIBLE_DEVICES")
    none = checks(survey(graphics=Graphics((), (H200,) * 8, "580", "13.0", "NVML")))["gpu.devices"]
    assert said(none) == (CheckStatus.MISSING, 0)
    assert "unset CUDA_VISIBLE_DEVICES" in none.hint


def test_different_gpus_are_a_warning() -> None:
    small = Device(Gpu(1, "GPU-b", "NVIDIA T4", 15 * GIB, 75), "GPU-b")
    assert said(checks(survey(H200, small))["gpu.mixed"]) == (CheckStatus.WARNING, ["NVIDIA T4", "NVIDIA H200"])
    twin = replace(H200, gpu=replace(H200.gpu, index=1, uuid="GPU-c"))
    assert "gpu.mixed" not in checks(survey(H200, twin))


def test_every_problem_is_a_line() -> None:
    seen = survey(graphics=Graphics(problems=("one", "two")), problems={"release": "a stub"})
    found = doctor_findings.examine(seen, Path())
    assert [check.detail for check in found if check.id == "gpu.problem"] == ["one", "two"]
    assert "a stub" in [check.detail for check in found]


def test_examples_of_another_release_are_a_warning_and_none_are_missing() -> None:
    bare = TensorRTLLM("0.12.0", build="/b/trtllm-build")
    mismatch = "/app/examples belongs to release 0.11.0, but TensorRT-LLM 0.12.0 is installed"
    found = checks(survey(H200, tensorrt_llm=bare, problems={"examples": mismatch}))
    assert (found["tensorrt_llm.examples"].status, found["tensorrt_llm.examples"].detail) == (
        CheckStatus.WARNING,
        mismatch,
    )
    assert found["tensorrt_llm.templates"].status is CheckStatus.MISSING
    assert probe.TEMPLATES_VARIABLE in (found["tensorrt_llm.templates"].hint or "")


def test_triton_without_its_python_backend_is_a_warning() -> None:
    assert (
        checks(survey(triton=replace(TRITON, backends=("onnxruntime",))))["triton.backends"].status
        is CheckStatus.WARNING
    )


@pytest.mark.parametrize(("script", "words"), [("echo 'mpirun (Open MPI) 4.1.7'", "4.1.7"), (None, "does not start")])
def test_mpirun_says_its_version(tmp_path: Path, script: str | None, words: str) -> None:
    mpirun = tmp_path / "mpirun"
    if script:
        mpirun.write_text(f"#!/bin/sh\n{script}\n")
        mpirun.chmod(0o755)
    assert words in checks(survey(mpirun=str(mpirun)))["tensorrt_llm.mpirun"].detail


@pytest.mark.parametrize(
    ("cuda", "gpus", "status"),
    [("12.8", (H200,), CheckStatus.OK), (None, (H200,), CheckStatus.WARNING), (None, (), CheckStatus.OK)],
)
def test_a_torch_for_cpus_beside_a_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, gpus: tuple[Device, ...], status: CheckStatus
) -> None:
    monkeypatch.setattr(probe, "torch_cuda", lambda: cuda)
    assert checks(survey(*gpus, torch="2.9.0"))["quantize.torch"].status is status


@pytest.mark.parametrize(
    ("free_disk", "free_shm", "disk", "shm"),
    [
        (60 * GIB, 2 * GIB, CheckStatus.OK, CheckStatus.OK),
        (40 * GIB, 64 * 2**20, CheckStatus.WARNING, CheckStatus.WARNING),
    ],
)
def test_little_space_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_disk: int, free_shm: int, disk: CheckStatus, shm: CheckStatus
) -> None:
    asked = []

    def usage(folder: object) -> Usage:
        asked.append(str(folder))
        free = free_shm if str(folder) == "/dev/shm" else free_disk
        return Usage(free, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    found = checks(survey(), tmp_path / "not" / "there" / "yet")
    assert said(found["space.workspace"]) == (disk, free_disk)
    assert said(found["space.shm"]) == (shm, free_shm)
    assert asked == [str(tmp_path), "/dev/shm"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_workspace_that_cannot_be_written_is_missing(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert checks(survey(), tmp_path / "w")["space.workspace"].status is CheckStatus.MISSING


@pytest.mark.parametrize(
    ("limit", "gpus", "status", "value"),
    [
        (-1, (H200,), CheckStatus.OK, None),
        (65536, (H200,), CheckStatus.WARNING, 65536),
        (65536, (), CheckStatus.OK, 65536),
    ],
)
def test_locked_memory_matters_with_gpus(
    monkeypatch: pytest.MonkeyPatch, limit: int, gpus: tuple[Device, ...], status: CheckStatus, value: int | None
) -> None:
    monkeypatch.setattr(doctor_findings.resource, "getrlimit", lambda _which: (limit, limit))
    assert said(checks(survey(*gpus))["limits.memlock"]) == (status, value)


@pytest.mark.parametrize(
    ("limit", "status"), [(256, CheckStatus.WARNING), (1024, CheckStatus.OK), (-1, CheckStatus.OK)]
)
def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch, limit: int, status: CheckStatus) -> None:
    monkeypatch.setattr(doctor_findings.resource, "getrlimit", lambda _which: (limit, limit))
    assert checks(survey())["limits.open_files"].status is status


@pytest.fixture
def no_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_no_token_is_said(no_tokens: Path) -> None:
    found = checks(survey())
    assert said(found["hub.hugging_face"]) == said(found["hub.modelscope"]) == (CheckStatus.MISSING, False)


@pytest.mark.parametrize(
    ("check", "variable", "file"),
    [
        ("hub.hugging_face", "HF_TOKEN", None),
        ("hub.hugging_face", "HUGGING_FACE_HUB_TOKEN", None),
        ("hub.hugging_face", None, ".cache/huggingface/token"),
        ("hub.modelscope", "MODELSCOPE_API_TOKEN", None),
        ("hub.modelscope", None, ".modelscope/credentials/cookies"),
    ],
)
def test_a_token_is_present_and_its_value_never_shown(
    monkeypatch: pytest.MonkeyPatch, no_tokens: Path, check: str, variable: str | None, file: str | None
) -> None:
    if variable:
        monkeypatch.setenv(variable, "hf_SECRET")
    if file:
        (no_tokens / file).parent.mkdir(parents=True)
        (no_tokens / file).write_text("hf_SECRET")
    seen = survey()
    found = checks(seen)
    assert said(found[check]) == (CheckStatus.OK, True)
    assert "SECRET" not in json.dumps(Examination(seen.machine, tuple(found.values()), ()).to_json())


def test_packages_that_the_project_needs_and_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert checks(survey())["host.packages"].status is CheckStatus.OK
    real = doctor_findings.distribution_of
    monkeypatch.setattr(
        doctor_findings,
        "distribution_of",
        lambda name, *more: None if name in {"rich", "blake3"} else real(name, *more),
    )
    found = checks(survey())["host.packages"]
    assert said(found) == (CheckStatus.MISSING, ["blake3", "rich"])
    assert found.hint == "python3 -m pip install blake3 rich"
    monkeypatch.setattr(doctor_findings, "distribution_of", lambda *_: None)
    assert said(checks(survey())["host.packages"]) == (CheckStatus.WARNING, None)


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "4096", "memory.max": "8192"}, 4096),
        ("0::/\n", {"memory.max": "max"}, None),
        ("4:memory:/host/only\n1:cpu:/\n0::/\n", {"memory/memory.limit_in_bytes": "12288"}, 12288),
    ],
)
def test_the_memory_limit_is_the_least_of_all_groups_above(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, text in limits.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine_memory, "_CGROUPS", tmp_path / "fs")
    memory = checks(survey())["host.memory"]
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.value == (physical if expected is None else expected)
    assert ("by cgroup" in memory.detail) == (expected is not None)


def test_an_assumed_machine_is_shown_without_asking_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_findings, "_first_line", lambda *_: pytest.fail("a program of this machine was asked"))
    found = {
        check.id: check
        for check in doctor_findings.examine_assumed(parse("tensorrt_llm==1.3.0,sm=90,gpus=2,triton=no"))
    }
    assert {check.group for check in found.values()} == {"gpu", "tensorrt_llm", "triton", "quantize"}
    assert said(found["tensorrt_llm.release"]) == (CheckStatus.OK, "1.3.0")
    assert said(found["tensorrt_llm.build"]) == (CheckStatus.MISSING, None)
    assert said(found["gpu.1"]) == (CheckStatus.OK, "GPU-assumed-1")
    assert found["triton.server"].status is CheckStatus.MISSING


class Lane:
    """A toolchain as far as doctor asks it."""

    def __init__(self, missing: str | None) -> None:
        self.summary = "a lane"
        self.missing = lambda machine: missing and f"{missing} on {machine.cpu}"


def test_every_toolchain_says_for_itself_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Lane:
        if name == "broken":
            raise ImportError("No module named 'x'")
        return Lane(None if name == "good" else "no engine")

    monkeypatch.setattr(doctor_findings.toolchains, "names", lambda: ("good", "embedded", "broken"))
    monkeypatch.setattr(doctor_findings.toolchains, "load", load)
    good, embedded, broken = doctor_findings.judge(Machine(1, "CPU"))
    assert good == Verdict("good", "a lane", None, None)
    assert (embedded.missing, embedded.hint is None) == ("no engine on CPU", False)
    assert broken.missing == "cannot be loaded: No module named 'x'"


MACHINE = Machine(1, "CPU")
CPU_ONLY = (
    Verdict("tensorrt_llm", "engines", "TensorRT-LLM is not installed", "take an image"),
    Verdict("embedded", "no GPU", None, None),
)
CHECKS = (
    MachineCheck("host.cpus", CheckStatus.OK, 2, "2 CPUs"),
    MachineCheck("gpu.devices", CheckStatus.MISSING, 0, "no GPU", "buy one"),
    MachineCheck("space.shm", CheckStatus.WARNING, 1, "64 MiB free", "take more"),
    MachineCheck("hub.hugging_face", CheckStatus.MISSING, False, "no token", "log in"),
)


NEITHER = (CPU_ONLY[0], Verdict("embedded", "no GPU", "no package", "install it"))


@pytest.mark.parametrize(
    ("verdicts", "asked", "verdict", "grey", "hints"),
    [
        (
            CPU_ONLY,
            None,
            "ready: pipeline run uses the toolchain embedded; see space.shm below",
            ["TensorRT-LLM is not installed", "no GPU", "no token"],
            ["do: take more"],
        ),
        (
            CPU_ONLY,
            "tensorrt_llm",
            "not ready: the toolchain tensorrt_llm cannot be used on this machine",
            ["no token"],
            ["do: take an image", "do: buy one", "do: take more"],
        ),
        (
            NEITHER,
            None,
            "not ready: no toolchain can be used on this machine",
            ["no token"],
            ["do: take an image", "do: install it", "do: buy one", "do: take more"],
        ),
    ],
)
def test_the_verdict_comes_first_and_what_nobody_needs_is_grey(
    verdicts: tuple[Verdict, ...], asked: str | None, verdict: str, grey: list[str], hints: list[str]
) -> None:
    first, *found = Examination(MACHINE, CHECKS, verdicts, asked).lines()
    assert first.text == verdict
    assert [line.text.split("  ")[-1].strip() for line in found if line.gray] == grey
    assert [line.text.strip() for line in found if line.text.strip().startswith("do: ")] == hints


def test_every_toolchain_that_can_be_missing_says_what_to_install() -> None:
    assert set(doctor_findings.toolchains.names()) <= doctor_findings.NEXT.keys()
