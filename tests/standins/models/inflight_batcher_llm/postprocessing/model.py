"""Stands for TensorRT-LLM's postprocessing. Passes on what older releases pass through it.

Tokens are those of the model's tokenizer.json; in a folder without that file a token is a byte.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        file = Path(parameters["tokenizer_dir"]) / "tokenizer.json"
        self.skip = parameters.get("skip_special_tokens", "").lower() not in {"false", "0"}
        self.tokenizer = None
        if file.is_file() and "model" in json.loads(file.read_text(encoding="utf-8")):
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(file))
        self.passed = [each["name"] for each in config["output"] if each["name"] != "OUTPUT"]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def decode(self, ids):
        if self.tokenizer is None:
            return bytes(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip).encode()

    def answer(self, request):
        ids = pb.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy().reshape(-1)
        rows = ids.reshape(len(lengths), -1)
        texts = [self.decode([int(id_) for id_ in row[:length]]) for row, length in zip(rows, lengths, strict=True)]
        outputs = [pb.Tensor("OUTPUT", np.array(texts, dtype=np.object_).reshape(ids.shape[0], -1))]
        for name in self.passed:
            found = pb.get_input_tensor_by_name(request, name.removeprefix("OUT_"))
            if found is not None:
                outputs.append(pb.Tensor(name, found.as_numpy()))
        return pb.InferenceResponse(outputs)
