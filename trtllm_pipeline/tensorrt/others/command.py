"""Starting other OpenAI-compatible servers: known servers, command lines with placeholders, and versions.

Known servers are data, `data/openai_servers.json`. A command line is filled twice: with the cell's values when it is
planned, and with directories and port when it is started.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import PACKAGE
from trtllm_pipeline.base import Cell, Json, digest_file, probe
from trtllm_pipeline.tensorrt.stage.params import OPENAI_SERVERS

MODEL: Final = "model"
GGUF: Final = "gguf"
AT_START: Final = (MODEL, GGUF, "host", "port")
"""Placeholders that only the start of a server fills."""
_PLACEHOLDER: Final = re.compile(r"\{([a-z_]+)\}")
_DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DATA: Final = PACKAGE / "data" / "openai_servers.json"
_ASKING_S: Final = 10.0
"""Timeout of a program that prints its version."""


@dataclass(frozen=True, kw_only=True)
class KnownServer:
    """One entry of the data file."""

    summary: str
    source: str
    """URL of the documentation of its options."""
    command: Sequence[str]
    experts: Sequence[str] = ()
    """Options with which each GPU holds whole experts. Empty if it has none."""
    attention_groups: Sequence[str] = ()
    """Options for data parallel attention. Empty if it has none."""
    reuse: Mapping[str, Sequence[str]]
    """Options by KV cache reuse between prompts, "true" or "false", for the values that it supports."""
    ready: str
    """The path that returns status 200 when the server is ready."""
    precisions: Mapping[str, Sequence[str]] | None = None
    """Precision -> options for it. None if the GGUF file has the precision."""
    least_sm: Mapping[str, int] = field(default_factory=dict)
    """Precision, or form of published weights, -> first compute capability on which it works. "any": of the server.

    Source: vLLM's `_check_if_gpu_supports_dtype`, and `get_min_capability` of its newest methods (older releases need
    more for fp8); SGLang's `model_runner.py`, which computes in float16 below 80.
    """
    served_name: str | None = None
    """The model name in requests. None for the name that the server lists."""
    lists_models: bool = True
    exact_lengths: bool = True
    """True if it supports `ignore_eos` in a request."""
    refuses_longer: bool = False
    """True if it rejects a prompt longer than {max_seq_len}. Others truncate it, round the limit up, or have none."""
    spare_tokens: int = 0
    """What {context_length} has beyond input and output. SGLang ends an answer two tokens before the end of its
    context, and refuses a prompt that leaves fewer than seven.
    """
    version: Sequence[str] = ()
    """Options with which the program prints its version, for one that is not a Python script."""
    start_s: float = 30.0
    """Seconds until it is ready, without reading weights (docs/project/vllm.md)."""
    gpu_share: Mapping[str, float] = field(default_factory=dict)
    """The option for its share of each GPU's memory -> the default of that option. Empty if it has no such option."""
    gpu_share_with: str | None = None
    """The option without which it takes no share: transformers has a cache of fixed size only with it."""
    spills: bool = False
    """True if weights beyond its GPUs stay in host memory: `device_map="auto"` of transformers, llama.cpp's `--fit`."""


def _read() -> dict[str, KnownServer]:
    data: Mapping[str, Mapping[str, Any]] = json.loads(_DATA.read_text(encoding="utf-8"))
    return {name: KnownServer(**entry) for name, entry in data.items()}


KNOWN: Final = _read()
assert tuple(KNOWN) == OPENAI_SERVERS
_GPU_SHARES: Final = {option: share for known in KNOWN.values() for option, share in known.gpu_share.items()}


def of_itself(known: KnownServer) -> list[str]:
    """The command line of a known server without the options that a cell would fill: the server has its own defaults."""
    words: list[str] = []
    for word in known.command:
        if placeholders([word]) - {*AT_START}:
            words.pop()
        else:
            words.append(word)
    return words


def settings(cell: Cell) -> Mapping[str, Any]:
    return cell.settings["openai"]


def template(cell: Cell) -> tuple[str, ...]:
    """The words of the command line that starts a cell's server, with placeholders. Empty without one.

    Raises ValueError for a text that is not a command line.
    """
    command, known = settings(cell)["command"], known_of(cell)
    if known is not None:
        layout = (*(known.experts if cell.ep > 1 else ()), *(known.attention_groups if cell.dp > 1 else ()))
        precision = (known.precisions or {}).get(cell.precision, ())
        reuse = cell.settings["repository"]["enable_kv_cache_reuse"]
        words = [*known.command, *layout, *precision, *known.reuse.get("true" if reuse else "false", ())]
    elif command is not None:
        words = [*(shlex.split(command) if isinstance(command, str) else command)]
    else:
        return ()
    return (*words, *options(settings(cell)["options"]))


def known_of(cell: Cell) -> KnownServer | None:
    """The known server of a cell's command line. None if the cell has another command line, or the server already runs."""
    own = settings(cell)["command"] is not None or settings(cell)["url"] is not None
    return None if own else KNOWN.get(cell.toolchain)


def reuses(cell: Cell) -> bool | None:
    """True if a cell's server reuses the KV cache between prompts. None if it was not configured here."""
    return None if known_of(cell) is None else bool(cell.settings["repository"]["enable_kv_cache_reuse"])


def gpu_share(cell: Cell) -> float | None:
    """The share of each GPU's memory that a cell's server allocates. None if it is unknown."""
    known, words = known_of(cell), template(cell)
    if known is not None and known.gpu_share_with is not None and known.gpu_share_with not in words:
        return None
    for option, usual in (known.gpu_share if known is not None else _GPU_SHARES).items():
        for word, value in itertools.zip_longest(words, words[1:]):
            name, equals, behind = word.partition("=")
            if name == option:
                return _share(behind if equals else value)
        if known is not None:
            return usual
    return None


def _share(text: str | None) -> float | None:
    try:
        share = float(text or "")
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def options(given: Mapping[str, Any]) -> list[str]:
    """Options as words: `max_loras: 2` is `--max-loras 2`, true is the option alone, false is `--no-...`, null is
    omitted, a list is several values.
    """
    words: list[str] = []
    for name, value in given.items():
        option = name if name.startswith("-") else f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is False:
            words.append(f"--no-{option.removeprefix('--')}")
        elif value is not None:
            words += [option, *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def values(cell: Cell) -> dict[str, str]:
    """The values of the placeholders that a cell fills."""
    longest = cell.isl + cell.osl
    filled: dict[str, Json] = {
        "name": cell.model,
        "precision": cell.precision,
        "dtype": _DTYPES.get(cell.precision, "auto"),
        "tp": cell.tp,
        "pp": cell.pp,
        "ep": cell.ep,
        "dp": cell.dp,
        "attention_tp": cell.attention_tp,
        "gpus": cell.tp * cell.pp,
        "max_batch_size": cell.max_batch_size,
        "group_batch_size": cell.group_batch_size,
        "isl": cell.isl,
        "osl": cell.osl,
        "max_seq_len": longest,
        "context_length": context_length(cell),
        "total_tokens": longest * cell.max_batch_size,
    }
    return {name: str(value) for name, value in filled.items()}


def context_length(cell: Cell) -> int:
    """The context that a cell's server needs, in tokens."""
    known = known_of(cell)
    return cell.isl + cell.osl + (0 if known is None else known.spare_tokens)


def placeholders(words: Sequence[str]) -> set[str]:
    """The names in braces."""
    return {name for word in words for name in _PLACEHOLDER.findall(word)}


def fill(words: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """`words` with the known placeholders replaced. All others stay."""
    return [_PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), word) for word in words]


def uses(cell: Cell, placeholder: str) -> bool:
    """True if the command line of a cell's server has a placeholder. False if the server already runs."""
    if settings(cell)["url"]:
        return False
    try:
        return placeholder in placeholders(template(cell))
    except ValueError:
        return False


def version_of(words: Sequence[str], asking: Sequence[str]) -> str | None:
    """The version of the server that a command line starts: that of its Python package, the program's response to the
    options `asking`, or else a digest of its file. None without any of these.
    """
    words = _without_env(words)
    program = shutil.which(words[0]) if words else None
    if program is None:
        return None
    stat = Path(program).stat()
    # Python's own options precede -m. Those with a separate value (-X, -W) are rare here.
    own = [*itertools.takewhile(lambda word: word.startswith("-") and word != "-m", words[1:])]
    module = next(iter(words[len(own) + 2 :]), None) if words[len(own) + 1 : len(own) + 2] == ["-m"] else None
    return _version(program, module, tuple(asking), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _version(program: str, module: str | None, asking: tuple[str, ...], _changed_ns: int, _size: int) -> str | None:
    path = Path(program)
    with path.open("rb") as file:
        first = file.readline(512).decode(errors="replace")
    if module is not None:
        return _package(program, lambda each: module.partition(".")[0] in _modules(each))
    if first.startswith("#!") and "python" in first:
        words = first[2:].split()
        name = next(iter(_without_env(words)), words[0])  # env looks it up
        python = shutil.which(name) or name
        package = _package(python, lambda each: any(entry.name == path.name for entry in each.entry_points))
        if package is not None:
            return package
    elif asking:
        try:
            done = subprocess.run([program, *asking], capture_output=True, text=True, timeout=_ASKING_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        return next((line for line in lines if re.search(r"\bversion\b", line)), lines[0] if lines else None)
    return f"{path.name} {digest_file(path)[:12]}"


def _without_env(words: Sequence[str]) -> Sequence[str]:
    """The command line that env starts, if the words start with env."""
    if not words or Path(words[0]).name != "env":
        return words
    return [*itertools.dropwhile(lambda word: word.startswith("-") or "=" in word, words[1:])]


def _modules(distribution: Any) -> set[str]:
    top_level = (distribution.read_text("top_level.txt") or "").split()
    return {*top_level, str(distribution.metadata["Name"] or "").replace("-", "_")}


def _package(python: str, is_it: Any) -> str | None:
    from importlib.metadata import distributions  # not needed for starting a server

    folders = sys.path if python == sys.executable else probe.packages_of(python)
    for each in distributions(path=list(folders)):
        if is_it(each):
            return f"{each.metadata['Name']} {each.version}"
    return None
