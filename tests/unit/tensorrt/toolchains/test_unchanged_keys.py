"""Settings that say what holds without them: nothing is made again for them."""

from __future__ import annotations

import pytest

from tests.helpers.trtllm_cells import cell, plan
from trtllm_pipeline.base.domain import Json


@pytest.mark.parametrize(
    ("name", "value"), [("triton_parameters", {}), ("instance_kinds", {}), ("triton_max_batch_size", 8)]
)
def test_what_changes_nothing_leaves_every_key(name: str, value: Json) -> None:
    asked = cell(batch=8, settings={f"repository.{name}": value})
    assert set(plan(asked).stage_runs) == set(plan(cell(batch=8)).stage_runs)
