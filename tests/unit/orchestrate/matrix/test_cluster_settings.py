"""Settings that are of the whole matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import MatrixError, UsageError
from trtllm_pipeline.orchestrate import flow
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix
from trtllm_pipeline.orchestrate.plan import planner
from trtllm_pipeline.orchestrate.plan.planner import Request

AXES = "model: [tiny]\n  precision: [fp16]\n  max_batch_size: [4]\n  lengths: ['192,16']\n"


def matrix(folder: Path, *, axis: str = "", more: str = "") -> Path:
    path = folder / "matrix.yaml"
    path.write_text(f"name: x\naxes:\n  {AXES}{axis}{more}")
    return path


def test_the_cluster_is_the_same_for_all_cells(tmp_path: Path) -> None:
    given = matrix(tmp_path, more="settings: {cluster: {accelerator: h100, sbatch: [--partition=gpu]}}\n")
    assert load_matrix(given).of_cluster("sbatch") == ["--partition=gpu"]
    with pytest.raises(MatrixError, match="is the same for all cells: set it in"):
        load_matrix(matrix(tmp_path, axis="  settings.cluster.accelerator: [a, b]\n"))
    with pytest.raises(MatrixError, match="cluster is the same for all cells"):
        load_matrix(matrix(tmp_path, more="override: [{where: {}, settings: {cluster: {accelerator: a}}}]\n"))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ray_address": "host:1"}, "--ray-address needs --executor ray"),
        ({"executor": "slurm", "ray_address": "host:1"}, "--ray-address needs --executor ray"),
        ({"executor": "ray", "assume": "gpus=0"}, "--assume describes a machine, --executor uses those of a cluster"),
        ({"executor": "slurm", "sets": ("settings.cluster.exchange=s3://b/x",)}, "exchange is for --executor ray"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    request = Request(matrix(tmp_path), **asked)
    with pytest.raises(UsageError, match=message), flow.place_of(request, planner.load(request)):
        pass
