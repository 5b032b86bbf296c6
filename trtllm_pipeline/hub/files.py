"""Which files of a model's repository are needed, and which names are safe."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from trtllm_pipeline.errors import DownloadError, FailureClass
from trtllm_pipeline.files.model_files import Fields

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

# Configuration, tokenizer and licence files, in the folder itself. Weights are chosen by `weight_files`; never wanted are
# pickles, code, and the same weights in other forms.
_DESCRIPTION: Final = re.compile(
    r"""config\.json | generation_config\.json | hf_quant_config\.json | quantize_config\.json
      | tokenizer\.json | tokenizer\.model | tokenizer_config\.json | special_tokens_map\.json | added_tokens\.json
      | vocab\.json | vocab\.txt | merges\.txt | spiece\.model | sentencepiece\.bpe\.model | [\w.-]+\.tiktoken
      | chat_template\.(jinja|json) | model\.safetensors\.index\.json
      | (LICENSE|LICENCE|NOTICE|USE_POLICY|COPYING)([\w.-]*)""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository, as its hub lists it."""

    path: str
    size: int
    digest: str | None
    """64 hexadecimal digits are a SHA-256, 40 the SHA-1 of the git blob; None if the hub lists none."""
    url: str


def description_files(names: Collection[str]) -> list[str]:
    """The needed files besides the weights, sorted. Raises DownloadError for a name that would leave the folder."""
    for name in names:
        check_name(name)
    return sorted(name for name in names if _DESCRIPTION.fullmatch(name))


def weight_files(folder: Path, names: Collection[str], model: str) -> list[str]:
    """The safetensors files that hold the weights, sorted; `folder` holds the index if the model has one.

    Raises DownloadError when there are none, or the index names files that are not among `names`.
    """
    if INDEX in names:
        shards = sorted(set(read_index(folder).values()))
        for shard in shards:
            check_name(shard)
        if missing := [shard for shard in shards if shard not in names]:
            raise DownloadError(
                f"{model} is incomplete: {len(missing)} files in its index are missing, such as {missing[0]}",
                failure=FailureClass.USER,
            )
        return shards
    if SINGLE in names:
        return [SINGLE]
    others = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if len(others) == 1:
        return others
    found = sorted({PurePosixPath(name).suffix for name in names} & {".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx"})
    raise DownloadError(
        f"{model} has no safetensors weights: neither {SINGLE} nor an index of shards"
        + (f"; only {', '.join(found)} files" if found else ""),
        failure=FailureClass.USER,
        hint="choose a revision or a copy of the model in safetensors form; pickled weights are never loaded",
    )


def read_index(folder: Path) -> Mapping[str, str]:
    """Tensor name -> file name of a folder's safetensors index. Raises DownloadError when it is not one."""
    placed = Fields.read(folder, INDEX).fields("weight_map")
    if not placed.values or not all(isinstance(name, str) for name in placed.values.values()):
        raise DownloadError(
            f"{INDEX} is not a safetensors index: its weight_map does not map tensors to files",
            failure=FailureClass.USER,
        )
    return placed.values


def check_name(name: str) -> None:
    """Raise DownloadError for a file name that could lead out of the folder it is put in."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise DownloadError(
            f"the repository lists a file {name!r}, which would be written outside the model's folder",
            failure=FailureClass.USER,
            hint="do not use this repository",
        )
