"""Engine directories made in milliseconds, for tests of the serving side.

`script_engine` follows a fixed successor table, so that every token of an answer is known in advance; it really runs
in llama.cpp, only its weights are chosen instead of trained. `random_engine` has random weights and real attention:
its answers depend on everything that came before.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

SCRIPT = "stop-世界🎉é bad\n"
"""What the script engine says after "s": no byte occurs twice. The end token follows, then it starts again."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""After a capital letter it goes round this circle for ever."""
END_ID = 256
"""The id of the end token; ids below are bytes."""
VOCABULARY = 258


def byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE, as the tokenizers library maps them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def script_engine(folder: Path, **limits: int) -> Path:
    """An engine that continues `SCRIPT` or `LETTERS`; "." is everywhere the second choice, and follows itself."""
    hidden = 320
    following = {byte: ord(".") for byte in range(VOCABULARY)}
    script = SCRIPT.encode()
    following.update(dict(pairwise(script)))
    following.update({script[-1]: END_ID, END_ID: script[0]})
    letters = LETTERS.encode()
    following.update(dict(zip(letters, letters[1:] + letters[:1], strict=True)))
    embedding = np.eye(VOCABULARY, hidden, dtype=np.float32)
    output = np.zeros((VOCABULARY, hidden), dtype=np.float32)
    for token, successor in following.items():
        output[ord("."), token] = 8 / np.sqrt(hidden)  # the final norm makes a one-hot vector sqrt(hidden) long
        output[successor, token] = 10 / np.sqrt(hidden)
    return _write(folder, hidden, embedding, output, np.random.default_rng(0), scale=0.0, limits=limits)


def random_engine(folder: Path, *, hidden: int = 128, **limits: int) -> Path:
    """An engine with random weights."""
    rng = np.random.default_rng(7)
    embedding = rng.standard_normal((VOCABULARY, hidden), dtype=np.float32)
    output = rng.standard_normal((VOCABULARY, hidden), dtype=np.float32) * 0.3
    return _write(folder, hidden, embedding, output, rng, scale=0.15, limits=limits)


def _write(
    folder: Path,
    hidden: int,
    embedding: np.ndarray,
    output: np.ndarray,
    rng: np.random.Generator,
    *,
    scale: float,
    limits: dict[str, int],
) -> Path:
    import gguf

    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    heads, feed_forward, layers = hidden // 32, 64, 2
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*byte_symbols(), "<|end|>", "<|pad|>"])
    writer.add_token_types(
        [1] * 128 + [3] * 130
    )  # 3, control: the bytes that are parts of characters, and the specials
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(END_ID)
    writer.add_bos_token_id(END_ID)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", output)
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    for layer in range(layers):
        for name, rows, columns in (
            ("attn_q", hidden, hidden),
            ("attn_k", hidden, hidden),
            ("attn_v", hidden, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", feed_forward, hidden),
            ("ffn_up", feed_forward, hidden),
            ("ffn_down", hidden, feed_forward),
        ):
            weight = rng.standard_normal((rows, columns), dtype=np.float32) * scale
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    build = {"max_batch_size": 4, "max_input_len": 256, "max_seq_len": 512, "max_num_tokens": 512, **limits}
    config = {"schema": 1, "version": "test", "precision": "fp32", "architecture": "llama", "build_config": build}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer(folder)
    return folder


def tokenizer(folder: Path) -> None:
    """Write the Hugging Face tokenizer files that go with the byte vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {symbol: index for index, symbol in enumerate(byte_symbols())}
    byte_level = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    byte_level.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}), encoding="utf-8")
