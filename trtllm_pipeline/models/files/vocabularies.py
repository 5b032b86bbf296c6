"""Builds tokenizers for models that have a sentencepiece or tiktoken vocabulary, but no tokenizer.json.

Such a repository has Python code that creates the tokenizer. That code is never run. Its additions to the vocabulary
are known by its class, which tokenizer_config.json names. Sources: tokenization_chatglm.py of GLM-4,
tokenization_internlm2_fast.py of InternLM2.5, tokenization_qwen.py of Qwen; tiktoken's algorithm;
sentencepiece_model.proto of sentencepiece.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trtllm_pipeline.models.files.model_files import Fields

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4's word pattern, with one digit or up to three per word."""
_GLM_PREFIX: Final = ("[gMASK]", "<sop>")
_QWEN_SPECIAL: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{number}|>" for number in range(205)),
)
_UNKNOWN, _SPACE = "<unk>", "\u2581"
_BPE: Final = 2
"""sentencepiece's `ModelType`."""
_NORMAL, _USER_DEFINED = 1, 4
"""sentencepiece's kinds of pieces. Only normal ones are merged; user-defined ones are kept whole."""


def _glm(content: bytes, settings: Fields) -> Tokenizer:
    """GLM-4. Every prompt starts with two tokens."""
    made = _of_ranks(content, digits="{1,3}")
    _add(made, settings)
    prefix = [(token, made.token_to_id(token)) for token in _GLM_PREFIX]
    if any(number is None for _, number in prefix):
        raise settings.wrong("added_tokens_decoder", f"{' and '.join(_GLM_PREFIX)} among its tokens")
    made.post_processor = processors.TemplateProcessing(
        single=[*_GLM_PREFIX, "$A"], pair=[*_GLM_PREFIX, "$A", "$B"], special_tokens=prefix
    )
    return made


def _qwen(content: bytes, _settings: Fields) -> Tokenizer:
    """The first Qwen. Only its code names the special tokens."""
    made = _of_ranks(content, digits="")
    made.normalizer = normalizers.NFC()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in _QWEN_SPECIAL])
    return made


def _internlm(content: bytes, settings: Fields) -> Tokenizer:
    """InternLM2. Its code assigns texts to unused pieces of the vocabulary."""
    try:
        model = _sentencepiece().FromString(content)
    except message.DecodeError as error:
        raise ValueError("it is not a sentencepiece model") from error
    if model.trainer_spec.model_type != _BPE:
        raise ValueError("it is not a BPE model of sentencepiece")
    added = _added(settings)
    texts = [added[number].content if number in added else piece.piece for number, piece in enumerate(model.pieces)]
    vocabulary = {text: number for number, text in enumerate(texts)}
    # Named as in the vocabulary, in case its settings rename one.
    scores = {text: piece.score for text, piece in zip(texts, model.pieces, strict=True) if piece.type == _NORMAL}
    made = Tokenizer(
        models.BPE(vocabulary, _merges(scores, vocabulary), unk_token=_UNKNOWN, fuse_unk=True, byte_fallback=True)
    )
    own = [text for text, piece in zip(texts, model.pieces, strict=True) if piece.type == _USER_DEFINED]
    made.add_tokens([AddedToken(text, normalized=False) for text in own])
    _add(made, settings)
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if model.normalizer_spec.add_dummy_prefix:
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), made.normalizer])
        made.decoder = decoders.Sequence([made.decoder, decoders.Strip(" ", 1, 0)])
    begins = [settings.token("bos_token") or "<s>"] if settings.values.get("add_bos_token", True) else []
    ends = [settings.token("eos_token") or "</s>"] if settings.flag("add_eos_token") else []
    special = [(token, made.token_to_id(token)) for token in (*begins, *ends)]
    if lacking := [token for token, number in special if number is None]:
        raise ValueError(f"it has no {' and no '.join(lacking)}")
    made.post_processor = processors.TemplateProcessing(
        single=[*begins, "$A", *ends], pair=[*begins, "$A", *ends, *begins, "$B", *ends], special_tokens=special
    )
    return made


MAKERS: Final[Mapping[str, Callable[[bytes, Fields], Tokenizer]]] = {
    "ChatGLM4Tokenizer": _glm,
    "InternLM2Tokenizer": _internlm,
    "QWenTokenizer": _qwen,
}
"""`tokenizer_class` -> a function that builds the tokenizer from the vocabulary and tokenizer_config.json. They raise
ValueError for an invalid vocabulary, ModelFileError for invalid settings.
"""


def _added(settings: Fields) -> dict[int, AddedToken]:
    """The tokens that tokenizer_config.json adds, by id."""
    listed = settings.fields("added_tokens_decoder")
    if not all(key.isdecimal() for key in listed.values):
        raise settings.wrong("added_tokens_decoder", "tokens by number")
    tokens = {}
    for key in sorted(listed.values, key=int):
        token = listed.fields(key)
        flags = {name: token.flag(name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokens[int(key)] = AddedToken(token.required_text("content"), **flags)
    return tokens


def _add(made: Tokenizer, settings: Fields) -> None:
    """Add the tokens in tokenizer_config.json to a tokenizer that lacks them."""
    added = _added(settings)
    made.add_tokens([*added.values()])
    for number, token in added.items():
        if made.token_to_id(token.content) != number:
            token_id = made.token_to_id(token.content)
            raise ValueError(f"{token.content} would be token {token_id}, and {number} by tokenizer_config.json")


def _of_ranks(content: bytes, *, digits: str) -> Tokenizer:
    """Build from a tiktoken file: each line has a token in base64, and its rank. Raises ValueError for another format."""
    letters, ranks = _letters(), {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks["".join(map(letters.__getitem__, base64.b64decode(token, validate=True)))] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from error
    if sorted(ranks.values()) != [*range(len(ranks))] or not ranks.keys() >= {*letters}:
        raise ValueError("its ranks do not count from 0, or tokens of one byte are missing")
    # A whole token stays that token, whatever its parts are.
    made = Tokenizer(
        models.BPE(ranks, _merges({token: -rank for token, rank in ranks.items()}, ranks), ignore_merges=True)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT % digits), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _merges(scores: Mapping[str, float], numbers: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that form a third, highest score first."""
    pairs = (
        (-score, numbers[whole[:cut]], numbers[whole[cut:]], whole[:cut], whole[cut:])
        for whole, score in scores.items()
        for cut in range(1, len(whole))
        if whole[:cut] in scores and whole[cut:] in scores
    )
    return [(left, right) for *_, left, right in sorted(pairs)]


@cache
def _letters() -> list[str]:
    """The letter for each byte in vocabularies that are text. Source: encoder.py of GPT-2."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


_SENTENCEPIECE: Final = """
name: "vocabulary.proto" package: "trtllm_pipeline" syntax: "proto2"
message_type { name: "Piece"
  field { name: "piece" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "score" number: 2 label: LABEL_OPTIONAL type: TYPE_FLOAT default_value: "0" }
  field { name: "type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" } }
message_type { name: "Trainer"
  field { name: "model_type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" } }
message_type { name: "Normalizer"
  field { name: "add_dummy_prefix" number: 3 label: LABEL_OPTIONAL type: TYPE_BOOL default_value: "true" } }
message_type { name: "Model"
  field { name: "pieces" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".trtllm_pipeline.Piece" }
  field { name: "trainer_spec" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".trtllm_pipeline.Trainer" }
  field { name: "normalizer_spec" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".trtllm_pipeline.Normalizer" } }
"""
"""A sentencepiece model, with the fields that are read here."""


@cache
def _sentencepiece() -> Any:
    """The message class of a sentencepiece model."""
    file = text_format.Parse(_SENTENCEPIECE, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("trtllm_pipeline.Model"))
