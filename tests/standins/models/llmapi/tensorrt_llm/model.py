"""Stands for TensorRT-LLM's llmapi model: the same tokens as the stand-in engine, with the llmapi's own tensors.

Reads the model.yaml beside it as the real one does, and refuses what the LLM API refuses: a model folder that is not
there, and prompts longer than max_seq_len. TRTLLM_STANDIN_ANSWERS is as of `trtllm-serve`.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb
import yaml

_KNOWN = {
    "model",
    "backend",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "moe_expert_parallel_size",
    "speculative_config",
    "max_batch_size",
    "max_seq_len",
    "max_num_tokens",
    "kv_cache_config",
    "enable_chunked_prefill",
    "triton_config",
    "lora_config",
    "cuda_graph_config",
}
_LORA = ("lora_id", "lora_name", "lora_path")
"""Inputs of templates from pull request 14079 on."""


def scalar(request, name, default):
    found = pb.get_input_tensor_by_name(request, name)
    return default if found is None else found.as_numpy().reshape(-1)[0]


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.outputs = [each["name"] for each in config["output"]]
        self.decoupled = pb.using_decoupled_model_transaction_policy(config)
        path = Path(args["model_repository"]) / args["model_version"] / "model.yaml"
        self.settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        if unknown := self.settings.keys() - _KNOWN:
            raise pb.TritonModelException(f"LLM.__init__() got an unexpected keyword argument {min(unknown)!r}")
        if not (Path(self.settings["model"]) / "config.json").is_file():
            raise pb.TritonModelException(f"{self.settings['model']} does not appear to have a file named config.json")
        drafter = self.settings.get("speculative_config", {}).get("speculative_model_dir")
        if drafter is not None and not (Path(drafter) / "config.json").is_file():
            raise pb.TritonModelException(f"{drafter} does not appear to have a file named config.json")

        answers = os.environ.get("TRTLLM_STANDIN_ANSWERS")
        self.answers = json.loads(Path(answers).read_text(encoding="utf-8")) if answers else {}
        model = json.loads((Path(self.settings["model"]) / "config.json").read_text(encoding="utf-8"))
        self.answers = self.answers.get(model.get("model_type"), self.answers)
        sys.path.append("@ROOT@")  # see `templates`
        from tests.standins.tokens import Tokens

        self.tokens = Tokens(Path(self.settings["model"]))

    def execute(self, requests):
        if not self.decoupled:
            return [self.whole(request) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            try:
                parts = self.parts(request)
                drafts = self.drafts(request, len(parts))
                if not scalar(request, "streaming", False):
                    parts = [b"".join(parts)]
                for number, part in enumerate(parts, 1):
                    sender.send(self.response(request, part, drafts if number == len(parts) else {}))
            except ValueError as error:
                sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def whole(self, request):
        try:
            parts = self.parts(request)
            return self.response(request, b"".join(parts), self.drafts(request, len(parts)))
        except ValueError as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error)))

    def parts(self, request):
        """One token after the other."""
        prompt = scalar(request, "text_input", b"").decode(errors="replace")
        wanted = int(scalar(request, "sampling_param_max_tokens", 32))
        known = self.answers.get(prompt)
        if known is not None:
            return [part.encode() for part in self.tokens.split(known)]
        count, longest = self.tokens.count(prompt), self.settings["max_seq_len"]
        if count + wanted > longest:
            raise ValueError(f"The sum of prompt length ({count}) and max_tokens ({wanted}) exceeds {longest}")
        stops = pb.get_input_tensor_by_name(request, "sampling_param_stop")
        stops = [] if stops is None else [word.decode() for word in stops.as_numpy().reshape(-1) if word]
        made, _ = self.tokens.until(self.tokens.next(prompt, wanted, 1 + self.adapter(request)), stops)
        return [part.encode() for part in made]

    def adapter(self, request):
        """The rank of the adapter that a request asks for, 0 without one. Source: `get_lora_request_from_request` of helpers.py."""
        given = [scalar(request, name, None) for name in _LORA]
        if given == [None] * 3:
            return 0
        if None in given:
            raise ValueError("lora_id, lora_name, and lora_path must all be provided together")
        path = Path(bytes(given[2]).decode())
        if not path.exists():
            raise ValueError(f"lora_path does not exist on the Triton server's filesystem: {path}")
        told = self.settings.get("lora_config")
        if told is None:
            raise ValueError("LoRA is not enabled")
        # Any folder may come with a request; the one in lora_dir is for the names of layers.
        rank = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        if rank > told["max_lora_rank"]:
            raise ValueError(f"stand-in: rank {rank} is above max_lora_rank {told['max_lora_rank']}")
        return rank

    def drafts(self, request, tokens):
        """Counts of an answer of so many tokens, all but one of each draft accepted. Numbers are texts, as all that the real one
        sends. Source: `_create_response` of its model.py.
        """
        if not scalar(request, "sampling_param_return_perf_metrics", False):
            return {}
        told = self.settings.get("speculative_config", {})
        length = told.get("max_draft_len", told.get("num_nextn_predict_layers", 0))
        passes = -(-tokens // max(length, 1))
        accepted = tokens - passes if length else 0
        counts = {"total_draft_tokens": passes * length, "total_accepted_draft_tokens": accepted}
        return {name: str(count).encode() for name, count in counts.items()}

    def response(self, request, text, drafts):
        known = {"text_output": text, "finish_reason": b"length", **drafts}
        asked = {"text_output", *drafts} | (
            {"finish_reason"} if scalar(request, "return_finish_reason", False) else set()
        )
        return pb.InferenceResponse(
            [pb.Tensor(name, np.array([known[name]], dtype=object)) for name in self.outputs if name in asked]
        )
