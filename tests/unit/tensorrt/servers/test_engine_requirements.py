"""An engine's contract: written by the build, compared with the machine that is to serve it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_pipeline.base.errors import FailureClass, ServerError
from trtllm_pipeline.base.machine.model import Gpu, Machine, TensorRTLLM
from trtllm_pipeline.tensorrt.servers import engine_requirements

H100 = Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3", 80 << 30, 90)
MACHINE = Machine(8, "cpu", (H100, replace(H100, index=1)), tensorrt_llm=TensorRTLLM("0.16.0"))
NEVER = FailureClass.INFEASIBLE


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


@pytest.mark.parametrize("installed", ["0.16.0.post1", "0.17.0", None])
def test_another_release_is_refused(engine: Path, installed: str | None) -> None:
    machine = replace(MACHINE, tensorrt_llm=TensorRTLLM(installed) if installed else None)
    expected = f"version: the engine needs TensorRT-LLM 0.16.0, found {installed or 'none'}"
    assert expected in refused(engine, machine, NEVER).message


@pytest.mark.parametrize(("built", "installed"), [("0.16.0", "0.16.0+cu124"), ("0.16.0+cu124", "0.16.0")])
def test_a_builder_s_addition_to_a_release_is_no_difference(engine: Path, built: str, installed: str) -> None:
    change(engine, version=built)
    engine_requirements.check(engine, replace(MACHINE, tensorrt_llm=TensorRTLLM(installed)))


def test_an_engine_of_the_first_builders_is_refused(engine: Path) -> None:
    change(engine, version=None)
    assert "of an unknown old release" in refused(engine, failure=NEVER).message
    assert "of an unknown old release" in refused(engine, replace(MACHINE, tensorrt_llm=None), NEVER).message


def test_another_compute_capability_is_refused(engine: Path) -> None:
    machine = replace(MACHINE, gpus=(H100, replace(H100, sm=80, name="NVIDIA A100-SXM4-80GB")))
    error = refused(engine, machine, NEVER)
    assert "sm: the engine needs compute capability 90 (NVIDIA H100 80GB HBM3), found 80 (NVIDIA A100" in error.message


def test_too_few_gpus_are_refused_and_more_are_not(engine: Path) -> None:
    assert (
        "world_size: the engine needs 2 ranks with a GPU each, found 1"
        in refused(engine, replace(MACHINE, gpus=(H100,))).message
    )
    engine_requirements.check(engine, replace(MACHINE, gpus=(H100,) * 8))


def test_a_missing_or_extra_rank_is_refused(engine: Path) -> None:
    (engine / "rank2.engine").touch()
    assert "rank files: the engine needs one file for each of 2 ranks" in refused(engine).message
    (engine / "rank2.engine").unlink()
    (engine / "rank1.engine").unlink()
    assert "found rank0.engine" in refused(engine).message


def test_a_mapping_that_contradicts_itself_is_refused(engine: Path) -> None:
    change(engine, pretrained_config={"mapping": {"world_size": 2, "tp_size": 2, "pp_size": 2}})
    assert "mapping.world_size: the engine needs tp * pp = 4, found 2" in refused(engine).message


def test_a_shortened_file_is_refused(engine: Path) -> None:
    (engine / "rank1.engine").write_bytes(b"pl")
    assert "expected 6 bytes, found 2" in refused(engine).message


def test_a_changed_file_is_refused_and_a_copy_is_not(engine: Path) -> None:
    os.utime(engine / "rank1.engine", ns=(1, 1))
    engine_requirements.check(engine, MACHINE)
    (engine / "rank1.engine").write_bytes(b"PLAN 1")
    assert "rank1.engine has changed since it was built: expected digest" in refused(engine).message


def test_a_file_with_its_size_and_time_is_not_read_again(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_requirements, "digest_file", lambda path: pytest.fail(f"{path} was read"))
    engine_requirements.check(engine, MACHINE)


def test_a_missing_file_is_named(engine: Path) -> None:
    (engine / "rank0_managed_weights.safetensors").unlink()
    assert (
        "rank0_managed_weights.safetensors has changed since it was built: expected a file" in refused(engine).message
    )


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
