"""Stands for TensorRT-LLM's preprocessing: a token is a byte. Gives every output that its configuration declares."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb


def tensor(request, name):
    found = pb.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy()


def flat_words(words):
    """TensorRT-LLM's form of a list of words: all their tokens, and below the ends of each; -1 fills up."""
    tokens = [list(word) for word in ([] if words is None else words.reshape(-1)) if word]
    ids = [each for word in tokens for each in word]
    ends = [sum(map(len, tokens[: number + 1])) for number in range(len(tokens))]
    return [ids or [0], ends + [-1] * (max(1, len(ids)) - len(ends))]


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.outputs = {
            each["name"]: (pb.triton_string_to_numpy(each["data_type"]), [max(int(size), 0) for size in each["dims"]])
            for each in config["output"]
        }
        folder = Path(config["parameters"]["tokenizer_dir"]["string_value"])
        json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        text = tensor(request, "QUERY").reshape(-1)[0]
        ids = list(text)
        end = tensor(request, "END_ID")
        known = {
            "INPUT_ID": [ids],
            "REQUEST_INPUT_LEN": [[len(ids)]],
            "REQUEST_OUTPUT_LEN": tensor(request, "REQUEST_OUTPUT_LEN"),
            "OUT_END_ID": [[256]] if end is None else end,
            "OUT_PAD_ID": [[256]],
            "STOP_WORDS_IDS": [flat_words(tensor(request, "STOP_WORDS_DICT"))],
        }
        return pb.InferenceResponse(
            [
                pb.Tensor(name, np.array(known.get(name, np.zeros([1, *shape])), dtype=kind))
                for name, (kind, shape) in self.outputs.items()
            ]
        )
