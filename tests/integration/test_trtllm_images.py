"""Engines of models that take images, through stand-ins: the visual engine, Triton's templates for images in a real Triton, and
image requests over its protocols. No TensorRT-LLM runs here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.bundles import started
from tests.helpers.trtllm_runs import Lane, cells
from trtllm_pipeline.measure.client.images import png

MATRIX = """\
name: images
axes:
  model: [./model]
  precision: [fp16]
  parallel: [{parallel}]
  max_batch_size: [2]
  lengths: ["2048,32"]
settings:
  smoke: {{ prompt: abcdefgh, max_tokens: 4 }}
  perf: {{ exclusive: none, concurrency: [1], requests: 3, warmup_requests: 1, max_tokens: 4 }}
  accuracy: {{ input_data: asked.jsonl, max_tokens: 2 }}
"""
ARCHITECTURES = {
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
}


def lane(folder: Path, release: str, family: str, *, parallel: str = "tp1") -> Lane:
    """A release, and a model of a family that takes images."""
    found = Lane(folder, release)
    found.pipeline("stage", "download", "tiny", "--output-dir", str(folder / "model"))
    config = json.loads((folder / "model" / "config.json").read_text())
    config |= {"model_type": family, "architectures": [ARCHITECTURES[family]], "vision_config": {}}
    config |= {"max_position_embeddings": 4096} | ({"vocab_size": 152064} if family == "qwen2_vl" else {})
    for path in (folder / "model").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "preprocessor_config.json").write_text("{}")
    (folder / "cat.png").write_bytes(png(400, 300, 1))
    rows = [{"input": "wxyz", "output": "xy"}, {"input": "xyz", "image": "cat.png", "output": "yz"}]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found.matrix.write_text(MATRIX.format(parallel=parallel))
    return found


@pytest.mark.parametrize(
    ("release", "family", "script"),
    [
        pytest.param("0.16.0", "llava_onevision", "build_visual_engine.py", marks=pytest.mark.nightly),
        pytest.param("0.19.0", "llava_onevision", "build_multimodal_engine.py", marks=pytest.mark.nightly),
        ("0.19.0", "qwen2_vl", "build_multimodal_engine.py"),
    ],
)
def test_an_engine_is_asked_with_images_in_smoke_perf_and_accuracy(
    tmp_path: Path, release: str, family: str, script: str
) -> None:
    made = lane(tmp_path / "lane", release, family)
    (cell,) = made.run().values()
    assert (cell["status"], cell["reason"]) == ("done", None)
    assert made.starts() == {"convert_checkpoint.py:qwen": 1, "trtllm-build": 1, "build_visual_engine.py": 1}
    assert made.installed.program("build_visual_engine.py").name == script
    (visual,), (repository,) = made.outputs("visual"), made.outputs("repository")
    assert {path.parent.name for path in repository.glob("*/config.pbtxt")} == {
        *("preprocessing", "multimodal_encoders", "tensorrt_llm", "postprocessing", "ensemble")
    }
    for name in ("preprocessing", "multimodal_encoders"):
        assert str(visual) in (repository / name / "config.pbtxt").read_text()
    (engine,) = made.outputs("build")
    built = json.loads((engine / "config.json").read_text())["build_config"]
    assert built["max_prompt_embedding_table_size"] == 2 * 2048
    (smoke,) = made.outputs("smoke")
    checks = json.loads((smoke / "smoke.json").read_text())["checks"]
    assert {check["protocol"] for check in checks if check["name"] == "answer"} == {"grpc", "http", "http_unary"}
    assert {check["model"] for check in checks if check["name"] == "answer"} == {"ensemble"}
    (perf,) = made.outputs("perf")
    records = [json.loads(line) for line in (perf / "events.jsonl").read_text().splitlines()]
    assert {record["images"] for record in records if record["type"] == "prompt"} == {1}
    assert cell["accuracy"]["exact"] == 1.0
    exported(made, cell["id"], tmp_path)


def exported(made: Lane, cell: str, folder: Path) -> None:
    """The cell's bundle has its visual engine, and answers elsewhere as its card asks it."""
    words = ("export", cell, "--to", "bundle,compose,kubernetes", "--workspace", str(made.workspace))
    serving = ("serve", "start", cell, "--matrix", str(made.matrix), "--workspace", str(made.workspace), "--openai")
    for command in ((*words, "--openai", "--output-dir", str(folder / "no")), serving):
        refused = made.start(*command)
        said = refused.communicate(timeout=280)[1]
        assert (refused.returncode, "each request to this server needs an image" in said) == (2, True), said
    made.pipeline(*words, "--output-dir", str(folder / "out"))
    bundle = folder / "a b"
    shutil.move(folder / "out" / "bundle", bundle)
    assert (bundle / "visual" / "model.engine").is_file()
    assert (bundle / "model" / "preprocessor_config.json").is_file()
    written = [path.read_text() for path in (bundle / "repository").glob("*/config.pbtxt")]
    assert sum("@BUNDLE@/visual" in text for text in written) == 2
    assert not any(str(made.workspace) in text for text in written)
    assert "--cuda-memory-pool-byte-size=0:" in (bundle / "start").read_text()
    (asking,) = (line for line in (bundle / "README.md").read_text().splitlines() if "curl" in line)
    (folder / "image.jpg").write_bytes(png(300, 300, 1))
    shutil.rmtree(made.workspace)
    path = f"{Path(sys.executable).parent}:{made.environment['PATH']}"
    with started(bundle, {**made.environment, "PATH": path}) as port:
        ask = asking.replace(":8000", f":{port}")
        answer = subprocess.run(["sh", "-c", ask], cwd=folder, capture_output=True, text=True, check=True, timeout=280)
    assert json.loads(answer.stdout)["text_output"], answer.stdout


def test_every_rank_loads_the_encoders(tmp_path: Path) -> None:
    made = lane(tmp_path / "lane", "0.19.0", "qwen2_vl", parallel="tp2")
    (cell,) = made.run("--until", "smoke").values()
    assert (cell["status"], cell["reason"]) == ("done", None)


def test_what_only_text_goes_through_is_said_before_anything_runs(tmp_path: Path) -> None:
    made = lane(tmp_path / "lane", "1.2.0", "qwen2_vl")
    for setting, said in {
        "settings.serve.frontend=trtllm_serve": "does not support a visual engine",
        "settings.perf.images=2@224x224": "accept one per prompt",
        "settings.perf.images=1@64x64": "patches",
        "settings.repository.enable_kv_cache_reuse=true": "would be mixed up",
        "settings.lora.adapter=./adapter": "settings.lora.adapter: it is unknown how engines accept",
        "axes.precision=[bf16]": "converted to fp16, int8_wo, int4_wo",
        "settings.repository.instance_kinds={tensorrt_llm_bls: KIND_CPU}": "does not accept images",
    }.items():
        words = (
            "plan",
            "--matrix",
            str(made.matrix),
            "--toolchain",
            "tensorrt_llm",
            "--format",
            "json",
            "--set",
            setting,
        )
        (cell,) = cells(made.pipeline(*words, code=3)).values()
        assert said in cell["reason"], setting
    assert made.starts() == {}
