"""Broken matrices never end in a traceback: only MatrixError or UsageError, each with something to say."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.matrix_files import MATRIX, RECIPE, Write
from trtllm_pipeline.base.errors import MatrixError, PipelineError, UsageError
from trtllm_pipeline.orchestrate.matrix.document import parse
from trtllm_pipeline.orchestrate.matrix.expand import expand, select
from trtllm_pipeline.orchestrate.matrix.matrices import TEMPLATE
from trtllm_pipeline.orchestrate.matrix.validate import load_matrix

WHOLE: dict[str, Any] = {
    **MATRIX,
    "description": "d",
    "axes": {**MATRIX["axes"], "toolchain": ["auto"], "settings.perf.concurrency": [[1], [1, 2]]},
    "exclude": [{"model": "small", "parallel": ["tp1"], "settings.perf.concurrency": [[1]]}],
    "add": [
        {
            "model": "small",
            "precision": "fp16",
            "max_batch_size": 64,
            "lengths": "1,1",
            "toolchain": "embedded",
            "settings.perf.concurrency": [3],
        }
    ],
    "override": [{"where": {"precision": "fp*"}, "settings": {"build": {"x": "y"}, "perf": {"requests": 2}}}],
    "settings": {"serve": {"host": "::1"}, "quantize": {"calibration": {"samples": 2}}},
}
ODD: list[Any] = [None, True, 0, -1, 1e300, 2**70, "", "x", "\0", "é", "a" * 5000]
ODD += ["*", "[", "../..", "/", ".", "~nobody/x"]
ODD += [[], {}, [[]], [{}], {"": None}, {"a": [1, {"b": 2}]}, "tp1", "1,1", "fp16", "small", [1, "small"], "settings."]
ODD_TEXT = [*":-[]{}'\"\t\n|>#%", "  ", "&a ", "*a", "!x ", "---\n", "<<: ", "? "]
ODD_TEXT += ["0123", ".nan", "\x00", "\ufeff", "\u2028", "\x85", "\udcff", "1e999", "null", "\r", "\\", ","]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*at, key))
    return found


def break_data(random: random.Random) -> str:
    data = copy.deepcopy(WHOLE)
    for _ in range(random.randint(1, 4)):
        at = random.choice(places(data)[1:])
        holder: Any = data
        for step in at[:-1]:
            holder = holder[step]
        match random.randrange(5):
            case 0:
                del holder[at[-1]]
            case 1 if isinstance(holder, dict):
                holder[random.choice(["", "x", f"{at[-1]}s", "settings.perf.requests", "model"])] = holder.pop(at[-1])
            case 2:
                holder[at[-1]] = [holder[at[-1]], copy.deepcopy(random.choice(ODD))]
            case _:
                holder[at[-1]] = copy.deepcopy(random.choice(ODD))
        if len(places(data)) < 2:
            break
    return json.dumps(data, indent=random.choice([None, 2]), ensure_ascii=False)


def break_text(random: random.Random, text: str) -> str:
    for _ in range(random.randint(1, 6)):
        start = random.randrange(len(text))
        end = min(len(text), start + random.choice([0, 0, 1, 2, 10, 100]))
        text = text[:start] + random.choice(["", *ODD_TEXT]) + text[end:] or "x"
    return text


TEXTS = [json.dumps(WHOLE, indent=1), TEMPLATE.read_text(encoding="utf-8")]
SETS = [
    "settings.perf.requests=3",
    "settings.perf.concurrency=[1, 8]",
    "settings.perf=1",
    "axes.precision=[fp16]",
    "axes.model=[x",
    "axes.settings.perf.requests=[1,2]",
    "recipes.small.sources.0.local=x",
    "recipes.*.name=y",
    "recipes.small.precisions={embedded: 3}",
    "name=*a",
    "=",
    "description=\udcff",
]
PATTERNS = ["small*/fp*/*", "!*/*/tp1pp1", "[", "nothing", "", "*"]


def check(path: Path, sets: list[str], pattern: str) -> PipelineError | None:
    """Load, expand and select; the error of ours, if there is one. Anything else escapes."""
    try:
        cells = expand(load_matrix(path, sets), default_toolchain="embedded")
        assert len({cell.id for cell in cells}) == len(cells)
        select(cells, [pattern])
    except (MatrixError, UsageError) as error:
        return error
    return None


def test_a_thousand_broken_matrices(folder: Path) -> None:
    random_ = random.Random(7)
    path = folder / "matrix.yaml"
    errors = []
    for number in range(1000):
        text = break_data(random_) if number % 2 else break_text(random_, random_.choice(TEXTS))
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        sets = random_.sample(SETS, random_.choice([0, 0, 0, 1, 2]))
        errors.append(check(path, sets, random_.choice(PATTERNS)))
    said = [error for error in errors if error is not None]
    assert 700 < len(said) < 1000, "most mutations break something, some are harmless"
    for error in said:
        faults = error.faults if isinstance(error, MatrixError) else ()
        assert isinstance(error, UsageError) or faults
        assert all(fault.message and fault.path for fault in faults)
        assert 0 < len(error.message) < 200_000


def test_two_hundred_broken_recipes(folder: Path, write: Write) -> None:
    random_ = random.Random(8)
    path = write()
    errors = []
    for _ in range(200):
        text = break_text(random_, RECIPE)
        (folder / "recipes" / "small.yaml").write_bytes(text.encode("utf-8", "surrogateescape"))
        errors.append(check(path, [], "small"))
    assert sum(error is not None for error in errors) > 100


@given(st.text(st.sampled_from([*"ab:-[]{}'\"&*!|>#%?,.0123e+~\n\t \\"]), max_size=60))
@settings(max_examples=500)
def test_any_text_reads_or_has_faults(text: str) -> None:
    try:
        document = parse(text, "f")
    except MatrixError:
        return
    json.dumps(document.data, allow_nan=False)
    assert () in document.origins
