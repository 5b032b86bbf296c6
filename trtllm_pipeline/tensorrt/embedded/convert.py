"""The convert stage: turns a Hugging Face directory into a checkpoint, which is a GGUF file and the inputs of a build."""

from __future__ import annotations

from trtllm_pipeline.tensorrt.embedded.architecture import read_config
from trtllm_pipeline.tensorrt.embedded.params import ConvertEmbedded
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights
from trtllm_pipeline.tensorrt.stage.base import StageContext


def run(context: StageContext[ConvertEmbedded]) -> None:
    """Program of the stage. Input `model`: a Hugging Face directory. Writes `model.gguf` and `config.json`."""
    folder = context.inputs["model"]
    config, weights = read_config(folder), Weights(folder)
    print(  # noqa: T201 - the stage's log
        f"{config.architecture}, {len(weights)} tensors of {', '.join(weights.dtypes())}, to {context.params.precision}",
        flush=True,
    )
    # Imports numpy, which is not needed if the model is rejected or a file is missing.
    from trtllm_pipeline.tensorrt.embedded import gguf_file

    gguf_file.convert(context, config, weights)
