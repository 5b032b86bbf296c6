"""Reads files in a model's directory, which may be untrusted, and checks the types of their JSON values.

Links are only followed within the directory and into the Hugging Face cache, whose snapshots consist of links. Other
links could bring files of this machine into copies, hashes and uploads. Only regular files are opened.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from trtllm_pipeline.base import DownloadError, FailureClass, reading, user_files

T = TypeVar("T")
MAX_JSON_BYTES: Final = 100_000_000
"""The largest JSON files of known models are a third of this size."""
_FICLONE: Final = 0x40049409  # linux/fs.h: share the content, copy on write
_AGAIN: Final = "download the model again, or from another source"


class ModelFileError(DownloadError):
    """A file in a model's directory is unsafe to open, or has invalid content."""

    def __init__(self, path: Path, reason: str, *, hint: str, failure: FailureClass) -> None:
        super().__init__(f"cannot use {path}: {reason}", failure=failure, hint=hint)
        self.short = f"{path.name}: {reason}"
        """For a message that already names the directory."""


def find(folder: Path, name: str) -> Path | None:
    """Path of the file `name` in a model's directory, with links resolved; None if it does not exist.

    Raises ModelFileError for a link that leads elsewhere or nowhere, and for anything but a file.
    """
    path = folder / name
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot access it: {_words(error)}", _AGAIN) from error
    try:
        real = Path(os.path.realpath(path, strict=True))
        leads_out = not _allowed(real, Path(os.path.realpath(folder)))
        mode = real.stat().st_mode
    except OSError as error:
        how = "leads to itself" if error.errno == errno.ELOOP else f"cannot be followed: {_words(error)}"
        raise _refused(path, f"it is a link that {how}", _AGAIN) from error
    if leads_out:
        raise _refused(
            path,
            f"it is a link to {real}, outside the model's directory",
            "links are only followed within the directory and into the Hugging Face cache; "
            "if you trust this file, replace the link with a copy",
        )
    if not stat.S_ISREG(mode):
        raise _refused(path, f"it is {reading.KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file", _AGAIN)
    return real


def names(folder: Path) -> set[str]:
    """The names in a model's directory, without subdirectories. Raises ModelFileError if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
    except OSError as error:
        raise _refused(folder, f"cannot list it: {_words(error)}", "name a model directory") from error


def copy(source: Path, target: Path) -> None:
    """Copy a file. The copy never has wider permissions than the original."""
    _begin(target)
    shutil.copyfile(source, target)
    target.chmod(source.stat().st_mode & 0o777)


def share(source: Path, target: Path) -> None:
    """Give `target` the content of `source`: as a copy-on-write clone, a hard link or a copy."""
    part = target.with_name(f"{target.name}.part")  # an incomplete file must not have the final name
    part.unlink(missing_ok=True)
    _begin(part)
    try:
        with source.open("rb") as original, part.open("r+b") as shared:
            fcntl.ioctl(shared.fileno(), _FICLONE, original.fileno())
        part.chmod(source.stat().st_mode & 0o777)
    except OSError:
        part.unlink()
        try:
            os.link(source, target)
            return
        except OSError:
            copy(source, part)
    part.replace(target)


def link(folder: Path, name: str, target: Path) -> None:
    """Make `target` the file `name` of `folder`, or a copy of it if they are on different file systems.

    Raises DownloadError if `folder` has no such file, or one that must not be used.
    """
    # Hub caches hold symbolic links, and a link to one would be a link to a link.
    source = find(folder, name)
    if source is None:
        raise DownloadError(f"{folder / name} is missing")
    try:
        os.link(source, target)
    except OSError:
        copy(source, target)


def _begin(target: Path) -> None:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def read_bytes(folder: Path, name: str) -> bytes | None:
    """Content of a file in a model's directory, other than weights. None if it does not exist. Raises ModelFileError."""
    return _content(folder, name, Path.read_bytes)


def read_text(folder: Path, name: str) -> str | None:
    """Content of a text file in a model's directory. None if it does not exist. Raises ModelFileError."""
    try:
        return _content(folder, name, lambda path: path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise _refused(folder / name, f"it is not UTF-8 text: {error}", _AGAIN) from error


def _content(folder: Path, name: str, read: Callable[[Path], T]) -> T | None:
    path = find(folder, name)
    if path is None:
        return None
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise _refused(folder / name, f"it has {size} bytes; expected at most {MAX_JSON_BYTES}", _AGAIN)
        return read(path)
    except OSError as error:
        raise _refused(folder / name, f"cannot read it: {_words(error)}", "make it readable") from error


def read_json(folder: Path, name: str) -> object:
    """Value of a JSON file in a model's directory. Raises ModelFileError, including if it does not exist."""
    text = read_text(folder, name)
    if text is None:
        raise _refused(
            folder / name, "it is missing", "a model directory contains config.json, *.safetensors and tokenizer.json"
        )
    try:
        return user_files.decode(text)
    except user_files.JsonError as error:
        raise _refused(folder / name, f"{error}", _AGAIN) from error


class Fields:
    """A JSON object in a model's file with typed access to its values.

    A missing key and a null value are the same. All methods raise ModelFileError of class INFEASIBLE that names the
    file, the key, the value and the expected value.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values, self._path, self._prefix = values, path, prefix

    @classmethod
    def read(cls, folder: Path, name: str) -> Fields:
        """The object in a file of a model directory. Raises ModelFileError, including if the file is missing."""
        return cls.of(read_json(folder, name), folder / name)

    @classmethod
    def read_optional(cls, folder: Path, name: str) -> Fields:
        """The object in an optional file. It has no keys if the file does not exist."""
        return cls.read(folder, name) if find(folder, name) is not None else cls({}, folder / name)

    @classmethod
    def of(cls, value: object, path: Path) -> Fields:
        """`value`, the content of the file at `path`."""
        if not isinstance(value, dict):
            raise _refused(path, "it is not a JSON object", _AGAIN)
        return cls(value, path)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """An integer within bounds. `default` replaces a missing value; without a default, the key is required."""
        value = self._given(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer from 0, or None."""
        return self.integer(key, least=0) if self.has(key) else None

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, most: float = 1e30) -> float:
        """A number greater than `above`."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
            raise self.wrong(key, f"a number above {above:g} and up to {most:g}")
        return float(value)

    def text(self, key: str) -> str | None:
        return self._maybe(key, str, "a text")

    def required_text(self, key: str) -> str:
        text = self.text(key)
        if text is None:
            raise self.wrong(key, "a text")
        return text

    def flag(self, key: str) -> bool:
        """A boolean. False if missing."""
        return bool(self._maybe(key, bool, "true or false"))

    def fields(self, key: str) -> Fields:
        """An object. It has no keys if missing."""
        return Fields(self._maybe(key, dict, "an object") or {}, self._path, f"{self._prefix}{key}.")

    def objects(self, key: str) -> Iterator[Fields]:
        for number, value in enumerate(self.array(key)):
            if not isinstance(value, dict):
                raise self.wrong(key, "a list of objects")
            yield Fields(value, self._path, f"{self._prefix}{key}[{number}].")

    def array(self, key: str) -> list[Any]:
        """A list. Empty if missing."""
        return self._maybe(key, list, "a list") or []

    def texts(self, key: str) -> list[str]:
        values = self.array(key)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of texts")
        return values

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids: one, a list, or none, which may be written as -1."""
        value = self.values.get(key)
        ids = [] if value in (None, -1) else value if isinstance(value, list) else [value]
        if not all(type(number) is int and 0 <= number < 2**31 for number in ids):
            raise self.wrong(key, "the number of a token, or a list of them")
        return tuple(ids)

    def token(self, key: str) -> str | None:
        """A special token, written as a string or as an object with `content`."""
        return self.fields(key).text("content") if isinstance(self.values.get(key), dict) else self.text(key)

    def wrong(self, key: str, expected: str) -> ModelFileError:
        shown = json.dumps(self.values.get(key))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return _refused(
            self._path,
            f"{self._prefix}{key} is {shown}; expected {expected}"
            if self.has(key)
            else f"{self._prefix}{key} is missing",
            _AGAIN,
            FailureClass.INFEASIBLE,
        )

    def _given(self, key: str, default: T) -> Any | T:
        value = self.values.get(key)
        return default if value is None else value

    def _maybe(self, key: str, kind: type[T], expected: str) -> T | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(key, expected)
        return value


def _allowed(real: Path, root: Path) -> bool:
    if real.is_relative_to(root):
        return True
    # The cache may have been moved as a whole: its layout determines the targets of a snapshot's links.
    repository = root.parent.parent
    if (
        root.parent.name == "snapshots"
        and _is_repository(repository.name)
        and real.is_relative_to(repository / "blobs")
    ):
        return True
    cache = hub_cache()
    inside = real.relative_to(cache).parts if real.is_relative_to(cache) else ()
    return len(inside) > 2 and _is_repository(inside[0]) and inside[1] in {"blobs", "snapshots"}


def _is_repository(name: str) -> bool:
    return name.startswith(("models--", "datasets--"))


def hub_cache() -> Path:
    """The directory of the Hugging Face cache by the rules of `huggingface_hub`, with links resolved."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home, "hub"))
    return Path(os.path.realpath(os.path.expandvars(os.path.expanduser(named))))  # noqa: PTH111 - raises for an unknown user


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _refused(path: Path, reason: str, hint: str, failure: FailureClass = FailureClass.USER) -> ModelFileError:
    return ModelFileError(path, reason, hint=hint, failure=failure)


_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_OWN_KEYS: Final = {
    "gpt2": {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    "chatglm": {
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
        "vocab_size": "padded_vocab_size",
        "head_dim": "kv_channels",
    },
}


def num_experts(config: Mapping[str, Any]) -> Any:
    """Number of routed experts per layer in a Hugging Face `config.json`. None for dense models."""
    return next((config[key] for key in _EXPERTS if config.get(key)), None)


_BLOCKS: Final = {"*": "attention", "M": "mamba", "E": "moe", "-": "mlp"}
"""Letters in `hybrid_override_pattern` (Nemotron-H) -> words in `layers_block_type`."""
_MAMBA: Final = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
_LINEAR: Final = (
    *("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim", "linear_num_key_heads"),
    "linear_conv_kernel_dim",
)
"""Keys of gated DeltaNet (Qwen3-Next, Qwen3.5), in the order of `_MAMBA`."""


def hybrid_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe numbers for a hybrid model, from a Hugging Face `config.json`: layers with attention, with experts and
    with recurrence. Empty for other models.
    """
    blocks: list[Any] = [*map(_BLOCKS.get, config.get("hybrid_override_pattern") or ())]
    blocks = blocks or config.get("layers_block_type") or config.get("layer_types") or []
    interval, layers = config.get("full_attention_interval"), config.get("num_hidden_layers")
    if not blocks and isinstance(interval, int) and isinstance(layers, int) and interval > 0:
        blocks = ["full_attention" if (each + 1) % interval == 0 else "linear_attention" for each in range(layers)]
    mamba = "mamba" in blocks
    recurrent = blocks.count("mamba" if mamba else "linear_attention")
    numbers = [config.get(key) for key in (_MAMBA if mamba else _LINEAR)]
    if not recurrent or None in numbers:
        return {}
    names = ("heads", "head_dim", "state_size", "groups", "conv_kernel")
    attention, experts = blocks.count("attention" if mamba else "full_attention"), blocks.count("moe")
    return {
        **({"attention_layers": attention} if attention else {}),
        **({"expert_layers": experts} if experts else {}),
        "recurrent": {"layers": recurrent, **dict(zip(names, numbers, strict=True))},
    }


def shared_experts(config: Mapping[str, Any]) -> int | None:
    """Number of shared experts that have the width of the others, from a `config.json` that has their total width
    instead.
    """
    width = config.get("moe_shared_expert_intermediate_size") or config.get("shared_expert_intermediate_size")
    each = config.get("moe_intermediate_size")
    return round(width / each) if isinstance(width, int) and isinstance(each, int) and each else None


def rotary(config: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Base and scaling of the rotary embeddings in a Hugging Face `config.json`, each None if absent. Transformers 5
    stores both in one object, earlier releases separately.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        return config.get("rope_theta"), None
    kind = scaling.get("rope_type", scaling.get("type"))
    return config.get("rope_theta", scaling.get("rope_theta")), None if kind in {None, "default"} else str(kind)


def named_alike(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Hugging Face `config.json` with the special key names of GPT-2 and GLM-4 replaced by the usual ones."""
    own_keys = _OWN_KEYS.get(str(config.get("model_type")))
    if own_keys is None:
        return dict(config)
    renamed = {name: config[own] for name, own in own_keys.items() if config.get(own) is not None}
    width = config.get("n_embd")
    if isinstance(width, int):
        renamed.setdefault("intermediate_size", 4 * width)
    return {**renamed, **config}
