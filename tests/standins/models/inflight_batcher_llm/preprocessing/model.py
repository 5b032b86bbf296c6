"""Stands for TensorRT-LLM's preprocessing. Gives every output that its configuration declares.

Tokens are those of the model's tokenizer.json, with the special tokens that it adds unless `add_special_tokens` is false; in a
folder without that file a token is a byte.
"""

import base64
import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb


def tensor(request, name):
    found = pb.get_input_tensor_by_name(request, name)
    return None if found is None else found.as_numpy()


_SEEN = ("llava", "blip2-opt", "vila", "mllama", "llava_onevision", "qwen2_vl")
"""Model types that TensorRT-LLM's preprocessing knows since 0.19."""


def image_of(request):
    """The bytes of the image of a request. Only of one that says that it is a JPEG it knows that the URL holds it."""
    found = tensor(request, "IMAGE_URL")
    if found is None:
        raise pb.TritonModelException("Image processing requires IMAGE_BYTES or IMAGE_URL to be provided")
    url = found.reshape(-1)[0].decode()
    if not url.startswith("data:image/jpeg;base64,"):
        raise pb.TritonModelException(f"stand-in: no network to fetch {url[:40]}")
    return base64.b64decode(url.partition(",")[2])


def flat_words(words, encode):
    """TensorRT-LLM's form of a list of words: all their tokens, and below the ends of each; -1 fills up."""
    tokens = [encode(word, special=False) for word in ([] if words is None else words.reshape(-1)) if word]
    ids = [each for word in tokens for each in word]
    ends = [sum(map(len, tokens[: number + 1])) for number in range(len(tokens))]
    return [ids or [0], ends + [-1] * (max(1, len(ids)) - len(ends))]


def pixels(image):
    """Of a PNG its width and height, where an image would be."""
    if not image.startswith(b"\x89PNG"):
        raise pb.TritonModelException("PIL.UnidentifiedImageError: cannot identify image file")
    return np.frombuffer(image[16:24], dtype=">u4").astype(np.float16).reshape(1, 1, 1, 1, 2)


def _has_tokens(path):
    return path.is_file() and "model" in json.loads(path.read_text(encoding="utf-8"))


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.outputs = {
            each["name"]: (pb.triton_string_to_numpy(each["data_type"]), [max(int(size), 0) for size in each["dims"]])
            for each in config["output"]
        }
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        visual = parameters.get("multimodal_model_path") or parameters.get("visual_model_path")
        self.model_type = None
        if visual:
            built = json.loads((Path(visual) / "config.json").read_text(encoding="utf-8"))
            self.model_type = built["builder_config"]["model_type"]
            if self.model_type not in _SEEN:
                raise pb.TritonModelException(f"AssertionError: [TensorRT-LLM][ERROR] Got {self.model_type}.")
            engine = json.loads((Path(parameters["gpt_model_path"]) / "config.json").read_text(encoding="utf-8"))
            if not engine["build_config"]["max_prompt_embedding_table_size"]:
                raise pb.TritonModelException("stand-in: the engine takes no features of images")
            if not (Path(parameters["tokenizer_dir"]) / "preprocessor_config.json").is_file():
                raise pb.TritonModelException("OSError: does not appear to have a file named preprocessor_config.json")
        folder = Path(config["parameters"]["tokenizer_dir"]["string_value"])
        about = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.special = parameters.get("add_special_tokens", "").lower() not in {"false", "0"}
        self.tokenizer, self.end = None, 256
        if _has_tokens(folder / "tokenizer.json"):
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            end = about.get("eos_token")
            self.end = self.tokenizer.token_to_id(end["content"] if isinstance(end, dict) else end)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def encode(self, text, special):
        if self.tokenizer is None:
            return list(text)
        return self.tokenizer.encode(text.decode(), add_special_tokens=special).ids

    def answer(self, request):
        ids = self.encode(tensor(request, "QUERY").reshape(-1)[0], special=self.special)
        end = tensor(request, "END_ID")
        known = {
            "INPUT_ID": [ids],
            "REQUEST_INPUT_LEN": [[len(ids)]],
            "REQUEST_OUTPUT_LEN": tensor(request, "REQUEST_OUTPUT_LEN"),
            "OUT_END_ID": [[self.end]] if end is None else end,
            "OUT_PAD_ID": [[self.end]],
            "STOP_WORDS_IDS": [flat_words(tensor(request, "STOP_WORDS_DICT"), self.encode)],
        }
        if self.model_type is not None:
            known["PIXEL_VALUES"] = pixels(image_of(request))
        return pb.InferenceResponse(
            [
                pb.Tensor(name, np.array(known.get(name, np.zeros([1, *shape])), dtype=kind))
                for name, (kind, shape) in self.outputs.items()
            ]
        )
