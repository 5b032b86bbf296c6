"""The convert stage: turns a Hugging Face directory into a checkpoint, which is a GGUF file and the inputs of a build.

One tensor is in memory at a time. Tensors keep their values except for the rounding of the precision. Rows of Llama's
query and key projections change places, because GGML rotates neighboring pairs and Hugging Face rotates two halves.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.base import StageError, write_json
from trtllm_pipeline.models import Fields, model_files
from trtllm_pipeline.models import read_tokenizer as load_tokenizer
from trtllm_pipeline.tensorrt.embedded.architecture import (
    EMBEDDING,
    HEAD,
    Llama3Scaling,
    ModelConfig,
    read_config,
    refused,
    tensors,
)
from trtllm_pipeline.tensorrt.embedded.models.text import BYTE_TOKEN, byte_level_alphabet
from trtllm_pipeline.tensorrt.embedded.params import ConvertEmbedded
from trtllm_pipeline.tensorrt.embedded.quantize import PRECISIONS, GgufPrecision, blocks_do_not_fit, encode
from trtllm_pipeline.tensorrt.embedded.runtime import CONFIG_FILE, MODEL_FILE
from trtllm_pipeline.tensorrt.embedded.safetensors import Weights
from trtllm_pipeline.tensorrt.stage.base import StageContext

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the GGUF file: its source and its storage."""

    name: str
    source: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    rotated_heads: int
    """Number of heads whose rows change places. 0 without any."""


def run(context: StageContext[ConvertEmbedded]) -> None:
    """Program of the stage. Input `model`: a Hugging Face directory. Writes `model.gguf` and `config.json`."""
    started = time.monotonic()
    folder = context.inputs["model"]
    name = context.params.precision
    precision = PRECISIONS[name]
    config, weights = read_config(folder), Weights(folder)
    print(  # noqa: T201 - the stage's log
        f"{config.architecture}, {len(weights)} tensors of {', '.join(weights.dtypes())}, to {name}", flush=True
    )
    plans = plan_tensors(folder, config, weights, precision)
    tokenizer = read_tokenizer(folder, config)

    target = context.out / MODEL_FILE
    writer = gguf.GGUFWriter(str(target), config.architecture)
    _add_metadata(writer, config, tokenizer, precision)
    if isinstance(config.rope_scaling, Llama3Scaling):
        writer.add_tensor_info("rope_freqs.weight", (config.head_dim // 2,), np.dtype(np.float32), 2 * config.head_dim)
    for plan in plans:
        _declare(writer, plan)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if isinstance(config.rope_scaling, Llama3Scaling):
        writer.write_tensor_data(config.rope_divisors().astype(np.float32))
    total = sum(math.prod(plan.shape) for plan in plans)
    done = 0
    for plan in plans:
        writer.write_tensor_data(_load(plan, weights))
        done += math.prod(plan.shape)
        context.progress(done, total, "parameters")
    writer.close()

    facts = {
        "schema": SCHEMA,
        "architecture": config.architecture,
        "precision": name,
        "quantization": {
            "linear": precision.linear.name,
            "embedding": precision.embedding.name,
            "group_size": precision.group_size,
            "bits_per_weight": round(8 * target.stat().st_size / total, 3),
            "calibration": None,
        },
        "kv_cache_precision": "fp16",
        "parameters": total,
        "geometry": asdict(config),
        "bos_token_id": tokenizer.bos,
        "eos_token_ids": list(tokenizer.eos),
        "pad_token_id": tokenizer.pad,
        "source": {"dtypes": list(weights.dtypes()), "config": Fields.read(folder, "config.json").values},
    }
    write_json(context.out / CONFIG_FILE, facts)
    print(  # noqa: T201 - the stage's log
        f"{config.architecture}, {total / 1e6:.1f} M parameters, {name}: {target.stat().st_size / 1e6:.1f} MB"
        f" in {time.monotonic() - started:.1f} s"
    )


def plan_tensors(folder: Path, config: ModelConfig, weights: Weights, precision: GgufPrecision) -> list[TensorPlan]:
    """The tensors of the GGUF file in file order.

    Raises StageError (infeasible) if a tensor is missing, unexpected, or has another shape than in the config.
    """
    path, expected = folder / "config.json", dict(tensors(config))
    # Some exports store the tied head a second time, or the rotary frequencies, which are derived from the config.
    spare = {HEAD} if config.tie_word_embeddings else set()
    present = {name for name in weights if name not in spare and not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(expected.keys() - present):
        raise refused(path, f"its weights lack {missing[0]}" + _more(missing))
    if extra := sorted(present - expected.keys()):
        raise refused(path, f"its weights have {extra[0]}{_more(extra)}, which no {config.architecture} model has")
    plans, names = [], gguf_names(config)
    for source, shape in expected.items():
        if weights.shape(source) != shape:
            raise refused(path, f"{source} has shape {list(weights.shape(source))}, its config has {list(shape)}")
        kind = gguf.GGMLQuantizationType.F32
        if len(shape) == 2:
            kind = precision.embedding if source in {EMBEDDING, HEAD} else precision.linear
        plans.append(TensorPlan(names[source], source, shape, kind, rotated_heads(config, source)))
    return plans


def rotated_heads(config: ModelConfig, source: str) -> int:
    """Number of heads of a tensor whose rows change places in GGUF. 0 without any."""
    if config.architecture != "llama":
        return 0
    if source.endswith("self_attn.q_proj.weight"):
        return config.num_heads
    return config.num_kv_heads if source.endswith("self_attn.k_proj.weight") else 0


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """Name in a Hugging Face directory -> name in a GGUF file, of each tensor."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.architecture.upper()], config.num_layers)
    return {source: str(known.get_name(source, (".weight", ".bias"))) for source, _ in tensors(config)}


def permute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection (heads * head_dim, columns) with each head's two halves interleaved."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _declare(writer: gguf.GGUFWriter, plan: TensorPlan) -> None:
    """Announce a tensor whose data follows later, by its shape in bytes: numpy does not support most types."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[plan.kind]
    if plan.shape[-1] % block:
        raise _named(plan, blocks_do_not_fit(plan.shape[-1], plan.kind))
    shape = (*plan.shape[:-1], plan.shape[-1] // block * block_bytes)
    writer.add_tensor_info(plan.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=plan.kind)


def _load(plan: TensorPlan, weights: Weights) -> NDArray[Any]:
    values = weights[plan.source]
    if plan.rotated_heads:
        values = permute(values, plan.rotated_heads)
    try:
        return encode(values, plan.kind)
    except StageError as error:
        raise _named(plan, error) from error


def _named(plan: TensorPlan, error: StageError) -> StageError:
    return StageError(f"{plan.source}: {error.message}", failure=error.failure, hint=error.hint)


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A vocabulary in GGUF's terms. `tokens`, `types` and `scores` have one entry for each row of the embedding."""

    model: str
    pre: str
    tokens: list[bytes]
    types: list[gguf.TokenType]
    scores: list[float] | None
    merges: list[str]
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def read_tokenizer(folder: Path, config: ModelConfig) -> TokenizerFacts:
    """Vocabulary, merges and special tokens of the model in `folder`, padded to the rows of its embedding.

    Raises StageError (infeasible) if there is no tokenizer.json, or if GGUF does not support its kind.
    """
    path = folder / "tokenizer.json"
    if model_files.find(folder, path.name) is None:
        raise refused(path, "the file is missing", hint="save the model's fast tokenizer next to its weights")
    raw = Fields.read(folder, path.name)
    model = raw.fields("model")
    kind, vocabulary = model.text("type"), model.fields("vocab")
    if kind != "BPE" or not vocabulary.values:
        raise refused(path, f"a {kind} tokenizer is not supported (supported: BPE with a vocabulary)")
    load_tokenizer(folder)  # the tokenizers package encodes prompts, so it must read the file too
    fallback = model.flag("byte_fallback")
    normal = gguf.TokenType.NORMAL
    by_id = {vocabulary.integer(text, least=0): (text, normal) for text in vocabulary.values}
    # llama.cpp holds back tokens until they complete a character, and a runtime that uses ids would never see them.
    # Control tokens have no text and are not held back, so tokens that are cut within a character are marked as control
    # tokens.
    for number, (text, _) in by_id.items():
        if fallback and (byte := BYTE_TOKEN.fullmatch(text)):
            by_id[number] = (text, gguf.TokenType.BYTE if int(byte[1], 16) < 0x80 else gguf.TokenType.CONTROL)
        elif not fallback and not _is_whole(text):
            by_id[number] = (text, gguf.TokenType.CONTROL)
    for added in raw.objects("added_tokens"):
        added_kind = gguf.TokenType.CONTROL if added.flag("special") else gguf.TokenType.USER_DEFINED
        by_id[added.integer("id", least=0)] = (added.required_text("content"), added_kind)
    if max(by_id) >= config.vocab_size:
        raise refused(path, f"it has token {max(by_id)}, the model's embedding ends at {config.vocab_size - 1}")
    # Embeddings are often padded to a round number of rows. Ids without a token still need an entry.
    unused = gguf.TokenType.UNUSED
    entries = [by_id.get(number, (f"[PAD{number}]", unused)) for number in range(config.vocab_size)]

    special = _special_ids(folder, {text: number for number, (text, _) in by_id.items()}, config.vocab_size)
    return TokenizerFacts(
        model="llama" if fallback else "gpt2",
        pre=_pre_tokenizer(config, json.dumps(raw.values.get("pre_tokenizer"))),
        tokens=[text.encode() for text, _ in entries],
        types=[kind for _, kind in entries],
        scores=[-float(number) for number in range(len(entries))] if fallback else None,
        merges=[_merge(model, rule) for rule in model.array("merges")],
        bos=next(iter(special["bos"]), None),
        eos=special["eos"],
        pad=next(iter(special["pad"]), None),
    )


def _special_ids(folder: Path, number_of: Mapping[str, int], vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The ids of special tokens. The model's configuration precedes the tokenizer's.

    generation_config.json is left to servers: the tokens that end an answer do not change the weights.
    """
    config, settings = Fields.read(folder, "config.json"), Fields.read_optional(folder, "tokenizer_config.json")
    special = {}
    for name in ("bos", "eos", "pad"):
        key = f"{name}_token_id"
        ids = config.token_ids(key) if config.has(key) else None
        if ids is None:
            number = number_of.get(settings.token(f"{name}_token") or "")
            ids = () if number is None else (number,)
        if beyond := [number for number in ids if number >= vocab_size]:
            raise refused(
                folder / "config.json", f"its {key} is {beyond[0]}, but the model's embedding ends at {vocab_size - 1}"
            )
        special[name] = ids
    return special


def _merge(model: Fields, rule: object) -> str:
    """A rule of a BPE as one text: newer files store a pair."""
    if isinstance(rule, list) and len(rule) == 2 and all(isinstance(part, str) for part in rule):
        return " ".join(rule)
    if not isinstance(rule, str):
        raise model.wrong("merges", "a list of pairs of texts")
    return rule


def _is_whole(text: str) -> bool:
    """True if a byte-level token is whole UTF-8 characters."""
    table = byte_level_alphabet()
    try:
        bytes(table[character] for character in text).decode()
    except (KeyError, UnicodeDecodeError):
        return False
    return True


def _pre_tokenizer(config: ModelConfig, text: str) -> str:
    """llama.cpp's name for the split of text before merging. Prompts arrive as token ids, so a near miss is harmless."""
    if config.architecture != "llama":
        return "qwen2"
    if "{1,3}" in text:
        return "llama-bpe"
    return "smollm" if "Digits" in text else "default"


def _add_metadata(
    writer: gguf.GGUFWriter, config: ModelConfig, tokenizer: TokenizerFacts, precision: GgufPrecision
) -> None:
    kind = "ALL_F32" if precision.linear == gguf.GGMLQuantizationType.F32 else f"MOSTLY_{precision.linear.name}"
    eos, eot = (*tokenizer.eos, None, None)[:2]
    linear = config.rope_scaling if isinstance(config.rope_scaling, float) else None
    for name, value in {
        "file_type": gguf.LlamaFileType[kind],
        "quantization_version": gguf.GGML_QUANT_VERSION,
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_heads,
        "head_count_kv": config.num_kv_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "rope_scaling_type": None if linear is None else gguf.RopeScalingType.LINEAR,
        "rope_scaling_factor": linear,
        "tokenizer_model": tokenizer.model,
        "tokenizer_pre": tokenizer.pre,
        "token_list": tokenizer.tokens,
        "token_types": tokenizer.types,
        "token_scores": tokenizer.scores,
        "token_merges": tokenizer.merges if tokenizer.scores is None else None,
        "add_bos_token": False,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": eos,
        "eot_token_id": eot,
        "pad_token_id": tokenizer.pad,
    }.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
