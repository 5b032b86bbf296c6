from __future__ import annotations

from pathlib import Path

import pytest

from tests.contexts import context
from trtllm_pipeline.models.hub.verify import check_folder
from trtllm_pipeline.tensorrt.stage.download import run
from trtllm_pipeline.tensorrt.stage.params import DownloadParams


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_generated_model_is_a_whole_folder_and_repeatable(architecture: str, tmp_path: Path) -> None:
    outs = []
    for attempt in (tmp_path / "1", tmp_path / "2"):
        (attempt / "out").mkdir(parents=True)
        run(
            context(
                DownloadParams, {"source": {"generated": architecture, "seed": 3}}, {}, {}, attempt / "out", attempt
            )
        )
        check_folder(attempt / "out", "generated")
        outs.append({path.name: path.read_bytes() for path in (attempt / "out").iterdir()})
    assert outs[0] == outs[1]
