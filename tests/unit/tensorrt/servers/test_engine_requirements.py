"""An engine's contract: written by the build, compared with the machine that is to serve it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM
from trtllm_pipeline.tensorrt.servers import engine_requirements

H100 = Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 << 30, 90)
MACHINE = Machine(8, "cpu", (H100, replace(H100, index=1)), tensorrt_llm=TensorRTLLM("0.16.0"))
NEVER = FailureClass.INFEASIBLE
RELEASE = "version: the engine needs TensorRT-LLM 0.16.0"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine of two ranks for `MACHINE`, its contract written."""
    mapping = {"world_size": 2, "tp_size": 1, "pp_size": 2}
    config = {"version": "0.16.0", "pretrained_config": {"mapping": mapping}, "build_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rank in range(2):
        (tmp_path / f"rank{rank}.engine").write_bytes(b"plan %d" % rank)
    (tmp_path / "rank0_managed_weights.safetensors").write_bytes(b"weights")
    engine_requirements.write(tmp_path, H100)
    return tmp_path


def change(engine: Path, **values: object) -> None:
    config = json.loads((engine / "config.json").read_text())
    (engine / "config.json").write_text(json.dumps({**config, **values}))


def refused(engine: Path, machine: Machine = MACHINE, failure: FailureClass = FailureClass.USER) -> ServerError:
    """The refusal; only what another engine would be built for may be INFEASIBLE, which is remembered for ever."""
    with pytest.raises(ServerError) as error:
        engine_requirements.check(engine, machine)
    assert error.value.failure is failure
    assert error.value.hint
    return error.value


def test_what_was_written_is_read_and_fits(engine: Path) -> None:
    found = engine_requirements.check(engine, MACHINE)
    assert (found.release, found.world_size, found.sm, found.gpu) == ("0.16.0", 2, 90, "NVIDIA H100 80GB HBM3")
    assert sorted(found.digests) == ["rank0.engine", "rank0_managed_weights.safetensors", "rank1.engine"]
    assert found.digests["rank1.engine"].size == 6
    assert len(found.digests["rank1.engine"].blake3) == 64


def test_the_file_holds_what_other_programs_look_for(engine: Path) -> None:
    raw = json.loads((engine / "engine.json").read_text())
    assert set(raw) == {"schema", "release", "world_size", "sm", "gpu", "digests"}
    assert set(raw["digests"]["rank0.engine"]) == {"size", "mtime_ns", "blake3"}


def test_an_engine_from_elsewhere_is_compared_by_its_config(engine: Path) -> None:
    (engine / "engine.json").unlink()
    found = engine_requirements.check(engine, MACHINE)
    assert (found.sm, found.digests) == (None, None)
    change(engine, version="0.15.0")
    assert "version: the engine needs TensorRT-LLM 0.15.0, found 0.16.0" in refused(engine, failure=NEVER).message


@pytest.mark.parametrize(
    ("config", "machine", "failure", "said"),
    [
        ({}, {"tensorrt_llm": TensorRTLLM("0.16.0.post1")}, NEVER, f"{RELEASE}, found 0.16.0.post1"),
        ({}, {"tensorrt_llm": TensorRTLLM("0.17.0")}, NEVER, f"{RELEASE}, found 0.17.0"),
        ({}, {"tensorrt_llm": None}, NEVER, f"{RELEASE}, found none"),
        ({"version": None}, {}, NEVER, "of an unknown old release"),
        ({"version": None}, {"tensorrt_llm": None}, NEVER, "of an unknown old release"),
        (
            {},
            {"gpus": (H100, replace(H100, sm=80, name="NVIDIA A100-SXM4-80GB"))},
            NEVER,
            "sm: the engine needs compute capability 90 (NVIDIA H100 80GB HBM3), found 80 (NVIDIA A100",
        ),
        ({}, {"gpus": (H100,)}, FailureClass.USER, "world_size: the engine needs 2 ranks with a GPU each, found 1"),
        (
            {"pretrained_config": {"mapping": {"world_size": 2, "tp_size": 2, "pp_size": 2}}},
            {},
            FailureClass.USER,
            "mapping.world_size: the engine needs tp * pp = 4, found 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    engine: Path, config: dict[str, Any], machine: dict[str, Any], failure: FailureClass, said: str
) -> None:
    change(engine, **config)
    assert said in refused(engine, replace(MACHINE, **machine), failure).message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rank2.engine", b"", "rank files: the engine needs one file for each of 2 ranks"),
        ("rank1.engine", None, "found rank0.engine"),
        ("rank1.engine", b"pl", "expected 6 bytes, found 2"),
        ("rank1.engine", b"PLAN 1", "rank1.engine has changed since it was built: expected digest"),
        (
            "rank0_managed_weights.safetensors",
            None,
            "rank0_managed_weights.safetensors has changed since it was built: expected a file",
        ),
    ],
)
def test_other_files_than_were_built_are_refused(engine: Path, name: str, content: bytes | None, said: str) -> None:
    if content is None:
        (engine / name).unlink()
    else:
        (engine / name).write_bytes(content)
    assert said in refused(engine).message


@pytest.mark.parametrize(("built", "installed"), [("0.16.0", "0.16.0+cu124"), ("0.16.0+cu124", "0.16.0")])
def test_a_builder_s_addition_to_a_release_is_no_difference(engine: Path, built: str, installed: str) -> None:
    change(engine, version=built)
    engine_requirements.check(engine, replace(MACHINE, tensorrt_llm=TensorRTLLM(installed)))


def test_more_gpus_and_a_copy_of_a_file_are_no_difference(engine: Path) -> None:
    os.utime(engine / "rank1.engine", ns=(1, 1))
    engine_requirements.check(engine, replace(MACHINE, gpus=(H100,) * 8))


def test_a_file_with_its_size_and_time_is_not_read_again(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_requirements, "digest_file", lambda path: pytest.fail(f"{path} was read"))
    engine_requirements.check(engine, MACHINE)


def test_an_incomplete_engine_gets_no_contract(engine: Path) -> None:
    (engine / "rank1.engine").unlink()
    with pytest.raises(ServerError, match="rank files"):
        engine_requirements.write(engine, H100)


@pytest.mark.parametrize("text", [None, "", "[]", '{"pretrained_config": {"mapping": {"world_size": "many"}}}'])
def test_a_folder_that_is_no_engine(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ServerError, match="is not an engine directory") as error:
        engine_requirements.read(tmp_path)
    assert error.value.failure is FailureClass.USER


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"release": "1", "sm": 90, "gpu": "g", "digests": {"a": {}}}'])
def test_a_broken_contract_is_named(engine: Path, text: str) -> None:
    (engine / "engine.json").write_text(text)
    with pytest.raises(ServerError, match="was not written by `pipeline stage build`"):
        engine_requirements.read(engine)
