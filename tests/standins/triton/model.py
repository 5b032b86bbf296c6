"""The stand-in itself: takes the engine model's tensors under the names of all releases, answers by a rule.

Output token i is prompt token i + 1, round and round, so every answer is known in advance and can be detokenized. Every
output that the configuration declares is sent, as the real backend does: ensembles wait for all they pass on.

It needs nothing but numpy and Triton's own module. The environment variable TRTLLM_STANDIN_TOKEN_S of the server is
the time each token takes, in seconds; TRTLLM_STANDIN_ANSWERS names a JSON object from prompts to
answers that are given instead, whole. For these it reads the tokenizer of the preprocessing model next to it; without one a token
is a byte.
"""

import json
import math
import os
import re
import sys
import threading
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb

_LORA = ("lora_weights", "lora_config")
_MODULES = {1: "attn_q", 2: "attn_k", 3: "attn_v", 4: "attn_dense", 5: "mlp_h_to_4h", 6: "mlp_4h_to_h", 7: "mlp_gate"}
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}
"""Data type of an engine -> Triton's word for it. Triton itself has compared a request's type with the configuration's."""
_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_ASKED_FOR = ("num_input_tokens", "num_output_tokens")
"""Sent only to requests with `return_` and the name."""


_ACCEPTED = 2
"""Drafted tokens that an engine accepts in every pass."""
_EXTERNAL, _LOOKAHEAD, _EAGLE = 2, 8, 32
"""What config.json has of draft_tokens_external, lookahead_decoding and eagle."""


class TritonPythonModel:
    """Called by Triton's Python stub."""

    def initialize(self, args):
        """Check the engine folder as the runtime does."""
        config = json.loads(args["model_config"])
        self._decoupled = pb.using_decoupled_model_transaction_policy(config)
        self._outputs = {
            output["name"]: (pb.triton_string_to_numpy(output["data_type"]), [int(size) for size in output["dims"]])
            for output in config["output"]
        }
        settings = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self._exclude_input = settings.get("exclude_input_in_output", "").lower() in {"true", "1"}
        self._token_s = float(os.environ.get("TRTLLM_STANDIN_TOKEN_S", "0"))
        self._limits = _load(Path(settings["gpt_model_path"]), settings)
        answers = os.environ.get("TRTLLM_STANDIN_ANSWERS")
        self._answers = {}
        if answers:
            encode = _encoder(Path(args["model_repository"]).parent)
            told = json.loads(Path(answers).read_text(encoding="utf-8"))
            self._answers = {tuple(encode(prompt, True)): encode(answer, False) for prompt, answer in told.items()}
        self._adapters = {}
        self._weights_type = {each["name"]: each["data_type"] for each in config["input"]}.get("lora_weights")
        self._running = {}
        self._lock = threading.Lock()

    def execute(self, requests):
        """Answer every request on a thread of its own; in-flight batching lets them overtake each other too."""
        threads = [threading.Thread(target=self._run, args=(request,), daemon=True) for request in requests]
        for thread in threads:
            thread.start()
        if not self._decoupled:
            for thread in threads:
                thread.join()

    def finalize(self):
        """End what runs."""
        with self._lock:
            for event in self._running.values():
                event.set()

    def _run(self, request):
        sender = request.get_response_sender()
        name = request.request_id()
        stopped = threading.Event()
        try:
            if _scalar(request, "stop", False):
                with self._lock:
                    if name in self._running:
                        self._running[name].set()
                sender.send(self._response(request, [], 0, 0), flags=_FINAL)
                return
            with self._lock:
                self._running[name or id(sender)] = stopped
            self._generate(request, sender, stopped)
        except Exception as error:
            sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))), flags=_FINAL)
        finally:
            with self._lock:
                self._running.pop(name or id(sender), None)

    def _generate(self, request, sender, stopped):
        ids = pb.get_input_tensor_by_name(request, "input_ids").as_numpy()
        if ids.ndim > 1 and len(ids) > 1:
            raise ValueError(f"stand-in: a request has 1 row, this one has {len(ids)}")
        ids = ids.reshape(-1)
        prompt = [int(token) for token in ids[: _scalar(request, "input_lengths", len(ids))]]
        wanted = _scalar(request, "request_output_len", 0)
        if not prompt:
            raise ValueError("Prompt length (0) must be positive")
        if len(prompt) > self._limits["max_input_len"]:
            raise ValueError(
                f"Prompt length ({len(prompt)}) exceeds maximum input length ({self._limits['max_input_len']})."
            )
        shift = 1 + self._adapter(request)
        drafted, proposed = self._limits["drafts"], None
        if drafted is not None and drafted["mode"] == _EXTERNAL:
            tensor = pb.get_input_tensor_by_name(request, "draft_input_ids")
            proposed = [] if tensor is None else [int(token) for token in tensor.as_numpy().reshape(-1)]
            if len(proposed) > drafted["length"]:
                raise ValueError(f"Draft tokens ({len(proposed)}) exceed the engine's maximum ({drafted['length']})")
        known = self._answers.get(tuple(prompt), [])
        wanted = len(known) or min(wanted, self._limits["max_seq_len"] - len(prompt))
        streaming = bool(_scalar(request, "streaming", False))
        if streaming and not self._decoupled:
            raise ValueError("Streaming is only supported if model is deployed using decoupled mode.")
        end_id = _scalar(request, "end_id", -1)
        stop_words = _words(request, "stop_words_list")
        least = _scalar(request, "min_tokens", _scalar(request, "min_length", 0))
        exclude = bool(_scalar(request, "exclude_input_in_output", self._exclude_input))
        made = []
        waiting = None  # a streamed token leaves when it is known whether it is the last one
        for index in range(wanted):
            if stopped.wait(self._token_s) if self._token_s else stopped.is_set():
                break
            if sender.is_cancelled():
                break
            token = known[index] if known else prompt[(index + shift) % len(prompt)]
            if token == end_id and index >= least:
                break
            made.append(token)
            if proposed and (index >= len(proposed) or proposed[index] != token):
                break  # the first token that the draft model did not foresee ends the pass
            if streaming and waiting is not None:
                sender.send(self._response(request, [waiting], len(prompt), 1))
            waiting = token
            if any(made[-len(word) :] == word for word in stop_words):
                break
        if streaming:
            last = [] if waiting is None else [waiting]
            sender.send(self._response(request, last, len(prompt), len(last), len(made)), flags=_FINAL)
        else:
            tokens = made if exclude else prompt + made
            sender.send(self._response(request, tokens, len(prompt), len(made), len(made)), flags=_FINAL)

    def _adapter(self, request):
        """The largest rank of the adapter that a request asks for, 0 without one. Raises ValueError as the runtime refuses.

        Source: `loraValidateRequestTensors` of loraUtils.cpp, and the cache of adapters, which keeps what came first.
        """
        given = {name: pb.get_input_tensor_by_name(request, name) for name in _LORA}
        task = _scalar(request, "lora_task_id", None)
        if given["lora_weights"] is None and given["lora_config"] is None:
            if task is None:
                return 0
            with self._lock:
                if task not in self._adapters:
                    raise ValueError(f"LoRA task {task} not found in cache. Please send LoRA weights with request")
                return self._adapters[task]
        if task is None:
            raise ValueError("Assertion failed: lora_task_id must be set for LoRA inference")
        if None in given.values():
            raise ValueError("Assertion failed: Request for LoRA inference must have both lora_weights and lora_keys")
        if not self._limits["lora"]:
            raise ValueError("stand-in: the engine was built without lora_plugin")
        weights, rows = given["lora_weights"], given["lora_config"].as_numpy()
        shape = list(weights.shape())
        if len(shape) != 3 or shape[0] != 1 or rows.ndim != 3 or rows.shape[:2] != (1, shape[1]):
            raise ValueError("Assertion failed: Invalid shape for lora_weights tensor")
        if self._weights_type != self._limits["lora_dtype"]:
            raise ValueError("Assertion failed: Expected lora weights to be the same data type as base model")
        for module, layer, rank in rows[0].tolist():
            if not 0 <= layer < self._limits["layers"]:
                raise ValueError("Assertion failed: Expected layerId to be in the range [0, numModelLayers)")
            name = _MODULES.get(module)
            if name not in self._limits["lora"]["lora_target_modules"]:
                raise ValueError(f"Assertion failed: lora module {name} not enabled for this model")
            most = self._limits["lora"]["max_lora_rank"]
            if rank > most:
                raise ValueError(
                    f"Assertion failed: Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({most})"
                )
        with self._lock:
            return self._adapters.setdefault(task, int(rows[0, :, 2].max()))

    def _response(self, request, tokens, input_tokens, output_tokens, of_answer=0):
        """All declared outputs for one row and one beam. `of_answer` are all tokens of an answer that is whole."""
        told = of_answer and _scalar(request, "return_perf_metrics", False)
        drafts = self._limits["drafts"] if told else None
        passes = math.ceil(of_answer / (_ACCEPTED + 1)) if drafts else 0
        known = {
            "total_draft_tokens": [[passes * drafts["length"] if drafts else 0]],
            "total_accepted_draft_tokens": [[of_answer - passes if drafts else 0]],
            "output_ids": [[tokens]],
            "sequence_length": [[len(tokens)]],
            "cum_log_probs": [[0.0]],
            "output_log_probs": [[[0.0] * output_tokens]],
            "num_input_tokens": [[input_tokens]],
            "num_output_tokens": [[output_tokens]],
        }
        tensors = []
        wanted = request.requested_output_names()  # of what else is sent, Triton's stub can die
        for name, (kind, dims) in self._outputs.items():
            if name not in wanted:
                continue
            if name in _ASKED_FOR and not _scalar(request, f"return_{name}", False):
                continue
            value = np.array(known[name], kind) if name in known else np.zeros([1, *map(abs, dims)], kind)
            tensors.append(pb.Tensor(name, value))
        return pb.InferenceResponse(output_tensors=tensors)


def _scalar(request, name, default):
    tensor = pb.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()


def _words(request, name):
    """Lists of tokens out of a tensor [1, 2, n]: all their tokens, and below the ends of each; -1 fills up."""
    tensor = pb.get_input_tensor_by_name(request, name)
    if tensor is None:
        return []
    ids, ends = tensor.as_numpy().reshape(2, -1).tolist()
    ends = [end for end in ends if end > 0]
    return [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _encoder(repository):
    """Text to tokens, as the preprocessing model of a repository makes them: of a prompt, or without special tokens."""
    file = repository / "preprocessing" / "config.pbtxt"
    found = re.search(r'tokenizer_dir"\s+value:?\s*{\s*string_value:\s*"([^"]*)"', file.read_text(encoding="utf-8"))
    path = Path(found[1]) / "tokenizer.json"
    if not path.is_file() or "model" not in json.loads(path.read_text(encoding="utf-8")):
        return lambda text, _prompt: list(text.encode())
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text, prompt: tokenizer.encode(text, add_special_tokens=prompt).ids


def _load(engine, settings):
    """Limits of the engine. Raises RuntimeError for what the runtime refuses."""
    config = json.loads((engine / "config.json").read_text(encoding="utf-8"))
    world = config["pretrained_config"]["mapping"]["world_size"]
    ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if ranks != world:
        raise RuntimeError(f"Assertion failed: mpiSize == tp * pp ({ranks} vs {world})")
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if not (engine / f"rank{rank}.engine").is_file():
        raise RuntimeError(f"Error opening engine file: {engine / f'rank{rank}.engine'}")
    build = config["build_config"]
    longest = build.get("max_seq_len") or build["max_input_len"] + build["max_output_len"]
    _refuse(settings, build, longest)
    model = config["pretrained_config"]
    drafts = _drafts(settings, config)
    if drafts is not None:
        longest -= drafts["added"]
    most = min(build["max_input_len"], longest - 1)
    # With packed input it is advice: an engine that checks drafts is given all of the answer so far as its prompt.
    prompts = longest - 1 if drafts is None or drafts["mode"] == _EXTERNAL else most
    return {
        "max_seq_len": longest,
        "max_input_len": most if drafts is None else prompts,
        "layers": model.get("num_hidden_layers", 0),
        "lora": build.get("lora_config"),
        "lora_dtype": _TYPES.get(model.get("dtype")),
        "drafts": drafts,
    }


def _drafts(settings, config):
    """How an engine drafts tokens; None for not at all. Raises RuntimeError for a server told otherwise."""
    build = config["build_config"]
    mode, length = build.get("speculative_decoding_mode", 1), build.get("max_draft_len") or 0
    if mode == 1:
        return None
    if mode == _LOOKAHEAD:
        window, ngram, verified = (int(settings[f"lookahead_{name}_size"]) for name in _SIZES)
        asked = (0 if ngram == 1 else ngram - 2) + (window - 1 + verified) * (ngram - 1)
        if asked != length:
            raise RuntimeError(f"stand-in: the engine was built for {length} drafted tokens, asked for are {asked}")
    layers = config["pretrained_config"].get("num_eagle_layers", 0) if mode == _EAGLE else 0
    return {"mode": mode, "length": length, "added": length + layers}


_SIZES = ("window", "ngram", "verification_set")


def _refuse(settings, build, longest):
    """Raise RuntimeError for pairs of the repository and the engine that the runtime refuses, as recorded beside this."""
    folder = Path(__file__).parent
    if not (folder / "refusals.json").is_file():
        return
    sys.path.insert(0, str(folder))
    import refusals

    plugins = build.get("plugin_config", {})
    paged = plugins.get("use_paged_context_fmha")
    facts = {
        "use_paged_context_fmha": None if paged is None else paged in {True, "enable"},
        "engine_max_beam_width": build.get("max_beam_width"),
        "engine_max_seq_len": longest,
        "speculative_decoding_mode": build.get("speculative_decoding_mode"),
        "decoding_mode": settings.get("decoding_mode"),
        "lookahead_sizes": all(settings.get(f"lookahead_{name}_size") for name in _SIZES),
    }
    for name in ("max_beam_width", "sink_token_length", "max_tokens_in_paged_kv_cache"):
        value = settings.get(name, "")
        facts[name] = int(value) if value.isdecimal() else None
    for name in ("enable_chunked_context", "enable_kv_cache_reuse"):
        facts[name] = {"true": True, "false": False}.get(settings.get(name, "").lower())
    rows = json.loads((folder / "refusals.json").read_text(encoding="utf-8"))
    for row, said in refusals.applied(rows, facts):
        if row["does"] == "refuses":
            raise RuntimeError(said)
        print(said, flush=True)
