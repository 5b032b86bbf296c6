"""Stands for TensorRT-LLM's postprocessing: a token is a byte. Passes on what older releases pass through it."""

import json

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.passed = [each["name"] for each in config["output"] if each["name"] != "OUTPUT"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids = pb.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy().reshape(-1)
        rows = ids.reshape(len(lengths), -1)
        texts = [bytes(int(id_) for id_ in row[:length]) for row, length in zip(rows, lengths, strict=True)]
        outputs = [pb.Tensor("OUTPUT", np.array(texts, dtype=np.object_).reshape(ids.shape[0], -1))]
        for name in self.passed:
            found = pb.get_input_tensor_by_name(request, name.removeprefix("OUT_"))
            if found is not None:
                outputs.append(pb.Tensor(name, found.as_numpy()))
        return pb.InferenceResponse(outputs)
