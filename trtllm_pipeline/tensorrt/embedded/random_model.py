"""Tiny generated models: standard Hugging Face directories, generated in a second, for tests and for trying the pipeline.

They speak nonsense, but with a model's manners: greedy text varies, probabilities are peaked, some channels are much louder
than others, as in trained models, so that precisions can be told apart, and any UTF-8 text survives the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.base import UsageError
from trtllm_pipeline.tensorrt.embedded import safetensors
from trtllm_pipeline.tensorrt.embedded.architecture import EMBEDDING, HEAD, ModelConfig, tensors
from trtllm_pipeline.tensorrt.embedded.params import ARCHITECTURES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Array = NDArray[np.float32]
VOCAB_SIZE: Final = 1024
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Only Qwen3 has heads wider than hidden_size / heads, and ties its head to the embedding like its small siblings.
_HEAD_DIM: Final = {"llama": 32, "qwen2": 32, "qwen3": 48}
_COMPARABLE_HEAD_DIM: Final = {**_HEAD_DIM, "qwen3": 64}
"""Sizes that GPU kernels support."""


# Every output comes from the layers, not from the last token alone: their part of the sum is made larger.
_GAINS: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), 1.25),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 1.0),
    "o_proj": 2.0,
    "lm_head": 1.5,
    **dict.fromkeys(("gate", "shared_expert_gate"), 2.0),
}
"""Standard deviation of a matrix, for inputs of unit variance."""
_NORMS: Final = {
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (0.5, 1.0)),
    **dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), (0.5, 1.0)),
    **dict.fromkeys(("q_norm", "k_norm"), (0.3, 1.5)),
}
"""Spread of the logarithm, and scale."""


_EMBEDDINGS: Final = ("embed_tokens", "embed_positions")


def write_model(out: Path, architecture: str = "llama", seed: int = 0, *, comparable: bool = False) -> None:
    """Write a model of about 1.3 million parameters into the directory `out`, which is created if necessary.

    `architecture` is llama, qwen2 or qwen3. The same arguments give the same weights. Raises UsageError for other names.

    A `comparable` model separates a wrong computation from a coarse one. Its projections are one magnitude with random signs,
    which precisions down to 4 bits represent exactly, so that rounding changes only activations. And no token that it
    generates is the prefix of another, so that `spoken` finds its exact tokens in its text.
    """
    names = {short: name for name, short in ARCHITECTURES.items()}
    if architecture not in names:
        raise UsageError(f"no tiny model of architecture {architecture!r}", hint=f"choose one of {', '.join(names)}")
    config = tiny_config(
        architecture,
        head_dim=(_COMPARABLE_HEAD_DIM if comparable else _HEAD_DIM)[architecture],
        tie_word_embeddings=architecture == "qwen3" and not comparable,
    )
    quiet = write_texts(out, config_json(names[architecture], architecture, config), comparable=comparable)
    random = np.random.default_rng([seed, list(names).index(architecture)])
    weights = {name: weight(name, shape, random, comparable=comparable) for name, shape in tensors(config)}
    for name in (HEAD,) if comparable else (HEAD, EMBEDDING):
        if name in weights:
            weights[name][quiet] *= np.float32(0.01)
    safetensors.write(out / "model.safetensors", weights)


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """The common shape. `architecture` is an architecture of the embedded toolchain with the same tensors."""
    return replace(
        ModelConfig(
            architecture=architecture,
            hidden_size=128,
            intermediate_size=512,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=2048,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            rope_scaling=None,
            tie_word_embeddings=False,
        ),
        **changes,
    )


def config_json(class_name: str, family: str, config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that all architectures have."""
    return {
        "architectures": [class_name],
        "model_type": family,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def write_texts(out: Path, config: Mapping[str, Any], *, comparable: bool = True) -> list[int]:
    """Write all of a model except its weights: `config` with the common keys, and a tokenizer. Returns the tokens to suppress."""
    out.mkdir(parents=True, exist_ok=True)
    end = SPECIAL_TOKENS.index("<|im_end|>")
    _write_json(out / "config.json", {**config, "bos_token_id": 0, "eos_token_id": end, "dtype": "bfloat16"})
    _write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [end, 0], "pad_token_id": 0})
    tokenizer = _write_tokenizer(out)
    speakable = spellings(tokenizer) if comparable else _texts(tokenizer)
    return [number for number in range(tokenizer.get_vocab_size()) if number not in speakable.values()]


def weight(name: str, shape: tuple[int, ...], random: np.random.Generator, *, comparable: bool) -> Array:
    """A random tensor, with the size for its name."""
    part, kind = name.split(".")[-2:]
    values = random.standard_normal(shape, dtype=np.float32)
    if part in _NORMS and kind == "weight":  # log-normal: a few channels carry most of the signal
        spread, scale = _NORMS[part]
        values = scale * np.exp(values * np.float32(spread * (0.5 if comparable else 1.0)))
    elif len(shape) == 1:
        values *= np.float32(0.2)
    elif part in _EMBEDDINGS:
        values *= np.float32(0.5 if comparable else 0.1)
    else:
        if comparable and name != HEAD:
            values = np.copysign(np.float32(1.0), values)
        gain = 1.0 if comparable and part == "o_proj" else _GAINS[part]
        values *= np.float32(gain / np.sqrt(shape[1]))
    return values.astype(np.float32)


def _write_tokenizer(out: Path) -> Tokenizer:
    """A byte-level BPE trained on the calibration texts of this package. Its alphabet is all 256 bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    from trtllm_pipeline.tensorrt.stage.calibration_rows import default_set, read_rows

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((str(row.text) for row in read_rows(default_set())), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,  # transformers 4 would remove spaces before punctuation
    }
    _write_json(out / "tokenizer_config.json", settings)
    return tokenizer


def _texts(tokenizer: Tokenizer) -> dict[str, int]:
    """Text -> token, for the tokens that a model may generate. All others get negligible rows in the head.

    The others are special tokens, so that a test decides when a text ends, and parts of characters, so that the texts are
    valid and can be encoded again.
    """
    texts = ((tokenizer.decode([number]), number) for number in range(tokenizer.get_vocab_size()))
    return {text: number for text, number in texts if text not in {"", "\ufffd"}}


def spellings(tokenizer: Tokenizer) -> dict[str, int]:
    """Text -> token, for the tokens that a comparable model may generate: none is the prefix of another."""
    texts = _texts(tokenizer)
    in_order = sorted(texts)  # what starts with a text follows it
    return {
        text: texts[text]
        for text, after in zip(in_order, [*in_order[1:], ""], strict=True)
        if not after.startswith(text)
    }


def spoken(text: str, spellings: Mapping[str, int]) -> list[int] | None:
    """The tokens of a text from a comparable model. None if it cannot have generated the text."""
    longest, tokens, start = max(map(len, spellings)), [], 0
    while start < len(text):
        ends = (start + length for length in range(1, longest + 1))
        end = next((end for end in ends if text[start:end] in spellings), None)
        if end is None:
            return None
        tokens.append(spellings[text[start:end]])
        start = end
    return tokens


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
