"""Tokenizers made of vocabularies, against the libraries that such models' own code calls."""

from __future__ import annotations

import base64
import io
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trtllm_pipeline.base.errors import DownloadError, UsageError
from trtllm_pipeline.models.files.model_files import names
from trtllm_pipeline.models.files.tokenizer import has_tokenizer, read_tokenizer, tokenizer_at

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

CORPUS = """\
The keeper of the lighthouse wrote: "It's 12 km to the harbour, we'll be there by 0930."
  def area(width, height):\n\treturn width * height  # metres\r\n\r\nÜber die Straße; 世界の言葉は七千。 Ça va? 🙂🙂
They've counted 1234567 stars, and   the others' lamps went out one after another.
"""
PIECES = [*"abcdefgh  \n\r\t0123456789'sSTtéß世界—ſİ\u00a0\u2028🙂.,!?\u2581", "'s", "'LL", "the ", " lamps", "e\u0301"]
GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>")
CHATGLM4 = (  # as tokenization_chatglm.py gives it to tiktoken
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CHATGLM4.replace("{1,3}", "")


def texts(*, more: tuple[str, ...] = (), count: int = 1500) -> Iterator[str]:
    draw = random.Random(0)
    for number in range(count):
        if number % 2:
            yield "".join(draw.choices([*PIECES, *more], k=draw.randint(0, 24)))
        else:
            start = draw.randrange(len(CORPUS))
            yield CORPUS[start : start + draw.randint(1, 50)]


def ranks() -> dict[bytes, int]:
    """A vocabulary as training makes it: single bytes, then what stands together most often."""
    found = {bytes([byte]): byte for byte in range(256)}
    text = [bytes([byte]) for byte in CORPUS.encode()]
    while len(found) < 400:
        best, _ = Counter(pairwise(text)).most_common(1)[0]
        found.setdefault(b"".join(best), len(found))
        for place in range(len(text) - 2, -1, -1):
            if tuple(text[place : place + 2]) == best:
                text[place : place + 2] = [b"".join(best)]
    return found


RANKS = ranks()


def write(folder: Path, name: str, content: bytes, kind: str, added: Mapping[int, str], **settings: Any) -> Path:
    (folder / name).write_bytes(content)
    listed = {str(number): {"content": token, "special": True} for number, token in added.items()}
    told = {"tokenizer_class": kind, "added_tokens_decoder": listed, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def of_tiktoken(found: Mapping[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in found.items())


def glm(folder: Path) -> Path:
    return write(folder, "tokenizer.model", of_tiktoken(RANKS), "ChatGLM4Tokenizer", dict(enumerate(GLM, len(RANKS))))


def test_glm_4_has_the_tokens_of_tiktoken(tmp_path: Path) -> None:
    special = {token: number for number, token in enumerate(GLM, len(RANKS))}
    theirs = tiktoken.Encoding("glm", pat_str=CHATGLM4, mergeable_ranks=RANKS, special_tokens=special)
    ours = read_tokenizer(glm(tmp_path))
    for text in texts(more=GLM):
        expected = theirs.encode(text, allowed_special="all")
        assert ours.encode(text, add_special_tokens=False).ids == expected, repr(text)
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected)
    assert ours.encode("").tokens == ["[gMASK]", "<sop>"]
    assert ours.encode("lamps").ids[2:] == theirs.encode("lamps")


def test_the_first_qwen_has_the_tokens_of_tiktoken(tmp_path: Path) -> None:
    from unicodedata import normalize

    write(tmp_path, "qwen.tiktoken", of_tiktoken(RANKS), "QWenTokenizer", {})
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))
    numbers = {token: number for number, token in enumerate(special, len(RANKS))}
    theirs = tiktoken.Encoding("qwen", pat_str=QWEN, mergeable_ranks=RANKS, special_tokens=numbers)
    ours = read_tokenizer(tmp_path)
    for text in texts(more=("<|im_start|>", "<|extra_204|>")):
        expected = theirs.encode(normalize("NFC", text), allowed_special="all")
        assert ours.encode(text).ids == expected, repr(text)


def sentencepiece_model(*, dummy_prefix: bool, kind: str = "bpe") -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=out,
        vocab_size=420 if kind == "bpe" else 340,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        user_defined_symbols=["[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]"],
        minloglevel=3,
    )
    return out.getvalue()


@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_internlm2_has_the_tokens_of_sentencepiece(tmp_path: Path, dummy_prefix: bool) -> None:
    content = sentencepiece_model(dummy_prefix=dummy_prefix)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    named = theirs.piece_to_id("[UNUSED_TOKEN_2]")
    write(tmp_path, "tokenizer.model", content, "InternLM2Tokenizer", {1: "<s>", 2: "</s>", named: "<|im_end|>"})
    ours = read_tokenizer(tmp_path)
    for text in texts():
        expected = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == expected, repr(text)
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected)
    assert ours.get_vocab_size() == theirs.get_piece_size()
    assert ours.encode("<|im_end|>[UNUSED_TOKEN_1]").ids == [1, named, theirs.piece_to_id("[UNUSED_TOKEN_1]")]
    assert ours.encode("[UNUSED_TOKEN_2]").tokens != ["<s>", "[UNUSED_TOKEN_2]"], "that piece has another text"


def test_what_internlm2_puts_around_a_text_is_set(tmp_path: Path) -> None:
    content = sentencepiece_model(dummy_prefix=False)
    for settings, expected in (({"add_bos_token": False}, ["a"]), ({"add_eos_token": True}, ["<s>", "a", "</s>"])):
        write(tmp_path, "tokenizer.model", content, "InternLM2TokenizerFast", {1: "<s>", 2: "</s>"}, **settings)
        assert read_tokenizer(tmp_path).encode("a").tokens == expected


def test_a_piece_that_others_are_made_of_may_have_another_text(tmp_path: Path) -> None:
    content = sentencepiece_model(dummy_prefix=False)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=content)
    texts = [pieces.id_to_piece(number) for number in range(pieces.get_piece_size())]
    number = next(n for n, text in enumerate(texts) if len(text) == 2 and any(text in each[:-1] for each in texts))
    write(tmp_path, "tokenizer.model", content, "InternLM2Tokenizer", {1: "<s>", 2: "</s>", number: "<|plugin|>"})
    ours = read_tokenizer(tmp_path)
    assert ours.encode("<|plugin|>", add_special_tokens=False).ids == [number]
    assert texts[number] not in ours.get_vocab()


def test_which_of_its_tokens_a_vocabulary_lacks_is_said(tmp_path: Path) -> None:
    ends = {"add_eos_token": True, "eos_token": "<|end|>"}
    write(tmp_path, "tokenizer.model", sentencepiece_model(dummy_prefix=False), "InternLM2Tokenizer", {}, **ends)
    with pytest.raises(DownloadError, match=r"it has no <\|end\|>$"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_json_is_what_is_read_where_there_is_one(tmp_path: Path) -> None:
    read_tokenizer(glm(tmp_path)).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    assert read_tokenizer(tmp_path).encode("").tokens == ["[gMASK]", "<sop>"]
    with pytest.raises(UsageError, match=r"--tokenizer .*other.json: .*it is missing"):
        tokenizer_at(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("kind", "content", "added", "said"),
    [
        ("ChatGLM4Tokenizer", b"\xff\xfe", {}, "line 1 is not a token in base64 and its rank"),
        ("ChatGLM4Tokenizer", of_tiktoken(dict([*RANKS.items()][1:])), {}, "do not count from 0"),
        ("ChatGLM4Tokenizer", of_tiktoken(RANKS), {}, "added_tokens_decoder is .*; expected .gMASK. and <sop>"),
        ("ChatGLM4Tokenizer", of_tiktoken(RANKS), {9999: "<sop>"}, "<sop> would be token 400, and 9999 by"),
        ("ChatGLM4Tokenizer", of_tiktoken(RANKS), {-1: "<sop>"}, "expected tokens by number"),
        ("InternLM2Tokenizer", b"\xff\xfe", {}, "not a sentencepiece model"),
        (
            "InternLM2Tokenizer",
            sentencepiece_model(dummy_prefix=True, kind="unigram"),
            {},
            "not a BPE model of sentencepiece",
        ),
        ("InternLM2Tokenizer", b"", {}, "not a BPE model of sentencepiece"),
        ("AnotherTokenizer", of_tiktoken(RANKS), {}, "tokenizer.json: it is missing"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, kind: str, content: bytes, added: Mapping[int, str], said: str
) -> None:
    write(tmp_path, "tokenizer.model", content, kind, added)
    with pytest.raises(DownloadError, match=said):
        read_tokenizer(tmp_path)


def test_whether_a_tokenizer_can_be_read_is_known_by_names_of_files(tmp_path: Path) -> None:
    glm(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert has_tokenizer(names(tmp_path), settings)
    assert not has_tokenizer(names(tmp_path), {"tokenizer_class": "ChatGLMTokenizer"})
    assert not has_tokenizer(names(tmp_path), {})
    assert has_tokenizer({"tokenizer.json"}, {})
