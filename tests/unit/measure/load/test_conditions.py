from __future__ import annotations

import dataclasses
import json
import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.measure.load.test_perf_metrics import analyze, request, write
from trtllm_pipeline import __version__
from trtllm_pipeline.base.machine import probe
from trtllm_pipeline.base.machine.gpus import Device, Graphics
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM, TritonServer
from trtllm_pipeline.base.machine.probe import Survey
from trtllm_pipeline.measure.client.service import Service
from trtllm_pipeline.measure.load.conditions import (
    FIELDS,
    LEVEL_FIELDS,
    RUNTIMES,
    UNKNOWN,
    Conditions,
    deciding,
    differences,
    system,
    workload,
    workload_words,
)
from trtllm_pipeline.measure.load.load import Load
from trtllm_pipeline.measure.load.prompts import Prompt
from trtllm_pipeline.measure.load.target import Target
from trtllm_pipeline.measure.load.workloads import Workload

HERE = Service("127.0.0.1:8000", "127.0.0.1:8001", None, None, "ensemble", None)
TARGET = Target("grpc", HERE, "ensemble", 30.0, 16)
PROMPTS = tuple(Prompt(str(number), f"prompt {number}") for number in range(8))
MACHINE = Machine(
    cpus=16,
    cpu="AMD EPYC 9654",
    gpus=(Gpu(0, "GPU-1", "NVIDIA H200", 150_754_820_096, 90),) * 2,
    driver="570.86.15",
    cuda="12.8",
    tensorrt_llm=TensorRTLLM("1.0.0"),
    torch="2.7.1",
    triton=TritonServer("/opt/tritonserver/bin/tritonserver", "2.61.0", ()),
)


def asked(prompts: tuple[Prompt, ...] = PROMPTS, target: Target = TARGET, **how: Any) -> dict[str, Any]:
    numbers = {"requests": 4, "warmup_requests": 2, "repeats": 3, **how}
    return workload(target, prompts, Load(concurrency=(1, 4), **numbers).levels(prompts))


def installed(monkeypatch: pytest.MonkeyPatch, *, leased: int = 2) -> None:
    """MACHINE with two GPUs, of which `leased` are left to this process."""
    devices = tuple(Device(gpu, gpu.uuid) for gpu in MACHINE.gpus)
    machine = dataclasses.replace(MACHINE, gpus=MACHINE.gpus[:leased])
    monkeypatch.setattr(probe, "survey", lambda: Survey(machine, Graphics(devices[:leased], devices), {}))
    monkeypatch.setattr(probe, "version_of", lambda _package: "0.2.1")


def test_the_system_is_this_machine_and_names_neither_host_nor_user(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    recorded = system(TARGET)
    assert {"server", *recorded} == {field.name for field in FIELDS if field.about == "system"}
    assert (recorded["cpu"], recorded["cores"], recorded["driver"]) == ("AMD EPYC 9654", 16, "570.86.15")
    assert recorded["gpus"] == ["NVIDIA H200, 140 GiB"] * 2
    assert (recorded["tensorrt_llm"], recorded["triton"], recorded["torch"]) == ("1.0.0", "2.61.0", "2.7.1")
    assert (recorded["pipeline"], recorded["python"]) == (__version__, platform.python_version())
    assert isinstance(recorded["memory_gib"], int)
    text = json.dumps(recorded)
    assert platform.release() in text
    assert socket.gethostname() not in text.replace(str(recorded["kernel"]), "")
    assert str(Path.home()) not in text
    assert "GPU-1" not in text


def test_a_machine_is_one_system_whichever_of_its_gpus_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, leased=1)
    one = system(TARGET)
    installed(monkeypatch, leased=2)
    assert one == system(TARGET)
    assert one["gpus"] == ["NVIDIA H200, 140 GiB"] * 2


@pytest.mark.parametrize(
    ("version", "protocol", "served_by"),
    [
        ("xllamacpp 0.2.1", "grpc", {"triton": "2.61.0", "tensorrt_llm": None, "xllamacpp": "0.2.1"}),
        ("1.0.0", "grpc", {"triton": "2.61.0", "tensorrt_llm": "1.0.0", "xllamacpp": None}),
        (None, "http", {"triton": "2.61.0", "tensorrt_llm": "1.0.0", "xllamacpp": None}),
        ("1.0.0", "openai_completions", {"triton": None, "tensorrt_llm": "1.0.0", "xllamacpp": None}),
    ],
)
def test_a_version_is_recorded_of_what_serves_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, protocol: str, served_by: dict[str, Any]
) -> None:
    installed(monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps({} if version is None else {"version": version}))
    recorded = system(dataclasses.replace(TARGET, protocol=protocol), tmp_path)
    assert {name: recorded[name] for name in RUNTIMES} == served_by


def test_by_hand_without_an_engine_any_installed_runtime_may_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    recorded = system(TARGET)
    assert [recorded[name] for name in RUNTIMES] == ["2.61.0", "1.0.0", "0.2.1"]


def test_another_server_may_be_another_runtime() -> None:
    one, other = (Conditions(system={"triton": version}, workload={}) for version in ("2.61.0", None))
    result = differences(one, other)
    assert [each.field.name for each in deciding(result, ())] == ["triton"]
    assert deciding(result, {"server"}) == ()
    newer = Conditions(system={"triton": "2.62.0"}, workload={})
    assert deciding(differences(newer, one), {"server"}), "the same runtime in another version"


def test_an_exact_length_is_said_in_words_of_users() -> None:
    load = {"sampling": {"temperature": 0.0, "exact_length": True}}
    assert "; temperature 0, outputs of exactly max_tokens; " in workload_words(Conditions(None, None, load))


def test_what_nobody_recorded_is_said_in_words_without_a_unit() -> None:
    assert {Conditions().shown(field) for field in FIELDS} == {UNKNOWN}


def test_a_load_in_words() -> None:
    rates = {"concurrency": None, "requests": 600, "repeats": 1, "max_in_flight": 8, "warmup_requests": 4}
    levels = [
        {"concurrency": 2, "requests": 8, "repeats": 3, "warmup_requests": "4 to 32, until TTFT is flat"},
        {"concurrency": 8, "requests": 8, "repeats": 3, "warmup_requests": "16 to 128, until TTFT is flat"},
        {"concurrency": 1, "requests": "1.5 s", "repeats": 1, "warmup_requests": 2, "turn_delay_s": 0.5},
        {**rates, "request_rate": 5.0},
    ]
    words = workload_words(Conditions(None, None, {"levels": levels})).partition("concurrency ")[2]
    assert words.split("; ") == [
        "2, 8: 8 requests after 4 to 128 of warmup, until TTFT is flat, 3 times",
        "concurrency 1: 1.5 s after 2 of warmup, 0.5 s between turns",
        "5 requests/s: 600 requests after 4 of warmup, at most 8 in flight",
    ]


@pytest.mark.parametrize(
    ("http", "where"),
    [
        ("localhost:8000", "this machine"),
        ("http://127.0.0.1:8000", "this machine"),
        ("http://[::1]:9", "this machine"),
        ("192.0.2.7:8000", "another machine"),
        ("https://api.example.invalid", "another machine"),
    ],
)
def test_where_the_server_is(http: str, where: str) -> None:
    if "[::1]" in http and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6")
    assert system(dataclasses.replace(TARGET, service=dataclasses.replace(HERE, http=http)))["server_on"] == where


@pytest.mark.programs("git")
def test_the_commit_is_that_of_our_own_checkout_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "project" / "trtllm_pipeline" / "machine" / "system.py"
    package.parent.mkdir(parents=True)
    package.write_text("")
    monkeypatch.setattr(probe, "PACKAGE", tmp_path / "project" / "trtllm_pipeline")

    def git(folder: Path, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        run = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
        return run.stdout.strip()

    def commit() -> str | None:
        probe.commit.cache_clear()
        return probe.commit()

    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "somebody's own project, with ours installed in it")
    assert commit() is None
    git(tmp_path / "project", "init", "-q")
    git(tmp_path / "project", "add", "-A")
    git(tmp_path / "project", "commit", "-q", "-m", "ours")
    index = tmp_path / "project" / ".git" / "index"
    os.utime(package, (1, 1))  # git would write what it looked at into the index, were it allowed to
    before = index.stat().st_mtime_ns
    assert commit() == git(tmp_path / "project", "rev-parse", "HEAD")[:12]
    assert index.stat().st_mtime_ns == before, "a pipeline killed meanwhile would leave the index locked"
    package.write_text("changed")
    assert str(commit()).endswith("-dirty")
    probe.commit.cache_clear()


def test_more_levels_of_synthetic_prompts_are_the_same_workload() -> None:
    """One prompt for each request, so that a larger batch has more of them."""

    def of(count: int, **changed: Any) -> dict[str, Any]:
        synthetic = Workload(input_tokens=9, output_tokens=16, fresh=True, **changed).to_json()
        return workload(TARGET, PROMPTS[:count], Load(concurrency=(1,)).levels(PROMPTS[:count]), synthetic)

    def fields(found: dict[str, Any]) -> dict[str, Any]:
        return {name: found[name] for name in ("prompts", "prompts_digest", "max_tokens")}

    assert fields(of(2)) == fields(of(4))
    assert of(2)["prompts"] is None
    assert workload_words(Conditions(workload=of(2))).startswith(
        "a synthetic prompt for each request (input_tokens 9, "
    )
    for other in ({"shared_prefixes": 2}, {"seed": 1}, {"lengths": ((9, 16),)}):
        assert of(2, **other)["prompts_digest"] != of(2)["prompts_digest"]
    lengths = [of(2, lengths=((9, 16), (size, 16)))["prompts_digest"] for size in (9, 10)]
    assert lengths[0] != lengths[1]


def test_the_workload_is_what_is_going_to_be_asked() -> None:
    workload = asked()
    assert {"levels", *workload} == {field.name for field in FIELDS if field.about == "workload"} | {"levels"}
    assert (workload["prompts"], workload["max_tokens"], workload["protocol"]) == (8, [16, 16], "grpc")
    first, second = workload["levels"]
    assert {field.name for field in LEVEL_FIELDS} < set(first)
    assert (first["concurrency"], first["requests"], first["warmup_requests"], first["repeats"]) == (1, 4, 2, 3)
    assert (second["concurrency"], second["requests"]) == (4, 14), "three waves, and two slots without a warm-up"
    assert asked() == workload


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (asked((*PROMPTS[:-1], Prompt("7", "another"))), ["prompts_digest"]),
        (asked(PROMPTS[:-1]), ["prompts", "prompts_digest"]),
        (asked((*PROMPTS[:-1], Prompt("7", "prompt 7", 99))), ["prompts_digest", "max_tokens"]),
        (asked((*PROMPTS[:-1], Prompt("7", "prompt 7", stop_words=("x",)))), ["prompts_digest"]),
        (asked(target=dataclasses.replace(TARGET, max_tokens=17)), ["max_tokens"]),
        (asked(target=dataclasses.replace(TARGET, temperature=0.5)), ["sampling"]),
        (asked(target=dataclasses.replace(TARGET, options={"ignore_eos": True})), ["sampling"]),
        (asked(target=dataclasses.replace(TARGET, protocol="http")), ["protocol"]),
        (asked(requests=15), ["requests", "requests"]),
        (asked(warmup_requests=3), ["warmup_requests", "requests", "warmup_requests"]),
        (asked(repeats=1), ["repeats", "repeats"]),
    ],
)
def test_whatever_changes_the_load_is_found_by_name(changed: dict[str, Any], names: list[str]) -> None:
    both = [(1, None, "concurrency 1"), (4, None, "concurrency 4")]
    sides = [Conditions(system={}, workload=each) for each in (changed, asked())]
    assert [each.field.name for each in differences(*sides, both)] == names


def test_arrival_times_belong_to_the_load() -> None:
    def at(seed: int) -> Conditions:
        plan = Load(request_rate=(2.5,), requests=4, warmup_requests=0, repeats=2, seed=seed).levels(PROMPTS)
        return Conditions(system={}, workload=workload(TARGET, PROMPTS, plan))

    places = [(None, 2.5, "2.5 requests/s")]
    assert differences(at(0), at(0), places) == ()
    (found,) = differences(at(0), at(1), places)
    assert (found.field.name, found.place) == ("arrivals_digest", "2.5 requests/s")


def test_messages_are_the_same_prompts_whatever_a_models_template_makes_of_them() -> None:
    messages = ({"role": "user", "content": "Hello"},)
    one, two = (asked((Prompt("a", text, messages=messages),)) for text in ("<s>Hello", "[INST]Hello"))
    assert one["prompts_digest"] == two["prompts_digest"]
    assert asked((Prompt("a", "\ud800"),))["prompts_digest"], "half a character is a text too"


def test_what_was_recorded_while_measuring_is_in_the_result(tmp_path: Path) -> None:
    recorded = {"type": "conditions", "system": {"cpu": "X"}, "workload": {"prompts": 3}}
    anchor = {"monotonic_ns": 5, "unix_ns": 1_790_000_000_000_000_000}
    made = write(tmp_path / "events.jsonl", recorded, request(1, [(50, " a")]), anchor=anchor)
    conditions = Conditions.read(analyze(made, None))
    assert conditions == Conditions(1_790_000_000.0, {"cpu": "X"}, {"prompts": 3})
    assert Conditions.read(conditions.to_json()) == conditions
