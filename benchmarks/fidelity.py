"""How far a converted model is from its float reference, and how far it may be.

Two ways to look at a GGUF file: its dequantized weights in the reference, which shows the format alone, and llama.cpp itself,
which adds its arithmetic: activations rounded to 8 bits for quantized weights, keys and values in the cache's precision.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.tensorrt.embedded.architecture import ModelConfig
from trtllm_pipeline.tensorrt.embedded.gguf_file import gguf_names, rotated_heads
from trtllm_pipeline.tensorrt.embedded.reference import Array, Reference

LIKELY: Final = 1e-3
"""Probability from which on a token's log-probability counts for `max_error`."""
_TOP: Final = 1024
"""Log probabilities requested from llama.cpp per position. The rest counts as one event."""


_FLOOR: Final = -80.0
"""Log-probabilities below are raised to it: llama.cpp takes logarithms of single-precision numbers, which may be zero."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far from the float reference a precision may be, mean over the tokens of a text, measured through llama.cpp.

    They hold for SmolLM2-135M-Instruct and for the generated models, about a factor of two above what was measured: random
    weights suffer more from rounding than trained ones.
    """

    kl: float
    """Kullback-Leibler divergence of the next-token distribution, reference to converted, in nats."""
    perplexity: float
    """Largest ratio of the two perplexities, either way round."""

    def admits(self, kl: float, perplexity_ratio: float) -> bool:
        """True if measured values are within the limits."""
        return kl <= self.kl and 1 / self.perplexity <= perplexity_ratio <= self.perplexity


TOLERANCES: Final = {
    "fp32": Tolerance(kl=1e-05, perplexity=1.001),
    "fp16": Tolerance(kl=0.0001, perplexity=1.003),
    "bf16": Tolerance(kl=0.002, perplexity=1.01),
    "int8_wo": Tolerance(kl=0.02, perplexity=1.03),
    "int4_wo": Tolerance(kl=1.0, perplexity=1.3),
}


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Distance of a model from the reference, over the tokens of some texts."""

    tokens: int
    kl: float
    """Mean Kullback-Leibler divergence of the next-token distribution, reference to model, in nats."""
    top1: float
    """Share of positions where both prefer the same token."""
    max_error: float
    """Largest difference of log-probabilities among tokens at least `LIKELY` in the reference."""
    perplexity: float
    reference_perplexity: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A model's next-token distribution, or the top of it: distinct token ids and their log-probabilities, likeliest first."""

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    actual: float
    """Log-probability of the token that does come next."""


def measure(reference: Reference, texts: Iterable[Sequence[int]], model: Reference | LlamaCpp) -> Fidelity:
    """Compare `model` with `reference` at every position of `texts`, each a sequence of two or more token ids."""
    kl, agree, errors, nll, reference_nll = [], [], [], [], []
    for text in texts:
        expected = reference.log_probs(text[:-1])
        predictions = model.predict(text) if isinstance(model, LlamaCpp) else _predict(model, text)
        for row, following, prediction in zip(expected, text[1:], predictions, strict=True):
            wanted = row[prediction.ids]
            kl.append(_divergence(wanted, prediction.log_probs))
            agree.append(int(row.argmax()) == int(prediction.ids[0]))
            likely = wanted >= math.log(LIKELY)
            errors.append(np.abs(wanted - prediction.log_probs)[likely].max(initial=0.0))
            nll.append(-prediction.actual)
            reference_nll.append(-row[following])
    return Fidelity(
        tokens=len(nll),
        kl=float(np.mean(kl)),
        top1=float(np.mean(agree)),
        max_error=float(np.max(errors)),
        perplexity=float(np.exp(np.mean(nll))),
        reference_perplexity=float(np.exp(np.mean(reference_nll))),
    )


def dequantized(path: Path, config: ModelConfig) -> Reference:
    """The model in a GGUF file, back in the reference: what its weights alone make of it."""
    names = {name: source for source, name in gguf_names(config).items()}
    weights: dict[str, Array] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name not in names:
            continue  # rope_freqs, which the config says as well
        source = names[tensor.name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        heads = rotated_heads(config, source)
        weights[source] = unpermute(values, heads) if heads else values
    return Reference(config, weights)


def unpermute(rows: Array, heads: int) -> Array:
    """The inverse of the converter's `permute`."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


class LlamaCpp:
    """A GGUF file in llama.cpp, one sequence at a time. Made by `open_llama_cpp`."""

    def __init__(self, server: Any, top: int) -> None:
        self._server = server
        self._top = top

    def predict(self, text: Sequence[int]) -> Iterator[Prediction]:
        """The distribution after each token of `text` but the last."""
        for position in range(1, len(text)):
            # The bias forces the text's own next token. The reported log probabilities do not include the bias.
            answer = self._complete(text[:position], 1, logit_bias=[[int(text[position]), 1e4]], n_probs=self._top)
            content = answer["choices"][0]["logprobs"]["content"][0]
            assert content["id"] == text[position]
            top = content["top_logprobs"]
            yield Prediction(
                ids=np.array([entry["id"] for entry in top], dtype=np.int64),
                log_probs=np.array([entry["logprob"] for entry in top], dtype=np.float64),
                actual=content["logprob"],
            )

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` greedy tokens after `tokens`, without the end token."""
        answer = self._complete(tokens, count, n_probs=1)
        return [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]

    def _complete(self, tokens: Sequence[int], count: int, **settings: Any) -> Any:
        return self._server.handle_completions(
            {
                "prompt": [int(token) for token in tokens],
                "n_predict": count,
                "temperature": 0,
                "cache_prompt": True,
                **settings,
            }
        )


@contextmanager
def open_llama_cpp(
    path: Path, *, context: int, vocab_size: int, kv_cache: Literal["f32", "f16"] = "f32", threads: int = 1
) -> Iterator[LlamaCpp]:
    """Load a GGUF file for sequences of up to `context` tokens."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = 1, context
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv_cache.upper()}")
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params = params.warmup = params.ui = False
    params.verbosity = 1
    # llama.cpp always listens. A socket in a deleted directory is unreachable.
    with tempfile.TemporaryDirectory(prefix="trtllm-pipeline-") as folder:
        params.hostnames = [f"{folder}/closed.sock"]
        params.n_threads_http = 1
        server = xllamacpp.Server(params)
    model = LlamaCpp(server, min(vocab_size, _TOP))
    del server
    try:
        yield model
    finally:
        del model._server  # its destructor ends llama.cpp's threads  # noqa: SLF001


def _predict(model: Reference, text: Sequence[int]) -> Iterator[Prediction]:
    for row, following in zip(model.log_probs(text[:-1]), text[1:], strict=True):
        order = np.argsort(-row, kind="stable")
        yield Prediction(ids=order, log_probs=row[order], actual=float(row[following]))


def _divergence(wanted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """KL divergence of two distributions over the same events. The rest up to 1 counts as one more event."""
    wanted, measured = np.maximum(wanted, _FLOOR), np.maximum(measured, _FLOOR)
    weights = np.exp(wanted)
    total = float(np.sum(weights * (wanted - measured)))
    rest, other_rest = 1.0 - float(weights.sum()), 1.0 - float(np.exp(measured).sum())
    if rest > 1e-6 and other_rest > 1e-6:
        total += rest * math.log(rest / other_rest)
    return total
