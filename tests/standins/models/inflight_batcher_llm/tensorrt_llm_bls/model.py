"""Stands for TensorRT-LLM's tensorrt_llm_bls: the same way as the ensemble's, as calls from one model to the others."""

import json

import numpy as np
import triton_python_backend_utils as pb

_RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "stream": "streaming", "length_penalty": "len_penalty"}
_TAKEN = ("text_input", "max_tokens", "bad_words", "stop_words", "end_id", "pad_id")
_BEFORE = ("INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN", "OUT_END_ID", "OUT_PAD_ID", "STOP_WORDS_IDS")
_INTO = ("input_ids", "input_lengths", "request_output_len", "end_id", "pad_id", "stop_words_list")
_MADE = {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH"}
_MADE_ONCE = {"cum_log_probs": "CUM_LOG_PROBS", "output_log_probs": "OUTPUT_LOG_PROBS"}
"""In release 0.8 postprocessing needed these too."""
_UNUSED = ("prompt", "embedding", "image", "video", "decoder", "num_draft", "use_draft", "guided")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.decoupled = pb.using_decoupled_model_transaction_policy(config)
        self.inputs = [each["name"] for each in config["input"]]
        parameters = config["parameters"]
        self.made = _MADE if "tensorrt_llm_model_name" in parameters else {**_MADE, **_MADE_ONCE}
        self.engine = parameters.get("tensorrt_llm_model_name", {"string_value": "tensorrt_llm"})["string_value"]
        self.draft = parameters.get("tensorrt_llm_draft_model_name", {"string_value": ""})["string_value"]

    def execute(self, requests):
        if not self.decoupled:
            return [next(iter(self.answers(request))) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            for answer in self.answers(request):
                sender.send(answer)
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def answers(self, request):
        given = {name: pb.get_input_tensor_by_name(request, name) for name in self.inputs}
        before = call(
            "preprocessing",
            {
                "QUERY": given["text_input"],
                "REQUEST_OUTPUT_LEN": given["max_tokens"],
                "STOP_WORDS_DICT": given["stop_words"],
            },
            _BEFORE,
        )
        inputs = {into: before[name] for name, into in zip(_BEFORE, _INTO, strict=True)}
        for name, tensor in given.items():
            if tensor is not None and name not in _TAKEN and not name.startswith(_UNUSED):
                inputs[_RENAMED.get(name, name)] = tensor
        drafts = given.get("num_draft_tokens")
        if drafts is not None and drafts.as_numpy().reshape(-1)[0]:
            if given["stream"].as_numpy().any():  # as theirs, which fails where it is not given
                raise pb.TritonModelException("streaming is not supported with speculative decoding")
            if not self.draft or self.draft.startswith("${"):
                raise pb.TritonModelException("cannot perform speculative decoding without draft model")
            tokens = self.drafted(inputs, int(drafts.as_numpy().reshape(-1)[0]))
            after = {"TOKENS_BATCH": tokens[None, None], "SEQUENCE_LENGTH": np.array([[len(tokens)]], np.int32)}
            found = {name: pb.Tensor(name, value) for name, value in after.items()}
            text = call("postprocessing", found, ("OUTPUT",))["OUTPUT"].as_numpy()
            yield pb.InferenceResponse([pb.Tensor("text_output", np.array(text, dtype=np.object_))])
            return
        engine = pb.InferenceRequest(
            model_name=self.engine,
            inputs=[pb.Tensor(name, rows(tensor.as_numpy())) for name, tensor in inputs.items()],
            requested_output_names=list(self.made),
        )
        made = engine.exec(decoupled=True) if self.decoupled else [engine.exec()]
        for response in made:
            if response.has_error():
                raise pb.TritonModelException(response.error().message())
            if not response.output_tensors():
                continue
            found = {tensor.name(): tensor for tensor in response.output_tensors()}
            after = {into: found[name] for name, into in self.made.items()}
            text = call("postprocessing", after, ("OUTPUT",))["OUTPUT"].as_numpy()
            yield pb.InferenceResponse([pb.Tensor("text_output", np.array(text, dtype=np.object_))])

    def drafted(self, inputs, most):
        """Tokens of an answer: the draft model goes ahead, the engine says how far it was right and adds one."""
        given = {name: rows(tensor.as_numpy()) for name, tensor in inputs.items()}
        prompt = given["input_ids"].reshape(-1)
        wanted = int(given["request_output_len"].reshape(-1)[0])
        answer = np.array([], np.int32)
        ids, ends = given["stop_words_list"].reshape(2, -1).tolist()
        ends = [end for end in ends if end > 0]
        words = [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

        def ask(model, length, more):
            so_far = np.concatenate([prompt, answer]).astype(np.int32)[None]
            own = {"input_ids": so_far, "input_lengths": [[so_far.shape[1]]], "request_output_len": [[length]], **more}
            own = {name: pb.Tensor(name, np.asarray(value, np.int32)) for name, value in own.items()}
            rest = {name: pb.Tensor(name, value) for name, value in given.items() if name not in own}
            found = call(model, {**rest, **own}, ("output_ids", "sequence_length"))
            return found["output_ids"].as_numpy().reshape(-1)[: int(found["sequence_length"].as_numpy().reshape(-1)[0])]

        while len(answer) < wanted:
            length = min(most, wanted - len(answer) - 1)
            proposed = ask(self.draft, length, {}) if length > 0 else answer[:0]
            made = ask(self.engine, len(proposed) + 1, {"draft_input_ids": proposed[None]} if len(proposed) else {})
            answer = np.concatenate([answer, made])
            if any(list(answer[-len(word) :]) == word for word in words):
                break
            if len(made) < len(proposed) + 1 and (len(made) == 0 or made[-1] == proposed[len(made) - 1]):
                break  # ended by a stop word, or by the end of the text, and not by a token that was not foreseen
        return answer.astype(np.int32)


def rows(array):
    """With the dimension that `reshape` took away from an input of ours, and that another model wants to have."""
    return array[:, None] if array.ndim == 1 else array


def call(model, inputs, outputs):
    response = pb.InferenceRequest(
        model_name=model,
        inputs=[pb.Tensor(name, tensor.as_numpy()) for name, tensor in inputs.items() if tensor is not None],
        requested_output_names=list(outputs),
    ).exec()
    if response.has_error():
        raise pb.TritonModelException(response.error().message())
    return {tensor.name(): tensor for tensor in response.output_tensors()}
