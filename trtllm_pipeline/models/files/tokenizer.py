"""The tokenizer in a model's directory: its tokenizer.json, or one built from another vocabulary file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trtllm_pipeline.base import DownloadError, FailureClass, UsageError
from trtllm_pipeline.models.files.model_files import Fields, ModelFileError, read_bytes, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_AGAIN: Final = "download the model again, or from another source"
TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
_VOCABULARIES: Final = {
    "ChatGLM4Tokenizer": "tokenizer.model",
    "InternLM2Tokenizer": "tokenizer.model",
    "QWenTokenizer": "qwen.tiktoken",
}
"""`tokenizer_class` of a model without tokenizer.json -> its vocabulary file. `vocabularies` builds these tokenizers."""


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file, or in a model's directory. Raises ModelFileError."""
    from tokenizers import Tokenizer

    # A file that the user named is trusted to be the right one.
    folder, name = (path, TOKENIZER) if path.is_dir() else (path.resolve().parent, path.resolve().name)
    text = read_text(folder, name)
    if text is None:
        return _made(folder, name)
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # the library raises bare Exception, and PanicException, which is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(
            folder / name, f"it is not a tokenizer: {error}", hint=_AGAIN, failure=FailureClass.USER
        ) from error


def added_prefix(tokenizer: Tokenizer) -> str:
    """The text of the special tokens that the tokenizer adds before a prompt, which chat templates write as well.

    Empty if it adds none, or if it does not parse that text as the same tokens.
    """
    ids = tokenizer.encode("").ids
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text if ids and tokenizer.encode(text).ids == ids * 2 else ""


def tokenizer_at(path: Path) -> Tokenizer:
    """The tokenizer for `--tokenizer`: a tokenizer.json or a model's directory. Raises UsageError."""
    try:
        return read_tokenizer(path)
    except DownloadError as error:
        raise UsageError(f"--tokenizer {path}: {error.message}", hint=error.hint) from error


def has_tokenizer(names: Collection[str], settings: Mapping[str, Any]) -> bool:
    """True if `read_tokenizer` finds a tokenizer among the files of a model. `settings` is its tokenizer_config.json."""
    return TOKENIZER in names or _VOCABULARIES.get(_class(settings.get("tokenizer_class"))) in names


def _made(folder: Path, name: str) -> Tokenizer:
    """The tokenizer for a directory without the file `name`. Raises ModelFileError."""
    settings = Fields.read_optional(folder, SETTINGS)
    kind = _class(settings.text("tokenizer_class"))
    file = _VOCABULARIES.get(kind) if name == TOKENIZER else None
    content = None if file is None else read_bytes(folder, file)
    if file is None or content is None:
        raise ModelFileError(
            folder / name,
            "it is missing",
            hint="name a model directory, or its tokenizer.json; docs/models.md lists models that need neither",
            failure=FailureClass.USER,
        )
    from trtllm_pipeline.models.files import vocabularies

    try:
        return vocabularies.MAKERS[kind](content, settings)
    except ValueError as error:
        raise ModelFileError(
            folder / file, f"{kind} cannot read it: {error}", hint=_AGAIN, failure=FailureClass.INFEASIBLE
        ) from error


def _class(name: object) -> str:
    """Without the suffix that marks classes of this library."""
    return name.removesuffix("Fast") if isinstance(name, str) else ""
