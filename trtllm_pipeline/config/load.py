"""A matrix file and the recipes it names, checked. What was checked before, to the byte, is not checked again.

Checking takes pydantic and a model of every section: most of the time of a small command. So what was found of a matrix
without faults is kept in the user's cache, with all that it follows from: the text of the matrix and of its recipes, the
command line's changes, and the programs that checked it, by size and times of their files. If any of it is different now, or what was kept
is gone or damaged, the matrix is checked as if nothing had been kept.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline import __version__
from trtllm_pipeline.config.document import MAX_BYTES, text_digest
from trtllm_pipeline.config.loaded import LoadedMatrix
from trtllm_pipeline.config.recipes import recipe_file
from trtllm_pipeline.errors import MatrixError, UsageError
from trtllm_pipeline.files import reading, user_files
from trtllm_pipeline.files.writing import write_text

TEMPLATE: Final = Path(__file__).with_name("template.yaml")
"""A commented matrix to start from."""
_CHECKERS: Final = (
    "trtllm_pipeline",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "packaging",
    "yaml",
)
"""Packages whose modules decide what is right."""
_MOST_KEPT: Final = 64
_STARTED: Final = time.time()
_SETTLED_S: Final = 10.0
"""A file that changed so shortly before this program began may not be what this program imported."""


def load_matrix(path: Path, sets: Sequence[str] = ()) -> LoadedMatrix:
    """The matrix in a file, changed by `sets` (see `sets`). Raises MatrixError with all faults; UsageError."""
    found = _kept(path, sets)
    if found is None:
        from trtllm_pipeline.config.validate import validated

        found, recipes = validated(path, sets)
        with suppress(OSError, RuntimeError):  # no home, or one that is full or read-only
            _keep(found, recipes)
    return found


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtllm-pipeline" / "matrices"


def _file(path: Path, sets: Sequence[str], digest: str) -> Path:
    absolute = os.path.abspath(path)  # noqa: PTH100  (symbolic links stay as the user wrote them)
    asked = json.dumps((__version__, sys.version, absolute, list(sets), digest))
    return _folder() / f"{blake2b(asked.encode(errors='surrogatepass'), digest_size=16).hexdigest()}.json"


def _kept(path: Path, sets: Sequence[str]) -> LoadedMatrix | None:
    """What was kept of this very matrix; None where it has to be checked."""
    try:
        digest = text_digest(user_files.read_text(path, limit=MAX_BYTES))
        with reading.open_file(_file(path, sets, digest)) as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & 0o022:  # others may have written it
                return None
            seal, _, text = file.read().partition(b"\n")
        if seal.decode() != _seal(text):
            return None
        kept = json.loads(text)
        if any(_stamp(program) != stamp for program, *stamp in kept["programs"]):
            return None
        for model, recipe, of_recipe in kept["recipes"]:
            there = recipe_file(model, path)
            if (
                os.path.realpath(there) != recipe
                or text_digest(user_files.read_text(there, limit=MAX_BYTES)) != of_recipe
            ):
                return None
        return LoadedMatrix(path=path, sets=tuple(sets), digest=digest, **kept["loaded"])
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, MatrixError, UsageError):
        return None  # what is wrong is told by who checks it


def _keep(loaded: LoadedMatrix, recipes: Mapping[str, tuple[Path, str]]) -> None:
    programs = [(program, *_stamp(program)) for program in _programs()]
    if any(max(times) / 1e9 > _STARTED - _SETTLED_S for _, _, *times in programs):
        return
    kept = {
        "programs": programs,
        "recipes": [(model, os.path.realpath(path), digest) for model, (path, digest) in recipes.items()],
        "loaded": {name: value for name, value in asdict(loaded).items() if name not in {"path", "sets", "digest"}},
    }
    text = json.dumps(kept)
    file = _file(loaded.path, loaded.sets, loaded.digest)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(file, f"{_seal(text.encode())}\n{text}", mode=0o600)
    for old in sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)


def _seal(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()


def _programs() -> Iterator[str]:
    """Files of the modules that a matrix was checked with."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _CHECKERS and (file := getattr(module, "__file__", None)):
            yield file


def _stamp(program: str) -> list[Any]:
    about = os.stat(program)
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
