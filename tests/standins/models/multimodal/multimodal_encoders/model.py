"""Stands for TensorRT-LLM's multimodal_encoders: a feature for each pixel of what preprocessing made of an image."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        folder = Path(parameters.get("multimodal_model_path") or parameters["visual_model_path"])
        built = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not (folder / "model.engine").read_bytes():
            raise pb.TritonModelException("stand-in: the visual engine is empty")
        if built["builder_config"]["model_type"] != "llava" and not parameters.get("hf_model_path"):
            raise pb.TritonModelException("AssertionError: Need to provide hf_model_path")
        self.outputs = {
            each["name"]: (pb.triton_string_to_numpy(each["data_type"]), [max(int(size), 1) for size in each["dims"]])
            for each in config["output"]
        }

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb.get_input_tensor_by_name(request, "pixel_values")
        if image is None:
            raise pb.TritonModelException("AssertionError: There is no preprocessed image tensor to encode")
        width, height = image.as_numpy().reshape(-1)
        known = {
            "OUT_PROMPT_EMBEDDING_TABLE": np.ones((1, int(width), int(height))),
            "OUT_PROMPT_VOCAB_SIZE": [[int(width)]],
        }
        return pb.InferenceResponse(
            [
                pb.Tensor(name, np.array(known.get(name, np.zeros([1, *shape])), dtype=kind))
                for name, (kind, shape) in self.outputs.items()
            ]
        )
