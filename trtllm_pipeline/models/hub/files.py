"""Selects the required files of a model's repository: safe names, weights, and trusted code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from trtllm_pipeline.base import DownloadError, Json, write_json
from trtllm_pipeline.models.files import model_files
from trtllm_pipeline.models.files.model_files import Fields

Progress = Callable[[float, float | None, str], None]
"""Called with the amount done, the total, and their unit."""
_CHUNK_BYTES: Final = 1 << 20
CODE: Final = "code"
"""Key of a pinned source: file name -> SHA-256 of trusted code."""
_PYTHON: Final = re.compile(r"[A-Za-z0-9_][\w.-]*\.py")
_NAMES_CODE: Final = "auto_map"
_CONFIGURATIONS: Final = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
MODEL: Final = "model"
TOKENIZER: Final = "tokenizer"
CONFIGURATION: Final = {
    MODEL: "config.json",
    "draft": "config.json",
    "adapter": "adapter_config.json",
    TOKENIZER: "config.json",
}
"""Form of a directory -> its defining file. The forms: a model with its tokenizer, a draft model, which may lack one, a
LoRA adapter, and a model without its weights.
"""
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

# Configuration, tokenizer and licence files, in the top directory. `weight_files` selects the weights. Pickles, code,
# and the same weights in other formats are never downloaded.
_LICENCE: Final = re.compile(r"(LICENSE|LICENCE|NOTICE|USE_POLICY|COPYING)([\w.-]*)", re.IGNORECASE)
_DESCRIPTION: Final = re.compile(
    rf"""config\.json | generation_config\.json | hf_quant_config\.json | quantize_config\.json
      | tokenizer\.json | tokenizer\.model | tokenizer_config\.json | special_tokens_map\.json | added_tokens\.json
      | vocab\.json | vocab\.txt | merges\.txt | spiece\.model | sentencepiece\.bpe\.model | [\w.-]+\.tiktoken
      | chat_template\.(jinja|json) | (video_)?(pre)?processor_config\.json | model\.safetensors\.index\.json
      | {_LICENCE.pattern}""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository, as listed by its hub."""

    path: str
    size: int
    digest: str | None
    """64 hexadecimal digits are a SHA-256, 40 are the SHA-1 of the git blob. None if the hub lists neither."""
    url: str


def described(names: Collection[str], form: str = MODEL) -> list[str]:
    """The required files other than the weights, sorted. Raises DownloadError for a name that would leave the
    directory.
    """
    for name in names:
        check_name(name)
    found = {name for name in names if _DESCRIPTION.fullmatch(name) or name == CONFIGURATION[form]}
    return sorted(found - {INDEX} if form == TOKENIZER else found)


def lacking(form: str, names: Collection[str]) -> str:
    """The error for files that lack the configuration of a form."""
    message = f"has no {CONFIGURATION[form]}, so it is not {'a LoRA adapter' if form == 'adapter' else 'a model of transformers'}"
    nemo = next((name for name in sorted(names) if name.endswith(".nemo")), None)
    if form != "adapter" or nemo is None:
        return message
    return f"{message} as PEFT writes it; {nemo} is NVIDIA NeMo's, which is not supported"


def is_licence(name: str) -> bool:
    """True if stages do not read a file of a model, because it is only for people."""
    return _LICENCE.fullmatch(name) is not None


def weight_files(folder: Path, names: Collection[str], model: str, form: str = MODEL) -> list[str]:
    """The safetensors files with the weights, sorted, for a form that has weights. `folder` contains the index, if
    the model has one.

    Raises DownloadError if there are none, or if the index names files that are not among `names`.
    """
    if form == TOKENIZER:
        return []
    if INDEX in names:
        shards = sorted(set(read_index(folder).values()))
        for shard in shards:
            check_name(shard)
        if missing := [shard for shard in shards if shard not in names]:
            raise DownloadError(
                f"{model} is incomplete: {len(missing)} files in its index are missing, such as {missing[0]}"
            )
        return shards
    if SINGLE in names:
        return [SINGLE]
    others = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if len(others) == 1:
        return others
    suffixes = sorted({PurePosixPath(name).suffix for name in names} & {".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx"})
    raise DownloadError(
        f"{model} has no safetensors weights: neither {SINGLE} nor an index of shards"
        + (f"; only {', '.join(suffixes)} files" if suffixes else ""),
        hint="choose a revision or a copy of the model in safetensors form; pickled weights are never loaded",
    )


def read_index(folder: Path) -> Mapping[str, str]:
    """Tensor name -> file name, from a directory's safetensors index. Raises DownloadError for an invalid index."""
    placed = Fields.read(folder, INDEX).fields("weight_map")
    if not placed.values or not all(isinstance(name, str) for name in placed.values.values()):
        raise DownloadError(f"{INDEX} is not a safetensors index: its weight_map does not map tensors to files")
    return placed.values


def check_name(name: str) -> None:
    """Raise DownloadError for a file name that could lead out of its directory."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise DownloadError(
            f"the repository lists a file {name!r}, which would be written outside the model's directory",
            hint="do not use this repository",
        )


class Sha256:
    """SHA-256 of a growing file. Only data that `update` did not get is read from disk."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._hasher = hashlib.sha256(usedforsecurity=False)
        self._size = 0

    def update(self, chunk: bytes) -> None:
        self._hasher.update(chunk)
        self._size += len(chunk)

    def catch_up(self, path: Path) -> None:
        """Read the part of the file that `update` did not get."""
        size = size_bytes(path)
        if size < self._size:  # it was started again
            self._begin()
        if size > self._size:
            with path.open("rb") as source:
                source.seek(self._size)
                while chunk := source.read(_CHUNK_BYTES):
                    self.update(chunk)

    def of(self, path: Path) -> str:
        """Digest of the file in its current state, 64 hexadecimal digits."""
        self.catch_up(path)
        return self._hasher.hexdigest()


def mismatch(path: Path, file: RemoteFile, sha256: Sha256 | None = None) -> str | None:
    """How a file on disk differs from the hub's listing, in size or digest. None if it does not.

    `sha256` has already processed part of the file.
    """
    if (size := size_bytes(path)) != file.size:
        return f"{size} bytes instead of {file.size}"
    if file.digest is None:
        return None
    if len(file.digest) == 64:
        algorithm, actual = "sha256", (sha256 or Sha256()).of(path)
    else:
        algorithm, actual = "sha1", hex_digest(path, "sha1", b"blob %d\0" % file.size)
    return None if actual == file.digest.lower() else f"{algorithm} {actual} instead of {file.digest}"


def hex_digest(path: Path, algorithm: str = "sha256", prefix: bytes = b"") -> str:
    """Digest of `prefix` and a file's content."""
    hasher = hashlib.new(algorithm, prefix, usedforsecurity=False)
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def size_bytes(path: Path) -> int:
    """Size of a file. 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def trusted_code(pinned: Mapping[str, Json]) -> dict[str, str]:
    """Name and SHA-256 of each code file of a pinned source."""
    digests = pinned.get(CODE)
    return {str(name): str(digest) for name, digest in digests.items()} if isinstance(digests, dict) else {}


def code_files(names: Iterable[str]) -> list[str]:
    """The Python files in a repository's top directory, sorted: transformers may load the model with them."""
    return sorted(name for name in names if _PYTHON.fullmatch(name))


def listed_code(pinned: Mapping[str, Json], named: Mapping[str, RemoteFile], model: str) -> list[RemoteFile]:
    """The code files of a pinned source in the hub's listing, to be verified by the trusted digests.

    Raises DownloadError for a file that the hub does not have.
    """
    wanted = trusted_code(pinned)
    if missing := sorted(wanted.keys() - named.keys()):
        raise _missing(model, missing[0])
    return [RemoteFile(name, named[name].size, digest, named[name].url) for name, digest in sorted(wanted.items())]


def copy_code(pinned: Mapping[str, Json], folder: Path, out: Path, model: str) -> None:
    """Copy the trusted code files of a pinned source from `folder`. Raises DownloadError if one differs."""
    for name, digest in sorted(trusted_code(pinned).items()):
        source = model_files.find(folder, name)
        if source is None:
            raise _missing(model, name)
        wrong = mismatch(source, RemoteFile(name, source.stat().st_size, digest, ""))
        if wrong is not None:
            raise DownloadError(
                f"{model}: {name} is not the trusted code: {wrong}",
                hint="read the file; `pipeline plan` shows its SHA-256 for settings.download.trust_remote_code",
            )
        model_files.copy(source, out / name)


def drop_code_references(out: Path) -> None:
    """Remove `auto_map` from a directory without code: transformers looks for those files even if it does not need
    them.

    With it, TensorRT-LLM's scripts fail with "does not appear to have a file named configuration_phi3.py". Without it,
    transformers uses its own class for `model_type`.
    """
    for name in _CONFIGURATIONS:
        path = out / name
        if not path.is_file():
            continue
        config = model_files.read_json(out, name)
        if isinstance(config, dict) and _NAMES_CODE in config:
            rest = {key: value for key, value in config.items() if key != _NAMES_CODE}
            write_json(path, rest, indent=2)  # a new file: this one may share its bytes with the original


def _missing(model: str, name: str) -> DownloadError:
    return DownloadError(
        f"{model} has no file {name}, which settings.download.trust_remote_code names",
        hint="list the files of the revision that the recipe pins",
    )
