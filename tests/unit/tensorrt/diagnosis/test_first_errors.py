"""Which line says the first cause, by the form of a log alone: none of these failures is known by its words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from trtllm_pipeline.tensorrt.diagnosis.causes import LogText, first_cause
from trtllm_pipeline.tensorrt.diagnosis.statements import unwrapped

_FILE = Path(__file__).parents[3] / "data" / "failures" / "shapes.txt"
_TITLED = re.split(r"^=== (.+): ([\d, ]+)\n", _FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
SHAPES = {
    name: (tuple(text.splitlines()), {int(number) for number in right.split(", ")})
    for name, right, text in zip(_TITLED[1::3], _TITLED[2::3], _TITLED[3::3], strict=True)
}
"""Name -> lines of a log, and the numbers of those that say its first cause."""


def log(folder: Path, *lines: str, name: str = "log") -> LogText:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return LogText(path)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_cause_of_a_failure_that_nobody_knows(shape: str, tmp_path: Path) -> None:
    lines, right = SHAPES[shape]
    cause = first_cause([log(tmp_path, *lines)], signatures=())
    assert cause.line.number in right
    assert (cause.certain, cause.hint, cause.setting("build", {})) == (False, None, None)


def test_the_rank_that_failed_first_is_told_by_the_times(tmp_path: Path) -> None:
    """Also where its log comes last; times of different clocks are not compared."""
    late = ("[11/22/2026-08:11:09] [TRT-LLM] [E] the key of layer 3 is odd",)
    early = ("[11/22/2026-08:11:02] [TRT-LLM] [I] loading", "ValueError: the moon is full")
    other = ("2026-11-22 08:11:01,000 - ERROR - the sea is flat",)
    for logs, right in ((late, early), early), ((early, late), early), ((late, other), late):
        texts = [log(tmp_path, *lines, name=f"rank{rank}") for rank, lines in enumerate(logs)]
        cause = first_cause(texts, signatures=())
        assert cause.line.text == right[-1]


@pytest.mark.parametrize(
    "lines",
    [
        ("all is well", "[TRT-LLM] [I] 0 errors", "will retry if a request fails"),
        ("[TRT-LLM] [W] cannot find the key, the default is taken", "UserWarning: x is not supported"),
        ("mpirun noticed that process rank 1 has exited", "RuntimeError: Executor worker returned error"),
        ("error: creating server: Internal - failed to load all models",),
        ('E1122 08:11:02.1 4 model.py:1] "Traceback (most recent call last):\\n  File \\"x\\", line 1, in f"',),
    ],
)
def test_what_only_follows_or_warns_is_no_cause(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert first_cause([log(tmp_path, *lines)], signatures=()) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "failed to load 'm' version 1: Internal: [TensorRT-LLM][ERROR] Assertion failed: it is odd (/app/x.cpp:3)",
            "Assertion failed: it is odd",
        ),
        ("[StatusCode.INTERNAL] in ensemble 'e', Cannot process new request: too long", "too long"),
        ("Failed to initialize executor on rank 3: the head is odd", "the head is odd"),
        ("RuntimeError: [TensorRT-LLM][ERROR] Encountered an error in forward function: no", "no"),
        ("error: creating server: Internal - failed to load all models", "failed to load all models"),
        ("ValueError: as it is", "ValueError: as it is"),
    ],
)
def test_what_others_put_around_a_cause_is_taken_off(line: str, words: str) -> None:
    assert unwrapped(line) == words


TRACEBACK: Final = (
    "Traceback (most recent call last):",
    '  File "a.py", line 3, in run',
    "    raise ValueError(",
    "ValueError: sea",
)


def test_the_traceback_that_a_log_ends_with_is_stated(tmp_path: Path) -> None:
    """Whatever the line above it reports about a part that is left out. It is never certain: the log may be cut off."""
    above = "WARNING: /tokenize unavailable, skipping alignment."
    last = first_cause([log(tmp_path, above, *TRACEBACK)], signatures=())
    assert last is not None
    assert last.line.number == 5
    known = (*TRACEBACK[:3], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    certain = [first_cause([log(tmp_path, *lines)]) for lines in (known, (above, *known))]
    assert [each and each.certain for each in certain] == [True, False]
    assert first_cause([log(tmp_path, above, *TRACEBACK, "Serving")], signatures=()) is None
    assert first_cause([log(tmp_path, "Exception ignored in: <function A.__del__>", *TRACEBACK)], signatures=()) is None


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "ImportError: cannot import name 'OpenAI' from 'openai' (/srv/openai.py)",
            "Python imports the file openai.py",
        ),
        (
            "ImportError: cannot import name 'Self' from 'typing' (/usr/lib/python3.10/typing.py)",
            "the installed typing",
        ),
        ("./serve.sh: line 5: $1: unbound variable", "argument $1 of the script"),
        ("./serve.sh: line 5: GPUS[@]: unbound variable", "the variable GPUS"),
        ("OSError: [Errno 23] Too many open files in system", "the whole machine"),
        (
            "ERROR: the decoupled model is using the decoupled mode and the execute function must return None",
            "response sender",
        ),
        ("TritonModelException: Unable to send response. Response sender has been closed.", "COMPLETE_FINAL"),
        ("ModelInfer RPC doesn't support models with decoupled transaction policy", "generate_stream"),
    ],
)
def test_advice_depends_on_the_words(tmp_path: Path, line: str, advice: str) -> None:
    cause = first_cause([log(tmp_path, line)])
    assert cause is not None
    assert advice in (cause.hint or "")


def test_a_carriage_return_within_words_is_shown(tmp_path: Path) -> None:
    """As in a script with Windows line ends. What a progress bar wrote over is not."""
    path = tmp_path / "log"
    path.write_bytes(b" 10%\r 90%\rbye\nstart.sh: line 2: set: pipefail\r: invalid option name\n")
    text = LogText(path)
    assert text.lines[0] == "bye"
    cause = first_cause([text])
    assert cause is not None
    assert cause.quote.endswith(r"set: pipefail\r: invalid option name")


def test_the_details_of_a_validation_error_below_the_name_of_a_process_are_quoted(tmp_path: Path) -> None:
    said = (
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in run',
        "    Config()",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SeaConfig",
        "method",
        "  Input should be 'ebb' or 'flood' [type=literal_error, input_value='tide']",
    )
    cause = first_cause([log(tmp_path, *(f"(Server pid=7) {line}" for line in said))])
    assert cause is not None
    assert "Input should be 'ebb' or 'flood'" in cause.quote
