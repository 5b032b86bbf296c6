"""A machine from one line, and the line from a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_pipeline.base.errors import UsageError
from trtllm_pipeline.base.machine.assume import ASSUMED, KEYS, describe, parse
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM, TritonServer

SM_IS_MISSING = "sm is missing; add a GPU (H100), the compute capability (sm=90 means 9.0), or gpus=0"
EXPECTED, OTHERS = "expected KEY=VALUE, or GPUs such as 2xH100", "describe another GPU by"
LINE = "tensorrt_llm==0.12.0,sm=90,gpus=8,gpu_memory_gib=80"


def faults(line: str) -> list[str]:
    with pytest.raises(UsageError) as raised:
        parse(line)
    assert raised.value.hint == "--assume 8xH100,tensorrt_llm==1.2"
    return [fault.strip() for fault in raised.value.message.splitlines()[1:]]


def test_a_line_is_a_machine() -> None:
    machine = parse(LINE)
    assert machine.assumed
    assert [gpu.index for gpu in machine.gpus] == list(range(8))
    assert len({gpu.uuid for gpu in machine.gpus}) == 8
    assert {(gpu.sm, gpu.memory_bytes) for gpu in machine.gpus} == {(90, 80 * 2**30)}
    assert machine.tensorrt_llm == TensorRTLLM(
        "0.12.0", build="trtllm-build", examples="/app/examples", templates="/app/all_models", bench="trtllm-bench"
    )
    assert machine.triton == TritonServer("tritonserver", ASSUMED, ("python", "tensorrtllm"))
    assert (machine.cpus, machine.mpirun) == (64, "mpirun")


@pytest.mark.parametrize(
    ("release", "build", "serve", "examples", "model_optimizer"),
    [
        ("0.8.0", True, False, True, False),
        ("0.10.0", True, False, True, True),
        ("0.15.0", True, True, True, True),
        ("1.2.1", True, True, True, True),
        ("1.3.0rc3", True, True, True, True),
        ("1.3.0rc3+cu130", True, True, True, True),
        ("1.3.0rc20", True, True, True, True),
        ("1.3.0rc21", False, True, False, True),
        ("1.3.0", False, True, False, True),
        ("2.0", False, True, False, True),
    ],
)
def test_what_a_release_usually_has(
    release: str, build: bool, serve: bool, examples: bool, model_optimizer: bool
) -> None:
    machine = parse(f"tensorrt_llm=={release},sm=90")
    found = machine.tensorrt_llm
    parts = found.build, found.serve, found.examples, machine.model_optimizer
    assert [part is not None for part in parts] == [build, serve, examples, model_optimizer]
    assert ("tensorrtllm" in machine.triton.backends) == build


def test_everything_can_be_said() -> None:
    line = (
        "tensorrt-llm == 1.3.0, sm=120, gpus=2, gpu_memory_gib=31.8, gpu=NVIDIA GeForce RTX 5090, build=yes, serve=no, bench=no,"
        "examples=yes, templates=no, triton=2.60.0, model_optimizer==0.47.0, cpus=12"
    )
    machine = parse(line)
    assert machine.gpus[1] == Gpu(1, "GPU-assumed-1", "NVIDIA GeForce RTX 5090", 318 * 2**30 // 10, 120)
    assert machine.tensorrt_llm == TensorRTLLM("1.3.0", build="trtllm-build", examples="/app/examples")
    assert machine.triton == TritonServer("tritonserver", "2.60.0", ("python", "tensorrtllm"))
    assert (machine.model_optimizer, machine.cpus) == ("0.47.0", 12)


def test_no_gpu_and_no_tensorrt_llm_is_a_machine_too() -> None:
    machine = parse("gpus=0")
    assert machine.gpus == ()
    assert (machine.sm, machine.tensorrt_llm, machine.triton, machine.torch) == (None,) * 4
    assert describe(machine) == "gpus=0,triton=no,model_optimizer=no,cpus=8"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tensorrt_llm==banana,sm=90", "tensorrt_llm=banana: expected a release, such as 0.12.0 or 1.3.0rc3"),
        ("tensorrt_llm==0.12.0", SM_IS_MISSING),
        ("sm=9.0", "sm=9.0: expected a whole number from 50 to 199"),
        ("sm=9", "sm=9: expected a whole number from 50 to 199"),
        ("sm=88", "gpu_memory_gib is missing, and there is no default for sm=88"),
        ("sm=90,sm=80", "sm=80: sm is given twice"),
        ("gpus=0,sm=90", "sm=90: gpus=0 leaves no GPU for it to describe"),
        ("sm=90,build=yes", "build=yes: requires tensorrt_llm==RELEASE"),
        ("sm=90,gpu_memory_gib=80GB", "gpu_memory_gib=80GB: expected a number of GiB, such as 80"),
        ("sm=90,gpu_memory_gib=nan", "gpu_memory_gib=nan: expected a number of GiB, such as 80"),
        ("sm=90,gpu_memory_gib=0", "gpu_memory_gib=0: expected a number of GiB, such as 80"),
        ("sm=90,cpus=0", "cpus=0: expected a whole number from 1 to 65536"),
        ("tensorrt_llm==1.0,sm=90,examples=true", "examples=true: expected yes or no"),
        ("sm=90,", f"'': {EXPECTED}"),
        ("sm=90,gpus", f"'gpus': {EXPECTED}"),
        ("sm=90,tensorrt_llm==", f"'tensorrt_llm==': {EXPECTED}"),
        ("sm=90,gpu_memory=80", "gpu_memory=80: unknown key 'gpu_memory'; did you mean 'gpu_memory_gib'?"),
        ("4xH10", f"'4xH10': {EXPECTED}; did you mean H100? {OTHERS} gpus=4,sm=SM,gpu_memory_gib=GIB,gpu=H10"),
        (
            "V100-16GB",
            f"'V100-16GB': {EXPECTED}; did you mean V100? {OTHERS} gpus=1,sm=SM,gpu_memory_gib=GIB,gpu=V100-16GB",
        ),
        ("2xH100,gpus=4", "gpus=4: gpus is given twice"),
        ("gpus=4,2xH100", "2xH100: gpus is given twice"),
        ("2xH100,L40S", "L40S: GPUs are given twice; separate machines with ;"),
        ("0xH100", "gpus=0: there is NVIDIA H100 80GB HBM3 too"),
        ("sm=90,zzzz=1", f"zzzz=1: unknown key 'zzzz'; the keys are {', '.join(KEYS)}"),
    ],
)
def test_a_fault_is_said_with_what_was_expected(line: str, expected: str) -> None:
    assert faults(line) == [expected]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("A100-80GB", "NVIDIA A100-SXM4-80GB"),
        ("A100 40GB", "NVIDIA A100-SXM4-40GB"),
        ("h100-80gb", "NVIDIA H100 80GB HBM3"),
        ("H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("L40S-48GB", "NVIDIA L40S"),
        ("H20", "NVIDIA H20"),
        ("H800", "NVIDIA H800"),
    ],
)
def test_a_gpu_may_have_the_size_that_it_is_sold_with(typed: str, name: str) -> None:
    assert {gpu.name for gpu in parse(f"2x{typed}").gpus} == {name}


def test_all_faults_are_said_at_once() -> None:
    found = faults("tensorrt_llm==x,tenser_rt=1,sm=90,gpus=-1,build=maybe,cpus=many")
    wrong = " ".join(fault.partition(":")[0] for fault in found)
    assert wrong == "tenser_rt=1 gpus=-1 tensorrt_llm=x build=maybe cpus=many"


yes_no = st.sampled_from(("", "yes", "no"))
LINES = st.fixed_dictionaries(
    {
        "tensorrt_llm": st.sampled_from(("0.8.0", "0.12.0", "1.2.1", "1.3.0rc27")),
        "sm": st.sampled_from(("80", "89", "90", "100", "121")),
        "gpus": st.integers(1, 16).map(str),
        "gpu_memory_gib": st.one_of(st.just(""), st.floats(0.1, 2**20).map(str), st.integers(1, 300).map(str)),
        "gpu": st.sampled_from(("", "NVIDIA H100 80GB HBM3", "A100=odd")),
        "build": yes_no,
        "serve": yes_no,
        "bench": yes_no,
        "examples": yes_no,
        "templates": yes_no,
        "triton": st.sampled_from(("", "yes", "no", "2.60.0")),
        "model_optimizer": st.sampled_from(("", "yes", "no", "0.47.0")),
        "cpus": st.sampled_from(("", "1", "224")),
    }
).map(lambda parts: ",".join(f"{key}={value}" for key, value in parts.items() if value))


@given(LINES)
def test_describing_is_the_inverse_of_parsing(line: str) -> None:
    machine = parse(line)
    told = describe(machine)
    assert parse(told) == machine
    assert describe(parse(told)) == told


def test_a_machine_that_was_found_is_described_by_its_weakest_gpu() -> None:
    found = Machine(
        cpus=48,
        cpu="CPU",
        gpus=(
            Gpu(0, "GPU-a", "NVIDIA H100 80GB HBM3", 85520809984, 90),
            Gpu(1, "GPU-b", "NVIDIA A10, of some kind", 24146608128, 86),
        ),
        driver="580",
        tensorrt_llm=TensorRTLLM("1.2.0", build="/usr/local/bin/trtllm-build", python="/usr/bin/python3"),
        triton=TritonServer("/opt/tritonserver/bin/tritonserver", None, ("python",)),
    )
    told = describe(found)
    assert told == (
        "tensorrt_llm==1.2.0,gpus=2,sm=86,gpu_memory_gib=22.5,gpu=NVIDIA A10  of some kind,build=yes,serve=no,"
        "bench=no,examples=no,templates=no,triton=assumed,model_optimizer=no,cpus=48"
    )
    assert len(parse(told).gpus) == 2


def test_here_is_this_machine_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine(
        cpus=48,
        cpu="CPU",
        gpus=(Gpu(0, "GPU-a", "NVIDIA L40S", 48 * 2**30, 89),),
        tensorrt_llm=TensorRTLLM("1.2.0", build="/usr/bin/trtllm-build", examples="/src/examples"),
        triton=TritonServer("/opt/tritonserver/bin/tritonserver", "2.62.0", ("python", "tensorrtllm")),
        model_optimizer="0.33.0",
    )
    monkeypatch.setattr("trtllm_pipeline.base.machine.probe.this_machine", lambda: found)
    assert parse("here") == parse(describe(found))
    newer = parse("here, tensorrt-llm == 1.3.0")
    assert newer.gpus == parse("here").gpus
    assert newer.cpus == 48
    assert newer.tensorrt_llm == TensorRTLLM(
        "1.3.0", serve="trtllm-serve", bench="trtllm-bench"
    )  # templates=no is said of this machine
    assert (newer.triton.version, newer.model_optimizer) == (ASSUMED, ASSUMED)
    assert [(gpu.name, gpu.sm) for gpu in parse("here,sm=90").gpus] == [("sm90", 90)]
    assert [(gpu.name, gpu.sm) for gpu in parse("here,2xH100").gpus] == [("NVIDIA H100 80GB HBM3", 90)] * 2
    assert parse("here,gpus=0").gpus == ()
    with pytest.raises(UsageError, match="unknown key 'gpsu'"):
        parse("here,gpsu=2")


def test_the_version_of_transformers_can_be_assumed() -> None:
    machine = parse(f"{LINE},transformers==4.41.0")
    assert machine.tensorrt_llm.transformers == "4.41.0"
    assert parse(describe(machine)) == machine
    assert faults(f"{LINE},transformers=new") == ["transformers=new: expected a version, such as 4.41.0"]
    assert faults("gpus=0,transformers=4.41.0") == ["transformers=4.41.0: requires tensorrt_llm==RELEASE"]


def test_host_memory_is_known_only_where_it_is_given() -> None:
    told = parse("gpus=0,memory_gib=64,shm_gib=0.5")
    assert (told.memory_bytes, told.shared_bytes) == (64 << 30, 1 << 29)
    assert parse(describe(told)) == told
    assert parse("gpus=0").memory_bytes is None
    with pytest.raises(UsageError, match="memory_gib=much: expected a number of GiB"):
        parse("gpus=0,memory_gib=much")


@pytest.mark.parametrize(
    ("line", "count", "name", "sm", "gib"),
    [
        ("2xH100,tensorrt_llm==1.2", 2, "NVIDIA H100 80GB HBM3", 90, 79.6),
        ("H200", 1, "NVIDIA H200", 90, 140.4),
        ("8 x nvidia h100 80gb hbm3", 8, "NVIDIA H100 80GB HBM3", 90, 79.6),
        ("3xRTX 4090", 3, "NVIDIA GeForce RTX 4090", 89, 24.0),
        ("gpus=4,L40S", 4, "NVIDIA L40S", 89, 45.0),
        ("2xA100-40GB,gpu_memory_gib=20,gpu=half an A100", 2, "half an A100", 80, 20.0),
    ],
)
def test_a_gpu_has_its_drivers_name_and_memory(line: str, count: int, name: str, sm: int, gib: float) -> None:
    machine = parse(line)
    assert len(machine.gpus) == count
    assert {(gpu.name, gpu.sm, gpu.memory_bytes) for gpu in machine.gpus} == {(name, sm, round(gib * 10) * 2**30 // 10)}
    assert parse(describe(machine)) == machine


def test_a_release_is_written_like_its_package() -> None:
    written = [parse(f"H100,tensorrt_llm=={release}").tensorrt_llm for release in ("1.2", "1.3rc2", "1.2.1")]
    assert [each and each.release for each in written] == ["1.2.0", "1.3.0rc2", "1.2.1"]
