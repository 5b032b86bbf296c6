"""Converts a GGUF file to a standard Hugging Face directory, without torch.

Tensors get their Hugging Face names, and the row order that GGUF changes is restored. The tokenizer is rebuilt from
tokens and merges. Weights are written as float16: the files are quantized, so every value is a scale of 11 significant
bits times a few bits, and rounding to 11 bits moves it by at most 2^-11 of itself, which is below 1% of a 4-bit step
and 6% of an 8-bit one. Only Llama with a byte-level tokenizer is supported, the only kind that packages are known to
ship.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from trtllm_pipeline.base import DownloadError, FailureClass, Json, write_json
from trtllm_pipeline.models.files.model_files import Fields

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_TEMPLATE: Final = "tokenizer.chat_template"
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType


def write_folder(gguf: Path, out: Path, *, source: Mapping[str, Json]) -> None:
    """Write configuration, weights, tokenizer and provenance into `out`. Raises DownloadError."""
    try:
        reader = _ArrayReader(gguf)
    except Exception as error:  # the library does not document its exceptions for damaged files
        raise DownloadError(f"{gguf.name} is not a GGUF file: {str(error) or type(error).__name__}") from error
    fields = _metadata(gguf, reader)
    for key, supported in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if (value := fields.required_text(key)) != supported:
            raise DownloadError(
                f"{gguf.name} has {key} {value!r}; only {supported!r} can be unpacked",
                failure=FailureClass.INFEASIBLE,
                hint="use a source that has the model in safetensors form",
            )
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    write_json(out / "config.json", _config(fields, tied=tied), indent=2)
    write_json(out / "generation_config.json", _token_ids(fields), indent=2)
    _tokenizer(fields).save(str(out / "tokenizer.json"), pretty=False)
    write_json(out / "tokenizer_config.json", _tokenizer_config(fields), indent=2)
    write_json(out / "special_tokens_map.json", _special_tokens(fields), indent=2)
    _write_weights(out / "model.safetensors", reader, fields)
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    quantized = " and ".join(sorted(types.keys() - {"F32", "F16", "BF16"}))
    provenance: dict[str, Json] = {
        "source": dict(source),
        "weights": f"float16, from weights that were {quantized or 'not quantized'} in the package",
        "tensor_types": dict(types),
    }
    write_json(out / "provenance.json", provenance, indent=2)


class _ArrayReader(GGUFReader):
    """GGUFReader slices its memory map for every token and merge. On a plain array, that takes less than half."""

    @property  # type: ignore[override]
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)


def _metadata(gguf: Path, reader: GGUFReader) -> Fields:
    """The metadata that is used here. Raises DownloadError for text that is not UTF-8 and for truncated lists."""
    values = {}
    for key, field in reader.fields.items():
        if key.startswith(("general.architecture", "tokenizer.", "llama.")):
            try:
                values[key] = field.contents()
            except (ValueError, IndexError) as error:
                raise DownloadError(f"cannot read {key} of {gguf.name}: {error}") from error
    return Fields(values, gguf)


def _number(fields: Fields, key: str, default: float | None = None) -> float:
    """A positive float32 in its short form: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(fields.number(key, default, most=_FLOAT32_MAX))))


def _tokenizer(fields: Fields) -> Tokenizer:
    tokens, merges, types = (
        fields.texts("tokenizer.ggml.tokens"),
        fields.texts("tokenizer.ggml.merges"),
        fields.array("tokenizer.ggml.token_type"),
    )
    pairs = [merge.split(" ") for merge in merges]
    typed = len(types) == len(tokens) > 0 and all(type(kind) is int for kind in types)
    if not typed or len(set(tokens)) != len(tokens) or not all(len(pair) == 2 for pair in pairs):
        raise DownloadError(
            "the GGUF file's tokenizer is damaged: it has duplicate tokens, tokens without a type, or merges that are not pairs",
            failure=FailureClass.INFEASIBLE,
        )
    try:
        return tokenizer(tokens, [(left, right) for left, right in pairs], types)
    except Exception as error:  # the library raises bare Exception
        raise DownloadError(
            f"cannot create a tokenizer from the GGUF file: {error}", failure=FailureClass.INFEASIBLE
        ) from error


def tokenizer(tokens: list[str], merges: list[tuple[str, str]], types: list[int]) -> Tokenizer:
    """A byte-level BPE tokenizer with SmolLM's splitting: single digits, then GPT-2's words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    result = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )
    result.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    return result


def _config(fields: Fields, *, tied: bool) -> dict[str, Json]:
    heads, hidden = fields.integer("llama.attention.head_count"), fields.integer("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(fields),
        "head_dim": fields.integer("llama.attention.key_length", max(1, hidden // heads)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": fields.integer("llama.context_length"),
        "rms_norm_eps": _number(fields, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(fields, "llama.rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "vocab_size": len(fields.texts("tokenizer.ggml.tokens")),
        "torch_dtype": "float16",
        **_token_ids(fields),
    }


def _kv_heads(fields: Fields) -> int:
    return fields.integer("llama.attention.head_count_kv", fields.integer("llama.attention.head_count"))


def _token_ids(fields: Fields, suffix: str = "_id", **more: str) -> dict[str, Json]:
    """The special tokens in the file, by their Hugging Face names."""
    named = {"bos": "bos", "eos": "eos", "pad": "padding", **more}
    keys = {f"{name}_token{suffix}": f"tokenizer.ggml.{key}_token_id" for name, key in named.items()}
    last = len(fields.texts("tokenizer.ggml.tokens")) - 1
    return {name: fields.integer(key, least=0, most=last) for name, key in keys.items() if fields.has(key)}


def _special_tokens(fields: Fields) -> dict[str, Json]:
    tokens = fields.texts("tokenizer.ggml.tokens")
    return {name: tokens[cast("int", number)] for name, number in _token_ids(fields, "", unk="unknown").items()}


def _tokenizer_config(fields: Fields) -> dict[str, Json]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.integer("llama.context_length"),
        **_special_tokens(fields),
        "chat_template": fields.text(_TEMPLATE),
    }


def _write_weights(path: Path, reader: GGUFReader, fields: Fields) -> None:
    """Write all tensors as float16, one at a time. Format: https://github.com/huggingface/safetensors#format"""
    named = sorted(
        ((_name(tensor.name), tensor) for tensor in reader.tensors if tensor.name != "rope_freqs.weight"),
        key=lambda pair: pair[0],
    )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in named:
        shape = [int(n) for n in reversed(tensor.shape)]
        if 0 in shape:
            raise DownloadError(f"{tensor.name} is empty: its shape is {shape}", failure=FailureClass.INFEASIBLE)
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in named:
            for rows in _rows(tensor, _heads(name, fields)):
                with np.errstate(over="ignore"):
                    half = rows.astype(np.float16)
                if not np.isfinite(half).all():
                    raise DownloadError(
                        f"{tensor.name} has values outside the range of float16", failure=FailureClass.INFEASIBLE
                    )
                file.write(half.data)


def _rows(tensor: Any, heads: int | None) -> Iterator[NDArray[np.float32]]:
    """The tensor's values in blocks of whole rows, in Hugging Face's order."""
    packed = tensor.data
    if heads is not None:
        # GGUF interleaves the two halves of each head's rows, because its rotary embeddings rotate adjacent values.
        shape = packed.shape
        if len(shape) != 2 or shape[0] % (2 * heads):
            raise DownloadError(
                f"{tensor.name} has {len(packed)} rows, which {heads} heads cannot share evenly",
                failure=FailureClass.INFEASIBLE,
            )
        packed = packed.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    step = 4096 if packed.ndim > 1 else len(packed)
    for first in range(0, len(packed), step):
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # the caller detects values that are not finite
                yield dequantize(packed[first : first + step], tensor.tensor_type)
        except NotImplementedError as error:
            raise DownloadError(
                f"{tensor.name} is quantized as {tensor.tensor_type.name}, which cannot be unpacked",
                failure=FailureClass.INFEASIBLE,
            ) from error


def _heads(name: str, fields: Fields) -> int | None:
    if name.endswith("q_proj.weight"):
        return fields.integer("llama.attention.head_count")
    if name.endswith("k_proj.weight"):
        return _kv_heads(fields)
    return None


def _name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor. Raises DownloadError for an unknown tensor."""
    parts = gguf_name.split(".")
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    if (
        len(parts) == 4
        and parts[0] == "blk"
        and parts[1].isdecimal()
        and parts[2] in _LAYER_NAMES
        and parts[3] == "weight"
    ):
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.weight"
    raise DownloadError(
        f"the GGUF file has a tensor {gguf_name}, which Llama models do not have", failure=FailureClass.INFEASIBLE
    )
