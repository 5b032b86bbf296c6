"""What of the files on a machine decides: templates that people edit, scripts that moved, Model Optimizer's age."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.trtllm_cells import machine
from trtllm_pipeline.base.machine.model import Machine
from trtllm_pipeline.tensorrt.trtllm import backends, installation


def found(**changes: object) -> Machine:
    """A machine that was looked at, not assumed."""
    here = machine("0.20.0")
    return replace(here, assumed=False, tensorrt_llm=replace(here.tensorrt_llm, **changes))


def test_edited_templates_are_other_templates(tmp_path: Path) -> None:
    file = tmp_path / "all_models" / "inflight_batcher_llm" / "preprocessing" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text("one")
    here = found(templates=str(tmp_path / "all_models"))
    before = backends.identity(here)["templates"]
    assert backends.identity(here)["templates"] == before
    backends._folder_digest.cache_clear()  # another run
    file.write_text("two")
    assert backends.identity(here)["templates"] != before
    assert backends.identity(found(templates=None))["templates"] is None
    assert backends.identity(machine("0.20.0"))["templates"] == "assumed"


@pytest.mark.parametrize("place", ["llama", "models/core/llama"])
@pytest.mark.parametrize("asked", ["llama", "models/core/llama"])
def test_a_script_is_where_its_file_is(tmp_path: Path, place: str, asked: str) -> None:
    file = tmp_path / place / "convert_checkpoint.py"
    file.parent.mkdir(parents=True)
    file.touch()
    assert installation.script(found(examples=str(tmp_path)), f"{asked}/convert_checkpoint.py") == str(file)
    assert installation.script(found(examples=None), f"{asked}/convert_checkpoint.py") is None


def test_what_the_quantization_worker_lacks_is_named() -> None:
    here = found()
    assert backends.quantizing_lacks(replace(here, model_optimizer="0.47.0")) is None
    assert backends.quantizing_lacks(machine("1.1.0")) is None, "an assumed one is new enough"
    assert "0.37.0 is older than 0.47" in str(backends.quantizing_lacks(replace(here, model_optimizer="0.37.0")))
    assert "is not installed" in str(backends.quantizing_lacks(replace(here, model_optimizer=None)))
    assert backends.quantizing_python(here) == "python3"
    assert backends.quantizing_python(replace(here, model_optimizer_python="/q/bin/python")) == "/q/bin/python"
