"""Tiny generated models: standard Hugging Face folders, made in a second, for tests and for trying the pipeline out.

They speak nonsense, but with a model's manners: greedy text varies, probabilities are peaked, some channels are much louder
than others, as in trained models, so that precisions can be told apart, and any UTF-8 text survives the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trtllm_pipeline.errors import UsageError
from trtllm_pipeline.toolchains.embedded import safetensors
from trtllm_pipeline.toolchains.embedded.architecture import (
    ARCHITECTURES,
    EMBEDDING,
    HEAD,
    ModelConfig,
    read_config,
    tensors,
)

Array = NDArray[np.float32]
VOCAB_SIZE: Final = 1024
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 128, 512, 4, 4, 2
# Qwen3 alone has heads wider than hidden_size / heads, and ties its head to the embedding as its small siblings do.
_HEAD_DIM: Final = {"llama": 32, "qwen2": 32, "qwen3": 48}


# Every output comes from the layers, not from the last token alone: their part of the sum is made the larger one.
_GAINS: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), 1.25),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), 1.0),
    "o_proj": 2.0,
    "lm_head": 1.5,
}
"""Of a matrix, for inputs of unit variance."""
_NORMS: Final = {
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (0.5, 1.0)),
    **dict.fromkeys(("q_norm", "k_norm"), (0.3, 1.5)),
}
"""Spread of the logarithm, and scale."""


def write_model(out: Path, architecture: str = "llama", seed: int = 0) -> None:
    """Write a model of about 1.3 million parameters into the folder `out`, which is made if it is not there.

    `architecture` is llama, qwen2 or qwen3. The same arguments give the same weights. Raises UsageError for another one.
    """
    names = {short: name for name, short in ARCHITECTURES.items()}
    if architecture not in names:
        raise UsageError(f"no tiny model of architecture {architecture!r}", hint=f"choose one of {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    end = SPECIAL_TOKENS.index("<|im_end|>")
    config = {
        "architectures": [names[architecture]],
        "model_type": architecture,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM[architecture],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": architecture == "qwen3",
        "bos_token_id": 0,
        "eos_token_id": end,
        "dtype": "bfloat16",
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [end, 0], "pad_token_id": 0})
    quiet = _write_tokenizer(out)
    random = np.random.default_rng([seed, list(names).index(architecture)])
    safetensors.write(out / "model.safetensors", dict(_tensors(read_config(out), random, quiet)))


def _tensors(config: ModelConfig, random: np.random.Generator, quiet: list[int]) -> Iterator[tuple[str, Array]]:
    for name, shape in tensors(config):
        part = name.split(".")[-2]
        values = random.standard_normal(shape, dtype=np.float32)
        if part in _NORMS:  # log-normal: few channels carry most of the signal
            spread, scale = _NORMS[part]
            values = scale * np.exp(values * np.float32(spread))
        elif len(shape) == 1:
            values *= np.float32(0.2)
        elif name == EMBEDDING:
            values *= np.float32(0.1)
        else:
            values *= np.float32(_GAINS[part] / np.sqrt(shape[1]))
        if name in {EMBEDDING, HEAD}:
            values[quiet] *= 0.01
        yield name, values.astype(np.float32)


def _write_tokenizer(out: Path) -> list[int]:
    """A byte-level BPE trained on the calibration texts of this package; its alphabet is all 256 bytes.

    Returns the tokens the model had better not say, which get no row in the head to speak of: special ones, so that a test decides when a text ends, and parts of
    characters, so that its texts are texts and can be encoded again.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    from trtllm_pipeline.stages.calibration_rows import default_set
    from trtllm_pipeline.toolchains.embedded.calibration import read_texts

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_texts(default_set()), trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(out / "tokenizer_config.json", settings)
    return [number for number in range(tokenizer.get_vocab_size()) if tokenizer.decode([number]) in {"", "\ufffd"}]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
