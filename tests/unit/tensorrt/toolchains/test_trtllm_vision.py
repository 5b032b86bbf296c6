"""Visual engines: tokens of an image, the command that builds one, and the Triton models around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.broken_repositories import write_engine, write_model
from tests.standins import templates as standin
from trtllm_pipeline.base.errors import StageError
from trtllm_pipeline.base.machine.model import TensorRTLLM
from trtllm_pipeline.models.triton_repository import model_config
from trtllm_pipeline.tensorrt.toolchains import vision
from trtllm_pipeline.tensorrt.trtllm import commands, frontends
from trtllm_pipeline.tensorrt.trtllm.params import EngineRepository, VisualBuild


@pytest.mark.parametrize(
    ("family", "width", "height", "tokens"),
    [
        ("qwen2_vl", 504, 504, 324),  # docs/multimodal.md of Triton's templates
        ("qwen2_vl", 224, 224, 64),
        ("qwen2_vl", 640, 480, 23 * 17),
        ("qwen2_vl", 1000, 1000, 36 * 36),
        # 27 x 27 of the whole, and 27 lines of 27 and a newline.
        ("llava_onevision", 384, 384, 729 + 27 * 28),
        ("llava_onevision", 768, 384, 729 + 27 * 55),
        ("llava_onevision", 384, 768, 729 + 54 * 28),
    ],
)
def test_an_image_takes_as_many_tokens_as_its_processor_says(family: str, width: int, height: int, tokens: int) -> None:
    assert vision.image_tokens(family, width, height) == tokens


def test_on_pytorch_an_image_may_be_smaller_and_of_families_without_a_visual_engine() -> None:
    tokens = {family: vision.pytorch_image_tokens(family, 64, 64) for family in ("qwen2_5_vl", "gemma3", "llama4")}
    assert tokens == {"qwen2_5_vl": 4, "gemma3": 256, "llama4": None}


@pytest.mark.parametrize(
    ("width", "height", "said"),
    [(64, 64, "the visual engine supports 128 to 5184"), (4000, 4000, "128 to 5184"), (1, 900, "200 times")],
)
def test_an_image_that_the_visual_engine_does_not_take_is_refused(width: int, height: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vision.image_tokens("qwen2_vl", width, height)


def test_a_visual_engine_is_built_from_the_model_for_a_batch() -> None:
    words = commands.visual_engine(
        VisualBuild(family="qwen2_vl", max_batch_size=4), ["python3", "/e/b.py"], model="/m", output="/o"
    )
    assert words[:2] == ["python3", "/e/b.py"]
    assert dict(zip(words[2::2], words[3::2], strict=True)) == {
        "--model_type": "qwen2_vl",
        "--model_path": "/m",
        "--output_dir": "/o",
        "--max_batch_size": "4",
    }


@pytest.mark.parametrize("release", ["0.16.0", "0.18.2", "0.19.0"])
def test_a_repository_with_images_has_the_release_s_ensemble_for_them(tmp_path: Path, release: str) -> None:
    installed = TensorRTLLM(release, templates=str(standin.install(tmp_path, release)))
    engine, model, visual = write_engine(tmp_path / "engine", release), write_model(tmp_path / "model"), tmp_path / "v"
    out = tmp_path / "out"
    out.mkdir()
    frontends.write_engine(
        out, installed, engine=engine, model=model, params=EngineRepository(max_batch_size=2), visual=visual
    )
    configs = {path.parent.name: model_config.read(path) for path in out.glob("*/config.pbtxt")}
    assert sorted(configs) == sorted(vision.MODELS)
    steps = [step.model_name for step in configs["ensemble"].ensemble_scheduling.step]
    assert steps == ["preprocessing", "multimodal_encoders", "tensorrt_llm", "postprocessing"]
    assert "image_url_input" in {tensor.name for tensor in configs["ensemble"].input}
    for name in ("preprocessing", "multimodal_encoders"):
        assert str(visual) in model_config.string_parameters(configs[name]).values()


def test_a_release_without_templates_for_images_is_refused(tmp_path: Path) -> None:
    installed = TensorRTLLM("0.12.0", templates=str(standin.install(tmp_path, "0.12.0")))
    engine, model = write_engine(tmp_path / "engine", "0.12.0"), write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    with pytest.raises(StageError, match="has no templates for multimodal_encoders"):
        frontends.write_engine(
            tmp_path / "out",
            installed,
            engine=engine,
            model=model,
            params=EngineRepository(max_batch_size=2),
            visual=tmp_path / "v",
        )
