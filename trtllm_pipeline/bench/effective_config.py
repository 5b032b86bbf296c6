"""Effective configuration: settings read back from a running server, each beside the expected value.

Three sources are held against each other: what a matrix asked for, what the engine and the repository say, and the
configuration the server itself reports over the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trtllm_pipeline.client.triton import Client
from trtllm_pipeline.domain import Json
from trtllm_pipeline.errors import FailureClass, ServerError
from trtllm_pipeline.files.model_files import Fields
from trtllm_pipeline.files.user_files import decode_yaml, read_mapping
from trtllm_pipeline.triton_repository import model_config

if TYPE_CHECKING:
    from google.protobuf.message import Message

ENGINE_MODEL: Final = "tensorrt_llm"
_ALWAYS: Final = frozenset({"max_batch_size", "decoupled", "max_queue_delay_microseconds"})
"""Fields whose default says something. Any other that a configuration leaves out is Triton's to fill in."""
_TRITONS_CHOICE: Final = frozenset({"kind", "gpus"})
_BUILD: Final = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")


class SettingCheck(NamedTuple):
    """One setting: the expected value and its source, the value found and where."""

    setting: str
    asked: Json
    asked_by: str
    got: Json
    got_from: str


async def read_back(
    client: Client | None,
    declared: Mapping[str, Json],
    *,
    engine: Path | None,
    repository: Path | None,
    asked_by: str = "the matrix",
) -> list[SettingCheck]:
    """Every setting that two sources know. `declared` is what `asked_by` asked for, under TensorRT-LLM's names; without
    a repository it is held against the client's model and `tensorrt_llm`. A client of None is no Triton's.

    Raises ServerError when the server does not answer, OSError or ValueError for a file that cannot be read.
    """
    checks = [] if engine is None else list(_engine(declared, engine, asked_by))
    if client is None:
        return checks
    if repository is None:
        for name in dict.fromkeys((client.model.name, ENGINE_MODEL)):
            with suppress(ServerError):  # without an ensemble there is no second model
                checks += _model(declared, name, await client.config(name), asked_by)
    else:
        checks += _llm_api(declared, repository / ENGINE_MODEL / "1" / "model.yaml", asked_by)
    for path in sorted(repository.glob("*/config.pbtxt")) if repository is not None else ():
        name = path.parent.name
        try:
            served = await client.config(name)
        except ServerError as error:
            if error.failure is FailureClass.TRANSIENT:
                raise
            checks.append(SettingCheck(f"model {name}", "there", "the repository", "not there", "the server"))
            continue
        checks += [
            SettingCheck(f"{name}: {key}", asked, "config.pbtxt", got, "the server")
            for key, asked, got in compare(model_config.read(path, allow_unknown=True), served)
        ]
        checks += _model(declared, name, served, asked_by)
    return checks


def compare(written: Message, served: Message, prefix: str = "") -> Iterator[tuple[str, Json, Json]]:
    """(path, written, served) of every field that `written`, a ModelConfig, fixes. Triton fills in the others."""
    for field in written.DESCRIPTOR.fields:
        path = f"{prefix}{field.name}"
        asked, got = getattr(written, field.name), getattr(served, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in sorted(asked):
                yield from _values(f"{path}[{key}]", asked[key], got[key] if key in got else None)  # noqa: SIM401  a protobuf map's get() makes the key
        elif field.is_repeated:
            for index, value in enumerate(asked):
                yield from _values(f"{path}[{index}]", value, got[index] if index < len(got) else None)
            if len(got) > len(asked) > 0:
                yield f"number of {path}", len(asked), len(got)
        elif field.message_type is not None:
            if written.HasField(field.name):
                yield from compare(asked, got, f"{path}.")
        elif field.name in _ALWAYS or (asked != field.default_value and field.name not in _TRITONS_CHOICE):
            yield path, asked, asked if _same_file(asked, got) else got


def _same_file(one: object, other: object) -> bool:
    """Whether both are absolute paths of one file or folder: a server is told another name of one; see `links`."""
    if not (isinstance(one, str) and isinstance(other, str) and one.startswith("/") and other.startswith("/")):
        return False
    with suppress(OSError, ValueError):
        return Path(one).samefile(other)
    return False


def _values(path: str, asked: Any, got: Any) -> Iterator[tuple[str, Json, Json]]:
    if not hasattr(asked, "DESCRIPTOR"):
        yield path, asked, got
    elif got is None:
        yield path, "there", None
    else:
        yield from compare(asked, got, f"{path}.")


def _engine(declared: Mapping[str, Json], engine: Path, asked_by: str) -> Iterator[SettingCheck]:
    """The limits of an engine's config.json, where TensorRT-LLM writes them too."""
    built = Fields.read_optional(engine, "config.json").fields("build_config").values
    for name in _BUILD:
        if declared.get(name) is not None and built.get(name) is not None:
            yield SettingCheck(name, declared[name], asked_by, built[name], "the engine's config.json")


def _llm_api(declared: Mapping[str, Json], path: Path, asked_by: str) -> Iterator[SettingCheck]:
    """What TensorRT-LLM's `llmapi` model reads, where a repository has one."""
    if not path.is_file():
        return
    said = read_mapping(path, decode_yaml)
    got = {**said, "enable_kv_cache_reuse": (said.get("kv_cache_config") or {}).get("enable_block_reuse")}
    for name in (*_BUILD, "enable_kv_cache_reuse"):
        if declared.get(name) is not None and got.get(name) is not None:
            yield SettingCheck(name, declared[name], asked_by, got[name], "model.yaml")


def _model(declared: Mapping[str, Json], name: str, served: Any, asked_by: str) -> Iterator[SettingCheck]:
    """The declared settings that the configuration of model `name` has as parameters or fields."""
    for key, asked in declared.items():
        if asked is None or key in _BUILD:
            continue
        if key in served.parameters:
            text = str(asked).lower() if isinstance(asked, bool) else str(asked)
            got = str(served.parameters[key].string_value)
            yield SettingCheck(
                f"{name}: {key}", text, asked_by, got.lower() if isinstance(asked, bool) else got, "the server"
            )
    if name == ENGINE_MODEL:
        for key, got in (
            ("max_batch_size", served.max_batch_size),
            ("decoupled", served.model_transaction_policy.decoupled),
        ):
            # Without a batch dimension a model batches by itself, as llmapi does.
            if declared.get(key) is not None and not (key == "max_batch_size" and got == 0):
                yield SettingCheck(f"{name}: {key}", declared[key], asked_by, got, "the server")
