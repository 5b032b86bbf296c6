"""The first cause of a failure from all its logs: the process, the line, and the change that helps.

One failure appears in many logs: a rank runs out of memory, the others lose it, mpirun reports that one has ended, and
Triton reports that no model is loaded. The form of the logs shows which statement is the first cause (`statements.py`).
Known words in that statement only define its meaning (`data/signatures.yaml`); the most specific words win.
Consequences are never a cause. If the words are unknown, the most informative lines of all logs are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from trtllm_pipeline.base import USUAL_NUM_TOKENS, FailureClass
from trtllm_pipeline.tensorrt.diagnosis.signatures import ANY_STAGE, GROUP, KILLED, Signature, Weight, chosen
from trtllm_pipeline.tensorrt.diagnosis.signatures import signatures as shipped_signatures
from trtllm_pipeline.tensorrt.diagnosis.statements import (
    Grade,
    Statement,
    first_statement,
    flattened,
    links_exceptions,
    statements,
)

HEAD_BYTES: Final = 1 << 18
"""For a log that is too long to be searched whole: bytes read from its start ..."""
TAIL_BYTES: Final = 1 << 20
"""... and from its end."""
TELLING: Final = 10
"""Number of lines shown for an unknown failure."""
_LONGEST: Final = 300
_HEAD: Final = 20
"""Number of leading characters that locate the words of a statement in its line."""
_NOISE: Final = (
    r"(?i)CudaDriverHelper|Unable to \w+ NVML|(?<!detection error: )NVML error(?!: driver)|DCGM(?!Exporter|\S*: cannot open| initialization error| that is not)|(?:pinned_memory_manager|\bpinned (?:system )?memory\b)(?!.*pool will not be available: CUDA driver)|unable to create stream(?!: the provided PTX)|CUDA memory pool|NCCL INFO"
    r"|Failed to initialize NVML(?!: (?:Driver|Unknown Error|could not load|Insufficient))|\[TensorRT-LLM\]\[(?:INFO|DEBUG|WARNING)\]"
    r"|\[TRT(?:-LLM)?\] (?:\[RANK \d+\] )?\[[IV]\]|^\|(?!.*(?:UNAVAILABLE|Not loaded): )|^\+ ?(?!-)\S|^\+-|\(ignored\)"
    r"|Unable to register cu\w+ factory|computation_placer|TF-TRT Warning|cpu_feature_guard"
    r"|pip's dependency resolver does not|not a git repository|debconf: |Error in cpuinfo|XDG_RUNTIME_DIR"
    r"|--- (?:Begin|End) node ---|PMIX ERROR: (?:ERROR|NOT)|libi40iw|libibverbs|^I\d+ [\d:. ]+\w+\.cc:\d+\]\s*$|^\s*usage: |^\s*\[--?\w"
    r"|Found ulimit of \d+ and failed to automatically increase"
)
"""Lines without a cause: output of every server without a GPU, non-errors, tables and lists of models and options."""
_PREFIX: Final = r"^(?:\[\d+,\d+\]<std(?:err|out)>:\s*)?(?:[EFIW]\d+ (?:[\d:.]+ +\d+ )?[\w.]+:\d+\] |\[[\d/:\-. ]+\] )?"
"""The prefix that mpirun, Triton and TensorRT-LLM write before a line: rank, severity, time, process, location."""
_PROGRESS: Final = r"(?<!NCCL )\bINFO\b|\[I\]|^I\d{4} "
"""Lines of normal progress."""
_LIVELY: Final = 2
"""Number of such lines that a program that has failed does not write any more."""
_ABOVE: Final = 20
"""Statements above a line that may announce its cause."""
_LEFT_OUT: Final = r"(?i)\bignor(?:e|ing|ed)\b|\bskipping\b"
"""A part that the program does without, and that may be missed later."""
_ENDED: Final = r"(?i)watchdog|timed?[ -]?out|kill"
"""Waited in vain or was killed, mostly because of another process."""
_FRAME: Final = r'File "(?:[^"]*?(?:site|dist)-packages/)?([^"]+)", line (\d+)'
_T = TypeVar("_T")
_NEXT_ROW: Final = r"\| +\| +\| (.*) \|\s*$"
"""A row of Triton's table of models that continues the message of the row above."""
_ANSI: Final = r"\x1b\[[0-9;]*[A-Za-z]"
_HALF: Final = "=half"
_USUAL: Final[Mapping[str, int]] = {"max_num_tokens": USUAL_NUM_TOKENS}
"""The default of a setting, if `half` needs it."""


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compiled when the first log is read: most runs do not read any."""
    return re.compile(pattern, re.MULTILINE)


@cache
def _anchored(pattern: str) -> bool:
    """True if the start of a line counts."""
    return re.search(r"(?<!\[)\^", pattern) is not None


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    path: Path
    number: int
    """Counted from 1."""
    text: str

    @property
    def message(self) -> str:
        """Its text without the line prefix."""
        text = _compiled(_PREFIX).sub("", self.text.strip())
        text = (flattened(text) or text).strip()
        quoted = text.startswith('"') and (text.endswith('"') or text.count('"') % 2)
        return _cut(text.removeprefix('"').removesuffix('"') if quoted else text)

    def __str__(self) -> str:
        """`file:line: text`, with the base name of the file."""
        return f"{self.path.name}:{self.number}: {self.message}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The first cause of a failure."""

    signature: Signature | None
    """The signature of its words. None if they are unknown."""
    line: LogLine
    certain: bool
    """True if its words are known to be a cause. Otherwise the form of the logs shows that it was the first."""
    groups: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    """The text of the line, without wrappers."""
    known: str = ""
    """The words in it that the signature knows."""

    @property
    def failure(self) -> FailureClass:
        """Its class. No decision depends on an uncertain one."""
        return self.signature.failure if self.signature and self.certain else FailureClass.BUG

    @property
    def hint(self) -> str | None:
        return None if self.signature is None else _filled(self.signature.hint, self.groups)

    @property
    def killed(self) -> bool:
        """True if its words are that a process was killed, certain or not. `out_of_memory.verdict` knows more."""
        return self.signature is not None and self.signature.key == KILLED

    @property
    def quote(self) -> str:
        """The quote from the log, for a message."""
        return self.quoted("its log")

    def quoted(self, log: str) -> str:
        """The same, for a log of this name."""
        message = self.line.message
        if not self.certain:
            return f"the first error in {log}: {_cut(self.words or message, self.known)}"
        # The end of a long line and the lines below a title have the details.
        start = message.rfind(self.words[:_HEAD]) if self.words else -1
        if start >= 0 and self.words.startswith(message[start:]):
            message = message[:start] + self.words
        elif len(message) == _LONGEST:
            message = self.words
        return f"{log} says: {_cut(message, self.known)}"

    def setting(self, stage: str, params: Mapping[str, Any]) -> str | None:
        """The change if `stage` with these parameters failed so: "settings.SECTION.KEY=VALUE", for `--set`."""
        known = self.signature.settings if self.signature and self.certain else {}
        text = known.get(stage, known.get(ANY_STAGE))
        if text is None or not text.endswith(_HALF):
            return None if text is None else _filled(text, self.groups)
        key = text.removesuffix(_HALF)
        name = key.rpartition(".")[2]
        value = params.get(name) or _USUAL.get(name)
        return f"{key}={value // 2}" if isinstance(value, int) and value > 1 else None


class LogText:
    """A log, or its start and end, with line numbers. Noise is replaced by empty lines."""

    def __init__(self, path: Path, *, since: int = 0, but: re.Pattern[str] | None = None) -> None:
        """`since`: bytes at its start that belong to an earlier process. Lines that `but` matches are excluded as well."""
        self.path = path
        self._before = self._lost = 0
        self._head: int | None = None
        try:
            with path.open("rb") as file:
                data = self._read(file, since)
        except OSError:
            data = b""
        text = _compiled(_ANSI).sub("", data.decode("utf-8", "replace"))
        texts = _whole_cells([_last_written(line.rstrip("\r")) for line in text.split("\n")])
        noise = [_compiled(_NOISE).search(line) or (but is not None and but.match(line)) for line in texts]
        self.written = texts
        self._noise = frozenset(index for index, silent in enumerate(noise) if silent)
        self.lines = ["" if index in self._noise else line for index, line in enumerate(texts)]

    def _read(self, file: BinaryIO, since: int) -> bytes:
        left = file.seek(0, 2) - since
        file.seek(0)
        self._before = _count_lines(file, since)
        if left <= HEAD_BYTES + TAIL_BYTES:
            return file.read()
        head = file.read(HEAD_BYTES)
        self._head = head.count(b"\n")
        self._lost = _count_lines(file, left - HEAD_BYTES - TAIL_BYTES)
        return head + b"\n" + file.read()

    @cached_property
    def stated(self) -> list[Statement]:
        """All its statements about a failure."""
        return statements(self.written, self._noise)

    def at(self, index: int) -> LogLine:
        """A line by its place in `lines`."""
        number = index + 1 if self._head is None or index <= self._head else index + self._lost
        return LogLine(self.path, self._before + number, self.lines[index])

    def last(self, most: int) -> list[LogLine]:
        """The last lines that are not blank."""
        filled = [index for index, line in enumerate(self.lines) if line.strip()]
        return [self.at(index) for index in filled[-most:]]


def _cut(text: str, known: str = "") -> str:
    """A long text without its middle: the reason often stands at the end. Known words in the middle are kept."""
    if len(text) <= _LONGEST:
        return text
    head, tail = text[: _LONGEST - 105], text[-100:]
    place = text.find(known) if len(known) < len(tail) else -1
    if place >= 0 and known not in head and known not in tail:
        start = max(place + (len(known) - len(tail)) // 2, 0)
        return f"{head[:90]} ... {text[start : start + len(tail)]} ... {tail}"
    return f"{head} ... {tail}"


def _last_written(line: str) -> str:
    """What a terminal shows of a line that a progress bar wrote over. A carriage return inside a message is kept."""
    tail = line.rpartition("\r")[2]
    return line.replace("\r", r"\r") if tail.startswith((":", "'", "\u2019")) else tail


def _whole_cells(lines: list[str]) -> list[str]:
    """The lines, with a message that Triton's table of models breaks over several rows as a whole in its first row."""
    whole = lines[:]
    first = -1
    for index, line in enumerate(lines):
        if "UNAVAILABLE: " in line and line.rstrip().endswith(" |"):
            first = index
        elif first >= 0 and (more := _compiled(_NEXT_ROW).search(line)):
            row = whole[first].rstrip().removesuffix(" |")
            whole[first] = f"{row.rstrip()}{' ' if row.endswith(' ') else ''}{more[1]} |"
        else:
            first = -1
    return whole


def _count_lines(file: BinaryIO, size: int) -> int:
    """Line ends in the next `size` bytes of a file."""
    total = 0
    while size > 0 and (block := file.read(min(size, TAIL_BYTES))):
        total += block.count(b"\n")
        size -= len(block)
    return total


def _best(meanings: Iterable[tuple[Weight, int, _T]]) -> tuple[Weight, int, _T] | None:
    """The most specific match. Ties go to the first line, and then to the first signature in the table."""
    return min(meanings, key=lambda each: each[:2], default=None)


def first_cause(logs: Sequence[LogText], signatures: Sequence[Signature] | None = None) -> Diagnosis | None:
    """The first cause in the logs. With several logs, the first log's cause comes first. None if no log has one.

    The form of the logs selects the line, the signatures define its meaning. It is certain if its words are specific, the
    line is written as an error, the program did not survive it, and nothing else in the logs may be the cause.
    """
    stated = [(place, each) for place, log in enumerate(logs) for each in log.stated]
    known = shipped_signatures() if signatures is None else signatures
    first = first_statement(stated)
    if first is None or first[1].grade is Grade.ENDED:
        # The log of what has ended often stands below, and may be cut off before its error.
        below = [each for each in stated if each[0] == first[0] and each[1].index > first[1].index] if first else stated
        first = _first_warning(logs, below, known) or first
    if first is None:
        return None
    log, statement = logs[first[0]], first[1]
    line = log.at(statement.index)
    meanings = _best(_meanings(log, statement, known))
    if meanings is None:
        return Diagnosis(None, line, certain=False, words=statement.text)
    weight, _, (signature, match) = meanings
    groups = {name: value or "" for name, value in match.groupdict().items()} | {"code": _code(log, statement)}
    clear = statement.grade <= (Grade.FAINT if weight is Weight.CAUSE else Grade.BARE)
    certain = (
        weight <= Weight.GENERAL
        and clear
        and not statement.announced
        and _exact(log, statement, signature)
        and not _contradicted(logs, stated, first, signature, known)
        and not _survived(log, statement, signature, known)
        and not _beheaded(log, statement)
    )
    return Diagnosis(signature, line, certain, groups, statement.text, match[0])


def _exact(log: LogText, statement: Statement, signature: Signature) -> bool:
    """True if the program that failed wrote words that no other cause has."""
    meaning = _best(_meanings(log, statement, [signature.exact]))
    return meaning is not None and meaning[1] in statement.own


def _contradicted(
    logs: Sequence[LogText],
    stated: Iterable[tuple[int, Statement]],
    first: tuple[int, Statement],
    signature: Signature,
    known: Sequence[Signature],
) -> bool:
    """True if something else may be the cause: another error or exception of the chain with the words of one of another kind,
    something of another kind above the line, or a later exception of another kind that ended the program.
    """
    causes = [each for each in known if each.weight <= Weight.GENERAL]
    place, statement = first
    chain = _meanings(logs[place], statement, causes)
    if any(not _alike(other, signature) for _, line, (other, _) in chain if line not in statement.own):
        return True
    above = [each for of, each in stated if of == place and each.last < statement.first][-_ABOVE:]
    for of, each in stated:
        near = of == place and each in above
        if each is statement or (each.grade > Grade.PASSED_ON and not near):
            continue
        crash = near and each.grade is Grade.BARE and not _compiled(_ENDED).search(each.text)
        vague = crash or (near and (each.grade is Grade.FAINT or _compiled(_LEFT_OUT).search(each.text) is not None))
        ended = of == place and not near and each.grade is Grade.OWN and bool(each.raised and not statement.raised)
        meaning = _best(_meanings(logs[of], each, known if vague or ended else causes))
        other = None if meaning is None else meaning[2][0]
        if other is not None and other.weight <= Weight.CLASS:
            if not _alike(other, signature):
                return True
        elif crash or ended:
            return True
    return False


def _alike(one: Signature, other: Signature) -> bool:
    """True if both are of one kind. The category of the machine has many."""
    return one.key == other.key or (one.category == other.category != "machine")


def _survived(log: LogText, statement: Statement, signature: Signature, known: Sequence[Signature]) -> bool:
    """True if the program went on after this error, or only reported it as information, and had another one later. A line that
    is not written as an error was survived if the program went on at all.
    """
    if statement.grade is Grade.FAINT and _progress(log.written[statement.last + 1 :]) >= _LIVELY:
        return True
    informed = _progress([log.written[statement.index]]) > 0
    for each in log.stated:
        if each.index <= statement.last or each.grade is not Grade.OWN:
            continue
        if not informed and _progress(log.written[statement.last + 1 : each.first]) < _LIVELY:
            continue
        meaning = _best(_meanings(log, each, known))
        if meaning is None or meaning[2][0] is not signature:
            return True
    return False


def _progress(lines: Sequence[str]) -> int:
    """The number of lines of normal progress."""
    return sum(_compiled(_PROGRESS).search(line) is not None for line in lines)


def _beheaded(log: LogText, statement: Statement) -> bool:
    """True if the log starts after the exception that the one of this statement came from."""
    above = log.written[: statement.first]
    link = next((index for index, line in enumerate(above) if links_exceptions(line)), None)
    return link is not None and not any(each.last < link for each in log.stated)


def _first_warning(
    logs: Sequence[LogText], stated: Iterable[tuple[int, Statement]], signatures: Sequence[Signature]
) -> tuple[int, Statement] | None:
    """The first warning with the most specific words of a cause. A truncated log may have nothing else."""
    known = [each for each in signatures if each.weight < Weight.WORDS]
    warned = ((place, each) for place, each in stated if each.grade is Grade.WARNED)
    meant = [
        (meaning[0], (place, each))
        for place, each in warned
        if (meaning := _best(_meanings(logs[place], each, known))) and (meaning[0] is Weight.CAUSE or not each.raised)
    ]
    return min(meant, key=lambda each: each[0], default=(None, None))[1]


def _meanings(
    log: LogText, statement: Statement, signatures: Sequence[Signature]
) -> Iterator[tuple[Weight, int, tuple[Signature, re.Match[str]]]]:
    """Possible meanings, by weight and line. A match may start in a traceback's code. It ends in the statement's words.

    The start of a line is also the one without the prefix of a launcher or logger.
    """
    text = "\n".join(log.lines[statement.first : statement.last + 1])
    other = statement.text not in text
    for signature in signatures:
        if signature.weight is not Weight.SYMPTOM:
            matched = _compiled(signature.pattern).finditer(text)
            ends = [(statement.first + text.count("\n", 0, match.end()), match) for match in matched]
            in_words = [end for end in ends if end[0] in statement.words]
            if in_words:
                index, match = next((end for end in in_words if end[0] in statement.own), in_words[0])
                yield signature.weight, index, (signature, match)
            elif (other or _anchored(signature.pattern)) and (
                at_start := _compiled(signature.pattern).search(statement.text)
            ):
                yield signature.weight, statement.index, (signature, at_start)


def _code(log: LogText, statement: Statement) -> str:
    """Where an exception arose, by its traceback: file, line and package. Empty without a traceback."""
    text = "\n".join(log.lines[statement.first : statement.index])
    frames = _compiled(_FRAME).findall(text)
    if not frames:
        return ""
    file, line = frames[-1]
    parts = file.split("/")
    installed = f"-packages/{file}" in text and len(parts) > 1
    release = f" (pip show {parts[0]} names its release)" if installed else ""
    return f"{'/'.join(parts[-4:])}, line {line}{release}"


def telling_lines(logs: Sequence[LogText]) -> list[LogLine]:
    """The most informative lines, in order. Of equal lines, the first, with the lines above it if there are few.

    Without any, the last lines.
    """
    chosen = _most_telling(logs)[:TELLING]
    if not chosen:
        return [line for log in logs for line in log.last(TELLING)][-TELLING:]
    place, first = chosen[0]
    above = [index for index in range(first) if logs[place].lines[index].strip()]
    chosen += [(place, index) for index in reversed(above) if (place, index) not in chosen]
    return [logs[place].at(index) for place, index in sorted(chosen[:TELLING])]


def first_error(logs: Sequence[LogText]) -> LogLine | None:
    """The most informative line, of equal ones the first, even if it is only a consequence. None without any."""
    return next((logs[place].at(index) for place, index in _most_telling(logs)), None)


def _most_telling(logs: Sequence[LogText]) -> list[tuple[int, int]]:
    """Positions of lines about a failure, by log and index, the first cause first. Lines that differ only in numbers are one."""
    stated = [(place, each) for place, log in enumerate(logs) for each in log.stated]
    first = first_statement(stated)
    places: dict[str, tuple[int, int]] = {}
    for place, each in sorted(stated, key=lambda one: (one != first, one[1].grade, one[0], one[1].index)):
        places.setdefault(re.sub(r"0x[0-9a-f]+|\d+", "0", each.text), (place, each.index))
    return list(places.values())


def _filled(text: str, groups: Mapping[str, str]) -> str:
    return re.sub(GROUP, lambda found: groups.get(found[1], ""), chosen(text, groups))
